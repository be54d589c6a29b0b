"""How far a long bench is, on standard error: a bar that redraws itself on a terminal, elsewhere a
line every ten seconds, so that a log stays short."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

REDRAW_S = 0.2
LINE_S = 10.0
BAR_COLUMNS = 30
NOTE_COLUMNS = 48


class ProgressBar:
    """Shows how much of `total` is done and how long the rest will take at the pace so far."""

    def __init__(
        self,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = max(1, total)
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar = self._stream.isatty()
        self._start_s = clock()
        self._shown_s = self._start_s - REDRAW_S if self._bar else self._start_s

    def show(self, done: float, note: str = "") -> None:
        """`done` of the total, parts of a run included; often called, seldom written."""
        now_s = self._clock()
        if now_s - self._shown_s >= (REDRAW_S if self._bar else LINE_S):
            self._shown_s = now_s
            self._write(progress_line(done, self._total, now_s - self._start_s, note))

    def end(self, done: int) -> None:
        """The last line."""
        line = f"{done} of {self._total} runs in {clock_text(self._clock() - self._start_s)}"
        self._write(line)
        if self._bar:
            print(file=self._stream, flush=True)

    def _write(self, line: str) -> None:
        if self._bar:  # back to the first column, and erase what was there
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


def progress_line(done: float, total: int, elapsed_s: float, note: str = "") -> str:
    """A bar, percent, runs, and the time that is left at the pace so far."""
    share = min(1.0, done / total)
    filled = int(share * BAR_COLUMNS)
    bar = "#" * filled + "." * (BAR_COLUMNS - filled)
    left = clock_text(elapsed_s / share - elapsed_s) if share > 0 else "?"
    runs = f"{int(done)}/{total} runs"
    return (
        f"[{bar}] {share:4.0%}  {runs}  {clock_text(elapsed_s)}, {left} left  "
        + (note[:NOTE_COLUMNS])
    )


def clock_text(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
