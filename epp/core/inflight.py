"""What we have charged to each endpoint and not yet released: known at once, where a scrape is old.

A charge is made in the same call as the pick. Its prefill is released at the first response byte,
the request at its end; both exactly once, whatever order things come in, also when the endpoint has
left the pool meanwhile (its object keeps counting until the last release).

Where the first byte or the end cannot be seen (an answer that is not streamed, a gateway that shows
no response bodies), the release is due at a predicted time: `advance` carries out what is due."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from epp.core.kvuse import Units, units_of
from epp.core.model import Endpoint
from epp.core.structs import Frozen

NEVER_S = float("inf")
DUE_MIN = 64
DUE_PER_REQUEST = 4
"""A request has two predicted releases at most. Where there are more of them than this many for
each, most belong to requests that ended before."""


class InflightParams(Frozen, frozen=True):
    """How much a request is charged (`inflight-load-producer`)."""

    add_estimated_output_tokens: bool = False
    """Charge estimated output tokens too, and hold all tokens until the request ends."""
    output_ratio: float = 1.5
    """Estimated output tokens per prompt token."""
    max_estimated_output_tokens: int | None = None


class Prefill(Frozen, frozen=True):
    """What the picked endpoint has to compute for a request before its first token."""

    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Of these, the ones the endpoint holds, or will by then."""
    seconds: float = 0.0
    """By the learned rates."""
    blind: bool = False
    """Its first response byte will not be seen."""
    ttft_s: float = 0.0
    """Predicted time to the first token."""
    tpot_s: float = 0.0
    """Predicted seconds per output token after it."""


NO_PREFILL = Prefill()


class Charge:
    """One request's load on one endpoint. Made by `Inflight.charge`, changed by `Inflight` only."""

    __slots__ = (
        "blind",
        "context_tokens_at_first_byte",
        "dispatched_s",
        "endpoint",
        "inflight_at_first_byte",
        "moved",
        "prefill",
        "tokens",
        "tokens_until_end",
        "units",
        "waiting",
        "work_s",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        prefill: Prefill,
        *,
        tokens: int,
        tokens_until_end: bool,
        now_s: float,
        units: Units,
    ) -> None:
        self.endpoint: Endpoint | None = endpoint
        """`None` once released."""
        self.prefill = prefill
        self.work_s = prefill.seconds
        self.blind = prefill.blind
        self.dispatched_s = now_s
        self.tokens = tokens
        """Tokens charged and not released."""
        self.tokens_until_end = tokens_until_end
        self.waiting = True
        """No first response byte yet."""
        self.units = units
        """What it holds of the KV cache."""
        self.moved = False
        """The gateway sent it elsewhere than we picked, at a time we do not know."""
        self.inflight_at_first_byte = 0
        self.context_tokens_at_first_byte = 0


