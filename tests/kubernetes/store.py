"""The fake's memory: objects, one version counter over all of them, and the log of changes.

Every write gives the object the next version. The log keeps each change with the state before and
after, so that a list can be made as of an older version and a watch can be replayed; `compact`
forgets the log, after which both answer 410. An open watch is a `Subscription`: it is handed every
change when it happens, so compaction does not touch it.

Everything here is synchronous and belongs to one event loop. What goes in and out is copied.
"""

from __future__ import annotations

import asyncio
import random
import string
import uuid
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, cast

import msgspec

from tests.kubernetes import crds, leases
from tests.kubernetes.answers import conflict, exists, expired, invalid, not_found
from tests.kubernetes.placing import place
from tests.kubernetes.resources import LEASE, NAMESPACE, Kind, Kinds, Object

FIRST_VERSION = 1000
LOG_MAX = 20_000
"""Changes that are kept at most; the oldest are compacted away."""

encode = msgspec.json.encode
Key = tuple[Kind, str, str]
"""Kind, namespace ('' when it has none), name."""


def copied(obj: Object) -> Object:
    """A deep copy as JSON would make it (dates become text)."""
    return cast("Object", msgspec.json.decode(encode(obj)))


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Stored:
    """One state of one object, encoded once."""

    def __init__(self, kind: Kind, obj: Object) -> None:
        self.kind = kind
        self.obj = obj

    @cached_property
    def raw(self) -> bytes:
        """With kind and apiVersion, as in a watch."""
        return encode(self.obj)

    @cached_property
    def bare(self) -> bytes:
        """As an item of a list: built-in kinds leave kind and apiVersion out there."""
        if self.kind.custom:
            return self.raw
        return encode({k: v for k, v in self.obj.items() if k not in ("kind", "apiVersion")})

    @property
    def labels(self) -> dict[str, str]:
        return self.obj["metadata"].get("labels") or {}

    @property
    def namespace(self) -> str:
        return cast("str", self.obj["metadata"].get("namespace", ""))


