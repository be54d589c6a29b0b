"""In whatever order and batches: what was told is what a look at everything says."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from hypothesis import given, settings, strategies as st

from epp.core.cluster import PoolKey
from epp.edge.kubernetes.choice import PoolsByName, pods_by_selector
from epp.edge.kubernetes.membership import Membership, shape_of
from epp.edge.kubernetes.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Object,
    Pod,
)
from epp.edge.kubernetes.pools import PoolTable
from epp.edge.kubernetes.reflector import Changes
from tests.integration.pool_oracle import (
    Json,
    Listener,
    endpoints_of,
    expected,
    expected_priorities,
    expected_rules,
)

T = TypeVar("T", bound=Object)
TIMES = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z")

maybe_dying = st.sampled_from([{}, {}, {}, {"deletionTimestamp": TIMES[1]}])
values = st.sampled_from(["a", "b"])


def _meta(name: str, uid: str, created: str, **more: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": f"{name}-{uid}", "creationTimestamp": created}
    return {**meta, **more}


metas = st.builds(_meta, st.sampled_from("pqrs"), st.sampled_from("12"), st.sampled_from(TIMES))
annotations = st.sampled_from(
    [
        *({}, {}, {}, {"llm-d.ai/active-ports": "8000, 8001,x"}, {"llm-d.ai/active-ports": ""}),
        {"inference.networking.k8s.io/active-ports": "8001"},
    ]
)
pods = st.builds(
    lambda meta, labels, notes, dying, ip, ready: {
        "metadata": {**meta, "labels": labels, "annotations": notes, **dying},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
    },
    metas,
    st.fixed_dictionaries({"app": values}, optional={"tier": values}),
    annotations,
    maybe_dying,
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "FD00:0::1", ""]),
    st.sampled_from(["True", "True", "True", "False", "Unknown"]),
)
pools = st.builds(
    lambda meta, labels, ports, protocol, dying: {
        "metadata": {**meta, **dying},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "appProtocol": protocol,
        },
    },
    metas,
    st.fixed_dictionaries({"app": values}, optional={"tier": values}),
    st.lists(st.sampled_from([8000, 8001, 8002]), min_size=1, max_size=3, unique=True),
    st.sampled_from(["http", "kubernetes.io/h2c"]),
    maybe_dying,
)
references = st.fixed_dictionaries(
    {"name": st.sampled_from("pqrs")},
    optional={
        "group": st.sampled_from(["inference.networking.k8s.io", "x.io"]),
        "kind": st.sampled_from(["InferencePool", "Service"]),
    },
)
objectives = st.builds(
    lambda meta, reference, more, dying: {
        "metadata": {**meta, **dying},
        "spec": {"poolRef": reference, **more},
    },
    metas,
    references,
    st.fixed_dictionaries({}, optional={"priority": st.integers(-2, 2)}),
    maybe_dying,
)
rewrites = st.builds(
    lambda meta, reference, rules, dying: {
        "metadata": {**meta, **dying},
        "spec": {
            "poolRef": reference,
            "rules": [{"targets": [{"modelRewrite": f"m{i}"}]} for i in range(rules)],
        },
    },
    metas,
    references,
    st.integers(0, 2),
    maybe_dying,
)
KINDS = {
    "pods": (Pod, pods),
    "pools": (InferencePool, pools),
    "objectives": (InferenceObjective, objectives),
    "rewrites": (InferenceModelRewrite, rewrites),
}


def batches(kind: str) -> st.SearchStrategy[tuple[str, list[Json], set[str]]]:
    """Kind, what is put, and the names of what is taken away."""
    put = st.lists(KINDS[kind][1], max_size=4, unique_by=lambda each: each["metadata"]["name"])
    return st.tuples(st.just(kind), put, st.sets(st.sampled_from("pqrs"), max_size=2))


class Cluster:
    """The raw objects there are, and reflectors' stores of them."""

    def __init__(self, table: PoolTable) -> None:
        self.table = table
        self.raw: dict[str, dict[str, Json]] = {kind: {} for kind in KINDS}
        self.stores: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

    def apply(self, kind: str, put: list[Json], gone: set[str]) -> None:
        """One batch, of which the table hears as from a reflector."""
        raw, store = self.raw[kind], self.stores[kind]
        upserted, deleted = [], []
        for name in gone & raw.keys():
            del raw[name]
            deleted.append(store.pop(f"ns/{name}"))
        for each in put:
            now = msgspec.convert(each, KINDS[kind][0])
            before = store.get(now.key)
            if before is not None and before.metadata.uid != now.metadata.uid:
                deleted.append(before)
            upserted.append(now)
            raw[now.metadata.name], store[now.key] = each, now
        self.tell(kind, Changes(tuple(upserted), tuple(deleted), synced=True))

    def tell(self, kind: str, changes: Changes[Any]) -> None:
        getattr(self.table, kind)(changes, self.stores[kind])

    def of(self, kind: str) -> list[Json]:
        return list(self.raw[kind].values())


