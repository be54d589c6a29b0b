"""NVIDIA Dynamo's own code as a peer in the same run: an optional dependency, imported late."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

NEEDED_VERSION = "1.6.1"
"""Of ai-dynamo-runtime; others may name things differently."""


class DynamoMissingError(Exception):
    """The optional dependency is not installed."""


def dynamo_core() -> ModuleType:
    """Dynamo's compiled module. Raises: DynamoMissingError, with the remedy."""
    os.environ.setdefault("DYN_LOG", "error")  # or it writes a line per pick
    try:
        return import_module("dynamo._core")
    except ImportError as error:
        raise DynamoMissingError(
            f"NVIDIA Dynamo is not installed ({error}). This comparison needs the optional extra"
            f" `dynamo`: pip install ai-dynamo-runtime=={NEEDED_VERSION} pyzmq"
        ) from error
