"""Counters and histograms of one engine, folded from what its scheduler did.

Gauges are a copy of the load at the end of the last step, as in vLLM: what arrived since is not in
them. Everything is bounded: a counter per name, a histogram per family, a log of the last requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

from bench.engine.scheduler import EngineLoad, LiveRequest, StepResult

LOG_REQUESTS_MAX = 1000
LORA_SERIES_MAX = 64

LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to the longest context, as vLLM lays them."""
    bounds = (float(step * 10**power) for power in range(9) for step in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


class Histogram:
    """Counts per bucket (not cumulated), their number and sum."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`; a value equal to a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


class LoggedRequest(msgspec.Struct, frozen=True):
    """One line of the log at `/sim/state`; seconds count from submission."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float | None
    e2e_s: float
    finish: str


class Counters(msgspec.Struct):
    """Totals since the start."""

    requests: int = 0
    """Prompts submitted."""
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    """Refused because the queue was full."""
    prompt_tokens: int = 0
    """Of admitted prompts; with `cached_tokens`, the hit ratio."""
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens whose first output exists, computed or found."""
    prefilled_cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Stats:
    """See the module."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.counters = Counters()
        self.load = EngineLoad()
        self.log: deque[LoggedRequest] = deque(maxlen=LOG_REQUESTS_MAX)
        self.finish_reasons = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.lora_seen: dict[str, float] = {"": 0.0}
        """Comma list of adapters in use -> when last seen, monotonic seconds."""
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.prefill_kv_computed_tokens = Histogram(tokens)
        self.iteration_tokens = Histogram(STEP_TOKENS)
        self.time_to_first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_latency_s = Histogram(NEXT_TOKEN_S)
        self.time_per_output_token_s = Histogram(NEXT_TOKEN_S)
        self.e2e_latency_s = Histogram(LATENCY_S)
        self.queue_time_s = Histogram(LATENCY_S)
        self.prefill_time_s = Histogram(LATENCY_S)
        self.decode_time_s = Histogram(LATENCY_S)
        self.inference_time_s = Histogram(LATENCY_S)
        self._last_step_end_s = 0.0

    def on_step(self, step: StepResult) -> None:
        """Fold in one completed step."""
        counters = self.counters
        counters.steps += step.steps
        counters.preemptions += len(step.preempted)
        for live in step.admitted:
            if not live.preemptions:
                counters.prompt_tokens += live.request.prompt_tokens
                counters.cached_tokens += live.cached_tokens
        tokens = len(step.tokens) * step.steps
        counters.generated_tokens += tokens
        self.iteration_tokens.observe(step.prefill_tokens + tokens)
        decoded = tokens - len(step.first)
        if decoded:
            gap_s = (step.end_s - self._last_step_end_s) / step.steps
            self.inter_token_latency_s.observe(gap_s, decoded)
        for live in step.first:
            self._on_prefilled(live)
            self.time_to_first_token_s.observe(step.end_s - live.submitted_s)
        for live in step.finished:
            if live.first_token_s is None:
                self._on_prefilled(live)
        self._last_step_end_s = step.end_s

    def on_end(self, live: LiveRequest, finish: str, now_s: float) -> None:
        """A request left: `finish` is its finish reason, `abort` when it was cut off."""
        request = live.request
        self.finish_reasons[finish] += 1
        ttft_s = None
        if live.first_token_s is not None:
            ttft_s = live.first_token_s - live.submitted_s
        e2e_s = now_s - live.submitted_s
        self.log.append(
            LoggedRequest(
                *(request.id, request.prompt_tokens, live.cached_tokens, live.generated),
                *(ttft_s, e2e_s, finish),
            )
        )
        if finish == "abort":
            self.counters.aborted += 1
            return
        self.counters.finished += 1
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(live.generated)
        self.prefill_kv_computed_tokens.observe(request.prompt_tokens - live.cached_tokens)
        self.e2e_latency_s.observe(e2e_s)
        self._on_times(live)

    def see_loras(self, running: Sequence[LiveRequest], now_s: float) -> None:
        """Note which adapters are in use; vLLM 0.32 names one from its first output on."""
        names = {live.request.lora for live in running if live.generated} - {""}
        self.lora_seen[",".join(sorted(names))] = now_s
        if len(self.lora_seen) > LORA_SERIES_MAX:
            del self.lora_seen[min(self.lora_seen, key=self.lora_seen.__getitem__)]

    def _on_prefilled(self, live: LiveRequest) -> None:
        self.counters.prefilled_tokens += live.request.prompt_tokens
        self.counters.prefilled_cached_tokens += live.cached_tokens

    def _on_times(self, live: LiveRequest) -> None:
        admitted_s, last_s = live.admitted_s, live.last_token_s
        assert admitted_s is not None
        assert last_s is not None
        first_s = last_s if live.first_token_s is None else live.first_token_s
        self.queue_time_s.observe(admitted_s - live.submitted_s)
        self.prefill_time_s.observe(first_s - admitted_s)
        self.decode_time_s.observe(last_s - first_s)
        self.inference_time_s.observe(last_s - admitted_s)
        if live.generated > 1:
            self.time_per_output_token_s.observe((last_s - first_s) / (live.generated - 1))
