"""Small cases by hand; what comes of it on engines is in tests/simulation."""

import math

import pytest

from epp.core.latency.fit import (
    LEVEL_MAX,
    PSEUDO_COUNT,
    STARVED_FACTOR,
    WEIGHT_MAX,
    WINDOW_COUNT,
    PoolFit,
    Shape,
    predict_s,
)
from epp.core.latency.observe import (
    GROUP_PREFILLS,
    GROUP_PREFILLS_MAX,
    PREFILLS_REMEMBERED,
    FirstBytes,
    Histograms,
    PrefillTime,
)
from epp.core.latency.rates import RATE_FACTOR_MAX, RateLearner, Rates

PRIOR = Rates()
STEP_S = PRIOR.decode_step_s(8, 30_000)


def serve(
    learner: RateLearner,
    slot: int = 0,
    *,
    prefills: int = 1,
    speed: float = 1.0,
    tokens: int = 8_000,
    from_s: float = 0.0,
    every_s: float = 10_000.0,
) -> None:
    """Prefills on an engine of the prior's shape that is idle before each."""
    for number in range(prefills):
        steps = max(1.0, tokens / 8192)
        learner.first_byte(
            slot,
            uncached_tokens=tokens,
            matched_tokens=1_000,
            service_s=(PRIOR.work_s(tokens, 1_000) + steps * STEP_S) / speed,
            decoding=8,
            decode_tokens=30_000,
            now_s=from_s + number * every_s,
        )


def slowness(learner: RateLearner, slot: int = 0) -> float:
    """Learned work / the prior's."""
    return learner.measured(slot).token_s / PRIOR.token_s


# -- rates ---------------------------------------------------------------------------------


def test_work_is_linear_in_new_tokens_and_quadratic_in_attention() -> None:
    rates = Rates(token_s=1e-3, pair_s=1e-6)
    assert rates.work_s(100, 0) == pytest.approx(0.1 + 1e-6 * 100 * 50)
    assert rates.work_s(100, 1_000) == pytest.approx(0.1 + 1e-6 * 100 * 1_050)
    assert rates.work_s(0, 1_000) == 0.0


def test_a_decode_step_costs_its_base_its_requests_and_their_context() -> None:
    rates = Rates(step_s=1.0, step_request_s=0.1, step_token_s=0.001)
    assert rates.decode_step_s(3, 200) == pytest.approx(1.0 + 0.3 + 0.2)


# -- levels --------------------------------------------------------------------------------


def test_before_any_evidence_the_rates_are_the_prior() -> None:
    learner = RateLearner(PRIOR)
    assert learner.rates(5) is PRIOR
    assert learner.version == 0
    assert learner.state(5).learned_s is None


def test_one_observation_moves_an_endpoint_by_a_known_part() -> None:
    fit = PoolFit()
    fit.learn(0, (1.0, 0.0, 0.0), 2.0, count=1.0, worth=1.0)
    pool_log = math.log(2) / (1 + PSEUDO_COUNT)
    assert fit.pool_log() == pytest.approx(pool_log)
    expected = (math.log(2) + PSEUDO_COUNT * pool_log) / (1 + PSEUDO_COUNT)
    assert fit.level_log(0, fit.pool_log()) == pytest.approx(expected)
    assert fit.level_log(1, fit.pool_log()) == fit.pool_log()


def test_the_level_is_the_median_by_worth() -> None:
    fit = PoolFit()
    for observed_s, worth in ((1.0, 1.0), (2.0, 1.0), (4.0, 3.0), (1e9, 1.0)):
        fit.learn(0, (1.0, 0.0, 0.0), observed_s, count=1.0, worth=worth)
    # Far from the pool's pull: the weight of six observations against that of two, twice.
    pull = PSEUDO_COUNT / (6 + PSEUDO_COUNT)
    level_log = fit.level_log(0, fit.pool_log())
    weights = fit.shape.weights
    median = math.log(4.0) * (1 - pull * pull)
    assert level_log + math.log(weights[0]) == pytest.approx(median, abs=0.05)


