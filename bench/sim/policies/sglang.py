"""SGLang's gateway, policy `cache_aware`: two modes with a switch between them."""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account


class SglangCacheAware:
    """Load counts requests in flight.

        most - fewest > balance_abs  and  most > balance_rel * fewest   ->  fewest requests
        best match / prompt > cache_threshold                           ->  the best match
        otherwise                                                       ->  fewest requests

    Ties go to the lowest number, as there; by chance, mean TTFT is up to a tenth worse.
    Source: sgl-model-gateway, cache_aware.rs, library defaults. There the match comes from a tree
    of what was sent.
    """

    def __init__(
        self,
        *,
        cache_threshold: float = 0.5,
        balance_abs: int = 32,
        balance_rel: float = 1.1,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        loads = {each: account.load(each).requests for each in view.endpoints}
        most, fewest = max(loads.values()), min(loads.values())
        imbalanced = most - fewest > self._balance_abs and most > self._balance_rel * fewest
        if not imbalanced:
            matches = {each: view.matched_tokens(request, each) for each in view.endpoints}
            if max(matches.values()) / request.prompt_tokens > self._cache_threshold:
                return max(matches, key=matches.__getitem__)
        return min(loads, key=loads.__getitem__)
