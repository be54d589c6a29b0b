"""What the KV index costs: events in, look-ups while events come in, memory per held block.

Run as `python -m bench.kv [--json] [--dynamo]`. Figures:

    events      prompts stored in two events (64 blocks, then the rest, as an engine that computes
                in chunks tells it) and removed block by block, last first, one hash per event and
                many events per message, as vLLM does; once as values, once decoded from msgpack
    look-ups    prompts of 767 blocks; turns of chats that part from the turn before at random
                places and land on any endpoint, so that nearly every endpoint holds another length.
                While look-ups run, events come in: so many as belong to the time that passed at
                20 000 blocks a second, in the same thread, and their time counts
    memory      resident bytes of a process of its own, 64 endpoints, one holder per block and eight
    stalls      the dearest single event, and forgetting an endpoint

Times are CPU time of this thread, of the best of some rounds. With `--dynamo` the same chats are
looked up in NVIDIA Dynamo's `RadixTree` (optional extra `dynamo`), fed with the same events.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from random import Random

import msgspec

from bench.dynamo import DynamoMissingError, dynamo_core
from epp.build import compiled
from epp.core.kvevents import TOKEN_BYTES, Event, Removed, Stored
from epp.core.kvindex import KvIndex, keys_of
from epp.wire.kvevents import Counts, Reader

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 64
PROMPT_BLOCKS = 767
SYSTEM_BLOCKS = 32
CHATS = 100
TURNS = 8
PROMPTS = 200
EVENTS_PER_MESSAGE = 64
ROUNDS = 5
ARRIVING_PER_S = 20_000
LOOK_UPS = 4000
MEMORY_BLOCKS = 400_000
PAGE_BYTES = 4096
SLOTS = 64
ROOMY = 10_000_000

TARGETS = {
    "events_decoded_per_s": 300_000.0,
    "look_ups_8_endpoints_per_s": 50_000.0,
    "look_ups_64_endpoints_while_events_come_per_s": 20_000.0,
}
"""At least; `bytes_per_held_block` at most 100."""

Figures = dict[str, float]


class Prompt:
    """One prompt's tokens and the engine's names for its blocks."""

    def __init__(self, rng: Random, before: Prompt | None = None, kept: int = 0) -> None:
        new = PROMPT_BLOCKS - kept
        size = BLOCK_TOKENS * TOKEN_BYTES
        self.tokens: bytes = rng.randbytes(new * size)
        self.names: tuple[int, ...] = tuple(rng.getrandbits(64) for _ in range(new))
        if before is not None:
            self.tokens = before.tokens[: kept * size] + self.tokens
            self.names = before.names[:kept] + self.names

    def stored(self, start: int, stop: int) -> Stored:
        """The event of some of its blocks."""
        size = BLOCK_TOKENS * TOKEN_BYTES
        parent = self.names[start - 1] if start else None
        tokens = self.tokens[start * size : stop * size]
        return Stored(self.names[start:stop], parent, tokens, BLOCK_TOKENS)

    def events(self) -> list[Event]:
        """Stored in two events, removed in as many as there are blocks."""
        stored = [self.stored(0, CHUNK_BLOCKS), self.stored(CHUNK_BLOCKS, PROMPT_BLOCKS)]
        return [*stored, *(Removed((name,)) for name in reversed(self.names))]


def main() -> None:
    """Measure everything and print a table, or JSON on demand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--dynamo", action="store_true", help="look-ups of Dynamo's RadixTree too (optional extra)"
    )
    args = parser.parse_args()
    try:
        figures = measure(dynamo=args.dynamo)
    except DynamoMissingError as error:
        raise SystemExit(str(error)) from None
    if args.json:
        print(json.dumps({"compiled": compiled(), **figures}, indent=2))
        return
    print(f"{'compiled' if compiled() else 'interpreted'}, one thread")
    for name, value in figures.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"   target {target:,.0f}"
        print(f"{name:<56}{value:>14,.1f}{verdict}")


def measure(*, dynamo: bool = False) -> Figures:
    """All figures; the name of each ends with its unit.

    Raises: DynamoMissingError.
    """
    figures = _events() | _stalls()
    for endpoints in (8, 64):
        figures |= _look_ups(endpoints, dynamo=dynamo)
    for holders in (1, 8):
        # A process of its own: memory freed earlier would hide what this one takes.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
            name = f"bytes_per_held_block_{holders}_holders"
            figures[name] = child.submit(_bytes_per_block, holders).result()
    return figures


def _events() -> Figures:
    prompts = [Prompt(Random(number)) for number in range(PROMPTS)]
    events = [event for prompt in prompts for event in prompt.events()]
    blocks = 2 * PROMPTS * PROMPT_BLOCKS
    payloads = [_payload(prompt) for prompt in prompts]

    def fold() -> None:
        index = KvIndex(blocks_max=ROOMY)
        for event in events:
            index.apply(0, event)

    def decode() -> None:
        reader = Reader(Counts())
        for messages in payloads:
            for message in messages:
                reader.read(message)

    def both() -> None:
        index, reader = KvIndex(blocks_max=ROOMY), Reader(Counts())
        for messages in payloads:
            for message in messages:
                batch = reader.read(message)
                assert batch is not None
                for event in batch.events:
                    index.apply(0, event)
        assert index.held == 0

    return {
        "events_per_s": blocks / _best_s(fold),
        "events_decode_alone_per_s": blocks / _best_s(decode),
        "events_decoded_per_s": blocks / _best_s(both),
    }


