"""The scorer over the context lengths an endpoint is meant for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from epp.core.filters.context_length import (
    CONTEXT_LENGTH_LABEL,
    LabelName,
    context_range,
)
from epp.core.model import Endpoint, Plugin, Reads, Request

NO_LABEL, MALFORMED = 0.5, 0.0
OUTSIDE_MAX = 0.3
"""Bound of a score outside the range and the least inside it, so that inside always wins."""
WIDTH_SCALE_TOKENS = 10_000
DISTANCE_SCALE_TOKENS = 1_000


class ContextLengthAware(Plugin, frozen=True):
    """Prefer endpoints meant for contexts as long as the prompt; with `enableFiltering` the others
    are not even considered.

    An endpoint says with a label which lengths it is meant for, `min-max` in tokens. As a filter it
    keeps the endpoints whose range holds the prompt's length and those without a range; one whose
    range is malformed is dropped. A prompt that was not read has 0 tokens.

    Reads: `Endpoint.labels`; `Request.prompt_tokens`.
    Returns: above 0.3 up to 1 inside the range, more for a narrow range and for room above the
        prompt; below 0.3 outside, less with the distance; 0.5 without the label; 0 for a malformed
        range.
    Cost: 10 us with a few different ranges, 90 us with 64; the same again for the filter.
    Source: llm-d `context-length-aware`, same formula.
    """

    reads: ClassVar[Reads] = Reads.REQUEST

    label: LabelName = CONTEXT_LENGTH_LABEL
    """Label with the range, as `min-max` in tokens, both included."""
    enable_filtering: bool = False
    """Whether it filters too."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        tokens, texts = request.prompt_tokens, [e.labels.get(self.label) for e in endpoints]
        score = {text: _score(text, tokens) for text in set(texts)}
        return [score[text] for text in texts]


def _score(label: str | None, tokens: int) -> float:
    if label is None:
        return NO_LABEL
    span = context_range(label)
    if span is None:
        return MALFORMED
    low, high = span
    if not low <= tokens <= high:
        distance = low - tokens if tokens < low else tokens - high
        return OUTSIDE_MAX / (1.0 + distance / DISTANCE_SCALE_TOKENS)
    width = high - low
    if width == 0:
        return 1.0
    narrowness = 1.0 / (1.0 + width / WIDTH_SCALE_TOKENS)
    room = (high - tokens) / width
    return OUTSIDE_MAX + (1.0 - OUTSIDE_MAX) * (0.7 * narrowness + 0.3 * room)
