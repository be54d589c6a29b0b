"""The tables of RFC 7541: static header fields (appendix A) and the Huffman code (appendix B).

The Huffman code is canonical: codes of one length are consecutive in the order of their symbols,
and the first code of a length follows the last one of the shorter length. So the lengths say it
all, and the codes are counted up from them.

`HUFFMAN_STEPS` is the decoder as a table: a state is a node of the code's tree, and each step
takes four bits. No code is shorter than five bits, so a step ends at most one symbol.
"""

from __future__ import annotations

STATIC_TABLE: tuple[tuple[bytes, bytes], ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
"""Index 1 is the first."""

EOS = 256
"""The symbol that is only ever seen as padding."""

HUFFMAN_SYMBOLS: dict[int, list[int]] = {
    5: [48, 49, 50, 97, 99, 101, 105, 111, 115, 116],
    6: [
        32,
        37,
        45,
        46,
        47,
        51,
        52,
        53,
        54,
        55,
        56,
        57,
        61,
        65,
        95,
        98,
        100,
        102,
        103,
        104,
        108,
        109,
        110,
        112,
        114,
        117,
    ],
    7: [
        58,
        66,
        67,
        68,
        69,
        70,
        71,
        72,
        73,
        74,
        75,
        76,
        77,
        78,
        79,
        80,
        81,
        82,
        83,
        84,
        85,
        86,
        87,
        89,
        106,
        107,
        113,
        118,
        119,
        120,
        121,
        122,
    ],
    8: [38, 42, 44, 59, 88, 90],
    10: [33, 34, 40, 41, 63],
    11: [39, 43, 124],
    12: [35, 62],
    13: [0, 36, 64, 91, 93, 126],
    14: [94, 125],
    15: [60, 96, 123],
    19: [92, 195, 208],
    20: [128, 130, 131, 162, 184, 194, 224, 226],
    21: [153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230],
    22: [
        129,
        132,
        133,
        134,
        136,
        146,
        154,
        156,
        160,
        163,
        164,
        169,
        170,
        173,
        178,
        181,
        185,
        186,
        187,
        189,
        190,
        196,
        198,
        228,
        232,
        233,
    ],
    23: [
        1,
        135,
        137,
        138,
        139,
        140,
        141,
        143,
        147,
        149,
        150,
        151,
        152,
        155,
        157,
        158,
        165,
        166,
        168,
        174,
        175,
        180,
        182,
        183,
        188,
        191,
        197,
        231,
        239,
    ],
    24: [9, 142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237],
    25: [199, 207, 234, 235],
    26: [192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255],
    27: [
        203,
        204,
        211,
        212,
        214,
        221,
        222,
        223,
        241,
        244,
        245,
        246,
        247,
        248,
        250,
        251,
        252,
        253,
        254,
    ],
    28: [
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        11,
        12,
        14,
        15,
        16,
        17,
        18,
        19,
        20,
        21,
        23,
        24,
        25,
        26,
        27,
        28,
        29,
        30,
        31,
        127,
        220,
        249,
    ],
    30: [10, 13, 22, 256],
}
"""Code length in bits -> symbols, in the order of their codes."""

Step = tuple[int, bytes]
"""Next state, -1 for an invalid code, and what was decoded."""


def huffman_codes() -> list[tuple[int, int]]:
    """Code and its length in bits, by symbol."""
    codes = [(0, 0)] * (EOS + 1)
    code = bits_before = 0
    for bits, symbols in HUFFMAN_SYMBOLS.items():
        code <<= bits - bits_before
        bits_before = bits
        for symbol in symbols:
            codes[symbol] = (code, bits)
            code += 1
    return codes


def _tree() -> tuple[list[list[int]], frozenset[int]]:
    """Nodes as pairs of children, and the nodes at which a string may end.

    A child >= 0 is a node, a negative one is the symbol `-1 - child`. A string ends at the root or
    after fewer than eight bits of padding, which are the first bits of EOS: ones.
    """
    nodes = [[0, 0]]
    for symbol, (code, bits) in enumerate(huffman_codes()):
        node = 0
        for shift in range(bits - 1, 0, -1):
            bit = code >> shift & 1
            if not nodes[node][bit]:
                nodes.append([0, 0])
                nodes[node][bit] = len(nodes) - 1
            node = nodes[node][bit]
        nodes[node][code & 1] = -1 - symbol
    padding = [0]
    while len(padding) < 8:
        padding.append(nodes[padding[-1]][1])
    return nodes, frozenset(padding)


def _step(nodes: list[list[int]], state: int, nibble: int) -> Step:
    decoded = b""
    for shift in (3, 2, 1, 0):
        state = nodes[state][nibble >> shift & 1]
        if state == -1 - EOS:
            return -1, b""
        if state < 0:
            decoded, state = bytes((-1 - state,)), 0
    return state, decoded


_NODES, HUFFMAN_ENDS = _tree()
HUFFMAN_STEPS: list[tuple[Step, ...]] = [
    tuple(_step(_NODES, state, nibble) for nibble in range(16)) for state in range(len(_NODES))
]
