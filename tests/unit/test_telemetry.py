import json
import logging

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.core.model import Load
from epp.core.pool import Members, Scraped
from epp.core.rewrite import RewriteRule, Rewrites, RewriteTarget
from epp.edge.admin import debug_state
from epp.edge.families import DEFINITIONS, Kind
from epp.edge.logs import VERBOSE, JsonFormatter, TextFormatter
from epp.edge.metrics import PIECE_LINES
from epp.edge.telemetry import OTHER, LabelCap, Telemetry
from tests.unit.exchanges import (
    World,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)

SECRET = "the patient's name is Miller"


class Seen:
    """A world whose exchanges are watched by real telemetry."""

    def __init__(self, *, endpoints: int = 2, label_values_max: int = 10) -> None:
        self.world = World(endpoints)
        self.pools = self.world.pools()
        (self.serving,) = self.pools.all
        self.telemetry = Telemetry(
            pools=self.pools,
            clock=lambda: 2.0,
            label_values_max=label_values_max,
            streams_open=lambda: 3,
        )
        self.world.pool.listen(self.telemetry)
        self.world.watched = self.telemetry

    def run(self, data: bytes | None = None, *, status: str = "200", **headers: str):
        exchange = self.world.exchange()
        exchange.receive(request_headers(**headers), 1.0)
        exchange.receive(body(chat(SECRET * 40) if data is None else data), 1.0)
        exchange.settle(1.25)
        if exchange.cause is None:
            answer = response_headers(status, content_type="text/event-stream")
            exchange.receive(answer, 1.1)
            usage = b'{"usage":{"prompt_tokens":300,"completion_tokens":5}}'
            exchange.receive(response_body(b"data: {}\n\n"), 1.5)
            exchange.receive(response_body(b"data: " + usage + b"\n\n", end_of_stream=True), 1.9)
        exchange.settle()
        return exchange

    def text(self) -> str:
        return "".join(self.telemetry.metrics.text())

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


def test_N06_every_metric_of_the_table_is_exported() -> None:
    seen = Seen()
    for endpoint in seen.world.pool.endpoints:
        load = Load(at_s=1.9, waiting=1, running=2, kv_usage_ratio=0.5)
        seen.world.pool.apply(Scraped(endpoint, load), 1.9)
    seen.run(x_llm_d_slo_ttft_ms="1")
    learner = seen.world.decider.forecast.learner
    learner.decoded(0, step_s=0.02, inflight=1, inflight_tokens=100, now_s=1.9)
    seen.run(b"{")
    seen.serving.rewrites = Rewrites((RewriteRule("r", frozenset(), (RewriteTarget("x", 1),)),))
    seen.run()
    seen.telemetry.scraped_page("timeout", 0.5)
    seen.telemetry.connection_fault("ping-flood")
    exported = set()
    for family in text_string_to_metric_families(seen.text()):
        suffix = "_total" if family.type == "counter" else ""
        assert DEFINITIONS[family.name + suffix].kind is Kind(family.type)
        if family.samples:
            exported.add(family.name + suffix)
    of_clusters = {name for name in DEFINITIONS if "kubernetes" in name} | {"epp_leader"}
    assert exported == DEFINITIONS.keys() - of_clusters


def test_a_request_is_counted_with_its_tokens_and_times() -> None:
    seen = Seen()
    seen.run()
    prefix = "llm_d_epp_request"
    assert seen.value(f"{prefix}_total", model_name="m", priority="0") == 1
    assert seen.value(f"{prefix}_input_tokens_sum", model_name="m") == 300
    assert seen.value(f"{prefix}_output_tokens_sum", model_name="m") == 5
    assert seen.value(f"{prefix}_ttft_seconds_sum", streaming="true") == pytest.approx(0.5)
    assert seen.value(f"{prefix}_duration_seconds_sum") == pytest.approx(0.9)
    assert seen.value(f"{prefix}_streaming_tpot_seconds_sum") == pytest.approx(0.1)
    assert seen.value(f"{prefix}_running", model_name="m") == 0
    assert seen.value("llm_d_epp_scheduler_e2e_duration_seconds_sum") == pytest.approx(0.25)


