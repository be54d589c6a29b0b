"""What a request costs behind a real Envoy: CPU time of the EPP and of Envoy, and added latency.

`make bench-serve`, or `python -m bench.serve`. One Envoy (one worker) per arm, each with an EPP of
its own and all in front of the same cheap upstream, which stands for a pool of 64 endpoints on as
many addresses of loopback. The arm `none` is the same Envoy without ext_proc: the difference of
medians within a round is the added latency. Cells (arm, prompt size, connections) are measured one
at a time, interleaved over rounds; see `bench.measure`. Every answer is checked, also for how many
bytes of the request reached the upstream; any error makes the exit status 1.

What a response chunk costs is the difference between answers of 32 events and of one, both over the
same time, divided by the messages that Envoy says it sent more.

EPPs in the cells scrape every 10 s, so that scraping is no part of a request's cost; what it costs
is measured beside it: an EPP without requests, 100 endpoints, once a second. The EPP, Envoy, the
driver and the upstream share the machine's cores. CPU time stands that; requests per second and
latencies are those of this machine, with everything on it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import (
    CHUNK_BUDGET_US,
    IDLE_BUDGET_CORES,
    REQUEST_BUDGET_US,
    Spread,
    cpu_s,
    interleave,
    load_average,
    machine,
    parse_within,
    table,
    verdict,
)
from bench.traffic.driver import Job
from bench.traffic.site import ARMS, BASELINE, IDLE_ENDPOINTS, Arm, Site

MESSAGES_SENT = "http.inference.ext_proc.stream_msgs_sent"
WARM_UP_S = 0.3
STEP_MS = 10
"""Between two events of an answer; about an engine's decode step."""


class Cell(msgspec.Struct, frozen=True):
    """One thing to measure."""

    arm: Arm
    kib: int
    connections: int
    events: int = 0
    step_ms: int = 0


class Sample(msgspec.Struct, frozen=True):
    """One window of one cell. CPU times are per request, of all its threads."""

    cell: Cell
    round: int
    requests: int
    requests_per_s: float
    epp_cpu_us: float
    envoy_cpu_us: float
    driver_cpu_us: float
    upstream_cpu_us: float
    messages: float
    """ext_proc messages Envoy sent per request."""
    p50_us: float
    p99_us: float


class Row(msgspec.Struct, frozen=True):
    """A cell over all rounds."""

    arm: str
    prompt_kib: int
    connections: int
    requests: int
    epp_cpu_us: Spread | None
    """`None` for the arm without EPP, as is what follows from it."""
    envoy_cpu_us: Spread
    driver_cpu_us: Spread
    upstream_cpu_us: Spread
    requests_per_s: Spread
    p50_us: Spread
    p99_us: Spread
    added_p50_us: Spread | None
    messages: float
    budget_us: float | None
    """Budget of `epp_cpu_us`, which is stated for 16 connections."""


class ChunkRow(msgspec.Struct, frozen=True):
    """What one more response chunk costs."""

    arm: str
    epp_cpu_us: Spread
    envoy_cpu_us: Spread
    chunks: float
    """More messages per request, as Envoy counted them."""
    budget_us: float = CHUNK_BUDGET_US


