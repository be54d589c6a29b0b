"""One open watch: changes of one kind, seen through its selectors, as lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.kubernetes.answers import RefusedError, bad_request
from tests.kubernetes.faults import Bends, Cut, Fault, Faults, Inject, Outlet, Silence, Slow
from tests.kubernetes.resources import LEASE, POD, YES, Kind, Object
from tests.kubernetes.selectors import field_test, label_test
from tests.kubernetes.store import Change, Store, Stored, Subscription, encode

BUFFER_BYTES = 1 << 16
BOOKMARK_BEFORE_END_S = 2.0
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a kind a list or a watch is about."""

    kind: Kind
    namespace: str | None
    labels: Callable[[dict[str, str]], bool]
    fields: Callable[[Object], bool]
    selective: bool

    def sees(self, stored: Stored | None) -> bool:
        return (
            stored is not None
            and self.namespace in (None, stored.namespace)
            and self.labels(stored.labels)
            and self.fields(stored.obj)
        )


def scope(kind: Kind, namespace: str | None, name: str | None, query: dict[str, str]) -> Scope:
    """Raises: RefusedError 400 for a bad selector."""
    labels, fields = query.get("labelSelector"), query.get("fieldSelector")
    if name:
        fields = f"{fields},metadata.name={name}" if fields else f"metadata.name={name}"
    return Scope(
        kind, namespace, label_test(labels), field_test(fields, kind), bool(labels or fields)
    )


def line(type_: str, raw: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (type_.encode(), raw)


def bookmark(kind: Kind, version: int, *, initial_end: bool = False) -> bytes:
    """A BOOKMARK as real ones are: Go's empty object with a version, zero values and all."""
    meta: dict[str, Any] = {"resourceVersion": str(version), "creationTimestamp": None}
    if initial_end:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    empty: dict[Kind, Object] = {
        POD: {"spec": {"containers": None}, "status": {}},
        LEASE: {"spec": {}},
    }
    obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta}
    return line("BOOKMARK", encode(obj | empty.get(kind, {})))


def _timeout_s(text: str | None) -> float:
    if text is None or (text.isascii() and text.isdigit()):
        return float(text or 0) or TIMEOUT_S
    raise bad_request(f'timeoutSeconds: Invalid value: "{text}"')


