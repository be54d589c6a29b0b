"""Electors in virtual time: each on an event loop and a clock of its own, one API server, faults.

The real `LeaderElector` runs, on one real event loop per node. A loop's clock is the node's: it is
off by days and runs up to `drift` too fast or too slow. Nothing sleeps: the world holds a queue of
moments, and at each gives every loop that has something to do its turns. A node that is paused gets
none, a killed one never again. Requests and answers travel for as long as the faults say, or are
lost, also after the write was made.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import msgspec

from epp.edge.kubernetes.client import ApiError
from epp.edge.kubernetes.election import LeaderElector

TICK_S = 1e-6
TURNS_MAX = 200
START = datetime(2026, 3, 1, tzinfo=UTC)


class NodeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock and turns are given from outside."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pending = 0
        super().__init__()

    def time(self) -> float:
        return self.node.clock()

    def call_soon(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.pending += 1
        return super().call_soon(*args, **options)

    def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.node.wake_at(when)
        return super().call_at(when, *args, **options)

    def turn(self) -> None:
        """Everything that can be done without waiting."""
        for _ in range(TURNS_MAX):
            super().call_soon(self.stop)
            self.pending = 0
            self.run_forever()
            if not self.pending:
                return
        raise AssertionError("the loop spins")


@dataclass
class Faults:
    """What goes wrong now; `until` in the world's seconds."""

    cut_until: dict[int, float] = field(default_factory=dict)
    """By node: what it sends is lost, what it is sent too."""
    hang_until: float = 0.0
    down_until: float = 0.0
    errors_until: float = 0.0
    error_ratio: float = 0.8
    answer_late_s: float = 0.0
    """Answers take this much longer, requests do not."""
    slow_until: float = 0.0
    slow_s: float = 0.0


class Node:
    """A machine with one elector; after a kill, with the next one."""

    def __init__(self, world: World, number: int, drift: float) -> None:
        rng = world.rng
        self.world, self.number = world, number
        self.rate = 1.0 + rng.uniform(-drift, drift)
        self.offset_s = rng.uniform(-1e5, 1e5)
        self.wall_offset = timedelta(seconds=rng.uniform(-1e5, 1e5))
        self.paused = False
        self.paused_until = 0.0
        self.alive = False
        self.told = [False]
        """What the elector told, in turn."""
        self.starts = 0

    def clock(self) -> float:
        return self.offset_s + self.rate * self.world.now

    def wall_clock(self) -> datetime:
        return START + timedelta(seconds=self.world.now) + self.wall_offset

    def wake_at(self, local_s: float) -> None:
        self.world.at((local_s - self.offset_s) / self.rate + TICK_S, self.turn)

    def start(self) -> None:
        self.starts += 1
        self.alive, self.told = True, [False]
        self.loop = NodeLoop(self)
        self.world.loops.append(self.loop)
        self.elector = LeaderElector(
            NodeApi(self.world, self, self.loop),
            namespace="ns",
            name="lease",
            identity=f"node-{self.number}_{self.starts}",
            on_change=partial(_tell, self.told),
            rng=self.world.rng,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )
        self.task = self.loop.create_task(self.elector.run())
        self.turn()

    def pause(self, until: float) -> None:
        """Give it no turn until then."""
        self.paused, self.paused_until = True, max(until, self.paused_until)
        self.world.at(self.paused_until, self.turn)

    def kill(self) -> None:
        self.alive = False

    def stop(self, *, by_cancel: bool = False) -> None:
        """Ask it to end, or only cancel it; it counts as alive until it has ended."""
        if by_cancel:
            self.task.cancel()
        else:
            self.loop.create_task(self.elector.stop())
        self.task.add_done_callback(lambda _: self.kill())
        self.turn()

    def turn(self) -> None:
        if not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, self.turn)
            return
        self.paused = False
        self.loop.turn()
        if self.task.done() and not self.task.cancelled():
            self.task.result()


def _tell(told: list[bool], leads: bool) -> None:
    assert leads != told[-1], "told in turn"
    told.append(leads)


class NodeApi:
    """The API server as one node reaches it."""

    def __init__(self, world: World, node: Node, loop: NodeLoop) -> None:
        self.world, self.node, self.loop = world, node, loop

    async def get(self, path: str) -> bytes:
        return await self._ask(lambda: self.world.store.get())

    async def create(self, path: str, body: bytes) -> bytes:
        return await self._ask(lambda: self.world.store.create(body))

    async def replace(self, path: str, body: bytes) -> bytes:
        return await self._ask(lambda: self.world.store.replace(body))

    async def _ask(self, execute: Callable[[], bytes]) -> bytes:
        answer: asyncio.Future[bytes] = self.loop.create_future()
        self.world.send(self.node, execute, answer, self.loop)
        return await answer


