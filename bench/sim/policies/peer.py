"""A rule with its own account is a policy; `wish` without `charge` is what a hold asks for."""
# ruff: noqa: ARG002 - the simulator's methods take more than an account needs

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

from bench.sim.model import Policy, SimRequest, View
from bench.sim.policies.account import Account


class Rule(Protocol):
    """Where a request wants to go. Pure but for chance: it changes neither account nor view."""

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        """One of `view.endpoints`, of which there is at least one."""


class Wishing(Policy, Protocol):
    """A policy whose `choose` is `wish` and then `charge`, so that time may pass between them."""

    def wish(self, request: SimRequest, view: View, now_s: float) -> int:
        """The endpoint it would choose now; charges nothing. Needs an endpoint alive."""

    def charge(self, request: SimRequest, endpoint: int, view: View, now_s: float) -> None:
        """The request goes to this endpoint now."""


class Peer:
    """`Wishing` made of a rule and an account."""

    def __init__(self, rule: Rule, *, pins: bool = False) -> None:
        """`pins`: the rule reads `EndpointLoad.pins`."""
        self.rule = rule
        self.account = Account(pins=pins)

    def wish(self, request: SimRequest, view: View, now_s: float) -> int:
        return self.rule.wish(request, view, self.account, now_s)

    def charge(self, request: SimRequest, endpoint: int, view: View, now_s: float) -> None:
        tokens = uncached_tokens(request, view, endpoint)
        self.account.charge(request, endpoint, prefill_tokens=tokens)

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:
        if not view.endpoints:
            return None
        endpoint = self.wish(request, view, now_s)
        self.charge(request, endpoint, view, now_s)
        return endpoint

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        self.account.first_byte(request)

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        self.account.release(request)

    def left(self, endpoint: int) -> None:
        self.account.left(endpoint)


def uncached_tokens(request: SimRequest, view: View, endpoint: int) -> int:
    """Prompt tokens the endpoint has to compute, >= 1: the last token is always computed."""
    return max(1, request.prompt_tokens - view.matched_tokens(request, endpoint))


def least(endpoints: Iterable[int], cost: Callable[[int], float], rng: Random) -> int:
    """The endpoint of the lowest cost, ties by chance; of at least one endpoint."""
    best: list[int] = []
    lowest = float("inf")
    for endpoint in endpoints:
        value = cost(endpoint)
        if value < lowest:
            lowest, best = value, [endpoint]
        elif value == lowest:
            best.append(endpoint)
    return best[0] if len(best) == 1 else rng.choice(best)
