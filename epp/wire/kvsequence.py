"""Puts one publisher's numbered batches in order: gaps, replays, restarts.

A publisher numbers its batches from 0 and keeps the last ones for a replay. What we get of them
live may begin late, have gaps, or begin again. `Sequence` delivers each batch once and in order, or
says that what was delivered no longer counts. It is told what arrived (`live`, `answer`, `end`),
and asks for a replay through its `Listener`. While a replay runs, live messages are held.

The rule that all of it follows: what was delivered since the last `restarted` is true of the
publisher's state, but after `unsure` there may be more, until `sure`.

    first message is number 0                   sure
    first message is a later one                replay from 0: sure if it begins at 0, else unsure
    next number                                 delivered
    number left out                             replay from there; what it no longer has is lost:
                                                restarted, unsure, and all that it has
    number not above the one before             the publisher restarted: restarted, as at first
    connection made again                       replay from the last batch delivered: if that is
                                                another one now, the publisher restarted; without
                                                a replay: restarted, unsure
    no replay to be had                         restarted where a gap or another process may have
                                                been, unsure

A replay may itself have gaps, as publishers drop answers when they queue up: it is asked for again
as long as it makes progress.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Protocol

HELD_MAX = 4_096
"""Live messages held during a replay; what comes beyond is asked for again afterwards."""


class Listener(Protocol):
    """Takes what a sequence finds out; called synchronously."""

    def deliver(self, payload: bytes) -> None:
        """The next batch."""

    def restarted(self) -> None:
        """Nothing delivered so far counts any more."""

    def unsure(self) -> None:
        """The publisher may hold more than what was delivered."""

    def sure(self) -> None:
        """What was delivered is all there is."""

    def ask(self, start: int) -> None:
        """Ask for a replay from number `start` on. Answers go to `answer`, its end to `end`, and if
        neither comes, that to `failed`."""

    def filled(self) -> None:
        """The replay is over, however it went; `release` has work if anything is held."""


class Fill(Enum):
    """Why a replay runs."""

    HISTORY = auto()
    """To learn everything the publisher still has."""
    GAP = auto()
    CHECK = auto()
    """To see whether a publisher that came back is still the same process, and what was missed."""


class Tally:
    """What happened, over all sequences that share this object. Numbers only go up."""

    __slots__ = ("gaps", "held_dropped", "lost", "replayed", "replays_failed", "restarts")

    def __init__(self) -> None:
        self.gaps = 0
        self.lost = 0
        """Batches known to be missing and not to be had."""
        self.replayed = 0
        """Batches delivered out of replays."""
        self.replays_failed = 0
        self.restarts = 0
        self.held_dropped = 0


class Sequence:
    """The batches of one publisher.

    Args:
        out: takes what is found out.
        can_replay: whether there is a replay socket to ask.
        tally: where to count; may be shared.
    """

    __slots__ = (
        "_again",
        "_checked",
        "_hole",
        "_last",
        "_last_try",
        "_newest",
        "_out",
        "_progress",
        "_seen",
        "_tally",
        "_whole",
        "can_replay",
        "expected",
        "filling",
        "held",
    )

    def __init__(self, out: Listener, *, can_replay: bool, tally: Tally) -> None:
        self._out = out
        self._tally = tally
        self.can_replay = can_replay
        self.expected: int | None = None
        """Number of the next batch to deliver; `None` before the first."""
        self.filling: Fill | None = None
        self.held: deque[tuple[int, bytes]] = deque()
        self._newest = -1
        """The last live message that was not held."""
        self._last = b""
        """The last batch delivered."""
        self._whole = False
        """The replay for the history began at number 0."""
        self._begin_round()

    def live(self, number: int, payload: bytes) -> None:
        """A message came on the subscription."""
        if self.filling is None and not self.held:
            self._take(number, payload)
        elif len(self.held) < HELD_MAX:
            self.held.append((number, payload))
        else:
            self._tally.held_dropped += 1

    def release(self) -> bool:
        """Take one held message. Returns: whether there was one to take."""
        if self.filling is not None or not self.held:
            return False
        self._take(*self.held.popleft())
        return True

    def connected(self) -> None:
        """The subscription was made, or made again: what is held may be of a process that is
        gone."""
        self._tally.held_dropped += len(self.held)
        self.held.clear()
        if self.can_replay:
            whole = self._whole and self.filling is not None
            self._fill(Fill.HISTORY if self.expected is None else Fill.CHECK)
            self._whole = whole  # the history that was interrupted goes on
        elif self.expected is not None:
            self._forget()
            self._out.restarted()
            self._out.unsure()

    def resync(self) -> None:
        """What was delivered was thrown away: begin as at first."""
        self._forget()
        self._out.unsure()
        if self.can_replay:
            self._fill(Fill.HISTORY)

    def replayable(self) -> None:
        """A replay may be asked for again, after one that failed."""
        self.can_replay = True

    def unread(self) -> None:
        """The batch delivered last could not be read."""
        self._whole = False

    # -- live ------------------------------------------------------------------------------

    def _take(self, number: int, payload: bytes) -> None:
        if number <= self._newest:
            self._restart()
        if self.expected is None:
            if number == 0:
                self._out.sure()
            elif self.can_replay:
                self._hold(Fill.HISTORY, number, payload)
                return
            else:
                self._out.unsure()
        elif number < self.expected:
            self._newest = number  # a replay has delivered it
            return
        elif number > self.expected:
            self._tally.gaps += 1
            if self.can_replay:
                self._hold(Fill.GAP, number, payload)
                return
            self._lose(number - self.expected)
        self._newest = number
        self._deliver(number, payload)

    def _hold(self, kind: Fill, number: int, payload: bytes) -> None:
        self.held.appendleft((number, payload))
        self._fill(kind)

    def _deliver(self, number: int, payload: bytes) -> None:
        self.expected = number + 1
        self._last = payload
        self._out.deliver(payload)

    def _restart(self) -> None:
        self._tally.restarts += 1
        self._forget()
        self._out.restarted()

    def _forget(self) -> None:
        self.expected = None
        self._whole = False
        self._newest = -1
        self._last = b""

    def _lose(self, batches: int) -> None:
        self._tally.lost += batches
        self.expected = None
        self._whole = False
        self._out.restarted()
        self._out.unsure()

    # -- replay ----------------------------------------------------------------------------

    def _fill(self, kind: Fill) -> None:
        self.filling = kind
        self._whole = False
        self._checked = False
        """It is the process we knew that answers."""
        self._last_try = False
        """The replay was asked once more for what it did not have."""
        self._ask()

    def _ask(self) -> None:
        self._begin_round()
        self._out.ask(max((self.expected or 0) - 1, 0))

    def _begin_round(self) -> None:
        self._seen: int | None = None
        """Number of the first answer that said anything."""
        self._progress = False
        self._hole = False
        """Answers are ignored from here on: they do not follow."""
        self._again = False
        """Another round is needed."""

    def answer(self, number: int, payload: bytes) -> None:
        """A batch came on the replay socket."""
        if self.filling is None or self._hole:
            return
        if self._seen is None:
            self._seen = number
        if self.expected is None:
            self._whole = number == 0
            if not self._whole:
                self._out.unsure()
        elif number == self.expected - 1 and not self._progress:
            self._checked = payload == self._last
            if not self._checked:
                self._restart()
                self.filling = Fill.HISTORY
                self._hole = self._again = True
            return
        elif number < self.expected:
            return
        elif number > self.expected or (self.filling is Fill.CHECK and not self._checked):
            self._hole = True
            return
        self._progress = True
        self._last_try = False
        self._tally.replayed += 1
        self._deliver(number, payload)

    @property
    def progressed(self) -> bool:
        """The replay's present round delivered something."""
        return self._progress

    def end(self) -> None:
        """The replay said that this is all it has."""
        if self.filling is None:
            return
        if self._again or self._ended_early():
            self._ask()
            return
        if self._whole:
            self._out.sure()
        self._done()

    def _ended_early(self) -> bool:
        """Whether to ask once more, after seeing to it that this leads on."""
        behind = self.held[0][0] if self.held else None
        missing = behind is not None and behind > (self.expected or 0)
        if self._progress:
            return self._hole or missing
        if missing and not self._hole and not self._last_try:
            self._last_try = True  # it may have come after we had asked
            return True
        if self.expected is None:
            self._nothing_there(behind)
            return False
        if self._hole:
            assert self._seen is not None, "a hole is found by an answer"
            self._lose(self._seen - self.expected)
            self.filling = Fill.HISTORY
            return True
        if self.filling is Fill.CHECK and self._seen is None:
            self._restart()  # by a publisher that has not come that far
            self.filling = Fill.HISTORY
            return True
        if behind is not None and missing:
            self._lose(behind - self.expected)
            self.expected = behind
        return False

    def _nothing_there(self, behind: int | None) -> None:
        """The publisher keeps no batch: it has sent none, or keeps none at all."""
        if behind is None:
            self._out.sure()
        elif behind > 0:
            self._tally.lost += behind
            self._out.unsure()
            self.expected = behind

    def failed(self) -> None:
        """No replay, or not all of it, in the time there was. None is asked for until
        `replayable`."""
        if self.filling is None:
            return
        self._tally.replays_failed += 1
        self.can_replay = False
        behind = self.held[0][0] if self.held else None
        missing = 0 if behind is None else behind - (self.expected or 0)
        unknown = self.filling is Fill.CHECK and not self._checked
        if self.expected is None:
            self._out.unsure()
            self.expected = behind
        elif missing > 0 or unknown:
            self._lose(max(missing, 0))
            self.expected = behind
        elif self._whole:
            self._out.unsure()  # the rest of the history is missing
        self._done()

    def _done(self) -> None:
        self.filling = None
        self._out.filled()
