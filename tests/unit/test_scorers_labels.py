"""Scorers over labels and attributes: context lengths, header affinity, custom metrics."""

from __future__ import annotations

from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from epp.core.filters.context_length import (
    ContextLengthAware as ContextLengthFilter,
    ContextRange,
    context_range,
)
from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load, Plugin, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Snapshot
from epp.core.schedule import Profile, Scheduler, WeightedScorer
from epp.core.scorers.attribute import EndpointAttributeScorer
from epp.core.scorers.context_length import ContextLengthAware
from epp.core.scorers.labels import HeaderLabelAffinityScorer

RANGE_LABEL = "llm-d.ai/context-length-range"


def labelled(*values: str | None, label: str = RANGE_LABEL) -> list[Endpoint]:
    return [
        Endpoint(EndpointSpec(f"10.0.0.{i}", 8000, labels={} if v is None else {label: v}), i)
        for i, v in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("0-2048", ContextRange(0, 2048)),
        (" 5 - +5 ", ContextRange(5, 5)),
        ("999999999999999999-999999999999999999", ContextRange(10**18 - 1, 10**18 - 1)),
    ],
)
def test_a_label_says_a_range_of_tokens(text: str, span: ContextRange) -> None:
    assert context_range(text) == span


@pytest.mark.parametrize(
    "text",
    ["", "5", "-5", "5-", "9-1", "a-b", "1-2-3", "-1-5", "0x1-5", "1.5-2", "٣-٤", "2-" + "1" * 400],
)
def test_what_is_no_range_is_malformed(text: str) -> None:
    assert context_range(text) is None
    assert ContextLengthAware()(Request(), labelled(text)) == [0.0]


@pytest.mark.parametrize(
    ("tokens", "label", "score"),
    [
        (0, "0-10000", 0.3 + 0.7 * (0.7 / 2 + 0.3)),
        (10_000, "0-10000", 0.3 + 0.7 * 0.7 / 2),
        (5_000, "0-10000", 0.3 + 0.7 * (0.7 / 2 + 0.3 / 2)),
        (7, "7-7", 1.0),
        (0, "1000-2000", 0.15),
        (3000, "1000-2000", 0.15),
        (2001, "1000-2000", 0.3 / 1.001),
        (5, None, 0.5),
    ],
)
def test_a_range_scores_by_its_width_and_the_room_above_or_by_its_distance(
    tokens: int, label: str | None, score: float
) -> None:
    found = ContextLengthAware()(Request(prompt_tokens=tokens), labelled(label))
    assert found == [pytest.approx(score, rel=1e-15)]


def test_tight_beats_wide_beats_outside_and_no_label_stands_in_between() -> None:
    tight, wide, outside, none = ContextLengthAware()(
        Request(), labelled("0-20", "0-10000", "500-1000", None)
    )
    assert tight > wide > none > outside > 0.0
    assert outside < 0.3 < wide


def test_the_widest_range_that_fits_beats_the_nearest_that_does_not() -> None:
    endpoints = labelled("0-999999999999999999", "0-8191")
    fits, near = ContextLengthAware()(Request(prompt_tokens=8192), endpoints)
    assert near < 0.3 < fits


def test_the_label_is_a_parameter_and_must_have_a_name() -> None:
    endpoints = labelled("0-0", label="other")
    assert ContextLengthAware()(Request(), endpoints) == [0.5]
    assert msgspec.convert({"label": "other"}, ContextLengthAware)(Request(), endpoints) == [1.0]
    for plugin in (ContextLengthAware, ContextLengthFilter):
        with pytest.raises(msgspec.ValidationError, match=r"\$\.label"):
            msgspec.convert({"label": ""}, plugin)


@pytest.mark.parametrize(("tokens", "kept"), [(0, [0, 3]), (20, [0, 1, 3]), (21, [1, 3])])
def test_as_a_filter_it_keeps_the_ranges_that_hold_the_prompt_and_what_has_none(
    tokens: int, kept: list[int]
) -> None:
    endpoints = labelled("0-20", "20-30", "malformed", None)
    plugin = msgspec.convert({"enableFiltering": True}, ContextLengthFilter)
    assert [e.slot for e in plugin(Request(prompt_tokens=tokens), endpoints)] == kept


def test_it_filters_only_when_told_to_and_may_leave_nothing() -> None:
    endpoints = labelled("1-20", "bad")
    assert ContextLengthFilter()(Request(), endpoints) == endpoints
    assert ContextLengthFilter(enable_filtering=True)(Request(), endpoints) == []


def test_the_filter_and_the_scorer_have_the_same_parameters() -> None:
    scoring, filtering = ContextLengthAware(), ContextLengthFilter()
    assert msgspec.structs.asdict(scoring) == msgspec.structs.asdict(filtering)


def affinity(header: str | None) -> list[float]:
    plugin = msgspec.convert(
        {"headerName": "X-Role", "labelKey": "role"}, HeaderLabelAffinityScorer
    )
    headers = {} if header is None else {"x-role": header}
    return plugin(Request(headers=headers), labelled("decode", "Decode", "", None, label="role"))


