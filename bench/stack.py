"""Engines, EPP and a real Envoy as child processes on free ports: for the demo, tests and benches.

Every process writes its output to a file, so nothing can block on a full pipe, and is stopped by
its pid: SIGTERM, then SIGKILL after a grace. Readiness is read from what the process says or
serves, with a deadline; when it is missed, the error shows the end of its output."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar
from urllib.error import URLError

from epp.envoy.command import render
from epp.envoy.options import EnvoyOptions

READY_S_MAX = 60.0
STOP_S_MAX = 15.0
POLL_S = 0.02

T = TypeVar("T")


class NotReadyError(Exception):
    """A process did not come up in time or ended; the message holds the end of its output."""


def http_get(url: str, *, timeout_s: float = 5.0) -> bytes:
    """Body of a loopback URL; no proxy of the environment is used."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body


class Child:
    """One child process and its output file."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.command = list(command)
        self.output = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to the end of its file."""
        assert self.process is None, f"{self.name} runs already"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it does not run."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self, *, grace_s: float = STOP_S_MAX) -> int | None:
        """SIGTERM, wait, SIGKILL; returns the exit status (`None` if it did not run)."""
        self.signal(signal.SIGTERM)
        return self.wait(grace_s=grace_s)

    def wait(self, *, grace_s: float = STOP_S_MAX) -> int | None:
        """Wait for its end, SIGKILL when it takes longer; returns the exit status."""
        process, self.process = self.process, None
        if process is None:
            return None
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def text(self) -> str:
        """All it has written."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, what: str, probe: Callable[[], T | None]) -> T:
        """Poll `probe` until it gives something.

        Raises: NotReadyError when the process has ended or the deadline has passed.
        """
        deadline_s = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, URLError, ValueError):
                found = probe()
                if found is not None:
                    return found
            if self.process is None or self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        tail = self.text()[-2000:]
        raise NotReadyError(f"{self.name}: no {what} in time; its last output:\n{tail}")


class Engine(Child):
    """A simulated vLLM. `flags` go to `python -m bench.engine`."""

    def __init__(self, name: str, folder: Path, flags: Sequence[str] = ()) -> None:
        base = [sys.executable, "-m", "bench.engine", "--name", name]
        super().__init__(name, [*base, "--port", "0", *flags], folder)
        self._base, self._flags = base, list(flags)
        self.address = ""

    def start(self) -> None:
        """Start it and wait until it listens; a second start keeps the port."""
        if self.address:
            port = self.address.rpartition(":")[2]
            self.command = [*self._base, "--port", port, *self._flags]
        seen = len(self.text())
        super().start()
        self.address = self.wait_for("ready line", lambda: _ready_address(self.text()[seen:]))

    def get(self, path: str) -> Any:
        """JSON of one of its routes."""
        return json.loads(http_get(f"http://{self.address}{path}"))

    def post(self, path: str, body: object) -> Any:
        """POST JSON to one of its routes."""
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10.0) as response:
            return json.loads(response.read() or b"null")


def _ready_address(text: str) -> str | None:
    for line in text.splitlines():
        if line.startswith("ready http://"):
            return line.removeprefix("ready http://").strip()
    return None


class Epp(Child):
    """`epp serve` on free ports of loopback."""

    flags_first: ClassVar[tuple[str, ...]] = ()
    """Given to every EPP before its own flags; tests choose the transport by it."""

    def __init__(self, folder: Path, flags: Sequence[str], *, name: str = "epp") -> None:
        ports = ["--host=127.0.0.1", "--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0"]
        command = [sys.executable, "-m", "epp", "serve", *ports, *self.flags_first, *flags]
        super().__init__(name, command, folder)
        self._command = self.command
        self.ports: dict[str, int] = {}

    def start(self) -> None:
        """Start it, wait until it serves and knows its endpoints; a second start keeps the
        ports."""
        if self.ports:
            names = {"grpc": "grpc", "grpc-health": "health", "metrics": "metrics"}
            ports = [f"--{flag}-port={self.ports[name]}" for flag, name in names.items()]
            self.command = [*self._command, *ports]
        seen = len(self.text())
        super().start()
        self.ports = self.wait_for("ports", lambda: _logged_ports(self.text()[seen:]))
        self.wait_for("endpoints", lambda: self.state()["synced"] or None)

    @property
    def address(self) -> str:
        """Of the ext_proc port."""
        return f"127.0.0.1:{self.ports['grpc']}"

    def state(self) -> Any:
        """`/debug/state`."""
        return json.loads(http_get(f"http://127.0.0.1:{self.ports['metrics']}/debug/state"))

    def metrics(self) -> str:
        """`/metrics`."""
        return http_get(f"http://127.0.0.1:{self.ports['metrics']}/metrics").decode()


def _logged_ports(text: str) -> dict[str, int] | None:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("message") == "serving":
                ports: dict[str, int] = entry["ports"]
                return ports
    return None


class Envoy(Child):
    """A real Envoy with the bootstrap that `epp envoy-config` prints.

    Args:
        bootstrap: another bootstrap, as YAML text.
    """

    def __init__(
        self,
        folder: Path,
        options: EnvoyOptions,
        *,
        name: str = "envoy",
        bootstrap: str | None = None,
    ) -> None:
        self._config = folder / f"{name}.yaml"
        self._admin_file = folder / f"{name}.admin"
        self._config.write_text(render(options) if bootstrap is None else bootstrap)
        binary = Path(sys.executable).with_name("envoy")
        command = [
            *(str(binary), "-c", str(self._config), "--use-dynamic-base-id"),
            *("--concurrency", "1", "--admin-address-path", str(self._admin_file)),
            *("-l", "warning"),
        ]
        super().__init__(name, command, folder)
        self.port = 0

    def start(self) -> None:
        """Start it and wait until it listens and takes the EPP for healthy."""
        self._admin_file.unlink(missing_ok=True)
        super().start()
        self.port = self.wait_for("listener", self._listener_port)
        self.wait_for("healthy EPP", lambda: self.sees_epp() or None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def admin(self, path: str) -> str:
        """A page of its admin port."""
        return http_get(f"http://{self._admin_file.read_text().strip()}{path}").decode()

    def stat(self, name: str) -> int:
        """One counter or gauge; 0 when it does not exist yet."""
        for line in self.admin(f"/stats?filter=^{name}$").splitlines():
            key, _, value = line.partition(": ")
            if key == name:
                return int(value)
        return 0

    def sees_epp(self) -> bool:
        """Whether its health check of the EPP succeeds."""
        return self.stat("cluster.epp.membership_healthy") > 0

    def _listener_port(self) -> int | None:
        listeners = json.loads(self.admin("/listeners?format=json")).get("listener_statuses", [])
        for listener in listeners:
            return int(listener["local_address"]["socket_address"]["port_value"])
        return None


class Stack:
    """Engines, EPP and Envoy, started in that order and stopped together.

    Args:
        engines: flags of each engine.
        endpoints: addresses of endpoints that run already.
        epp_flags: flags of `epp serve` beside ports and endpoints.
        tell_endpoints: give the endpoints to the EPP with a flag; `False` = a configuration in
            `epp_flags` says where they are.
        envoy: options of the bootstrap that differ; addresses are filled in.
        bootstrap: makes another bootstrap (YAML text) from the options.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Sequence[str]] = ((), (), ()),
        endpoints: Sequence[str] = (),
        epp_flags: Sequence[str] = (),
        tell_endpoints: bool = True,
        envoy: Mapping[str, Any] | None = None,
        bootstrap: Callable[[EnvoyOptions], str] = render,
        folder: Path | None = None,
    ) -> None:
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="epp-stack-")
        self.folder = folder or Path(self._temporary.name if self._temporary else ".")
        self.engines = [
            Engine(f"engine-{n}", self.folder, flags) for n, flags in enumerate(engines, start=1)
        ]
        self._endpoints = list(endpoints)
        self._epp_flags = list(epp_flags)
        self._tell_endpoints = tell_endpoints
        self._envoy_options = envoy or {}
        self._bootstrap = bootstrap
        self._epp: Epp | None = None
        self._envoy: Envoy | None = None

    @property
    def epp(self) -> Epp:
        assert self._epp is not None, "not started"
        return self._epp

    @property
    def envoy(self) -> Envoy:
        assert self._envoy is not None, "not started"
        return self._envoy

    @property
    def addresses(self) -> list[str]:
        """Of the pool's endpoints."""
        return [*(engine.address for engine in self.engines), *self._endpoints]

    def start(self) -> None:
        """Start everything; on failure nothing is left running."""
        try:
            for engine in self.engines:
                engine.start()
            told = [f"--endpoints={','.join(self.addresses)}"] if self._tell_endpoints else []
            self._epp = Epp(self.folder, [*told, *self._epp_flags])
            self._epp.start()
            options = self.envoy_options(**self._envoy_options)
            self._envoy = Envoy(self.folder, options, bootstrap=self._bootstrap(options))
            self._envoy.start()
        except BaseException:
            self.stop()
            raise

    def envoy_options(self, **differing: Any) -> EnvoyOptions:
        """Options of an Envoy in front of this EPP and these endpoints."""
        options: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "epp": self.epp.address,
            "epp_tls": "--secure-serving=false" not in self._epp_flags,
            "endpoints": tuple(self.addresses),
        }
        return EnvoyOptions(**{**options, **differing})

    def stop(self) -> None:
        """Stop everything that runs."""
        children = [c for c in (self._envoy, self._epp, *self.engines) if c is not None]
        for child in children:
            child.signal(signal.SIGTERM)
        for child in children:
            child.wait(grace_s=5.0)
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