def _payload(prompt: Prompt) -> list[bytes]:
    """What an engine sends of a prompt, message by message."""
    maps = [_map(event) for event in prompt.events()]
    steps = [maps[:1], maps[1:2]]
    steps += [maps[n : n + EVENTS_PER_MESSAGE] for n in range(2, len(maps), EVENTS_PER_MESSAGE)]
    return [msgspec.msgpack.encode([1.0, step, 0]) for step in steps]


def _map(event: Event) -> dict[str, object]:
    if isinstance(event, Stored):
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": memoryview(event.tokens).cast("I").tolist(),
            "block_size": event.block_tokens,
            "medium": "GPU",
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    assert isinstance(event, Removed)
    return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": "GPU", "group_idx": 0}


def _stalls() -> Figures:
    index, rng = KvIndex(blocks_max=ROOMY), Random(3)
    dearest_s = 0.0
    for number in range(400):
        event = Prompt(rng).stored(0, 256)
        start_s = time.thread_time()
        index.apply(number % 4, event)
        dearest_s = max(dearest_s, time.thread_time() - start_s)
    forget_s = _time_s(lambda: index.forget(0))
    gc.collect()
    return {
        "dearest_event_of_256_blocks_us": dearest_s * 1e6,
        "forget_25600_blocks_us": forget_s * 1e6,
        "collect_generation_2_us": _best_s(gc.collect) * 1e6,
    }


def _look_ups(endpoints: int, *, dynamo: bool) -> Figures:
    rng = Random(endpoints)
    prompts = _chats(rng)
    index = KvIndex(blocks_max=ROOMY)
    root = index.root(BLOCK_TOKENS)
    placed = [(prompt, rng.randrange(endpoints)) for prompt in prompts]
    for prompt, slot in placed:
        index.apply(slot, prompt.stored(0, PROMPT_BLOCKS))
    chains = [list(keys_of(prompt.tokens, BLOCK_TOKENS, root)) for prompt in prompts]
    quiet_s = _per_call_s(lambda chain: index.match(chain, BLOCK_TOKENS), chains)
    suffix = f"{endpoints}_endpoints"
    figures = {f"look_ups_{suffix}_per_s": 1 / quiet_s}
    figures[f"look_ups_{suffix}_while_events_come_per_s"] = _while_events_come(
        index, chains, endpoints
    )
    if dynamo:
        tree = dynamo_core().RadixTree()
        for number, ((_, slot), chain) in enumerate(zip(placed, chains, strict=True)):
            tree.apply_event(slot, _dynamo_stored(number, chain))
        for chain in chains:
            scores = tree.find_matches(chain).scores.items()
            theirs = {worker: blocks for (worker, _), blocks in scores}
            assert theirs == index.match(chain, BLOCK_TOKENS), "the structures disagree"
        figures[f"dynamo_look_ups_{suffix}_per_s"] = 1 / _per_call_s(tree.find_matches, chains)
    return figures


def _chats(rng: Random) -> list[Prompt]:
    system = Prompt(rng)
    chats = [system] * CHATS
    prompts: list[Prompt] = []
    for _ in range(TURNS):
        for number, chat in enumerate(chats):
            chats[number] = Prompt(rng, chat, rng.randrange(SYSTEM_BLOCKS, PROMPT_BLOCKS))
            prompts.append(chats[number])
    return prompts


def _while_events_come(index: KvIndex, chains: Sequence[list[int]], endpoints: int) -> float:
    """Look-ups per second of a thread that also folds what arrives meanwhile."""
    arriving = [Prompt(Random(100 + number)).events() for number in range(8)]
    stream = cycle(event for events in arriving for event in events)
    best = 0.0
    for _ in range(ROUNDS):
        folded, start_s = 0, time.thread_time()
        for number in range(LOOK_UPS):
            index.match(chains[number % len(chains)], BLOCK_TOKENS)
            due = (time.thread_time() - start_s) * ARRIVING_PER_S
            while folded < due:
                event = next(stream)
                index.apply(number % endpoints, event)
                folded += len(event.hashes) if isinstance(event, (Stored, Removed)) else 0
        best = max(best, LOOK_UPS / (time.thread_time() - start_s))
    return best


def _dynamo_stored(number: int, chain: Sequence[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in chain]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data}).encode()


def _bytes_per_block(holders: int) -> float:
    """Resident memory per held block."""
    index, rng = KvIndex(blocks_max=ROOMY), Random(5)
    first = Prompt(rng).events()
    for event in first:  # what is loaded with the first use
        index.apply(0, event)
    gc.collect()
    before = _resident_bytes()
    for number in range(MEMORY_BLOCKS // PROMPT_BLOCKS // holders):
        event = Prompt(rng).stored(0, PROMPT_BLOCKS)
        for holder in range(holders):
            index.apply((number + holder) % SLOTS, event)
    return (_resident_bytes() - before) / index.held


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _time_s(call: Callable[[], object]) -> float:
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def _best_s(call: Callable[[], object]) -> float:
    return min(_time_s(call) for _ in range(ROUNDS))


def _per_call_s(call: Callable[[list[int]], object], chains: Sequence[list[int]]) -> float:
    """Mean over the chains, each with the best of its rounds (wall clock: Dynamo's tree works in
    a thread of its own)."""
    best_s = [float("inf")] * len(chains)
    for _ in range(ROUNDS):
        for place, chain in enumerate(chains):
            start_s = time.perf_counter()
            call(chain)
            best_s[place] = min(best_s[place], time.perf_counter() - start_s)
    return sum(best_s) / len(best_s)


if __name__ == "__main__":
    main()
