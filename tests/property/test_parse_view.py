"""Prompt views: a longer conversation continues the view of the shorter one, and conversations that
differ in what the engine sees have different views."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from epp.core.parse import parse_request

texts = st.text(max_size=12) | st.sampled_from(
    ['a"', "\x01", "\\", "\x02user", '"}', "\ud83d", "x\x00y", "\\u0001", '","role":"x', "é"]
)
text_parts = st.builds(lambda text: {"type": "text", "text": text}, texts)
image_parts = st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, texts)
result_parts = st.builds(
    lambda call, content: {"type": "tool_result", "tool_use_id": call, "content": content},
    texts,
    texts | st.lists(text_parts | image_parts, max_size=2),
)
contents = texts | st.lists(text_parts | image_parts | result_parts, min_size=1, max_size=3)
calls = st.builds(
    lambda name, args: [{"function": {"name": name, "arguments": args}}], texts, texts
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": contents},
    optional={"tool_calls": calls, "name": texts, "tool_call_id": texts, "reasoning": texts},
)
conversations = st.lists(messages, min_size=1, max_size=5)
tool_lists = st.lists(st.builds(lambda name: {"name": name}, texts), max_size=2)
paths = st.sampled_from(["chat/completions", "messages", "embeddings"])


def view(path: str, turns: Any, tools: Any, *, key: str = "messages") -> bytes:
    body = json.dumps({"model": "m", key: turns, "tools": tools}).encode()
    (prompt,) = parse_request({":path": f"/v1/{path}"}, body).prompts
    return prompt


def has_lone_surrogate(value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return text != text.encode("utf-8", "replace").decode()


def meaning(turns: Any, tools: Any) -> Any:
    """The oracle: what the engine sees of a conversation, as a value to compare. A string and one
    text part are the same; the image's URL stands for the image."""

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return [("text", content)]
        return [part(one) for one in content]

    def part(one: Any) -> Any:
        if one["type"] == "text":
            return ("text", one["text"])
        if one["type"] == "tool_result":
            return ("result", one["tool_use_id"], parts(one["content"]))
        return ("image", one["image_url"]["url"])

    seen = [{**turn, "content": parts(turn["content"])} for turn in turns]
    return json.dumps([seen, tools], sort_keys=True)


@given(path=paths, turns=conversations, tools=tool_lists, data=st.data())
def test_more_turns_continue_the_view(
    path: str, turns: Any, tools: Any, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(turns)))
    shorter, longer = turns[:count], turns
    if has_lone_surrogate(shorter) == has_lone_surrogate(longer):
        assert view(path, longer, tools).startswith(view(path, shorter, tools))


@given(turns=conversations, tools=tool_lists, data=st.data())
def test_more_items_continue_the_view(turns: Any, tools: Any, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(turns)))
    if has_lone_surrogate(turns[:count]) == has_lone_surrogate(turns):
        shorter = view("responses", turns[:count], tools, key="input")
        assert view("responses", turns, tools, key="input").startswith(shorter)


@st.composite
def two_conversations(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two that are alike but for a few changes, which are the hard ones to tell apart."""
    first = draw(st.tuples(conversations, tool_lists))
    turns, tools = json.loads(json.dumps(first))
    place = draw(st.integers(0, len(turns) - 1))
    change = draw(st.sampled_from(["replace", "drop", "field", "split", "none", "tools"]))
    if change == "replace":
        turns[place] = draw(messages)
    elif change == "drop" and len(turns) > 1:
        del turns[place]
    elif change == "field":
        field = draw(st.sampled_from(["role", "content", "name", "tool_call_id", "reasoning"]))
        turns[place][field] = draw(texts)
    elif change == "split" and isinstance(turns[place]["content"], str):
        text = turns[place]["content"]
        cut = draw(st.integers(0, len(text)))
        turns[place]["content"] = text[:cut]
        turns.insert(place + 1, {**turns[place], "content": text[cut:]})
    elif change == "tools":
        tools = draw(tool_lists)
    return first, (turns, tools)


@given(path=paths, pair=two_conversations())
def test_views_are_equal_exactly_when_the_engine_sees_the_same(path: str, pair: Any) -> None:
    first, second = pair
    same = meaning(*first) == meaning(*second)
    assert (view(path, *first) == view(path, *second)) is same
