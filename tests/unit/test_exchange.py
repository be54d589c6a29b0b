import socket
import tracemalloc

import msgspec
import pytest

from epp.core.bodies import PIECES_MAX, Bodies, Body
from epp.core.errors import DropReason
from epp.core.exchange import TABLE, Phase
from epp.core.headers import DROP_REASON, NOT_FOR_UPSTREAM, REQUEST_TRAILERS, SERVED_VERIFIER
from epp.core.messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    ImmediateReply,
    RequestTrailers,
    ResponseTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from epp.core.model import Cause
from tests.unit.exchanges import (
    World,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)

BUFFERED = (BodyMode.BUFFERED, BodyMode.BUFFERED)
LONG = "the same system prompt for all " * 40


def destination(replies) -> str | None:
    for reply in replies:
        if isinstance(reply, HeadersReply | BodyReply) and reply.mutation.destination:
            return reply.mutation.destination
    return None


def forwarded(replies, *, request: bool = True) -> bytes:
    pieces = [r for r in replies if isinstance(r, StreamedBodyReply) and r.request is request]
    return b"".join(p.body for p in pieces)


# -- the request, full duplex --------------------------------------------------------------


def test_A04_headers_are_answered_with_the_pick_once_the_body_is_complete() -> None:
    world = World()
    exchange = world.exchange()
    assert exchange.receive(request_headers(), 1.0) == ()
    assert exchange.receive(body(chat(), end_of_stream=False), 1.0) == ()
    replies = exchange.receive(body(b""), 1.0)
    assert [type(r) for r in replies] == [HeadersReply, StreamedBodyReply]
    assert replies[0].request
    assert destination(replies) in {e.address for e in world.pool.endpoints}
    assert replies[1] == StreamedBodyReply(True, chat(), True)


def test_A02_a_long_body_goes_on_in_pieces_and_only_the_last_ends_it() -> None:
    world = World()
    exchange = world.exchange()
    data = chat("x" * 200_000)
    exchange.receive(request_headers(), 1.0)
    pieces = exchange.receive(body(data), 1.0)[1:]
    assert max(len(p.body) for p in pieces) <= 62_000
    assert [p.end_of_stream for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert forwarded(pieces) == data


def test_A01_a_second_end_of_stream_is_ignored_and_counted() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat()), 1.0)
    assert exchange.receive(body(chat()), 1.0) == ()
    assert exchange.ignored_messages == 1
    assert world.decider.inflight.requests == 1


def test_A05_a_request_without_body_is_picked_at_its_headers() -> None:
    world = World()
    exchange = world.exchange()
    replies = exchange.receive(request_headers(end_of_stream=True), 1.0)
    assert [type(r) for r in replies] == [HeadersReply]
    assert destination(replies)


def test_A05_a_request_without_body_keeps_to_the_subset() -> None:
    world = World(3)
    for _ in range(10):
        replies = world.exchange().receive(
            request_headers(end_of_stream=True, subset=("10.0.0.2:8000",)), 1.0
        )
        assert destination(replies) == "10.0.0.2:8000"


def test_A06_an_empty_body_on_a_known_path_is_a_clear_400() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    (reply,) = exchange.receive(body(b""), 1.0)
    assert isinstance(reply, ImmediateReply)
    assert reply.status == 400
    assert world.idle


def test_A06_an_empty_body_on_an_unknown_path_is_routed_by_load() -> None:
    exchange = World().exchange()
    headers = request_headers()
    exchange.receive(msgspec.structs.replace(headers, headers={":path": "/v2/any"}), 1.0)
    replies = exchange.receive(body(b""), 1.0)
    assert destination(replies)
    assert replies[1] == StreamedBodyReply(True, b"", True)


def test_A07_trailers_end_the_body() -> None:
    exchange = World().exchange()
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat(), end_of_stream=False), 1.0)
    replies = exchange.receive(RequestTrailers(), 1.0)
    assert [type(r) for r in replies] == [HeadersReply, StreamedBodyReply, TrailersReply]
    assert forwarded(replies) == chat()
    assert not replies[1].end_of_stream, "the trailers end it"
    assert replies[0].mutation.set_headers == ((REQUEST_TRAILERS, "true"),)


