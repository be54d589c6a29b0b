"""The phases of an exchange, and what sets of body modes mean for them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, auto

from epp.core.messages import BodyMode

DUPLEX = frozenset({BodyMode.FULL_DUPLEX_STREAMED, BodyMode.GRPC})
BUFFERED = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL})


class Phase(IntEnum):
    """Where a stream stands; it only moves down this list. A number, since hashing a member of a
    plain `Enum` takes a call."""

    HEADERS = auto()
    BODY = auto()
    HELD = auto()
    DECIDED = auto()
    RESPONSE = auto()
    DONE = auto()


def cannot_wait(mode: BodyMode, headers: Mapping[str, str]) -> bool:
    """Whether a request has to be decided on its headers, though a body may follow."""
    if mode in {BodyMode.NONE, BodyMode.STREAMED}:
        return True
    # A client that asks to upgrade sends no body before it is answered.
    return headers.get(":method") == "CONNECT" or (
        "upgrade" in headers and "upgrade" in headers.get("connection", "upgrade").lower()
    )
