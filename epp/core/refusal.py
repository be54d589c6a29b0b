"""The answer to a request we refuse: an OpenAI-style JSON error, with the reason where machines
look."""

from __future__ import annotations

import msgspec

from epp.core.errors import HTTP_STATUS, DropReason, RequestDropped
from epp.core.headers import DROP_REASON
from epp.core.messages import ImmediateReply

DETAIL_CHARS_MAX = 512
RETRY_AFTER_S = 1
"""What a client is told to wait after 429 and 503."""

_TYPES = {
    400: "BadRequestError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
assert _TYPES.keys() == set(HTTP_STATUS.values()), "a new status must choose its error type"

_MESSAGES = {
    DropReason.BAD_REQUEST: "The request cannot be read",
    DropReason.BODY_TOO_LARGE: "The request body is too large",
    DropReason.SATURATED: "All endpoints are saturated, retry later",
    DropReason.NO_ENDPOINTS: "No endpoint is available for this request, retry later",
    DropReason.SHUTTING_DOWN: "The endpoint picker is shutting down, retry",
    DropReason.INTERNAL: "The endpoint picker failed on this request",
}
assert _MESSAGES.keys() == set(DropReason), "a new drop reason must choose its message"


def refuse(dropped: RequestDropped) -> ImmediateReply:
    """The immediate response for `dropped`: status, JSON error body, reason header, `Retry-After`
    on 429 and 503."""
    status = dropped.http_status
    message = _MESSAGES[dropped.reason]
    if dropped.detail:
        message = f"{message}: {dropped.detail[:DETAIL_CHARS_MAX]}"
    headers = [("content-type", "application/json"), (DROP_REASON, dropped.reason.value)]
    if status in {429, 503}:
        headers.append(("retry-after", str(RETRY_AFTER_S)))
    error = {"message": message, "type": _TYPES[status], "param": None, "code": status}
    return ImmediateReply(
        status=status,
        body=msgspec.json.encode({"error": error}),
        headers=tuple(headers),
        details=f"epp_{dropped.reason.value}",
    )


def no_headers() -> RequestDropped:
    """A request whose headers the gateway does not show."""
    return RequestDropped(
        DropReason.INTERNAL,
        "the gateway sends no request headers to the picker: set request_header_mode to SEND",
    )
