"""Requests whose events may still come, and which endpoints name our requests in their events."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from epp.core.kvtext.path import Path

ENDED_MAX = 1000
ENDED_S_MAX = 60.0
"""Events trail behind the answer; after so many later ends, or seconds, none is expected."""
LIVE_MAX = 65_536
SILENCE_MAX = 8
"""Requests of ours without an event, and events without a request of ours, until an endpoint is
taken for one that does not pass the ids on."""


class Sent:
    """One request on its way; its path is dropped as soon as its text is in the tree."""

    __slots__ = (
        *("block_tokens", "blocks", "chunks", "ended", "family", "guessed", "heard", "key"),
        *("linked", "path", "prefill_blocks", "prompt_tokens", "slot", "text_bytes", "tip"),
        "ended_s",
    )

    def __init__(self, slot: int, path: Path | None) -> None:
        self.slot = slot
        self.path: Path | None = None
        self.key = self.chunks = self.family = self.text_bytes = 0
        if path is not None and path.keys:
            keys, ends = array("Q", path.keys), array("Q", path.ends)
            self.path = Path(keys, ends, family=path.family)
            self.key, self.chunks = keys[-1], len(keys)
            self.family, self.text_bytes = path.family, ends[-1]
        self.tip = self.blocks = 0
        """Last block known of its chain, and the chain's length; 0 = none yet."""
        self.prefill_blocks = 0
        """Of these, the ones that came in batches, so of the prompt."""
        self.block_tokens = 0
        self.prompt_tokens: int | None = None
        self.linked = False
        self.guessed = False
        """Its chain was not named by an event: it looked as if the engine had it all."""
        self.heard = False
        self.ended = False
        self.ended_s = 0.0


class Outbox:
    """Live requests, and for a while ended ones, by session id."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._live: OrderedDict[str, Sent] = OrderedDict()
        self._ended: OrderedDict[str, Sent] = OrderedDict()
        self.chunks = 0
        """Chunks of all paths kept here."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def get(self, session_id: str) -> Sent | None:
        return self._live.get(session_id) or self._ended.get(session_id)

    def add(self, session_id: str, sent: Sent) -> None:
        """A request was sent; one with the same id is replaced."""
        self.remove(session_id)
        self._live[session_id] = sent
        if sent.path is not None:
            self.chunks += sent.chunks
        while len(self._live) > LIVE_MAX or self.chunks > self._chunks_max:
            self._drop(self._ended or self._live)

    def drop_path(self, sent: Sent) -> None:
        """Its text is in the tree."""
        if sent.path is not None:
            sent.path = None
            self.chunks -= sent.chunks

    def end(self, session_id: str, now_s: float) -> Sent | None:
        """The request is over; `None` if it is not live."""
        sent = self._live.pop(session_id, None)
        if sent is not None:
            sent.ended = True
            sent.ended_s = now_s
            self._ended[session_id] = sent
        self.expire(now_s)
        return sent

    def expire(self, now_s: float) -> None:
        """Drop ended requests of which no event is expected any more."""
        ended = self._ended
        while ended and (
            len(ended) > ENDED_MAX or next(iter(ended.values())).ended_s < now_s - ENDED_S_MAX
        ):
            self._drop(ended)

    def forget(self, slot: int) -> None:
        """What was sent there will have no more events."""
        for table in (self._live, self._ended):
            for session_id in [key for key, sent in table.items() if sent.slot == slot]:
                self.remove(session_id)

    def remove(self, session_id: str) -> None:
        for table in (self._live, self._ended):
            sent = table.pop(session_id, None)
            if sent is not None:
                self.drop_path(sent)

    def __iter__(self) -> Iterator[Sent]:
        yield from self._live.values()
        yield from self._ended.values()

    def _drop(self, table: OrderedDict[str, Sent]) -> None:
        self.drop_path(table.popitem(last=False)[1])


class _Voice:
    """What one endpoint's events say of our requests."""

    __slots__ = ("names_us", "others", "unheard")

    def __init__(self) -> None:
        self.names_us = False
        self.unheard = 0
        """Requests of ours that ended since it last named one, none of them named."""
        self.others = 0
        """Events since then that name no request of ours."""


class Voices:
    """Which endpoints pass our ids on, by slot; nobody does until it was heard to."""

    def __init__(self) -> None:
        self._voices: dict[int, _Voice] = {}

    def names_us(self, slot: int) -> bool:
        """It was heard to name ours, and not found silent since."""
        voice = self._voices.get(slot)
        return voice is not None and voice.names_us

    def heard(self, slot: int) -> None:
        """An event named a request of ours."""
        voice = self._voice(slot)
        voice.names_us = True
        voice.unheard = voice.others = 0

    def other(self, slot: int) -> None:
        """An event named none of ours."""
        voice = self._voice(slot)
        voice.others += 1
        self._judge(voice)

    def unheard(self, slot: int) -> None:
        """A request of ours ended, and no event has named it: a hit, or a silent engine."""
        voice = self._voice(slot)
        voice.unheard += 1
        self._judge(voice)

    def forget(self, slot: int) -> None:
        self._voices.pop(slot, None)

    def _voice(self, slot: int) -> _Voice:
        voice = self._voices.get(slot)
        if voice is None:
            voice = self._voices[slot] = _Voice()
        return voice

    def _judge(self, voice: _Voice) -> None:
        if voice.unheard >= SILENCE_MAX and voice.others >= SILENCE_MAX:
            voice.names_us = False
