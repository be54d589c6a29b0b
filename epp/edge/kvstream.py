"""One stream of KV events: one endpoint, one data-parallel rank, put in order and read.

`wire.kvsequence` says what to make of each message, `wire.kvevents` reads it; this adds the replay
socket, the time limits, and the pieces in which a large batch is handed on. A replay has a socket
of its own for each time it is asked for, so that nothing late is taken for an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from epp.core.kvevents import Batch, Cleared, Stored, parts
from epp.edge.kvsockets import Frames, Inbox, Sockets
from epp.edge.kvsources import Source
from epp.wire.kvevents import END_SEQUENCE, Counts, Reader, numbered, replay_request
from epp.wire.kvsequence import Sequence, Tally

COOLDOWN_S_MAX = 600.0

log = logging.getLogger(__name__)


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each stream."""

    live_messages_max: int = 4_096
    """Received and not read yet; beyond it the engine keeps or drops them, and what it drops is
    asked for again."""
    replay_messages_max: int = 16_384
    """The same for a replay: more than an engine keeps by default."""
    message_bytes_max: int = 8 * 2**20
    """A longer message ends the connection; what was in it counts as lost."""
    replay_s_max: float = 120.0
    """For a replay with all its rounds, without the wait for its turn."""
    replay_idle_s: float = 2.0
    """Without an answer for so long, a replay is over."""
    replay_cooldown_s: float = 30.0
    """After a replay that failed, none is asked for; doubled each time, up to 10 minutes."""
    resubscribe_s: float = 10.0
    """Without a connection for so long, the socket is made anew: ZMQ never connects again to a peer
    that broke its protocol or sent too long a message."""
    replays_max: int = 8
    """At once, over all endpoints."""


class Totals:
    """What following saw, over all streams. Numbers only go up."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.tally = Tally()
        self.malformed_frames = 0
        self.connects = 0
        self.reconnects = 0
        self.disconnects = 0
        self.unknown_publishers = 0
        """Messages at our own address whose topic names no endpoint."""
        self.source_failures = 0
        """Times that where an endpoint publishes could not be found out."""


class Owner(Protocol):
    """The endpoint whose stream it is."""

    def applied(self, batch: Batch) -> None:
        """A batch, or a piece of one."""

    def dropped(self, stream: Stream) -> None:
        """What came on this stream no longer counts."""

    def changed(self) -> None:
        """`complete`, `caught_up` or `connected` of a stream changed."""

    def cache_blocks(self) -> int | None:
        """Blocks that the endpoint's cache can hold; `None` when that is not known."""


