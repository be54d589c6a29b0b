"""Endpoints without Kubernetes: from a flag, or from a file that may be watched.

Both tell the pool the complete membership, `Members`, each time it differs from what they said
last. Both resolve host names: a gateway takes the pick as a destination and needs `ip:port` there
(Envoy's `override_host` knows no names), so a name stands for all its A and AAAA records, each an
endpoint of its own named `name/ip`. Names are looked up on threads of their own, enough that some
names without an answer keep no others waiting, at the start and then every 30 s; a name that cannot
be looked up keeps the addresses it had, at the start none.

A watched file is looked at once a second (`stat`, following symbolic links, so that the swap of a
ConfigMap's `..data` link is seen like any other change; file events would miss it). What has
changed is read when the next look finds it unchanged, so that a file being written in place is not
read half written. A new file that is missing or wrong keeps the endpoints of the last good one, and
is complained about once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from epp.config.decode import decode
from epp.config.text import read_yaml
from epp.core.addresses import AddressError, endpoint_spec
from epp.core.errors import ConfigError
from epp.core.model import EndpointSpec
from epp.core.pool import Members

RESOLVE_INTERVAL_S = 30.0
RESOLVE_TIMEOUT_S = 5.0
RESOLVERS_MAX = 64
"""Names looked up at once; a look-up that got no answer in time may go on for a while."""
WATCH_INTERVAL_S = 1.0
FILE_BYTES_MAX = 2**20

Apply = Callable[[Members], object]
Signature = tuple[int, int, int, int]
"""Device, inode, modification time and size of the file behind all links."""

log = logging.getLogger(__name__)


def parse_endpoints(text: str, *, flag: str = "--endpoints") -> tuple[EndpointSpec, ...]:
    """Read `HOST:PORT,...`; blanks around an entry and a last comma do not count.

    Raises: ConfigError that begins with `flag`, for an entry that is no address, one that comes
        twice, or none at all.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if entries[-1] == "":
        entries.pop()
    if not entries:
        raise ConfigError(f"{flag}: no endpoint given, write HOST:PORT,...", path=flag)
    try:
        specs = tuple(endpoint_spec(entry) for entry in entries)
    except AddressError as exception:
        raise ConfigError(f"{flag}: {exception}", path=flag) from exception
    repeat = _first_repeat([spec.address for spec in specs])
    if repeat is not None:
        raise ConfigError(f"{flag}: '{specs[repeat].address}' comes twice", path=flag)
    return specs


