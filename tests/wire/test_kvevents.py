"""KV events as engines send them: recorded frames of a real vLLM, and older and other dialects."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.core.kvevents import Batch, Cleared, Medium, Removed, Stored, parts
from epp.wire.kvevents import (
    END_SEQUENCE,
    Counts,
    Reader,
    numbered,
    rank_of,
    replay_request,
)

RECORDED = Path(__file__).parent / "data" / "kvevents"
STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 2**64 - 1],
    "parent_block_hash": 7,
    "token_ids": [1, 2, 3, 2**32 - 1],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "sql",
    "extra_keys": [["sql", ["image", 3]], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}
CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, events] if rank is None else [1.5, events, rank])


def as_array(event: dict[str, Any], fields: int = 99) -> list[Any]:
    return [event["type"], *list(event.values())[1 : 1 + fields]]


def read(*events: object) -> tuple[Sequence[object] | None, Counts]:
    reader = Reader(Counts())
    batch = reader.read(payload(*events))
    return None if batch is None else batch.events, reader.counts


def recorded(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def plainly(raw: bytes) -> list[tuple[str, Any, int]]:
    """What a batch does to each block, by a plain decoder: an oracle for one-to-one comparison."""
    done: list[tuple[str, Any, int]] = []
    for event in msgspec.msgpack.decode(raw)[1]:
        tokens = event.get("token_ids", [])
        for place, name in enumerate(event.get("block_hashes", [None])):
            size = event.get("block_size", 0)
            done.append((event["type"], name, sum(tokens[place * size : (place + 1) * size])))
    return done


def ours(batch: Batch) -> list[tuple[str, Any, int]]:
    done: list[tuple[str, Any, int]] = []
    for event in batch.events:
        if isinstance(event, Cleared):
            done.append(("AllBlocksCleared", None, 0))
        elif isinstance(event, Removed):
            done += [("BlockRemoved", name, 0) for name in event.hashes]
        else:
            ids = struct.unpack(f"<{len(event.tokens) // 4}I", event.tokens)
            size = event.block_tokens
            for place, name in enumerate(event.hashes):
                done.append(("BlockStored", name, sum(ids[place * size : (place + 1) * size])))
    return done


# -- recorded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks"), [("int_hashes", 126), ("byte_hashes", 8), ("two_ranks", 20)]
)
def test_recorded_messages_are_read_block_by_block_as_a_plain_decoder_does(
    name: str, blocks: int
) -> None:
    reader = Reader(Counts())
    for line in recorded(name):
        raw = bytes.fromhex(line["payload_hex"])
        batch = reader.read(raw)
        assert batch is not None
        assert ours(batch) == plainly(raw)
        assert batch.at_s > 1.7e9
    counts = reader.counts
    assert counts.blocks_stored == blocks
    assert counts.malformed_events == counts.malformed_payloads == counts.other_group_events == 0
    assert counts.unknown_tags == counts.unknown_fields == {}


def test_recorded_adapters_salts_and_sessions_are_kept() -> None:
    reader = Reader(Counts())
    seen: set[tuple[str | None, object, str | None]] = set()
    for line in recorded("int_hashes"):
        batch = reader.read(bytes.fromhex(line["payload_hex"]))
        for event in batch.events if batch else ():
            if isinstance(event, Stored):
                keys = None if event.extra_keys is None else event.extra_keys[0]
                seen.add((event.lora, keys, event.session_id))
    assert {
        ("lora-a", ("lora-a",), None),
        ("lora-b", ("lora-b",), None),
        (None, ("tenant-a",), None),
        (None, None, "sess-42"),
    } <= seen


def test_recorded_ranks_differ_and_their_topics_do_not() -> None:
    lines = recorded("two_ranks")
    payloads = [bytes.fromhex(line["payload_hex"]) for line in lines]
    assert {rank_of(raw) for raw in payloads} == {0, 1}
    batches = [Reader(Counts()).read(raw) for raw in payloads]
    assert [batch.rank for batch in batches if batch] == [rank_of(raw) for raw in payloads]
    assert len({line["topic"] for line in lines}) == 1


# -- dialects --------------------------------------------------------------------------------


def expected_stored(fields: int = 99) -> Stored:
    """What an array of so many fields says."""
    return Stored(
        hashes=(11, 2**64 - 1),
        parent=7,
        tokens=struct.pack("<4I", 1, 2, 3, 2**32 - 1),
        block_tokens=2,
        lora="sql" if fields >= 7 else None,
        medium=Medium.GPU,
        extra_keys=(("sql", ("image", 3)), None) if fields >= 8 else None,
    )


@pytest.mark.parametrize("fields", range(4, 12))
def test_arrays_of_every_version_are_read(fields: int) -> None:
    """vLLM 0.8 sent 4 fields, 0.23 sent 11."""
    events, counts = read(as_array(STORED, fields), as_array(REMOVED, min(fields - 3, 3)))
    assert events == (expected_stored(fields), Removed((11,)))
    assert not counts.malformed_events


def test_maps_say_the_same_as_arrays() -> None:
    for cleared in (CLEARED, as_array(CLEARED)):
        form = (lambda event: event) if cleared is CLEARED else as_array
        events, _ = read(form(REMOVED), cleared, form(STORED))
        assert events == (Removed((11,)), Cleared(), expected_stored())


def test_one_stream_may_change_its_dialect() -> None:
    reader = Reader(Counts())
    for events in ([STORED], [as_array(STORED)], [STORED, as_array(STORED)], [STORED]):
        batch = reader.read(payload(*events))
        assert batch is not None
        assert batch.events == (expected_stored(),) * len(events)


def test_sglang_sends_signed_hashes_five_or_six_fields_and_no_rank() -> None:
    stored = ["BlockStored", [-5, 6], None, [1, 2], 1, None, "CPU"]
    raw = payload(
        stored, ["BlockRemoved", [-5], "CPU"], ["BlockStored", [9], 6, [3], 1, None], rank=None
    )
    batch = Reader(Counts()).read(raw)
    assert batch == Batch(
        1.5,
        (
            Stored((-5, 6), None, struct.pack("<2I", 1, 2), 1, medium=Medium.CPU),
            Removed((-5,), Medium.CPU),
            Stored((9,), 6, struct.pack("<I", 3), 1),
        ),
    )


def test_a_batch_that_is_a_map_is_read_too() -> None:
    raw = msgspec.msgpack.encode({"ts": 2.5, "events": [STORED], "data_parallel_rank": 3})
    assert Reader(Counts()).read(raw) == Batch(2.5, (expected_stored(),), 3)


def test_an_adapter_without_a_name_goes_by_its_number() -> None:
    events, _ = read(STORED | {"lora_name": None, "lora_id": 4})
    assert events is not None
    assert isinstance(events[0], Stored)
    assert events[0].lora == "4"


@pytest.mark.parametrize(
    ("medium", "locality", "expected"),
    [
        (None, None, Medium.GPU),
        ("GPU", "LOCAL", Medium.GPU),
        ("CPU", None, Medium.CPU),
        ("CPU_PINNED", None, Medium.CPU),
        ("STORAGE", None, Medium.DISK),
        ("CPU", "REMOTE", Medium.DISK),
        ("a medium of next year", None, Medium.DISK),
    ],
)
def test_mediums_are_gpu_cpu_or_something_slower(
    medium: str | None, locality: str | None, expected: Medium
) -> None:
    events, _ = read(REMOVED | {"medium": medium, "locality": locality})
    assert events == (Removed((11,), expected),)


def test_removals_in_a_row_are_joined_and_keep_their_place() -> None:
    removals = [REMOVED | {"block_hashes": [number]} for number in range(3)]
    elsewhere = REMOVED | {"medium": "CPU"}
    events, counts = read(*removals, elsewhere, STORED, removals[0])
    assert events == (
        Removed((0, 1, 2)),
        Removed((11,), Medium.CPU),
        expected_stored(),
        Removed((0,)),
    )
    assert counts.blocks_removed == 5


# -- what is left out ------------------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, as_array])
def test_unknown_events_and_fields_are_counted_and_cost_nothing_else(form: Any) -> None:
    stored = {**STORED, "locality": None, "ownership": None, "session_id": "s"}
    events, counts = read(
        form({"type": "BlockMigrated", "block_hashes": [1]}), form(stored | {"novelty": 1})
    )
    assert events == (msgspec.structs.replace(expected_stored(), session_id="s"),)
    assert counts.unknown_tags == {"BlockMigrated": 1}
    assert counts.unknown_fields == {
        "BlockStored.novelty" if form is dict else "BlockStored[14]": 1
    }
    assert counts.malformed_events == counts.malformed_payloads == 0


def test_names_of_unknown_events_do_not_pile_up() -> None:
    _, counts = read(*({"type": f"Event{number}" * 50} for number in range(100)))
    assert len(counts.unknown_tags) == 33
    assert counts.unknown_tags["other"] == 68
    assert max(map(len, counts.unknown_tags)) == 64


@pytest.mark.parametrize("followed", [0, 1])
def test_only_the_first_group_that_holds_whole_prefixes_is_followed(followed: int) -> None:
    other = STORED | {"group_idx": 1 - followed, "kv_cache_spec_kind": "sliding_window"}
    whole = STORED | {"group_idx": followed}
    also_whole = STORED | {"group_idx": 2}
    events, counts = read(
        other,
        whole,
        also_whole,
        REMOVED | {"group_idx": 1 - followed},
        REMOVED | {"group_idx": followed},
    )
    assert events == (expected_stored(), Removed((11,)))
    assert counts.other_group_events == 3


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "unknown", "kind of next year"])
def test_a_group_that_forgets_parts_of_a_prefix_is_not_followed(kind: str) -> None:
    events, counts = read(STORED | {"kv_cache_spec_kind": kind})
    assert events == ()
    assert counts.other_group_events == 1


@pytest.mark.parametrize("kind", [None, "mla_attention", "sink_full_attention"])
def test_groups_that_keep_whole_prefixes_are_followed(kind: str | None) -> None:
    assert read(STORED | {"kv_cache_spec_kind": kind})[0] == (expected_stored(),)


# -- malformed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": [1, 2, 3, 2**32]},
        {"token_ids": [(1, 2), (2, 3), (3, 4), (4, 5)]},
        {"token_ids": "text"},
        {"block_size": 0},
        {"block_size": -2},
        {"block_hashes": []},
        {"block_hashes": ["text", "text"]},
        {"extra_keys": [["one entry"]]},
        {"extra_keys": [{"a": 1}, None]},
        {"lora_name": 3},
    ],
)
@pytest.mark.parametrize("form", [dict, as_array])
def test_a_stored_event_that_cannot_be_is_dropped_alone(form: Any, wrong: dict[str, Any]) -> None:
    events, counts = read(form(STORED | wrong), form(REMOVED))
    assert events == (Removed((11,)),)
    assert counts.malformed_events == 1


@pytest.mark.parametrize(
    "wrong",
    [REMOVED | {"block_hashes": "text"}, ["BlockRemoved"], 3, None, [], {}, {"type": 1}, [[]]],
)
def test_what_may_have_been_a_removal_makes_the_whole_batch_unreadable(wrong: object) -> None:
    events, counts = read(STORED, wrong)
    assert events is None
    assert counts.malformed_events == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"text",
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.5, None, 0]),
        msgspec.msgpack.encode(["time", [STORED], 0]),
        msgspec.msgpack.encode([1.5, [STORED], 0])[:-20],
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\x91\x81\xa4type\xa1\xff\x00",
    ],
)
def test_a_payload_that_is_none_is_counted(raw: bytes) -> None:
    reader = Reader(Counts())
    assert reader.read(raw) is None
    assert reader.counts.malformed_payloads == 1
    assert rank_of(raw) == 0


# -- frames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[b"kv@a@b"], [b""], [b"", b"kv@a@b"], []])
def test_live_messages_and_answers_in_both_forms_are_numbered(before: list[bytes]) -> None:
    assert numbered([*before, b"\0\0\0\0\0\0\1\2", b"payload"]) == (258, b"payload")
    assert numbered([*before, b"\xff" * 8, b""]) == (END_SEQUENCE, b"")


@pytest.mark.parametrize(
    "frames",
    [[], [b"x"], [b"t", b"\0" * 7, b"p"], [b"t", b"\0" * 9, b"p"], [b"\0" * 8] * 5],
)
def test_other_frames_are_not_messages(frames: list[bytes]) -> None:
    assert numbered(frames) is None


def test_a_replay_is_asked_for_as_engines_expect_it() -> None:
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]


# -- parts -----------------------------------------------------------------------------------


def test_a_small_batch_stays_whole_and_a_large_one_is_cut_with_its_parents() -> None:
    extra = tuple(range(5))
    whole = Stored((1, 2, 3, 4, 5), 0, struct.pack("<10I", *range(10)), 2, "a", extra_keys=extra)
    batch = Batch(1.0, (whole, Removed((1, 2, 3)), Cleared()), 4)
    assert parts(batch, 9) == [batch]
    pieces = parts(batch, 2)
    assert [piece.events for piece in pieces] == [
        (Stored((1, 2), 0, whole.tokens[:16], 2, "a", extra_keys=(0, 1)),),
        (Stored((3, 4), 2, whole.tokens[16:32], 2, "a", extra_keys=(2, 3)),),
        (Stored((5,), 4, whole.tokens[32:], 2, "a", extra_keys=(4,)),),
        (Removed((1, 2)),),
        (Removed((3,)), Cleared()),
    ]
    assert {piece.rank for piece in pieces} == {4}
