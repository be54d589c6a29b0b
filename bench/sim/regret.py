"""What decisions cost in time to first token against the best there was, and why.

The regret of a decision is the expected time to first token at the endpoint picked, less that at
the best one, both by the engines' true state when the request is sent (`bench.sim.oracle`). It is
0 or more, and looks at this request alone: a policy that spares others pays for it here.

Why is found by deciding again, each time with one more thing known truly, in this order:

    cache        what the engines' prefix caches hold, or will before the request is admitted
    load         requests in each engine, prefill work in front, what its KV cache is filled with
    rates        how fast each engine computes
    objective    nothing more to know: what is left is that the policy wants something else than
                 the least time to first token, or picks by chance

A cause is what its step saves, so the causes of a decision add up to its regret. One may be below
0: who knows more may choose worse for this request. What an error of one kind makes of another
counts where it acts: a wrong guess of a cache makes the work in front of later requests wrong,
which is load. A step keeps the endpoint of the one before where that is as good as any, so that
ties and chance make no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from bench.sim.model import SimRequest, TrueView

CAUSES = ("cache", "load", "rates", "objective")


class Judgement(NamedTuple):
    """What a policy thinks of the endpoints, by some knowledge."""

    good: frozenset[int]
    """Those it holds to be best."""
    first: int
    """The one of them it would pick."""


@runtime_checkable
class Rethinking(Protocol):
    """A policy that can tell what it would decide if it knew better."""

    def rethink(self, request: SimRequest, view: TrueView, now_s: float) -> Sequence[Judgement]:
        """By its own knowledge; then with true caches; with true load as well; with true rates as
        well. Changes nothing that a decision depends on. Empty: it cannot tell."""


class Regret(msgspec.Struct, frozen=True):
    """Of one decision; seconds."""

    total_s: float
    """>= 0."""
    causes_s: tuple[float, ...] = ()
    """As in `CAUSES`; empty where the policy cannot decide again."""


def regret_of(
    times_s: Mapping[int, float], chosen: int, judgements: Sequence[Judgement] = ()
) -> Regret:
    """Args:
    times_s: true expected time to first token by endpoint, of all that could be picked.
    judgements: see `Rethinking.rethink`.
    """
    chosen_s, best_s = times_s[chosen], min(times_s.values())
    if not judgements:
        return Regret(chosen_s - best_s)
    at, steps_s = chosen, []
    for judgement in judgements:
        if at not in judgement.good:
            at = judgement.first
        steps_s.append(times_s[at])
    own_s, cache_s, load_s, rates_s = steps_s
    # A policy that picks by chance may not have taken what it holds to be best.
    objective_s = (chosen_s - own_s) + (rates_s - best_s)
    causes_s = (own_s - cache_s, cache_s - load_s, load_s - rates_s, objective_s)
    return Regret(chosen_s - best_s, causes_s)


class RegretFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Regret per decision, averaged over the decisions looked at; seconds."""

    decisions: int
    """How many those are."""
    mean_s: float
    cache_s: float | None = None
    """This and the others: `None` where the policy cannot decide again. They add up to `mean_s`."""
    load_s: float | None = None
    rates_s: float | None = None
    objective_s: float | None = None

    @property
    def causes_s(self) -> tuple[float, ...]:
        """In the order of `CAUSES`; empty where they are not known."""
        known = [getattr(self, f"{cause}_s") for cause in CAUSES]
        return () if None in known else tuple(known)


def regret_figures(regrets: Sequence[Regret]) -> RegretFigures | None:
    """Those of a run; `None` when no decision was looked at."""
    if not regrets:
        return None
    return RegretFigures(
        decisions=len(regrets),
        mean_s=mean(each.total_s for each in regrets),
        **_mean_causes([each.causes_s for each in regrets]),
    )


def averaged_regret(runs: Iterable[RegretFigures | None]) -> RegretFigures | None:
    """Runs of several seeds as one, all of the same weight; `None` when none was looked at."""
    known = [each for each in runs if each is not None]
    if not known:
        return None
    return RegretFigures(
        decisions=sum(each.decisions for each in known),
        mean_s=mean(each.mean_s for each in known),
        **_mean_causes([each.causes_s for each in known]),
    )


def _mean_causes(causes_s: Sequence[Sequence[float]]) -> dict[str, float]:
    if not all(causes_s):
        return {}
    means_s = map(mean, zip(*causes_s, strict=True))
    return {f"{cause}_s": mean_s for cause, mean_s in zip(CAUSES, means_s, strict=True)}
