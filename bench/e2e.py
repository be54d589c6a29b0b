"""Time to first token behind a real Envoy, under three ways to route.

`make bench-e2e`, or `python -m bench.e2e`. Nothing of it is computed in virtual time: simulated
engines answer over HTTP at their pace, `epp serve` decides, Envoy forwards, a client reads streams.

- round robin: Envoy's own, the same bootstrap without the ext_proc filter (see `bench.demo.arms`)
- reference scorers: this EPP with the weighted scorers the reference EPP's chart installs, and its
  period of scrapes, 50 ms: its scorers live on fresh ones
- expected latency: this EPP without a configuration file, which scrapes once a second

A round is one seed's workload once under each of them, one after the other, in another order each
round; every run starts new processes, so all caches are empty and nothing has been learned. The
workload is that of `bench.demo.workload`, in a size where routing matters: the conversations fit
the caches of all engines together, not that of one, and engines are busy about half the time under
a good router. Requests of the first seconds only fill the caches and are not counted.

Routers are compared in pairs: the ratio of two figures of the same round, its geometric mean over
the rounds, and Student's t interval of the logarithms.

TTFT is the client's: from sending to the first byte of the event stream, the hop to the EPP
included. It tells something of routing only while the machine keeps up, so the CPU of every process
is measured, too, and a warning is printed when cores or engines were the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import msgspec
import uvloop

from bench.demo import report
from bench.demo.arms import Runner, without_ext_proc
from bench.demo.figures import Arm, errors_of, figures, percentile
from bench.demo.progress import Progress
from bench.demo.run import interruptible, uninterrupted
from bench.demo.workload import Phase, Plan, Shape, make_plan
from bench.measure import Spread, cpu_s, interleave, load_average, machine, parse_within, table
from bench.sim.figures import Interval, t_interval
from bench.stack import NotReadyError, Stack
from epp.envoy.command import render
from epp.envoy.options import EnvoyOptions

MODEL = "sim"
SHAPE = Shape(
    applications=6,
    chat_slots=36,
    turns=(3, 7),
    turn_gap_s=(1.0, 2.4),
    ramp_s=4.0,
    unrelated_per_s=3.0,
    unrelated_tokens=(500, 6000),
)
KV_BLOCKS = 6_500
"""Of 16 tokens, per engine: room for the conversations of two engines of four, not of all."""
MEASURED = 1
"""Phase that counts."""
ROUNDS_MIN = 3
"""For an interval: that of two rounds is 12.7 standard errors wide, which says nothing."""
BUSY_RATIO_MAX = 0.8
"""Of the machine's cores, or of the one core of a process: beyond it times measure the machine."""
TTFTS = ("mean_s", "p50_s", "p90_s", "p99_s")
INTERRUPTED = 130


class Router(msgspec.Struct, frozen=True):
    """A way to route."""

    name: str
    epp_flags: tuple[str, ...] = ()
    bootstrap: Callable[[EnvoyOptions], str] = render


WEIGHTED = Path(__file__).parents[1] / "deploy" / "config" / "weighted.yaml"
REFERENCE = Router(
    "reference scorers", (f"--config-file={WEIGHTED}", "--refresh-metrics-interval=50ms")
)
ROUTERS = (
    Router("round robin", bootstrap=without_ext_proc),
    REFERENCE,
    Router("expected latency"),
)


class Cores(msgspec.Struct, frozen=True):
    """CPU time over time: 1 = one core."""

    engine: float
    """Of the engine that used most."""
    engines: float
    """Of all of them."""
    epp: float
    envoy: float
    client: float
    machine: float
    """Everything on the machine, the bench included."""

    @property
    def ours(self) -> float:
        """All processes of the bench."""
        return self.engines + self.epp + self.envoy + self.client


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run, its counted requests."""

    router: str
    seed: int
    requests: int
    errors: int
    """Of the whole run."""
    hit_ratio: float
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    cores: Cores
    engines_late_s: float
    requests_late_s: float
    """How much later than planned the latest request was sent."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A router over all rounds."""

    router: str
    requests: int
    errors: int
    hit_ratio: Spread
    ttft: dict[str, Spread]
    """By `TTFTS`, seconds."""
    ratio_to_reference: dict[str, Interval]
    """By `TTFTS`: below 1 = faster; empty for the reference itself."""
    cores: dict[str, Spread]


class Report(msgspec.Struct):
    """Everything that is printed."""

    machine: dict[str, object]
    settings: dict[str, object]
    rows: list[Row]
    samples: list[Sample]
    warnings: list[str]


# -- measuring -----------------------------------------------------------------------------


