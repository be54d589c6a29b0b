"""ZMQ sockets on the event loop, in turns that are bounded in time.

A ZMQ socket has one file descriptor that becomes readable when its state changed, not as long as
there is something to read. So a socket that woke us is read until it is empty, over as many turns
as that takes: a `Turns` runs what has work, one step each in rotation, for `TURN_S` seconds, and
leaves the loop to everybody else before it goes on. No thread of ours is involved; ZMQ's own moves
bytes between kernel and memory and never holds the interpreter's lock.

pyzmq is an optional dependency; nothing here is imported before `Sockets` is made.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from epp.core.errors import ConfigError

if TYPE_CHECKING:
    import zmq

TURN_S = 0.000_2
"""Of the loop's time, at once. One step may take it beyond: see `core.kvevents.PART_BLOCKS`."""
SOCKETS_MAX = 16_384
"""Of one context; ZMQ's own default is 1023, too few for 512 subscriptions with their monitors."""
RECONNECT_MS, RECONNECT_MS_MAX = 100, 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
"""A peer that vanished without a word is noticed, and connected to again."""
CONNECT_TIMEOUT_MS = 5_000
EXTRA = "kv-events"

Frames = list[bytes]


class Work(Protocol):
    """Something that can do a small piece of work at a time."""

    queued: bool
    """Owned by `Turns`."""

    def step(self) -> bool:
        """Do a piece. Returns: whether there was anything to do."""


class Turns:
    """Runs `Work` on the event loop, a bounded time per turn of the loop.

    An exception out of a step is a bug of ours; it ends up in `failure`, for the owner to raise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, turn_s: float = TURN_S) -> None:
        self._loop = loop
        self._turn_s = turn_s
        self._ready: deque[Work] = deque()
        self._scheduled = False
        self.failure: asyncio.Future[None] = loop.create_future()

    def wake(self, work: Work) -> None:
        """There may be something to do for `work`."""
        if not work.queued:
            work.queued = True
            self._ready.append(work)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        end_s = time.perf_counter() + self._turn_s
        while self._ready:
            work = self._ready.popleft()
            try:
                more = work.step()
            except Exception as exception:  # noqa: BLE001 - raised by the owner, who awaits it
                if not self.failure.done():
                    self.failure.set_exception(exception)
                return
            work.queued = more
            if more:
                self._ready.append(work)
            if time.perf_counter() >= end_s:
                break
        if self._ready:
            self._schedule()


class Inbox:
    """A socket that is read message by message.

    Args:
        take: called with the frames of each message.
        first: does outstanding work; no message is read as long as it had some to do.
    """

    def __init__(
        self,
        sockets: Sockets,
        socket: zmq.Socket[bytes],
        take: Callable[[Frames], None],
        first: Callable[[], bool] = lambda: False,
    ) -> None:
        self.queued = False
        self.closed = False
        self._sockets = sockets
        self._socket = socket
        self._take = take
        self._first = first
        self._monitor: Inbox | None = None
        self._fd = int(socket.getsockopt(sockets.zmq.FD))
        sockets.loop.add_reader(self._fd, sockets.turns.wake, self)
        sockets.turns.wake(self)  # what is there already wakes nobody

    def step(self) -> bool:
        """Read one message, unless other work comes first."""
        if self.closed:
            return False
        if self._first():
            return True
        zmq = self._sockets.zmq
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._take(frames)
        return True

    def send(self, frames: Frames) -> bool:
        """Send without waiting. Returns: whether it could be queued."""
        zmq = self._sockets.zmq
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sockets.turns.wake(self)  # sending may have swallowed the wake-up of an answer
        return True

    def monitor(self, connected: Callable[[], None], lost: Callable[[], None]) -> None:
        """Be told when a connection of this socket is made (handshake over) and when it ends.

        Raises: OSError, when there are no more sockets or file descriptors."""
        zmq = self._sockets.zmq
        made, ended = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED

        def take(frames: Frames) -> None:
            event = int.from_bytes(frames[0][:2], sys.byteorder)
            if event == made:
                connected()
            elif event == ended:
                lost()

        try:
            monitor = self._socket.get_monitor_socket(made | ended)
        except zmq.ZMQError as exception:
            raise OSError(f"no monitor of a ZMQ socket: {exception.strerror}") from exception
        self._monitor = Inbox(self._sockets, monitor, take)

    def connect(self, address: str) -> None:
        """Raises: OSError, for an address that cannot be one."""
        self._translated(self._socket.connect, address)

    def bind(self, address: str) -> None:
        """Raises: OSError, when it cannot be listened on."""
        self._translated(self._socket.bind, address)

    @property
    def bound_to(self) -> str:
        """The address of the last `bind` or `connect`, with the port the system chose."""
        return (
            bytes(self._socket.getsockopt(self._sockets.zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        )

    def _translated(self, call: Callable[[str], Any], address: str) -> None:
        zmq = self._sockets.zmq
        try:
            call(address)
        except zmq.ZMQError as exception:
            raise OSError(f"{address}: {exception.strerror}") from exception

    def close(self) -> None:
        """Close the socket, at once; calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._sockets.loop.remove_reader(self._fd)
        if self._monitor is not None:
            self._monitor.close()
            self._socket.disable_monitor()
        self._socket.close(0)
        self._sockets.inboxes.discard(self)


class Sockets:
    """A ZMQ context on the running event loop; close it when done.

    Args:
        message_bytes_max: a peer that sends a longer message is disconnected.

    Raises: ConfigError, when pyzmq is not installed.
    """

    def __init__(self, *, message_bytes_max: int, turn_s: float = TURN_S) -> None:
        self.zmq = _load()
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop, turn_s=turn_s)
        self.inboxes: set[Inbox] = set()
        self._message_bytes_max = message_bytes_max
        self._context = self.zmq.Context(io_threads=1)
        self._context.set(self.zmq.MAX_SOCKETS, SOCKETS_MAX)

    def open(
        self,
        kind: int,
        *,
        messages_max: int,
        take: Callable[[Frames], None],
        first: Callable[[], bool] = lambda: False,
        ipv6: bool = False,
    ) -> Inbox:
        """A socket that is not connected yet.

        Args:
            kind: `zmq.SUB` (to everything) or `zmq.DEALER`.
            messages_max: received and not read yet, per peer; the peer keeps or drops what is more.

        Raises: OSError, when there are no more sockets or file descriptors.
        """
        zmq = self.zmq
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as exception:
            raise OSError(f"no further ZMQ socket: {exception.strerror}") from exception
        for option, value in (
            (zmq.RCVHWM, messages_max),  # these count only if set before connecting
            (zmq.SNDHWM, 16),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, self._message_bytes_max),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
            (zmq.IPV6, int(ipv6)),
        ):
            socket.setsockopt(option, value)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        inbox = Inbox(self, socket, take, first)
        self.inboxes.add(inbox)
        return inbox

    def close(self) -> None:
        """Close every socket and the context."""
        for inbox in [*self.inboxes]:
            inbox.close()
        self._context.destroy(0)
        self.turns.failure.cancel()


def _load() -> Any:
    try:
        import zmq
    except ImportError as exception:
        message = (
            "following KV events needs pyzmq, which is not installed;"
            f" install envoy-endpoint-picker[{EXTRA}]"
        )
        raise ConfigError(message) from exception
    return zmq
