"""Entry to the simulator of a fleet: see `bench.sim.simulation` for how it works."""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.sim.conditions import Conditions, Fleet, HoldingPolicy, PolicyContext, PolicyError
from bench.sim.faults import Fault, Join, Leave, Restart, Slow
from bench.sim.model import Policy, Workload
from bench.sim.simulation import Run, Simulation

__all__ = [
    "Conditions",
    "Fault",
    "Fleet",
    "HoldingPolicy",
    "Join",
    "Leave",
    "PolicyContext",
    "PolicyError",
    "Restart",
    "Run",
    "Slow",
    "simulate",
]


def simulate(
    workload: Workload,
    fleet: Fleet,
    conditions: Conditions,
    make_policy: Callable[[PolicyContext], Policy],
    *,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Run a workload to its end.

    Args:
        make_policy: called once per router.
        seed: of everything that is left to chance; same arguments, same result.
        progress: told now and then which share of the requests has ended, 0..1.
    Raises: ValueError when the inputs do not fit together; PolicyError.
    """
    _check_inputs(workload, fleet, conditions)
    return Simulation(workload, fleet, conditions, make_policy, seed, progress).run()


def _check_inputs(workload: Workload, fleet: Fleet, conditions: Conditions) -> None:
    if workload.block_tokens != fleet.block_tokens:
        raise ValueError(
            f"workload {workload.name!r} has blocks of {workload.block_tokens} tokens, the fleet"
            f" of {fleet.block_tokens}: make them the same"
        )
    if not fleet.kinds:
        raise ValueError("the fleet has no endpoints")
    if conditions.routers < 1 or conditions.recheck_s <= 0 or conditions.retries_max < 0:
        raise ValueError("routers >= 1, recheck_s > 0 and retries_max >= 0 are needed")
    if conditions.regret_every < 0:
        raise ValueError("regret_every >= 0 is needed")
    before_s = 0.0
    for index, request in enumerate(workload.requests):
        if request.number != index or not before_s <= request.arrival_s < math.inf:
            raise ValueError(f"request {index} is not in its place: number or arrival_s is wrong")
        before_s = request.arrival_s
