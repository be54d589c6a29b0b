"""A client for tests of `epp.wire.http2`: writes frames as it is told, right or wrong, and reads
what the server answers. HPACK is the `hpack` package's."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import hpack

from epp.wire.http2.connection import ConnectionFault, Http2Limits, ServerConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 32
PATH, WATCH = "/test.Service/Call", "/test.Service/Watch"
REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "epp"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload


def settings(**values: int) -> bytes:
    numbers = {
        "header_table_size": 1,
        "enable_push": 2,
        "streams_max": 3,
        "window": 4,
        "frame_size": 5,
        "list_size": 6,
    }
    pairs = (struct.pack(">HI", numbers[name], value) for name, value in values.items())
    return frame(SETTINGS, payload=b"".join(pairs))


SETTINGS_ACK = frame(SETTINGS, ACK)
START = PREFACE + settings() + SETTINGS_ACK


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: int = 2) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def message(content: bytes, compressed: int = 0) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((compressed,)) + len(content).to_bytes(4, "big") + content


def data(stream_id: int, payload: bytes, flags: int = 0, size: int = 16_384) -> bytes:
    """DATA frames of up to `size` bytes; the flags go on the last one."""
    pieces = [payload[at : at + size] for at in range(0, len(payload), size)] or [b""]
    *head, last = pieces
    return b"".join(frame(DATA, 0, stream_id, piece) for piece in head) + frame(
        DATA, flags, stream_id, last
    )


def headers(stream_id: int, fields=REQUEST, flags: int = END_HEADERS) -> bytes:
    """A HEADERS frame that leaves no trace in the dynamic table."""
    return frame(HEADERS, flags, stream_id, literals(fields))


def literals(fields) -> bytes:
    """A header block of literals that are not indexed."""
    return _literals(tuple(fields))


@lru_cache(maxsize=64)
def _literals(fields: tuple[tuple[str, str], ...]) -> bytes:
    encoder = hpack.Encoder()
    return encoder.encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def replaced(**changes: str | None):
    """`REQUEST` with other values; `None` leaves a field out, `_` in a name is a dash."""
    names = {name.replace("_", "-"): value for name, value in changes.items()}
    names = {f":{name}" if f":{name}" in dict(REQUEST) else name: v for name, v in names.items()}
    fields = [(name, names.pop(name, value)) for name, value in REQUEST]
    return [field for field in (*fields, *names.items()) if field[1] is not None]


def read_frames(raw: bytes) -> list[Frame]:
    """All frames of `raw`, which ends with one."""
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 3], "big")
        kind, flags, stream_id = struct.unpack_from(">BBI", raw, at + 3)
        assert at + 9 + size <= len(raw), "output ends inside a frame"
        found.append(Frame(kind, flags, stream_id, raw[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


class Recorder:
    """A stream that remembers what happened to it, and answers each message as told."""

    def __init__(self, transport, answer) -> None:
        self.transport = transport
        self.answer = answer
        self.received: list[bytes] = []
        self.closes = 0

    def on_message(self, message: bytes) -> None:
        assert not self.closes, "a message after the end"
        assert type(message) is bytes
        self.received.append(message)
        self.answer(self, message)

    def on_close(self) -> None:
        self.closes += 1


def echo(stream: Recorder, content: bytes) -> None:
    stream.transport.send((content,))


def keep(stream: Recorder, content: bytes) -> None:
    """No answer, or a later one."""


class Site:
    """A `ServerConnection` with a client's bytes in and its frames out."""

    def __init__(self, answer=echo, *, start: bytes = START, limits=None, **options) -> None:
        self.now_s = 100.0
        self.streams: list[Recorder] = []
        self.faults: list[ConnectionFault] = []
        self.wakes = 0
        self.decoder = hpack.Decoder()
        self.answer = answer
        self.raw = b""
        self.connection = ServerConnection(
            **{
                "handlers": {PATH: self._open, WATCH: self._open},
                "limits": limits or Http2Limits(),
                "now_s": self.now_s,
                "wake": self._wake,
                "outlives_half_close": {WATCH},
                "on_error": self.faults.append,
                **options,
            }
        )
        if start:
            self.receive(start)

    def _open(self, transport) -> Recorder:
        self.streams.append(Recorder(transport, self.answer))
        return self.streams[-1]

    def _wake(self) -> None:
        self.wakes += 1

    def receive(self, *pieces: bytes) -> list[Frame]:
        """Let the server read these bytes; returns the frames of its answer."""
        for piece in pieces:
            self.connection.receive(piece, self.now_s)
        return self.take()

    def take(self, unsent_bytes: int = 0) -> list[Frame]:
        """What the server wants to write; the socket keeps `unsent_bytes` of it."""
        raw = b""
        while buffers := self.connection.take_output():
            raw += b"".join(buffers)
            self.connection.written(unsent_bytes)
        self.raw = raw
        return read_frames(raw)

    def wait(self, s: float) -> list[Frame]:
        """Let time pass, as an edge with one timer does; returns what the server sent meanwhile."""
        sent, until_s = [], self.now_s + s
        for _ in range(1_000):
            deadline_s = self.connection.next_deadline_s()
            if deadline_s is None or deadline_s > until_s:
                self.now_s = until_s
                return sent
            self.now_s = max(self.now_s, deadline_s)
            self.connection.on_time(self.now_s)
            sent += self.take()
        raise AssertionError("the timer does not come to rest")

    def answers(self, frames, stream_id: int = 1):
        """Header lists and gRPC messages that these frames carry on one stream, in order."""
        found, held = [], b""
        for kind, _, on_stream, payload in frames:
            if kind == HEADERS:
                fields = self.decoder.decode(payload)
                if on_stream == stream_id:
                    found.append(dict(fields))
            elif kind == DATA and on_stream == stream_id:
                held += payload
                while len(held) >= 5 and len(held) >= 5 + int.from_bytes(held[1:5], "big"):
                    size = int.from_bytes(held[1:5], "big")
                    found.append(held[5 : 5 + size])
                    held = held[5 + size :]
        assert not held, "part of a message"
        return found

    @property
    def reasons(self) -> list[str]:
        return [str(fault.reason) for fault in self.faults]


def resets(frames, code: int | None = None) -> dict[int, int]:
    """Stream id -> error code of the RST_STREAM frames."""
    found = {f.stream_id: int.from_bytes(f.payload, "big") for f in frames if f.kind == RST_STREAM}
    return found if code is None else {k: v for k, v in found.items() if v == code}


def goaways(frames) -> list[tuple[int, int]]:
    """Last stream id and error code of each GOAWAY."""
    return [struct.unpack(">II", f.payload[:8]) for f in frames if f.kind == GOAWAY]


def of_kind(frames, kind: int) -> list[Frame]:
    return [f for f in frames if f.kind == kind]
