"""Look-ups of our prefix index beside those of Dynamo's `RadixTree`, in one run.

Run as `python -m bench.prefix_index --dynamo [--traces FOLDER]`. Both structures learn the same
prompts in blocks of 16 tokens, each on an endpoint chosen at random; then both look up every prompt
and every answer of one is compared with the other's. Two kinds of prompts:

    chats   generated, 767 blocks each: a common system prompt, then turns that keep a random part
            of the turn before; since turns land anywhere, nearly every endpoint holds another
            length of a prompt, the worst case of our bisection
    trace   the first prompts of the Mooncake conversation trace: 750 blocks on average, most of
            them used once

Times are of the wall clock: Dynamo's tree works in a thread of its own, and its figure holds the
hop there and the conversion of the list. Ours is a call in this thread. Each look-up counts with
the best of its rounds, so that a busy machine disturbs neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from bench.dynamo import dynamo_core
from bench.sim.plan import WorkloadOptions
from bench.sim.traces import mooncake_conversation
from epp.core.prefix import PrefixIndex

BLOCK_TOKENS = 16
CHAT_BLOCKS = 767
SYSTEM_BLOCKS = 32
CHATS = 250
TURNS = 8
TRACE_PROMPTS = 3000
ROUNDS = 5

Chain = Sequence[int]


def compare(traces: str | None, endpoints: Sequence[int] = (8, 64)) -> dict[str, float]:
    """Look-ups per second by name; here more is better.

    Args:
        traces: folder of the trace; without one there are only chats.
    Raises: DynamoMissingError; WorkloadError if the trace is not there.
    """
    tree_class = dynamo_core().RadixTree
    prompts = {"chats": _chats(Random(1))} | ({"trace": _trace(traces)} if traces else {})
    figures: dict[str, float] = {}
    for name, chains in prompts.items():
        for number in endpoints:
            rng = Random(number)
            index, tree = PrefixIndex(2**40, slot_blocks_max=2**40), tree_class()
            for event, chain in enumerate(chains):
                endpoint = rng.randrange(number)
                index.learn(endpoint, [chain])
                tree.apply_event(endpoint, _stored(event, chain))
            _check_equal(index, tree, chains)
            suffix = f"{name}_{number}_endpoints_per_s"
            figures["look_ups_" + suffix] = _per_s(_look_up(index), chains)
            figures["dynamo_look_ups_" + suffix] = _per_s(tree.find_matches, chains)
    return figures


def _chats(rng: Random) -> list[Chain]:
    system = _names(rng, SYSTEM_BLOCKS)
    chats = [list(system) for _ in range(CHATS)]
    prompts: list[Chain] = []
    for _ in range(TURNS):
        for number, chat in enumerate(chats):
            kept = chat[: rng.randrange(SYSTEM_BLOCKS, CHAT_BLOCKS)]
            chats[number] = kept + _names(rng, CHAT_BLOCKS - len(kept))
            prompts.append(chats[number])
    return prompts


def _trace(folder: str) -> list[Chain]:
    options = WorkloadOptions(traces=folder, block_tokens=BLOCK_TOKENS, requests_max=TRACE_PROMPTS)
    requests = mooncake_conversation(options).requests
    # Lists, because Dynamo takes nothing else.
    return [list(request.blocks) for request in requests if request.blocks]


def _names(rng: Random, blocks: int) -> list[int]:
    return [rng.getrandbits(60) for _ in range(blocks)]


def _stored(number: int, chain: Chain) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in chain]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data}).encode()


def _check_equal(index: PrefixIndex, tree: Any, chains: Sequence[Chain]) -> None:
    for chain in chains:
        theirs = {worker: blocks for (worker, _), blocks in tree.find_matches(chain).scores.items()}
        ours = index.match([chain])
        assert ours == theirs, f"the structures disagree: {ours} and {theirs}"


def _look_up(index: PrefixIndex) -> Callable[[Chain], object]:
    return lambda chain: index.match([chain])


def _per_s(look_up: Callable[[Chain], object], chains: Sequence[Chain]) -> float:
    best_s = [float("inf")] * len(chains)
    for _ in range(ROUNDS):
        for place, chain in enumerate(chains):
            start_s = time.perf_counter()
            look_up(chain)
            best_s[place] = min(best_s[place], time.perf_counter() - start_s)
    return len(chains) / sum(best_s)
