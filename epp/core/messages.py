"""What goes in and out of one ext_proc stream, free of any encoding: events from the gateway,
replies to it.

`wire.extproc` makes events of bytes and bytes of replies; `core.exchange` is the state machine
between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import msgspec

from epp.core.headers import REQUEST_TRAILERS

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class BodyMode(IntEnum):
    """`envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode`, same numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Event(msgspec.Struct, kw_only=True):
    """One `ProcessingRequest`. The metadata fields may come with any message; `None` means the key
    is absent from it."""

    subset: tuple[str, ...] | None = None
    """Addresses the pick must be one of: `envoy.lb.subset_hint` /
    `x-gateway-destination-endpoint-subset`, whatever its shape (list of strings, one comma-joined
    string, list of joined ones), trimmed, empties dropped. `()` = present and empty or unusable:
    nothing is eligible."""
    served: str | None = None
    """Who served it: `envoy.lb` / `x-gateway-destination-endpoint-served`."""
    pool: str | None = None
    """Which pool the request is for: `envoy.lb` / `x-gateway-inference-pool`."""
    modes: tuple[BodyMode, BodyMode] | None = None
    """Request and response body mode (`protocol_config`); comes with the first message only, `None`
    = not announced."""


class RequestHeaders(Event):
    """The client's headers; with `end_of_stream` there is no body."""

    headers: Mapping[str, str]
    """Lower-case names, latin-1 values (`raw_value` preferred when not empty); pseudo headers
    included; last of a repeat."""
    end_of_stream: bool = False


class RequestBody(Event):
    """A piece of the request's body; all of it where the gateway buffers."""

    body: bytes
    end_of_stream: bool = False


class RequestTrailers(Event):
    """The request ended with trailers; what they say is not read."""


class ResponseHeaders(Event):
    """The endpoint's headers, or those of a reply the gateway made itself."""

    headers: Mapping[str, str]
    end_of_stream: bool = False


class ResponseBody(Event):
    """A piece of the response's body; all of it where the gateway buffers."""

    body: bytes
    end_of_stream: bool = False


class ResponseTrailers(Event):
    """The response ended with trailers; what they say is not read."""


class Unsupported(Event):
    """A `ProcessingRequest` whose oneof we do not know (or that has none)."""


class Mutation(msgspec.Struct, frozen=True):
    """Header changes that ride on a headers reply (or, where bodies are buffered, on the body
    reply)."""

    set_headers: tuple[tuple[str, str], ...] = ()
    """Overwritten or added, as `raw_value`, `OVERWRITE_IF_EXISTS_OR_ADD`."""
    remove_headers: tuple[str, ...] = ()
    destination: str | None = None
    """Set as header `x-gateway-destination-endpoint` **and** as dynamic metadata `envoy.lb`, the
    identical string."""
    scores: Mapping[str, float] | None = None
    """Dynamic metadata `envoy.lb` / `x-gateway-destination-endpoint-scores`: address -> score."""
    clear_route_cache: bool = False

    def with_length(self, body_bytes: int) -> Mutation:
        """The same for a buffered body of another length: Envoy takes none that differs from its
        `content-length`."""
        length = (("content-length", str(body_bytes)),)
        return msgspec.structs.replace(self, set_headers=(*self.set_headers, *length))

    def without(self, *names: str) -> Mutation:
        """The same, with these headers removed, too."""
        return msgspec.structs.replace(self, remove_headers=(*self.remove_headers, *names))

    def marked_for_trailers(self) -> Mutation:
        """The same for a request that ends in trailers: the header that tells the gateway's
        routes so, set by us alone."""
        return msgspec.structs.replace(
            self,
            set_headers=(*self.set_headers, (REQUEST_TRAILERS, "true")),
            remove_headers=tuple([h for h in self.remove_headers if h != REQUEST_TRAILERS]),
        )


NO_MUTATION = Mutation()


class Reply(msgspec.Struct, frozen=True):
    """One `ProcessingResponse`."""


class HeadersReply(Reply, frozen=True):
    """Answers `request_headers` (`request=True`) or `response_headers`."""

    request: bool
    mutation: Mutation = NO_MUTATION


class StreamedBodyReply(Reply, frozen=True):
    """A piece of body sent on in full duplex: `body_mutation.streamed_response`."""

    request: bool
    body: bytes
    end_of_stream: bool


class BodyReply(Reply, frozen=True):
    """Answers one body message in the other modes."""

    request: bool
    mutation: Mutation = NO_MUTATION
    body: bytes | None = None
    """What stands in place of the body that came; `None` = it goes on unchanged."""


class TrailersReply(Reply, frozen=True):
    """Answers trailers, unchanged."""

    request: bool
    destination: str | None = None
    """Set as dynamic metadata only, where the headers were answered before the pick was made."""


class ImmediateReply(Reply, frozen=True):
    """Ends the request here: `immediate_response`."""

    status: int
    """HTTP status, 200..599."""
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    details: str = ""
    """Envoy's response code details: short, no spaces, no prompt text."""
