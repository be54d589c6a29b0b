"""One gRPC call: the `core.streams.Transport` of its stream, and the messages between the two.

Messages in. A gRPC message is a five-byte prefix and its bytes, and DATA frames may cut anywhere.
A whole message inside one frame is copied once, out of the read buffer. Of a longer one the pieces
are kept, as views where a piece is a good part of the read buffer it would keep alive, and joined
when the last one is there.

Messages out: see `output`.

States, each entered once: open, `finished` (a status was given: nothing is received or sent any
more, the outbox may still have to drain), `ended` (the peer was told, or told us: HTTP/2 knows
nothing of the stream any more). `close`, which is `Stream.on_close`, follows `finished` soon:
at once where the peer ends the stream, else when the connection's caller is back in it, so that no
stream is closed in the middle of its own `on_message` or by its own `finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from epp.core.streams import Stream
from epp.wire.http2 import replies
from epp.wire.http2.faults import Reason
from epp.wire.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    HEAD_BYTES,
    MESSAGE_HEAD,
    MESSAGE_PREFIX,
    PREFIX_BYTES,
    Buffer,
)
from epp.wire.http2.limits import Http2Limits
from epp.wire.http2.output import TURN_FRAMES, Output
from epp.wire.http2.replies import Status
from epp.wire.http2.requests import Head

_LAST: Final = END_HEADERS | END_STREAM
_WORTHY_BYTES: Final = 256
"""A frame out that is shorter does not count as work: the peer's windows make it so short."""
_VIEW_PART: Final = 4
"""A piece is kept as a view when it is at least this part of its read buffer."""

_pack_head: Final = FRAME_HEAD.pack
_pack_message_head: Final = MESSAGE_HEAD.pack
_read_prefix: Final = MESSAGE_PREFIX.unpack_from


class Host(Protocol):
    """The connection, as a call sees it."""

    limits: Http2Limits
    output: Output
    partial_bytes: int
    """Of incomplete messages, over all calls."""

    def on_finished(self, call: Call) -> None:
        """The stream must be closed soon."""

    def on_ended(self, call: Call) -> None:
        """The call's last frame was sent."""

    def refuse(self, call: Call, reason: Reason, status: int, message: str) -> None:
        """End this call with a status and count the reason."""

    def overflow(self, call: Call) -> None:
        """The outbox is over its bound: reset the call."""

    def refill(self, call: Call) -> None:
        """The peer may be given room again."""

    def on_bug(self, call: Call, error: Exception) -> None:
        """The stream raised."""

    def on_empty_message(self) -> None:
        """A message without content came. Raises: PeerError when there were too many."""

    def on_provoked(self) -> None:
        """The peer made us end a call. Raises: PeerError when it did so too often."""


