"""A time made of three parts, learned for a pool of engines of different speed.

What is observed is modelled as

    seconds = level of the endpoint * (w1*part1 + w2*part2 + w3*part3)

where the parts are seconds by the prior rates. The weights (`Shape`) belong to the pool: they say
how the model's parts relate, which one endpoint alone learns too slowly. The level (`Evidence`)
belongs to the endpoint: how many times the prior's seconds it needs.

Weights: ridge regression on the parts' shares, over about the last `SHAPE_MEMORY` observations of
the pool, with the observations' mean taken out. So the weights carry ratios only, never the level,
and where the observations cannot tell the parts apart the prior's ratios stay.

Level: the weighted median of observed / predicted over the endpoint's newest observations. Half of
them may be garbage of any size, and a speed that changed is found once half of them are new. Time
does not age them, work does: idle hours change nothing. In log space the level is drawn to the
pool's with the weight of `PSEUDO_COUNT` observations, the pool's in the same way to its own prior.

An endpoint that gets far less than its share of the pool's work forgets, so that one that was
slow once is tried again.

Cost: `learn` takes about 25 us, whatever the number of endpoints: it refreshes the level of its own
endpoint and, every few times, of one other, in turn.
"""

from __future__ import annotations

import math
from collections import deque

Parts = tuple[float, float, float]
"""Seconds by the prior rates, each >= 0, not all 0."""

PSEUDO_COUNT = 2.0
"""Weight of the pool's level against an endpoint's own observations: a single odd observation
moves an endpoint by a third of it, thirty leave 6 % to the pool."""
WINDOW_COUNT = 32.0
"""Observations an endpoint remembers: the median of a realistic mix is then within about 5 %, and
a change of speed shows after 16 to 20 prefills."""
LEVEL_MAX = 100.0
"""Levels stay within 100 times the prior; with `WEIGHT_MAX` all rates within 1000 times."""
WEIGHT_MAX = 10.0
"""Weights stay within [1 / WEIGHT_MAX, WEIGHT_MAX]."""
SHAPE_MEMORY = 200.0
"""Observations of the whole pool that the shape remembers; hardware mixes change slower."""
RIDGE = 0.5
"""Weight of the prior's shape, in observations that consist of one part only. Real ones tell the
parts apart by differences of their shares, so that it takes tens of them."""
RESIDUAL_LOG = 0.3
"""Observations this far off the model (35 %) lose weight in the regression (Huber)."""
OUTLIER_FACTOR = 3.0
"""No observation counts as further off the model than this in the regression."""
REFRESH_EVERY = 4
"""Observations between two refreshes of an endpoint out of turn: they follow the pool's slow
changes, and cost as much as an observation's own."""
STARVED_FACTOR = 50.0
"""An endpoint's evidence is halved when the pool saw this many observations per endpoint and none
from it."""


def predict_s(parts: Parts, weights: Parts) -> float:
    """Seconds at level 1."""
    return parts[0] * weights[0] + parts[1] * weights[1] + parts[2] * weights[2]


class Shape:
    """How the three parts relate; see the module."""

    def __init__(self) -> None:
        self.weights: Parts = (1.0, 1.0, 1.0)
        self._xx = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Upper triangle of the sum of share products: 00 01 02 11 12 22."""
        self._xy: Parts = (0.0, 0.0, 0.0)
        self._sum = 0.0
        self._y = 0.0

    def learn(self, parts: Parts, observed_s: float) -> None:
        """One observation, divided by its endpoint's level."""
        prior_s = parts[0] + parts[1] + parts[2]
        x0, x1, x2 = parts[0] / prior_s, parts[1] / prior_s, parts[2] / prior_s
        expected = predict_s((x0, x1, x2), self.weights)
        ratio = observed_s / prior_s / expected
        ratio = min(max(ratio, 1 / OUTLIER_FACTOR), OUTLIER_FACTOR)
        trust = min(1.0, RESIDUAL_LOG / max(abs(math.log(ratio)), 1e-9))
        y = ratio * expected
        decay = 1 - 1 / SHAPE_MEMORY
        s00, s01, s02, s11, s12, s22 = self._xx
        t0, t1, t2 = trust * x0, trust * x1, trust * x2
        self._xx = (
            decay * s00 + t0 * x0,
            decay * s01 + t0 * x1,
            decay * s02 + t0 * x2,
            decay * s11 + t1 * x1,
            decay * s12 + t1 * x2,
            decay * s22 + t2 * x2,
        )
        s0, s1, s2 = self._xy
        self._xy = (decay * s0 + t0 * y, decay * s1 + t1 * y, decay * s2 + t2 * y)
        self._sum = decay * self._sum + trust
        self._y = decay * self._y + trust * y
        self._solve()

    def _solve(self) -> None:
        """One round of Gauss-Seidel from the last solution: each observation moves it little."""
        a00, a01, a02, a11, a12, a22 = self._xx
        mean = self._y / self._sum
        b0, b1, b2 = (RIDGE + s / mean for s in self._xy)
        w0, w1, w2 = self.weights
        w0 = _within((b0 - a01 * w1 - a02 * w2) / (a00 + RIDGE))
        w1 = _within((b1 - a01 * w0 - a12 * w2) / (a11 + RIDGE))
        w2 = _within((b2 - a02 * w0 - a12 * w1) / (a22 + RIDGE))
        self.weights = (w0, w1, w2)


def _within(weight: float) -> float:
    return min(max(weight, 1 / WEIGHT_MAX), WEIGHT_MAX)


