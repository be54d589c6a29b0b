"""Where a decision went wrong is told from what was wrong: one thing planted at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from bench.engine.cost import CostModel
from bench.sim.cluster import Conditions, Fleet, PolicyContext, Run, simulate
from bench.sim.command import known_policies
from bench.sim.experiments import SITUATIONS, Cell, Setup, conditions_of, fleet_of
from bench.sim.hardware import EngineKind
from bench.sim.model import Policy, SimRequest, Workload
from bench.sim.ours import Ours, from_config
from bench.sim.regret import (
    CAUSES,
    Judgement,
    Regret,
    RegretFigures,
    averaged_regret,
    regret_figures,
    regret_of,
)
from bench.sim.workloads import WORKLOADS

BLOCK = 100
KIND = EngineKind(
    name="small",
    cost=CostModel(
        step_base_s=0.01,
        prefill_token_s=1e-4,
        attention_pair_s=0.0,
        decode_sequence_s=0.0,
        decode_kv_token_s=0.0,
    ),
    kv_tokens=1000 * BLOCK,
    max_num_batched_tokens=1000,
    source="round figures: a tenth of a second a thousand tokens, and 10 ms a step of a thousand",
)
QUEUES_ONLY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: running-requests-size-scorer}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: running-requests-size-scorer}]
"""
PREFIX_ABOVE_ALL = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: expected-latency, parameters: {ownWeight: 100, waitingWeight: 0}}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: expected-latency}]
"""


def asked(number: int, at_s: float, blocks: int, *, text: int) -> SimRequest:
    return SimRequest(
        number=number,
        arrival_s=at_s,
        prompt_tokens=blocks * BLOCK + 1,
        output_tokens=1,
        blocks=tuple(1000 * text + at for at in range(blocks)),
    )


def run(
    requests: Sequence[SimRequest],
    make: Callable[[PolicyContext], Policy],
    *,
    kv_blocks: int = 1000,
    speeds: Sequence[float] = (1.0,),
    seed: int = 1,
    **conditions: object,
) -> Run:
    fleet = Fleet.of(KIND, 2, kv_blocks=kv_blocks, block_tokens=BLOCK, speeds=speeds)
    given = Conditions(**{"regret_every": 1, "scrape_s": None, **conditions})
    return simulate(Workload("planted", tuple(requests), BLOCK), fleet, given, make, seed=seed)


def causes_of(regret: Regret) -> dict[str, float]:
    """What is not nothing, in milliseconds."""
    pairs = zip(CAUSES, regret.causes_s, strict=True)
    return {cause: round(s * 1e3) for cause, s in pairs if abs(s) > 1e-9}


def told(rates: Sequence[float], make: Callable[[PolicyContext], Ours]) -> Callable[..., Ours]:
    """Such a policy, to which the engines' speeds are told as these."""

    def made(context: PolicyContext) -> Ours:
        costs = tuple(
            msgspec.structs.replace(cost, speed=speed)
            for cost, speed in zip(context.costs, rates, strict=True)
        )
        return make(msgspec.structs.replace(context, costs=costs))

    return made


# -- worlds in which one thing is wrong ----------------------------------------------------


def causes_by_chance(make: Callable[[PolicyContext], Ours], **conditions: object) -> list[str]:
    """Of a request that comes while another is computed, of which the picker does not know: it goes
    behind it or not, by chance."""
    requests = [asked(0, 0.0, 50, text=1), asked(1, 0.1, 50, text=2)]
    runs = [run(requests, make, seed=seed, **conditions) for seed in range(8)]
    return sorted({str(causes_of(each.regrets[1])) for each in runs})


def test_a_queue_that_was_not_scraped_is_a_matter_of_load() -> None:
    # 10 ms are left of the step being taken, then come 4001 tokens and four steps more.
    assert causes_by_chance(from_config(QUEUES_ONLY)) == ["{'load': 450}", "{}"]


def test_what_another_router_sent_is_a_matter_of_load() -> None:
    make = from_config(None, true_rates=True)
    assert causes_by_chance(make, routers=2) == ["{'load': 450}", "{}"]
    assert causes_by_chance(make) == ["{}"]


def test_a_prefix_that_was_evicted_unseen_is_a_matter_of_the_cache() -> None:
    # Nothing reports how small the caches are. The first prompt is remembered where the third has
    # taken its place, so the last one waits there behind another, for nothing.
    requests = [
        asked(0, 0.0, 30, text=1),
        asked(1, 5.0, 30, text=2),
        asked(2, 10.0, 38, text=3),
        asked(3, 15.0, 38, text=4),
        asked(4, 20.0, 8, text=5),
        asked(5, 20.0, 30, text=1),
    ]
    result = run(requests, from_config(None, exact=False, true_rates=True), kv_blocks=40)
    used = [outcome.endpoint for outcome in result.outcomes]
    assert used == [used[0], used[1]] * 2 + [used[0], used[0]]
    assert used[0] != used[1]
    assert [causes_of(regret) for regret in result.regrets[:5]] == [{}] * 5
    # 801 tokens are in front, and one block of 100 is left.
    assert causes_of(result.regrets[5]) == {"cache": 70}


