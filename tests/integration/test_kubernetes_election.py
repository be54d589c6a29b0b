"""Electors against the fake API server, on real sockets and short leases.

Times are not looked at here (see the simulation): only what happens, in which order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from epp.edge.kubernetes.access import from_kubeconfig
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.election import LeaderElector, lease_name, new_identity
from epp.edge.kubernetes.election_record import Timing
from tests.kubernetes.authority import service_account
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Answer, Cut, Delay

NAMESPACE, NAME = "models", lease_name("models", "llama")
PATIENT = Timing(retry_s=0.1)
"""For what needs no lease to run out: a machine that stands still for seconds changes nothing."""
HASTY = Timing(lease_s=2, renew_s=1.5, retry_s=0.3)


class Clock:
    """The machine's, and on demand later."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Contest:
    """Candidates for one Lease. Whenever one is told that it leads, no other may."""

    def __init__(self, api: FakeApi, folder: Path, timing: Timing) -> None:
        self.api = api
        self._timing = timing
        self.most_leaders = 0
        self._folder = folder
        self._clients: list[ApiClient] = []
        self.electors: list[LeaderElector] = []
        self.told: list[list[bool]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.clock = Clock()

    async def join(self) -> LeaderElector:
        """One more candidate, with a client of its own."""
        client = ApiClient(from_kubeconfig(self.api.kubeconfig(self._folder)), user_agent="test")
        self._clients.append(await client.__aenter__())
        told: list[bool] = []

        def on_change(leads: bool) -> None:
            told.append(leads)
            self.most_leaders = max(self.most_leaders, len(self.leaders))

        elector = LeaderElector(
            client,
            namespace=NAMESPACE,
            name=NAME,
            identity=new_identity(f"epp-{len(self.electors)}"),
            on_change=on_change,
            rng=Random(len(self.electors)),
            timing=self._timing,
            clock=self.clock,
        )
        self.electors.append(elector)
        self.told.append(told)
        self.tasks.append(asyncio.create_task(elector.run()))
        return elector

    @property
    def leaders(self) -> list[LeaderElector]:
        return [each for each in self.electors if each.is_leader]

    async def leader(self) -> LeaderElector:
        await self.api.until(lambda: self.leaders)
        return self.leaders[0]

    def told_to(self, elector: LeaderElector) -> list[bool]:
        return self.told[self.electors.index(elector)]

    async def kill(self, elector: LeaderElector) -> None:
        """End it without a release: what a killed process leaves behind."""
        task = self.tasks[self.electors.index(elector)]
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        done = await asyncio.gather(*self.tasks, return_exceptions=True)
        for client in self._clients:
            await client.__aexit__(None, None, None)
        broken = [each for each in done if isinstance(each, Exception)]
        assert broken == []
        assert self.most_leaders <= 1


@asynccontextmanager
async def contest(
    folder: Path, timing: Timing = PATIENT, *, token: str | None = None
) -> AsyncIterator[Contest]:
    async with FakeApi(token=token) as api:
        made = Contest(api, folder, timing)
        try:
            yield made
        finally:
            api.faults.clear()
            await made.close()


def spec(api: FakeApi) -> Mapping[str, Any]:
    lease = api.store.get("leases", NAMESPACE, NAME)
    return {} if lease is None else lease["spec"]


def held_by(api: FakeApi, elector: LeaderElector) -> Callable[[], bool]:
    return lambda: spec(api).get("holderIdentity") == elector.identity


# -- without faults ------------------------------------------------------------------------


async def test_of_three_that_begin_together_one_leads_and_renews(tmp_path: Path) -> None:
    async with contest(tmp_path) as made:
        for _ in range(3):
            await made.join()
        leader = await made.leader()
        first = spec(made.api)
        assert first["holderIdentity"] == leader.identity
        assert (first["leaseDurationSeconds"], first["leaseTransitions"]) == (15, 0)
        await made.api.until(lambda: spec(made.api)["renewTime"] > first["renewTime"])
        assert spec(made.api)["acquireTime"] == first["acquireTime"]
        await made.api.until(lambda: {each.holder for each in made.electors} == {leader.identity})
        assert [len(told) for told in made.told].count(0) == 2, "nobody else was told anything"


async def test_a_killed_leader_is_replaced_and_its_lease_counts_a_transition(
    tmp_path: Path,
) -> None:
    async with contest(tmp_path, HASTY) as made:
        for _ in range(2):
            await made.join()
        killed = await made.leader()
        await made.kill(killed)
        (other,) = set(made.electors) - {killed}
        await made.api.until(lambda: other.is_leader)
        assert spec(made.api)["holderIdentity"] == other.identity
        assert spec(made.api)["leaseTransitions"] >= 1
        assert not killed.is_leader


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_who_ends_leads_no_more_and_leaves_the_lease_to_others(
    tmp_path: Path, how: str
) -> None:
    async with contest(tmp_path) as made:
        first = await made.join()
        await made.leader()
        if how == "stop":
            stopping = asyncio.create_task(first.stop())
            await asyncio.sleep(0)
            assert not first.is_leader
            assert made.told_to(first) == [True, False]
            await stopping
            await first.stop()
        else:
            made.tasks[0].cancel()
            await asyncio.wait(made.tasks)
        assert made.told_to(first) == [True, False]
        assert spec(made.api)["holderIdentity"] == ""
        assert spec(made.api)["leaseDurationSeconds"] == 1
        second = await made.join()
        assert await made.leader() is second
        assert spec(made.api)["leaseTransitions"] == 1


async def test_who_only_waits_leaves_the_lease_alone_when_it_ends(tmp_path: Path) -> None:
    async with contest(tmp_path) as made:
        first = await made.join()
        await made.leader()
        second = await made.join()
        await made.api.until(lambda: second.holder == first.identity)
        await second.stop()
        assert spec(made.api)["holderIdentity"] == first.identity
        assert made.told_to(second) == []


async def test_who_was_stopped_before_it_began_does_not_begin(tmp_path: Path) -> None:
    async with contest(tmp_path) as made:
        elector = await made.join()
        await elector.stop()
        await elector.run()
        assert made.api.calls("create", "leases") == []


async def test_who_has_stopped_learns_that_another_leads(tmp_path: Path) -> None:
    async with contest(tmp_path, HASTY) as made:
        first = await made.join()
        await made.leader()
        await first.stop()
        assert not await first.succeeded(0.3), "nobody else is there"
        hanging = made.api.faults.add(Delay(), verb="get", plural="leases", count=1)
        learning = asyncio.create_task(first.succeeded(15.0))
        await made.api.until(lambda: hanging.hits)
        await made.join()
        assert await learning, "one look that hangs is not the last one"


# -- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
async def test_a_hanging_api_server_ends_leadership_and_not_the_election(
    tmp_path: Path, after: bool
) -> None:
    async with contest(tmp_path, HASTY) as made:
        elector = await made.join()
        await made.leader()
        rule = made.api.faults.add(Delay(after=after), plural="leases")
        await made.api.until(lambda: not made.told_to(elector)[-1])
        assert made.leaders == []
        made.api.faults.remove(rule)
        await made.api.until(lambda: elector.is_leader)


async def test_a_leader_that_cannot_write_is_replaced_by_nobody_who_cannot(tmp_path: Path) -> None:
    async with contest(tmp_path, HASTY) as made:
        for _ in range(3):
            await made.join()
        await made.leader()
        rule = made.api.faults.add(Answer(500), verb="update", plural="leases")
        await made.api.until(lambda: not made.leaders)
        await made.api.until(lambda: rule.hits > 10)
        assert made.leaders == []
        made.api.faults.remove(rule)
        await made.leader()


FAULTS = {
    "500": Answer(500),
    "429": Answer(429, "TooManyRequests", retry_after_s=1),
    "conflict": Answer(409, "Conflict"),
    "proxy": Answer(200, body=b"<html>welcome</html>", content_type="text/html"),
    "other": Answer(200, body=b'{"kind": "Pod", "metadata": {"resourceVersion": "5"}}'),
    "reset": Cut(),
    "half": Cut(after_bytes=40, reset=False),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_burst_of_failures_is_lived_through(tmp_path: Path, fault: str) -> None:
    async with contest(tmp_path) as made:
        elector = await made.join()
        await made.leader()
        for verb in ("get", "update"):
            rule = made.api.faults.add(FAULTS[fault], verb=verb, plural="leases", count=3)
            await made.api.until(lambda rule=rule: rule.hits == 3)
            renewed = spec(made.api)["renewTime"]
            await made.api.until(lambda renewed=renewed: spec(made.api)["renewTime"] > renewed)
            await made.api.until(lambda: elector.is_leader)
        assert not made.tasks[0].done()


async def test_an_outage_ends_leadership_until_the_api_server_is_back(tmp_path: Path) -> None:
    async with contest(tmp_path, HASTY) as made:
        first, second = await made.join(), await made.join()
        leader = await made.leader()
        await made.api.outage()
        await made.api.until(lambda: made.told_to(leader)[-1] is False)
        await made.api.recover()
        await made.leader()
        assert {first.holder, second.holder} != {None}


async def test_a_deleted_lease_is_made_again_by_its_leader(tmp_path: Path) -> None:
    async with contest(tmp_path) as made:
        first = await made.join()
        await made.leader()
        second = await made.join()
        await made.api.until(lambda: second.holder == first.identity)
        made.api.store.delete("leases", NAMESPACE, NAME)
        await made.api.until(lambda: spec(made.api))
        await made.leader()


async def test_a_leader_whose_lease_was_given_to_another_leads_no_more(tmp_path: Path) -> None:
    async with contest(tmp_path, HASTY) as made:
        elector = await made.join()
        await made.leader()
        lease = made.api.store.get("leases", NAMESPACE, NAME)
        assert lease is not None
        lease["spec"] = {**lease["spec"], "holderIdentity": "by hand"}
        made.api.store.put(lease)
        await made.api.until(lambda: False in made.told_to(elector))
        await made.api.until(lambda: elector.is_leader)  # "by hand" never renews


@pytest.mark.parametrize("found", [{}, {"holderIdentity": ""}, {"leaseTransitions": 3}])
async def test_a_lease_that_says_little_is_taken(tmp_path: Path, found: dict[str, Any]) -> None:
    async with contest(tmp_path) as made:
        metadata = {"name": NAME, "namespace": NAMESPACE, "labels": {"team": "a"}}
        made.api.store.put(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": found,
            }
        )
        elector = await made.join()
        await made.api.until(held_by(made.api, elector))
        lease = made.api.store.get("leases", NAMESPACE, NAME)
        assert lease is not None
        assert lease["metadata"]["labels"] == {"team": "a"}


async def test_leadership_is_over_by_the_clock_before_the_loop_turns(tmp_path: Path) -> None:
    async with contest(tmp_path) as made:
        elector = await made.join()
        await made.leader()
        made.clock.ahead_s += PATIENT.renew_s  # as if the loop had been blocked for that long
        assert not elector.is_leader
        assert made.told_to(elector) == [True]
        await made.api.until(lambda: elector.is_leader)
        assert made.told_to(elector) == [True, False, True], "nothing is left out"


async def test_a_missing_permission_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with contest(tmp_path, token="weak") as made:
        made.api.access.users["weak"] = service_account(NAMESPACE, "epp")
        elector = await made.join()
        await made.api.until(lambda: len(made.api.calls("get", "leases")) > 3)
        assert not elector.is_leader
        said = [each.getMessage() for each in caplog.records if "leases" in each.getMessage()]
        assert len(said) == 1
        assert "a Role must allow get, create and update of leases.coordination.k8s.io" in said[0]
        made.api.access.grant(
            service_account(NAMESPACE, "epp").name,
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "verbs": ["get", "create", "update"],
            },
            namespace=NAMESPACE,
        )
        await made.api.until(lambda: elector.is_leader)
