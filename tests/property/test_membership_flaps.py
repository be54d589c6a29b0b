"""Endpoints come, go and are replaced under open requests: no charge is lost, no pick astray."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings, strategies as st

from epp.core.messages import HeadersReply, ImmediateReply
from epp.core.model import EndpointSpec, Load
from epp.core.pool import Answered, Members, Scraped, ScrapeFailed
from epp.edge.admin import debug_state
from epp.edge.telemetry import Telemetry
from tests.unit.exchanges import (
    World,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)

ADDRESSES = 4
members = st.lists(
    st.tuples(st.integers(0, ADDRESSES - 1), st.sampled_from(["", "u1", "u2"])),
    max_size=ADDRESSES,
    unique_by=lambda pair: pair[0],
)
loads = st.builds(
    Load,
    at_s=st.none(),
    waiting=st.none() | st.integers(0, 2**53),
    running=st.none() | st.integers(0, 2**53),
    kv_usage_ratio=st.none() | st.floats(0, 1),
    kv_block_tokens=st.none() | st.sampled_from([1, 16, 64, 256, 10**15 - 1]),
    kv_blocks=st.none() | st.sampled_from([1, 100, 10**15 - 1]),
)
steps = st.one_of(
    st.tuples(st.just("members"), members),
    st.tuples(st.just("open"), st.integers(0, 3)),
    st.tuples(st.just("answer"), st.sampled_from(["200", "500", "503", "x"]), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("close"), st.integers(0, 9)),
    st.tuples(st.just("scrape"), st.integers(0, 9), loads),
    st.tuples(st.just("fail"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 1.0, 40.0, 1e9])),
    st.tuples(st.just("look"), st.none()),
)


class Flaps:
    """A world with real telemetry, and the requests that are open in it."""

    def __init__(self) -> None:
        self.world = World(2)
        self.telemetry = Telemetry(
            pools=self.world.pools(),
            clock=lambda: self.now_s,
            label_values_max=3,
        )
        self.world.watched = self.telemetry
        self.world.pool.listen(self.telemetry)
        self.now_s = 1.0
        self.open = []
        self.seen = {id(e): e for e in self.world.pool.endpoints}

    def members(self, wanted) -> None:
        specs = tuple(EndpointSpec(host=f"10.0.0.{n + 1}", port=8000, uid=u) for n, u in wanted)
        self.world.pool.apply(Members(specs), self.now_s)
        self.seen |= {id(e): e for e in self.world.pool.endpoints}

    def open_(self, number: int) -> None:
        exchange = self.world.exchange()
        exchange.receive(request_headers(), self.now_s)
        data = chat(f"{number} " + "hello " * 300, model=f"model-{number}")
        replies = exchange.receive(body(data), self.now_s)
        exchange.settle(self.now_s)
        if not self.world.pool.endpoints:
            assert isinstance(replies[0], ImmediateReply)
            assert replies[0].status == 503
            return
        assert isinstance(replies[0], HeadersReply)
        assert replies[0].mutation.destination in self.world.pool.by_address
        self.open.append(exchange)

    def answer(self, status: str, served: int) -> None:
        for exchange in self.open[-1:]:
            address = None if served == ADDRESSES else f"10.0.0.{served + 1}:8000"
            exchange.receive(response_headers(status, served=address), self.now_s)
            exchange.receive(response_body(b"x"), self.now_s)

    def end(self, at: int) -> None:
        if self.open:
            exchange = self.open.pop(at % len(self.open))
            exchange.receive(response_body(b"", end_of_stream=True), self.now_s)
            exchange.close(self.now_s)

    def close(self, at: int) -> None:
        if self.open:
            self.open.pop(at % len(self.open)).close(self.now_s)

    def scrape(self, at: int, load: Load) -> None:
        # Of an endpoint that left, too: a scrape may end after it.
        endpoint = list(self.seen.values())[at % len(self.seen)]
        load = msgspec.structs.replace(load, at_s=self.now_s)
        self.world.pool.apply(Scraped(endpoint, load), self.now_s)

    def fail(self, at: int, unreachable: bool) -> None:
        endpoint = list(self.seen.values())[at % len(self.seen)]
        self.world.pool.apply(ScrapeFailed(endpoint, "x", unreachable), self.now_s)
        self.world.pool.apply(Answered(endpoint, ok=False), self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def look(self, _nothing: None) -> None:
        assert "".join(self.telemetry.metrics.text()).endswith("\n")
        msgspec.json.encode(debug_state(self.world.decider, lambda: self.now_s).state)

    def check(self) -> None:
        world, pool = self.world, self.world.pool
        charged = Counter(id(e.decision.charge.endpoint) for e in self.open)
        for endpoint in self.seen.values():
            assert endpoint.inflight_requests == charged[id(endpoint)]
            assert 0 <= endpoint.waiting_requests <= endpoint.inflight_requests
            assert endpoint.inflight_tokens >= 0
        assert world.decider.inflight.requests == len(self.open)
        slots = [e.slot for e in pool.endpoints]
        assert len(set(slots)) == len(slots)
        assert len({e.address for e in pool.endpoints}) == len(slots)
        eligible = pool.snapshot(self.now_s).endpoints
        assert set(eligible) <= set(pool.endpoints)
        assert bool(eligible) == bool(pool.endpoints)
        held = sum(world.decider.prefix.index.held_by(slot) for slot in slots)
        assert held <= world.decider.prefix.index.held


@given(st.lists(steps, max_size=40))
@settings(max_examples=300, deadline=None)
def test_C09_E13_endpoints_that_flap_under_requests_leave_no_charge_and_no_wrong_destination(
    script,
) -> None:
    flaps = Flaps()
    for name, *arguments in script:
        getattr(flaps, "open_" if name == "open" else name)(*arguments)
        flaps.check()
    for exchange in flaps.open:
        exchange.close(flaps.now_s)
    flaps.open.clear()
    flaps.check()
    assert not flaps.telemetry._ids
    assert not flaps.telemetry._running
    assert set(flaps.telemetry._attempts_to) <= set(flaps.world.pool.endpoints)