def test_A13_header_bytes_that_are_no_text_are_no_problem() -> None:
    exchange = World().exchange()
    replies = exchange.receive(request_headers(end_of_stream=True, x_odd="\xff\xfe"), 1.0)
    assert destination(replies)


def test_A25_an_upgrade_is_picked_at_its_headers_and_its_bytes_pass() -> None:
    exchange = World().exchange()
    replies = exchange.receive(request_headers(upgrade="websocket", connection="Upgrade"), 1.0)
    assert destination(replies)
    assert exchange.receive(body(b"frame", end_of_stream=False), 1.0) == (
        StreamedBodyReply(True, b"frame", False),
    )


def test_D01_control_headers_of_the_client_do_not_reach_the_engine() -> None:
    exchange = World().exchange()
    event = request_headers(end_of_stream=True, x_other="stays")
    forged = dict.fromkeys(NOT_FOR_UPSTREAM, "10.0.0.9:22")
    event.headers = {**event.headers, **forged, "x-gateway-destination-endpoint": "10.0.0.9:22"}
    (reply,) = exchange.receive(event, 1.0)
    assert set(reply.mutation.remove_headers) == NOT_FOR_UPSTREAM
    assert reply.mutation.destination != "10.0.0.9:22"


def test_D01_a_subset_header_of_the_client_is_no_subset() -> None:
    world = World(3)
    picked = set()
    for _ in range(12):
        event = request_headers(
            end_of_stream=True, x_gateway_destination_endpoint_subset="10.0.0.2:8000"
        )
        picked.add(destination(world.exchange().receive(event, 1.0)))
    assert len(picked) == 3


def test_A17_A18_no_header_of_the_framing_is_ever_set() -> None:
    exchange = World().exchange()
    exchange.receive(request_headers(content_length="10", transfer_encoding="chunked"), 1.0)
    mutation = exchange.receive(body(chat()), 1.0)[0].mutation
    assert mutation.set_headers == ()
    assert mutation.remove_headers == ()


# -- other modes ---------------------------------------------------------------------------


def test_buffered_headers_are_answered_first_and_the_pick_rides_on_the_body() -> None:
    exchange = World().exchange()
    assert exchange.receive(request_headers(BUFFERED), 1.0) == (HeadersReply(True),)
    (reply,) = exchange.receive(body(chat()), 1.0)
    assert isinstance(reply, BodyReply)
    assert reply.mutation.destination


def test_a_buffered_body_before_trailers_is_the_whole_body() -> None:
    exchange = World().exchange()
    exchange.receive(request_headers(BUFFERED), 1.0)
    assert destination(exchange.receive(body(chat(), end_of_stream=False), 1.0))
    assert exchange.receive(RequestTrailers(), 1.0) == (TrailersReply(True),)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_a_body_we_cannot_wait_for_is_picked_at_the_headers(mode) -> None:
    exchange = World().exchange()
    replies = exchange.receive(request_headers((mode, BodyMode.NONE)), 1.0)
    assert destination(replies)
    if mode is BodyMode.STREAMED:
        assert exchange.receive(body(chat()), 1.0) == (BodyReply(True),)


def test_a_body_the_gateway_cut_off_is_routed_by_load() -> None:
    exchange = World().exchange()
    exchange.receive(request_headers((BodyMode.BUFFERED_PARTIAL, BodyMode.NONE)), 1.0)
    assert destination(exchange.receive(body(chat()[:20], end_of_stream=False), 1.0))


def test_A20_without_announced_modes_full_duplex_is_assumed() -> None:
    exchange = World().exchange()
    assert exchange.receive(request_headers(None), 1.0) == ()
    assert destination(exchange.receive(body(chat()), 1.0))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (BodyMode.FULL_DUPLEX_STREAMED, StreamedBodyReply(False, b"abc", False)),
        (BodyMode.STREAMED, BodyReply(False)),
        (BodyMode.BUFFERED, BodyReply(False)),
    ],
)
def test_A03_a_response_body_is_answered_as_its_mode_demands(mode, expected) -> None:
    exchange = World().exchange()
    exchange.receive(request_headers((BodyMode.FULL_DUPLEX_STREAMED, mode)), 1.0)
    exchange.receive(body(chat()), 1.0)
    exchange.receive(response_headers(), 1.1)
    assert tuple(exchange.receive(response_body(b"abc"), 1.2)) == (expected,)


