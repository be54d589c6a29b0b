"""The replies that carry a pick and a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epp.core.directing import Edit
from epp.core.headers import NOT_FOR_UPSTREAM, SERVED_VERIFIER
from epp.core.messages import (
    NO_MUTATION,
    BodyMode,
    BodyReply,
    HeadersReply,
    Mutation,
    Reply,
    RequestBody,
    RequestTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from epp.core.model import Pick
from epp.core.params import ExchangeParams
from epp.core.phases import BUFFERED, DUPLEX


def routed_to(pick: Pick, headers: Mapping[str, str], params: ExchangeParams) -> Mutation:
    """What the gateway is told of a pick, for a request with these headers."""
    scores = None
    if params.emit_scores:
        scores = {e.address: t for e, t in zip(pick.candidates, pick.scores, strict=True)}
    return Mutation(
        destination=pick.destination,
        remove_headers=tuple(filter(NOT_FOR_UPSTREAM.__contains__, headers)),
        scores=scores,
        clear_route_cache=True,
    )


def served_by(
    served: str | None, mode: BodyMode, changes_length: bool, params: ExchangeParams
) -> Mutation:
    """What becomes of an answer's headers.

    Args:
        served: the endpoint that the gateway says it used; the client is told if it is to be.
        mode: how the gateway shows the body.
        changes_length: the body that goes on may have another length.
    """
    told = NO_MUTATION
    if params.verify_served:
        text = served or "fail: the gateway did not say which endpoint served"
        told = Mutation(set_headers=((SERVED_VERIFIER, text),))
    # Of a body that is buffered the length is set with the body.
    return told.without("content-length") if changes_length and mode not in BUFFERED else told


def forwarded(
    mutation: Mutation, body: bytes, *, trailers: bool, params: ExchangeParams
) -> Sequence[Reply]:
    """A request with a streamed body, sent on as it came: headers with the pick, body, trailers."""
    if not trailers:
        return [HeadersReply(True, mutation), *pieces(True, body, True, params)]
    sent_on = pieces(True, body, False, params) if body else ()
    return [HeadersReply(True, mutation.marked_for_trailers()), *sent_on, TrailersReply(True)]


def buffered(mutation: Mutation, edit: Edit | None) -> Reply:
    """A request whose body the gateway holds, sent on with the pick."""
    if edit is None:
        return BodyReply(True, mutation)
    return BodyReply(True, mutation.with_length(len(edit.body)), edit.body)


def sent_on(
    mode: BodyMode, came: bytes, body: bytes, end: bool, params: ExchangeParams
) -> Sequence[Reply]:
    """A piece of an answer, as the gateway's mode of showing it asks for.

    Args:
        came, body: the piece as it came and as it goes on.
        end: it is the last one.
    """
    if mode in DUPLEX:
        return pieces(False, body, end, params) if body or end else ()
    if body is came or body == came:
        return (BodyReply(False),)
    if mode in BUFFERED:
        return (BodyReply(False, NO_MUTATION.with_length(len(body)), body),)
    return (BodyReply(False, body=body),)


def late(
    mode: BodyMode,
    event: RequestBody | RequestTrailers,
    *,
    unread: bool,
    params: ExchangeParams,
) -> Sequence[Reply]:
    """What is due for a part of a request that comes after its pick; empty = nothing.

    Args:
        unread: the pick was made on the headers of a request whose body is only starting (an
            upgrade).
    """
    if isinstance(event, RequestBody):
        if mode is BodyMode.STREAMED:
            return (BodyReply(True),)
        if mode in DUPLEX and unread:
            return pieces(True, event.body, event.end_of_stream, params)
        return ()
    return () if mode in DUPLEX and not unread else (TrailersReply(True),)


def pieces(
    request: bool, body: bytes, end_of_stream: bool, params: ExchangeParams
) -> Sequence[Reply]:
    """A body in pieces that every gateway takes."""
    size = params.chunk_bytes_max
    if len(body) <= size:
        return (StreamedBodyReply(request, body, end_of_stream),)
    return [
        StreamedBodyReply(request, body[i : i + size], end_of_stream and i + size >= len(body))
        for i in range(0, len(body), size)
    ]
