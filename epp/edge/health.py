"""grpc.health.v1 for every transport: one state, three methods, no gRPC library.

A method is a `StreamFactory` like the ext_proc one, because on the wire a unary call is a stream of
one message: a transport needs only a path and a factory (`Health.methods`). `Check` and `List`
answer their one message and finish. `Watch` answers at once and again after each change; its
client half-closes right away, so a transport must let the stream of `WATCH_PATH` live on after
that (`OUTLIVES_HALF_CLOSE`).

States: a process is not ready, ready, draining (for good) or stopped. `liveness` is SERVING in all
of them, so that no probe kills a process that waits for its pool, stands by or drains; every other
name is SERVING only when ready. Names are fixed, so an unknown name stays unknown.

Bounds: watchers are counted, a message longer than `REQUEST_BYTES_MAX` is refused unread, and a
watcher gets a message only when its own status changes.

Source: grpc/health/v1/health.proto (field numbers); names as in the reference EPP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType

from epp.core.streams import Stream, StreamFactory, Transport

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
SERVICES: tuple[str, ...] = ("", EXT_PROC_SERVICE, "inference-extension", LIVENESS, "readiness")
"""Every name that has a status; `""` is the server as a whole."""

CHECK_PATH = "/grpc.health.v1.Health/Check"
LIST_PATH = "/grpc.health.v1.Health/List"
WATCH_PATH = "/grpc.health.v1.Health/Watch"
OUTLIVES_HALF_CLOSE = frozenset({WATCH_PATH})
"""Methods whose stream ends with a reset or `finish` only, not when the client half-closes."""

REQUEST_BYTES_MAX = 4_096
"""Longest health request read; the longest real one is 46 bytes."""

_INVALID_ARGUMENT, _NOT_FOUND, _RESOURCE_EXHAUSTED, _UNAVAILABLE = 3, 5, 8, 14


class ServingStatus(IntEnum):
    """`grpc.health.v1.HealthCheckResponse.ServingStatus`, same numbers."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3
    """In answers to `Watch` only; `Check` of an unknown name fails with NOT_FOUND."""


