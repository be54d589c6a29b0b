"""Engines that answer anything on loopback, and a pool with a scraper that runs: for the scraper's
tests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

from epp.core.model import Endpoint, EndpointSpec
from epp.core.pool import Members, Pool, Scraped, ScrapeFailed
from epp.edge.scrape import EngineChooser, FailureReason, Scraper, ScrapeSettings

PAGE = b'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_running 1\n'
PAGE += b"vllm:kv_cache_usage_perc 0.5\n"
FAST = ScrapeSettings(interval_s=0.05, timeout_s=5.0)
IMPATIENT = ScrapeSettings(interval_s=0.05, timeout_s=0.25)


def reply(body: bytes = PAGE, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class Engine:
    """One HTTP server on a free port; `reply` is what it answers, `None` = accept and stay silent.
    Changed at will while it runs."""

    def __init__(self, answer: bytes | None = reply()) -> None:
        self.answer = answer
        self.close_after = False
        self.requests: list[str] = []
        self.request_times_s: list[float] = []
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.at_once = self.at_once_max = 0
        self.seen = asyncio.Condition()
        self.spec = EndpointSpec("127.0.0.1", 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head.decode())
                self.request_times_s.append(time.monotonic())
                answer = self.answer
                if answer is None:
                    self.at_once += 1
                    self.at_once_max = max(self.at_once, self.at_once_max)
                await self.tell()
                if answer is None:
                    try:
                        await reader.read()
                    finally:
                        self.at_once -= 1
                    return
                writer.write(answer)
                if self.close_after:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()
            await self.tell()

    async def tell(self) -> None:
        async with self.seen:
            self.seen.notify_all()

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.seen:
            await self.seen.wait_for(wanted)


@asynccontextmanager
async def engines(
    *answers: bytes | None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Engine]]:
    """One engine per answer; a single good one if none is given."""
    servers, found = [], []
    try:
        for answer in answers or (reply(),):
            engine = Engine(answer)
            server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=tls)
            engine.spec = EndpointSpec("127.0.0.1", server.sockets[0].getsockname()[1])
            servers.append(server)
            found.append(engine)
        yield found
    finally:
        for server in servers:
            server.close()
        for engine in found:
            for writer in list(engine.open):
                writer.transport.abort()


class World:
    """A pool and a scraper that runs, and what came out of it."""

    def __init__(self, **options: object) -> None:
        self.pool = Pool(stale_after_s=0.4)
        self.events: list[Scraped | ScrapeFailed] = []
        self.reasons: Counter[FailureReason | None] = Counter()
        self.changed = asyncio.Condition()
        arguments = {"settings": FAST, "chooser": EngineChooser(), "rng": Random(1), **options}
        self.scraper = Scraper(pool=self.pool, apply=self.apply, report=self.report, **arguments)
        self.tasks: set[asyncio.Task[None]] = set()

    def apply(self, event: Scraped | ScrapeFailed) -> None:
        self.events.append(event)
        self.pool.apply(event, time.monotonic())
        task = asyncio.ensure_future(self.tell())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def report(self, reason: FailureReason | None, duration_s: float) -> None:
        assert 0 <= duration_s < 20
        self.reasons[reason] += 1

    def members(self, *specs: EndpointSpec) -> None:
        self.pool.apply(Members(specs), time.monotonic())
        self.scraper.members_changed()

    def endpoint(self, engine: Engine) -> Endpoint:
        return self.pool.by_address[engine.spec.address]

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(wanted)

    async def one(self, engine: Engine) -> Scraped | ScrapeFailed:
        """The first event after the engine joins."""
        self.members(engine.spec)
        await self.until(lambda: bool(self.events))
        return self.events[0]


@asynccontextmanager
async def world(**options: object) -> AsyncIterator[World]:
    made = World(**options)
    task = asyncio.ensure_future(made.scraper.run())
    try:
        await asyncio.sleep(0)
        yield made
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), "run ended by itself"
