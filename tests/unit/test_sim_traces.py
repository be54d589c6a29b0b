"""Readers of the public traces, on small files written here in their formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from bench.sim.ceiling import infinite_ratio
from bench.sim.model import Workload
from bench.sim.plan import WorkloadError, WorkloadOptions
from bench.sim.traces import SOURCES, TRACES

MOONCAKE = "conversation_trace.jsonl"
AZURE = "AzureLLMInferenceTrace_conv.csv"
Json = Mapping[str, object]


def line(at_ms: float, prompt_tokens: int, *ids: int, output_tokens: int = 7) -> Json:
    return {
        "timestamp": at_ms,
        "input_length": prompt_tokens,
        "output_length": output_tokens,
        "hash_ids": list(ids),
    }


def write(path: Path, *lines: Json) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def read(name: str, folder: Path, **options: object) -> Workload:
    return TRACES[name](WorkloadOptions(traces=str(folder), **options))  # type: ignore[arg-type]


# ---- Mooncake ----


def test_a_mooncake_line_becomes_a_request(tmp_path: Path) -> None:
    write(
        tmp_path / MOONCAKE,
        line(0, 1100, 0, 1, 2),
        line(3000, 1600, 0, 1, 3, 4),
        line(3000, 600, 0, 9, output_tokens=0),
    )
    workload = read("conversation-raw", tmp_path)
    assert workload.block_tokens == 512
    first, second, third = workload.requests
    assert (first.arrival_s, second.arrival_s, third.arrival_s) == (0.0, 3.0, 3.0)
    assert (first.prompt_tokens, first.output_tokens, third.output_tokens) == (1100, 7, 1)
    assert len(first.blocks) == 2  # the third id stands for a partial block
    assert second.blocks[:2] == first.blocks
    assert len(second.blocks) == 3
    assert third.blocks == first.blocks[:1]
    assert infinite_ratio(workload) == (1024 + 512) / 3300


def test_speed_divides_the_times_of_a_trace(tmp_path: Path) -> None:
    write(tmp_path / MOONCAKE, line(0, 10, 0), line(9000, 10, 0))
    assert read("conversation-raw", tmp_path, speed=2.0).requests[1].arrival_s == 4.5


def test_jitter_delays_each_request_within_its_bound_and_by_the_seed(tmp_path: Path) -> None:
    write(tmp_path / MOONCAKE, *(line(6000, 10 + n, 0) for n in range(200)))
    arrivals = {r.prompt_tokens: r.arrival_s for r in read("conversation", tmp_path).requests}
    assert min(arrivals.values()) >= 6.0
    assert max(arrivals.values()) < 6.0 + 3.05
    assert max(arrivals.values()) - min(arrivals.values()) > 2.8
    assert read("conversation", tmp_path) == read("conversation", tmp_path, seed=1)
    assert read("conversation", tmp_path) != read("conversation", tmp_path, seed=2)
    # The same request is shifted alike at every speed, and the result is in order.
    fast = read("conversation", tmp_path, speed=2.0).requests
    assert {r.prompt_tokens: pytest.approx(2 * r.arrival_s) for r in fast} == arrivals
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(fast))
    assert [r.number for r in fast] == list(range(200))
    assert read("conversation", tmp_path, jitter_s=0.0).requests == (
        read("conversation-raw", tmp_path).requests
    )


def test_a_limit_takes_the_first_requests_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / MOONCAKE, *(line(0, 10 + n, 0) for n in range(50)))
    kept = read("conversation", tmp_path, requests_max=20).requests
    assert {r.prompt_tokens for r in kept} == set(range(10, 30))
    shifted = {r.prompt_tokens: r.arrival_s for r in read("conversation", tmp_path).requests}
    assert all(shifted[r.prompt_tokens] == r.arrival_s for r in kept)


def test_a_duration_ends_a_trace(tmp_path: Path) -> None:
    write(tmp_path / MOONCAKE, *(line(1000 * n, 10, 0) for n in range(50)))
    assert len(read("conversation-raw", tmp_path, duration_s=9.5, speed=2.0).requests) == 20


@pytest.mark.parametrize(
    ("block_tokens", "first", "shared"), [(1024, 1, 1), (256, 4, 4), (64, 17, 16), (512, 2, 2)]
)
def test_other_block_sizes_keep_what_is_shared(
    tmp_path: Path, block_tokens: int, first: int, shared: int
) -> None:
    write(tmp_path / MOONCAKE, line(0, 1100, 0, 1, 2), line(1, 1700, 0, 1, 3, 4))
    one, other = read("conversation-raw", tmp_path, block_tokens=block_tokens).requests
    assert len(one.blocks) == first
    assert len(set(one.blocks) & set(other.blocks)) == shared
    assert one.blocks[:shared] == other.blocks[:shared]


def test_a_block_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / MOONCAKE, line(0, 1100, 0, 1, 2))
    with pytest.raises(WorkloadError, match="blocks of 512 tokens cannot be made into blocks of 1"):
        read("conversation", tmp_path, block_tokens=100)


# ---- weka ----


def request(t: float, prompt_tokens: int, *ids: int, model: str = "m") -> Json:
    common = {"type": "n", "out": 5, "input_types": ["text"], "api_time": 1.5, "think_time": 2.0}
    return common | {"t": t, "model": model, "in": prompt_tokens, "hash_ids": list(ids)}


def group(t: float, *requests: Json) -> Json:
    return {"t": t, "type": "group", "status": "completed", "requests": list(requests)}


def session(name: str, *requests: Json, block_size: int = 64) -> Json:
    common = {"models": ["m"], "hash_id_scope": "local", "block_size": block_size}
    return common | {"id": name, "requests": list(requests)}


def test_ids_of_different_sessions_are_different_blocks(tmp_path: Path) -> None:
    ids = range(1, 17)
    write(
        tmp_path / "weka.jsonl",
        session("a", request(0, 1024, *ids), request(5, 1100, *ids)),
        session("b", request(0, 1024, *ids)),
    )
    workload = read("weka", tmp_path)
    sessions = [[r for r in workload.requests if r.session == place] for place in (0, 1)]
    first, second = sessions[0]
    assert first.blocks == second.blocks
    assert len(first.blocks) == 2
    assert not set(first.blocks) & set(sessions[1][0].blocks)


def test_a_group_is_one_block_only_when_all_of_it_is_equal(tmp_path: Path) -> None:
    same, other = list(range(1, 25)), [*range(1, 16), 99, *range(17, 25)]
    write(tmp_path / "weka.jsonl", session("a", request(0, 1600, *same), request(5, 1600, *other)))
    one, two = read("weka", tmp_path).requests
    assert len(one.blocks) == 3
    assert one.blocks[0] == two.blocks[0]
    # The third groups hold equal ids, but stand behind different second ones.
    assert not set(one.blocks[1:]) & set(two.blocks[1:])


def test_another_model_of_a_session_shares_nothing(tmp_path: Path) -> None:
    requests = request(0, 512, *range(8)), request(1, 512, *range(8), model="small")
    write(tmp_path / "weka.jsonl", session("a", *requests))
    one, two = read("weka", tmp_path).requests
    assert not set(one.blocks) & set(two.blocks)


def test_pauses_are_kept_up_to_the_limit_and_nested_groups_run_on_the_sessions_clock(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "weka.jsonl",
        session(
            "a",
            request(0, 100, 1),
            group(7, request(0, 200, 2), group(3, request(1, 300, 3))),
            request(9, 400, 4),
            request(5000, 500, 5),
        ),
    )
    requests = read("weka", tmp_path).requests
    assert [r.prompt_tokens for r in requests] == [100, 200, 400, 300, 500]
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    assert gaps == pytest.approx([7.0, 2.0, 2.0, 60.0])
    short = read("weka", tmp_path, gap_s_max=3.0).requests
    assert short[-1].arrival_s - short[0].arrival_s == pytest.approx(10.0)


def test_sessions_start_at_their_rate_and_speed_multiplies_it(tmp_path: Path) -> None:
    write(tmp_path / "weka.jsonl", *(session(str(n), request(0, 100, n)) for n in range(400)))
    slow = read("weka", tmp_path, sessions_per_s=0.5).requests
    fast = read("weka", tmp_path, sessions_per_s=0.5, speed=2.0).requests
    assert 650 < slow[-1].arrival_s < 950
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s / 2)
    assert [r.session for r in slow] != sorted(r.session or 0 for r in slow)
    assert read("weka", tmp_path, seed=2) != read("weka", tmp_path, seed=3)


def test_a_number_of_sessions_is_drawn_by_the_seed(tmp_path: Path) -> None:
    write(tmp_path / "weka.jsonl", *(session(str(n), request(0, 100, n)) for n in range(40)))
    drawn = [
        frozenset(r.session for r in read("weka", tmp_path, sessions=5, seed=seed).requests)
        for seed in (1, 1, 2)
    ]
    assert len(drawn[0]) == 5
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(read("weka", tmp_path, sessions=99).requests) == 40


def test_a_folder_of_one_file_per_session_is_read_like_the_lines(tmp_path: Path) -> None:
    sessions = [session(str(n), request(0, 600, *range(n, n + 9))) for n in range(4)]
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines" / "weka.jsonl", *sessions)
    (tmp_path / "files" / "weka").mkdir(parents=True)
    for number, each in enumerate(sessions):
        (tmp_path / "files/weka" / f"trace_{number}.json").write_text(json.dumps(each, indent=1))
    assert read("weka", tmp_path / "lines") == read("weka", tmp_path / "files")


# ---- Azure ----


def test_azure_rows_become_requests_that_share_nothing(tmp_path: Path) -> None:
    (tmp_path / AZURE).write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 10:00:00.2500000,1100,44\r\n"
        "2023-11-16 10:00:02.7500009,1100,0\r\n"
    )
    one, two = read("azure", tmp_path, jitter_s=0.0).requests
    assert (one.arrival_s, two.arrival_s) == (0.0, pytest.approx(2.5))
    assert (one.prompt_tokens, one.output_tokens, two.output_tokens) == (1100, 44, 1)
    assert len(one.blocks) == len(two.blocks) == 2
    assert not set(one.blocks) & set(two.blocks)


# ---- files that are not there or not right ----


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_missing_file_is_named_with_what_it_is_and_where_it_is_published(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[name]
    with pytest.raises(WorkloadError) as caught:
        read(name, tmp_path)
    for told in (str(tmp_path), source.files[0], source.what, source.published):
        assert told in str(caught.value)
    monkeypatch.delenv("TRACES", raising=False)
    with pytest.raises(WorkloadError, match="--traces or TRACES"):
        TRACES[name](WorkloadOptions())


def test_the_environment_names_the_folder_and_gzip_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.dumps(line(0, 600, 1, 2)).encode()
    (tmp_path / "mooncake_synthetic.jsonl.gz").write_bytes(gzip.compress(data))
    monkeypatch.setenv("TRACES", str(tmp_path))
    assert len(TRACES["synthetic"](WorkloadOptions()).requests) == 1


GOOD = json.dumps(line(0, 600, 1, 2))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("nonsense", "is not valid JSON"),
        ("[1, 2]", "not of the expected form"),
        ("{}", "missing required field `timestamp`"),
        (json.dumps(line(0, 0)), "`int` >= 1 - at `$.input_length`"),
        (json.dumps(line(-1, 1)), "at `$.timestamp`"),
        (GOOD.replace("[1, 2]", '["x"]'), r"at `$.hash_ids[0]`"),
        (GOOD.replace("600", "1e400"), "line 3 is "),
        ('{"a":' * 100_000, "nested too deeply"),
        ("\x00\xff", "line 3 is "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, told: str) -> None:
    (tmp_path / MOONCAKE).write_text(f"{GOOD}\n\n{bad}\n", encoding="latin-1")
    with pytest.raises(WorkloadError) as caught:
        read("conversation", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / MOONCAKE}, line 3 is ")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b,c\n", "line 1 is not the header TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", "line 2 is not time, prompt tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 10:00:00,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 10:00:00,-1,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "azure: no request is left"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / AZURE).write_text(text)
    with pytest.raises(WorkloadError, match=told):
        read("azure", tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    data = gzip.compress(GOOD.encode() * 100)
    (tmp_path / f"{MOONCAKE}.gz").write_bytes(data[:-20])
    with pytest.raises(
        WorkloadError, match=r"conversation_trace\.jsonl\.gz, line 1 cannot be read"
    ):
        read("conversation", tmp_path)
    (tmp_path / f"{MOONCAKE}.gz").write_bytes(b"plain text")
    with pytest.raises(WorkloadError, match="cannot be read: Not a gzipped file"):
        read("conversation", tmp_path)


FILES = {"conversation": MOONCAKE, "weka": "weka.jsonl", "azure": AZURE}
texts = st.one_of(
    st.binary(max_size=300),
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.just("requests"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.lists(
        st.fixed_dictionaries(
            {"timestamp": st.floats(), "input_length": st.integers(-1, 10**9)},
            optional={"output_length": st.integers(), "hash_ids": st.lists(st.integers())},
        ).map(json.dumps),
        max_size=4,
    ).map(lambda lines: "\n".join(lines).encode()),
)


@pytest.mark.parametrize("name", sorted(FILES))
@settings(max_examples=60, deadline=None)
@given(data=texts)
def test_any_bytes_give_a_workload_or_an_error_that_names_the_place(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"any-{name}"
    folder.mkdir(exist_ok=True)
    (folder / FILES[name]).write_bytes(data)
    told = ""
    try:
        assert read(name, folder).requests
    except WorkloadError as error:
        told = str(error)
    assert not told or "line " in told or f"{name}: no request is left" in told
