"""The bench as a command: runs, journal, files, several processes, replay; real simulations."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bench.sim import command, runner
from bench.sim.__main__ import main
from bench.sim.cluster import PolicyContext
from bench.sim.command import Choice, chosen, command_text, run_command
from bench.sim.experiments import Cell, Setup
from bench.sim.model import SimRequest, View
from bench.sim.options import parse_options
from bench.sim.records import Record, Task
from bench.sim.runner import Journal, made_before
from bench.sim.runs import Bench

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    Cell(workload="siblings", speed=1.0, kv_blocks=600, endpoints=2),
    Cell(workload="siblings", speed=2.0, kv_blocks=600, endpoints=2),
]
REFERENCE_CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer}
  - {pluginRef: max-score-picker}
"""


class InTurn:
    """One endpoint after the other."""

    def __init__(self, context: PolicyContext) -> None:
        self.last = -1

    def choose(self, request: SimRequest, view: View, now_s: float) -> int:
        self.last = (self.last + 1) % len(view.endpoints)
        return view.endpoints[self.last]

    def first_byte(self, request: SimRequest, now_s: float) -> None: ...

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None: ...

    def left(self, endpoint: int) -> None: ...


class AlwaysFirst(InTurn):
    """The first endpoint, whatever comes."""

    def choose(self, request: SimRequest, view: View, now_s: float) -> int:
        return view.endpoints[0]


class Broken(InTurn):
    """Fails in the middle of a run."""

    def choose(self, request: SimRequest, view: View, now_s: float) -> int:
        if request.number == 5:
            raise RuntimeError("lost my way")
        return 0


def choice(**policies: type[InTurn]) -> Choice:
    policies = policies or {"first": AlwaysFirst, "turn": InTurn}
    return Choice(
        cells=CELLS,
        policies=policies,
        kinds={name: "peer" if name == "turn" else "ours" for name in policies},
        baseline=next(iter(policies)),
        setup=Setup(requests_max=20),
    )


def run(folder: Path, *flags: str, what: Choice | None = None) -> int:
    arguments = ["--folder", str(folder), "--out", "x", "--seeds", "1,2", "--jobs", "1", *flags]
    return run_command(parse_options(arguments), what or choice())


def journal(folder: Path) -> list[Record]:
    return Journal(folder / "out/x/runs.jsonl").read()


def results(folder: Path, name: str = "x") -> SimpleNamespace:
    data = json.loads((folder / f"results/{name}.json").read_bytes())
    for table in ("entries", "runs"):
        if data[table]:
            columns = data[table]["columns"]
            data[table] = [dict(zip(columns, row, strict=True)) for row in data[table]["rows"]]
    return SimpleNamespace(**data)


def test_one_command_writes_json_tables_and_pictures(tmp_path: Path, capsys) -> None:
    assert run(tmp_path) == 0
    told = results(tmp_path)
    assert len(told.runs) == 2 * 2 * 2
    assert told.seeds == [1, 2]
    assert told.constants["hardware"]["h100-pair-32b"]["max_num_seqs"] == 256
    assert told.versions["code"]
    assert told.command.startswith("python -m bench.sim --folder ")
    assert str(tmp_path) not in json.dumps(told.command)
    first, turn = told.entries[:2]
    assert (first["policy"], turn["policy"]) == ("first", "turn")
    assert (first["requests_balance_ratio"], turn["requests_balance_ratio"]) == (2.0, 1.0)
    assert turn["requests"] == 40
    assert 0 < turn["hit_ratio"] <= turn["ceiling_ratio"]
    assert [each["peer"] for each in told.contests] == ["turn", "turn"]
    out = capsys.readouterr()
    assert (tmp_path / "out/x/report.md").read_text() in out.out
    names = {path.name for path in (tmp_path / "out/x").glob("*.png")}
    assert names == {"quantiles.png", "balance.png", "best-peer.png"}


def test_the_same_command_gives_the_same_figures(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, "--no-plots")
    first, second = results(tmp_path / "a"), results(tmp_path / "b")
    assert first.entries == second.entries
    assert first.contests == second.contests


