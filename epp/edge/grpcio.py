"""The grpc.aio transport: the compatible one, and the oracle for any other.

One `_Call` per RPC, ext_proc and health alike, since on the wire a unary call is a stream of one
message. Two tasks serve it. The RPC's own task writes: it sends what the stream put into the
outbox, in order, and returns after `finish`, which makes grpc.aio send the status. A second task
reads and hands each message to the stream. So an answer can come from any callback at any time,
`finish` needs no cancelling, and no task of ours is ever cancelled while it waits for a read:
cancelling one leaks its native operation (grpc/grpc #43360), and Envoy resets nearly every stream.

Ends of a call, each of which calls `Stream.on_close` exactly once (`_Call.close`):
    reset by the peer    the reader sees the end; grpc.aio cancels the writer, which lets it pass
    half-closed          the reader sees the same end; the writer ends with OK if no cancel follows
    `finish`             the writer sends what is left, then the status
    a bug in the stream  logged, INTERNAL; other calls go on
    the server stops     as reset
A read cannot tell a reset from a half-close, and sending a status to a reset stream leaks and logs,
so the writer waits `_RESET_S` for grpc.aio's cancel before it takes an end for a half-close. The
stream itself is closed at once. Envoy half-closes only where it resets right after.

Once a call is closed the reader reads no more: grpc.aio frees the native call when the RPC's task
is done, and a read after that would crash the process.

Bounds: calls at once, bytes per message, and bytes in one outbox (beyond which the stream is not
read from until its peer has read). grpc.aio belongs to one event loop per process.

Cost: 0.6 ms CPU per stream of four messages each way, nearly all of it inside grpc.aio (a single
task that reads and writes: the same within 5 %). 30 000 reset streams grow the process by 0.8 MB
after the first 7 500, reading in the cancelled task by 3.2 MB.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence

import grpc
import msgspec
from grpc import aio

from epp.core.errors import EppError
from epp.core.headers import POOL
from epp.core.streams import Called, Stream, StreamFactory
from epp.edge.health import EXT_PROC_SERVICE, OUTLIVES_HALF_CLOSE, REQUEST_BYTES_MAX, Health
from epp.edge.tls import CertificateSource, KeyPair

PROCESS_PATH = f"/{EXT_PROC_SERVICE}/Process"

_RESET_S = 0.01
"""How long grpc.aio's cancel may lag behind the end of reading; without it 0.6 % of resets did."""
_STOP_S = 1.0
"""How long tasks may take to end after their server has stopped."""
_RESOURCE_EXHAUSTED, _INTERNAL = 8, 13
_STATUS = {code.value[0]: code for code in grpc.StatusCode}

