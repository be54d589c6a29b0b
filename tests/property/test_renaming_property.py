"""Renaming against texts that are built in two versions, with the old name and with the new one.

What has to come out is known to the byte, because the text was composed so, not because it was
parsed; Python's parser and the request parser are asked what they make of it besides.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given, settings, strategies as st

from epp.core.parse import parse_request
from epp.core.renaming import ModelRestorer, renamed

Pair = tuple[str, str]
"""The same text before and after."""

OLD, NEW = "models/old\u00e9", 'new "name"'
NEW_TEXT = json.dumps(NEW)
SPELLINGS = [json.dumps(OLD), json.dumps(OLD, ensure_ascii=False), '"models\\/old\\u00E9"']
KEYS = [
    "model",
    "message",
    "response",
    "id",
    "mode",
    "models",
    "",
    "\\",
    '"model":',
    "a" * 40,
    "\u00e9",
]
ESCAPED_KEYS = ['"mod\\u0065l"', '"\\u006D\\u006fdel"']

blanks = st.sampled_from(["", "", "", " ", "\n", " \r\n\t"])
scalars = st.one_of(
    st.integers().map(str),
    st.sampled_from(["null", "true", "-1.5e-3", '"model"', '"\\\\"', '"\\"model\\":\\"x\\""']),
    st.text(max_size=6).map(json.dumps),
    st.sampled_from([json.dumps("long " * 30), *SPELLINGS]),
)
plain_keys = st.sampled_from(KEYS).map(json.dumps)


def joined(open_sign: str, parts: list[str], close_sign: str) -> str:
    return f"{open_sign}{','.join(parts)}{close_sign}"


nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: joined("[", parts, "]"))
        | st.lists(
            st.tuples(plain_keys, blanks, inner).map(lambda part: f"{part[0]}{part[1]}:{part[2]}"),
            max_size=4,
        ).map(lambda parts: joined("{", parts, "}"))
    ),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> Pair:
    """A body that Python's parser reads; its members in any order and repetition."""
    keys = plain_keys | st.sampled_from([*ESCAPED_KEYS, '"model"', '"model"'])
    unusual = st.sampled_from(["NaN", "-Infinity", '"\\ud83d"'])
    values = nested | unusual if draw(st.booleans()) else nested
    before, after, names = [], [], 0
    for key, value in draw(st.lists(st.tuples(keys, values), max_size=6)):
        gaps = [draw(blanks) for _ in range(4)]
        is_model = json.loads(key) == "model"
        names += is_model
        form = f"{gaps[0]}{key}{gaps[1]}:{gaps[2]}%s{gaps[3]}"
        before.append(form.replace("%s", value))
        after.append(form.replace("%s", NEW_TEXT if is_model else value))
    start, end, inside = draw(blanks), draw(blanks), "" if before else draw(blanks)
    if names == 0:
        after[:0] = [f'"model":{NEW_TEXT}']
    return (
        f"{start}{{{','.join(before)}{inside}}}{end}",
        f"{start}{{{','.join(after)}{inside}}}{end}",
    )


@settings(max_examples=120)
@given(requests(), st.booleans())
def test_a_request_is_renamed_to_the_byte_and_read_so_by_all(body: Pair, mark: bool) -> None:
    before, after = (("\ufeff" if mark else "") + text for text in body)
    changed = renamed(before.encode(), NEW)
    assert changed == after.encode()
    assert renamed(changed, NEW) == changed
    headers = {":path": "/v1/embeddings"}
    old = parse_request(headers, before.encode(), model_optional=True)
    new = parse_request(headers, changed)
    assert new.model == NEW
    assert (new.stream, new.prompts, new.prompt_tokens) == (
        old.stream,
        old.prompts,
        old.prompt_tokens,
    )
    models = [value for key, value in pairs_of(changed) if key == "model"]
    assert set(models) == {NEW}


def pairs_of(body: bytes) -> list[tuple[str, Any]]:
    """The members of the outermost object, repeated ones too."""
    found: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found[:] = pairs  # the outermost object is complete last
        return dict(pairs)

    json.loads(body, object_pairs_hook=keep)
    return found


texts_like_json = st.lists(
    st.sampled_from(
        [*'{}[]:,"\\ \n', '"model"', '"model":', '"old"', "1", "NaN", '{"model":"x"}', '"model":"']
    )
    | st.text(max_size=3),
    max_size=12,
).map("".join)


