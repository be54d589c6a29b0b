"""`epp explain`: makes a decision again from what a picker knew, and says why it fell so.

The state comes from a file saved from `/debug/state?blocks=true`, or from a running picker. The
decision is made by the picker's own decider (`core.restore`); nothing is sent or changed anywhere.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from epp.config import Limits, load_config, resolve
from epp.core.decide import Decider, Decision
from epp.core.errors import ConfigError, EppError, RequestDropped
from epp.core.explain import explain, report, table
from epp.core.flow.hold import Hold, params_of
from epp.core.headers import SLO_TPOT_MS, SLO_TTFT_MS
from epp.core.model import Api, Endpoint, Pick, Request
from epp.core.parse import ParseLimits, parse_request
from epp.core.prompt import BYTES_PER_TOKEN, PromptLimits
from epp.core.restore import NOW_S, Setup, restore, setup_of
from epp.core.state import State

STATE_PATH = "/debug/state?blocks=true"
SAVE = f"curl -s 'http://HOST:9090{STATE_PATH}' > STATE.json"
FETCH_S = 30.0
REMEDIES: Mapping[int, str] = {
    401: "name a file with a Kubernetes token: --token-file",
    403: "its account needs `get` on the non-resource URL /debug/state",
    404: "name a pool that it serves with --pool",
    503: "the picker's log says why it cannot check tokens",
}
"""By status of the answer."""
"""Longest silence of a picker that is asked for its state."""
STATE_BYTES_MAX = 256 << 20
SHOWN_CHARS = 40
"""Of a header's value in a notice."""
CHANCES = 16
"""Picks made to see whether chance plays a part."""


class Case(NamedTuple):
    """A decision made again."""

    decider: Decider
    decision: Decision
    notices: tuple[str, ...]
    held: str | None
    """Why the request would not go at once; `None` = it would."""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `explain` to the command line."""
    parser = commands.add_parser(
        "explain",
        help="say why a request goes where it goes",
        description="Decide again where a request goes, from what a picker knew or knows, and "
        f"print what each endpoint would cost. Save a state with: {SAVE}",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--state", metavar="STATE.json", help="a saved /debug/state?blocks=true")
    source.add_argument(
        "--live", metavar="http://HOST:PORT", help="ask a running picker (its --metrics-port)"
    )
    add = parser.add_argument
    add("body", metavar="BODY", help="file with the request's body, or - for standard input")
    add("--path", default="/v1/chat/completions", metavar="PATH", help="default %(default)s")
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a request header; may be given several times",
    )
    add("--pool", metavar="NAME", help="of a running picker that serves several")
    add(
        "--token-file",
        metavar="FILE",
        help="what lets us read a running picker's state: a Kubernetes token",
    )
    add("--config", metavar="FILE", help="choose by this configuration, not by the picker's own")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain; returns the exit status."""
    headers = _headers(args.header, args.path)
    body = sys.stdin.buffer.read() if args.body == "-" else _read(args.body, "BODY")
    if args.live:
        token = _read_text(args.token_file, "--token-file").strip() if args.token_file else ""
        source, data = args.live, _fetch(args.live, pool=args.pool, token=token)
    else:
        source, data = args.state, _read(args.state, "--state")
    state = _decode(source, data)
    if args.live and args.pool is None and len(state.pools) > 1:
        raise ConfigError(
            f"--pool is needed: {args.live} serves {', '.join(state.pools)}", path="--pool"
        )
    case = _decide(source, state, headers, body, args)
    if args.json:
        found = {
            **report(case.decision),
            "not_considered": _not_considered(case),
            "notices": case.notices,
            "held": case.held,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        return 0
    for notice in case.notices:
        sys.stderr.write(f"notice: {notice}\n")
    held = "" if case.held is None else f"{case.held}\n"
    sys.stdout.write(f"{explain(case.decision)}\n{held}\n{table(case.decision)}")
    for address, why in _not_considered(case).items():
        sys.stdout.write(f"not considered: {address} ({why})\n")
    return 0


def _decide(
    source: str, state: State, headers: dict[str, str], body: bytes, args: argparse.Namespace
) -> Case:
    try:
        setup, limits = _setup(state, args.config)
        decider = restore(state, setup, Random(0))
    except ConfigError:
        raise
    except EppError as error:
        raise EppError(
            f"{source}: {error}; save the state with the version that explains it, or give the "
            "configuration to choose by with --config"
        ) from None
    try:
        request = parse_request(headers, body, limits=limits)
        picks = [decider.wish(request, subset=None, now_s=NOW_S) for _ in range(CHANCES)]
    except RequestDropped as dropped:
        raise EppError(
            f"{args.body}: the picker refuses this request with status {dropped.http_status} "
            f"({dropped.reason}): {dropped.detail}"
        ) from None
    notices = _notices(source, state, request, decider)
    chosen = list(dict.fromkeys(pick.endpoint.address for pick in picks))
    if len(chosen) > 1:
        notices.append(f"chance decides between {', '.join(chosen)}: nothing speaks for one alone")
    held = _why_held(state, decider, request, picks[0])
    decision = decider.commit(request, picks[0], now_s=NOW_S)
    return Case(decider, decision, tuple(notices), held)


def _why_held(state: State, decider: Decider, request: Request, pick: Pick) -> str | None:
    """Why the picker would hold the request, which an answer that may wait allows (full duplex)."""
    params = params_of(decider.profile.cost)
    if params is None or state.held_requests >= params.requests_max:
        return None
    endpoint = pick.endpoint
    saved = {each.address: each for each in state.endpoints}.get(endpoint.address)
    longest_s = None if saved is None else saved.longest_held_s
    guarded = longest_s is not None and longest_s > params.guard_s
    if Hold(decider, params).admits(endpoint, request, NOW_S) and not guarded:
        return None
    return (
        f"held in full-duplex mode until {endpoint.address} has room: "
        f"{endpoint.inflight_requests} in flight there, "
        f"{decider.forecast.backlog_s(endpoint, NOW_S):.2f} s of prefill to do, "
        f"{0 if saved is None else saved.held_requests} held for it"
    )


def _setup(state: State, config: str | None) -> tuple[Setup, ParseLimits]:
    """What chooses, and how far it reads bodies."""
    if config is None:
        setup = setup_of(state)
        return setup, _parse_limits(setup, Limits(), frozenset(Api))
    plan = resolve(load_config(_read_text(config, "--config")))
    setup = Setup(profile=plan.profiles[0], prefix=plan.prefix, inflight=plan.inflight)
    return setup, _parse_limits(setup, plan.limits, plan.apis)


def _parse_limits(setup: Setup, limits: Limits, apis: frozenset[Api]) -> ParseLimits:
    tokens_max = 0 if setup.prefix is None else setup.prefix.tokens_max
    return ParseLimits(
        read_bytes_max=limits.read_bytes_max,
        decoded_bytes_max=limits.decoded_bytes_max,
        apis=apis,
        prompt=PromptLimits(
            view_bytes_max=min(tokens_max * BYTES_PER_TOKEN, limits.body_bytes_max)
        ),
    )


def _notices(source: str, state: State, request: Request, decider: Decider) -> list[str]:
    """What the explanation cannot know."""
    notices = []
    if decider.prefix is not None and not isinstance(state.prefix_blocks, dict):
        notices.append(
            f"{source} was saved without prefix blocks, so every endpoint is shown as holding "
            f"nothing; save it with: {SAVE}"
        )
    elif isinstance(state.prefix_blocks, dict):
        left_out = sum(held.left_out for held in state.prefix_blocks.values())
        if left_out:
            notices.append(
                f"{source} leaves out the {left_out} oldest prefix blocks: endpoints may hold more "
                "of the prompt than is shown"
            )
    if state.endpoints_not_listed:
        notices.append(
            f"{source} leaves out {state.endpoints_not_listed} endpoints: the request may go to "
            "one of them"
        )
    if not request.prompt_tokens:
        notices.append(
            f"no prompt was read of this body at {request.headers[':path']}: load alone decides"
        )
    return notices + _broken_promises(request)


def _broken_promises(request: Request) -> list[str]:
    """Promises that the picker ignores, as they are none."""
    notices = []
    for names, promised_s in (
        (SLO_TTFT_MS, request.slo_ttft_s),
        (SLO_TPOT_MS, request.slo_tpot_s),
    ):
        name = next((each for each in names if request.headers.get(each)), None)
        if name is not None and promised_s is None:
            value = request.headers[name]
            shown = value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}…"
            notices.append(
                f"header {name} is ignored: {shown!r} is no plausible number of milliseconds"
            )
    return notices


