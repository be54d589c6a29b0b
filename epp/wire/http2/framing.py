"""Bytes to frames: the preface, frames cut anywhere, sizes, and header blocks over several frames.

A frame that lies whole in the bytes received is handled in place, by index, without a copy; only
one that is cut is put together, and only that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from epp.wire.http2.faults import PeerError, Reason
from epp.wire.http2.frames import (
    ACK,
    END_HEADERS,
    FRAME_HEAD,
    HEAD_BYTES,
    PADDED,
    PREFACE,
    PRIORITY,
    STREAM_ID_MAX,
    ErrorCode,
    Kind,
)
from epp.wire.http2.limits import Http2Limits

OnFrame = Callable[[bytes, int, int, int, int], None]
"""`(data, start, stop, flags, stream_id)`: the payload is `data[start:stop]`."""
OnHeaders = Callable[[bytes, int, int], None]
"""`(block, flags, stream_id)`: a whole header block and the flags of its HEADERS frame."""

_read_head: Final = FRAME_HEAD.unpack_from
_PRIORITY_BYTES: Final = 5
_KINDS: Final = len(Kind)


def unpad(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """The payload without its padding. Raises: PeerError when it is all padding and more."""
    if start == stop or data[start] >= stop - start:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, "padding longer than its frame")
    return start + 1, stop - data[start]


class FrameReader:
    """Cuts what arrives into frames and calls a handler for each.

    Args:
        handlers: by frame type 0..9 (HEADERS and CONTINUATION are not used).
        on_headers: for header blocks.
        on_unknown: for any other frame type.

    The handlers raise PeerError to end the connection; after that nothing may be fed.
    """

    __slots__ = (
        "_block",
        "_block_flags",
        "_block_stream_id",
        "_continuations",
        "_cut",
        "_frame_bytes_max",
        "_handlers",
        "_limits",
        "_on_headers",
        "_ordered",
        "_preface_left",
        "settings_seen",
    )

    def __init__(
        self,
        *,
        limits: Http2Limits,
        handlers: tuple[OnFrame, ...],
        on_headers: OnHeaders,
        on_unknown: OnFrame,
    ) -> None:
        self._limits = limits
        self._frame_bytes_max = limits.frame_bytes_max
        self._on_headers = on_headers
        own: dict[int, OnFrame] = {
            Kind.HEADERS: self._headers,
            Kind.CONTINUATION: self._continuation,
        }
        self._handlers = tuple(
            own.get(kind, handlers[kind] if kind < _KINDS else on_unknown) for kind in range(256)
        )
        self._preface_left = PREFACE
        self._cut = bytearray()
        """The beginning of a frame."""
        self._ordered = True
        """Not every frame may come next: SETTINGS must, or CONTINUATION."""
        self.settings_seen = False
        self._block: list[bytes] | None = None
        self._block_flags = self._block_stream_id = self._continuations = 0

    def feed(self, data: bytes) -> None:
        """Handle what arrived. Raises: PeerError, and whatever handlers raise."""
        at = self._take_preface(data) if self._preface_left else 0
        if self._cut:
            at = self._take_cut(data, at)
        at = self._take_whole(data, at)
        if at < len(data):
            self._cut += data[at:]

    def _take_preface(self, data: bytes) -> int:
        left = self._preface_left
        taken = min(len(left), len(data))
        if data[:taken] != left[:taken]:
            raise PeerError(
                ErrorCode.PROTOCOL_ERROR, Reason.BAD_PREFACE, "not HTTP/2 with prior knowledge"
            )
        self._preface_left = left[taken:]
        return taken

    def _take_cut(self, data: bytes, at: int) -> int:
        """Complete the frame of which the beginning is held; returns the index behind it."""
        cut = self._cut
        for _ in ("head", "payload"):
            needed = self._frame_bytes(cut) if len(cut) >= HEAD_BYTES else HEAD_BYTES
            after = min(at + needed - len(cut), len(data))
            cut += data[at:after]
            at = after
            if len(cut) < needed:
                return at
        whole = bytes(cut)
        cut.clear()
        self._take_whole(whole, 0)
        return at

    def _frame_bytes(self, head: bytearray) -> int:
        size = int.from_bytes(head[:3], "big")
        if size > self._frame_bytes_max:
            self._refuse_size(size)
        return HEAD_BYTES + size

    def _take_whole(self, data: bytes, at: int) -> int:
        """Handle all whole frames of `data[at:]`; returns the index behind the last."""
        end = len(data)
        handlers, size_max = self._handlers, self._frame_bytes_max
        while end - at >= HEAD_BYTES:
            size, flags, stream_id = _read_head(data, at)
            kind = size & 0xFF
            size >>= 8
            if size > size_max:
                self._refuse_size(size)
            start = at + HEAD_BYTES
            stop = start + size
            if stop > end:
                break
            at = stop
            if self._ordered:
                self._check_order(kind, flags, stream_id & STREAM_ID_MAX)
            handlers[kind](data, start, stop, flags, stream_id & STREAM_ID_MAX)
        return at

    def _refuse_size(self, size: int) -> None:
        raise PeerError(
            ErrorCode.FRAME_SIZE_ERROR,
            Reason.FRAME_SIZE,
            f"a frame of {size} bytes; {self._frame_bytes_max} were announced",
        )

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if not self.settings_seen:
            if kind != Kind.SETTINGS or flags & ACK:
                raise PeerError(
                    ErrorCode.PROTOCOL_ERROR, Reason.BAD_PREFACE, "the first frame is not SETTINGS"
                )
            self.settings_seen = True
            self._ordered = False
        elif kind != Kind.CONTINUATION or stream_id != self._block_stream_id:
            raise PeerError(
                ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, "a frame inside a header block"
            )

    def _headers(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        if flags & (PADDED | PRIORITY):
            if flags & PADDED:
                start, stop = unpad(data, start, stop)
            if flags & PRIORITY:
                start += _PRIORITY_BYTES
            if start > stop:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, "HEADERS too short")
        if flags & END_HEADERS:
            self._on_headers(data[start:stop], flags, stream_id)
            return
        self._block = [data[start:stop]]
        self._block_flags, self._block_stream_id = flags, stream_id
        self._continuations = 0
        self._ordered = True

    def _continuation(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        block = self._block
        if block is None:
            raise PeerError(
                ErrorCode.PROTOCOL_ERROR, Reason.BAD_FRAME, "CONTINUATION without HEADERS"
            )
        block.append(data[start:stop])
        self._continuations += 1
        if (
            self._continuations > self._limits.continuations_max
            or sum(map(len, block)) > self._limits.header_block_bytes_max
        ):
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, Reason.HEADER_FLOOD)
        if flags & END_HEADERS:
            self._block = None
            self._ordered = False
            self._on_headers(b"".join(block), self._block_flags, stream_id)
