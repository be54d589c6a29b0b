"""`core.parse`: which bodies are read, which are routed by load alone, which are refused."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from epp.core.errors import DropReason, RequestDropped
from epp.core.model import DEFAULT_FAIRNESS_ID, Api, Request
from epp.core.parse import ROUTES, ParseLimits, parse_request, route_of

SECRET = "swordfish-7713"


def parse(
    body: Any,
    path: str = "/v1/chat/completions",
    *,
    limits: ParseLimits | None = None,
    **headers: str,
) -> Request:
    """`body`: bytes as they are, anything else as JSON; header names with `_` for `-`."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_request(
        {":method": "POST", ":path": path, **given}, data, limits=limits or ParseLimits()
    )


def refusal(body: Any, path: str = "/v1/chat/completions") -> str:
    with pytest.raises(RequestDropped) as caught:
        parse(body, path)
    assert caught.value.reason is DropReason.BAD_REQUEST
    assert caught.value.http_status == 400
    return caught.value.detail


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


# ---- path, method, media type ----


@pytest.mark.parametrize("suffix", sorted(ROUTES))
@pytest.mark.parametrize("form", ["/v1/{}", "/{}", "/openai/deployments/a/{}", "{}", "/v1/{}/"])
def test_a_path_is_known_by_its_last_whole_segments(suffix: str, form: str) -> None:
    assert route_of({":path": form.format(suffix)}) == ROUTES[suffix]


@pytest.mark.parametrize(
    "path",
    [
        "/x/undercompletions",
        "/admin/usermessages",
        "/v1/chat/completions/batch",
        "/v1/models",
        "/v1/responses/resp_1/cancel",
        "/v1/completions//",
        "/generate",
        "/",
        "",
    ],
)
def test_a_path_that_only_looks_alike_is_routed_by_load(path: str) -> None:
    assert parse(b"no JSON at all", path).api is Api.OTHER


@pytest.mark.parametrize(
    "path", ["/v1/messages?beta=true", "/v1/messages#x", "/v1/messages/?a=/v1/completions"]
)
def test_A19_the_query_is_no_part_of_the_path(path: str) -> None:
    assert parse(chat(), path).api is Api.MESSAGES


def test_the_first_path_header_that_is_not_empty_counts() -> None:
    spare = {"x-original-path": "", "x-forwarded-path": "/v1/embeddings"}
    assert route_of(spare).api is Api.EMBEDDINGS
    assert route_of({**spare, "x-original-path": "/v1/responses"}).api is Api.RESPONSES
    assert route_of({**spare, ":path": "/v1/completions"}).api is Api.COMPLETIONS


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=x",
        "text/plain",
        "application/x-protobuf",
        "application/octet-stream",
        "application/jsonl",
        "+json",
        "\xff\xfe",
    ],
)
def test_B18_a_body_that_is_not_json_is_not_parsed(content_type: str) -> None:
    request = parse(b"--x\r\n\r\nsound", content_type=content_type)
    assert (request.api, request.model, request.body_bytes) == (Api.OTHER, "", 12)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/json;charset=x",
        "application/vnd.api+json",
        "",
        " ; x",
    ],
)
def test_json_media_types_and_none_at_all_are_parsed(content_type: str) -> None:
    assert parse(chat(), content_type=content_type).model == "m"


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "CONNECT"])
def test_only_methods_that_carry_a_body_are_parsed(method: str) -> None:
    headers = {":method": method, ":path": "/v1/responses"}
    assert parse_request(headers, b"{", limits=ParseLimits()).api is Api.OTHER


# ---- from the headers ----


def test_a_request_without_body_is_known_by_its_headers() -> None:
    headers = {
        ":path": "/v1/completions",
        "x-request-id": "r1",
        "x-gateway-inference-fairness-id": "tenant",
    }
    request = parse_request(headers, None, limits=ParseLimits())
    assert (request.id, request.api, request.fairness_id) == ("r1", Api.COMPLETIONS, "tenant")
    assert (request.model, request.prompts, request.body_bytes) == ("", (), 0)
    assert request.headers is headers


