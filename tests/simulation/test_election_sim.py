"""Two and three electors in virtual time: never two leaders, and always one again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.simulation.election_world import Node, TwoLeadersError, World, world

FAULTS_S = 200.0
"""Faults begin and end within this time."""
AGAIN_S = 30.0
"""After the last fault one leads within this: a call that hangs, a lease's duration, two retries,
and a lost race."""
LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
LOOK_S = RETRY_S * 1.2 + 0.1
"""From one look at the Lease to the next, at most."""
DRIFT = 0.01


# -- faults --------------------------------------------------------------------------------


def victim(world: World) -> Node:
    """Mostly the leader: what happens to others changes little."""
    leaders = world.leaders()
    if leaders and world.rng.random() < 0.7:
        return world.nodes[leaders[0]]
    return world.rng.choice(world.nodes)


def cut(world: World, until: float) -> None:
    world.faults.cut_until[victim(world).number] = until


def hang(world: World, until: float) -> None:
    world.faults.hang_until = until


def down(world: World, until: float) -> None:
    world.faults.down_until = until


def errors(world: World, until: float) -> None:
    world.faults.errors_until = until


def slow(world: World, until: float) -> None:
    world.faults.slow_until = until
    world.faults.slow_s = world.rng.choice((1.0, 4.0, 12.0))


def pause(world: World, until: float) -> None:
    victim(world).pause(until)


def kill(world: World, until: float) -> None:
    node = victim(world)
    if node.alive:
        world.at(until, lambda: begin(world, node))
        node.kill()


def stop(world: World, until: float) -> None:
    node = victim(world)
    if node.alive and not node.paused:
        world.at(until, lambda: begin(world, node))
        node.stop(by_cancel=world.rng.random() < 0.5)


def begin(world: World, node: Node) -> None:
    """Start a node again; one that is still stopping is killed first."""
    node.kill()
    node.start()


FAULTS: tuple[Callable[[World, float], None], ...] = (
    *(cut, hang, down, errors, slow, pause, kill, stop),
)


def delete_lease(world: World) -> None:
    """Somebody deletes the Lease, at a moment when nobody has just begun: see `election_record`."""
    if all(node.alive and node.elector.holder is not None for node in world.nodes):
        world.note("the Lease is deleted")
        world.store.lease = None


def plan_faults(world: World, *, deletion: bool) -> None:
    for _ in range(world.rng.randint(3, 16)):
        fault = world.rng.choice(FAULTS)
        if deletion and fault in (kill, stop):
            continue
        begins = world.rng.uniform(0.0, FAULTS_S - 5.0)
        ends = min(FAULTS_S, begins + world.rng.choice((1.0, 6.0, 12.0, 18.0, 40.0)))

        def happen(fault: Callable[[World, float], None] = fault, ends: float = ends) -> None:
            world.note(f"{fault.__name__} until {ends:.3f}")
            fault(world, ends)

        world.at(begins, happen)
    if deletion:
        world.at(world.rng.uniform(10.0, FAULTS_S - LEASE_S), lambda: delete_lease(world))


def live_through(seed: int, nodes: int) -> int:
    """One seed; returns how often someone else came to lead."""
    with world(seed, nodes, drift=DRIFT) as made:
        for node in made.nodes:
            made.at(made.rng.uniform(0.0, 3.0), node.start)
        plan_faults(made, deletion=seed % 4 == 0)
        made.run(FAULTS_S + AGAIN_S)
        for later_s in range(30):
            made.run(FAULTS_S + AGAIN_S + later_s)
            assert len(made.leaders()) == 1, "\n".join(made.story)
        assert made.store.lease is not None
        return int(made.store.lease["spec"]["leaseTransitions"])


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("block", range(4))
def test_never_two_lead_and_one_leads_again_when_the_faults_are_over(
    nodes: int, block: int
) -> None:
    transitions = 0
    for seed in range(block * 10, block * 10 + 10):
        try:
            transitions += live_through(seed, nodes)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {nodes} nodes:\n{error}") from error
    assert transitions >= 10, "the faults change nothing: they test nothing"


def test_the_simulation_finds_two_leaders_where_clocks_run_apart_too_far() -> None:
    with world(0, 2) as made:
        slow_one, fast_one = made.nodes
        slow_one.rate, fast_one.rate = 0.7, 1.3
        slow_one.start()
        made.run(5.0)
        fast_one.start()
        made.run(20.0)
        made.faults.cut_until[slow_one.number] = 60.0
        with pytest.raises(TwoLeadersError):
            made.run(60.0)


# -- single faults, to the second ----------------------------------------------------------


@contextmanager
def led(seed: int, nodes: int = 2) -> Iterator[tuple[World, Node]]:
    """A world in which everyone has started and one leads."""
    with world(seed, nodes, drift=DRIFT) as made:
        for node in made.nodes:
            node.start()
        made.run(20.0)
        (leader,) = made.leaders()
        yield made, made.nodes[leader]


def moment(made: World, happened: Callable[[], bool], within_s: float) -> float:
    """How many seconds from now on it takes, to a tenth of one."""
    began_s = made.now
    while not happened():
        assert made.now - began_s <= within_s, "not within the time it may take"
        made.run(made.now + 0.1)
    return made.now - began_s


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_vanished_is_replaced_when_its_lease_has_run_out(seed: int) -> None:
    with led(seed, 3) as (made, leader):
        leader.kill()
        took_s = moment(made, lambda: bool(made.leaders()), LEASE_S * (1 + DRIFT) + 2 * LOOK_S)
        assert took_s > LEASE_S * (1 - DRIFT) - LOOK_S


@pytest.mark.parametrize("by_cancel", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_released_lease_is_taken_at_the_next_look(seed: int, by_cancel: bool) -> None:
    with led(seed, 3) as (made, leader):
        leader.stop(by_cancel=by_cancel)
        assert not leader.elector.is_leader
        assert leader.told[-1] is False
        moment(made, lambda: bool(made.leaders()), LOOK_S * (1 + DRIFT))
        assert not leader.alive, "it has ended"


@pytest.mark.parametrize("fault", [hang, down, errors])
@pytest.mark.parametrize("seed", range(3))
def test_a_leader_that_cannot_renew_ends_in_time_and_says_so(
    seed: int, fault: Callable[[World, float], None]
) -> None:
    with led(seed, 1) as (made, leader):
        made.faults.error_ratio = 1.0
        fault(made, 60.0)
        ended_s = moment(made, lambda: not leader.told[-1], RENEW_S * (1 + DRIFT))
        assert ended_s > (RENEW_S - LOOK_S) * (1 - DRIFT) - 0.1
        assert not leader.elector.is_leader
        made.run(60.0)
        assert made.leaders() == []
        moment(made, lambda: bool(made.leaders()), RENEW_S)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_was_late_prolongs_nothing(seed: int) -> None:
    with led(seed, 1) as (made, leader):
        made.faults.answer_late_s = 4.0
        version = made.store.version
        moment(made, lambda: made.store.version > version, 4.0 + 2 * LOOK_S)
        wrote_s = made.now
        made.run(wrote_s + 4.1)
        cut(made, made.now + 60.0)
        moment(made, lambda: not leader.told[-1], RENEW_S)
        assert made.now - wrote_s <= RENEW_S * (1 + DRIFT) + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_hang_shorter_than_the_deadline_changes_nothing(seed: int) -> None:
    with led(seed) as (made, leader):
        for _ in range(5):
            hang(made, made.now + RENEW_S - 2 * LOOK_S)
            made.run(made.now + RENEW_S + LOOK_S)
        assert leader.told == [False, True]


def test_a_leader_that_was_paused_does_not_lead_for_a_moment_when_it_wakes() -> None:
    with led(0) as (made, leader):
        leader.pause(made.now + 40.0)
        made.run(made.now + 39.0)
        assert made.leaders() == [1 - leader.number]
        made.run(made.now + 30.0)
        assert leader.told == [False, True, False]


@pytest.mark.parametrize("seed", range(3))
def test_a_deleted_lease_is_made_again_by_the_leader(seed: int) -> None:
    with led(seed, 3) as (made, leader):
        made.store.lease = None
        moment(made, lambda: made.store.lease is not None, LOOK_S * (1 + DRIFT))
        made.run(made.now + 30.0)
        assert leader.told == [False, True]


def test_a_quiet_election_costs_two_requests_per_retry_of_who_leads_and_one_of_others() -> None:
    with led(0, 3) as (made, _):
        before = made.requests
        made.run(made.now + 100.0)
        assert made.requests - before == pytest.approx((2 + 1 + 1) * 100.0 / RETRY_S, rel=0.1)
