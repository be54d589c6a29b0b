"""Who may talk to the fake API server, and what it says of who may do what elsewhere."""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.kubernetes.authority import User, service_account
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.objects import lease, pod, pool
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import LEASE, POD, POOL

PODS = POD.path("default")
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi(tls=True, token="admin") as api:
        yield api


@pytest.fixture
async def plain(api: FakeApi) -> AsyncIterator[Plain]:
    async with Plain(api.url, tls=api.client_tls(), token="admin") as plain:
        yield plain


async def test_a_token_is_asked_for_and_can_be_rotated(api: FakeApi, plain: Plain) -> None:
    assert (await plain.get(PODS)).code == 200
    for token in ("other", "", None):
        plain.token = token
        answer = await plain.get(PODS)
        assert (answer.code, answer.reason) == (401, "Unauthorized")
    api.token = "new"
    for token, code in (("admin", 401), ("new", 200)):
        plain.token = token
        assert (await plain.get(PODS)).code == code


async def test_only_who_trusts_its_authority_can_talk_to_it(api: FakeApi) -> None:
    for host, context, fits in (
        ("127.0.0.1", api.client_tls(), True),
        ("localhost", api.client_tls(), True),
        ("127.0.0.1", ssl.create_default_context(), False),
    ):
        async with Plain(f"https://{host}:{api.port}", tls=context, token="admin") as plain:
            if fits:
                assert (await plain.get(PODS)).code == 200
            else:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await plain.get(PODS)


async def test_a_client_certificate_names_a_user(api: FakeApi, tmp_path: Path) -> None:
    assert api.authority is not None
    signed = api.authority.user("ann", ["readers"])
    pem = tmp_path / "ann.pem"
    pem.write_bytes(signed.certificate + signed.key)
    context = api.client_tls()
    assert context is not None
    context.load_cert_chain(pem)
    async with Plain(api.url, tls=context) as plain:
        answer = await plain.get(PODS)
        assert (answer.code, answer.reason) == (403, "Forbidden")
        assert '"ann" cannot list resource "pods"' in answer.body["message"]
        api.access.grant("readers", {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]})
        assert (await plain.get(PODS)).code == 200


def test_a_kubeconfig_has_what_a_client_needs(tmp_path: Path) -> None:
    api = FakeApi(tls=True, token="secret")
    config = yaml.safe_load(api.kubeconfig(tmp_path, namespace="n").read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    assert cluster["server"] == api.url
    assert base64.b64decode(cluster["certificate-authority-data"]) == api.ca
    assert user == {"token": "secret"}
    assert config["contexts"][0]["context"]["namespace"] == "n"


def test_files_that_were_handed_out_follow_the_token(tmp_path: Path) -> None:
    api = FakeApi(tls=True, token="one")
    environ = api.service_account(tmp_path, namespace="n")
    assert environ["KUBERNETES_SERVICE_HOST"] == "127.0.0.1"
    assert (tmp_path / "namespace").read_text() == "n"
    assert (tmp_path / "ca.crt").read_bytes() == api.ca
    api.kubeconfig(tmp_path, token_file=True)
    api.token = "two"
    assert (tmp_path / "token").read_text() == "two"
    api.rotate("three", files=False)
    assert (tmp_path / "token").read_text() == "two"


async def test_a_service_account_may_do_what_its_roles_say(api: FakeApi, plain: Plain) -> None:
    account = service_account("default", "epp")
    api.access.users["pod"] = account
    plain.token = "pod"
    for obj in (pod("a"), pool("p"), pool("q"), lease("l", "a")):
        api.store.put(obj)
    watch = ["get", "list", "watch"]
    role: list[dict[str, Any]] = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": watch},
        {
            "apiGroups": ["inference.networking.k8s.io"],
            "resources": ["inferencepools"],
            "resourceNames": ["p"],
            "verbs": watch,
        },
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "update"]},
    ]
    assert (await plain.get(PODS)).code == 403
    api.access.grant(account.name, *role, namespace="default")
    pools = POOL.path("default")
    by_path = {
        PODS: 200,
        POD.path("default", "a"): 200,
        POD.path(): 403,
        POD.path("other"): 403,
        pools: 403,
        f"{pools}?fieldSelector=metadata.name%3Dp": 200,
        f"{pools}?fieldSelector=metadata.name%3Dq": 403,
        f"{pools}/p": 200,
        f"{pools}/q": 403,
        LEASE.path("default"): 403,
        LEASE.path("default", "l"): 200,
        "/version": 200,
    }
    for path, code in by_path.items():
        url, _, query = path.partition("?fieldSelector=")
        params = {"fieldSelector": query.replace("%3D", "=")} if query else {}
        assert (await plain.get(url, **params)).code == code, path
    made = (await plain.get(LEASE.path("default", "l"))).body
    assert (await plain.call("PUT", LEASE.path("default", "l"), made)).code == 200
    assert (await plain.call("POST", LEASE.path("default"), lease("m"))).code == 403
    status = {**pool("p"), "status": {}}
    assert (await plain.call("PUT", f"{pools}/p/status", status)).code == 403


