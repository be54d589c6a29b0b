"""What the demo reads: its flags, the picker's log, Envoy's bootstrap; and its progress line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from bench.demo.arms import EXT_PROC, without_ext_proc
from bench.demo.decisions import examples, read_decisions
from bench.demo.options import parse_options
from bench.demo.progress import Progress
from bench.demo.promises import Roles
from bench.demo.scene import Scene, set_scene
from bench.demo.workload import Phase, Shape
from epp.core.decide import Decision
from epp.core.explain import Reason, explain, reason_of
from epp.core.inflight import Inflight
from epp.core.model import Endpoint, EndpointSpec, Pick, PrefixMatch, Request, ScoreTerm
from epp.envoy.command import render
from epp.envoy.options import EnvoyOptions

# -- the log -------------------------------------------------------------------------------


def decision(held: dict[int, int]) -> Decision:
    """A pick of the first of `len(held)` endpoints; `held`: blocks by slot."""
    endpoints = [Endpoint(EndpointSpec("10.0.0.1", 8000 + slot), slot) for slot in held]
    request = Request(model="m", prompt_tokens=6400)
    by_slot = {slot: blocks for slot, blocks in held.items() if blocks}
    request.match = PrefixMatch(blocks=100, block_tokens=64, by_slot=by_slot)
    totals = [float(-slot) for slot in held]
    term = ScoreTerm("queue-scorer", 2.0, [0.5] * len(held))
    pick = Pick(
        endpoint=endpoints[0],
        fallbacks=(),
        candidates=endpoints,
        totals=totals,
        terms=(term,),
        profile="default",
    )
    charge = Inflight().charge(endpoints[0], tokens=0, cold=False, now_s=0.0)
    return Decision(request, pick, charge, 0)


def line(made: Decision, **fields: Any) -> str:
    fields = {"reason": reason_of(made).value, **fields}
    return json.dumps({"level": "debug", "message": f"picked {explain(made)}", **fields})


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ({0: 90, 1: 30}, Reason.PREFIX),
        ({0: 30, 1: 30}, Reason.PREFIX),
        ({0: 30, 1: 90}, Reason.SPREAD),
        ({0: 0, 1: 90}, Reason.SPREAD),
        ({0: 0, 1: 0}, Reason.LOAD),
        ({0: 90}, Reason.ONLY),
    ],
)
def test_the_reason_and_the_sentence_are_read_back(held: dict[int, int], reason: Reason) -> None:
    made = decision(held)
    assert reason_of(made).value == reason.value
    (read,) = read_decisions([line(made, request_id="r1")])
    assert read.reason is reason
    assert read.address == "10.0.0.1:8000"
    assert read.request_id == "r1"
    assert read.sentence == f"picked {explain(made)}"


def test_other_lines_and_half_a_line_are_passed_over() -> None:
    good = line(decision({0: 1, 1: 0}))
    log = ['{"message":"serving"}', "Traceback", good[: len(good) // 2], good, ""]
    assert len(read_decisions(log)) == 1


def test_examples_are_those_with_most_cached_and_of_equals_the_latest() -> None:
    log = [
        line(decision({0: 1, 1: 0}), request_id="old"),
        line(decision({0: 0, 1: 0}), request_id="load"),
        line(decision({0: 1, 1: 0}), request_id="new"),
    ]
    assert [one.request_id for one in examples(read_decisions(log))] == ["new", "load"]
    log.insert(0, line(decision({0: 2, 1: 0}), request_id="most"))
    assert [one.request_id for one in examples(read_decisions(log))] == ["most", "load"]


# -- flags ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--endpoints", "10.0.0.1"], "--endpoints"),
        (["--endpoints", "10.0.0.1:1", "--engine-fault", "{}"], "--engine-fault"),
        (["--engine-fault", '{"error_501": true}'], "error_501"),
        (["--model", "m"], "--endpoints"),
        (["--once", "--no-workload"], "--no-workload"),
        (["--twice"], "--twice"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(flags)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "make demo ARGS=--once" in text
    assert "--engine-fault '{\\\"error_500\\\": true}'" in text
    assert "Exit status" in text


def test_endpoints_are_a_comma_list() -> None:
    options = parse_options(["--endpoints", "10.0.0.1:8000, [::1]:8000,"])
    assert options.endpoints == ("10.0.0.1:8000", "[::1]:8000")


def test_both_arms_get_the_same_plan() -> None:
    scene = set_scene(parse_options(["--quick"]))
    assert scene.plan(1).requests == scene.plan(1).requests
    assert scene.plan(1).requests != scene.plan(2).requests


def test_engines_that_keep_their_caches_get_new_openings_in_every_run() -> None:
    scene = Scene(
        model="m",
        phases=(Phase("nothing wrong", 5.0),),
        shape=Shape(),
        roles=Roles(0),
        fresh_openings=True,
    )
    one, other = scene.plan(1).requests, scene.plan(1).requests
    assert [r.id for r in one] == [r.id for r in other]
    assert not {r.messages[0][1][:16] for r in one} & {r.messages[0][1][:16] for r in other}


# -- round robin ---------------------------------------------------------------------------


def test_the_round_robin_bootstrap_lacks_the_picker_and_nothing_else() -> None:
    options = EnvoyOptions(endpoints=("127.0.0.1:1", "127.0.0.1:2"))
    picking = json.loads(render(options, form="json"))
    robin = json.loads(without_ext_proc(options))

    def filters(document: Any) -> list[Any]:
        chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
        found: list[Any] = chain["filters"][0]["typed_config"]["http_filters"]
        return found

    assert [f["name"] for f in filters(picking) if f not in filters(robin)] == [EXT_PROC]
    filters(picking)[:] = filters(robin)
    assert picking == robin


# -- progress ------------------------------------------------------------------------------


def test_on_a_terminal_the_line_is_rewritten_and_leaves_nothing_behind() -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=True)
    progress.show("a longer line")
    progress.show("short")
    progress.say("stays")
    screen = []
    for character in stream.getvalue():
        if character == "\r":
            at = 0
        elif character == "\n":
            break
        else:
            screen[at:] = [character, *screen[at + 1 :]]
            at += 1
    assert "".join(screen).rstrip() == "stays"


def test_elsewhere_lines_are_whole_and_few() -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=False)
    for number in range(100):
        progress.show(f"line {number}")
    progress.show("phase 2", always=True)
    progress.say("stays")
    assert stream.getvalue() == "line 0\nphase 2\nstays\n"
