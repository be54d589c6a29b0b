"""The engines' and the gateways' manifests: valid, and fitting to what the chart makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config import load_config, resolve
from tests.unit.deploying import (
    DEPLOY,
    Document,
    all_problems,
    documents,
    kustomized,
    only,
    problems,
    render,
    values,
)

EXAMPLES = sorted(DEPLOY.glob("vllm/*.yaml")) + sorted(DEPLOY.glob("gateways/*/*.yaml"))
GATEWAYS = sorted(path.name for path in (DEPLOY / "gateways").iterdir() if path.is_dir())


def read(path: Path) -> list[Document]:
    return documents(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_is_what_an_api_server_takes(path: Path) -> None:
    assert all_problems(read(path)) == []


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("config/*.yaml")), ids=name_of)
def test_an_example_configuration_can_be_the_charts(path: Path) -> None:
    text = path.read_text()
    tree = values(
        router__epp__pluginsCustomConfig={"mine.yaml": text},
        router__epp__pluginsConfigFile="mine.yaml",
    )
    (data,) = only(render(tree), "ConfigMap")["data"].values()
    assert data == text
    assert resolve(load_config(data))


# -- engines -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deployment", "data-parallel"])
def test_an_engines_pod_outlives_its_shutdown(name: str) -> None:
    text = (DEPLOY / f"vllm/{name}.yaml").read_text()
    pod = only(documents(text), "Deployment")["spec"]["template"]["spec"]
    found = re.search(r"--shutdown-timeout[= ](\d+)", text)
    assert found
    pre_stop = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop + int(found[1])


def test_the_base_selects_the_example_engines_and_their_port() -> None:
    engines = only(read(DEPLOY / "vllm/deployment.yaml"), "Deployment")["spec"]["template"]
    pool = only(kustomized("base"), "InferencePool")["spec"]
    labels = engines["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["containerPort"] for port in engines["spec"]["containers"][0]["ports"]}
    assert {port["number"] for port in pool["targetPorts"]} <= ports
    service = only(read(DEPLOY / "vllm/service.yaml"), "Service")["spec"]
    assert service["selector"].items() <= labels.items()
    assert service["clusterIP"] == "None", "Envoy is to see each engine"


def test_the_events_of_an_engine_are_configured_in_json() -> None:
    pod = only(read(DEPLOY / "vllm/deployment.yaml"), "Deployment")["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    config = json.loads(env["KV_EVENTS"])
    assert config["enable_kv_cache_events"] is True
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert config["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert config["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
    # Variables are put in only where they stand before.
    order = list(env)
    for used in re.findall(r"\$\((\w+)\)", env["KV_EVENTS"]):
        assert order.index(used) < order.index("KV_EVENTS")


# -- gateways ------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_the_route_of_an_example_is_the_charts(gateway: str) -> None:
    folder = DEPLOY / "gateways" / gateway
    route = only(read(folder / "httproute.yaml"), "HTTPRoute")
    made = render(values(provider__name=gateway, httpRoute__create=True))
    assert route["spec"] == only(made, "HTTPRoute")["spec"]
    named = only(read(folder / "gateway.yaml"), "Gateway")["metadata"]["name"]
    assert route["spec"]["parentRefs"][0]["name"] == named


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_an_example_says_how_to_use_it(gateway: str) -> None:
    text = (DEPLOY / "gateways" / gateway / "README.md").read_text()
    assert f"provider.name={gateway}" in text
    assert f"deploy/gateways/{gateway}/gateway.yaml" in text
    assert "docs/gateways.md" in text


# -- the checks bite -----------------------------------------------------------------------

POOL: Document = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "a"},
    "spec": {
        "selector": {"matchLabels": {"app": "a"}},
        "targetPorts": [{"number": 1}, {"number": 2}],
        "endpointPickerRef": {"name": "a", "port": {"number": 1}, "failureMode": "FailOpen"},
    },
}
ROUTE = DEPLOY / "gateways/istio/httproute.yaml"
POLICY: Document = {
    "apiVersion": "networking.gke.io/v1",
    "kind": "HealthCheckPolicy",
    "metadata": {"name": "a"},
    "spec": {
        "targetRef": {"group": "", "kind": "Service", "name": "a"},
        "default": {"config": {"type": "HTTP", "httpHealthCheck": {"port": 1}}},
    },
}


def changed(document: Document, path: str, value: Any) -> Document:
    """A copy with the value at a path of keys and numbers set, or removed (`None`)."""
    copy: Document = yaml.safe_load(yaml.safe_dump(document))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    node: Any = copy
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.endpointPickerRef.failureMode", "FailClosed"),
        ("spec.targetPorts.1.number", 1),
        ("spec.targetPorts.1.number", 70_000),
        ("spec.selector.matchLabels", {}),
        ("spec.selector.matchExpressions", []),
        ("spec.endpointPickerRef.port", None),
        ("spec.extensionRef", {"name": "a"}),
        ("metadata.name", 7),
    ],
)
def test_a_pool_that_its_crd_would_refuse_is_found(path: str, value: Any) -> None:
    assert problems(POOL) == []
    assert problems(changed(POOL, path, value)) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rules.0.matches.0.path.value", "v1"),
        ("spec.rules.0.timeouts.request", "5 minutes"),
        ("spec.rules.0.backendRefs.0.weights", 1),
        ("spec.rules.0.filters", [{"type": "RequestHeaderModifier"}]),
        ("spec.rules.0.matches.0.headers", [{"name": "a", "value": "1"}] * 2),
    ],
)
def test_a_route_that_its_crd_would_refuse_is_found(path: str, value: Any) -> None:
    (route,) = read(ROUTE)
    assert problems(route) == []
    assert problems(changed(route, path, value)) != []


def test_other_mistakes_are_found_too() -> None:
    assert problems(POLICY) == []
    assert problems(changed(POLICY, "spec.default.config.type", "GRPC")) != []
    (istio,) = read(DEPLOY / "kustomize/overlays/istio/destinationrule.yaml")
    assert problems(istio) == []
    assert problems(changed(istio, "spec.trafficPolicy.tls.mode", "ISTIO_MUTUAL")) != []
    deployment = only(kustomized("base"), "Deployment")
    container = "spec.template.spec.containers.0"
    assert problems(changed(deployment, f"{container}.lifecycle.preStop", {"slep": {}})) != []
    assert problems(changed(deployment, f"{container}.args", [8])) != []
    assert problems(changed(deployment, "spec.replica", 2)) != []
    assert problems({**deployment, "apiVersion": "example.com/v1", "kind": "New"}) != []
