"""One way through: Envoy, EPP and upstreams, with what tests do to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.stack import Envoy, Epp
from epp.core.headers import DESTINATION, TEST_SELECTION
from epp.envoy.options import EnvoyOptions
from tests.e2e.http1 import Answer, Connection, Headers, fetch
from tests.e2e.upstreams import TEST_ID, Received, Upstreams, new_id

UNTIL_S_MAX = 20.0
POLL_S = 0.02

T = TypeVar("T")


async def until(probe: Callable[[], T], *, what: str, seconds: float = UNTIL_S_MAX) -> T:
    """Poll `probe` until it gives something true, and return that."""
    deadline_s = time.monotonic() + seconds
    while True:
        found = await asyncio.to_thread(probe)
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {seconds} s: {what}"
        await asyncio.sleep(POLL_S)


@dataclass
class Site:
    """What a test talks to."""

    envoy: Envoy
    epp: Epp
    upstreams: Upstreams
    options: EnvoyOptions

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self.envoy.port

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        test_id: str | None = None,
        to: int | None = None,
        **how: Any,
    ) -> tuple[Answer, str]:
        """One request; returns the answer and the id under which the upstreams know it.

        Args:
            to: number of the upstream that the EPP is told to pick; `None` = any.
            how: as for `Connection.send`.
        """
        test_id = test_id or new_id()
        headers = [*headers, (TEST_ID, test_id), self.selection(to)]
        return await fetch(self.port, method, target, headers, body, **how), test_id

    def selection(self, to: int | None) -> tuple[str, str]:
        """The header that names who may be picked; without it the testing filter keeps nobody."""
        addresses = self.upstreams.addresses
        return (TEST_SELECTION, ",".join(addresses) if to is None else addresses[to])

    async def open(self, headers: Headers, body: bytes, *, test_id: str) -> Connection:
        """Send a POST to /v1/completions and leave the answer to the caller."""
        connection = await Connection.open(self.port)
        given = [("content-type", "application/json"), *headers, (TEST_ID, test_id)]
        given.append(self.selection(None))
        await connection.send("POST", "/v1/completions", given, body)
        return connection

    async def idle(self) -> dict[str, Any]:
        """Wait until nothing is charged any more; returns `/debug/state`."""
        return await until(self._idle_state, what="in-flight counters at zero")

    def _idle_state(self) -> dict[str, Any] | None:
        state: dict[str, Any] = self.epp.state()
        counters = [state["inflight_requests"]]
        for endpoint in state["endpoints"]:
            names = ("inflight_requests", "waiting_for_first_byte", "inflight_tokens")
            counters += [endpoint[name] for name in names]
        assert min(counters) >= 0
        return None if any(counters) else state


def picked(received: Received) -> list[str]:
    """The addresses the EPP named, best first."""
    (value,) = received.values(DESTINATION)
    return value.split(",")


def completion(size: int, *, salt: str, stream: bool = False, prompt: str = "") -> bytes:
    """A JSON body of exactly `size` bytes for /v1/completions."""
    fields = {"model": "sim", "stream": stream, "cache_salt": salt, "prompt": prompt}
    room = size - len(json.dumps(fields))
    assert room >= 0, f"{size} bytes are too few"
    words = f"{prompt}{salt} lorem ipsum dolor sit amet {salt} "
    fields["prompt"] = (words * (room // len(words) + 2))[: room + len(prompt)]
    body = json.dumps(fields).encode()
    assert len(body) == size
    return body


def metric(page: str, name: str, *parts: str) -> float:
    """Sum of a metric's samples whose labels contain all `parts`."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(part in line for part in parts)
    )


def log_entries(epp: Epp) -> Iterable[dict[str, Any]]:
    """The EPP's log, one mapping per line; every line must be JSON."""
    return [json.loads(line) for line in epp.text().splitlines()]


def problems(epp: Epp) -> list[dict[str, Any]]:
    """What it logged as a warning or worse."""
    return [e for e in log_entries(epp) if e["level"] not in {"info", "verbose", "debug"}]
