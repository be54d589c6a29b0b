"""Peers that mean harm to the fast transport, or behave as if: each is ended and counted, what it
held is given back, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from epp.edge import http2_port
from epp.edge.http2 import Http2Server, Limits
from epp.edge.tls import SelfSigned
from tests.integration.transports import (
    END_HEADERS,
    FAST,
    GOAWAY,
    HEADERS,
    HOST,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Census,
    Faults,
    Gateway,
    Recorders,
    frame,
    header_block,
    no_log_noise,
    on_uvloop,
    serving,
    trusting_anyone,
)

__all__ = ["no_log_noise"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CONTINUATION = 9
ENHANCE_YOUR_CALM = 11
BLOCK = header_block()
ABORTED = (ConnectionError, asyncio.IncompleteReadError)


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """These peers do not close when they are told that it is over."""
    monkeypatch.setattr(http2_port, "LINGER_S", 0.1)


class Bystander:
    """A peer that must be served whatever the others do."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._last_id = -1

    async def ask(self) -> None:
        """One stream, begun, answered and reset."""
        self._last_id += 2
        self._gateway.open(self._last_id, b"mine")
        assert (await self._gateway.answer(self._last_id)).startswith(b"mine")
        self._gateway.reset(self._last_id)
        await self._gateway.frames_until_pong()


@asynccontextmanager
async def bystander(port: int, **options: object) -> AsyncIterator[Bystander]:
    """It asks before and after what the test does."""
    gateway = await Gateway.connect(port, **options)
    other = Bystander(gateway)
    await other.ask()
    yield other
    await other.ask()
    await gateway.close()


async def left_alone(server: Http2Server, other: Bystander) -> None:
    """Until the bystander's is the only connection; it is served meanwhile."""
    (port,) = server._ports
    while len(port.connections) > 1:
        await other.ask()


# -- floods --------------------------------------------------------------------------------

FLOODS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "pings": ("ping-flood", lambda _: frame(PING, 0, 0, bytes(8))),
    "settings": ("settings-flood", lambda _: frame(SETTINGS, 0, 0)),
    "windows": ("window-update-flood", lambda _: frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4))),
    "unknown frames": ("frame-flood", lambda _: frame(0x99, 0, 0, bytes(100))),
    "streams opened and reset": (
        "reset-flood",
        lambda n: (
            frame(HEADERS, END_HEADERS, 2 * n + 1, BLOCK)
            + frame(RST_STREAM, 0, 2 * n + 1, bytes(4))
        ),
    ),
    "resets provoked": (
        "provoked-resets",
        lambda n: (
            frame(HEADERS, END_HEADERS, 2 * n + 1, BLOCK)
            + frame(WINDOW_UPDATE, 0, 2 * n + 1, bytes(4))
        ),
    ),
    "a header block without end": (
        "header-flood",
        lambda n: frame(CONTINUATION if n else HEADERS, 0, 1, bytes(1_000)),
    ),
}


@pytest.mark.parametrize("what", FLOODS)
@on_uvloop
async def test_a_flood_is_ended_while_others_are_served(what: str) -> None:
    reason, make = FLOODS[what]
    faults, streams = Faults(), Recorders()
    async with (
        serving(FAST, streams, report_fault=faults) as (server, port),
        asyncio.timeout(20),
        bystander(port) as other,
    ):
        flooder = await Gateway.connect(port)
        flooder.write(b"".join(map(make, range(30_000))))
        while reason not in faults:
            await other.ask()
        with suppress(ConnectionError):  # what came behind the end may have been reset
            told = await flooder.until(GOAWAY)
            assert int.from_bytes(told.payload[4:8]) == ENHANCE_YOUR_CALM
        flooder.writer.transport.abort()
        await left_alone(server, other)
    assert faults[reason] == 1
    assert all(stream.closes == 1 for stream in streams.made)


# -- connections that stay and do nothing --------------------------------------------------

STALLED = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "no settings": PREFACE,
    "half of the settings": PREFACE + frame(SETTINGS, 0, 0, bytes(6))[:12],
    "no acknowledgement": PREFACE + frame(SETTINGS, 0, 0),
}


@pytest.mark.parametrize("start", STALLED.values(), ids=STALLED.keys())
@on_uvloop
async def test_two_hundred_connections_that_do_not_get_ready_are_dropped(start: bytes) -> None:
    faults, limits = Faults(), Limits(handshake_timeout_s=0.3, connections_max=201)
    async with (
        serving(FAST, Recorders(), limits=limits, report_fault=faults) as (server, port),
        asyncio.timeout(20),
        bystander(port) as other,
    ):
        stalled = [await asyncio.open_connection(HOST, port) for _ in range(200)]
        for _, writer in stalled:
            writer.write(start)
        await left_alone(server, other)
        for _, writer in stalled:
            writer.transport.abort()
    assert faults["settle-timeout"] == 200


