"""The true state of the engines, as the greedy oracle sees it.

Expected seconds to first token = rest of the current step + prefill of all that is ahead, with its
real hits + the request's own prefill + the decodes that share those steps + the wait for memory.
An estimate, not a forecast: it knows nothing of requests to come, takes each prompt ahead as found
as far as it is cached or about to be, and lets decodes free memory in the order of their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from bench.engine.cost import CostModel
from bench.engine.scheduler import Engine, LiveRequest
from bench.sim.endpoints import Endpoint
from bench.sim.model import SimRequest


class TrueState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, and what a request that comes now meets there."""

    matched_tokens: int
    """Leading prompt tokens that are cached, or will be before the request is admitted."""
    requests: int
    """In the engine."""
    queued: int
    """Of these, not running."""
    unanswered: int
    """Without a first token."""
    context_tokens: int
    """Tokens in the KV cache that belong to requests that run."""
    kv_usage_ratio: float
    prefill_tokens: int
    """To be computed before the request is, after the step being taken."""
    prefill_pairs: float
    """Their attention: each token times those before it."""
    rest_s: float
    """Of the step being taken."""
    cost: CostModel
    """With the speed that it has now."""


class Ahead:
    """What a request that comes now has to wait for at one engine; holds until it changes."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = 0
        """Prefill tokens after the current step."""
        self.pairs = 0.0
        """Each of them times the tokens before it."""
        self.prefill_s = 0.0
        """What they take, at speed 1, steps apart."""
        self.step_s = engine.cost.step_base_s
        """What a step takes with the decodes alone, at speed 1."""
        self.blocks = 0
        """Blocks that waiting requests will take."""
        self.coming: set[int] = set()
        """Names that may not be cached yet but will be before a new request is admitted."""
        self._releases: list[tuple[int, int]] = []
        self._engine = engine
        for live in engine.running:
            self._add_running(live)
        for live in engine.waiting:
            self._add_waiting(live)
        # (output tokens to go when the current step began, blocks) of the decodes, soonest first.
        self._releases.sort()

    def _add_running(self, live: LiveRequest) -> None:
        cost, lacking = self._engine.cost, live.tokens - live.computed
        # A decode, and a prefill whose last chunk is being computed, lack nothing or their newest
        # token; both decode in the steps to come.
        if lacking <= 1 and (live.generated or not lacking):
            to_go = live.request.output_tokens - live.generated
            self._releases.append((to_go, len(live.held) + live.private_blocks))
            if lacking or to_go > 1:  # else it ends with the current step
                self.step_s += cost.decode_sequence_s + live.computed * cost.decode_kv_token_s
        else:
            self._add_prefill(lacking, live.computed)
            self.coming.update(live.request.blocks)

    def _add_waiting(self, live: LiveRequest) -> None:
        blocks = live.request.blocks
        size = self._engine.limits.block_tokens
        matched = self.matched_blocks(blocks, (live.tokens - 1) // size)
        lacking = live.tokens - matched * size
        self._add_prefill(lacking, matched * size)
        self.blocks += -(-live.tokens // size) - matched
        self.coming.update(blocks)

    def _add_prefill(self, tokens: int, context: int) -> None:
        self.tokens += tokens
        self.pairs += tokens * (context + tokens / 2)
        self.prefill_s += self._work_s(tokens, context)

    def matched_blocks(self, blocks: Sequence[int], most: int) -> int:
        """Leading blocks that are cached or will be, at most `most`."""
        kv, coming = self._engine.kv, self.coming
        matched = kv.match(blocks, most)
        for name in islice(blocks, matched, most):
            if name not in coming and name not in kv:
                break
            matched += 1
        return matched

    def found_blocks(self, request: SimRequest) -> int:
        """What a request that comes now will find; its last token is always computed."""
        most = (request.prompt_tokens - 1) // self._engine.limits.block_tokens
        return self.matched_blocks(request.blocks, most)

    def memory_wait_s(self, blocks: int, steps: int) -> float:
        """Until the decodes that end soonest have left `blocks` more than the rest will take.
        `steps`: decode steps that are over when the current step is."""
        short = self.blocks + blocks - self._engine.kv.free_blocks
        tokens = 0
        for to_go, held in self._releases:
            if short <= 0:
                break
            tokens, short = to_go, short - held
        return max(0, tokens - steps) * self.step_s

    def _work_s(self, tokens: int, context: int) -> float:
        cost = self._engine.cost
        pairs = tokens * (context + tokens / 2)
        return tokens * cost.prefill_token_s + pairs * cost.attention_pair_s

    def ttft_s(self, request: SimRequest, *, steps: int, rest_s: float) -> float:
        """Expected seconds to the first token. The current step, if any, has `rest_s` to go and is
        number `steps` of those that were merged."""
        limits, cost = self._engine.limits, self._engine.cost
        size, matched = limits.block_tokens, self.found_blocks(request)
        own = request.prompt_tokens - matched * size
        chunks = -(-(self.tokens + own) // limits.max_num_batched_tokens)
        work_s = self.prefill_s + self._work_s(own, matched * size) + chunks * self.step_s
        wait_s = self.memory_wait_s(-(-request.prompt_tokens // size) - matched, steps)
        return rest_s + (work_s + wait_s) / cost.speed


class Oracle:
    """Expected times at each endpoint; what lies ahead is kept until the engine changes."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._ahead: dict[int, tuple[int, Ahead]] = {}

    def expected_ttft_s(self, request: SimRequest, endpoint: int, now_s: float) -> float:
        """See `bench.sim.model.TrueView`."""
        steps, rest_s = self._progress(endpoint, now_s)
        return self._ahead_of(endpoint).ttft_s(request, steps=steps, rest_s=rest_s)

    def true_state(self, request: SimRequest, endpoint: int, now_s: float) -> TrueState:
        """See `bench.sim.model.TrueView`."""
        engine, ahead = self._endpoints[endpoint].engine, self._ahead_of(endpoint)
        running, waiting = engine.running, engine.waiting
        return TrueState(
            matched_tokens=ahead.found_blocks(request) * engine.limits.block_tokens,
            requests=len(running) + len(waiting),
            queued=len(waiting),
            unanswered=sum(live.first_token_s is None for live in (*running, *waiting)),
            context_tokens=sum(live.computed for live in running),
            kv_usage_ratio=engine.kv.usage_ratio,
            prefill_tokens=ahead.tokens,
            prefill_pairs=ahead.pairs,
            rest_s=self._progress(endpoint, now_s)[1],
            cost=engine.cost,
        )

    def _ahead_of(self, endpoint: int) -> Ahead:
        there = self._endpoints[endpoint]
        changes, ahead = self._ahead.get(endpoint, (-1, None))
        if ahead is None or changes != there.changes:
            ahead = Ahead(there.engine)
            self._ahead[endpoint] = (there.changes, ahead)
        return ahead

    def _progress(self, endpoint: int, now_s: float) -> tuple[int, float]:
        """Number of the step being taken among those merged, and seconds to its end; 0 and 0 when
        there is none."""
        there = self._endpoints[endpoint]
        if there.step_end_s is None:
            return 0, 0.0
        steps, end_s = there.engine.progress(now_s)
        return steps, end_s - now_s