def test_a_running_request_is_a_gauge_until_it_ends() -> None:
    seen = Seen()
    exchange = seen.world.exchange()
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat()), 1.0)
    exchange.settle()
    assert seen.value("llm_d_epp_request_running", model_name="m") == 1
    assert sum_of(seen, "llm_d_epp_inflight_requests") == 1
    exchange.close(2.0)
    assert seen.value("llm_d_epp_request_running", model_name="m") == 0
    assert sum_of(seen, "llm_d_epp_inflight_requests") == 0


def sum_of(seen: Seen, name: str) -> float:
    families = text_string_to_metric_families(seen.text())
    return sum(s.value for f in families for s in f.samples if s.name == name)


def test_an_error_of_the_model_server_is_counted_by_its_real_status_header() -> None:
    seen = Seen()
    seen.run(status="500")
    name = "llm_d_epp_request_error_total"
    assert seen.value(name, error_code="ModelServerError") == 1
    seen.run(b"{")
    assert seen.value(name, error_code="rejected-bad-request") == 1
    assert seen.value("epp_drops_total", reason="rejected-bad-request") == 1


def test_D05_client_chosen_labels_are_capped() -> None:
    seen = Seen(label_values_max=10)
    for n in range(300):
        seen.run(chat(model=f"model-{n}"), x_llm_d_inference_fairness_id=f"tenant-{n % 7}-{n}")
    assert seen.value("llm_d_epp_request_total", model_name=OTHER) >= 250
    samples = [
        s
        for f in text_string_to_metric_families(seen.text())
        for s in f.samples
        if s.name == "llm_d_epp_request_total"
    ]
    assert sum(s.value for s in samples) == 300
    assert len(samples) <= 25
    assert len({s.labels["fairness_id"] for s in samples}) <= 11
    assert seen.value("epp_label_values", label="model_name") == 10


def test_D05_a_long_label_value_is_cut() -> None:
    seen = Seen()
    seen.run(chat(model="m" * 1000), x_llm_d_inference_fairness_id="f" * 60_000)
    seen.run(chat(model="m" * 1000), x_llm_d_inference_fairness_id="f" * 60_000)
    assert max(map(len, seen.text().splitlines())) < 700
    assert seen.value("llm_d_epp_request_total", model_name="m" * 128, fairness_id="f" * 128) == 2


def test_D05_series_by_model_and_endpoint_are_capped_together() -> None:
    seen = Seen(endpoints=40, label_values_max=4)
    for n in range(400):
        seen.run(chat(model=f"model-{n % 4}", text=str(n)))
    attempts = [line for line in seen.text().splitlines() if "scheduler_attempts_total{" in line]
    assert len(attempts) <= 20 * 4 + 40
    assert sum(float(line.rsplit(" ", 1)[1]) for line in attempts) == 400


def test_D05_a_page_of_countless_series_is_written_in_small_pieces() -> None:
    seen = Seen(label_values_max=100)
    for n in range(100):
        seen.run(chat(model=f"model-{n}"))
    pieces = list(seen.telemetry.metrics.text())
    assert sum(piece.count("\n") for piece in pieces) > 20_000
    assert max(piece.count("\n") for piece in pieces) <= PIECE_LINES
    assert seen.value("llm_d_epp_request_duration_seconds_count", model_name="model-99") == 1


def test_a_label_value_is_escaped() -> None:
    seen = Seen()
    odd = 'a\\b"c\nd,e="f"'
    seen.run(chat(model=odd))
    assert seen.value("llm_d_epp_request_total", model_name=odd) == 1


def test_the_buckets_of_a_histogram_add_up() -> None:
    seen = Seen()
    for value in (0.00005, 0.003, 5.0):
        seen.telemetry.loop_lag_s.observe(value)
    buckets = [
        (s.labels["le"], s.value)
        for f in text_string_to_metric_families(seen.text())
        for s in f.samples
        if s.name == "epp_loop_lag_seconds_bucket"
    ]
    assert buckets[0] == ("0.0001", 1)
    assert dict(buckets)["0.005"] == 2
    assert buckets[-1] == ("+Inf", 3)
    assert seen.value("epp_loop_lag_seconds_count") == 3


def test_a_cap_keeps_what_it_knows() -> None:
    cap = LabelCap(2)
    assert [cap(v) for v in ("a", "b", "c", "a", "b", "d")] == ["a", "b", OTHER, "a", "b", OTHER]


