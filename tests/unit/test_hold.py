"""The hold: when an endpoint has room, whose turn it is, and what ends a wait."""

from __future__ import annotations

from typing import Any

import pytest

from epp.core.decide import Decider, Decision
from epp.core.errors import DropReason, RequestDropped
from epp.core.flow.hold import Hold, HoldParams, Outcome, Ticket
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.rates import Rates
from epp.core.model import Costs, Request
from epp.core.pool import Answered, Members
from tests.unit.roundrates import left_over, prompt, scrape, spec, world

CHUNK = 1000
STEP_S = 1.0
"""A thousand tokens at a millisecond each."""
DECODING = Rates(token_s=0.001, pair_s=0.0, step_s=0.1, step_request_s=0.0, step_token_s=0.0)
"""Answers of 300 tokens take 30 s."""


class Desk:
    """A hold, and what it said to whom."""

    def __init__(self, count: int = 1, *, decider: Decider | None = None, **params: Any) -> None:
        self.decider = decider or world(count)
        params = {"guard_s": 40.0, **params}
        self.hold = Hold(self.decider, HoldParams(chunk_tokens=CHUNK, **params))
        self.let_go: list[tuple[str, float]] = []
        self.decisions: dict[str, Decision] = {}
        self.dropped: dict[str, RequestDropped] = {}

    @property
    def endpoints(self):
        return self.decider.pool.endpoints

    def offer(
        self, name: str, tokens: int = 2000, now_s: float = 0.0, **fields: Any
    ) -> Decision | Ticket:
        return self.ask(prompt(name, tokens), now_s, **fields)

    def ask(self, request: Request, now_s: float, **fields: Any) -> Decision | Ticket:
        def deliver(outcome: Outcome, at_s: float) -> None:
            assert request.id not in self.decisions
            self.let_go.append((request.id, at_s))
            if outcome.decision is None:
                self.dropped[request.id] = outcome.dropped
            else:
                self.decisions[request.id] = outcome.decision

        fields.setdefault("subset", None)
        offered = self.hold.offer(request, now_s=now_s, deliver=deliver, **fields)
        if isinstance(offered, Decision):
            self.decisions[request.id] = offered
        return offered

    def first_byte(self, name: str, now_s: float) -> None:
        self.decider.first_byte(self.decisions[name], now_s)

    def end(self, name: str, now_s: float) -> None:
        self.decider.ended(self.decisions[name], now_s)

    def names(self, *, since: int = 0) -> list[str]:
        return [name for name, _ in self.let_go[since:]]


def held(offered: Decision | Ticket) -> bool:
    return isinstance(offered, Ticket)


# Room


def test_an_idle_endpoint_takes_any_request_at_once() -> None:
    desk = Desk()
    scrape(desk.decider, desk.endpoints[0], 0.0, kv_blocks=1, kv_block_tokens=16)
    assert not held(desk.offer("huge", 1_000_000))


def test_a_request_waits_until_no_more_than_one_step_of_prefill_is_before_it() -> None:
    desk = Desk()
    desk.offer("a", 2500, now_s=10.0)
    assert held(desk.offer("b", 100, now_s=11.25))
    desk.hold.wake(11.4375)
    assert desk.let_go == []
    desk.hold.wake(11.5)  # 2.5 s, of which 1.5 are done
    assert desk.let_go == [("b", 11.5)]
    assert left_over(desk.decider)[0][1] == 2


def test_exactly_one_step_of_backlog_is_room() -> None:
    desk = Desk()
    desk.offer("a", 1000)
    assert not held(desk.offer("b", 100))
    assert held(desk.offer("c", 100))


def test_the_first_byte_makes_room_at_once() -> None:
    desk = Desk()
    desk.offer("a", 5000)
    assert held(desk.offer("b", 5000, now_s=0.125))
    desk.hold.wake(0.25)
    assert desk.let_go == []
    desk.first_byte("a", 0.25)
    desk.hold.wake(0.25)
    assert desk.let_go == [("b", 0.25)]


def test_no_more_requests_than_the_engine_runs_at_once() -> None:
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=2)
    for name in ("a", "b"):
        desk.offer(name, 10)
        desk.first_byte(name, 0.0)
    assert held(desk.offer("c", 10))
    desk.hold.wake(100.0)
    assert desk.let_go == []
    desk.end("a", 101.0)
    desk.hold.wake(101.0)
    assert desk.names() == ["c"]


