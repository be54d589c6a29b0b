"""Which endpoint holds which KV blocks, folded from what the engines say.

`apply` folds one event of one slot; `match` tells, for the keys of a prompt (`keys`), how many
leading blocks each slot holds without a gap. There is one `Holding` per medium of each rank of a
slot, with a bit of its own in the masks of `Blocks`.

What does what: `folding` takes events in, `matching` looks prompts up, `expected` bridges the time
from a pick to its events, `ranks` has the holdings, `table` the memory.

Nothing here takes long at once. A slot that is forgotten, or an engine that cleared its cache,
loses its holding in one step; the holding's bit stays in the masks, unused, and is cleared by and
by in later calls. Tables grow by shards. What is held is bounded by `blocks_max`; beyond it the
largest holding gives up blocks that no other follows, the next ones of a hand that goes round.

Whatever is lost, the index stays consistent: a removal of something unknown is counted, a block
whose parent is unknown waits (`Aside`), and a slot that missed events can be called `unsure`, which
leaves it out of every answer until it is `sure` again, or be forgotten and told anew.

Cost, measured by `bench/kv.py` (compiled; in brackets not): an event takes 0.5 us (2.5) per block,
a look-up of 767 blocks that nearly each of 8 endpoints holds in part 7 us (21), of 64 endpoints
21 us (47). A held block takes 66 to 80 bytes when one slot holds it, about 42 when eight do.
"""

from __future__ import annotations

from collections.abc import Sequence

from epp.core.kvevents import Cleared, Event, Removed, Stored
from epp.core.kvindex.expected import Expectations
from epp.core.kvindex.folding import FREED_AT_ONCE, Folder, Joined
from epp.core.kvindex.keys import keys_of, root_of
from epp.core.kvindex.matching import Matcher
from epp.core.kvindex.ranks import Ranks

WEIGHTS = (1.0, 0.8, 0.5)
"""By medium: what a block there is worth, of one on the GPU."""

_FREED_PER_EVENT = 64
_EXPECTED_PER_SLOT = 8192
_ORPHANS_MAX = 4096


