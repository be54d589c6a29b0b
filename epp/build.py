"""How this installation was built."""

from __future__ import annotations

from importlib.util import find_spec


def compiled() -> bool:
    """Whether the modules that run for each message are compiled (setup.py) or interpreted."""
    spec = find_spec("epp.wire.stream")
    return spec is not None and not (spec.origin or "").endswith(".py")
