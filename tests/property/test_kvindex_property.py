"""The KV index against a slow oracle, under whatever order, loss and doubling of events."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from epp.core.kvevents import TOKEN_BYTES, Cleared, Event, Hash, Medium, Removed, Stored
from epp.core.kvindex import KvIndex, key_of, pack_tokens, root_of
from tests.property.kvindex_oracle import Oracle

SLOTS = 3
Chain = list[tuple[bytes, int]]
"""Tokens and key of each block of a prompt."""


class Engine:
    """Names for the blocks of a small world of prompts that branch; each engine its own."""

    def __init__(self, rng: Random, block_tokens: int, lora: str | None) -> None:
        self.block_tokens, self.lora = block_tokens, lora
        self._salt = rng.getrandbits(60)

    def chain(self, turns: list[int]) -> Chain:
        key, blocks = root_of(self.block_tokens, self.lora), []
        for turn in turns:
            tokens = pack_tokens([turn] * self.block_tokens)
            key = key_of(key, tokens)
            blocks.append((tokens, key))
        return blocks

    def name(self, key: int) -> Hash:
        number = key ^ self._salt
        return number.to_bytes(32, "big") if self._salt & 1 else number

    def stored(self, chain: Chain, start: int, stop: int, medium: Medium) -> Stored:
        names = [self.name(key) for _, key in chain]
        return Stored(
            tuple(names[start:stop]),
            names[start - 1] if start else None,
            b"".join(tokens for tokens, _ in chain[start:stop]),
            self.block_tokens,
            self.lora,
            medium,
        )


class World:
    """Random events, and the chains to ask for."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        media = [Medium.GPU] if rng.random() < 0.5 else list(Medium)
        self.media = media
        self.ranks = 1 if rng.random() < 0.7 else 2
        self.engines = [
            Engine(rng, rng.choice((16, 16, 32)), rng.choice((None, None, "adapter")))
            for _ in range(SLOTS)
        ]
        turns = [[rng.randrange(3) for _ in range(rng.randrange(1, 10))] for _ in range(4)]
        self.prompts = turns + [
            [*turn[: rng.randrange(len(turn) + 1)], 7, rng.randrange(3)] for turn in turns
        ]
        self.order_kept = rng.random() < 0.3
        """Removals come last block first, and none is lost."""
        self.resident: dict[tuple[int, int, Medium], list[Hash]] = {}

    def event(self) -> tuple[int, Event, int]:
        rng, slot = self.rng, self.rng.randrange(SLOTS)
        rank, medium = rng.randrange(self.ranks), rng.choice(self.media)
        here = self.resident.setdefault((slot, rank, medium), [])
        kind = rng.random()
        if kind < 0.02:
            for other in self.media:
                self.resident[slot, rank, other] = []
            return slot, Cleared(), rank
        if kind < 0.45 and here:
            place = -1 if self.order_kept else rng.randrange(len(here))
            return slot, Removed((here.pop(place),), medium), rank
        if kind < 0.48 and not self.order_kept:
            return slot, Removed((rng.getrandbits(64), rng.randbytes(32)), medium), rank
        engine = self.engines[slot]
        chain = engine.chain(rng.choice(self.prompts))
        start = 0 if self.order_kept else rng.randrange(len(chain))
        event = engine.stored(chain, start, rng.randrange(start, len(chain)) + 1, medium)
        here.extend(event.hashes)
        return slot, event, rank


def check(index: KvIndex, oracle: Oracle, world: World) -> None:
    assert [index.held_by(slot) for slot in range(SLOTS)] == [
        oracle.held_by(slot) for slot in range(SLOTS)
    ]
    assert index.orphans == oracle.orphans()
    for engine in world.engines:
        for turns in world.prompts:
            keys = [key for _, key in engine.chain(turns)]
            expected = oracle.match(keys)
            size = engine.block_tokens
            assert index.match(keys, size) == expected
            on_gpu = oracle.match(keys, (Medium.GPU,))
            if len(world.media) == 1:
                assert expected == on_gpu
                assert index.weigh(keys, size) == {s: float(n) for s, n in on_gpu.items()}
            assert set(index.weigh(keys, size)) == set(expected)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), events=st.integers(1, 120))
