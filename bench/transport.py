"""What the transports cost: `fast` and `grpcio` in turn, in one run, as `epp serve` runs them.

`make bench-transport`, or `python -m bench.transport`. Five parts, each bounded in time:

echo        the transport and the codec alone (`bench.traffic.echo`), driven as in the next part
direct      `bench.traffic.replay` writes the frames Envoy would write to the EPP's port, so that
            nothing but the EPP is measured: CPU time per stream by prompt size and number of
            response chunks, 16 streams at once and one, plaintext and TLS
envoy       the same requests through a real Envoy, as `bench.serve` measures them
open        thousands of event streams held open: memory of each, and how long a new request takes
reset       streams opened, answered and reset, as Envoy ends them: growth of memory

Every answer is checked; any error makes the exit status 1. All share the machine's cores; see
`bench.measure` for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench import serve
from bench.measure import (
    CHUNK_BUDGET_US,
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
from bench.stack import Epp
from bench.traffic.echo import Echo
from bench.traffic.replay import Job, Replayer, Result
from bench.traffic.site import BASELINE, SCRAPE_EVERY, Arm, Site

FAST, GRPCIO = Arm("fast", "fast"), Arm("grpcio", "grpcio")
FAST_TLS = Arm("fast+tls", "fast", True, (16,))
GRPCIO_TLS = Arm("grpcio+tls", "grpcio", True, (16,))
ARMS = (BASELINE, FAST, GRPCIO, FAST_TLS, GRPCIO_TLS)
CHUNKS = (0, 4, 32)
TLS_CHUNKS = 4
WARM_UP_S = 0.3
OPEN_WAVE = 250
"""Streams opened at once, on a connection of their own: gRPC's own server refuses some of those
that come in a burst of more than a thousand."""
OPEN_WARM_UP_STREAMS = 300
PROBES = 300
"""Requests, one after the other, whose latency is that of a new request."""
SETTLE_S = 0.5
RESET_WAVES = 8

ECHO_BUDGET_US = {1: 55.0, 16: 80.0, 128: 390.0}
"""Prompt KiB -> CPU time of transport and codec per stream, 16 at once, without response chunks,
which have a budget of their own."""
RATIO_BUDGET = 8.0
"""grpcio / fast, CPU time per stream: at least."""
ADDED_BUDGET_US = 600.0
"""Median of added latency behind Envoy, one request at a time."""
TLS_BUDGET_RATIO = 1.4
"""TLS / plaintext, CPU time at 16 KiB."""
OPEN_BUDGET_KIB = 25.0
NEW_REQUEST_BUDGET_US = 5_000.0


class Server(NamedTuple):
    """A process that serves ext_proc."""

    pid: int
    port: int


class Cell(msgspec.Struct, frozen=True):
    """One thing to measure with the direct driver."""

    arm: Arm
    kib: int
    chunks: int
    concurrency: int


class Direct(msgspec.Struct, frozen=True):
    """A cell over all rounds."""

    arm: str
    prompt_kib: int
    chunks: int
    concurrency: int
    streams: int
    epp_cpu_us: Spread
    streams_per_s: Spread
    p50_us: Spread


class OpenStreams(msgspec.Struct, frozen=True):
    """An EPP with many event streams open."""

    arm: str
    streams: int
    memory_kib: float
    """Per open stream."""
    probe_p50_us: float
    """Of a new request while they are open, from its first byte to the last answer to it."""
    probe_before_p50_us: float
    """The same before they were."""


class Resets(msgspec.Struct, frozen=True):
    """An EPP after many streams that were opened, answered and reset."""

    arm: str
    streams: int
    memory_kib: list[int]
    """Before, and after each of `RESET_WAVES` equal parts."""
    growth_kib: float
    """From after a quarter of them to the end."""


class Promise(msgspec.Struct, frozen=True):
    """One figure against its budget."""

    what: str
    value: float
    budget: float
    verdict: str


class Report(msgspec.Struct):
    """Everything that is printed."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    echo: list[Direct] = []
    direct: list[Direct] = []
    envoy: list[serve.Row] = []
    chunks: list[serve.ChunkRow] = []
    open: list[OpenStreams] = []
    resets: list[Resets] = []
    promises: list[Promise] = []
    errors: dict[str, int] = {}