States = list[Stored]


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the log."""

    version: int
    kind: Kind
    type: str
    """ADDED, MODIFIED or DELETED; of a deletion, `new` is the last state at the new version."""
    new: Stored
    old: Stored | None


@dataclass(eq=False)
class Subscription:
    """Who is told about the changes of one kind."""

    kind: Kind
    pending: deque[Change] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    """The kind is no longer served, or the server forgot its versions: end the stream."""


class Store:
    """Objects of all kinds. Methods that take `plural` also take `plural.group`.

    `put` and `delete` are for tests: as if some client had done it. `create`, `replace` and
    `remove` are what the HTTP verbs do, and raise `RefusedError`.
    """

    def __init__(self, kinds: Kinds | None = None) -> None:
        self.kinds = kinds or Kinds()
        self.version = FIRST_VERSION
        self.compacted = FIRST_VERSION
        """The log holds every change after this version and none up to it."""
        self.unknown_is_silent = False
        """A watch from a version that is yet to come waits for it; else it has expired."""
        self.dropped: list[str] = []
        """Fields that the last write left out because the CRD does not know them."""
        self._objects: dict[Key, Stored] = {}
        self._log: list[Change] = []
        self._subscribers: set[Subscription] = set()

    # -- for tests ---------------------------------------------------------------------

    def put(self, obj: Object, *, checked: bool = True) -> Object:
        """Create or overwrite an object, status and all; returns it as stored.

        Missing metadata (namespace `default`, uid, creationTimestamp) is filled in or taken from
        the object that is overwritten. Another uid than that one's means a new object of the same
        name: the old one is deleted first.

        Args:
            checked: apply the CRD's schema; `False` stores what no server would let in.
        Raises: RefusedError 422 when the object is invalid; KeyError when its kind is not served.
        """
        kind, obj = self.kinds.of(obj), copied(obj)
        key = place(kind, obj, None)
        old = self._objects.get(key)
        if old is not None and obj["metadata"].get("uid", _uid(old)) != _uid(old):
            self._remove(key)
            old = None
        if checked:
            self._check(kind, obj)
        return copied(self._write(key, obj, old).obj)

    def delete(self, plural: str, namespace: str, name: str, graceful: bool = False) -> Object:
        """Delete an object, or with `graceful` only begin to (deletionTimestamp is set).

        Raises: RefusedError 404.
        """
        key = self.kinds.named(plural), namespace, name
        old = self._existing(key)
        return copied((self._mark(key, old) if graceful else self._remove(key)).obj)

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        found = self._objects.get((self.kinds.named(plural), namespace, name))
        return None if found is None else copied(found.obj)

    def list(self, plural: str, namespace: str | None = None) -> list[Object]:
        kind = self.kinds.named(plural)
        return [copied(each.obj) for each in self.stored(kind, namespace)]

    def compact(self, version: int | None = None) -> None:
        """Forget all changes up to a version (None: all there were)."""
        self.compacted = self.version if version is None else min(version, self.version)
        del self._log[: self._after(self.compacted)]

    def reset_versions(self, *, silent: bool = False, first: int = 1) -> None:
        """As after a restore of etcd: versions start again low, open watches end.

        Args:
            silent: a watch from a version of before waits, without a word, until the counter comes
                by there again (what a server does that was restored without a bumped revision);
                otherwise it gets 410.
        """
        self.version, self._log = first, []
        self.unknown_is_silent = silent
        for key, stored in list(self._objects.items()):
            self.version += 1
            self._objects[key] = Stored(key[0], _versioned(stored.obj, self.version))
        self.compacted = self.version
        self.end_watches()

    def install(self, group: str, plural: str | None = None) -> None:
        """Install the CRDs of a group, or one of them."""
        self.kinds.install(group, plural)

    def uninstall(self, group: str, plural: str | None = None) -> None:
        """Remove the CRDs of a group, or one: objects are deleted, watches end, then it is 404."""
        gone = set(self.kinds.uninstall(group, plural))
        for key in [key for key in self._objects if key[0] in gone]:
            self._remove(key)
        for kind in gone:
            self.end_watches(kind)

    # -- verbs -------------------------------------------------------------------------

    def create(self, kind: Kind, obj: Object, namespace: str | None) -> Stored:
        """POST. Raises: RefusedError 409 when it exists, 400 or 422 when it is invalid."""
        meta = obj.setdefault("metadata", {})
        if "name" not in meta and meta.get("generateName"):
            tail = random.choices(string.ascii_lowercase + string.digits, k=5)
            meta["name"] = meta["generateName"] + "".join(tail)
        key = place(kind, obj, namespace)
        if key in self._objects:
            raise exists(kind, key[2])
        for name in ("uid", "creationTimestamp", "deletionTimestamp", "resourceVersion"):
            meta.pop(name, None)
        if kind.has_status:
            obj.pop("status", None)
        self._check(kind, obj)
        return self._write(key, obj, None)

    def replace(self, kind: Kind, obj: Object, namespace: str, name: str, part: str) -> Stored:
        """PUT, to the object (`part` '') or to its `status`.

        Raises: RefusedError 409 when another version is the current one, 404, 400 or 422.
        """
        key = kind, namespace, name
        place(kind, obj, namespace, name)
        old, meta = self._objects.get(key), obj["metadata"]
        if old is None and kind.create_by_put and not part and not meta.get("resourceVersion"):
            return self.create(kind, obj, namespace)
        old = self._existing(key)
        version = meta.get("resourceVersion")
        if not version and not kind.versionless_put:
            why = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise invalid(kind, name, [why])
        if version and version != old.obj["metadata"]["resourceVersion"]:
            raise conflict(kind, name)
        if meta.get("uid", _uid(old)) != _uid(old):
            why = f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: "
            raise conflict(kind, name, why + _uid(old))
        obj = _merged_parts(kind, obj, old.obj, part)
        self._check(kind, obj)
        was, is_ = old.obj["metadata"], obj["metadata"]
        if "deletionTimestamp" in is_ and was.get("finalizers") and not is_.get("finalizers"):
            return self._remove(key)
        same = _versioned(obj, int(was["resourceVersion"])) == old.obj
        return old if same else self._write(key, obj, old)

    def remove(self, kind: Kind, namespace: str, name: str, *, marked: bool) -> tuple[Stored, bool]:
        """DELETE; `marked`: begin a graceful end. Returns the last state and whether it is gone."""
        key = kind, namespace, name
        old = self._existing(key)
        if marked or old.obj["metadata"].get("finalizers"):
            return self._mark(key, old), False
        return self._remove(key), True

    def fork(self) -> Store:
        """A store with the same objects, for a dry run; nobody watches it."""
        other = Store(self.kinds)
        other.version = other.compacted = self.version
        other._objects = dict(self._objects)
        return other

    def find(self, kind: Kind, namespace: str, name: str) -> Stored:
        """Raises: RefusedError 404."""
        return self._existing((kind, namespace, name))

    def stored(
        self, kind: Kind, namespace: str | None = None, version: int | None = None
    ) -> States:
        """Objects of a kind as of a version (None: now), in the order of etcd's keys.

        Raises: RefusedError 410 when the log does not reach back to that version.
        """
        found = {key: each for key, each in self._objects.items() if key[0] == kind}
        if version is not None:
            if version < self.compacted or version > self.version:
                raise expired(version, self.version)
            for change in reversed(self._log[self._after(version) :]):
                if change.kind == kind:
                    _undo(found, change)
        keys = sorted(found, key=lambda key: f"{key[1]}/{key[2]}")
        return [found[key] for key in keys if namespace in (None, key[1])]

    # -- watches -----------------------------------------------------------------------

    def subscribe(self, kind: Kind, version: int) -> Subscription:
        """Changes of a kind after a version. Raises: RefusedError 410 when they are forgotten."""
        ahead = version > self.version and not self.unknown_is_silent
        if version < self.compacted or ahead:
            raise expired(version, self.version)
        past = (change for change in self._log[self._after(version) :] if change.kind == kind)
        found = Subscription(kind, deque(past))
        self._subscribers.add(found)
        return found

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)

    def end_watches(self, kind: Kind | None = None) -> None:
        """End open watches cleanly (of one kind or of all)."""
        for each in self._subscribers:
            if kind in (None, each.kind):
                each.ended = True
                each.wake.set()

    # -- inside ------------------------------------------------------------------------

    def _after(self, version: int) -> int:
        return bisect_right(self._log, version, key=lambda change: change.version)

    def _existing(self, key: Key) -> Stored:
        if key not in self._objects:
            raise not_found(key[0], key[2])
        return self._objects[key]

    def _check(self, kind: Kind, obj: Object) -> None:
        if kind.custom:
            self.dropped = crds.check(kind, obj)
        elif kind == LEASE:
            leases.check(obj)

    def _write(self, key: Key, obj: Object, old: Stored | None) -> Stored:
        kind, namespace, _ = key
        if namespace and (NAMESPACE, "", namespace) not in self._objects:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            self.put(body | {"status": {"phase": "Active"}})
        meta, was = obj["metadata"], old.obj["metadata"] if old else {}
        meta.setdefault("uid", was.get("uid") or str(uuid.uuid4()))
        meta.setdefault("creationTimestamp", was.get("creationTimestamp") or now_text())
        if kind.custom:
            same = old is not None and old.obj.get("spec") == obj.get("spec")
            meta["generation"] = was.get("generation", 0) + (not same)
        self.version += 1
        new = Stored(kind, _versioned(obj, self.version))
        self._objects[key] = new
        self._tell(Change(self.version, kind, "MODIFIED" if old else "ADDED", new, old))
        return new

    def _mark(self, key: Key, old: Stored) -> Stored:
        if "deletionTimestamp" in old.obj["metadata"]:
            return old
        obj = copied(old.obj)
        obj["metadata"] |= {"deletionTimestamp": now_text(), "deletionGracePeriodSeconds": 30}
        return self._write(key, obj, old)

    def _remove(self, key: Key) -> Stored:
        old = self._objects.pop(key)
        self.version += 1
        last = Stored(key[0], _versioned(old.obj, self.version))
        self._tell(Change(self.version, key[0], "DELETED", last, old))
        return last

    def _tell(self, change: Change) -> None:
        self._log.append(change)
        if len(self._log) > LOG_MAX:
            self.compact(self._log[LOG_MAX // 10].version)
        for each in self._subscribers:
            if each.kind == change.kind:
                each.pending.append(change)
                each.wake.set()


def _uid(stored: Stored) -> str:
    return cast("str", stored.obj["metadata"]["uid"])


def _versioned(obj: Object, version: int) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}


def _undo(found: dict[Key, Stored], change: Change) -> None:
    meta = change.new.obj["metadata"]
    key = change.kind, meta.get("namespace", ""), meta["name"]
    if change.old is None:
        found.pop(key, None)
    else:
        found[key] = change.old


def _merged_parts(kind: Kind, new: Object, old: Object, part: str) -> Object:
    """A write to `status` leaves the rest alone, and the other way round."""
    kept = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
    if part:
        return {**copied(old), "status": new.get("status", {})}
    old_meta = old["metadata"]
    meta: dict[str, Any] = {k: v for k, v in new["metadata"].items() if k not in kept}
    meta |= {k: old_meta[k] for k in kept if k in old_meta}
    new = {**new, "metadata": meta}
    if kind.has_status:
        new.pop("status", None)
        new |= {"status": copied(old)["status"]} if "status" in old else {}
    return new
