"""The kustomize base and overlays make what the chart makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from epp.config import load_config, resolve
from tests.unit.deploying import (
    DEPLOY,
    Document,
    all_problems,
    at,
    kustomized,
    merged,
    only,
    render,
    values,
)

OVERLAYS: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/istio": at("provider.name", "istio"),
    "overlays/gke": at("provider.name", "gke"),
    "overlays/envoy-ai-gateway": at("provider.name", "envoy-ai-gateway"),
    "overlays/leader-election": at("router.epp.replicas", 2),
    "overlays/active-active": merged(
        at("router.epp.replicas", 2), at("router.epp.ha.leaderElection", False)
    ),
    "overlays/monitoring": at("router.monitoring.prometheus.enabled", True),
    "overlays/standalone": at("mode", "standalone"),
}
"""Folder -> the values that make the same."""
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")
HASHED = re.compile(r"^(llm-epp(?:-envoy)?)-[a-z0-9]{10}$")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_it_makes_what_the_chart_makes(folder: str) -> None:
    ours = {_key(document): _plain(document) for document in kustomized(folder)}
    theirs = render(values(OVERLAYS[folder]), namespace="default")
    assert ours == {_key(document): _plain(document) for document in theirs}
    assert all_problems(kustomized(folder)) == []


def test_every_overlay_is_compared() -> None:
    folders = {path.parent for path in DEPLOY.glob("kustomize/**/kustomization.yaml")}
    assert {f.relative_to(DEPLOY / "kustomize").as_posix() for f in folders} == OVERLAYS.keys()


def test_the_configuration_of_the_base_is_taken() -> None:
    text = only(kustomized("base"), "ConfigMap")["data"]["default-plugins.yaml"]
    assert resolve(load_config(text)).notices == ()


def _key(document: Document) -> tuple[str, str]:
    return document["kind"], _unhashed(document["metadata"]["name"])


def _unhashed(name: str) -> str:
    return HASHED.sub(r"\1", name)


def _plain(document: Document) -> Any:
    """Without what differs by tool: marks of helm, kustomize's hashes, a config's formatting."""
    document = yaml.safe_load(yaml.safe_dump(document))
    for label in OF_HELM:
        document["metadata"].get("labels", {}).pop(label, None)
    document["metadata"]["name"] = _unhashed(document["metadata"]["name"])
    # Helm writes the namespace everywhere.
    if document["kind"] not in ("ClusterRole", "ClusterRoleBinding"):
        assert document["metadata"].pop("namespace") == "default"
    if document["kind"] == "ConfigMap":
        document["data"] = {name: yaml.safe_load(text) for name, text in document["data"].items()}
    if document["kind"] == "Deployment":
        template = document["spec"]["template"]
        # In place of the hashes.
        template["metadata"].pop("annotations", None)
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = _unhashed(volume["configMap"]["name"])
        template["spec"]["volumes"].sort(key=lambda volume: volume["name"])
    return document
