"""Which endpoint holds which KV blocks, folded from what the engines say.

`apply` folds one event of one slot; `match` tells, for the keys of a prompt (`keys`), how many
leading blocks each slot holds without a gap. There is one `Holding` per medium of each rank of a
slot, with a bit of its own in the masks of `Blocks`.

`match` bisects: along a chain the holders only get fewer, but for *gaps*, which are known
(`Holding`). So a chain is cut behind each block that is a gap somewhere, and each piece is
bisected. A rank that holds blocks on several media, or that does not say what comes before what
(`loose`), is followed block by block instead.

Nothing here takes long at once. A slot that is forgotten, or an engine that cleared its cache, loses
its holding in one step; the holding's bit stays in the masks, unused, and is cleared bit by bit
by later events. Tables grow by shards. What is held is bounded by `blocks_max`; when there is more,
the largest holding gives up blocks that no other follows, the next ones of a hand that goes round.

Whatever is lost, the index stays consistent: a removal of something unknown is counted, a block
whose parent is unknown waits (`Aside`), and a slot that missed events can be called `unsure`, which
leaves it out of every answer until it is `sure` again, or be forgotten and told anew.

Cost: bench/kv.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import compress

from epp.core.kvevents import TOKEN_BYTES, Cleared, Event, Hash, Medium, Removed, Stored
from epp.core.kvindex.aside import Orphan
from epp.core.kvindex.blocks import Blocks
from epp.core.kvindex.expected import Expectations
from epp.core.kvindex.holding import Holding, name_of
from epp.core.kvindex.keys import extra_of, key_of, keys_of, root_of
from epp.core.structs import Frozen

MEDIUMS = (Medium.GPU, Medium.CPU, Medium.DISK)
WEIGHTS = (1.0, 0.8, 0.5)
"""By medium: what a block there is worth, of one on the GPU."""

_RANKS = 1 << 16
_DIGIT_VALUES = bytes.maketrans(b"01", b"\x00\x01")
_FREED_AT_ONCE = 1024
_FREED_PER_EVENT = 64
_EXPECTED_PER_SLOT = 8192
_ORPHANS_MAX = 4096


class Joined(Frozen, frozen=True):
    """A request's blocks, as far as its engine stored them by now."""

    session_id: str
    tip: int
    """Key of the last of them; `KvIndex.chain` leads back from it."""
    blocks: int
    """How many there are, from the start of the prompt."""
    block_tokens: int


