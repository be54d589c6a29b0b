"""The engine itself, without I/O and without a clock: requests in, steps out.

A step has two ends. `begin(now_s)` admits waiting requests, shares out the token budget, reserves
blocks and says how long the step takes; `complete()` is what the world sees when that time is over:
first tokens, tokens, ends. Between the two `submit` and `abort` may come at any time; a request
submitted meanwhile is considered by the next `begin`. `step(now_s)` is both at once.

One step, as in vLLM 0.32 with its default (first come, first served) policy:

1. Running requests in order of admission, each as many tokens as it lacks and the budget leaves:
   one for a request that decodes, a chunk for one that prefills. When blocks run out, the request
   admitted last is preempted: it loses its blocks and waits again, first in the queue.
2. Unless something was preempted, waiting requests in order: at most `max_num_seqs` run, the whole
   prompt must fit the free blocks beside what it finds cached, and its LoRA must have a slot. A
   request that lacks only the slot is deferred: others may pass it.
3. Full blocks get their names when the step begins, so a request admitted later in the same step
   finds them already. A match never covers the last token: (tokens - 1) // block_tokens blocks.

For simulations, `begin` can take many decode steps as one: those between two changes of the batch,
in which nobody ends, is admitted or is preempted. A request that is submitted meanwhile changes
that: `cut` ends the merged step where the next of its steps ends. Tokens and times are those of
single steps; so is the cache, unless output blocks are named while others are evicted: merged steps
count one request after the other.

The output length is part of the request: the model decides it, not the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from bench.engine.cost import CostModel
from bench.engine.kvcache import BlockContent, BlockName, KvCache

MERGED_STEPS_MAX = 64
"""Most decode steps taken as one, and so how far `load` and `LiveRequest` lag behind meanwhile."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's flags of these names set, and the cache's shape."""

    block_tokens: int = 16
    kv_blocks: int = 18_000
    """288 000 tokens: two 80 GB cards at 0.92, less 64 GB of weights, at 256 KiB per token."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """Token budget of one step, decodes and prefill chunks together."""
    max_num_queued_reqs: int | None = None
    """Waiting requests before `submit` refuses; `None`: no limit."""
    max_loras: int = 4
    """Different adapters running at once."""
    prefix_caching: bool = True

    @property
    def kv_tokens(self) -> int:
        """Capacity of the cache in tokens."""
        return self.kv_blocks * self.block_tokens


class EngineRequest(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One prompt to compute."""

    id: str
    """Unique among the requests alive."""
    prompt_tokens: int
    """>= 1."""
    output_tokens: int
    """Tokens it will generate; 0: prefill only (an embedding)."""
    blocks: Sequence[BlockName] = ()
    """Names of the full blocks of prompt and, where known, output; those beyond are not cached."""
    lora: str = ""
    content: BlockContent | None = None
    """For those who publish `Stored`; the engine does not look at it."""


class LiveRequest(msgspec.Struct, eq=False):
    """A request in the engine: how far it is. Read it; only the engine writes it."""

    request: EngineRequest
    submitted_s: float
    admitted_s: float | None = None
    """First admission; a preemption does not change it."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    """The newest token, or for a request without output the end of its prefill."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    generated: int = 0
    computed: int = 0
    """Tokens whose KV is (or in this step will be) computed or found."""
    preemptions: int = 0
    running: bool = False
    held: list[BlockName] = msgspec.field(default_factory=list)
    """Named blocks it holds, prompt order."""
    private_blocks: int = 0
    reserved_tokens: int = 0
    """What its blocks can hold; meaningful while it runs."""
    named: int = 0
    """Blocks, from the first, that were found or offered their names."""

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens; it lacks `tokens - computed`."""
        return self.request.prompt_tokens + self.generated


class Stored(msgspec.Struct, frozen=True):
    """`request.blocks[start:stop]` are cached and were not before; `blocks[start - 1]` is the
    parent of the first."""

    request: EngineRequest
    start: int
    stop: int


class StepResult(msgspec.Struct, eq=False):
    """What one step did. All requests in it are live until `complete` returns."""

    began_s: float
    duration_s: float = 0.0
    steps: int = 1
    """Decode steps taken as one; each request in `tokens` got this many tokens."""
    first_s: float = 0.0
    """What the first of them takes."""
    growth_s: float = 0.0
    """How much longer each is than the one before: it reads more of the KV cache."""
    prefill_tokens: int = 0
    decoding: int = 0
    """Requests that decoded, one budget token each."""
    admitted: list[LiveRequest] = msgspec.field(default_factory=list)
    """Started or, after a preemption, restarted."""
    preempted: list[LiveRequest] = msgspec.field(default_factory=list)
    tokens: list[LiveRequest] = msgspec.field(default_factory=list)
    """Got tokens, `first` included."""
    first: list[LiveRequest] = msgspec.field(default_factory=list)
    """Got their first token."""
    finished: list[LiveRequest] = msgspec.field(default_factory=list)
    """Left the engine; their blocks are free."""
    cleared: bool = False
    """The cache was emptied before this step; came before `stored` and `removed`."""
    stored: list[Stored] = msgspec.field(default_factory=list)
    removed: list[BlockName] = msgspec.field(default_factory=list)
    """Evicted. One may be in `stored` of the same step, too; it was evicted before that."""

    @property
    def end_s(self) -> float:
        """When the step's results exist."""
        return self.began_s + self.duration_s

    def span_s(self, steps: int) -> float:
        """What the first `steps` of the steps take together."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def merge(self, steps: int) -> None:
        """Let it be `steps` decode steps."""
        self.steps = steps
        self.duration_s = self.span_s(steps)


class EngineLoad(msgspec.Struct, frozen=True):
    """The engine's own view of its load, as its gauges show it."""

    running: int = 0
    waiting: int = 0
    """Deferred requests included."""
    deferred: int = 0
    """Waiting for a LoRA slot only."""
    kv_usage_ratio: float = 0.0


