"""KV-event payloads: what is encoded is read back in every dialect, and no bytes do harm."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings, strategies as st

from epp.core.kvevents import Batch, Cleared, Medium, Removed, Stored, parts
from epp.wire.kvevents import Counts, Reader, numbered, rank_of

RECORDED = Path(__file__).parents[1] / "wire" / "data" / "kvevents"
PAYLOADS = [
    bytes.fromhex(json.loads(line)["payload_hex"])
    for path in sorted(RECORDED.glob("*.jsonl"))
    for line in path.read_text().splitlines()
]

HASHES = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=16, max_size=32)
MEDIUMS = st.sampled_from([Medium.GPU, Medium.CPU, Medium.DISK])
NAMES = {Medium.GPU: "GPU", Medium.CPU: "CPU", Medium.DISK: "STORAGE"}
KEYS = (
    st.none()
    | st.tuples(st.text(max_size=4))
    | st.tuples(st.tuples(st.binary(max_size=4), st.integers(0, 9)))
)


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    hashes = draw(st.lists(HASHES, min_size=1, max_size=6))
    size = draw(st.integers(1, 4))
    count = len(hashes) * size
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    keys = tuple(draw(st.lists(KEYS, min_size=len(hashes), max_size=len(hashes))))
    return Stored(
        tuple(hashes),
        draw(st.none() | HASHES),
        struct.pack(f"<{count}I", *ids),
        size,
        draw(st.none() | st.text(min_size=1, max_size=4)),
        draw(MEDIUMS),
        keys if any(keys) else None,
        draw(st.none() | st.text(max_size=4)),
    )


REMOVALS = st.builds(Removed, st.lists(HASHES, min_size=1, max_size=4).map(tuple), MEDIUMS)
EVENTS = st.lists(stored() | REMOVALS | st.just(Cleared()), max_size=8)


def fields(event: Stored | Removed | Cleared) -> dict[str, Any]:
    """As an engine sends it."""
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": NAMES[event.medium]}
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": struct.unpack(f"<{len(event.tokens) // 4}I", event.tokens),
        "block_size": event.block_tokens,
        "lora_id": None,
        "medium": NAMES[event.medium],
        "lora_name": event.lora,
        "extra_keys": event.extra_keys,
        "group_idx": 0,
        "kv_cache_spec_kind": None,
        "kv_cache_spec_sliding_window": None,
        "locality": None,
        "ownership": None,
        "session_id": event.session_id,
    }


def joined(events: list[Stored | Removed | Cleared]) -> tuple[Stored | Removed | Cleared, ...]:
    """With neighbouring removals from one medium made one."""
    result: list[Stored | Removed | Cleared] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Removed) and isinstance(last, Removed) and last.medium is event.medium:
            result[-1] = Removed(last.hashes + event.hashes, event.medium)
        else:
            result.append(event)
    return tuple(result)


@given(batches=st.lists(st.tuples(EVENTS, st.sampled_from(["maps", "arrays", "both"])), max_size=3))
@settings(deadline=None)
def test_what_is_encoded_in_any_dialect_is_read_back(
    batches: list[tuple[list[Stored | Removed | Cleared], str]],
) -> None:
    reader = Reader(Counts())
    for events, dialect in batches:
        sent = [
            list(fields(event).values())
            if dialect == "arrays" or (dialect == "both" and place % 2)
            else fields(event)
            for place, event in enumerate(events)
        ]
        batch = reader.read(msgspec.msgpack.encode([1.5, sent, 2]))
        assert batch == Batch(1.5, joined(events), 2)


def by_block(batch: Batch) -> list[object]:
    """What a batch says of each block; parents as links from block to block."""
    said: list[object] = []
    for event in batch.events:
        if isinstance(event, Cleared):
            said.append("cleared")
        elif isinstance(event, Removed):
            said += [(name, event.medium) for name in event.hashes]
        else:
            width = 4 * event.block_tokens
            parents = [event.parent, *event.hashes[:-1]]
            for place, (parent, name) in enumerate(zip(parents, event.hashes, strict=True)):
                tokens = event.tokens[place * width : (place + 1) * width]
                keys = None if event.extra_keys is None else event.extra_keys[place]
                said.append(
                    (parent, name, tokens, keys, event.lora, event.medium, event.session_id)
                )
    return said


@given(events=EVENTS, blocks_max=st.integers(1, 9))
@settings(deadline=None)
def test_the_parts_of_a_batch_say_the_same_and_are_small(
    events: list[Stored | Removed | Cleared], blocks_max: int
) -> None:
    batch = Batch(1.0, tuple(events), 3)
    pieces = parts(batch, blocks_max)
    assert [word for piece in pieces for word in by_block(piece)] == by_block(batch)
    sizes = [
        sum(1 if isinstance(e, Cleared) else len(e.hashes) for e in piece.events)
        for piece in pieces
    ]
    assert max(sizes) <= blocks_max or len(pieces) == 1


def checked(reader: Reader, raw: bytes) -> None:
    """Whatever comes, it is a batch of possible events or counted."""
    before = reader.counts.malformed_payloads + reader.counts.malformed_events
    batch = reader.read(raw)
    rank_of(raw)
    if batch is None:
        assert reader.counts.malformed_payloads + reader.counts.malformed_events > before
        return
    for event in batch.events:
        hash(event)
        if isinstance(event, Stored):
            assert len(event.tokens) == 4 * event.block_tokens * len(event.hashes) > 0


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_arbitrary_bytes_do_no_harm(raw: bytes) -> None:
    checked(Reader(Counts()), raw)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from([*fields(Stored((1,), None, b"", 1))]) | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(events=st.lists(ANYTHING, max_size=4), rank=ANYTHING)
@settings(deadline=None)
def test_arbitrary_events_do_no_harm(events: list[object], rank: object) -> None:
    checked(Reader(Counts()), msgspec.msgpack.encode([1.0, events, rank]))


@given(data=st.data(), raw=st.sampled_from(PAYLOADS))
@settings(deadline=None)
def test_damaged_recordings_do_no_harm(data: st.DataObject, raw: bytes) -> None:
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    checked(Reader(Counts()), bytes(damaged[:end]))


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_arbitrary_frames_are_a_numbered_message_or_none(frames: list[bytes]) -> None:
    message = numbered(frames)
    assert (message is not None) == (2 <= len(frames) <= 4 and len(frames[-2]) == 8)
