"""Text to tokens, tokens to block names, and the text that is "generated".

A token is four bytes: of the prompt's UTF-8, the last token filled up with NULs, or of a token id
as little-endian uint32. So a prompt is bytes whose length is a multiple of four, `/tokenize` is a
cast, and ids from `/tokenize` sent as a prompt are the same prompt. Generated text is four ASCII
bytes per token, so a conversation that sends the answer back finds the answer's blocks cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from random import Random

from xxhash import xxh3_64_intdigest

from bench.engine.kvcache import BlockName

TOKEN_BYTES = 4
TOKEN_ID_MAX = 2**32 - 1
WORDS = (
    *(
        "able",
        "acre",
        "also",
        "area",
        "atom",
        "aunt",
        "bake",
        "ball",
        "barn",
        "bear",
        "bell",
        "bird",
    ),
    *(
        "blue",
        "boat",
        "book",
        "calm",
        "card",
        "city",
        "clay",
        "coal",
        "cold",
        "cook",
        "corn",
        "dawn",
    ),
    *(
        "deep",
        "desk",
        "door",
        "dust",
        "east",
        "echo",
        "edge",
        "farm",
        "fern",
        "fire",
        "fish",
        "flag",
    ),
    *(
        "foam",
        "gate",
        "gold",
        "hall",
        "hill",
        "iron",
        "jade",
        "kite",
        "lake",
        "lamp",
        "leaf",
        "lime",
    ),
    *("milk", "mint", "moon", "nest", "noon", "oven", "path", "pine", "pond", "rain", "reed"),
    *("road", "rock", "sand", "seed", "ship", "snow", "star"),
)


def pad(data: bytes) -> bytes:
    """Fill the last token up with NULs."""
    return data + b"\0" * (-len(data) % TOKEN_BYTES)


def count_tokens(prompt: bytes) -> int:
    """Tokens of a padded prompt."""
    return len(prompt) // TOKEN_BYTES


def prompt_of_ids(ids: Iterable[int]) -> bytes:
    """Raises: OverflowError or TypeError for what is not a token id."""
    return array("I", ids).tobytes()


def ids_of_prompt(prompt: bytes) -> list[int]:
    """Token ids of a padded prompt."""
    return memoryview(prompt).cast("I").tolist()


def text_of_ids(ids: Iterable[int]) -> str:
    """What the ids stand for; bytes that are not UTF-8 become U+FFFD."""
    return prompt_of_ids(ids).rstrip(b"\0").decode(errors="replace")


def name_root(lora: str, cache_salt: str) -> BlockName:
    """Parent of block 0: adapters and salts do not share blocks, aliases of a model do."""
    return xxh3_64_intdigest(f"{lora}\0{cache_salt}".encode())


def name_blocks(tokens: bytes, *, block_tokens: int, root: BlockName) -> list[BlockName]:
    """Names of the full blocks of padded `tokens`; a last, partial block has none."""
    size = block_tokens * TOKEN_BYTES
    view = memoryview(tokens)
    names = []
    parent = root
    for start in range(0, len(tokens) - size + 1, size):
        parent = xxh3_64_intdigest(view[start : start + size], parent)
        names.append(parent)
    return names


class Filler:
    """The text an engine generates: a shuffled ring of words, entered at a place that depends on
    the prompt. Same seed and prompt, same text."""

    def __init__(self, seed: int) -> None:
        words = [*WORDS, *(f" {word[:3]}" for word in WORDS)]
        Random(seed).shuffle(words)
        self._ring = "".join(words).encode()
        self._words = len(words)
        self._seed = seed

    def text(self, prompt: bytes, tokens: int) -> bytes:
        """`tokens` tokens of output for `prompt`; a longer answer begins with the shorter one."""
        start = xxh3_64_intdigest(prompt, self._seed) % self._words * TOKEN_BYTES
        length = tokens * TOKEN_BYTES
        rings = -(-(start + length) // len(self._ring))
        return (self._ring * rings)[start : start + length]
