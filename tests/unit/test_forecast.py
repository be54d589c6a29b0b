"""What a request can expect, what it is charged with, and what is learned from how it went."""

from __future__ import annotations

import pytest

from epp.core.inflight import Inflight
from epp.core.latency.forecast import (
    BELIEVED_SCRAPES,
    MEAN_WEIGHT,
    OUTPUT_TOKENS,
    OUTPUT_TOKENS_MAX,
    TOKENS_MIN,
    Forecast,
)
from epp.core.latency.rates import RateLearner, Rates
from epp.core.model import EndpointSpec, Request
from epp.core.pool import Members, ScrapeFailed
from tests.unit.roundrates import (
    LINEAR,
    ROUND,
    Told,
    asking,
    charged,
    endpoints,
    forecast_of,
    prompt,
    scrape,
    spec,
    world,
)


def test_a_prediction_is_backlog_prefill_and_steps_then_a_step_per_token() -> None:
    pool = endpoints(2)
    inflight = Inflight()
    inflight.first_byte(charged(inflight, pool[0], 0.3, now_s=0.0, prompt_tokens=500), 1.0)
    charged(inflight, pool[0], 2.0, now_s=1.0, prompt_tokens=300)
    forecast = forecast_of(pool)
    made = forecast.predict(asking(1000, {0: 6}), pool, 1.5)
    step_s = 0.1 + 0.02 + 0.08
    work_s = 0.616 + 1e-6 * 616 * (384 + 308)
    assert made[0].ttft_s == pytest.approx(1.5 + work_s + step_s)
    assert made[0].tpot_s == pytest.approx(0.1 + 0.03 + 1e-4 * 1800)
    assert made[1].ttft_s == pytest.approx(1.0 + 0.5 + 0.1)
    assert made[1].tpot_s == pytest.approx(0.1 + 0.01 + 0.1)


def test_long_prefills_wait_for_a_decode_step_per_chunk() -> None:
    (idle,) = pool = endpoints(1)
    rates = Rates(token_s=1e-4, pair_s=0, step_s=0.5, step_request_s=0, step_token_s=0)
    made = forecast_of(pool, rates).predict(Request(prompt_tokens=8193), pool, 0.0)
    assert made[idle.slot].ttft_s == pytest.approx(0.8193 + 2 * 0.5)


def test_an_endpoint_that_has_left_has_no_prediction() -> None:
    stays, leaves = pool = endpoints(2)
    forecast = forecast_of(pool)
    forecast.left(leaves)
    assert forecast.predict(Request(), pool, 0.0).keys() == {stays.slot}
    assert forecast.constants().keys() == {stays.slot}
    # Its requests still end: what they need is worked out by the pool's rates.
    assert forecast.output_s(Request(max_output_tokens=10), leaves) == pytest.approx(1.0)


def test_a_charge_says_what_has_to_be_computed_and_what_was_predicted() -> None:
    (endpoint,) = pool = endpoints(1)
    forecast = forecast_of(pool)
    charged(Inflight(), endpoint, 1.0, now_s=0.0)
    request = asking(1000, {0: 6})
    prefill = forecast.prefill(request, endpoint, now_s=0.25, blind=True)
    assert (prefill.prompt_tokens, prefill.matched_tokens, prefill.blind) == (1000, 384, True)
    assert prefill.seconds == pytest.approx(0.616 + 1e-6 * 616 * (384 + 308))
    assert prefill.seconds == forecast.prefill_s(request, endpoint)
    predicted = forecast.predict(request, pool, 0.25)[0]
    assert (prefill.ttft_s, prefill.tpot_s) == (predicted.ttft_s, predicted.tpot_s)


def test_the_mean_work_starts_at_the_first_and_then_moves_slowly() -> None:
    (endpoint,) = pool = endpoints(1)
    forecast = forecast_of(pool, LINEAR)
    for tokens in (1000, 3000):
        forecast.prefill(Request(prompt_tokens=tokens), endpoint, now_s=0.0, blind=False)
    assert forecast.work_s_mean == pytest.approx(1.0 + MEAN_WEIGHT * 2.0)


def test_an_unseen_answer_takes_its_tokens_times_a_step() -> None:
    (endpoint,) = pool = endpoints(1)
    forecast = forecast_of(pool)
    charged(Inflight(), endpoint, 0.0, now_s=0.0, prompt_tokens=900)
    step_s = 0.1 + 0.01 + 0.09
    assert forecast.output_s(Request(), endpoint) == pytest.approx(OUTPUT_TOKENS * step_s)
    for limit, tokens in ((7, 7), (10**9, OUTPUT_TOKENS), (0, 0)):
        request = Request(max_output_tokens=limit)
        assert forecast.output_s(request, endpoint) == pytest.approx(tokens * step_s)


