"""One ext_proc stream, which is one HTTP request and its response, as a table of phases.

    HEADERS ─headers─▶ BODY ─body complete─▶ DECIDED ─response headers─▶ RESPONSE ─end─▶ DONE
                         └─ no room ─▶ HELD ─┘ let go

`receive` takes one event and returns the replies to send now; `close` may come in any phase. Which
reply is due when is decided by the body modes the gateway announces with its first message:

- request body FULL_DUPLEX_STREAMED: the headers' reply waits for the whole body (or its trailers),
  then come the headers' reply with the pick and the body again, byte for byte, in pieces.
- request body BUFFERED: the headers are answered at once (else the body never comes) and the pick
  rides on the body's reply.
- no request body, or one we cannot wait for (NONE, STREAMED, an HTTP upgrade): the pick is made on
  the headers alone.
- response bodies: sent on in full duplex, acknowledged otherwise; we only read along.

With a hold, a request in full duplex may be kept until the endpoint it wants has room; the answer
is then handed to `answer_later`.

A request that is refused gets one immediate response. The charge taken by the decision is given
back when the response ends or the stream does, whichever comes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from epp.core.bodies import Body
from epp.core.decide import Decider, Decision
from epp.core.errors import DropReason, RequestDropped
from epp.core.flow.hold import Hold, Outcome, Ticket
from epp.core.headers import status_of
from epp.core.messages import (
    NO_MUTATION,
    BodyMode,
    BodyReply,
    Event,
    HeadersReply,
    ImmediateReply,
    Mutation,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    TrailersReply,
)
from epp.core.model import Cause, Request
from epp.core.params import ExchangeParams, Watcher
from epp.core.parse import ParseLimits, parse_request
from epp.core.phases import BUFFERED, DUPLEX, Phase, cannot_wait
from epp.core.refusal import refuse
from epp.core.replying import forwarded, pieces, routed_to, served_by
from epp.core.usage import UsageReader

__all__ = ["Exchange", "ExchangeParams", "Phase", "Watcher"]


class Exchange:
    """State of one stream. Attributes are readable by watchers; only this class writes them."""

    __slots__ = (
        "_body",
        "_decider",
        "_params",
        "_reported",
        "_request_headers",
        "_request_mode",
        "_response_mode",
        "_ticket",
        "_trailers",
        "_unlearned",
        "_usage_reader",
        "_watcher",
        "answer_later",
        "answered_s",
        "cause",
        "decided_s",
        "decision",
        "drop",
        "finished_s",
        "first_byte_s",
        "held_since_s",
        "hold",
        "ignored_messages",
        "last_byte_s",
        "phase",
        "request",
        "response_bytes",
        "response_streaming",
        "served",
        "started_s",
        "status",
        "subset",
        "unsettled",
    )

    def __init__(
        self,
        *,
        decider: Decider,
        params: ExchangeParams,
        watcher: Watcher,
        now_s: float,
        hold: Hold | None = None,
    ) -> None:
        self._decider = decider
        self._params = params
        self._watcher = watcher
        self.hold = hold
        self._ticket: Ticket | None = None
        self._trailers = False
        self.answer_later: Callable[[Callable[[], Sequence[Reply]]], None] | None = None
        """Makes and sends what `receive` did not return; without one, nothing is held."""
        self._body = Body(params.bodies, params.body_bytes_max)
        self._unlearned: Decision | None = None
        self._reported = False
        self._request_headers: Mapping[str, str] = {}
        self._request_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._response_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._usage_reader: UsageReader | None = None
        self.unsettled = False
        """`settle` has something to do."""
        self.phase = Phase.HEADERS
        self.request: Request | None = None
        """What was read of the request; `None` until its body is complete."""
        self.decision: Decision | None = None
        self.drop: RequestDropped | None = None
        self.cause: Cause | None = None
        """`None` while the exchange lives."""
        self.subset: tuple[str, ...] | None = None
        self.served: str | None = None
        """Address the gateway says it used; `None` when it does not say."""
        self.status: int | None = None
        """HTTP status of the answer; `None` when none was seen or it is not a number."""
        self.started_s = now_s
        self.decided_s: float | None = None
        """When the message came that completed the request, or the hold let it go."""
        self.held_since_s: float | None = None
        """`None` = it was never held."""
        self.answered_s: float | None = None
        """When the decision had been handed to the transport; `None` when nobody measured it."""
        self.first_byte_s: float | None = None
        """When the first byte of the response body came by."""
        self.last_byte_s: float | None = None
        self.finished_s: float | None = None
        self.response_bytes = 0
        self.response_streaming = False
        self.ignored_messages = 0
        """Request messages after the request had ended (a second end of stream)."""

    @property
    def body_bytes(self) -> int:
        """Request body bytes received."""
        return self._body.size

    @property
    def usage(self) -> UsageReader | None:
        """What the answer said of its tokens; `None` when it was not read."""
        return self._usage_reader

    def receive(self, event: Event, now_s: float) -> Sequence[Reply]:
        """Take one message in; returns what to answer now, in order."""
        # Any message may carry metadata; what a later one leaves out still holds.
        if event.subset is not None:
            self.subset = event.subset
        if event.served is not None:
            self.served = event.served
        handler = TABLE[self.phase].get(type(event), _ignore)
        try:
            return handler(self, event, now_s)
        except RequestDropped as dropped:
            return self._refuse(dropped, now_s)

    def settle(self, now_s: float | None = None) -> None:
        """Do what may wait until the replies are written: learn, and tell the watcher.

        Args:
            now_s: when they were; `None` = nobody measures it.
        """
        self.unsettled = False
        if self._unlearned is not None:
            decision, self._unlearned = self._unlearned, None
            self.answered_s = now_s
            self._decider.learn(decision)
            # A stream may live for an hour; up to half a megabyte of its prompt need not.
            decision.request.prompts = decision.request.chains = ()
            self._watcher.decided(self)
        if self.cause is not None and not self._reported:
            self._reported = True
            self._watcher.finished(self)

    def close(self, now_s: float) -> None:
        """The stream is over. Gives everything back; a second call changes nothing."""
        if self.cause is None:
            unseen = self._response_mode is BodyMode.NONE and self.phase is Phase.RESPONSE
            self._finish(Cause.NATURAL if unseen else Cause.CLIENT_DISCONNECT, now_s)
        self.settle()

    def fail(self, now_s: float) -> ImmediateReply:
        """A bug of ours broke this exchange: give everything back, tell the client so."""
        self.drop = RequestDropped(DropReason.INTERNAL)
        self._finish(Cause.ERROR, now_s)
        return refuse(self.drop)

    # -- request ---------------------------------------------------------------------------

    def _on_request_headers(self, event: RequestHeaders, now_s: float) -> Sequence[Reply]:
        self._request_headers = event.headers
        if event.modes is not None:
            self._request_mode, self._response_mode = event.modes
        mode = self._request_mode
        if event.end_of_stream or cannot_wait(mode, event.headers):
            mutation = self._decide(parse_request(event.headers, None, limits=self._limits), now_s)
            return (HeadersReply(True, mutation),)
        self.phase = Phase.BODY
        if mode in BUFFERED:
            return (HeadersReply(True),)
        return ()

    @property
    def _limits(self) -> ParseLimits:
        return self._params.parse_limits

    def _on_headerless_request(self, _event: Event, _now_s: float) -> Sequence[Reply]:
        raise RequestDropped(
            DropReason.INTERNAL,
            "the gateway sends no request headers to the picker: set request_header_mode to SEND",
        )

    def _on_request_body(self, event: RequestBody, now_s: float) -> Sequence[Reply]:
        self._body.add(event.body)
        if self._request_mode in BUFFERED:
            return (BodyReply(True, self._decide_on_body(self._body.take(), now_s)),)
        if event.end_of_stream:
            return self._send_on(now_s)
        return ()

    def _on_request_trailers(self, _event: RequestTrailers, now_s: float) -> Sequence[Reply]:
        # Trailers end the body: the last body message had no end of stream.
        if self._request_mode in BUFFERED:
            # No body came. The headers are gone, metadata still reaches the load balancer.
            mutation = self._decide_on_body(b"", now_s)
            return (TrailersReply(True, destination=mutation.destination),)
        self._trailers = True
        return self._send_on(now_s)

    def _send_on(self, now_s: float) -> Sequence[Reply]:
        """The request is complete: decide and answer, or hold it."""
        request = self._read(self._body.whole())
        if self.hold is None or self.answer_later is None:
            return self._forward(self._decide(request, now_s))
        self.request = request
        offered = self.hold.offer(
            request,
            subset=self.subset if self._params.use_subset else None,
            now_s=now_s,
            deliver=self._let_go,
            first_byte_seen=self._first_byte_seen(request),
        )
        if isinstance(offered, Ticket):
            self._ticket = offered
            self.held_since_s = now_s
            self.phase = Phase.HELD
            return ()
        return self._forward(self._note(offered, now_s))

    def _forward(self, mutation: Mutation) -> Sequence[Reply]:
        return forwarded(mutation, self._body.take(), trailers=self._trailers, params=self._params)

    def _let_go(self, outcome: Outcome, now_s: float) -> None:
        """The hold is done with this request (`Deliver`)."""
        self._ticket = None
        assert self.answer_later is not None
        self.answer_later(lambda: self._tell(outcome, now_s))

    def _tell(self, outcome: Outcome, now_s: float) -> Sequence[Reply]:
        if outcome.decision is not None:
            return self._forward(self._note(outcome.decision, now_s))
        if isinstance(outcome.dropped, RequestDropped):
            return self._refuse(outcome.dropped, now_s)
        raise outcome.dropped

    def _withdraw(self) -> None:
        if self.hold is not None and self._ticket is not None:
            self.hold.withdraw(self._ticket)
            self._ticket = None

    # -- decision --------------------------------------------------------------------------

    def _decide_on_body(self, body: bytes, now_s: float) -> Mutation:
        return self._decide(self._read(body), now_s)

    def _read(self, body: bytes) -> Request:
        partial = self._request_mode is BodyMode.BUFFERED_PARTIAL
        try:
            return parse_request(self._request_headers, body, limits=self._limits)
        except RequestDropped:
            if not partial:
                raise
            # The gateway may have cut the body off: what cannot be read is routed by load.
            return parse_request(self._request_headers, None, limits=self._limits)

    def _first_byte_seen(self, request: Request) -> bool:
        return request.stream and self._response_mode is not BodyMode.NONE

    def _decide(self, request: Request, now_s: float) -> Mutation:
        self.request = request
        decision = self._decider.decide(
            request,
            subset=self.subset if self._params.use_subset else None,
            now_s=now_s,
            first_byte_seen=self._first_byte_seen(request),
        )
        return self._note(decision, now_s)

    def _note(self, decision: Decision, now_s: float) -> Mutation:
        """The decision is made: what the gateway is told."""
        self.decision = decision
        self.decided_s = now_s
        self.phase = Phase.DECIDED
        self._unlearned = decision
        self.unsettled = True
        return routed_to(decision.pick, self._request_headers, self._params)

    def _refuse(self, dropped: RequestDropped, now_s: float) -> Sequence[Reply]:
        self.drop = dropped
        self._finish(Cause.DROPPED, now_s)
        return (refuse(dropped),)

    # -- after the decision ----------------------------------------------------------------

    def _on_late_request_body(self, event: RequestBody, now_s: float) -> Sequence[Reply]:
        mode = self._request_mode
        if mode is BodyMode.STREAMED:
            return (BodyReply(True),)
        if mode in DUPLEX and self._streams_unread():
            return pieces(True, event.body, event.end_of_stream, self._params)
        return self._ignore(event, now_s)

    def _on_late_request_trailers(self, event: RequestTrailers, now_s: float) -> Sequence[Reply]:
        if self._request_mode in DUPLEX and not self._streams_unread():
            return self._ignore(event, now_s)
        return (TrailersReply(True),)

    def _streams_unread(self) -> bool:
        """The pick was made on the headers of a request whose body is only starting (an
        upgrade)."""
        return self.body_bytes == 0 and cannot_wait(self._request_mode, self._request_headers)

    def _ignore(self, _event: Event, _now_s: float) -> Sequence[Reply]:
        self.ignored_messages += 1
        return ()

    # -- response --------------------------------------------------------------------------

    def _on_response_headers(self, event: ResponseHeaders, now_s: float) -> Sequence[Reply]:
        self._enter_response(event)
        self.status = status_of(event.headers.get(":status"))
        content_type = event.headers.get("content-type", "")
        self.response_streaming = content_type.startswith("text/event-stream")
        if self.decision is not None:
            self._decider.answered(
                self.decision, served=self.served, status=self.status, now_s=now_s
            )
            self._start_reading(self.decision, event.headers)
        if self._response_mode is BodyMode.NONE and not self.response_streaming:
            self._note_first_byte(now_s)
        if event.end_of_stream:
            self._finish(Cause.NATURAL, now_s)
        told = served_by(self.served, self._params) if self.decision is not None else NO_MUTATION
        return (HeadersReply(False, told),)

    def _enter_response(self, event: Event) -> None:
        if self.phase is Phase.HEADERS and event.modes is not None:
            # An earlier filter answered: no request passes here, only its response.
            self._request_mode, self._response_mode = event.modes
        self._withdraw()
        self.phase = Phase.RESPONSE

    def _start_reading(self, decision: Decision, headers: Mapping[str, str]) -> None:
        if self._response_mode is BodyMode.NONE:
            return
        self._usage_reader = UsageReader(
            decision.request.api,
            event_stream=self.response_streaming,
            readable=headers.get("content-encoding", "identity") == "identity"
            and (self.status or 200) < 400,
        )

    def _on_response_body(self, event: ResponseBody, now_s: float) -> Sequence[Reply]:
        if self.phase is not Phase.RESPONSE:
            self._enter_response(event)
        body = event.body
        if body:
            self.response_bytes += len(body)
            if self.first_byte_s is None:
                self._note_first_byte(now_s)
            self.last_byte_s = now_s
            if self._usage_reader is not None:
                self._usage_reader.feed(body)
        if event.end_of_stream:
            self._finish(Cause.NATURAL, now_s)
        if self._response_mode in DUPLEX:
            return pieces(False, body, event.end_of_stream, self._params)
        return (BodyReply(False),)

    def _note_first_byte(self, now_s: float) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = now_s
            if self.decision is not None:
                ok = self.status is None or self.status < 400
                self._decider.first_byte(self.decision, now_s, ok=ok)
                if self.hold is not None:
                    self.hold.wake(now_s)

    def _on_response_trailers(self, _event: ResponseTrailers, now_s: float) -> Sequence[Reply]:
        self._finish(Cause.NATURAL, now_s)
        return (TrailersReply(False),)

    # -- always ----------------------------------------------------------------------------

    def _finish(self, cause: Cause, now_s: float) -> None:
        """The exchange is over: give the charge back, once."""
        if self.cause is not None:
            return
        self.cause = cause
        self.unsettled = True
        self.phase = Phase.DONE
        self.finished_s = now_s
        self._body.drop()
        self._withdraw()
        self.answer_later = None
        if self._usage_reader is not None:
            self._usage_reader.end()
        if self.decision is not None:
            self._release(self.decision, self._usage_reader, now_s)
            if self.hold is not None:
                self.hold.wake(now_s)

    def _release(self, decision: Decision, usage: UsageReader | None, now_s: float) -> None:
        if self.cause is not Cause.NATURAL:
            self._decider.ended(decision, now_s)
        elif self._response_mode is BodyMode.NONE and self.response_streaming:
            self._decider.unseen(decision, now_s)
        elif usage is None:
            self._decider.ended(decision, now_s)
        else:
            tokens, decode_s = usage.usage.completion_tokens, None
            if self.response_streaming and self.first_byte_s is not None:
                tokens, decode_s = tokens or usage.events, now_s - self.first_byte_s
            self._decider.ended(decision, now_s, output_tokens=tokens, decode_s=decode_s)


def _ignore(exchange: Exchange, event: Event, now_s: float) -> Sequence[Reply]:
    return exchange._ignore(event, now_s)


Handler = Callable[[Exchange, Any, float], Sequence[Reply]]

_RESPONSE: dict[type[Event], Handler] = {
    ResponseHeaders: Exchange._on_response_headers,
    # A gateway may be set to show no response headers.
    ResponseBody: Exchange._on_response_body,
    ResponseTrailers: Exchange._on_response_trailers,
}
_LATE: dict[type[Event], Handler] = {
    RequestBody: Exchange._on_late_request_body,
    RequestTrailers: Exchange._on_late_request_trailers,
}
TABLE: Mapping[Phase, Mapping[type[Event], Handler]] = MappingProxyType(
    {
        Phase.HEADERS: {
            RequestHeaders: Exchange._on_request_headers,
            RequestBody: Exchange._on_headerless_request,
            RequestTrailers: Exchange._on_headerless_request,
            **_RESPONSE,
        },
        Phase.BODY: {
            RequestBody: Exchange._on_request_body,
            RequestTrailers: Exchange._on_request_trailers,
            # The gateway answered by itself before the request was complete.
            **_RESPONSE,
        },
        Phase.HELD: dict(_RESPONSE),
        Phase.DECIDED: {**_LATE, **_RESPONSE},
        Phase.RESPONSE: {
            **_LATE,
            ResponseBody: Exchange._on_response_body,
            ResponseTrailers: Exchange._on_response_trailers,
        },
        Phase.DONE: {},
    }
)
"""What each phase does with each message; what is not listed is counted and ignored."""
