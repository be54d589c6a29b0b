"""The scorer that lets a request name the kind of endpoint it prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from epp.core.model import Endpoint, Plugin, Reads, Request

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class HeaderLabelAffinityScorer(Plugin, frozen=True):
    """Prefer endpoints whose label has the value of a request header.

    Reads: `Request.headers`; `Endpoint.labels`.
    Returns: 1 where they are equal, 0 elsewhere and for a request without the header.
    Cost: 3 us.
    Source: llm-d `header-label-affinity-scorer`, same rules.
    """

    reads: ClassVar[Reads] = Reads.REQUEST

    header_name: NonEmpty
    """Header of the request, in any case."""
    label_key: NonEmpty
    """Label of the endpoint; compared exactly."""

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        wanted, label = request.headers.get(self.header_name.lower()), self.label_key
        if not wanted:
            return [0.0] * len(endpoints)
        return [1.0 if e.labels.get(label) == wanted else 0.0 for e in endpoints]
