"""The text index: which endpoint holds how many tokens of a prompt, told from its text.

For a prompt, `match` finds the deepest text known and how many tokens of the chain of blocks behind
it this prompt will share (`Why` names the five ways to tell), and asks the block index who holds
these blocks. What is known is learned from the events of our own requests: an event of a request
says which block its text had come to, the block index says which blocks were before it.

An id binds an event to a request only on the endpoint that got the request, and only while the
chain goes on from the block known before; so neither several prompts or answers under one id nor a
client that sets an id of its own can put wrong blocks to a text.

Cost: bench/kvtext.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median_low
from types import MappingProxyType
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from epp.core.kvindex import Joined
from epp.core.kvtext.habits import Habits
from epp.core.kvtext.path import Path, path_of
from epp.core.kvtext.sent import Outbox, Sent, Voices
from epp.core.kvtext.tree import NONE, Known, Met, TextTree
from epp.core.kvtext.view import TextView

NODES_MAX = 500_000
"""Default bound; a node takes up to 200 bytes."""
_BLOCK_SIZES_MAX = 8


class Blocks(Protocol):
    """What is needed of the block index."""

    def match(self, keys: Sequence[int], block_tokens: int) -> Mapping[int, int]:
        """Slot -> leading blocks of this chain that it holds; an absent slot holds none."""

    def holders(self, key: int) -> int:
        """Bit mask of the slots that hold a block."""

    def chain(self, tip: int, blocks: int) -> Sequence[int]:
        """The last `blocks` keys of the chain that ends with `tip`, prompt order; fewer where the
        index does not know what was before."""


class Why(StrEnum):
    """What a match was told from."""

    SAME = "same"
    """A prompt with this very text."""
    CONT = "cont"
    """A prompt that this one goes on from, with what the engine wrote after it."""
    END = "end"
    """The same, where other texts go on from it too: without what the engine wrote."""
    BRANCH = "branch"
    """Prompts were seen to part where this one parts from them."""
    INTERP = "interp"
    """By bytes, between two places of the kinds above."""
    NONE = "none"
    """No text known."""


class TextMatch(NamedTuple):
    """Who holds how much of a prompt."""

    tokens: Mapping[int, int] = MappingProxyType({})
    """Slot -> leading tokens held, whole blocks; an absent slot holds none."""
    why: Why = Why.NONE
    prompt_tokens: int = 0
    """Estimated tokens of the whole prompt."""


class TextIndex:
    """Owns what is remembered of texts; reads the block index, never writes it."""

    def __init__(self, blocks: Blocks, *, nodes_max: int = NODES_MAX, secret: bytes) -> None:
        """
        Args:
            nodes_max: bound of all that is remembered, at most 200 bytes each, see
                `TextTree.weight`.
            secret: of this process, any length.
        """
        self._blocks = blocks
        self._nodes_max = nodes_max
        self._secret = xxh3_64_intdigest(secret)
        self._trees: dict[int, TextTree] = {}
        """By tokens per block: chains of other sizes have no block in common."""
        self._sent = Outbox(nodes_max)
        self._voices = Voices()
        self._habits = Habits()

    # ---- requests

    def path(self, view: TextView, model: str) -> Path:
        """The text path of a prompt that goes to this model or adapter."""
        return path_of(view, model, self._secret)

    def dispatched(self, session_id: str, slot: int, path: Path | None) -> None:
        """A request was sent to this endpoint under a fresh id; once more if it goes elsewhere.

        Args:
            path: `None` if its text cannot be followed.
        """
        self._sent.add(session_id, Sent(slot, path))

    def ended(
        self, session_id: str, prompt_tokens: int | None, *, now_s: float, whole: bool = True
    ) -> None:
        """The request is over; events that trail behind still count.

        Args:
            prompt_tokens: as the engine reports them, if it does.
            whole: it was answered; else its prompt may be half computed, and its end is not taken
                for the end of a prompt.
        """
        sent = self._sent.end(session_id, now_s)
        if sent is None:
            return
        if not sent.heard and whole:
            self._voices.unheard(sent.slot)
        if sent.path is not None and not sent.linked:
            if sent.tip:
                self._link(sent)
            elif whole and prompt_tokens is not None:
                self._guess(sent, prompt_tokens)
        sent.prompt_tokens = prompt_tokens if whole else NONE
        self._finish(sent)

    def forget(self, slot: int) -> None:
        """The endpoint left or lost its cache: what was sent there is gone; texts stay."""
        self._sent.forget(slot)
        self._voices.forget(slot)

    # ---- events

    def unnamed(self, slot: int) -> None:
        """The endpoint stored blocks for nobody it can name."""
        self._voices.other(slot)

    def names_us(self, slot: int) -> bool:
        """The endpoint's events name our requests; of one whose events do not, this index knows
        nothing and another has to be asked."""
        return self._voices.names_us(slot)

    def joined(self, slot: int, join: Joined) -> None:
        """The endpoint stored blocks under a session id."""
        sent = self._sent.get(join.session_id)
        if sent is None or sent.slot != slot:
            self._voices.other(slot)
            return
        self._voices.heard(slot)
        sent.heard = True
        if sent.tip and not sent.guessed:
            self._follow(sent, join)
        elif join.blocks > 0 and self._tree(join.block_tokens) is not None:
            sent.tip, sent.blocks = join.tip, join.blocks
            sent.prefill_blocks = join.blocks
            sent.block_tokens = join.block_tokens
            sent.linked = sent.guessed = False
        if not sent.linked and sent.path is not None:
            self._link(sent, early=not sent.ended)
            if sent.ended:
                self._finish(sent)

    def _follow(self, sent: Sent, join: Joined) -> None:
        """One more event: it must go on from the block known before."""
        more = join.blocks - sent.blocks
        if more <= 0:
            return
        piece = self._blocks.chain(join.tip, more + 1)
        if len(piece) != more + 1 or piece[0] != sent.tip:
            return
        if sent.linked:
            tree = self._trees[sent.block_tokens]
            tree.extend(sent.key, sent.chunks, sent.tip, array("Q", piece[1:]))
            self._trim()
        sent.tip, sent.blocks = join.tip, join.blocks
        if more > 1:
            sent.prefill_blocks = join.blocks

    def _link(self, sent: Sent, *, early: bool = False) -> None:
        """Put the request's blocks to its text."""
        chain = self._blocks.chain(sent.tip, sent.blocks)
        if len(chain) == sent.blocks:
            self._add(sent, array("Q", chain), early=early)

    def _guess(self, sent: Sent, prompt_tokens: int) -> None:
        """No event: the engine had all its full blocks, which are the ones known of its text. But
        an event may still come, so this holds only for a text that is known almost whole."""
        path = sent.path
        if path is None:
            return
        for tree in self._trees.values():
            known = tree.find(path.keys)
            chain = tree.chain(known.segments)[: prompt_tokens // tree.block_tokens]
            new_bytes = path.text_bytes - (path.ends[known.chunks - 1] if known.chunks else 0)
            full = len(chain) == prompt_tokens // tree.block_tokens
            room = 2 * tree.block_tokens * self._habits.bytes_per_token(sent.family)
            if chain and full and new_bytes <= room:
                sent.tip, sent.blocks = chain[-1], len(chain)
                sent.block_tokens = tree.block_tokens
                self._add(sent, chain)
                sent.guessed = True
                return

    def _add(self, sent: Sent, chain: array[int], *, early: bool = False) -> None:
        path = sent.path
        if path is None:
            return
        tree = self._trees[sent.block_tokens]
        met = tree.add(path.keys, path.ends, chain, self._is_held, early=early)
        if met is None:
            return
        sent.linked = True
        self._learn_loss(sent, met, tree.block_tokens, len(chain))
        if sent.heard:
            self._sent.drop_path(sent)
        self._trim()

    def _learn_loss(self, sent: Sent, met: Met, block_tokens: int, blocks: int) -> None:
        """The text goes on from where a prompt ended: how much of that one did it keep?"""
        shared, ended = met.shared_blocks, met.ended_tokens
        if ended == NONE or met.chunks == sent.chunks or shared >= min(blocks, met.known_blocks):
            return
        kept_all = shared >= ended // block_tokens
        lost = 0.0 if kept_all else ended - (shared + 0.5) * block_tokens
        self._habits.saw_loss(sent.family, lost)

    def _finish(self, sent: Sent) -> None:
        """The request is over and in the tree: its prompt ends where its text ends."""
        if not sent.linked or sent.prompt_tokens == NONE:
            return
        size = sent.block_tokens
        tokens = sent.prompt_tokens
        if tokens is None:
            tokens = sent.prefill_blocks * size + size // 2
        self._trees[size].saw_end(sent.key, sent.chunks, tokens)
        self._habits.saw_prompt(sent.family, sent.text_bytes, tokens)

    def _is_held(self, key: int) -> bool:
        return self._blocks.holders(key) != 0

    # ---- bounds

    def _tree(self, block_tokens: int) -> TextTree | None:
        tree = self._trees.get(block_tokens)
        if tree is None and block_tokens > 0 and len(self._trees) < _BLOCK_SIZES_MAX:
            tree = self._trees[block_tokens] = TextTree(block_tokens)
        return tree

    def _trim(self) -> None:
        while self.nodes > self._nodes_max:
            if not max(self._trees.values(), key=_weight).evict():
                break

    @property
    def nodes(self) -> int:
        """What is remembered, see `TextTree.weight`."""
        return sum(map(_weight, self._trees.values()))

    @property
    def pending(self) -> int:
        """Requests whose events may still come."""
        return len(self._sent)

    # ---- matching

    def match(self, path: Path, prompt_tokens: int | None = None) -> TextMatch:
        """Who holds how much of a prompt.

        Args:
            prompt_tokens: its length, if that is known; no match is longer.
        """
        found: dict[int, int] = {}
        ratio = self._habits.bytes_per_token(path.family)
        best = TextMatch(found, Why.NONE, int(path.text_bytes / ratio))
        for tree in self._trees.values():
            known = tree.find(path.keys)
            if not known.chunks:
                continue
            chain = tree.chain(known.segments)
            shared, why = self._expect(tree, path, known, len(chain))
            rest_bytes = path.text_bytes - path.ends[known.chunks - 1]
            length = max(1, int(shared + rest_bytes / ratio))
            limit = min(shared, length if prompt_tokens is None else prompt_tokens)
            size = tree.block_tokens
            del chain[max(0, int(limit // size)) :]
            for slot, blocks in self._blocks.match(chain, size).items():
                found[slot] = max(found.get(slot, 0), blocks * size)
            if best.why is Why.NONE:
                best = TextMatch(found, why, length)
        return best

    def _expect(self, tree: TextTree, path: Path, known: Known, blocks: int) -> tuple[float, Why]:
        """Tokens that the prompt shares with the chain known for its text, and how that is told."""
        last = known.segments[-1]
        if known.chunks == tree.end(last):
            tokens = tree.tokens(last)
            if tokens != NONE:
                if known.chunks == len(path.keys):
                    return tokens - 1, Why.SAME
                return self._continued(tree, path, known, tokens, blocks)
            partings = tree.partings(last)
            if partings:
                return median_low(partings) + tree.block_tokens / 2 - 1, Why.BRANCH
        return self._between(tree, path, known, blocks), Why.INTERP

    def _continued(
        self, tree: TextTree, path: Path, known: Known, tokens: int, blocks: int
    ) -> tuple[float, Why]:
        """The text goes on after an earlier prompt. If with an answer, the blocks that the engine
        wrote then may serve too, as far as that answer reaches."""
        lost = self._habits.lost_tokens(path.family)
        why = Why.END if tree.grown(known.segments[-1]) else Why.CONT
        if lost or why is Why.END:
            return max(0.0, tokens - lost), why
        ratio = self._habits.bytes_per_token(path.family)
        written = path.reply_bytes(known.chunks) / ratio
        if not written:
            return tokens, why
        return min(tokens + written, blocks * tree.block_tokens), why

    def _between(self, tree: TextTree, path: Path, known: Known, blocks: int) -> float:
        """By bytes, between the last place behind us and the first one before us whose tokens are
        known."""
        *before, last = known.segments
        size = tree.block_tokens
        low_bytes, low = 0, 0.0
        lost = self._habits.lost_tokens(path.family)
        for segment in reversed(before):
            at = self._place(tree, segment, lost)
            if at is not None:
                low_bytes, low = tree.end_bytes(segment), at
                break
        high_bytes = tree.end_bytes(last)
        high = self._place(tree, last, 0.0)
        if high is None:
            ratio = self._habits.bytes_per_token(path.family)
            high = max(blocks * size, low + (high_bytes - low_bytes) / ratio)
        ratio = (path.ends[known.chunks - 1] - low_bytes) / max(1, high_bytes - low_bytes)
        return low + (high - low) * ratio

    @staticmethod
    def _place(tree: TextTree, segment: int, lost: float) -> float | None:
        """Tokens up to the segment's end, if they are known."""
        tokens = tree.tokens(segment)
        if tokens != NONE:
            return max(0.0, tokens - lost)
        partings = tree.partings(segment)
        return median_low(partings) + tree.block_tokens / 2 if partings else None


def _weight(tree: TextTree) -> int:
    return tree.weight
