"""HPACK (RFC 7541): a decoder with the dynamic table, and an encoder that needs none.

The decoder is strict where the RFC says so (indices, padding of Huffman strings, table sizes,
integers that do not end) and bounded: an integer has at most five bytes, a header list beyond
`list_bytes_max` is decoded to its end, for the sake of the dynamic table, but not kept.

`Decoder.version` changes with the dynamic table. Between two changes equal blocks mean equal
lists, so whoever remembers what a block meant asks only this (`requests.RequestReader`).

The encoder writes literals that are never indexed, so its output depends on nothing and whole
blocks are computed once. Only if the peer makes its table smaller must the next block say so
(`Output.headers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from epp.core.errors import EppError
from epp.wire.http2.hpack_tables import HUFFMAN_ENDS, HUFFMAN_STEPS, STATIC_TABLE

Field = tuple[bytes, bytes]
"""Name and value."""

FIELD_OVERHEAD_BYTES: Final = 32
"""Counted per field, by both the dynamic table and the header list size."""

EMPTY_TABLE: Final = b"\x20"
"""Dynamic table size update to 0."""

_STATIC_FIELDS: Final = len(STATIC_TABLE)
_INTEGER_BYTES_MAX: Final = 5
_SHORT_STRING_BYTES: Final = 64
"""Strings remembered decoded: paths and authorities repeat, ids are longer or do not matter."""


class HpackError(EppError, ValueError):
    """This is not HPACK, or not for this table: the connection cannot go on."""


class Decoder:
    """One direction of one connection.

    Args:
        table_bytes_max: what our SETTINGS_HEADER_TABLE_SIZE says.
        list_bytes_max: longest list returned, counted as in `FIELD_OVERHEAD_BYTES`.
    """

    __slots__ = (
        "_list_bytes_max",
        "_table",
        "_table_bytes",
        "_table_bytes_limit",
        "_table_bytes_max",
        "version",
    )

    def __init__(self, *, table_bytes_max: int, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._table: list[Field] = []
        """The newest field is the last."""
        self._table_bytes = 0
        self._table_bytes_limit = table_bytes_max
        """What the peer chose, up to `table_bytes_max`."""
        self._table_bytes_max = table_bytes_max
        self.version = 0

    def decode(self, block: bytes) -> list[Field] | None:
        """The header list in order, None when it is longer than allowed.

        Cost: 0.4 us per indexed field, 1.5 us per literal, 0.1 us per byte of a new Huffman string.

        Raises: HpackError; the decoder is of no use after that.
        """
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("a header block ends inside a field") from None

    def _decode(self, block: bytes) -> list[Field] | None:
        fields: list[Field] = []
        list_bytes = at = 0
        end = len(block)
        while at < end:
            byte = block[at]
            if byte & 0x80:
                index, at = _read_integer(block, at, 0x7F)
                field = self._field(index)
            elif byte & 0x40:
                field, at = self._read_literal(block, at, 0x3F)
                self._insert(field)
            elif byte & 0x20:
                if list_bytes:
                    raise HpackError("a table size update behind a field")
                size, at = _read_integer(block, at, 0x1F)
                self._resize(size)
                continue
            else:
                field, at = self._read_literal(block, at, 0x0F)
            list_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
            if list_bytes <= self._list_bytes_max:
                fields.append(field)
        return fields if list_bytes <= self._list_bytes_max else None

    def _field(self, index: int) -> Field:
        if 0 < index <= _STATIC_FIELDS:
            return STATIC_TABLE[index - 1]
        place = index - _STATIC_FIELDS
        if 0 < place <= len(self._table):
            return self._table[-place]
        raise HpackError(f"index {index} is not in the table")

    def _read_literal(self, block: bytes, at: int, mask: int) -> tuple[Field, int]:
        index, at = _read_integer(block, at, mask)
        if index:
            name = self._field(index)[0]
        else:
            name, at = _read_string(block, at)
        value, at = _read_string(block, at)
        return (name, value), at

    def _insert(self, field: Field) -> None:
        self.version += 1
        self._table.append(field)
        self._table_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
        self._evict()

    def _resize(self, size: int) -> None:
        if size > self._table_bytes_max:
            raise HpackError(f"a table of {size} bytes was not allowed")
        self.version += 1
        self._table_bytes_limit = size
        self._evict()

    def _evict(self) -> None:
        """Drop the oldest fields, all of them if the newest alone is too large."""
        evicted = 0
        while self._table_bytes > self._table_bytes_limit:
            name, value = self._table[evicted]
            self._table_bytes -= len(name) + len(value) + FIELD_OVERHEAD_BYTES
            evicted += 1
        del self._table[:evicted]


def _read_integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """The integer whose first bits are under `mask` (all ones), and the index behind it."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * _INTEGER_BYTES_MAX, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise HpackError("an integer has too many bytes")


def _read_string(block: bytes, at: int) -> tuple[bytes, int]:
    huffman = block[at] & 0x80
    size, at = _read_integer(block, at, 0x7F)
    after = at + size
    if after > len(block):
        raise HpackError("a string is longer than its block")
    string = block[at:after]
    if not huffman:
        return string, after
    return (_decode_short if size <= _SHORT_STRING_BYTES else decode_huffman)(string), after


def decode_huffman(encoded: bytes) -> bytes:
    """Decode one string. Raises: HpackError for EOS, or padding that is not up to seven ones."""
    decoded = bytearray()
    state = 0
    for byte in encoded:
        state, symbol = HUFFMAN_STEPS[state][byte >> 4]
        if symbol:
            decoded += symbol
        # An invalid state, -1, is the last of the table, where no string can end.
        if state < 0:
            break
        state, symbol = HUFFMAN_STEPS[state][byte & 0x0F]
        if symbol:
            decoded += symbol
        if state < 0:
            break
    if state not in HUFFMAN_ENDS:
        raise HpackError("a Huffman string ends in no code")
    return bytes(decoded)


_decode_short: Final = lru_cache(maxsize=512)(decode_huffman)


def encode(fields: Iterable[Field]) -> bytes:
    """A header block that means the same to any decoder: indexed where the static table holds the
    field, else a literal that is not to be indexed."""
    return b"".join(_encode_field(name, value) for name, value in fields)


_INDEX_OF_FIELD: Final = {field: index for index, field in reversed([*enumerate(STATIC_TABLE, 1)])}
_INDEX_OF_NAME: Final = {
    name: index for index, (name, _) in reversed([*enumerate(STATIC_TABLE, 1)])
}


def _encode_field(name: bytes, value: bytes) -> bytes:
    if index := _INDEX_OF_FIELD.get((name, value)):
        return _encode_integer(index, 0x7F, 0x80)
    index = _INDEX_OF_NAME.get(name, 0)
    head = _encode_integer(index, 0x0F, 0x00)
    if not index:
        head += _encode_integer(len(name), 0x7F, 0x00) + name
    return head + _encode_integer(len(value), 0x7F, 0x00) + value


def _encode_integer(value: int, mask: int, pattern: int) -> bytes:
    if value < mask:
        return bytes((pattern | value,))
    encoded = bytearray((pattern | mask,))
    value -= mask
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