class Store:
    """One Lease, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 100

    def get(self) -> bytes:
        if self.lease is None:
            raise ApiError(404, "NotFound")
        return msgspec.json.encode(self.lease)

    def create(self, body: bytes) -> bytes:
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists")
        return self._write(body)

    def replace(self, body: bytes) -> bytes:
        if self.lease is None:
            raise ApiError(404, "NotFound")
        version = msgspec.json.decode(body)["metadata"]["resourceVersion"]
        if version != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict")
        return self._write(body)

    def _write(self, body: bytes) -> bytes:
        self.version += 1
        self.lease = msgspec.json.decode(body)
        assert self.lease is not None
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.get()


class World:
    """Time, the network and everyone in it."""

    def __init__(self, seed: int, nodes: int, *, drift: float = 0.0) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.store = Store()
        self.faults = Faults()
        self.loops: list[NodeLoop] = []
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.nodes = [Node(self, number, drift) for number in range(nodes)]
        self.story: list[str] = []
        self.requests = 0

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), what))

    def note(self, text: str) -> None:
        self.story.append(f"{self.now:8.3f} {text}")

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            self.check()
        self.now = until
        self.check()

    def leaders(self) -> list[int]:
        return [node.number for node in self.nodes if node.alive and node.elector.is_leader]

    def check(self) -> None:
        """At most one leads: by its clock, even if it is paused; and by what it was told."""
        told = [
            node.number for node in self.nodes if node.alive and node.told[-1] and not node.paused
        ]
        if len(self.leaders()) > 1 or len(told) > 1:
            raise TwoLeadersError("\n".join([*self.story, f"{self.now:8.3f} {self.leaders()}"]))

    # -- the network -----------------------------------------------------------------------

    def send(
        self,
        node: Node,
        execute: Callable[[], bytes],
        answer: asyncio.Future[bytes],
        loop: NodeLoop,
    ) -> None:
        """A request on its way; what becomes of it is decided as it travels."""
        self.requests += 1

        def arrive() -> None:
            if self._lost(node):
                return None
            refused = self._refused()
            # A server that fails may have written before it did.
            if refused is not None and self.rng.random() < 0.7:
                return back(refused)
            try:
                found: bytes | ApiError = execute()
            except ApiError as error:
                found = error
            back(refused or found)
            return None

        def back(found: bytes | ApiError) -> None:
            late_s = self.faults.answer_late_s
            self.at(self.now + late_s + self._travel_s(), lambda: deliver(found))

        def deliver(found: bytes | ApiError) -> None:
            if not node.alive or node.loop is not loop or self._lost(node):
                return
            if self.now < node.paused_until:
                self.at(node.paused_until, lambda: deliver(found))
                return
            if not answer.done():
                if isinstance(found, ApiError):
                    answer.set_exception(found)
                else:
                    answer.set_result(found)
                node.turn()

        self.at(self.now + self._travel_s(), arrive)

    def _lost(self, node: Node) -> bool:
        return self.now < self.faults.cut_until.get(node.number, 0.0)

    def _refused(self) -> ApiError | None:
        if self.now < self.faults.down_until:
            return ApiError(0, "Connection")
        if self.now < self.faults.errors_until and self.rng.random() < self.faults.error_ratio:
            return ApiError(self.rng.choice((429, 500, 503, 504)), "Fault")
        return None

    def _travel_s(self) -> float:
        travel_s = self.rng.uniform(0.0005, 0.01)
        if self.now < self.faults.slow_until:
            travel_s += self.rng.uniform(0.0, self.faults.slow_s)
        if self.now < self.faults.hang_until:
            travel_s += self.faults.hang_until - self.now
        return travel_s


class TwoLeadersError(AssertionError):
    """At one moment two led; the text is what went before."""


@contextmanager
def world(seed: int, nodes: int, *, drift: float = 0.0) -> Iterator[World]:
    """A world that is cleared away at the end."""
    made = World(seed, nodes, drift=drift)
    try:
        yield made
    finally:
        for loop in made.loops:
            _close(loop)


def _close(loop: NodeLoop) -> None:
    for _ in range(10):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.turn()
    loop.close()