def test_learned_work_is_biased_upwards_by_the_parameter() -> None:
    for bias_ratio in (1.0, 1.05, 1.3):
        learner = RateLearner(work_bias_ratio=bias_ratio)
        serve(learner, prefills=40)
        assert slowness(learner) == pytest.approx(bias_ratio, rel=1e-6)
        assert learner.rates(0).step_s == pytest.approx(PRIOR.step_s)


@pytest.mark.parametrize("speed", [0.1, 0.5, 1.5, 10.0])
def test_thirty_prefills_tell_the_speed_of_an_endpoint(speed: float) -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    serve(learner, prefills=31, speed=speed)
    assert slowness(learner) == pytest.approx(1 / speed, rel=0.03)
    assert learner.measured(0).pair_s / PRIOR.pair_s == pytest.approx(1 / speed, rel=0.03)
    assert learner.measured(0).step_s / PRIOR.step_s == pytest.approx(1 / speed, rel=0.05)


def test_a_slowed_endpoint_is_found_within_twenty_prefills() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in range(4):
        serve(learner, slot, prefills=60)
    serve(learner, 0, prefills=20, speed=0.5, from_s=1e6)
    assert slowness(learner, 0) == pytest.approx(2.0, rel=0.1)
    assert slowness(learner, 1) == pytest.approx(1.0, rel=0.03)


def test_fifteen_stalls_in_a_row_do_not_move_an_endpoint() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    serve(learner, prefills=60)
    serve(learner, prefills=15, speed=0.01, from_s=1e6)
    assert slowness(learner) == pytest.approx(1.0, rel=0.05)


def test_a_new_endpoint_starts_at_the_pools_rates() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in range(3):
        serve(learner, slot, prefills=40, speed=0.25)
    learner.joined(7)
    assert slowness(learner, 7) == pytest.approx(4.0, rel=0.05)
    assert learner.state(7).prefills == 0


def test_a_reused_slot_knows_nothing_of_the_endpoint_before() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in range(6):
        serve(learner, slot, prefills=40, speed=0.1 if slot == 0 else 1.0)
    version = learner.version
    learner.forget(0)
    assert learner.version > version
    learner.joined(0)
    assert slowness(learner, 0) < 2.0
    assert learner.rates(0) is learner.rates(99)


def test_when_the_whole_pool_was_replaced_its_speed_is_remembered() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    serve(learner, 0, prefills=40, speed=0.1)
    learner.forget(0)
    serve(learner, 1, prefills=3, speed=0.1)
    assert slowness(learner, 1) == pytest.approx(10.0, rel=0.05)


def test_a_restarted_endpoint_keeps_its_speed_and_learns_a_new_one_sooner() -> None:
    needed = {}
    for restarted in (True, False):
        learner = RateLearner(work_bias_ratio=1.0)
        serve(learner, 0, prefills=60, speed=0.5)
        serve(learner, 1, prefills=60, speed=0.5)
        if restarted:
            learner.restarted(0)
            assert slowness(learner, 0) == pytest.approx(2.0, rel=0.1)
        for needed[restarted] in range(1, 60):
            serve(learner, 0, speed=1.0, from_s=1e6 + 1e4 * needed[restarted])
            if slowness(learner, 0) < 1.3:
                break
    assert needed[True] <= 8 < needed[False]


def test_a_restart_drops_the_group_that_was_going_on() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    serve(learner, prefills=40)
    before = learner.state(0)
    serve(learner, prefills=1, from_s=1e6)
    assert learner.state(0).prefills == before.prefills + 1
    learner.restarted(0)
    serve(learner, prefills=1, from_s=2e6)
    assert learner.state(0).prefills == before.prefills + 1


def test_rates_stay_within_bounds_whatever_is_seen() -> None:
    fit = PoolFit()
    for _ in range(300):
        fit.learn(0, (1.0, 0.0, 0.0), 1e12, count=1.0, worth=1.0)
    assert fit.level_log(0, fit.pool_log()) <= math.log(LEVEL_MAX) < 5.0
    shape = Shape()
    for number in range(1_000):
        shape.learn(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))[number % 2], (1e9, 1e-9)[number % 2])
    assert all(1 / WEIGHT_MAX <= weight <= WEIGHT_MAX for weight in shape.weights)
    learner = RateLearner(work_bias_ratio=100.0)
    serve(learner, prefills=100, speed=1e-6)
    assert slowness(learner) == pytest.approx(RATE_FACTOR_MAX)
    assert learner.rates(0).pair_s / PRIOR.pair_s == pytest.approx(RATE_FACTOR_MAX)


