"""Stored blocks whose parent is not known: kept until it is, since without it they have no key.

That happens after a loss, or where the index starts after the engine and has no replay. They are
objects, so there is a bound on how many all holdings keep together (see `KvIndex`).
"""

from __future__ import annotations

from typing import final


@final
class Orphan:
    """One block that waits."""

    __slots__ = ("block_tokens", "copies", "extra", "lora", "name", "parent", "tokens")

    def __init__(
        self,
        name: int,
        parent: int,
        *,
        tokens: bytes,
        block_tokens: int,
        lora: str | None,
        extra: object,
    ) -> None:
        """`name` and `parent` are names from `name_of`; the rest is as in `Stored`."""
        self.name = name
        self.parent = parent
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.lora = lora
        self.extra = extra
        self.copies = 1


class Aside:
    """The orphans of one holding."""

    __slots__ = ("_by_name", "_waiting")

    def __init__(self) -> None:
        self._by_name: dict[int, Orphan] = {}
        """Oldest first."""
        self._waiting: dict[int, dict[int, None]] = {}
        """Name of a parent -> names of the orphans that wait for it."""

    def __len__(self) -> int:
        return len(self._by_name)

    def keep(self, orphan: Orphan) -> bool:
        """Keep a block. Returns: False if it was here already and has one more copy now."""
        known = self._by_name.get(orphan.name)
        if known is not None:
            if known.parent == orphan.parent and known.tokens == orphan.tokens:
                known.copies += 1
                return False
            self._remove(known)
        self._by_name[orphan.name] = orphan
        self._waiting.setdefault(orphan.parent, {})[orphan.name] = None
        return known is None

    def removed(self, name: int) -> int:
        """The engine removed one copy. Returns: copies that are left; -1 if there was none."""
        orphan = self._by_name.get(name)
        if orphan is None:
            return -1
        orphan.copies -= 1
        if not orphan.copies:
            self._remove(orphan)
        return orphan.copies

    def take(self, parent: int) -> list[Orphan]:
        """What waits for a block that is known now; it is no more here."""
        found = []
        for name in tuple(self._waiting.get(parent, ())):
            orphan = self._by_name[name]
            self._remove(orphan)
            found.append(orphan)
        return found

    def drop_oldest(self) -> None:
        """Give up one; there must be one."""
        self._remove(next(iter(self._by_name.values())))

    def _remove(self, orphan: Orphan) -> None:
        del self._by_name[orphan.name]
        siblings = self._waiting[orphan.parent]
        del siblings[orphan.name]
        if not siblings:
            del self._waiting[orphan.parent]
