"""A user's own log: what a line means, what is refused, and the converter of access logs."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bench.sim import accesslog, replay
from bench.sim.ceiling import infinite_ratio
from bench.sim.lines import LineError
from bench.sim.model import Workload
from bench.sim.plan import WorkloadError
from epp.core.decide import PrefixKeeper, PrefixParams
from epp.core.parse import parse_request

LONG = "The quick brown fox jumps over the lazy dog. " * 40  # 1,800 bytes
Json = dict[str, object]


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def line(**fields: object) -> Json:
    return {"time": 0, "model": "m", "output_tokens": 5} | fields


def hashed(*hashes: object, **fields: object) -> Json:
    known = {"prefix_hashes": list(hashes), "block_tokens": 16, "prompt_tokens": 1000}
    return line(**(known | fields))


def load(folder: Path, *lines: Json | str, name: str = "log.jsonl", **options: object) -> Workload:
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / name).write_text("\n".join(texts), encoding="utf-8", errors="surrogatepass")
    return replay.load(folder / name, **options)  # type: ignore[arg-type]


# ---- what a line means ----


def test_text_is_cut_into_the_blocks_that_the_product_makes_of_it(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    bodies: list[Json] = [
        {"messages": [user(LONG), user("and?")]},
        {"messages": [user(LONG)], "tools": tools},
        {"prompt": LONG + "x"},
        {"prompt": list(range(500))},
    ]
    workload = load(tmp_path, *(line(**body) for body in bodies))
    assert workload.block_tokens == 64
    for request, body in zip(workload.requests, bodies, strict=True):
        api = "chat/completions" if "messages" in body else "completions"
        path = {":path": f"/v1/{api}", ":method": "POST"}
        theirs = parse_request(path, json.dumps({"model": "m", **body}).encode())
        PrefixKeeper(PrefixParams()).match(theirs)
        assert len(request.blocks) == len(theirs.chains[0]) >= 7
        assert request.prompt_tokens == theirs.prompt_tokens
    # A tool changes the prompt from its very start; so does another API.
    firsts = [request.blocks[0] for request in workload.requests]
    assert len(set(firsts)) == 4


def test_equal_beginnings_share_blocks_under_the_same_model_and_salt_only(tmp_path: Path) -> None:
    first, grown, model, salt = load(
        tmp_path,
        line(messages=[user(LONG)]),
        line(messages=[user(LONG), {"role": "assistant", "content": "Yes."}, user(LONG)]),
        line(messages=[user(LONG)], model="other"),
        line(messages=[user(LONG)], cache_salt="s"),
    ).requests
    assert grown.blocks[: len(first.blocks)] == first.blocks
    assert len(grown.blocks) >= 2 * len(first.blocks) > 0
    assert not set(first.blocks) & (set(model.blocks) | set(salt.blocks))
    assert (first.model, model.model) == ("m", "other")


def test_requests_are_put_in_order_and_counted_from_the_earliest(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        hashed(time="2026-01-31T13:00:02.5+01:00", prompt_tokens=302),
        hashed(time="2026-01-31T12:00:00Z", prompt_tokens=300),
        hashed(time="2026-01-31T12:00:01.250Z", prompt_tokens=301),
        speed=0.5,
    )
    assert [(r.arrival_s, r.prompt_tokens) for r in workload.requests] == [
        (0.0, 300),
        (pytest.approx(2.5), 301),
        (pytest.approx(5.0), 302),
    ]
    assert [r.number for r in workload.requests] == [0, 1, 2]
    assert workload.name == "log"


def test_hashes_may_be_integers_or_hex_and_share_along_their_chain(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        hashed(1, 2, 3),
        hashed("1", "02", "ff"),
        hashed(9, 2, 3),
        hashed(-5, 2**80, "f" * 64),
        hashed(1, 2, 3, cache_salt="s"),
    )
    one, two, three, four, salted = (request.blocks for request in workload.requests)
    assert workload.block_tokens == 16
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not set(one) & (set(three) | set(four) | set(salted))
    assert infinite_ratio(workload) == 32 / 5000


def test_hashes_are_grouped_into_larger_blocks(tmp_path: Path) -> None:
    logs = [hashed(*range(10)), hashed(*range(6), 77, 78)]
    one, two = load(tmp_path, *logs, block_tokens=64).requests
    assert len(one.blocks) == len(two.blocks) == 2
    assert one.blocks[0] == two.blocks[0]
    assert one.blocks[1] != two.blocks[1]
    with pytest.raises(WorkloadError, match="line 1 blocks of 16 tokens cannot be made into"):
        load(tmp_path, *logs, block_tokens=24)


def test_blocks_never_go_beyond_the_prompt_tokens_of_the_log(tmp_path: Path) -> None:
    (request,) = load(tmp_path, line(prompt=LONG, prompt_tokens=130)).requests
    assert (request.prompt_tokens, len(request.blocks)) == (130, 2)


def test_an_answer_of_no_token_counts_as_one_and_sessions_are_numbered(tmp_path: Path) -> None:
    one, two, three, four = load(
        tmp_path,
        hashed(output_tokens=0, session="a"),
        hashed(session=7),
        hashed(session="a"),
        hashed(),
    ).requests
    assert one.output_tokens == 1
    assert (one.session, two.session, three.session, four.session) == (0, 1, 0, None)


def test_a_limit_reads_only_the_first_lines(tmp_path: Path) -> None:
    assert len(load(tmp_path, hashed(), hashed(), "nonsense", requests_max=2).requests) == 2


def test_text_that_only_python_reads_is_taken(tmp_path: Path) -> None:
    lone = json.dumps(line(prompt=LONG + "\ud800"))
    assert "\\ud800" in lone
    (request,) = load(tmp_path, lone).requests
    assert len(request.blocks) == 7


def test_a_compressed_log_is_read_as_it_is(tmp_path: Path) -> None:
    plain = load(tmp_path, hashed(1), "", hashed(1, 2))
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress((tmp_path / "log.jsonl").read_bytes()))
    assert replay.load(tmp_path / "log.jsonl.gz") == plain


def test_text_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for number in range(200):
            words = " ".join(str(number * each) for each in range(5_000))
            file.write(json.dumps(line(prompt=words)) + "\n")
    assert path.stat().st_size > 6_000_000
    tracemalloc.start()
    try:
        workload = replay.load(path, block_tokens=512)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(workload.requests) == 200
    assert held < 500_000
    assert peak < 1_500_000


# ---- what is refused ----


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("nonsense", "is not valid JSON"),
        ("[]", "is not of the expected form: Expected `object`, got `array`"),
        (line(prompt=LONG, promt=1), "unknown field `promt`"),
        (line(), 'needs exactly one of "prompt", "messages" and "prefix_hashes"'),
        (line(prompt="a", messages=[user("a")]), "needs exactly one of"),
        (line(prompt="a", tools=[]), 'has "tools" without "messages"'),
        (line(prompt="a", block_tokens=16), 'has "block_tokens", which belong to'),
        (line(prompt=["a", "b"]), 'has a "prompt" that is no string'),
        (line(messages="a"), '"messages" that are no list of chat messages'),
        (line(prompt="a", model=""), "at `$.model`"),
        (line(prompt="a", output_tokens=-1), "at `$.output_tokens`"),
        (line(prompt="a", output_tokens=1.5), "at `$.output_tokens`"),
        (line(prompt="a", time="yesterday"), 'has a "time" that is neither'),
        (line(prompt="a", time="2026-01-31T12:00:00"), "RFC 3339 with an offset"),
        (line(prompt="a", time=1769860800250), "milliseconds?"),
        (line(prompt="a", time=None), "at `$.time`"),
        (line(prompt="a", time=3e6), "lies more than 31 days from another line"),
        ({"model": "m", "prompt": "a", "output_tokens": 1}, "missing required field `time`"),
        (hashed(1), "mixes text and prefix_hashes"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, bad: Json | str, told: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load(tmp_path, line(prompt=LONG), "", bad)
    assert str(caught.value).startswith(f"{tmp_path / 'log.jsonl'}, line 3 ")
    assert told in str(caught.value)
    assert "quick brown" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (hashed("xyz"), "neither integers nor hex strings"),
        (hashed("f" * 129), "neither integers nor hex strings"),
        (hashed(1.5), "at `$.prefix_hashes[0]`"),
        (hashed(1, block_tokens=32), "mixes text and prefix_hashes, or sizes of blocks"),
        (hashed(1, block_tokens=None), 'without "block_tokens" or "prompt_tokens"'),
        (hashed(1, prompt_tokens=0), 'without "block_tokens" or "prompt_tokens"'),
        (hashed(1, 2, 3, prompt_tokens=32), "has 3 prefix_hashes; 32 prompt_tokens in blocks of"),
        (line(prompt=LONG), "mixes text and prefix_hashes"),
    ],
)
def test_a_bad_line_of_hashes_is_named(tmp_path: Path, bad: Json, told: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load(tmp_path, hashed(1), bad)
    assert str(caught.value).startswith(f"{tmp_path / 'log.jsonl'}, line 2 ")
    assert told in str(caught.value)


# ---- bad lines that are left out ----


def load_leaving_out(folder: Path, *lines: Json | str) -> tuple[Workload, list[str]]:
    bad = replay.BadLines()
    workload = load(folder, *lines, bad=bad)
    return workload, bad.told(len(lines))


def test_bad_lines_are_left_out_and_told_once_by_kind_with_their_first_line(tmp_path: Path) -> None:
    good = [line(prompt=LONG, time=at) for at in range(7)]
    broken = [line(prompt="a", time="today"), "{", line(prompt="a", time="now"), hashed(1)]
    workload, told = load_leaving_out(tmp_path, *good[:2], *broken, *good[2:])
    assert len(workload.requests) == 7
    assert told[0] == "4 of 11 lines of the log are left out:"
    assert told[1].startswith('line 3 has a "time" that is neither')
    assert told[1].endswith("(and 1 more like it)")
    assert [each.split(" ")[:3] for each in told[2:]] == [
        ["line", "4", "is"],
        ["line", "6", "mixes"],
    ]
    assert not any("quick brown" in each for each in told)


def test_kinds_that_differ_in_a_number_alone_are_one(tmp_path: Path) -> None:
    short = [hashed(1, 2, 3, prompt_tokens=tokens) for tokens in (16, 32)]
    _, told = load_leaving_out(tmp_path, *(hashed(1) for _ in range(3)), *short)
    [_, kind] = told
    assert kind.startswith("line 4 has 3 prefix_hashes; 16 prompt_tokens")
    assert kind.endswith("(and 1 more like it)")


def test_a_bad_line_changes_nothing_for_those_after_it(tmp_path: Path) -> None:
    # Its time would be the zero of all others; its kind would be that of the file.
    first = line(prompt="a", time=-9e9, output_tokens=-1)
    other = hashed("xyz", time=-9e9)
    workload, told = load_leaving_out(tmp_path, first, other, *(line(prompt=LONG),) * 3)
    assert [request.arrival_s for request in workload.requests] == [0.0] * 3
    assert workload.block_tokens == 64
    assert len(told) == 3


def test_a_line_too_long_is_left_out_with_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sim.lines.LINE_BYTES_MAX", 500)
    workload, told = load_leaving_out(tmp_path, hashed(1), line(prompt=LONG * 9), hashed(2))
    assert len(workload.requests) == 2
    assert told[1] == "line 2 is longer than 500 bytes"


def test_where_most_lines_are_bad_the_file_is(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"(?s)no log of the expected form: 3 of 5.*line 3 is"):
        load_leaving_out(tmp_path, hashed(1), hashed(2), "a", "b", "c")
    with pytest.raises(WorkloadError, match=r"(?s)no log of the expected form: 1 of 1"):
        load_leaving_out(tmp_path, "a")


def test_many_kinds_of_bad_lines_are_told_in_few() -> None:
    bad = replay.BadLines()
    for number in range(1, 41):
        bad.add(LineError(Path("log"), number, "x" * number))
    told = bad.told(100)
    assert len(told) == 2 + replay.BAD_KINDS_MAX
    assert told[1] == "28 with something else, the first of them line 13"


def test_a_line_too_long_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sim.lines.LINE_BYTES_MAX", 500)
    with pytest.raises(WorkloadError, match="line 2 is longer than 500 bytes"):
        load(tmp_path, hashed(1), line(prompt=LONG))


def test_a_log_that_would_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sim.plan.BLOCKS_MAX", 30)
    with pytest.raises(WorkloadError, match="more than 30 blocks; take larger blocks, or set"):
        load(tmp_path, *(hashed(*range(10)) for _ in range(4)))
    monkeypatch.setattr("bench.sim.plan.REQUESTS_MAX", 3)
    with pytest.raises(WorkloadError, match="more than 3 requests"):
        load(tmp_path, *(hashed() for _ in range(4)))


def test_an_absent_or_empty_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.jsonl, line 1 cannot be read: No such file"):
        replay.load(tmp_path / "none.jsonl")
    with pytest.raises(WorkloadError, match="holds no request; one JSON object per line"):
        load(tmp_path, "", "  ")
    with pytest.raises(WorkloadError, match="speed is 0"):
        load(tmp_path, hashed(), speed=0.0)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
fields = st.sampled_from([*replay.LogLine.__struct_fields__, "other"])
near_lines = st.builds(
    lambda good, wrong: json.dumps(good | wrong),
    st.sampled_from([line(prompt=LONG), line(messages=[user("a")]), hashed(1, "2")]),
    st.dictionaries(fields, values, max_size=2),
)
anything = st.one_of(
    st.binary(max_size=200),
    st.lists(near_lines, max_size=3).map(lambda lines: "\n".join(lines).encode()),
)


@settings(max_examples=200, deadline=None)
@given(data=anything)
def test_any_bytes_give_a_workload_or_an_error_that_names_the_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    told = ""
    try:
        workload = replay.load(path)
        for request in workload.requests:
            assert request.arrival_s >= 0
            assert request.output_tokens >= 1
            assert len(request.blocks) <= request.prompt_tokens // workload.block_tokens
    except WorkloadError as error:
        told = str(error)
    assert not told or f"{path}, line " in told or "holds no request" in told


# ---- access logs ----

CHAT: Json = {"model": "m", "messages": [user(LONG)], "temperature": 0.5, "stream": True}
USAGE: Json = {"prompt_tokens": 420, "completion_tokens": 17, "total_tokens": 437}
SAME_REQUEST: dict[str, Json] = {
    "request and response": {
        "timestamp": "2026-01-31T12:00:00Z",
        "status": 200,
        "request": CHAT,
        "response": {"id": "x", "usage": USAGE},
    },
    "bodies as strings": {
        "timestamp": 1769860800.0,
        "request": json.dumps(CHAT),
        "response": json.dumps({"usage": {"input_tokens": 420, "output_tokens": 17}}),
    },
    "litellm payload": {
        "startTime": 1769860800.0,
        "endTime": 1769860803.0,
        "model": "m",
        "cache_hit": False,
        "messages": CHAT["messages"],
        "prompt_tokens": 420,
        "completion_tokens": 17,
        "model_parameters": {"temperature": 0.5},
        "response": {"id": "x"},
    },
    "litellm with usage": {
        "startTime": "2026-01-31 12:00:00.000",
        "model": "m",
        "usage": USAGE,
        "messages": CHAT["messages"],
    },
    "batch": {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT,
        "created_at": 1769860800000,
        "response": {"status_code": 200, "body": {"usage": USAGE}},
    },
}


def convert(folder: Path, *lines: Json | str, flags: tuple[str, ...] = ()) -> tuple[int, Path, str]:
    """Exit status, the output's path, and what was told."""
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / "access.jsonl").write_text("\n".join(texts))
    output, messages = io.BytesIO(), io.StringIO()
    status = accesslog.main(
        [str(folder / "access.jsonl"), *flags], output=output, messages=messages
    )
    (folder / "out.jsonl").write_bytes(output.getvalue())
    return status, folder / "out.jsonl", messages.getvalue()


