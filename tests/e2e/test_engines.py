"""Simulated engines behind the default profile and the default Envoy: prefixes stay together, load
spreads, and engines may fail, die and come back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.stack import Stack
from epp.core.headers import DROP_REASON
from tests.e2e.http1 import Answer, post
from tests.e2e.site import metric, until

ENGINES = 3
FLAGS = ("--speed", "50", "--default-output-tokens", "4", "--max-num-batched-tokens", "8192")
RETURN_S_MAX = 20.0


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """No retries: what a client sees is what the pick was worth."""
    place = folder / "engines"
    place.mkdir()
    with Stack(
        engines=[FLAGS] * ENGINES,
        epp_flags=["--drain-timeout=0s", "--v=4"],
        envoy={"retries": 0},
        folder=place,
    ) as running:
        yield running


@pytest.fixture(autouse=True)
async def healthy(stack: Stack) -> AsyncIterator[None]:
    """After each test all engines run and may be picked."""
    yield
    for engine in stack.engines:
        if engine.process is None:
            await asyncio.to_thread(engine.start)
        engine.post("/sim/fault", {})
    for _ in range(2_000):
        await complete(stack, "back to health")
        if all(e["eligible"] and not e["failures_in_a_row"] for e in endpoints(stack)):
            break
    else:
        pytest.fail(f"still ejected: {endpoints(stack)}")


def endpoints(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.epp.state()["endpoints"]
    return found


async def complete(stack: Stack, prompt: str, **fields: Any) -> Answer:
    body = {"model": "sim", "prompt": prompt, "max_tokens": 2, **fields}
    return await post(stack.envoy.port, "/v1/completions", body)


def words(count: int, *, seed: int) -> str:
    random = Random(seed)
    return " ".join(f"{random.getrandbits(32):08x}" for _ in range(count))


def engine_of(answer: Answer) -> str:
    assert answer.status == 200, answer
    return answer.header("x-sim-engine") or ""


async def test_G07_a_shared_prefix_stays_on_one_engine_while_others_spread(stack: Stack) -> None:
    """A long prefix that comes again and again, one request of something else after each."""
    shared, others, cached = Counter[str](), Counter[str](), 0
    prefix = words(1_500, seed=1)
    for n in range(30):
        answer = await complete(stack, f"{prefix} question {n}")
        shared[engine_of(answer)] += 1
        cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        others[engine_of(await complete(stack, words(300, seed=1_000 + n)))] += 1
    assert shared.most_common(1)[0][1] >= 29, shared
    assert cached > 28 * 1_500, "the engine itself found the prefix"
    # Each follows one of the shared prefix, whose engine is the one chosen last.
    assert len(others) >= ENGINES - 1
    assert max(others.values()) <= 20, others
    page = stack.epp.metrics()
    assert metric(page, "epp_picks_total", 'reason="prefix"') >= 29


async def test_J06_a_burst_spreads_before_any_scrape_can_tell(stack: Stack) -> None:
    answers = await asyncio.gather(
        *(complete(stack, words(200, seed=5_000 + n), max_tokens=40) for n in range(60))
    )
    served = Counter(map(engine_of, answers))
    assert len(served) == ENGINES
    # Not even: on a busy machine an engine may really be slower, and be known to be.
    assert min(served.values()) >= 8, served


async def test_K09_an_engine_that_fails_fast_does_not_attract_traffic(stack: Stack) -> None:
    """It answers 500 at once, so its queue is always the shortest."""
    stack.engines[1].post("/sim/fault", {"error_500": True})
    statuses = Counter[int]()
    for n in range(
        0, 120, 6
    ):  # several at once: none of the engines is the one that is best for all
        some = [complete(stack, words(50, seed=9_000 + n + k)) for k in range(6)]
        statuses.update([answer.status for answer in await asyncio.gather(*some)])
    assert set(statuses) == {200, 500}
    assert statuses[500] <= 12, statuses
    state = next(e for e in endpoints(stack) if e["address"] == stack.engines[1].address)
    assert state["failures_in_a_row"] >= 3


async def test_K09_an_engine_killed_amid_traffic_is_left_alone_and_returns(stack: Stack) -> None:
    victim = stack.engines[2]
    statuses, stop = Counter[int](), asyncio.Event()

    async def worker(number: int) -> None:
        n = 0
        while not stop.is_set():
            answer = await complete(stack, words(50, seed=20_000 + 1_000 * number + n))
            statuses[answer.status] += 1
            n += 1

    def served() -> int:
        return int(victim.get("/sim/state")["counters"]["requests"])

    workers = [asyncio.create_task(worker(number)) for number in range(4)]
    try:
        await until(lambda: served() > 5, what="traffic on all engines")
        victim.kill()
        await until(
            lambda: (
                not next(e for e in endpoints(stack) if e["address"] == victim.address)["eligible"]
            ),
            what="its ejection",
        )
        ejected_at = sum(statuses.values())
        bad_then = ejected_at - statuses[200]
        await until(lambda: sum(statuses.values()) > ejected_at + 100, what="traffic elsewhere")
        await asyncio.to_thread(victim.start)
        await until(lambda: served() > 5, what="traffic on the engine again", seconds=RETURN_S_MAX)
    finally:
        stop.set()
        await asyncio.gather(*workers)
    bad = sum(statuses.values()) - statuses[200]
    assert set(statuses) <= {200, 503}
    # Three failures eject it, and four may be under way; one more for each probe later.
    assert bad_then <= 3 + 4
    assert bad <= 3 + 4 + 6, statuses


async def test_K10_all_engines_die_and_come_back(stack: Stack) -> None:
    for engine in stack.engines:
        engine.kill()
    for n in range(10):
        answer = await complete(stack, words(50, seed=30_000 + n))
        assert answer.status == 503, answer
    for engine in stack.engines:
        await asyncio.to_thread(engine.start)
    served, n = set[str](), 0
    deadline_s = time.monotonic() + RETURN_S_MAX
    while len(served) < ENGINES:
        n += 1
        answer = await complete(stack, words(50, seed=40_000 + n))
        if answer.status == 200:
            served.add(engine_of(answer))
        assert time.monotonic() < deadline_s, (served, endpoints(stack))


async def test_F06_engines_whose_metrics_break_are_still_used(stack: Stack) -> None:
    """Their load is unknown then, which is neither idle nor dead."""
    for engine in stack.engines[:2]:
        engine.post("/sim/fault", {"metrics": "html"})
    await until(lambda: sum(e["load"]["stale"] for e in endpoints(stack)) == 2, what="stale loads")
    answers = await asyncio.gather(
        *(complete(stack, words(200, seed=50_000 + n), max_tokens=40) for n in range(60))
    )
    served = Counter(map(engine_of, answers))
    assert len(served) == ENGINES, served
    print(served)
    assert all(e["eligible"] for e in endpoints(stack))


async def test_streamed_answers_pass_whole_and_are_counted(stack: Stack) -> None:
    before = metric(stack.epp.metrics(), "llm_d_epp_request_output_tokens_sum")
    answer = await complete(stack, "count me", stream=True, max_tokens=7,
                            stream_options={"include_usage": True})  # fmt: skip
    events = [line for line in answer.body.split(b"\n\n") if line]
    assert events[-1] == b"data: [DONE]"
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    after = metric(stack.epp.metrics(), "llm_d_epp_request_output_tokens_sum")
    assert after - before == 7


async def test_an_engine_s_own_refusal_is_not_ours(stack: Stack) -> None:
    answer = await post(stack.envoy.port, "/v1/completions", {"model": "no such", "prompt": "x"})
    assert answer.status == 404
    assert answer.header(DROP_REASON) is None
    assert answer.json()["error"]["type"] == "NotFoundError"
