"""The peers' formulas against values worked out by hand, and the hold in front of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bench.engine.cost import CostModel
from bench.sim.conditions import HoldingPolicy, PolicyContext
from bench.sim.model import Policy, Scrape, SimRequest
from bench.sim.policies import POLICIES, Held, Peer, held
from bench.sim.policies.account import Account
from bench.sim.policies.affinity import LlmdAffinity
from bench.sim.policies.dynamo import DynamoLinear
from bench.sim.policies.hashing import BoundedHashing
from bench.sim.policies.lmetric import LMetric
from bench.sim.policies.peer import Rule, least, uncached_tokens
from bench.sim.policies.sglang import SglangCacheAware
from bench.sim.policies.simple import (
    Chance,
    LeastRequests,
    LeastTokens,
    Oracle,
    RoundRobin,
    TwoChoices,
)

BLOCK_TOKENS = 100
PLAIN_COST = CostModel(prefill_token_s=0.001, attention_pair_s=0.0)
"""A millisecond a token, so that an engine chunk of 500 tokens takes 0.5 s."""


class FakeView:
    """What a test says, and nothing else; also a `TrueView`."""

    def __init__(
        self,
        endpoints: Sequence[int] = (0, 1, 2),
        *,
        matched: Mapping[int, int] | None = None,
        ttft_s: Mapping[int, float] | None = None,
        kv_tokens: int = 100_000,
    ) -> None:
        self.endpoints = endpoints
        self.matched = dict(matched or {})
        self.ttft_s = dict(ttft_s or {})
        self.capacity_tokens = kv_tokens

    def matched_tokens(self, request: SimRequest, endpoint: int) -> int:
        return min(self.matched.get(endpoint, 0), request.prompt_tokens)

    def scrape(self, endpoint: int) -> Scrape | None:
        return None

    def kv_tokens(self, endpoint: int) -> int:
        return self.capacity_tokens

    def expected_ttft_s(self, request: SimRequest, endpoint: int, now_s: float) -> float:
        return self.ttft_s[endpoint]


def request(
    number: int = 0, tokens: int = 1000, *, blocks: Sequence[int] | None = None, at_s: float = 0.0
) -> SimRequest:
    """All its full blocks named, unlike those of any other number, unless told."""
    names = [number * 1000 + place for place in range(tokens // BLOCK_TOKENS)]
    return SimRequest(
        number=number,
        arrival_s=at_s,
        prompt_tokens=tokens,
        output_tokens=10,
        blocks=tuple(names if blocks is None else blocks),
    )


def context(**differing: Any) -> PolicyContext:
    values: dict[str, Any] = {
        "endpoints": 4,
        "block_tokens": BLOCK_TOKENS,
        "kv_tokens": (100_000,) * 4,
        "max_num_batched_tokens": 500,
        "max_num_seqs": 256,
        "costs": (PLAIN_COST,) * 4,
        "rng": Random(1),
        "scrape_s": 0.05,
        "first_byte_seen": True,
    }
    return PolicyContext(**{**values, **differing})


def loaded(*loads: tuple[int, int], pins: bool = False) -> Account:
    """An account with (requests, uncached tokens) in flight on endpoints 0, 1, ..."""
    account = Account(pins=pins)
    number = 10_000
    for endpoint, (requests, tokens) in enumerate(loads):
        for place in range(requests):
            charged = tokens if place == 0 else 0
            account.charge(request(number, blocks=()), endpoint, prefill_tokens=charged)
            number += 1
    return account


def wishes(rule: Rule, asked: SimRequest, view: FakeView, account: Account, times: int = 64) -> set:
    """Every endpoint it wants in so many askings."""
    return {rule.wish(asked, view, account, 0.0) for _ in range(times)}


# -- the account ---------------------------------------------------------------------------


def test_a_request_counts_its_uncached_tokens_until_its_first_byte_and_itself_until_its_end() -> (
    None
):
    peer, view = Peer(RoundRobin()), FakeView(matched={0: 300})
    asked = request(7, 1000)
    assert peer.choose(asked, view, 0.0) == 0
    load = peer.account.load(0)
    assert (load.requests, load.prefill_tokens) == (1, 700)
    peer.first_byte(asked, 1.0)
    assert (load.requests, load.prefill_tokens) == (1, 0)
    peer.ended(asked, 2.0, ok=True)
    assert (load.requests, load.prefill_tokens) == (0, 0)


def test_without_a_first_byte_the_end_releases_the_prefill_too() -> None:
    peer, asked = Peer(RoundRobin()), request(7, 1000)
    peer.choose(asked, FakeView(), 0.0)
    assert peer.account.load(0).prefill_tokens == 1000
    peer.ended(asked, 2.0, ok=False)
    assert peer.account.load(0).prefill_tokens == 0


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    assert uncached_tokens(request(tokens=1000), FakeView(matched={0: 1000}), 0) == 1


def test_an_endpoint_that_left_takes_its_charges_with_it_and_comes_back_empty() -> None:
    peer, view, asked = Peer(LeastRequests(Random(1)), pins=True), FakeView((0,)), request(1)
    peer.choose(asked, view, 0.0)
    peer.left(0)
    peer.ended(asked, 1.0, ok=False)
    load = peer.account.load(0)
    assert (load.requests, load.prefill_tokens, load.pins) == (0, 0, {})


def test_a_request_sent_again_is_charged_once() -> None:
    peer, asked = Peer(RoundRobin()), request(1)
    assert peer.choose(asked, FakeView(), 0.0) == 0
    assert peer.choose(asked, FakeView(), 1.0) == 1
    assert [peer.account.load(each).requests for each in (0, 1)] == [0, 1]


def test_a_peer_without_endpoints_keeps_the_request() -> None:
    assert Peer(RoundRobin()).choose(request(), FakeView(()), 0.0) is None


def test_ties_are_broken_by_chance_and_a_lower_cost_is_not() -> None:
    costs = {0: 2.0, 1: 1.0, 2: 1.0}
    rng = Random(1)
    drawn = Counter(least(costs, costs.__getitem__, rng) for _ in range(400))
    assert drawn[0] == 0
    assert 140 < drawn[1] < 260


# -- rules that do not look at prefixes ----------------------------------------------------


def test_round_robin_goes_on_after_the_last_one_and_skips_those_that_left() -> None:
    peer, view = Peer(RoundRobin()), FakeView((0, 1, 3))
    assert [peer.choose(request(n), view, 0.0) for n in range(4)] == [0, 1, 3, 0]
    view.endpoints = (0, 2, 3)
    assert [peer.choose(request(n), view, 0.0) for n in range(4, 7)] == [2, 3, 0]


def test_random_uses_every_endpoint() -> None:
    assert wishes(Chance(Random(1)), request(), FakeView((0, 2, 5)), Account()) == {0, 2, 5}


def test_least_requests_counts_requests_and_not_tokens() -> None:
    rule, account = LeastRequests(Random(1)), loaded((2, 10), (1, 9000), (3, 0))
    assert wishes(rule, request(), FakeView(), account) == {1}


def test_least_tokens_counts_tokens_and_not_requests() -> None:
    rule, account = LeastTokens(Random(1)), loaded((2, 10), (1, 9000), (3, 11))
    assert wishes(rule, request(), FakeView(), account) == {0}


def test_of_two_choices_the_most_loaded_of_all_is_never_taken() -> None:
    rule, account = TwoChoices(Random(1)), loaded((3, 0), (1, 0), (2, 0))
    assert wishes(rule, request(), FakeView(), account) == {1, 2}
    assert wishes(rule, request(), FakeView((0,)), account) == {0}


def test_the_oracle_takes_the_lowest_true_time_to_first_token() -> None:
    view = FakeView(ttft_s={0: 0.3, 1: 0.2, 2: 0.4})
    assert wishes(Oracle(Random(1)), request(), view, Account()) == {1}


# -- llm-d ---------------------------------------------------------------------------------


def llmd() -> LlmdAffinity:
    return LlmdAffinity(Random(1), block_tokens=BLOCK_TOKENS)


def test_llmd_sticks_to_four_fifths_of_the_blocks_and_not_to_less() -> None:
    account = loaded((1, 5000), (1, 1), (1, 2))
    assert wishes(llmd(), request(tokens=1050), FakeView(matched={0: 800}), account) == {0}
    assert wishes(llmd(), request(tokens=1050), FakeView(matched={0: 700}), account) == {1}


def test_llmd_takes_the_share_of_full_blocks_not_of_tokens() -> None:
    account = loaded((1, 5000), (1, 1), (1, 2))
    assert wishes(llmd(), request(tokens=199), FakeView(matched={0: 100}), account) == {0}


def test_llmd_does_not_miss_the_last_block_of_a_prompt_that_no_engine_matches() -> None:
    account = loaded((1, 5000), (1, 1), (1, 2))
    assert wishes(llmd(), request(tokens=400), FakeView(matched={0: 300}), account) == {0}


def test_llmd_gives_up_affinity_when_it_costs_more_than_18_s() -> None:
    """18 s are 286 704 tokens at 15 928 tokens/s."""
    view = FakeView(matched={0: 1000})
    assert wishes(llmd(), request(), view, loaded((1, 286_704), (0, 0), (0, 0))) == {0}
    assert wishes(llmd(), request(), view, loaded((1, 286_705), (0, 0), (0, 0))) == {1, 2}


def test_llmd_takes_the_least_loaded_of_several_sticky_endpoints() -> None:
    view = FakeView(matched={0: 1000, 1: 900})
    assert wishes(llmd(), request(), view, loaded((1, 500), (1, 400), (0, 0))) == {1}


def test_llmd_tells_no_difference_above_the_full_score() -> None:
    account = loaded((1, 4_194_304), (1, 9_000_000), (1, 4_194_305))
    assert wishes(llmd(), request(), FakeView(), account) == {0, 1, 2}
    assert wishes(llmd(), request(), FakeView(), loaded((1, 4_194_303), (1, 4_194_304))) == {2}


def test_llmd_spreads_a_prompt_without_full_blocks_by_load() -> None:
    view = FakeView(matched={0: 50})
    assert wishes(llmd(), request(tokens=50), view, loaded((1, 9), (1, 8), (1, 7))) == {2}


# -- LMetric -------------------------------------------------------------------------------


def test_lmetric_multiplies_new_tokens_by_batch_size() -> None:
    """(600 + 200) * 3 = 2400 against (0 + 1000) * 2 = 2000 and (0 + 801) * 3 = 2403."""
    rule, account = LMetric(Random(1)), loaded((2, 600), (1, 0), (2, 0))
    assert wishes(rule, request(), FakeView(matched={0: 800, 2: 199}), account) == {1}
    # (600 + 1) * 3 = 1803: a better match wins it back
    assert wishes(rule, request(), FakeView(matched={0: 1000, 2: 199}), account) == {0}


# -- Dynamo --------------------------------------------------------------------------------


def dynamo(scale: float) -> DynamoLinear:
    return DynamoLinear(Random(1), block_tokens=BLOCK_TOKENS, prefill_load_scale=scale)


@pytest.mark.parametrize(("scale", "wanted"), [(1.0, 1), (4.0, 0), (8.0, 0)])
def test_dynamo_weighs_prefill_against_decode_by_its_scale(scale: float, wanted: int) -> None:
    """In blocks, endpoint 0: prefill 0 + 10 - 8 = 2, decode 12 + 10 = 22; endpoint 1: 10 and 10.

    Scale 1: 24 against 20. Scale 4: 30 against 50. Scale 8: 38 against 90.
    """
    account = Account(pins=True)
    busy = request(50, 1200)
    account.charge(busy, 0, prefill_tokens=1200)
    account.first_byte(busy)
    view = FakeView((0, 1), matched={0: 800})
    assert wishes(dynamo(scale), request(tokens=1000), view, account) == {wanted}


def test_dynamo_counts_prefill_until_the_first_token_and_shared_blocks_once() -> None:
    """Endpoint 0 runs the same 10 blocks: decode 10. Prefill 10 + 10 - 10 = 10. Cost 20.

    Endpoint 1: decode 0 + 10, prefill 0 + 10: 20, a tie; the first token of the other breaks it.
    """
    account, same = Account(pins=True), request(1, 1000)
    account.charge(same, 0, prefill_tokens=1000)
    view = FakeView((0, 1), matched={0: 1000})
    asked = request(2, 1000, blocks=same.blocks)
    assert wishes(dynamo(1.0), asked, view, account) == {0, 1}
    account.first_byte(same)
    assert wishes(dynamo(1.0), asked, view, account) == {0}


# -- SGLang --------------------------------------------------------------------------------


def test_sglang_takes_the_best_match_above_half_of_the_prompt() -> None:
    rule, account = SglangCacheAware(), loaded((5, 0), (6, 0), (4, 0))
    assert wishes(rule, request(), FakeView(matched={0: 501, 1: 600}), account) == {1}
    assert wishes(rule, request(), FakeView(matched={1: 500}), account) == {2}


def test_sglang_gives_ties_to_the_lowest_number() -> None:
    rule, account = SglangCacheAware(), loaded((5, 0), (4, 0), (4, 0))
    assert wishes(rule, request(), FakeView(), account) == {1}
    assert wishes(rule, request(), FakeView(matched={1: 900, 2: 900}), account) == {1}


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ((32, 0, 1), 0),  # 32 apart: not more than 32
        ((33, 0, 1), 1),  # 33 apart and 33 > 1.1 * 0
        ((363, 330, 340), 0),  # 33 apart, but 363 is not more than 1.1 * 330
        ((364, 330, 340), 1),
    ],
)
def test_sglang_leaves_affinity_only_when_both_imbalances_are_exceeded(
    loads: Sequence[int], wanted: int
) -> None:
    account = loaded(*((requests, 0) for requests in loads))
    rule, view = SglangCacheAware(), FakeView(matched={0: 1000})
    assert wishes(rule, request(), view, account) == {wanted}


def test_the_other_sglang_is_less_demanding_and_more_patient() -> None:
    peer = POLICIES["sglang-0.3-64-1.5"](context())
    assert isinstance(peer, Peer)
    view = FakeView(matched={0: 310})
    assert wishes(peer.rule, request(), view, loaded((64, 0), (0, 0), (1, 0))) == {0}
    assert wishes(peer.rule, request(), view, loaded((65, 0), (0, 0), (1, 0))) == {1}
    assert wishes(peer.rule, request(), view, loaded((300, 0), (200, 0), (250, 0))) == {0}


# -- bounded hashing -----------------------------------------------------------------------


def test_hashing_sends_equal_heads_to_one_home_and_different_heads_to_all() -> None:
    rule, view = BoundedHashing(), FakeView()
    head = (1, 2, 3, 4)
    homes = {rule.wish(request(n, blocks=(*head, n)), view, Account(), 0.0) for n in range(5, 50)}
    assert len(homes) == 1
    assert {rule.wish(request(n), view, Account(), 0.0) for n in range(50)} == {0, 1, 2}
    assert {rule.wish(request(n, 50), view, Account(), 0.0) for n in range(50)} == {0, 1, 2}


def test_hashing_leaves_home_when_it_is_a_quarter_above_the_mean() -> None:
    """11 + 1 requests on 3 endpoints: room for ceil(1.25 * 12 / 3) = 5 each."""
    rule, view, asked = BoundedHashing(), FakeView(), request(3)
    home = rule.wish(asked, view, Account(), 0.0)
    loads = [(3, 0)] * 3
    loads[home], loads[home - 1] = (4, 0), (4, 0)
    assert rule.wish(asked, view, loaded(*loads), 0.0) == home
    loads[home], loads[home - 1] = (5, 0), (3, 0)
    away = rule.wish(asked, view, loaded(*loads), 0.0)
    assert away != home
    assert {rule.wish(asked, view, loaded(*loads), 0.0) for _ in range(9)} == {away}


def test_hashing_keeps_most_homes_when_an_endpoint_joins() -> None:
    rule = BoundedHashing()
    before = [rule.wish(request(n), FakeView((0, 1, 2)), Account(), 0.0) for n in range(200)]
    after = [rule.wish(request(n), FakeView((0, 1, 2, 3)), Account(), 0.0) for n in range(200)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {3}
    assert 20 < len(moved) < 90


@given(loads=st.lists(st.integers(0, 40), min_size=1, max_size=8), number=st.integers(0, 99))
def test_hashing_always_finds_room(loads: list[int], number: int) -> None:
    view = FakeView(range(len(loads)))
    account = loaded(*((requests, 0) for requests in loads))
    chosen = BoundedHashing().wish(request(number), view, account, 0.0)
    assert loads[chosen] + 1 <= -(-1.25 * (sum(loads) + 1) // len(loads))


# -- every policy of the table -------------------------------------------------------------


def test_every_peer_is_listed_with_and_without_the_hold() -> None:
    plain = [name for name in POLICIES if not name.endswith("+hold")]
    assert set(POLICIES) == {*plain, *(name + "+hold" for name in plain)}
    assert len(plain) == 14
    for name, make in POLICIES.items():
        assert isinstance(make(context()), HoldingPolicy) == name.endswith("+hold"), name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_chooses_a_live_endpoint_and_ends_with_nothing_charged(name: str) -> None:
    policy, rng = POLICIES[name](context()), Random(3)
    view = FakeView((0, 1, 2), matched={1: 300}, ttft_s=dict.fromkeys(range(4), 0.1))
    sent = drive(policy, view, rng)
    assert sorted(sent) == list(range(60))
    inner = policy._inner if isinstance(policy, Held) else policy
    for account in [inner.account] + ([policy._account] if isinstance(policy, Held) else []):
        for endpoint in range(4):
            load = account.load(endpoint)
            assert (load.requests, load.prefill_tokens, load.pins) == (0, 0, {})
        assert not account._charges


def drive(policy: Policy, view: FakeView, rng: Random) -> list[int]:
    """60 requests of random length; endpoint 1 leaves and 3 joins on the way. Returns the sent."""
    open_requests: dict[int, SimRequest] = {}
    sent: list[int] = []
    now_s = 0.0

    def send(asked: SimRequest, endpoint: int) -> None:
        assert endpoint in view.endpoints
        open_requests[asked.number] = asked
        sent.append(asked.number)

    def let_go() -> None:
        if isinstance(policy, HoldingPolicy):
            for asked, endpoint in policy.pass_held(view, now_s):
                send(asked, endpoint)

    for number in range(60):
        now_s += 0.1
        if number == 30:
            view.endpoints = (0, 2, 3)
            policy.left(1)
        asked = request(number, rng.randrange(50, 2000), at_s=now_s)
        endpoint = policy.choose(asked, view, now_s)
        if endpoint is not None:
            send(asked, endpoint)
        let_go()
        if open_requests and rng.random() < 0.7:
            ended = open_requests.pop(rng.choice(list(open_requests)))
            policy.first_byte(ended, now_s)
            policy.ended(ended, now_s, ok=True)
            let_go()
    for _ in range(200):
        now_s += 0.5
        for number in list(open_requests):
            policy.ended(open_requests.pop(number), now_s, ok=True)
        let_go()
    return sent


def test_equal_seeds_choose_equally() -> None:
    for name, make in POLICIES.items():
        runs = []
        for _ in range(2):
            view = FakeView((0, 1, 2), ttft_s=dict.fromkeys(range(4), 0.1))
            runs.append(drive(make(context(rng=Random(5))), view, Random(4)))
        assert runs[0] == runs[1], name


# -- the hold ------------------------------------------------------------------------------


class Wants:
    """A rule that wants what it is told, by request number."""

    def __init__(self, default: int = 0, **_: Any) -> None:
        self.wanted: dict[int, int] = {}
        self.default = default
        self.asked: list[int] = []

    def wish(self, request: SimRequest, view: Any, account: Account, now_s: float) -> int:
        self.asked.append(request.number)
        return self.wanted.get(request.number, self.default)


def holding(**differing: Any) -> tuple[Held, Wants]:
    rule = Wants()
    return Held(Peer(rule), context(**differing)), rule


def test_the_hold_lets_go_at_one_engine_chunk_of_aged_backlog() -> None:
    """0.8 s of prefill from 0 s on, a chunk is 0.5 s: open from 0.3 s on."""
    policy, _ = holding()
    view, small = FakeView(), request(2, 100)
    assert policy.choose(request(1, 800), view, 0.0) == 0
    assert policy.choose(small, view, 0.0) is None
    assert policy.pass_held(view, 0.29) == []
    assert policy.backlog_s(0, 0.29) == pytest.approx(0.51)
    assert policy.pass_held(view, 0.31) == [(small, 0)]
    assert policy.held == 0


def test_only_the_oldest_prefill_ages_and_a_first_byte_starts_the_next() -> None:
    policy, _ = holding()
    view, first = FakeView(), request(1, 400)
    policy.choose(first, view, 0.0)
    policy.choose(request(2, 300), view, 0.0)
    assert policy.backlog_s(0, 0.1) == pytest.approx(0.6)
    assert policy.backlog_s(0, 9.0) == pytest.approx(0.3)
    policy.first_byte(first, 0.5)
    assert policy.backlog_s(0, 0.6) == pytest.approx(0.2)
    assert policy.backlog_s(0, 9.0) == 0.0


def test_the_hold_prices_attention_and_the_speed_of_the_engine() -> None:
    """1000 tokens, 400 cached: (600 ms + 600 * (400 + 300) * 1 us) / 2 = 0.51 s."""
    cost = CostModel(prefill_token_s=0.001, attention_pair_s=1e-6, speed=2.0)
    policy, _ = holding(costs=(cost,) * 4)
    policy.choose(request(1, 1000), FakeView(matched={0: 400}), 0.0)
    assert policy.backlog_s(0, 0.0) == pytest.approx(0.51)


def test_hidden_first_bytes_are_predicted() -> None:
    """0.8 s and 0.4 s of prefill end at 0.8 s and 1.2 s."""
    policy, _ = holding(first_byte_seen=False)
    view = FakeView()
    policy.choose(request(1, 800), view, 0.0)
    policy.choose(request(2, 400), view, 0.0)
    assert policy.pass_held(view, 0.4) == [(request(2, 400), 0)]
    assert policy.backlog_s(0, 0.9) == pytest.approx(0.3)
    assert policy.backlog_s(0, 1.3) == 0.0


def test_the_hold_waits_for_room_in_the_kv_cache() -> None:
    """30 blocks. In use: 10 of the prompt and ceil(512 / 100) = 6 for its output.

    The next needs ceil((700 + 300) / 100) = 10 blocks, then ceil((800 + 300) / 100) = 11, and 6
    with 5 of its blocks in use already. After the first there are 10 + 7 + 2 * 6 = 29 in use.
    """
    policy, _ = holding()
    view, first = FakeView(kv_tokens=3000), request(1, 1000)
    policy.choose(first, view, 0.0)
    policy.first_byte(first, 0.5)
    assert policy.choose(request(2, 700), view, 1.0) == 0
    policy.first_byte(request(2, 700), 1.5)
    assert policy.choose(request(3, 800), view, 2.0) is None
    shared = request(4, 500, blocks=first.blocks[:5])
    assert policy.choose(shared, view, 2.0) is None
    policy.ended(request(2, 700), 3.0, ok=True)
    assert {asked.number for asked, _ in policy.pass_held(view, 3.0)} == {4}
    policy.ended(first, 4.0, ok=True)
    assert [asked.number for asked, _ in policy.pass_held(view, 4.0)] == [3]


def test_shared_blocks_in_use_are_not_needed_twice() -> None:
    """16 of 20 blocks in use; the next needs 8, of which 5 are in use: 19 fit, 24 would not."""
    for shared, wanted in ((5, 0), (0, None)):
        policy, _ = holding()
        view, first = FakeView(kv_tokens=2000), request(1, 1000)
        policy.choose(first, view, 0.0)
        policy.first_byte(first, 0.5)
        blocks = first.blocks[:shared]
        assert policy.choose(request(2, 500, blocks=blocks), view, 1.0) == wanted


def test_unnamed_blocks_of_a_prompt_take_room_too() -> None:
    policy, _ = holding()
    view, first = FakeView(kv_tokens=2000), request(1, 1500, blocks=())
    policy.choose(first, view, 0.0)
    policy.first_byte(first, 0.5)
    assert policy.choose(request(2, 100), view, 1.0) is None


def test_the_hold_keeps_to_the_engines_batch() -> None:
    policy, _ = holding(max_num_seqs=2)
    view = FakeView()
    for number in (1, 2):
        assert policy.choose(request(number, 100), view, 0.0) == 0
        policy.first_byte(request(number, 100), 0.2)
    assert policy.choose(request(3, 100), view, 1.0) is None
    policy.ended(request(1, 100), 2.0, ok=True)
    assert policy.pass_held(view, 2.0) == [(request(3, 100), 0)]


def test_an_idle_endpoint_takes_even_what_does_not_fit() -> None:
    policy, _ = holding()
    assert policy.choose(request(1, 5000), FakeView(kv_tokens=1000), 0.0) == 0


def test_a_held_request_waits_for_its_own_endpoint_and_may_change_its_mind() -> None:
    policy, rule = holding()
    view, asked = FakeView(), request(2, 100)
    policy.choose(request(1, 5000), view, 0.0)
    assert policy.choose(asked, view, 0.0) is None
    assert policy.pass_held(view, 0.1) == []
    rule.wanted[2] = 1
    policy.ended(request(9), 0.2, ok=True)
    assert policy.pass_held(view, 0.2) == [(asked, 1)]


def test_nobody_overtakes_held_requests_at_arrival() -> None:
    policy, rule = holding()
    view = FakeView()
    policy.choose(request(1, 600), view, 0.0)
    assert policy.choose(request(2, 400, at_s=0.0), view, 0.0) is None
    assert policy.choose(request(3, 400, at_s=0.2), view, 0.2) is None
    assert [asked.number for asked, _ in policy.pass_held(view, 0.2)] == [2]
    rule.wanted[4] = 1
    assert policy.choose(request(4, 100, at_s=0.3), view, 0.3) is None
    assert policy.pass_held(view, 0.3) == [(request(4, 100, at_s=0.3), 1)]


def test_the_order_is_the_response_ratio() -> None:
    """Waits of 3 s and 1 s, work of 2 s and 0.1 s: 5.5 / 2.5 = 2.2 and 1.6 / 0.6 = 2.67."""
    policy, rule = holding(max_num_seqs=1)
    view = FakeView((0,))
    policy.choose(request(1, 100), view, 0.0)
    assert policy.choose(request(2, 2000, at_s=0.0), view, 0.0) is None
    assert policy.choose(request(3, 100, at_s=2.0), view, 2.0) is None
    policy.ended(request(1, 100), 3.0, ok=True)
    rule.asked.clear()
    assert [asked.number for asked, _ in policy.pass_held(view, 3.0)] == [3]
    assert rule.asked == [3]


def test_who_waited_40_s_comes_first_and_closes_its_endpoint_to_the_others() -> None:
    policy, rule = holding()
    view = FakeView(kv_tokens=3000)
    big, small = request(2, 2500, at_s=0.0), request(3, 100, at_s=30.0)
    first = request(1, 500)
    policy.choose(first, view, 0.0)
    policy.first_byte(first, 0.5)
    assert policy.choose(big, view, 0.0) is None
    assert policy.choose(small, view, 40.1) is None
    rule.asked.clear()
    assert policy.pass_held(view, 40.1) == []
    assert rule.asked == [2, 3]
    rule.wanted[3] = 1
    policy.ended(request(9), 40.2, ok=True)
    assert policy.pass_held(view, 40.2) == [(small, 1)]
    policy.ended(first, 41.0, ok=True)
    assert policy.pass_held(view, 41.0) == [(big, 0)]


def test_before_40_s_a_smaller_request_may_pass_a_larger_one() -> None:
    policy, _ = holding()
    view, first = FakeView(kv_tokens=3000), request(1, 500)
    policy.choose(first, view, 0.0)
    policy.first_byte(first, 0.5)
    assert policy.choose(request(2, 2500, at_s=0.0), view, 0.0) is None
    assert policy.choose(request(3, 100, at_s=30.0), view, 39.0) is None
    assert [asked.number for asked, _ in policy.pass_held(view, 39.0)] == [3]


def test_a_pass_asks_for_so_many_requests_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "PASS_REQUESTS_MAX", 3)
    policy, rule = holding()
    view = FakeView()
    policy.choose(request(0, 5000), view, 0.0)
    for number in range(1, 10):
        assert policy.choose(request(number, 100), view, 0.0) is None
    rule.asked.clear()
    policy.pass_held(view, 0.1)
    assert len(rule.asked) == 3


def test_a_pass_asks_nobody_while_no_endpoint_has_room() -> None:
    policy, rule = holding()
    view = FakeView((0,))
    policy.choose(request(0, 5000), view, 0.0)
    policy.choose(request(1, 100), view, 0.0)
    rule.asked.clear()
    assert policy.pass_held(view, 0.1) == []
    assert rule.asked == []


def test_a_pass_asks_again_only_when_something_may_have_changed() -> None:
    policy, rule = holding()
    view = FakeView()
    policy.choose(request(0, 900), view, 0.0)
    policy.choose(request(1, 100), view, 0.0)
    policy.pass_held(view, 0.0)

    def asked(now_s: float) -> list[int]:
        rule.asked.clear()
        policy.pass_held(view, now_s)
        return rule.asked

    assert asked(0.1) == []
    assert policy.choose(request(2, 100), view, 0.2) is None
    assert asked(0.2) == [2]
    policy.ended(request(9), 0.3, ok=True)
    assert sorted(asked(0.3)) == [1, 2]
    assert asked(0.31) == []
    assert sorted(asked(0.41)) == [1, 2]  # 0.49 s are left: the gate opened
    assert policy.held == 1  # and closed behind the first


def test_a_full_queue_lets_its_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "QUEUE_REQUESTS_MAX", 2)
    policy, _ = holding()
    view = FakeView((0,))
    policy.choose(request(0, 5000), view, 0.0)
    for number in (1, 2, 3, 4):
        assert policy.choose(request(number, 100), view, 0.0) is None
    assert [asked.number for asked, _ in policy.pass_held(view, 0.0)] == [1, 2]
    assert policy.held == 2


def test_an_endpoint_that_left_is_idle_when_it_comes_back() -> None:
    policy, _ = holding()
    view = FakeView((0,))
    policy.choose(request(1, 5000), view, 0.0)
    assert policy.choose(request(2, 5000), view, 0.0) is None
    policy.left(0)
    assert policy.backlog_s(0, 0.0) == 0.0
    assert policy.pass_held(view, 0.0) == [(request(2, 5000), 0)]
    policy.ended(request(1, 5000), 1.0, ok=False)
    assert policy.backlog_s(0, 0.0) == pytest.approx(5.0)


def test_without_endpoints_everything_is_held() -> None:
    policy, _ = holding()
    assert policy.choose(request(1), FakeView(()), 0.0) is None
    assert policy.pass_held(FakeView(()), 0.1) == []
    assert policy.pass_held(FakeView((0,)), 0.2) == [(request(1), 0)]


def test_a_held_request_that_ended_is_dropped() -> None:
    policy, _ = holding()
    view = FakeView((0,))
    policy.choose(request(1, 5000), view, 0.0)
    policy.choose(request(2, 100), view, 0.0)
    policy.ended(request(2, 100), 0.1, ok=False)
    assert policy.held == 0
