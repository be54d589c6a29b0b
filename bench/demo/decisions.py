"""Reads the picker's decisions back from its own log (`--v 4`, JSON): who, why, in its words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from epp.core.explain import Reason

PICKED = re.compile(r"picked (?P<address>\S+?):? \(?(?:(?P<held>\d+) of )?\d+ tokens")


class Decided(msgspec.Struct, frozen=True):
    """One decision."""

    request_id: str
    address: str
    reason: Reason
    held_tokens: int
    """Of the prompt, thought to be cached where it went."""
    sentence: str
    """The log's whole sentence."""


class _Line(msgspec.Struct):
    message: str
    reason: Reason
    request_id: str = ""


def read_decisions(log: Iterable[str]) -> list[Decided]:
    """The decisions in a log, in order; other lines are passed over."""
    decided = []
    for text in log:
        if '"picked ' not in text:
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError:
            continue  # the last line of a log that is being written
        picked = PICKED.match(line.message)
        if picked is not None:
            held = int(picked["held"] or 0)
            made = Decided(line.request_id, picked["address"], line.reason, held, line.message)
            decided.append(made)
    return decided


def examples(decided: Iterable[Decided]) -> list[Decided]:
    """One decision per reason: where most was cached, the latest of equals."""
    best: dict[Reason, Decided] = {}
    for one in decided:
        known = best.get(one.reason)
        if known is None or one.held_tokens >= known.held_tokens:
            best[one.reason] = one
    return [best[reason] for reason in Reason if reason in best]
