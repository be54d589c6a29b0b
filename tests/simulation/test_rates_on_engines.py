"""The learner on simulated engines: planted rates are found under load, within tens of requests.

Each engine runs alone in virtual time with Poisson arrivals, prompts of 20 to 60 000 tokens (median
3000), half of them with a prefix it saw before, 4 ms of network and a jitter of 1 ms. What the
learner is told is what a router sees: dispatches, first bytes, ends.
"""

import math
from collections.abc import Callable, Iterator
from random import Random

import pytest

from bench.engine.cost import CostModel
from bench.engine.scheduler import Engine, EngineLimits, EngineRequest, LiveRequest
from epp.core.latency.rates import RateLearner, Rates

BLOCK_TOKENS = 512
NETWORK_S = 0.004
JITTER_S = 0.001
TICK_S = 1.0
PROMPTS = ((500, 0), (2_000, 0), (2_000, 8_000), (8_000, 0), (20_000, 4_000))
"""New and matched tokens of the prompts that learned work is judged by."""
MIXED = tuple(CostModel(speed=speed) for speed in (1.0, 1.0, 0.5, 1.5))


class Sent:
    """What the router remembers of a request."""

    def __init__(self, at_s: float, prompt_tokens: int, matched_tokens: int) -> None:
        self.at_s = at_s
        self.prompt_tokens = prompt_tokens
        self.matched_tokens = matched_tokens
        self.first_s = 0.0
        self.load = (0, 0)


