"""What the benches share: CPU time of other processes, drivers in processes of their own,
interleaved rounds, spreads, tables.

CPU time is read from the kernel's clock of each process of a tree (Linux; the tree is read from
/proc): user and system time together, threads that have ended included, in nanoseconds, where
/proc/PID/stat counts steps of 10 ms. It is read from outside, so it costs the measured process
nothing. What one request costs is the CPU time of a window divided by the requests that completed
in it, so a figure depends on how busy the machine is far less than a latency does: but it does, as
caches and clock rates are shared. Hence rounds: every case is measured once per round, in another
order each time, and a figure is quoted as the median of its rounds with their extremes.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TypeVar

import msgspec

REQUEST_BUDGET_US: Mapping[int, float] = MappingProxyType({1: 110, 16: 170, 128: 650})
"""Prompt KiB -> CPU time of the whole EPP per request, behind Envoy, 16 at once, 64 endpoints."""
CORE_BUDGET_US: Mapping[int, float] = MappingProxyType({1: 40, 16: 80, 128: 230})
"""The part of it for: parse, hash, look up, score, pick, charge, learn."""
CHUNK_BUDGET_US = 15.0
"""CPU time per response chunk seen."""
DECISION_BUDGET_US = 200.0
"""Median of one decision on a prompt of 8192 tokens with 64 endpoints."""
IDLE_BUDGET_CORES = 0.1
"""Cores used by an EPP without requests that scrapes 100 endpoints once a second."""

T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """Median and extremes of the rounds of one figure."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(round(median(values), 3), round(min(values), 3), round(max(values), 3))

    def text(self, *, scale: float = 1.0, digits: int = 0) -> str:
        """`median (min..max)`, each multiplied by `scale`."""
        middle, low, high = (
            f"{value * scale:.{digits}f}" for value in (self.median, self.min, self.max)
        )
        return f"{middle} ({low}..{high})"


def percentile(values: Sequence[float], ratio: float) -> float:
    """The smallest value that at least `ratio` (0..1) of `values` do not exceed.

    Raises: ValueError when there is no value.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-ratio * len(ordered) // 1) - 1))]


def interleave(groups: Sequence[Sequence[T]], rounds: int) -> Iterator[tuple[int, T]]:
    """Round numbers and cases: each round has every case once.

    Args:
        groups: what is compared with each other stays together; the order within a group is turned
            by one each round, so that no case always follows the same other one.
    """
    for number in range(rounds):
        for group in groups:
            turn = number % len(group) if group else 0
            for case in (*group[turn:], *group[:turn]):
                yield number, case


def verdict(value: float, budget: float) -> str:
    """`met`, or `missed` and by how much."""
    return "met" if value <= budget else f"missed x{value / budget:.1f}"


# -- processes -----------------------------------------------------------------------------


def process_tree(pid: int) -> list[int]:
    """A process and its descendants; a process that has gone has none."""
    found = [pid]
    for pid in found:
        for task in _tasks(pid):
            try:
                children = (task / "children").read_text().split()
            except OSError:  # the thread has ended meanwhile
                continue
            found += [child for text in children if (child := int(text)) not in found]
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds a process tree has used so far; 0 for a process that has gone.

    A child that ends between two readings takes its time with it: good for servers that keep
    theirs.
    """
    return sum(_process_cpu_s(member) for member in process_tree(pid))


def _process_cpu_s(pid: int) -> float:
    # As clock_getcpuclockid(3) names it: the clock of all the threads of another process.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Worker:
    """A module of ours that does jobs in a process of its own, one after the other: each job is a
    line of JSON on its standard input, each result one on its standard output."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: msgspec.Struct, timeout_s: float) -> bytes:
        """The result of a job; empty when the process died, as it does when it takes longer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(timeout_s, process.kill)
        watchdog.start()
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return b""
        finally:
            watchdog.cancel()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# -- the command line ----------------------------------------------------------------------


def parse_within(
    parser: argparse.ArgumentParser, bounds: Mapping[str, tuple[float, float]]
) -> argparse.Namespace:
    """The arguments of this process; one outside its (least, greatest) value is an error."""
    args = parser.parse_args()
    for name, (low, high) in bounds.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} must be {low} to {high}")
    return args


# -- what is printed -----------------------------------------------------------------------


def machine(**more: object) -> dict[str, object]:
    """What figures depend on and cannot be read without."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load_average": load_average(),
        **more,
    }


def load_average() -> list[float]:
    """Processes that run or want to, averaged over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns aligned with spaces: the first to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
