"""A table of 60-bit names in arrays: name -> row, rows numbered from 1.

A dict takes 100 bytes and more per entry, most of it for int objects. Here a name takes its 8 bytes
in a column and 6 to 12 bytes of index: open addressing with linear probing, the row number in each
place, and removal that moves the later ones back, so that no tombstones pile up. The index is cut
into shards by the name's low bits, each grown on its own, so that no insertion stalls for a copy
of everything. Whoever owns a table keeps columns of its own beside `names`, by row.

Names must be spread evenly, as hashes are; small numbers will do too.
"""

from __future__ import annotations

from array import array

from mypy_extensions import i64

_FIRST_PLACES = 8
_PLACE_BYTES = 4


class NameTable:
    """Names that are present, each with a row; rows of removed names are given out again."""

    __slots__ = ("_filled", "_free", "_mask", "_shards", "_shift", "count", "names")

    def __init__(self, shard_bits: int) -> None:
        """Start empty, with 2**`shard_bits` shards."""
        self.names: array[int] = array("Q", (0,))
        """Row -> name; row 0 is nobody's. In a free row stands the next free row."""
        self.count = 0
        self._free = 0
        self._shift = shard_bits
        self._mask = (1 << shard_bits) - 1
        self._shards: list[array[int]] = [_empty(_FIRST_PLACES) for _ in range(1 << shard_bits)]
        self._filled: array[int] = array("I", bytes(_PLACE_BYTES << shard_bits))

    @property
    def rows(self) -> int:
        """Rows that exist, row 0 and the free ones included: what a column must have room for."""
        return len(self.names)

    def find(self, name: int) -> int:
        """The row of a name; 0 if it is not there."""
        places, names = self._shards[name & self._mask], self.names
        top = len(places) - 1
        place = (name >> self._shift) & top
        while row := places[place]:
            if names[row] == name:
                return row
            place = (place + 1) & top
        return 0

    def add(self, name: int) -> int:
        """Give a row to a name that is not there."""
        names, row = self.names, self._free
        if row:
            self._free = names[row]
            names[row] = name
        else:
            row = len(names)
            names.append(name)
        self.count += 1
        number = name & self._mask
        filled = self._filled[number] + 1
        self._filled[number] = filled
        places = self._shards[number]
        if filled * 3 > len(places) * 2:
            places = self._shards[number] = self._grown(places)
        top = len(places) - 1
        place = (name >> self._shift) & top
        while places[place]:
            place = (place + 1) & top
        places[place] = row
        return row

    def discard(self, row: int) -> None:
        """Take a present row's name out; the row is free."""
        names = self.names
        name = names[row]
        number = name & self._mask
        places = self._shards[number]
        top: i64 = len(places) - 1
        place: i64 = (name >> self._shift) & top
        while places[place] != row:
            place = (place + 1) & top
        self._close(places, place, top)
        self._filled[number] -= 1
        self.count -= 1
        names[row] = self._free
        self._free = row

    def _close(self, places: array[int], gap: i64, top: i64) -> None:
        """Empty a place and move into it what would not be found behind an empty place."""
        names, shift = self.names, self._shift
        place = gap
        while True:
            place = (place + 1) & top
            row = places[place]
            if not row:
                break
            home: i64 = (names[row] >> shift) & top
            if (place - home) & top >= (place - gap) & top:
                places[gap] = row
                gap = place
        places[gap] = 0

    def _grown(self, places: array[int]) -> array[int]:
        names, shift = self.names, self._shift
        larger = _empty(len(places) * 2)
        top = len(larger) - 1
        for row in places:
            if row:
                place = (names[row] >> shift) & top
                while larger[place]:
                    place = (place + 1) & top
                larger[place] = row
        return larger


def _empty(places: int) -> array[int]:
    return array("I", bytes(_PLACE_BYTES * places))
