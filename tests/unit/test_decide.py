from random import Random

import pytest

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.errors import RequestDropped
from epp.core.explain import Reason, explain, reason_of
from epp.core.inflight import Inflight
from epp.core.model import Api, EndpointSpec, Load, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Answered, Members, Pool, Scraped, ScrapeFailed
from epp.core.schedule import Profile, WeightedScorer
from epp.core.scorers.inflight import ActiveRequestScorer
from epp.core.scorers.prefix import PrefixCacheScorer


def world(count: int = 3, *, prefix_weight: float = 3.0, **params) -> Decider:
    pool = Pool(stale_after_s=5.0)
    decider = Decider(
        pool=pool,
        profile=Profile(
            "default",
            (),
            (
                WeightedScorer("prefix-cache-scorer", prefix_weight, PrefixCacheScorer()),
                WeightedScorer("active-request-scorer", 1.0, ActiveRequestScorer()),
            ),
            MaxScorePicker(),
        ),
        inflight=Inflight(),
        prefix=PrefixKeeper(PrefixParams(**params)),
        rng=Random(1),
    )
    pool.apply(Members(tuple(spec(n) for n in range(count))), 0.0)
    return decider


def spec(n: int, uid: str = "") -> EndpointSpec:
    return EndpointSpec(host=f"10.0.0.{n}", port=8000, uid=uid)


def request(text: str, model: str = "m", salt: str = "") -> Request:
    data = text.encode()
    return Request(
        id="r", model=model, api=Api.CHAT, prompts=(data,), prompt_tokens=len(data) // 4,
        cache_salt=salt,
    )  # fmt: skip


def send(decider: Decider, text: str, **kwargs):
    decision = decider.decide(request(text, **kwargs), subset=None, now_s=0.0)
    decider.learn(decision)
    return decision


PROMPT = "0123456789abcdef" * 64  # 256 tokens, 4 blocks


def test_the_same_prompt_goes_where_it_went_and_is_charged_only_what_is_new() -> None:
    decider = world()
    first = send(decider, PROMPT)
    second = send(decider, PROMPT + "x" * 256)
    assert second.pick.endpoint is first.pick.endpoint
    assert (first.matched_tokens, second.matched_tokens) == (0, 256)
    assert first.charge.tokens == 256
    assert second.charge.tokens == 64


@pytest.mark.parametrize("other", [{"model": "other"}, {"salt": "tenant"}])
def test_G05_D10_another_model_or_salt_shares_nothing(other) -> None:
    decider = world()
    send(decider, PROMPT)
    assert send(decider, PROMPT, **other).matched_tokens == 0


def test_G03_a_new_endpoint_in_a_used_slot_inherits_nothing() -> None:
    decider = world(1)
    send(decider, PROMPT)
    decider.pool.apply(Members((spec(0, uid="new"),)), 1.0)
    assert send(decider, PROMPT).matched_tokens == 0


def test_an_endpoint_that_left_meanwhile_is_not_learned() -> None:
    decider = world(1)
    decision = decider.decide(request(PROMPT), subset=None, now_s=0.0)
    decider.pool.apply(Members((spec(1),)), 0.0)
    decider.learn(decision)
    assert decider.prefix.index.entries == 0


def test_a_restarted_engine_is_not_thought_to_hold_anything() -> None:
    decider = world(1)
    send(decider, PROMPT)
    (endpoint,) = decider.pool.endpoints
    for at_s in (1.0, 2.0):
        decider.pool.apply(ScrapeFailed(endpoint, "connect", unreachable=True), at_s)
    decider.pool.apply(Scraped(endpoint, Load(at_s=3.0)), 3.0)
    assert send(decider, PROMPT).matched_tokens == 0


def test_G13_blocks_and_capacity_follow_what_the_engine_reports() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    load = Load(at_s=0.0, kv_block_tokens=128, kv_blocks=3)
    decider.pool.apply(Scraped(endpoint, load), 0.0)
    assert decider.prefix.block_tokens == 128
    send(decider, PROMPT)
    send(decider, PROMPT[::-1])
    assert decider.prefix.index.held == 3, "384 tokens are three blocks of 128"


