"""When a connection must act though nothing arrives; the time comes in.

A silent peer is pinged and, if it stays silent, given up. A ping is answered behind whatever else
is under way, so any byte counts as life, and so does output that leaves while we do not read.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from epp.wire.http2.limits import Http2Limits

_REBUILD_MIN: Final = 64


class Keepalive:
    """When to ping, and when to give up."""

    __slots__ = ("_limits", "heard_s", "pinged_s")

    def __init__(self, limits: Http2Limits, now_s: float) -> None:
        self._limits = limits
        self.heard_s = now_s
        """When the last sign of life came."""
        self.pinged_s: float | None = None
        """When our ping went out that nothing has answered yet."""

    def heard(self, now_s: float) -> None:
        """A sign of life."""
        self.heard_s = now_s
        self.pinged_s = None

    def deadline_s(self) -> float:
        """When to look again."""
        if self.pinged_s is not None:
            return self.pinged_s + self._limits.keepalive_timeout_s
        return self.heard_s + self._limits.keepalive_s

    def dead(self, now_s: float) -> bool:
        """The ping was not answered in time."""
        return self.pinged_s is not None and now_s >= self.deadline_s()

    def due(self, now_s: float) -> bool:
        """A ping should go out; it is then taken as sent."""
        if self.pinged_s is not None or now_s < self.deadline_s():
            return False
        self.pinged_s = now_s
        return True


class Deadlines:
    """Stream ids by their deadline. Ids of ended streams stay until they are half of all."""

    __slots__ = ("_at_s", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._at_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._at_s)

    def add(self, stream_id: int, at_s: float) -> None:
        """A stream must end by then."""
        self._at_s[stream_id] = at_s
        heappush(self._heap, (at_s, stream_id))

    def discard(self, stream_id: int) -> None:
        """It has ended."""
        self._at_s.pop(stream_id, None)
        if len(self._heap) > _REBUILD_MIN + 2 * len(self._at_s):
            self._heap = [(at_s, stream_id) for stream_id, at_s in self._at_s.items()]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """The earliest, which may be that of a stream that has ended."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> list[int]:
        """The streams whose time is over, each once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, stream_id = heappop(self._heap)
            if self._at_s.pop(stream_id, None) is not None:
                due.append(stream_id)
        return due
