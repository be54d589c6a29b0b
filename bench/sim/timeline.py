"""How many requests were in flight where, over time, in bounded space."""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.endpoints import Endpoint

SAMPLES_MAX = 4096
"""When reached, every second sample is dropped and the period doubles."""


class Timeline:
    """Samples at whole multiples of the period, which starts at one second."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, tuple[int, ...]]] = []
        self.next_s = 0.0
        """When the next sample is due."""
        self._period_s = 1.0

    def look(self, endpoints: Sequence[Endpoint], now_s: float) -> None:
        """Nothing changed since the last call: fill in the samples due before `now_s`."""
        inflight = tuple(len(endpoint.flights) for endpoint in endpoints)
        while self.next_s < now_s:
            self.samples.append((self.next_s, inflight))
            if len(self.samples) >= SAMPLES_MAX:
                del self.samples[1::2]
                self._period_s *= 2
                self.next_s = self.samples[-1][0]
            self.next_s += self._period_s
