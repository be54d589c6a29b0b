"""Closed-loop clients in a process of their own: jobs as JSON lines in, results as JSON lines out.

Each connection sends its next request when the answer to the last one is complete and right; the
process stays alive between jobs, so that starting it is in no measured window. A latency runs from
the write of a request to the last byte of its answer, as this process sees it: with many
connections it holds the driver's own queueing too, which is the same for whatever is compared.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from functools import lru_cache, partial
from typing import cast

import msgspec
import uvloop

from bench.measure import Worker, percentile
from bench.traffic.http1 import Message, Reader
from bench.traffic.prompts import Prompts
from bench.traffic.upstream import ANSWER, BODY_HEADER, STREAM_HEADER, stream_bytes

GRACE_S = 20.0
"""What may pass beyond a job's seconds until its last answers are there."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to send."""

    port: int
    connections: int
    seconds: float
    prompt_bytes: int
    events: int = 0
    """Events of the answer; 0 = one JSON document, at once."""
    step_ms: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    requests: int
    """Answered rightly."""
    seconds: float
    """From the first request to the last answer."""
    p50_us: float = 0.0
    p99_us: float = 0.0
    errors: dict[str, int] = {}
    """What went wrong -> how often."""


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._started_s = 0.0
        self._body_bytes = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.done.done():
            self._work.errors["connection lost"] += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            now_s = time.perf_counter()
            self._work.take(message, self._body_bytes, now_s - self._started_s)
            if now_s < self._work.end_s:
                self._send()
            elif not self.done.done():
                self.done.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        body = self._work.prompts.next()
        self._body_bytes = len(body)
        self._started_s = time.perf_counter()
        self._transport.write(self._work.head % len(body) + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Work:
    """One job under way."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.prompts = _prompts(job.prompt_bytes, job.events > 0)
        self.head = _head(job)
        self.errors: Counter[str] = Counter()
        self.end_s = 0.0
        self._latencies_s: list[float] = []
        self._answer_bytes = stream_bytes(job.events) if job.events else len(ANSWER)

    def take(self, message: Message, sent_bytes: int, latency_s: float) -> None:
        """Check an answer and count it."""
        seen = message.header(BODY_HEADER.encode())
        if message.status != 200:
            self.errors[f"status {message.status}"] += 1
        elif message.body_bytes != self._answer_bytes:
            self.errors[f"{message.body_bytes} bytes of body, not {self._answer_bytes}"] += 1
        elif seen != b"%d" % sent_bytes:
            self.errors["the upstream got another length of body than was sent"] += 1
        else:
            self._latencies_s.append(latency_s)

    async def run(self) -> Result:
        """Send until the time is over, then wait for what is under way."""
        loop = asyncio.get_running_loop()
        start_s = time.perf_counter()
        self.end_s = start_s + self._job.seconds
        connect = partial(loop.create_connection, partial(Client, self), "127.0.0.1")
        clients = [(await connect(self._job.port))[1] for _ in range(self._job.connections)]
        _, late = await asyncio.wait(
            [client.done for client in clients], timeout=self._job.seconds + GRACE_S
        )
        seconds = time.perf_counter() - start_s
        self.errors["no answer in time"] += len(late)
        for client in clients:
            client.close()
        return self.result(seconds)

    def result(self, seconds: float) -> Result:
        """Sum up what was taken, in so many seconds."""
        latencies_s = self._latencies_s
        errors = {what: times for what, times in self.errors.items() if times}
        if not latencies_s:
            errors.setdefault("no request was answered", 1)
            return Result(requests=0, seconds=seconds, errors=errors)
        return Result(
            requests=len(latencies_s),
            seconds=seconds,
            p50_us=percentile(latencies_s, 0.5) * 1e6,
            p99_us=percentile(latencies_s, 0.99) * 1e6,
            errors=errors,
        )


@lru_cache(maxsize=8)
def _prompts(prompt_bytes: int, stream: bool) -> Prompts:
    # Kept over jobs: a body that was sent before would be a full prefix hit.
    return Prompts(prompt_bytes, stream=stream)


def _head(job: Job) -> bytes:
    """Head of a request as an OpenAI client sends it, with a place for the length."""
    stream = f"{STREAM_HEADER}: {job.events} {job.step_ms}\r\n" if job.events else ""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{job.port}\r\n"
        "Accept: application/json\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 2.8.0\r\nAuthorization: Bearer sk-none\r\n"
        "X-Stainless-Lang: python\r\nX-Stainless-Runtime: CPython\r\n"
        "X-Stainless-Async: async:asyncio\r\nX-Stainless-Retry-Count: 0\r\n"
        f"{stream}Content-Length: %d\r\n\r\n"
    ).encode()


class Driver(Worker):
    """The driver's process, as the bench holds it."""

    def __init__(self) -> None:
        super().__init__("bench.traffic.driver")

    def run(self, job: Job) -> Result:
        """Do a job; a driver that does not answer is killed, which is an error of the result."""
        line = self.ask(job, job.seconds + 2 * GRACE_S)
        if not line:
            return Result(requests=0, seconds=0.0, errors={"the driver died": 1})
        return msgspec.json.decode(line, type=Result)


def main() -> None:
    """Do the jobs on standard input, one after the other, until it ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin.buffer:
            work = Work(msgspec.json.decode(line, type=Job))
            gc.collect()
            gc.freeze()
            result = runner.run(work.run())
            sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
