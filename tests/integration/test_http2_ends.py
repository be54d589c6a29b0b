"""The fast transport over TLS, and how it ends, on uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from collections import Counter

import grpc
import pytest

from epp.edge.health import WATCH_PATH, Health
from epp.edge.http2 import Http2Server
from epp.edge.tls import CertificateError, KeyPair, SelfSigned, self_signed
from tests.integration.transports import (
    DATA,
    END_HEADERS,
    FAST,
    GOAWAY,
    HEADERS,
    HOST,
    NOT_SERVING,
    PROCESS_PATH,
    RST_STREAM,
    SERVING,
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


# -- TLS -----------------------------------------------------------------------------------


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
    context = trusting_anyone(*protocols)
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
    context, older = trusting_anyone(), trusting_anyone()
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
async def test_a_higher_minimum_refuses_tls_1_2() -> None:
    context, older = trusting_anyone(), trusting_anyone()
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    options = {"tls": SelfSigned(), "tls_version_min": ssl.TLSVersion.TLSv1_3}
    async with serving(FAST, Recorders(), **options) as (_, port), asyncio.timeout(10):
        gateway = await Gateway.connect(port, ssl=context, server_hostname="epp")
        assert gateway.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        await gateway.close()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await Gateway.connect(port, ssl=older, server_hostname="epp")


@on_uvloop
async def test_a_renewed_certificate_is_for_new_connections_and_open_streams_go_on(
    caplog,
) -> None:
    old, new = self_signed(), self_signed()
    source = Renewed(old)
    connect = {"ssl": trusting_anyone(), "server_hostname": "epp"}
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
            port, window_bytes=1 << 30, ssl=trusting_anyone(), server_hostname="epp", limit=1
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


@on_uvloop
async def test_after_the_drain_no_task_timer_or_socket_is_left() -> None:
    streams = Recorders()
    server = Http2Server(
        new_stream=streams, health=Health(), host=HOST, port=0, health_port=0, tls=SelfSigned()
    )
    port, health_port = await server.start()
    plain = [await Gateway.connect(health_port) for _ in range(3)]
    secure = await Gateway.connect(port, ssl=trusting_anyone(), server_hostname="epp")
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
