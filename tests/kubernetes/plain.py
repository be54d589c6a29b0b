"""A client that hides nothing: aiohttp, status codes, raw lines. For tests of the server side."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from tests.kubernetes.resources import Object

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer."""

    code: int
    body: Any
    """Decoded JSON; text when it is none."""
    headers: Mapping[str, str]

    @property
    def version(self) -> str:
        """metadata.resourceVersion of the object or list."""
        return str(self.body["metadata"]["resourceVersion"])

    @property
    def names(self) -> list[str]:
        """Of a list's items, in its order."""
        return [item["metadata"]["name"] for item in self.body["items"]]

    @property
    def reason(self) -> str:
        """Of a Status."""
        return str(self.body["reason"])


class Lines:
    """The lines of an open watch."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.chunks: list[bytes] = []
        """As they came in."""
        self._rest = b""
        self._ready: list[bytes] = []

    async def raw(self) -> bytes | None:
        """The next line; `None` at the end, with whatever stands unfinished thrown away."""
        while not self._ready:
            async with asyncio.timeout(PATIENCE_S):
                data = await self.response.content.readany()
            if not data:
                return None
            self.chunks.append(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._ready += lines
        return self._ready.pop(0)

    async def event(self) -> tuple[str, Object]:
        """Type and object of the next event."""
        line = await self.raw()
        assert line is not None, "the watch ended"
        found = json.loads(line)
        return found["type"], found["object"]

    async def brief(self) -> tuple[str, str]:
        """Type and name of the next event."""
        type_, obj = await self.event()
        return type_, obj["metadata"].get("name", "")


class Plain:
    """Requests to one server; an async context manager."""

    def __init__(
        self, url: str, *, tls: ssl.SSLContext | None = None, token: str | None = None
    ) -> None:
        self.url = url
        self.tls = tls
        self.token = token

    async def __aenter__(self) -> Self:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_S)
        connector = aiohttp.TCPConnector(ssl=self.tls or True)
        self.session = aiohttp.ClientSession(connector=connector, timeout=limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        form: str = "application/json",
        **query: Any,
    ) -> Answered:
        """One request with its whole answer. `form`: the body's media type."""
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers() | ({} if body is None else {"Content-Type": form})
        params = {name: str(value) for name, value in query.items()}
        async with (
            asyncio.timeout(PATIENCE_S),
            self.session.request(
                method, self.url + path, data=data, headers=headers, params=params
            ) as response,
        ):
            text = await response.text()
            is_json = "json" in response.content_type
            return Answered(
                response.status, json.loads(text) if is_json else text, dict(response.headers)
            )

    async def get(self, path: str, **query: Any) -> Answered:
        return await self.call("GET", path, **query)

    @asynccontextmanager
    async def watch(self, path: str, **query: Any) -> AsyncIterator[Lines]:
        """An open watch; must be answered 200."""
        params = {"watch": "true"} | {name: str(value) for name, value in query.items()}
        async with self.session.get(
            self.url + path, headers=self.headers(), params=params
        ) as response:
            assert response.status == 200, await response.text()
            yield Lines(response)
