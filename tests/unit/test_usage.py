"""`core.usage`: token counts and events of answers, whole and broken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from epp.build import compiled
from epp.core import usage as module
from epp.core.model import Api, Usage
from epp.core.usage import EVENT_BYTES_MAX, WINDOW_BYTES, UsageReader

DATA = Path(__file__).parent / "data" / "vllm"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
COUNTED = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=5)
NOTHING = Usage()


def read(
    *chunks: bytes, stream: bool = True, api: Api = Api.CHAT, readable: bool = True
) -> UsageReader:
    reader = UsageReader(api, event_stream=stream, readable=readable)
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    return reader


def document(value: Any, **options: Any) -> Usage:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read(body, stream=False, **options).usage


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def recorded(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())["response"]["body"]


# ---- recorded answers ----


@pytest.mark.parametrize(
    ("name", "events", "expected"),
    [
        ("chat_stream", 10, Usage(139, 8, 128)),
        ("completions_stream_usage", 9, Usage(106, 8, 96)),
        ("chat_tool_named_stream", 16, NOTHING),
        ("messages_anthropic_stream", 8, Usage(16, 4, 0)),
        ("responses_stream", 10, Usage(16, 4, 0)),
    ],
)
def test_C01_usage_and_events_of_a_recorded_stream(name: str, events: int, expected: Usage) -> None:
    reader = read(recorded(name).encode())
    assert reader.usage == expected
    assert reader.events == events


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat", Usage(139, 8, 0)),
        ("completions_batch", Usage(2, 32, 0)),
        ("messages_anthropic", Usage(16, 8, 0)),
        ("responses", Usage(16, 8, 0)),
        ("embeddings", Usage(8, 0, None)),
        ("generate_tokens", Usage(4, 4, 0)),
        ("render_chat", NOTHING),
    ],
)
def test_usage_of_a_recorded_document(name: str, expected: Usage) -> None:
    body = json.dumps(recorded(name)).encode()
    assert document(body) == expected
    assert (
        read(*(body[at : at + 7] for at in range(0, len(body), 7)), stream=False).usage == expected
    )


# ---- event streams ----


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("field", [b"data: ", b"data:"])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b": ping\n\n", b"retry: 5\nid\n"])
def test_C03_every_way_to_write_an_event_stream(line_end: bytes, field: bytes, head: bytes) -> None:
    lines = [
        *(field + b'{"choices":[]}', b"", b"event: x", b": note"),
        *(field + json.dumps({"usage": USAGE}).encode(), b""),
        *(field + b"[DONE]", b"", b""),
    ]
    stream = (head + b"\n".join(lines)).replace(b"\n", line_end)
    assert (read(stream).usage, read(stream).events) == (COUNTED, 2)
    single = [stream[at : at + 1] for at in range(len(stream))]
    assert (read(*single).usage, read(*single).events) == (COUNTED, 2)


def test_C03_data_over_several_lines_is_one_event() -> None:
    pretty = json.dumps({"usage": USAGE}, indent=1)
    stream = "".join(f"data: {line}\r\n" for line in pretty.splitlines()) + "\r\n"
    assert (read(stream.encode()).usage, read(stream.encode()).events) == (COUNTED, 1)


def test_C03_other_fields_and_names_that_only_begin_like_data_are_no_data() -> None:
    text = json.dumps({"usage": USAGE})
    assert read(f"database: {text}\n\nevent: {text}\n\n data: {text}\n\n".encode()).events == 0
    assert read(b"data\n\ndata:\n\n").events == 2


def test_C02_the_last_event_needs_no_blank_line() -> None:
    assert read(b'data: {"usage":{"prompt_tokens":1}}').usage.prompt_tokens == 1
    assert read(b'data: {"usage":{"prompt_tokens":1}}\r').events == 1


def test_a_line_feed_that_comes_after_its_carriage_return_ends_no_second_line() -> None:
    assert read(b"data: 1\r", b"\ndata: 2\r", b"\n\r", b"\n", b"data: 3\r\n\r\n").events == 2
    assert read(b"data: 1\r", b"\n", b"\n", b"data: 2").events == 2


def test_an_end_or_a_chunk_after_the_end_changes_nothing() -> None:
    reader = read(event({"usage": USAGE}))
    reader.feed(event({"usage": {"prompt_tokens": 99}}))
    reader.end()
    assert (reader.usage, reader.events) == (COUNTED, 1)
    reader = read(json.dumps({"usage": USAGE}).encode(), stream=False)
    reader.feed(b"more")
    reader.end()
    assert reader.usage == COUNTED


def test_C05_counts_are_merged_by_field_and_the_last_one_stands() -> None:
    start = {"input_tokens": 1000, "cache_read_input_tokens": 800, "output_tokens": 1}
    reader = read(
        event({"type": "message_start", "message": {"usage": start}}),
        event({"type": "message_delta", "usage": {"output_tokens": 100}}),
        event({"type": "message_delta", "usage": {"output_tokens": 200}}),
    )
    assert reader.usage == Usage(1000, 200, 800)


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_C06_every_final_event_of_a_response_carries_its_usage(kind: str) -> None:
    usage = {"input_tokens": 4, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    body = {"type": f"response.{kind}", "response": {"usage": usage}}
    assert read(event(body), api=Api.RESPONSES).usage == Usage(4, 2, 1)


def test_C06_events_before_the_last_carry_none() -> None:
    body = {"type": "response.created", "response": {"usage": {"input_tokens": 4}}}
    assert read(event(body), api=Api.RESPONSES).usage == NOTHING


def test_generated_text_that_looks_like_usage_is_text() -> None:
    text = 'data: {"usage": {"prompt_tokens": 666}}\n\n'
    delta = {"choices": [{"delta": {"content": text}}], "usage": None}
    assert read(event(delta)).usage == NOTHING
    assert read(event(delta), event({"usage": USAGE})).usage == COUNTED


@pytest.mark.parametrize("size", [EVENT_BYTES_MAX, 4 * EVENT_BYTES_MAX])
@pytest.mark.parametrize("step", [1 << 12, 1 << 16, 1 << 30])
@pytest.mark.parametrize("line", [1 << 10, 1 << 30])
def test_C02_an_event_beyond_the_limit_is_counted_and_what_follows_is_read(
    size: int, step: int, line: int
) -> None:
    body = b'{"usage":{"prompt_tokens":666},"x":[' + b"1," * (size // 2) + b"1]}"
    lines = b"".join(b"data: " + body[at : at + line] + b"\n" for at in range(0, len(body), line))
    stream = event({"usage": USAGE}) + lines + b"\n" + event({"usage": {"prompt_tokens": 8}})
    reader = UsageReader(Api.CHAT, event_stream=True)
    seen = []
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
        seen.append(reader.usage.prompt_tokens)
    assert 666 not in seen
    assert (reader.usage, reader.events) == (Usage(8, 3, 5), 3)


def test_C02_what_is_held_of_an_endless_event_is_bounded() -> None:
    reader = UsageReader(Api.CHAT, event_stream=True)
    stream = reader._stream
    assert stream is not None
    reader.feed(b"data: ")
    for _ in range(100):
        reader.feed(b"x" * 50_000)
        assert len(stream._rest) <= EVENT_BYTES_MAX
    assert len(stream._rest) < 100
    for _ in range(100):
        reader.feed(b"\ndata: " + b"x" * 50_000)
        assert sum(map(len, stream._data)) + len(stream._rest) <= EVENT_BYTES_MAX
    reader.feed(b"\n\n")
    for _ in range(100):
        reader.feed(b"data: " + b"x" * 50_000 + b"\n")
        assert sum(map(len, stream._data)) <= EVENT_BYTES_MAX


# ---- documents ----


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("oops", NOTHING),
        (None, NOTHING),
        ([], NOTHING),
        (5, NOTHING),
        ({}, NOTHING),
        ({"prompt_tokens": "1024"}, Usage(1024)),
        ({"prompt_tokens": 12.0}, Usage(12)),
        ({"prompt_tokens": 12.5}, NOTHING),
        ({"prompt_tokens": -3}, NOTHING),
        ({"prompt_tokens": True}, NOTHING),
        ({"prompt_tokens": None, "input_tokens": 4}, Usage(4)),
        ({"prompt_tokens": float("nan"), "completion_tokens": 2}, Usage(None, 2)),
        ({"prompt_tokens": float("inf"), "completion_tokens": 2}, Usage(None, 2)),
        ({"prompt_tokens": 10**40, "completion_tokens": 2}, Usage(None, 2)),
        ({"prompt_tokens": 10**14, "completion_tokens": 2}, Usage(None, 2)),
        ({"prompt_tokens": "many", "completion_tokens": {"a": 1}}, NOTHING),
        ({"prompt_tokens": 1, "prompt_tokens_details": 0}, Usage(1)),
        ({"prompt_tokens": 1, "prompt_tokens_details": None}, Usage(1)),
        ({"prompt_tokens": 1, "prompt_tokens_details": [1]}, Usage(1)),
        ({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": "x"}}, Usage(1)),
        ({"prompt_tokens": 1, "\ud83d": "\ud83d"}, Usage(1)),
        ({"prompt_tokens": 1, "filler": "x" * 100_000}, NOTHING),
    ],
)
def test_C04_malformed_usage_is_passed_over(value: Any, expected: Usage) -> None:
    assert document({"usage": value}) == expected
    assert read(event({"usage": value})).usage == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"upstream connect error or disconnect",
        b"<html>\"usage\"</html>",
        b'{"usage":',
        b'{"usage":{"prompt_tokens":7',
        b'["usage"]',
        b'"usage"',
        b'{"a":' * 5000 + b'"usage"',
        b"[" * 5000 + b'"usage"',
        b'{"usage":' * 5000 + b"1" + b"}" * 5000,
        b'{"usage":{"prompt_tokens_details":' + b"[" * 990 + b"]" * 990 + b"}}",
        b"\xff\xfe\"usage\"",
        b"\x1f\x8b\x08\x00",
    ],
)  # fmt: skip
def test_C07_an_answer_that_is_no_json_is_passed_over(body: bytes) -> None:
    assert document(body) == NOTHING
    assert read(body).usage == NOTHING
    assert read(b"data: " + body + b"\n\n").usage == NOTHING


@pytest.mark.parametrize("stream", [True, False])
def test_C08_a_compressed_answer_is_not_looked_at(stream: bool) -> None:
    reader = read(event({"usage": USAGE}), stream=stream, readable=False)
    assert (reader.usage, reader.events) == (NOTHING, 0)


def test_an_unknown_api_has_events_and_no_usage() -> None:
    reader = read(event({"usage": USAGE}), api=Api.OTHER)
    assert (reader.usage, reader.events) == (NOTHING, 1)
    assert document({"usage": USAGE}, api=Api.OTHER) == NOTHING


LONG = "x" * (3 * WINDOW_BYTES)
FAKE = {"usage": {"prompt_tokens": 666}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [LONG], "usage": USAGE}, COUNTED),
        ({"choices": [LONG], "usage": USAGE, "prompt_token_ids": [1] * 9000, "a": {}}, COUNTED),
        ({"choices": [LONG, "usage", {"text": json.dumps(FAKE)}], "usage": USAGE}, COUNTED),
        ({"choices": [LONG, FAKE], "usage": USAGE}, COUNTED),
        ({"choices": [LONG], "usage": USAGE, "tool": FAKE}, COUNTED),
        ({"choices": [LONG], "usage": USAGE, "tool": [FAKE] * 3}, COUNTED),
        ({"choices": [LONG, FAKE]}, NOTHING),
        ({"choices": [LONG], "tool": {"input": FAKE}}, NOTHING),
        ({"choices": [LONG], "text": json.dumps(FAKE)}, NOTHING),
        ({"choices": [LONG], "usage": None}, NOTHING),
        ({"usage": USAGE, "choices": [LONG]}, NOTHING),
    ],
)
@pytest.mark.parametrize("step", [1000, 1 << 30])
def test_C15_of_a_long_document_only_usage_of_the_outermost_object_is_found(
    body: Any, expected: Usage, step: int
) -> None:
    data = json.dumps(body).encode()
    chunks = [data[at : at + step] for at in range(0, len(data), step)]
    assert read(*chunks, stream=False).usage == expected


def test_C15_a_document_of_200_mb_is_held_only_in_part() -> None:
    reader = UsageReader(Api.CHAT, event_stream=False)
    kept = reader._document
    assert kept is not None
    for _ in range(3200):
        reader.feed(b"x" * 65_536)
        assert len(kept._window) <= 2 * WINDOW_BYTES
    reader.feed(b'"],"usage":' + json.dumps(USAGE).encode() + b"}")
    reader.end()
    assert reader.usage == COUNTED


@pytest.mark.skipif(compiled(), reason="plants a bug that compiled code does not look up")
def test_the_search_of_a_long_document_has_an_end() -> None:
    body = b"x" * (3 * WINDOW_BYTES) + b'"usage":{},' * 20_000
    calls = 0
    real = module._strict_envelope

    def counting(data: bytes) -> Any:
        nonlocal calls
        calls += 1
        return real(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_strict_envelope", counting)
        assert document(body) == NOTHING
    assert 0 < calls < 10


@pytest.mark.parametrize("stream", [True, False])
def test_C04_an_engine_cannot_hold_the_loop_with_what_only_python_reads(stream: bool) -> None:
    body = b'{"usage":{"x":NaN},"y":[' + b",".join([b"[" * 20 + b"]" * 20] * 6_000) + b"]}"
    started_s = time.process_time()
    assert read(b"data: " * stream + body + b"\n\n", stream=stream).usage == NOTHING
    assert time.process_time() - started_s < 0.03
