"""Structs back to the plain values that the file holds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from epp.config.units import MetricSpec, Quantity, Seconds


def plain(value: Any) -> Any:
    """Dicts, lists and scalars that read back as `value`; keys that are empty by default, and are,
    are left out."""
    if isinstance(value, Seconds | Quantity | MetricSpec):
        return value.written()
    if isinstance(value, msgspec.Struct):
        return {
            field.encode_name: plain(item)
            for field in msgspec.structs.fields(value)
            if not _is_unset(item := getattr(value, field.name), field)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _is_unset(item: Any, field: msgspec.structs.FieldInfo) -> bool:
    empty = item is None or item == "" or (isinstance(item, tuple | Mapping) and not item)
    if not empty or field.required:
        return False
    factory = field.default_factory
    return bool(item == (field.default if factory is msgspec.NODEFAULT else factory()))
