"""Runs the scheduler in real time and hands its tokens to the HTTP handlers.

One task steps the engine. Engine time advances by exact step durations: a timer that fires late (a
millisecond is usual) is made up for by the following steps, so rates hold; when the process falls
behind by more than `LAG_S_MAX`, engine time jumps forward and the loss is counted in `late_s`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from bench.engine.faults import FaultSwitch
from bench.engine.scheduler import Engine, EngineRequest, LiveRequest, QueueFullError, StepResult
from bench.engine.stats import Stats

LAG_S_MAX = 0.1


class Reply:
    """What one HTTP request waits for: the tokens of its prompts, or for a request that does not
    stream their end."""

    def __init__(self, *, stream: bool, finish: str) -> None:
        """`finish`: the finish reason of a prompt that gets all its tokens."""
        self.stream = stream
        self.finish = finish
        self.lives: list[LiveRequest] = []
        self.cut = False
        """The engine shut down: no more tokens will come."""
        self._open = 0
        self._pending: list[tuple[int, int, bool]] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Nothing more will come than what is pending."""
        return self.cut or not self._open

    def add(self, live: LiveRequest) -> None:
        """One more prompt."""
        self.lives.append(live)
        self._open += 1

    def push(self, choice: int, number: int, *, last: bool) -> None:
        """Token `number` (from 1) of a prompt."""
        self._open -= last
        if self.stream:
            self._pending.append((choice, number, last))
        elif self._open:
            return
        self._notify()

    def close(self) -> None:
        """The engine shuts down."""
        self.cut = True
        self._notify()

    async def wait(self) -> list[tuple[int, int, bool]]:
        """The tokens since the last call, waiting for at least one or the end of all."""
        if not self._pending and not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, []
        return pending

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None


class Driver:
    """See the module. `run` is the task; the rest is called by handlers on the same loop."""

    def __init__(
        self,
        engine: Engine,
        stats: Stats,
        switch: FaultSwitch,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        """`on_step` is told of every completed step before clients are."""
        self.engine = engine
        self.stats = stats
        self.late_s = 0.0
        """Engine time lost because the process was too slow."""
        self._switch = switch
        self._on_step = on_step
        self._clock = clock
        self._wake = asyncio.Event()
        self._woken_s = 0.0
        """When the request that woke an idle engine came: its step begins then."""
        self._step_end_s = math.inf
        """End of the step being taken; infinite between steps."""
        self._replies: dict[str, tuple[Reply, int]] = {}

    def submit(self, requests: Sequence[EngineRequest], *, stream: bool, finish: str) -> Reply:
        """Raises: QueueFullError or RequestTooLongError, and then none of `requests` is queued."""
        reply = Reply(stream=stream, finish=finish)
        now_s = min(self._clock(), self._step_end_s)
        try:
            for choice, request in enumerate(requests):
                reply.add(self.engine.submit(request, now_s))
                self._replies[request.id] = (reply, choice)
        except QueueFullError:
            self.stats.counters.rejected += 1
            self.release(reply)
            raise
        self.stats.counters.requests += len(requests)
        if not self._wake.is_set():
            self._woken_s = now_s
            self._wake.set()
        return reply

    def release(self, reply: Reply) -> None:
        """The handler is done with it; what still runs for it is aborted."""
        for live in reply.lives:
            if self._replies.pop(live.request.id, None) is None:
                continue
            self.engine.abort(live.request.id)
            self.stats.on_end(live, "abort", self._clock())
        if self._step_end_s == math.inf:
            self._refresh_gauges()

    def cut_all(self) -> None:
        """End every reply where it is."""
        for reply, _ in list(self._replies.values()):
            reply.close()

    @property
    def in_flight(self) -> int:
        """Prompts submitted and not ended."""
        return len(self._replies)

    async def run(self) -> None:
        """Step the engine until cancelled."""
        now_s = self._clock()
        while True:
            if await self._switch.while_hanging():
                now_s = self._clock()
            duration_s = self.engine.begin(now_s)
            if duration_s is None:
                self._wake.clear()
                await self._wake.wait()
                now_s = self._woken_s
                continue
            self._step_end_s = now_s + duration_s
            await asyncio.sleep(max(0.0, self._step_end_s - self._clock()))
            await self._switch.while_hanging()
            now_s = self._step_end_s
            self._step_end_s = math.inf
            step = self.engine.complete()
            if self._on_step is not None:
                self._on_step(step)
            self._deliver(step)
            lag_s = self._clock() - now_s
            if lag_s > LAG_S_MAX:
                self.late_s += lag_s
                now_s += lag_s

    def _deliver(self, step: StepResult) -> None:
        replies = self._replies
        self.stats.on_step(step)
        for live in step.tokens:
            reply, choice = replies[live.request.id]
            if reply.stream:
                last = live.generated >= live.request.output_tokens
                reply.push(choice, live.generated, last=last)
        for live in step.finished:
            reply, choice = replies.pop(live.request.id)
            if not reply.stream:
                reply.push(choice, live.generated, last=True)
            self.stats.on_end(live, reply.finish, step.end_s)
        self._refresh_gauges()

    def _refresh_gauges(self) -> None:
        self.stats.load = self.engine.load()
        self.stats.see_loras(self.engine.running, self._clock())
