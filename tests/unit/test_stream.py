import gc
from collections.abc import Sequence

import pytest

from epp.build import compiled
from epp.core.errors import DropReason, RequestDropped
from epp.core.exchange import Exchange
from epp.core.flow.hold import Hold
from epp.core.messages import HeadersReply
from epp.wire.extproc import encode_reply
from epp.wire.refusing import RefusingStream
from epp.wire.stream import INVALID_ARGUMENT, ExtProcStream
from tests.unit.exchanges import World
from tests.wire.extproc_oracle import pb


class Wire:
    """A transport that writes down what it is given."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.status: tuple[int, str] | None = None

    def send(self, messages: Sequence[bytes]) -> None:
        assert self.status is None, "nothing is sent after the end"
        self.sent += messages

    def finish(self, status: int = 0, message: str = "") -> None:
        self.status = (status, message)


class Broken:
    """A watcher with a bug."""

    def decided(self, exchange: Exchange) -> None:
        raise RuntimeError("bug in decided")

    def finished(self, exchange: Exchange) -> None:
        raise RuntimeError("bug in finished")


def opened(world: World, watcher=None):
    wire, bugs = Wire(), []
    exchange = Exchange(
        pools=world.pools(), params=world.params, watcher=watcher or world.watched, now_s=1.0
    )
    stream = ExtProcStream(
        transport=wire,
        exchange=exchange,
        clock=lambda: 1.0,
        on_bug=lambda _exchange, error: bugs.append(error),
    )
    return wire, bugs, exchange, stream


def get_request() -> bytes:
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for key, value in ((":method", b"GET"), (":path", b"/v1/models")):
        message.request_headers.headers.headers.add(key=key, raw_value=value)
    return message.SerializeToString()


def test_bytes_in_give_bytes_out() -> None:
    world = World(1)
    wire, bugs, exchange, stream = opened(world)
    stream.on_message(get_request())
    assert exchange.decision is not None
    assert len(wire.sent) == 1
    assert b"10.0.0.1:8000" in wire.sent[0]
    assert wire.sent[0] != encode_reply(HeadersReply(True))
    stream.on_close()
    assert world.idle
    assert not bugs


@pytest.mark.parametrize("data", [b"\xff", b"\x12\x05abc", b"\x0f\x00"])
def test_malformed_bytes_end_this_stream_and_give_everything_back(data) -> None:
    world = World(1)
    wire, bugs, exchange, stream = opened(world)
    stream.on_message(get_request())
    stream.on_message(data)
    assert wire.status is not None
    assert wire.status[0] == INVALID_ARGUMENT
    assert world.idle
    assert exchange.cause is not None
    stream.on_close()
    assert not bugs
    assert len(world.watched.finished_exchanges) == 1


def test_a_refusal_ends_the_stream() -> None:
    wire, _, _, stream = opened(World(0))
    stream.on_message(get_request())
    assert b"rejected-no-endpoints" in wire.sent[0]
    assert wire.status == (0, "")


@pytest.mark.skipif(compiled(), reason="plants a bug that compiled code does not look up")
def test_a_bug_in_the_decision_is_a_500_for_this_request_only(monkeypatch) -> None:
    world = World(1)

    def broken(*_args, **_kwargs):
        raise RuntimeError("bug in decide")

    with monkeypatch.context() as patch:
        patch.setattr(world.decider, "decide", broken)
        wire, bugs, _, stream = opened(world)
        stream.on_message(get_request())
    assert [str(b) for b in bugs] == ["bug in decide"]
    assert b"rejected-internal-error" in wire.sent[0]
    assert wire.status == (0, "")
    assert world.idle
    wire, bugs, _, stream = opened(world)
    stream.on_message(get_request())
    assert b"10.0.0.1:8000" in wire.sent[0]
    assert not bugs


def test_A30_a_bug_in_what_only_watches_costs_no_request() -> None:
    world = World(1)
    wire, bugs, _, stream = opened(world, Broken())
    stream.on_message(get_request())
    assert b"10.0.0.1:8000" in wire.sent[0]
    assert wire.status is None
    stream.on_close()
    assert [str(b) for b in bugs] == ["bug in decided", "bug in finished"]
    assert world.idle


def test_a_stream_too_many_is_refused_once_and_readably() -> None:
    wire = Wire()
    dropped = RequestDropped(DropReason.SATURATED, "too many requests at once")
    stream = RefusingStream(transport=wire, dropped=dropped)
    stream.on_message(b"whatever")
    stream.on_message(b"whatever")
    stream.on_close()
    assert len(wire.sent) == 1
    assert b"rejected-saturated" in wire.sent[0]
    assert b"too many requests" in wire.sent[0]
    assert wire.status == (0, "")


@pytest.mark.parametrize("holds", [False, True])
def test_a_stream_that_is_over_is_freed_without_the_collector(*, holds: bool) -> None:
    """Thousands a second would else wait for it, with their headers and bodies."""
    world = World(1)
    hold = Hold(world.decider) if holds else None
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            exchange = world.exchange(hold=hold)
            stream = ExtProcStream(
                transport=Wire(), exchange=exchange, clock=lambda: 1.0, on_bug=lambda *_: None
            )
            stream.on_message(get_request())
            stream.on_close()
        del exchange, stream
        world.watched.decided_exchanges.clear()
        world.watched.finished_exchanges.clear()
        assert gc.collect() < 50, "not one per stream"
    finally:
        gc.enable()
