"""An ext_proc server that decides nothing: what is left is the transport and the codec.

`python -m bench.traffic.echo --transport fast` serves on a free port of loopback and says
`ready PORT`. Headers get one and the same answer, bodies are sent on as they came.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from bench.stack import Child
from epp.core.messages import (
    HeadersReply,
    Mutation,
    RequestBody,
    RequestHeaders,
    ResponseBody,
    ResponseHeaders,
    StreamedBodyReply,
)
from epp.core.streams import Transport
from epp.edge.grpcio import GrpcioServer
from epp.edge.health import Health
from epp.edge.http2 import Http2Server
from epp.wire.extproc import decode_request, encode_reply

DESTINATION = "x-gateway-destination-endpoint"
ADDRESS = "127.0.0.1:8000"
PIECE_BYTES_MAX = 62_000
"""As much body as one answer of the EPP carries."""
SERVERS = {"grpcio": GrpcioServer, "fast": Http2Server}

_PICK = encode_reply(
    HeadersReply(request=True, mutation=Mutation(((DESTINATION, ADDRESS),), destination=ADDRESS))
)
_RESPONSE_HEADERS = encode_reply(HeadersReply(request=False))


class EchoStream:
    """Answers at once, and keeps a request's body until its end, as the EPP does."""

    __slots__ = ("_body", "_transport")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._body: list[bytes] = []

    def on_message(self, data: bytes) -> None:
        """See `Stream.on_message`."""
        event = decode_request(data)
        if isinstance(event, ResponseBody):
            reply = StreamedBodyReply(False, event.body, event.end_of_stream)
            self._transport.send((encode_reply(reply),))
        elif isinstance(event, RequestBody):
            self._body.append(event.body)
            if event.end_of_stream:
                self._transport.send((_PICK, *self._pieces()))
        elif isinstance(event, ResponseHeaders):
            self._transport.send((_RESPONSE_HEADERS,))
        else:
            assert isinstance(event, RequestHeaders)

    def on_close(self) -> None:
        """See `Stream.on_close`."""

    def _pieces(self) -> list[bytes]:
        body = b"".join(self._body)
        size = len(body)
        return [
            encode_reply(
                StreamedBodyReply(
                    True, body[at : at + PIECE_BYTES_MAX], at + PIECE_BYTES_MAX >= size
                )
            )
            for at in range(0, size, PIECE_BYTES_MAX)
        ]


class Echo(Child):
    """The server's process, as a bench holds it."""

    def __init__(self, folder: Path, transport: str) -> None:
        command = [sys.executable, "-m", "bench.traffic.echo", "--transport", transport]
        super().__init__(f"echo-{transport}", command, folder)
        self.port = 0

    def start(self) -> None:
        """Start it and wait until it listens."""
        super().start()
        self.port = int(self.wait_for("port", self._ready_port))

    def _ready_port(self) -> str | None:
        first, _, port = self.text().partition(" ")
        return port if first == "ready" and port.endswith("\n") else None


async def _serve(transport: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = SERVERS[transport](new_stream=EchoStream, health=Health(), host="127.0.0.1", port=0)
    port, _ = await server.start()
    print(f"ready {port}", flush=True)
    await stop.wait()
    await server.drain(0)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", choices=SERVERS, required=True)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.transport))


if __name__ == "__main__":
    main()
