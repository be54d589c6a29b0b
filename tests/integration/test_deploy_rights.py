"""The picker as the chart starts it, with no more rights than the chart gives it.

The chart's own arguments, against an API server that checks the chart's own roles. Every request
must be allowed, and every right must have been needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.kubernetes.authority import Attributes, service_account
from tests.kubernetes.calls import Call
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.objects import pod, pool
from tests.unit.deploying import ROOT, Document, at, container, merged, only, render, values

NAMESPACE, RELEASE = "ai", "llm"
TOKEN, READER, STRANGER = "the-picker", "prometheus", "somebody"
LEGACY, CURRENT = "inference.networking.x-k8s.io", "llm-d.ai"
DEADLINE_S, SETTLED_S = 30.0, 15.0

Right = tuple[str, str, str]
"""Verb, API group, resource."""

POOL = merged(
    at("router.epp.replicas", 2),
    at("router.monitoring.prometheus.enabled", True),
    at("router.epp.drainTimeoutSeconds", 1),
)
VALUES: Mapping[str, Any] = {
    "a pool": POOL,
    "several pools": merged(POOL, at("router.inferencePool.additionalNames", ["b"])),
    "all pools": merged(POOL, at("router.inferencePool.allInNamespace", True)),
    "pods by label": merged(POOL, at("mode", "standalone")),
}


@pytest.mark.parametrize("name", VALUES)
async def test_the_chart_grants_what_the_picker_does_and_nothing_more(
    name: str, tmp_path: Path
) -> None:
    made = render(values(VALUES[name]), release=RELEASE, namespace=NAMESPACE)
    used: set[Right] = set()
    # Objects that moved are looked for in the old group only where the new one is not installed.
    groups = [LEGACY, CURRENT] if "InferencePool" in {d["kind"] for d in made} else [LEGACY]
    for absent in groups:
        async with FakeApi(token=TOKEN, absent=[absent]) as api:
            _grant(api, made)
            _fill(api)
            async with _picker(api, made, tmp_path) as (ports, stop):
                # What it never asks for is told below, by name.
                with suppress(TimeoutError):
                    await api.until(lambda api=api: _settled(api, made), within_s=SETTLED_S)
                await _read_metrics(ports["metrics"])
                await stop()
            refused = [call for call in api.seen if not _allowed(api, call)]
            assert refused == []
            used |= {_right(call) for call in api.seen if call.verb != "discover"}
    assert used == set(_granted(made))


def _grant(api: FakeApi, made: list[Document]) -> None:
    users = api.access.users
    users[TOKEN] = service_account(NAMESPACE, f"{RELEASE}-epp")
    users[READER] = service_account(NAMESPACE, f"{RELEASE}-epp-metrics-reader")
    users[STRANGER] = service_account(NAMESPACE, "default")
    # What every cluster grants: to see which APIs there are.
    paths = {"nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*"], "verbs": ["get"]}
    api.access.grant("system:authenticated", paths)
    for binding in made:
        if not binding["kind"].endswith("RoleBinding"):
            continue
        role = only(made, binding["roleRef"]["kind"], binding["roleRef"]["name"])
        (subject,) = binding["subjects"]
        user = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
        where = NAMESPACE if binding["kind"] == "RoleBinding" else None
        api.access.grant(user, *role["rules"], namespace=where)


def _fill(api: FakeApi) -> None:
    labels = {"app": "vllm"}
    api.store.put(pool(RELEASE, namespace=NAMESPACE, selector=labels))
    api.store.put(pod("vllm-0", "127.0.0.1", labels=labels, namespace=NAMESPACE))


@asynccontextmanager
async def _picker(
    api: FakeApi, made: list[Document], folder: Path
) -> AsyncIterator[tuple[Mapping[str, int], Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "epp", "serve", *_arguments(api, made, folder),
        cwd=ROOT,
        env={
            "PATH": os.defpath,
            "NAMESPACE": NAMESPACE,
            "POD_NAME": f"{RELEASE}-epp-5d9c7b6f4-x2x9z",
        },
        stderr=asyncio.subprocess.STDOUT,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    lines: list[str] = []

    async def stop() -> None:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), DEADLINE_S)

    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (ports := _ports(lines)):
                line = await process.stdout.readline()
                assert line, "".join(lines)
                lines.append(line.decode())
        reading = asyncio.create_task(process.stdout.read())
        yield ports, stop
        await reading
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _arguments(api: FakeApi, made: list[Document], folder: Path) -> Iterator[str]:
    """The chart's, with the mounted configuration elsewhere and free ports."""
    for name, text in only(made, "ConfigMap", f"{RELEASE}-epp")["data"].items():
        (folder / name).write_text(text)
    for argument in container(made)["args"]:
        yield argument.replace("/config/", f"{folder}/").replace("9003", "0")
    yield from ("--grpc-port=0", "--metrics-port=0", "--host=127.0.0.1")
    yield f"--kubeconfig={api.kubeconfig(folder, namespace=NAMESPACE)}"


def _ports(lines: list[str]) -> Mapping[str, int]:
    for line in lines:
        if line.startswith("{") and (ports := json.loads(line).get("ports")):
            found: Mapping[str, int] = ports
            return found
    return {}


def _settled(api: FakeApi, made: list[Document]) -> bool:
    """It has asked for everything it follows, wherever that is served."""
    seen = {(verb, resource) for verb, _, resource in map(_right, api.seen)}
    wanted = {(verb, resource) for verb, _, resource in _granted(made)}
    return wanted - seen <= {
        ("create", "tokenreviews"),
        ("create", "subjectaccessreviews"),
        ("update", "leases"),  # when it ends
    }


def _granted(made: list[Document]) -> Iterator[Right]:
    for role in made:
        if role["kind"] not in ("Role", "ClusterRole"):
            continue
        for rule in role["rules"]:
            for group in rule.get("apiGroups", ()):
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        yield verb, group, resource


def _right(call: Call) -> Right:
    wanted: Attributes = call.wanted()
    return wanted.verb, wanted.group, wanted.resource


def _allowed(api: FakeApi, call: Call) -> bool:
    return api.access.may(api.access.users[TOKEN], call.wanted())


async def _read_metrics(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    expected = {None: 401, STRANGER: 403, READER: 200}
    async with aiohttp.ClientSession() as session:
        for token, status in expected.items():
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with session.get(url, headers=headers) as answer:
                assert answer.status == status
