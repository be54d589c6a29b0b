"""The fast transport on uvloop: raw frames, stock clients that are not grpc.aio, TLS, slow and many
peers, resources."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, TrailersReceived

from epp.core.streams import Transport
from epp.edge import accept, http2_port
from epp.edge.health import CHECK_PATH, WATCH_PATH, Health
from epp.edge.http2 import Http2Server, Limits
from epp.edge.tls import CertificateError, KeyPair, SelfSigned, self_signed
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
    RST_STREAM,
    SERVING,
    WINDOW_UPDATE,
    Faults,
    Gateway,
    Recorder,
    Recorders,
    echo,
    frame,
    header_block,
    keep,
    message,
    on_uvloop,
    resident_kib,
    serving,
)


@pytest.fixture(autouse=True)
def no_log_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


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
        secure = await Gateway.connect(port, ssl=_trusting_anyone(), server_hostname="epp")
        secure.open(1, b"its place is free again")
        assert await secure.answer(1) == b"its place is free again"
        await secure.close()
    assert faults["tls_handshake"] == 1


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


@pytest.mark.parametrize("how", ["reset", "half-closed and reset", "reset in the middle"])
@on_uvloop
async def test_O01_A24_twenty_thousand_reset_streams_leave_nothing_behind(
    how: str, record_property: Callable[[str, object], None]
) -> None:
    alive: weakref.WeakSet[Recorder] = weakref.WeakSet()
    closes: list[int] = []
    answer = bytes(200_000) if how == "reset in the middle" else b"a"

    class Counted(Recorder):
        def on_close(self) -> None:
            super().on_close()
            closes.append(self.closes)

    def counted(transport: Transport) -> Recorder:
        stream = Counted(transport, lambda stream, _: stream.transport.send((answer,)))
        alive.add(stream)
        return stream

    streams_count, wave = 20_000 // (1 if answer == b"a" else 10), 100
    async with serving(FAST, counted) as (server, port), asyncio.timeout(60):
        gateway = await Gateway.connect(port)
        before_kib = 0
        for first in range(1, 2 * streams_count, 2 * wave):
            stream_ids = range(first, first + 2 * wave, 2)
            for stream_id in stream_ids:
                gateway.open(stream_id, b"a")
            answered = set()
            while len(answered) < wave:
                got = await gateway.read()
                if got.kind == DATA:
                    answered.add(got.stream_id)
            for stream_id in stream_ids:
                if how == "half-closed and reset":
                    gateway.half_close(stream_id)
                gateway.reset(stream_id)
            if answer != b"a":
                gateway.write(frame(WINDOW_UPDATE, 0, 0, (1 << 24).to_bytes(4)))
            if first < streams_count <= first + 2 * wave:
                before_kib = resident_kib()
        await gateway.frames_until_pong()
        assert server.streams_inflight == 0
        gc.collect()
        assert len(alive) == 0
        growth_kib = resident_kib() - before_kib
        record_property("rss_growth_kib", growth_kib)
        assert growth_kib < 4_096
        await gateway.close()
    assert closes == [1] * streams_count


@on_uvloop
async def test_connections_and_their_streams_are_freed_without_the_garbage_collector() -> None:
    alive: weakref.WeakSet[Recorder] = weakref.WeakSet()

    def kept(transport: Transport) -> Recorder:
        stream = Recorder(transport, echo)
        alive.add(stream)
        return stream

    async with serving(FAST, kept) as (server, port), asyncio.timeout(20):
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
            assert len(alive) == 0
        finally:
            gc.enable()


@on_uvloop
async def test_after_the_drain_no_task_timer_or_socket_is_left() -> None:
    streams = Recorders()
    server = Http2Server(
        new_stream=streams, health=Health(), host=HOST, port=0, health_port=0, tls=SelfSigned()
    )
    port, health_port = await server.start()
    plain = [await Gateway.connect(health_port) for _ in range(3)]
    secure = await Gateway.connect(port, ssl=_trusting_anyone(), server_hostname="epp")
    secure.open(1, b"a")
    assert await secure.answer(1) == b"a"
    half_open = socket.create_connection((HOST, port))  # a handshake that is under way
    for gateway in plain:
        await gateway.frames_until_pong()
    tasks = asyncio.all_tasks()
    async with asyncio.timeout(10):
        await server.drain(0)
    assert {task for task in asyncio.all_tasks() if "_join" in repr(task)} == set(), tasks
    assert [stream.closes for stream in streams.made] == [1]
    for taken in (port, health_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, taken))
    half_open.close()
    for gateway in (*plain, secure):
        gateway.writer.transport.abort()


# -- TLS -----------------------------------------------------------------------------------


def _trusting_anyone(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols or ("h2",)))
    return context


class Renewed:
    """A certificate source that the test renews."""

    def __init__(self, pair: KeyPair) -> None:
        self.pair = pair


def _der(pair: KeyPair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate_chain.decode())


def _served(gateway: Gateway) -> bytes:
    return gateway.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


def _sync_tls_client(port: int, pair: KeyPair) -> bytes:
    credentials = grpc.ssl_channel_credentials(root_certificates=pair.certificate_chain)
    with grpc.secure_channel(f"{HOST}:{port}", credentials) as channel:
        return next(channel.stream_stream(PROCESS_PATH)(iter([b"secret"]), timeout=20))


@on_uvloop
async def test_a_client_that_trusts_the_certificate_talks_and_a_plain_one_does_not() -> None:
    source = SelfSigned()
    faults = Faults()
    async with serving(FAST, Recorders(), tls=source, report_fault=faults) as (_, port):
        assert await asyncio.to_thread(_sync_tls_client, port, source.pair) == b"secret"
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(_sync_tls_client, port, self_signed())
        plain = await Gateway.connect(port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(10):
                await plain.frames_until_pong()
        plain.writer.transport.abort()
    assert faults["tls_handshake"] >= 2


@pytest.mark.parametrize("protocols", [("http/1.1",), ()])
@on_uvloop
async def test_a_client_that_does_not_negotiate_h2_is_disconnected(protocols, caplog) -> None:
    faults = Faults()
    context = _trusting_anyone(*protocols)
    if not protocols:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with (
        serving(FAST, Recorders(), tls=SelfSigned(), report_fault=faults) as (
            _,
            port,
        ),
        asyncio.timeout(10),
    ):
        gateway = await Gateway.connect(port, ssl=context, server_hostname="epp")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await gateway.frames_until_pong()
        gateway.writer.transport.abort()
    assert faults == {"alpn": 1}
    assert "ALPN protocol `h2`" in caplog.text
    caplog.clear()


@on_uvloop
async def test_tls_1_2_is_served_and_anything_older_refused() -> None:
    context, older = _trusting_anyone(), _trusting_anyone()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    older.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_1
    async with serving(FAST, Recorders(), tls=SelfSigned()) as (_, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port, ssl=context, server_hostname="epp")
        assert gateway.writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        await gateway.close()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await Gateway.connect(port, ssl=older, server_hostname="epp")


@on_uvloop
async def test_a_renewed_certificate_is_for_new_connections_and_open_streams_go_on(
    caplog,
) -> None:
    old, new = self_signed(), self_signed()
    source = Renewed(old)
    connect = {"ssl": _trusting_anyone(), "server_hostname": "epp"}
    async with serving(FAST, Recorders(), tls=source) as (_, port), asyncio.timeout(20):
        before = await Gateway.connect(port, **connect)
        before.open(1, b"before")
        assert await before.answer(1) == b"before"
        source.pair = new
        after = await Gateway.connect(port, **connect)
        assert (_served(before), _served(after)) == (_der(old), _der(new))
        source.pair = KeyPair(new.certificate_chain, b"no key")
        still = await Gateway.connect(port, **connect)
        assert _served(still) == _der(new)
        before.send(1, b"still here")
        assert await before.answer(1) == b"still here"
        for gateway in (before, after, still):
            await gateway.close()
    assert "the former TLS certificate stays" in caplog.text
    caplog.clear()


@on_uvloop
async def test_a_certificate_that_cannot_be_used_stops_the_start_and_nothing_is_bound() -> None:
    source = Renewed(KeyPair(self_signed().certificate_chain, b"no key"))
    server = Http2Server(new_stream=Recorders(), health=Health(), host=HOST, port=0, tls=source)
    with pytest.raises(CertificateError):
        await server.start()
    assert server._ports == []


@on_uvloop
async def test_large_messages_go_both_ways_through_tls_and_a_slow_reader_is_waited_for() -> None:
    streams = Recorders()
    async with serving(FAST, streams, tls=SelfSigned()) as (_, port), asyncio.timeout(30):
        gateway = await Gateway.connect(
            port, window_bytes=1 << 30, ssl=_trusting_anyone(), server_hostname="epp", limit=1
        )
        gateway.writer.transport.pause_reading()
        body = bytes(range(256)) * 2_000
        for number in range(30):
            gateway.open(2 * number + 1, body)
        gateway.writer.transport.resume_reading()
        got: Counter[int] = Counter()
        while sum(got.values()) < 30 * (len(body) + 5):
            received = await gateway.read()
            if received.kind == DATA:
                got[received.stream_id] += len(received.payload)
        assert set(got.values()) == {len(body) + 5}
        await gateway.close()


# -- drain ---------------------------------------------------------------------------------


@on_uvloop
async def test_M05_idle_connections_do_not_hold_the_drain_and_are_told() -> None:
    async with serving(FAST, Recorders()) as (server, port), asyncio.timeout(10):
        gateways = [await Gateway.connect(port) for _ in range(20)]
        for gateway in gateways:
            await gateway.frames_until_pong()
        drain = asyncio.create_task(server.drain(25))
        for gateway in gateways:
            told = await gateway.until(GOAWAY)
            assert told.payload[4:8] == bytes(4)  # NO_ERROR
            gateway.writer.transport.abort()
        async with asyncio.timeout(5):
            await drain


@on_uvloop
async def test_M04_a_stream_under_way_when_the_drain_begins_is_served_and_a_late_one_refused() -> (
    None
):
    streams = Recorders()
    async with serving(FAST, streams) as (server, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"open")
        assert await gateway.answer(1) == b"open"
        gateway.write(frame(HEADERS, END_HEADERS, 3, header_block()))
        drain = asyncio.create_task(server.drain(25))
        gateway.send(3, b"under way")
        assert await gateway.answer(3) == b"under way"
        gateway.reset(3)
        await gateway.frames_until_pong()
        while True:  # until the second GOAWAY, which names the last stream served
            gateway.write(frame(6, 1, 0, bytes(8)))
            told = await gateway.until(GOAWAY)
            if int.from_bytes(told.payload[:4]) < 1 << 30:
                break
        gateway.open(5, b"late")
        refused = [f for f in await gateway.frames_until_pong() if f.kind == RST_STREAM]
        assert [int.from_bytes(f.payload) for f in refused] in ([7], [])  # REFUSED_STREAM
        assert not drain.done()
        gateway.send(1, b"more")
        assert await gateway.answer(1) == b"more"
        gateway.half_close(1)
        await gateway.until(HEADERS)
        await gateway.closed_by_peer()
        await gateway.close()
        async with asyncio.timeout(5):
            await drain
    assert [stream.received[0] for stream in streams.made] == [b"open", b"under way"]


@on_uvloop
async def test_M05_a_gateway_is_told_when_the_grace_is_over() -> None:
    async with serving(FAST, Recorders()) as (server, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        drain = asyncio.create_task(server.drain(0))
        told = await gateway.until(GOAWAY)
        assert told.payload == (1).to_bytes(4) + bytes(4)  # its last stream, NO_ERROR
        await gateway.closed_by_peer()
        await gateway.close()
        await drain


@on_uvloop
async def test_a_drain_may_be_cancelled_and_repeated_in_a_hurry() -> None:
    streams = Recorders()
    async with serving(FAST, streams) as (server, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        slow = asyncio.create_task(server.drain(25))
        await gateway.until(GOAWAY)
        slow.cancel()
        await asyncio.wait({slow})
        await server.drain(0)
        assert streams.made[0].closes == 1
        gateway.writer.transport.abort()


@on_uvloop
async def test_health_is_watched_over_both_ports_until_the_end() -> None:
    health = Health()
    health.set_ready(True)
    server = Http2Server(new_stream=Recorders(), health=health, host=HOST, port=0, health_port=0)
    ports = await server.start()
    async with asyncio.timeout(10):
        watchers = [await Gateway.connect(port) for port in ports]
        for watcher in watchers:
            watcher.open(1, b"", headers=header_block(WATCH_PATH))
            watcher.half_close(1)
            assert await watcher.answer(1) == SERVING
        health.set_ready(False)
        for watcher in watchers:
            assert await watcher.answer(1) == NOT_SERVING
        drain = asyncio.create_task(server.drain(25))
        for watcher in watchers:
            assert (await watcher.headers())["grpc-status"] == "14"
            watcher.writer.transport.abort()
        await drain


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
