"""From a client's headers and body to a `Request`.

The path says which API is spoken, the body gives the model, the prompt views and a few limits; what
is not needed stays undecoded (`msgspec.Raw`), and the bytes themselves are never changed. The aim
is that whatever the engine would serve is routed, at worst by load alone:

- another path, method or media type, or a content coding we cannot undo: by load (`model` is empty)
- valid JSON whose prompt has an unknown form: by load, with its model
- JSON that only Python's own parser accepts (lone surrogates, NaN, UTF-16): read after a repair
- anything no engine could read, on a known path: `RequestDropped`, status 400

Cost (CPU, chat, 2 / 10 / 200 messages of 1 / 16 / 128 KiB in all): 7 / 17 / 125 us; with each
content a list of one text part 10 / 33 / 365 us. Of 8192 token ids: 320 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from epp.core.encoding import decode_body
from epp.core.errors import DropReason, RequestDropped
from epp.core.headers import FAIRNESS_ID, SLO_TPOT_MS, SLO_TTFT_MS
from epp.core.model import DEFAULT_FAIRNESS_ID, Api, Request
from epp.core.prompt import (
    NOT_READ,
    Prompt,
    PromptLimits,
    UnknownShape,
    read_prompt,
)
from epp.core.rawjson import explain, is_given, is_true, repaired, text_of, whole_of
from epp.core.shapes import Body, Head
from epp.core.structs import Frozen


class ParseLimits(Frozen, frozen=True, kw_only=True):
    """Bounds of the work on one body. Past one of them a request is routed with less knowledge; the
    limit that refuses a body by its size is the exchange's."""

    read_bytes_max: int = 16 << 20
    """A larger body is routed by load: reading it would hold up the other requests."""
    decoded_bytes_max: int = 8 << 20
    """A compressed body that grows beyond this is routed by load: a kilobyte can ask for
    gigabytes."""
    repaired_bytes_max: int = 4 << 20
    """A larger body that msgspec refuses is routed by load, not read again by Python's parser
    (3 ms per MiB of text)."""
    repaired_values_max: int = 100_000
    """The same for a body with more commas and opening brackets: that parser makes an object of
    every value, some 25 MB and 40 ms for these."""
    values_max: int = 1_000_000
    """Commas of a body over 512 KiB; with more its prompt is not read. That many token ids take
    20 ms."""
    objects_max: int = 200_000
    """The same for opening braces; that many empty messages take 20 ms and 50 MB."""
    prompt: PromptLimits = PromptLimits()
    apis: frozenset[Api] = frozenset(Api)
    """APIs whose bodies are read; requests of others are routed by load
    (`requestHandler.parsers`)."""


DEFAULT_LIMITS: Final = ParseLimits()

_COUNTED_BYTES_MIN: Final = 1 << 19
_PROMISE_MS_MAX: Final = 1e9
_MODEL_CHARS_MAX: Final = 1024


class Route(NamedTuple):
    """What a path means to us."""

    api: Api
    prefills: bool = True
    """The engine computes the prompt's KV blocks. Where it only counts or renders tokens, a prefix
    helps nothing and must not be learned."""


ELSEWHERE: Final = Route(Api.OTHER, prefills=False)

ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {
        "chat/completions": Route(Api.CHAT),
        "chat/completions/render": Route(Api.CHAT, prefills=False),
        "completions": Route(Api.COMPLETIONS),
        "completions/render": Route(Api.COMPLETIONS, prefills=False),
        "responses": Route(Api.RESPONSES),
        "responses/render": Route(Api.RESPONSES, prefills=False),
        "conversations": Route(Api.CONVERSATIONS),
        "embeddings": Route(Api.EMBEDDINGS),
        "messages": Route(Api.MESSAGES),
        "messages/count_tokens": Route(Api.MESSAGES, prefills=False),
        "messages/render": Route(Api.MESSAGES, prefills=False),
        "inference/v1/generate": Route(Api.GENERATE),
        "images/generations": Route(Api.IMAGES),
    }
)
"""Last segments of a path, whole ones -> what they mean; the longest match wins."""

_SEGMENTS_MAX: Final = max(key.count("/") + 1 for key in ROUTES)
_CACHED_PATH_CHARS_MAX: Final = 256
_PATH_HEADERS: Final = (":path", "x-original-path", "x-forwarded-path")

_read_head: Final = msgspec.json.Decoder(Head).decode
_read_body: Final = msgspec.json.Decoder(Body).decode


def parse_request(
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    limits: ParseLimits = DEFAULT_LIMITS,
    model_optional: bool = False,
) -> Request:
    """Read what routing needs to know of one request.

    Args:
        headers: lower-case names, pseudo headers included.
        body: the whole body as received; `None` when there is none or it was not seen.
        model_optional: let a body pass that names no model: somebody else may know one.

    Raises:
        RequestDropped: `BAD_REQUEST`; the body stands on a known path and is no JSON object, or
            names no model. The detail holds positions and lengths, no text of the body.
    """
    route = route_of(headers)
    request = Request(
        id=headers.get("x-request-id", ""),
        api=route.api,
        headers=headers,
        body_bytes=len(body) if body is not None else 0,
        fairness_id=first_of(headers, FAIRNESS_ID) or DEFAULT_FAIRNESS_ID,
        slo_ttft_s=_seconds(first_of(headers, SLO_TTFT_MS)),
        slo_tpot_s=_seconds(first_of(headers, SLO_TPOT_MS)),
    )
    if body is None or route.api is Api.OTHER or route.api not in limits.apis:
        return request
    if len(body) > limits.read_bytes_max:
        return request
    coding = headers.get("content-encoding", "")
    decoded = decode_body(coding, body, bytes_max=limits.decoded_bytes_max)
    if decoded is None:
        return request
    head = _read(decoded, limits)
    if head is not None:
        request.body_read = True
        _fill(request, route, head, limits.prompt, model_optional)
    return request