def test_any_order_of_events_gives_what_the_oracle_has(seed: int, events: int) -> None:
    world, index, oracle = World(seed), KvIndex(blocks_max=10_000), Oracle()
    for number in range(events):
        slot, event, rank = world.event()
        index.apply(slot, event, rank)
        oracle.apply(slot, event, rank)
        if number % 7 == 0:
            check(index, oracle, world)
        if world.rng.random() < 0.02:
            slot = world.rng.randrange(SLOTS)
            index.forget(slot)
            oracle.forget(slot)
            for key in list(world.resident):
                if key[0] == slot:
                    del world.resident[key]
    check(index, oracle, world)
    for _ in range(3):
        index.expire(0.0)
    assert index.held == sum(oracle.held_by(slot) for slot in range(SLOTS))
    assert index.entries == oracle.entries()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_when_all_that_was_stored_is_removed_nothing_is_left(seed: int) -> None:
    world, index = World(seed), KvIndex(blocks_max=10_000)
    for _ in range(80):
        slot, event, rank = world.event()
        index.apply(slot, event, rank)
    for (slot, rank, medium), names in world.resident.items():
        world.rng.shuffle(names)
        for name in names:
            index.apply(slot, Removed((name,), medium), rank)
    index.expire(0.0)
    assert (index.held, index.entries, index.gaps, index.orphans) == (0, 0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), lost=st.integers(0, 40), replayed=st.integers(1, 40))
def test_a_loss_mended_by_telling_it_anew_leaves_no_trace(
    seed: int, lost: int, replayed: int
) -> None:
    world = World(seed)
    events = [world.event() for _ in range(80)]
    whole, mended = KvIndex(blocks_max=10_000), KvIndex(blocks_max=10_000)
    for slot, event, rank in events:
        whole.apply(slot, event, rank)
    for slot, event, rank in events[:lost] + events[lost + replayed :]:
        mended.apply(slot, event, rank)
    for slot in range(SLOTS):
        mended.unsure(slot)
        mended.forget(slot)
    for slot, event, rank in events:
        mended.apply(slot, event, rank)
    for slot in range(SLOTS):
        mended.sure(slot)
    for engine in world.engines:
        for turns in world.prompts:
            keys = [key for _, key in engine.chain(turns)]
            assert mended.match(keys, engine.block_tokens) == whole.match(keys, engine.block_tokens)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), bound=st.integers(1, 30))
def test_the_bound_holds_and_nothing_is_claimed_that_is_not_held(seed: int, bound: int) -> None:
    world, index, oracle = World(seed), KvIndex(blocks_max=bound, orphans_max=bound), Oracle()
    for _ in range(80):
        slot, event, rank = world.event()
        index.apply(slot, event, rank)
        oracle.apply(slot, event, rank)
        assert index.held <= bound
        assert index.orphans <= bound
        assert index.gaps <= bound
    for engine in world.engines:
        for turns in world.prompts:
            keys = [key for _, key in engine.chain(turns)]
            most = oracle.match(keys)
            for slot, blocks in index.match(keys, engine.block_tokens).items():
                assert blocks <= most.get(slot, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_expected_lasts_to_its_time_as_a_whole(seed: int) -> None:
    rng, index = Random(seed), KvIndex(blocks_max=100)
    engine = Engine(rng, 16, None)
    until: dict[tuple[int, int], float] = {}
    now_s = 0.0
    for _ in range(40):
        keys = [k for _, k in engine.chain([rng.randrange(2) for _ in range(rng.randrange(9))])]
        slot = rng.randrange(SLOTS)
        index.expect(slot, keys, now_s + 5.0)
        until.update(((slot, key), now_s + 5.0) for key in keys)
        now_s += rng.choice((0.0, 1.0, 3.0))
        index.expire(now_s)
        until = {held: end_s for held, end_s in until.items() if end_s > now_s}
        probe = [k for _, k in engine.chain([rng.randrange(2) for _ in range(8)])]
        matched = index.match(probe, 16, expected=True)
        for slot in range(SLOTS):
            blocks = next((n for n, k in enumerate(probe) if (slot, k) not in until), 8)
            assert matched.get(slot, 0) == blocks
        assert index.expected == len(until)
        assert index.match(probe, 16) == {}


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_block_has_as_many_token_bytes_as_its_size_says(size: int) -> None:
    assert len(Engine(Random(1), size, None).chain([1])[0][0]) == size * TOKEN_BYTES
