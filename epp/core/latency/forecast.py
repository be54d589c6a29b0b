"""What a request would cost on each endpoint, in seconds, by rates learned from what passes by.

`Forecast` owns the learner and hands out what decisions need of it: an endpoint's rates as a plain
tuple, the prefill a picked endpoint is charged with, predictions for plugins that compare them with
a promise. It follows the pool (`PoolListener`): a new process starts at the pool's rates, and what
other routers send is estimated from each scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import NamedTuple

from epp.core.inflight import Charge, Prefill
from epp.core.latency.rates import RateLearner
from epp.core.model import Endpoint, Load, Prediction, Request

CHUNK_TOKENS = 8192
"""Prompt tokens an engine computes per step (vLLM's `max_num_batched_tokens`)."""
TOKENS_MIN = 8
"""Output tokens from which the mean time per token says something."""
OUTPUT_TOKENS = 300
"""Output expected of a request that sets no limit, until answers have been seen."""
OUTPUT_TOKENS_MAX = 8_192
"""No answer counts as longer in the mean: one absurd count must not keep charges for years."""
MEAN_WEIGHT = 0.02
"""Part of each new value in a running mean."""
BELIEVED_SCRAPES = 2
"""Scrapes in a row that must show foreign requests: one that ends just then looks foreign once."""


class Constants(NamedTuple):
    """`Rates` of one endpoint, as the loop over all endpoints wants them."""

    token_s: float
    pair_s: float
    step_s: float
    step_request_s: float
    step_token_s: float


class PrefillTotals(NamedTuple):
    """An engine's prefills since it started, as its histograms count them."""

    seconds: float
    tokens: float
    prefills: int


class Forecast:
    """See the module. One per pool."""

    def __init__(
        self, learner: RateLearner | None = None, *, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """`chunk_tokens`: prompt tokens an engine computes per step."""
        self.learner = learner or RateLearner(chunk_tokens=chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self.work_s_mean = 0.0
        """Mean prefill work of the requests charged, seconds; 0 before the first."""
        self.output_tokens_mean = float(OUTPUT_TOKENS)
        self._constants: dict[int, Constants] = {}
        self._constants_version = -1
        self._foreign: dict[Endpoint, list[tuple[int, int]]] = {}
        """What the last scrapes showed of others' requests: (in the engine, waiting), newest
        last."""
        self._totals: dict[Endpoint, PrefillTotals] = {}
        """As the last scrape told them."""

    def constants(self) -> Mapping[int, Constants]:
        """Rates by slot, of every endpoint alive."""
        learner = self.learner
        if learner.version != self._constants_version:
            self._constants_version = learner.version
            for slot in self._constants:
                self._constants[slot] = self._read(slot)
        return self._constants

    def _read(self, slot: int) -> Constants:
        r = self.learner.rates(slot)
        return Constants(r.token_s, r.pair_s, r.step_s, r.step_request_s, r.step_token_s)

    def decode_step_s(self, endpoint: Endpoint) -> float:
        """Seconds of one decode step there, with the requests that are in the engine now."""
        requests = endpoint.inflight_requests + endpoint.foreign_requests
        return step_of(self._of(endpoint), requests, endpoint.context_tokens)

    def place_s(self, endpoint: Endpoint, seqs_max: int) -> float:
        """Seconds until a request that goes there now is one of the `seqs_max` that run: as many
        have to end as are too many. 0 where there is a place."""
        requests = endpoint.inflight_requests + endpoint.foreign_requests
        if requests < seqs_max:
            return 0.0
        answer_s = self.decode_step_s(endpoint) * self.output_tokens_mean
        return (requests + 1 - seqs_max) * answer_s / seqs_max

    def token_s(self, endpoint: Endpoint) -> float:
        """Seconds to compute one prompt token there, without attention."""
        return self._of(endpoint).token_s

    def prefill_s(self, request: Request, endpoint: Endpoint) -> float:
        """Seconds of the request's own prefill there, with what the endpoint holds or computes."""
        prompt_tokens = max(1, request.prompt_tokens)
        matched = matched_tokens(request, endpoint, prompt_tokens)
        return work_of(self._of(endpoint), prompt_tokens - matched, matched)

    def _of(self, endpoint: Endpoint) -> Constants:
        return self.constants().get(endpoint.slot) or self._read(endpoint.slot)

    def backlog_s(self, endpoint: Endpoint, now_s: float) -> float:
        """Seconds of prefill in front of a request that goes to `endpoint` now."""
        own_s = endpoint.backlog.seconds(now_s)
        at_s = endpoint.load.at_s
        if not endpoint.foreign_waiting or at_s is None:
            return own_s
        foreign_s = endpoint.foreign_waiting * self.work_s_mean
        return own_s + max(0.0, foreign_s - max(0.0, now_s - at_s))

    def predict(
        self,
        request: Request,
        endpoints: Iterable[Endpoint],
        now_s: float,
        *,
        tpot_ratio: float = 1.0,
    ) -> dict[int, Prediction]:
        """What the request can expect, by slot.

        Args:
            tpot_ratio: factor of each time per output token.
        """
        constants = self.constants()
        return {
            e.slot: self._predict(request, e, constants[e.slot], now_s, tpot_ratio)
            for e in endpoints
            if e.slot in constants
        }

    def _predict(
        self,
        request: Request,
        endpoint: Endpoint,
        rates: Constants,
        now_s: float,
        tpot_ratio: float = 1.0,
    ) -> Prediction:
        prompt_tokens = max(1, request.prompt_tokens)
        matched = matched_tokens(request, endpoint, prompt_tokens)
        uncached = prompt_tokens - matched
        work_s = work_of(rates, uncached, matched)
        backlog_s = self.backlog_s(endpoint, now_s)
        requests = endpoint.inflight_requests + endpoint.foreign_requests
        step_s = step_of(rates, requests, endpoint.context_tokens)
        steps = ceil((backlog_s / rates.token_s + uncached) / self.chunk_tokens)
        return Prediction(
            ttft_s=backlog_s + work_s + steps * step_s,
            tpot_s=tpot_ratio
            * step_of(rates, requests + 1, endpoint.context_tokens + prompt_tokens),
        )

    def prefill(
        self, request: Request, endpoint: Endpoint, *, now_s: float, blind: bool
    ) -> Prefill:
        """What `endpoint` is charged with for `request`. A block it is still computing for an
        earlier request counts as held: by the time this one is computed, it is."""
        prompt_tokens = max(1, request.prompt_tokens)
        matched = matched_tokens(request, endpoint, prompt_tokens)
        rates = self._of(endpoint)
        seconds = work_of(rates, prompt_tokens - matched, matched)
        mean_s = self.work_s_mean
        self.work_s_mean = mean_s + MEAN_WEIGHT * (seconds - mean_s) if mean_s else seconds
        predicted = self._predict(request, endpoint, rates, now_s)
        return Prefill(
            prompt_tokens=prompt_tokens,
            matched_tokens=matched,
            seconds=seconds,
            blind=blind,
            ttft_s=predicted.ttft_s,
            tpot_s=predicted.tpot_s,
        )

    def output_s(self, request: Request, endpoint: Endpoint) -> float:
        """Seconds from the first token to the last of an answer nobody watches."""
        tokens = self.output_tokens_mean
        if request.max_output_tokens is not None:
            tokens = min(tokens, float(request.max_output_tokens))
        rates = self._of(endpoint)
        return tokens * step_of(rates, endpoint.inflight_requests, endpoint.context_tokens)

    # -- what is learned -------------------------------------------------------------------

    def first_byte(
        self, charge: Charge, endpoint: Endpoint, service_s: float, now_s: float
    ) -> None:
        """A first byte came when it was due to be seen, after so much service."""
        endpoint.proven = True
        prefill = charge.prefill
        self.learner.first_byte(
            endpoint.slot,
            uncached_tokens=prefill.prompt_tokens - prefill.matched_tokens,
            matched_tokens=prefill.matched_tokens,
            service_s=service_s,
            decoding=endpoint.inflight_requests - endpoint.waiting_requests,
            decode_tokens=endpoint.context_tokens,
            now_s=now_s,
        )

    def ended(
        self,
        charge: Charge,
        endpoint: Endpoint,
        *,
        output_tokens: int,
        decode_s: float | None,
        now_s: float,
    ) -> None:
        """An answer ended well.

        Args:
            output_tokens: as the engine counted them, or the events seen.
            decode_s: seconds from its first byte to its last; `None` when it was not streamed.
        """
        believed = min(max(output_tokens, 0), OUTPUT_TOKENS_MAX)
        self.output_tokens_mean += MEAN_WEIGHT * (believed - self.output_tokens_mean)
        if decode_s is None or output_tokens < TOKENS_MIN or decode_s <= 0.0:
            return
        inflight = (charge.inflight_at_first_byte + endpoint.inflight_requests) // 2
        context = (charge.context_tokens_at_first_byte + endpoint.context_tokens) // 2
        self.learner.decoded(
            endpoint.slot,
            step_s=decode_s / (output_tokens - 1),
            inflight=inflight,
            inflight_tokens=context,
            now_s=now_s,
            decode_s=decode_s,
        )

    # -- PoolListener ----------------------------------------------------------------------

    def joined(self, endpoint: Endpoint) -> None:
        self.learner.joined(endpoint.slot)
        self._constants[endpoint.slot] = self._read(endpoint.slot)

    def left(self, endpoint: Endpoint) -> None:
        self.learner.forget(endpoint.slot)
        self._constants.pop(endpoint.slot, None)
        self._foreign.pop(endpoint, None)
        self._totals.pop(endpoint, None)

    def restarted(self, endpoint: Endpoint) -> None:
        self.learner.restarted(endpoint.slot)
        self._totals.pop(endpoint, None)
        endpoint.proven = False

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:  # noqa: ARG002
        """It has to prove itself again."""
        endpoint.proven = False

    def recovered(self, endpoint: Endpoint) -> None:
        """Its next first byte proves it."""

    def scraped(self, endpoint: Endpoint) -> None:
        load = endpoint.load
        self._learn_totals(endpoint, load)
        endpoint.kv.capacity_tokens = (load.kv_blocks or 0) * (load.kv_block_tokens or 0)
        if load.running is None or load.waiting is None:
            endpoint.foreign_requests = endpoint.foreign_waiting = 0
            self._foreign.pop(endpoint, None)
            return
        requests = max(0, load.running + load.waiting - endpoint.inflight_requests)
        # An engine that preempts counts requests of ours as waiting that have begun to answer.
        waiting = min(requests, max(0, load.waiting - endpoint.waiting_requests))
        seen = self._foreign.setdefault(endpoint, [])
        seen.append((requests, waiting))
        del seen[:-BELIEVED_SCRAPES]
        endpoint.foreign_requests = min(requests for requests, _ in seen)
        endpoint.foreign_waiting = min(waiting for _, waiting in seen)
        if len(seen) < BELIEVED_SCRAPES:
            endpoint.foreign_requests = endpoint.foreign_waiting = 0

    def _learn_totals(self, endpoint: Endpoint, load: Load) -> None:
        """Tell the learner by how much the engine's prefill totals grew since the scrape before.
        The first ones, and those that fell because the engine started again, only begin a count."""
        old, new = self._totals.pop(endpoint, None), totals_of(load)
        if new is None or load.at_s is None:
            return
        self._totals[endpoint] = new
        if old is None or any(now < before for now, before in zip(new, old, strict=True)):
            old = new
        self.learner.histograms(
            endpoint.slot,
            prefill_s=new.seconds - old.seconds,
            computed_tokens=new.tokens - old.tokens,
            prefills=new.prefills - old.prefills,
            now_s=load.at_s,
        )


def totals_of(load: Load) -> PrefillTotals | None:
    """`None` when one of them was not reported: none is of use without the others."""
    seconds, tokens, prefills = load.prefill_s_sum, load.prefill_tokens_sum, load.prefills
    if seconds is None or tokens is None or prefills is None:
        return None
    return PrefillTotals(seconds, tokens, prefills)


def work_of(rates: Constants, uncached_tokens: int, matched_tokens: int) -> float:
    """Seconds of prefill: linear in the new tokens, plus their attention to all before them."""
    pairs = uncached_tokens * (matched_tokens + uncached_tokens / 2)
    return rates.token_s * uncached_tokens + rates.pair_s * pairs


def step_of(rates: Constants, requests: int, context_tokens: int) -> float:
    """Seconds of one decode step with so many requests over so many tokens of context."""
    return rates.step_s + rates.step_request_s * requests + rates.step_token_s * context_tokens


def matched_tokens(request: Request, endpoint: Endpoint, prompt_tokens: int) -> int:
    """Tokens of the prompt the endpoint holds or is computing; the last one is always computed."""
    match = request.match
    blocks = match.by_slot.get(endpoint.slot, 0)
    return min(prompt_tokens - 1, blocks * match.block_tokens)
