"""What was saved decides as the live picker would have: over random pools, to the last bit."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.errors import RequestDropped
from epp.core.filters.label_selector import LabelSelectorFilter
from epp.core.filters.utilization import Condition, Metric, UtilizationFilter
from epp.core.inflight import Inflight, InflightParams
from epp.core.latency.expected import ExpectedLatency
from epp.core.model import Api, Endpoint, EndpointSpec, Load, Lora, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Answered, Members, Pool, Scraped, ScrapeFailed
from epp.core.registry import SCORERS
from epp.core.restore import NOW_S, restore, setup_of
from epp.core.schedule import NamedFilter, Profile, WeightedScorer
from epp.core.state import State
from epp.edge.admin import debug_state

WEIGHED = (
    *("queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer"),
    *("load-aware-scorer", "active-request-scorer", "token-load-scorer", "prefix-cache-scorer"),
    *("no-hit-lru-scorer", "lora-affinity-scorer", "latency-scorer"),
)
PROFILES = (
    Profile("default", (), (), MaxScorePicker(), ExpectedLatency(waiting_weight=0.9)),
    Profile(
        "default",
        (
            NamedFilter("zone", LabelSelectorFilter(match_labels={"zone": "a"})),
            NamedFilter(
                "full",
                UtilizationFilter(
                    conditions=(Condition(metric=Metric.ACTIVE_REQUESTS, max_value=6.0),),
                    fallback_on_empty=True,
                ),
            ),
        ),
        tuple(WeightedScorer(name, 1.0 + i, SCORERS[name]()) for i, name in enumerate(WEIGHED)),
        MaxScorePicker(max_num_of_endpoints=2),
        tpot_ratio=0.5,
    ),
)


class World:
    """A decider that lives through a random past."""

    def __init__(self, rng: Random, profile: Profile) -> None:
        self.rng = rng
        self.now_s = rng.choice([0.3, 1234.5678])
        self.pool = Pool(stale_after_s=3.0)
        params = InflightParams(add_estimated_output_tokens=rng.random() < 0.3)
        self.decider = Decider(
            pool=self.pool,
            profile=profile,
            inflight=Inflight(params),
            prefix=PrefixKeeper(PrefixParams(endpoint_blocks_max=rng.choice([5, 40, 4000]))),
            rng=Random(1),
        )
        hosts = ["10.0.0.1", "10.0.0.2", "fd00::3", "engine-4", "10.0.0.5"][: rng.randint(1, 5)]
        zones = [{}, {"zone": "a"}, {"zone": "b"}]
        specs = [EndpointSpec(h, 8000, name=f"n-{h}", labels=rng.choice(zones)) for h in hosts]
        self.pool.apply(Members(tuple(specs)), self.now_s)
        self.running: list = []

    def request(self) -> Request:
        rng = self.rng
        family = rng.choice("abc").encode() * 256 * rng.randint(0, 40)
        text = family + rng.randbytes(rng.randint(0, 2000))
        return Request(
            model="m",
            api=Api.CHAT,
            prompts=(text,) if text else (),
            prompt_tokens=len(text) // 4,
            slo_ttft_s=rng.choice([None, None, 0.05, 1.0]),
            slo_tpot_s=rng.choice([None, None, 0.013]),
        )

    def step(self) -> None:
        rng = self.rng
        self.now_s += rng.choice([0.0, 0.01, 0.25, 1.7])
        kind = rng.random()
        if kind < 0.5:
            self.send()
        elif kind < 0.7 and self.running:
            self.decider.first_byte(rng.choice(self.running), self.now_s)
        elif kind < 0.85 and self.running:
            ended = self.running.pop(rng.randrange(len(self.running)))
            self.decider.ended(ended, self.now_s, output_tokens=30, decode_s=rng.random())
        else:
            self.observe()

    def send(self) -> None:
        seen = self.rng.random() < 0.8
        try:
            decision = self.decider.decide(
                self.request(), subset=None, now_s=self.now_s, first_byte_seen=seen
            )
        except RequestDropped:
            return
        self.decider.learn(decision)
        self.running.append(decision)

    def observe(self) -> None:
        rng, endpoint = self.rng, self.rng.choice(self.pool.endpoints)
        load = Load(
            at_s=self.now_s,
            waiting=rng.choice([None, 0, 3, 40]),
            running=rng.choice([None, 0, 7]),
            kv_usage_ratio=rng.choice([None, 0.0, 0.73]),
            kv_block_tokens=rng.choice([None, 16, 128]),
            kv_blocks=rng.choice([None, 64, 5000]),
            lora=rng.choice([None, Lora(frozenset({"m"}), frozenset({"x"}), 2)]),
            attributes={"k": rng.random()},
        )
        event = rng.choice(
            [
                *(Scraped(endpoint, load),) * 3,
                Answered(endpoint, ok=True),
                Answered(endpoint, ok=False),
                ScrapeFailed(endpoint, "refused", unreachable=True),
            ]
        )
        self.pool.apply(event, self.now_s)


def saved(decider: Decider, now_s: float) -> State:
    page = debug_state(decider, lambda: now_s)
    head = msgspec.json.encode(page.state).removesuffix(b"}")
    blocks = b"".join(page.blocks)
    return msgspec.json.decode(head + b',"prefix_blocks":{' + blocks + b"}}", type=State)


@pytest.mark.parametrize("profile", PROFILES, ids=["cost", "scores"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_a_saved_state_decides_as_the_live_picker_would(profile, seed, steps) -> None:
    world = World(Random(seed), profile)
    for _ in range(steps):
        world.step()
    live = world.decider
    live.inflight.advance(world.now_s)
    state = saved(live, world.now_s)
    restored = restore(state, setup_of(state), Random(2))
    assert setup_of(state).profile == profile
    for _ in range(3):
        probe = world.request()
        again = msgspec.structs.replace(probe)
        try:
            there = live.wish(probe, subset=None, now_s=world.now_s)
        except RequestDropped:
            with pytest.raises(RequestDropped):
                restored.wish(again, subset=None, now_s=NOW_S)
            continue
        here = restored.wish(again, subset=None, now_s=NOW_S)
        assert [e.address for e in here.candidates] == [e.address for e in there.candidates]
        assert list(here.totals) == list(there.totals)
        if here.by_cost:  # equal ones: fewest in flight, longest ago, and only then chance
            assert turn(here.endpoint) == turn(there.endpoint)
            continue
        best = [
            e for e, s in zip(here.candidates, here.scores, strict=True) if s == max(here.scores)
        ]
        assert here.endpoint in best
        if len(best) == 1:
            assert here.endpoint.address == there.endpoint.address


def turn(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.inflight_requests, endpoint.last_pick_number


def test_what_is_saved_of_a_restored_state_is_the_same_state() -> None:
    world = World(Random(7), PROFILES[0])
    for _ in range(200):
        world.step()
    world.decider.inflight.advance(world.now_s)
    state = saved(world.decider, world.now_s)
    assert state.inflight_requests > 0
    assert any(held.runs for held in state.prefix_blocks.values())
    again = saved(restore(state, setup_of(state), Random(2)), NOW_S)
    for before, after in zip(state.endpoints, again.endpoints, strict=True):
        learned = msgspec.structs.replace(
            before.learned, prefills=0, answers=0, error_ratio=None, age_s=None, speed_ratio=1.0
        )
        assert after == msgspec.structs.replace(before, learned=learned)
    names = {a: " ".join(held.runs) for a, held in state.prefix_blocks.items()}
    assert {a: " ".join(held.runs) for a, held in again.prefix_blocks.items()} == names
