"""Pools whose endpoints have round rates, so that costs can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.inflight import Charge, Inflight, Prefill
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import Forecast
from epp.core.latency.rates import RateLearner, Rates
from epp.core.model import Endpoint, EndpointSpec, Load, PrefixMatch, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Members, Pool, Scraped
from epp.core.schedule import Cost, NamedFilter, Profile

BLOCK = 64
ROUND = Rates(token_s=0.001, pair_s=1e-6, step_s=0.1, step_request_s=0.01, step_token_s=1e-4)
LINEAR = Rates(token_s=0.001, pair_s=0.0, step_s=0.0, step_request_s=0.0, step_token_s=0.0)
"""A prefill takes a millisecond a token, and nothing else takes time."""


class Told(RateLearner):
    """Has the rates it is given, and writes down what it is told."""

    def __init__(self, rates: Rates = ROUND, by_slot: Mapping[int, Rates] | None = None) -> None:
        super().__init__(rates)
        self.by_slot = dict(by_slot or {})
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def rates(self, slot: int) -> Rates:
        return self.by_slot.get(slot) or super().rates(slot)

    def joined(self, slot: int) -> None:
        self.calls.append(("joined", slot, {}))

    def forget(self, slot: int) -> None:
        self.calls.append(("forget", slot, {}))

    def restarted(self, slot: int) -> None:
        self.calls.append(("restarted", slot, {}))

    def histograms(self, slot: int, **said: Any) -> None:
        self.calls.append(("histograms", slot, said))

    def first_byte(self, slot: int, **said: Any) -> None:
        self.calls.append(("first_byte", slot, said))

    def decoded(self, slot: int, **said: Any) -> None:
        self.calls.append(("decoded", slot, said))


def endpoints(count: int, *, proven: bool = True) -> list[Endpoint]:
    """Endpoints outside of any pool, slots from 0."""
    made = [Endpoint(spec(n), n) for n in range(count)]
    for endpoint in made:
        endpoint.proven = proven
    return made


def spec(n: int, uid: str = "") -> EndpointSpec:
    return EndpointSpec(host=f"10.0.0.{n + 1}", port=8000, uid=uid)


def forecast_of(
    members: list[Endpoint], rates: Rates = ROUND, by_slot: Mapping[int, Rates] | None = None
) -> Forecast:
    forecast = Forecast(Told(rates, by_slot))
    for endpoint in members:
        forecast.joined(endpoint)
    return forecast


def charged(
    inflight: Inflight,
    endpoint: Endpoint,
    seconds: float,
    *,
    now_s: float,
    prompt_tokens: int = 0,
    **more: Any,
) -> Charge:
    """A request in flight with so much prefill work."""
    prefill = Prefill(prompt_tokens=prompt_tokens, seconds=seconds, **more)
    return inflight.charge(endpoint, prefill, tokens=0, cold=False, now_s=now_s)


def asking(prompt_tokens: int, held: Mapping[int, int] | None = None, **fields: Any) -> Request:
    """A request of which each slot holds so many blocks."""
    match = PrefixMatch(prompt_tokens // BLOCK, BLOCK, held or {})
    return Request(prompt_tokens=prompt_tokens, match=match, **fields)


def world(
    count: int = 2,
    *,
    rates: Rates = LINEAR,
    cost: Cost | None = None,
    filters: tuple[NamedFilter, ...] = (),
    picked: int = 1,
    seed: int = 1,
    proven: bool = True,
) -> Decider:
    """A decider with a pool, its own prefix index and a cost policy."""
    pool = Pool(stale_after_s=1000.0)
    decider = Decider(
        pool=pool,
        profile=Profile(
            "default", filters, (), MaxScorePicker(max_num_of_endpoints=picked),
            cost or ExpectedLatency(),
        ),
        inflight=Inflight(),
        prefix=PrefixKeeper(PrefixParams()),
        rng=Random(seed),
        forecast=Forecast(Told(rates)),
    )  # fmt: skip
    pool.apply(Members(tuple(spec(n) for n in range(count))), 0.0)
    for endpoint in pool.endpoints:
        endpoint.proven = proven
    return decider


def prompt(name: str, tokens: int, *, tail: str = "", tail_tokens: int = 0) -> Request:
    """A request whose prompt is its name over and over, and a tail of its own."""
    data = (name * (4 * tokens))[: 4 * tokens] + (tail * (4 * tail_tokens))[: 4 * tail_tokens]
    return Request(
        id=name + tail, model="m", prompts=(data.encode(),), prompt_tokens=tokens + tail_tokens
    )


def scrape(
    decider: Decider,
    endpoint: Endpoint,
    at_s: float,
    *,
    now_s: float | None = None,
    **fields: Any,
) -> None:
    """The pool is told what a scrape of the endpoint said."""
    load = Load(at_s=at_s, **fields)
    decider.pool.apply(Scraped(endpoint, load), at_s if now_s is None else now_s)


def left_over(decider: Decider, extra: tuple[Endpoint, ...] = ()) -> list[tuple[object, ...]]:
    """Endpoints whose accounts are not at zero."""
    accounts = [
        (
            e.address, e.inflight_requests, e.waiting_requests, e.inflight_tokens,
            e.context_tokens, len(e.backlog), e.backlog.work_s, e.kv.tokens,
        )
        for e in (*decider.pool.endpoints, *extra)
    ]  # fmt: skip
    return [account for account in accounts if any(account[1:])]
