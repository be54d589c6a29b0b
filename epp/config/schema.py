"""The configuration file as frozen structs: every key, default, range and unit of its sections.

The layout is the reference EPP's `EndpointPickerConfig`; `limits` is ours. What a plugin takes as
`parameters` stands with the plugin: scheduling plugins in `epp.core.registry`, all others in
`epp.config.parameters`. docs/configuration.md is made from these docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from epp.config.units import Quantity, Seconds

API_VERSION: Final = "llm-d.ai/v1alpha1"
API_VERSION_OLD: Final = "inference.networking.x-k8s.io/v1alpha1"
KIND: Final = "EndpointPickerConfig"

Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]
Weight = Annotated[float, Meta(ge=0.0, le=1_000_000.0)]


class Section(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """A mapping of the file: keys in camelCase, unknown keys refused."""


class PluginSpec(Section, frozen=True):
    """One plugin, to be referred to by its name."""

    type: Name
    """Plugin type; see the lists below."""
    name: Annotated[str, Meta(max_length=253)] = ""
    """What `pluginRef` calls it; the type when empty. No two plugins share a name."""
    parameters: dict[str, Any] = {}
    """The plugin's own keys."""


class PluginRef(Section, frozen=True):
    """A reference to a plugin."""

    plugin_ref: Name
    """Name of an entry of `plugins`."""


class ProfilePlugin(Section, frozen=True):
    """A plugin's place in a profile: filters run in the order written, then scorers, then the
    picker."""

    plugin_ref: Name
    """Name of a filter, scorer or picker among `plugins`."""
    weight: Weight | None = None
    """How much a scorer counts beside the others: the total of an endpoint is the sum of weight
    times score, so only the ratios of the weights matter; 0..1000000, 1 when absent, 0 = its scores
    are shown and count nothing. Of no effect, with a notice, for filters and pickers."""


class SchedulingProfile(Section, frozen=True):
    """How an endpoint is chosen: filters drop endpoints, scorers weigh the rest, a picker takes
    one."""

    name: Name
    """Name of the profile."""
    plugins: tuple[ProfilePlugin, ...] = ()
    """Its plugins. Without a picker, the one picker among `plugins` is used, or `max-score-picker`
    when there is none; with several to choose from, name one here."""


class DataLayerSource(Section, frozen=True):
    """Where reports come from and what is read from them."""

    plugin_ref: Name
    """Name of a `metrics-data-source`."""
    extractors: tuple[PluginRef, ...] = ()
    """One `core-metrics-extractor`."""


class DataLayer(Section, frozen=True):
    """What is known of the endpoints, and where from."""

    inject_defaults: bool = True
    """Scrape with default settings when `sources` is empty. false with no sources: nothing is
    scraped, and every endpoint's load stays unknown."""
    sources: Annotated[tuple[DataLayerSource, ...], Meta(max_length=1)] = ()
    """At most one source."""
    discovery: PluginRef | None = None
    """A `file-discovery` plugin that lists the endpoints; absent: they come from the command line
    or from Kubernetes."""
    peer_discovery: PluginRef | None = None
    """Not built here yet: refused. (The reference accepts it and does not read it.)"""
    cross_replica_syncer_plugin_ref: str = ""
    """Not built here yet: refused."""
    cross_replica_sync_interval_s: Seconds | None = msgspec.field(
        default=None, name="crossReplicaSyncInterval"
    )
    """Not built here yet: refused."""


class PriorityBand(Section, frozen=True):
    """Limits and policies of one priority level."""

    priority: int = 0
    """The level; higher goes first. Of no effect in the two templates."""
    max_bytes: Quantity = Quantity(0)
    """Body bytes queued in the band; 0 = 1 GB."""
    max_requests: Quantity = Quantity(0)
    """Requests queued in the band; 0 = 5000."""
    fairness_policy_ref: str = ""
    """Policy that chooses among flows; empty = `global-strict-fairness-policy`."""
    ordering_policy_ref: str = ""
    """Policy that orders a flow; empty = `fcfs-ordering-policy`."""


class SaturationDetector(Section, frozen=True):
    """Which plugin says how full the pool is."""

    plugin_ref: str = ""
    """Name of the detector; empty = `utilization-detector`."""


class FlowControl(Section, frozen=True):
    """Queueing in front of the pool. Checked, but of no effect while the feature gate `flowControl`
    is off, and the gate cannot be switched on here yet."""

    max_bytes: Quantity = Quantity(0)
    """Body bytes queued over all bands; 0 = no limit."""
    max_requests: Quantity = Quantity(0)
    """Requests queued over all bands; 0 = no limit."""
    default_request_ttl_s: Seconds = msgspec.field(default=Seconds(60.0), name="defaultRequestTTL")
    """Longest wait while the pool has endpoints; 0s = no limit."""
    no_endpoint_request_ttl_s: Seconds | None = msgspec.field(
        default=None, name="noEndpointRequestTTL"
    )
    """Longest wait while the pool is empty; 0s = no limit, absent = as `defaultRequestTTL`."""
    default_priority_band: PriorityBand | None = None
    """Template for a priority without a band of its own."""
    default_negative_priority_band: PriorityBand | None = None
    """Template for negative priorities; absent = as `defaultPriorityBand`."""
    priority_bands: tuple[PriorityBand, ...] = ()
    """Bands by priority; no priority twice."""
    usage_limit_policy_plugin_ref: str = ""
    """Policy that limits use by priority; empty = `static-usage-limit-policy`."""
    saturation_detector: SaturationDetector | None = None
    """Absent = `utilization-detector`."""
    enable_eviction: bool = False
    """End running low-priority requests to make room."""


