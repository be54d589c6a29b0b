"""The Endpoint Picker Protocol's keys in Envoy's dynamic metadata: which endpoints are allowed,
who served and which pool is meant (read), which one was picked and why (written).

Metadata is `map<string, google.protobuf.Struct>` by namespace. Both readers walk
namespace -> key -> value by joining the bytes of what repeats, which is protobuf's merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from struct import pack
from typing import Final

from epp.wire.protobuf import delimited, fields

SUBSET_NAMESPACE: Final = b"envoy.lb.subset_hint"
SUBSET_KEY: Final = b"x-gateway-destination-endpoint-subset"
LB_NAMESPACE: Final = b"envoy.lb"
SERVED_KEY: Final = b"x-gateway-destination-endpoint-served"
POOL_KEY: Final = b"x-gateway-inference-pool"
DESTINATION_KEY: Final = b"x-gateway-destination-endpoint"
SCORES_KEY: Final = b"x-gateway-destination-endpoint-scores"

_ANY_KEY_WE_READ: Final = b"x-gateway-destination-endpoint-s"
"""Two of the three keys we read start so; without these bytes neither can be there."""

_CACHED_BYTES_MAX: Final = 1024
"""Longest metadata worth remembering; bounds the cache at about 1 MiB."""

# Metadata.filter_metadata, Struct.fields, ListValue.values
_ENTRIES: Final = 0x0A
# of a map's entry
_KEY: Final = 0x0A
_VALUE: Final = 0x12
# of google.protobuf.Value, a oneof
_NUMBER: Final = 0x11
_STRING: Final = 0x1A
_STRUCT: Final = 0x2A
_LIST: Final = 0x32
_VALUE_TAGS: Final = frozenset({0x08, _NUMBER, _STRING, 0x20, _STRUCT, _LIST})

_Value = tuple[int, bytes]
"""Tag of the oneof's member (0 = none set) and its content."""


Said = tuple[tuple[str, ...] | None, str | None, str | None]
"""Subset, who served, name of the pool."""


def read_metadata(content: bytes) -> Said:
    """Find the allowed subset, the endpoint that served and the pool in a serialized `Metadata`.

    Metadata that holds none of these keys is not looked into.

    Returns: the subset, `None` when its key is absent, `()` when it is there and names nothing or
        has no usable type; the served address and the pool, `None` when absent, empty or no string.
    Raises: WireError or IndexError when malformed on the way to a key.
    """
    if _ANY_KEY_WE_READ not in content and POOL_KEY not in content:
        return None, None, None
    return _read_cached(content) if len(content) <= _CACHED_BYTES_MAX else _read(content)


def _read(content: bytes) -> Said:
    subset = _value_at(content, SUBSET_NAMESPACE, SUBSET_KEY)
    return (
        None if subset is None else _addresses(subset),
        _string_at(content, LB_NAMESPACE, SERVED_KEY),
        _string_at(content, LB_NAMESPACE, POOL_KEY),
    )


_read_cached: Final = lru_cache(maxsize=1024)(_read)


def _string_at(content: bytes, namespace: bytes, key: bytes) -> str | None:
    kind, text = _value_at(content, namespace, key) or (0, b"")
    return (_text(text) or None) if kind == _STRING else None


def _value_at(content: bytes, namespace: bytes, key: bytes) -> _Value | None:
    struct = _map_value(content, namespace)
    value = None if struct is None else _map_value(struct, key)
    return None if value is None else _member(value)


def _map_value(content: bytes, wanted: bytes) -> bytes | None:
    """Value of the last entry of that key; all maps we read are field 1 of their message."""
    found = None
    for _, entry in fields(content, frozenset({_ENTRIES})):
        key, values = b"", []
        for tag, part in fields(entry, frozenset({_KEY, _VALUE})):
            if tag == _KEY:
                key = part
            else:
                values.append(part)
        if key == wanted:
            found = b"".join(values)
    return found


def _member(value: bytes) -> _Value:
    """The member that is set in a `google.protobuf.Value`: the last one; a list or struct that
    comes again right behind itself is merged."""
    kind, parts = 0, [b""]
    for tag, part in fields(value, _VALUE_TAGS):
        if tag != kind or tag not in (_LIST, _STRUCT):
            parts.clear()
        kind = tag
        parts.append(part)
    return kind, b"".join(parts)


def _addresses(value: _Value) -> tuple[str, ...]:
    """Addresses of one comma-joined string, or of a list of such; what is no string names none."""
    kind, content = value
    if kind == _STRING:
        joined = _text(content)
    elif kind == _LIST:
        members = [_member(part) for _, part in fields(content, frozenset({_ENTRIES}))]
        joined = ",".join(_text(text) for member, text in members if member == _STRING)
    else:
        return ()
    return tuple(address for part in joined.split(",") if (address := part.strip()))


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


@lru_cache(maxsize=4096)
def destination_entry(destination: str) -> bytes:
    """Encode the entry of `envoy.lb` that names the pick; one per endpoint (or fallback list)."""
    return _entry(DESTINATION_KEY, delimited(_STRING, destination.encode()))


def scores_entry(scores: Mapping[str, float]) -> bytes:
    """Encode the entry of `envoy.lb` that holds a score by address. Scores that are not finite are
    left out: a Struct is JSON, and gateways log it as such."""
    return _entry(
        SCORES_KEY,
        delimited(
            _STRUCT,
            b"".join(
                _entry(address.encode(), bytes((_NUMBER,)) + pack("<d", score))
                for address, score in scores.items()
                if isfinite(score)
            ),
        ),
    )


def lb_metadata(entries: bytes) -> bytes:
    """Encode the Struct `{"envoy.lb": {entries}}`."""
    return _entry(LB_NAMESPACE, delimited(_STRUCT, entries))


def _entry(key: bytes, value: bytes) -> bytes:
    return delimited(_ENTRIES, delimited(_KEY, key) + delimited(_VALUE, value))
