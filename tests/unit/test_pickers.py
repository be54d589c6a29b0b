"""Pickers: who wins, how ties fall, and that chance comes from the given source only."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import msgspec
import pytest

from epp.core.model import Endpoint, EndpointSpec, Picker
from epp.core.pickers.chance import RandomPicker, WeightedRandomPicker
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.registry import PICKERS


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(count)]


def picks(picker: Picker, totals: list[float], *, times: int, seed: int = 7) -> Counter[tuple]:
    endpoints, rng = pool(len(totals)), Random(seed)
    return Counter(tuple(picker(endpoints, totals, rng)) for _ in range(times))


def chi_square(seen: Counter[tuple], expected: dict[tuple, float]) -> float:
    assert seen.keys() <= expected.keys()
    return sum((seen[k] - n) ** 2 / n for k, n in expected.items())


def test_the_highest_total_wins() -> None:
    assert picks(MaxScorePicker(), [0.1, 2.5, 2.4, 0.0], times=50) == {(1,): 50}


def test_fallbacks_follow_by_their_totals() -> None:
    assert picks(MaxScorePicker(max_num_of_endpoints=3), [0.1, 2.5, 2.4, 0.0], times=50) == {
        (1, 2, 0): 50
    }


def test_totals_below_0_are_ranked_too() -> None:
    assert picks(MaxScorePicker(), [-3.0, -1.0, -2.0], times=20) == {(1,): 20}


def test_K01_equal_totals_are_spread_evenly() -> None:
    seen = picks(MaxScorePicker(), [0.5, 3.0, 3.0, 1.0, 3.0, 3.0], times=4000)
    assert chi_square(seen, {(i,): 1000.0 for i in (1, 2, 4, 5)}) < 16.3  # 0.1 %, 3 degrees


def test_K01_equal_totals_are_spread_evenly_over_winner_and_fallback() -> None:
    seen = picks(MaxScorePicker(max_num_of_endpoints=2), [3.0, 1.0, 3.0, 3.0], times=3000)
    pairs = [(a, b) for a in (0, 2, 3) for b in (0, 2, 3) if a != b]
    assert chi_square(seen, dict.fromkeys(pairs, 500.0)) < 20.5  # 0.1 %, 5 degrees


@pytest.mark.parametrize("picker", [MaxScorePicker(), RandomPicker(), WeightedRandomPicker()])
def test_K02_a_burst_of_equal_picks_is_not_one_endpoint(picker: Picker) -> None:
    seen = picks(picker, [1.0] * 8, times=100)
    assert len(seen) == 8
    assert max(seen.values()) < 30


def test_the_random_picker_does_not_look_at_the_totals() -> None:
    seen = picks(RandomPicker(), [0.0, 100.0, 1.0, 0.0], times=4000)
    assert chi_square(seen, {(i,): 1000.0 for i in range(4)}) < 16.3  # 0.1 %, 3 degrees


def test_the_weighted_picker_chooses_in_proportion_to_the_totals() -> None:
    totals = [1.0, 2.0, 0.0, 5.0]
    seen = picks(WeightedRandomPicker(), totals, times=8000)
    assert chi_square(seen, {(0,): 1000.0, (1,): 2000.0, (3,): 5000.0}) < 13.8  # 0.1 %, 2 degrees


def test_the_weighted_picker_does_not_put_back_what_it_chose() -> None:
    totals = [1.0, 2.0, 5.0]
    expected = {
        (a, b): 8000 * totals[a] / 8 * totals[b] / (8 - totals[a])
        for a in range(3)
        for b in range(3)
        if a != b
    }
    seen = picks(WeightedRandomPicker(max_num_of_endpoints=2), totals, times=8000)
    assert chi_square(seen, expected) < 20.5  # 0.1 %, 5 degrees


@pytest.mark.parametrize("wanted", [1, 3])
@pytest.mark.parametrize("totals", [[0.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
def test_K03_the_weighted_picker_is_even_when_no_total_is_positive(
    wanted: int, totals: list[float]
) -> None:
    seen = picks(WeightedRandomPicker(max_num_of_endpoints=wanted), totals, times=3000)
    firsts = Counter({(i,): sum(n for k, n in seen.items() if k[0] == i) for i in range(3)})
    assert chi_square(firsts, {(i,): 1000.0 for i in range(3)}) < 13.8  # 0.1 %, 2 degrees


def test_without_a_positive_total_an_endpoint_is_a_fallback_at_most() -> None:
    picker = WeightedRandomPicker(max_num_of_endpoints=3)
    seen = picks(picker, [0.0, 1e-300, -1.0], times=400)
    assert seen.keys() == {(1, 0, 2), (1, 2, 0)}
    assert min(seen.values()) > 120
    assert picks(WeightedRandomPicker(), [0.0, 1e-300, -1.0], times=50) == {(1,): 50}


@pytest.mark.parametrize("name", sorted(PICKERS))
def test_one_endpoint_is_picked_by_default_and_no_more_than_there_are(name: str) -> None:
    assert len(PICKERS[name]()([*pool(3)], [1.0, 2.0, 3.0], Random(1))) == 1
    five = msgspec.convert({"maxNumOfEndpoints": 5}, PICKERS[name])
    assert sorted(five(pool(3), [1.0, 2.0, 3.0], Random(1))) == [0, 1, 2]
    assert five(pool(1), [0.0], Random(1)) == [0]


@pytest.mark.parametrize("name", sorted(PICKERS))
@pytest.mark.parametrize("count", [0, -1, 1.5, "1"])
def test_a_bad_number_of_endpoints_is_refused_with_its_key(name: str, count: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.maxNumOfEndpoints"):
        msgspec.convert({"maxNumOfEndpoints": count}, PICKERS[name])


def test_more_fallbacks_keep_the_order_of_totals_in_any_pool() -> None:
    rng = Random(3)
    totals = [rng.random() for _ in range(64)]
    order = MaxScorePicker(max_num_of_endpoints=64)(pool(64), totals, rng)
    assert all(totals[a] >= totals[b] for a, b in pairwise(order))
