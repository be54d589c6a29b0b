"""What a real engine said, folded; and how it made its hashes, so that a change of that is seen."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from epp.core.kvevents import Cleared, Event, Hash, Removed, Stored
from epp.core.kvindex import KvIndex
from epp.wire.kvevents import Counts, Reader
from tests.property.kvindex_oracle import Oracle

FOLDER = Path(__file__).parents[1] / "wire" / "data" / "kvindex"
FILES = (
    "sha256.jsonl.gz",
    "sha256_block_16.jsonl",
    "sha256_cbor_bytes_seed_0.jsonl",
    "xxhash_seed_42.jsonl",
)
LORA_PATHS = {"lora-a": "models/lora-a", "lora-b": "models/lora-b"}
DEFAULT_SEED = "vllm-none-hash"


def payloads(name: str) -> list[bytes]:
    data = (FOLDER / name).read_bytes()
    lines = (gzip.decompress(data) if name.endswith(".gz") else data).splitlines()
    return [bytes.fromhex(json.loads(line)["payload"]) for line in lines]


def events(name: str) -> list[Event]:
    reader = Reader(Counts())
    batches = [reader.read(payload) for payload in payloads(name)]
    assert None not in batches
    return [event for batch in batches if batch for event in batch.events]


@pytest.mark.parametrize("name", FILES)
def test_a_recorded_stream_gives_the_state_recomputed_from_scratch(name: str) -> None:
    index, oracle = KvIndex(blocks_max=10_000), Oracle()
    prompts: dict[int, int] = {}
    """Tip -> blocks, of every chain seen."""
    for event in events(name):
        labelled = event
        if isinstance(event, Stored):
            labelled = msgspec.structs.replace(event, session_id="s")
        joined = index.apply(0, labelled)
        oracle.apply(0, event)
        if joined:
            prompts[joined.tip] = joined.blocks
        assert index.held_by(0) == oracle.held_by(0)
        for tip, blocks in list(prompts.items())[-3:]:
            keys = list(index.chain(tip, blocks))
            assert len(keys) == blocks
            size = index.block_tokens_of(0)
            assert index.match(keys, size or 32) == oracle.match(keys)
    assert len(prompts) > 3
    assert index.counts.unknown_removals == 0
    assert index.orphans == index.gaps == 0
    for tip, blocks in prompts.items():
        keys = list(index.chain(tip, blocks))
        assert index.match(keys, index.block_tokens_of(0) or 32) == oracle.match(keys)


def test_the_recording_holds_removals_and_clears() -> None:
    kinds = [type(event) for event in events("sha256.jsonl.gz")]
    assert {Stored, Removed, Cleared} == set(kinds)


def test_a_recorded_stream_told_from_the_middle_ends_right_once_it_is_told_anew() -> None:
    whole, late = KvIndex(blocks_max=10_000), KvIndex(blocks_max=10_000)
    recorded = events("sha256.jsonl.gz")
    recorded = recorded[: recorded.index(Cleared())]
    for event in recorded:
        whole.apply(0, event)
    for event in recorded[200:]:
        late.apply(0, event)
    late.forget(0)
    for event in recorded:
        late.apply(0, event)
    late.expire(0.0)
    assert whole.held > 100
    assert (late.held, late.entries, late.gaps) == (whole.held, whole.entries, whole.gaps)


# -- the engine's own hashes -----------------------------------------------------------------


def cbor(value: object) -> bytes:
    """Canonical CBOR of what a block's hash is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    assert isinstance(value, tuple)
    return _cbor_head(4, len(value)) + b"".join(cbor(part) for part in value)


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    width = next(w for w in (0, 1, 2, 3) if number < 1 << (8 << w))
    return bytes([major << 5 | 24 + width]) + struct.pack(">" + "BHIQ"[width], number)


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def digests(
    name: str, digest: Callable[[object], bytes], seed: str
) -> Iterator[tuple[Hash, bytes]]:
    """What the engine published, and the digest we make of the same block."""
    known: dict[Hash, bytes] = {}
    for payload in payloads(name):
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                yield from _of_event(event, known, digest, seed)


def _of_event(
    event: dict[str, Any], known: dict[Hash, bytes], digest: Callable[[object], bytes], seed: str
) -> Iterator[tuple[Hash, bytes]]:
    parent = event["parent_block_hash"]
    previous = digest(seed) if parent is None else known[parent]
    size, lora = event["block_size"], event.get("lora_name")
    for number, published in enumerate(event["block_hashes"]):
        tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
        extra = [("lora", lora, LORA_PATHS[lora])] if lora else []
        said = (event.get("extra_keys") or {number: None})[number] or []
        extra += [("cache_salt", key) for key in said if key != lora]
        previous = digest((previous, tokens, tuple(extra) or None))
        known[published] = previous
        yield published, previous


@pytest.mark.parametrize(
    ("name", "digest", "seed"),
    [
        ("sha256.jsonl.gz", lambda v: hashlib.sha256(pickled(v)).digest(), DEFAULT_SEED),
        ("sha256_block_16.jsonl", lambda v: hashlib.sha256(pickled(v)).digest(), DEFAULT_SEED),
        ("sha256_cbor_bytes_seed_0.jsonl", lambda v: hashlib.sha256(cbor(v)).digest(), "0"),
        ("xxhash_seed_42.jsonl", lambda v: xxhash.xxh3_128_digest(pickled(v)), "42"),
    ],
)
def test_the_hashes_a_real_engine_published_are_made_as_we_believe(
    name: str, digest: Callable[[object], bytes], seed: str
) -> None:
    checked = 0
    for published, made in digests(name, digest, seed):
        if isinstance(published, int):
            assert published == int.from_bytes(made[-8:], "big")
        else:
            assert published == made
        checked += 1
    assert checked >= 8
