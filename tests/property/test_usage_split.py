"""Usage and event counts do not depend on where an answer is cut into chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from epp.core.model import Api, Usage
from epp.core.usage import UsageReader

DATA = Path(__file__).parents[1] / "unit" / "data" / "vllm"


def exchange(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())["response"]["body"]


STREAMS = {
    path.stem: exchange(path.stem).encode()
    for path in sorted(DATA.glob("*.json"))
    if isinstance(exchange(path.stem), str)
}
DOCUMENTS = {
    path.stem: json.dumps(exchange(path.stem), ensure_ascii=False).encode()
    for path in sorted(DATA.glob("*.json"))
    if not isinstance(exchange(path.stem), str)
}


def read(chunks: list[bytes], *, stream: bool = True) -> tuple[Usage, int]:
    reader = UsageReader(Api.CHAT, event_stream=stream)
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    return reader.usage, reader.events


def oracle(stream: bytes) -> tuple[Usage, int]:
    """Slow and plain, for streams without oddities: whole text, whole lines, plain JSON."""
    usage, events = Usage(), 0
    for block in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n\n"):
        data = [line[5:].strip() for line in block.split("\n") if line.startswith("data:")]
        if not data or data == ["[DONE]"]:
            continue
        events += 1
        body = json.loads("\n".join(data))
        inner = body.get("message") or {}
        if body.get("type") == "response.completed":
            inner = body["response"]
        found = body.get("usage") or inner.get("usage") or {}
        details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", found.get("cache_read_input_tokens"))
        for field, value in (
            ("prompt_tokens", found.get("prompt_tokens", found.get("input_tokens"))),
            ("completion_tokens", found.get("completion_tokens", found.get("output_tokens"))),
            ("cached_tokens", cached),
        ):
            if value is not None:
                setattr(usage, field, value)
    return usage, events


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("name", STREAMS)
def test_C02_a_stream_cut_in_two_at_every_byte_reads_the_same(name: str, line_end: bytes) -> None:
    stream = STREAMS[name].replace(b"\n", line_end).replace(b"data: ", b"data:")
    expected = oracle(stream)
    assert expected[1] > 5
    for at in range(len(stream) + 1):
        assert read([stream[:at], stream[at:]]) == expected, at


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_cut_in_two_at_every_byte_reads_the_same(name: str) -> None:
    body = DOCUMENTS[name]
    expected = read([body], stream=False)
    for at in range(len(body) + 1):
        assert read([body[:at], body[at:]], stream=False) == expected, at


fragments = st.sampled_from(
    [
        *(b"data: ", b"data:", b"data", b": c", b"event: x", b"\n", b"\r", b"\r\n", b"\n\n"),
        *(b'{"usage":{"prompt_tokens":1}}', b'{"usage":{"output_tokens":2}}', b'{"usage"', b":"),
        *(b'{"prompt_tokens":3}}', b"[DONE]", b"\xef\xbb\xbf", b"\xc3", b"\xa9", b" ", b"x"),
    ]
)


@given(parts=st.lists(fragments, max_size=25), data=st.data())
def test_any_bytes_cut_anywhere_read_the_same(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    expected = read([stream])
    assert read(chunks) == expected
    assert read([stream[at : at + 1] for at in range(len(stream))]) == expected


@given(chunks=st.lists(st.binary(max_size=40), max_size=8), stream=st.booleans())
def test_no_bytes_raise(chunks: list[bytes], stream: bool) -> None:
    read(chunks, stream=stream)
