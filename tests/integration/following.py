"""A `KubernetesPools` that runs against the fake API server, and the listener it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from epp.core.cluster import ClusterListener
from epp.edge.kubernetes.access import Access
from epp.edge.kubernetes.choice import PoolChoice
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.pools import KubernetesPools
from epp.edge.kubernetes.reflector import Pace
from tests.kubernetes.fake_api import FakeApi

QUICK = Pace(backoff_s=(0.01, 0.1), short_s=0.0, absent_s=0.05, gone_s=0.0)


@asynccontextmanager
async def following(
    api: FakeApi,
    listener: ClusterListener,
    choice: PoolChoice,
    *,
    pace: Pace = QUICK,
    seed: int = 1,
    stumbles: bool = False,
) -> AsyncIterator[KubernetesPools]:
    """It runs until left, and must not end before.

    Args:
        stumbles: the listener may raise; otherwise that fails the test, though it ends nothing.
    """
    access = Access(server=api.url, namespace=choice.namespace)
    async with ApiClient(access, user_agent="test", timeout_s=5.0) as client:
        pools = KubernetesPools(client, listener, choice=choice, rng=Random(seed), pace=pace)
        task = asyncio.create_task(pools.run())
        try:
            yield pools
            assert not task.done(), "it ended by itself"
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        for name, reflector in pools.reflectors.items():
            assert stumbles or not reflector.counts.errors["Handler"], f"told of {name} in vain"
