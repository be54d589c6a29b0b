"""Tokens judged by the fake API server: who gets in, what is asked, and what is kept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from epp.edge.admin import AdminServer
from epp.edge.kubernetes.access import from_kubeconfig
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.reviews import (
    ACCESS_REVIEWS,
    ALLOWED_S,
    DENIED_S,
    TOKEN_BYTES_MAX,
    TOKEN_REVIEWS,
    Reviewer,
    ReviewLimits,
)
from epp.edge.metrics import Metrics
from tests.integration.test_admin import empty_state
from tests.integration.test_admin_auth import ask
from tests.kubernetes.authority import service_account
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Answer, Delay

PROMETHEUS = service_account("monitoring", "prometheus")
EPP = service_account("models", "epp")
MAY_REVIEW = (
    {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
    {
        "apiGroups": ["authorization.k8s.io"],
        "resources": ["subjectaccessreviews"],
        "verbs": ["create"],
    },
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Cluster:
    """An API server that knows a few tokens, and a reviewer that asks it."""

    def __init__(self, api: FakeApi, client: ApiClient, limits: ReviewLimits | None) -> None:
        self.api = api
        self.client = client
        self.clock = Clock()
        self.sent: list[tuple[str, dict[str, Any]]] = []
        """Path and spec of each question."""
        self.reviewer = Reviewer(self, limits=limits, clock=self.clock)

    async def create(self, path: str, body: bytes) -> bytes:
        document = msgspec.json.decode(body, type=dict[str, Any])
        assert path == f"/apis/{document['apiVersion']}/{document['kind'].lower()}s"
        self.sent.append((path, document["spec"]))
        return await self.client.create(path, body)

    async def status(self, token: str = "prom", path: str = "/metrics") -> int:
        return (await self.reviewer.check(f"Bearer {token}", path)).status

    def asked(self, plural: str) -> int:
        return len(self.api.calls("create", plural))


@asynccontextmanager
async def cluster(folder: Path, limits: ReviewLimits | None = None) -> AsyncIterator[Cluster]:
    async with FakeApi(token="ours") as api:
        api.access.users["ours"] = EPP
        api.access.grant(EPP.name, *MAY_REVIEW)
        api.access.users |= {"prom": PROMETHEUS, "intern": service_account("models", "intern")}
        api.access.users |= {f"t{n}": PROMETHEUS for n in range(200)}
        api.access.grant(PROMETHEUS.name, {"nonResourceURLs": ["/metrics"], "verbs": ["get"]})
        access = from_kubeconfig(api.kubeconfig(folder))
        async with asyncio.timeout(60), ApiClient(access, user_agent="test") as client:
            yield Cluster(api, client, limits)


# -- judgements ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer prom", 200),
        ("bearer   prom ", 200),
        ("Bearer nobody", 401),
        ("Bearer intern", 403),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic cHJvbQ==", 401),
        ("prom", 401),
        ("Bearer pr\x00om", 401),
        ("Bearer prämie", 401),
        ("Bearer " + "x" * (TOKEN_BYTES_MAX + 1), 401),
    ],
)
async def test_a_header_is_judged(tmp_path: Path, authorization: str | None, status: int) -> None:
    async with cluster(tmp_path) as made:
        assert (await made.reviewer.check(authorization, "/metrics")).status == status


async def test_the_second_question_is_about_the_user_of_the_token_as_it_came(
    tmp_path: Path,
) -> None:
    user = {
        "username": PROMETHEUS.name,
        "uid": "u-1",
        "groups": ["system:serviceaccounts", "system:authenticated"],
        "extra": {"authentication.kubernetes.io/pod-name": ["prometheus-0"]},
    }
    answer = {"kind": "TokenReview", "status": {"authenticated": True, "user": user}}
    async with cluster(tmp_path) as made:
        made.api.faults.add(Answer(201, body=msgspec.json.encode(answer)), plural="tokenreviews")
        assert await made.status() == 200
    wanted = {"nonResourceAttributes": {"path": "/metrics", "verb": "get"}}
    assert made.sent == [
        (TOKEN_REVIEWS, {"token": "prom"}),
        (ACCESS_REVIEWS, {"user": user.pop("username"), **user, **wanted}),
    ]


async def test_each_path_is_judged_on_its_own(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        assert await made.status(path="/metrics") == 200
        verdict = await made.reviewer.check("Bearer prom", "/debug/state")
        assert verdict.status == 403
        assert "/debug/state" in verdict.detail


async def test_a_denial_counts_more_than_an_allowance(tmp_path: Path) -> None:
    answer = b'{"status": {"allowed": true, "denied": true}}'
    async with cluster(tmp_path) as made:
        made.api.faults.add(Answer(201, body=answer), plural="subjectaccessreviews")
        assert await made.status() == 403


# -- what is kept --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "keep_s", "asks"),
    [("prom", ALLOWED_S, 2), ("intern", DENIED_S, 2), ("x", DENIED_S, 1)],
)
async def test_a_judgement_is_kept_for_its_time_and_no_longer(
    tmp_path: Path, token: str, keep_s: float, asks: int
) -> None:
    async with cluster(tmp_path) as made:
        first = await made.status(token)
        made.clock.now_s += keep_s - 0.01
        assert await made.status(token) == first
        assert len(made.sent) == asks
        made.clock.now_s += 0.02
        assert await made.status(token) == first
        assert len(made.sent) == 2 * asks


async def test_requests_with_one_token_share_one_question(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        held = made.api.faults.add(Delay(), plural="tokenreviews")
        asking = [asyncio.create_task(made.status()) for _ in range(50)]
        await made.api.until(lambda: held.hits)
        asking[0].cancel()  # it hangs up: the others still get their answer
        await asyncio.wait({asking[0]})
        made.api.faults.remove(held)
        assert {await each for each in asking[1:]} == {200}
        assert len(made.sent) == 2


async def test_tokens_are_not_kept(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await made.status("intern")
        kept = [*made.reviewer._known, *gc.get_referents(made.reviewer._known)]
        assert made.reviewer._known
        assert not any(b"intern" in each for each in kept if isinstance(each, bytes))
        assert not made.reviewer._asking


async def test_what_is_kept_and_asked_is_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, ReviewLimits(entries_max=8, asking_max=4)) as made:
        held = made.api.faults.add(Delay(), plural="tokenreviews")
        asking = [asyncio.create_task(made.status(f"t{n}")) for n in range(20)]
        await made.api.until(lambda: held.hits == 4)
        refused = [each for each in asking if each.done()]
        assert [each.result() for each in refused] == [503] * 16
        made.api.faults.remove(held)
        await asyncio.gather(*asking)
        rng = Random(1)
        for _ in range(50):
            await made.status(f"t{rng.randrange(200)}")
        assert len(made.reviewer._known) == 8


async def test_a_token_in_use_is_not_pushed_out_by_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, ReviewLimits(entries_max=4)) as made:
        for n in range(20):
            await made.status("prom")
            await made.status(f"stranger-{n}")
        assert made.asked("subjectaccessreviews") == 1


# -- an API server that does not judge -----------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(500), "500"),
        (Answer(403, "Forbidden"), "a ClusterRole must allow us to create tokenreviews"),
        (Answer(401, "Unauthorized"), "401"),
        (Answer(201, body=b"<html>"), "cannot be read"),
        (Answer(201, body=b"{}"), "cannot be read"),
        (Answer(201, body=b'{"status": {"authenticated": "yes"}}'), "cannot be read"),
    ],
)
@pytest.mark.parametrize("plural", ["tokenreviews", "subjectaccessreviews"])
async def test_no_judgement_lets_nobody_in_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Answer, said: str, plural: str
) -> None:
    if said == "cannot be read" and plural == "subjectaccessreviews":
        answer = Answer(201, body=(answer.body or b"").replace(b"authenticated", b"allowed"))
    async with cluster(tmp_path) as made:
        rule = made.api.faults.add(answer, plural=plural)
        for _ in range(3):
            assert await made.status() == 503
        assert [said in record.getMessage() for record in caplog.records] == [True]
        made.clock.now_s += 61.0
        assert await made.status() == 503
        assert len(caplog.records) == 2
        made.api.faults.remove(rule)
        assert await made.status() == 200, "at once"
    assert "prom" not in caplog.text, "no token in the log"


@pytest.mark.parametrize(
    ("plural", "status"), [("tokenreviews", 401), ("subjectaccessreviews", 403)]
)
async def test_an_answer_that_says_nothing_is_no_permission(
    tmp_path: Path, plural: str, status: int
) -> None:
    async with cluster(tmp_path) as made:
        made.api.faults.add(Answer(201, body=b'{"status": {}}'), plural=plural)
        assert await made.status() == status


async def test_an_api_server_that_hangs_is_waited_for_only_so_long(tmp_path: Path) -> None:
    async with cluster(tmp_path, ReviewLimits(timeout_s=0.1)) as made:
        made.api.faults.add(Delay(), plural="tokenreviews")
        assert await made.status() == 503


async def test_an_api_server_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await made.api.outage()
        assert await made.status() == 503
        await made.api.recover()
        assert await made.status() == 200


async def test_D11_the_admin_port_asks_the_reviewer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        server = AdminServer(
            host="127.0.0.1",
            port=0,
            metrics=Metrics(dict),
            state=empty_state,
            auth=made.reviewer.check,
        )
        url = f"http://127.0.0.1:{await server.start()}"
        found = [
            (await ask(f"{url}{path}", token=token)).status
            for path in ("/metrics", "/debug/state", "/healthz")
            for token in ("Bearer prom", "Bearer nobody", None)
        ]
        await server.stop()
    assert found == [200, 401, 401, 403, 401, 401, 200, 200, 200]
