"""Names of prefix blocks, and the index of who was sent what: one behaviour at a time."""

from __future__ import annotations

import gc
from itertools import pairwise
from math import ceil, log2
from random import Random
from sys import getsizeof

import pytest
from xxhash import xxh64_intdigest

from epp.core import prefix
from epp.core.prefix import PrefixIndex, name_blocks, root_of

PLENTY = 1 << 40


def names(prompt: bytes, *, block_tokens: int = 1, root: int = 7, blocks_max: int = 0) -> list[int]:
    return name_blocks(prompt, block_tokens=block_tokens, root=root, blocks_max=blocks_max)


def chain(blocks: int, seed: int) -> list[int]:
    return names(Random(seed).randbytes(4 * blocks))


def index(total: int = PLENTY, *, slot_blocks_max: int = PLENTY) -> PrefixIndex:
    return PrefixIndex(total, slot_blocks_max=slot_blocks_max)


def table_bytes(known: PrefixIndex) -> int:
    return sum(map(getsizeof, {id(shard): shard for shard in known._shards}.values()))


class CountingDict(dict[int, int]):
    lookups = 0

    def get(self, *args):
        CountingDict.lookups += 1
        return super().get(*args)


# --- names


def test_G11_a_block_is_named_after_everything_before_it() -> None:
    one, other = names(b"aaaasametail"), names(b"bbbbsametail")
    assert not set(one) & set(other)
    assert names(b"aaaasameelse")[:2] == one[:2]


def test_G11_names_are_the_same_in_every_process() -> None:
    root = root_of("llama-3", "tenant-a")
    assert root == 17696308546103515428
    assert names(bytes(range(48)), block_tokens=4, root=root) == [
        671165378527193041,
        675617298875835542,
        137895426865511886,
    ]


def test_a_name_is_the_upper_60_bits_of_xxh64_seeded_with_the_name_before() -> None:
    first = xxh64_intdigest(b"01234567", 5) >> 4
    second = xxh64_intdigest(b"89abcdef", first) >> 4
    assert names(b"0123456789abcdef", block_tokens=2, root=5) == [first, second]
    assert all(getsizeof(name) == 32 for name in chain(1000, seed=1))


def test_only_full_blocks_have_names() -> None:
    assert names(b"x" * 255, block_tokens=64) == []
    assert len(names(b"x" * 256, block_tokens=64)) == 1
    assert len(names(b"x" * 767, block_tokens=64)) == 2
    assert names(b"") == []


def test_G10_blocks_max_cuts_the_chain_and_0_names_the_whole_prompt() -> None:
    whole = names(b"abcd" * 3000, blocks_max=0)
    assert len(whole) == 3000
    assert names(b"abcd" * 3000, blocks_max=10) == whole[:10]
    assert names(b"abcd" * 3000, blocks_max=5000) == whole


@pytest.mark.parametrize("bad", [{"block_tokens": 0}, {"block_tokens": -1}, {"blocks_max": -1}])
def test_G02_a_block_size_or_cap_out_of_range_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"block_tokens=.*blocks_max="):
        names(b"abcd" * 10, **bad)


def test_G05_model_and_salt_decide_the_first_block_already() -> None:
    roots = {root_of(m, s) for m in ("llama", "qwen") for s in ("", "tenant-a", "tenant-b")}
    assert len({names(b"same", root=root)[0] for root in roots}) == 6


def test_model_and_salt_are_joined_so_that_no_other_pair_gives_the_same_root() -> None:
    pairs = [
        ("ab", "c"),
        ("a", "bc"),
        ("", "abc"),
        ("abc", ""),
        ("1:a", ""),
        ("", "1:a"),
        ("é", ""),
    ]
    assert len({root_of(*pair) for pair in pairs}) == len(pairs)


def test_a_model_name_that_is_no_valid_text_has_a_root_too() -> None:
    assert root_of("\ud800", "") != root_of("\ud801", "")


# --- match and learn


def test_only_leading_blocks_count() -> None:
    known = index()
    prompt = chain(10, seed=1)
    known.learn(3, [prompt[:4]])
    known.learn(5, [prompt])
    assert known.match([prompt]) == {3: 4, 5: 10}
    assert known.match([prompt[:2]]) == {3: 2, 5: 2}
    assert known.match([prompt[1:]]) == {5: 9, 3: 3}  # names of another chain's head, for once
    assert known.match([chain(10, seed=2)]) == {}
    assert known.match([[*prompt[:3], *chain(3, seed=3)]]) == {3: 3, 5: 3}


def test_nothing_to_match_matches_nothing() -> None:
    known = index()
    assert known.match([]) == known.match([[]]) == known.match([chain(3, seed=1)]) == {}
    known.learn(0, [])
    known.learn(0, [[]])
    assert (known.entries, known.held) == (0, 0)


def test_the_prompts_of_one_request_add_up() -> None:
    known, one, other = index(), chain(5, seed=1), chain(3, seed=2)
    known.learn(1, [one, other])
    known.learn(2, [other])
    assert known.match([one, other]) == {1: 8, 2: 3}
    assert known.match([one, one]) == {1: 10}


