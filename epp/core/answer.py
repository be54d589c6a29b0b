"""What is done with an answer's body as it goes by: its usage is read, and where the request's
model was rewritten, the client's own name is put back.

Names are put back in bodies that are not compressed and that the gateway shows us; the bytes of all
others are sent on as they came.
"""

from __future__ import annotations

from collections.abc import Mapping

from epp.core.decide import Decider, Decision
from epp.core.model import Cause, Request
from epp.core.renaming import ModelRestorer
from epp.core.usage import UsageReader


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer with these headers is streamed as server-sent events."""
    return headers.get("content-type", "").lower().startswith("text/event-stream")


class Answer:
    """The body of one answer.

    Args:
        headers: of the response.
        status: of the response; `None` = unknown.
    """

    __slots__ = ("_restorer", "usage")

    def __init__(self, request: Request, headers: Mapping[str, str], status: int | None) -> None:
        event_stream = is_event_stream(headers)
        plain = headers.get("content-encoding", "").strip().lower() in ("", "identity")
        self.usage = UsageReader(
            request.api, event_stream=event_stream, readable=plain and (status or 200) < 400
        )
        self._restorer: ModelRestorer | None = None
        if request.target_model and request.model and plain:
            self._restorer = ModelRestorer(
                request.target_model, request.model, event_stream=event_stream
            )

    @property
    def changes_length(self) -> bool:
        """The body that goes on may be longer or shorter than the one that came."""
        return self._restorer is not None and self._restorer.changes_length

    def feed(self, body: bytes, end: bool) -> bytes:
        """The next piece, cut anywhere; returns what the client is sent for it.

        Args:
            end: nothing comes after it, or nothing could be added to what does. In pieces that the
                gateway waits for one by one (STREAMED) what is kept of a name that is cut off by
                the answer's end is lost if trailers follow: they can carry no body.
        """
        if body:
            self.usage.feed(body)
        restorer = self._restorer
        if restorer is None:
            return body
        if end:
            self._restorer = None
        return restorer.feed(body, end)

    def end(self) -> bytes:
        """The body is over, complete or not; returns what was still kept of it."""
        self.usage.end()
        restorer, self._restorer = self._restorer, None
        return b"" if restorer is None else restorer.feed(b"", True)


def release(
    decider: Decider,
    decision: Decision,
    *,
    cause: Cause,
    unseen: bool,
    answer: Answer | None,
    decode_s: float | None,
    now_s: float,
) -> None:
    """Give back what a request that is over was charged, and learn from how it went.

    Args:
        unseen: the gateway shows no bodies of an answer that is streamed.
        answer: what was read of it; `None` = nothing.
        decode_s: seconds since its first byte, if it was streamed.
    """
    if cause is not Cause.NATURAL:
        decider.ended(decision, now_s)
    elif unseen:
        decider.unseen(decision, now_s)
    elif answer is None:
        decider.ended(decision, now_s)
    else:
        tokens = answer.usage.usage.completion_tokens
        if decode_s is not None:
            tokens = tokens or answer.usage.events
        decider.ended(decision, now_s, output_tokens=tokens, decode_s=decode_s)
