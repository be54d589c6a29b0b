"""The copy of all objects of a kind, and what has changed in it since that was last told.

Objects are known by namespace and name. One that has another uid is another object: the old one is
deleted, then the new one upserted. What differs is worked out when it is told, against what was
told before: an object that changed ten times in between is told once, one that came and went not
at all, and what the listener did not take because it raised is told again.

An object that cannot be decoded is skipped and counted; what was known of it stays until it is
deleted or can be decoded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from epp.edge.kubernetes.objects import Object

COMPLAINTS_MAX = 100
"""Objects of a kind that are named in the log because they cannot be used; each once."""

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Object)

_ANY = msgspec.json.Decoder(Object)


class Changes(msgspec.Struct, Generic[T], frozen=True):
    """What is different from the last time. `deleted` goes first: an object in both was replaced by
    another of its name."""

    upserted: tuple[T, ...]
    deleted: tuple[T, ...]
    """As they were last told."""
    synced: bool
    """Always true: nothing is told before all objects were listed."""


class Replica(Generic[T]):
    """Objects of one kind.

    Args:
        type_: what one decodes to.
        on_change: what is told.
    """

    def __init__(self, type_: type[T], on_change: Callable[[Changes[T]], None]) -> None:
        self.objects: dict[str, T] = {}
        """By `namespace/name`."""
        self.malformed = 0
        """Objects that could not be decoded; only ever grows."""
        self._complaints: set[str] = set()
        """Keys of objects that could not be decoded and were named in the log."""
        self._kind = type_.__name__
        self._decoder = msgspec.json.Decoder(type_)
        self._on_change = on_change
        self._told = False
        self._before: dict[str, T | None] = {}
        """Of what has changed since: what was told of it."""

    def upsert(self, raw: msgspec.Raw) -> Object | None:
        """Take an object in. Returns what is known of it; `None`: nothing."""
        new = self._decode(raw)
        if new is None:
            return identity(raw)
        self._put(new.key, new)
        return new

    def delete(self, raw: msgspec.Raw) -> Object | None:
        """Drop an object. Returns what is known of it; `None`: nothing, and nothing was dropped."""
        about = identity(raw)
        if about is not None and about.key in self.objects:
            self._put(about.key, None)
        return about

    def find(self, raw: msgspec.Raw, found: dict[str, T]) -> None:
        """Put an object of a list into `found`, to `replace` the objects with."""
        new = self._decode(raw)
        if new is not None:
            found[new.key] = new
        elif (about := identity(raw)) is not None and about.key in self.objects:
            found[about.key] = self.objects[about.key]

    def replace(self, found: Mapping[str, T]) -> None:
        """Drop what is not in `found`, take in what is new or different there."""
        for key in self.objects.keys() - found.keys():
            self._put(key, None)
        for key, new in found.items():
            if self.objects.get(key) != new:
                self._put(key, new)

    def tell(self, *, even_nothing: bool = False) -> None:
        """Tell what differs from what was last told, if anything does.

        Args:
            even_nothing: also if nothing does, provided that nothing has ever been told.
        """
        upserted, deleted = [], []
        for key, old in self._before.items():
            new = self.objects.get(key)
            if new == old:
                continue
            if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
                deleted.append(old)
            if new is not None:
                upserted.append(new)
        if upserted or deleted or (even_nothing and not self._told):
            self._on_change(Changes(tuple(upserted), tuple(deleted), synced=True))
            self._told = True
        self._before.clear()

    def _put(self, key: str, new: T | None) -> None:
        self._before.setdefault(key, self.objects.get(key))
        if new is None:
            del self.objects[key]
        else:
            self.objects[key] = new

    def _decode(self, raw: msgspec.Raw) -> T | None:
        try:
            decoded = self._decoder.decode(raw)
            if decoded.metadata.name:
                return decoded
            problem = "it has no name"
        except (msgspec.DecodeError, RecursionError) as error:
            problem = str(error)
        self.malformed += 1
        about = identity(raw)
        self._complain("/" if about is None else about.key, problem)
        return None

    def _complain(self, key: str, problem: str) -> None:
        if key not in self._complaints and len(self._complaints) < COMPLAINTS_MAX:
            self._complaints.add(key)
            log.warning("%s %s cannot be used and is skipped: %s", self._kind, key, problem)


def identity(raw: msgspec.Raw) -> Object | None:
    """An object's metadata alone; `None` if it has none. A bookmark's has just a version."""
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