class Bench:
    """Runs routers one at a time, and remembers what came of it."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self._args, self._progress = args, progress
        self.arms: list[Arm] = []
        self.samples: list[Sample] = []

    def run(self, routers: Sequence[Router]) -> None:
        """All rounds. Raises: NotReadyError when a process fails."""
        rounds = self._args.rounds
        for number, router in interleave([routers], rounds):
            load = load_average()[0]
            self._progress.say(f"round {number + 1} of {rounds}: {router.name}; load {load}")
            self.samples.append(self.measure(router, self._args.seed + number))

    def measure(self, router: Router, seed: int) -> Sample:
        """One run."""
        plan = self._plan(seed)
        with self._stack(router) as stack:
            runner = Runner(router.name, stack, plan, self._progress, model=MODEL, seed=seed)
            clock = CoreClock(stack)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                arm = loop.run(runner.run())
            cores = clock.read()
        self._progress.clear()
        self.arms.append(arm)
        return sample_of(arm, cores, seed)

    def _plan(self, seed: int) -> Plan:
        args = self._args
        phases = (Phase("not counted", args.warm_up), Phase("counted", args.seconds))
        shape = msgspec.structs.replace(SHAPE, ramp_s=min(SHAPE.ramp_s, args.warm_up))
        return make_plan(shape, phases, seed=seed)

    @contextmanager
    def _stack(self, router: Router) -> Iterator[Stack]:
        args = self._args
        flags = [f"--speed={args.speed}", f"--num-gpu-blocks-override={KV_BLOCKS}"]
        stack = Stack(
            engines=[flags] * args.engines,
            epp_flags=router.epp_flags,
            bootstrap=router.bootstrap,
        )
        try:
            stack.start()
            yield stack
        finally:
            with uninterrupted():
                stack.stop()


class CoreClock:
    """CPU time of the processes of a stack, of this one and of the machine, from now on."""

    def __init__(self, stack: Stack) -> None:
        self._pids = [stack.epp.pid, stack.envoy.pid, os.getpid()]
        self._pids += [engine.pid for engine in stack.engines]
        self._from = self._read()

    def read(self) -> Cores:
        """Mean since the start."""
        used = [now - then for now, then in zip(self._read(), self._from, strict=True)]
        wall_s, machine_s, epp_s, envoy_s, client_s, *engines_s = used
        return Cores(
            engine=round(max(engines_s) / wall_s, 3),
            engines=round(sum(engines_s) / wall_s, 3),
            epp=round(epp_s / wall_s, 3),
            envoy=round(envoy_s / wall_s, 3),
            client=round(client_s / wall_s, 3),
            machine=round(machine_s / wall_s, 3),
        )

    def _read(self) -> list[float]:
        own_s = sum(os.times()[:2])
        used_s = [own_s if pid == os.getpid() else cpu_s(pid) for pid in self._pids]
        return [os.times().elapsed, machine_cpu_s(), *used_s]


def machine_cpu_s() -> float:
    """CPU seconds of everything that ran on this machine, in steps of 10 ms; 0 where the kernel
    does not tell."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# -- what comes of it ----------------------------------------------------------------------


def sample_of(arm: Arm, cores: Cores, seed: int) -> Sample:
    """Raises: NotReadyError when none of the counted requests was answered."""
    counted = [outcome for outcome in arm.outcomes if outcome.phase == MEASURED]
    ttfts_s = sorted(o.ttft_s for o in counted if o.ttft_s is not None)
    p50_s, p90_s, p99_s = (percentile(ttfts_s, part) for part in (0.5, 0.9, 0.99))
    if p50_s is None or p90_s is None or p99_s is None:
        errors = {outcome.error for outcome in arm.outcomes}
        raise NotReadyError(f"{arm.name}: no request was answered; {sorted(errors)[:3]}")
    return Sample(
        router=arm.name,
        seed=seed,
        requests=len(counted),
        errors=len(errors_of(arm)),
        hit_ratio=figures(arm, counted).hit_ratio or 0.0,
        mean_s=mean(ttfts_s),
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        cores=cores,
        engines_late_s=arm.engine_late_s or 0.0,
        requests_late_s=max(outcome.late_s for outcome in arm.outcomes),
    )


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """One per router, in the order of `ROUTERS`."""
    by_router = {
        router.name: sorted((s for s in samples if s.router == router.name), key=lambda s: s.seed)
        for router in ROUTERS
    }
    reference = by_router[REFERENCE.name]
    return [
        Row(
            router=name,
            requests=sum(sample.requests for sample in own),
            errors=sum(sample.errors for sample in own),
            hit_ratio=Spread.of([sample.hit_ratio for sample in own]),
            ttft={key: Spread.of([getattr(s, key) for s in own]) for key in TTFTS},
            ratio_to_reference=(
                {} if own is reference else {k: paired_ratio(own, reference, k) for k in TTFTS}
            ),
            cores={
                key: Spread.of([getattr(s.cores, key) for s in own])
                for key in (*Cores.__struct_fields__, "ours")
            },
        )
        for name, own in by_router.items()
    ]


def paired_ratio(own: Sequence[Sample], reference: Sequence[Sample], key: str) -> Interval:
    """Geometric mean over the seeds of own / reference figure; without ends below `ROUNDS_MIN`."""
    pairs = zip(own, reference, strict=True)
    logs = t_interval([math.log(getattr(a, key) / getattr(b, key)) for a, b in pairs])
    if len(own) < ROUNDS_MIN:
        return Interval(math.exp(logs.mean))
    ends = [None if end is None else math.exp(end) for end in (logs.low, logs.high)]
    return Interval(math.exp(logs.mean), *ends)


