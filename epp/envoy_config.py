"""`epp envoy-config`: a complete Envoy bootstrap for running without a gateway product.

The options live here; `epp.envoy_bootstrap` builds the messages and is imported only when the
command runs, since Envoy's typed API takes seconds to load.
"""

from __future__ import annotations

import argparse
import json
import warnings
from enum import StrEnum
from typing import Any

import msgspec
import yaml

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


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `envoy-config` to the command line."""
    defaults = EnvoyOptions()
    parser = commands.add_parser(
        "envoy-config",
        help="print an Envoy bootstrap",
        description="Print a complete Envoy bootstrap: Envoy listens, asks the EPP over ext_proc "
        "and forwards to the endpoint it picks. Run it with: envoy -c FILE",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--listen", default=defaults.listen, metavar="HOST:PORT", help="where clients connect")
    add("--epp", default=defaults.epp, metavar="HOST:PORT", help="the EPP's ext_proc port")
    add(
        "--epp-tls",
        default="true",
        choices=("true", "false"),
        help="false when the EPP runs with --secure-serving=false",
    )
    add("--admin", default=defaults.admin, metavar="HOST:PORT", help="admin port, none for none")
    add(
        "--endpoints",
        default="",
        metavar="HOST:PORT,…",
        help="the pool, as given to epp serve (override-host only)",
    )
    add("--routing", default=defaults.routing.value, choices=[r.value for r in Routing], help="how")
    add(
        "--request-body",
        default=defaults.request_body.value,
        choices=[b.value for b in REQUEST_BODY],
        help="how the EPP sees request bodies",
    )
    add(
        "--response-body",
        default=defaults.response_body.value,
        choices=[b.value for b in BodyProcessing],
        help="how the EPP sees responses; none costs least and hides usage, first bytes and, with "
        "full-duplex requests, how long an answer goes on",
    )
    add(
        "--fail-open",
        default="true",
        choices=("true", "false"),
        help="route round robin while the EPP is down",
    )
    add("--retries", type=int, default=defaults.retries, metavar="N", help="tries elsewhere")
    add("--buffer-bytes", type=int, default=defaults.buffer_bytes, metavar="N", help="body buffer")
    add("--message-timeout", type=float, default=defaults.message_timeout_s, metavar="SECONDS",
        help="longest wait for the EPP where bodies are buffered")  # fmt: skip
    add("--format", default="yaml", choices=("yaml", "json"), help="of the output")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    options = EnvoyOptions(
        listen=args.listen,
        epp=args.epp,
        epp_tls=args.epp_tls == "true",
        admin=None if args.admin == "none" else args.admin,
        endpoints=tuple(a.strip() for a in args.endpoints.split(",") if a.strip()),
        routing=Routing(args.routing),
        request_body=BodyProcessing(args.request_body),
        response_body=BodyProcessing(args.response_body),
        fail_open=args.fail_open == "true",
        retries=args.retries,
        buffer_bytes=args.buffer_bytes,
        message_timeout_s=args.message_timeout,
    )
    print(render(options, form=args.format), end="")
    return 0


def check(options: EnvoyOptions) -> None:
    """Refuse what cannot work.

    Raises: ConfigError naming the flag and the remedy.
    """
    addresses = {"--listen": options.listen, "--epp": options.epp, "--admin": options.admin}
    for flag, address in addresses.items():
        if address is not None:
            split_address(address, flag)
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


def render(options: EnvoyOptions, *, form: str = "yaml") -> str:
    """The bootstrap as text, `yaml` or `json`."""
    check(options)
    with warnings.catch_warnings():
        # Deprecations between libraries that are not ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        from epp.envoy_bootstrap import bootstrap  # takes seconds, so not above

    document = bootstrap(options)
    if form == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.safe_dump(document, sort_keys=False, width=100)
