"""Why an endpoint was picked: the sentence, the table, the same for machines."""

from random import Random

import pytest

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.explain import Reason, explain, reason_of, report, table, terms_of
from epp.core.inflight import Inflight
from epp.core.latency.expected import ExpectedLatency
from epp.core.model import Api, EndpointSpec, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Members, Pool
from epp.core.registry import SCORERS
from epp.core.schedule import Profile, WeightedScorer

COST = Profile(
    "default",
    (),
    (),
    MaxScorePicker(),
    # Spelled out, so that better defaults change no text here.
    ExpectedLatency(
        own_weight=1.3,
        inflight_weight=0.07,
        waiting_weight=0.8,
        decode_weight=0.0,
        sharing_weight=0.0,
    ),
)
WEIGHTS = {"prefix-cache-scorer": 3.0, "active-request-scorer": 2.0}
SCORES = Profile(
    "default",
    (),
    tuple(WeightedScorer(name, weight, SCORERS[name]()) for name, weight in WEIGHTS.items()),
    MaxScorePicker(),
)


def decider_of(profile: Profile, endpoints: int = 3) -> Decider:
    pool = Pool(stale_after_s=5.0)
    specs = tuple(EndpointSpec(host=f"10.0.0.{n + 1}", port=8000) for n in range(endpoints))
    pool.apply(Members(specs), 0.0)
    for endpoint in pool.endpoints:
        endpoint.proven = True
    keeper = PrefixKeeper(PrefixParams())
    return Decider(pool=pool, profile=profile, inflight=Inflight(), prefix=keeper, rng=Random(1))


def prompt(tokens: int, head: str = "x", head_tokens: int = 0, **fields) -> Request:
    """A prompt that shares its first `head_tokens` with those of the same head."""
    text = (head * 4 * head_tokens).encode() + b"?" * 4 * (tokens - head_tokens)
    return Request(model="m", api=Api.CHAT, prompts=(text,), prompt_tokens=tokens, **fields)


def send_to(decider: Decider, number: int, request: Request):
    subset = (f"10.0.0.{number}:8000",)
    decision = decider.decide(request, subset=subset, now_s=0.0)
    decider.learn(decision)
    return decision


def warm(decider: Decider):
    """10.0.0.3 holds the head of the next prompt and computes two others."""
    decider.ended(send_to(decider, 3, prompt(7168, "h", 7168)), 0.0)
    send_to(decider, 3, prompt(3000, "i", 3000))
    send_to(decider, 3, prompt(3000, "j", 3000))
    # So that no two cost the same.
    send_to(decider, 2, prompt(100, "k", 100))
    return decider.decide(prompt(8192, "h", 7168), subset=None, now_s=0.0)


def test_a_cost_is_explained_by_what_is_cached_what_waits_and_the_next_best() -> None:
    decision = warm(decider_of(COST))
    assert reason_of(decision) is Reason.PREFIX
    assert explain(decision) == (
        "10.0.0.3:8000: 7168 of 8192 tokens cached, 0.38 s behind 2 prefills, costs 0.59 s; "
        "10.0.0.1:8000 would cost 0.69 s cold"
    )


def test_the_table_of_a_cost() -> None:
    assert table(warm(decider_of(COST))) == (
        "  endpoint       cached tokens  backlog s  work s  decode s  crowd s  cost s\n"
        "* 10.0.0.3:8000           7168     0.3787  0.2007    0.0125   0.0000  0.5918\n"
        "  10.0.0.1:8000              0     0.0000  0.6782    0.0120   0.0000  0.6902\n"
        "  10.0.0.2:8000              0     0.0063  1.1321    0.0241   0.0000  1.1625\n"
    )


def test_who_holds_most_is_named_also_where_it_is_not_the_next_best() -> None:
    decider = decider_of(COST)
    decider.ended(send_to(decider, 3, prompt(4096, "h", 4096)), 0.0)
    for _ in range(4):
        send_to(decider, 3, prompt(8000, "i", 0))
    send_to(decider, 2, prompt(100, "k", 100))
    decision = decider.decide(prompt(8192, "h", 4096), subset=None, now_s=0.0)
    assert reason_of(decision) is Reason.SPREAD
    text = explain(decision)
    assert text.startswith("10.0.0.1:8000: 8192 tokens to compute, nothing before it, costs ")
    second, third = text.split("; ")[1:]
    assert second.startswith("10.0.0.2:8000 would cost ")
    assert second.endswith(" cold, 0.006 s behind 1 prefill")
    assert third.startswith("10.0.0.3:8000 would cost ")
    assert " with 4096 cached, " in third
    assert third.endswith(" behind 4 prefills")


def test_a_promise_that_will_be_broken_and_an_unproven_endpoint_are_said() -> None:
    decider = decider_of(COST, 1)
    (endpoint,) = decider.pool.endpoints
    endpoint.proven = False
    send_to(decider, 1, prompt(1000))
    decision = decider.decide(prompt(8192, slo_ttft_s=0.001), subset=None, now_s=0.0)
    text = explain(decision)
    assert "behind 1 prefill and not proven yet, costs " in text
    assert text.endswith(" s, later than promised; the only candidate")


def test_foreign_requests_count_as_prefills_before_it() -> None:
    decider = decider_of(COST, 1)
    (endpoint,) = decider.pool.endpoints
    send_to(decider, 1, prompt(1000))
    endpoint.foreign_requests = endpoint.foreign_waiting = 2
    decision = decider.decide(prompt(1000), subset=None, now_s=0.0)
    assert " behind 3 prefills, " in explain(decision)


def test_the_table_of_scores() -> None:
    decision = warm(decider_of(SCORES))
    assert table(decision) == (
        "  endpoint       cached tokens  3 x prefix-cache-scorer  2 x active-request-scorer"
        "   total\n"
        "* 10.0.0.3:8000           7168                   0.8750                     0.0000"
        "  2.6250\n"
        "  10.0.0.1:8000              0                   0.0000                     1.0000"
        "  2.0000\n"
        "  10.0.0.2:8000              0                   0.0000                     0.5000"
        "  1.0000\n"
    )
    assert explain(decision).startswith("10.0.0.3:8000 (7168 of 8192 tokens cached, 2 in flight")


def test_the_report_says_what_the_table_says() -> None:
    decision = warm(decider_of(COST))
    found = report(decision)
    assert found["endpoint"] == "10.0.0.3:8000"
    assert found["reason"] == "prefix"
    assert found["sentence"] == explain(decision)
    assert [c["endpoint"] for c in found["candidates"]] == [
        "10.0.0.3:8000",
        "10.0.0.1:8000",
        "10.0.0.2:8000",
    ]
    best = found["candidates"][0]
    assert sum(best["terms"].values()) == pytest.approx(best["total"])
    assert best["terms"].keys() == {"backlog", "work", "decode", "crowd"}
    assert terms_of(decision) == {
        name: round(value, 6) for name, value in {**best["terms"], "total": best["total"]}.items()
    }
