"""A small HTTP/2 client for tests, on the h2 package: request trailers, and gRPC health checks."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)

ANSWER_S_MAX = 30.0
SERVING, NOT_SERVING = 1, 2
"""`grpc.health.v1.HealthCheckResponse.ServingStatus`."""

Pairs = list[tuple[str, str]]


class Answer(NamedTuple):
    """One response; `reset` is the error code of a reset stream, `None` if it ended well."""

    headers: dict[str, str]
    body: bytes
    trailers: dict[str, str]
    reset: int | None

    @property
    def status(self) -> int:
        return int(self.headers.get(":status", 0))

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    def json(self) -> Any:
        return json.loads(self.body)


class Http2:
    """One connection with prior knowledge; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="latin-1"))
        self._h2.initiate_connection()
        self._flush()

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    async def post(
        self, path: str, body: bytes, headers: Pairs | None = None, trailers: Pairs | None = None
    ) -> Answer:
        """POST `body`; with `trailers` it ends in these instead of a last data frame."""
        async with asyncio.timeout(ANSWER_S_MAX):
            stream = self._h2.get_next_available_stream_id()
            pseudo = [
                *((":method", "POST"), (":scheme", "http"), (":path", path)),
                (":authority", "llm.example.com"),
            ]
            self._h2.send_headers(stream, [*pseudo, *(headers or [])])
            await self._send_body(stream, body)
            if trailers is None:
                self._h2.end_stream(stream)
            else:
                self._h2.send_headers(stream, trailers, end_stream=True)
            self._flush()
            return await self._answer()

    async def _send_body(self, stream: int, body: bytes) -> None:
        while body:
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if room > 0:
                self._h2.send_data(stream, body[:room])
                body = body[room:]
                self._flush()
            else:
                while not any(isinstance(e, WindowUpdated) for e in await self._events()):
                    pass

    async def _events(self) -> list[object]:
        data = await self._reader.read(1 << 16)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        events = self._h2.receive_data(data)
        self._flush()
        return list(events)

    async def _answer(self) -> Answer:
        headers: dict[str, str] = {}
        trailers: dict[str, str] = {}
        body = b""
        while True:
            for event in await self._events():
                match event:
                    case ResponseReceived():
                        headers = dict(event.headers)
                    case TrailersReceived():
                        trailers = dict(event.headers)
                    case DataReceived():
                        body += event.data
                        self._h2.acknowledge_received_data(
                            event.flow_controlled_length, event.stream_id
                        )
                        self._flush()
                    case StreamEnded():
                        return Answer(headers, body, trailers, None)
                    case StreamReset():
                        return Answer(headers, body, trailers, int(event.error_code or 0))


async def health(port: int, service: str = "") -> int | None:
    """What a gRPC health port says of `service`; `None` when it answers with an error status."""
    name = service.encode()
    message = b"\x0a" + bytes((len(name),)) + name if name else b""
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    async with await Http2.open(port) as connection:
        answer = await connection.post(
            "/grpc.health.v1.Health/Check",
            body,
            [("content-type", "application/grpc"), ("te", "trailers")],
        )
    if answer.trailers.get("grpc-status", answer.headers.get("grpc-status")) != "0":
        return None
    payload = answer.body[5:]
    return payload[1] if payload else 0
