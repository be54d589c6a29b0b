"""Scorers over prefix matches: the reference's formula, and cold prompts that spread."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from epp.core.inflight import Inflight
from epp.core.model import Endpoint, EndpointSpec, Plugin, PrefixMatch, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.scorers.prefix import NoHitLruScorer, PrefixCacheScorer

COLD = Request(id="r", model="m")


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(count)]


def matching(blocks: int, by_slot: dict[int, int], *, block_tokens: int = 1) -> Request:
    return Request(match=PrefixMatch(blocks=blocks, block_tokens=block_tokens, by_slot=by_slot))


@pytest.mark.parametrize(
    ("blocks", "matched", "score"), [(10, 5, 0.25125), (100, 50, 0.375), (100, 100, 1.0)]
)
def test_the_weight_of_the_length_prefers_long_matches(
    blocks: int, matched: int, score: float
) -> None:
    scorer = PrefixCacheScorer(match_length_weight=0.5, match_length_scale_tokens=100)
    assert scorer(matching(blocks, {1: matched}), pool(2)) == [0.0, pytest.approx(score, rel=1e-15)]


def test_by_default_only_the_matched_part_counts() -> None:
    request = matching(8, {0: 8, 2: 2}, block_tokens=64)
    assert PrefixCacheScorer()(request, pool(3)) == [1.0, 0.0, 0.25]


def test_the_length_is_counted_in_tokens_not_in_blocks() -> None:
    scorer = PrefixCacheScorer(match_length_weight=1.0, match_length_scale_tokens=1024)
    assert scorer(matching(16, {0: 8}, block_tokens=64), pool(1)) == [0.25]


def test_a_match_longer_than_the_scale_counts_as_long_and_no_more() -> None:
    scorer = PrefixCacheScorer(match_length_weight=0.5, match_length_scale_tokens=10)
    assert scorer(matching(100, {0: 100, 1: 50}), pool(2)) == [1.0, 0.75]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_K03_a_prompt_without_a_full_block_scores_0_everywhere(weight: float) -> None:
    assert PrefixCacheScorer(match_length_weight=weight)(COLD, pool(2)) == [0.0, 0.0]


def test_never_used_endpoints_come_first_and_share_the_best_score() -> None:
    endpoints = pool(4)
    endpoints[0].cold_pick_number = 7
    endpoints[2].cold_pick_number = 3
    assert NoHitLruScorer()(COLD, endpoints) == [0.0, 1.0, pytest.approx(1 / 3), 1.0]


def test_when_all_were_used_the_least_recent_comes_first() -> None:
    endpoints = pool(3)
    for endpoint, number in zip(endpoints, (20, 10, 30), strict=True):
        endpoint.cold_pick_number = number
    assert NoHitLruScorer()(COLD, endpoints) == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(("count", "scores"), [(1, [1.0]), (2, [1.0, 1.0]), (0, [])])
def test_K03_an_unused_pool_of_any_size_scores_1(count: int, scores: list[float]) -> None:
    assert NoHitLruScorer()(COLD, pool(count)) == scores


def test_a_match_anywhere_among_the_candidates_makes_the_scorer_neutral() -> None:
    endpoints = pool(3)
    endpoints[0].cold_pick_number = 5
    assert NoHitLruScorer()(matching(4, {2: 1}), endpoints) == [0.5, 0.5, 0.5]


def test_a_match_on_an_endpoint_that_is_no_candidate_does_not_count() -> None:
    endpoints = pool(3)
    endpoints[0].cold_pick_number = 5
    assert NoHitLruScorer()(matching(4, {2: 1}), endpoints[:2]) == [0.0, 1.0]


def test_endpoints_that_are_gone_leave_no_trace_in_the_ranks() -> None:
    endpoints = pool(9)
    for number, endpoint in enumerate(endpoints, 1):
        endpoint.cold_pick_number = number
    assert NoHitLruScorer()(COLD, endpoints[6:]) == [1.0, 0.5, 0.0]


def test_cold_requests_go_round_the_pool_before_they_come_back() -> None:
    endpoints, inflight, rng = pool(8), Inflight(), Random(1)
    scorer, picker = NoHitLruScorer(), MaxScorePicker()
    rounds = []
    for _ in range(3):
        chosen = []
        for _ in endpoints:
            [i] = picker(endpoints, scorer(COLD, endpoints), rng)
            inflight.charge(endpoints[i], tokens=1, cold=True, now_s=0.0)
            chosen.append(i)
        rounds.append(chosen)
    assert sorted(rounds[0]) == list(range(8))
    assert rounds[1] == rounds[2] == rounds[0]
    assert rounds[0] != list(range(8)), "never used endpoints are not taken in list order"


@pytest.mark.parametrize(
    ("scorer", "parameters"),
    [
        (PrefixCacheScorer, {"prefixMatchInfoProducerName": "approx-prefix-cache-producer"}),
        (NoHitLruScorer, {"lruSize": 2048, "prefixMatchInfoProducerName": "p"}),
        (NoHitLruScorer, {"prefixPluginType": "t", "prefixPluginName": "n"}),
    ],
)
def test_parameters_of_the_reference_are_accepted(
    scorer: type[Plugin], parameters: dict[str, Any]
) -> None:
    made = msgspec.convert(parameters, scorer)
    assert msgspec.to_builtins(made).items() >= parameters.items()


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"matchLengthWeight": 1.1}, "$.matchLengthWeight"),
        ({"matchLengthWeight": -0.1}, "$.matchLengthWeight"),
        ({"matchLengthScaleTokens": 0}, "$.matchLengthScaleTokens"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(parameters: dict[str, Any], key: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, PrefixCacheScorer)
    assert key in str(refusal.value)
