"""Follows the KV events of every endpoint of a pool and tells a sink what each one holds.

Endpoints are subscribed to where `sources` finds them (`KvEvents` connects), or publish to an
address of ours (`bind`, where the topic `kv@WHO@MODEL` says by address, host or name who it is).
Each data-parallel rank is a stream of its own (`edge.kvstream`); who sent something is known by the
socket it came from, not by what it says. All work is done on the event loop, in turns that are
bounded in time (`edge.kvsockets`).

What the sink is told is always true: `restarted` means that what it was told of this endpoint no
longer counts, and what is told after that does. `unsure` means that the endpoint may hold more than
was told, `sure` that it does not. An endpoint is unsure at first, and after a gap that no replay
could fill (`restarted` comes first then); it is sure again when a replay reached back to the
engine's first batch, when the engine cleared its cache or restarted, or once it has stored as many
blocks as its cache holds.

An endpoint that cannot be found out about is asked again less and less often, up to every
`retry_s_max`. One whose connection is gone is asked anew where it publishes, as it may have been
started again with other ports.

Cost: a batch of one block takes 11 us of CPU with all of ZMQ, reading and sequencing, without the
sink (Python 3.11, one core of a shared machine): 64 endpoints with 200 batches/s each 0.14 of a
core. A batch of 128 blocks takes 80 us. The loop is held for 0.2 ms at once, or as long as one
message takes to decode (0.6 us per block of 16 tokens).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from random import Random
from typing import Protocol

import msgspec

from epp.core.errors import ConfigError
from epp.core.kvevents import Batch
from epp.core.model import Endpoint
from epp.core.pool import Pool
from epp.edge.kvsockets import Frames, Inbox, Sockets
from epp.edge.kvsources import RANKS_MAX, Source, SourceError, Sources, tcp
from epp.edge.kvstream import Replay, Stream, StreamSettings, Totals
from epp.wire.kvevents import END_SEQUENCE, numbered, rank_of

TOPIC_PARTS = 3
TOPIC_START = "kv"

log = logging.getLogger(__name__)


class KvSink(Protocol):
    """Takes what endpoints hold; called on the event loop."""

    def applied(self, endpoint: Endpoint, batch: Batch) -> None:
        """A batch, or a piece of a large one, in order."""

    def restarted(self, endpoint: Endpoint) -> None:
        """Nothing told of it so far counts any more."""

    def unsure(self, endpoint: Endpoint) -> None:
        """It may hold more than was told."""

    def sure(self, endpoint: Endpoint) -> None:
        """What was told is all it holds."""


class KvEventsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to follow; the same for all endpoints of a pool."""

    bind: str | None = None
    """Address to listen on for engines that connect to us, as `tcp://*:5557`; `None`: none."""
    bind_replay_port: int | None = None
    """Replay port, plus rank, of engines that connect to us; `None` when they have none."""
    startup_s: float = 30.0
    """`ready` does not wait longer for an endpoint to catch up."""
    retry_s: float = 1.0
    retry_s_max: float = 60.0
    stream: StreamSettings = StreamSettings()


class Followed:
    """An endpoint and its streams."""

    def __init__(self, endpoint: Endpoint, events: KvEvents) -> None:
        self.endpoint = endpoint
        self.sources: tuple[Source, ...] = ()
        self.streams: dict[int, Stream] = {}
        """By rank."""
        self.failed = False
        """Where it publishes could not be found out, or it publishes nothing."""
        self.sure = False
        self.changed_event = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._events = events

    @property
    def connected(self) -> bool:
        """Every stream that we connect has its connection."""
        return all(s.connected for s in self.streams.values() if s.source.address)

    @property
    def caught_up(self) -> bool:
        """There is nothing more to wait for."""
        if not self.streams:
            return self.failed
        return all(stream.caught_up for stream in self.streams.values())

    def applied(self, batch: Batch) -> None:
        """Pass a batch on."""
        self._events.sink.applied(self.endpoint, batch)

    def dropped(self, stream: Stream) -> None:
        """The sink knows no ranks: what it forgets, the others have to tell again."""
        self._events.sink.restarted(self.endpoint)
        for other in self.streams.values():
            if other is not stream and other.told:
                other.resync()

    def changed(self) -> None:
        """Tell the sink whether all streams are sure."""
        sure = bool(self.streams) and all(stream.complete for stream in self.streams.values())
        if sure != self.sure:
            self.sure = sure
            tell = self._events.sink.sure if sure else self._events.sink.unsure
            tell(self.endpoint)
        self.changed_event.set()
        self._events.check_ready()

    def cache_blocks(self) -> int | None:
        """As its last page of metrics said, for all of its ranks."""
        return self.endpoint.last_load.kv_blocks

    def open(self, sources: tuple[Source, ...]) -> None:
        """Subscribe to these instead of what there was."""
        if self.streams:
            self.close()
            self._events.sink.restarted(self.endpoint)
        for source in sources:
            self.streams[source.rank] = self._events.stream(source, self)
        self.sources = sources
        self.changed()

    def close(self) -> None:
        """Stop following."""
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()