class RequestHandler(Section, frozen=True):
    """Which request bodies are read."""

    parsers: tuple[PluginRef, ...] = ()
    """Parser types or names of parser plugins. A body of an API that no parser here names is not
    read: the request is routed by load alone. Empty: `openai-parser`, `anthropic-parser`,
    `vllmhttp-parser`, `passthrough-parser`. What follows `passthrough-parser` is never asked."""


class BodyBytes(Quantity):
    """1 KiB to 1 GiB."""

    at_least, at_most = 1 << 10, 1 << 30


class HeldBytes(Quantity):
    """1 MiB to 1 TiB."""

    at_least, at_most = 1 << 20, 1 << 40


class ScrapeTimeout(Seconds):
    """10 ms to 60 s."""

    at_least, at_most = 0.01, 60.0


class StaleAfter(Seconds):
    """50 ms to an hour."""

    at_least, at_most = 0.05, 3600.0


class Limits(Section, frozen=True):
    """Bounds of this process. Ours: the reference does not know this section."""

    body_bytes_max: BodyBytes = BodyBytes(64 << 20)
    """Largest request body; a larger one is answered 413."""
    bodies_bytes_max: HeldBytes = HeldBytes(2 << 30)
    """All request bodies that are coming in, together: each is held in memory until it is complete.
    A request whose next piece would exceed this is answered 429."""
    read_bytes_max: BodyBytes = BodyBytes(16 << 20)
    """Largest body that is read; a larger one is routed by load alone, since reading 16 MiB takes
    the event loop some 20 ms."""
    decoded_bytes_max: BodyBytes = BodyBytes(8 << 20)
    """Largest result of decompressing a body to read it; a body that grows beyond is routed by load
    alone. A kilobyte of gzip can hold a megabyte; 16 MiB take some 100 ms."""
    streams_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 20_000
    """Requests handled at once; one more is answered 429. From twice as many on their streams end
    with RESOURCE_EXHAUSTED, of which the gateway makes a 500 or, failing open, a request without a
    pick."""
    chunk_bytes: Annotated[int, Meta(ge=1024, le=65_000)] = 62_000
    """Longest piece in which a body is sent back to the gateway. Some gateways refuse pieces of
    64 KiB."""
    label_values_max: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """Different values of a metric label that comes from requests (model names); later ones are
    counted as `other`, so that clients cannot fill the memory or make the page long: a model's
    series are about 300 lines. The reference's bound is 1000."""
    scrape_concurrency_max: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """Scrapes under way at once."""
    scrape_timeout_s: ScrapeTimeout = msgspec.field(
        default=ScrapeTimeout(1.0), name="scrapeTimeout"
    )
    """Longest wait for one endpoint's metrics; beyond it the scrape has failed."""
    stale_after_s: StaleAfter | None = msgspec.field(default=None, name="staleAfter")
    """Age at which an endpoint's report is no longer believed and its load counts as unknown;
    absent = five scrape intervals, at least 2s."""


class EndpointPickerConfig(Section, frozen=True):
    """The file. `apiVersion` and `kind` are required; everything else has a default."""

    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    """`llm-d.ai/v1alpha1`. The old `inference.networking.x-k8s.io/v1alpha1` is read with a
    notice."""
    kind: Literal["EndpointPickerConfig"]
    """Always `EndpointPickerConfig`."""
    feature_gates: tuple[str, ...] = ()
    """`name`, `name=true` or `name=false`. Known: `flowControl` (default off; on is not built here
    yet) and `haPopulateNonLeaderDatastore` (default on; replicas that stand by follow
    the cluster either way)."""
    plugins: Annotated[tuple[PluginSpec, ...], Meta(max_length=1000)] = ()
    """At most 1000: the plugins that the other sections refer to."""
    scheduling_profiles: tuple[SchedulingProfile, ...] = ()
    """Exactly one profile for now. None: one named `default` that holds every filter, scorer and
    picker of `plugins`, or, when there are none of these either, the built-in profile."""
    data_layer: DataLayer = DataLayer()
    """Discovery and scraping."""
    flow_control: FlowControl | None = None
    """Queueing."""
    request_handler: RequestHandler = RequestHandler()
    """Parsers."""
    saturation_detector: SaturationDetector | None = None
    """Deprecated: use `flowControl.saturationDetector`, which wins when both are set."""
    parser: PluginRef | None = None
    """Deprecated: use `requestHandler.parsers`, which wins when both are set."""
    limits: Limits = Limits()
    """Bounds of this process."""
