"""The simulated engine's scheduler, cache, cost and tokens; no loop, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from bench.engine.cost import CostModel
from bench.engine.kvcache import KvCache
from bench.engine.scheduler import (
    Engine,
    EngineLimits,
    EngineRequest,
    LiveRequest,
    QueueFullError,
    RequestTooLongError,
    StepResult,
)
from bench.engine.stats import Stats
from bench.engine.tokens import (
    Filler,
    count_tokens,
    ids_of_prompt,
    name_blocks,
    name_root,
    pad,
    prompt_of_ids,
    text_of_ids,
)

COST = CostModel()


def make_engine(**limits: object) -> Engine:
    return Engine(EngineLimits(**{"block_tokens": 32, "kv_blocks": 1000, **limits}), COST)


def request(
    name: str, prompt_tokens: int, output_tokens: int = 1, *, text: str = "", lora: str = ""
) -> EngineRequest:
    """A request whose prompt and output are named after `text`: same text, same tokens."""
    blocks = [hash((text or name, lora, index)) for index in range(prompt_tokens + output_tokens)]
    return EngineRequest(
        id=name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        lora=lora,
    )


def steps_until_idle(engine: Engine, now_s: float = 0.0) -> Iterator[StepResult]:
    for _ in range(100_000):
        step = engine.step(now_s)
        if step is None:
            return
        now_s = step.end_s
        yield step
    raise AssertionError("the engine never became idle")


def run(engine: Engine, asked: EngineRequest, now_s: float = 0.0) -> LiveRequest:
    live = engine.submit(asked, now_s)
    for _ in steps_until_idle(engine, now_s):
        pass
    return live


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (96, 64)]
)
def test_a_match_never_covers_the_last_token(prompt_tokens, cached_tokens) -> None:
    engine = make_engine()
    assert run(engine, request("a", prompt_tokens, text="x")).cached_tokens == 0
    assert run(engine, request("b", prompt_tokens, text="x")).cached_tokens == cached_tokens


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = make_engine()
    run(engine, request("a", 40, 60, text="x"))
    assert run(engine, request("b", 100, text="x")).cached_tokens == 96


def test_another_text_finds_nothing_and_caching_can_be_off() -> None:
    engine = make_engine()
    run(engine, request("a", 100, text="x"))
    assert run(engine, request("b", 100, text="y")).cached_tokens == 0
    engine = make_engine(prefix_caching=False)
    run(engine, request("a", 100, text="x"))
    assert run(engine, request("b", 100, text="x")).cached_tokens == 0


def test_a_full_cache_that_nobody_holds_counts_as_free() -> None:
    engine = make_engine(kv_blocks=10)
    run(engine, request("a", 300, text="x"))
    assert engine.load().kv_usage_ratio == 0.0
    assert engine.kv.cached_blocks == 9


def test_eviction_takes_what_was_released_longest_ago_and_a_prefix_from_its_end() -> None:
    kv = KvCache(blocks=4)
    assert kv.take(2)
    assert [kv.name(1), kv.name(2)] == [(True, True), (True, True)]
    kv.release([1, 2], 0)
    assert kv.take(2)
    assert [kv.name(3), kv.name(4)] == [(True, True), (True, True)]
    kv.release([3, 4], 0)
    assert kv.take(3)
    assert kv.removed == [2, 1, 4]
    assert kv.match([3, 4], 2) == 1


def test_a_held_block_is_not_evicted_and_shared_blocks_count_once() -> None:
    kv = KvCache(blocks=3)
    assert kv.take(2)
    kv.name(1)
    kv.name(2)
    kv.hold([1])
    kv.release([1, 2], 0)
    assert kv.free_blocks == 2
    assert not kv.take(3)
    assert kv.take(2)
    assert kv.removed == [2]
    assert kv.match([1, 2], 2) == 1


def test_a_block_computed_by_two_requests_at_once_is_named_once() -> None:
    kv = KvCache(blocks=4)
    kv.take(2)
    assert kv.name(7) == (True, True)
    assert kv.name(7) == (False, False)
    kv.release([7], 1)
    assert kv.free_blocks == 4


def test_the_cache_is_not_cleared_while_blocks_are_held() -> None:
    engine = make_engine()
    engine.submit(request("a", 100, 3), 0.0)
    engine.step(0.0)
    assert not engine.clear_cache()
    list(steps_until_idle(engine))
    assert engine.clear_cache()
    engine.submit(request("b", 100, text="a"), 9.0)
    step = engine.step(9.0)
    assert step is not None
    assert step.cleared
    assert step.admitted[0].cached_tokens == 0


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    engine = make_engine(max_num_batched_tokens=1000)
    engine.submit(request("a", 2500), 0.0)
    steps = list(steps_until_idle(engine))
    assert [step.prefill_tokens for step in steps] == [1000, 1000, 500]
    assert [bool(step.first) for step in steps] == [False, False, True]


def test_decoding_requests_come_first_in_the_token_budget() -> None:
    engine = make_engine(max_num_batched_tokens=100)
    for name in "abc":
        engine.submit(request(name, 10, 50), 0.0)
    engine.step(0.0)
    engine.submit(request("long", 500), 0.0)
    step = engine.step(0.1)
    assert step is not None
    assert step.prefill_tokens == 97
    assert len(step.tokens) == 3


def test_requests_start_in_order_and_a_large_one_is_not_overtaken() -> None:
    engine = make_engine(kv_blocks=10)
    engine.submit(request("a", 200, 5), 0.0)
    large = engine.submit(request("large", 300, 5), 0.0)
    small = engine.submit(request("small", 10, 5), 0.0)
    started = [live.request.id for step in steps_until_idle(engine) for live in step.admitted]
    assert started == ["a", "large", "small"]
    assert large.admitted_s is not None
    assert small.admitted_s is not None
    assert large.admitted_s > 0.0


def test_no_more_than_max_num_seqs_run() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abcde":
        engine.submit(request(name, 10, 3), 0.0)
    engine.step(0.0)
    assert (engine.load().running, engine.load().waiting) == (2, 3)
    assert (
        len({live.request.id for step in steps_until_idle(engine) for live in step.finished}) == 5
    )


def test_the_last_admitted_is_preempted_when_blocks_run_out_and_loses_no_token() -> None:
    engine = make_engine(kv_blocks=8)
    first = engine.submit(request("first", 96, 100), 0.0)
    last = engine.submit(request("last", 96, 100), 0.0)
    steps = list(steps_until_idle(engine))
    assert [live.request.id for step in steps for live in step.preempted] == ["last"]
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert (first.generated, last.generated) == (100, 100)
    tokens = [live.request.id for step in steps for live in step.tokens]
    assert tokens.count("first") == tokens.count("last") == 100
    assert sum(len(step.first) for step in steps) == 2
    assert (last.admitted_s, last.cached_tokens) == (0.0, 0)
    assert engine.load().kv_usage_ratio == 0.0


def test_a_preempted_request_waits_before_all_others() -> None:
    engine = make_engine(kv_blocks=8, max_num_seqs=2)
    for name in ("first", "last", "next"):
        engine.submit(request(name, 96, 100), 0.0)
    steps = list(steps_until_idle(engine))
    started = [live.request.id for step in steps for live in step.admitted]
    assert started[:4] == ["first", "last", "last", "next"]


@pytest.mark.parametrize("when", ["waiting", "running", "in a step", "in a later step"])
def test_an_abort_frees_what_the_request_held(when) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(request("a", 100, 50), 0.0)
    if when == "waiting":
        assert engine.abort("a")
        assert engine.step(0.0) is None
    elif when == "running":
        engine.step(0.0)
        assert engine.load().kv_usage_ratio > 0
        assert engine.abort("a")
    else:
        if when == "in a later step":
            engine.step(0.0)
        engine.begin(1.0)
        assert engine.abort("a")
        step = engine.complete()
        assert step.tokens == step.finished == []
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    assert engine.load().kv_usage_ratio == 0.0
    assert not engine.abort("a")
    assert run(engine, request("b", 10)).generated == 1


def test_a_full_queue_refuses_and_an_impossible_request_too() -> None:
    engine = make_engine(max_num_queued_reqs=2)
    engine.submit(request("a", 10), 0.0)
    engine.submit(request("b", 10), 0.0)
    with pytest.raises(QueueFullError):
        engine.submit(request("c", 10), 0.0)
    with pytest.raises(RequestTooLongError):
        make_engine().submit(request("d", 32_000, 1), 0.0)


def test_a_request_without_a_lora_slot_is_deferred_and_others_pass_it() -> None:
    engine = make_engine(max_loras=1)
    for name, lora in (("a", "one"), ("b", "two"), ("c", ""), ("d", "one")):
        engine.submit(request(name, 10, 5, lora=lora), 0.0)
    step = engine.step(0.0)
    assert step is not None
    assert [live.request.id for live in step.admitted] == ["a", "c", "d"]
    assert (engine.load().waiting, engine.load().deferred) == (1, 1)
    done = [live.request.id for step in steps_until_idle(engine) for live in step.finished]
    assert done == ["a", "c", "d", "b"]
    assert engine.load().deferred == 0


def test_deferred_requests_keep_their_order() -> None:
    engine = make_engine(max_loras=1, max_num_seqs=2)
    for name, lora in (("a", "one"), ("b", "two"), ("c", "two"), ("d", ""), ("e", "")):
        engine.submit(request(name, 10, 5, lora=lora), 0.0)
    started = [live.request.id for step in steps_until_idle(engine) for live in step.admitted]
    assert started == ["a", "d", "b", "c", "e"]


def test_an_adapter_is_shown_from_its_first_output_on() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    stats = Stats(max_model_len=4096)
    engine.submit(request("a", 100, 5, lora="one"), 0.0)
    seen = []
    for now_s in (1.0, 2.0):
        engine.step(now_s)
        stats.see_loras(engine.running, now_s)
        seen.append(max(stats.lora_seen, key=stats.lora_seen.__getitem__))
    assert seen == ["", "one"]


def test_a_request_without_output_ends_with_its_prefill() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    live = run(engine, request("a", 100, 0))
    assert live.first_token_s is None
    assert live.last_token_s is not None
    assert engine.load().running == 0


def test_step_times_are_those_of_the_cost_model() -> None:
    engine = make_engine()
    live = engine.submit(request("a", 8000, 2), 0.0)
    steps = list(steps_until_idle(engine))
    prefill_s = 0.012 + 8000 / 15928 + 2.2e-10 * 8000 * 4000
    decode_s = 0.012 + 6e-5 + 5.6e-8 * 8001
    assert [step.duration_s for step in steps] == pytest.approx([prefill_s, decode_s])
    assert live.first_token_s == pytest.approx(prefill_s)
    assert CostModel(speed=10.0).step_s() == pytest.approx(COST.step_s() / 10)


def test_a_cached_prompt_of_8k_tokens_is_as_much_faster_as_the_cost_model_says() -> None:
    engine = make_engine(block_tokens=16, kv_blocks=1000)
    cold = run(engine, request("a", 8192, text="x"))
    warm = run(engine, request("b", 8192, text="x"), now_s=100.0)
    assert cold.first_token_s is not None
    assert warm.first_token_s is not None
    assert warm.cached_tokens == 8176
    cold_s = COST.step_s(prefill_tokens=8192, attention_pairs=8192 * 4096)
    warm_s = COST.step_s(prefill_tokens=16, attention_pairs=16 * 8184)
    ratio = cold.first_token_s / (warm.first_token_s - 100.0)
    assert ratio == pytest.approx(cold_s / warm_s)
    assert 35 < ratio < 45


def test_merged_decode_steps_give_the_same_tokens_at_nearly_the_same_time() -> None:
    ends = []
    for until_s in (None, 1e9):
        engine = make_engine()
        lives = [engine.submit(request(name, 100, 40 + ord(name)), 0.0) for name in "abc"]
        now_s, steps = 0.0, 0
        while (step := engine.step(now_s, until_s=until_s)) is not None:
            now_s, steps = step.end_s, steps + 1
        assert [live.generated for live in lives] == [137, 138, 139]
        assert engine.load().kv_usage_ratio == 0.0
        ends.append((now_s, steps))
    (single_s, singles), (merged_s, merged) = ends
    assert merged < 8 < singles
    assert merged_s == pytest.approx(single_s, rel=0.01)


def test_merged_decode_steps_end_before_the_given_time() -> None:
    engine = make_engine()
    engine.submit(request("a", 100, 1000), 0.0)
    first = engine.step(0.0, until_s=0.5)
    assert first is not None
    step = engine.step(first.end_s, until_s=0.5)
    assert step is not None
    assert 1 < step.steps < 64
    assert step.end_s <= 0.5


class SlowCache:
    """One request at a time, a list and a lot of patience: what the cache should hold."""

    def __init__(self, blocks: int, block_tokens: int, budget: int) -> None:
        self.blocks, self.size, self.budget = blocks, block_tokens, budget
        self.order: list[int] = []

    def run(self, names: Sequence[int], prompt_tokens: int, output_tokens: int) -> int:
        matched = 0
        while (matched + 1) * self.size < prompt_tokens and names[matched] in self.order:
            matched += 1
        held = list(names[:matched])
        self.order = [name for name in self.order if name not in held]
        computed, mine = matched * self.size, matched
        chunks = [self.budget] * ((prompt_tokens - computed) // self.budget)
        chunks.append((prompt_tokens - computed) % self.budget)
        for chunk in [*filter(None, chunks), *[1] * (output_tokens - 1)]:
            mine = max(mine, -(-(computed + chunk) // self.size))
            while mine + len(self.order) > self.blocks:
                self.order.pop(0)
            full = computed // self.size, (computed + chunk) // self.size
            computed += chunk
            for name in names[full[0] : full[1]]:
                held.append(name)
                if name in self.order:
                    self.order.remove(name)
        self.order += reversed(held)
        return matched * self.size


@settings(max_examples=100, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 12)), max_size=25
    ),
    blocks=st.integers(13, 40),
)
def test_the_cache_agrees_with_a_slow_one(asked, blocks) -> None:
    engine = make_engine(block_tokens=4, kv_blocks=blocks, max_num_batched_tokens=16)
    slow = SlowCache(blocks, 4, 16)
    known: set[int] = set()
    for number, (text, prompt_tokens, output_tokens) in enumerate(asked):
        # Texts share their first three blocks and differ after them.
        names = [index if index < 3 else 1000 * text + index for index in range(60)]
        live = engine.submit(
            EngineRequest(
                id=str(number),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                blocks=names,
            ),
            0.0,
        )
        for step in steps_until_idle(engine):
            known -= set(step.removed)
            for stored in step.stored:
                new = set(stored.request.blocks[stored.start : stored.stop])
                assert not known & new
                known |= new
        assert live.cached_tokens == slow.run(names, prompt_tokens, output_tokens)
        held = {name for name in range(4000) if engine.kv.match([name], 1)}
        assert held == set(slow.order) == known


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 60), st.integers(0, 20)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0)),
    st.tuples(st.just("begin"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("complete"), st.just(0), st.just(0), st.just(0)),
)


class Watched:
    """An engine driven by a script, with what came out of it."""

    def __init__(self, blocks: int) -> None:
        self.engine = make_engine(
            block_tokens=4, kv_blocks=blocks, max_num_seqs=5, max_num_batched_tokens=24
        )
        self.lives: list[LiveRequest] = []
        self.aborted: set[str] = set()
        self.got: dict[str, int] = {}
        self.ended: list[str] = []
        self.now_s = 0.0
        self.in_step = False

    def act(self, verb: str, which: int, prompt_tokens: int, output_tokens: int) -> None:
        if verb == "submit":
            name = f"r{len(self.lives)}"
            asked = request(name, prompt_tokens, output_tokens, text=f"t{which}")
            self.lives.append(self.engine.submit(asked, self.now_s))
        elif verb == "abort" and self.engine.abort(f"r{which}"):
            self.aborted.add(f"r{which}")
        elif verb == "begin" and not self.in_step:
            self.in_step = self.engine.begin(self.now_s) is not None
        elif verb == "complete" and self.in_step:
            self.in_step = False
            self.see(self.engine.complete())
        self.check_blocks()

    def see(self, step: StepResult) -> None:
        assert step.duration_s > 0
        assert step.prefill_tokens + step.decoding <= 24
        assert len(self.engine.running) <= 5
        self.now_s = step.end_s
        for live in step.tokens:
            self.got[live.request.id] = self.got.get(live.request.id, 0) + 1
        self.ended += (live.request.id for live in step.finished)

    def check_blocks(self) -> None:
        engine = self.engine
        shared = {name for live in engine.running for name in live.held}
        private = sum(live.private_blocks for live in engine.running)
        assert engine.kv.blocks - engine.kv.free_blocks == len(shared) + private
        assert all(not live.held and not live.private_blocks for live in engine.waiting)


@settings(max_examples=150, deadline=None)
@given(script=st.lists(actions, max_size=60), blocks=st.integers(21, 40))
def test_whatever_happens_blocks_add_up_and_each_request_gets_its_tokens(script, blocks) -> None:
    watched = Watched(blocks)
    for action in script:
        watched.act(*action)
    for _ in range(5000):
        watched.act("complete", 0, 0, 0)
        watched.act("begin", 0, 0, 0)
        if not watched.in_step:
            break
    kept = [live for live in watched.lives if live.request.id not in watched.aborted]
    assert sorted(watched.ended) == sorted(live.request.id for live in kept)
    for live in kept:
        assert watched.got.get(live.request.id, 0) == live.request.output_tokens
    assert watched.engine.load() == make_engine().load()


@given(st.binary(max_size=300), st.binary(max_size=50), st.sampled_from([4, 16, 32]))
def test_block_names_follow_the_prefix(prefix, tail, block_tokens) -> None:
    root = name_root("", "")
    short, long = pad(prefix), pad(prefix) + pad(tail)
    names = name_blocks(short, block_tokens=block_tokens, root=root)
    assert len(names) == count_tokens(short) // block_tokens
    assert name_blocks(long, block_tokens=block_tokens, root=root)[: len(names)] == names
    other = name_blocks(b"abcd" + short[4:], block_tokens=block_tokens, root=root)
    if short[:4] not in (b"abcd", b""):
        assert not set(names) & set(other)


def test_adapters_and_salts_do_not_share_blocks() -> None:
    roots = [name_root("", ""), name_root("a", ""), name_root("", "a"), name_root("a", "b")]
    names = [name_blocks(b"x" * 64, block_tokens=4, root=root) for root in roots]
    assert all(not set(one) & set(two) for one, two in pairwise(sorted(names)))


@given(st.text(max_size=100))
def test_token_ids_stand_for_the_same_prompt_as_the_text(text) -> None:
    prompt = pad(text.encode())
    assert prompt_of_ids(ids_of_prompt(prompt)) == prompt
    assert text_of_ids(ids_of_prompt(prompt)) == text.rstrip("\0")


def test_generated_text_depends_on_seed_and_prompt_and_grows_at_its_end() -> None:
    text = Filler(1).text(b"some prompt.", 700)
    assert len(text) == 2800
    assert text.isascii()
    assert not set(text) & set(b'"\\\n\0')
    assert Filler(1).text(b"some prompt.", 20) == text[:80]
    assert Filler(2).text(b"some prompt.", 700) != text
    assert Filler(1).text(b"another one.", 700) != text


def test_statistics_count_a_preempted_prompt_once() -> None:
    engine = make_engine(kv_blocks=8)
    stats = Stats(max_model_len=4096)
    lives = [engine.submit(request(name, 96, 100), 0.0) for name in "ab"]
    for step in steps_until_idle(engine):
        stats.on_step(step)
        for live in step.finished:
            stats.on_end(live, "length", step.end_s)
    counters = stats.counters
    assert counters.preemptions == 1
    assert counters.prompt_tokens == counters.prefilled_tokens == 192
    assert counters.generated_tokens == 200 == stats.request_generation_tokens.sum
    assert counters.finished == 2
    assert stats.time_to_first_token_s.count == 2
    assert stats.inter_token_latency_s.count == 198
    assert stats.iteration_tokens.sum >= 192 + 198
    assert [line.generated_tokens for line in stats.log] == [live.generated for live in lives]
