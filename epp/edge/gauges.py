"""What the pools are like now, as gauges: read from their state when somebody asks.

Series of an endpoint or a pool that is gone are gone with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, pstdev

from epp.core.serving import Serving
from epp.edge.latency import latency_gauges
from epp.edge.metrics import OUR_PREFIX, PREFIX, Reading

PRODUCER = "inflight-load-producer"
INDEXER = ("approx-prefix-cache-producer", "approx-prefix-cache-producer")

Gauges = dict[str, list[Reading]]


def pool_gauges(servings: Iterable[Serving], now_s: float) -> Mapping[str, list[Reading]]:
    """The gauges of all pools; what has no label for the pool is summed over them."""
    gauges: Gauges = {
        f"{OUR_PREFIX}endpoints": [],
        f"{OUR_PREFIX}held_requests": [((), 0.0)],
    }
    for serving in servings:
        for read in (_endpoints, _loads, _charges, _prefix, _held, _latency):
            for name, readings in read(serving, now_s).items():
                gauges[name] = _merged(gauges.get(name, []), readings)
    return gauges


def _merged(some: list[Reading], more: list[Reading]) -> list[Reading]:
    if not some:
        return more
    sums = dict(some)
    for labels, value in more:
        sums[labels] = sums.get(labels, 0.0) + value
    return list(sums.items())


def _endpoints(serving: Serving, now_s: float) -> Gauges:
    pool = serving.decider.pool
    fresh = sum(e.load.at_s is not None for e in pool.endpoints)
    ejected = sum(e.ejected_until_s > now_s for e in pool.endpoints)
    ready = len(pool.snapshot(now_s).endpoints)
    return {
        f"{PREFIX}ready_endpoints": [((serving.pool_name,), ready)],
        f"{OUR_PREFIX}endpoints": [
            (("alive",), len(pool.endpoints)),
            (("unknown",), len(pool.endpoints) - fresh),
            (("ejected",), ejected),
        ],
    }


def _loads(serving: Serving, _now_s: float) -> Gauges:
    name = (serving.pool_name,)
    fresh = [e for e in serving.decider.pool.endpoints if e.load.at_s is not None]
    gauges: Gauges = {
        f"{PREFIX}per_endpoint_queue_size": [
            ((*name, e.address), e.load.waiting) for e in fresh if e.load.waiting is not None
        ]
    }
    for suffix, values in (
        ("kv_cache_utilization", [e.load.kv_usage_ratio for e in fresh]),
        ("queue_size", [e.load.waiting for e in fresh]),
        ("running_requests", [e.load.running for e in fresh]),
    ):
        known = [float(v) for v in values if v is not None]
        if known:
            gauges[f"{PREFIX}average_{suffix}"] = [(name, fmean(known))]
            gauges[f"{PREFIX}std_dev_{suffix}"] = [(name, pstdev(known))]
    return gauges


def _charges(serving: Serving, _now_s: float) -> Gauges:
    endpoints = serving.decider.pool.endpoints
    return {
        f"{PREFIX}inflight_{suffix}": [
            ((e.name, e.namespace, PRODUCER), getattr(e, attribute)) for e in endpoints
        ]
        for suffix, attribute in (("requests", "inflight_requests"), ("tokens", "inflight_tokens"))
    }


def _prefix(serving: Serving, _now_s: float) -> Gauges:
    prefix = serving.decider.prefix
    if prefix is None:
        return {}
    state = prefix.state()
    return {
        f"{PREFIX}prefix_indexer_size": [(INDEXER, state.distinct_blocks)],
        f"{OUR_PREFIX}prefix_held_blocks": [((), state.held_blocks)],
        f"{OUR_PREFIX}prefix_held_blocks_max": [((), state.held_blocks_max)],
    }


def _held(serving: Serving, _now_s: float) -> Gauges:
    if serving.hold is None:
        return {}
    return {f"{OUR_PREFIX}held_requests": [((), serving.hold.requests)]}


def _latency(serving: Serving, now_s: float) -> Gauges:
    return dict(latency_gauges(serving.decider, now_s))
