"""From single signals to observations that say something about an engine's speed.

Single signals lie: of two prompts that share an engine step, the second seems to take no time; a
prompt that overtakes another makes that one look slow; prefill times in an engine's histograms
overlap. Sums over several prefills do not. Each class here sums up one signal of one endpoint, in
bounded space.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from epp.core.latency.fit import Parts

GROUP_PREFILLS = 4
"""Prefills after which a group ends on a busy engine. The work of the next prompt inside the last
step blurs a group's edges, so more would blur less; but one stall spoils its whole group."""
GROUP_PREFILLS_MAX = 4 * GROUP_PREFILLS
"""A group ends here even inside what looks like one step."""
SAME_STEP_RATIO = 0.25
"""A first byte that follows another within this part of a decode step came from the same step."""
SAME_TIME_S = 1e-6
"""Difference of computed times that is rounding."""
PREFILLS_REMEMBERED = 64
"""First bytes per endpoint whose time and work are kept, to tell decode from prefill."""
PREFILL_SHARE_MAX = 0.8
"""Prefill takes at most this part of an answer's time; beyond it what is left says nothing."""


class Group(NamedTuple):
    """Prompts computed back to back."""

    parts: Parts
    """What they should take by the prior: tokens, attention, steps."""
    observed_s: float
    """What they took."""
    prefills: int


NO_GROUP = Group((0.0, 0.0, 0.0), 0.0, 0)


class FirstBytes:
    """Groups of first bytes. A group ends when the engine ran idle, or after `GROUP_PREFILLS`, but
    never between prompts of one step."""

    __slots__ = ("group", "last_s")

    def __init__(self) -> None:
        self.group = NO_GROUP
        """The group that goes on."""
        self.last_s = -math.inf
        """Time of the newest first byte."""

    def idle_before(self, service_s: float, now_s: float) -> bool:
        """The request of a first byte was sent after the one before: a new group."""
        return now_s - service_s > self.last_s + SAME_TIME_S

    def same_step(self, service_s: float, now_s: float, step_s: float) -> bool:
        """A first byte comes from the same engine step as the one before."""
        return service_s < SAME_STEP_RATIO * step_s and not self.idle_before(service_s, now_s)

    def add(self, parts: Parts, service_s: float, now_s: float, *, same_step: bool) -> Group | None:
        """A first byte after so much service. Returns: the group that ended before it, if one did.

        Args:
            same_step: what `same_step` says of it.
        """
        group, ended = self.group, None
        full = group.prefills >= (GROUP_PREFILLS_MAX if same_step else GROUP_PREFILLS)
        if group.prefills and (full or self.idle_before(service_s, now_s)):
            group, ended = NO_GROUP, group
        tokens, pairs, steps = group.parts
        self.group = Group(
            (tokens + parts[0], pairs + parts[1], steps + parts[2]),
            group.observed_s + service_s,
            group.prefills + 1,
        )
        self.last_s = now_s
        return ended


class Prefills(NamedTuple):
    """Some prefills of one engine as its histograms tell them."""

    tokens: float
    """Computed tokens of all of them."""
    observed_s: float
    prefills: int


class Histograms:
    """Growth of an engine's prefill histograms, for endpoints whose first bytes are not seen."""

    __slots__ = ("_from_s", "_prefill_s", "_prefills", "_tokens")

    def __init__(self) -> None:
        self._from_s: float | None = None
        self._prefill_s = self._tokens = 0.0
        self._prefills = 0

    def add(
        self, *, prefill_s: float, computed_tokens: float, prefills: int, now_s: float
    ) -> Prefills | None:
        """One scrape's growth. Returns: prefills to learn from, once there are enough."""
        since_s = self._from_s
        if since_s is None:
            self._restart(now_s)
            return None
        self._prefill_s += max(0.0, prefill_s)
        self._tokens += max(0.0, computed_tokens)
        self._prefills += max(0, prefills)
        if self._prefills < GROUP_PREFILLS:
            return None
        # Prefills that shared a step each report all of it, so their sum exceeds the time the
        # engine was busy; but that cannot exceed the time that went by.
        at_least_s = self._prefill_s / self._prefills
        busy_s = min(self._prefill_s, max(now_s - since_s, at_least_s))
        learned = Prefills(self._tokens, busy_s, self._prefills)
        self._restart(now_s)
        return learned

    def _restart(self, now_s: float) -> None:
        self._from_s = now_s
        self._prefill_s, self._tokens, self._prefills = 0.0, 0.0, 0


class PrefillTime:
    """How much of its time an endpoint spent on prefills, lately."""

    __slots__ = ("_done", "_done_s")

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque(maxlen=PREFILLS_REMEMBERED)
        """Per first byte: its time, and prefill seconds done until then."""
        self._done_s = 0.0

    def add(self, work_s: float, now_s: float) -> None:
        """A prefill was done."""
        self._done_s += work_s
        self._done.append((now_s, self._done_s))

    def share(self, now_s: float, last_s: float | None) -> float:
        """Part of the last `last_s` seconds (`None`: as far as remembered), 0..1."""
        if not self._done:
            return 0.0
        done = list(self._done)
        start = 0
        if last_s is not None:
            # From the last first byte before that time on, which for the decode of an answer is
            # its own: what was done at it is not counted.
            start = max(0, bisect_left(done, (now_s - last_s + SAME_TIME_S, 0.0)) - 1)
        from_s, from_done_s = done[start]
        if now_s <= from_s:
            return 0.0
        return min(PREFILL_SHARE_MAX, (self._done_s - from_done_s) / (now_s - from_s))
