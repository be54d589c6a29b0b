"""The filter over custom metrics, which `engineConfigs[].customMetrics` names attributes."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

AttributeKey = Annotated[str, msgspec.Meta(min_length=1)]


class OnMissing(StrEnum):
    """What becomes of an endpoint without the attribute."""

    PASS = "Pass"  # noqa: S105 - no password
    FAIL = "Fail"


class Comparison(StrEnum):
    """How an attribute compares with the threshold."""

    LESS_THAN = "LessThan"
    LESS_THAN_OR_EQUAL = "LessThanOrEqual"
    GREATER_THAN = "GreaterThan"
    GREATER_THAN_OR_EQUAL = "GreaterThanOrEqual"
    EQUAL = "Equal"
    NOT_EQUAL = "NotEqual"


_HOLDS: Mapping[Comparison, Callable[[float, float], bool]] = {
    Comparison.LESS_THAN: operator.lt,
    Comparison.LESS_THAN_OR_EQUAL: operator.le,
    Comparison.GREATER_THAN: operator.gt,
    Comparison.GREATER_THAN_OR_EQUAL: operator.ge,
    Comparison.EQUAL: operator.eq,
    Comparison.NOT_EQUAL: operator.ne,
}
assert _HOLDS.keys() == set(Comparison)


class Threshold(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A comparison with a fixed value."""

    operator: Comparison
    """The attribute stands on its left, `value` on its right."""
    value: float
    """What the attribute is compared with."""


class FilterAlgorithm(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How endpoints are chosen by the attribute."""

    type: Literal["threshold"]
    """The one there is."""
    threshold: Threshold
    """An endpoint passes where this comparison holds."""


class EndpointAttributeFilter(Plugin, frozen=True):
    """Keep the endpoints whose attribute compares as wanted with a threshold.

    Reads: `Load.attributes`.
    Cost: 5 us, kept between scrapes.
    Source: llm-d `endpoint-attribute-filter`, same rules. A NaN counts as missing here.
    """

    reads: ClassVar[Reads] = Reads.LOAD

    attribute: AttributeKey
    """Name of the attribute, the `attributeKey` of a custom metric."""
    algorithm: FilterAlgorithm
    """How endpoints are chosen by it."""
    on_missing: OnMissing = OnMissing.PASS
    """Whether an endpoint passes that does not report the attribute."""
    fallback_on_empty: bool = False
    """Whether all pass when none would; else such a request is refused."""
    producer: str = ""
    """Producer of the attribute; empty = the only one there is."""

    def __post_init__(self) -> None:
        if "/" in self.attribute:
            raise ValueError(
                f"`attribute` is '{self.attribute}': write the part after `/` as `producer`"
            )

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        key, missing_passes = self.attribute, self.on_missing is OnMissing.PASS
        threshold = self.algorithm.threshold
        holds, bound = _HOLDS[threshold.operator], threshold.value
        kept = [
            e
            for e in endpoints
            if (
                missing_passes
                if (value := e.load.attributes.get(key)) is None or value != value  # NaN
                else holds(value, bound)
            )
        ]
        return kept if kept or not self.fallback_on_empty else endpoints
