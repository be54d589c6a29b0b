"""Runs a profile: filters, weighted scorers, picker; the pick carries its reasons.

What a plugin reads decides how often it runs. Scorers and leading filters that read neither the
request nor in-flight counters are computed once per snapshot version and kept; a pick then only
adds what is its own. Measured with 64 endpoints by `make bench-pick`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from epp.core.errors import DropReason, RequestDropped
from epp.core.latency.expected import least
from epp.core.latency.forecast import Forecast
from epp.core.model import (
    Costs,
    Endpoint,
    Filter,
    Pick,
    Picker,
    Reads,
    Request,
    Scorer,
    ScoreTerm,
    SparseScorer,
)
from epp.core.pool import Snapshot
from epp.core.structs import Frozen

PER_PICK = Reads.REQUEST | Reads.INFLIGHT


class NamedFilter(Frozen, frozen=True):
    """A filter under the name the configuration gives it."""

    name: str
    filter: Filter


class WeightedScorer(Frozen, frozen=True):
    """A scorer, its name and its weight in the total."""

    name: str
    weight: float
    scorer: Scorer


class Cost(Protocol):
    """A policy that weighs everything itself, in seconds: in place of scorers."""

    def __call__(
        self, request: Request, endpoints: Sequence[Endpoint], forecast: Forecast, now_s: float
    ) -> Costs: ...


class Profile(Frozen, frozen=True):
    """A scheduling profile, ready to run: filters, then either weighted scorers and a picker, or a
    cost."""

    name: str
    filters: tuple[NamedFilter, ...]
    scorers: tuple[WeightedScorer, ...]
    picker: Picker
    """With a cost, only its number of endpoints counts."""
    cost: Cost | None = None
    predicts: bool = True
    """Whether plugins that read `Request.predictions` get any."""
    tpot_ratio: float = 1.0
    """What of a predicted time per output token they are told; 0 = no promise about it breaks."""

    @property
    def needs_predictions(self) -> bool:
        """Whether `Request.predictions` are made: a plugin reads them."""
        if not self.predicts:
            return False
        plugins = (*(f.filter for f in self.filters), *(s.scorer for s in self.scorers))
        return any(getattr(plugin, "needs_predictions", False) for plugin in plugins)


class _Base(Frozen, frozen=True):
    """What is the same for every request of one snapshot version."""

    version: int
    candidates: Sequence[Endpoint]
    """After the leading filters that do not depend on the request."""
    totals: list[float]
    terms: tuple[ScoreTerm, ...]
    places: Mapping[int, int]
    """Slot of a candidate -> its index."""


NO_REQUEST = Request()
NO_FORECAST = Forecast()


class Scheduler:
    """Runs one profile.

    Args:
        profile: what to run.
        rng: the process's one source of chance; ties are broken with it.
    """

    def __init__(self, profile: Profile, rng: Random) -> None:
        self.profile = profile
        self._rng = rng
        filters = profile.filters
        leading = next(
            (i for i, f in enumerate(filters) if f.filter.reads & PER_PICK), len(filters)
        )
        self._cached_filters, self._own_filters = filters[:leading], filters[leading:]
        self._cached_scorers = tuple(s for s in profile.scorers if not s.scorer.reads & PER_PICK)
        self._own_scorers = tuple(
            (s, s.scorer if isinstance(s.scorer, SparseScorer) else None)
            for s in profile.scorers
            if s.scorer.reads & PER_PICK
        )
        self._fallbacks_max = getattr(profile.picker, "max_num_of_endpoints", 1) - 1
        self._total_max = sum(s.weight for s in profile.scorers)
        self._base = _Base(-1, (), [], (), {})

    def pick(
        self,
        request: Request,
        snapshot: Snapshot,
        eligible: Sequence[Endpoint] | None = None,
        *,
        forecast: Forecast = NO_FORECAST,
        now_s: float = 0.0,
    ) -> Pick:
        """Choose an endpoint.

        Args:
            eligible: where given, the part of the snapshot this request may go to (the gateway's
                subset); `None` = all of it.
            forecast, now_s: what a cost reads.
        Raises: RequestDropped(NO_ENDPOINTS) when nothing is left to choose from.
        """
        if eligible is None:
            base = self._base
            if base.version != snapshot.version:
                base = self._base = self._prepare(snapshot.endpoints, snapshot.version)
        else:
            base = self._prepare(eligible, -1)
        candidates: Sequence[Endpoint] = base.candidates
        for named in self._own_filters:
            candidates = named.filter(request, candidates)
        if not candidates:
            raise RequestDropped(DropReason.NO_ENDPOINTS, self._why_none(snapshot, eligible))
        if self.profile.cost is not None:
            costs = self.profile.cost(request, candidates, forecast, now_s)
            return self._cheapest(candidates, costs)
        if len(candidates) != len(base.candidates):
            base = self._score(candidates, -1)
        totals, terms = self._add_own(request, base)
        assert self._in_range(totals), _culprit(terms)
        order = self.profile.picker(candidates, totals, self._rng)
        return Pick(
            endpoint=candidates[order[0]],
            fallbacks=tuple([candidates[i] for i in order[1:]]),
            candidates=candidates,
            totals=totals,
            terms=terms,
            profile=self.profile.name,
        )

    def _cheapest(self, candidates: Sequence[Endpoint], costs: Costs) -> Pick:
        seconds = costs.seconds
        assert min(seconds) >= 0.0, "a negative cost"
        first = least(costs, candidates, self._rng)
        fallbacks: tuple[Endpoint, ...] = ()
        if self._fallbacks_max:
            order = sorted(range(len(seconds)), key=seconds.__getitem__)
            others = [candidates[i] for i in order if i != first]
            fallbacks = tuple(others[: self._fallbacks_max])
        return Pick(
            endpoint=candidates[first],
            fallbacks=fallbacks,
            candidates=candidates,
            totals=seconds,
            terms=costs.terms,
            profile=self.profile.name,
            by_cost=True,
        )

    def _add_own(self, request: Request, base: _Base) -> tuple[list[float], tuple[ScoreTerm, ...]]:
        """Totals and terms with those scorers that run for each request."""
        totals, terms = base.totals, list(base.terms)
        for weighted, sparse in self._own_scorers:
            weight = weighted.weight
            if sparse is not None:
                scores = [0.0] * len(totals)
                totals = totals.copy()
                for slot, score in sparse.by_slot(request).items():
                    place = base.places.get(slot)
                    if place is not None:
                        scores[place] = score
                        totals[place] += weight * score
            else:
                scores = weighted.scorer(request, base.candidates)
                totals = [t + weight * s for t, s in zip(totals, scores, strict=True)]
            terms.append(ScoreTerm(weighted.name, weight, scores))
        return totals, tuple(terms)

    def _prepare(self, endpoints: Sequence[Endpoint], version: int) -> _Base:
        for named in self._cached_filters:
            endpoints = named.filter(NO_REQUEST, endpoints)
        return self._score(endpoints, version)

    def _score(self, candidates: Sequence[Endpoint], version: int) -> _Base:
        totals = [0.0] * len(candidates)
        terms = []
        for weighted in self._cached_scorers if candidates else ():
            scores = weighted.scorer(NO_REQUEST, candidates)
            totals = [t + weighted.weight * s for t, s in zip(totals, scores, strict=True)]
            terms.append(ScoreTerm(weighted.name, weighted.weight, scores))
        places = {endpoint.slot: place for place, endpoint in enumerate(candidates)}
        return _Base(version, candidates, totals, tuple(terms), places)

    def _in_range(self, totals: list[float]) -> bool:
        """Whether every score was 0..1, as far as the totals tell. A score outside is a bug of ours
        that clamping would hide; looking at the totals alone saves a pass per scorer. `sum` tells
        of a NaN, which `min` and `max` may miss."""
        slack = 1e-9
        return (
            sum(totals) >= 0.0 and min(totals) >= -slack and max(totals) <= self._total_max + slack
        )

    def _why_none(self, snapshot: Snapshot, eligible: Sequence[Endpoint] | None) -> str:
        if not snapshot.endpoints:
            return "the pool has no endpoint"
        if eligible is not None and not eligible:
            return "no endpoint of the pool is in the subset the gateway allows"
        names = ", ".join(f.name for f in self.profile.filters)
        return f"every endpoint was filtered out by {names} of profile {self.profile.name}"


def _culprit(terms: Sequence[ScoreTerm]) -> str:
    wrong = [t.name for t in terms if not all(0.0 <= score <= 1.0 for score in t.scores)]
    return f"{', '.join(wrong) or 'scorers'}: a score outside 0..1"