def test_the_next_request_of_a_burst_sees_what_the_last_one_taught() -> None:
    known, prompt = index(), chain(100, seed=1)
    for _ in range(3):
        known.learn(6, [prompt])
        assert known.match([prompt]) == {6: 100}
    assert (known.entries, known.held, known.held_by(6)) == (100, 100, 100)


def test_shared_blocks_are_one_entry_and_are_held_by_each() -> None:
    known, head = index(), chain(10, seed=1)
    for slot in range(300):
        known.learn(slot, [[*head, *chain(2, seed=100 + slot)]])
    assert (known.entries, known.held) == (10 + 600, 300 * 12)
    assert known.match([head]) == dict.fromkeys(range(300), 10)


def test_a_match_looks_up_few_of_the_names() -> None:
    known, head = index(), chain(100, seed=1)
    prompts = [[*head, *chain(412, seed=10 + slot)] for slot in range(64)]
    for slot, prompt in enumerate(prompts):
        known.learn(slot, [prompt])
    known._shards = [CountingDict(shard) for shard in known._shards]
    CountingDict.lookups = 0
    assert known.match([chain(512, seed=2)]) == {}
    assert CountingDict.lookups == 1
    CountingDict.lookups = 0
    assert known.match([prompts[7]]) == {slot: 512 if slot == 7 else 100 for slot in range(64)}
    assert CountingDict.lookups <= 2 * ceil(log2(512))


# --- bounds


def test_G01_an_hour_of_unique_prompts_fills_the_bounds_and_no_more() -> None:
    known = index(slot_blocks_max=200)
    for number in range(3000):
        known.learn(number % 8, [chain(10, seed=number)])
    assert known.entries == known.held == 8 * 200
    assert [known.held_by(slot) for slot in range(8)] == [200] * 8
    assert known.match([chain(10, seed=2999)]) == {2999 % 8: 10}
    assert known.match([chain(10, seed=0)]) == {}


def test_G01_what_is_evicted_gives_its_memory_back() -> None:
    known = index(slot_blocks_max=20_000)
    rng = Random(1)
    for number in range(600):
        known.learn(number % 4, [[rng.getrandbits(60) for _ in range(500)]])
    assert known.entries == known.held == 80_000
    assert table_bytes(known) < 65 * 80_000
    for slot in range(4):
        known.forget(slot)
    known.resize(9, 100)
    for _ in range(800):
        known.learn(9, [[rng.getrandbits(60) for _ in range(100)]])
    assert known.entries == known.held == 100
    assert table_bytes(known) < 800_000


def test_the_collector_has_nothing_to_walk() -> None:
    known = index(slot_blocks_max=5000)
    for number in range(100):
        known.learn(number % 9, [chain(1000, seed=number % 40)])
    assert not any(map(gc.is_tracked, known._shards))
    for holding in known._holdings.values():
        assert not gc.is_tracked(holding._runs)
        assert not gc.is_tracked(holding._heads)


def test_blocks_with_the_same_holders_share_one_mask() -> None:
    known, prompt = index(slot_blocks_max=600), chain(500, seed=1)
    for slot in range(20):
        known.learn(slot, [prompt])
    assert len({id(mask) for shard in known._shards for mask in shard.values()}) == 1
    known.forget(10)
    assert len({id(mask) for shard in known._shards for mask in shard.values()}) == 1


def test_the_tail_goes_before_the_head() -> None:
    known, prompt, branch = index(slot_blocks_max=10), chain(8, seed=1), chain(4, seed=2)
    known.learn(0, [prompt])
    known.learn(0, [[*prompt[:2], *branch]])
    assert known.match([prompt]) == {0: 6}
    assert known.match([[*prompt[:2], *branch]]) == {0: 6}


def test_a_chain_longer_than_the_bound_keeps_its_head() -> None:
    known, prompt = index(slot_blocks_max=10), chain(50, seed=1)
    known.learn(0, [chain(7, seed=2)])
    known.learn(0, [prompt])
    assert known.match([prompt]) == {0: 10}
    assert known.held == 10
    tight = index(4, slot_blocks_max=10)
    tight.learn(0, [prompt])
    assert (tight.match([prompt]), tight.held) == ({0: 4}, 4)


def test_the_bound_over_all_slots_is_hard_and_the_fullest_slot_pays() -> None:
    known = index(100)
    known.learn(0, [chain(70, seed=1)])
    known.learn(1, [chain(20, seed=2)])
    known.learn(2, [chain(30, seed=3)])
    assert known.held == known.entries == 100
    assert [known.held_by(slot) for slot in range(3)] == [50, 20, 30]
    assert known.match([chain(70, seed=1)]) == {0: 50}


@pytest.mark.parametrize(("total", "own"), [(0, 5), (5, 0)])
def test_a_bound_of_zero_holds_nothing(total: int, own: int) -> None:
    known = index(total, slot_blocks_max=own)
    known.learn(0, [chain(3, seed=1)])
    assert (known.entries, known.held, known.match([chain(3, seed=1)])) == (0, 0, {})


