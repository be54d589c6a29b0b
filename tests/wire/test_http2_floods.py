"""Peers that try to make us work or hold memory for nothing, and busy ones that must not be taken
for them. Each flood ends its connection after a bounded number of frames."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from epp.wire.http2.connection import ErrorCode, Http2Limits
from tests.wire.http2_peer import (
    ACK,
    CONTINUATION,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PATH,
    PING,
    PREFACE,
    PRIORITY,
    REQUEST,
    SETTINGS,
    SETTINGS_ACK,
    START,
    Site,
    data,
    frame,
    goaways,
    headers,
    keep,
    message,
    replaced,
    resets,
    rst_stream,
    settings,
    window_update,
)

LIMITS = Http2Limits()
CALM = ErrorCode.ENHANCE_YOUR_CALM
EMPTY = frame(0, 0, 1)

# Name -> reason, frames of one round, and how many of them at most may be needed.
FLOODS: dict[str, tuple[str, Callable[[int], bytes], int]] = {
    "ping": ("ping-flood", lambda _: frame(PING, 0, 0, bytes(8)), 2 * 8_192),
    "ping answers unasked": ("ping-flood", lambda _: frame(PING, ACK, 0, bytes(8)), 2 * 8_192),
    "settings": ("settings-flood", lambda _: settings(), 2 * 2_048),
    "settings with many values": (
        "settings-flood",
        lambda _: frame(SETTINGS, 0, 0, b"\0\x04\0\0\0\x01" * 2_700),
        8,
    ),
    "settings answers": ("settings-flood", lambda _: SETTINGS_ACK, 2 * 8_192),
    "window": ("window-update-flood", lambda _: window_update(0, 1), 2 * 8_192),
    "window of a stream": ("window-update-flood", lambda _: window_update(1, 1), 2 * 8_192),
    "empty data": ("data-flood", lambda _: EMPTY, 2 * 8_192),
    "padding": ("data-flood", lambda _: frame(0, PADDED, 1, b"\x31" + bytes(49)), 2 * 8_192),
    "priority": ("frame-flood", lambda _: frame(PRIORITY, 0, 7, bytes(5)), 2 * 8_192),
    "unknown": ("frame-flood", lambda _: frame(0x77, 0, 0), 2 * 8_192),
    "goaway": ("frame-flood", lambda _: frame(GOAWAY, 0, 0, bytes(8)), 2 * 8_192),
    "reset again": (
        "frame-flood",
        lambda n: headers(3) + rst_stream(3) if n == 0 else rst_stream(3),
        2 * 8_192,
    ),
    "opened and reset (CVE-2023-44487)": (
        "reset-flood",
        lambda n: headers(2 * n + 3) + rst_stream(2 * n + 3),
        2 * 4_096,
    ),
    "the same with a message": (
        "reset-flood",
        lambda n: headers(2 * n + 3) + data(2 * n + 3, message(b"x")) + rst_stream(2 * n + 3),
        2 * 4_096,
    ),
    "resets provoked by a window of 0 (CVE-2025-8671)": (
        "provoked-resets",
        lambda n: headers(2 * n + 3) + window_update(2 * n + 3, 0),
        2 * 128,
    ),
    "resets provoked by malformed requests": (
        "provoked-resets",
        lambda n: headers(2 * n + 3, replaced(scheme=None)),
        2 * 128,
    ),
    "ends provoked by a bad message": (
        "provoked-resets",
        lambda n: headers(2 * n + 3) + data(2 * n + 3, message(b"x", 1)),
        2 * 128,
    ),
    "resets provoked by data after the end": (
        "provoked-resets",
        lambda n: headers(2 * n + 3) + rst_stream(2 * n + 3) + data(2 * n + 3, b"x"),
        2 * 128,
    ),
    "continuation": (
        "header-flood",
        lambda n: headers(3, flags=0) if n == 0 else frame(CONTINUATION, 0, 3),
        20,
    ),
    "a long header block": (
        "header-flood",
        lambda n: frame(CONTINUATION if n else HEADERS, 0, 3, bytes(16_000)),
        4,
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_its_connection_soon(name: str) -> None:
    reason, make, frames_max = FLOODS[name]
    site = Site(keep)
    site.receive(headers(1))
    sent = answer_bytes = 0
    frames = []
    for n in range(frames_max + 10):
        frames = site.receive(make(n))
        sent += 1
        answer_bytes += len(site.raw)
        if site.connection.closed:
            break
    assert site.connection.closed
    assert goaways(frames)[0][1] == CALM
    assert site.reasons[-1] == reason
    assert sent <= frames_max + 2
    assert answer_bytes <= 200 * sent, "the answer is about as long as the attack"
    assert all(stream.closes == 1 for stream in site.streams)


def test_messages_without_content_are_a_flood_too() -> None:
    site = Site(keep)
    site.receive(headers(1))
    for _ in range(100):
        site.receive(data(1, message(b"") * 3_000))
    assert site.reasons == ["data-flood"]
    assert len(site.streams[0].received) <= 2 * LIMITS.overhead_burst


def test_data_cut_into_single_bytes_is_a_flood() -> None:
    site = Site(keep)
    site.receive(headers(1))
    raw = data(1, message(bytes(100_000)), size=1)
    for at in range(0, len(raw), 10_000):
        site.receive(raw[at : at + 10_000])
    assert site.reasons == ["data-flood"]


def test_windows_opened_byte_by_byte_are_a_flood() -> None:
    """CVE-2019-9511, data dribble: each update makes us send a frame of one byte."""
    site = Site(start=PREFACE + settings(window=0) + SETTINGS_ACK)
    site.receive(headers(1) + data(1, message(bytes(100_000))))
    for _ in range(20_000):
        site.receive(window_update(1, 1))
        if site.connection.closed:
            break
    assert site.reasons == ["window-update-flood"]


def test_changes_of_the_window_of_many_streams_are_dear() -> None:
    """CVE-2019-9515 and worse: each frame makes us visit every stream."""
    site = Site(keep, limits=Http2Limits(streams_max=5_000))
    site.receive(b"".join(headers(stream_id) for stream_id in range(1, 10_001, 2)))
    assert site.connection.streams_open == 5_000
    for n in range(100):
        site.receive(settings(window=n))
        if site.connection.closed:
            break
    assert site.reasons == ["settings-flood"]
    assert n < 60


# Busy peers


def test_A24_a_gateway_that_resets_every_answered_stream_is_welcome() -> None:
    site = Site()
    for stream_id in range(1, 20_001, 2):
        site.receive(headers(stream_id) + data(stream_id, message(b"x")) + rst_stream(stream_id))
    assert not site.faults
    assert site.connection.streams_open == 0


def test_A24_clients_that_lose_patience_all_at_once_are_no_attack() -> None:
    site = Site(keep)
    ids = range(1, 20_000, 2)
    for stream_id in ids:
        site.receive(headers(stream_id) + data(stream_id, message(b"x")))
    site.now_s += LIMITS.reset_age_s
    site.receive(b"".join(map(rst_stream, ids)))
    assert not site.faults
    assert all(stream.closes == 1 for stream in site.streams)


def test_some_streams_reset_unanswered_among_many_answered_are_no_attack() -> None:
    def most(stream, content):
        if len(site.streams) % 2:
            stream.transport.send((content,))

    site = Site(most)
    for stream_id in range(1, 34_001, 2):
        site.receive(headers(stream_id) + data(stream_id, message(b"x")) + rst_stream(stream_id))
    assert not site.faults


def test_resets_at_a_steady_rate_are_no_attack() -> None:
    site = Site(keep)
    for stream_id in range(1, 18_001, 2):
        site.now_s += 1 / 500
        site.receive(headers(stream_id) + data(stream_id, message(b"x")) + rst_stream(stream_id))
    assert not site.faults


def test_pings_at_a_sane_rate_are_never_punished() -> None:
    site = Site()
    for _ in range(20_000):
        site.now_s += 0.01
        site.receive(frame(PING, 0, 0, bytes(8)))
    assert not site.faults


@pytest.mark.parametrize("size", [1_000, 16_379, 62_000, 200_000])
@pytest.mark.parametrize("window", [65_535, 1 << 18])
def test_a_client_that_updates_both_windows_for_every_frame_is_no_attack(size, window) -> None:
    content, number = bytes(size), 20_000_000 // size // 4
    site = Site(
        lambda stream, _: stream.transport.send([content] * number),
        start=PREFACE + settings(window=window) + SETTINGS_ACK + window_update(0, window - 65_535)
        if window > 65_535
        else START,
        limits=Http2Limits(overhead_burst=500),
    )
    frames = site.receive(headers(1) + data(1, message(b"x")))
    taken = 0
    while got := [len(f.payload) for f in frames if f.kind == 0]:
        taken += sum(got)
        updates = [window_update(0, size) + window_update(1, size) for size in got]
        frames = site.receive(b"".join(updates) + frame(PING, 0, 0, bytes(8)))
    assert taken == (size + 5) * number
    assert not site.faults


def test_a_client_that_updates_both_windows_for_each_of_many_answers_is_no_attack() -> None:
    start = PREFACE + settings(window=1 << 20) + SETTINGS_ACK + window_update(0, 1 << 20)
    content = bytes(200_000)
    site = Site(
        lambda stream, _: stream.transport.send((content,)),
        start=start,
        limits=Http2Limits(overhead_burst=500),
    )
    site.receive(headers(1))
    for _ in range(150):
        frames = site.receive(data(1, message(b"x")))
        got = [len(f.payload) for f in frames if f.kind == 0]
        assert sum(got) == 200_005
        site.receive(*(window_update(0, size) + window_update(1, size) for size in got))
    assert not site.faults


def test_a_long_time_does_not_buy_a_long_flood() -> None:
    site = Site(limits=Http2Limits(overhead_burst=1_000))
    site.now_s += 10_000
    sent = 0
    while not site.connection.closed and sent < 10_000:
        site.receive(frame(PING, 0, 0, bytes(8)))
        sent += 1
    assert 1_000 < sent < 2_100


def test_a_long_life_of_work_does_not_buy_a_long_flood() -> None:
    site = Site(limits=Http2Limits(overhead_burst=1_000, wasted_resets_burst=500))
    for stream_id in range(1, 10_001, 2):
        site.receive(headers(stream_id) + data(stream_id, message(b"x")) + rst_stream(stream_id))
    assert not site.faults
    sent = 0
    while not site.connection.closed and sent < 10_000:
        site.receive(frame(PING, 0, 0, bytes(8)))
        sent += 1
    assert 2_000 < sent < 5_000
    site = Site(limits=Http2Limits(wasted_resets_burst=500))
    for stream_id in range(1, 10_001, 2):
        site.receive(headers(stream_id) + data(stream_id, message(b"x")) + rst_stream(stream_id))
    for sent in range(10_000):
        site.receive(headers(10_001 + 2 * sent) + rst_stream(10_001 + 2 * sent))
        if site.connection.closed:
            break
    assert site.reasons == ["reset-flood"]
    assert 500 < sent < 2_000


def test_streams_open_long_with_small_messages_are_no_attack() -> None:
    """Server-sent events of a few bytes each, for hours."""
    site = Site()
    site.receive(headers(1))
    for _ in range(10_000):
        site.receive(data(1, message(b"data: {}\n\n")))
    assert not site.faults


def test_refused_requests_are_no_attack() -> None:
    """A gateway that is set up wrongly asks for the wrong method for ever; it is answered."""
    site = Site()
    for stream_id in range(1, 20_001, 2):
        frames = site.receive(headers(stream_id, replaced(path="/wrong"), 5))
    assert site.answers(frames, 19_999)[0]["grpc-status"] == "12"
    assert not site.connection.closed


# Memory


def held_after(act: Callable[[Site, int], None], rounds: int = 2_500, **options) -> int:
    """Bytes that a connection holds more after `rounds` than after a few of them."""
    site = Site(**options)
    site.faults = type("Nothing", (list,), {"append": lambda *_: None})()
    site.connection._guard.report = site.faults.append
    for n in range(300):
        act(site, n)
    site.streams.clear()
    tracemalloc.start()
    for n in range(300, 300 + rounds):
        act(site, n)
        site.streams.clear()
    site.raw = b""
    # Only what our own lines allocated: other threads of the test process do so meanwhile.
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/epp/wire/*")])
    held = sum(trace.size for trace in ours.traces)
    tracemalloc.stop()
    assert not site.connection.closed
    return held


def opened_and_reset(site: Site, n: int) -> None:
    site.receive(headers(2 * n + 1) + data(2 * n + 1, message(b"x")) + rst_stream(2 * n + 1))


def different_blocks(site: Site, n: int) -> None:
    fields = [*REQUEST, ("x-request-id", f"{n:0200}")]
    site.receive(headers(2 * n + 1, fields) + data(2 * n + 1, message(b"x"), END_STREAM))


def indexed_blocks(site: Site, n: int) -> None:
    block = headers(1)[9:] + b"\x40\x0cx-request-id\x7e" + f"{n:0126}".encode()
    site.receive(frame(HEADERS, 4, 2 * n + 1, block) + data(2 * n + 1, message(b"x"), END_STREAM))


def refused(site: Site, n: int) -> None:
    site.receive(headers(2 * n + 1, replaced(path=f"{PATH}{n}")))


@pytest.mark.parametrize("act", [opened_and_reset, different_blocks, indexed_blocks, refused])
def test_streams_of_the_past_are_not_held(act) -> None:
    assert held_after(act) < 500_000


def test_answers_nobody_takes_are_not_held_beyond_their_stream() -> None:
    start = PREFACE + settings() + SETTINGS_ACK
    held = held_after(
        opened_and_reset,
        start=start,
        answer=lambda stream, _: stream.transport.send((bytes(10_000),)),
    )
    assert held < 500_000


def test_frames_for_streams_we_ended_are_thrown_away() -> None:
    site = Site(lambda stream, _: stream.transport.finish(0))
    site.receive(headers(1) + data(1, message(b"x")))
    for _ in range(3_000):
        assert not resets(site.receive(data(1, bytes(16_384))))
    assert not site.faults
