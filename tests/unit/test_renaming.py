"""A request for another model: only the bytes of the model's name change."""

from __future__ import annotations

import json

import pytest

from epp.core.parse import parse_request
from epp.core.renaming import renamed

TOOL = b'{"name":"ask","parameters":{"properties":{"model":{"type":"string"}}}}'


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"model":"m","prompt":"p"}', b'{"model":"T","prompt":"p"}'),
        (b'{"prompt":"p","model":"m"}', b'{"prompt":"p","model":"T"}'),
        (b'\n {\t"model" :\r\n "m" , "a": 1.0e5 }\n', b'\n {\t"model" :\r\n "T" , "a": 1.0e5 }\n'),
        (b'{"model":"m\\"\\\\","a":1}', b'{"model":"T","a":1}'),
        (b'{"model":"\\u006d\xc3\xa9"}', b'{"model":"T"}'),
        (
            b'{"n":12345678901234567890123,"model":"m"}',
            b'{"n":12345678901234567890123,"model":"T"}',
        ),
    ],
)
def test_everything_but_the_name_stays_byte_for_byte(body: bytes, changed: bytes) -> None:
    assert renamed(body, "T") == changed


@pytest.mark.parametrize(
    "body",
    [
        b'{"tools":[%b],"model":"m"}' % TOOL,
        b'{"model":"m","tools":[%b,%b]}' % (TOOL, TOOL),
        b'{"a":[{"model":"x"}],"model":"m","b":{"model":"y"}}',
        b'{"prompt":"say \\"model\\":\\"m\\"","model":"m"}',
        b'{"say \\"model":"m","model":"m","\\\\":"model"}',
        b'{"prompt":"model","model":"m","user":"model"}',
        b'{"a":[%b],"model":"m"}' % b",".join([TOOL] * 30),
    ],
)
def test_text_that_only_looks_like_the_model_stays(body: bytes) -> None:
    changed = renamed(body, "T")
    assert changed is not None
    assert json.loads(changed) == {**json.loads(body), "model": "T"}
    assert len(changed) == len(body)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"model":"a","model":"b"}', b'{"model":"T","model":"T"}'),
        (b'{"model":"a","x":1,"mod\\u0065l":"b"}', b'{"model":"T","x":1,"mod\\u0065l":"T"}'),
        (b'{"\\u006dodel":"a","model":"b"}', b'{"\\u006dodel":"T","model":"T"}'),
        (
            b'{"model":"T","model":"T", "model":{"model":1}}',
            b'{"model":"T","model":"T", "model":"T"}',
        ),
    ],
)
def test_B07_no_reader_of_a_body_that_names_several_models_sees_an_old_one(
    body: bytes, changed: bytes
) -> None:
    assert renamed(body, "T") == changed


@pytest.mark.parametrize(
    "value", [b"7", b"null", b"true", b"-1.5e3", b'""', b"[1,[2]]", b'{"a":"}"}']
)
def test_B06_a_model_that_is_no_name_is_replaced(value: bytes) -> None:
    assert renamed(b'{"model":%b,"a":1}' % value, "T") == b'{"model":"T","a":1}'


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"prompt":"p"}', b'{"model":"T","prompt":"p"}'),
        (b' { "prompt":"p"}', b' {"model":"T", "prompt":"p"}'),
        (b"{}", b'{"model":"T"}'),
        (b" { } ", b' {"model":"T" } '),
        (b'{"a":{"model":"x"}}', b'{"model":"T","a":{"model":"x"}}'),
        (b'{"a":NaN}', b'{"model":"T","a":NaN}'),
    ],
)
def test_B06_a_body_without_a_model_gets_one_as_its_first_member(
    body: bytes, changed: bytes
) -> None:
    assert renamed(body, "T") == changed


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"a":NaN,"model":"m"}', b'{"a":NaN,"model":"T"}'),
        (b'{"a":"\\ud83d","model":"m"}', b'{"a":"\\ud83d","model":"T"}'),
        (b'{"a":"\xed\xa0\xbd","model":"\\ud83d"}', b'{"a":"\xed\xa0\xbd","model":"T"}'),
        (b'\xef\xbb\xbf{"model":"m"}', b'\xef\xbb\xbf{"model":"T"}'),
        (b'\xef\xbb\xbf {"a":1}', b'\xef\xbb\xbf {"model":"T","a":1}'),
    ],
)
def test_a_body_that_only_pythons_parser_reads_is_changed_as_well(
    body: bytes, changed: bytes
) -> None:
    assert renamed(body, "T") == changed
    assert parse_request({":path": "/v1/embeddings"}, changed).model == "T"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b'[{"model":"m"}]',
        b'"model"',
        b"null",
        b"{}{",
        b'{"model":"m"',
        b'{"model":"m"}}',
        b'{"model":"m",}',
        b'{"model" "m"}',
        b'{"model":"m","a":tru}',
        b'{"model":"m\n"}',
        b'{"model":"\\q"}',
        b'{"model":-}',
        b'{"model":"m"} x',
        b'{1:2,"model":"m"}',
        b"[" * 3000 + b"]" * 3000,
        b'{"a":' + b"[" * 3000 + b"]" * 3000 + b',"model":"m"}',
        b"\x1f\x8b\x08\x00model",
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-32"),
    ],
)
def test_what_is_no_json_object_in_utf8_cannot_be_changed(body: bytes) -> None:
    assert renamed(body, "T") is None


def test_an_unusual_body_that_is_too_large_for_the_slow_way_cannot_be_changed() -> None:
    many = b'{"a":NaN,"b":[' + b"1," * 100_001 + b'1],"model":"m"}'
    long = b'{"a":NaN,"b":"' + b"x" * (4 << 20) + b'","model":"m"}'
    assert renamed(many, "T") is None
    assert renamed(long, "T") is None


@pytest.mark.parametrize("name", ["a/b", 'q"\\', "é", "模型", "\U0001f600", "\x00\n", "\ud83d"])
def test_any_name_can_be_written(name: str) -> None:
    changed = renamed('{"model":"ü","prompt":"ü"}'.encode(), name)
    assert changed is not None
    assert json.loads(changed) == {"model": name, "prompt": "ü"}


def test_a_large_body_whose_tools_have_a_model_of_their_own_is_renamed_too() -> None:
    tool = {"type": "function", "parameters": {"properties": {"model": {"type": "string"}}}}
    code = "f(a, b, [c], {d});\n" * 60_000
    fields = {"messages": [{"role": "user", "content": code}], "model": "m", "tools": [tool] * 12}
    body = json.dumps(fields).encode()
    assert len(body) > 1_000_000
    assert renamed(body, "other") == body.replace(b'"model": "m"', b'"model": "other"')
