"""One run: a policy in a cell with a seed, from names to figures.

A policy that breaks loses its own run, not the others: the record carries the error instead.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from bench.sim import replay
from bench.sim.ceiling import pooled_lru_ratio
from bench.sim.cluster import PolicyContext, simulate
from bench.sim.experiments import Cell, Setup, conditions_of, fleet_of
from bench.sim.figures import figures_of, load_over_time, ttft_quantiles_s
from bench.sim.model import Policy, Workload
from bench.sim.records import Record, Task
from bench.sim.regret import regret_figures
from bench.sim.workloads import WORKLOADS

MakePolicy = Callable[[PolicyContext], Policy]
Progress = Callable[[float], None]
"""Takes the share of a run that is done, 0..1."""

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("epp", "bench/engine", "bench/sim")
PRESENTATION = frozenset(
    {"report.py", "markdown.py", "plots.py", "drawing.py", "progress.py", "__main__.py"}
)
"""Of bench/sim: what shows results and makes none."""


class Bench:
    """Makes the runs of one setup."""

    def __init__(self, setup: Setup, policies: Mapping[str, MakePolicy]) -> None:
        self.setup = setup
        self.policies = policies

    def attempt(self, task: Task, progress: Progress | None = None) -> Record:
        """The record of a task, with the error when it failed; never raises one of the run."""
        start_s = time.perf_counter()
        basis = self.basis(task)
        try:
            record = self._run(task, basis, progress)
        except Exception as error:  # noqa: BLE001 - a broken policy must not lose the other runs
            cell, policy, seed = task.key
            record = Record(
                cell=cell, policy=policy, seed=seed, basis=basis, wall_s=0.0, error=_told(error)
            )
        wall_s = round(time.perf_counter() - start_s, 3)
        return msgspec.structs.replace(record, wall_s=wall_s)

    def basis(self, task: Task) -> str:
        """A name for all that the record of a task depends on, next to its key: equal names mean
        that the record would be the same."""
        data = msgspec.json.encode((code_digest(), self.setup, task.cell))
        return hashlib.sha256(data).hexdigest()[:12]

    def check_source(self, cell: Cell, seed: int) -> list[str]:
        """See whether the workload of a cell can be had at all: its beginning is read; of a replay
        the whole log, once, for all runs and processes that come of this one.

        Returns: what a person has to know of the log, line by line.
        Raises: WorkloadError, OSError.
        """
        if self.setup.trace_file:
            return _log(self.setup, cell)[1]
        few = msgspec.structs.replace(self.setup, requests_max=1)
        _workload(few, cell, seed)
        return []

    def _run(self, task: Task, basis: str, progress: Progress | None) -> Record:
        cell, policy, seed = task.key
        workload = _workload(self.setup, task.cell, seed)
        fleet = fleet_of(task.cell, workload.block_tokens)
        conditions = conditions_of(task.cell, workload, fleet)
        run = simulate(
            workload,
            fleet,
            msgspec.structs.replace(conditions, regret_every=self.setup.regret_every),
            self.policies[policy],
            seed=seed,
            progress=progress,
        )
        return Record(
            cell=cell,
            policy=policy,
            seed=seed,
            basis=basis,
            wall_s=0.0,
            figures=figures_of(run.outcomes, run.timeline, endpoints=run.endpoints),
            ceiling_ratio=_ceiling_ratio(self.setup, task.cell, seed),
            ttft_quantiles_s=[float(f"{each:.4g}") for each in ttft_quantiles_s(run.outcomes)],
            load=load_over_time(run.timeline),
            regret=regret_figures(run.regrets),
        )


def _told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# Policies of a cell and seed run one after the other in a process: what they share is made once.


@lru_cache(maxsize=2)
def _workload(setup: Setup, cell: Cell, seed: int) -> Workload:
    if setup.trace_file:  # as it was logged: not scaled with the fleet
        return _log(setup, cell)[0]
    return WORKLOADS[cell.workload](cell.options(setup, seed))


@lru_cache(maxsize=1)
def _log(setup: Setup, cell: Cell) -> tuple[Workload, list[str]]:
    """The requests of a log, and what there is to say of its lines."""
    bad = replay.BadLines()
    workload = replay.load(
        setup.trace_file, speed=cell.speed, requests_max=setup.requests_max, bad=bad
    )
    return workload, bad.told(bad.count + len(workload.requests))


@lru_cache(maxsize=2)
def _ceiling_ratio(setup: Setup, cell: Cell, seed: int) -> float | None:
    kv_tokens = sum(kind.kv_tokens for kind in fleet_of(cell).kinds)  # whatever the block size
    return pooled_lru_ratio(_workload(setup, cell, seed), kv_tokens) or None


# -- what the records depend on ------------------------------------------------------------


@cache
def code_digest() -> str:
    """A name for the code that makes runs: the product, the engine and the simulator."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent != ROOT / "bench/sim" or path.name not in PRESENTATION:
                yield path
