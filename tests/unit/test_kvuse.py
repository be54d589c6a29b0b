"""KV cache held by requests in flight: what they share counts once."""

from __future__ import annotations

import pytest

from epp.core.inflight import Inflight
from epp.core.kvuse import OUTPUT_TOKENS, UNIT_TOKENS, KvUse, units_of
from tests.unit.roundrates import prompt, world


def test_a_unit_is_named_by_its_last_block() -> None:
    units = units_of(range(100, 120), 64, 1300)  # 20 blocks, of which 8 make a unit
    assert (list(units.names), units.unit_tokens) == ([107, 115], 512)
    assert units.own_tokens == 1300 - 1024 + OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("block_tokens", "blocks", "names", "unit_tokens"),
    [(512, 3, 3, 512), (784, 3, 3, 784), (200, 6, 3, 400), (64, 7, 0, 512), (64, 0, 0, 512)],
)
def test_a_unit_is_whole_blocks_and_about_as_many_tokens(
    block_tokens: int, blocks: int, names: int, unit_tokens: int
) -> None:
    units = units_of(range(blocks), block_tokens, blocks * block_tokens)
    assert (len(units.names), units.unit_tokens) == (names, unit_tokens)


def test_no_more_units_are_counted_than_the_prompt_has_tokens() -> None:
    units = units_of(range(100), 64, 600)
    assert len(units.names) == 600 // UNIT_TOKENS
    assert units.own_tokens == 600 - 512 + OUTPUT_TOKENS
    assert units_of(range(100), 64, 0).own_tokens == OUTPUT_TOKENS


def test_two_prompts_hold_what_they_share_once_and_their_output_each() -> None:
    kv = KvUse()
    one = units_of([1, 2, 3], 512, 1600)
    other = units_of([1, 2, 9], 512, 1600)
    kv.add(one)
    assert kv.tokens == 1600 + OUTPUT_TOKENS
    assert kv.shared_tokens(other) == 1024
    kv.add(other)
    assert kv.tokens == 2 * 512 + 2 * (512 + 64 + OUTPUT_TOKENS)
    kv.remove(one)
    assert kv.tokens == 1600 + OUTPUT_TOKENS
    assert (kv.shared_tokens(one), kv.shared_tokens(other)) == (1024, 1536)
    kv.remove(other)
    assert (kv.tokens, kv.shared_tokens(other)) == (0, 0)


def test_holders_of_a_unit_are_counted() -> None:
    kv = KvUse()
    one, other = units_of([1, 2, 3], 512, 1600), units_of([1, 2, 9], 512, 1600)
    for units in (one, one, other):
        kv.add(units)
    assert [kv.holders(name) for name in (1, 3, 9, 7)] == [3, 2, 1, 0]
    kv.remove(one)
    assert [kv.holders(name) for name in (1, 3, 9, 7)] == [2, 1, 1, 0]


def test_what_is_held_follows_a_request_to_who_serves_it_and_ends_with_it() -> None:
    decider = world(2)
    decision = decider.decide(prompt("b", 1000), subset=None, now_s=0.0)
    picked = decision.pick.endpoint
    other = next(e for e in decider.pool.endpoints if e is not picked)
    assert picked.kv.tokens == 1000 + OUTPUT_TOKENS
    decider.answered(decision, served=other.address, status=200, now_s=0.0)
    assert (picked.kv.tokens, other.kv.tokens) == (0, 1000 + OUTPUT_TOKENS)
    decider.first_byte(decision, 1.0)
    assert other.kv.tokens == 1000 + OUTPUT_TOKENS, "held until the end"
    for _ in range(2):
        decider.ended(decision, 2.0)
    assert (picked.kv.tokens, other.kv.tokens) == (0, 0)


def test_a_charge_without_names_holds_all_its_tokens_for_itself() -> None:
    inflight = Inflight()
    (endpoint,) = world(1).pool.endpoints
    charges = [inflight.charge(endpoint, tokens=0, cold=True, now_s=0.0) for _ in range(3)]
    assert endpoint.kv.tokens == 3 * OUTPUT_TOKENS
    for charge in charges:
        inflight.release(charge)
        inflight.release(charge)
    assert endpoint.kv.tokens == 0


def test_short_is_what_does_not_fit_beside_what_is_in_flight_less_what_is_shared() -> None:
    kv = KvUse()
    kv.add(units_of([1, 2, 3], 512, 1536))
    assert kv.tokens == 1536 + OUTPUT_TOKENS
    own, alike = units_of([7, 8], 512, 1024), units_of([1, 2, 9], 512, 1600)
    assert kv.short_tokens(own) == 0, "nobody knows how much there is"
    kv.capacity_tokens = kv.tokens + 1024 + OUTPUT_TOKENS
    assert kv.short_tokens(own) == 0
    kv.capacity_tokens -= 1
    assert kv.short_tokens(own) == 1
    assert kv.short_tokens(alike) == 0, "1024 of its 1600 tokens are there"
    kv.capacity_tokens = kv.tokens
    assert kv.short_tokens(alike) == 1600 - 1024 + OUTPUT_TOKENS


def test_what_is_held_is_told_by_name_with_how_many_hold_it() -> None:
    kv = KvUse()
    assert kv.shared() == {}
    for units in (units_of([1, 2], 512, 1024), units_of([1, 3], 512, 1024)):
        kv.add(units)
    assert kv.shared() == {1: 2, 2: 1, 3: 1}
