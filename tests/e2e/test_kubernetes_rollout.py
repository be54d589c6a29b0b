"""A pool in Kubernetes: the API server is ours, engines are its pods, Envoy and EPPs are real.

Two EPPs elect a leader; Envoy asks the one that says it serves. While clients keep asking, every
engine is replaced as a Deployment replaces its pods (the new one ready, then the old one marked,
drained and gone), then both EPPs are restarted one after the other.

The rule: no request may fail that a gateway's retry would not have saved. Envoy retries connections
that fail, as gateways do; what is counted here is what clients see after that.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from bench.stack import Engine, Envoy, Epp
from epp.envoy.options import EnvoyOptions
from tests.e2e.http1 import fetch
from tests.e2e.site import completion, metric, until
from tests.kubernetes.fake_thread import FakeApiThread
from tests.kubernetes.objects import objective, pod, pool, rewrite, rule

NAMESPACE = "models"
POOL = "vllm"
JSON_TYPE = ("content-type", "application/json")
CLIENTS = 4
REQUESTS_MAX = 20_000
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
limits: {scrapeTimeout: 60s}
"""


def free_port(*hosts: str) -> int:
    """A port that is free on all these addresses."""
    while True:
        with ExitStack() as open_sockets:
            first = open_sockets.enter_context(socket.socket())
            first.bind((hosts[0], 0))
            port = first.getsockname()[1]
            try:
                for host in hosts[1:]:
                    open_sockets.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            return port


class Cluster:
    """The API server and the engines that run as its pods, all on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [f"127.0.4.{n}" for n in range(11, 19)]
        self.port = free_port(*self.hosts)
        self.api = FakeApiThread(tls=True, token="secret-of-the-cluster")
        self.engines: dict[str, Engine] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self.api.__enter__()
        self.api.store.put(pool(POOL, {"app": "vllm"}, (self.port,), namespace=NAMESPACE))
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.api.__exit__(None, None, None)

    @property
    def addresses(self) -> list[str]:
        return [f"{host}:{self.port}" for host in self.hosts]

    def run_pod(self, app: str = "vllm") -> str:
        """Start an engine, and tell the API server when it is ready; returns the pod's name."""
        number = next(self._numbers)
        name, host = f"vllm-{number}", self.hosts[number]
        flags = ["--host", host, "--port", str(self.port), "--speed", "20"]
        engine = Engine(name, self.folder, [*flags, "--shutdown-timeout", "20"])
        self.engines[name] = engine
        self._put(name, None, app)
        engine.start()
        self._put(name, host, app)
        return name

    def _put(self, name: str, host: str | None, app: str) -> None:
        state = {"ready": host is not None, "namespace": NAMESPACE, "uid": f"uid-of-{name}"}
        self.api.store.put(pod(name, host, {"app": app}, **state))

    def mark(self, name: str) -> None:
        """What `kubectl delete pod` does at once: the pod is on its way out."""
        self.api.store.delete("pods", NAMESPACE, name, graceful=True)

    def end(self, name: str) -> None:
        """What the kubelet does then: SIGTERM, wait, and the pod is gone."""
        assert self.engines.pop(name).stop(grace_s=30.0) is not None
        self.api.store.delete("pods", NAMESPACE, name)

    def address_of(self, name: str) -> str:
        return f"{self.hosts[int(name.rpartition('-')[2])]}:{self.port}"


