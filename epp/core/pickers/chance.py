"""The pickers that leave the choice to chance, evenly or by score."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random
from typing import Annotated

import msgspec

from epp.core.model import Endpoint, Plugin

Count = Annotated[int, msgspec.Meta(ge=1)]


class RandomPicker(Plugin, frozen=True):
    """Take any endpoints, all equally likely.

    Cost: 2 us.
    Source: llm-d `random-picker`.
    """

    max_num_of_endpoints: Count = 1
    """Endpoints named to the gateway, >= 1; the reference's default."""

    def __call__(
        self, endpoints: Sequence[Endpoint], totals: Sequence[float], rng: Random
    ) -> list[int]:
        return rng.sample(range(len(totals)), min(self.max_num_of_endpoints, len(totals)))


class WeightedRandomPicker(Plugin, frozen=True):
    """Take endpoints by chance in proportion to their totals, without putting back.

    The first is endpoint i with probability total_i / sum of totals, and so on among those left.
    An endpoint without a positive total comes after all that have one, in random order.

    Cost: 5 us with 64 endpoints; 32 us for more than one.
    Source: llm-d `weighted-random-picker`, which draws U ** (1 / total) and takes the highest; an
        exponential time of rate `total`, earliest first, is the same draw without underflow.
    """

    max_num_of_endpoints: Count = 1
    """Endpoints named to the gateway, >= 1; the reference's default."""

    def __call__(
        self, endpoints: Sequence[Endpoint], totals: Sequence[float], rng: Random
    ) -> list[int]:
        count = len(totals)
        if self.max_num_of_endpoints == 1 and min(totals) >= 0.0 < max(totals):
            return rng.choices(range(count), totals)
        order = rng.sample(range(count), count)
        times = [rng.expovariate(total) if total > 0.0 else inf for total in totals]
        order.sort(key=times.__getitem__)
        return order[: self.max_num_of_endpoints]
