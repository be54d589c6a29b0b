"""The fast transport on uvloop: raw frames, stock clients that are not grpc.aio, TLS, slow and many
peers, resources."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, TrailersReceived

from epp.edge import accept, http2_port
from epp.edge.health import CHECK_PATH
from epp.edge.http2 import Limits
from epp.edge.tls import SelfSigned
from tests.integration.transports import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FAST,
    GOAWAY,
    HEADERS,
    HOST,
    NOT_SERVING,
    PROCESS_PATH,
    WINDOW_UPDATE,
    Census,
    Faults,
    Gateway,
    Recorders,
    frame,
    header_block,
    keep,
    message,
    no_log_noise,
    on_uvloop,
    resident_kib,
    serving,
    trusting_anyone,
)

__all__ = ["no_log_noise"]


# -- stock clients -------------------------------------------------------------------------


def _sync_client(port: int, payloads: list[bytes]) -> list[bytes]:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        call = channel.stream_stream(PROCESS_PATH)(iter(payloads), timeout=20)
        answers = list(call)
        assert call.code() is grpc.StatusCode.OK
        assert channel.unary_unary(CHECK_PATH)(b"", timeout=20) == NOT_SERVING
    return answers


@on_uvloop
async def test_grpcio_with_threads_gets_its_messages_back() -> None:
    payloads = [b"", b"x", b"y" * 70_000, bytes(200_000)] * 5
    async with serving(FAST, Recorders()) as (_, port):
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            clients = [loop.run_in_executor(pool, _sync_client, port, payloads) for _ in range(4)]
            assert await asyncio.gather(*clients) == [payloads] * 4


def _h2_client(port: int, payload: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """One call with python h2, a strict reader of the RFC."""
    h2 = H2Connection(H2Configuration(client_side=True))
    h2.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", PROCESS_PATH)]
    headers += [(":authority", "epp"), ("te", "trailers"), ("content-type", "application/grpc")]
    h2.send_headers(1, headers)
    body, got, trailers, over = message(payload), b"", {}, False
    with socket.create_connection((HOST, port), timeout=20) as connection:
        while not over:
            room = min(h2.local_flow_control_window(1), h2.max_outbound_frame_size, len(body))
            if room:
                h2.send_data(1, body[:room], end_stream=room == len(body))
                body = body[room:]
            connection.sendall(h2.data_to_send())
            for event in h2.receive_data(connection.recv(65_536)) if not room else ():
                match event:
                    case DataReceived():
                        got += event.data
                        h2.acknowledge_received_data(event.flow_controlled_length, 1)
                    case TrailersReceived():
                        trailers = dict(event.headers)
                    case StreamEnded():
                        over = True
    return got[5:], {bytes(k): bytes(v) for k, v in trailers.items()}


@on_uvloop
async def test_python_h2_finds_nothing_to_complain_about() -> None:
    payload = bytes(range(256)) * 1_200
    async with serving(FAST, Recorders()) as (_, port):
        got, trailers = await asyncio.to_thread(_h2_client, port, payload)
    assert got == payload
    assert trailers == {b"grpc-status": b"0"}


@on_uvloop
async def test_frames_cut_anywhere_and_many_in_one_read_give_the_same_messages() -> None:
    streams = Recorders()
    block = header_block()
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    for stream_id in (1, 3):
        sent += frame(HEADERS, END_HEADERS, stream_id, block)
        sent += frame(DATA, 0, stream_id, message(b"first") + message(b"second")[:3])
        sent += frame(DATA, END_STREAM, stream_id, message(b"second")[3:])
    async with serving(FAST, streams) as (_, port), asyncio.timeout(20):
        whole = Gateway(*await asyncio.open_connection(HOST, port))
        whole.write(sent)
        cut = Gateway(*await asyncio.open_connection(HOST, port))
        for byte in sent:
            cut.write(bytes((byte,)))
            await asyncio.sleep(0)
        for gateway in (whole, cut):
            for _ in (1, 3):
                assert (await gateway.until(HEADERS, flags=END_HEADERS | END_STREAM)).payload
            await gateway.close()
    assert [s.received for s in streams.made] == [[b"first", b"second"]] * 4
    assert [s.closes for s in streams.made] == [1] * 4


@on_uvloop
async def test_what_is_no_http2_is_told_so_or_dropped_and_counted() -> None:
    faults = Faults()
    async with serving(FAST, Recorders(), report_fault=faults) as (_, port):
        for data in (b"GET / HTTP/1.1\r\nHost: epp\r\n\r\n", b"\x16\x03\x01" + bytes(300)):
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(data)
                await reader.read()
                writer.close()
                await writer.wait_closed()
        assert faults == {"bad-preface": 2}
        gateway = await Gateway.connect(port)
        gateway.open(1, b"others are served")
        assert await gateway.answer(1) == b"others are served"
        await gateway.close()


@on_uvloop
async def test_a_peer_at_fault_is_told_even_while_it_goes_on_sending() -> None:
    async with serving(FAST, Recorders()) as (_, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port)
        await gateway.frames_until_pong()
        gateway.write(frame(DATA, 0, 0, b"data on no stream"), bytes(3_000_000))
        told = await gateway.until(GOAWAY)
        assert int.from_bytes(told.payload[4:8]) == 1  # PROTOCOL_ERROR
        await gateway.closed_by_peer()
        await gateway.close()


@on_uvloop
async def test_a_peer_that_does_not_close_when_it_is_over_is_dropped(monkeypatch) -> None:
    monkeypatch.setattr(http2_port, "LINGER_S", 0.1)
    async with serving(FAST, Recorders()) as (server, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port)
        await gateway.frames_until_pong()
        gateway.write(frame(DATA, 0, 0, b"data on no stream"))
        await gateway.closed_by_peer()
        (served,) = server._ports
        while served.connections:  # noqa: ASYNC110 - until the timer has fired
            await asyncio.sleep(0)
        gateway.writer.transport.abort()


# -- a connection that says nothing --------------------------------------------------------


@on_uvloop
async def test_O12_a_connection_that_says_nothing_is_closed() -> None:
    faults = Faults()
    limits = Limits(handshake_timeout_s=0.2)
    async with (
        serving(FAST, Recorders(), limits=limits, report_fault=faults) as (
            _,
            port,
        ),
        asyncio.timeout(10),
    ):
        reader, writer = await asyncio.open_connection(HOST, port)
        await reader.read()
        writer.close()
    assert faults == {"settle-timeout": 1}


@on_uvloop
async def test_a_tls_handshake_that_does_not_end_is_given_up() -> None:
    faults = Faults()
    limits = Limits(handshake_timeout_s=0.2, connections_max=1)
    async with (
        serving(
            FAST,
            Recorders(),
            tls=SelfSigned(),
            limits=limits,
            report_fault=faults,
        ) as (_, port),
        asyncio.timeout(10),
    ):
        reader, writer = await asyncio.open_connection(HOST, port)
        await reader.read()
        writer.close()
        secure = await Gateway.connect(port, ssl=trusting_anyone(), server_hostname="epp")
        secure.open(1, b"its place is free again")
        assert await secure.answer(1) == b"its place is free again"
        await secure.close()
    assert faults["tls_handshake"] == 1


@pytest.mark.parametrize("tls", [None, SelfSigned()], ids=["plain", "tls"])
@on_uvloop
async def test_answers_do_not_wait_for_the_kernel_to_fill_a_packet(tls) -> None:
    """TCP_NODELAY: with Nagle's algorithm an answer could wait 40 ms for the peer's delayed ACK."""
    secure = {"ssl": trusting_anyone(), "server_hostname": "epp"} if tls else {}
    async with serving(FAST, Recorders(), tls=tls) as (server, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port, **secure)
        await gateway.frames_until_pong()
        (connection,) = server._ports[0].connections
        accepted = connection._transport.get_extra_info("socket")
        assert accepted.getpeername() == gateway.writer.get_extra_info("sockname")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await gateway.close()


# -- many ----------------------------------------------------------------------------------


@on_uvloop
async def test_five_hundred_connections_come_and_go() -> None:
    streams = Recorders()
    async with serving(FAST, streams) as (server, port), asyncio.timeout(30):
        for wave in range(10):
            gateways = await asyncio.gather(*(Gateway.connect(port) for _ in range(50)))
            for gateway in gateways:
                gateway.open(1, b"%d" % wave)
            for number, gateway in enumerate(gateways):
                assert await gateway.answer(1) == b"%d" % wave
                if number % 2:
                    gateway.writer.transport.abort()
                else:
                    await gateway.close()
        for stream in streams.made:
            await stream.closed.wait()
        assert server.streams_inflight == 0
    assert [stream.closes for stream in streams.made] == [1] * 500


@on_uvloop
async def test_connections_beyond_the_limit_wait_until_one_ends() -> None:
    faults = Faults()
    async with (
        serving(
            FAST,
            Recorders(),
            limits=Limits(connections_max=2),
            report_fault=faults,
        ) as (_, port),
        asyncio.timeout(10),
    ):
        first, second, third = [await Gateway.connect(port) for _ in range(3)]
        for gateway in (first, second, third):
            gateway.open(1, b"a")
        assert await first.answer(1) == await second.answer(1) == b"a"
        waiting = asyncio.create_task(third.answer(1))
        await first.frames_until_pong()  # much later
        assert not waiting.done()
        await second.close()
        assert await waiting == b"a"
        await first.close()
        await third.close()
    assert faults["connections"] >= 1


@on_uvloop
async def test_accepting_goes_on_after_a_shortage_of_descriptors(monkeypatch) -> None:
    monkeypatch.setattr(accept, "RETRY_S", 0.05)
    faults = Faults()
    short = iter([OSError(24, "Too many open files")] * 2)
    real = socket.socket.accept

    def accepting(listening: socket.socket) -> tuple[socket.socket, object]:
        for error in short:
            raise error
        return real(listening)

    async with (
        serving(FAST, Recorders(), report_fault=faults) as (_, port),
        asyncio.timeout(10),
    ):
        monkeypatch.setattr(socket.socket, "accept", accepting)
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        await gateway.close()
    assert faults == {"descriptors": 2}


@on_uvloop
async def test_ten_thousand_streams_are_open_at_once_and_all_are_answered() -> None:
    count = 10_000
    streams = Recorders(keep)
    async with serving(FAST, streams) as (server, port), asyncio.timeout(60):
        gateway = await Gateway.connect(port)
        for first in range(0, count, 500):
            for number in range(first, first + 500):
                gateway.open(2 * number + 1, b"%d" % number)
            await gateway.writer.drain()
        while len(streams.made) < count or not streams.made[-1].received:
            await gateway.frames_until_pong()
        assert server.streams_inflight == count
        one_more = await Gateway.connect(port)
        one_more.open(1, b"one more")
        await one_more.frames_until_pong()
        assert len(streams.made) == count + 1  # another connection has places of its own
        for stream in streams.made[:count]:
            stream.transport.send((stream.received[0],))
            stream.transport.finish()
        answers = 0
        while answers < count:
            answers += (await gateway.read()).kind == DATA
        await gateway.close()
        await one_more.close()
    assert [stream.closes for stream in streams.made] == [1] * (count + 1)


# -- slow peers ----------------------------------------------------------------------------


@on_uvloop
async def test_a_peer_that_reads_nothing_costs_bounded_memory_and_delays_nobody() -> None:
    streams = Recorders(lambda stream, data: stream.transport.send((data,)))
    async with serving(FAST, streams) as (_, port), asyncio.timeout(30):
        slow = await Gateway.connect(port, window_bytes=(1 << 31) - 1, limit=1)
        slow.writer.transport.pause_reading()
        before_kib = resident_kib()
        chunk = bytes(500_000)
        writer = asyncio.create_task(_flood(slow, 400, chunk))
        brisk = await Gateway.connect(port)
        brisk.open(1, b"a")
        assert await brisk.answer(1) == b"a"
        taken = -1
        while taken != sum(len(stream.received) for stream in streams.made):
            taken = sum(len(stream.received) for stream in streams.made)
            for _ in range(50):
                await brisk.frames_until_pong()
        assert taken * 500_000 < 100 << 20  # of 200 MB
        assert resident_kib() - before_kib < 150 << 10
        slow.writer.transport.resume_reading()
        answers = 0
        while answers < 400 * len(chunk):
            got = await slow.read()
            answers += len(got.payload) if got.kind == DATA else 0
        await writer
        await slow.close()
        await brisk.close()


async def _flood(gateway: Gateway, count: int, data: bytes) -> None:
    """Send on stream after stream, as far as the socket takes it; each fits a stream's window."""
    for number in range(count):
        gateway.open(2 * number + 1, data)
        await gateway.writer.drain()