@pytest.mark.parametrize("form", sorted(SAME_REQUEST))
def test_every_form_of_access_log_gives_the_same_line(tmp_path: Path, form: str) -> None:
    status, path, told = convert(tmp_path, SAME_REQUEST[form])
    assert (status, told.startswith("accesslog: 1 lines read, 1 written")) == (0, True), told
    assert json.loads(path.read_text()) == {
        "time": 1769860800.0,
        "model": "m",
        "messages": [user(LONG)],
        "prompt_tokens": 420,
        "output_tokens": 17,
    }
    (request,) = replay.load(path).requests
    assert (request.prompt_tokens, len(request.blocks)) == (420, 6)


def test_hashes_replay_as_the_text_does_and_hold_none_of_it(tmp_path: Path) -> None:
    logs = [
        {"timestamp": at, "request": {**CHAT, "messages": messages}, "response": {"usage": USAGE}}
        for at, messages in enumerate(
            ([user(LONG)], [user(LONG), user("more " * 90)], [user("Else: " + LONG)])
        )
    ]
    _, path, _ = convert(tmp_path, *logs)
    text = replay.load(path)
    status, path, _ = convert(tmp_path, *logs, flags=("--hash", "--key", "k"))
    assert status == 0
    assert "fox" not in path.read_text()
    assert replay.load(path).requests == text.requests
    assert infinite_ratio(text) > 0.25
    first = path.read_text()
    assert convert(tmp_path, *logs, flags=("--hash", "--key", "k"))[1].read_text() == first
    assert convert(tmp_path, *logs, flags=("--hash", "--key", "l"))[1].read_text() != first
    drawn = [convert(tmp_path, *logs, flags=("--hash",))[1].read_text() for _ in range(2)]
    assert drawn[0] != drawn[1] != first


