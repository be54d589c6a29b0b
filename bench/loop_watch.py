"""How long the event loop is busy without a turn for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoopWatch:
    """Takes every turn it can get."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """CPU seconds of the longest wait for one so far."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            before_s = time.process_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.process_time() - before_s)


@asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopWatch]:
    """Watches while the body runs. Costs all the CPU there is."""
    watch = LoopWatch()
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.wait([running])