def test_a_clock_that_went_back_counts_as_no_service() -> None:
    learners = RateLearner(), RateLearner()
    for number in range(60):
        for learner, least_s in zip(learners, (0.0, -1e6), strict=True):
            learner.first_byte(
                0,
                uncached_tokens=1_000,
                matched_tokens=0,
                service_s=(0.3, least_s)[number % 2],
                decoding=0,
                decode_tokens=0,
                now_s=1.0,
            )
    assert learners[0].rates(0) == learners[1].rates(0) != PRIOR


def test_an_endpoint_that_gets_no_work_is_tried_again() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in (0, 1):
        serve(learner, slot, prefills=40, speed=0.1 if slot == 0 else 1.0)
    assert slowness(learner, 0) > 8.0
    serve(learner, 1, prefills=int(16 * STARVED_FACTOR), from_s=1e6)
    assert slowness(learner, 0) < 1.5


# -- time ----------------------------------------------------------------------------------


def test_idle_hours_change_nothing() -> None:
    busy, idle = RateLearner(), RateLearner()
    serve(busy, prefills=40, speed=0.5, every_s=10.0)
    serve(idle, prefills=40, speed=0.5, every_s=36_000.0)
    assert busy.rates(0) == idle.rates(0)
    assert slowness(idle) > 1.9


def test_the_same_events_give_the_same_rates() -> None:
    def learned() -> list[Rates]:
        learner = RateLearner()
        for slot in range(5):
            serve(learner, slot, prefills=20 + slot, speed=0.3 + 0.3 * slot)
        return [learner.rates(slot) for slot in range(6)]

    assert learned() == learned()


def test_the_version_tells_when_to_read_again() -> None:
    learner = RateLearner()
    seen, version = learner.rates(0), learner.version
    for number in range(200):
        serve(learner, number % 3, speed=0.5, from_s=1e4 * number)
        if learner.version == version:
            assert learner.rates(0) == seen
        seen, version = learner.rates(0), learner.version
    serve(learner, 0, prefills=50, speed=0.5, from_s=1e7)
    settled = learner.version
    serve(learner, 0, prefills=200, speed=0.5, from_s=1e8)
    assert learner.version - settled <= 5


# -- first bytes ---------------------------------------------------------------------------


def test_a_group_ends_when_the_engine_was_idle() -> None:
    first_bytes = FirstBytes()
    assert first_bytes.add((1.0, 0.0, 0.1), 1.2, 10.0, same_step=False) is None
    assert first_bytes.add((2.0, 0.0, 0.1), 2.3, 12.3, same_step=False) is None
    ended = first_bytes.add((1.0, 0.0, 0.1), 1.0, 20.0, same_step=False)
    assert ended is not None
    assert ended.parts == pytest.approx((3.0, 0.0, 0.2))
    assert (ended.observed_s, ended.prefills) == (pytest.approx(3.5), 2)


def test_a_group_on_a_busy_engine_ends_but_not_inside_a_step() -> None:
    first_bytes = FirstBytes()
    for number in range(GROUP_PREFILLS):
        assert first_bytes.add((1.0, 0.0, 0.1), 1.0, 1.0 + number, same_step=False) is None
    assert first_bytes.same_step(0.0, 4.0, 0.012)
    assert first_bytes.add((1.0, 0.0, 0.0), 0.0, 4.0, same_step=True) is None
    ended = first_bytes.add((1.0, 0.0, 0.1), 1.0, 5.0, same_step=False)
    assert ended is not None
    assert ended.prefills == GROUP_PREFILLS + 1


def test_a_step_without_end_does_not_keep_a_group_open() -> None:
    first_bytes = FirstBytes()
    ended = [
        first_bytes.add((1.0, 0.0, 0.0), 0.0, 1.0, same_step=True)
        for _ in range(GROUP_PREFILLS_MAX + 1)
    ]
    assert [group is None for group in ended] == [True] * GROUP_PREFILLS_MAX + [False]


