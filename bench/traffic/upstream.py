"""A stand-in for many engines that costs little: one process on many addresses of loopback.

`python -m bench.traffic.upstream --addresses 64 --metrics FILE` listens on 127.0.0.1, 127.0.0.2 and
so on, on one port, and says `ready PORT`. It answers every POST at once with a chat completion, or
with an event stream where the request asks for one (`STREAM_HEADER`), and GET with the metrics page
in the file. Its answers say in `BODY_HEADER` how many bytes of body arrived, so that a client can
check what a gateway made of it.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path
from typing import cast

import uvloop

from bench.traffic.http1 import Message, Reader

STREAM_HEADER = "x-bench-stream"
"""Value `N MILLISECONDS`: N events, one every so many milliseconds, the first after as many."""
BODY_HEADER = "x-bench-body-bytes"
BINDS_MAX = 50

_USAGE = '"usage":{"prompt_tokens":1000,"completion_tokens":32,"total_tokens":1032}'
ANSWER = (
    '{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"bench-model",'
    '"choices":[{"index":0,"message":{"role":"assistant","content":"' + "word " * 32 + '"},'
    '"finish_reason":"stop"}],' + _USAGE + "}"
).encode()
EVENT = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":'
    b'"bench-model","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
LAST_EVENT = b'data: {"id":"chatcmpl-bench","choices":[],%b}\n\ndata: [DONE]\n\n' % _USAGE.encode()


def stream_bytes(events: int) -> int:
    """Length of the body of an event stream of so many events, >= 1."""
    return (events - 1) * len(EVENT) + len(LAST_EVENT)


class Upstream(asyncio.Protocol):
    """One connection from the gateway, or from whoever scrapes."""

    def __init__(self, page: bytes) -> None:
        self._page = _with_length("text/plain; version=0.0.4", page)
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._answer(message)

    def _answer(self, message: Message) -> None:
        if message.head.startswith(b"GET"):
            self._write(self._page)
            return
        seen = f"{BODY_HEADER}: {message.body_bytes}\r\n"
        stream = message.header(STREAM_HEADER.encode())
        if stream is None:
            self._write(_with_length("application/json", ANSWER, seen))
            return
        events, step_ms = (int(part) for part in stream.split())
        self._write(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            f"transfer-encoding: chunked\r\n{seen}\r\n".encode()
        )
        self._send_events(events, step_ms / 1e3)

    def _send_events(self, events: int, step_s: float) -> None:
        """Each in a write of its own: together they would reach the gateway as one piece."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for number in range(1, events):
            loop.call_at(start_s + number * step_s, self._write, _chunk(EVENT))
        last = _chunk(LAST_EVENT) + b"0\r\n\r\n"
        loop.call_at(start_s + events * step_s, self._write, last)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _with_length(media_type: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def addresses(count: int) -> list[str]:
    """The first so many addresses of loopback, at most 254."""
    assert 1 <= count <= 254
    return [f"127.0.0.{number}" for number in range(1, count + 1)]


def _listening(hosts: list[str]) -> list[socket.socket]:
    """Sockets on all of these addresses, on one port that is free on all of them."""
    for _ in range(BINDS_MAX):
        sockets: list[socket.socket] = []
        port = 0
        try:
            for host in hosts:
                sockets.append(socket.create_server((host, port)))
                port = sockets[0].getsockname()[1]
        except OSError:  # taken on one of them: try another
            for opened in sockets:
                opened.close()
            continue
        return sockets
    raise OSError(f"no port is free on all of {hosts[0]} to {hosts[-1]}")


async def _serve(count: int, page: bytes) -> None:
    loop = asyncio.get_running_loop()
    sockets = _listening(addresses(count))
    servers = [await loop.create_server(lambda: Upstream(page), sock=one) for one in sockets]
    print(f"ready {sockets[0].getsockname()[1]}", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--addresses", type=int, default=64, help="of loopback, at most 254")
    parser.add_argument("--metrics", required=True, help="file with the metrics page")
    args = parser.parse_args()
    page = Path(args.metrics).read_bytes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.addresses, page))


if __name__ == "__main__":
    main()