class Call:
    """See the module. Made by the connection only."""

    __slots__ = (
        "_host",
        "_missing_bytes",
        "_outbox",
        "_output",
        "_pieces",
        "_prefix",
        "_stream",
        "_trailers",
        "answered",
        "called",
        "content_bytes_left",
        "credit_bytes",
        "ended",
        "finished",
        "opened_s",
        "outlives_half_close",
        "queued_bytes",
        "remote_closed",
        "stream_id",
        "window_bytes",
    )

    def __init__(self, host: Host, stream_id: int, head: Head, now_s: float) -> None:
        self._host = host
        self._output = host.output
        self._stream: Stream | None = None
        self.stream_id = stream_id
        self.opened_s = now_s
        self.called = head.called
        """See `Transport.called`."""
        self.outlives_half_close = head.outlives_half_close
        self.content_bytes_left = head.content_bytes
        """What `content-length` still promises; None = it was not given."""
        self.credit_bytes = host.limits.stream_window_bytes
        """What the peer may still send; the connection keeps account."""
        self.window_bytes = host.output.stream_window_bytes
        """What we may still send; negative after a change of the peer's settings."""
        self.answered = False
        """Our response headers are out."""
        self.finished = self.ended = self.remote_closed = False
        self.queued_bytes = 0
        self._outbox: deque[Buffer] | None = None
        self._trailers: bytes | None = None
        """Sent when the outbox is empty."""
        self._prefix = b""
        """Part of a gRPC prefix."""
        self._missing_bytes = 0
        """Of the message whose pieces are held; 0 = none is."""
        self._pieces: list[Buffer] | None = None

    # What the stream calls.

    def send(self, messages: Sequence[bytes]) -> None:
        """See `Transport.send`."""
        if self.finished:
            return
        output = self._output
        if not self.answered:
            self.answered = True
            output.headers(self.stream_id, replies.RESPONSE)
        buffers = output.buffers
        size_max = self._host.limits.message_bytes_max
        for message in messages:
            size = len(message)
            framed = size + PREFIX_BYTES
            if (
                size <= size_max
                and framed <= output.window_bytes
                and framed <= self.window_bytes
                and framed <= output.room_bytes - output.bytes
                and not self.queued_bytes
            ):
                output.window_bytes -= framed
                self.window_bytes -= framed
                output.bytes += framed + HEAD_BYTES
                if framed <= output.frame_bytes:
                    buffers.append(_pack_message_head(framed << 8, 0, self.stream_id, 0, size))
                    buffers.append(message)
                else:
                    self._cut(message)
            elif not self._queue(message):
                break
        output.work += len(messages)
        if not output.busy:
            output.notify()

    def finish(self, status: int = 0, message: str = "") -> None:
        """See `Transport.finish`."""
        if self.finished:
            return
        self.finished = True
        self._drop_partial()
        block = replies.trailers if self.answered else replies.trailers_only
        self._trailers = block(status, message)
        if not self.queued_bytes:
            self._send_trailers()
        self._host.on_finished(self)
        self._output.notify()

    # What the connection calls.

    def open(self, stream: Stream) -> None:
        """Messages go to `stream` from now on."""
        self._stream = stream

    def close(self) -> None:
        """Nothing is received or sent any more; tell the stream, the first time only."""
        self.finished = True
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.on_close()
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end other streams
            self._host.on_bug(self, error)

    def abandon(self) -> None:
        """The stream is gone on the wire: nothing held is of use any more."""
        self.ended = True
        self._drop_partial()
        if self.queued_bytes:
            self._output.queued_bytes -= self.queued_bytes
            self.queued_bytes = 0
            self._output.forget(self)
        self._outbox = self._trailers = None

    @property
    def partial(self) -> bool:
        """Part of a message is held."""
        return bool(self._prefix) or self._missing_bytes > 0

    @property
    def sendable(self) -> bool:
        """See `Waiting.sendable`."""
        return self.queued_bytes > 0 and self.window_bytes > 0

    # Messages in.

    def deliver(self, message: bytes) -> None:
        """Hand one whole message to the stream."""
        stream = self._stream
        if stream is None:
            return
        if message:
            self._output.work += 1
        else:
            self._host.on_empty_message()
        try:
            stream.on_message(message)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end other streams
            self._host.on_bug(self, error)

    def feed(self, data: bytes, at: int, stop: int) -> None:
        """Payload of one DATA frame, `data[at:stop]`."""
        if self._prefix:
            at = self._resume_prefix(data, at, stop)
        if self._missing_bytes:
            after = min(at + self._missing_bytes, stop)
            self._hold(data, at, after)
            at = after
        while stop - at >= PREFIX_BYTES and not self.finished:
            compressed, size = _read_prefix(data, at)
            if not self._acceptable(compressed, size):
                return
            at += PREFIX_BYTES
            if stop - at < size:
                self._missing_bytes, self._pieces = size, []
                self._hold(data, at, stop)
                return
            self.deliver(data[at : at + size])
            at += size
        if at < stop and not self.finished:
            self._prefix = data[at:stop]

    def _resume_prefix(self, data: bytes, at: int, stop: int) -> int:
        """Complete the prefix of which a part is held; returns the index behind what that took."""
        after = min(at + PREFIX_BYTES - len(self._prefix), stop)
        self._prefix += data[at:after]
        if len(self._prefix) < PREFIX_BYTES:
            return after
        compressed, size = _read_prefix(self._prefix, 0)
        self._prefix = b""
        if not self._acceptable(compressed, size):
            return stop
        if size:
            self._missing_bytes, self._pieces = size, []
        else:
            self.deliver(b"")
        return after

    def _hold(self, data: bytes, at: int, stop: int) -> None:
        """Keep a piece of the message that is not complete; deliver it when it is."""
        size = stop - at
        pieces = self._pieces
        if pieces is None or not size:
            return
        is_view = size * _VIEW_PART >= len(data)
        pieces.append(memoryview(data)[at:stop] if is_view else data[at:stop])
        self._missing_bytes -= size
        if self._missing_bytes:
            host = self._host
            host.partial_bytes += size
            if host.partial_bytes > host.limits.partial_bytes_max:
                self._refuse_large("too many incomplete messages on this connection")
            return
        message = b"".join(pieces)
        self._host.partial_bytes -= len(message) - size
        self._pieces = None
        self.deliver(message)

    def _acceptable(self, compressed: int, size: int) -> bool:
        """Check a prefix; False when the call has ended for it."""
        if compressed:
            self._host.refuse(
                self,
                Reason.BAD_MESSAGE,
                Status.UNIMPLEMENTED,
                "compressed messages are not supported",
            )
        elif size > self._host.limits.message_bytes_max:
            self._refuse_large(f"message of {size} bytes is too long")
        else:
            return True
        self._host.on_provoked()
        return False

    def _refuse_large(self, message: str) -> None:
        self._host.refuse(self, Reason.MESSAGE_TOO_LARGE, Status.RESOURCE_EXHAUSTED, message)

    def _drop_partial(self) -> None:
        if self._pieces is not None:
            self._host.partial_bytes -= sum(map(len, self._pieces))
            self._pieces = None
        self._missing_bytes = 0
        self._prefix = b""

    # Messages out.

    def _cut(self, message: bytes) -> None:
        """Send a message over several frames; windows and room are accounted for."""
        output = self._output
        append, frame_bytes, stream_id = output.buffers.append, output.frame_bytes, self.stream_id
        view, size = memoryview(message), len(message)
        append(_pack_message_head(frame_bytes << 8, 0, stream_id, 0, size))
        at = frame_bytes - PREFIX_BYTES
        append(view[:at])
        while at < size:
            taken = min(frame_bytes, size - at)
            append(_pack_head(taken << 8, 0, stream_id))
            append(view[at : at + taken])
            at += taken
            output.bytes += HEAD_BYTES
            output.work += 1

    def _queue(self, message: bytes) -> bool:
        """Put a message into the outbox; False when the call has ended for it."""
        host, output = self._host, self._output
        size = len(message)
        if size > host.limits.message_bytes_max:
            self._refuse_large(f"answer of {size} bytes is too long")
            return False
        if self._outbox is None:
            self._outbox = deque()
        self._outbox.append(MESSAGE_PREFIX.pack(0, size))
        if size:
            self._outbox.append(message)
        self.queued_bytes += size + PREFIX_BYTES
        output.queued_bytes += size + PREFIX_BYTES
        if self.window_bytes > 0:
            output.wait(self)
        if (
            self.queued_bytes > host.limits.outbox_bytes_max
            or output.queued_bytes > host.limits.outboxes_bytes_max
        ):
            host.overflow(self)
            return False
        return True

    def pump(self) -> None:
        """See `Waiting.pump`."""
        output = self._output
        for _ in range(TURN_FRAMES):
            size = min(
                self.queued_bytes, output.frame_bytes, output.window_bytes, self.window_bytes
            )
            if size <= 0 or output.bytes >= output.room_bytes:
                break
            self._send_frame(size)
        if not self.queued_bytes and self._trailers is not None:
            self._send_trailers()
        else:
            self._host.refill(self)

    def _send_frame(self, size: int) -> None:
        """Move `size` bytes from the outbox into one DATA frame."""
        output, outbox = self._output, self._outbox
        assert outbox is not None, "bytes are queued, so there is an outbox"
        output.buffers.append(_pack_head(size << 8, 0, self.stream_id))
        output.bytes += size + HEAD_BYTES
        output.window_bytes -= size
        output.queued_bytes -= size
        self.window_bytes -= size
        self.queued_bytes -= size
        if size >= _WORTHY_BYTES:
            output.work += 1
        while size:
            piece = outbox[0]
            if len(piece) <= size:
                output.buffers.append(piece)
                size -= len(piece)
                outbox.popleft()
            else:
                view = memoryview(piece)
                output.buffers.append(view[:size])
                outbox[0] = view[size:]
                break

    def _send_trailers(self) -> None:
        if self._trailers is None or self.ended:
            return
        self._output.headers(self.stream_id, self._trailers, _LAST)
        self._trailers = None
        self.ended = True
        self._host.on_ended(self)
