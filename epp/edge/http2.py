"""The fast transport: `wire.http2` on sockets, in one thread, without a task per stream.

A `_Connection` hands what it reads to a `ServerConnection`, which calls the streams at once, and
writes what came of it: all the answers to one read leave in one `writelines`. What a stream sends
at another time asks for one write at the end of the event loop's turn (`_Connection.wake`). A
connection has at most one timer, armed for the earliest thing its `ServerConnection` waits for; it
is left alone while that moves later and looks again when it fires.

Back-pressure: a peer that does not read fills the socket, then the transport's buffer, of which
`ServerConnection` is told (`written`); it then holds messages back in their streams and, when these
are full, says not to read from the peer (`reading`) until that has read. Others are not delayed.

TLS: the context of the newest certificate is used for each connection that begins. A client that
did not negotiate `h2` is disconnected: it does not speak gRPC.

Ends of a connection: the peer closes or is lost; `ServerConnection.closed` (a peer that breaks the
protocol or is silent, a drain), where what is still to be said is sent and the peer has `LINGER_S`
to take it and to close, so that no reset of TCP overtakes the GOAWAY.

Cost: see `make bench-transport`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from epp.core.streams import Stream, StreamFactory, Transport
from epp.edge.accept import Acceptor, bind
from epp.edge.health import EXT_PROC_SERVICE, OUTLIVES_HALF_CLOSE, REQUEST_BYTES_MAX, Health
from epp.edge.tls import CertificateError, CertificateSource, KeyPair, ssl_context
from epp.wire.http2.connection import ServerConnection
from epp.wire.http2.faults import ConnectionFault
from epp.wire.http2.frames import ErrorCode
from epp.wire.http2.limits import Http2Limits

PROCESS_PATH = f"/{EXT_PROC_SERVICE}/Process"
LINGER_S = 1.0
"""How long a connection that is over may take to deliver its last frames."""
WRITE_BUFFER_BYTES_MAX = 1 << 18
"""Unsent bytes beyond the socket's own buffer from which on a peer counts as slow."""

_RESOURCE_EXHAUSTED = 8
_TIMER_SLACK_S = 0.002
"""Timers of uvloop count whole milliseconds; one that fires too early would fire twice."""

_log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server takes on, and how it treats quiet connections. The names both transports
    have mean the same in both."""

    message_bytes_max: int = 128 << 20
    """Longest message, either way; its stream ends with RESOURCE_EXHAUSTED. The default fits a
    buffered body of 64 MiB."""
    streams_max: int = 20_000
    """Open ext_proc streams; one more is refused with RESOURCE_EXHAUSTED, at once."""
    health_streams_max: int = 1_000
    """The same for each health method."""
    outbox_bytes_max: int = 32 << 20
    """Unread answers of one connection beyond which no more is read from it."""
    keepalive_s: float = 60.0
    """A connection this long without data is pinged, so that the streams of a lost gateway end."""
    keepalive_timeout_s: float = 20.0
    """A ping unanswered for this long ends the connection and all its streams."""
    connections_max: int = 4_096
    """Open connections per port; more wait to be accepted until one ends."""
    handshake_timeout_s: float = 10.0
    """Within this a connection must have finished its TLS handshake, and then HTTP/2's."""


class Http2Server:
    """Serves ext_proc and health on one port, and health alone, in plaintext, on another.

    Args:
        new_stream: makes the receiver of each ext_proc stream.
        health: what the health service says; `drain` changes it.
        host: address to listen on; `0.0.0.0` or `::` for all, of both families.
        port: 0 = a free one.
        health_port: the same; `None` = no second server.
        tls: certificates for `port`, read again for each new connection; `None` = plaintext.
        report_fault: told of each fault of a peer and each shortage, by a reason out of few: to
            count them.
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
        report_fault: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._host, self._port, self._health_port = host, port, health_port
        self._health = health
        self._limits = limits = limits or Limits()
        self._certificates = None if tls is None else _Certificates(tls)
        self._report_fault = report_fault
        self._process = _Method(new_stream, calls_max=limits.streams_max)
        self._health_methods = {
            path: _Method(factory, calls_max=limits.health_streams_max)
            for path, factory in health.methods.items()
        }
        self._ports: list[_Port] = []

    @property
    def streams_inflight(self) -> int:
        """Open ext_proc streams: those whose `on_close` was not called yet."""
        return self._process.calls

    async def start(self) -> tuple[int, int | None]:
        """Bind and serve. Returns the two ports, the second `None` as asked for.

        Raises: EppError naming the address when one cannot be bound, or the certificate that
            cannot be used; then neither is served.
        """
        limits = self._limits
        if self._certificates is not None:
            self._certificates.context()
        sockets = [bind(self._host, self._port)]
        if self._health_port is not None:
            try:
                sockets.append(bind(self._host, self._health_port))
            except BaseException:
                for listening in sockets[0]:
                    listening.close()
                raise
        methods = {PROCESS_PATH: self._process, **self._health_methods}
        self._serve(sockets[0], methods, limits.message_bytes_max, self._certificates)
        for listening_too in sockets[1:]:
            self._serve(listening_too, self._health_methods, REQUEST_BYTES_MAX, None)
        ports = [port.start() for port in self._ports]
        return ports[0], ports[1] if len(ports) > 1 else None

    def _serve(
        self,
        sockets: list[socket.socket],
        methods: Mapping[str, _Method],
        message_bytes_max: int,
        certificates: _Certificates | None,
    ) -> None:
        limits = self._limits
        port = _Port(
            sockets,
            handlers={path: method.open for path, method in methods.items()},
            http2=_http2_limits(limits, message_bytes_max=message_bytes_max),
            limits=limits,
            certificates=certificates,
            report_fault=self._report_fault,
        )
        self._ports.append(port)

    async def drain(self, grace_s: float, *, notice_s: float = 0.0) -> None:
        """Report NOT_SERVING, let open streams finish, stop. May be called more than once, also
        after it was cancelled.

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
        for port in self._ports[:1]:
            await port.drain(grace_s - notice_s)
        for port in self._ports[1:]:
            await port.drain(0.0)


