"""Engines' KV-cache messages: ZMQ frames to numbered payloads, payloads to batches of events.

A message is topic, sequence number (8 bytes, big-endian) and a msgpack payload
`[seconds, [events], data-parallel rank]`. An event is a map with its name under `type` (vLLM since
0.24) or an array that begins with its name (vLLM before, SGLang). Fields an engine leaves out have
their defaults, and fields we do not know are ignored and counted, so versions may drift both ways.
Answers of the replay socket are the same, with an empty frame in front and, in some versions,
without the topic; the last two frames are what they are in every form.

A payload is first read by typed decoders, as a whole: the one that read the last payload of this
stream, then the other. Only what neither reads is taken apart event by event. What cannot be read
is dropped and counted; if a removal may have been in it, `read` says so with `None`, because the
reader then no longer knows what the engine holds.

An engine with several kinds of attention keeps one cache group per kind and reports each. Only a
group that holds whole prefixes can be matched; the first one seen is followed, the others are
counted and dropped.

Cost: 0.6 us per block of 16 tokens stored in runs of 128, 0.4 us per block removed by an event of
its own (`tests/wire/test_kvevents.py` holds what is read, `make bench-kv` what it costs).
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from epp.core.kvevents import Batch, Cleared, Event, Hash, Medium, Removed, Stored

END_SEQUENCE = 2**64 - 1
"""Numbers the message that ends a replay; its payload is empty."""
SEQUENCE_BYTES = 8
FRAMES_MIN, FRAMES_MAX = 2, 4
NAMES_MAX = 32
"""Unknown names counted apart; more are counted under `OTHER_NAME`."""
NAME_CHARS_MAX = 64
OTHER_NAME = "other"
SAMPLE_BATCHES = 256
"""One payload in so many is looked through for fields we do not know."""

WHOLE_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Values of `kv_cache_spec_kind` whose blocks are all kept as long as the prefix is. Source: vLLM
0.32 v1/kv_cache_interface.py."""
REMOTE = "REMOTE"
"""The `locality` of a block that the engine would have to fetch from elsewhere."""
READ_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)
"""What hostile bytes make the decoder raise. MemoryError: an array may claim any length."""

_CLEARED = Cleared()


