"""Compressed request bodies: every coding, every kind of damage, and bombs."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from epp.core.encoding import CODINGS_MAX, decode_body

TEXT = random.Random(7).randbytes(3_000).hex().encode() * 20
LIMIT = 1 << 20


def bare_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


def streamed_zstd(data: bytes) -> bytes:
    """As HTTP clients do it: without the size in the frame's header."""
    encoder = zstandard.ZstdCompressor().compressobj()
    return encoder.compress(data) + encoder.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "two gzip members": ("gzip", lambda d: gzip.compress(d[:99]) + gzip.compress(d[99:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "streamed zstd": ("zstd", streamed_zstd),
    "two zstd frames": ("zstd", lambda d: streamed_zstd(d[:99]) + streamed_zstd(d[99:])),
    "br": ("br", brotli.compress),
}
every_coding = pytest.mark.parametrize(("coding", "encode"), ENCODERS.values(), ids=ENCODERS)


@every_coding
@pytest.mark.parametrize("text", [b"", b"{}", TEXT], ids=["empty", "tiny", "large"])
def test_B14_what_was_encoded_comes_back(
    coding: str, encode: Callable[[bytes], bytes], text: bytes
) -> None:
    assert decode_body(coding, encode(text), bytes_max=LIMIT) == text
    assert decode_body(coding.upper(), encode(text), bytes_max=LIMIT) == text


@every_coding
def test_B14_the_limit_is_exact(coding: str, encode: Callable[[bytes], bytes]) -> None:
    assert decode_body(coding, encode(TEXT), bytes_max=len(TEXT)) == TEXT
    assert decode_body(coding, encode(TEXT), bytes_max=len(TEXT) - 1) is None
    assert decode_body(coding, encode(b"a"), bytes_max=0) is None


@every_coding
def test_B14_a_damaged_body_is_none_and_never_a_part_of_the_text(
    coding: str, encode: Callable[[bytes], bytes]
) -> None:
    whole = encode(TEXT)
    for cut in (0, 1, 5, len(whole) // 2, len(whole) - 5, len(whole) - 1):
        assert decode_body(coding, whole[:cut], bytes_max=LIMIT) is None, cut
    assert decode_body(coding, b"{}", bytes_max=LIMIT) is None
    assert decode_body(coding, b"\x00" * 100, bytes_max=LIMIT) is None


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
def test_junk_after_the_end_is_damage(coding: str) -> None:
    assert decode_body(coding, ENCODERS[coding][1](TEXT) + b"junk", bytes_max=LIMIT) is None


@pytest.mark.parametrize("coding", ["", "identity", "Identity", " identity , identity", ","])
def test_a_body_without_coding_is_returned_as_it_is(coding: str) -> None:
    assert decode_body(coding, TEXT, bytes_max=1) is TEXT


@pytest.mark.parametrize(
    "coding", ["compress", "gzipp", "aws-chunked", "\xff", "gzip;q=1", "gzip x"]
)
def test_B14_an_unknown_coding_is_none(coding: str) -> None:
    assert decode_body(coding, gzip.compress(TEXT), bytes_max=LIMIT) is None


def test_codings_are_undone_from_the_last_to_the_first() -> None:
    body = brotli.compress(gzip.compress(TEXT))
    assert decode_body("gzip, br", body, bytes_max=LIMIT) == TEXT
    assert decode_body("GZIP ,identity,br", body, bytes_max=LIMIT) == TEXT
    assert decode_body("br, gzip", body, bytes_max=LIMIT) is None


def test_a_chain_of_codings_has_an_end() -> None:
    body = TEXT
    for _ in range(CODINGS_MAX):
        body = gzip.compress(body)
    assert decode_body(", ".join(["gzip"] * CODINGS_MAX), body, bytes_max=LIMIT) == TEXT
    body = gzip.compress(body)
    assert decode_body(", ".join(["gzip"] * (CODINGS_MAX + 1)), body, bytes_max=LIMIT) is None


def zstd_bomb(size: int) -> bytes:
    encoder = zstandard.ZstdCompressor(level=1).compressobj()
    block = bytes(1 << 20)
    return b"".join([*(encoder.compress(block) for _ in range(size >> 20)), encoder.flush()])


def brotli_bomb(size: int) -> bytes:
    encoder = brotli.Compressor(quality=1)
    block = bytes(1 << 20)
    return b"".join([*(encoder.process(block) for _ in range(size >> 20)), encoder.finish()])


BOMBS = {
    "gzip": gzip.compress(bytes(64 << 20), 1),
    "deflate": zlib.compress(bytes(64 << 20), 1),
    "zstd": zstd_bomb(1 << 30),
    "br": brotli_bomb(256 << 20),
    "gzip, gzip": gzip.compress(gzip.compress(bytes(64 << 20), 1)),
}


@pytest.mark.parametrize("coding", BOMBS)
def test_B14_a_bomb_costs_no_more_memory_than_the_limit_and_a_little(coding: str) -> None:
    bomb = BOMBS[coding]
    assert len(bomb) < 500_000
    tracemalloc.start()
    try:
        assert decode_body(coding, bomb, bytes_max=LIMIT) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * LIMIT + len(bomb)


def test_B14_a_zstd_window_larger_than_allowed_is_not_allocated() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = encoder.compress(bytes(1000)) + encoder.flush()
    assert zstandard.get_frame_parameters(body).window_size == 1 << 27
    assert decode_body("zstd", body, bytes_max=LIMIT) is None


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_countless_empty_members_do_not_hold_up_the_loop(coding: str) -> None:
    body = ENCODERS[coding][1](b"") * 100_000
    assert decode_body(coding, body, bytes_max=LIMIT) is None