def test_the_newer_fairness_header_wins_and_an_empty_one_is_none() -> None:
    old, new = "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"
    assert parse_request({old: "a", new: "b"}, None).fairness_id == "b"
    assert parse_request({old: "a", new: ""}, None).fairness_id == "a"
    assert parse_request({old: "", new: ""}, None).fairness_id == DEFAULT_FAIRNESS_ID


# ---- bodies that cannot be read ----


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model":"m"', "delimiter at character 12"),
        (b'{"model":"m","messages":[', "Expecting value at character 25"),
        (b"\xff", "invalid utf-8 at byte 0"),
        (b"[]", "not an object"),
        (b'"str"', "not an object"),
        (b"null", "not an object"),
        (b"NaN", "not an object"),
        (b"7", "not an object"),
        (b"[" * 2000 + b"]" * 2000, "object"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, "nested too deeply"),
        (b'{"messages":' + b"[" * 100_000, "nested too deeply"),
        (b"", "is empty"),
        (b"  ", "Expecting value"),
        (b'{"model":"m"} trailing', "Extra data at character 14"),
        (b'{"model":"m","a":"\x01"}', "Invalid control character"),
        (b'{"model":"m","a":"\\x"}', "Invalid \\escape"),
        (b'{"model":"m","a":NaN,"n":' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"model":"m","messages":[1], "a"}', "delimiter at character"),
        (b"{'model':'m'}", "double quotes"),
    ],
)
def test_B01_what_no_engine_could_read_is_refused_and_the_reason_says_where(
    body: bytes, says: str
) -> None:
    assert says in refusal(body)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages/count_tokens", "/v1/images/generations"]
)
def test_B01_malformed_json_is_refused_on_every_known_path(path: str) -> None:
    assert "not valid JSON" in refusal(b'{"model":', path)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"%s"',
        b'{"%s"}',
        b'%s{"model":"m"}',
        b'{"model":"m","prompt":"%s\x00"}',
        b'{"model":"m","prompt":"\\%s"}',
        b'{"model":{"%s":1}}',
        b'["%s"]',
    ],
)
def test_D06_no_text_of_the_body_gets_into_an_error(body: bytes) -> None:
    detail = refusal(body % SECRET.encode(), "/v1/completions")
    assert SECRET not in detail
    assert len(detail) < 200


def test_an_error_leaves_no_other_exception_that_could_be_logged_with_the_body() -> None:
    with pytest.raises(RequestDropped) as caught:
        parse(b'{"model":"' + SECRET.encode())
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("model", [None, "", 7, [], {}, True])
def test_B06_a_model_that_is_no_name_is_refused(model: Any) -> None:
    assert '"model"' in refusal(chat(model=model))


def test_B06_a_body_without_model_is_refused() -> None:
    assert '"model"' in refusal({"prompt": "hello"}, "/v1/completions")


def test_a_model_name_of_kilobytes_is_refused_by_its_length() -> None:
    assert parse(chat(model="m" * 1024)).model == "m" * 1024
    assert "1025 characters" in refusal(chat(model="m" * 1025))


def test_conversations_have_no_model() -> None:
    request = parse({"items": [{"role": "user", "content": "hi"}]}, "/v1/conversations")
    assert request.model == ""
    assert request.prompts


def test_B07_of_duplicate_keys_the_last_one_counts_as_for_the_engine() -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":"1"}],"model":"b","mod\\u0065l":"c"}'
    assert parse(body).model == json.loads(body)["model"] == "c"


# ---- bodies that only Python's parser reads ----


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\udc00"}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":NaN,"a":[-Infinity]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":1e999,"n":NaN}',
        b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"x"}]}',
        '{"model":"m","messages":[{"role":"user","content":"x"}]}'.encode("utf-16"),
        b'{"model":"m","\\ud800":1,"messages":[{"role":"user","\\ud800":1,"content":"x"}]}',
    ],
)
def test_B02_what_python_reads_is_routed_with_its_prompt(body: bytes) -> None:
    request = parse(body)
    assert request.model == "m"
    assert len(request.prompts) == 1


