"""Scrapes, prefix information, late and hidden signals, and the oracle's true state."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from bench.engine.scheduler import Engine, EngineLimits, EngineRequest
from bench.sim.cluster import Conditions
from bench.sim.endpoints import Endpoint, ScrapeClock
from bench.sim.faults import Restart
from bench.sim.model import SimRequest, View
from bench.sim.prefix import SentPrefixes
from tests.simulation.fleets import (
    BLOCK,
    PLAIN,
    First,
    InTurn,
    asked,
    fleet_of,
    random_workload,
    run,
    workload_of,
)


class Looking(First):
    """Endpoint 0 or, for an odd number, the last; writes down what it could see there."""

    def __init__(self, context) -> None:
        super().__init__(context)
        self.seen: list[tuple[object, int]] = []

    def pick(self, request: SimRequest, view: View, now_s: float) -> int | None:
        endpoint = view.endpoints[-(request.number % 2)]
        self.seen.append((view.scrape(endpoint), view.matched_tokens(request, endpoint)))
        return endpoint


def matches(requests, **conditions) -> list[int]:
    endpoints = conditions.pop("endpoints", 1)
    kv_blocks = conditions.pop("kv_blocks", 100)
    fleet = fleet_of(endpoints, kv_blocks=kv_blocks)
    _, policies = run(workload_of(*requests), fleet, Looking, **conditions)
    numbered = sorted(
        (call[1], seen[1])
        for policy in policies
        for call, seen in zip(
            [call for call in policy.calls if call[0] == "choose"], policy.seen, strict=True
        )
    )
    return [matched for _, matched in numbered]


def twice(second_s: float, prompt_tokens: int = 100):
    return asked(0, 0.0, prompt_tokens, text=1), asked(1, second_s, prompt_tokens, text=1)


def test_exact_information_is_the_engines_own_and_never_covers_the_last_token() -> None:
    assert matches(twice(0.5)) == [0, 90]
    assert matches(twice(0.5, 105)) == [0, 100]


def test_events_are_known_their_lag_after_the_step_that_stored() -> None:
    # The prefill ends at 2.0.
    assert matches(twice(2.4), kv_event_lag_s=0.5) == [0, 0]
    assert matches(twice(2.5), kv_event_lag_s=0.5) == [0, 90]


def test_lost_events_leave_the_router_with_what_it_knew() -> None:
    assert matches(twice(100.0), kv_event_loss_ratio=1.0) == [0, 0]


def test_evicted_blocks_are_known_to_be_gone() -> None:
    evicted = [asked(0, 0.0, 100, text=1), asked(1, 50.0, 281), asked(2, 99.0, 100, text=1)]
    assert matches(evicted, kv_blocks=29) == [0, 0, 0]
    assert matches(evicted, kv_blocks=29, kv_event_lag_s=0.1) == [0, 0, 0]
    assert matches(evicted, kv_blocks=29, kv_event_lag_s=48.0) == [0, 0, 90]


def test_approximate_information_is_what_was_sent_as_much_as_the_cache_holds() -> None:
    approximate = {"prefix": "approximate"}
    assert matches(twice(0.0), **approximate) == [0, 90]
    # 30 blocks: the third prompt of 15 pushes the first prompt's 12 out, from their end.
    prompts = [asked(0, 0.0, 120, text=1), asked(1, 1.0, 0 + 150, text=2)]
    prompts += [asked(2, 60.0, 110, text=3), asked(3, 61.0, 120, text=1)]
    at_one = [
        SimRequest(
            number=2 * index,
            arrival_s=each.arrival_s,
            prompt_tokens=each.prompt_tokens,
            output_tokens=1,
            blocks=each.blocks,
        )
        for index, each in enumerate(prompts)
    ]
    between = [asked(2 * index + 1, at_one[index].arrival_s, 1) for index in range(4)]
    both = [request for pair in zip(at_one, between, strict=True) for request in pair]
    seen = matches(both, kv_blocks=30, endpoints=2, **approximate)
    assert seen[::2] == [0, 0, 0, 40]


def test_a_router_knows_nothing_of_what_another_sent() -> None:
    same = [asked(number, 50.0 * number, 100, text=1) for number in range(4)]
    assert matches(same, prefix="approximate", routers=2) == [0, 0, 90, 90]
    assert matches(same, prefix="exact", routers=2) == [0, 90, 90, 90]


@pytest.mark.parametrize("lag_s", [0.0, 0.1])
def test_what_routers_know_of_an_undisturbed_engine_is_what_it_finds(lag_s) -> None:
    rng = Random(5)
    requests = [
        asked(number, 40.0 * number, rng.randint(1, 200), text=rng.choice((1, 2)))
        for number in range(40)
    ]
    result, _ = run(workload_of(*requests), fleet_of(1, kv_blocks=30))
    found = [each.cached_tokens for each in result.outcomes]
    assert matches(requests, kv_blocks=30, kv_event_lag_s=lag_s) == found


def scraped_by_hand(loss_ratio: float, seed: int) -> None:
    """The clock, looked at now and then, against one looked at in every tick and a history."""
    rng = Random(f"{loss_ratio} {seed}")
    conditions = Conditions(scrape_s=1.0, scrape_loss_ratio=loss_ratio)
    engine = Engine(EngineLimits(block_tokens=BLOCK, kv_blocks=500), PLAIN.cost)
    clock, patient = ScrapeClock(seed, 3, conditions), ScrapeClock(seed, 3, conditions)
    phase_s = clock.next_s
    now_s, lost = 0.0, 0
    history = [(0.0, 0)]
    for number in range(200):
        now_s += rng.choice((0.1, 0.7, 5.0)) * rng.random()
        while patient.next_s <= now_s:
            patient.look(engine, patient.next_s)
        if now_s >= clock.next_s:
            clock.look(engine, now_s)
        assert clock.newest == patient.newest
        if clock.newest is not None:
            tick = round(clock.newest.at_s - phase_s)
            assert clock.newest.at_s == pytest.approx(phase_s + tick)
            assert now_s - clock.newest.at_s < (1.0 if not loss_ratio else 200.0)
            lost += int(now_s - phase_s) - tick
            before = [count for at_s, count in history if at_s < clock.newest.at_s]
            assert clock.newest.waiting == (before or [0])[-1]
        else:
            assert now_s < phase_s or loss_ratio
        engine.submit(EngineRequest(id=str(number), prompt_tokens=1, output_tokens=1), now_s)
        history.append((now_s, number + 1))
    assert (lost > 0) == (loss_ratio > 0)


@pytest.mark.parametrize("loss_ratio", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(10))
def test_a_scrape_shows_the_load_at_its_own_time(loss_ratio, seed) -> None:
    scraped_by_hand(loss_ratio, seed)


def test_a_scrape_is_not_touched_by_what_happens_after_it() -> None:
    phase_s = ScrapeClock(1, 0, Conditions(scrape_s=20.0)).next_s
    assert phase_s > 2.0, "choose other times"
    # One runs at the tick and ends at 2.0 after it, before anybody looks; then another runs.
    requests = [
        asked(0, phase_s - 1.0, 200),
        asked(1, phase_s + 4.0, 900),
        asked(2, phase_s + 5, 1),
    ]
    _, [policy] = run(workload_of(*requests), fleet_of(1), Looking, scrape_s=20.0)
    assert [scrape for scrape, _ in policy.seen[1:]] == [policy.seen[1][0]] * 2
    scrape = policy.seen[1][0]
    assert (scrape.at_s, scrape.running, scrape.waiting) == (phase_s, 1, 0)


def test_a_restarted_engine_was_not_scraped_yet() -> None:
    requests = [asked(number, 10.0 + number, 50, 90) for number in (0, 1, 2)]
    requests += [asked(number, 20.0 + number, 50) for number in (3, 4)]
    phase_s = ScrapeClock(1, 0, Conditions(scrape_s=10.0)).next_s
    assert 5.0 < phase_s < 9.0, "choose other times"
    _, [policy] = run(
        workload_of(*requests), fleet_of(1), Looking, scrape_s=10.0, faults=(Restart(15.0, 0, 5.5),)
    )
    before, after = policy.seen[2][0], policy.seen[-2:]
    assert before is not None
    assert [scrape for scrape, _ in after] == [None, None]


@pytest.mark.parametrize("seed", range(5))
def test_sent_prefixes_agree_with_a_patient_list(seed) -> None:
    rng, conditions = Random(seed), Conditions(prefix="approximate")
    endpoint = Endpoint(
        0,
        msgspec.structs.replace(PLAIN, kv_tokens=20 * BLOCK),
        block_tokens=BLOCK,
        conditions=conditions,
        seed=1,
    )
    prefixes, names = SentPrefixes([endpoint]), []
    for number in range(300):
        request = asked(number, 0.0, rng.randint(1, 120), text=rng.choice((1, 2, 3)))
        matched = 0
        while matched < min(8, len(request.blocks)) and request.blocks[matched] in names:
            matched += 1
        assert prefixes.matched_blocks(request, 0, 8) == matched
        prefixes.sent(request, 0)
        names = [name for name in names if name not in request.blocks]
        names = [*names, *reversed(request.blocks)][-20:]
        if rng.random() < 0.02:
            prefixes.forget(0)
            names = []


def test_scrapes_can_all_be_lost_or_not_be_made() -> None:
    for conditions in ({"scrape_loss_ratio": 1.0}, {"scrape_s": None}):
        workload = random_workload(Random(1))
        _, [policy] = run(workload, fleet_of(2), Looking, **conditions)
        assert {seen[0] for seen in policy.seen} == {None}


def test_a_scrape_sees_waiting_running_and_memory() -> None:
    requests = [asked(0, 0.0, 100, 50), asked(1, 0.0, 1), asked(2, 20.0, 300), asked(3, 20.0, 1)]
    requests += [asked(4, 23.0, 10)]
    _, [policy] = run(workload_of(*requests), fleet_of(2, kv_blocks=50), Looking, scrape_s=0.001)
    scrape = policy.seen[-1][0]
    # One decodes, one prefills 30 blocks since the step that began at 20.7.
    assert (scrape.running, scrape.waiting) == (2, 0)
    assert scrape.kv_usage_ratio == pytest.approx((12 + 30) / 50)


def test_signals_come_late_in_order_and_ends_after_first_bytes() -> None:
    result, [policy] = run(
        workload_of(asked(0, 0.0, 100, 3), asked(1, 0.5, 50, 1)), fleet_of(1), first_byte_late_s=2.0
    )
    one, two = result.outcomes
    assert policy.calls[2:] == [
        ("first_byte", 0, one.first_s + 2.0),
        ("first_byte", 1, two.first_s + 2.0),
        ("ended", 1, two.ended_s + 2.0),
        ("ended", 0, one.ended_s + 2.0),
    ]
    assert one.first_s == pytest.approx(2.0)


def test_hidden_first_bytes_are_not_told() -> None:
    _, [policy] = run(random_workload(Random(1)), fleet_of(2), InTurn, first_byte_seen=False)
    assert {call[0] for call in policy.calls} == {"choose", "ended"}
    assert not policy.context.first_byte_seen


class Foreseeing(First):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.expected_s: dict[int, float] = {}

    def pick(self, request, view, now_s):
        self.expected_s[request.number] = view.expected_ttft_s(request, 0, now_s)
        return view.endpoints[0]


def foreseen(*requests, **fleet) -> list[tuple[float, float]]:
    result, [policy] = run(workload_of(*requests), fleet_of(1, **fleet), Foreseeing)
    return [
        (policy.expected_s[each.request.number], each.first_s - each.dispatched_s)
        for each in result.outcomes
    ]


def test_the_oracle_knows_what_an_idle_engine_takes_cache_included() -> None:
    for expected_s, ttft_s in foreseen(asked(0, 0.0, 100, text=1), asked(1, 9.0, 200, text=1)):
        assert expected_s == pytest.approx(ttft_s)


def test_the_oracle_counts_the_step_being_taken_the_queue_and_the_decodes() -> None:
    pairs = foreseen(asked(0, 0.0, 100, 40), asked(1, 7.0, 50), asked(2, 7.1, 300, text=1))
    assert pairs[1][0] == pytest.approx(0.5 + 1.6)
    # At 7.1 another waits: one step for both, which the one before could not foresee.
    assert pairs[2] == pytest.approx((0.4 + 4.6, 0.4 + 4.6))
    assert pairs[1][1] == pytest.approx(0.5 + 4.6)
    # A prefix that the one before is still waiting to compute counts as found.
    same = foreseen(asked(0, 0.0, 100, 1), asked(1, 0.1, 300, text=1), asked(2, 0.2, 300, text=1))
    assert same[2] == pytest.approx((1.8 + 1.0 + 3.0 + 0.1, 1.8 + 1.0 + 3.0 + 0.1))


def test_the_oracle_counts_the_wait_for_memory() -> None:
    [_, (expected_s, ttft_s)] = foreseen(asked(0, 0.0, 100, 30), asked(1, 5.0, 150), kv_blocks=20)
    assert ttft_s > 25.0
    # It takes the decode to be there still when its memory is free.
    assert expected_s == pytest.approx(ttft_s + 0.1)


def test_regret_is_what_the_best_endpoint_would_have_saved() -> None:
    workload = workload_of(asked(0, 0.0, 100), asked(1, 0.5, 50))
    result, _ = run(workload, fleet_of(2), First, regret_every=1)
    assert [each.total_s for each in result.regrets] == pytest.approx([0.0, 1.5])
    result, _ = run(workload, fleet_of(2), InTurn, regret_every=1)
    assert [each.total_s for each in result.regrets] == pytest.approx([0.0, 0.0])
    assert run(workload, fleet_of(2))[0].regrets == []
