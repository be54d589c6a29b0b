"""What `bench.pick` times: the stages of a decision, and whole exchanges, without a network."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from bench.traffic.gateway import REQUEST_HEADERS, request_messages, response_messages
from bench.traffic.prompts import Prompts
from bench.traffic.upstream import ANSWER, EVENT, LAST_EVENT
from epp.config import resolve
from epp.core.decide import Decider, Decision, PrefixKeeper
from epp.core.exchange import Exchange, ExchangeParams, Watcher
from epp.core.inflight import Inflight
from epp.core.messages import Event
from epp.core.model import EndpointSpec, Load
from epp.core.parse import parse_request
from epp.core.pool import Members, Pool, Scraped
from epp.core.schedule import Profile
from epp.core.serving import Pools, Serving
from epp.core.streams import NOT_SAID
from epp.edge.telemetry import Telemetry
from epp.wire.extproc import decode_request
from epp.wire.stream import ExtProcStream

INFLIGHT = 32
EVENTS = 32
RESCORE_EVERY = 4

Figures = dict[str, list[float]]

MESSAGES = (
    *("new_stream", "request_headers", "request_body", "request_end"),
    *("response_headers", "response_body", "response_end"),
)
"""A request in the order of its messages; the picks are made at the end of the request's body."""


class NullTransport:
    """Sends nothing."""

    called = NOT_SAID

    def send(self, messages: Sequence[bytes]) -> None:
        """Drop them."""

    def finish(self, status: int = 0, message: str = "") -> None:
        """Nothing ends."""


class NullWatcher:
    """Counts nothing."""

    def decided(self, exchange: Exchange) -> None:
        """Ignore it."""

    def finished(self, exchange: Exchange) -> None:
        """Ignore it."""


class World:
    """A pool with loads, a decider as `epp serve` makes it, and prompts of one size."""

    def __init__(self, endpoints: int, kib: int) -> None:
        plan = resolve(None)
        self._rng = Random(endpoints)
        self.pool = Pool(stale_after_s=1e9)
        self.pool.apply(
            Members(
                tuple(EndpointSpec(f"10.0.{n >> 8}.{n & 255}", 8000) for n in range(endpoints))
            ),
            0.0,
        )
        assert plan.prefix is not None
        self.keeper = PrefixKeeper(plan.prefix)
        self.inflight = Inflight(plan.inflight)
        profile = plan.profiles[0]
        self.decider = self._decider(profile, self.keeper)
        # It reads matches that somebody else has looked up: schedule without match.
        self.scheduler = self._decider(profile, None)
        self.pools = Pools(Serving("bench", self.decider))
        self.telemetry = Telemetry(
            pools=self.pools,
            clock=time.monotonic,
            label_values_max=plan.limits.label_values_max,
        )
        self.prompts = Prompts(kib * 1024)
        for at in range(endpoints):
            self.scrape(at)

    def _decider(self, profile: Profile, keeper: PrefixKeeper | None) -> Decider:
        return Decider(
            pool=self.pool,
            profile=profile,
            inflight=self.inflight,
            prefix=keeper,
            rng=Random(1),
        )

    def scrape(self, at: int) -> None:
        """An endpoint reports other loads than before."""
        rng = self._rng
        load = Load(
            at_s=1.0,
            waiting=rng.randrange(8),
            running=rng.randrange(64),
            kv_usage_ratio=rng.random(),
            kv_block_tokens=16,
            kv_blocks=40_000,
        )
        self.pool.apply(Scraped(self.pool.endpoints[at % len(self.pool.endpoints)], load), 1.0)


# -- timed paths ---------------------------------------------------------------------------


def clock_us() -> float:
    """What reading the thread's CPU clock adds to what is between two readings."""
    readings = [time.thread_time_ns() for _ in range(2001)]
    return median(b - a for a, b in pairwise(readings)) / 1e3


class Stages:
    """The stages of a decision, one at a time.

    Args:
        clock_us: from `clock_us`.
    """

    def __init__(self, world: World, clock_us: float) -> None:
        self._world = world
        self._clock_us = clock_us
        self._live: deque[Decision] = deque()
        self._count = 0

    def run(self, requests: int, figures: Figures) -> None:
        """Decide so many requests."""
        for _ in range(requests):
            self._one(figures)

    def _one(self, figures: Figures) -> None:
        world, clock = self._world, time.thread_time_ns
        body = world.prompts.next()
        self._count += 1
        rescore = self._count % RESCORE_EVERY == 0
        if rescore:
            world.scrape(self._count)
        at = [clock()]
        request = parse_request(REQUEST_HEADERS, body)
        at.append(clock())
        request.match = world.keeper.match(request)
        at.append(clock())
        decision = world.scheduler.decide(request, subset=None, now_s=2.0)
        at.append(clock())
        world.decider.learn(decision)
        at.append(clock())
        self._keep(decision)
        names = ("parse", "match", "rescore" if rescore else "schedule", "learn")
        for name, (start, end) in zip(names, pairwise(at), strict=True):
            figures.setdefault(name, []).append((end - start) / 1e3 - self._clock_us)
        if not rescore:
            figures.setdefault("decision", []).append((at[3] - at[0]) / 1e3 - 3 * self._clock_us)

    def _keep(self, decision: Decision) -> None:
        """In flight for the next decisions; the oldest one ends."""
        self._live.append(decision)
        if len(self._live) > INFLIGHT:
            self._world.inflight.release(self._live.popleft().charge)


