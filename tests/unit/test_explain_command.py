"""`epp explain`: files in, an explanation out, and errors that say what to do."""

import io
import json

import msgspec
import pytest

from epp import cli
from epp.core.parse import parse_request
from epp.core.state import State
from epp.edge.admin import block_pieces, debug_state
from tests.unit.test_explain import COST, SCORES, decider_of, prompt, send_to

SHARED = "The rules of the house. " * 400  # 9600 bytes, 2400 tokens
BODY = {"model": "m", "messages": [{"role": "user", "content": SHARED + "What now?"}]}
SAVE = "curl -s 'http://HOST:9090/debug/state?blocks=true' > STATE.json"


def run(*argv: str) -> int:
    try:
        return cli.main(["explain", *argv])
    except SystemExit as end:
        return int(end.code or 0)


def state_of(decider, *, blocks: bool = True) -> bytes:
    head = msgspec.json.encode(debug_state(decider, lambda: 0.0).state)
    if not blocks:
        return head
    names = b"".join(block_pieces(decider))
    return head.removesuffix(b"}") + b',"prefix_blocks":{' + names + b"}}"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a body, a state of a picker that served it on 10.0.0.2 and is busy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "body.json").write_text(json.dumps(BODY))
    decider = decider_of(COST)
    save(tmp_path, decider)
    return tmp_path


def save(folder, decider, **kwargs) -> None:
    headers = {":path": "/v1/chat/completions"}
    served = parse_request(headers, json.dumps(BODY).encode())
    decider.ended(send_to(decider, 2, served), 0.0)
    send_to(decider, 2, prompt(1000, "i", 1000))
    send_to(decider, 1, prompt(100, "k", 100))
    (folder / "state.json").write_bytes(state_of(decider, **kwargs))


def test_a_saved_state_explains_a_request(files, capsys) -> None:
    assert run("--state", "state.json", "body.json") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    first, blank, head, *rows = printed.out.splitlines()
    assert first.startswith("10.0.0.2:8000: 2368 of ")
    assert " tokens cached, 0.063 s behind 1 prefill, costs 0." in first
    assert "; 10.0.0.3:8000 would cost 0." in first
    assert first.endswith(" s cold")
    assert blank == ""
    assert head.endswith("decode s  crowd s  cost s")
    assert [row.split()[:3] for row in rows[:1]] == [["*", "10.0.0.2:8000", "2368"]]
    assert len(rows) == 3


def test_the_same_for_machines_from_standard_input(files, capsys, monkeypatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO((files / "body.json").read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert run("--state", "state.json", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["endpoint"] == "10.0.0.2:8000"
    assert found["reason"] == "prefix"
    assert found["candidates"][0]["cached_tokens"] == 2368
    assert found["notices"] == []
    assert found["not_considered"] == {}


def test_a_state_without_blocks_is_explained_with_a_notice(files, capsys) -> None:
    save(files, decider_of(COST), blocks=False)
    assert run("--state", "state.json", "body.json") == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "notice: state.json was saved without prefix blocks, so every endpoint is shown as "
        f"holding nothing; save it with: {SAVE}\n"
    )
    assert printed.out.startswith("10.0.0.3:8000: ")


def test_another_configuration_shows_what_it_would_choose(files, capsys) -> None:
    config = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: active-request-scorer}]
