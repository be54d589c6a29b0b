"""Which endpoint holds which blocks of KV cache, exactly: what the engines say, folded.

`index` has the whole picture.
"""

from epp.core.kvindex.folding import Joined
from epp.core.kvindex.index import WEIGHTS, KvIndex
from epp.core.kvindex.keys import key_of, keys_of, pack_tokens, root_of
from epp.core.kvindex.ranks import MEDIUMS

__all__ = [
    "MEDIUMS",
    "WEIGHTS",
    "Joined",
    "KvIndex",
    "key_of",
    "keys_of",
    "pack_tokens",
    "root_of",
]
