"""What an engine's own histograms teach: growth between scrapes, restarts, and when they count."""

from __future__ import annotations

import pytest

from epp.core.latency.forecast import Forecast
from epp.core.latency.rates import SEEN_S, RateLearner, Rates
from epp.core.model import EndpointSpec, Load
from epp.core.pool import Members, Pool, Scraped, ScrapeFailed

PRIOR = Rates()
TOKENS = 4_000
PREFILL_S = PRIOR.work_s(TOKENS, 0) + PRIOR.step_s
PERIOD_S = 10.0


class Heard(RateLearner):
    """Writes down what it is told of histograms."""

    def __init__(self) -> None:
        super().__init__(work_bias_ratio=1.0)
        self.calls: list[tuple[float, float, int, float]] = []

    def histograms(
        self, slot: int, *, prefill_s: float, computed_tokens: float, prefills: int, now_s: float
    ) -> None:
        self.calls.append((prefill_s, computed_tokens, prefills, now_s))
        super().histograms(
            slot,
            prefill_s=prefill_s,
            computed_tokens=computed_tokens,
            prefills=prefills,
            now_s=now_s,
        )


class World:
    """A pool, its forecast, and scrapes every `PERIOD_S`."""

    def __init__(self, endpoints: int = 1) -> None:
        self.learner = Heard()
        self.pool = Pool(stale_after_s=60.0)
        self.pool.listen(Forecast(self.learner))
        self.specs = tuple(EndpointSpec(host="10.0.0.1", port=1 + n) for n in range(endpoints))
        self.pool.apply(Members(self.specs), 0.0)
        self.now_s = 0.0

    def scrape(
        self, seconds: float | None, tokens: float | None, prefills: int | None, at: int = 0
    ) -> None:
        self.now_s += PERIOD_S
        load = Load(
            at_s=self.now_s,
            prefill_s_sum=seconds,
            prefill_tokens_sum=tokens,
            prefills=prefills,
        )
        self.pool.apply(Scraped(self.pool.endpoints[at], load), self.now_s)

    def teach(self, slowness: float, *, prefills: int = 50, from_prefills: int = 0) -> None:
        """One prefill per scrape."""
        for number in range(from_prefills, from_prefills + prefills):
            self.scrape(slowness * PREFILL_S * number, TOKENS * number, number)

    @property
    def slowness(self) -> float:
        return self.learner.rates(self.pool.endpoints[0].slot).token_s / PRIOR.token_s

    def first_byte(self, slot: int, now_s: float) -> None:
        self.learner.first_byte(
            slot,
            uncached_tokens=TOKENS,
            matched_tokens=0,
            service_s=PREFILL_S,
            decoding=0,
            decode_tokens=0,
            now_s=now_s,
        )


def test_the_learner_is_told_the_growth_between_two_scrapes() -> None:
    world = World()
    world.scrape(5.0, 80_000, 10)
    world.scrape(5.5, 88_000, 11)
    world.scrape(5.5, 88_000, 11)
    world.scrape(8.0, 100_000, 14)
    # What was there before the first scrape is not growth: it only says from when on to count.
    assert world.learner.calls == [
        (0.0, 0.0, 0, 10.0),
        (0.5, 8_000, 1, 20.0),
        (0.0, 0.0, 0, 30.0),
        (2.5, 12_000, 3, 40.0),
    ]


def test_totals_that_fell_are_those_of_a_new_process_and_begin_anew() -> None:
    for fallen in ((0.1, 90_000, 12), (6.0, 100, 12), (6.0, 90_000, 1), (0.0, 0, 0)):
        world = World()
        world.scrape(5.0, 80_000, 10)
        world.scrape(*fallen)
        world.scrape(fallen[0] + 1.0, fallen[1] + 7, fallen[2] + 2)
        assert world.learner.calls[1:] == [(0.0, 0.0, 0, 20.0), (pytest.approx(1.0), 7, 2, 30.0)]


def test_an_engine_that_started_again_unseen_is_not_taken_for_a_fast_one() -> None:
    world = World()
    world.teach(2.0)
    for _ in range(20):
        world.teach(2.0, prefills=6)
    assert world.slowness == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("missing", range(3))
def test_a_scrape_without_one_of_the_families_teaches_nothing(missing: int) -> None:
    world = World()
    world.scrape(5.0, 80_000, 10)
    totals: list[float | int | None] = [6.0, 90_000, 12]
    totals[missing] = None
    world.scrape(*totals)
    world.scrape(7.0, 99_000, 13)
    world.scrape(7.5, 99_500, 14)
    # What grew meanwhile is not known of all three, so the count begins again.
    assert world.learner.calls[1:] == [(0.0, 0.0, 0, 30.0), (0.5, 500, 1, 40.0)]


def test_an_engine_without_the_families_is_never_heard() -> None:
    world = World()
    for _ in range(9):
        world.scrape(None, None, None)
    assert world.learner.calls == []
    assert world.slowness == 1.0


def test_a_process_that_was_gone_in_between_begins_anew_even_with_higher_totals() -> None:
    world = World()
    world.scrape(5.0, 80_000, 10)
    [endpoint] = world.pool.endpoints
    for _ in range(2):
        world.pool.apply(ScrapeFailed(endpoint, "refused", unreachable=True), world.now_s)
    world.scrape(6.0, 90_000, 20)
    assert world.learner.calls[1:] == [(0.0, 0.0, 0, 20.0)]


def test_an_endpoint_that_takes_the_address_of_another_begins_anew() -> None:
    world = World()
    world.scrape(5.0, 80_000, 10)
    world.pool.apply(Members(()), world.now_s)
    world.pool.apply(Members(world.specs), world.now_s)
    world.scrape(6.0, 90_000, 20)
    assert world.learner.calls[1:] == [(0.0, 0.0, 0, 20.0)]


def test_scrapes_alone_tell_the_speed() -> None:
    world = World()
    world.teach(3.0)
    assert world.slowness == pytest.approx(3.0, rel=0.05)


def test_histograms_are_not_heard_while_first_bytes_of_any_endpoint_are_seen() -> None:
    world = World(endpoints=2)
    for number in range(60):
        world.first_byte(1, world.now_s)
        world.scrape(3.0 * PREFILL_S * number, TOKENS * number, number)
    assert world.learner.state(0).prefills == 0
    assert world.slowness == pytest.approx(1.0, rel=0.05)


def test_histograms_are_heard_again_when_first_bytes_have_been_hidden_for_a_while() -> None:
    world = World()
    world.first_byte(0, 0.0)
    prefills = 1
    while world.learner.state(0).prefills == 0:
        world.teach(3.0, prefills=1, from_prefills=prefills)
        prefills += 1
    assert SEEN_S <= world.now_s < SEEN_S + 5 * PERIOD_S
