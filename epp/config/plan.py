"""From the file to the plan: defaults filled in, references followed, every rule checked.

`resolve` is the only place that decides what runs. It follows the reference EPP's defaulting rules
(without its map-order surprises) and refuses what is known there but not built here, by name. The
plan also carries the configuration with all of that written out, which loads to the same plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from epp.config.decode import did_you_mean
from epp.config.parameters import (
    ApproxPrefixCacheProducer,
    CoreMetricsExtractor,
    FileDiscovery,
    InflightLoadProducer,
    MetricsDataSource,
    PredictedLatencyProducer,
)
from epp.config.plugins import PARAMETERS, PluginTable, refusal
from epp.config.profiles import build_profile, complete_profile
from epp.config.render import plain
from epp.config.schema import (
    API_VERSION,
    API_VERSION_OLD,
    KIND,
    DataLayer,
    DataLayerSource,
    EndpointPickerConfig,
    FlowControl,
    Limits,
    PluginRef,
    PluginSpec,
    RequestHandler,
)
from epp.config.text import write_yaml
from epp.config.units import shown
from epp.core.decide import BLOCK_TOKENS_MIN, PrefixParams
from epp.core.errors import ConfigError
from epp.core.inflight import InflightParams
from epp.core.model import Api
from epp.core.registry import REFERENCE, Kind
from epp.core.schedule import Profile

FEATURE_GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
"""The reference's feature gates and their defaults."""

DEFAULT_PARSERS = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
FALLBACK_PARSER = "passthrough-parser"
PARSER_APIS = {
    "openai-parser": frozenset(
        (
            Api.CHAT,
            Api.COMPLETIONS,
            Api.RESPONSES,
            Api.CONVERSATIONS,
            Api.EMBEDDINGS,
            Api.IMAGES,
        )
    ),
    "anthropic-parser": frozenset((Api.MESSAGES,)),
    "vllmhttp-parser": frozenset((Api.GENERATE,)),
    FALLBACK_PARSER: frozenset(),
}
"""Which APIs' bodies a parser reads."""

PRODUCERS = {
    "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
    "inFlightLoadProducerName": "inflight-load-producer",
    "latencyPredictionInfoProducerName": "predicted-latency-producer",
}
"""Parameters that name a producer, and the one type there is for each."""

WHOLE_PROMPT_TOKENS = 1 << 31
"""More tokens than any body holds."""


class Plan(msgspec.Struct, frozen=True):
    """What to build and run. Everything is decided; nothing here is optional but where said."""

    profiles: tuple[Profile, ...]
    """Exactly one."""
    prefix: PrefixParams | None
    """`None`: nothing reads prefix matches, so prompts need not be hashed."""
    inflight: InflightParams
    scrape: MetricsDataSource | None
    """`None`: nothing is scraped."""
    metrics: CoreMetricsExtractor
    """How a scraped page is read; its `engine_configs` add to the built-in engines and win over
    them."""
    discovery: FileDiscovery | None
    """`None`: endpoints come from the command line or from Kubernetes."""
    apis: frozenset[Api]
    """APIs whose bodies are read; all others are routed by load alone."""
    served_verifier: bool
    """Tell clients which endpoint served them (`destination-endpoint-served-verifier`)."""
    limits: Limits
    notices: tuple[str, ...]
    """What the user should know, a sentence each: deprecated names, keys without effect."""
    config: EndpointPickerConfig
    """The configuration with everything written out."""


