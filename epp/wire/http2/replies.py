"""Header blocks of answers, most of them computed once, and the gRPC status codes we send.

Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md): `Status-Message` is percent-encoded UTF-8; an error
before the first message may be one header block, "trailers-only".
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Final

from epp.wire.http2 import hpack

MESSAGE_BYTES_MAX: Final = 1_024
"""Longest status message sent, encoded; the rest is cut off."""


class Status(IntEnum):
    """gRPC status codes that this layer sends by itself."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


_RESPONSE_FIELDS: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))

RESPONSE: Final = hpack.encode(_RESPONSE_FIELDS)
"""What comes before the first message."""

NOT_POST: Final = hpack.encode(((b":status", b"405"), (b"allow", b"POST")))
NOT_GRPC: Final = hpack.encode(((b":status", b"415"), (b"accept", b"application/grpc")))


@lru_cache(maxsize=128)
def trailers(status: int, message: str = "") -> bytes:
    """The block that ends a stream after `RESPONSE`."""
    return hpack.encode(_status_fields(status, message))


@lru_cache(maxsize=128)
def trailers_only(status: int, message: str = "") -> bytes:
    """The block that is all of an answer."""
    fields = (*_RESPONSE_FIELDS, *_status_fields(status, message))
    if status == Status.UNIMPLEMENTED:
        # A client that compressed learns what to do; the specification asks for it.
        fields += ((b"grpc-accept-encoding", b"identity"),)
    return hpack.encode(fields)


def _status_fields(status: int, message: str) -> tuple[hpack.Field, ...]:
    code = (b"grpc-status", b"%d" % status)
    return (code, (b"grpc-message", percent_encode(message))) if message else (code,)


def percent_encode(message: str) -> bytes:
    """A status message as a header value: printable ASCII but `%` stays, the rest of its UTF-8
    becomes `%XX`; at most `MESSAGE_BYTES_MAX`, cut between characters of the encoding."""
    encoded = bytearray()
    for byte in message.encode("utf-8", "replace")[:MESSAGE_BYTES_MAX]:
        piece = b"%c" % byte if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte
        if len(encoded) + len(piece) > MESSAGE_BYTES_MAX:
            break
        encoded += piece
    return bytes(encoded)
