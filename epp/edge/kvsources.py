"""Where an endpoint publishes its KV events: by configured ports, or as the engine itself says.

An engine that binds its publisher (its address has a wildcard host) is found under the endpoint's
own host. One that connects out to a collector cannot be subscribed to; `KvEvents` listens for those
on an address of ours. Never is another host contacted than the endpoint's: what an engine answers
names ports only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from epp.core.errors import EppError
from epp.core.model import Endpoint
from epp.core.structs import Frozen

PATH = "/kv_event_sources"
RANKS_MAX = 256
"""Data-parallel ranks of one endpoint that are followed."""
ANSWER_BYTES_MAX = 256 * 1024
WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})
PORT_MAX = 65_535


class SourceError(EppError):
    """Where the endpoint publishes could not be found out."""


class Source(Frozen, frozen=True):
    """Where one data-parallel rank publishes."""

    rank: int
    address: str
    """`tcp://host:port`, IPv6 in brackets."""
    replay: str | None
    """The replay socket; `None` when there is none."""


class Sources(Protocol):
    """Finds sources. Entered before, and left after, the first and the last `find`."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def find(self, endpoint: Endpoint) -> tuple[Source, ...]:
        """By rank, each once; empty when the endpoint publishes nothing. Raises: SourceError."""


class FixedPorts:
    """The same ports at every endpoint, plus the rank.

    Args:
        port: of rank 0.
        replay_port: of rank 0; `None` when there is no replay socket.
        ranks: data-parallel ranks per endpoint, >= 1.
    """

    def __init__(self, port: int, *, replay_port: int | None = None, ranks: int = 1) -> None:
        self._port = port
        self._replay_port = replay_port
        self._ranks = ranks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        return

    async def find(self, endpoint: Endpoint) -> tuple[Source, ...]:
        """The configured ports, at the endpoint's host."""
        host, replay_port = endpoint.spec.host, self._replay_port
        return tuple(
            Source(
                rank,
                tcp(host, self._port + rank),
                None if replay_port is None else tcp(host, replay_port + rank),
            )
            for rank in range(self._ranks)
        )


class EngineSources:
    """What `GET /kv_event_sources` says (vLLM since 0.31).

    Args:
        scheme: `http` or `https`.
        tls: for `https`; `None` verifies against the system's authorities.
        timeout_s: for the whole answer.
        concurrency_max: endpoints asked at once.
    """

    def __init__(
        self,
        *,
        scheme: str = "http",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 5.0,
        concurrency_max: int = 16,
    ) -> None:
        self._scheme = scheme
        self._tls = tls
        self._timeout_s = timeout_s
        self._turn = asyncio.Semaphore(concurrency_max)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def find(self, endpoint: Endpoint) -> tuple[Source, ...]:
        """Ask the engine. Raises: SourceError, also for an engine too old to know the path."""
        url = f"{self._scheme}://{endpoint.address}{PATH}"
        try:
            async with self._turn:
                return read_sources(await self._get(url), endpoint.spec.host)
        except TimeoutError as exception:
            raise SourceError(f"{url}: no answer within {self._timeout_s} s") from exception
        except (aiohttp.ClientError, OSError, ValueError) as exception:
            raise SourceError(f"{url}: {str(exception)[:200]}") from exception

    async def _get(self, url: str) -> bytes:
        assert self._session is not None, "entered before it is asked"
        async with self._session.get(url, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            page = b""
            while piece := await answer.content.read(65_536):
                page += piece
                if len(page) > ANSWER_BYTES_MAX:
                    raise ValueError(f"more than {ANSWER_BYTES_MAX} bytes")
            return page


class _Entry(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


def read_sources(page: bytes, host: str) -> tuple[Source, ...]:
    """The sources an engine's answer names, at `host`; entries that cannot be subscribed to are
    left out.

    Raises: ValueError, when the answer is not one.
    """
    try:
        entries: Mapping[str, _Entry] = msgspec.json.decode(page, type=dict[str, _Entry])
    except (msgspec.MsgspecError, RecursionError) as exception:
        raise ValueError(f"not a list of sources: {exception}") from exception
    found: dict[int, Source] = {}
    for key, entry in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) < 6 and entry.publisher == "zmq"):
            continue
        port = _bound_port(entry.endpoint)
        if port is not None and entry.enable_kv_cache_events and len(found) < RANKS_MAX:
            replay_port = _bound_port(entry.replay_endpoint or "")
            replay = None if replay_port is None else tcp(host, replay_port)
            found[int(key)] = Source(int(key), tcp(host, port), replay)
    return tuple(found[rank] for rank in sorted(found))


def _bound_port(address: str) -> int | None:
    """Port of a ZMQ address that its owner listens on at every interface; else `None`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or host not in WILDCARDS:
        return None
    if not (port.isascii() and port.isdigit() and len(port) < 6):
        return None
    return int(port) if 0 < int(port) <= PORT_MAX else None


def tcp(host: str, port: int) -> str:
    """A ZMQ address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