@settings(max_examples=200)
@given(texts_like_json)
def test_any_text_is_renamed_exactly_if_it_is_an_object(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    changed = renamed(body, NEW)
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        assert changed is not None
        assert repr(json.loads(changed)) == repr(
            {**value, "model": NEW} if "model" in value else {"model": NEW, **value}
        )
    else:
        assert changed is None


@st.composite
def objects(draw: st.DrawFn, *, outermost: bool = True, once: bool = False) -> Pair:
    """An object of an answer; with `once` only its first `model` counts."""
    parts: list[Pair] = []
    decided = False
    for key in draw(st.lists(plain_keys | st.just('"model"'), max_size=5)):
        gaps = [draw(blanks) for _ in range(4)]
        is_inner = outermost and not once and key in ('"message"', '"response"')
        value: Pair
        if is_inner and draw(st.booleans()):
            value = draw(objects(outermost=False))
        elif key == '"model"' and draw(st.booleans()):
            spelled = draw(st.sampled_from(SPELLINGS))
            value = (spelled, spelled if decided else NEW_TEXT)
        else:
            text = draw(
                nested.filter(lambda text: not text.startswith("{")) if is_inner else nested
            )
            value = (text, text)
            if key == '"model"' and not decided and text in SPELLINGS:
                value = (text, NEW_TEXT)
        decided = decided or (once and key == '"model"')
        parts.append(
            (
                f"{gaps[0]}{key}{gaps[1]}:{gaps[2]}{value[0]}{gaps[3]}",
                f"{gaps[0]}{key}{gaps[1]}:{gaps[2]}{value[1]}{gaps[3]}",
            )
        )
    before, after = ([part[side] for part in parts] for side in (0, 1))
    return joined("{", before, "}"), joined("{", after, "}")


@st.composite
def streams(draw: st.DrawFn) -> Pair:
    """Events in one form of the grammar, some of which hold the name, some again."""
    line_end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    start = draw(st.sampled_from(["data:", "data: "]))
    other = st.sampled_from(
        [
            ": comment",
            'event: {"model":' + SPELLINGS[0] + "}",
            "data",
            "id",
            f"{start}[DONE]",
            "",
            "\ufeff" + start + '{"model":' + SPELLINGS[0] + "}",
        ]
    )
    drawn = draw(st.lists(objects() | other.map(lambda line: (line, line)), max_size=5))
    drawn += draw(st.lists(st.sampled_from(drawn), max_size=4)) if drawn else []
    sides: list[str] = []
    for side in (0, 1):
        text = ""
        for event in drawn:
            lines = event[side].replace("\r\n", "\n").split("\n")
            prefix = start if event[side].startswith("{") else ""
            text += "".join(f"{prefix}{line}{line_end}" for line in lines) + line_end
        sides.append(text)
    mark = draw(st.sampled_from(["", "\ufeff"]))
    if not mark and sides[0].startswith("\ufeff"):
        mark = "\ufeff"  # a second mark is no mark
    return mark + sides[0], mark + sides[1]


def restored(data: st.DataObject, body: bytes, stream: bool) -> bytes:
    """What the client gets for an answer in pieces, which is checked to be the same however it is
    cut, and not to lag behind."""
    whole = ModelRestorer(OLD, NEW, event_stream=stream).feed(body, True)
    some = data.draw(st.sets(st.integers(0, len(body)), max_size=4))
    events = {found.end() for found in re.finditer(rb"\n\n|\r\n\r\n", body)}
    for cuts in (sorted(some), sorted(some | events), range(len(body))):
        restorer = ModelRestorer(OLD, NEW, event_stream=stream)
        pieces = [
            restorer.feed(body[start:end], False)
            for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        ]
        last = restorer.feed(b"", True)
        assert len(last) <= max(20, 6 * len(OLD) + 2)
        assert b"".join((*pieces, last)) == whole
    return whole


@settings(max_examples=100, deadline=None)
@given(st.data(), streams())
def test_C02_a_stream_is_restored_to_the_byte_however_it_is_cut(
    data: st.DataObject, body: Pair
) -> None:
    assert restored(data, body[0].encode(), stream=True).decode() == body[1]


@settings(max_examples=80, deadline=None)
@given(st.data(), objects(once=True), blanks)
def test_a_document_is_restored_to_the_byte_however_it_is_cut(
    data: st.DataObject, body: Pair, blank: str
) -> None:
    before, after = (blank + text for text in body)
    assert restored(data, before.encode(), stream=False).decode() == after


rubbish = st.lists(
    st.sampled_from([b"data:", b"data", b"\n", b"\n\n", b"\r", b"{", b"}", b"[", b'"', b"\\", b":"])
    | st.sampled_from(
        [b'"model"', b'{"model":', SPELLINGS[0].encode(), b",", b" ", b"\xef\xbb\xbf"]
    )
    | st.sampled_from([b'data: {"model":' + SPELLINGS[0].encode() + b"}\n\n", b'"message":{'])
    | st.binary(max_size=3),
    max_size=14,
).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(st.data(), rubbish, st.booleans())
def test_C07_of_any_bytes_nothing_but_the_name_is_ever_changed(
    data: st.DataObject, body: bytes, stream: bool
) -> None:
    made = restored(data, body, stream)
    new = NEW_TEXT.encode()
    assert made.replace(new, SPELLINGS[0].encode()) == body.replace(new, SPELLINGS[0].encode())
