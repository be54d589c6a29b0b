"""From the first byte to the last: settling, keepalive, idleness, graceful end, back-pressure."""

from __future__ import annotations

import pytest

from epp.wire.http2.connection import ErrorCode, Http2Limits
from epp.wire.http2.streams import RecentlyEnded
from tests.wire.http2_peer import (
    ACK,
    GOAWAY,
    PING,
    PREFACE,
    SETTINGS_ACK,
    START,
    WINDOW_UPDATE,
    Site,
    data,
    frame,
    goaways,
    headers,
    keep,
    message,
    of_kind,
    read_frames,
    resets,
    rst_stream,
    settings,
    window_update,
)

ID_MAX = 2**31 - 1
ANY_ID = (ID_MAX, ErrorCode.NO_ERROR)


def pong(frames) -> bytes:
    """The answer to the last PING among these."""
    return frame(PING, ACK, 0, of_kind(frames, PING)[-1].payload)


@pytest.mark.parametrize("start", [b"", PREFACE[:10], PREFACE, PREFACE + settings()])
def test_a_client_that_does_not_get_ready_in_time_is_dropped(start: bytes) -> None:
    site = Site(start=start)
    assert not site.connection.closed
    site.wait(9.9)
    assert not site.connection.closed
    assert goaways(site.wait(0.2)) == [(0, ErrorCode.SETTINGS_TIMEOUT)]
    assert site.connection.closed
    assert site.reasons == ["settle-timeout"]


def test_requests_are_served_before_the_client_acknowledges() -> None:
    site = Site(start=PREFACE + settings() + headers(1) + data(1, message(b"hi")))
    assert site.streams[0].received == [b"hi"]
    site.wait(5)
    site.receive(SETTINGS_ACK)
    site.wait(30)
    assert not site.connection.closed


def test_a_quiet_client_is_pinged_and_lives_on_when_it_answers() -> None:
    site = Site(keep)
    site.receive(headers(1))
    for _ in range(5):
        frames = site.wait(60)
        assert [f.kind for f in frames] == [PING]
        site.wait(19)
        site.receive(pong(frames))
    assert not site.connection.closed
    assert not site.faults


def test_a_busy_client_is_not_pinged() -> None:
    site = Site()
    site.receive(headers(1))
    for _ in range(10):
        assert not of_kind(site.wait(59), PING)
        site.receive(data(1, message(b"hi")))


def test_A24_a_client_that_answers_no_ping_is_given_up_and_its_streams_closed() -> None:
    site = Site(keep)
    site.receive(headers(1) + headers(3))
    frames = site.wait(79.9)
    assert [f.kind for f in frames] == [PING]
    assert not site.connection.closed
    frames = site.wait(0.2)
    assert goaways(frames) == [(3, ErrorCode.NO_ERROR)]
    assert site.connection.closed
    assert site.reasons == ["keepalive-timeout"]
    assert [stream.closes for stream in site.streams] == [1, 1]


def test_any_byte_is_a_sign_of_life() -> None:
    site = Site(keep)
    site.wait(60)
    site.wait(19)
    site.receive(b"\0")
    assert not goaways(site.wait(19))


def test_an_idle_connection_ends_gracefully() -> None:
    site = Site(limits=Http2Limits(idle_s=30, keepalive_s=1_000))
    site.receive(headers(1))
    site.wait(100)
    assert not site.connection.closed
    site.receive(rst_stream(1))
    assert not site.wait(29.9)
    frames = site.wait(0.2)
    assert goaways(frames) == [ANY_ID]
    site.receive(headers(3) + data(3, message(b"just in time")))
    assert site.streams[1].received == [b"just in time"]
    assert goaways(site.receive(pong(frames))) == [(3, ErrorCode.NO_ERROR)]
    site.receive(rst_stream(3))
    assert site.connection.closed
    assert not site.faults


def test_an_idle_connection_may_stay_for_ever() -> None:
    site = Site(limits=Http2Limits(idle_s=None))
    for _ in range(200):
        frames = site.wait(60)
        site.receive(pong(frames))
    assert not site.connection.closed


def test_M04_a_graceful_end_serves_what_is_open_and_what_is_under_way() -> None:
    site = Site(keep)
    site.receive(headers(1) + data(1, message(b"a")))
    site.connection.shut_down(site.now_s)
    first = site.take()
    assert goaways(first) == [ANY_ID]
    # These crossed the GOAWAY.
    assert not resets(site.receive(headers(3) + data(3, message(b"b"))))
    assert goaways(site.receive(pong(first))) == [(3, ErrorCode.NO_ERROR)]
    # This one did not.
    assert resets(site.receive(headers(5))) == {5: ErrorCode.REFUSED_STREAM}
    assert not site.receive(data(5, message(b"it did not know")) + rst_stream(5))
    assert len(site.streams) == 2
    for stream in site.streams:
        assert not site.connection.closed
        stream.transport.send((b"done",))
        stream.transport.finish(0)
        frames = site.take()
        assert b"done" in b"".join(f.payload for f in frames)
    assert site.connection.closed
    assert [stream.closes for stream in site.streams] == [1, 1]