class Inflight:
    """The one writer of the in-flight counters, backlogs and pick numbers of every endpoint."""

    def __init__(self, params: InflightParams | None = None) -> None:
        self.params = params or InflightParams()
        self.requests = 0
        """Requests charged and not released, over all endpoints."""
        self._picks = 0
        self._due: list[tuple[float, int, Charge, bool]] = []
        """Heap of predicted releases: when, a number that breaks ties, whose, and whether it is the
        end of the request (else its first byte)."""
        self._dues = 0

    def charge(
        self,
        endpoint: Endpoint,
        prefill: Prefill = NO_PREFILL,
        *,
        tokens: int,
        cold: bool,
        now_s: float,
        chain: Sequence[int] = (),
        block_tokens: int = 64,
    ) -> Charge:
        """Count a request in.

        Args:
            tokens: what the endpoint has to compute for it, >= 0.
            cold: no candidate held any of its prompt.
            chain: names of its prefix blocks, of `block_tokens` tokens each.
        """
        assert tokens >= 0
        self._picks += 1
        self.requests += 1
        endpoint.last_pick_number = self._picks
        if cold:
            endpoint.cold_pick_number = self._picks
        charge = Charge(
            endpoint,
            prefill,
            tokens=tokens,
            tokens_until_end=self.params.add_estimated_output_tokens,
            now_s=now_s,
            units=units_of(chain, block_tokens, prefill.prompt_tokens),
        )
        _count(endpoint, charge, +1)
        if prefill.blind:
            self._at(now_s + max(prefill.ttft_s, prefill.seconds), charge, end=False)
        return charge

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

    def first_byte(self, charge: Charge, now_s: float) -> float | None:
        """The first byte of the response body came by, or is thought to have: its prefill is done.

        Returns: seconds the endpoint spent on it if it serves in order; `None` when it was released
            before.
        """
        endpoint = charge.endpoint
        if endpoint is None or not charge.waiting:
            return None
        backlog = endpoint.backlog
        for earlier in backlog.overtaken_by(charge):
            assert isinstance(earlier, Charge)
            self._served(endpoint, earlier)
        service_s = now_s - backlog.in_service_since_s(charge)
        self._served(endpoint, charge)
        backlog.last_first_byte_s = max(backlog.last_first_byte_s, now_s)
        return service_s

    def _served(self, endpoint: Endpoint, charge: Charge) -> None:
        endpoint.backlog.remove(charge)
        charge.waiting = False
        endpoint.waiting_requests -= 1
        if not charge.tokens_until_end:
            endpoint.inflight_tokens -= charge.tokens
            charge.tokens = 0
        charge.inflight_at_first_byte = endpoint.inflight_requests
        charge.context_tokens_at_first_byte = endpoint.context_tokens

    def move(self, charge: Charge, endpoint: Endpoint) -> None:
        """The gateway sent the request elsewhere than we picked: so goes the load."""
        old = charge.endpoint
        if old is None or old is endpoint:
            return
        _count(old, charge, -1)
        _count(endpoint, charge, +1)
        charge.endpoint = endpoint
        charge.moved = True

    def release(self, charge: Charge, now_s: float | None = None) -> None:
        """The request is over; a second call changes nothing.

        Args:
            now_s: when, if that is known: until then the engine served it, if it was the oldest.
        """
        if charge.endpoint is None:
            return
        endpoint = charge.endpoint
        if charge.waiting and now_s is not None:
            endpoint.backlog.given_up(charge, now_s)
        charge.endpoint = None
        self.requests -= 1
        _count(endpoint, charge, -1)
        assert endpoint.inflight_requests >= 0
        assert endpoint.waiting_requests >= 0
        assert endpoint.inflight_tokens >= 0
        assert endpoint.context_tokens >= 0

    def release_at(self, charge: Charge, at_s: float) -> None:
        """The end of the request will not be seen: release it at `at_s`."""
        if charge.endpoint is not None:
            self._at(at_s, charge, end=True)

    def advance(self, now_s: float) -> None:
        """Release what is due by prediction."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, charge, end = heapq.heappop(self._due)
            if end:
                self.release(charge, due_s)
            else:
                self.first_byte(charge, due_s)

    @property
    def next_due_s(self) -> float:
        """When `advance` will have something to do; infinity = nothing is predicted."""
        return self._due[0][0] if self._due else NEVER_S

    def _at(self, due_s: float, charge: Charge, *, end: bool) -> None:
        self._dues += 1
        heapq.heappush(self._due, (due_s, self._dues, charge, end))
        if len(self._due) > DUE_MIN + DUE_PER_REQUEST * self.requests:
            # Predictions may be hours ahead: what came to pass before is not kept until then.
            self._due = [
                d for d in self._due if d[2].endpoint is not None and (d[3] or d[2].waiting)
            ]
            heapq.heapify(self._due)


def _count(endpoint: Endpoint, charge: Charge, sign: int) -> None:
    endpoint.inflight_requests += sign
    endpoint.inflight_tokens += sign * charge.tokens
    endpoint.context_tokens += sign * charge.prefill.prompt_tokens
    if sign > 0:
        endpoint.kv.add(charge.units)
    else:
        endpoint.kv.remove(charge.units)
    if charge.waiting:
        endpoint.waiting_requests += sign
        if sign > 0:
            endpoint.backlog.add(charge)
        else:
            endpoint.backlog.remove(charge)
