"""What a request would cost on each endpoint, in seconds, by rates learned from what passes by.

`Forecast` owns the learner and hands out what decisions need of it: an endpoint's rates as a plain
tuple, the prefill a picked endpoint is charged with, predictions for plugins that compare them with
a promise. It follows the pool (`PoolListener`): a new process starts at the pool's rates, and what
other routers send is estimated from each scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from epp.core.inflight import Charge, Prefill
from epp.core.latency.rates import RateLearner
from epp.core.model import Endpoint, Prediction, Request

CHUNK_TOKENS = 8192
"""Prompt tokens an engine computes per step (vLLM's `max_num_batched_tokens`)."""
TOKENS_MIN = 8
"""Output tokens from which the mean time per token says something."""
OUTPUT_TOKENS = 300
"""Output expected of a request that sets no limit, until answers have been seen."""
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


class Forecast:
    """See the module. One per pool."""

    def __init__(self, learner: RateLearner | None = None) -> None:
        self.learner = learner or RateLearner()
        self.work_s_mean = 0.0
        """Mean prefill work of the requests charged, seconds; 0 before the first."""
        self.output_tokens_mean = float(OUTPUT_TOKENS)
        self._constants: dict[int, Constants] = {}
        self._constants_version = -1
        self._foreign: dict[Endpoint, list[tuple[int, int]]] = {}
        """What the last scrapes showed of others' requests: (in the engine, waiting), newest
        last."""

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
        self, request: Request, endpoints: Iterable[Endpoint], now_s: float
    ) -> dict[int, Prediction]:
        """What the request can expect, by slot."""
        constants = self.constants()
        return {
            e.slot: self._predict(request, e, constants[e.slot], now_s)
            for e in endpoints
            if e.slot in constants
        }

    def _predict(
        self, request: Request, endpoint: Endpoint, rates: Constants, now_s: float
    ) -> Prediction:
        prompt_tokens = max(1, request.prompt_tokens)
        matched = matched_tokens(request, endpoint, prompt_tokens)
        uncached = prompt_tokens - matched
        work_s = work_of(rates, uncached, matched)
        backlog_s = self.backlog_s(endpoint, now_s)
        requests = endpoint.inflight_requests + endpoint.foreign_requests
        step_s = step_of(rates, requests, endpoint.context_tokens)
        steps = ceil((backlog_s / rates.token_s + uncached) / CHUNK_TOKENS)
        return Prediction(
            ttft_s=backlog_s + work_s + steps * step_s,
            tpot_s=step_of(rates, requests + 1, endpoint.context_tokens + prompt_tokens),
        )

    def prefill(
        self, request: Request, endpoint: Endpoint, *, now_s: float, blind: bool
    ) -> Prefill:
        """What `endpoint` is charged with for `request`, as it will find its cache: blocks that it
        is still computing for an earlier request are no match yet."""
        prompt_tokens = max(1, request.prompt_tokens)
        blocks = resident_blocks(request, endpoint)
        matched = min(prompt_tokens - 1, blocks * request.match.block_tokens)
        rates = self._of(endpoint)
        seconds = work_of(rates, prompt_tokens - matched, matched)
        mean_s = self.work_s_mean
        self.work_s_mean = mean_s + MEAN_WEIGHT * (seconds - mean_s) if mean_s else seconds
        return Prefill(
            prompt_tokens=prompt_tokens,
            matched_tokens=matched,
            matched_blocks=blocks,
            seconds=seconds,
            blind=blind,
            ttft_s=self._predict(request, endpoint, rates, now_s).ttft_s,
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
        self.output_tokens_mean += MEAN_WEIGHT * (output_tokens - self.output_tokens_mean)
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
        )

    # -- PoolListener ----------------------------------------------------------------------

    def joined(self, endpoint: Endpoint) -> None:
        self.learner.joined(endpoint.slot)
        self._constants[endpoint.slot] = self._read(endpoint.slot)

    def left(self, endpoint: Endpoint) -> None:
        self.learner.forget(endpoint.slot)
        self._constants.pop(endpoint.slot, None)
        self._foreign.pop(endpoint, None)

    def restarted(self, endpoint: Endpoint) -> None:
        self.learner.restarted(endpoint.slot)
        endpoint.proven = False

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:  # noqa: ARG002
        """It has to prove itself again."""
        endpoint.proven = False

    def recovered(self, endpoint: Endpoint) -> None:
        """Its next first byte proves it."""

    def scraped(self, endpoint: Endpoint) -> None:
        load = endpoint.load
        if load.running is None or load.waiting is None:
            endpoint.foreign_requests = endpoint.foreign_waiting = 0
            self._foreign.pop(endpoint, None)
            return
        seen = self._foreign.setdefault(endpoint, [])
        seen.append(
            (
                max(0, load.running + load.waiting - endpoint.inflight_requests),
                max(0, load.waiting - endpoint.waiting_requests),
            )
        )
        del seen[:-BELIEVED_SCRAPES]
        endpoint.foreign_requests = min(requests for requests, _ in seen)
        endpoint.foreign_waiting = min(waiting for _, waiting in seen)
        if len(seen) < BELIEVED_SCRAPES:
            endpoint.foreign_requests = endpoint.foreign_waiting = 0


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


def resident_blocks(request: Request, endpoint: Endpoint) -> int:
    """Of the blocks matched, the leading ones that no waiting request still has to compute.

    Names are chained, so two prompts that share the first block a waiting request lacks share all
    before it, too: one comparison per waiting request tells.
    """
    blocks = request.match.by_slot.get(endpoint.slot, 0)
    if not blocks or len(request.chains) != 1:
        return blocks
    chain: Sequence[int] = request.chains[0]
    for work in endpoint.backlog:
        assert isinstance(work, Charge)
        lacking = work.prefill.matched_blocks
        if lacking < blocks and lacking < len(work.chain) and work.chain[lacking] == chain[lacking]:
            blocks = lacking
    return blocks
