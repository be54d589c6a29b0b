"""The context lengths an endpoint is meant for, by its label, and the filter that keeps to them.

Endpoints of one pool may be set up for short or for long contexts; a label `min-max` in tokens says
which. The scorer of the same type is in `epp.core.scorers.context_length`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

LabelName = Annotated[str, msgspec.Meta(min_length=1)]
CONTEXT_LENGTH_LABEL = "llm-d.ai/context-length-range"
# 18 digits fit the 64 bits that the reference reads; more are as malformed here as there.
_RANGE = re.compile(r"\s*\+?([0-9]{1,18})\s*-\s*\+?([0-9]{1,18})\s*")


class ContextRange(NamedTuple):
    """Tokens a context may have, both ends included; 0 <= `low` <= `high`."""

    low: int
    high: int


def context_range(label: str) -> ContextRange | None:
    """The range a label's value says; `None` when it is malformed or upside down."""
    if (match := _RANGE.fullmatch(label)) is None:
        return None
    low, high = int(match[1]), int(match[2])
    return ContextRange(low, high) if low <= high else None


class ContextLengthAware(Plugin, frozen=True):
    """Keep the endpoints whose range holds the prompt's length, and those without a range.

    An endpoint whose range is malformed is not kept. A prompt that was not read has 0 tokens.

    Reads: `Endpoint.labels`; `Request.prompt_tokens`.
    Cost: 10 us with a few different ranges, 80 us with 64.
    Source: llm-d `context-length-aware` as a filter, same rules.
    """

    reads: ClassVar[Reads] = Reads.REQUEST

    label: LabelName = CONTEXT_LENGTH_LABEL
    """Label with the range, as `min-max` in tokens."""
    enable_filtering: bool = False
    """Whether to filter at all."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if not self.enable_filtering:
            return endpoints
        tokens, texts = request.prompt_tokens, [e.labels.get(self.label) for e in endpoints]
        passes = {text: text is None or _holds(text, tokens) for text in set(texts)}
        return [e for e, text in zip(endpoints, texts, strict=True) if passes[text]]


def _holds(label: str, tokens: int) -> bool:
    span = context_range(label)
    return span is not None and span.low <= tokens <= span.high
