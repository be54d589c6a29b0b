"""What one decision costs, in process and without a network: stage by stage and as a whole.

`make bench-pick`, or `python -m bench.pick`. The profile, the parameters and the code are those of
`epp serve` without a configuration; loads come in as scrapes do, requests are chats of which three
in four continue one that was seen before, and each is in flight while the next 32 are decided.

    parse      body -> Request
    match      prompt -> names of its blocks -> who holds how many of them
    schedule   snapshot, filters, scorers, picker, charge
    rescore    the same right after a scrape changed a load, when cached scores are made anew
    learn      the picked endpoint's blocks go into the index (after the answer was written)
    events     the whole exchange, decoded events to replies: request / response
    bytes      the same through the codec, and with the counters of telemetry (counted)
    messages   the last one, message by message
    chunk      one more event of a streamed answer, bytes to bytes

Times are CPU time of this thread, less what reading its clock costs, median of all requests of a
round; a figure is the median of the rounds and their extremes. The stages of a request follow each
other as in a server: a loop over one of them finds its code in the cache, and shows about half for
a small prompt. What the whole process costs, `make bench-serve` says.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.measure import (
    CHUNK_BUDGET_US,
    CORE_BUDGET_US,
    DECISION_BUDGET_US,
    REQUEST_BUDGET_US,
    Spread,
    interleave,
    load_average,
    machine,
    percentile,
    table,
    verdict,
)
from bench.pick_paths import MESSAGES, Exchanges, Figures, Stages, World, clock_us

DECISION_KIB = 32
"""8192 tokens, at 4 bytes each."""
CORE_STAGES = ("parse", "match", "schedule", "learn")

# -- what comes of it ----------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One pool size and prompt size. Times in us of CPU."""

    endpoints: int
    prompt_kib: int
    figures: dict[str, Spread]
    """Stage or path -> its medians per round."""
    decision_p50_us: float
    decision_p99_us: float
    """Over all requests of all rounds."""
    core_us: float
    """Sum of `CORE_STAGES`."""
    core_budget_us: float | None
    """`None`: none is stated for this size; all are for 64 endpoints."""
    total_us: float
    """Bytes to bytes, request and response, counted: all but the transport."""
    total_budget_us: float | None
    """Of the whole request, the transport included."""


