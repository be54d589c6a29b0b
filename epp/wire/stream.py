"""Joins bytes and decisions: one gRPC stream's messages in, an exchange's replies out.

Whatever happens inside, the transport sees no exception: malformed bytes end the stream with
INVALID_ARGUMENT, a bug of ours is a 500 for this one request and is reported through `on_bug`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from epp.core.exchange import Exchange
from epp.core.messages import ImmediateReply, Reply
from epp.core.model import Clock
from epp.core.streams import Transport
from epp.wire.extproc import WireError, decode_request, encode_reply

INVALID_ARGUMENT: Final = 3
"""gRPC status code."""

OnBug = Callable[[Exchange, Exception], None]
"""Told of an exception that should not have been; the exchange tells what it was doing."""


class ExtProcStream:
    """One stream; implements `core.streams.Stream`."""

    __slots__ = ("_clock", "_exchange", "_on_bug", "_transport")

    def __init__(
        self, *, transport: Transport, exchange: Exchange, clock: Clock, on_bug: OnBug
    ) -> None:
        self._transport = transport
        self._exchange = exchange
        self._clock = clock
        self._on_bug = on_bug
        if exchange.may_hold:
            # Not always: the two hold each other then, and only the collector ends it.
            exchange.answer_later = self._answer_later

    def on_message(self, data: bytes) -> None:
        """Decode, decide, answer; then let the exchange learn from it."""
        exchange = self._exchange
        try:
            event = decode_request(data)
        except WireError as error:
            self._transport.finish(INVALID_ARGUMENT, str(error))
            self.on_close()
            return
        try:
            replies = exchange.receive(event, self._clock())
        except Exception as error:  # noqa: BLE001 - the last line of defence for the other streams
            self._on_bug(exchange, error)
            replies = (exchange.fail(self._clock()),)
        if replies:
            self._answer(replies)
        if exchange.unsettled:
            self._settle()

    def on_close(self) -> None:
        """Give back what the exchange holds."""
        try:
            self._exchange.close(self._clock())
        except Exception as error:  # noqa: BLE001
            self._on_bug(self._exchange, error)

    def _answer(self, replies: Sequence[Reply]) -> None:
        self._transport.send([encode_reply(reply) for reply in replies])
        if isinstance(replies[-1], ImmediateReply):
            self._transport.finish()

    def _answer_later(self, make: Callable[[], Sequence[Reply]]) -> None:
        """A held request was let go, while something else was handled."""
        try:
            self._answer(make())
        except Exception as error:  # noqa: BLE001 - whoever let it go must not suffer
            self._on_bug(self._exchange, error)
            self._answer((self._exchange.fail(self._clock()),))
        self._settle()

    def _settle(self) -> None:
        try:
            self._exchange.settle(self._clock())
        except Exception as error:  # noqa: BLE001 - the request itself is answered
            self._on_bug(self._exchange, error)
