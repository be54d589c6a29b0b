"""Pools, pods, objectives and rewrites of an API server, as a listener hears of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from epp.core.cluster import PoolKey
from epp.edge.kubernetes.choice import pods_by_selector, pools_by_name
from epp.edge.kubernetes.objects import Pod
from epp.edge.kubernetes.pools import PoolTable
from epp.edge.kubernetes.reflector import Changes
from tests.integration.following import following
from tests.integration.pool_oracle import Listener
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import Answer, Delay
from tests.kubernetes.objects import objective, pod, pool, rewrite, rule
from tests.kubernetes.resources import NEW_GROUP, OLD_GROUP, POOL_GROUP

ONE = pools_by_name("pool", namespace="default")
ALL = pools_by_name("*", namespace="default")
KEY = PoolKey("default", "pool")
POOLS = "inferencepools"


@pytest_asyncio.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest.fixture
def listener() -> Listener:
    return Listener()


def addresses(listener: Listener, name: str = "pool") -> dict[str, str] | None:
    """Address -> endpoint name; `None` while the pool does not exist."""
    found = listener.seen().get(name)
    return None if found is None else {address: each[0] for address, each in found.items()}


# -- endpoints -----------------------------------------------------------------------------


async def test_pods_come_change_and_go_with_what_makes_them_serve(
    api: FakeApi, listener: Listener
) -> None:
    put = api.store.put
    put(pool("pool"))
    put(pod("a", "10.0.0.1"))
    put(pod("b", "10.0.0.2", ready=False))
    put(pod("c", "10.0.0.3", labels={"app": "other"}))
    both = {"10.0.0.1:8000": "a-rank-0", "10.0.0.2:8000": "b-rank-0"}
    async with following(api, listener, ONE):
        await api.until(lambda: listener.syncs)
        assert addresses(listener) == {"10.0.0.1:8000": "a-rank-0"}
        put(pod("b", "10.0.0.2"))
        await api.until(lambda: addresses(listener) == both)
        for gone in (
            pod("b", "10.0.0.2", ready=False),
            pod("b", "10.0.0.2", readiness="Unknown"),
            pod("b", "10.0.0.2", labels={"app": "other"}),
            pod("b", None),
            pod("b", "10.0.0.2", deleted="2026-01-01T00:00:00Z"),
        ):
            put(gone)
            await api.until(lambda: addresses(listener) == {"10.0.0.1:8000": "a-rank-0"})
            put(pod("b", "10.0.0.2"))
            await api.until(lambda: addresses(listener) == both)
        api.store.delete("pods", "default", "b")
        await api.until(lambda: addresses(listener) == {"10.0.0.1:8000": "a-rank-0"})
        put(pod("a", "fd00::a", annotations={"llm-d.ai/active-ports": "8000"}))
        await api.until(lambda: addresses(listener) == {"[fd00::a]:8000": "a-rank-0"})


async def test_E07_a_pod_leaves_when_its_termination_begins(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    api.store.put(pod("a", "10.0.0.1"))
    async with following(api, listener, ONE):
        await api.until(lambda: addresses(listener))
        api.store.delete("pods", "default", "a", graceful=True)
        await api.until(lambda: addresses(listener) == {})
        assert api.store.get("pods", "default", "a") is not None


async def test_E09_a_name_that_is_deleted_and_used_again_in_one_batch_is_never_lost(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    api.store.put(pod("a", "10.0.0.1", uid="u-0"))
    async with following(api, listener, ONE):
        await api.until(lambda: addresses(listener))
        for turn in range(1, 51):
            api.store.delete("pods", "default", "a")
            api.store.put(pod("a", f"10.0.0.{turn % 3 + 1}", uid=f"u-{turn}"))
            if turn % 10 == 0:
                wanted = f"u-{turn}"
                await api.until(lambda: [s.uid for s in listener.specs[KEY]] == [wanted])  # noqa: B023


async def test_E10_ports_and_selector_may_change_and_leave_no_endpoint_behind(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool", ports=(8000, 8001)))
    api.store.put(pod("a", "10.0.0.1"))
    api.store.put(pod("b", "10.0.0.2", labels={"app": "vllm", "tier": "x"}))
    async with following(api, listener, ONE):
        await api.until(lambda: len(addresses(listener) or ()) == 4)
        api.store.put(pool("pool", ports=(8001,)))
        await api.until(
            lambda: (
                addresses(listener) == {"10.0.0.1:8001": "a-rank-0", "10.0.0.2:8001": "b-rank-0"}
            )
        )
        api.store.put(pool("pool", {"app": "vllm", "tier": "x"}, ports=(8001,)))
        await api.until(lambda: addresses(listener) == {"10.0.0.2:8001": "b-rank-0"})
        api.store.put(pool("pool", {"tier": "x"}, (8001,), app_protocol="kubernetes.io/h2c"))
        await api.until(lambda: listener.protocols[KEY] == "kubernetes.io/h2c")


async def test_a_pool_hears_once_of_what_came_at_once_and_nothing_of_what_is_not_its(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    api.store.put(pool("other", {"app": "other"}))
    async with following(api, listener, ALL):
        await api.until(lambda: listener.syncs and api.open_watches == 4)
        before = len(listener.calls)
        for index in range(100):
            api.store.put(pod(f"p{index}", f"10.0.0.{index}"))
        await api.until(lambda: len(addresses(listener) or ()) == 100)
        told = listener.calls[before:]
        assert set(told) == {("pool", KEY)}
        assert len(told) < 20


async def test_two_pods_the_server_should_not_have_let_in_keep_nobody_else_out(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    for name, broken in (("x", {"status": {"podIP": 17}}), ("y", {"status": "none"})):
        api.store.put({**pod(name, "10.0.0.9"), **broken}, checked=False)
    api.store.put(pod("a", "10.0.0.1"))
    async with following(api, listener, ONE):
        await api.until(lambda: addresses(listener) == {"10.0.0.1:8000": "a-rank-0"})
        broken = pod("z", "10.0.0.8")
        broken["status"]["conditions"] = 7
        api.store.put(broken, checked=False)
        api.store.put(pod("x", "10.0.0.9"))
        await api.until(lambda: "10.0.0.9:8000" in (addresses(listener) or ()))


# -- pools ---------------------------------------------------------------------------------


async def test_E11_a_pool_comes_after_the_start_goes_and_comes_back_with_all_it_had(
    api: FakeApi, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    api.store.put(pod("a", "10.0.0.1"))
    api.store.put(objective("urgent", "pool", 10))
    api.store.put(objective("plain", "pool"))
    api.store.put(rewrite("r", "pool", [rule(["m"], {"n": 1})]))

    def complete() -> bool:
        return (
            addresses(listener) == {"10.0.0.1:8000": "a-rank-0"}
            and listener.seen_priorities() == {"pool": {"urgent": 10, "plain": 0}}
            and listener.seen_rules() == {"pool": [("r", 0)]}
        )

    async with following(api, listener, ONE) as pools:
        await api.until(lambda: listener.syncs)
        assert pools.synced
        assert listener.calls == []
        assert "InferencePool default/pool does not exist: waiting" in caplog.text
        api.store.put(pool("pool"))
        await api.until(complete)
        api.store.delete(POOLS, "default", "pool")
        await api.until(lambda: addresses(listener) is None)
        api.store.put(objective("plain", "pool", -1))
        api.store.delete("inferenceobjectives", "default", "urgent")
        api.store.put(pool("pool"))
        await api.until(lambda: listener.seen_priorities() == {"pool": {"plain": -1}})
        assert listener.seen_rules() == {"pool": [("r", 0)]}
        assert addresses(listener) == {"10.0.0.1:8000": "a-rank-0"}
        # Deleted with a finalizer: it is there until somebody has cleaned up, and no pool any more.
        api.store.delete(POOLS, "default", "pool", graceful=True)
        await api.until(lambda: addresses(listener) is None)
        assert listener.syncs == 1


async def test_one_pool_by_name_is_all_we_ask_for(api: FakeApi, listener: Listener) -> None:
    api.store.put(pool("pool"))
    async with following(api, listener, ONE):
        await api.until(lambda: api.open_watches == 4)
        for call in api.calls("list", POOLS) + api.calls("watch", POOLS):
            assert call.query["fieldSelector"] == "metadata.name=pool"
        for call in api.calls("list", "pods"):
            assert "labelSelector" not in call.query


async def test_several_pools_by_name_and_all_of_a_namespace(
    api: FakeApi, listener: Listener
) -> None:
    for name in ("a", "b", "c"):
        api.store.put(pool(name, {"app": name}))
        api.store.put(pod(f"{name}-0", f"10.0.0.{ord(name)}", {"app": name}))
        api.store.put(objective(f"of-{name}", name, 1))
    api.store.put(pool("a", {"app": "a"}, namespace="elsewhere"))
    every = Listener()
    two = pools_by_name("a,b", namespace="default")
    async with following(api, listener, two), following(api, every, ALL):
        await api.until(lambda: len(listener.priorities) == 2)
        await api.until(lambda: len(every.priorities) == 3)
        assert listener.seen().keys() == {"a", "b"}
        assert addresses(every, "c") == {"10.0.0.99:8000": "c-0-rank-0"}
        api.store.put(pool("d", {"app": "a"}))
        await api.until(lambda: addresses(every, "d") == {"10.0.0.97:8000": "a-0-rank-0"})
        assert listener.seen().keys() == {"a", "b"}


async def test_pods_by_selector_need_no_pool_and_no_crd(listener: Listener) -> None:
    choice = pods_by_selector(
        "app in (vllm,sglang),!canary",
        "8000,8001",
        namespace="default",
        pod_name="epp-7c9d8f6b5-x2x4z",
    )
    async with FakeApi(absent=(POOL_GROUP, NEW_GROUP, OLD_GROUP)) as api:
        api.store.put(pod("a", "10.0.0.1"))
        api.store.put(pod("b", "10.0.0.2", {"app": "vllm", "canary": ""}))
        async with following(api, listener, choice):
            await api.until(lambda: listener.syncs)
            assert addresses(listener, "epp") == {
                "10.0.0.1:8000": "a-rank-0",
                "10.0.0.1:8001": "a-rank-1",
            }
            api.store.put(pod("a", "10.0.0.1", {"app": "vllm", "canary": ""}))
            api.store.put(pod("b", "10.0.0.2", {"app": "sglang"}))
            await api.until(
                lambda: (
                    addresses(listener, "epp")
                    == {"10.0.0.2:8000": "b-rank-0", "10.0.0.2:8001": "b-rank-1"}
                )
            )
            assert {call.plural for call in api.seen} == {"pods"}
            assert api.seen[0].query["labelSelector"] == "app in (sglang,vllm),!canary"


# -- ready or not --------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["pods", POOLS])
async def test_M09_nothing_is_said_before_pools_and_pods_were_listed(
    api: FakeApi, listener: Listener, late: str
) -> None:
    api.store.put(pool("pool"))
    held = api.faults.add(Delay(), verb="list", plural=late)
    async with following(api, listener, ONE) as pools:
        await api.until(lambda: held.hits and api.open_watches == 3)
        assert listener.calls == []
        assert not listener.syncs
        assert not pools.synced
        api.faults.clear()
        await api.until(lambda: listener.syncs)
        assert addresses(listener) == {}


async def test_objectives_that_may_not_be_read_hold_up_nothing(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    api.store.put(pod("a", "10.0.0.1"))
    api.store.put(objective("urgent", "pool", 10))
    for plural in ("inferenceobjectives", "inferencemodelrewrites"):
        api.faults.add(Answer(403, "Forbidden"), plural=plural)
    async with following(api, listener, ONE):
        await api.until(lambda: addresses(listener) == {"10.0.0.1:8000": "a-rank-0"})
        assert listener.priorities == {}
        api.faults.clear()
        await api.until(lambda: listener.seen_priorities() == {"pool": {"urgent": 10}})


async def test_E14_kinds_that_are_not_installed_are_found_later(listener: Listener) -> None:
    async with FakeApi(absent=(NEW_GROUP, OLD_GROUP)) as api:
        api.store.put(pool("pool"))
        async with following(api, listener, ONE):
            await api.until(lambda: listener.syncs)
            api.store.install(OLD_GROUP)
            api.store.put(objective("urgent", "pool", 10, group=OLD_GROUP))
            await api.until(lambda: listener.seen_priorities() == {"pool": {"urgent": 10}})
            api.store.uninstall(OLD_GROUP)
            await api.until(lambda: listener.seen_priorities() == {})
            api.store.install(NEW_GROUP)
            api.store.put(rewrite("r", "pool", [rule([], {"m": None})]))
            await api.until(lambda: listener.seen_rules() == {"pool": [("r", 0)]})


# -- objectives and rewrites ---------------------------------------------------------------


async def test_E15_what_refers_to_another_pool_is_not_heard_of(
    api: FakeApi, listener: Listener
) -> None:
    api.store.put(pool("pool"))
    api.store.put(objective("mine", "pool", 1))
    api.store.put(objective("other-name", "other", 2))
    api.store.put(objective("other-group", "pool", 3, pool_group=OLD_GROUP))
    api.store.put(objective("other-namespace", "pool", 4, namespace="elsewhere"))
    async with following(api, listener, ONE):
        await api.until(lambda: listener.seen_priorities() == {"pool": {"mine": 1}})
        api.store.put(objective("mine", "other", 1))
        await api.until(lambda: listener.seen_priorities() == {})


async def test_rewrites_are_told_in_order_and_a_useless_rule_is_complained_about_once(
    api: FakeApi, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    useless = {"matches": [{}], "targets": [{"modelRewrite": "n"}]}
    early, late = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    api.store.put(pool("pool"))
    first = rewrite("a", "pool", [useless, rule(["m"], {"n": 1})], created=late)
    api.store.put(first, checked=False)  # an API server without the CRD's schema
    api.store.put(rewrite("c", "pool", [rule([], {"n": 1}), rule([], {"o": 1})], created=early))
    api.store.put(rewrite("b", "pool", [rule([], {"n": 1})], created=early))
    order = [("b", 0), ("c", 0), ("c", 1), ("a", 1)]
    with caplog.at_level(logging.WARNING):
        async with following(api, listener, ONE):
            await api.until(lambda: listener.seen_rules() == {"pool": order})
            api.store.delete("inferencemodelrewrites", "default", "b")
            await api.until(lambda: listener.seen_rules() == {"pool": order[1:]})
    assert caplog.text.count("InferenceModelRewrite default/a spec.rules[0] never applies") == 1


# -- a listener that fails -----------------------------------------------------------------


class Stumbling(Listener):
    """Fails the first few times it is told of anything."""

    stumbles = 3

    def __getattribute__(self, name: str) -> object:
        if name in ("pool", "objectives", "synced") and self.stumbles:
            self.stumbles -= 1
            raise RuntimeError("not now")
        return super().__getattribute__(name)


async def test_what_a_listener_failed_to_take_is_told_again(api: FakeApi) -> None:
    api.store.put(pool("pool"))
    api.store.put(pod("a", "10.0.0.1"))
    api.store.put(objective("urgent", "pool", 10))
    listener = Stumbling()
    async with following(api, listener, ONE, stumbles=True):
        await api.until(
            lambda: (
                addresses(listener)
                and listener.seen_priorities() == {"pool": {"urgent": 10}}
                and listener.syncs == 1
            )
        )
        assert listener.stumbles == 0


def test_a_change_that_was_folded_but_not_told_is_told_the_next_time() -> None:
    listener = Stumbling()
    choice = pods_by_selector("app", "8000", namespace="default", pod_name="epp-abc-def")
    table = PoolTable(listener, choice)
    one = msgspec.convert(pod("a", "10.0.0.1", uid="u"), Pod)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            table.pods(Changes((one,), (), synced=True), {one.key: one})
        assert not table.synced
    table.pods(Changes((one,), (), synced=True), {one.key: one})
    assert addresses(listener, "epp") == {"10.0.0.1:8000": "a-rank-0"}
    assert table.synced