class Evidence:
    """The newest observations of one endpoint."""

    __slots__ = ("_count", "_seen", "level_log", "newest", "weight")

    def __init__(self) -> None:
        self.level_log = 0.0
        """Logarithm of the weighted median of observed / predicted."""
        self.weight = 0.0
        """What the observations are worth, in observations, 0..`WINDOW_COUNT` and a bit."""
        self.newest = 0
        """Number of the pool's observation that was this endpoint's newest."""
        self._seen: deque[tuple[Parts, float, float, float]] = deque()
        """Parts, seconds observed, count, worth."""
        self._count = 0.0

    def add(self, parts: Parts, observed_s: float, count: float, worth: float) -> None:
        """Remember one observation; see `PoolFit.learn`."""
        self._seen.append((parts, observed_s, count, worth))
        self._count += count
        self.trim(WINDOW_COUNT)

    def trim(self, count: float) -> None:
        """Drop the oldest observations that are not needed to make up `count`."""
        while self._seen and self._count - self._seen[0][2] >= count:
            self._count -= self._seen.popleft()[2]

    def refresh(self, weights: Parts) -> None:
        """Compute level and weight for these weights of the parts."""
        w0, w1, w2 = weights
        ratios = [
            (observed_s / (w0 * p0 + w1 * p1 + w2 * p2), worth)
            for (p0, p1, p2), observed_s, _, worth in self._seen
        ]
        ratios.sort()
        self.weight = sum([worth for _, worth in ratios])
        self.level_log = _median_log(ratios, self.weight)


def _median_log(ratios: list[tuple[float, float]], weight: float) -> float:
    """Logarithm of the weighted median, within the bounds of a level."""
    below, found = 0.0, 1.0
    for ratio, worth in ratios:
        below += worth
        found = ratio
        if below >= weight / 2:
            break
    return math.log(min(max(found, 1 / LEVEL_MAX), LEVEL_MAX))


class PoolFit:
    """One kind of time, learned for every endpoint of a pool; see the module."""

    def __init__(self) -> None:
        self.shape = Shape()
        self._evidence: dict[int, Evidence] = {}
        self._observations = 0
        self._logs = 0.0
        self._weights = 0.0
        self._turn: deque[int] = deque()
        """Slots in the order in which they are refreshed."""
        self._past_log: float | None = None
        """Level of the endpoint that was the last to leave."""

    def learn(
        self,
        slot: int,
        parts: Parts,
        observed_s: float,
        *,
        count: float,
        worth: float,
        shapes: bool = True,
    ) -> int | None:
        """One observation.

        Args:
            count: requests it stands for, > 0.
            worth: the same, less for what says less about the level; > 0.
            shapes: the parts are known well enough to tell what share each has in the time.
        Returns: another slot whose level may have changed, if any.
        """
        evidence = self._evidence.get(slot)
        if evidence is None:
            evidence = self._evidence[slot] = Evidence()
            self._turn.append(slot)
        self._observations += 1
        evidence.newest = self._observations
        evidence.add(parts, observed_s, count, worth)
        self._refresh(evidence)
        if shapes:
            self.shape.learn(parts, observed_s / math.exp(evidence.level_log))
        if self._observations % REFRESH_EVERY:
            return None
        self._turn.rotate(-1)
        other = self._turn[0]
        if other == slot:
            return None
        self._refresh(self._evidence[other])
        return other

    def _refresh(self, evidence: Evidence) -> None:
        """Keep the pool's sums in step with one endpoint."""
        self._take_out(evidence)
        evidence.refresh(self.shape.weights)
        silent = self._observations - evidence.newest
        evidence.weight *= 0.5 ** (silent / (STARVED_FACTOR * len(self._evidence)))
        self._logs += evidence.weight * evidence.level_log
        self._weights += evidence.weight

    def _take_out(self, evidence: Evidence) -> None:
        self._logs -= evidence.weight * evidence.level_log
        self._weights = max(0.0, self._weights - evidence.weight)

    def forget(self, slot: int) -> None:
        """The endpoint left."""
        evidence = self._evidence.pop(slot, None)
        if evidence is None:
            return
        self._turn.remove(slot)
        self._take_out(evidence)
        if not self._evidence:
            self._past_log = evidence.level_log
            self._logs = self._weights = 0.0

    def doubt(self, slot: int, count: float) -> None:
        """Keep the newest `count` observations only: the endpoint may have changed."""
        evidence = self._evidence.get(slot)
        if evidence is not None:
            evidence.trim(count)
            self._refresh(evidence)

    def pool_log(self, prior_log: float = 0.0) -> float:
        """Logarithm of the pool's level, drawn to `prior_log`, or to what is known of endpoints
        that left when all did."""
        if self._past_log is not None:
            prior_log = self._past_log
        return (self._logs + PSEUDO_COUNT * prior_log) / (self._weights + PSEUDO_COUNT)

    def apart_log(self, slot: int) -> float | None:
        """How much slower the endpoint is than those of which something is known, as far as it is
        known itself; `None` = nothing is. The prior has no part in it: it would make whoever is
        known look different from whoever is not."""
        evidence = self._evidence.get(slot)
        if evidence is None or not evidence.weight or not self._weights:
            return None
        apart = evidence.level_log - self._logs / self._weights
        return apart * evidence.weight / (evidence.weight + PSEUDO_COUNT)

    def level_log(self, slot: int, prior_log: float) -> float:
        """Logarithm of the endpoint's level, drawn to `prior_log`."""
        evidence = self._evidence.get(slot)
        if evidence is None:
            return prior_log
        total = evidence.weight + PSEUDO_COUNT
        return (evidence.weight * evidence.level_log + PSEUDO_COUNT * prior_log) / total
