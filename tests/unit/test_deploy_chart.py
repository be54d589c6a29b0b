"""The Helm chart: what it renders in every mode and for every gateway, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

import epp
from epp.config import load_config, resolve
from epp.envoy.command import render as envoy_config
from epp.envoy.options import BodyProcessing, EnvoyOptions, Routing
from tests.unit import deploying
from tests.unit.deploying import (
    CHART,
    all_problems,
    at,
    container,
    flags,
    kinds,
    merged,
    notes,
    only,
    pod_of,
    refusal,
    render,
    values,
)

PROVIDERS = ("none", "istio", "gke", "kgateway", "agentgateway", "envoy-ai-gateway")
STANDALONE = {"mode": "standalone"}
EVERYTHING = merged(
    at("router.monitoring.prometheus.enabled", True),
    at("router.monitoring.prometheus.extraLabels.release", "prometheus"),
    at("router.networkPolicy.enabled", True),
    at("router.networkPolicy.gateways", [{"namespaceSelector": {}}]),
    at("router.epp.tls.secretName", "epp-tls"),
    at("router.epp.flags", {"v": 4, "emit-endpoint-scores": True}),
    at("router.epp.env", [{"name": "TZ", "value": "UTC"}]),
    at("router.epp.nodeSelector.pool", "cpu"),
    at("router.epp.tolerations", [{"key": "cpu", "operator": "Exists"}]),
    at("router.epp.priorityClassName", "system-cluster-critical"),
    at("router.epp.volumes", [{"name": "more", "emptyDir": {}}]),
    at("router.epp.volumeMounts", [{"name": "more", "mountPath": "/more"}]),
    at("router.epp.podAnnotations.note", "yes"),
    at("router.epp.podLabels.team", "serving"),
    at("router.epp.serviceAccountAnnotations.note", "yes"),
    at("router.imagePullSecrets", [{"name": "registry"}]),
    at("router.extraServicePorts", [{"name": "more", "port": 1234, "targetPort": 1234}]),
)
REPLICAS = {
    "one replica": {},
    "leader election": at("router.epp.replicas", 3),
    "all serve": merged(at("router.epp.replicas", 3), at("router.epp.ha.leaderElection", False)),
}
BASE = ["ConfigMap", "Deployment", "Role", "RoleBinding", "Service", "ServiceAccount"]


# -- every mode, every gateway ---------------------------------------------------------------


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("provider", [*PROVIDERS, "standalone", "standalone with a pool"])
def test_what_is_rendered_is_what_an_api_server_takes(provider: str, replicas: str) -> None:
    more = at("provider.name", provider)
    if provider.startswith("standalone"):
        more = merged(STANDALONE, at("router.inferencePool.create", "with" in provider))
    if not provider.startswith("standalone"):
        more = merged(more, at("httpRoute.create", True))
    if provider != "standalone":
        objectives = [{"name": "batch", "priority": -10}, {"name": "chat"}]
        more = merged(more, at("router.inferenceObjectives", objectives))
    for extra in ({}, EVERYTHING) if replicas == "leader election" else ({},):
        made = render(values(more, REPLICAS[replicas], extra))
        assert len(made) > len(BASE)
        assert all_problems(made) == []


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_helm_lint_finds_nothing(mode: str) -> None:
    done = deploying.lint(values(EVERYTHING, mode=mode))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_a_gateway_gets_a_pool_and_what_its_product_needs() -> None:
    expected = {
        "none": [],
        "istio": ["DestinationRule"],
        "gke": ["GCPBackendPolicy", "HealthCheckPolicy"],
        "kgateway": [],
        "agentgateway": [],
        "envoy-ai-gateway": [],
    }
    for provider, more in expected.items():
        made = render(values(provider__name=provider))
        assert kinds(made) == sorted([*BASE, "InferencePool", *more])


def test_standalone_needs_no_crd_unless_a_pool_is_asked_for() -> None:
    made = render(values(STANDALONE))
    assert kinds(made) == sorted([*BASE, "ConfigMap"])
    with_pool = render(values(STANDALONE, router__inferencePool__create=True))
    assert kinds(with_pool) == sorted([*BASE, "ConfigMap", "InferencePool"])


def test_the_pool_refers_to_the_service_that_refers_to_the_pods() -> None:
    made = render(values(router__epp__extProcPort=9999))
    reference = only(made, "InferencePool")["spec"]["endpointPickerRef"]
    service = only(made, "Service", reference["name"])
    port = next(p for p in service["spec"]["ports"] if p["port"] == reference["port"]["number"])
    assert port["appProtocol"] == "kubernetes.io/h2c"
    named = {p["name"]: p["containerPort"] for p in container(made)["ports"]}
    assert named[port["targetPort"]] == 9002
    pod = only(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pod.items()
    assert only(made, "Deployment")["spec"]["selector"]["matchLabels"].items() <= pod.items()


def test_engines_that_speak_grpc_are_a_pool_of_h2c() -> None:
    made = render(values(router__modelServers__protocol="grpc"))
    assert only(made, "InferencePool")["spec"]["appProtocol"] == "kubernetes.io/h2c"


def test_an_existing_pool_is_served_without_being_made() -> None:
    tree = {"router": {"inferencePool": {"create": False, "name": "theirs"}}}
    made = render(tree)
    assert "InferencePool" not in kinds(made)
    assert flags(container(made)["args"])["pool-name"] == "theirs"


def test_istio_is_told_to_speak_tls_and_not_to_stop_at_1024_streams() -> None:
    rule = only(render(values(provider__name="istio")), "DestinationRule")["spec"]
    assert rule["host"] == "llm-epp.ai.svc.cluster.local"
    assert rule["trafficPolicy"]["tls"] == {"mode": "SIMPLE", "insecureSkipVerify": True}
    assert rule["trafficPolicy"]["connectionPool"]["http"]["http2MaxRequests"] >= 100_000
    more = at("provider.istio.destinationRule.trafficPolicy.connectionPool.http",
              {"maxRequestsPerConnection": 7})  # fmt: skip
    plain = at("router.epp.flags.secure-serving", False)
    rule = only(render(values(more, plain, provider__name="istio")), "DestinationRule")["spec"]
    assert "tls" not in rule["trafficPolicy"]
    assert rule["trafficPolicy"]["connectionPool"]["http"]["maxRequestsPerConnection"] == 7
    assert rule["trafficPolicy"]["connectionPool"]["http"]["http2MaxRequests"] >= 100_000


def test_gke_is_told_where_health_is_if_it_is_not_where_it_looks() -> None:
    made = render(values(provider__name="gke", router__epp__grpcHealthPort=9103))
    assert all_problems(made) == []
    policy = only(made, "HealthCheckPolicy", "llm-epp")["spec"]
    assert policy["default"]["config"]["grpcHealthCheck"]["port"] == 9103


def test_the_pools_annotations_for_envoy_ai_gateway_are_text() -> None:
    tree = values(
        provider__name="envoy-ai-gateway",
        provider__envoyAIGateway__processingBodyMode="buffered",
        provider__envoyAIGateway__allowModeOverride=True,
        router__inferencePool__annotations={"mine": "kept"},
    )
    assert only(render(tree), "InferencePool")["metadata"]["annotations"] == {
        "aigateway.envoyproxy.io/processing-body-mode": "buffered",
        "aigateway.envoyproxy.io/allow-mode-override": "true",
        "mine": "kept",
    }


# -- the route -----------------------------------------------------------------------------


def test_a_route_leads_everything_to_the_pool() -> None:
    route = only(render(values(httpRoute__create=True)), "HTTPRoute")["spec"]
    (rule,) = route["rules"]
    assert route["parentRefs"][0]["name"] == "inference-gateway"
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llm"}
    ]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["timeouts"] == {"request": "300s"}
    assert "filters" not in rule


def test_a_route_may_match_a_model_and_headers() -> None:
    tree = values(
        httpRoute__create=True,
        httpRoute__baseModel="qwen3-32b",
        httpRoute__headerMatches={"x-tenant": "a"},
        httpRoute__hostnames=["llm.example.com"],
        httpRoute__inferenceGatewayNamespace="gateways",
        provider__name="gke",
    )
    made = render(tree)
    assert all_problems(made) == []
    route = only(made, "HTTPRoute")["spec"]
    matched = {h["name"]: h["value"] for h in route["rules"][0]["matches"][0]["headers"]}
    assert matched == {"X-Gateway-Base-Model-Name": "qwen3-32b", "x-tenant": "a"}
    assert route["parentRefs"][0]["namespace"] == "gateways"
    assert route["hostnames"] == ["llm.example.com"]
    assert "timeouts" not in route["rules"][0], "GKE has GCPBackendPolicy for it"


def test_each_pool_has_a_service_of_its_own_that_leads_to_the_same_pods() -> None:
    """Gateways say by the name they connect to which pool they ask for."""
    tree = values(
        router__inferencePool__additionalNames=["b", "x" * 63, "llm"], provider__name="istio"
    )
    made = render(tree)
    assert all_problems(made) == []
    names = ["llm-epp", "b-epp", "x" * 59 + "-epp"]
    services = {name: only(made, "Service", name)["spec"] for name in names}
    assert kinds(made).count("Service") == len(names)
    for name, spec in services.items():
        assert spec["selector"] == services["llm-epp"]["selector"]
        assert spec["ports"][0] == services["llm-epp"]["ports"][0]
        rule = only(made, "DestinationRule", name)["spec"]
        assert rule["host"] == f"{name}.ai.svc.cluster.local"
        assert rule["trafficPolicy"]["tls"]["insecureSkipVerify"] is True


def test_with_several_pools_the_route_says_which_one_is_meant() -> None:
    tree = values(httpRoute__create=True, router__inferencePool__additionalNames=["b", "c"])
    made = render(tree)
    assert flags(container(made)["args"])["pool-name"] == "llm,b,c"
    (only_filter,) = only(made, "HTTPRoute")["spec"]["rules"][0]["filters"]
    assert only_filter["requestHeaderModifier"]["set"] == [
        {"name": "x-llm-d-inference-pool", "value": "llm"}
    ]
    everything = render(values(router__inferencePool__allInNamespace=True))
    assert flags(container(everything)["args"])["pool-name"] == "*"


# -- the pod -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_nothing_runs_as_root_or_writes_to_its_image(mode: str) -> None:
    made = render(values(mode=mode))
    pod = pod_of(made)
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert len(pod["containers"]) == (2 if mode == "standalone" else 1)
    for each in pod["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    mounts = {mount["mountPath"]: mount["name"] for mount in container(made)["volumeMounts"]}
    assert {"name": mounts["/tmp"], "emptyDir": {}} in pod["volumes"]


def test_liveness_asks_for_liveness_and_readiness_for_readiness() -> None:
    epp_container = container(render(values(router__epp__grpcHealthPort=9103)))
    for probe, service in (("startup", "liveness"), ("liveness",) * 2, ("readiness",) * 2):
        assert epp_container[f"{probe}Probe"]["grpc"] == {"port": 9103, "service": service}
    assert flags(epp_container["args"])["grpc-health-port"] == "9103"


def test_a_pod_is_not_killed_before_its_drain_is_over() -> None:
    made = render(values(router__epp__drainTimeoutSeconds=300, router__epp__preStopSeconds=7))
    assert pod_of(made)["terminationGracePeriodSeconds"] == 317
    assert container(made)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert flags(container(made)["args"])["drain-timeout"] == "300s"
    own = values(router__epp__terminationGracePeriodSeconds=60, router__epp__drainTimeoutSeconds=50)
    assert pod_of(render(own))["terminationGracePeriodSeconds"] == 60
    short = values(router__epp__terminationGracePeriodSeconds=30)
    assert "write at least 35, or null" in refusal(short)


def test_no_pre_stop_is_no_hook() -> None:
    assert "lifecycle" not in container(render(values(router__epp__preStopSeconds=0)))


def test_a_standalone_picker_outlives_its_envoy() -> None:
    made = render(values(STANDALONE, router__proxy__drainSeconds=120))
    envoy_s = container(made, "envoy")["lifecycle"]["preStop"]["sleep"]["seconds"]
    picker_s = int(container(made)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert (envoy_s, picker_s) == (120, 121)
    assert pod_of(made)["terminationGracePeriodSeconds"] == 121 + 30 + 10


def test_a_change_of_the_configuration_restarts_the_picker() -> None:
    def annotations(*trees: dict[str, Any]) -> dict[str, str]:
        made = render(values(STANDALONE, *trees))
        found: dict[str, str] = only(made, "Deployment")["spec"]["template"]["metadata"][
            "annotations"
        ]
        return found

    before = annotations()
    config = annotations(at("router.modelServers.type", "sglang"))
    envoy = annotations(at("router.proxy.retries", 0), at("router.proxy.port", 8082))
    assert config["checksum/config"] != before["checksum/config"]
    assert config["checksum/envoy"] == before["checksum/envoy"]
    assert envoy["checksum/config"] == before["checksum/config"]
    assert envoy["checksum/envoy"] != before["checksum/envoy"]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({}, f"envoy-endpoint-picker:{epp.__version__}"),
        ({"registry": "r.example.com/a", "tag": "7"}, "r.example.com/a/envoy-endpoint-picker:7"),
        ({"tag": "sha256:abc"}, "envoy-endpoint-picker@sha256:abc"),
    ],
)
def test_the_image_is_of_this_version_unless_another_is_named(image: Any, name: str) -> None:
    assert container(render(values(router__epp__image=image)))["image"] == name


def test_the_charts_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == epp.__version__


# -- replicas ------------------------------------------------------------------------------


def test_one_replica_hands_over_to_the_next_before_it_goes() -> None:
    made = render(values())
    strategy = only(made, "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "ha-enable-leader-election" not in flags(container(made)["args"])


def test_a_rollout_does_not_wait_for_a_stand_by_to_become_ready() -> None:
    made = render(values(REPLICAS["leader election"]))
    strategy = only(made, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxUnavailable"] == "100%"
    assert flags(container(made)["args"])["ha-enable-leader-election"] is True


def test_a_budget_never_holds_up_a_drain_for_ever() -> None:
    """With one ready pod of all, or of one, `maxUnavailable: 1` allows no eviction of it."""
    assert "PodDisruptionBudget" not in kinds(render(values()))
    assert "PodDisruptionBudget" not in kinds(render(values(REPLICAS["leader election"])))
    made = render(values(REPLICAS["all serve"]))
    assert only(made, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    off = values(REPLICAS["all serve"], router__epp__podDisruptionBudget__enabled=False)
    assert "PodDisruptionBudget" not in kinds(render(off))


def test_who_installs_several_replicas_is_told_what_they_cost() -> None:
    assert "WARNING" not in notes(values())
    assert "WARNING: 3 replicas that all serve" in notes(values(REPLICAS["all serve"]))
    assert "stand by and are not ready" in notes(values(REPLICAS["leader election"]))


def test_who_installs_is_told_what_does_not_work_by_itself() -> None:
    assert "No HTTPRoute was made" in notes(values())
    assert "does not read failureMode" in notes(values(provider__name="envoy-ai-gateway"))
    assert "class is agentgateway" in notes(values(provider__name="kgateway"))
    assert "refuses all" in notes(values())
    assert "refuses all" not in notes(values(at("router.monitoring.prometheus.enabled", True)))
    assert ":8081" in notes(values(STANDALONE))


# -- flags and configuration -------------------------------------------------------------------


def test_booleans_and_numbers_reach_the_picker_as_they_are() -> None:
    given = {
        "emit-endpoint-scores": False,
        "v": 4,
        "grpc-max-recv-msg-size": 26214400,
        "refresh-metrics-interval": "500ms",
        "secure-serving": "false",
    }
    arguments = container(render(values(router__epp__flags=given)))["args"]
    assert {
        "--emit-endpoint-scores=false",
        "--v=4",
        "--grpc-max-recv-msg-size=26214400",
        "--refresh-metrics-interval=500ms",
        "--secure-serving=false",
    } <= set(arguments)


@pytest.mark.parametrize("tree", [{}, EVERYTHING, at("router.epp.parsers", ["anthropic-parser"])])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm"])
def test_the_configuration_that_the_chart_makes_is_taken(engine: str, tree: Any) -> None:
    made = render(values(tree, router__modelServers__type=engine))
    file = flags(container(made)["args"])["config-file"]
    mount = next(m for m in container(made)["volumeMounts"] if m["name"] == "config")
    text = only(made, "ConfigMap")["data"][str(file).removeprefix(mount["mountPath"] + "/")]
    assert resolve(load_config(text)).notices == ()
    assert f"defaultEngine: {engine}" in text


def test_a_configuration_of_ones_own_goes_through_unchanged() -> None:
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig  # \"{{ x }}\" 'y'\n"
    custom = {"mine.yaml": text, "other.yaml": "a: 1\n"}
    made = render(
        values(router__epp__pluginsCustomConfig=custom, router__epp__pluginsConfigFile="mine.yaml")
    )
    assert only(made, "ConfigMap")["data"] == custom
    assert flags(container(made)["args"])["config-file"] == "/config/mine.yaml"
    as_values = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    data = only(render(values(router__epp__pluginsConfig=as_values)), "ConfigMap")["data"]
    assert yaml.safe_load(data["default-plugins.yaml"]) == as_values


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["a" * 53, "123", "1e3", "true", "a.b"])
def test_any_release_name_gives_valid_names(release: str) -> None:
    tree = values(EVERYTHING, REPLICAS["leader election"], httpRoute__create=True,
                  provider__name="gke")  # fmt: skip
    made = render(tree, release=release)
    assert all_problems(made) == []
    for document in made:
        assert isinstance(document["metadata"]["name"], str)
        for label in document["metadata"]["labels"].values():
            assert len(label) <= 63
    assert len(only(made, "Service")["metadata"]["name"]) <= 63
    assert flags(container(made)["args"])["pool-name"] == release


def test_two_releases_of_a_namespace_share_no_object() -> None:
    tree = values(EVERYTHING, REPLICAS["all serve"])
    names = [
        {(d["kind"], d["metadata"]["name"]) for d in render(tree, release=release)}
        for release in ("a", "b")
    ]
    assert not names[0] & names[1]


def test_the_same_release_in_two_namespaces_shares_no_cluster_wide_object() -> None:
    tree = values(EVERYTHING)
    names = [
        {d["metadata"]["name"] for d in render(tree, namespace=n) if "Cluster" in d["kind"]}
        for n in ("one", "two")
    ]
    assert names[0]
    assert not names[0] & names[1]


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (at("mode", "sidecar"), "'gateway', 'standalone'"),
        (at("inferenceExtension.replicas", 1), "'inferenceExtension' not allowed"),
        (at("router.epp.replica", 2), "'replica' not allowed"),
        (at("router.epp.replicas", "2"), "got string, want integer"),
        (at("router.epp.replicas", 0), "minimum"),
        (at("router.epp.ha.leaderElection", "false"), "got string, want boolean"),
        (at("router.inferencePool.failureMode", "FailClosed"), "'FailOpen', 'FailClose'"),
        (at("router.modelServers.targetPorts", [{"number": 70000}]), "maximum"),
        (at("router.modelServers.targetPorts", [{"number": 1}] * 2), "equal"),
        (at("router.modelServers.targetPorts", []), "minItems"),
        (at("router.tracing.enabled", True), "'tracing' not allowed"),
        (at("provider.name", "nginx"), "'none', 'istio'"),
        (at("router.epp.flags", {"v": [4]}), "got array"),
        (at("router.epp.flags.pool-name", "x"), "use router.inferencePool.name"),
        (at("router.epp.flags.drain-timeout", "60s"), "use router.epp.drainTimeoutSeconds"),
        (at("router.epp.grpcHealthPort", 9002), "is the port of ext_proc"),
        (at("router.proxy.endpoints", ["engines"]), "does not match pattern"),
        (at("httpRoute.requestTimeout", "5 minutes"), "does not match pattern"),
        (at("router.modelServers.matchLabels", {"app": 1}), "got number, want string"),
        (merged(STANDALONE, at("provider.name", "istio")), "is for mode gateway"),
        (merged(STANDALONE, at("httpRoute.create", True)), "is for mode gateway"),
        (
            merged(STANDALONE, at("router.inferenceObjectives", [{"name": "a"}])),
            "needs router.inferencePool.create",
        ),
        (
            merged(STANDALONE, at("router.inferencePool.additionalNames", ["b"])),
            "need router.inferencePool.create",
        ),
        (
            merged(
                at("router.epp.tls.secretName", "a"), at("router.epp.flags.secure-serving", False)
            ),
            "contradicts",
        ),
        (
            merged(
                at("router.epp.pluginsConfig", {"kind": "x"}),
                {"router": {"epp": {"pluginsCustomConfig": {"default-plugins.yaml": "x"}}}},
            ),
            "both say what default-plugins.yaml is",
        ),
        (
            {"router": {"epp": {"pluginsCustomConfig": {"a.yaml": "x" * 1_000_001}}}},
            "a ConfigMap holds 1 MiB",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_be_meant_are_refused(tree: Any, says: str) -> None:
    assert says in refusal(values(tree))


def test_without_the_engines_labels_nothing_is_rendered() -> None:
    assert "matchLabels is needed" in refusal({})
    assert "matchLabels is needed" in refusal(STANDALONE)


def test_every_default_value_is_in_the_schema_and_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    for path in _leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        assert f"| `{'.'.join(path)}` |" in readme
        node = schema
        for key in path:
            node = node["properties"][key]
            if "$ref" in node:
                node = schema["definitions"][node["$ref"].rpartition("/")[2]]


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    leaf = not isinstance(tree, dict) or not tree
    if leaf or path[-1:] in {("requests",), ("limits",), ("podSecurityContext",)}:
        return [path]
    if path[-2:] == ("epp", "securityContext"):
        return [path]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]


# -- the Envoy of standalone mode ----------------------------------------------------------------

LISTEN = {"listen": "0.0.0.0:8081", "admin": "127.0.0.1:19000", "routing": Routing.ORIGINAL_DST}


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ({}, {}),
        (
            merged(
                at("router.proxy.failOpen", False),
                at("router.proxy.messageTimeoutSeconds", 300),
                at("router.epp.flags.secure-serving", False),
            ),
            {"fail_open": False, "message_timeout_s": 300.0, "epp_tls": False},
        ),
        (
            merged(
                at("router.proxy.port", 80),
                at("router.proxy.adminPort", 9901),
                at("router.proxy.requestBody", "buffered"),
                at("router.proxy.responseBody", "none"),
                at("router.proxy.bufferBytes", 1 << 30),
            ),
            {
                "listen": "0.0.0.0:80",
                "admin": "127.0.0.1:9901",
                "request_body": BodyProcessing.BUFFERED,
                "response_body": BodyProcessing.NONE,
                "buffer_bytes": 1 << 30,
            },
        ),
        (
            merged(
                at("router.proxy.endpoints", ["vllm.ai.svc:8000", "[fd00::1]:8001"]),
                at("router.proxy.retries", 5),
                at("router.proxy.responseBody", "streamed"),
            ),
            {
                "endpoints": ("vllm.ai.svc:8000", "[fd00::1]:8001"),
                "routing": Routing.OVERRIDE_HOST,
                "retries": 5,
                "response_body": BodyProcessing.STREAMED,
            },
        ),
        (
            merged(
                at("router.proxy.endpoints", ["vllm.ai.svc:8000"]),
                at("router.proxy.retries", 0),
                at("router.proxy.responseBody", "buffered"),
            ),
            {
                "endpoints": ("vllm.ai.svc:8000",),
                "routing": Routing.OVERRIDE_HOST,
                "retries": 0,
                "response_body": BodyProcessing.BUFFERED,
            },
        ),
    ],
    ids=["defaults", "plain and closed", "buffered", "names and retries", "names, no retries"],
)
def test_the_bootstrap_is_the_one_that_epp_envoy_config_prints(tree: Any, options: Any) -> None:
    made = render(values(STANDALONE, tree))
    config = yaml.safe_load(only(made, "ConfigMap", "llm-epp-envoy")["data"]["envoy.yaml"])
    assert config == yaml.safe_load(envoy_config(EnvoyOptions(**{**LISTEN, **options})))


def test_envoy_reads_the_file_that_is_mounted_and_asks_the_picker_beside_it() -> None:
    made = render(values(STANDALONE, router__proxy__concurrency=3))
    envoy = container(made, "envoy")
    arguments = envoy["args"]
    assert envoy["volumeMounts"][0]["mountPath"] == "/etc/envoy"
    assert arguments[arguments.index("--config-path") + 1] == "/etc/envoy/envoy.yaml"
    assert arguments[arguments.index("--concurrency") + 1] == "3"
    service = {port["name"]: port for port in only(made, "Service")["spec"]["ports"]}
    assert (service["http"]["port"], service["http"]["targetPort"]) == (8081, "http")
    assert flags(container(made)["args"])["endpoint-selector"] == "app=vllm"
    assert flags(container(made)["args"])["endpoint-target-ports"] == "8000"
