"""Keeps a copy of all objects of one kind in one namespace, and tells what changes.

    discover ─▶ list ─▶ watch ─┬─ ended by the API server ─▶ watch on from the last version
       ▲ ▲        ▲            ├─ refused or broken (429, 5xx, connection) ─▶ wait ─▶ watch on
       │ └ absent │            └─ version too old (410), silence, nonsense ─▶ wait ─▶ list
       └── 60 s ──┘                                 and in any case every 10 to 30 minutes

- The copy (`replica`) is replaced by difference: nobody ever sees it empty in between.
- A list that fails changes nothing. While the API server is away the copy stays as it was, and
  `age_s` grows.
- Versions are opaque: remembered from lists, events and bookmarks, sent back, never compared.
  Without one there is no watch.
- A kind whose CRD is not installed is absent: no objects, and a look every 60 s. A kind that is
  served by two groups is followed in the first of them that serves it, decided at each list.

Cost (`bench/kubernetes.py`): 1000 pods of 6.3 kB are listed in 20 to 40 ms of CPU, of which no more
than 7 ms are without a turn for others; 50 changes a second take 0.015 of a core; of changes that
come as fast as they can, each takes 25 to 32 us.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Generic, NoReturn, TypeVar

import msgspec

from epp.core.model import Clock
from epp.edge.kubernetes.client import ApiClient, ApiError
from epp.edge.kubernetes.objects import Object, Page, Resource, Status, WatchEvent
from epp.edge.kubernetes.replica import Changes, Replica, identity

__all__ = ["Changes", "Counts", "Pace", "Reflector"]

PAGES_MAX = 2_000
"""Of one list."""
SLICE_OBJECTS = 50
"""Decoded without a turn for others: about a millisecond's worth of pods."""
EVENT_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR")
OTHER = "other"
RESUMABLE = frozenset({"Connection", "Timeout", "Closed", "Tls", "Token"})
"""Reasons of errors without a status after which a watch goes on from where it was. Not silence: it
may come from a version that the API server has never heard of."""

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Object)


class _Served(msgspec.Struct, frozen=True):
    name: str


class _ResourceList(msgspec.Struct, frozen=True):
    resources: list[_Served]


