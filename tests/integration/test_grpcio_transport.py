"""What only the grpc.aio transport can get wrong: resets that it takes for half-closes, tasks and
streams that it leaves behind, its event loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable

import grpc
import pytest

from epp.edge import grpcio
from tests.integration.transports import (
    GRPCIO,
    HEADERS,
    PROCESS_PATH,
    Census,
    Gateway,
    Recorders,
    no_log_noise,
    readers,
    resident_kib,
    serving,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")  # O-10: grpc.aio belongs to one loop
__all__ = ["no_log_noise"]
BLOCKED_S = 0.03
"""Long enough for gRPC's threads to do what they have to."""


async def test_A24_a_reset_after_a_half_close_is_a_reset_and_is_sent_no_status(monkeypatch) -> None:
    monkeypatch.setattr("epp.edge.grpcio._RESET_S", 10.0)
    streams = Recorders()
    async with serving(GRPCIO, streams) as (server, port), asyncio.timeout(9):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        assert await gateway.answer(1) == b"a"
        gateway.half_close(1)
        await streams.made[0].closed.wait()
        assert await _kinds_until_pong(gateway) & {HEADERS} == set()
        gateway.reset(1)
        while server.streams_inflight:
            assert await _kinds_until_pong(gateway) & {HEADERS} == set()
        assert await _kinds_until_pong(gateway) & {HEADERS} == set(), "trailers for a reset stream"
        await gateway.close()
    assert streams.made[0].closes == 1


async def _kinds_until_pong(gateway: Gateway) -> set[int]:
    return {got.kind for got in await gateway.frames_until_pong()}


async def test_after_the_drain_no_task_is_left() -> None:
    streams = Recorders()
    async with serving(GRPCIO, streams) as (server, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        for stream_id in range(1, 41, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < 20:
            await gateway.read()
        for stream_id in range(1, 21, 2):
            gateway.half_close(stream_id)
        while sum(stream.closes for stream in streams.made) < 10:
            await gateway.frames_until_pong()
        await server.drain(0)
        assert [stream.closes for stream in streams.made] == [1] * 20
        assert [task for task in asyncio.all_tasks() if PROCESS_PATH in task.get_name()] == []
        await gateway.close()


@pytest.mark.parametrize("begun", [0, 1, 20])
@pytest.mark.parametrize("blocked", [False, True])
async def test_calls_that_arrive_while_the_server_stops_are_over_when_drain_returns(
    begun: int, blocked: bool
) -> None:
    """grpc.aio begins a call that it has taken in before it stops, and takes in no more."""
    streams = Recorders()
    async with serving(GRPCIO, streams) as (server, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        await gateway.frames_until_pong()
        for stream_id in range(1, 401, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < begun:  # noqa: ASYNC110 - each turn of the loop begins some
            await asyncio.sleep(0)
        if blocked:
            time.sleep(BLOCKED_S)  # noqa: ASYNC251 - gRPC's threads take one in, the loop not yet
            # And all that the stop sets off in them comes to the loop at once.
            asyncio.get_running_loop().call_soon(time.sleep, BLOCKED_S)
        await server.drain(0)
        closes = [stream.closes for stream in streams.made]
        assert closes == [1] * len(closes)
        assert len(closes) >= begun + blocked
        assert server.streams_inflight == 0
        for _ in range(100):
            await asyncio.sleep(0)  # what was still to come would come now
        assert [stream.closes for stream in streams.made] == closes
        gateway.writer.transport.abort()


@pytest.mark.parametrize("half_close", [False, True])
async def test_O01_A24_five_thousand_reset_streams_leave_nothing_behind(
    half_close: bool, record_property: Callable[[str, object], None]
) -> None:
    streams, count = Census(), 5_000
    async with serving(GRPCIO, streams) as (server, port), asyncio.timeout(60):
        gateway = await Gateway.connect(port)
        before_kib = resident_kib()
        async for _ in gateway.reset_waves(count, 50, half_close=half_close):
            pass
        await gateway.close()
        while server.streams_inflight:  # noqa: ASYNC110 - tasks of the server are awaited
            await asyncio.sleep(0)
        record_property("rss_growth_kib", resident_kib() - before_kib)
    gc.collect()
    assert streams.closes == [1] * count
    assert len(streams.alive) == 0
    assert readers() == []


ON_UVLOOP = """
import asyncio, uvloop
from grpc import aio
from epp.edge.grpcio import PROCESS_PATH, GrpcioServer
from epp.edge.health import Health

class Echo:
    def __init__(self, transport): self.transport = transport
    def on_message(self, data): self.transport.send((data,))
    def on_close(self): print("closed")

async def main():
    server = GrpcioServer(new_stream=Echo, health=Health(), host="127.0.0.1", port=0)
    port, _ = await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(PROCESS_PATH)()
        for n in range(100):
            await call.write(b"%d" % n)
            assert await call.read() == b"%d" % n
        await call.done_writing()
        assert await call.read() is aio.EOF
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    await server.drain(5)

uvloop.run(main())
"""


async def test_it_works_on_uvloop() -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", ON_UVLOOP],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


async def test_a_call_whose_task_begins_as_the_server_stops_is_given_no_stream() -> None:
    """grpc.aio takes a call in and runs its handler later; a stream made then would be told of its
    end after `drain` had returned."""
    streams = Recorders()
    method = grpcio._Method(streams, limits=grpcio.Limits(), calls_max=9)
    codes: list[grpc.StatusCode] = []

    class Context:
        def set_code(self, code: grpc.StatusCode) -> None:
            codes.append(code)

        def set_details(self, details: str) -> None:
            assert details

    await method.close()
    await method.handle(None, Context())
    assert (streams.made, codes) == ([], [grpc.StatusCode.UNAVAILABLE])
