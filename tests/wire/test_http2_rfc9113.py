"""What RFC 9113 says a server must do, frame by frame; docs/http2.md is the list."""

from __future__ import annotations

import pytest

from epp.wire.http2.connection import ErrorCode, Http2Limits
from tests.wire.http2_peer import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PATH,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    START,
    WATCH,
    WINDOW_UPDATE,
    Site,
    data,
    frame,
    goaways,
    headers,
    keep,
    literals,
    message,
    of_kind,
    read_frames,
    replaced,
    resets,
    rst_stream,
    settings,
    window_update,
)

PROTOCOL, FLOW, CLOSED, SIZE, COMPRESSION = (
    ErrorCode.PROTOCOL_ERROR,
    ErrorCode.FLOW_CONTROL_ERROR,
    ErrorCode.STREAM_CLOSED,
    ErrorCode.FRAME_SIZE_ERROR,
    ErrorCode.COMPRESSION_ERROR,
)
OPEN = headers(1)
WINDOW_MAX = 2**31 - 1


# 3.4 Preface


def test_we_start_with_settings_and_acknowledge_those_of_the_client() -> None:
    site = Site(start=b"", limits=Http2Limits(streams_max=77, stream_window_bytes=70_000))
    frames = site.take()
    assert [f.kind for f in frames] == [SETTINGS, WINDOW_UPDATE]
    values = {
        frames[0].payload[at + 1]: frames[0].payload[at + 2 : at + 6] for at in (0, 6, 12, 18)
    }
    assert values[3] == (77).to_bytes(4)
    assert values[4] == (70_000).to_bytes(4)
    assert site.receive(START) == [(SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nHost: epp\r\n\r\n",
        b"PRI * HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01",
        PREFACE + SETTINGS_ACK,
        PREFACE + frame(PING, payload=bytes(8)),
        PREFACE + OPEN,
    ],
)
def test_anything_but_the_preface_and_settings_ends_the_connection_at_once(start: bytes) -> None:
    for pieces in ([start], [start[:1], start[1:]], [bytes((byte,)) for byte in start]):
        site = Site(start=b"")
        frames = site.receive(*pieces)
        assert site.connection.closed
        assert not site.streams
        assert goaways(frames) == [(0, PROTOCOL)]
        assert site.reasons == ["bad-preface"]


# 4 Frames, 6 definitions: violations that end the connection.

