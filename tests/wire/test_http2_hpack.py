"""HPACK: the examples of RFC 7541, the strictness it asks for, and the bounds we set."""

from __future__ import annotations

import subprocess
import sys

import hpack as reference
import pytest

from epp.wire.http2.hpack import Decoder, HpackError, decode_huffman, encode
from epp.wire.http2.hpack_tables import STATIC_TABLE, huffman_codes


def decoder(table: int = 4096, size: int = 16_384) -> Decoder:
    return Decoder(table_bytes_max=table, list_bytes_max=size)


def test_the_tables_are_those_of_the_reference() -> None:
    from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
    from hpack.table import HeaderTable

    assert huffman_codes() == list(zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True))
    assert STATIC_TABLE == HeaderTable.STATIC_TABLE


# RFC 7541 C.4 and C.6: requests and responses in sequence, Huffman, with evictions in the latter.
REQUESTS = [
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", 4),
    ("828684be5886a8eb10649cbf", 5),
    ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", 5),
]
RESPONSES = [
    "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
    "6e919d29ad171863c78f0b97c8e9ae82ae43d3",
    "4883640effc1c0bf",
    "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335df"
    "dfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
]


def test_the_examples_of_the_rfc_decode() -> None:
    ours = decoder()
    for block, fields in REQUESTS:
        assert len(ours.decode(bytes.fromhex(block))) == fields
    assert ours.decode(bytes.fromhex("be"))[0] == (b"custom-key", b"custom-value")

    ours, theirs = decoder(table=256), reference.Decoder()
    theirs.max_allowed_table_size = theirs.header_table_size = 256
    for block in RESPONSES:
        expected = theirs.decode(bytes.fromhex(block), raw=True)
        assert ours.decode(bytes.fromhex(block)) == [tuple(field) for field in expected]


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ("80", "index 0"),
        ("be", "an empty dynamic table"),
        ("ff80", "an index that does not end"),
        ("ffffffffffff0f", "an index of too many bytes"),
        ("3fe21f", "a table larger than allowed: 4097"),
        ("8220", "a table size behind a field"),
        ("00", "a literal without a name"),
        ("000161", "a literal without a value"),
        ("00016105626262", "a value longer than its block"),
        ("40ff", "a name length that does not end"),
        ("0f2f0161", "a name of an index that does not exist"),
        ("00016181ff", "eight bits of padding"),
        ("00016184ffffffff", "EOS in a string"),
        ("0001618118", "padding that is not ones"),
        ("000161821fff", "more than seven bits of padding"),
    ],
)
def test_what_the_rfc_forbids_is_refused(block: str, what: str) -> None:
    with pytest.raises(HpackError):
        decoder().decode(bytes.fromhex(block))


def test_a_table_may_be_as_large_as_allowed_and_shrink_and_grow() -> None:
    ours = decoder()
    ours.decode(bytes.fromhex("3fe11f") + reference.Encoder().encode([("a", "b")]))
    assert ours.decode(b"\xbe") == [(b"a", b"b")]
    assert ours.decode(b"\x20\x3f\xe1\x1f") == []
    with pytest.raises(HpackError):
        ours.decode(b"\xbe")


def test_a_field_larger_than_the_table_empties_it() -> None:
    ours = decoder(table=100)
    ours.decode(b"\x40\x01a\x01b")
    ours.decode(b"\x40\x01a\x7f\x00" + b"b" * 127)
    with pytest.raises(HpackError):
        ours.decode(b"\xbe")


def test_the_version_changes_with_the_table_and_only_then() -> None:
    ours = decoder()
    ours.decode(b"\x82\x00\x01a\x01b\x10\x01a\x01b")
    assert ours.version == 0
    ours.decode(b"\x40\x01a\x01b")
    after_insert = ours.version
    assert after_insert > 0
    ours.decode(b"\x20")
    assert ours.version > after_insert


def test_a_list_that_is_too_long_is_not_kept_but_changes_the_table() -> None:
    ours = decoder(size=100)
    assert ours.decode(b"\x40\x01a\x01b" * 2) is not None
    assert ours.decode(b"\x40\x01c\x01d" * 3) is None
    assert ours.decode(b"\xbe") == [(b"c", b"d")]


BOMB = """
import tracemalloc
from epp.wire.http2.hpack import Decoder
decoder = Decoder(table_bytes_max=4096, list_bytes_max=16_384)
decoder.decode(b"\\x40\\x01a\\x7f\\xc1\\x1e" + b"b" * 4_032)  # one field that fills the table
bomb = b"\\xbe" * 32_000
tracemalloc.start()
assert decoder.decode(bomb) is None
print(tracemalloc.get_traced_memory()[1])
"""


def test_a_bomb_of_references_costs_no_memory() -> None:
    """32 KB that mean a header list of 130 MB; alone in a process, so that nobody else allocates
    while it is measured."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BOMB], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 10_000


def test_what_we_encode_needs_no_table() -> None:
    fields = [
        (b":status", b"200"),
        (b":status", b"999"),
        (b"content-type", b"application/grpc"),
        (b"grpc-message", b"x" * 127),
        (b"x" * 127, b"y" * 1_000),
        (b"empty", b""),
    ]
    theirs = reference.Decoder()
    for _ in range(2):
        assert [tuple(f) for f in theirs.decode(encode(fields), raw=True)] == fields
    assert not theirs.header_table.dynamic_entries
    assert decoder().decode(encode(fields)) == fields


def test_every_symbol_survives_huffman() -> None:
    from hpack.huffman import HuffmanEncoder
    from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    for symbol in range(256):
        for text in (bytes((symbol,)), bytes((symbol, 97)), bytes((97, symbol, symbol))):
            assert decode_huffman(encoder.encode(text)) == text
    assert decode_huffman(b"") == b""
