"""Decides again what the product's decider decides, as if it had known better; see `regret`.

The profile runs on copies of the pool's endpoints, in which a part of what the picker knows is
replaced by the engines' true state. Where a time is part of the load, its unit is the rates: work
in front is tokens times a rate, so true load by learned rates is still not the true time.

What stays the picker's own in all steps: how long answers are, what its requests in flight hold of
a KV cache and share of prefixes (`Endpoint.kv`), who is tried out or started slowly. What is wrong
with these counts as objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from random import Random
from typing import NamedTuple

import msgspec

from bench.engine.cost import CostModel
from bench.sim.oracle import TrueState
from bench.sim.regret import Judgement
from epp.core.decide import Decider
from epp.core.latency.backlog import Backlog
from epp.core.latency.forecast import Constants, Forecast
from epp.core.latency.rates import RateLearner, Rates
from epp.core.model import NO_MATCH, Costs, Endpoint, Pick, PrefixMatch, Request
from epp.core.pool import Snapshot
from epp.core.schedule import Cost, Scheduler

EQUAL = 1e-9
"""Totals of scorers closer than this are equal."""

Truth = Mapping[int, TrueState]
"""By slot."""


def number_of(endpoint: Endpoint) -> int:
    """The simulator's number of an endpoint, which is its port."""
    return endpoint.spec.port - 1


def rates_of(cost: CostModel) -> Rates:
    """An engine's true constants as the picker writes them."""
    return Rates(
        token_s=cost.prefill_token_s / cost.speed,
        pair_s=cost.attention_pair_s / cost.speed,
        step_s=cost.step_base_s / cost.speed,
        step_request_s=cost.decode_sequence_s / cost.speed,
        step_token_s=cost.decode_kv_token_s / cost.speed,
    )


class Rethinker:
    """Of one decider; see the module. Charges nothing and learns nothing."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._profile = decider.profile
        self._cost = None if self._profile.cost is None else _Remembering(self._profile.cost)
        self._rng = Random(0)
        """Apart from the decider's, which would otherwise go on differently."""

    def judge(self, request: Request, truth: Truth, now_s: float) -> list[Judgement]:
        """What it thinks of the endpoints: see `Rethinking.rethink`.

        Args:
            request: with its chains, not yet decided; is written to.
            truth: of every endpoint of the pool.
        """
        decider, own = self._decider, self._decider.forecast
        decider.inflight.advance(now_s)
        endpoints = decider.pool.snapshot(now_s).endpoints
        request.rng = self._rng
        request.match = decider.prefix.match(request) if decider.prefix else NO_MATCH
        judgements = [self._judgement(request, endpoints, own, now_s)]
        request.match = _true_match(request.match, truth)
        judgements.append(self._judgement(request, endpoints, own, now_s))
        for forecast in (own, _true_forecast(own, endpoints, truth)):
            rates = forecast.constants()
            as_is = [_as_it_is(e, truth[e.slot], rates[e.slot], now_s) for e in endpoints]
            judgements.append(self._judgement(request, as_is, forecast, now_s))
        return judgements

    def _judgement(
        self, request: Request, endpoints: Sequence[Endpoint], forecast: Forecast, now_s: float
    ) -> Judgement:
        profile = self._profile
        if profile.needs_predictions:
            request.predictions = forecast.predict(
                request, endpoints, now_s, tpot_ratio=profile.tpot_ratio
            )
        if self._cost is not None:
            profile = msgspec.structs.replace(profile, cost=self._cost)
        # A scheduler keeps what it computed for a version of the pool; these are all different.
        pick = Scheduler(profile, self._rng).pick(
            request, Snapshot(tuple(endpoints), 0), forecast=forecast, now_s=now_s
        )
        good = frozenset(number_of(endpoint) for endpoint in self._best(pick))
        return Judgement(good, number_of(pick.endpoint))

    def _best(self, pick: Pick) -> Iterable[Endpoint]:
        totals = pick.totals
        if self._cost is not None:
            most = min(totals) + self._cost.tie_s
            good = [total <= most for total in totals]
        else:
            least = max(totals) - EQUAL
            good = [total >= least for total in totals]
        return [e for e, is_good in zip(pick.candidates, good, strict=True) if is_good]


class _Remembering:
    """A cost; knows which differences of the last answer count as none."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.tie_s = 0.0

    def __call__(
        self, request: Request, endpoints: Sequence[Endpoint], forecast: Forecast, now_s: float
    ) -> Costs:
        costs = self._cost(request, endpoints, forecast, now_s)
        self.tie_s = costs.tie_s
        return costs


class _Work(NamedTuple):
    """All that is in front of a request, as one."""

    work_s: float
    dispatched_s: float
    blind: bool = False


class _KnownRates(RateLearner):
    """Told, not learned."""

    def __init__(self, rates: Mapping[int, Rates]) -> None:
        super().__init__()
        self._known = rates

    def rates(self, slot: int) -> Rates:
        return self._known[slot]


def _true_match(match: PrefixMatch, truth: Truth) -> PrefixMatch:
    if not match.blocks:
        return match
    blocks = {slot: true.matched_tokens // match.block_tokens for slot, true in truth.items()}
    by_slot = {slot: held for slot, held in blocks.items() if held}
    return msgspec.structs.replace(match, by_slot=by_slot)


def _true_forecast(own: Forecast, endpoints: Iterable[Endpoint], truth: Truth) -> Forecast:
    """As if it had learned the engines' constants."""
    rates = {slot: rates_of(true.cost) for slot, true in truth.items()}
    forecast = Forecast(_KnownRates(rates), chunk_tokens=own.chunk_tokens)
    forecast.output_tokens_mean = own.output_tokens_mean
    for endpoint in endpoints:
        forecast.joined(endpoint)
    return forecast


def _as_it_is(endpoint: Endpoint, true: TrueState, rates: Constants, now_s: float) -> Endpoint:
    """A copy with the true load; how long that takes, by `rates`."""
    as_is = copy(endpoint)
    as_is.load = as_is.last_load = msgspec.structs.replace(
        endpoint.last_load,
        at_s=now_s,
        waiting=true.queued,
        running=true.requests - true.queued,
        kv_usage_ratio=true.kv_usage_ratio,
    )
    as_is.inflight_requests, as_is.waiting_requests = true.requests, true.unanswered
    as_is.inflight_tokens, as_is.context_tokens = true.prefill_tokens, true.context_tokens
    as_is.foreign_requests = as_is.foreign_waiting = 0
    # The step being taken is told in seconds; who is wrong about the rates is so about it, too.
    rest_s = true.rest_s * rates.token_s / rates_of(true.cost).token_s
    work_s = true.prefill_tokens * rates.token_s + true.prefill_pairs * rates.pair_s
    as_is.backlog = Backlog()
    as_is.backlog.add(_Work(rest_s + work_s, now_s))
    return as_is