class QueueFullError(Exception):
    """`max_num_queued_reqs` requests are waiting already."""


class RequestTooLongError(Exception):
    """Prompt and output together exceed the KV cache: the request could never run."""


class Engine:
    """One engine; see the module. Not thread-safe, needs no loop."""

    def __init__(self, limits: EngineLimits, cost: CostModel) -> None:
        self.limits = limits
        self.cost = cost
        self.kv = KvCache(limits.kv_blocks)
        self.running: list[LiveRequest] = []
        """Order of admission."""
        self.waiting: deque[LiveRequest] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._deferred = 0
        self._cleared = False
        self._step: StepResult | None = None
        self._decodes: list[LiveRequest] = []
        self._decode_kv_tokens = 0
        """What those read of the KV cache."""
        self._chunks: list[tuple[LiveRequest, int]] = []

    def submit(self, request: EngineRequest, now_s: float) -> LiveRequest:
        """Queue a request. Raises: QueueFullError, RequestTooLongError."""
        assert request.id not in self._live, f"request id {request.id} is alive already"
        assert request.prompt_tokens >= 1
        if request.prompt_tokens + request.output_tokens > self.limits.kv_tokens:
            raise RequestTooLongError(request.id)
        queue_max = self.limits.max_num_queued_reqs
        if queue_max is not None and len(self.waiting) >= queue_max:
            raise QueueFullError(request.id)
        live = LiveRequest(request, submitted_s=now_s)
        self._live[request.id] = live
        self.waiting.append(live)
        return live

    def abort(self, request_id: str) -> bool:
        """Forget a request at once, in the middle of a step too. False: it was not there."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        if live.running:
            self.running.remove(live)
            self._release(live)
        else:
            self.waiting.remove(live)
        return True

    def clear_cache(self) -> bool:
        """Empty the prefix cache unless blocks are in use; told with the next step, as in vLLM."""
        cleared = self.kv.clear()
        self._cleared |= cleared
        return cleared

    @property
    def told(self) -> bool:
        """Whether the `StepResult`s so far told everything that happened to the cache."""
        return not (self._step or self._cleared or self.kv.removed)

    def load(self) -> EngineLoad:
        """The load now."""
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            deferred=min(self._deferred, len(self.waiting)),
            kv_usage_ratio=self.kv.usage_ratio,
        )

    def step(self, now_s: float, *, until_s: float | None = None) -> StepResult | None:
        """`begin` and `complete`; `None` when there is nothing to do."""
        return None if self.begin(now_s, until_s=until_s) is None else self.complete()

    def begin(self, now_s: float, *, until_s: float | None = None) -> float | None:
        """Plan the next step.

        Args:
            until_s: when given, pure decode steps that end by then are taken as one, up to
                `MERGED_STEPS_MAX`. Whoever submits meanwhile calls `cut`.
        Returns: how long the step takes, seconds; `None` when there is nothing to do.
        """
        assert self._step is None, "the step before was not completed"
        step = StepResult(began_s=now_s, cleared=self._cleared)
        self._cleared = False
        self._decodes, self._chunks, self._step = [], [], step
        budget_tokens = self._plan_running(self.limits.max_num_batched_tokens)
        if not step.preempted:
            self._admit(budget_tokens, now_s)
        if not self._decodes and not self._chunks:
            self._step, self._cleared = None, step.cleared
            return None
        step.decoding = len(self._decodes)
        step.duration_s = step.first_s = self._price(step)
        if until_s is not None and not self._chunks and not step.preempted:
            self._merge_decode_steps(step, until_s)
        return step.duration_s

    def progress(self, now_s: float) -> tuple[int, float]:
        """Of the step that is being taken: which of the merged steps, from 1, and its end."""
        step = self._step
        assert step is not None, "no step was begun"
        number = 1
        while number < step.steps and step.began_s + step.span_s(number) < now_s:
            number += 1
        return number, step.began_s + step.span_s(number)

    def cut(self, now_s: float) -> float | None:
        """Something changed: let the merged steps end with the one that is being taken.

        Returns: when the current step ends, at or after `now_s`; `None` when there is none.
        """
        step = self._step
        if step is None:
            return None
        while step.steps > 1 and step.began_s + step.span_s(step.steps - 1) >= now_s:
            step.merge(step.steps - 1)
        return step.end_s

    def complete(self) -> StepResult:
        """The planned step is over: hand out its tokens."""
        step = self._step
        assert step is not None, "no step was begun"
        steps, end_s = step.steps, step.end_s
        if steps > 1:
            self._take_merged(steps - 1)
        for live in self._decodes:
            if live.running:
                self._give_tokens(step, live, steps, end_s)
        for live, _ in self._chunks:
            if live.running and live.computed == live.tokens:
                self._give_tokens(step, live, min(1, live.request.output_tokens), end_s)
        if step.finished:
            self.running = [live for live in self.running if live.running]
        step.removed, self.kv.removed = self.kv.removed, []
        self._step = None
        return step

    def _plan_running(self, budget_tokens: int) -> int:
        """Give running requests their tokens; returns what is left of the budget."""
        size, decodes = self.limits.block_tokens, self._decodes
        index = kv_tokens = 0
        while index < len(self.running) and budget_tokens > 0:
            live = self.running[index]
            computed = live.computed
            lacking = live.request.prompt_tokens + live.generated - computed
            tokens = min(lacking, budget_tokens)
            # The usual case, a decode inside the last block, skips the work it does not need.
            if computed + tokens > live.reserved_tokens and not self._reserve(live, tokens):
                break
            if lacking > 1 or not live.generated:
                self._chunk(live, tokens)
            else:
                decodes.append(live)
                live.computed = computed = computed + 1
                kv_tokens += computed
                if not computed % size:
                    self._name_blocks(live)
            budget_tokens -= tokens
            index += 1
        self._decode_kv_tokens = kv_tokens
        return budget_tokens

    def _reserve(self, live: LiveRequest, tokens: int) -> bool:
        """Blocks for `tokens` more, preempting from the end of `running`. False: it was `live`."""
        blocks = self._blocks_for(live.computed + tokens) - len(live.held) - live.private_blocks
        while blocks > 0 and not self.kv.take(blocks):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is live:
                return False
        live.private_blocks += max(0, blocks)
        live.reserved_tokens = self.limits.block_tokens * (len(live.held) + live.private_blocks)
        return True

    def _preempt(self, live: LiveRequest) -> None:
        self._release(live)
        live.preemptions += 1
        live.computed = live.named = 0
        self.waiting.appendleft(live)
        assert self._step is not None
        self._step.preempted.append(live)

    def _admit(self, budget_tokens: int, now_s: float) -> None:
        deferred: list[LiveRequest] = []
        while self.waiting and budget_tokens > 0 and len(self.running) < self.limits.max_num_seqs:
            live = self.waiting[0]
            if self._lacks_lora_slot(live):
                deferred.append(self.waiting.popleft())
                continue
            tokens = self._try_start(live, budget_tokens, now_s)
            if tokens is None:
                break
            self.waiting.popleft()
            budget_tokens -= tokens
        self.waiting.extendleft(reversed(deferred))
        self._deferred = len(deferred)

    def _lacks_lora_slot(self, live: LiveRequest) -> bool:
        lora = live.request.lora
        if not lora:
            return False
        active = {other.request.lora for other in self.running} - {""}
        return lora not in active and len(active) >= self.limits.max_loras

    def _try_start(self, live: LiveRequest, budget_tokens: int, now_s: float) -> int | None:
        """Move a waiting request to `running`; returns the tokens it got, `None` if no room."""
        size = self.limits.block_tokens
        names = live.request.blocks if self.limits.prefix_caching else ()
        matched = self.kv.match(names, (live.tokens - 1) // size)
        found = names[:matched]
        if self._blocks_for(live.tokens) - matched > self.kv.free_blocks_beside(found):
            return None
        self.kv.hold(found)
        live.held, live.named, live.computed = list(found), matched, matched * size
        live.running = True
        self.running.append(live)
        if live.admitted_s is None:
            live.admitted_s, live.cached_tokens = now_s, live.computed
        tokens = min(live.tokens - live.computed, budget_tokens)
        fits = self._reserve(live, tokens)
        assert fits, "the whole prompt was found to fit"
        self._chunk(live, tokens)
        assert self._step is not None
        self._step.admitted.append(live)
        return tokens

    def _chunk(self, live: LiveRequest, tokens: int) -> None:
        self._chunks.append((live, tokens))
        live.computed += tokens
        self._name_blocks(live)

    def _name_blocks(self, live: LiveRequest) -> None:
        """Name the blocks that became full."""
        names = live.request.blocks
        stop = min(live.computed // self.limits.block_tokens, len(names))
        start = live.named
        if stop <= start or not self.limits.prefix_caching:
            return
        assert self._step is not None
        live.named = stop
        for index in range(start, stop):
            shared, new = self.kv.name(names[index])
            if shared:
                live.held.append(names[index])
                live.private_blocks -= 1
            if not new:
                self._note_stored(live.request, start, index)
                start = index + 1
        self._note_stored(live.request, start, stop)

    def _note_stored(self, request: EngineRequest, start: int, stop: int) -> None:
        assert self._step is not None
        if stop > start:
            self._step.stored.append(Stored(request, start, stop))

    def _price(self, step: StepResult) -> float:
        pairs = 0.0
        for live, tokens in self._chunks:
            step.prefill_tokens += tokens
            pairs += tokens * (live.computed - tokens / 2)
        return self.cost.step_s(
            prefill_tokens=step.prefill_tokens,
            attention_pairs=pairs,
            decode_sequences=step.decoding,
            decode_kv_tokens=self._decode_kv_tokens,
        )

    def _merge_decode_steps(self, step: StepResult, until_s: float) -> None:
        """Make one long step of the decode steps that end by `until_s`, before the first request
        ends and into the free blocks."""
        decodes = self._decodes
        if len(decodes) < len(self.running):
            return
        steps = min([live.request.output_tokens - live.generated for live in decodes])
        steps = min(steps, MERGED_STEPS_MAX)
        if steps < 2 or self._blocks_lacking(steps - 1) > self.kv.free_blocks:
            return
        step.growth_s = len(decodes) * self.cost.decode_kv_token_s / self.cost.speed
        step.merge(steps)
        while step.steps > 1 and step.end_s > until_s:
            step.merge(step.steps - 1)

    def _blocks_lacking(self, more: int) -> int:
        """Blocks that `more` decode steps take, exactly or, where that is cheaper and still few
        enough, at most."""
        at_most = len(self._decodes) * self._blocks_for(more + self.limits.block_tokens - 1)
        if at_most <= self.kv.free_blocks:
            return at_most
        return sum(
            self._blocks_for(live.computed + more) - len(live.held) - live.private_blocks
            for live in self._decodes
        )

    def _take_merged(self, more: int) -> None:
        """Account for the merged steps after the first; their blocks were found to be free."""
        for live in self._decodes:
            if live.running:
                if live.computed + more > live.reserved_tokens:
                    fits = self._reserve(live, more)
                    assert fits, "merged steps were found to fit"
                live.computed += more
                self._name_blocks(live)

    def _give_tokens(self, step: StepResult, live: LiveRequest, tokens: int, end_s: float) -> None:
        live.last_token_s = end_s
        live.generated = generated = live.generated + tokens
        if tokens:
            step.tokens.append(live)
            if generated == tokens:
                live.first_token_s = end_s
                step.first.append(live)
        if generated >= live.request.output_tokens:
            self._release(live)
            del self._live[live.request.id]
            step.finished.append(live)

    def _release(self, live: LiveRequest) -> None:
        self.kv.release(live.held, live.private_blocks)
        live.held, live.private_blocks, live.running = [], 0, False

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)
