"""The endpoint table: what discovery, scrapes and answers say is folded in, snapshots come out.

`Pool.apply` is the only way to change it. A snapshot lists the endpoints that may be picked now:
all alive ones but those ejected for failing; when nothing else is left, all of them, since a try is
better than a certain refusal. Its `version` changes whenever something a load scorer reads has
changed (membership, eligibility, load), but not with each pick, so results can be cached by it.

Ejection. Three failed answers in a row, or two scrapes in a row that could not connect to an
endpoint that has not answered lately, take it out for 1 s, then 2, 4, up to 30 s. After that it is
on probation: one request at a time, until one succeeds. A scrape that works again after such
failures ends the ejection early and counts as a restart: what was learned of its cache is
forgotten.

Staleness. A load older than `stale_after_s` is replaced by `UNKNOWN`: silence is not idleness.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load

FAILURES_MAX = 3
"""Failed answers in a row before an endpoint is ejected."""
SCRAPE_FAILURES_MAX = 2
EJECTION_S_MIN = 1.0
EJECTION_S_MAX = 30.0
PROBATION_S_MAX = 60.0
"""Probation without a single request ends by itself; the next failure then counts as the last."""


class Members(msgspec.Struct, frozen=True):
    """The complete membership, as discovery sees it now."""

    specs: tuple[EndpointSpec, ...]


class Scraped(msgspec.Struct, frozen=True):
    """A scrape that worked."""

    endpoint: Endpoint
    load: Load


class ScrapeFailed(msgspec.Struct, frozen=True):
    """A scrape that did not; `unreachable` when no connection could be made at all."""

    endpoint: Endpoint
    reason: str
    unreachable: bool = False


class Answered(msgspec.Struct, frozen=True):
    """An endpoint answered a request, or failed to (`ok=False`: a 5xx, or the gateway went
    elsewhere)."""

    endpoint: Endpoint
    ok: bool


PoolEvent = Members | Scraped | ScrapeFailed | Answered


class Change(msgspec.Struct, frozen=True):
    """What one `Members` event changed."""

    joined: tuple[Endpoint, ...] = ()
    left: tuple[Endpoint, ...] = ()


NO_CHANGE = Change()


class Snapshot(msgspec.Struct, frozen=True):
    """The endpoints that may be picked now, in a fixed order (by address)."""

    endpoints: tuple[Endpoint, ...]
    version: int


class PoolListener(Protocol):
    """Told of a change right after it happened, before the pool does anything else."""

    def joined(self, endpoint: Endpoint) -> None: ...

    def left(self, endpoint: Endpoint) -> None:
        """Forget all you know under `endpoint.slot`: the slot may be given away right after this
        call."""

    def restarted(self, endpoint: Endpoint) -> None:
        """The engine process is a new one: its caches are empty."""

    def scraped(self, endpoint: Endpoint) -> None:
        """`endpoint.load` is new."""

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:
        """It failed and is not picked for so long."""

    def recovered(self, endpoint: Endpoint) -> None:
        """A request succeeded there again."""


class Pool:
    """The endpoint table of one pool.

    Args:
        stale_after_s: age at which a load counts as unknown, > 0.
    """

    def __init__(self, *, stale_after_s: float) -> None:
        assert stale_after_s > 0
        self._stale_after_s = stale_after_s
        self._by_address: dict[str, Endpoint] = {}
        self._endpoints: tuple[Endpoint, ...] = ()
        self._specs: dict[int, EndpointSpec] = {}
        """The membership as it was told last, by the identity of each spec."""
        self._free_slots: list[int] = []
        self._listeners: list[PoolListener] = []
        self._snapshot = Snapshot((), 0)
        self._dirty = False
        self._next_change_s = float("inf")
        self.synced = False
        """Discovery has spoken at least once (an empty pool is synced, too)."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All endpoints alive, by address, eligible or not."""
        return self._endpoints

    @property
    def by_address(self) -> Mapping[str, Endpoint]:
        return MappingProxyType(self._by_address)

    @property
    def stale_after_s(self) -> float:
        return self._stale_after_s

    def listen(self, listener: PoolListener) -> None:
        """Register a listener; it is told of endpoints that are already there."""
        self._listeners.append(listener)
        for endpoint in self._endpoints:
            listener.joined(endpoint)

    def apply(self, event: PoolEvent, now_s: float) -> Change:
        """Fold one event in. Events about an endpoint that has left change nothing."""
        if isinstance(event, Members):
            return self._replace(event.specs)
        if self._by_address.get(event.endpoint.address) is not event.endpoint:
            return NO_CHANGE
        if isinstance(event, Scraped):
            self._scraped(event.endpoint, event.load, now_s)
        elif isinstance(event, ScrapeFailed):
            self._scrape_failed(event.endpoint, event.unreachable, now_s)
        else:
            self._answered(event.endpoint, event.ok, now_s)
        return NO_CHANGE

    def snapshot(self, now_s: float) -> Snapshot:
        """The endpoints eligible at `now_s`; cheap while nothing changed."""
        if self._dirty or now_s >= self._next_change_s:
            self._rebuild(now_s)
        return self._snapshot

    # -- membership ------------------------------------------------------------------------

    def _replace(self, specs: Iterable[EndpointSpec]) -> Change:
        first, self.synced = not self.synced, True
        # Of a thousand endpoints one changes at a time; who tells of it keeps the others' specs.
        before, now = self._specs, {id(spec): spec for spec in specs}
        self._specs = now
        gone = [spec.address for key, spec in before.items() if key not in now]
        wanted = {spec.address: spec for key, spec in now.items() if key not in before}
        left = [
            endpoint
            for address in dict.fromkeys(gone)
            if (endpoint := self._by_address.get(address)) is not None
            and not _same(endpoint, wanted.get(address))
        ]
        for endpoint in left:
            del self._by_address[endpoint.address]
            for listener in self._listeners:
                listener.left(endpoint)
            heapq.heappush(self._free_slots, endpoint.slot)
        joined = []
        for address, spec in wanted.items():
            known = self._by_address.get(address)
            if known is None:
                known = self._by_address[address] = Endpoint(spec, self._take_slot())
                known.proven = first  # it is we who are new, not they
                joined.append(known)
            elif known.spec != spec:
                known.take_over(spec)
                self._dirty = True
        if not left and not joined:
            return NO_CHANGE
        self._dirty = True
        self._endpoints = tuple(self._by_address[a] for a in sorted(self._by_address))
        for endpoint in joined:
            for listener in self._listeners:
                listener.joined(endpoint)
        return Change(tuple(joined), tuple(left))

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        return len(self._by_address)

    # -- health and load -------------------------------------------------------------------

    def _scraped(self, endpoint: Endpoint, load: Load, now_s: float) -> None:
        restarted = endpoint.scrape_failures >= SCRAPE_FAILURES_MAX and endpoint.unreachable
        endpoint.scrape_failures = 0
        endpoint.unreachable = False
        if restarted and endpoint.ejected_until_s > now_s:
            endpoint.ejected_until_s = now_s
            self._dirty = True
        self._dirty = self._dirty or not _reads_alike(endpoint.load, load)
        endpoint.load = endpoint.last_load = load
        stale_at_s = (load.at_s if load.at_s is not None else now_s) + self._stale_after_s
        self._next_change_s = min(self._next_change_s, stale_at_s)
        for listener in self._listeners:
            if restarted:
                listener.restarted(endpoint)
            listener.scraped(endpoint)

    def _scrape_failed(self, endpoint: Endpoint, unreachable: bool, now_s: float) -> None:
        endpoint.scrape_failures += 1
        endpoint.unreachable = unreachable
        if (
            unreachable
            and endpoint.scrape_failures >= SCRAPE_FAILURES_MAX
            and now_s - endpoint.last_answer_s > self._stale_after_s
        ):
            self._eject(endpoint, endpoint.scrape_failures - SCRAPE_FAILURES_MAX, now_s)

    def _answered(self, endpoint: Endpoint, ok: bool, now_s: float) -> None:
        if ok:
            endpoint.last_answer_s = now_s
            if endpoint.on_probation:
                for listener in self._listeners:
                    listener.recovered(endpoint)
            if endpoint.failures or endpoint.on_probation or endpoint.ejected_until_s:
                endpoint.failures = 0
                endpoint.ejected_until_s = 0.0
                endpoint.on_probation = False
                self._dirty = True
            return
        if endpoint.ejected_until_s > now_s:
            return  # sent before the ejection: one failing burst counts as one failure to come back
        endpoint.failures += 1
        if endpoint.failures >= FAILURES_MAX or endpoint.on_probation:
            self._eject(endpoint, max(0, endpoint.failures - FAILURES_MAX), now_s)

    def _eject(self, endpoint: Endpoint, repeats: int, now_s: float) -> None:
        for_s = min(EJECTION_S_MAX, EJECTION_S_MIN * 2.0 ** min(repeats, 10))
        endpoint.ejected_until_s = max(endpoint.ejected_until_s, now_s + for_s)
        if not endpoint.on_probation:  # news once, however often it fails to come back
            for listener in self._listeners:
                listener.ejected(endpoint, for_s)
        endpoint.on_probation = True
        self._dirty = True

    def _rebuild(self, now_s: float) -> None:
        next_change_s = float("inf")
        for endpoint in self._endpoints:
            at_s = endpoint.load.at_s
            if at_s is not None:
                stale_at_s = at_s + self._stale_after_s
                if stale_at_s <= now_s:
                    endpoint.load = UNKNOWN
                    endpoint.foreign_requests = endpoint.foreign_waiting = 0
                else:
                    next_change_s = min(next_change_s, stale_at_s)
            if endpoint.ejected_until_s > now_s:
                next_change_s = min(next_change_s, endpoint.ejected_until_s)
            elif endpoint.on_probation and now_s - endpoint.ejected_until_s > PROBATION_S_MAX:
                endpoint.on_probation = False
                endpoint.failures = min(endpoint.failures, FAILURES_MAX - 1)
        eligible = tuple(e for e in self._endpoints if _eligible(e, now_s))
        # Eligibility on probation changes with each charge and release, so nothing is cached then.
        self._dirty = any(e.on_probation for e in self._endpoints)
        self._next_change_s = next_change_s
        self._snapshot = Snapshot(eligible or self._endpoints, self._snapshot.version + 1)


def _same(endpoint: Endpoint, spec: EndpointSpec | None) -> bool:
    return spec is not None and spec.uid == endpoint.spec.uid


def _eligible(endpoint: Endpoint, now_s: float) -> bool:
    if endpoint.ejected_until_s > now_s:
        return False
    return not (endpoint.on_probation and endpoint.inflight_requests)


def _reads_alike(old: Load, new: Load) -> bool:
    """Whether every reading but the time is the same, so that scores stay what they are."""
    return (
        old.waiting == new.waiting
        and old.running == new.running
        and old.kv_usage_ratio == new.kv_usage_ratio
        and old.lora == new.lora
        and old.attributes == new.attributes
    )
