"""Rules that do not look at prefixes, and the greedy oracle that looks at everything."""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from random import Random
from typing import cast

from bench.sim.model import SimRequest, TrueView, View
from bench.sim.policies.account import Account
from bench.sim.policies.peer import least


class RoundRobin:
    """The next endpoint in order after the one used last."""

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        later = (endpoint for endpoint in view.endpoints if endpoint > account.last)
        return next(later, view.endpoints[0])


class Chance:
    """Any endpoint, all equally likely."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        return self._rng.choice(view.endpoints)


class LeastRequests:
    """Fewest requests in flight."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        return least(view.endpoints, lambda each: account.load(each).requests, self._rng)


class LeastTokens:
    """Fewest uncached prompt tokens before their first token; the request's own do not count.

    Source: llm-d `token-load-scorer` over all endpoints, without its affinity filter.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        return least(view.endpoints, lambda each: account.load(each).prefill_tokens, self._rng)


class TwoChoices:
    """Of two different random endpoints the one with fewer requests in flight."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        drawn = self._rng.sample(view.endpoints, min(2, len(view.endpoints)))
        return least(drawn, lambda each: account.load(each).requests, self._rng)


class Oracle:
    """Lowest true time to first token if nothing else came. Not a bound: it ignores the harm that
    a request does to the others."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        true = cast("TrueView", view)
        return least(
            true.endpoints, lambda each: true.expected_ttft_s(request, each, now_s), self._rng
        )