class Health:
    """Is this process ready to answer? Change and read it on the event loop only.

    Args:
        watchers_max: open `Watch` streams, >= 1; one more is refused with RESOURCE_EXHAUSTED.
    """

    def __init__(self, *, watchers_max: int = 256) -> None:
        self._ready = False
        self._draining = False
        self._stopped = False
        self._watchers_max = watchers_max
        self._watchers: dict[_Watch, None] = {}
        self.methods: Mapping[str, StreamFactory] = MappingProxyType(
            {
                CHECK_PATH: lambda transport: _Unary(transport, self._check),
                LIST_PATH: lambda transport: _Unary(transport, self._list),
                WATCH_PATH: lambda transport: _Watch(transport, self),
            }
        )

    @property
    def ready(self) -> bool:
        """Ready and not draining: what `readiness` says."""
        return self._ready and not self._draining

    @property
    def watchers(self) -> int:
        """Open `Watch` streams that have a status."""
        return len(self._watchers)

    def status(self, service: str) -> ServingStatus:
        """The status of one name, `SERVICE_UNKNOWN` for a name not in `SERVICES`."""
        if service not in SERVICES:
            return ServingStatus.SERVICE_UNKNOWN
        if service == LIVENESS or self.ready:
            return ServingStatus.SERVING
        return ServingStatus.NOT_SERVING

    def set_ready(self, ready: bool) -> None:
        """Say whether what we depend on is there (pool listed once, leader). A draining process
        stays unready."""
        self._ready = ready
        self._tell_watchers()

    def start_draining(self) -> None:
        """NOT_SERVING from now on; there is no way back."""
        self._draining = True
        self._tell_watchers()

    def stop(self) -> None:
        """Drain and end every watch with UNAVAILABLE, so that none holds a server open; later
        watches are refused, `Check` and `List` still answer."""
        self.start_draining()
        self._stopped = True
        for watcher in tuple(self._watchers):
            watcher.transport.finish(_UNAVAILABLE, "shutting down")
        self._watchers.clear()

    def _tell_watchers(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.tell(self.status(watcher.service))

    def _check(self, data: bytes) -> bytes:
        service = decode_check_request(data)
        status = self.status(service)
        if status is ServingStatus.SERVICE_UNKNOWN:
            names = ", ".join(repr(name) for name in SERVICES)
            raise _Refused(_NOT_FOUND, f"unknown service {service[:64]!r}; known are {names}")
        return encode_check_response(status)

    def _list(self, _data: bytes) -> bytes:
        return encode_list_response({name: self.status(name) for name in SERVICES})

    def _watch(self, watcher: _Watch) -> None:
        """Called by a watch that knows its service."""
        if self._stopped:
            raise _Refused(_UNAVAILABLE, "shutting down")
        if len(self._watchers) >= self._watchers_max:
            raise _Refused(
                _RESOURCE_EXHAUSTED, f"{self._watchers_max} watchers already; poll with Check"
            )
        self._watchers[watcher] = None
        watcher.tell(self.status(watcher.service))

    def _unwatch(self, watcher: _Watch) -> None:
        self._watchers.pop(watcher, None)


class _Refused(Exception):  # noqa: N818 - what it is
    """This call ends with a gRPC status instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _Unary(Stream):
    """`Check` and `List`: one message in, one out."""

    def __init__(self, transport: Transport, answer: Callable[[bytes], bytes]) -> None:
        self._transport = transport
        self._answer = answer

    def on_message(self, data: bytes) -> None:
        try:
            reply = self._answer(data)
        except _Refused as refused:
            self._transport.finish(refused.status, refused.message)
        else:
            self._transport.send((reply,))
            self._transport.finish()

    def on_close(self) -> None:
        pass  # a unary call holds nothing


class _Watch(Stream):
    """One `Watch`: silent until its service is named, then a message for each change."""

    def __init__(self, transport: Transport, health: Health) -> None:
        self.transport = transport
        self.service = ""
        self._health = health
        self._told: ServingStatus | None = None

    def on_message(self, data: bytes) -> None:
        if self._told is not None:
            return  # a second request in one watch means nothing
        try:
            self.service = decode_check_request(data)
            self._health._watch(self)
        except _Refused as refused:
            self.transport.finish(refused.status, refused.message)

    def on_close(self) -> None:
        self._health._unwatch(self)

    def tell(self, status: ServingStatus) -> None:
        if status is not self._told:
            self._told = status
            self.transport.send((encode_check_response(status),))


def decode_check_request(data: bytes) -> str:
    """The `service` of a `HealthCheckRequest`; unknown fields are skipped, the last value wins.

    Raises: _Refused with INVALID_ARGUMENT when the bytes are too many, malformed or not UTF-8.
    """
    if len(data) > REQUEST_BYTES_MAX:
        raise _Refused(_INVALID_ARGUMENT, f"health request longer than {REQUEST_BYTES_MAX} bytes")
    service, at = b"", 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            start, at = _payload(data, at, wire_type=key & 7)
            if key == 0x0A:
                service = data[start:at]
        return service.decode()
    except (IndexError, ValueError):
        raise _Refused(_INVALID_ARGUMENT, "not a grpc.health.v1.HealthCheckRequest") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Value and offset behind it. Raises: IndexError at the end, ValueError past ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a varint has at most ten bytes")


def _payload(data: bytes, at: int, *, wire_type: int) -> tuple[int, int]:
    """Where a field's value begins and ends. Raises: IndexError, ValueError when it is cut off."""
    if wire_type == 0:
        return at, _varint(data, at)[1]
    if wire_type == 2:
        size, at = _varint(data, at)
    elif wire_type in (1, 5):
        size = 8 if wire_type == 1 else 4
    else:
        raise ValueError("groups are not used")
    if at + size > len(data):
        raise IndexError("cut off")
    return at, at + size


def encode_check_response(status: ServingStatus) -> bytes:
    """A `HealthCheckResponse`."""
    return bytes((0x08, status))


def encode_list_response(statuses: Mapping[str, ServingStatus]) -> bytes:
    """A `HealthListResponse`; names must be shorter than 100 bytes each (lengths are one byte)."""
    response = bytearray()
    for name, status in statuses.items():
        key, value = name.encode(), encode_check_response(status)
        assert len(key) < 100, "a service name this long needs a longer length"
        entry = bytes((0x0A, len(key))) + key + bytes((0x12, len(value))) + value
        response += bytes((0x0A, len(entry))) + entry
    return bytes(response)
