"""How much prefix reuse a workload allows at all: what routing can be measured against.

One cache stands for the whole pool, requests pass through it in order of arrival, and each request
finds the leading blocks that are there. Unbounded, it gives the share that no router can exceed;
of a bounded size, under LRU, what a pool of that size holds if no block is kept twice; under
Belady's rule (evict what is needed last, keep nothing that is not needed again) what clairvoyant
eviction could add. At least one token of a prompt is always computed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterator
from itertools import takewhile

import msgspec

from bench.sim.model import SimRequest, Workload


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of all prompt tokens, 0..1."""

    capacity_tokens: int
    """Of all endpoints together."""
    infinite_ratio: float
    lru_ratio: float


def ceiling(workload: Workload, capacity_tokens: int) -> Ceiling:
    """The ceilings of a workload on a pool with so much KV cache."""
    return Ceiling(
        capacity_tokens=capacity_tokens,
        infinite_ratio=infinite_ratio(workload),
        lru_ratio=pooled_lru_ratio(workload, capacity_tokens),
    )


def infinite_ratio(workload: Workload) -> float:
    """Share of prompt tokens that an unbounded pooled cache holds, 0..1."""
    cache: set[int] = set()
    found = 0
    for request in workload.requests:
        found += _found_tokens(request, cache, workload.block_tokens)
        cache.update(request.blocks)
    return found / _prompt_tokens(workload)


def pooled_lru_ratio(workload: Workload, capacity_tokens: int) -> float:
    """The same for a pooled cache that evicts what was used longest ago. A prompt's end counts as
    used before its beginning, as engines release it."""
    capacity = capacity_tokens // workload.block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in workload.requests:
        found += _found_tokens(request, cache, workload.block_tokens)
        for name in reversed(request.blocks):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found / _prompt_tokens(workload)


def pooled_belady_ratio(workload: Workload, capacity_tokens: int) -> float:
    """The same for a pooled cache that knows the future of every block."""
    capacity = capacity_tokens // workload.block_tokens
    uses: defaultdict[int, deque[int]] = defaultdict(deque)
    for number, request in enumerate(workload.requests):
        for name in request.blocks:
            uses[name].append(number)
    cache: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    found = 0
    for request in workload.requests:
        found += _found_tokens(request, cache, workload.block_tokens)
        for depth, (name, next_use) in enumerate(_next_uses(request, uses)):
            if next_use is None:
                cache.pop(name, None)
                continue
            cache[name] = next_use
            # Of what is needed at one time, the end of a prefix goes first: it needs its beginning.
            heapq.heappush(farthest, (-next_use, -depth, name))
        while len(cache) > capacity:
            use, _, name = heapq.heappop(farthest)
            if cache.get(name) == -use:
                del cache[name]
    return found / _prompt_tokens(workload)


def _next_uses(
    request: SimRequest, uses: defaultdict[int, deque[int]]
) -> Iterator[tuple[int, int | None]]:
    for name in request.blocks:
        later = uses[name]
        later.popleft()
        yield name, later[0] if later else None


def _found_tokens(request: SimRequest, cache: Container[int], block_tokens: int) -> int:
    blocks = sum(1 for _ in takewhile(cache.__contains__, request.blocks))
    if blocks * block_tokens >= request.prompt_tokens:
        blocks -= 1
    return blocks * block_tokens


def _prompt_tokens(workload: Workload) -> int:
    return sum(request.prompt_tokens for request in workload.requests)
