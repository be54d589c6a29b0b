"""What is to be run and what came of it, as plain data.

So a run can happen in any process, and be recognised when it is there already: `basis` names the
code, the setup and the cell that a record came from.
"""

from __future__ import annotations

import msgspec

from bench.sim.experiments import Cell
from bench.sim.figures import Figures, LoadPoint
from bench.sim.regret import RegretFigures


class Task(msgspec.Struct, frozen=True):
    """One run to make."""

    cell: Cell
    policy: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the other tasks of a bench."""
        return self.cell.name, self.policy, self.seed


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a task."""

    cell: str
    policy: str
    seed: int
    basis: str
    wall_s: float
    """Of the machine that ran it; says nothing about the policy."""
    figures: Figures | None = None
    """`None`: it failed with `error`."""
    ceiling_ratio: float | None = None
    """Hit ratio of one pooled LRU cache as large as the fleet's at the start; `None` when no
    block is ever met again."""
    ttft_quantiles_s: list[float] = []
    """At 0, 1, ... 100 %."""
    load: list[LoadPoint] = []
    regret: RegretFigures | None = None
    """`None`: not looked at."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """That of its task."""
        return self.cell, self.policy, self.seed

    @property
    def ceiling_share(self) -> float | None:
        """Hit ratio / ceiling; `None` where there is nothing to hit."""
        if self.figures is None or not self.ceiling_ratio:
            return None
        return self.figures.hit_ratio / self.ceiling_ratio
