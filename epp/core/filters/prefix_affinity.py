"""The filter that sends a prompt where it is cached, until that costs too much waiting."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class TtftSource(StrEnum):
    """Where the time to the first token comes from."""

    PREFILL_THROUGHPUT = "prefillThroughput"
    LATENCY_PREDICTOR = "latencyPredictor"


class PrefixCacheAffinityFilter(Plugin, frozen=True):
    """Keep the endpoints that hold most of the prompt, the sticky ones, unless they are far slower
    to the first token than the others.

    All are kept when none is sticky, when there is only one, and when the best sticky endpoint's
    time to the first token exceeds the best other one's by more than `maxTTFTPenaltyMs`.

    Reads: `Request.match`; `Endpoint.inflight_tokens` or `Request.predictions`, as `ttftSource`
        says; chance, when it explores.
    Cost: 6 us, 8 us with predictions; none for a prompt that nobody has cached.
    Source: llm-d `prefix-cache-affinity-filter`, same rules: an endpoint without a prediction is
        the slowest there can be, and where all of one side are, the penalty is as large; where both
        sides are, there is none.
    """

    reads: ClassVar[Reads] = Reads.REQUEST | Reads.INFLIGHT

    affinity_threshold: Ratio = 0.8
    """Matched part of the prompt's full blocks from which an endpoint is sticky, 0..1; 0 = keep
    all."""
    exploration_probability: Ratio = 0.0
    """Chance to keep all, so that others learn the prompt too, 0..1."""
    max_ttft_penalty_ms: NotNegative = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")
    """Longest extra wait for the first token that stickiness is worth, ms; exactly as long is still
    worth it; 0 = however long."""
    ttft_source: TtftSource = TtftSource.PREFILL_THROUGHPUT
    """`prefillThroughput`: the uncached prompt tokens in flight at an endpoint over
    `peakPrefillThroughput`. `latencyPredictor`: the prediction for this request."""
    peak_prefill_throughput: NotNegative = 15_928.0
    """Prompt tokens an endpoint prefills per second; above 0 where it is used. The reference's
    default, measured with a 32B model on two H100."""
    prefix_match_info_producer_name: str = ""
    """Producer of the match; empty = the default one."""
    latency_prediction_info_producer_name: str = ""
    """Producer of the predictions; empty = the only one there is."""
    in_flight_load_producer_name: str = ""
    """Producer that counts the tokens; empty = the only one there is."""

    def __post_init__(self) -> None:
        measures = self.max_ttft_penalty_ms > 0.0 and not self.needs_predictions
        if measures and self.peak_prefill_throughput == 0.0:
            raise ValueError(
                "`peakPrefillThroughput` is 0: set the tokens per second an endpoint prefills, or "
                "`maxTTFTPenaltyMs: 0` to stick however long the wait"
            )

    @property
    def needs_predictions(self) -> bool:
        """Whether the result depends on `Request.predictions`."""
        return self.max_ttft_penalty_ms > 0.0 and self.ttft_source is TtftSource.LATENCY_PREDICTOR

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        match, threshold = request.match, self.affinity_threshold
        if threshold <= 0.0 or not match.by_slot:
            return endpoints
        explore = self.exploration_probability
        if explore > 0.0 and request.rng.random() < explore:
            return endpoints
        holders = {s for s, blocks in match.by_slot.items() if blocks / match.blocks >= threshold}
        sticky = [e for e in endpoints if e.slot in holders]
        if not sticky:
            return endpoints
        if self.max_ttft_penalty_ms > 0.0:
            # Where the best of all is a sticky one there is no penalty, as if it were negative.
            best_ms = self._best_ttft_ms(request, endpoints)
            penalty_ms = self._best_ttft_ms(request, sticky) - best_ms
            if penalty_ms > self.max_ttft_penalty_ms:
                return endpoints
        return sticky

    def _best_ttft_ms(self, request: Request, endpoints: Sequence[Endpoint]) -> float:
        """The shortest time to the first token among `endpoints`; infinite when none is known."""
        if not self.needs_predictions:
            tokens = min([e.inflight_tokens for e in endpoints])
            return tokens / self.peak_prefill_throughput * 1000.0
        get = request.predictions.get
        known = [p.ttft_s for e in endpoints if (p := get(e.slot)) is not None]
        return min(known, default=inf) * 1000.0
