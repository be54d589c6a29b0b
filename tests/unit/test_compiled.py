"""The modules that may be compiled: they hold nothing that a compiled build would change."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.build import compiled
from epp.core import structs

ROOT = Path(__file__).parents[2]
CARRIED = {"Frozen": {"frozen", "kw_only"}, "ByIdentity": {"eq", "kw_only"}}
"""Base of a struct -> keywords it may have: what the base carries, and what only type checkers
and callers of the constructor see."""


def listed() -> list[str]:
    """`COMPILED` of setup.py, which cannot be imported without building."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py lists no COMPILED")


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def complaints(source: str) -> Iterator[str]:
    """What a module that may be compiled must not contain."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            allowed = set().union(*(CARRIED.get(base, set()) for base in bases))
            lost = {str(keyword.arg) for keyword in node.keywords} - allowed
            if lost:
                yield f"{node.name}: mypyc drops {', '.join(sorted(lost))}"
            if "Plugin" in bases:
                yield f"{node.name}: its parameters are decoded by annotations mypyc drops"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "msgspec.field":
            yield "msgspec.field has another type than its field"


@pytest.mark.parametrize("path", listed())
def test_a_module_that_may_be_compiled_holds_nothing_that_compiling_drops(path):
    assert list(complaints((ROOT / path).read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "class A(msgspec.Struct, frozen=True): pass",
        "class A(Frozen, frozen=True, gc=False): pass",
        "class A(ByIdentity, frozen=True): pass",
        "class A(Plugin): pass",
        "class A(Frozen, frozen=True):\n    b: list[int] = msgspec.field(default_factory=list)",
    ],
)
def test_what_compiling_drops_is_noticed(source):
    assert list(complaints(source))


def test_what_the_bases_carry_reaches_structs_without_keywords():
    class Value(structs.Frozen):
        number: int

    class Thing(structs.ByIdentity):
        number: int

    with pytest.raises(AttributeError):
        Value(1).number = 2
    assert Thing(1) != Thing(1)
    assert hash(Thing(1))


def test_a_build_is_compiled_as_a_whole_or_not_at_all():
    files = {path: importlib.import_module(module_of(path)).__file__ or "" for path in listed()}
    assert {file.endswith(".py") for file in files.values()} == {not compiled()}
