"""The line that shows how far a run is: rewritten in place on a terminal, else now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

PLAIN_PERIOD_S = 4.0


class Progress:
    """Writes to one stream.

    Args:
        live: rewrite the line in place; default: whether the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() if live is None else live
        self._shown = 0
        self._shown_s = float("-inf")

    def show(self, text: str, *, always: bool = False) -> None:
        """Show where things are. Elsewhere than on a terminal at most once per
        `PLAIN_PERIOD_S`, unless `always`."""
        if self._live:
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)
            return
        now_s = time.monotonic()
        if always or now_s - self._shown_s >= PLAIN_PERIOD_S:
            self._shown_s = now_s
            self._write(text + "\n")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Take the live line away."""
        if self._live and self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
