"""A gateway without the gateway: ext_proc streams written to the EPP's port, in a process of its
own; jobs as JSON lines in, results as JSON lines out.

Each stream replays what Envoy sends for one request (`bench.traffic.gateway`): headers and body;
when these are answered, the response's headers; then response chunks one at a time, each when the
one before is answered; then it resets the stream, as Envoy does. Frames are encoded before the
measuring starts and only get their stream id then, and replies are cut by their frame headers, so
that a stream costs the driver little more than it costs the EPP. Every reply is checked: the picked
address is one of the pool, the body came back byte for byte, each chunk came back as it was sent.

Flow control is honoured both ways, within it nothing is held back. Streams can be left open
(`Job.keep`), to see what open ones cost.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache, partial
from struct import Struct
from typing import cast

import msgspec
import uvloop

from bench.measure import Worker, percentile
from bench.traffic.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEADER_BLOCK,
    HEADERS,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW,
    Frames,
    Request,
    WrongAnswer,
    check_response_reply,
    forwarded,
    frame,
    picked,
    requests,
    response,
)

GRACE_S = 20.0
"""What may pass beyond a job's seconds until its last stream has ended."""
STREAM_WINDOW_BYTES = 1 << 24
CONNECTION_WINDOW_BYTES = 1 << 28

_HEAD = Struct(">IBI")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Which streams to run."""

    port: int
    tls: bool = False
    connections: int = 1
    concurrency: int = 16
    """Streams at once, over all connections."""
    seconds: float = 1.0
    """New streams are begun for so long."""
    streams: int = 1 << 40
    """No more than so many are begun."""
    prompt_bytes: int = 1024
    chunks: int = 4
    """Response chunks of each stream; 0 = the gateway does not send us response bodies."""
    keep: bool = False
    """Leave each stream open after its last chunk, and the connections with it."""
    drop_kept: bool = False
    """First close what earlier jobs left open."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. Times run from a stream's first byte to the last answer to its request."""

    streams: int
    seconds: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    errors: dict[str, int] = {}


class Stream:
    """One ext_proc stream under way."""

    __slots__ = ("body", "got", "id", "left", "request", "response", "started_s", "tail", "window")

    def __init__(self, number: int, request: Request, window: int) -> None:
        self.id = number.to_bytes(4, "big")
        self.request = request
        self.response: Sequence[Frames] = ()
        self.got = 0
        """Messages of the response that are answered, + 1; 0 while the request is not."""
        self.body: list[bytes] = []
        self.tail = b""
        """The beginning of a reply."""
        self.left = b""
        """Data that waits for a window."""
        self.window = window
        self.started_s = time.perf_counter()

    def replies(self, data: bytes) -> list[bytes]:
        """The replies that end in `data`."""
        if self.tail:
            data = self.tail + data
        done, at, end = [], 0, len(data)
        while end - at >= 5:
            after = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if after > end:
                break
            done.append(data[at + 5 : after])
            at = after
        self.tail = data[at:]
        return done


