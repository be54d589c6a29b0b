"""What the transports' tests share: streams that remember, servers of both kinds, and a client that
writes HTTP/2 frames itself where a gateway does what no gRPC library does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import hpack
import pytest
import uvloop
from grpc import aio

from epp.core.streams import StreamFactory, Transport
from epp.edge import grpcio, http2, http2_port
from epp.edge.health import CHECK_PATH, EXT_PROC_SERVICE, Health

PROCESS_PATH = f"/{EXT_PROC_SERVICE}/Process"
SEEN_S_MAX = 2.0
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
HOST = "127.0.0.1"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4


class Kind(NamedTuple):
    """A transport."""

    name: str
    server: Callable[..., Any]
    limits: Callable[..., Any]
    log: str
    """Name of the logger that tells of bugs in streams."""


GRPCIO = Kind("grpcio", grpcio.GrpcioServer, grpcio.Limits, grpcio.__name__)
FAST = Kind("fast", http2.Http2Server, http2.Limits, http2_port.__name__)


# -- streams -------------------------------------------------------------------------------


class Recorder:
    """A stream that remembers what happened to it and does what the test says."""

    def __init__(self, transport: Transport, act: Callable[[Recorder, bytes], None]) -> None:
        self.transport = transport
        self.act = act
        self.received: list[bytes] = []
        self.closes = 0
        self.closed = asyncio.Event()
        self.got = asyncio.Event()

    def on_message(self, data: bytes) -> None:
        assert not self.closes, "a message after the end"
        assert type(data) is bytes
        self.received.append(data)
        self.got.set()
        self.act(self, data)

    def on_close(self) -> None:
        self.closes += 1
        self.closed.set()


def echo(stream: Recorder, data: bytes) -> None:
    stream.transport.send((data,))


def keep(stream: Recorder, data: bytes) -> None:
    """Answers later, from somewhere else."""


class Recorders:
    """A StreamFactory that keeps every stream it made."""

    def __init__(self, act: Callable[[Recorder, bytes], None] = echo) -> None:
        self.act = act
        self.made: list[Recorder] = []
        self.opened = asyncio.Event()

    def __call__(self, transport: Transport) -> Recorder:
        self.made.append(Recorder(transport, self.act))
        self.opened.set()
        return self.made[-1]


class Census:
    """A StreamFactory that keeps no stream: which of them live, and how often each was closed."""

    def __init__(self, act: Callable[[Recorder, bytes], None] = echo) -> None:
        self.act = act
        self.alive: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self.closes: list[int] = []

    def __call__(self, transport: Transport) -> Recorder:
        stream = _Counted(transport, self.act, self.closes)
        self.alive.add(stream)
        return stream


class _Counted(Recorder):
    def __init__(
        self, transport: Transport, act: Callable[[Recorder, bytes], None], closes: list[int]
    ) -> None:
        super().__init__(transport, act)
        self.all_closes = closes

    def on_close(self) -> None:
        super().on_close()
        self.all_closes.append(self.closes)


class Faults(Counter[str]):
    """Counts what a server reports."""

    def __call__(self, reason: str) -> None:
        self[reason] += 1


@pytest.fixture(autouse=True)
def no_log_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing in a module that imports this logs a warning, unless the test takes it from `caplog`
    itself."""
    caplog.set_level(logging.INFO)
    yield
    records = caplog.get_records("setup") + caplog.get_records("call") + caplog.records
    messages = [r.getMessage() for r in records if r.levelno >= logging.WARNING]
    # grpc.aio's poller complains when an event comes for the loop of an earlier test elsewhere.
    assert [m for m in messages if "PollerCompletionQueue" not in m] == []


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on an event loop of its own of the kind the product uses."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


# -- servers and gRPC clients --------------------------------------------------------------


@asynccontextmanager
async def serving(
    kind: Kind, new_stream: StreamFactory, *, health: Health | None = None, **options: object
) -> AsyncIterator[tuple[Any, int]]:
    server = kind.server(
        new_stream=new_stream, health=health or Health(), host=HOST, port=0, **options
    )
    port, _ = await server.start()
    try:
        yield server, port
        await _seen_to_end(server)
    finally:
        await server.drain(0)


