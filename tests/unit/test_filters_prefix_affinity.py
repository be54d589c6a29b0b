"""Prefix affinity: who is sticky, when that is worth the wait, and what predictions change."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from epp.core.filters.prefix_affinity import PrefixCacheAffinityFilter
from epp.core.model import Endpoint, EndpointSpec, Prediction, PrefixMatch, Request


def pool(*tokens: int) -> list[Endpoint]:
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(len(tokens))]
    for endpoint, inflight in zip(endpoints, tokens, strict=True):
        endpoint.inflight_tokens = inflight
    return endpoints


def matching(by_slot: dict[int, int], *, blocks: int = 10, **other: Any) -> Request:
    return Request(match=PrefixMatch(blocks=blocks, by_slot=by_slot), **other)


def kept(request: Request, endpoints: Sequence[Endpoint], **parameters: Any) -> list[int]:
    plugin = msgspec.convert(parameters, PrefixCacheAffinityFilter)
    return [e.slot for e in plugin(request, endpoints)]


@pytest.mark.parametrize(
    ("threshold", "slots"),
    [(0.8, [1, 3]), (0.81, [3]), (1.0, [3]), (0.7, [1, 2, 3]), (0.0, [0, 1, 2, 3])],
)
def test_the_endpoints_that_hold_enough_of_the_prompt_stay_in_order(
    threshold: float, slots: list[int]
) -> None:
    request = matching({3: 10, 1: 8, 2: 7})
    assert kept(request, pool(0, 0, 0, 0), affinityThreshold=threshold) == slots


@pytest.mark.parametrize("by_slot", [{}, {0: 7}, {9: 10}])
def test_all_stay_when_no_candidate_is_sticky(by_slot: dict[int, int]) -> None:
    assert kept(matching(by_slot), pool(0, 0)) == [0, 1]


def test_all_stay_when_all_are_sticky_however_loaded() -> None:
    assert kept(matching({0: 10, 1: 8}), pool(10**9, 0)) == [0, 1]


def test_a_prompt_without_a_full_block_keeps_all() -> None:
    assert kept(Request(), pool(0, 0)) == [0, 1]


def test_one_endpoint_stays_whatever_it_holds() -> None:
    assert kept(matching({}), pool(10**9)) == [0]
    assert kept(matching({0: 10}), pool(10**9)) == [0]
    assert kept(matching({0: 10}), []) == []


@pytest.mark.parametrize(("extra_tokens", "slots"), [(1000, [0]), (1001, [0, 1, 2])])
def test_stickiness_ends_where_the_wait_is_longer_than_it_is_worth(
    extra_tokens: int, slots: list[int]
) -> None:
    endpoints = pool(500 + extra_tokens, 500, 700)
    limits = {"peakPrefillThroughput": 1000.0, "maxTTFTPenaltyMs": 1000.0}
    assert kept(matching({0: 10}), endpoints, **limits) == slots


def test_the_best_of_the_sticky_is_compared_with_the_best_of_the_others() -> None:
    limits = {"peakPrefillThroughput": 1000.0, "maxTTFTPenaltyMs": 1000.0}
    sticky = matching({0: 10, 1: 10})
    assert kept(sticky, pool(9000, 900, 0, 9000), **limits) == [0, 1]
    assert kept(sticky, pool(9000, 2000, 0, 9000), **limits) == [0, 1, 2, 3]


def test_the_defaults_are_the_references() -> None:
    at_limit = 286_704  # 18 s at 15 928 tokens/s
    assert kept(matching({0: 8}), pool(at_limit, 0)) == [0]
    assert kept(matching({0: 8}), pool(at_limit + 1, 0)) == [0, 1]


def test_no_penalty_is_too_high_when_the_limit_is_0() -> None:
    limits = {"maxTTFTPenaltyMs": 0, "peakPrefillThroughput": 0}
    assert kept(matching({0: 10}), pool(10**9, 0), **limits) == [0]


def predicting(by_slot: dict[int, int], **ttfts_s: float) -> Request:
    predictions = {int(slot[1:]): Prediction(s, 0.01) for slot, s in ttfts_s.items()}
    return matching(by_slot, predictions=predictions)


@pytest.mark.parametrize(
    ("ttfts_s", "slots"),
    [
        ({"s0": 5.0, "s1": 4.0}, [0]),
        ({"s0": 5.1, "s1": 4.0}, [0, 1, 2]),
        ({"s0": 5.1}, [0]),
        ({"s1": 4.0}, [0, 1, 2]),
        ({"s1": 4.0, "s2": 0.0}, [0, 1, 2]),
        ({}, [0]),
    ],
)
def test_predictions_take_the_place_of_tokens_and_a_missing_one_is_the_slowest(
    ttfts_s: dict[str, float], slots: list[int]
) -> None:
    source = {"ttftSource": "latencyPredictor", "maxTTFTPenaltyMs": 1000}
    request = predicting({0: 10}, **ttfts_s)
    assert kept(request, pool(10**9, 0, 0), **source) == slots


def test_predictions_are_ignored_where_tokens_are_asked_for() -> None:
    assert kept(predicting({0: 10}, s0=999.0, s1=0.0), pool(0, 0)) == [0]


def test_exploring_keeps_all_about_as_often_as_asked_and_the_same_for_a_seed() -> None:
    def runs() -> list[int]:
        rng = Random(1)
        request = matching({0: 10}, rng=rng)
        return [len(kept(request, pool(0, 0), explorationProbability=0.25)) for _ in range(400)]

    assert runs() == runs()
    assert 70 <= runs().count(2) <= 130
    assert kept(matching({0: 10}, rng=Random(1)), pool(0, 0), explorationProbability=1) == [0, 1]


@pytest.mark.parametrize(
    ("parameters", "needs"),
    [
        ({}, False),
        ({"ttftSource": "latencyPredictor"}, True),
        ({"ttftSource": "latencyPredictor", "maxTTFTPenaltyMs": 0}, False),
    ],
)
def test_it_says_whether_it_needs_predictions(parameters: dict[str, Any], needs: bool) -> None:
    assert msgspec.convert(parameters, PrefixCacheAffinityFilter).needs_predictions is needs


def test_parameters_of_the_reference_are_accepted() -> None:
    parameters = {
        "affinityThreshold": 0.99,
        "explorationProbability": 0.1,
        "maxTTFTPenaltyMs": 5000.0,
        "ttftSource": "latencyPredictor",
        "peakPrefillThroughput": 42000.0,
        "prefixMatchInfoProducerName": "p",
        "latencyPredictionInfoProducerName": "l",
        "inFlightLoadProducerName": "i",
    }
    made = msgspec.convert(parameters, PrefixCacheAffinityFilter)
    assert msgspec.to_builtins(made) == parameters


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"affinityThreshold": 1.1}, "$.affinityThreshold"),
        ({"affinityThreshold": -0.1}, "$.affinityThreshold"),
        ({"explorationProbability": 2}, "$.explorationProbability"),
        ({"maxTTFTPenaltyMs": -1}, "$.maxTTFTPenaltyMs"),
        ({"maxTtftPenaltyMs": 1}, "maxTtftPenaltyMs"),
        ({"ttftSource": "guess"}, "$.ttftSource"),
        ({"peakPrefillThroughput": 0}, "`peakPrefillThroughput` is 0"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, PrefixCacheAffinityFilter)
    assert said in str(refusal.value)


def test_a_throughput_of_0_is_fine_where_it_is_not_used() -> None:
    parameters = {"peakPrefillThroughput": 0, "ttftSource": "latencyPredictor"}
    assert msgspec.convert(parameters, PrefixCacheAffinityFilter).needs_predictions