def test_B02_a_lone_surrogate_in_a_name_or_salt_leaves_text_that_can_be_encoded() -> None:
    request = parse(b'{"model":"m\\ud83d","cache_salt":"\\udfff","prompt":"x"}', "/v1/completions")
    assert request.model.encode() == b"m" + "\ufffd".encode() * 3
    request.cache_salt.encode()


def test_B02_a_lone_surrogate_late_in_a_conversation_keeps_the_prefix() -> None:
    turns = [
        {"role": "user", "content": "grüß\nGott \U0001f600"},
        {"role": "assistant", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    before = {"model": "m", "tools": tools, "messages": turns}
    after = {**before, "messages": [*turns, {"role": "user", "content": "\ud83d"}]}
    first, second = (
        json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        for body in (before, after)
    )
    second = second.replace(b"\xed\xa0\xbd", b"\\ud83d")
    assert parse(second).prompts[0].startswith(parse(first).prompts[0])


def test_a_large_body_that_only_python_could_read_goes_to_the_engine_unread() -> None:
    body = b'{"model":"m","x":NaN,"prompt":"' + b"a" * 1000 + b'"}'
    limits = ParseLimits(repaired_bytes_max=1000)
    request = parse(body, "/v1/completions", limits=limits)
    assert (request.model, request.prompts, request.body_bytes) == ("", (), len(body))
    assert request.api is Api.COMPLETIONS
    assert parse(body, "/v1/completions", limits=ParseLimits(repaired_values_max=2)).model == ""
    assert parse(body, "/v1/completions", limits=ParseLimits(repaired_values_max=3)).model == "m"
    with pytest.raises(RequestDropped):
        parse(b"[1]" + b" " * 2000, "/v1/completions", limits=limits)


# ---- limits of output, stream, salt ----


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("chat/completions", {"max_tokens": 5}, 5),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": None}, 5),
        ("chat/completions", {"max_completion_tokens": 0, "max_tokens": 5}, 0),
        ("completions", {"max_tokens": 9, "max_completion_tokens": 7}, 9),
        ("messages", {"max_tokens": 9}, 9),
        ("responses", {"max_output_tokens": 3, "max_tokens": 9}, 3),
        ("inference/v1/generate", {"sampling_params": {"max_tokens": 4}, "max_tokens": 9}, 4),
        ("inference/v1/generate", {"sampling_params": [1]}, None),
        ("inference/v1/generate", {}, None),
        ("completions", {}, None),
        ("completions", {"max_tokens": "16"}, 16),
        ("completions", {"max_tokens": -1}, None),
        ("completions", {"max_tokens": 1.5}, None),
        ("completions", {"max_tokens": True}, None),
        ("completions", {"max_tokens": "many"}, None),
        ("completions", {"max_tokens": 10**30}, None),
        ("completions", {"max_tokens": {"a": 1}}, None),
    ],
)
def test_the_clients_own_output_limit_is_read_where_its_api_puts_it(
    path: str, fields: dict[str, Any], expected: int | None
) -> None:
    assert parse({"model": "m", **fields}, f"/v1/{path}").max_output_tokens == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(True, True), (False, False), (None, False), (1, False), ("true", False), ([], False)],
)
def test_B19_only_true_asks_for_a_stream(stream: Any, expected: bool) -> None:
    assert parse(chat(stream=stream)).stream is expected
    assert (
        parse({"model": "m", "prompt": "x", "stream": stream}, "/v1/completions").stream is expected
    )


@pytest.mark.parametrize(
    "path", ["chat/completions", "completions", "responses", "embeddings", "inference/v1/generate"]
)
def test_D10_the_cache_salt_is_read_on_every_api_that_has_one(path: str) -> None:
    assert parse({"model": "m", "cache_salt": "tenant-ä"}, f"/v1/{path}").cache_salt == "tenant-ä"
    assert parse({"model": "m", "cache_salt": 7}, f"/v1/{path}").cache_salt == ""


