"""The three kinds of failure: a bad configuration, one refused request, and (as `assert`) a bug of
ours."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class EppError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(EppError):
    """The configuration cannot be used; start-up stops and says which key is wrong.

    Args:
        message: what is wrong and what would be right, in one sentence.
        path: JSON path of the offending key (`$.plugins[2].parameters.threshold`); `$` when it is
    the whole file."""

    def __init__(self, message: str, *, path: str = "$") -> None:
        # A flag's message begins with the flag; a key's needs the place.
        super().__init__(message if path.startswith("--") else f"{message} - at `{path}`")
        self.path = path


class DropReason(StrEnum):
    """Why a request was refused: the metric label, the `x-llm-d-request-dropped-reason` header and
    the test's word.

    The values that exist in the reference EPP are spelled as there; the rest are ours.
    """

    BAD_REQUEST = "rejected-bad-request"
    BODY_TOO_LARGE = "rejected-body-too-large"
    SATURATED = "rejected-saturated"
    NO_ENDPOINTS = "rejected-no-endpoints"
    SHUTTING_DOWN = "rejected-shutting-down"
    INTERNAL = "rejected-internal-error"


HTTP_STATUS: Mapping[DropReason, int] = MappingProxyType(
    {
        DropReason.BAD_REQUEST: 400,
        DropReason.BODY_TOO_LARGE: 413,
        DropReason.SATURATED: 429,
        DropReason.NO_ENDPOINTS: 503,
        DropReason.SHUTTING_DOWN: 503,
        DropReason.INTERNAL: 500,
    }
)
assert HTTP_STATUS.keys() == set(DropReason), "a new drop reason must choose its HTTP status"


class RequestDropped(EppError):  # noqa: N818 - the field's word
    """This one request gets no endpoint; the client is answered `http_status`, with `reason` in a
    header.

    `detail` reaches the client: it names lengths, keys and remedies, never prompt text or
    credentials."""

    def __init__(self, reason: DropReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail

    @property
    def http_status(self) -> int:
        """Status of the immediate response, 400..503."""
        return HTTP_STATUS[self.reason]
