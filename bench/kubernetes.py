"""What following a cluster costs: a list of 1000 pods, then changes at a rate and all at once.

`make bench-kubernetes`, or `python -m bench.kubernetes`. The API server is the tests' fake, in a
process of its own, so that only our CPU counts. A pod is as a real one of a model server is: 6.3
kB, most of it `managedFields` and containers. What follows is all of ours, from the client to the
pool that decisions read, on uvloop, as `epp serve` does; only nothing is scraped. Each change is
one of a label, so that it reaches the pool.

list       from nothing to a pool of all of them, CPU time; and in another run the longest stretch
           without a turn for others, in CPU time, so that a busy machine does not count
steady     50 changes a second, in cores
burst      as many changes as the API server can send, CPU time of each
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

from bench.loop_watch import watched_loop
from bench.measure import Spread, machine, parse_within, table, verdict
from epp.config import resolve
from epp.core.serving import Pools
from epp.edge.kubernetes.access import Access
from epp.edge.kubernetes.choice import pools_by_name
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.objects import PODS
from epp.edge.kubernetes.pools import KubernetesPools
from epp.edge.telemetry import Telemetry
from epp.flags import parse_flags
from epp.scraping import read_scraping
from epp.sites import ClusterSites, Site

NAMESPACE, POOL = "bench", "vllm"
POD_BYTES = 6_300
LIST_BUDGET_MS = 80.0
BLOCK_BUDGET_MS = 20.0
STEADY_BUDGET_CORES = 0.05
WAIT_S = 120.0
BURST = 5_000


class Report(msgspec.Struct):
    """All figures of one run."""

    machine: dict[str, object]
    pods: int
    list_ms: Spread
    """CPU time until all pods were endpoints."""
    list_block_ms: Spread
    """CPU time of the longest stretch without a turn for others, from start to then."""
    steady_cores: Spread
    steady_block_ms: Spread
    steady_per_s: float
    burst_us: Spread
    """CPU time per change."""
    verdicts: dict[str, str] = {}


# -- the API server, in a process of its own -----------------------------------------------


@contextmanager
def api_server(pods: int) -> Iterator[subprocess.Popen[str]]:
    """A fake API server with that many pods; its first line of output is its URL. A line
    `COUNT PER_SECOND` on its input makes so many changes (0 per second: at once)."""
    command = [sys.executable, "-m", "bench.kubernetes", "--serve", str(pods)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


async def serve(pods: int) -> None:
    """Be that process, until its input ends."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # clients leave in mid-sentence
    # The fake belongs to the tests: looked at by name, so that nothing here is built on them.
    fake_api = importlib.import_module("tests.kubernetes.fake_api")
    objects = importlib.import_module("tests.kubernetes.objects")
    async with fake_api.FakeApi() as api:
        api.store.put(objects.pool(POOL, {"app": "vllm"}, namespace=NAMESPACE))
        made = [realistic(objects.pod, number) for number in range(pods)]
        for each in made:
            api.store.put(each)
        print(api.url, flush=True)
        changes = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            count, per_s = map(int, line.split())
            begin_s = time.monotonic()
            for at in range(count):
                changes += 1
                each = made[changes % pods]
                each["metadata"]["labels"] |= {"changes": str(changes)}
                api.store.put(each)
                late_s = time.monotonic() - begin_s - (at / per_s if per_s else 0.0)
                if per_s or at % 50 == 0:
                    await asyncio.sleep(max(0.0, -late_s))


