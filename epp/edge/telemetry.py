"""What is seen from outside: counts and logs what exchanges, scrapes and the loop report.

It is an `exchange.Watcher`: called after the answer was handed to the transport, so nothing here
delays a request. Label values that a client chooses (model, fairness id) are capped: after
`label_values_max` distinct ones, new ones are counted as `other`, and a long one is cut. Series of
an endpoint that has left are dropped. Logs carry ids, names, counts and times, never prompt text or
header values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from epp.core.bodies import Bodies
from epp.core.errors import DropReason
from epp.core.exchange import Exchange
from epp.core.explain import explain, reason_of, terms_of
from epp.core.model import Cause, Clock, Endpoint, Usage
from epp.core.serving import Pools
from epp.edge.gauges import INDEXER, pool_gauges
from epp.edge.holding import HoldMetrics, held_s
from epp.edge.latency import LatencyMetrics
from epp.edge.logs import VERBOSE
from epp.edge.metrics import OUR_PREFIX, PREFIX, Counter, Histogram, Metrics, Reading

OTHER = "other"
LABEL_CHARS_MAX = 128
"""Of a label value that a client chooses: it stands on hundreds of lines of the metrics page."""
ATTEMPTS_PER_LABEL_VALUE = 20
"""Series of attempts, by model and endpoint, per label value allowed; further models of an endpoint
are counted as `other`."""

log = logging.getLogger(__name__)


class LabelCap:
    """Keeps the number of distinct values of one label bounded, and their length."""

    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        value = value[:LABEL_CHARS_MAX]
        if value in self._seen:
            return value
        if len(self._seen) >= self._values_max:
            return OTHER
        self._seen.add(value)
        return value

    def __len__(self) -> int:
        return len(self._seen)


class RequestSeries(msgspec.Struct):
    """The series of one combination of request labels, found once and then only added to."""

    labels: tuple[str, str, str, str]
    total: Counter
    duration_s: Histogram
    size_bytes: Histogram
    response_bytes: Histogram
    input_tokens: Histogram
    output_tokens: Histogram
    cached_tokens: Histogram
    ntpot_s: Histogram
    tpot_s: Histogram
    ttft_s: tuple[Histogram, Histogram]
    """Not streamed, streamed."""
    running: int = 0


class _Attempts(NamedTuple):
    """Decisions for one endpoint and model."""

    labels: tuple[str, ...]
    counter: Counter


class Telemetry:
    """Implements `exchange.Watcher` and `pool.PoolListener`.

    Args:
        pools: those whose state is shown.
        label_values_max: distinct values per client-chosen label, and label combinations.
        bodies: the account of unfinished request bodies.
        streams_open: how many streams are open; `None` = do not export `extproc_streams_*`.
        more: further gauges.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        clock: Clock,
        label_values_max: int,
        bodies: Bodies | None = None,
        streams_open: Callable[[], int] | None = None,
        more: Callable[[], Mapping[str, list[Reading]]] = dict,
    ) -> None:
        self._pools, self._clock, self._label_values_max = pools, clock, label_values_max
        self._bodies = bodies or Bodies()
        self._streams_open, self._more = streams_open, more
        self._attempts_max = ATTEMPTS_PER_LABEL_VALUE * label_values_max
        self._models, self._flows = LabelCap(label_values_max), LabelCap(label_values_max)
        self._requests: dict[tuple[str, str, str, int], RequestSeries] = {}
        self._running: dict[Exchange, RequestSeries] = {}
        self._ids: dict[str, int] = {}
        """x-request-id -> requests in flight under it."""
        self.metrics = metrics = Metrics(self._read_gauges)
        self._families = {
            name: metrics.histogram(PREFIX + name)
            for name in (
                "request_duration_seconds",
                "request_size_bytes",
                "response_size_bytes",
                "request_input_tokens",
                "request_output_tokens",
                "request_cached_tokens",
                "request_ntpot_seconds",
                "request_streaming_tpot_seconds",
                "request_ttft_seconds",
            )
        }
        self._total = metrics.counter(f"{PREFIX}request_total")
        self._errors = metrics.counter(f"{PREFIX}request_error_total")
        self._attempts = metrics.counter(f"{PREFIX}scheduler_attempts_total")
        self._attempts_to: dict[Endpoint, dict[str, _Attempts]] = {}
        """Endpoint -> model -> its series."""
        self._attempt_owners: dict[tuple[str, ...], int] = {}
        """Endpoints that count in a series: a pod of several pools is one in each."""
        self._decision_s = metrics.histogram(f"{PREFIX}scheduler_e2e_duration_seconds").series()
        self._hit_ratio = metrics.histogram(f"{PREFIX}prefix_indexer_hit_ratio").series(*INDEXER)
        self._hit_bytes = metrics.histogram(f"{PREFIX}prefix_indexer_hit_bytes").series(*INDEXER)
        self._latency = LatencyMetrics(metrics)
        self._holding = HoldMetrics(metrics)
        self._poll_errors = metrics.counter(f"{PREFIX}datalayer_poll_errors_total")
        self._picks = metrics.counter(f"{OUR_PREFIX}picks_total")
        self._drops = metrics.counter(f"{OUR_PREFIX}drops_total")
        self._rewrites = metrics.counter(f"{PREFIX}model_rewrite_decisions_total")
        self._ignored = metrics.counter(f"{OUR_PREFIX}ignored_messages_total").series()
        self._bugs = metrics.counter(f"{OUR_PREFIX}bugs_total").series()
        self._served_elsewhere = metrics.counter(f"{OUR_PREFIX}served_elsewhere_total").series()
        self._faults = metrics.counter(f"{OUR_PREFIX}connection_faults_total")
        self._repeated = metrics.counter(f"{OUR_PREFIX}repeated_request_ids_total").series()
        self._scrape_s = metrics.histogram(f"{OUR_PREFIX}scrape_duration_seconds").series()
        self.loop_lag_s = metrics.histogram(f"{OUR_PREFIX}loop_lag_seconds").series()
        if streams_open is not None:
            self._stream_s = metrics.histogram(f"{PREFIX}extproc_stream_duration_seconds").series()
            self._streams = metrics.counter(f"{PREFIX}extproc_streams_total")

    # -- exchange.Watcher ------------------------------------------------------------------

    def decided(self, exchange: Exchange) -> None:
        """Count a decision; log it at verbosity 4."""
        decision = exchange.decision
        assert decision is not None
        request, pick = decision.request, decision.pick
        series = self._series(exchange)
        series.total.inc()
        series.running += 1
        series.size_bytes.observe(exchange.body_bytes)
        self._running[exchange] = series
        if exchange.answered_s is not None and exchange.decided_s is not None:
            self._decision_s.observe(exchange.answered_s - exchange.decided_s)
        if request.id:
            others = self._ids.get(request.id, 0)
            self._ids[request.id] = others + 1
            if others:
                self._repeated.inc()
        self._attempts_at(pick.endpoint, series.labels[1]).counter.inc()
        self._picks.series(reason_of(decision).value).inc()
        if request.rewrite:
            self._rewrites.series(request.rewrite, *series.labels[:2]).inc()
        self._latency.decided(decision, series.labels[0])
        self._holding.decided(exchange)
        if request.match.blocks and request.prompt_tokens:
            self._hit_ratio.observe(decision.matched_tokens / request.prompt_tokens)
            self._hit_bytes.observe(decision.matched_tokens * 4)
        if log.isEnabledFor(logging.DEBUG):
            fields = {**_request_fields(exchange), "reason": reason_of(decision).value}
            fields |= {
                "endpoint": pick.endpoint.address,
                "matched_tokens": decision.matched_tokens,
                "terms": terms_of(decision),
            }
            log.debug("picked %s", explain(decision), extra={"fields": fields})

    def _attempts_at(self, endpoint: Endpoint, model: str) -> _Attempts:
        by_model = self._attempts_to.setdefault(endpoint, {})
        found = by_model.get(model)
        if found is None and len(self._attempts) >= self._attempts_max:
            model = OTHER
            found = by_model.get(model)
        if found is None:
            port = str(endpoint.spec.port)
            values = ("success", model, endpoint.name, endpoint.namespace, port)
            found = by_model[model] = _Attempts(values, self._attempts.series(*values))
            self._attempt_owners[values] = self._attempt_owners.get(values, 0) + 1
        return found

    def finished(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        series = self._running.pop(exchange, None)
        if series is not None:
            series.running -= 1
            self._forget_id(exchange)
            self._count_response(exchange, series)
        self._holding.finished(exchange)
        if exchange.drop is not None:
            self._count_drop(exchange, exchange.drop.reason)
        if exchange.ignored_messages:
            self._ignored.inc(exchange.ignored_messages)
        if self._streams_open is not None:
            self._stream_s.observe((exchange.finished_s or 0.0) - exchange.started_s)
            self._streams.series(exchange.cause.value if exchange.cause else "unknown").inc()
        if log.isEnabledFor(VERBOSE):
            log.log(VERBOSE, "request finished", extra={"fields": _summary(exchange)})

    def _forget_id(self, exchange: Exchange) -> None:
        request = exchange.request
        assert request is not None
        left = self._ids.get(request.id, 0) - 1
        if left > 0:
            self._ids[request.id] = left
        else:
            self._ids.pop(request.id, None)

    def _count_response(self, exchange: Exchange, series: RequestSeries) -> None:
        decision = exchange.decision
        assert decision is not None
        status = exchange.status
        if status is not None and status >= 400:
            self._errors.series(*series.labels, "ModelServerError").inc()
        if exchange.served is not None and exchange.served != decision.pick.endpoint.address:
            self._served_elsewhere.inc()
        if exchange.first_byte_s is not None:
            ttft_s = exchange.first_byte_s - exchange.started_s
            series.ttft_s[exchange.response_streaming].observe(ttft_s)
        self._latency.answered(exchange, series.labels[0])
        if exchange.cause is not Cause.NATURAL or exchange.finished_s is None:
            return
        duration_s = exchange.finished_s - exchange.started_s
        series.duration_s.observe(duration_s)
        series.response_bytes.observe(exchange.response_bytes)
        if exchange.usage is not None:
            _count_usage(exchange, exchange.usage.usage, series, duration_s)

    def _count_drop(self, exchange: Exchange, reason: DropReason) -> None:
        self._drops.series(reason.value).inc()
        series = self._series(exchange)
        self._errors.series(*series.labels, reason.value).inc()
        if reason is DropReason.NO_ENDPOINTS:
            self._attempts.series("failure", series.labels[1], "", "", "").inc()

    def _series(self, exchange: Exchange) -> RequestSeries:
        request = exchange.request
        key = ("", "", "", 0)
        if request is not None:
            target = request.target_model or request.model
            key = (request.model, target, request.fairness_id, request.priority)
        found = self._requests.get(key)
        if found is not None:
            return found
        model, target, flow = self._models(key[0]), self._models(key[1]), self._flows(key[2])
        if len(self._requests) >= 2 * self._label_values_max:
            model = target = flow = OTHER
        if (model, target, flow) != key[:3]:
            capped = (model, target, flow, key[3])
            found = self._requests.get(capped)
            if found is None:
                found = self._requests[capped] = self._new_series(*capped)
            return found
        found = self._requests[key] = self._new_series(*key)
        return found

    def _new_series(self, model: str, target: str, flow: str, priority: int) -> RequestSeries:
        labels = (model, target, flow, str(priority))
        one = {name: f.series(*labels) for name, f in self._families.items() if "ttft" not in name}
        ttft = self._families["request_ttft_seconds"]
        return RequestSeries(
            labels=labels,
            total=self._total.series(*labels),
            duration_s=one["request_duration_seconds"],
            size_bytes=one["request_size_bytes"],
            response_bytes=one["response_size_bytes"],
            input_tokens=one["request_input_tokens"],
            output_tokens=one["request_output_tokens"],
            cached_tokens=one["request_cached_tokens"],
            ntpot_s=one["request_ntpot_seconds"],
            tpot_s=one["request_streaming_tpot_seconds"],
            ttft_s=(ttft.series(*labels, "false"), ttft.series(*labels, "true")),
        )

    # -- other reporters -------------------------------------------------------------------

    def scraped_page(self, failure: str | None, seconds: float) -> None:
        """One scrape ended; `failure` is why it failed, `None` if it worked."""
        self._scrape_s.observe(seconds)
        if failure is not None:
            self._poll_errors.series("metrics-data-source", str(failure)).inc()

    def refused(self, reason: DropReason) -> None:
        """A request was refused before there was an exchange for it."""
        self._drops.series(reason.value).inc()

    def connection_fault(self, reason: str) -> None:
        """A connection or stream was refused or closed; `reason` is one of few."""
        self._faults.series(str(reason)).inc()

    def bug(self, exchange: Exchange, error: Exception) -> None:
        """An exception that should not have been: logged with its traceback, once per event."""
        self._bugs.inc()
        log.error(
            "a bug: one request failed in phase %s",
            exchange.phase.name,
            exc_info=error,
            extra={"fields": _request_fields(exchange)},
        )

    # -- pool.PoolListener -----------------------------------------------------------------

    def joined(self, endpoint: Endpoint) -> None:
        log.info("endpoint joined", extra={"fields": {"endpoint": endpoint.address}})

    def left(self, endpoint: Endpoint) -> None:
        log.info("endpoint left", extra={"fields": {"endpoint": endpoint.address}})
        for attempts in self._attempts_to.pop(endpoint, {}).values():
            self._attempt_owners[attempts.labels] -= 1
            if not self._attempt_owners[attempts.labels]:
                del self._attempt_owners[attempts.labels]
                self._attempts.drop(attempts.labels)

    def restarted(self, endpoint: Endpoint) -> None:
        log.info("endpoint restarted", extra={"fields": {"endpoint": endpoint.address}})

    def scraped(self, endpoint: Endpoint) -> None:
        pass

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:
        fields = {"endpoint": endpoint.address, "for_s": for_s, "failures": endpoint.failures}
        log.warning("endpoint ejected: it failed repeatedly", extra={"fields": fields})

    def recovered(self, endpoint: Endpoint) -> None:
        log.info("endpoint recovered", extra={"fields": {"endpoint": endpoint.address}})

    # -- gauges ----------------------------------------------------------------------------

    def _read_gauges(self) -> Mapping[str, Iterable[Reading]]:
        gauges: dict[str, list[Reading]] = {
            f"{PREFIX}request_running": self._running_readings(),
            f"{PREFIX}info": [(("", ""), 1.0)],
            f"{OUR_PREFIX}label_values": [
                (("model_name",), len(self._models)),
                (("fairness_id",), len(self._flows)),
            ],
            f"{OUR_PREFIX}held_body_bytes": [((), self._bodies.held_bytes)],
            f"{OUR_PREFIX}held_body_bytes_max": [((), self._bodies.bytes_max)],
            f"{OUR_PREFIX}label_values_max": [((), self._label_values_max)],
        }
        if self._streams_open is not None:
            gauges[f"{PREFIX}extproc_streams_inflight"] = [((), self._streams_open())]
        return {**gauges, **pool_gauges(self._pools.all, self._clock()), **self._more()}

    def _running_readings(self) -> list[Reading]:
        sums: dict[tuple[str, ...], float] = {}
        for series in self._requests.values():
            sums[series.labels] = sums.get(series.labels, 0) + series.running
        return list(sums.items())


def _count_usage(
    exchange: Exchange, usage: Usage, series: RequestSeries, duration_s: float
) -> None:
    if usage.prompt_tokens is not None:
        series.input_tokens.observe(usage.prompt_tokens)
    if usage.cached_tokens is not None:
        series.cached_tokens.observe(usage.cached_tokens)
    tokens = usage.completion_tokens
    if not tokens:
        return
    series.output_tokens.observe(tokens)
    series.ntpot_s.observe(duration_s / tokens)
    first_s, last_s = exchange.first_byte_s, exchange.last_byte_s
    if exchange.response_streaming and tokens > 1 and first_s is not None and last_s is not None:
        series.tpot_s.observe((last_s - first_s) / (tokens - 1))


def _request_fields(exchange: Exchange) -> dict[str, object]:
    request = exchange.request
    if request is None:
        return {}
    return {"request_id": request.id[:128], "model": request.model[:128], "api": request.api.value}


def _summary(exchange: Exchange) -> dict[str, object]:
    fields = _request_fields(exchange)
    decision = exchange.decision
    if decision is not None:
        fields["endpoint"] = decision.pick.endpoint.address
        fields["matched_tokens"] = decision.matched_tokens
        fields["prompt_tokens"] = decision.request.prompt_tokens
    if exchange.drop is not None:
        fields["drop_reason"] = exchange.drop.reason.value
        fields["status"] = exchange.drop.http_status
    if (seconds := held_s(exchange)) is not None:
        fields["held_s"] = round(seconds, 6)
    if exchange.first_byte_s is not None:
        fields["ttft_s"] = round(exchange.first_byte_s - exchange.started_s, 6)
    if exchange.finished_s is not None:
        fields["duration_s"] = round(exchange.finished_s - exchange.started_s, 6)
    fields.setdefault("status", exchange.status)
    fields["cause"] = exchange.cause.value if exchange.cause else None
    return fields
