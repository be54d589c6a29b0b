"""Which rule decides, and how its targets share requests out."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from epp.core.rewrite import RewriteRule, Rewrites, RewriteTarget

Shares = dict[str, int | None]


def rule(name: str, *models: str, to: Shares | None = None, index: int = 0) -> RewriteRule:
    targets = tuple(RewriteTarget(model, weight) for model, weight in (to or {}).items())
    return RewriteRule(name=name, models=frozenset(models), targets=targets, index=index)


def chosen(*rules: RewriteRule, model: str = "m", seed: int = 1) -> tuple[str, str] | None:
    return Rewrites(rules).choose(model, Random(seed))


def drawn(shares: Shares, count: int, seed: int = 1) -> Counter[str]:
    rewrites, rng = Rewrites((rule("r", to=shares),)), Random(seed)
    return Counter(found[1] for _ in range(count) if (found := rewrites.choose("m", rng)))


def test_an_exact_rule_beats_a_generic_one_that_comes_first() -> None:
    rules = rule("old", to={"any": 1}), rule("young", "m", "n", to={"exact": 1})
    assert chosen(*rules) == ("young", "exact")
    assert chosen(*rules, model="n") == ("young", "exact")
    assert chosen(*rules, model="other") == ("old", "any")


def test_among_equals_the_first_rule_decides_and_no_other_is_asked() -> None:
    assert chosen(rule("a", "m", to={"x": 1}), rule("b", "m", to={"y": 1})) == ("a", "x")
    assert chosen(rule("a", to={"x": 1}), rule("b", to={"y": 1})) == ("a", "x")
    first, second = rule("a", "m", to={"x": 1}), rule("a", "m", to={"y": 1}, index=1)
    assert chosen(first, second) == ("a", "x")


def test_a_target_is_not_looked_up_again() -> None:
    rules = rule("a", "m", to={"n": 1}), rule("b", "n", to={"o": 1})
    assert chosen(*rules) == ("a", "n")


def test_a_rule_for_another_model_changes_nothing() -> None:
    assert chosen(rule("a", "n", to={"x": 1})) is None
    assert chosen() is None
    assert chosen(rule("a", "M", to={"x": 1})) is None


def test_B06_a_request_that_names_no_model_is_for_the_generic_rule() -> None:
    rules = rule("exact", "m", to={"x": 1}), rule("any", to={"y": 1})
    assert chosen(*rules, model="") == ("any", "y")


@pytest.mark.parametrize("targets", [{}, {"": 1}])
def test_a_rule_without_a_target_leaves_the_model_and_hides_later_rules(targets: Shares) -> None:
    assert chosen(rule("a", "m", to=targets), rule("b", to={"y": 1})) is None


def test_a_share_of_the_requests_can_keep_its_model() -> None:
    assert drawn({"": 1, "x": 1}, 1000)["x"] in range(400, 600)


def test_without_any_weight_all_targets_have_the_same_share() -> None:
    counts = drawn({"a": None, "b": None, "c": None}, 3000)
    assert all(count in range(850, 1150) for count in counts.values())
    assert len(counts) == 3


def test_a_target_without_a_weight_is_never_chosen_beside_one_that_has_one() -> None:
    assert drawn({"a": None, "b": 100}, 500) == {"b": 500}
    assert drawn({"a": None, "b": 1, "c": 1}, 500).keys() == {"b", "c"}


def test_K06_weight_zero_is_never_chosen_and_all_zero_is_the_same_share() -> None:
    assert drawn({"a": 0, "b": 1}, 500) == {"b": 500}
    assert drawn({"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}, 500).keys() == {"b", "d"}
    assert all(count > 400 for count in drawn({"a": 0, "b": 0}, 1000).values())
    assert drawn({"a": 0, "b": None}, 1000).keys() == {"a", "b"}


def test_rules_are_true_when_there_are_any() -> None:
    assert not Rewrites(())
    assert Rewrites((rule("a"),))


@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 999),
)
def test_shares_converge_to_the_weights(weights: list[int], seed: int) -> None:
    names = [f"m{number}" for number in range(len(weights))]
    counts = drawn(dict(zip(names, weights, strict=True)), 2000, seed)
    for name, weight in zip(names, weights, strict=True):
        # Five standard deviations at most: 2000 draws have one of 0.0112 or less.
        assert abs(counts[name] / 2000 - weight / sum(weights)) < 0.056


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 999))
def test_what_is_drawn_does_not_depend_on_rules_that_do_not_decide(
    data: st.DataObject, seed: int
) -> None:
    deciding = rule("r", "m", to={"a": 1, "b": 2, "c": None})
    others = data.draw(
        st.lists(
            st.builds(
                lambda models, target: rule("o", *models, to={target: 1}),
                st.lists(st.sampled_from(["n", "o", ""]), max_size=2),
                st.sampled_from(["x", "y"]),
            ),
            max_size=4,
        )
    )
    at = data.draw(st.integers(0, len(others)))
    alone, among = Random(seed), Random(seed)
    few, many = Rewrites((deciding,)), Rewrites((*others[:at], deciding, *others[at:]))
    draws = range(20)
    assert [few.choose("m", alone) for _ in draws] == [many.choose("m", among) for _ in draws]
