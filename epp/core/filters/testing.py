"""The filter that conformance tests steer the pick with; not for production profiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from epp.core.addresses import keep_subset
from epp.core.model import Endpoint, Plugin, Reads, Request

TEST_HEADER = "test-epp-endpoint-selection"


class HeaderBasedTestingFilter(Plugin, frozen=True):
    """Keep the endpoints that the request itself names in its header `test-epp-endpoint-selection`.

    The header is a comma-separated list of hosts or host:port. Without it, or when it is empty, no
    endpoint is kept, so that a conformance test cannot pass by luck.

    Reads: `Request.headers`.
    Source: llm-d `header-based-testing-filter`; there IPv4 only.
    """

    reads: ClassVar[Reads] = Reads.REQUEST

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return keep_subset(request.headers.get(TEST_HEADER, "").split(","), endpoints)
