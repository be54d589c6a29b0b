"""The phases of an exchange, and what sets of body modes mean for them."""

from __future__ import annotations

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
