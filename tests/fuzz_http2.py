"""Throws broken connections at `epp.wire.http2`: `python -m tests.fuzz_http2 --seconds 60`.

A case is a number. It makes a connection that is valid (a recorded one of Envoy's, or frames in a
random order that mostly make sense), breaks it in a few places, and feeds it in pieces to a server
whose streams answer, finish and raise at random, while time passes and the socket is now fast and
now slow. Whatever comes: nothing raises, the output is frames, the accounts of memory add up and
stay in their bounds, each stream is closed once, and a connection that ends says GOAWAY.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import cache
from pathlib import Path

from epp.wire.http2.connection import Http2Limits, Reason, ServerConnection
from tests.wire.http2_peer import (
    GOAWAY,
    PATH,
    REQUEST,
    START,
    WATCH,
    data,
    frame,
    headers,
    literals,
    message,
    read_frames,
    replaced,
    rst_stream,
    settings,
    window_update,
)

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
LIMITS = Http2Limits(
    streams_max=20,
    message_bytes_max=100_000,
    partial_bytes_max=150_000,
    header_list_bytes_max=2_000,
    header_block_bytes_max=4_000,
    stream_window_bytes=30_000,
    connection_window_bytes=100_000,
    outbox_bytes_high=20_000,
    outbox_bytes_max=60_000,
    outboxes_bytes_high=40_000,
    outboxes_bytes_max=120_000,
    output_bytes_high=30_000,
    output_bytes_max=400_000,
    overhead_burst=300,
    wasted_resets_burst=50,
    provoked_resets_burst=50,
    idle_s=30.0,
)


@cache
def recorded() -> list[bytes]:
    """Envoy's connections, without the long one."""
    folder = Path(__file__).parent / "wire" / "data"
    found = [path.read_bytes() for path in sorted(folder.glob("*/*.c2s.bin"))]
    assert found, f"no recorded connections under {folder}"
    return [raw for raw in found if len(raw) < 20_000]


def composed(rng: random.Random) -> bytes:
    """Frames that nearly always make sense."""
    raw, last_id, still_open = [START], 1, [1]
    raw.append(headers(1))
    for _ in range(rng.randrange(5, 80)):
        stream_id = rng.choice(still_open) if still_open else last_id
        if rng.random() < 0.01:
            stream_id = rng.randrange(2 * last_id)
        content = bytes(rng.choice((0, 1, 10, 500, 5_000, 20_000)))
        ends = 0
        choice = rng.randrange(100)
        if choice < 25 or not still_open:
            last_id += rng.choice((2, 2, 2, 4))
            ends = rng.random() < 0.1
            raw.append(headers(last_id, _request(rng), 5 if ends else 4))
            stream_id = last_id
            still_open.append(last_id)
        elif choice < 65:
            cut = rng.choice((1, 7, 1_000, 16_384)) if len(content) < 1_000 else 16_384
            ends = rng.random() < 0.1
            raw.append(data(stream_id, message(content), int(ends), cut))
        elif choice < 72:
            ends = True
            raw.append(rst_stream(stream_id))
        elif choice < 82:
            raw.append(window_update(rng.choice((0, stream_id)), rng.choice((1, 1_000, 1 << 20))))
        elif choice < 90:
            raw.append(settings(window=rng.choice((0, 10, 65_535, 1 << 20))))
        elif choice < 95:
            raw.append(frame(6, rng.randrange(2), 0, bytes(8)))
        elif choice < 98:
            ends = True
            raw.append(headers(stream_id, (("x", "y"),), 5))
        elif choice < 99:
            raw.append(frame(rng.randrange(10, 256), rng.randrange(256), stream_id, content[:8]))
        else:
            raw.append(frame(rng.randrange(12), rng.randrange(256), stream_id, content[:8]))
        if ends and stream_id in still_open:
            still_open.remove(stream_id)
    block = literals(REQUEST)
    raw.append(frame(1, 0, last_id + 2, block[:9]) + frame(9, 4, last_id + 2, block[9:]))
    return b"".join(raw)


def _request(rng: random.Random):
    fields = rng.choice((REQUEST, REQUEST, REQUEST, replaced(path=WATCH), replaced(method="GET")))
    return [*fields, ("grpc-timeout", "1S")] if rng.random() < 0.1 else fields