async def _seen_to_end(server: Any) -> None:
    """A client that resets its last call goes on before the server has seen it, and grpc.aio
    complains of a call that is open when it stops. What a test leaves open on purpose stays so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SEEN_S_MAX):
            while server.streams_inflight:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)


@asynccontextmanager
async def connected(port: int, **options: int) -> AsyncIterator[aio.Channel]:
    """A channel; `options` are channel arguments without `grpc.`, `__` standing for a dot."""
    arguments = [(f"grpc.{key.replace('__', '.')}", value) for key, value in options.items()]
    arguments.append(("grpc.use_local_subchannel_pool", 1))
    async with (
        asyncio.timeout(30),
        aio.insecure_channel(f"{HOST}:{port}", options=arguments) as channel,
    ):
        yield channel


def process(channel: aio.Channel) -> aio.StreamStreamCall:
    return channel.stream_stream(PROCESS_PATH)()


def check(channel: aio.Channel, service: bytes = b"") -> aio.UnaryUnaryCall:
    return channel.unary_unary(CHECK_PATH)(b"\x0a" + bytes([len(service)]) + service)


async def reset(call: aio.StreamStreamCall) -> None:
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


def readers() -> list[asyncio.Task[None]]:
    """Tasks that read for the grpcio transport and live."""
    return [task for task in asyncio.all_tasks() if "_Call._read" in repr(task.get_coro())]


# -- raw frames ----------------------------------------------------------------------------


def header_block(path: str = PROCESS_PATH, *more: tuple[str, str]) -> bytes:
    """Of a request, without the dynamic table, so that every stream may send the same bytes."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "epp")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *more]
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


def message(data: bytes) -> bytes:
    """With gRPC's five bytes in front."""
    return b"\0" + len(data).to_bytes(4) + data


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


class Gateway:
    """A client of raw frames, free to behave as gateways do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = hpack.Decoder()
        self._headers = header_block()

    @classmethod
    async def connect(
        cls, port: int, *, host: str = HOST, window_bytes: int = 65_535, **options: Any
    ) -> Gateway:
        """With preface, settings and a wide window of the connection; `window_bytes` is that of
        each stream."""
        gateway = cls(*await asyncio.open_connection(host, port, **options))
        settings = b"\x00\x04" + window_bytes.to_bytes(4)
        gateway.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(SETTINGS, 0, 0, settings))
        gateway.write(frame(WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4)))
        return gateway

    def write(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def open(self, stream_id: int, data: bytes, *, headers: bytes | None = None) -> None:
        block = self._headers if headers is None else headers
        self.write(frame(HEADERS, END_HEADERS, stream_id, block))
        self.send(stream_id, data)

    def send(self, stream_id: int, data: bytes) -> None:
        framed = message(data)
        for at in range(0, len(framed), 16_384):
            self.write(frame(DATA, 0, stream_id, framed[at : at + 16_384]))

    def half_close(self, stream_id: int) -> None:
        self.write(frame(DATA, END_STREAM, stream_id))

    def reset(self, stream_id: int) -> None:
        self.write(frame(RST_STREAM, 0, stream_id, (2).to_bytes(4)))

    async def read(self) -> Frame:
        """The next frame. Settings are acknowledged, pings are not answered."""
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3]))
        got = Frame(head[3], head[4], int.from_bytes(head[5:]), payload)
        if got.kind == SETTINGS and not got.flags & ACK:
            self.write(frame(SETTINGS, ACK, 0))
        return got

    async def until(
        self, kind: int, *, flags: int | None = None, never: int | None = None
    ) -> Frame:
        """The next frame of a kind; all before it are dropped, but none may be a `never`."""
        while True:
            got = await self.read()
            if got.kind == kind and flags in (None, got.flags):
                return got
            assert got.kind != never, got

    async def answer(self, stream_id: int) -> bytes:
        """The next message on a stream, whose answer begins with a frame of its own."""
        data = b""
        while len(data) < 5 or len(data) - 5 < int.from_bytes(data[1:5]):
            got = await self.until(DATA)
            assert got.stream_id == stream_id
            data += got.payload
        return data[5:]

    async def headers(self) -> dict[str, str]:
        """The next header block."""
        return dict(self._decoder.decode((await self.until(HEADERS)).payload))

    async def frames_until_pong(self) -> list[Frame]:
        """Ping, and what came before the answer: all that was under way."""
        self.write(frame(PING, 0, 0, bytes(8)))
        frames = []
        while (got := await self.read())[:2] != (PING, ACK):
            frames.append(got)
        return frames

    async def reset_waves(
        self, streams_count: int, wave: int, *, half_close: bool = False
    ) -> AsyncIterator[int]:
        """Open streams, `wave` at a time, and reset each when its answer has begun. Yields how many
        were reset so far."""
        for first in range(1, 2 * streams_count, 2 * wave):
            stream_ids = range(first, first + 2 * wave, 2)
            for stream_id in stream_ids:
                self.open(stream_id, b"a")
            answered: set[int] = set()
            while len(answered) < wave:
                answered.add((await self.until(DATA)).stream_id)
            for stream_id in stream_ids:
                if half_close:
                    self.half_close(stream_id)
                self.reset(stream_id)
            yield first // 2 + wave

    async def closed_by_peer(self) -> None:
        """Read to the end of the connection."""
        while await self.reader.read(65_536):
            pass

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def trusting_anyone(*protocols: str) -> ssl.SSLContext:
    """A client's TLS that checks no certificate and offers `protocols`, HTTP/2 by default."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols or ("h2",)))
    return context


def resident_kib() -> int:
    """Memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
