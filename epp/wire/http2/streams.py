"""The streams of one connection: requests open calls, frames reach them, and each ends once.

What RFC 9113 says of a frame depends on the state of its stream. Kept are the open calls, the
highest id seen, and who ended the streams that ended lately; that is enough to tell

    open                      the frame is for the call
    half-closed (remote)      DATA and HEADERS are a stream error
    ended by us               ignored, the peer did not know yet
    ended otherwise, skipped  DATA is a stream error, HEADERS end the connection
    idle (above the highest)  all but HEADERS end the connection

Flow control inwards: the peer gets room back when half of it is used, a stream only while its own
outbox is not too full, the connection while all of them are not. So a peer that does not take
answers cannot go on asking, and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Final

from epp.core.streams import StreamFactory
from epp.wire.http2 import frames, replies
from epp.wire.http2.calls import Call
from epp.wire.http2.faults import ConnectionFault, PeerError, Reason
from epp.wire.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    WINDOW_MAX,
    ErrorCode,
)
from epp.wire.http2.framing import unpad
from epp.wire.http2.guard import Guard
from epp.wire.http2.hpack import Decoder
from epp.wire.http2.limits import Http2Limits
from epp.wire.http2.output import Output
from epp.wire.http2.replies import Status
from epp.wire.http2.requests import Head, RequestReader
from epp.wire.http2.timers import Deadlines

_LAST: Final = END_HEADERS | END_STREAM
_TINY_BYTES: Final = 64
"""A DATA frame below this that completes no message is overhead."""
_ENDED_KEPT: Final = 1_024


class Streams:
    """See the module. Methods named `on_<frame>` handle a frame; they raise PeerError where the
    connection must end."""

    def __init__(
        self,
        *,
        handlers: Mapping[str, StreamFactory],
        outlives_half_close: Container[str],
        may_open: Callable[[], bool],
        limits: Http2Limits,
        output: Output,
        guard: Guard,
    ) -> None:
        self.limits = limits
        self.output = output
        self.partial_bytes = 0
        self.calls: dict[int, Call] = {}
        self.last_id = 0
        """The highest stream id seen."""
        self.refusing = False
        """The connection is ending: no new stream is served."""
        self.announced = False
        """The peer has acknowledged our SETTINGS, so it knows `streams_max`."""
        self.deadlines = Deadlines()
        self._guard = guard
        self._may_open = may_open
        decoder = Decoder(
            table_bytes_max=frames.HEADER_TABLE_DEFAULT,
            list_bytes_max=limits.header_list_bytes_max,
        )
        self._requests = RequestReader(
            handlers=handlers, outlives_half_close=outlives_half_close, decoder=decoder
        )
        self._ended = RecentlyEnded(_ENDED_KEPT)
        self._closing: list[Call] = []
        """Finished, and their streams not told yet."""
        self._credit_bytes = limits.connection_window_bytes
        self._credit_bytes_low = limits.connection_window_bytes // 2
        self._stream_credit_bytes_low = limits.stream_window_bytes // 2

    # Frames.

    def on_headers(self, block: bytes, flags: int, stream_id: int) -> None:
        """A request, or the trailers of one."""
        if not stream_id & 1:
            raise PeerError(
                ErrorCode.PROTOCOL_ERROR, Reason.STREAM_ID, "HEADERS on an even stream id"
            )
        if stream_id <= self.last_id:
            self._on_trailers(block, flags, stream_id)
            return
        self.last_id = stream_id
        head = self._requests.read(block)
        if head.factory is None:
            self._refuse_head(head, flags, stream_id)
        elif self.refusing or len(self.calls) >= self.limits.streams_max:
            self._refuse_stream(stream_id)
        elif not self._may_open():
            answer = replies.trailers_only(
                Status.RESOURCE_EXHAUSTED, "too many streams are open already"
            )
            self._answer(answer, flags, stream_id)
            self._report(ErrorCode.NO_ERROR, Reason.REFUSED_STREAM, stream_id, "server full")
        else:
            self._open(head, head.factory, flags, stream_id)

    def _open(self, head: Head, factory: StreamFactory, flags: int, stream_id: int) -> None:
        now_s = self._guard.now_s
        call = self.calls[stream_id] = Call(self, stream_id, head, now_s)
        if head.timeout_s is not None:
            self.deadlines.add(stream_id, now_s + head.timeout_s)
        try:
            call.open(factory(call))
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end other streams
            self.on_bug(call, error)
        if flags & END_STREAM:
            self._half_close(call)

    def _on_trailers(self, block: bytes, flags: int, stream_id: int) -> None:
        call = self.calls.get(stream_id)
        by_us = None if call is not None else self._ended.by_us(stream_id)
        if call is None and not by_us:
            # Only now is it known that the block does not matter: the connection ends.
            code = ErrorCode.PROTOCOL_ERROR if by_us is None else ErrorCode.STREAM_CLOSED
            raise PeerError(code, Reason.STREAM_ID, "HEADERS on a stream that has ended")
        wrong = self._requests.read_trailers(block)
        if call is None:
            self._guard.spend(Reason.FRAME_FLOOD)
        elif call.remote_closed:
            self._reset(stream_id, ErrorCode.STREAM_CLOSED, Reason.STREAM_CLOSED)
        elif wrong or not flags & END_STREAM:
            detail = wrong or "trailers that do not end their stream"
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR, Reason.MALFORMED_REQUEST, detail)
        else:
            self._half_close(call)

    def on_data(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        """A piece of a gRPC message, or several."""
        size = stop - start
        self._credit_bytes -= size
        if self._credit_bytes < self._credit_bytes_low:
            self._refill_connection()
        call = self.calls.get(stream_id)
        if call is None or call.remote_closed:
            self._on_stray_data(size, stream_id)
            return
        call.credit_bytes -= size
        if call.credit_bytes < 0:
            self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)
            return
        if flags & PADDED:
            start, stop = unpad(data, start, stop)
        if call.content_bytes_left is not None:
            call.content_bytes_left -= stop - start
        if not call.finished:
            work = self.output.work
            call.feed(data, start, stop)
            if size < _TINY_BYTES and self.output.work == work and not flags & END_STREAM:
                self._guard.spend(Reason.DATA_FLOOD)
        if flags & END_STREAM:
            self._half_close(call)
        elif call.credit_bytes < self._stream_credit_bytes_low:
            self.refill(call)

    def _on_stray_data(self, size: int, stream_id: int) -> None:
        """DATA on a stream that takes none."""
        self._check_not_idle(stream_id)
        if stream_id not in self.calls and self._ended.by_us(stream_id):
            if size < _TINY_BYTES:
                self._guard.spend(Reason.DATA_FLOOD)
            return
        self._reset(stream_id, ErrorCode.STREAM_CLOSED, Reason.STREAM_CLOSED)

    def on_rst_stream(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        """The peer ends a stream, in whatever mood: Envoy ends all of them so."""
        del data, flags
        if stop - start != 4:
            raise PeerError(ErrorCode.FRAME_SIZE_ERROR, Reason.BAD_FRAME, "RST_STREAM size")
        call = self.calls.get(stream_id)
        if call is None:
            self._check_not_idle(stream_id)
            self._guard.spend(Reason.FRAME_FLOOD)
            return
        self._remove(call, by_us=False)
        call.close()
        guard = self._guard
        if not call.answered and guard.now_s - call.opened_s < self.limits.reset_age_s:
            guard.spend_reset()

    def on_window_update(self, increment: int, stream_id: int) -> None:
        """The peer takes more on one stream."""
        call = self.calls.get(stream_id)
        if call is None:
            self._check_not_idle(stream_id)
            return
        if not increment:
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, "WINDOW_UPDATE of 0")
            return
        call.window_bytes += increment
        if call.window_bytes > WINDOW_MAX:
            self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)
        elif call.sendable:
            self.output.wait(call)

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self.last_id or not stream_id & 1:
            raise PeerError(
                ErrorCode.PROTOCOL_ERROR, Reason.STREAM_ID, "a frame on a stream never opened"
            )

    # What the connection calls.

    def move_windows(self, delta_bytes: int) -> None:
        """The peer changed the window of all streams. Raises: PeerError when one overflows."""
        for call in self.calls.values():
            call.window_bytes += delta_bytes
            if call.window_bytes > WINDOW_MAX:
                raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)
        if delta_bytes > 0:
            for call in tuple(self.calls.values()):
                if call.sendable:
                    self.output.wait(call)

    def refill_connection(self) -> None:
        """After output left: give room that was held back."""
        if self._credit_bytes < self._credit_bytes_low:
            self._refill_connection()

    def expire(self, now_s: float) -> None:
        """End the calls whose `grpc-timeout` is over."""
        for stream_id in self.deadlines.pop_due(now_s):
            call = self.calls.get(stream_id)
            if call is None or call.finished:
                continue
            if call.queued_bytes:
                # Part of a message may be out, behind which no status can come.
                self._end(call, ErrorCode.CANCEL)
            else:
                call.finish(Status.DEADLINE_EXCEEDED, "deadline exceeded")

    def settle(self) -> None:
        """Tell the streams that have finished."""
        while self._closing:
            closing, self._closing = self._closing, []
            for call in closing:
                call.close()

    def close_all(self) -> None:
        """The connection is over. Nothing that a stream does in `on_close` reaches another."""
        calls = tuple(self.calls.values())
        self.calls.clear()
        for call in calls:
            call.abandon()
            call.finished = True
        for call in calls:
            call.close()
        self.settle()

    # What a call calls.

    def on_finished(self, call: Call) -> None:
        """See `calls.Host`."""
        self._closing.append(call)

    def on_ended(self, call: Call) -> None:
        """See `calls.Host`. A peer that has not ended its side need not send the rest."""
        if not call.remote_closed:
            self.output.control(frames.rst_stream(call.stream_id, ErrorCode.NO_ERROR))
        self._remove(call, by_us=not call.remote_closed)

    def refuse(self, call: Call, reason: Reason, status: int, message: str) -> None:
        """See `calls.Host`."""
        call.finish(status, message)
        self._report(ErrorCode.NO_ERROR, reason, call.stream_id, message)

    def overflow(self, call: Call) -> None:
        """See `calls.Host`."""
        self._end(call, ErrorCode.ENHANCE_YOUR_CALM)
        self._report(ErrorCode.ENHANCE_YOUR_CALM, Reason.OUTBOX_FULL, call.stream_id)

    def on_bug(self, call: Call, error: Exception) -> None:
        """See `calls.Host`."""
        call.finish(Status.INTERNAL, "internal error")
        self._report(ErrorCode.NO_ERROR, Reason.BUG, call.stream_id, error=error)

    def on_empty_message(self) -> None:
        """See `calls.Host`."""
        self._guard.spend(Reason.DATA_FLOOD)

    def on_provoked(self) -> None:
        """See `calls.Host`."""
        self._guard.spend_provoked()

    def refill(self, call: Call) -> None:
        """See `calls.Host`."""
        limits = self.limits
        if (
            call.credit_bytes < self._stream_credit_bytes_low
            and not call.finished
            and call.queued_bytes <= limits.outbox_bytes_high
        ):
            increment = limits.stream_window_bytes - call.credit_bytes
            call.credit_bytes = limits.stream_window_bytes
            self.output.control(frames.window_update(call.stream_id, increment))

    # Ends.

    def _half_close(self, call: Call) -> None:
        """The peer sends nothing more on this stream."""
        call.remote_closed = True
        if call.content_bytes_left:
            self._reset(
                call.stream_id,
                ErrorCode.PROTOCOL_ERROR,
                Reason.MALFORMED_REQUEST,
                "content-length is not the length of the content",
            )
        elif call.partial:
            self.refuse(call, Reason.BAD_MESSAGE, Status.INTERNAL, "the last message is cut off")
            call.close()
        elif not call.outlives_half_close:
            call.finish()
            call.close()

    def _reset(self, stream_id: int, code: ErrorCode, reason: Reason, detail: str = "") -> None:
        """A stream error of the peer's making."""
        self.output.control(frames.rst_stream(stream_id, code))
        self._report(code, reason, stream_id, detail)
        call = self.calls.get(stream_id)
        if call is None:
            self._ended.add(stream_id, by_us=True)
        else:
            self._remove(call, by_us=True)
            call.close()
        self._guard.spend_provoked()

    def _end(self, call: Call, code: ErrorCode) -> None:
        """Reset a call for a reason of ours; its stream is told later."""
        self.output.control(frames.rst_stream(call.stream_id, code))
        self._remove(call, by_us=True)
        call.finished = True
        self._closing.append(call)
        self.output.notify()

    def _remove(self, call: Call, *, by_us: bool) -> None:
        call.abandon()
        if call.answered:
            self._guard.answered += 1
        del self.calls[call.stream_id]
        self._ended.add(call.stream_id, by_us=by_us)
        if self.deadlines:
            self.deadlines.discard(call.stream_id)

    def _refuse_head(self, head: Head, flags: int, stream_id: int) -> None:
        if not head.answer:
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR, head.reason, head.detail)
            return
        self._answer(head.answer, flags, stream_id)
        self._report(ErrorCode.NO_ERROR, head.reason, stream_id, head.detail)

    def _refuse_stream(self, stream_id: int) -> None:
        """One stream too many, or too late; the peer may try it elsewhere."""
        if self.announced and not self.refusing:
            self._reset(stream_id, ErrorCode.REFUSED_STREAM, Reason.REFUSED_STREAM)
            return
        self.output.control(frames.rst_stream(stream_id, ErrorCode.REFUSED_STREAM))
        self._report(ErrorCode.REFUSED_STREAM, Reason.REFUSED_STREAM, stream_id)
        self._ended.add(stream_id, by_us=True)
        self._guard.spend(Reason.FRAME_FLOOD)

    def _answer(self, block: bytes, flags: int, stream_id: int) -> None:
        """A header block that is all of the answer to a request that opened no call."""
        self.output.headers(stream_id, block, _LAST)
        ended = flags & END_STREAM
        if not ended:
            self.output.control(frames.rst_stream(stream_id, ErrorCode.NO_ERROR))
        self._ended.add(stream_id, by_us=not ended)

    def _report(
        self,
        code: ErrorCode,
        reason: Reason,
        stream_id: int,
        detail: str = "",
        error: Exception | None = None,
    ) -> None:
        self._guard.report(ConnectionFault(code, reason, stream_id, detail, error))

    def _refill_connection(self) -> None:
        if self._credit_bytes < 0:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)
        if self.output.queued_bytes <= self.limits.outboxes_bytes_high:
            window = self.limits.connection_window_bytes
            self.output.control(frames.window_update(0, window - self._credit_bytes))
            self._credit_bytes = window


class RecentlyEnded:
    """Which streams ended lately, and by whom; the oldest are forgotten.

    A peer may still send on a stream that we reset, because it did not know; after it ended a
    stream itself it may not.
    """

    __slots__ = ("_by_us", "_by_us_before", "_kept")

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._by_us: dict[int, bool] = {}
        self._by_us_before: dict[int, bool] = {}

    def add(self, stream_id: int, *, by_us: bool) -> None:
        """Remember one of `kept` to `2 * kept` streams."""
        self._by_us[stream_id] = by_us
        if len(self._by_us) >= self._kept:
            self._by_us_before, self._by_us = self._by_us, {}

    def by_us(self, stream_id: int) -> bool | None:
        """Whether we ended it; None = not known any more, or never opened."""
        found = self._by_us.get(stream_id)
        return self._by_us_before.get(stream_id) if found is None else found