class Site:
    """One engine, the requests to it, and the router's account of them."""

    def __init__(
        self, slot: int, cost: CostModel, learner: RateLearner, rng: Random, *, arrivals_s: float
    ) -> None:
        self.slot, self.learner, self.rng = slot, learner, rng
        self.engine = Engine(EngineLimits(block_tokens=BLOCK_TOKENS, kv_blocks=1_200), cost)
        self.arrivals_s = arrivals_s
        """Mean requests a second."""
        self.median_tokens = 3_000
        self.first_bytes_seen = True
        self.scrape_s = math.inf
        self.stalled_ratio = self.wrong_match_ratio = 0.0
        self.learned: list[Rates] = []
        """Rates after each first byte."""
        self.now_s = self.last_first_byte_s = 0.0
        self._next_s = rng.expovariate(arrivals_s)
        self._scraped_s = 0.0
        self._histogram = [0.0, 0, 0]
        self._sent: dict[str, Sent] = {}
        self._decoding: set[str] = set()
        self._prefixes: list[list[int]] = []
        self._numbers: Iterator[int] = iter(range(10**9))

    def run(self, until_s: float) -> None:
        """Requests and steps up to a time."""
        while self.now_s < until_s:
            self._arrive(self.now_s)
            while self._scraped_s + self.scrape_s <= self.now_s:
                self._scrape()
            duration_s = self.engine.begin(self.now_s, until_s=min(self._next_s, until_s))
            if duration_s is None:
                self.now_s = min(self._next_s, until_s)
                continue
            self._arrive(self.now_s + duration_s)
            step = self.engine.complete()
            self.now_s = step.end_s
            for live in step.first:
                self._first_byte(live)
            for live in step.finished:
                self._end(live)

    def _arrive(self, until_s: float) -> None:
        while self._next_s <= until_s:
            at_s = self._next_s
            self._next_s += self.rng.expovariate(self.arrivals_s)
            request = self._request()
            matched = self.engine.kv.match(request.blocks, (request.prompt_tokens - 1) // 512)
            self.engine.submit(request, at_s)
            self._sent[request.id] = Sent(
                at_s - NETWORK_S / 2, request.prompt_tokens, matched * BLOCK_TOKENS
            )

    def _request(self) -> EngineRequest:
        rng = self.rng
        tokens = int(min(60_000, max(20, rng.lognormvariate(math.log(self.median_tokens), 1.2))))
        blocks: list[int] = []
        if self._prefixes and rng.random() < 0.5:
            blocks = list(rng.choice(self._prefixes))
            tokens = max(tokens, len(blocks) * BLOCK_TOKENS + 20 + rng.randrange(2_000))
        while len(blocks) < tokens // BLOCK_TOKENS:
            blocks.append(rng.getrandbits(60))
        self._prefixes = [*self._prefixes[-19:], blocks]
        return EngineRequest(
            id=str(next(self._numbers)),
            prompt_tokens=tokens,
            output_tokens=rng.randrange(20, 400),
            blocks=blocks,
        )

    def _context(self, ids: set[str]) -> int:
        return sum(self._sent[i].prompt_tokens for i in ids)

    def _first_byte(self, live: LiveRequest) -> None:
        sent, at_s = self._sent[live.request.id], self.now_s + NETWORK_S / 2
        at_s += self.rng.random() * JITTER_S
        assert live.first_token_s is not None
        assert live.admitted_s is not None
        self._histogram[0] += live.first_token_s - live.admitted_s
        self._histogram[1] += live.request.prompt_tokens - live.cached_tokens
        self._histogram[2] += 1
        if self.first_bytes_seen:
            matched = sent.matched_tokens
            if self.rng.random() < self.wrong_match_ratio:
                matched = 0 if matched else sent.prompt_tokens // 2
            service_s = at_s - max(sent.at_s, self.last_first_byte_s)
            if self.rng.random() < self.stalled_ratio:
                service_s += self.rng.uniform(1.0, 10.0)
            self.learner.first_byte(
                self.slot,
                uncached_tokens=sent.prompt_tokens - matched,
                matched_tokens=matched,
                service_s=service_s,
                decoding=len(self._decoding),
                decode_tokens=self._context(self._decoding),
                now_s=at_s,
            )
        self.last_first_byte_s = max(at_s, self.last_first_byte_s)
        sent.first_s, sent.load = at_s, self._load()
        self._decoding.add(live.request.id)
        self.learned.append(self.learner.measured(self.slot))

    def _end(self, live: LiveRequest) -> None:
        sent, at_s = self._sent[live.request.id], self.now_s + NETWORK_S / 2
        if self.first_bytes_seen and at_s > sent.first_s:
            requests, context = self._load()
            self.learner.decoded(
                self.slot,
                step_s=(at_s - sent.first_s) / (live.generated - 1),
                inflight=(requests + sent.load[0]) // 2,
                inflight_tokens=(context + sent.load[1]) // 2,
                now_s=at_s,
                decode_s=at_s - sent.first_s,
            )
        self._decoding.discard(live.request.id)
        del self._sent[live.request.id]

    def _load(self) -> tuple[int, int]:
        return len(self._sent), self._context(set(self._sent))

    def _scrape(self) -> None:
        self._scraped_s += self.scrape_s
        seconds, tokens, prefills = self._histogram
        self._histogram = [0.0, 0, 0]
        self.learner.histograms(
            self.slot,
            prefill_s=seconds,
            computed_tokens=tokens,
            prefills=int(prefills),
            now_s=self._scraped_s,
        )


def work_errors(rates: Rates, cost: CostModel) -> list[float]:
    """Learned / true work, less 1, of typical prompts; the bias taken out."""
    errors = []
    for new, matched in PROMPTS:
        pairs = new * (matched + new / 2)
        true_s = (cost.prefill_token_s * new + cost.attention_pair_s * pairs) / cost.speed
        errors.append(rates.work_s(new, matched) / 1.05 / true_s - 1)
    return errors


def step_error(rates: Rates, cost: CostModel) -> float:
    """The same of a decode step with ten requests."""
    true_s = cost.step_s(decode_sequences=10, decode_kv_tokens=40_000)
    return rates.decode_step_s(10, 40_000) / true_s - 1


def sites_of(
    costs: tuple[CostModel, ...],
    arrivals_s: float,
    seed: int,
    setup: Callable[[Site], None] = lambda site: None,
) -> list[Site]:
    """Engines that share a learner, each with `arrivals_s` requests a second at speed 1."""
    learner, rng = RateLearner(), Random(seed)
    sites = [
        Site(n, cost, learner, Random(rng.random()), arrivals_s=arrivals_s * cost.speed)
        for n, cost in enumerate(costs)
    ]
    for site in sites:
        setup(site)
    return sites


def run(sites: list[Site], prefills: int) -> None:
    """Until each had so many first bytes more."""
    enough = [len(site.learned) + prefills for site in sites]
    until_s = sites[0].now_s
    for _ in range(100_000):
        until_s += TICK_S
        for site in sites:
            site.run(until_s)
        if all(len(s.learned) >= n for s, n in zip(sites, enough, strict=True)):
            return
    raise AssertionError("too few first bytes")


SEEDS = (1, 2)


@pytest.mark.parametrize(
    ("arrivals_s", "limit"), [(0.05, 0.1), (0.5, 0.1), (1.0, 0.1), (1.5, 0.1), (2.0, 0.15)]
)
def test_planted_rates_are_found_from_idle_to_saturated(arrivals_s: float, limit: float) -> None:
    """At two a second the engine computes without a pause and its queue grows."""
    for seed in SEEDS:
        [site] = sites_of((CostModel(),), arrivals_s, seed)
        run([site], 100)
        for prefills in (30, 100):
            rates = site.learned[prefills - 1]
            assert max(map(abs, work_errors(rates, CostModel()))) < limit, (seed, prefills)
            assert abs(step_error(rates, CostModel())) < 0.15, (seed, prefills)


@pytest.mark.parametrize("arrivals_s", [0.3, 0.7, 1.3])
def test_engines_of_different_speed_are_told_apart_within_thirty_prefills(
    arrivals_s: float,
) -> None:
    errors = []
    for seed in SEEDS:
        sites = sites_of(MIXED, arrivals_s, seed)
        run(sites, 30)
        for site in sites:
            errors += work_errors(site.learned[29], site.engine.cost)
    errors.sort(key=abs)
    assert abs(errors[int(0.9 * len(errors))]) < 0.1
    assert abs(errors[-1]) < 0.15


@pytest.mark.parametrize(
    ("cost", "arrivals_s"),
    [
        pytest.param(CostModel(speed=0.1), 0.8, id="ten times slower"),
        pytest.param(CostModel(speed=10.0), 0.5, id="ten times faster"),
        pytest.param(
            CostModel(
                step_base_s=0.003,
                prefill_token_s=1 / 60_000,
                attention_pair_s=2e-11,
                decode_sequence_s=2e-5,
                decode_kv_token_s=1e-8,
            ),
            2.0,
            id="small model, little attention",
        ),
        pytest.param(
            CostModel(
                step_base_s=0.03,
                prefill_token_s=1 / 4_000,
                attention_pair_s=3e-9,
                decode_sequence_s=2e-4,
                decode_kv_token_s=2e-7,
            ),
            0.2,
            id="large model, much attention",
        ),
    ],
)
def test_hardware_unlike_the_prior_needs_no_calibration(cost: CostModel, arrivals_s: float) -> None:
    for seed in SEEDS:
        sites = sites_of((cost,) * 3, arrivals_s, seed)
        run(sites, 100)
        for site in sites:
            assert max(map(abs, work_errors(site.learned[29], cost))) < 0.25, seed
            assert max(map(abs, work_errors(site.learned[99], cost))) < 0.15, seed
            assert abs(step_error(site.learned[99], cost)) < 0.15, seed


@pytest.mark.parametrize("arrivals_s", [0.1, 0.8, 1.3])
def test_an_engine_that_drops_to_half_speed_is_found_within_thirty_prefills(
    arrivals_s: float,
) -> None:
    for seed in SEEDS:
        sites = sites_of((CostModel(),) * 3, arrivals_s, seed)
        run(sites, 60)
        slow, before = sites[0], len(sites[0].learned)
        slow.engine.cost = CostModel(speed=0.5)
        slow.arrivals_s /= 2
        run(sites, 35)
        assert max(map(abs, work_errors(slow.learned[before + 30], slow.engine.cost))) < 0.1
        for site in sites[1:]:
            assert max(map(abs, work_errors(site.learned[-1], site.engine.cost))) < 0.1


def stalls(site: Site) -> None:
    site.stalled_ratio = 0.05


def wrong_matches(site: Site) -> None:
    site.wrong_match_ratio = 0.2


@pytest.mark.parametrize("setup", [stalls, wrong_matches])
@pytest.mark.parametrize("arrivals_s", [0.2, 0.8])
def test_stalls_and_wrong_matches_do_not_spoil_the_rates(
    setup: Callable[[Site], None], arrivals_s: float
) -> None:
    """5 % of first bytes come up to 10 s late, or 20 % of matches are wrong."""
    for seed in SEEDS:
        sites = sites_of(MIXED, arrivals_s, seed, setup)
        run(sites, 60)
        for site in sites:
            assert max(map(abs, work_errors(site.learned[-1], site.engine.cost))) < 0.15, seed


@pytest.mark.parametrize(("arrivals_s", "low", "high"), [(0.2, -0.1, 0.1), (1.5, -0.1, 0.5)])
def test_histograms_do_where_first_bytes_are_hidden(
    arrivals_s: float, low: float, high: float
) -> None:
    """On a busy engine prefill times overlap, so that it looks slower than it is."""

    def hidden(site: Site) -> None:
        site.first_bytes_seen, site.scrape_s = False, 1.0

    for seed in SEEDS:
        sites = sites_of((CostModel(speed=0.25), CostModel()), arrivals_s, seed, hidden)
        run(sites, 60)
        for site in sites:
            errors = work_errors(site.learned[-1], site.engine.cost)
            assert low < min(errors) <= max(errors) < high, seed


def test_small_prompts_only_do_not_mislead() -> None:
    def small(site: Site) -> None:
        site.median_tokens = 300

    for seed in SEEDS:
        [site] = sites_of((CostModel(),), 3.0, seed, small)
        run([site], 100)
        assert max(map(abs, work_errors(site.learned[-1], CostModel()))) < 0.12, seed
