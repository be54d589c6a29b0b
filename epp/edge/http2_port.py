"""One port of the fast transport: its connections, each between a socket and a `ServerConnection`.

A `_Connection` hands what it reads to its `ServerConnection`, which calls the streams at once, and
writes what came of it: all the answers to one read leave in one write. What a stream sends at
another time asks for one write at the end of the event loop's turn (`_Connection._wake`). A
connection has at most one timer, armed for the earliest thing its `ServerConnection` waits for; it
is left alone while that moves later and looks again when it fires.

Back-pressure: a peer that does not read fills the socket, then the transport's buffer, of which
`ServerConnection` is told (`written`); it then holds messages back in their streams and says not to
read from the peer (`reading`) until that has read. Others are not delayed.

TLS: the context of the newest certificate is used for each connection that begins. A client that
did not negotiate `h2` is disconnected: it does not speak gRPC.

Ends of a connection: the peer closes or is lost; or `ServerConnection.closed` (a peer that breaks
the protocol or is silent, a drain), where what is still to be said is sent and the peer has
`LINGER_S` to take it and to close, so that no reset of TCP overtakes the GOAWAY.

Cost beside that of `ServerConnection`: about 2 us per wake-up; see `make bench-transport`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import cast

from epp.core.streams import StreamFactory
from epp.edge.accept import Acceptor
from epp.edge.health import OUTLIVES_HALF_CLOSE
from epp.edge.tls import CertificateError, CertificateSource, KeyPair, ssl_context
from epp.wire.http2.connection import ConnectionFault, ErrorCode, Http2Limits, ServerConnection

LINGER_S = 1.0
"""How long a connection that is over may take to deliver its last frames."""
WRITE_BUFFER_BYTES_MAX = 1 << 18
"""Unsent bytes beyond the socket's own buffer from which on we are told when there is room again;
less than `Http2Limits.output_bytes_high`, from which on nothing is sent without being told."""

_TIMER_SLACK_S = 0.002
"""Timers of uvloop count whole milliseconds; one that fires too early would fire twice."""

_log = logging.getLogger(__name__)


class Certificates:
    """The TLS context of the newest certificate."""

    def __init__(self, source: CertificateSource, version_min: ssl.TLSVersion) -> None:
        self._source = source
        self._version_min = version_min
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
                self._context = ssl_context(pair, version_min=self._version_min)
            except CertificateError as error:
                if self._context is None:
                    raise
                _log.error("the former TLS certificate stays in use: %s", error)
        assert self._context is not None
        return self._context


class Port:
    """One port that is served, and its connections."""

    def __init__(
        self,
        sockets: list[socket.socket],
        *,
        handlers: Mapping[str, StreamFactory],
        http2: Http2Limits,
        connections_max: int,
        handshake_timeout_s: float,
        certificates: Certificates | None,
        report_fault: Callable[[str], None],
    ) -> None:
        self._handlers = handlers
        self._http2 = http2
        self._connections_max = connections_max
        self._handshake_timeout_s = handshake_timeout_s
        self._certificates = certificates
        self.report_fault = report_fault
        self._told_alpn = False
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
        return len(self.connections) < self._connections_max

    def _take(self, accepted: socket.socket) -> None:
        connection = _Connection(self)
        self.connections.add(connection)
        task = asyncio.create_task(self._join(connection, accepted))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, connection: _Connection, accepted: socket.socket) -> None:
        tls, timeout_s = self._certificates, self._handshake_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=None if tls is None else tls.context(),
                ssl_handshake_timeout=None if tls is None else timeout_s,
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

    def on_other_protocol(self) -> None:
        """A TLS client speaks something else; gateways are told how by the first one's log line."""
        self.report_fault("alpn")
        if not self._told_alpn:
            self._told_alpn = True
            _log.warning(
                "a TLS client that did not negotiate HTTP/2 was disconnected; if it is the gateway,"
                " set the ALPN protocol `h2` in its TLS settings for this server"
            )

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
        for task in self._joining:
            task.cancel()
        for connection in tuple(self.connections):
            connection.stop()
        await self._until_empty(LINGER_S)
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
        "_timer",
        "_timer_s",
        "_transport",
        "_woken",
        "made",
    )

    def __init__(self, port: Port) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._h2: ServerConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._reading = True
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
            self._port.on_other_protocol()
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

    def resume_writing(self) -> None:
        h2 = self._h2
        if h2 is not None and not self._over and self._transport is not None:
            h2.written(self._transport.get_write_buffer_size())
            self._settle(h2)

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
        h2 = self._h2
        if h2 is not None and not self._over and self._transport is not None:
            if not self._reading:
                # A peer that we do not read from shows only by taking our output that it lives.
                h2.written(self._transport.get_write_buffer_size())
            h2.on_time(self._loop.time())
            self._settle(h2)

    def _settle(self, h2: ServerConnection) -> None:
        """After anything has happened: write, end, read or not, look again in time."""
        transport = self._transport
        assert transport is not None
        if output := h2.take_output():
            transport.writelines(output)
            h2.written(transport.get_write_buffer_size())
        if h2.closed:
            self._end()
            return
        if h2.reading is not self._reading:
            self._reading = h2.reading
            if self._reading:
                transport.resume_reading()
            else:
                transport.pause_reading()
        due_s = h2.next_deadline_s()
        if due_s is not None and (self._timer is None or due_s < self._timer_s):
            self._arm(due_s)

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
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
        except OSError:  # the peer was faster
            self._transport.abort()
