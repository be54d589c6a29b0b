"""Filters by the role an endpoint has where prefill, decode and encoding run apart."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from epp.core.model import Endpoint, Plugin, Reads, Request

ROLE_LABEL = "llm-d.ai/role"
DECODES = frozenset({"decode", "prefill-decode", "both", "encode-prefill-decode"})
PREFILLS = frozenset(
    {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}
)
ENCODES = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


class DecodeFilter(Plugin, frozen=True):
    """Keep the endpoints that decode; one without a role does everything.

    Reads: label `llm-d.ai/role`.
    Source: llm-d `decode-filter`.
    """

    reads: ClassVar[Reads] = Reads.LABELS

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [e for e in endpoints if e.labels.get(ROLE_LABEL, "both") in DECODES]


class PrefillFilter(Plugin, frozen=True):
    """Keep the endpoints that prefill; their role has to say so.

    Reads: label `llm-d.ai/role`.
    Source: llm-d `prefill-filter`.
    """

    reads: ClassVar[Reads] = Reads.LABELS

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [e for e in endpoints if e.labels.get(ROLE_LABEL) in PREFILLS]


class EncodeFilter(Plugin, frozen=True):
    """Keep the endpoints that encode images, sound and video; their role has to say so.

    Reads: label `llm-d.ai/role`.
    Source: llm-d `encode-filter`.
    """

    reads: ClassVar[Reads] = Reads.LABELS

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [e for e in endpoints if e.labels.get(ROLE_LABEL) in ENCODES]
