"""Whatever stands in the file, the answer is a plan or a `ConfigError` that says where."""

from __future__ import annotations

import copy
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings, strategies as st

from epp.config import Plan, effective_yaml, load_config, resolve
from epp.config.plugins import PARAMETERS
from epp.config.schema import EndpointPickerConfig, Limits
from epp.config.text import read_yaml, write_yaml
from epp.config.units import Quantity, Seconds
from epp.core.errors import ConfigError
from epp.core.registry import REFERENCE

DATA = Path(__file__).parents[1] / "unit" / "data" / "config" / "accepted"
VALID = [read_yaml(path.read_text()) for path in sorted(DATA.glob("*.yaml"))]
KEYS = sorted(
    {
        key
        for cls in (EndpointPickerConfig, Limits, *PARAMETERS.values())
        for key in cls.__struct_encode_fields__
    }
    | {"type", "name", "pluginRef", "parameters", "weight", "plugins", "extractors"}
)
HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}

# Invisible characters are refused; beyond the basic plane JSON writes surrogate pairs, which YAML
# does not know.
characters = st.characters(
    max_codepoint=0xFFFD, exclude_categories=["C", "Z"], include_characters=" "
)
texts = st.text(characters, max_size=12) | st.sampled_from(
    [*KEYS, *REFERENCE, "60s", "1Gi", "yes", "a{b=c}"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=4)
    ),
    max_leaves=20,
)


def outcome(text: str) -> Plan | ConfigError:
    """The plan or the error; anything else fails the test."""
    try:
        return resolve(load_config(text))
    except ConfigError as error:
        return error


@settings(deadline=None)
@given(text=st.text(max_size=200) | st.text("ab:-[]{}&*!|>'\"#%@`,?~ \n\t01.", max_size=60))
def test_any_text_gives_a_plan_or_a_config_error(text: str) -> None:
    outcome(text)


@settings(deadline=None)
@given(value=values)
def test_any_value_gives_a_plan_or_a_config_error(value: object) -> None:
    outcome(json.dumps(value))


@settings(deadline=None, max_examples=100)
@given(sections=st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_any_section_gives_a_plan_or_a_config_error(sections: dict[str, Any]) -> None:
    outcome(json.dumps({**HEAD, **sections}))


@settings(deadline=None, max_examples=100)
@given(type_=st.sampled_from(sorted(PARAMETERS)), data=st.data())
def test_any_parameters_give_a_plan_or_a_config_error(type_: str, data: st.DataObject) -> None:
    keys = sorted(PARAMETERS[type_].__struct_encode_fields__) or ["x"]
    parameters = data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=4))
    result = outcome(json.dumps({**HEAD, "plugins": [{"type": type_, "parameters": parameters}]}))
    if isinstance(result, ConfigError):
        assert result.path.startswith("$.plugins")


# Mutations


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, dict | list):
            found += places(item, (*path, key))
    return found


def mutate(document: Any, place: tuple[Any, ...], data: st.DataObject) -> None:
    """Delete, rename, copy or retype what stands at a place."""
    parent = document
    for step in place[:-1]:
        parent = parent[step]
    key = place[-1]
    how = data.draw(st.sampled_from(["delete", "rename", "retype", "retype"]))
    if how == "retype":
        parent[key] = data.draw(values)
    elif how == "delete" or isinstance(parent, list):
        del parent[key]
    else:
        cut = data.draw(st.integers(0, len(key)))
        parent[key[:cut] + data.draw(st.sampled_from(["", "x", "."])) + key[cut + 1 :]] = (
            parent.pop(key)
        )


def exists(document: Any, path: str) -> bool:
    """Whether a JSON path names something in the document, or a key missing from something."""
    steps = re.findall(r"\.([^.\[]+)|\[(\d+)\]|\[(\".*?\")\]", path.removeprefix("$"))
    for last, (key, index, quoted) in enumerate(steps, start=1 - len(steps)):
        if not isinstance(document, dict | list):
            return False
        step: Any = int(index) if index else key or quoted
        known = document if isinstance(document, dict) else range(len(document))
        if step not in known:
            return last == 0
        document = document[step]
    return True


@settings(deadline=None, max_examples=150)
@given(document=st.sampled_from(VALID), data=st.data())
def test_a_mutated_configuration_resolves_or_says_where_it_is_wrong(
    document: Any, data: st.DataObject
) -> None:
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(document, data.draw(st.sampled_from(places(document))), data)
        if not document:
            break
    result = outcome(json.dumps(document))
    if isinstance(result, ConfigError):
        assert exists(document, result.path), result
        assert f" - at `{result.path}`" in str(result)
        assert str(result).isprintable()
    else:
        again = resolve(load_config(effective_yaml(result)))
        assert msgspec.structs.replace(again, notices=()) == msgspec.structs.replace(
            result, notices=()
        )


def test_the_mutation_check_can_tell_a_wrong_path() -> None:
    assert exists({"a": [{"b": 1}]}, "$.a[0].b")
    assert exists({"a": [{"b": 1}]}, "$.a[0].missing")
    assert not exists({"a": [{"b": 1}]}, "$.a[1].b")
    assert not exists({"a": [{"b": 1}]}, "$.missing.b")


# Text and units


@settings(deadline=None, max_examples=50)
@given(value=st.dictionaries(texts, values, max_size=4))
def test_json_is_read_as_json_reads_it(value: object) -> None:
    assert read_yaml(json.dumps(value)) == value


@settings(deadline=None)
@given(value=values)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read_yaml(write_yaml(value)) == value


units = st.sampled_from(
    [("ns", 1), ("us", 10**3), ("ms", 10**6), ("s", 10**9), ("m", 60 * 10**9), ("h", 3600 * 10**9)]
)


@settings(deadline=None)
@given(parts=st.lists(st.tuples(st.decimals(0, 40, places=3), units), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[Any]) -> None:
    text = "".join(f"{number}{unit}" for number, (unit, _) in parts)
    ns = int(sum(Fraction(number) * factor for number, (_, factor) in parts))
    assert Seconds.parse(text) == ns / 1e9
    assert Seconds.parse(Seconds.parse(text).written()) == Seconds.parse(text)


@settings(deadline=None)
@given(ns=st.integers(0, 604_800 * 10**9))
def test_a_written_duration_is_read_back(ns: int) -> None:
    seconds = Seconds(ns / 1e9)
    assert Seconds.parse(seconds.written()) == seconds


@settings(deadline=None)
@given(number=st.integers(0, 2**63 - 1) | st.integers(0, 2**20).map(lambda n: n << 30))
def test_a_written_quantity_is_read_back(number: int) -> None:
    assert Quantity.parse(Quantity(number).written()) == number
