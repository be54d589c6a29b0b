"""The grpc.aio transport on loopback, with grpc.aio clients: streams, limits, failures, ports."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys

import grpc
import pytest
from grpc import aio

from epp.core.errors import EppError
from epp.core.streams import Transport
from epp.edge.grpcio import GrpcioServer, Limits
from epp.edge.health import Health
from tests.integration.grpc_loopback import (
    HOST,
    NOT_SERVING,
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


async def test_ten_thousand_messages_are_answered_in_order() -> None:
    streams = Recorders()
    messages = [b"%d" % n for n in range(10_000)]
    async with serving(streams) as (_, port), connected(port) as channel:
        call = process(channel)

        async def write() -> None:
            for message in messages:
                await call.write(message)
            await call.done_writing()

        writer = asyncio.create_task(write())
        answers = [answer async for answer in call]
        await writer
        assert await call.code() is grpc.StatusCode.OK
    assert answers == messages == streams.made[0].received
    assert streams.made[0].closes == 1


async def test_several_answers_to_one_message_stay_together_and_in_order() -> None:
    streams = Recorders(
        lambda stream, data: stream.transport.send([data + b"%d" % n for n in range(5)])
    )
    async with serving(streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        await call.write(b"b")
        answers = [await call.read() for _ in range(10)]
        await reset(call)
    assert answers == [b"a0", b"a1", b"a2", b"a3", b"a4", b"b0", b"b1", b"b2", b"b3", b"b4"]


async def test_an_answer_may_come_later_from_another_callback() -> None:
    streams = Recorders(keep)
    async with serving(streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"wait")
        await streams.opened.wait()
        stream = streams.made[0]
        await stream.got.wait()
        loop = asyncio.get_running_loop()
        loop.call_later(0.001, stream.transport.send, (b"late", b"later"))
        assert [await call.read(), await call.read()] == [b"late", b"later"]
        loop.call_soon(stream.transport.send, (b"latest",))
        assert await call.read() == b"latest"
        await reset(call)


async def test_finish_from_outside_ends_the_stream_after_what_was_sent() -> None:
    streams = Recorders(keep)
    async with serving(streams) as (server, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"wait")
        await streams.opened.wait()
        stream = streams.made[0]
        await stream.got.wait()
        stream.transport.send((b"x" * 1_000_000, b"last"))
        stream.transport.finish(14, "gone")
        stream.transport.send((b"never",))
        stream.transport.finish(0)
        assert [len(await call.read()), await call.read()] == [1_000_000, b"last"]
        assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAVAILABLE, "gone")
        await stream.closed.wait()
        stream.transport.send((b"after the end",))
        stream.transport.finish(0)
        assert stream.closes == 1
        assert server.streams_inflight == 0
    gc.collect()  # an exception that nobody took is logged now


async def test_a_stream_may_finish_while_it_handles_a_message_and_gets_no_more() -> None:
    def refuse(stream: Recorder, data: bytes) -> None:
        stream.transport.send([bytes(1 << 20)] * 8)  # more than the client lets in unread
        stream.transport.finish()

    streams = Recorders(refuse)
    async with serving(streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        await call.read()
        await call.write(b"b")
        for _ in range(7):
            assert await call.read() == bytes(1 << 20)
        assert await call.read() is aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await streams.made[0].closed.wait()
    assert [(s.received, s.closes) for s in streams.made] == [([b"a"], 1)]


async def test_a_factory_may_refuse_the_stream_at_once() -> None:
    def refuse(transport: Transport) -> Recorder:
        transport.send((b"why",))
        transport.finish(14, "not yet")
        return Recorder(transport, echo)

    async with serving(refuse) as (_, port), connected(port) as channel:
        call = process(channel)
        assert await call.read() == b"why"
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_half_close_ends_the_stream_with_what_was_sent() -> None:
    streams = Recorders()
    async with serving(streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        await call.done_writing()
        assert [answer async for answer in call] == [b"a"]
        assert await call.code() is grpc.StatusCode.OK
        assert streams.made[0].closes == 1


async def _opened(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await call.wait_for_connection()
    await streams.opened.wait()


async def _asked(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await call.write(b"a")
    await streams.opened.wait()
    await streams.made[0].got.wait()


async def _answered(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await _asked(call, streams)
    streams.made[0].transport.send((b"b",))
    await call.read()


async def _sent(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await _asked(call, streams)
    streams.made[0].transport.send((b"b",))


async def _stuck(call: aio.StreamStreamCall, streams: Recorders) -> None:
    """The answer is longer than what the client lets in unread."""
    await _asked(call, streams)
    streams.made[0].transport.send([b"b" * 1_000_000] * 8)
    await call.read()
    await call.write(b"a message that is read and one that is not")
    await call.write(b"a message that is read and one that is not")


async def _half_closed(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await _asked(call, streams)
    await call.done_writing()


async def _finished(call: aio.StreamStreamCall, streams: Recorders) -> None:
    await _asked(call, streams)
    streams.made[0].transport.send([b"b" * 1_000_000] * 8)
    streams.made[0].transport.finish()
    await call.read()


@pytest.mark.parametrize(
    "until", [_opened, _asked, _sent, _answered, _stuck, _half_closed, _finished]
)
async def test_A24_a_reset_at_any_point_closes_the_stream_exactly_once_and_silently(until) -> None:
    streams = Recorders(keep)
    limits = Limits(outbox_bytes_max=1 << 20)  # a stuck stream is also one that is not read from
    async with serving(streams, limits=limits) as (server, port), connected(port) as channel:
        call = process(channel)
        await until(call, streams)
        await reset(call)
        await streams.made[0].closed.wait()
        other = process(channel)
        await other.write(b"the connection lives on")
        await reset(other)
    assert [stream.closes for stream in streams.made] == [1] * len(streams.made)
    assert server.streams_inflight == 0
    assert readers() == []


def _explode(stream: Recorder, data: bytes) -> None:
    if data == b"boom":
        raise ZeroDivisionError("a bug")
    stream.transport.send((data,))


async def test_a_bug_in_one_stream_is_logged_once_and_ends_that_stream_only(caplog) -> None:
    streams = Recorders(_explode)
    async with serving(streams) as (_, port), connected(port) as channel:
        bystander = process(channel)
        await bystander.write(b"1")
        assert await bystander.read() == b"1"
        call = process(channel)
        await call.write(b"boom")
        assert await call.code() is grpc.StatusCode.INTERNAL
        await bystander.write(b"2")
        assert await bystander.read() == b"2"
        await streams.made[1].closed.wait()
        await reset(bystander)
    assert [stream.closes for stream in streams.made] == [1, 1]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    caplog.clear()


async def test_a_bug_while_opening_or_closing_ends_that_stream_only(caplog) -> None:
    class Careless(Recorder):
        def on_close(self) -> None:
            super().on_close()
            raise ZeroDivisionError

    made: list[Careless] = []

    def careless(transport: Transport) -> Recorder:
        if made:
            raise ZeroDivisionError
        made.append(Careless(transport, echo))
        return made[0]

    async with serving(careless) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        assert await call.read() == b"a"
        assert await process(channel).code() is grpc.StatusCode.INTERNAL
        await reset(call)
        await made[0].closed.wait()
        assert await process(channel).code() is grpc.StatusCode.INTERNAL
    assert made[0].closes == 1
    logged = [(r.name, r.exc_info[0]) for r in caplog.records if r.exc_info]
    assert logged == [("epp.edge.grpcio", ZeroDivisionError)] * 3
    caplog.clear()


async def test_O09_a_stream_too_many_is_refused_at_once_and_a_place_is_free_again_later() -> None:
    streams = Recorders()
    limits = Limits(streams_max=2)
    async with serving(streams, limits=limits) as (server, port), connected(port) as channel:
        calls = []
        for _ in range(2):
            calls.append(process(channel))
            await calls[-1].write(b"a")
            await calls[-1].read()
        assert server.streams_inflight == 2
        refused = process(channel)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 streams" in await refused.details()
        await check(channel)  # health has places of its own
        await reset(calls[0])
        await streams.made[0].closed.wait()
        while server.streams_inflight == 2:
            await check(channel)
        late = process(channel)
        await late.write(b"b")
        assert await late.read() == b"b"
        await reset(late)
        await reset(calls[1])
    assert len(streams.made) == 3


async def test_a_message_over_the_limit_ends_its_stream_only() -> None:
    streams = Recorders()
    limits = Limits(message_bytes_max=1_000)
    async with serving(streams, limits=limits) as (_, port), connected(port) as channel:
        bystander, call = process(channel), process(channel)
        await bystander.write(b"1" * 1_000)
        assert len(await bystander.read()) == 1_000
        await call.write(b"x" * 1_001)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await bystander.write(b"2")
        assert await bystander.read() == b"2"
        await reset(bystander)
        for stream in streams.made:
            await stream.closed.wait()
    assert sorted((len(s.received), s.closes) for s in streams.made) == [(0, 1), (2, 1)]


async def test_an_answer_over_the_limit_ends_its_stream_and_is_not_sent() -> None:
    streams = Recorders(lambda stream, data: stream.transport.send((b"y", data * 2, b"z")))
    limits = Limits(message_bytes_max=1_000)
    async with serving(streams, limits=limits) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"x" * 600)
        assert await call.read() == b"y"
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_default_limits_take_a_buffered_body_of_64_mib_both_ways() -> None:
    streams = Recorders()
    body = bytes(64 << 20)
    async with (
        serving(streams) as (_, port),
        connected(port, max_receive_message_length=-1) as channel,
    ):
        call = process(channel)
        await call.write(body)
        assert await call.read() == body
        await reset(call)


async def test_a_peer_that_does_not_read_is_not_read_from_either() -> None:
    answer = bytes(1 << 20)
    streams = Recorders(lambda stream, data: stream.transport.send((data + answer,)))
    limits = Limits(outbox_bytes_max=3 << 20)
    async with (
        serving(streams, limits=limits) as (_, port),
        connected(port) as channel,
        connected(port, http2__bdp_probe=0) as slow,  # else its window grows to megabytes
    ):
        call = process(slow)
        for n in range(50):
            await call.write(b"%02d" % n)
        while not streams.made or len(streams.made[0].received) < 3:
            await check(channel)
        other = process(channel)
        await other.write(b"")
        await other.read()  # another stream is not held up,
        for _ in range(100):  # and much later
            await check(channel)
        assert 3 <= len(streams.made[0].received) <= 5
        assert [(await call.read())[:2] for _ in range(50)] == [b"%02d" % n for n in range(50)]
        await reset(call)
        await reset(other)


async def test_anything_else_is_unimplemented() -> None:
    async with serving(Recorders()) as (_, port), connected(port) as channel:
        path = "/envoy.service.ext_proc.v3.ExternalProcessor/Other"
        assert await channel.stream_stream(path)().code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Other/Check")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_port_serves_health_and_nothing_else() -> None:
    server = GrpcioServer(new_stream=Recorders(), health=Health(), host=HOST, port=0, health_port=0)
    port, health_port = await server.start()
    assert health_port not in (None, port)
    async with connected(port) as channel, connected(health_port) as probes:
        assert await check(channel) == await check(probes) == NOT_SERVING
        assert await process(probes).code() is grpc.StatusCode.UNIMPLEMENTED
    await server.drain(0)


async def test_two_servers_live_side_by_side_on_one_loop() -> None:
    one, two = Recorders(), Recorders()
    async with (
        serving(one) as (_, port),
        serving(two) as (_, other_port),
        connected(port) as channel,
        connected(other_port) as other,
    ):
        for call in process(channel), process(other):
            await call.write(b"a")
            assert await call.read() == b"a"
            await reset(call)
    assert [len(one.made), len(two.made)] == [1, 1]


@pytest.mark.parametrize("which", ["port", "health_port"])
async def test_a_port_in_use_is_named_with_the_remedy(which: str) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        ports = {"port": 0, "health_port": 0, which: taken.getsockname()[1]}
        server = GrpcioServer(new_stream=Recorders(), health=Health(), host=HOST, **ports)
        with pytest.raises(EppError, match=rf"{HOST}:{ports[which]}: .*in use.*another port"):
            await server.start()


async def test_two_processes_cannot_share_a_port_by_mistake() -> None:
    async with serving(Recorders()) as (_, port):
        second = GrpcioServer(new_stream=Recorders(), health=Health(), host=HOST, port=port)
        with pytest.raises(EppError, match=f"{HOST}:{port}"):
            await second.start()


async def test_a_host_that_is_not_ours_is_named() -> None:
    server = GrpcioServer(new_stream=Recorders(), health=Health(), host="192.0.2.1", port=0)
    with pytest.raises(EppError, match=r"192\.0\.2\.1:0: .*[Aa]ssign.*host"):
        await server.start()


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
