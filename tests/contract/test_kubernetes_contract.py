"""What our Kubernetes client relies on, checked against the fake and against a real cluster.

Plain requests only, so that a mistake of our client's cannot hide one of the fake's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.cluster import Cluster
from tests.kubernetes.resources import CONFIG_MAP, LEASE, POD


async def test_pages_hold_everything_once_and_are_of_one_moment(cluster: Cluster) -> None:
    for name in "abcde":
        await cluster.create(CONFIG_MAP, cluster.config_map(name))
    page = await cluster.list(CONFIG_MAP, limit=2)
    assert "remainingItemCount" not in page.body["metadata"]  # a selector was given
    await cluster.plain.call("DELETE", cluster.path(CONFIG_MAP, "d"))
    names, versions = page.names, {page.version}
    while token := page.body["metadata"].get("continue"):
        page = await cluster.list(CONFIG_MAP, limit=2, **{"continue": token})
        names += page.names
        versions.add(page.version)
    assert cluster.short(names) == list("abcde")
    assert len(versions) == 1
    assert cluster.short((await cluster.list(CONFIG_MAP)).names) == list("abce")


async def test_items_of_a_built_in_kind_do_not_say_their_kind(cluster: Cluster) -> None:
    await cluster.create(CONFIG_MAP, cluster.config_map("a"))
    answer = await cluster.list(CONFIG_MAP)
    assert answer.body["kind"] == "ConfigMapList"
    assert not {"kind", "apiVersion"} & answer.body["items"][0].keys()


async def test_a_watch_goes_on_where_the_list_was(cluster: Cluster) -> None:
    await cluster.create(CONFIG_MAP, cluster.config_map("before"))
    version = (await cluster.list(CONFIG_MAP)).version
    after = await cluster.create(CONFIG_MAP, cluster.config_map("after"))
    query = {"resourceVersion": version, "labelSelector": cluster.mine}
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        type_, obj = await lines.event()
        assert (type_, obj["metadata"]["name"]) == ("ADDED", cluster.name("after"))
        assert (obj["kind"], obj["apiVersion"]) == ("ConfigMap", "v1")
        after["data"] = {"x": "1"}
        changed = (await cluster.replace(CONFIG_MAP, after)).body
        type_, obj = await lines.event()
        assert (type_, obj["data"]) == ("MODIFIED", {"x": "1"})
        assert obj["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]
        assert obj["metadata"]["uid"] == after["metadata"]["uid"]


async def test_a_delete_is_told_with_the_last_state_and_a_new_version(cluster: Cluster) -> None:
    made = await cluster.create(CONFIG_MAP, cluster.config_map("a", x="1"))
    version = made["metadata"]["resourceVersion"]
    query = {"resourceVersion": version, "labelSelector": cluster.mine}
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        gone = await cluster.plain.call("DELETE", cluster.path(CONFIG_MAP, "a"))
        assert (gone.code, gone.body["status"]) == (200, "Success")
        type_, obj = await lines.event()
    assert (type_, obj["data"]) == ("DELETED", {"x": "1"})
    assert obj["metadata"]["resourceVersion"] != version


async def test_crossing_a_selector_is_told_as_coming_and_going(cluster: Cluster) -> None:
    made = await cluster.create(CONFIG_MAP, cluster.config_map("a"))
    query = {
        "resourceVersion": made["metadata"]["resourceVersion"],
        "labelSelector": f"{cluster.mine},role in (in)",
    }
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        made["metadata"]["labels"]["role"] = "in"
        made = (await cluster.replace(CONFIG_MAP, made)).body
        assert await lines.brief() == ("ADDED", cluster.name("a"))
        made["metadata"]["labels"]["role"] = "out"
        left = (await cluster.replace(CONFIG_MAP, made)).body
        type_, obj = await lines.event()
    assert type_ == "DELETED"
    assert obj["metadata"]["labels"]["role"] == "in"
    assert obj["metadata"]["resourceVersion"] == left["metadata"]["resourceVersion"]


async def test_a_watch_can_be_of_one_name(cluster: Cluster) -> None:
    version = (await cluster.list(CONFIG_MAP)).version
    for name in "ab":
        await cluster.create(CONFIG_MAP, cluster.config_map(name))
    query = {"resourceVersion": version, "fieldSelector": f"metadata.name={cluster.name('b')}"}
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        assert await lines.brief() == ("ADDED", cluster.name("b"))


async def test_bookmarks_carry_a_version_and_end_an_initial_list(cluster: Cluster) -> None:
    await cluster.create(CONFIG_MAP, cluster.config_map("a"))
    query = {
        "labelSelector": cluster.mine,
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        assert await lines.brief() == ("ADDED", cluster.name("a"))
        type_, mark = await lines.event()
        assert type_ == "BOOKMARK"
        meta = mark["metadata"]
        assert meta["annotations"]["k8s.io/initial-events-end"] == "true"
        assert "name" not in meta
    again = {"resourceVersion": meta["resourceVersion"], "labelSelector": cluster.mine}
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **again) as lines:
        await cluster.create(CONFIG_MAP, cluster.config_map("b"))
        assert await lines.brief() == ("ADDED", cluster.name("b"))


async def test_a_watch_ends_cleanly_after_its_timeout(cluster: Cluster) -> None:
    version = (await cluster.list(CONFIG_MAP)).version
    query = {"labelSelector": cluster.mine, "resourceVersion": version, "timeoutSeconds": 1}
    async with cluster.plain.watch(cluster.path(CONFIG_MAP), **query) as lines:
        assert await lines.raw() is None


async def test_a_version_of_long_ago_has_expired(cluster: Cluster) -> None:
    path = cluster.path(CONFIG_MAP)
    async with cluster.plain.session.get(
        cluster.plain.url + path,
        headers=cluster.plain.headers(),
        params={"watch": "true", "resourceVersion": "1"},
    ) as response:
        if response.status == 410:
            return
        assert response.status == 200
        line = await response.content.readline()
    assert b'"ERROR"' in line
    assert b'"code":410' in line


@pytest.mark.parametrize(
    "query",
    [
        {"labelSelector": "a in b"},
        {"fieldSelector": "data.x=1"},
        {"continue": "nonsense"},
        {"resourceVersion": "nonsense"},
    ],
    ids=str,
)
async def test_a_query_that_cannot_be_read_is_refused(
    cluster: Cluster, query: dict[str, str]
) -> None:
    answer = await cluster.plain.get(cluster.path(CONFIG_MAP), **query)
    assert answer.code == 400
    assert answer.body["kind"] == "Status"


async def test_a_write_that_changes_nothing_keeps_the_version(cluster: Cluster) -> None:
    made = await cluster.create(CONFIG_MAP, cluster.config_map("a", x="1"))
    answer = await cluster.replace(CONFIG_MAP, made)
    assert answer.version == made["metadata"]["resourceVersion"]


async def test_a_lease_is_taken_once(cluster: Cluster) -> None:
    await cluster.create(LEASE, cluster.lease("l", "a"))
    answer = await cluster.plain.call("POST", cluster.path(LEASE), cluster.lease("l", "b"))
    assert (answer.code, answer.reason) == (409, "AlreadyExists")


async def test_of_two_writes_to_a_lease_the_later_conflicts(cluster: Cluster) -> None:
    made = await cluster.create(LEASE, cluster.lease("l", "a"))
    made["spec"]["holderIdentity"] = "b"
    assert (await cluster.replace(LEASE, made)).code == 200
    made["spec"]["holderIdentity"] = "c"
    answer = await cluster.replace(LEASE, made)
    assert (answer.code, answer.reason) == (409, "Conflict")
    stored = await cluster.plain.get(cluster.path(LEASE, "l"))
    assert stored.body["spec"]["holderIdentity"] == "b"
    del made["metadata"]["resourceVersion"]
    assert (await cluster.replace(LEASE, made)).code == 422


@pytest.mark.parametrize(
    "time", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.123Z", "2026-01-01T00:00:00.123456789Z"]
)
async def test_a_lease_wants_microseconds(cluster: Cluster, time: str) -> None:
    made = cluster.lease("l", "a")
    made["spec"]["renewTime"] = time
    assert (await cluster.plain.call("POST", cluster.path(LEASE), made)).code == 400
    made["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z"
    stored = await cluster.create(LEASE, made)
    assert stored["spec"]["renewTime"] == "2026-01-01T00:00:00.000000Z"


async def test_a_lease_can_be_released(cluster: Cluster) -> None:
    made = await cluster.create(LEASE, cluster.lease("l", "a"))
    made["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
    assert (await cluster.replace(LEASE, made)).code == 200
    made = (await cluster.plain.get(cluster.path(LEASE, "l"))).body
    assert not made["spec"].get("holderIdentity")
    made["spec"]["leaseDurationSeconds"] = 0
    assert (await cluster.replace(LEASE, made)).code == 422


async def test_what_is_absent_is_not_found(cluster: Cluster) -> None:
    path = f"/apis/absent.example.test/v1/namespaces/{cluster.namespace}/things"
    assert (await cluster.plain.get(path)).code == 404  # its body is not always JSON
    assert (await cluster.plain.get(path, watch="true")).code == 404
    unknown = await cluster.plain.get(f"/api/v1/namespaces/{cluster.namespace}/things")
    assert (unknown.code, unknown.reason) == (404, "NotFound")
    missing = await cluster.plain.get(cluster.path(CONFIG_MAP, "none"))
    assert (missing.code, missing.reason) == (404, "NotFound")
    assert missing.body["details"]["name"] == cluster.name("none")


async def test_a_wrong_token_is_unauthorized(cluster: Cluster) -> None:
    answer = await cluster.stranger.get(POD.path(cluster.namespace))
    assert (answer.code, answer.reason) == (401, "Unauthorized")
    assert answer.body["kind"] == "Status"


async def test_reviews_answer_who_and_whether(cluster: Cluster) -> None:
    async def review(group: str, kind: str, spec: dict[str, Any]) -> Any:
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        answer = await cluster.plain.call("POST", f"/apis/{group}/v1/{kind.lower()}s", body)
        assert answer.code == 201, answer
        return answer.body["status"]

    unknown = await review("authentication.k8s.io", "TokenReview", {"token": "wrong"})
    assert not unknown.get("authenticated", False)
    asked = {"user": "nobody-here", "nonResourceAttributes": {"path": "/metrics", "verb": "get"}}
    allowed = await review("authorization.k8s.io", "SubjectAccessReview", asked)
    assert allowed["allowed"] is False
