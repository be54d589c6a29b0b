"""Every holding there is, and what is the same for all of them at a time, as masks.

A holding is one medium of one rank of one slot and has a bit of its own in the masks of `Blocks`.
When it is left (its endpoint went, or the engine cleared its cache), its bit stays there, unused,
until what it held was freed, some at a time: `Ranks.free`.
"""

from __future__ import annotations

from collections import deque

from epp.core.kvevents import Medium
from epp.core.kvindex.blocks import Blocks
from epp.core.kvindex.holding import Holding

MEDIUMS = (Medium.GPU, Medium.CPU, Medium.DISK)
_MEDIA = len(MEDIUMS)
_RANKS = 1 << 16


def number_of(medium: Medium) -> int:
    """A medium's position in `MEDIUMS`."""
    return 0 if medium is Medium.GPU else 1 if medium is Medium.CPU else 2


class Ranks:
    """The holdings in use by slot, rank and medium, and those being freed."""

    __slots__ = (
        "_unsure",
        "blocks",
        "gaps",
        "held",
        "holdings",
        "leaving",
        "lower",
        "orphans",
        "present",
        "several",
        "sized",
        "slot_by_bit",
        "walked",
    )

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.gaps: dict[int, int] = {}
        """As `Holding.gaps`."""
        self.holdings: dict[int, Holding] = {}
        """By a code of slot, rank and medium."""
        self.leaving: deque[Holding] = deque()
        self._unsure: set[int] = set()
        self.slot_by_bit: list[int] = []
        self.present = 0
        """Bits of the holdings of sure slots."""
        self.several = 0
        """Of these, the ones whose slot has several."""
        self.walked = 0
        """Of these, the ones that cannot be bisected."""
        self.lower = 0
        """Of these, the ones on a medium that is not the GPU."""
        self.sized: dict[int, int] = {}
        """Block size -> bits of the holdings that have, or had, blocks of it."""
        self.held = 0
        """Blocks held, those being freed included."""
        self.orphans = 0

    def find(self, slot: int, rank: int, medium: int) -> Holding | None:
        """A holding, if it is in use."""
        return self.holdings.get((slot * _RANKS + rank) * _MEDIA + medium)

    def of_rank(self, slot: int, rank: int) -> list[Holding]:
        """The holdings of one rank, best medium first."""
        first = (slot * _RANKS + rank) * _MEDIA
        codes = range(first, first + _MEDIA)
        return [self.holdings[code] for code in codes if code in self.holdings]

    def of_slot(self, slot: int) -> list[Holding]:
        """The holdings of one slot."""
        return [holding for holding in self.holdings.values() if holding.slot == slot]

    def open(self, slot: int, rank: int, medium: int) -> Holding:
        """A new holding, with a bit that no other has."""
        used = 0
        for holding in (*self.holdings.values(), *self.leaving):
            used |= holding.bit
        number = (~used & (used + 1)).bit_length() - 1
        self.slot_by_bit[number : number + 1] = [slot]
        holding = Holding(1 << number, self.blocks, self.gaps, slot=slot, rank=rank, medium=medium)
        self.holdings[(slot * _RANKS + rank) * _MEDIA + medium] = holding
        self.survey()
        return holding

    def retire(self, holdings: list[Holding]) -> None:
        """Use these no more; what they hold is freed by and by."""
        gone = 0
        for holding in holdings:
            del self.holdings[(holding.slot * _RANKS + holding.rank) * _MEDIA + holding.medium]
            gone |= holding.bit
            self.orphans -= len(holding.aside)
            self.leaving.append(holding)
        if holdings:
            self.sized = {size: left for size, bits in self.sized.items() if (left := bits & ~gone)}
            self.survey()

    def free(self, blocks: int) -> None:
        """Free up to so many blocks of holdings that are used no more."""
        while self.leaving and blocks > 0:
            holding = self.leaving[0]
            before = holding.held
            blocks -= holding.free(blocks)
            self.held -= before - holding.held
            if not holding.held and not holding.absent:
                self.leaving.popleft()

    def trust(self, slot: int, *, sure: bool) -> None:
        """Whether the holdings of a slot are to be counted among those present."""
        if (slot in self._unsure) is sure:
            if sure:
                self._unsure.discard(slot)
            else:
                self._unsure.add(slot)
            self.survey()

    def is_unsure(self, slot: int) -> bool:
        """Whether a slot is not to be counted."""
        return slot in self._unsure

    def survey(self) -> None:
        """Sum up the holdings, after one came, went or changed its kind: about 1 us for each."""
        self.present = self.several = self.walked = self.lower = 0
        by_slot: dict[int, int] = {}
        by_rank: dict[int, int] = {}
        loose = 0
        for code, holding in self.holdings.items():
            if holding.slot in self._unsure:
                continue
            bit, rank = holding.bit, code // _MEDIA
            self.present |= bit
            by_slot[holding.slot] = by_slot.get(holding.slot, 0) | bit
            by_rank[rank] = by_rank.get(rank, 0) | bit
            if holding.loose:
                loose |= bit
            if holding.medium:
                self.lower |= bit
        for bits in by_slot.values():
            if bits & (bits - 1):
                self.several |= bits
        for bits in by_rank.values():
            if bits & (bits - 1) or bits & loose:
                self.walked |= bits

    def walked_ranks(self, holders: int) -> list[tuple[int, int]]:
        """Slot and bits of each rank that cannot be bisected and has one of these bits."""
        bits_of: dict[int, int] = {}
        slots: dict[int, int] = {}
        for code, holding in self.holdings.items():
            if holding.bit & self.walked:
                rank = code // _MEDIA
                bits_of[rank] = bits_of.get(rank, 0) | holding.bit
                slots[rank] = holding.slot
        return [(slots[rank], bits) for rank, bits in bits_of.items() if bits & holders]

    def media_of(self, slot: int) -> list[list[tuple[int, int]]]:
        """Bit and medium of a slot's holdings, best medium first; a row per rank."""
        rows: dict[int, list[tuple[int, int]]] = {}
        for code in sorted(code for code, held in self.holdings.items() if held.slot == slot):
            holding = self.holdings[code]
            rows.setdefault(holding.rank, []).append((holding.bit, holding.medium))
        return list(rows.values())
