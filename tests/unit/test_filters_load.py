"""Filters over reported load and attributes: bounds, what is not reported, and nothing left."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest

from epp.core.filters.attribute import EndpointAttributeFilter
from epp.core.filters.utilization import Metric, UtilizationFilter
from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load, Plugin, Reads, Request


def pool(*loads: Load) -> list[Endpoint]:
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(len(loads))]
    for endpoint, load in zip(endpoints, loads, strict=True):
        endpoint.load = load
    return endpoints


def utilization(*conditions: tuple[str, float], **other: Any) -> UtilizationFilter:
    bounds = [{"metric": metric, "maxValue": most} for metric, most in conditions]
    return msgspec.convert({"conditions": bounds, **other}, UtilizationFilter)


def slots(plugin: Plugin, endpoints: list[Endpoint]) -> list[int]:
    return [e.slot for e in plugin(Request(), endpoints)]


@pytest.mark.parametrize(
    ("metric", "most", "field", "values"),
    [
        ("running-requests", 4, "running", (4, 5, 3)),
        ("waiting-queue", 0, "waiting", (0, 3, 0)),
        ("kv-cache-utilization", 0.8, "kv_usage_ratio", (0.8, 0.8000000000000002, 0.0)),
    ],
)
def test_an_endpoint_passes_up_to_the_bound_and_not_beyond(
    metric: str, most: float, field: str, values: tuple[float, ...]
) -> None:
    endpoints = pool(*(Load(at_s=1.0, **{field: value}) for value in values))
    assert slots(utilization((metric, most)), endpoints) == [0, 2]


def test_active_requests_are_our_own() -> None:
    endpoints = pool(Load(at_s=1.0, running=9), Load(at_s=1.0, running=0))
    endpoints[1].inflight_requests = 3
    assert slots(utilization(("active-requests", 2)), endpoints) == [0]
    assert slots(utilization(("active-requests", 3)), endpoints) == [0, 1]


def test_every_bound_must_hold() -> None:
    endpoints = pool(
        Load(at_s=1.0, running=10, waiting=0),
        Load(at_s=1.0, running=41, waiting=0),
        Load(at_s=1.0, running=10, waiting=1),
    )
    assert slots(utilization(("running-requests", 40), ("waiting-queue", 0)), endpoints) == [0]


@pytest.mark.parametrize("metric", [m.value for m in Metric])
def test_an_endpoint_that_does_not_report_is_not_taken_for_one_over_the_bound(metric: str) -> None:
    full = Load(at_s=1.0, running=9, waiting=9, kv_usage_ratio=1.0)
    endpoints = pool(UNKNOWN, full)
    endpoints[1].inflight_requests = 9
    assert slots(utilization((metric, 0)), endpoints) == [0]


@pytest.mark.parametrize(("fallback", "kept"), [(False, []), (True, [0, 1])])
def test_what_happens_when_none_is_within_bounds_is_a_choice(
    fallback: bool, kept: list[int]
) -> None:
    endpoints = pool(Load(at_s=1.0, waiting=1), Load(at_s=1.0, waiting=2))
    plugin = utilization(("waiting-queue", 0), fallbackOnEmpty=fallback)
    assert slots(plugin, endpoints) == kept
    assert slots(plugin, []) == []


@pytest.mark.parametrize(
    ("metrics", "reads"),
    [
        (["kv-cache-utilization"], Reads.LOAD),
        (["active-requests"], Reads.INFLIGHT),
        (["active-requests", "waiting-queue"], Reads.LOAD | Reads.INFLIGHT),
    ],
)
def test_bounds_on_scraped_load_alone_are_kept_between_scrapes(
    metrics: list[str], reads: Reads
) -> None:
    assert utilization(*((metric, 1) for metric in metrics)).reads == reads


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "conditions"),
        ({"conditions": []}, "$.conditions"),
        ({"conditions": [{"maxValue": 1}]}, "metric"),
        ({"conditions": [{"metric": "unknown", "maxValue": 1}]}, "$.conditions[0].metric"),
        ({"conditions": [{"metric": "active-requests"}]}, "maxValue"),
        ({"conditions": [{"metric": "waiting-queue", "maxValue": -1}]}, "[0].maxValue"),
        ({"conditions": [{"metric": "kv-cache-utilization", "maxValue": 80}]}, "write 80 % as 0.8"),
        ({"conditions": [{"metric": "waiting-queue", "maxValue": 1, "minValue": 0}]}, "minValue"),
    ],
)
def test_a_wrong_bound_is_refused_with_its_key(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, UtilizationFilter)
    assert said in str(refusal.value)


def test_the_producer_of_the_reference_is_accepted() -> None:
    plugin = utilization(("active-requests", 1), inFlightLoadProducerName="i")
    assert plugin.in_flight_load_producer_name == "i"


def attribute(operator: str = "LessThan", value: float = 10, **other: Any) -> Plugin:
    threshold = {"operator": operator, "value": value}
    algorithm = {"type": "threshold", "threshold": threshold}
    parameters = {"attribute": "depth", "algorithm": algorithm, **other}
    return msgspec.convert(parameters, EndpointAttributeFilter)


def depths(*values: float | None) -> list[Endpoint]:
    return pool(
        *(Load(at_s=1.0, attributes={} if v is None else {"depth": v, "width": 0}) for v in values)
    )


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        ("LessThan", [0]),
        ("LessThanOrEqual", [0, 1]),
        ("GreaterThan", [2]),
        ("GreaterThanOrEqual", [1, 2]),
        ("Equal", [1]),
        ("NotEqual", [0, 2]),
    ],
)
def test_an_attribute_compares_with_the_threshold_on_its_right(
    operator: str, kept: list[int]
) -> None:
    assert slots(attribute(operator, 10), depths(9.5, 10, 11)) == kept


@pytest.mark.parametrize(("on_missing", "kept"), [("Pass", [0, 1, 2]), ("Fail", [1])])
@pytest.mark.parametrize("operator", ["LessThan", "NotEqual"])
def test_a_missing_attribute_and_a_nan_pass_or_fail_as_asked(
    operator: str, on_missing: str, kept: list[int]
) -> None:
    endpoints = depths(None, 1, nan, 10)
    assert slots(attribute(operator, 10, onMissing=on_missing), endpoints) == kept


def test_missing_passes_unless_asked_otherwise_and_a_silent_endpoint_is_missing_it() -> None:
    assert slots(attribute(), pool(UNKNOWN)) == [0]


def test_an_infinite_attribute_compares_as_such() -> None:
    assert slots(attribute("GreaterThan"), depths(inf, -inf)) == [0]


@pytest.mark.parametrize(("fallback", "kept"), [(False, []), (True, [0, 1])])
def test_what_happens_when_no_attribute_compares_is_a_choice(
    fallback: bool, kept: list[int]
) -> None:
    assert slots(attribute(fallbackOnEmpty=fallback), depths(10, 11)) == kept


def test_the_producer_of_an_attribute_is_accepted() -> None:
    assert slots(attribute(producer="core-metrics-extractor"), depths(9)) == [0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attribute": ""}, "$.attribute"),
        ({"attribute": "depth/extractor"}, "write the part after `/` as `producer`"),
        ({"onMissing": "Ignore"}, "$.onMissing"),
        ({"algorithm": {"type": "topK"}}, "$.algorithm.type"),
        ({"algorithm": {"type": "threshold"}}, "threshold"),
        (
            {"algorithm": {"type": "threshold", "threshold": {"operator": "<", "value": 1}}},
            "$.algorithm.threshold.operator",
        ),
        ({"algorithm": {"type": "threshold", "threshold": {"operator": "Equal"}}}, "value"),
    ],
)
def test_a_wrong_attribute_filter_is_refused_with_its_key(
    change: dict[str, Any], said: str
) -> None:
    algorithm = {"type": "threshold", "threshold": {"operator": "Equal", "value": 1}}
    parameters = {"attribute": "depth", "algorithm": algorithm, **change}
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(parameters, EndpointAttributeFilter)
    assert said in str(refusal.value)
