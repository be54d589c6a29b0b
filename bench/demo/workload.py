"""What is sent and when: a pure function of shape, phases and seed, so that two runs get the same.

Chats are held in a fixed number of slots: one conversation after the other, each on the system
prompt of one of a few applications. Every turn sends the whole conversation so far. The assistant's
part is made up here, not taken from the answers, so that the bodies do not depend on who answered.
Between the turns come unrelated prompts, each the only one of its kind. Arrival times are fixed:
nobody waits for an answer, so a slow pool does not slow its clients down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from bench.engine.tokens import TOKEN_BYTES, WORDS


class Kind(StrEnum):
    """What a request is part of."""

    CHAT = "chat"
    UNRELATED = "unrelated"


class Phase(msgspec.Struct, frozen=True):
    """A part of the run in which one thing is wrong, or nothing."""

    name: str
    duration_s: float


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How large and how many. Ranges are inclusive and drawn from evenly."""

    applications: int = 4
    """Different system prompts."""
    system_tokens: int = 2000
    chat_slots: int = 18
    """Conversations going on at any time."""
    turns: tuple[int, int] = (4, 8)
    """Turns of one conversation."""
    first_tokens: tuple[int, int] = (4000, 6000)
    """What the user says first: a question with a document pasted."""
    turn_tokens: tuple[int, int] = (100, 500)
    """What the user adds in every later turn."""
    turn_gap_s: tuple[float, float] = (1.5, 3.5)
    """From one turn to the next."""
    ramp_s: float = 10.0
    """The slots begin one after the other over this time: they are not all at turn 1 at once."""
    unrelated_per_s: float = 2.0
    unrelated_tokens: tuple[int, int] = (1000, 2500)
    output_tokens: tuple[int, int] = (16, 40)

    @property
    def longest_tokens(self) -> int:
        """Of any request, prompt and output."""
        turn = self.turn_tokens[1] + self.output_tokens[1]
        chat = self.system_tokens + self.first_tokens[1] + self.turns[1] * turn
        return max(chat, self.unrelated_tokens[1] + self.output_tokens[1])

    def fitted(self, model_len: int) -> Shape:
        """The same with shorter prompts, if the longest request needs more than `model_len`."""
        # A tenth is left for the chat template and the tokenizer's ways.
        factor = min(1.0, 0.9 * model_len / self.longest_tokens)
        return msgspec.structs.replace(
            self,
            system_tokens=int(self.system_tokens * factor),
            first_tokens=_scaled(self.first_tokens, factor),
            turn_tokens=_scaled(self.turn_tokens, factor),
            unrelated_tokens=_scaled(self.unrelated_tokens, factor),
            output_tokens=_scaled(self.output_tokens, factor),
        )


class Planned(msgspec.Struct, frozen=True):
    """One request to send."""

    id: str
    """Sent as `x-request-id`; unique in the plan."""
    kind: Kind
    phase: int
    """Index of its phase."""
    at_s: float
    """When, counted from the start of the run."""
    messages: tuple[tuple[str, str], ...]
    """(role, content)."""
    output_tokens: int

    def body(self, model: str) -> bytes:
        """The JSON body of a streamed chat completion."""
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return json.dumps(
            {
                "model": model,
                "messages": messages,
                "max_tokens": self.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


class Plan(msgspec.Struct, frozen=True):
    """A whole run."""

    phases: tuple[Phase, ...]
    requests: tuple[Planned, ...]
    """In order of arrival."""

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    def start_s(self, phase: int) -> float:
        """When phase `phase` begins, from the start of the run."""
        return sum(p.duration_s for p in self.phases[:phase])


def make_plan(shape: Shape, phases: Sequence[Phase], *, seed: int, nonce: str = "") -> Plan:
    """Plan a run.

    Args:
        nonce: begins every prompt. Two plans that differ in nothing else share no prefix: fresh
            caches on engines that cannot be restarted.
    """
    plan = Plan(tuple(phases), ())
    writer = _Writer(Random(seed), shape, nonce)
    requests = _unrelated(plan, writer, shape)
    systems = [writer.text(shape.system_tokens, opening=True) for _ in range(shape.applications)]
    for slot in range(shape.chat_slots):
        requests += _slot(plan, writer, shape, slot, systems)
    requests.sort(key=lambda request: (request.at_s, request.id))
    return Plan(plan.phases, tuple(requests))


class _Writer:
    """Makes text and numbers from one source of chance."""

    def __init__(self, rng: Random, shape: Shape, nonce: str) -> None:
        self.rng = rng
        self.shape = shape
        self._nonce = nonce

    def text(self, tokens: int, *, opening: bool = False) -> str:
        """`tokens` tokens of words by the simulated engine's count, somewhat fewer by others';
        `opening`: it is the beginning of a prompt."""
        size = tokens * TOKEN_BYTES
        words = " ".join(self.rng.choices(WORDS, k=size // 5 + 8))
        text = f"{self._nonce} {words}" if opening and self._nonce else words
        return text[:size]

    def between(self, bounds: tuple[int, int]) -> int:
        return self.rng.randint(*bounds)

    def output_tokens(self) -> int:
        return self.between(self.shape.output_tokens)


def _unrelated(plan: Plan, writer: _Writer, shape: Shape) -> list[Planned]:
    requests: list[Planned] = []
    if shape.unrelated_per_s <= 0:
        return requests
    at_s = writer.rng.expovariate(shape.unrelated_per_s)
    while at_s < plan.duration_s:
        text = writer.text(writer.between(shape.unrelated_tokens), opening=True)
        name = f"unrelated-{len(requests) + 1}"
        messages = (("user", text),)
        requests.append(
            _planned(plan, name, Kind.UNRELATED, at_s, messages, writer.output_tokens())
        )
        at_s += writer.rng.expovariate(shape.unrelated_per_s)
    return requests


def _slot(
    plan: Plan, writer: _Writer, shape: Shape, slot: int, systems: Sequence[str]
) -> list[Planned]:
    """The conversations of one slot, one after the other."""
    requests: list[Planned] = []
    at_s = shape.ramp_s * (slot + writer.rng.random()) / shape.chat_slots
    chat = 0
    while at_s < plan.duration_s:
        chat += 1
        messages: list[tuple[str, str]] = [("system", systems[(slot + chat) % len(systems)])]
        for turn in range(1, writer.between(shape.turns) + 1):
            output_tokens = writer.output_tokens()
            size = shape.first_tokens if turn == 1 else shape.turn_tokens
            messages.append(("user", writer.text(writer.between(size))))
            name = f"chat-{slot + 1}.{chat}-turn-{turn}"
            requests.append(_planned(plan, name, Kind.CHAT, at_s, tuple(messages), output_tokens))
            messages.append(("assistant", writer.text(output_tokens)))
            at_s += writer.rng.uniform(*shape.turn_gap_s)
            if at_s >= plan.duration_s:
                break
    return requests


def _planned(
    plan: Plan,
    name: str,
    kind: Kind,
    at_s: float,
    messages: tuple[tuple[str, str], ...],
    output_tokens: int,
) -> Planned:
    phase = max(i for i in range(len(plan.phases)) if plan.start_s(i) <= at_s)
    return Planned(name, kind, phase, at_s, messages, output_tokens)


def _scaled(bounds: tuple[int, int], factor: float) -> tuple[int, int]:
    return max(1, int(bounds[0] * factor)), max(1, int(bounds[1] * factor))
