"""docs/configuration.md, made from the structs: keys, types, ranges, defaults and their docstrings.

`python -m epp.config.document docs/configuration.md` writes the page; a test fails when the file
differs. A field's docstring is the text under it in the source, which only the source has."""

from __future__ import annotations

import ast
import inspect as python_inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from epp.config.parameters import BUILT
from epp.config.plugins import PARAMETERS, canonical
from epp.config.profiles import DEFAULT_PICKER, DEFAULT_PROFILE, DEFAULT_SCORERS
from epp.config.render import plain
from epp.config.schema import EndpointPickerConfig, PluginRef, SaturationDetector
from epp.config.units import MetricSpec, Quantity, Seconds
from epp.core.registry import DEPRECATED, FILTERS, PICKERS, REFERENCE, SCORERS

_INTRO = """\
# Configuration

<!-- Made by `python -m epp.config.document docs/configuration.md`; do not edit. -->

One YAML (or JSON) file, the `EndpointPickerConfig` of llm-d's EPP. No file is needed: without one,
and without profiles and scheduling plugins in it, the profile `{profile}` scores with
{scorers}; `{picker}` takes the best.
The first three and their weights are the reference's; the last is ours: between two scrapes it sees
the requests just sent, so a burst spreads.

`epp check` prints the file with every default filled in, and the notices: deprecated names, keys
without effect. Examples to start from are in `deploy/config/`.

## How it is read

- Strictly. An unknown key, a wrong type, a value out of range, or a name that nothing has stops the
  start; the error says where (`$.plugins[2].parameters.threshold`) and what to do. What the
  reference EPP knows but is not built here is refused by name, never ignored.
- Booleans are `true` and `false`. `yes`, `on`, `True` and `"true"` are text, and where a boolean is
  expected, text is refused.
- A duration is a number with a unit; several in a row add up: `200ms`, `60s`, `1m30s`; `0s` is
  zero.
- A quantity is a whole number, plain or with a suffix: `1000`, `5k`, `10Gi`.
- A key may stand once in a mapping. Outside `parameters`, a key with nothing after it counts as not
  written.
- Anchors and aliases work; merge keys (`<<`) and tags (`!x`) do not. At most 1 MiB, one document.
"""

_DIFFERENCES = {
    "A file without profiles and scheduling plugins picks by chance": "It gets the default profile",
    "A profile without picker takes any of several declared ones": "An error asks to name one",
    "Parsers read bodies, and claim paths, each in its own way": "Bodies are always read the same "
    "way; the list says which APIs' bodies are read, all others are routed by load",
    "Without a catch-all parser, other paths are refused": "They are routed by load",
    "The default metrics source is added next to one with another name": "It is added only where "
    "there is no source",
    "Several prefix or in-flight producers side by side": "One of each",
    "Requests of negative priority are shed when the pool is saturated": "Not built here yet",
    "Experimental plugins need a flag": "What is built here needs none",
}

_REFERENCES = (PluginRef, SaturationDetector)
"""Structs of one key, described where they are used."""
_SECTION = re.compile(r"(Reads|Returns|Cost|Source|Args|Raises): *(.*)")


def render() -> str:
    """The whole page."""
    scorers = ", ".join(f"`{type_}` (weight {weight:g})" for type_, weight in DEFAULT_SCORERS)
    intro = _INTRO.format(profile=DEFAULT_PROFILE, picker=DEFAULT_PICKER, scorers=scorers)
    blocks = [
        intro,
        "## The file\n",
        *_struct("Top level", EndpointPickerConfig, ""),
        "## Filters\n",
        *_plugins(FILTERS),
        "## Scorers\n\nEach scores every endpoint from 0 (worst) to 1 (best); a profile adds up "
        "score times weight.\n",
        *_plugins(SCORERS),
        "## Pickers\n",
        *_plugins(PICKERS),
        "## Other plugins\n",
        *_plugins(BUILT),
        "## Where this differs from the reference EPP\n",
        "| Reference | Here |\n|---|---|",
        *(f"| {there} | {here} |" for there, here in _DIFFERENCES.items()),
        "",
        _deprecated(),
        _not_built(),
    ]
    return "\n".join(blocks).rstrip() + "\n"


def _plugins(types: Iterable[str]) -> Iterator[str]:
    for type_ in types:
        if canonical(type_) == type_:
            kind = f" ({BUILT[type_][0]})" if type_ in BUILT else ""
            yield from _struct(f"`{type_}`{kind}", PARAMETERS[type_], "parameters")