VIOLATIONS = {
    "4.2 a frame above SETTINGS_MAX_FRAME_SIZE": (frame(DATA, 0, 1, bytes(16_385)), SIZE),
    "4.2 the same, told by its head alone": (frame(PING, 0, 0, bytes(16_385))[:9], SIZE),
    "4.3 a block that is not HPACK": (frame(HEADERS, 4, 3, b"\x80"), COMPRESSION),
    "4.3 trailers that are not HPACK": (frame(HEADERS, 5, 1, b"\xff"), COMPRESSION),
    "5.1 DATA on an idle stream": (data(3, b"x"), PROTOCOL),
    "5.1 RST_STREAM on an idle stream": (rst_stream(3), PROTOCOL),
    "5.1 WINDOW_UPDATE on an idle stream": (window_update(3, 1), PROTOCOL),
    "5.1 RST_STREAM on a stream of ours": (rst_stream(2), PROTOCOL),
    "5.1.1 HEADERS on an even stream": (headers(2), PROTOCOL),
    "5.1.1 HEADERS on a stream skipped": (headers(9) + headers(5), PROTOCOL),
    "5.1 HEADERS on a stream that its client reset": (rst_stream(1) + headers(1), CLOSED),
    "5.1 HEADERS on a stream that ended on both sides": (
        data(1, b"", END_STREAM) + headers(1, flags=END_HEADERS | END_STREAM),
        CLOSED,
    ),
    "6.1 DATA on stream 0": (data(0, b"x"), PROTOCOL),
    "6.1 padding as long as the payload": (frame(DATA, PADDED, 1, b"\x01"), PROTOCOL),
    "6.1 padding in an empty frame": (frame(DATA, PADDED, 1), PROTOCOL),
    "6.2 HEADERS on stream 0": (headers(0), PROTOCOL),
    "6.2 padding longer than HEADERS": (frame(HEADERS, 4 | PADDED, 3, b"\x05abc"), PROTOCOL),
    "6.2 HEADERS too short for a priority": (
        frame(HEADERS, 4 | HAS_PRIORITY, 3, bytes(4)),
        PROTOCOL,
    ),
    "6.3 PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    "6.3 PRIORITY of four bytes": (frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    "6.4 RST_STREAM on stream 0": (rst_stream(0), PROTOCOL),
    "6.4 RST_STREAM of three bytes": (frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    "6.5 SETTINGS on a stream": (frame(SETTINGS, 0, 1), PROTOCOL),
    "6.5 SETTINGS of five bytes": (frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    "6.5 an ACK with content": (frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    "6.5.2 ENABLE_PUSH of 2": (settings(enable_push=2), PROTOCOL),
    "6.5.2 INITIAL_WINDOW_SIZE above the maximum": (settings(window=2**31), FLOW),
    "6.5.2 MAX_FRAME_SIZE below the minimum": (settings(frame_size=16_383), PROTOCOL),
    "6.5.2 MAX_FRAME_SIZE above the maximum": (settings(frame_size=2**24), PROTOCOL),
    "6.5.3 a value out of range before a good one": (
        frame(SETTINGS, 0, 0, settings(enable_push=2)[9:] + settings(enable_push=0)[9:]),
        PROTOCOL,
    ),
    "6.6 PUSH_PROMISE": (frame(PUSH_PROMISE, 4, 1, bytes(4)), PROTOCOL),
    "6.7 PING on a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "6.7 PING of seven bytes": (frame(PING, 0, 0, bytes(7)), SIZE),
    "6.8 GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "6.8 GOAWAY of seven bytes": (frame(GOAWAY, 0, 0, bytes(7)), SIZE),
    "6.9 WINDOW_UPDATE of 0": (window_update(0, 0), PROTOCOL),
    "6.9 WINDOW_UPDATE of three bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "6.9.1 a window above the maximum": (window_update(0, WINDOW_MAX), FLOW),
    "6.9.2 a stream's window above it by SETTINGS": (
        window_update(1, WINDOW_MAX - 65_535) + settings(window=65_536),
        FLOW,
    ),
    "6.10 CONTINUATION without HEADERS": (frame(CONTINUATION, 4, 1, b""), PROTOCOL),
    "6.10 DATA inside a header block": (headers(3, flags=0) + data(1, b"x"), PROTOCOL),
    "6.10 an unknown frame inside a header block": (headers(3, flags=0) + frame(99), PROTOCOL),
    "6.10 CONTINUATION of another stream": (
        headers(3, flags=0) + frame(CONTINUATION, 4, 1),
        PROTOCOL,
    ),
}


@pytest.mark.parametrize("rule", VIOLATIONS)
@pytest.mark.parametrize("size", [1_000_000, 1])
def test_a_violation_ends_the_connection_with_the_code_for_it(rule: str, size: int) -> None:
    raw, code = VIOLATIONS[rule]
    site = Site(keep)
    site.receive(OPEN)
    assert not site.faults
    last = 9 if "skipped" in rule else 1
    raw += b"" if "head alone" in rule else OPEN
    frames = site.receive(*(raw[at : at + size] for at in range(0, len(raw), size)))
    assert [code for _, code in goaways(frames)] == [code]
    if "4.3" not in rule:
        assert goaways(frames)[0][0] == last
    assert site.connection.closed
    assert site.connection.streams_open == 0
    assert all(stream.closes == 1 for stream in site.streams)
    assert len(site.faults) == 1
    assert site.faults[0].code == code
    assert site.receive(headers(11)) == []
    assert site.connection.next_deadline_s() is None


# Violations that end their stream only.

STREAM_VIOLATIONS = {
    "5.1 DATA after END_STREAM": (data(1, b"x"), CLOSED, True),
    "5.1 trailers after END_STREAM": (headers(1, (), 5), CLOSED, True),
    "6.9 WINDOW_UPDATE of 0": (window_update(1, 0), PROTOCOL, False),
    "6.9.1 a window above the maximum": (window_update(1, WINDOW_MAX), FLOW, False),
    "8.1 trailers without END_STREAM": (headers(1, (), 4), PROTOCOL, False),
    "8.1 a pseudo-header in trailers": (headers(1, ((":path", "/"),), 5), PROTOCOL, False),
    "8.2 a bad name in trailers": (headers(1, (("a b", "c"),), 5), PROTOCOL, False),
}


@pytest.mark.parametrize("rule", STREAM_VIOLATIONS)
def test_a_stream_error_ends_its_stream_and_no_other(rule: str) -> None:
    raw, code, half_closed = STREAM_VIOLATIONS[rule]
    site = Site(keep)
    # The watch lives on after its client has half-closed.
    flags = END_HEADERS | (END_STREAM if half_closed else 0)
    site.receive(headers(1, replaced(path=WATCH), flags))
    frames = site.receive(raw + headers(3))
    assert resets(frames) == {1: code}
    assert not goaways(frames)
    assert [stream.closes for stream in site.streams] == [1, 0]
    assert site.connection.streams_open == 1
    assert [f.stream_id for f in site.faults] == [1]


def test_5_1_data_after_a_reset_by_the_client_is_a_stream_error() -> None:
    site = Site(keep)
    frames = site.receive(OPEN + rst_stream(1) + data(1, b"x") + headers(3))
    assert resets(frames) == {1: CLOSED}
    assert site.connection.streams_open == 1


def test_5_1_frames_under_way_when_we_ended_a_stream_are_ignored() -> None:
    site = Site(lambda stream, _: stream.transport.finish(0))
    trailers = headers(1, (("x", "y"),), END_HEADERS | END_STREAM)
    late = data(1, b"x" * 100) + window_update(1, 5) + trailers + rst_stream(1)
    frames = site.receive(OPEN + data(1, message(b"hi")) + late)
    assert resets(frames) == {1: ErrorCode.NO_ERROR}
    assert not site.faults
    assert site.streams[0].closes == 1
    # Their header block still counts for the dynamic table.
    block = b"\x40\x01a\x01b"
    site.receive(frame(HEADERS, 5, 1, block))
    site.receive(frame(HEADERS, 4, 3, literals(REQUEST) + b"\xbe"))
    assert len(site.streams) == 2
    assert not site.faults


def test_5_1_window_update_and_priority_on_an_ended_stream_mean_nothing() -> None:
    site = Site()
    late = window_update(1, 1) + window_update(1, 0) + frame(PRIORITY, 0, 1, bytes(5))
    assert site.receive(OPEN + rst_stream(1) + late + rst_stream(1)) == [
        f for f in site.receive(b"") if f
    ]
    assert not site.faults
    assert not site.connection.closed


def test_4_1_the_reserved_bit_and_unknown_flags_frames_and_settings_are_ignored() -> None:
    site = Site()
    content = data(1, message(b"hi"), 0xF6)
    raw = OPEN[:5] + bytes((OPEN[5] | 0x80,)) + OPEN[6:] + content
    unknown = frame(0x2A, 0xFF, 77, b"grease") + frame(
        SETTINGS, 0xFE, 0, b"\x0a\x0a\xff\xff\xff\xff"
    )
    frames = site.receive(unknown + raw)
    assert site.answers(frames)[1] == b"hi"
    assert not site.faults


def test_4_3_a_header_block_may_be_cut_into_any_frames() -> None:
    block = literals(REQUEST)
    for size in (1, 5, 50):
        site = Site(limits=Http2Limits(continuations_max=len(block) + 1))
        first, *rest = [block[at : at + size] for at in range(0, len(block), size)] + [b""]
        raw = frame(HEADERS, 0, 1, first)
        raw += b"".join(frame(CONTINUATION, 0, 1, piece) for piece in rest)
        site.receive(raw + frame(CONTINUATION, END_HEADERS, 1, b""))
        assert len(site.streams) == 1
        assert not site.faults


def test_6_1_padding_is_not_content_but_counts_for_flow_control() -> None:
    site = Site(limits=Http2Limits(stream_window_bytes=100))
    padded = frame(DATA, PADDED, 1, b"\x0a" + message(b"hi") + bytes(10))
    frames = site.receive(OPEN + padded)
    assert site.answers(frames)[1] == b"hi"
    assert not of_kind(frames, WINDOW_UPDATE)
    frames = site.receive(frame(DATA, PADDED, 1, b"\x28" + bytes(40)))
    assert of_kind(frames, WINDOW_UPDATE) == [(WINDOW_UPDATE, 0, 1, (59).to_bytes(4))]


def test_6_1_padding_counts_for_the_connection_too() -> None:
    site = Site(keep, limits=Http2Limits(connection_window_bytes=65_535))
    site.receive(OPEN + data(1, message(bytes(40_000))[:100]))
    padded = frame(DATA, PADDED, 1, b"\xff" + bytes(400) + bytes(255))
    frames = [f for _ in range(60) for f in site.receive(padded)]
    given = [int.from_bytes(f.payload) for f in of_kind(frames, WINDOW_UPDATE)]
    assert len(given) == 1
    assert given[0] >= 32_768
    assert not site.faults


def test_6_2_padding_and_priority_of_headers_are_stepped_over() -> None:
    site = Site()
    block = literals(REQUEST)
    site.receive(frame(HEADERS, 4 | PADDED, 1, b"\x03" + block + bytes(3)))
    site.receive(frame(HEADERS, 4 | HAS_PRIORITY, 3, bytes(5) + block))
    payload = b"\x02" + bytes(5) + block + bytes(2)
    site.receive(frame(HEADERS, 4 | PADDED | HAS_PRIORITY, 5, payload))
    assert len(site.streams) == 3
    assert not site.faults


def test_6_7_a_ping_is_answered_with_its_content_and_an_answer_is_not() -> None:
    site = Site()
    frames = site.receive(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"unasked!"))
    assert frames == [(PING, ACK, 0, b"12345678")]


def test_6_8_a_client_that_says_goaway_is_served_to_the_end_of_its_streams() -> None:
    site = Site()
    frames = site.receive(OPEN + frame(GOAWAY, 0, 0, bytes(8)) + data(1, message(b"hi")))
    assert site.answers(frames)[1] == b"hi"
    assert not site.connection.closed


# 6.9 Flow control


def test_6_9_we_send_no_more_than_the_windows_allow() -> None:
    content = bytes(range(256)) * 400
    site = Site(lambda stream, _: stream.transport.send((content, b"end")))
    frames = site.receive(OPEN + data(1, message(b"go")))
    sent = of_kind(frames, DATA)
    assert sum(len(f.payload) for f in sent) == 65_535
    assert max(len(f.payload) for f in sent) <= 16_384
    assert not site.receive(window_update(1, 1_000)), "the connection's window is empty"
    frames += site.receive(window_update(0, 10))
    assert len(frames[-1].payload) == 10
    frames += site.receive(window_update(0, 1 << 20))
    assert sum(len(f.payload) for f in of_kind(frames, DATA)) == 65_535 + 1_000
    frames += site.receive(window_update(1, 1 << 20))
    assert site.answers(frames)[1:] == [content, b"end"]


def test_4_2_frames_are_as_long_as_the_client_says_up_to_our_bound() -> None:
    start = PREFACE + settings(frame_size=2**24 - 1, window=1 << 30) + SETTINGS_ACK
    site = Site(
        lambda stream, _: stream.transport.send((bytes(3_000_000),)),
        start=start + window_update(0, 1 << 30),
    )
    frames = site.receive(OPEN + data(1, message(b"x")))
    assert max(len(f.payload) for f in of_kind(frames, DATA)) == 1 << 20
    site.receive(settings(frame_size=16_384))
    frames = site.receive(data(1, message(b"x")))
    assert max(len(f.payload) for f in of_kind(frames, DATA)) == 16_384


def test_6_9_small_answers_of_many_streams_share_the_connections_window() -> None:
    site = Site()
    frames = []
    for stream_id in range(1, 201, 2):
        frames += site.receive(headers(stream_id) + data(stream_id, message(bytes(995))))
    assert sum(len(f.payload) for f in of_kind(frames, DATA)) == 65_535
    frames += site.receive(window_update(0, 1 << 20))
    for stream_id in range(1, 201, 2):
        assert site.answers([f for f in frames if f.stream_id == stream_id], stream_id)[1:] == [
            bytes(995)
        ]


def test_6_9_2_a_smaller_initial_window_may_make_windows_negative() -> None:
    site = Site(keep, start=PREFACE + settings(window=100) + SETTINGS_ACK)
    site.receive(OPEN)
    transport = site.streams[0].transport
    transport.send((bytes(75),))  # 80 with its prefix; 20 are left
    frames = site.take()
    site.receive(settings(window=30))  # -50
    transport.send((bytes(45),))
    assert not site.take()
    assert not of_kind(site.receive(window_update(1, 50)), DATA), "the window is 0"
    frames += site.receive(window_update(1, 1))
    assert len(frames[-1].payload) == 1
    frames += site.receive(settings(window=300))
    assert site.answers(frames)[1:] == [bytes(75), bytes(45)]


def test_6_9_2_a_larger_initial_window_lets_every_waiting_stream_go_on() -> None:
    site = Site(start=PREFACE + settings(window=0) + SETTINGS_ACK)
    frames = []
    for stream_id in (1, 3, 5):
        frames += site.receive(headers(stream_id) + data(stream_id, message(b"hi")))
    assert not of_kind(frames, DATA)
    frames += site.receive(settings(window=100))
    assert all(site.answers(frames, stream_id)[1] == b"hi" for stream_id in (1, 3, 5))


def test_6_9_1_more_than_our_windows_is_refused() -> None:
    limits = Http2Limits(stream_window_bytes=1_000, outbox_bytes_high=10)
    site = Site(limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    frames = site.receive(OPEN + data(1, message(bytes(995))))
    assert not resets(frames)
    frames = site.receive(headers(3) + data(1, b"x") + data(3, message(b"hi")))
    assert resets(frames) == {1: FLOW}
    assert site.streams[1].received == [b"hi"]

    limits = Http2Limits(connection_window_bytes=65_535, outboxes_bytes_high=10)
    site = Site(limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    frames = site.receive(OPEN + data(1, message(bytes(95))) + data(1, message(bytes(65_430))))
    assert not goaways(frames)
    assert goaways(site.receive(data(1, b"x"))) == [(1, FLOW)]


def test_6_9_room_is_given_back_before_the_client_runs_out() -> None:
    limits = Http2Limits(stream_window_bytes=1_000, connection_window_bytes=65_535)
    site = Site(keep, limits=limits)
    stream, connection = 1_000, 65_535
    site.receive(OPEN + data(1, (1 << 20).to_bytes(5)))
    stream, connection = stream - 5, connection - 5
    for _ in range(2_000):
        size = min(333, stream, connection)
        assert size > 0
        stream, connection = stream - size, connection - size
        for f in of_kind(site.receive(data(1, bytes(size))), WINDOW_UPDATE):
            increment = int.from_bytes(f.payload)
            stream += increment if f.stream_id else 0
            connection += 0 if f.stream_id else increment
    assert not site.faults


def test_6_9_data_that_is_thrown_away_counts_for_the_connection() -> None:
    site = Site(keep, limits=Http2Limits(connection_window_bytes=65_535))
    site.receive(OPEN)
    site.streams[0].transport.finish(0)
    site.take()
    frames = [f for _ in range(3) for f in site.receive(data(1, bytes(16_384)))]
    assert sum(int.from_bytes(f.payload) for f in of_kind(frames, WINDOW_UPDATE)) >= 32_768
    assert {f.stream_id for f in of_kind(frames, WINDOW_UPDATE)} == {0}


# 8 Requests

MALFORMED = {
    "8.3.1 no method": replaced(method=None),
    "8.3.1 no scheme": replaced(scheme=None),
    "8.3.1 no path": replaced(path=None),
    "8.3.1 an empty path": replaced(path=""),
    "8.3.1 a path that is none": replaced(path="test.Service/Call"),
    "8.3 an unknown pseudo-header": [(":protocol", "x"), *REQUEST],
    "8.3 a pseudo-header of responses": [(":status", "200"), *REQUEST],
    "8.3 a pseudo-header twice": [REQUEST[0], *REQUEST],
    "8.3 a pseudo-header behind a field": [*replaced(authority=None), (":authority", "b")],
    "8.2.1 an upper-case name": [*REQUEST, ("Accept", "x")],
    "8.2.1 an empty name": [*REQUEST, ("", "x")],
    "8.2.1 a space in a name": [*REQUEST, ("a b", "x")],
    "8.2.1 a colon in a name": [*REQUEST, ("a:b", "x")],
    "8.2.1 a byte above ASCII in a name": [*REQUEST, ("é", "x")],
    "8.2.1 a line feed in a value": [*REQUEST, ("a", "x\ny")],
    "8.2.1 a carriage return in a value": [*REQUEST, ("a", "x\ry")],
    "8.2.1 a zero in a value": [*REQUEST, ("a", "x\0y")],
    "8.2.1 a space before a value": [*REQUEST, ("a", " x")],
    "8.2.1 a tab behind a value": [*REQUEST, ("a", "x\t")],
    "8.2.1 a zero in a pseudo-header": replaced(path="/a\0b"),
    "8.2.2 connection": [*REQUEST, ("connection", "close")],
    "8.2.2 keep-alive": [*REQUEST, ("keep-alive", "1")],
    "8.2.2 proxy-connection": [*REQUEST, ("proxy-connection", "x")],
    "8.2.2 transfer-encoding": [*REQUEST, ("transfer-encoding", "chunked")],
    "8.2.2 upgrade": [*REQUEST, ("upgrade", "h2c")],
    "8.2.2 te": replaced(te="gzip"),
    "8.1.1 content-length that is no number": [*REQUEST, ("content-length", "-1")],
    "8.1.1 two content-lengths": [*REQUEST, ("content-length", "1"), ("content-length", "2")],
    "8.5 CONNECT with a path": replaced(method="CONNECT"),
}


@pytest.mark.parametrize("rule", MALFORMED)
def test_8_a_malformed_request_ends_its_stream(rule: str) -> None:
    site = Site()
    frames = site.receive(headers(1, MALFORMED[rule]) + headers(3))
    assert resets(frames) == {1: PROTOCOL}
    assert site.reasons == ["malformed-request"]
    assert len(site.streams) == 1
    assert site.connection.streams_open == 1
    # The same block again, which is remembered now.
    assert resets(site.receive(headers(5, MALFORMED[rule]))) == {5: PROTOCOL}


@pytest.mark.parametrize(
    "fields",
    [
        [*REQUEST, ("a", "")],
        [*REQUEST, ("a", "x y\tz")],
        [*REQUEST, ("a", "caf\xe9")],
        [*REQUEST, ("cookie", "a=1"), ("cookie", "b=2")],
        [*REQUEST, ("!#$%&'*+-.^_`|~09az", "x")],
        replaced(te=None),
        replaced(te="Trailers"),
        replaced(authority=None),
        replaced(scheme="https"),
    ],
)
def test_8_what_is_allowed_is_served(fields) -> None:
    site = Site()
    site.receive(headers(1, fields))
    assert len(site.streams) == 1
    assert not site.faults


@pytest.mark.parametrize(("promised", "sent"), [(7, 6), (7, 8), (0, 7), (7, 0)])
def test_8_1_1_content_must_be_as_long_as_promised(promised: int, sent: int) -> None:
    site = Site(keep)
    fields = [*REQUEST, ("content-length", str(promised))]
    frames = site.receive(headers(1, fields) + data(1, bytes(sent), END_STREAM))
    assert resets(frames) == {1: PROTOCOL}
    assert site.streams[0].closes == 1
    site.receive(headers(3, fields) + data(3, bytes(promised), END_STREAM))
    assert [f.stream_id for f in site.faults] == [1] or promised == 7


def test_8_1_1_content_of_the_promised_length_is_fine() -> None:
    site = Site()
    content = message(b"hi")
    fields = [*REQUEST, ("content-length", str(len(content)))]
    padded = frame(DATA, PADDED, 1, b"\x02" + content[:3] + bytes(2))
    frames = site.receive(headers(1, fields) + padded + data(1, content[3:], END_STREAM))
    assert site.answers(frames)[1] == b"hi"
    assert not site.faults


def test_8_1_trailers_end_a_request() -> None:
    site = Site()
    trailers = headers(1, (("x-checksum", "1"),), END_HEADERS | END_STREAM)
    frames = site.receive(OPEN + data(1, message(b"hi")) + trailers)
    assert site.answers(frames)[1:] == [b"hi", {"grpc-status": "0"}]
    assert not resets(frames)
    assert site.streams[0].closes == 1


def test_10_5_1_a_header_list_over_the_limit_is_answered_and_keeps_the_table_right() -> None:
    site = Site(limits=Http2Limits(header_list_bytes_max=1_000))
    big = b"\x40\x03big" + b"\x7f\x81\x06" + b"x" * 896 + b"\x40\x01a\x01b"
    frames = site.receive(frame(HEADERS, 4, 1, literals(REQUEST) + big))
    assert site.answers(frames)[0]["grpc-status"] == "8"
    assert site.reasons == ["headers-too-large"]
    site.receive(frame(HEADERS, 4, 3, literals(REQUEST) + b"\xbe"))
    assert len(site.streams) == 1


def test_5_1_2_a_stream_too_many_is_refused_and_a_place_is_free_again_later() -> None:
    site = Site(limits=Http2Limits(streams_max=2))
    frames = site.receive(b"".join(headers(stream_id) for stream_id in (1, 3, 5)))
    assert resets(frames) == {5: ErrorCode.REFUSED_STREAM}
    assert site.reasons == ["refused-stream"]
    assert not resets(site.receive(data(5, message(b"late")))), "it did not know"
    site.receive(rst_stream(1) + headers(7))
    assert site.connection.streams_open == 2
    assert len(site.streams) == 3


def test_hpack_4_2_a_smaller_table_is_acknowledged_in_the_next_block_and_once() -> None:
    site = Site(start=PREFACE + settings(header_table_size=0) + SETTINGS_ACK)
    site.decoder.max_allowed_table_size = 0
    frames = site.receive(OPEN + data(1, message(b"hi")) + headers(3) + data(3, message(b"ho")))
    blocks = [f.payload for f in of_kind(frames, HEADERS)]
    assert blocks[0] == b"\x20" + blocks[1]
    assert site.answers(frames)[1] == b"hi"


def test_hpack_4_2_of_several_table_sizes_in_one_frame_the_smallest_is_acknowledged() -> None:
    sizes = b"".join(b"\0\x01" + size.to_bytes(4, "big") for size in (0, 4_096))
    site = Site(start=PREFACE + frame(SETTINGS, 0, 0, sizes) + SETTINGS_ACK)
    frames = site.receive(OPEN + data(1, message(b"hi")) + headers(3) + data(3, message(b"ho")))
    blocks = [f.payload for f in of_kind(frames, HEADERS)]
    assert blocks[0] == b"\x20" + blocks[1]


def test_the_path_decides_before_anything_is_read_of_the_content() -> None:
    site = Site()
    frames = site.receive(headers(1, replaced(path=f"{PATH}2")) + data(1, bytes(10_000)))
    assert site.answers(frames)[0]["grpc-status"] == "12"
    assert not site.streams
    assert resets(frames) == {1: ErrorCode.NO_ERROR}
    assert read_frames(site.raw) == frames