def test_M04_the_second_goaway_does_not_wait_for_a_client_that_is_slow() -> None:
    site = Site(keep)
    site.receive(headers(1))
    site.connection.shut_down(site.now_s)
    site.connection.shut_down(site.now_s)
    assert len(goaways(site.take())) == 1
    assert goaways(site.wait(1.1)) == [(1, ErrorCode.NO_ERROR)]
    assert not site.connection.closed
    site.receive(rst_stream(1))
    assert site.connection.closed


def test_M05_a_graceful_end_without_streams_is_over_at_once() -> None:
    site = Site()
    site.connection.shut_down(site.now_s)
    frames = site.take()
    site.receive(pong(frames))
    assert site.connection.closed
    site = Site(start=b"")
    site.connection.shut_down(site.now_s)
    site.wait(1.1)
    assert site.connection.closed


def test_an_abort_tells_the_code_and_closes_every_stream() -> None:
    site = Site(keep)
    site.receive(headers(1) + headers(3))
    site.connection.abort(ErrorCode.CANCEL)
    site.connection.abort(ErrorCode.CANCEL)
    assert goaways(site.take()) == [(3, ErrorCode.CANCEL)]
    assert [stream.closes for stream in site.streams] == [1, 1]
    assert site.connection.next_deadline_s() is None
    site.connection.on_time(site.now_s + 1_000)
    site.connection.shut_down(site.now_s)
    site.connection.written(0)
    assert not site.receive(headers(5))


def test_streams_closed_by_the_end_cannot_reach_each_other() -> None:
    site = Site(keep)
    site.receive(headers(1) + headers(3))
    one, two = site.streams
    for this, other in ((one, two), (two, one)):
        this.on_close = lambda other=other: other.transport.send((b"no",))
    site.connection.abort(ErrorCode.NO_ERROR)
    assert [f.kind for f in site.take()] == [GOAWAY]
    assert site.wakes == 0


# Back-pressure

LIMITS = Http2Limits(output_bytes_high=100_000, output_bytes_max=1_000_000)
WIDE = PREFACE + settings(window=ID_MAX) + SETTINGS_ACK + window_update(0, 1 << 30)


def test_a_client_that_does_not_read_is_not_read_from_and_answers_wait() -> None:
    site = Site(limits=LIMITS, start=b"")
    connection = site.connection
    connection.receive(WIDE + headers(1), 1.0)
    site.take()
    unsent = 0
    for _ in range(1_000):
        if not connection.reading:
            break
        connection.receive(data(1, message(bytes(10_000))), 1.0)
        unsent += sum(map(len, connection.take_output()))
        connection.written(unsent)
    assert unsent <= 100_000 + 20_000
    # What comes anyway is handled, and the answer stays in its outbox.
    connection.receive(data(1, message(b"late")), 1.0)
    assert not connection.take_output()
    connection.written(60_000)
    assert not connection.reading, "only half empty it is read from again"
    assert site.wakes == 1, "the late answer has room now"
    assert site.answers(site.take(60_000))[-1:] == [b"late"]
    connection.written(10)
    assert connection.reading


def test_the_room_of_a_socket_is_shared_in_turns() -> None:
    site = Site(limits=LIMITS, start=WIDE)
    content = bytes(200_000)
    connection = site.connection
    for stream_id in (1, 3):
        connection.receive(headers(stream_id) + data(stream_id, message(content)), 1.0)
    written = b""
    while raw := b"".join(connection.take_output()):
        assert len(raw) <= 100_000 + 20_000
        connection.written(len(raw))
        written += raw
        connection.written(0)
    frames = read_frames(written)
    order = [f.stream_id for f in frames if f.kind == 0]
    assert {1, 3} <= set(order[:12])
    assert site.answers(frames, 1)[1] == content
    assert site.answers(frames, 3)[1] == content


