"""The rules by which a publisher's batches are put in order, one by one."""

from __future__ import annotations

import pytest

from epp.wire.kvsequence import HELD_MAX, Fill, Sequence, Tally


class Told:
    """What a sequence found out, in words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def deliver(self, payload: bytes) -> None:
        self.words.append(payload.decode())

    def restarted(self) -> None:
        self.words.append("restarted")

    def unsure(self) -> None:
        self.words.append("unsure")

    def sure(self) -> None:
        self.words.append("sure")

    def ask(self, start: int) -> None:
        self.words.append(f"ask {start}")

    def filled(self) -> None:
        self.words.append("filled")

    def take(self) -> str:
        """All since the last call."""
        words, self.words = self.words, []
        return ", ".join(words)


def begin(*, can_replay: bool = True, batches: int = 3) -> tuple[Sequence, Told]:
    """A sequence that has delivered numbers 0 and up."""
    told = Told()
    sequence = Sequence(told, can_replay=can_replay, tally=Tally())
    for number in range(batches):
        sequence.live(number, b"a%d" % number)
    told.take()
    return sequence, told


def test_numbers_from_0_on_are_delivered_and_sure() -> None:
    sequence, told = begin(batches=0)
    sequence.live(0, b"a0")
    sequence.live(1, b"a1")
    assert told.take() == "sure, a0, a1"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_number_that_does_not_rise_is_a_restart(number: int) -> None:
    sequence, told = begin()
    sequence.live(number, b"b")
    assert told.take() == ("restarted, sure, b" if number == 0 else "restarted, ask 0")


def test_a_gap_asks_from_the_last_batch_known_and_holds_what_follows() -> None:
    sequence, told = begin()
    sequence.live(4, b"a4")
    sequence.live(5, b"a5")
    assert told.take() == "ask 2"
    for number in (2, 3, 4):
        sequence.answer(number, b"a%d" % number)
    sequence.end()
    assert told.take() == "a3, a4, filled"
    while sequence.release():
        pass
    assert told.take() == "a5"


def test_a_last_batch_that_differs_is_of_another_process() -> None:
    sequence, told = begin()
    sequence.connected()
    sequence.answer(2, b"b2")
    sequence.answer(3, b"b3")
    sequence.end()
    assert told.take() == "ask 2, restarted, ask 0"
    for number in range(4):
        sequence.answer(number, b"b%d" % number)
    sequence.end()
    assert told.take() == "b0, b1, b2, b3, sure, filled"


def test_a_replay_with_holes_is_asked_for_again_while_it_makes_progress() -> None:
    sequence, told = begin(batches=0)
    sequence.connected()
    for number in (0, 1, 3):
        sequence.answer(number, b"a%d" % number)
    sequence.end()
    assert told.take() == "ask 0, a0, a1, ask 1"
    for number in (1, 2, 3):
        sequence.answer(number, b"a%d" % number)
    sequence.end()
    assert told.take() == "a2, a3, sure, filled"


def test_what_the_publisher_no_longer_has_is_forgotten_over() -> None:
    sequence, told = begin()
    sequence.live(9, b"a9")
    sequence.answer(7, b"a7")
    sequence.end()
    assert told.take() == "ask 2, restarted, unsure, ask 0"
    for number in (7, 8, 9):
        sequence.answer(number, b"a%d" % number)
    sequence.end()
    assert told.take() == "unsure, a7, a8, a9, filled"


def test_a_check_that_fails_leaves_nothing_that_may_be_of_another_process() -> None:
    sequence, told = begin()
    sequence.connected()
    sequence.failed()
    assert told.take() == "ask 2, restarted, unsure, filled"
    assert not sequence.can_replay


def test_a_check_that_was_answered_before_it_failed_costs_nothing() -> None:
    sequence, told = begin()
    sequence.connected()
    sequence.answer(2, b"a2")
    sequence.failed()
    assert told.take() == "ask 2, filled"


def test_a_check_without_the_batch_to_compare_is_none() -> None:
    sequence, told = begin()
    sequence.connected()
    sequence.answer(3, b"b3")
    sequence.end()
    assert told.take() == "ask 2, restarted, unsure, ask 0"


def test_a_publisher_that_has_sent_nothing_yet_is_known_completely() -> None:
    sequence, told = begin(batches=0)
    sequence.connected()
    sequence.end()
    assert told.take() == "ask 0, sure, filled"


def test_what_came_after_we_asked_is_asked_for_once_more() -> None:
    sequence, told = begin(batches=0)
    sequence.connected()
    sequence.live(1, b"a1")
    sequence.end()
    assert told.take() == "ask 0, ask 0"
    sequence.end()
    assert told.take() == "unsure, filled"
    assert sequence.release()
    assert told.take() == "a1"


def test_what_is_held_is_bounded_and_the_rest_asked_for_later() -> None:
    sequence, told = begin()
    for number in range(4, 4 + HELD_MAX + 10):
        sequence.live(number, b"a%d" % number)
    assert len(sequence.held) == HELD_MAX
    sequence.answer(3, b"a3")
    sequence.end()
    while sequence.release():
        pass
    told.take()
    sequence.live(4 + HELD_MAX + 10, b"last")
    assert told.take() == f"ask {4 + HELD_MAX - 1}"
    assert sequence.filling is Fill.GAP


def test_without_a_replay_socket_a_new_connection_may_be_to_another_process() -> None:
    sequence, told = begin(can_replay=False)
    sequence.connected()
    sequence.live(3, b"3")
    assert told.take() == "restarted, unsure, unsure, 3"
