"""The filter that keeps to the endpoints predicted to hold the promises of a request."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from epp.core.filters.headroom import SloHeadroomTierFilter
from epp.core.model import Endpoint, EndpointSpec, Prediction, Request

Times = tuple[float, float] | None


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(count)]


def predicting(
    *times: Times, ttft_s: float | None = 1.0, tpot_s: float | None = 0.05, seed: int = 0
) -> Request:
    predictions = {slot: Prediction(*t) for slot, t in enumerate(times) if t is not None}
    return Request(slo_ttft_s=ttft_s, slo_tpot_s=tpot_s, predictions=predictions, rng=Random(seed))


def kept(request: Request, count: int, **parameters: Any) -> list[int]:
    plugin = msgspec.convert({"epsilonExploreNeg": 0, **parameters}, SloHeadroomTierFilter)
    return [e.slot for e in plugin(request, pool(count))]


FAST, LATE, SLOW = (0.5, 0.02), (1.5, 0.02), (0.5, 0.08)


@pytest.mark.parametrize(
    ("times", "slots"),
    [
        ((LATE, FAST, SLOW, FAST), [1, 3]),
        ((FAST, (1.0, 0.05)), [0, 1]),
        ((FAST, (1.0000000000000002, 0.05)), [0]),
        ((LATE, SLOW), [0, 1]),
        ((None, FAST, None), [1]),
        ((None, LATE), [0, 1]),
        ((None, None), [0, 1]),
    ],
)
def test_those_that_hold_both_promises_stay_and_else_the_others(
    times: tuple[Times, ...], slots: list[int]
) -> None:
    assert kept(predicting(*times), len(times)) == slots


def test_the_others_stay_in_their_order_when_exploring_and_unpredicted_ones_are_among_them() -> (
    None
):
    request = predicting(None, LATE, FAST, None, SLOW)
    assert kept(request, 5, epsilonExploreNeg=1) == [0, 1, 3, 4]


def test_without_promises_all_stay() -> None:
    request = predicting(FAST, SLOW, ttft_s=None, tpot_s=None)
    assert kept(request, 2, epsilonExploreNeg=1) == [0, 1]


@pytest.mark.parametrize("times", [(FAST,), (LATE,), (None,), ()])
def test_one_endpoint_stays_whatever_is_predicted(times: tuple[Times, ...]) -> None:
    request = predicting(*times)
    assert kept(request, len(times), epsilonExploreNeg=1) == list(range(len(times)))


@pytest.mark.parametrize("times", [(FAST, FAST), (LATE, LATE)])
def test_where_all_are_alike_there_is_nothing_to_explore(times: tuple[Times, ...]) -> None:
    assert kept(predicting(*times), 2, epsilonExploreNeg=1) == [0, 1]


def test_by_default_one_request_in_a_hundred_explores() -> None:
    plugin, endpoints, request = SloHeadroomTierFilter(), pool(2), predicting(FAST, LATE, seed=3)
    explored = sum(plugin(request, endpoints)[0].slot for _ in range(10_000))
    assert 60 <= explored <= 140


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"epsilonExploreNeg": 1.5}, "$.epsilonExploreNeg"),
        ({"epsilonExploreNeg": -0.1}, "$.epsilonExploreNeg"),
        ({"epsilon": 0.1}, "epsilon"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_key(parameters: dict[str, Any], key: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, SloHeadroomTierFilter)
    assert key in str(refusal.value)


def test_it_needs_predictions_and_accepts_the_name_of_their_producer() -> None:
    parameters = {"latencyPredictionInfoProducerName": "l"}
    assert msgspec.convert(parameters, SloHeadroomTierFilter).needs_predictions