def _http2_limits(limits: Limits, *, message_bytes_max: int) -> Http2Limits:
    return Http2Limits(
        message_bytes_max=message_bytes_max,
        outbox_bytes_high=limits.outbox_bytes_max,
        keepalive_s=limits.keepalive_s,
        keepalive_timeout_s=limits.keepalive_timeout_s,
        settle_s=limits.handshake_timeout_s,
    )


class _Certificates:
    """The TLS context of the newest certificate."""

    def __init__(self, source: CertificateSource) -> None:
        self._source = source
        self._pair: KeyPair | None = None
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """For a connection that begins now.

        Raises: CertificateError when the first certificate cannot be used; a later one that cannot
            is logged, and the former stays.
        """
        pair = self._source.pair
        if pair is not self._pair:
            self._pair = pair
            try:
                self._context = ssl_context(pair)
            except CertificateError as error:
                if self._context is None:
                    raise
                _log.error("the former TLS certificate stays in use: %s", error)
        assert self._context is not None
        return self._context


class _Method:
    """One gRPC method: opens its streams and counts them."""

    def __init__(self, factory: StreamFactory, *, calls_max: int) -> None:
        self._factory = factory
        self._calls_max = calls_max
        self.calls = 0
        """Open ones."""

    def open(self, transport: Transport) -> Stream:
        """A StreamFactory."""
        if self.calls >= self._calls_max:
            transport.finish(_RESOURCE_EXHAUSTED, f"{self._calls_max} streams are open already")
            return _Refused()
        return _Counted(self, self._factory(transport))


class _Refused:
    """A stream that was finished as it opened."""

    __slots__ = ()

    def on_message(self, data: bytes) -> None:
        """See `Stream.on_message`."""

    def on_close(self) -> None:
        """See `Stream.on_close`."""


class _Counted:
    """A stream that counts as open until it is closed. Its messages go straight to the stream."""

    __slots__ = ("_method", "_on_close", "on_message")

    def __init__(self, method: _Method, stream: Stream) -> None:
        self.on_message = stream.on_message
        self._on_close = stream.on_close
        self._method = method
        method.calls += 1

    def on_close(self) -> None:
        """See `Stream.on_close`."""
        self._method.calls -= 1
        self._on_close()


