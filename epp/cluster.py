"""What runs when endpoints come from Kubernetes: the client, the followers, the elector.

What is wrong with flags, credentials and files stops start-up; from then on the API server may come
and go, and routing goes on with what is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from random import Random

from epp.edge.families import OUR_PREFIX
from epp.edge.kubernetes.access import find_access
from epp.edge.kubernetes.choice import (
    ALL_POOLS,
    PodsBySelector,
    PoolChoice,
    check_pool_group,
    pods_by_selector,
    pools_by_name,
)
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.election import LeaderElector, lease_name, new_identity
from epp.edge.kubernetes.pools import KubernetesPools
from epp.edge.kubernetes.reviews import Reviewer
from epp.edge.metrics import Reading
from epp.flags import ServeOptions
from epp.sites import ClusterSites

PACKAGE = "envoy-endpoint-picker"
NOTICE_S = 2.0
"""Gateways and probes look every one or two seconds who serves."""
LEASE_POOL_CHARS_MAX = 150
"""Of the part of a Lease's name that names several pools; a hash follows."""


def wants_cluster(options: ServeOptions) -> bool:
    """Whether flags say that endpoints come from Kubernetes."""
    return options.pool_name is not None or options.endpoint_selector is not None


def serves_several(options: ServeOptions) -> bool:
    """Whether more than one pool may be served."""
    return options.pool_name is not None and (
        "," in options.pool_name or ALL_POOLS in options.pool_name
    )


class Cluster:
    """A cluster's pools, followed.

    Args:
        environ: of the process: NAMESPACE, POD_NAME, and what tells that it is a pod.
        sites: kept up to date.
        changed: told when `ready` may have changed.
    Raises: ConfigError when flags, credentials or files cannot be used.
    """

    def __init__(
        self,
        options: ServeOptions,
        environ: Mapping[str, str],
        *,
        sites: ClusterSites,
        changed: Callable[[], None],
        rng: Random,
    ) -> None:
        pod_name = environ.get("POD_NAME", "")
        # First what is wrong with the flags themselves, wherever they may be meant for.
        _choice(options, "default", pod_name)
        access = find_access(options.kubeconfig, environ)
        namespace = options.pool_namespace or environ.get("NAMESPACE") or access.namespace
        choice = _choice(options, namespace, pod_name)
        self._client = ApiClient(access, user_agent=f"{PACKAGE}/{version(PACKAGE)}")
        self._sites = sites
        self._handing_over = self._served = False
        self._pools = KubernetesPools(self._client, sites, choice=choice, rng=rng)
        self._elector: LeaderElector | None = None
        if options.ha_enable_leader_election:
            self._elector = LeaderElector(
                self._client,
                namespace=namespace,
                name=lease_name(namespace, _lease_pool(choice)),
                identity=new_identity(pod_name or "epp"),
                on_change=lambda _leads: changed(),
                rng=rng,
            )
        self.reviewer = Reviewer(self._client) if options.metrics_endpoint_auth else None
        """Says who may read our metrics; `None` = everybody may."""

    @property
    def serves(self) -> bool:
        """It is ours to serve: as the leader, or as who led last while nobody can know better. So
        an API server that is gone stops no routing; a look that shows another leader does."""
        elector = self._elector
        if elector is None or elector.is_leader or self._handing_over:
            self._served = True
        elif elector.holder != elector.identity:
            self._served = False
        return self._served

    @property
    def leads(self) -> bool:
        """It is ours to serve: elected, or without election."""
        return self._elector is None or self._elector.is_leader

    @property
    def ready(self) -> bool:
        """There is a pool to serve, and it is ours to."""
        return self._sites.ready and self.serves

    async def run(self) -> None:
        """Follow everything until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pools.run())
            if self._elector is not None:
                tasks.create_task(self._elector.run())

    async def hand_over(self, within_s: float) -> None:
        """Let another replica lead, and serve on until it does and gateways know: a gateway that
        finds nobody who serves has nobody to ask.

        Args:
            within_s: longest time for that.
        """
        elector = self._elector
        if elector is None:
            return
        self._handing_over = elector.is_leader
        try:
            async with asyncio.timeout(within_s):
                await elector.stop()
                if self._handing_over and await elector.succeeded(within_s):
                    await asyncio.sleep(NOTICE_S)
        except TimeoutError:
            pass
        finally:
            self._handing_over = self._served = False

    def readings(self) -> Mapping[str, list[Reading]]:
        """Gauges and counters of what is followed."""
        now_s = time.monotonic()
        names = ("silence_seconds", "objects", "relists_total", "errors_total")
        found: dict[str, list[Reading]] = {f"{OUR_PREFIX}kubernetes_{name}": [] for name in names}
        for reflector in self._pools.reflectors.values():
            labels = (reflector.resource.plural,)
            counts, age_s = reflector.counts, reflector.age_s(now_s)
            values = (age_s, len(reflector.store), counts.relists, sum(counts.errors.values()))
            for readings, value in zip(found.values(), values, strict=True):
                if value is not None:
                    readings.append((labels, value))
        return found | {f"{OUR_PREFIX}leader": [((), float(self.leads))]}


def _choice(options: ServeOptions, namespace: str, pod_name: str) -> PoolChoice:
    check_pool_group(options.pool_group)
    if options.pool_name is not None:
        return pools_by_name(options.pool_name, namespace=namespace)
    return pods_by_selector(
        options.endpoint_selector or "",
        options.endpoint_target_ports or "",
        namespace=namespace,
        pod_name=pod_name,
    )


def _lease_pool(choice: PoolChoice) -> str:
    """What stands for the pools in the Lease's name: the name of the one, as in the reference."""
    if isinstance(choice, PodsBySelector):
        return choice.key.name
    if choice.names is not None and len(choice.names) == 1:
        return choice.names[0]
    # No other deployment may take part in this one's election: neither one of a pool that is called
    # so, nor is it another election when names are given in another order.
    names = sorted(choice.names or [ALL_POOLS])
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()[:10]
    shown = "all" if choice.names is None else "-".join(names)
    return f"{shown[:LEASE_POOL_CHARS_MAX]}-{digest}"
