"""The KV index on events worked out by hand: a letter is a block, and mostly its hash too."""

from __future__ import annotations

import pytest

from epp.core.kvevents import Cleared, Hash, Medium, Removed, Stored
from epp.core.kvindex import Joined, KvIndex, key_of, keys_of, pack_tokens, root_of

SIZE = 16


def tokens(*turns: int, size: int = SIZE) -> bytes:
    """A block of equal tokens for each turn."""
    return b"".join(pack_tokens([turn] * size) for turn in turns)


def stored(
    turns: str,
    *,
    after: Hash | None = None,
    names: tuple[Hash, ...] | None = None,
    medium: Medium = Medium.GPU,
    lora: str | None = None,
    extra: tuple[object, ...] | None = None,
    session_id: str | None = None,
    size: int = SIZE,
) -> Stored:
    """Blocks that hold the letters of `turns` and, unless said otherwise, are named by them."""
    letters = [ord(turn) for turn in turns]
    return Stored(
        names or tuple(letters), after, tokens(*letters, size=size), size, lora, medium, extra,
        session_id,
    )  # fmt: skip


def removed(turns: str, medium: Medium = Medium.GPU) -> Removed:
    return Removed(tuple(ord(turn) for turn in turns), medium)


def keys(turns: str, *, lora: str | None = None, size: int = SIZE, salt: str | None = None):
    return keys_of(tokens(*map(ord, turns), size=size), size, root_of(size, lora, salt))


@pytest.fixture
def index() -> KvIndex:
    return KvIndex(blocks_max=1000)


def test_each_slot_matches_what_it_holds_from_the_start(index: KvIndex) -> None:
    index.apply(0, stored("abcd"))
    index.apply(1, stored("ab"))
    index.apply(2, stored("xbcd"))
    assert index.match(keys("abcd"), SIZE) == {0: 4, 1: 2}
    assert index.match(keys("abcz"), SIZE) == {0: 3, 1: 2}
    assert index.match(keys("bcd"), SIZE) == {}
    assert index.match([], SIZE) == {}
    assert (index.held, index.entries) == (10, 8)
    assert [index.held_by(slot) for slot in range(4)] == [4, 2, 4, 0]


def test_engines_with_other_hashes_for_the_same_tokens_share_their_blocks(index: KvIndex) -> None:
    index.apply(0, stored("abc"))
    index.apply(1, stored("ab", names=(2**64 - 1, b"\x01" * 32)))
    index.apply(2, stored("ab", names=(-7, 12)))
    assert index.match(keys("abc"), SIZE) == {0: 3, 1: 2, 2: 2}
    assert index.entries == 3
    index.apply(2, Removed((12,)))
    assert index.match(keys("abc"), SIZE) == {0: 3, 1: 2, 2: 1}
    assert index.holders(keys("a")[0]) == 0b111


