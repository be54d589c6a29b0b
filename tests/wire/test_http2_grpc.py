"""gRPC over HTTP/2: messages across any frames, statuses, refusals, deadlines, ends of calls."""

from __future__ import annotations

import gc
import sys
import weakref

import grpc
import pytest

from epp.wire.http2.connection import ErrorCode, Http2Limits
from epp.wire.http2.replies import MESSAGE_BYTES_MAX, Status, percent_encode
from epp.wire.http2.requests import read_timeout
from tests.wire.http2_peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    PATH,
    PREFACE,
    REQUEST,
    SETTINGS_ACK,
    WATCH,
    Site,
    data,
    frame,
    headers,
    keep,
    message,
    of_kind,
    read_frames,
    replaced,
    resets,
    rst_stream,
    settings,
    window_update,
)

OK = {"grpc-status": "0"}
RESPONSE = {":status": "200", "content-type": "application/grpc"}
LAST = END_HEADERS | END_STREAM


def finish_with(status: int, text: str = ""):
    return lambda stream, _content: stream.transport.finish(status, text)


# Messages

CONTENTS = [b"", b"a", b"b" * 5, b"", b"c" * 127, b"d" * 70_000, b"e" * 20]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 11, 1_000, 16_384])
def test_messages_arrive_whole_however_frames_cut_them(size: int) -> None:
    contents = CONTENTS if size > 100 else [c for c in CONTENTS if len(c) < 1_000]
    site = Site(keep)
    raw = data(1, b"".join(map(message, contents)), size=size)
    site.receive(headers(1) + raw)
    assert site.streams[0].received == contents
    assert site.connection._streams.partial_bytes == 0
    site.receive(headers(3), *(raw[at : at + 99] for at in range(0)))
    assert not site.faults


def test_a_message_in_one_frame_is_copied_once() -> None:
    """Of the pieces of a longer one those that are a good part of their read buffer are views."""
    site = Site(keep)
    site.receive(headers(1))
    content = bytes(12_000)
    before = sys.getrefcount(content)
    raw = data(1, message(content))
    site.receive(raw)
    assert site.streams[0].received == [content]
    assert sys.getrefcount(raw) == 2, "the read buffer is not kept"
    half = data(1, message(content)[:6_000])
    site.receive(half)
    assert sys.getrefcount(half) > 2, "a large piece is a view"
    site.receive(data(1, message(content)[6_000:]))
    assert sys.getrefcount(half) == 2
    tiny = headers(3) + data(1, message(content)[:600]) + frame(99, 0, 0, bytes(9_000))
    site.receive(tiny)
    assert sys.getrefcount(tiny) == 2, "a small piece must not hold a large buffer"
    assert sys.getrefcount(content) == before


def test_an_answer_longer_than_a_frame_is_not_copied() -> None:
    content = bytes(40_000)
    site = Site(lambda stream, _: stream.transport.send((content,)))
    site.connection.receive(headers(1) + data(1, message(b"x")), 1.0)
    pieces = site.connection._output.buffers
    assert sum(isinstance(piece, memoryview) and piece.obj is content for piece in pieces) == 3


def test_many_small_answers_are_one_buffer_and_few_large_ones_are_not_copied() -> None:
    start = PREFACE + settings(window=1 << 30) + SETTINGS_ACK + window_update(0, 1 << 30)
    for content, number, buffers in (
        (bytes(150), 1_000, 1),
        (bytes(20_000), 3, 1),
        (bytes(62_000), 5, 5 * 8 + 1),
    ):
        site = Site(lambda stream, _, c=content, n=number: stream.transport.send([c] * n))
        site.receive(start[24:] + headers(1))
        site.connection.receive(data(1, message(b"x")), 1.0)
        taken = site.connection.take_output()
        assert len(taken) == buffers
        assert site.answers(read_frames(b"".join(taken)))[1:] == [content] * number


def test_answers_of_any_size_arrive_in_order_through_any_windows() -> None:
    site = Site(
        lambda stream, _: stream.transport.send(CONTENTS), start=PREFACE + settings(window=0)
    )
    frames = site.receive(SETTINGS_ACK + headers(1) + data(1, message(b"x")))
    assert not of_kind(frames, DATA)
    for increment in (1, 4, 1, 5, 9, 200, 17_000, 16_384, 50_000):
        frames += site.receive(window_update(1, increment) + window_update(0, increment))
    assert site.answers(frames) == [RESPONSE, *CONTENTS]


