"""Label selectors: what each form selects, what is refused and how, and that text is read back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from epp.core.selectors import Selector, SelectorError, parse_selector

NOTHING: dict[str, str] = {}


@pytest.mark.parametrize(
    ("text", "selected", "left_out"),
    [
        ("app=vllm", [{"app": "vllm", "x": "y"}], [NOTHING, {"app": "sglang"}, {"x": "vllm"}]),
        ("app==vllm", [{"app": "vllm"}], [NOTHING, {"app": ""}]),
        ("app!=vllm", [NOTHING, {"app": "sglang"}], [{"app": "vllm"}]),
        ("app in (a,b)", [{"app": "a"}, {"app": "b"}], [NOTHING, {"app": "c"}]),
        ("app notin (a,b)", [NOTHING, {"app": "c"}], [{"app": "a"}, {"app": "b"}]),
        ("app", [{"app": ""}, {"app": "a"}], [NOTHING, {"apps": "a"}]),
        ("!app", [NOTHING, {"apps": "a"}], [{"app": ""}, {"app": "a"}]),
        ("app=", [{"app": ""}], [NOTHING, {"app": "a"}]),
        ("app in (,a)", [{"app": ""}, {"app": "a"}], [NOTHING, {"app": "b"}]),
        ("app notin ()", [NOTHING, {"app": "a"}], [{"app": ""}]),
        ("app=a,tier!=x", [{"app": "a"}, {"app": "a", "tier": "y"}], [{"app": "a", "tier": "x"}]),
        ("app=a,app=b", [], [{"app": "a"}, {"app": "b"}]),
        ("app=a,app=a", [{"app": "a"}], [{"app": "b"}]),
        ("", [NOTHING, {"app": "a"}], []),
        (" \t", [NOTHING], []),
        ("llm-d.ai/role in (decode, both)", [{"llm-d.ai/role": "both"}], [{"role": "both"}]),
        # A keyword is a keyword only where an operator may stand.
        ("in in (in,notin)", [{"in": "in"}, {"in": "notin"}], [{"in": "x"}]),
        ("notin=in", [{"notin": "in"}], [{"notin": "notin"}]),
    ],
)
def test_each_form_selects_what_kubernetes_says(
    text: str, selected: list[dict[str, str]], left_out: list[dict[str, str]]
) -> None:
    selector = parse_selector(text)
    assert [selector.matches(labels) for labels in selected] == [True] * len(selected)
    assert [selector.matches(labels) for labels in left_out] == [False] * len(left_out)
    assert parse_selector(str(selector)) == selector


def test_blanks_between_words_do_not_count() -> None:
    assert parse_selector(" a = b ,\tc  notin( x ,y ),! d ") == parse_selector(
        "a=b,c notin (x,y),!d"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("app in vllm", "found 'vllm' at character 8 of selector 'app in vllm', expected '('"),
        ("app in (a", "found the end at character 10 of selector 'app in (a', expected ',' or ')'"),
        ("a=b,", "found the end at character 5 of selector 'a=b,', expected a requirement"),
        (",a=b", "found ',' at character 1 of selector ',a=b', expected a label key"),
        ("a=b c=d", "found 'c' at character 5 of selector 'a=b c=d', expected ','"),
        ("a>1", "found '>' at character 2 of selector 'a>1', expected '=', '==', '!=', 'in', "),
        ("!a=b", "found '=' at character 3 of selector '!a=b', expected ','"),
        ("!", "found the end at character 2 of selector '!', expected a label key"),
        ("a=-b", "found '-b' at character 3 of selector 'a=-b', expected a label value"),
        (f"a={'b' * 64}", "expected a label value: at most 63"),
        (f"{'b' * 64}=a", "expected a label key"),
        (f"{'b' * 254}/x=a", "expected a label key"),
        ("A.b/c=d", "found 'A.b/c' at character 1"),
        ("/c=d", "expected a label key"),
        ("a/b/c=d", "expected a label key"),
        ("a/=d", "expected a label key"),
        ("ключ=a", "expected a label key"),
        ("app is vllm", "found 'is' at character 5 of selector 'app is vllm', expected '='"),
        ("a in (b))", "found ')' at character 9 of selector 'a in (b))', expected ','"),
    ],
)
def test_what_is_no_selector_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SelectorError) as caught:
        parse_selector(text)
    assert message in str(caught.value)


def test_match_labels_are_equalities_all_of_which_must_hold() -> None:
    selector = Selector({"app": "vllm", "model": "m"})
    assert selector.matches({"app": "vllm", "model": "m", "more": "x"})
    assert not selector.matches({"app": "vllm"})
    assert str(selector) == "app=vllm,model=m"


@given(st.text(alphabet="ab =!(),inot<>/-.\n", max_size=30))
def test_any_text_is_read_or_refused_and_what_was_read_reads_back(text: str) -> None:
    try:
        selector = parse_selector(text)
    except SelectorError:
        return
    again = parse_selector(str(selector))
    assert str(again) == str(selector)
    for labels in ({}, {"a": ""}, {"a": "b"}, {"b": "a", "a": "a"}, {"in": "a"}, {"not": ""}):
        assert again.matches(labels) == selector.matches(labels)
