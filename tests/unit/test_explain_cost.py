"""What a pick by cost says of itself, at the edges: alone, without a body, long after."""

from __future__ import annotations

import pytest

from epp.core.decide import Decision
from epp.core.explain import Reason, explain, reason_of
from epp.core.model import Request
from tests.unit.roundrates import LINEAR, charged, prompt, world


def sent(decider, request: Request, now_s: float = 0.0) -> Decision:
    decision = decider.decide(request, subset=None, now_s=now_s)
    decider.learn(decision)
    return decision


def test_the_rival_is_the_cheapest_of_the_others_and_one_may_have_none() -> None:
    decider = world(3, rates=LINEAR)
    near, mid, far = decider.pool.endpoints
    charged(decider.inflight, mid, 0.5, now_s=0.0)
    charged(decider.inflight, far, 0.9, now_s=0.0)
    decision = sent(decider, prompt("a", 100))
    assert decision.pick.endpoint is near
    _, rival = explain(decision).split("; ")
    assert rival.startswith(mid.address)
    assert "0.50 s behind 1 prefill" in rival
    lone = sent(world(1), prompt("a", 100))
    assert explain(lone).endswith("0.13 s; the only candidate")
    assert reason_of(lone) is Reason.ONLY


def test_the_request_itself_is_not_among_those_before_it() -> None:
    decider = world(1)
    sent(decider, prompt("a", 100))
    decision = sent(decider, prompt("b", 100))
    assert "behind 1 prefill" in explain(decision)
    assert "behind 1 prefills" not in explain(decision)


def test_no_fewer_than_none_stand_before_it_once_it_has_begun_to_answer() -> None:
    decider = world(1)
    first = sent(decider, prompt("a", 100))
    decision = sent(decider, prompt("b", 100))
    for each in (first, decision):
        decider.first_byte(each, 1.0)
    assert "-1" not in explain(decision)


@pytest.mark.parametrize(("promised_s", "late"), [(1.0, False), (0.05, True)])
def test_a_missed_promise_is_said(promised_s: float, *, late: bool) -> None:
    request = prompt("a", 100)
    request.slo_ttft_s = promised_s
    text = explain(sent(world(2), request))
    assert ("later than promised" in text) is late


def test_a_request_without_body_is_explained_too() -> None:
    assert "tokens to compute, nothing before it" in explain(sent(world(2), Request()))


def test_reasons_of_picks_by_cost() -> None:
    decider = world(2)
    warm = sent(decider, prompt("a", 640))
    assert reason_of(warm) is Reason.LOAD
    assert reason_of(sent(decider, prompt("a", 640))) is Reason.PREFIX
    charged(decider.inflight, warm.pick.endpoint, 60.0, now_s=0.0)
    assert reason_of(sent(decider, prompt("a", 640))) is Reason.SPREAD
