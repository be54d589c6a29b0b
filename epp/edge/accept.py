"""Listening sockets, and accepting from them only while there is room.

`bind` gives the sockets of one address; an `Acceptor` takes connections from them. While
`has_room` says no, nothing is accepted: new connections wait in the kernel's queue, and beyond it
their SYNs go unanswered, so a flood of connections costs the flooder and not the streams that are
served. `resume` goes on. The same pause, for `RETRY_S`, follows when the process or the machine
has no descriptor or no memory for one more.

Cost: one system call per connection and one to see that there is none left.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from epp.core.errors import EppError

BACKLOG = 1_024
"""Connections the kernel completes before they are accepted."""
ACCEPTS_PER_TURN_MAX = 64
"""Connections taken before streams get their turn again."""
RETRY_S = 1.0
WILDCARDS = ("0.0.0.0", "::", "")
"""Each of them means all addresses, of IPv4 and IPv6 alike, as in gRPC."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, all on one port; `port` 0 = a free one.

    A port that another socket listens on is an error also where the kernel would let us share it.
    Raises: EppError naming the address and the remedy; then nothing is bound.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            sockets.append(_listen(family, (address, port)))
            port = sockets[0].getsockname()[1]
    except (OSError, OverflowError, UnicodeError) as error:
        for opened in sockets:
            opened.close()
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise EppError(
            f"cannot listen on {shown}: {error}; choose another port or host, or stop what "
            "listens there"
        ) from None
    return sockets


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    """Family and address of each socket; one IPv6 socket serves both families of a wildcard."""
    if host in WILDCARDS:
        return [(socket.AF_INET6, "::") if _has_ipv6() else (socket.AF_INET, "0.0.0.0")]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    scoped = ((family, _scoped(address)) for family, _, _, _, address in found)
    return list(dict.fromkeys(scoped))


def _scoped(address: tuple[object, ...]) -> str:
    """With the zone of a link-local address (`fe80::1%2`), which only the tuple has."""
    host = str(address[0])
    return f"{host}%{address[3]}" if len(address) == 4 and address[3] and "%" not in host else host


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
        return False
    return True


def _listen(family: int, address: tuple[str, int]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only = address[0] != "::"
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


class Acceptor:
    """Takes connections from listening sockets; it owns and closes them.

    Args:
        take: gets each accepted socket, non-blocking, and owns it.
        has_room: whether one more may be accepted now; after a no, somebody calls `resume`.
        report_full: called when accepting pauses, with what is exhausted: `connections` (no room)
            or `descriptors`.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        *,
        take: Callable[[socket.socket], None],
        has_room: Callable[[], bool],
        report_full: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._take = take
        self._has_room = has_room
        self._report_full = report_full
        self._accepting = False
        self._retry: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port of all its sockets."""
        return int(self._sockets[0].getsockname()[1])

    def resume(self) -> None:
        """Accept from now on; nothing happens while it does, waits out a shortage or is closed."""
        if self._accepting or self._retry is not None:
            return
        self._accepting = True
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        """Stop listening; what waits in the kernel's queue is reset."""
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        sockets, self._sockets = self._sockets, []
        for listening in sockets:
            listening.close()

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            for listening in self._sockets:
                self._loop.remove_reader(listening.fileno())

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            if not self._has_room():
                self._pause()
                self._report_full("connections")
                return
            try:
                accepted, _peer = listening.accept()
            except OSError as error:
                # Anything else concerns the connection that was to be accepted, and it is gone.
                if error.errno in _EXHAUSTED:
                    self._wait()
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._take(accepted)

    def _wait(self) -> None:
        self._pause()
        self._report_full("descriptors")
        self._retry = self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.resume()