# -- one connection ------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One HTTP/2 connection: streams out, replies in."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.streams: dict[int, Stream] = {}
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._next_id = 1
        self._tail = b""
        self._out: list[bytes] = []
        self._window, self._stream_window = 65_535, 65_535
        self._waiting: deque[Stream] = deque()
        self._read_bytes = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        settings = b"\x00\x04" + STREAM_WINDOW_BYTES.to_bytes(4, "big")
        window = CONNECTION_WINDOW_BYTES.to_bytes(4, "big")
        self._out += (PREFACE, frame(SETTINGS, 0, settings), frame(WINDOW, 0, window))
        self.flush()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost = True
        if not self.ready.done():
            self.ready.set_result(None)
        for _ in range(len(self.streams)):
            self.work.fail("connection lost")
        self.streams.clear()

    def close(self) -> None:
        """Drop the connection with all its streams."""
        self.streams.clear()
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        """Write what was sent."""
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def begin(self) -> None:
        """Open a stream with its request."""
        number, self._next_id = self._next_id, self._next_id + 2
        stream = Stream(number, self.work.next_request(), self._stream_window)
        frames = stream.request.frames
        size = len(frames.payload)
        if size <= self._window and size <= stream.window and not self._waiting:
            self._window -= size
            stream.window -= size
            self._out.append(frames.bytes_for(stream.id))
        else:
            self._out.append(frame(HEADERS, END_HEADERS, HEADER_BLOCK, stream.id))
            self._send_slowly(stream, frames.payload)
        self.streams[number] = stream

    def _send(self, stream: Stream, frames: Frames) -> None:
        size = len(frames.payload)
        if size <= self._window and size <= stream.window and not stream.left:
            self._window -= size
            stream.window -= size
            self._out.append(frames.bytes_for(stream.id))
        else:
            self._send_slowly(stream, frames.payload)

    def _send_slowly(self, stream: Stream, payload: bytes) -> None:
        if not stream.left:
            self._waiting.append(stream)
        stream.left += payload
        self._pump()

    def _pump(self) -> None:
        """Send of what waits what the windows let through."""
        for _ in range(len(self._waiting)):
            stream = self._waiting.popleft()
            while stream.left:
                room = min(FRAME_BYTES_MAX, self._window, stream.window)
                if room <= 0:
                    self._waiting.append(stream)
                    break
                piece, stream.left = stream.left[:room], stream.left[room:]
                self._window -= len(piece)
                stream.window -= len(piece)
                self._out.append(frame(DATA, 0, piece, stream.id))

    def _end(self, stream: Stream, number: int) -> None:
        """Reset it, as Envoy does, and go on to the next."""
        self._out.append(frame(RESET, 0, b"\0\0\0\2", stream.id))
        self.streams.pop(number, None)
        stream.left = b""
        if self.work.ended():
            self.begin()

    def data_received(self, data: bytes) -> None:
        if self._tail:
            data = self._tail + data
        at, end = 0, len(data)
        while end - at >= 9:
            size_kind, flags, number = _HEAD.unpack_from(data, at)
            after = at + 9 + (size_kind >> 8)
            if after > end:
                break
            kind = size_kind & 0xFF
            if kind == DATA:
                self._on_data(number, data[at + 9 : after], flags)
            else:
                self._on_frame(kind, flags, number, data[at + 9 : after])
            at = after
        self._tail = data[at:]
        self.flush()

    def _on_data(self, number: int, payload: bytes, flags: int) -> None:
        self._read_bytes += len(payload)
        if self._read_bytes > STREAM_WINDOW_BYTES:
            self._out.append(frame(WINDOW, 0, self._read_bytes.to_bytes(4, "big")))
            self._read_bytes = 0
        stream = self.streams.get(number)
        if stream is None:
            return
        try:
            for reply in stream.replies(payload):
                self._on_reply(stream, number, reply)
        except (WrongAnswer, msgspec.DecodeError, ValueError) as error:
            self._fail(number, str(error))
        if flags & END_STREAM:
            self._fail(number, "stream ended by the EPP")

    def _on_reply(self, stream: Stream, number: int, reply: bytes) -> None:
        if stream.got:
            check_response_reply(reply, stream.got - 1, self.work.job.chunks)
            stream.got += 1
        elif not stream.response:
            stream.response = self.work.response(picked(reply))
            return
        else:
            piece, last = forwarded(reply)
            stream.body.append(piece)
            if not last:
                return
            if b"".join(stream.body) != stream.request.body:
                raise WrongAnswer("the request's body did not come back as it was")
            self.work.answered(stream)
            stream.got = 1
            stream.body = []
        sent = stream.got - 1
        if self.work.job.keep and sent > self.work.job.chunks:
            self.work.ended()
        elif sent < len(stream.response):
            self._send(stream, stream.response[sent])
        else:
            self._end(stream, number)

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == WINDOW:
            self._on_window(number, int.from_bytes(payload, "big"))
        elif kind == SETTINGS and not flags & ACK:
            self._on_settings(payload)
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, payload))
        elif kind == RESET:
            self._fail(number, f"stream reset by the EPP, code {int.from_bytes(payload, 'big')}")
        elif kind == HEADERS and flags & END_STREAM:
            self._fail(number, "stream ended by the EPP")
        elif kind == GOAWAY:
            self.work.fail(f"GOAWAY, code {int.from_bytes(payload[4:8], 'big')} {payload[8:]!r}")

    def _on_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if payload[at : at + 2] == b"\x00\x04":
                window = int.from_bytes(payload[at + 2 : at + 6], "big")
                for stream in self.streams.values():
                    stream.window += window - self._stream_window
                self._stream_window = window
        self._out.append(frame(SETTINGS, ACK, b""))
        if not self.ready.done():
            self.ready.set_result(None)
        self._pump()

    def _on_window(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
        elif (stream := self.streams.get(number)) is not None:
            stream.window += more
        if self._waiting:
            self._pump()

    def _fail(self, number: int, why: str) -> None:
        if self.streams.pop(number, None) is None:
            return
        self.work.fail(why)
        if self.work.ended(rightly=False):
            self.begin()


# -- one job -------------------------------------------------------------------------------


class Work:
    """One job under way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.errors: Counter[str] = Counter()
        self._requests = requests(job.prompt_bytes, job.chunks > 0)
        self._begun = self._ended = self._done = 0
        self._end_s = 0.0
        self._latencies_s: list[float] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def next_request(self) -> Request:
        """What the next stream sends."""
        self._begun += 1
        return self._requests[self._begun % len(self._requests)]

    def response(self, address: str) -> Sequence[Frames]:
        return response(address, self.job.chunks)

    def answered(self, stream: Stream) -> None:
        """The request of a stream is answered."""
        self._latencies_s.append(time.perf_counter() - stream.started_s)

    def fail(self, why: str) -> None:
        self.errors[why] += 1

    def ended(self, *, rightly: bool = True) -> bool:
        """A stream has ended; whether to begin another in its place."""
        self._ended += 1
        self._done += rightly
        if self._begun < self.job.streams and time.perf_counter() < self._end_s:
            return True
        if self._ended >= self._begun and not self._over.done():
            self._over.set_result(None)
        return False

    @staticmethod
    def _begin(connection: Connection) -> None:
        if not connection.lost:
            connection.begin()
            connection.flush()

    async def run(self, kept: list[Connection]) -> Result:
        """Run the streams; connections that stay open are added to `kept`."""
        connections = [await self._connect() for _ in range(self.job.connections)]
        start_s = time.perf_counter()
        self._end_s = start_s + self.job.seconds
        for number in range(min(self.job.concurrency, self.job.streams)):
            self._begin(connections[number % len(connections)])
        try:
            async with asyncio.timeout(self.job.seconds + GRACE_S):
                await self._over
        except TimeoutError:
            self.errors["no answer in time"] += self._begun - self._ended
        seconds = time.perf_counter() - start_s
        if self.job.keep:
            kept += connections
        else:
            for connection in connections:
                connection.close()
        return self._result(seconds)

    async def _connect(self) -> Connection:
        tls = _tls() if self.job.tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            partial(Connection, self),
            "127.0.0.1",
            self.job.port,
            ssl=tls,
            server_hostname="localhost" if tls else None,
        )
        async with asyncio.timeout(GRACE_S):
            await connection.ready
        return connection

    def _result(self, seconds: float) -> Result:
        if not self._done:
            self.errors["no stream ended well"] += 1
        latencies_s = self._latencies_s or [0.0]
        return Result(
            streams=self._done,
            seconds=seconds,
            p50_us=percentile(latencies_s, 0.5) * 1e6,
            p99_us=percentile(latencies_s, 0.99) * 1e6,
            errors=dict(+self.errors),
        )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Replayer(Worker):
    """The driver's process, as the bench holds it."""

    def __init__(self) -> None:
        super().__init__("bench.traffic.replay")

    def run(self, job: Job) -> Result:
        """Do a job; a driver that does not answer is killed, which is an error of the result."""
        line = self.ask(job, job.seconds + 3 * GRACE_S)
        if not line:
            return Result(streams=0, seconds=0.0, errors={"the driver died": 1})
        return msgspec.json.decode(line, type=Result)


async def _do(job: Job, kept: list[Connection]) -> Result:
    if job.drop_kept:
        for connection in kept:
            connection.close()
        kept.clear()
    return await Work(job).run(kept)


def main() -> None:
    """Do the jobs on standard input, one after the other, until it ends."""
    kept: list[Connection] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin.buffer:
            job = msgspec.json.decode(line, type=Job)
            requests(job.prompt_bytes, job.chunks > 0)
            gc.collect()
            gc.freeze()
            result = runner.run(_do(job, kept))
            sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
