"""The HTTP port for people and Prometheus: `/metrics`, `/debug/state`, `/healthz`.

`/debug/state` is bounded JSON without prompt text: all a decision depends on (`core.state`), so
that `epp explain` can make it again. With `?blocks=true` it also names the prefix blocks that each
endpoint is thought to hold. These may be millions, so they are written in pieces of about a
millisecond, between which requests pass. It answers GET and HEAD only.

The port is open to all who reach it unless it is given TLS with a client CA, or a judge of each
request's `Authorization` header. `/healthz` and the index are never judged: they say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from heapq import nlargest
from importlib.metadata import version
from typing import NamedTuple

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from epp.core.decide import Decider, PrefixKeeper
from epp.core.errors import EppError
from epp.core.flow.hold import Hold
from epp.core.model import Clock, Endpoint
from epp.core.prefix import hex_names, names_in
from epp.core.state import ENDPOINTS_MAX, State, capture
from epp.edge.admin_tls import AdminTls
from epp.edge.metrics import Metrics

PACKAGE = "envoy-endpoint-picker"
BLOCKS_MAX = 1_000_000
"""Prefix blocks listed, over all endpoints: 17 MB. Beyond it, each endpoint's oldest are left out,
in proportion."""
SHARED_MAX = 4_096
"""Blocks listed of one endpoint that requests in flight hold; the most shared ones."""
RUNS_MAX = 200_000
"""Pieces of prompts listed of one endpoint: to list them takes up to 3 ms."""
PIECE_BLOCKS, PIECE_RUNS = 8_192, 1_024
"""Written at once: 140 kB at most, in less than a millisecond."""
STOP_S = 1.0
"""Who reads a page slowly does not hold up the end of the process for longer."""

OPEN_PATHS = frozenset({"/", "/healthz"})
"""Answered without asking who asks."""

Authorize = Callable[[str | None, str], Awaitable[tuple[int, str]]]
"""Judges an `Authorization` header (`None`: there is none) and a path: 200 lets the request in, any
other status is the answer, with a line of text."""

INDEX = """Envoy Endpoint Picker {version}

