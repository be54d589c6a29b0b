"""A publisher of KV events as engines have it, on real sockets, and a sink that keeps the books."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import msgspec
import zmq

from epp.core.kvevents import Batch, Cleared, Hash, Stored
from epp.core.model import Endpoint, EndpointSpec
from epp.core.pool import Members, Pool
from epp.edge.kvevents import KvEvents, KvEventsSettings
from epp.edge.kvsources import Sources
from epp.edge.kvstream import StreamSettings
from epp.wire.kvevents import END_SEQUENCE

DEADLINE_S = 30.0
BLOCK_TOKENS = 4
HOST = "127.0.0.1"


class Publisher:
    """Publishes batches and replays them from a thread of its own.

    Args:
        replay: `topic` and `bare` answer with and without the topic, `silent` takes requests and
            says nothing, `lossy` leaves out every third answer of the first two requests and the
            end of the first, `None` has no replay socket.
        buffer: batches kept for replays.
        connect: address to publish to; `None`: it listens.
    """

    def __init__(
        self,
        *,
        replay: str | None = "topic",
        buffer: int = 10_000,
        topic: bytes = b"kv@engine@model",
        rank: int = 0,
        hwm: int = 100_000,
        connect: str | None = None,
    ) -> None:
        self.topic = topic
        self.rank = rank
        self.held: set[Hash] = set()
        """What the engine holds."""
        self.sequence = 0
        self.requests = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._lock = threading.Lock()
        self._replay = replay
        self._hwm = hwm
        self._connect = connect
        self._ports = (0, 0)
        self._open()

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def replay_port(self) -> int | None:
        return self._ports[1] if self._replay else None

    def _open(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that can be asked for its subscribers
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        self._router = self._context.socket(zmq.ROUTER)
        if self._connect:
            self._pub.connect(self._connect)
            port = 0
        else:
            port = _bind(self._pub, self._ports[0])
        self._ports = (port, _bind(self._router, self._ports[1]))
        self._subscribers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Both sockets, and their connections; the port is free afterwards."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._pub.close(0)
        self._router.close(0)
        self._context.term()

    def restart(self) -> None:
        """The process dies and another begins on the same ports."""
        self.close()
        self.restart_closed()

    def restart_closed(self) -> None:
        """A process begins where one was closed."""
        self.sequence = 0
        self.held.clear()
        self._buffer.clear()
        self._open()

    def reopen(self) -> None:
        """Connections break; the process goes on."""
        self.close()
        self._open()

    @property
    def subscribed(self) -> bool:
        """Somebody's subscription has arrived."""
        while self._pub.poll(0):
            self._subscribers += 1 if self._pub.recv()[:1] == b"\x01" else -1
        return self._subscribers > 0

    def publish(self, *events: dict[str, object], lose: bool = False, pad: int = 0) -> None:
        """A batch; `lose`: nobody gets it live."""
        payload = msgspec.msgpack.encode(
            [1.5, [*events, {"type": "Pad", "x": b"x" * pad}], self.rank]
        )
        self.raw(payload, lose=lose)
        for event in events:
            hashes = event.get("block_hashes", ())
            if event["type"] == "BlockStored":
                self.held.update(hashes)
            elif event["type"] == "BlockRemoved":
                self.held.difference_update(hashes)
            else:
                self.held.clear()

    def raw(self, payload: bytes, *, lose: bool = False) -> None:
        """Any payload, with the next number."""
        with self._lock:
            self._buffer.append((self.sequence, payload))
        if not lose:
            self._pub.send_multipart([self.topic, self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    def frames(self, *frames: bytes) -> None:
        """Anything at all, live."""
        self._pub.send_multipart(frames)

    def _answer_all(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(10):
                continue
            who, _, start = self._router.recv_multipart()
            self.requests += 1
            if self._replay == "silent":
                continue
            with self._lock:
                batches = [b for b in self._buffer if b[0] >= int.from_bytes(start, "big")]
            lossy = self._replay == "lossy"
            for place, (number, payload) in enumerate(batches):
                if lossy and self.requests <= 2 and place % 3 == 2:
                    continue
                self._answer(who, number, payload)
            if not (lossy and self.requests == 1):
                self._answer(who, END_SEQUENCE, b"")

    def _answer(self, who: bytes, number: int, payload: bytes) -> None:
        topic = [] if self._replay == "bare" else [self.topic]
        self._router.send_multipart([who, b"", *topic, number.to_bytes(8, "big"), payload])


def _bind(socket: zmq.Socket[bytes], port: int) -> int:
    if port:
        socket.bind(f"tcp://{HOST}:{port}")
        return port
    return socket.bind_to_random_port(f"tcp://{HOST}")


def stored(*hashes: int, parent: int | None = None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [hash_ % 1000 for hash_ in hashes for _ in range(BLOCK_TOKENS)],
        "block_size": BLOCK_TOKENS,
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes)}


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}


class Books:
    """A sink: what each endpoint holds as far as it was told, and whether that is all."""

    def __init__(self) -> None:
        self.held: dict[Endpoint, set[Hash]] = {}
        self.complete: dict[Endpoint, bool] = {}
        self.batches: list[Batch] = []
        self.restarts = 0

    def applied(self, endpoint: Endpoint, batch: Batch) -> None:
        held = self.held.setdefault(endpoint, set())
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, Stored):
                held.update(event.hashes)
            elif isinstance(event, Cleared):
                held.clear()
            else:
                held.difference_update(event.hashes)

    def restarted(self, endpoint: Endpoint) -> None:
        self.restarts += 1
        self.held[endpoint] = set()

    def unsure(self, endpoint: Endpoint) -> None:
        self.complete[endpoint] = False

    def sure(self, endpoint: Endpoint) -> None:
        self.complete[endpoint] = True


QUICK = StreamSettings(replay_idle_s=0.3, replay_cooldown_s=0.2)
"""An idle time that a replay on loopback does not reach; one that fails costs no more."""


class World:
    """A `KvEvents` over a pool of endpoints, and its books."""

    def __init__(
        self, sources: Sources | None, settings: KvEventsSettings, ports: list[int]
    ) -> None:
        self.pool = Pool(stale_after_s=10.0)
        self.books = Books()
        self.members(*ports)
        self.events = KvEvents(
            pool=self.pool, sink=self.books, sources=sources, settings=settings, rng=Random(1)
        )

    def members(self, *ports: int) -> None:
        specs = [EndpointSpec(HOST, port, name=f"pod-{port}") for port in ports]
        self.pool.apply(Members(specs), 0.0)

    @property
    def endpoint(self) -> Endpoint:
        return self.pool.endpoints[0]

    @property
    def held(self) -> set[Hash]:
        return self.books.held.get(self.endpoint, set())

    @property
    def sure(self) -> bool:
        return self.books.complete[self.endpoint]


@asynccontextmanager
async def world(
    sources: Sources | None,
    *,
    stream: StreamSettings = QUICK,
    ports: tuple[int, ...] = (8000,),
    bind: str | None = None,
    startup_s: float = DEADLINE_S,
    retry_s: float = 0.02,
) -> AsyncIterator[World]:
    """It follows until left, and must not end before."""
    settings = KvEventsSettings(
        bind=bind, startup_s=startup_s, retry_s=retry_s, retry_s_max=0.2, stream=stream
    )
    w = World(sources, settings, [*ports])
    task = asyncio.create_task(w.events.run())
    try:
        yield w
        assert not task.done(), "it ended by itself"
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled(), task.exception()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.002)
