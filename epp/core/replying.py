"""The replies that carry a pick and a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epp.core.headers import NOT_FOR_UPSTREAM, SERVED_VERIFIER
from epp.core.messages import (
    NO_MUTATION,
    HeadersReply,
    Mutation,
    Reply,
    StreamedBodyReply,
    TrailersReply,
)
from epp.core.model import Pick
from epp.core.params import ExchangeParams


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


def served_by(served: str | None, params: ExchangeParams) -> Mutation:
    """What the client is told of the endpoint that the gateway says it used."""
    if not params.verify_served:
        return NO_MUTATION
    text = served or "fail: the gateway did not say which endpoint served"
    return Mutation(set_headers=((SERVED_VERIFIER, text),))


def forwarded(
    mutation: Mutation, body: bytes, *, trailers: bool, params: ExchangeParams
) -> Sequence[Reply]:
    """A request with a streamed body, sent on as it came: headers with the pick, body, trailers."""
    if not trailers:
        return [HeadersReply(True, mutation), *pieces(True, body, True, params)]
    sent_on = pieces(True, body, False, params) if body else ()
    return [HeadersReply(True, mutation.marked_for_trailers()), *sent_on, TrailersReply(True)]


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
