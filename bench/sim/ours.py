"""The product's own core as a policy of the simulator: through its public interface, in virtual
time.

Nothing of a decision is done here. The simulator's requests, first bytes, ends, scrapes and members
become the calls and events that the exchange, the scraper and discovery would make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.sim.conditions import PolicyContext, PolicyError
from bench.sim.model import SimRequest, TrueView, View
from bench.sim.regret import Judgement
from bench.sim.rethink import Rethinker, number_of, rates_of
from epp.config import Plan, load_config, resolve
from epp.core.decide import Decider, Decision, PrefixKeeper, PrefixParams, PrefixState
from epp.core.flow.hold import Hold, HoldParams, Outcome, Ticket
from epp.core.inflight import Inflight
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import Forecast
from epp.core.latency.rates import RateLearner, Rates
from epp.core.model import NO_MATCH, Endpoint, EndpointSpec, Load, PrefixMatch, Request
from epp.core.pool import Members, Pool, Scraped

STALE_AFTER_S = 15.0
"""Three scrapes of the longest period a run has."""

HOLD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: expected-latency, parameters: {hold: true}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: expected-latency}
"""
REFERENCE_DEFAULT = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: max-score-picker}
"""
"""What the reference EPP's chart installs."""


class ExactPrefixes:
    """A `PrefixSource` that asks the simulator's view, and adds what was sent and is not computed
    yet: the blocks of every waiting request count as held where it waits."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.view: View | None = None
        self.asking: dict[str, SimRequest] = {}
        """Requests not dispatched yet, by `Request.id`."""
        self._endpoints: dict[Endpoint, int] = {}
        self._sent: dict[Endpoint, dict[int, Sequence[int]]] = {}
        """Chains of the requests waiting at each endpoint, by request number."""

    def match(self, request: Request) -> PrefixMatch:
        """Blocks held, or about to be, by slot."""
        view, sim, size = self.view, self.asking[request.id], self.block_tokens
        assert view is not None
        if not sim.blocks:
            return NO_MATCH
        (chain,) = request.chains
        by_slot = {}
        for endpoint, number in self._endpoints.items():
            blocks = view.matched_tokens(sim, number) // size
            for other in self._sent.get(endpoint, {}).values():
                blocks = shared_blocks(chain, other, blocks)
            if blocks:
                by_slot[endpoint.slot] = blocks
        return PrefixMatch(blocks=len(chain), block_tokens=size, by_slot=by_slot)

    def learn(self, endpoint: Endpoint, request: Request) -> None:
        """It will hold the prompt, once it has computed it."""
        if request.chains:
            self._sent.setdefault(endpoint, {})[int(request.id)] = request.chains[0]

    def computed(self, endpoint: Endpoint, number: int) -> None:
        """It has, or never will: the engine's cache says what came of it."""
        self._sent.get(endpoint, {}).pop(number, None)

    def state(self) -> PrefixState:
        """Nothing is remembered here."""
        return PrefixState(self.block_tokens, 0, 0, 0)

    def held_by(self, endpoint: Endpoint) -> int:  # noqa: ARG002
        """Nothing is remembered here."""
        return 0

    def joined(self, endpoint: Endpoint) -> None:
        self._endpoints[endpoint] = number_of(endpoint)

    def left(self, endpoint: Endpoint) -> None:
        self._endpoints.pop(endpoint, None)
        self._sent.pop(endpoint, None)

    def restarted(self, endpoint: Endpoint) -> None:
        """The view knows."""

    def scraped(self, endpoint: Endpoint) -> None:
        """Says nothing of blocks."""

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:
        """What it holds is not gone."""

    def recovered(self, endpoint: Endpoint) -> None:
        """Nor is it now."""


def shared_blocks(chain: Sequence[int], other: Sequence[int], known: int) -> int:
    """Leading blocks that two chains share, given that at least `known` of `chain` count anyway.
    Names are chained, so equal names at one place mean equal names before it."""
    low, high = known, min(len(chain), len(other))
    if low >= high or chain[low] != other[low]:
        return known
    while high - low > 1:
        middle = (low + high) // 2
        if chain[middle] == other[middle]:
            low = middle
        else:
            high = middle
    return low + 1


