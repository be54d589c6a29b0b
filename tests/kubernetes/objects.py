"""Builders of the objects that tests need, small but valid. All return plain dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kubernetes.resources import NEW_GROUP, POOL_GROUP, Object

CREATED = "2026-01-01T00:00:00Z"


def pod(
    name: str,
    ip: str | None = "10.0.0.1",
    labels: Mapping[str, str] | None = None,
    ready: bool = True,
    uid: str | None = None,
    *,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    node: str = "node-1",
    host_ip: str = "192.0.2.1",
    phase: str = "Running",
    deleted: str | None = None,
    readiness: str | None = None,
) -> Object:
    """A pod of one container.

    Args:
        ip: `None` = none given to it yet.
        labels: default `{"app": "vllm"}`.
        deleted: its deletionTimestamp, when it is on its way out.
        readiness: status of the condition `Ready` when neither True nor False, e.g. `Unknown`.
    """
    meta = _meta(name, namespace, {"app": "vllm"} if labels is None else labels, annotations, uid)
    if deleted is not None:
        meta |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 30}
    truth = readiness or ("True" if ready else "False")
    state: dict[str, Any] = {
        "phase": phase,
        "hostIP": host_ip,
        "conditions": [
            {"type": kind, "status": value, "lastProbeTime": None, "lastTransitionTime": CREATED}
            for kind, value in (
                ("Initialized", "True"),
                ("Ready", truth),
                ("ContainersReady", truth),
                ("PodScheduled", "True"),
            )
        ],
    }
    if ip is not None:
        state |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    container = {"name": "engine", "image": "example.test/engine:1"}
    spec = {"nodeName": node, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": state}


def pool(
    name: str,
    selector: Mapping[str, str] | None = None,
    ports: Sequence[int] = (8000,),
    *,
    namespace: str = "default",
    app_protocol: str | None = None,
    picker: Mapping[str, Any] | None = None,
    uid: str | None = None,
) -> Object:
    """An InferencePool v1. `picker`: its endpointPickerRef; default the Service `<name>-epp`."""
    ref = {"name": f"{name}-epp", "port": {"number": 9002}} if picker is None else dict(picker)
    spec: dict[str, Any] = {
        "selector": {"matchLabels": dict({"app": "vllm"} if selector is None else selector)},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": ref,
    }
    if app_protocol is not None:
        spec["appProtocol"] = app_protocol
    return {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": _meta(name, namespace, None, None, uid),
        "spec": spec,
    }


def objective(
    name: str,
    pool: str,
    priority: int | None = None,
    *,
    namespace: str = "default",
    group: str = NEW_GROUP,
    pool_group: str | None = None,
    uid: str | None = None,
) -> Object:
    """An InferenceObjective. `group`: its own; `pool_group`: of its poolRef, None = the default."""
    spec: dict[str, Any] = {"poolRef": _pool_ref(pool, pool_group)}
    if priority is not None:
        spec["priority"] = priority
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": _meta(name, namespace, None, None, uid),
        "spec": spec,
    }


def rewrite(
    name: str,
    pool: str,
    rules: Sequence[Mapping[str, Any]],
    *,
    namespace: str = "default",
    group: str = NEW_GROUP,
    pool_group: str | None = None,
    created: str | None = None,
    uid: str | None = None,
) -> Object:
    """An InferenceModelRewrite; its rules are best made by `rule`.

    `created`: its creationTimestamp, which decides between two that match.
    """
    meta = _meta(name, namespace, None, None, uid)
    if created is not None:
        meta["creationTimestamp"] = created
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": meta,
        "spec": {"poolRef": _pool_ref(pool, pool_group), "rules": [dict(each) for each in rules]},
    }


def rule(models: Sequence[str], targets: Mapping[str, int | None]) -> Object:
    """A rule of a rewrite: models it matches (none = all), and target -> weight (None = unset)."""
    made: Object = {
        "targets": [
            {"modelRewrite": name} | ({} if weight is None else {"weight": weight})
            for name, weight in targets.items()
        ]
    }
    if models:
        made["matches"] = [{"model": {"type": "Exact", "value": each}} for each in models]
    return made


def lease(name: str, holder: str | None = None, *, namespace: str = "default") -> Object:
    """A Lease of 15 s; `holder` None = held by nobody, never."""
    spec: dict[str, Any] = {"leaseDurationSeconds": 15}
    if holder is not None:
        now = "2026-01-01T00:00:00.000000Z"
        spec |= {"holderIdentity": holder, "acquireTime": now, "renewTime": now}
        spec["leaseTransitions"] = 0
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": _meta(name, namespace, None, None, None),
        "spec": spec,
    }


def _pool_ref(pool: str, group: str | None) -> Object:
    return {"name": pool} | ({} if group is None else {"group": group})


def _meta(
    name: str,
    namespace: str,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
    uid: str | None,
) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": namespace}
    for key, value in (("labels", labels), ("annotations", annotations)):
        if value:
            meta[key] = dict(value)
    return meta | ({} if uid is None else {"uid": uid})