def route_of(headers: Mapping[str, str]) -> Route:
    """What the request asks for, by method, media type and path (query and fragment cut, one
    trailing slash trimmed)."""
    if headers.get(":method", "POST") not in ("POST", "PUT") or not _is_json(headers):
        return ELSEWHERE
    path = first_of(headers, _PATH_HEADERS).partition("?")[0].partition("#")[0].removesuffix("/")
    return _route_at(path) if len(path) <= _CACHED_PATH_CHARS_MAX else _find_route(path)


def _find_route(path: str) -> Route:
    segments = path.rsplit("/", _SEGMENTS_MAX)[-_SEGMENTS_MAX:]
    for start in range(len(segments)):
        route = ROUTES.get("/".join(segments[start:]))
        if route is not None:
            return route
    return ELSEWHERE


_route_at: Final = lru_cache(maxsize=256)(_find_route)


def _is_json(headers: Mapping[str, str]) -> bool:
    content_type = headers.get("content-type", "")
    if content_type in ("application/json", ""):
        return True
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type in ("application/json", "") or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )


def first_of(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The first of these headers that is there and not empty; `""` when none is."""
    for name in names:
        if value := headers.get(name):
            return value
    return ""


def _seconds(ms: str) -> float | None:
    """A promise in milliseconds; `None` when there is none or it is no positive number."""
    if not ms:
        return None
    try:
        value = float(ms)
    except ValueError:
        return None
    return value / 1000 if 0.0 < value < _PROMISE_MS_MAX else None


def _read(data: bytes, limits: ParseLimits) -> Head | None:
    """The fields of a body: a `Body` where its prompt can be read, else a `Head`; `None` when only
    the engine can tell whether it is JSON."""
    if not data:
        raise _refused("is empty; a JSON object is expected")
    # Raised below and not where it is found: what a parser says may quote the body, and an error
    # keeps the one it was raised in (compiled, even `from None`).
    try:
        try:
            return _read_json(data, limits)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not _is_repairable(data, limits):
                return None
        return _read_json(repaired(data), limits)
    except RecursionError:
        wrong = "is nested too deeply"
    except msgspec.ValidationError:
        wrong = "is JSON but not an object"
    except ValueError as error:
        wrong = f"({len(data)} bytes) is not valid JSON: {explain(error)}"
    raise _refused(wrong)


def _is_repairable(data: bytes, limits: ParseLimits) -> bool:
    if len(data) > limits.repaired_bytes_max:
        return False
    return sum(map(data.count, (b",", b"[", b"{"))) <= limits.repaired_values_max


def _read_json(data: bytes, limits: ParseLimits) -> Head:
    if len(data) <= _COUNTED_BYTES_MIN or (
        data.count(b",") <= limits.values_max and data.count(b"{") <= limits.objects_max
    ):
        try:
            return _read_body(data)
        except msgspec.ValidationError:
            pass  # no object, or its `messages` are something else than a list of objects
    return _read_head(data)


def _fill(
    request: Request, route: Route, head: Head, limits: PromptLimits, model_optional: bool
) -> None:
    optional = model_optional or route.api is Api.CONVERSATIONS  # that API has no such key
    request.model = _model_of(head, optional)
    request.stream = is_true(head.stream)
    request.cache_salt = text_of(head.cache_salt)
    request.max_output_tokens = _max_output_tokens(head, route.api)
    prompt = _prompt_of(route, head, limits)
    request.prompts = prompt.views
    request.prompt_tokens = prompt.tokens


def _model_of(head: Head, optional: bool) -> str:
    model = text_of(head.model)
    if not model and not optional:
        raise _refused('names no model; set "model" to the name of a served model, a string')
    if len(model) > _MODEL_CHARS_MAX:
        raise _refused(f"names a model of {len(model)} characters; at most {_MODEL_CHARS_MAX}")
    return model


def _max_output_tokens(head: Head, api: Api) -> int | None:
    if api is Api.CHAT:
        limit = whole_of(head.max_completion_tokens)
        return limit if limit is not None else whole_of(head.max_tokens)
    if api is Api.RESPONSES:
        return whole_of(head.max_output_tokens)
    if api is Api.GENERATE:
        return _max_sampled_tokens(head)
    return whole_of(head.max_tokens)


def _max_sampled_tokens(head: Head) -> int | None:
    try:
        return whole_of(_read_head(head.sampling_params).max_tokens)
    except msgspec.DecodeError:  # absent or no object
        return None


def _prompt_of(route: Route, head: Head, limits: PromptLimits) -> Prompt:
    if not route.prefills or not isinstance(head, Body):
        return NOT_READ
    try:
        prompt = read_prompt(route.api, head, limits)
    except UnknownShape:
        return NOT_READ
    if not is_given(head.truncate_prompt_tokens):
        return prompt
    kept_tokens = whole_of(head.truncate_prompt_tokens)  # the last ones, so no prefix is known
    if kept_tokens is None:
        return Prompt(tokens=prompt.tokens)
    return Prompt(tokens=min(prompt.tokens, kept_tokens))


def _refused(what: str) -> RequestDropped:
    return RequestDropped(DropReason.BAD_REQUEST, f"the request body {what}")
