"""The flags of `python -m bench.sim`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.sim.experiments import GRIDS
from bench.sim.hardware import HARDWARE

DESCRIPTION = """\
Routing policies in virtual time: every policy meets every workload of a grid with the same seeds.

  python -m bench.sim --quick                               generated workloads, under two minutes
  python -m bench.sim --grid core --traces DIR              a dozen cells on public traces
  python -m bench.sim --grid targets --cells weka --list    what there is
  python -m bench.sim replay LOG --config A.yaml --config B.yaml --endpoints 8
                                                            your own log under your configurations
"""
EPILOG = """\
Writes results/NAME.json (a summary, to be kept) and out/NAME/: report.md, plots, and the journal of
all runs, from which --resume goes on. Exit status: 0; 1 a run failed; 2 wrong input; 130
interrupted.
"""
DEFAULT_SEEDS = "11-15"
QUICK_REQUESTS = 300
JOBS_MAX = 256
REGRET_EVERY = 10
SEEDS_MAX = 1000
BENCH = Path(__file__).resolve().parents[1]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags say."""

    arguments: tuple[str, ...]
    """As they were given."""
    name: str
    """Of the results."""
    grid: str = ""
    """Empty: a replay."""
    cells: tuple[str, ...] = ()
    """Patterns; empty = all."""
    policies: tuple[str, ...] = ()
    """Names or patterns; empty = the usual ones."""
    baseline: str = ""
    """Empty = ours, or the first."""
    seeds: tuple[int, ...] = ()
    requests_max: int | None = None
    jobs: int = 1
    traces: str = ""
    folder: Path = BENCH
    """Where `results` and `out` are."""
    regret_every: int = REGRET_EVERY
    """The regret of every so manieth decision; 0 = none."""
    resume: bool = False
    only_list: bool = False
    plots: bool = True
    trace_file: str = ""
    configs: tuple[str, ...] = ()
    """Files."""
    endpoints: int = 8
    hardware: str = next(iter(HARDWARE))
    speed: float = 1.0


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line; wrong flags end the process with status 2."""
    is_replay = bool(argv) and argv[0] == "replay"
    parser = _parser()
    (_add_replay if is_replay else _add_grid)(parser)
    args = parser.parse_args(argv[1:] if is_replay else argv)
    try:
        return _options(args, tuple(argv), is_replay)
    except ValueError as error:
        parser.error(str(error))


def _options(args: argparse.Namespace, argv: tuple[str, ...], is_replay: bool) -> Options:
    shared = Options(
        arguments=argv,
        name=args.out,
        policies=tuple(each for text in args.policies for each in _names(text)),
        baseline=args.baseline,
        seeds=_seeds(args.seeds),
        requests_max=_within("--requests", args.requests, 1, 10_000_000),
        jobs=_within("--jobs", args.jobs, 1, JOBS_MAX) or _cores(),
        regret_every=_within("--regret", args.regret, 0, 10_000_000) or 0,
        traces=args.traces,
        folder=Path(args.folder),
        resume=args.resume,
        plots=not args.no_plots,
    )
    if not is_replay:
        grid = "quick" if args.quick else args.grid
        requests = shared.requests_max or (QUICK_REQUESTS if args.quick else None)
        return msgspec.structs.replace(
            shared,
            name=_checked_name(args.out or grid),
            grid=grid,
            cells=tuple(args.cells),
            requests_max=requests,
            only_list=args.list,
        )
    if not args.speed > 0:
        raise ValueError(f"--speed is {args.speed}; it must be above 0")
    return msgspec.structs.replace(
        shared,
        name=_checked_name(args.out or f"replay-{Path(args.log).name.partition('.')[0]}"),
        trace_file=args.log,
        configs=tuple(args.config),
        endpoints=_within("--endpoints", args.endpoints, 1, 1024) or 1,
        hardware=args.hardware,
        speed=args.speed,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _within(flag: str, value: int | None, low: int, high: int) -> int | None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{flag} is {value}; it must be {low} to {high}")
    return value


def _names(text: str) -> list[str]:
    """Names between commas; a comma before a space belongs to a name."""
    return [name for each in re.split(r",(?! )", text) if (name := each.strip())]


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,80}", name):
        raise ValueError(f"{name!r} cannot be the name of a file; give another one with --out")
    return name


def _seeds(text: str) -> tuple[int, ...]:
    """`11-15`, `1,2,7` or a mixture."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not found:
            raise ValueError(f"--seeds is {text!r}; write 11-15 or 1,2,7")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < SEEDS_MAX:
            raise ValueError(f"--seeds has {part.strip()}; it must ascend, {SEEDS_MAX} at most")
        seeds |= dict.fromkeys(range(first, last + 1))
    return tuple(sorted(seeds))


# -- flags ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--policies",
        action="append",
        default=[],
        metavar="A,B",
        help="names, or patterns as in '*+hold'; default: ours and every peer without our hold",
    )
    add("--baseline", default="", metavar="NAME", help="what others are compared with (ours)")
    add("--seeds", default=DEFAULT_SEEDS, help=f"of the arrivals ({DEFAULT_SEEDS})")
    add("--requests", type=int, metavar="N", help="the first N of each workload (all)")
    add("--jobs", type=int, metavar="N", help="runs at once (the cores)")
    add("--traces", default="", metavar="DIR", help="where the trace files are")
    add(
        "--regret",
        type=int,
        default=REGRET_EVERY,
        metavar="N",
        help=f"of every Nth decision: what it cost, and why; 0 = of none ({REGRET_EVERY})",
    )
    add("--out", default="", metavar="NAME", help="name of the results (that of the grid)")
    add("--folder", default=str(BENCH), metavar="DIR", help="of results/ and out/ (bench)")
    add("--resume", action="store_true", help="keep the runs that are in the journal")
    add("--no-plots", action="store_true", help="no pictures: they need matplotlib")
    return parser


def _add_grid(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", default="core", choices=GRIDS, help="which cells (core)")
    add("--quick", action="store_true", help=f"--grid quick --requests {QUICK_REQUESTS}")
    add(
        "--cells",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cells with this in their name; * stands for anything; may be repeated",
    )
    add("--list", action="store_true", help="list cells and policies, and stop")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("log", metavar="LOG", help="requests, a JSON object per line")
    add(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="of the picker; the first is the baseline; may be repeated",
    )
    add("--endpoints", type=int, default=8, metavar="N", help="(8)")
    add("--hardware", default=next(iter(HARDWARE)), choices=HARDWARE, help="(the first)")
    add("--speed", type=float, default=1.0, help="times of the log are divided by it (1)")
