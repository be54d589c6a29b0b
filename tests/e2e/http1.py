"""A plain HTTP/1.1 client for tests: writes exactly the bytes it is told to, keeps headers in order
and with repeats, and hands out the body as it comes in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple, Self

Headers = Sequence[tuple[str | bytes, str | bytes]]
ANSWER_S_MAX = 30.0
READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 20
JSON_TYPE = ("content-type", "application/json")


class Answer(NamedTuple):
    """One response."""

    status: int
    headers: list[tuple[str, str]]
    """Lower-case names, latin-1 values, in order, repeats kept."""
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection; requests one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._method = ""

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES_MAX))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Close the connection at once, whatever is under way."""
        self._writer.transport.abort()

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes | None = None,
        *,
        chunked: bool = False,
        piece_bytes: int | None = None,
    ) -> None:
        """Send a request. `body=None`: without any. `piece_bytes`: in writes of that size."""
        self._method = method
        given = {_bytes(name).lower() for name, _ in headers}
        lines = [f"{method} {target} HTTP/1.1".encode()]
        if b"host" not in given:
            lines.append(b"host: llm.example.com")
        lines += [_bytes(name) + b": " + _bytes(value) for name, value in headers]
        if chunked:
            lines.append(b"transfer-encoding: chunked")
        elif body is not None:
            lines.append(b"content-length: %d" % len(body))
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        for piece in _pieces(body or b"", piece_bytes):
            self._writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            if piece_bytes is not None:
                await self._writer.drain()
        if chunked:
            self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, size: int) -> bytes:
        """So many bytes of an upgraded connection."""
        async with asyncio.timeout(ANSWER_S_MAX):
            return await self._reader.readexactly(size)

    async def closed(self) -> None:
        """Wait until the peer has closed, and drop what it still sends."""
        while await self._reader.read(READ_BYTES):
            pass

    async def head(self) -> Answer:
        """Status and headers of the next response; its body is empty."""
        text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.rstrip("\r\n").split("\r\n")
        headers = []
        for line in lines:
            name, _, value = line.partition(":")
            headers.append((name.lower(), value.strip()))
        return Answer(int(first.split(" ")[1]), headers, b"")

    async def pieces(self, head: Answer) -> AsyncIterator[bytes]:
        """The body of the response that `head` began, piece by piece, as soon as it is there.

        Raises: IncompleteReadError, ConnectionError when the connection ends before the body does.
        """
        if self._method == "HEAD" or head.status in {204, 304}:
            return
        if head.header("transfer-encoding") == "chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            await self._reader.readuntil(b"\r\n")
            return
        left = int(head.header("content-length") or 0)
        while left:
            piece = await self._reader.read(min(left, READ_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece

    async def answer(self) -> Answer:
        """The whole next response."""
        async with asyncio.timeout(ANSWER_S_MAX):
            head = await self.head()
            body = [piece async for piece in self.pieces(head)]
        return head._replace(body=b"".join(body))


async def fetch(
    port: int,
    method: str,
    target: str,
    headers: Headers = (),
    body: bytes | None = None,
    **how: Any,
) -> Answer:
    """One request on a connection of its own; `how` as for `Connection.send`."""
    async with await Connection.open(port) as connection:
        # An early answer may come while the body is still being sent.
        sending = asyncio.create_task(connection.send(method, target, headers, body, **how))
        try:
            return await connection.answer()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def post(port: int, target: str, body: object, headers: Headers = ()) -> Answer:
    """POST JSON."""
    return await fetch(port, "POST", target, [JSON_TYPE, *headers], json.dumps(body).encode())


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


def _pieces(body: bytes, size: int | None) -> Iterable[bytes]:
    size = size or len(body) or 1
    return (body[at : at + size] for at in range(0, len(body), size))
