"""Look-ups of our prefix index beside those of Dynamo's `RadixTree`, in one run.

Run as `python -m bench.prefix_index --dynamo`. Chats share a system prompt, grow turn by turn and
move between endpoints, so that a prompt is held to many different lengths. Both structures learn
the same prompts, then both look every prompt up, and every answer of one is compared with the
other's. Times are of the wall clock: Dynamo's tree works in a thread of its own, and its figure
holds the hop there and the conversion of the list. Ours is a call in this thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from bench.dynamo import dynamo_core
from epp.core.prefix import PrefixIndex

PROMPT_BLOCKS = 767
"""12 000 tokens in blocks of 16: the mean prompt of the Mooncake conversation trace."""
SYSTEM_BLOCKS = 32
CHATS = 250
TURNS = 8
ROUNDS = 5

Chain = list[int]


def compare(endpoints: Sequence[int] = (8, 64)) -> dict[str, float]:
    """Look-ups per second, the best of some rounds, by name; here more is better.

    Raises: DynamoMissingError.
    """
    tree_class = dynamo_core().RadixTree
    figures: dict[str, float] = {}
    for number in endpoints:
        prompts = _prompts(Random(number), number)
        index, tree = PrefixIndex(2**40, slot_blocks_max=2**40), tree_class()
        for event, (endpoint, chain) in enumerate(prompts):
            index.learn(endpoint, [chain])
            tree.apply_event(endpoint, _stored(event, chain))
        chains = [chain for _, chain in prompts]
        _check_equal(index, tree, chains)
        suffix = f"_of_{PROMPT_BLOCKS}_blocks_{number}_endpoints_per_s"
        figures["look_ups" + suffix] = _per_s(lambda chain: index.match([chain]), chains)
        figures["dynamo_look_ups" + suffix] = _per_s(tree.find_matches, chains)
    return figures


def _prompts(rng: Random, endpoints: int) -> list[tuple[int, Chain]]:
    """(endpoint, prompt) in order; a turn keeps a random part of the one before it."""
    system = _names(rng, SYSTEM_BLOCKS)
    chats = [list(system) for _ in range(CHATS)]
    prompts = []
    for _ in range(TURNS):
        for number, chat in enumerate(chats):
            kept = chat[: rng.randrange(SYSTEM_BLOCKS, PROMPT_BLOCKS)]
            chats[number] = kept + _names(rng, PROMPT_BLOCKS - len(kept))
            prompts.append((rng.randrange(endpoints), chats[number]))
    return prompts


def _names(rng: Random, blocks: int) -> Chain:
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


def _per_s(look_up: Callable[[Chain], object], chains: Sequence[Chain]) -> float:
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for chain in chains:
            look_up(chain)
        best_s = min(best_s, time.perf_counter() - start_s)
    return len(chains) / best_s
