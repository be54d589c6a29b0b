"""Decoding of compressed request bodies, for routing only: the original bytes go on to the engine.

A kilobyte can expand to gigabytes, so every decoder here stops at a hard output limit and holds no
more than that plus its window (32 KiB for gzip and deflate, 8 MiB for zstd, 16 MiB for brotli).
Whatever cannot be decoded - unknown coding, damage, too large - is `None`: the request is routed by
load and the engine says what it thinks of the body.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import brotli
import zstandard

CODINGS_MAX = 4
"""Codings applied one over another; real clients use one."""
_MEMBERS_MAX = 16
"""Concatenated gzip members or zstd frames; real clients send one."""
_ZSTD_WINDOW_BYTES_MAX = 1 << 23
"""RFC 9659: a content coding must not need a larger window."""
_ZSTD_STEP_BYTES = 1 << 17
_BROTLI_STEP_BYTES = 1 << 20


def decode_body(content_encoding: str, body: bytes, *, bytes_max: int) -> bytes | None:
    """The body without its content codings.

    Args:
        content_encoding: value of the header, in the order of application, any case; `""` = none.
        bytes_max: limit of the result, and of each step on the way to it.
    Returns: `body` itself when no coding applies; `None` when it cannot be decoded or is larger.
    """
    if not content_encoding:
        return body
    names = [name.strip().lower() for name in content_encoding.split(",", CODINGS_MAX)]
    if len(names) > CODINGS_MAX:
        return None
    data: bytes | None = body
    for name in reversed(names):
        if name not in ("", "identity"):
            decode = _DECODERS.get(name)
            data = decode(data, bytes_max) if decode is not None and data is not None else None
    return data


def _gzip(data: bytes, bytes_max: int) -> bytes | None:
    parts: list[bytes] = []
    room = bytes_max
    for _ in range(_MEMBERS_MAX):
        decoder = zlib.decompressobj(wbits=31)
        part = _inflate(decoder, data, room)
        if part is None:
            return None
        parts.append(part)
        room -= len(part)
        data = decoder.unused_data
        if not data:
            return b"".join(parts)
    return None


def _deflate(data: bytes, bytes_max: int) -> bytes | None:
    """The standard means zlib framing; some clients send bare deflate."""
    for wbits in (15, -15):
        decoded = _inflate(zlib.decompressobj(wbits=wbits), data, bytes_max)
        if decoded is not None:
            return decoded
    return None


def _inflate(decoder: zlib._Decompress, data: bytes, bytes_max: int) -> bytes | None:
    try:
        decoded = decoder.decompress(data, bytes_max + 1)
    except zlib.error:
        return None
    return decoded if decoder.eof and len(decoded) <= bytes_max else None


def _zstd(data: bytes, bytes_max: int) -> bytes | None:
    """Decoded twice: the bounded reader does not tell a cut stream from a whole one, and the
    decoder that does has no limit, so the first pass measures and the second one decodes."""
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
    parts: list[bytes] = []
    try:
        if _zstd_exceeds(decoder, data, bytes_max):
            return None
        for _ in range(_MEMBERS_MAX):
            frame = decoder.decompressobj()
            parts.append(frame.decompress(data))
            data = frame.unused_data
            if not frame.eof:
                return None
            if not data:
                return b"".join(parts)
    except (zstandard.ZstdError, MemoryError):
        return None
    return None


def _zstd_exceeds(decoder: zstandard.ZstdDecompressor, data: bytes, bytes_max: int) -> bool:
    reader = decoder.stream_reader(data, read_across_frames=True)
    scratch = bytearray(_ZSTD_STEP_BYTES)
    total = 0
    while (count := reader.readinto(scratch)) and total <= bytes_max:
        total += count
    return total > bytes_max


def _brotli(data: bytes, bytes_max: int) -> bytes | None:
    decoder = brotli.Decompressor()
    parts: list[bytes] = []
    room = bytes_max
    try:
        while not decoder.is_finished():
            part = decoder.process(data, output_buffer_limit=min(room + 1, _BROTLI_STEP_BYTES))
            data = b""
            room -= len(part)
            if room < 0 or not (part or decoder.is_finished()):
                return None
            parts.append(part)
    except brotli.error:
        return None
    return b"".join(parts)


_DECODERS: Mapping[str, Callable[[bytes, int], bytes | None]] = MappingProxyType(
    {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd, "br": _brotli}
)