def realistic(make_pod: Callable[..., dict[str, Any]], number: int) -> dict[str, Any]:
    """A pod of `POD_BYTES` of JSON."""
    made = make_pod(
        f"vllm-llama-70b-{number:04}-{number * 7919 % 99991:05}",
        f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        {"app": "vllm", "llm-d.ai/role": "decode", "pod-template-hash": "7d4b9c6f5"},
        namespace=NAMESPACE,
    )
    meta = made["metadata"]
    fields: dict[str, dict[str, object]] = {
        f'k:{{"containerPort":{port},"protocol":"TCP"}}': {".": {}, "f:containerPort": {}}
        for port in range(8000, 8008)
    }
    managed = {
        "manager": "kube-controller-manager",
        "operation": "Update",
        "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:containers": fields}},
    }
    meta["managedFields"] = [managed] * 2
    variables = [{"name": f"VLLM_SETTING_{at}", "value": f"value-{at}"} for at in range(20)]
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.32", "env": variables, "args": []}
    made["spec"]["containers"] = [container]
    short = POD_BYTES - len(json.dumps(made, separators=(",", ":"))) - len('"",') * 40
    container["args"] = ["-" * (max(0, short) // 40)] * 40
    return made


# -- the client ----------------------------------------------------------------------------


class Following:
    """All that `epp serve --pool-name` does with a pool's pods but to scrape them."""

    def __init__(self, client: ApiClient) -> None:
        options = parse_flags({"pool-name": POOL})
        plan = resolve(None)
        served = Pools()
        telemetry = Telemetry(pools=served, clock=time.monotonic, label_values_max=100)
        scraping = read_scraping(options, plan)

        def make(name: str) -> Site:
            return Site(name, plan=plan, scraping=scraping, telemetry=telemetry, rng=Random(1))

        def ignore(_site: Site) -> None:
            """Its jobs are not run."""

        sites = ClusterSites(served, make=make, started=ignore, ended=ignore, changed=self._changed)
        choice = pools_by_name(POOL, namespace=NAMESPACE)
        self.pools = KubernetesPools(client, sites, choice=choice, rng=Random(1))
        self._served = served
        self._wanted: Callable[[], bool] = lambda: True
        self._reached = asyncio.Event()

    def _changed(self) -> None:
        if self._wanted():
            self._reached.set()

    @property
    def endpoints(self) -> int:
        """Of the pool, as the decision sees it."""
        return sum(len(serving.decider.pool.endpoints) for serving in self._served.all)

    @property
    def changes(self) -> int:
        """Of pods, as events."""
        return int(self.pools.reflectors[str(PODS)].counts.events["MODIFIED"])

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Until that is so."""
        self._wanted = wanted
        self._reached.clear()
        if not wanted():
            async with asyncio.timeout(WAIT_S):
                await self._reached.wait()

    async def listed(self, pods: int) -> None:
        """Until every pod is an endpoint."""
        await self.until(lambda: self.endpoints == pods)

    async def more(self, changes: int) -> None:
        """Until so many more events were taken."""
        before = self.changes
        await self.until(lambda: self.changes >= before + changes)


@asynccontextmanager
async def following(url: str) -> AsyncIterator[Following]:
    """Follows while the body runs."""
    async with ApiClient(Access(server=url, namespace=NAMESPACE), user_agent="bench") as client:
        each = Following(client)
        running = asyncio.create_task(each.pools.run())
        try:
            yield each
        finally:
            running.cancel()
            await asyncio.wait([running])


class Bench:
    """Measures against one API server."""

    def __init__(self, server: subprocess.Popen[str], pods: int) -> None:
        assert server.stdout is not None
        assert server.stdin is not None
        self._input = server.stdin
        self._pods = pods
        self._url = server.stdout.readline().strip()
        if not self._url:
            raise SystemExit("the API server did not start; what it said is above")

    async def list_s(self) -> float:
        """CPU time of a list."""
        begin_s = time.process_time()
        async with following(self._url) as each:
            await each.listed(self._pods)
            return time.process_time() - begin_s

    async def list_block_s(self) -> float:
        """The longest stretch of one."""
        async with watched_loop() as watch, following(self._url) as each:
            await each.listed(self._pods)
            return watch.longest_s

    async def steady_cores(self, per_s: int, seconds: int) -> float:
        """CPU time per second while changes come."""
        async with following(self._url) as each:
            await each.listed(self._pods)
            begin_s, at_s = time.process_time(), time.monotonic()
            await self._change(each, per_s * seconds, per_s)
            return (time.process_time() - begin_s) / (time.monotonic() - at_s)

    async def steady_block_s(self, per_s: int) -> float:
        """The longest stretch in two seconds of it."""
        async with following(self._url) as each:
            await each.listed(self._pods)
            async with watched_loop() as watch:
                await self._change(each, per_s * 2, per_s)
                return watch.longest_s

    async def burst_s(self) -> float:
        """CPU time per change when they come at once."""
        async with following(self._url) as each:
            await each.listed(self._pods)
            begin_s = time.process_time()
            await self._change(each, BURST, 0)
            return (time.process_time() - begin_s) / BURST

    async def _change(self, each: Following, count: int, per_s: int) -> None:
        """Make changes, to one pod after the other, and wait until all were taken."""
        taken = asyncio.create_task(each.more(count))
        await asyncio.sleep(0)  # it has counted what there was
        self._input.write(f"{count} {per_s}\n")
        self._input.flush()
        await taken


async def measure(bench: Bench, pods: int, rounds: int, per_s: int, seconds: int) -> Report:
    """Every figure once per round."""
    gc.collect()
    gc.freeze()  # as `epp serve` does: what is there stays, and is not looked at again
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, value in (
            ("list_ms", await bench.list_s() * 1e3),
            ("list_block_ms", await bench.list_block_s() * 1e3),
            ("steady_cores", await bench.steady_cores(per_s, seconds)),
            ("steady_block_ms", await bench.steady_block_s(per_s) * 1e3),
            ("burst_us", await bench.burst_s() * 1e6),
        ):
            figures.setdefault(name, []).append(value)
    spread = {name: Spread.of(values) for name, values in figures.items()}
    report = Report(
        machine=machine(),
        pods=pods,
        list_ms=spread["list_ms"],
        list_block_ms=spread["list_block_ms"],
        steady_cores=spread["steady_cores"],
        steady_block_ms=spread["steady_block_ms"],
        steady_per_s=per_s,
        burst_us=spread["burst_us"],
    )
    report.verdicts = {
        "list_ms": verdict(report.list_ms.median, LIST_BUDGET_MS),
        "list_block_ms": verdict(report.list_block_ms.median, BLOCK_BUDGET_MS),
        "steady_cores": verdict(report.steady_cores.median, STEADY_BUDGET_CORES),
        "steady_block_ms": verdict(report.steady_block_ms.median, BLOCK_BUDGET_MS),
    }
    return report


def shown(report: Report) -> str:
    """A table for people."""
    rows = [
        (f"list of {report.pods} pods, CPU ms", report.list_ms.text(digits=1), LIST_BUDGET_MS),
        ("  longest stretch, CPU ms", report.list_block_ms.text(digits=1), BLOCK_BUDGET_MS),
        (
            f"{report.steady_per_s:g} changes/s, cores",
            report.steady_cores.text(digits=4),
            STEADY_BUDGET_CORES,
        ),
        ("  longest stretch, CPU ms", report.steady_block_ms.text(digits=1), BLOCK_BUDGET_MS),
        ("changes at once, CPU us each", report.burst_us.text(digits=1), None),
    ]
    verdicts = [*report.verdicts.values(), ""]
    return table(
        ("", "median (min..max)", "budget", ""),
        [
            (what, value, "" if budget is None else f"{budget:g}", word)
            for (what, value, budget), word in zip(rows, verdicts, strict=True)
        ],
    )


def main() -> None:
    """Measure; print the table and, there or into a file, the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pods", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-s", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    bounds = {"pods": (200, 20_000), "rounds": (1, 20), "seconds": (1, 60), "serve": (0, 20_000)}
    args = parse_within(parser, bounds)
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    with api_server(args.pods) as server:
        bench = Bench(server, args.pods)
        report = uvloop.run(measure(bench, args.pods, args.rounds, args.per_s, args.seconds))
    print(shown(report))
    encoded = msgspec.json.encode(report)
    if args.json:
        Path(args.json).write_bytes(encoded + b"\n")
    else:
        print(f"\n{encoded.decode()}")


if __name__ == "__main__":
    main()