# -- refusals ------------------------------------------------------------------------------


def refused(replies) -> tuple[int, dict, dict]:
    (reply,) = replies
    assert isinstance(reply, ImmediateReply)
    return reply.status, dict(reply.headers), msgspec.json.decode(reply.body)


def test_N09_a_refusal_is_a_json_error_with_its_reason_and_no_prompt() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    status, headers, error = refused(exchange.receive(body(b'{"model": secret'), 1.0))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert headers[DROP_REASON] == DropReason.BAD_REQUEST
    assert error["error"]["code"] == 400
    assert "secret" not in str(error)
    assert exchange.cause is Cause.DROPPED


def test_J01_an_empty_pool_is_503_with_a_time_to_wait() -> None:
    exchange = World(0).exchange()
    status, headers, _ = refused(exchange.receive(request_headers(end_of_stream=True), 1.0))
    assert (status, headers[DROP_REASON]) == (503, DropReason.NO_ENDPOINTS)
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("subset", [(), ("10.9.9.9:8000",)])
def test_K05_a_subset_that_leaves_nothing_is_503(subset) -> None:
    exchange = World().exchange()
    exchange.receive(request_headers(subset=subset), 1.0)
    status, _, _ = refused(exchange.receive(body(chat()), 1.0))
    assert status == 503


def test_B15_a_body_over_the_limit_is_413_before_its_end() -> None:
    world = World(body_bytes_max=1000)
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    assert exchange.receive(body(b"x" * 1000, end_of_stream=False), 1.0) == ()
    status, _, _ = refused(exchange.receive(body(b"x", end_of_stream=False), 1.0))
    assert status == 413
    assert exchange.receive(body(b"x"), 1.0) == (), "what still comes is ignored"
    exchange.close(1.0)
    assert exchange.cause is Cause.DROPPED
    assert len(world.watched.finished_exchanges) == 1


def test_J06_bodies_that_do_not_end_are_bounded_together_and_others_are_served() -> None:
    world = World(bodies=Bodies(10_000))
    slow = [world.exchange() for _ in range(4)]
    for exchange in slow:
        exchange.receive(request_headers(), 1.0)
        exchange.receive(body(b"x" * 2_500, end_of_stream=False), 1.0)
    late = world.exchange()
    late.receive(request_headers(), 1.0)
    status, headers, _ = refused(late.receive(body(chat()), 1.0))
    assert (status, headers[DROP_REASON]) == (429, DropReason.SATURATED)
    assert world.params.bodies.held_bytes == 10_000
    slow.pop().close(2.0)
    again = world.exchange()
    again.receive(request_headers(), 1.0)
    assert destination(again.receive(body(chat()), 1.0))
    for exchange in slow:
        exchange.close(2.0)
    assert world.params.bodies.held_bytes == 0


def test_a_body_in_a_million_pieces_is_joined_on_the_way() -> None:
    held = Body(Bodies(1 << 20), 1 << 20)
    for _ in range(50_000):
        held.add(b"ab")
    assert len(held._pieces) <= PIECES_MAX + 1
    assert held.take() == b"ab" * 50_000


# -- the response --------------------------------------------------------------------------


def picked(world: World, **kwargs):
    """An exchange that has its pick."""
    exchange = world.exchange()
    exchange.receive(request_headers(**kwargs), 1.0)
    exchange.receive(body(chat(LONG)), 1.0)
    exchange.settle()
    return exchange


def test_the_first_byte_releases_the_prefill_and_the_end_releases_all() -> None:
    world = World(1)
    exchange = picked(world)
    assert world.counters()[0][:2] == (1, 1)
    exchange.receive(response_headers(content_type="text/event-stream"), 1.1)
    assert world.counters()[0][:2] == (1, 1), "headers are not the first byte"
    exchange.receive(response_body(b"data: {}\n\n"), 1.5)
    assert world.counters() == [(1, 0, 0)]
    exchange.receive(response_body(b"", end_of_stream=True), 1.9)
    assert world.idle
    assert exchange.cause is Cause.NATURAL
    assert (exchange.first_byte_s, exchange.last_byte_s) == (1.5, 1.5)


