"""What an Envoy bootstrap is made for, and what cannot work."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from epp.core.addresses import AddressError, endpoint_spec
from epp.core.errors import ConfigError

LISTENING = ("--listen", "--admin")


class Routing(StrEnum):
    """How Envoy finds the endpoint we picked."""

    OVERRIDE_HOST = "override-host"
    """From dynamic metadata, among the endpoints of a cluster: fallback lists, retries, health."""
    ORIGINAL_DST = "original-dst"
    """From the request header, any address: no list of endpoints to keep, no retry elsewhere."""


class BodyProcessing(StrEnum):
    """How Envoy shows us a body."""

    FULL_DUPLEX = "full-duplex"
    BUFFERED = "buffered"
    STREAMED = "streamed"
    NONE = "none"


REQUEST_BODY = (BodyProcessing.FULL_DUPLEX, BodyProcessing.BUFFERED)
"""Modes in which the pick can depend on the body."""


class EnvoyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the bootstrap is made for. Addresses are `HOST:PORT`."""

    listen: str = "0.0.0.0:8080"
    epp: str = "127.0.0.1:9002"
    """Several, joined by commas, are replicas: those that say they serve are used."""
    pool: str | None = None
    """Which pool to ask for (gRPC metadata), where the EPP serves several; `None` = do not say."""
    epp_tls: bool = True
    """Speak TLS to the EPP, without verifying its certificate (it is self-signed by default)."""
    admin: str | None = "127.0.0.1:9901"
    """`None`: no admin port."""
    endpoints: tuple[str, ...] = ()
    """The pool; needed for override-host, unused for original-dst."""
    routing: Routing = Routing.OVERRIDE_HOST
    request_body: BodyProcessing = BodyProcessing.FULL_DUPLEX
    response_body: BodyProcessing = BodyProcessing.FULL_DUPLEX
    """`NONE` hides usage and first bytes. With full-duplex requests Envoy then ends its stream at
    the response headers: a request counts as over while its answer still goes on."""
    fail_open: bool = True
    """Route without a pick while the EPP is down (round robin; impossible with original-dst)."""
    retries: int = 2
    """How often a request may go on to the next endpoint when a connection fails; 0 = never."""
    buffer_bytes: int = 64 << 20
    """Largest request body that can be sent again, and largest one in buffered mode."""
    message_timeout_s: float = 60.0
    """Longest wait for our answer; Envoy does not apply it to full-duplex bodies."""
    subset_header: str | None = None
    """Request header whose comma list becomes the gateway's subset; for tests and trusted hops."""

    @property
    def epps(self) -> tuple[str, ...]:
        """The address of each replica."""
        return tuple(address.strip() for address in self.epp.split(","))


def check(options: EnvoyOptions) -> None:
    """Refuse what cannot work.

    Raises: ConfigError naming the flag and the remedy.
    """
    for flag, address in (("--listen", options.listen), ("--admin", options.admin)):
        if address is not None:
            split_address(address, flag)
    for address in options.epps:
        split_address(address, "--epp")
    if options.pool is not None and not re.fullmatch(r"[a-z0-9.-]+(/[a-z0-9.-]+)?", options.pool):
        raise ConfigError(
            f"--pool {options.pool!r} is neither NAME nor NAMESPACE/NAME", path="--pool"
        )
    for address in options.endpoints:
        split_address(address, "--endpoints")
    if options.routing is Routing.OVERRIDE_HOST and not options.endpoints:
        raise ConfigError(
            "--endpoints is needed: with override-host Envoy sends only to endpoints it knows; "
            "give the list of epp serve, or use --routing original-dst",
            path="--endpoints",
        )
    if options.request_body not in REQUEST_BODY:
        raise ConfigError(
            "--request-body must be full-duplex or buffered: the pick depends on the body",
            path="--request-body",
        )
    for flag, number in (("--retries", options.retries), ("--buffer-bytes", options.buffer_bytes)):
        if not 0 <= number < 1 << 31:
            raise ConfigError(f"{flag} {number} is out of range (0..2147483647)", path=flag)
    if not 0 < options.message_timeout_s <= 86_400:
        raise ConfigError("--message-timeout must be above 0 s and at most a day",
                          path="--message-timeout")  # fmt: skip


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port; 0 = a free one, where Envoy listens.

    Raises: ConfigError naming the flag.
    """
    own = flag in LISTENING and address.endswith(":0")
    try:
        spec = endpoint_spec(address.removesuffix("0") + "1" if own else address)
    except AddressError as error:
        raise ConfigError(f"{flag} {error}", path=flag) from error
    return spec.host, 0 if own else spec.port
