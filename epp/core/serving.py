"""Which pool a request is for, and what the requests of a pool are handled with.

A picker that serves one pool sends everything there, whatever the gateway says. One that serves
several has to be told, by the first of these that says something:

1. filter metadata, namespace `envoy.lb`, key `x-gateway-inference-pool`
2. gRPC metadata of the ext_proc call, `x-llm-d-inference-pool` (`grpc_initial_metadata` of a route)
3. the call's `:authority`: the Service that one pool's `endpointPickerRef` names, and no other's
4. the request header `x-llm-d-inference-pool`
5. the subset: it is a part of exactly one pool

So a client, which can send any header, chooses only where the gateway says nothing. A name is
`pool` or `namespace/pool`. One that means no pool we serve is refused and never replaced by a
guess: an endpoint of another pool may serve another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType

from epp.core.addresses import keep_subset
from epp.core.decide import Decider
from epp.core.errors import DropReason, RequestDropped
from epp.core.flow.hold import Hold, Ticket
from epp.core.headers import POOL
from epp.core.rewrite import Rewrites
from epp.core.streams import NOT_SAID, Called

NO_OBJECTIVES: Mapping[str, int] = MappingProxyType({})
NO_REWRITES = Rewrites(())
_SHOWN_CHARS_MAX = 128
_FORMER_MAX = 100


class Serving:
    """What the requests of one pool are handled with.

    Args:
        name: `namespace/pool`, or any name without a slash where there is no such object.
        hold: where requests are held; `None` = none are.
        rng: chance of the split between models.
    """

    __slots__ = ("decider", "hold", "name", "objectives", "rewrites", "rng", "services")

    def __init__(
        self, name: str, decider: Decider, *, hold: Hold | None = None, rng: Random | None = None
    ) -> None:
        self.name = name
        self.decider = decider
        self.hold = hold
        self.rng = rng or Random()
        self.objectives = NO_OBJECTIVES
        """Objective -> the priority it stands for."""
        self.rewrites = NO_REWRITES
        self.services: frozenset[str] = frozenset()
        """Names of the Services by which gateways reach the picker for this pool alone."""

    @property
    def namespace(self) -> str:
        """Empty where there is no such object."""
        return self.name.rpartition("/")[0]

    @property
    def pool_name(self) -> str:
        """Without the namespace."""
        return self.name.rpartition("/")[2]

    def wake(self, now_s: float) -> None:
        """Something was released: who is held may go."""
        if self.hold is not None:
            self.hold.wake(now_s)

    def withdraw(self, ticket: Ticket) -> None:
        """The client of a held request is gone."""
        if self.hold is not None:
            self.hold.withdraw(ticket)


class Pools:
    """All pools that are served.

    Args:
        only: the first one.
        several: there may be more than one, so that a gateway has to say which; else every request
            is for the one there is.
    """

    def __init__(self, only: Serving | None = None, *, several: bool = False) -> None:
        self._several = several
        self._sole: Serving | None = None
        self._by_name: dict[str, Serving] = {}
        self._former: dict[str, None] = {}
        """`namespace/service` of pools that are gone, the latest last."""
        if only is not None:
            self.put(only)

    @property
    def all(self) -> tuple[Serving, ...]:
        """By name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))

    def get(self, name: str) -> Serving | None:
        """The pool of this name, or of `namespace/name` if it is the only one of that name."""
        found = self._by_name.get(name)
        if found is not None or "/" in name:
            return found
        called = [serving for serving in self._by_name.values() if serving.pool_name == name]
        return called[0] if len(called) == 1 else None

    def put(self, serving: Serving) -> None:
        """Serve this pool, too."""
        self._by_name[serving.name] = serving
        assert self._several or len(self._by_name) == 1
        self._choose_sole()

    def drop(self, name: str) -> None:
        """Serve it no longer."""
        gone = self._by_name.pop(name, None)
        if gone is not None:
            self._former |= dict.fromkeys(f"{gone.namespace}/{each}" for each in gone.services)
        while len(self._former) > _FORMER_MAX:
            del self._former[next(iter(self._former))]
        self._choose_sole()

    def _choose_sole(self) -> None:
        self._sole = None if self._several else next(iter(self._by_name.values()), None)

    def of(
        self,
        headers: Mapping[str, str],
        *,
        named: str | None = None,
        called: Called = NOT_SAID,
        subset: tuple[str, ...] | None = None,
    ) -> Serving:
        """The pool of one request.

        Args:
            headers: of the request.
            named: by filter metadata; `None` = it says nothing.
            called: what the gateway said when it opened the stream.
            subset: addresses the gateway allows; `None` = it says nothing.
        Raises: RequestDropped when nothing says which, or what does means no pool we serve.
        """
        if self._sole is not None:
            return self._sole
        if not self._by_name:
            raise _dropped("there is no InferencePool to serve yet")
        name = named or called.pool or None
        if name is None:
            reached = self._by_authority(called.authority)
            if reached is not None:
                return reached
            name = headers.get(POOL)
        if name:
            found = self.get(name)
            if found is None:
                raise _dropped(f"no pool {name[:_SHOWN_CHARS_MAX]!r} is served here")
            return found
        return self._by_subset(subset)

    def _by_authority(self, authority: str) -> Serving | None:
        if not authority:
            return None
        # Istio's is a cluster's name: outbound|9002||service.namespace.svc.cluster.local, or with
        # `_` and `._.` as a name for TLS.
        host = authority.lower().rpartition("|")[2].rpartition("._.")[2].partition(":")[0]
        service, _, rest = host.partition(".")
        namespace = rest.partition(".")[0]
        reached = [
            serving
            for serving in self._by_name.values()
            if service in serving.services and namespace in ("", serving.namespace)
        ]
        if not reached and any(
            former.endswith(f"/{service}") and namespace in ("", former.partition("/")[0])
            for former in self._former
        ):
            raise _dropped(f"the pool of Service {service[:_SHOWN_CHARS_MAX]!r} is gone")
        return reached[0] if len(reached) == 1 else None

    def _by_subset(self, subset: tuple[str, ...] | None) -> Serving:
        holding = [] if subset is None else list(_holding(subset, self._by_name.values()))
        if len(holding) == 1:
            return holding[0]
        raise _dropped(
            "several pools may be served here and the gateway does not say which one this request "
            f"is for: set gRPC metadata or the request header {POOL}"
        )


def _holding(subset: tuple[str, ...], servings: Iterable[Serving]) -> Iterable[Serving]:
    return (s for s in servings if keep_subset(subset, s.decider.pool.endpoints))


def _dropped(detail: str) -> RequestDropped:
    return RequestDropped(DropReason.NO_ENDPOINTS, detail)
