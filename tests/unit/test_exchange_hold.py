"""An exchange whose request is held: what is answered when, and that nothing is kept or lost."""

from collections.abc import Sequence

from epp.core.exchange import Phase
from epp.core.flow.hold import Hold, HoldParams
from epp.core.messages import (
    HeadersReply,
    ImmediateReply,
    Reply,
    RequestTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from epp.core.model import Cause
from epp.core.pool import Members
from tests.unit.exchanges import World, body, chat, request_headers, response_headers

BODY = chat(stream=True)


class Held(World):
    """A world of one endpoint that runs one request at a time."""

    def __init__(self) -> None:
        super().__init__(1)
        self.hold = Hold(self.decider, HoldParams(seqs_max=1))
        self.sent: list[Sequence[Reply]] = []

    def holding(self):
        exchange = self.exchange(hold=self.hold)
        exchange.answer_later = lambda make: self.sent.append(make())
        return exchange


def asked(world: Held):
    exchange = world.holding()
    exchange.receive(request_headers(), 1.0)
    replies = exchange.receive(body(BODY, end_of_stream=True), 1.0)
    exchange.settle()
    return exchange, replies


def test_a_request_waits_until_the_one_before_it_has_ended() -> None:
    world = Held()
    first, replies = asked(world)
    assert [type(r) for r in replies] == [HeadersReply, StreamedBodyReply]
    second, replies = asked(world)
    assert (replies, second.phase, world.hold.requests) == ((), Phase.HELD, 1)
    assert second.held_since_s == 1.0
    assert world.params.bodies.held_bytes == len(BODY)
    first.close(3.0)
    (replies,) = world.sent
    assert [type(r) for r in replies] == [HeadersReply, StreamedBodyReply]
    assert replies[0].mutation.destination == "10.0.0.1:8000"
    assert (replies[1].body, replies[1].end_of_stream) == (BODY, True)
    assert (second.phase, second.decided_s, world.hold.requests) == (Phase.DECIDED, 3.0, 0)
    assert world.params.bodies.held_bytes == 0
    second.close(4.0)
    assert world.idle


def test_a_request_with_trailers_is_answered_whole_when_it_is_let_go() -> None:
    world = Held()
    first, _ = asked(world)
    second = world.holding()
    second.receive(request_headers(), 1.0)
    second.receive(body(BODY, end_of_stream=False), 1.0)
    assert second.receive(RequestTrailers(), 1.0) == ()
    first.close(3.0)
    (replies,) = world.sent
    assert [type(r) for r in replies] == [HeadersReply, StreamedBodyReply, TrailersReply]
    assert not replies[1].end_of_stream


def test_K09_a_client_that_leaves_is_held_no_longer() -> None:
    world = Held()
    first, _ = asked(world)
    second, _ = asked(world)
    second.close(2.0)
    assert (world.hold.requests, world.params.bodies.held_bytes) == (0, 0)
    assert second.cause is Cause.CLIENT_DISCONNECT
    first.close(3.0)
    assert world.sent == []
    assert world.idle


def test_an_answer_by_the_gateway_itself_ends_the_hold() -> None:
    world = Held()
    first, _ = asked(world)
    second, _ = asked(world)
    second.receive(response_headers("504"), 2.0)
    assert world.hold.requests == 0
    first.close(3.0)
    assert world.sent == []


def test_a_held_request_is_refused_when_no_endpoint_is_left() -> None:
    world = Held()
    asked(world)
    second, _ = asked(world)
    world.pool.apply(Members(()), 2.0)
    world.hold.wake(2.0)
    ((reply,),) = world.sent
    assert isinstance(reply, ImmediateReply)
    assert (reply.status, second.cause, world.hold.requests) == (503, Cause.DROPPED, 0)
    assert world.params.bodies.held_bytes == 0


def test_where_no_answer_can_come_later_nothing_is_held() -> None:
    world = Held()
    asked(world)
    exchange = world.exchange(hold=world.hold)
    exchange.receive(request_headers(), 1.0)
    assert len(exchange.receive(body(BODY, end_of_stream=True), 1.0)) == 2
