"""What a peer does wrong, as values: counted by the edge, and as the exception that ends a
connection."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from epp.wire.http2.frames import ErrorCode


class Reason(StrEnum):
    """Why a stream or connection was ended; a metric label and the debug text of GOAWAY."""

    # The connection ends.
    BAD_PREFACE = "bad-preface"
    FRAME_SIZE = "frame-size"
    BAD_FRAME = "bad-frame"
    """A frame in the wrong place, on the wrong stream or with a value out of range."""
    STREAM_ID = "stream-id"
    COMPRESSION = "compression"
    FLOW_CONTROL = "flow-control"
    """On a stream only that stream ends."""
    HEADER_FLOOD = "header-flood"
    PING_FLOOD = "ping-flood"
    SETTINGS_FLOOD = "settings-flood"
    DATA_FLOOD = "data-flood"
    WINDOW_UPDATE_FLOOD = "window-update-flood"
    FRAME_FLOOD = "frame-flood"
    """PRIORITY, RST_STREAM of ended streams, unknown frames, GOAWAY."""
    RESET_FLOOD = "reset-flood"
    """Streams opened only to be reset (CVE-2023-44487)."""
    PROVOKED_RESETS = "provoked-resets"
    """Stream errors, one after another (CVE-2025-8671)."""
    UNREAD_OUTPUT = "unread-output"
    SETTLE_TIMEOUT = "settle-timeout"
    KEEPALIVE_TIMEOUT = "keepalive-timeout"

    # One stream ends.
    MALFORMED_REQUEST = "malformed-request"
    NOT_GRPC = "not-grpc"
    UNKNOWN_METHOD = "unknown-method"
    HEADERS_TOO_LARGE = "headers-too-large"
    REFUSED_STREAM = "refused-stream"
    STREAM_CLOSED = "stream-closed"
    BAD_MESSAGE = "bad-message"
    """Compressed, or cut off by the end of its stream."""
    MESSAGE_TOO_LARGE = "message-too-large"
    OUTBOX_FULL = "outbox-full"

    BUG = "bug"
    """Ours; `ConnectionFault.error` is the exception."""


class ConnectionFault(msgspec.Struct, frozen=True):
    """One thing that went wrong on a connection."""

    code: ErrorCode
    """Sent to the peer; `NO_ERROR` where it was told otherwise (a gRPC status)."""
    reason: Reason
    stream_id: int = 0
    """The stream that ended; 0 when the connection did."""
    detail: str = ""
    """For a log line; no content of requests."""
    error: Exception | None = None


class PeerError(Exception):
    """Raised and caught inside `http2`: this connection cannot go on."""

    def __init__(self, code: ErrorCode, reason: Reason, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.code = code
        self.reason = reason
        self.detail = detail
