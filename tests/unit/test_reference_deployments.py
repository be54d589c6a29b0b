"""What the reference EPP's charts start it with: taken here, or refused by name with a remedy.

The arguments and configurations are ours, of the kinds that its charts and samples have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import yaml

from epp.config import load_config, resolve
from epp.core.errors import ConfigError
from epp.edge.health import SERVICES
from epp.flags import BY_NAME, Effect, ServeOptions, parse_flags
from tests.unit.deploying import DEPLOY, flags

POOL = "--pool-name llm --pool-namespace ai --pool-group inference.networking.k8s.io"
COMMON = "--zap-encoder json --config-file /config/default-plugins.yaml"
TAIL = "--grpc-health-port 9003 --tracing=false"


def options(arguments: str) -> ServeOptions:
    return parse_flags(flags(arguments.split()))


# -- arguments -------------------------------------------------------------------------------

TAKEN = {
    "behind a gateway": f"{POOL} {COMMON} {TAIL}",
    "namespace from the environment": f"--pool-name llm {COMMON} {TAIL}",
    "several replicas": f"{POOL} {COMMON} --ha-enable-leader-election {TAIL}",
    "standalone": "--endpoint-selector app=vllm,tier=gpu --endpoint-target-ports 8000,8001 "
    f"{COMMON} {TAIL} --secure-serving=false",
    "metrics open to all": f"{POOL} {COMMON} {TAIL} --metrics-endpoint-auth=false",
    "metrics over TLS": f"{POOL} {COMMON} {TAIL} --metrics-cert-dir=/tls "
    "--metrics-client-ca-file=/tls/ca.crt",
    "a certificate": f"{POOL} {COMMON} {TAIL} --cert-path=/tls --enable-cert-reload=true",
    "the flags of values": f"{POOL} {COMMON} {TAIL} --v=4 --zap-log-level=debug "
    "--refresh-metrics-interval=50ms --metrics-staleness-threshold=2s --drain-timeout=60s "
    "--refresh-prometheus-metrics-interval=5s --grpc-max-recv-msg-size=25MB "
    "--grpc-max-send-msg-size=10MiB --enable-grpc-stream-metrics --emit-endpoint-scores=true "
    "--disable-endpoint-subset-filter=false --allow-experimental-plugins --enable-pprof=false "
    "--health-checking=true --grpc-port=9002 --metrics-port=9090 --tls-min-version=VersionTLS13",
    "without Kubernetes": "--config-file /config/files.yaml --secure-serving=false",
}


@pytest.mark.parametrize("kind", TAKEN)
def test_its_arguments_are_taken(kind: str) -> None:
    taken = options(TAKEN[kind])
    for notice in taken.notices:
        assert "has no effect here" in notice


def test_what_its_arguments_say_is_what_is_done() -> None:
    gateway = options(TAKEN["several replicas"])
    assert (gateway.pool_name, gateway.pool_namespace) == ("llm", "ai")
    assert gateway.ha_enable_leader_election
    assert gateway.metrics_endpoint_auth
    standalone = options(TAKEN["standalone"])
    assert standalone.endpoint_selector == "app=vllm,tier=gpu"
    assert standalone.endpoint_target_ports == "8000,8001"
    assert not standalone.secure_serving


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"{POOL} --tls-cipher-suites=TLS_AES_128_GCM_SHA256", "--tls-cipher-suites is a flag of"),
        (f"{POOL} --endpoint-selector=app=a --endpoint-target-ports=1", "give one"),
        (f"{POOL} --metrics-client-ca-file=/ca.crt", "needs --metrics-cert-dir"),
        (f"{POOL} --v=debug", "--v 'debug' is not a whole number"),
        (f"{POOL} --drain-timeout=30", "--drain-timeout '30' is not a duration"),
        (f"{POOL} --secure-serving=yes", "neither true nor false"),
    ],
)
def test_what_cannot_be_meant_or_is_not_built_is_refused_by_its_name(
    arguments: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        options(arguments)
    assert says in str(caught.value)


def test_no_flag_of_the_reference_is_unknown() -> None:
    """Also those of its charts; the metric-name flags are refused there too."""
    named = {flag for arguments in TAKEN.values() for flag in flags(arguments.split())}
    assert named <= BY_NAME.keys()
    not_built = {name for name, flag in BY_NAME.items() if flag.effect is Effect.NOT_BUILT}
    assert not_built == {"tls-cipher-suites"}


def test_its_probes_are_answered() -> None:
    assert {"liveness", "readiness", "inference-extension", ""} <= set(SERVICES)
    assert "envoy.service.ext_proc.v3.ExternalProcessor" in SERVICES


# -- configurations ------------------------------------------------------------------------


class Sample(NamedTuple):
    """A configuration and what becomes of it."""

    plugins: list[Any]
    profiles: dict[str, dict[str, float | None]]
    """Profile -> plugin -> weight."""
    refused: tuple[str, ...] = ()
    """What the error names, one of them; empty: it is taken."""
    more: Mapping[str, Any] = MappingProxyType({})


def plugin(type_: str, name: str | None = None, **parameters: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": type_}
    if name is not None:
        made["name"] = name
    return made | ({"parameters": parameters} if parameters else {})


def text_of(sample: Sample, api_version: str = "llm-d.ai/v1alpha1") -> str:
    profiles = [
        {
            "name": name,
            "plugins": [
                {"pluginRef": ref} if weight is None else {"pluginRef": ref, "weight": weight}
                for ref, weight in plugins.items()
            ],
        }
        for name, plugins in sample.profiles.items()
    ]
    config = {"apiVersion": api_version, "kind": "EndpointPickerConfig", "plugins": sample.plugins}
    if profiles:
        config["schedulingProfiles"] = profiles
    return yaml.safe_dump({**config, **sample.more}, sort_keys=False)


WEIGHTED = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
SCORERS = [plugin(name) for name in WEIGHTED]
AFFINITY = {"ttftSource": "latencyPredictor", "maxTTFTPenaltyMs": 5000}

SAMPLES = {
    "the charts' default": Sample(SCORERS, {"default": dict(WEIGHTED)}),
    "the performance baseline": Sample(
        [
            *SCORERS,
            plugin("no-hit-lru-scorer"),
            plugin("approx-prefix-cache-producer", maxPrefixTokensToMatch=100_000),
        ],
        {"default": {**WEIGHTED, "no-hit-lru-scorer": 2.0}},
    ),
    "plugins and no profile": Sample([plugin("queue-scorer"), plugin("random-picker")], {}),
    "a profile handler that is named": Sample(
        [*SCORERS, plugin("single-profile-handler"), plugin("max-score-picker")],
        {"default": {**WEIGHTED, "max-score-picker": None}},
    ),
    "parsers": Sample(
        [*SCORERS, plugin("openai-parser"), plugin("anthropic-parser")],
        {"default": dict(WEIGHTED)},
        more={"requestHandler": {"parsers": [{"pluginRef": "openai-parser"}]}},
    ),
    "a metrics source of its own": Sample(
        [
            *SCORERS,
            plugin("metrics-data-source", scheme="https", path="/m", insecureSkipVerify=True),
            plugin("core-metrics-extractor", defaultEngine="sglang"),
        ],
        {"default": dict(WEIGHTED)},
        more={
            "dataLayer": {
                "sources": [
                    {
                        "pluginRef": "metrics-data-source",
                        "extractors": [{"pluginRef": "core-metrics-extractor"}],
                    }
                ]
            }
        },
    ),
    "predicted latency, without its admitter": Sample(
        [
            plugin("predicted-latency-producer"),
            plugin("prefix-cache-affinity-filter", "strict", affinityThreshold=0.99, **AFFINITY),
            plugin("slo-headroom-tier-filter"),
            plugin("prefix-cache-affinity-filter", "loose", affinityThreshold=0.8, **AFFINITY),
            plugin("latency-scorer"),
            plugin("weighted-random-picker"),
        ],
        {
            "default": {
                "strict": None,
                "slo-headroom-tier-filter": None,
                "loose": None,
                "latency-scorer": 1.0,
                "weighted-random-picker": None,
            }
        },
    ),
    "predicted latency": Sample(
        [plugin("latency-scorer"), plugin("latency-slo-admitter")],
        {"default": {"latency-scorer": 1.0}},
        refused=("latency-slo-admitter",),
    ),
    "one role": Sample(
        [plugin("prefix-cache-scorer"), plugin("decode-filter"), plugin("max-score-picker")],
        {"default": {"decode-filter": None, "prefix-cache-scorer": 2.0, "max-score-picker": None}},
    ),
    "prefill and decode apart": Sample(
        [
            plugin("queue-scorer"),
            plugin("prefill-filter"),
            plugin("decode-filter"),
            plugin("prefix-based-pd-decider", nonCachedTokens=16),
            plugin("disagg-profile-handler", deciders={"prefill": "prefix-based-pd-decider"}),
        ],
        {
            "prefill": {"prefill-filter": None, "queue-scorer": 1.0},
            "decode": {"decode-filter": None, "queue-scorer": 1.0},
        },
        refused=("prefix-based-pd-decider", "disagg-profile"),
    ),
    "encoders": Sample(
        [plugin("encode-filter"), plugin("always-disagg-multimodal-decider")],
        {"encode": {"encode-filter": None}},
        refused=("always-disagg-multimodal-decider",),
    ),
    "precise prefixes": Sample(
        [
            plugin("endpoint-notification-source"),
            plugin("precise-prefix-cache-producer"),
            plugin(
                "prefix-cache-scorer", prefixMatchInfoProducerName="precise-prefix-cache-producer"
            ),
        ],
        {"default": {"prefix-cache-scorer": 2.0}},
        refused=("endpoint-notification-source", "precise-prefix-cache-producer"),
    ),
    "a tokenizer beside it": Sample(
        [
            plugin("token-producer", modelName="m", vllm={"url": "http://localhost:8000"}),
            plugin("prefix-cache-scorer"),
        ],
        {"default": {"prefix-cache-scorer": 1.0}},
        refused=("token-producer", "vllm", "modelName"),
    ),
    "flow control": Sample(
        SCORERS,
        {"default": dict(WEIGHTED)},
        refused=("flowControl",),
        more={"featureGates": ["flowControl"]},
    ),
    "a probabilistic admitter": Sample(
        [plugin("random-picker"), plugin("probabilistic-admitter")],
        {"default": {"random-picker": None}},
        refused=("probabilistic-admitter",),
    ),
    "session affinity": Sample(
        [plugin("session-affinity-scorer"), plugin("queue-scorer")],
        {"default": {"session-affinity-scorer": 3.0, "queue-scorer": 1.0}},
        refused=("session-affinity-scorer",),
    ),
    "a typing error": Sample(
        [plugin("queue-scorrer")], {"default": {"queue-scorrer": 1.0}}, refused=("queue-scorer",)
    ),
}


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if not sample.refused])
@pytest.mark.parametrize("group", ["llm-d.ai", "inference.networking.x-k8s.io"])
def test_its_configurations_of_what_is_built_here_are_taken(name: str, group: str) -> None:
    plan = resolve(load_config(text_of(SAMPLES[name], f"{group}/v1alpha1")))
    assert any("llm-d.ai/v1alpha1" in notice for notice in plan.notices) == (group != "llm-d.ai")


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.refused])
def test_a_configuration_of_what_is_not_built_here_is_refused_and_says_what(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(text_of(SAMPLES[name])))
    assert any(word in str(caught.value) for word in SAMPLES[name].refused)
    assert "at `$." in str(caught.value), "the error says where"


def test_the_page_says_of_each_sample_what_becomes_of_it() -> None:
    page = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    for name, sample in SAMPLES.items():
        if name != "a typing error":
            assert f"| {name} | {'refused' if sample.refused else 'taken'} |" in page
