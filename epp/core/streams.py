"""The seam between a transport and one ext_proc stream: bytes of whole messages, synchronous.

A transport (`edge.http2`, `edge.grpcio`) makes one `Stream` per gRPC stream through a
`StreamFactory`, hands it each received message and tells it once that the stream is over. The
stream answers through its `Transport`, at once or later (a queued request is answered from another
event's callback), so the transport keeps no task waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from epp.core.structs import Frozen


class Called(Frozen, frozen=True):
    """What a gateway says of a gRPC call as it opens it."""

    authority: str = ""
    """`:authority`; empty where the transport does not tell it."""
    pool: str = ""
    """gRPC metadata `x-llm-d-inference-pool`; empty = none."""


NOT_SAID: Final = Called()


class Transport(Protocol):
    """One gRPC stream's sending half. Callable on the event loop only, any time; after the end both
    do nothing."""

    @property
    def called(self) -> Called:
        """What the gateway said as it opened the stream."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send these serialized `ProcessingResponse` messages, in this order, together. Never
        blocks, never raises."""

    def finish(self, status: int = 0, message: str = "") -> None:
        """End the stream after what was sent: gRPC status code and message (trailers)."""


class Stream(Protocol):
    """One gRPC stream's receiving half, implemented by `wire.stream`."""

    def on_message(self, data: bytes) -> None:
        """One serialized `ProcessingRequest`. Never raises."""

    def on_close(self) -> None:
        """The stream is over: half-closed, reset or lost. Called exactly once, also after `finish`;
        never raises."""


StreamFactory = Callable[[Transport], Stream]