class Stream:
    """Feeds an endpoint with the batches of one rank.

    Args:
        source: `address` empty: messages are fed from outside, by `message`.
        replays: how many replays may run at once.
        start: starts a task.
    """

    def __init__(
        self,
        source: Source,
        owner: Owner,
        *,
        sockets: Sockets,
        settings: StreamSettings,
        totals: Totals,
        replays: asyncio.Semaphore,
        start: Callable[[Replay], asyncio.Task[None]],
    ) -> None:
        self.queued = False
        self.source = source
        self.complete = False
        """What was handed on is all that the rank holds."""
        self.caught_up = False
        """As far as can be: the first replay is over, or there is none to be had."""
        self.connected = False
        self.told = False
        """Something was handed on since it was last dropped."""
        self._owner = owner
        self._sockets = sockets
        self._settings = settings
        self._totals = totals
        self._replays = replays
        self._start = start
        self._reader = Reader(totals.counts)
        self._pending: deque[Batch] = deque()
        self._sequence = Sequence(self, can_replay=source.replay is not None, tally=totals.tally)
        self._stored_blocks = 0
        """Since it became unsure."""
        self._cooldown_s = settings.replay_cooldown_s
        self._timer: asyncio.TimerHandle | None = None
        self._replay: Replay | None = None
        self._ever_connected = False
        self._watch: asyncio.TimerHandle | None = None
        self._subscription: Inbox | None = None
        if source.address:
            self._subscribe()

    def _subscribe(self) -> None:
        """With a new socket; if that fails, again after a while."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._watch_connection()
        try:
            self._subscription = self._connect()
        except OSError as exception:
            log.warning("no subscription to KV events: %s", exception)

    def _connect(self) -> Inbox:
        inbox = self._sockets.open(
            self._sockets.zmq.SUB,
            messages_max=self._settings.live_messages_max,
            take=self._live,
            first=self.step,
            ipv6="[" in self.source.address,
        )
        try:
            inbox.monitor(self._made, self._lost)
            inbox.connect(self.source.address)
        except OSError:
            inbox.close()
            raise
        return inbox

    def _watch_connection(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        wait_s = self._settings.resubscribe_s
        self._watch = self._sockets.loop.call_later(wait_s, self._subscribe)

    def close(self) -> None:
        """Stop at once; nothing is handed on any more."""
        if self._subscription is not None:
            self._subscription.close()
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        if self._replay is not None:
            self._replay.cancel()
        self._pending.clear()
        self._sequence.held.clear()

    # -- what comes in ---------------------------------------------------------------------

    def step(self) -> bool:
        """Hand on a piece of what has been read, or take a held message."""
        if not self._pending:
            return self._sequence.release()
        batch = self._pending.popleft()
        self.told = True
        self._owner.applied(batch)
        if not self.complete:
            self._judge(batch)
        return True

    def message(self, number: int, payload: bytes) -> None:
        """A live message."""
        self._sequence.live(number, payload)

    def _live(self, frames: Frames) -> None:
        message = numbered(frames) if len(frames) == 3 else None
        if message is None or message[0] == END_SEQUENCE:
            self._totals.malformed_frames += 1
        else:
            self._sequence.live(*message)

    def _made(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.connected = True
        self._totals.connects += 1
        self._totals.reconnects += self._ever_connected
        self._ever_connected = True
        if self._sequence.can_replay:
            self._sequence.connected()
        else:
            self._catch_up()
        self._owner.changed()

    def _lost(self) -> None:
        self._watch_connection()
        self.connected = False
        self._totals.disconnects += 1
        self._owner.changed()

    def resync(self) -> None:
        """What was handed on was dropped together with another rank's: begin again."""
        self._pending.clear()
        self.told = False
        self._sequence.resync()

    # -- what the sequence finds out -------------------------------------------------------

    def deliver(self, payload: bytes) -> None:
        """Read a batch and queue its pieces."""
        batch = self._reader.read(payload)
        if batch is None:
            self._sequence.unread()
            self.restarted()
            self.unsure()
            return
        self._pending.extend(parts(batch))
        self._sockets.turns.wake(self)

    def restarted(self) -> None:
        """Forget what came so far."""
        self._pending.clear()
        self._reader.restart()
        self.told = False
        self._owner.dropped(self)

    def unsure(self) -> None:
        """More is held than what came."""
        self._stored_blocks = 0
        self._set_complete(complete=False)

    def sure(self) -> None:
        """What came is all."""
        self._set_complete(complete=True)
        self._catch_up()

    def _set_complete(self, *, complete: bool) -> None:
        if self.complete != complete:
            self.complete = complete
            self._owner.changed()

    def _catch_up(self) -> None:
        if not self.caught_up:
            self.caught_up = True
            self._owner.changed()

    def _judge(self, batch: Batch) -> None:
        """An engine that cleared its cache, or stored as much as fits in it, holds nothing from
        before."""
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored_blocks += len(event.hashes)
            elif isinstance(event, Cleared):
                self.sure()
        blocks_max = self._owner.cache_blocks()
        if blocks_max is not None and self._stored_blocks >= blocks_max:
            self.sure()

    # -- replay ----------------------------------------------------------------------------

    def ask(self, start: int) -> None:
        """Ask for a replay; one that runs is given up for it."""
        assert self.source.replay is not None, "asked only where there is a replay socket"
        if self._replay is not None:
            self._replay.ask(start)
            return
        self._replay = Replay(
            self.source.replay,
            start,
            self._sequence,
            sockets=self._sockets,
            settings=self._settings,
            totals=self._totals,
            turn=self._replays,
            first=self.step,
        )
        self._replay.started(self._start(self._replay))

    def filled(self) -> None:
        """The replay is over."""
        if self._replay is not None:
            self._replay.over()
            self._replay = None
        if self._sequence.can_replay:
            self._cooldown_s = self._settings.replay_cooldown_s
        else:
            self._timer = self._sockets.loop.call_later(self._cooldown_s, self._retry)
            self._cooldown_s = min(2 * self._cooldown_s, COOLDOWN_S_MAX)
        self._catch_up()
        self._sockets.turns.wake(self)

    def _retry(self) -> None:
        self._timer = None
        self._sequence.replayable()
        if not self.complete:
            self.restarted()
            self._sequence.resync()


class Replay:
    """Asks a replay socket, in rounds, until the sequence is content or the time is over."""

    def __init__(
        self,
        address: str,
        start: int,
        sequence: Sequence,
        *,
        sockets: Sockets,
        settings: StreamSettings,
        totals: Totals,
        turn: asyncio.Semaphore,
        first: Callable[[], bool],
    ) -> None:
        self._address = address
        self._start: int | None = start
        self._sequence = sequence
        self._sockets = sockets
        self._settings = settings
        self._totals = totals
        self._turn = turn
        self._first = first
        self._inbox: Inbox | None = None
        self._answers = 0
        self._wake = asyncio.Event()
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def started(self, task: asyncio.Task[None]) -> None:
        """The task that runs it."""
        self._task = task

    def ask(self, start: int) -> None:
        """Begin another round; what the one before would still bring is not wanted."""
        self._close()
        self._start = start
        self._wake.set()

    def over(self) -> None:
        """Nothing more is wanted."""
        self._over = True
        self._wake.set()

    def cancel(self) -> None:
        """Stop at once, telling nobody."""
        self._over = True
        self._close()
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """All rounds."""
        try:
            async with self._turn, asyncio.timeout(self._settings.replay_s_max):
                await self._rounds()
        except (TimeoutError, OSError):
            pass
        finally:
            self._close()
        if not self._over:
            self._sequence.failed()

    async def _rounds(self) -> None:
        while not self._over:
            if self._start is not None:
                self._open(self._start)
                self._start = None
            self._wake.clear()
            answers = self._answers
            try:
                async with asyncio.timeout(self._settings.replay_idle_s):
                    await self._wake.wait()
            except TimeoutError:
                if answers != self._answers or self._over:
                    continue
                if not self._sequence.progressed:
                    return
                self._sequence.end()  # the end itself was lost; ask for what is missing

    def _open(self, start: int) -> None:
        self._close()
        self._inbox = self._sockets.open(
            self._sockets.zmq.DEALER,
            messages_max=self._settings.replay_messages_max,
            take=self._answer,
            first=self._first,
            ipv6="[" in self._address,
        )
        self._inbox.connect(self._address)
        self._inbox.send(replay_request(start))

    def _close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    def _answer(self, frames: Frames) -> None:
        self._answers += 1
        message = numbered(frames)
        if message is None:
            self._totals.malformed_frames += 1
        elif message[0] == END_SEQUENCE:
            self._close()
            self._sequence.end()
        else:
            self._sequence.answer(*message)
