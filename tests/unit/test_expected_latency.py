"""The cost of an endpoint, worked out by hand, and what is chosen by it."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import msgspec
import pytest

from epp.core.inflight import Inflight, Prefill
from epp.core.latency.expected import ExpectedLatency, least
from epp.core.latency.rates import Rates
from epp.core.model import Costs, Endpoint, Request
from epp.core.registry import COSTS
from tests.unit.roundrates import (
    BLOCK,
    LINEAR,
    ROUND,
    asking,
    charged,
    endpoints,
    forecast_of,
    prompt,
    scrape,
    world,
)

PLAIN = ExpectedLatency(chunk_tokens=1000, decode_weight=0.0, sharing_weight=0.0)
OWN_ONLY = ExpectedLatency(own_weight=1.0, inflight_weight=0.0, waiting_weight=0.0)


def terms_of(costs: Costs) -> dict[str, list[float]]:
    return {term.name: list(term.scores) for term in costs.terms}


def cost_alone(
    endpoint: Endpoint, request: Request, policy: ExpectedLatency = PLAIN, *, now_s: float = 0.0
) -> float:
    (seconds,) = policy(request, [endpoint], forecast_of([endpoint]), now_s).seconds
    return seconds


# The formula


def test_every_term_of_a_busy_endpoint_is_the_one_worked_out_by_hand() -> None:
    (busy,) = endpoints(1)
    inflight = Inflight()
    decoding = charged(inflight, busy, 0.3, now_s=8.0, prompt_tokens=500)
    inflight.first_byte(decoding, 9.0)
    charged(inflight, busy, 2.0, now_s=10.0, prompt_tokens=300)
    charged(inflight, busy, 1.0, now_s=10.5, prompt_tokens=200)
    costs = PLAIN(asking(1000, {0: 6}), [busy], forecast_of([busy]), 11.0)
    # B: 2 + 1, of which one second is done. w: 616 of 1000 tokens, 384 before them.
    backlog_s = 2.0
    work_s = 0.001 * 616 + 1e-6 * 616 * (384 + 308)
    step_s = 0.1 + 0.01 * 3 + 1e-4 * 1000
    assert terms_of(costs) == {
        "backlog": [backlog_s],
        "work": [pytest.approx(work_s * (1.3 + 0.07 * 3 + 0.8 * 2), rel=1e-12)],
        "decode": [pytest.approx(3 * step_s, rel=1e-12)],  # 2000 + 616 tokens: three chunks
        "crowd": [0.0],
    }
    assert costs.seconds == [pytest.approx(5.93146592, rel=1e-12)]
    assert all(term.weight == 1.0 for term in costs.terms)


def test_several_endpoints_each_cost_by_their_own_rates_match_and_load_in_their_order() -> None:
    idle, fast, holder = pool = endpoints(3)
    twice = Rates(token_s=0.0005, pair_s=5e-7, step_s=0.05, step_request_s=0.005, step_token_s=5e-5)
    forecast = forecast_of(pool, by_slot={1: twice})
    charged(Inflight(), fast, 0.2, now_s=0.0, prompt_tokens=100)
    request = asking(1000, {2: 10})
    costs = PLAIN(request, [holder, fast, idle], forecast, 0.0)
    cold_s = 0.001 * 1000 + 1e-6 * 1000 * 500
    held_s = 0.001 * 360 + 1e-6 * 360 * (640 + 180)
    assert costs.seconds == [
        pytest.approx(held_s * 1.3 + 0.1),
        # 0.2 s are 400 tokens at this speed, which with 1000 make two chunks.
        pytest.approx(0.2 + cold_s / 2 * (1.3 + 0.07 + 0.8) + 2 * (0.05 + 0.005 + 0.005)),
        pytest.approx(cold_s * 1.3 + 0.1),
    ]


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(1, 1), (999, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)]
)
def test_each_chunk_begun_waits_for_one_decode_step(tokens: int, chunks: int) -> None:
    (idle,) = endpoints(1)
    costs = PLAIN(asking(tokens), [idle], forecast_of([idle]), 0.0)
    assert terms_of(costs)["decode"] == [pytest.approx(chunks * 0.1)]


def test_the_backlog_counts_in_the_chunks_by_the_tokens_it_stands_for() -> None:
    (busy,) = endpoints(1)
    charged(Inflight(), busy, 1.5, now_s=0.0)
    costs = PLAIN(asking(400), [busy], forecast_of([busy]), 0.0)
    assert terms_of(costs)["decode"] == [pytest.approx(2 * 0.11)]  # 1500 + 400
    costs = PLAIN(asking(501), [busy], forecast_of([busy]), 0.0)
    assert terms_of(costs)["decode"] == [pytest.approx(3 * 0.11)]


def test_the_last_token_is_computed_however_much_is_held() -> None:
    (holder,) = endpoints(1)
    forecast = forecast_of([holder])
    for blocks in (10, 11, 10**9):
        costs = OWN_ONLY(asking(640, {0: blocks}), [holder], forecast, 0.0)
        assert terms_of(costs)["work"] == [pytest.approx(0.001 + 1e-6 * 639.5)]


def crowded(others: int, policy: ExpectedLatency, request: Request) -> dict[str, list[float]]:
    """Terms of an endpoint where so many decode, 10 tokens of context each."""
    (busy,) = endpoints(1)
    inflight = Inflight()
    for _ in range(others):
        inflight.first_byte(charged(inflight, busy, 0.0, now_s=0.0, prompt_tokens=10), 0.0)
    forecast = forecast_of([busy])
    forecast.output_tokens_mean = 200.0
    return terms_of(policy(request, [busy], forecast, 0.0))


def test_a_crowd_pays_for_what_the_decoding_of_one_more_adds_to_each_of_its_answers() -> None:
    policy = ExpectedLatency(decode_weight=0.5)
    # 3 answers of 200 tokens, whose every step gets longer by a request of 1000 tokens.
    expected = 0.5 * 3 * 200 * (0.01 + 1e-4 * 1000)
    assert crowded(3, policy, asking(1000, {0: 15}))["crowd"] == [pytest.approx(expected)]
    assert crowded(0, policy, asking(1000))["crowd"] == [0.0]
    assert crowded(3, PLAIN, asking(1000))["crowd"] == [0.0]


def test_where_as_many_run_as_can_one_more_waits_for_a_place() -> None:
    policy = ExpectedLatency(decode_weight=0.0, max_num_seqs=4)
    assert crowded(3, policy, asking(10))["crowd"] == [0.0]
    # A place comes free four times in the 200 steps of an answer.
    assert crowded(4, policy, asking(10))["crowd"] == [pytest.approx(0.144 * 200 / 4)]
    assert crowded(6, policy, asking(10))["crowd"] == [pytest.approx(3 * 0.166 * 200 / 4)]


def test_who_finds_no_room_in_the_kv_cache_waits_until_what_it_lacks_has_been_freed() -> None:
    (busy,) = endpoints(1)
    inflight = Inflight()
    inflight.first_byte(charged(inflight, busy, 0.1, now_s=0.0, prompt_tokens=1500), 0.0)
    forecast = forecast_of([busy])
    forecast.output_tokens_mean = 200.0
    step_s = 0.1 + 0.01 + 1e-4 * 1500  # 52 s an answer
    # In flight 1500 tokens and 512 for the output, to come 1000 and 512.
    for capacity, short in ((3524, 0), (3523, 1), (2012, 1512)):
        busy.kv.capacity_tokens = capacity
        found = terms_of(PLAIN(asking(1000), [busy], forecast, 0.0)).get("memory", [0.0])
        assert found == [pytest.approx(3.0 * short / capacity * 200 * step_s)]
    busy.kv.capacity_tokens = 0
    unknown = PLAIN(asking(1000), [busy], forecast, 0.0)
    assert "memory" not in terms_of(unknown)
    busy.kv.capacity_tokens = 3000
    found = PLAIN(asking(1000), [busy], forecast, 0.0)
    waits_s = 3.0 * 524 / 3000 * 200 * step_s
    assert found.seconds[0] - unknown.seconds[0] == pytest.approx(waits_s)
    without = msgspec.structs.replace(PLAIN, memory_weight=0.0)
    assert without(asking(1000), [busy], forecast, 0.0).seconds == unknown.seconds


def test_a_scrape_tells_how_much_the_kv_cache_takes() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    assert endpoint.kv.capacity_tokens == 0
    scrape(decider, endpoint, 1.0, kv_blocks=600, kv_block_tokens=16)
    assert endpoint.kv.capacity_tokens == 9600
    scrape(decider, endpoint, 2.0, kv_blocks=600)
    assert endpoint.kv.capacity_tokens == 0, "blocks of unknown size"


def test_of_a_large_batch_the_part_beyond_32_counts_less_for_what_a_prefill_delays() -> None:
    own_s = 1.0 + 1e-6 * 1000 * 500
    for others, counted in ((32, 32.0), (33, 32.3), (42, 35.0)):
        work = crowded(others, PLAIN, asking(1000))["work"]
        assert work == [pytest.approx(own_s * (1.3 + 0.07 * counted))]


def sharing(others: int, *, at: Endpoint, inflight: Inflight, tokens: int = 2048) -> Request:
    """A request for `tokens` tokens of which `at` holds 1600, and so many others there."""
    chain = tuple(range(tokens // BLOCK))
    for _ in range(others):
        prefill = Prefill(prompt_tokens=tokens)
        shared = inflight.charge(
            at, prefill, tokens=0, cold=False, now_s=0.0, chain=chain, block_tokens=BLOCK
        )
        inflight.first_byte(shared, 0.0)
    request = asking(tokens, {at.slot: 25})
    request.chains = (chain,)
    return request


@pytest.mark.parametrize(("others", "payers"), [(0, 1.0), (1, 1.0), (2, 1.5), (5, 3.0)])
def test_a_copy_elsewhere_is_paid_by_all_in_flight_who_share_it(others: int, payers: float) -> None:
    holder, cold = pool = endpoints(2)
    request = sharing(others, at=holder, inflight=Inflight())
    policy = ExpectedLatency(sharing_weight=0.5, own_weight=1.0)
    work = terms_of(policy(request, pool, forecast_of(pool, LINEAR), 0.0))["work"]
    # 1536 tokens are what they share in whole units of 512; the rest is the request's own.
    assert work[cold.slot] == pytest.approx(0.512 + 1.536 / payers)
    assert work[holder.slot] == pytest.approx(0.448 * (1 + 0.07 * others))


def test_nobody_shares_the_work_where_the_weight_is_nothing() -> None:
    holder, cold = pool = endpoints(2)
    request = sharing(9, at=holder, inflight=Inflight())
    work = terms_of(PLAIN(request, pool, forecast_of(pool, LINEAR), 0.0))["work"]
    assert work[cold.slot] == pytest.approx(2.048 * 1.3)


@pytest.mark.parametrize("prompt_tokens", [0, 1, 511, 512, 513, 1535, 1600])
def test_a_prompt_whose_length_was_underestimated_costs_no_less_than_nothing(
    prompt_tokens: int,
) -> None:
    holder, cold = pool = endpoints(2)
    request = sharing(50, at=holder, inflight=Inflight())
    request.prompt_tokens = prompt_tokens
    costs = ExpectedLatency()(request, pool, forecast_of(pool, LINEAR), 0.0)
    assert min(costs.seconds) >= 0.0
    assert terms_of(costs)["work"][cold.slot] > 0.0


def test_a_request_without_body_costs_one_token_and_goes_by_load() -> None:
    pool = endpoints(2)
    charged(Inflight(), pool[0], 0.5, now_s=0.0)
    costs = PLAIN(Request(), pool, forecast_of(pool), 0.0)
    work_s = 0.001 + 1e-6 * 0.5
    assert costs.seconds == [
        pytest.approx(0.5 + work_s * (1.3 + 0.07 + 0.8) + 0.11),
        pytest.approx(work_s * 1.3 + 0.1),
    ]


def test_several_prompts_in_one_request_add_up() -> None:
    decider = world(2, rates=ROUND, cost=PLAIN)
    sizes = (640, 320)
    prompts = tuple(prompt(f"p{n}", tokens).prompts[0] for n, tokens in enumerate(sizes))
    several = [Request(model="m", prompts=prompts, prompt_tokens=960) for _ in range(2)]
    first = decider.decide(several[0], subset=None, now_s=0.0)
    decider.learn(first)
    decider.first_byte(first, 1.0)
    decider.ended(first, 1.0)
    second = decider.decide(several[1], subset=None, now_s=2.0)
    assert second.pick.endpoint is first.pick.endpoint
    assert second.matched_tokens == 960
    assert second.charge.prefill.matched_tokens == 959
    # Computed anew elsewhere: all of it, as if it were one prompt.
    assert max(second.pick.totals) == pytest.approx(1.3 * (0.96 + 1e-6 * 960 * 480) + 0.1)


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [
        ({"own_weight": 0.0}, 1.0 + 0.5 * (0.07 * 2 + 0.8) + 0.2),
        ({"own_weight": 2.0}, 1.0 + 0.5 * (2.0 + 0.07 * 2 + 0.8) + 0.2),
        ({"inflight_weight": 0.5}, 1.0 + 0.5 * (1.3 + 0.5 * 2 + 0.8) + 0.2),
        ({"waiting_weight": 3.0}, 1.0 + 0.5 * (1.3 + 0.07 * 2 + 3.0) + 0.2),
        ({"chunk_tokens": 500}, 1.0 + 0.5 * (1.3 + 0.07 * 2 + 0.8) + 0.3),
        ({"chunk_tokens": 8192}, 1.0 + 0.5 * (1.3 + 0.07 * 2 + 0.8) + 0.1),
        ({"max_num_seqs": 2}, 1.0 + 0.5 * (1.3 + 0.07 * 2 + 0.8) + 0.2 + 0.1 * 300 / 2),
    ],
)
def test_weights_and_chunk_are_parameters(parameters: dict[str, float], seconds: float) -> None:
    (busy,) = endpoints(1)
    inflight = Inflight()
    inflight.first_byte(charged(inflight, busy, 0.1, now_s=0.0), 0.0)
    charged(inflight, busy, 1.0, now_s=0.0)
    rates = Rates(token_s=0.001, pair_s=0, step_s=0.1, step_request_s=0, step_token_s=0)
    policy = ExpectedLatency(**{"chunk_tokens": 1000, **parameters})
    costs = policy(asking(500), [busy], forecast_of([busy], rates), 0.0)
    assert costs.seconds == [pytest.approx(seconds)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ownWeight", -0.1), ("inflightWeight", 101), ("waitingWeight", float("nan")),
        ("decodeWeight", -1), ("sharingWeight", 101), ("memoryWeight", -1),
        ("chunkTokens", 0), ("slowStartS", -1), ("slowStartS", 61), ("maxNumSeqs", 0),
        ("unknown", 1),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({key: value}, COSTS["expected-latency"])


def test_a_backlog_ages_in_the_cost_and_never_below_nothing() -> None:
    (busy,) = endpoints(1)
    charged(Inflight(), busy, 2.0, now_s=5.0)
    idle_s = 0.001 * (1.3 + 0.07 + 0.8)
    policy, forecast = ExpectedLatency(), forecast_of([busy], LINEAR)
    for now_s, backlog_s in ((4.0, 2.0), (5.0, 2.0), (6.5, 0.5), (7.0, 0.0), (99.0, 0.0)):
        (seconds,) = policy(asking(1), [busy], forecast, now_s).seconds
        assert seconds == pytest.approx(backlog_s + idle_s)


# Ties


def test_a_tie_goes_to_the_fewest_in_flight_then_the_least_recently_chosen() -> None:
    first, second, third = pool = endpoints(3)
    first.inflight_requests, second.inflight_requests, third.inflight_requests = 2, 1, 1
    first.last_pick_number, second.last_pick_number, third.last_pick_number = 1, 9, 4
    assert least(Costs([1.0, 1.0, 1.0]), pool, Random(1)) == 2
    third.last_pick_number = 10
    assert least(Costs([1.0, 1.0, 1.0]), pool, Random(1)) == 1
    assert least(Costs([0.5, 1.0, 1.0]), pool, Random(1)) == 0, "no tie: the least cost"


def test_what_is_alike_in_everything_is_chosen_by_chance() -> None:
    pool, rng = endpoints(4), Random(1)
    counts = Counter(least(Costs([1.0, 1.0, 2.0, 1.0]), pool, rng) for _ in range(900))
    assert counts.keys() == {0, 1, 3}
    assert min(counts.values()) > 240


def test_the_same_seed_makes_the_same_picks() -> None:
    def picks(seed: int) -> list[str]:
        decider = world(8, seed=seed, rates=ROUND)
        made = []
        for n in range(100):
            decision = decider.decide(prompt(f"{n % 9} ", 100), subset=None, now_s=n / 100)
            decider.learn(decision)
            made.append(decision.pick.destination)
        return made

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)


def test_an_idle_pool_is_used_in_turn() -> None:
    decider = world(5)
    for n in range(50):
        decision = decider.decide(prompt(f"{n:03}", 3), subset=None, now_s=float(n))
        decider.first_byte(decision, n + 0.1)
        decider.ended(decision, n + 0.2)
    assert sorted(e.last_pick_number for e in decider.pool.endpoints) == [46, 47, 48, 49, 50]


# Slow start


def test_an_endpoint_that_has_not_answered_is_tried_with_one_request_at_a_time() -> None:
    decider = world(3, proven=False)
    old, other, new = decider.pool.endpoints
    old.proven = other.proven = True
    sent = [decider.decide(prompt(f"{n:03}", 100), subset=None, now_s=0.0) for n in range(12)]
    to_new = [d for d in sent if d.pick.endpoint is new]
    assert len(to_new) == 1
    decider.first_byte(to_new[0], 0.5)
    assert new.proven
    more = [decider.decide(prompt(f"m{n:02}", 100), subset=None, now_s=0.5) for n in range(5)]
    assert all(d.pick.endpoint is new for d in more), "the emptiest, once it has proved itself"


def test_slow_start_adds_its_seconds_per_waiting_request() -> None:
    (new,) = endpoints(1, proven=False)
    inflight = Inflight()
    policy, forecast = ExpectedLatency(slow_start_s=5.0), forecast_of([new], LINEAR)
    assert policy(asking(100), [new], forecast, 0.0).seconds == [pytest.approx(0.13)]
    for _ in range(2):
        charged(inflight, new, 0.0, now_s=0.0)
    # Decoding slows nobody's start.
    inflight.first_byte(charged(inflight, new, 0.0, now_s=0.0), 0.0)
    costs = policy(asking(100), [new], forecast, 0.0)
    assert terms_of(costs)["backlog"] == [pytest.approx(10.0)]
    new.proven = True
    costs = policy(asking(100), [new], forecast, 0.0)
    assert terms_of(costs)["backlog"] == [0.0]


def test_an_endpoint_that_comes_back_from_ejection_proves_itself_anew() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    for n in range(3):
        decision = decider.decide(prompt(f"{n}", 10), subset=None, now_s=0.0)
        decider.answered(decision, served=None, status=503, now_s=0.0)
        decider.ended(decision, 0.0)
    assert not endpoint.proven
    decision = decider.decide(prompt("x", 10), subset=None, now_s=2.0)
    decider.answered(decision, served=None, status=200, now_s=2.0)
    assert endpoint.proven


# What others send


def test_what_others_send_counts_once_two_scrapes_show_it() -> None:
    decider = world(2, cost=PLAIN, rates=ROUND)
    shared, own = decider.pool.endpoints
    decider.forecast.work_s_mean = 0.5
    scrape(decider, shared, 10.0, running=6, waiting=4)
    assert (shared.foreign_requests, shared.foreign_waiting) == (0, 0)
    scrape(decider, shared, 11.0, running=7, waiting=3)
    assert (shared.foreign_requests, shared.foreign_waiting) == (10, 3)
    costs = PLAIN(asking(100), [shared, own], decider.forecast, 11.0)
    work_s = 0.1 + 1e-6 * 100 * 50
    assert costs.seconds == [
        pytest.approx(1.5 + work_s * (1.3 + 0.07 * 10 + 0.8 * 3) + 2 * (0.1 + 0.1)),
        pytest.approx(work_s * 1.3 + 0.1),
    ]


def test_the_work_of_others_ages_from_its_scrape_on() -> None:
    decider = world(1)
    (shared,) = decider.pool.endpoints
    decider.forecast.work_s_mean = 0.5
    for at_s in (10.0, 11.0):
        scrape(decider, shared, at_s, now_s=at_s + 0.25, running=0, waiting=4)
    ages = (10.5, 11.0, 11.5, 13.0, 99.0)
    assert [decider.forecast.backlog_s(shared, now_s) for now_s in ages] == [2, 2, 1.5, 0, 0]
    charged(decider.inflight, shared, 1.0, now_s=99.0)
    assert decider.forecast.backlog_s(shared, 99.0) == 1.0, "what others had is done: ours is not"


def test_our_own_requests_in_a_scrape_are_not_taken_for_others() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    inflight = decider.inflight
    for _ in range(3):
        inflight.first_byte(charged(inflight, endpoint, 0.1, now_s=0.0), 0.1)
    charged(inflight, endpoint, 0.1, now_s=0.2)
    for at_s in (1.0, 2.0):
        scrape(decider, endpoint, at_s, running=3, waiting=1)
    assert (endpoint.foreign_requests, endpoint.foreign_waiting) == (0, 0)
    for at_s in (3.0, 4.0):
        scrape(decider, endpoint, at_s, running=5, waiting=2)
    assert (endpoint.foreign_requests, endpoint.foreign_waiting) == (3, 1)


def test_requests_of_ours_that_an_engine_preempted_are_not_taken_for_others() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    inflight = decider.inflight
    for _ in range(5):
        inflight.first_byte(charged(inflight, endpoint, 0.1, now_s=0.0), 0.1)
    for at_s in (1.0, 2.0):
        scrape(decider, endpoint, at_s, running=2, waiting=3)
    assert (endpoint.foreign_requests, endpoint.foreign_waiting) == (0, 0)


@pytest.mark.parametrize("missing", [{"running": 4}, {"waiting": 4}, {}])
def test_F05_an_engine_that_reports_no_counts_has_nothing_of_others(missing) -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    for at_s in (1.0, 2.0):
        scrape(decider, endpoint, at_s, running=4, waiting=4)
    assert endpoint.foreign_requests == 8
    scrape(decider, endpoint, 3.0, **missing)
    assert (endpoint.foreign_requests, endpoint.foreign_waiting) == (0, 0)
    scrape(decider, endpoint, 4.0, running=4, waiting=4)
    assert endpoint.foreign_requests == 0, "two scrapes in a row again"


# Promises


def test_of_those_that_keep_the_promise_the_cheapest_is_chosen() -> None:
    pool = endpoints(3)
    slow = Rates(token_s=0.002, pair_s=0, step_s=0, step_request_s=0, step_token_s=0)
    forecast = forecast_of(pool, LINEAR, by_slot={2: slow})
    charged(Inflight(), pool[0], 0.38, now_s=0.0)
    free = PLAIN(asking(320, {0: 5}), pool, forecast, 0.0)
    assert least(free, pool, Random(1)) == 0
    # 0.381 s behind what waits there, 0.32 s, 0.64 s: the first is late, the last is dear and late.
    kept = PLAIN(asking(320, {0: 5}, slo_ttft_s=0.35), pool, forecast, 0.0)
    assert least(kept, pool, Random(1)) == 1
    late = terms_of(kept)["late"]
    assert late[1] == 0.0
    assert min(late[0], late[2]) > max(free.seconds)
    assert kept.seconds == [
        pytest.approx(sum(parts)) for parts in zip(*terms_of(kept).values(), strict=True)
    ], "the terms still add up"
    # Two that keep it: the cheaper, not the sooner.
    both = PLAIN(asking(320, {0: 5}, slo_ttft_s=0.5), pool, forecast, 0.0)
    assert least(both, pool, Random(1)) == 0


def test_a_dear_endpoint_that_keeps_the_promise_comes_before_cheap_ones_that_miss_it() -> None:
    cheap, dear = pool = endpoints(2)
    inflight = Inflight()
    # Many that decode make it dear for others, and keep its first tokens as prompt as ever.
    for _ in range(90):
        inflight.first_byte(charged(inflight, dear, 0.0, now_s=0.0), 0.0)
    charged(inflight, cheap, 0.5, now_s=0.0)
    forecast = forecast_of(pool, LINEAR)
    asked = {"prompt_tokens": 400}
    free = PLAIN(Request(**asked), pool, forecast, 0.0)
    assert free.seconds[0] < free.seconds[1]
    kept = PLAIN(Request(**asked, slo_ttft_s=0.6), pool, forecast, 0.0)
    assert kept.seconds[0] > kept.seconds[1]
    # Nobody promised less: cost decides again.
    assert PLAIN(Request(**asked, slo_ttft_s=60.0), pool, forecast, 0.0).seconds == free.seconds


def test_a_promise_per_output_token_is_kept_too() -> None:
    pool = endpoints(2)
    rates = Rates(token_s=0.001, pair_s=0, step_s=0.01, step_request_s=0.001, step_token_s=0)
    inflight = Inflight()
    for _ in range(50):
        inflight.first_byte(charged(inflight, pool[0], 0.0, now_s=0.0), 0.0)
    forecast = forecast_of(pool, rates)
    held = asking(640, {0: 10})
    assert least(PLAIN(held, pool, forecast, 0.0), pool, Random(1)) == 0
    # 10 ms and 1 ms for each of 51 there; 11 ms alone.
    promised = asking(640, {0: 10}, slo_tpot_s=0.05)
    assert least(PLAIN(promised, pool, forecast, 0.0), pool, Random(1)) == 1


@pytest.mark.parametrize("promised_s", [0.4, 0.05, 1e-9, 5e-324])
def test_if_nobody_keeps_the_promise_the_least_late_is_chosen(promised_s: float) -> None:
    holder, prompt_ = pool = endpoints(2)
    inflight = Inflight()
    for _ in range(90):
        inflight.first_byte(charged(inflight, prompt_, 0.0, now_s=0.0), 0.0)
    charged(inflight, holder, 0.7, now_s=0.0)
    forecast = forecast_of(pool, LINEAR)
    request = Request(prompt_tokens=500)
    assert least(PLAIN(request, pool, forecast, 0.0), pool, Random(1)) == 0
    late = Request(prompt_tokens=500, slo_ttft_s=promised_s)  # 1.2 s or 0.5 s
    costs = PLAIN(late, pool, forecast, 0.0)
    assert least(costs, pool, Random(1)) == 1
    assert all(map(math.isfinite, costs.seconds))


@pytest.mark.parametrize("promised_s", [9e-4, 1e-6, 5e-324])
def test_a_promise_below_a_millisecond_is_missed_and_costs_no_less_than_nothing(
    promised_s: float,
) -> None:
    pool = endpoints(2)
    quick = Rates(token_s=1e-7, pair_s=0, step_s=9.5e-4, step_request_s=0, step_token_s=0)
    forecast = forecast_of(pool, quick)
    for promise in ({"slo_ttft_s": promised_s}, {"slo_tpot_s": promised_s}):
        request = Request(prompt_tokens=1, **promise)
        costs = PLAIN(request, pool, forecast, 0.0)
        assert all(late > 0.0 for late in terms_of(costs)["late"])


# Prefixes


def test_what_is_being_computed_counts_as_held_for_those_behind_it() -> None:
    decider = world(2, rates=LINEAR)
    first = decider.decide(prompt("a", 640), subset=None, now_s=0.0)
    decider.learn(first)
    assert first.charge.work_s == pytest.approx(0.64)
    sibling = prompt("a", 640, tail="b", tail_tokens=64)
    second = decider.decide(sibling, subset=None, now_s=0.0)
    assert second.pick.endpoint is first.pick.endpoint
    terms = {t.name: t.scores for t in second.pick.terms}
    at = list(second.pick.candidates).index(first.pick.endpoint)
    assert terms["work"][at] == pytest.approx(0.064 * (1.3 + 0.07 + 0.8))
    assert terms["backlog"][at] == pytest.approx(0.64)
    assert second.charge.work_s == pytest.approx(0.064)
    assert second.charge.prefill.ttft_s == pytest.approx(0.704), "first the one before it"


def at_home_s(others: int, own_s: float) -> float:
    """Cost of a request of so much work behind others alike that all wait."""
    return own_s * (others + 1.3 + 0.87 * others)


def test_G07_a_popular_prefix_spreads_only_when_its_queue_costs_more_than_its_prefill() -> None:
    decider = world(4, rates=LINEAR, cost=PLAIN)
    warm = decider.decide(prompt("hot", 6400), subset=None, now_s=0.0)
    decider.learn(warm)
    decider.first_byte(warm, 6.4)
    decider.ended(warm, 6.5)
    picks = []
    for n in range(28):  # each has 192 tokens of its own, and all of them wait
        request = prompt("hot", 6400, tail=f"{n:03}", tail_tokens=192)
        decision = decider.decide(request, subset=None, now_s=10.0)
        decider.learn(decision)
        picks.append(decision.pick.endpoint)
    home = warm.pick.endpoint
    away = next(n for n, endpoint in enumerate(picks) if endpoint is not home)
    # Computed elsewhere: 6.592 s, which counts 1.3 times.
    assert at_home_s(away, 0.192) > 6.592 * 1.3 > at_home_s(away - 1, 0.192)
    assert picks[away + 1] is picks[away], "what is computed there now is a match for the next"


def burst(policy: ExpectedLatency, count: int) -> list[int]:
    """Requests per endpoint used, of so many at once that share a long, new prefix."""
    decider = world(16, rates=LINEAR, cost=policy)
    for n in range(count):
        request = prompt("new", 6400, tail=f"{n:03}", tail_tokens=64)
        decider.learn(decider.decide(request, subset=None, now_s=0.0))
    return [e.inflight_requests for e in decider.pool.endpoints if e.inflight_requests]


def test_G07_a_burst_of_a_new_prefix_makes_one_copy() -> None:
    assert burst(ExpectedLatency(sharing_weight=0.0), 8) == [8]
    assert burst(ExpectedLatency(), 4) == [4]


def test_G07_copies_come_earlier_the_more_those_who_share_pay_for_them() -> None:
    used = [len(burst(ExpectedLatency(sharing_weight=w), 8)) for w in (0.0, 0.1, 1.0)]
    assert used[0] < used[1] < used[2] < 8


def test_G07_two_hundred_at_once_use_the_idle_endpoints_too() -> None:
    decider = world(8, rates=LINEAR)
    for n in range(200):
        request = prompt("new", 10_000, tail=f"{n:03}", tail_tokens=100)
        decider.learn(decider.decide(request, subset=None, now_s=0.0))
    counts = sorted(e.inflight_requests for e in decider.pool.endpoints)
    assert counts[0] >= 200 // 8 // 2
    assert counts[-1] <= 200 // 8 * 2


def test_J06_a_burst_of_different_prompts_is_spread_evenly() -> None:
    decider = world(4, rates=ROUND)
    for n in range(40):
        decider.learn(decider.decide(prompt(f"{n:04}", 256), subset=None, now_s=0.0))
    assert [e.inflight_requests for e in decider.pool.endpoints] == [10] * 4


# Bounds


def test_whatever_is_in_flight_costs_are_finite_and_not_negative() -> None:
    rng = Random(7)
    pool = endpoints(3)
    forecast = forecast_of(pool, Rates())
    inflight = Inflight()
    alive = []
    for n in range(3000):
        seconds = rng.choice((1e-10, 1e-6, 0.3, 7.0, 1e5, 1e9))
        alive.append(charged(inflight, rng.choice(pool), seconds, now_s=float(n)))
        while len(alive) > rng.randint(1, 6):
            inflight.release(alive.pop(rng.randrange(len(alive))))
        tokens = rng.choice((0, 1, 10**9))
        request = asking(tokens, {0: rng.choice((1, 10**9))}, slo_ttft_s=rng.choice((None, 1e-9)))
        costs = PLAIN(request, pool, forecast, n + rng.choice((-5.0, 0.0, 5.0)))
        for scores in (costs.seconds, *terms_of(costs).values()):
            assert all(0.0 <= score < math.inf for score in scores), n
        for endpoint in pool:
            exact_s = math.fsum(work.work_s for work in endpoint.backlog)
            assert endpoint.backlog.work_s == pytest.approx(exact_s, abs=1e-4)


def test_the_block_size_of_the_match_is_the_one_that_counts() -> None:
    (holder,) = endpoints(1)
    request = asking(1000, {0: 5})
    assert request.match.block_tokens == BLOCK
    costs = OWN_ONLY(request, [holder], forecast_of([holder], LINEAR), 0.0)
    assert costs.seconds == [pytest.approx(0.001 * (1000 - 5 * BLOCK))]
