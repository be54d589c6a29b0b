"""Dynamo's own code beside our writing of its formula; most of it only where that is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from bench import prefix_index
from bench.dynamo import DynamoMissingError
from bench.engine.cost import CostModel
from bench.sim import dynamo_check
from bench.sim.conditions import PolicyContext
from bench.sim.hardware import H100_PAIR
from bench.sim.model import Scrape, SimRequest, Workload
from bench.sim.policies import OPTIONAL_POLICIES, Peer
from bench.sim.policies.dynamo import DynamoLinear
from bench.sim.policies.dynamo_service import DynamoService

BLOCK_TOKENS = 64


class FakeView:
    """Matches per endpoint, the same for every request."""

    def __init__(self, endpoints: Sequence[int], matched: Mapping[int, int]) -> None:
        self.endpoints = endpoints
        self.matched = matched

    def matched_tokens(self, request: SimRequest, endpoint: int) -> int:
        blocks = min(self.matched.get(endpoint, 0), (request.prompt_tokens - 1) // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS

    def scrape(self, endpoint: int) -> Scrape | None:
        return None

    def kv_tokens(self, endpoint: int) -> int:
        return 10**6


def context() -> PolicyContext:
    return PolicyContext(
        endpoints=4,
        block_tokens=BLOCK_TOKENS,
        kv_tokens=(10**6,) * 4,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        costs=(CostModel(),) * 4,
        rng=Random(1),
        scrape_s=None,
        first_byte_seen=True,
    )


@pytest.mark.parametrize("name", sorted(OPTIONAL_POLICIES))
def test_without_dynamo_its_selector_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(DynamoMissingError, match="pip install ai-dynamo-runtime"):
        OPTIONAL_POLICIES[name](context())


def test_without_dynamo_the_comparisons_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.setattr(sys, "argv", ["prefix_index", "--dynamo"])
    for run in (prefix_index.main, lambda: dynamo_check.main([])):
        with pytest.raises(SystemExit, match="pip install ai-dynamo-runtime"):
            run()


def test_dynamo_gets_a_name_for_the_partly_filled_block_that_nobody_shares() -> None:
    """Blocks of 64 tokens: 200 tokens are three full blocks and a bit."""
    requests = tuple(
        SimRequest(number=n, arrival_s=n, prompt_tokens=200, output_tokens=3, blocks=(9, 8, 10 + n))
        for n in range(2)
    )
    lines = dynamo_check._lines(Workload("two", requests, BLOCK_TOKENS))
    assert lines == [
        '{"timestamp": 0, "input_length": 200, "output_length": 3, "hash_ids": [0, 1, 2, 3]}\n',
        '{"timestamp": 1000, "input_length": 200, "output_length": 3, "hash_ids": [0, 1, 4, 5]}\n',
    ]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_dynamos_selector_chooses_by_our_formula(scale: float) -> None:
    pytest.importorskip("dynamo")
    pytest.importorskip("zmq")
    service, rng = DynamoService(context(), prefill_load_scale=scale), Random(2)
    ours = Peer(DynamoLinear(rng, block_tokens=BLOCK_TOKENS, prefill_load_scale=scale), pins=True)
    inflight: list[SimRequest] = []
    for number in range(80):
        endpoints = (0, 1, 2) if number < 40 else (0, 2, 3)
        if number == 40:
            service.left(1)
            ours.left(1)
        chat = number % 5
        blocks = tuple(10_000 * (chat + 1) + place for place in range(rng.randrange(1, 40)))
        tokens = len(blocks) * BLOCK_TOKENS + rng.randrange(1, BLOCK_TOKENS)
        asked = SimRequest(
            number=number, arrival_s=0.0, prompt_tokens=tokens, output_tokens=9, blocks=blocks
        )
        matched = {each: rng.randrange(len(blocks) + 1) for each in endpoints}
        view = FakeView(endpoints, matched)
        possible = {ours.wish(asked, view, 0.0) for _ in range(32)}
        chosen = service.choose(asked, view, 0.0)
        assert chosen in possible
        ours.charge(asked, chosen, view, 0.0)
        inflight.append(asked)
        for policy in (service, ours):
            policy.first_byte(inflight[len(inflight) // 2], 0.0)
        if len(inflight) > 12:
            done = inflight.pop(rng.randrange(len(inflight)))
            for policy in (service, ours):
                policy.ended(done, 0.0, ok=True)
    service.close()


def test_dynamos_simulator_and_ours_agree_where_there_is_one_endpoint() -> None:
    """Ten prompts, each asked twice with time between: half of all full blocks are found."""
    core = pytest.importorskip("dynamo._core")
    requests = tuple(
        SimRequest(
            number=number,
            arrival_s=5.0 * number,
            prompt_tokens=650,
            output_tokens=2,
            blocks=tuple(number % 10 * 100 + place for place in range(10)),
        )
        for number in range(20)
    )
    workload = Workload("twice", requests, BLOCK_TOKENS)
    theirs = dynamo_check.replay(core, workload, 1, 1000)
    fleet = dynamo_check.Fleet.of(H100_PAIR, 1, 1000, BLOCK_TOKENS)
    ours = dynamo_check.simulated(workload, fleet, OPTIONAL_POLICIES["dynamo-service-1"])
    assert theirs["round-robin"].hit_ratio == pytest.approx(640 / 650 / 2)
    assert ours.hit_ratio == pytest.approx(640 / 650 / 2)
