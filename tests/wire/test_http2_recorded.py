"""Whole connections as Envoy wrote them, replayed in pieces of any size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from epp.edge.health import OUTLIVES_HALF_CLOSE, Health
from tests.wire.extproc_oracle import RECORDED, recorded_messages
from tests.wire.http2_peer import (
    DATA,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    Site,
    goaways,
    of_kind,
    read_frames,
)

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH_CHECK = Path(__file__).parent / "data" / "http2" / "health_check.c2s.bin"


def replay(raw: bytes, pieces: list[bytes]):
    """Everything that a replay leads to: what streams saw, and the bytes sent."""
    site = Site(start=b"", handlers={PROCESS: lambda transport: site._open(transport)})
    sent = b""
    site.take()
    sent += site.raw
    for piece in pieces:
        site.receive(piece)
        sent += site.raw
    assert b"".join(pieces) == raw
    assert not site.faults
    assert not site.connection.closed
    assert site.connection.streams_open == 0
    return [(stream.received, stream.closes) for stream in site.streams], sent


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_A24_a_recorded_connection_means_the_same_however_it_is_cut(path: Path) -> None:
    raw = path.read_bytes()
    streams, sent = replay(raw, [raw])

    received = [message for messages, _ in streams for message in messages]
    assert sorted(received) == sorted(recorded_messages(path))
    assert all(closes == 1 for _, closes in streams)
    frames = read_frames(sent)
    assert len(streams) == len([f for f in read_frames(raw[24:]) if f.kind == HEADERS])
    assert not goaways(frames)
    assert not of_kind(frames, RST_STREAM)
    # Each message comes back, in order, per stream; nothing was cut by flow control.
    echoed = {}
    for f in of_kind(frames, DATA):
        echoed[f.stream_id] = echoed.get(f.stream_id, b"") + f.payload
    assert sorted(map(len, echoed.values())) == sorted(
        sum(len(m) + 5 for m in messages) for messages, _ in streams if messages
    )

    rng = random.Random(path.name)
    cuts = [bytes((byte,)) for byte in raw] if len(raw) < 20_000 else []
    random_cuts = []
    at = 0
    while at < len(raw):
        size = rng.choice((1, 2, 8, 9, 10, 100, 5_000))
        random_cuts.append(raw[at : at + size])
        at += size
    for pieces in filter(None, (cuts, random_cuts)):
        assert replay(raw, pieces) == (streams, sent)


def test_recorded_health_checks_are_answered_and_end_with_ok() -> None:
    health = Health()
    health.set_ready(True)
    for size in (1, 7, 10_000):
        site = Site(start=b"", handlers=health.methods, outlives_half_close=OUTLIVES_HALF_CLOSE)
        frames = site.take()
        raw = HEALTH_CHECK.read_bytes()
        for at in range(0, len(raw), size):
            frames += site.receive(raw[at : at + size])
        ids = sorted({f.stream_id for f in frames if f.kind == HEADERS})
        assert ids == [1, 3, 5, 7, 9]
        for stream_id in ids:
            first, answer, last = site.answers(frames, stream_id)
            assert first == {":status": "200", "content-type": "application/grpc"}
            assert answer == b"\x08\x01"
            assert last == {"grpc-status": "0"}
        assert not site.faults
        assert site.connection.streams_open == 0
        assert len(of_kind(frames, SETTINGS)) == 2
