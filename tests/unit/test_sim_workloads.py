"""Generated workloads: what they promise about load, lengths and sharing; and the ceilings."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given, settings, strategies as st

from bench.sim import lengths
from bench.sim.ceiling import ceiling, infinite_ratio, pooled_belady_ratio, pooled_lru_ratio
from bench.sim.lengths import Quantiles, quantiles
from bench.sim.model import SimRequest, Workload
from bench.sim.plan import Names, WorkloadError, WorkloadOptions, arrange, pieces
from bench.sim.workloads import (
    AGENTIC,
    BURST_PREFIX_TOKENS,
    GENERATED,
    HOT_PREFIX_TOKENS,
    WORKLOADS,
    agentic,
    chats,
    hot_prefix,
    no_prefixes,
    siblings,
)

NAMES = sorted(GENERATED)


def common(first: SimRequest, second: SimRequest) -> int:
    """Leading blocks that two requests share."""
    shared = 0
    for one, other in zip(first.blocks, second.blocks, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def by_session(workload: Workload) -> dict[int, list[SimRequest]]:
    sessions: dict[int, list[SimRequest]] = defaultdict(list)
    for request in workload.requests:
        assert request.session is not None
        sessions[request.session].append(request)
    return sessions


@pytest.mark.parametrize("name", NAMES)
def test_the_same_options_give_the_same_workload_and_another_seed_another(name: str) -> None:
    options = WorkloadOptions(seed=3, requests_max=200)
    assert GENERATED[name](options) == GENERATED[name](options)
    assert GENERATED[name](options) != GENERATED[name](WorkloadOptions(seed=4, requests_max=200))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requests_max=st.integers(1, 150),
    speed=st.floats(0.25, 4.0),
    block_tokens=st.sampled_from([16, 64, 512, 1000]),
)
def test_requests_are_in_order_and_within_the_nouns_bounds(
    name: str, seed: int, requests_max: int, speed: float, block_tokens: int
) -> None:
    workload = GENERATED[name](
        WorkloadOptions(
            seed=seed, requests_max=requests_max, speed=speed, block_tokens=block_tokens
        )
    )
    assert workload.block_tokens == block_tokens
    requests = workload.requests
    assert [request.number for request in requests] == list(range(requests_max))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    assert requests[0].arrival_s >= 0
    parents: dict[int, int] = {}
    for request in requests:
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert len(request.blocks) == request.prompt_tokens // block_tokens
        # A name stands for all that is before it: it always follows the same one.
        for before, name_ in zip((-1, *request.blocks), request.blocks, strict=False):
            assert parents.setdefault(name_, before) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_requests_gives_the_beginning_of_the_longer_run(name: str) -> None:
    short = GENERATED[name](WorkloadOptions(requests_max=40)).requests
    long = GENERATED[name](WorkloadOptions(requests_max=120)).requests
    assert long[:40] == short


@pytest.mark.parametrize("name", NAMES)
def test_nothing_arrives_after_the_duration(name: str) -> None:
    workload = GENERATED[name](WorkloadOptions(duration_s=120.0))
    assert 60.0 < workload.requests[-1].arrival_s <= 120.0
    longer = GENERATED[name](WorkloadOptions(duration_s=240.0)).requests
    assert longer[: len(workload.requests)] == workload.requests


@pytest.mark.parametrize("name", ["chats", "hot-prefix", "no-prefixes", "siblings"])
def test_speed_multiplies_the_requests_per_second(name: str) -> None:
    slow, fast = (
        len(GENERATED[name](WorkloadOptions(duration_s=600.0, speed=speed)).requests)
        for speed in (1.0, 2.0)
    )
    assert 1.8 < fast / slow < 2.2


def test_chats_look_like_the_trace_they_are_fitted_to() -> None:
    workload = chats(WorkloadOptions(duration_s=3537.0, seed=2))
    requests = workload.requests
    # Mooncake's conversation trace: 12,031 requests, mean 12,035 and median 6,909 prompt tokens,
    # mean output 343, 1.63 turns, 37.3 % reusable.
    assert 0.9 < len(requests) / 12_031 < 1.1
    assert 0.9 < fmean(r.prompt_tokens for r in requests) / 12_035 < 1.15
    assert 0.85 < median(r.prompt_tokens for r in requests) / 6_909 < 1.15
    assert 0.9 < fmean(r.output_tokens for r in requests) / 343 < 1.1
    assert 1.4 < len(requests) / len(by_session(workload)) < 1.75
    assert 0.33 < infinite_ratio(workload) < 0.46


def test_a_chat_grows_and_keeps_its_beginning() -> None:
    workload = chats(WorkloadOptions(duration_s=1200.0))
    turns = [turns for turns in by_session(workload).values() if len(turns) > 1]
    assert turns
    for before, after in (pair for chat in turns for pair in pairwise(chat)):
        assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert after.arrival_s - before.arrival_s >= 3.0 - 1e-6
        assert common(before, after) == len(before.blocks)


def test_chats_of_one_application_share_its_system_prompt_and_no_more() -> None:
    workload = chats(WorkloadOptions(duration_s=600.0, block_tokens=64))
    firsts = [chat[0] for chat in by_session(workload).values()]
    starts = Counter(request.blocks[0] for request in firsts)
    assert 4 <= len(starts) <= 8
    assert starts.most_common(1)[0][1] > len(firsts) / 5
    ours = [r for r in firsts if r.blocks[0] == starts.most_common(1)[0][0]]
    shared = {common(one, other) for one, other in pairwise(ours)}
    assert len(shared) == 1
    assert 512 // 64 <= shared.pop() <= 3000 // 64


def test_a_chat_workload_does_not_begin_with_first_turns_only() -> None:
    late = chats(WorkloadOptions(duration_s=60.0)).requests
    assert fmean(r.prompt_tokens for r in late) > 8_000
    # 2.1 a second begin, for 900 s before the run.
    numbers = [r.session for r in late if r.session is not None]
    assert min(numbers) < 1_700
    assert max(numbers) > 1_800


def test_siblings_come_in_groups_on_a_prefix_of_their_own() -> None:
    groups = by_session(siblings(WorkloadOptions(duration_s=300.0, block_tokens=16)))
    whole = [groups[number] for number in sorted(groups)[:-20]]
    assert 7.0 < fmean(map(len, whole)) < 9.0
    gaps = [b.arrival_s - a.arrival_s for group in whole for a, b in pairwise(group)]
    assert 0.25 < fmean(gaps) < 0.35
    for group in whole:
        for one, other in pairwise(group):
            shared = 16 * common(one, other)
            assert BURST_PREFIX_TOKENS[0] - 16 <= shared <= BURST_PREFIX_TOKENS[1]
            assert 0 <= one.prompt_tokens - shared <= 516
    owners = Counter(name for group in whole for name in {n for r in group for n in r.blocks})
    assert set(owners.values()) == {1}


def test_half_of_the_requests_have_the_hot_prefix_and_the_others_share_nothing() -> None:
    workload = hot_prefix(WorkloadOptions(duration_s=300.0))
    counts = Counter(name for request in workload.requests for name in request.blocks)
    hot = {name for name, times in counts.items() if times > 1}
    assert len(hot) == HOT_PREFIX_TOKENS // workload.block_tokens
    users = [r for r in workload.requests if hot.intersection(r.blocks)]
    assert all(hot == set(r.blocks[: len(hot)]) for r in users)
    assert 0.45 < len(users) / len(workload.requests) < 0.55


def test_agentic_sessions_grow_and_are_compacted() -> None:
    workload = agentic(WorkloadOptions(duration_s=7200.0))
    assert infinite_ratio(workload) > 0.93
    sessions = by_session(workload)
    pairs = [pair for session in sessions.values() for pair in pairwise(session)]
    grown = [b for a, b in pairs if b.prompt_tokens > a.prompt_tokens]
    compacted = [(a, b) for a, b in pairs if b.prompt_tokens <= a.prompt_tokens]
    assert 0 < len(compacted) < len(grown) / 20
    smallest = int(AGENTIC.system_tokens.at(0)) // 512
    for before, after in compacted:
        assert smallest <= common(before, after) <= 17_000 // 512
    assert max(r.prompt_tokens for r in workload.requests) <= AGENTIC.context_tokens_max
    # Published sessions: growth median 668, outputs median 227, 40 requests.
    assert 500 < median(b.prompt_tokens - a.prompt_tokens for a, b in pairs) < 900
    assert 190 < median(r.output_tokens for r in workload.requests) < 270
    assert 20 < fmean(map(len, sessions.values())) < 90


def test_without_prefixes_nothing_can_be_reused() -> None:
    workload = no_prefixes(WorkloadOptions())
    assert infinite_ratio(workload) == 0.0
    assert any(request.blocks for request in workload.requests)
    assert 1_050 < fmean(r.prompt_tokens for r in workload.requests) < 1_300
    assert 190 < fmean(r.output_tokens for r in workload.requests) < 230


def test_the_table_names_all_workloads_once() -> None:
    assert set(GENERATED) < set(WORKLOADS)
    assert {"conversation", "conversation-raw", "synthetic", "weka", "azure"} < set(WORKLOADS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speed": 0.0}, "speed is 0.0; it must be above 0"),
        ({"speed": float("nan")}, "speed is nan"),
        ({"requests_max": 0}, "requests_max is 0"),
        ({"duration_s": -1.0}, "duration_s is -1.0"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"jitter_s": -0.5}, "jitter_s is -0.5; it must not be negative"),
        ({"gap_s_max": float("inf")}, "gap_s_max is inf"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, float], told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        WorkloadOptions(**options)  # type: ignore[arg-type]


def test_a_workload_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="nothing: no request is left"):
        arrange("nothing", [], WorkloadOptions())


def test_prompts_over_the_limit_are_left_out() -> None:
    workload = chats(WorkloadOptions(requests_max=300, prompt_tokens_max=4_000))
    assert len(workload.requests) == 300
    assert max(r.prompt_tokens for r in workload.requests) <= 4_000


# ---- names and sizes of blocks ----

chains = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=8)


@given(chains)
def test_equal_names_mean_equal_prefixes_and_the_other_way_round(ids: list[list[int]]) -> None:
    names = Names()
    root = names.root("a")
    named = [names.chain(root, each) for each in ids]
    for one, its in zip(ids, named, strict=True):
        for other, others in zip(ids, named, strict=True):
            for length in range(1, min(len(one), len(other)) + 1):
                assert (its[length - 1] == others[length - 1]) == (one[:length] == other[:length])
    elsewhere = names.chain(names.root("b"), ids[0])
    assert not set(elsewhere) & {name for chain in named for name in chain}


def test_blocks_are_made_larger_by_grouping_and_smaller_by_dividing() -> None:
    assert list(pieces([5, 6, 7, 8, 9], unit_tokens=64, block_tokens=128)) == [(5, 6), (7, 8)]
    assert list(pieces([5, 6], unit_tokens=512, block_tokens=256)) == [
        (5, 0),
        (5, 1),
        (6, 0),
        (6, 1),
    ]
    with pytest.raises(WorkloadError, match="take a multiple or a divisor of 64"):
        list(pieces([5], unit_tokens=64, block_tokens=100))


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_quantiles_ascend_and_meet_their_points(one: float, other: float) -> None:
    low, high = sorted((one, other))
    for name, each in vars(lengths).items():
        if isinstance(each, Quantiles):
            assert each.at(low) <= each.at(high) * (1 + 1e-9), name
            for share, value in each.points:
                assert each.at(share) == pytest.approx(value)


def test_draws_have_the_quantiles_they_are_drawn_from() -> None:
    rng = Random(5)
    drawn = sorted(quantiles(1, 2, 3, 10, 50, 60, 70, 80).draw(rng) for _ in range(4000))
    assert drawn[2000] == pytest.approx(10, rel=0.2)
    assert drawn[3600] == pytest.approx(60, rel=0.05)


# ---- ceilings ----


def workload_of(prompts: list[tuple[int, ...]], *, more_tokens: int = 5) -> Workload:
    return Workload(
        name="w",
        block_tokens=10,
        requests=tuple(
            SimRequest(
                number=number,
                arrival_s=float(number),
                prompt_tokens=10 * len(blocks) + more_tokens,
                output_tokens=1,
                blocks=blocks,
            )
            for number, blocks in enumerate(prompts)
        ),
    )


def test_an_unbounded_cache_finds_every_block_seen_before() -> None:
    workload = workload_of([(1, 2), (1, 2, 3), (1, 4)])
    assert infinite_ratio(workload) == (20 + 10) / (25 + 35 + 25)


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    workload = workload_of([(1, 2), (1, 2)], more_tokens=0)
    assert infinite_ratio(workload) == 10 / 40


def test_a_small_pool_forgets_what_was_used_longest_ago() -> None:
    workload = workload_of([(1,), (2,), (3,), (1,), (3,)])
    assert pooled_lru_ratio(workload, 20) == 10 / 75  # only the last 3 is still there
    assert pooled_belady_ratio(workload, 20) == 20 / 75
    assert ceiling(workload, 20).lru_ratio == 10 / 75
    assert ceiling(workload, 20).infinite_ratio == 20 / 75


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    assert pooled_lru_ratio(workload_of([(1, 2, 3), (1, 2, 3)]), 20) == 20 / 70


prompts = st.lists(
    st.lists(st.integers(0, 1), max_size=4).map(
        lambda path: tuple(
            2 ** (n + 1) + sum(b << i for i, b in enumerate(path[: n + 1]))
            for n in range(len(path))
        )
    ),
    min_size=1,
    max_size=30,
)


@given(prompts, st.integers(0, 12))
def test_no_pool_finds_more_than_an_unbounded_cache(
    blocks: list[tuple[int, ...]], capacity: int
) -> None:
    workload = workload_of(blocks)
    bound = infinite_ratio(workload)
    smaller = pooled_lru_ratio(workload, 10 * capacity)
    assert smaller <= pooled_lru_ratio(workload, 10 * (capacity + 1)) <= bound
    assert smaller <= pooled_belady_ratio(workload, 10 * capacity) <= bound
    assert pooled_lru_ratio(workload, 10_000) == bound
    assert pooled_belady_ratio(workload, 10_000) == bound
