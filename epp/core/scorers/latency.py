"""The scorer over predicted latency, and what it falls back on without predictions.

Which endpoints are scored at all depends on who holds the client's promises; the others score 0.
First those that hold both promises. If none does: those that are idle, where the prediction errs
least; else those that break the milder promise, time per output token; else those that break only
the time to the first token; else all. Within these, the scores follow the headroom, promised less
predicted time, whose sign says who holds a promise. As in the reference EPP a promise that was not
given counts as 0 seconds: nobody holds it, and what is left is the order of the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Score = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

SPREAD_S_MIN = 1e-12
"""Headrooms this close count as equal; the reference's 1e-9 ms."""
STEPS = 100
"""Scores are whole hundredths, so that near-equal endpoints share the load."""


class Strategy(StrEnum):
    """Which of the endpoints that hold the promises is preferred."""

    LEAST = "least"
    MOST = "most"


class LatencyScorer(Plugin, frozen=True):
    """Prefer endpoints by predicted latency: the fullest that still holds the client's promises,
    or the one that breaks them least.

    Reads: `Request.predictions`, `Request.slo_ttft_s`, `Request.slo_tpot_s`;
        `Endpoint.inflight_requests`. Without any prediction `Load.kv_usage_ratio`, `Load.waiting`
        and `Request.match`.
    Returns: hundredths from 0.01 to 1 for the endpoints that come into question, 0 for the others.
        Where there is no promise, the shortest predicted times score 1. Without any prediction the
        weighted mean of free KV cache, short queue and matched part of the prompt.
    Cost: 30 to 60 us, by how many come into question; 40 us without predictions.
    Source: llm-d `latency-scorer`, same formulas, so an endpoint without a prediction counts as one
        that just holds the promises. There, without any prediction, an unreported load reads as 0.
    """

    reads: ClassVar[Reads] = Reads.REQUEST | Reads.INFLIGHT | Reads.LOAD
    needs_predictions: ClassVar[bool] = True

    ttft_weight: Weight = 0.8
    """How much the predicted time to the first token counts beside `tpotWeight`, >= 0; only the
    ratio of the two matters. Both 0 = this one alone."""
    tpot_weight: Weight = 0.2
    """How much the predicted time per output token counts beside `ttftWeight`, >= 0; raise it for
    long answers."""
    headroom_selection_strategy: Strategy = Strategy.LEAST
    """Of the endpoints that hold the promises, `least` prefers the one closest to breaking them, so
    that others stay free, and `most` the one farthest from it."""
    composite_kv_weight: Weight = msgspec.field(default=1.0, name="compositeKVWeight")
    """Without predictions: how much the free part of the KV cache counts beside the next two, >= 0;
    only the ratios of the three matter. All three 0 = this one alone."""
    composite_queue_weight: Weight = 1.0
    """Without predictions: how much a short queue counts, against the longest of the candidates',
    >= 0."""
    composite_prefix_weight: Weight = 1.0
    """Without predictions: how much the part of the prompt that the endpoint holds counts, >= 0."""
    latency_prediction_info_producer_name: str = ""
    """Producer of the predictions; empty = the only one there is."""
    prefix_match_info_producer_name: str = ""
    """Producer of the match; empty = the default one."""
    unknown: Score = 0.5
    """Without predictions, the worth of a load that an endpoint does not report, 0..1; ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        found = [request.predictions.get(e.slot) for e in endpoints]
        if all(p is None for p in found):
            return self._composite(request, endpoints)
        slo_ttft_s, slo_tpot_s = request.slo_ttft_s or 0.0, request.slo_tpot_s or 0.0
        ttfts_s = [0.0 if p is None else slo_ttft_s - p.ttft_s for p in found]
        tpots_s = [0.0 if p is None else slo_tpot_s - p.tpot_s for p in found]
        chosen, holding = _in_question(ttfts_s, tpots_s, endpoints)
        distances = self._distances([ttfts_s[i] for i in chosen], [tpots_s[i] for i in chosen])
        if not holding or self.headroom_selection_strategy is Strategy.LEAST:
            distances = [1.0 - distance for distance in distances]
        scores = [0.0] * len(found)
        for i, worth in zip(chosen, distances, strict=True):
            scores[i] = min(1.0, (int(worth * STEPS) + 1) / STEPS)
        return scores

    def _distances(self, ttfts_s: Sequence[float], tpots_s: Sequence[float]) -> list[float]:
        """How far each headroom is from 0, from 0 for the closest to 1 for the farthest."""
        ttft, tpot = _normalized(ttfts_s), _normalized(tpots_s)
        # What is the same everywhere would only press the scores together.
        if ttft is None or tpot is None:
            return ttft or tpot or [0.5] * len(ttfts_s)
        a, b, total = self.ttft_weight, self.tpot_weight, self.ttft_weight + self.tpot_weight
        a, b = (a / total, b / total) if total > 0.0 else (1.0, 0.0)
        return [a * x + b * y for x, y in zip(ttft, tpot, strict=True)]

    def _composite(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        kv, queue, prefix = self._composite_weights()
        queues, unknown = [e.load.waiting for e in endpoints], self.unknown
        longest = max([q for q in queues if q is not None], default=0)
        matched, blocks = request.match.by_slot, request.match.blocks
        totals = [
            kv * (unknown if (used := e.load.kv_usage_ratio) is None else 1.0 - used)
            + queue * _shortness(waiting, longest, unknown)
            + prefix * (matched.get(e.slot, 0) / blocks if blocks else 0.0)
            for e, waiting in zip(endpoints, queues, strict=True)
        ]
        return [min(1.0, int(total * STEPS + 0.5) / STEPS) for total in totals]

    def _composite_weights(self) -> tuple[float, float, float]:
        kv, queue = self.composite_kv_weight, self.composite_queue_weight
        total = kv + queue + self.composite_prefix_weight
        if total <= 0.0:
            return 1.0, 0.0, 0.0
        return kv / total, queue / total, self.composite_prefix_weight / total


def _in_question(
    ttfts_s: Sequence[float], tpots_s: Sequence[float], endpoints: Sequence[Endpoint]
) -> tuple[Sequence[int], bool]:
    """Indices of the endpoints to score, by their headrooms, and whether they hold the promises."""
    rooms = list(enumerate(zip(ttfts_s, tpots_s, strict=True)))
    if holding := [i for i, (ttft_s, tpot_s) in rooms if ttft_s >= 0.0 <= tpot_s]:
        return holding, True
    return (
        [i for i, e in enumerate(endpoints) if not e.inflight_requests]
        or [i for i, (ttft_s, _) in rooms if ttft_s >= 0.0]
        or [i for i, (_, tpot_s) in rooms if tpot_s >= 0.0]
        or range(len(rooms))
    ), False


def _normalized(headrooms_s: Sequence[float]) -> list[float] | None:
    """Min-max of their amounts: 0 for the smallest to 1 for the largest; `None` when they are as
    good as equal."""
    amounts_s = [abs(headroom_s) for headroom_s in headrooms_s]
    low_s = min(amounts_s)
    spread_s = max(amounts_s) - low_s
    if spread_s <= SPREAD_S_MIN:
        return None
    return [(amount_s - low_s) / spread_s for amount_s in amounts_s]


def _shortness(waiting: int | None, longest: int, unknown: float) -> float:
    """1 for an empty queue, or where all are empty, to 0 for the longest."""
    if waiting is None:
        return unknown
    return (longest - waiting) / longest if longest else 1.0