def test_a_tool_and_a_salt_reach_the_line(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"request": {**CHAT, "tools": tools, "cache_salt": "s"}}
    usual = SAME_REQUEST["request and response"]
    _, path, _ = convert(tmp_path, {**usual, **body})
    written = json.loads(path.read_text())
    assert (written["tools"], written["cache_salt"]) == (tools, "s")
    litellm = {**SAME_REQUEST["litellm payload"], "model_parameters": {"tools": tools}}
    assert json.loads(convert(tmp_path, litellm)[1].read_text())["tools"] == tools
    _, path, _ = convert(tmp_path, usual, {**usual, **body}, flags=("--hash",))
    plain, salted = replay.load(path).requests
    assert not set(plain.blocks) & set(salted.blocks)
    assert "cache_salt" not in path.read_text()


def test_what_a_gateway_answered_itself_is_left_out_and_counted(tmp_path: Path) -> None:
    usual = SAME_REQUEST["litellm payload"]
    _, path, told = convert(tmp_path, usual, {**usual, "cache_hit": True})
    assert len(path.read_text().splitlines()) == 1
    assert "2 lines read, 1 written, 1 served from a gateway's cache" in told


def test_what_the_log_lacks_is_made_up_only_when_told_how(tmp_path: Path) -> None:
    bare = {"custom_id": "a", "body": {"model": "m", "prompt": LONG}}
    status, _, told = convert(tmp_path, bare)
    assert status == 2
    assert "line 1 tells no completion tokens (usage); take --output-tokens" in told
    status, _, told = convert(tmp_path, bare, flags=("--output-tokens", "9"))
    assert status == 2
    assert "line 1 has no time" in told
    assert "take --rate" in told
    flags = ("--output-tokens", "9", "--rate", "4")
    _, path, _ = convert(tmp_path, bare, bare, bare, flags=flags)
    requests = replay.load(path).requests
    assert [r.arrival_s for r in requests] == [0.0, 0.25, 0.5]
    assert {r.output_tokens for r in requests} == {9}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"request": {"model": "m"}}, 'has neither "messages" nor "prompt"'),
        ({"request": {"messages": [user("a")]}}, 'names no "model"'),
        ({"request": {**CHAT, "messages": 5}}, "no list of chat messages"),
        ({"request": {**CHAT, "messages": [user("redacted-by-litellm")]}}, "removed by the logger"),
        ({"timestamp": "noon"}, 'has a "time" that is neither'),
        ({"timestamp": {}}, "has no time"),
    ],
)
def test_a_bad_line_of_an_access_log_is_named_or_skipped(
    tmp_path: Path, wrong: Json, told: str
) -> None:
    usual = SAME_REQUEST["request and response"]
    status, _, error = convert(tmp_path, usual, {**usual, **wrong})
    assert status == 2
    assert f"{tmp_path / 'access.jsonl'}, line 2 " in error
    assert told in error
    status, path, error = convert(tmp_path, {**usual, **wrong}, usual, flags=("--skip-bad",))
    assert status == 0
    assert len(path.read_text().splitlines()) == 1
    assert "1 bad ones skipped" in error