def test_series_of_an_endpoint_that_left_are_dropped() -> None:
    seen = Seen(endpoints=1)
    seen.run()
    name = "llm_d_epp_scheduler_attempts_total"
    assert seen.value(name, endpoint_name="10.0.0.1:8000") == 1
    seen.world.pool.apply(Members(()), 2.0)
    assert seen.value(name, endpoint_name="10.0.0.1:8000") is None


def test_an_unknown_load_is_absent_and_not_zero() -> None:
    seen = Seen()
    assert seen.value("llm_d_epp_average_queue_size") is None
    assert seen.value("llm_d_epp_per_endpoint_queue_size") is None
    endpoint = seen.world.pool.endpoints[0]
    seen.world.pool.apply(Scraped(endpoint, Load(at_s=1.9, waiting=4)), 1.9)
    assert seen.value("llm_d_epp_average_queue_size") == 4
    assert seen.value("epp_endpoints", state="unknown") == 1


def test_A27_a_request_id_in_flight_twice_is_counted_and_both_are_charged() -> None:
    seen = Seen()
    first, second = seen.world.exchange(), seen.world.exchange()
    for exchange in (first, second):
        exchange.receive(request_headers(), 1.0)
        exchange.receive(body(chat()), 1.0)
        exchange.settle()
    assert seen.value("epp_repeated_request_ids_total") == 1
    assert seen.world.decider.inflight.requests == 2
    first.close(2.0)
    second.close(2.0)
    seen.run()
    assert seen.value("epp_repeated_request_ids_total") == 1
    assert not seen.telemetry._ids


def test_D06_no_log_line_holds_prompt_text_or_a_header_s_value(caplog) -> None:
    caplog.set_level(1)
    seen = Seen()
    seen.run(authorization="Bearer token-123", cookie="session-456")
    exchange = seen.run(b'{"model": "m", "messages": "' + SECRET.encode())
    seen.telemetry.bug(exchange, RuntimeError("some bug"))
    formatters = (JsonFormatter(), TextFormatter())
    lines = "\n".join(f.format(r) for r in caplog.records for f in formatters)
    assert "picked 10.0.0." in lines
    assert "rejected-bad-request" in lines
    for secret in (SECRET, "Miller", "token-123", "session-456"):
        assert secret not in lines


def test_D06_a_name_from_outside_cannot_forge_a_line_of_the_log(caplog) -> None:
    caplog.set_level(1)
    Seen().run(chat(model="m\n2026-01-01T00:00:00Z INFO forged\x1b[2J\u2028x"))
    for formatter in (JsonFormatter(), TextFormatter()):
        for record in caplog.records:
            line = formatter.format(record)
            assert len(line.splitlines()) == 1
            assert line.isprintable()


def test_O11_a_decision_is_put_into_words_only_when_it_is_logged(monkeypatch, caplog) -> None:
    calls = []
    monkeypatch.setattr("epp.edge.telemetry.explain", lambda d: calls.append(d) or "why")
    caplog.set_level(logging.INFO)
    Seen().run()
    assert not calls
    caplog.set_level(logging.DEBUG)
    Seen().run()
    assert len(calls) == 1


def test_a_json_line_is_one_object_with_its_fields_and_traceback() -> None:
    try:
        raise ValueError("no good")
    except ValueError as error:
        record = logging.getLogger("x").makeRecord(
            "x", VERBOSE, "f", 1, "hello %s", ("you",), (type(error), error, error.__traceback__),
            extra={"fields": {"model": "m", "odd": "\ud800"}},
        )  # fmt: skip
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "hello you"
    assert line["model"] == "m"
    assert "no good" in line["traceback"]


def test_D11_the_debug_state_is_bounded_and_holds_no_prompt() -> None:
    seen = Seen(endpoints=1500)
    seen.run()
    page = debug_state(seen.world.decider, lambda: 2.0)
    text = msgspec.json.encode(page.state).decode()
    assert SECRET not in b"".join(page.blocks).decode()
    state = msgspec.json.decode(text)
    assert SECRET not in text
    assert len(state["endpoints"]) == 1000
    assert state["endpoints_not_listed"] == 500
    assert state["prefix_index"]["held_blocks"] > 0
    assert (
        sum(e["prefix_blocks"] for e in state["endpoints"]) <= state["prefix_index"]["held_blocks"]
    )
