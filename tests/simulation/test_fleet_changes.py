"""Restarts, slowness, endpoints that come and go."""

from __future__ import annotations

import math

import pytest

from bench.sim.faults import Join, Leave, Restart, Slow, order_faults
from tests.simulation.fleets import (
    PLAIN,
    First,
    InTurn,
    OneEach,
    asked,
    fleet_of,
    run,
    workload_of,
)


class Watching(InTurn):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.alive: dict[int, tuple[int, ...]] = {}
        self.matched: dict[int, int] = {}

    def pick(self, request, view, now_s):
        self.alive[request.number] = tuple(view.endpoints)
        self.matched[request.number] = view.matched_tokens(request, view.endpoints[0])
        return super().pick(request, view, now_s)


@pytest.mark.parametrize("prefix", ["exact", "approximate"])
@pytest.mark.parametrize("lag_s", [0.0, 0.5])
def test_a_restart_loses_requests_and_cache_and_the_requests_are_sent_again(prefix, lag_s) -> None:
    workload = workload_of(
        asked(0, 0.0, 100, 10, text=1),
        asked(1, 4.0, 10),
        asked(2, 9.0, 100, text=1),
    )
    result, [policy] = run(
        workload,
        fleet_of(2),
        Watching,
        faults=(Restart(3.0, 0, 5.0),),
        prefix=prefix,
        kv_event_lag_s=lag_s,
    )
    lost = result.outcomes[0]
    assert (lost.retries, lost.endpoint, lost.dispatched_s) == (1, 1, 3.0)
    assert (lost.first_s, lost.ttft_s) == pytest.approx((5.0, 5.0))
    assert policy.calls[:5] == [
        ("choose", 0, 0.0),
        ("first_byte", 0, 2.0),
        ("failed", 0, 3.0),
        ("left", 0, -1.0),
        ("choose", 0, 3.0),
    ]
    assert policy.alive == {0: (1,), 1: (1,), 2: (0, 1)}
    assert policy.matched[2] == 0
    assert result.outcomes[2].endpoint == 0
    assert result.outcomes[2].cached_tokens == 0


def test_a_late_signal_arrives_before_the_news_of_the_failure() -> None:
    workload = workload_of(asked(0, 0.0, 100), asked(1, 0.0, 100, 9))
    faults = (Restart(3.5, 0, 1.0),)
    _, [policy] = run(workload, fleet_of(1, kv_blocks=200), faults=faults, first_byte_late_s=10.0)
    assert policy.calls[2:][:5] == [
        ("first_byte", 0, 3.5),
        ("first_byte", 1, 3.5),
        ("ended", 0, 3.5),
        ("failed", 1, 3.5),
        ("left", 0, -1.0),
    ]


@pytest.mark.parametrize(("retries_max", "refused"), [(3, True), (5, False)])
def test_a_request_is_sent_again_so_many_times_and_then_refused(retries_max, refused) -> None:
    # Its prefill takes 4 s; until 5.0 each endpoint fails a second after it got the request.
    faults = tuple(Restart(1.0 + second, second % 2, 0.1) for second in range(5))
    workload = workload_of(asked(0, 0.0, 300, 2))
    result, [policy] = run(workload, fleet_of(2), InTurn, faults=faults, retries_max=retries_max)
    [outcome] = result.outcomes
    assert (outcome.refused, outcome.retries) == (refused, retries_max)
    assert sum(call[0] == "failed" for call in policy.calls) == (4 if refused else 5)
    assert outcome.first_s == (-1.0 if refused else pytest.approx(9.0))


def test_without_an_endpoint_requests_are_refused_and_later_ones_served() -> None:
    workload = workload_of(asked(0, 1.0, 10), asked(1, 5.0, 10))
    result, [policy] = run(workload, fleet_of(1), faults=(Restart(0.5, 0, 2.0),))
    assert [outcome.refused for outcome in result.outcomes] == [True, False]
    assert [call[:2] for call in policy.calls] == [
        ("left", 0),
        ("choose", 1),
        ("first_byte", 1),
        ("ended", 1),
    ]


