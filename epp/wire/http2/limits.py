"""Every bound of a connection, and the budget that bounds useless frames.

Buffers. Each kind of memory has one owner and one bound: a header block, messages that are not
complete yet (per message and per connection), answers that the peer's flow control holds back
(outbox, per call and over all calls), and output that its socket does not take. Where a bound is
called `high` the connection stops giving the peer room and goes on when half is gone; where it is
called `max` something ends.

Rates. A frame that does no work costs one unit of a budget, which time and work pay back
(`Budget`). Work is a message received or a frame of an answer sent. So a busy peer may update its
windows as often as it likes, and an idle one can still not make us spin.

Resets. Envoy ends every stream with a reset, so a reset is no sign of an attack by itself. It is
counted when it is wasteful: nothing was answered yet and the stream is younger than
`reset_age_s`. A stream that lives that long holds one of `streams_max` places, which bounds the
rate by itself. Streams that were answered pay back.
"""

from __future__ import annotations

from epp.core.structs import Frozen
from epp.wire.http2.frames import FRAME_BYTES_CEILING, FRAME_BYTES_DEFAULT, WINDOW_MAX


class Http2Limits(Frozen, frozen=True, kw_only=True):
    """What one connection may hold and do. The defaults fit a gateway with 10 000 streams."""

    streams_max: int = 10_000
    """Open streams; announced. One more is refused with REFUSED_STREAM."""
    message_bytes_max: int = 128 << 20
    """Longest gRPC message, either way; its stream ends with RESOURCE_EXHAUSTED."""
    partial_bytes_max: int = 256 << 20
    """Bytes of messages that are not complete, over all streams; the stream that passes it ends
    with RESOURCE_EXHAUSTED."""

    frame_bytes_max: int = FRAME_BYTES_DEFAULT
    """Longest payload of a frame we take; announced."""
    header_list_bytes_max: int = 16_384
    """Decoded size of one header list, 32 bytes per field added (RFC 9113 6.5.2); announced. A
    larger request is answered RESOURCE_EXHAUSTED."""
    header_block_bytes_max: int = 32_768
    """Encoded size of one header list over all its frames; beyond, the connection ends."""
    continuations_max: int = 16
    """CONTINUATION frames of one header list; beyond, the connection ends."""

    stream_window_bytes: int = 1 << 20
    """What a peer may send on one stream before we give more; given when half is used."""
    connection_window_bytes: int = 16 << 20
    """The same for all streams together."""
    outbox_bytes_high: int = 8 << 20
    """Answers of one call held back by the peer's windows, beyond which its stream gets no room."""
    outbox_bytes_max: int = 256 << 20
    """The same, beyond which the stream is reset with ENHANCE_YOUR_CALM."""
    outboxes_bytes_high: int = 64 << 20
    """Over all calls, beyond which the connection gets no room."""
    outboxes_bytes_max: int = 512 << 20
    """Over all calls, beyond which a stream that sends is reset with ENHANCE_YOUR_CALM."""
    output_bytes_high: int = 4 << 20
    """Output the socket did not take, beyond which nothing is read and answers stay in their
    outboxes."""
    output_bytes_max: int = 16 << 20
    """The same, beyond which the connection ends."""

    keepalive_s: float = 60.0
    """A connection this long without a byte is pinged."""
    keepalive_timeout_s: float = 20.0
    """A ping without any answer for this long ends the connection and all its streams."""
    settle_s: float = 10.0
    """Time for the client's preface, its SETTINGS, and its ACK of ours."""
    idle_s: float | None = 3_600.0
    """A connection this long without a stream is shut down gracefully; None = never."""
    goaway_s: float = 1.0
    """After the first GOAWAY of a graceful end, the longest wait for streams under way."""

    overhead_burst: int = 8_192
    """Frames without work that a peer may send at once."""
    overhead_per_s: float = 1_024.0
    """How many of these are forgiven per second."""
    overhead_per_work: int = 4
    """How many of these are forgiven per message in or frame of an answer out."""
    wasted_resets_burst: int = 4_096
    """Streams reset young and unanswered at once."""
    wasted_resets_per_s: float = 512.0
    reset_age_s: float = 1.0
    """A stream at least this old may be reset unanswered for nothing: its client lost patience."""
    provoked_resets_burst: int = 128
    """Stream errors of a peer at once."""
    provoked_resets_per_s: float = 8.0

    def __post_init__(self) -> None:
        assert FRAME_BYTES_DEFAULT <= self.frame_bytes_max <= FRAME_BYTES_CEILING
        assert 1 <= self.stream_window_bytes <= WINDOW_MAX
        assert 65_535 <= self.connection_window_bytes <= WINDOW_MAX
        assert self.output_bytes_high < self.output_bytes_max


class Budget:
    """How much of something unwanted is tolerated: `burst` at once and `per_s` in the long run.

    Time and work are credited only when the burst is used up, so that spending costs an addition; a
    peer may thereby get twice the burst once.
    """

    __slots__ = ("_burst", "_per_s", "_settled_s", "_spent")

    def __init__(self, *, burst: int, per_s: float, now_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._spent = 0.0
        self._settled_s = now_s

    def spend(self, cost: float, now_s: float) -> bool:
        """Spend; False when there is nothing left."""
        self._spent += cost
        if self._spent <= self._burst:
            return True
        self._earn((now_s - self._settled_s) * self._per_s)
        self._settled_s = now_s
        return self._spent <= self._burst

    def redeem(self, credit: float) -> float:
        """Pay with what was earned by work. Returns what is left of it, at most one burst, so that
        a long life of work does not buy a long flood."""
        return min(credit - self._earn(credit), self._burst)

    @property
    def left(self) -> bool:
        """There is something left to spend."""
        return self._spent <= self._burst

    def _earn(self, amount: float) -> float:
        """Give back, at most what was spent; returns how much that was."""
        used = min(amount, self._spent)
        self._spent -= used
        return used