def test_A08_response_trailers_end_the_response() -> None:
    world = World()
    exchange = picked(world)
    exchange.receive(response_headers(), 1.1)
    exchange.receive(response_body(b"x"), 1.1)
    assert exchange.receive(ResponseTrailers(), 1.2) == (TrailersReply(False),)
    assert world.idle


def test_A09_a_stream_that_begins_with_a_response_is_passed_through() -> None:
    world = World()
    exchange = world.exchange()
    event = response_headers("401")
    event.modes = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
    assert exchange.receive(event, 1.0) == (HeadersReply(False),)
    replies = exchange.receive(response_body(b"no", end_of_stream=True), 1.0)
    assert tuple(replies) == (StreamedBodyReply(False, b"no", True),)
    exchange.close(1.0)
    assert world.idle
    assert not world.watched.decided_exchanges
    assert all(e.failures == 0 for e in world.pool.endpoints)


def test_A24_a_reset_after_the_end_is_a_natural_end() -> None:
    world = World()
    exchange = picked(world)
    exchange.receive(response_headers(), 1.1)
    exchange.receive(response_body(b"x", end_of_stream=True), 1.1)
    exchange.close(1.2)
    assert exchange.cause is Cause.NATURAL
    assert world.watched.finished_exchanges == [exchange]


def test_C09_a_client_that_leaves_gives_everything_back_in_every_phase() -> None:
    steps = [
        lambda e: e.receive(request_headers(), 1.0),
        lambda e: e.receive(body(chat(LONG)), 1.0),
        lambda e: e.receive(response_headers(), 1.0),
        lambda e: e.receive(response_body(b"x"), 1.0),
    ]
    for count in range(len(steps) + 1):
        world = World()
        exchange = world.exchange()
        for step in steps[:count]:
            step(exchange)
            exchange.settle()
        exchange.close(2.0)
        exchange.close(3.0)
        assert world.idle
        assert exchange.cause is Cause.CLIENT_DISCONNECT
        assert world.watched.finished_exchanges == [exchange]


def test_a_response_whose_body_is_not_shown_ends_naturally_with_the_stream() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers((BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)), 1.0)
    exchange.receive(body(chat()), 1.0)
    exchange.receive(response_headers(content_type="application/json"), 1.5)
    assert world.decider.inflight.requests == 1
    assert exchange.first_byte_s == 1.5
    exchange.close(2.0)
    assert exchange.cause is Cause.NATURAL
    assert world.idle


def test_C10_two_streams_with_one_request_id_are_two_requests() -> None:
    world = World()
    first, second = picked(world), picked(world)
    assert world.decider.inflight.requests == 2
    first.close(2.0)
    assert world.decider.inflight.requests == 1
    second.close(2.0)
    assert world.idle


@pytest.mark.parametrize("status", ["", "abc", "0", "1", "99999999999999999999"])
def test_C11_an_odd_status_is_no_failure_of_the_endpoint(status) -> None:
    world = World(1)
    exchange = picked(world)
    exchange.receive(response_headers(status), 1.1)
    assert exchange.status is None
    assert world.pool.endpoints[0].failures == 0


def test_K09_answers_of_5xx_eject_the_endpoint_and_4xx_do_not() -> None:
    world = World(2)
    for _ in range(40):
        exchange = picked(world)
        bad = exchange.decision.pick.endpoint is world.pool.endpoints[0]
        exchange.receive(response_headers("500" if bad else "404"), 1.1)
        exchange.close(1.1)
    bad, good = world.pool.endpoints
    assert bad.failures >= 3
    assert good.failures == 0
    assert world.pool.snapshot(1.2).endpoints == (good,)


def test_A29_who_served_gets_the_load_and_who_failed_the_blame() -> None:
    world = World(2, fallbacks=2)
    exchange = picked(world)
    first = exchange.decision.pick.endpoint
    (second,) = exchange.decision.pick.fallbacks
    exchange.receive(response_headers(served=second.address), 1.1)
    assert (first.inflight_requests, second.inflight_requests) == (0, 1)
    assert (first.failures, second.failures) == (1, 0)
    exchange.close(1.2)
    assert world.idle


