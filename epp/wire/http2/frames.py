"""HTTP/2 frames as bytes: numbers of RFC 9113 section 6 and 7, and the few frames we write.

A frame is nine bytes (24 bits size, 8 bits kind, 8 bits flags, a reserved bit and 31 bits stream
id) and a payload. `FRAME_HEAD` reads and writes size and kind as one number (`size << 8 | kind`),
which costs one `struct` call per frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends before its first frame."""

HEAD_BYTES: Final = 9
WINDOW_MAX: Final = 2**31 - 1
STREAM_ID_MAX: Final = WINDOW_MAX
WINDOW_DEFAULT: Final = 65_535
FRAME_BYTES_DEFAULT: Final = 16_384
"""Also the least that a peer may announce."""
FRAME_BYTES_CEILING: Final = 2**24 - 1
HEADER_TABLE_DEFAULT: Final = 4_096

FRAME_HEAD: Final = Struct(">IBI")
MESSAGE_HEAD: Final = Struct(">IBIBI")
"""Head of a DATA frame, and the gRPC prefix of the one message in it."""
MESSAGE_PREFIX: Final = Struct(">BI")
"""gRPC: compressed flag, bytes of the message."""
PREFIX_BYTES: Final = 5

Buffer = bytes | memoryview


class Kind(IntEnum):
    """Frame types; any other is ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


# Plain ints: an operation on an enum member costs ten times as much.
ACK: Final = 0x01
END_STREAM: Final = ACK
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
PRIORITY: Final = 0x20


class Setting(IntEnum):
    """Settings we read or send; any other is ignored."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def frame(kind: Kind, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Any frame; `payload` fits the peer's largest frame."""
    return FRAME_HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    """Our SETTINGS frame."""
    pairs = (setting.to_bytes(2, "big") + value.to_bytes(4, "big") for setting, value in values)
    return frame(Kind.SETTINGS, 0, 0, b"".join(pairs))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Pairs of a SETTINGS payload, whose size is a multiple of six, in order."""
    return list(Struct(">HI").iter_unpack(payload))


SETTINGS_ACK: Final = frame(Kind.SETTINGS, ACK, 0, b"")


def window_update(stream_id: int, increment_bytes: int) -> bytes:
    """Let the peer send so much more; stream 0 is the connection."""
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, increment_bytes.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """End one stream in both directions."""
    return frame(Kind.RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def ping(opaque: bytes, *, ack: bool = False) -> bytes:
    """A PING of eight bytes, or the answer to one."""
    return frame(Kind.PING, ACK if ack else 0, 0, opaque)


def goaway(last_stream_id: int, code: ErrorCode, debug: str = "") -> bytes:
    """No stream above `last_stream_id` was or will be served; `debug` is for the peer's log."""
    numbers = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return frame(Kind.GOAWAY, 0, 0, numbers + debug.encode())