def test_a_chain_goes_on_where_the_engine_says_so(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.apply(0, stored("cd", after=ord("b")))
    index.apply(0, stored("x", after=ord("a")))
    assert index.match(keys("abcd"), SIZE) == {0: 4}
    assert index.match(keys("axcd"), SIZE) == {0: 2}


def test_H09_blocks_behind_a_gap_do_not_count_and_do_again_when_it_closes(index: KvIndex) -> None:
    index.apply(0, stored("abcdef"))
    index.apply(1, stored("abcd"))
    index.apply(0, removed("c"))
    index.apply(0, removed("d"))
    assert index.match(keys("abcdef"), SIZE) == {0: 2, 1: 4}
    assert index.gaps == 1  # d, before e; nothing that is held follows c
    index.apply(0, stored("c", after=ord("b")))
    index.apply(0, stored("d", after=ord("c")))
    assert index.match(keys("abcdef"), SIZE) == {0: 6, 1: 4}
    assert index.gaps == 0


def test_blocks_stored_twice_are_gone_when_they_were_removed_twice(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.apply(0, stored("ab"))
    assert index.held == 2
    index.apply(0, removed("b"))
    assert index.match(keys("ab"), SIZE) == {0: 2}
    index.apply(0, removed("ba"))
    assert index.match(keys("ab"), SIZE) == {0: 1}
    index.apply(0, removed("aa"))
    assert index.match(keys("ab"), SIZE) == {}
    assert index.counts.unknown_removals == 1


def test_H07_a_cleared_engine_holds_nothing_on_any_medium_and_others_keep_theirs(
    index: KvIndex,
) -> None:
    index.apply(0, stored("abc"))
    index.apply(0, stored("abc", medium=Medium.CPU))
    index.apply(1, stored("abc"))
    index.apply(0, Cleared())
    assert index.match(keys("abc"), SIZE) == {1: 3}
    index.apply(0, stored("a"))
    assert index.match(keys("abc"), SIZE) == {0: 1, 1: 3}
    index.expire(0.0)
    assert index.held == 4


def test_H06_G06_ranks_of_one_endpoint_are_kept_apart(index: KvIndex) -> None:
    index.apply(0, stored("ab"), rank=0)
    index.apply(0, stored("cd", after=ord("b")), rank=1)  # rank 1 does not know b
    index.apply(0, stored("a"), rank=1)
    assert index.match(keys("abcd"), SIZE) == {0: 2}
    index.apply(0, removed("a"), rank=1)
    assert index.match(keys("abcd"), SIZE) == {0: 2}
    index.apply(0, Cleared(), rank=1)
    assert index.match(keys("abcd"), SIZE) == {0: 2}
    index.forget(0, rank=0)
    assert index.match(keys("abcd"), SIZE) == {}


def test_H10_adapters_salts_and_images_keep_equal_tokens_apart(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.apply(1, stored("ab", lora="x", extra=(("x",), ("x",))))
    index.apply(2, stored("ab", lora="y"))
    index.apply(3, stored("ab", extra=(("tenant",), None)))
    index.apply(4, stored("ab", extra=(None, (("image", 3),))))
    assert index.match(keys("ab"), SIZE) == {0: 2, 4: 1}
    assert index.match(keys("ab", lora="x"), SIZE) == {1: 2}
    assert index.match(keys("ab", lora="y"), SIZE) == {2: 2}
    assert index.match(keys("ab", salt="tenant"), SIZE) == {3: 2}
    picture = key_of(keys("a")[0], tokens(ord("b")), extra=(("image", 3),))
    assert index.match([keys("a")[0], picture], SIZE) == {0: 1, 4: 2}


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_H11_block_sizes_stand_side_by_side(index: KvIndex, size: int) -> None:
    for slot, other in enumerate((16, 32, 64, 128)):
        index.apply(slot, stored("aaaa", names=(1, 2, 3, 4), size=other))
    slot = (16, 32, 64, 128).index(size)
    assert index.match(keys("aaaa", size=size), size) == {slot: 4}
    assert index.block_tokens_of(slot) == size
    assert index.block_tokens_of(9) is None
    assert index.block_sizes() == (16, 32, 64, 128)
    assert len(index.keys_of(range(3 * size + 1), size, 1)) == 3
    assert not index.keys_of(range(size - 1), size, 1)


def test_blocks_of_an_unknown_parent_wait_for_it(index: KvIndex) -> None:
    index.apply(0, stored("cd", after=ord("b")))
    index.apply(0, stored("e", after=ord("d")))
    index.apply(0, removed("d"))
    index.apply(0, stored("d", after=ord("c")))
    assert (index.held, index.orphans) == (0, 3)
    assert index.match(keys("abcde"), SIZE) == {}
    index.apply(0, stored("ab"))
    assert (index.held, index.orphans) == (5, 0)
    assert index.match(keys("abcde"), SIZE) == {0: 5}


def test_blocks_that_wait_are_bounded_and_the_oldest_are_given_up() -> None:
    index = KvIndex(blocks_max=100, orphans_max=2)
    index.apply(0, stored("bcd", after=ord("a")))
    index.apply(1, stored("y", after=ord("x")))
    assert index.orphans == 2
    assert index.counts.orphans_dropped == 2
    index.apply(1, stored("x"))
    assert index.match(keys("xy"), SIZE) == {1: 2}


def test_media_count_together_and_are_weighed_apart(index: KvIndex) -> None:
    index.apply(0, stored("abcd"))
    index.apply(0, stored("abc", medium=Medium.CPU))
    index.apply(0, stored("e", after=ord("d"), medium=Medium.DISK))
    index.apply(0, removed("dcb"))
    assert index.match(keys("abcde"), SIZE) == {0: 3}
    assert index.weigh(keys("abcde"), SIZE, (1.0, 0.5, 0.25)) == {0: 2.0}
    index.apply(0, removed("c", Medium.CPU))
    assert index.match(keys("abcde"), SIZE) == {0: 2}


def test_a_medium_that_names_hashes_alone_is_understood_from_the_others(index: KvIndex) -> None:
    index.apply(0, stored("abc"))
    index.apply(0, Stored((ord("a"), ord("b"), 999), None, b"", SIZE, medium=Medium.CPU))
    assert index.counts.unresolved == 1
    index.apply(0, removed("cba"))
    assert index.match(keys("abc"), SIZE) == {0: 2}
    assert index.weigh(keys("abc"), SIZE, (1.0, 0.5, 0.25)) == {0: 1.0}


def test_G03_a_forgotten_slot_matches_nothing_and_its_number_starts_anew(index: KvIndex) -> None:
    index.apply(0, stored("abc"))
    index.expect(0, keys("abcd"), 9.0)
    index.unsure(0)
    index.forget(0)
    assert index.match(keys("abcd"), SIZE, expected=True) == {}
    assert not index.is_unsure(0)
    index.apply(0, stored("a"))
    assert index.match(keys("abc"), SIZE) == {0: 1}


def test_an_unsure_slot_is_left_out_but_followed(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.unsure(0)
    index.apply(0, stored("c", after=ord("b")))
    assert index.match(keys("abc"), SIZE) == {}
    assert index.holders(keys("a")[0]) == 0
    index.sure(0)
    assert index.match(keys("abc"), SIZE) == {0: 3}


def test_expected_blocks_count_where_asked_for_until_their_time(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.expect(0, keys("abcd"), 10.0)
    index.expect(1, keys("abx"), 12.0)
    assert index.match(keys("abcd"), SIZE) == {0: 2}
    assert index.match(keys("abcd"), SIZE, expected=True) == {0: 4, 1: 2}
    index.expire(10.0)
    assert index.match(keys("abcd"), SIZE, expected=True) == {0: 2, 1: 2}
    index.expire(12.0)
    assert index.expected == 0


def test_a_chain_is_followed_back_from_its_tip_also_when_that_was_evicted(index: KvIndex) -> None:
    index.apply(0, stored("abc"))
    joined = index.apply(0, stored("de", after=ord("c"), session_id="s"))
    assert joined == Joined("s", keys("abcde")[-1], 5, SIZE)
    index.apply(0, removed("edc"))
    assert list(index.chain(joined.tip, joined.blocks)) == list(keys("abcde"))
    assert list(index.chain(joined.tip, 2)) == list(keys("abcde")[-2:])
    assert index.match(index.chain(joined.tip, 5), SIZE) == {0: 2}
    assert (index.entries, index.remembered) == (2, 3)
    assert not index.chain(12345, 5)


def test_only_blocks_with_a_session_id_and_a_known_place_are_joined(index: KvIndex) -> None:
    assert index.apply(0, stored("ab")) is None
    assert index.apply(0, stored("z", after=ord("y"), session_id="s")) is None


def test_G01_the_bound_holds_and_last_blocks_go_first() -> None:
    index = KvIndex(blocks_max=6)
    index.apply(0, stored("abcd"))
    index.apply(1, stored("abcd"))
    assert (index.held, index.counts.evicted) == (6, 2)
    assert index.match(keys("abcd"), SIZE) == {0: 2, 1: 4}
    for number in range(200):
        index.apply(number % 3, stored("pqrs", names=(number, -1 - number, 7, 9)))
        assert index.held <= 6


def test_remembered_blocks_are_bounded(index: KvIndex) -> None:
    for number in range(300):
        names = tuple(range(number * 8, number * 8 + 8))
        index.apply(0, Stored(names, None, tokens(*names), SIZE))
        index.apply(0, Removed(names))
    assert index.held == 0
    assert index.remembered <= 1025


@pytest.mark.parametrize(
    "event",
    [
        Stored((1, 2), None, tokens(1), SIZE),
        Stored((1,), None, tokens(1), 0),
        Stored((), None, b"", SIZE),
        Stored((1,), None, tokens(1), SIZE, extra_keys=(None, None)),
    ],
)
def test_an_event_that_contradicts_itself_is_counted_and_changes_nothing(
    index: KvIndex, event: Stored
) -> None:
    index.apply(0, event)
    assert (index.held, index.counts.malformed) == (0, 1)


def test_a_block_that_claims_to_come_before_itself_does_no_harm(index: KvIndex) -> None:
    index.apply(0, stored("a"))
    index.apply(0, stored("ab", after=ord("a"), names=(ord("a"), ord("a"))))
    index.apply(0, removed("aa"))
    assert index.held <= 1
    assert index.apply(0, removed("zzz")) is None


def test_a_hash_that_names_another_block_now_leaves_a_gap_that_is_seen(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.apply(0, stored("x", after=ord("b"), names=(ord("b"),)))
    assert index.match(keys("abx"), SIZE) == {0: 1}


def test_a_block_under_two_hashes_is_held_until_both_are_removed(index: KvIndex) -> None:
    index.apply(0, stored("a", names=(1,)))
    index.apply(0, stored("a", names=(2,)))
    index.apply(0, Removed((1,)))
    assert index.match(keys("a"), SIZE) == {0: 1}
    index.apply(0, Removed((2,)))
    assert index.match(keys("a"), SIZE) == {}
    assert index.entries == 0


def test_a_block_taken_up_again_is_not_given_up_with_those_remembered(index: KvIndex) -> None:
    index.apply(0, stored("ab"))
    index.apply(0, removed("ba"))
    index.apply(0, stored("ab"))
    for number in range(1000, 2200):
        index.apply(1, Stored((number,), None, tokens(number), SIZE))
        index.apply(1, Removed((number,)))
    assert index.match(keys("ab"), SIZE) == {0: 2}
    assert (index.held, index.entries) == (2, 2)


def test_a_later_pick_with_an_earlier_time_takes_no_time_from_an_earlier_one(
    index: KvIndex,
) -> None:
    index.expect(0, keys("ab"), 10.0)
    index.expect(0, keys("abc"), 5.0)
    index.expire(7.0)
    assert index.match(keys("ab"), SIZE, expected=True) == {0: 2}
    index.expire(10.0)
    assert index.expected == 0


def test_a_secret_makes_other_keys_and_the_same_one_the_same() -> None:
    one, same, other = (KvIndex(blocks_max=1, secret=s) for s in (b"1", b"1", b"2"))
    assert one.root(SIZE) == same.root(SIZE) != other.root(SIZE)
    assert one.root(SIZE) < 2**60


@pytest.mark.parametrize("bounds", [{"blocks_max": 0}, {"blocks_max": 1, "orphans_max": -1}])
def test_a_bound_out_of_range_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need at least 1, 0 and 0"):
        KvIndex(**bounds)
