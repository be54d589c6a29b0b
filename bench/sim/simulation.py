"""A fleet of simulated engines and the routers in front of it, in virtual time.

    arrival ─▶ router: policy.choose ─▶ endpoint: engine.submit ─▶ steps ─▶ first byte, end
                  ▲   │ None: held ─▶ policy.pass_held ─▶ endpoint   │           ▼
                  └───── sent again ─────────────────────── restart ─┘         policy

One moment at a time, in this order: steps that end, what routers learn of them, changes of the
fleet, arrivals, passes over held requests; then engines with work and no step begin one. So an
engine's step holds everything that arrived until the moment it begins, in whichever order.

An engine step is one event; steps that only decode are merged, and cut when a request comes. Cost:
a heap entry per step and arrival, nothing per endpoint that has nothing to do.

Every request ends with one outcome: it got all its tokens, or it was refused, because no endpoint
was alive, its engine could never hold it, or it was lost with its endpoint more than `retries_max`
times. A request that is lost starts afresh, even if its first byte was out; its times are those of
the attempt that succeeded, counted from its arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from bench.engine.scheduler import EngineRequest, RequestTooLongError
from bench.sim.agenda import Agenda, Rank
from bench.sim.conditions import Conditions, Fleet, PolicyContext, PolicyError
from bench.sim.endpoints import Endpoint, Flight
from bench.sim.faults import Fault, Join, Leave, Restart, order_faults
from bench.sim.hardware import EngineKind
from bench.sim.model import Outcome, Policy, Workload
from bench.sim.oracle import Oracle
from bench.sim.prefix import CachePrefixes, Prefixes, SentPrefixes, ToldPrefixes
from bench.sim.regret import Judgement, Regret, regret_of
from bench.sim.routers import FleetView, Router
from bench.sim.timeline import Timeline

HELD_QUIET_S_MAX = 600.0
"""A policy may keep requests this long while nothing else happens; then it never lets them go."""


class Run(msgspec.Struct, kw_only=True):
    """What a simulation gave."""

    workload: str
    seed: int
    endpoints: int
    """How many there were in all."""
    outcomes: list[Outcome]
    """One per request of the workload, same order."""
    timeline: list[tuple[float, tuple[int, ...]]]
    """(time, requests in flight per endpoint), each second or, in long runs, a power of two of
    them."""
    ended_s: float
    """When the last request ended."""
    steps: int
    """Engine steps taken, merged ones counted as one."""
    held: int = 0
    """Times that a request was held when it came, or came again."""
    regrets: list[Regret] = msgspec.field(default_factory=list)
    """Of the dispatches looked at, in order: see `Conditions.regret_every`."""


class Simulation:
    """One run; see the module."""

    def __init__(
        self,
        workload: Workload,
        fleet: Fleet,
        conditions: Conditions,
        make_policy: Callable[[PolicyContext], Policy],
        seed: int,
        progress: Callable[[float], None] | None,
    ) -> None:
        self._workload, self._fleet, self._conditions = workload, fleet, conditions
        self._seed, self._progress = seed, progress
        self._outcomes = [Outcome(request) for request in workload.requests]
        self._open = len(self._outcomes)
        self._agenda = Agenda()
        self.endpoints: list[Endpoint] = []
        """By number, those that left included."""
        self._oracle = Oracle(self.endpoints)
        self._late: deque[tuple[Flight, bool]] = deque()
        """Signals on their way to routers, (of whom, it is the end), in order of time."""
        self._ready: list[Endpoint] = []
        """Endpoints whose engine may begin a step when the moment is over."""
        self._changes_to_come = 0
        self._quiet_since_s = 0.0
        self._timeline = Timeline()
        self._run = Run(
            workload=workload.name,
            seed=seed,
            endpoints=0,
            outcomes=self._outcomes,
            timeline=self._timeline.samples,
            ended_s=0.0,
            steps=0,
        )
        faults = order_faults(conditions.faults, len(fleet.kinds))
        kinds = [*fleet.kinds, *(fault.kind for fault in faults if isinstance(fault, Join))]
        self._routers = [
            self._make_router(number, make_policy, kinds) for number in range(conditions.routers)
        ]
        for kind in fleet.kinds:
            self._add_endpoint(kind)
        for fault in faults:
            self._plan_change(fault.at_s, self._apply, fault)

    def run(self) -> Run:
        """All of it. Raises: PolicyError."""
        agenda = self._agenda
        if self._outcomes:
            agenda.add(self._outcomes[0].request.arrival_s, Rank.ARRIVAL, self._arrive, 0)
        while self._open:
            next_s = agenda.next_s
            assert next_s is not None, "open requests without anything to come"
            if next_s > self._timeline.next_s:
                self._timeline.look(self.endpoints, next_s)
            agenda.run_moment()
            self._pass_held()
            self._begin_steps()
        self._run.ended_s = agenda.now_s
        self._run.endpoints = len(self.endpoints)
        return self._run

    # Engines

    def _begin_steps(self) -> None:
        now_s = self._agenda.now_s
        for endpoint in self._ready:
            if endpoint.step_end_s is None:
                endpoint.about_to_change(now_s)
                duration_s = endpoint.engine.begin(now_s, until_s=math.inf)
                if duration_s is not None:
                    self._plan_step_end(endpoint, now_s + duration_s)
        self._ready.clear()

    def _plan_step_end(self, endpoint: Endpoint, end_s: float) -> None:
        endpoint.step_end_s = end_s
        endpoint.ticket += 1
        self._agenda.add(end_s, Rank.STEP, self._end_step, (endpoint, endpoint.ticket))

    def _end_step(self, planned: tuple[Endpoint, int]) -> None:
        endpoint, ticket = planned
        if ticket != endpoint.ticket:
            return
        now_s = self._agenda.now_s
        self._quiet_since_s = now_s
        endpoint.about_to_change(now_s)
        step = endpoint.engine.complete()
        endpoint.step_end_s = None
        self._ready.append(endpoint)
        self._run.steps += 1
        endpoint.scrapes.count(step.finished)
        if endpoint.told is not None:
            endpoint.told.send(step, now_s)
        for live in step.first:
            flight = endpoint.flights[live.request.id]
            flight.outcome.first_s = now_s
            self._signal(flight, end=False)
        for live in step.finished:
            flight = endpoint.flights.pop(live.request.id)
            flight.outcome.ended_s = now_s
            flight.outcome.cached_tokens = live.cached_tokens
            flight.outcome.preemptions += live.preemptions
            self._signal(flight, end=True)
        if endpoint.leaving and not endpoint.flights:
            self._depart(endpoint)

    # What routers learn

    def _signal(self, flight: Flight, *, end: bool) -> None:
        late_s = self._conditions.first_byte_late_s
        if late_s > 0:
            self._late.append((flight, end))
            self._agenda.add(self._agenda.now_s + late_s, Rank.SIGNAL, self._deliver_next, flight)
        else:
            self._deliver(flight, end=end)

    def _deliver_next(self, flight: Flight) -> None:
        # Signals are all equally late, so theirs is the first one; a signal that was handed out
        # early, with its endpoint's failure, is gone from the queue.
        if self._late and self._late[0][0] is flight:
            self._deliver(flight, end=self._late.popleft()[1])

    def _deliver(self, flight: Flight, *, end: bool) -> None:
        now_s, router = self._agenda.now_s, self._routers[flight.router]
        self._quiet_since_s = now_s
        if end:
            router.ended(flight.outcome.request, now_s, ok=True)
            self._close()
        else:
            router.first_byte(flight.outcome.request, now_s)

    def _deliver_all_of(self, endpoint: Endpoint) -> None:
        """What is on its way arrives before the news that the endpoint is gone."""
        mine = [signal for signal in self._late if signal[0].endpoint == endpoint.number]
        if mine:
            self._late = deque(signal for signal in self._late if signal not in mine)
        for flight, end in mine:
            self._deliver(flight, end=end)

    def _close(self) -> None:
        """One more request has its outcome."""
        self._open -= 1
        every = max(1, len(self._outcomes) // 100)
        if self._progress is not None and self._open % every == 0:
            self._progress(1.0 - self._open / len(self._outcomes))

    # Requests

    def _arrive(self, number: int) -> None:
        self._quiet_since_s = self._agenda.now_s
        if number + 1 < len(self._outcomes):
            arrival_s = self._outcomes[number + 1].request.arrival_s
            self._agenda.add(arrival_s, Rank.ARRIVAL, self._arrive, number + 1)
        self._offer(self._outcomes[number])

    def _router_of(self, outcome: Outcome) -> Router:
        return self._routers[outcome.request.number % len(self._routers)]

    def _offer(self, outcome: Outcome) -> None:
        """A request is at its router, for the first time or again."""
        router = self._router_of(outcome)
        if not router.view.endpoints:
            self._refuse(outcome)
            return
        now_s = self._agenda.now_s
        # Asked before the choice is charged; what is held is decided later, in another state.
        looked_at = self._is_looked_at(outcome)
        judgements = router.rethink(outcome.request, now_s) if looked_at else ()
        endpoint = router.choose(outcome, now_s)
        if endpoint is not None:
            self._dispatch(router, outcome, endpoint, judgements)
            return
        self._run.held += 1
        if not router.rechecks:
            self._plan_recheck(router)

    def _refuse(self, outcome: Outcome) -> None:
        outcome.refused = True
        self._close()

    def _dispatch(
        self, router: Router, outcome: Outcome, number: int, judgements: Sequence[Judgement] = ()
    ) -> None:
        now_s, request = self._agenda.now_s, outcome.request
        endpoint = self.endpoints[number]
        if self._is_looked_at(outcome):
            self._run.regrets.append(self._regret(router, outcome, number, judgements))
        endpoint.about_to_change(now_s)
        asked = EngineRequest(
            id=str(request.number),
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            blocks=request.blocks,
        )
        try:
            endpoint.engine.submit(asked, now_s)
        except RequestTooLongError:
            router.ended(request, now_s, ok=False)
            self._refuse(outcome)
            return
        router.sent(request, number)
        outcome.endpoint, outcome.dispatched_s = number, now_s
        endpoint.flights[asked.id] = Flight(outcome, router.number, number)
        self._cut(endpoint)

    def _cut(self, endpoint: Endpoint) -> None:
        """The engine has something new to consider: soon, if it is in merged steps."""
        if endpoint.step_end_s is None:
            self._ready.append(endpoint)
            return
        end_s = endpoint.engine.cut(self._agenda.now_s)
        if end_s is not None and end_s != endpoint.step_end_s:
            self._plan_step_end(endpoint, end_s)

    def _is_looked_at(self, outcome: Outcome) -> bool:
        every = self._conditions.regret_every
        return every > 0 and outcome.request.number % every == 0

    def _regret(
        self, router: Router, outcome: Outcome, chosen: int, judgements: Sequence[Judgement]
    ) -> Regret:
        request, now_s = outcome.request, self._agenda.now_s
        times_s = {
            number: self._oracle.expected_ttft_s(request, number, now_s)
            for number in router.view.endpoints
        }
        return regret_of(times_s, chosen, judgements)

    # Held requests

    def _pass_held(self) -> None:
        for router in self._routers:
            if router.stirred:
                for outcome, endpoint in router.pass_held(self._agenda.now_s):
                    self._quiet_since_s = self._agenda.now_s
                    self._dispatch(router, outcome, endpoint)

    def _plan_recheck(self, router: Router) -> None:
        router.rechecks = True
        at_s = self._agenda.now_s + self._conditions.recheck_s
        self._agenda.add(at_s, Rank.RECHECK, self._recheck, router)

    def _recheck(self, router: Router) -> None:
        router.rechecks = False
        if not router.held:
            return
        router.stirred = True
        if not router.view.endpoints and not self._changes_to_come:
            self._refuse_held(router)
            return
        if self._agenda.now_s - self._quiet_since_s > HELD_QUIET_S_MAX and router.view.endpoints:
            raise PolicyError(f"{len(router.held)} requests are held for ever")
        self._plan_recheck(router)

    def _refuse_held(self, router: Router) -> None:
        """No endpoint is alive and none will be."""
        for outcome in list(router.held.values()):
            router.ended(outcome.request, self._agenda.now_s, ok=False)
            self._refuse(outcome)
        router.held.clear()

    # Changes of the fleet

    def _make_router(
        self,
        number: int,
        make_policy: Callable[[PolicyContext], Policy],
        kinds: Sequence[EngineKind],
    ) -> Router:
        conditions, block_tokens = self._conditions, self._fleet.block_tokens
        context = PolicyContext(
            endpoints=len(kinds),
            block_tokens=block_tokens,
            kv_tokens=tuple(kind.kv_tokens // block_tokens * block_tokens for kind in kinds),
            max_num_batched_tokens=kinds[0].max_num_batched_tokens,
            max_num_seqs=kinds[0].max_num_seqs,
            costs=tuple(kind.cost for kind in kinds),
            rng=Random(f"policy {self._seed} {number}"),
            scrape_s=conditions.scrape_s,
            first_byte_seen=conditions.first_byte_seen,
        )
        prefixes = self._make_prefixes()
        view = FleetView(self.endpoints, prefixes, self._oracle, self._agenda)
        policy = make_policy(context)
        return Router(number, policy, view, prefixes, seen=conditions.first_byte_seen)

    def _make_prefixes(self) -> Prefixes:
        conditions = self._conditions
        if conditions.prefix == "approximate":
            return SentPrefixes(self.endpoints)
        if conditions.kv_event_lag_s > 0 or conditions.kv_event_loss_ratio > 0:
            return ToldPrefixes(self.endpoints, self._agenda)
        return CachePrefixes(self.endpoints)

    def _add_endpoint(self, kind: EngineKind) -> None:
        endpoint = Endpoint(
            len(self.endpoints),
            kind,
            block_tokens=self._fleet.block_tokens,
            conditions=self._conditions,
            seed=self._seed,
        )
        endpoint.scrapes.restart(self._agenda.now_s)
        self.endpoints.append(endpoint)
        self._show_endpoints()

    def _show_endpoints(self) -> None:
        alive = tuple(endpoint.number for endpoint in self.endpoints if endpoint.alive)
        for router in self._routers:
            router.set_endpoints(alive)

    def _plan_change(self, at_s: float, action: Callable[[Any], None], argument: object) -> None:
        self._changes_to_come += 1
        self._agenda.add(at_s, Rank.CHANGE, self._change, (action, argument))

    def _change(self, planned: tuple[Callable[[Any], None], object]) -> None:
        self._changes_to_come -= 1
        self._quiet_since_s = self._agenda.now_s
        action, argument = planned
        action(argument)

    def _apply(self, fault: Fault) -> None:
        if isinstance(fault, Join):
            self._add_endpoint(fault.kind)
        elif isinstance(fault, Restart):
            self._plan_change(fault.at_s + fault.down_s, self._come_back, fault.endpoint)
            self._fail(self.endpoints[fault.endpoint])
        elif isinstance(fault, Leave):
            self._leave(self.endpoints[fault.endpoint])
        else:
            self._set_speed((fault.endpoint, fault.speed))
            self._plan_change(fault.until_s, self._set_speed, (fault.endpoint, 1.0))

    def _fail(self, endpoint: Endpoint) -> None:
        now_s = self._agenda.now_s
        lost = endpoint.lose()
        self._show_endpoints()
        self._deliver_all_of(endpoint)
        for flight in lost:
            self._routers[flight.router].ended(flight.outcome.request, now_s, ok=False)
        for router in self._routers:
            router.left(endpoint.number)
        for flight in lost:
            self._send_again(flight.outcome)

    def _send_again(self, outcome: Outcome) -> None:
        outcome.endpoint, outcome.dispatched_s, outcome.first_s = -1, -1.0, -1.0
        if outcome.retries >= self._conditions.retries_max:
            self._refuse(outcome)
            return
        outcome.retries += 1
        self._offer(outcome)

    def _come_back(self, number: int) -> None:
        endpoint = self.endpoints[number]
        endpoint.alive = True
        endpoint.scrapes.restart(self._agenda.now_s)
        self._show_endpoints()

    def _leave(self, endpoint: Endpoint) -> None:
        endpoint.alive, endpoint.leaving = False, True
        self._show_endpoints()
        if not endpoint.flights:
            self._depart(endpoint)

    def _depart(self, endpoint: Endpoint) -> None:
        """The last request of a leaving endpoint has ended."""
        endpoint.leaving = False
        self._deliver_all_of(endpoint)
        for router in self._routers:
            router.left(endpoint.number)

    def _set_speed(self, change: tuple[int, float]) -> None:
        number, factor = change
        endpoint = self.endpoints[number]
        endpoint.about_to_change(self._agenda.now_s)
        endpoint.set_speed(factor)
        if endpoint.step_end_s is not None:
            self._cut(endpoint)
