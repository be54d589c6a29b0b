"""Parameters of the plugins that do not schedule: producers, scraping, discovery, parsers.

One struct per plugin type; `BUILT` is the table of them. Scheduling plugins carry their parameters
themselves (`epp.core.registry`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from epp.config.schema import Count, Name, Section
from epp.config.units import MetricSpec, Seconds
from epp.core.registry import Kind

SCRAPE_INTERVAL_S_MIN = 0.05
"""Shortest time between two scrapes of an endpoint; the reference's floor too."""

Natural = Annotated[int, Meta(ge=0)]


class SingleProfileHandler(Section, frozen=True):
    """Runs the one profile there is."""


class ApproxPrefixCacheProducer(Section, frozen=True):
    """Remembers which endpoint was sent which prompt and so guesses what its prefix cache holds.
    Made with defaults when a scorer needs it; prompts are not hashed when none does."""

    auto_tune: bool = True
    """Follow the block size and the KV-cache size that the engines report."""
    block_size_tokens: Count = 16
    """Tokens per prefix block where no engine reports one, >= 1. Never less than 64 is used:
    smaller blocks cost memory and time and do not route better."""
    block_size: Count | None = None
    """Deprecated: use `blockSizeTokens`."""
    max_prefix_blocks_to_match: Natural = 2048
    """Leading blocks of a prompt that are looked at when `maxPrefixTokensToMatch` is 0; both 0 =
    the whole prompt."""
    max_prefix_tokens_to_match: Natural = 131_072
    """Leading tokens of a prompt that are looked at; wins over `maxPrefixBlocksToMatch` unless
    0."""
    lru_capacity_per_server: Count = 31_250
    """Blocks remembered of an endpoint that does not report its KV-cache size (with `autoTune:
    false`: of any endpoint), >= 1."""
    index_blocks_max: Count = 2_000_000
    """Blocks remembered over all endpoints together, >= 1; about 100 bytes each. Ours."""

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size_tokens != 16:
            raise ValueError("`blockSize` is the old name of `blockSizeTokens`: keep only the new")


class InflightLoadProducer(Section, frozen=True):
    """Counts the requests and prompt tokens sent to each endpoint and not yet answered. Always
    on: what scrapes say is older."""

    add_estimated_output_tokens: bool = False
    """Count estimated output tokens too, and hold all of a request's tokens until it ends."""
    output_ratio: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.5
    """Estimated output tokens per prompt token."""
    max_estimated_output_tokens: Natural | None = None
    """Bound of the estimate per request; absent = the client's own limit only."""
    prefix_match_info_producer_name: str = ""
    """Producer of the prefix matches that are subtracted; empty = the only one there is."""
    sync_cross_replica_state: bool = True
    """Of no effect: replicas do not exchange state here, nor in the reference as it ships."""


class PredictedLatencyProducer(Section, frozen=True):
    """Predicts the time to the first token and per output token on each endpoint, by rates that are
    learned from the answers; needs no sidecar. Made with defaults when a plugin reads predictions.
    """

    slo_buffer_factor: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
    """Factor of the client's promise per output token before it is compared, above 0. The
    reference also counts the strictest promise among an endpoint's running requests; here only the
    request's own counts."""
    streaming_mode: bool = False
    """Whether the promised time per output token counts; if not, every endpoint holds it."""
    predict_in_produce: bool = True
    """`false`: predict nothing, so that plugins do without."""
    prefix_match_info_producer_name: str = ""
    """Producer of the prefix matches; empty = the only one there is."""
    in_flight_load_producer_name: str = ""
    """Producer of the requests in flight; empty = the only one there is."""
    context_ttl: int | str | None = msgspec.field(default=None, name="contextTTL")
    """Of no effect: what is kept of a request lives as long as its stream."""
    endpoint_role_label: str = ""
    """Of no effect: each endpoint's speed is learned by itself, whatever its role."""
    use_encoder_cache_features: bool = False
    """Of no effect: work on images is not predicted."""
    encoder_cache_match_info_producer_name: str = ""
    """Of no effect, as above."""
    sampling_mean: float | None = None
    """Of no effect, nor in the reference."""
    max_decode_token_samples_for_prediction: int | None = None
    """Of no effect, nor in the reference."""


