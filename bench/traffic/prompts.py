"""Chat bodies for the benches: many turns, shared beginnings, and no two bodies alike.

A pool of conversations stands for the chats that are going on. Most requests continue one of them:
everything but the last turn was sent before, so the prefix index finds it. The others differ from
their first message on, so it finds nothing. What differs is a number, so that a new body costs the
driver a join and not a rendering.
"""

from __future__ import annotations

import json
from itertools import count
from random import Random

CONVERSATIONS = 48
NEW_RATIO = 0.25
"""Part of the requests that share nothing with earlier ones."""
TURN_BYTES = 1024
MESSAGES_MIN = 2
MODEL = "bench-model"

_WORDS = [
    f"{first}{second}{mark}"
    for first in ("ka", "re", "mi", "so", "ta", "lune", "vor", "bidan", "elis", "umpora")
    for second in ("", "da", "st", "re", "tion", "mente", "li")
    for mark in ("", "", "", "", ",", ".", ".\n")
]
_MARK = "#" * 16


class Prompts:
    """Bodies of one size.

    Args:
        prompt_bytes: text of all turns together, >= 64; a body is longer by its JSON.
        seed: equal seeds give equal bodies in equal order.
    """

    def __init__(self, prompt_bytes: int, *, seed: int = 1, stream: bool = False) -> None:
        rng = Random(seed)
        self._rng = Random(seed + 1)
        self._numbers = count(1)
        self._last = [_split(_chat(prompt_bytes, rng, -1, stream)) for _ in range(CONVERSATIONS)]
        self._first = [_split(_chat(prompt_bytes, rng, 0, stream)) for _ in range(4)]

    def next(self) -> bytes:
        """The next body."""
        rng = self._rng
        before, behind = rng.choice(self._first if rng.random() < NEW_RATIO else self._last)
        return b"%b%016d%b" % (before, next(self._numbers), behind)


def _chat(prompt_bytes: int, rng: Random, marked: int, stream: bool) -> str:
    """A body whose message number `marked` begins with `_MARK`."""
    turns = max(MESSAGES_MIN, prompt_bytes // TURN_BYTES)
    messages = [
        {"role": _role(number), "content": _text(rng, prompt_bytes // turns)}
        for number in range(turns)
    ]
    messages[marked]["content"] = _MARK + messages[marked]["content"][len(_MARK) :]
    return json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": 256, "stream": stream},
        separators=(",", ":"),
    )


def _role(number: int) -> str:
    return "system" if number == 0 else ("assistant", "user")[number % 2]


def _text(rng: Random, size: int) -> str:
    return " ".join(rng.choices(_WORDS, k=size // 3 + 1))[:size]  # no word is below two bytes


def _split(body: str) -> tuple[bytes, bytes]:
    before, behind = body.encode().split(_MARK.encode())
    return before, behind
