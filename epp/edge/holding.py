"""The hold as metrics: how long each request was kept.

A request that was held is counted once, when its wait is over: let go to an endpoint, withdrawn
because its client left or the gateway answered by itself, or refused.
"""

from __future__ import annotations

from enum import StrEnum

from epp.core.exchange import Exchange
from epp.edge.metrics import OUR_PREFIX, Metrics


class HoldEnd(StrEnum):
    """How a wait ended: the metric label."""

    DISPATCHED = "dispatched"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"


class HoldMetrics:
    """Counts held requests; told of them by `Telemetry`."""

    def __init__(self, metrics: Metrics) -> None:
        family = metrics.histogram(f"{OUR_PREFIX}hold_duration_seconds")
        self._ends = {end: family.series(end.value) for end in HoldEnd}

    def decided(self, exchange: Exchange) -> None:
        """Count the wait of a request that was let go; nothing for one that was not held."""
        self._count(exchange, HoldEnd.DISPATCHED)

    def finished(self, exchange: Exchange) -> None:
        """The same of one that was never let go."""
        if exchange.decision is None:
            refused = exchange.drop is not None
            self._count(exchange, HoldEnd.REFUSED if refused else HoldEnd.WITHDRAWN)

    def _count(self, exchange: Exchange, end: HoldEnd) -> None:
        seconds = held_s(exchange)
        if seconds is not None:
            self._ends[end].observe(seconds)


def held_s(exchange: Exchange) -> float | None:
    """How long a request was held, in seconds; `None` = it was not, or still is."""
    since_s = exchange.held_since_s
    until_s = exchange.finished_s if exchange.decided_s is None else exchange.decided_s
    return None if since_s is None or until_s is None else until_s - since_s