class Report(msgspec.Struct):
    """Everything that is printed."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]


class Cell:
    """One pool size and prompt size, and what was measured."""

    def __init__(self, endpoints: int, kib: int, overhead_us: float) -> None:
        self.endpoints, self.kib = endpoints, kib
        world = World(endpoints, kib)
        self._paths = (Stages(world, overhead_us), Exchanges(world, overhead_us))
        self._medians: Figures = {}
        self._decisions_us: list[float] = []

    def warm_up(self, requests: int) -> None:
        """Fill the index and the caches."""
        for path in self._paths:
            path.run(requests, {})

    def measure(self, requests: int) -> None:
        """One round."""
        figures: Figures = {}
        for path in self._paths:
            path.run(requests, figures)
        self._decisions_us += figures.pop("decision")
        for name, values in figures.items():
            self._medians.setdefault(name, []).append(median(values))

    def row(self) -> Row:
        """Sum it up."""
        figures = {name: Spread.of(values) for name, values in self._medians.items()}
        budgeted = self.endpoints == 64
        total_us = figures["counted_request"].median + figures["counted_response"].median
        return Row(
            endpoints=self.endpoints,
            prompt_kib=self.kib,
            figures=figures,
            decision_p50_us=round(percentile(self._decisions_us, 0.5), 3),
            decision_p99_us=round(percentile(self._decisions_us, 0.99), 3),
            core_us=round(sum(figures[stage].median for stage in CORE_STAGES), 3),
            core_budget_us=CORE_BUDGET_US.get(self.kib) if budgeted else None,
            total_us=round(total_us, 3),
            total_budget_us=REQUEST_BUDGET_US.get(self.kib) if budgeted else None,
        )


def report_text(report: Report) -> str:
    """The tables."""
    stages = ("parse", "match", "schedule", "rescore", "learn")
    first = table(
        ("endpoints", "KiB", *stages, "core", "budget", "decision p50", "p99"),
        [
            (
                str(row.endpoints),
                str(row.prompt_kib),
                *(row.figures[stage].text(digits=1) for stage in stages),
                f"{row.core_us:.0f}",
                verdict(row.core_us, row.core_budget_us) if row.core_budget_us else "",
                f"{row.decision_p50_us:.0f}",
                f"{row.decision_p99_us:.0f}",
            )
            for row in report.rows
        ],
    )
    second = table(
        ("endpoints", "KiB", "events", "bytes", "bytes, counted", "total", "of budget", "chunk"),
        [_paths_text(row) for row in report.rows],
    )
    parts = ["Stages, CPU us: median (min..max) of the rounds", first]
    parts += ["Whole exchanges, CPU us: request + response", second]
    third = table(
        ("endpoints", "KiB", *(name.replace("_", " ") for name in MESSAGES)),
        [
            (
                str(row.endpoints),
                str(row.prompt_kib),
                *(row.figures[name].text(digits=1) for name in MESSAGES),
            )
            for row in report.rows
        ],
    )
    parts += ["Messages, bytes and counted, CPU us", third]
    parts += _verdicts(report.rows)
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return "\n\n".join([*parts, f"Machine: {facts}"])


def _paths_text(row: Row) -> tuple[str, ...]:
    pairs = [
        f"{row.figures[f'{path}_request'].median:.0f} + "
        f"{row.figures[f'{path}_response'].median:.0f}"
        for path in ("events", "bytes", "counted")
    ]
    share = f"{row.total_us / row.total_budget_us:.0%}" if row.total_budget_us else ""
    chunk = row.figures["chunk"].text(digits=1)
    return (
        str(row.endpoints),
        str(row.prompt_kib),
        *pairs,
        f"{row.total_us:.0f}",
        share,
        chunk,
    )


def _verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.endpoints == 64 and row.prompt_kib == DECISION_KIB:
            met = verdict(row.decision_p50_us, DECISION_BUDGET_US)
            lines.append(
                f"Decision at 8192 tokens, 64 endpoints: p50 {row.decision_p50_us:.0f} us, "
                f"budget {DECISION_BUDGET_US:.0f}: {met}"
            )
    chunk_us = median(row.figures["chunk"].median for row in rows)
    lines.append(
        f"Response chunk, without transport: {chunk_us:.1f} us, budget {CHUNK_BUDGET_US:.0f} with "
        f"it: {verdict(chunk_us, CHUNK_BUDGET_US)}"
    )
    return lines


# -- the command ---------------------------------------------------------------------------


def main() -> int:
    """Measure and print."""
    args = _arguments()
    overhead_us = clock_us()
    cells = [Cell(count, kib, overhead_us) for count in args.endpoints for kib in args.sizes]
    for cell in cells:
        cell.warm_up(args.requests)
    gc.collect()
    gc.freeze()  # as `epp serve` does
    shown = -1
    for number, cell in interleave([cells], args.rounds):
        if number != shown:
            shown = number
            text = f"round {number + 1} of {args.rounds}, load average {load_average()[0]}"
            print(f"bench-pick: {text}", file=sys.stderr, flush=True)
        cell.measure(args.requests)
    report = Report(
        machine=machine(clock_us=round(overhead_us, 3)),
        settings={name: value for name, value in vars(args).items() if name != "json"},
        rows=[cell.row() for cell in cells],
    )
    print(report_text(report))
    if args.json:
        Path(args.json).write_bytes(msgspec.json.encode(report) + b"\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    sizes = [1, 16, DECISION_KIB, 128]
    add("--endpoints", type=_numbers, default=[8, 64, 512], metavar="N,N", help="of the pool")
    add("--sizes", type=_numbers, default=sizes, metavar="N,N", help="of prompts, KiB")
    add("--rounds", type=int, default=7, help="how often each cell is measured")
    add("--requests", type=int, default=60, help="per cell, path and round")
    add("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    for name, low, high in (("rounds", 1, 1000), ("requests", 8, 100_000)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} must be {low} to {high}")
    return args


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= 4096 for number in numbers):
        raise argparse.ArgumentTypeError("numbers are 1 to 4096")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