def test_G10_resize_takes_effect_at_once_and_both_ways() -> None:
    known, prompt = index(slot_blocks_max=100), chain(80, seed=1)
    known.learn(0, [prompt])
    known.learn(1, [prompt])
    known.resize(0, 30)
    assert known.match([prompt]) == {0: 30, 1: 80}
    assert (known.held_by(0), known.held_by(1), known.entries) == (30, 80, 80)
    known.resize(0, 60)
    known.learn(0, [prompt])
    assert known.match([prompt]) == {0: 60, 1: 80}


def test_a_slot_may_be_resized_before_anything_is_learned() -> None:
    known = index(slot_blocks_max=100)
    known.resize(4, 2)
    known.learn(4, [chain(9, seed=1)])
    assert known.held_by(4) == 2


def test_a_negative_bound_is_refused() -> None:
    known = index()
    for call in (lambda: index(-1), lambda: index(slot_blocks_max=-1), lambda: known.resize(0, -1)):
        with pytest.raises(ValueError, match="-1 blocks"):
            call()
    assert known.held_by(0) == 0


# --- forget


def test_G03_a_slot_used_again_inherits_nothing() -> None:
    known, prompt = index(slot_blocks_max=50), chain(20, seed=1)
    known.resize(2, 7)
    known.learn(1, [prompt])
    known.learn(2, [prompt])
    known.forget(2)
    assert known.match([prompt]) == {1: 20}
    assert (known.entries, known.held, known.held_by(2)) == (20, 20, 0)
    known.learn(2, [chain(60, seed=2)])
    assert known.match([prompt]) == {1: 20}
    assert known.held_by(2) == 50  # the first one's own bound is forgotten too
    known.forget(1)
    assert (known.match([prompt]), known.entries) == ({}, 50)


def test_G03_a_full_slot_is_forgotten_at_once_and_freed_bit_by_bit() -> None:
    known, prompt, other = index(), chain(9000, seed=1), chain(5, seed=2)
    known.learn(0, [prompt])
    known.learn(1, [prompt[:10]])
    known.forget(0)
    assert known.match([prompt]) == {1: 10}
    assert known.held_by(0) == 0
    assert 9000 > known.held > 5000
    known.learn(0, [other])
    left = [known.held]
    while known.held > 15:
        known.learn(0, [other])
        left.append(known.held)
        assert known.match([prompt, other]) == {1: 10, 0: 5}
    assert max(before - after for before, after in pairwise(left)) <= prefix._LEARN_FREES_BLOCKS
    assert (known.entries, known.held) == (15, 15)


def test_forgotten_blocks_make_room_before_anybody_is_evicted() -> None:
    known = index(10_000)
    known.learn(0, [chain(7000, seed=1)])
    known.learn(1, [chain(3000, seed=2)])
    known.forget(0)
    known.learn(2, [chain(6000, seed=3)])
    assert (known.held_by(1), known.held_by(2)) == (3000, 6000)
    assert known.held <= 10_000


def test_forgetting_an_unknown_slot_is_no_error() -> None:
    known = index()
    known.forget(3)
    known.learn(3, [chain(2, seed=1)])
    known.forget(3)
    known.forget(3)
    assert (known.entries, known.held) == (0, 0)


def test_slots_that_come_and_go_do_not_widen_the_masks() -> None:
    known, prompt = index(), chain(3, seed=1)
    for turn in range(1000):
        known.learn(turn, [prompt])
        known.forget(turn)
    known.learn(7, [prompt])
    assert known.match([prompt]) == {7: 3}
    assert max(max(shard.values(), default=0) for shard in known._shards) == 1


def test_who_holds_a_prompt_whole_is_found_beside_those_that_hold_parts_of_it() -> None:
    known, prompt = index(), list(range(1, 21))
    for slot, blocks in enumerate((20, 1, 19, 20, 7)):
        known.learn(slot, [prompt[:blocks]])
    assert known.match([prompt]) == {0: 20, 1: 1, 2: 19, 3: 20, 4: 7}
    assert known.match([prompt[:2]]) == {0: 2, 1: 1, 2: 2, 3: 2, 4: 2}
    assert known.match([prompt[:1]]) == dict.fromkeys(range(5), 1)
    assert known.match([[*prompt, 99]]) == {0: 20, 1: 1, 2: 19, 3: 20, 4: 7}


# --- colliding names


@pytest.mark.parametrize(
    ("prompt", "learned"), [([1, 1, 1], 1), ([1, 2, 1, 2, 3], 2), ([1, 2, 3, 2, 1], 3)]
)
def test_a_chain_that_meets_itself_is_learned_up_to_there(prompt: list[int], learned: int) -> None:
    known = index()
    for _ in range(2):
        known.learn(0, [prompt])
        assert known.held == known.entries == learned
    known.forget(0)
    assert (known.entries, known.held) == (0, 0)


def test_a_block_longer_than_anything_names_nothing() -> None:
    assert name_blocks(b"x" * 1000, block_tokens=1 << 62, root=1, blocks_max=10) == []