@on_uvloop
async def test_a_preface_that_comes_a_byte_at_a_time_gets_no_more_time_for_it() -> None:
    faults, limits = Faults(), Limits(handshake_timeout_s=0.3)
    async with (
        serving(FAST, Recorders(), limits=limits, report_fault=faults) as (server, port),
        asyncio.timeout(20),
        bystander(port) as other,
    ):
        reader, writer = await asyncio.open_connection(HOST, port)
        dribble = asyncio.create_task(_dribble(writer, PREFACE, 0.05))
        with suppress(ConnectionError):
            await reader.read()
        await left_alone(server, other)
        dribble.cancel()
        writer.transport.abort()
    assert faults == {"settle-timeout": 1}


async def _dribble(writer: asyncio.StreamWriter, data: bytes, pause_s: float) -> None:
    for byte in data:
        writer.write(bytes((byte,)))
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize("cut", ["in a frame's head", "in a header block", "in a message"])
@on_uvloop
async def test_a_peer_that_stops_in_the_middle_is_given_up(cut: str) -> None:
    faults, streams = Faults(), Recorders()
    limits = Limits(keepalive_s=0.2, keepalive_timeout_s=0.2)
    async with (
        serving(FAST, streams, limits=limits, report_fault=faults) as (server, port),
        asyncio.timeout(20),
        bystander(port) as other,
    ):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        rest = {
            "in a frame's head": frame(PING, 0, 0, bytes(8))[:5],
            "in a header block": frame(HEADERS, 0, 3, BLOCK[:9]),
            "in a message": frame(0, 0, 1, b"\0\0\0\xff\xffabc"),
        }
        gateway.write(rest[cut])
        await left_alone(server, other)
        gateway.writer.transport.abort()
    assert faults["keepalive-timeout"] == 1
    assert all(stream.closes == 1 for stream in streams.made)


# -- connections that are half gone --------------------------------------------------------


@pytest.mark.parametrize("tls", [None, SelfSigned()], ids=["plain", "tls"])
@pytest.mark.parametrize("how", ["fin", "reset", "cut"])
@on_uvloop
async def test_a_peer_that_leaves_in_any_way_leaves_no_stream(how: str, tls) -> None:
    faults, streams = Faults(), Recorders(lambda s, d: s.transport.send((bytes(300_000),)))
    secure = {"ssl": trusting_anyone(), "server_hostname": "epp"} if tls else {}
    async with (
        serving(FAST, streams, tls=tls, report_fault=faults) as (server, port),
        asyncio.timeout(20),
    ):
        gateway = await Gateway.connect(port, **secure)
        for stream_id in range(1, 41, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < 20 or not streams.made[-1].received:
            await gateway.read()
        _leave(gateway.writer.transport, how)
        for stream in streams.made:
            await stream.closed.wait()
        assert server.streams_inflight == 0
        gateway.writer.transport.abort()
    assert [stream.closes for stream in streams.made] == [1] * 20
    assert not faults


def _leave(transport: asyncio.Transport, how: str) -> None:
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        if how == "reset":
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            own.shutdown(socket.SHUT_WR if how == "fin" else socket.SHUT_RDWR)


@on_uvloop
async def test_noise_inside_tls_ends_its_connection_only(caplog) -> None:
    streams = Recorders()
    secure = {"ssl": trusting_anyone(), "server_hostname": "epp"}
    async with (
        serving(FAST, streams, tls=SelfSigned()) as (server, port),
        asyncio.timeout(20),
        bystander(port, **secure) as other,
    ):
        noisy = await Gateway.connect(port, **secure)
        noisy.open(1, b"a")
        assert await noisy.answer(1) == b"a"
        os.write(noisy.writer.get_extra_info("socket").fileno(), bytes(range(256)) * 100)
        await left_alone(server, other)
        noisy.writer.transport.abort()
    assert all(stream.closes == 1 for stream in streams.made)


# -- readers that do not read --------------------------------------------------------------


@on_uvloop
async def test_answers_that_no_window_lets_out_are_held_and_given_back() -> None:
    """Four hundred streams whose windows stay shut, each owed 100 kB."""
    streams = Census(lambda stream, data: stream.transport.send((data + bytes(100_000),)))
    async with (
        serving(FAST, streams) as (server, port),
        asyncio.timeout(30),
        bystander(port, window_bytes=1 << 20) as other,
    ):
        shut = await Gateway.connect(port, window_bytes=0)
        for stream_id in range(1, 801, 2):
            shut.open(stream_id, b"a")
        await shut.frames_until_pong()
        assert server.streams_inflight >= 400
        shut.writer.transport.abort()
        await left_alone(server, other)
        gc.collect()
        assert len(streams.alive) == 0
    assert set(streams.closes) == {1}
