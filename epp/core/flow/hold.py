"""The hold: a request is kept here until the endpoint it wants has room, then decided again.

A request dispatched too early waits in an engine's queue, where nothing can move it any more. Kept
here, it is decided at the last moment, by what is known then. It never falls through to its second
choice: its cache is where it wants to go, and a queue in front of whichever endpoint frees first
would lose that for everybody.

An endpoint has room for a request when nothing runs there, or when

    backlog + the wait for a place <= one engine step of prefill (`chunk_tokens` at its learned
    rate), the wait being 0 with fewer than `seqs_max` in flight, else the time until so many of
    them have ended, and
    distinct tokens of the prompts in flight there, with some for their output, and what the request
    adds to them, fit its KV cache (where it reports one).

Held requests are filed under the endpoint they want. `wake` goes through the endpoints that have
room again: of the first `looked_max` that want it, the one with the highest response ratio

    (wait + w + c) / (w + c)        w: its prefill there, seconds; c: `fairness_s`

is decided once more, and goes or is filed under another. Endpoints nobody wants are offered to the
head of the order every `recheck_s`. A request held for `guard_s` closes its endpoint to all others
until it has gone, and waits there for requests of ours only: other routers may fill it for good.

The queue is bounded: a request beyond `requests_max` goes at once, room or not. States of a ticket:
held, then exactly one of delivered or withdrawn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import count, islice
from operator import attrgetter

import msgspec

from epp.core.decide import Decider, Decision
from epp.core.errors import DropReason, RequestDropped
from epp.core.kvuse import units_of
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import CHUNK_TOKENS
from epp.core.model import Endpoint, Pick, Request

NEVER_S = float("inf")
GONE = RequestDropped(DropReason.NO_ENDPOINTS)
_order = attrgetter("order")
_asked = attrgetter("asked")
NEW_OUTPUT_TOKENS = 300
"""Output tokens a request is expected to add to the KV cache before it leaves room."""


class HoldParams(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is kept, and for how long others may pass it."""

    chunk_tokens: int = CHUNK_TOKENS
    seqs_max: int = 256
    """Requests an engine runs at once (vLLM's `max_num_seqs`)."""
    fairness_s: float = 0.5
    guard_s: float = 35.0
    requests_max: int = 10_000
    looked_max: int = 128
    """Held requests looked at for whose turn it is."""
    asked_max: int = 8
    """Of these, the ones tried per endpoint and `wake`."""
    moved_max: int = 64
    """Tried per `wake` of those whose endpoint is gone, and as many per recheck for endpoints that
    nobody wants: a decision takes up to a millisecond, and everybody waits for it."""
    recheck_s: float = 0.02
    """Backlogs age, so room comes without an event; this often it is looked for."""


