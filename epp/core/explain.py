"""Why an endpoint was picked, in words a person can read and in a label a graph can use.

Everything is derived from the decision itself: no work is done for it on the way of a request. It
has to be asked before the next decision, since loads are read where they are.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from epp.core.decide import Decision
from epp.core.latency.forecast import matched_tokens
from epp.core.model import Endpoint, Pick


class Reason(StrEnum):
    """The one-word reason of a pick."""

    PREFIX = "prefix"
    """No other candidate held more of the prompt."""
    LOAD = "load"
    """No candidate held any of the prompt: load decided."""
    SPREAD = "spread"
    """Others held more of the prompt; other scores outweighed it."""
    ONLY = "only"
    """There was no other candidate."""


def reason_of(decision: Decision) -> Reason:
    """Classify a pick."""
    pick, match = decision.pick, decision.request.match
    if len(pick.candidates) <= 1:
        return Reason.ONLY
    by_slot = match.by_slot
    if not by_slot:
        return Reason.LOAD
    own = by_slot.get(pick.endpoint.slot, 0)
    if own and own == max(by_slot.values()):
        return Reason.PREFIX
    if any(by_slot.get(e.slot, 0) > own for e in pick.candidates):
        return Reason.SPREAD
    return Reason.PREFIX if own else Reason.LOAD


def explain(decision: Decision) -> str:
    """One sentence: who was picked, what spoke for it, and who came second."""
    pick = decision.pick
    if pick.by_cost:
        return _explain_costs(decision)
    text = f"{_describe(pick.endpoint, decision)}: {_total(pick.endpoint, decision)}"
    order = sorted(range(len(pick.candidates)), key=lambda i: -pick.totals[i])
    others = [pick.candidates[i] for i in order if pick.candidates[i] is not pick.endpoint]
    if not others:
        return f"{text}; the only candidate"
    second = others[0]
    return f"{text}; next {_describe(second, decision)}: {_total(second, decision)}"


def _explain_costs(decision: Decision) -> str:
    """What stands before the request where it goes and what it costs there; what it would have
    cost at the next best, and at the one that holds the most, if that is another."""
    pick = decision.pick
    chosen, *others = by_rank(pick)
    costs = f"costs {_seconds(_cost(chosen, decision))}"
    parts = [_held_in_words(chosen, decision), _behind(chosen, decision) or "nothing before it"]
    text = f"{pick.endpoint.address}: {', '.join(parts)}, {costs}{_late(chosen, decision)}"
    if pick.endpoint.on_probation:
        text += ", tried again after an ejection"
    if not others:
        return f"{text}; the only candidate"
    held = [_held(endpoint, decision) for endpoint in pick.candidates]
    shown = [others[0]]
    most = max(others, key=held.__getitem__)
    if most != others[0] and held[most] > max(held[chosen], held[others[0]]):
        shown.append(most)
    return "; ".join([text, *(_would_cost(at, decision) for at in shown)])


def by_rank(pick: Pick) -> list[int]:
    """Indices of the candidates, the picked one first, then the best first."""
    scores = pick.scores
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return sorted(order, key=lambda i: pick.candidates[i] is not pick.endpoint)


def _would_cost(at: int, decision: Decision) -> str:
    endpoint = decision.pick.candidates[at]
    held = _held(endpoint, decision)
    how = f"with {held} cached" if held else "cold"
    behind = _behind(at, decision)
    text = f"{endpoint.address} would cost {_seconds(_cost(at, decision))} {how}"
    return f"{text}{behind and f', {behind}'}{_late(at, decision)}"


def _held(endpoint: Endpoint, decision: Decision) -> int:
    request = decision.request
    return matched_tokens(request, endpoint, max(1, request.prompt_tokens))


def _held_in_words(at: int, decision: Decision) -> str:
    tokens = max(1, decision.request.prompt_tokens)
    held = _held(decision.pick.candidates[at], decision)
    return f"{held} of {tokens} tokens cached" if held else f"{tokens} tokens to compute"


def _behind(at: int, decision: Decision) -> str:
    """What has to be computed there before the request; empty when nothing has."""
    endpoint = decision.pick.candidates[at]
    backlog_s = _term("backlog", at, decision)
    if not backlog_s:
        return ""
    # The charge is already taken: this request itself does not count.
    charge = decision.charge
    own = endpoint.waiting_requests - (endpoint is charge.endpoint and charge.waiting)
    prefills = own + endpoint.foreign_waiting
    of_what = f"behind {prefills} prefill{'s' if prefills != 1 else ''}"
    return f"{_seconds(backlog_s)} {of_what}{'' if endpoint.proven else ' and not proven yet'}"


def _late(at: int, decision: Decision) -> str:
    return ", later than promised" if _term("late", at, decision) else ""


def _cost(at: int, decision: Decision) -> float:
    """Without what is added or taken off for a broken promise or a first try."""
    return sum(term.scores[at] for term in decision.pick.terms if term.name != "late")


def _term(name: str, at: int, decision: Decision) -> float:
    return next((term.scores[at] for term in decision.pick.terms if term.name == name), 0.0)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds:.3f} s"


def _describe(endpoint: Endpoint, decision: Decision) -> str:
    request = decision.request
    match = request.match
    held = min(request.prompt_tokens, match.by_slot.get(endpoint.slot, 0) * match.block_tokens)
    load = endpoint.load
    # The charge is already taken: this request itself does not count.
    before = endpoint.inflight_requests - (endpoint is decision.charge.endpoint)
    waiting = "unknown" if load.waiting is None else load.waiting
    return (
        f"{endpoint.address} ({held} of {request.prompt_tokens} tokens cached, "
        f"{before} in flight, {waiting} waiting)"
    )


def _total(endpoint: Endpoint, decision: Decision) -> str:
    pick = decision.pick
    at = next(i for i, e in enumerate(pick.candidates) if e is endpoint)
    terms = " + ".join(f"{t.weight:g}x{t.scores[at]:.2f} {t.name}" for t in pick.terms)
    return f"{pick.totals[at]:.3f} = {terms}" if terms else f"{pick.totals[at]:.3f}"


def terms_of(decision: Decision) -> dict[str, float]:
    """The picked endpoint's total and what it is made of: scores, of a cost seconds."""
    pick = decision.pick
    at = next(i for i, e in enumerate(pick.candidates) if e is pick.endpoint)
    terms = {term.name: round(term.scores[at], 6) for term in pick.terms}
    return {**terms, "total": round(pick.totals[at], 6)}


