"""Where first bytes are hidden, scrapes of the engines' histograms tell how fast they are.

The whole core runs in the simulator on engines of different speed; what it learned is compared with
the constants the engines were given."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from bench.engine.cost import CostModel
from bench.engine.metrics_page import PageContext, render
from bench.engine.scheduler import Engine, EngineLimits, EngineRequest
from bench.engine.stats import Stats
from bench.sim.cluster import Conditions, Fleet, PolicyContext, Run, simulate
from bench.sim.endpoints import ScrapeClock
from bench.sim.faults import Restart
from bench.sim.hardware import H100_PAIR
from bench.sim.model import Policy, Scrape
from bench.sim.ours import OURS, Ours
from bench.sim.workloads import WORKLOADS, WorkloadOptions
from epp.core.latency.rates import Rates
from epp.wire.exposition import ENGINES, parse_metrics
from tests.simulation.fleets import First, asked, fleet_of, run, workload_of

SPEEDS = (0.5, 1.0, 1.0, 2.0)
PROMPTS = ((500, 0), (2_000, 8_000), (8_000, 0), (20_000, 4_000))
"""New and matched tokens of the prompts that learned work is judged by."""
BIAS_RATIO = 1.05


def work_error(rates: Rates, cost: CostModel) -> float:
    """Largest of |learned / true work - 1|, the bias taken out."""
    errors = []
    for new, matched in PROMPTS:
        pairs = new * (matched + new / 2)
        true_s = (cost.prefill_token_s * new + cost.attention_pair_s * pairs) / cost.speed
        errors.append(abs(rates.work_s(new, matched) / BIAS_RATIO / true_s - 1))
    return max(errors)


def simulated(
    seed: int, *, speeds: tuple[float, ...] = SPEEDS, requests: int = 400, **conditions: object
) -> tuple[Run, list[Ours], Fleet]:
    """Chats at a load the fleet carries, and the policies of the routers."""
    made: list[Ours] = []

    def make_policy(context: PolicyContext) -> Policy:
        made.append(OURS["expected-latency"](context))
        return made[-1]

    workload = WORKLOADS["chats"](WorkloadOptions(seed=seed, speed=0.4, requests_max=requests))
    fleet = Fleet.of(H100_PAIR, len(speeds), speeds=speeds, block_tokens=workload.block_tokens)
    return simulate(workload, fleet, Conditions(**conditions), make_policy, seed=seed), made, fleet


@pytest.mark.parametrize("scrape_s", [0.05, 1.0])
def test_rates_are_found_though_first_bytes_are_hidden(scrape_s: float) -> None:
    for seed in (1, 2):
        _, [policy], fleet = simulated(seed, first_byte_seen=False, scrape_s=scrape_s)
        learner = policy.decider.forecast.learner
        for slot, kind in enumerate(fleet.kinds):
            state = learner.state(slot)
            assert state.prefills > 0, (seed, slot)
            # The slowest gets few requests, and so tells less.
            limit = 0.25 if state.prefills < 30 else 0.15
            assert work_error(learner.measured(slot), kind.cost) < limit, (seed, slot, state)


def test_hidden_first_bytes_without_scrapes_teach_nothing() -> None:
    _, [policy], fleet = simulated(1, requests=100, first_byte_seen=False, scrape_s=None)
    learner = policy.decider.forecast.learner
    assert [learner.rates(slot) for slot in range(len(SPEEDS))] == [Rates()] * len(SPEEDS)
    # The fastest is thought half as fast as it is, which is why the test above could fail.
    assert work_error(learner.rates(3), fleet.kinds[3].cost) > 0.9


def test_what_scrapes_teach_makes_latency_shorter() -> None:
    for seed in (1, 2):
        taught, _, _ = simulated(seed, first_byte_seen=False, scrape_s=1.0)
        blind, _, _ = simulated(seed, first_byte_seen=False, scrape_s=None)
        taught_s, blind_s = (mean(o.ttft_s for o in run.outcomes) for run in (taught, blind))
        assert taught_s < 0.9 * blind_s, (seed, taught_s, blind_s)


def test_where_first_bytes_are_seen_scrapes_of_others_prefills_change_nothing() -> None:
    """Three routers: each sees a third of the first bytes, and all prefills in the histograms."""
    _, policies, _ = simulated(1, requests=300, routers=3, scrape_s=0.05)
    for policy in policies:
        learner = policy.decider.forecast.learner
        assert sum(learner.state(slot).prefills for slot in range(len(SPEEDS))) <= 100


def test_an_engine_that_was_restarted_is_learned_on() -> None:
    _, [policy], fleet = simulated(
        1, first_byte_seen=False, scrape_s=1.0, faults=(Restart(60.0, 3, 5.0),)
    )
    learner = policy.decider.forecast.learner
    assert learner.state(3).prefills > 30
    assert work_error(learner.measured(3), fleet.kinds[3].cost) < 0.15


# -- the scrapes themselves ----------------------------------------------------------------


class Looking(First):
    """Writes down the scrape of endpoint 0 that it could see at each request."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.seen: list[Scrape | None] = []

    def pick(self, request, view, now_s):
        self.seen.append(view.scrape(0))
        return 0