def _struct(title: str, cls: type[Any], path: str) -> Iterator[str]:
    """A section for a struct and one for each struct in it, in reading order."""
    yield f"### {title}\n"
    yield _prose(python_inspect.getdoc(cls) or "")
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    if not info.fields:
        return
    texts = _field_docs(cls)
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    for field in info.fields:
        text = " ".join(texts[field.name].split()).replace("|", "\\|")
        yield f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} | {text} |"
    yield ""
    inner_paths: dict[type[Any], list[str]] = {}
    for field in info.fields:
        inner = _inner_struct(field.type)
        if inner is not None and inner not in _REFERENCES:
            is_list = isinstance(_bare(field.type), inspect.VarTupleType)
            inner_path = f"{path}.{field.encode_name}".lstrip(".") + ("[]" if is_list else "")
            inner_paths.setdefault(inner, []).append(inner_path)
    for inner, paths in inner_paths.items():
        yield from _struct(", ".join(f"`{p}`" for p in paths), inner, paths[0])


def _prose(doc: str) -> str:
    """A docstring as Markdown: its text, then its `Reads:` and the like as a list."""
    paragraphs: list[str] = [""]
    for line in doc.splitlines():
        if section := _SECTION.fullmatch(line):
            paragraphs.append(f"- {section[1]}: {section[2]}")
        elif not line.strip() and not paragraphs[-1].startswith("- "):
            paragraphs.append("")
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {line.strip()}".strip()
    kept = [p for p in paragraphs if p]
    text = "".join(("\n" if p.startswith("- ") else "\n\n") + p for p in kept)
    return text.replace("\n- ", "\n\n- ", 1).strip() + "\n"


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(python_inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Field name -> the docstring under it."""
    body = _classes(cls.__module__)[cls.__name__].body
    docs = {}
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = str(following.value.value)
    return docs


def _bare(type_: inspect.Type) -> inspect.Type:
    if isinstance(type_, inspect.UnionType):
        return _bare(next(t for t in type_.types if not isinstance(t, inspect.NoneType)))
    return _bare(type_.type) if isinstance(type_, inspect.Metadata) else type_


def _inner_struct(type_: inspect.Type) -> type[Any] | None:
    type_ = _bare(type_)
    if isinstance(type_, inspect.VarTupleType):
        type_ = _bare(type_.item_type)
    return type_.cls if isinstance(type_, inspect.StructType) else None


def _type(type_: inspect.Type) -> str:
    match type_ := _bare(type_):
        case inspect.BoolType():
            return "boolean"
        case inspect.IntType() | inspect.FloatType():
            words = "whole number" if isinstance(type_, inspect.IntType) else "number"
            return words + _range(type_.ge, type_.le)
        case inspect.LiteralType():
            return " or ".join(f"`{value}`" for value in sorted(type_.values, key=str))
        case inspect.EnumType():
            return " or ".join(f"`{member.value}`" for member in type_.cls)
        case inspect.VarTupleType():
            return f"list of {_type(type_.item_type)}"
        case inspect.DictType():
            return "keys with values"
        case inspect.StructType():
            return "`pluginRef: name`" if type_.cls in _REFERENCES else "keys below"
        case inspect.CustomType():
            return _custom(type_.cls)
    return "text"


def _custom(cls: type) -> str:
    if issubclass(cls, MetricSpec):
        return "metric"
    assert issubclass(cls, Seconds | Quantity)
    name = "duration" if issubclass(cls, Seconds) else "quantity"
    return name if cls in (Seconds, Quantity) else f"{name}, {cls.span()}"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f", {low:g} to {high:g}" if high < 1e6 else f", {low:g} to {high:.0f}"
    return f", >= {low:g}" if low is not None else ""


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is None or value is msgspec.NODEFAULT or isinstance(value, msgspec.Struct):
        return ""
    value = plain(value)
    if value in ("", [], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _deprecated() -> str:
    lines = [
        f"| `{name}` | `{d.replacement}` | {d.note} |"
        for name, d in DEPRECATED.items()
        if d.replacement in PARAMETERS
    ]
    return "\n".join(
        [
            "## Deprecated names\n",
            "Read, with a notice.\n",
            "| Type | Use | How |\n|---|---|---|",
            *lines,
            "",
        ]
    )


def _not_built() -> str:
    by_kind: dict[str, list[str]] = {}
    for name, kind in REFERENCE.items():
        if name not in PARAMETERS and name not in DEPRECATED:
            by_kind.setdefault(kind, []).append(f"`{name}`")
    lines = [f"| {kind} | {', '.join(names)} |" for kind, names in by_kind.items()]
    return "\n".join(
        [
            "## In the reference EPP, not built here yet\n",
            "Refused by name. So are the feature gate `flowControl`, the data layer's peer "
            "discovery and cross-replica sync, and more than one profile.\n",
            "| Kind | Plugin types |\n|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
