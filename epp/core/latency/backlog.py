"""Prefill work dispatched to one endpoint and not known to be done, in seconds, as it ages.

An engine computes prompts roughly in the order they came. So of everything waiting, the oldest has
been in service since it was dispatched or since the first byte before it, whichever is later, and
that much of its work is done. Counting the progress of the oldest, and of no other, is what keeps a
load signal fresh between two first bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Work(Protocol):
    """One request's prefill on one endpoint."""

    @property
    def work_s(self) -> float:
        """Seconds of prefill it was charged."""

    @property
    def dispatched_s(self) -> float:
        """Monotonic time of its dispatch."""

    @property
    def blind(self) -> bool:
        """Its first byte will not be seen when it comes."""


class Backlog:
    """The requests of one endpoint without a first response byte, oldest first."""

    __slots__ = ("_waiting", "last_first_byte_s", "work_s")

    def __init__(self) -> None:
        self._waiting: dict[Work, None] = {}
        self.work_s = 0.0
        """Sum of their work, without any progress; 0 = nothing waits."""
        self.last_first_byte_s = float("-inf")
        """Monotonic time of the newest first byte, seen or predicted, or of the end of a request
        that was in service without one."""

    def __iter__(self) -> Iterator[Work]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        """`work` was dispatched here."""
        self._waiting[work] = None
        self.work_s += work.work_s

    def remove(self, work: Work) -> None:
        """`work` waits here no longer."""
        del self._waiting[work]
        # Starting again from nothing keeps rounding errors from adding up; until then, what a huge
        # request left of a tiny one may be less than nothing.
        self.work_s = max(0.0, self.work_s - work.work_s) if self._waiting else 0.0

    def given_up(self, work: Work, now_s: float) -> None:
        """`work` will never get its first byte. If it was the oldest, the engine was busy with it
        until now and starts on the next."""
        if next(iter(self._waiting), None) is work:
            self.last_first_byte_s = max(self.last_first_byte_s, now_s)

    def in_service_since_s(self, work: Work) -> float:
        """When the engine can have started on `work`, if it serves in order."""
        return max(work.dispatched_s, self.last_first_byte_s)

    def overtaken_by(self, work: Work) -> list[Work]:
        """Blind ones dispatched before `work`: a first byte of `work` says they are served."""
        overtaken = []
        for earlier in self._waiting:
            if earlier is work:
                break
            if earlier.blind:
                overtaken.append(earlier)
        return overtaken

    def seconds(self, now_s: float) -> float:
        """What is left to do, >= 0."""
        for oldest in self._waiting:
            served_s = now_s - max(oldest.dispatched_s, self.last_first_byte_s)
            if served_s <= 0.0:
                return self.work_s
            return max(0.0, self.work_s - min(served_s, oldest.work_s))
        return 0.0