_PAGE = msgspec.json.Decoder(Page)
_EVENT = msgspec.json.Decoder(WatchEvent)
_STATUS = msgspec.json.Decoder(Status)
_RESOURCES = msgspec.json.Decoder(_ResourceList)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long a reflector waits, in seconds. Of a pair, the time is random in between."""

    page_objects: int = 500
    watch_s: tuple[float, float] = (300.0, 600.0)
    """The API server is asked to end a watch after this long,"""
    watch_grace_s: float = 30.0
    """and given up that much later."""
    idle_s: float = 150.0
    """A watch without an event for so long is taken for dead. Bookmarks come every minute."""
    short_s: float = 1.0
    """A watch that the API server ends earlier is followed by a wait."""
    backoff_s: tuple[float, float] = (0.2, 30.0)
    """After the first and after the n-th failure in a row."""
    relist_s: tuple[float, float] = (600.0, 1170.0)
    """Until the next list; the watch that then runs is not interrupted."""
    absent_s: float = 60.0
    """Between two looks for a kind that is not installed."""
    gone_s: float = 30.0
    """So long nobody must serve a kind that was there before it is believed to be gone: an API
    server that starts does not know everything at once."""
    remind_s: float = 300.0
    """Between two lines in the log about a failure that goes on."""
    forbidden_log_s: float = 600.0
    """Between two lines in the log about what we may not do."""


@dataclass(slots=True)
class Counts:
    """What has happened since the start; only ever grows."""

    relists: int = 0
    """Complete lists after the first."""
    reconnects: int = 0
    """Watches begun after the first."""
    errors: Counter[str] = field(default_factory=Counter)
    """By status, or by reason where there was none."""
    events: Counter[str] = field(default_factory=Counter)
    """By type."""


class Backoff:
    """Waits that double, each up to half longer by chance.

    Args:
        bounds_s: the shortest first wait and the longest of all.
    """

    def __init__(self, bounds_s: tuple[float, float], rng: Random) -> None:
        self._low_s, self._high_s = bounds_s
        self._rng = rng
        self.step_s = self._low_s
        """The next wait, at least."""

    def next_s(self) -> float:
        """How long to wait now."""
        step_s = self.step_s
        self.step_s = min(step_s * 2, self._high_s / 1.5)
        return min(step_s * (1 + self._rng.random() / 2), self._high_s)

    def reset(self) -> None:
        self.step_s = self._low_s


class Reflector(Generic[T]):
    """Follows one kind in one namespace while `run` runs.

    Args:
        on_change: called on the event loop, never before the first list is complete, and then also
            when there are no objects.
        rng: spreads what many reflectors do.
        field_selector, label_selector: what the API server is to leave out; `None`: nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[T],
        *,
        namespace: str,
        on_change: Callable[[Changes[T]], None],
        rng: Random,
        field_selector: str | None = None,
        label_selector: str | None = None,
        pace: Pace = Pace(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self.synced = False
        """All objects have been listed at least once."""
        self.absent = False
        """No group that we know serves the kind."""
        self.resource = self._served = self._asked = resource
        self._client = client
        self._namespace = namespace
        self._rng = rng
        self._pace = pace
        self._clock = clock
        self._replica = Replica(resource.type, on_change)
        selectors = {"fieldSelector": field_selector, "labelSelector": label_selector}
        self._selectors = {key: value for key, value in selectors.items() if value}
        self._version = ""
        """To watch from; empty: list first."""
        self._missing_at_s: float | None = None
        """Since when nobody serves the kind; `None`: somebody does, or it was never there."""
        self._watched = False
        self._relist_at_s = 0.0
        self._alive_at_s: float | None = None
        self.backoff = Backoff(pace.backoff_s, rng)
        self._doing = "list"
        self._failing = False
        self._complain_at_s: float | None = None
        """When what is forbidden may be logged again."""
        self._cause = (0, "")
        self._remind_at_s = 0.0
        """Of the failure that was logged last, and when it is logged again."""
        self._strange = False
        """An event of a type unknown to us has come."""

    @property
    def store(self) -> Mapping[str, T]:
        """All objects, by `namespace/name`."""
        return self._replica.objects

    @property
    def malformed(self) -> int:
        """Objects that were skipped because they could not be decoded; only ever grows."""
        return self._replica.malformed

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the API server last said anything; `None`: it never did."""
        return None if self._alive_at_s is None else now_s - self._alive_at_s

    async def run(self) -> NoReturn:
        """Follow until cancelled. Call once."""
        while True:
            wait_s = 0.0
            try:
                if not self._version or self._clock() >= self._relist_at_s:
                    self._relist_at_s = self._clock() + self._rng.uniform(*self._pace.relist_s)
                    await self._list()
                if self.absent:
                    wait_s = self._pace.absent_s
                else:
                    await self._watch()
            except ApiError as error:
                wait_s = self._failed(error)
            except Exception as error:  # noqa: BLE001 - a listener that fails must not end this
                wait_s = self._listener_failed(error)
            await asyncio.sleep(wait_s)

    # -- list ------------------------------------------------------------------------------

    async def _list(self) -> None:
        self._doing = "discover"
        served = await self._discover()
        if served is None and self._version:
            served = self._served  # where the watch has only just worked; the list tells
        if served is None:
            self._miss()
            return
        self._missing_at_s = None
        self._doing, self._asked = "list", served
        found, version = await self._pages(served)
        if self.absent:
            log.info("%s: served at %s now", self.resource, served.group_path)
        self.absent, self._served, self._version = False, served, version
        self.counts.relists += self.synced
        self.synced = True
        self._replica.replace(found)
        self._replica.tell(even_nothing=True)

    async def _discover(self) -> Resource[T] | None:
        """Where the kind is served, the preferred group first; `None` if nowhere."""
        if self.resource.built_in:
            return self.resource
        for resource in (self.resource, *self.resource.older):
            try:
                body = await self._client.get(resource.group_path)
            except ApiError as error:
                if error.status == 404:
                    continue
                if error.status == 403:
                    return resource  # whoever may not ask what there is may yet list it
                raise
            try:
                served = _RESOURCES.decode(body).resources
            except (msgspec.DecodeError, RecursionError) as error:
                raise ApiError(0, "Undecodable", f"{resource.group_path}: {error}") from error
            if any(each.name == resource.plural for each in served):
                return resource
        return None

    def _miss(self) -> None:
        """Nobody serves the kind now.

        Raises: ApiError, to look again soon, while it may only be away.
        """
        if self.synced and not self.absent:
            now_s = self._clock()
            if self._missing_at_s is None:
                self._missing_at_s = now_s
            if now_s - self._missing_at_s < self._pace.gone_s:
                raise ApiError(404, "Missing", f"{self.resource.group_path} is not served")
        self._become_absent()

    def _become_absent(self) -> None:
        """Objects do not outlive their kind. Where there were some, two paths have said that it is
        gone; an API server that is merely away does not get here."""
        if not self.absent:
            groups = [each.group for each in (self.resource, *self.resource.older)]
            log.warning(
                "%s is not installed (looked for in %s); looking again every %g s",
                self.resource.kind,
                ", ".join(groups),
                self._pace.absent_s,
            )
        self._alive()
        self.absent, self._version = True, ""
        self._replica.replace({})
        self._replica.tell()

    async def _pages(self, resource: Resource[T]) -> tuple[dict[str, T], str]:
        """All objects, and the version to watch from."""
        params = {**self._selectors, "limit": str(self._pace.page_objects)}
        try:
            return await self._read_pages(resource, params)
        except ApiError as error:
            if error.status != 410:
                raise
            # Paging took longer than the API server remembers.
            self.counts.errors["410"] += 1
        return await self._read_pages(resource, self._selectors)

    async def _read_pages(
        self, resource: Resource[T], params: Mapping[str, str]
    ) -> tuple[dict[str, T], str]:
        found: dict[str, T] = {}
        path, asked = resource.path(self._namespace), dict(params)
        for _ in range(PAGES_MAX):
            body = await self._client.list_page(path, asked)
            self._alive()
            try:
                page = _PAGE.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ApiError(0, "Undecodable", f"the list: {error}") from error
            items = page.items or []
            for begin in range(0, len(items), SLICE_OBJECTS):
                await asyncio.sleep(0)
                for item in items[begin : begin + SLICE_OBJECTS]:
                    self._replica.find(item, found)
            if not page.metadata.continue_:
                break
            asked["continue"] = page.metadata.continue_
        else:
            raise ApiError(0, "TooLarge", f"a list of more than {PAGES_MAX} pages")
        if not page.metadata.resource_version:
            raise ApiError(0, "Undecodable", "a list without resourceVersion")
        await asyncio.sleep(0)
        return found, page.metadata.resource_version

    # -- watch -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        pace, served = self._pace, self._served
        self._doing, self._asked = "watch", served
        seconds = int(self._rng.uniform(*pace.watch_s))
        params = {
            **self._selectors,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        self.counts.reconnects += self._watched
        self._watched = True
        begin_s = self._clock()
        async with self._client.watch(
            served.path(self._namespace),
            params,
            total_s=seconds + pace.watch_grace_s,
            idle_s=pace.idle_s,
        ) as batches:
            self._alive()
            async for lines in batches:
                self._alive()
                try:
                    for line in lines:
                        self._take(line)
                finally:
                    self._replica.tell()
        lived_s = self._clock() - begin_s
        if lived_s < pace.short_s:
            raise ApiError(0, "Closed", f"the watch ended after {lived_s:.2f} s")
        self._recovered()

    def _take(self, line: bytes) -> None:
        """Apply one line.

        Raises: ApiError when the watch cannot go on.
        """
        try:
            event = _EVENT.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _refusal(line) or ApiError(0, "Undecodable", f"an event: {error}") from error
        known = event.type in EVENT_TYPES
        self.counts.events[event.type if known else OTHER] += 1
        if event.type == "ERROR":
            raise _refusal(event.object) or ApiError(0, "Undecodable", "an ERROR event")
        if not known:
            if not self._strange:
                log.warning("%s: event of unknown type %.40r skipped", self.resource, event.type)
            self._strange = True
            return
        self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            about = identity(event.object)
        elif event.type == "DELETED":
            about = self._replica.delete(event.object)
        else:
            about = self._replica.upsert(event.object)
        if about is not None and about.metadata.resource_version:
            self._version = about.metadata.resource_version
            self._recovered()

    # -- failures --------------------------------------------------------------------------

    def _alive(self) -> None:
        self._alive_at_s = self._clock()

    def _recovered(self) -> None:
        self.backoff.reset()
        if self._failing:
            self._failing = False
            log.info("%s in %s: followed again", self.resource, self._namespace)

    def _failed(self, error: ApiError) -> float:
        """Seconds to wait."""
        self.counts.errors[str(error.status or error.reason)] += 1
        if not _is_resumable(error):
            self._version = ""
        self._complain(error)
        return max(self.backoff.next_s(), error.retry_after_s or 0.0)

    def _listener_failed(self, error: Exception) -> float:
        """Seconds to wait."""
        where = self.resource, self._namespace
        log.error("%s in %s: what was told of them was not taken", *where, exc_info=error)
        self.counts.errors["Listener"] += 1
        self._version = ""
        return self.backoff.next_s()

    def _complain(self, error: ApiError) -> None:
        if error.status == 403:
            self._complain_of_rights(error)
            return
        # Each failure would be a flood; what is new about it, or that it lasts, is news.
        cause, now_s = (error.status, error.reason), self._clock()
        known = self._failing and cause == self._cause and now_s < self._remind_at_s
        level = logging.DEBUG if known else logging.WARNING
        if error.status == 410:
            level = logging.DEBUG  # routine: we were away for longer than history is kept
        else:
            self._failing = True
            if not known:
                self._cause, self._remind_at_s = cause, now_s + self._pace.remind_s
        log.log(
            level,
            "%s in %s: %s failed, keeping %d objects: %s",
            self.resource,
            self._namespace,
            self._doing,
            len(self._replica.objects),
            error,
        )

    def _complain_of_rights(self, error: ApiError) -> None:
        now_s = self._clock()
        if self._complain_at_s is not None and now_s < self._complain_at_s:
            return
        self._complain_at_s = now_s + self._pace.forbidden_log_s
        resource = self._asked
        log.error(
            "Forbidden to %s %s in namespace %s (%s); add to a Role of that namespace, bound to our"
            ' service account: {apiGroups: ["%s"], resources: [%s], verbs: [get, list, watch]}',
            self._doing,
            resource,
            self._namespace,
            error,
            resource.group,
            resource.plural,
        )


def _refusal(raw: bytes | msgspec.Raw) -> ApiError | None:
    """What a `Status` says; `None` if it is none."""
    try:
        status = _STATUS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return ApiError.of(status) if status.kind == "Status" or status.code else None


def _is_resumable(error: ApiError) -> bool:
    """The watch may go on from the version it was at: nothing says that the version is the problem.

    A version from before etcd was restored is answered as if it were only too early for it.
    """
    if "ResourceVersionTooLarge" in error.causes:
        return False
    if error.status == 0:
        return error.reason in RESUMABLE
    return error.status in (401, 403, 429) or 500 <= error.status < 600
