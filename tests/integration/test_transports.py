"""What both transports do alike, each with grpc.aio and raw clients."""

from __future__ import annotations

import asyncio
import gc
import socket

import grpc
import pytest
from grpc import aio

from epp.core.errors import EppError
from epp.core.streams import Transport
from epp.edge.health import WATCH_PATH, Health
from tests.integration.transports import (
    ACK,
    DATA,
    FAST,
    GOAWAY,
    GRPCIO,
    HOST,
    NOT_SERVING,
    PING,
    SERVING,
    Gateway,
    Kind,
    Recorder,
    Recorders,
    check,
    connected,
    echo,
    frame,
    keep,
    no_log_noise,
    process,
    readers,
    reset,
    serving,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")  # O-10: grpc.aio belongs to one loop
__all__ = ["no_log_noise"]


@pytest.fixture(params=[GRPCIO, FAST], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


# -- messages ------------------------------------------------------------------------------


async def test_ten_thousand_messages_are_answered_in_order(kind: Kind) -> None:
    streams = Recorders()
    messages = [b"%d" % n for n in range(10_000)]
    async with serving(kind, streams) as (_, port), connected(port) as channel:
        call = process(channel)
        writer = asyncio.create_task(_write(call, messages, half_close=True))
        answers = [answer async for answer in call]
        await writer
        assert await call.code() is grpc.StatusCode.OK
    assert answers == messages == streams.made[0].received
    assert streams.made[0].closes == 1


async def test_several_answers_to_one_message_stay_together_and_in_order(kind: Kind) -> None:
    streams = Recorders(
        lambda stream, data: stream.transport.send([data + b"%d" % n for n in range(5)])
    )
    async with serving(kind, streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        await call.write(b"b")
        answers = [await call.read() for _ in range(10)]
        await reset(call)
    assert answers == [b"a0", b"a1", b"a2", b"a3", b"a4", b"b0", b"b1", b"b2", b"b3", b"b4"]


async def test_an_answer_may_come_later_from_another_callback(kind: Kind) -> None:
    streams = Recorders(keep)
    async with serving(kind, streams) as (_, port), connected(port) as channel:
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


async def test_a_message_to_one_stream_may_be_answered_on_another_connection(kind: Kind) -> None:
    waiting: list[Recorder] = []

    def release(stream: Recorder, data: bytes) -> None:
        if data == b"wait":
            waiting.append(stream)
        else:
            waiting.pop().transport.send((b"your turn",))

    streams = Recorders(release)
    async with (
        serving(kind, streams) as (_, port),
        connected(port) as channel,
        connected(port) as other,
    ):
        queued = process(channel)
        await queued.write(b"wait")
        await streams.opened.wait()
        await streams.made[0].got.wait()
        ending = process(other)
        await ending.write(b"end")
        assert await queued.read() == b"your turn"
        await reset(queued)
        await reset(ending)


async def test_the_default_limits_take_a_buffered_body_of_64_mib_both_ways(kind: Kind) -> None:
    streams = Recorders()
    body = bytes(64 << 20)
    async with (
        serving(kind, streams) as (_, port),
        connected(port, max_receive_message_length=-1) as channel,
    ):
        call = process(channel)
        await call.write(body)
        assert await call.read() == body
        await reset(call)


# -- ends ----------------------------------------------------------------------------------


async def test_finish_from_outside_ends_the_stream_after_what_was_sent(kind: Kind) -> None:
    streams = Recorders(keep)
    async with serving(kind, streams) as (server, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"wait")
        await streams.opened.wait()
        stream = streams.made[0]
        await stream.got.wait()
        stream.transport.send((b"x" * 1_000_000, b"last"))
        stream.transport.finish(14, "gone: ü 100 %\n")
        stream.transport.send((b"never",))
        stream.transport.finish(0)
        assert [len(await call.read()), await call.read()] == [1_000_000, b"last"]
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "gone: ü 100 %\n"
        await stream.closed.wait()
        stream.transport.send((b"after the end",))
        stream.transport.finish(0)
        assert stream.closes == 1
        assert server.streams_inflight == 0
    gc.collect()  # an exception that nobody took is logged now


async def test_a_stream_may_finish_while_it_handles_a_message_and_gets_no_more(kind: Kind) -> None:
    def refuse(stream: Recorder, data: bytes) -> None:
        stream.transport.send([bytes(1 << 20)] * 8)  # more than the client lets in unread
        stream.transport.finish()

    streams = Recorders(refuse)
    async with serving(kind, streams) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        await streams.opened.wait()
        await streams.made[0].got.wait()
        await call.write(b"b")  # before a read lets the end of the call in, after which it may not
        for _ in range(8):
            assert await call.read() == bytes(1 << 20)
        assert await call.read() is aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await streams.made[0].closed.wait()
    assert [(s.received, s.closes) for s in streams.made] == [([b"a"], 1)]


async def test_a_factory_may_refuse_the_stream_at_once(kind: Kind) -> None:
    def refuse(transport: Transport) -> Recorder:
        transport.send((b"why",))
        transport.finish(14, "not yet")
        return Recorder(transport, echo)

    async with serving(kind, refuse) as (_, port), connected(port) as channel:
        call = process(channel)
        assert await call.read() == b"why"
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_half_close_ends_the_stream_with_what_was_sent(kind: Kind) -> None:
    streams = Recorders()
    async with serving(kind, streams) as (_, port), connected(port) as channel:
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
async def test_A24_a_reset_at_any_point_closes_the_stream_exactly_once_and_silently(
    kind: Kind, until
) -> None:
    streams = Recorders(keep)
    limits = kind.limits(outbox_bytes_max=1 << 20)  # a stuck stream is also one not read from
    async with serving(kind, streams, limits=limits) as (server, port), connected(port) as channel:
        call = process(channel)
        await until(call, streams)
        call.cancel()
        # The end of a call that was half-closed may have come first.
        faster = grpc.StatusCode.OK if until is _half_closed else None
        assert await call.code() in {grpc.StatusCode.CANCELLED, faster}
        await streams.made[0].closed.wait()
        other = process(channel)
        await other.write(b"the connection lives on")
        while len(streams.made) < 2:  # noqa: ASYNC110 - bounded by `connected`
            await asyncio.sleep(0)
        await streams.made[1].got.wait()
        await reset(other)
    assert [stream.closes for stream in streams.made] == [1] * len(streams.made)
    assert server.streams_inflight == 0
    assert readers() == []


async def test_A24_resets_in_the_middle_of_an_answer_are_silent(kind: Kind) -> None:
    streams = Recorders(lambda stream, _: stream.transport.send((bytes(200_000), bytes(200_000))))
    async with serving(kind, streams) as (server, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        for stream_id in range(1, 401, 2):
            gateway.open(stream_id, b"a")
            if stream_id % 4 == 1:
                while (await gateway.until(DATA)).stream_id != stream_id:
                    pass
            gateway.reset(stream_id)
        gateway.open(401, b"a")
        while (await gateway.until(DATA)).stream_id != 401:  # then all others were seen
            pass
        await gateway.close()
        while server.streams_inflight:  # noqa: ASYNC110 - tasks of the server are awaited
            await asyncio.sleep(0)
    assert [stream.closes for stream in streams.made] == [1] * len(streams.made)
    assert len(streams.made) >= 101  # grpcio opens none for a reset that comes at once


async def test_a_lost_connection_closes_all_its_streams_once(kind: Kind) -> None:
    streams = Recorders()
    async with serving(kind, streams) as (_, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        for stream_id in range(1, 41, 2):
            gateway.open(stream_id, b"a")
        while len(streams.made) < 20:
            await gateway.read()
        gateway.writer.transport.abort()
        for stream in streams.made:
            await stream.closed.wait()
    assert [stream.closes for stream in streams.made] == [1] * 20


# -- bugs of ours --------------------------------------------------------------------------


def _explode(stream: Recorder, data: bytes) -> None:
    if data == b"boom":
        raise ZeroDivisionError("a bug")
    stream.transport.send((data,))


async def test_a_bug_in_one_stream_is_logged_once_and_ends_that_stream_only(kind, caplog) -> None:
    streams = Recorders(_explode)
    async with serving(kind, streams) as (_, port), connected(port) as channel:
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


async def test_a_bug_while_opening_or_closing_ends_that_stream_only(kind: Kind, caplog) -> None:
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

    async with serving(kind, careless) as (server, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"a")
        assert await call.read() == b"a"
        assert await process(channel).code() is grpc.StatusCode.INTERNAL
        await reset(call)
        await made[0].closed.wait()
        assert await process(channel).code() is grpc.StatusCode.INTERNAL
    assert made[0].closes == 1
    assert server.streams_inflight == 0
    logged = [(r.name, r.exc_info[0]) for r in caplog.records if r.exc_info]
    assert logged == [(kind.log, ZeroDivisionError)] * 3
    caplog.clear()


# -- limits --------------------------------------------------------------------------------


async def test_O09_a_stream_too_many_is_refused_at_once_and_a_place_is_free_again_later(
    kind: Kind,
) -> None:
    streams = Recorders()
    limits = kind.limits(streams_max=2)
    async with (
        serving(kind, streams, limits=limits) as (server, port),
        connected(port) as channel,
        connected(port) as other,  # the limit is one of all connections together
    ):
        calls = []
        for one in (channel, other):
            calls.append(process(one))
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


async def test_a_message_over_the_limit_ends_its_stream_only(kind: Kind) -> None:
    streams = Recorders()
    limits = kind.limits(message_bytes_max=1_000)
    async with serving(kind, streams, limits=limits) as (_, port), connected(port) as channel:
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


async def test_an_answer_over_the_limit_ends_its_stream_and_is_not_sent(kind: Kind) -> None:
    streams = Recorders(lambda stream, data: stream.transport.send((b"y", data * 2, b"z")))
    limits = kind.limits(message_bytes_max=1_000)
    async with serving(kind, streams, limits=limits) as (_, port), connected(port) as channel:
        call = process(channel)
        await call.write(b"x" * 600)
        assert await call.read() == b"y"
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_peer_that_does_not_read_is_not_read_from_either(kind: Kind) -> None:
    answer, filler = bytes(1 << 20), bytes(300_000)
    streams = Recorders(lambda stream, data: stream.transport.send((data[:2] + answer,)))
    limits = kind.limits(outbox_bytes_max=3 << 20)
    async with (
        serving(kind, streams, limits=limits) as (_, port),
        connected(port) as channel,
        connected(port, http2__bdp_probe=0) as slow,  # else its window grows to megabytes
    ):
        call = process(slow)
        writer = asyncio.create_task(_write(call, [b"%02d" % n + filler for n in range(50)]))
        while not streams.made or len(streams.made[0].received) < 3:
            await check(channel)
        other = process(channel)
        await other.write(b"")
        await other.read()  # another stream is not held up,
        for _ in range(100):  # and much later
            await check(channel)
        most = 5 if kind is GRPCIO else 8  # fast handles all that one read of the socket gave
        assert 3 <= len(streams.made[0].received) <= most
        assert [(await call.read())[:2] for _ in range(50)] == [b"%02d" % n for n in range(50)]
        await writer
        await reset(call)
        await reset(other)


async def _write(
    call: aio.StreamStreamCall, messages: list[bytes], *, half_close: bool = False
) -> None:
    for message in messages:
        await call.write(message)
    if half_close:
        await call.done_writing()


# -- methods and addresses -----------------------------------------------------------------


async def test_anything_else_is_unimplemented(kind: Kind) -> None:
    async with serving(kind, Recorders()) as (_, port), connected(port) as channel:
        path = "/envoy.service.ext_proc.v3.ExternalProcessor/Other"
        assert await channel.stream_stream(path)().code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Other/Check")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_port_serves_health_and_nothing_else(kind: Kind) -> None:
    server = kind.server(new_stream=Recorders(), health=Health(), host=HOST, port=0, health_port=0)
    port, health_port = await server.start()
    assert health_port not in (None, port)
    async with connected(port) as channel, connected(health_port) as probes:
        assert await check(channel) == await check(probes) == NOT_SERVING
        assert await process(probes).code() is grpc.StatusCode.UNIMPLEMENTED
    await server.drain(0)


async def test_two_servers_live_side_by_side_on_one_loop(kind: Kind) -> None:
    one, two = Recorders(), Recorders()
    async with (
        serving(kind, one) as (_, port),
        serving(kind, two) as (_, other_port),
        connected(port) as channel,
        connected(other_port) as other,
    ):
        for call in process(channel), process(other):
            await call.write(b"a")
            assert await call.read() == b"a"
            await reset(call)
    assert [len(one.made), len(two.made)] == [1, 1]


@pytest.mark.parametrize("which", ["port", "health_port"])
async def test_a_port_in_use_is_named_with_the_remedy(kind: Kind, which: str) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        ports = {"port": 0, "health_port": 0, which: taken.getsockname()[1]}
        server = kind.server(new_stream=Recorders(), health=Health(), host=HOST, **ports)
        with pytest.raises(EppError, match=rf"{HOST}:{ports[which]}: .*in use.*another port"):
            await server.start()


async def test_two_processes_cannot_share_a_port_by_mistake(kind: Kind) -> None:
    async with serving(kind, Recorders()) as (_, port):
        second = kind.server(new_stream=Recorders(), health=Health(), host=HOST, port=port)
        with pytest.raises(EppError, match=f"{HOST}:{port}"):
            await second.start()


async def test_a_host_that_is_not_ours_is_named(kind: Kind) -> None:
    server = kind.server(new_stream=Recorders(), health=Health(), host="192.0.2.1", port=0)
    with pytest.raises(EppError, match=r"192\.0\.2\.1:0: .*[Aa]ssign.*host"):
        await server.start()


@pytest.mark.parametrize(
    ("host", "reached", "not_reached"),
    [
        ("0.0.0.0", ("127.0.0.1", "::1"), ()),
        ("::", ("127.0.0.1", "::1"), ()),
        ("127.0.0.1", ("127.0.0.1",), ("::1",)),
        ("::1", ("::1",), ("127.0.0.1",)),
        ("localhost", ("127.0.0.1",), ()),
    ],
)
async def test_a_host_of_either_family_or_both(kind: Kind, host, reached, not_reached) -> None:
    streams = Recorders()
    server = kind.server(new_stream=streams, health=Health(), host=host, port=0)
    port, _ = await server.start()
    for address in reached:
        gateway = await Gateway.connect(port, host=address)
        gateway.open(1, b"hello")
        assert await gateway.answer(1) == b"hello"
        await gateway.close()
    for address in not_reached:
        with pytest.raises(OSError, match="Connect call failed"):
            await Gateway.connect(port, host=address)
    await server.drain(0)


# -- drain ---------------------------------------------------------------------------------


async def test_M04_a_stream_open_at_sigterm_goes_on_and_drain_returns_when_it_ends(kind) -> None:
    streams, health = Recorders(), Health()
    health.set_ready(True)
    server = kind.server(new_stream=streams, health=health, host=HOST, port=0, health_port=0)
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


async def test_M04_new_streams_are_served_while_gateways_take_notice(kind: Kind) -> None:
    streams, health = Recorders(), Health()
    health.set_ready(True)
    async with serving(kind, streams, health=health) as (server, port), connected(port) as channel:
        watch = channel.unary_stream(WATCH_PATH)(b"")
        assert await watch.read() == SERVING
        drain = asyncio.create_task(server.drain(25, notice_s=1.0))
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


async def test_M05_idle_streams_and_watches_do_not_outlast_the_grace(kind: Kind) -> None:
    streams = Recorders()
    async with serving(kind, streams) as (server, port), connected(port) as channel:
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


async def test_M05_a_watch_alone_does_not_hold_the_drain(kind: Kind) -> None:
    async with serving(kind, Recorders()) as (server, port), connected(port) as channel:
        watches = [channel.unary_stream(WATCH_PATH)(b"") for _ in range(3)]
        for watch in watches:
            assert await watch.read() == NOT_SERVING
        async with asyncio.timeout(5):
            await server.drain(25)


# -- keepalive -----------------------------------------------------------------------------


async def test_a_gateway_may_ping_as_often_as_it_likes(kind: Kind) -> None:
    streams = Recorders(keep)
    async with serving(kind, streams) as (_, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a queued request")
        await streams.opened.wait()
        for _ in range(12):
            assert GOAWAY not in {got.kind for got in await gateway.frames_until_pong()}
        streams.made[0].transport.send((b"its answer",))
        assert (await gateway.until(DATA, never=GOAWAY)).payload.endswith(b"its answer")
        await gateway.close()
        await streams.made[0].closed.wait()


async def test_the_streams_of_a_gateway_that_answers_no_ping_any_more_are_closed(kind) -> None:
    streams = Recorders(keep)
    limits = kind.limits(keepalive_s=0.2, keepalive_timeout_s=0.2)
    async with serving(kind, streams, limits=limits) as (_, port), asyncio.timeout(20):
        gateway = await Gateway.connect(port)
        gateway.open(1, b"a")
        await streams.opened.wait()
        for _ in range(3):
            ping = await gateway.until(PING, flags=0, never=GOAWAY)
            assert not streams.made[0].closes
            gateway.write(frame(PING, ACK, 0, ping.payload))
        await streams.made[0].closed.wait()
        await gateway.close()
    assert streams.made[0].closes == 1