def resolve(config: EndpointPickerConfig | None) -> Plan:
    """Decide what runs.

    Args:
        config: the file as loaded; `None` = no file.
    Raises: ConfigError for what contradicts itself, is unknown, or is not built here yet.
    """
    config = config or EndpointPickerConfig(api_version=API_VERSION, kind=KIND)
    notices: list[str] = []
    gates = _feature_gates(config.feature_gates)
    table = PluginTable(config.plugins, notices)
    profile = complete_profile(config.scheduling_profiles, table, notices)
    runnable = _predicting(build_profile(profile, table, notices), table)
    scraping = _scraping(config.data_layer, table, notices)
    discovery = _discovery(config.data_layer, table)
    parsers = _parsers(config, table, notices)
    prefix, inflight = _producers(runnable, table)
    served_verifier = table.declared("destination-endpoint-served-verifier") is not None
    flow_control = _flow_control(config, notices)
    if config.api_version == API_VERSION_OLD:
        notices.append(
            f"`{API_VERSION_OLD}` is deprecated, use `{API_VERSION}` - at `$.apiVersion`"
        )
    complete = EndpointPickerConfig(
        api_version=API_VERSION,
        kind=KIND,
        feature_gates=tuple(f"{name}={str(on).lower()}" for name, on in gates.items()),
        plugins=tuple(
            PluginSpec(type=p.type, name=p.name, parameters=plain(p.parameters))
            for p in table.used()
        ),
        scheduling_profiles=(profile,),
        data_layer=msgspec.structs.replace(config.data_layer, sources=scraping.sources),
        flow_control=flow_control,
        request_handler=RequestHandler(parsers=tuple(PluginRef(plugin_ref=p) for p in parsers)),
        limits=config.limits,
    )
    return Plan(
        profiles=(runnable,),
        prefix=prefix,
        inflight=inflight,
        scrape=scraping.source,
        metrics=scraping.extractor,
        discovery=discovery,
        apis=frozenset().union(*(PARSER_APIS[type_] for type_ in parsers.values())),
        served_verifier=served_verifier,
        limits=config.limits,
        notices=tuple(notices),
        config=complete,
    )


def effective_yaml(plan: Plan) -> str:
    """The configuration with everything written out, as a file that resolves to the same plan
    (apart from notices about old names, which it no longer uses)."""
    return write_yaml(plain(plan.config))


def _feature_gates(entries: tuple[str, ...]) -> dict[str, bool]:
    gates: dict[str, bool] = {}
    for index, entry in enumerate(entries):
        path = f"$.featureGates[{index}]"
        name, equals, value = entry.partition("=")
        if name not in FEATURE_GATES:
            known = did_you_mean(name, FEATURE_GATES) or f": known are {', '.join(FEATURE_GATES)}"
            raise ConfigError(f"unknown feature gate {shown(name)}{known}", path=path)
        if equals and value not in ("true", "false"):
            raise ConfigError(
                f"feature gate `{name}` is {shown(value)}: write `{name}=true` or `{name}=false`",
                path=path,
            )
        on = value != "false"
        if gates.setdefault(name, on) != on:
            raise ConfigError(f"feature gate `{name}` is both on and off: keep one", path=path)
        if on and name == "flowControl":
            raise ConfigError(
                "feature gate `flowControl` exists in the reference EPP but flow control is not "
                "built here yet: remove it or write `flowControl=false`",
                path=path,
            )
    return {**FEATURE_GATES, **gates}


class _Scraping(NamedTuple):
    sources: tuple[DataLayerSource, ...]
    source: MetricsDataSource | None
    extractor: CoreMetricsExtractor


def _scraping(layer: DataLayer, table: PluginTable, notices: list[str]) -> _Scraping:
    for key, value in (
        ("peerDiscovery", layer.peer_discovery),
        ("crossReplicaSyncerPluginRef", layer.cross_replica_syncer_plugin_ref or None),
        ("crossReplicaSyncInterval", layer.cross_replica_sync_interval_s),
    ):
        if value is not None:
            raise ConfigError(
                f"`{key}` exists in the reference EPP but is not built here yet: remove it; "
                "replicas decide each for itself",
                path=f"$.dataLayer.{key}",
            )
    if layer.sources:
        path = "$.dataLayer.sources[0]"
        section = layer.sources[0]
        source = table.find(section.plugin_ref, Kind.DATA_SOURCE, path=f"{path}.pluginRef")
        if len(section.extractors) != 1:
            raise ConfigError(
                f"a source needs one extractor and has {len(section.extractors)}: refer to one "
                "`core-metrics-extractor`",
                path=path,
            )
        ref = section.extractors[0].plugin_ref
        extractor = table.find(ref, Kind.EXTRACTOR, path=f"{path}.extractors[0].pluginRef")
    elif layer.inject_defaults:
        source = table.use("metrics-data-source")
        extractor = table.use("core-metrics-extractor")
    else:
        notices.append(
            "nothing is scraped, so the load of every endpoint is unknown: add a source or remove "
            "`injectDefaults: false` - at `$.dataLayer.injectDefaults`"
        )
        return _Scraping((), None, CoreMetricsExtractor())
    assert isinstance(source.parameters, MetricsDataSource)
    assert isinstance(extractor.parameters, CoreMetricsExtractor)
    section = DataLayerSource(
        plugin_ref=source.name, extractors=(PluginRef(plugin_ref=extractor.name),)
    )
    return _Scraping((section,), source.parameters, extractor.parameters)


