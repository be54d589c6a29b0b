"""A reflector and a faithful API server: whatever happens there, the copy ends up the same."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml

from epp.edge.kubernetes.access import Access, from_kubeconfig, in_cluster
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.objects import (
    INFERENCE_MODEL_REWRITES,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    LEASES,
    Lease,
    LeaseSpec,
    Metadata,
)
from epp.edge.kubernetes.reflector import Backoff, Pace, Reflector
from epp.edge.kubernetes.tokens import FixedToken
from tests.integration.kubernetes_script import QUICK, Heard, reflecting, until
from tests.kubernetes.authority import service_account
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Answer, Cut, Delay, Inject, Silence, Slow, error_event, garbage
from tests.kubernetes.objects import objective, pod, pool, rewrite, rule
from tests.kubernetes.resources import NEW_GROUP, OLD_GROUP

NS = "default"


@asynccontextmanager
async def followed(
    api: FakeApi, *names: str, **options: Any
) -> AsyncIterator[tuple[Reflector[Any], Heard]]:
    """The named pods exist before; the reflector has listed them and watches."""
    for name in names:
        api.store.put(pod(name))
    heard = Heard()
    async with reflecting(api.url, namespace=NS, on_change=heard, **options) as reflector:
        await api.until(lambda: reflector.synced and api.open_watches)
        yield reflector, heard


async def same(api: FakeApi, reflector: Reflector[Any], heard: Heard, plural: str = "pods") -> None:
    """Waits until the copy, and what was told, is what the API server has."""

    def is_so() -> bool:
        there = {
            f"{obj['metadata']['namespace']}/{obj['metadata']['name']}": (
                obj["metadata"]["uid"],
                obj["metadata"]["resourceVersion"],
            )
            for obj in api.store.list(plural)
        }
        meta = {key: each.metadata for key, each in reflector.store.items()}
        here = {key: (each.uid, each.resource_version) for key, each in meta.items()}
        told = {f"{NS}/{name}": uid for name, uid in heard.names.items()}
        return there == here and told == {key: uid for key, (uid, _) in there.items()}

    await until(is_so)


# -- lists and watches ---------------------------------------------------------------------


async def test_what_exists_before_it_starts_is_told_at_once_and_whole() -> None:
    async with FakeApi() as api, followed(api, *"edcba") as (reflector, heard):
        assert reflector.synced
        assert heard.story == ["+a", "+b", "+c", "+d", "+e"]
        assert len(heard.changes) == 1
        assert heard.changes[0].synced


async def test_of_nothing_it_is_told_that_there_is_nothing() -> None:
    async with FakeApi() as api, followed(api) as (_, heard):
        assert [(c.upserted, c.deleted, c.synced) for c in heard.changes] == [((), (), True)]


async def test_a_long_list_comes_in_pages() -> None:
    pace = msgspec.structs.replace(QUICK, page_objects=3)
    async with FakeApi() as api, followed(api, *"abcdefgh", pace=pace) as (_, heard):
        assert len(heard.names) == 8
        assert [call.query["limit"] for call in api.calls("list")] == ["3"] * 3
        assert len(heard.changes) == 1


async def test_a_watch_asks_for_bookmarks_and_to_be_ended_at_a_time_of_its_own() -> None:
    times_s = set()
    async with FakeApi() as api:
        for seed in range(3):
            async with followed(api, pace=Pace(), seed=seed):
                query = api.calls("watch")[-1].query
                assert query["allowWatchBookmarks"] == "true"
                times_s.add(int(query["timeoutSeconds"]))
                await until(lambda: api.open_watches == 1)
            await until(lambda: not api.open_watches)
    assert len(times_s) == 3
    assert all(300 <= each <= 600 for each in times_s)


async def test_pods_come_change_and_go() -> None:
    async with FakeApi() as api, followed(api, "a", "b") as (reflector, heard):
        api.store.put(pod("c", "fd00::1", {"role": "decode"}, ready=False))
        api.store.put(pod("a", None))
        api.store.delete("pods", NS, "b")
        await same(api, reflector, heard)
        made = reflector.store[f"{NS}/c"]
        assert (made.status.pod_ip, made.status.pod_ips[0].ip) == ("fd00::1", "fd00::1")
        assert (made.status.host_ip, made.ready) == ("192.0.2.1", False)
        assert made.metadata.labels == {"role": "decode"}
        assert reflector.store[f"{NS}/a"].status.pod_ip == ""
        assert reflector.counts.relists == 0


async def test_a_pod_that_is_on_its_way_out_says_so() -> None:
    async with FakeApi() as api, followed(api, "a") as (reflector, heard):
        assert reflector.store[f"{NS}/a"].metadata.deletion_timestamp is None
        api.store.delete("pods", NS, "a", graceful=True)
        await same(api, reflector, heard)
        assert reflector.store[f"{NS}/a"].metadata.deletion_timestamp


async def test_another_namespace_is_not_looked_at() -> None:
    async with FakeApi() as api, followed(api, "a") as (reflector, heard):
        api.store.put(pod("x", namespace="elsewhere"))
        api.store.put(pod("b"))
        await until(lambda: "b" in heard.names)
        assert sorted(reflector.store) == [f"{NS}/a", f"{NS}/b"]


async def test_a_pod_that_stops_matching_the_selector_is_deleted() -> None:
    selectors = {"label_selector": "app in (vllm, sglang)"}
    async with FakeApi() as api, followed(api, "a", "b", selectors=selectors) as (_, heard):
        api.store.put(pod("a", labels={"app": "other"}))
        api.store.put(pod("c", labels={"app": "sglang"}))
        await until(lambda: sorted(heard.names) == ["b", "c"])


async def test_one_pool_is_followed_by_its_name() -> None:
    async with FakeApi() as api:
        api.store.put(pool("p", {"app": "vllm"}, (8000, 8001), app_protocol="kubernetes.io/h2c"))
        api.store.put(pool("q"))
        async with reflecting(
            api.url,
            INFERENCE_POOLS,
            namespace=NS,
            selectors={"field_selector": "metadata.name=p"},
        ) as reflector:
            await until(lambda: reflector.synced)
            (found,) = reflector.store.values()
    assert found.spec.selector.match_labels == {"app": "vllm"}
    assert [port.number for port in found.spec.target_ports] == [8000, 8001]
    assert found.spec.app_protocol == "kubernetes.io/h2c"


async def test_objectives_and_rewrites_are_read() -> None:
    async with FakeApi() as api:
        api.store.put(objective("o", "p", -1))
        api.store.put(rewrite("r", "p", [rule(["m"], {"a": 1, "b": None})], created=CREATED))
        async with (
            reflecting(api.url, INFERENCE_OBJECTIVES, namespace=NS) as objectives,
            reflecting(api.url, INFERENCE_MODEL_REWRITES, namespace=NS) as rewrites,
        ):
            await until(lambda: objectives.synced and rewrites.synced)
            (told,), (split,) = objectives.store.values(), rewrites.store.values()
    assert (told.spec.priority, told.spec.pool_ref.name) == (-1, "p")
    assert told.spec.pool_ref.group == "inference.networking.k8s.io"
    assert split.metadata.creation_timestamp == CREATED
    (only,) = split.spec.rules
    assert [match.model.value for match in only.matches] == ["m"]
    assert [(each.model_rewrite, each.weight) for each in only.targets] == [("a", 1), ("b", None)]


CREATED = "2026-03-01T00:00:00Z"


# -- what is missed while away -------------------------------------------------------------


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("as_status", [False, True])
async def test_what_is_deleted_while_the_watch_is_down_is_deleted(
    forgotten: bool, as_status: bool
) -> None:
    async with FakeApi() as api, followed(api, "a", "b", "c") as (reflector, heard):
        api.gone_as_status = as_status
        rule = api.faults.add(Answer(503), verb="watch")
        api.faults.strike(Cut())
        await api.until(lambda: rule.hits)
        api.store.delete("pods", NS, "b")
        api.store.put(pod("a", "10.0.0.9"))
        api.store.put(pod("c", uid="another"))
        api.store.put(pod("d"))
        if forgotten:
            api.store.compact()
        api.faults.remove(rule)
        await same(api, reflector, heard)
        assert reflector.counts.relists == forgotten
        assert heard.names == {"a": heard.names["a"], "c": "another", "d": heard.names["d"]}


@pytest.mark.parametrize("silent", [False, True])
async def test_versions_that_start_again_are_noticed(silent: bool) -> None:
    """A restored etcd; a server may answer a version it has never heard of with silence."""
    pace = msgspec.structs.replace(QUICK, idle_s=0.3)
    async with FakeApi() as api, followed(api, "a", "b", pace=pace) as (each, heard):
        api.store.reset_versions(silent=silent)
        api.store.delete("pods", NS, "a")
        await same(api, each, heard)


async def test_an_outage_changes_nothing_and_what_happened_meanwhile_is_found() -> None:
    async with FakeApi() as api, followed(api, "a", "b") as (reflector, heard):
        await api.outage()
        await until(lambda: reflector.counts.errors["Connection"] >= 2)
        assert sorted(heard.names) == ["a", "b"]
        api.store.delete("pods", NS, "a")
        await api.recover()
        await same(api, reflector, heard)


async def test_bookmarks_keep_the_version_young() -> None:
    """Pods of another namespace move the version; without bookmarks it would be forgotten."""
    async with FakeApi(bookmark_s=0.02) as api, followed(api, "a") as (reflector, heard):
        for number in range(5):
            api.store.put(pod(f"x{number}", namespace="elsewhere"))
        seen = reflector.counts.events["BOOKMARK"]
        await until(lambda: reflector.counts.events["BOOKMARK"] >= seen + 2)
        api.store.compact()
        api.faults.strike(Cut())
        api.store.put(pod("b"))
        await until(lambda: "b" in heard.names)
        assert reflector.counts.relists == 0


# -- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Cut(after_bytes=50),
        Cut(after_bytes=50, reset=False),
        Inject(error_event(410)),
        Inject(error_event(429)),
        Inject(error_event(500)),
        Inject(garbage()),
        Inject(b'{"type":"NEWS","object":{}}\n'),
        Inject(b"\n", end=True),
        Silence(),
    ],
    ids=repr,
)
async def test_a_watch_that_goes_wrong_comes_right(fault: Any) -> None:
    pace = msgspec.structs.replace(QUICK, idle_s=0.2)
    async with FakeApi(bookmark_s=0.05) as api, followed(api, "a", "b", pace=pace) as (each, heard):
        api.faults.add(fault, verb="watch", count=2)
        api.faults.strike(Cut())
        api.store.delete("pods", NS, "a")
        api.store.put(pod("c"))
        await same(api, each, heard)


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_answers_may_be_cut_anywhere(size: int) -> None:
    async with FakeApi() as api:
        api.store.put(pod("a", annotations={"who": "müller 東京"}))
        api.faults.add(Slow(size))
        async with followed(api) as (reflector, heard):
            api.store.put(pod("b", annotations={"who": "müller 東京"}))
            await same(api, reflector, heard)
            assert reflector.store[f"{NS}/b"].metadata.annotations == {"who": "müller 東京"}
            assert not reflector.counts.errors


@pytest.mark.parametrize("code", [401, 403, 404, 410, 429, 500, 503])
async def test_refused_lists_are_asked_for_again(code: int) -> None:
    async with FakeApi() as api:
        rule = api.faults.add(Answer(code), verb="list", count=3)
        async with followed(api, "a") as (reflector, _):
            assert rule.hits == 3
            assert sum(reflector.counts.errors.values()) == 3


async def test_a_page_that_expires_while_paging_leads_to_one_long_list() -> None:
    pace = msgspec.structs.replace(QUICK, page_objects=2)
    async with FakeApi() as api:
        for name in "abcdef":
            api.store.put(pod(name))
        held = api.faults.add(Delay(after=True), verb="list", count=1)
        heard = Heard()
        async with reflecting(api.url, namespace=NS, on_change=heard, pace=pace) as reflector:
            await api.until(lambda: held.hits)
            api.store.delete("pods", NS, "a")
            api.store.compact()
            api.faults.remove(held)
            await same(api, reflector, heard)
        assert sorted(heard.names) == ["b", "c", "d", "e", "f"]
        assert "limit" not in api.calls("list")[-1].query


# -- who we are ----------------------------------------------------------------------------


async def test_a_pod_follows_over_tls_with_its_service_account(tmp_path: Path) -> None:
    async with FakeApi(tls=True, token="t1") as api:
        access = in_cluster(api.service_account(tmp_path, namespace=NS), tmp_path)
        async with reflecting(access, namespace=access.namespace) as reflector:
            await until(lambda: reflector.synced)
            api.token = "t2"
            api.cut_connections()
            api.store.put(pod("a"))
            await until(lambda: reflector.store)
            assert reflector.counts.errors["401"] == 0, "the new token was read at once"


async def test_a_kubeconfig_leads_to_the_api_server(tmp_path: Path) -> None:
    async with FakeApi(tls=True, token="t1") as api:
        access = from_kubeconfig(api.kubeconfig(tmp_path))
        async with reflecting(access, namespace=NS) as reflector:
            await until(lambda: reflector.synced)


async def test_a_certificate_of_another_authority_is_not_trusted() -> None:
    async with FakeApi(tls=True) as api, FakeApi(tls=True) as other:
        access = Access(server=api.url, namespace=NS, tls=other.client_tls())
        async with reflecting(access, namespace=NS) as reflector:
            await until(lambda: reflector.counts.errors["Tls"] >= 2)
        assert not api.seen


@pytest.mark.parametrize(("name", "trusted"), [(None, True), ("localhost", True), ("api", False)])
async def test_the_certificate_must_have_the_name_that_is_expected(
    name: str | None, trusted: bool
) -> None:
    async with FakeApi(tls=True) as api:
        access = Access(server=api.url, namespace=NS, tls=api.client_tls(), tls_server_name=name)
        async with reflecting(access, namespace=NS) as reflector:
            await until(lambda: reflector.synced or reflector.counts.errors["Tls"])
            assert reflector.synced is trusted


async def test_the_rule_that_is_missed_is_all_that_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a Role of the namespace: nothing here needs a right in the whole cluster."""
    async with FakeApi(token="admin") as api:
        api.store.put(pool("p"))
        user = api.access.users["ours"] = service_account(NS, "epp")
        access = Access(server=api.url, namespace=NS, token=FixedToken("ours"))
        async with reflecting(
            access,
            INFERENCE_POOLS,
            namespace=NS,
            selectors={"field_selector": "metadata.name=p"},
        ) as reflector:
            await until(lambda: reflector.counts.errors["403"] >= 2)
            (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            missed = yaml.safe_load(said[said.index("{") :])
            api.access.grant(user.name, {**missed, "resourceNames": ["p"]}, namespace=NS)
            await api.until(lambda: reflector.synced and api.open_watches)
    assert "Forbidden to list inferencepools" in said


# -- kinds that come and go ----------------------------------------------------------------


async def test_a_kind_is_found_when_it_is_installed_later() -> None:
    heard = Heard()
    async with (
        FakeApi(absent=[NEW_GROUP, OLD_GROUP]) as api,
        reflecting(api.url, INFERENCE_OBJECTIVES, namespace=NS, on_change=heard) as reflector,
    ):
        await until(lambda: reflector.absent)
        assert not api.calls("list")
        api.store.install(OLD_GROUP)
        api.store.put(objective("o", "p", group=OLD_GROUP))
        await until(lambda: heard.names)
        assert not reflector.absent
        api.store.uninstall(OLD_GROUP)
        await until(lambda: not heard.names and reflector.absent)
        api.store.install(NEW_GROUP)
        api.store.put(objective("n", "p"))
        await until(lambda: list(heard.names) == ["n"])


async def test_where_both_groups_serve_a_kind_the_new_one_counts() -> None:
    heard = Heard()
    async with FakeApi() as api:
        api.store.put(objective("old", "p", group=OLD_GROUP))
        api.store.put(objective("new", "p", group=NEW_GROUP))
        async with reflecting(api.url, INFERENCE_OBJECTIVES, namespace=NS, on_change=heard):
            await until(lambda: heard.names)
    assert list(heard.names) == ["new"]


# -- other clients of the client -----------------------------------------------------------


async def test_a_lease_is_made_and_replaced() -> None:
    async with (
        FakeApi() as api,
        ApiClient(Access(server=api.url, namespace=NS), user_agent="test") as client,
    ):
        time_text = "2026-01-01T00:00:00.000000Z"
        spec = LeaseSpec(
            holder_identity="me",
            lease_duration_seconds=15,
            acquire_time=time_text,
            renew_time=time_text,
            lease_transitions=0,
        )
        lease = Lease(metadata=Metadata(name="l", namespace=NS), spec=spec)
        made = await client.create(LEASES.path(NS), msgspec.json.encode(lease))
        read = msgspec.json.decode(made, type=Lease)
        assert read.spec == spec
        assert read.metadata.resource_version
        released = LeaseSpec(holder_identity="", lease_duration_seconds=1, renew_time=time_text)
        body = msgspec.json.encode(msgspec.structs.replace(read, spec=released))
        await client.replace(LEASES.path(NS, "l"), body)
        assert api.store.get("leases", NS, "l")["spec"]["holderIdentity"] == ""


# -- waits ---------------------------------------------------------------------------------


def test_waits_double_up_to_their_bound_and_are_spread() -> None:
    backoff = Backoff((0.2, 30.0), Random(3))
    waits = [backoff.next_s() for _ in range(12)]
    assert all(0.2 * 2**n <= wait <= 0.3 * 2**n for n, wait in enumerate(waits[:7]))
    assert all(20.0 <= wait <= 30.0 for wait in waits[7:])
    assert len(set(waits)) == len(waits)
    backoff.reset()
    assert backoff.next_s() <= 0.3