def test_a_client_that_takes_no_answers_gets_no_room_to_ask_for_more() -> None:
    limits = Http2Limits(stream_window_bytes=10_000, outbox_bytes_high=20_000)
    site = Site(limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    site.receive(headers(1))
    room, sent = 10_000, 0
    while room >= 1_000:
        frames = site.receive(data(1, message(bytes(995))))
        room += sum(int.from_bytes(f.payload) for f in frames if f.kind == WINDOW_UPDATE) - 1_000
        sent += 1_000
    assert 20_000 <= sent <= 20_000 + 10_000
    # Another stream has its own room.
    assert site.receive(headers(3) + data(3, message(b"hi")))
    assert site.streams[1].received == [b"hi"]
    frames = site.receive(window_update(1, 15_000))
    given = [f for f in frames if f.kind == WINDOW_UPDATE]
    assert [f.stream_id for f in given] == [1]


def test_the_connection_gets_no_room_while_all_answers_together_wait() -> None:
    limits = Http2Limits(connection_window_bytes=100_000, outboxes_bytes_high=150_000)
    site = Site(limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    room, sent, stream_id = 100_000, 0, 1
    while room >= 10_000:
        frames = site.receive(headers(stream_id) + data(stream_id, message(bytes(9_995))))
        room -= 10_000
        room += sum(int.from_bytes(f.payload) for f in frames if f.kind == WINDOW_UPDATE)
        sent, stream_id = sent + 10_000, stream_id + 2
    assert 150_000 <= sent <= 250_000
    frames = site.receive(b"".join(rst_stream(i) for i in range(1, stream_id, 2)))
    assert any(f.kind == WINDOW_UPDATE and f.stream_id == 0 for f in frames)


def test_an_outbox_has_an_end() -> None:
    limits = Http2Limits(outbox_bytes_max=50_000)
    site = Site(keep, limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    site.receive(headers(1) + data(1, message(b"a")) + headers(3))
    one = site.streams[0]
    for _ in range(10):
        one.transport.send((bytes(9_000),))
        assert one.closes == 0
    assert resets(site.take()) == {1: ErrorCode.ENHANCE_YOUR_CALM}
    assert one.closes == 1
    assert site.reasons == ["outbox-full"]
    assert site.connection._output.queued_bytes == 0
    assert site.connection.streams_open == 1


def test_outboxes_together_have_an_end() -> None:
    limits = Http2Limits(outboxes_bytes_max=50_000)
    site = Site(limits=limits, start=PREFACE + settings(window=0) + SETTINGS_ACK)
    frames = []
    for stream_id in range(1, 21, 2):
        frames += site.receive(headers(stream_id) + data(stream_id, message(bytes(9_000))))
        assert site.connection._output.queued_bytes <= 50_000
    assert len(resets(frames, ErrorCode.ENHANCE_YOUR_CALM)) == 5


def test_a_client_that_never_reads_is_dropped_when_even_small_frames_pile_up() -> None:
    limits = Http2Limits(output_bytes_high=1_000, output_bytes_max=20_000, overhead_burst=10**6)
    site = Site(limits=limits)
    connection, unsent, received, taken = site.connection, 0, 0, 0
    while not connection.closed:
        connection.receive(frame(PING, 0, 0, bytes(8)) * 100, 1.0)
        taken = sum(map(len, connection.take_output()))
        unsent += taken
        connection.written(unsent)
        received += 1_700
        assert connection.reading == (unsent <= 1_000) or connection.closed
    assert received <= 25_000
    assert taken < 100, "it will not read the rest either"
    assert site.reasons == ["unread-output"]


def test_who_ended_a_stream_is_remembered_for_the_last_ones() -> None:
    ended = RecentlyEnded(100)
    for stream_id in range(1_000):
        ended.add(stream_id, by_us=stream_id % 2 == 0)
        for back in range(min(100, stream_id)):
            assert ended.by_us(stream_id - back) == ((stream_id - back) % 2 == 0)
        assert ended.by_us(stream_id - 200) is None


def test_a_connection_that_stopped_reading_lives_while_its_output_leaves() -> None:
    site = Site(limits=LIMITS, start=WIDE)
    connection = site.connection
    connection.receive(headers(1) + data(1, message(bytes(99_000))) * 2, site.now_s)
    connection.take_output()
    connection.written(120_000)
    assert not connection.reading
    for left in range(119_000, 110_000, -1_000):
        site.now_s += 59
        connection.written(left)
        connection.on_time(site.now_s)
        assert not connection.closed
    for _ in range(2):
        assert not connection.closed
        connection.on_time(connection.next_deadline_s())
    assert connection.closed
    assert site.reasons == ["keepalive-timeout"]


def test_the_timer_is_early_or_right_but_never_late() -> None:
    site = Site(start=b"")
    assert site.connection.next_deadline_s() == site.now_s + 10
    site.receive(START)
    assert site.connection.next_deadline_s() == site.now_s + 60