def spec_of(number: int) -> EndpointSpec:
    """The endpoint of that number."""
    return EndpointSpec(host="10.0.0.1", port=number + 1)


class Ours:
    """A policy that is the product's decider.

    Args:
        exact: ask the engines' caches through the view; else the product's own index remembers what
            it sent where.
        true_rates: give it the engines' true constants instead of letting it learn them.
    """

    def __init__(
        self, context: PolicyContext, plan: Plan, *, exact: bool = True, true_rates: bool = False
    ) -> None:
        self._context = context
        self._pool = Pool(stale_after_s=STALE_AFTER_S)
        self._exact = ExactPrefixes(context.block_tokens) if exact else None
        params = PrefixParams(
            auto_tune=True, block_tokens=context.block_tokens, tokens_max=1 << 30,
            blocks_max_total=1 << 24,
        )  # fmt: skip
        learner = TrueRates(context) if true_rates else RateLearner()
        self.decider = Decider(
            pool=self._pool,
            profile=plan.profiles[0],
            inflight=Inflight(plan.inflight),
            prefix=self._exact or PrefixKeeper(params),
            rng=context.rng,
            forecast=Forecast(learner),
        )
        self._endpoints: tuple[int, ...] = ()
        self._scraped_s: dict[int, float] = {}
        self._decisions: dict[int, tuple[Decision, float | None]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._rethinker: Rethinker | None = None
        self._hold: Hold | None = None
        self._let_go: list[tuple[SimRequest, int]] = []
        cost = plan.profiles[0].cost
        if isinstance(cost, ExpectedLatency) and cost.hold:
            hold = HoldParams(
                chunk_tokens=context.max_num_batched_tokens, seqs_max=context.max_num_seqs
            )
            self._hold = Hold(self.decider, hold)

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:
        """See `Policy`."""
        self._look(view, now_s)
        if not self._endpoints:
            return None
        asked = self._asked(request, view)
        seen = self._context.first_byte_seen
        if self._hold is None:
            decision = self.decider.decide(asked, subset=None, now_s=now_s, first_byte_seen=seen)
            return self._decided(request, decision)
        offered = self._hold.offer(
            asked,
            subset=None,
            now_s=now_s,
            deliver=lambda outcome, _: self._delivered(request, outcome),
            first_byte_seen=seen,
        )
        if isinstance(offered, Decision):
            return self._decided(request, offered)
        self._tickets[request.number] = offered
        return None

    def _asked(self, request: SimRequest, view: View) -> Request:
        if self._exact is not None:
            self._exact.view = view
            self._exact.asking[str(request.number)] = request
        return Request(
            id=str(request.number),
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            stream=self._context.first_byte_seen,
            chains=(request.blocks,) if request.blocks else (),
        )

    def rethink(self, request: SimRequest, view: TrueView, now_s: float) -> Sequence[Judgement]:
        """See `Rethinking`. Nothing with a hold, which decides at other moments."""
        self._look(view, now_s)
        if self._hold is not None or not self._endpoints:
            return ()
        if self._rethinker is None:
            self._rethinker = Rethinker(self.decider)
        truth = {
            endpoint.slot: view.true_state(request, number_of(endpoint), now_s)
            for endpoint in self._pool.endpoints
        }
        return self._rethinker.judge(self._asked(request, view), truth, now_s)

    def _decided(self, request: SimRequest, decision: Decision) -> int:
        self.decider.learn(decision)
        if self._exact is not None:
            del self._exact.asking[decision.request.id]
        self._decisions[request.number] = (decision, None)
        return number_of(decision.pick.endpoint)

    def _delivered(self, request: SimRequest, outcome: Outcome) -> None:
        if outcome.decision is None:
            raise PolicyError("a held request was dropped while endpoints are alive")
        del self._tickets[request.number]
        self._let_go.append((request, self._decided(request, outcome.decision)))

    def pass_held(self, view: View, now_s: float) -> list[tuple[SimRequest, int]]:
        """See `HoldingPolicy`."""
        assert self._hold is not None
        self._look(view, now_s)
        if self._exact is not None:
            self._exact.view = view
        self._hold.wake(now_s)
        let_go, self._let_go = self._let_go, []
        return let_go

    def _look(self, view: View, now_s: float) -> None:
        """Follow membership and scrapes."""
        alive = tuple(view.endpoints)
        if alive != self._endpoints:
            self._endpoints = alive
            self._pool.apply(Members(tuple(spec_of(n) for n in alive)), now_s)
        for endpoint in self._pool.endpoints:
            number = number_of(endpoint)
            scrape = view.scrape(number)
            if scrape is None or self._scraped_s.get(number) == scrape.at_s:
                continue
            self._scraped_s[number] = scrape.at_s
            load = Load(
                at_s=scrape.at_s,
                waiting=scrape.waiting,
                running=scrape.running,
                kv_usage_ratio=scrape.kv_usage_ratio,
                kv_block_tokens=self._context.block_tokens,
                kv_blocks=view.kv_tokens(number) // self._context.block_tokens,
                prefill_s_sum=scrape.prefill_s_sum,
                prefill_tokens_sum=scrape.prefill_tokens_sum,
                prefills=scrape.prefills,
            )
            self._pool.apply(Scraped(endpoint, load), now_s)

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        """See `Policy`."""
        decision, _ = self._decisions[request.number]
        self._decisions[request.number] = (decision, now_s)
        self._computed(decision, request)
        self.decider.first_byte(decision, now_s)

    def _computed(self, decision: Decision, request: SimRequest) -> None:
        if self._exact is not None:
            self._exact.computed(decision.pick.endpoint, request.number)

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """See `Policy`."""
        ticket = self._tickets.pop(request.number, None)
        if ticket is not None and self._hold is not None:  # nobody could take it
            self._hold.withdraw(ticket)
            return
        decision, first_s = self._decisions.pop(request.number)
        self._computed(decision, request)
        if ok:
            self.decider.answered(decision, served=None, status=200, now_s=now_s)
        self.decider.ended(
            decision,
            now_s,
            output_tokens=request.output_tokens if ok else None,
            decode_s=None if first_s is None else now_s - first_s,
        )

    def left(self, endpoint: int) -> None:
        """See `Policy`. An engine that comes back is another process under the old address."""
        self._endpoints = tuple(n for n in self._endpoints if n != endpoint)
        self._pool.apply(Members(tuple(spec_of(n) for n in self._endpoints)), 0.0)
        self._scraped_s.pop(endpoint, None)


class TrueRates(RateLearner):
    """Knows the engines' constants, and learns nothing."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__()
        self._context = context

    def rates(self, slot: int) -> Rates:
        """Slots are given out in the order of the numbers."""
        cost = self._context.costs[min(slot, len(self._context.costs) - 1)]
        return rates_of(cost)


def from_config(
    text: str | None, *, exact: bool = True, true_rates: bool = False
) -> Callable[[PolicyContext], Ours]:
    """Makes policies of one configuration file; `None` = no file.

    Raises: ConfigError.
    """
    plan = resolve(load_config(text) if text is not None else None)
    return lambda context: Ours(context, plan, exact=exact, true_rates=true_rates)


OURS: Mapping[str, Callable[[PolicyContext], Ours]] = MappingProxyType(
    {
        "expected-latency": from_config(None),
        "expected-latency+hold": from_config(HOLD),
        "expected-latency, own index": from_config(None, exact=False),
        "expected-latency, true rates": from_config(None, true_rates=True),
        "reference EPP 2/2/3": from_config(REFERENCE_DEFAULT),
    }
)
"""Policies that run through the product."""