def test_prompts_that_share_a_step_are_not_taken_for_infinitely_fast() -> None:
    alone, shared = (RateLearner(work_bias_ratio=1.0) for _ in range(2))
    serve(alone, prefills=40)
    work_s = 3 * PRIOR.work_s(2_000, 0) + STEP_S
    for number in range(40):
        for place in range(3):
            shared.first_byte(
                0,
                uncached_tokens=2_000,
                matched_tokens=0,
                service_s=0.0 if place else work_s,
                decoding=8,
                decode_tokens=30_000,
                now_s=100.0 * number,
            )
    assert slowness(shared) == pytest.approx(slowness(alone), rel=0.02)


def test_order_within_a_group_does_not_matter() -> None:
    def learned(sizes: tuple[int, ...]) -> float:
        learner = RateLearner(work_bias_ratio=1.0)
        now_s = 0.0
        for _ in range(60):
            # The engine takes the prompts in ascending order; the router thinks of `sizes`.
            for size, served in zip(sizes, sorted(sizes), strict=True):
                service_s = PRIOR.work_s(served, 0) + STEP_S
                now_s += service_s
                learner.first_byte(
                    0,
                    uncached_tokens=size,
                    matched_tokens=0,
                    service_s=service_s,
                    decoding=8,
                    decode_tokens=30_000,
                    now_s=now_s,
                )
        return slowness(learner)

    assert learned((7_000, 500, 3_000, 1_500)) == pytest.approx(1.0, rel=0.03)


# -- decode --------------------------------------------------------------------------------


def test_decode_steps_are_learned_with_their_load() -> None:
    true = Rates(step_s=0.03, step_request_s=3e-4, step_token_s=3e-7)
    learner = RateLearner()
    for number in range(200):
        requests, context = 1 + number % 40, 2_000 * (1 + number % 7)
        learner.decoded(
            0,
            step_s=true.decode_step_s(requests, context),
            inflight=requests,
            inflight_tokens=context,
            now_s=float(number),
        )
    for requests, context in ((1, 2_000), (20, 10_000), (40, 14_000)):
        learned_s = learner.measured(0).decode_step_s(requests, context)
        assert learned_s == pytest.approx(true.decode_step_s(requests, context), rel=0.1)


def test_until_decode_was_seen_prefill_tells_its_speed() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    serve(learner, prefills=40, speed=0.1)
    assert learner.measured(0).step_s == pytest.approx(10 * PRIOR.step_s, rel=0.05)


def test_an_answers_time_is_counted_less_the_prefills_in_it() -> None:
    time = PrefillTime()
    assert time.share(10.0, 5.0) == 0.0
    for now_s in (10.0, 12.0, 14.0, 16.0):
        time.add(1.0, now_s)
    # The answer began with the first byte at 12: the prefills of 14 and 16 were in its way.
    assert time.share(20.0, 8.0) == pytest.approx(2 / 8)
    assert time.share(20.0, None) == pytest.approx(3 / 10)
    assert time.share(16.0, 0.0) == 0.0


def test_a_decode_that_prefills_stalled_is_not_taken_for_slow() -> None:
    steps = {}
    for decode_s in (100.0, None):
        learner = RateLearner(work_bias_ratio=1.0)
        for number in range(100):
            # Half of the time is prefill, so that each token takes twice its step.
            serve(learner, speed=1.0, from_s=number * 2 * PRIOR.work_s(8_000, 1_000))
            if number > 20:
                learner.decoded(
                    0,
                    step_s=2 * STEP_S,
                    inflight=8,
                    inflight_tokens=30_000,
                    now_s=number * 2 * PRIOR.work_s(8_000, 1_000),
                    decode_s=decode_s and 10 * PRIOR.work_s(8_000, 1_000),
                )
        steps[decode_s] = learner.rates(0).decode_step_s(8, 30_000)
    assert steps[100.0] == pytest.approx(STEP_S, rel=0.08)
    assert steps[None] == pytest.approx(STEP_S, rel=0.08)


# -- histograms ----------------------------------------------------------------------------


