"""The blocks of all endpoints: own key -> who holds it, and which key comes before it.

One row per key, however many hold it. Who holds a block is an int with a bit per holding (one
medium of one rank of one slot); equal ints of neighbouring blocks are one object.

A block that nobody holds any more stays for a while, so that a chain that was remembered by its
last block can be followed back after that block was evicted: engines evict last blocks first. The
rows longest without a holder are given up when there are too many.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from epp.core.kvindex.table import NameTable

_SHARD_BITS = 10
_REMEMBERED_MIN = 1024
_REMEMBERED_PART = 8
"""Of so many held blocks one is remembered without a holder."""
_FREE = -1


class Blocks:
    """Rows by own key; changed by the index only."""

    __slots__ = (
        "_after",
        "_before",
        "_bit",
        "_idle",
        "depths",
        "live",
        "masks",
        "parents",
        "table",
    )

    def __init__(self) -> None:
        self.table = NameTable(_SHARD_BITS)
        self.masks: list[Any] = [_FREE]
        """Row -> bits of the holdings that hold it; 0: remembered; -1: a free row. Not
        typed as ints, which a compiled build would make anew for each row."""
        self.parents: vec[i64] = vec[i64]([0])
        """Row -> key of the block before it; 0 for a prompt's first block."""
        self.depths: vec[i32] = vec[i32]([0])
        """Row -> blocks from the start of the prompt up to and with this one."""
        self.live = 0
        """Rows that somebody holds."""
        self._idle: deque[int] = deque()
        """Rows in the order they lost their last holder; some were taken up again since."""
        self._before = self._bit = 0
        self._after: Any = 0

    def mask(self, key: int) -> int:
        """Bits of the holdings that hold a block; 0 for one that is not known."""
        row = self.table.find(key)
        if not row:
            return 0
        mask: int = self.masks[row]
        return mask

    def claim(self, key: int, parent: int, depth: int) -> int:
        """The row of a key; a new one is held by nobody yet.

        Args:
            parent: key of the block before it; 0 for a prompt's first block.
        """
        row = self.table.claim(key)
        if row > 0:
            return row
        row = -row
        if row == len(self.masks):
            self.masks.append(0)
            self.parents = append(self.parents, parent)
            self.depths = append(self.depths, depth)
        else:
            self.masks[row] = 0
            self.parents[row] = parent
            self.depths[row] = depth
        return row

    def joined(self, mask: int, bit: int) -> Any:
        """A mask with one more bit; for neighbours, which have mostly equal masks, one object."""
        if mask != self._before or bit != self._bit:
            self._before, self._bit, self._after = mask, bit, mask | bit
        return self._after

    def clear(self, row: int, bit: int) -> None:
        """Note that a holding holds this block no more."""
        mask: int = self.masks[row]
        if mask != bit:
            if mask != self._before or bit != self._bit:
                self._before, self._bit, self._after = mask, bit, mask & ~bit
            self.masks[row] = self._after  # `mask` has the bit, which tells this from `joined`
            return
        self.masks[row] = 0
        self.live -= 1
        self._idle.append(row)
        if len(self._idle) > _REMEMBERED_MIN + self.live // _REMEMBERED_PART:
            self._give_up()

    def chain(self, tip: int, blocks_max: int) -> array[int]:
        """The keys up to and with a block, as far as `blocks_max` goes back, in prompt order.

        Returns: nothing if the block, or one on the way, is not known any more.
        """
        table, parents = self.table, self.parents
        names = table.names
        row = table.find(tip)
        keys: array[int] = array("Q")
        while row and len(keys) < blocks_max:
            keys.append(names[row])
            parent = parents[row]
            if not parent:
                break
            # A chain's rows are mostly made one after the other.
            row = row - 1 if names[row - 1] == parent and row > 1 else table.find(parent)
        else:
            if not row:
                return array("Q")
        keys.reverse()
        return keys

    def _give_up(self) -> None:
        """Free the rows longest idle, two at most: one more than a call of `clear` adds."""
        for _ in range(2):
            if not self._idle:
                return
            row = self._idle.popleft()
            if not self.masks[row]:
                self.masks[row] = _FREE
                self.table.discard(row)
