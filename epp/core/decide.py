"""One decision in one synchronous call: snapshot, prefix match, pick, charge.

Nothing awaits between reading the pool and charging the endpoint, so two requests never both see
the same idle endpoint. What the index learns from a decision is learned after the answer was handed
to the transport, still in the same call of the event loop: the next request of a burst already sees
it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from epp.core.addresses import keep_subset
from epp.core.errors import DropReason, RequestDropped
from epp.core.inflight import Charge, Inflight
from epp.core.latency.forecast import Forecast
from epp.core.model import NO_MATCH, Endpoint, Pick, PrefixMatch, Request
from epp.core.pool import Answered, Pool, PoolListener
from epp.core.prefix import PrefixIndex, name_blocks, root_of
from epp.core.schedule import Profile, Scheduler
from epp.core.structs import ByIdentity, Frozen

BLOCK_TOKENS_MIN = 64
"""Floor of the prefix block: smaller blocks cost memory and time and gain no routing."""
BLOCK_TOKENS_MAX = 8192
"""A larger block that an engine reports is not believed: one engine sets the size for the whole
pool, and no prompt has two blocks of such a size. The largest real ones, of engines with linear
attention, have some 2 000."""


class PrefixParams(Frozen, frozen=True):
    """How prompts are cut and how much is remembered (`approx-prefix-cache-producer`)."""

    auto_tune: bool = True
    """Follow the block size and KV capacity the engines report."""
    block_tokens: int = BLOCK_TOKENS_MIN
    """Tokens per prefix block where no engine reports one; raised to `BLOCK_TOKENS_MIN`."""
    tokens_max: int = 131_072
    """Prompt tokens looked at, per prompt."""
    endpoint_blocks_max: int = 31_250
    """Blocks remembered of an endpoint that does not report its KV capacity."""
    blocks_max_total: int = 2_000_000
    """Blocks remembered over all endpoints."""


class Decision(ByIdentity, eq=False):
    """A pick, what it was made from and what it is charged."""

    request: Request
    pick: Pick
    charge: Charge
    matched_tokens: int
    """Tokens of the prompt the picked endpoint is thought to hold."""


class PrefixState(Frozen, frozen=True):
    """How much is remembered, in prefix blocks of `block_tokens` tokens."""

    block_tokens: int
    distinct_blocks: int
    held_blocks: int
    """Summed over endpoints: a block that two hold counts twice."""
    held_blocks_max: int


class PrefixSource(PoolListener, Protocol):
    """Who knows which endpoint holds what."""

    def match(self, request: Request) -> PrefixMatch:
        """Look up who holds the leading blocks of the request, or will once it has served what was
        sent there; names them in `request.chains`."""

    def learn(self, endpoint: Endpoint, request: Request) -> None:
        """The request was sent there."""

    def state(self) -> PrefixState:
        """How much is remembered now."""

    def held_by(self, endpoint: Endpoint) -> int:
        """Blocks the endpoint is thought to hold."""


class PrefixKeeper:
    """Owns the prefix index and keeps it in step with the pool (it is a `PoolListener`)."""

    def __init__(self, params: PrefixParams) -> None:
        self.params = params
        self.index = PrefixIndex(
            params.blocks_max_total, slot_blocks_max=params.endpoint_blocks_max
        )
        self.block_tokens = max(BLOCK_TOKENS_MIN, params.block_tokens)
        self._reported: dict[Endpoint, int] = {}
        """KV block size each endpoint reports, in tokens; 0 = none yet."""

    def match(self, request: Request) -> PrefixMatch:
        """Name the request's blocks (kept in `request.chains`, unless it came with names) and look
        up who holds them."""
        if request.match.blocks and request.match.block_tokens != self.block_tokens:
            request.chains = ()  # named before the block size changed: they mean nothing now
            if not request.prompts:
                return NO_MATCH
        if request.chains:
            return self._look_up(request.chains)
        if not request.prompts:
            return NO_MATCH
        block_tokens = self.block_tokens
        root = root_of(request.engine_model, request.cache_salt)
        blocks_max = max(1, self.params.tokens_max // block_tokens)
        chains = tuple(
            [
                name_blocks(prompt, block_tokens=block_tokens, root=root, blocks_max=blocks_max)
                for prompt in request.prompts
            ]
        )
        request.chains = chains
        return self._look_up(chains)

    def _look_up(self, chains: tuple[Sequence[int], ...]) -> PrefixMatch:
        blocks = sum(map(len, chains))
        if not blocks:
            return NO_MATCH
        return PrefixMatch(
            blocks=blocks, block_tokens=self.block_tokens, by_slot=self.index.match(chains)
        )

    def learn(self, endpoint: Endpoint, request: Request) -> None:
        """Remember that `endpoint` was sent this prompt."""
        if request.chains:
            self.index.learn(endpoint.slot, request.chains)

    def state(self) -> PrefixState:
        """How much is remembered now."""
        return PrefixState(
            block_tokens=self.block_tokens,
            distinct_blocks=self.index.entries,
            held_blocks=self.index.held,
            held_blocks_max=self.params.blocks_max_total,
        )

    def held_by(self, endpoint: Endpoint) -> int:
        """Blocks the endpoint is thought to hold."""
        return self.index.held_by(endpoint.slot)

    def runs_of(self, endpoint: Endpoint, runs_max: int) -> list[bytes]:
        """The blocks the endpoint is thought to hold, see `PrefixIndex.runs`; none of one that has
        left."""
        return self.index.runs(endpoint.slot, runs_max) if endpoint in self._reported else []

    def restore(self, endpoint: Endpoint, names: Sequence[int]) -> None:
        """Take these for the blocks the endpoint holds, youngest first, each after all before
        it."""
        self.index.learn(endpoint.slot, (names,))

    # PoolListener

    def joined(self, endpoint: Endpoint) -> None:
        self._reported[endpoint] = 0
        self._resize(endpoint)

    def left(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint.slot)
        self._reported.pop(endpoint, None)
        self._follow_block_size()

    def restarted(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint.slot)
        self._resize(endpoint)

    def scraped(self, endpoint: Endpoint) -> None:
        if not self.params.auto_tune:
            return
        block_tokens = endpoint.load.kv_block_tokens or 0
        if 0 < block_tokens <= BLOCK_TOKENS_MAX and self._reported.get(endpoint) != block_tokens:
            self._reported[endpoint] = block_tokens
            self._follow_block_size()
        self._resize(endpoint)

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:
        """What it holds is not gone."""

    def recovered(self, endpoint: Endpoint) -> None:
        """Nor is it now."""

    def _follow_block_size(self) -> None:
        """One block size for the whole pool: the largest, so that a match never promises more than
        an engine with large blocks can have kept."""
        known = max(self._reported.values(), default=0)
        block_tokens = max(BLOCK_TOKENS_MIN, known or self.params.block_tokens)
        if block_tokens == self.block_tokens:
            return
        self.block_tokens = block_tokens
        for endpoint in self._reported:  # names of another block size match nothing any more
            self.index.forget(endpoint.slot)
            self._resize(endpoint)

    def _resize(self, endpoint: Endpoint) -> None:
        load = endpoint.last_load
        blocks = self.params.endpoint_blocks_max
        if self.params.auto_tune and load.kv_blocks and load.kv_block_tokens:
            blocks = max(1, load.kv_blocks * load.kv_block_tokens // self.block_tokens)
        self.index.resize(endpoint.slot, blocks)


class Decider:
    """Makes decisions for one pool with one profile."""

    def __init__(
        self,
        *,
        pool: Pool,
        profile: Profile,
        inflight: Inflight,
        prefix: PrefixSource | None,
        rng: Random,
        forecast: Forecast | None = None,
    ) -> None:
        """`prefix=None`: no plugin asks for prefix matches, so prompts are not hashed."""
        self.pool = pool
        self.inflight = inflight
        self.prefix = prefix
        self.forecast = forecast or Forecast()
        self._rng = rng
        self._scheduler = Scheduler(profile, rng)
        self._predicts = profile.needs_predictions
        self._tpot_ratio = profile.tpot_ratio
        pool.listen(self.forecast)
        if prefix is not None:
            pool.listen(prefix)

    @property
    def profile(self) -> Profile:
        return self._scheduler.profile

    def decide(
        self,
        request: Request,
        *,
        subset: tuple[str, ...] | None,
        now_s: float,
        first_byte_seen: bool = True,
    ) -> Decision:
        """Pick an endpoint and charge it.

        Args:
            subset: addresses the gateway allows; `None` = the whole pool, `()` = none.
            first_byte_seen: the answer is streamed and passes by; else the end of the prefill is
                predicted.
        Raises: RequestDropped when no endpoint can serve the request.
        """
        pick = self.wish(request, subset=subset, now_s=now_s)
        return self.commit(request, pick, now_s=now_s, first_byte_seen=first_byte_seen)

    def wish(self, request: Request, *, subset: tuple[str, ...] | None, now_s: float) -> Pick:
        """Where the request should go now; nothing is charged. See `decide`."""
        self.inflight.advance(now_s)
        snapshot = self.pool.snapshot(now_s)
        eligible = None
        if subset is not None:
            eligible = keep_subset(subset, snapshot.endpoints)
            if not eligible:
                # What is ejected may still be all that the gateway allows.
                eligible = keep_subset(subset, self.pool.endpoints)
            if not eligible:
                raise RequestDropped(
                    DropReason.NO_ENDPOINTS,
                    "no endpoint of the pool is in the subset the gateway allows",
                )
        prefix = self.prefix
        if prefix is not None:
            request.match = prefix.match(request)
        request.rng = self._rng
        forecast = self.forecast
        if self._predicts:
            request.predictions = forecast.predict(
                request, snapshot.endpoints, now_s, tpot_ratio=self._tpot_ratio
            )
        return self._scheduler.pick(request, snapshot, eligible, forecast=forecast, now_s=now_s)

    def commit(
        self, request: Request, pick: Pick, *, now_s: float, first_byte_seen: bool = True
    ) -> Decision:
        """The request goes where `pick` says: charge it there."""
        match = request.match
        holders = match.by_slot
        matched_blocks = holders.get(pick.endpoint.slot, 0)
        matched_tokens = min(request.prompt_tokens, matched_blocks * match.block_tokens)
        tokens = self.inflight.tokens_of(
            prompt_tokens=request.prompt_tokens,
            matched_tokens=matched_tokens,
            max_output_tokens=request.max_output_tokens,
        )
        cold = not holders or (
            not matched_blocks and not any(e.slot in holders for e in pick.candidates)
        )
        charge = self.inflight.charge(
            pick.endpoint,
            self.forecast.prefill(request, pick.endpoint, now_s=now_s, blind=not first_byte_seen),
            tokens=tokens,
            cold=cold,
            now_s=now_s,
            chain=request.chains[0] if len(request.chains) == 1 else (),
            block_tokens=match.block_tokens,
        )
        return Decision(request, pick, charge, matched_tokens)

    def learn(self, decision: Decision) -> None:
        """Remember what the picked endpoint will hold once it has served the request."""
        endpoint = decision.pick.endpoint
        if self.prefix is not None and self._lives(endpoint):
            self.prefix.learn(endpoint, decision.request)

    def _lives(self, endpoint: Endpoint) -> bool:
        """It has not left the pool. Of one that has, nothing may be learned any more: its slot is
        another's by now."""
        return self.pool.by_address.get(endpoint.address) is endpoint

    def first_byte(self, decision: Decision, now_s: float, *, ok: bool = True) -> None:
        """The first byte of the response body came by.

        Args:
            ok: of an answer. An error says nothing of how long a prefill takes: who refuses at once
                must not seem to be fast.
        """
        charge = decision.charge
        endpoint = charge.endpoint
        service_s = self.inflight.first_byte(charge, now_s)
        if not ok or endpoint is None or service_s is None or charge.blind or charge.moved:
            return
        if self._lives(endpoint):
            self.forecast.first_byte(charge, endpoint, service_s, now_s)

    def ended(
        self,
        decision: Decision,
        now_s: float,
        *,
        output_tokens: int | None = None,
        decode_s: float | None = None,
    ) -> None:
        """The exchange is over, however: release its charge.

        Args:
            output_tokens: of an answer that came whole; `None` = it did not, or nobody counted.
            decode_s: seconds from its first byte to its last, if it was streamed.
        """
        charge = decision.charge
        endpoint = charge.endpoint
        self.inflight.release(charge, now_s)
        if endpoint is not None and output_tokens is not None and self._lives(endpoint):
            self.forecast.ended(
                charge, endpoint, output_tokens=output_tokens, decode_s=decode_s, now_s=now_s
            )

    def unseen(self, decision: Decision, now_s: float) -> None:
        """The gateway shows no more of this request, which goes on: its end is predicted."""
        charge = decision.charge
        if charge.endpoint is None:
            return
        prefill_end_s = charge.dispatched_s + charge.prefill.ttft_s if charge.waiting else now_s
        output_s = self.forecast.output_s(decision.request, charge.endpoint)
        self.inflight.release_at(charge, max(now_s, prefill_end_s) + output_s)

    def answered(
        self, decision: Decision, *, served: str | None, status: int | None, now_s: float
    ) -> None:
        """Credit an answer to who gave it, which a retry of the gateway may have changed.

        Args:
            served: address the gateway says it used; `None` or unknown = the pick.
            status: HTTP status; `None` = it told nothing, so nobody is credited or blamed.
        """
        picked = decision.pick.endpoint
        endpoint = picked
        if served is not None and served != picked.address:
            endpoint = self.pool.by_address.get(served, picked)
        if endpoint is not picked:
            self.pool.apply(Answered(picked, ok=False), now_s)
            self.inflight.move(decision.charge, endpoint)
        if status is not None:
            # 501 and 505 say what the engine cannot do at all, not that it is unwell.
            ok = status < 500 or status in {501, 505}
            endpoint.proven |= status < 400
            self.pool.apply(Answered(endpoint, ok=ok), now_s)