def test_a_compressed_message_is_unimplemented_and_other_streams_go_on() -> None:
    site = Site()
    frames = site.receive(
        headers(1) + headers(3) + data(1, message(b"hi", 1)) + data(3, message(b"ho"))
    )
    refusal = site.answers(frames)[0]
    assert refusal["grpc-status"] == "12"
    assert refusal["grpc-accept-encoding"] == "identity"
    assert "compressed" in refusal["grpc-message"]
    assert site.answers(frames, 3)[1] == b"ho"
    assert site.streams[0].closes == 1
    assert site.reasons == ["bad-message"]


def test_a_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    site = Site(limits=Http2Limits(message_bytes_max=1_000))
    frames = site.receive(headers(1) + data(1, message(bytes(1_000)) + (1_001).to_bytes(5)))
    _, echoed, last = site.answers(frames)
    assert len(echoed) == 1_000
    assert last["grpc-status"] == "8"
    assert "1001 bytes" in last["grpc-message"]
    assert site.streams[0].closes == 1
    assert site.connection.streams_open == 0
    assert not site.receive(data(1, bytes(16_000))), "the rest is thrown away"


def test_an_answer_over_the_limit_ends_its_stream_and_is_not_sent() -> None:
    site = Site(
        lambda stream, _: stream.transport.send((b"ok", bytes(1_001), b"no")),
        limits=Http2Limits(message_bytes_max=1_000),
    )
    frames = site.receive(headers(1) + data(1, message(b"x")))
    assert site.answers(frames)[1] == b"ok"
    assert site.answers(frames)[2]["grpc-status"] == "8"
    assert site.reasons == ["message-too-large"]


def test_incomplete_messages_of_all_streams_together_are_bounded() -> None:
    site = Site(keep, limits=Http2Limits(partial_bytes_max=50_000))
    frames = []
    for stream_id in range(1, 21, 2):
        frames += site.receive(headers(stream_id) + data(stream_id, message(bytes(20_000))[:9_005]))
        assert site.connection._streams.partial_bytes <= 50_000
    assert len(resets(frames, ErrorCode.NO_ERROR)) == 5
    assert site.reasons == ["message-too-large"] * 5
    site.receive(b"".join(map(rst_stream, (1, 3, 5, 7, 9))))
    assert site.connection._streams.partial_bytes == 0


def test_a_message_cut_off_by_the_end_of_its_stream_is_an_error() -> None:
    for piece in (message(b"hi")[:3], message(b"hi")[:6]):
        site = Site()
        frames = site.receive(headers(1) + data(1, piece, END_STREAM))
        assert site.answers(frames)[0]["grpc-status"] == "13"
        assert not resets(frames)
        assert (site.streams[0].received, site.streams[0].closes) == ([], 1)


# Requests