"""
    (files / "config.yaml").write_text(config)
    assert run("--state", "state.json", "--config", "config.yaml", "body.json") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("10.0.0.3:8000 (0 of ")
    assert "1 x active-request-scorer" in printed.out


def test_a_header_and_a_path_are_part_of_the_request(files, capsys) -> None:
    argv = ("--state", "state.json", "--header", "X-LLM-D-SLO-TTFT-ms: 1", "body.json")
    assert run(*argv) == 0
    assert "later than promised" in capsys.readouterr().out
    assert run("--state", "state.json", "--path", "/v1/models", "body.json") == 0
    printed = capsys.readouterr()
    assert "no prompt was read of this body at /v1/models: load alone decides" in printed.err


@pytest.mark.parametrize("value", ["soon", "500ms", "0", "-1", "nan", "inf", "1,5", "1e300"])
def test_a_promise_that_is_no_number_is_said_to_be_ignored(files, capsys, value) -> None:
    argv = ("--state", "state.json", "--header", f"x-llm-d-slo-ttft-ms: {value}", "body.json")
    assert run(*argv) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        f"notice: header x-llm-d-slo-ttft-ms is ignored: '{value}' is no plausible number of "
        "milliseconds\n"
    )
    assert "later than promised" not in printed.out


def test_each_ignored_promise_is_told_under_the_name_it_came_by(files, capsys) -> None:
    headers = ("--header", "x-slo-tpot-ms: fast", "--header", f"x-slo-ttft-ms: {'9' * 400}x")
    assert run("--state", "state.json", "--json", *headers, "body.json") == 0
    first, second = json.loads(capsys.readouterr().out)["notices"]
    assert first == (
        f"header x-slo-ttft-ms is ignored: '{'9' * 40}…' is no plausible number of milliseconds"
    )
    assert second.startswith("header x-slo-tpot-ms is ignored: 'fast' is no")


def test_who_was_no_candidate_is_said_with_the_reason(files, capsys) -> None:
    state = msgspec.json.decode((files / "state.json").read_bytes())
    first, second, _ = state["endpoints"]
    first["ejected_for_s"] = 2.34
    second["on_probation"] = True
    (files / "state.json").write_bytes(msgspec.json.encode(state))
    assert run("--state", "state.json", "body.json") == 0
    out = capsys.readouterr().out
    assert "not considered: 10.0.0.1:8000 (ejected for 2.3 s after failing)\n" in out
    assert "10.0.0.2:8000 (on probation after failing, with a request in flight)\n" in out
    assert "the only candidate" in out


def test_chance_is_named_where_it_decides(files, capsys) -> None:
    (files / "state.json").write_bytes(state_of(decider_of(SCORES)))
    assert run("--state", "state.json", "body.json") == 0
    assert "notice: chance decides between 10.0.0." in capsys.readouterr().err


def test_what_a_page_left_out_is_said(files, capsys) -> None:
    state = msgspec.json.decode((files / "state.json").read_bytes())
    state["prefix_blocks"]["10.0.0.1:8000"]["left_out"] = 17
    state["endpoints_not_listed"] = 3
    (files / "state.json").write_bytes(msgspec.json.encode(state))
    assert run("--state", "state.json", "body.json") == 0
    printed = capsys.readouterr().err
    assert "state.json leaves out the 17 oldest prefix blocks" in printed
    assert "state.json leaves out 3 endpoints" in printed


def broken(change) -> bytes:
    state = msgspec.json.decode(state_of(decider_of(COST)))
    change(state)
    return msgspec.json.encode(state)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (b"{", "state.json is not a state of this version of the picker: Input data was trunc"),
        (b'{"version": "1"}', "Object missing required field `synced`"),
        (broken(lambda s: s["endpoints"][1].update(backlog_s=-1)), "`$.endpoints[1].backlog_s`"),
        (broken(lambda s: s["endpoints"][1].pop("learned")), "`learned` - at `$.endpoints[1]`"),
        (broken(lambda s: s["endpoints"][0].update(address="x")), "`x` is no address of an endp"),
        (broken(lambda s: s["endpoints"][0].update(address="x:" + "9" * 5000)), "is no address of"),
        (broken(lambda s: s["endpoints"][0].update(own_backlog_s=1e308)), "`$.endpoints[0].own_ba"),
        (broken(lambda s: s["endpoints"][0]["learned"].update(token_s=5e-324)), "learned.token_s`"),
        (
            broken(lambda s: s["endpoints"][0]["learned"].update(step_token_s=1e308)),
            "step_token_s`",
        ),
        (broken(lambda s: s["inflight"].update(output_ratio=1e308)), "`$.inflight.output_ratio`"),
        (b'{"x":' + b"[" * 99_999 + b"]" * 99_999 + b"}", "maximum recursion depth exceeded"),
        (broken(lambda s: s["profile"]["cost"].update(type="clever")), "type `clever`, which is"),
        (broken(lambda s: s["profile"]["cost"]["parameters"].update(a=1)), "unknown field `a`"),
        (broken(lambda s: s["prefix_blocks"]["10.0.0.1:8000"].update(runs=["xyz"])), "not names"),
        (
            broken(lambda s: [e.update(inflight_requests=900_000) for e in s["endpoints"]]),
            "more than 2000000 requests in flight",
        ),
        (broken(lambda s: s.update(endpoints=[], prefix_blocks={})), "the pool has no endpoint"),
    ],
)
def test_a_state_that_is_none_is_named_with_what_is_wrong(files, capsys, state, says) -> None:
    (files / "state.json").write_bytes(state)
    assert run("--state", "state.json", "body.json") == 1
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (("--state", "nothing.json", "body.json"), 2, "--state nothing.json: No such file"),
        (("--state", "state.json", "nothing.json"), 2, "BODY nothing.json: No such file"),
        (("--state", "state.json", "--config", "state.json", "body.json"), 2, "`$"),
        (("--state", "state.json", "--header", "odd", "body.json"), 2, "write 'name: value'"),
        (("--live", "localhost:9090", "body.json"), 2, "write http://HOST:PORT"),
        (("--live", "http://127.0.0.1:1", "body.json"), 1, "must be the metrics port"),
        (("body.json",), 2, "--state --live is required"),
        (("--state", "state.json", "--live", "http://a:1", "body.json"), 2, "not allowed with"),
        (("--state", "state.json", "empty.json"), 1, "empty.json: the picker refuses this request"),
    ],
)
def test_what_cannot_be_explained_is_one_line_with_the_remedy(
    files, capsys, argv, status, says
) -> None:
    (files / "empty.json").write_bytes(b"")
    assert run(*argv) == status
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_a_state_survives_its_own_reader() -> None:
    data = state_of(decider_of(COST))
    state = msgspec.json.decode(data, type=State)
    assert msgspec.json.decode(msgspec.json.encode(state), type=State) == state


HOLDING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: expected-latency, parameters: {hold: true, chunkTokens: 64}}]
"""


