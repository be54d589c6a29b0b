"""Names on the wire: headers and metadata keys of the Endpoint Picker Protocol and of llm-d."""

from __future__ import annotations

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
DESTINATION_SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SCORES = "x-gateway-destination-endpoint-scores"
DROP_REASON = "x-llm-d-request-dropped-reason"
SERVED_VERIFIER = "x-conformance-test-served-endpoint"
TEST_SELECTION = "test-epp-endpoint-selection"
REQUEST_TRAILERS = "x-epp-request-trailers"
"""Ours, set on a request that ends in trailers, so that a route can match it. Envoy (1.40) sends
the body of such a request upstream twice if its route has a retry policy: `epp envoy-config` gives
these requests a route without one."""
SLO_TTFT_MS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""A client's promises, milliseconds; the second name is the older one."""
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
MODEL_REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
POOL = "x-llm-d-inference-pool"
"""Ours, as a request header or gRPC metadata: which pool a request is for, where several are
served."""
POOL_KEY = "x-gateway-inference-pool"
"""The same in filter metadata, namespace `envoy.lb`."""
FAIRNESS_ID = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")

LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

NOT_FOR_UPSTREAM = frozenset(
    {
        # Where the request goes: ours to say. The destination itself is overwritten, not removed.
        DESTINATION_SERVED,
        DESTINATION_SUBSET,
        DESTINATION_SCORES,
        DROP_REASON,
        # Where an engine's sidecar would connect to; from a client this is request forgery.
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-data-parallel-host-port",
        # Instructions to the picker.
        *FAIRNESS_ID,
        *OBJECTIVE,
        *MODEL_REWRITE,
        POOL,
        *SLO_TTFT_MS,
        *SLO_TPOT_MS,
        "x-llm-d-video-fps",
        "x-llm-d-video-duration-seconds",
        "x-llm-d-video-resolution",
        TEST_SELECTION,
        REQUEST_TRAILERS,
    }
)
"""Request headers that end here: removed from what goes upstream, whoever sent them."""


def status_of(text: str | None) -> int | None:
    """The HTTP status in `:status`; `None` when there is none or it is no status."""
    if text is None or not text.isascii() or not text.isdigit():
        return None
    status = int(text[:9])
    return status if 100 <= status <= 599 else None
