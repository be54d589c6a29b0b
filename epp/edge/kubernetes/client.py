"""Asks the API server: single objects, pages of lists, watches. Says what came, retries nothing.

Every failure is an `ApiError`: an answer other than 2xx, or none (status 0). Only a refused token
is handled here: it is read again and, when it has changed, the request made once more. Every wait
has a limit. Redirects are not followed and no proxy of the environment is used, so a token goes to
the API server and nowhere else. Answers are asked for uncompressed: inflating a page of 500 pods
would cost as much as reading it. TCP keepalive notices a vanished peer even where nothing is sent.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from epp.core.errors import EppError
from epp.edge.kubernetes.access import Access
from epp.edge.kubernetes.objects import Status, StatusDetails
from epp.edge.kubernetes.tokens import TokenError

CONNECT_TIMEOUT_S = 5.0
PAGE_TIMEOUT_S = 60.0
"""For a page of a list: of many objects the API server takes a while to write the first byte."""
ANSWER_BYTES_MAX = 256 * 2**20
"""Of one answer. 40 000 large pods in one page."""
ERROR_BYTES_MAX = 64 * 2**10
"""Read of an answer that is an error."""
LINE_BYTES_MAX = 16 * 2**20
"""Of one line of a watch. The API server itself refuses objects of more than 1.5 MB."""
RETRY_AFTER_S_MAX = 120.0
"""The longest wait the API server may ask for."""
DETAIL_CHARS_MAX = 300
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A peer that is gone is noticed after a minute."""
READ_BYTES = 2**18
"""Buffered of an answer before reading pauses; fewer, larger pieces cost less."""

_STATUS = msgspec.json.Decoder(Status)


