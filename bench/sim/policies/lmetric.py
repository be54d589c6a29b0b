"""LMetric: new prefill tokens times batch size, and no knob."""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from random import Random

from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account
from bench.sim.policies.peer import least, uncached_tokens


class LMetric:
    """Lowest (uncached tokens in flight + those of the request) * (requests in flight + 1).

    Source: arXiv 2603.15202 (OSDI'26), read in summary only.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        def cost(endpoint: int) -> float:
            load = account.load(endpoint)
            tokens = load.prefill_tokens + uncached_tokens(request, view, endpoint)
            return tokens * (load.requests + 1)

        return least(view.endpoints, cost, self._rng)
