"""llm-d: keep to endpoints that hold most of the prompt, and among them to the least loaded.

Source: llm-d-router of August 2026, `prefix-cache-affinity-filter` in front of
`token-load-scorer` and the max-score picker; its defaults are ours.
"""
# ruff: noqa: ARG002 - every rule takes the same arguments, used or not

from __future__ import annotations

from random import Random

from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account
from bench.sim.policies.peer import least

FULL_SCORE_TOKENS = 4_194_304


class LlmdAffinity:
    """Filter, gate, score, pick.

    Sticky endpoints hold at least `threshold` of the prompt's full blocks. If there are any, only
    they stay, unless the best of them would take `gate_s` longer than the best of the others:

        ttft_s = uncached tokens in flight / rate_tokens_s
        score  = 1 - min(1, uncached tokens in flight / 4 194 304)      highest wins, ties by chance
    """

    def __init__(
        self,
        rng: Random,
        *,
        block_tokens: int,
        threshold: float = 0.8,
        gate_s: float = 18.0,
        rate_tokens_s: float = 15_928.0,
    ) -> None:
        self._rng = rng
        self._block_tokens = block_tokens
        self._threshold = threshold
        self._gate_s = gate_s
        self._rate_tokens_s = rate_tokens_s

    def wish(self, request: SimRequest, view: View, account: Account, now_s: float) -> int:
        kept = self._kept(request, view, account)
        return least(
            kept, lambda each: min(FULL_SCORE_TOKENS, account.load(each).prefill_tokens), self._rng
        )

    def _kept(self, request: SimRequest, view: View, account: Account) -> list[int]:
        everyone = list(view.endpoints)
        # The last token is never matched: of a prompt that ends with a block, that block is not.
        blocks = min(len(request.blocks), (request.prompt_tokens - 1) // self._block_tokens)
        if not blocks:
            return everyone
        full_tokens = blocks * self._block_tokens
        sticky = [
            each
            for each in everyone
            if view.matched_tokens(request, each) / full_tokens >= self._threshold
        ]
        others = [each for each in everyone if each not in sticky]
        if not sticky or not others:
            return everyone
        penalty_tokens = _fewest(sticky, account) - _fewest(others, account)
        return everyone if penalty_tokens / self._rate_tokens_s > self._gate_s else sticky


def _fewest(endpoints: list[int], account: Account) -> int:
    return min(account.load(each).prefill_tokens for each in endpoints)
