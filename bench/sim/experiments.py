"""What is measured, as data: cells, the situations they are measured in, and named grids of them.

A cell is one workload at one speed on one fleet in one situation; every policy meets it with every
seed. Arrivals are scaled with the fleet: speed 1 on 16 endpoints has twice the requests per second
of speed 1 on 8, so that the load of an endpoint depends on the speed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from types import MappingProxyType

import msgspec

from bench.sim.conditions import Conditions, Fleet
from bench.sim.faults import Fault, Join, Restart, Slow
from bench.sim.hardware import HARDWARE, EngineKind
from bench.sim.model import Workload
from bench.sim.plan import WorkloadOptions

BLOCK_TOKENS = 512
"""Of workloads and of `Cell.kv_blocks`; only the logs of a replay may have others."""
ENDPOINTS_AT_SPEED_1 = 8
PLAIN = "plain"
DEFAULT_HARDWARE = next(iter(HARDWARE))
MIXED_SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 1.5, 1.5)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a bench share."""

    traces: str = ""
    """Folder with the trace files; empty = generated workloads only."""
    requests_max: int | None = None
    """The first so many requests of every workload; `None` = all."""
    trace_file: str = ""
    """Of a replay: the one workload."""
    trace_digest: str = ""
    """Names what is in it."""
    regret_every: int = 0
    """See `Conditions.regret_every`."""
    configs: tuple[tuple[str, str], ...] = ()
    """Names of policies that are configurations of the product, and their YAML."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure."""

    workload: str
    """Name in `bench.sim.workloads.WORKLOADS`, or of the file of a replay."""
    speed: float = 1.0
    """Arrival rate against the trace's own on eight endpoints, > 0."""
    kv_blocks: int | None = 2048
    """KV capacity of an endpoint in blocks of 512 tokens; `None` = the hardware's own."""
    endpoints: int = 8
    situation: str = PLAIN
    """Name in `SITUATIONS`."""
    hardware: str = DEFAULT_HARDWARE
    """Name in `bench.sim.hardware.HARDWARE`."""
    speeds: tuple[float, ...] = ()
    """Speeds of the endpoints, in turn; empty = all 1."""

    @property
    def name(self) -> str:
        """How it is written in tables and matched by `--cells`."""
        capacity = "" if self.kv_blocks is None else f"/{self.kv_blocks}b"
        parts = [f"{self.workload}-x{self.speed:g}{capacity}/{self.endpoints}e"]
        parts += [self.situation] * (self.situation != PLAIN)
        parts += ["mixed"] * bool(self.speeds)
        parts += [self.hardware] * (self.hardware != DEFAULT_HARDWARE)
        return "/".join(parts)

    @property
    def rate(self) -> float:
        """Factor on the arrival rate of the workload."""
        return self.speed * self.endpoints / ENDPOINTS_AT_SPEED_1

    def options(self, setup: Setup, seed: int) -> WorkloadOptions:
        """How its workload is made."""
        return WorkloadOptions(
            seed=seed,
            requests_max=setup.requests_max,
            speed=self.rate,
            block_tokens=BLOCK_TOKENS,
            traces=setup.traces or None,
        )


# -- situations ----------------------------------------------------------------------------

MakeFaults = Callable[[float, EngineKind], tuple[Fault, ...]]
"""From the time of the last arrival in seconds, and the kind of engine of the fleet."""


class Situation(msgspec.Struct, frozen=True):
    """What the router sees and what goes wrong."""

    conditions: Conditions
    faults: MakeFaults = lambda _last_s, _kind: ()


SITUATIONS: Mapping[str, Situation] = MappingProxyType(
    {
        PLAIN: Situation(Conditions()),
        "first-byte-late": Situation(Conditions(first_byte_late_s=0.05)),
        "first-byte-hidden": Situation(Conditions(first_byte_seen=False)),
        "scrapes-5s": Situation(Conditions(scrape_s=5.0)),
        "no-scrapes": Situation(Conditions(scrape_s=None)),
        "events-late": Situation(Conditions(kv_event_lag_s=2.0)),
        "events-lost": Situation(Conditions(kv_event_loss_ratio=0.01)),
        "approximate": Situation(Conditions(prefix="approximate")),
        "three-routers": Situation(Conditions(routers=3)),
        "restart": Situation(
            Conditions(), lambda last_s, _: (Restart(at_s=last_s / 2, endpoint=0, down_s=30.0),)
        ),
        "half-speed": Situation(
            Conditions(),
            lambda last_s, _: (
                Slow(at_s=last_s / 4, endpoint=0, speed=0.5, until_s=last_s * 3 / 4),
            ),
        ),
        "scale-up": Situation(
            Conditions(), lambda last_s, kind: (Join(at_s=last_s / 2, kind=kind),) * 2
        ),
    }
)


def fleet_of(cell: Cell, block_tokens: int = BLOCK_TOKENS) -> Fleet:
    """The engines of a cell, for a workload with blocks of this size."""
    blocks = None if cell.kv_blocks is None else cell.kv_blocks * BLOCK_TOKENS // block_tokens
    return Fleet.of(
        HARDWARE[cell.hardware],
        cell.endpoints,
        kv_blocks=blocks,
        block_tokens=block_tokens,
        speeds=cell.speeds or None,
    )