def scrape(learner: RateLearner, number: int, *, slowness: float) -> None:
    prefill_s = slowness * (PRIOR.work_s(4_000, 0) + PRIOR.step_s)
    learner.histograms(
        0, prefill_s=prefill_s, computed_tokens=4_000, prefills=1, now_s=10.0 * number
    )


def test_histograms_tell_the_speed_where_first_bytes_are_hidden() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for number in range(42):
        scrape(learner, number, slowness=3.0)
    assert slowness(learner) == pytest.approx(3.0, rel=0.05)
    assert learner.state(0).prefills == 40
    assert learner.state(0).learned_s == 400.0


def test_histograms_are_not_heard_where_first_bytes_are_seen() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for number in range(200):
        serve(learner, prefills=1, from_s=10.0 * number)
        scrape(learner, number, slowness=0.3)
    assert learner.state(0).prefills == 199
    assert slowness(learner) == pytest.approx(1.0, rel=0.02)


def test_prefill_times_that_overlap_cannot_exceed_the_time_that_went_by() -> None:
    histograms = Histograms()
    assert histograms.add(prefill_s=9.9, computed_tokens=9, prefills=9, now_s=100.0) is None
    for now_s in (101.0, 102.0, 103.0):
        ended = histograms.add(prefill_s=4.0, computed_tokens=1_000.0, prefills=1, now_s=now_s)
        assert ended is None
    ended = histograms.add(prefill_s=4.0, computed_tokens=1_000.0, prefills=1, now_s=104.0)
    assert ended is not None
    # 16 s of prefill in 4 s.
    assert (ended.tokens, ended.observed_s, ended.prefills) == (4_000.0, 4.0, 4)


def test_a_long_prefill_that_began_before_the_scrape_counts_as_one() -> None:
    histograms = Histograms()
    histograms.add(prefill_s=0.0, computed_tokens=0, prefills=0, now_s=100.0)
    ended = histograms.add(prefill_s=40.0, computed_tokens=80_000, prefills=4, now_s=101.0)
    assert ended is not None
    assert ended.observed_s == 10.0


def test_an_engine_whose_counters_went_back_does_no_harm() -> None:
    learner = RateLearner()
    for number in range(8):
        learner.histograms(
            0, prefill_s=-50.0, computed_tokens=-1e6, prefills=-9, now_s=float(number)
        )
    assert learner.rates(0) is learner.rates(1)


# -- shape ---------------------------------------------------------------------------------


def test_the_shape_is_found_from_prompts_of_different_sizes() -> None:
    true = (0.5, 4.0, 1.0)
    sizes = [(size / 10, size * size / 200, 0.2) for size in range(1, 21)]
    level = sum(predict_s(s, true) / sum(s) for s in sizes) / len(sizes)

    def errors(shape: Shape) -> list[float]:
        return [predict_s(s, shape.weights) * level / predict_s(s, true) for s in sizes]

    shape = Shape()
    assert max(errors(shape)) / min(errors(shape)) > 1.4
    for number in range(400):
        parts = sizes[number % len(sizes)]
        shape.learn(parts, predict_s(parts, true) / level)
    # The level is not the shape's: only ratios count.
    assert max(errors(shape)) / min(errors(shape)) < 1.2
    assert shape.weights[1] > 3 * shape.weights[0]


def test_without_different_prompts_the_priors_ratios_stay() -> None:
    shape = Shape()
    for _ in range(400):
        shape.learn((0.3, 0.2, 0.1), 5.0)
    assert shape.weights == pytest.approx((1.0, 1.0, 1.0), rel=0.01)


# -- people, memory ------------------------------------------------------------------------


def test_the_state_tells_speed_samples_age_and_error() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in range(3):
        serve(learner, slot, prefills=41, speed=0.5 if slot == 0 else 1.0)
    learner.decoded(0, step_s=0.02, inflight=1, inflight_tokens=100, now_s=5e6)
    slow, fast = learner.state(0), learner.state(1)
    assert slow.rates is learner.rates(0)
    assert fast.speed_ratio / slow.speed_ratio == pytest.approx(2.0, rel=0.1)
    assert (slow.prefills, slow.answers, fast.answers) == (40, 1, 0)
    assert slow.learned_s == 5e6
    assert fast.learned_s == 39 * 10_000.0
    assert fast.error_ratio is not None
    assert fast.error_ratio < 0.1
    serve(learner, 1, prefills=2, speed=0.5, from_s=1e7)
    error_ratio = learner.state(1).error_ratio
    assert error_ratio is not None
    assert error_ratio > fast.error_ratio + 0.05