def test_a_speed_that_is_taken_for_another_is_a_matter_of_the_rates() -> None:
    make = told((1.0, 1.5), from_config(None, true_rates=True))
    result = run([asked(0, 0.0, 50, text=1)], make, speeds=(1.0, 0.5))
    assert result.outcomes[0].endpoint == 1
    # 5001 tokens and six steps, at half the speed.
    assert causes_of(result.regrets[0]) == {"rates": 560}
    right = run([asked(0, 0.0, 50, text=1)], from_config(None, true_rates=True), speeds=(1.0, 0.5))
    assert right.outcomes[0].endpoint == 0
    assert causes_of(right.regrets[0]) == {}


def test_wanting_something_else_is_a_matter_of_the_objective() -> None:
    # The second finds half of its prompt where a long queue is, and wants nothing but prefixes.
    requests = [
        asked(0, 0.0, 10, text=1),
        asked(1, 2.0, 10, text=1),
        asked(2, 2.0, 90, text=1),
        asked(3, 2.1, 20, text=1),
    ]
    result = run(requests, from_config(PREFIX_ABOVE_ALL, true_rates=True))
    assert len({outcome.endpoint for outcome in result.outcomes}) == 1
    causes = causes_of(result.regrets[3])
    assert set(causes) == {"objective"}
    assert causes["objective"] > 100


# -- what holds in every world -------------------------------------------------------------


@pytest.mark.parametrize("situation", SITUATIONS)
def test_causes_add_up_and_looking_changes_nothing(situation: str) -> None:
    table, _ = known_policies()
    cell = Cell(workload="chats", speed=2.0, kv_blocks=300, endpoints=3, situation=situation)
    workload = WORKLOADS[cell.workload](cell.options(Setup(requests_max=60), 3))
    fleet = fleet_of(cell)
    for name in ("expected-latency", "expected-latency, own index", "reference EPP 2/2/3"):
        conditions = conditions_of(cell, workload, fleet)
        runs = [
            simulate(
                workload,
                fleet,
                msgspec.structs.replace(conditions, regret_every=every),
                table[name],
                seed=3,
            )
            for every in (0, 1, 7)
        ]
        assert len({msgspec.json.encode(run.outcomes) for run in runs}) == 1
        assert runs[0].regrets == []
        assert len(runs[1].regrets) >= 60
        assert 9 <= len(runs[2].regrets) < 20
        for regret in (*runs[1].regrets, *runs[2].regrets):
            assert regret.total_s >= 0
            assert sum(regret.causes_s) == pytest.approx(regret.total_s, abs=1e-9)
            assert len(regret.causes_s) == len(CAUSES)


@pytest.mark.parametrize("name", ["lmetric", "lmetric+hold", "expected-latency+hold"])
def test_who_cannot_decide_again_has_a_total_only(name: str) -> None:
    table, _ = known_policies()
    requests = [asked(number, 0.1 * number, 30, text=number % 3) for number in range(20)]
    figures = regret_figures(run(requests, table[name]).regrets)
    assert figures.decisions == 20
    assert figures.mean_s >= 0
    assert figures.causes_s == ()


def test_the_oracle_regrets_nothing() -> None:
    table, _ = known_policies()
    requests = [asked(number, 0.05 * number, 30, text=number % 3) for number in range(20)]
    assert regret_figures(run(requests, table["oracle"]).regrets).mean_s == 0.0


# -- sums ----------------------------------------------------------------------------------

TIMES_S = {0: 1.0, 1: 3.0, 2: 4.0, 3: 8.0}


def judged(*steps: tuple[set[int], int]) -> list[Judgement]:
    return [Judgement(frozenset(good), first) for good, first in steps]


def test_each_step_of_knowledge_is_worth_what_it_saves() -> None:
    steps = judged(({3}, 3), ({2}, 2), ({1}, 1), ({2}, 2))
    assert regret_of(TIMES_S, 3, steps) == Regret(7.0, (4.0, 1.0, -1.0, 3.0))


def test_a_step_keeps_an_endpoint_that_is_as_good_as_any() -> None:
    steps = judged(({3, 0}, 0), ({3, 1}, 1), ({3}, 3), ({3, 0}, 0))
    assert regret_of(TIMES_S, 3, steps) == Regret(7.0, (0.0, 0.0, 0.0, 7.0))


def test_a_pick_by_chance_that_the_policy_would_not_defend_is_its_objectives() -> None:
    steps = judged(({1}, 1), ({1}, 1), ({0}, 0), ({0}, 0))
    assert regret_of(TIMES_S, 3, steps) == Regret(7.0, (0.0, 2.0, 0.0, 5.0))


def test_figures_are_means_and_seeds_count_alike() -> None:
    one = regret_figures([Regret(1.0, (0.5, 0.5, 0.0, 0.0)), Regret(3.0, (0.0, 0.0, 1.0, 2.0))])
    assert one == RegretFigures(
        decisions=2, mean_s=2.0, cache_s=0.25, load_s=0.25, rates_s=0.5, objective_s=1.0
    )
    other = regret_figures([Regret(6.0, (6.0, 0.0, 0.0, 0.0))])
    both = averaged_regret([one, None, other])
    assert (both.decisions, both.mean_s) == (3, 4.0)
    assert both.causes_s == (3.125, 0.125, 0.25, 0.5)
    assert averaged_regret([one, regret_figures([Regret(2.0)])]).causes_s == ()
    assert averaged_regret([None]) is None
    assert regret_figures([]) is None