def test_a_few_wait_for_a_place_in_the_engine_where_the_next_is_free_within_a_step() -> None:
    # One of 50 answers of 30 s ends in 0.6 s; the next one after it in 1.2 s, more than a step.
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=50)
    for number in range(50):
        desk.offer(f"{number}", 10)
        desk.first_byte(f"{number}", 0.0)
    assert not held(desk.offer("a", 10))
    desk.first_byte("a", 0.0)
    assert held(desk.offer("b", 10))
    desk.end("0", 1.0)
    desk.hold.wake(1.0)
    assert desk.names() == ["b"]


def test_requests_of_others_count_among_those_the_engine_runs() -> None:
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=4)
    (endpoint,) = desk.endpoints
    for at_s in (0.0, 1.0):
        scrape(desk.decider, endpoint, at_s, running=4, waiting=0)
    assert held(desk.offer("a", 10, now_s=1.0))
    scrape(desk.decider, endpoint, 2.0, running=3, waiting=0)
    desk.hold.wake(2.0)
    assert desk.names() == ["a"]


def test_others_who_fill_an_endpoint_for_good_hold_ours_no_longer_than_the_guard() -> None:
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=4, guard_s=40.0)
    (endpoint,) = desk.endpoints
    for at_s in range(44):
        scrape(desk.decider, endpoint, float(at_s), running=300, waiting=0)
        if at_s == 2:
            assert held(desk.offer("a", 100, now_s=2.0))
            assert held(desk.offer("b", 100, now_s=2.0))
        desk.hold.wake(float(at_s))
    assert desk.let_go == [("a", 43.0)], "one of ours at a time"
    desk.first_byte("a", 43.5)
    desk.end("a", 44.0)
    desk.hold.wake(44.0)
    assert desk.let_go[1:] == [("b", 44.0)]


def test_F05_what_others_had_there_in_an_old_scrape_closes_nothing_for_ever() -> None:
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=4)
    (endpoint,) = desk.endpoints
    for at_s in (0.0, 1.0):
        scrape(desk.decider, endpoint, at_s, running=4, waiting=0)
    assert held(desk.offer("a", 10, now_s=1.0))
    desk.hold.wake(1002.0)  # no scrape for 1001 s: nobody knows what is there now
    assert desk.names() == ["a"]


