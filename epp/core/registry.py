"""Every plugin's YAML name, in one table per kind: a new plugin is a class and a line here.

The configuration makes an instance with `msgspec.convert(parameters, table[type])`; a bad parameter
is refused with its key. A type in two tables is two classes with the same parameters: what is
declared once acts with an instance of each. `REFERENCE` lists the type names of the reference EPP,
so that a name that exists there but not here is refused as such, not as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from epp.core.filters.attribute import EndpointAttributeFilter
from epp.core.filters.context_length import ContextLengthAware as ContextLengthFilter
from epp.core.filters.headroom import SloHeadroomTierFilter
from epp.core.filters.label_selector import ByLabel, LabelSelectorFilter
from epp.core.filters.prefix_affinity import PrefixCacheAffinityFilter
from epp.core.filters.role import DecodeFilter, EncodeFilter, PrefillFilter
from epp.core.filters.testing import HeaderBasedTestingFilter
from epp.core.filters.utilization import UtilizationFilter
from epp.core.latency.expected import ExpectedLatency
from epp.core.model import Plugin
from epp.core.pickers.chance import RandomPicker, WeightedRandomPicker
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.scorers.attribute import EndpointAttributeScorer
from epp.core.scorers.context_length import ContextLengthAware as ContextLengthScorer
from epp.core.scorers.inflight import ActiveRequestScorer, TokenLoadScorer
from epp.core.scorers.labels import HeaderLabelAffinityScorer
from epp.core.scorers.latency import LatencyScorer
from epp.core.scorers.lora import LoraAffinityScorer
from epp.core.scorers.prefix import NoHitLruScorer, PrefixCacheScorer
from epp.core.scorers.scraped import (
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
)

FILTERS: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "decode-filter": DecodeFilter,
        "prefill-filter": PrefillFilter,
        "encode-filter": EncodeFilter,
        "label-selector-filter": LabelSelectorFilter,
        "by-label-selector": LabelSelectorFilter,
        "by-label": ByLabel,
        "header-based-testing-filter": HeaderBasedTestingFilter,
        "prefix-cache-affinity-filter": PrefixCacheAffinityFilter,
        "slo-headroom-tier-filter": SloHeadroomTierFilter,
        "utilization-filter": UtilizationFilter,
        "endpoint-attribute-filter": EndpointAttributeFilter,
        "context-length-aware": ContextLengthFilter,
    }
)

SCORERS: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "queue-scorer": QueueScorer,
        "running-requests-size-scorer": RunningRequestsSizeScorer,
        "kv-cache-utilization-scorer": KvCacheUtilizationScorer,
        "load-aware-scorer": LoadAwareScorer,
        "active-request-scorer": ActiveRequestScorer,
        "token-load-scorer": TokenLoadScorer,
        "prefix-cache-scorer": PrefixCacheScorer,
        "no-hit-lru-scorer": NoHitLruScorer,
        "lora-affinity-scorer": LoraAffinityScorer,
        "latency-scorer": LatencyScorer,
        "endpoint-attribute-scorer": EndpointAttributeScorer,
        "header-label-affinity-scorer": HeaderLabelAffinityScorer,
        "context-length-aware": ContextLengthScorer,
    }
)

COSTS: Mapping[str, type[Plugin]] = MappingProxyType({"expected-latency": ExpectedLatency})
"""Policies that weigh everything themselves, in place of scorers; ours, not the reference's."""

PICKERS: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "max-score-picker": MaxScorePicker,
        "random-picker": RandomPicker,
        "weighted-random-picker": WeightedRandomPicker,
    }
)


class Kind(StrEnum):
    """What a plugin type of the reference does; the words an error message uses."""

    FILTER = "filter"
    SCORER = "scorer"
    COST = "cost policy"
    PICKER = "picker"
    SCREENER = "screener"
    PROFILE_HANDLER = "profile handler"
    DECIDER = "disaggregation decider"
    PRODUCER = "data producer"
    DATA_SOURCE = "data source"
    EXTRACTOR = "data extractor"
    DISCOVERY = "discovery"
    PARSER = "parser"
    ADMITTER = "admitter"
    SATURATION_DETECTOR = "saturation detector"
    FAIRNESS_POLICY = "fairness policy"
    ORDERING_POLICY = "ordering policy"
    USAGE_LIMIT_POLICY = "usage limit policy"
    EVICTION_FILTER = "eviction filter"
    EVICTION_ORDER_POLICY = "eviction order policy"
    REQUEST_HOOK = "request header hook"
    RESPONSE_HOOK = "response hook"