def _discovery(layer: DataLayer, table: PluginTable) -> FileDiscovery | None:
    if layer.discovery is None:
        return None
    path = "$.dataLayer.discovery.pluginRef"
    parameters = table.find(layer.discovery.plugin_ref, Kind.DISCOVERY, path=path).parameters
    assert isinstance(parameters, FileDiscovery)
    return parameters


def _parsers(
    config: EndpointPickerConfig, table: PluginTable, notices: list[str]
) -> dict[str, str]:
    """The parsers asked in turn: name -> type."""
    refs = [
        (parser.plugin_ref, f"$.requestHandler.parsers[{index}].pluginRef")
        for index, parser in enumerate(config.request_handler.parsers)
    ]
    if config.parser is not None:
        notices.append("`parser` is deprecated, use `requestHandler.parsers` - at `$.parser`")
        refs = refs or [(config.parser.plugin_ref, "$.parser.pluginRef")]
    refs = refs or [(type_, "$.requestHandler") for type_ in DEFAULT_PARSERS]
    parsers: dict[str, str] = {}
    for ref, path in refs:
        undeclared = ref in PARSER_APIS and ref not in table
        plugin = table.use(ref) if undeclared else table.find(ref, Kind.PARSER, path=path)
        if FALLBACK_PARSER in parsers.values():
            notices.append(f"`{ref}` stands after `{FALLBACK_PARSER}`, never asked - at `{path}`")
        elif plugin.type in parsers.values():
            notices.append(f"`{ref}` is the second `{plugin.type}`, never asked - at `{path}`")
        else:
            parsers[plugin.name] = plugin.type
    return parsers


def _predicting(profile: Profile, table: PluginTable) -> Profile:
    """The profile with what its plugins are told of predictions."""
    type_ = "predicted-latency-producer"
    producer = table.use(type_) if profile.needs_predictions else table.declared(type_)
    if producer is None:
        return profile
    parameters = producer.parameters
    assert isinstance(parameters, PredictedLatencyProducer)
    # A promise of b times as long is held where it is held by 1/b of the predicted time.
    tpot_ratio = 1 / parameters.slo_buffer_factor if parameters.streaming_mode else 0.0
    return msgspec.structs.replace(
        profile, predicts=parameters.predict_in_produce, tpot_ratio=tpot_ratio
    )


def _producers(profile: Profile, table: PluginTable) -> tuple[PrefixParams | None, InflightParams]:
    _check_producer_names(table)
    scheduling: list[object] = [f.filter for f in profile.filters]
    scheduling += [s.scorer for s in profile.scorers]
    scheduling.append(profile.cost)
    reads_matches = any(hasattr(p, "prefix_match_info_producer_name") for p in scheduling)
    if reads_matches or profile.needs_predictions:
        table.use("approx-prefix-cache-producer")
    table.declared("token-producer")
    prefix = table.declared("approx-prefix-cache-producer")
    inflight = table.use("inflight-load-producer").parameters
    assert isinstance(inflight, InflightLoadProducer)
    return _prefix_params(prefix.parameters) if prefix else None, InflightParams(
        add_estimated_output_tokens=inflight.add_estimated_output_tokens,
        output_ratio=inflight.output_ratio,
        max_estimated_output_tokens=inflight.max_estimated_output_tokens,
    )


