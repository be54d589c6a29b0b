"""Filters by endpoint label, as Kubernetes selects objects; their result is kept per membership."""

# ruff: noqa: ARG002 - every plugin of a kind takes the same arguments, used or not

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

LabelName = Annotated[str, msgspec.Meta(min_length=1)]


class Operator(StrEnum):
    """How a requirement compares; Kubernetes' words."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One line of `matchExpressions`."""

    key: LabelName
    """Label name."""
    operator: Operator
    """`In` and `NotIn` compare with `values`; an absent label satisfies `NotIn` and
    `DoesNotExist`."""
    values: tuple[str, ...] = ()
    """At least one for `In` and `NotIn`, none for the others."""

    def __post_init__(self) -> None:
        compares = self.operator in (Operator.IN, Operator.NOT_IN)
        if compares != bool(self.values):
            rule = "needs at least one of `values`" if compares else "takes no `values`"
            raise ValueError(f"operator {self.operator} of label '{self.key}' {rule}")

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether an endpoint with these labels satisfies it."""
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelectorFilter(Plugin, frozen=True):
    """Keep the endpoints whose labels satisfy every requirement; with none given, all.

    Reads: `Endpoint.labels`.
    Source: llm-d `label-selector-filter`; the parameters are a Kubernetes LabelSelector.
    """

    reads: ClassVar[Reads] = Reads.LABELS

    match_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Label name -> the value it must have."""
    match_expressions: tuple[LabelRequirement, ...] = ()
    """Further requirements; all must hold."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        wanted = self.match_labels.items()
        return [
            e
            for e in endpoints
            if wanted <= e.labels.items() and all(r.holds(e.labels) for r in self.match_expressions)
        ]


class ByLabel(Plugin, frozen=True):
    """Keep the endpoints whose one label has one of some values.

    Reads: `Endpoint.labels`.
    Source: llm-d `by-label`, deprecated there for `label-selector-filter` since 0.9.
    """

    reads: ClassVar[Reads] = Reads.LABELS

    label: LabelName
    """Label name."""
    valid_values: tuple[str, ...] = ()
    """Values that pass."""
    allows_no_label: bool = False
    """Whether an endpoint without the label passes."""

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("`validValues` is empty and `allowsNoLabel` is false: nothing passes")

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        label, values, absent = self.label, self.valid_values, self.allows_no_label
        return [
            e for e in endpoints if (absent if (v := e.labels.get(label)) is None else v in values)
        ]
