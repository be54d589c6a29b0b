"""What endpoints will hold soon: prompts we have just sent them and whose events are not here yet.

Per slot the keys of such prompts, each until a time. A chain is expected as a whole, so a slot that
is expected to have a block is expected to have all before it, and `match` may bisect. As in
`core.prefix` the keys are kept in *runs*, packed pieces of chains in the order of their time: a
chain that is expected again is taken out of the older runs that have its beginning. Runs that are
past their time are dropped oldest first, and as only a chain's end can be left in an older run,
what stays is whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_KEY_BYTES = 8


class _Slot:
    """The runs of one slot."""

    __slots__ = ("blocks", "heads", "runs", "ticks")

    def __init__(self) -> None:
        self.blocks = 0
        self.ticks = 0
        self.runs: dict[int, tuple[float, bytes]] = {}
        """Tick -> until when, and the packed keys; times only grow with the ticks."""
        self.heads: dict[int, int] = {}
        """First key of a run -> its tick."""


class Expectations:
    """Which slot will hold which blocks; bounded per slot."""

    __slots__ = ("_masks", "_slot_blocks_max", "_slots", "held")

    def __init__(self, slot_blocks_max: int) -> None:
        """Start empty.

        Args:
            slot_blocks_max: bound per slot; the oldest are dropped for new ones. Of a longer chain
                the beginning is expected.
        """
        self._slots: dict[int, _Slot] = {}
        self._masks: dict[int, int] = {}
        """Key -> bits of the slots, bit n for slot n."""
        self._slot_blocks_max = slot_blocks_max
        self.held = 0
        """Blocks expected, over all slots."""

    def expect(self, slot: int, keys: Sequence[int], until_s: float) -> None:
        """Expect a chain on a slot, at least until then."""
        chain = keys[: self._slot_blocks_max]
        if not chain:
            return
        state = self._slots.get(slot)
        if state is None:
            state = self._slots[slot] = _Slot()
        packed = array("Q", chain).tobytes()
        youngest = next(reversed(state.runs.values()))[0] if state.runs else until_s
        known = self._take(state, chain, packed)
        added = self._mark(1 << slot, chain, known)
        if known + added:
            state.ticks += 1
            state.runs[state.ticks] = (
                max(until_s, youngest),
                packed[: (known + added) * _KEY_BYTES],
            )
            state.heads[chain[0]] = state.ticks
        state.blocks += added
        self.held += added
        while state.blocks > self._slot_blocks_max:
            self._drop_oldest(slot, state)

    def expire(self, now_s: float) -> None:
        """Drop what is past its time."""
        for slot, state in list(self._slots.items()):
            while state.runs and next(iter(state.runs.values()))[0] <= now_s:
                self._drop_oldest(slot, state)
            if not state.runs:
                del self._slots[slot]

    def forget(self, slot: int) -> None:
        """Expect nothing of a slot."""
        state = self._slots.pop(slot, None)
        while state is not None and state.runs:
            self._drop_oldest(slot, state)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Slot -> leading blocks expected there, >= 1."""
        matched: dict[int, int] = {}
        masks = self._masks
        holders, low = masks.get(keys[0], 0) if len(keys) else 0, 0
        while holders:
            # Who is expected to have the block in the middle has all before it.
            high = len(keys)
            start = low
            while high - start > 1:
                middle = (start + high) // 2
                if masks.get(keys[middle], 0) & holders == holders:
                    start = middle
                else:
                    high = middle
            rest = masks.get(keys[high], 0) & holders if high < len(keys) else 0
            gone = holders & ~rest
            while gone:
                bit = gone & -gone
                matched[bit.bit_length() - 1] = high
                gone ^= bit
            holders, low = rest, high
        return matched

    def _take(self, state: _Slot, chain: Sequence[int], packed: bytes) -> int:
        """Take the chain's beginning out of the runs that have it; tell how many blocks it is."""
        taken = 0
        while taken < len(chain):
            tick = state.heads.pop(chain[taken], None)
            if tick is None:
                break
            until_s, run = state.runs[tick]
            common = _common_keys(run, packed, taken)
            taken += common
            rest = run[common * _KEY_BYTES :]
            if rest:
                state.runs[tick] = (until_s, rest)
                state.heads[array("Q", rest[:_KEY_BYTES])[0]] = tick
            else:
                del state.runs[tick]
        return taken

    def _mark(self, bit: int, chain: Sequence[int], start: int) -> int:
        """Set a slot's bit on keys that are not expected there, up to the first that is (two chains
        with a key in common that part before it: the hash collides)."""
        masks = self._masks
        for place in range(start, len(chain)):
            key = chain[place]
            mask = masks.get(key, 0)
            if mask & bit:
                return place - start
            masks[key] = mask | bit
        return len(chain) - start

    def _drop_oldest(self, slot: int, state: _Slot) -> None:
        tick = next(iter(state.runs))
        run = array("Q", state.runs.pop(tick)[1])
        del state.heads[run[0]]
        masks, bit = self._masks, 1 << slot
        for key in run:
            mask = masks[key] ^ bit
            if mask:
                masks[key] = mask
            else:
                del masks[key]
        state.blocks -= len(run)
        self.held -= len(run)


def _common_keys(run: bytes, packed: bytes, start: int) -> int:
    """How many keys two rows have in common at their beginnings, the second from a key on."""
    offset = start * _KEY_BYTES
    most = min(len(run), len(packed) - offset)
    if run[:most] == packed[offset : offset + most]:
        return most // _KEY_BYTES
    low, high = 0, most // _KEY_BYTES - 1  # keys known to be equal; keys that may be
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * _KEY_BYTES
        if run[:size] == packed[offset : offset + size]:
            low = middle
        else:
            high = middle - 1
    return low
