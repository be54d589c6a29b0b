"""Folds events into holdings: what is stored, removed, cleared, and what has to wait.

Whatever is lost, the state stays consistent: a removal of something unknown is counted, a block
whose parent is unknown waits (`Aside`), and what exceeds the bound is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from epp.core.kvevents import TOKEN_BYTES, Hash, Removed, Stored
from epp.core.kvindex.aside import Orphan
from epp.core.kvindex.holding import Holding, name_of
from epp.core.kvindex.keys import key_of, root_of
from epp.core.kvindex.ranks import Ranks, number_of
from epp.core.structs import Frozen

FREED_AT_ONCE = 1024
"""Blocks of forgotten slots freed in one call: about a millisecond."""


class Joined(Frozen, frozen=True):
    """A request's blocks, as far as its engine stored them by now."""

    session_id: str
    tip: int
    """Key of the last of them; `KvIndex.chain` leads back from it."""
    blocks: int
    """How many there are, from the start of the prompt."""
    block_tokens: int


class Folder:
    """Changes what there is, event by event. The numbers only grow."""

    __slots__ = (
        "_ranks",
        "_secret",
        "blocks_max",
        "cleared",
        "evicted",
        "malformed",
        "orphans_dropped",
        "orphans_max",
        "removed",
        "stored",
        "unknown_parents",
        "unknown_removals",
        "unresolved",
    )

    def __init__(self, ranks: Ranks, *, blocks_max: int, orphans_max: int, secret: bytes) -> None:
        """Fold into these; the bounds are as of `KvIndex`."""
        self._ranks = ranks
        self._secret = secret
        self.blocks_max = blocks_max
        self.orphans_max = orphans_max
        self.stored = 0
        """Blocks."""
        self.removed = 0
        """Blocks."""
        self.cleared = 0
        """Events."""
        self.unknown_removals = 0
        """Blocks removed that were not held."""
        self.unknown_parents = 0
        """Blocks set aside."""
        self.orphans_dropped = 0
        """Of these, those given up for want of room."""
        self.malformed = 0
        """Events dropped."""
        self.unresolved = 0
        """Blocks stored by hash alone that no other medium of the rank knows."""
        self.evicted = 0
        """Blocks given up at the bound."""

    def store(self, slot: int, rank: int, event: Stored) -> Joined | None:
        """Blocks are held from now on. Returns: as `KvIndex.apply`."""
        hashes, size = event.hashes, event.block_tokens
        extras = event.extra_keys
        if (
            size < 1
            or not hashes
            or (event.tokens and len(event.tokens) != len(hashes) * size * TOKEN_BYTES)
            or (extras is not None and len(extras) != len(hashes))
        ):
            self.malformed += 1
            return None
        ranks, medium = self._ranks, number_of(event.medium)
        holding = ranks.find(slot, rank, medium) or ranks.open(slot, rank, medium)
        if holding.block_tokens != size:
            holding.block_tokens = size
            ranks.sized[size] = ranks.sized.get(size, 0) | holding.bit
        before, loose = holding.held, holding.loose
        if event.tokens:
            tip, depth = self._store_tokens(holding, event)
        else:
            tip, depth = self._store_names(holding, hashes)
        self.stored += holding.held - before
        self._ranks.held += holding.held - before
        if holding.loose and not loose:
            ranks.survey()
        if self._ranks.orphans:
            self._adopt(holding, hashes)
        if self._ranks.held > self.blocks_max:
            self._shrink()
        if event.session_id is None or not tip:
            return None
        return Joined(event.session_id, tip, depth, size)

    def _store_tokens(self, holding: Holding, event: Stored) -> tuple[int, int]:
        """Returns: key and depth of the last block; 0, 0 if they are not known."""
        start, up, depth, absent = 0, 0, 0, 0
        if event.parent is None:
            key = root_of(event.block_tokens, event.lora, None, self._secret)
        else:
            parent = name_of(event.parent)
            known = holding.known(parent)
            if known is not None:
                up, key, depth = known
            elif (elsewhere := self._known_elsewhere(holding, parent)) is not None:
                key, depth = elsewhere
                up = absent = holding.mark_absent(parent, key)
            else:
                start, up, key, depth = self._set_aside(holding, event, parent)
                while self._ranks.orphans > self.orphans_max:
                    self._drop_orphan(holding)
        count = len(event.hashes)
        if start < count:
            hashes, tokens, extras = event.hashes, event.tokens, event.extra_keys
            if start:
                hashes = hashes[start:]
                tokens = tokens[start * event.block_tokens * TOKEN_BYTES :]
                extras = None if extras is None else extras[start:]
            key = holding.store(
                hashes,
                tokens,
                event.block_tokens,
                lora=event.lora,
                extras=extras,
                up=up,
                key=key,
                depth=depth,
            )
        if absent:
            holding.unmark_childless(absent)
        return (key, depth + count - start) if key else (0, 0)

    def _set_aside(self, holding: Holding, event: Stored, parent: int) -> tuple[int, int, int, int]:
        """Keep the blocks of an event whose parent is not known, up to one that is held.

        Returns: how many are done with; row, key and depth of the last, 0 if it is not known.
        """
        size = event.block_tokens * TOKEN_BYTES
        for number, engine_hash in enumerate(event.hashes):
            name = name_of(engine_hash)
            if holding.holds(name) and (known := holding.known(name)) is not None:
                row = known[0]
                holding.copies[row] = holding.copies.get(row, 0) + 1
                return number + 1, *known
            orphan = Orphan(
                name,
                parent,
                tokens=event.tokens[number * size : (number + 1) * size],
                block_tokens=event.block_tokens,
                lora=event.lora,
                extra=None if event.extra_keys is None else event.extra_keys[number],
            )
            self.unknown_parents += 1
            if self.orphans_max:
                self._ranks.orphans += holding.aside.keep(orphan)
            parent = name
        return len(event.hashes), 0, 0, 0

    def _drop_orphan(self, holding: Holding) -> None:
        """Give up the oldest of this holding, or, if that has less than its share, of the one that
        has most."""
        holdings = self._ranks.holdings
        if len(holding.aside) * len(holdings) <= self.orphans_max:
            holding = max(holdings.values(), key=lambda other: len(other.aside))
        holding.aside.drop_oldest()
        self._ranks.orphans -= 1
        self.orphans_dropped += 1

    def _adopt(self, holding: Holding, hashes: Sequence[Hash]) -> None:
        """Store what waited for these blocks, and what waited for that."""
        names = [name for name in map(name_of, hashes) if holding.holds(name)]
        media = self._ranks.of_rank(holding.slot, holding.rank)
        before = sum(waiting.held for waiting in media)
        while names:
            parent = names.pop()
            for waiting in media:
                for orphan in waiting.aside.take(parent):
                    self._ranks.orphans -= 1
                    self._store_orphan(waiting, orphan)
                    names.append(orphan.name)
        stored = sum(waiting.held for waiting in media) - before
        self.stored += stored
        self._ranks.held += stored

    def _store_orphan(self, holding: Holding, orphan: Orphan) -> None:
        known = holding.known(orphan.parent)
        absent = 0
        if known is None:
            elsewhere = self._known_elsewhere(holding, orphan.parent)
            assert elsewhere is not None, "what it waited for was just stored"
            absent = holding.mark_absent(orphan.parent, elsewhere[0])
            known = (absent, *elsewhere)
        up, parent, depth = known
        key = key_of(parent, orphan.tokens, orphan.lora, orphan.extra)
        for _ in range(orphan.copies):
            holding.put(orphan.name, key, parent, depth + 1, up)
        if absent:
            holding.unmark_childless(absent)

    def _store_names(self, holding: Holding, hashes: Sequence[Hash]) -> tuple[int, int]:
        """Blocks told by hash alone, as a medium does that has them from another: the other
        knows what they are."""
        holding.loose = True
        key = depth = 0
        for engine_hash in hashes:
            name = name_of(engine_hash)
            known = holding.known(name)
            found = known[1:] if known else self._known_elsewhere(holding, name)
            if found is None:
                self.unresolved += 1
                key = depth = 0
                continue
            key, depth = found
            block = self._ranks.blocks.table.find(key)
            holding.put(name, key, self._ranks.blocks.parents[block], depth, 0)
        return key, depth

    def _known_elsewhere(self, holding: Holding, name: int) -> tuple[int, int] | None:
        """Key and depth of a block that another medium of the same rank knows."""
        for other in self._ranks.of_rank(holding.slot, holding.rank):
            if other is not holding and (known := other.known(name)) is not None:
                return known[1], known[2]
        return None

    def remove(self, slot: int, rank: int, event: Removed) -> None:
        """One copy of each of these blocks is gone."""
        holding = self._ranks.find(slot, rank, number_of(event.medium))
        if holding is None:
            self.unknown_removals += len(event.hashes)
            return
        before = holding.held
        for engine_hash in event.hashes:
            name = name_of(engine_hash)
            row = holding.table.find(name)
            if row and holding.rows[row]:
                holding.drop(row)
            elif len(holding.aside) and (left := holding.aside.removed(name)) >= 0:
                self._ranks.orphans -= not left
            else:
                self.unknown_removals += 1
        self.removed += before - holding.held
        self._ranks.held -= before - holding.held

    def clear(self, slot: int, rank: int) -> None:
        """A rank holds nothing any more, on any medium."""
        self.cleared += 1
        self._ranks.retire([h for h in self._ranks.of_rank(slot, rank) if h.held or len(h.aside)])

    def _shrink(self) -> None:
        """Get back to the bound."""
        self._ranks.free(self._ranks.held - self.blocks_max)
        while self._ranks.held > self.blocks_max:
            if self._ranks.leaving:
                self._ranks.free(FREED_AT_ONCE)
                continue
            largest = max(self._ranks.holdings.values(), key=lambda holding: holding.held)
            for _ in range(min(self._ranks.held - self.blocks_max, largest.held)):
                largest.evict()
                self._ranks.held -= 1
                self.evicted += 1