_REFERENCE_NAMES: Mapping[Kind, str] = {
    Kind.FILTER: """
        label-selector-filter by-label-selector by-label encode-filter decode-filter prefill-filter
        prefix-cache-affinity-filter slo-headroom-tier-filter header-based-testing-filter
        session-affinity-filter endpoint-attribute-filter topology-affinity-filter
        utilization-filter multicluster-session-affinity-filter
    """,
    # `context-length-aware` filters too, when told to.
    Kind.SCORER: """
        queue-scorer running-requests-size-scorer kv-cache-utilization-scorer load-aware-scorer
        active-request-scorer token-load-scorer prefix-cache-scorer no-hit-lru-scorer
        lora-affinity-scorer context-length-aware precise-prefix-cache-scorer
        mm-embeddings-cache-scorer latency-scorer session-affinity-scorer endpoint-attribute-scorer
        topology-affinity-scorer header-label-affinity-scorer multicluster-queue-scorer
        multicluster-kv-cache-utilization-scorer multicluster-prefix-cache-scorer
    """,
    Kind.PICKER: "max-score-picker random-picker weighted-random-picker",
    Kind.SCREENER: "disaggregatedset-rollout-screener",
    Kind.PROFILE_HANDLER: """
        single-profile-handler disagg-profile-handler data-parallel-profile-handler
        header-profile-handler pd-profile-handler disagg-headers-handler prefill-header-handler
    """,
    Kind.DECIDER: """
        always-disagg-pd-decider prefix-based-pd-decider always-disagg-multimodal-decider
    """,
    Kind.PRODUCER: """
        approx-prefix-cache-producer precise-prefix-cache-producer burst-prefix-cache-producer
        inflight-load-producer predicted-latency-producer mm-embeddings-cache-producer
        token-producer tokenizer session-id-producer p2p-source-producer
        multicluster-approx-prefix-cache-producer
    """,
    Kind.DATA_SOURCE: """
        metrics-data-source models-data-source k8s-notification-source endpoint-notification-source
        dcgm-data-source multicluster-metrics-data-source
    """,
    Kind.EXTRACTOR: """
        core-metrics-extractor models-data-extractor topology-extractor dcgm-extractor
        multicluster-metrics-extractor
    """,
    Kind.DISCOVERY: "file-discovery multicluster-file-discovery",
    Kind.PARSER: """
        openai-parser anthropic-parser vllmhttp-parser sglanghttp-parser vllmgrpc-parser
        vertexai-parser passthrough-parser
    """,
    Kind.ADMITTER: "latency-slo-admitter probabilistic-admitter",
    # Both detectors filter too.
    Kind.SATURATION_DETECTOR: "utilization-detector concurrency-detector",
    Kind.FAIRNESS_POLICY: """
        global-strict-fairness-policy round-robin-fairness-policy program-aware-fairness
    """,
    Kind.ORDERING_POLICY: """
        fcfs-ordering-policy edf-ordering-policy slo-deadline-ordering-policy
    """,
    Kind.USAGE_LIMIT_POLICY: """
        static-usage-limit-policy priority-holdback-policy soft-reflective-ceiling-policy
    """,
    Kind.EVICTION_FILTER: "sheddable-eviction-filter",
    Kind.EVICTION_ORDER_POLICY: "priority-then-time-eviction-order-policy",
    Kind.REQUEST_HOOK: "agent-identity",
    Kind.RESPONSE_HOOK: "request-attribute-reporter destination-endpoint-served-verifier",
}

REFERENCE: Mapping[str, Kind] = MappingProxyType(
    {name: kind for kind, names in _REFERENCE_NAMES.items() for name in names.split()}
)
"""Every type name of the reference EPP (llm-d-router 0.10), experimental and deprecated ones too,
and its main kind."""

NOT_BUILT: Mapping[str, Kind] = MappingProxyType(
    {
        name: kind
        for name, kind in REFERENCE.items()
        if kind in (Kind.FILTER, Kind.SCORER, Kind.PICKER)
        and not any(name in table for table in (FILTERS, SCORERS, PICKERS))
    }
)
"""The reference's filters, scorers and pickers that do not exist here."""


class Deprecation(msgspec.Struct, frozen=True):
    """Why a type name should no longer be used."""

    replacement: str
    """Type name to use instead."""
    note: str
    """What to change, one sentence for a warning."""


DEPRECATED: Mapping[str, Deprecation] = MappingProxyType(
    {
        "by-label-selector": Deprecation(
            "label-selector-filter", "Change the type; the parameters stay as they are."
        ),
        "by-label": Deprecation(
            "label-selector-filter",
            "Write label and validValues as a matchExpressions entry with operator In; "
            "there is no one selector for allowsNoLabel with values.",
        ),
        "pd-profile-handler": Deprecation(
            "disagg-profile-handler", "Name the profiles and deciders under profiles and deciders."
        ),
        "disagg-headers-handler": Deprecation(
            "disagg-profile-handler", "Remove it; the profile handler sets the headers itself."
        ),
        "prefill-header-handler": Deprecation(
            "disagg-profile-handler", "Remove it; the profile handler sets the headers itself."
        ),
        "tokenizer": Deprecation("token-producer", "Change the type."),
    }
)
