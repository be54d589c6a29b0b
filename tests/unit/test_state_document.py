"""docs/debug-state.md tells every field of the page, in a unit that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from epp.state_document import state_page, unit_of
from tests.unit.test_explain import COST, decider_of, prompt, send_to
from tests.unit.test_explain_command import state_of


def fields_of_page() -> dict[str, list[str]]:
    """By the title of a section, the names in its table."""
    found: dict[str, list[str]] = {}
    for section in state_page().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        names = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]* \| .{8,} \|$", text, re.MULTILINE)
        for path in title.replace("`", "").split(", "):
            found[path] = names
    return found


def objects_in(value: object, path: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Each object of known names in the JSON, and how the page calls its place."""
    if isinstance(value, dict):
        if path == "prefix_blocks":
            for each in value.values():
                yield from objects_in(each, f"{path}.*")
        elif not path.endswith((".labels", ".attributes", ".shared", ".parameters", "objectives")):
            yield path, value
            for name, each in value.items():
                yield from objects_in(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for each in value:
            yield from objects_in(each, f"{path}[]")


def test_every_field_of_the_json_is_in_the_page_with_its_meaning() -> None:
    decider = decider_of(COST)
    send_to(decider, 2, prompt(1000, "i", 1000))
    page, told = fields_of_page(), set()
    for path, value in objects_in(json.loads(state_of(decider))):
        assert page[path or "The page"] == [*value], path
        told.add(path)
    assert {
        "",
        "profile.cost",
        "endpoints[].load",
        "endpoints[].learned",
        "prefix_blocks.*",
    } <= told


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("backlog_s", "s"),
        ("token_s", "s per token"),
        ("prefill_tokens_per_s", "tokens per s"),
        ("kv_usage_ratio", "ratio"),
        ("work_s_mean", "s"),
        ("held_blocks_max", "blocks"),
        ("foreign_waiting", "requests"),
        ("last_pick_number", ""),
    ],
)
def test_units_are_told_by_the_names_of_fields(name: str, unit: str) -> None:
    assert unit_of(name, "number or null") == unit
    assert unit_of(name, "boolean") == ""
