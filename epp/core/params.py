"""What exchanges have in common, apart from `exchange`, which may be compiled (see `structs`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from epp.core.bodies import Bodies
from epp.core.parse import ParseLimits

if TYPE_CHECKING:
    from epp.core.exchange import Exchange


class ExchangeParams(msgspec.Struct, frozen=True):
    """What all exchanges have in common."""

    body_bytes_max: int = 64 << 20
    """Largest request body; a longer one is refused with 413."""
    chunk_bytes_max: int = 62_000
    """Largest piece of body in one reply; some data planes refuse more than 64 KiB."""
    emit_scores: bool = False
    """Add every candidate's total as metadata `x-gateway-destination-endpoint-scores`."""
    use_subset: bool = True
    """Keep to the subset of endpoints the gateway allows."""
    verify_served: bool = False
    """Report the served endpoint in a response header (`destination-endpoint-served-verifier`)."""
    parse_limits: ParseLimits = ParseLimits()
    bodies: Bodies = msgspec.field(default_factory=Bodies)
    """The account of unfinished bodies, shared by all exchanges."""


class Watcher(Protocol):
    """Told of an exchange's turning points, after the answer was handed to the transport."""

    def decided(self, exchange: Exchange) -> None:
        """`exchange.decision` was made."""

    def finished(self, exchange: Exchange) -> None:
        """The exchange is over: `exchange.cause` says how. Once per exchange."""
