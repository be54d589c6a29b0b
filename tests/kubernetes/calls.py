"""What a request asks for, read off its method, path and query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kubernetes.authority import Attributes
from tests.kubernetes.resources import YES
from tests.kubernetes.selectors import selected_name

WITH_NAME = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
WITHOUT = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}
SUBRESOURCES = ("status", "finalize", "scale")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as it came in."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    verb: str
    """As RBAC has it, or `discover` for what is no resource; '' when the method is none."""
    group: str = ""
    version: str = ""
    plural: str = ""
    namespace: str | None = None
    name: str = ""
    part: str = ""
    """The subresource, mostly ''."""
    at_s: float = field(default=0.0, compare=False)
    """When, on the monotonic clock."""

    def wanted(self) -> Attributes:
        """What an authorizer is asked."""
        if self.verb == "discover":
            return Attributes("get", path=self.path)
        name = self.name
        if self.verb in ("list", "watch", "deletecollection"):
            name = selected_name(self.query.get("fieldSelector")) or ""
        resource = f"{self.plural}/{self.part}" if self.part else self.plural
        return Attributes(
            self.verb,
            group=self.group,
            resource=resource,
            namespace=self.namespace or "",
            name=name,
        )


def read_call(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], at_s: float
) -> Call:
    """The reverse of how Kubernetes builds its paths."""
    parts = [part for part in path.split("/") if part]
    root = parts[0] if parts else ""
    skip = {"api": 2, "apis": 3}.get(root, 0)
    if not skip or len(parts) <= skip:
        return Call(method, path, query, headers, "discover", at_s=at_s)
    group, version = ("", parts[1]) if root == "api" else (parts[1], parts[2])
    rest = parts[skip:]
    namespace = None
    if rest[0] == "watch":  # the old way to say it
        rest, query = rest[1:], {**query, "watch": "true"}
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in SUBRESOURCES:
        namespace, rest = rest[1], rest[2:]
    plural, name, part = [*rest, "", "", ""][:3]
    verb = (WITH_NAME if name else WITHOUT).get(method, "")
    if verb in ("list", "get") and query.get("watch") in YES:
        verb = "watch"
    return Call(
        method, path, query, headers, verb, group, version, plural, namespace, name, part, at_s
    )
