"""The hold under any sequence of offers, answers, withdrawals, scrapes, members and time."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from epp.core.decide import Decider, Decision
from epp.core.errors import RequestDropped
from epp.core.flow.hold import Hold, HoldParams, Outcome, Ticket
from epp.core.latency.rates import Rates
from epp.core.model import Endpoint, Pick, Request
from epp.core.pool import Answered, Members
from tests.unit.roundrates import left_over, prompt, scrape, spec, world

CHUNK, SEQS, HELD = 1000, 4, 6
ADDRESSES = 3
DECODING = Rates(token_s=0.001, pair_s=0.0, step_s=0.01, step_request_s=0.0, step_token_s=0.0)
"""Answers take 3 s, so that one more may wait for a place and a second may not."""


class Checked(Decider):
    """Looks, at each commitment, whether it may be made."""

    hold: Hold
    members: tuple[Endpoint, ...] = ()
    was_full = False

    def commit(
        self, request: Request, pick: Pick, *, now_s: float, first_byte_seen: bool = True
    ) -> Decision:
        endpoint = pick.endpoint
        assert endpoint in self.pool.endpoints, "sent to one that has left"
        assert self.was_full or self.has_room(endpoint, request, now_s), "overshoot"
        return super().commit(request, pick, now_s=now_s, first_byte_seen=first_byte_seen)

    def has_room(self, endpoint: Endpoint, request: Request, now_s: float) -> bool:
        """By the rules of the hold, told once more."""
        if endpoint.inflight_requests + endpoint.foreign_requests == 0:
            return True
        extra = endpoint.inflight_requests + endpoint.foreign_requests + 1 - SEQS
        answer_s = self.forecast.output_tokens_mean * DECODING.step_s
        place_s = max(0, extra) * answer_s / SEQS
        if self.forecast.backlog_s(endpoint, now_s) + place_s > CHUNK * 0.001:
            return False
        load = endpoint.last_load
        if not endpoint.inflight_requests or load.kv_blocks is None:
            return True
        # With everything shared that can be: never less room than the hold may count on.
        shared = min(request.prompt_tokens, endpoint.kv.tokens)
        adds = request.prompt_tokens - shared + 300
        return endpoint.kv.tokens + adds <= load.kv_blocks * load.kv_block_tokens


class Holding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        made = world(0, rates=DECODING)
        self.decider = Checked(
            pool=made.pool, profile=made.profile, inflight=made.inflight, prefix=made.prefix,
            rng=made._rng, forecast=made.forecast,
        )  # fmt: skip
        self.hold = self.decider.hold = Hold(
            self.decider,
            HoldParams(chunk_tokens=CHUNK, seqs_max=SEQS, requests_max=HELD, looked_max=3,
                       asked_max=2, guard_s=10.0),
        )  # fmt: skip
        self.now_s = 100.0
        self.asked = 0
        self.tickets: dict[int, Ticket] = {}
        """Held, as far as we were told."""
        self.fates: dict[int, str] = {}
        self.live: list[Decision] = []
        self.seen: dict[int, Endpoint] = {}

    @initialize()
    def two_endpoints(self) -> None:
        self._members([0, 1], ["", ""])

    def _members(self, numbers: list[int], uids: list[str]) -> None:
        specs = tuple(spec(n, uid) for n, uid in zip(numbers, uids, strict=True))
        self.decider.pool.apply(Members(specs), self.now_s)
        self.seen.update({id(e): e for e in self.decider.pool.endpoints})

    def _settle(self, number: int, fate: str) -> None:
        assert number not in self.fates, f"{self.fates.get(number)}, then {fate}"
        self.fates[number] = fate

    @rule(
        tokens=st.sampled_from([1, 100, 700, 1000, 1500, 4000]),
        text=st.sampled_from(["a", "b", "c"]),
        only=st.sampled_from([None, None, None, 0, 1]),
        streamed=st.booleans(),
    )
    def offer(self, tokens: int, text: str, only: int | None, *, streamed: bool) -> None:
        number = self.asked
        self.asked += 1

        def deliver(outcome: Outcome, now_s: float) -> None:
            assert now_s == self.now_s
            del self.tickets[number]
            if outcome.decision is None:
                self._settle(number, "dropped")
            else:
                self._settle(number, "delivered")
                self._decided(outcome.decision)

        self.decider.was_full = self.hold.requests >= HELD
        try:
            offered = self.hold.offer(
                prompt(text, tokens),
                subset=None if only is None else (spec(only).address,),
                now_s=self.now_s,
                deliver=deliver,
                first_byte_seen=streamed,
            )
        except RequestDropped:
            self._settle(number, "refused")
            return
        finally:
            self.decider.was_full = False
        if isinstance(offered, Decision):
            self._settle(number, "sent")
            self._decided(offered)
        else:
            self.tickets[number] = offered

    def _decided(self, decision: Decision) -> None:
        self.decider.learn(decision)
        self.live.append(decision)

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 99), twice=st.booleans())
    def withdraw(self, which: int, *, twice: bool) -> None:
        number = sorted(self.tickets)[which % len(self.tickets)]
        ticket = self.tickets.pop(number)
        self._settle(number, "withdrawn")
        for _ in range(1 + twice):
            self.hold.withdraw(ticket)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def first_byte(self, which: int) -> None:
        self.decider.first_byte(self.live[which % len(self.live)], self.now_s)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), ok=st.booleans(), wake=st.booleans())
    def end(self, which: int, *, ok: bool, wake: bool) -> None:
        decision = self.live.pop(which % len(self.live))
        status = 200 if ok else 503
        self.decider.answered(decision, served=None, status=status, now_s=self.now_s)
        self.decider.ended(decision, self.now_s, output_tokens=20 if ok else None)
        if wake:
            self.hold.wake(self.now_s)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def goes_on_unseen(self, which: int) -> None:
        self.decider.unseen(self.live.pop(which % len(self.live)), self.now_s)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), where=st.integers(0, ADDRESSES - 1))
    def served_elsewhere(self, which: int, where: int) -> None:
        decision = self.live[which % len(self.live)]
        address = spec(where).address
        self.decider.answered(decision, served=address, status=None, now_s=self.now_s)

    @rule(
        numbers=st.lists(st.integers(0, ADDRESSES - 1), max_size=ADDRESSES, unique=True),
        uid=st.sampled_from(["", "", "u"]),
    )
    def members(self, numbers: list[int], uid: str) -> None:
        self._members(numbers, [uid] * len(numbers))

    @precondition(lambda self: self.decider.pool.endpoints)
    @rule(
        which=st.integers(0, 99),
        running=st.none() | st.integers(0, 5),
        waiting=st.none() | st.integers(0, 5),
        kv_blocks=st.none() | st.sampled_from([10, 50, 500]),
    )
    def scraped(
        self, which: int, running: int | None, waiting: int | None, kv_blocks: int | None
    ) -> None:
        members = self.decider.pool.endpoints
        scrape(
            self.decider, members[which % len(members)], self.now_s, running=running,
            waiting=waiting, kv_blocks=kv_blocks, kv_block_tokens=64,
        )  # fmt: skip

    @precondition(lambda self: self.decider.pool.endpoints)
    @rule(which=st.integers(0, 99))
    def fails(self, which: int) -> None:
        members = self.decider.pool.endpoints
        for _ in range(3):
            self.decider.pool.apply(Answered(members[which % len(members)], ok=False), self.now_s)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.02, 0.3, 1.0, 11.0]), wake=st.booleans())
    def time_goes_by(self, seconds: float, *, wake: bool) -> None:
        self.now_s += seconds
        if wake:
            self.hold.wake(self.now_s)

    @invariant()
    def what_is_held_is_known_and_bounded(self) -> None:
        assert self.hold.requests == len(self.tickets) <= HELD
        filed = [t for each in self.hold._filed.values() for t in each]
        assert sorted(map(id, filed)) == sorted(map(id, self.tickets.values()))
        for endpoint, tickets in self.hold._filed.items():
            since = [ticket.held_since_s for ticket in tickets]
            assert since == sorted(since)
            assert all(ticket.wants is endpoint for ticket in tickets)

    @invariant()
    def a_wake_is_due_exactly_while_something_is_held(self) -> None:
        assert (self.hold.next_wake_s < float("inf")) is bool(self.tickets)

    def teardown(self) -> None:
        """Whatever happened: once nothing is in flight, everybody held gets its turn."""
        self._members([0, 1], ["", ""])
        for endpoint in self.decider.pool.endpoints * 2:
            scrape(self.decider, endpoint, self.now_s, running=0, waiting=0)
        for _ in range(200):
            if not (self.tickets or self.live):
                break
            while self.live:
                self.decider.ended(self.live.pop(), self.now_s)
            self.now_s = max(self.now_s + 0.001, self.hold.next_wake_s)
            if not self.tickets:
                break
            self.now_s = min(self.now_s, 1e9)
            self.hold.wake(self.now_s)
            self.now_s += 30.0
        assert not self.tickets, "held for ever"
        while self.live:
            self.decider.ended(self.live.pop(), self.now_s)
        self.decider.inflight.advance(1e12)
        assert len(self.fates) == self.asked, "each request has one outcome"
        assert left_over(self.decider, tuple(self.seen.values())) == []
        assert self.decider.inflight.requests == 0


TestHold = Holding.TestCase
TestHold.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