class _Publisher:
    """Resolves names and applies what differs from the last time. Errors of a name are logged when
    they begin and end."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._published: tuple[EndpointSpec, ...] | None = None
        self._known: dict[str, tuple[str, ...]] = {}
        """Host name -> addresses of the last look-up that worked."""
        self._failing: set[str] = set()
        self._resolvers = asyncio.Semaphore(RESOLVERS_MAX)

    async def publish(self, specs: tuple[EndpointSpec, ...]) -> None:
        names = dict.fromkeys(spec.host for spec in specs if not _is_ip(spec.host))
        self._known = {name: ips for name, ips in self._known.items() if name in names}
        self._failing.intersection_update(names)
        await asyncio.gather(*map(self._look_up, names))
        resolved = tuple(self._resolved(specs))
        if resolved != self._published:
            self._published = resolved
            self._apply(Members(resolved))

    async def _look_up(self, name: str) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await _addresses_of(name, self._resolvers)
        except (OSError, UnicodeError) as exception:
            if name not in self._failing:
                detail = str(exception) or "no answer in time"
                log.warning("Host %s cannot be looked up, keeping what it had: %s", name, detail)
                self._failing.add(name)
            return
        if name in self._failing:
            log.info("Host %s can be looked up again", name)
            self._failing.discard(name)
        self._known[name] = found

    def _resolved(self, specs: Iterable[EndpointSpec]) -> Iterable[EndpointSpec]:
        """Each address once: two names may mean one host."""
        seen = set()
        for spec in specs:
            for resolved in self._records(spec):
                if resolved.address not in seen:
                    seen.add(resolved.address)
                    yield resolved

    def _records(self, spec: EndpointSpec) -> Iterable[EndpointSpec]:
        if _is_ip(spec.host):
            return (spec,)
        name = spec.name or spec.address
        return (
            msgspec.structs.replace(spec, host=ip, name=f"{name}/{ip}")
            for ip in self._known.get(spec.host, ())
        )


class StaticDiscovery:
    """A fixed list of endpoints, whose names are looked up again and again.

    Args:
        specs: as `parse_endpoints` made them.
    """

    def __init__(
        self,
        specs: tuple[EndpointSpec, ...],
        apply: Apply,
        *,
        resolve_interval_s: float = RESOLVE_INTERVAL_S,
    ) -> None:
        self._specs = specs
        self._publisher = _Publisher(apply)
        self._resolve_interval_s = resolve_interval_s

    async def run(self) -> None:
        """Apply the list, then follow its names until cancelled."""
        while True:
            await self._publisher.publish(self._specs)
            await asyncio.sleep(self._resolve_interval_s)


class FileDiscovery:
    """Endpoints from a YAML or JSON file in the format of the reference's `file-discovery`.

    Args:
        path: the file; read at once.
        watch: follow its changes.
    Raises: ConfigError if the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        apply: Apply,
        *,
        watch: bool = False,
        watch_interval_s: float = WATCH_INTERVAL_S,
        resolve_interval_s: float = RESOLVE_INTERVAL_S,
    ) -> None:
        self._path = path
        self._publisher = _Publisher(apply)
        self._watch = watch
        self._watch_interval_s = watch_interval_s
        self._resolve_interval_s = resolve_interval_s
        self._read = self._last_look = _signature(path)
        """What the file looked like when it was read, and at the last look."""
        self._specs = parse_file(read_file(path), file=path)
        self._refused: tuple[bytes, str] | None = None
        """Content and complaint, while the file as it is cannot be used."""

    async def run(self) -> None:
        """Apply the file's endpoints, then follow their names and, if told to, the file, until
        cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._publisher.publish(self._specs)
            resolve_at_s = loop.time() + self._resolve_interval_s
            before = self._specs
            while self._specs is before and (left_s := resolve_at_s - loop.time()) > 0:
                if self._watch:
                    await asyncio.sleep(min(self._watch_interval_s, left_s))
                    await self._look()
                else:
                    await asyncio.sleep(left_s)

    async def _look(self) -> None:
        """Take over the file if it has changed and holds still."""
        signature = await asyncio.to_thread(_signature, self._path)
        holds_still, self._last_look = signature == self._last_look, signature
        if not holds_still or signature == self._read:
            return
        self._read = signature
        content = b""
        try:
            content = await asyncio.to_thread(read_file, self._path)
            specs = await asyncio.to_thread(parse_file, content, file=self._path)
        except ConfigError as exception:
            refused, self._refused = self._refused, (content, str(exception))
            if refused != self._refused:
                log.error("Keeping the endpoints as they were: %s", exception)
            return
        if self._refused or specs != self._specs:
            log.info("Endpoints read from %s: %d", self._path, len(specs))
        self._refused = None
        self._specs = specs


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    address: str
    port: int | str
    namespace: str = "default"
    labels: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: list[_Entry]


def read_file(path: Path) -> bytes:
    """A regular file's content.

    Raises: ConfigError if it cannot be read or is larger than `FILE_BYTES_MAX`.
    """
    try:
        # A pipe would block the open for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as exception:
        raise ConfigError(f"{path} cannot be read: {exception.strerror}") from exception
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    return content


def parse_file(content: bytes, *, file: Path) -> tuple[EndpointSpec, ...]:
    """Read `endpoints: [{name, namespace, address, port, labels}]`, YAML or JSON. No endpoint at
    all is a valid list.

    Args:
        file: for the error.
    Raises: ConfigError with the path of the offending key.
    """
    try:
        entries = decode(read_yaml(content.decode()), _File, path="$").endpoints
        specs = tuple(_spec(entry, f"$.endpoints[{i}]") for i, entry in enumerate(entries))
        _refuse_repeats([f"{s.namespace}/{s.name}" for s in specs], "name")
        _refuse_repeats([s.address for s in specs], "address")
    except ConfigError as exception:
        message = str(exception).removesuffix(f" - at `{exception.path}`")
        raise ConfigError(f"{file}: {message}", path=exception.path) from exception
    except UnicodeDecodeError as exception:
        raise ConfigError(f"{file} is not valid UTF-8: save it as UTF-8") from exception
    return specs


def _spec(entry: _Entry, path: str) -> EndpointSpec:
    if not entry.name:
        raise ConfigError("an endpoint needs a name", path=f"{path}.name")
    host = f"[{entry.address}]" if ":" in entry.address else entry.address
    try:
        return endpoint_spec(
            f"{host}:{entry.port}", name=entry.name, namespace=entry.namespace, labels=entry.labels
        )
    except AddressError as exception:
        raise ConfigError(str(exception), path=path) from exception


def _refuse_repeats(values: Sequence[str], key: str) -> None:
    repeat = _first_repeat(values)
    if repeat is not None:
        path = f"$.endpoints[{repeat}].{key}"
        raise ConfigError(f"'{values[repeat]}' comes twice: keep one", path=path)


def _first_repeat(values: Sequence[str]) -> int | None:
    """Index of the first value that has come before."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None


def _signature(path: Path) -> Signature | None:
    """What changes when the file does; `None` when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


async def _addresses_of(name: str, resolvers: asyncio.Semaphore) -> tuple[str, ...]:
    """All addresses of a name, in a fixed order.

    Not the loop's own `getaddrinfo`: uvloop's asks for two names at a time, and a look-up that
    hangs on an executor's thread would hold up the end of the process.

    Raises: OSError, UnicodeError when there is no answer.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def tell(addresses: tuple[str, ...], error: Exception | None) -> None:
        resolvers.release()
        if answer.done():
            return  # nobody waits any more
        if error is None:
            answer.set_result(addresses)
        else:
            answer.set_exception(error)

    def ask() -> None:
        addresses: tuple[str, ...] = ()
        error: Exception | None = None
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = tuple(sorted({str(address[0]) for *_, address in found}))
        except (OSError, UnicodeError) as exception:
            error = exception
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, addresses, error)

    await resolvers.acquire()
    threading.Thread(target=ask, name=f"resolve {name}", daemon=True).start()
    return await answer


def _is_ip(host: str) -> bool:
    """Hosts are in normal form: IPv6 has colons, and only IPv4 ends in a number."""
    return ":" in host or host.rsplit(".", 1)[-1].isdigit()