def table(decision: Decision) -> str:
    """A line per candidate, the picked one first and marked: what it holds and all its terms."""
    pick = decision.pick
    unit = " s" if pick.by_cost else ""
    names = [
        f"{term.name} s" if pick.by_cost else f"{term.weight:g} x {term.name}"
        for term in pick.terms
    ]
    rows = [["endpoint", "cached tokens", *names, f"{'cost' if pick.by_cost else 'total'}{unit}"]]
    for at in by_rank(pick):
        endpoint = pick.candidates[at]
        numbers = [*(term.scores[at] for term in pick.terms), pick.totals[at]]
        mark = "* " if endpoint is pick.endpoint else "  "
        held = str(_held(endpoint, decision))
        rows.append([mark + endpoint.address, held, *(f"{number:.4f}" for number in numbers)])
    rows[0][0] = f"  {rows[0][0]}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def report(decision: Decision) -> dict[str, Any]:
    """The same for machines, with the sentence and the one-word reason."""
    pick, request = decision.pick, decision.request
    return {
        "endpoint": pick.endpoint.address,
        "fallbacks": [endpoint.address for endpoint in pick.fallbacks],
        "reason": reason_of(decision).value,
        "sentence": explain(decision),
        "model": request.model,
        "prompt_tokens": request.prompt_tokens,
        "by_cost": pick.by_cost,
        "weights": {term.name: term.weight for term in pick.terms},
        "candidates": [
            {
                "endpoint": pick.candidates[at].address,
                "cached_tokens": _held(pick.candidates[at], decision),
                "terms": {term.name: term.scores[at] for term in pick.terms},
                "total": pick.totals[at],
            }
            for at in by_rank(pick)
        ],
    }
