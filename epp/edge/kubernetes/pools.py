"""Follows pools, their pods, objectives and rewrites, and tells a `ClusterListener`.

`PoolTable` is the fold: synchronous, no I/O. A batch of changes says which objects to look at; what
an object is now is read from the reflector's store, so that nothing depends on the order or number
of the changes. A pod costs each pool one look at its labels; a pool makes its list of endpoints
anew at most once per batch, and only when an endpoint changed. A pool whose selector or ports
changed looks at all pods again.

`KubernetesPools` is the wiring: a reflector per kind. The pods of the namespace are followed
unfiltered, since a pool's selector may change, but for a pool that is nothing but a selector.
Objectives and rewrites are followed apart from pools: neither their CRD's absence nor a missing
permission holds up the pools, and a pool that is deleted and comes back has them at once.

Cost: 1000 pods of 6 KB in one pool, 50 changes a second, half of which change an endpoint: 0.02 of
a core, the client's part included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from epp.core.cluster import ClusterListener, PoolKey
from epp.core.endpoint import EndpointSpec
from epp.core.rewrite import RewriteRule
from epp.edge.kubernetes.attached import priorities_by_pool, rules_by_pool
from epp.edge.kubernetes.choice import PodsBySelector, PoolChoice, PoolsByName
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.membership import Membership, shape_of
from epp.edge.kubernetes.objects import (
    INFERENCE_MODEL_REWRITES,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    PODS,
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Object,
    Pod,
    Resource,
)
from epp.edge.kubernetes.reflector import Changes, Pace, Reflector

T = TypeVar("T", bound=Object)

Fold = Callable[[Changes[T], Mapping[str, T]], None]
"""Of a change, and the store in which everything is as it is now."""
NO_PRIORITIES: Mapping[str, int] = MappingProxyType({})

log = logging.getLogger(__name__)


class _Told(msgspec.Struct):
    """What the listener was told last of a pool."""

    specs: tuple[EndpointSpec, ...]
    app_protocol: str
    service: str
    priorities: Mapping[str, int] = NO_PRIORITIES
    rules: tuple[RewriteRule, ...] = ()


class PoolTable:
    """The pools that are followed as they are now, and what the listener was told of them."""

    def __init__(self, listener: ClusterListener, choice: PoolChoice) -> None:
        self._listener = listener
        self._choice = choice
        self._pools: dict[PoolKey, Membership] = {}
        """Those that exist."""
        self._pods: Mapping[str, Pod] = {}
        self._priorities: Mapping[PoolKey, Mapping[str, int]] = {}
        self._rules: Mapping[PoolKey, tuple[RewriteRule, ...]] = {}
        self._told: dict[PoolKey, _Told] = {}
        self._changed: set[PoolKey] = set()
        """To be told."""
        self._complaints: set[str] = set()
        self._unlisted = {PODS.kind}
        """Kinds that must be listed before anything is told."""
        self.synced = False
        """Whether they were, and the listener was told what there is."""
        if isinstance(choice, PodsBySelector):
            self._pools[choice.key] = Membership(choice.shape)
            self._changed.add(choice.key)
        else:
            self._unlisted.add(INFERENCE_POOLS.kind)

    def pods(self, changes: Changes[Pod], store: Mapping[str, Pod]) -> None:
        """Fold in what `store` now has of the pods that changed."""
        self._pods = store
        for before in _touched(changes):
            pod = store.get(before.key)
            for key, pool in self._pools.items():
                if pool.drop(before.metadata.name) if pod is None else pool.put(pod):
                    self._changed.add(key)
        self._tell(PODS.kind)

    def pools(self, changes: Changes[InferencePool], store: Mapping[str, InferencePool]) -> None:
        """The same of pools."""
        for before in _touched(changes):
            key = PoolKey(before.metadata.namespace, before.metadata.name)
            if not self._choice.follows(key):
                continue
            pool, known = store.get(before.key), self._pools.get(key)
            shape = None if pool is None else shape_of(pool)
            if shape is None:
                self._pools.pop(key, None)
            elif known is None or known.shape != shape:
                self._pools[key] = Membership(shape, self._pods.values())
            self._changed.add(key)
        self._tell(INFERENCE_POOLS.kind)

    def objectives(self, _: object, store: Mapping[str, InferenceObjective]) -> None:
        """Take over all there are now."""
        self._priorities = priorities_by_pool(store.values())
        self._changed.update(self._pools)
        self._tell(INFERENCE_OBJECTIVES.kind)

    def rewrites(self, _: object, store: Mapping[str, InferenceModelRewrite]) -> None:
        """Take over all there are now; what is wrong with one is logged when it begins."""
        complaints: set[str] = set()
        self._rules = rules_by_pool(store.values(), complaints.add)
        for complaint in sorted(complaints - self._complaints):
            log.warning("%s", complaint)
        self._complaints = complaints
        self._changed.update(self._pools)
        self._tell(INFERENCE_MODEL_REWRITES.kind)

    # -- telling ---------------------------------------------------------------------------

    def _tell(self, listed: str) -> None:
        """Tell the listener what differs, once everything was listed; `listed` was, just now. What
        the listener fails to take is told again."""
        self._unlisted.discard(listed)
        if self._unlisted:
            return
        for key in sorted(self._changed, key=str):
            self._tell_of(key)
            self._changed.discard(key)
        if not self.synced:
            self._listener.synced()
            self.synced = True
            self._say_what_is_missing()

    def _tell_of(self, key: PoolKey) -> None:
        pool, told = self._pools.get(key), self._told.get(key)
        if pool is None:
            if told is not None:
                log.warning("Pool %s is gone: its requests are answered 503", key)
                self._listener.pool(key, None, "", "")
                del self._told[key]
            return
        now = (pool.specs(), pool.shape.app_protocol, pool.shape.service)
        if told is None:
            log.info("Pool %s: %d endpoints", key, len(now[0]))
            self._listener.pool(key, *now)
            told = self._told[key] = _Told(*now)
        elif (told.specs, told.app_protocol, told.service) != now:
            self._listener.pool(key, *now)
            told.specs, told.app_protocol, told.service = now
        priorities = self._priorities.get(key, NO_PRIORITIES)
        if told.priorities != priorities:
            self._listener.objectives(key, priorities)
            told.priorities = priorities
        rules = self._rules.get(key, ())
        if told.rules != rules:
            self._listener.rewrites(key, rules)
            told.rules = rules

    def _say_what_is_missing(self) -> None:
        for key in self._choice.named:
            if key not in self._pools:
                log.warning("InferencePool %s does not exist: waiting until it is created", key)


class KubernetesPools:
    """Keeps a listener up to date about the chosen pools.

    Args:
        choice: which pools, and the namespace in which everything is.
        rng: for the reflectors' jitter.
        pace: how long the reflectors wait for what.
    """

    def __init__(
        self,
        client: ApiClient,
        listener: ClusterListener,
        *,
        choice: PoolChoice,
        rng: Random,
        pace: Pace = Pace(),  # noqa: B008 - frozen
    ) -> None:
        self._table = table = PoolTable(listener, choice)

        def follow(
            resource: Resource[T],
            fold: Fold[T],
            *,
            fields: str | None = None,
            labels: str | None = None,
        ) -> None:
            reflector = Reflector(
                client,
                resource,
                namespace=choice.namespace,
                on_change=lambda changes: fold(changes, reflector.store),
                rng=rng,
                pace=pace,
                field_selector=fields,
                label_selector=labels,
            )
            reflectors[str(resource)] = reflector

        reflectors: dict[str, Reflector[Any]] = {}
        follow(PODS, table.pods, labels=choice.label_selector)
        if isinstance(choice, PoolsByName):
            follow(INFERENCE_POOLS, table.pools, fields=choice.field_selector)
            follow(INFERENCE_OBJECTIVES, table.objectives)
            follow(INFERENCE_MODEL_REWRITES, table.rewrites)
        self.reflectors: Mapping[str, Reflector[Any]] = reflectors
        """By `plural.group` of what they follow, for gauges and debugging."""

    @property
    def synced(self) -> bool:
        """Whether pods and pools were listed, and the listener was told what they are."""
        return self._table.synced

    async def run(self) -> None:
        """Follow everything until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors.values():
                group.create_task(reflector.run())


def _touched(changes: Changes[T]) -> Iterable[T]:
    """Some state of each object that changed; a key may come twice."""
    return chain(changes.deleted, changes.upserted)
