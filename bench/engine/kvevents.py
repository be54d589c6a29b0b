"""KV cache events as vLLM 0.32 publishes them: their configuration, block hashes and encoding.

A batch is what one engine step did to the prefix cache, in this order: the cache was cleared,
blocks were removed (one event each), blocks were stored (one event per run of blocks of a request).
A step that did none of these has no batch. On the wire a batch is the array `[time, events, rank]`
and an event a map; in the dialect of vLLM up to 0.23 it is the map's values as an array. Both come
from the same dict, because the order of the keys is the order of the old array.

Block names are vLLM's own: the last 64 bits of a sha256 chain over pickled tuples, with the fixed
root that vLLM 0.29 and newer use while PYTHONHASHSEED is unset. That costs 3.4 us per new block
and 0.5 us per known one, where `tokens.name_blocks` costs 0.3 us; it is done only with events on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec

from bench.engine.bodies import ApiError
from bench.engine.kvcache import BlockName
from bench.engine.scheduler import Stored
from bench.engine.tokens import TOKEN_BYTES, ids_of_prompt, name_blocks, name_root

PICKLE_PROTOCOL = 5
HASH_BITS = 64
"""Of a sha256 digest, the part that events show."""
Event = dict[str, Any]
_encode = msgspec.msgpack.Encoder().encode
_Count = Annotated[int, msgspec.Meta(ge=1)]


class PublishingError(Exception):
    """A socket cannot be opened at the address asked for."""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys and defaults of vLLM's `--kv-events-config`, and `bind`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """`None`: zmq."""
    endpoint: str = "tcp://*:5557"
    """The PUB socket is bound where this holds `*` or `::` or is ipc or inproc; else it connects
    out. The port `*` or 0 is a free one, told by `/kv_event_sources`."""
    replay_endpoint: str | None = None
    """Bound by a ROUTER socket; `None`: no replay."""
    buffer_steps: _Count = 10_000
    """Batches kept for replay."""
    hwm: Annotated[int, msgspec.Meta(ge=0)] = 100_000
    """Batches queued per subscriber before new ones are dropped for it; 0: no limit."""
    max_queue_size: _Count = 100_000
    """Batches waiting for a paused publisher before new ones are lost. vLLM would stall."""
    topic: str = ""
    bind: bool = False
    """Not in vLLM: bind to an address without a wildcard, too, as tcp://127.0.0.1:5557."""

    @property
    def active(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the PUB socket is bound; else it connects."""
        wildcard = "*" in self.endpoint or "::" in self.endpoint
        return self.bind or wildcard or self.endpoint.startswith(("ipc://", "inproc://"))


def parse_kv_events_config(body: bytes) -> KvEventsConfig:
    """Raises: ApiError 400, naming the key."""
    try:
        return msgspec.json.decode(body, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        known = ", ".join(KvEventsConfig.__struct_fields__)
        raise ApiError(400, f"{error}; the keys are {known}", "Bad Request", "body") from error


def _digest(value: object) -> bytes:
    return sha256(pickle.dumps(value, PICKLE_PROTOCOL)).digest()


ROOT = _digest("vllm-none-hash")
"""Parent of every block 0."""


class BlockHasher:
    """Names blocks as vLLM does, and remembers what it named: the hash costs ten times as much as
    finding it by the name that `name_blocks` gives, and conversations come back."""

    def __init__(self, *, block_tokens: int, blocks_max: int) -> None:
        """`blocks_max`: blocks remembered, >= 1; then all are forgotten."""
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._digests: dict[BlockName, bytes] = {}

    def names(self, tokens: bytes, *, lora: str, cache_salt: str) -> list[BlockName]:
        """Names of the full blocks of padded `tokens`.

        An adapter's path, which vLLM hashes, too, is its name here: the `root` in `/v1/models`.
        """
        size, digests = self._block_tokens, self._digests
        # pickle refers back to an object it meets twice, and vLLM's name and path are two objects.
        adapter = (("lora", _copy(lora), _copy(lora)),) if lora else ()
        extra: tuple[tuple[str, ...], ...] = adapter
        if cache_salt:
            extra += (("cache_salt", cache_salt),)
        ids = memoryview(tokens).cast("I")
        parent, names = ROOT, []
        root = name_root(lora, cache_salt)
        for index, key in enumerate(name_blocks(tokens, block_tokens=size, root=root)):
            digest = digests.get(key)
            if digest is None:
                block = tuple(ids[index * size : (index + 1) * size])
                digest = _digest((parent, block, extra or None))
                if len(digests) >= self._blocks_max:
                    digests.clear()
                digests[key] = digest
            names.append(int.from_bytes(digest[-HASH_BITS // 8 :], "big"))
            parent, extra = digest, adapter
        return names


def _copy(text: str) -> str:
    return text.encode().decode()


def stored_event(stored: Stored, *, block_tokens: int, sessions: bool) -> Event:
    """Blocks that are cached and were not before; `sessions`: name whose they are."""
    request, start, stop = stored.request, stored.start, stored.stop
    content = request.content
    assert content is not None, "a server that publishes events gives every request its content"
    size = block_tokens * TOKEN_BYTES
    lora = request.lora or None
    extra_keys: list[list[str] | None] = [[lora] if lora else None] * (stop - start)
    if content.cache_salt and not start:
        extra_keys[0] = [*(extra_keys[0] or ()), content.cache_salt]
    event = {
        "type": "BlockStored",
        "block_hashes": request.blocks[start:stop],
        "parent_block_hash": request.blocks[start - 1] if start else None,
        "token_ids": ids_of_prompt(content.tokens[start * size : stop * size]),
        "block_size": block_tokens,
        "lora_id": content.lora_id,
        "medium": "GPU",
        "lora_name": lora,
        "extra_keys": extra_keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    if sessions and content.session_id:
        event["session_id"] = content.session_id
    return event


def removed_event(name: BlockName) -> Event:
    """One block was evicted."""
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def cleared_event() -> Event:
    """The whole cache was emptied."""
    return {"type": "AllBlocksCleared"}


def encode_batch(events: Iterable[Event], *, at_unix_s: float, rank: int, arrays: bool) -> bytes:
    """The third frame. `arrays`: events as up to vLLM 0.23."""
    written = [list(event.values()) for event in events] if arrays else list(events)
    return _encode([at_unix_s, written, rank])
