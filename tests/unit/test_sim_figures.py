"""What one run is judged by, and how seeds are compared, against values computed by hand."""

from math import sqrt

import pytest

from bench.sim.figures import (
    QUANTILES,
    T_975,
    Interval,
    figures_of,
    load_over_time,
    paired_difference,
    t_interval,
    ttft_quantiles_s,
)
from bench.sim.model import Outcome, SimRequest


def outcome(
    number: int,
    *,
    ttft_s: float = 1.0,
    tokens: int = 11,
    itl_s: float = 0.01,
    endpoint: int = 0,
    cached_tokens: int = 0,
) -> Outcome:
    request = SimRequest(
        number=number, arrival_s=10.0 * number, prompt_tokens=1000, output_tokens=tokens
    )
    first_s = request.arrival_s + ttft_s
    return Outcome(
        request,
        endpoint=endpoint,
        dispatched_s=request.arrival_s + 0.25,
        first_s=first_s,
        ended_s=first_s + itl_s * (tokens - 1),
        cached_tokens=cached_tokens,
    )


def refused(number: int) -> Outcome:
    request = SimRequest(number=number, arrival_s=0.0, prompt_tokens=9, output_tokens=9)
    return Outcome(request, refused=True)


def test_latencies_are_those_of_the_answered_requests() -> None:
    outcomes = [outcome(n, ttft_s=float(n + 1), itl_s=0.01 * (n + 1)) for n in range(10)]
    figures = figures_of([*outcomes, refused(10)], [], endpoints=1)
    assert figures.requests == 11
    assert (figures.refused, figures.lost) == (1, 0)
    assert figures.ttft_mean_s == pytest.approx(5.5)
    told = (figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s, figures.ttft_max_s)
    assert told == pytest.approx((5.0, 9.0, 10.0, 10.0))
    assert figures.tpot_p50_s == pytest.approx(0.05)
    assert figures.tpot_p99_s == pytest.approx(0.10)
    assert figures.e2e_mean_s == pytest.approx(5.5 + 0.55)
    assert figures.hold_mean_s == pytest.approx(0.25)


def test_a_good_request_meets_both_limits_up_to_their_very_values() -> None:
    outcomes = [
        outcome(0, ttft_s=2.0, itl_s=0.0499),
        outcome(1, ttft_s=2.001),
        outcome(2, itl_s=0.0501),
        outcome(3, tokens=1),
        refused(4),
    ]
    assert figures_of(outcomes, [], endpoints=1).goodput_ratio == pytest.approx(2 / 5)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    figures = figures_of([outcome(0, tokens=1)], [], endpoints=1)
    assert figures.tpot_p50_s is None
    assert figures.tpot_p99_s is None


def test_the_hit_ratio_weighs_by_tokens() -> None:
    outcomes = [outcome(0, cached_tokens=1000), outcome(1), outcome(2), outcome(3)]
    assert figures_of(outcomes, [], endpoints=1).hit_ratio == 0.25


def test_balance_counts_endpoints_that_got_nothing() -> None:
    outcomes = [outcome(n, endpoint=n % 2) for n in range(4)]
    assert figures_of(outcomes, [], endpoints=2).requests_balance_ratio == 1.0
    assert figures_of(outcomes, [], endpoints=4).requests_balance_ratio == 2.0


def test_balance_in_flight_is_averaged_over_time_and_idle_moments_do_not_count() -> None:
    timeline = [(0.0, (0, 0)), (1.0, (2, 0)), (2.0, (4, 4))]
    figures = figures_of([outcome(0)], timeline, endpoints=2)
    assert figures.inflight_balance_ratio == pytest.approx((2 + 4) / (1 + 4))
    idle = figures_of([outcome(0)], [(0.0, (0, 0))], endpoints=2)
    assert idle.inflight_balance_ratio is None


def test_a_request_that_neither_ended_nor_was_refused_is_lost() -> None:
    open_still = outcome(1)
    open_still.ended_s = -1.0
    assert figures_of([outcome(0), open_still], [], endpoints=1).lost == 1


def test_a_run_without_an_answer_has_no_figures() -> None:
    with pytest.raises(ValueError, match="none of 2 requests was answered"):
        figures_of([refused(0), refused(1)], [], endpoints=1)


def test_quantiles_go_from_the_fastest_to_the_slowest_answer() -> None:
    values = ttft_quantiles_s([outcome(n, ttft_s=float(n)) for n in range(201)])
    assert len(values) == QUANTILES
    assert (values[0], values[50], values[100]) == pytest.approx((0.0, 100.0, 200.0))
    assert values == sorted(values)


def test_load_over_time_keeps_to_its_number_of_points_and_averages_what_it_merges() -> None:
    points = load_over_time([(float(n), (0, n)) for n in range(10)], points=5)
    assert len(points) == 5
    assert (points[1].at_s, points[1].least, points[1].mean, points[1].most) == (2.5, 0, 1.25, 2.5)
    assert load_over_time([]) == []
    assert len(load_over_time([(float(n), (1,)) for n in range(7)], points=5)) == 4


# -- several seeds -------------------------------------------------------------------------


def test_the_interval_of_five_seeds_is_as_computed_by_hand() -> None:
    # 1..5: mean 3, standard deviation sqrt(2.5); t(4) = 2.776.
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * sqrt(2.5) / sqrt(5)
    assert interval.mean == 3.0
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half))
    assert half == pytest.approx(1.963, abs=5e-4)


def test_two_values_give_the_widest_interval_and_one_gives_none() -> None:
    two = t_interval([0.0, 2.0])
    assert (two.low, two.high) == pytest.approx((1 - 12.706, 1 + 12.706))
    assert t_interval([7.0]) == Interval(7.0, None, None)


def test_the_t_table_falls_towards_the_normal_distribution() -> None:
    assert len(T_975) == 30
    assert list(T_975) == sorted(T_975, reverse=True)
    assert 1.96 < T_975[-1] < 2.05
    many = t_interval([float(n % 2) for n in range(100)])
    assert many.high == pytest.approx(0.5 + 2.042 * 0.50252 / 10, abs=1e-4)


def test_pairs_are_compared_seed_by_seed() -> None:
    # A seed that is hard for both policies moves neither the difference nor its interval.
    reference = [1.0, 10.0, 100.0]
    interval = paired_difference([1.1, 10.5, 115.0], reference)
    assert interval.mean == pytest.approx(0.10)
    half = 4.303 * 0.05 / sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((0.10 - half, 0.10 + half))


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(-0.05, -0.06, -0.04), "better"),
        (Interval(0.05, 0.04, 0.06), "worse"),
        (Interval(-0.05, -0.2, 0.1), "level"),
        (Interval(-0.05), "one seed"),
    ],
)
def test_a_difference_counts_only_when_zero_is_outside(interval: Interval, verdict: str) -> None:
    assert interval.verdict == verdict