class Counts:
    """What decoding saw, over all streams that share this object. Numbers only go up."""

    __slots__ = (
        "batches",
        "blocks_removed",
        "blocks_stored",
        "cleared",
        "malformed_events",
        "malformed_payloads",
        "other_group_events",
        "unknown_fields",
        "unknown_tags",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.blocks_stored = 0
        self.blocks_removed = 0
        self.cleared = 0
        self.other_group_events = 0
        """Events of cache groups that are not followed."""
        self.malformed_events = 0
        self.malformed_payloads = 0
        self.unknown_tags: Counter[str] = Counter()
        """Events dropped, by the name they came under."""
        self.unknown_fields: Counter[str] = Counter()
        """By name (`[n]` in an array), in the payloads that were looked through."""


class StoredFields(msgspec.Struct, gc=False):
    """Fields of `BlockStored`, in the order arrays have them; then those that only maps have."""

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class RemovedFields(msgspec.Struct, gc=False):
    """Fields of `BlockRemoved`, in the order arrays have them."""

    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedFields(msgspec.Struct, gc=False):
    """`AllBlocksCleared` has none."""


class _MapStored(StoredFields, tag="BlockStored", gc=False):
    pass


class _MapRemoved(RemovedFields, tag="BlockRemoved", gc=False):
    pass


class _MapCleared(ClearedFields, tag="AllBlocksCleared", gc=False):
    pass


class _ArrayStored(StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _ArrayRemoved(RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ArrayCleared(ClearedFields, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    at_s: float
    events: list[_MapStored | _MapRemoved | _MapCleared]
    rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    at_s: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    rank: int | None = None


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    at_s: float
    events: msgspec.Raw
    rank: int | None = None


_MAPS = msgspec.msgpack.Decoder(_MapBatch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_ANYTHING = msgspec.msgpack.Decoder()

_TYPES: dict[str, type[msgspec.Struct]] = {
    "BlockStored": StoredFields,
    "BlockRemoved": RemovedFields,
    "AllBlocksCleared": ClearedFields,
}
_FIELDS = {tag: fields.__struct_fields__ for tag, fields in _TYPES.items()}


# -- frames ----------------------------------------------------------------------------------


def numbered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload of a live message or of a replay's answer, in any form; `None`
    when it is neither."""
    if not FRAMES_MIN <= len(frames) <= FRAMES_MAX or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def replay_request(start: int) -> list[bytes]:
    """Frames that ask a replay socket for every batch it has from number `start` on."""
    return [b"", start.to_bytes(SEQUENCE_BYTES, "big")]


def rank_of(payload: bytes) -> int:
    """Data-parallel rank of a payload without reading its events; 0 when it names none or is
    malformed."""
    try:
        return _ENVELOPE.decode(payload).rank or 0
    except READ_ERRORS:
        return 0


# -- payloads --------------------------------------------------------------------------------


class Reader:
    """Reads the payloads of one stream (one endpoint, one rank), in order.

    Args:
        counts: where to count; may be shared.
    """

    __slots__ = ("_decoder", "_followed", "_payloads", "counts")

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._decoder: msgspec.msgpack.Decoder[_MapBatch] | msgspec.msgpack.Decoder[_ArrayBatch]
        self._decoder = _MAPS
        self._followed: int | None = None
        self._payloads = 0

    def restart(self) -> None:
        """The engine began again: its groups may be numbered otherwise."""
        self._followed = None

    def read(self, payload: bytes) -> Batch | None:
        """The batch; `None` when it, or a removal in it, could not be read."""
        self._payloads += 1
        if self._payloads % SAMPLE_BATCHES == 1:
            self._count_unknown_fields(payload)
        try:
            batch = self._typed(payload) or _one_by_one(payload, self.counts)
        except READ_ERRORS:
            batch = None
        if batch is None:
            self.counts.malformed_payloads += 1
            return None
        self.counts.batches += 1
        events = self._events(batch.events)
        return None if events is None else Batch(batch.at_s, events, batch.rank or 0)

    def _typed(self, payload: bytes) -> _MapBatch | _ArrayBatch | None:
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError:
            pass
        other = _ARRAYS if self._decoder is _MAPS else _MAPS
        try:
            batch = other.decode(payload)
        except msgspec.ValidationError:
            return None
        self._decoder = other
        return batch

    def _events(self, fields: Sequence[object]) -> tuple[Event, ...] | None:
        events: list[Event] = []
        gone: list[Hash] = []
        gone_from: Medium = Medium.GPU
        counts = self.counts
        for field in fields:
            if isinstance(field, RemovedFields):
                if (field.group_idx or 0) != (self._followed or 0):
                    counts.other_group_events += 1
                    continue
                medium = _medium(field.medium, field.locality)
                if gone and medium is not gone_from:
                    events.append(Removed(tuple(gone), gone_from))
                    gone = []
                gone_from = medium
                gone += field.block_hashes
                counts.blocks_removed += len(field.block_hashes)
                continue
            if gone:
                events.append(Removed(tuple(gone), gone_from))
                gone = []
            if isinstance(field, StoredFields):
                if (stored := self._stored(field)) is not None:
                    events.append(stored)
            elif isinstance(field, ClearedFields):
                counts.cleared += 1
                events.append(_CLEARED)
            else:
                return None
        if gone:
            events.append(Removed(tuple(gone), gone_from))
        return tuple(events)

    def _stored(self, fields: StoredFields) -> Stored | None:
        if not self._follows(fields):
            self.counts.other_group_events += 1
            return None
        try:
            stored = _stored(fields)
        except READ_ERRORS:
            stored = None
        if stored is None:
            self.counts.malformed_events += 1
        else:
            self.counts.blocks_stored += len(stored.hashes)
        return stored

    def _follows(self, fields: StoredFields) -> bool:
        group = fields.group_idx or 0
        if self._followed is not None:
            return group == self._followed
        kind = fields.kv_cache_spec_kind
        if kind in WHOLE_PREFIX_KINDS or (kind is None and group == 0):
            self._followed = group
            return True
        return False

    def _count_unknown_fields(self, payload: bytes) -> None:
        try:
            for event in _loose(payload).events:
                for name in _unknown_fields(event):
                    _count(self.counts.unknown_fields, name)
        except READ_ERRORS:
            return  # `read` counts what is malformed


def _stored(fields: StoredFields) -> Stored | None:
    hashes, size = fields.block_hashes, fields.block_size
    if not hashes or size < 1 or len(fields.token_ids) != len(hashes) * size:
        return None
    extra_keys = fields.extra_keys
    lora = fields.lora_name
    if lora is None and fields.lora_id is not None:
        lora = str(fields.lora_id)
    return Stored(
        hashes,
        fields.parent_block_hash,
        _packed(fields.token_ids),
        size,
        lora,
        _medium(fields.medium, fields.locality),
        _frozen_keys(extra_keys, len(hashes)) if extra_keys and any(extra_keys) else None,
        fields.session_id,
    )


def _packed(token_ids: list[int]) -> bytes:
    """Raises: OverflowError, for what is not an unsigned number of 32 bits."""
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _medium(medium: str | None, locality: str | None) -> Medium:
    if locality == REMOTE:
        return Medium.DISK
    if medium is None or medium == "GPU":
        return Medium.GPU
    return Medium.CPU if medium.upper().startswith(("CPU", "HOST")) else Medium.DISK


def _frozen_keys(extra_keys: list[Any], blocks: int) -> tuple[object, ...]:
    if len(extra_keys) != blocks:
        raise ValueError("not one entry per block")
    return tuple(_frozen(entry) if entry else None for entry in extra_keys)


def _frozen(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    raise ValueError("not hashable")


# -- what the typed decoders do not read -----------------------------------------------------


class _Loose(msgspec.Struct, array_like=True):
    at_s: float
    events: list[Any]
    rank: int | None = None


class _LooseMap(msgspec.Struct):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_LOOSE = msgspec.msgpack.Decoder(_Loose)
_LOOSE_MAP = msgspec.msgpack.Decoder(_LooseMap)


def _loose(payload: bytes) -> _Loose:
    """A batch, itself an array or a map, with its events as they come.

    Raises: one of `READ_ERRORS`."""
    try:
        return _LOOSE.decode(payload)
    except msgspec.ValidationError:
        batch = _LOOSE_MAP.decode(payload)
        return _Loose(batch.ts, batch.events, batch.data_parallel_rank)


def _one_by_one(payload: bytes, counts: Counts) -> _Loose:
    """A batch with the events that can be read; a removal that cannot is in it as it came.

    Raises: one of `READ_ERRORS`."""
    batch = _loose(payload)
    batch.events = [event for raw in batch.events for event in _known(raw, counts)]
    return batch


def _known(raw: object, counts: Counts) -> Iterator[object]:
    tag, fields = _tag_and_fields(raw)
    if tag is None:
        counts.malformed_events += 1
        yield raw  # a removal, for all we know
    elif tag not in _TYPES:
        _count(counts.unknown_tags, tag)
    else:
        try:
            # Without this a text would be taken for bytes in base64.
            yield msgspec.convert(fields, _TYPES[tag], builtin_types=(bytes,))
        except READ_ERRORS:
            counts.malformed_events += 1
            if tag != "BlockStored":
                yield raw


def _tag_and_fields(raw: object) -> tuple[str | None, dict[Any, Any]]:
    if isinstance(raw, dict):
        tag = raw.get("type")
        fields = raw
    elif isinstance(raw, list) and raw:
        tag = raw[0]
        names = _FIELDS.get(tag, ()) if isinstance(tag, str) else ()
        fields = dict(zip(names, raw[1:], strict=False))
    else:
        return None, {}
    return (tag if isinstance(tag, str) else None), fields


def _unknown_fields(raw: object) -> Iterator[str]:
    tag, fields = _tag_and_fields(raw)
    known = _FIELDS.get(tag or "")
    if known is None:
        return
    if isinstance(raw, list):
        yield from (f"{tag}[{number}]" for number in range(len(known), min(len(raw) - 1, 64)))
    else:
        yield from (f"{tag}.{name}" for name in fields if name != "type" and name not in known)


def _count(counter: Counter[str], name: str) -> None:
    name = name[:NAME_CHARS_MAX]
    counter[name if name in counter or len(counter) < NAMES_MAX else OTHER_NAME] += 1
