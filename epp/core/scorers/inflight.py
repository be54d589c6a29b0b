"""Scorers over what we sent ourselves and have not seen end: exact and current, where a scrape is
old, but blind to other routers' requests. An endpoint that never reported is no exception here."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Requests = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class ActiveRequestScorer(Plugin, frozen=True):
    """Prefer endpoints with few requests of ours in flight, idle ones most.

    Reads: `Endpoint.inflight_requests`.
    Returns: 1 for an idle endpoint; else from `maxBusyScore` down to 0 for the busiest candidate.
    Cost: 6 us.
    Source: llm-d `active-request-scorer`, same formula.
    """

    reads: ClassVar[Reads] = Reads.INFLIGHT

    idle_threshold: Requests = 0
    """Requests up to which an endpoint counts as idle, >= 0; the reference's default."""
    max_busy_score: Ratio = 1.0
    """Bound of a busy endpoint's score, 0..1, which keeps it below the idle ones; the reference's
    default."""
    in_flight_load_producer_name: str = ""
    """Producer that counts the requests; empty = the only one there is."""
    request_timeout: str = ""
    """Accepted and ignored, as in the reference."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        idle, best = self.idle_threshold, self.max_busy_score
        counts = [e.inflight_requests for e in endpoints]
        distinct = set(counts)  # few, and each is scored once
        high = max(distinct, default=0)
        score = {c: 1.0 if c <= idle else (high - c) / high * best for c in distinct}
        return [score[c] for c in counts]


class TokenLoadScorer(Plugin, frozen=True):
    """Prefer endpoints with few prompt tokens to compute, this request's included.

    Reads: `Endpoint.inflight_tokens`; `Request.prompt_tokens` less what `Request.match` says the
        endpoint has cached.
    Returns: 1 for nothing to compute down to 0 at the threshold and beyond.
    Cost: 6 us; 11 us when every endpoint holds a part of the prompt.
    Source: llm-d `token-load-scorer`, same formula.
    """

    reads: ClassVar[Reads] = Reads.INFLIGHT | Reads.REQUEST

    queue_threshold_tokens: Tokens = 4_194_304
    """Tokens that count as full, >= 1; the reference's default, 128 requests of 32 768."""
    in_flight_load_producer_name: str = ""
    """Producer that counts the tokens; empty = the only one there is."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        full, prompt, match = self.queue_threshold_tokens, request.prompt_tokens, request.match
        block = match.block_tokens
        # The prompt's tokens are an estimate, so the matched blocks may hold more of them.
        uncached = {
            slot: left if (left := prompt - blocks * block) > 0 else 0
            for slot, blocks in match.by_slot.items()
        }
        get = uncached.get
        return [
            1.0 - tokens / full
            if (tokens := e.inflight_tokens + get(e.slot, prompt)) < full
            else 0.0
            for e in endpoints
        ]