@pytest.mark.parametrize("garbage", [1 << 40, -(1 << 40)])
def test_an_absurd_token_count_does_not_make_unseen_answers_last_for_years(garbage: int) -> None:
    decider = world(1, rates=ROUND)
    request = prompt("a", 10)
    decision = decider.decide(request, subset=None, now_s=0.0)
    decider.ended(decision, 1.0, output_tokens=garbage, decode_s=1.0)
    expected = OUTPUT_TOKENS + MEAN_WEIGHT * (
        (OUTPUT_TOKENS_MAX if garbage > 0 else 0) - OUTPUT_TOKENS
    )
    assert decider.forecast.output_tokens_mean == pytest.approx(expected)


# What the learner is told


def told(learner: RateLearner, name: str) -> list[tuple[int, dict[str, object]]]:
    assert isinstance(learner, Told)
    return [(slot, said) for call, slot, said in learner.calls if call == name]


def test_a_first_byte_is_learned_with_its_service_time_and_who_else_decodes() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    sent = [
        decider.decide(prompt(f"{n}", 100 * (n + 1)), subset=None, now_s=float(n)) for n in range(3)
    ]
    decider.first_byte(sent[0], 5.0)
    decider.first_byte(sent[1], 5.5)
    assert told(decider.forecast.learner, "first_byte") == [
        (endpoint.slot, {
            "uncached_tokens": 100, "matched_tokens": 0, "service_s": 5.0,
            "decoding": 1, "decode_tokens": 600, "now_s": 5.0,
        }),
        (endpoint.slot, {
            "uncached_tokens": 200, "matched_tokens": 0, "service_s": 0.5,
            "decoding": 2, "decode_tokens": 600, "now_s": 5.5,
        }),
    ]  # fmt: skip
    decider.first_byte(sent[0], 6.0)
    assert len(told(decider.forecast.learner, "first_byte")) == 2, "a second one says nothing"


def test_a_predicted_first_byte_teaches_nothing() -> None:
    decider = world(1, proven=False)
    (endpoint,) = decider.pool.endpoints
    decision = decider.decide(prompt("a", 100), subset=None, now_s=0.0, first_byte_seen=False)
    decider.inflight.advance(1.0)
    assert endpoint.waiting_requests == 0
    assert not endpoint.proven
    other = decider.decide(prompt("b", 100), subset=None, now_s=2.0, first_byte_seen=False)
    decider.first_byte(other, 2.01)
    decider.ended(decision, 3.0)
    assert told(decider.forecast.learner, "first_byte") == []


def test_the_first_byte_of_a_request_the_gateway_sent_elsewhere_teaches_nothing() -> None:
    decider = world(2)
    decision = decider.decide(prompt("a", 100), subset=None, now_s=0.0)
    served = next(e for e in decider.pool.endpoints if e is not decision.pick.endpoint)
    decider.answered(decision, served=served.address, status=200, now_s=1.0)
    decider.first_byte(decision, 1.0)
    assert told(decider.forecast.learner, "first_byte") == []
    assert (served.inflight_requests, served.waiting_requests) == (1, 0)


def test_an_answer_is_learned_by_its_time_per_token_and_the_mean_load_meanwhile() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    first = decider.decide(prompt("a", 100), subset=None, now_s=0.0)
    decider.first_byte(first, 1.0)
    for n in range(4):
        decider.decide(prompt(f"{n}", 50), subset=None, now_s=1.5)
    decider.ended(first, 3.0, output_tokens=21, decode_s=2.0)
    assert told(decider.forecast.learner, "decoded") == [
        (endpoint.slot, {
            "step_s": pytest.approx(0.1), "inflight": 2, "inflight_tokens": 150,
            "now_s": 3.0, "decode_s": 2.0,
        })
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("output_tokens", "decode_s"),
    [(TOKENS_MIN - 1, 2.0), (100, None), (100, 0.0), (100, -1.0), (0, 2.0), (1, 2.0)],
)
def test_an_answer_too_short_or_not_streamed_says_nothing_of_steps(
    output_tokens: int, decode_s: float | None
) -> None:
    decider = world(1)
    decision = decider.decide(prompt("a", 100), subset=None, now_s=0.0)
    decider.ended(decision, 3.0, output_tokens=output_tokens, decode_s=decode_s)
    assert told(decider.forecast.learner, "decoded") == []


def test_an_answer_that_broke_off_says_nothing() -> None:
    decider = world(1)
    decision = decider.decide(prompt("a", 100), subset=None, now_s=0.0)
    decider.first_byte(decision, 1.0)
    decider.ended(decision, 3.0, decode_s=2.0)
    assert told(decider.forecast.learner, "decoded") == []
    assert decider.forecast.output_tokens_mean == OUTPUT_TOKENS


