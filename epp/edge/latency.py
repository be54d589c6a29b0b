"""Predicted and observed latency, and what is known of each endpoint's speed, as metrics.

Predictions are those of the pick: what the endpoint that got the request was expected to take for
it, by learned rates. They are compared where the first byte is seen when the first token is there,
that is in streamed answers. Gauges are read from the state when somebody asks, so those of an
endpoint that has left are gone.
"""

from __future__ import annotations

from collections.abc import Mapping

from epp.core.decide import Decider, Decision
from epp.core.exchange import Exchange
from epp.edge.metrics import OUR_PREFIX, PREFIX, Counter, Histogram, Metrics, Reading

PREDICTOR = ("predicted-latency-producer", "predicted-latency-producer")
"""The reference's plugin that predicts, in its metrics; ours is part of the core."""


class _ModelSeries:
    """The series of one model."""

    __slots__ = ("tpot_s", "tpot_violations", "ttft_s", "ttft_violations")

    def __init__(
        self,
        ttft_s: Histogram,
        tpot_s: Histogram,
        ttft_violations: Counter,
        tpot_violations: Counter,
    ) -> None:
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.ttft_violations = ttft_violations
        self.tpot_violations = tpot_violations


class LatencyMetrics:
    """Counts predictions; told of them by `Telemetry`, which caps the models' names."""

    def __init__(self, metrics: Metrics) -> None:
        self._ttft_s = metrics.histogram(f"{PREFIX}request_predicted_ttft_seconds")
        self._tpot_s = metrics.histogram(f"{PREFIX}request_predicted_tpot_seconds")
        self._violations = metrics.counter(f"{PREFIX}request_slo_violation_total")
        self._error_ratio = metrics.histogram(f"{OUR_PREFIX}ttft_prediction_error_ratio").series()
        self._models: dict[str, _ModelSeries] = {}

    def decided(self, decision: Decision, model: str) -> None:
        """Count what the request can expect where it goes; nothing for one whose prompt was not
        read."""
        if decision.request.prompt_tokens:
            series, prefill = self._of(model), decision.charge.prefill
            series.ttft_s.observe(prefill.ttft_s)
            series.tpot_s.observe(prefill.tpot_s)

    def answered(self, exchange: Exchange, model: str) -> None:
        """Compare a finished exchange with what was expected, and with what was promised."""
        decision, first_s = exchange.decision, exchange.first_byte_s
        if decision is None or first_s is None or not exchange.response_streaming:
            return
        if exchange.status is None or exchange.status >= 400:
            return
        self._count_violations(exchange, first_s, model)
        charge = decision.charge
        observed_s = first_s - charge.dispatched_s
        if decision.request.prompt_tokens and not charge.moved and observed_s > 0.0:
            off_s = abs(observed_s - charge.prefill.ttft_s)
            self._error_ratio.observe(off_s / observed_s)

    def _count_violations(self, exchange: Exchange, first_s: float, model: str) -> None:
        request = exchange.request
        assert request is not None
        slo_ttft_s, slo_tpot_s = request.slo_ttft_s, request.slo_tpot_s
        if slo_ttft_s is not None and first_s - exchange.started_s > slo_ttft_s:
            self._of(model).ttft_violations.inc()
        if slo_tpot_s is None or exchange.last_byte_s is None or exchange.usage is None:
            return
        tokens = exchange.usage.usage.completion_tokens or 0
        if tokens > 1 and (exchange.last_byte_s - first_s) / (tokens - 1) > slo_tpot_s:
            self._of(model).tpot_violations.inc()

    def _of(self, model: str) -> _ModelSeries:
        found = self._models.get(model)
        if found is None:
            labels = (*PREDICTOR, model, model)
            found = self._models[model] = _ModelSeries(
                self._ttft_s.series(*labels),
                self._tpot_s.series(*labels),
                self._violations.series(*labels, "ttft"),
                self._violations.series(*labels, "tpot"),
            )
        return found


def latency_gauges(decider: Decider, now_s: float) -> Mapping[str, list[Reading]]:
    """What is known of each endpoint."""
    forecast, learner = decider.forecast, decider.forecast.learner
    backlogs: list[Reading] = []
    speeds: list[Reading] = []
    steps: list[Reading] = []
    ratios: list[Reading] = []
    for endpoint in decider.pool.endpoints:
        labels = (endpoint.address,)
        backlogs.append((labels, forecast.backlog_s(endpoint, now_s)))
        state = learner.state(endpoint.slot)
        if state.learned_s is None:
            continue
        speeds.append((labels, 1 / state.rates.token_s))
        steps.append((labels, forecast.decode_step_s(endpoint)))
        ratios.append((labels, state.speed_ratio))
    return {
        f"{OUR_PREFIX}endpoint_backlog_seconds": backlogs,
        f"{OUR_PREFIX}endpoint_prefill_tokens_per_second": speeds,
        f"{OUR_PREFIX}endpoint_decode_step_seconds": steps,
        f"{OUR_PREFIX}endpoint_speed_ratio": ratios,
    }
