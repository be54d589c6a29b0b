"""The simulated fleet: times by hand, what holds in every run, and each run the same again."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from bench.sim.cluster import Conditions, Fleet, PolicyError, simulate
from bench.sim.hardware import H100_PAIR, HARDWARE
from bench.sim.model import Workload
from bench.sim.simulation import HELD_QUIET_S_MAX, Simulation
from tests.simulation.fleets import (
    BLOCK,
    PLAIN,
    Anywhere,
    First,
    InTurn,
    OneEach,
    asked,
    fleet_of,
    random_faults,
    random_workload,
    run,
    workload_of,
)


def test_two_requests_at_one_engine_take_the_times_worked_out_by_hand() -> None:
    workload = workload_of(asked(0, 0.0, 100, 3), asked(1, 0.5, 50, 2))
    result, [policy] = run(workload, fleet_of(1))
    one, two = result.outcomes
    # Prefill of 100 tokens; prefill of 50 beside one decode; two decodes.
    assert (one.first_s, two.first_s) == pytest.approx((2.0, 2.0 + 1.6))
    assert (one.ended_s, two.ended_s) == pytest.approx((3.6 + 1.2, 3.6 + 1.2))
    assert (one.dispatched_s, two.dispatched_s) == (0.0, 0.5)
    assert (one.ttft_s, two.ttft_s) == pytest.approx((2.0, 3.1))
    assert (one.tpot_s, two.tpot_s) == pytest.approx((1.4, 1.2))
    assert policy.calls == [
        ("choose", 0, 0.0),
        ("choose", 1, 0.5),
        ("first_byte", 0, one.first_s),
        ("first_byte", 1, two.first_s),
        ("ended", 0, one.ended_s),
        ("ended", 1, two.ended_s),
    ]
    assert result.ended_s == one.ended_s
    assert result.timeline == [(0.0, (1,)), (1.0, (2,)), (2.0, (2,)), (3.0, (2,)), (4.0, (2,))]


def test_requests_of_one_moment_share_a_step() -> None:
    result, _ = run(workload_of(asked(0, 1.0, 100), asked(1, 1.0, 50)), fleet_of(1))
    assert [outcome.first_s for outcome in result.outcomes] == pytest.approx([3.5, 3.5])


def test_a_request_that_comes_during_merged_decodes_starts_after_the_one_being_taken() -> None:
    workload = workload_of(asked(0, 0.0, 100, 50), asked(1, 7.0, 50, 1))
    result, _ = run(workload, fleet_of(1))
    # First token at 2.0, decodes of 1.1 end at 3.1 .. 6.4, 7.5; then a prefill beside one decode.
    assert result.outcomes[1].first_s == pytest.approx(7.5 + 1.6)
    assert result.outcomes[0].ended_s == pytest.approx(2.0 + 48 * 1.1 + 1.6)


@pytest.mark.parametrize("kv_blocks", [40, 100])
@pytest.mark.parametrize("seed", range(8))
def test_merging_steps_changes_no_outcome(seed, kv_blocks, monkeypatch) -> None:
    kind = msgspec.structs.replace(H100_PAIR, max_num_seqs=6, max_num_batched_tokens=128)
    workload = random_workload(Random(seed), 80, rate=20.0)
    results = []
    for most in (64, 1):
        monkeypatch.setattr("bench.engine.scheduler.MERGED_STEPS_MAX", most)
        result, _ = run(workload, fleet_of(2, kv_blocks=kv_blocks, kind=kind), InTurn)
        results.append(result)
    merged, single = results
    assert merged.steps < 0.8 * single.steps
    for one, other in zip(merged.outcomes, single.outcomes, strict=True):
        assert one.first_s == pytest.approx(other.first_s, rel=1e-9)
        assert one.ended_s == pytest.approx(other.ended_s, rel=1e-9)
        assert (one.cached_tokens, one.preemptions) == (other.cached_tokens, other.preemptions)


def worst_case(seed: int, **others: object) -> Conditions:
    rng = Random(f"conditions {seed}")
    given: dict[str, object] = {
        "scrape_s": rng.choice((None, 0.05, 2.0)),
        "scrape_loss_ratio": 0.3,
        "first_byte_late_s": rng.choice((0.0, 0.05, 5.0)),
        "first_byte_seen": rng.random() < 0.7,
        "prefix": rng.choice(("exact", "approximate")),
        "kv_event_lag_s": rng.choice((0.0, 1.0)),
        "kv_event_loss_ratio": rng.choice((0.0, 0.2)),
        "routers": rng.choice((1, 3)),
        "faults": random_faults(rng, 3),
        "retries_max": rng.choice((0, 3)),
        "recheck_s": 0.5,
        "regret_every": rng.choice((0, 0, 1, 3)),
    }
    return Conditions(**{**given, **others})


@pytest.mark.parametrize("make", [First, InTurn, Anywhere, OneEach])
@pytest.mark.parametrize("seed", range(15))
def test_every_request_gets_one_outcome_whatever_goes_wrong(seed, make) -> None:
    workload = random_workload(Random(seed))
    made: list[First] = []
    fleet = fleet_of(3, kv_blocks=35)
    simulation = Simulation(
        workload,
        fleet,
        worst_case(seed),
        lambda context: made.append(make(context)) or made[-1],
        seed,
        None,
    )
    result = simulation.run()
    assert [outcome.request for outcome in result.outcomes] == list(workload.requests)
    for outcome in result.outcomes:
        if outcome.refused:
            assert outcome.ended_s == outcome.first_s == -1.0
            continue
        assert outcome.request.arrival_s <= outcome.dispatched_s < outcome.first_s
        assert outcome.first_s <= outcome.ended_s <= result.ended_s
        assert 0 <= outcome.cached_tokens < outcome.request.prompt_tokens
        assert 0 <= outcome.endpoint < result.endpoints
    for endpoint in simulation.endpoints:
        load = endpoint.engine.load()
        assert not endpoint.flights
        assert (load.running, load.waiting, load.kv_usage_ratio) == (0, 0, 0.0)
    check_calls(made, result.outcomes)


def check_calls(policies, outcomes) -> None:
    """Calls about a request come in order and balance, each at the router that has it."""
    for number, policy in enumerate(policies):
        times_s = [call[2] for call in policy.calls if call[0] != "left"]
        assert times_s == sorted(times_s)
        mine = Counter(call[1] for call in policy.calls if call[0] == "choose")
        assert set(mine) <= set(range(number, len(outcomes), len(policies)))
        for request, chosen in mine.items():
            words = [what for what, which, _ in policy.calls if which == request and what != "left"]
            said = "".join(word[0] if word != "failed" else "x" for word in words)
            # Each choice is followed by at most one first byte and exactly one end or failure.
            attempts = said.removeprefix("c").split("c")
            assert all(attempt in {"fe", "e", "fx", "x"} for attempt in attempts), said
            assert [attempt[-1] for attempt in attempts[:-1]] == ["x"] * (chosen - 1)
            refused = outcomes[request].refused
            assert (attempts[-1][-1] == "x") == refused
            assert outcomes[request].retries >= chosen - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_same_inputs_give_the_same_run_byte_for_byte(seed) -> None:
    encoded = []
    for _ in range(2):
        workload = random_workload(Random(seed))
        conditions = worst_case(seed, regret_every=1)
        encoded.append(
            msgspec.json.encode(simulate(workload, fleet_of(3), conditions, Anywhere, seed=seed))
        )
    assert encoded[0] == encoded[1]
    other = simulate(workload, fleet_of(3), conditions, Anywhere, seed=seed + 1)
    assert msgspec.json.encode(other) != encoded[0]


def test_a_request_too_long_for_the_cache_is_refused_and_the_policy_told() -> None:
    result, [policy] = run(workload_of(asked(0, 0.0, 900, 200), asked(1, 1.0, 10)), fleet_of(1))
    assert [outcome.refused for outcome in result.outcomes] == [True, False]
    assert policy.calls[:2] == [("choose", 0, 0.0), ("failed", 0, 0.0)]


class Stray(First):
    def pick(self, request, view, now_s):
        return 7


class Keep(First):
    def pick(self, request, view, now_s):
        return None


class KeepForever(Keep):
    def pass_held(self, view, now_s):
        return []


@pytest.mark.parametrize(
    ("make", "message"),
    [(Stray, "endpoint 7"), (Keep, "without pass_held"), (KeepForever, "for ever")],
)
def test_a_policy_that_breaks_the_rules_is_named(make, message) -> None:
    with pytest.raises(PolicyError, match=message):
        run(workload_of(asked(0, 0.0, 10)), fleet_of(1), make, recheck_s=HELD_QUIET_S_MAX / 10)


def test_held_requests_go_in_the_policys_order_when_an_answer_ends() -> None:
    workload = workload_of(*(asked(number, number / 10, 100, 2) for number in range(3)))
    result, [policy] = run(workload, fleet_of(1), OneEach, recheck_s=0.6)
    assert [outcome.dispatched_s for outcome in result.outcomes] == pytest.approx([0.0, 6.2, 3.1])
    assert result.held == 2
    # At each arrival that is kept, each first byte and end, and every 0.6 s from the first hold on.
    seen = [round(at_s, 9) for at_s in policy.passes]
    assert seen[:6] == [0.1, 0.2, 0.7, 1.3, 1.9, 2.0]
    assert 3.1 in seen
    assert 5.1 in seen
    assert seen[-1] == 6.2


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload("w", (asked(0, 0.0, 10),), 512), "512 tokens"),
        (workload_of(asked(1, 0.0, 10)), "request 0"),
        (workload_of(asked(0, 2.0, 10), asked(1, 1.0, 10)), "request 1"),
    ],
)
def test_a_workload_that_does_not_fit_is_refused(workload, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(workload, fleet_of(1))


def test_an_empty_workload_ends_at_once() -> None:
    result, _ = run(workload_of(), fleet_of(1))
    assert (result.outcomes, result.ended_s, result.timeline) == ([], 0.0, [])


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[float] = []
    workload = random_workload(Random(1))
    simulate(workload, fleet_of(2), Conditions(), InTurn, seed=1, progress=told.append)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (60, 1.0)


def test_a_long_timeline_stays_bounded_and_covers_the_run(monkeypatch) -> None:
    monkeypatch.setattr("bench.sim.timeline.SAMPLES_MAX", 64)
    workload = workload_of(*(asked(number, 100.0 * number, 10, 80) for number in range(10)))
    result, _ = run(workload, fleet_of(1))
    times_s = [at_s for at_s, _ in result.timeline]
    assert 16 <= len(times_s) <= 64
    assert times_s == [16.0 * index for index in range(len(times_s))]
    assert times_s[-1] >= result.ended_s - 16.0
    assert {inflight for _, inflight in result.timeline} == {(0,), (1,)}


def test_a_fleet_takes_speeds_in_turn_and_a_capacity_in_blocks() -> None:
    fleet = Fleet.of(PLAIN, 3, kv_blocks=7, block_tokens=BLOCK, speeds=(1.0, 0.5))
    assert [kind.cost.speed for kind in fleet.kinds] == [1.0, 0.5, 1.0]
    assert {kind.kv_tokens for kind in fleet.kinds} == {70}
    result, _ = run(workload_of(asked(0, 0.0, 10), asked(1, 0.0, 10)), fleet, InTurn)
    assert [outcome.first_s for outcome in result.outcomes] == pytest.approx([1.1, 2.2])


def test_hardware_says_what_is_an_estimate_and_orders_as_its_cards_do() -> None:
    assert next(iter(HARDWARE)) == "h100-pair-32b"
    a100, h100, h200 = (HARDWARE[name].cost for name in ("a100", "h100-pair-32b", "h200"))
    assert all("estimate" in kind.source for kind in HARDWARE.values())
    assert a100.prefill_token_s > h100.prefill_token_s == h200.prefill_token_s
    assert a100.step_base_s > h100.step_base_s > h200.step_base_s
    assert a100.decode_kv_token_s > h100.decode_kv_token_s > h200.decode_kv_token_s