class TokenProducer(Section, frozen=True):
    """Estimates a prompt's tokens as four bytes each, which is always done. The backends that
    tokenize exactly are not built here yet and are refused."""

    estimate: dict[str, Any] | None = None
    """The estimating backend; takes no keys here yet."""
    model_name: str = ""
    """Not built here yet: refused."""
    vllm: dict[str, Any] | None = None
    """Not built here yet: refused."""
    uds_tokenizer_config: dict[str, Any] | None = None
    """Not built here yet: refused."""


class MetricsDataSource(Section, frozen=True):
    """Scrapes each endpoint's metrics page."""

    scheme: Literal["http", "https"] = "http"
    """`http` or `https`."""
    path: Annotated[str, Meta(max_length=2048)] = "/metrics"
    """Path of the page; white space around it is cut."""
    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    """Port of the page; absent = the endpoint's own."""
    insecure_skip_verify: bool = True
    """Do not verify the endpoint's certificate."""
    ca_cert_path: str = ""
    """PEM file of the authorities to verify with; empty = the system's. Of no effect, with a
    notice, unless `insecureSkipVerify: false`."""
    client_cert_path: str = ""
    """PEM file of our client certificate; empty = none."""
    client_key_path: str = ""
    """PEM file of its key; goes with `clientCertPath`."""
    interval_s: Seconds | None = msgspec.field(default=None, name="interval")
    """Time between two scrapes of an endpoint, at least 50ms (less is raised, with a notice);
    absent = the flag `--refresh-metrics-interval`."""

    def __post_init__(self) -> None:
        if not self.path.strip().startswith("/"):
            raise ValueError(f"`path` must begin with `/`, got `{self.path.strip()}`")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("`clientCertPath` and `clientKeyPath` go together: set both or none")


class CustomMetric(Section, frozen=True):
    """A metric to keep as an attribute of the endpoint."""

    attribute_key: Name
    """Name of the attribute, as `endpoint-attribute-*` plugins ask for it."""
    metric_spec: MetricSpec
    """The metric."""

    def __post_init__(self) -> None:
        if not self.metric_spec:
            raise ValueError("`metricSpec` is empty: name the metric")


class EngineConfig(Section, frozen=True):
    """Which metrics of an engine say what. A metric is written `name` or `name{label=value,...}`;
    empty = not read, so the value stays unknown."""

    name: Name
    """What the endpoint's engine label says. A built-in engine's name replaces all of its
    metrics."""
    queued_requests_spec: MetricSpec = MetricSpec()
    """Requests waiting."""
    running_requests_spec: MetricSpec = MetricSpec()
    """Requests running."""
    kv_usage_spec: MetricSpec = MetricSpec()
    """Part of the KV cache in use, 0..1."""
    lora_spec: MetricSpec = MetricSpec()
    """Info metric with the labels `running_lora_adapters`, `waiting_lora_adapters`, `max_lora`."""
    cache_info_spec: MetricSpec = MetricSpec()
    """Info metric with the two labels below."""
    cache_block_size_label_name: Name = "block_size"
    """Label with the tokens per KV block."""
    cache_num_blocks_label_name: Name = "num_gpu_blocks"
    """Label with the number of KV blocks."""
    cache_block_size_spec: MetricSpec = MetricSpec()
    """Tokens per KV block, where it is a value of its own."""
    cache_num_blocks_spec: MetricSpec = MetricSpec()
    """Number of KV blocks, where it is a value of its own."""
    custom_metrics: tuple[CustomMetric, ...] = ()
    """Further metrics."""

    def __post_init__(self) -> None:
        if self.name == "default":
            raise ValueError("`default` is not an engine's name: set `defaultEngine` instead")
        specs = [v for v in msgspec.structs.astuple(self) if isinstance(v, MetricSpec)]
        if not any(specs) and not self.custom_metrics:
            raise ValueError(f"engine `{self.name}` names no metric: give it at least one")
        keys = [metric.attribute_key for metric in self.custom_metrics]
        if len(set(keys)) != len(keys):
            raise ValueError("two `customMetrics` have the same `attributeKey`: rename one")


