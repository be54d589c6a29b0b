"""The server's side of one HTTP/2 connection that carries gRPC calls; sans-IO, without a clock.

    bytes ─ receive ─▶ frames ─▶ HPACK, requests ─▶ Call ─▶ Stream.on_message, on_close
    bytes ◀─ take_output ─ Output ◀─ Call.send, finish ◀─ a stream, now or later

Everything is synchronous: frames are handled while `receive` runs, a stream that answers in
`on_message` has put its answer into the same write. What a stream sends later is announced through
`wake`. Nothing raises: what a peer does wrong ends its stream or the connection and goes to
`on_error`, and so do our own bugs.

Life: the client's preface and SETTINGS must come first and acknowledge ours (`settle_s`). Then
frames, until `closed`: because of an error (GOAWAY with its code), a dead peer, `abort`, or, after
`shut_down`, the end of the last stream. A graceful end says GOAWAY twice, as RFC 9113 6.8 asks:
first with the highest id there is, so that streams under way are still served, then, when a ping
has come back or after `goaway_s`, with the last one. Whatever the end, each open stream gets
`on_close` once.

What a peer may cost us: docs/http2.md and `limits`.

Cost, without the stream's own work: see docs/http2.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Final

from epp.core.streams import StreamFactory
from epp.wire.http2 import frames
from epp.wire.http2.faults import ConnectionFault, PeerError, Reason
from epp.wire.http2.frames import ACK, Buffer, ErrorCode, Setting
from epp.wire.http2.framing import FrameReader
from epp.wire.http2.guard import Guard
from epp.wire.http2.hpack import HpackError
from epp.wire.http2.limits import Http2Limits
from epp.wire.http2.output import FRAME_BYTES_MAX, Output
from epp.wire.http2.streams import Streams
from epp.wire.http2.timers import Keepalive

__all__ = ["ConnectionFault", "ErrorCode", "Http2Limits", "Reason", "ServerConnection"]

_WORKLESS_STREAMS: Final = 16
"""A SETTINGS frame costs as much as one small frame per this many open streams."""
_SETTINGS_COST: Final = 4
_KEEPALIVE_PING: Final = b"epp-live"
_DRAIN_PING: Final = b"epp-last"


def _always() -> bool:
    return True


def _ignore(_fault: ConnectionFault) -> None:
    pass


class ServerConnection:
    """One client's connection. On the event loop only; its methods must not be called from a
    stream's `on_message` or `on_close`.

    The caller writes what `take_output` gives after each call of `receive`, `on_time`, `shut_down`,
    `abort` and `wake`, says with `written` what its socket did not take, and keeps one timer at
    `next_deadline_s`.

    Args:
        handlers: method path -> what makes its streams; an unknown path is UNIMPLEMENTED.
        limits: every bound.
        now_s: monotonic time, as in all methods.
        wake: called when there is output though none of the methods is running; at most once until
            `take_output`.
        outlives_half_close: paths whose stream goes on after the client half-closes.
        may_open: asked before each stream; False refuses it with RESOURCE_EXHAUSTED.
        on_error: told everything that is wrong, one call per fault.
    """

    def __init__(
        self,
        *,
        handlers: Mapping[str, StreamFactory],
        limits: Http2Limits,
        now_s: float,
        wake: Callable[[], None],
        outlives_half_close: Container[str] = (),
        may_open: Callable[[], bool] = _always,
        on_error: Callable[[ConnectionFault], None] = _ignore,
    ) -> None:
        self.closed = False
        """Write what `take_output` gives, then close the socket."""
        self._limits = limits
        self._output = output = Output(limits, wake)
        self._guard = guard = Guard(limits=limits, output=output, report=on_error, now_s=now_s)
        self._streams = streams = Streams(
            handlers=handlers,
            outlives_half_close=outlives_half_close,
            may_open=may_open,
            limits=limits,
            output=output,
            guard=guard,
        )
        self._frames = FrameReader(
            limits=limits,
            handlers=(
                streams.on_data,
                self._on_unknown,  # HEADERS
                self._on_priority,
                streams.on_rst_stream,
                self._on_settings,
                self._on_push_promise,
                self._on_ping,
                self._on_goaway,
                self._on_window_update,
                self._on_unknown,  # CONTINUATION
            ),
            on_headers=streams.on_headers,
            on_unknown=self._on_unknown,
        )
        self._keepalive = Keepalive(limits, now_s)
        self._progress = False
        """Output left, while nothing was read, since the last look at the clock."""
        self._settle_by_s: float | None = now_s + limits.settle_s
        self._goaway_by_s: float | None = None
        """When the second GOAWAY of a graceful end goes out at the latest."""
        self._ending = False
        """The first one is out."""
        self._idle_since_s: float | None = now_s
        self._greet()

    @property
    def reading(self) -> bool:
        """False: read nothing from the socket until `written` has made it True again."""
        return self._output.reading

    @property
    def streams_open(self) -> int:
        """Streams that have not ended on the wire."""
        return len(self._streams.calls)

    def receive(self, data: bytes, now_s: float) -> None:
        """Handle what the socket gave. Calls `Stream.on_message` and `on_close`. Never raises."""
        if self.closed:
            return
        self._begin(now_s)
        self._keepalive.heard(now_s)
        try:
            self._frames.feed(data)
        except PeerError as error:
            self._fail(error)
        except HpackError as error:
            self._fail(PeerError(ErrorCode.COMPRESSION_ERROR, Reason.COMPRESSION, str(error)))
        except Exception as error:  # noqa: BLE001 - other connections go on
            self._fail(PeerError(ErrorCode.INTERNAL_ERROR, Reason.BUG), error)
        self._finish()

    def take_output(self) -> list[Buffer]:
        """What to write now, in order; call `written` after that."""
        self._output.busy = True
        self._finish()
        return self._output.take()

    def written(self, unsent_bytes: int) -> None:
        """What the socket's buffer still holds, of all that was taken. Call it after each write and
        whenever the buffer has drained; answers that waited for it come through `wake`."""
        if self.closed:
            return
        output = self._output
        if not output.reading and unsent_bytes < output.unsent_bytes:
            self._progress = True
        output.busy = True
        output.written(unsent_bytes)
        self._finish()
        if output.buffers:
            output.notify()

    def lost(self) -> None:
        """The socket is gone: every open stream is closed."""
        self._end()
        self._output.discard()

    def shut_down(self, now_s: float) -> None:
        """End gracefully: open streams go on, and those under way for a round trip more; later ones
        are refused. `closed` when the last one has ended."""
        if self.closed or self._ending:
            return
        self._begin(now_s)
        self._start_ending()
        self._finish()

    def abort(self, code: ErrorCode) -> None:
        """End now: GOAWAY with this code, every open stream is closed."""
        if self.closed:
            return
        self._output.control(frames.goaway(self._streams.last_id, code))
        self._end()

    def next_deadline_s(self) -> float | None:
        """When to call `on_time` at the latest; None when closed. May be early."""
        if self.closed:
            return None
        deadline_s = self._keepalive.deadline_s()
        others = (
            self._settle_by_s,
            self._goaway_by_s,
            self._idle_by_s(),
            self._streams.deadlines.next_s(),
        )
        for other_s in others:
            if other_s is not None and other_s < deadline_s:
                deadline_s = other_s
        return deadline_s

    def on_time(self, now_s: float) -> None:
        """Do what is due. Never raises."""
        if self.closed:
            return
        self._begin(now_s)
        self._streams.expire(now_s)
        if self._goaway_by_s is not None and now_s >= self._goaway_by_s:
            self._stop_accepting()
        idle_by_s = self._idle_by_s()
        if idle_by_s is not None and now_s >= idle_by_s:
            self._start_ending()
        if self._progress:
            self._progress = False
            self._keepalive.heard(now_s)
        if self._keepalive.due(now_s):
            self._output.control(frames.ping(_KEEPALIVE_PING))
        if self._settle_by_s is not None and now_s >= self._settle_by_s:
            self._fail(PeerError(ErrorCode.SETTINGS_TIMEOUT, Reason.SETTLE_TIMEOUT))
        elif self._keepalive.dead(now_s):
            self._fail(PeerError(ErrorCode.NO_ERROR, Reason.KEEPALIVE_TIMEOUT))
        self._finish()

    # Frames of the connection.

    def _on_settings(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        size = stop - start
        _require(not stream_id, "SETTINGS on a stream")
        _require_size(size % 6 == 0 and not (flags & ACK and size), "SETTINGS size")
        if flags & ACK:
            self._settle_by_s = None
            self._streams.announced = True
            self._guard.spend(Reason.SETTINGS_FLOOD)
            return
        cost = _SETTINGS_COST + size // 6 + len(self._streams.calls) // _WORKLESS_STREAMS
        self._guard.spend(Reason.SETTINGS_FLOOD, cost)
        values = frames.read_settings(data[start:stop])
        for setting, value in values:
            self._check(setting, value)
        self._apply(dict(values))  # the last of a repeated one wins

    def _check(self, setting: int, value: int) -> None:
        """Each value of a frame, also one that a later one replaces: of the sizes of the table the
        smallest is to be acknowledged (RFC 7541 4.2)."""
        if setting == Setting.ENABLE_PUSH:
            _require(value <= 1, "ENABLE_PUSH is neither 0 nor 1")
        elif setting == Setting.MAX_FRAME_SIZE:
            _require(
                frames.FRAME_BYTES_DEFAULT <= value <= frames.FRAME_BYTES_CEILING,
                "MAX_FRAME_SIZE is out of range",
            )
        elif setting == Setting.HEADER_TABLE_SIZE:
            if value < self._output.table_bytes:
                self._output.shrink_table()
        elif setting == Setting.INITIAL_WINDOW_SIZE and value > frames.WINDOW_MAX:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)

    def _apply(self, values: Mapping[int, int]) -> None:
        """Acknowledge, then act: what a larger window lets out comes behind the ACK."""
        output = self._output
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, output.frame_bytes)
        output.frame_bytes = min(frame_bytes, FRAME_BYTES_MAX)
        window_bytes = values.get(Setting.INITIAL_WINDOW_SIZE, output.stream_window_bytes)
        output.control(frames.SETTINGS_ACK)
        delta_bytes = window_bytes - output.stream_window_bytes
        if delta_bytes:
            output.stream_window_bytes = window_bytes
            self._streams.move_windows(delta_bytes)

    def _on_ping(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        _require(not stream_id, "PING on a stream")
        _require_size(stop - start == 8, "PING size")
        self._guard.spend(Reason.PING_FLOOD)
        opaque = data[start:stop]
        if not flags & ACK:
            self._output.control(frames.ping(opaque, ack=True))
        elif opaque == _DRAIN_PING and self._goaway_by_s is not None:
            self._stop_accepting()

    def _on_window_update(
        self, data: bytes, start: int, stop: int, flags: int, stream_id: int
    ) -> None:
        del flags
        _require_size(stop - start == 4, "WINDOW_UPDATE size")
        self._guard.spend(Reason.WINDOW_UPDATE_FLOOD)
        increment = int.from_bytes(data[start:stop], "big") & frames.WINDOW_MAX
        if stream_id:
            self._streams.on_window_update(increment, stream_id)
            return
        _require(increment > 0, "WINDOW_UPDATE of 0")
        output = self._output
        output.window_bytes += increment
        if output.window_bytes > frames.WINDOW_MAX:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, Reason.FLOW_CONTROL)
        output.pump()

    def _on_priority(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        del data, flags
        _require(stream_id > 0, "PRIORITY on stream 0")
        _require_size(stop - start == 5, "PRIORITY size")
        self._guard.spend(Reason.FRAME_FLOOD)

    def _on_goaway(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        """The client opens no more streams. What is open goes on; it closes the connection."""
        del data, flags
        _require(not stream_id, "GOAWAY on a stream")
        _require_size(stop - start >= 8, "GOAWAY size")
        self._guard.spend(Reason.FRAME_FLOOD)

    def _on_push_promise(
        self, data: bytes, start: int, stop: int, flags: int, stream_id: int
    ) -> None:
        del data, start, stop, flags, stream_id
        _require(False, "PUSH_PROMISE from a client")

    def _on_unknown(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        del data, start, stop, flags, stream_id
        self._guard.spend(Reason.FRAME_FLOOD)

    # Life.

    def _greet(self) -> None:
        limits = self._limits
        self._output.control(
            frames.settings(
                (
                    (Setting.MAX_CONCURRENT_STREAMS, limits.streams_max),
                    (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
                    (Setting.MAX_FRAME_SIZE, limits.frame_bytes_max),
                    (Setting.MAX_HEADER_LIST_SIZE, limits.header_list_bytes_max),
                )
            )
        )
        more_bytes = limits.connection_window_bytes - frames.WINDOW_DEFAULT
        if more_bytes:
            self._output.control(frames.window_update(0, more_bytes))

    def _begin(self, now_s: float) -> None:
        self._guard.now_s = now_s
        self._output.busy = True

    def _finish(self) -> None:
        """The end of each method that may have changed anything."""
        output, streams = self._output, self._streams
        streams.settle()
        if self.closed:
            output.busy = False
            return
        streams.refill_connection()
        if not output.settle():
            output.discard()
            self._fail(PeerError(ErrorCode.ENHANCE_YOUR_CALM, Reason.UNREAD_OUTPUT))
        elif streams.calls:
            self._idle_since_s = None
        elif streams.refusing:
            self._end()
        elif self._idle_since_s is None:
            self._idle_since_s = self._guard.now_s
        output.busy = False

    def _idle_by_s(self) -> float | None:
        idle_s = self._limits.idle_s
        if idle_s is None or self._idle_since_s is None or self._ending:
            return None
        return self._idle_since_s + idle_s

    def _start_ending(self) -> None:
        self._ending = True
        self._goaway_by_s = self._guard.now_s + self._limits.goaway_s
        self._output.control(frames.goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
        self._output.control(frames.ping(_DRAIN_PING))

    def _stop_accepting(self) -> None:
        """The second GOAWAY; `_finish` ends the connection when no stream is left."""
        self._goaway_by_s = None
        self._streams.refusing = True
        self._output.control(frames.goaway(self._streams.last_id, ErrorCode.NO_ERROR))

    def _fail(self, error: PeerError, cause: Exception | None = None) -> None:
        """The peer has gone too far, or is gone."""
        self._guard.report(ConnectionFault(error.code, error.reason, 0, error.detail, cause))
        self._output.control(frames.goaway(self._streams.last_id, error.code, error.reason))
        self._end()

    def _end(self) -> None:
        self.closed = True
        busy, self._output.busy = self._output.busy, True
        self._streams.close_all()
        self._output.busy = busy


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, detail)


def _require_size(condition: bool, detail: str) -> None:
    if not condition:
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, Reason.BAD_FRAME, detail)
