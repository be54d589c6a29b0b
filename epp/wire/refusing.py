"""A stream that is one too many: its first message is answered with a refusal, and that is all.

Cheaper than an exchange, since it is for the moment when there are too many of them.
"""

from __future__ import annotations

from epp.core.errors import RequestDropped
from epp.core.refusal import refuse
from epp.core.streams import Transport
from epp.wire.extproc import encode_reply


class RefusingStream:
    """Implements `core.streams.Stream`."""

    __slots__ = ("_answer", "_transport")

    def __init__(self, *, transport: Transport, dropped: RequestDropped) -> None:
        self._transport = transport
        self._answer: bytes | None = encode_reply(refuse(dropped))

    def on_message(self, data: bytes) -> None:  # noqa: ARG002 - whatever it is
        """Refuse, once."""
        if self._answer is not None:
            self._transport.send([self._answer])
            self._transport.finish()
            self._answer = None

    def on_close(self) -> None:
        """Nothing was taken."""
