"""What the custom resources must look like: schemas by hand, with defaults and CEL rules.

A schema is a dict with the words of OpenAPI v3 that are needed, and `rules`: (predicate, message)
pairs that stand for the CRD's CEL expressions. As on a real server, defaults are filled in first,
unknown fields are dropped (or refused, when the client asks for strict validation), then types
and limits are checked, and rules are only asked about what passed those.

Source: the CRDs of gateway-api-inference-extension v1.5 and llm-d-router v0.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.kubernetes.answers import invalid
from tests.kubernetes.resources import OBJECTIVE, POOL, POOL_GROUP, REWRITE, Kind, Object

Schema = Mapping[str, Any]

_GROUP = r"$|[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_KIND = r"[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"
_LABEL_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_UNKNOWN = {"lastTransitionTime": "1970-01-01T00:00:00Z", "status": "Unknown", "reason": "Pending"}


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def _text(low: int = 0, high: int = 1 << 20, **words: Any) -> Schema:
    return {"type": "string", "minLength": low, "maxLength": high, **words}


def _number(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, low: int = 0, high: int = 1 << 20, **words: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **words}


def _reference(group: str, kind: str, **more: Schema) -> Schema:
    return _object(
        "name",
        group=_text(0, 253, pattern=_GROUP, default=group),
        kind=_text(1, 63, pattern=_KIND, default=kind),
        name=_text(1, 253),
        **more,
    )


def _conditions(default: str | None) -> Schema:
    one = _object(
        "lastTransitionTime message reason status type",
        lastTransitionTime=_text(1),
        message=_text(0, 32768),
        observedGeneration=_number(0, (1 << 63) - 1),
        reason=_text(1, 1024),
        status=_text(enum=("True", "False", "Unknown")),
        type=_text(1, 316),
    )
    if default is None:
        return _list(one, high=8)
    waiting = {**_UNKNOWN, "type": default, "message": "Waiting for controller"}
    return _list(one, high=8, default=[waiting])


def _custom(spec: Schema, status: Schema) -> Schema:
    return _object("spec", spec=spec, status=status)


_PORT = _number(1, 65535)
_PICKER = {
    **_reference(
        "",
        "Service",
        port=_object("number", number=_PORT),
        failureMode=_text(enum=("FailOpen", "FailClose"), default="FailClose"),
    ),
    "rules": [
        (
            lambda ref: ref["kind"] != "Service" or "port" in ref,
            "port is required when kind is 'Service' or unspecified (defaults to 'Service')",
        )
    ],
}
_PORTS = _list(
    _object("number", number=_PORT),
    1,
    8,
    rules=[
        (
            lambda ports: len({each["number"] for each in ports}) == len(ports),
            "port number must be unique",
        )
    ],
)
_LABELS = {
    "type": "object",
    "additionalProperties": _text(0, 63, pattern=_LABEL_VALUE),
    "minProperties": 1,
    "maxProperties": 64,
}
_PARENT = _object(
    "parentRef",
    parentRef=_reference("gateway.networking.k8s.io", "Gateway", namespace=_text(1, 63)),
    controllerName=_text(1, 253),
    conditions=_conditions(None),
)
_POOL_REF = _reference(POOL_GROUP, "InferencePool")
_RULE = _object(
    matches=_list(
        _object(
            "model",
            model=_object("value", type=_text(enum=("Exact",), default="Exact"), value=_text(1)),
        )
    ),
    targets=_list(
        _object("modelRewrite", modelRewrite=_text(), weight=_number(1, 1_000_000)), 1
    ),
)  # fmt: skip

SCHEMAS: Mapping[str, Schema] = {
    POOL.plural: _custom(
        _object(
            "selector targetPorts",
            selector=_object("matchLabels", matchLabels=_LABELS),
            targetPorts=_PORTS,
            appProtocol=_text(enum=("http", "kubernetes.io/h2c"), default="http"),
            endpointPickerRef=_PICKER,
        ),
        _object(parents=_list(_PARENT, high=32)),
    ),
    OBJECTIVE.plural: _custom(
        _object("poolRef", poolRef=_POOL_REF, priority=_number(-(1 << 31), (1 << 31) - 1)),
        _object(conditions=_conditions("Ready")),
    ),
    REWRITE.plural: _custom(
        _object("poolRef rules", poolRef=_POOL_REF, rules=_list(_RULE)),
        _object(conditions=_conditions("Accepted")),
    ),
}
"""By plural: both groups of a plural share one."""


def check(kind: Kind, obj: Object) -> list[str]:
    """Fill in the defaults and drop unknown fields, in place.

    Returns: paths of the fields that were dropped.
    Raises: RefusedError 422, with every complaint as a cause.
    """
    walk = _Walk()
    for name, schema in SCHEMAS[kind.plural]["properties"].items():
        if name in obj:
            obj[name] = walk.visit(schema, obj[name], name)
    if "spec" not in obj:
        walk.causes.append("spec: Required value")
    for name in set(obj) - {"apiVersion", "kind", "metadata", "spec", "status"}:
        walk.dropped.append(name)
        del obj[name]
    if walk.causes:
        raise invalid(kind, obj["metadata"]["name"], walk.causes)
    return walk.dropped


class _Walk:
    """One pass over an object: collects what is wrong and what was dropped."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.dropped: list[str] = []

    def visit(self, schema: Schema, value: Any, path: str) -> Any:
        """The value with its defaults; what is wrong with it is in `causes`."""
        wanted, found = schema["type"], _type(value)
        if wanted != found:
            shown = found if found == "null" else f'"{found}"'
            text = f"{path} in body must be of type {wanted}: {shown}"
            self.causes.append(f"{path}: Invalid value: {shown}: {text}")
            return value
        before = len(self.causes)
        if wanted == "object":
            value = self._object(schema, value, path)
        elif wanted == "array":
            items = schema["items"]
            value = [self.visit(items, each, f"{path}[{i}]") for i, each in enumerate(value)]
            self._size(schema, len(value), path, "Items")
        elif wanted == "string":
            self._string(schema, value, path)
        elif not schema["minimum"] <= value <= schema["maximum"]:
            rule = f"should be in {schema['minimum']}..{schema['maximum']}"
            self.causes.append(f"{path}: Invalid value: {value}: {path} in body {rule}")
        if len(self.causes) == before:
            broken = [message for holds, message in schema.get("rules", ()) if not holds(value)]
            self.causes += [f'{path}: Invalid value: "{wanted}": {each}' for each in broken]
        return value

    def _object(self, schema: Schema, value: Object, path: str) -> Object:
        properties = schema.get("properties")
        if properties is None:
            self._size(schema, len(value), path, "Properties")
            one = schema["additionalProperties"]
            return {k: self.visit(one, v, f"{path}.{k}") for k, v in value.items()}
        filled = {k: v for k, v in value.items() if k in properties}
        self.dropped += [f"{path}.{k}" for k in value if k not in properties]
        for name, each in properties.items():
            if "default" in each and filled.get(name) is None:
                filled[name] = each["default"]
        missing = [name for name in schema["required"] if name not in filled]
        self.causes += [f"{path}.{name}: Required value" for name in missing]
        return {k: self.visit(properties[k], v, f"{path}.{k}") for k, v in filled.items()}

    def _string(self, schema: Schema, value: str, path: str) -> None:
        self._size(schema, len(value), path, "Length")
        choice = schema.get("enum")
        if choice and value not in choice:
            names = ", ".join(f'"{each}"' for each in choice)
            self.causes.append(f'{path}: Unsupported value: "{value}": supported values: {names}')
        if not re.match(schema.get("pattern", ""), value):
            text = f"{path} in body should match '^{schema['pattern']}'"
            self.causes.append(f'{path}: Invalid value: "{value}": {text}')

    def _size(self, schema: Schema, size: int, path: str, word: str) -> None:
        low, high = schema.get(f"min{word}", 0), schema.get(f"max{word}", 1 << 62)
        if size > high:
            self.causes.append(f"{path}: Too many: {size}: must have at most {high}")
        if size < low:
            text = f"{path} in body should have at least {low}"
            self.causes.append(f"{path}: Invalid value: {size}: {text}")


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    return "null" if value is None else names.get(type(value), "number")
