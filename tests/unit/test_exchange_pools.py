"""What a pool's own objects do to a request: its priority, its model, and which pool it is."""

import gzip
import json

import pytest

from epp.core.exchange import Exchange
from epp.core.messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    ImmediateReply,
    ResponseTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from epp.core.rewrite import RewriteRule, Rewrites, RewriteTarget
from epp.core.serving import Pools, Serving
from tests.unit.exchanges import (
    World,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED


class Pool:
    """A world whose one pool has objects of its own."""

    def __init__(self, *rules: RewriteRule, **objectives: int) -> None:
        self.world = World(2)
        self.pools = self.world.pools()
        (self.serving,) = self.pools.all
        self.serving.objectives = objectives
        self.serving.rewrites = Rewrites(rules)

    def exchange(self) -> Exchange:
        return Exchange(
            pools=self.pools, params=self.world.params, watcher=self.world.watched, now_s=1.0
        )


def rule(*models: str, to: str = "big-v2") -> RewriteRule:
    return RewriteRule("r", frozenset(models), (RewriteTarget(to, None),))


def sent(replies) -> bytes:
    return b"".join(r.body for r in replies if isinstance(r, StreamedBodyReply))


def asked(pool: Pool, data: bytes, *, modes=(DUPLEX, DUPLEX), **headers: str):
    exchange = pool.exchange()
    exchange.receive(request_headers(modes, **headers), 1.0)
    replies = exchange.receive(body(data), 1.0)
    exchange.settle()
    return exchange, replies


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({"x_llm_d_inference_objective": "gold"}, 10),
        ({"x_gateway_inference_objective": "gold"}, 10),
        ({"x_llm_d_inference_objective": "batch", "x_gateway_inference_objective": "gold"}, -5),
        ({"x_llm_d_inference_objective": "nobody-knows"}, 0),
        ({}, 0),
    ],
)
def test_the_objective_a_client_names_gives_the_priority(headers, priority: int) -> None:
    pool = Pool(gold=10, batch=-5)
    exchange, _ = asked(pool, chat(), **headers)
    assert exchange.request.priority == priority
    get = pool.exchange()
    get.receive(request_headers(end_of_stream=True, **headers), 1.0)
    assert get.request.priority == priority, "without a body, too"


def test_a_rewrite_changes_the_model_s_bytes_and_nothing_else() -> None:
    data = b'{ "messages":[{"role":"user","content":"\\"model\\":\\"m\\""}], "model" :\t"m" }'
    exchange, replies = asked(Pool(rule("m")), data)
    assert sent(replies) == data.replace(b'\t"m"', b'\t"big-v2"')
    assert (exchange.request.model, exchange.request.target_model) == ("m", "big-v2")
    assert exchange.request.rewrite == "r"


def test_the_header_renames_where_no_rule_does() -> None:
    named = {"x_llm_d_model_name_rewrite": "other"}
    for pool, expected in (
        (Pool(), "other"),
        (Pool(rule("m")), "big-v2"),
        (Pool(rule("n")), "other"),
    ):
        exchange, replies = asked(pool, chat(model="m"), **named)
        assert json.loads(sent(replies))["model"] == expected
        assert exchange.request.engine_model == expected


def test_a_name_that_stays_leaves_the_body_as_it_came() -> None:
    data = chat(model="m")
    for pool in (Pool(rule("m", to="m")), Pool(rule("n")), Pool()):
        exchange, replies = asked(pool, data)
        assert sent(replies) == data
        assert exchange.request.target_model == ""


def test_B06_a_rule_for_all_may_name_the_model_of_a_request_that_names_none() -> None:
    data = b'{"messages":[{"role":"user","content":"x"}]}'
    _, replies = asked(Pool(rule()), data)
    assert json.loads(sent(replies))["model"] == "big-v2"
    _, (refused,) = asked(Pool(rule("m")), data)
    assert isinstance(refused, ImmediateReply)
    assert refused.status == 400


def test_a_buffered_body_comes_back_changed_with_its_length() -> None:
    exchange = Pool(rule("m")).exchange()
    exchange.receive(request_headers((BodyMode.BUFFERED, BodyMode.NONE)), 1.0)
    (reply,) = exchange.receive(body(chat(model="m")), 1.0)
    assert isinstance(reply, BodyReply)
    assert reply.body is not None
    assert json.loads(reply.body)["model"] == "big-v2"
    assert ("content-length", str(len(reply.body))) in reply.mutation.set_headers
    assert reply.mutation.destination is not None


def test_a_compressed_body_that_has_to_change_goes_on_decoded() -> None:
    data = gzip.compress(chat(model="m"))
    _, replies = asked(Pool(rule("m")), data, content_encoding="gzip")
    assert json.loads(sent(replies))["model"] == "big-v2"
    assert "content-encoding" in replies[0].mutation.remove_headers
    _, replies = asked(Pool(rule("n")), data, content_encoding="gzip")
    assert sent(replies) == data
    assert "content-encoding" not in replies[0].mutation.remove_headers


def test_a_body_whose_model_cannot_be_changed_is_refused() -> None:
    _, (refused,) = asked(Pool(rule("m")), chat(model="m").decode().encode("utf-16"))
    assert isinstance(refused, ImmediateReply)
    assert refused.status == 400
    assert b"UTF-8" in refused.body


def test_what_was_not_read_is_sent_on_as_it_came() -> None:
    data = b"\x00\x01 no JSON"
    _, replies = asked(Pool(rule()), data, content_type="application/octet-stream")
    assert sent(replies) == data


