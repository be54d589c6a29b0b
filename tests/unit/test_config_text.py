"""YAML text to plain values: what is read, what is refused, what is bounded."""

from __future__ import annotations

import pytest
import yaml

from epp.config import text as config_text
from epp.config.text import DEPTH_MAX, TEXT_BYTES_MAX, VALUES_MAX, read_yaml, write_yaml
from epp.core.errors import ConfigError


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of PyYAML's parsers: an installation may lack the compiled one."""
    if request.param == "python":
        monkeypatch.setattr(config_text, "_LOADER", yaml.SafeLoader)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: true\nb: false", {"a": True, "b": False}),
        ("a: yes\nb: on\nc: True\nd: n", {"a": "yes", "b": "on", "c": "True", "d": "n"}),
        ("a: 7\nb: -7\nc: 1.5\nd: 1e3\ne: .5", {"a": 7, "b": -7, "c": 1.5, "d": 1e3, "e": 0.5}),
        ("a: 007\nb: 1_000\nc: 0x1F", {"a": "007", "b": "1_000", "c": "0x1F"}),
        ("a: 1:30\nb: 2024-01-01", {"a": "1:30", "b": "2024-01-01"}),
        ("a: .inf\nb: .nan", {"a": ".inf", "b": ".nan"}),
        ("a:\nb: null\nc: ~\nd: ''", {"a": None, "b": None, "c": None, "d": ""}),
        ('a: "7"\nb: !!str 7', {"a": "7", "b": "7"}),
        ("1: x\ntrue: y", {"1": "x", "true": "y"}),
        ('{"a": [1, {"b": []}]}', {"a": [1, {"b": []}]}),
        (
            "a: &x {k: v}\nb: *x\nc: &y z\nd: *y",
            {"a": {"k": "v"}, "b": {"k": "v"}, "c": "z", "d": "z"},
        ),
        ("a: {b: {c: 1}, d: 2}", {"a": {"b": {"c": 1}, "d": 2}}),
        ("- - 1\n  - 2\n- 3", [[1, 2], 3]),
        ("", None),
        ("# only a comment\n", None),
    ],
)
def test_values_are_read_by_the_strict_core_of_yaml(text: str, value: object) -> None:
    assert read_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("a: 1\nb: 2\na: 3", "$.a", "the key `a` stands twice in one mapping: keep one (line 3"),
        ("x:\n- {}\n- b:\n    c: 1\n    c: 2", "$.x[1].b.c", "stands twice"),
        ("a: {b: 1}\na: {}", "$.a", "stands twice"),
        ('"a b":\n  c: 1\n  c: 1', '$["a b"].c', "stands twice"),
        ("- 1\n- 2\n- 1e999", "$[2]", "1e999 is too large"),
        ("a: 1234567890123456789", "$.a", "more than 18 digits"),
        ("a: 1\n---\nb: 2", "$", "a second document"),
        ("a: &x [*x]", "$.a[0]", "no complete anchor"),
        ("a: *x", "$.a", "x"),
        ("<<: {a: 1}", "$", "merge keys"),
        ("a: !!python/object:os.system ls", "$.a", "not supported"),
        ("a: !x {b: 1}", "$.a", "not supported"),
        ("? [a]\n: b", "$", "a key must be text"),
        ("a: [1", "$", "not valid YAML"),
        ("a:\n\t- 1", "$", "not valid YAML"),
        ("a: b: c", "$", "not valid YAML"),
        ("a: \x00", "$", "not valid YAML"),
        ("a: \ud800", "$", "UTF-8"),
        ("a: x\u00a0y", "$.a", "the invisible character U+00A0: remove it (line 1, column 4)"),
        ("a\u200b: 1", "$", "the invisible character U+200B"),
        ('a: ["b", "c\\n"]', "$.a[1]", "the invisible character U+000A"),
        ("a: " + "x" * 5000, "$.a", "longer than 4096 characters"),
    ],
)
def test_everything_else_is_an_error_with_its_path_and_what_to_do(
    text: str, path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text)
    assert words in str(caught.value)
    if "not valid YAML" not in str(caught.value):
        assert caught.value.path == path


def test_a_syntax_error_says_the_line() -> None:
    with pytest.raises(ConfigError, match=r"line 4, column 2"):
        read_yaml("a: 1\nb:\n  - c\n d: e")


def test_an_alias_bomb_is_refused_before_it_is_expanded() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError, match=f"more than {VALUES_MAX} values"):
        read_yaml("\n".join(levels))


def test_depth_is_bounded_without_recursion() -> None:
    assert read_yaml("[" * DEPTH_MAX + "]" * DEPTH_MAX) is not None
    for text in (
        "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1),
        "[" * 500_000,
        "{a: " * 100_000,
        "- " * 100_000,
    ):
        with pytest.raises(ConfigError):
            read_yaml(text)


def test_N07_a_file_beyond_a_mebibyte_is_refused_by_size() -> None:
    with pytest.raises(ConfigError, match="1048577 bytes, more than 1048576"):
        read_yaml("#" * (TEXT_BYTES_MAX + 1))
    assert read_yaml("#" * TEXT_BYTES_MAX) is None


def test_the_number_of_values_is_bounded() -> None:
    with pytest.raises(ConfigError, match=f"more than {VALUES_MAX} values"):
        read_yaml("[" + "1," * VALUES_MAX + "]")


@pytest.mark.parametrize(
    "value",
    [
        "yes",
        "true",
        "1e3",
        "7",
        "007",
        "",
        "null",
        "~",
        " a ",
        "a: b",
        "#",
        "é",
        "1:30",
        "-",
    ],
)
def test_a_written_text_is_read_back_as_text(value: str) -> None:
    assert read_yaml(write_yaml({"k": value, value: [value]})) == {"k": value, value: [value]}
