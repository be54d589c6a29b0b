"""Scorers over scraped loads: the reference's vectors, and silence that is not idleness."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load, Plugin, Request
from epp.core.scorers.scraped import (
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
)

REQUEST = Request(id="r", model="m")


def pool(*loads: Load) -> list[Endpoint]:
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(len(loads))]
    for endpoint, load in zip(endpoints, loads, strict=True):
        endpoint.load = load
    return endpoints


def queues(*waiting: int | None) -> list[Endpoint]:
    return pool(*(Load(at_s=1.0, waiting=w) for w in waiting))


def batches(*running: int | None) -> list[Endpoint]:
    return pool(*(Load(at_s=1.0, running=r) for r in running))


@pytest.mark.parametrize(
    ("waiting", "scores"),
    [
        ((10, 5, 0), [0.0, 0.5, 1.0]),
        ((5, 5), [1.0, 1.0]),
        ((7,), [1.0]),
        ((0, None, 10), [1.0, 0.5, 0.0]),
        ((3, None), [1.0, 0.5]),
        ((None, None), [0.5, 0.5]),
        ((), []),
    ],
)
def test_the_shortest_known_queue_scores_1_and_the_longest_0(
    waiting: tuple[int | None, ...], scores: list[float]
) -> None:
    assert QueueScorer()(REQUEST, queues(*waiting)) == scores
    assert RunningRequestsSizeScorer()(REQUEST, batches(*waiting)) == scores


def test_K11_queue_and_batch_are_not_mistaken_for_each_other() -> None:
    endpoints = pool(Load(at_s=1.0, waiting=0, running=9), Load(at_s=1.0, waiting=9, running=0))
    assert QueueScorer()(REQUEST, endpoints) == [1.0, 0.0]
    assert RunningRequestsSizeScorer()(REQUEST, endpoints) == [0.0, 1.0]


def test_the_free_part_of_the_kv_cache_is_the_score() -> None:
    endpoints = pool(*(Load(at_s=1.0, kv_usage_ratio=u) for u in (0.0, 0.25, 1.0, None)))
    assert KvCacheUtilizationScorer()(REQUEST, endpoints) == [1.0, 0.75, 0.0, 0.5]


@pytest.mark.parametrize(
    ("threshold", "waiting", "scores"),
    [
        (10, (2, 0, 15), [0.4, 0.5, 0.0]),
        (128, (64, 128, 127), [0.25, 0.0, 0.5 / 128]),
        (1, (0, 1, None), [0.5, 0.0, 0.25]),
    ],
)
def test_a_queue_is_measured_against_the_threshold(
    threshold: int, waiting: tuple[int | None, ...], scores: list[float]
) -> None:
    assert LoadAwareScorer(threshold=threshold)(REQUEST, queues(*waiting)) == scores


ALL = (QueueScorer, RunningRequestsSizeScorer, KvCacheUtilizationScorer, LoadAwareScorer)


@pytest.mark.parametrize("scorer", ALL)
def test_a_silent_endpoint_is_not_taken_for_an_idle_one(scorer: type[Plugin]) -> None:
    idle = Load(at_s=1.0, waiting=0, running=0, kv_usage_ratio=0.0)
    silent_score, idle_score = scorer()(REQUEST, pool(UNKNOWN, idle))
    assert silent_score < idle_score


@pytest.mark.parametrize("scorer", ALL)
def test_the_score_of_the_unknown_is_a_parameter(scorer: type[Plugin]) -> None:
    assert msgspec.convert({"unknown": 0.125}, scorer)(REQUEST, pool(UNKNOWN)) == [0.125]


@pytest.mark.parametrize(
    ("scorer", "parameters", "key"),
    [
        (QueueScorer, {"unknown": 1.5}, "$.unknown"),
        (RunningRequestsSizeScorer, {"unknown": -0.1}, "$.unknown"),
        (KvCacheUtilizationScorer, {"unknown": "half"}, "$.unknown"),
        (LoadAwareScorer, {"unknown": 0.6}, "$.unknown"),
        (LoadAwareScorer, {"threshold": 0}, "$.threshold"),
        (QueueScorer, {"treshold": 1}, "treshold"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(
    scorer: type[Plugin], parameters: dict[str, Any], key: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, scorer)
    assert key in str(refusal.value)