class KvIndex:
    """Slots are ints from 0 (`Endpoint.slot`); ranks are those of data parallelism, 0 without.

    Counters (they only grow): `stored`, `removed`, `cleared`: blocks, blocks, events;
    `unknown_removals`: blocks removed that were not held; `unknown_parents`: blocks set aside;
    `orphans_dropped`: of these, those given up for want of room; `malformed`: events dropped;
    `unresolved`: blocks stored by hash alone that no other medium of the rank knows;
    `evicted`: blocks given up at the bound.
    """

    def __init__(
        self,
        *,
        blocks_max: int,
        secret: bytes = b"",
        orphans_max: int = _ORPHANS_MAX,
        slot_expected_max: int = _EXPECTED_PER_SLOT,
    ) -> None:
        """Start empty.

        Args:
            blocks_max: bound of the blocks held, over all slots and media, >= 1.
            secret: random bytes of this process, for the keys.
            orphans_max: bound of the blocks that wait for their parent, over all slots.
            slot_expected_max: bound of the blocks expected on one slot.
        Raises: ValueError if a bound is out of range.
        """
        if blocks_max < 1 or orphans_max < 0 or slot_expected_max < 0:
            raise ValueError(
                f"blocks_max={blocks_max}, orphans_max={orphans_max}, "
                f"slot_expected_max={slot_expected_max}: need at least 1, 0 and 0"
            )
        self.blocks_max = blocks_max
        self.orphans_max = orphans_max
        self._secret = secret
        self._blocks = Blocks()
        self._gaps: dict[int, int] = {}
        self._expected = Expectations(slot_expected_max)
        self._holdings: dict[int, Holding] = {}
        """By `_code`."""
        self._leaving: deque[Holding] = deque()
        self._unsure: set[int] = set()
        self._slot_by_bit: list[int] = []
        self._present = 0
        """Bits of the holdings of sure slots."""
        self._several = 0
        """Of these, the ones whose slot has several."""
        self._walked = 0
        """Of these, the ones that cannot be bisected."""
        self._lower = 0
        """Of these, the ones on a medium that is not the GPU."""
        self._sized: dict[int, int] = {}
        """Block size -> bits of the holdings that have, or had, blocks of it."""
        self._held = 0
        self._orphans = 0
        self.stored = self.removed = self.cleared = self.evicted = 0
        self.unknown_removals = self.unknown_parents = self.orphans_dropped = 0
        self.malformed = self.unresolved = 0

    # -- what there is -------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Blocks held, over all slots and media: what `blocks_max` bounds. Those of forgotten
        slots count until they are freed."""
        return self._held

    @property
    def entries(self) -> int:
        """Distinct blocks that are held by somebody, forgotten slots included until freed."""
        return self._blocks.live

    @property
    def remembered(self) -> int:
        """Blocks that nobody holds any more but `chain` still knows."""
        return self._blocks.table.count - self._blocks.live

    @property
    def orphans(self) -> int:
        """Blocks that wait for their parent."""
        return self._orphans

    @property
    def gaps(self) -> int:
        """Distinct blocks that some holding lacks though it holds one that follows."""
        return len(self._gaps)

    @property
    def expected(self) -> int:
        """Blocks expected, over all slots."""
        return self._expected.held

    def held_by(self, slot: int) -> int:
        """Blocks a slot holds, over its ranks and media."""
        return sum(holding.held for holding in self._holdings.values() if holding.slot == slot)

    def block_tokens_of(self, slot: int) -> int | None:
        """Tokens per block of a slot's engine, as of its last event; None before the first."""
        sizes = [h.block_tokens for h in self._holdings.values() if h.slot == slot]
        return next((size for size in sizes if size), None)

    def block_sizes(self) -> tuple[int, ...]:
        """Every block size, in tokens, that some sure slot may have: a prompt needs keys for
        each."""
        return tuple(size for size, bits in self._sized.items() if bits & self._present)

    # -- keys ----------------------------------------------------------------------------------

    def root(
        self, block_tokens: int, lora: str | None = None, cache_salt: str | None = None
    ) -> int:
        """The root of a prompt's chain; `root_of` says more."""
        return root_of(block_tokens, lora, cache_salt, self._secret)

    def keys_of(
        self, token_ids: Sequence[int] | bytes, block_tokens: int, root: int
    ) -> Sequence[int]:
        """The keys of a prompt's full blocks; `keys.keys_of` says more."""
        return keys_of(token_ids, block_tokens, root)

    def chain(self, tip: int, blocks: int) -> Sequence[int]:
        """The last `blocks` keys of the chain that ends with `tip`, in prompt order.

        Returns: nothing if a block on the way is not known any more; less when the chain is
            shorter.
        """
        return self._blocks.chain(tip, blocks)

    # -- events --------------------------------------------------------------------------------

    def apply(self, slot: int, event: Event, rank: int = 0) -> Joined | None:
        """Fold one event of a slot's engine.

        Returns: what a request's prompt is joined to, for blocks stored with a session id.
        """
        joined = None
        if isinstance(event, Removed):
            self._remove(slot, rank, event)
        elif isinstance(event, Stored):
            joined = self._store(slot, rank, event)
        elif isinstance(event, Cleared):
            self._clear(slot, rank)
        if self._leaving:
            self._free(_FREED_PER_EVENT)
        return joined

    def forget(self, slot: int, rank: int | None = None) -> None:
        """Forget what a slot, or one rank of it, holds; with no rank also what is expected of it
        and whether it is sure. The slot may be used anew at once."""
        self._retire(
            [h for h in self._holdings.values() if h.slot == slot and rank in (None, h.rank)]
        )
        if rank is None:
            self._expected.forget(slot)
            self.sure(slot)
        self._free(_FREED_AT_ONCE)

    def unsure(self, slot: int) -> None:
        """Events of this slot were missed: leave it out of every answer. It is followed on."""
        self._unsure.add(slot)
        self._survey()

    def sure(self, slot: int) -> None:
        """What is known of this slot is right again."""
        if slot in self._unsure:
            self._unsure.discard(slot)
            self._survey()

    def is_unsure(self, slot: int) -> bool:
        """Whether a slot is left out of the answers."""
        return slot in self._unsure

    def expect(self, slot: int, keys: Sequence[int], until_s: float) -> None:
        """A prompt with these keys was sent to a slot, which should hold it soon; if the time
        passes, it is not expected any more."""
        self._expected.expect(slot, keys, until_s)

    def expire(self, now_s: float) -> None:
        """Drop expectations past their time, and free some of what was forgotten; for calling now
        and then."""
        self._expected.expire(now_s)
        self._free(_FREED_AT_ONCE)

    # -- questions -----------------------------------------------------------------------------

    def holders(self, key: int) -> int:
        """The sure slots that hold a block, bit n for slot n."""
        slots = 0
        mask = self._blocks.mask(key) & self._present
        while mask:
            bit = mask & -mask
            slots |= 1 << self._slot_by_bit[bit.bit_length() - 1]
            mask ^= bit
        return slots

    def match(
        self, keys: Sequence[int], block_tokens: int, *, expected: bool = False
    ) -> dict[int, int]:
        """Count the leading blocks of a prompt that each slot holds, on whatever medium.

        Args:
            keys: of the prompt's blocks, made for this block size.
            expected: count also what is expected (`expect`): the longer of both.
        Returns: slot -> blocks, >= 1; a slot that holds none, or is unsure, is absent. Of several
            ranks the one that holds most counts.
        """
        matched: dict[int, int] = {}
        if not len(keys):
            return matched
        holders = self._blocks.mask(keys[0]) & self._present
        if holders:
            holders &= self._sized.get(block_tokens, 0)
            if walked := holders & self._walked:
                self._walk(keys, walked, matched)
                holders ^= walked
            if holders:
                self._search(keys, holders, matched)
        if expected and self._expected.held:
            for slot, blocks in self._expected.match(keys).items():
                if slot not in self._unsure and matched.get(slot, 0) < blocks:
                    matched[slot] = blocks
        return matched

    def weigh(
        self, keys: Sequence[int], block_tokens: int, weights: Sequence[float] = WEIGHTS
    ) -> dict[int, float]:
        """As `match`, but each block counts with the weight of the best medium that holds it.

        Args:
            weights: as `MEDIUMS`, best first.
        """
        matched = self.match(keys, block_tokens)
        weighed = {slot: blocks * weights[0] for slot, blocks in matched.items()}
        if self._lower:
            for slot, blocks in matched.items():
                weighed[slot] = max(
                    _weight(self._blocks, keys, blocks, rank, weights) for rank in self._media(slot)
                )
        return weighed

    # -- folding -------------------------------------------------------------------------------

    def _store(self, slot: int, rank: int, event: Stored) -> Joined | None:
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
        medium = event.medium
        number = 0 if medium is Medium.GPU else 1 if medium is Medium.CPU else 2
        code = (slot * _RANKS + rank) * len(MEDIUMS) + number
        holding = self._holdings.get(code) or self._open(code, slot, rank, number)
        if holding.block_tokens != size:
            holding.block_tokens = size
            self._sized[size] = self._sized.get(size, 0) | holding.bit
        before = holding.held
        if event.tokens:
            tip, depth = self._store_tokens(holding, event)
        else:
            tip, depth = self._store_names(holding, hashes)
        self.stored += holding.held - before
        self._held += holding.held - before
        if self._orphans:
            self._adopt(holding, hashes)
        if self._held > self.blocks_max:
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
            known = holding.known(name)
            if known is not None and holding.rows[known[0]]:
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
                self._orphans += holding.aside.keep(orphan)
            parent = name
        while self._orphans > self.orphans_max:
            self._drop_orphan(holding)
        return len(event.hashes), 0, 0, 0

    def _drop_orphan(self, holding: Holding) -> None:
        """Give up the oldest of this holding, or of the one that has most."""
        if not len(holding.aside):
            holding = max(self._holdings.values(), key=lambda other: len(other.aside))
        holding.aside.drop_oldest()
        self._orphans -= 1
        self.orphans_dropped += 1

    def _adopt(self, holding: Holding, hashes: Sequence[Hash]) -> None:
        """Store what waited for these blocks, and what waited for that."""
        for waiting in self._rank_of(holding):
            before = waiting.held
            names = [name_of(engine_hash) for engine_hash in hashes] if len(waiting.aside) else []
            while names:
                parent = names.pop()
                for orphan in waiting.aside.take(parent):
                    self._orphans -= 1
                    if self._store_orphan(waiting, orphan):
                        names.append(orphan.name)
            self.stored += waiting.held - before
            self._held += waiting.held - before

    def _store_orphan(self, holding: Holding, orphan: Orphan) -> bool:
        known = holding.known(orphan.parent)
        absent = 0
        if known is None:
            elsewhere = self._known_elsewhere(holding, orphan.parent)
            if elsewhere is None:
                return False
            absent = holding.mark_absent(orphan.parent, elsewhere[0])
            known = (absent, *elsewhere)
        up, parent, depth = known
        key = key_of(parent, orphan.tokens, orphan.lora, orphan.extra)
        for _ in range(orphan.copies):
            holding.put(orphan.name, key, parent, depth + 1, up)
        if absent:
            holding.unmark_childless(absent)
        return True

    def _store_names(self, holding: Holding, hashes: Sequence[Hash]) -> tuple[int, int]:
        """Blocks told by hash alone, as a medium does that has them from another: the other
        knows what they are."""
        if not holding.loose:
            holding.loose = True
            self._survey()
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
            block = self._blocks.table.find(key)
            holding.put(name, key, self._blocks.parents[block], depth, 0)
        return key, depth

    def _known_elsewhere(self, holding: Holding, name: int) -> tuple[int, int] | None:
        """Key and depth of a block that another medium of the same rank knows."""
        for other in self._rank_of(holding):
            if other is not holding and (known := other.known(name)) is not None:
                return known[1], known[2]
        return None

    def _remove(self, slot: int, rank: int, event: Removed) -> None:
        medium = event.medium
        number = 0 if medium is Medium.GPU else 1 if medium is Medium.CPU else 2
        holding = self._holdings.get((slot * _RANKS + rank) * len(MEDIUMS) + number)
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
                self._orphans -= not left
            else:
                self.unknown_removals += 1
        self.removed += before - holding.held
        self._held -= before - holding.held

    def _clear(self, slot: int, rank: int) -> None:
        self.cleared += 1
        self._retire([h for h in self._rank_codes(slot, rank) if h.held or len(h.aside)])

    # -- holdings ------------------------------------------------------------------------------

    def _rank_codes(self, slot: int, rank: int) -> list[Holding]:
        first = (slot * _RANKS + rank) * len(MEDIUMS)
        codes = range(first, first + len(MEDIUMS))
        return [self._holdings[code] for code in codes if code in self._holdings]

    def _rank_of(self, holding: Holding) -> list[Holding]:
        """The holdings of its rank, itself included."""
        return self._rank_codes(holding.slot, holding.rank)

    def _open(self, code: int, slot: int, rank: int, medium: int) -> Holding:
        # Not by the slot: the bit of a holding that was left stays in masks until all is freed.
        used = 0
        for holding in (*self._holdings.values(), *self._leaving):
            used |= holding.bit
        number = (~used & (used + 1)).bit_length() - 1
        self._slot_by_bit[number : number + 1] = [slot]
        holding = Holding(
            1 << number, self._blocks, self._gaps, slot=slot, rank=rank, medium=medium
        )
        self._holdings[code] = holding
        self._survey()
        return holding

    def _retire(self, holdings: list[Holding]) -> None:
        """Use these no more; what they hold is freed by and by."""
        gone = 0
        for holding in holdings:
            code = (holding.slot * _RANKS + holding.rank) * len(MEDIUMS) + holding.medium
            del self._holdings[code]
            gone |= holding.bit
            self._orphans -= len(holding.aside)
            self._leaving.append(holding)
        if holdings:
            self._sized = {
                size: left for size, bits in self._sized.items() if (left := bits & ~gone)
            }
            self._survey()

    def _survey(self) -> None:
        """Sum up the holdings, after one came, went or changed its kind: about 1 us for each."""
        self._present = self._several = self._walked = self._lower = 0
        by_slot: dict[int, int] = {}
        by_rank: dict[int, int] = {}
        loose = 0
        for code, holding in self._holdings.items():
            if holding.slot in self._unsure:
                continue
            bit, rank = holding.bit, code // len(MEDIUMS)
            self._present |= bit
            by_slot[holding.slot] = by_slot.get(holding.slot, 0) | bit
            by_rank[rank] = by_rank.get(rank, 0) | bit
            if holding.loose:
                loose |= bit
            if holding.medium:
                self._lower |= bit
        for bits in by_slot.values():
            if bits & (bits - 1):
                self._several |= bits
        for bits in by_rank.values():
            if bits & (bits - 1) or bits & loose:
                self._walked |= bits

    def _media(self, slot: int) -> list[list[tuple[int, int]]]:
        """Bit and medium of a slot's holdings, best medium first; a row per rank."""
        ranks: dict[int, list[tuple[int, int]]] = {}
        for code in sorted(code for code, h in self._holdings.items() if h.slot == slot):
            holding = self._holdings[code]
            ranks.setdefault(holding.rank, []).append((holding.bit, holding.medium))
        return list(ranks.values())

    def _free(self, blocks: int) -> None:
        """Free up to so many blocks of holdings that are used no more."""
        while self._leaving and blocks > 0:
            holding = self._leaving[0]
            before = holding.held
            blocks -= holding.free(blocks)
            self._held -= before - holding.held
            if not holding.held and not holding.absent:
                self._leaving.popleft()

    def _shrink(self) -> None:
        """Get back to the bound."""
        self._free(self._held - self.blocks_max)
        while self._held > self.blocks_max:
            if self._leaving:
                self._free(_FREED_AT_ONCE)
                continue
            largest = max(self._holdings.values(), key=lambda holding: holding.held)
            for _ in range(min(self._held - self.blocks_max, largest.held)):
                largest.evict()
                self._held -= 1
                self.evicted += 1

    # -- matching ------------------------------------------------------------------------------

    def _search(self, keys: Sequence[int], holders: int, matched: dict[int, int]) -> None:
        """Match holders of the first block that can be bisected, piece by piece (see above)."""
        start = 0
        if self._gaps and not self._gaps.keys().isdisjoint(keys):
            for place, key in enumerate(keys):
                if key in self._gaps:
                    holders = self._bisect(keys, start, place + 1, holders, matched)
                    start = place + 1
                    if not holders:
                        return
        if start < len(keys):
            holders = self._bisect(keys, start, len(keys), holders, matched)
        if holders:
            self._note(matched, holders, len(keys))

    def _bisect(
        self, keys: Sequence[int], start: int, stop: int, holders: int, matched: dict[int, int]
    ) -> int:
        """Match one piece of a chain, of at least one block, for those who hold all before it.

        Between two places with the same holders there is nothing to look up; where they differ,
        look in the middle.

        Returns: who holds all of it; who does not is noted.
        """
        mask_of = self._blocks.mask
        whole = mask_of(keys[stop - 1]) & holders
        if whole == holders:
            return whole
        spans = [(start - 1, holders, stop - 1, whole)]
        while spans:
            low, holders, high, remaining = spans.pop()
            while high - low > 1:
                middle = (low + high) // 2
                mask = mask_of(keys[middle]) & holders
                if mask == holders:
                    low = middle
                    continue
                if mask != remaining:
                    spans.append((middle, mask, high, remaining))
                high, remaining = middle, mask
            if high:
                self._note(matched, holders & ~remaining, high)
        return whole

    def _walk(self, keys: Sequence[int], walked: int, matched: dict[int, int]) -> None:
        """Match ranks block by block, on all media of each together."""
        ranks = self._ranks_among(walked)
        mask_of = self._blocks.mask
        watched = 0
        for _, bits in ranks:
            watched |= bits
        last = -1
        place = 0
        for place, key in enumerate(keys):
            mask = mask_of(key) & watched
            if mask == last:
                continue
            last = mask
            left = [(slot, bits) for slot, bits in ranks if mask & bits]
            if len(left) < len(ranks):
                for slot, bits in ranks:
                    if not mask & bits and place > matched.get(slot, 0):
                        matched[slot] = place
                ranks = left
                if not ranks:
                    return
        for slot, _ in ranks:
            matched[slot] = len(keys)

    def _ranks_among(self, walked: int) -> list[tuple[int, int]]:
        """Slot and bits of each rank that has one of these bits."""
        ranks: dict[int, int] = {}
        slots: dict[int, int] = {}
        for code, holding in self._holdings.items():
            if holding.bit & self._walked:
                rank = code // len(MEDIUMS)
                ranks[rank] = ranks.get(rank, 0) | holding.bit
                slots[rank] = holding.slot
        return [(slots[rank], bits) for rank, bits in ranks.items() if bits & walked]

    def _note(self, matched: dict[int, int], holders: int, blocks: int) -> None:
        """These holders hold so many blocks."""
        if holders & self._several:
            while holders:
                bit = holders & -holders
                slot = self._slot_by_bit[bit.bit_length() - 1]
                if matched.get(slot, 0) < blocks:
                    matched[slot] = blocks
                holders ^= bit
        elif not holders & (holders - 1):  # mostly, only one has just this length
            matched[self._slot_by_bit[holders.bit_length() - 1]] = blocks
        else:
            digits = bin(holders)[:1:-1].encode().translate(_DIGIT_VALUES)
            matched.update(dict.fromkeys(compress(self._slot_by_bit, digits), blocks))


def _weight(
    blocks: Blocks,
    keys: Sequence[int],
    matched: int,
    media: Sequence[tuple[int, int]],
    weights: Sequence[float],
) -> float:
    """What one rank's leading blocks are worth, as far as a match and the rank go."""
    total, last, worth = 0.0, -1, 0.0
    for place in range(matched):
        mask = blocks.mask(keys[place])
        if mask != last:
            last = mask
            worth = next((weights[medium] for bit, medium in media if mask & bit), 0.0)
            if not worth:
                break
        total += worth
    return total


EMPTY: array[int] = array("Q")
