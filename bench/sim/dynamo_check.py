"""Our simulator beside Dynamo's own on one trace: do both find the same share of prompts cached?

Run as `python -m bench.sim.dynamo_check --traces FOLDER`. Both get the same requests, endpoints and
KV blocks, and about the same load: our engines run at twice their speed, which brings the mean time
of a request near that of Dynamo's default engine. That matters, as a KV router at a lower load goes
for the cache more often (at our own speed it finds a tenth to a fifth less, and round robin the
same). Only hit ratios are compared. `--selector` lets Dynamo's real code choose in our simulator,
beside our writing of its formula.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from bench.dynamo import DynamoMissingError, dynamo_core
from bench.sim.cluster import simulate
from bench.sim.conditions import Conditions, Fleet, PolicyContext
from bench.sim.hardware import HARDWARE
from bench.sim.model import Policy, SimRequest, Workload
from bench.sim.plan import WorkloadError, WorkloadOptions
from bench.sim.policies import OPTIONAL_POLICIES, POLICIES
from bench.sim.traces import TRACES

DIFFERENCE_RATIO_MAX = 0.15
"""Of two hit ratios, relative to Dynamo's."""
PAIRS = (
    ("round_robin", 1.0, "round-robin"),
    ("kv_router", 1.0, "dynamo-1"),
    ("kv_router", 8.0, "dynamo-8"),
)
"""Dynamo's router, its prefill load scale, our policy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a pair differs by more than the limit."""
    args = _parser().parse_args(arguments)
    options = WorkloadOptions(
        traces=args.traces, speed=args.speed, jitter_s=0.0, requests_max=args.requests
    )
    try:
        core = dynamo_core()
        workload = TRACES[args.workload](options)
    except (DynamoMissingError, WorkloadError) as error:
        raise SystemExit(str(error)) from None
    theirs = replay(core, workload, args.endpoints, args.kv_blocks)
    kind = next(iter(HARDWARE.values()))
    fleet = Fleet.of(kind, args.endpoints, args.kv_blocks, speeds=[args.engine_speed])
    print(
        f"{workload.name} x{args.speed:g}, {args.endpoints} endpoints of {args.kv_blocks} blocks;"
    )
    print("share of prompt tokens found in a cache, mean seconds of a request")
    print(f"{'policy':<20}{'Dynamo':>9}{'ours':>9}{'differs':>9}{'Dynamo s':>10}{'ours s':>8}")
    worst = 0.0
    for _, _, name in PAIRS:
        dynamo, ours = theirs[name], simulated(workload, fleet, POLICIES[name])
        difference = ours.hit_ratio / dynamo.hit_ratio - 1
        worst = max(worst, abs(difference))
        ratios = f"{dynamo.hit_ratio:>9.4f}{ours.hit_ratio:>9.4f}{difference:>+9.1%}"
        print(f"{name:<20}{ratios}{dynamo.e2e_s:>10.2f}{ours.e2e_s:>8.2f}", flush=True)
    for name, make in OPTIONAL_POLICIES.items() if args.selector else ():
        ours = simulated(workload, fleet, make)
        print(f"{name:<20}{'':>9}{ours.hit_ratio:>9.4f}{'':>19}{ours.e2e_s:>8.2f}", flush=True)
    return int(worst > DIFFERENCE_RATIO_MAX)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", default=os.environ.get("TRACES"), help="folder of the trace")
    names = ("conversation", "synthetic")
    parser.add_argument("--workload", choices=names, default=names[0])
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--kv-blocks", type=int, default=2048, help="of 512 tokens, per endpoint")
    parser.add_argument("--engine-speed", type=float, default=2.0, help="of ours (default 2)")
    parser.add_argument("--requests", type=int, default=None, help="only so many of the first")
    parser.add_argument(
        "--selector", action="store_true", help="also let Dynamo's real selector choose"
    )
    return parser


class Found(msgspec.Struct, frozen=True):
    """What one simulator says of one policy."""

    hit_ratio: float
    """Share of the prompt tokens found in a cache."""
    e2e_s: float
    """Mean seconds from arrival to last token."""


def simulated(
    workload: Workload, fleet: Fleet, make_policy: Callable[[PolicyContext], Policy]
) -> Found:
    """Ours."""
    run = simulate(workload, fleet, Conditions(), make_policy, seed=1)
    served = [outcome for outcome in run.outcomes if not outcome.refused]
    cached_tokens = sum(outcome.cached_tokens for outcome in served)
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in served)
    e2e_s = sum(outcome.e2e_s for outcome in served) / len(served)
    return Found(cached_tokens / prompt_tokens, e2e_s)


def replay(core: Any, workload: Workload, endpoints: int, kv_blocks: int) -> dict[str, Found]:
    """Dynamo's, by our name of the policy."""
    engine = {"num_gpu_blocks": kv_blocks, "block_size": workload.block_tokens}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        trace.write_text("".join(_lines(workload)))
        for mode, scale, name in PAIRS:
            result = core.run_mocker_trace_replay(
                [trace],
                extra_engine_args={"engine": engine},
                router_config=core.KvRouterConfig(prefill_load_scale=scale),
                num_workers=endpoints,
                router_mode=mode,
                trace_block_size=workload.block_tokens,
                capture_planner_details=False,
            )
            summary = result.summary
            found[name] = Found(
                summary["prefix_cache_reused_ratio"], summary["mean_e2e_latency_ms"] / 1000
            )
    return found


def _lines(workload: Workload) -> list[str]:
    """In Mooncake's format, where the partly filled last block has an id too."""
    ids: dict[int, int] = {}
    fresh = count()
    return [_line(request, workload.block_tokens, ids, fresh) for request in workload.requests]


def _line(request: SimRequest, block_tokens: int, ids: dict[int, int], fresh: count[int]) -> str:
    hash_ids = []
    for name in request.blocks:
        if name not in ids:
            ids[name] = next(fresh)
        hash_ids.append(ids[name])
    missing = -(-request.prompt_tokens // block_tokens) - len(hash_ids)
    hash_ids += [next(fresh) for _ in range(missing)]
    line = {
        "timestamp": request.arrival_s * 1000,
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": hash_ids,
    }
    return json.dumps(line) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