_log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server takes on, and how it treats quiet connections."""

    message_bytes_max: int = 128 << 20
    """Longest message, either way; its stream ends with RESOURCE_EXHAUSTED. The default fits a
    buffered body of 64 MiB."""
    streams_max: int = 20_000
    """Open ext_proc streams; one more is refused with RESOURCE_EXHAUSTED, at once."""
    health_streams_max: int = 1_000
    """The same for health calls."""
    outbox_bytes_max: int = 32 << 20
    """Unread answers of one stream beyond which no more is read from it."""
    keepalive_s: float = 60.0
    """A connection this long without data is pinged, so that the streams of a lost gateway end."""
    keepalive_timeout_s: float = 20.0
    """A ping unanswered for this long ends the connection and all its streams."""

    def options(self, *, message_bytes_max: int) -> list[tuple[str, int]]:
        """The server's channel arguments. Gateways ping as often as they like (they would lose all
        streams of a connection otherwise), and no connection is ended for its age."""
        return [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", -1),  # `_Call.send` checks, so that one stream ends
            ("grpc.so_reuseport", 0),  # a second process must fail to bind, not share the port
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ]


class GrpcioServer:
    """Serves ext_proc and health on one port, and health alone, in plaintext, on another.

    Args:
        new_stream: makes the receiver of each ext_proc stream.
        health: what the health service says; `drain` changes it.
        host: address to listen on; `0.0.0.0` or `::` for all.
        port: 0 = a free one.
        health_port: the same; `None` = no second server.
        tls: certificates for `port`, read again for each new connection; `None` = plaintext.
    """

    def __init__(
        self,
        *,
        new_stream: StreamFactory,
        health: Health,
        host: str,
        port: int,
        health_port: int | None = None,
        tls: CertificateSource | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._host, self._port, self._health_port = host, port, health_port
        self._health = health
        self._tls = tls
        self._limits = limits = limits or Limits()
        self._process = _Method(new_stream, limits=limits, calls_max=limits.streams_max)
        self._health_methods = {
            path: _Method(
                factory,
                limits=limits,
                calls_max=limits.health_streams_max,
                outlives_half_close=path in OUTLIVES_HALF_CLOSE,
            )
            for path, factory in health.methods.items()
        }
        self._servers: list[aio.Server] = []

    @property
    def streams_inflight(self) -> int:
        """Open ext_proc streams: those whose `on_close` was not called yet."""
        return len(self._process.calls)

    async def start(self) -> tuple[int, int | None]:
        """Bind and serve. Returns the two ports, the second `None` as asked for.

        Raises: EppError naming the address when one cannot be bound; then neither is served.
        """
        limits = self._limits
        main = aio.server(
            options=limits.options(message_bytes_max=limits.message_bytes_max),
            handlers=(_Router({PROCESS_PATH: self._process, **self._health_methods}),),
        )
        port = _listen(main, self._host, self._port, self._tls)
        servers, health_port = [main], None
        if self._health_port is not None:
            probed = aio.server(
                options=limits.options(message_bytes_max=REQUEST_BYTES_MAX),
                handlers=(_Router(self._health_methods),),
            )
            health_port = _listen(probed, self._host, self._health_port, None)
            servers.append(probed)
        for server in servers:
            await server.start()
        self._servers = servers
        return port, health_port

    async def drain(self, grace_s: float, *, notice_s: float = 0.0) -> None:
        """Report NOT_SERVING, let open streams finish, stop. May be called more than once.

        Returns as soon as the last stream has ended, at the latest after `grace_s`, when what is
        still open is reset. The health port answers until the end.

        Args:
            grace_s: for everything; 0 = stop now.
            notice_s: part of it during which new streams are still served, however few are open:
                as long as gateways need to notice (health check interval, endpoint update).
        """
        notice_s = min(notice_s, grace_s)
        self._health.start_draining()
        if notice_s > 0:
            await asyncio.sleep(notice_s)
        self._health.stop()
        grace_s -= notice_s
        for server in self._servers[:1]:
            await server.stop(grace_s if grace_s > 0 else None)
        await self._process.close()
        for server in self._servers[1:]:
            await server.stop(None)
        for method in self._health_methods.values():
            await method.close()


def _listen(server: aio.Server, host: str, port: int, tls: CertificateSource | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(tls)))
    except RuntimeError:
        raise EppError(f"cannot listen on {address}: {_why_not(host, port)}") from None


def _why_not(host: str, port: int) -> str:
    """Why a port cannot be bound (grpcio does not say), and what to do."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
            probe.listen()
    except (OSError, OverflowError) as error:
        return f"{error}; choose another port or host, or stop what listens there"
    return "gRPC refused it; if it is served with TLS, check the certificate"


def _credentials(tls: CertificateSource) -> grpc.ServerCredentials:
    """Server credentials that follow `tls`; gRPC asks for each new connection, on its threads."""
    served = tls.pair

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        pair = tls.pair
        if pair is served:
            return None
        served = pair
        return _configuration(pair)

    return grpc.dynamic_ssl_server_credentials(_configuration(served), newer)


def _configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        ((pair.private_key, pair.certificate_chain),), root_certificates=None
    )