@pytest.mark.parametrize(
    ("header", "scores"),
    [
        ("decode", [1.0, 0.0, 0.0, 0.0]),
        ("prefill", [0.0, 0.0, 0.0, 0.0]),
        ("", [0.0, 0.0, 0.0, 0.0]),
        (None, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_a_header_prefers_the_label_with_its_value(header: str | None, scores: list[float]) -> None:
    assert affinity(header) == scores


def test_two_requests_between_two_scrapes_are_told_apart_by_their_headers() -> None:
    plugin = HeaderLabelAffinityScorer(header_name="x-role", label_key="role")
    profile = Profile("default", (), (WeightedScorer("a", 1.0, plugin),), MaxScorePicker())
    snapshot = Snapshot(tuple(labelled("decode", "prefill", label="role")), 1)
    scheduler = Scheduler(profile, Random(0))
    for slot, role in enumerate(("decode", "prefill")):
        request = Request(headers={"x-role": role})
        assert scheduler.pick(request, snapshot).endpoint.slot == slot


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"labelKey": "role"}, "headerName"),
        ({"headerName": "x-role"}, "labelKey"),
        ({"headerName": "", "labelKey": "role"}, "$.headerName"),
        ({"headerName": "x-role", "labelKey": ""}, "$.labelKey"),
    ],
)
def test_a_header_affinity_needs_both_names(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, HeaderLabelAffinityScorer)
    assert said in str(refusal.value)


LOWER, HIGHER = "linear_lower_is_better", "linear_higher_is_better"


def attribute(type_: str, normalization: dict[str, Any] | None = None, **other: Any) -> Plugin:
    algorithm = {"type": type_, "normalization": normalization or {}}
    parameters = {"attributeKey": "depth", "algorithm": algorithm, **other}
    return msgspec.convert(parameters, EndpointAttributeScorer)


def scores(plugin: Plugin, *values: float | None) -> list[float]:
    endpoints = labelled(*[None] * len(values))
    for endpoint, value in zip(endpoints, values, strict=True):
        if value is not None:
            endpoint.load = Load(at_s=1.0, attributes={"depth": value, "width": 0.0})
    return plugin(Request(), endpoints)


@pytest.mark.parametrize("adaptive", [{}, {"adaptiveRange": {}}])
def test_the_candidates_own_range_is_the_default(adaptive: dict[str, Any]) -> None:
    assert scores(attribute(LOWER, adaptive), 10, 20, 15, None) == [1.0, 0.0, 0.5, 0.0]
    assert scores(attribute(HIGHER, adaptive), 10, 20, 15, None) == [0.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("type_", [LOWER, HIGHER])
def test_equal_values_all_score_1_and_missing_ones_0(type_: str) -> None:
    plugin = attribute(type_)
    assert scores(plugin, 3, None, 3) == [1.0, 0.0, 1.0]
    assert scores(plugin, 0.0, -0.0) == [1.0, 1.0]
    assert scores(plugin, None, None) == [0.0, 0.0]
    assert plugin(Request(), []) == []


def test_a_fixed_range_does_not_depend_on_the_candidates_and_clamps() -> None:
    fixed = {"fixedRange": {"min": 10, "max": 20}}
    assert scores(attribute(LOWER, fixed), 5, 10, 12.5, 20, 99) == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert scores(attribute(HIGHER, fixed), 5, 10, 12.5, 20, 99) == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert scores(attribute(LOWER, fixed), 15) == [0.5]


@pytest.mark.parametrize("type_", [LOWER, HIGHER])
@pytest.mark.parametrize("fixed", [{}, {"fixedRange": {"min": 0, "max": 10}}])
def test_a_value_that_is_no_finite_number_counts_as_missing(
    type_: str, fixed: dict[str, Any]
) -> None:
    plugin = attribute(type_, fixed)
    rest = scores(plugin, 0, 10, nan, inf, -inf)
    assert rest == [*scores(plugin, 0, 10), 0.0, 0.0, 0.0]
    assert scores(plugin, nan, inf) == [0.0, 0.0]


def test_values_whose_difference_overflows_or_vanishes_still_score() -> None:
    assert scores(attribute(HIGHER), -1.7e308, 1.7e308, 0.0) == [0.0, 1.0, 0.5]
    assert scores(attribute(HIGHER), 0.0, 5e-324) == [1.0, 1.0]
    wide = {"fixedRange": {"min": -1.7e308, "max": 1.7e308}}
    assert scores(attribute(HIGHER, wide), -1.7e308, 1.7e308, 0.0) == [0.0, 1.0, 0.5]


def test_an_endpoint_that_reports_nothing_scores_0() -> None:
    endpoints = labelled(None)
    endpoints[0].load = UNKNOWN
    assert attribute(LOWER)(Request(), endpoints) == [0.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attributeKey": ""}, "$.attributeKey"),
        ({"attributeKey": "depth/extractor"}, "write the part after `/` as `producer`"),
        ({"algorithm": {}}, "type"),
        ({"algorithm": {"type": "log"}}, "$.algorithm.type"),
        (
            {"algorithm": {"type": LOWER, "normalization": {"fixedRange": {"min": 1, "max": 1}}}},
            "set `max` well above `min` - at `$.algorithm.normalization.fixedRange`",
        ),
        (
            {"algorithm": {"type": LOWER, "normalization": {"fixedRange": {"min": 1}}}},
            "`max`",
        ),
        (
            {
                "algorithm": {
                    "type": LOWER,
                    "normalization": {"fixedRange": {"min": 0, "max": 1}, "adaptiveRange": {}},
                }
            },
            "keep one - at `$.algorithm.normalization`",
        ),
        ({"source": "metadata"}, "source"),
    ],
)
def test_a_wrong_attribute_scorer_is_refused_with_its_key(
    change: dict[str, Any], said: str
) -> None:
    parameters = {"attributeKey": "depth", "algorithm": {"type": LOWER}, **change}
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, EndpointAttributeScorer)
    assert said in str(refusal.value)


def test_the_producer_of_an_attribute_is_accepted() -> None:
    assert scores(attribute(LOWER, producer="core-metrics-extractor"), 1, 2) == [1.0, 0.0]
