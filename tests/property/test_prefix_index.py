"""The prefix index against an oracle that keeps one plain LRU per slot and counts block by block.

The oracle knows nothing of runs, masks or bisection; the index must equal it after every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from epp.core import prefix
from epp.core.prefix import PrefixIndex, name_blocks

SLOTS = range(4)
OWN = 12

prompts = st.text(alphabet="ab", min_size=0, max_size=20)
letters = st.lists(st.integers(0, 12), max_size=12)
slots = st.sampled_from(SLOTS)


def steps(chains: st.SearchStrategy) -> st.SearchStrategy:
    step = st.one_of(
        st.tuples(st.just("learn"), slots, st.lists(chains, max_size=3)),
        st.tuples(st.just("learn"), slots, st.lists(chains, min_size=1, max_size=1)),
        st.tuples(st.just("forget"), slots, st.none()),
        st.tuples(st.just("resize"), slots, st.integers(0, 25)),
    )
    return st.lists(step, max_size=40)


class Oracle:
    """Ordered dicts, oldest first; every block is touched, tail first; nothing is shared."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.own: dict[int, int] = {}
        self.lru: dict[int, OrderedDict[int, None]] = {}

    def learn(self, slot: int, chains: Iterable[Sequence[int]]) -> None:
        lru = self.open(slot)
        for chain in chains:
            for name in reversed(chain[: self.own[slot]]):
                lru[name] = None
                lru.move_to_end(name)
            self.shrink(slot)

    def forget(self, slot: int) -> None:
        self.lru.pop(slot, None)

    def resize(self, slot: int, own: int) -> None:
        self.open(slot)
        self.own[slot] = own
        self.shrink(slot)

    def open(self, slot: int) -> OrderedDict[int, None]:
        if slot not in self.lru:
            self.lru[slot], self.own[slot] = OrderedDict(), OWN
        return self.lru[slot]

    def shrink(self, slot: int) -> None:
        while len(self.lru[slot]) > self.own[slot]:
            self.lru[slot].popitem(last=False)
        while self.held > self.total:
            victim = max(self.lru.values(), key=len)
            for _ in range(min(self.held - self.total, len(victim))):
                victim.popitem(last=False)

    @property
    def held(self) -> int:
        return sum(map(len, self.lru.values()))

    @property
    def entries(self) -> int:
        return len({name for lru in self.lru.values() for name in lru})

    def match(self, chains: Iterable[Sequence[int]]) -> dict[int, int]:
        matched = dict.fromkeys(self.lru, 0)
        for chain in chains:
            for slot, lru in self.lru.items():
                for name in chain:
                    if name not in lru:
                        break
                    matched[slot] += 1
        return {slot: blocks for slot, blocks in matched.items() if blocks}


def chain_of(prompt: str) -> list[int]:
    return name_blocks(prompt.encode("utf-32-le"), block_tokens=1, root=1, blocks_max=0)


def apply(target: PrefixIndex | Oracle, verb: str, slot: int, argument: object) -> None:
    if verb == "forget":
        target.forget(slot)
    else:
        getattr(target, verb)(slot, argument)


@pytest.mark.parametrize("frees_blocks", [1, 1000], ids=["bit-by-bit", "at-once"])
@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 60), script=steps(prompts.map(chain_of)), probe=st.lists(prompts))
def test_the_index_equals_one_plain_lru_per_slot(frees_blocks, total, script, probe) -> None:
    index, oracle = PrefixIndex(total, slot_blocks_max=OWN), Oracle(total)
    learned = [chain_of(prompt) for prompt in probe]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_FORGET_FREES_BLOCKS", frees_blocks)
        patch.setattr(prefix, "_LEARN_FREES_BLOCKS", frees_blocks)
        patch.setattr(prefix, "_OLDEST_RUNS", 2)
        patch.setattr(prefix, "_ROOMY_BYTES", 0)
        for verb, slot, argument in script:
            apply(index, verb, slot, argument)
            apply(oracle, verb, slot, argument)
            if verb == "learn":
                learned += argument
            for chain in learned:
                assert index.match([chain]) == oracle.match([chain])
            assert index.match(learned) == oracle.match(learned)
            assert [index.held_by(s) for s in SLOTS] == [len(oracle.lru.get(s, ())) for s in SLOTS]
            assert index.held <= total
            if frees_blocks > total:
                assert (index.entries, index.held) == (oracle.entries, oracle.held)


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 60), script=steps(prompts))
def test_a_slot_that_holds_a_block_holds_all_blocks_before_it(total, script) -> None:
    index, prompts_by_name = PrefixIndex(total, slot_blocks_max=OWN), {}
    for verb, slot, argument in script:
        if verb == "learn":
            for prompt in argument:
                for end, name in enumerate(chain_of(prompt), start=1):
                    prompts_by_name[name] = prompt[:end]
            argument = [chain_of(prompt) for prompt in argument]
        apply(index, verb, slot, argument)
        masks = {name: mask for shard in index._shards for name, mask in shard.items()}
        for name, mask in masks.items():
            for before in chain_of(prompts_by_name[name])[:-1]:
                assert masks[before] & mask == mask


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 60), script=steps(letters))
def test_colliding_names_break_no_bound_and_leave_nothing_behind(total, script) -> None:
    index = PrefixIndex(total, slot_blocks_max=OWN)
    own = dict.fromkeys(SLOTS, OWN)
    for verb, slot, argument in script:
        apply(index, verb, slot, argument)
        if verb != "learn":
            own[slot] = OWN if verb == "forget" else argument
        masks = {name: mask for shard in index._shards for name, mask in shard.items()}
        assert index.held == sum(mask.bit_count() for mask in masks.values()) <= total
        assert index.entries == len(masks)
        assert all(index.held_by(s) <= own[s] for s in SLOTS)
        if verb == "learn":
            chains = [chain for chain in argument if chain]
            blocks = sum(map(len, chains))
            assert all(1 <= count <= blocks for count in index.match(chains).values())
    for slot in SLOTS:
        index.forget(slot)
    assert (index.entries, index.held) == (0, 0)
