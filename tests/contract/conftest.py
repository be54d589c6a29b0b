"""The servers that the contract is checked against: the fake, and a real cluster if there is one.

Set KUBECONFIG and EPP_CONTRACT_NAMESPACE (a namespace that exists and may be written to) to run
the same tests against that cluster. They make ConfigMaps and Leases with names of their own there,
and delete them again.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from tests.contract.cluster import Cluster
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import Object

KUBECONFIG = os.environ.get("KUBECONFIG", "")
NAMESPACE = os.environ.get("EPP_CONTRACT_NAMESPACE", "")


def _real(stack: AsyncExitStack) -> tuple[Plain, Plain]:
    """Clients of the current context of KUBECONFIG: one with its token or certificate, one not."""
    config = yaml.safe_load(Path(KUBECONFIG).read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    tls, bare = _trusting(cluster), _trusting(cluster)
    certificate, key = _data(user, "client-certificate"), _data(user, "client-key")
    if certificate and key:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pem = Path(folder, "client.pem")
        pem.write_bytes(certificate + b"\n" + key)
        tls.load_cert_chain(pem)
    url = cluster["server"].rstrip("/")
    return Plain(url, tls=tls, token=user.get("token")), Plain(url, tls=bare, token="wrong")


def _trusting(cluster: Object) -> ssl.SSLContext:
    authority = _data(cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _data(entry: Object, name: str) -> bytes | None:
    if text := entry.get(f"{name}-data"):
        return base64.b64decode(text)
    return Path(entry[name]).read_bytes() if name in entry else None


@pytest.fixture(params=["fake", "cluster"] if KUBECONFIG and NAMESPACE else ["fake"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            api = await stack.enter_async_context(FakeApi(tls=True, token="secret"))
            plain, stranger = (
                Plain(api.url, tls=api.client_tls(), token=token) for token in ("secret", "wrong")
            )
        else:
            plain, stranger = _real(stack)
        for client in (plain, stranger):
            await stack.enter_async_context(client)
        made = Cluster(plain, stranger, NAMESPACE if request.param == "cluster" else "default")
        stack.push_async_callback(made.clean)
        yield made
