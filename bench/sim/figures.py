"""What one run is judged by, and how runs of several seeds are compared.

Latencies are of the requests that were answered to their end; a refused or lost request has none,
so a policy that refuses looks faster than it is: read a mean next to `refused`, and goodput, which
counts every request. Percentiles are values that occurred (`bench.measure.percentile`).

Policies are compared in pairs: both meet the same arrivals of the same seed, and what is averaged
over the seeds is the relative difference of each pair, so that what a seed does to every policy
cancels. The interval is Student's t over those differences, n - 1 degrees of freedom. A bootstrap
was not taken: resampling the usual five seeds gives intervals that are too narrow (about 83 %
coverage where 95 % is meant).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

import msgspec

from bench.measure import percentile
from bench.sim.model import Outcome

GOOD_TTFT_S = 2.0
GOOD_ITL_S = 0.050
"""A request counts as good with its first token within the one and its mean time between tokens
within the other."""
QUANTILES = 101
LOAD_POINTS = 60

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, 97.5 %, for 1 to 30 degrees of freedom; the last serves for more: a little wide."""

Sample = tuple[float, Sequence[int]]
"""When, and requests in flight per endpoint."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers."""

    requests: int
    refused: int
    lost: int
    """Neither refused nor ended: 0, or the run was cut off."""
    retries: int
    preemptions: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tpot_p50_s: float | None
    """`None` when every answer had one token."""
    tpot_p99_s: float | None
    e2e_mean_s: float
    hold_mean_s: float
    """From arrival to dispatch: what requests waited in the router."""
    goodput_ratio: float
    """Share of all requests that were good: see `GOOD_TTFT_S`."""
    hit_ratio: float
    """Share of the answered requests' prompt tokens that their engines found in the cache."""
    requests_balance_ratio: float
    """Requests of the endpoint that got most / mean over the endpoints; 1 = even."""
    inflight_balance_ratio: float | None
    """The same for requests in flight, averaged over time; `None` without samples in use."""


class LoadPoint(msgspec.Struct, frozen=True, array_like=True):
    """Requests in flight on the emptiest, the mean and the fullest endpoint, averaged around a
    moment."""

    at_s: float
    least: float
    mean: float
    most: float


def figures_of(
    outcomes: Sequence[Outcome], timeline: Sequence[Sample], *, endpoints: int
) -> Figures:
    """The numbers of a run.

    Args:
        endpoints: those that took part at any time, >= 1.
    Raises: ValueError when no request was answered: there is nothing to tell then.
    """
    answered = [each for each in outcomes if not each.refused and each.ended_s >= 0]
    if not answered:
        raise ValueError(f"none of {len(outcomes)} requests was answered")
    refused = sum(each.refused for each in outcomes)
    ttft_s = sorted(each.ttft_s for each in answered)
    tpot_s = sorted(value for each in answered if (value := each.tpot_s) is not None)
    prompt_tokens = sum(each.request.prompt_tokens for each in answered)
    return Figures(
        requests=len(outcomes),
        refused=refused,
        lost=len(outcomes) - refused - len(answered),
        retries=sum(each.retries for each in outcomes),
        preemptions=sum(each.preemptions for each in outcomes),
        ttft_mean_s=mean(ttft_s),
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p90_s=percentile(ttft_s, 0.9),
        ttft_p99_s=percentile(ttft_s, 0.99),
        ttft_max_s=ttft_s[-1],
        tpot_p50_s=percentile(tpot_s, 0.5) if tpot_s else None,
        tpot_p99_s=percentile(tpot_s, 0.99) if tpot_s else None,
        e2e_mean_s=mean(each.e2e_s for each in answered),
        hold_mean_s=mean(each.dispatched_s - each.request.arrival_s for each in answered),
        goodput_ratio=sum(map(is_good, answered)) / len(outcomes),
        hit_ratio=sum(each.cached_tokens for each in answered) / prompt_tokens,
        requests_balance_ratio=_requests_balance(answered, endpoints),
        inflight_balance_ratio=_inflight_balance(timeline),
    )


def is_good(outcome: Outcome) -> bool:
    """Whether an answered request met both limits of goodput; one token has no second limit."""
    itl_s = outcome.tpot_s
    return outcome.ttft_s <= GOOD_TTFT_S and (itl_s is None or itl_s <= GOOD_ITL_S)


def _requests_balance(answered: Sequence[Outcome], endpoints: int) -> float:
    counts = Counter(each.endpoint for each in answered)
    return max(counts.values()) * endpoints / len(answered)


def _inflight_balance(timeline: Sequence[Sample]) -> float | None:
    used = [loads for _, loads in timeline if loads]
    total = sum(mean(loads) for loads in used)
    return sum(map(max, used)) / total if total else None


def ttft_quantiles_s(outcomes: Sequence[Outcome]) -> list[float]:
    """TTFT of the answered requests at 0, 1, ... 100 %."""
    values = sorted(e.ttft_s for e in outcomes if not e.refused and e.ended_s >= 0)
    return [percentile(values, at / (QUANTILES - 1)) for at in range(QUANTILES)]


def load_over_time(timeline: Sequence[Sample], points: int = LOAD_POINTS) -> list[LoadPoint]:
    """The load of the endpoints in at most `points` equal stretches of the samples."""
    used = [(at_s, loads) for at_s, loads in timeline if loads]
    size = -(-len(used) // points) or 1
    stretches = (used[at : at + size] for at in range(0, len(used), size))
    return [
        LoadPoint(
            round(mean(at_s for at_s, _ in each), 1),
            round(mean(min(loads) for _, loads in each), 2),
            round(mean(mean(loads) for _, loads in each), 2),
            round(mean(max(loads) for _, loads in each), 2),
        )
        for each in stretches
    ]


# -- several seeds -------------------------------------------------------------------------


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % confidence interval; without one (a single value) both ends are None."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """Of a relative difference where less is better: `better`, `worse`, `level` when 0 lies
        within, `one seed` when nothing can be said."""
        if self.low is None or self.high is None:
            return "one seed"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "level"


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values (at least one) with Student's t interval."""
    middle = mean(values)
    if len(values) < 2:
        return Interval(middle)
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """How much larger `values` are, relative to `base`, seed by seed: 0.05 = 5 % more.

    Args:
        values, base: one per seed, in the same order; the base above 0.
    Raises: ValueError when they are not pairs.
    """
    return t_interval([value / other - 1 for value, other in zip(values, base, strict=True)])