def _prefix_params(producer: msgspec.Struct) -> PrefixParams:
    assert isinstance(producer, ApproxPrefixCacheProducer)
    block_tokens = max(BLOCK_TOKENS_MIN, producer.block_size_tokens)
    tokens_max = producer.max_prefix_tokens_to_match
    tokens_max = tokens_max or producer.max_prefix_blocks_to_match * block_tokens
    return PrefixParams(
        auto_tune=producer.auto_tune,
        block_tokens=block_tokens,
        tokens_max=tokens_max or WHOLE_PROMPT_TOKENS,
        endpoint_blocks_max=producer.lru_capacity_per_server,
        blocks_max_total=producer.index_blocks_max,
    )


def _check_producer_names(table: PluginTable) -> None:
    for plugin in table:
        for field in msgspec.structs.fields(plugin.parameters):
            type_ = PRODUCERS.get(field.encode_name)
            name: Any = getattr(plugin.parameters, field.name)
            if type_ is None or not name:
                continue
            producer = table.declared(type_)
            known = producer.name if producer else type_
            path = f"{plugin.path}.parameters.{field.encode_name}"
            if name in REFERENCE and name not in PARAMETERS:
                raise refusal(name, path=path)
            if name != known:
                raise ConfigError(
                    f"no `{type_}` is called {shown(name)}: write `{known}` or remove the key",
                    path=path,
                )


def _flow_control(config: EndpointPickerConfig, notices: list[str]) -> FlowControl | None:
    """The section, checked; the deprecated `saturationDetector` moved into it."""
    flow, detector = config.flow_control, config.saturation_detector
    if detector is not None:
        notices.append(
            "`saturationDetector` is deprecated, use `flowControl.saturationDetector` - at "
            "`$.saturationDetector`"
        )
        _check_policy(detector.plugin_ref, "utilization-detector", "$.saturationDetector.pluginRef")
    if flow is not None:
        _check_flow_control(flow)
    if detector is not None and (flow is None or flow.saturation_detector is None):
        flow = msgspec.structs.replace(flow or FlowControl(), saturation_detector=detector)
    if flow is not None:
        notices.append(
            "flow control is checked but has no effect: the feature gate `flowControl` is off - at "
            "`$.flowControl`"
        )
    return flow


def _check_flow_control(flow: FlowControl) -> None:
    path = "$.flowControl"
    bands = [(band, f"{path}.priorityBands[{i}]") for i, band in enumerate(flow.priority_bands)]
    priorities: set[int] = set()
    for band, where in bands:
        if band.priority in priorities:
            raise ConfigError(
                f"two bands have priority {band.priority}: keep one", path=f"{where}.priority"
            )
        priorities.add(band.priority)
    templates = (
        (flow.default_priority_band, f"{path}.defaultPriorityBand"),
        (flow.default_negative_priority_band, f"{path}.defaultNegativePriorityBand"),
    )
    for template, where in (*bands, *templates):
        if template is not None:
            fairness, ordering = template.fairness_policy_ref, template.ordering_policy_ref
            _check_policy(fairness, "global-strict-fairness-policy", f"{where}.fairnessPolicyRef")
            _check_policy(ordering, "fcfs-ordering-policy", f"{where}.orderingPolicyRef")
    usage_limit = flow.usage_limit_policy_plugin_ref
    _check_policy(usage_limit, "static-usage-limit-policy", f"{path}.usageLimitPolicyPluginRef")
    if flow.saturation_detector is not None:
        where = f"{path}.saturationDetector.pluginRef"
        _check_policy(flow.saturation_detector.plugin_ref, "utilization-detector", where)


def _check_policy(ref: str, default: str, path: str) -> None:
    """A flow-control reference can only mean the default: no other policy can be declared."""
    if ref in ("", default):
        return
    if ref in REFERENCE:
        raise refusal(ref, path=path)
    raise ConfigError(
        f"no plugin is called {shown(ref)}: write `{default}` or remove the key", path=path
    )
