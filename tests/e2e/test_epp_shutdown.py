"""How the EPP ends: told by health at once, streams go on, in good time, with status 0."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.stack import Epp
from tests.e2e.conftest import config
from tests.e2e.http1 import JSON_TYPE, Connection
from tests.e2e.http2 import NOT_SERVING, SERVING, health
from tests.e2e.site import Site, completion, log_entries, problems, until
from tests.e2e.upstreams import Upstreams, new_id

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
SSE = [("content-type", "text/event-stream")]
EXIT_S_MAX = 6.0
"""Two seconds of notice, and some for a busy machine."""


@pytest.fixture
def start(
    folder: Path, upstreams: Upstreams, start_envoy: Callable[..., Site]
) -> Iterator[Callable[..., Site]]:
    """Starts an EPP with some flags, and an Envoy in front of it."""
    started: list[Site] = []

    def start_one(*flags: str) -> Site:
        number = len(list(folder.glob("epp-ending-*.log")))
        told = [config(), f"--endpoints={','.join(upstreams.addresses)}", "--v=3", *flags]
        epp = Epp(folder, told, name=f"epp-ending-{number}")
        epp.start()
        started.append(start_envoy(epp=epp))
        return started[-1]

    yield start_one
    for site in started:
        site.envoy.stop()
        site.epp.stop(grace_s=1.0)


async def open_events(site: Site) -> tuple[str, Connection]:
    """A stream whose first event has arrived."""
    test_id = new_id()
    site.upstreams.plan(test_id, headers=SSE, fed=True)
    connection = await site.open((), completion(300, salt=test_id), test_id=test_id)
    site.upstreams.feed(test_id, b"data: first\n\n")
    await until(lambda: site.epp.state()["inflight_requests"] == 1, what="a charged stream")
    return test_id, connection


async def exit_status(epp: Epp, seconds: float) -> int:
    process = epp.process
    assert process is not None
    status: int | None = await asyncio.to_thread(process.wait, seconds)
    assert status is not None
    epp.process = None
    return status


async def test_M04_a_stream_outlives_sigterm_and_health_tells_at_once(
    start: Callable[..., Site],
) -> None:
    site = start()
    epp, port = site.epp, site.epp.ports["health"]
    for service in ("", "liveness", "readiness", "inference-extension", EXT_PROC):
        assert await health(port, service) == SERVING
    test_id, connection = await open_events(site)
    async with connection:
        head = await connection.head()
        pieces = connection.pieces(head)
        assert await anext(pieces) == b"data: first\n\n"
        epp.signal(signal.SIGTERM)
        told_s = time.monotonic()
        while await health(port, EXT_PROC) != NOT_SERVING:
            assert time.monotonic() < told_s + 1.0, "health does not tell"
        assert await health(port, "readiness") == NOT_SERVING
        assert await health(port, "liveness") == SERVING
        answer, _ = await site.send(
            "POST", "/v1/completions", [JSON_TYPE], completion(300, salt="")
        )
        assert answer.status == 200, "requests during the notice are served"
        async with asyncio.timeout(20.0):
            while epp.process is not None and time.monotonic() < told_s + 2.5:
                # Past the notice, when the server itself is being stopped.
                site.upstreams.feed(test_id, b"data: more\n\n")
                assert await anext(pieces) == b"data: more\n\n"
        assert epp.process is not None
        assert epp.process.poll() is None, "it waits for the stream"
        site.upstreams.feed(test_id, b"data: last\n\n")
        assert await anext(pieces) == b"data: last\n\n"
        site.upstreams.end_feed(test_id)
        assert [piece async for piece in pieces] == []
    assert await exit_status(epp, EXIT_S_MAX) == 0
    assert problems(epp) == []
    ends = [e for e in log_entries(epp) if e["message"] == "request finished"]
    assert {e["cause"] for e in ends} == {"natural"}


async def test_M04_an_idle_epp_ends_within_seconds(start: Callable[..., Site]) -> None:
    site = start()
    site.epp.signal(signal.SIGTERM)
    assert await exit_status(site.epp, EXIT_S_MAX) == 0
    assert problems(site.epp) == []
    assert [e["message"] for e in log_entries(site.epp)][-2:] == ["draining", "stopped"]


async def test_M04_sigint_ends_it_as_well(start: Callable[..., Site]) -> None:
    site = start("--drain-timeout=0s")
    site.epp.signal(signal.SIGINT)
    assert await exit_status(site.epp, EXIT_S_MAX) == 0
    assert problems(site.epp) == []


async def test_a_second_signal_ends_the_wait_at_once(start: Callable[..., Site]) -> None:
    site = start("--drain-timeout=60s")
    _, connection = await open_events(site)
    async with connection:
        site.epp.signal(signal.SIGTERM)
        await until(
            lambda: [e for e in log_entries(site.epp) if e["message"] == "draining"],
            what="the first signal being heard",
        )
        site.epp.signal(signal.SIGTERM)
        assert await exit_status(site.epp, EXIT_S_MAX) == 0
    assert problems(site.epp) == []


async def test_M05_a_silent_stream_does_not_hold_it_longer_than_the_drain_timeout(
    start: Callable[..., Site],
) -> None:
    site = start("--drain-timeout=3s")
    _, connection = await open_events(site)
    async with connection:
        told_s = time.monotonic()
        site.epp.signal(signal.SIGTERM)
        assert await exit_status(site.epp, 3.0 + EXIT_S_MAX) == 0
        assert time.monotonic() - told_s > 2.9, "the stream was given its time"
    assert problems(site.epp) == []