REFUSED = {
    "method": (replaced(method="GET"), {":status": "405", "allow": "POST"}),
    "connect": (
        [(":method", "CONNECT"), (":authority", "epp:443")],
        {":status": "405", "allow": "POST"},
    ),
    "no content type": (
        replaced(content_type=None),
        {":status": "415", "accept": "application/grpc"},
    ),
    "json": (
        replaced(content_type="application/json"),
        {":status": "415", "accept": "application/grpc"},
    ),
    "grpc-web": (
        replaced(content_type="application/grpc-web"),
        {":status": "415", "accept": "application/grpc"},
    ),
    "unknown method": (
        replaced(path="/test.Service/Other"),
        {
            **RESPONSE,
            "grpc-status": "12",
            "grpc-message": "unknown method",
            "grpc-accept-encoding": "identity",
        },
    ),
    "a path with a query": (
        replaced(path=f"{PATH}?a=b"),
        {
            **RESPONSE,
            "grpc-status": "12",
            "grpc-message": "unknown method",
            "grpc-accept-encoding": "identity",
        },
    ),
    "timeout": (
        [*REQUEST, ("grpc-timeout", "1s")],
        {
            **RESPONSE,
            "grpc-status": "13",
            "grpc-message": "grpc-timeout is not 1 to 8 digits and one of H M S m u n",
        },
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_that_is_no_call_is_answered_at_once(what: str) -> None:
    fields, answer = REFUSED[what]
    site = Site()
    frames = site.receive(headers(1, fields) + headers(3, fields, LAST) + data(1, message(b"x")))
    assert site.answers(frames) == site.answers(frames, 3) == [answer]
    # Only a client that has not finished is told that it need not.
    assert resets(frames) == {1: ErrorCode.NO_ERROR}
    assert not site.streams
    assert len(site.faults) == 2
    site.receive(headers(5))
    assert len(site.streams) == 1


@pytest.mark.parametrize(
    "content_type", ["application/grpc", "application/grpc+proto", "Application/GRPC;charset=x"]
)
def test_any_grpc_content_type_is_taken(content_type: str) -> None:
    site = Site()
    site.receive(headers(1, replaced(content_type=content_type)))
    assert len(site.streams) == 1


def test_a_block_means_something_else_once_the_table_has_changed() -> None:
    site = Site()
    add = b"\x44" + bytes((len(PATH),)) + PATH.encode()  # :path, indexed
    rest = b"\x83\x86\x0f\x10\x10application/grpc"
    site.receive(frame(1, 4, 1, b"\x83\x86" + add + rest[2:]))
    for stream_id in (3, 5):
        site.receive(frame(1, 4, stream_id, b"\x83\x86\xbe" + rest[2:]))
    assert len(site.streams) == 3
    other = b"\x44\x06/a.B/C"
    frames = site.receive(frame(1, 4, 7, b"\x83\x86" + other + rest[2:]))
    frames += site.receive(frame(1, 4, 9, b"\x83\x86\xbe" + rest[2:]))
    assert [site.answers(frames, i)[0]["grpc-status"] for i in (7, 9)] == ["12", "12"]
    site.receive(frame(1, 4, 11, b"\x83\x86\xbf" + rest[2:]))
    assert len(site.streams) == 4
    # Trailers change the table too.
    site.receive(frame(1, 5, 11, b"\x40\x01a\x01b"))
    site.receive(frame(1, 4, 13, b"\x83\x86\xbf" + rest[2:]))
    assert len(site.streams) == 4
    assert not resets(site.receive(b""))


def test_a_full_server_refuses_with_resource_exhausted() -> None:
    room = [True, False, True]
    site = Site(may_open=lambda: room.pop(0))
    frames = site.receive(headers(1) + headers(3) + headers(5))
    assert site.answers(frames, 3)[0]["grpc-status"] == "8"
    assert site.connection.streams_open == 2
    assert site.reasons == ["refused-stream"]


# Ends


def test_A24_a_reset_is_a_normal_end_and_closes_once() -> None:
    site = Site()
    frames = site.receive(headers(1) + data(1, message(b"hi")) + rst_stream(1, 2))
    assert site.answers(frames)[1] == b"hi"
    assert not resets(frames)
    assert site.streams[0].closes == 1
    assert not site.faults
    assert site.connection.streams_open == 0
    transport = site.streams[0].transport
    transport.send((b"late",))
    transport.finish(0)
    assert not site.take()
    assert site.wakes == 0


def test_A24_an_end_of_stream_and_a_reset_behind_it_close_once() -> None:
    half_close, reset = data(1, b"", END_STREAM), rst_stream(1)
    for raws in ([half_close + reset], [half_close, reset]):
        site = Site(keep)
        site.receive(headers(1) + data(1, message(b"hi")))
        frames = site.receive(*raws)
        assert site.answers(frames) == [{**RESPONSE, **OK}]
        assert site.streams[0].closes == 1
        assert not site.faults


def test_a_half_close_ends_the_stream_after_what_was_sent() -> None:
    site = Site()
    frames = site.receive(headers(1) + data(1, message(b"a") + message(b"b"), END_STREAM))
    assert site.answers(frames) == [RESPONSE, b"a", b"b", OK]
    assert not resets(frames)
    assert site.streams[0].closes == 1
    frames = site.receive(headers(3, flags=LAST))
    assert site.answers(frames, 3) == [{**RESPONSE, **OK}]
    assert site.streams[1].closes == 1


def test_a_watch_outlives_the_half_close() -> None:
    site = Site()
    watch = headers(1, replaced(path=WATCH)) + data(1, message(b"x"), END_STREAM)
    frames = site.receive(watch)
    assert site.answers(frames) == [RESPONSE, b"x"]
    assert site.streams[0].closes == 0
    site.streams[0].transport.send((b"news",))
    site.streams[0].transport.finish(14, "bye")
    assert site.wakes == 1
    frames = site.take()
    assert site.answers(frames) == [b"news", {"grpc-status": "14", "grpc-message": "bye"}]
    assert not resets(frames)
    assert site.streams[0].closes == 1


def test_finish_in_a_message_sends_no_more_and_reads_no_more() -> None:
    def answer(stream, _content):
        stream.transport.send((b"last",))
        stream.transport.finish(5, "gone")
        assert stream.closes == 0, "not in the middle of its own message"
        stream.transport.send((b"no",))
        stream.transport.finish(0)

    site = Site(answer)
    more = message(b"b") + message(b"compressed", 1)
    frames = site.receive(headers(1) + data(1, message(b"a") + more) + data(1, b"xyz"))
    assert not site.faults
    assert site.answers(frames) == [
        RESPONSE,
        b"last",
        {"grpc-status": "5", "grpc-message": "gone"},
    ]
    assert resets(frames) == {1: ErrorCode.NO_ERROR}
    assert (site.streams[0].received, site.streams[0].closes) == ([b"a"], 1)


def test_an_answer_from_another_callback_wakes_the_edge_once() -> None:
    site = Site(keep)
    site.receive(headers(1) + data(1, message(b"a")) + headers(3) + data(3, message(b"b")))
    assert site.wakes == 0
    first, second = (stream.transport for stream in site.streams)
    first.send((b"1",))
    second.send((b"2",))
    first.finish(0)
    assert site.wakes == 1
    assert site.streams[0].closes == 0
    frames = site.take()
    assert site.answers(frames) == [RESPONSE, b"1", OK]
    assert site.streams[0].closes == 1
    second.finish(0)
    assert site.wakes == 2


def test_a_stream_may_answer_and_finish_another_one() -> None:
    def answer(stream, content):
        if content == b"go":
            site.streams[0].transport.send((b"now",))
            site.streams[0].transport.finish(0)

    site = Site(answer)
    frames = site.receive(headers(1) + data(1, message(b"wait")))
    frames += site.receive(headers(3) + data(3, message(b"go")) + data(1, message(b"late")))
    assert site.answers(frames) == [RESPONSE, b"now", OK]
    assert (site.streams[0].received, site.streams[0].closes) == ([b"wait"], 1)
    assert site.wakes == 0


def test_trailers_wait_for_the_messages_that_flow_control_holds_back() -> None:
    def answer(stream, content):
        stream.transport.send((content,))
        stream.transport.finish(3, "why")

    site = Site(answer, start=PREFACE + settings(window=4) + SETTINGS_ACK)
    frames = site.receive(headers(1) + data(1, message(b"hello")))
    assert not frames[-1].flags & END_STREAM
    assert site.streams[0].closes == 1
    assert site.connection.streams_open == 1
    frames += site.receive(data(1, message(b"ignored")) + window_update(1, 100))
    assert site.answers(frames) == [
        RESPONSE,
        b"hello",
        {"grpc-status": "3", "grpc-message": "why"},
    ]
    assert site.connection.streams_open == 0


def test_a_factory_may_refuse_at_once() -> None:
    class Refused:
        def on_message(self, _content):
            raise AssertionError

        def on_close(self):
            closes.append(self)

    def factory(transport):
        transport.finish(8, "full")
        return Refused()

    closes: list[Refused] = []
    site = Site(handlers={PATH: factory})
    frames = site.receive(headers(1) + data(1, message(b"x")))
    assert site.answers(frames)[0]["grpc-status"] == "8"
    assert len(closes) == 1
    assert not site.faults


@pytest.mark.parametrize("where", ["factory", "message", "close"])
def test_a_bug_in_a_stream_ends_that_stream_only(where: str) -> None:
    bug = RuntimeError("a bug")

    class Buggy:
        def __init__(self, transport):
            if where == "factory":
                raise bug
            self.transport = transport

        def on_message(self, content):
            if where == "message":
                raise bug
            self.transport.send((content,))

        def on_close(self):
            if where == "close":
                raise bug

    site = Site()
    site.connection._streams._requests._handlers = {
        PATH: site._open,
        WATCH: lambda transport: Buggy(transport),
    }
    frames = site.receive(headers(1, replaced(path=WATCH)) + data(1, message(b"hi")))
    frames += site.receive(headers(3) + data(3, message(b"ho")) + rst_stream(1))
    assert site.answers(frames, 3)[1] == b"ho"
    assert [(f.reason, f.error) for f in site.faults if f.error] == [("bug", bug)]
    if where != "close":
        last = site.answers(frames)[-1]
        assert (last["grpc-status"], last["grpc-message"]) == ("13", "internal error")
    assert site.connection.streams_open == 1


def test_a_lost_connection_closes_every_stream_once() -> None:
    site = Site(keep)
    site.receive(headers(1) + headers(3) + data(3, message(bytes(100))[:50]))
    site.connection.lost()
    site.connection.lost()
    assert [stream.closes for stream in site.streams] == [1, 1]
    assert site.connection.closed
    assert not site.take()
    site.streams[0].transport.send((b"late",))
    site.streams[0].transport.finish(0)
    assert not site.take()
    assert site.wakes == 0
    assert site.connection.streams_open == 0


def test_a_call_leaves_nothing_behind() -> None:
    site = Site()
    for stream_id in range(1, 41, 2):
        site.receive(headers(stream_id) + data(stream_id, message(b"hi")))
        site.receive(rst_stream(stream_id))
    gone = [weakref.ref(stream) for stream in site.streams]
    site.streams.clear()
    gc.collect()
    assert not any(ref() for ref in gone)


# Status and deadline


@pytest.mark.parametrize("status", range(17))
def test_any_status_and_message_reach_the_client(status: int) -> None:
    text = "100 % é\n\u2028\U0001f600 \x7f"
    site = Site(finish_with(status, text))
    frames = site.receive(headers(1) + data(1, message(b"x")))
    last = site.answers(frames)[0]
    assert last["grpc-status"] == str(status)
    assert last["grpc-message"] == "100 %25 %C3%A9%0A%E2%80%A8%F0%9F%98%80 %7F"


def test_a_long_message_is_cut_and_a_broken_one_sent_as_it_can_be() -> None:
    assert len(percent_encode("x" * 5_000)) == MESSAGE_BYTES_MAX
    encoded = percent_encode("é" * 5_000)
    assert len(encoded) <= MESSAGE_BYTES_MAX
    assert len(encoded) % 3 == 0
    assert percent_encode("\ud800") == b"?"


def test_the_status_numbers_are_those_of_grpc() -> None:
    for status in Status:
        assert grpc.StatusCode[status.name].value[0] == status


@pytest.mark.parametrize(
    ("value", "s"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0n", 0.0),
        (b"99999999H", 99999999 * 3600.0),
        (b"123456789S", None),
        (b"1", None),
        (b"S", None),
        (b"-1S", None),
        (b"1.5S", None),
        (b"1 S", None),
        (b"", None),
        (b"1S\n", None),
    ],
)
def test_timeouts_are_read_as_grpc_writes_them(value: bytes, s: float | None) -> None:
    assert read_timeout(value) == (None if s is None else pytest.approx(s))


def timed(timeout: str):
    return [*REQUEST, ("grpc-timeout", timeout)]


def test_a_call_ends_at_its_deadline_and_not_before() -> None:
    site = Site(keep)
    site.receive(headers(1, timed("2S")) + headers(3, timed("1S")) + headers(5))
    assert site.connection.next_deadline_s() == site.now_s + 1
    assert not site.wait(0.999)
    frames = site.wait(0.002)
    assert site.answers(frames, 3)[0]["grpc-status"] == "4"
    assert [stream.closes for stream in site.streams] == [0, 1, 0]
    frames = site.wait(1)
    assert site.answers(frames, 1)[0]["grpc-status"] == "4"
    assert site.connection.streams_open == 1


def test_a_deadline_in_the_middle_of_a_message_resets() -> None:
    site = Site(start=PREFACE + settings(window=4) + SETTINGS_ACK)
    site.receive(headers(1, timed("1S")) + data(1, message(b"hello")))
    assert resets(site.wait(1)) == {1: ErrorCode.CANCEL}
    assert site.streams[0].closes == 1


def test_deadlines_of_ended_calls_are_forgotten() -> None:
    site = Site()
    for stream_id in range(1, 20_001, 2):
        site.receive(headers(stream_id, timed("9999H")) + data(stream_id, message(b"x")))
        site.receive(rst_stream(stream_id))
    deadlines = site.connection._streams.deadlines
    assert len(deadlines) == 0
    assert len(deadlines._heap) <= 64
    assert not site.faults
