"""The registry: names, tables and the classes behind them agree."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import msgspec
import pytest

from epp.core import filters, pickers, scorers
from epp.core.model import Plugin
from epp.core.registry import (
    DEPRECATED,
    FILTERS,
    NOT_BUILT,
    PICKERS,
    REFERENCE,
    SCORERS,
    Kind,
)

TABLES = {Kind.FILTER: FILTERS, Kind.SCORER: SCORERS, Kind.PICKER: PICKERS}
OURS = [(kind, name) for kind, table in TABLES.items() for name in table]
BOTH = {"context-length-aware"}
"""Filters that score too, each a class of its own in either table."""
REQUIRED = {
    "by-label": "label",
    "utilization-filter": "conditions",
    "endpoint-attribute-filter": "attribute",
    "endpoint-attribute-scorer": "attributeKey",
    "header-label-affinity-scorer": "headerName",
}
"""The first parameter that a type cannot be made without."""


def plugins_in(package: ModuleType) -> set[type[Plugin]]:
    """The plugin classes that the package's modules define."""
    found = set()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        classes = (c for _, c in inspect.getmembers(module, inspect.isclass))
        found |= {c for c in classes if issubclass(c, Plugin) and c.__module__ == info.name}
    return found


@pytest.mark.parametrize(
    ("package", "kind"),
    [(filters, Kind.FILTER), (scorers, Kind.SCORER), (pickers, Kind.PICKER)],
)
def test_every_plugin_that_is_written_is_registered(package: ModuleType, kind: Kind) -> None:
    assert plugins_in(package) == set(TABLES[kind].values())


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_a_class_is_named_as_its_yaml_type(kind: Kind, name: str) -> None:
    if DEPRECATED.get(name) and TABLES[kind][name] is FILTERS.get(DEPRECATED[name].replacement):
        return  # an alias shares the class of its replacement
    assert TABLES[kind][name].__name__ == "".join(word.capitalize() for word in name.split("-"))


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_our_names_have_the_kind_they_have_in_the_reference(kind: Kind, name: str) -> None:
    assert REFERENCE[name] is kind or (name in BOTH and kind is Kind.FILTER)


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_a_plugin_is_made_without_parameters_or_says_which_one_it_needs(
    kind: Kind, name: str
) -> None:
    plugin = TABLES[kind][name]
    if name in REQUIRED:
        with pytest.raises(msgspec.ValidationError, match=f"`{REQUIRED[name]}`"):
            msgspec.convert({}, plugin)
    else:
        made = msgspec.convert({}, plugin)
        assert made == plugin()
        assert msgspec.convert(msgspec.to_builtins(made), plugin) == made


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_a_parameter_that_does_not_exist_is_refused(kind: Kind, name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="noSuchThing"):
        msgspec.convert({"noSuchThing": 1}, TABLES[kind][name])


def test_a_name_is_in_one_table_only_unless_it_filters_and_scores() -> None:
    assert FILTERS.keys() & SCORERS.keys() == BOTH
    assert len(OURS) == len({name for _, name in OURS}) + len(BOTH)


@pytest.mark.parametrize("name", sorted(BOTH))
def test_what_filters_and_scores_has_the_same_parameters_for_both(name: str) -> None:
    filtering, scoring = FILTERS[name], SCORERS[name]
    assert msgspec.structs.fields(filtering) == msgspec.structs.fields(scoring)
    assert filtering is not scoring


PREDICTING = {"latency-scorer", "slo-headroom-tier-filter"}


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_what_needs_predictions_says_so_and_nothing_else_does(kind: Kind, name: str) -> None:
    if name not in REQUIRED:
        plugin = TABLES[kind][name]()
        assert getattr(plugin, "needs_predictions", False) is (name in PREDICTING)


def test_what_is_not_built_is_exactly_the_rest_of_the_reference_s_plugins() -> None:
    ours = {name for _, name in OURS}
    assert not NOT_BUILT.keys() & ours
    assert set(NOT_BUILT.values()) <= TABLES.keys()
    for kind, table in TABLES.items():
        names = {name for name, its in REFERENCE.items() if its is kind}
        names |= BOTH if kind is Kind.FILTER else set()
        assert names == set(table) | {name for name, its in NOT_BUILT.items() if its is kind}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode-filter", Kind.FILTER),
        ("precise-prefix-cache-scorer", Kind.SCORER),
        ("approx-prefix-cache-producer", Kind.PRODUCER),
        ("single-profile-handler", Kind.PROFILE_HANDLER),
        ("openai-parser", Kind.PARSER),
        ("utilization-detector", Kind.SATURATION_DETECTOR),
        ("fcfs-ordering-policy", Kind.ORDERING_POLICY),
        ("file-discovery", Kind.DISCOVERY),
    ],
)
def test_a_type_of_the_reference_is_known_by_its_kind(name: str, kind: Kind) -> None:
    assert REFERENCE[name] is kind


def test_the_reference_s_list_is_complete_in_number() -> None:
    counts = {kind: sum(its is kind for its in REFERENCE.values()) for kind in Kind}
    assert counts.pop(Kind.COST) == 0, "costs are ours"
    assert min(counts.values()) >= 1, "a kind without a name"
    assert sum(counts.values()) == 97


@pytest.mark.parametrize("name", sorted(DEPRECATED))
def test_a_deprecated_name_has_a_replacement_that_is_not(name: str) -> None:
    replacement = DEPRECATED[name].replacement
    assert name in REFERENCE
    assert REFERENCE[name] is REFERENCE[replacement]
    assert replacement not in DEPRECATED
    assert DEPRECATED[name].note.endswith(".")


def test_the_tables_cannot_be_changed_by_accident() -> None:
    for table in (*TABLES.values(), REFERENCE, NOT_BUILT, DEPRECATED):
        with pytest.raises(TypeError):
            table["x"] = None  # type: ignore[index]
