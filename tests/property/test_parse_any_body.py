"""Any body at any path gives a `Request` or is refused with 400: no third outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from epp.core.errors import DropReason, RequestDropped
from epp.core.model import Request
from epp.core.parse import ROUTES, ParseLimits, parse_request
from epp.core.prompt import PromptLimits

SMALL = ParseLimits(prompt=PromptLimits(prompts_max=2, view_bytes_max=64, pieces_max=40))
KEYS = [
    *("model", "messages", "role", "content", "type", "text", "tools", "system", "input", "items"),
    *("prompt", "token_ids", "features", "stream", "max_tokens", "sampling_params", "cache_salt"),
    *("image_url", "tool_calls", "truncate_prompt_tokens", "previous_response_id", "\ud83d"),
]
WORDS = ["m", "user", "text", "image_url", "tool_result", "x-anthropic-billing-header: 1", ""]

texts = st.sampled_from(WORDS) | st.text(st.characters(codec=None), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=5)
    ),
    max_leaves=10,
)
paths = st.sampled_from([f"/v1/{suffix}" for suffix in ROUTES])
limits = st.sampled_from([ParseLimits(), SMALL])


def outcome(
    path: str, body: bytes, limits: ParseLimits, coding: str = ""
) -> Request | RequestDropped:
    headers = {":method": "POST", ":path": path, "content-encoding": coding}
    try:
        return parse_request(headers, body, limits=limits)
    except RequestDropped as dropped:
        return dropped


def check(result: Request | RequestDropped, body: bytes, limits: ParseLimits) -> None:
    if isinstance(result, RequestDropped):
        assert result.reason is DropReason.BAD_REQUEST
        return
    result.model.encode()
    result.cache_salt.encode()
    assert result.body_bytes == len(body)
    assert result.prompt_tokens >= 0
    assert len(result.prompts) <= limits.prompt.prompts_max
    assert sum(map(len, result.prompts)) <= limits.prompt.view_bytes_max
    assert all(result.prompts)


def engine_reads(body: bytes) -> dict[str, Any] | None:
    """The oracle: what vLLM's own parser makes of it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@given(path=paths, value=values, limits=limits, ascii_only=st.booleans())
def test_any_json_value_is_routed_or_refused(
    path: str, value: Any, limits: ParseLimits, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    check(outcome(path, body, limits), body, limits)


@given(path=paths, fields=st.dictionaries(st.sampled_from(KEYS), values, max_size=6), limits=limits)
def test_whatever_the_engine_can_read_is_routed(
    path: str, fields: dict[str, Any], limits: ParseLimits
) -> None:
    body = json.dumps({**fields, "model": "m"}).encode()
    result = outcome(path, body, limits)
    assert isinstance(result, Request)
    assert result.model == "m"
    check(result, body, limits)


@given(path=paths, body=st.binary(max_size=64), coding=st.sampled_from(["", "gzip", "br", "zstd"]))
def test_arbitrary_bytes_are_routed_or_refused(path: str, body: bytes, coding: str) -> None:
    check(outcome(path, body, ParseLimits(), coding), body, ParseLimits())


@given(
    path=paths,
    fields=st.dictionaries(st.sampled_from(KEYS), values, max_size=6),
    at=st.floats(0, 1),
    cut=st.integers(0, 3),
    patch=st.binary(max_size=3)
    | st.sampled_from([b'"', b"\\", b"{", b"]", b",", b"NaN", b"\\ud8"]),
)
def test_a_damaged_body_is_refused_unless_the_engine_can_read_it(
    path: str, fields: dict[str, Any], at: float, cut: int, patch: bytes
) -> None:
    whole = json.dumps({**fields, "model": "m"}).encode()
    place = round(at * len(whole))
    body = whole[:place] + patch + whole[place + cut :]
    result = outcome(path, body, ParseLimits())
    read = engine_reads(body)
    if read is not None and isinstance(read.get("model"), str) and read["model"]:
        assert isinstance(result, Request)
    elif read is None and body.isascii():
        assert isinstance(result, RequestDropped)


@pytest.mark.parametrize("depth", [10, 500, 900, 1000, 200_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"content":'])
def test_any_depth_is_routed_or_refused(opening: str, depth: int) -> None:
    closing = {"[": "]", "{": "}"}[opening[0]] if len(opening) != 12 else "}]"
    nested = opening * depth + "1" + closing * depth
    for path, place in (
        *(("chat/completions", "messages"), ("chat/completions", "tools"), ("responses", "input")),
        *(("completions", "prompt"), ("completions", "other"), ("inference/v1/generate", "tokens")),
    ):
        body = f'{{"model":"m","{place}":{nested}}}'.encode()
        result = outcome(f"/v1/{path}", body, ParseLimits())
        check(result, body, ParseLimits())
        assert isinstance(result, Request) or depth > 100
        cut = outcome(f"/v1/{path}", body[:-1], ParseLimits())
        assert isinstance(cut, RequestDropped)
