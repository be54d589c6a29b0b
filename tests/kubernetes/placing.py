"""Where an object belongs, by its metadata and the path of the request."""

from __future__ import annotations

import re
from typing import Any

from tests.kubernetes.answers import bad_request, invalid
from tests.kubernetes.resources import Kind, Object

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
NAME_MAX = 253


def as_object(found: Any) -> Object:
    """What was decoded, as an object with metadata. Raises: RefusedError 400 when it is none."""
    if not isinstance(found, dict):
        raise bad_request("couldn't get version/kind; json parse error: not an object")
    if found.get("metadata") is None:
        found["metadata"] = {}
    for name in ("metadata", "spec"):
        if not isinstance(found.get(name) or {}, dict):
            raise bad_request(f"json: cannot unmarshal into Go struct field .{name}")
    return found


def place(
    kind: Kind, obj: Object, namespace: str | None, name: str | None = None
) -> tuple[Kind, str, str]:
    """The key of an object; its kind, namespace and name are filled in from the path.

    Args:
        namespace: of the path; `None`: it has none, the object says it or lives in `default`.
        name: of the path; `None`: it has none.
    Raises: RefusedError 400 when the body and the path disagree, 422 when the name is none.
    """
    obj.setdefault("apiVersion", kind.api_version)
    obj.setdefault("kind", kind.kind)
    if (obj["apiVersion"], obj["kind"]) != (kind.api_version, kind.kind):
        raise bad_request(
            f"the object provided is unrecognized (must be of type {kind.kind}): "
            f"{obj['apiVersion']} {obj['kind']}"
        )
    meta = obj.setdefault("metadata", {})
    _check_maps(meta)
    home = _home(kind, meta, namespace)
    found = meta.setdefault("name", name or "")
    if name is not None and found != name:
        raise bad_request(
            f"the name of the object ({found}) does not match the name on the URL ({name})"
        )
    if not isinstance(found, str) or len(found) > NAME_MAX or not _NAME.fullmatch(found):
        why = f'metadata.name: Invalid value: "{found}": a lowercase RFC 1123 subdomain is needed'
        raise invalid(kind, str(found), [why])
    return kind, home, found


def _check_maps(meta: Object) -> None:
    """Raises: RefusedError 400 for labels or annotations that do not map text to text."""
    for name in ("labels", "annotations"):
        found = meta.get(name) or {}
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise bad_request(f"json: cannot unmarshal into Go struct field ObjectMeta.{name}")


def _home(kind: Kind, meta: Object, namespace: str | None) -> str:
    if not kind.namespaced:
        return ""
    home = meta.setdefault("namespace", namespace or "default")
    if namespace is not None and home != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the "
            f"request ({home} and {namespace})"
        )
    return str(home)