# -- measuring -----------------------------------------------------------------------------


class Driven:
    """The direct driver, and the errors it met."""

    def __init__(self, seconds: float) -> None:
        self.errors: dict[str, int] = {}
        self._seconds = seconds
        self._replayer = Replayer()
        self.stop = self._replayer.stop

    def run(self, arm: Arm, job: Job) -> Result:
        """Do one job."""
        result = self._replayer.run(job)
        for what, times in result.errors.items():
            name = f"{arm.name}, direct, {job.prompt_bytes // 1024} KiB: {what}"
            self.errors[name] = self.errors.get(name, 0) + times
        return result

    def measure(self, server: Server, cell: Cell, seconds: float) -> tuple[float, Result]:
        """CPU time of the server per stream in us, and what the driver saw."""
        job = Job(
            port=server.port,
            tls=cell.arm.tls,
            concurrency=cell.concurrency,
            seconds=seconds,
            prompt_bytes=cell.kib * 1024,
            chunks=cell.chunks,
        )
        before_s = cpu_s(server.pid)
        result = self.run(cell.arm, job)
        return (cpu_s(server.pid) - before_s) * 1e6 / max(1, result.streams), result

    def rows(
        self, servers: Mapping[Arm, Server], groups: Sequence[Sequence[Cell]], rounds: int
    ) -> list[Direct]:
        """Warm every cell up, then measure all of them, interleaved."""
        for _, cell in interleave(groups, 1):
            self.measure(servers[cell.arm], cell, min(WARM_UP_S, self._seconds))
        seen: dict[Cell, list[tuple[float, Result]]] = {}
        for number, cell in interleave(groups, rounds):
            if cell == groups[0][0]:
                _say(f"round {number + 1} of {rounds}, load average {load_average()[0]}")
            seen.setdefault(cell, []).append(self.measure(servers[cell.arm], cell, self._seconds))
        return [_direct(cell, seen[cell]) for group in groups for cell in group]


def _direct(cell: Cell, samples: Sequence[tuple[float, Result]]) -> Direct:
    results = [result for _, result in samples]
    return Direct(
        arm=cell.arm.name,
        prompt_kib=cell.kib,
        chunks=cell.chunks,
        concurrency=cell.concurrency,
        streams=sum(result.streams for result in results),
        epp_cpu_us=Spread.of([us for us, _ in samples]),
        streams_per_s=Spread.of([r.streams / max(r.seconds, 1e-9) for r in results]),
        p50_us=Spread.of([result.p50_us for result in results]),
    )


def direct_cells(arms: Sequence[Arm], sizes_kib: Sequence[int]) -> list[list[Cell]]:
    """Groups of cells that differ in their arm only."""

    def group(kib: int, chunks: int, concurrency: int) -> list[Cell]:
        measured = [a for a in arms if a.transport and (not a.tls or chunks == TLS_CHUNKS)]
        return [Cell(a, kib, chunks, concurrency) for a in measured if not a.kib or kib in a.kib]

    many = [group(kib, chunks, 16) for kib in sizes_kib for chunks in CHUNKS]
    return many + [group(kib, CHUNKS[1], 1) for kib in sizes_kib]


@contextmanager
def fresh_epp(folder: Path, arm: Arm, endpoints: Sequence[str], name: str) -> Iterator[Epp]:
    """An EPP that has served nothing yet."""
    flags = [
        f"--endpoints={','.join(endpoints)}",
        f"--transport={arm.transport}",
        f"--secure-serving={str(arm.tls).lower()}",
        "--drain-timeout=0s",
        SCRAPE_EVERY,
    ]
    epp = Epp(folder, flags, name=name)
    try:
        epp.start()
        yield epp
    finally:
        epp.stop()