/metrics                   Prometheus metrics
/debug/state               what the picker knows, as JSON
/debug/state?blocks=true   the same with the prefix blocks of each endpoint, for epp explain
/debug/state?pool=NAME     of one of several pools
/healthz                   ok while the process runs
"""


class StatePage(NamedTuple):
    """What `/debug/state` shows."""

    state: State
    blocks: Iterable[bytes] = ()
    """What `?blocks=true` adds: the inside of a JSON object by address, in pieces that are made
    when they are asked for."""


class AdminServer:
    """Serves the admin port.

    Args:
        port: 0 = a free one.
        state: what `/debug/state` shows of a pool (`None` = the first one). Raises KeyError, with
            what to say, when there is no such pool.
        tls: `None`: plain HTTP.
        auth: `None`: everyone may read everything.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        metrics: Metrics,
        state: Callable[[str | None], StatePage],
        tls: AdminTls | None = None,
        auth: Authorize | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._tls, self._auth = tls, auth
        self._state = state
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._own = metrics
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug/state", self._debug_state)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/", self._index)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S
        )

    async def start(self) -> int:
        """Bind and serve; returns the port.

        Raises: EppError naming the address when it cannot be bound.
        """
        await self._runner.setup()
        context = None if self._tls is None else self._tls.context
        site = web.TCPSite(
            self._runner, self._host, self._port, reuse_port=False, ssl_context=context
        )
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise EppError(
                f"cannot listen on {self._host}:{self._port} for metrics ({error.strerror}); "
                "free it or choose another --metrics-port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port; requests under way get `STOP_S`, then their connections are cut."""
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        known = request.match_info.http_exception is None  # otherwise it is a 404 or a 405
        if self._auth is not None and known and request.path not in OPEN_PATHS:
            asked = request.headers.get(hdrs.AUTHORIZATION)
            status, detail = await self._auth(asked, request.path)
            if status != 200:
                challenge = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
                return web.Response(status=status, text=f"{detail}\n", headers=challenge)
        return await handler(request)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        await response.prepare(request)
        if request.method == hdrs.METH_HEAD:
            return response
        # Who hangs up in the middle of the page has what it wanted.
        with contextlib.suppress(ConnectionError):
            for piece in self._own.text():
                await response.write(piece.encode(errors="replace"))
                await asyncio.sleep(0)  # a page may be long: requests pass between its pieces
            await response.write(generate_latest(self._registry))
            await response.write_eof()
        return response

    async def _debug_state(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("blocks", "false")
        if wanted not in ("true", "false"):
            raise web.HTTPBadRequest(text="blocks is true or false: /debug/state?blocks=true\n")
        try:
            page = self._state(request.query.get("pool"))
        except KeyError as error:
            raise web.HTTPNotFound(text=f"{error.args[0]}\n") from error
        body = msgspec.json.format(msgspec.json.encode(page.state), indent=2)
        if wanted == "false":
            return web.Response(body=body + b"\n", content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if request.method == hdrs.METH_HEAD:
            return response
        with contextlib.suppress(ConnectionError):
            await response.write(body.removesuffix(b"\n}") + b',\n  "prefix_blocks": {')
            for piece in page.blocks:
                await response.write(piece)
                await asyncio.sleep(0)
            await response.write(b"\n  }\n}\n")
            await response.write_eof()
        return response

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(text=INDEX.format(version=version(PACKAGE)))


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of the HTTP server's log is about us. What strangers send malformed is not: it
    would be logged with the line it stood in, be it a token, and as often as they like."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def debug_state(decider: Decider, clock: Clock, hold: Hold | None = None) -> StatePage:
    """What the picker knows now."""
    now_s = clock()
    decider.inflight.advance(now_s)
    state = capture(decider, now_s, version(PACKAGE), hold)
    return StatePage(state, block_pieces(decider))


def block_pieces(decider: Decider, blocks_max: int = BLOCKS_MAX) -> Iterator[bytes]:
    """The prefix blocks that each endpoint is thought to hold, as `core.state.HeldBlocks` by
    address. What is learned or evicted between two pieces may or may not show."""
    keeper = decider.prefix
    if not isinstance(keeper, PrefixKeeper):
        return
    of_blocks = max(blocks_max, keeper.state().held_blocks, 1)
    before = ""
    for endpoint in decider.pool.endpoints[:ENDPOINTS_MAX]:
        held = keeper.held_by(endpoint)
        address = msgspec.json.encode(endpoint.address).decode()
        yield f'{before}\n    {address}: {{"held": {held}, "runs": ['.encode()
        listed = yield from _run_pieces(keeper, endpoint, held * blocks_max // of_blocks)
        shared = msgspec.json.encode(_shared(endpoint)).decode()
        yield f'], "left_out": {max(0, held - listed)}, "shared": {shared}}}'.encode()
        before = ","


def _run_pieces(
    keeper: PrefixKeeper, endpoint: Endpoint, blocks_max: int
) -> Generator[bytes, None, int]:
    """JSON strings with commas between, of so many blocks. Returns: how many there were."""
    listed, piece, in_piece = 0, [], 0
    for run in keeper.runs_of(endpoint, min(RUNS_MAX, blocks_max)):
        room = blocks_max - listed
        if room <= 0:
            break
        piece.append(f'"{hex_names(run, room)}"')
        blocks = min(room, names_in(run))
        listed += blocks
        in_piece += blocks
        if in_piece >= PIECE_BLOCKS or len(piece) >= PIECE_RUNS:
            yield _joined(piece, first=listed == in_piece)
            piece, in_piece = [], 0
    if piece:
        yield _joined(piece, first=listed == in_piece)
    return listed


def _shared(endpoint: Endpoint) -> dict[str, int]:
    shared = endpoint.kv.shared()
    names = (
        shared if len(shared) <= SHARED_MAX else nlargest(SHARED_MAX, shared, shared.__getitem__)
    )
    return {f"{name:016x}": shared[name] for name in names}


def _joined(strings: list[str], *, first: bool) -> bytes:
    between = ",\n      "
    return (("" if first else between) + between.join(strings)).encode()