def params_of(cost: object) -> HoldParams | None:
    """How the cost policy of a profile wants requests held; `None` = not at all."""
    if not isinstance(cost, ExpectedLatency) or not cost.hold:
        return None
    return HoldParams(chunk_tokens=cost.chunk_tokens, seqs_max=cost.max_num_seqs)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a held request."""

    decision: Decision | None
    dropped: Exception = GONE
    """Why there is no decision: a `RequestDropped`, say since no endpoint is left that may serve
    it; anything else is a bug of ours."""


Deliver = Callable[[Outcome, float], None]
"""Called once, at the given time, with what became of a held request."""


class Ticket:
    """One held request."""

    __slots__ = (
        "asked",
        "deliver",
        "first_byte_seen",
        "held_since_s",
        "order",
        "request",
        "seen_version",
        "subset",
        "wants",
        "work_s",
    )

    def __init__(
        self,
        request: Request,
        *,
        subset: tuple[str, ...] | None,
        first_byte_seen: bool,
        deliver: Deliver,
        now_s: float,
        number: int = 0,
    ) -> None:
        self.order = (now_s, number)
        """By age, of those of one moment as they came."""
        self.asked = number
        """Grows with each time it is decided again."""
        self.seen_version = -1
        """Of the pool, when it was."""
        self.request = request
        self.subset = subset
        self.first_byte_seen = first_byte_seen
        self.deliver = deliver
        self.held_since_s = now_s
        self.wants: Endpoint | None = None
        """Under which it is filed; `None` = no longer held."""
        self.work_s = 0.0
        """Its prefill there."""


def _nothing() -> None:
    """Nobody wants to know."""


class Hold:
    """See the module. One per decider."""

    def __init__(self, decider: Decider, params: HoldParams | None = None) -> None:
        self.params = params or HoldParams()
        self._decider = decider
        self._filed: dict[Endpoint, list[Ticket]] = {}
        """By the endpoint wanted, in order of arrival."""
        self._numbers = count()
        self._leaving = False
        """More want an endpoint that is gone than one `wake` decides again."""
        self._rechecked_s = -NEVER_S
        self._waking = False
        self._closed = False
        self._seen_version = -1
        """Of the snapshot whose endpoints the last `wake` saw."""
        self.requests = 0
        """Requests held now."""
        self.on_first: Callable[[], None] = _nothing
        """Called when the first request begins to be held: `wake` is needed from now on."""

    def held_for(self, endpoint: Endpoint) -> int:
        """Requests held that want this endpoint."""
        return len(self._filed.get(endpoint, ()))

    def longest_s(self, endpoint: Endpoint, now_s: float) -> float | None:
        """How long the oldest of them has waited; `None` = there is none."""
        for oldest in self._filed.get(endpoint, ()):
            return now_s - oldest.held_since_s
        return None

    # -- in and out ------------------------------------------------------------------------

    def offer(
        self,
        request: Request,
        *,
        subset: tuple[str, ...] | None,
        now_s: float,
        deliver: Deliver,
        first_byte_seen: bool = True,
    ) -> Decision | Ticket:
        """Decide the request now if the endpoint it wants has room, else keep it.

        Args:
            subset, first_byte_seen: as for `Decider.decide`.
            deliver: called later if a ticket is returned, unless that is withdrawn.
        Raises: RequestDropped when no endpoint can serve the request.
        """
        pick = self._decider.wish(request, subset=subset, now_s=now_s)
        endpoint = pick.endpoint
        full = self._closed or self.requests >= self.params.requests_max
        if full or (self.admits(endpoint, request, now_s) and not self._guarded(endpoint, now_s)):
            return self._decider.commit(request, pick, now_s=now_s, first_byte_seen=first_byte_seen)
        ticket = Ticket(
            request,
            subset=subset,
            first_byte_seen=first_byte_seen,
            deliver=deliver,
            now_s=now_s,
            number=next(self._numbers),
        )
        self.requests += 1
        self._file(ticket, pick)
        if request.chains:
            request.prompts = ()  # their names are enough from here on
        if self.requests == 1:
            self.on_first()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Its client is gone; a second call, or one after its delivery, changes nothing."""
        if ticket.wants is not None:
            self._unfile(ticket)
            self.requests -= 1

    def close(self, dropped: RequestDropped, now_s: float) -> None:
        """Refuse all that are held, and hold nobody from now on."""
        self._closed = True
        for filed in list(self._filed.values()):
            for ticket in list(filed):
                if ticket.wants is not None:
                    self.withdraw(ticket)
                    ticket.deliver(Outcome(None, dropped), now_s)

    def wake(self, now_s: float) -> None:
        """Something was released, reported or came to be, or time went by: let go what may go."""
        if not self.requests or self._waking:
            return  # what a delivery releases is seen by the pass that delivers
        self._waking = True
        try:
            self._pass(now_s)
        finally:
            self._waking = False

    def _pass(self, now_s: float) -> None:
        self._decider.inflight.advance(now_s)
        snapshot = self._decider.pool.snapshot(now_s)
        if self._leaving or snapshot.version != self._seen_version:
            self._seen_version = snapshot.version
            self._leave_gone(set(snapshot.endpoints), now_s)
        for endpoint in list(self._filed):
            if endpoint in self._filed:
                self._serve(endpoint, now_s)
        if self.requests and now_s >= self.next_wake_s:
            self._rechecked_s = now_s
            self._offer_unwanted(now_s)

    @property
    def next_wake_s(self) -> float:
        """When `wake` is due if nothing happens; infinity = nothing is held."""
        return self._rechecked_s + self.params.recheck_s if self.requests else NEVER_S

    def _leave_gone(self, eligible: set[Endpoint], now_s: float) -> None:
        """Whoever wants an endpoint that cannot be picked any more is decided again."""
        # Who still wants it once it was seen to be gone is allowed no other.
        leaving = [
            ticket
            for endpoint, filed in self._filed.items()
            if endpoint not in eligible
            for ticket in filed
            if ticket.seen_version != self._seen_version
        ]
        self._leaving = len(leaving) > self.params.moved_max
        for ticket in nsmallest(self.params.moved_max, leaving, key=_asked):
            self._ask(ticket, now_s)

    # -- passes ----------------------------------------------------------------------------

    def _serve(self, endpoint: Endpoint, now_s: float) -> None:
        """Let go of those that want this endpoint, while it has room."""
        passed: set[Ticket] = set()
        while len(passed) < self.params.asked_max and self._has_room(endpoint, now_s):
            guarded = self._guarded(endpoint, now_s)
            ticket = guarded or self._first(endpoint, passed, now_s)
            if ticket is None:
                return
            passed.add(ticket)
            # To look at the room first is cheap; to decide again is not.
            if self._fits(endpoint, ticket.request):
                self._ask(ticket, now_s)
            elif ticket is guarded:
                return

    def _first(self, endpoint: Endpoint, passed: set[Ticket], now_s: float) -> Ticket | None:
        """Whose turn it is of those that want this endpoint and were not passed over."""
        best: Ticket | None = None
        best_ratio = -1.0
        looked = 0
        for ticket in self._filed.get(endpoint, ()):
            if ticket in passed:
                continue
            base_s = ticket.work_s + self.params.fairness_s
            ratio = (now_s - ticket.held_since_s + base_s) / base_s
            if ratio > best_ratio:
                best, best_ratio = ticket, ratio
            looked += 1
            if looked == self.params.looked_max:
                break
        return best

    def _offer_unwanted(self, now_s: float) -> None:
        """Endpoints with room that nobody wants: see whether the longest held want them by now."""
        endpoints = self._decider.pool.snapshot(now_s).endpoints
        if not any(e not in self._filed and self._has_room(e, now_s) for e in endpoints):
            return
        # Where there are too many, those whose turn was longest ago.
        for ticket in sorted(
            nsmallest(self.params.moved_max, self._heads(), key=_asked), key=_order
        ):
            self._ask(ticket, now_s)

    def _heads(self) -> Iterator[Ticket]:
        """A few of those filed under each endpoint."""
        for filed in list(self._filed.values()):
            yield from islice(filed, 2)

    def _ask(self, ticket: Ticket, now_s: float) -> bool:
        """Decide a held request again: it goes (True), or is filed under what it wants now."""
        if ticket.wants is None:
            return True  # a delivery before this one withdrew it
        ticket.asked = next(self._numbers)
        ticket.seen_version = self._seen_version
        try:
            decision = self._decide(ticket, now_s)
        except Exception as error:  # noqa: BLE001 - a bug of ours, too, ends this request alone
            self.withdraw(ticket)
            ticket.deliver(Outcome(None, error), now_s)
            return True
        if decision is None:
            return False
        ticket.deliver(Outcome(decision), now_s)
        return True

    def _decide(self, ticket: Ticket, now_s: float) -> Decision | None:
        """`None` = there is no room where it wants to go: it is filed there."""
        pick = self._decider.wish(ticket.request, subset=ticket.subset, now_s=now_s)
        guarded = self._guarded(pick.endpoint, now_s)
        closed = guarded is not None and guarded is not ticket
        if closed or not self.admits(pick.endpoint, ticket.request, now_s):
            self._unfile(ticket)
            self._file(ticket, pick)
            return None
        self.withdraw(ticket)
        return self._decider.commit(
            ticket.request, pick, now_s=now_s, first_byte_seen=ticket.first_byte_seen
        )

    def _guarded(self, endpoint: Endpoint, now_s: float) -> Ticket | None:
        """The request that wants this endpoint and has waited too long: it comes first."""
        for oldest in self._filed.get(endpoint, ()):
            return oldest if now_s - oldest.held_since_s > self.params.guard_s else None
        return None

    def _file(self, ticket: Ticket, pick: Pick) -> None:
        endpoint = pick.endpoint
        ticket.wants = endpoint
        forecast = self._decider.forecast
        ticket.work_s = forecast.prefill_s(ticket.request, endpoint)
        insort(self._filed.setdefault(endpoint, []), ticket, key=_order)

    def _unfile(self, ticket: Ticket) -> None:
        endpoint = ticket.wants
        assert endpoint is not None
        ticket.wants = None
        filed = self._filed[endpoint]
        at = bisect_left(filed, ticket.order, key=_order)
        assert filed[at] is ticket
        del filed[at]
        if not filed:
            del self._filed[endpoint]

    # -- room ------------------------------------------------------------------------------

    def _has_room(self, endpoint: Endpoint, now_s: float) -> bool:
        """Whether a small request would be let go there."""
        requests = endpoint.inflight_requests + endpoint.foreign_requests
        if not requests:
            return True
        if not endpoint.inflight_requests and self._guarded(endpoint, now_s):
            return True  # else others who fill it for good would hold ours for ever
        forecast = self._decider.forecast
        step_s = self.params.chunk_tokens * forecast.token_s(endpoint)
        # A few that wait for a place fill it at once when one ends; kept here, they would leave it
        # empty until they are decided again.
        place_s = forecast.place_s(endpoint, self.params.seqs_max)
        return forecast.backlog_s(endpoint, now_s) + place_s <= step_s

    def admits(self, endpoint: Endpoint, request: Request, now_s: float) -> bool:
        """Whether there is room for this request there."""
        return self._has_room(endpoint, now_s) and self._fits(endpoint, request)

    def _fits(self, endpoint: Endpoint, request: Request) -> bool:
        """Whether its KV cache has room for the request beside what is in flight there."""
        load = endpoint.last_load
        if not endpoint.inflight_requests or load.kv_blocks is None or load.kv_block_tokens is None:
            return True
        kv_tokens = load.kv_blocks * load.kv_block_tokens
        chain = request.chains[0] if len(request.chains) == 1 else ()
        units = units_of(chain, request.match.block_tokens, request.prompt_tokens)
        adds_tokens = request.prompt_tokens + NEW_OUTPUT_TOKENS - endpoint.kv.shared_tokens(units)
        return endpoint.kv.tokens + adds_tokens <= kv_tokens
