"""Scorers over which endpoint holds how much of the request's prompt (`Request.match`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class PrefixCacheScorer(Plugin, frozen=True):
    """Prefer endpoints that hold much of the prompt.

    Reads: `Request.match`.
    Returns: the matched part of the prompt's full blocks; with a weight w for the match's length,
        w * min(1, matched tokens / scale) ** 2 + (1 - w) * matched part. 0 for a prompt without a
        full block.
    Cost: 4 us; 19 us with a weight for the length.
    Source: llm-d `prefix-cache-scorer`, same formula.
    """

    reads: ClassVar[Reads] = Reads.REQUEST

    match_length_weight: Ratio = 0.0
    """Weight w of how long the match is, beside which part of the prompt it is, 0..1: 0 looks at
    the part alone, as the reference's default, 1 at the length alone."""
    match_length_scale_tokens: Tokens = 8192
    """Matched tokens that count as a long match, >= 1; the reference's default."""
    prefix_match_info_producer_name: str = ""
    """Producer of the match; empty = the default one."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        get = self.by_slot(request).get
        return [get(e.slot, 0.0) for e in endpoints]

    def by_slot(self, request: Request) -> Mapping[int, float]:
        """See `SparseScorer`."""
        match = request.match
        total, w = match.blocks, self.match_length_weight
        parts = {slot: blocks / total for slot, blocks in match.by_slot.items()}
        if w == 0.0:
            return parts
        whole = total * match.block_tokens / self.match_length_scale_tokens
        return {
            slot: w * min(1.0, part * whole) ** 2 + (1.0 - w) * part for slot, part in parts.items()
        }


class NoHitLruScorer(Plugin, frozen=True):
    """Spread prompts that nobody has cached: prefer endpoints that got none for the longest time.

    Reads: whether `Request.match` names a candidate; `Endpoint.cold_pick_number`.
    Returns: 0.5 for all when a candidate holds a part of the prompt. Else by rank among the
        candidates, 1 for the least recent to 0 for the most recent; all that never got one share
        the 1, so the picker spreads over them.
    Cost: 10 us; 2 us for a prompt that somebody has cached.
    Source: llm-d `no-hit-lru-scorer`. There the never used ones are ranked by their order in the
        list, so the first is flooded, and ranks count pods that are gone.
    """

    reads: ClassVar[Reads] = Reads.INFLIGHT | Reads.REQUEST

    prefix_match_info_producer_name: str = ""
    """Producer of the match; empty = the default one."""
    lru_size: int = 1024
    """Accepted and ignored: the order is kept with the endpoints and needs no bound of its own."""
    prefix_plugin_type: str = ""
    """Accepted and ignored, as in the reference."""
    prefix_plugin_name: str = ""
    """Accepted and ignored, as in the reference."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        holders = request.match.by_slot
        if holders and any(e.slot in holders for e in endpoints):
            return [0.5] * len(endpoints)
        last = len(endpoints) - 1
        if last < 1:
            return [1.0] * len(endpoints)
        numbers = [e.cold_pick_number for e in endpoints]
        # Most recent first: among equal numbers the last and best place overwrites the others.
        score = {n: i / last for i, n in enumerate(sorted(numbers, reverse=True))}
        return [score[n] for n in numbers]
