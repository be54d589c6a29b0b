"""HPACK against the `hpack` package, both ways, while the dynamic table fills, shrinks and turns
over."""

from __future__ import annotations

import hpack as reference
import pytest
from hypothesis import given, settings, strategies as st

from epp.wire.http2.hpack import Decoder, HpackError, decode_huffman, encode

names = st.one_of(
    st.sampled_from([b":path", b":method", b"content-type", b"x-request-id", b"te", b"a"]),
    st.binary(min_size=1, max_size=8),
)
values = st.one_of(
    st.sampled_from([b"/", b"POST", b"trailers", b"application/grpc", b""]),
    st.binary(max_size=60),
    st.binary(min_size=100, max_size=600),
)
headers = st.lists(st.tuples(names, values, st.booleans()), max_size=8)
steps = st.lists(
    st.tuples(headers, st.booleans(), st.one_of(st.none(), st.integers(0, 4096))), max_size=12
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_what_the_reference_encodes_we_decode(encoded) -> None:
    encoder = reference.Encoder()
    ours = Decoder(table_bytes_max=4096, list_bytes_max=1 << 20)
    for fields, huffman, table in encoded:
        if table is not None:
            encoder.header_table_size = table
        sensitive = [
            reference.NeverIndexedHeaderTuple(name, value)
            if never
            else reference.HeaderTuple(name, value)
            for name, value, never in fields
        ]
        block = encoder.encode(sensitive, huffman=huffman)
        assert ours.decode(block) == [(name, value) for name, value, _ in fields]


@given(st.lists(st.lists(st.tuples(names, values), max_size=6), max_size=5))
@settings(max_examples=100, deadline=None)
def test_what_we_encode_the_reference_decodes(lists) -> None:
    theirs = reference.Decoder(max_header_list_size=1 << 20)
    ours = Decoder(table_bytes_max=4096, list_bytes_max=1 << 20)
    for fields in lists:
        decoded = theirs.decode(encode(fields), raw=True)
        assert [tuple(field) for field in decoded] == fields == ours.decode(encode(fields))


opcodes = st.one_of(
    st.binary(max_size=6),
    st.sampled_from([b"\x82", b"\xbe", b"\xbf", b"\x20", b"\x3f\xe1\x1f", b"\x40\x01a\x01b"]),
    st.builds(lambda text: b"\x00\x01a" + bytes((0x80 | len(text),)) + text, st.binary(max_size=9)),
)


@given(st.lists(st.lists(opcodes, max_size=8), max_size=4))
@settings(max_examples=400, deadline=None)
def test_any_bytes_mean_what_the_reference_says_or_are_refused(blocks) -> None:
    """We may be stricter (integers, sizes behind fields), never more lenient, never different."""
    ours = Decoder(table_bytes_max=4096, list_bytes_max=1 << 20)
    theirs = reference.Decoder(max_header_list_size=1 << 20)
    for parts in blocks:
        block = b"".join(parts)
        try:
            decoded = ours.decode(block)
        except HpackError:
            return
        assert decoded == [tuple(field) for field in theirs.decode(block, raw=True)]


@given(st.binary(max_size=12))
@settings(max_examples=400, deadline=None)
def test_huffman_accepts_exactly_what_encoding_gives(encoded: bytes) -> None:
    from hpack.huffman import HuffmanEncoder
    from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    try:
        text = decode_huffman(encoded)
    except HpackError:
        return
    assert encoder.encode(text) == encoded


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_huffman_is_the_inverse_of_encoding(text: bytes) -> None:
    from hpack.huffman import HuffmanEncoder
    from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

    encoded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)
    assert decode_huffman(encoded) == text
    if encoded:
        with pytest.raises(HpackError):
            decode_huffman(encoded + b"\xff")
