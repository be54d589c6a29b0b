"""Scorers over what the engines report about themselves, as of the last scrape.

An endpoint without a report scores `unknown`, so it is never taken for an idle one: an idle one
scores the family's best. The results change with the scrapes only and are kept between them.
"""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Score = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
LowScore = Annotated[float, msgspec.Meta(ge=0.0, le=0.5)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class QueueScorer(Plugin, frozen=True):
    """Prefer the shortest waiting queue.

    Reads: `Load.waiting` (requests, all ranks of the engine together).
    Returns: 1 for the shortest known queue to 0 for the longest, all 1 when they are equal.
    Cost: 8 us.
    Source: llm-d `queue-scorer`, same formula; there a missing queue reads as 0.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    unknown: Score = 0.5
    """Score of an endpoint that reports no queue, 0..1; ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        return fewest_first([e.load.waiting for e in endpoints], self.unknown)


class RunningRequestsSizeScorer(Plugin, frozen=True):
    """Prefer the smallest running batch.

    Reads: `Load.running` (requests, all ranks of the engine together).
    Returns: 1 for the smallest known batch to 0 for the largest, all 1 when they are equal.
    Cost: 8 us.
    Source: llm-d `running-requests-size-scorer`, same formula; there a missing batch reads as 0.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    unknown: Score = 0.5
    """Score of an endpoint that reports no batch, 0..1; ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        return fewest_first([e.load.running for e in endpoints], self.unknown)


class KvCacheUtilizationScorer(Plugin, frozen=True):
    """Prefer the emptiest KV cache.

    Reads: `Load.kv_usage_ratio` (0..1, the fullest rank).
    Returns: the free part of the cache.
    Cost: 3 us.
    Source: llm-d `kv-cache-utilization-scorer`; there a missing usage reads as 0.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    unknown: Score = 0.5
    """Score of an endpoint that reports no usage, 0..1; ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        unknown = self.unknown
        return [
            unknown if (used := e.load.kv_usage_ratio) is None else 1.0 - used for e in endpoints
        ]


class LoadAwareScorer(Plugin, frozen=True):
    """Prefer endpoints whose waiting queue is far from a threshold, the same for every pool.

    Reads: `Load.waiting` (requests, all ranks of the engine together).
    Returns: 0.5 for an empty queue, falling to 0 at the threshold and beyond; never above 0.5.
    Cost: 4 us.
    Source: llm-d `load-aware-scorer`, same formula; there a missing queue reads as 0.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    threshold: Count = 128
    """Waiting requests that count as full, >= 1; the reference's default."""
    unknown: LowScore = 0.25
    """Score of an endpoint that reports no queue, 0..0.5 (0.5 is idle); ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        unknown, full = self.unknown, self.threshold
        return [
            unknown
            if (waiting := e.load.waiting) is None
            else 0.5 * (1.0 - waiting / full)
            if waiting < full
            else 0.0
            for e in endpoints
        ]


def fewest_first(counts: Sequence[int | None], unknown: float) -> list[float]:
    """Min-max: 1 for the smallest known count to 0 for the largest, all 1 when they are equal.

    Args:
        unknown: score where the count is `None`.
    """
    known = [c for c in counts if c is not None]
    high = max(known, default=0)
    spread = high - min(known, default=0)
    if spread == 0:
        return [unknown if c is None else 1.0 for c in counts]
    return [unknown if c is None else (high - c) / spread for c in counts]
