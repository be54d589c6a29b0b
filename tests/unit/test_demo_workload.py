"""The demo's plan: the same for both runs, and shaped as it says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from bench.demo.workload import Kind, Phase, Plan, Planned, Shape, make_plan

PHASES = (Phase("first", 6.0), Phase("second", 4.0))
SHAPE = Shape(
    applications=3,
    system_tokens=50,
    chat_slots=6,
    first_tokens=(40, 60),
    turn_tokens=(5, 10),
    turn_gap_s=(0.5, 1.0),
    ramp_s=2.0,
    unrelated_tokens=(20, 40),
)


def plan(seed: int = 1, nonce: str = "", shape: Shape = SHAPE) -> Plan:
    return make_plan(shape, PHASES, seed=seed, nonce=nonce)


def chats(requests: Sequence[Planned]) -> dict[str, list[Planned]]:
    found = defaultdict(list)
    for request in requests:
        if request.kind is Kind.CHAT:
            found[request.id.partition("-turn-")[0]].append(request)
    return found


def test_the_same_seed_gives_the_same_bytes_at_the_same_times() -> None:
    one, other = plan(), plan()
    assert one.requests == other.requests
    assert [r.body("m") for r in one.requests] == [r.body("m") for r in other.requests]


def test_another_seed_gives_another_plan() -> None:
    assert plan(seed=1).requests != plan(seed=2).requests


def test_requests_come_in_order_and_within_their_phase() -> None:
    made = plan()
    times = [request.at_s for request in made.requests]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < made.duration_s == 10.0
    for request in made.requests:
        assert request.phase == (0 if request.at_s < 6.0 else 1)
    assert {request.phase for request in made.requests} == {0, 1}


def test_request_ids_are_unique() -> None:
    ids = [request.id for request in plan().requests]
    assert len(ids) == len(set(ids))


def test_every_turn_continues_the_turn_before() -> None:
    longer = 0
    for turns in chats(plan().requests).values():
        for before, after in pairwise(turns):
            assert after.messages[: len(before.messages)] == before.messages
            roles = [role for role, _ in after.messages[len(before.messages) :]]
            assert roles == ["assistant", "user"]
            assert after.at_s > before.at_s
            longer += 1
    assert longer > 20


def test_chats_share_the_system_prompts_of_a_few_applications() -> None:
    systems = [turns[0].messages[0] for turns in chats(plan().requests).values()]
    assert len(systems) > 3 == len(set(systems))
    assert {role for role, _ in systems} == {"system"}


def test_unrelated_prompts_share_nothing() -> None:
    texts = [r.messages[0][1] for r in plan().requests if r.kind is Kind.UNRELATED]
    assert len(texts) > 10
    assert len({text[:40] for text in texts}) == len(texts)


def test_text_is_as_long_as_the_shape_says() -> None:
    for request in plan().requests:
        if request.kind is Kind.UNRELATED:
            assert 20 <= len(request.messages[0][1].encode()) / 4 <= 40
        else:
            assert len(request.messages[0][1].encode()) == 4 * 50
            assert 40 <= len(request.messages[1][1].encode()) / 4 <= 60
            for _, content in request.messages[3::2]:
                assert 5 <= len(content.encode()) / 4 <= 10


def test_a_nonce_changes_the_beginning_of_every_prompt_and_nothing_else() -> None:
    plain, fresh = plan(), plan(nonce="n0nce")
    assert len(plain.requests) == len(fresh.requests)
    for before, after in zip(plain.requests, fresh.requests, strict=True):
        assert after.messages[0][1].startswith("n0nce ")
        assert after.messages[1:] == before.messages[1:]
        assert (after.id, after.at_s, after.output_tokens) == (
            before.id,
            before.at_s,
            before.output_tokens,
        )


def test_a_body_is_a_streamed_chat_that_asks_for_its_usage() -> None:
    request = plan().requests[0]
    body = json.loads(request.body("some-model"))
    assert body["model"] == "some-model"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == request.output_tokens
    assert [(m["role"], m["content"]) for m in body["messages"]] == list(request.messages)


@pytest.mark.parametrize("model_len", [700, 4096, 8192])
def test_a_shape_is_made_to_fit_a_short_context(model_len: int) -> None:
    fitted = Shape().fitted(model_len)
    assert fitted.longest_tokens <= model_len
    assert fitted.longest_tokens > 0.8 * model_len


def test_a_shape_that_fits_is_left_as_it_is() -> None:
    assert Shape().fitted(100_000) == Shape()


def test_no_request_is_longer_than_the_shape_says() -> None:
    for request in plan().requests:
        tokens = sum(len(content) for _, content in request.messages) / 4
        assert tokens + request.output_tokens <= SHAPE.longest_tokens


def test_a_workload_can_be_chats_alone() -> None:
    shape = msgspec.structs.replace(SHAPE, unrelated_per_s=0.0)
    assert {r.kind for r in plan(shape=shape).requests} == {Kind.CHAT}
