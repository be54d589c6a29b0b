"""Predicted latency: the reference's buckets and hundredths, and its fall-back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.core.model import (
    UNKNOWN,
    Endpoint,
    EndpointSpec,
    Load,
    Prediction,
    PrefixMatch,
    Request,
)
from epp.core.scorers.latency import LatencyScorer

Times = tuple[float, float] | None


def pool(count: int, *, inflight: int = 1) -> list[Endpoint]:
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(count)]
    for endpoint in endpoints:
        endpoint.inflight_requests = inflight
    return endpoints


def predicting(
    *times: Times, ttft_s: float | None = 1.0, tpot_s: float | None = 0.1, **other: Any
) -> Request:
    predictions = {slot: Prediction(*t) for slot, t in enumerate(times) if t is not None}
    return Request(slo_ttft_s=ttft_s, slo_tpot_s=tpot_s, predictions=predictions, **other)


def scores(
    request: Request, count: int, *, idle: tuple[int, ...] = (), **parameters: Any
) -> list[float]:
    endpoints = pool(count)
    for slot in idle:
        endpoints[slot].inflight_requests = 0
    return msgspec.convert(parameters, LatencyScorer)(request, endpoints)


HOLDING = predicting((0.75, 0.05), (0.5, 0.05), (0.0, 0.05))


@pytest.mark.parametrize(("strategy", "expected"), [("least", 1.0), ("most", 0.01)])
def test_of_those_that_hold_the_promises_the_fullest_or_the_freest_is_preferred(
    strategy: str, expected: float
) -> None:
    found = scores(HOLDING, 3, headroomSelectionStrategy=strategy)
    middle = 0.67 if strategy == "least" else 0.34
    assert found == [expected, middle, 1.0 if strategy == "most" else 0.01]


def test_both_dimensions_are_weighed() -> None:
    request = predicting((0.0, 0.0), (1.0, 0.0), (0.0, 0.1), (1.0, 0.1))
    assert scores(request, 4) == [0.01, 0.81, 0.2, 1.0]
    assert scores(request, 4, ttftWeight=3, tpotWeight=1) == [0.01, 0.76, 0.26, 1.0]
    assert scores(request, 4, ttftWeight=0, tpotWeight=0) == [0.01, 1.0, 0.01, 1.0]


def test_a_dimension_without_spread_does_not_press_the_scores_together() -> None:
    same_ttft = predicting((0.5, 0.0), (0.5, 0.1))
    same_tpot = predicting((0.0, 0.05), (1.0, 0.05))
    assert scores(same_ttft, 2) == scores(same_tpot, 2) == [0.01, 1.0]


@pytest.mark.parametrize("times", [(0.5, 0.05), (9.0, 0.05), (9.0, 9.0)])
def test_equal_predictions_score_half(times: Times) -> None:
    assert scores(predicting(times, times), 2) == [0.51, 0.51]
    assert scores(predicting(times), 1) == [0.51]


def test_headrooms_apart_by_rounding_only_are_equal() -> None:
    request = predicting((0.1 + 0.2, 0.05), (0.3, 0.05), ttft_s=None)
    assert scores(request, 2) == [0.51, 0.51]


def test_who_holds_the_promises_scores_alone() -> None:
    request = predicting((0.5, 0.05), (1.5, 0.05), (0.5, 0.15), (0.25, 0.05))
    assert scores(request, 4, idle=(1,)) == [1.0, 0.0, 0.0, 0.01]


def test_exactly_meeting_a_promise_is_holding_it() -> None:
    assert scores(predicting((1.0, 0.1), (1.1, 0.1)), 2) == [0.51, 0.0]


def test_if_nobody_holds_them_the_idle_ones_score_and_the_least_late_is_best() -> None:
    request = predicting((1.5, 0.05), (3.0, 0.05), (2.0, 0.05))
    assert scores(request, 3, idle=(1, 2)) == [0.0, 0.01, 1.0]
    assert scores(request, 3, idle=(1, 2), headroomSelectionStrategy="most") == [0.0, 0.01, 1.0]


def test_busy_ones_that_are_only_slow_come_before_late_ones_before_those_that_are_both() -> None:
    both, late, slow = (1.5, 0.15), (1.5, 0.05), (0.5, 0.15)
    assert scores(predicting(both, late, slow), 3) == [0.0, 0.0, 0.51]
    assert scores(predicting(both, late), 2) == [0.0, 0.51]
    assert scores(predicting(both, (9.0, 9.0)), 2) == [1.0, 0.01]


def test_without_promises_the_shortest_prediction_is_best() -> None:
    request = predicting((3.0, 0.05), (1.0, 0.05), (2.0, 0.05), ttft_s=None, tpot_s=None)
    assert scores(request, 3) == [0.01, 1.0, 0.51]
    assert scores(request, 3, headroomSelectionStrategy="most") == [0.01, 1.0, 0.51]


def test_an_endpoint_without_a_prediction_counts_as_just_holding_the_promises() -> None:
    assert scores(predicting((0.5, 0.05), None), 2) == [0.01, 1.0]
    assert scores(predicting((1.5, 0.05), None), 2) == [0.0, 0.51]


def composite(*loads: Load, match: PrefixMatch | None = None, **parameters: Any) -> list[float]:
    endpoints = pool(len(loads))
    for endpoint, load in zip(endpoints, loads, strict=True):
        endpoint.load = load
    request = predicting() if match is None else predicting(match=match)
    return msgspec.convert(parameters, LatencyScorer)(request, endpoints)


def loaded(kv: float, waiting: int) -> Load:
    return Load(at_s=1.0, kv_usage_ratio=kv, waiting=waiting)


def test_without_predictions_free_cache_short_queue_and_prefix_count_the_same() -> None:
    match = PrefixMatch(blocks=4, by_slot={0: 4, 2: 2})
    found = composite(loaded(0.5, 4), loaded(0.0, 0), loaded(1.0, 3), match=match)
    assert found == [0.5, 0.67, 0.25]


def test_the_three_are_weighed_by_their_parts_and_the_cache_alone_where_none_has_a_weight() -> None:
    loads = loaded(0.5, 4), loaded(0.0, 0)
    weights = {"compositeKVWeight": 2, "compositeQueueWeight": 6, "compositePrefixWeight": 0}
    assert composite(*loads, **weights) == [0.13, 1.0]
    assert composite(*loads, **dict.fromkeys(weights, 0)) == [0.5, 1.0]


def test_where_no_queue_is_known_or_all_are_empty_it_tells_nothing_apart() -> None:
    weights = {"compositeKVWeight": 0, "compositePrefixWeight": 0}
    assert composite(loaded(0.5, 0), loaded(0.1, 0), **weights) == [1.0, 1.0]
    assert composite(UNKNOWN, UNKNOWN, **weights) == [0.5, 0.5]


def test_a_silent_endpoint_is_not_taken_for_an_idle_one() -> None:
    assert composite(UNKNOWN, loaded(0.0, 0), loaded(1.0, 9)) == [0.33, 0.67, 0.0]
    assert composite(UNKNOWN, loaded(0.0, 0), unknown=0) == [0.0, 0.67]


def test_predictions_for_others_only_are_none() -> None:
    request = Request(predictions={7: Prediction(0.1, 0.1)})
    assert LatencyScorer()(request, pool(2)) == [0.33, 0.33]


def test_a_prompt_that_was_not_cut_into_blocks_matches_nothing() -> None:
    assert composite(loaded(0.0, 0), match=PrefixMatch(blocks=0, by_slot={0: 1})) == [0.67]


def test_parameters_of_the_reference_are_accepted() -> None:
    parameters = {
        "ttftWeight": 1.0,
        "tpotWeight": 0.0,
        "headroomSelectionStrategy": "most",
        "compositeKVWeight": 2.0,
        "compositeQueueWeight": 3.0,
        "compositePrefixWeight": 4.0,
        "latencyPredictionInfoProducerName": "l",
        "prefixMatchInfoProducerName": "p",
    }
    made = msgspec.convert(parameters, LatencyScorer)
    assert made.needs_predictions
    assert msgspec.to_builtins(made).items() >= parameters.items()


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"ttftWeight": -1}, "$.ttftWeight"),
        ({"compositeKVWeight": -0.5}, "$.compositeKVWeight"),
        ({"compositeKvWeight": 1}, "compositeKvWeight"),
        ({"headroomSelectionStrategy": "composite-only"}, "$.headroomSelectionStrategy"),
        ({"unknown": 1.5}, "$.unknown"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(parameters: dict[str, Any], key: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, LatencyScorer)
    assert key in str(refusal.value)
