"""Names for prefix blocks, and the bounded index of which endpoint was sent which of them.

A prompt is cut into blocks and each block is named by a hash over its bytes and the name before
it, so that equal names mean equal prompts up to there: a chain. `PrefixIndex` remembers which
endpoint (by slot) was sent which names and answers, for a new chain, how many leading blocks each
slot holds. It is a guess at the engine's prefix cache, made of our own decisions alone.

Two structures:

- name -> int bitmask of the slots that hold it, in 745 dicts chosen by the name's low bits: one
  dict of two million entries stalls the event loop for 93 ms whenever it grows. The values are
  ints, which the garbage collector does not look at.
- per slot, its names in LRU order. A learn touches a chain tail first and head last, so in that
  order every block is younger than the blocks that follow it, and eviction takes leaves first.
  Hence **a slot that holds a block holds all the blocks before it**, exactly, and `match` may
  bisect: along a chain the sets of holders only shrink.

The same fact keeps the LRU order small. The blocks that one learn touched last always are a
contiguous piece of its chain, a *run*: later learns take blocks from its head, eviction from its
tail. So the order is kept per run, not per block: a run is a `bytes` of packed names (8 B per
block), runs are ordered by when they were learned, and a dict finds a run by its first name. A
learn walks its chain from run to run, takes the common part from each, and appends one new run.

Invariants: a name held by a slot is in exactly one run of this slot; `heads` has the first name of
every run; a mask is never 0. Colliding names (they can be crafted, xxh64 is no secret) cost only
a wrong match: where a chain meets a name that its slot already holds elsewhere, the rest of the
chain is not learned, and the invariants stand.

Cost, measured by `bench/prefix_index.py` with 64 slots of 31 250 blocks, full and in turnover. A
held block takes 90 to 95 B when one slot holds it and 19 B when eight do, in runs of hundreds of
blocks. A run takes some 160 B more: 106 B per block in runs of 8, 260 B in runs of one. A `match`
looks up about log2(blocks) names per distinct match length: 1 to 10 us. A `learn` pays hardly
anything per block held before and 0.25 us per new block in a small index, 1 us in a full one, where
a new block and the one evicted for it are both cache misses.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress, count, cycle, islice
from operator import attrgetter
from struct import iter_unpack, unpack_from
from sys import byteorder, getsizeof
from typing import TypeVar

from xxhash import xxh64_intdigest

BYTES_PER_TOKEN = 4
"""Bytes of prompt view per token: a little-endian 32-bit token id, or four bytes of text."""

_Value = TypeVar("_Value")
_NAME_BYTES = 8
_DIGIT_VALUES = bytes.maketrans(b"01", b"\x00\x01")

# A name's low bits choose one of these places; `_make_shards` lays the dicts over them.
_PLACES = 4096
_PLACE_BITS = _PLACES - 1

# How much work one call may do besides its own, each about a millisecond or less at two million
# blocks: blocks of forgotten slots to free, oldest runs to look up, names to copy in trimming.
_FORGET_FREES_BLOCKS = 1024
_LEARN_FREES_BLOCKS = 256
_OLDEST_RUNS = 64
_TRIM_NAMES = 1024

# Of every so many evicted blocks one shard is checked. A dict just grown by itself takes 54 to
# 108 B per entry, its copy 27 to 54 B; 57 B leave the copy a twentieth of its content to grow into.
_BLOCKS_PER_CHECK = 128
_ROOMY_BYTES = 512
_ROOMY_BYTES_PER_NAME = 57


def root_of(model: str, cache_salt: str) -> int:
    """The parent of a chain's first block: prompts share blocks only under an equal root.

    Returns: 64 bits, equal in every process. The model's length is hashed too, so that no two
        pairs of model and salt join to the same text.
    """
    return xxh64_intdigest(f"{len(model)}:{model}{cache_salt}".encode(errors="surrogatepass"))


def name_blocks(prompt: bytes, *, block_tokens: int, root: int, blocks_max: int) -> list[int]:
    """Name the full blocks of a prompt so that equal names mean equal prefixes.

    Args:
        prompt: a prompt view, `BYTES_PER_TOKEN` bytes per token.
        block_tokens: tokens per block, >= 1.
        root: from `root_of`.
        blocks_max: only so many leading blocks are named; 0 names them all.
    Returns: prompt order; a last, partial block has no name. A name is the upper 60 bits of the
        block's xxh64 with the previous name (or the root) as seed: 60 bits fit an int of 32 bytes,
        64 bits need one of 48.
    Raises: ValueError if `block_tokens` or `blocks_max` is out of range.
    """
    if block_tokens < 1 or blocks_max < 0:
        raise ValueError(
            f"block_tokens={block_tokens}, blocks_max={blocks_max}: need at least 1 and 0"
        )
    size = block_tokens * BYTES_PER_TOKEN
    blocks = len(prompt) // size
    if blocks_max:
        blocks = min(blocks, blocks_max)
    if not blocks:
        return []  # also where a block is longer than `struct` can say
    name = root
    whole = memoryview(prompt)[: blocks * size]
    # Cut by struct: 71 us for 512 blocks of 256 bytes, where slices take 160.
    return [
        name := xxh64_intdigest(block, name) >> 4 for (block,) in iter_unpack(f"{size}s", whole)
    ]


def names_in(run: bytes) -> int:
    """How many names `PrefixIndex.runs` packed into a run."""
    return len(run) // _NAME_BYTES


def hex_names(run: bytes, names_max: int) -> str:
    """The first names of a run for people: 16 hexadecimal digits each, a space between two."""
    names = array("Q", run[: names_max * _NAME_BYTES])
    if byteorder == "little":
        names.byteswap()
    return names.tobytes().hex(" ", _NAME_BYTES)


def names_of(text: str) -> list[int]:
    """What `hex_names` wrote.

    Raises: ValueError if it is something else.
    """
    names = [int(digits, 16) for digits in text.split()]
    if names and not 0 <= min(names) <= max(names) < 1 << 64:
        raise ValueError("a name of a prefix block has 16 hexadecimal digits at most")
    return names


class _Holding:
    """The blocks of one slot, least recently learned first, as runs (see the module's text)."""

    __slots__ = ("_heads", "_oldest", "_runs", "_ticks", "bit", "blocks", "blocks_max")

    def __init__(self, bit: int, blocks_max: int) -> None:
        self.bit = bit
        self.blocks = 0
        self.blocks_max = blocks_max
        self._runs: dict[int, bytes] = {}
        """Tick of the learn -> packed names, head first. Dict order is LRU order, as ticks grow
        and a run that shrinks keeps its place."""
        self._heads: dict[int, int] = {}
        """First name of a run -> its tick."""
        self._ticks = count()
        self._oldest: list[int] = []
        """Ticks of some of the oldest runs, oldest last; some may be gone."""

    def take(self, chain: Sequence[int], packed: bytes) -> int:
        """Take the chain's leading held blocks out of the runs that have them; tell how many."""
        taken = 0
        while taken < len(chain):
            tick = self._heads.pop(chain[taken], None)
            if tick is None:
                break
            run = self._runs[tick]
            common = _common_bytes(run, packed[taken * _NAME_BYTES :])
            taken += common // _NAME_BYTES
            if common == len(run):
                del self._runs[tick]
            else:
                self._runs[tick] = rest = run[common:]
                self._heads[_first_name(rest)] = tick
        return taken

    def append(self, head: int, run: bytes) -> None:
        """Add a run as the youngest; none of its names may be in another run."""
        tick = next(self._ticks)
        self._runs[tick] = run
        self._heads[head] = tick

    def shed(self, blocks: int) -> array[int]:
        """Drop the oldest blocks and return their names; `blocks` is at most what is held."""
        shed = array("Q")
        wanted = blocks * _NAME_BYTES
        while wanted > 0:
            tick = self._oldest_tick()
            run = self._runs[tick]
            shed.frombytes(run[-wanted:])
            if len(run) <= wanted:
                del self._runs[tick]
                del self._heads[_first_name(run)]
            else:
                self._runs[tick] = run[:-wanted]
            wanted -= len(run)
        self.blocks -= blocks
        return shed

    def youngest(self, runs_max: int) -> list[bytes]:
        """Up to so many runs, the youngest first."""
        return list(islice(reversed(self._runs.values()), runs_max))

    def _oldest_tick(self) -> int:
        # A dict skips its deleted entries one by one to find its first: asking for a few dozen at
        # once keeps an eviction from a slot of many short runs from costing that scan each time.
        while True:
            while self._oldest:
                if (tick := self._oldest[-1]) in self._runs:
                    return tick
                self._oldest.pop()
            runs = _trimmed(self._runs)
            if runs is self._runs:  # one copy at a time
                self._heads = _trimmed(self._heads)
            self._runs = runs
            self._oldest = list(islice(self._runs, _OLDEST_RUNS))[::-1]


class PrefixIndex:
    """Which slot was sent which prefix blocks: an LRU per slot, bounded per slot and overall.

    What is learned is seen by the next `match`, so requests of one burst stay together.
    """

    def __init__(self, blocks_max_total: int, *, slot_blocks_max: int) -> None:
        """Start empty.

        Args:
            blocks_max_total: bound of the held blocks of all slots together, >= 0. When it is
                reached, the slot that holds most gives up its oldest blocks.
            slot_blocks_max: bound per slot until `resize` says otherwise, >= 0.
        Raises: ValueError if a bound is negative.
        """
        self._blocks_max_total = _checked_bound(blocks_max_total)
        self._slot_blocks_max = _checked_bound(slot_blocks_max)
        self._shards, spans = _make_shards()
        self._spans = cycle(spans)
        self._holdings: dict[int, _Holding] = {}
        self._leaving: deque[_Holding] = deque()
        """What forgotten slots held and was not freed yet."""
        self._present = 0
        """Bits of `_holdings`."""
        self._slot_by_bit: list[int] = []
        self._held = 0

    @property
    def entries(self) -> int:
        """Distinct names in the index, those of forgotten slots included until they are freed."""
        return sum({id(shard): len(shard) for shard in self._shards}.values())

    @property
    def held(self) -> int:
        """Blocks held, summed over the slots: what `blocks_max_total` bounds. Those of forgotten
        slots count until they are freed."""
        return self._held

    def held_by(self, slot: int) -> int:
        """Blocks held by one slot; 0 for a slot never heard of."""
        holding = self._holdings.get(slot)
        return holding.blocks if holding else 0

    def runs(self, slot: int, runs_max: int) -> list[bytes]:
        """What a slot holds, youngest first: pieces of chains, head first, as `hex_names` reads
        them. Whatever is cut off the end, each block that is left still has all before it.

        Takes about 10 ns per run, so that a page may ask for many without a stall.
        """
        holding = self._holdings.get(slot)
        return holding.youngest(runs_max) if holding else []

    def match(self, chains: Sequence[Sequence[int]]) -> dict[int, int]:
        """Count the leading blocks of each chain that each slot holds, summed over the chains.

        Returns: slot -> blocks, >= 1; a slot that holds none is absent. Touches no LRU order.
        """
        matched: dict[int, int] = {}
        for chain in chains:
            of_chain = self._match_chain(chain) if chain else {}
            if not matched:
                matched = of_chain
            else:
                for slot, blocks in of_chain.items():
                    matched[slot] = matched.get(slot, 0) + blocks
        return matched

    def learn(self, slot: int, chains: Sequence[Sequence[int]]) -> None:
        """Note that a slot was sent these chains: it holds them now, and they are its youngest.

        Of a chain longer than a bound only the leading part is held.
        """
        holding = self._holdings.get(slot) or self._open(slot)
        for chain in chains:
            if chain and holding.blocks_max:
                self._learn_chain(holding, chain[: holding.blocks_max])
                self._shrink_to_bounds(holding)
        self._free_leaving(_LEARN_FREES_BLOCKS)

    def forget(self, slot: int) -> None:
        """Forget everything of a slot, its own bound included; the slot may be used anew at once.

        Of many blocks some are freed here and the rest bit by bit by later learns, so that an
        endpoint that leaves does not stall the requests of the others.
        """
        holding = self._holdings.pop(slot, None)
        if holding is not None:
            self._present ^= holding.bit
            self._leaving.append(holding)
            self._free_leaving(_FORGET_FREES_BLOCKS)

    def resize(self, slot: int, blocks_max: int) -> None:
        """Bound a slot to what its engine can hold, in prefix blocks (not in the engine's, which
        may be smaller), >= 0; what is too much is evicted.

        Raises: ValueError if the bound is negative.
        """
        blocks_max = _checked_bound(blocks_max)
        holding = self._holdings.get(slot) or self._open(slot)
        holding.blocks_max = blocks_max
        self._shrink_to_bounds(holding)

    def _open(self, slot: int) -> _Holding:
        # Not 1 << slot: the bit of a forgotten slot stays in masks until all is freed.
        used = self._present
        for leaving in self._leaving:
            used |= leaving.bit
        number = (~used & (used + 1)).bit_length() - 1
        self._slot_by_bit[number : number + 1] = [slot]
        self._present |= 1 << number
        holding = self._holdings[slot] = _Holding(1 << number, self._slot_blocks_max)
        return holding

    def _match_chain(self, chain: Sequence[int]) -> dict[int, int]:
        """Slot -> leading blocks held, of a chain of at least one block.

        The holders only get fewer along the chain. So between two positions with the same holders
        there is nothing to look up; where they differ, look in the middle.
        """
        matched: dict[int, int] = {}
        shards = self._shards
        name = chain[0]
        holders = shards[name & _PLACE_BITS].get(name, 0) & self._present
        if not holders:
            return matched
        # Who holds the last block holds them all: a prompt that was sent before costs no search.
        name, high = chain[-1], len(chain)
        remaining = shards[name & _PLACE_BITS].get(name, 0) & holders
        if remaining:
            self._note(matched, remaining, high)
        spans = [(0, holders, high - 1, remaining)] if remaining != holders else []
        while spans:
            low, holders, high, remaining = spans.pop()
            while high - low > 1:
                middle = (low + high) // 2
                name = chain[middle]
                mask = shards[name & _PLACE_BITS].get(name, 0) & holders
                if mask == holders:
                    low = middle
                    continue
                if mask != remaining:
                    spans.append((middle, mask, high, remaining))
                high, remaining = middle, mask
            self._note(matched, holders & ~remaining, high)
        return matched

    def _note(self, matched: dict[int, int], holders: int, blocks: int) -> None:
        """These holders hold so many blocks."""
        if not holders & (holders - 1):  # mostly, only one has just this length
            matched[self._slot_by_bit[holders.bit_length() - 1]] = blocks
            return
        digits = bin(holders)[:1:-1].encode().translate(_DIGIT_VALUES)
        matched.update(dict.fromkeys(compress(self._slot_by_bit, digits), blocks))

    def _learn_chain(self, holding: _Holding, chain: Sequence[int]) -> None:
        packed = array("Q", chain).tobytes()
        known = holding.take(chain, packed)
        added = self._mark(holding.bit, islice(chain, known, None))
        if known + added:
            holding.append(chain[0], packed[: (known + added) * _NAME_BYTES])
        holding.blocks += added
        self._held += added

    def _mark(self, bit: int, names: Iterable[int]) -> int:
        """Set a slot's bit on names it does not hold, up to the first that it does (a collision);
        tell how many were set."""
        shards = self._shards
        marked = before = after = 0
        for name in names:
            shard = shards[name & _PLACE_BITS]
            mask = shard.get(name)
            if mask is None:
                shard[name] = bit
            elif mask & bit:
                break
            else:
                if mask != before:  # neighbours have mostly equal masks: let them share one int
                    before, after = mask, mask | bit
                shard[name] = after
            marked += 1
        return marked

    def _evict(self, holding: _Holding, blocks: int) -> None:
        """Free a slot's oldest blocks."""
        shards, bit = self._shards, holding.bit
        before = after = 0
        for name in holding.shed(blocks):
            shard = shards[name & _PLACE_BITS]
            mask = shard[name]
            if mask == bit:
                del shard[name]
            else:
                if mask != before:
                    before, after = mask, mask ^ bit
                shard[name] = after
        self._held -= blocks
        self._trim_shards(checks=blocks // _BLOCKS_PER_CHECK + 1)

    def _trim_shards(self, *, checks: int) -> None:
        """Trim so many shards in turn, but stop when that got long: at two million blocks, one."""
        copied = 0
        for span in islice(self._spans, checks):
            shard = self._shards[span.start]
            if (trimmed := _trimmed(shard)) is not shard:
                self._shards[span] = [trimmed] * (span.stop - span.start)
                copied += len(trimmed)
                if copied >= _TRIM_NAMES:
                    break

    def _free_leaving(self, blocks: int) -> None:
        """Free up to so many blocks of forgotten slots."""
        while self._leaving and blocks > 0:
            holding = self._leaving[0]
            freed = min(blocks, holding.blocks)
            self._evict(holding, freed)
            blocks -= freed
            if not holding.blocks:
                self._leaving.popleft()

    def _shrink_to_bounds(self, holding: _Holding) -> None:
        if holding.blocks > holding.blocks_max:
            self._evict(holding, holding.blocks - holding.blocks_max)
        if self._held > self._blocks_max_total:
            self._free_leaving(self._held - self._blocks_max_total)
        while self._held > self._blocks_max_total:
            largest = max(self._holdings.values(), key=attrgetter("blocks"))
            self._evict(largest, min(self._held - self._blocks_max_total, largest.blocks))


def _checked_bound(blocks: int) -> int:
    if blocks < 0:
        raise ValueError(f"a bound of {blocks} blocks: must not be negative")
    return blocks


def _make_shards() -> tuple[list[dict[int, int]], list[slice]]:
    """Empty dicts by a name's low bits, and the places of each.

    Each has 4 to 7 neighbouring places: of different size, they grow at different times, and the
    room that a dict keeps unused averages out."""
    shards: list[dict[int, int]] = []
    spans: list[slice] = []
    while (start := len(shards)) < _PLACES:
        stop = min(start + 4 + len(spans) % 4, _PLACES)
        shards += [{}] * (stop - start)
        spans.append(slice(start, stop))
    return shards, spans


def _trimmed(table: dict[int, _Value]) -> dict[int, _Value]:
    """The table, or a smaller copy if it wastes room.

    Deletions use up a dict's room as insertions do, and a dict out of room grows to three to six
    times its content; a copy has one and a half to three times. Where the copy would be full again
    soon, it is not made.
    """
    roomy = getsizeof(table) > _ROOMY_BYTES + _ROOMY_BYTES_PER_NAME * len(table)
    return dict(table) if roomy else table


def _first_name(run: bytes) -> int:
    name: int = unpack_from("=Q", run)[0]
    return name


def _common_bytes(run: bytes, packed: bytes) -> int:
    """Length of the common beginning of two rows of packed names, in bytes of whole names."""
    most = min(len(run), len(packed))
    if run[:most] == packed[:most]:
        return most
    low, high = 0, most // _NAME_BYTES - 1  # names known to be equal; names that may be
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * _NAME_BYTES, middle * _NAME_BYTES
        if run[start:stop] == packed[start:stop]:
            low = middle
        else:
            high = middle - 1
    return low * _NAME_BYTES