def version_of(text: str) -> int:
    """Raises: RefusedError 400 when a resourceVersion is none."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise bad_request(f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: invalid')


class WatchStream:
    """A watch from its request to its end."""

    def __init__(
        self, store: Store, about: Scope, query: dict[str, str], bookmark_s: float
    ) -> None:
        self.store = store
        self.about = about
        self.bookmarks = query.get("allowWatchBookmarks") in YES
        self.bookmark_s = bookmark_s
        self.end_s = time.monotonic() + _timeout_s(query.get("timeoutSeconds"))
        self.next_s = self._first_bookmark_s()
        self._query = query
        self._due: list[tuple[int, Inject | Silence]] = []
        self._events = 0
        self._silent = False
        self._over = False
        self._buffer = bytearray()

    async def run(
        self, request: web.Request, bends: Bends, faults: Faults, *, gone_as_status: bool
    ) -> web.StreamResponse:
        """Serve the watch until it ends.

        Args:
            gone_as_status: answer a forgotten version with HTTP 410, not with an ERROR event.
        Raises: RefusedError when it cannot begin; CutError when a fault cut it.
        """
        try:
            first, subscription = self._start()
        except RefusedError as refused:
            if gone_as_status or refused.code != 410:
                raise
            first, subscription = line("ERROR", encode(refused.status)), None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        outlet = Outlet(request, bends)
        await outlet.begin(response)
        self._buffer += first
        if subscription is None:
            await self._flush(outlet)
            return response
        self._due = [
            (each.after_events, each) for each in bends.all() if isinstance(each, Inject | Silence)
        ]

        def struck(fault: Fault, plural: str | None) -> None:
            if plural in (None, self.about.kind.plural):
                self._bend(fault, outlet)
                subscription.wake.set()

        faults.streams.add(struck)
        try:
            await self._serve(outlet, subscription)
        finally:
            faults.streams.discard(struck)
            self.store.unsubscribe(subscription)
        await outlet.end()
        return response

    def _start(self) -> tuple[bytes, Subscription]:
        """What is sent before any change, and the changes that follow it."""
        text = self._query.get("resourceVersion") or "0"
        initial = self._query.get("sendInitialEvents")
        version = version_of(text)
        if initial is not None and self._query.get("resourceVersionMatch") != "NotOlderThan":
            raise bad_request(
                "resourceVersionMatch: Forbidden: sendInitialEvents requires "
                'setting resourceVersionMatch to "NotOlderThan"'
            )
        if initial not in YES and (version or initial is not None):
            return b"", self.store.subscribe(self.about.kind, version or self.store.version)
        now = self.store.version
        stored = self.store.stored(self.about.kind, self.about.namespace)
        lines = [line("ADDED", each.raw) for each in stored if self.about.sees(each)]
        if initial in YES and self.bookmarks:
            lines.append(bookmark(self.about.kind, now, initial_end=True))
        return b"".join(lines), self.store.subscribe(self.about.kind, now)

    async def _serve(self, outlet: Outlet, subscription: Subscription) -> None:
        seen = version_of(self._query.get("resourceVersion") or "0")
        while True:
            subscription.wake.clear()
            await self._run_due(outlet)
            while subscription.pending and not self._over:
                change = subscription.pending.popleft()
                if change.version > seen:
                    await self._tell(change, outlet)
            await self._flush(outlet)
            if self._over or (not self._silent and self._ended(subscription)):
                return
            await self._sleep(subscription)

    def _ended(self, subscription: Subscription) -> bool:
        now = time.monotonic()
        if self.bookmarks and now >= self.next_s and not subscription.pending:
            self._buffer += bookmark(self.about.kind, self.store.version)
            subscription.wake.set()
            self.next_s = now + self.bookmark_s
        return subscription.ended or now >= self.end_s

    async def _sleep(self, subscription: Subscription) -> None:
        until = min(self.end_s, self.next_s) if self.bookmarks else self.end_s
        limit = None if self._silent else max(0.0, until - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await subscription.wake.wait()

    def _first_bookmark_s(self) -> float:
        now = time.monotonic()
        last = self.end_s - BOOKMARK_BEFORE_END_S
        return min(now + self.bookmark_s, last) if last > now else now + self.bookmark_s

    async def _tell(self, change: Change, outlet: Outlet) -> None:
        was, is_ = self.about.sees(change.old), self.about.sees(change.new)
        if change.type == "DELETED":
            said = ("DELETED", change.new.raw) if was else None
        elif is_:
            said = ("MODIFIED" if was else "ADDED", change.new.raw)
        else:
            said = ("DELETED", _left(change)) if was else None
        if said is None:
            return
        self._buffer += line(*said)
        self._events += 1
        await self._run_due(outlet)
        if len(self._buffer) > BUFFER_BYTES:
            await self._flush(outlet)

    async def _run_due(self, outlet: Outlet) -> None:
        due = [each for each in self._due if each[0] <= self._events]
        self._due = [each for each in self._due if each[0] > self._events]
        for _, fault in due:
            if isinstance(fault, Silence):
                await self._flush(outlet)
                self._silent = True
            else:
                self._buffer += fault.line
                self._over = self._over or fault.end

    def _bend(self, fault: Fault, outlet: Outlet) -> None:
        if isinstance(fault, Inject | Silence):
            self._due.append((self._events + fault.after_events, fault))
        elif isinstance(fault, Cut | Slow):
            outlet.bend(fault)

    async def _flush(self, outlet: Outlet) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if data and not self._silent:
            await outlet.send(data)


def _left(change: Change) -> bytes:
    """An object that left the selector is told as deleted: its old state at the new version."""
    assert change.old is not None
    obj = change.old.obj
    version = str(change.version)
    return encode({**obj, "metadata": {**obj["metadata"], "resourceVersion": version}})
