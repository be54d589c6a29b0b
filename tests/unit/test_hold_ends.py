"""How a hold ends when something is wrong: the process stops, or a decision meets a bug of ours."""

import asyncio
import time

import pytest

from epp.app import App
from epp.build import compiled
from epp.config import load_config, resolve
from epp.core.decide import Decision
from epp.core.errors import DropReason, RequestDropped
from epp.core.exchange import Exchange, Phase
from epp.core.flow.hold import Hold, HoldParams, Ticket
from epp.core.model import Cause, EndpointSpec, Request
from epp.core.pool import Members
from epp.flags import parse_flags
from epp.wire.stream import ExtProcStream
from tests.unit.exchanges import World, body, chat, request_headers
from tests.unit.test_stream import Wire
from tests.wire.extproc_oracle import pb

ENDING = RequestDropped(DropReason.SHUTTING_DOWN, "bye")
HOLDING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: expected-latency, parameters: {hold: true, maxNumSeqs: 1}}]
"""


class Held(World):
    """A world of one endpoint that runs one request at a time."""

    def __init__(self) -> None:
        super().__init__(1)
        self.hold = Hold(self.decider, HoldParams(seqs_max=1))
        self.bugs: list[Exception] = []

    def ask(self, text: str = "hello") -> tuple[Exchange, Wire]:
        """A request whose answer goes through a real stream."""
        exchange, wire = self.exchange(hold=self.hold), Wire()
        ExtProcStream(
            transport=wire,
            exchange=exchange,
            clock=lambda: 2.0,
            on_bug=lambda _exchange, error: self.bugs.append(error),
        )
        exchange.receive(request_headers(), 1.0)
        exchange.receive(body(chat(text, stream=True)), 1.0)
        exchange.settle()
        return exchange, wire


def status_of(wire: Wire) -> int:
    (message,) = wire.sent
    return pb.ProcessingResponse.FromString(message).immediate_response.status.code


def test_M05_a_hold_that_closes_refuses_all_and_holds_nobody_any_more() -> None:
    world = Held()
    first, _ = world.ask()
    waiting = [world.ask() for _ in range(3)]
    world.hold.close(ENDING, 3.0)
    assert world.hold.requests == 0
    for exchange, wire in waiting:
        assert (exchange.cause, exchange.drop) == (Cause.DROPPED, ENDING)
        assert status_of(wire) == 503
        assert wire.status == (0, "")
    late, _ = world.ask()
    assert (late.phase, late.held_since_s, world.hold.requests) == (Phase.DECIDED, None, 0)
    for exchange in (first, late):
        exchange.close(4.0)
    assert world.idle
    assert world.params.bodies.held_bytes == 0


class Rotten:
    """A prefix index with a bug that one held request meets."""

    def __init__(self, world: Held) -> None:
        self._match = world.decider.prefix.match
        self.bad: set[int] = set()

    def match(self, request):
        if id(request) in self.bad:
            raise ZeroDivisionError("a bug")
        return self._match(request)


@pytest.mark.skipif(compiled(), reason="plants a bug that compiled code does not look up")
def test_a_bug_in_a_later_decision_ends_that_request_alone() -> None:
    world = Held()
    first, _ = world.ask()
    second, second_wire = world.ask()
    third, third_wire = world.ask()
    rotten = Rotten(world)
    rotten.bad.add(id(second.request))
    world.decider.prefix.match = rotten.match
    first.close(3.0)
    assert [type(bug) for bug in world.bugs] == [ZeroDivisionError]
    assert (second.cause, status_of(second_wire)) == (Cause.ERROR, 500)
    assert third.phase is Phase.DECIDED
    assert len(third_wire.sent) == 2, "headers with the pick, and the body"
    assert world.hold.requests == 0
    third.close(4.0)
    assert world.idle


async def test_whoever_wakes_the_held_may_be_started_again_while_some_are_held() -> None:
    """As after a bug: until another request ends, nobody else would wake them."""
    app = App(parse_flags({"endpoints": "10.0.0.1:8000"}), resolve(load_config(HOLDING)))
    (site,) = app._sites
    site.apply(Members((EndpointSpec(host="10.0.0.1", port=8000),)))
    hold, let_go = site.serving.hold, asyncio.Event()
    assert hold is not None

    def offer() -> Decision | Ticket:
        request = Request(prompt_tokens=10)
        now_s = time.monotonic()
        return hold.offer(request, subset=None, now_s=now_s, deliver=lambda *_: let_go.set())

    first = offer()
    assert isinstance(first, Decision)
    assert isinstance(offer(), Ticket)
    waking = asyncio.create_task(site._wake_held())
    await asyncio.sleep(0)  # it runs, and is ended
    waking.cancel()
    waking = asyncio.create_task(site._wake_held())
    site.decider.ended(first, time.monotonic())
    async with asyncio.timeout(5.0):
        await let_go.wait()
    waking.cancel()
