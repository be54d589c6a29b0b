"""Virtual time: what happens when, in an order that depends on nothing else.

Events of one moment go by rank: what engines finish is known before the world changes, and both
before requests arrive. Within a rank they go in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any


class Rank(IntEnum):
    """Order of the events of one moment."""

    STEP = 0
    SIGNAL = 1
    CHANGE = 2
    ARRIVAL = 3
    RECHECK = 4


class Agenda:
    """Events to come, and the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._added = 0

    def add(self, at_s: float, rank: Rank, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at `at_s`, which is not in the past."""
        self._added += 1
        heappush(self._events, (at_s, rank, self._added, action, argument))

    @property
    def next_s(self) -> float | None:
        """When something happens next; `None`: never."""
        return self._events[0][0] if self._events else None

    def run_moment(self) -> None:
        """Go to the time of the next event and run all events of that moment, those included that
        they add to it."""
        events = self._events
        self.now_s = now_s = events[0][0]
        while events and events[0][0] == now_s:
            _, _, _, action, argument = heappop(events)
            action(argument)


def chance(*keys: int) -> float:
    """A number in [0, 1) that looks random and depends on `keys` alone, so that the same scrape is
    lost whatever else a run draws. Source: the mixing function of SplitMix64."""
    mixed = 0
    for key in keys:
        mixed = (mixed + key + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return (mixed >> 11) / (1 << 53)