class Report(msgspec.Struct):
    """Everything that is printed."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]
    chunks: list[ChunkRow]
    idle_cores: dict[str, Spread]
    """Arm -> cores used without requests, `IDLE_ENDPOINTS` scraped once a second."""
    errors: dict[str, int]


# -- measuring -----------------------------------------------------------------------------


class Bench:
    """Measures cells at a site, and counts errors."""

    def __init__(self, site: Site, seconds: float) -> None:
        self._site = site
        self._seconds = seconds
        self.errors: dict[str, int] = {}

    def measure(self, cell: Cell, *, number: int, seconds: float | None = None) -> Sample | None:
        """One window; `None` when nothing was answered."""
        site = self._site
        envoy, epp = site.envoys[cell.arm], site.epps.get(cell.arm)
        pids = (epp.pid if epp else 0, envoy.pid, site.driver.pid, site.upstream.pid)
        job = Job(
            port=envoy.port,
            connections=cell.connections,
            seconds=self._seconds if seconds is None else seconds,
            prompt_bytes=cell.kib * 1024,
            events=cell.events,
            step_ms=cell.step_ms,
        )
        messages = envoy.stat(MESSAGES_SENT)
        before_s = [cpu_s(pid) if pid else 0.0 for pid in pids]
        result = site.driver.run(job)
        used_s = [(cpu_s(p) if p else 0.0) - s for p, s in zip(pids, before_s, strict=True)]
        for what, times in result.errors.items():
            name = f"{cell.arm.name}, {cell.kib} KiB: {what}"
            self.errors[name] = self.errors.get(name, 0) + times
        if not result.requests:
            return None
        epp_us, envoy_us, driver_us, upstream_us = (s * 1e6 / result.requests for s in used_s)
        return Sample(
            cell=cell,
            round=number,
            requests=result.requests,
            requests_per_s=result.requests / result.seconds,
            epp_cpu_us=epp_us,
            envoy_cpu_us=envoy_us,
            driver_cpu_us=driver_us,
            upstream_cpu_us=upstream_us,
            messages=(envoy.stat(MESSAGES_SENT) - messages) / result.requests,
            p50_us=result.p50_us,
            p99_us=result.p99_us,
        )

    def run(self, groups: Sequence[Sequence[Cell]], rounds: int) -> list[Sample]:
        """Warm every cell up, then measure all of them, interleaved."""
        for _, cell in interleave(groups, 1):
            self.measure(cell, number=-1, seconds=min(WARM_UP_S, self._seconds))
        samples = []
        shown = -1
        for number, cell in interleave(groups, rounds):
            if number != shown:
                shown = number
                _say(f"round {number + 1} of {rounds}, load average {load_average()[0]}")
            if (sample := self.measure(cell, number=number)) is not None:
                samples.append(sample)
        return samples


def cells_of(
    arms: Sequence[Arm], sizes_kib: Sequence[int], connections: Sequence[int]
) -> list[list[Cell]]:
    """Groups of cells that differ in their arm only."""
    return [
        [Cell(arm, kib, many) for arm in arms if arm.kib is None or kib in arm.kib]
        for kib in sizes_kib
        for many in connections
    ]


def chunk_cells(arms: Sequence[Arm], kib: int, connections: int, events: int) -> list[list[Cell]]:
    """Per arm: one event after some time, and many events over the same time."""
    return [
        [
            Cell(arm, kib, connections, 1, events * STEP_MS),
            Cell(arm, kib, connections, events, STEP_MS),
        ]
        for arm in arms
        if arm.transport
    ]


# -- what comes of it ----------------------------------------------------------------------


def row_of(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Row:
    """Sum up the samples of one cell; `baseline` are those of the same cell without ext_proc."""
    cell = samples[0].cell
    has_epp = cell.arm.transport is not None
    without_us = {sample.round: sample.p50_us for sample in baseline}
    added_us = [s.p50_us - without_us[s.round] for s in samples if s.round in without_us]
    return Row(
        arm=cell.arm.name,
        prompt_kib=cell.kib,
        connections=cell.connections,
        requests=sum(sample.requests for sample in samples),
        epp_cpu_us=_spread(samples, "epp_cpu_us") if has_epp else None,
        envoy_cpu_us=_spread(samples, "envoy_cpu_us"),
        driver_cpu_us=_spread(samples, "driver_cpu_us"),
        upstream_cpu_us=_spread(samples, "upstream_cpu_us"),
        requests_per_s=_spread(samples, "requests_per_s"),
        p50_us=_spread(samples, "p50_us"),
        p99_us=_spread(samples, "p99_us"),
        added_p50_us=Spread.of(added_us) if has_epp and added_us else None,
        messages=_spread(samples, "messages").median,
        budget_us=REQUEST_BUDGET_US.get(cell.kib) if has_epp and cell.connections > 1 else None,
    )


def _spread(samples: Sequence[Sample], name: str) -> Spread:
    return Spread.of([getattr(sample, name) for sample in samples])


def rows_of(samples: Sequence[Sample], groups: Sequence[Sequence[Cell]]) -> list[Row]:
    """One row per cell that answered anything."""
    by_cell: dict[Cell, list[Sample]] = {}
    for sample in samples:
        by_cell.setdefault(sample.cell, []).append(sample)
    return [
        row_of(by_cell[cell], by_cell.get(Cell(BASELINE, cell.kib, cell.connections), ()))
        for group in groups
        for cell in group
        if cell in by_cell
    ]


def chunk_rows(samples: Sequence[Sample], groups: Sequence[Sequence[Cell]]) -> list[ChunkRow]:
    """Per arm, the difference per message between many events and one, round by round."""
    rows = []
    for one, many in groups:
        few = {s.round: s for s in samples if s.cell == one}
        pairs = [(few[s.round], s) for s in samples if s.cell == many and s.round in few]
        pairs = [(a, b) for a, b in pairs if b.messages > a.messages]
        if pairs:
            more = [b.messages - a.messages for a, b in pairs]
            epp = [(b.epp_cpu_us - a.epp_cpu_us) / (b.messages - a.messages) for a, b in pairs]
            envoy = [
                (b.envoy_cpu_us - a.envoy_cpu_us) / (b.messages - a.messages) for a, b in pairs
            ]
            rows.append(
                ChunkRow(one.arm.name, Spread.of(epp), Spread.of(envoy), Spread.of(more).median)
            )
    return rows


def report_text(report: Report) -> str:
    """The tables."""
    header = ("arm", "KiB", "conn", "EPP us/request", "budget", "Envoy us/request", "requests/s")
    latency = ("p50 ms", "p99 ms", "added p50 ms")
    parts = [
        "CPU time and latency per request: median (min..max) of the rounds",
        table((*header, *latency), [_cells_text(row) for row in report.rows]),
    ]
    if report.chunks:
        columns = ("arm", "EPP us/chunk", "budget", "Envoy us/chunk", "chunks/request")
        parts += ["One response chunk more", table(columns, map(_chunk_text, report.chunks))]
    for arm, cores in report.idle_cores.items():
        parts.append(
            f"Idle, {IDLE_ENDPOINTS} endpoints scraped once a second ({arm}): "
            f"{cores.text(digits=3)} cores, {verdict(cores.median, IDLE_BUDGET_CORES)}"
        )
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    parts.append(f"Machine: {facts}")
    parts += [f"ERROR {what}: {times} times" for what, times in report.errors.items()]
    return "\n\n".join(parts)


def _cells_text(row: Row) -> tuple[str, ...]:
    epp, added = row.epp_cpu_us, row.added_p50_us
    return (
        row.arm,
        str(row.prompt_kib),
        str(row.connections),
        epp.text() if epp else "",
        verdict(epp.median, row.budget_us) if epp and row.budget_us else "",
        row.envoy_cpu_us.text(),
        row.requests_per_s.text(),
        row.p50_us.text(scale=1e-3, digits=2),
        row.p99_us.text(scale=1e-3, digits=2),
        added.text(scale=1e-3, digits=2) if added else "",
    )


def _chunk_text(row: ChunkRow) -> tuple[str, ...]:
    epp = row.epp_cpu_us
    return (
        row.arm,
        epp.text(digits=1),
        verdict(epp.median, row.budget_us),
        row.envoy_cpu_us.text(digits=1),
        f"{row.chunks:.1f}",
    )


# -- the command ---------------------------------------------------------------------------


def main() -> int:
    """Measure, print, and tell by the exit status whether every answer was right."""
    args = _arguments()
    arms = [BASELINE, *(arm for arm in ARMS if arm.transport and arm.name in args.arms)]
    _say(f"arms {', '.join(arm.name for arm in arms)}; load average {load_average()}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-")))
        site = Site(stack, folder, arms, args.endpoints)
        _say("everything runs")
        report = _measure(site, arms, args)
    print(report_text(report))
    encoded = msgspec.json.encode(report)
    if args.json:
        Path(args.json).write_bytes(encoded + b"\n")
    else:
        print(f"\n{encoded.decode()}")
    return 1 if report.errors else 0


def _measure(site: Site, arms: Sequence[Arm], args: argparse.Namespace) -> Report:
    version = json.loads(site.envoys[BASELINE].admin("/server_info"))["version"]
    facts = machine(envoy=version.split("/")[1])
    bench = Bench(site, args.seconds)
    idle = {arms[1].name: site.idle_cores(arms[1], args.seconds)}
    cells = cells_of(arms, args.sizes, sorted({args.connections, 1}, reverse=True))
    samples = bench.run(cells, args.rounds)
    _say("response chunks")
    pairs = chunk_cells(arms, min(args.sizes), args.connections, args.events)
    chunk_samples = bench.run(pairs, args.rounds) if args.events > 1 else []
    facts["load_average_after"] = load_average()
    return Report(
        machine=facts,
        settings={name: value for name, value in vars(args).items() if name != "json"},
        rows=rows_of(samples, cells),
        chunks=chunk_rows(chunk_samples, pairs),
        idle_cores=idle,
        errors=bench.errors,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = [arm.name for arm in ARMS if arm.transport]
    add("--arms", type=_names, default=names, metavar="A,B", help="besides Envoy without ext_proc")
    add("--sizes", type=_sizes, default=[1, 16, 128], metavar="N,N", help="of prompts, KiB")
    add("--rounds", type=int, default=5, help="how often each cell is measured")
    add("--seconds", type=float, default=1.0, help="length of one window")
    add("--connections", type=int, default=16, help="requests at once, beside 1")
    add("--endpoints", type=int, default=64, help="of the pool, at most 254")
    add("--events", type=int, default=32, help="of a streamed answer; 1 leaves chunks out")
    add("--json", metavar="FILE", help="write the JSON there, not behind the tables")
    bounds = {"rounds": (1, 1000), "connections": (1, 1000), "endpoints": (1, 254)}
    args = parse_within(parser, {**bounds, "events": (1, 1000), "seconds": (0.05, 600)})
    unknown = [name for name in args.arms if name not in names]
    if unknown or not args.arms:
        parser.error(f"--arms takes {', '.join(names)}, not {','.join(unknown) or 'nothing'}")
    return args


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in _names(text)]
    if not sizes or not all(1 <= size <= 1024 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are 1 to 1024 KiB")
    return sizes


def _say(what: str) -> None:
    print(f"bench-serve: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
