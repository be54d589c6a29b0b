"""The client's own name for the model is put back into answers, and nothing else changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from epp.core.renaming import ModelRestorer

RECORDED = Path(__file__).parent / "data" / "vllm"
EVENT = b'data: {"id":"1","model":"up","choices":[{"delta":{"content":"x"}}]}\n\n'
CLIENT = b'"client-name"'


def restorer(*, stream: bool = True, upstream: str = "up") -> ModelRestorer:
    return ModelRestorer(upstream, "client-name", event_stream=stream)


def restored(body: bytes, *, stream: bool = True, upstream: str = "up") -> bytes:
    """The answer as it is when it came whole, after checking that any cut gives the same."""
    whole = restorer(stream=stream, upstream=upstream).feed(body, True)
    events = [found.end() for found in re.finditer(rb"\n\n|\r\n\r\n", body)]
    for at in range(0, len(body), 1 + len(body) // 200):
        for cuts in ({at}, {at, *events}):
            assert in_pieces(body, cuts, stream=stream, upstream=upstream) == whole, cuts
    assert in_pieces(body, range(len(body)), stream=stream, upstream=upstream) == whole
    return whole


def in_pieces(body: bytes, cuts: Iterable[int], *, stream: bool, upstream: str) -> bytes:
    """The same when it came cut at these places."""
    names = restorer(stream=stream, upstream=upstream)
    edges = sorted({0, *cuts, len(body)})
    pieces = [names.feed(body[start:end], False) for start, end in pairwise(edges)]
    return b"".join((*pieces, names.feed(b"", True)))


def body_of(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())["response"]["body"]


STREAMS = ["chat_stream", "chat_tool_named_stream", "completions_stream_usage"]


@pytest.mark.parametrize("name", [*STREAMS, "messages_anthropic_stream", "responses_stream"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_C02_recorded_streams_are_restored_wherever_they_are_cut(
    name: str, line_end: bytes
) -> None:
    stream = body_of(name).encode().replace(b"\n", line_end)
    expected = stream.replace(b'"model":"tiny"', b'"model":' + CLIENT)
    assert restored(stream, upstream="tiny") == expected != stream


@pytest.mark.parametrize("name", ["chat", "completions_batch", "messages_anthropic", "responses"])
@pytest.mark.parametrize("indent", [None, 2])
def test_recorded_documents_are_restored_wherever_they_are_cut(
    name: str, indent: int | None
) -> None:
    document = json.dumps(body_of(name), indent=indent).encode()
    assert document.count(b'"model": "tiny"') == 1
    expected = document.replace(b'"model": "tiny"', b'"model": ' + CLIENT)
    assert restored(document, stream=False, upstream="tiny") == expected


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"model":"up"}', b'{"model":"client-name"}'),
        (b'\xef\xbb\xbf { "a" : [1,{"b":"]"}], "model" : "up" }', None),
        (b'{"a":{"model":"up"},"model":"up"}', b'{"a":{"model":"up"},"model":"client-name"}'),
        (b'{"t":"\\"model\\":\\"up\\"","model":"up"}', b'{"t":"\\"model\\":\\"up\\"","model":%b}'),
        (b'{"t":"\\\\","model":"up"}', b'{"t":"\\\\","model":"client-name"}'),
        (b'{"model":"\\u0075\\u0070"}', b'{"model":"client-name"}'),
        (b'{"long":"' + b"x" * 900 + b'","n":-1.5e3,"model":"up"}', None),
        (b'{"' + b"k" * 90 + b'":{},"model":"up"}', None),
        (b'{"model":"other","a":1}', b'{"model":"other","a":1}'),
        (b'{"model":"up2"}', b'{"model":"up2"}'),
        (b'{"model":7,"model":"up"}', b'{"model":7,"model":"up"}'),
        (b'{"response":{"model":"up"}}', b'{"response":{"model":"up"}}'),
        (b'[{"model":"up"}]', b'[{"model":"up"}]'),
        (b'{"model" "up"}', b'{"model" "up"}'),
        (b'"model":"up"', b'"model":"up"'),
    ],
)
def test_in_a_document_the_name_of_the_outermost_object_is_replaced(
    body: bytes, changed: bytes | None
) -> None:
    if changed is None:
        changed = body.replace(b'"up"', CLIENT)
    assert restored(body, stream=False) == changed.replace(b"%b", CLIENT)


@pytest.mark.parametrize("upstream", ["org/name", "é", "模型", "\U0001f600", 'q"\\'])
def test_a_name_is_recognised_in_every_spelling(upstream: str) -> None:
    plain = json.dumps(upstream, ensure_ascii=False)
    ascii_only = json.dumps(upstream)
    slashes = ascii_only.replace("/", "\\/")
    units = upstream.encode("utf-16-be")
    codes = (f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2))
    all_escaped = f'"{"".join(codes)}"'
    for spelling in (plain, ascii_only, slashes, all_escaped):
        for stream in (True, False):
            text = f'{{"model":{spelling}}}'
            body = f"data:{text}\n\n" if stream else text
            expected = body.replace(spelling, CLIENT.decode())
            assert restored(body.encode(), stream=stream, upstream=upstream) == expected.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"upstream connect error or disconnect/reset before headers",
        b'<html><body>"model":"up"</body></html>',
        b'{"model":"u',
        b'{"model"',
        b'{"a":"\\',
        b'{"error":{"message":"The model `up` does not exist","code":404}}',
        b"\xff\xfe\x00{",
        b"}{]" * 40,
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_C07_what_is_no_whole_answer_passes_unchanged(body: bytes, stream: bool) -> None:
    assert restored(body, stream=stream) == body


@pytest.mark.parametrize(
    "text",
    [
        b'data:{"model":"up"}\n\n',
        b'data: {"model":"up"}\r\n\r\n',
        b'data: {"model":"up"}\r\r',
        b'data: {"model":"up"}\n\r\n',
        b'data: {"model":"up"}',
        b'\xef\xbb\xbfdata: {"model":"up"}\n\n',
        b'\xef\xbb\xbf: hello\n\ndata: {"model":"up"}\n\n',
        b': "model":"no"\nevent: x\nid: 1\ndata: {"model":"up"}\n\n',
        b'data: {"a":1,\ndata: "model"\ndata:\ndata\ndata::\ndata: "up"}\n\n'.replace(
            b"data::", b"data: :"
        ),
        b'data: {"model":"up"}\n\ndata: {"model":"up"}\n\n',
        b'data: {"model":"up"}\ndata: \ndata: {"model":"no"}\n\n',
        b'data: {"model":"up","b":{"c":"\\"}"}}\n\ndata: [DONE]\n\n',
        b'data: {"response":{"model":"up","x":{"model":"no"}},"model":"up"}\n\n',
        b'data: {"message":{"model":"up"},"response":{"model":"up"}}\n\n',
        b'data: {"model":null,"message":{"a":{},"model":"up"}}\n\n',
        b'data: {"model":\ndata: "up"}\n\n\r\n\ndata: {"model":"up"}\n\n',
        b'event: x\ndata: {"a":1}\n\ndata: {"model":"up"}\n\n',
        b'data: {"model":"up","model":"up"}\n\n',
    ],
)
def test_C03_events_are_found_in_every_form_of_the_grammar(text: bytes) -> None:
    assert restored(text) == text.replace(b'"up"', CLIENT)


@pytest.mark.parametrize(
    "text",
    [
        b': {"model":"up"}\n\n',
        b'event: {"model":"up"}\n\n',
        b'dat: {"model":"up"}\n\n',
        b' data: {"model":"up"}\n\n',
        b'data: {"x":{"model":"up"}}\n\n',
        b'data: {"response":[{"model":"up"}]}\n\n',
        b'data: {"response":{"response":{"model":"up"}}}\n\n',
        b'data: {"message":"model","a":"up"}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"model\\":\\"up\\""}}]}\n\n',
        b'data: {"a":"\ndata: ","model":"up"}\n\n',
        b'data: {"model":"u\ndata: p"}\n\n',
        b'data: {"model":"u\ndata: "up"}\n\n',
        b'event: x\n\ndata: {}\n\n\xef\xbb\xbfdata: {"model":"up"}\n\n',
        b'data: [{"model":"up"}]\n\n',
        b'data: "model":"up"\n\n',
        b'data\n{"model":"up"}\n\n',
        b'\xef\xbb\xbf\xef\xbb\xbfdata: {"model":"up"}\n\n',
    ],
)
def test_C03_nothing_else_is_taken_for_an_events_model(text: bytes) -> None:
    assert restored(text) == text


def test_an_event_that_is_cut_by_the_end_of_one_event_does_not_spoil_the_next() -> None:
    text = b'data: {"a":{"b":"c\n\n' + EVENT
    assert restored(text) == text.replace(b'"up"', CLIENT)


def test_events_that_begin_alike_but_go_on_otherwise_are_told_apart() -> None:
    nested = EVENT.replace(b'"choices":[', b'"choices":[{"model":"up"},')
    inner = EVENT.replace(b'"choices":[', b'"response":{"model":"up"},"choices":[')
    longer = EVENT.replace(b'"up"', b'"up2"')
    unfinished = EVENT[:-1] + b'data: ,"model":"up"\n\n'
    for other in (nested, inner, longer, unfinished):
        body = EVENT + other + EVENT
        alone = restorer().feed(other, True)
        assert restored(body) == EVENT.replace(b'"up"', CLIENT) + alone + EVENT.replace(
            b'"up"', CLIENT
        )
    assert restored(nested) == nested.replace(b'"model":"up","', b'"model":%b,"' % CLIENT, 1)


def test_a_chunk_that_holds_nothing_to_change_is_passed_as_it_is() -> None:
    names = restorer()
    names.feed(EVENT, False)
    other = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert names.feed(other, False) is other
    assert names.feed(EVENT, False) == EVENT.replace(b'"up"', CLIENT)


def test_after_the_model_of_a_document_everything_is_passed_as_it_is() -> None:
    names = restorer(stream=False)
    assert names.feed(b'{"model":"up",', False) == b'{"model":"client-name",'
    rest = b'"choices":[]}'
    assert names.feed(rest, False) is rest


def test_only_what_is_undecided_is_kept_back() -> None:
    body = b'data: {"id":"a","text":"' + b"\\u0078" * 500 + b'","model":"up","b":[1]}\n\n'
    names = restorer()
    sent = 0
    for end, begin in pairwise(range(len(body), -1, -1)):
        at = len(body) - end
        sent += len(names.feed(body[at : at + end - begin], False))
        assert at + 1 - sent <= 20 or b'"model":"up"' in body[: at + 1]
    assert restored(body) == body.replace(b'"up"', CLIENT)


def test_a_name_that_stays_the_same_is_not_looked_for() -> None:
    names = ModelRestorer("up", "up", event_stream=True)
    assert names.feed(EVENT[:30], False) == EVENT[:30]


@pytest.mark.parametrize(
    ("upstream", "client", "changes"),
    [("ab", "cd", False), ("ab", "abc", True), ("ab", 'c"', True), ("a/", "bc", True)],
)
def test_it_says_whether_the_length_may_change(upstream: str, client: str, changes: bool) -> None:
    assert ModelRestorer(upstream, client, event_stream=False).changes_length is changes
