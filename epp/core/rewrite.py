"""Which other model a request for a model is sent to: rules, and how they share requests out.

Exactly one rule decides, and its target is not looked up again. A rule that names the model comes
before all that match everything; among equals the first one does. A rule that decides may still
leave the model alone: it has no targets, or the target it chose has an empty name.

Weights count relative to their sum. A target without one is never chosen where another target has
one, and neither is one of weight 0; if that leaves none, all have the same share.

Source: InferenceModelRewrite of llm-d. Which rule decides is the same; where two objects are
equally old it is the caller's order that counts, not chance.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from random import Random

from epp.core.structs import Frozen


class RewriteTarget(Frozen, frozen=True):
    """A model that requests are sent to."""

    model: str
    """`""` = the one that was asked for."""
    weight: int | None = None
    """Share of the requests, in units of the sum over the rule's targets; `None` = not given."""


class RewriteRule(Frozen, frozen=True):
    """Sends requests for some models to other ones."""

    name: str
    """Of the object that the rule stands in."""
    models: frozenset[str]
    """Names that match, exactly; empty = every name, also none at all."""
    targets: tuple[RewriteTarget, ...]
    created: str = ""
    """When the object was created (RFC 3339); for people, the order of rules is their list's."""
    index: int = 0
    """The rule's place in its object, from 0."""


class Rewrites:
    """All rules of one pool.

    Args:
        rules: by precedence, the strongest first.
    """

    def __init__(self, rules: tuple[RewriteRule, ...]) -> None:
        self.rules = rules
        self._exact: dict[str, _Split] = {}
        self._generic: _Split | None = None
        for rule in rules:
            split = _Split(rule)
            for model in rule.models:
                self._exact.setdefault(model, split)
            if not rule.models and self._generic is None:
                self._generic = split

    @property
    def names(self) -> tuple[str, ...]:
        """Of the objects the rules are from, a name per rule, the first that fits wins."""
        return tuple(rule.name for rule in self.rules)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def choose(self, model: str, rng: Random) -> tuple[str, str] | None:
        """The deciding rule's name and the model it chose; `None` = the model stays.

        Args:
            model: as the client wrote it; `""` when it named none.
        """
        split = self._exact.get(model, self._generic)
        if split is None:
            return None
        target = split.draw(rng)
        return (split.name, target) if target else None


class _Split:
    """One rule's targets, ready to draw from."""

    __slots__ = ("_bounds", "_models", "name")

    def __init__(self, rule: RewriteRule) -> None:
        weights = [max(0, target.weight or 0) for target in rule.targets]
        if not any(weights):
            weights = [1] * len(weights)
        shares = [
            (target.model, weight)
            for target, weight in zip(rule.targets, weights, strict=True)
            if weight
        ]
        self.name = rule.name
        self._models = [model for model, _ in shares]
        self._bounds = list(accumulate(weight for _, weight in shares))

    def draw(self, rng: Random) -> str:
        """A target's model, each as often as its weight says; `""` when there is none."""
        if len(self._models) < 2:
            return self._models[0] if self._models else ""
        return self._models[bisect_right(self._bounds, rng.randrange(self._bounds[-1]))]
