"""Two clients that are not ours get along with the fake: real kubectl, and lightkube.

They were written against real API servers, so what they cannot do with the fake, the fake has
wrong.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.kubernetes.fake_thread import FakeApiThread
from tests.kubernetes.objects import lease, pod, pool
from tests.kubernetes.resources import OBJECTIVE, POOL, POOL_GROUP
from tests.unit.deploying import tools

PATIENCE_S = 60


@pytest.fixture
def api() -> Iterator[FakeApiThread]:
    with FakeApiThread(tls=True, token="secret", grace_s=0.1) as api:
        yield api


# -- kubectl -------------------------------------------------------------------------------


class Kubectl:
    """The real command, with a kubeconfig and a home of its own."""

    def __init__(self, program: Path, api: FakeApiThread, folder: Path) -> None:
        self.program = program
        self.env = {"KUBECONFIG": str(api.kubeconfig(folder)), "HOME": str(folder)}

    def run(self, *words: str, given: object = None, code: int = 0) -> str:
        """Its output, of stdout when it ends well and of stderr when not.

        Args:
            given: an object or several, for its standard input.
        """
        documents = given if isinstance(given, list) else [given]
        done = subprocess.run(
            [self.program, *words],
            env=self.env,
            input=None if given is None else yaml.safe_dump_all(documents),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def get(self, *words: str) -> Any:
        return json.loads(self.run("get", *words, "-o", "json"))


@pytest.fixture
def kubectl(api: FakeApiThread, tmp_path: Path) -> Kubectl:
    return Kubectl(tools() / "kubectl/kubectl", api, tmp_path)


def test_kubectl_discovers_what_is_served(kubectl: Kubectl, api: FakeApiThread) -> None:
    assert "Server Version: v1." in kubectl.run("version")
    names = kubectl.run("api-resources", "-o", "name").split()
    assert {"pods", POOL.full_name, OBJECTIVE.full_name} <= set(names)
    assert "doesn't have a resource type" in kubectl.run("get", "nodes", code=1)
    api.store.uninstall(POOL_GROUP)
    assert POOL.full_name not in kubectl.run("api-resources", "-o", "name", "--cached=false")


def test_kubectl_applies_twice_and_deletes(kubectl: Kubectl, api: FakeApiThread) -> None:
    made = pool("p")
    assert "created" in kubectl.run("apply", "-f", "-", given=[made, pool("q")])
    assert kubectl.get("infpool", "p")["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    made["spec"]["targetPorts"] = [{"number": 8001}]
    said = kubectl.run("apply", "-f", "-", given=[made, pool("q")])
    assert "/p configured" in said
    assert "/q unchanged" in said
    stored = api.store.get("inferencepools", "default", "p")
    assert stored is not None
    assert stored["spec"]["targetPorts"] == [{"number": 8001}]
    assert "deleted" in kubectl.run("delete", "infpool", "p")
    assert "NotFound" in kubectl.run("get", "infpool", "p", code=1)


def test_kubectl_applies_on_the_server_too(kubectl: Kubectl, api: FakeApiThread) -> None:
    for _ in range(2):
        said = kubectl.run("apply", "--server-side", "-f", "-", given=pool("p"))
        assert "serverside-applied" in said
    said = kubectl.run("apply", "--dry-run=server", "-f", "-", given=pool("q"))
    assert "created (server dry run)" in said
    assert api.store.get("inferencepools", "default", "q") is None


def test_kubectl_is_told_what_is_wrong(kubectl: Kubectl, api: FakeApiThread) -> None:
    wrong = pool("p", ports=[1, 1])
    assert "port number must be unique" in kubectl.run("apply", "-f", "-", given=wrong, code=1)
    odd = pool("p")
    odd["spec"]["bogus"] = 1
    said = kubectl.run("apply", "-f", "-", given=odd, code=1)
    assert 'unknown field "spec.bogus"' in said
    api.token = "rotated"
    assert "Unauthorized" in kubectl.run("get", "pods", code=1)


def test_kubectl_selects_labels_and_patches(kubectl: Kubectl, api: FakeApiThread) -> None:
    for name in "abc":
        api.store.put(pod(name, labels={"name": name}))
    found = kubectl.get("pods", "-l", "name in (a,c)", "--field-selector", "metadata.name!=a")
    assert [item["metadata"]["name"] for item in found["items"]] == ["c"]
    assert len(kubectl.get("pods", "-A", "--chunk-size=2")["items"]) == 3
    kubectl.run("label", "pod", "a", "role=decode")
    kubectl.run("patch", "pod", "a", "--type=merge", "-p", '{"metadata":{"labels":{"name":null}}}')
    stored = api.store.get("pods", "default", "a")
    assert stored is not None
    assert stored["metadata"]["labels"] == {"role": "decode"}
    api.store.put(lease("l", "me"))
    assert kubectl.get("lease", "l")["spec"]["holderIdentity"] == "me"


def test_kubectl_waits_for_a_pod_to_be_gone(kubectl: Kubectl, api: FakeApiThread) -> None:
    api.store.put(pod("a"))
    api.store.put(pod("b"))
    assert 'pod "a" deleted' in kubectl.run("delete", "pod", "a")  # waits for its graceful end
    assert api.store.get("pods", "default", "a") is None
    assert 'pod "b"' in kubectl.run("delete", "pods", "--all")


def test_kubectl_watches_pods(kubectl: Kubectl, api: FakeApiThread) -> None:
    api.store.put(pod("a"))
    command = [str(kubectl.program), "get", "pods", "-w", "--output-watch-events", "--no-headers"]
    process = subprocess.Popen(command, env=kubectl.env, stdout=subprocess.PIPE, text=True)
    try:
        api.until(lambda fake: fake.calls("watch", "pods"), within_s=PATIENCE_S)
        api.store.put(pod("b"))
        api.store.delete("pods", "default", "a")
        assert process.stdout is not None
        lines = [process.stdout.readline().split()[:2] for _ in range(3)]
        assert lines == [["ADDED", "a"], ["ADDED", "b"], ["DELETED", "a"]]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# -- lightkube -----------------------------------------------------------------------------


@pytest.fixture
def lightkube() -> Any:
    return import_module("lightkube")


@pytest.fixture
def client(lightkube: Any, api: FakeApiThread, tmp_path: Path) -> Iterator[Any]:
    config = lightkube.KubeConfig.from_file(api.kubeconfig(tmp_path))
    with lightkube.Client(config=config, trust_env=False) as client:
        yield client


def _resource(module: str, name: str) -> Any:
    return getattr(import_module(f"lightkube.{module}"), name)


def test_lightkube_lists_in_pages(client: Any, api: FakeApiThread) -> None:
    for i in range(5):
        api.store.put(pod(f"p{i}", labels={"n": str(i % 2)}))
    of_pods = _resource("resources.core_v1", "Pod")
    names = [each.metadata.name for each in client.list(of_pods, chunk_size=2)]
    assert names == [f"p{i}" for i in range(5)]
    assert len(api.calls("list", "pods")) == 3
    odd = client.list(of_pods, namespace="*", labels={"n": "1"}, fields={"metadata.name": "p3"})
    assert [each.metadata.name for each in odd] == ["p3"]
    assert client.get(of_pods, "p0").status.podIP == "10.0.0.1"


def test_lightkube_takes_and_loses_a_lease(client: Any, lightkube: Any, api: FakeApiThread) -> None:
    of_leases = _resource("resources.coordination_v1", "Lease")
    body = lease("l", "a")
    for name in ("acquireTime", "renewTime"):  # lightkube leaves zero microseconds out
        body["spec"][name] = "2026-01-01T00:00:00.123456Z"
    made = client.create(of_leases.from_dict(body))
    assert made.spec.holderIdentity == "a"
    with pytest.raises(lightkube.ApiError) as caught:
        client.create(of_leases.from_dict(body))
    assert caught.value.status.reason == "AlreadyExists"
    made.spec.holderIdentity = "b"
    assert client.replace(made).spec.holderIdentity == "b"
    with pytest.raises(lightkube.ApiError) as caught:
        client.replace(made)  # the version before
    assert caught.value.status.reason == "Conflict"
    client.delete(of_leases, "l")
    assert api.store.get("leases", "default", "l") is None


def test_lightkube_reads_and_patches_custom_resources(client: Any, api: FakeApiThread) -> None:
    make: Callable[..., Any] = _resource("generic_resource", "create_namespaced_resource")
    of_pools = make(POOL_GROUP, "v1", "InferencePool", "inferencepools")
    client.create(of_pools(metadata={"name": "p"}, spec=pool("p")["spec"]))
    assert client.get(of_pools, "p").spec["appProtocol"] == "http"
    change = {"spec": {"appProtocol": "kubernetes.io/h2c"}}
    assert client.patch(of_pools, "p", change).spec["appProtocol"] == "kubernetes.io/h2c"
    assert [each.metadata.name for each in client.list(of_pools)] == ["p"]


def test_lightkube_watches_pods(client: Any, api: FakeApiThread) -> None:
    of_pods = _resource("resources.core_v1", "Pod")
    api.store.put(pod("a"))
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        for type_, obj in client.watch(of_pods, server_timeout=30):
            seen.append((type_, obj.metadata.name))
            if len(seen) == 3:
                return

    thread = Thread(target=follow, daemon=True)
    thread.start()
    api.until(lambda fake: fake.open_watches, within_s=PATIENCE_S)
    api.store.put(pod("a", ready=False))
    api.store.delete("pods", "default", "a")
    thread.join(PATIENCE_S)
    assert seen == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
