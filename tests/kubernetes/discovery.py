"""What a client asks before it asks for objects: versions, groups and resources."""

from __future__ import annotations

from tests.kubernetes.resources import Kinds, Object

VERSION: Object = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.0",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "go1.26.0",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def discover(kinds: Kinds, path: str) -> Object | str | None:
    """The answer at a path that is no resource; `None`: there is none (404, plain text)."""
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["version"]:
            return VERSION
        case ["healthz" | "livez" | "readyz"]:
            return "ok"
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            groups = [_group(name, versions) for name, versions in kinds.groups().items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group]:
            versions = kinds.groups().get(group)
            if versions is None:
                return None
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, versions)
        case ["api", version]:
            return _resources(kinds, "", version)
        case ["apis", group, version]:
            return _resources(kinds, group, version)
    return None


def _group(name: str, versions: list[str]) -> Object:
    found = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": found, "preferredVersion": found[0]}


def _resources(kinds: Kinds, group: str, version: str) -> Object | None:
    found = []
    for kind in kinds.served.values():
        if (kind.group, kind.version) != (group, version):
            continue
        found.append(
            {
                "name": kind.plural,
                "singularName": kind.singular,
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": list(kind.verbs),
                "shortNames": list(kind.short),
            }
        )
        if kind.has_status:
            found.append(
                {
                    "name": f"{kind.plural}/status",
                    "singularName": "",
                    "namespaced": kind.namespaced,
                    "kind": kind.kind,
                    "verbs": ["get", "patch", "update"],
                }
            )
    if not found:
        return None
    name = f"{group}/{version}" if group else version
    body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name}
    return body | {"resources": found}
