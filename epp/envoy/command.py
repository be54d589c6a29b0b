"""`epp envoy-config`: its flags, and the text it prints.

`epp.envoy.bootstrap` is imported only when the command runs: Envoy's typed API takes seconds to
load.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import yaml

from epp.envoy.options import REQUEST_BODY, BodyProcessing, EnvoyOptions, Routing, check


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
    add("--epp", default=defaults.epp, metavar="HOST:PORT,…",
        help="the EPP's ext_proc port; of several replicas, those that serve")  # fmt: skip
    add("--pool", metavar="NAME", help="which pool to ask for, of an EPP that serves several")
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
        pool=args.pool,
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


def render(options: EnvoyOptions, *, form: str = "yaml") -> str:
    """The bootstrap as text, `yaml` or `json`."""
    check(options)
    with warnings.catch_warnings():
        # Deprecations between libraries that are not ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        from epp.envoy.bootstrap import bootstrap  # takes seconds, so not above

    document = bootstrap(options)
    if form == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.safe_dump(document, sort_keys=False, width=100)
