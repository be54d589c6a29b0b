from epp.core.inflight import Charge, Inflight, InflightParams, Prefill
from epp.core.model import Endpoint, EndpointSpec


def endpoint(n: int = 1) -> Endpoint:
    return Endpoint(EndpointSpec(host=f"10.0.0.{n}", port=8000))


def counters(e: Endpoint) -> tuple[int, int, int]:
    return (e.inflight_requests, e.waiting_requests, e.inflight_tokens)


def test_a_charge_counts_at_once_and_its_tokens_end_with_the_first_byte() -> None:
    inflight, e = Inflight(), endpoint()
    charge = inflight.charge(e, tokens=100, cold=True, now_s=0.0)
    assert counters(e) == (1, 1, 100)
    inflight.first_byte(charge, 1.0)
    assert counters(e) == (1, 0, 0)
    inflight.release(charge)
    assert counters(e) == (0, 0, 0)
    assert inflight.requests == 0


def test_C09_releasing_twice_gives_back_once() -> None:
    inflight, e = Inflight(), endpoint()
    other = inflight.charge(e, tokens=5, cold=False, now_s=0.0)
    charge = inflight.charge(e, tokens=100, cold=False, now_s=0.0)
    for _ in range(2):
        inflight.release(charge)
    inflight.first_byte(charge, 1.0)
    assert counters(e) == (1, 1, 5)
    inflight.release(other)
    assert counters(e) == (0, 0, 0)


def test_a_request_that_ends_before_its_first_byte_gives_all_back() -> None:
    inflight, e = Inflight(), endpoint()
    inflight.release(inflight.charge(e, tokens=100, cold=False, now_s=0.0))
    assert counters(e) == (0, 0, 0)


def test_A29_the_load_moves_to_who_served() -> None:
    inflight, picked, served = Inflight(), endpoint(1), endpoint(2)
    charge = inflight.charge(picked, tokens=100, cold=False, now_s=0.0)
    inflight.move(charge, served)
    assert counters(picked) == (0, 0, 0)
    assert counters(served) == (1, 1, 100)
    inflight.first_byte(charge, 1.0)
    inflight.release(charge)
    inflight.move(charge, picked)
    assert counters(picked) == counters(served) == (0, 0, 0)


def test_estimated_output_is_held_until_the_end() -> None:
    params = InflightParams(add_estimated_output_tokens=True, max_estimated_output_tokens=400)
    inflight, e = Inflight(params), endpoint()
    tokens = inflight.tokens_of(prompt_tokens=1000, matched_tokens=600, max_output_tokens=300)
    assert tokens == 400 + 300
    assert (
        inflight.tokens_of(prompt_tokens=1000, matched_tokens=0, max_output_tokens=None)
        == 1000 + 400
    )
    charge = inflight.charge(e, tokens=tokens, cold=False, now_s=0.0)
    inflight.first_byte(charge, 1.0)
    assert counters(e) == (1, 0, 700)
    inflight.release(charge)
    assert counters(e) == (0, 0, 0)


def test_only_what_is_not_cached_is_charged() -> None:
    inflight = Inflight()
    assert inflight.tokens_of(prompt_tokens=1000, matched_tokens=960, max_output_tokens=None) == 40
    assert inflight.tokens_of(prompt_tokens=10, matched_tokens=64, max_output_tokens=None) == 0


def test_pick_numbers_remember_the_last_pick_and_the_last_cold_one() -> None:
    inflight, a, b = Inflight(), endpoint(1), endpoint(2)
    inflight.charge(a, tokens=0, cold=True, now_s=0.0)
    inflight.charge(b, tokens=0, cold=False, now_s=0.0)
    inflight.charge(a, tokens=0, cold=False, now_s=0.0)
    assert (a.last_pick_number, a.cold_pick_number) == (3, 1)
    assert (b.last_pick_number, b.cold_pick_number) == (2, 0)


def charge_of(
    inflight: Inflight, e: Endpoint, seconds: float, *, now_s: float, blind: bool = False
) -> Charge:
    prefill = Prefill(prompt_tokens=10, seconds=seconds, ttft_s=seconds, blind=blind)
    return inflight.charge(e, prefill, tokens=10, cold=False, now_s=now_s)


def test_a_backlog_ages_by_the_time_its_oldest_request_has_been_served() -> None:
    inflight, e = Inflight(), endpoint()
    first = charge_of(inflight, e, 2.0, now_s=10.0)
    charge_of(inflight, e, 1.0, now_s=10.5)
    assert e.backlog.seconds(10.5) == 2.5  # 2 + 1, half a second done
    assert e.backlog.seconds(14.0) == 1.0  # late: of the first no more than its own work is done
    assert inflight.first_byte(first, 14.0) == 4.0
    assert e.backlog.seconds(14.25) == 0.75  # the second is in service since then


