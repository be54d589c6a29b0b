"""Every peer by the name a report shows, and each again with our hold in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bench.sim.conditions import PolicyContext
from bench.sim.model import Policy
from bench.sim.policies.affinity import LlmdAffinity
from bench.sim.policies.dynamo import DynamoLinear
from bench.sim.policies.dynamo_service import DynamoService
from bench.sim.policies.hashing import BoundedHashing
from bench.sim.policies.held import Held
from bench.sim.policies.lmetric import LMetric
from bench.sim.policies.peer import Peer
from bench.sim.policies.sglang import SglangCacheAware
from bench.sim.policies.simple import (
    Chance,
    LeastRequests,
    LeastTokens,
    Oracle,
    RoundRobin,
    TwoChoices,
)

MakePolicy = Callable[[PolicyContext], Policy]

HOLD = "+hold"
"""End of the names of peers with our hold in front."""


def _dynamo(scale: float) -> Callable[[PolicyContext], Peer]:
    def make(context: PolicyContext) -> Peer:
        rule = DynamoLinear(
            context.rng, block_tokens=context.block_tokens, prefill_load_scale=scale
        )
        return Peer(rule, pins=True)

    return make


def _with_hold(make: Callable[[PolicyContext], Peer]) -> MakePolicy:
    return lambda context: Held(make(context), context)


PEERS: Mapping[str, Callable[[PolicyContext], Peer]] = MappingProxyType(
    {
        "round-robin": lambda _: Peer(RoundRobin()),
        "random": lambda context: Peer(Chance(context.rng)),
        "least-requests": lambda context: Peer(LeastRequests(context.rng)),
        "least-tokens": lambda context: Peer(LeastTokens(context.rng)),
        "two-choices": lambda context: Peer(TwoChoices(context.rng)),
        "llm-d-affinity": lambda context: Peer(
            LlmdAffinity(context.rng, block_tokens=context.block_tokens)
        ),
        "lmetric": lambda context: Peer(LMetric(context.rng)),
        "dynamo-1": _dynamo(1.0),
        "dynamo-4": _dynamo(4.0),
        "dynamo-8": _dynamo(8.0),
        "sglang": lambda _: Peer(SglangCacheAware()),
        "sglang-0.3-64-1.5": lambda _: Peer(
            SglangCacheAware(cache_threshold=0.3, balance_abs=64, balance_rel=1.5)
        ),
        "bounded-hashing": lambda _: Peer(BoundedHashing()),
        "oracle": lambda context: Peer(Oracle(context.rng)),
    }
)

POLICIES: Mapping[str, MakePolicy] = MappingProxyType(
    {
        **PEERS,
        **{name + HOLD: _with_hold(make) for name, make in PEERS.items()},
    }
)

OPTIONAL_POLICIES: Mapping[str, MakePolicy] = MappingProxyType(
    {
        "dynamo-service-1": DynamoService,
        "dynamo-service-8": lambda context: DynamoService(context, prefill_load_scale=8.0),
    }
)
"""What needs the optional extra `dynamo`; making one without it says so."""