class ApiError(EppError):
    """The API server refused, or did not answer.

    Args:
        status: of the answer; 0: there was none, or not all of it.
        reason: one word: the API server's (`Conflict`), the HTTP phrase, or, with status 0, one of
            `Connection`, `Tls`, `Timeout`, `Silent`, `Closed`, `Token`, `TooLarge`, `Undecodable`.
        retry_after_s: what it asks us to wait, 0..`RETRY_AFTER_S_MAX`; `None`: it does not.
        causes: more words of the API server.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        detail: str = "",
        *,
        retry_after_s: float | None = None,
        causes: tuple[str, ...] = (),
    ) -> None:
        said = " ".join(part for part in (str(status or ""), reason) if part)
        super().__init__(f"{said}: {detail[:DETAIL_CHARS_MAX]}" if detail else said)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.causes = causes

    @classmethod
    def of(cls, status: Status, *, retry_after_s: float | None = None) -> ApiError:
        """What a `Status` object says.

        Args:
            retry_after_s: of the answer's header; goes before the object's.
        """
        details = status.details or StatusDetails()
        if retry_after_s is None and details.retry_after_seconds > 0:
            retry_after_s = min(float(details.retry_after_seconds), RETRY_AFTER_S_MAX)
        return cls(
            status.code,
            status.reason or "Unknown",
            status.message,
            retry_after_s=retry_after_s,
            causes=tuple(cause.reason for cause in details.causes),
        )


class LineSplitter:
    """Lines of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._begun = bytearray()
        """Of the line that has not ended."""

    def split(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece, without their ends and without empty ones.

        Raises: ApiError (`TooLarge`) when the line after them is longer than `LINE_BYTES_MAX`.
        """
        begin, end, rest = piece.rpartition(b"\n")
        lines: list[bytes] = []
        if end:
            lines = (bytes(self._begun) + begin).split(b"\n")
            self._begun.clear()
        self._begun += rest
        if len(self._begun) > LINE_BYTES_MAX:
            raise ApiError(0, "TooLarge", f"a line of more than {LINE_BYTES_MAX} bytes")
        return [line for line in lines if line.strip()]


class EventLines:
    """The lines of a watch: each turn gives those that can be read without waiting, at least one.
    Ends when the API server ends the watch; what is then left of a line was cut off.

    Raises: ApiError (status 0) when the connection breaks, is silent for too long or sends a line
        of more than `LINE_BYTES_MAX`.
    """

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._lines = LineSplitter()

    def __aiter__(self) -> EventLines:
        return self

    async def __anext__(self) -> list[bytes]:
        while True:
            with _translated():
                piece = await self._content.readany()
            if not piece:
                raise StopAsyncIteration
            if lines := self._lines.split(piece):
                return lines


class ApiClient:
    """Requests to one API server. Use as an async context manager, inside the running loop.

    Args:
        user_agent: names us in the API server's audit log.
        timeout_s: for everything from the connection to the last byte of a single object.
    """

    def __init__(self, access: Access, *, user_agent: str, timeout_s: float = 10.0) -> None:
        self.access = access
        self._user_agent = user_agent
        self._limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._page_limits = aiohttp.ClientTimeout(
            total=max(timeout_s, PAGE_TIMEOUT_S), sock_connect=CONNECT_TIMEOUT_S
        )
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit of connections: a watch keeps one, and must not keep others from getting theirs.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "User-Agent": self._user_agent,
                "Accept": "application/json",
                "Accept-Encoding": "identity",
            },
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        assert session is not None, "entered"
        await session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The object at a path.

        Raises: ApiError.
        """
        return await self._ask("GET", path, params, limits=self._limits)

    async def list_page(self, path: str, params: Mapping[str, str]) -> bytes:
        """One page of a list; has more time than `get`.

        Raises: ApiError.
        """
        return await self._ask("GET", path, params, limits=self._page_limits)

    async def create(self, path: str, body: bytes) -> bytes:
        """Post an object (JSON) to the path of its kind; what was made of it.

        Raises: ApiError; status 409 when there is one of that name.
        """
        return await self._ask("POST", path, body=body, limits=self._limits)

    async def replace(self, path: str, body: bytes) -> bytes:
        """Put an object (JSON) in the place of the one at a path; what was made of it.

        Raises: ApiError; status 409 when another has written since.
        """
        return await self._ask("PUT", path, body=body, limits=self._limits)

    @asynccontextmanager
    async def watch(
        self, path: str, params: Mapping[str, str], *, total_s: float, idle_s: float
    ) -> AsyncIterator[EventLines]:
        """The events of a watch; entered when the API server has agreed to send them.

        Args:
            total_s: it is given up after this long,
            idle_s: and when nothing came for this long.
        Raises: ApiError.
        """
        limits = aiohttp.ClientTimeout(
            total=total_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_s
        )
        async with self._answer("GET", path, params, limits=limits) as response:
            yield EventLines(response.content)

    # -- one request -----------------------------------------------------------------------

    async def _ask(self, method: str, path: str, *args: Any, **options: Any) -> bytes:
        async with self._answer(method, path, *args, **options) as response:
            with _translated():
                return await _read(response, ANSWER_BYTES_MAX)

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        limits: aiohttp.ClientTimeout,
        body: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of 2xx."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        options = {"params": params, "data": body, "headers": headers, "timeout": limits}
        token = await self._authorize(headers)
        response = await self._send(method, path, options)
        try:
            refused = token if response.status == 401 else None
            if refused is not None and await self._authorize(headers, refused) != refused:
                response.close()
                response = await self._send(method, path, options)
            if not 200 <= response.status < 300:
                raise await _error(response)
            yield response
        finally:
            # The connection is kept where the whole answer was read.
            response.close()

    async def _authorize(self, headers: dict[str, str], refused: str | None = None) -> str | None:
        """Put the token, or the one after that which was refused, into the headers."""
        source = self.access.token
        if source is None:
            return None
        try:
            token = await (source.current() if refused is None else source.renewed(refused))
        except TokenError as exception:
            raise ApiError(0, "Token", str(exception)) from exception
        headers["Authorization"] = f"Bearer {token}"
        return token

    async def _send(
        self, method: str, path: str, options: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise ApiError(0, "Closed", "not connected yet, or not any more")
        with _translated():
            return await self._session.request(
                method,
                self.access.server + path,
                allow_redirects=False,
                ssl=self.access.tls or True,
                server_hostname=self.access.tls_server_name,
                read_bufsize=READ_BYTES,
                **options,
            )


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    pieces, size = [], 0
    while chunk := await response.content.readany():
        pieces.append(chunk)
        size += len(chunk)
        if size > bytes_max:
            raise ApiError(0, "TooLarge", f"an answer of more than {bytes_max} bytes")
    return b"".join(pieces)


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    """What an answer other than 2xx says; a proxy's page counts as well."""
    with _translated():
        try:
            body = await _read(response, ERROR_BYTES_MAX)
        except ApiError:
            body = b""
    try:
        status = _STATUS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        status = Status()
    if status.kind != "Status":
        text = " ".join(body[:DETAIL_CHARS_MAX].decode(errors="replace").split())
        status = Status(reason=response.reason or "Unknown", message=text)
    status = msgspec.structs.replace(status, code=response.status)
    return ApiError.of(status, retry_after_s=_retry_after_s(response.headers.get("Retry-After")))


def _retry_after_s(header: str | None) -> float | None:
    """Seconds; a date is not read: the API server sends none."""
    if header is None or not header.isdecimal() or len(header) > 9:
        return None
    return min(float(header), RETRY_AFTER_S_MAX)


@contextmanager
def _translated() -> Iterator[None]:
    """Raises: ApiError for what the library raises."""
    try:
        yield
    except aiohttp.SocketTimeoutError as exception:
        raise ApiError(0, "Silent", "nothing came for too long") from exception
    except aiohttp.ConnectionTimeoutError as exception:
        raise ApiError(0, "Connection", "timed out") from exception
    except TimeoutError as exception:
        raise ApiError(0, "Timeout", "no whole answer in time") from exception
    except aiohttp.ClientSSLError as exception:
        raise ApiError(0, "Tls", _host(exception)) from exception
    except aiohttp.ClientConnectorError as exception:
        raise ApiError(0, "Connection", _host(exception)) from exception
    except aiohttp.ClientPayloadError as exception:
        raise ApiError(0, "Connection", "the answer broke off") from exception
    except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as exception:
        # A RuntimeError is how a read says that the connection has been closed already.
        raise ApiError(0, "Connection", str(exception) or type(exception).__name__) from exception


def _host(exception: aiohttp.ClientConnectorError) -> str:
    """Where and why; the library's own text quotes an object of the TLS context."""
    why = exception.os_error
    return f"{exception.host}:{exception.port}: {why.strerror or why}"


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """An unconnected socket with keepalive."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