@settings(max_examples=70, deadline=None)
@given(
    steps=st.lists(st.one_of(*map(batches, KINDS)), max_size=12),
    names=st.sampled_from([None, ("p",), ("p", "q")]),
)
def test_what_was_told_is_what_a_look_at_everything_says(
    steps: list[tuple[str, list[Json], set[str]]], names: tuple[str, ...] | None
) -> None:
    listener = Listener()
    cluster = Cluster(PoolTable(listener, PoolsByName("ns", names)))
    listed = set()
    for kind, put, gone in steps:
        calls = len(listener.calls)
        cluster.apply(kind, put, gone)
        listed.add(kind)
        told = listener.calls[calls:]
        assert len(told) == len(set(told)), "one call of a kind per pool and batch"
        if not listed >= {"pods", "pools"}:
            assert listener.calls == []
            assert not listener.syncs
            continue
        assert listener.syncs == 1
        followed = [
            pool
            for pool in cluster.of("pools")
            if names is None or pool["metadata"]["name"] in names
        ]
        assert listener.seen() == expected(followed, cluster.of("pods"))
        assert listener.seen_priorities() == expected_priorities(followed, cluster.of("objectives"))
        assert listener.seen_rules() == expected_rules(followed, cluster.of("rewrites"))


@settings(max_examples=70, deadline=None)
@given(pool=pools, steps=st.lists(st.tuples(pods, st.booleans()), max_size=15))
def test_a_membership_kept_pod_by_pod_is_one_made_at_once(
    pool: Json, steps: list[tuple[Json, bool]]
) -> None:
    pool["metadata"].pop("deletionTimestamp", None)
    shape = shape_of(msgspec.convert(pool, InferencePool))
    assert shape is not None
    kept, raw = Membership(shape), {}
    for each, gone in steps:
        name, before = each["metadata"]["name"], kept.specs()
        if gone:
            raw.pop(name, None)
            changed = kept.drop(name)
        else:
            raw[name] = each
            changed = kept.put(msgspec.convert(each, Pod))
        made = Membership(shape, [msgspec.convert(one, Pod) for one in raw.values()])
        assert kept.specs() == made.specs()
        assert changed or kept.specs() is before
        found = {s.address: (s.name, s.uid, dict(s.labels)) for s in kept.specs()}
        assert found == endpoints_of(pool, raw.values())


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(batches("pods"), min_size=1, max_size=8))
def test_without_a_pool_object_the_pods_of_the_selector_are_the_pool(
    steps: list[tuple[str, list[Json], set[str]]],
) -> None:
    listener = Listener()
    choice = pods_by_selector("app=a,!tier", "8000,8001", namespace="ns", pod_name="epp-abc-def")
    cluster = Cluster(PoolTable(listener, choice))
    pool = {
        "metadata": {"name": "epp"},
        "spec": {
            "selector": {"matchLabels": {"app": "a"}},
            "targetPorts": [{"number": 8000}, {"number": 8001}],
        },
    }
    for step in steps:
        cluster.apply(*step)
        untiered = [pod for pod in cluster.of("pods") if "tier" not in pod["metadata"]["labels"]]
        assert listener.seen() == {"epp": endpoints_of(pool, untiered)}
        assert listener.protocols == {PoolKey("ns", "epp"): "http"}
        assert listener.syncs == 1
