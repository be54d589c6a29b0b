"""The fake API server's watches: replay, selectors, bookmarks, ends, forgotten versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Inject, event
from tests.kubernetes.objects import lease, objective, pod, pool
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import LEASE, NEW_GROUP, OBJECTIVE, POD, POOL

PODS = POD.path("default")


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest.fixture
async def plain(api: FakeApi) -> AsyncIterator[Plain]:
    async with Plain(api.url) as plain:
        yield plain


async def test_a_watch_tells_what_came_after_its_version_and_nothing_before(
    api: FakeApi, plain: Plain
) -> None:
    api.store.put(pod("a"))
    version = (await plain.get(PODS)).version
    api.store.put(pod("b"))
    api.store.put(pool("b"))
    api.store.put(pod("b", ready=False))
    async with plain.watch(PODS, resourceVersion=version) as lines:
        type_, obj = await lines.event()
        assert (type_, obj["metadata"]["name"], obj["kind"]) == ("ADDED", "b", "Pod")
        assert await lines.brief() == ("MODIFIED", "b")
        last = api.store.delete("pods", "default", "a")
        assert await lines.event() == ("DELETED", last)
        assert last["metadata"]["resourceVersion"] == str(api.store.version)


@pytest.mark.parametrize("query", [{}, {"resourceVersion": 0}], ids=str)
async def test_a_watch_from_nowhere_begins_with_what_there_is(
    api: FakeApi, plain: Plain, query: dict[str, int]
) -> None:
    for name in "ba":
        api.store.put(pod(name))
    api.store.compact()
    async with plain.watch(PODS, **query) as lines:
        assert [await lines.brief() for _ in range(2)] == [("ADDED", "a"), ("ADDED", "b")]
        api.store.put(pod("c"))
        assert await lines.brief() == ("ADDED", "c")


async def test_an_initial_list_can_be_streamed(api: FakeApi, plain: Plain) -> None:
    version = api.store.put(pod("a"))["metadata"]["resourceVersion"]
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true"}
    assert (await plain.get(PODS, watch="1", **query)).code == 400
    async with plain.watch(PODS, resourceVersionMatch="NotOlderThan", **query) as lines:
        assert await lines.brief() == ("ADDED", "a")
        type_, mark = await lines.event()
        assert type_ == "BOOKMARK"
        assert mark["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert mark["metadata"]["resourceVersion"] == version


async def test_an_object_that_leaves_the_selector_is_told_as_deleted(
    api: FakeApi, plain: Plain
) -> None:
    inside, outside = {"app": "vllm", "x": "1"}, {"app": "other"}
    version = (await plain.get(PODS)).version
    query = {"resourceVersion": version, "labelSelector": "app=vllm"}
    async with plain.watch(PODS, **query) as lines:
        api.store.put(pod("a", labels=outside))
        made = api.store.put(pod("a", labels=inside))
        assert await lines.event() == ("ADDED", made)
        changed = api.store.put(pod("a", labels=inside, ready=False))
        assert await lines.event() == ("MODIFIED", changed)
        left = api.store.put(pod("a", labels=outside))
        type_, obj = await lines.event()
        assert (type_, obj["metadata"]["labels"]) == ("DELETED", inside)  # as it was inside
        assert obj["metadata"]["resourceVersion"] == left["metadata"]["resourceVersion"]
        api.store.delete("pods", "default", "a")  # nobody here knows it any more
        api.store.put(pod("b", labels=inside))
        assert await lines.brief() == ("ADDED", "b")


async def test_a_watch_keeps_to_its_namespace_and_its_name(api: FakeApi, plain: Plain) -> None:
    version = api.store.version
    for namespace in ("other", "default"):
        for name in "ab":
            api.store.put(pod(name, namespace=namespace))
    named = {"fieldSelector": "metadata.name=b", "resourceVersion": version}
    async with plain.watch(PODS, **named) as lines:
        _, obj = await lines.event()
        assert (obj["metadata"]["namespace"], obj["metadata"]["name"]) == ("default", "b")
    async with plain.watch(POD.path("other", "b"), resourceVersion=version) as lines:
        _, obj = await lines.event()
        assert (obj["metadata"]["namespace"], obj["metadata"]["name"]) == ("other", "b")


async def test_a_pod_that_ends_gracefully_is_modified_first(api: FakeApi, plain: Plain) -> None:
    version = api.store.put(pod("a"))["metadata"]["resourceVersion"]
    async with plain.watch(PODS, resourceVersion=version) as lines:
        api.store.delete("pods", "default", "a", graceful=True)
        type_, obj = await lines.event()
        assert (type_, "deletionTimestamp" in obj["metadata"]) == ("MODIFIED", True)
        api.store.delete("pods", "default", "a")
        assert await lines.brief() == ("DELETED", "a")


async def test_another_uid_is_another_object(api: FakeApi, plain: Plain) -> None:
    version = api.store.put(pod("a", uid="one"))["metadata"]["resourceVersion"]
    async with plain.watch(PODS, resourceVersion=version) as lines:
        api.store.put(pod("a", uid="two"))
        first, second = await lines.event(), await lines.event()
    assert (first[0], first[1]["metadata"]["uid"]) == ("DELETED", "one")
    assert (second[0], second[1]["metadata"]["uid"]) == ("ADDED", "two")


async def test_a_write_that_changes_nothing_is_no_event(api: FakeApi, plain: Plain) -> None:
    made = api.store.put(lease("l", "me"))
    version = made["metadata"]["resourceVersion"]
    path = LEASE.path("default", "l")
    async with plain.watch(LEASE.path("default"), resourceVersion=version) as lines:
        assert (await plain.call("PUT", path, made)).version == version
        made["spec"]["leaseDurationSeconds"] = 20
        changed = await plain.call("PUT", path, made)
        assert await lines.event() == ("MODIFIED", changed.body)


async def test_bookmarks_come_only_if_asked_for(plain: Plain, api: FakeApi) -> None:
    api.bookmark_s = 0.05
    version = api.store.version
    async with plain.watch(PODS, resourceVersion=version) as lines:
        async with plain.watch(PODS, resourceVersion=version, allowWatchBookmarks="true") as marked:
            latest = api.store.put(pool("p"))["metadata"]["resourceVersion"]
            while True:
                type_, mark = await marked.event()
                assert type_ == "BOOKMARK"
                if mark["metadata"]["resourceVersion"] == latest:
                    break
            assert mark == {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": latest, "creationTimestamp": None},
                "spec": {"containers": None},
                "status": {},
            }
        for name in "ab":
            api.store.put(pod(name))
            assert await lines.brief() == ("ADDED", name)


async def test_a_timeout_ends_a_watch_cleanly(plain: Plain, api: FakeApi) -> None:
    async with plain.watch(PODS, timeoutSeconds=1) as lines:
        assert await lines.raw() is None  # aiohttp raises when the end is not clean


async def test_all_watches_can_be_ended_cleanly(plain: Plain, api: FakeApi) -> None:
    async with plain.watch(PODS) as lines:
        await api.until(lambda: api.open_watches)
        api.store.end_watches()
        assert await lines.raw() is None
    await api.until(lambda: not api.open_watches)


async def test_a_forgotten_version_is_an_error_event_in_a_stream_that_ends(
    api: FakeApi, plain: Plain
) -> None:
    version = api.store.put(pod("a"))["metadata"]["resourceVersion"]
    api.store.put(pod("b"))
    async with plain.watch(PODS, resourceVersion=version) as open_before:
        await api.until(lambda: api.open_watches)
        api.store.compact()
        assert await open_before.brief() == ("ADDED", "b")  # an open watch does not mind
        async with plain.watch(PODS, resourceVersion=version) as lines:
            type_, error = await lines.event()
            assert (type_, error["kind"]) == ("ERROR", "Status")
            assert (error["code"], error["reason"]) == (410, "Expired")
            assert await lines.raw() is None
    api.gone_as_status = True
    assert (await plain.get(PODS, watch="1", resourceVersion=version)).code == 410
    async with plain.watch(PODS, resourceVersion=api.store.version) as lines:
        api.store.put(pod("c"))
        assert await lines.brief() == ("ADDED", "c")


async def test_restored_versions_start_low_and_end_the_watches(api: FakeApi, plain: Plain) -> None:
    api.store.put(pod("a"))
    old = (await plain.get(PODS)).version
    async with plain.watch(PODS, resourceVersion=old) as lines:
        await api.until(lambda: api.open_watches)
        api.store.reset_versions()
        assert await lines.raw() is None
    again = await plain.get(PODS)
    assert int(again.version) < int(old)
    assert again.names == ["a"]
    assert int(again.body["items"][0]["metadata"]["resourceVersion"]) <= int(again.version)
    async with plain.watch(PODS, resourceVersion=old) as lines:
        assert (await lines.event())[0] == "ERROR"


async def test_a_restore_may_leave_old_watches_silent(api: FakeApi, plain: Plain) -> None:
    old = int(api.store.put(pod("a"))["metadata"]["resourceVersion"])
    api.store.reset_versions(silent=True, first=old - 5)
    async with plain.watch(PODS, resourceVersion=old) as lines:
        await api.until(lambda: api.open_watches)
        missed = api.store.put(pod("missed"))
        assert int(missed["metadata"]["resourceVersion"]) <= old
        while api.store.version < old:
            api.store.put(pool("p"))
        api.store.put(pod("seen"))
        assert await lines.brief() == ("ADDED", "seen")


async def test_a_crd_that_goes_takes_its_objects_and_watches_along(
    api: FakeApi, plain: Plain
) -> None:
    version = api.store.put(objective("o", "p"))["metadata"]["resourceVersion"]
    async with plain.watch(OBJECTIVE.path("default"), resourceVersion=version) as lines:
        await api.until(lambda: api.open_watches)
        api.store.uninstall(NEW_GROUP)
        assert await lines.brief() == ("DELETED", "o")
        assert await lines.raw() is None
    assert (await plain.get(OBJECTIVE.path("default"), watch="1")).code == 404


async def test_a_pool_with_a_finalizer_lingers(api: FakeApi, plain: Plain) -> None:
    made = pool("p")
    made["metadata"]["finalizers"] = ["example.test/guard"]
    version = api.store.put(made)["metadata"]["resourceVersion"]
    path = POOL.path("default", "p")
    async with plain.watch(POOL.path("default"), resourceVersion=version) as lines:
        assert (await plain.call("DELETE", path)).body["kind"] == "InferencePool"
        type_, obj = await lines.event()
        assert (type_, "deletionTimestamp" in obj["metadata"]) == ("MODIFIED", True)
        del obj["metadata"]["finalizers"]
        assert (await plain.call("PUT", path, obj)).code == 200
        assert await lines.brief() == ("DELETED", "p")
    assert (await plain.get(path)).code == 404


async def test_many_changes_reach_many_watchers_in_order(api: FakeApi, plain: Plain) -> None:
    version = api.store.version

    async def follow() -> list[str]:
        async with plain.watch(PODS, resourceVersion=version) as lines:
            return [(await lines.event())[1]["metadata"]["resourceVersion"] for _ in range(300)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow()) for _ in range(5)]
        for i in range(300):
            api.store.put(pod(f"p{i % 7}"))
            if i % 50 == 0:
                await asyncio.sleep(0)
    first = tasks[0].result()
    assert all(task.result() == first for task in tasks)
    assert first == sorted(first, key=int)
    assert len(set(first)) == 300


@pytest.mark.parametrize("seed", range(10))
async def test_a_list_and_its_watch_add_up_to_the_next_list(
    api: FakeApi, plain: Plain, seed: int
) -> None:
    rng = Random(seed)
    query = {"labelSelector": "app in (a,b),!off"}

    def change() -> None:
        name = f"p{rng.randrange(8)}"
        labels = {"app": rng.choice("abc"), **({"off": ""} if rng.random() < 0.2 else {})}
        uid = rng.choice((None, None, "other"))
        if rng.random() < 0.7:
            api.store.put(pod(name, labels=labels, uid=uid, namespace=rng.choice("xy")))
        elif found := api.store.get("pods", "x", name):
            api.store.delete("pods", "x", name, graceful="deletionTimestamp" not in found)
        if rng.random() < 0.1:
            api.store.compact(api.store.version - rng.randrange(5))

    for _ in range(20):
        change()
    first = await plain.get(POD.path("x"), **query)
    known = {item["metadata"]["name"]: item["metadata"] for item in first.body["items"]}
    async with plain.watch(POD.path("x"), resourceVersion=first.version, **query) as lines:
        await api.until(lambda: api.open_watches)
        for _ in range(100):
            change()
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        api.store.put(pod("end", labels={"app": "a"}, namespace="x"))
        while "end" not in known:
            type_, obj = await lines.event()
            meta = obj["metadata"]
            assert (type_ == "ADDED") is (meta["name"] not in known)
            known[meta["name"]] = meta
            if type_ == "DELETED":
                del known[meta["name"]]
    last = await plain.get(POD.path("x"), **query)
    assert {item["metadata"]["name"]: item["metadata"] for item in last.body["items"]} == known


async def test_a_wish_of_a_test_may_come_first(api: FakeApi, plain: Plain) -> None:
    api.faults.add(Inject(event("NEWS", {"metadata": {"name": "x"}})), verb="watch", count=1)
    api.store.put(pod("a"))
    async with plain.watch(PODS) as lines:
        assert {await lines.brief(), await lines.brief()} == {("NEWS", "x"), ("ADDED", "a")}
