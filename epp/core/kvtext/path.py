"""A prompt's text as a chain of hashes: equal hashes mean equal text from the beginning on.

Each piece (turn) is cut into chunks of `CHUNK_BYTES`, the last one shorter; each chunk's xxh3 has
the hash before it as seed. The first seed comes from a secret of this process, so that nobody
outside can tell which texts share a hash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from struct import iter_unpack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epp.core.kvtext.view import TextView

CHUNK_BYTES = 128
_WHOLE = f"{CHUNK_BYTES}s"
_PIECE = 0x9E3779B97F4A7C1
"""Turns the hash before a piece's first chunk, so that no chunk within a piece looks like it."""


class Path(NamedTuple):
    """The text path of one prompt; every sequence but `turns` and `replies` has one per chunk."""

    keys: Sequence[int]
    """60 bits each."""
    ends: Sequence[int]
    """Bytes of text up to the end of each chunk."""
    turns: Sequence[int] = ()
    """Chunks up to the end of each piece."""
    replies: frozenset[int] = frozenset()
    """Pieces that an engine may have written."""
    family: int = 0
    """Of prompts with the same root, model and tools: what is learned of a template is kept by
    it."""

    @property
    def text_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def reply_bytes(self, chunks: int) -> int:
        """Bytes of the piece that begins after so many chunks, if an engine may have written it;
        else 0."""
        piece = bisect_left(self.turns, chunks)
        if piece == len(self.turns) or self.turns[piece] != chunks:
            return 0
        if piece + 1 not in self.replies:
            return 0
        return self.ends[self.turns[piece + 1] - 1] - self.ends[chunks - 1]


def path_of(view: TextView, model: str, secret: int) -> Path:
    """The path of a prompt.

    Args:
        model: what the engine is asked for: model or adapter.
        secret: 64 bits.
    """
    named = f"{view.root:016x}{model}".encode("utf-8", "surrogatepass")
    family = key = xxh3_64_intdigest(named, secret) >> 4
    keys: list[int] = []
    ends: list[int] = []
    turns: list[int] = []
    end = 0
    for piece in view.pieces:
        size = len(piece)
        key ^= _PIECE
        if size > CHUNK_BYTES:
            whole = (size - 1) // CHUNK_BYTES * CHUNK_BYTES
            cut = memoryview(piece)
            keys += [
                key := xxh3_64_intdigest(chunk, key) >> 4
                for (chunk,) in iter_unpack(_WHOLE, cut[:whole])
            ]
            ends += range(end + CHUNK_BYTES, end + whole + 1, CHUNK_BYTES)
            key = xxh3_64_intdigest(cut[whole:], key) >> 4
        else:
            key = xxh3_64_intdigest(piece, key) >> 4
        end += size
        keys.append(key)
        ends.append(end)
        turns.append(len(keys))
    if view.tooled:
        family = keys[turns[0] - 1]
    return Path(keys, ends, turns, view.replies, family)
