"""What a cluster's pools should be, worked out from raw objects the slow way, and a listener that
keeps what it was told and objects to being told in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from typing import Any

from epp.core.cluster import PoolKey
from epp.core.endpoint import EndpointSpec
from epp.core.rewrite import RewriteRule

Json = Mapping[str, Any]
Seen = dict[str, tuple[str, str, dict[str, str]]]
"""Address -> endpoint name, uid and labels."""


class Listener:
    """What was told last, by pool; a call that says nothing new fails."""

    def __init__(self) -> None:
        self.specs: dict[PoolKey, tuple[EndpointSpec, ...]] = {}
        self.protocols: dict[PoolKey, str] = {}
        self.services: dict[PoolKey, str] = {}
        self.priorities: dict[PoolKey, Mapping[str, int]] = {}
        self.rules: dict[PoolKey, tuple[RewriteRule, ...]] = {}
        self.syncs = 0
        self.calls: list[tuple[str, PoolKey]] = []

    def pool(
        self,
        key: PoolKey,
        specs: tuple[EndpointSpec, ...] | None,
        app_protocol: str,
        service: str,
    ) -> None:
        self.calls.append(("pool", key))
        if specs is None:
            assert key in self.specs, "gone again"
            for each in (self.specs, self.protocols, self.services, self.priorities, self.rules):
                each.pop(key, None)
            return
        before = (self.specs.get(key), self.protocols.get(key), self.services.get(key))
        assert before != (specs, app_protocol, service)
        self.services[key] = service
        addresses = [spec.address for spec in specs]
        assert len(set(addresses)) == len(addresses), "an address twice"
        self.specs[key], self.protocols[key] = specs, app_protocol

    def objectives(self, key: PoolKey, priorities: Mapping[str, int]) -> None:
        self.calls.append(("objectives", key))
        assert key in self.specs, "objectives of a pool that does not exist"
        assert self.priorities.get(key, {}) != priorities
        self.priorities[key] = priorities

    def rewrites(self, key: PoolKey, rules: tuple[RewriteRule, ...]) -> None:
        self.calls.append(("rewrites", key))
        assert key in self.specs, "rewrites of a pool that does not exist"
        assert self.rules.get(key, ()) != rules
        self.rules[key] = rules

    def synced(self) -> None:
        self.syncs += 1

    def seen(self) -> dict[str, Seen]:
        """Pool name -> its endpoints."""
        return {
            key.name: {s.address: (s.name, s.uid, dict(s.labels)) for s in specs}
            for key, specs in self.specs.items()
        }

    def seen_priorities(self) -> dict[str, dict[str, int]]:
        """Pool name -> objective name -> priority; without pools that have none."""
        return {key.name: dict(each) for key, each in self.priorities.items() if each}

    def seen_rules(self) -> dict[str, list[tuple[str, int]]]:
        """Pool name -> object name and index of each rule, in order; without pools that have
        none."""
        return {
            key.name: [(rule.name, rule.index) for rule in rules]
            for key, rules in self.rules.items()
            if rules
        }


def expected(pools: Iterable[Json], pods: Collection[Json]) -> dict[str, Seen]:
    """Pool name -> the endpoints it should have."""
    return {pool["metadata"]["name"]: endpoints_of(pool, pods) for pool in pools if _exists(pool)}


def endpoints_of(pool: Json, pods: Iterable[Json]) -> Seen:
    found: Seen = {}
    wanted = pool["spec"]["selector"]["matchLabels"]
    for pod in sorted(pods, key=_age):
        meta, status = pod["metadata"], pod.get("status", {})
        labels = meta.get("labels") or {}
        if not all(labels.get(key) == value for key, value in wanted.items()):
            continue
        if not (_exists(pod) and _ready(status) and status.get("podIP")):
            continue
        for rank, port in enumerate(pool["spec"]["targetPorts"]):
            if _active(meta.get("annotations") or {}, port["number"]):
                address = _address(status["podIP"], port["number"])
                found[address] = (f"{meta['name']}-rank-{rank}", meta["uid"], labels)
    return found


def expected_priorities(
    pools: Iterable[Json], objectives: Iterable[Json]
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    alive = {pool["metadata"]["name"] for pool in pools if _exists(pool)}
    for each in objectives:
        name = _pool_name(each)
        if name in alive:
            priority = each["spec"].get("priority", 0)
            found.setdefault(name, {})[each["metadata"]["name"]] = priority
    return found


def expected_rules(
    pools: Iterable[Json], rewrites: Iterable[Json]
) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    alive = {pool["metadata"]["name"] for pool in pools if _exists(pool)}
    for each in sorted(rewrites, key=lambda each: (_created(each), each["metadata"]["name"])):
        name = _pool_name(each)
        for index, _ in enumerate(each["spec"]["rules"]):
            if name in alive:
                found.setdefault(name, []).append((each["metadata"]["name"], index))
    return found


def _exists(thing: Json) -> bool:
    return "deletionTimestamp" not in thing["metadata"]


def _created(thing: Json) -> str:
    created = thing["metadata"].get("creationTimestamp", "")
    assert isinstance(created, str)
    return created


def _age(pod: Json) -> tuple[str, str]:
    return _created(pod), pod["metadata"]["uid"]


def _ready(status: Json) -> bool:
    return {"Ready": "True"}.items() <= {
        each["type"]: each["status"] for each in status.get("conditions", ())
    }.items()


def _active(annotations: Mapping[str, str], port: int) -> bool:
    legacy = annotations.get("inference.networking.k8s.io/active-ports")
    text = annotations.get("llm-d.ai/active-ports", legacy)
    return text is None or str(port) in [entry.strip() for entry in text.split(",")]


def _address(ip: str, port: int) -> str:
    address = ip_address(ip)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _pool_name(thing: Json) -> str | None:
    """Of the InferencePool it belongs to; `None` when it belongs to something else."""
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    reference |= thing["spec"]["poolRef"]
    name = reference.pop("name")
    is_pool = reference == {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    return name if is_pool and _exists(thing) else None
