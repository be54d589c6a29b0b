"""A cost policy in a configuration: it stands alone, and picks by what it costs."""

from __future__ import annotations

from random import Random

import pytest

from epp.config import Plan, load_config, resolve
from epp.core.decide import Decider, PrefixKeeper
from epp.core.errors import ConfigError
from epp.core.inflight import Inflight
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import Forecast
from epp.core.pool import Members, Pool
from tests.unit.roundrates import LINEAR, Told, charged, prompt, spec

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def plan_of(*plugins: str, refs: tuple[str, ...] | None = None) -> Plan:
    text = HEAD + "plugins:\n" + "".join(f"- {plugin}\n" for plugin in plugins)
    if refs is not None:
        text += "schedulingProfiles:\n- name: default\n  plugins:\n"
        text += "".join(f"  - {{pluginRef: {ref}}}\n" for ref in refs)
    return resolve(load_config(text))


def decider_of(plan: Plan, count: int) -> Decider:
    pool = Pool(stale_after_s=1000.0)
    decider = Decider(
        pool=pool,
        profile=plan.profiles[0],
        inflight=Inflight(plan.inflight),
        prefix=None if plan.prefix is None else PrefixKeeper(plan.prefix),
        rng=Random(1),
        forecast=Forecast(Told(LINEAR)),
    )
    pool.apply(Members(tuple(spec(n) for n in range(count))), 0.0)
    for endpoint in pool.endpoints:
        endpoint.proven = True
    return decider


def test_it_is_configured_by_its_type_and_its_parameters_reach_the_profile() -> None:
    plan = plan_of("{type: expected-latency, parameters: {ownWeight: 2, chunkTokens: 4096}}")
    assert plan.profiles[0].cost == ExpectedLatency(own_weight=2.0, chunk_tokens=4096)
    assert plan.profiles[0].scorers == ()
    assert plan.prefix is not None, "it reads prefix matches"
    assert plan.notices == ()


@pytest.mark.parametrize("with_profile", [True, False])
@pytest.mark.parametrize(
    ("beside", "name"),
    [
        ("{type: queue-scorer}", "queue-scorer"),
        ("{type: prefix-cache-scorer, name: mine}", "mine"),
        ("{type: context-length-aware}", "context-length-aware"),
        ("{type: expected-latency, name: another}", "another"),
    ],
)
def test_nothing_else_scores_beside_it_and_the_error_says_what_to_remove(
    beside: str, name: str, *, with_profile: bool
) -> None:
    refs = ("expected-latency", name) if with_profile else None
    with pytest.raises(ConfigError) as caught:
        plan_of("{type: expected-latency}", beside, refs=refs)
    assert "`expected-latency` weighs everything itself" in str(caught.value)
    assert f"remove `{name}`, or `expected-latency`" in str(caught.value)


@pytest.mark.parametrize("picker", ["random-picker", "weighted-random-picker"])
def test_a_picker_by_chance_beside_it_is_refused(picker: str) -> None:
    with pytest.raises(ConfigError, match=f"remove `{picker}` or make it a `max-score-picker`"):
        plan_of("{type: expected-latency}", f"{{type: {picker}}}")


def test_it_chooses_among_what_filters_leave() -> None:
    plan = plan_of(
        "{type: expected-latency}",
        "{type: label-selector-filter, name: big, parameters: {matchLabels: {size: big}}}",
    )
    profile = plan.profiles[0]
    assert [f.name for f in profile.filters] == ["big"]
    assert profile.cost == ExpectedLatency()


def test_a_filter_that_could_score_too_only_filters_beside_it() -> None:
    filtering = "{type: context-length-aware, parameters: {enableFiltering: true}}"
    plan = plan_of("{type: expected-latency}", filtering)
    profile = plan.profiles[0]
    assert [f.name for f in profile.filters] == ["context-length-aware"]
    assert (profile.scorers, profile.cost) == ((), ExpectedLatency())


def test_a_sticky_filter_may_stand_before_it() -> None:
    plan = plan_of("{type: expected-latency}", "{type: prefix-cache-affinity-filter}")
    decider = decider_of(plan, 2)
    first = decider.decide(prompt("a", 640), subset=None, now_s=0.0)
    decider.learn(first)
    second = decider.decide(prompt("a", 640), subset=None, now_s=0.0)
    assert second.pick.candidates == [first.pick.endpoint]


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (3, 3), (9, 4)])
def test_fallbacks_come_in_order_of_cost(most: int, expected: int) -> None:
    plan = plan_of(
        "{type: expected-latency}",
        f"{{type: max-score-picker, parameters: {{maxNumOfEndpoints: {most}}}}}",
    )
    decider = decider_of(plan, 4)
    for endpoint, seconds in zip(decider.pool.endpoints, (0.3, 0.1, 0.4, 0.2), strict=True):
        charged(decider.inflight, endpoint, seconds, now_s=0.0)
    pick = decider.decide(prompt("a", 10), subset=None, now_s=0.0).pick
    order = [spec(n).address for n in (1, 3, 0, 2)]
    assert pick.destination == ",".join(order[:expected])


def test_scores_of_a_pick_by_cost_are_negated_so_that_the_greatest_wins() -> None:
    decider = decider_of(plan_of("{type: expected-latency}"), 3)
    charged(decider.inflight, decider.pool.endpoints[0], 0.5, now_s=0.0)
    pick = decider.decide(prompt("a", 10), subset=None, now_s=0.0).pick
    assert pick.by_cost
    assert list(pick.scores) == [-total for total in pick.totals]
    best = max(range(3), key=pick.scores.__getitem__)
    assert pick.totals[best] == min(pick.totals)
    scored = plan_of("{type: queue-scorer}")
    other = decider_of(scored, 2).decide(prompt("a", 10), subset=None, now_s=0.0).pick
    assert not other.by_cost
    assert other.scores == other.totals


def test_a_weight_on_it_has_no_effect_and_says_so() -> None:
    text = (
        HEAD + "plugins: [{type: expected-latency}]\nschedulingProfiles: "
        "[{name: a, plugins: [{pluginRef: expected-latency, weight: 3}]}]"
    )
    plan = resolve(load_config(text))
    assert any("`weight` has no effect" in notice for notice in plan.notices)


def test_subsets_of_the_gateway_narrow_the_choice() -> None:
    decider = decider_of(plan_of("{type: expected-latency}"), 3)
    dear = decider.pool.endpoints[2]
    charged(decider.inflight, dear, 9.0, now_s=0.0)
    pick = decider.decide(prompt("a", 10), subset=(dear.address,), now_s=0.0).pick
    assert pick.endpoint is dear
    assert len(pick.totals) == 1
