"""What the prefix index costs: memory per held block, learn, match, forget, collector pauses.

Run as `python -m bench.prefix_index [--json] [--slots N] [--slot-blocks N]`, or with `--dynamo` for
look-ups beside those of Dynamo's radix tree and nothing else (`bench.radix_tree`, which says how).
Times are CPU time of this thread. Every figure is a median unless its name says otherwise; a figure
is better when smaller. The driver draws new names for each chain, so no name object is shared
between learns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median

from bench.dynamo import DynamoMissingError
from bench.radix_tree import compare
from bench.sim.plan import WorkloadError
from epp.core.prefix import PrefixIndex, name_blocks, root_of

CHAIN_BLOCKS = 512
PAGE_BYTES = 4096
Figures = dict[str, float]


def main() -> None:
    """Measure everything and print a table, or JSON on demand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--slots", type=int, default=64, help="endpoints (default 64)")
    parser.add_argument(
        "--slot-blocks", type=int, default=31_250, help="blocks per endpoint (default 31250)"
    )
    parser.add_argument(
        "--dynamo", action="store_true", help="compare look-ups with Dynamo's, which is optional"
    )
    parser.add_argument(
        "--traces",
        default=os.environ.get("TRACES"),
        help="with --dynamo: folder of the Mooncake conversation trace (default: TRACES)",
    )
    args = parser.parse_args()
    try:
        figures = compare(args.traces) if args.dynamo else measure(args.slots, args.slot_blocks)
    except (DynamoMissingError, WorkloadError) as error:
        raise SystemExit(str(error)) from None
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:<56}{value:>14,.3f}")


def measure(slots: int, slot_blocks: int) -> Figures:
    """All figures; the name of each ends with its unit."""
    figures: Figures = {}
    for tokens, prompt_bytes in ((64, 16_384), (64, 131_072), (16, 131_072)):
        name = f"name_blocks_{prompt_bytes // 1024}KiB_{tokens}tokens_us"
        figures[name] = _name_blocks_us(prompt_bytes, tokens)
    figures |= _match(slots)
    figures |= _conversations(slots, slot_blocks)
    for chain_blocks, holders in ((CHAIN_BLOCKS, 1), (CHAIN_BLOCKS, 8), (8, 1), (1, 1)):
        prefix = f"runs_of_{chain_blocks}_held_by_{holders}"
        # A process of its own: memory freed by an earlier index would hide what this one takes.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
            filled = child.submit(_churn, slots, slot_blocks, chain_blocks, holders).result()
        figures |= {f"{prefix}_{name}": value for name, value in filled.items()}
    index = PrefixIndex(2**40, slot_blocks_max=slot_blocks)
    _learn_new(index, slots, slots * slot_blocks, chain_blocks=CHAIN_BLOCKS, holders=1)
    return figures | _full(index, slots)


def _cpu_us(call: Callable[..., object], *args: object) -> float:
    start = time.thread_time()
    call(*args)
    return (time.thread_time() - start) * 1e6


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _names(rng: Random, blocks: int) -> list[int]:
    return [rng.getrandbits(60) for _ in range(blocks)]


def _copies(names: Sequence[int]) -> list[int]:
    """Equal names in objects of their own, as a later request brings them."""
    return [name ^ 0 for name in names]


def _name_blocks_us(prompt_bytes: int, block_tokens: int) -> float:
    prompt, root = Random(1).randbytes(prompt_bytes), root_of("model", "")
    return median(
        _cpu_us(lambda: name_blocks(prompt, block_tokens=block_tokens, root=root, blocks_max=0))
        for _ in range(200)
    )


