"""What a KV index has to answer, worked out slowly from plain dicts of Python.

Nothing is shared with the real one but how a block's key is made. Each question is answered from
scratch, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epp.core.kvevents import TOKEN_BYTES, Cleared, Event, Hash, Medium, Removed, Stored
from epp.core.kvindex import key_of, root_of

Rank = tuple[int, int]


@dataclass
class Block:
    key: int
    parent: Hash | None
    copies: int = 1


@dataclass
class Waiting:
    parent: Hash
    tokens: bytes
    lora: str | None
    extra: object
    copies: int = 1


@dataclass
class Cache:
    """One medium of one rank."""

    held: dict[Hash, Block] = field(default_factory=dict)
    gone: dict[Hash, int] = field(default_factory=dict)
    """Keys of blocks once held here, or on another medium when a child of theirs was stored."""
    aside: dict[Hash, Waiting] = field(default_factory=dict)

    def key(self, name: Hash) -> int | None:
        """Known while the block is held, or while a block held here follows it."""
        if name in self.held:
            return self.held[name].key
        if any(block.parent == name for block in self.held.values()):
            return self.gone[name]
        return None


class Oracle:
    """Caches by slot, rank and medium."""

    def __init__(self) -> None:
        self.caches: dict[Rank, dict[Medium, Cache]] = {}

    def apply(self, slot: int, event: Event, rank: int = 0) -> None:
        media = self.caches.setdefault((slot, rank), {medium: Cache() for medium in Medium})
        match event:
            case Cleared():
                del self.caches[(slot, rank)]
            case Removed():
                for name in event.hashes:
                    self._remove(media[event.medium], name)
            case Stored():
                self._store(media, media[event.medium], event)

    def forget(self, slot: int) -> None:
        self.caches = {rank: media for rank, media in self.caches.items() if rank[0] != slot}

    def held_by(self, slot: int) -> int:
        return sum(len(cache.held) for cache in self._of(slot))

    def orphans(self) -> int:
        return sum(len(c.aside) for media in self.caches.values() for c in media.values())

    def entries(self) -> int:
        return len({b.key for s in {slot for slot, _ in self.caches} for c in self._of(s)
                    for b in c.held.values()})  # fmt: skip

    def match(self, keys: list[int], media: tuple[Medium, ...] = tuple(Medium)) -> dict[int, int]:
        matched: dict[int, int] = {}
        for (slot, _), caches in self.caches.items():
            keys_held = {b.key for medium in media for b in caches[medium].held.values()}
            blocks = next((n for n, key in enumerate(keys) if key not in keys_held), len(keys))
            if blocks > matched.get(slot, 0):
                matched[slot] = blocks
        return matched

    def _of(self, slot: int) -> list[Cache]:
        return [c for (s, _), media in self.caches.items() if s == slot for c in media.values()]

    def _remove(self, cache: Cache, name: Hash) -> None:
        where = cache.held if name in cache.held else cache.aside
        if name in where:
            where[name].copies -= 1
            if not where[name].copies:
                if name in cache.held:
                    cache.gone[name] = cache.held[name].key
                del where[name]

    def _key(self, media: dict[Medium, Cache], cache: Cache, name: Hash) -> int | None:
        for place in (cache, *media.values()):
            if (key := place.key(name)) is not None:
                cache.gone[name] = key
                return key
        return None

    def _store(self, media: dict[Medium, Cache], cache: Cache, event: Stored) -> None:
        parent, size = event.parent, event.block_tokens * TOKEN_BYTES
        waits = False
        for number, name in enumerate(event.hashes):
            tokens = event.tokens[number * size : (number + 1) * size]
            extra = event.extra_keys[number] if event.extra_keys else None
            if parent is None:
                key: int | None = root_of(event.block_tokens, event.lora)
            else:
                key = None if waits else self._key(media, cache, parent)
            waits = False
            if key is not None:
                self._hold(cache, name, parent, key_of(key, tokens, event.lora, extra))
                self._adopt(media, cache, name)
            elif name in cache.held:
                cache.held[name].copies += 1
            elif name in cache.aside:
                cache.aside[name].copies += 1
                waits = True
            else:
                assert parent is not None
                waits = True
                cache.aside[name] = Waiting(parent, tokens, event.lora, extra)
            parent = name

    def _hold(self, cache: Cache, name: Hash, parent: Hash | None, key: int) -> None:
        if name in cache.held:
            cache.held[name].copies += 1
        else:
            cache.held[name] = Block(key, parent)

    def _adopt(self, media: dict[Medium, Cache], cache: Cache, name: Hash) -> None:
        for other in media.values():
            for child, waiting in list(other.aside.items()):
                if waiting.parent == name and child in other.aside:
                    del other.aside[child]
                    parent_key = self._key(media, other, name)
                    assert parent_key is not None
                    key = key_of(parent_key, waiting.tokens, waiting.lora, waiting.extra)
                    for _ in range(waiting.copies):
                        self._hold(other, child, name, key)
                    self._adopt(media, other, child)