def test_G02_small_engine_blocks_are_raised_to_the_floor_in_the_right_unit() -> None:
    decider = world(1)
    (endpoint,) = decider.pool.endpoints
    load = Load(at_s=0.0, kv_block_tokens=16, kv_blocks=8)
    decider.pool.apply(Scraped(endpoint, load), 0.0)
    assert decider.prefix.block_tokens == 64
    send(decider, PROMPT)
    assert decider.prefix.index.held == 2, "8 blocks of 16 tokens hold 2 of 64"


def test_a_new_block_size_forgets_what_was_cut_by_the_old_one() -> None:
    decider = world(2)
    send(decider, PROMPT)
    first, second = decider.pool.endpoints
    decider.pool.apply(Scraped(first, Load(at_s=0.0, kv_block_tokens=128, kv_blocks=100)), 0.0)
    assert send(decider, PROMPT).matched_tokens == 0
    assert send(decider, PROMPT).matched_tokens == 256
    decider.pool.apply(Scraped(second, Load(at_s=0.0, kv_block_tokens=16, kv_blocks=100)), 0.0)
    assert decider.prefix.block_tokens == 128
    assert send(decider, PROMPT).matched_tokens == 256


def test_G10_a_configured_capacity_bounds_what_is_remembered() -> None:
    decider = world(1, auto_tune=False, endpoint_blocks_max=3)
    send(decider, PROMPT)
    assert decider.prefix.index.held == 3


def test_G10_only_the_configured_part_of_a_prompt_is_looked_at() -> None:
    decider = world(1, tokens_max=128)
    send(decider, PROMPT)
    assert decider.prefix.index.held == 2


def test_J06_a_burst_between_two_scrapes_is_spread() -> None:
    decider = world(4)
    for n in range(40):
        send(decider, f"{n:04}" * 256)
    assert [e.inflight_requests for e in decider.pool.endpoints] == [10] * 4


def test_G07_load_outweighs_affinity_in_the_end() -> None:
    decider = world(3, prefix_weight=0.5)
    used = {send(decider, PROMPT).pick.endpoint for _ in range(200)}
    assert len(used) == 3


def test_K05_a_subset_of_ejected_endpoints_is_still_served() -> None:
    decider = world(2)
    bad = decider.pool.endpoints[0]
    for _ in range(3):
        decider.pool.apply(Answered(bad, ok=False), 0.0)
    decision = decider.decide(Request(), subset=(bad.address,), now_s=0.0)
    assert decision.pick.endpoint is bad


def test_K05_an_empty_subset_leaves_nothing() -> None:
    with pytest.raises(RequestDropped):
        world(2).decide(Request(), subset=(), now_s=0.0)


def test_a_refused_request_is_not_charged() -> None:
    decider = world(0)
    with pytest.raises(RequestDropped):
        decider.decide(Request(), subset=None, now_s=0.0)
    assert decider.inflight.requests == 0


def test_every_pick_says_why() -> None:
    decider = world(2)
    cold = send(decider, PROMPT)
    assert reason_of(cold) is Reason.LOAD
    warm = send(decider, PROMPT)
    assert reason_of(warm) is Reason.PREFIX
    text = explain(warm)
    assert warm.pick.endpoint.address in text
    assert "256 of 256 tokens cached" in text
    assert "prefix-cache-scorer" in text
    for _ in range(50):
        send(decider, "y" * 1024)
    light = world(2, prefix_weight=0.1)
    send(light, PROMPT)
    assert reason_of(send(light, PROMPT)) is Reason.SPREAD
    assert reason_of(send(world(1), PROMPT)) is Reason.ONLY


def test_an_engine_with_blocks_no_engine_has_does_not_end_prefix_routing() -> None:
    decider = world(2)
    odd, _ = decider.pool.endpoints
    load = Load(at_s=0.0, kv_block_tokens=10**15 - 1, kv_blocks=10**15 - 1)
    decider.pool.apply(Scraped(odd, load), 0.0)
    assert decider.prefix.block_tokens == 64
    send(decider, PROMPT)
    assert send(decider, PROMPT).matched_tokens > 0
    assert decider.prefix.index.held <= decider.prefix.params.blocks_max_total


def test_G06_two_ports_of_one_host_hold_prefixes_of_their_own() -> None:
    decider = world(0)
    ranks = tuple(EndpointSpec(host="10.0.0.1", port=port) for port in (8000, 8001))
    decider.pool.apply(Members(ranks), 0.0)
    first = send(decider, PROMPT)
    (slot,) = decider.prefix.match(request(PROMPT)).by_slot
    assert slot == first.pick.endpoint.slot
