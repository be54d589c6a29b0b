"""Consistent hashing with bounded loads: a prefix has a home; when that is full, its neighbour."""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import ceil

from xxhash import xxh64_intdigest

from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account

PLACES_PER_ENDPOINT = 100


class BoundedHashing:
    """From the place of the prompt's head on the ring, the first endpoint with room.

        room: requests in flight + 1 <= ceil(load_factor * (requests of all + 1) / endpoints)

    The head is the first `prefix_blocks` blocks; a prompt without a full block is its own head.
    Source: KubeAI's prefix hash (load factor 1.25). Four blocks, because in real traces the first
    blocks, the common system prompt, are the same in every request.
    """

    def __init__(self, *, prefix_blocks: int = 4, load_factor: float = 1.25) -> None:
        self._prefix_blocks = prefix_blocks
        self._load_factor = load_factor
        self._members: tuple[int, ...] = ()
        self._ring: list[tuple[int, int]] = []

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        ring = self._ring_of(view.endpoints)
        head = request.blocks[: self._prefix_blocks] or f"request {request.number}"
        start = bisect(ring, (_place(str(head)), -1))
        requests = sum(account.load(each).requests for each in view.endpoints) + 1
        room = ceil(self._load_factor * requests / len(view.endpoints))
        for _, endpoint in ring[start:] + ring[:start]:
            if account.load(endpoint).requests < room:
                return endpoint
        raise AssertionError("a load factor of 1 or more leaves room somewhere")

    def _ring_of(self, endpoints: Sequence[int]) -> list[tuple[int, int]]:
        members = tuple(endpoints)
        if members != self._members:
            self._members = members
            self._ring = sorted(
                (_place(f"endpoint {each} place {number}"), each)
                for each in members
                for number in range(PLACES_PER_ENDPOINT)
            )
        return self._ring


def _place(key: str) -> int:
    return xxh64_intdigest(key.encode())