def test_a_first_byte_out_of_order_leaves_the_others_in_service_since_then() -> None:
    inflight, e = Inflight(), endpoint()
    charge_of(inflight, e, 2.0, now_s=0.0)
    short = charge_of(inflight, e, 0.5, now_s=0.25)
    assert inflight.first_byte(short, 1.0) == 0.75
    assert e.backlog.seconds(1.5) == 1.5


def test_an_empty_backlog_is_exactly_nothing() -> None:
    inflight, e = Inflight(), endpoint()
    for charge in [charge_of(inflight, e, 0.1 * n, now_s=0.0) for n in range(1, 30)]:
        inflight.release(charge)
    assert (e.backlog.work_s, len(e.backlog), e.context_tokens) == (0.0, 0, 0)


def test_a_prefill_nobody_sees_end_is_released_when_it_was_predicted_to() -> None:
    inflight, e = Inflight(), endpoint()
    charge = charge_of(inflight, e, 2.0, now_s=0.0, blind=True)
    inflight.advance(1.9)
    assert counters(e) == (1, 1, 10)
    assert inflight.next_due_s == 2.0
    inflight.advance(2.0)
    assert counters(e) == (1, 0, 0)
    assert inflight.next_due_s == float("inf")
    inflight.release(charge)
    assert counters(e) == (0, 0, 0)


def test_a_blind_prefill_that_ends_early_is_not_released_again() -> None:
    inflight, e = Inflight(), endpoint()
    charge_of(inflight, e, 5.0, now_s=0.0)
    inflight.first_byte(charge_of(inflight, e, 2.0, now_s=0.0, blind=True), 0.5)
    inflight.advance(3.0)
    assert counters(e) == (2, 1, 10)


def test_a_first_byte_says_that_blind_requests_before_it_are_served_too() -> None:
    inflight, e = Inflight(), endpoint()
    charge_of(inflight, e, 2.0, now_s=0.0, blind=True)
    seen = charge_of(inflight, e, 1.0, now_s=0.0)
    charge_of(inflight, e, 1.0, now_s=0.0, blind=True)
    inflight.first_byte(seen, 1.5)
    assert counters(e) == (3, 1, 10)
    assert e.backlog.seconds(1.5) == 1.0


def test_an_end_nobody_sees_is_predicted_and_may_still_come_before() -> None:
    inflight, e = Inflight(), endpoint()
    charge = charge_of(inflight, e, 1.0, now_s=0.0)
    inflight.release_at(charge, 9.0)
    inflight.advance(8.9)
    assert e.inflight_requests == 1
    inflight.advance(9.0)
    assert counters(e) == (0, 0, 0)
    inflight.release_at(charge, 10.0)
    inflight.release(charge)
    inflight.advance(11.0)
    assert (counters(e), inflight.requests) == ((0, 0, 0), 0)


def test_a_request_given_up_while_in_service_leaves_the_next_all_its_work() -> None:
    inflight, e = Inflight(), endpoint()
    first = charge_of(inflight, e, 2.0, now_s=0.0)
    charge_of(inflight, e, 1.0, now_s=0.0)
    inflight.release(first, 1.5)
    assert e.backlog.seconds(1.5) == 1.0
    assert e.backlog.seconds(2.0) == 0.5


def test_a_request_given_up_in_the_queue_changes_nothing_for_the_one_in_service() -> None:
    inflight, e = Inflight(), endpoint()
    charge_of(inflight, e, 2.0, now_s=0.0)
    second = charge_of(inflight, e, 1.0, now_s=0.0)
    inflight.release(second, 1.5)
    assert e.backlog.seconds(1.5) == 0.5


def test_predictions_far_ahead_of_requests_that_ended_are_not_kept() -> None:
    inflight, e = Inflight(), endpoint()
    unseen = charge_of(inflight, e, 1.0, now_s=0.0)
    inflight.release_at(unseen, 2e6)
    waits = charge_of(inflight, e, 1e6, now_s=0.0, blind=True)
    for _ in range(2000):
        inflight.release(charge_of(inflight, e, 1e6, now_s=0.0, blind=True))
    assert len(inflight._due) < 100
    inflight.advance(1e6)
    assert not waits.waiting
    inflight.advance(2e6)
    assert unseen.endpoint is None
