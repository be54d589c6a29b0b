"""Predicted and observed latency as metrics."""

import logging

import pytest

from epp.core.model import EndpointSpec
from epp.core.pool import Members
from tests.unit.exchanges import body, chat, request_headers, response_body, response_headers
from tests.unit.test_telemetry import Seen

PREDICTED = "llm_d_epp_request_predicted"
VIOLATIONS = "llm_d_epp_request_slo_violation_total"
ERRORS = "epp_ttft_prediction_error_ratio"
GAUGES = (
    "epp_endpoint_backlog_seconds",
    "epp_endpoint_prefill_tokens_per_second",
    "epp_endpoint_decode_step_seconds",
    "epp_endpoint_speed_ratio",
)


def start(seen: Seen, text: str = "x" * 4000, **headers: str):
    exchange = seen.world.exchange()
    exchange.receive(request_headers(**headers), 1.0)
    exchange.receive(body(chat(text, stream=True)), 1.0)
    exchange.settle()
    return exchange


def finish(exchange, first_s: float, last_s: float, *, streamed: bool = True, status="200") -> None:
    kind = "text/event-stream" if streamed else "application/json"
    exchange.receive(response_headers(status, content_type=kind), first_s)
    exchange.receive(response_body(b"data: {}\n\n"), first_s)
    usage = b'data: {"usage":{"prompt_tokens":300,"completion_tokens":11}}\n\n'
    exchange.receive(response_body(usage, end_of_stream=True), last_s)
    exchange.settle()


def test_a_decision_counts_what_the_request_can_expect() -> None:
    seen = Seen()
    prefill = start(seen).decision.charge.prefill
    labels = {
        "plugin_name": "predicted-latency-producer",
        "plugin_type": "predicted-latency-producer",
        "model_name": "m",
        "target_model_name": "m",
    }
    assert prefill.ttft_s > 0.05
    assert prefill.tpot_s > 0.005
    assert seen.value(f"{PREDICTED}_ttft_seconds_sum", **labels) == pytest.approx(prefill.ttft_s)
    assert seen.value(f"{PREDICTED}_tpot_seconds_sum", **labels) == pytest.approx(prefill.tpot_s)


def test_nothing_is_predicted_for_a_prompt_that_was_not_read() -> None:
    seen = Seen()
    start(seen, text="")
    exchange = seen.world.exchange()
    exchange.receive(request_headers(end_of_stream=True), 1.0)
    exchange.settle()
    assert seen.value("llm_d_epp_request_total", model_name="") == 1
    assert seen.value(f"{PREDICTED}_ttft_seconds_count", model_name="") is None


def test_the_error_of_a_prediction_is_relative_to_what_was_observed() -> None:
    seen = Seen()
    exchange = start(seen)
    predicted_s = exchange.decision.charge.prefill.ttft_s
    finish(exchange, 1.0 + 2 * predicted_s, 9.0)
    assert seen.value(f"{ERRORS}_count") == 1
    assert seen.value(f"{ERRORS}_sum") == pytest.approx(0.5)


@pytest.mark.parametrize("case", [{"streamed": False}, {"status": "500"}])
def test_a_first_byte_that_is_no_first_token_says_nothing_of_a_prediction(case) -> None:
    seen = Seen()
    finish(start(seen, x_llm_d_slo_ttft_ms="1"), 1.5, 2.0, **case)
    assert seen.value(f"{ERRORS}_count") == 0
    assert not seen.value(VIOLATIONS, type="ttft")


def test_a_request_that_the_gateway_sent_elsewhere_says_nothing_of_a_prediction() -> None:
    seen = Seen()
    exchange = start(seen)
    other = next(e for e in seen.world.pool.endpoints if e is not exchange.decision.pick.endpoint)
    answer = response_headers("200", served=other.address, content_type="text/event-stream")
    exchange.receive(answer, 1.2)
    exchange.receive(response_body(b"data: {}\n\n", end_of_stream=True), 1.3)
    exchange.settle()
    assert seen.value("epp_served_elsewhere_total") == 1
    assert seen.value(f"{ERRORS}_count") == 0


def test_a_broken_promise_is_counted_by_its_type() -> None:
    seen = Seen()
    # 0.5 s to the first token, then 10 tokens in 1 s.
    finish(start(seen, x_llm_d_slo_ttft_ms="499", x_llm_d_slo_tpot_ms="101"), 1.5, 2.5)
    assert seen.value(VIOLATIONS, type="ttft", model_name="m") == 1
    assert seen.value(VIOLATIONS, type="tpot", model_name="m") == 0
    finish(start(seen, x_llm_d_slo_ttft_ms="501", x_llm_d_slo_tpot_ms="99"), 1.5, 2.5)
    finish(start(seen), 1.5, 2.5)
    assert seen.value(VIOLATIONS, type="ttft", model_name="m") == 1
    assert seen.value(VIOLATIONS, type="tpot", model_name="m") == 1


def test_what_is_known_of_an_endpoint_is_a_gauge_until_it_leaves() -> None:
    seen = Seen(endpoints=1)
    at = {"model_server_endpoint": "10.0.0.1:8000"}
    work_s = start(seen).decision.charge.prefill.seconds
    seen.telemetry._clock = lambda: 1.0
    assert seen.value(GAUGES[0], **at) == pytest.approx(work_s)
    assert [seen.value(name, **at) for name in GAUGES[1:]] == [None] * 3, "nothing learned yet"
    learner = seen.world.decider.forecast.learner
    learner.decoded(0, step_s=0.02, inflight=1, inflight_tokens=100, now_s=1.0)
    assert seen.value(GAUGES[1], **at) == pytest.approx(1 / learner.rates(0).token_s)
    assert seen.value(GAUGES[2], **at) > learner.rates(0).step_s
    assert seen.value(GAUGES[3], **at) == pytest.approx(1.0)
    seen.world.pool.apply(Members((EndpointSpec(host="10.0.0.2", port=8000),)), 2.0)
    assert [seen.value(name, **at) for name in GAUGES] == [None] * 4
    assert seen.value(GAUGES[0], model_server_endpoint="10.0.0.2:8000") == 0


def test_the_log_of_a_decision_has_its_terms(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    start(Seen())
    (fields,) = [r.fields for r in caplog.records if r.message.startswith("picked ")]
    assert fields["endpoint"].startswith("10.0.0.")
    assert fields["matched_tokens"] == 0
    assert fields["terms"].keys() == {"prefix-cache-scorer", "active-request-scorer", "total"}