def _not_considered(case: Case) -> dict[str, str]:
    """Address -> why it is no candidate."""
    pick, pool = case.decision.pick, case.decider.pool
    eligible = set(pool.snapshot(NOW_S).endpoints)
    candidates = set(pick.candidates)
    return {
        endpoint.address: _why_not(endpoint, endpoint in eligible)
        for endpoint in pool.endpoints
        if endpoint not in candidates
    }


def _why_not(endpoint: Endpoint, eligible: bool) -> str:
    if eligible:
        return "filtered out"
    if endpoint.ejected_until_s > NOW_S:
        return f"ejected for {endpoint.ejected_until_s - NOW_S:.1f} s after failing"
    return "on probation after failing, with a request in flight"


# -- reading -------------------------------------------------------------------------------


def _headers(lines: Sequence[str], path: str) -> dict[str, str]:
    headers = {":method": "POST", ":path": path, "content-type": "application/json"}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header {line!r}: write 'name: value'", path="--header")
        headers[name.strip().lower()] = value.strip()
    return headers


def _read(path: str, argument: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        message = f"{argument} {path}: {error.strerror}"
        raise ConfigError(message, path=f"--{argument}") from error


def _read_text(path: str, argument: str) -> str:
    try:
        return _read(path, argument).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{argument} {path}: not UTF-8 text", path=f"--{argument}") from error


def _fetch(url: str, *, pool: str | None = None, token: str = "") -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--live {url}: write http://HOST:PORT, the picker's --metrics-port", path="--live"
        )
    asked = f"{url.rstrip('/')}{STATE_PATH}"
    if pool is not None:
        asked += f"&{urlencode({'pool': pool})}"
    request = urllib.request.Request(asked, headers=_authorization(token))  # noqa: S310
    remedy = f"{url} must be the metrics port (--metrics-port) of a running picker"
    # The picker is asked directly, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=FETCH_S) as answer:
            data: bytes = answer.read(STATE_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        said = error.read(200).decode(errors="replace").strip()
        raise EppError(
            f"cannot read the state of {url} ({error.code}: {said}); "
            f"{REMEDIES.get(error.code, remedy)}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise EppError(f"cannot read the state of {url} ({reason}); {remedy}") from None
    if len(data) > STATE_BYTES_MAX:
        raise EppError(f"the state of {url} is larger than {STATE_BYTES_MAX} bytes; {remedy}")
    return data


def _authorization(token: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _decode(source: str, data: bytes) -> State:
    try:
        return msgspec.json.decode(data, type=State)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EppError(
            f"{source} is not a state of this version of the picker: {error}; save one with: {SAVE}"
        ) from None