def test_held_bytes_of_a_changed_body_are_given_back() -> None:
    pool = Pool(rule("m", to="a-much-longer-name" * 20))
    asked(pool, chat(model="m"))
    assert pool.world.params.bodies.held_bytes == 0
    exchange = pool.exchange()
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat(model="m"), end_of_stream=False), 1.0)
    exchange.close(2.0)
    assert pool.world.params.bodies.held_bytes == 0


EVENTS = (
    b'data: {"model":"big-v2","choices":[{"text":"\\"model\\":\\"big-v2\\""}]}\n\ndata: [DONE]\n\n'
)
TOLD = EVENTS.replace(b'{"model":"big-v2"', b'{"model":"m"')


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_client_sees_the_name_it_asked_for(size: int) -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m", stream=True))
    exchange.receive(response_headers(content_type="text/event-stream"), 1.0)
    replies = []
    for at in range(0, len(EVENTS), size):
        replies += exchange.receive(response_body(EVENTS[at : at + size]), 1.0)
    replies += exchange.receive(response_body(b"", end_of_stream=True), 1.0)
    assert sent(replies) == TOLD
    assert [r.end_of_stream for r in replies][-1] is True
    assert exchange.response_bytes == len(EVENTS)


def test_what_is_kept_of_an_answer_goes_out_before_its_trailers() -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m", stream=True))
    exchange.receive(response_headers(content_type="text/event-stream"), 1.0)
    replies = [*exchange.receive(response_body(b'data: {"mod'), 1.0)]
    replies += exchange.receive(ResponseTrailers(), 1.0)
    assert sent(replies) == b'data: {"mod'
    assert isinstance(replies[-1], TrailersReply)


def test_a_whole_answer_in_buffered_mode_has_its_length_set() -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m"), modes=(DUPLEX, BodyMode.BUFFERED))
    exchange.receive(response_headers(content_type="application/json"), 1.0)
    answer = b'{"model":"big-v2","choices":[]}'
    (reply,) = exchange.receive(response_body(answer, end_of_stream=True), 1.0)
    assert reply.body == b'{"model":"m","choices":[]}'
    assert ("content-length", str(len(reply.body))) in reply.mutation.set_headers


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, DUPLEX, BodyMode.BUFFERED])
def test_A17_no_answer_keeps_a_length_that_it_may_not_have(mode) -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m"), modes=(DUPLEX, mode))
    (reply,) = exchange.receive(response_headers(content_type="application/json"), 1.0)
    removed = "content-length" in reply.mutation.remove_headers
    assert removed is (mode is not BodyMode.BUFFERED)
    exchange, _ = asked(Pool(rule("n")), chat(model="m"), modes=(DUPLEX, mode))
    (reply,) = exchange.receive(response_headers(content_type="application/json"), 1.0)
    assert reply == HeadersReply(False)


def test_of_a_buffered_answer_that_is_cut_off_nothing_is_lost_to_its_trailers() -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m"), modes=(DUPLEX, BodyMode.BUFFERED))
    exchange.receive(response_headers(content_type="application/json"), 1.0)
    cut = b'{"id":1,"mod'
    (reply,) = exchange.receive(response_body(cut), 1.0)
    assert reply.body in (None, cut)
    assert exchange.receive(ResponseTrailers(), 1.0) == (TrailersReply(False),)


def test_a_rule_for_all_gives_no_model_to_an_api_that_names_none() -> None:
    data = b'{"items":[{"type":"message","role":"user","content":"x"}]}'
    exchange = Pool(rule()).exchange()
    headers = request_headers()
    exchange.receive(type(headers)({**headers.headers, ":path": "/v1/conversations"}, False), 1.0)
    assert sent(exchange.receive(body(data), 1.0)) == data


def test_a_compressed_answer_goes_on_as_it_came() -> None:
    exchange, _ = asked(Pool(rule("m")), chat(model="m"))
    exchange.receive(
        response_headers(content_type="application/json", content_encoding="gzip"), 1.0
    )
    answer = gzip.compress(b'{"model":"big-v2"}')
    assert sent(exchange.receive(response_body(answer, end_of_stream=True), 1.0)) == answer


def test_an_answer_nobody_was_asked_for_is_not_touched() -> None:
    exchange = Pool(rule("m")).exchange()
    exchange.receive(response_headers(content_type="application/json"), 1.0)
    answer = b'{"model":"big-v2"}'
    assert sent(exchange.receive(response_body(answer, end_of_stream=True), 1.0)) == answer


def test_a_request_for_no_pool_we_serve_is_refused_and_charges_nobody() -> None:
    world = World(2)
    pools = Pools(several=True)
    pools.put(Serving("ns/a", world.decider))
    pools.put(Serving("ns/b", World(1).decider))
    for said in ({"x_llm_d_inference_pool": "c"}, {}):
        exchange = Exchange(pools=pools, params=world.params, watcher=world.watched, now_s=1.0)
        exchange.receive(request_headers(**said), 1.0)
        (refused,) = exchange.receive(body(chat()), 1.0)
        assert isinstance(refused, ImmediateReply)
        assert refused.status == 503
        exchange.close(2.0)
    exchange = Exchange(pools=pools, params=world.params, watcher=world.watched, now_s=1.0)
    exchange.receive(request_headers(x_llm_d_inference_pool="a"), 1.0)
    head, *_ = exchange.receive(body(chat()), 1.0)
    assert isinstance(head, HeadersReply)
    assert "x-llm-d-inference-pool" in head.mutation.remove_headers
    exchange.close(2.0)
    assert world.idle
