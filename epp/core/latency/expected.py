"""`expected-latency`: the endpoint whose first token would come soonest, for everybody together.

For each endpoint, in seconds (u tokens to compute, m matched, rates a and b learned):

    w    = a*u + b*u*(m + u/2)                          prefill of this request there
    B    = prefill dispatched there and not done        backlog, see `core.latency.backlog`
    S    = one decode step there
    cost = B + w*(ownWeight + inflightWeight*inflight + waitingWeight*waiting)
             + ceil((B/a + u) / chunkTokens) * S
             + decodeWeight*inflight*(what its decoding adds to each of their answers)
             + the wait for a place, if maxNumSeqs run there
             + memoryWeight*(the wait for memory, if the KV cache has no room for it)

The least cost wins; costs that differ by less than 0.4 of a decode step are equal: of those the
endpoint with the fewest requests in flight, then the least recently chosen, then chance. One that
comes back from an ejection is tried by a request that would lose at most a second there.
`w` counts for more than itself because it delays others: those that wait for a first token by all
of it, those that decode by the steps it makes longer, and whoever comes next. The weights were
found by simulation (docs/routing.md) and are flat within 1-2 %.

An endpoint that holds a popular prefix draws its requests until they cost more there than computing
the prefix elsewhere. With k requests in flight that share it, a copy pays for all of them, so its
work counts only as 1 / (1 + sharingWeight*(k - 1)). The copy is then a match for whatever follows
at once, so a burst makes few copies, not one per endpoint. A new process, or one that comes back,
takes requests one after the other until its first answer shows that it works (`slowStartS`).

Where our requests in flight leave no room for the prompt in the KV cache, it waits for some of them
to end: what is lacking, as a part of the cache, times what an answer takes to be decoded there.

Requests in flight beyond 32 count 0.3 in `inflightWeight` (`core.latency.cost` says why).

Cost for 64 endpoints: about 30 us compiled, 110 interpreted (`make bench-pick`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated, ClassVar

import msgspec

from epp.core.latency.cost import Weights, costs_of
from epp.core.latency.forecast import CHUNK_TOKENS, Forecast
from epp.core.model import Costs, Endpoint, Plugin, Prediction, Reads, Request, ScoreTerm

LATE_WEIGHT = 100.0
"""Cost decides between endpoints that would be late only where they are about equally late."""

Weight = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]


class ExpectedLatency(Plugin, frozen=True):
    """Choose the endpoint of least cost in seconds: its backlog, the request's own prefill there
    with what it delays, and the decode steps in between. Nothing to calibrate.

    Stands alone: no scorer beside it. Filters may narrow the choice before it. A request with
    `x-llm-d-slo-ttft-ms` or `x-llm-d-slo-tpot-ms` goes to the cheapest endpoint that keeps the
    promise, or, if none does, to the one that misses it least.

    Reads: prefix matches, in-flight requests, learned rates, loads where others send requests too.
    Source: ours; `routing.md` has the derivation and the measurements.
    """

    reads: ClassVar[Reads] = Reads.REQUEST | Reads.INFLIGHT

    own_weight: Weight = 1.3
    """Weight of the request's own prefill."""
    inflight_weight: Weight = 0.07
    """Added per request in flight there, whose decoding its prefill slows."""
    waiting_weight: Weight = 0.8
    """Added per request waiting there for its first token."""
    decode_weight: Weight = 0.03
    """Of the time by which its decoding slows the answers of those in flight there."""
    sharing_weight: Weight = 0.1
    """How much each other request in flight that shares the prompt's beginning adds to who pays for
    a copy of it elsewhere; 0 = the request alone."""
    memory_weight: Weight = 3.0
    """Of the time until so much of the KV cache there is free as the request lacks. An engine
    serves in order, so whoever waits for memory keeps all who come after it waiting, too."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = CHUNK_TOKENS
    """Prompt tokens an engine computes per step (its `--max-num-batched-tokens`)."""
    slow_start_s: Annotated[float, msgspec.Meta(ge=0.0, le=60.0)] = 1.0
    """Added per waiting request on an endpoint that has not answered since it started."""
    hold: bool = False
    """Keep a request in the picker until the endpoint it wants has room, where the gateway's mode
    allows an answer to wait (full duplex)."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Requests an engine runs at once (its flag of that name)."""
    prefix_match_info_producer_name: str = ""
    """Empty, or the name of the prefix cache producer."""

    def __call__(
        self, request: Request, endpoints: Sequence[Endpoint], forecast: Forecast, now_s: float
    ) -> Costs:
        """Costs of `endpoints`, shape (len(endpoints),), seconds."""
        weights = Weights(
            self.own_weight,
            self.inflight_weight,
            self.waiting_weight,
            self.decode_weight,
            self.sharing_weight,
            self.memory_weight,
            self.chunk_tokens,
            self.max_num_seqs,
            self.slow_start_s,
        )
        found = costs_of(request, endpoints, forecast, now_s, weights)
        if request.slo_ttft_s is None and request.slo_tpot_s is None:
            return found
        expected = forecast.predict(request, endpoints, now_s)
        late = [lateness(request, expected.get(endpoint.slot)) for endpoint in endpoints]
        if not any(late):
            return found
        costs, terms = found.seconds, found.terms
        # Whoever keeps the promise comes before whoever does not, whatever it costs.
        worst_s = max(costs)
        late_s = [worst_s * (1.0 + LATE_WEIGHT * ratio) if ratio else 0.0 for ratio in late]
        return Costs(
            [cost + extra for cost, extra in zip(costs, late_s, strict=True)],
            (*terms, ScoreTerm("late", 1.0, late_s)),
            found.tie_s,
        )


def lateness(request: Request, prediction: Prediction | None) -> float:
    """By how much of the promise it would be missed: 0 = kept, 1 = twice as long as promised."""
    if prediction is None:
        return 0.0
    late = 0.0
    for promised_s, expected_s in (
        (request.slo_ttft_s, prediction.ttft_s),
        (request.slo_tpot_s, prediction.tpot_s),
    ):
        if promised_s is not None and expected_s > promised_s:
            late += (expected_s - promised_s) / max(promised_s, 0.001)
    return late


def least(costs: Costs, endpoints: Sequence[Endpoint], rng: Random) -> int:
    """Index of the least cost; equal costs: fewest in flight, least recently chosen, chance."""
    equal = min(costs.seconds) + costs.tie_s
    ties = [i for i, cost in enumerate(costs.seconds) if cost <= equal]
    if len(ties) == 1:
        return ties[0]
    return min(
        ties,
        key=lambda i: (
            endpoints[i].inflight_requests,
            endpoints[i].last_pick_number,
            rng.random(),
        ),
    )
