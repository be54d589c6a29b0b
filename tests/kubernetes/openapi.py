"""OpenAPI v3, as much as kubectl reads before it applies: which kinds take which parameters."""

from __future__ import annotations

from tests.kubernetes.resources import Kind, Kinds, Object

ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def openapi(kinds: Kinds, path: str) -> Object | None:
    """The answer at `/openapi/v3` and below it; `None`: there is none."""
    parts = [part for part in path.split("/") if part]
    if parts[:2] != ["openapi", "v3"]:
        return None
    if len(parts) == 2:
        roots = sorted({_root(kind) for kind in kinds.served.values()})
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    root = "/".join(parts[2:])
    found = [kind for kind in kinds.served.values() if _root(kind) == root]
    return _document(root, found) if found else None


def _root(kind: Kind) -> str:
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def _document(root: str, kinds: list[Kind]) -> Object:
    paths: Object = {}
    for kind in kinds:
        home = f"/{root}/namespaces/{{namespace}}" if kind.namespaced else f"/{root}"
        operations = {"patch": "patch", "put": "update"} if "patch" in kind.verbs else {}
        paths[f"{home}/{kind.plural}/{{name}}"] = {
            method: _operation(kind, verb) for method, verb in operations.items()
        }
        paths[f"{home}/{kind.plural}"] = {"post": _operation(kind, "post")}
    schemas = {_schema_name(kind): {**ANYTHING, **_marked(kind)} for kind in kinds}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.37.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(kind: Kind, verb: str) -> Object:
    query = {"in": "query", "schema": {"type": "string", "uniqueItems": True}}
    names = ("dryRun", "fieldManager", "fieldValidation")
    schema = {"$ref": f"#/components/schemas/{_schema_name(kind)}"}
    return {
        "operationId": f"{verb}{kind.kind}",
        "parameters": [{"name": name, **query} for name in names],
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": schema}}}
        },
        "x-kubernetes-action": verb,
        "x-kubernetes-group-version-kind": _gvk(kind),
    }


def _marked(kind: Kind) -> Object:
    return {"x-kubernetes-group-version-kind": [_gvk(kind)]}


def _gvk(kind: Kind) -> Object:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _schema_name(kind: Kind) -> str:
    return ".".join((*reversed((kind.group or "core").split(".")), kind.version, kind.kind))
