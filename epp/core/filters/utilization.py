"""The filter that takes loaded endpoints out before scoring."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request


class Metric(StrEnum):
    """What a condition is about."""

    ACTIVE_REQUESTS = "active-requests"
    RUNNING_REQUESTS = "running-requests"
    WAITING_QUEUE = "waiting-queue"
    KV_CACHE_UTILIZATION = "kv-cache-utilization"


_VALUE: Mapping[Metric, Callable[[Endpoint], Any]] = {
    Metric.ACTIVE_REQUESTS: attrgetter("inflight_requests"),
    Metric.RUNNING_REQUESTS: attrgetter("load.running"),
    Metric.WAITING_QUEUE: attrgetter("load.waiting"),
    Metric.KV_CACHE_UTILIZATION: attrgetter("load.kv_usage_ratio"),
}
assert _VALUE.keys() == set(Metric)


class Condition(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A bound on one metric."""

    metric: Metric
    """`active-requests`: ours in flight. `running-requests`, `waiting-queue`: the engine's, all
    ranks together. `kv-cache-utilization`: 0..1, the fullest rank."""
    max_value: Annotated[float, msgspec.Meta(ge=0.0)]
    """Largest value that passes, >= 0; of `kv-cache-utilization` at most 1."""

    def __post_init__(self) -> None:
        if self.metric is Metric.KV_CACHE_UTILIZATION and self.max_value > 1.0:
            raise ValueError(
                f"`maxValue` of {self.metric} is a part, 0..1, got {self.max_value:g}: write 80 % "
                "as 0.8"
            )


class UtilizationFilter(Plugin, frozen=True):
    """Keep the endpoints that are within every bound.

    A metric that an endpoint does not report does not keep it out: nothing says that it is over.

    Reads: `Endpoint.inflight_requests`, `Load.running`, `Load.waiting`, `Load.kv_usage_ratio`,
        those that the conditions name.
    Cost: 5 us per condition; kept between scrapes without `active-requests`.
    Source: llm-d `utilization-filter`; there an unreported metric reads as 0, which passes too.
    """

    conditions: Annotated[tuple[Condition, ...], msgspec.Meta(min_length=1)]
    """Bounds, at least one; all must hold."""
    fallback_on_empty: bool = False
    """Whether all pass when none would; else such a request is refused."""
    in_flight_load_producer_name: str = ""
    """Producer that counts the active requests; empty = the only one there is."""

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """In-flight counts only where a condition asks for them: else the result is kept."""
        metrics = {condition.metric for condition in self.conditions}
        inflight = Reads.INFLIGHT if Metric.ACTIVE_REQUESTS in metrics else Reads.LABELS
        return Reads.LOAD | inflight if metrics - {Metric.ACTIVE_REQUESTS} else inflight

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        kept = endpoints
        for condition in self.conditions:
            value_of, most = _VALUE[condition.metric], condition.max_value
            kept = [e for e in kept if (value := value_of(e)) is None or value <= most]
        return kept if kept or not self.fallback_on_empty else endpoints
