"""Whatever is fed to the learner, its rates stay usable, and good evidence repairs them."""

import math

from hypothesis import example, given, settings, strategies as st

from epp.core.latency.rates import RateLearner, Rates

PRIOR = Rates()
FIELDS = ("token_s", "pair_s", "step_s", "step_request_s", "step_token_s")
SLOTS = 3

seconds = st.one_of(
    st.sampled_from([0.0, -0.0, -1.0, -1e9, 1e-12, 1e9, 5e-324, 1e300]),
    st.floats(-10.0, 100.0, allow_nan=False),
)
counts = st.one_of(st.sampled_from([0, 1, -1, -(10**9), 10**9]), st.integers(-5, 200_000))
slots = st.integers(0, SLOTS - 1)
first_byte = st.tuples(
    st.just("first_byte"), slots, counts, counts, seconds, counts, counts, seconds
)
decoded = st.tuples(
    st.just("decoded"), slots, seconds, counts, counts, seconds, seconds | st.none()
)
histograms = st.tuples(st.just("histograms"), slots, seconds, seconds, counts, seconds)
member = st.tuples(st.sampled_from(["joined", "forget", "restarted"]), slots)
# Mostly evidence: a slot that is forgotten all the time has nothing to get wrong.
events = st.lists(
    st.one_of(first_byte, first_byte, decoded, decoded, histograms, histograms, member),
    max_size=120,
)


def feed(learner: RateLearner, event: tuple) -> None:
    kind, slot, *values = event
    if kind == "first_byte":
        names = (
            *("uncached_tokens", "matched_tokens", "service_s"),
            *("decoding", "decode_tokens", "now_s"),
        )
    elif kind == "decoded":
        names = ("step_s", "inflight", "inflight_tokens", "now_s", "decode_s")
    elif kind == "histograms":
        names = ("prefill_s", "computed_tokens", "prefills", "now_s")
    else:
        names = ()
    getattr(learner, kind)(slot, **dict(zip(names, values, strict=True)))


def check(learner: RateLearner) -> None:
    for slot in range(SLOTS + 1):
        rates = learner.rates(slot)
        for field in FIELDS:
            factor = getattr(rates, field) / getattr(PRIOR, field)
            assert math.isfinite(factor)
            assert 0.999e-3 <= factor <= 1.001e3
        state = learner.state(slot)
        assert math.isfinite(state.speed_ratio)
        assert state.speed_ratio > 0
        assert state.error_ratio is None or 0 <= state.error_ratio <= 10


def heal(learner: RateLearner, prefills: int) -> None:
    """Prefills and answers on engines that are like the prior, one at a time."""
    for number in range(prefills):
        tokens = (500, 8_000, 2_000, 16_000, 1_000)[number % 5]
        now_s = 1e12 + 100.0 * number
        for slot in range(SLOTS):
            learner.first_byte(
                slot,
                uncached_tokens=tokens,
                matched_tokens=0,
                service_s=PRIOR.work_s(tokens, 0)
                + max(1.0, tokens / 8192) * PRIOR.decode_step_s(4, 9_000),
                decoding=4,
                decode_tokens=9_000,
                now_s=now_s,
            )
            learner.decoded(
                slot,
                step_s=PRIOR.decode_step_s(4, 9_000),
                inflight=4,
                inflight_tokens=9_000,
                now_s=now_s + 10,
                decode_s=10.0,
            )


@settings(max_examples=100, deadline=None)
@given(events=events)
@example(events=[("histograms", 2, 0.0, 0.0, 0, 0.0), ("histograms", 2, 0.0, 1e300, 10**9, 0.0)])
@example(events=[("decoded", 1, 1e300, 10**9, 10**9, -5.0, -1e300)] * 2)
@example(events=[("first_byte", 0, 10**9, 10**9, 1e300, 10**9, 10**9, -1e300)] * 40)
@example(events=[("first_byte", 0, 10**9, 10**9, 0.0, 10**9, 10**9, 1e300)] * 40)
def test_any_evidence_leaves_rates_that_can_be_used(events: list[tuple]) -> None:
    learner = RateLearner()
    for event in events:
        feed(learner, event)
        check(learner)


@settings(max_examples=25, deadline=None)
@given(events=events)
def test_good_evidence_repairs_what_garbage_spoiled(events: list[tuple]) -> None:
    learner = RateLearner(work_bias_ratio=1.0)
    for event in events:
        feed(learner, event)
    heal(learner, 100)
    check(learner)
    for slot in range(SLOTS):
        rates = learner.rates(slot)
        for tokens in (2_000, 8_000, 16_000):
            assert 0.85 < rates.work_s(tokens, 0) / PRIOR.work_s(tokens, 0) < 1.15
        assert 0.85 < rates.decode_step_s(4, 9_000) / PRIOR.decode_step_s(4, 9_000) < 1.15


@settings(max_examples=25, deadline=None)
@given(events=events)
def test_the_same_evidence_gives_the_same_rates_and_a_version_that_only_grows(
    events: list[tuple],
) -> None:
    one, other = RateLearner(), RateLearner()
    for event in events:
        before = ([one.rates(slot) for slot in range(SLOTS)], one.version)
        feed(one, event)
        feed(other, event)
        after = [one.rates(slot) for slot in range(SLOTS)]
        assert one.version > before[1] or (one.version == before[1] and after == before[0])
        assert after == [other.rates(slot) for slot in range(SLOTS)]
