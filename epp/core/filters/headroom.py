"""The filter that keeps to the endpoints expected to hold the client's promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class SloHeadroomTierFilter(Plugin, frozen=True):
    """Keep the endpoints predicted to hold both promises, time to the first token and per output
    token; if there is none, the others.

    An endpoint without a prediction is among the others: nothing says that it would hold them. When
    no endpoint has a prediction, all are kept. A promise that the client did not ask for counts as
    0 seconds, which nothing holds.

    Reads: `Request.predictions`, `Request.slo_ttft_s`, `Request.slo_tpot_s`; chance.
    Cost: 8 us.
    Source: llm-d `slo-headroom-tier-filter`, same rules.
    """

    reads: ClassVar[Reads] = Reads.REQUEST
    needs_predictions: ClassVar[bool] = True

    epsilon_explore_neg: Ratio = 0.01
    """Chance to keep the others where both kinds exist, so that they can show to have recovered,
    0..1."""
    latency_prediction_info_producer_name: str = ""
    """Producer of the predictions; empty = the only one there is."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        ttft_s, tpot_s = request.slo_ttft_s or 0.0, request.slo_tpot_s or 0.0
        found = [request.predictions.get(e.slot) for e in endpoints]
        holds = [p is not None and p.ttft_s <= ttft_s and p.tpot_s <= tpot_s for p in found]
        if not any(holds) or all(holds):
            return endpoints
        explores = request.rng.random() < self.epsilon_explore_neg
        return [e for e, holding in zip(endpoints, holds, strict=True) if holding is not explores]
