"""What a request's header list means: a call of one of our methods, an answer at once, or nothing
that HTTP/2 allows.

The rules are RFC 9113 8.1 to 8.3 for every field, then gRPC over HTTP/2 for the request as a whole:
`POST`, a content type of `application/grpc`, a method we have, and a `grpc-timeout` that parses. A
missing `te` is let pass (it tells of proxies that drop trailers; gateways in front of us are no
such), another value than `trailers` is malformed by RFC 9113 8.2.2.

Gateways send the same block for every stream but for ids of traces, so what a block meant is
remembered until the decoder's table changes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Final

from epp.core.headers import POOL
from epp.core.streams import NOT_SAID, Called, StreamFactory
from epp.core.structs import Frozen
from epp.wire.http2 import replies
from epp.wire.http2.faults import Reason
from epp.wire.http2.hpack import Decoder, Field
from epp.wire.http2.replies import Status

_REMEMBERED_BLOCKS_MAX: Final = 128
_REMEMBERED_BLOCK_BYTES_MAX: Final = 512

_SHORT_FIELD_BYTES: Final = 96
"""Name and value of fields that repeat over streams and connections; that they are well-formed is
remembered."""

_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_A_CONNECTION: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_SINGLE: Final = frozenset({b"content-type", b"content-length", b"grpc-timeout", b"te"})
"""Fields that we read; a second one with another value would make their meaning a matter of
taste."""

_POOL: Final = POOL.encode()
_NAME: Final = re.compile(rb"[\x21-\x39\x3b-\x40\x5b-\x7e]+")
_VALUE: Final = re.compile(rb"[^\x00\r\n\t ](?:[^\x00\r\n]*[^\x00\r\n\t ])?|")
_CONTENT_TYPE: Final = re.compile(rb"application/grpc(?:[+;].*)?", re.IGNORECASE)
_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])")
_LENGTH: Final = re.compile(rb"\d{1,18}")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class _Malformed(Exception):  # noqa: N818 - what it is
    """Not an HTTP/2 message: the stream ends with PROTOCOL_ERROR. The text names the rule."""


class Head(Frozen, frozen=True):
    """A request as its headers announce it."""

    factory: StreamFactory | None = None
    """Makes the stream; None = the request is over, see `answer`."""
    outlives_half_close: bool = False
    timeout_s: float | None = None
    content_bytes: int | None = None
    """`content-length`, which all DATA together must keep."""
    called: Called = NOT_SAID
    answer: bytes = b""
    """With no factory: the header block that refuses the request; empty = reset with
    PROTOCOL_ERROR."""
    reason: Reason = Reason.MALFORMED_REQUEST
    detail: str = ""


class RequestReader:
    """Header blocks of one connection to what they mean.

    Args:
        handlers: method path -> factory.
        outlives_half_close: paths of `handlers` whose stream goes on after the client half-closes.
    """

    def __init__(
        self,
        *,
        handlers: Mapping[str, StreamFactory],
        outlives_half_close: Container[str],
        decoder: Decoder,
    ) -> None:
        self._handlers = handlers
        self._outlives_half_close = outlives_half_close
        self._decoder = decoder
        self._heads: dict[bytes, Head] = {}

    def read(self, block: bytes) -> Head:
        """The request of this block. Raises: HpackError; the connection cannot go on."""
        head = self._heads.get(block)
        if head is not None:
            return head
        version = self._decoder.version
        head = self._interpret(self._decoder.decode(block))
        if version != self._decoder.version:
            self._heads.clear()
        elif len(block) <= _REMEMBERED_BLOCK_BYTES_MAX:
            if len(self._heads) >= _REMEMBERED_BLOCKS_MAX:
                self._heads.clear()
            self._heads[block] = head
        return head

    def read_trailers(self, block: bytes) -> str:
        """What is wrong with the trailers of a request, else ""; nothing in them concerns us.

        Raises: HpackError; the connection cannot go on.
        """
        version = self._decoder.version
        fields = self._decoder.decode(block)
        if version != self._decoder.version:
            self._heads.clear()
        try:
            for name, value in fields or ():
                if _check_field(name, value):
                    raise _Malformed("a pseudo-header in trailers")
        except _Malformed as error:
            return str(error)
        return ""

    def _interpret(self, fields: list[Field] | None) -> Head:
        if fields is None:
            answer = replies.trailers_only(
                Status.RESOURCE_EXHAUSTED, "the request's headers are too large"
            )
            return Head(answer=answer, reason=Reason.HEADERS_TOO_LARGE)
        try:
            headers = _check_request(fields)
            content_bytes = _content_bytes(headers)
        except _Malformed as error:
            return Head(detail=str(error))
        refusal = self._refusal(headers)
        if refusal is not None:
            return refusal
        path = headers[b":path"].decode("latin-1")
        timeout = headers.get(b"grpc-timeout")
        return Head(
            factory=self._handlers[path],
            outlives_half_close=path in self._outlives_half_close,
            timeout_s=None if timeout is None else read_timeout(timeout),
            content_bytes=content_bytes,
            called=_called(headers),
        )

    def _refusal(self, headers: dict[bytes, bytes]) -> Head | None:
        """Why a well-formed request is no call of ours; None when it is one."""
        if headers[b":method"] != b"POST":
            return Head(answer=replies.NOT_POST, reason=Reason.NOT_GRPC, detail="method")
        if not _CONTENT_TYPE.fullmatch(headers.get(b"content-type", b"")):
            return Head(answer=replies.NOT_GRPC, reason=Reason.NOT_GRPC, detail="content-type")
        if headers[b":path"].decode("latin-1") not in self._handlers:
            answer = replies.trailers_only(Status.UNIMPLEMENTED, "unknown method")
            return Head(answer=answer, reason=Reason.UNKNOWN_METHOD)
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None and read_timeout(timeout) is None:
            answer = replies.trailers_only(
                Status.INTERNAL, "grpc-timeout is not 1 to 8 digits and one of H M S m u n"
            )
            return Head(answer=answer, detail="grpc-timeout")
        return None


def _called(headers: dict[bytes, bytes]) -> Called:
    authority = headers.get(b":authority", b"")
    return Called(authority.decode("latin-1"), headers.get(_POOL, b"").decode("latin-1"))


def read_timeout(value: bytes) -> float | None:
    """Seconds of a `grpc-timeout` header, None when it is not one."""
    found = _TIMEOUT.fullmatch(value)
    return int(found[1]) * _UNIT_S[found[2]] if found else None


def _check_request(fields: list[Field]) -> dict[bytes, bytes]:
    """All fields by name, the last of a repeated one. Raises: _Malformed."""
    headers: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        short = len(name) + len(value) <= _SHORT_FIELD_BYTES
        check = _check_short_field if short else _check_field
        if check(name, value):
            if name in headers or regular:
                raise _Malformed("a pseudo-header that is repeated or behind a field")
        else:
            regular = True
            if name in _SINGLE and headers.get(name, value) != value:
                raise _Malformed("two values of a field that has one")
        headers[name] = value
    _check_pseudo(headers)
    return headers


def _check_pseudo(headers: dict[bytes, bytes]) -> None:
    if headers.get(b":method") == b"CONNECT":
        if b":scheme" in headers or b":path" in headers or b":authority" not in headers:
            raise _Malformed("CONNECT with a path or a scheme, or without an authority")
    elif not headers.keys() >= _NEEDED:
        raise _Malformed("a pseudo-header is missing")
    elif headers[b":path"][:1] != b"/" and headers[b":path"] != b"*":
        raise _Malformed("a path that is none")


def _check_field(name: bytes, value: bytes) -> bool:
    """Check what can be said of one field alone; True for a pseudo-header. Raises: _Malformed."""
    if not _VALUE.fullmatch(value):
        raise _Malformed("a field value with a forbidden character")
    if name[:1] == b":":
        if name not in _PSEUDO:
            raise _Malformed("an unknown pseudo-header")
        return True
    if not _NAME.fullmatch(name):
        raise _Malformed("a field name with a forbidden character")
    if name in _OF_A_CONNECTION:
        raise _Malformed("a field of HTTP/1.1 connections")
    if name == b"te" and value.lower() != b"trailers":
        raise _Malformed("te is not trailers")
    return False


_check_short_field: Final = lru_cache(maxsize=512)(_check_field)


def _content_bytes(headers: dict[bytes, bytes]) -> int | None:
    length = headers.get(b"content-length")
    if length is None:
        return None
    if not _LENGTH.fullmatch(length):
        raise _Malformed("content-length is no number")
    return int(length)
