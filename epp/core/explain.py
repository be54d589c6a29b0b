"""Why an endpoint was picked, in words a person can read and in a label a graph can use.

Everything is derived from the decision itself: no work is done for it on the way of a request.
"""

from __future__ import annotations

from enum import StrEnum

from epp.core.decide import Decision
from epp.core.latency.forecast import matched_tokens
from epp.core.model import Endpoint


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
    pick = decision.pick
    order = sorted(range(len(pick.candidates)), key=pick.totals.__getitem__)
    chosen = next(i for i in order if pick.candidates[i] is pick.endpoint)
    text = f"{pick.endpoint.address}: {_cost(chosen, decision)}"
    others = [i for i in order if i != chosen]
    if not others:
        return f"{text}; the only candidate"
    return f"{text}; {pick.candidates[others[0]].address}: {_cost(others[0], decision)}"


def _cost(at: int, decision: Decision) -> str:
    """A candidate's cost in words: what it holds, what stands before the request, the sum."""
    request, pick = decision.request, decision.pick
    endpoint = pick.candidates[at]
    tokens = max(1, request.prompt_tokens)
    held = matched_tokens(request, endpoint, tokens)
    cached = f"{held} of {tokens} tokens cached" if held else f"{tokens} tokens to compute"
    terms = {term.name: term.scores[at] for term in pick.terms}
    backlog_s = terms.get("backlog", 0.0)
    # The charge is already taken: this request itself does not count.
    waiting = endpoint.waiting_requests - (endpoint is decision.charge.endpoint)
    prefills = f"{waiting} prefill{'s' if waiting != 1 else ''}"
    behind = f", {backlog_s:.2f} s behind {prefills}" if backlog_s else ", nothing before it"
    late = ", later than promised" if terms.get("late") else ""
    return f"{cached}{behind}, cost {pick.totals[at]:.3f} s{late}"


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
