"""Small helpers for JSON that is read with `msgspec.Raw`: look at a value without copying it.

A `Raw` is the value's bytes as the client wrote them, without surrounding white space. `EMPTY`
stands for a key that is absent. msgspec is stricter than Python's own `json`, which is what vLLM
reads bodies with: it refuses lone surrogate escapes, NaN and byte order marks. `repaired` turns
what Python accepts into what msgspec accepts, so that nothing the engine serves is refused here.
"""

from __future__ import annotations

import json
from math import isfinite
from struct import Struct
from typing import Final

import msgspec
from msgspec import Raw

EMPTY: Final = Raw(b"")
_NULL: Final = b"null"
_WHOLE_DIGITS_MAX: Final = 18
peek: Final = Struct("c").unpack_from
"""`peek(raw)[0]` is the first byte of a value that is there: `first_byte` for inner loops."""


def first_byte(raw: Raw) -> bytes:
    """The byte that tells a value's type (`"`, `[`, `{`, `n`, ...); `b""` when absent. Costs 0.07
    us however long the value is, where `bytes(raw)` copies it."""
    if not len(raw):
        return b""
    byte: bytes = peek(raw)[0]
    return byte


def is_given(raw: Raw) -> bool:
    """The key is there and not null."""
    return raw is not EMPTY and first_byte(raw) not in (b"", b"n")


def text_of(raw: Raw) -> str:
    """The string, or `""` when the value is absent or no string. Never holds a lone surrogate: the
    result can be encoded as UTF-8."""
    if first_byte(raw) != b'"':
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return bytes(raw)[1:-1].decode("utf-8", "replace")


def whole_of(raw: Raw) -> int | None:
    """The non-negative integer, also when written as a string of digits; `None` for all else."""
    if not 0 < len(raw) <= _WHOLE_DIGITS_MAX + 2:
        return None
    digits = bytes(raw).strip(b'"')
    return int(digits) if digits.isdigit() and len(digits) <= _WHOLE_DIGITS_MAX else None


def is_true(raw: Raw) -> bool:
    """Exactly `true`; null, absent and everything else is not."""
    return first_byte(raw) == b"t"


def repaired(data: bytes) -> bytes:
    """The same JSON in a form msgspec reads: UTF-8 without a mark, compact, NaN and infinities as
    null, a lone surrogate as the three bytes it would have (which only `Raw` takes).

    Compact and unescaped is how JavaScript clients write, and they are the ones that send lone
    surrogates, so their prompts keep the same bytes. Memory: up to 25 times `data`; the caller
    bounds it.

    Raises:
        ValueError: not JSON for Python either; `json.JSONDecodeError` where it knows the position.
        RecursionError: nested too deeply.
    """
    value = json.loads(data, parse_constant=_nothing, parse_float=_finite)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def _nothing(_constant: str) -> None:
    return None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if isfinite(value) else None


def explain(error: ValueError) -> str:
    """What `repaired` found wrong, for people: position and expectation, none of the text."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid {error.encoding} at byte {error.start}"
    return "a number has too many digits"
