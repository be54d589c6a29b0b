"""A table of 60-bit names in plain memory: name -> row, rows numbered from 1.

A dict takes 100 bytes and more per entry, most of it for int objects. Here a name takes its 8 bytes
in a column and 6 to 12 bytes of index: open addressing with linear probing, the row number in each
place, and removal that moves the later ones back, so that no tombstones pile up. The index is cut
into shards by the name's low bits, each grown on its own, so that no insertion stalls for a copy
of everything. Whoever owns a table keeps columns of its own beside `names`, by row.

Columns are `vec`s, which a compiled build reads and writes as C does, in a few nanoseconds; without
one they are as fast as `array`.

Names must be spread evenly, as hashes are; small numbers will do too.
"""

from __future__ import annotations

from librt.vecs import append, vec
from mypy_extensions import i32, i64

_FIRST_PLACES = 8


class NameTable:
    """Names that are present, each with a row; rows of removed names are given out again."""

    __slots__ = ("_filled", "_free", "_mask", "_shards", "_shift", "count", "names")

    def __init__(self, shard_bits: int) -> None:
        """Start empty, with 2**`shard_bits` shards."""
        self.names: vec[i64] = vec[i64]([0])
        """Row -> name; row 0 is nobody's. In a free row stands the next free row."""
        self.count = 0
        self._free = 0
        self._shift: i64 = shard_bits
        self._mask: i64 = (1 << shard_bits) - 1
        self._shards: list[vec[i32]] = [_empty(_FIRST_PLACES) for _ in range(1 << shard_bits)]
        self._filled: vec[i64] = vec[i64]([0] * (1 << shard_bits))

    def find(self, name: i64) -> int:
        """The row of a name; 0 if it is not there."""
        places, names = self._shards[name & self._mask], self.names
        top = len(places) - 1
        place = (name >> self._shift) & top
        while True:
            row: int = places[place]
            if not row or names[row] == name:
                return row
            place = (place + 1) & top

    def claim(self, name: i64) -> int:
        """The row of a name; if it is not there, minus the row it has now."""
        number = name & self._mask
        places, names = self._shards[number], self.names
        top = len(places) - 1
        place = (name >> self._shift) & top
        while True:
            row: int = places[place]
            if not row:
                break
            if names[row] == name:
                return row
            place = (place + 1) & top
        row = self._free
        if row:
            self._free = names[row]
            names[row] = name
        else:
            row = len(names)
            self.names = append(names, name)
        places[place] = row
        self.count += 1
        filled = self._filled[number] + 1
        self._filled[number] = filled
        if filled * 3 > len(places) * 2:
            self._shards[number] = self._grown(places)
        return -row

    def discard(self, row: int) -> None:
        """Take a present row's name out; the row is free."""
        names = self.names
        name = names[row]
        number = name & self._mask
        places = self._shards[number]
        top = len(places) - 1
        place = (name >> self._shift) & top
        while places[place] != row:
            place = (place + 1) & top
        self._close(places, place, top)
        self._filled[number] -= 1
        self.count -= 1
        names[row] = self._free
        self._free = row

    def _close(self, places: vec[i32], gap: i64, top: i64) -> None:
        """Empty a place and move into it what would not be found behind an empty place."""
        names, shift = self.names, self._shift
        place = gap
        while True:
            place = (place + 1) & top
            row: int = places[place]
            if not row:
                break
            home = (names[row] >> shift) & top
            if (place - home) & top >= (place - gap) & top:
                places[gap] = row
                gap = place
        places[gap] = 0

    def _grown(self, places: vec[i32]) -> vec[i32]:
        names, shift = self.names, self._shift
        larger = _empty(len(places) * 2)
        top = len(larger) - 1
        for row in list[int](places):
            if row:
                place = (names[row] >> shift) & top
                while larger[place]:
                    place = (place + 1) & top
                larger[place] = row
        return larger


def _empty(places: i64) -> vec[i32]:
    return vec[i32]([0] * places)