def test_an_unknown_served_endpoint_means_the_pick() -> None:
    world = World(2)
    exchange = picked(world)
    exchange.receive(response_headers(served="10.9.9.9:1"), 1.1)
    assert exchange.decision.pick.endpoint.inflight_requests == 1
    assert exchange.decision.pick.endpoint.failures == 0


@pytest.mark.parametrize(
    ("served", "expected"), [("10.0.0.1:8000", "10.0.0.1:8000"), (None, "fail: ")]
)
def test_the_served_verifier_tells_the_client(served, expected) -> None:
    exchange = picked(World(1, verify_served=True))
    (reply,) = exchange.receive(response_headers(served=served), 1.1)
    ((name, value),) = reply.mutation.set_headers
    assert name == SERVED_VERIFIER
    assert value.startswith(expected)


def test_usage_is_read_from_the_answer() -> None:
    exchange = picked(World())
    exchange.receive(response_headers(content_type="application/json"), 1.1)
    answer = b'{"usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
    for at in range(len(answer)):
        exchange.receive(response_body(answer[at : at + 1]), 1.1)
    exchange.receive(response_body(b"", end_of_stream=True), 1.1)
    assert exchange.usage.usage.prompt_tokens == 7
    assert exchange.usage.usage.completion_tokens == 3


# -- what the decision learns --------------------------------------------------------------


def test_siblings_of_a_burst_go_together_once_the_first_is_answered() -> None:
    world = World(4)
    exchanges = []
    for _ in range(3):
        exchanges.append(picked(world))
    endpoints = {e.decision.pick.endpoint for e in exchanges}
    assert len(endpoints) == 1
    assert exchanges[0].decision.matched_tokens == 0
    assert exchanges[1].decision.matched_tokens > 200


def test_A15_a_fallback_list_is_one_string_primary_first() -> None:
    world = World(3, fallbacks=3)
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    text = destination(exchange.receive(body(chat()), 1.0))
    addresses = text.split(",")
    assert addresses[0] == exchange.decision.pick.endpoint.address
    assert sorted(addresses) == [e.address for e in world.pool.endpoints]
    assert " " not in text


def test_scores_are_emitted_when_asked_for() -> None:
    world = World(3, emit_scores=True)
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    scores = exchange.receive(body(chat()), 1.0)[0].mutation.scores
    assert set(scores) == {e.address for e in world.pool.endpoints}


def test_every_phase_has_its_row() -> None:
    assert TABLE.keys() == set(Phase)


def test_a_bug_is_one_500_and_gives_everything_back() -> None:
    world = World()
    exchange = picked(world)
    reply = exchange.fail(1.5)
    exchange.settle()
    assert reply.status == 500
    assert world.idle
    assert exchange.cause is Cause.ERROR


def test_A16_a_pick_on_trailers_alone_reaches_the_load_balancer_as_metadata() -> None:
    world = World(3)
    exchange = world.exchange()
    headers = request_headers((BodyMode.BUFFERED, BodyMode.NONE), content_type="text/plain")
    exchange.receive(headers, 1.0)
    (reply,) = exchange.receive(RequestTrailers(), 1.0)
    assert exchange.decision is not None
    assert reply == TrailersReply(True, destination=exchange.decision.pick.endpoint.address)


def test_A26_a_body_that_never_ends_is_nothing_but_a_stream_that_was_left() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    for _ in range(100):
        assert exchange.receive(body(b"x" * 1000, end_of_stream=False), 1.0) == ()
    exchange.close(2.0)
    assert world.idle
    assert (exchange.cause, exchange.drop) == (Cause.CLIENT_DISCONNECT, None)
    assert world.params.bodies.held_bytes == 0
    assert world.watched.finished_exchanges == [exchange]


