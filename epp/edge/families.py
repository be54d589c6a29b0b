"""What metrics there are: one table of names, labels, meanings and buckets.

Names that begin with `llm_d_epp_` mean what they mean in the reference EPP; the others are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from epp.core.structs import Frozen

SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
SHORT_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TTFT_SECONDS = tuple(s for s in SECONDS if s <= 120)
NTPOT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
STREAM_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
HOLD_SECONDS = (0.001, 0.005, 0.01, 0.025, *SECONDS[2:25])
# 32778 is the reference's own bound; dashboards compare by it.
TOKENS = (
    *(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778),
    *(65536, 131072, 262144, 524288, 1048576),
)
OUTPUT_TOKENS = TOKENS[:12]
REQUEST_BYTES = tuple(64 * 2**k for k in range(25))
RESPONSE_BYTES = TOKENS[:15]
ERROR_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
RATIOS = tuple(i / 10 for i in range(11))
HIT_BYTES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
PREDICTION_LABELS = ("plugin_name", "plugin_type", "model_name", "target_model_name")
ENDPOINT_LABEL = "model_server_endpoint"
PREFIX = "llm_d_epp_"
"""Of every name that the reference EPP has with the same meaning."""
OUR_PREFIX = "epp_"


class Kind(Enum):
    """What a family is to Prometheus: the word in its `# TYPE` line."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Definition(Frozen, frozen=True):
    """One metric family."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def ours(self) -> bool:
        """The reference EPP has no such metric."""
        return self.name.startswith(OUR_PREFIX)


def _counter(name: str, help: str, *labels: str) -> Definition:  # noqa: A002 - the field's word
    return Definition(name, Kind.COUNTER, labels, help)


def _gauge(name: str, help: str, *labels: str) -> Definition:  # noqa: A002
    return Definition(name, Kind.GAUGE, labels, help)


def _histogram(
    name: str,
    help: str,  # noqa: A002
    buckets: tuple[float, ...],
    *labels: str,
) -> Definition:
    return Definition(name, Kind.HISTOGRAM, labels, help, tuple(float(b) for b in buckets))


_L = REQUEST_LABELS
DEFINITIONS: Mapping[str, Definition] = {
    d.name: d
    for d in (
        _counter(f"{PREFIX}request_total", "Requests that were given an endpoint.", *_L),
        _counter(
            f"{PREFIX}request_error_total",
            "Requests refused by us (error_code = drop reason) or answered 4xx/5xx by the model "
            "server (ModelServerError).",
            *_L,
            "error_code",
        ),
        _histogram(
            f"{PREFIX}request_duration_seconds",
            "From the request's first message to the end of the response.",
            SECONDS,
            *_L,
        ),
        _histogram(f"{PREFIX}request_size_bytes", "Request body.", REQUEST_BYTES, *_L),
        _histogram(f"{PREFIX}response_size_bytes", "Response body.", RESPONSE_BYTES, *_L),
        _histogram(
            f"{PREFIX}request_input_tokens", "Prompt tokens, as the answer says.", TOKENS, *_L
        ),
        _histogram(
            f"{PREFIX}request_output_tokens",
            "Generated tokens, as the answer says.",
            OUTPUT_TOKENS,
            *_L,
        ),
        _histogram(
            f"{PREFIX}request_cached_tokens",
            "Prompt tokens the engine had cached, as the answer says.",
            TOKENS,
            *_L,
        ),
        _gauge(f"{PREFIX}request_running", "Requests with an endpoint and no end yet.", *_L),
        _histogram(
            f"{PREFIX}request_ntpot_seconds",
            "Duration per generated token.",
            NTPOT_SECONDS,
            *_L,
        ),
        _histogram(
            f"{PREFIX}request_ttft_seconds",
            "From the request's first message to the first byte of the response body.",
            TTFT_SECONDS,
            *_L,
            "streaming",
        ),
        _histogram(
            f"{PREFIX}request_streaming_tpot_seconds",
            "Time per token after the first, of streamed responses.",
            TPOT_SECONDS,
            *_L,
        ),
        _histogram(
            f"{PREFIX}scheduler_e2e_duration_seconds",
            "One decision: parse, match, score, pick, charge.",
            SHORT_SECONDS,
        ),
        _counter(
            f"{PREFIX}scheduler_attempts_total",
            "Decisions, by outcome and endpoint.",
            "status",
            "target_model_name",
            "endpoint_name",
            "namespace",
            "port",
        ),
        _gauge(f"{PREFIX}average_kv_cache_utilization", "Mean over fresh endpoints.", "name"),
        _gauge(f"{PREFIX}average_queue_size", "Mean over fresh endpoints.", "name"),
        _gauge(f"{PREFIX}average_running_requests", "Mean over fresh endpoints.", "name"),
        _gauge(f"{PREFIX}std_dev_kv_cache_utilization", "Over fresh endpoints.", "name"),
        _gauge(f"{PREFIX}std_dev_queue_size", "Over fresh endpoints.", "name"),
        _gauge(f"{PREFIX}std_dev_running_requests", "Over fresh endpoints.", "name"),
        _gauge(
            f"{PREFIX}ready_endpoints",
            "Endpoints that may be picked now, also those on probation.",
            "name",
        ),
        _gauge(
            f"{PREFIX}per_endpoint_queue_size",
            "Waiting requests, last scrape; absent when unknown.",
            "name",
            "model_server_endpoint",
        ),
        _gauge(
            f"{PREFIX}inflight_requests",
            "Requests charged to an endpoint and not released.",
            "endpoint_name",
            "namespace",
            "producer_name",
        ),
        _gauge(
            f"{PREFIX}inflight_tokens",
            "Tokens charged to an endpoint and not released.",
            "endpoint_name",
            "namespace",
            "producer_name",
        ),
        _gauge(
            f"{PREFIX}prefix_indexer_size",
            "Distinct prefix blocks remembered.",
            "plugin_name",
            "plugin_type",
        ),
        _histogram(
            f"{PREFIX}prefix_indexer_hit_ratio",
            "Part of a prompt the picked endpoint is thought to hold.",
            RATIOS,
            "plugin_name",
            "plugin_type",
        ),
        _histogram(
            f"{PREFIX}prefix_indexer_hit_bytes",
            "Prompt bytes the picked endpoint is thought to hold.",
            HIT_BYTES,
            "plugin_name",
            "plugin_type",
        ),
        _counter(
            f"{PREFIX}datalayer_poll_errors_total",
            "Failed scrapes; source_type is always metrics-data-source, reason is ours.",
            "source_type",
            "reason",
        ),
        _histogram(
            f"{PREFIX}request_predicted_ttft_seconds",
            "Time to the first token where a request went, as expected at its pick.",
            TTFT_SECONDS,
            *PREDICTION_LABELS,
        ),
        _histogram(
            f"{PREFIX}request_predicted_tpot_seconds",
            "The same per token after the first.",
            TPOT_SECONDS,
            *PREDICTION_LABELS,
        ),
        _counter(
            f"{PREFIX}request_slo_violation_total",
            "Streamed answers later than the client's promise (x-llm-d-slo-ttft-ms, "
            "x-llm-d-slo-tpot-ms), by type: ttft or tpot.",
            *PREDICTION_LABELS,
            "type",
        ),
        _gauge(f"{PREFIX}info", "Always 1.", "commit", "build_ref"),
        _gauge(f"{PREFIX}extproc_streams_inflight", "Open ext_proc streams."),
        _histogram(f"{PREFIX}extproc_stream_duration_seconds", "Life of a stream.", STREAM_SECONDS),
        _counter(f"{PREFIX}extproc_streams_total", "Streams that ended, by cause.", "code"),
        _counter(
            f"{OUR_PREFIX}connection_faults_total",
            "Connections closed and streams refused, by what the peer did wrong or what ran "
            "out. Only the fast transport tells.",
            "reason",
        ),
        _counter(f"{OUR_PREFIX}picks_total", "Decisions by what decided them.", "reason"),
        _counter(f"{OUR_PREFIX}drops_total", "Refused requests.", "reason"),
        _counter(
            f"{PREFIX}model_rewrite_decisions_total",
            "Requests whose model an InferenceModelRewrite chose.",
            "model_rewrite_name",
            "model_name",
            "target_model",
        ),
        _gauge(
            f"{OUR_PREFIX}leader",
            "1 = this replica leads or there is no election, 0 = it stands by.",
        ),
        _gauge(
            f"{OUR_PREFIX}kubernetes_silence_seconds",
            "Time since the API server last said something of these objects.",
            "resource",
        ),
        _gauge(
            f"{OUR_PREFIX}kubernetes_objects",
            "Objects known; of a kind that is not installed none.",
            "resource",
        ),
        _counter(
            f"{OUR_PREFIX}kubernetes_relists_total",
            "Times all these objects were listed anew.",
            "resource",
        ),
        _counter(
            f"{OUR_PREFIX}kubernetes_errors_total",
            "Requests to the API server that failed, and events that could not be used.",
            "resource",
        ),
        _counter(
            f"{OUR_PREFIX}ignored_messages_total",
            "Request messages after the request had ended (a known Envoy fault).",
        ),
        _counter(f"{OUR_PREFIX}bugs_total", "Exceptions that should not have been; see the log."),
        _counter(
            f"{OUR_PREFIX}served_elsewhere_total",
            "Requests the gateway sent to another endpoint than the picked one.",
        ),
        _counter(
            f"{OUR_PREFIX}repeated_request_ids_total",
            "Requests whose x-request-id was already in flight: a client's reuse, or several "
            "picker filters on one route. Each is picked and charged by itself.",
        ),
        _histogram(
            f"{OUR_PREFIX}ttft_prediction_error_ratio",
            "How far the predicted time to the first token was off, divided by the observed one; "
            "streamed answers, from the pick on.",
            ERROR_RATIOS,
        ),
        _gauge(
            f"{OUR_PREFIX}endpoint_backlog_seconds",
            "Prefill work in front of a new request there.",
            ENDPOINT_LABEL,
        ),
        _gauge(
            f"{OUR_PREFIX}endpoint_prefill_tokens_per_second",
            "Learned: prompt tokens computed, without their attention to each other; absent until "
            "something was learned there, as the next two are.",
            ENDPOINT_LABEL,
        ),
        _gauge(
            f"{OUR_PREFIX}endpoint_decode_step_seconds",
            "Learned: one decode step with the requests that are there now.",
            ENDPOINT_LABEL,
        ),
        _gauge(
            f"{OUR_PREFIX}endpoint_speed_ratio",
            "Learned: its prefill speed / the pool's.",
            ENDPOINT_LABEL,
        ),
        _histogram(
            f"{OUR_PREFIX}scrape_duration_seconds", "One scrape of one endpoint.", SHORT_SECONDS
        ),
        _histogram(
            f"{OUR_PREFIX}loop_lag_seconds",
            "How late the event loop was, sampled twice a second.",
            SHORT_SECONDS,
        ),
        _gauge(
            f"{OUR_PREFIX}endpoints",
            "Endpoints: alive (in the pool, reachable or not), of these unknown (no fresh scrape) "
            "and ejected.",
            "state",
        ),
        _gauge(f"{OUR_PREFIX}prefix_held_blocks", "Prefix blocks held, over all endpoints."),
        _gauge(
            f"{OUR_PREFIX}prefix_held_blocks_max", "Bound of epp_prefix_held_blocks (a config key)."
        ),
        _gauge(
            f"{OUR_PREFIX}held_requests",
            "Requests kept until the endpoint they want has room (`hold` of expected-latency).",
        ),
        _histogram(
            f"{OUR_PREFIX}hold_duration_seconds",
            "How long a held request was kept, until it was dispatched (sent to an endpoint), "
            "withdrawn (its client left) or refused.",
            HOLD_SECONDS,
            "outcome",
        ),
        _gauge(f"{OUR_PREFIX}held_body_bytes", "Unfinished request bodies in memory."),
        _gauge(f"{OUR_PREFIX}held_body_bytes_max", "Bound of epp_held_body_bytes (a config key)."),
        _gauge(f"{OUR_PREFIX}label_values", "Distinct label values in use.", "label"),
        _gauge(f"{OUR_PREFIX}label_values_max", "Bound of epp_label_values (a config key)."),
    )
}
