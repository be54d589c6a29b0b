"""A publisher's batches in order, whatever is lost, restarts or breaks, against a slow oracle."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings, strategies as st

from epp.wire.kvsequence import Sequence, Tally


class Publisher:
    """Numbers batches and keeps the last ones; each process has batches of its own."""

    def __init__(self, buffer: int) -> None:
        self.process = 0
        self.number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)

    def publish(self) -> tuple[int, bytes]:
        batch = self.number, f"{self.process}.{self.number}".encode()
        self._buffer.append(batch)
        self.number += 1
        return batch

    def restart(self) -> None:
        self.process += 1
        self.number = 0
        self._buffer.clear()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        return [batch for batch in self._buffer if batch[0] >= start]

    @property
    def all(self) -> list[bytes]:
        return [f"{self.process}.{number}".encode() for number in range(self.number)]


class Follower:
    """What one is told by a sequence, and the replays it asks for."""

    def __init__(self, publisher: Publisher, *, can_replay: bool) -> None:
        self.told: list[bytes] = []
        """Since it was last told to forget."""
        self.complete = False
        self.answers: deque[tuple[int, bytes]] = deque()
        self.publisher = publisher
        self.sequence = Sequence(self, can_replay=can_replay, tally=Tally())

    def deliver(self, payload: bytes) -> None:
        self.told.append(payload)

    def restarted(self) -> None:
        self.told.clear()

    def unsure(self) -> None:
        self.complete = False

    def sure(self) -> None:
        self.complete = True

    def ask(self, start: int) -> None:
        self.answers = deque(self.publisher.replay(start))

    def filled(self) -> None:
        self.answers.clear()

    def retry(self) -> None:
        """As the edge does some time after a replay failed."""
        if not self.sequence.can_replay:
            self.sequence.replayable()
            if not self.complete:
                self.restarted()
                self.sequence.resync()

    def answer(self) -> None:
        if self.sequence.filling is None:
            return
        if self.answers:
            self.sequence.answer(*self.answers.popleft())
        else:
            self.sequence.end()

    def settle(self) -> None:
        """Answer and release until there is nothing more to do."""
        for _ in range(10_000):
            if self.sequence.filling is not None:
                self.answer()
            elif not self.sequence.release():
                return
        raise AssertionError("it never comes to rest")


OFTEN = ["live", "live", "live", "lost", "answer", "answer", "release"]
SELDOM = ["skip", "restart", "restart and go far", "break", "fail", "end lost", "retry"]
STEPS = st.sampled_from([*OFTEN, *SELDOM])


def step(what: str, publisher: Publisher, follower: Follower) -> None:
    sequence = follower.sequence
    if what == "live":
        sequence.live(*publisher.publish())
    elif what == "lost":
        publisher.publish()
    elif what == "answer":
        follower.answer()
    elif what == "skip" and follower.answers and sequence.progressed:
        follower.answers.popleft()
    elif what == "release":
        sequence.release()
    elif what in ("restart", "restart and go far", "break"):
        if what != "break":
            publisher.restart()
        for _ in range(4 if what == "restart and go far" else 0):
            publisher.publish()
        sequence.connected()
    elif what == "fail":
        sequence.failed()
    elif what == "end lost" and sequence.filling is not None:
        follower.answers.clear()
        (sequence.end if sequence.progressed else sequence.failed)()
    elif what == "retry":
        follower.retry()


def in_order(told: list[bytes]) -> bool:
    """Each once, rising, without gaps, of one process."""
    numbers = [int(word.split(b".")[1]) for word in told]
    processes = {word.split(b".")[0] for word in told}
    return (
        len(processes) <= 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if told
        else True
    )


@given(steps=st.lists(STEPS, max_size=60), first=st.integers(0, 5))
@settings(deadline=None, max_examples=400)
def test_with_a_full_buffer_all_that_was_published_is_known_in_the_end(
    steps: list[str], first: int
) -> None:
    publisher = Publisher(buffer=10_000)
    for _ in range(first):
        publisher.publish()
    follower = Follower(publisher, can_replay=True)
    follower.sequence.connected()
    for what in steps:
        step(what, publisher, follower)
        assert in_order(follower.told)
    follower.settle()
    follower.retry()
    follower.settle()
    follower.sequence.connected()
    follower.settle()
    assert follower.complete
    assert follower.told == publisher.all


@given(steps=st.lists(STEPS, max_size=60), buffer=st.integers(0, 4), first=st.integers(0, 9))
@settings(deadline=None, max_examples=400)
def test_with_a_small_buffer_what_is_told_is_the_end_of_what_was_published(
    steps: list[str], buffer: int, first: int
) -> None:
    publisher = Publisher(buffer=buffer)
    for _ in range(first):
        publisher.publish()
    follower = Follower(publisher, can_replay=True)
    follower.sequence.connected()
    for what in steps:
        step(what, publisher, follower)
        assert in_order(follower.told)
    follower.settle()
    follower.retry()
    follower.settle()
    follower.sequence.live(*publisher.publish())
    follower.settle()
    assert follower.told == publisher.all[len(publisher.all) - len(follower.told) :]
    assert follower.told
    assert not follower.complete or follower.told == publisher.all


@given(steps=st.lists(st.sampled_from(["live", "lost"]), max_size=30), first=st.integers(0, 5))
def test_without_a_replay_a_gap_is_forgotten_over(steps: list[str], first: int) -> None:
    publisher = Publisher(buffer=0)
    for _ in range(first):
        publisher.publish()
    follower = Follower(publisher, can_replay=False)
    for what in [*steps, "live"]:
        step(what, publisher, follower)
        assert in_order(follower.told)
    assert follower.told == publisher.all[len(publisher.all) - len(follower.told) :]
    assert follower.complete == (follower.told == publisher.all)
