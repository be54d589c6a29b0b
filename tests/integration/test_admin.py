"""The admin port: long pages, slow readers, odd requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.loop_watch import watched_loop
from epp.edge.admin import STOP_S, AdminServer, StatePage, debug_state
from epp.edge.metrics import OUR_PREFIX, Metrics
from tests.unit.exchanges import World


def empty_state(_pool: str | None = None) -> StatePage:
    return debug_state(World(0).decider, lambda: 2.0)


PICKS = f"{OUR_PREFIX}picks_total"


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[tuple[AdminServer, int]]:
    server = AdminServer(host="127.0.0.1", port=0, metrics=metrics, state=empty_state)
    port = await server.start()
    async with asyncio.timeout(20):
        try:
            yield server, port
        finally:
            await server.stop()


def page_of(series: int) -> Metrics:
    metrics = Metrics(lambda: {f"{OUR_PREFIX}endpoints": [(("alive",), 3)]})
    picks = metrics.counter(PICKS)
    for n in range(series):
        picks.series(f"reason-{n:0100d}").inc()
    return metrics


async def test_D05_other_requests_pass_while_a_long_page_is_written() -> None:
    async with serving(page_of(300_000)) as (_, port), aiohttp.ClientSession() as session:
        lines = 0
        async with (
            watched_loop() as watch,
            session.get(f"http://127.0.0.1:{port}/metrics") as response,
        ):
            async for piece in response.content.iter_any():
                lines += piece.count(PICKS.encode())
        assert lines == 300_000 + 2
        assert watch.longest_s < 0.04, "the whole page takes 0.15 s"


async def metrics_page(session: aiohttp.ClientSession, port: int) -> str:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=")
        return await response.text()


async def test_the_page_holds_our_families_and_those_of_the_process() -> None:
    async with serving(page_of(1)) as (_, port), aiohttp.ClientSession() as session:
        names = {f.name for f in text_string_to_metric_families(await metrics_page(session, port))}
        assert {"epp_picks", "epp_endpoints", "python_gc_collections", "python_info"} <= names


async def test_E13_series_that_come_while_the_page_is_written_do_no_harm() -> None:
    metrics = page_of(50_000)
    async with serving(metrics) as (_, port), aiohttp.ClientSession() as session:
        writing = asyncio.create_task(metrics_page(session, port))
        picks = metrics._families[PICKS]
        for n in range(1000):
            picks.series(f"new-{n}").inc()
            picks.drop((f"reason-{n:0100d}",))
            await asyncio.sleep(0)
        assert (await writing).endswith("\n")


async def test_M05_a_reader_that_does_not_read_does_not_hold_up_the_end() -> None:
    async with serving(page_of(200_000)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(15)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await server.stop()
        assert loop.time() - started_s < STOP_S + 3.0
        writer.close()


async def test_a_head_request_and_an_unknown_path_are_answered() -> None:
    async with serving(page_of(1)) as (_, port), aiohttp.ClientSession() as session:
        for path, status in (("/metrics", 200), ("/debug/state", 200), ("/nothing", 404)):
            async with session.head(f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == status
                assert await response.read() == b""
        async with session.post(f"http://127.0.0.1:{port}/debug/state") as response:
            assert response.status == 405
