"""Filters: which endpoints stay, in which order, and which parameters are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.core.filters.label_selector import ByLabel, LabelSelectorFilter
from epp.core.filters.role import DecodeFilter, EncodeFilter, PrefillFilter
from epp.core.filters.testing import HeaderBasedTestingFilter
from epp.core.model import Endpoint, EndpointSpec, Request

REQUEST = Request(id="r", model="m")


def labelled(**labels: str) -> Endpoint:
    return Endpoint(EndpointSpec("10.0.0.1", 8000, labels=labels))


DECODE = labelled(role="decode", tier="gold")
PREFILL = labelled(role="prefill", tier="gold")
BOTH = labelled(role="both")
BARE = labelled()
POOL = (DECODE, PREFILL, BOTH, BARE)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, [DECODE, PREFILL, BOTH, BARE]),
        ({"matchLabels": {"tier": "gold"}}, [DECODE, PREFILL]),
        ({"matchLabels": {"tier": "gold", "role": "prefill"}}, [PREFILL]),
        ({"matchLabels": {"tier": "silver"}}, []),
        (
            {"matchExpressions": [{"key": "role", "operator": "In", "values": ["decode", "both"]}]},
            [DECODE, BOTH],
        ),
        (
            {"matchExpressions": [{"key": "role", "operator": "NotIn", "values": ["decode"]}]},
            [PREFILL, BOTH, BARE],
        ),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, [DECODE, PREFILL]),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, [BOTH, BARE]),
        (
            {
                "matchLabels": {"tier": "gold"},
                "matchExpressions": [
                    {"key": "role", "operator": "Exists"},
                    {"key": "role", "operator": "NotIn", "values": ["decode"]},
                ],
            },
            [PREFILL],
        ),
    ],
)
def test_a_label_selector_keeps_what_satisfies_every_requirement(
    parameters: dict[str, Any], kept: list[Endpoint]
) -> None:
    assert msgspec.convert(parameters, LabelSelectorFilter)(REQUEST, POOL) == kept


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"matchLabels": {"tier": 1}}, "$.matchLabels"),
        ({"match_labels": {}}, "unknown field `match_labels`"),
        ({"matchExpressions": [{"key": "a", "operator": "in"}]}, "$.matchExpressions[0].operator"),
        ({"matchExpressions": [{"key": "", "operator": "Exists"}]}, "$.matchExpressions[0].key"),
        ({"matchExpressions": [{"key": "a", "operator": "In"}]}, "label 'a' needs"),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn"}]}, "$.matchExpressions[0]"),
        (
            {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]},
            "label 'a' takes no",
        ),
    ],
)
def test_a_wrong_label_selector_is_refused_with_its_key(
    parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, LabelSelectorFilter)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"label": "role", "validValues": ["decode", "both"]}, [DECODE, BOTH]),
        ({"label": "role", "validValues": ["both"], "allowsNoLabel": True}, [BOTH, BARE]),
        ({"label": "role", "allowsNoLabel": True}, [BARE]),
    ],
)
def test_by_label_keeps_the_values_it_lists(
    parameters: dict[str, Any], kept: list[Endpoint]
) -> None:
    assert msgspec.convert(parameters, ByLabel)(REQUEST, POOL) == kept


@pytest.mark.parametrize("parameters", [{}, {"label": ""}, {"label": "role"}])
def test_by_label_refuses_what_nothing_could_pass(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(parameters, ByLabel)


V4, V4_RANK, V6 = (
    Endpoint(EndpointSpec(host, port))
    for host, port in (("10.0.0.1", 8000), ("10.0.0.1", 8001), ("fd00::10", 8000))
)


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("10.0.0.1", [V4, V4_RANK]),
        ("10.0.0.1:8001", [V4_RANK]),
        ("fd00::10", [V6]),
        ("[FD00:0::10]:8000, 10.0.0.1:8000", [V4, V6]),
        ("10.0.0.99", []),
        ("", []),
        (" , ", []),
        (None, []),
    ],
)
def test_E19_the_testing_filter_keeps_what_the_header_names_and_else_nothing(
    header: str | None, kept: list[Endpoint]
) -> None:
    headers = {} if header is None else {"test-epp-endpoint-selection": header}
    assert HeaderBasedTestingFilter()(Request(headers=headers), (V4, V4_RANK, V6)) == kept


@pytest.mark.parametrize(
    ("role", "kept_by"),
    [
        (None, "d"),
        ("decode", "d"),
        ("prefill", "p"),
        ("encode", "e"),
        ("prefill-decode", "dp"),
        ("both", "dp"),
        ("encode-prefill", "pe"),
        ("encode-prefill-decode", "dpe"),
        ("decoder", ""),
    ],
)
def test_role_filters_keep_who_has_the_role_and_who_has_none_decodes(role, kept_by) -> None:
    labels = {} if role is None else {"llm-d.ai/role": role}
    some = Endpoint(EndpointSpec("10.0.0.1", 8000, labels=labels), 0)
    filters = {"d": DecodeFilter(), "p": PrefillFilter(), "e": EncodeFilter()}
    assert {n for n, keep in filters.items() if keep(REQUEST, [some])} == set(kept_by)
