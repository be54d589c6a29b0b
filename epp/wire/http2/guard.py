"""Keeps account of what a peer gets wrong or does in vain, and ends the connection when it is too
much."""

from __future__ import annotations

from collections.abc import Callable

from epp.wire.http2.faults import ConnectionFault, PeerError, Reason
from epp.wire.http2.frames import ErrorCode
from epp.wire.http2.limits import Budget, Http2Limits
from epp.wire.http2.output import Output


class Guard:
    """The budgets of one connection, its errors, and the time of the call in progress.

    The three `spend` methods raise PeerError when their budget is used up.
    """

    __slots__ = (
        "_output",
        "_overhead",
        "_per_work",
        "_provoked",
        "_wasted",
        "answered",
        "now_s",
        "report",
    )

    def __init__(
        self,
        *,
        limits: Http2Limits,
        output: Output,
        report: Callable[[ConnectionFault], None],
        now_s: float,
    ) -> None:
        self.now_s = now_s
        self.report = report
        self.answered = 0
        """Answered streams that the budget of wasted resets has not counted yet."""
        self._output = output
        self._per_work = limits.overhead_per_work
        self._overhead = Budget(
            burst=limits.overhead_burst, per_s=limits.overhead_per_s, now_s=now_s
        )
        self._wasted = Budget(
            burst=limits.wasted_resets_burst, per_s=limits.wasted_resets_per_s, now_s=now_s
        )
        self._provoked = Budget(
            burst=limits.provoked_resets_burst, per_s=limits.provoked_resets_per_s, now_s=now_s
        )

    def spend(self, reason: Reason, cost: float = 1.0) -> None:
        """A frame that did no work; `reason` is what too many of them are."""
        if self._overhead.spend(cost, self.now_s):
            return
        output, per_work = self._output, self._per_work
        output.work = int(self._overhead.redeem(output.work * per_work) // per_work)
        if not self._overhead.left:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, reason)

    def spend_reset(self) -> None:
        """A stream that was reset young and unanswered."""
        if self._wasted.spend(1, self.now_s):
            return
        self.answered = int(self._wasted.redeem(self.answered))
        if not self._wasted.left:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, Reason.RESET_FLOOD)

    def spend_provoked(self) -> None:
        """A stream that we had to end because of the peer."""
        if not self._provoked.spend(1, self.now_s):
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, Reason.PROVOKED_RESETS)
