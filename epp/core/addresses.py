"""Addresses as people and gateways write them, read into one normal form and compared in it.

An address is a host and perhaps a port: `10.0.0.1:8000`, `[fd00::10]:8000`, `[fd00::10]`,
`fd00::10`, `vllm-0.vllm:8000`, `10.0.0.1`. Two spellings of one host are one host: IPv6 is
compressed (RFC 5952), an IPv4-mapped IPv6 address is its IPv4 address, a host name is lower case
without its last dot. Nothing is resolved: a name never equals an address.

Cost: reading an address takes 2 to 8 us, so the results for the spellings seen last are kept
(bounded; a pool's hosts and a gateway's subset entries hardly change from request to request).
`keep_subset` then takes 10 us for 3 of 64 endpoints and 26 us for 64 of 64.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address

import msgspec

from epp.core.model import NO_LABELS, Endpoint, EndpointSpec

PORT_MAX = 65_535
ADDRESS_CHARS_MAX = 320
"""Longer texts are no addresses: a host name has at most 253 characters, a scoped IPv6 address
fewer."""
KNOWN_SPELLINGS_MAX = 8_192
"""Spellings remembered, each at most `ADDRESS_CHARS_MAX` long."""

ANY_PORT: Container[int] = range(1, PORT_MAX + 1)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


class AddressError(ValueError):
    """A text is not an address; the message quotes it and says what would be one."""


class Address(msgspec.Struct, frozen=True):
    """A host and perhaps a port, in normal form: equal addresses are equal values."""

    host: str
    """IPv4, compressed IPv6 without brackets, or lower-case host name."""
    port: int | None = None
    """1..65535; `None` when the text names a host only."""


def parse_address(text: str) -> Address:
    """Read `host`, `host:port`, `[v6]`, `[v6]:port` or bare `v6`; outer blanks do not count.

    Raises: AddressError.
    """
    if len(text) > ADDRESS_CHARS_MAX:
        raise AddressError(f"'{text[:40]}...' is {len(text)} characters long, too long an address")
    return _read(text.strip())


def endpoint_spec(
    entry: str, *, name: str = "", namespace: str = "", labels: Mapping[str, str] = NO_LABELS
) -> EndpointSpec:
    """Make the spec of an endpoint given as `HOST:PORT`, its host in normal form.

    Raises: AddressError naming the entry.
    """
    address = parse_address(entry)
    if address.port is None:
        raise AddressError(f"'{entry}' has no port: write HOST:PORT, with IPv6 as [HOST]:PORT")
    return EndpointSpec(
        host=address.host, port=address.port, name=name, namespace=namespace, labels=labels
    )


def normal_host(host: str) -> str:
    """The normal form of a bare host; a text that is no host stays as it is, and so equals only
    itself."""
    try:
        return _known_host(host)
    except AddressError:
        return host


def matches(entry: str, endpoint: Endpoint) -> bool:
    """Whether a subset entry means this endpoint: same host, and same port if the entry has one.

    An entry that is no address means nothing.
    """
    return bool(keep_subset((entry,), (endpoint,)))


def keep_subset(entries: Sequence[str], endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """The endpoints that at least one entry means, in their order.

    Args:
        entries: as `matches` reads them; none at all means no endpoint.
    """
    ports = _wanted_ports(entries)
    return [e for e in endpoints if e.spec.port in ports.get(normal_host(e.spec.host), ())]


def _wanted_ports(entries: Sequence[str]) -> Mapping[str, Container[int]]:
    """Normal host -> the ports that are meant there."""
    exact: dict[str, set[int]] = {}
    any_port: dict[str, Container[int]] = {}
    for entry in entries:
        try:
            address = parse_address(entry)
        except AddressError:
            continue
        if address.port is None:
            any_port[address.host] = ANY_PORT
        else:
            exact.setdefault(address.host, set()).add(address.port)
    return {**exact, **any_port}


@lru_cache(maxsize=KNOWN_SPELLINGS_MAX)
def _read(text: str) -> Address:
    if "://" in text:
        raise AddressError(f"'{text}' is a URL: write HOST:PORT, without the scheme")
    if text.isdigit():
        raise AddressError(f"'{text}' is a number, not an address: write HOST:PORT")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise AddressError(f"'{text}' is not an address: write IPv6 with a port as [HOST]:PORT")
        return Address(_ipv6(host, text), _port(rest[1:], text) if rest else None)
    host, colon, port = text.partition(":")
    if ":" in port:
        return Address(_ipv6(text, text))
    return Address(_name_or_ipv4(host, text), _port(port, text) if colon else None)


@lru_cache(maxsize=KNOWN_SPELLINGS_MAX)
def _known_host(host: str) -> str:
    return _ipv6(host, host) if ":" in host else _name_or_ipv4(host, host)


def _port(digits: str, text: str) -> int:
    plain = digits.isascii() and digits.isdigit() and len(digits) <= len(str(PORT_MAX))
    if not plain or not 1 <= int(digits) <= PORT_MAX:
        raise AddressError(f"'{text}' has no usable port: it must be 1 to {PORT_MAX}")
    return int(digits)


def _ipv6(host: str, text: str) -> str:
    try:
        address = IPv6Address(host)
    except AddressValueError:
        raise AddressError(
            f"'{text}' is not an address: it has colons like IPv6, but is none"
        ) from None
    mapped = address.ipv4_mapped
    return str(address if mapped is None else mapped)


def _name_or_ipv4(host: str, text: str) -> str:
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if labels[-1].isdigit():
        # As in URLs: what ends in a number is meant as IPv4, so a wrong one is no host name.
        try:
            return str(IPv4Address(name))
        except AddressValueError:
            raise AddressError(f"'{text}' is not an address: its IPv4 part is wrong") from None
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise AddressError(f"'{text}' is not an address: write HOST:PORT")
    return name