def broken(rng: random.Random, raw: bytes) -> bytes:
    """A few bytes, pieces or frames of it changed; often none before the first requests."""
    out = bytearray(raw)
    low = rng.choice((0, 24, len(out) // 2))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 2, 3, 8))):
        at = rng.randrange(min(low, len(out) - 1), len(out))
        size = rng.choice((1, 1, 2, 9, 40, 500))
        choice = rng.randrange(6)
        if choice == 0:
            out[at] = rng.randrange(256)
        elif choice == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 2:
            del out[at : at + size]
        elif choice == 3:
            out[at:at] = rng.randbytes(size)
        elif choice == 4:
            out[at:at] = out[at : at + size]
        else:
            frames = read_frames(bytes(out[24:])) if out == raw and len(out) > 33 else []
            rng.shuffle(frames)
            out = bytearray(raw[:24] + b"".join(frame(*f) for f in frames)) if frames else out
        out = out or bytearray(b"\0")
    return bytes(out)


class Stream:
    """Does anything a stream may do, and checks what a transport promises."""

    def __init__(self, case: Case, transport) -> None:
        self.case = case
        self.transport = transport
        self.closes = 0
        case.streams.append(self)
        if case.rng.random() < 0.02:
            transport.finish(8, "full")

    def on_message(self, content: bytes) -> None:
        assert not self.closes, "a message after the end"
        self.act(content)

    def on_close(self) -> None:
        self.closes += 1
        assert self.closes == 1, "closed twice"

    def act(self, content: bytes) -> None:
        rng = self.case.rng
        choice = rng.randrange(20)
        if choice < 12:
            self.transport.send((content,) * rng.choice((1, 1, 1, 2, 5)))
        elif choice < 14:
            self.transport.finish(rng.choice((0, 5)), rng.choice(("", "because")))
        elif choice < 15:
            rng.choice(self.case.streams).transport.send((content,))


class Case:
    """One connection and what happens to it."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        self.streams: list[Stream] = []
        self.now_s = 0.0
        self.unsent = 0
        self.out = bytearray()
        self.wakes = 0
        self.connection = ServerConnection(
            handlers={
                path: lambda transport: Stream(self, transport) for path in (PROCESS, PATH, WATCH)
            },
            limits=LIMITS,
            now_s=0.0,
            wake=self._wake,
            outlives_half_close={WATCH},
            may_open=lambda: rng.random() < 0.98,
            on_error=self._on_error,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def _on_error(self, fault) -> None:
        if fault.reason is Reason.BUG:
            raise AssertionError(f"a bug: {fault.error!r}") from fault.error

    def run(self) -> None:
        rng, connection = self.rng, self.connection
        raw = broken(rng, rng.choice(recorded()) if rng.random() < 0.4 else composed(rng))
        at = 0
        while at < len(raw) and not connection.closed:
            size = rng.choice((1, 9, 100, 3_000, 50_000))
            if connection.reading or rng.random() < 0.1:
                connection.receive(raw[at : at + size], self.now_s)
                at += size
            self._disturb()
            self._check()
            self._write()
            self._check()
        if rng.random() < 0.5:
            connection.lost()
        else:
            self._let_end()
        assert connection.closed
        assert all(stream.closes == 1 for stream in self.streams)
        assert connection._streams.partial_bytes == connection._output.queued_bytes == 0

    def _disturb(self) -> None:
        rng, connection = self.rng, self.connection
        if rng.random() < 0.2 and self.streams:
            rng.choice(self.streams).act(bytes(rng.choice((3, 3_000, 40_000))))
        if rng.random() < 0.1:
            self.now_s += rng.choice((0.01, 1.0, 30.0))
            connection.on_time(self.now_s)
        if rng.random() < 0.01:
            connection.shut_down(self.now_s)

    def _write(self) -> None:
        connection = self.connection
        for _ in range(1_000):
            pending = connection._output.bytes
            buffers = connection.take_output()
            self.unsent += pending
            self.out += b"".join(buffers)
            self.unsent = int(self.unsent * self.rng.choice((0, 0, 0.5, 1)))
            connection.written(self.unsent)
            if not buffers:
                return
        raise AssertionError("output without end")

    def _check(self) -> None:
        connection = self.connection
        streams, output = connection._streams, connection._output
        calls = streams.calls.values()
        assert streams.partial_bytes == sum(sum(map(len, call._pieces or ())) for call in calls)
        assert output.queued_bytes == sum(call.queued_bytes for call in calls)
        assert output.bytes == sum(map(len, output.buffers))
        assert streams.partial_bytes <= LIMITS.partial_bytes_max
        assert output.queued_bytes <= LIMITS.outboxes_bytes_max
        assert output.bytes + output.unsent_bytes <= LIMITS.output_bytes_max
        assert len(calls) <= LIMITS.streams_max
        assert len(output._waiting) <= len(calls)
        assert len(connection._frames._cut) <= LIMITS.frame_bytes_max + 9

    def _let_end(self) -> None:
        """The peer falls silent; the timer alone must bring the connection to its end."""
        connection = self.connection
        for _ in range(100):
            self.unsent = 0
            connection.written(0)
            self._write()
            deadline_s = connection.next_deadline_s()
            if deadline_s is None:
                break
            self.now_s = max(self.now_s, deadline_s)
            connection.on_time(self.now_s)
        self._write()
        frames = read_frames(bytes(self.out))
        assert any(f.kind == GOAWAY for f in frames), "ended without a word"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--case", type=int, help="run this one again")
    options = parser.parse_args()
    if options.case is not None:
        Case(options.case).run()
        return 0
    first = number = time.time_ns() // 1_000_000
    until_s = time.monotonic() + options.seconds
    while time.monotonic() < until_s:
        try:
            Case(number).run()
        except Exception:
            print(f"fails: python -m tests.fuzz_http2 --case {number}", file=sys.stderr)
            raise
        number += 1
    print(f"{number - first} cases, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