def warnings_of(samples: Sequence[Sample], cores: int) -> list[str]:
    """How the machine, and not the engines' pace, may have set the times.

    Args:
        cores: of the machine.
    """
    runs, found = len(samples), []
    busy = [s.cores for s in samples if s.cores.machine > BUSY_RATIO_MAX * cores]
    if busy:
        most, own = max(c.machine for c in busy), max(c.ours for c in busy)
        found.append(
            f"{len(busy)} of {runs} runs: up to {most:.2f} of {cores} cores in use, "
            f"up to {own:.2f} by this bench"
        )
    for name in ("engine", "epp", "envoy", "client"):
        most = max(getattr(sample.cores, name) for sample in samples)
        if most > BUSY_RATIO_MAX:
            found.append(f"{name}: up to {most:.2f} cores in use, and it has but one")
    return found


def report_text(result: Report, arms: Sequence[Arm]) -> str:
    """The tables."""
    rows = result.rows
    rounds = len(result.samples) // len(rows)
    head = ("", "requests", "errors", "hit ratio", "mean", "p50", "p90", "p99")
    ratios = [row for row in rows if row.ratio_to_reference]
    used = ("engine", "engines", "epp", "envoy", "client", "ours", "machine")
    parts = [
        f"TTFT in ms: median (min..max) of {rounds} rounds",
        table(head, [_ttft_text(row) for row in rows]),
        f"Ratio to the {REFERENCE.name} in the same round: {_interval_text(rounds)}; "
        "below 1 is faster",
        table(("", *head[4:]), [(row.router, *_ratio_texts(row)) for row in ratios]),
        "Cores in use (median): busiest engine, all engines, ..., this bench, the whole machine",
        table(("", *used), [(r.router, *(f"{r.cores[k].median:.2f}" for k in used)) for r in rows]),
        "\n".join(line.strip() for line in report.lateness(arms, report.Paint(on=False)) if line),
        "Machine: " + ", ".join(f"{name} {value}" for name, value in result.machine.items()),
    ]
    return "\n\n".join([*parts, *(f"WARNING {text}" for text in result.warnings)])


def _interval_text(rounds: int) -> str:
    if rounds >= ROUNDS_MIN:
        return "mean (95 %)"
    return f"mean, no interval: that needs {ROUNDS_MIN} rounds or more, and there {_are(rounds)}"


def _are(rounds: int) -> str:
    return "is one" if rounds == 1 else f"are {rounds}"


def _ttft_text(row: Row) -> tuple[str, ...]:
    times = (row.ttft[key].text(scale=1e3) for key in TTFTS)
    return (row.router, str(row.requests), str(row.errors), row.hit_ratio.text(digits=2), *times)


def _ratio_texts(row: Row) -> Iterator[str]:
    for key in TTFTS:
        ratio = row.ratio_to_reference[key]
        known = ratio.low is not None and ratio.high is not None
        yield f"{ratio.mean:.2f}" + (f" ({ratio.low:.2f}..{ratio.high:.2f})" if known else "")


# -- the command ---------------------------------------------------------------------------


def main() -> int:
    """Measure and print; the status tells whether every request was answered."""
    args = _arguments()
    try:
        with interruptible():
            return _main(args)
    except KeyboardInterrupt:
        print("\ninterrupted; everything is stopped", file=sys.stderr)
        return INTERRUPTED
    except NotReadyError as error:
        print(f"\nbench-e2e: {error}", file=sys.stderr)
        return 1


def _main(args: argparse.Namespace) -> int:
    facts = machine()
    bench = Bench(args, Progress(sys.stderr))
    bench.run(ROUTERS)
    result = Report(
        machine={**facts, "load_average_after": load_average()},
        settings={
            **{name: value for name, value in vars(args).items() if name != "json"},
            "kv_blocks": KV_BLOCKS,
            "shape": msgspec.structs.asdict(SHAPE),
        },
        rows=rows_of(bench.samples),
        samples=bench.samples,
        warnings=warnings_of(bench.samples, len(os.sched_getaffinity(0))),
    )
    print(report_text(result, bench.arms))
    encoded = msgspec.json.encode(result)
    if args.json:
        Path(args.json).write_bytes(encoded + b"\n")
    else:
        print(f"\n{encoded.decode()}")
    return 1 if any(row.errors for row in result.rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.e2e",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="seeds, each run once per router")
    add("--seed", type=int, default=1, help="of the first round; the next have the next ones")
    add("--seconds", type=float, default=8.0, help="of each run that are counted")
    add("--warm-up", type=float, default=4.0, help="seconds before them")
    add("--engines", type=int, default=4, help="simulated engines")
    add("--speed", type=float, default=2.0, help="theirs; 1 = Qwen3-32B on two H100")
    add("--json", metavar="FILE", help="write the JSON there, not behind the tables")
    bounds = {"rounds": (1, 100), "engines": (1, 64), "speed": (0.01, 100.0), "seconds": (1, 3600)}
    return parse_within(parser, {**bounds, "warm_up": (0, 3600)})


if __name__ == "__main__":
    sys.exit(main())
