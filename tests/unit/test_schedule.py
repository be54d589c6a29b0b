from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import pytest

from epp.core.errors import DropReason, RequestDropped
from epp.core.model import Endpoint, EndpointSpec, Load, Plugin, Reads, Request
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Snapshot
from epp.core.schedule import NamedFilter, Profile, Scheduler, WeightedScorer

CALLS: Counter[str] = Counter()


class ByLoad(Plugin, frozen=True):
    """The fewest waiting; counts its calls."""

    reads: ClassVar[Reads] = Reads.LOAD

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        CALLS["load"] += 1
        return [1.0 / (1 + (e.load.waiting or 0)) for e in endpoints]


class ByPrompt(Plugin, frozen=True):
    """The endpoint whose slot equals the prompt's token count."""

    reads: ClassVar[Reads] = Reads.REQUEST

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        CALLS["prompt"] += 1
        return [float(e.slot == request.prompt_tokens) for e in endpoints]


class Wild(Plugin, frozen=True):
    """Gives what it is told to give."""

    scores: list[float]
    reads: ClassVar[Reads] = Reads.REQUEST

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        return list(self.scores)


class OnlySlots(Plugin, frozen=True):
    """Keeps some slots; whether it reads the request is a parameter."""

    slots: tuple[int, ...]
    reads_request: bool = False

    @property
    def reads(self) -> Reads:
        return Reads.REQUEST if self.reads_request else Reads.LABELS

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        CALLS["filter"] += 1
        return [e for e in endpoints if e.slot in self.slots]


def endpoints(*waiting: int) -> tuple[Endpoint, ...]:
    made = []
    for slot, count in enumerate(waiting):
        endpoint = Endpoint(EndpointSpec(host=f"10.0.0.{slot}", port=8000), slot)
        endpoint.load = Load(at_s=0.0, waiting=count)
        made.append(endpoint)
    return tuple(made)


def scheduler(*scorers, filters=()) -> Scheduler:
    CALLS.clear()
    weighted = tuple(WeightedScorer(type(s).__name__, w, s) for w, s in scorers)
    named = tuple(NamedFilter(type(f).__name__, f) for f in filters)
    return Scheduler(Profile("default", named, weighted, MaxScorePicker()), Random(1))


def test_weights_decide_between_load_and_prompt() -> None:
    pool = Snapshot(endpoints(0, 9, 9), 1)
    request = Request(prompt_tokens=2)
    heavy_prompt = scheduler((1.0, ByLoad()), (3.0, ByPrompt()))
    assert heavy_prompt.pick(request, pool).endpoint.slot == 2
    heavy_load = scheduler((3.0, ByLoad()), (1.0, ByPrompt()))
    assert heavy_load.pick(request, pool).endpoint.slot == 0


def test_what_reads_only_load_runs_once_per_version() -> None:
    run = scheduler((1.0, ByLoad()), (1.0, ByPrompt()), filters=[OnlySlots((0, 1, 2))])
    pool = endpoints(3, 2, 1)
    for _ in range(5):
        assert run.pick(Request(prompt_tokens=9), Snapshot(pool, 7)).endpoint.slot == 2
    assert CALLS == {"load": 1, "filter": 1, "prompt": 5}
    pool[0].load = Load(at_s=1.0, waiting=0)
    assert run.pick(Request(prompt_tokens=9), Snapshot(pool, 8)).endpoint.slot == 0
    assert CALLS["load"] == 2


def test_one_pick_s_own_scores_do_not_leak_into_the_next() -> None:
    run = scheduler((1.0, ByLoad()), (3.0, ByPrompt()))
    pool = Snapshot(endpoints(0, 9, 9), 1)
    assert run.pick(Request(prompt_tokens=1), pool).endpoint.slot == 1
    assert run.pick(Request(prompt_tokens=2), pool).endpoint.slot == 2
    assert run.pick(Request(prompt_tokens=9), pool).endpoint.slot == 0


class Sparse(ByPrompt, frozen=True):
    """The same scores, and one for a slot that is no candidate's."""

    def by_slot(self, request: Request) -> dict[int, float]:
        return {request.prompt_tokens: 1.0, 1_000: 1.0}


def test_a_sparse_scorer_adds_what_its_scores_say() -> None:
    pool = Snapshot(endpoints(3, 0, 9), 1)
    run = scheduler((1.0, ByLoad()), (0.3, Sparse()))  # one for all: nothing leaks into the next
    for tokens in (0, 1, 2, 77):
        request = Request(prompt_tokens=tokens)
        dense = scheduler((1.0, ByLoad()), (0.3, ByPrompt())).pick(request, pool)
        sparse = run.pick(request, pool)
        assert sparse.endpoint is dense.endpoint
        assert sparse.totals == dense.totals
        assert [t.scores for t in sparse.terms] == [t.scores for t in dense.terms]
        subset = run.pick(request, pool, pool.endpoints[1:])
        assert subset.totals == dense.totals[1:]


def test_a_subset_is_scored_by_itself() -> None:
    run = scheduler((1.0, ByLoad()))
    pool = endpoints(0, 5, 2)
    pick = run.pick(Request(), Snapshot(pool, 1), pool[1:])
    assert pick.endpoint.slot == 2
    assert [e.slot for e in pick.candidates] == [1, 2]
    assert run.pick(Request(), Snapshot(pool, 1)).endpoint.slot == 0


def test_a_filter_that_reads_the_request_runs_for_each() -> None:
    run = scheduler((1.0, ByLoad()), filters=[OnlySlots((1, 2), reads_request=True)])
    pool = Snapshot(endpoints(0, 5, 2), 1)
    for _ in range(3):
        pick = run.pick(Request(), pool)
        assert pick.endpoint.slot == 2
        assert len(pick.terms[0].scores) == len(pick.candidates) == 2
    assert CALLS["filter"] == 3


def test_K05_filters_that_leave_nothing_are_503_and_named() -> None:
    run = scheduler((1.0, ByLoad()), filters=[OnlySlots(())])
    with pytest.raises(RequestDropped, match="OnlySlots") as dropped:
        run.pick(Request(), Snapshot(endpoints(0), 1))
    assert dropped.value.reason is DropReason.NO_ENDPOINTS


def test_an_empty_pool_says_so() -> None:
    with pytest.raises(RequestDropped, match="no endpoint"):
        scheduler((1.0, ByLoad())).pick(Request(), Snapshot((), 1))


@pytest.mark.parametrize(
    "scores", [[0.5], [0.5, 1.5], [-0.1, 0.5], [0.5, float("nan")], [0.5, 0.5, 0.5]]
)
def test_F05_a_score_out_of_shape_or_range_is_a_bug_and_not_clamped(scores) -> None:
    run = scheduler((1.0, Wild(scores)))
    with pytest.raises((AssertionError, ValueError), match=r"Wild|zip"):
        run.pick(Request(), Snapshot(endpoints(0, 0), 1))


def test_a_pick_carries_every_term() -> None:
    run = scheduler((2.0, ByLoad()), (3.0, ByPrompt()))
    pick = run.pick(Request(prompt_tokens=1), Snapshot(endpoints(0, 1), 1))
    terms = {t.name: (t.weight, list(t.scores)) for t in pick.terms}
    assert terms == {"ByLoad": (2.0, [1.0, 0.5]), "ByPrompt": (3.0, [0.0, 1.0])}
    assert list(pick.totals) == [2.0, 4.0]


def test_a_profile_without_scorers_still_picks() -> None:
    assert scheduler().pick(Request(), Snapshot(endpoints(0, 0), 1)).endpoint.slot in {0, 1}