def kv_desk(kv_tokens: int) -> Desk:
    desk = Desk()
    scrape(desk.decider, desk.endpoints[0], 0.0, kv_blocks=kv_tokens // 100, kv_block_tokens=100)
    return desk


def test_a_request_waits_until_the_kv_cache_has_room_for_it_and_its_output() -> None:
    # 900 tokens in flight hold 900 + 512; another 800 are thought to add 800 + 300.
    for kv_tokens, waits in ((2500, True), (2600, False)):
        desk = kv_desk(kv_tokens)
        desk.offer("a", 900)
        desk.first_byte("a", 0.5)
        assert held(desk.offer("b", 800, now_s=1.0)) is waits
    desk = kv_desk(2500)
    desk.offer("a", 900)
    desk.offer("b", 800)
    desk.first_byte("a", 0.5)
    desk.hold.wake(1.0)
    assert desk.let_go == []
    desk.end("a", 2.0)
    desk.hold.wake(2.0)
    assert desk.names() == ["b"]


def test_what_a_request_shares_with_those_in_flight_needs_no_room() -> None:
    desk = kv_desk(3000)
    desk.decider.learn(desk.offer("a", 2048))
    desk.first_byte("a", 0.5)
    assert held(desk.ask(prompt("b", 2048, tail="x", tail_tokens=64), 1.0))
    assert not held(desk.ask(prompt("a", 2048, tail="y", tail_tokens=64), 1.0))


def test_F05_without_a_reported_kv_capacity_backlog_and_count_decide_alone() -> None:
    desk = Desk()
    desk.offer("a", 900_000)
    desk.first_byte("a", 1.0)
    assert not held(desk.offer("b", 900_000, now_s=1.0))


def test_a_kv_capacity_whose_report_is_old_still_counts() -> None:
    desk = kv_desk(2500)
    desk.offer("a", 900)
    desk.first_byte("a", 0.5)
    assert held(desk.offer("b", 1500, now_s=5000.0))


def test_the_endpoint_wanted_counts_not_whichever_has_room() -> None:
    desk = Desk(2)
    warm = desk.offer("a", 6400)
    desk.decider.learn(warm)
    desk.first_byte("a", 6.0)
    desk.end("a", 6.0)
    desk.ask(prompt("a", 6400, tail="b", tail_tokens=1500), 10.0)
    offered = desk.ask(prompt("a", 6400, tail="c", tail_tokens=100), 10.0)
    assert held(offered), "the other endpoint is idle, and would compute all of it"
    assert offered.wants is warm.pick.endpoint
    desk.hold.wake(10.5)
    assert desk.decisions["ac"].pick.endpoint is warm.pick.endpoint


# Order


def test_the_highest_response_ratio_goes_first() -> None:
    desk = Desk()
    desk.offer("a", 50_000)
    # After 10.5 s: 13 / 2.5; 10 / 1; 6 / 0.75.
    desk.offer("long", 2000, now_s=0.0)
    desk.offer("short", 500, now_s=1.5)
    desk.offer("late", 250, now_s=5.25)
    desk.first_byte("a", 10.5)
    desk.hold.wake(10.5)
    assert desk.names() == ["short", "late", "long"]


def test_a_larger_fairness_is_nearer_to_the_order_of_arrival() -> None:
    for fairness_s, first in ((0.05, "short"), (50.0, "long")):
        desk = Desk(fairness_s=fairness_s)
        desk.offer("a", 5000)
        desk.offer("long", 2000, now_s=0.0)
        desk.offer("short", 10, now_s=1.0)
        desk.first_byte("a", 4.0)
        desk.hold.wake(4.0)
        assert desk.names()[0] == first


def test_of_equals_the_one_that_came_first_goes_first() -> None:
    desk = Desk()
    desk.offer("a", 5000)
    for n in range(5):
        desk.offer(f"{n}", 700)
    desk.first_byte("a", 1.0)
    desk.hold.wake(1.0)
    assert desk.names() == ["0", "1"], "a backlog of 0.7 s is room, one of 1.4 s is not"


def test_only_the_first_few_are_looked_at_for_each_turn() -> None:
    desk = Desk(looked_max=2)
    desk.offer("a", 5000)
    for name, tokens in (("one", 2000), ("two", 2000), ("tiny", 10)):
        desk.offer(name, tokens)
    desk.first_byte("a", 1.0)
    desk.hold.wake(1.0)
    assert desk.names() == ["one"]


def test_no_more_than_a_few_are_tried_for_each_endpoint_and_wake() -> None:
    for asked_max, let_go in ((2, []), (3, ["small"])):
        desk = Desk(asked_max=asked_max)
        scrape(desk.decider, desk.endpoints[0], 0.0, kv_blocks=26, kv_block_tokens=100)
        desk.offer("a", 1500)
        for name, tokens in (("big", 1500), ("large", 1500), ("small", 200)):
            desk.offer(name, tokens, now_s=0.25 if name == "small" else 0.0)
        # The small one came last, and nobody has waited long: its turn is the third.
        desk.first_byte("a", 0.25)
        desk.hold.wake(0.25)
        assert desk.names() == let_go


class Counted:
    """The cost policy, and how often and for whom it was asked."""

    def __init__(self) -> None:
        self.policy = ExpectedLatency()
        self.asked = 0
        self.names: list[str] = []

    def __call__(self, *asked: Any) -> Costs:
        self.asked += 1
        self.names.append(asked[0].id)
        return self.policy(*asked)


def test_a_pass_over_many_that_do_not_fit_is_bounded() -> None:
    cost = Counted()
    desk = Desk(decider=world(1, cost=cost))
    scrape(desk.decider, desk.endpoints[0], 0.0, kv_blocks=25, kv_block_tokens=100)
    desk.offer("a", 900)
    for n in range(400):
        desk.offer(f"{n:03}", 1500)
    desk.first_byte("a", 0.5)
    before = cost.asked
    desk.hold.wake(1.0)
    assert desk.let_go == []
    assert cost.asked - before <= desk.hold.params.asked_max + 2


def test_one_that_does_not_fit_does_not_hold_up_one_that_does() -> None:
    desk = kv_desk(2600)
    desk.offer("a", 1500)
    desk.offer("big", 1500)
    desk.offer("small", 200, now_s=0.25)
    desk.first_byte("a", 0.5)
    desk.hold.wake(0.5)
    assert desk.names() == ["small"]


# The guard


def test_one_that_was_passed_for_too_long_closes_its_endpoint_to_all_others() -> None:
    desk = kv_desk(2500)
    desk.offer("a", 900)
    desk.first_byte("a", 0.5)
    desk.offer("big", 1500, now_s=1.0)
    desk.offer("small", 100, now_s=41.0)
    assert "small" in desk.decisions, "40 s exactly are not too long"
    desk.end("small", 41.0)
    assert held(desk.offer("another", 100, now_s=41.0625))
    desk.hold.wake(42.0)
    assert desk.let_go == []
    desk.end("a", 43.0)
    desk.hold.wake(43.0)
    assert desk.names()[0] == "big"


def test_the_guard_closes_no_other_endpoint() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    desk.offer("a", 5000, subset=(first.address,))
    desk.offer("b", 5000, subset=(first.address,))
    desk.hold.wake(1.0)
    assert held(desk.offer("c", 100, now_s=2.0, subset=(first.address,)))
    assert not held(desk.offer("d", 100, now_s=2.0, subset=(other.address,)))


def test_the_guard_holds_when_the_head_of_the_order_is_offered_an_idle_endpoint() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    here = (first.address,)
    scrape(desk.decider, first, 0.0, kv_blocks=25, kv_block_tokens=100)
    desk.offer("a", 900, subset=here)
    desk.first_byte("a", 0.5)
    desk.offer("big", 1500, now_s=1.0, subset=here)
    assert held(desk.offer("small", 100, now_s=42.0, subset=here))
    assert not other.inflight_requests
    desk.hold.wake(43.0)
    assert desk.let_go == []


def test_one_that_comes_from_elsewhere_keeps_its_place_by_age() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    for endpoint in (first, other):
        scrape(desk.decider, endpoint, 0.0, kv_blocks=25, kv_block_tokens=100)
        desk.offer(endpoint.name, 900, subset=(endpoint.address,))
        desk.first_byte(endpoint.name, 0.5)
    old = desk.offer("old", 1500, now_s=1.0)
    assert old.wants is not None
    left, stays = (first, other) if old.wants is first else (other, first)
    young = desk.offer("young", 1500, now_s=40.0, subset=(stays.address,))
    desk.decider.pool.apply(Members((stays.spec,)), 42.0)
    desk.hold.wake(42.0)
    assert old.wants is young.wants is stays
    assert held(desk.offer("small", 100, now_s=42.0)), "the old one has waited for too long"
    assert left.inflight_requests == 1


# Ends of a wait


def test_a_withdrawn_request_is_never_decided() -> None:
    desk = Desk()
    desk.offer("a", 5000)
    ticket = desk.offer("b")
    for _ in range(2):
        desk.hold.withdraw(ticket)
    assert desk.hold.requests == 0
    assert desk.hold.next_wake_s == float("inf")
    desk.end("a", 1.0)
    desk.hold.wake(1.0)
    assert desk.let_go == []
    assert left_over(desk.decider) == []


def test_a_withdrawal_after_the_delivery_changes_nothing() -> None:
    desk = Desk()
    desk.offer("a", 5000)
    ticket = desk.offer("b", 100)
    desk.end("a", 1.0)
    desk.hold.wake(1.0)
    desk.offer("c", 5000, now_s=1.0)
    desk.offer("d", 5000, now_s=1.0)
    desk.hold.withdraw(ticket)
    assert desk.hold.requests == 1
    assert desk.endpoints[0].inflight_requests == 2


def test_when_no_endpoint_is_left_a_held_request_is_refused() -> None:
    desk = Desk()
    desk.offer("a", 5000)
    desk.offer("b")
    desk.decider.pool.apply(Members(()), 1.0)
    desk.end("a", 1.0)
    desk.hold.wake(1.0)
    assert desk.dropped["b"].reason is DropReason.NO_ENDPOINTS
    assert (desk.hold.requests, desk.decider.inflight.requests) == (0, 0)


def test_when_the_gateways_subset_has_left_a_held_request_is_refused() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    desk.offer("a", 5000, subset=(first.address,))
    desk.offer("b", 5000, subset=(first.address,))
    desk.decider.pool.apply(Members((other.spec,)), 1.0)
    desk.end("a", 1.0)
    desk.hold.wake(1.0)
    assert desk.dropped.keys() == {"b"}


def test_K05_a_request_nobody_may_serve_is_refused_at_once() -> None:
    desk = Desk(0)
    with pytest.raises(RequestDropped):
        desk.offer("a")
    assert desk.hold.requests == 0


def test_a_full_queue_lets_requests_go_at_once() -> None:
    desk = Desk(requests_max=2)
    desk.offer("a", 5000)
    assert [held(desk.offer(f"{n}", 5000)) for n in range(4)] == [True, True, False, False]
    assert desk.hold.requests == 2
    assert desk.endpoints[0].inflight_requests == 3


# Being asked again


def test_a_held_request_is_decided_by_what_is_known_when_it_goes() -> None:
    desk = Desk(2)
    desk.offer("a", 5000)
    desk.offer("b", 5500)
    ticket = desk.offer("c", 100)
    assert ticket.wants is desk.decisions["a"].pick.endpoint
    desk.end("b", 0.25)  # the other is idle now, and its wait would be shorter
    desk.hold.wake(0.25)
    assert desk.decisions["c"].pick.endpoint is desk.decisions["b"].pick.endpoint


def test_what_wants_another_endpoint_by_now_is_filed_there() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    desk.offer("a", 5000, subset=(first.address,))
    desk.offer("b", 8000, subset=(other.address,))
    ticket = desk.offer("c", 100)
    assert ticket.wants is first
    desk.offer("d", 100, subset=(first.address,))
    desk.first_byte("b", 0.5)
    desk.offer("e", 3000, now_s=0.5, subset=(other.address,))
    desk.first_byte("a", 0.75)
    # `first` takes one after the other; each is asked anew where it wants to go.
    desk.hold.wake(0.75)
    assert set(desk.names()) == {"c", "d"}
    assert desk.hold.requests == 0


def test_a_new_endpoint_is_offered_to_those_that_wait_longest() -> None:
    desk = Desk(1)
    desk.offer("a", 50_000)
    for n in range(6):
        desk.offer(f"{n}", 900, now_s=n / 8)
    desk.decider.pool.apply(Members((spec(0), spec(1))), 1.0)
    desk.hold.wake(1.0)
    assert desk.names()[0] == "0"
    assert {d.pick.endpoint.address for n, d in desk.decisions.items() if n != "a"} == {
        spec(1).address
    }


def test_endpoints_nobody_wants_are_offered_every_recheck_and_not_more_often() -> None:
    desk = Desk(1)
    desk.offer("a", 50_000)
    desk.offer("b", 900)
    desk.hold.wake(1.0)
    desk.decider.pool.apply(Members((spec(0), spec(1))), 1.0)
    desk.hold.wake(1.01)
    assert desk.let_go == []
    desk.hold.wake(1.03)
    assert desk.let_go == [("b", 1.03)]


@pytest.mark.parametrize("now_s", [0.0, 1.0, 100.0, 12_345.678, 1e6 + 1 / 3])
def test_the_wake_it_asks_for_is_a_recheck(now_s: float) -> None:
    desk = Desk(1)
    desk.offer("a", 5_000_000, now_s=now_s)
    assert desk.hold.next_wake_s == float("inf")
    desk.offer("b", 900, now_s=now_s)
    assert desk.hold.next_wake_s <= now_s, "due at once"
    desk.hold.wake(now_s)
    for _ in range(20):
        due_s = desk.hold.next_wake_s
        assert now_s < due_s <= now_s + 0.021
        desk.hold.wake(due_s)
        now_s = due_s


def test_those_that_want_an_endpoint_that_left_are_decided_again() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    desk.offer("x", 9000, subset=(other.address,))
    desk.offer("a", 5000, subset=(first.address,))
    desk.offer("b", 5000, subset=(first.address,))
    ticket = desk.offer("c", 100)
    assert ticket.wants is first
    desk.offer("d", 100, subset=(other.address,))
    desk.decider.pool.apply(Members((other.spec,)), 0.125)  # its requests are still on their way
    desk.hold.wake(0.125)
    assert ticket.wants is other, "where it may still go"
    assert "b" in desk.dropped


def test_many_whose_endpoint_left_are_decided_again_a_few_at_a_time_and_keep_their_order() -> None:
    desk = Desk(2, moved_max=20)
    first, other = desk.endpoints
    desk.offer("x", 9000, subset=(other.address,))
    desk.offer("a", 5000, subset=(first.address,))
    tickets = []
    for n in range(60):
        subset = (other.address,) if n % 2 else None
        tickets.append(desk.offer(f"<{n}>", 5000, now_s=0.01 * n, subset=subset))
    moving = [ticket for ticket in tickets if ticket.wants is first]
    assert len(moving) == 30
    desk.decider.pool.apply(Members((other.spec,)), 1.0)
    desk.hold.wake(1.0)
    assert [ticket.wants is other for ticket in moving] == [True] * 20 + [False] * 10
    desk.hold.wake(1.0)
    assert desk.hold._filed == {other: tickets}


def test_of_many_that_want_others_a_few_at_a_time_are_offered_an_endpoint_nobody_wants() -> None:
    cost = Counted()
    desk = Desk(decider=world(6, cost=cost), moved_max=3)
    *busy, idle = desk.endpoints
    for endpoint in busy:
        here = (endpoint.address,)
        desk.offer(f"{endpoint.slot}", 50_000, subset=here)
        desk.offer(f"held {endpoint.slot}", 900, subset=here)
    cost.names.clear()
    for now_s in (1.0, 1.1):
        desk.hold.wake(now_s)
    assert not idle.inflight_requests
    assert len(cost.names) == 6
    assert set(cost.names) == {f"held {endpoint.slot}" for endpoint in busy}, "all get their turn"


def test_those_that_want_an_ejected_endpoint_are_decided_again() -> None:
    desk = Desk(2)
    first, other = desk.endpoints
    desk.offer("x", 9000, subset=(other.address,))
    desk.offer("a", 5000, subset=(first.address,))
    ticket = desk.offer("c", 100)
    assert ticket.wants is first
    desk.offer("d", 100, subset=(other.address,))
    for _ in range(3):
        desk.decider.pool.apply(Answered(first, ok=False), 0.125)
    desk.hold.wake(0.125)
    assert ticket.wants is other


def test_predicted_first_bytes_make_room_without_another_request() -> None:
    desk = Desk(1)
    (endpoint,) = desk.endpoints
    for name in ("a", "b", "c"):
        request = prompt(name, 1500)
        decision = desk.decider.decide(request, subset=None, now_s=0.0, first_byte_seen=False)
        desk.decisions[name] = decision
    assert held(desk.offer("d", 100))
    desk.hold.wake(4.0)  # 4.5 s of work, of which the first two are done by 3.0
    assert desk.names() == ["d"]
    assert endpoint.waiting_requests == 2


def test_an_end_nobody_sees_makes_room_without_another_request() -> None:
    desk = Desk(decider=world(1, rates=DECODING), seqs_max=1)
    request = prompt("a", 100)
    request.max_output_tokens = 1
    decision = desk.decider.decide(request, subset=None, now_s=0.0, first_byte_seen=False)
    desk.decider.unseen(decision, 0.0)
    assert held(desk.offer("d", 100))
    desk.hold.wake(30.0)
    assert desk.names() == ["d"]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_delivery_may_withdraw_or_offer_others_meanwhile(*, leaves: bool) -> None:
    desk = Desk(1)
    desk.offer("a", 50_000)
    seen: list[str] = []

    def deliver(outcome: Outcome, now_s: float) -> None:
        assert outcome.decision is not None
        seen.append(outcome.decision.request.id)
        for ticket in tickets:
            desk.hold.withdraw(ticket)
        desk.offer("more", 900, now_s=now_s)

    early = desk.hold.offer(prompt("first", 10), subset=None, now_s=0.0, deliver=deliver)
    tickets = [desk.offer(f"{n}", 900, now_s=0.5) for n in range(1, 4)]
    assert held(early)
    # One more endpoint, or another in place of the first.
    specs = (spec(1),) if leaves else (spec(0), spec(1))
    desk.decider.pool.apply(Members(specs), 1.0)
    desk.hold.wake(1.0)
    assert seen == ["first"]
    assert desk.let_go == []
    assert "more" in desk.decisions
    assert desk.hold.requests == 0


def test_G13_a_held_request_matches_no_more_than_its_prompt_when_the_block_size_changes() -> None:
    desk = Desk(1)
    (endpoint,) = desk.endpoints
    desk.offer("a", 5000)
    desk.offer("b", 900)
    scrape(desk.decider, endpoint, 1.0, kv_block_tokens=128, kv_blocks=1000)
    desk.end("a", 1.0)
    desk.hold.wake(1.0)
    match = desk.decisions["b"].request.match
    assert match.blocks * match.block_tokens <= 900, "names of 64 tokens are not of 128 now"


def test_the_default_cost_policy_and_the_hold_agree_on_the_length_of_a_step() -> None:
    assert HoldParams().chunk_tokens == ExpectedLatency().chunk_tokens
    assert HoldParams().seqs_max == ExpectedLatency().max_num_seqs
