"""How far each endpoint's predicted latency stays below what the client was promised.

Shared by the plugins that read predictions. They say so with `needs_predictions`, and the decider
predicts only for profiles that have such a plugin. As in the reference EPP a promise that was not
given counts as 0 seconds: every headroom is then negative, and what is left is the order of the
predictions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from epp.core.model import Endpoint, Request


class Headroom(NamedTuple):
    """Promised less predicted, seconds; negative = the promise would be broken."""

    ttft_s: float
    tpot_s: float

    @property
    def positive(self) -> bool:
        """Whether both promises would be kept, exactly met included."""
        return self.ttft_s >= 0.0 and self.tpot_s >= 0.0


def headrooms(request: Request, endpoints: Sequence[Endpoint]) -> list[Headroom | None]:
    """Each endpoint's headroom, same order; `None` where there is no prediction."""
    ttft_s, tpot_s = request.slo_ttft_s or 0.0, request.slo_tpot_s or 0.0
    get = request.predictions.get
    return [
        None if (p := get(e.slot)) is None else Headroom(ttft_s - p.ttft_s, tpot_s - p.tpot_s)
        for e in endpoints
    ]
