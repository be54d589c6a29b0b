"""Which texts are remembered, and the chain of blocks that each one became.

A radix tree over text paths. A *segment* is a stretch of chunks without a fork: a text that parts
from a segment in its middle splits it there. A segment knows:

- its chunks' keys, and after how many bytes of text it ends
- its run: own keys of blocks. The chain of a text is that of the segment before it, cut to `first`
  blocks, and then the run. A chain may reach beyond the text's end: into blocks the engine wrote
  itself, or, where texts part, some into one of them. How much of it is of use, tokens tell.
- what was seen at its end: the tokens of a prompt that ended there, or the tokens that pairs of
  prompts had in common that parted there

A run names its predecessor (`link`), so a chain whose beginning was replaced, as an engine renders
the same text otherwise since its restart, is seen to be broken and ends at the break.

Blocks are kept here by key, 8 bytes each, and not looked up from their last one: engines evict a
prompt's end first, so of a prompt of which half is held, the index of what is held has forgotten
how to get from the end to the beginning.

Everything lies in arrays and bytes: a segment is a number, a chunk is an entry in a dict, key to
segment. The dict is cut in shards, as one large dict stalls everything while it grows. Segments are
in LRU order, and each use moves a segment in front of all before it, so the oldest is a leaf.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from statistics import median_low
from sys import byteorder
from typing import NamedTuple

NONE = -1
PARTINGS_MAX = 5
"""Pairs of prompts remembered per fork."""
OVERHANG_BLOCKS = 8
"""Blocks kept in front of a fork beyond what the first two texts shared: a third may share more."""
BLOCKS_PER_NODE = 16
"""So many blocks count as one more node."""
_KEY_BYTES = 8
_SHARD_SHIFT = 52
_SHARDS = 1 << (60 - _SHARD_SHIFT)
_INT_MAX = (1 << 31) - 1
_NO_PARTINGS = array("i", [NONE] * PARTINGS_MAX)
IsHeld = Callable[[int], bool]
"""Whether any endpoint holds the block of a key."""


class Known(NamedTuple):
    """How far a path is remembered."""

    chunks: int = 0
    segments: Sequence[int] = ()
    """Path order; the last one may go on beyond `chunks`."""


class Met(NamedTuple):
    """Where a text that was added left the ones known before."""

    chunks: int
    shared_blocks: int
    known_blocks: int
    """Length of the chain known for `chunks` of its text."""
    ended_tokens: int
    """Tokens of an earlier prompt that ended exactly there; `NONE` = none did."""


class TextTree:
    """The texts of all prompts whose blocks have one size."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.weight = 0
        """Nodes held: chunks, and blocks by `BLOCKS_PER_NODE`, and one per segment."""
        self._nodes: tuple[dict[int, int], ...] = tuple({} for _ in range(_SHARDS))
        self._keys: list[bytes] = []
        self._runs: list[bytes] = []
        self._start = array("I")
        """Chunks before the segment."""
        self._first = array("I")
        self._link = array("Q")
        self._end_bytes = array("Q")
        self._tokens = array("i")
        self._grown = array("b")
        """A longer text follows."""
        self._partings = array("i")
        """`PARTINGS_MAX` per segment, oldest first, `NONE` in front."""
        self._older = array("i")
        self._newer = array("i")
        self._oldest = self._newest = NONE
        self._free: list[int] = []

    def __len__(self) -> int:
        """Segments."""
        return len(self._keys) - len(self._free)

    @property
    def chunks(self) -> int:
        return sum(map(len, self._nodes))

    # ---- reading

    def find(self, keys: Sequence[int]) -> Known:
        """How much of a path is remembered. Costs two look-ups per segment and some in the last."""
        nodes = self._nodes
        segments: list[int] = []
        known = 0
        total = len(keys)
        while known < total:
            key = keys[known]
            segment = nodes[key >> _SHARD_SHIFT].get(key)
            if segment is None or self._start[segment] != known:
                break
            segments.append(segment)
            end = known + len(self._keys[segment]) // _KEY_BYTES
            if end <= total:
                key = keys[end - 1]
                if nodes[key >> _SHARD_SHIFT].get(key) == segment:
                    known = end
                    continue
            known = self._part(segment, keys, known + 1, min(end, total))
            break
        return Known(known, segments)

    def _part(self, segment: int, keys: Sequence[int], low: int, high: int) -> int:
        """Chunks of the path up to where it parts from the segment: `low` of them do not."""
        own = memoryview(self._keys[segment]).cast("Q")
        start = self._start[segment]
        while low < high:
            middle = (low + high) // 2
            if own[middle - start] == keys[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def at(self, key: int) -> int:
        """The segment with this chunk; `NONE` = no text has it."""
        return self._nodes[key >> _SHARD_SHIFT].get(key, NONE)

    def end(self, segment: int) -> int:
        """Chunks up to the segment's end."""
        return self._start[segment] + len(self._keys[segment]) // _KEY_BYTES

    def end_bytes(self, segment: int) -> int:
        return self._end_bytes[segment]

    def tokens(self, segment: int) -> int:
        """Of a prompt that ended with the segment; `NONE` = none did, or it is still running."""
        return self._tokens[segment]

    def grown(self, segment: int) -> bool:
        """Texts are known that go on after it."""
        return bool(self._grown[segment])

    def partings(self, segment: int) -> list[int]:
        """Tokens shared by prompts that parted at the segment's end."""
        low = segment * PARTINGS_MAX
        return [n for n in self._partings[low : low + PARTINGS_MAX] if n != NONE]

    def chain(self, segments: Sequence[int]) -> array[int]:
        """Block keys of the text that these segments make up, as far as they hang together."""
        return self._chain(segments)[0]

    def _chain(self, segments: Sequence[int]) -> tuple[array[int], int]:
        """The chain, and how many segments hang together."""
        chain = array("Q")
        firsts = self._first
        for sound, segment in enumerate(segments):
            first = firsts[segment]
            if first > len(chain) or (first and chain[first - 1] != self._link[segment]):
                return chain, sound
            del chain[first:]
            chain.frombytes(self._runs[segment])
        return chain, len(segments)

    def blocks(self, segment: int) -> tuple[int, int]:
        """Length of the segment's chain, and its last key; a length of 0 has none."""
        run = self._runs[segment]
        first = self._first[segment]
        last = int.from_bytes(run[-_KEY_BYTES:], byteorder) if run else self._link[segment]
        return first + len(run) // _KEY_BYTES, last

    # ---- writing

    def add(
        self,
        keys: Sequence[int],
        ends: Sequence[int],
        chain: array[int],
        is_held: IsHeld,
        *,
        early: bool = False,
    ) -> Met | None:
        """Remember that this text became these blocks; neither may be empty.

        Args:
            chain: blocks of the prompt and what followed, as far as they are known.
            early: more blocks are to come. Then nothing is done (`None`) while they are all known
                of this text: where it parts from the others cannot be told yet.
        """
        chunks, known_segments = self.find(keys)
        path = [*known_segments]
        known, sound = self._chain(path)
        shared = common(known, chain)
        if early and path and shared == len(chain):
            return None
        met = Met(chunks, shared, len(known), NONE)
        if path:
            for at in range(sound, len(path)):  # the text is known, but not by these blocks
                self._rewrite(path[at], shared if at == sound else len(chain), chain)
            if chunks < self.end(path[-1]):
                first = self._first[path[-1]]
                keep = max(first, shared) if sound == len(path) else len(chain)
                path[-1] = self._split(path[-1], chunks, ends[chunks - 1], keep)
            met = met._replace(ended_tokens=self._tokens[path[-1]])
            if sound == len(path) and shared < len(chain):
                self._meet(path[-1], met, known, chain, is_held, chunks < len(keys))
        if chunks < len(keys):
            first = min(shared, self.blocks(path[-1])[0]) if path else 0
            if path:
                self._grown[path[-1]] = 1
            path.append(self._new(chunks, keys[chunks:], ends[-1], first, chain))
        self._touch(path)
        return met

    def _meet(
        self,
        last: int,
        met: Met,
        known: array[int],
        chain: array[int],
        is_held: IsHeld,
        goes_on: bool,
    ) -> None:
        """A text with blocks of its own meets the last segment that it shares with others."""
        shared = met.shared_blocks
        parted = shared < len(known)
        if not goes_on:
            if not parted or not self._grown[last] or not is_held(known[shared]):
                self._rewrite(last, shared, chain)
        elif parted and met.ended_tokens == NONE:
            self.saw_parting(last, shared * self.block_tokens)
            usual = median_low(self.partings(last)) // self.block_tokens
            earliest = self.blocks(last)[0] - 2 * OVERHANG_BLOCKS
            if shared < earliest and (usual < earliest or not is_held(known[shared])):
                # Engines render the same text otherwise than they did: it is the others' blocks
                # that are out of date.
                self._rewrite(last, shared, chain[: self.blocks(last)[0]])
                low = last * PARTINGS_MAX
                self._partings[low : low + PARTINGS_MAX] = _NO_PARTINGS

    def _rewrite(self, segment: int, shared: int, chain: array[int]) -> None:
        """Give the segment this chain, of which so many blocks are those before it."""
        first = min(shared, self._first[segment], len(chain)) if shared < len(chain) else shared
        self._set_run(segment, chain[first:].tobytes())
        self._first[segment] = first
        self._link[segment] = chain[first - 1] if first else 0

    def extend(self, key: int, chunks: int, tip: int, more: array[int]) -> bool:
        """Blocks that follow `tip`, the last block known of the text that ends with this chunk.

        Returns: False when that text is not known any more, or by other blocks.
        """
        segment = self.at(key)
        if segment == NONE or self.end(segment) != chunks or self.blocks(segment)[1] != tip:
            return False
        self._set_run(segment, self._runs[segment] + more.tobytes())
        return True

    def saw_end(self, key: int, chunks: int, tokens: int) -> None:
        """A prompt ended with this chunk and had so many tokens."""
        segment = self.at(key)
        if segment != NONE and self.end(segment) == chunks:
            self._tokens[segment] = max(0, min(tokens, _INT_MAX))

    def saw_parting(self, segment: int, tokens: int) -> None:
        """Two prompts that parted at the segment's end had so many tokens in common."""
        low = segment * PARTINGS_MAX
        high = low + PARTINGS_MAX
        self._partings[low:high] = self._partings[low + 1 : high] + array(
            "i", (max(0, min(tokens, _INT_MAX)),)
        )

    def evict(self) -> bool:
        """Forget the leaf that was not used for the longest time; whether there was one."""
        segment = self._oldest
        if segment == NONE:
            return False
        self._unlink(segment)
        for key in array("Q", self._keys[segment]):
            shard = self._nodes[key >> _SHARD_SHIFT]
            if shard.get(key) == segment:
                del shard[key]
        self.weight -= self._weight(segment)
        self._keys[segment] = self._runs[segment] = b""
        self._free.append(segment)
        return True

    # ---- segments

    def _new(
        self, start: int, keys: Sequence[int], end_bytes: int, first: int, chain: array[int]
    ) -> int:
        """A leaf with the keys of its chunks and the part of the chain from `first` on."""
        segment = self._place()
        self._start[segment] = start
        self._first[segment] = first
        self._link[segment] = chain[first - 1] if first else 0
        self._end_bytes[segment] = end_bytes
        self._keys[segment] = array("Q", keys).tobytes()
        self._runs[segment] = chain[first:].tobytes()
        self.weight += self._weight(segment)
        self._name(keys, segment)
        return segment

    def _place(self) -> int:
        """A number for a new segment, with nothing seen at its end."""
        if self._free:
            segment = self._free.pop()
            self._tokens[segment] = NONE
            self._grown[segment] = 0
            low = segment * PARTINGS_MAX
            self._partings[low : low + PARTINGS_MAX] = _NO_PARTINGS
        else:
            segment = len(self._keys)
            self._keys.append(b"")
            self._runs.append(b"")
            for column in (self._start, self._first, self._link, self._end_bytes, self._grown):
                column.append(0)
            self._tokens.append(NONE)
            self._partings.extend(_NO_PARTINGS)
            self._older.append(NONE)
            self._newer.append(NONE)
        self._enter(segment)
        return segment

    def _split(self, segment: int, chunks: int, end_bytes: int, keep: int) -> int:
        """Cut a segment behind so many chunks of its path; its first `keep` blocks, and some, stay
        with its head, the others go with the tail.

        Returns: the head.
        """
        keys = self._keys[segment]
        cut = (chunks - self._start[segment]) * _KEY_BYTES
        new = self._place()
        # The shorter part gets the new number, as its chunks have to be told.
        head, tail = (new, segment) if 2 * cut <= len(keys) else (segment, new)
        first, link, run = self._first[segment], self._link[segment], self._runs[segment]
        known = array("Q", run)
        own = min(keep - first, len(known))
        self.weight -= self._weight(segment)
        self._copy(segment, tail)
        self._start[head], self._start[tail] = self._start[segment], chunks
        self._keys[head], self._keys[tail] = keys[:cut], keys[cut:]
        self._first[head], self._link[head] = first, link
        self._runs[head] = known[: own + OVERHANG_BLOCKS].tobytes()
        self._first[tail] = first + own
        self._link[tail] = known[own - 1] if own else link
        self._runs[tail] = known[own:].tobytes()
        self._end_bytes[head] = end_bytes
        self._tokens[head] = NONE
        self._grown[head] = 1
        low = head * PARTINGS_MAX
        self._partings[low : low + PARTINGS_MAX] = _NO_PARTINGS
        self.weight += self._weight(head) + self._weight(tail)
        self._name(array("Q", self._keys[new]), new)
        return head

    def _copy(self, source: int, target: int) -> None:
        """What was seen at the end of one segment was seen at the end of the other."""
        if source == target:
            return
        for column in (self._end_bytes, self._tokens, self._grown):
            column[target] = column[source]
        low, to = source * PARTINGS_MAX, target * PARTINGS_MAX
        self._partings[to : to + PARTINGS_MAX] = self._partings[low : low + PARTINGS_MAX]

    def _name(self, keys: Sequence[int], segment: int) -> None:
        nodes = self._nodes
        for key in keys:
            nodes[key >> _SHARD_SHIFT][key] = segment

    def _set_run(self, segment: int, run: bytes) -> None:
        self.weight -= self._weight(segment)
        self._runs[segment] = run
        self.weight += self._weight(segment)

    def _weight(self, segment: int) -> int:
        chunks = len(self._keys[segment]) // _KEY_BYTES
        return 1 + chunks + len(self._runs[segment]) // (_KEY_BYTES * BLOCKS_PER_NODE)

    # ---- age

    def _touch(self, path: Sequence[int]) -> None:
        """The last segment first, so that none is older than what follows it."""
        for segment in reversed(path):
            if segment != self._newest:
                self._unlink(segment)
                self._enter(segment)

    def _enter(self, segment: int) -> None:
        self._older[segment] = self._newest
        self._newer[segment] = NONE
        if self._newest != NONE:
            self._newer[self._newest] = segment
        else:
            self._oldest = segment
        self._newest = segment

    def _unlink(self, segment: int) -> None:
        older, newer = self._older[segment], self._newer[segment]
        if older != NONE:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer != NONE:
            self._older[newer] = older
        else:
            self._newest = older

    def ages(self) -> Iterator[int]:
        """Segments, oldest first."""
        segment = self._oldest
        while segment != NONE:
            yield segment
            segment = self._newer[segment]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Blocks that two chains have in common; keys are chained, so equal ones have equal ones
    before them."""
    low, high = 0, min(len(one), len(other))
    if high and one[high - 1] == other[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
