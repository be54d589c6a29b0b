"""What one medium of one rank of one endpoint holds, as its engine tells it.

The engine names blocks by hashes of its own, which mean nothing to us: a holding remembers for each
which block (`Blocks`) that is, for removals and for children that name it as their parent.

Invariants, with "held" for what the engine stored and has not removed:

- A row is held, or it is *absent*: removed, but a held block names it as the block before it.
  `kids` counts the held ones that do. So there are at most as many absent rows as held ones.
- The keys of absent rows are in `gaps`, which all holdings share. Hence along a chain, between two
  blocks that are in no gap, whoever holds the later and all before the earlier holds all between:
  that is what lets `KvIndex.match` bisect. Engines evict last blocks first, so there are hardly
  any gaps unless an event was lost.
- `loose` says that this is not so here, as the engine did not say which block came before.
- An engine that stores a block twice has two copies and removes it twice.
- Several hashes may be one block for us (an adapter loaded anew from another path): `aliases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import iter_unpack
from typing import Any

from librt.vecs import append, pop, vec
from mypy_extensions import i32
from xxhash import xxh64_intdigest

from epp.core.kvevents import TOKEN_BYTES, Hash
from epp.core.kvindex.aside import Aside
from epp.core.kvindex.blocks import Blocks
from epp.core.kvindex.keys import extra_of, seed_of
from epp.core.kvindex.table import NameTable

_SHARD_BITS = 5
_NAME_MASK = (1 << 60) - 1
_PROBES_MAX = 64
"""Rows that one eviction looks at for a block that no other follows."""


def name_of(engine_hash: Hash) -> int:
    """An engine's hash as a name in tables: its lowest 60 bits, of a digest the last ones, which
    is what vLLM too makes of a digest when it publishes an int."""
    if isinstance(engine_hash, int):
        return engine_hash & _NAME_MASK
    return int.from_bytes(engine_hash[-8:], "big") & _NAME_MASK


class Holding:
    """Rows by an engine's hash; changed by the index only."""

    __slots__ = (
        "absent",
        "aliases",
        "aside",
        "bit",
        "block_tokens",
        "blocks",
        "box",
        "copies",
        "gaps",
        "hand",
        "held",
        "kids",
        "loose",
        "medium",
        "rank",
        "rows",
        "slot",
        "table",
        "ups",
    )

    def __init__(
        self, bit: int, blocks: Blocks, gaps: dict[int, int], *, slot: int, rank: int, medium: int
    ) -> None:
        """Start empty; `medium` is a position in `MEDIUMS`."""
        self.bit = bit
        self.box: Any = bit
        """The same as an object, of which there is one for all rows (see `Blocks.masks`)."""
        self.blocks = blocks
        self.gaps = gaps
        """Key -> how many holdings' absent rows have it; shared by all holdings."""
        self.slot = slot
        self.rank = rank
        self.medium = medium
        self.table = NameTable(_SHARD_BITS)
        self.rows: vec[i32] = vec[i32]([0])
        """Row -> row in `blocks`; 0 for an absent and for a free row."""
        self.ups: vec[i32] = vec[i32]([0])
        """Row -> row of the block before it; 0 for none."""
        self.kids: vec[i32] = vec[i32]([0])
        self.absent: dict[int, int] = {}
        """Row -> key."""
        self.copies: dict[int, int] = {}
        """Row -> copies besides the first."""
        self.aliases: dict[int, int] = {}
        """Row in `blocks` -> hashes of it besides the first."""
        self.aside = Aside()
        self.held = 0
        """Blocks held; copies do not count."""
        self.block_tokens = 0
        self.loose = False
        self.hand = 0

    def holds(self, name: int) -> bool:
        """Whether a block is held here."""
        row = self.table.find(name)
        return row > 0 and self.rows[row] > 0

    def known(self, name: int) -> tuple[int, int, int] | None:
        """Row, key and depth of a block that this holding can tell the key of."""
        row = self.table.find(name)
        if not row:
            return None
        blocks = self.blocks
        block: int = self.rows[row]
        if block:
            return row, blocks.table.names[block], blocks.depths[block]
        key = self.absent[row]
        block = blocks.table.find(key)
        return (row, key, blocks.depths[block]) if block else None

    def store(
        self,
        hashes: Sequence[Hash],
        tokens: bytes,
        block_tokens: int,
        *,
        lora: str | None,
        extras: Sequence[object] | None,
        up: int,
        key: int,
        depth: int,
    ) -> int:
        """Hold consecutive blocks.

        Args:
            tokens, block_tokens, lora, extras: as in `Stored`.
            up, key, depth: row, key and depth of the block before the first; 0, the root and 0
                where a prompt begins.
        Returns: key of the last block.
        """
        parent = key if depth else 0
        pieces = iter_unpack(f"{block_tokens * TOKEN_BYTES}s", tokens)
        for number, (piece,) in enumerate(pieces):
            engine_hash = hashes[number]
            name = (
                engine_hash & _NAME_MASK if isinstance(engine_hash, int) else name_of(engine_hash)
            )
            seed = key
            if extras is not None:
                extra = extra_of(extras[number], lora)
                if extra is not None:
                    seed = seed_of(key, extra)
            key = xxh64_intdigest(piece, seed) >> 4
            depth += 1
            up = self.put(name, key, parent, depth, up)
            parent = key
        return key

    def put(self, name: int, key: int, parent: int, depth: int, up: int) -> int:
        """Hold a block under an engine's name. Returns: its row."""
        row = self.table.claim(name)
        if row < 0:
            row = -row
            self._widen(row)
        else:
            block: int = self.rows[row]
            if block and self.blocks.table.names[block] == key:
                self.copies[row] = self.copies.get(row, 0) + 1
                return row
            if row == up:  # a block that comes before itself
                up = 0
                self.loose = True
            row = self._make_room(row, name)
        self._hold(row, key, parent, depth)
        self.ups[row] = up
        if up:
            self.kids[up] += 1
        return row

    def drop(self, row: int) -> None:
        """One copy of a held row is gone."""
        if self.copies and (more := self.copies.get(row)):
            if more == 1:
                del self.copies[row]
            else:
                self.copies[row] = more - 1
            return
        self.let_go(row)

    def let_go(self, row: int) -> None:
        """A held row is gone, copies and all."""
        blocks = self.blocks
        block: int = self.rows[row]
        if self.copies:
            self.copies.pop(row, None)
        key = blocks.table.names[block]
        if self.aliases and block in self.aliases:
            self._drop_alias(block)
        else:
            blocks.clear(block, self.bit)
        self.rows[row] = 0
        self.held -= 1
        up: int = self.ups[row]
        if up:
            self.ups[row] = 0
            left: int = self.kids[up] - 1
            self.kids[up] = left
            if not left and not self.rows[up]:
                self._close_gap(up)
                self.table.discard(up)
        if self.kids[row]:
            self._open_gap(row, key)
        else:
            self.table.discard(row)

    def mark_absent(self, name: int, key: int) -> int:
        """A row for a block that is not held here but has just got a child here.

        Returns: the row, which is to be given to `unmark_childless` when the child is in.
        """
        row = -self.table.claim(name)
        self._widen(row)
        self._open_gap(row, key)
        return row

    def unmark_childless(self, row: int) -> None:
        """Free an absent row that got no child after all."""
        if not self.rows[row] and not self.kids[row] and row in self.absent:
            self._close_gap(row)
            self.table.discard(row)

    def evict(self) -> None:
        """Let go of some block, if there is one: of the next rows one that no block follows, as
        far as there is such a one among them."""
        rows, kids, last = self.rows, self.kids, 0
        row, count = self.hand, len(self.rows)
        for probe in range(count):
            row = row + 1 if row + 1 < count else 0
            if rows[row]:
                last = row
                if not kids[row]:
                    break
            if last and probe >= _PROBES_MAX:
                break
        self.hand = row
        if last:
            self.let_go(last)

    def free(self, blocks_max: int) -> int:
        """Clear the next blocks of a holding that is used no more; `held` says how many are left.

        Returns: rows looked at, >= 1 while there is something left.
        """
        freed, blocks, bit = 0, self.blocks, self.bit
        while self.absent and freed < blocks_max:
            _, key = self.absent.popitem()
            self._uncount_gap(key)
            freed += 1
        while self.held and freed < blocks_max:
            freed += 1
            self.rows, block = pop(self.rows)
            if block:
                mask: int = blocks.masks[block]
                if mask > 0 and mask & bit:  # not if it was cleared as an alias
                    blocks.clear(block, bit)
                self.held -= 1
        return freed

    def _hold(self, row: int, key: int, parent: int, depth: int) -> None:
        blocks, bit = self.blocks, self.bit
        masks = blocks.masks
        block = blocks.claim(key, parent, depth)
        mask: int = masks[block]
        if not mask:
            masks[block] = self.box
            blocks.live += 1
        elif mask & bit:
            self.aliases[block] = self.aliases.get(block, 0) + 1
        else:
            masks[block] = blocks.joined(mask, bit)
        self.rows[row] = block
        self.held += 1

    def _widen(self, row: int) -> None:
        """Make room in the columns for a row just claimed."""
        if row == len(self.rows):
            self.rows = append(self.rows, 0)
            self.ups = append(self.ups, 0)
            self.kids = append(self.kids, 0)

    def _make_room(self, row: int, name: int) -> int:
        """For another block under the name of an existing row: the row, or a new one."""
        if self.rows[row]:
            self.let_go(row)
            row = self.table.claim(name)
            if row < 0:
                return -row
        self._close_gap(row)
        return row

    def _open_gap(self, row: int, key: int) -> None:
        self.absent[row] = key
        self.gaps[key] = self.gaps.get(key, 0) + 1

    def _close_gap(self, row: int) -> None:
        self._uncount_gap(self.absent.pop(row))

    def _uncount_gap(self, key: int) -> None:
        more = self.gaps[key] - 1
        if more:
            self.gaps[key] = more
        else:
            del self.gaps[key]

    def _drop_alias(self, block: int) -> None:
        more = self.aliases[block] - 1
        if more:
            self.aliases[block] = more
        else:
            del self.aliases[block]
