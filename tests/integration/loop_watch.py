"""How long the event loop is busy without a turn for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoopWatch:
    """`longest_s`: CPU seconds of the longest stretch so far."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = time.process_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.process_time() - before_s)


@asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopWatch]:
    """Watches while the body runs."""
    watch = LoopWatch()
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