# ---- compressed and large bodies ----


def test_B14_a_compressed_body_is_decoded_for_routing() -> None:
    body = gzip.compress(json.dumps(chat("hello")).encode())
    request = parse(body, content_encoding="gzip")
    assert request.model == "m"
    assert request.prompts == parse(chat("hello")).prompts
    assert request.body_bytes == len(body)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate", "lzma", "gzip, nonsense"])
def test_B14_a_body_that_cannot_be_decoded_is_routed_by_load(coding: str) -> None:
    request = parse(b"\x00\x01not compressed", content_encoding=coding)
    assert (request.api, request.model, request.prompts) == (Api.CHAT, "", ())


def test_B14_a_body_that_grows_beyond_the_limit_is_routed_by_load() -> None:
    body = gzip.compress(json.dumps(chat("a" * 10_000)).encode())
    assert (
        parse(body, content_encoding="gzip", limits=ParseLimits(decoded_bytes_max=9_000)).model
        == ""
    )
    assert (
        parse(body, content_encoding="gzip", limits=ParseLimits(decoded_bytes_max=11_000)).model
        == "m"
    )


def test_B15_a_large_body_of_countless_small_values_keeps_its_model_and_loses_its_prompt() -> None:
    body = b'{"model":"m","prompt":[' + b"1," * 300_000 + b"1]}"
    request = parse(body, "/v1/completions", limits=ParseLimits(values_max=200_000))
    assert (request.model, request.prompts, request.prompt_tokens) == ("m", (), 0)
    request = parse(body, "/v1/completions", limits=ParseLimits(values_max=300_001))
    assert request.prompt_tokens == 300_001


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("completions", b"prompt", b'"a"'),
        ("completions", b"prompt", b"[1]"),
        ("embeddings", b"input", b'"a"'),
        ("chat/completions", b"messages", b"{}"),
        ("responses", b"input", b"{}"),
        ("conversations", b"items", b'{"a":1}'),
    ],
)
def test_B15_a_million_small_values_are_not_decoded_one_by_one(path, key, value) -> None:
    body = b'{"model":"m","%s":[' % key + (value + b",") * 900_000 + value + b"]}"
    parse(b'{"model":"m"}', f"/v1/{path}")
    started_s = time.process_time()
    request = parse(body, f"/v1/{path}")
    assert time.process_time() - started_s < 0.075, "the event loop stands still meanwhile"
    assert (request.model, request.prompts) == ("m", ())


def test_B15_one_part_of_countless_keys_is_not_decoded() -> None:
    keys = b",".join(b'"k%d":1' % n for n in range(400_000))
    body = b'{"model":"m","messages":[{"role":"user","content":[{%s}]}]}' % keys
    started_s = time.process_time()
    assert parse(body).prompts == ()
    assert time.process_time() - started_s < 0.05


def test_B01_brackets_count_as_values_of_a_body_that_only_python_could_read() -> None:
    lists = b",".join([b"[" * 20 + b"]" * 20] * 90_000)
    body = b'{"model":"m","x":NaN,"messages":[{}],"y":[%s]}' % lists
    assert parse(body).model == "", "its parser takes a second for these"


def test_B15_many_turns_in_a_small_body_keep_the_model_and_lose_the_prompt() -> None:
    request = parse(b'{"model":"m","messages":[' + b"{}," * 100_000 + b"{}]}")
    assert (request.model, request.prompts) == ("m", ())


def test_an_api_without_a_parser_is_routed_by_load() -> None:
    limits = ParseLimits(apis=frozenset({Api.COMPLETIONS}))
    headers = {":method": "POST", ":path": "/v1/chat/completions"}
    request = parse_request(headers, b"no json at all", limits=limits)
    assert (request.api, request.model, request.prompts) == (Api.CHAT, "", ())