def test_A28_an_open_stream_does_not_keep_its_prompt() -> None:
    world = World()
    tracemalloc.start()
    open_streams = []
    for n in range(8):
        exchange = world.exchange()
        exchange.receive(request_headers(), 1.0)
        exchange.receive(body(chat(f"{n} " + "hello " * 80_000)), 1.0)
        exchange.settle()
        exchange.receive(response_headers(content_type="text/event-stream"), 1.0)
        open_streams.append(exchange)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes / len(open_streams) < 250_000, (
        "of 480 KB; the index's 8 x 1875 names included"
    )
    assert all(e.request.prompts == e.request.chains == () for e in open_streams)


@pytest.mark.parametrize(
    "mode", [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED]
)
def test_a_gateway_that_shows_no_response_headers_is_answered_all_the_same(mode) -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers((BodyMode.FULL_DUPLEX_STREAMED, mode)), 1.0)
    exchange.receive(body(chat()), 1.0)
    assert len(exchange.receive(response_body(b"x"), 1.1)) == 1
    assert exchange.first_byte_s == 1.1
    assert len(exchange.receive(response_body(b"y", end_of_stream=True), 1.2)) == 1
    assert (exchange.cause, exchange.response_bytes) == (Cause.NATURAL, 2)
    assert world.idle


@pytest.mark.parametrize("first", [body(chat()), RequestTrailers()])
def test_a_gateway_that_shows_no_request_headers_is_told_and_not_left_waiting(first) -> None:
    (reply,) = World().exchange().receive(first, 1.0)
    assert reply.status == 500
    assert b"request_header_mode" in reply.body


def test_C12_C13_each_byte_of_an_answer_is_counted_once_and_the_first_is_the_first() -> None:
    world = World()
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat()), 1.0)
    exchange.receive(response_headers(content_type="text/event-stream"), 1.5)
    exchange.receive(response_body(b""), 1.6)
    assert exchange.first_byte_s is None, "no byte has come yet"
    for n, piece in enumerate((b"data: {}\n\n", b"data: {}\n\n", b"data: [DONE]\n\n")):
        exchange.receive(response_body(piece, end_of_stream=n == 2), 2.0 + n)
    assert (exchange.first_byte_s, exchange.last_byte_s) == (2.0, 4.0)
    assert exchange.response_bytes == 34
    assert exchange.usage.events == 2


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
def test_C14_each_piece_of_an_answer_goes_on_in_the_call_that_brought_it(mode) -> None:
    exchange = World().exchange()
    exchange.receive(request_headers((BodyMode.FULL_DUPLEX_STREAMED, mode)), 1.0)
    exchange.receive(body(chat()), 1.0)
    exchange.receive(response_headers(content_type="text/event-stream"), 1.0)
    for piece in (b"da", b"ta: {", b"}\n", b"\n"):
        replies = exchange.receive(response_body(piece), 1.0)
        assert len(replies) == 1
        (reply,) = replies
        assert reply == BodyReply(False) if mode is BodyMode.STREAMED else reply.body == piece


HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding")


@pytest.mark.parametrize("name", [*HOP_BY_HOP, "proxy-authenticate", "proxy-authorization"])
def test_D07_headers_between_two_hops_are_neither_set_nor_removed(name) -> None:
    exchange = World(verify_served=True).exchange()
    exchange.receive(request_headers(**{name: "x"}), 1.0)
    replies = [
        *exchange.receive(body(chat()), 1.0),
        *exchange.receive(response_headers(**{name: "x"}), 1.0),
    ]
    mutations = [r.mutation for r in replies if isinstance(r, HeadersReply)]
    assert len(mutations) == 2
    for mutation in mutations:
        assert name not in dict(mutation.set_headers)
        assert name not in mutation.remove_headers
    assert name not in NOT_FOR_UPSTREAM


def test_D09_what_a_request_names_is_never_fetched(monkeypatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("somebody is asked for something")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    url = "http://169.254.169.254/latest/meta-data"
    parts = [{"type": kind, kind: {"url": url}} for kind in ("image_url", "video_url", "audio_url")]
    exchange = World().exchange()
    exchange.receive(request_headers(), 1.0)
    replies = exchange.receive(body(chat(parts)), 1.0)
    assert exchange.decision is not None
    assert b"".join(r.body for r in replies[1:]) == chat(parts)