def memory_kib(pid: int) -> int:
    """Resident memory of a process."""
    time.sleep(SETTLE_S)
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def open_streams(driven: Driven, epp: Epp, arm: Arm, streams: int) -> OpenStreams:
    """Hold so many event streams open, each in the middle of its answer."""
    base = Job(port=epp.ports["grpc"], seconds=60.0, concurrency=16)
    driven.run(arm, msgspec.structs.replace(base, streams=OPEN_WARM_UP_STREAMS))
    probe = msgspec.structs.replace(base, streams=PROBES, concurrency=1, chunks=1)
    before = driven.run(arm, probe)
    before_kib = memory_kib(epp.pid)
    held = msgspec.structs.replace(base, streams=OPEN_WAVE, concurrency=OPEN_WAVE, keep=True)
    waves = [driven.run(arm, held) for _ in range(-(-streams // OPEN_WAVE))]
    opened = sum(wave.streams for wave in waves)
    per_stream_kib = (memory_kib(epp.pid) - before_kib) / max(1, opened)
    during = driven.run(arm, probe)
    driven.run(arm, msgspec.structs.replace(probe, drop_kept=True))
    return OpenStreams(
        arm=arm.name,
        streams=opened,
        memory_kib=per_stream_kib,
        probe_p50_us=during.p50_us,
        probe_before_p50_us=before.p50_us,
    )


def resets(driven: Driven, epp: Epp, arm: Arm, streams: int) -> Resets:
    """Open, answer and reset so many streams, one wave after the other, each on a connection of
    its own."""
    wave = -(-streams // RESET_WAVES)
    seconds_max = 20.0 + wave / 500
    job = Job(port=epp.ports["grpc"], seconds=seconds_max, concurrency=50, chunks=1, streams=wave)
    done, memory = 0, [memory_kib(epp.pid)]
    for _ in range(RESET_WAVES):
        done += driven.run(arm, job).streams
        memory.append(memory_kib(epp.pid))
    growth_kib = memory[-1] - memory[RESET_WAVES // 4]
    return Resets(arm=arm.name, streams=done, memory_kib=memory, growth_kib=growth_kib)


# -- what comes of it ----------------------------------------------------------------------


def promises(report: Report) -> list[Promise]:
    """Every figure that has a budget and was measured."""
    rows = {(r.arm, r.prompt_kib, r.connections > 1): r for r in report.envoy}
    made = [
        _promise(
            f"transport and codec, {row.prompt_kib} KiB, us/stream",
            row.epp_cpu_us.median,
            ECHO_BUDGET_US[row.prompt_kib],
        )
        for row in report.echo
        if (row.arm, row.chunks, row.concurrency) == (FAST.name, 0, 16)
        and row.prompt_kib in ECHO_BUDGET_US
    ]
    for (arm, kib, many), row in rows.items():
        if arm != FAST.name or row.epp_cpu_us is None:
            continue
        if many and kib in REQUEST_BUDGET_US:
            what = f"fast behind Envoy, {kib} KiB, us/request"
            made.append(_promise(what, row.epp_cpu_us.median, REQUEST_BUDGET_US[kib]))
        if not many and row.added_p50_us is not None:
            what = f"added latency, {kib} KiB, one at a time, p50 us"
            made.append(_promise(what, row.added_p50_us.median, ADDED_BUDGET_US))
    made += [
        _promise("fast behind Envoy, us/response chunk", row.epp_cpu_us.median, CHUNK_BUDGET_US)
        for row in report.chunks
        if row.arm == FAST.name
    ]
    made += _ratios(report, rows)
    for held in report.open:
        if held.arm == FAST.name:
            made.append(_promise("KiB per open stream", held.memory_kib, OPEN_BUDGET_KIB))
            what = f"new request with {held.streams} streams open, p50 us"
            made.append(_promise(what, held.probe_p50_us, NEW_REQUEST_BUDGET_US))
    return made


def _ratios(report: Report, rows: dict[tuple[str, int, bool], serve.Row]) -> list[Promise]:
    def cpu_us(arm: Arm, kib: int) -> float | None:
        row = rows.get((arm.name, kib, True))
        return row.epp_cpu_us.median if row is not None and row.epp_cpu_us is not None else None

    made = []
    for kib in sorted({row.prompt_kib for row in report.envoy}):
        fast, old, tls = cpu_us(FAST, kib), cpu_us(GRPCIO, kib), cpu_us(FAST_TLS, kib)
        if fast and old:
            what, ratio = f"grpcio / fast behind Envoy, {kib} KiB, at least", old / fast
            made.append(Promise(what, ratio, RATIO_BUDGET, _at_least(ratio, RATIO_BUDGET)))
        if fast and tls:
            what = f"TLS / plaintext behind Envoy, {kib} KiB"
            made.append(_promise(what, tls / fast, TLS_BUDGET_RATIO))
    return made


def _promise(what: str, value: float, budget: float) -> Promise:
    return Promise(what, round(value, 2), budget, verdict(value, budget))


def _at_least(value: float, budget: float) -> str:
    return "met" if value >= budget else f"missed x{budget / value:.1f}"


def report_text(report: Report) -> str:
    """The tables."""
    parts = []
    for title, measured in (
        ("Transport and codec alone", report.echo),
        ("The whole EPP, driven directly", report.direct),
    ):
        if measured:
            header = ("arm", "KiB", "chunks", "at once", "CPU us/stream", "streams/s", "p50 us")
            parts += [f"{title}: median (min..max)", table(header, map(_direct_text, measured))]
    if report.envoy:
        behind = serve.Report(
            machine=report.machine,
            settings=report.settings,
            rows=report.envoy,
            chunks=report.chunks,
            idle_cores={},
            errors={},
        )
        parts.append(serve.report_text(behind))
    if report.open:
        columns = ("arm", "open", "KiB/stream", "new request p50 us", "without them")
        parts += ["Open event streams", table(columns, map(_open_text, report.open))]
    for r in report.resets:
        memory = " ".join(map(str, r.memory_kib))
        what = f"{r.arm}, {r.streams} streams reset: memory growth {r.growth_kib:.0f} KiB"
        parts.append(f"{what}; before and after each eighth: {memory} KiB")
    if report.promises:
        told = [(p.what, f"{p.value:.1f}", f"{p.budget:g}", p.verdict) for p in report.promises]
        parts.append(table(("promise", "measured", "budget", ""), told))
    parts += [f"ERROR {what}: {times} times" for what, times in report.errors.items()]
    return "\n\n".join(parts)


def _direct_text(row: Direct) -> tuple[str, ...]:
    case = (row.arm, str(row.prompt_kib), str(row.chunks), str(row.concurrency))
    return (*case, row.epp_cpu_us.text(), row.streams_per_s.text(), row.p50_us.text())


def _open_text(row: OpenStreams) -> tuple[str, ...]:
    probes = (f"{row.probe_p50_us:.0f}", f"{row.probe_before_p50_us:.0f}")
    return (row.arm, str(row.streams), f"{row.memory_kib:.1f}", *probes)


# -- the command ---------------------------------------------------------------------------


def main() -> int:
    """Measure, print, and tell by the exit status whether every answer was right."""
    args = _arguments()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-transport-")))
        site = Site(stack, folder, ARMS, args.endpoints)
        driven = Driven(args.seconds)
        stack.callback(driven.stop)
        _say(f"everything runs, load average {load_average()}")
        report = _measure(site, driven, folder, args)
    print(report_text(report))
    encoded = msgspec.json.encode(report)
    if args.json:
        Path(args.json).write_bytes(encoded + b"\n")
    else:
        print(f"\n{encoded.decode()}")
    return 1 if report.errors else 0


def _measure(site: Site, driven: Driven, folder: Path, args: argparse.Namespace) -> Report:
    version = json.loads(site.envoys[BASELINE].admin("/server_info"))["version"]
    bench = serve.Bench(site, args.seconds)
    report = Report(
        machine=machine(envoy=version.split("/")[1]),
        settings={name: value for name, value in vars(args).items() if name != "json"},
    )
    if "echo" in args.parts:
        report.echo = _measure_echo(driven, folder, args)
    if "direct" in args.parts:
        epps = {arm: Server(epp.pid, epp.ports["grpc"]) for arm, epp in site.epps.items()}
        report.direct = driven.rows(epps, direct_cells(ARMS, args.sizes), args.rounds)
    if "envoy" in args.parts:
        _measure_behind_envoy(bench, report, args)
    endpoints = [endpoint["address"] for endpoint in site.epps[FAST].state()["endpoints"]]
    for arm in (FAST, GRPCIO):
        if "open" in args.parts:
            _say(f"open streams, {arm.name}")
            with fresh_epp(folder, arm, endpoints, f"epp-{arm.name}-open") as epp:
                report.open.append(open_streams(driven, epp, arm, args.open))
        if "reset" in args.parts:
            _say(f"reset streams, {arm.name}")
            with fresh_epp(folder, arm, endpoints, f"epp-{arm.name}-reset") as epp:
                streams = args.churn if arm is FAST and args.churn else args.resets
                report.resets.append(resets(driven, epp, arm, streams))
    report.machine["load_average_after"] = load_average()
    report.promises = promises(report)
    report.errors = {**driven.errors, **bench.errors}
    return report


def _measure_echo(driven: Driven, folder: Path, args: argparse.Namespace) -> list[Direct]:
    with ExitStack() as stack:
        servers = {}
        for arm in (FAST, GRPCIO):
            echo = Echo(folder, arm.name)
            stack.callback(echo.stop)
            echo.start()
            servers[arm] = Server(echo.pid, echo.port)
        return driven.rows(servers, direct_cells(tuple(servers), args.sizes), args.rounds)


def _measure_behind_envoy(bench: serve.Bench, report: Report, args: argparse.Namespace) -> None:
    cells = serve.cells_of(ARMS, args.sizes, [16, 1])
    report.envoy = serve.rows_of(bench.run(cells, args.rounds), cells)
    pairs = serve.chunk_cells((FAST, GRPCIO), min(args.sizes), 16, max(CHUNKS))
    report.chunks = serve.chunk_rows(bench.run(pairs, args.rounds), pairs)


PARTS = ("echo", "direct", "envoy", "open", "reset")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    add("--sizes", nargs="+", type=int, default=[1, 16, 128], help="of prompts, KiB")
    add("--rounds", type=int, default=5, help="how often each cell is measured")
    add("--seconds", type=float, default=0.7, help="length of one window")
    add("--endpoints", type=int, default=64, help="of the pool, at most 254")
    add("--open", type=int, default=2_000, help="event streams held open")
    add("--resets", type=int, default=20_000, help="streams opened, answered and reset")
    add("--churn", type=int, default=0, metavar="N", help="the same for fast alone; 0 = as many")
    add("--json", metavar="FILE", help="write the JSON there, not behind the tables")
    bounds = {"rounds": (1, 1000), "endpoints": (1, 254), "seconds": (0.05, 600)}
    bounds |= {"open": (1, 10_000), "resets": (8, 1_000_000), "churn": (0, 10_000_000)}
    args = parse_within(parser, bounds)
    if not all(1 <= size <= 1024 for size in args.sizes):
        parser.error("--sizes must be 1 to 1024 KiB")
    return args


def _say(what: str) -> None:
    print(f"bench-transport: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
