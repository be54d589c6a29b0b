"""Own names for an engine's blocks: a chain of hashes over token ids.

Engines name their blocks too, but how depends on version, algorithm, seed and adapter path, and two
engines may differ in each. So blocks are known here by a key of our own, made of what a block
holds: equal keys mean equal tokens after equal tokens, whichever engine they are on. A key is the
upper 60 bits of an xxh64 over the block's token ids (little-endian, 32 bits each), seeded with the
key before it; 60 bits fit an int of 32 bytes, 64 bits need one of 48.

The root, which takes the place of a key before block 0, has in it what keeps prompts apart that
have the same tokens: adapter, block size, and a secret of the process, without which nobody can
look for prompts that collide. Whatever else an engine mixes into one block (cache salt, identity
of an image; `extra`) is mixed into the seed of that block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import iter_unpack
from sys import byteorder

import msgspec
from xxhash import xxh64_intdigest

from epp.core.kvevents import TOKEN_BYTES

KEY_BITS = 60
NO_KEYS: array[int] = array("Q")
_SPARE_BITS = 64 - KEY_BITS


def root_of(
    block_tokens: int, lora: str | None = None, cache_salt: str | None = None, secret: bytes = b""
) -> int:
    """The parent of a chain's first block.

    Args:
        block_tokens: tokens per block: chains of different block sizes share no key.
        lora: adapter as the engine names it in its events; None for the model itself.
        cache_salt: of the request; None or empty for none. An engine reports it as `extra` of
            block 0, so the root of an event's chain is made without one.
        secret: of this process.
    """
    text = f"{block_tokens}:{'-' if lora is None else '+' + lora}"
    seed = xxh64_intdigest(secret)
    root = xxh64_intdigest(text.encode(errors="surrogatepass"), seed) >> _SPARE_BITS
    return seed_of(root, (cache_salt,)) if cache_salt else root


def seed_of(parent_key: int, extra: object) -> int:
    """The seed of a block that has something mixed in besides its tokens.

    Args:
        extra: what an event says of this block: strings, ints, bytes and rows of them.
    """
    mixed = msgspec.msgpack.encode(extra, enc_hook=repr)
    return xxh64_intdigest(mixed, parent_key) >> _SPARE_BITS


def extra_of(extra: object, lora: str | None) -> object:
    """What an event's extra keys of one block say besides the adapter, which is in the root.

    Returns: None for nothing.
    """
    if isinstance(extra, (list, tuple)):
        rest = extra[1:] if lora is not None and extra and extra[0] == lora else extra
        return rest or None
    return extra


def key_of(parent_key: int, tokens: bytes, lora: str | None = None, extra: object = None) -> int:
    """The key of one block.

    Args:
        parent_key: key of the block before it, or `root_of`.
        tokens: its token ids, `TOKEN_BYTES` each, little-endian.
        lora, extra: as the event says.
    """
    extra = extra_of(extra, lora)
    seed = parent_key if extra is None else seed_of(parent_key, extra)
    return xxh64_intdigest(tokens, seed) >> _SPARE_BITS


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as keys are made of them.

    Raises: OverflowError if one is negative or does not fit 32 bits.
    """
    packed = array("I", token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def keys_of(token_ids: Sequence[int] | bytes, block_tokens: int, root: int) -> array[int]:
    """The keys of the full blocks of a prompt, for prompts that come as token ids.

    Args:
        token_ids: ids, or packed as by `pack_tokens`.
    Returns: prompt order; a last, partial block has no key.
    Raises: ValueError if `block_tokens` is below 1; OverflowError as `pack_tokens`.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}: need at least 1")
    packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    size = block_tokens * TOKEN_BYTES
    blocks = len(packed) // size
    if not blocks:
        return NO_KEYS
    key = root
    pieces = iter_unpack(f"{size}s", memoryview(packed)[: blocks * size])
    return array("Q", [key := xxh64_intdigest(piece, key) >> _SPARE_BITS for (piece,) in pieces])
