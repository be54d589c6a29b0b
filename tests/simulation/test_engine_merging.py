"""Decode steps taken as one, and cut: the same tokens at the same times as step by step."""

from __future__ import annotations

import math
from random import Random

import pytest

from bench.engine.cost import CostModel
from bench.engine.scheduler import Engine, EngineLimits, EngineRequest, LiveRequest

SIZE = 4


def planned(
    rng: Random, requests: int, *, outputs: bool = True
) -> list[tuple[float, EngineRequest]]:
    """Requests and their times. `outputs`: these have names too, and some are prompts of others."""
    at_s, given = 0.0, []
    for number in range(requests):
        at_s += rng.expovariate(2.0)
        text, prompt_tokens, output_tokens = (
            rng.randrange(4),
            rng.randint(1, 60),
            rng.randint(1, 70),
        )
        blocks = [
            1000 * text + index
            for index in range((prompt_tokens + outputs * output_tokens) // SIZE)
        ]
        request = EngineRequest(
            id=str(number),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
        )
        given.append((at_s, request))
    return given


def drive(given, kv_blocks: int, *, merge: bool) -> tuple[list[LiveRequest], set[int], int]:
    """All of it: the requests, what the cache holds by its events, and the steps taken."""
    limits = EngineLimits(
        block_tokens=SIZE, kv_blocks=kv_blocks, max_num_seqs=5, max_num_batched_tokens=32
    )
    engine = Engine(limits, CostModel())
    to_come, lives, known = list(reversed(given)), [], set()
    now_s, steps = 0.0, 0
    for _ in range(100_000):
        while to_come and to_come[-1][0] <= now_s:
            at_s, request = to_come.pop()
            lives.append(engine.submit(request, at_s))
        if engine.begin(now_s, until_s=math.inf if merge else None) is None:
            if not to_come:
                return lives, known, steps
            now_s = to_come[-1][0]
            continue
        end_s = engine.cut(now_s + 1e9)
        while to_come and to_come[-1][0] <= end_s:
            at_s, request = to_come.pop()
            lives.append(engine.submit(request, at_s))
            end_s = engine.cut(at_s)
            assert end_s >= at_s
            assert engine.progress(at_s)[1] == end_s
        step = engine.complete()
        assert step.end_s == end_s
        known -= set(step.removed)
        for stored in step.stored:
            known.update(stored.request.blocks[stored.start : stored.stop])
        assert all(name in engine.kv for name in known)
        now_s, steps = end_s, steps + 1
    raise AssertionError("the engine never became idle")


@pytest.mark.parametrize("kv_blocks", [40, 60, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_merged_and_cut_steps_change_nothing(seed, kv_blocks) -> None:
    given = planned(Random(seed), 60, outputs=kv_blocks == 1000)
    single, single_known, single_steps = drive(given, kv_blocks, merge=False)
    merged, merged_known, merged_steps = drive(given, kv_blocks, merge=True)
    assert merged_steps < single_steps
    assert merged_known == single_known
    for one, other in zip(merged, single, strict=True):
        assert one.request is other.request
        assert one.first_token_s == pytest.approx(other.first_token_s, rel=1e-9)
        assert one.last_token_s == pytest.approx(other.last_token_s, rel=1e-9)
        assert one.admitted_s == pytest.approx(other.admitted_s, rel=1e-9)
        assert (one.cached_tokens, one.preemptions) == (other.cached_tokens, other.preemptions)
    assert kv_blocks != 40 or any(live.preemptions for live in single)


def test_a_cut_ends_the_step_that_is_being_taken() -> None:
    engine = Engine(EngineLimits(), CostModel(step_base_s=1.0, decode_kv_token_s=0.0))
    assert engine.cut(5.0) is None
    engine.submit(EngineRequest(id="a", prompt_tokens=10, output_tokens=50), 0.0)
    first = engine.step(0.0)
    assert first is not None
    step_s = 1.0 + engine.cost.decode_sequence_s
    assert engine.begin(100.0, until_s=math.inf) == pytest.approx(49 * step_s)
    assert engine.progress(107.5)[0] == 8
    assert engine.cut(107.5) == pytest.approx(100.0 + 8 * step_s)
    assert engine.cut(100.0) == pytest.approx(100.0 + step_s)
    step = engine.complete()
    assert (step.steps, step.tokens[0].generated) == (1, 2)