async def test_a_token_review_says_whose_a_token_is(api: FakeApi, plain: Plain) -> None:
    api.access.users["prom"] = service_account("monitoring", "prometheus")
    api.access.users["odd"] = User("odd", audiences=("elsewhere",))

    async def review(**spec: Any) -> Any:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        answer = await plain.call("POST", TOKEN_REVIEWS, body)
        assert answer.code == 201
        return answer.body["status"]

    found = await review(token="prom")
    assert found["authenticated"] is True
    assert found["user"]["username"] == "system:serviceaccount:monitoring:prometheus"
    assert "system:serviceaccounts:monitoring" in found["user"]["groups"]
    assert "authenticated" not in await review(token="nobody")
    assert (await review(token="odd", audiences=["elsewhere", "x"]))["audiences"] == ["elsewhere"]
    assert "error" in await review(token="odd", audiences=["here"])


async def test_an_access_review_says_who_may_what(api: FakeApi, plain: Plain) -> None:
    api.access.grant("scraper", {"nonResourceURLs": ["/metrics"], "verbs": ["get"]})
    api.access.grant("people", {"nonResourceURLs": ["/debug/*"], "verbs": ["*"]})
    api.access.grant(
        "people", {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get"]}, namespace="n"
    )

    async def may(user: str, groups: list[str], **asked: Any) -> bool:
        spec = {"user": user, "groups": groups, **asked}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        answer = await plain.call("POST", ACCESS_REVIEWS, {**body, "spec": spec})
        assert answer.code == 201
        return bool(answer.body["status"]["allowed"])

    def path(name: str, verb: str = "get") -> dict[str, Any]:
        return {"nonResourceAttributes": {"path": name, "verb": verb}}

    def resource(**attributes: str) -> dict[str, Any]:
        return {"resourceAttributes": attributes}

    assert await may("scraper", [], **path("/metrics"))
    assert not await may("scraper", [], **path("/metrics", "post"))
    assert not await may("scraper", [], **path("/metrics/x"))
    assert not await may("somebody", ["people"], **path("/metrics"))
    assert await may("somebody", ["people"], **path("/debug/pool"))
    assert await may("x", ["people"], **resource(verb="get", resource="pods", namespace="n"))
    assert not await may("x", ["people"], **resource(verb="get", resource="pods", namespace="m"))
    assert not await may("x", ["people"], **resource(verb="list", resource="pods", namespace="n"))
    assert await may("x", ["system:masters"], **path("/anything", "delete"))


async def test_who_asks_is_seen(api: FakeApi, plain: Plain) -> None:
    await plain.get(PODS, labelSelector="a=b")
    (call,) = api.calls("list", "pods")
    assert call.headers["authorization"] == "Bearer admin"
    assert call.query == {"labelSelector": "a=b"}
    assert (call.method, call.path, call.namespace) == ("GET", PODS, "default")
