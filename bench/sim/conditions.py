"""What a run is given besides its workload: the fleet, what routers get to see, what policies may
know of both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, Protocol, runtime_checkable

import msgspec

from bench.engine.cost import CostModel
from bench.sim.faults import Fault
from bench.sim.hardware import EngineKind
from bench.sim.model import Policy, SimRequest, View


class Fleet(msgspec.Struct, frozen=True):
    """The endpoints at the start of a run."""

    kinds: tuple[EngineKind, ...]
    """One per endpoint."""
    block_tokens: int = 512
    """Of every engine's cache; the workload must name blocks of this size."""

    @classmethod
    def of(
        cls,
        kind: EngineKind,
        endpoints: int,
        kv_blocks: int | None = None,
        block_tokens: int = 512,
        speeds: Sequence[float] | None = None,
    ) -> Fleet:
        """`endpoints` alike.

        Args:
            kv_blocks: capacity of each cache instead of the kind's.
            speeds: factors on the kind's speed, used in turn.
        """
        if kv_blocks is not None:
            kind = msgspec.structs.replace(kind, kv_tokens=kv_blocks * block_tokens)
        factors = speeds or (1.0,)
        kinds = [with_speed(kind, factors[index % len(factors)]) for index in range(endpoints)]
        return cls(tuple(kinds), block_tokens)


def with_speed(kind: EngineKind, factor: float) -> EngineKind:
    """The same kind, faster by `factor`."""
    cost = msgspec.structs.replace(kind.cost, speed=kind.cost.speed * factor)
    return msgspec.structs.replace(kind, cost=cost)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What routers see of the engines, and what goes wrong. The default is the best case."""

    scrape_s: float | None = 0.05
    """Period of each endpoint's scrape; endpoints are scraped at different moments of it.
    `None`: no scrapes."""
    scrape_loss_ratio: float = 0.0
    """Share of the scrapes that fail, 0..1."""
    first_byte_late_s: float = 0.0
    """Seconds after a first byte or an end until the router knows."""
    first_byte_seen: bool = True
    """False: the router is told of ends only, as with answers that do not stream."""
    prefix: Literal["exact", "approximate"] = "exact"
    """exact: what the engine holds; approximate: what this router sent there lately, as much as
    the engine's cache would hold."""
    kv_event_lag_s: float = 0.0
    """Exact only: seconds from the end of a step until what it stored and evicted is known. With
    neither lag nor loss the engine's own cache is asked, blocks of the current step included."""
    kv_event_loss_ratio: float = 0.0
    """Exact only: share of the steps whose events are lost for good, 0..1."""
    routers: int = 1
    """Requests go to the routers in turn; each has its own policy and sees its own requests only.
    """
    faults: tuple[Fault, ...] = ()
    recheck_s: float = 0.02
    """Period at which a policy that holds requests is asked again."""
    retries_max: int = 3
    """Times a request whose endpoint failed is sent again before it is refused."""
    regret_every: int = 0
    """Fill `Run.regrets` for every so manieth request; 0: for none. Looking at each
    doubles what a run costs, at every tenth adds a tenth; the run stays the same."""


class PolicyContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is made from: what a router is configured with or reads from the engines."""

    endpoints: int
    """How many there will ever be, those that join later included; their numbers are below it."""
    block_tokens: int
    kv_tokens: tuple[int, ...]
    """Capacity of each endpoint's KV cache."""
    max_num_batched_tokens: int
    """Of the first endpoint."""
    max_num_seqs: int
    """Of the first endpoint."""
    costs: tuple[CostModel, ...]
    """The true constants of each endpoint: only for policies that say that they use them."""
    rng: Random
    """The policy's own source of chance; follows from the run's seed and the router."""
    scrape_s: float | None
    first_byte_seen: bool


@runtime_checkable
class HoldingPolicy(Policy, Protocol):
    """A policy that may keep requests (`choose` returned `None`) and decides their order."""

    def pass_held(self, view: View, now_s: float) -> Sequence[tuple[SimRequest, int]]:
        """Held requests to let go now and their endpoints, in the order to send them, charged.
        Called while requests are held: after each first byte, end, arrival and change of the
        endpoints that the router sees, and every `Conditions.recheck_s`."""


class PolicyError(Exception):
    """A policy did what none may: an endpoint that is not there, a request kept for ever."""
