"""Any order of messages, any chunking, any abort: the same picks, one release, counters at 0."""

import itertools

from hypothesis import given, settings, strategies as st

from epp.core.messages import (
    BodyMode,
    BodyReply,
    HeadersReply,
    ImmediateReply,
    RequestBody,
    RequestTrailers,
    ResponseTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from tests.unit.exchanges import (
    World,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)

MODES = st.tuples(st.sampled_from(BodyMode), st.sampled_from(BodyMode))
BODIES = st.sampled_from([b"", chat(), chat("long " * 2000), b"{", b"[]", b"\xff" * 100])
MESSAGES = st.one_of(
    st.builds(request_headers, st.none() | MODES, end_of_stream=st.booleans()),
    st.builds(request_headers, MODES, subset=st.sampled_from([None, (), ("10.0.0.2:8000",)])),
    st.builds(body, BODIES, end_of_stream=st.booleans()),
    st.builds(RequestTrailers),
    st.builds(
        response_headers,
        st.sampled_from(["200", "500", "503", "404", "x"]),
        served=st.sampled_from([None, "10.0.0.1:8000", "10.0.0.3:8000", "10.9.9.9:1"]),
        content_type=st.sampled_from(["application/json", "text/event-stream"]),
    ),
    st.builds(response_body, st.binary(max_size=300), end_of_stream=st.booleans()),
    st.builds(ResponseTrailers),
)


@given(streams=st.lists(st.lists(MESSAGES, max_size=8), max_size=5), data=st.data())
@settings(max_examples=400, deadline=None)
def test_whatever_comes_every_charge_is_released_once(streams, data) -> None:
    world = World(3, fallbacks=2)
    open_exchanges = [(world.exchange(), list(messages)) for messages in streams]
    now_s = 1.0
    while open_exchanges:
        at = data.draw(st.integers(0, len(open_exchanges) - 1))
        exchange, messages = open_exchanges[at]
        now_s += 0.01
        if messages:
            exchange.receive(messages.pop(0), now_s)
            exchange.settle()
        else:
            exchange.close(now_s)
            exchange.close(now_s)
            del open_exchanges[at]
        # What the gateway stopped to show is still charged, until its predicted end.
        assert world.decider.inflight.requests >= sum(
            1 for e, _ in open_exchanges if e.decision is not None and e.cause is None
        )
        assert all(min(counters) >= 0 for counters in world.counters())
    world.decider.inflight.advance(now_s + 1e6)
    assert world.idle
    assert len(world.watched.finished_exchanges) == len(streams)
    assert len(set(map(id, world.watched.finished_exchanges))) == len(streams)


@given(MODES, st.lists(MESSAGES, max_size=10))
@settings(max_examples=400, deadline=None)
def test_no_reply_is_illegal_in_its_mode(modes, messages) -> None:
    """Envoy fails a request on a reply its mode does not allow, and on two of one kind."""
    world = World(2)
    exchange = world.exchange()
    sent = []
    for event in [request_headers(modes), *messages]:
        replies = exchange.receive(event, 1.0)
        exchange.settle()
        own = 0 if isinstance(event, RequestBody) and modes[0] in _DUPLEX else 1
        in_step = [r for r in replies if not isinstance(r, StreamedBodyReply)]
        assert len(in_step) <= max(own, 1) + isinstance(event, RequestTrailers)
        sent += replies
    announced = exchange._request_mode, exchange._response_mode
    for reply in sent:
        if isinstance(reply, StreamedBodyReply):
            assert announced[0 if reply.request else 1] in _DUPLEX or exchange.drop is not None
        if isinstance(reply, BodyReply):
            assert announced[0 if reply.request else 1] not in _DUPLEX
    assert sum(isinstance(r, HeadersReply) and r.request for r in sent) <= 1
    assert sum(isinstance(r, ImmediateReply) for r in sent) <= 1
    if any(isinstance(r, ImmediateReply) for r in sent):
        assert isinstance(sent[-1], ImmediateReply), "nothing comes after a refusal"
    assert sum(isinstance(r, TrailersReply) and r.request for r in sent) <= 1 + len(messages)


_DUPLEX = {BodyMode.FULL_DUPLEX_STREAMED, BodyMode.GRPC}


@given(
    text=st.text(max_size=3000),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
    trailers=st.booleans(),
    empty_end=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_chunks_cut_anywhere_give_the_same_pick_and_the_same_bytes(
    text, cuts, trailers, empty_end
) -> None:
    data = chat(text)
    whole = _route([data], trailers=False, empty_end=False)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    chunks = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert _route(chunks, trailers=trailers, empty_end=empty_end) == whole


def _route(chunks, *, trailers: bool, empty_end: bool):
    world = World(4)
    exchange = world.exchange()
    exchange.receive(request_headers(), 1.0)
    replies = []
    for at, chunk in enumerate(chunks, start=1):
        last = at == len(chunks) and not trailers and not empty_end
        replies += exchange.receive(body(chunk, end_of_stream=last), 1.0)
    if trailers:
        replies += exchange.receive(RequestTrailers(), 1.0)
    elif empty_end:
        replies += exchange.receive(body(b""), 1.0)
    sent = b"".join(r.body for r in replies if isinstance(r, StreamedBodyReply))
    assert exchange.request is not None
    return sent, replies[0].mutation.destination, exchange.request.chains
