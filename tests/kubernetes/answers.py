"""What the fake says when it refuses: Kubernetes `Status` objects, and the exception with one."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.resources import Kind, Object


def status(
    code: int,
    reason: str,
    message: str,
    *,
    details: Object | None = None,
    token: str | None = None,
) -> Object:
    """A `Status` object. `token`: where to go on with a list that has expired."""
    found: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {"continue": token} if token else {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return found | ({"details": details} if details else {})


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Object | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status(code, reason, message, details=details, token=token)


def not_found(kind: Kind, name: str) -> RefusedError:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return RefusedError(404, "NotFound", f'{kind.full_name} "{name}" not found', details=details)


def exists(kind: Kind, name: str) -> RefusedError:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    message = f'{kind.full_name} "{name}" already exists'
    return RefusedError(409, "AlreadyExists", message, details=details)


def conflict(kind: Kind, name: str, why: str = "") -> RefusedError:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    why = why or (
        "the object has been modified; "
        "please apply your changes to the latest version and try again"
    )
    message = f'Operation cannot be fulfilled on {kind.full_name} "{name}": {why}'
    return RefusedError(409, "Conflict", message, details=details)


def invalid(kind: Kind, name: str, causes: list[str]) -> RefusedError:
    """422, with one cause per complaint (`spec.selector: Required value`)."""
    details = {
        "name": name,
        "group": kind.group,
        "kind": kind.kind,
        "causes": [
            {
                "reason": "FieldValueInvalid",
                "message": cause.partition(": ")[2],
                "field": cause.partition(": ")[0],
            }
            for cause in causes
        ],
    }
    message = f'{kind.kind}.{kind.group} "{name}" is invalid: {"; ".join(causes)}'
    return RefusedError(422, "Invalid", message, details=details)


def bad_request(message: str) -> RefusedError:
    return RefusedError(400, "BadRequest", message)


def expired(version: object, current: object) -> RefusedError:
    return RefusedError(410, "Expired", f"too old resource version: {version} ({current})")