class _Router:
    """Finds the method by its path; any other path is answered UNIMPLEMENTED by grpc.aio."""

    def __init__(self, methods: dict[str, _Method]) -> None:
        self._handlers = {
            path: grpc.stream_stream_rpc_method_handler(method.handle)
            for path, method in methods.items()
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


class _Method:
    """One gRPC method and its open calls."""

    def __init__(
        self,
        factory: StreamFactory,
        *,
        limits: Limits,
        calls_max: int,
        outlives_half_close: bool = False,
    ) -> None:
        self.factory = factory
        self.limits = limits
        self.calls_max = calls_max
        self.outlives_half_close = outlives_half_close
        self.calls: set[_Call] = set()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Writers and readers; gRPC's own end of a call may come before theirs."""

    async def handle(self, _messages: object, context: aio.ServicerContext) -> None:
        """Serve one RPC; grpc.aio runs this in a task of its own."""
        if self._closed:
            context.set_code(grpc.StatusCode.UNAVAILABLE)
            context.set_details("stopping")
            return
        if len(self.calls) >= self.calls_max:
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(f"{self.calls_max} streams are open already")
            return
        call = _Call(self, context)
        self.calls.add(call)
        self.keep(asyncio.current_task())
        try:
            await call.run()
        finally:
            self.calls.discard(call)

    def keep(self, task: asyncio.Task[None] | None) -> None:
        """Hold a task until it is done, and know it."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """After the server has stopped: tell every stream, and let the tasks end, so that none is
        cancelled in the middle of a native operation when the event loop closes. A call that
        grpc.aio took in before it stopped, and whose task begins only now, is given no stream."""
        self._closed = True
        for call in tuple(self.calls):
            call.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        await asyncio.sleep(0)  # grpc.aio's tasks that wait for these


class _Call:
    """One RPC: the `Transport` of its stream, and the two tasks between it and grpc.aio."""

    __slots__ = (
        "_closed",
        "_context",
        "_half_closed",
        "_method",
        "_outbox",
        "_outbox_bytes",
        "_room",
        "_status",
        "_stream",
        "_wake",
    )

    def __init__(self, method: _Method, context: aio.ServicerContext) -> None:
        self._method = method
        self._context = context
        self._stream: Stream | None = None
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        """Bytes sent by the stream and not yet taken by gRPC, including the message in hand."""
        self._room = asyncio.Event()
        """Wakes a reader that waits for the outbox to shrink."""
        self._wake = asyncio.Event()
        """Wakes the writer."""
        self._status: tuple[int, str] | None = None
        """How the call ends, once that is known: no message is read after that."""
        self._closed = False
        """The stream was told that it is over: nothing it sends counts after that."""
        self._half_closed = False

    @property
    def called(self) -> Called:
        """See `Transport.called`; grpc.aio does not tell the authority."""
        said = dict(self._context.invocation_metadata() or ())
        pool = said.get(POOL, "")
        return Called(pool=pool if isinstance(pool, str) else "")

    def send(self, messages: Sequence[bytes]) -> None:
        """See `Transport.send`."""
        if self._closed or self._status is not None:
            return
        for message in messages:
            if len(message) > self._method.limits.message_bytes_max:
                self.finish(_RESOURCE_EXHAUSTED, f"answer of {len(message)} bytes is too long")
                return
            self._outbox.append(message)
            self._outbox_bytes += len(message)
        self._wake.set()

    def finish(self, status: int = 0, message: str = "") -> None:
        """See `Transport.finish`."""
        if self._closed or self._status is not None:
            return
        self._end(status, message)

    def _end(self, status: int, message: str) -> None:
        self._status = (status, message)
        self._wake.set()
        self._room.set()

    def close(self) -> None:
        """Tell the stream that it is over, the first time only."""
        if self._closed:
            return
        self._closed = True
        self._room.set()
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.on_close()
        except Exception:  # noqa: BLE001 - a bug of ours must not end other streams
            _log.exception("closing a stream failed")

    async def run(self) -> None:
        """Serve until the end; this is also the writer.

        Raises: CancelledError of grpc.aio when the peer reset the stream, and the error of a write
            to a stream that was reset: grpc.aio knows both for what they are and stays quiet.
        """
        try:
            self._open()
            await self._write()
        except aio.BaseError:
            self.close()
            await asyncio.sleep(_RESET_S)  # let the cancel come first
            raise
        finally:
            self.close()

    def _open(self) -> None:
        try:
            self._stream = stream = self._method.factory(self)
        except Exception:  # noqa: BLE001 - a bug of ours must not end other streams
            self._fail("opening a stream failed")
            return
        self._method.keep(asyncio.create_task(self._read(stream)))

    async def _read(self, stream: Stream) -> None:
        while self._readable():
            try:
                data = await self._context.read()
            except aio.BaseError:
                return  # the call ended under the read
            if not self._readable():
                return
            if data is aio.EOF:
                self._on_end()
                return
            try:
                stream.on_message(data)
            except Exception:  # noqa: BLE001 - as in `_open`
                self._fail("a message of a stream failed")
            await self._wait_for_room()

    def _readable(self) -> bool:
        return self._status is None and not self._closed

    def _on_end(self) -> None:
        """The peer reset the stream or half-closed it."""
        if not self._method.outlives_half_close:
            self.close()
            self._half_closed = True
            self._end(0, "")

    async def _wait_for_room(self) -> None:
        while self._outbox_bytes > self._method.limits.outbox_bytes_max and self._readable():
            self._room.clear()
            await self._room.wait()

    def _fail(self, what: str) -> None:
        """Called where an exception of the stream, a bug of ours, is being handled."""
        _log.exception(what)
        self.finish(_INTERNAL, "internal error")

    async def _write(self) -> None:
        while self._status is None or self._outbox:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                message = self._outbox.popleft()
                await self._context.write(message)
                self._outbox_bytes -= len(message)
                self._room.set()
        if self._half_closed:
            await asyncio.sleep(_RESET_S)  # a cancel that comes now says it was a reset
        status, details = self._status
        self._context.set_code(_STATUS.get(status, grpc.StatusCode.UNKNOWN))
        self._context.set_details(details)
