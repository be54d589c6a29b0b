"""The fake API server lists as a real one does: versions, order, pages, selectors, discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kubernetes.answers import RefusedError
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.objects import lease, objective, pod, pool, rewrite, rule
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import (
    LEASE,
    NEW_GROUP,
    OBJECTIVE,
    OLD_GROUP,
    OLD_OBJECTIVE,
    POD,
    POOL,
    POOL_GROUP,
)
from tests.kubernetes.selectors import field_test, label_test

PODS = POD.path("default")


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest.fixture
async def plain(api: FakeApi) -> AsyncIterator[Plain]:
    async with Plain(api.url) as plain:
        yield plain


async def test_each_write_moves_one_version_that_all_kinds_share(
    api: FakeApi, plain: Plain
) -> None:
    first = api.store.put(pod("a"))["metadata"]["resourceVersion"]
    second = api.store.put(pool("a"))["metadata"]["resourceVersion"]
    assert isinstance(second, str)
    assert int(second) == int(first) + 1
    assert (await plain.get(PODS)).version == second
    assert api.store.delete("pods", "default", "a")["metadata"]["resourceVersion"] > second


async def test_built_in_items_leave_their_kind_out_and_custom_ones_do_not(
    api: FakeApi, plain: Plain
) -> None:
    api.store.put(pod("a"))
    api.store.put(pool("a"))
    pods, pools = await plain.get(PODS), await plain.get(POOL.path("default"))
    assert pods.body["kind"] == "PodList"
    assert not {"kind", "apiVersion"} & pods.body["items"][0].keys()
    assert pools.body["items"][0]["kind"] == "InferencePool"
    one = await plain.get(POD.path("default", "a"))
    assert (one.body["kind"], one.body["apiVersion"]) == ("Pod", "v1")


async def test_a_list_is_in_the_order_of_namespace_and_name(api: FakeApi, plain: Plain) -> None:
    for namespace, name in (("b", "x"), ("a", "y"), ("a", "b"), ("a-b", "z")):
        api.store.put(pod(name, namespace=namespace))
    body = (await plain.get(POD.path())).body
    found = [(i["metadata"]["namespace"], i["metadata"]["name"]) for i in body["items"]]
    assert found == [("a-b", "z"), ("a", "b"), ("a", "y"), ("b", "x")]  # as etcd sorts its keys
    assert (await plain.get(POD.path("a"))).names == ["b", "y"]


async def test_pages_are_all_of_the_first_pages_moment(api: FakeApi, plain: Plain) -> None:
    for name in "abcde":
        api.store.put(pod(name))
    page = await plain.get(PODS, limit=2)
    assert page.names == ["a", "b"]
    assert page.body["metadata"]["remainingItemCount"] == 3
    version, labels = page.version, {"app": "other"}
    api.store.delete("pods", "default", "d")
    api.store.put(pod("c", labels=labels))
    api.store.put(pod("cc"))
    names, pages = page.names, [page]
    while token := pages[-1].body["metadata"].get("continue"):
        pages.append(await plain.get(PODS, **{"limit": 2, "continue": token}))
        names += pages[-1].names
    assert names == list("abcde")
    assert {page.version for page in pages} == {version}
    assert pages[1].body["items"][0]["metadata"]["labels"] == {"app": "vllm"}
    assert (await plain.get(PODS)).names == ["a", "b", "c", "cc", "e"]
    assert (await plain.get(PODS, limit=2, labelSelector="app")).body["metadata"].keys() == {
        "resourceVersion",
        "continue",
    }


async def test_a_token_that_was_compacted_is_gone_and_tells_how_to_go_on(
    api: FakeApi, plain: Plain
) -> None:
    for name in "abc":
        api.store.put(pod(name))
    page = await plain.get(PODS, limit=1)
    api.store.put(pod("aa"))
    api.store.compact()
    gone = await plain.get(PODS, **{"limit": 1, "continue": page.body["metadata"]["continue"]})
    assert (gone.code, gone.reason) == (410, "Expired")
    rest = await plain.get(PODS, **{"continue": gone.body["metadata"]["continue"]})
    assert rest.names == ["aa", "b", "c"]


async def test_versions_of_a_list_can_be_asked_for(api: FakeApi, plain: Plain) -> None:
    old = api.store.put(pod("a"))["metadata"]["resourceVersion"]
    api.store.put(pod("b"))
    exact = {"resourceVersion": old, "resourceVersionMatch": "Exact"}
    assert (await plain.get(PODS, **exact)).names == ["a"]
    assert (await plain.get(PODS, resourceVersion=old)).names == ["a", "b"]
    assert (await plain.get(PODS, resourceVersion=0, limit=1)).names == ["a", "b"]
    ahead = await plain.get(PODS, resourceVersion=10**9)
    assert (ahead.code, ahead.reason) == (504, "Timeout")
    assert ahead.headers["Retry-After"] == "1"
    api.store.compact()
    assert (await plain.get(PODS, **exact)).code == 410


@pytest.mark.parametrize(
    "query",
    [
        {"labelSelector": "a b"},
        {"labelSelector": "a in b"},
        {"labelSelector": "=x"},
        {"labelSelector": "a=b,"},
        {"fieldSelector": "spec.hostNetwork=true"},
        {"fieldSelector": "nonsense"},
        {"limit": "-1"},
        {"continue": "!!"},
        {"resourceVersion": "latest"},
        {"resourceVersionMatch": "Exact"},
        {"watch": "true", "resourceVersion": "latest"},
        {"watch": "true", "timeoutSeconds": "soon"},
        {"watch": "true", "labelSelector": "a b"},
        {"watch": "true", "sendInitialEvents": "true"},
    ],
    ids=str,
)
async def test_a_query_that_is_wrong_is_a_bad_request(plain: Plain, query: dict[str, str]) -> None:
    assert (await plain.get(PODS, **query)).code == 400


LABELS = {"app": "vllm", "role": "decode", "n": "5", "example.test/x": ""}


@pytest.mark.parametrize(
    "selector",
    [
        *(None, "", "app", "app=vllm", "app==vllm", "app=vllm,role=decode", "role!=prefill"),
        *("gone!=x", "role in (decode,prefill)", "role in ( decode )", "role notin (a, b)"),
        *("gone notin (a)", "!gone", "! gone", "n>4", "n < 6", "example.test/x", "app , role"),
        *("example.test/x=", "example.test/x in ()", "gone!="),
    ],
)
def test_a_label_selector_that_holds(selector: str | None) -> None:
    assert label_test(selector)(LABELS)


@pytest.mark.parametrize(
    "selector",
    [
        *("gone", "app=other", "app=", "app=vllm,role=prefill", "role!=decode", "role in (a)"),
        *("role notin (decode)", "!app", "n>5", "app>1", "gone in (a)", "inside", "n<5"),
    ],
)
def test_a_label_selector_that_does_not_hold(selector: str) -> None:
    assert not label_test(selector)(LABELS)


@pytest.mark.parametrize(
    "selector",
    [
        *("a=b=c", "a in", "a in (b", "a,,b", ",", "a notin b", "a > b", "-a", "a=-b", "a/b/c"),
        *("in (a)", "a in(b) c", "(a)", "a=b c", "x" * 64, "a=" + "x" * 64, "!", "a!b"),
    ],
)
def test_a_label_selector_that_is_none(selector: str) -> None:
    with pytest.raises(RefusedError) as caught:
        label_test(selector)
    assert caught.value.code == 400


def test_field_selectors_know_names_and_for_pods_a_little_more() -> None:
    one = pod("a", namespace="n", node="x")
    for good in ("metadata.name=a", "metadata.namespace==n,spec.nodeName=x", "status.phase!=Bad"):
        assert field_test(good, POD)(one)
    for bad in ("metadata.name!=a", "spec.nodeName=", "status.phase=Failed"):
        assert not field_test(bad, POD)(one)
    with pytest.raises(RefusedError):
        field_test("status.phase=Running", POOL)


async def test_selectors_choose_what_is_listed(api: FakeApi, plain: Plain) -> None:
    for name in "abc":
        api.store.put(pod(name, labels={"name": name}, node=f"node-{name}"))
    assert (await plain.get(PODS, labelSelector="name in (a,c)")).names == ["a", "c"]
    assert (await plain.get(PODS, fieldSelector="metadata.name=b")).names == ["b"]
    assert (await plain.get(PODS, fieldSelector="spec.nodeName!=node-b")).names == ["a", "c"]


async def test_a_long_list_is_compressed_for_who_takes_it(api: FakeApi, plain: Plain) -> None:
    for i in range(40):
        api.store.put(pod(f"p{i}", annotations={"note": "x" * 5000}))
    answer = await plain.get(PODS)
    assert answer.headers["Content-Encoding"] == "gzip"
    assert len(answer.names) == 40
    headers = {"Accept-Encoding": "identity"}
    async with plain.session.get(plain.url + PODS, headers=headers) as response:
        assert "Content-Encoding" not in response.headers
    assert "Content-Encoding" not in (await plain.get(PODS, limit=1)).headers


async def test_discovery_names_what_is_installed(plain: Plain) -> None:
    groups = (await plain.get("/apis")).body["groups"]
    assert {NEW_GROUP, OLD_GROUP, POOL_GROUP} <= {group["name"] for group in groups}
    resources = (await plain.get(f"/apis/{NEW_GROUP}/v1alpha2")).body["resources"]
    assert {each["name"] for each in resources} >= {"inferenceobjectives", "inferencemodelrewrites"}
    assert (await plain.get("/api/v1")).body["groupVersion"] == "v1"
    assert (await plain.get("/version")).body["gitVersion"].startswith("v1.")
    assert (await plain.get("/readyz")).body == "ok"


async def test_a_crd_can_be_absent_and_come_and_go(plain: Plain, api: FakeApi) -> None:
    api.store.uninstall(NEW_GROUP)
    missing = await plain.get(OBJECTIVE.path("default"))
    assert (missing.code, missing.body) == (404, "404 page not found\n")  # the group is unknown
    assert (await plain.get(f"/apis/{NEW_GROUP}/v1alpha2")).code == 404
    assert (await plain.get(OLD_OBJECTIVE.path("default"))).code == 200
    api.store.install(NEW_GROUP, "inferencemodelrewrites")
    missing = await plain.get(OBJECTIVE.path("default"))
    assert (missing.code, missing.reason) == (404, "NotFound")  # the group is known
    api.store.install(NEW_GROUP)
    api.store.put(objective("o", "p", 3))
    api.store.put(objective("o", "p", 4, group=OLD_GROUP))
    assert (await plain.get(OBJECTIVE.path("default"))).body["items"][0]["spec"]["priority"] == 3
    api.store.uninstall(NEW_GROUP)
    api.store.install(NEW_GROUP)
    assert (await plain.get(OBJECTIVE.path("default"))).names == []
    assert (await plain.get(OLD_OBJECTIVE.path("default"))).names == ["o"]


def test_a_group_can_be_absent_from_the_start() -> None:
    api = FakeApi(absent=[NEW_GROUP])
    with pytest.raises(KeyError, match="not served here"):
        api.store.put(objective("o", "p"))
    assert api.store.put(objective("o", "p", group=OLD_GROUP))


async def test_one_object_is_read_by_its_name(api: FakeApi, plain: Plain) -> None:
    for obj in (lease("l"), rewrite("w", "p", [rule(["m"], {"n": 1})])):
        made = api.store.put(obj)
        kind = api.store.kinds.of(obj)
        answer = await plain.get(kind.path("default", obj["metadata"]["name"]))
        assert (answer.code, answer.body) == (200, made)
    missing = await plain.get(LEASE.path("default", "x"))
    assert missing.body["message"] == 'leases.coordination.k8s.io "x" not found'
    assert missing.body["details"]["kind"] == "leases"


async def test_what_is_handed_out_cannot_change_the_store(api: FakeApi, plain: Plain) -> None:
    mine = pod("a")
    api.store.put(mine)["metadata"]["labels"]["x"] = "1"
    mine["metadata"]["labels"]["y"] = "2"
    api.store.list("pods")[0]["metadata"]["labels"]["z"] = "3"
    assert (await plain.get(PODS)).body["items"][0]["metadata"]["labels"] == {"app": "vllm"}
