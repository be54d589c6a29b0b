"""The running processes of `bench.serve`: an EPP and an Envoy per arm, one upstream, one driver."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import yaml

from bench.measure import Spread, cpu_s
from bench.stack import Child, Envoy, Epp
from bench.traffic.driver import Driver
from bench.traffic.upstream import addresses
from epp.envoy.command import render
from epp.envoy.options import EnvoyOptions

METRICS_PAGE = Path(__file__).parents[2] / "tests" / "wire" / "data" / "metrics" / "idle.txt"
SCRAPE_EVERY = "--refresh-metrics-interval=10s"
EXT_PROC = "envoy.filters.http.ext_proc"
IDLE_ENDPOINTS = 100
IDLE_WINDOWS = 3


class Arm(msgspec.Struct, frozen=True):
    """One way to run the EPP."""

    name: str
    transport: str | None = None
    """`None`: Envoy without ext_proc."""
    tls: bool = False
    kib: tuple[int, ...] | None = None
    """Prompt sizes it is measured with; `None` = all."""


BASELINE = Arm("none")
ARMS = (
    BASELINE,
    Arm("fast", "fast"),
    Arm("fast+tls", "fast", True, (16,)),
    Arm("grpcio", "grpcio"),
    Arm("grpcio+tls", "grpcio", True, (16,)),
)


class Site:
    """The running processes of all arms."""

    def __init__(self, stack: ExitStack, folder: Path, arms: Sequence[Arm], endpoints: int) -> None:
        self._stack, self._folder = stack, folder
        self.upstream = self._start_upstream(max(endpoints, IDLE_ENDPOINTS))
        port = int(self.upstream.wait_for("port", self._upstream_port))
        self._all = [f"{host}:{port}" for host in addresses(max(endpoints, IDLE_ENDPOINTS))]
        self._pool = self._all[:endpoints]
        self.driver = Driver()
        stack.callback(self.driver.stop)
        self.epps = {arm: self._start_epp(arm) for arm in arms if arm.transport}
        self.envoys = {arm: self._start_envoy(arm) for arm in arms}

    def _start_upstream(self, count: int) -> Child:
        module = [sys.executable, "-m", "bench.traffic.upstream"]
        flags = [f"--addresses={count}", f"--metrics={METRICS_PAGE}"]
        upstream = Child("upstream", [*module, *flags], self._folder)
        upstream.start()
        self._stack.callback(upstream.kill)
        return upstream

    def _upstream_port(self) -> str | None:
        first, _, port = self.upstream.text().partition(" ")
        return port if first == "ready" and port.endswith("\n") else None

    def _start_epp(self, arm: Arm) -> Epp:
        epp = Epp(
            self._folder, [*_epp_flags(arm, self._pool), SCRAPE_EVERY], name=f"epp-{arm.name}"
        )
        self._stack.callback(epp.stop)
        epp.start()
        return epp

    def _start_envoy(self, arm: Arm) -> Envoy:
        # The arm without ext_proc has a cluster for an EPP, too, and checks its health as often.
        arm_of_epp = arm if arm in self.epps else next(iter(self.epps))
        options = EnvoyOptions(
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            epp=self.epps[arm_of_epp].address,
            epp_tls=arm_of_epp.tls,
            endpoints=tuple(self._pool),
        )
        bootstrap = render(options)
        if arm.transport is None:
            bootstrap = without_ext_proc(bootstrap)
        envoy = Envoy(self._folder, options, name=f"envoy-{arm.name}", bootstrap=bootstrap)
        self._stack.callback(envoy.stop)
        envoy.start()
        return envoy

    def idle_cores(self, arm: Arm, seconds: float) -> Spread:
        """Cores an EPP of its own uses that only scrapes, at the default period."""
        epp = Epp(self._folder, _epp_flags(arm, self._all[:IDLE_ENDPOINTS]), name="epp-idle")
        try:
            epp.start()
            time.sleep(seconds)
            used = []
            for _ in range(IDLE_WINDOWS):
                before_s, start_s = cpu_s(epp.pid), time.monotonic()
                time.sleep(seconds)
                used.append((cpu_s(epp.pid) - before_s) / (time.monotonic() - start_s))
        finally:
            epp.stop()
        return Spread.of(used)


def _epp_flags(arm: Arm, pool: Sequence[str]) -> list[str]:
    return [
        f"--endpoints={','.join(pool)}",
        f"--transport={arm.transport}",
        f"--secure-serving={str(arm.tls).lower()}",
        "--drain-timeout=0s",
    ]


def without_ext_proc(bootstrap: str) -> str:
    """The same Envoy, not asking the EPP: it goes round robin."""
    document = yaml.safe_load(bootstrap)
    listener = document["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] != EXT_PROC]
    return yaml.safe_dump(document, sort_keys=False)
