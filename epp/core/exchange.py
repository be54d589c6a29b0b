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

from epp.core.answer import Answer, is_event_stream, release
from epp.core.bodies import Body
from epp.core.decide import Decider, Decision
from epp.core.directing import Edit, direct
from epp.core.errors import DropReason, RequestDropped
from epp.core.flow.hold import Outcome, Ticket
from epp.core.headers import status_of
from epp.core.messages import (
    BodyMode,
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
from epp.core.phases import BUFFERED, DUPLEX, Phase, cannot_wait
from epp.core.refusal import no_headers, refuse
from epp.core.replying import buffered, forwarded, late, pieces, routed_to, sent_on, served_by
from epp.core.serving import Pools, Serving
from epp.core.streams import NOT_SAID, Called
from epp.core.usage import UsageReader

__all__ = ["Exchange", "ExchangeParams", "Phase", "Watcher"]


class Exchange:
    """State of one stream. Attributes are readable by watchers; only this class writes them.

    Args:
        called: what the gateway said as it opened the stream.
        may_hold: a pool may keep requests."""

    __slots__ = (
        "_answer",
        "_body",
        "_called",
        "_edit",
        "_params",
        "_pools",
        "_reported",
        "_request_headers",
        "_request_mode",
        "_response_mode",
        "_ticket",
        "_trailers",
        "_unlearned",
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
        "ignored_messages",
        "last_byte_s",
        "may_hold",
        "phase",
        "pool_named",
        "request",
        "response_bytes",
        "response_streaming",
        "served",
        "serving",
        "started_s",
        "status",
        "subset",
        "unsettled",
    )

    def __init__(
        self,
        *,
        pools: Pools,
        params: ExchangeParams,
        watcher: Watcher,
        now_s: float,
        called: Called = NOT_SAID,
        may_hold: bool = False,
    ) -> None:
        self._pools = pools
        self._params = params
        self._watcher = watcher
        self._called = called
        self.may_hold = may_hold
        self.serving: Serving | None = None
        """The pool of this request; `None` until that has to be known."""
        self.pool_named: str | None = None
        """The pool's name by filter metadata; `None` when it says nothing."""
        self._edit: Edit | None = None
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
        self._answer: Answer | None = None
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
        """When the decision was with the transport; `None` = nobody measured it."""
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
        return None if self._answer is None else self._answer.usage

    @property
    def _decider(self) -> Decider:
        assert self.serving is not None, "nothing is decided before the pool is known"
        return self.serving.decider

    def receive(self, event: Event, now_s: float) -> Sequence[Reply]:
        """Take one message in; returns what to answer now, in order."""
        # Any message may carry metadata; what a later one leaves out still holds.
        if event.subset is not None:
            self.subset = event.subset
        if event.served is not None:
            self.served = event.served
        if event.pool is not None:
            self.pool_named = event.pool
        handler = TABLE[self.phase].get(type(event), Exchange._ignore)
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
            return (HeadersReply(True, self._decide(self._read(None), now_s)),)
        self.phase = Phase.BODY
        if mode in BUFFERED:
            return (HeadersReply(True),)
        return ()

    def _on_headerless_request(self, _event: Event, _now_s: float) -> Sequence[Reply]:
        raise no_headers()

    def _on_request_body(self, event: RequestBody, now_s: float) -> Sequence[Reply]:
        self._body.add(event.body)
        if self._request_mode in BUFFERED:
            mutation = self._decide(self._read(self._body.whole()), now_s)
            self._body.drop()
            return (buffered(mutation, self._edit),)
        if event.end_of_stream:
            return self._send_on(now_s)
        return ()

    def _on_request_trailers(self, _event: RequestTrailers, now_s: float) -> Sequence[Reply]:
        # Trailers end the body: the last body message had no end of stream.
        if self._request_mode in BUFFERED:
            # No body came. The headers are gone, metadata still reaches the load balancer.
            mutation = self._decide(self._read(b""), now_s)
            return (TrailersReply(True, destination=mutation.destination),)
        self._trailers = True
        return self._send_on(now_s)

    def _send_on(self, now_s: float) -> Sequence[Reply]:
        """The request is complete: decide and answer, or hold it."""
        request = self._read(self._body.whole())
        hold = self.serving.hold if self.serving is not None else None
        if hold is None or self.answer_later is None:
            return self._forward(self._decide(request, now_s))
        self.request = request
        offered = hold.offer(
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
        if self._ticket is not None and self.serving is not None:
            self.serving.withdraw(self._ticket)
        self._ticket = None

    # -- decision --------------------------------------------------------------------------

    def _read(self, body: bytes | None) -> Request:
        """The request as its pool wants it; what is held of its body is what goes on."""
        headers = self._request_headers
        serving = self.serving = self._pools.of(
            headers, named=self.pool_named, called=self._called, subset=self.subset
        )
        directed = direct(
            headers,
            body,
            serving=serving,
            limits=self._params.parse_limits,
            partial=self._request_mode is BodyMode.BUFFERED_PARTIAL,
        )
        if directed.edit is not None:
            self._edit = directed.edit
            self._body.replace(directed.edit.body)
        return directed.request

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
        mutation = routed_to(decision.pick, self._request_headers, self._params)
        if self._edit is not None and self._edit.decoded:
            return mutation.without("content-encoding")
        return mutation

    def _refuse(self, dropped: RequestDropped, now_s: float) -> Sequence[Reply]:
        self.drop = dropped
        self._finish(Cause.DROPPED, now_s)
        return (refuse(dropped),)

    # -- after the decision ----------------------------------------------------------------

    def _on_late_request(
        self, event: RequestBody | RequestTrailers, now_s: float
    ) -> Sequence[Reply]:
        mode = self._request_mode
        unread = self.body_bytes == 0 and cannot_wait(mode, self._request_headers)
        return late(mode, event, unread=unread, params=self._params) or self._ignore(event, now_s)

    def _ignore(self, _event: Event, _now_s: float) -> Sequence[Reply]:
        self.ignored_messages += 1
        return ()

    # -- response --------------------------------------------------------------------------

    def _on_response_headers(self, event: ResponseHeaders, now_s: float) -> Sequence[Reply]:
        self._enter_response(event)
        self.status = status_of(event.headers.get(":status"))
        self.response_streaming = is_event_stream(event.headers)
        if self.decision is not None:
            self._decider.answered(
                self.decision, served=self.served, status=self.status, now_s=now_s
            )
            if self._response_mode is not BodyMode.NONE:
                self._answer = Answer(self.decision.request, event.headers, self.status)
        if self._response_mode is BodyMode.NONE and not self.response_streaming:
            self._note_first_byte(now_s)
        if event.end_of_stream:
            self._finish(Cause.NATURAL, now_s)
        if self.decision is None:
            return (HeadersReply(False),)
        changes = self._answer is not None and self._answer.changes_length
        told = served_by(self.served, self._response_mode, changes, self._params)
        return (HeadersReply(False, told),)

    def _enter_response(self, event: Event) -> None:
        if self.phase is Phase.HEADERS and event.modes is not None:
            # An earlier filter answered: no request passes here, only its response.
            self._request_mode, self._response_mode = event.modes
        self._withdraw()
        self.phase = Phase.RESPONSE

    def _on_response_body(self, event: ResponseBody, now_s: float) -> Sequence[Reply]:
        if self.phase is not Phase.RESPONSE:
            self._enter_response(event)
        body = event.body
        if body:
            self.response_bytes += len(body)
            if self.first_byte_s is None:
                self._note_first_byte(now_s)
            self.last_byte_s = now_s
        whole = event.end_of_stream or self._response_mode in BUFFERED
        told = body if self._answer is None else self._answer.feed(body, whole)
        if event.end_of_stream:
            self._finish(Cause.NATURAL, now_s)
        return sent_on(self._response_mode, body, told, event.end_of_stream, self._params)

    def _note_first_byte(self, now_s: float) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = now_s
            if self.decision is not None and self.serving is not None:
                ok = self.status is None or self.status < 400
                self.serving.decider.first_byte(self.decision, now_s, ok=ok)
                self.serving.wake(now_s)

    def _on_response_trailers(self, _event: ResponseTrailers, now_s: float) -> Sequence[Reply]:
        kept = b"" if self._answer is None else self._answer.end()
        self._finish(Cause.NATURAL, now_s)
        if kept and self._response_mode in DUPLEX:
            return (*pieces(False, kept, False, self._params), TrailersReply(False))
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
        if self._answer is not None:
            self._answer.end()
        if self.decision is not None and self.serving is not None:
            streamed = self.response_streaming
            since_s = self.first_byte_s if streamed else None
            release(
                self.serving.decider,
                self.decision,
                cause=cause,
                unseen=streamed and self._response_mode is BodyMode.NONE,
                answer=self._answer,
                decode_s=None if since_s is None else now_s - since_s,
                now_s=now_s,
            )
            self.serving.wake(now_s)


Handler = Callable[[Exchange, Any, float], Sequence[Reply]]

_RESPONSE: dict[type[Event], Handler] = {
    ResponseHeaders: Exchange._on_response_headers,
    # A gateway may be set to show no response headers.
    ResponseBody: Exchange._on_response_body,
    ResponseTrailers: Exchange._on_response_trailers,
}
_LATE: dict[type[Event], Handler] = {
    RequestBody: Exchange._on_late_request,
    RequestTrailers: Exchange._on_late_request,
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
