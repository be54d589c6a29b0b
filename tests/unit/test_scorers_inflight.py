"""Scorers over what we sent ourselves: the reference's vectors and their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.core.model import Endpoint, EndpointSpec, Plugin, PrefixMatch, Request
from epp.core.scorers.inflight import ActiveRequestScorer, TokenLoadScorer

REQUEST = Request(id="r", model="m")


def pool(*, requests: tuple[int, ...] = (), tokens: tuple[int, ...] = ()) -> list[Endpoint]:
    count = max(len(requests), len(tokens))
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(count)]
    for endpoint, inflight in zip(endpoints, requests, strict=False):
        endpoint.inflight_requests = inflight
    for endpoint, inflight in zip(endpoints, tokens, strict=False):
        endpoint.inflight_tokens = inflight
    return endpoints


@pytest.mark.parametrize(
    ("parameters", "requests", "scores"),
    [
        ({}, (3, 11), [8 / 11, 0.0]),
        ({}, (0, 11, 11), [1.0, 0.0, 0.0]),
        ({}, (0, 0), [1.0, 1.0]),
        ({}, (4, 4), [0.0, 0.0]),
        ({"idleThreshold": 1, "maxBusyScore": 0.5}, (1, 2, 0), [1.0, 0.0, 1.0]),
        ({"idleThreshold": 1, "maxBusyScore": 0.5}, (1, 2, 4), [1.0, 0.25, 0.0]),
        ({"maxBusyScore": 0.0}, (1, 2, 0), [0.0, 0.0, 1.0]),
        ({"requestTimeout": "2m", "inFlightLoadProducerName": "x"}, (3, 11), [8 / 11, 0.0]),
    ],
)
def test_idle_endpoints_score_1_and_busy_ones_by_their_requests(
    parameters: dict[str, Any], requests: tuple[int, ...], scores: list[float]
) -> None:
    scorer = msgspec.convert(parameters, ActiveRequestScorer)
    assert scorer(REQUEST, pool(requests=requests)) == scores


@pytest.mark.parametrize(
    ("tokens", "prompt_tokens", "scores"),
    [
        ((0, 500, 1000), 0, [1.0, 0.5, 0.0]),
        ((0, 250, 750), 250, [0.75, 0.5, 0.0]),
        ((1001, 10**9), 0, [0.0, 0.0]),
    ],
)
def test_tokens_in_flight_and_of_the_request_are_measured_against_the_threshold(
    tokens: tuple[int, ...], prompt_tokens: int, scores: list[float]
) -> None:
    request = Request(prompt_tokens=prompt_tokens)
    scorer = TokenLoadScorer(queue_threshold_tokens=1000)
    assert scorer(request, pool(tokens=tokens)) == scores


def test_tokens_that_an_endpoint_has_cached_are_no_load_for_it() -> None:
    match = PrefixMatch(blocks=6, block_tokens=64, by_slot={0: 2, 1: 6})
    request = Request(prompt_tokens=400, match=match)
    scores = TokenLoadScorer(queue_threshold_tokens=1000)(request, pool(tokens=(0, 100, 0)))
    assert scores == [1 - 272 / 1000, 1 - 116 / 1000, 1 - 400 / 1000]


def test_a_match_longer_than_the_estimated_prompt_does_not_go_below_0_tokens() -> None:
    match = PrefixMatch(blocks=2, block_tokens=64, by_slot={0: 2})
    request = Request(prompt_tokens=100, match=match)
    assert TokenLoadScorer(queue_threshold_tokens=1000)(request, pool(tokens=(0,))) == [1.0]


def test_K11_requests_and_tokens_are_not_mistaken_for_each_other() -> None:
    endpoints = pool(requests=(9, 0), tokens=(0, 4_194_304))
    assert ActiveRequestScorer()(REQUEST, endpoints) == [0.0, 1.0]
    assert TokenLoadScorer()(REQUEST, endpoints) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("scorer", "parameters", "key"),
    [
        (ActiveRequestScorer, {"idleThreshold": -1}, "$.idleThreshold"),
        (ActiveRequestScorer, {"maxBusyScore": 1.01}, "$.maxBusyScore"),
        (TokenLoadScorer, {"queueThresholdTokens": 0}, "$.queueThresholdTokens"),
        (TokenLoadScorer, {"queueThresholdTokens": 1.5}, "$.queueThresholdTokens"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(
    scorer: type[Plugin], parameters: dict[str, Any], key: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, scorer)
    assert key in str(refusal.value)