@dataclass
class Load:
    """Clients that ask one thing after the other until told to stop."""

    port: int
    statuses: Counter[int | str] = field(default_factory=Counter)
    stopped: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self._ask(n)) for n in range(CLIENTS)]

    async def stop(self) -> None:
        self.stopped = True
        await asyncio.gather(*self.tasks)

    @property
    def answered(self) -> int:
        return self.statuses.total()

    async def more(self, requests: int = 40) -> None:
        """Wait until so many more were answered."""
        wanted = self.answered + requests
        await until(lambda: self.answered >= wanted, what=f"{wanted} answers", seconds=60.0)

    async def _ask(self, client: int) -> None:
        for number in range(REQUESTS_MAX // CLIENTS):
            if self.stopped:
                return
            body = completion(600, salt=f"{client}-{number % 7}", stream=number % 2 == 0)
            try:
                answer = await fetch(self.port, "POST", "/v1/completions", [JSON_TYPE], body)
                self.statuses[answer.status] += 1
            except (OSError, EOFError, ValueError) as error:
                self.statuses[type(error).__name__] += 1


class Replica(Epp):
    """One EPP of the two."""

    def serves(self) -> bool:
        return metric(self.metrics(), "epp_leader") == 1.0

    def knows(self) -> set[str]:
        return {e["address"] for e in self.state()["endpoints"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


def replica(cluster: Cluster, number: int, *flags: str, pools: str = POOL) -> Replica:
    """An EPP that follows the cluster; not started."""
    config = cluster.api.kubeconfig(cluster.folder)
    return Replica(
        cluster.folder,
        [
            *(f"--pool-name={pools}", f"--pool-namespace={NAMESPACE}", f"--kubeconfig={config}"),
            *("--metrics-endpoint-auth=false", f"--config-text={CONFIG}", "--drain-timeout=20s"),
            *flags,
        ],
        name=f"epp-{number}",
    )


def envoy_for(cluster: Cluster, *epps: Epp, **differing: Any) -> Envoy:
    options = EnvoyOptions(
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        epp=",".join(epp.address for epp in epps),
        endpoints=tuple(cluster.addresses),
        fail_open=False,
        **differing,
    )
    return Envoy(cluster.folder, options, name=f"envoy-{options.pool}")


@asynccontextmanager
async def under_load(cluster: Cluster) -> AsyncIterator[tuple[list[Replica], Load]]:
    """Two EPPs that elect a leader, an Envoy in front of them, and clients that keep asking while
    the body runs: none of them may see a failure."""
    epps = [replica(cluster, n, "--ha-enable-leader-election") for n in (1, 2)]
    with ExitStack() as cleanup:
        for epp in epps:
            cleanup.callback(epp.kill)
            await asyncio.to_thread(epp.start)
        envoy = envoy_for(cluster, *epps)
        cleanup.callback(envoy.kill)
        await asyncio.to_thread(envoy.start)
        load = Load(envoy.port)
        load.start()
        try:
            await load.more()
            yield epps, load
        finally:
            await load.stop()
        retried = envoy.stat("cluster.pool.upstream_rq_retry")
        print(f"{dict(load.statuses)}, {retried} of them retried by the gateway")
        assert set(load.statuses) == {200}, f"{dict(load.statuses)}"
        for epp in epps:
            assert await asyncio.to_thread(epp.stop) == 0


@pytest.mark.timeout(300)
async def test_engines_and_pickers_roll_over_under_load_and_no_request_fails(
    cluster: Cluster,
) -> None:
    names = [await asyncio.to_thread(cluster.run_pod) for _ in range(3)]
    async with under_load(cluster) as (epps, load):
        await roll_engines(cluster, epps, load, names)
        await roll_pickers(epps, load)


async def known(cluster: Cluster, epps: list[Replica], name: str, *, is_known: bool) -> None:
    """Wait until every EPP knows a pod, or none does."""
    address = cluster.address_of(name)
    await until(
        lambda: all((address in epp.knows()) is is_known for epp in epps),
        what=f"{name} {'known' if is_known else 'unknown'} to all",
    )


async def roll_engines(cluster: Cluster, epps: list[Replica], load: Load, names: list[str]) -> None:
    """Replace every pod, one after the other."""
    for old in names:
        new = await asyncio.to_thread(cluster.run_pod)
        await known(cluster, epps, new, is_known=True)
        await asyncio.to_thread(cluster.mark, old)
        await known(cluster, epps, old, is_known=False)
        await asyncio.to_thread(cluster.end, old)
        await load.more()


async def roll_pickers(epps: list[Replica], load: Load) -> None:
    """Restart each EPP, the leader first; the other one takes over."""
    leaders = [epp for epp in epps if epp.serves()]
    assert len(leaders) == 1
    for epp in sorted(epps, key=lambda e: e not in leaders):
        other = next(e for e in epps if e is not epp)
        epp.signal(signal.SIGTERM)
        await until(other.serves, what="the other EPP leads", seconds=60.0)
        assert await asyncio.to_thread(epp.wait, grace_s=30.0) == 0
        await load.more()
        await asyncio.to_thread(epp.start)


async def test_objectives_and_rewrites_reach_requests_and_outlive_their_pool(
    cluster: Cluster,
) -> None:
    cluster.run_pod()
    cluster.api.store.put(objective("gold", POOL, 7, namespace=NAMESPACE))
    cluster.api.store.put(
        rewrite("big", POOL, [rule(["asked"], {"sim": None})], namespace=NAMESPACE)
    )
    with ExitStack() as cleanup:
        epp = replica(cluster, 1)
        cleanup.callback(epp.kill)
        await asyncio.to_thread(epp.start)
        envoy = envoy_for(cluster, epp)
        cleanup.callback(envoy.kill)
        await asyncio.to_thread(envoy.start)

        async def ask() -> tuple[int, bytes]:
            body = completion(300, salt="x").replace(b'"model": "sim"', b'"model": "asked"')
            objective_header = ("x-llm-d-inference-objective", "gold")
            answer = await fetch(
                envoy.port, "POST", "/v1/completions", [JSON_TYPE, objective_header], body
            )
            return answer.status, answer.body

        status, told = await ask()
        assert status == 200, told
        assert b'"model":"asked"' in told
        page = epp.metrics()
        counted = ('model_name="asked"', 'target_model_name="sim"', 'priority="7"')
        assert metric(page, "llm_d_epp_request_total", *counted) == 1
        assert metric(page, "llm_d_epp_model_rewrite_decisions_total", 'name="big"') == 1
        for name in ("objects", "silence_seconds", "relists_total", "errors_total"):
            for resource in ("pods", "inferencepools", "inferenceobjectives"):
                assert f'epp_kubernetes_{name}{{resource="{resource}"}} ' in page
        assert metric(page, "epp_leader") == 1
        cluster.api.store.delete("inferencepools", NAMESPACE, POOL)
        await until(lambda: not envoy.sees_epp(), what="the EPP not ready without its pool")
        cluster.api.store.put(pool(POOL, {"app": "vllm"}, (cluster.port,), namespace=NAMESPACE))
        await until(envoy.sees_epp, what="the EPP ready again")
        status, told = await ask()
        assert (status, b'"model":"asked"' in told) == (200, True), told
        assert epp.stop() == 0


async def explained(*arguments: str) -> str:
    """What `epp explain` says, well or ill."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp", "explain", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return said.decode()


async def test_N10_one_picker_serves_several_pools_and_mixes_none(cluster: Cluster) -> None:
    """Two Envoys say which pool they ask for, a third one does not; requests may say it, too."""
    cluster.api.store.put(pool("other", {"app": "other"}, (cluster.port,), namespace=NAMESPACE))
    mine, others = cluster.run_pod(), cluster.run_pod("other")
    with ExitStack() as cleanup:
        epp = replica(cluster, 1, pools="*")
        cleanup.callback(epp.kill)
        await asyncio.to_thread(epp.start)
        envoys = [envoy_for(cluster, epp, pool=name) for name in (POOL, "other", None)]
        for envoy in envoys:
            cleanup.callback(envoy.kill)
            await asyncio.to_thread(envoy.start)

        async def ask(envoy: Envoy, *headers: tuple[str, str]) -> tuple[int, str]:
            body = completion(300, salt="x")
            answer = await fetch(envoy.port, "POST", "/v1/completions", [JSON_TYPE, *headers], body)
            return answer.status, dict(answer.headers).get("x-sim-engine", "")

        for _ in range(5):
            assert await ask(envoys[0]) == (200, mine)
            assert await ask(envoys[1]) == (200, others)
        named = ("x-llm-d-inference-pool", "other")
        assert await ask(envoys[2], named) == (200, others)
        assert await ask(envoys[0], named) == (200, mine), "the gateway's word wins"
        assert (await ask(envoys[2]))[0] == 503
        assert (await ask(envoys[2], ("x-llm-d-inference-pool", "none")))[0] == 503
        (cluster.folder / "body.json").write_bytes(completion(300, salt="x"))
        live = ["--live", f"http://127.0.0.1:{epp.ports['metrics']}", "--path", "/v1/completions"]
        unsaid = await explained(*live, str(cluster.folder / "body.json"))
        assert "--pool is needed" in unsaid
        assert f"{NAMESPACE}/other, {NAMESPACE}/{POOL}" in unsaid
        said = await explained(*live, "--pool", "other", str(cluster.folder / "body.json"))
        assert cluster.address_of(others) in said
        assert cluster.address_of(mine) not in said
        assert "served are" in await explained(
            *live, "--pool", "x", str(cluster.folder / "body.json")
        )
        cluster.api.store.delete("inferencepools", NAMESPACE, "other")
        gone = 'name="other"'
        await until(lambda: gone not in epp.metrics(), what="the other pool forgotten")
        assert (await ask(envoys[1]))[0] == 503
        assert await ask(envoys[0]) == (200, mine)
        assert epp.stop() == 0


@pytest.mark.timeout(200)
async def test_an_api_server_that_is_gone_stops_no_routing_and_no_election_does(
    cluster: Cluster,
) -> None:
    cluster.run_pod()
    async with under_load(cluster) as (epps, load):
        await asyncio.to_thread(cluster.api.outage)
        (leader,) = [epp for epp in epps if epp.serves()]
        await until(lambda: not leader.serves(), what="nobody leads", seconds=60.0)
        await load.more(400)
        await asyncio.to_thread(cluster.api.recover)
        await until(lambda: any(epp.serves() for epp in epps), what="a leader again", seconds=60.0)
        await load.more(400)