@on_uvloop
async def test_a_peer_that_writes_slowly_gets_its_answer_and_delays_nobody() -> None:
    streams = Recorders()
    async with serving(FAST, streams) as (_, port), asyncio.timeout(20):
        slow, brisk = await Gateway.connect(port), await Gateway.connect(port)
        data = frame(HEADERS, END_HEADERS, 1, header_block())
        data += frame(DATA, 0, 1, message(b"slow"))
        for at in range(len(data)):
            slow.write(data[at : at + 1])
            brisk.open(2 * at + 1, b"quick")
            assert await brisk.answer(2 * at + 1) == b"quick"
        assert await slow.answer(1) == b"slow"
        await slow.close()
        await brisk.close()


# -- what is left behind -------------------------------------------------------------------


GROWTH = """
import sys, uvloop
from tests.integration.test_http2_server import growth_kib_of_resets
print(uvloop.run(growth_kib_of_resets(sys.argv[1])))
"""


@pytest.mark.parametrize("how", ["reset", "half-closed and reset", "reset in the middle"])
def test_O01_A24_twenty_thousand_reset_streams_leave_nothing_behind(
    how: str, record_property: Callable[[str, object], None]
) -> None:
    """In a process of its own, in which nobody else allocates."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    record_property("rss_growth_kib", int(done.stdout))
    assert int(done.stdout) < 1_024


async def growth_kib_of_resets(how: str) -> int:
    """How much memory the second half of many reset streams took and did not give back."""
    answer = bytes(200_000) if how == "reset in the middle" else b"a"
    streams = Census(lambda stream, _: stream.transport.send((answer,)))
    count = 20_000 // (1 if answer == b"a" else 10)
    async with serving(FAST, streams) as (server, port), asyncio.timeout(60):
        gateway = await Gateway.connect(port)
        before_kib = 0
        half_close = how == "half-closed and reset"
        async for done in gateway.reset_waves(count, 100, half_close=half_close):
            if answer != b"a":
                gateway.write(frame(WINDOW_UPDATE, 0, 0, (1 << 24).to_bytes(4)))
            if done == count // 2:
                before_kib = resident_kib()
        await gateway.frames_until_pong()
        assert server.streams_inflight == 0
        gc.collect()
        assert len(streams.alive) == 0
        growth_kib = resident_kib() - before_kib
        await gateway.close()
    assert streams.closes == [1] * count
    return growth_kib


@on_uvloop
async def test_connections_and_their_streams_are_freed_without_the_garbage_collector() -> None:
    streams = Census()
    async with serving(FAST, streams) as (server, port), asyncio.timeout(20):
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                gateway = await Gateway.connect(port)
                gateway.open(1, b"a")
                assert await gateway.answer(1) == b"a"
                await gateway.close()
            while server.streams_inflight:  # noqa: ASYNC110 - the loop must see the ends
                await asyncio.sleep(0)
            (port_served,) = server._ports
            while port_served.connections:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert len(streams.alive) == 0
        finally:
            gc.enable()


# -- a process of its own ------------------------------------------------------------------

IMPORTS = """
import sys
import epp.edge.http2
print("grpc" in sys.modules)
"""


def test_the_fast_transport_does_not_load_grpcio() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
