"""What a request costs on each endpoint, in seconds: the loop of `expected`, in a module that may
be compiled (see `core.structs`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from epp.core.kvuse import KvUse, Units, units_of
from epp.core.latency.forecast import Forecast
from epp.core.model import Costs, Endpoint, Request, ScoreTerm
from epp.core.structs import Frozen

INFLIGHT_FULL: Final = 32
"""Requests in flight that count in full for what a prefill delays; of those beyond, only
`INFLIGHT_SLOPE`. In a large batch a prefill is hidden among the decodes, and counting all of them
would send the largest prompts behind the longest queues."""
INFLIGHT_SLOPE: Final = 0.3
TIE_STEPS: Final = 0.4
"""Costs closer than this part of a decode step are equal: less than that nobody can foretell."""
PROBE_S: Final = 1.0
"""What may be lost on the one request that finds out whether an ejected endpoint is well again."""
NEVER_S: Final = float("inf")
TERMS: Final = ("backlog", "work", "decode", "crowd", "memory")
Parts = tuple[float, float, float, float, float]
"""Of one endpoint's cost, seconds, in the order of `TERMS`."""


class Weights(Frozen, frozen=True):
    """The parameters of `ExpectedLatency`, which describes them."""

    own: float
    inflight: float
    waiting: float
    decode: float
    sharing: float
    memory: float
    chunk_tokens: int
    max_num_seqs: int
    slow_start_s: float


def costs_of(
    request: Request,
    endpoints: Sequence[Endpoint],
    forecast: Forecast,
    now_s: float,
    weights: Weights,
) -> Costs:
    """Costs of `endpoints` and their terms, shape (len(endpoints),), seconds."""
    tokens: int = max(1, request.prompt_tokens)
    by_slot, block_tokens = request.match.by_slot, request.match.block_tokens
    hot_tokens, hot_ratio = _hot(request, endpoints, weights.sharing) if by_slot else (0, 1.0)
    chain = request.chains[0] if len(request.chains) == 1 else ()
    units = units_of(chain, block_tokens, tokens)
    held_tokens: int = units.tokens
    constants = forecast.constants()
    output_tokens: float = forecast.output_tokens_mean
    crowding: float = weights.decode * output_tokens
    memory_steps: float = weights.memory * output_tokens
    chunk_tokens: int = weights.chunk_tokens
    seqs: int = weights.max_num_seqs
    least_step_s: float = NEVER_S
    costs: list[float] = []
    parts: list[Parts] = []
    for endpoint in endpoints:
        token_s, pair_s, step_s, step_request_s, step_token_s = constants[endpoint.slot]
        matched: int = 0
        if by_slot:
            matched = min(tokens - 1, by_slot.get(endpoint.slot, 0) * block_tokens)
        uncached: int = tokens - matched
        inflight: int = endpoint.inflight_requests
        waiting: int = endpoint.waiting_requests
        backlog_s: float = 0.0
        if waiting or endpoint.foreign_requests:
            inflight += endpoint.foreign_requests
            waiting += endpoint.foreign_waiting
            backlog_s = forecast.backlog_s(endpoint, now_s)
            if not endpoint.proven:
                backlog_s += weights.slow_start_s * waiting
        work_s: float = uncached * (token_s + pair_s * (matched + uncached / 2))
        if matched < hot_tokens:
            copied: int = hot_tokens - matched
            work_s -= hot_ratio * copied * (token_s + pair_s * (matched + copied / 2))
        delayed: float = min(inflight, INFLIGHT_FULL + INFLIGHT_SLOPE * (inflight - INFLIGHT_FULL))
        work_s *= weights.own + weights.inflight * delayed + weights.waiting * waiting
        context: int = endpoint.context_tokens
        decode_s: float = step_s + step_request_s * inflight + step_token_s * context
        chunks: int = ceil((backlog_s / token_s + uncached) / chunk_tokens)
        crowd_s: float = crowding * inflight * (step_request_s + step_token_s * tokens)
        kv, room_s = endpoint.kv, 0.0
        if kv.tokens + held_tokens > kv.capacity_tokens:
            room_s = memory_steps * _lacking(kv, units) * decode_s
        if inflight >= seqs:
            crowd_s += (inflight + 1 - seqs) * decode_s * output_tokens / seqs
        decode_s *= chunks
        least_step_s = min(least_step_s, step_s)
        cost_s: float = backlog_s + work_s + decode_s + crowd_s + room_s
        costs.append(max(0.0, cost_s - PROBE_S) if endpoint.on_probation else cost_s)
        parts.append((backlog_s, work_s, decode_s, crowd_s, room_s))
    return Costs(costs, _terms(parts), TIE_STEPS * least_step_s)


def _terms(parts: list[Parts]) -> tuple[ScoreTerm, ...]:
    """The columns of `parts` by name."""
    columns = [list(column) for column in zip(*parts, strict=True)] or [[] for _ in TERMS]
    terms = tuple([ScoreTerm(n, 1.0, c) for n, c in zip(TERMS, columns, strict=True)])
    # Where memory is no concern, as mostly, nobody wants to read of it.
    return terms if any(columns[-1]) else terms[:-1]


def _lacking(kv: KvUse, units: Units) -> float:
    """What a prompt lacks of an endpoint's KV cache, as a part of it: it turns over once in the
    time that an answer takes, so after that part of it there is room."""
    short: int = kv.short_tokens(units)
    return short / kv.capacity_tokens if short else 0.0


def _hot(request: Request, endpoints: Sequence[Endpoint], sharing: float) -> tuple[int, float]:
    """How much of the prompt others in flight share where it matches best, and which part of the
    work of a copy of it elsewhere those others pay.

    With k others, a copy is as good as ordered by 1 + sharing * (k - 1) requests.
    Returns: (tokens, ratio 0..1).
    """
    match = request.match
    blocks: int = max(match.by_slot.values())
    if not sharing or len(request.chains) != 1:
        return 0, 1.0
    units = units_of(request.chains[0][:blocks], match.block_tokens, blocks * match.block_tokens)
    if not units.names:
        return 0, 1.0
    name = units.names[-1]
    others: int = 0
    for endpoint in endpoints:
        if match.by_slot.get(endpoint.slot, 0) == blocks:
            others = max(others, endpoint.kv.holders(name))
    if others < 2:
        return 0, 1.0
    # The length is an estimate: there may be more blocks than tokens.
    shared_tokens: int = min(len(units.names) * units.unit_tokens, request.prompt_tokens - 1)
    return shared_tokens, 1.0 - 1.0 / (1.0 + sharing * (others - 1))