def test_the_first_error_is_the_whole_error() -> None:
    learner = RateLearner()
    serve(learner, prefills=2, speed=0.5)
    assert learner.state(0).error_ratio == pytest.approx(1.0)


def test_an_answer_that_took_no_time_says_nothing() -> None:
    learner = RateLearner()
    learner.decoded(0, step_s=0.0, inflight=1, inflight_tokens=100, now_s=1.0)
    assert learner.state(0).answers == 0
    assert learner.rates(0) is learner.rates(1)


def test_what_an_endpoint_costs_in_memory_is_bounded() -> None:
    learner = RateLearner()
    for number in range(2_000):
        serve(learner, prefills=1, from_s=1e4 * number)
        learner.decoded(0, step_s=0.02, inflight=1, inflight_tokens=100, now_s=1e4 * number)
    for fit in (learner._prefill, learner._decode):
        assert len(fit._evidence[0]._seen) <= WINDOW_COUNT
    assert len(learner._slots[0].prefill_time._done) == PREFILLS_REMEMBERED


# -- classes of speed ----------------------------------------------------------------------


def served(learner: RateLearner, slot: int, speed: float, *, prefills: int, at_s: float) -> None:
    for n in range(prefills):
        learner.first_byte(
            slot,
            uncached_tokens=4000,
            matched_tokens=0,
            service_s=(PRIOR.work_s(4000, 0) + 0.012) / speed,
            decoding=0,
            decode_tokens=0,
            now_s=at_s + 10.0 * n,
        )


def test_G02_endpoints_that_look_nearly_alike_have_equal_rates() -> None:
    """Else the one that looks a hair faster takes every request of an idle pool."""
    learner = RateLearner(work_bias_ratio=1.0)
    for n, speed in enumerate((0.98, 1.0, 1.03)):
        served(learner, n, speed, prefills=40, at_s=0.0)
    rates = [learner.rates(slot) for slot in range(3)]
    assert rates[0] == rates[1] == rates[2]
    assert learner.measured(0).token_s > 1.02 * learner.measured(2).token_s


def test_an_endpoint_of_another_speed_has_rates_of_its_own_within_its_class() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for n, speed in enumerate((1.0, 1.0, 1.0, 0.5)):
        served(learner, n, speed, prefills=40, at_s=0.0)
    assert learner.rates(0) == learner.rates(1) == learner.rates(2)
    assert 1.7 < learner.rates(3).token_s / learner.rates(0).token_s < 2.3
    for slot in range(4):
        own, of_class = learner.measured(slot).token_s, learner.rates(slot).token_s
        assert abs(of_class / own - 1) < 0.09


def test_an_endpoint_at_a_border_does_not_change_its_class_to_and_fro() -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for slot in range(8):
        served(learner, slot, 1.0, prefills=40, at_s=0.0)
    seen = set()
    for n in range(40):
        served(learner, 0, 0.945 if n % 2 else 0.955, prefills=1, at_s=1000.0 + 10 * n)
        seen.add(learner.rates(0) == learner.rates(1))
    assert seen == {True}


def test_histograms_alone_make_nobody_faster_than_the_pool() -> None:
    """Where first bytes are hidden a herd goes unseen: better to miss that one is fast."""
    learner = RateLearner(work_bias_ratio=1.0)
    for slot, speed in enumerate((1.0, 1.0, 3.0, 0.3)):
        for n in range(41):
            learner.histograms(
                slot,
                prefill_s=n and (PRIOR.work_s(4000, 0) + 0.012) / speed,
                computed_tokens=n and 4000,
                prefills=n and 1,
                now_s=100.0 + 10.0 * n,
            )
    assert learner.measured(2).token_s < 0.5 * learner.rates(2).token_s
    assert all(learner.rates(2).token_s <= learner.rates(slot).token_s for slot in range(4))
    assert learner.rates(2) is learner._pool_rates
    assert learner.rates(3).token_s > 1.5 * learner.rates(0).token_s
