"""One endpoint of the simulated fleet: an engine, and what can be seen of it from outside.

Scrapes and KV events cost nothing until somebody looks. A scrape shows the load since the last
change, so it is taken when the engine is about to change or when it is asked for, whichever comes
first, and dated to the newest tick of the endpoint's own period. KV events are queued with the
time at which they are known and folded in once that has come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from bench.engine.cost import CostModel
from bench.engine.scheduler import Engine, EngineLimits, LiveRequest, StepResult
from bench.sim.agenda import chance
from bench.sim.conditions import Conditions
from bench.sim.hardware import EngineKind
from bench.sim.model import Outcome, Scrape


class Flight(msgspec.Struct, eq=False):
    """A request on its way at one endpoint."""

    outcome: Outcome
    router: int
    endpoint: int


class ScrapeClock:
    """The scrapes of one endpoint, taken when needed."""

    def __init__(self, seed: int, endpoint: int, conditions: Conditions) -> None:
        self.newest: Scrape | None = None
        self._prefill_s_sum, self._prefill_tokens_sum, self._prefills = 0.0, 0, 0
        self._seed, self._endpoint = seed, endpoint
        self._loss_ratio = conditions.scrape_loss_ratio
        self._period_s = conditions.scrape_s or math.inf
        phase = chance(seed, endpoint, 0)
        self._phase_s = phase * self._period_s if conditions.scrape_s else math.inf
        self._next = 0
        """Number of the first tick that was not looked at."""
        self.next_s = self._phase_s
        """When that is."""

    def restart(self, now_s: float) -> None:
        """The engine came up: nothing was scraped of it yet."""
        self.newest = None
        self._prefill_s_sum, self._prefill_tokens_sum, self._prefills = 0.0, 0, 0
        if now_s >= self.next_s:
            self._skip_to(self._ticks_until(now_s) + 1)

    def look(self, engine: Engine, now_s: float) -> None:
        """The engine's load has been what it is since the last call: date it to the newest tick
        until now that was not lost. To be called when `now_s >= next_s`."""
        last = self._ticks_until(now_s)
        tick = last
        while tick >= self._next and self._is_lost(tick):
            tick -= 1
        if tick >= self._next:
            load = engine.load()
            at_s = self._phase_s + tick * self._period_s
            self.newest = Scrape(
                at_s=at_s,
                waiting=load.waiting,
                running=load.running,
                kv_usage_ratio=load.kv_usage_ratio,
                prefill_s_sum=self._prefill_s_sum,
                prefill_tokens_sum=self._prefill_tokens_sum,
                prefills=self._prefills,
            )
        self._skip_to(last + 1)

    def count(self, finished: Iterable[LiveRequest]) -> None:
        """Requests ended: only then does vLLM add them to its histograms. To be called after
        `look`, which shows what was before."""
        for live in finished:
            assert live.admitted_s is not None
            assert live.first_token_s is not None
            self._prefill_s_sum += live.first_token_s - live.admitted_s
            self._prefill_tokens_sum += live.request.prompt_tokens - live.cached_tokens
            self._prefills += 1

    def _ticks_until(self, now_s: float) -> int:
        """Number of the newest tick at or before `now_s`."""
        return max(self._next, int((now_s - self._phase_s) / self._period_s))

    def _skip_to(self, tick: int) -> None:
        self._next = tick
        self.next_s = self._phase_s + tick * self._period_s

    def _is_lost(self, tick: int) -> bool:
        if not self._loss_ratio:
            return False
        return chance(self._seed, self._endpoint, 1, tick) < self._loss_ratio


class ToldCache:
    """What one engine's KV events told of its cache: late, and with gaps."""

    def __init__(self, seed: int, endpoint: int, conditions: Conditions) -> None:
        self.names: set[int] = set()
        self._seed, self._endpoint = seed, endpoint
        self._lag_s = conditions.kv_event_lag_s
        self._loss_ratio = conditions.kv_event_loss_ratio
        self._batches = 0
        self._late: deque[tuple[float, StepResult]] = deque()

    def send(self, step: StepResult, now_s: float) -> None:
        """The engine publishes the events of a step."""
        if step.removed or step.stored:
            self._batches += 1
            if chance(self._seed, self._endpoint, 2, self._batches) >= self._loss_ratio:
                self._late.append((now_s + self._lag_s, step))
        self.catch_up(now_s)

    def catch_up(self, now_s: float) -> None:
        """Fold in what is known by now."""
        late, names = self._late, self.names
        while late and late[0][0] <= now_s:
            step = late.popleft()[1]
            names.difference_update(step.removed)
            for stored in step.stored:
                names.update(stored.request.blocks[stored.start : stored.stop])

    def clear(self) -> None:
        """The engine is gone; so is what was on its way."""
        self.names.clear()
        self._late.clear()


class Endpoint:
    """An engine and its surroundings. `alive`: takes requests; a leaving one is not alive but still
    has `flights`."""

    def __init__(
        self,
        number: int,
        kind: EngineKind,
        *,
        block_tokens: int,
        conditions: Conditions,
        seed: int,
    ) -> None:
        self.number = number
        self.kind = kind
        self.limits = EngineLimits(
            block_tokens=block_tokens,
            kv_blocks=kind.kv_tokens // block_tokens,
            max_num_seqs=kind.max_num_seqs,
            max_num_batched_tokens=kind.max_num_batched_tokens,
        )
        self.engine = Engine(self.limits, kind.cost)
        self.alive = True
        self.leaving = False
        self.flights: dict[str, Flight] = {}
        """By the id of the engine's request, in order of dispatch."""
        self.ticket = 0
        """Counts the ends planned for its steps; only the newest is valid."""
        self.step_end_s: float | None = None
        self.changes = 0
        """Counts changes of the engine, for those who keep what they derived from its state."""
        self.scrapes = ScrapeClock(seed, number, conditions)
        lossy = conditions.kv_event_lag_s > 0 or conditions.kv_event_loss_ratio > 0
        exact = conditions.prefix == "exact"
        self.told = ToldCache(seed, number, conditions) if lossy and exact else None

    def about_to_change(self, now_s: float) -> None:
        """Before anything is done to the engine: what was scraped until now shows it as it was."""
        if now_s >= self.scrapes.next_s:
            self.scrapes.look(self.engine, now_s)
        self.changes += 1

    def set_speed(self, factor: float) -> None:
        """From the next step on."""
        cost: CostModel = self.kind.cost
        self.engine.cost = msgspec.structs.replace(cost, speed=cost.speed * factor)

    def lose(self) -> list[Flight]:
        """The engine dies, and with it its requests and its cache; returns those requests."""
        self.alive = False
        lost = list(self.flights.values())
        self.flights.clear()
        self.engine = Engine(self.limits, self.engine.cost)
        self.step_end_s = None
        self.ticket += 1
        self.changes += 1
        if self.told is not None:
            self.told.clear()
        return lost