class KvEvents:
    """Follows all endpoints of a pool while `run` runs.

    Args:
        sink: told what each endpoint holds. Of an endpoint that left the pool it is told nothing
            more; to forget it is the pool owner's business.
        sources: finds where endpoints publish; `None`: they connect to us.
        rng: spreads retries.

    Raises: ConfigError, by `run`, when pyzmq is missing or the address cannot be listened on.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        sink: KvSink,
        sources: Sources | None,
        settings: KvEventsSettings,
        rng: Random,
    ) -> None:
        assert sources is not None or settings.bind, "events have to come from somewhere"
        self.sink = sink
        self.totals = Totals()
        self.following: dict[Endpoint, Followed] = {}
        self.ready = asyncio.Event()
        """Every endpoint caught up, or had `startup_s` to do so; once set it stays so."""
        self.bound_to: str | None = None
        """The address listened on, while `run` runs."""
        self._pool = pool
        self._sources = sources
        self._settings = settings
        self._rng = rng
        self._replays = asyncio.Semaphore(settings.stream.replays_max)
        self._by_name: dict[str, Endpoint] = {}
        self._sockets: Sockets | None = None
        self._group: asyncio.TaskGroup | None = None
        self._fed: Stream | None = None

    async def run(self) -> None:
        """Follow until cancelled. Call once."""
        sockets = Sockets(message_bytes_max=self._settings.stream.message_bytes_max)
        try:
            if self._sources is None:
                await self._run(sockets)
            else:
                async with self._sources:
                    await self._run(sockets)
        finally:
            for followed in self.following.values():
                followed.close()
            sockets.close()

    async def _run(self, sockets: Sockets) -> None:
        self._sockets = sockets
        if self._settings.bind:
            self._listen(sockets, self._settings.bind)
        async with asyncio.TaskGroup() as group:
            self._group = group
            timer = sockets.loop.call_later(self._settings.startup_s, self.ready.set)
            try:
                self.members_changed()
                await sockets.turns.failure
            finally:
                timer.cancel()
                self._group = None
                for followed in self.following.values():
                    if followed.task is not None:
                        followed.task.cancel()
                    followed.close()

    def members_changed(self) -> None:
        """Take over the pool's membership, at once. To be called after each change of it, on the
        event loop."""
        if self._group is None:
            return
        members = dict.fromkeys(self._pool.endpoints)
        for endpoint in [e for e in self.following if e not in members]:
            self._drop(self.following.pop(endpoint))
        for endpoint in members:
            if endpoint not in self.following:
                followed = self.following[endpoint] = Followed(endpoint, self)
                self.sink.unsure(endpoint)
                if self._sources is not None:
                    followed.task = self._group.create_task(self._follow(followed, self._sources))
        self._by_name = _by_name(members)
        self.check_ready()

    def _drop(self, followed: Followed) -> None:
        if followed.task is not None:
            followed.task.cancel()
        followed.close()

    def check_ready(self) -> None:
        """Whether all endpoints caught up."""
        waits = self._sources is not None
        if self.following and all(f.caught_up or not waits for f in self.following.values()):
            self.ready.set()

    def stream(self, source: Source, followed: Followed) -> Stream:
        """A new stream."""
        assert self._sockets is not None, "nothing is followed but in `run`"
        return Stream(
            source,
            followed,
            sockets=self._sockets,
            settings=self._settings.stream,
            totals=self.totals,
            replays=self._replays,
            start=self._start,
        )

    def _start(self, replay: Replay) -> asyncio.Task[None]:
        assert self._group is not None, "nothing is followed but in `run`"
        return self._group.create_task(replay.run())

    # -- we connect ------------------------------------------------------------------------

    async def _follow(self, followed: Followed, sources: Sources) -> None:
        failures = 0
        while True:
            try:
                found = await sources.find(followed.endpoint)
                if found != followed.sources or not followed.streams:
                    followed.open(found)
                followed.failed = not found
                failures = 0 if found else failures + 1
            except SourceError as exception:
                failures += 1
                self._failed(followed, exception)
            if followed.streams:
                await _until_lost(followed, self._settings.retry_s_max)
            self.check_ready()
            await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, failures: int) -> float:
        step_s = self._settings.retry_s * 2.0 ** min(failures, 30)
        return min(step_s, self._settings.retry_s_max) * self._rng.uniform(0.75, 1.25)

    def _failed(self, followed: Followed, exception: Exception) -> None:
        self.totals.source_failures += 1
        if not followed.failed:
            log.warning("no KV events of %s: %s", followed.endpoint.name, exception)
        followed.failed = True
        self.check_ready()

    # -- they connect ----------------------------------------------------------------------

    def _listen(self, sockets: Sockets, address: str) -> None:
        inbox: Inbox = sockets.open(
            sockets.zmq.SUB,
            messages_max=self._settings.stream.live_messages_max,
            take=self._published,
            first=self._work_of_fed,
            ipv6="[" in address,
        )
        try:
            inbox.bind(address)
        except OSError as exception:
            message = f"cannot listen for KV events on {exception}; choose a free address"
            raise ConfigError(message) from exception
        self.bound_to = inbox.bound_to

    def _work_of_fed(self) -> bool:
        return self._fed is not None and self._fed.step()

    def _published(self, frames: Frames) -> None:
        message = numbered(frames) if len(frames) == 3 else None
        if message is None or message[0] == END_SEQUENCE:
            self.totals.malformed_frames += 1
            return
        endpoint = self._by_name.get(publisher(frames[0]))
        followed = None if endpoint is None else self.following.get(endpoint)
        if followed is None:
            self.totals.unknown_publishers += 1
            return
        rank = rank_of(message[1])
        stream = followed.streams.get(rank)
        if stream is None:
            if not 0 <= rank < RANKS_MAX:
                self.totals.malformed_frames += 1
                return
            stream = followed.streams[rank] = self.stream(
                self._own_source(followed, rank), followed
            )
        self._fed = stream
        stream.message(*message)

    def _own_source(self, followed: Followed, rank: int) -> Source:
        port = self._settings.bind_replay_port
        replay = None if port is None else tcp(followed.endpoint.spec.host, port + rank)
        return Source(rank, "", replay)


async def _until_lost(followed: Followed, connect_s_max: float) -> None:
    """Until a connection is gone, or was not made in this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(connect_s_max):
            await _until(followed, connected=True)
    await _until(followed, connected=False)


async def _until(followed: Followed, *, connected: bool) -> None:
    while followed.connected != connected:
        followed.changed_event.clear()
        await followed.changed_event.wait()


def publisher(topic: bytes) -> str:
    """Who a topic `kv@WHO@MODEL` says it is from; empty when it has another form."""
    words = topic.decode("utf-8", "replace").split("@", TOPIC_PARTS - 1)
    return words[1] if len(words) == TOPIC_PARTS and words[0] == TOPIC_START else ""


def _by_name(endpoints: Mapping[Endpoint, object]) -> dict[str, Endpoint]:
    """Endpoints by address, and by host and name where these are one endpoint's alone."""
    named: dict[str, Endpoint | None] = {}
    for endpoint in endpoints:
        for name in {endpoint.spec.host, endpoint.name}:
            named[name] = None if name in named else endpoint
    found = {name: endpoint for name, endpoint in named.items() if endpoint is not None}
    return found | {endpoint.address: endpoint for endpoint in endpoints}
