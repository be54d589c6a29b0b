"""The hold as it is seen from outside: metrics, log line, state."""

import logging

import pytest

from epp.core.flow.hold import Hold, HoldParams
from epp.core.pool import Members
from epp.edge.admin import debug_state
from epp.edge.logs import VERBOSE
from epp.edge.telemetry import Telemetry
from tests.unit.exchanges import World, body, chat, request_headers, response_headers
from tests.unit.test_telemetry import Seen

OUTCOMES = ("dispatched", "withdrawn", "refused")
DURATION = "epp_hold_duration_seconds"


class Holding(Seen):
    """One endpoint that runs one request at a time, watched by telemetry."""

    def __init__(self) -> None:
        self.world = World(1)
        self.hold = Hold(self.world.decider, HoldParams(seqs_max=1))
        self.telemetry = Telemetry(
            pools=self.world.pools(self.hold),
            clock=lambda: 2.0,
            label_values_max=10,
        )
        self.world.watched = self.telemetry

    def ask(self, now_s: float):
        exchange = self.world.exchange(hold=self.hold)

        def later(make) -> None:
            make()
            exchange.settle(now_s)

        exchange.answer_later = later
        exchange.receive(request_headers(), now_s)
        exchange.receive(body(chat(stream=True)), now_s)
        exchange.settle(now_s)
        return exchange

    def counts(self) -> dict[str, float | None]:
        return {o: self.value(f"{DURATION}_count", outcome=o) for o in OUTCOMES}

    @property
    def held(self) -> float | None:
        return self.value("epp_held_requests")


def test_a_held_request_is_a_gauge_until_it_is_dispatched_and_then_a_duration() -> None:
    seen = Holding()
    first = seen.ask(1.0)
    assert (seen.held, seen.counts()) == (0, dict.fromkeys(OUTCOMES, 0))
    second = seen.ask(1.5)
    seen.ask(1.75)
    assert (seen.held, seen.counts()) == (2, dict.fromkeys(OUTCOMES, 0))
    first.close(4.0)
    assert seen.held == 1
    assert seen.counts() == {"dispatched": 1, "withdrawn": 0, "refused": 0}
    assert seen.value(f"{DURATION}_sum", outcome="dispatched") == pytest.approx(2.5)
    second.close(5.0)
    assert seen.counts() == {"dispatched": 2, "withdrawn": 0, "refused": 0}, "counted once each"


def test_a_client_that_leaves_while_held_is_withdrawn() -> None:
    seen = Holding()
    seen.ask(1.0)
    seen.ask(1.5).close(1.75)
    assert seen.held == 0
    assert seen.counts() == {"dispatched": 0, "withdrawn": 1, "refused": 0}
    assert seen.value(f"{DURATION}_sum", outcome="withdrawn") == pytest.approx(0.25)


def test_an_answer_of_the_gateway_itself_withdraws() -> None:
    seen = Holding()
    seen.ask(1.0)
    held = seen.ask(1.5)
    held.receive(response_headers("504"), 2.0)
    held.close(2.0)
    assert seen.counts() == {"dispatched": 0, "withdrawn": 1, "refused": 0}


def test_a_held_request_without_an_endpoint_left_is_refused() -> None:
    seen = Holding()
    seen.ask(1.0)
    seen.ask(1.5)
    seen.world.pool.apply(Members(()), 3.0)
    seen.hold.wake(3.0)
    assert seen.held == 0
    assert seen.counts() == {"dispatched": 0, "withdrawn": 0, "refused": 1}
    assert seen.value(f"{DURATION}_sum", outcome="refused") == pytest.approx(1.5)


def test_the_line_of_a_finished_request_says_how_long_it_was_held(caplog) -> None:
    seen = Holding()
    with caplog.at_level(VERBOSE, logger="epp.edge.telemetry"):
        first = seen.ask(1.0)
        second = seen.ask(1.5)
        first.close(4.0)
        second.close(9.0)
    lines = [r.fields for r in caplog.records if r.levelno == VERBOSE]
    assert [line.get("held_s") for line in lines] == [None, 2.5]


def test_without_a_hold_nothing_is_held_and_nothing_counted(caplog) -> None:
    seen = Seen()
    with caplog.at_level(logging.DEBUG):
        seen.run()
    assert seen.value("epp_held_requests") == 0
    assert [seen.value(f"{DURATION}_count", outcome=o) for o in OUTCOMES] == [0, 0, 0]
    assert all("held_s" not in getattr(r, "fields", {}) for r in caplog.records)


def test_the_state_says_who_is_wanted_and_how_long_the_oldest_waits() -> None:
    seen = Holding()
    seen.ask(1.0)
    for now_s in (1.5, 1.75):
        seen.ask(now_s)
    state = debug_state(seen.world.decider, lambda: 2.0, seen.hold).state
    (endpoint,) = state.endpoints
    assert (state.held_requests, endpoint.held_requests) == (2, 2)
    assert endpoint.longest_held_s == 0.5
    bare = debug_state(seen.world.decider, lambda: 2.0).state
    assert (bare.held_requests, bare.endpoints[0].longest_held_s) == (0, None)
