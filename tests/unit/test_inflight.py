from epp.core.inflight import Inflight, InflightParams
from epp.core.model import Endpoint, EndpointSpec


def endpoint(n: int = 1) -> Endpoint:
    return Endpoint(EndpointSpec(host=f"10.0.0.{n}", port=8000))


def counters(e: Endpoint) -> tuple[int, int, int]:
    return (e.inflight_requests, e.waiting_requests, e.inflight_tokens)


def test_a_charge_counts_at_once_and_its_tokens_end_with_the_first_byte() -> None:
    inflight, e = Inflight(), endpoint()
    charge = inflight.charge(e, tokens=100, cold=True)
    assert counters(e) == (1, 1, 100)
    inflight.first_byte(charge)
    assert counters(e) == (1, 0, 0)
    inflight.release(charge)
    assert counters(e) == (0, 0, 0)
    assert inflight.requests == 0


def test_C09_releasing_twice_gives_back_once() -> None:
    inflight, e = Inflight(), endpoint()
    other = inflight.charge(e, tokens=5, cold=False)
    charge = inflight.charge(e, tokens=100, cold=False)
    for _ in range(2):
        inflight.release(charge)
    inflight.first_byte(charge)
    assert counters(e) == (1, 1, 5)
    inflight.release(other)
    assert counters(e) == (0, 0, 0)


def test_a_request_that_ends_before_its_first_byte_gives_all_back() -> None:
    inflight, e = Inflight(), endpoint()
    inflight.release(inflight.charge(e, tokens=100, cold=False))
    assert counters(e) == (0, 0, 0)


def test_A29_the_load_moves_to_who_served() -> None:
    inflight, picked, served = Inflight(), endpoint(1), endpoint(2)
    charge = inflight.charge(picked, tokens=100, cold=False)
    inflight.move(charge, served)
    assert counters(picked) == (0, 0, 0)
    assert counters(served) == (1, 1, 100)
    inflight.first_byte(charge)
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
    charge = inflight.charge(e, tokens=tokens, cold=False)
    inflight.first_byte(charge)
    assert counters(e) == (1, 0, 700)
    inflight.release(charge)
    assert counters(e) == (0, 0, 0)


def test_only_what_is_not_cached_is_charged() -> None:
    inflight = Inflight()
    assert inflight.tokens_of(prompt_tokens=1000, matched_tokens=960, max_output_tokens=None) == 40
    assert inflight.tokens_of(prompt_tokens=10, matched_tokens=64, max_output_tokens=None) == 0


def test_pick_numbers_remember_the_last_pick_and_the_last_cold_one() -> None:
    inflight, a, b = Inflight(), endpoint(1), endpoint(2)
    inflight.charge(a, tokens=0, cold=True)
    inflight.charge(b, tokens=0, cold=False)
    inflight.charge(a, tokens=0, cold=False)
    assert (a.last_pick_number, a.cold_pick_number) == (3, 1)
    assert (b.last_pick_number, b.cold_pick_number) == (2, 0)
