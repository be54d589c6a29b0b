"""What the demo makes of outcomes: figures, promises, and the text a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.demo import promises, report
from bench.demo.client import Fate, Outcome, read_stream
from bench.demo.decisions import Decided
from bench.demo.figures import Arm, Kill, by_engine, errors_of, figures, percentile, return_s
from bench.demo.promises import Promise, Roles, judge
from bench.demo.report import Paint
from bench.demo.workload import Kind, Phase, Plan, Planned
from epp.core.explain import Reason

ENGINES = ("engine-1", "engine-2", "engine-3")
ROLES = Roles(0, overload_phase=1, overloaded_engine="engine-2", outage=True)
PLAIN = Paint(False)


def outcome(engine: str = "engine-1", *, phase: int = 0, **differing: Any) -> Outcome:
    """A good one: first token after 100 ms, half of the prompt cached."""
    values: dict[str, Any] = {
        "id": "chat-1.1-turn-1",
        "kind": Kind.CHAT,
        "phase": phase,
        "late_s": 0.001,
        "sent_s": 1.0,
        "fate": Fate.OK,
        "engine": engine,
        "first_s": differing.get("sent_s", 1.0) + 0.1,
        "end_s": differing.get("sent_s", 1.0) + 0.5,
        "prompt_tokens": 1000,
        "cached_tokens": 500,
    }
    return Outcome(**{**values, **differing})


def picked(**differing: Any) -> Arm:
    """A run that keeps every promise."""
    outcomes = [outcome(e) for e in ENGINES for _ in range(10)]
    outcomes += [outcome(e, phase=1, sent_s=11.0) for e in ("engine-1", "engine-3") * 8]
    outcomes += [outcome(e, phase=2, sent_s=24.0) for e in ENGINES]
    kill = Kill("engine-3", killed_s=20.0, ready_s=23.0)
    return Arm(**{"name": "EPP", "outcomes": outcomes, "kill": kill, **differing})


def robin() -> Arm:
    outcomes = [outcome(e, first_s=1.3, cached_tokens=300) for e in ENGINES for _ in range(20)]
    return Arm(name="round robin", outcomes=outcomes)


def broken(arm: Arm, *, against: Arm | None = None, left: int = 0) -> list[str]:
    """First words of the promises an arm breaks."""
    judged = judge(arm, against or robin(), engines=ENGINES, roles=ROLES, inflight_left=left)
    return [p.text.split(" ")[0] for p in judged if not p.kept]


# -- figures -------------------------------------------------------------------------------


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0


def test_the_hit_ratio_counts_tokens_of_answers_that_say() -> None:
    some = [
        outcome(prompt_tokens=900, cached_tokens=900),
        outcome(prompt_tokens=100, cached_tokens=0),
        outcome(prompt_tokens=5000, cached_tokens=None),
    ]
    assert figures(Arm(name="", outcomes=some)).hit_ratio == 0.9


def test_engines_that_do_not_say_have_no_hit_ratio_instead_of_0() -> None:
    some = [outcome(cached_tokens=None), outcome(prompt_tokens=None, cached_tokens=None)]
    assert figures(Arm(name="", outcomes=some)).hit_ratio is None


def cut(**differing: Any) -> Outcome:
    """A stream that the killed engine had begun."""
    values = {"fate": Fate.CUT, "sent_s": 19.5, "end_s": 20.1, **differing}
    return outcome(values.pop("engine", "engine-3"), **values)


def test_a_stream_cut_by_the_kill_is_no_error() -> None:
    arm = picked(outcomes=[outcome(), cut()])
    assert errors_of(arm) == []
    assert (figures(arm).cut, figures(arm).errors) == (1, 0)


@pytest.mark.parametrize(
    "differing",
    [
        {"engine": "engine-1"},
        {"end_s": 19.9},
        {"sent_s": 20.5, "end_s": 20.6},
        {"fate": Fate.ERROR, "engine": ""},
    ],
    ids=["another engine", "before the kill", "sent after the kill", "no answer had begun"],
)
def test_any_other_failure_is_an_error(differing: dict[str, Any]) -> None:
    arm = picked(outcomes=[outcome(), cut(**differing)])
    assert len(errors_of(arm)) == figures(arm).errors == 1
    assert figures(arm).cut == 0


def test_without_a_kill_every_cut_stream_is_an_error() -> None:
    assert figures(picked(outcomes=[cut()], kill=None)).errors == 1


def test_an_engine_without_requests_is_counted_as_0() -> None:
    counts = by_engine([outcome("engine-2"), outcome("")], ENGINES)
    assert counts == {"engine-1": 0, "engine-2": 1, "engine-3": 0}


def test_a_return_is_timed_from_ready_to_the_first_request_after_it() -> None:
    late = [outcome("engine-3", sent_s=s) for s in (27.0, 25.5)]
    before = [outcome("engine-3", sent_s=19.0), outcome("engine-1", sent_s=23.5)]
    assert return_s(picked(outcomes=late + before)) == 2.5
    assert return_s(picked(outcomes=before)) is None
    assert return_s(picked(outcomes=late, kill=Kill("engine-3", 20.0))) is None


# -- the client's reading ------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"


def read(body: bytes) -> Outcome:
    result = outcome(fate=Fate.CUT, prompt_tokens=None, cached_tokens=None)
    read_stream(body, result)
    return result


def test_a_stream_is_good_when_it_ends_with_done() -> None:
    usage = b'data: {"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    good = read(b'data: {"choices":[]}\n\n' + usage + DONE)
    assert (good.fate, good.prompt_tokens, good.cached_tokens) == (Fate.OK, 7, 4)


def test_a_stream_that_ends_early_in_the_normal_way_is_no_good_one() -> None:
    for body in (b"", b'data: {"choices":[]}\n\n'):
        assert read(body).fate is Fate.CUT
        assert "[DONE]" in read(body).error


def test_cached_tokens_that_are_not_reported_are_not_0() -> None:
    assert read(b'data: {"usage":{"prompt_tokens":7}}\n\n' + DONE).cached_tokens is None
    null = b'data: {"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}\n\n'
    assert read(null + DONE).cached_tokens is None
    assert read(b'data: {"usage": nonsense\n\n' + DONE).prompt_tokens is None


# -- promises ------------------------------------------------------------------------------


def test_a_good_run_keeps_every_promise() -> None:
    assert broken(picked()) == []
    assert len(judge(picked(), robin(), engines=ENGINES, roles=ROLES, inflight_left=0)) == 7


def test_one_failed_request_breaks_a_promise_and_is_told() -> None:
    arm = picked()
    arm.outcomes.append(outcome("", fate=Fate.ERROR, error="status 503: no"))
    assert broken(arm) == ["no"]
    judged = judge(arm, None, engines=ENGINES, roles=ROLES, inflight_left=0)
    assert "status 503: no" in judged[0].detail


def test_a_run_without_requests_keeps_nothing() -> None:
    assert broken(picked(outcomes=[])) == ["no", "median", "nothing", "killed"]


def test_hits_no_better_than_round_robins_break_a_promise() -> None:
    outcomes = picked().outcomes
    for one in outcomes:
        one.cached_tokens = 300
    assert broken(picked(outcomes=outcomes)) == ["hit"]


def test_first_tokens_as_late_as_round_robins_break_a_promise() -> None:
    outcomes = picked().outcomes
    for one in outcomes:
        one.first_s = one.sent_s + 0.3
    assert broken(picked(outcomes=outcomes)) == ["median"]


def test_one_engine_for_all_breaks_a_promise() -> None:
    arm = picked()
    arm.outcomes = [o for o in arm.outcomes if o.phase] + [outcome() for _ in range(30)]
    assert broken(arm) == ["nothing"]


def test_a_fair_share_for_an_overloaded_engine_breaks_a_promise() -> None:
    arm = picked()
    arm.outcomes += [outcome("engine-2", phase=1, sent_s=12.0) for _ in range(8)]
    assert broken(arm) == ["overloaded"]


@pytest.mark.parametrize("sent_s", [22.0, 29.5])
def test_a_killed_engine_that_is_not_used_again_soon_breaks_a_promise(sent_s: float) -> None:
    arm = picked()
    arm.outcomes = [o for o in arm.outcomes if o.phase < 2 or o.engine != "engine-3"]
    arm.outcomes.append(outcome("engine-3", phase=2, sent_s=sent_s))
    assert broken(arm) == ["killed"]


def test_a_count_that_does_not_return_to_zero_breaks_a_promise() -> None:
    assert broken(picked(), left=1) == ["nothing"]


def test_what_was_not_done_is_not_promised() -> None:
    judged = judge(picked(), None, engines=ENGINES, roles=Roles(0), inflight_left=0)
    assert [p.text.split(" ")[0] for p in judged] == ["no", "nothing", "nothing"]
    judged = judge(picked(), robin(), engines=ENGINES, roles=Roles(), inflight_left=0)
    assert [p.text.split(" ")[0] for p in judged] == ["no", "nothing"]


# -- the report ----------------------------------------------------------------------------

PLAN = Plan(
    (Phase("nothing wrong", 10.0), Phase("engine-2 overloaded", 8.0), Phase("killed", 12.0)),
    tuple(
        Planned(f"chat-1.{n}-turn-1", Kind.CHAT, n % 3, 0.0, (("system", "s"),), 1)
        for n in range(6)
    ),
)
DECIDED = [
    Decided("a", "10.0.0.1:1", Reason.PREFIX, 64, "picked 10.0.0.1:1 (…); next 10.0.0.2:1 (…)"),
    Decided("b", "10.0.0.1:1", Reason.PREFIX, 64, "picked the newer one"),
    Decided("c", "10.0.0.2:1", Reason.LOAD, 0, "picked 10.0.0.2:1 (…)"),
]


def cells(lines: Sequence[str], beginning: str) -> list[str]:
    """The cells of the first row that begins so."""
    row = next(line for line in lines if line.strip().startswith(beginning))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_columns_are_aligned() -> None:
    lines = report.table(["name", "n"], [["a", "10"], ["longer", "1"]])
    assert lines == ["name     n", "a       10", "longer   1"]


def test_where_and_why_counts_per_engine_and_over_all() -> None:
    addresses = {name: f"10.0.0.{n}:1" for n, name in enumerate(ENGINES, start=1)}
    lines = report.where_and_why(picked(), DECIDED, addresses, PLAIN)
    assert cells(lines, "engine-1")[1:] == [
        *("10.0.0.1:1", "19", "2", "0", "0", "0.50", "100 ms", "100 ms")
    ]
    assert cells(lines, "engine-2")[3:6] == ["0", "1", "0"]
    assert cells(lines, "all")[1:5] == ["49", "2", "1", "0"]
    assert "only" not in " ".join(lines)


def test_an_only_candidate_gets_a_column_when_there_was_one() -> None:
    decided = [Decided("a", "engine-1", Reason.ONLY, 0, "")]
    lines = report.where_and_why(picked(), decided, {"engine-1": "engine-1"}, PLAIN)
    assert "only" in cells(lines, "engine ")
    assert cells(lines, "all")[5] == "1"
    assert "address" not in cells(lines, "engine ")


def test_phases_are_compared_row_by_row() -> None:
    lines = report.against(PLAN, picked(), robin(), PLAIN)
    assert cells(lines, "1 nothing wrong")[1:] == [
        *("0.50 / 0.30", "100 ms /", "300 ms", "100 ms /", "300 ms", "0 / 0", "0 / 0")
    ]
    assert cells(lines, "2 engine-2")[1] == "0.50 / -"
    assert cells(lines, "all")[1] == "0.50 / 0.30"


def test_answers_are_counted_per_phase_and_engine() -> None:
    lines = report.per_phase(PLAN, picked(), robin(), ENGINES, PLAIN)
    assert cells(lines, "2 engine-2") == [
        *("2 engine-2 overloaded", "2", "8 /", "0 /", "8", "0 /", "0 /", "0")
    ]


def test_promises_show_what_was_seen_and_why_it_broke() -> None:
    judged = [Promise("sun", True, "shone"), Promise("no rain", False, "rained", "at noon")]
    lines = report.promises(judged, PLAIN)
    assert lines[2:] == [
        "  kept    sun      shone",
        "  BROKEN  no rain  rained",
        " " * 10 + "at noon",
    ]


def test_no_colour_means_no_escapes_and_colour_does() -> None:
    judged = [Promise("sun", True, "shone"), Promise("no rain", False, "rained")]
    assert "\x1b" not in "\n".join(report.promises(judged, Paint(False)))
    text = "\n".join(report.promises(judged, Paint(True)))
    assert "\x1b[32mkept" in text
    assert "\x1b[1;31mBROKEN" in text


@pytest.mark.parametrize(
    ("engine_s", "client_s", "slow"), [(0.0, 0.0, False), (0.8, 0.0, True), (0.0, 0.8, True)]
)
def test_a_machine_that_did_not_keep_up_is_told(
    engine_s: float, client_s: float, slow: bool
) -> None:
    arms = [robin(), picked(engine_late_s=engine_s, outcomes=[outcome(late_s=client_s)])]
    assert ("did not keep up" in " ".join(report.lateness(arms, PLAIN))) is slow


def test_lateness_of_engines_that_are_not_simulated_is_not_told_as_0() -> None:
    text = " ".join(report.lateness([picked(engine_late_s=None)], PLAIN))
    assert "engines" not in text
    assert "engines ran 0.0 s behind" in " ".join(
        report.lateness([picked(engine_late_s=0.0)], PLAIN)
    )


def test_one_decision_of_each_kind_is_explained_the_latest() -> None:
    text = "\n".join(report.explained(DECIDED, PLAIN))
    assert "picked the newer one" in text
    assert "picked 10.0.0.1:1" not in text
    assert "load: c" in text
    assert report.explained([], PLAIN) == []


def test_no_line_of_the_tables_is_wider_than_a_terminal() -> None:
    addresses = {name: f"127.0.0.1:{n}0000" for n, name in enumerate(ENGINES, start=1)}
    judged = judge(picked(), robin(), engines=ENGINES, roles=ROLES, inflight_left=0)
    lines = [
        *report.where_and_why(picked(), DECIDED, addresses, PLAIN),
        *report.per_phase(PLAN, picked(), robin(), ENGINES, PLAIN),
        *report.against(PLAN, picked(), robin(), PLAIN),
        *report.promises(judged, PLAIN),
        *report.lateness([picked()], PLAIN),
    ]
    assert max(map(len, lines)) <= report.WIDTH


def test_the_plan_is_described() -> None:
    text = report.describe_plan(PLAN, 7)
    assert (
        "6 requests in 30 s, once each way (seed 7): 6 turns of 6 chats on 1 shared system prompts"
        in text
    )


def test_margins_leave_room_for_failing() -> None:
    assert promises.HIT_RATIO_GAIN_MIN > 0
    assert promises.TTFT_P50_RATIO_MAX < 1
    assert promises.OVERLOADED_SHARE_MAX < 1
    assert 1 < promises.LOAD_RATIO_MAX < float("inf")