class KvIndex:
    """Slots are ints from 0 (`Endpoint.slot`); ranks are those of data parallelism, 0 without."""

    def __init__(
        self,
        *,
        blocks_max: int,
        secret: bytes = b"",
        orphans_max: int = _ORPHANS_MAX,
        slot_expected_max: int = _EXPECTED_PER_SLOT,
    ) -> None:
        """Start empty.

        Args:
            blocks_max: bound of the blocks held, over all slots and media, >= 1.
            secret: random bytes of this process, for the keys.
            orphans_max: bound of the blocks that wait for their parent, over all slots.
            slot_expected_max: bound of the blocks expected on one slot.
        Raises: ValueError if a bound is out of range.
        """
        if blocks_max < 1 or orphans_max < 0 or slot_expected_max < 0:
            raise ValueError(
                f"blocks_max={blocks_max}, orphans_max={orphans_max}, "
                f"slot_expected_max={slot_expected_max}: need at least 1, 0 and 0"
            )
        self._ranks = Ranks()
        self._matcher = Matcher(self._ranks)
        self._expected = Expectations(slot_expected_max)
        self._secret = secret
        self.counts = Folder(
            self._ranks, blocks_max=blocks_max, orphans_max=orphans_max, secret=secret
        )
        """What was folded so far, as numbers that only grow."""

    # -- what there is -------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Blocks held, over all slots and media: what `blocks_max` bounds. Those of forgotten
        slots count until they are freed."""
        return self._ranks.held

    @property
    def entries(self) -> int:
        """Distinct blocks that are held by somebody, forgotten slots included until freed."""
        return self._ranks.blocks.live

    @property
    def remembered(self) -> int:
        """Blocks that nobody holds any more but `chain` still knows."""
        return self._ranks.blocks.table.count - self._ranks.blocks.live

    @property
    def orphans(self) -> int:
        """Blocks that wait for their parent."""
        return self._ranks.orphans

    @property
    def gaps(self) -> int:
        """Distinct blocks that some holding lacks though it holds one that follows."""
        return len(self._ranks.gaps)

    @property
    def expected(self) -> int:
        """Blocks expected, over all slots."""
        return self._expected.held

    def held_by(self, slot: int) -> int:
        """Blocks a slot holds, over its ranks and media."""
        return sum(holding.held for holding in self._ranks.of_slot(slot))

    def block_tokens_of(self, slot: int) -> int | None:
        """Tokens per block of a slot's engine, as of its last event; None before the first."""
        sizes = [holding.block_tokens for holding in self._ranks.of_slot(slot)]
        return next((size for size in sizes if size), None)

    def block_sizes(self) -> tuple[int, ...]:
        """Every block size, in tokens, that some sure slot may have: a prompt needs keys for
        each."""
        return tuple(size for size, bits in self._ranks.sized.items() if bits & self._ranks.present)

    # -- keys ----------------------------------------------------------------------------------

    def root(
        self, block_tokens: int, lora: str | None = None, cache_salt: str | None = None
    ) -> int:
        """The root of a prompt's chain; `root_of` says more."""
        return root_of(block_tokens, lora, cache_salt, self._secret)

    def keys_of(
        self, token_ids: Sequence[int] | bytes, block_tokens: int, root: int
    ) -> Sequence[int]:
        """The keys of a prompt's full blocks; `keys.keys_of` says more."""
        return keys_of(token_ids, block_tokens, root)

    def chain(self, tip: int, blocks: int) -> Sequence[int]:
        """The last `blocks` keys of the chain that ends with `tip`, in prompt order.

        Returns: nothing if a block on the way is not known any more; less when the chain is
            shorter.
        """
        return self._ranks.blocks.chain(tip, blocks)

    # -- events --------------------------------------------------------------------------------

    def apply(self, slot: int, event: Event, rank: int = 0) -> Joined | None:
        """Fold one event of a slot's engine.

        Returns: what a request's prompt is joined to, for blocks stored with a session id.
        """
        joined = None
        if isinstance(event, Removed):
            self.counts.remove(slot, rank, event)
        elif isinstance(event, Stored):
            joined = self.counts.store(slot, rank, event)
        elif isinstance(event, Cleared):
            self.counts.clear(slot, rank)
        if self._ranks.leaving:
            self._ranks.free(_FREED_PER_EVENT)
        return joined

    def forget(self, slot: int, rank: int | None = None) -> None:
        """Forget what a slot, or one rank of it, holds; with no rank also what is expected of it
        and whether it is sure. The slot may be used anew at once."""
        self._ranks.retire([h for h in self._ranks.of_slot(slot) if rank in (None, h.rank)])
        if rank is None:
            self._expected.forget(slot)
            self.sure(slot)
        self._ranks.free(FREED_AT_ONCE)

    def unsure(self, slot: int) -> None:
        """Events of this slot were missed: leave it out of every answer. It is followed on."""
        self._ranks.trust(slot, sure=False)

    def sure(self, slot: int) -> None:
        """What is known of this slot is right again."""
        self._ranks.trust(slot, sure=True)

    def is_unsure(self, slot: int) -> bool:
        """Whether a slot is left out of the answers."""
        return self._ranks.is_unsure(slot)

    def expect(self, slot: int, keys: Sequence[int], until_s: float) -> None:
        """A prompt with these keys was sent to a slot, which should hold it soon; if the time
        passes, it is not expected any more."""
        self._expected.expect(slot, keys, until_s)

    def expire(self, now_s: float) -> None:
        """Drop expectations past their time, and free some of what was forgotten; for calling now
        and then."""
        self._expected.expire(now_s)
        self._ranks.free(FREED_AT_ONCE)

    # -- questions -----------------------------------------------------------------------------

    def holders(self, key: int) -> int:
        """The sure slots that hold a block, bit n for slot n."""
        return self._matcher.holders(key)

    def match(
        self, keys: Sequence[int], block_tokens: int, *, expected: bool = False
    ) -> dict[int, int]:
        """Count the leading blocks of a prompt that each slot holds, on whatever medium.

        Args:
            keys: of the prompt's blocks, made for this block size.
            expected: count also what is expected (`expect`): the longer of both.
        Returns: slot -> blocks, >= 1; a slot that holds none, or is unsure, is absent. Of several
            ranks the one that holds most counts.
        """
        matched = self._matcher.match(keys, block_tokens)
        if expected and self._expected.held:
            for slot, blocks in self._expected.match(keys).items():
                if matched.get(slot, 0) < blocks and not self._ranks.is_unsure(slot):
                    matched[slot] = blocks
        return matched

    def weigh(
        self, keys: Sequence[int], block_tokens: int, weights: Sequence[float] = WEIGHTS
    ) -> dict[int, float]:
        """As `match`, but each block counts with the weight of the best medium that holds it.

        Args:
            weights: as `MEDIUMS`, best first.
        """
        return self._matcher.weigh(keys, self.match(keys, block_tokens), weights)