def test_G03_a_new_endpoint_in_a_used_slot_has_nothing_of_the_old_one() -> None:
    decider = world(1)
    (old,) = decider.pool.endpoints
    for at_s in range(BELIEVED_SCRAPES):
        scrape(decider, old, float(at_s), running=9, waiting=9)
    decider.pool.apply(Members((spec(0, uid="new"),)), 5.0)
    (new,) = decider.pool.endpoints
    assert (new.slot, new.foreign_requests, new.proven) == (old.slot, 0, False)
    calls = [(name, slot) for name, slot, _ in decider.forecast.learner.calls]
    assert calls == [("joined", 0), ("forget", 0), ("joined", 0)]
    scrape(decider, new, 6.0, running=9, waiting=9)
    assert new.foreign_requests == 0, "it needs two scrapes of its own"


def test_G03_answers_of_an_endpoint_that_left_teach_nothing_about_who_has_its_slot_now() -> None:
    decider = world(1)
    (old,) = decider.pool.endpoints
    decision = decider.decide(asking(1000), subset=None, now_s=0.0)
    decider.pool.apply(Members((spec(1),)), 1.0)
    (new,) = decider.pool.endpoints
    assert new.slot == old.slot
    decider.first_byte(decision, 2.0)
    decider.ended(decision, 10.0, output_tokens=100, decode_s=8.0)
    assert told(decider.forecast.learner, "first_byte") == []
    assert told(decider.forecast.learner, "decoded") == []
    assert old.inflight_requests == 0


def test_a_restarted_engine_has_to_prove_itself_and_keeps_some_of_its_rates() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    for at_s in (1.0, 2.0):
        decider.pool.apply(ScrapeFailed(endpoint, "connect", unreachable=True), at_s)
    endpoint.proven = True
    scrape(decider, endpoint, 3.0, running=0, waiting=0)
    assert not endpoint.proven
    assert ("restarted", 0, {}) in decider.forecast.learner.calls


def test_rates_that_changed_are_read_anew_and_those_of_others_too() -> None:
    pool = endpoints(2)
    learner = Told(LINEAR)
    forecast = Forecast(learner)
    for endpoint in pool:
        forecast.joined(endpoint)
    assert forecast.token_s(pool[1]) == 0.001
    learner.by_slot[1] = Rates(token_s=0.5)
    assert forecast.token_s(pool[1]) == 0.001, "nobody said that they changed"
    learner.version += 1
    assert forecast.token_s(pool[1]) == 0.5
    assert forecast.token_s(pool[0]) == 0.001


def test_a_host_name_as_endpoint_is_as_good_as_an_address() -> None:
    decider = world(0)
    decider.pool.apply(Members((EndpointSpec(host="engine-0", port=8000),)), 0.0)
    assert decider.decide(prompt("a", 10), subset=None, now_s=0.0).pick.destination == (
        "engine-0:8000"
    )


# Totals of an engine's histograms


TOTALS = ("prefill_s_sum", "prefill_tokens_sum", "prefills")


def grown(decider, *pages: tuple[float, float, int] | None) -> list[tuple[float, float, int]]:
    (endpoint,) = decider.pool.endpoints
    for at_s, page in enumerate(pages):
        fields = dict(zip(TOTALS, page, strict=True)) if page else {}
        scrape(decider, endpoint, float(at_s), **fields)
    said = [s for _, s in told(decider.forecast.learner, "histograms")]
    return [(s["prefill_s"], s["computed_tokens"], s["prefills"]) for s in said]


def test_totals_are_told_by_their_growth_from_the_second_on() -> None:
    grew = grown(world(1), (10.0, 900.0, 5), (12.0, 1000.0, 7), (12.0, 1000.0, 7))
    assert grew == [(0.0, 0.0, 0), (2.0, 100.0, 2), (0.0, 0.0, 0)]


def test_totals_that_fell_belong_to_another_process() -> None:
    grew = grown(world(1), (10.0, 900.0, 5), (1.0, 90.0, 1), (3.0, 190.0, 2))
    assert grew == [(0.0, 0.0, 0), (0.0, 0.0, 0), (2.0, 100.0, 1)]


def test_one_total_that_fell_is_enough_to_start_the_count_again() -> None:
    for fell in ((9.0, 950.0, 6), (11.0, 899.0, 6), (11.0, 950.0, 4)):
        assert grown(world(1), (10.0, 900.0, 5), fell) == [(0.0, 0.0, 0)] * 2


def test_nothing_is_kept_of_endpoints_that_left() -> None:
    decider = world(0)
    for n in range(50):
        decider.pool.apply(Members((spec(n),)), float(n))
        (endpoint,) = decider.pool.endpoints
        totals = dict(zip(TOTALS, (10.0, 900.0, 5), strict=True))
        scrape(decider, endpoint, float(n), running=1, waiting=1, **totals)
    forecast = decider.forecast
    assert len(forecast._foreign) == len(forecast._totals) == len(forecast.constants()) == 1


def test_a_scrape_without_totals_ends_the_count() -> None:
    assert grown(world(1), (10.0, 900.0, 5), None, (30.0, 1900.0, 9)) == [(0.0, 0.0, 0)] * 2
