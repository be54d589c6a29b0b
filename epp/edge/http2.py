"""The fast transport: `wire.http2` on sockets, in one thread, without a task per stream.

`Http2Server` binds its ports, counts the open streams of each method and refuses one too many, and
drains; `edge.http2_port` is one port and its connections. It behaves as `edge.grpcio` does, but
that it has a bound on connections, refuses what is no gRPC sooner, and tells `report_fault`.

Order of a drain: health says NOT_SERVING and everything goes on while gateways take notice; then
nothing is accepted any more, watches of health end, and every connection is told (GOAWAY), which
leaves its open streams alone; connections without streams close at once. When the grace is over
what is open is reset. The health port answers until then.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping

import msgspec

from epp.core.streams import Stream, StreamFactory, Transport
from epp.edge.accept import bind
from epp.edge.health import EXT_PROC_SERVICE, REQUEST_BYTES_MAX, Health
from epp.edge.http2_port import Certificates, Port
from epp.edge.tls import CertificateSource
from epp.wire.http2.connection import Http2Limits

PROCESS_PATH = f"/{EXT_PROC_SERVICE}/Process"
_RESOURCE_EXHAUSTED = 8


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
    """Unread answers of one stream beyond which its peer may not send more on it."""
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
        tls_version_min: lowest TLS version spoken.
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
        tls_version_min: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
        limits: Limits | None = None,
        report_fault: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._host, self._port, self._health_port = host, port, health_port
        self._health = health
        self._limits = limits = limits or Limits()
        self._certificates = None if tls is None else Certificates(tls, tls_version_min)
        self._report_fault = report_fault
        self._process = _Method(new_stream, calls_max=limits.streams_max)
        self._health_methods = {
            path: _Method(factory, calls_max=limits.health_streams_max)
            for path, factory in health.methods.items()
        }
        self._ports: list[Port] = []

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
        certificates: Certificates | None,
    ) -> None:
        limits = self._limits
        port = Port(
            sockets,
            handlers={path: method.open for path, method in methods.items()},
            http2=_http2_limits(limits, message_bytes_max=message_bytes_max),
            connections_max=limits.connections_max,
            handshake_timeout_s=limits.handshake_timeout_s,
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
    defaults = Http2Limits()
    return Http2Limits(
        message_bytes_max=message_bytes_max,
        partial_bytes_max=max(defaults.partial_bytes_max, 2 * message_bytes_max),
        outbox_bytes_high=limits.outbox_bytes_max,
        outbox_bytes_max=max(defaults.outbox_bytes_max, 2 * message_bytes_max),
        outboxes_bytes_max=max(defaults.outboxes_bytes_max, 4 * message_bytes_max),
        keepalive_s=limits.keepalive_s,
        keepalive_timeout_s=limits.keepalive_timeout_s,
        settle_s=limits.handshake_timeout_s,
    )


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
        self.calls += 1  # first, so that the factory sees a count with its own stream in it
        try:
            return _Counted(self, self._factory(transport))
        except BaseException:
            self.calls -= 1
            raise


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

    def on_close(self) -> None:
        """See `Stream.on_close`."""
        self._method.calls -= 1
        self._on_close()
