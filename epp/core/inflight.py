"""What we have charged to each endpoint and not yet released: known at once, where a scrape is old.

A charge is made in the same call as the pick. Its prompt tokens are released at the first response
byte (the prefill is done), the request at its end; both exactly once, whatever order things come
in, also when the endpoint has left the pool meanwhile (its object keeps counting until the last
release)."""

from __future__ import annotations

import msgspec

from epp.core.model import Endpoint


class InflightParams(msgspec.Struct, frozen=True):
    """How much a request is charged (`inflight-load-producer`)."""

    add_estimated_output_tokens: bool = False
    """Charge estimated output tokens too, and hold all tokens until the request ends."""
    output_ratio: float = 1.5
    """Estimated output tokens per prompt token."""
    max_estimated_output_tokens: int | None = None


class Charge:
    """One request's load on one endpoint. Made by `Inflight.charge`, changed by `Inflight` only."""

    __slots__ = ("endpoint", "tokens", "tokens_until_end", "waiting")

    def __init__(self, endpoint: Endpoint, tokens: int, tokens_until_end: bool) -> None:
        self.endpoint: Endpoint | None = endpoint
        """`None` once released."""
        self.tokens = tokens
        """Tokens charged and not released."""
        self.tokens_until_end = tokens_until_end
        self.waiting = True
        """No first response byte yet."""


class Inflight:
    """The one writer of the in-flight counters and pick numbers of every endpoint."""

    def __init__(self, params: InflightParams | None = None) -> None:
        self.params = params or InflightParams()
        self.requests = 0
        """Requests charged and not released, over all endpoints."""
        self._picks = 0

    def charge(self, endpoint: Endpoint, *, tokens: int, cold: bool) -> Charge:
        """Count a request in.

        Args:
            tokens: what the endpoint has to compute for it, >= 0.
            cold: no candidate held any of its prompt.
        """
        assert tokens >= 0
        self._picks += 1
        self.requests += 1
        endpoint.last_pick_number = self._picks
        if cold:
            endpoint.cold_pick_number = self._picks
        endpoint.inflight_requests += 1
        endpoint.waiting_requests += 1
        endpoint.inflight_tokens += tokens
        return Charge(endpoint, tokens, self.params.add_estimated_output_tokens)

    def tokens_of(
        self, *, prompt_tokens: int, matched_tokens: int, max_output_tokens: int | None
    ) -> int:
        """Tokens to charge for a request of which `matched_tokens` are thought to be cached."""
        tokens = max(0, prompt_tokens - matched_tokens)
        if self.params.add_estimated_output_tokens:
            output = int(prompt_tokens * self.params.output_ratio)
            for limit in (max_output_tokens, self.params.max_estimated_output_tokens):
                output = output if limit is None else min(output, limit)
            tokens += output
        return tokens

    def first_byte(self, charge: Charge) -> None:
        """The first byte of the response body came by: its prefill is done."""
        if charge.endpoint is None or not charge.waiting:
            return
        charge.waiting = False
        charge.endpoint.waiting_requests -= 1
        if not charge.tokens_until_end:
            charge.endpoint.inflight_tokens -= charge.tokens
            charge.tokens = 0

    def move(self, charge: Charge, endpoint: Endpoint) -> None:
        """The gateway sent the request elsewhere than we picked: so goes the load."""
        old = charge.endpoint
        if old is None or old is endpoint:
            return
        for where, sign in ((old, -1), (endpoint, 1)):
            where.inflight_requests += sign
            where.waiting_requests += sign * charge.waiting
            where.inflight_tokens += sign * charge.tokens
        charge.endpoint = endpoint

    def release(self, charge: Charge) -> None:
        """The request is over; a second call changes nothing."""
        if charge.endpoint is None:
            return
        endpoint = charge.endpoint
        charge.endpoint = None
        self.requests -= 1
        endpoint.inflight_requests -= 1
        endpoint.waiting_requests -= charge.waiting
        endpoint.inflight_tokens -= charge.tokens
        assert endpoint.inflight_requests >= 0
        assert endpoint.waiting_requests >= 0
        assert endpoint.inflight_tokens >= 0
