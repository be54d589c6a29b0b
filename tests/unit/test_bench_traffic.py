"""Both ends of a benched gateway: what they send, and how they read it."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from bench.traffic.driver import Job, Work
from bench.traffic.gateway import request_messages, response_messages
from bench.traffic.http1 import Message, Reader
from bench.traffic.prompts import Prompts
from bench.traffic.upstream import ANSWER, EVENT, LAST_EVENT, stream_bytes
from epp.core.messages import BodyMode, RequestBody, RequestHeaders, ResponseBody, ResponseHeaders
from epp.wire.extproc import decode_request

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-a: b \r\n\r\nhello"
    b"GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n"
    b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n"
    b"a\r\n0\r\n\r\n12345\r\n1\r\nz\r\n0\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
)
LENGTHS = (100, 8 * 1024, 15 * 1024)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_messages_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    reader = Reader()
    places = [0, *sorted(cuts), len(STREAM)]
    messages = [
        message for start, end in pairwise(places) for message in reader.feed(STREAM[start:end])
    ]
    assert [message.body_bytes for message in messages] == [5, 0, 11, 0]
    assert [messages[0].status, messages[2].status] == [200, 503]
    assert (messages[0].header(b"x-a"), messages[0].header(b"x-b")) == (b"b", None)


def test_a_head_without_end_is_refused_instead_of_kept() -> None:
    reader = Reader()
    assert reader.feed(b"x" * 65_536) == []
    with pytest.raises(ValueError, match="no end"):
        reader.feed(b"x")


@pytest.mark.parametrize("kib", [1, 16, 128])
def test_prompts_have_their_size_and_turns_and_no_two_are_alike(kib: int) -> None:
    prompts = Prompts(kib * 1024)
    bodies = [prompts.next() for _ in range(200)]
    assert len(set(bodies)) == 200
    messages = json.loads(bodies[0])["messages"]
    assert len(messages) == max(2, kib)
    assert sum(len(message["content"]) for message in messages) == kib * 1024
    assert [message["role"] for message in messages[:2]] == ["system", "user"]


def test_most_prompts_continue_one_that_was_sent_before_and_some_share_nothing() -> None:
    prompts = Prompts(16 * 1024)
    earlier = {body[:at] for body in (prompts.next() for _ in range(400)) for at in LENGTHS}
    later = [prompts.next() for _ in range(200)]
    shared = [sum(body[:at] in earlier for at in LENGTHS) for body in later]
    assert 0.6 < shared.count(len(LENGTHS)) / 200 < 0.9
    assert 0.1 < shared.count(0) / 200 < 0.4


def test_equal_seeds_give_equal_prompts() -> None:
    assert [Prompts(2048, seed=3).next() for _ in range(3)] == [Prompts(2048, seed=3).next()] * 3
    assert Prompts(2048, seed=4).next() != Prompts(2048, seed=3).next()


def work(**fields: int) -> Work:
    return Work(Job(port=1, connections=1, seconds=1.0, prompt_bytes=1024, **fields))


def answer(*, status: int = 200, body_bytes: int = len(ANSWER), seen: int = 7) -> Message:
    return Message(b"HTTP/1.1 %d X\r\nx-bench-body-bytes: %d" % (status, seen), body_bytes)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (answer(status=503), "status 503"),
        (answer(body_bytes=3), f"3 bytes of body, not {len(ANSWER)}"),
        (answer(seen=6), "the upstream got another length of body than was sent"),
    ],
)
def test_a_wrong_answer_is_an_error_and_no_latency(wrong: Message, what: str) -> None:
    job = work()
    job.take(answer(), 7, 0.001)
    job.take(wrong, 7, 0.5)
    result = job.result(1.0)
    assert (result.requests, result.errors) == (1, {what: 1})
    assert result.p99_us == pytest.approx(1000.0)


def test_nothing_answered_is_an_error_too() -> None:
    assert work().result(1.0).errors == {"no request was answered": 1}


def test_a_streamed_answer_has_the_length_of_its_events() -> None:
    assert stream_bytes(3) == len(EVENT * 2 + LAST_EVENT)
    job = work(events=3, step_ms=1)
    job.take(answer(body_bytes=stream_bytes(3)), 7, 0.001)
    assert job.result(1.0).errors == {}


def test_a_gateways_messages_are_what_the_codec_reads() -> None:
    body = bytes(70_000)
    first, *bodies = [decode_request(message) for message in request_messages(body, 5)]
    assert isinstance(first, RequestHeaders)
    assert first.modes == (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
    assert first.headers["content-length"] == "70000"
    assert all(isinstance(event, RequestBody) for event in bodies)
    assert [len(event.body) for event in bodies] == [32_768, 32_768, 4464, 0]
    assert [event.end_of_stream for event in bodies] == [False, False, False, True]
    head, *chunks = [
        decode_request(message) for message in response_messages("10.0.0.1:1", [b"x"], "text/plain")
    ]
    assert isinstance(head, ResponseHeaders)
    assert (head.headers[":status"], head.served) == ("200", "10.0.0.1:1")
    assert [(type(e), e.body) for e in chunks] == [(ResponseBody, b"x"), (ResponseBody, b"")]