class Exchanges:
    """Whole exchanges, on events or on bytes.

    Args:
        clock_us: from `clock_us`.
    """

    def __init__(self, world: World, clock_us: float) -> None:
        self._world = world
        self._clock_us = clock_us
        self._count = 0
        self._live: deque[Exchange] = deque()
        self._params = ExchangeParams()

    def run(self, requests: int, figures: Figures) -> None:
        """Serve so many requests each way."""
        null = NullWatcher()
        for _ in range(requests):
            self._serve("events", self._receiver(null), figures)
            self._serve("bytes", self._stream(null), figures)
            self._serve("counted", self._stream(self._world.telemetry), figures)
            self._serve_by_message(figures)
            self._serve_chunks(figures)

    def _receiver(self, watcher: Watcher) -> Callable[[], tuple[Exchange, Callable[[Event], None]]]:
        """Makes an exchange and what takes its events as `wire.stream` does."""

        def make() -> tuple[Exchange, Callable[[Event], None]]:
            exchange = self._exchange(watcher)

            def receive(event: Event) -> None:
                exchange.receive(event, 2.0)
                exchange.settle()

            return exchange, receive

        return make

    def _stream(self, watcher: Watcher) -> Callable[[], tuple[Exchange, Callable[[bytes], None]]]:
        def make() -> tuple[Exchange, Callable[[bytes], None]]:
            exchange = self._exchange(watcher)
            stream = ExtProcStream(
                transport=NullTransport(), exchange=exchange, clock=time.monotonic, on_bug=_raise
            )
            return exchange, stream.on_message

        return make

    def _exchange(self, watcher: Watcher) -> Exchange:
        return Exchange(pools=self._world.pools, params=self._params, watcher=watcher, now_s=2.0)

    def _serve(
        self,
        name: str,
        make: Callable[[], tuple[Exchange, Callable[[Any], None]]],
        figures: Figures,
    ) -> None:
        self._count += 1
        messages: list[Any] = request_messages(self._world.prompts.next(), self._count)
        if name == "events":
            messages = [decode_request(message) for message in messages]
        start = time.thread_time_ns()
        exchange, receive = make()
        for message in messages:
            receive(message)
        self._note(figures, f"{name}_request", start)
        assert exchange.decision is not None
        answer = response_messages(
            exchange.decision.pick.endpoint.address, [ANSWER], "application/json"
        )
        messages = [decode_request(m) for m in answer] if name == "events" else list(answer)
        self._keep(exchange)
        start = time.thread_time_ns()
        for message in messages:
            receive(message)
        exchange.close(2.0)
        self._note(figures, f"{name}_response", start)

    def _keep(self, exchange: Exchange) -> None:
        """A request of its own stays in flight, so that endpoints are not all idle."""
        request = exchange.request
        assert request is not None
        other = self._exchange(NullWatcher())
        (other.serving,) = self._world.pools.all
        other.decision = self._world.scheduler.decide(request, subset=None, now_s=2.0)
        self._live.append(other)
        if len(self._live) > INFLIGHT:
            self._live.popleft().close(2.0)

    def _serve_by_message(self, figures: Figures) -> None:
        """`counted` again, timed message by message; the pieces of the body are one sum."""
        self._count += 1
        messages = request_messages(self._world.prompts.next(), self._count)
        start = time.thread_time_ns()
        exchange, receive = self._stream(self._world.telemetry)()
        self._note(figures, "new_stream", start)
        pieces = [f"piece_{number}" for number in range(len(messages) - 2)]
        used: Figures = {}
        self._time_each(receive, messages, ("request_headers", *pieces, "request_end"), used)
        used["request_body"] = [sum(used.pop(piece)[0] for piece in pieces)]
        assert exchange.decision is not None
        answer = response_messages(
            exchange.decision.pick.endpoint.address, [ANSWER], "application/json"
        )
        self._keep(exchange)
        names = ("response_headers", "response_body", "response_end")
        self._time_each(receive, answer, names, used)
        exchange.close(2.0)
        for name, values in used.items():
            figures.setdefault(name, []).extend(values)

    def _time_each(
        self,
        receive: Callable[[bytes], None],
        messages: Sequence[bytes],
        names: Sequence[str],
        figures: Figures,
    ) -> None:
        for name, message in zip(names, messages, strict=True):
            start = time.thread_time_ns()
            receive(message)
            self._note(figures, name, start)

    def _serve_chunks(self, figures: Figures) -> None:
        self._count += 1
        exchange, receive = self._stream(self._world.telemetry)()
        for message in request_messages(self._world.prompts.next(), self._count):
            receive(message)
        assert exchange.decision is not None
        address = exchange.decision.pick.endpoint.address
        chunks = [EVENT] * EVENTS + [LAST_EVENT]
        head, *events, last, end = response_messages(address, chunks, "text/event-stream")
        receive(head)
        start = time.thread_time_ns()
        for message in events:
            receive(message)
        used_us = (time.thread_time_ns() - start) / 1e3 - self._clock_us
        figures.setdefault("chunk", []).append(used_us / len(events))
        receive(last)
        receive(end)
        exchange.close(2.0)

    def _note(self, figures: Figures, name: str, start: int) -> None:
        used_us = (time.thread_time_ns() - start) / 1e3 - self._clock_us
        figures.setdefault(name, []).append(used_us)


def _raise(_exchange: Exchange, error: Exception) -> None:
    raise error