def test_a_policy_that_breaks_loses_its_own_runs_only(tmp_path: Path, capsys) -> None:
    assert run(tmp_path, "--no-plots", what=choice(turn=InTurn, broken=Broken)) == 1
    told = results(tmp_path)
    assert {each["policy"] for each in told.entries} == {"turn"}
    assert len(told.failed) == 4
    assert re.fullmatch(
        r"siblings-x1/600b/2e broken 1: RuntimeError: lost my way \(test_harness.py:\d+\)",
        told.failed[0],
    )
    assert "## Failed runs" in capsys.readouterr().out


# -- the journal ---------------------------------------------------------------------------


def test_resume_makes_only_the_runs_that_are_missing(tmp_path: Path, capsys) -> None:
    run(tmp_path, "--no-plots")
    whole, path = journal(tmp_path), tmp_path / "out/x/runs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # Killed while the fourth line was written.
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    run(tmp_path, "--no-plots", "--resume")
    assert "3 runs of the journal are kept" in capsys.readouterr().err
    again = journal(tmp_path)
    assert again[:3] == whole[:3], "kept as they were, their wall clock too"
    assert [each.key for each in again] == [each.key for each in whole]
    assert [each.figures for each in again] == [each.figures for each in whole]


def test_resume_keeps_nothing_that_other_settings_or_code_made(tmp_path: Path) -> None:
    run(tmp_path, "--no-plots")
    there = journal(tmp_path)
    tasks = [
        Task(cell, policy, seed)
        for cell in CELLS
        for policy in ("first", "turn")
        for seed in (1, 2)
    ]
    same = Bench(Setup(requests_max=20), {})
    assert len(made_before(same, tasks, there)) == 8
    assert made_before(Bench(Setup(requests_max=21), {}), tasks, there) == []
    assert len(made_before(same, tasks[:3], there)) == 3
    other = [msgspec.structs.replace(each, basis="000000000000") for each in there]
    assert made_before(same, tasks, other) == []
    failed = [msgspec.structs.replace(each, error="x") for each in there]
    assert made_before(same, tasks, failed) == []


def test_without_resume_a_journal_is_begun_anew_and_the_old_one_set_aside(tmp_path: Path) -> None:
    run(tmp_path, "--no-plots")
    before = journal(tmp_path)
    run(tmp_path, "--no-plots", "--seeds", "3")
    assert {each.seed for each in journal(tmp_path)} == {3}
    assert Journal(tmp_path / "out/x/runs.old").read() == before


def test_an_interrupted_bench_reports_what_is_done_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, made = Bench.attempt, []

    def interrupted(bench: Bench, task: Task, progress: object = None) -> Record:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(task)
        return attempt(bench, task)

    monkeypatch.setattr(Bench, "attempt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--no-plots")
    assert results(tmp_path).missing == 5
    assert "Interrupted: 5 runs" in (tmp_path / "out/x/report.md").read_text()
    monkeypatch.setattr(Bench, "attempt", attempt)
    run(tmp_path, "--no-plots", "--resume")
    assert results(tmp_path).missing == 0
    assert [each.key for each in journal(tmp_path)][:3] == [task.key for task in made]


# -- several processes ---------------------------------------------------------------------

# In a process of its own: a fork of the test's process would take along what other tests left.
FORKED = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background
sys.path[:0] = [{root!r}, {here!r}]
from test_harness import choice, run, Broken, InTurn
class Killed(InTurn):
    def choose(self, request, view, now_s):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
class Slow(InTurn):
    def choose(self, request, view, now_s):
        import os, time
        os.write(1, b"running\\n")  # whole, though two workers write
        time.sleep(600)