def test_a_request_that_would_be_held_is_told_so(files, capsys) -> None:
    (files / "hold.yaml").write_text(HOLDING)
    (files / "room.yaml").write_text(HOLDING.replace("64", "8192"))
    assert run("--state", "state.json", "--config", "hold.yaml", "body.json") == 0
    explained, held, blank, *_ = capsys.readouterr().out.splitlines()
    picked = explained.split(": ")[0]
    assert blank == ""
    assert held.startswith(f"held in full-duplex mode until {picked} has room: 1 in flight there, ")
    assert held.endswith(", 0 held for it")
    assert run("--state", "state.json", "--config", "room.yaml", "body.json") == 0
    assert "held in" not in capsys.readouterr().out
    for name, says in (("hold", True), ("room", False)):
        assert run("--state", "state.json", "--config", f"{name}.yaml", "--json", "body.json") == 0
        assert (json.loads(capsys.readouterr().out)["held"] is not None) is says


def test_an_endpoint_closed_by_one_that_waited_too_long_holds_whoever_comes(files, capsys) -> None:
    (files / "hold.yaml").write_text(HOLDING.replace("64", "8192"))
    state = json.loads((files / "state.json").read_text())
    for endpoint in state["endpoints"]:
        endpoint |= {"held_requests": 3, "longest_held_s": 36.0}
    (files / "state.json").write_text(json.dumps(state))
    assert run("--state", "state.json", "--config", "hold.yaml", "body.json") == 0
    assert ", 3 held for it" in capsys.readouterr().out
    state["held_requests"] = 10_000
    (files / "state.json").write_text(json.dumps(state))
    assert run("--state", "state.json", "--config", "hold.yaml", "body.json") == 0
    assert "held for it" not in capsys.readouterr().out, "a full queue lets go at once"