class _Port:
    """One port that is served, and its connections."""

    def __init__(
        self,
        sockets: list[socket.socket],
        *,
        handlers: Mapping[str, StreamFactory],
        http2: Http2Limits,
        limits: Limits,
        certificates: _Certificates | None,
        report_fault: Callable[[str], None],
    ) -> None:
        self._handlers = handlers
        self._http2 = http2
        self._limits = limits
        self._certificates = certificates
        self.report_fault = report_fault
        self.draining = False
        self.connections: set[_Connection] = set()
        """All that were accepted and not lost, those in their TLS handshake included."""
        self._joining: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._acceptor = Acceptor(
            sockets, take=self._take, has_room=self._has_room, report_full=report_fault
        )

    def start(self) -> int:
        """Accept connections; returns the port's number."""
        self._acceptor.resume()
        return self._acceptor.port

    def _has_room(self) -> bool:
        return len(self.connections) < self._limits.connections_max

    def _take(self, accepted: socket.socket) -> None:
        connection = _Connection(self)
        self.connections.add(connection)
        task = asyncio.create_task(self._join(connection, accepted))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, connection: _Connection, accepted: socket.socket) -> None:
        tls, timeout_s = self._certificates, self._limits.handshake_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=tls and tls.context(),
                ssl_handshake_timeout=timeout_s if tls else None,
            )
        except OSError:  # ssl.SSLError is one, and so is a timeout
            self.report_fault("tls_handshake")
        finally:
            if not connection.made:
                accepted.close()
                self.left(connection)

    def connect(self, wake: Callable[[], None], now_s: float) -> ServerConnection:
        """The HTTP/2 of a connection."""
        return ServerConnection(
            handlers=self._handlers,
            limits=self._http2,
            now_s=now_s,
            wake=wake,
            outlives_half_close=OUTLIVES_HALF_CLOSE,
            on_error=self._on_error,
        )

    def _on_error(self, fault: ConnectionFault) -> None:
        self.report_fault(fault.reason)
        if fault.error is not None:
            _log.error("a stream failed", exc_info=fault.error)
        else:
            _log.debug("peer at fault: %s %s", fault.reason, fault.detail)

    def left(self, connection: _Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
        if not self.draining:
            self._acceptor.resume()

    async def drain(self, grace_s: float) -> None:
        """Accept no more, let open streams finish within `grace_s`, reset the rest."""
        self.draining = True
        self._acceptor.close()
        if grace_s > 0:
            for connection in tuple(self.connections):
                connection.shut_down()
            await self._until_empty(grace_s)
        for connection in tuple(self.connections):
            connection.stop()
        await self._until_empty(LINGER_S)
        for task in self._joining:
            task.cancel()
        for connection in tuple(self.connections):
            connection.abort()
        await self._until_empty(LINGER_S)

    async def _until_empty(self, timeout_s: float) -> None:
        self._empty.clear()
        if self.connections:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
            except TimeoutError:
                return


class _Connection(asyncio.Protocol):
    """One connection: between an asyncio transport and a `ServerConnection`."""

    __slots__ = (
        "_h2",
        "_loop",
        "_over",
        "_port",
        "_reading",
        "_slow",
        "_timer",
        "_timer_s",
        "_transport",
        "_woken",
        "made",
    )

    def __init__(self, port: _Port) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._h2: ServerConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._reading = True
        self._slow = False
        """The peer does not keep up with reading what we write."""
        self._woken = False
        self._over = False
        """Nothing is read or sent any more."""
        self.made = False

    # -- asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made = True
        self._transport = cast("asyncio.Transport", transport)
        secure = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            self._port.report_fault("alpn")
            self._over = True
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._h2 = self._port.connect(self._wake, self._loop.time())
        if self._port.draining:
            self._h2.shut_down(self._loop.time())
        self._settle(self._h2)

    def data_received(self, data: bytes) -> None:
        h2 = self._h2
        if h2 is not None and not self._over:
            h2.receive(data, self._loop.time())
            self._settle(h2)

    def pause_writing(self) -> None:
        self._slow = True
        if self._h2 is not None and not self._over:
            self._report_unsent(self._h2)

    def resume_writing(self) -> None:
        self._slow = False
        if self._h2 is not None and not self._over:
            self._report_unsent(self._h2)
            self._settle(self._h2)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        h2, self._h2 = self._h2, None
        if h2 is not None:
            h2.lost()
        self._transport = None
        self._port.left(self)

    # -- between the two -------------------------------------------------------------------

    def _wake(self) -> None:
        """A stream sent something on its own account."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False
        if self._h2 is not None and not self._over:
            self._settle(self._h2)

    def _on_timer(self) -> None:
        self._timer = None
        if self._h2 is not None and not self._over:
            self._h2.on_time(self._loop.time())
            self._settle(self._h2)

    def _settle(self, h2: ServerConnection) -> None:
        """After anything has happened: write, end, read or not, look again in time."""
        assert self._transport is not None
        output = h2.take_output()
        if output:
            self._transport.writelines(output)
            if self._slow:
                self._report_unsent(h2)
        if h2.closed:
            self._end()
            return
        due_s = h2.next_deadline_s()
        if due_s is not None and (self._timer is None or due_s < self._timer_s):
            self._arm(due_s)

    def _report_unsent(self, h2: ServerConnection) -> None:
        assert self._transport is not None
        h2.written(self._transport.get_write_buffer_size())
        if h2.reading is not self._reading:
            self._reading = h2.reading
            if self._reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._loop.call_at(due_s + _TIMER_SLACK_S, self._on_timer)

    # -- ends ------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Let open streams finish, refuse others, then close."""
        if self._h2 is not None and not self._over:
            self._h2.shut_down(self._loop.time())
            self._settle(self._h2)

    def stop(self) -> None:
        """Reset what is open, then close."""
        if self._h2 is not None and not self._over:
            self._h2.abort(ErrorCode.NO_ERROR)
            self._settle(self._h2)

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        """Deliver what was written, then close; what still comes in is dropped."""
        assert self._transport is not None
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
        if not self._reading:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