def conditions_of(cell: Cell, workload: Workload, fleet: Fleet) -> Conditions:
    """What the router sees and what goes wrong in a cell, at times that fit the workload."""
    situation = SITUATIONS[cell.situation]
    faults = situation.faults(workload.requests[-1].arrival_s, fleet.kinds[0])
    return msgspec.structs.replace(situation.conditions, faults=faults)


# -- grids ---------------------------------------------------------------------------------


def _cells(
    workloads: Sequence[tuple[str, float]],
    kv_blocks: Iterable[int] = (2048,),
    endpoints: Iterable[int] = (8,),
    situations: Iterable[str] = (PLAIN,),
    speeds: tuple[float, ...] = (),
) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            workload=workload,
            speed=speed,
            kv_blocks=blocks,
            endpoints=size,
            situation=situation,
            speeds=speeds,
        )
        for (workload, speed), blocks, size, situation in product(
            workloads, kv_blocks, endpoints, situations
        )
    )


def _at(workload: str, *speeds: float) -> list[tuple[str, float]]:
    return [(workload, speed) for speed in speeds]


CONVERSATION, SYNTHETIC = "conversation", "synthetic"
NO_PREFIX_SPEED = 8.0
"""Prompts of the Azure trace are short: at its own speed eight endpoints are idle."""

TARGETS = [
    *_at(CONVERSATION, 1, 1.5, 2, 2.5),
    *_at(SYNTHETIC, 1.5, 2, 2.5),
    *_at("weka", 1),
    *_at("azure", NO_PREFIX_SPEED),
    *_at("siblings", 1),
]
DISTURBANCES = tuple(name for name in SITUATIONS if name != PLAIN)

GRIDS: Mapping[str, tuple[Cell, ...]] = MappingProxyType(
    {
        "quick": (
            *_cells(_at("chats", 1, 1.5, 2, 2.5), endpoints=(4,)),
            *_cells(_at("chats", 2), (600, 8192), (4,)),
            *_cells(_at("siblings", 1), endpoints=(4,)),
            *_cells(_at("hot-prefix", 1), endpoints=(4,)),
        ),
        "core": (
            *_cells(_at(CONVERSATION, 1, 1.5, 2, 2.5)),
            *_cells(_at(CONVERSATION, 2), (600, 8192)),
            *_cells(_at(CONVERSATION, 2), endpoints=(64,)),
            *_cells(_at(SYNTHETIC, 1.5, 2, 2.5)),
            *_cells(_at("weka", 1), (8192,)),
            *_cells(_at("azure", NO_PREFIX_SPEED)),
            *_cells(_at("siblings", 1)),
        ),
        "load": (
            *_cells(_at(CONVERSATION, 0.5, 1, 1.5, 1.75, 2, 2.25, 2.5, 2.75)),
            *_cells(_at(SYNTHETIC, 0.5, 1, 1.5, 2, 2.25, 2.5, 2.75, 3)),
            *_cells(_at("weka", 0.5, 0.75, 1, 1.25, 1.5), (8192,)),
            *_cells(_at("siblings", 0.5, 1, 1.5, 2)),
        ),
        "targets": _cells(TARGETS, (600, 2048, 8192), (4, 8, 16, 64)),
        "overload": (
            *_cells(_at(CONVERSATION, 2, 2.5, 3), (600,)),
            *_cells(_at(CONVERSATION, 3)),
            *_cells(_at(SYNTHETIC, 3)),
            *_cells(_at("weka", 2), (2048, 8192)),
            *_cells(_at("azure", 1.5 * NO_PREFIX_SPEED)),
            *_cells(_at("siblings", 2)),
            *_cells(_at("hot-prefix", 1.5)),
        ),
        "mixed-speeds": _cells(
            [*_at(CONVERSATION, 1, 1.5, 2), *_at(SYNTHETIC, 1.5, 2)], speeds=MIXED_SPEEDS
        ),
        "disturbed": _cells(
            [*_at(CONVERSATION, 2), *_at(SYNTHETIC, 2)], situations=(PLAIN, *DISTURBANCES)
        ),
    }
)


def select(grid: str, patterns: Sequence[str] = ()) -> list[Cell]:
    """Cells of a grid that fit one of the patterns: a whole name, or else a part of it, in which
    `*` stands for anything; no pattern = all.

    Raises: ValueError naming what there is, when the grid is unknown or nothing is left.
    """
    if grid not in GRIDS:
        raise ValueError(f"no grid is called {grid!r}; there are {', '.join(GRIDS)}")
    names = [cell.name for cell in GRIDS[grid]]
    wanted = [each if each in names else f"*{each}*" for each in patterns or ("*",)]
    cells = [c for c in GRIDS[grid] if any(fnmatchcase(c.name, each) for each in wanted)]
    if not cells:
        there = "\n  ".join(names)
        raise ValueError(f"no cell of {grid} matches {', '.join(patterns)}; there are\n  {there}")
    return cells
