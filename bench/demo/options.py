"""The flags of `make demo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from bench.engine.bodies import ApiError
from bench.engine.faults import parse_faults
from epp.core.addresses import AddressError, endpoint_spec

DESCRIPTION = """\
Starts three simulated vLLM engines, the Endpoint Picker and a real Envoy on free ports of loopback,
sends a mixed workload through them twice, once with Envoy's own round robin and once with the
picker, and shows where requests went and why, prefix hit ratio, time to first token, and which
promises were kept. Then it keeps running, with curl lines to try, until Ctrl-C.

  make demo                                                all of it
  make demo ARGS=--once                                    stop after the tables
  make demo ARGS="--endpoints 10.0.0.1:8000,10.0.0.2:8000" in front of your own engines
  make demo ARGS=--no-workload                             only the processes and the curl lines
  make demo ARGS="--once --engine-fault '{\\"error_500\\": true}'"  see a promise break
"""
EPILOG = """\
Exit status: 0 every promise was kept; 1 one was broken, or a process failed (its last output is
shown); 2 wrong flags; 130 interrupted before the tables.

With --endpoints nothing is killed, overloaded or restarted. Instead of being emptied, caches are
avoided: the two runs send the same words after different openings, new ones each time.
"""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags say."""

    once: bool = False
    endpoints: tuple[str, ...] = ()
    """Engines of one's own; empty = three simulated ones."""
    model: str = ""
    """Empty: ask the engines."""
    quick: bool = False
    round_robin: bool = True
    workload: bool = True
    seed: int = 1
    json_file: str = ""
    logs: str = ""
    """Folder that keeps the processes' output; empty = it is deleted."""
    engine_fault: str = ""
    """JSON of the first engine's `--fault`."""


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; wrong flags end the process with status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    options = Options(
        once=args.once,
        endpoints=tuple(a.strip() for a in args.endpoints.split(",") if a.strip()),
        model=args.model,
        quick=args.quick,
        round_robin=not args.no_round_robin,
        workload=not args.no_workload,
        seed=args.seed,
        json_file=args.json,
        logs=args.logs,
        engine_fault=args.engine_fault,
    )
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--once", action="store_true", help="exit after the tables")
    add(
        "--endpoints",
        default="",
        metavar="HOST:PORT,…",
        help="engines of your own instead of simulated ones (vLLM's OpenAI API over plain HTTP)",
    )
    add("--model", default="", help="model name (default: the first one every engine serves)")
    add("--quick", action="store_true", help="half the time; figures are noisier")
    add("--no-round-robin", action="store_true", help="skip the run to compare with")
    add("--no-workload", action="store_true", help="send nothing; start, and show what to try")
    add("--seed", type=int, default=1, help="of the workload (default %(default)s)")
    add("--json", default="", metavar="FILE", help="write every number there")
    add("--logs", default="", metavar="DIR", help="keep Envoy's bootstrap and all logs there")
    add(
        "--engine-fault",
        default="",
        metavar="JSON",
        help="break engine-1 on purpose, as `python -m bench.engine --help` says",
    )
    return parser


def _problem(options: Options) -> str:
    """What is wrong with the flags; empty = nothing."""
    for address in options.endpoints:
        try:
            endpoint_spec(address)
        except AddressError as error:
            return f"--endpoints {error}"
    if options.engine_fault:
        if options.endpoints:
            return "--engine-fault breaks a simulated engine; it cannot go with --endpoints"
        try:
            parse_faults(options.engine_fault.encode())
        except ApiError as error:
            return f"--engine-fault: {error}"
    if options.model and not options.endpoints:
        return "--model names the model of your own engines; it needs --endpoints"
    if options.once and not options.workload:
        return "--once and --no-workload together do nothing; drop one of them"
    return ""
