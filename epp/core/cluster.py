"""What a cluster says about pools, as values: the seam between who follows it and who serves.

A cluster holds several pools. Each has a key, and while it exists: its endpoints, the priorities of
its objectives and its model rewrites. The follower tells a `ClusterListener` what differs from what
it told last, and nothing else; nothing at all before it has seen pools and endpoints once, so that
a pool is never taken for empty because the answer has not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from epp.core.endpoint import EndpointSpec
from epp.core.rewrite import RewriteRule
from epp.core.structs import Frozen


class PoolKey(Frozen, frozen=True):
    """Names a pool in a cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ClusterListener(Protocol):
    """Told what a cluster's pools are, synchronously on the event loop.

    One call of a kind per pool and batch of changes. Of a pool that is new, also one that was
    deleted and is back, `pool` comes first, then in the same batch `objectives` and `rewrites` if
    it has any: they need not be kept for a pool that does not exist.
    """

    def pool(
        self,
        key: PoolKey,
        specs: tuple[EndpointSpec, ...] | None,
        app_protocol: str,
        service: str,
    ) -> None:
        """The pool's complete membership, by pod name and rank; no address comes twice.

        Args:
            specs: `None` when the pool does not exist any more; `()` when it has no endpoint.
            app_protocol: `http` or `kubernetes.io/h2c`; empty with `None`.
            service: name of the Service by which gateways ask about the pool; empty = none.
        """

    def objectives(self, key: PoolKey, priorities: Mapping[str, int]) -> None:
        """Objective name -> priority (int32, 0 when it has none set), all there are."""

    def rewrites(self, key: PoolKey, rules: tuple[RewriteRule, ...]) -> None:
        """All rules, oldest object first."""

    def synced(self) -> None:
        """Once: pools and pods were listed, and what they are was told. Not each key asked for need
        exist."""
