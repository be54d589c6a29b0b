"""How many leading blocks of a prompt each slot holds.

Along a chain the holders only get fewer, but for gaps, which are known (`Holding`). So a chain is
cut behind each block that is a gap somewhere, and each piece is bisected. A rank that holds blocks
on several media, or that does not say what comes before what (`loose`), is followed block by block
instead, all such ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from epp.core.kvindex.blocks import Blocks
from epp.core.kvindex.ranks import Ranks

_DIGIT_VALUES = bytes.maketrans(b"01", b"\x00\x01")


class Matcher:
    """Looks things up in what there is; changes nothing."""

    __slots__ = ("_blocks", "_ranks")

    def __init__(self, ranks: Ranks) -> None:
        """Look in these."""
        self._ranks = ranks
        self._blocks = ranks.blocks

    def match(self, keys: Sequence[int], block_tokens: int) -> dict[int, int]:
        """As `KvIndex.match`, of what is held."""
        matched: dict[int, int] = {}
        if not len(keys):
            return matched
        ranks = self._ranks
        holders = self._blocks.mask(keys[0]) & ranks.present
        if holders:
            holders &= ranks.sized.get(block_tokens, 0)
            if walked := holders & ranks.walked:
                self._walk(keys, walked, matched)
                holders ^= walked
            if holders:
                self._search(keys, holders, matched)
        return matched

    def weigh(
        self, keys: Sequence[int], matched: dict[int, int], weights: Sequence[float]
    ) -> dict[int, float]:
        """What a match is worth, by slot: each block counts with its best medium's weight."""
        if not self._ranks.lower:
            return {slot: blocks * weights[0] for slot, blocks in matched.items()}
        return {
            slot: max(
                _weight(self._blocks, keys, blocks, media, weights)
                for media in self._ranks.media_of(slot)
            )
            for slot, blocks in matched.items()
        }

    def holders(self, key: int) -> int:
        """As `KvIndex.holders`."""
        slots = 0
        mask = self._blocks.mask(key) & self._ranks.present
        while mask:
            bit = mask & -mask
            slots |= 1 << self._ranks.slot_by_bit[bit.bit_length() - 1]
            mask ^= bit
        return slots

    def _search(self, keys: Sequence[int], holders: int, matched: dict[int, int]) -> None:
        """Match holders of the first block that can be bisected, piece by piece (see above)."""
        start = 0
        if self._ranks.gaps and not self._ranks.gaps.keys().isdisjoint(keys):
            for place, key in enumerate(keys):
                if key in self._ranks.gaps:
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
        ranks = self._ranks.walked_ranks(walked)
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

    def _note(self, matched: dict[int, int], holders: int, blocks: int) -> None:
        """These holders hold so many blocks."""
        if holders & self._ranks.several:
            while holders:
                bit = holders & -holders
                slot = self._ranks.slot_by_bit[bit.bit_length() - 1]
                if matched.get(slot, 0) < blocks:
                    matched[slot] = blocks
                holders ^= bit
        elif not holders & (holders - 1):  # mostly, only one has just this length
            matched[self._ranks.slot_by_bit[holders.bit_length() - 1]] = blocks
        else:
            digits = bin(holders)[:1:-1].encode().translate(_DIGIT_VALUES)
            matched.update(dict.fromkeys(compress(self._ranks.slot_by_bit, digits), blocks))


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
