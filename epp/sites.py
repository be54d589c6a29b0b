"""The pools at work: each with its endpoints, decisions and scrapes.

A site is made when discovery first speaks of a pool. With endpoints from flags or a file there is
one, with Kubernetes one per InferencePool that exists; what one pool holds in memory, another does
not share, but for the bounds of the process (bodies, streams).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import islice
from random import Random

from epp.config import Plan
from epp.core.cluster import PoolKey
from epp.core.decide import Decider, PrefixKeeper
from epp.core.endpoint import EndpointSpec
from epp.core.errors import DropReason, RequestDropped
from epp.core.flow.hold import Hold, params_of
from epp.core.inflight import Inflight
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import Forecast
from epp.core.pool import Members, Pool, PoolEvent
from epp.core.rewrite import RewriteRule, Rewrites
from epp.core.serving import Pools, Serving
from epp.edge.telemetry import Telemetry
from epp.scraping import Scraping

Job = Callable[[], Coroutine[None, None, None]]

SHOWN_MAX = 20
POOL_GONE = RequestDropped(DropReason.NO_ENDPOINTS, "its pool was deleted")

log = logging.getLogger(__name__)


class Site:
    """One pool at work.

    Args:
        name: of the pool, see `Serving`.
    """

    def __init__(
        self, name: str, *, plan: Plan, scraping: Scraping, telemetry: Telemetry, rng: Random
    ) -> None:
        pool = Pool(stale_after_s=scraping.stale_after_s)
        decider = Decider(
            pool=pool,
            profile=plan.profiles[0],
            inflight=Inflight(plan.inflight),
            prefix=None if plan.prefix is None else PrefixKeeper(plan.prefix),
            rng=rng,
            forecast=_forecast_of(plan),
        )
        self.serving = Serving(name, decider, hold=_hold_of(plan, decider), rng=rng)
        self._scraper = scraping.scraper(
            pool, apply=self.apply, report=telemetry.scraped_page, rng=rng
        )
        pool.listen(telemetry)
        self._held = asyncio.Event()
        if self.serving.hold is not None:
            self.serving.hold.on_first = self._held.set

    @property
    def decider(self) -> Decider:
        return self.serving.decider

    @property
    def jobs(self) -> list[Job]:
        """What has to run while the site lives."""
        jobs: list[Job] = []
        if self._scraper is not None:
            jobs.append(self._scraper.run)
        if self.serving.hold is not None:
            jobs.append(self._wake_held)
        return jobs

    def apply(self, event: PoolEvent) -> None:
        """Fold what discovery or a scrape said into the pool, and tell who follows membership."""
        now_s = time.monotonic()
        # What was predicted to end by now is not in flight, whether or not another request came.
        self.decider.inflight.advance(now_s)
        change = self.decider.pool.apply(event, now_s)
        if self._scraper is not None and (change.joined or change.left):
            self._scraper.members_changed()
        self.serving.wake(time.monotonic())

    async def _wake_held(self) -> None:
        """Room also comes with time: look for it while something is held."""
        hold = self.serving.hold
        assert hold is not None
        while True:
            # Asked first, since this job may have been started again while some are held.
            if not hold.requests:
                self._held.clear()
                await self._held.wait()
            await asyncio.sleep(hold.params.recheck_s)
            hold.wake(time.monotonic())


class ClusterSites:
    """The sites of a cluster's pools, kept as a `ClusterListener`.

    Args:
        make: makes the site of a pool; raises nothing.
        started, ended: told of each site as it comes and goes.
        changed: told when readiness may have changed.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        make: Callable[[str], Site],
        started: Callable[[Site], None],
        ended: Callable[[Site], None],
        changed: Callable[[], None],
    ) -> None:
        self._pools = pools
        self._make, self._started, self._ended = make, started, ended
        self._changed = changed
        self._sites: dict[PoolKey, Site] = {}
        self._listed = False

    @property
    def ready(self) -> bool:
        """The cluster was listed and has a pool of ours, be it empty."""
        return self._listed and bool(self._sites)

    # -- core.cluster.ClusterListener ------------------------------------------------------

    def pool(
        self,
        key: PoolKey,
        specs: tuple[EndpointSpec, ...] | None,
        app_protocol: str,  # noqa: ARG002 - both that there are mean HTTP to us
        service: str,
    ) -> None:
        """See `ClusterListener`."""
        if specs is None:
            self._gone(key)
            return
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._make(str(key))
            self._pools.put(site.serving)
            self._started(site)
        site.serving.services = frozenset((service,) if service else ())
        site.apply(Members(specs))
        self._changed()

    def objectives(self, key: PoolKey, priorities: Mapping[str, int]) -> None:
        """See `ClusterListener`."""
        if (site := self._sites.get(key)) is not None:
            site.serving.objectives = dict(priorities)
            log.info(
                "Pool %s: objectives %s", key, _shown(f"{n}={p}" for n, p in priorities.items())
            )

    def rewrites(self, key: PoolKey, rules: tuple[RewriteRule, ...]) -> None:
        """See `ClusterListener`."""
        if (site := self._sites.get(key)) is not None:
            rewrites = site.serving.rewrites = Rewrites(rules)
            log.info("Pool %s: model rewrites %s", key, _shown(dict.fromkeys(rewrites.names)))

    def synced(self) -> None:
        """See `ClusterListener`."""
        self._listed = True
        self._changed()

    def _gone(self, key: PoolKey) -> None:
        site = self._sites.pop(key, None)
        if site is not None:
            self._pools.drop(site.serving.name)
            site.apply(Members(()))
            if site.serving.hold is not None:
                site.serving.hold.close(POOL_GONE, time.monotonic())
            self._ended(site)
            self._changed()


def _shown(names: Iterable[str]) -> str:
    some = list(islice(names, SHOWN_MAX + 1))
    return ", ".join(some[:SHOWN_MAX]) + (", …" if len(some) > SHOWN_MAX else "") or "none"


def _forecast_of(plan: Plan) -> Forecast:
    cost = plan.profiles[0].cost
    if not isinstance(cost, ExpectedLatency):
        return Forecast()
    return Forecast(chunk_tokens=cost.chunk_tokens)


def _hold_of(plan: Plan, decider: Decider) -> Hold | None:
    params = params_of(plan.profiles[0].cost)
    return None if params is None else Hold(decider, params)
