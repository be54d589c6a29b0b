"""Scoring by LoRA adapter: an adapter that is loaded answers at once, another is loaded first and
may push one out.

Engines list adapters in use, not adapters loaded, so an adapter without traffic looks absent; its
requests then go where there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Lora, Plugin, Reads, Request

Score = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

RUNNING, ROOM, WAITING, FULL = 1.0, 0.8, 0.6, 0.0


class LoraAffinityScorer(Plugin, frozen=True):
    """Prefer endpoints that have the request's adapter loaded, then those with room for it.

    A request's adapter is its model name; the base model's name is on no list, so it goes where
    there is room.

    Reads: `Load.lora`; `Request.engine_model`.
    Returns: 1 adapter running, 0.8 room for another, 0.6 adapter waiting, 0 full, or an engine that
        reports no adapters at all.
    Cost: 8 us; 17 us when every endpoint is full.
    Source: llm-d `lora-affinity-scorer`. There an adapter both running and waiting takes two
        places, and an endpoint that never reported scores 0.
    """

    reads: ClassVar[Reads] = Reads.LOAD | Reads.REQUEST

    unknown: Score = 0.5
    """Score of an endpoint that never reported, or does not say how many adapters fit, 0..1;
    ours."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        adapter, unknown = request.engine_model, self.unknown
        return [
            _affinity(adapter, lora, unknown)
            if (lora := e.load.lora) is not None
            else unknown
            if e.load.at_s is None
            else FULL
            for e in endpoints
        ]


def _affinity(adapter: str, lora: Lora, unknown: float) -> float:
    if adapter in lora.running:
        return RUNNING
    running, waiting, places = lora.running, lora.waiting, lora.max_adapters
    # vLLM lists an adapter under both names; the sum, which is cheaper, is an upper bound.
    if places is not None and (
        len(running) + len(waiting) < places or len(running | waiting) < places
    ):
        return ROOM
    if adapter in waiting:
        return WAITING
    return unknown if places is None else FULL
