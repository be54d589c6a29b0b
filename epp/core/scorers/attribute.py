"""The scorer over custom metrics, which `engineConfigs[].customMetrics` names attributes."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf, isfinite
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

AttributeKey = Annotated[str, msgspec.Meta(min_length=1)]


class Direction(StrEnum):
    """Which end of the range is good."""

    LOWER = "linear_lower_is_better"
    HIGHER = "linear_higher_is_better"


class FixedRange(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A range that does not depend on the endpoints, for a metric with known bounds."""

    min: float
    """Its lower end; less counts as this."""
    max: float
    """Its upper end, above `min`; more counts as this."""

    def __post_init__(self) -> None:
        if not 0.0 < self.max / 2 - self.min / 2 < inf:
            raise ValueError(
                f"`min` is {self.min:g} and `max` {self.max:g}: set `max` well above `min`"
            )


class AdaptiveRange(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The range that the candidates' own values span."""


class Normalization(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which range the scores are spread over; nothing = the adaptive one."""

    fixed_range: FixedRange | None = None
    """The same range for every pool."""
    adaptive_range: AdaptiveRange | None = None
    """The range of the candidates' values: `{}`."""

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("`fixedRange` and `adaptiveRange` exclude each other: keep one")


class ScorerAlgorithm(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How a value becomes a score."""

    type: Direction
    """Whether a low or a high value is good."""
    normalization: Normalization = Normalization()
    """Which range the scores are spread over."""


class EndpointAttributeScorer(Plugin, frozen=True):
    """Prefer endpoints with a low, or a high, value of one attribute.

    Reads: `Load.attributes`.
    Returns: the value's place in the range, 0..1, from the bad end to the good one; with the
        adaptive range 1 for all that report when their values are equal. 0 for an endpoint that
        does not report the attribute: it cannot be better than the worst.
    Cost: 34 us, kept between scrapes.
    Source: llm-d `endpoint-attribute-scorer`, same formula. What is no finite number counts as
        missing here.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    attribute_key: AttributeKey
    """Name of the attribute, the `attributeKey` of a custom metric."""
    algorithm: ScorerAlgorithm
    """How its value becomes a score."""
    producer: str = ""
    """Producer of the attribute; empty = the only one there is."""

    def __post_init__(self) -> None:
        if "/" in self.attribute_key:
            raise ValueError(
                f"`attributeKey` is '{self.attribute_key}': write the part after `/` as `producer`"
            )

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        key, fixed = self.attribute_key, self.algorithm.normalization.fixed_range
        values = [e.load.attributes.get(key) for e in endpoints]
        known = [v for v in values if v is not None and isfinite(v)]
        if not known:
            return [0.0] * len(values)
        low, high = (min(known), max(known)) if fixed is None else (fixed.min, fixed.max)
        low, width = low / 2, high / 2 - low / 2  # halves, for the difference may not exist
        if width == 0.0:
            place = dict.fromkeys(known, 1.0)
        elif self.algorithm.type is Direction.HIGHER:
            place = {v: min(1.0, max(0.0, (v / 2 - low) / width)) for v in known}
        else:
            place = {v: 1.0 - min(1.0, max(0.0, (v / 2 - low) / width)) for v in known}
        return [0.0 if v is None else place.get(v, 0.0) for v in values]