def test_a_key_without_hashes_and_a_missing_log_are_refused(tmp_path: Path) -> None:
    status, _, told = convert(tmp_path, flags=("--key", "k"))
    assert (status, "--key belongs to --hash" in told) == (2, True)
    messages = io.StringIO()
    assert accesslog.main([str(tmp_path / "none")], output=io.BytesIO(), messages=messages) == 2
    assert "cannot be read: No such file" in messages.getvalue()
    with pytest.raises(SystemExit):
        accesslog.main(["x", "--rate", "0"])


loggable = st.fixed_dictionaries(
    {},
    optional={
        name: values | st.just(CHAT) | st.just(json.dumps(CHAT)) | st.just({"usage": USAGE})
        for name in accesslog.Entry.__struct_fields__
    },
)


@settings(max_examples=200, deadline=None)
@given(data=loggable.map(lambda entry: json.dumps(entry).encode()) | st.binary(max_size=100))
def test_any_line_of_an_access_log_gives_a_readable_line_or_names_itself(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "any-access.jsonl"
    path.write_bytes(data)
    for result in accesslog.convert(path, accesslog.Options()):
        if isinstance(result, WorkloadError):
            assert str(result).startswith(f"{path}, line ")
        elif result is not None:
            (folder / "any-out.jsonl").write_bytes(msgspec.json.encode(result))
            assert len(replay.load(folder / "any-out.jsonl").requests) == 1


def test_the_converters_examples_on_the_page_can_be_converted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/replay.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```json\n")[1:]]
    assert len(blocks) == 3
    for text in blocks[:2]:
        assert len(load(tmp_path, *text.splitlines()).requests) == 2
    status, path, told = convert(
        tmp_path, *blocks[2].splitlines(), flags=("--rate", "1", "--output-tokens", "1")
    )
    assert (status, len(path.read_text().splitlines())) == (0, 3), told