ENGINES = ("vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "triton")
"""Engines whose metrics are known without configuration (`epp.wire.exposition`)."""


class CoreMetricsExtractor(Section, frozen=True):
    """Reads an endpoint's load from its metrics page, by engine."""

    default_engine: Name = "vllm"
    """Engine of an endpoint without the label."""
    engine_label_key: Name = "llm-d.ai/engine-type"
    """Label that names an endpoint's engine. With the default, the older
    `inference.networking.k8s.io/engine-type` is looked at next."""
    engine_configs: tuple[EngineConfig, ...] = ()
    """Engines beyond, or instead of, the built-in ones: see below."""

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engine_configs]
        if len(set(names)) != len(names):
            raise ValueError("two `engineConfigs` have the same `name`: merge them")
        known = [*names, *(name for name in ENGINES if name not in names)]
        if self.default_engine not in known:
            raise ValueError(
                f"`defaultEngine` is `{self.default_engine}`, which is no engine known here: "
                f"choose one of {', '.join(known)}, or describe it in `engineConfigs`"
            )


class FileDiscovery(Section, frozen=True):
    """Lists the endpoints in a YAML or JSON file."""

    path: Name
    """The file."""
    watch_file: bool = False
    """Follow changes of the file; a change that cannot be read keeps the endpoints as they
    were."""


class OpenaiParser(Section, frozen=True):
    """Reads OpenAI bodies: chat/completions, completions, embeddings, responses, conversations,
    images/generations."""


class AnthropicParser(Section, frozen=True):
    """Reads Anthropic bodies: messages."""


class VllmhttpParser(Section, frozen=True):
    """Reads vLLM's own inference/v1/generate."""


class PassthroughParser(Section, frozen=True):
    """Reads no body: such requests are routed by load alone."""


class DestinationEndpointServedVerifier(Section, frozen=True):
    """Answers each request with the header `x-conformance-test-served-endpoint`, the endpoint the
    gateway says has served it. For the gateway conformance tests."""


BUILT: Mapping[str, tuple[Kind, type[Section]]] = MappingProxyType(
    {
        "single-profile-handler": (Kind.PROFILE_HANDLER, SingleProfileHandler),
        "approx-prefix-cache-producer": (Kind.PRODUCER, ApproxPrefixCacheProducer),
        "inflight-load-producer": (Kind.PRODUCER, InflightLoadProducer),
        "predicted-latency-producer": (Kind.PRODUCER, PredictedLatencyProducer),
        "token-producer": (Kind.PRODUCER, TokenProducer),
        "metrics-data-source": (Kind.DATA_SOURCE, MetricsDataSource),
        "core-metrics-extractor": (Kind.EXTRACTOR, CoreMetricsExtractor),
        "file-discovery": (Kind.DISCOVERY, FileDiscovery),
        "openai-parser": (Kind.PARSER, OpenaiParser),
        "anthropic-parser": (Kind.PARSER, AnthropicParser),
        "vllmhttp-parser": (Kind.PARSER, VllmhttpParser),
        "passthrough-parser": (Kind.PARSER, PassthroughParser),
        "destination-endpoint-served-verifier": (
            Kind.RESPONSE_HOOK,
            DestinationEndpointServedVerifier,
        ),
    }
)
"""Plugin types built outside `epp.core.registry`: their kind and their parameters."""
