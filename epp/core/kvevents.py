"""What engines say of their KV caches: blocks stored, blocks removed, everything cleared.

Values only; `wire.kvevents` reads them from an engine's messages, `core.kvindex` folds them. Only
events of the one cache group that holds whole prefixes (full attention) get here, so a block is
named by its hash and medium alone. An engine's hash is opaque: equal hashes of one endpoint mean
equal blocks, and nothing else is concluded from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from epp.core.structs import Frozen

Hash = int | bytes
"""An engine's name for a block: 64 bits, signed or not, or the bytes of a digest."""
TOKEN_BYTES = 4
"""Per token in `Stored.tokens`."""
PART_BLOCKS = 256
"""Blocks handed on at once: about a millisecond of work for the index."""


class Medium(StrEnum):
    """Where a block lies, fastest first."""

    GPU = "gpu"
    """The cache that requests run from; also that of an engine that runs on a CPU."""
    CPU = "cpu"
    DISK = "disk"
    """Any medium that is neither of the two: disk, object store, a peer."""


class Stored(Frozen, frozen=True):
    """Consecutive blocks of one prompt are held from now on."""

    hashes: tuple[Hash, ...]
    """Prompt order, at least one."""
    parent: Hash | None
    """The block before the first one; `None` when the first one begins the prompt."""
    tokens: bytes
    """Token ids of all blocks, 32 bits each, little-endian:
    `len(hashes) * block_tokens * TOKEN_BYTES` bytes."""
    block_tokens: int
    """Tokens per block, >= 1."""
    lora: str | None = None
    """Adapter; the number in decimal where the engine gives only that."""
    medium: Medium = Medium.GPU
    extra_keys: tuple[object, ...] | None = None
    """What else sets each block apart (salt, images, adapter), one hashable entry per block, `None`
    for a block with nothing; `None` when no block has any."""
    session_id: str | None = None
    """`X-Session-ID` of the request that caused this; `None` when it had none."""


class Removed(Frozen, frozen=True):
    """One copy of each of these blocks is gone from a medium."""

    hashes: tuple[Hash, ...]
    """At least one; a hash may come more than once."""
    medium: Medium = Medium.GPU


class Cleared(Frozen, frozen=True):
    """No block is held any more, on any medium."""


Event = Stored | Removed | Cleared


class Batch(Frozen, frozen=True):
    """What one engine step changed, in order."""

    at_s: float
    """The engine's clock, seconds since 1970."""
    events: tuple[Event, ...]
    rank: int = 0
    """Data-parallel rank; 0 when the engine has none."""


def parts(batch: Batch, blocks_max: int = PART_BLOCKS) -> list[Batch]:
    """The batch in pieces of at most `blocks_max` blocks that say the same, one after the other."""
    if sum(map(_blocks, batch.events)) <= blocks_max:
        return [batch]
    pieces: list[Batch] = []
    events: list[Event] = []
    blocks = 0
    for event in batch.events:
        for piece in _pieces(event, blocks_max):
            if events and blocks + _blocks(piece) > blocks_max:
                pieces.append(Batch(batch.at_s, tuple(events), batch.rank))
                events, blocks = [], 0
            events.append(piece)
            blocks += _blocks(piece)
    pieces.append(Batch(batch.at_s, tuple(events), batch.rank))
    return pieces


def _blocks(event: Event) -> int:
    return 1 if isinstance(event, Cleared) else len(event.hashes)


def _pieces(event: Event, blocks_max: int) -> Iterator[Event]:
    if isinstance(event, Cleared) or len(event.hashes) <= blocks_max:
        yield event
        return
    for start in range(0, len(event.hashes), blocks_max):
        end = start + blocks_max
        hashes = event.hashes[start:end]
        if isinstance(event, Removed):
            yield Removed(hashes, event.medium)
            continue
        width = event.block_tokens * TOKEN_BYTES
        yield Stored(
            hashes,
            event.hashes[start - 1] if start else event.parent,
            event.tokens[start * width : end * width],
            event.block_tokens,
            event.lora,
            event.medium,
            None if event.extra_keys is None else event.extra_keys[start:end],
            event.session_id,
        )
