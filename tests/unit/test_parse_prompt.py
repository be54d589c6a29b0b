"""Prompt views: what they hold, in which order, and what must not change them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

from epp.core.model import Request
from epp.core.parse import ParseLimits, parse_request
from epp.core.prompt import (
    AUDIO_TOKENS,
    BYTES_PER_TOKEN,
    IMAGE_TOKENS,
    VIDEO_TOKENS,
    PromptLimits,
)

DATA = Path(__file__).parent / "data" / "vllm"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def parse(path: str, *, limits: PromptLimits | None = None, **body: Any) -> Request:
    data = json.dumps({"model": "m", **body}).encode()
    headers = {":path": f"/v1/{path}"}
    return parse_request(headers, data, limits=ParseLimits(prompt=limits or PromptLimits()))


def view(path: str = "chat/completions", **body: Any) -> bytes:
    request = parse(path, **body)
    assert len(request.prompts) == 1
    return request.prompts[0]


def turns(*contents: Any, **body: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return view(messages=messages, **body)


def is_load_only(request: Request) -> bool:
    return request.model == "m" and request.prompts == () and request.prompt_tokens == 0


# ---- chat ----


def test_a_view_holds_tools_system_and_turns_in_that_order() -> None:
    text = view(
        messages=[
            {"role": "system", "content": "be terse"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "warm"},
        ],
        tools=[{"name": "get_weather"}],
    )
    parts = [b"get_weather", b"be terse", b"weather?", b"assistant", b"warm"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_B03_content_as_a_string_and_as_one_text_part_is_the_same_prompt(kind: str) -> None:
    assert turns("hello", "again") == turns([{"type": kind, "text": "hello"}], "again")


def test_B03_two_text_parts_are_not_one() -> None:
    one = turns([{"type": "text", "text": "ab"}])
    two = turns([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert one != two


def test_B03_null_content_and_none_at_all_are_the_same() -> None:
    assert view(messages=[{"role": "user", "content": None}]) == view(messages=[{"role": "user"}])


@pytest.mark.parametrize("content", [["a", "b"], [1, None], 5, {"text": "x"}, [["a"]], [None]])
def test_B03_content_of_an_unknown_form_still_tells_prompts_apart(content: Any) -> None:
    assert turns(content) != turns("other")
    assert turns(content, "x") == turns(content) + turns("x")


def test_B03_another_image_is_another_prompt_and_a_large_one_adds_no_more_bytes() -> None:
    small = turns([{"type": "text", "text": "see"}, IMAGE])
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "B" * 5_000_000}}
    large = turns([{"type": "text", "text": "see"}, other])
    assert small != large
    assert len(small) == len(large) < 64 + IMAGE_TOKENS * BYTES_PER_TOKEN


def test_an_image_is_told_by_its_url_and_never_fetched() -> None:
    digest = xxhash.xxh3_128(b"image_url" + json.dumps(IMAGE["image_url"]).encode()).digest()
    assert digest in turns([IMAGE])


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (IMAGE, IMAGE_TOKENS),
        ({"type": "input_image", "image_url": "https://x/y.png"}, IMAGE_TOKENS),
        ({"image_url": {"url": "u"}}, IMAGE_TOKENS),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, IMAGE_TOKENS),
        ({"type": "video_url", "video_url": {"url": "u"}}, VIDEO_TOKENS),
        ({"type": "input_audio", "input_audio": {"data": "A" * 9999}}, AUDIO_TOKENS),
    ],
)
def test_media_count_as_their_kind_is_estimated(part: dict[str, Any], tokens: int) -> None:
    request = parse("chat/completions", messages=[{"role": "user", "content": [part]}])
    assert tokens <= request.prompt_tokens < tokens + 20
    in_view = len(request.prompts[0]) // BYTES_PER_TOKEN
    assert tokens - 4 <= in_view, "what stands behind it is cut where the engine cuts it"


def test_many_media_are_counted_and_do_not_fill_the_memory() -> None:
    video = {"type": "video_url", "video_url": {"url": "u"}}
    request = parse("chat/completions", messages=[{"role": "user", "content": [video] * 2000}])
    assert 2000 * VIDEO_TOKENS <= request.prompt_tokens < 2000 * (VIDEO_TOKENS + 20)
    assert len(request.prompts[0]) <= PromptLimits().view_bytes_max


def test_the_image_estimate_is_the_references() -> None:
    assert IMAGE_TOKENS == 225


def test_B11_other_tools_are_another_prompt_from_the_first_block_on() -> None:
    first = turns("x" * 600, tools=[{"name": "a"}])
    second = turns("x" * 600, tools=[{"name": "b"}])
    assert first[:256] != second[:256]


def test_B11_tool_calls_and_results_are_part_of_the_prompt() -> None:
    def conversation(city: str, call: str, answer: str) -> bytes:
        calls = [{"id": call, "function": {"name": "w", "arguments": json.dumps({"city": city})}}]
        return view(
            messages=[
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call, "content": answer},
            ]
        )

    given = conversation("Oslo", "1", "warm")
    assert given != conversation("Rome", "1", "warm")
    assert given != conversation("Oslo", "2", "warm")
    assert given != conversation("Oslo", "1", "cold")


@pytest.mark.parametrize(
    "field", ["name", "tool_call_id", "reasoning", "reasoning_content", "tool_calls"]
)
def test_each_field_of_a_message_that_templates_render_tells_prompts_apart(field: str) -> None:
    plain = {"role": "assistant", "content": "x"}
    assert view(messages=[plain]) != view(messages=[{**plain, field: "y"}])
    assert view(messages=[plain]) == view(messages=[{**plain, field: None}])


@pytest.mark.parametrize(
    "field", ["chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "tools"]
)
def test_what_changes_the_rendering_stands_at_the_head(field: str) -> None:
    assert turns("x", **{field: ["a"]}).index(b'"a"') < turns("x", **{field: ["a"]}).index(b"user")
    assert turns("x", **{field: None}) == turns("x", **{field: []}) == turns("x")


def test_fields_that_do_not_reach_the_prompt_do_not_change_the_view() -> None:
    assert turns("x") == turns("x", temperature=0.3, stream=True, max_tokens=7, unheard_of={"a": 1})
    assert view(
        messages=[{"role": "u", "content": "x", "refusal": None, "annotations": []}]
    ) == view(messages=[{"content": "x", "role": "u"}])


def test_a_cache_breakpoint_that_moves_does_not_change_the_view() -> None:
    plain = {"type": "text", "text": "x"}
    marked = {**plain, "cache_control": {"type": "ephemeral"}}
    assert turns([plain]) == turns([marked]) == turns("x")
    assert turns([IMAGE]) == turns([{**IMAGE, "cache_control": {"type": "ephemeral"}}])


def test_text_cannot_imitate_a_change_of_role() -> None:
    honest = view(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    boundary = honest[honest.index(b'a"') + 2 : honest.index(b'"b"')].decode()
    for attempt in ("a" + boundary + "b", 'a"' + boundary + '"b', "a\x01assistant\x02b"):
        assert turns(attempt) != honest
        assert not turns(attempt, "z").startswith(honest)


def test_nested_results_are_told_from_parts_that_follow() -> None:
    def result(*content: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "1", "content": list(content)}

    text = {"type": "text", "text": "x"}
    assert turns([result(text, text)]) != turns([result(text), text])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": None},
        {"messages": "x"},
        {"messages": [1]},
        {"messages": ["a"]},
        {"messages": {"role": "user"}},
        {"messages": [[{"role": "user"}]]},
    ],
)
def test_B09_messages_of_an_unknown_form_are_routed_by_load(body: dict[str, Any]) -> None:
    assert is_load_only(parse("chat/completions", **body))


# ---- Anthropic messages ----


def test_B10_blocks_of_every_kind_are_taken_in_order() -> None:
    text = view(
        "messages",
        system=[{"type": "text", "text": "sys-1"}],
        tools=[{"name": "read-0"}],
        messages=[
            {"role": "user", "content": "ask-2"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "think-3", "signature": "s"},
                    {"type": "text", "text": "say-4"},
                    {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "path-5"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "result-6"}, IMAGE],
                    },
                    {"type": "text", "text": "thanks-7"},
                ],
            },
        ],
    )
    words = [
        b"read-0",
        b"sys-1",
        b"ask-2",
        b"think-3",
        b"say-4",
        b"path-5",
        b"result-6",
        b"thanks-7",
    ]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert b"base64" not in text


def test_B10_system_as_a_string_and_as_one_block_is_the_same() -> None:
    messages = [{"role": "user", "content": "x"}]
    blocks = [{"type": "text", "text": "be terse", "cache_control": {"type": "ephemeral"}}]
    assert view("messages", system="be terse", messages=messages) == view(
        "messages", system=blocks, messages=messages
    )


def test_B10_a_billing_header_that_changes_with_each_request_is_left_out() -> None:
    messages = [{"role": "user", "content": "x"}]
    system = [{"type": "text", "text": "be terse"}]
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=1f"}, *system]
    assert view("messages", system=billed, messages=messages) == view(
        "messages", system=system, messages=messages
    )
    asked = [{"role": "user", "content": [{"type": "text", "text": "x-anthropic-billing-header"}]}]
    assert b"billing" in view("messages", messages=asked)


def test_the_same_conversation_is_the_same_view_on_both_chat_apis() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert view("messages", system="s", messages=messages) == view(
        "chat/completions", messages=[{"role": "system", "content": "s"}, *messages]
    )


# ---- responses, conversations ----


def test_responses_take_instructions_tools_and_input() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "ask-1"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "args-2"},
        {"type": "function_call_output", "call_id": "c", "output": "out-3"},
        {"type": "message", "role": "user", "content": "thanks-4"},
    ]
    text = view("responses", input=items, instructions="ins-0", tools=[{"name": "f"}])
    places = [text.index(word) for word in (b"ins-0", b"ask-1", b"args-2", b"out-3", b"thanks-4")]
    assert places == sorted(places)


def test_an_input_string_is_one_turn_of_the_user() -> None:
    listed = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert view("responses", input="hi") == view("responses", input=listed)


def test_conversations_take_their_items() -> None:
    assert b"hello" in view("conversations", items=[{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "prompt"])
def test_a_prompt_whose_beginning_the_engine_stores_has_no_view(field: str) -> None:
    assert is_load_only(parse("responses", input="hi", **{field: "resp_1"}))
    assert parse("responses", input="hi", **{field: None}).prompts


@pytest.mark.parametrize(
    "value",
    [None, 7, "", [], ["a"], [1], {}, [[]], [{"content": 5}], [{"type": "x", "weird": [1]}]],
)
def test_B09_input_of_any_form_is_routed(value: Any) -> None:
    assert parse("responses", input=value).model == "m"
    assert parse("conversations", items=value).model == "m"
    assert parse("embeddings", input=value).model == "m"
    assert parse("completions", prompt=value).model == "m"
    assert parse("inference/v1/generate", token_ids=value).model == "m"
    assert parse("messages", system=value, messages=[{"role": "user"}]).model == "m"
    assert parse("images/generations", prompt=value).model == "m"


# ---- plain prompts ----


@pytest.mark.parametrize(("path", "key"), [("completions", "prompt"), ("embeddings", "input")])
def test_B05_every_form_of_a_prompt_is_read(path: str, key: str) -> None:
    def prompts(value: Any) -> tuple[tuple[bytes, ...], int]:
        request = parse(path, **{key: value})
        return request.prompts, request.prompt_tokens

    assert prompts("hello") == ((b"hello",), 2)
    assert prompts(["ab", "c"]) == ((b"ab", b"c"), 2)
    assert prompts([1, 70_000, 2**32 - 1]) == ((struct.pack("<3I", 1, 70_000, 2**32 - 1),), 3)
    assert prompts([[1, 2], [3]]) == ((struct.pack("<2I", 1, 2), struct.pack("<I", 3)), 3)
    assert prompts([[], [3]]) == ((struct.pack("<I", 3),), 1)
    assert prompts("") == prompts([]) == prompts([""]) == prompts([[]]) == ((), 0)


@pytest.mark.parametrize(
    "prompt",
    [
        *([-1], [1, -1], [1.5], [1.0], [2**32], [10**30], [True], [None]),
        *([[1], [-2]], [[1], 2], [1, "a"], ["a", 1], ["a", None], [[["a"]]]),
        *({"a": 1}, 5),
    ],
)
def test_B05_ids_that_are_none_are_routed_by_load(prompt: Any) -> None:
    assert is_load_only(parse("completions", prompt=prompt))


def test_a_prompt_in_a_list_with_white_space_is_read_too() -> None:
    body = b'{"model":"m","prompt":[\n   "a",\t[1]]}'
    assert parse_request({":path": "/v1/completions"}, body).prompts == ()
    body = b'{"model":"m","prompt":[\n   "a",\t"b"]}'
    assert parse_request({":path": "/v1/completions"}, body).prompts == (b"a", b"b")


def test_embeddings_of_a_conversation_have_its_view() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert view("embeddings", messages=messages) == view("chat/completions", messages=messages)


def test_generate_takes_ids_and_tells_media_apart_by_their_hashes() -> None:
    plain = parse("inference/v1/generate", token_ids=[1, 2, 3])
    assert plain.prompts == (struct.pack("<3I", 1, 2, 3),)
    pictures = [
        parse("inference/v1/generate", token_ids=[1, 2, 3], features={"mm_hashes": name})
        for name in "ab"
    ]
    assert len({plain.prompts, *(request.prompts for request in pictures)}) == 3
    assert {request.prompt_tokens for request in (plain, *pictures)} == {3}


def test_B13_a_truncated_prompt_has_no_view_and_no_more_tokens_than_are_kept() -> None:
    request = parse("completions", prompt="x" * 400, truncate_prompt_tokens=10)
    assert (request.prompts, request.prompt_tokens) == ((), 10)
    request = parse("completions", prompt="x" * 400, truncate_prompt_tokens=-1)
    assert (request.prompts, request.prompt_tokens) == ((), 100)
    assert parse("completions", prompt="x", truncate_prompt_tokens=None).prompts == (b"x",)


@pytest.mark.parametrize(
    "path", ["chat/completions/render", "messages/count_tokens", "messages/render"]
)
def test_where_nothing_is_prefilled_there_is_no_prompt_to_learn(path: str) -> None:
    assert is_load_only(parse(path, messages=[{"role": "user", "content": "x"}]))


# ---- bounds ----


def test_a_view_ends_at_its_limit_and_the_estimate_does_not() -> None:
    limits = PromptLimits(view_bytes_max=64)
    whole = parse("chat/completions", messages=[{"role": "user", "content": "y" * 400}])
    short = parse(
        "chat/completions", messages=[{"role": "user", "content": "y" * 400}], limits=limits
    )
    assert short.prompts[0] == whole.prompts[0][:64]
    assert short.prompt_tokens == whole.prompt_tokens > 100
    assert parse("completions", prompt=list(range(100)), limits=limits).prompt_tokens == 100
    assert len(parse("completions", prompt=list(range(100)), limits=limits).prompts[0]) == 64


def test_all_prompts_of_a_request_share_the_limits() -> None:
    limits = PromptLimits(view_bytes_max=10, prompts_max=3)
    request = parse("completions", prompt=["aaaa"] * 5, limits=limits)
    assert (request.prompts, request.prompt_tokens) == ((b"aaaa", b"aaaa", b"aa"), 5)
    request = parse("completions", prompt=["aaaaaaaaaa"] * 2, limits=limits)
    assert (request.prompts, request.prompt_tokens) == ((b"aaaaaaaaaa",), 6)
    request = parse("completions", prompt=["a"] * 5, limits=limits)
    assert (request.prompts, request.prompt_tokens) == ((b"a", b"a", b"a"), 5)
    request = parse("completions", prompt=[[1]] * 5, limits=limits)
    assert (request.prompts, request.prompt_tokens) == ((struct.pack("<I", 1),) * 2, 5)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "x"}] * 60,
        [{"type": "tool_use"}] * 60,
        [{str(number): 1 for number in range(300)}],
        [{"type": "tool_result", "content": [{"type": "tool_use"}] * 60}],
    ],
)
def test_more_parts_than_the_limit_are_routed_by_load(content: Any) -> None:
    limits = PromptLimits(pieces_max=100)
    messages = [{"role": "user", "content": content}]
    assert is_load_only(parse("chat/completions", limits=limits, messages=messages))
    assert is_load_only(parse("responses", limits=limits, input=messages))


@pytest.mark.parametrize(
    ("path", "key"), [("chat/completions", "messages"), ("responses", "input")]
)
def test_more_turns_than_the_limit_are_routed_by_load(path: str, key: str) -> None:
    limits = PromptLimits(pieces_max=100)
    turn = {"role": "user", "content": "x"}
    assert is_load_only(parse(path, limits=limits, **{key: [turn] * 30}))
    assert parse(path, limits=limits, **{key: [turn] * 20}).prompts


def test_deeply_nested_results_are_taken_as_they_stand() -> None:
    content: Any = "bottom"
    for _ in range(240):
        content = [{"type": "tool_result", "content": content}]
    assert b"bottom" in turns(content)


# ---- recorded requests ----


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.json")))
def test_requests_that_a_real_engine_served_are_read(name: str) -> None:
    recorded = json.loads((DATA / f"{name}.json").read_text())["request"]
    headers = {":method": recorded["method"], ":path": recorded["path"]}
    request = parse_request(headers, json.dumps(recorded["body"]).encode())
    assert request.model == "tiny"
    assert bool(request.prompts) is not recorded["path"].endswith("/render")
    assert request.stream is recorded["body"].get("stream", False)


def test_token_ids_are_counted_exactly_as_the_engine_counts_them() -> None:
    exchange = json.loads((DATA / "completions_token_ids.json").read_text())
    body = json.dumps(exchange["request"]["body"]).encode()
    request = parse_request({":path": "/v1/completions"}, body)
    assert request.prompt_tokens == exchange["response"]["body"]["usage"]["prompt_tokens"] == 80
