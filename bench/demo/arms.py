"""Runs a plan through a stack of real processes, and disturbs the stack meanwhile.

The round robin arm is the same stack, the EPP and its scrapes included, behind the same bootstrap
less the ext_proc filter: Envoy's own round robin, the retries too. So the two arms differ in the
picks and in the hop to the EPP, which only the picking arm pays.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.demo.client import Client, Outcome, bypass, play
from bench.demo.figures import Arm, Kill
from bench.demo.progress import Progress
from bench.demo.workload import Plan
from bench.stack import Engine, Stack
from epp.envoy.command import render
from epp.envoy.options import EnvoyOptions

EXT_PROC = "envoy.filters.http.ext_proc"
PROGRESS_PERIOD_S = 0.25
SETTLE_S_MAX = 5.0


class Overload(msgspec.Struct, frozen=True):
    """Traffic to one engine past Envoy during one phase."""

    phase: int
    engine: int
    """Index in the stack."""
    workers: int
    """Requests under way at any time."""


class Outage(msgspec.Struct, frozen=True):
    """SIGKILL of one engine during one phase, and its restart."""

    phase: int
    engine: int
    after_s: float
    """From the start of the phase to the kill."""
    down_s: float
    """From the kill to the restart; until it listens the start takes as long as it takes."""


class Settled(msgspec.Struct, frozen=True):
    """What the EPP says when all answers have ended."""

    inflight_requests: int
    """It still counts, over all endpoints; after `SETTLE_S_MAX` if it is not 0."""
    picks: dict[str, int]
    """`epp_picks_total` by reason."""
    served_elsewhere: int
    """Requests that Envoy sent to another endpoint than the picked one."""


def without_ext_proc(options: EnvoyOptions) -> str:
    """The bootstrap of `epp envoy-config` without the filter that asks the EPP."""
    document = json.loads(render(options, form="json"))
    for listener in document["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for network_filter in chain["filters"]:
                config = network_filter["typed_config"]
                kept = [f for f in config["http_filters"] if f["name"] != EXT_PROC]
                config["http_filters"] = kept
    return json.dumps(document)


class Runner:
    """Runs one plan once.

    Args:
        name: of the arm, for people.
        stack: started.
    """

    def __init__(
        self,
        name: str,
        stack: Stack,
        plan: Plan,
        progress: Progress,
        *,
        model: str,
        seed: int,
        overload: Overload | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._name, self._stack, self._plan, self._progress = name, stack, plan, progress
        self._model, self._seed = model, seed
        self._overload, self._outage = overload, outage
        self._outcomes: list[Outcome] = []
        self._kill: Kill | None = None
        self._late_s = 0.0

    async def run(self) -> Arm:
        """Send the plan, disturb, wait for the last answer.

        Raises: NotReadyError when the killed engine does not come back.
        """
        url, start_s = self._stack.envoy.url, time.monotonic()
        async with Client(url, self._model, start_s=start_s) as client:
            shown = asyncio.create_task(self._show(client))
            tasks = [play(self._plan, client, self._outcomes.append)]
            if self._overload is not None:
                tasks.append(self._overload_engine(client, self._overload))
            if self._outage is not None:
                tasks.append(self._kill_engine(client, self._outage))
            try:
                await asyncio.gather(*tasks)
            finally:
                shown.cancel()
            self._progress.show(self._line(client), always=True)
        for engine in self._stack.engines:
            self._late_s += await asyncio.to_thread(_late_s, engine)
        return Arm(
            name=self._name,
            outcomes=sorted(self._outcomes, key=lambda outcome: outcome.sent_s),
            kill=self._kill,
            engine_late_s=self._late_s if self._stack.engines else None,
        )

    async def _overload_engine(self, client: Client, overload: Overload) -> None:
        engine = self._stack.engines[overload.engine]
        await self._sleep_until(client, self._plan.start_s(overload.phase))
        try:
            async with asyncio.timeout(self._plan.phases[overload.phase].duration_s):
                await bypass(engine.address, self._model, workers=overload.workers, seed=self._seed)
        except TimeoutError:
            pass  # the phase is over

    async def _kill_engine(self, client: Client, outage: Outage) -> None:
        engine = self._stack.engines[outage.engine]
        await self._sleep_until(client, self._plan.start_s(outage.phase) + outage.after_s)
        self._late_s += await asyncio.to_thread(_late_s, engine)
        kill = self._kill = Kill(engine.name, client.now_s())
        await asyncio.to_thread(engine.kill)
        self._progress.say(f"  {'':<12} {engine.name} killed (SIGKILL)")
        await self._sleep_until(client, kill.killed_s + outage.down_s)
        await asyncio.to_thread(engine.start)
        kill.ready_s = client.now_s()
        self._progress.say(f"  {'':<12} {engine.name} is back, its cache empty")

    async def _sleep_until(self, client: Client, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - client.now_s()))

    async def _show(self, client: Client) -> None:
        phase = -1
        while True:
            now_s = client.now_s()
            current = sum(now_s >= self._plan.start_s(i) for i in range(len(self._plan.phases))) - 1
            self._progress.show(self._line(client), always=current != phase)
            phase = current
            await asyncio.sleep(PROGRESS_PERIOD_S)

    def _line(self, client: Client) -> str:
        plan, now_s, done = self._plan, client.now_s(), len(self._outcomes)
        phase = max(i for i in range(len(plan.phases)) if plan.start_s(i) <= now_s)
        recent = sum(o.end_s > now_s - 2.0 for o in self._outcomes) / 2.0
        return (
            f"  {self._name:<12} phase {phase + 1}/{len(plan.phases)} "
            f"{plan.phases[phase].name:<28} {done:>4}/{len(plan.requests)} answered  "
            f"{recent:>4.1f}/s  {client.in_flight:>3} in flight"
        )


def settle(stack: Stack) -> Settled:
    """Wait until the EPP counts nothing in flight any more, but not for ever, and read its
    counters."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while (inflight := _inflight(stack.epp.state())) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    picks, elsewhere = {}, 0
    for line in stack.epp.metrics().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith('epp_picks_total{reason="'):
            picks[name.split('"')[1]] = int(float(value))
        elif name == "epp_served_elsewhere_total":
            elsewhere = int(float(value))
    return Settled(inflight, picks, elsewhere)


def _inflight(state: Any) -> int:
    """The larger of the EPP's two accounts: its total, and what its endpoints are charged."""
    charged = sum(endpoint["inflight_requests"] for endpoint in state["endpoints"])
    return max(int(state["inflight_requests"]), int(charged))


def _late_s(engine: Engine) -> float:
    return float(engine.get("/sim/state")["late_s"])


def engine_names(stack: Stack) -> Sequence[str]:
    """What `Outcome.engine` can be: names of simulated engines, addresses of others."""
    return [engine.name for engine in stack.engines] or stack.addresses
