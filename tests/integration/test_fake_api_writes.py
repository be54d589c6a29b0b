"""The fake API server's writes: conflicts, Leases, schemas and defaults, patches, deletions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.kubernetes.answers import RefusedError
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.objects import lease, objective, pod, pool, rewrite, rule
from tests.kubernetes.patching import merged
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import (
    CONFIG_MAP,
    LEASE,
    OBJECTIVE,
    OLD_GROUP,
    OLD_OBJECTIVE,
    POD,
    POOL,
    REWRITE,
    Object,
)

LEASES = LEASE.path("default")
LEASE_L = LEASE.path("default", "l")
POOL_P = POOL.path("default", "p")
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest.fixture
async def plain(api: FakeApi) -> AsyncIterator[Plain]:
    async with Plain(api.url) as plain:
        yield plain


# -- versions and conflicts ----------------------------------------------------------------


async def test_a_second_create_finds_the_first(plain: Plain) -> None:
    first = await plain.call("POST", LEASES, lease("l", "a"))
    assert first.code == 201
    assert {"uid", "creationTimestamp", "resourceVersion"} <= first.body["metadata"].keys()
    second = await plain.call("POST", LEASES, lease("l", "b"))
    assert (second.code, second.reason) == (409, "AlreadyExists")
    assert (await plain.get(LEASE_L)).body == first.body


async def test_of_two_writers_with_one_version_one_loses(plain: Plain) -> None:
    made = (await plain.call("POST", LEASES, lease("l", "a"))).body
    for holder, code in (("b", 200), ("c", 409)):
        made["spec"]["holderIdentity"] = holder
        answer = await plain.call("PUT", LEASE_L, made)
        assert answer.code == code
    assert answer.reason == "Conflict"
    assert (await plain.get(LEASE_L)).body["spec"]["holderIdentity"] == "b"


async def test_a_put_without_a_version_depends_on_the_kind(api: FakeApi, plain: Plain) -> None:
    for obj in (lease("l", "a"), pool("p"), pod("a")):
        api.store.put(obj)
    refused = await plain.call("PUT", LEASE_L, lease("l", "b"))
    assert (refused.code, refused.reason) == (422, "Invalid")
    assert "metadata.resourceVersion" in refused.body["message"]
    assert (await plain.call("PUT", POOL_P, pool("p"))).code == 422
    assert (await plain.call("PUT", POD.path("default", "a"), pod("a", labels={}))).code == 200


async def test_a_put_creates_a_lease_and_nothing_else(plain: Plain) -> None:
    assert (await plain.call("PUT", LEASE_L, lease("l", "a"))).code in (200, 201)
    assert (await plain.call("PUT", POOL_P, pool("p"))).code == 404
    stale = lease("m")
    stale["metadata"]["resourceVersion"] = "7"
    assert (await plain.call("PUT", LEASE.path("default", "m"), stale)).code == 404


async def test_a_write_for_another_uid_is_a_conflict(api: FakeApi, plain: Plain) -> None:
    made = api.store.put(lease("l", "a"))
    made["metadata"]["uid"] = "another"
    answer = await plain.call("PUT", LEASE_L, made)
    assert (answer.code, answer.reason) == (409, "Conflict")
    options = {"preconditions": {"uid": "another"}}
    assert (await plain.call("DELETE", LEASE_L, options)).code == 409
    assert (await plain.call("DELETE", LEASE_L)).body["status"] == "Success"


@pytest.mark.parametrize(
    "body",
    [
        lease("l", namespace="other"),
        {"apiVersion": "v1", "kind": "Lease"},
        [],
        {"metadata": 5},
        {**lease("l"), "spec": "x"},
        {"metadata": {"name": "l", "labels": 5}},
        {"metadata": {"name": "l", "labels": {"a": 5}}},
        {"metadata": {"name": "Not A Name"}},
        {"metadata": {}},
    ],
    ids=str,
)
async def test_a_body_that_does_not_fit_is_refused(plain: Plain, body: object) -> None:
    assert (await plain.call("POST", LEASES, body)).code in (400, 422)


async def test_odd_requests_are_answered(plain: Plain) -> None:
    bad = [b"", b"{", b"\xff", b"null", b"[1]"]
    for data in bad:
        async with plain.session.post(plain.url + LEASES, data=data) as response:
            assert response.status == 400
    assert (await plain.call("PUT", LEASES, {})).code == 405
    assert (await plain.call("POST", LEASE_L, {})).code == 405
    assert (await plain.call("POST", POD.path(), pod("a"))).code == 405
    assert (await plain.get(POD.path("default", "a") + "/log")).code == 404
    assert (await plain.get("/apis/authentication.k8s.io/v1/tokenreviews")).code == 405
    assert (await plain.get("/nowhere")).code == 404


async def test_a_name_can_be_generated(plain: Plain) -> None:
    body = {"metadata": {"generateName": "x-"}, "data": {}}
    made = [await plain.call("POST", CONFIG_MAP.path("default"), body) for _ in range(2)]
    names = {each.body["metadata"]["name"] for each in made}
    assert len(names) == 2
    assert all(name.startswith("x-") for name in names)


# -- leases --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "code"),
    [
        ("2026-01-01T00:00:00.000000Z", 200),
        ("2026-01-01T00:00:00.123456+01:00", 200),
        ("2026-01-01T00:00:00Z", 400),
        ("2026-01-01T00:00:00.123Z", 400),
        ("2026-01-01T00:00:00.1234567Z", 400),
        ("2026-01-01T00:00:00.123456", 400),
        ("2026-01-01 00:00:00.123456Z", 400),
        ("", 400),
        (1767225600, 400),
    ],
)
async def test_a_lease_takes_microseconds_and_nothing_else(
    api: FakeApi, plain: Plain, time: object, code: int
) -> None:
    made = api.store.put(lease("l", "a"))
    made["spec"]["renewTime"] = time
    answer = await plain.call("PUT", LEASE_L, made)
    assert answer.code == code
    assert code == 200 or "2006-01-02T15:04:05.000000Z07:00" in answer.body["message"]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("leaseDurationSeconds", 1, 200),
        ("leaseDurationSeconds", 0, 422),
        ("leaseDurationSeconds", "15", 400),
        ("leaseDurationSeconds", 1.5, 400),
        ("leaseTransitions", 0, 200),
        ("leaseTransitions", -1, 422),
        ("holderIdentity", "", 200),
    ],
)
async def test_a_leases_numbers_are_in_range(
    api: FakeApi, plain: Plain, field: str, value: object, code: int
) -> None:
    made = api.store.put(lease("l", "a"))
    made["spec"][field] = value
    assert (await plain.call("PUT", LEASE_L, made)).code == code


# -- custom resources ----------------------------------------------------------------------


async def test_defaults_are_filled_in(plain: Plain) -> None:
    ref = {"name": "p-epp", "port": {"number": 9002}}
    made = await plain.call("POST", POOL.path("default"), pool("p", picker=ref))
    spec = made.body["spec"]
    assert spec["appProtocol"] == "http"
    assert spec["endpointPickerRef"] == {
        **ref, "group": "", "kind": "Service", "failureMode": "FailClose"
    }  # fmt: skip
    assert made.body["metadata"]["generation"] == 1
    made = await plain.call("POST", OBJECTIVE.path("default"), objective("o", "p"))
    assert made.body["spec"]["poolRef"] == {
        "name": "p", "group": "inference.networking.k8s.io", "kind": "InferencePool"
    }  # fmt: skip
    assert "priority" not in made.body["spec"]
    made = await plain.call(
        "POST",
        REWRITE.path("default"),
        rewrite("w", "p", [{"matches": [{"model": {"value": "m"}}]}]),
    )
    assert made.body["spec"]["rules"][0]["matches"] == [{"model": {"type": "Exact", "value": "m"}}]
    old = objective("o", "p", -1, group=OLD_GROUP)
    assert (await plain.call("POST", OLD_OBJECTIVE.path("default"), old)).code == 201


def _with(**changes: Any) -> Object:
    made = pool("p")
    made["spec"] |= changes
    return made


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (_with(targetPorts=[]), "at least 1"),
        (_with(targetPorts=[{"number": n} for n in range(1, 10)]), "at most 8"),
        (_with(targetPorts=[{"number": 1}, {"number": 1}]), "port number must be unique"),
        (_with(targetPorts=[{"number": 70000}]), "1..65535"),
        (_with(targetPorts=[{"number": "80"}]), "must be of type integer"),
        (_with(targetPorts=[{"number": True}]), "must be of type integer"),
        (_with(targetPorts=[{}]), "targetPorts[0].number: Required value"),
        (_with(selector={"matchLabels": {}}), "at least 1"),
        (_with(selector={"matchLabels": {f"k{i}": "" for i in range(65)}}), "at most 64"),
        (_with(selector={"matchLabels": {"a": "-"}}), "should match"),
        (_with(selector={}), "matchLabels: Required value"),
        (_with(selector=None), "must be of type object: null"),
        (_with(appProtocol="https"), "Unsupported value"),
        (_with(endpointPickerRef={"name": "x"}), "port is required when kind is 'Service'"),
        (_with(endpointPickerRef={"name": ""}), "at least 1"),
        (
            _with(endpointPickerRef={"name": "x", "kind": "Y", "failureMode": "FailClosed"}),
            'supported values: "FailOpen", "FailClose"',
        ),
        ({**pool("p"), "spec": None}, "must be of type object: null"),
        ({k: v for k, v in pool("p").items() if k != "spec"}, "spec: Required value"),
        (objective("p", "p", 1 << 31), "spec.priority"),
        (objective("p", ""), "spec.poolRef.name"),
        (rewrite("p", "p", [rule([], {"m": 0})]), "weight"),
        (rewrite("p", "p", [rule([], {})]), "targets"),
        (rewrite("p", "p", [{"matches": [{}]}]), "model: Required value"),
    ],
)  # fmt: skip
async def test_what_the_schema_forbids_is_invalid(plain: Plain, obj: Object, says: str) -> None:
    kinds = {"InferencePool": POOL, "InferenceObjective": OBJECTIVE}
    answer = await plain.call("POST", kinds.get(obj["kind"], REWRITE).path("default"), obj)
    assert (answer.code, answer.reason) == (422, "Invalid")
    assert says in answer.body["message"]


@pytest.mark.parametrize(
    "obj",
    [
        _with(targetPorts=[{"number": n} for n in range(1, 9)]),
        _with(endpointPickerRef={"name": "x", "kind": "Other"}),
        {**pool("p"), "spec": {k: v for k, v in pool("p")["spec"].items() if "Ref" not in k}},
        _with(selector={"matchLabels": {"a": ""}}),
        pool("p", app_protocol="kubernetes.io/h2c"),
        rewrite("p", "p", []),
        rewrite("p", "p", [rule(["a", "b"], {"m": 1, "n": None})]),
    ],
)
def test_what_the_schema_allows_is_stored(obj: Object) -> None:
    assert FakeApi().store.put(obj)


async def test_unknown_fields_are_dropped_or_refused(plain: Plain) -> None:
    path, body = POOL.path("default"), _with(bogus=1)
    strict = await plain.call("POST", path, body, fieldValidation="Strict")
    assert (strict.code, strict.reason) == (400, "BadRequest")
    assert 'unknown field "spec.bogus"' in strict.body["message"]
    made = await plain.call("POST", path, body)
    assert "bogus" not in made.body["spec"]
    assert "spec.bogus" in made.headers["Warning"]


def test_a_test_may_store_what_no_server_would_let_in() -> None:
    store = FakeApi().store
    with pytest.raises(RefusedError):
        store.put(_with(targetPorts=[]))
    assert store.put(_with(targetPorts=[]), checked=False)["spec"]["targetPorts"] == []


async def test_the_spec_and_the_status_are_written_apart(api: FakeApi, plain: Plain) -> None:
    made = api.store.put(pool("p"))
    state = {"parents": [{"parentRef": {"name": "g"}}]}
    answer = await plain.call("PUT", f"{POOL_P}/status", {**made, "spec": {}, "status": state})
    assert answer.body["spec"] == made["spec"]
    assert answer.body["status"]["parents"][0]["parentRef"]["kind"] == "Gateway"
    assert answer.body["metadata"]["generation"] == 1
    body = {**answer.body, "status": {}}
    body["spec"]["targetPorts"] = [{"number": 9}]
    answer = await plain.call("PUT", POOL_P, body)
    assert answer.body["status"]["parents"]
    assert answer.body["metadata"]["generation"] == 2
    assert (await plain.get(f"{POOL_P}/status")).body == answer.body


# -- patches and dry runs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "change", "result"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"b": None}}, {"a": {}}),
        ({"a": 1}, {"$patch": "merge", "a": 2}, {"a": 2}),
    ],
)
def test_a_merge_patch_merges(target: Object, change: Object, result: Object) -> None:
    assert merged(target, change) == result


async def test_patches_change_what_they_name(api: FakeApi, plain: Plain) -> None:
    made = api.store.put(pool("p"))
    change = {"spec": {"appProtocol": "kubernetes.io/h2c"}}
    answer = await plain.call("PATCH", POOL_P, change, form=MERGE)
    assert answer.body["spec"] == made["spec"] | change["spec"]
    stale = change | {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
    assert (await plain.call("PATCH", POOL_P, stale, form=MERGE)).code == 409
    wrong = {"spec": {"appProtocol": "x"}}
    assert (await plain.call("PATCH", POOL_P, wrong, form=MERGE)).code == 422
    bodies: list[object] = [[], {"metadata": 5}, {"spec": "x"}, {"metadata": {"labels": 5}}]
    for odd in bodies:
        assert (await plain.call("PATCH", POOL_P, odd, form=MERGE)).code == 400
    form = "application/json-patch+json"
    assert (await plain.call("PATCH", POOL_P, [], form=form)).code == 415
    missing = POOL.path("default", "q")
    assert (await plain.call("PATCH", missing, change, form=MERGE)).code == 404
    applied = await plain.call("PATCH", missing, pool("q"), form=APPLY)
    assert applied.code == 201
    assert (await plain.call("PATCH", missing, pool("q"), form=APPLY)).body == applied.body


async def test_a_dry_run_leaves_no_trace(api: FakeApi, plain: Plain) -> None:
    api.store.put(pool("p"))
    version = api.store.version
    calls: list[Callable[[], Any]] = [
        lambda: plain.call("POST", POOL.path("default"), pool("q"), dryRun="All"),
        lambda: plain.call("PATCH", POOL_P, {"spec": {}}, form=MERGE, dryRun="All"),
        lambda: plain.call("DELETE", POOL_P, dryRun="All"),
    ]
    for call in calls:
        assert (await call()).code in (200, 201)
    assert (await plain.call("POST", POOL.path("default"), pool("p"), dryRun="All")).code == 409
    assert api.store.version == version
    assert [each["metadata"]["name"] for each in api.store.list("inferencepools")] == ["p"]


# -- deletions -----------------------------------------------------------------------------


async def test_a_clients_delete_of_a_pod_takes_its_grace(api: FakeApi, plain: Plain) -> None:
    path = POD.path("default", "a")
    api.store.put(pod("a"))
    answer = await plain.call("DELETE", path)
    assert "deletionTimestamp" in answer.body["metadata"]
    await api.until(lambda: api.store.get("pods", "default", "a") is None)
    api.store.put(pod("a"))
    await plain.call("DELETE", path, {"gracePeriodSeconds": 0})
    assert api.store.get("pods", "default", "a") is None
    assert (await plain.call("DELETE", path)).code == 404


async def test_a_collection_is_deleted_by_selector(api: FakeApi, plain: Plain) -> None:
    for name in "abc":
        api.store.put(objective(name, "p"))
    path = OBJECTIVE.path("default")
    assert (await plain.call("DELETE", path, fieldSelector="metadata.name!=b")).code == 200
    assert (await plain.get(path)).names == ["b"]
