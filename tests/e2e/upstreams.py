"""Recording model servers for tests: HTTP/1.1 by hand, so that what arrived is known byte for byte.

They run on an event loop of their own in a thread, so one set serves many tests. A request carries
its test's id in the header `x-test-id`; under it the test finds what came in and says beforehand
what is answered. `/metrics` is answered for the EPP's scrapes and not recorded."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

TEST_ID = "x-test-id"
LINE_BYTES_MAX = 1 << 20
CALL_S_MAX = 30.0
BYE = b"bye"
METRICS = b"""\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0
"""

T = TypeVar("T")
_numbers = itertools.count(1)


def new_id() -> str:
    """An id no other test has."""
    return f"test-{next(_numbers)}"


class Received(NamedTuple):
    """One request as it arrived."""

    upstream: str
    """Address of the upstream."""
    method: str
    target: str
    headers: list[tuple[str, str]]
    """Lower-case names, latin-1 values, in order, repeats kept."""
    body: bytes

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True)
class Plan:
    """What an upstream answers."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),)
    body: bytes = b'{"ok":true}'
    echo: bool = False
    """The request's body instead of `body`."""
    chunked: bool = False
    """In pieces of `piece_bytes`, without a content-length."""
    piece_bytes: int = 7_001
    fed: bool = False
    """The body is what the test feeds, a chunk each; it ends with `end_feed`."""
    silent: bool = False
    """Nothing, until the connection goes."""
    upgraded: bool = False
    """101, and from then on every byte back as it came, until the peer closes or says `BYE`."""


@dataclass
class _Board:
    """What is known of one test's requests."""

    received: list[Received] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)
    feed: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    broken: int = 0
    """Connections that went away before their answer was complete."""


class Upstreams:
    """Several upstreams in one thread. Use as a context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="upstreams")
        self._boards: dict[str, _Board] = defaultdict(_Board)
        self._servers: list[asyncio.Server | None] = []
        self._open: list[set[asyncio.StreamWriter]] = []
        self.addresses: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        for number in range(self._count):
            self._open.append(set())
            self._servers.append(None)
            self.addresses.append("127.0.0.1:0")
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self._count):
            self.kill(number)
        self._call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- called by tests -------------------------------------------------------------------

    def received(self, test_id: str) -> list[Received]:
        """The requests of a test so far."""
        return list(self._boards[test_id].received)

    def one(self, test_id: str) -> Received:
        """The only request of a test."""
        (received,) = self.received(test_id)
        return received

    def broken(self, test_id: str) -> int:
        """How many of the test's requests lost their connection before the answer's end."""
        return self._boards[test_id].broken

    def plan(self, test_id: str, **plan: Any) -> None:
        """What this test's requests are answered."""
        self._boards[test_id].plan = Plan(**plan)

    def feed(self, test_id: str, data: bytes) -> None:
        """A piece of the answer, sent at once."""
        self._loop.call_soon_threadsafe(self._boards[test_id].feed.put_nowait, data)

    def end_feed(self, test_id: str) -> None:
        """The end of the answer."""
        self._loop.call_soon_threadsafe(self._boards[test_id].feed.put_nowait, None)

    def drop(self, test_id: str) -> None:
        """Cut the answer off: the connection is reset."""
        self.feed(test_id, b"")

    def kill(self, number: int) -> None:
        """Close the port and every connection of one upstream, as a crash does."""
        self._call(self._kill(number))

    def start(self, number: int) -> None:
        """Listen (again), on the same port as before."""
        self._call(self._start(number))

    # -- on the loop -----------------------------------------------------------------------

    def _call(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(CALL_S_MAX)

    async def _start(self, number: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open[number].add(writer)
            try:
                await self._serve(self.addresses[number], reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                self._open[number].discard(writer)
                writer.transport.abort()

        port = int(self.addresses[number].rpartition(":")[2])
        server = await asyncio.start_server(serve, "127.0.0.1", port, limit=LINE_BYTES_MAX)
        self._servers[number] = server
        self.addresses[number] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _kill(self, number: int) -> None:
        server, self._servers[number] = self._servers[number], None
        if server is not None:
            server.close()
        for writer in tuple(self._open[number]):
            writer.transport.abort()

    async def _cancel_all(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while (received := await _read_request(address, reader)) is not None:
            if received.target == "/metrics":
                _write(writer, Plan(headers=(("content-type", "text/plain"),), body=METRICS))
                continue
            board = self._boards[next(iter(received.values(TEST_ID)), "")]
            board.received.append(received)
            gone = asyncio.ensure_future(reader.read(1)) if board.plan.fed else None
            try:
                await self._answer(board, received, reader, writer, gone)
            except (ConnectionError, asyncio.IncompleteReadError):
                board.broken += 1
                raise
            finally:
                if gone is not None:
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
            await writer.drain()

    async def _answer(
        self,
        board: _Board,
        received: Received,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gone: asyncio.Future[bytes] | None,
    ) -> None:
        plan = board.plan
        if plan.silent:
            await reader.readexactly(1)
        if plan.upgraded:
            await _upgrade(reader, writer, received)
            return
        if gone is None:
            _write(writer, plan, received.body if plan.echo else plan.body)
            return
        _write_head(writer, plan, ("transfer-encoding", "chunked"))
        while (data := await _next(board.feed, gone)) is not None:
            if not data:
                raise ConnectionResetError("dropped by the test")
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


async def _upgrade(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Received
) -> None:
    (protocol,) = received.values("upgrade")
    head = f"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n"
    writer.write(head.encode())
    while (data := await reader.read(LINE_BYTES_MAX)) and data != BYE:
        writer.write(data)
        await writer.drain()
    writer.close()


async def _next(feed: asyncio.Queue[bytes | None], gone: asyncio.Future[bytes]) -> bytes | None:
    """The next piece. Raises: ConnectionResetError when the peer went away meanwhile."""
    piece = asyncio.ensure_future(feed.get())
    await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
    if piece.done():
        return piece.result()
    piece.cancel()
    raise ConnectionResetError("the peer went away")


async def _read_request(address: str, reader: asyncio.StreamReader) -> Received | None:
    """`None` when the peer has no more."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = []
    for line in lines:
        name, _, value = line.partition(":")
        headers.append((name.lower(), value.strip()))
    found = dict(headers)
    body = b""
    if found.get("transfer-encoding") == "chunked":
        pieces = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while (await reader.readline()).strip():
            pass  # trailers
        body = b"".join(pieces)
    elif "content-length" in found:
        body = await reader.readexactly(int(found["content-length"]))
    return Received(address, method, target, headers, body)


def _write_head(writer: asyncio.StreamWriter, plan: Plan, *more: tuple[str, str]) -> None:
    lines = [f"HTTP/1.1 {plan.status} X"]
    lines += [f"{name}: {value}" for name, value in (*plan.headers, *more)]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


def _write(writer: asyncio.StreamWriter, plan: Plan, body: bytes | None = None) -> None:
    body = plan.body if body is None else body
    if not plan.chunked:
        _write_head(writer, plan, ("content-length", str(len(body))))
        writer.write(body)
        return
    _write_head(writer, plan, ("transfer-encoding", "chunked"))
    for at in range(0, len(body), plan.piece_bytes):
        piece = body[at : at + plan.piece_bytes]
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    writer.write(b"0\r\n\r\n")
