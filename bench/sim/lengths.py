"""Lengths and pauses to draw from, as quantiles; statistics of public traces, no data of theirs.

Between two quantiles a value is drawn evenly in its logarithm, which suits lengths that span three
orders of magnitude. Sources: "Mooncake" is the conversation trace of the Mooncake project (FAST'25
release), with turns joined where a prompt begins with the last full block of a former one;
"agentic" the coding sessions published with kv-cache-tester (60 of them); "Azure" the conversation
part of the Azure LLM inference trace 2023. All were measured over the whole file. Where a source
shows nothing (what the user writes, as a trace only has growth), the figure is ours and says so.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from random import Random

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution over positive numbers."""

    points: tuple[tuple[float, float], ...]
    """(share, value) ascending, from share 0 to share 1; values above 0."""

    def draw(self, rng: Random) -> float:
        """One value."""
        return self.at(rng.random())

    def whole(self, rng: Random) -> int:
        """One value, rounded down."""
        return int(self.draw(rng))

    def at(self, share: float) -> float:
        """The value that this share of all values does not exceed; `share` from 0 to 1."""
        points = self.points
        above = min(bisect_right(points, (share, math.inf)), len(points) - 1)
        (low, smaller), (high, larger) = points[above - 1], points[above]
        ratio = (share - low) / (high - low)
        return smaller * math.exp(ratio * math.log(larger / smaller))


def quantiles(
    low: float, p10: float, p25: float, p50: float, p75: float, p90: float, p99: float, high: float
) -> Quantiles:
    """A distribution by the usual eight figures."""
    shares = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 1.0)
    values = (low, p10, p25, p50, p75, p90, p99, high)
    return Quantiles(tuple(zip(shares, values, strict=True)))


CHAT_FIRST_TOKENS = quantiles(890, 905, 1320, 5226, 13008, 25526, 89867, 126195)
"""Prompt of a conversation's first turn. Mooncake."""
CHAT_OUTPUT_TOKENS = quantiles(1, 24, 156, 350, 472, 597, 1120, 2000)
"""Mooncake."""
CHAT_USER_TOKENS = quantiles(4, 12, 30, 100, 400, 2800, 12000, 40000)
"""What the user adds to prompt and answer: ours, so that growth per turn is about as in Mooncake
(median 456, mean 1,246 tokens)."""
CHAT_GAP_S = quantiles(3.0, 42, 66, 123, 264, 483, 1482, 3030)
"""From one turn to the next. Mooncake."""
CHAT_TURNS = Quantiles(
    (
        *((0.0, 1.0), (0.697, 2.0), (0.873, 3.0), (0.935, 4.0), (0.962, 5.0), (0.978, 6.0)),
        *((0.988, 8.0), (0.993, 10.0), (0.996, 12.0), (1.0, 30.0)),
    )
)
"""Turns of one conversation, to be rounded down. Mooncake."""
CHAT_SYSTEM_TOKENS = quantiles(512, 520, 600, 800, 1200, 2000, 2900, 3000)
"""System prompt of one application: ours. In Mooncake one block of 512 is common to all prompts."""

AGENT_SYSTEM_TOKENS = quantiles(8633, 10647, 12573, 14937, 15535, 16290, 16904, 16910)
"""Tools and system prompt of one application. Agentic."""
AGENT_FIRST_TOKENS = quantiles(9691, 15291, 17432, 28579, 40000, 60000, 110000, 120000)
"""Prompt of a session's first request. Agentic up to the median; above it ours, as the recorded
sessions that begin with 120,000 tokens or more are resumed ones."""
AGENT_ADDED_TOKENS = quantiles(16, 60, 130, 340, 950, 2400, 12000, 60000)
"""Tool results and user text: ours, so that growth is about as in agentic (median 668)."""
AGENT_OUTPUT_TOKENS = quantiles(4, 108, 142, 227, 460, 946, 3560, 15390)
"""Agentic."""
AGENT_GAP_S = quantiles(4.0, 8, 12, 19, 42, 60, 60, 60)
"""Agentic, cut at 60 s."""
AGENT_REQUESTS = quantiles(3, 4, 12, 40, 90, 188, 395, 396)
"""Requests of one session, to be rounded down. Agentic."""

AZURE_PROMPT_TOKENS = quantiles(2, 207, 396, 1020, 1189, 2735, 4142, 14050)
AZURE_OUTPUT_TOKENS = quantiles(7, 54, 85, 129, 395, 424, 601, 1000)
