"""Plain values to structs, with errors people can act on.

msgspec decodes strictly and stops at the first problem; its message is rewritten here: the full
path, what was expected in the file's own words, what stood there, what to do, and the nearest
known word for a misspelt one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from epp.config.text import key_path
from epp.config.units import MetricSpec, Quantity, Seconds, shown
from epp.core.errors import ConfigError

T = TypeVar("T")
_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[([0-9]+)\]|\[\.\.\.\]")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(.*?)`(.*)", re.DOTALL)
_WORDS = {
    "bool": ("a boolean", "write true or false, without quotes"),
    "int": ("a whole number", "write digits, without quotes"),
    "float": ("a number", "write digits, without quotes"),
    "str": ("text", "put it in quotes"),
    "array": ("a list", "write one line per item, each beginning with `- `"),
    "object": ("keys with values", "write them as `key: value`"),
}


def decode(value: Any, type_: type[T], *, path: str) -> T:
    """Decode strictly.

    Args:
        value: plain values, as `read_yaml` gives them.
        path: JSON path of `value`, which every error's path begins with.
    Raises: ConfigError.
    """
    try:
        return msgspec.convert(value, type_, strict=True, dec_hook=_parse)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value, type_, path) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean \\`x\\`?` for the nearest known word, or nothing."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(word.lower()[:100], by_lower, n=1, cutoff=0.7)
    return f"; did you mean `{by_lower[near[0]]}`?" if near else ""


def _parse(type_: type, value: Any) -> Any:
    if issubclass(type_, Seconds | Quantity | MetricSpec):
        return type_.parse(value)
    raise NotImplementedError(f"{type_} cannot be read from YAML")


def _explain(message: str, value: Any, type_: type, path: str) -> ConfigError:
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    inner = match["path"] or ""
    info, value = _at(inspect.type_info(type_), value, inner)
    path += inner.partition("[...]")[0]
    text = match["text"]
    if field := _FIELD.fullmatch(text):
        return _field_error(field[2], info, path, unknown="unknown" in field[1])
    if expected := _EXPECTED.fullmatch(text):
        text = _expectation(expected[1], expected[2], value)
    elif text.startswith("Invalid enum value"):
        text = f"{shown(value)} is not a choice{_choices(info, value)}"
    return ConfigError(text, path=path)


def _field_error(key: str, info: inspect.Type, path: str, *, unknown: bool) -> ConfigError:
    if not unknown:
        return ConfigError(f"the key `{key}` is missing: add it", path=path)
    known = [f.encode_name for f in getattr(info, "fields", ())]
    listed = f"known here: {', '.join(known)}" if known else "no key is known here"
    message = f"unknown key `{key}`{did_you_mean(key, known) or ': remove it'} ({listed})"
    return ConfigError(message, path=key_path(path, key))


def _expectation(expected: str, rest: str, value: Any) -> str:
    kind = expected.replace(" | null", "")
    words, remedy = _WORDS.get(kind, (f"`{kind}`", "see docs/configuration.md"))
    got = "keys with values" if isinstance(value, dict) else shown(value)
    got = "a list" if isinstance(value, list) else got
    if rest and not rest.startswith(", got"):  # a range, a length or a pattern
        return f"expected {words}{rest}, got {got}: choose one that is"
    if value is None:
        remedy = "give it a value or remove the key"
    elif isinstance(value, float) and kind == "int":
        remedy = "write it without a fraction"
    return f"expected {words}, got {got}: {remedy}"


def _choices(info: inspect.Type, value: Any) -> str:
    values = [str(v) for v in getattr(info, "values", ())]
    if isinstance(info, inspect.EnumType):
        values = [str(member.value) for member in info.cls]
    near = did_you_mean(value, values) if isinstance(value, str) else ""
    return f": write one of {', '.join(values)}{near}"


def _at(info: inspect.Type, value: Any, path: str) -> tuple[inspect.Type, Any]:
    """Type and value at a path below them; the value is `None` where the path does not say."""
    for key, index in _STEP.findall(path):
        info = _bare(info)
        if key:
            fields = {f.encode_name: f.type for f in getattr(info, "fields", ())}
            info = fields.get(key, inspect.AnyType())
            value = value.get(key) if isinstance(value, dict) else None
        elif index:
            info = getattr(info, "item_type", inspect.AnyType())
            value = value[int(index)] if isinstance(value, list) else None
        else:
            info = getattr(info, "value_type", inspect.AnyType())
            value = _only(value)
    return _bare(info), value


def _only(value: Any) -> Any:
    values = list(value.values()) if isinstance(value, dict) else []
    return values[0] if len(values) == 1 else None


def _bare(info: inspect.Type) -> inspect.Type:
    """The type without `| None` and without annotations."""
    while True:
        if isinstance(info, inspect.UnionType):
            info = next(t for t in info.types if not isinstance(t, inspect.NoneType))
        elif isinstance(info, inspect.Metadata):
            info = info.type
        else:
            return info
