"""The protobuf wire format, as much of it as ext_proc needs.

A message is a row of fields, each a tag (`number << 3 | wire type`) and a value. Readers walk
`data` with an index; every index that leaves the data raises `IndexError`, which the codec's entry
point turns into `WireError`, so the hot loops carry no bounds checks. Each reader is told the tags
it knows: a known field number with another wire type is refused, an unknown one is skipped, a group
(wire types 3 and 4, long gone from protobuf) is refused.

Where protobuf leaves room we are strict in numbers (a varint must fit 64 bits, a tag 32) and
lenient in text: nothing here checks UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from epp.core.errors import EppError

VARINT: Final = 0
FIXED64: Final = 1
LENGTH_DELIMITED: Final = 2
FIXED32: Final = 5

NOTHING_KNOWN: Final[frozenset[int]] = frozenset()


class WireError(EppError, ValueError):
    """These bytes are not the message they should be. The text names what is wrong, never
    content."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the varint at `at`: its value, 0..2**64 - 1, and the index behind it.

    A longer encoding than needed is read too, up to ten bytes, as protobuf demands.
    """
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + 1
    raise WireError("a varint does not fit 64 bits")


def skip_field(data: bytes, at: int, known: frozenset[int] = NOTHING_KNOWN) -> int:
    """Step over the unknown field at `at`: the index behind it, which may lie behind the data.

    Raises: WireError for a group, an invalid tag, or a field number of `known` (so this is it, with
        the wrong wire type or a tag in an encoding that nobody uses).
    """
    tag, after = read_varint(data, at)
    number, wire_type = tag >> 3, tag & 7
    if number == 0 or tag >> 32 or after - at > 5:
        raise WireError("a tag is no field number")
    if any(tag_known >> 3 == number for tag_known in known):
        raise WireError(f"field {number} has wire type {wire_type}")
    if wire_type == VARINT:
        return read_varint(data, after)[1]
    if wire_type == LENGTH_DELIMITED:
        size, after = read_varint(data, after)
        return after + size
    if wire_type == FIXED64:
        return after + 8
    if wire_type == FIXED32:
        return after + 4
    raise WireError(f"field {number} has wire type {wire_type}, which is a group or nothing")


def fields(data: bytes, known: frozenset[int]) -> Iterator[tuple[int, bytes]]:
    """Walk the fields of one message whose tag is in `known`; for the paths that need no speed.

    Yields: tag and value; of a length-delimited field its content, of others the encoded value.
    Raises: WireError, behind the last field, when that is longer than the message.
    """
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        after = skip_field(data, at, NOTHING_KNOWN if tag in known else known)
        if tag in known:
            start = at + 1
            if tag & 7 == LENGTH_DELIMITED:
                start = read_varint(data, start)[1]
            yield tag, data[start:after]
        at = after
    if at != end:
        raise WireError("a field is longer than its message")


def varint(value: int) -> bytes:
    """Encode `value`, >= 0, in as few bytes as it takes."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def delimited(tag: int, content: bytes) -> bytes:
    """Encode one length-delimited field; `tag` is below 128 (field numbers 1..15)."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    return b"".join((bytes((tag,)), varint(size), content))
