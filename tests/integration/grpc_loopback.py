"""What the gRPC tests share: streams that remember, a server and a channel on loopback, and a
client that writes HTTP/2 frames itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import grpc
import hpack
import pytest
from grpc import aio

from epp.core.streams import StreamFactory, Transport
from epp.edge.grpcio import PROCESS_PATH, GrpcioServer
from epp.edge.health import CHECK_PATH, Health

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
HOST = "127.0.0.1"


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


@asynccontextmanager
async def serving(
    new_stream: StreamFactory, *, health: Health | None = None, **options: object
) -> AsyncIterator[tuple[GrpcioServer, int]]:
    server = GrpcioServer(
        new_stream=new_stream, health=health or Health(), host=HOST, port=0, **options
    )
    port, _ = await server.start()
    try:
        yield server, port
    finally:
        await server.drain(0)


@asynccontextmanager
async def connected(port: int, **options: int) -> AsyncIterator[aio.Channel]:
    """A channel; `options` are channel arguments without `grpc.`, `__` standing for a dot."""
    arguments = [(f"grpc.{key.replace('__', '.')}", value) for key, value in options.items()]
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
    """Reading tasks that live."""
    return [task for task in asyncio.all_tasks() if "_Call._read" in repr(task.get_coro())]


@pytest.fixture(autouse=True)
def no_log_noise(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Nothing here logs a warning, unless the test takes it from `caplog` itself."""
    caplog.set_level(logging.INFO)
    yield caplog
    records = caplog.get_records("setup") + caplog.get_records("call") + caplog.records
    messages = [r.getMessage() for r in records if r.levelno >= logging.WARNING]
    # grpc.aio's poller complains when an event comes for the loop of an earlier test elsewhere.
    assert [m for m in messages if "PollerCompletionQueue" not in m] == []


class Frames:
    """A client that writes HTTP/2 frames itself: cheap, and free to behave as gateways do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PROCESS_PATH)]
        fields += [(":authority", "epp"), ("te", "trailers"), ("content-type", "application/grpc")]
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # so that every stream may send the same bytes
        self.headers = encoder.encode(fields)
        self.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(4, 0, 0, b""))
        self.writer.write(self.frame(8, 0, 0, (1 << 30).to_bytes(4)))

    @classmethod
    async def connect(cls, port: int) -> Frames:
        return cls(*await asyncio.open_connection(HOST, port))

    @staticmethod
    def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload

    def open(self, stream_id: int, message: bytes) -> None:
        self.writer.write(self.frame(1, 4, stream_id, self.headers))
        body = b"\0" + len(message).to_bytes(4) + message
        self.writer.write(self.frame(0, 0, stream_id, body))

    def half_close(self, stream_id: int) -> None:
        self.writer.write(self.frame(0, 1, stream_id, b""))

    def reset(self, stream_id: int) -> None:
        self.writer.write(self.frame(3, 0, stream_id, (2).to_bytes(4)))

    async def read(self) -> tuple[int, int, bytes]:
        """Kind, flags and payload of the next frame."""
        head = await self.reader.readexactly(9)
        return head[3], head[4], await self.reader.readexactly(int.from_bytes(head[:3]))

    async def kinds_until_pong(self) -> set[int]:
        """Ping, and say which kinds of frame came before the answer."""
        self.writer.write(self.frame(6, 0, 0, bytes(8)))
        kinds = set()
        while (frame := await self.read())[:2] != (6, 1):
            kinds.add(frame[0])
        return kinds

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
