"""The grpc.aio transport as gateways use it: pings, resets, lost connections, draining. Where no
gRPC library does what Envoy does, the client writes HTTP/2 frames itself."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import grpc
import pytest
from grpc import aio

from epp.core.streams import Transport
from epp.edge.grpcio import PROCESS_PATH, GrpcioServer, Limits
from epp.edge.health import WATCH_PATH, Health
from tests.integration.grpc_loopback import (
    HOST,
    NOT_SERVING,
    SERVING,
    Frames,
    Recorder,
    Recorders,
    check,
    connected,
    echo,
    keep,
    no_log_noise,
    process,
    readers,
    reset,
    serving,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")  # O-10: grpc.aio belongs to one loop
__all__ = ["no_log_noise"]


async def test_M04_a_stream_open_at_sigterm_goes_on_and_drain_returns_when_it_ends() -> None:
    streams, health = Recorders(), Health()
    health.set_ready(True)
    server = GrpcioServer(new_stream=streams, health=health, host=HOST, port=0, health_port=0)
    port, health_port = await server.start()
    async with connected(port) as channel, connected(health_port) as probes:
        watch = channel.unary_stream(WATCH_PATH)(b"")
        assert await watch.read() == SERVING
        call = process(channel)
        await call.write(b"before")
        assert await call.read() == b"before"
        drain = asyncio.create_task(server.drain(25))
        assert await watch.read() == NOT_SERVING
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE
        assert await check(probes, b"readiness") == NOT_SERVING
        assert await check(probes, b"liveness") == SERVING
        assert await process(channel).code() is grpc.StatusCode.UNAVAILABLE
        await call.write(b"during")
        assert await call.read() == b"during"
        assert not drain.done()
        await call.done_writing()
        assert await call.read() is aio.EOF
        async with asyncio.timeout(5):
            await drain
    assert [stream.closes for stream in streams.made] == [1]


async def test_M04_new_streams_are_served_while_gateways_take_notice() -> None:
    streams, health = Recorders(), Health()
    health.set_ready(True)
    async with serving(streams, health=health) as (server, port), connected(port) as channel:
        watch = channel.unary_stream(WATCH_PATH)(b"")
        assert await watch.read() == SERVING
        drain = asyncio.create_task(server.drain(25, notice_s=0.3))
        assert await watch.read() == NOT_SERVING
        late = process(channel)
        await late.write(b"late")
        assert await late.read() == b"late"
        assert not drain.done()
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE  # the notice is over
        await late.write(b"later")
        assert await late.read() == b"later"
        await reset(late)
        async with asyncio.timeout(5):
            await drain


async def test_M05_idle_streams_and_watches_do_not_outlast_the_grace() -> None:
    streams = Recorders()
    async with serving(streams) as (server, port), connected(port) as channel:
        watch = channel.unary_stream(WATCH_PATH)(b"")
        await watch.read()
        idle = process(channel)
        await idle.write(b"a")
        await idle.read()
        async with asyncio.timeout(5):
            await server.drain(0.2)
        assert (streams.made[0].closes, server.streams_inflight) == (1, 0)
        assert await idle.code() is not grpc.StatusCode.OK
        await server.drain(0.2)  # a second signal


async def test_M05_a_watch_alone_does_not_hold_the_drain() -> None:
    async with serving(Recorders()) as (server, port), connected(port) as channel:
        watches = [channel.unary_stream(WATCH_PATH)(b"") for _ in range(3)]
        for watch in watches:
            assert await watch.read() == NOT_SERVING
        async with asyncio.timeout(5):
            await server.drain(25)


async def test_a_gateway_may_ping_as_often_as_it_likes() -> None:
    streams = Recorders(keep)
    async with serving(streams) as (_, port), asyncio.timeout(20):
        gateway = await Frames.connect(port)
        gateway.open(1, b"a queued request")
        await streams.opened.wait()
        for _ in range(12):
            assert 7 not in await gateway.kinds_until_pong(), "GOAWAY"
        streams.made[0].transport.send((b"its answer",))
        while (frame := await gateway.read())[0] != 0:
            assert frame[0] != 7, f"GOAWAY {frame[2]!r}"
        assert frame[2].endswith(b"its answer")
        await gateway.close()
        await streams.made[0].closed.wait()


async def test_the_streams_of_a_gateway_that_answers_no_ping_any_more_are_closed() -> None:
    streams = Recorders(keep)
    limits = Limits(keepalive_s=0.2, keepalive_timeout_s=0.2)
    async with serving(streams, limits=limits) as (_, port), asyncio.timeout(20):
        gateway = await Frames.connect(port)
        gateway.open(1, b"a")
        await streams.opened.wait()
        for _ in range(3):
            while (frame := await gateway.read())[:2] != (6, 0):
                assert frame[0] != 7, f"GOAWAY {frame[2]!r}"
            assert not streams.made[0].closes
            gateway.writer.write(gateway.frame(6, 1, 0, frame[2]))
        await streams.made[0].closed.wait()
        await gateway.close()
    assert streams.made[0].closes == 1


async def test_A24_resets_in_the_middle_of_an_answer_are_silent() -> None:
    streams = Recorders(lambda stream, _: stream.transport.send((bytes(200_000), bytes(200_000))))
    async with serving(streams) as (server, port), asyncio.timeout(20):
        gateway = await Frames.connect(port)
        for stream_id in range(1, 401, 2):
            gateway.open(stream_id, b"a")
            while (await gateway.read())[0] != 0:
                pass
            gateway.reset(stream_id)
        await gateway.close()
        while server.streams_inflight:  # noqa: ASYNC110 - tasks of the server are awaited
            await asyncio.sleep(0)
    assert [stream.closes for stream in streams.made] == [1] * len(streams.made)


async def test_A24_a_reset_after_a_half_close_is_a_reset_and_is_sent_no_status(monkeypatch) -> None:
    monkeypatch.setattr("epp.edge.grpcio._RESET_S", 10.0)
    streams = Recorders()
    async with serving(streams) as (server, port), asyncio.timeout(9):
        gateway = await Frames.connect(port)
        gateway.open(1, b"a")
        while (await gateway.read())[0] != 0:
            pass
        gateway.half_close(1)
        await streams.made[0].closed.wait()
        assert await gateway.kinds_until_pong() & {1} == set()
        gateway.reset(1)
        while server.streams_inflight:
            assert await gateway.kinds_until_pong() & {1} == set()
        assert await gateway.kinds_until_pong() & {1} == set(), "trailers for a reset stream"
        await gateway.close()
    assert streams.made[0].closes == 1


async def test_after_the_drain_no_task_is_left() -> None:
    streams = Recorders()
    async with serving(streams) as (server, port), asyncio.timeout(20):
        gateway = await Frames.connect(port)
        for stream_id in range(1, 41, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < 20:
            await gateway.read()
        for stream_id in range(1, 21, 2):
            gateway.half_close(stream_id)
        while sum(stream.closes for stream in streams.made) < 10:
            await gateway.kinds_until_pong()
        await server.drain(0)
        assert [stream.closes for stream in streams.made] == [1] * 20
        assert [task for task in asyncio.all_tasks() if PROCESS_PATH in task.get_name()] == []
        await gateway.close()


async def test_a_lost_connection_closes_all_its_streams_once() -> None:
    streams = Recorders()
    async with serving(streams) as (_, port), asyncio.timeout(20):
        gateway = await Frames.connect(port)
        for stream_id in range(1, 41, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < 20:
            await gateway.read()
        gateway.writer.transport.abort()
        for stream in streams.made:
            await stream.closed.wait()
    assert [stream.closes for stream in streams.made] == [1] * 20


@pytest.mark.parametrize("half_close_first", [False, True])
async def test_O01_A24_five_thousand_reset_streams_leave_nothing_behind(
    half_close_first: bool,
) -> None:
    alive: weakref.WeakSet[Recorder] = weakref.WeakSet()
    closes: list[int] = []

    class Counted(Recorder):
        def on_close(self) -> None:
            super().on_close()
            closes.append(self.closes)

    def counted(transport: Transport) -> Recorder:
        stream = Counted(transport, echo)
        alive.add(stream)
        return stream

    streams_count, wave = 5_000, 50
    async with serving(counted) as (server, port), asyncio.timeout(60):
        gateway = await Frames.connect(port)
        before_kib = _resident_kib()
        for first in range(1, 2 * streams_count, 2 * wave):
            stream_ids = range(first, first + 2 * wave, 2)
            for stream_id in stream_ids:
                gateway.open(stream_id, b"a")
            answers = 0
            while answers < wave:
                answers += (await gateway.read())[0] == 0
            for stream_id in stream_ids:
                if half_close_first:
                    gateway.half_close(stream_id)
                gateway.reset(stream_id)
        await gateway.close()
        while server.streams_inflight:  # noqa: ASYNC110 - tasks of the server are awaited
            await asyncio.sleep(0)
        print(f"{streams_count} reset streams: {_resident_kib() - before_kib:+} KiB resident")
    gc.collect()
    assert closes == [1] * streams_count
    assert len(alive) == 0
    assert readers() == []


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
