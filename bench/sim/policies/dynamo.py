"""NVIDIA Dynamo's KV router: one linear cost in blocks, from its own accounts.

    cost    = scale * max(0, prefill - cached) + decode                                lowest wins
    prefill = (uncached tokens in flight before their first token + prompt tokens) / block tokens
    cached  = blocks of the prompt that the endpoint holds
    decode  = distinct prompt blocks in use by requests in flight, with the request's own

Source: Dynamo 1.6.1, lib/kv-router, default selector: overlap credit 1, no decay, temperature 0,
no output blocks, prefill charged in full until the first token.
"""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from random import Random

from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account
from bench.sim.policies.peer import least


class DynamoLinear:
    """See the module. Needs an account with pins."""

    def __init__(self, rng: Random, *, block_tokens: int, prefill_load_scale: float = 1.0) -> None:
        self._rng = rng
        self._block_tokens = block_tokens
        self._scale = prefill_load_scale

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        def cost(endpoint: int) -> float:
            load, pins = account.load(endpoint), account.load(endpoint).pins
            cached_tokens = view.matched_tokens(request, endpoint)
            prefill_tokens = max(0, load.prefill_tokens + request.prompt_tokens - cached_tokens)
            new_blocks = sum(name not in pins for name in request.blocks) if pins else own_blocks
            decode_blocks = len(pins) + new_blocks
            return self._scale * prefill_tokens / self._block_tokens + decode_blocks

        own_blocks = len(request.blocks)
        return least(view.endpoints, cost, self._rng)
