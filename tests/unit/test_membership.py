"""Which pods are whose endpoints: tables worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from epp.core.cluster import PoolKey
from epp.core.endpoint import EndpointSpec
from epp.core.errors import ConfigError
from epp.core.rewrite import RewriteRule, RewriteTarget
from epp.core.selectors import Selector
from epp.edge.kubernetes.attached import priorities_by_pool, rules_by_pool
from epp.edge.kubernetes.choice import (
    check_pool_group,
    pods_by_selector,
    pool_name_of,
    pools_by_name,
    target_ports,
)
from epp.edge.kubernetes.membership import (
    Membership,
    PoolShape,
    pod_specs,
    ranks,
    shape_of,
)
from epp.edge.kubernetes.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Pod,
)

APP = {"app": "vllm"}
SHAPE = PoolShape(Selector(APP), ranks((8000,)))
FOUR = PoolShape(Selector(APP), ranks((8000, 8001, 8002, 8003)))
ACTIVE = "llm-d.ai/active-ports"
LEGACY = "inference.networking.k8s.io/active-ports"


def pod(name: str = "p", ip: str = "10.0.0.1", *, ready: str = "True", **meta: Any) -> Pod:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": APP, **meta}
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    status = {"podIP": ip, "phase": "Running", "conditions": conditions}
    return msgspec.convert({"metadata": metadata, "status": status}, Pod)


def pool(spec: Mapping[str, Any], **meta: Any) -> InferencePool:
    metadata = {"name": "pool", "namespace": "ns", **meta}
    return msgspec.convert({"metadata": metadata, "spec": spec}, InferencePool)


def names(specs: tuple[EndpointSpec, ...]) -> dict[str, str]:
    """Endpoint name -> address."""
    return {spec.name: spec.address for spec in specs}


# -- pods ----------------------------------------------------------------------------------


def test_a_pod_that_serves_is_an_endpoint_with_all_it_needs() -> None:
    assert pod_specs(pod(), SHAPE) == (
        EndpointSpec(
            host="10.0.0.1", port=8000, name="p-rank-0", namespace="ns", labels=APP, uid="uid-p"
        ),
    )


@pytest.mark.parametrize(
    "other",
    [
        pod(ready="False"),
        pod(ready="Unknown"),
        pod(ip=""),
        pod(ip="nonsense"),
        pod(ip="10.0.0.1:80"),
        pod(deletionTimestamp="2026-01-01T00:00:00Z"),
        pod(labels={}),
        pod(labels={"app": "sglang"}),
        msgspec.convert({"metadata": {"name": "p", "namespace": "ns", "labels": APP}}, Pod),
    ],
)
def test_E05_E06_E07_a_pod_that_stops_serving_leaves_at_once(other: Pod) -> None:
    members = Membership(SHAPE, [pod()])
    assert members.specs()
    assert members.put(other)
    assert members.specs() == ()
    assert not members.put(other)


def test_neither_phase_nor_a_named_container_port_counts() -> None:
    raw = {
        "metadata": {"name": "p", "namespace": "ns", "labels": APP},
        "spec": {"containers": [{"ports": [{"containerPort": 1}]}]},
        "status": {
            "phase": "Pending",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"ready": False}],
        },
    }
    assert len(pod_specs(msgspec.convert(raw, Pod), SHAPE)) == 1


def test_E19_an_ipv6_pod_has_one_spelling_and_brackets_in_its_address() -> None:
    (spec,) = pod_specs(pod(ip="FD00:0::0010"), SHAPE)
    assert (spec.host, spec.address) == ("fd00::10", "[fd00::10]:8000")


def test_a_pod_has_an_endpoint_for_each_target_port() -> None:
    assert names(pod_specs(pod(), FOUR)) == {
        "p-rank-0": "10.0.0.1:8000",
        "p-rank-1": "10.0.0.1:8001",
        "p-rank-2": "10.0.0.1:8002",
        "p-rank-3": "10.0.0.1:8003",
    }


@pytest.mark.parametrize(
    ("annotations", "active"),
    [
        ({}, [0, 1, 2, 3]),
        ({ACTIVE: "8000,8002"}, [0, 2]),
        ({ACTIVE: " 8003 ,8001"}, [1, 3]),
        ({ACTIVE: "8000,invalid,8002"}, [0, 2]),
        ({ACTIVE: "8000,9999,-1,٨٠٠١,8002.0,,"}, [0]),
        ({ACTIVE: ""}, []),
        ({ACTIVE: "none"}, []),
        ({ACTIVE: "9" * 5000 + ",8001"}, [1]),
        ({LEGACY: "8001"}, [1]),
        ({LEGACY: ""}, []),
        ({ACTIVE: "8000", LEGACY: "8001"}, [0]),
        ({ACTIVE: "", LEGACY: "8001"}, []),
    ],
)
def test_the_annotation_keeps_some_ports_and_ranks_keep_their_numbers(
    annotations: dict[str, str], active: list[int]
) -> None:
    specs = pod_specs(pod(annotations=annotations), FOUR)
    assert names(specs) == {f"p-rank-{rank}": f"10.0.0.1:{8000 + rank}" for rank in active}


def test_E18_labels_are_copies_and_a_new_label_is_a_change() -> None:
    labels = {**APP, "llm-d.ai/role": "prefill"}
    source = pod(labels=labels)
    members = Membership(SHAPE, [source])
    (spec,) = members.specs()
    source.metadata.labels["llm-d.ai/role"] = "both"
    assert spec.labels == labels
    assert members.put(source)
    assert members.specs()[0].labels["llm-d.ai/role"] == "both"


def test_what_does_not_concern_an_endpoint_changes_nothing() -> None:
    members = Membership(SHAPE, [pod()])
    before = members.specs()
    assert not members.put(pod(resourceVersion="99", annotations={"note": "x"}))
    assert members.specs() is before


def test_a_pod_that_was_replaced_under_its_name_is_another_endpoint() -> None:
    members = Membership(SHAPE, [pod()])
    assert members.put(pod(uid="uid-2"))
    assert [spec.uid for spec in members.specs()] == ["uid-2"]


def test_a_pod_that_got_another_address_leaves_the_old_one() -> None:
    members = Membership(SHAPE, [pod()])
    members.put(pod(ip="10.0.0.2"))
    assert names(members.specs()) == {"p-rank-0": "10.0.0.2:8000"}


def test_endpoints_are_listed_by_pod_name_whatever_order_they_came_in() -> None:
    members = Membership(SHAPE, [pod("b", "10.0.0.2"), pod("c", "10.0.0.3"), pod("a", "10.0.0.1")])
    assert list(names(members.specs())) == ["a-rank-0", "b-rank-0", "c-rank-0"]


# -- one address, two pods -----------------------------------------------------------------

OLD = pod("old", uid="u1", creationTimestamp="2026-01-01T00:00:00Z")
YOUNG = pod("young", uid="u0", creationTimestamp="2026-01-01T00:00:01Z")


@pytest.mark.parametrize("order", [[OLD, YOUNG], [YOUNG, OLD]])
def test_of_two_pods_with_one_address_the_younger_has_it(order: list[Pod]) -> None:
    members = Membership(SHAPE, order)
    assert [spec.uid for spec in members.specs()] == ["u0"]
    members.drop("young")
    assert [spec.uid for spec in members.specs()] == ["u1"]


def test_a_younger_pod_that_does_not_serve_claims_no_address() -> None:
    young = pod("young", uid="u0", creationTimestamp="2026-01-01T00:00:01Z", ready="False")
    assert [spec.uid for spec in Membership(SHAPE, [OLD, young]).specs()] == ["u1"]


def test_pods_born_in_one_second_are_told_apart_the_same_way_each_time() -> None:
    one = pod("one", uid="u1", creationTimestamp="2026-01-01T00:00:00Z")
    two = pod("two", uid="u2", creationTimestamp="2026-01-01T00:00:00Z")
    for order in ([one, two], [two, one]):
        assert [spec.uid for spec in Membership(SHAPE, order).specs()] == ["u2"]


def test_a_pod_that_moves_away_from_a_shared_address_shows_itself_and_the_other() -> None:
    members = Membership(SHAPE, [OLD, YOUNG])
    members.put(msgspec.structs.replace(YOUNG, status=pod(ip="10.0.0.2").status))
    assert names(members.specs()) == {
        "old-rank-0": "10.0.0.1:8000",
        "young-rank-0": "10.0.0.2:8000",
    }


def test_two_pods_on_one_host_keep_the_ports_they_do_not_share() -> None:
    one = pod("one", annotations={ACTIVE: "8000,8001"}, creationTimestamp="2026-01-01T00:00:00Z")
    two = pod("two", annotations={ACTIVE: "8001,8002"}, creationTimestamp="2026-01-01T00:00:01Z")
    assert names(Membership(FOUR, [one, two]).specs()) == {
        "one-rank-0": "10.0.0.1:8000",
        "two-rank-1": "10.0.0.1:8001",
        "two-rank-2": "10.0.0.1:8002",
    }


# -- pools ---------------------------------------------------------------------------------


def test_a_pool_object_says_labels_ports_and_protocol() -> None:
    spec = {"selector": {"matchLabels": APP}, "targetPorts": [{"number": 8000}, {"number": 9}]}
    assert shape_of(pool(spec)) == PoolShape(Selector(APP), {0: 8000, 1: 9}, "http")
    grpc = {**spec, "appProtocol": "kubernetes.io/h2c"}
    assert shape_of(pool(grpc)) == PoolShape(Selector(APP), {0: 8000, 1: 9}, "kubernetes.io/h2c")


def test_E11_a_pool_that_is_being_deleted_is_no_pool() -> None:
    spec = {"selector": {"matchLabels": APP}, "targetPorts": [{"number": 8000}]}
    assert shape_of(pool(spec, deletionTimestamp="2026-01-01T00:00:00Z")) is None


def test_a_pool_without_labels_selects_nothing_rather_than_everything() -> None:
    shape = shape_of(pool({"selector": {}, "targetPorts": [{"number": 8000}]}))
    assert shape is not None
    assert Membership(shape, [pod()]).specs() == ()


def test_ports_the_api_forbids_have_a_rank_and_no_endpoint() -> None:
    assert ranks((8000, 0, 8000, 70_000, 8001)) == {0: 8000, 4: 8001}


# -- objectives and rewrites ---------------------------------------------------------------

KEY = PoolKey("ns", "pool")
REF = {"name": "pool"}


def objective(name: str, ref: Mapping[str, str] = REF, **spec: Any) -> InferenceObjective:
    metadata = {"name": name, "namespace": spec.pop("namespace", "ns")}
    return msgspec.convert(
        {"metadata": metadata, "spec": {"poolRef": ref, **spec}}, InferenceObjective
    )


def test_an_objective_without_a_priority_has_0() -> None:
    found = priorities_by_pool([objective("a", priority=-5), objective("b"), objective("c")])
    assert found == {KEY: {"a": -5, "b": 0, "c": 0}}


@pytest.mark.parametrize(
    "other",
    [
        objective("o", {"name": "other"}),
        objective("o", {"name": "pool", "group": "inference.networking.x-k8s.io"}),
        objective("o", {"name": "pool", "kind": "Service"}),
        objective("o", namespace="elsewhere"),
    ],
)
def test_E15_an_objective_of_another_group_kind_namespace_or_name_is_another_pools(
    other: InferenceObjective,
) -> None:
    assert KEY not in priorities_by_pool([other])


def test_a_pool_may_be_referred_to_with_its_group_and_kind() -> None:
    for group in ("inference.networking.k8s.io", "llm-d.ai"):
        ref = {"name": "pool", "group": group, "kind": "InferencePool"}
        assert priorities_by_pool([objective("a", ref, priority=1)]) == {KEY: {"a": 1}}


def rewrite(name: str, created: str, *rules: Mapping[str, Any]) -> InferenceModelRewrite:
    metadata = {"name": name, "namespace": "ns", "creationTimestamp": created}
    return msgspec.convert(
        {"metadata": metadata, "spec": {"poolRef": REF, "rules": rules}}, InferenceModelRewrite
    )


def to(model: str, *matches: Mapping[str, Any], **target: Any) -> dict[str, Any]:
    return {"matches": matches, "targets": [{"modelRewrite": model, **target}]}


def exactly(model: str) -> dict[str, Any]:
    return {"model": {"type": "Exact", "value": model}}


def test_rules_are_ordered_by_age_of_their_object_then_its_name_then_their_place() -> None:
    rewrites = [
        rewrite("z", "2026-01-02T00:00:00Z", to("late")),
        rewrite("y", "2026-01-01T00:00:00Z", to("y0", exactly("m")), to("y1")),
        rewrite("x", "2026-01-01T00:00:00Z", to("x0", exactly("m"), exactly("n"), weight=3)),
    ]
    complaints: list[str] = []
    found = rules_by_pool(rewrites, complaints.append)
    first, second = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    assert found == {
        KEY: (
            RewriteRule("x", frozenset({"m", "n"}), (RewriteTarget("x0", 3),), first, 0),
            RewriteRule("y", frozenset({"m"}), (RewriteTarget("y0", None),), first, 0),
            RewriteRule("y", frozenset(), (RewriteTarget("y1", None),), first, 1),
            RewriteRule("z", frozenset(), (RewriteTarget("late", None),), second, 0),
        )
    }
    assert complaints == []


def test_a_rule_whose_matches_name_no_model_never_applies_and_the_others_do() -> None:
    odd = [to("a", {}), to("b", {"model": {"type": "Regex", "value": ".*"}}), to("c")]
    complaints: list[str] = []
    found = rules_by_pool([rewrite("r", "2026-01-01T00:00:00Z", *odd)], complaints.append)
    assert [rule.index for rule in found[KEY]] == [2]
    assert [text.split(" never")[0] for text in complaints] == [
        "InferenceModelRewrite ns/r spec.rules[0]",
        "InferenceModelRewrite ns/r spec.rules[1]",
    ]


def test_a_target_that_means_nothing_is_left_out_and_complained_about() -> None:
    rule = {
        "targets": [
            {"modelRewrite": ""},
            {"modelRewrite": "a", "weight": 0},
            {"modelRewrite": "b", "weight": 1_000_000},
        ]
    }
    complaints: list[str] = []
    found = rules_by_pool([rewrite("r", "2026-01-01T00:00:00Z", rule)], complaints.append)
    assert found[KEY][0].targets == (RewriteTarget("b", 1_000_000),)
    assert len(complaints) == 2


# -- flags ---------------------------------------------------------------------------------


def test_pools_are_chosen_by_name_several_names_or_all() -> None:
    one, two = pools_by_name("a", namespace="ns"), pools_by_name(" a, b ", namespace="ns")
    every = pools_by_name("*", namespace="ns")
    assert (one.names, one.field_selector) == (("a",), "metadata.name=a")
    assert (two.names, two.field_selector) == (("a", "b"), None)
    assert (every.names, every.field_selector) == (None, None)
    assert every.follows(PoolKey("ns", "x"))
    assert not every.follows(PoolKey("other", "x"))
    assert not two.follows(PoolKey("ns", "x"))


@pytest.mark.parametrize("text", ["", "a,", "A", "a,a", "a,*", "-a", "a/b", "a b"])
def test_what_is_no_pool_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pool-name: '.*' (is no pool name|comes twice)"):
        pools_by_name(text, namespace="ns")


def test_a_pool_group_that_cannot_be_read_is_refused_with_the_remedy() -> None:
    check_pool_group("inference.networking.k8s.io")
    with pytest.raises(ConfigError, match="install the InferencePool v1 CRD"):
        check_pool_group("inference.networking.x-k8s.io")


def test_pods_are_chosen_by_selector_and_the_pool_is_called_as_the_deployment() -> None:
    choice = pods_by_selector(
        "app in (a,b),!canary", "8000,8001", namespace="ns", pod_name="my-epp-5d8f9c7b6-x2x4z"
    )
    assert choice.key == PoolKey("ns", "my-epp")
    assert choice.label_selector == "app in (a,b),!canary"
    assert choice.shape.ports == {0: 8000, 1: 8001}


@pytest.mark.parametrize(
    ("selector", "ports", "pod_name", "message"),
    [
        ("app in", "8000", "a-b-c", r"^--endpoint-selector: found the end at character 7"),
        (" ", "8000", "a-b-c", r"^--endpoint-selector: it is empty"),
        ("app", "", "a-b-c", r"^--endpoint-target-ports: '' is no port"),
        ("app", "8000,0", "a-b-c", r"^--endpoint-target-ports: '0' is no port"),
        ("app", "65536", "a-b-c", r"^--endpoint-target-ports: '65536' is no port"),
        ("app", "1,1", "a-b-c", r"^--endpoint-target-ports: '1,1' has a port twice"),
        ("app", "1,2,3,4,5,6,7,8,9", "a-b-c", r"^--endpoint-target-ports: 9 ports are too many"),
        ("app", "8000", "", r"^--endpoint-selector: .*POD_NAME '' is not NAME-HASH-SUFFIX"),
        ("app", "8000", "my-epp", r"^--endpoint-selector: .*POD_NAME 'my-epp' is not"),
    ],
)
def test_what_chooses_no_pods_is_refused(
    selector: str, ports: str, pod_name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pods_by_selector(selector, ports, namespace="ns", pod_name=pod_name)


def test_eight_ports_and_a_name_with_dashes_are_fine() -> None:
    assert target_ports("1,2,3,4,5,6,7,8") == (1, 2, 3, 4, 5, 6, 7, 8)
    assert pool_name_of("a-b-c-d-e") == "a-b-c"
