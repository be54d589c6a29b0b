"""Small fleets, workloads and policies for the simulator's tests."""

from __future__ import annotations

from random import Random

from bench.engine.cost import CostModel
from bench.sim.cluster import Conditions, Fleet, PolicyContext, Run, simulate
from bench.sim.faults import Fault, Join, Leave, Restart, Slow
from bench.sim.hardware import EngineKind
from bench.sim.model import Policy, SimRequest, View, Workload

BLOCK = 10

PLAIN = EngineKind(
    name="plain",
    cost=CostModel(
        step_base_s=1.0,
        prefill_token_s=0.01,
        attention_pair_s=0.0,
        decode_sequence_s=0.1,
        decode_kv_token_s=0.0,
    ),
    kv_tokens=1000,
    source="round figures, for sums in the head",
)


def asked(
    number: int, arrival_s: float, prompt_tokens: int, output_tokens: int = 1, *, text: int = -1
) -> SimRequest:
    """A request; those of one `text` share as much prefix as both have."""
    root = 1000 * (text if text >= 0 else 1_000_000 + number)
    return SimRequest(
        number=number,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=tuple(range(root, root + prompt_tokens // BLOCK)),
    )


def workload_of(*requests: SimRequest) -> Workload:
    return Workload("test", requests, BLOCK)


def fleet_of(endpoints: int, *, kv_blocks: int = 100, kind: EngineKind = PLAIN) -> Fleet:
    return Fleet.of(kind, endpoints, kv_blocks=kv_blocks, block_tokens=BLOCK)


class First:
    """The lowest endpoint that is alive; writes down what it is told, with the time."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.calls: list[tuple[str, int, float]] = []

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:
        self.calls.append(("choose", request.number, now_s))
        return self.pick(request, view, now_s)

    def pick(self, request: SimRequest, view: View, now_s: float) -> int | None:
        return view.endpoints[0]

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        self.calls.append(("first_byte", request.number, now_s))

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        self.calls.append(("ended" if ok else "failed", request.number, now_s))

    def left(self, endpoint: int) -> None:
        self.calls.append(("left", endpoint, -1.0))


class InTurn(First):
    def pick(self, request: SimRequest, view: View, now_s: float) -> int | None:
        return view.endpoints[request.number % len(view.endpoints)]


class Anywhere(First):
    """By chance, and looks at everything there is to see."""

    def pick(self, request: SimRequest, view: View, now_s: float) -> int | None:
        for endpoint in view.endpoints:
            scrape = view.scrape(endpoint)
            assert scrape is None or 0 <= scrape.at_s <= now_s + 1e-9
            assert 0 <= view.matched_tokens(request, endpoint) < request.prompt_tokens
            assert view.kv_tokens(endpoint) > 0
        return self.context.rng.choice(view.endpoints)


class OneEach(First):
    """Holds what comes while its endpoint, by number, has a request; lets go the newest first."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.busy: dict[int, int] = {}
        self.kept: list[SimRequest] = []
        self.passes: list[float] = []

    def pick(self, request: SimRequest, view: View, now_s: float) -> int | None:
        free = [endpoint for endpoint in view.endpoints if endpoint not in self.busy.values()]
        if not free:
            self.kept.append(request)
            return None
        self.busy[request.number] = free[0]
        return free[0]

    def pass_held(self, view: View, now_s: float) -> list[tuple[SimRequest, int]]:
        self.passes.append(now_s)
        passed = []
        for endpoint in view.endpoints:
            if self.kept and endpoint not in self.busy.values():
                request = self.kept.pop()
                self.busy[request.number] = endpoint
                passed.append((request, endpoint))
        return passed

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        super().ended(request, now_s, ok=ok)
        self.busy.pop(request.number, None)
        self.kept = [kept for kept in self.kept if kept is not request]


def run(
    workload: Workload,
    fleet: Fleet,
    make: type[First] = First,
    *,
    seed: int = 1,
    **conditions: object,
) -> tuple[Run, list[First]]:
    """A run and the policies of its routers."""
    made: list[First] = []

    def make_policy(context: PolicyContext) -> Policy:
        made.append(make(context))
        return made[-1]

    return simulate(workload, fleet, Conditions(**conditions), make_policy, seed=seed), made


def random_workload(rng: Random, requests: int = 60, *, rate: float = 3.0) -> Workload:
    """Some with shared prefixes, some at the same moment, some too long for a small cache."""
    at_s = 0.0
    planned = []
    for number in range(requests):
        at_s += rng.choice((0.0, rng.expovariate(rate)))
        text = rng.choice((-1, 0, 1, 2))
        planned.append(asked(number, at_s, rng.randint(1, 300), rng.randint(1, 60), text=text))
    return workload_of(*planned)


def random_faults(rng: Random, endpoints: int) -> tuple[Fault, ...]:
    """Restarts everywhere, one of them of the whole fleet at times; a join; a leave; slowness."""
    faults: list[Fault] = [Join(rng.uniform(1, 20), PLAIN)]
    for endpoint in range(endpoints - 1):
        at_s = rng.uniform(0, 15)
        faults.append(Restart(at_s, endpoint, rng.uniform(0.01, 8)))
        faults.append(Slow(at_s + 10, endpoint, rng.choice((0.3, 2.0)), at_s + 25))
    faults.append(Leave(rng.uniform(0, 30), endpoints - 1))
    return tuple(faults)