def test_held_requests_outlive_a_restart_and_are_refused_when_nobody_will_come() -> None:
    workload = workload_of(asked(0, 0.0, 100, 2), asked(1, 0.5, 100, 2))
    result, _ = run(workload, fleet_of(1), OneEach, faults=(Restart(1.0, 0, 50.0),))
    assert [outcome.refused for outcome in result.outcomes] == [True, False]
    assert result.outcomes[1].dispatched_s == 51.0
    result, [policy] = run(workload, fleet_of(1), OneEach, faults=(Leave(1.0, 0),))
    assert [outcome.refused for outcome in result.outcomes] == [False, True]
    assert [call[:2] for call in policy.calls if call[0] == "failed"] == [("failed", 1)]


@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_a_leaving_endpoint_runs_what_it_has_and_gets_nothing_more(late_s) -> None:
    workload = workload_of(asked(0, 0.0, 100, 3), asked(1, 1.0, 10), asked(2, 2.0, 10))
    result, [policy] = run(
        workload, fleet_of(2), Watching, faults=(Leave(0.5, 0),), first_byte_late_s=late_s
    )
    assert [outcome.endpoint for outcome in result.outcomes] == [0, 1, 1]
    assert [outcome.retries for outcome in result.outcomes] == [0, 0, 0]
    words = [call[:2] for call in policy.calls]
    assert words.index(("left", 0)) == words.index(("ended", 0)) + 1
    _, [policy] = run(workload, fleet_of(2), First, faults=(Leave(0.0, 1),))
    assert policy.calls[0][:2] == ("left", 1)


def test_an_endpoint_that_joins_gets_the_next_number_and_takes_requests() -> None:
    faults = (Join(3.0, PLAIN), Join(2.0, PLAIN))
    workload = workload_of(*(asked(number, float(number), 10) for number in range(6)))
    result, [policy] = run(workload, fleet_of(1), Watching, faults=faults)
    assert [len(policy.alive[number]) for number in range(6)] == [1, 1, 2, 3, 3, 3]
    assert [outcome.endpoint for outcome in result.outcomes] == [0, 0, 0, 0, 1, 2]
    assert policy.context.endpoints == result.endpoints == len(policy.context.costs) == 3


def test_a_slow_engine_is_slow_from_its_next_step_until_the_time_given() -> None:
    workload = workload_of(asked(0, 0.0, 100, 20), asked(1, 90.0, 100))
    slow = Slow(3.0, 0, 0.5, 20.0)
    result, _ = run(workload, fleet_of(1), faults=(slow,))
    first, later = result.outcomes
    # Prefill to 2.0, one decode of 1.1; from 3.1 on 2.2 each, the last beginning at 18.5.
    assert first.first_s == pytest.approx(2.0)
    assert first.ended_s == pytest.approx(3.1 + 8 * 2.2 + (19 - 9) * 1.1)
    assert later.first_s == pytest.approx(92.0)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Restart(1.0, 2, 1.0)], "no such endpoint"),
        ([Leave(1.0, -1)], "no such endpoint"),
        ([Join(5.0, PLAIN), Leave(1.0, 2)], "no such endpoint"),
        ([Restart(1.0, 0, 2.0), Slow(3.0, 0, 0.5, 9.0)], "is away"),
        ([Leave(1.0, 0), Restart(30.0, 0, 2.0)], "is away"),
        ([Slow(1.0, 0, 0.5, 9.0), Slow(9.0, 0, 0.5, 19.0)], "slow already"),
        ([Slow(1.0, 0, 0.0, 9.0)], "speed"),
        ([Slow(1.0, 0, 2.0, 1.0)], "until_s"),
        ([Restart(1.0, 0, 0.0)], "down_s"),
        ([Restart(-1.0, 0, 1.0)], "at_s"),
        ([Join(math.inf, PLAIN)], "at_s"),
    ],
)
def test_a_change_that_cannot_happen_is_an_error(faults, message) -> None:
    with pytest.raises(ValueError, match=message):
        order_faults(faults, 2)


def test_changes_are_ordered_by_time_and_an_endpoint_may_fail_again() -> None:
    faults = [Restart(9.0, 0, 1.0), Join(0.0, PLAIN), Restart(1.0, 0, 1.0), Leave(5.0, 2)]
    assert [fault.at_s for fault in order_faults(faults, 2)] == [0.0, 1.0, 5.0, 9.0]
