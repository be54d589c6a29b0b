"""How much of an endpoint's KV cache our requests in flight hold, by our own count.

Prompts that share a prefix hold its blocks once. Counting every block would cost as much as the
rest of a decision, so one name stands for a unit of about `UNIT_TOKENS`: names are chained, so the
name at the end of a unit stands for all of it. What is not in a full unit counts for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNIT_TOKENS = 512
OUTPUT_TOKENS = 512
"""Held per request for its output and what its blocks leave empty."""


class Units(NamedTuple):
    """One prompt, cut into units."""

    names: Sequence[int]
    """Name of the last block of each full unit."""
    unit_tokens: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """All that it takes, with some for the output."""
        return self.prompt_tokens + OUTPUT_TOKENS

    @property
    def own_tokens(self) -> int:
        """Tokens outside of any full unit, and some for the output."""
        return self.prompt_tokens - len(self.names) * self.unit_tokens + OUTPUT_TOKENS


def units_of(chain: Sequence[int], block_tokens: int, prompt_tokens: int) -> Units:
    """Cut a prompt.

    Args:
        chain: names of its full blocks; empty = it shares nothing.
    """
    stride = max(1, UNIT_TOKENS // block_tokens)
    names = chain[stride - 1 :: stride]
    unit_tokens = stride * block_tokens
    return Units(names[: prompt_tokens // unit_tokens], unit_tokens, prompt_tokens)


class KvUse:
    """The prompts in flight on one endpoint."""

    __slots__ = ("_holders", "capacity_tokens", "tokens")

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Name of a unit -> requests that hold it."""
        self.capacity_tokens = 0
        """Tokens the cache takes, as the engine reports; 0 = it does not."""
        self.tokens = 0
        """Tokens held; what requests share counts once."""

    def add(self, units: Units) -> None:
        """A request came."""
        holders = self._holders
        for name in units.names:
            held = holders.get(name, 0)
            holders[name] = held + 1
            if not held:
                self.tokens += units.unit_tokens
        self.tokens += units.own_tokens

    def remove(self, units: Units) -> None:
        """A request that was added left."""
        holders = self._holders
        for name in units.names:
            held = holders[name] - 1
            if held:
                holders[name] = held
            else:
                del holders[name]
                self.tokens -= units.unit_tokens
        self.tokens -= units.own_tokens

    def holders(self, name: int) -> int:
        """Requests in flight that hold the unit of this name."""
        return self._holders.get(name, 0)

    def shared(self) -> dict[int, int]:
        """The units held, by name: how many requests hold each."""
        return dict(self._holders)

    def assume(self, tokens: int, holders: Mapping[int, int]) -> None:
        """Take these for what is held, in a state that was saved: nothing will be removed."""
        self.tokens = tokens
        self._holders = dict(holders)

    def shared_tokens(self, units: Units) -> int:
        """Of a prompt, the tokens that are held here already."""
        return units.unit_tokens * sum(map(self._holders.__contains__, units.names))

    def short_tokens(self, units: Units) -> int:
        """Tokens of a prompt that do not fit beside what is in flight here: so many have to be
        freed before it can start. 0 where the capacity is not known."""
        over: int = self.tokens + units.tokens - self.capacity_tokens
        if not self.capacity_tokens or over <= 0:
            return 0
        return max(0, over - self.shared_tokens(units))
