"""What prompts of one family (model, tools, rendering fields) have in common, learned as they end.

- Bytes per token: how long a text is that no request has shown yet.
- The loss: tokens at the end of a prompt that the next turn does not keep. 0 with templates that
  only append; large with those that put the tools behind the last user turn, or drop old thoughts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BYTES_PER_TOKEN = 4.0
"""Assumed before anything is known."""
_FAMILIES_MAX = 1000
_SEEN_MAX = 5
_PACE = 0.1
_RATIOS = (0.5, 64.0)
"""Bytes per token that are believed."""


class Habits:
    """By family; the least recently taught ones are forgotten."""

    def __init__(self) -> None:
        self._losses: OrderedDict[int, tuple[float, ...]] = OrderedDict()
        self._ratios: OrderedDict[int, float] = OrderedDict()
        self._ratio = BYTES_PER_TOKEN

    def bytes_per_token(self, family: int) -> float:
        return self._ratios.get(family, self._ratio)

    def lost_tokens(self, family: int) -> float:
        """Median of what the last continuations did not keep of the prompt before them."""
        return middle(self._losses.get(family, ()), 0.0)

    def saw_prompt(self, family: int, text_bytes: int, tokens: int) -> None:
        """A prompt of so many bytes had so many tokens."""
        if tokens <= 0:
            return
        low, high = _RATIOS
        ratio = min(high, max(low, text_bytes / tokens))
        self._ratio += _PACE * (ratio - self._ratio)
        known = self._ratios.pop(family, ratio)
        self._ratios[family] = known + _PACE * (ratio - known)
        if len(self._ratios) > _FAMILIES_MAX:
            self._ratios.popitem(last=False)

    def saw_loss(self, family: int, tokens: float) -> None:
        """A continuation did not keep so many tokens of the prompt before it."""
        known = self._losses.pop(family, ())
        self._losses[family] = (*known, tokens)[-_SEEN_MAX:]
        if len(self._losses) > _FAMILIES_MAX:
            self._losses.popitem(last=False)


def middle(values: Sequence[float], default: float) -> float:
    """The median, of an even number the lower one; `default` of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else default