def told(*requests, **conditions) -> list[tuple[float, int, int]]:
    """Seconds, tokens and number of prefills, as known at each request."""
    _, [policy] = run(workload_of(*requests), fleet_of(1), Looking, scrape_s=0.01, **conditions)
    return [
        (scrape.prefill_s_sum, scrape.prefill_tokens_sum, scrape.prefills)
        for scrape in policy.seen
        if scrape is not None
    ]


def test_a_scrape_counts_prefills_when_their_requests_have_ended() -> None:
    requests = [asked(0, 1.0, 100, 5), asked(1, 1.5, 200, text=1), asked(2, 3.5, 10)]
    requests += [asked(3, 30.0, 300, text=1), asked(4, 60.0, 10), asked(5, 90.0, 10)]
    # A step takes a second, 0.01 per prompt token, 0.1 per decode. When the third comes, the first
    # has its first token and decodes still. The fourth finds what the second computed.
    first_three_s = 2.0 + (1.0 + 2.0 + 0.1) + (1.0 + 0.1 + 0.1)
    assert told(*requests) == [
        *([(0.0, 0, 0)] * 3),
        (pytest.approx(first_three_s), 310, 3),
        (pytest.approx(first_three_s + 2.0), 410, 4),
        (pytest.approx(first_three_s + 3.1), 420, 5),
    ]


def test_a_restarted_engine_counts_from_zero() -> None:
    requests = [asked(0, 1.0, 100), asked(1, 9.0, 10), asked(2, 40.0, 10), asked(3, 50.0, 10)]
    seen = told(*requests, faults=(Restart(20.0, 0, 1.0),))
    assert [prefills for _, _, prefills in seen] == [0, 1, 0, 1]


def test_the_engines_own_page_tells_the_same_totals() -> None:
    rng = Random(5)
    limits = EngineLimits(block_tokens=16, kv_blocks=400)
    engine, stats = Engine(limits, CostModel()), Stats(max_model_len=4096)
    clock = ScrapeClock(1, 0, Conditions(scrape_s=0.01))
    now_s = 0.0
    for number in range(60):
        names = tuple(range(rng.randrange(20)))
        engine.submit(
            EngineRequest(
                id=str(number),
                prompt_tokens=len(names) * 16 + rng.randrange(1, 900),
                output_tokens=rng.randrange(1, 30),
                blocks=names,
            ),
            now_s,
        )
        for _ in range(rng.randrange(20)):
            step = engine.step(now_s)
            if step is None:
                break
            now_s = step.end_s
            stats.on_step(step)
            clock.count(step.finished)
            for live in step.finished:
                stats.on_end(live, "length", now_s)
    clock.look(engine, now_s + 1.0)
    page = render(stats, PageContext("m", limits, 4096, False, 1.0, 0.0))
    load = parse_metrics(page, ENGINES["vllm"], at_s=now_s)
    assert clock.newest is not None
    assert load.prefills == clock.newest.prefills > 20
    assert load.prefill_tokens_sum == clock.newest.prefill_tokens_sum
    assert load.prefill_s_sum == pytest.approx(clock.newest.prefill_s_sum)