what = choice(**{policies})
sys.exit(run(Path({folder!r}), "--no-plots", "--jobs", "2", what=what))
"""


def forked(folder: Path, policies: str) -> subprocess.Popen[str]:
    code = FORKED.format(
        root=str(ROOT), here=str(Path(__file__).parent), folder=str(folder), policies=policies
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_two_processes_give_what_one_gives(tmp_path: Path, processes) -> None:
    processes.append(forked(tmp_path / "two", "{}"))
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    assert "8 of 8 runs in" in err
    run(tmp_path / "one", "--no-plots")
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one.entries == two.entries
    assert len(journal(tmp_path / "two")) == 8
    assert out.startswith("# x\n")


def test_a_killed_worker_ends_the_bench_and_not_in_silence(tmp_path: Path, processes) -> None:
    processes.append(forked(tmp_path, "dict(turn=InTurn, killed=Killed)"))
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode != 0
    assert "BrokenProcessPool" in err
    assert all(each.policy == "turn" for each in journal(tmp_path))


def test_an_interrupt_ends_the_workers_too(tmp_path: Path, processes) -> None:
    processes.append(forked(tmp_path, "dict(slow=Slow)"))
    process = processes[0]
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    os.kill(process.pid, signal.SIGINT)
    # Ends only when every process that holds its output has ended.
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0


def test_workers_do_not_outlive_a_bench_that_is_killed(tmp_path: Path, processes) -> None:
    processes.append(forked(tmp_path, "dict(slow=Slow)"))
    process = processes[0]
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


# -- the command line ----------------------------------------------------------------------


def test_list_shows_cells_and_policies_and_runs_nothing(tmp_path: Path, capsys) -> None:
    assert (
        main(["--quick", "--list", "--folder", str(tmp_path), "--policies", "lmetric,l*+hold"]) == 0
    )
    out = capsys.readouterr().out
    assert "chats-x1.5/2048b/4e" in out
    assert "lmetric (peer, the baseline)" in out
    assert "lmetric+hold (control)" in out
    assert "round-robin (" not in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--policies", "best"], "no policy is called 'best'; there are expected-"),
        (["--quick", "--baseline", "best"], "--baseline 'best' is not among"),
        (["--quick", "--cells", "nowhere"], "no cell of quick matches nowhere"),
        (["replay", "no-such-log", "--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_a_wrong_input_is_named_with_its_remedy(
    arguments: list[str], said: str, tmp_path: Path, capsys
) -> None:
    assert main([*arguments, "--folder", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_grid_without_its_traces_fails_at_once(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACES", raising=False)
    arguments = ["--grid", "core", "--cells", "weka", "--folder", str(tmp_path)]
    assert main(arguments) == 2
    assert "--traces" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seeds", "5-1"], "--seeds has 5-1; it must ascend"),
        (["--seeds", "x"], "--seeds is 'x'; write 11-15 or 1,2,7"),
        (["--jobs", "0"], "--jobs is 0; it must be 1 to"),
        (["--requests", "0"], "--requests is 0; it must be 1 to"),
        (["--out", "../x"], "give another one with --out"),
        (["--grid", "best"], "invalid choice: 'best'"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_seeds_and_names_are_read_as_they_are_written() -> None:
    options = parse_options(["--seeds", "1,11-13,12", "--policies", "a,b", "--policies", "c, own"])
    assert options.seeds == (1, 11, 12, 13)
    assert options.policies == ("a", "b", "c, own")
    assert len(parse_options([]).seeds) >= 5


def test_policies_come_in_the_order_of_the_table_and_without_controls() -> None:
    kinds = {"ours": "ours", "a": "peer", "a+hold": "control", "oracle": "oracle"}
    assert chosen((), kinds) == ["ours", "a", "oracle"]
    assert chosen(("*hold", "a"), kinds) == ["a", "a+hold"]


def test_the_command_is_kept_without_folders_of_this_machine() -> None:
    arguments = ["--traces", "/data/mine/traces", "--folder=/data/x", "--policies", "a b"]
    assert command_text(arguments) == (
        "python -m bench.sim --traces traces --folder=x --policies 'a b'"
    )


def test_no_plots_without_matplotlib_but_everything_else(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(tmp_path, "--seeds", "1") == 0
    assert "envoy-endpoint-picker[plots]" in capsys.readouterr().err
    assert results(tmp_path).entries
    assert not list(tmp_path.rglob("*.png"))


# -- replay --------------------------------------------------------------------------------


def test_a_log_is_replayed_under_each_configuration(tmp_path: Path, capsys) -> None:
    log = tmp_path / "mine.jsonl"
    lines = [
        {
            "time": n * 0.2,
            "model": "m",
            "prefix_hashes": [n % 4 * 100 + at for at in range(20)],
            "block_tokens": 64,
            "prompt_tokens": 1300,
            "output_tokens": 10,
        }
        for n in range(40)
    ]
    log.write_text("broken\n" + "".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "queue.yaml").write_text(REFERENCE_CONFIG)
    (tmp_path / "other.yaml").write_text(REFERENCE_CONFIG)
    arguments = ["replay", str(log), "--config", str(tmp_path / "queue.yaml")]
    arguments += ["--config", str(tmp_path / "other.yaml"), "--policies", "round-robin"]
    arguments += ["--endpoints", "3", "--folder", str(tmp_path), "--jobs", "1", "--seeds", "1-2"]
    assert main([*arguments, "--no-plots"]) == 0
    told = results(tmp_path, "replay-mine")
    assert list(told.policies) == ["queue", "other", "round-robin"]
    assert told.baseline == "queue"
    queue, other, _ = told.entries
    assert queue["cell"] == "mine-x1/3e"
    assert other["difference"][0] == 0.0, "the same configuration twice"
    assert queue["requests"] == 80
    shown = capsys.readouterr()
    assert "| queue" in shown.out
    # Once at the start and once in the report, however many runs there are.
    left_out = "1 of 41 lines of the log are left out:"
    assert told.notes[0] == left_out
    assert shown.err.count(left_out) == shown.out.count(left_out) == 1
    assert shown.err.index(left_out) < shown.err.index("runs in")
    assert shown.out.count("line 1 is not valid JSON") == 1


def test_the_regret_of_every_nth_decision_is_in_the_results(tmp_path: Path, capsys) -> None:
    flags = ["--quick", "--cells", "siblings", "--requests", "40", "--seeds", "1", "--jobs", "1"]
    flags += ["--policies", "expected-latency,lmetric", "--folder", str(tmp_path), "--no-plots"]
    assert main([*flags, "--regret", "4"]) == 0
    told = results(tmp_path, "quick")
    assert told.constants["regret_every"] == 4
    ours, peer = told.entries
    assert (ours["regret_decisions"], peer["regret_decisions"]) == (10, 10)
    causes_s = [ours[f"regret_{cause}_s"] for cause in ("cache", "load", "rates", "objective")]
    assert sum(causes_s) == pytest.approx(ours["regret_mean_s"], rel=1e-3, abs=1e-6)
    assert peer["regret_load_s"] is None
    assert peer["regret_mean_s"] >= 0
    out = capsys.readouterr().out
    table = out.partition("Regret per decision by cause, ms:")[2]
    assert "| expected-latency |        10 |" in table
    assert "lmetric" not in table
    assert main([*flags, "--regret", "0"]) == 0
    assert results(tmp_path, "quick").entries[0]["regret_mean_s"] is None
    assert "by cause, ms" not in capsys.readouterr().out


def test_another_content_of_a_log_is_another_basis(tmp_path: Path) -> None:
    log, config = tmp_path / "log.jsonl", tmp_path / "c.yaml"
    config.write_text(REFERENCE_CONFIG)
    bases = []
    for content in ("one", "two"):
        log.write_text(content)
        options = parse_options(["replay", str(log), "--config", str(config)])
        made = command.replay_choice(options)
        bases.append(Bench(made.setup, {}).basis(Task(made.cells[0], "c", 1)))
    assert bases[0] != bases[1]


def test_a_bar_is_told_of_the_parts_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    bar = SimpleNamespace(show=lambda done, note: told.append(done), end=told.append)
    monkeypatch.setattr(runner, "ProgressBar", lambda total: bar)
    bench = Bench(Setup(requests_max=20), {"turn": InTurn})
    tasks = [Task(CELLS[0], "turn", seed) for seed in (1, 2)]
    made: list[Record] = []
    runner.run_all(bench, tasks, 1, made.append)
    assert len(made) == 2
    assert told == sorted(told)
    assert told[-1] == 2
    assert any(0 < each < 1 for each in told)
