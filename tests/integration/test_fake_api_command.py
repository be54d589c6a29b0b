"""The fake API server from outside of its loop: on a thread of its own, and as a command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.answers import RefusedError
from tests.kubernetes.command import main, parser
from tests.kubernetes.fake_thread import FakeApiThread
from tests.kubernetes.faults import Answer
from tests.kubernetes.objects import pod, pool
from tests.kubernetes.resources import POD
from tests.kubernetes.store import Store

ROOT = Path(__file__).resolve().parents[2]


def names(url: str) -> list[str]:
    with urllib.request.urlopen(url + POD.path("default"), timeout=30) as answer:
        return [item["metadata"]["name"] for item in json.load(answer)["items"]]


def test_a_thread_has_all_of_the_fake(tmp_path: Path) -> None:
    with FakeApiThread() as api:
        assert api.store.put(pod("a"))["metadata"]["uid"]
        assert names(api.url) == ["a"]
        assert api.store.version == 1002  # a namespace and a pod
        with pytest.raises(RefusedError):
            api.store.delete("pods", "default", "b")
        with pytest.raises(RefusedError):
            api.store.put(pool("p", ports=[]))
        api.faults.add(Answer(503), verb="list", count=1)
        with pytest.raises(urllib.error.HTTPError) as caught:
            names(api.url)
        caught.value.close()
        assert caught.value.code == 503
        assert len(api.calls("list", "pods")) == 2
        api.until(lambda fake: fake.store.get("pods", "default", "a"))
        with pytest.raises(TimeoutError):
            api.until(lambda _: False, within_s=0.01)
        assert api.kubeconfig(tmp_path).exists()
        api.outage()
        with pytest.raises(urllib.error.URLError):
            names(api.url)
        api.recover()
        assert names(api.url) == ["a"]
        url = api.url
    with pytest.raises(urllib.error.URLError):
        names(url)


def test_a_store_that_is_watched_from_a_thread_can_be_set(tmp_path: Path) -> None:
    with FakeApiThread(tls=True, token="one") as api:
        api.store.unknown_is_silent = True
        assert api.store.unknown_is_silent
        api.token = "two"
        assert api.token == "two"
        assert api.service_account(tmp_path)["KUBERNETES_SERVICE_PORT"] == str(api.port)
        assert (tmp_path / "token").read_text() == "two"


def test_the_command_serves_manifests_until_it_is_told_to_stop(tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        yaml.safe_dump_all([pod("a"), pool("p"), None])
        + "---\napiVersion: v1\nkind: List\nitems:\n"
        + f"- {json.dumps(pod('b'))}\n"
        + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: c, creationTimestamp: 2026-01-01}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kubernetes.fake_api", "--plaintext", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        said = dict(process.stdout.readline().split(None, 1) for _ in range(3))
        assert said["objects:"].strip() == "4"
        config = yaml.safe_load(Path(said["kubeconfig:"].strip()).read_text())
        url = said["url:"].strip()
        assert config["clusters"][0]["cluster"]["server"] == url
        request = urllib.request.Request(
            url + POD.path("default"), headers={"Authorization": "Bearer admin"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            items = json.load(answer)["items"]
        assert [item["metadata"]["name"] for item in items] == ["a", "b", "c"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not Path(said["kubeconfig:"].strip()).exists()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Deployment\napiVersion: apps/v1\nmetadata: {name: a}\n", "not served here"),
        ("a: [", "expected"),
        ("just words", "not a Kubernetes object"),
        (yaml.safe_dump(pool("p", ports=[])), "at least 1"),
    ],
)
def test_a_manifest_that_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main([str(path)]) == 2
    said = capsys.readouterr().out
    assert says in said
    assert "x.yaml" in said
    asyncio.set_event_loop(None)


def test_a_file_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-file.yaml"]) == 2
    assert "no-such-file.yaml" in capsys.readouterr().out


def test_the_command_says_what_it_does() -> None:
    text = parser().format_help()
    assert "kubeconfig" in text
    assert "--absent" in text


def test_a_store_needs_no_server() -> None:
    store = Store()
    store.put(pod("a"))
    assert [each["metadata"]["name"] for each in store.list("pods")] == ["a"]
    with pytest.raises(KeyError, match="served:"):
        store.list("nodes")
