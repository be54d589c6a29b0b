"""What goes out: the buffers of the next write, the peer's windows, and who waits for them.

Answers take one of two ways. A message that fits one frame, both windows and the room we have is
appended at once (`Call.send`). Anything else goes into its call's outbox, and the call waits here
until there is something to send it with: the connection's window, and room. A call whose own
window is empty does not wait here; its WINDOW_UPDATE brings it back. Calls that wait take turns of
`TURN_FRAMES` frames.

Room is what the socket may still be given: `output_bytes_high` less what it has not sent. Control
frames and trailers are small and few per frame received, so they do not ask for room; as nothing
is read without room either, they cannot pile up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from epp.wire.http2 import hpack
from epp.wire.http2.frames import (
    END_HEADERS,
    FRAME_BYTES_DEFAULT,
    FRAME_HEAD,
    HEAD_BYTES,
    HEADER_TABLE_DEFAULT,
    WINDOW_DEFAULT,
    Buffer,
    Kind,
)
from epp.wire.http2.limits import Http2Limits

TURN_FRAMES: Final = 4
"""Frames of one call before the next one's turn."""

FRAME_BYTES_MAX: Final = 1 << 20
"""Longest frame we send, so that one frame cannot pass the bounds of output by much."""

_JOINED_BYTES_MAX: Final = 65_536
_SMALL_BUFFER_BYTES: Final = 2_048
"""A write is one buffer when it is not longer, or when its buffers are smaller on average: copying
costs less then than handing over many of them."""

_HEADERS: Final = int(Kind.HEADERS)


class Waiting(Protocol):
    """A call, as this module sees it."""

    @property
    def sendable(self) -> bool:
        """It has something in its outbox that its own window allows."""

    def pump(self) -> None:
        """Send up to `TURN_FRAMES` frames."""


class Output:
    """The sending side of one connection.

    Args:
        wake: called when something was put here that the caller of the connection does not expect.
    """

    __slots__ = (
        "_limits",
        "_table_shrunk",
        "_waiting",
        "_wake",
        "_woken",
        "buffers",
        "busy",
        "bytes",
        "frame_bytes",
        "queued_bytes",
        "reading",
        "room_bytes",
        "stream_window_bytes",
        "table_bytes",
        "unsent_bytes",
        "window_bytes",
        "work",
    )

    def __init__(self, limits: Http2Limits, wake: Callable[[], None]) -> None:
        self._limits = limits
        self._wake = wake
        self._woken = False
        self._waiting: OrderedDict[Waiting, None] = OrderedDict()
        self.buffers: list[Buffer] = []
        self.bytes = 0
        """In `buffers`."""
        self.unsent_bytes = 0
        """Taken from here and not known to have left."""
        self.room_bytes = limits.output_bytes_high
        """Answers go to `buffers` while `bytes` is less."""
        self.queued_bytes = 0
        """In outboxes, over all calls."""
        self.frame_bytes = FRAME_BYTES_DEFAULT
        """The longest payload to send, as the peer says and up to `FRAME_BYTES_MAX`."""
        self.window_bytes = WINDOW_DEFAULT
        """What the peer takes on the connection."""
        self.stream_window_bytes = WINDOW_DEFAULT
        """What it takes on a new stream."""
        self.table_bytes = HEADER_TABLE_DEFAULT
        """The dynamic table that the peer thinks we use; we use none."""
        self._table_shrunk = False
        """The next header block must say that the table is smaller now (RFC 7541 4.2)."""
        self.work = 0
        """Messages in and frames of answers out that no budget has counted yet; see `limits`."""
        self.busy = False
        """The connection is being called and its caller will take the output."""
        self.reading = True
        """See `ServerConnection.reading`."""

    def control(self, frame: bytes) -> None:
        """Send a frame that needs no window."""
        self.buffers.append(frame)
        self.bytes += len(frame)

    def headers(self, stream_id: int, block: bytes, flags: int = END_HEADERS) -> None:
        """Send a header block, which is shorter than any peer's longest frame."""
        if self._table_shrunk:
            self._table_shrunk = False
            block = hpack.EMPTY_TABLE + block
        size = len(block)
        self.buffers.append(FRAME_HEAD.pack(size << 8 | _HEADERS, flags, stream_id) + block)
        self.bytes += HEAD_BYTES + size

    def shrink_table(self) -> None:
        """The peer allows a smaller table than before; we make it empty, for good."""
        self.table_bytes = 0
        self._table_shrunk = True

    def notify(self) -> None:
        """Something was sent or ended: outside of a call of the connection, wake its caller."""
        if not self.busy and not self._woken:
            self._woken = True
            self._wake()

    def wait(self, call: Waiting) -> None:
        """Let `call` send what it has as soon as there is window and room."""
        self._waiting[call] = None
        self.pump()

    def forget(self, call: Waiting) -> None:
        """`call` has ended."""
        self._waiting.pop(call, None)

    def pump(self) -> None:
        """Let the calls that wait take turns. Ends: each turn uses window or room, or leaves."""
        waiting = self._waiting
        while waiting and self.window_bytes > 0 and self.bytes < self.room_bytes:
            call, _ = waiting.popitem(last=False)
            call.pump()
            if call.sendable:
                waiting[call] = None

    def take(self) -> list[Buffer]:
        """Everything to write now; it counts as unsent until `written` says otherwise."""
        self._woken = False
        buffers, size = self.buffers, self.bytes
        if not buffers:
            return buffers
        self.buffers, self.bytes = [], 0
        self._set_unsent(self.unsent_bytes + size)
        join = size <= _JOINED_BYTES_MAX or size < _SMALL_BUFFER_BYTES * len(buffers)
        return [b"".join(buffers)] if join else buffers

    def written(self, unsent_bytes: int) -> None:
        """The socket still holds so much."""
        self._set_unsent(unsent_bytes)
        if self._waiting:
            self.pump()

    def settle(self) -> bool:
        """Decide about reading. False: the peer does not read and must go."""
        unsent = self.bytes + self.unsent_bytes
        high = self._limits.output_bytes_high
        self.reading = unsent <= (high if self.reading else high // 2)
        return unsent <= self._limits.output_bytes_max

    def discard(self) -> None:
        """Nothing of this will be sent: the connection has ended."""
        self.buffers, self.bytes = [], 0
        self._waiting.clear()

    def _set_unsent(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.room_bytes = self._limits.output_bytes_high - unsent_bytes