def _match(slots: int) -> Figures:
    """512 blocks against endpoints that share a 100-block head and differ in their tails."""
    rng = Random(2)
    head = _names(rng, 100)
    index = PrefixIndex(2**40, slot_blocks_max=2**20)
    chains = [head + _names(rng, CHAIN_BLOCKS - 100) for _ in range(slots)]
    for slot, chain in enumerate(chains):
        index.learn(slot, [_copies(chain)])
    ladder = _names(rng, CHAIN_BLOCKS)
    many_lengths = PrefixIndex(2**40, slot_blocks_max=2**20)
    for slot in range(slots):
        many_lengths.learn(slot, [ladder[: (slot + 1) * CHAIN_BLOCKS // slots]])
    unknown = _names(rng, CHAIN_BLOCKS)
    common = head + _names(rng, CHAIN_BLOCKS - 100)

    def typical_us(target: PrefixIndex, chain: list[int]) -> float:
        return median(_cpu_us(lambda: target.match([chain])) for _ in range(2000))

    return {
        "match_nothing_known_us": typical_us(index, unknown),
        "match_shared_head_us": typical_us(index, common),
        "match_shared_head_and_one_full_us": typical_us(index, _copies(chains[slots // 2])),
        "match_every_length_different_us": typical_us(many_lengths, ladder),
    }


def _churn(slots: int, slot_blocks: int, chain_blocks: int, holders: int) -> Figures:
    """Fill an index, then replace all it holds: an LRU's steady state takes more than its start."""
    index, before = PrefixIndex(2**40, slot_blocks_max=slot_blocks), _resident_bytes()
    figures: Figures = {}
    for phase in ("filled", "churned"):
        per_block_us, max_us = _learn_new(
            index, slots, slots * slot_blocks, chain_blocks=chain_blocks, holders=holders
        )
        figures |= {
            f"{phase}_bytes_per_held_block": (_resident_bytes() - before) / index.held,
            f"{phase}_learn_us_per_block": per_block_us,
            f"{phase}_learn_us_max": max_us,
        }
    return figures


def _learn_new(
    index: PrefixIndex, slots: int, blocks: int, *, chain_blocks: int, holders: int
) -> tuple[float, float]:
    """Learn so many blocks in new chains, each on `holders` neighbouring slots.

    Returns: CPU us per block, and of the dearest learn.
    """
    rng, sum_us, max_us = Random(index.held), 0.0, 0.0
    chains = blocks // chain_blocks // holders
    for turn in range(chains):
        names = _names(rng, chain_blocks)
        for holder in range(holders):
            slot = (turn * holders + holder) % slots
            cost_us = _cpu_us(index.learn, slot, [_copies(names)])
            sum_us += cost_us
            max_us = max(max_us, cost_us)
    return sum_us / (chains * holders * chain_blocks), max_us


def _conversations(slots: int, slot_blocks: int) -> Figures:
    """Chats of 100 common blocks that grow by 10 blocks a turn up to 400, each on one slot."""
    rng, system = Random(4), _names(Random(5), 100)
    index = PrefixIndex(2**40, slot_blocks_max=slot_blocks)
    chats = [list(system) for _ in range(slots * 50)]
    blocks, costs_us = 0, []
    for _ in range(20_000):
        number = rng.randrange(len(chats))
        chat = chats[number]
        chat += _names(rng, 10)
        chain = _copies(chat)
        cost_us = _cpu_us(index.learn, number % slots, [chain])
        costs_us.append(cost_us)
        blocks += len(chain)
        if len(chat) >= 400:
            chats[number] = list(system)
    return {
        "learn_conversations_us_per_block": sum(costs_us) / blocks,
        "learn_conversations_us": median(costs_us),
        "learn_conversations_us_max": max(costs_us),
    }


def _full(index: PrefixIndex, slots: int) -> Figures:
    """What a full index costs: learns that evict as much, collector pauses, a leaving endpoint."""
    rng = Random(6)
    per_block_us, max_us = _learn_new(
        index, slots, 1000 * CHAIN_BLOCKS, chain_blocks=CHAIN_BLOCKS, holders=1
    )
    chain = _names(rng, CHAIN_BLOCKS)
    index.learn(0, [chain])
    again = _copies(chain)
    repeat_us = median(_cpu_us(index.learn, 0, [again]) for _ in range(200))
    chain.clear()
    again.clear()
    gc.collect()
    pauses_us = [_cpu_us(gc.collect) for _ in range(5)]
    held = index.held
    forgets_us = [_cpu_us(index.forget, number) for number in range(slots // 2)]
    leaving_us = [_cpu_us(index.learn, slots - 1, [_names(rng, 1)]) for _ in range(1000)]
    return {
        "full_held_blocks": float(held),
        "full_learn_new_us_per_block": per_block_us,
        "full_learn_new_us_max": max_us,
        "full_learn_again_us": repeat_us,
        "full_collect_generation_2_us": median(pauses_us),
        "full_forget_slot_us": median(forgets_us),
        "full_forget_slot_us_max": max(forgets_us),
        "full_learn_while_freeing_us": median(leaving_us),
        "full_learn_while_freeing_us_max": max(leaving_us),
    }


if __name__ == "__main__":
    main()
