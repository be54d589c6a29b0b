"""From records to tables, JSON and pictures."""

import json
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from bench.sim.drawing import REFERENCE_EPP, series_of, shown_cells, spread_out, styles_of
from bench.sim.experiments import GRIDS, SITUATIONS, Cell, conditions_of, fleet_of, select
from bench.sim.figures import Figures, Interval, LoadPoint
from bench.sim.hardware import HARDWARE
from bench.sim.markdown import markdown, markdown_table, percent, seconds
from bench.sim.model import SimRequest, Workload
from bench.sim.plots import PICTURES, Drawing, apart, draw_quantiles, write_plots
from bench.sim.progress import ProgressBar, clock_text, progress_line
from bench.sim.records import Record
from bench.sim.regret import RegretFigures
from bench.sim.report import (
    Report,
    averaged,
    contests_of,
    encode,
    entries_of,
    summary_of,
)
from bench.sim.workloads import WORKLOADS

SEEDS = (11, 12, 13)
KINDS = {
    "ours": "ours",
    "slow": "peer",
    "fast": "peer",
    "round-robin": "peer",
    "oracle": "oracle",
    "fast+hold": "control",
}
TTFT_S = {"ours": 1.0, "slow": 2.0, "fast": 1.25, "round-robin": 9.0, "oracle": 0.5}
REGRETS = {
    "ours": RegretFigures(
        decisions=7, mean_s=0.01, cache_s=0.008, load_s=-0.002, rates_s=0.0, objective_s=0.004
    ),
    "fast": RegretFigures(decisions=7, mean_s=0.02),
    "round-robin": RegretFigures(decisions=7, mean_s=3.0),
}
CELLS = [
    Cell(workload="chats", speed=speed, kv_blocks=blocks)
    for speed in (1.0, 1.5, 2.0)
    for blocks in (600, 2048, 8192)
]


def figures(ttft_s: float, **more: float) -> Figures:
    values = {
        "requests": 100,
        "refused": 1,
        "lost": 0,
        "retries": 2,
        "preemptions": 0,
        "ttft_mean_s": ttft_s,
        "ttft_p50_s": ttft_s / 2,
        "ttft_p90_s": ttft_s * 2,
        "ttft_p99_s": ttft_s * 5,
        "ttft_max_s": ttft_s * 9,
        "tpot_p50_s": 0.02,
        "tpot_p99_s": 0.05,
        "e2e_mean_s": ttft_s + 5,
        "hold_mean_s": 0.0,
        "goodput_ratio": 0.9,
        "hit_ratio": 0.2,
        "requests_balance_ratio": 1.5,
        "inflight_balance_ratio": 1.25,
    }
    return Figures(**{**values, **more})


def record(cell: str, policy: str, seed: int, ttft_s: float, **more: object) -> Record:
    return Record(
        cell=cell,
        policy=policy,
        seed=seed,
        basis="b",
        wall_s=0.5,
        figures=figures(ttft_s),
        ceiling_ratio=0.25,
        ttft_quantiles_s=[ttft_s * (at + 1) / 50 for at in range(101)],
        regret=REGRETS.get(policy),
        load=[LoadPoint(float(at), 1.0, 2.0, 3.0) for at in range(10)],
        **more,
    )


def records() -> list[Record]:
    """Every policy in every cell; seeds differ by the same factor for all."""
    return [
        record(cell.name, policy, seed, ttft_s * cell.speed * (seed - 10))
        for cell in CELLS
        for policy, ttft_s in {**TTFT_S, "fast+hold": 0.1}.items()
        for seed in SEEDS
    ]


def report(made: list[Record], kinds: dict[str, str] = KINDS) -> Report:
    entries = entries_of(made, [cell.name for cell in CELLS], list(kinds), "ours")
    contests = contests_of(entries, kinds, "ours")
    return Report(
        name="test",
        command="python -m bench.sim",
        machine={"at": "now"},
        versions={"code": "abc"},
        constants={},
        seeds=list(SEEDS),
        policies=kinds,
        baseline="ours",
        summary=summary_of(contests),
        contests=contests,
        entries=entries,
        runs=made,
    )


# -- computing -----------------------------------------------------------------------------


def test_entries_follow_the_order_asked_for_whatever_order_runs_ended_in() -> None:
    made = records()
    cells, policies = [cell.name for cell in CELLS], list(KINDS)
    entries = entries_of(made, cells, policies, "ours")
    assert entries == entries_of(made[::-1], cells, policies, "ours")
    keys = [(entry.cell, entry.policy) for entry in entries]
    assert keys == [(cell, policy) for cell in cells for policy in policies]
    assert entries[0].seeds == list(SEEDS)


def test_differences_are_paired_by_seed() -> None:
    slow = next(entry for entry in report(records()).entries if entry.policy == "slow")
    # Seeds differ by a factor of three, the policies by two in each: no spread at all.
    assert slow.difference == Interval(1.0, 1.0, 1.0)
    assert slow.ttft_mean_s.mean == pytest.approx(4.0)


def test_the_baseline_has_no_difference_to_itself() -> None:
    ours = next(entry for entry in report(records()).entries if entry.policy == "ours")
    assert ours.difference is None
    assert ours.ceiling_share == pytest.approx(0.8)


def test_only_seeds_that_both_have_are_paired() -> None:
    made = [each for each in records() if (each.policy, each.seed) != ("ours", 13)]
    slow = next(entry for entry in report(made).entries if entry.policy == "slow")
    assert len(slow.seeds) == 3
    assert slow.difference == Interval(1.0, 1.0, 1.0)


def test_several_seeds_are_averaged_counts_summed_and_maxima_kept() -> None:
    merged = averaged([figures(1.0, inflight_balance_ratio=None), figures(3.0)])
    assert merged.ttft_mean_s == 2.0
    assert (merged.requests, merged.refused, merged.retries) == (200, 2, 4)
    assert merged.ttft_max_s == 27.0
    assert merged.inflight_balance_ratio == 1.25


def test_the_best_peer_is_neither_the_oracle_nor_one_with_our_hold() -> None:
    told = report(records())
    assert {contest.peer for contest in told.contests} == {"fast"}
    assert len(told.contests) == len(CELLS)
    assert told.contests[0].difference.mean == pytest.approx(-0.2)
    assert told.contests[0].oracle.mean == pytest.approx(1.0)
    assert told.summary.geometric_mean == pytest.approx(-0.2)
    assert (told.summary.better, told.summary.level, told.summary.worse) == (9, 0, 0)


def test_a_peer_that_lacks_a_seed_is_not_the_best() -> None:
    made = [each for each in records() if (each.policy, each.seed) != ("fast", 13)]
    assert {contest.peer for contest in report(made).contests} == {"slow"}


def test_a_failed_run_is_in_no_average() -> None:
    failed = Record(cell=CELLS[0].name, policy="slow", seed=14, basis="b", wall_s=0, error="x")
    slow = next(e for e in report([*records(), failed]).entries if e.policy == "slow")
    assert slow.seeds == list(SEEDS)


def test_without_a_peer_there_is_no_contest() -> None:
    made = [each for each in records() if each.policy in ("ours", "oracle")]
    told = report(made, {"ours": "ours", "oracle": "oracle"})
    assert told.contests == []
    assert told.summary is None
    assert "best peer" not in markdown(told).replace(told.method, "")


# -- writing -------------------------------------------------------------------------------


def test_the_json_has_columns_and_a_row_per_entry_and_run() -> None:
    data = json.loads(encode(report(records())))
    entries, runs = data["entries"], data["runs"]
    assert len(entries["rows"]) == len(CELLS) * len(KINDS)
    row = dict(zip(entries["columns"], entries["rows"][1], strict=True))
    assert (row["policy"], row["ttft_mean_s"][0]) == ("slow", 4.0)
    assert row["difference"] == [1.0, 1.0, 1.0]
    assert len(row["ttft_quantiles_s"]) == 101
    assert len(runs["rows"]) == len(records())
    assert "ttft_p99_s" in runs["columns"]
    assert not data["left_out"]


def test_what_makes_a_file_too_large_is_left_out_and_named() -> None:
    whole = report(records())
    size = len(encode(whole))
    smaller = encode(whole, size - 1)
    assert len(smaller) < size
    assert json.loads(smaller)["left_out"] == ["load over time"]
    least = json.loads(encode(whole, 1))
    assert least["left_out"] == ["load over time", "runs", "TTFT quantiles"]
    assert len(least["entries"]["rows"]) == len(CELLS) * len(KINDS)


def test_tables_have_as_many_cells_in_every_row() -> None:
    for block in markdown(report(records())).split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_the_markdown_answers_first_what_is_asked_first() -> None:
    text = markdown(report(records()))
    assert "**ours against the best peer of each cell: -20.0% mean TTFT" in text
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:2] == ["Against the best peer of each cell", "Mean TTFT, s"]
    assert headings[2:] == [cell.name for cell in CELLS]


def test_an_interrupted_bench_and_failed_runs_are_told() -> None:
    told = msgspec.structs.replace(report(records()), missing=3, failed=["cell policy 11: boom"])
    assert "**Interrupted: 3 runs were not made.**" in markdown(told)
    assert "- cell policy 11: boom" in markdown(told)


def test_the_best_of_a_row_is_bold_and_no_oracle() -> None:
    text = markdown(report(records(), {k: v for k, v in KINDS.items() if k != "fast+hold"}))
    matrix = text.partition("## Mean TTFT, s")[2]
    row = next(line for line in matrix.splitlines() if CELLS[0].name in line)
    assert row.count("**") == 2
    assert "**2.000**" in row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0004, "0.000"),
        (0.6441, "0.644"),
        (9.9996, "10.000"),
        (12.34, "12.3"),
        (170, "170"),
    ],
)
def test_seconds_have_three_figures(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_a_difference_shows_its_interval_when_it_has_one() -> None:
    assert percent(Interval(-0.0312, -0.041, -0.022)) == "-3.1% [-4.1%, -2.2%]"
    assert percent(Interval(0.5)) == "+50.0%"
    assert percent(None) == "–"
    assert markdown_table(("a", "b"), [("x", "1")]).splitlines()[1] == "| --- | --: |"


# -- cells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS)
def test_cells_name_what_there_is_and_have_names_of_their_own(grid: str) -> None:
    cells = GRIDS[grid]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.workload in WORKLOADS
        assert cell.situation in SITUATIONS
        assert cell.hardware in HARDWARE


def test_the_target_grid_is_the_whole_product() -> None:
    cells = GRIDS["targets"]
    assert len(cells) == 10 * 3 * 4
    assert {cell.kv_blocks for cell in cells} == {600, 2048, 8192}
    assert {cell.endpoints for cell in cells} == {4, 8, 16, 64}
    assert len({(cell.workload, cell.speed) for cell in cells}) == 10


def test_arrivals_grow_with_the_fleet() -> None:
    assert Cell(workload="chats", speed=2.0, endpoints=16).rate == 4.0
    assert Cell(workload="chats", speed=2.0, endpoints=4).rate == 1.0


def test_a_fleet_has_the_capacity_and_the_speeds_of_its_cell() -> None:
    cell = GRIDS["mixed-speeds"][0]
    fleet = fleet_of(cell)
    assert sorted(kind.cost.speed for kind in fleet.kinds) == [0.5] * 2 + [1.0] * 4 + [1.5] * 2
    assert {kind.kv_tokens for kind in fleet.kinds} == {2048 * 512}
    assert {kind.kv_tokens for kind in fleet_of(cell, 64).kinds} == {2048 * 512}
    own = fleet_of(msgspec.structs.replace(cell, kv_blocks=None))
    assert own.kinds[0].kv_tokens == HARDWARE[cell.hardware].kv_tokens


def test_faults_fall_into_the_time_of_the_workload() -> None:
    workload = Workload(
        "w", (SimRequest(number=0, arrival_s=80.0, prompt_tokens=1, output_tokens=1),)
    )
    for name in SITUATIONS:
        cell = Cell(workload="w", situation=name)
        faults = conditions_of(cell, workload, fleet_of(cell)).faults
        assert all(0 < fault.at_s < 80.0 for fault in faults), name


def test_patterns_choose_cells_and_an_unknown_name_tells_what_there_is() -> None:
    assert {cell.workload for cell in select("targets", ["weka"])} == {"weka"}
    both = select("targets", ["conversation-x2/600b/8e", "azure*64e"])
    assert {cell.name for cell in both} >= {"conversation-x2/600b/8e", "azure-x8/2048b/64e"}
    assert len(select("disturbed", ["synthetic-x2/2048b/8e"])) == 1, "a whole name is that cell"
    assert len(select("disturbed", ["synthetic-x2/2048b/8"])) == len(SITUATIONS)
    with pytest.raises(ValueError, match="no cell of core matches nothing-like-it; there are"):
        select("core", ["nothing-like-it"])
    with pytest.raises(ValueError, match="no grid is called 'best'"):
        select("best")


# -- pictures ------------------------------------------------------------------------------


def test_every_picture_is_drawn_when_cells_differ_in_load_and_capacity(tmp_path: Path) -> None:
    written = write_plots(report(records()), CELLS, tmp_path)
    assert [path.stem for path in written] == list(PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_picture_that_has_nothing_to_show_is_left_out_and_an_old_one_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "load.png").write_bytes(b"old")
    kinds = {"ours": "ours", "variant": "ours"}
    made = [record(CELLS[0].name, policy, 11, 1.0) for policy in kinds]
    told = msgspec.structs.replace(report(made, kinds), seeds=[11])
    assert [path.stem for path in write_plots(told, CELLS[:1], tmp_path)] == [
        "quantiles",
        "regret",
        "balance",
    ]
    assert not (tmp_path / "load.png").exists()


def test_regrets_are_told_by_cause_where_causes_are_known() -> None:
    text = markdown(report(records()))
    _, _, first = text.partition("Regret per decision by cause, ms:")
    rows = first.partition("##")[0].split()
    assert " ".join(rows[-15:]) == "| ours | 21 | 10.0 | 8.0 | -2.0 | 0.0 | 4.0 |"
    data = json.loads(encode(report(records())))["entries"]
    ours, slow, fast = (dict(zip(data["columns"], row, strict=True)) for row in data["rows"][:3])
    assert (ours["regret_decisions"], ours["regret_cache_s"]) == (21, 0.008)
    assert (fast["regret_mean_s"], fast["regret_cache_s"]) == (0.02, None)
    assert slow["regret_mean_s"] is None


def test_of_several_settings_of_a_policy_the_best_is_named_and_the_reference_always_is() -> None:
    kinds = {"ours": "ours", "dynamo-1": "peer", "dynamo-8": "peer", REFERENCE_EPP: "peer"}
    made = [
        record(CELLS[0].name, policy, 11, ttft_s)
        for policy, ttft_s in zip(kinds, (1.0, 3.0, 2.0, 9.0), strict=True)
    ]
    styles = styles_of(report(made, kinds))
    assert {name for name, style in styles.items() if style.named} == {
        "ours",
        "dynamo-8",
        REFERENCE_EPP,
    }
    assert not styles["dynamo-1"].named


def test_no_label_runs_into_the_next_panel_or_out_of_the_picture() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    told = report(records())
    drawing = Drawing(
        told,
        {cell.name: cell for cell in CELLS},
        {f"{name}, a long name": style for name, style in styles_of(told).items()},
        {(e.cell, f"{e.policy}, a long name"): e for e in told.entries},
    )
    figure = draw_quantiles(drawing)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()
    width = figure.bbox.width
    for panel, right in zip(figure.axes, (*figure.axes[1:], None), strict=True):
        edge = width
        if right is not None and right.get_position().x0 > panel.get_position().x1:
            edge = right.get_tightbbox(renderer, bbox_extra_artists=[]).x0
        for label in panel.texts:
            assert label.get_window_extent(renderer).x1 < edge


def test_ours_and_the_best_peers_have_colours_and_names() -> None:
    styles = styles_of(report(records()))
    assert styles["ours"].width == max(style.width for style in styles.values())
    named = [name for name, style in styles.items() if style.named]
    assert set(named) == {"ours", "oracle", "fast", "slow", "round-robin"}
    assert len({styles[name].colour for name in named}) == len(named)


def test_variants_of_ours_are_drawn_when_there_are_no_peers() -> None:
    kinds = {"ours": "ours", "slow": "ours"}
    made = [each for each in records() if each.policy in kinds]
    assert styles_of(report(made, kinds))["slow"].named


def test_shown_cells_cover_every_workload_before_any_has_two() -> None:
    shown = shown_cells(GRIDS["targets"], 5)
    assert {cell.workload for cell in shown} == {
        "conversation",
        "synthetic",
        "weka",
        "azure",
        "siblings",
    }
    assert {(cell.kv_blocks, cell.endpoints) for cell in shown} == {(2048, 8)}


def test_a_series_differs_in_one_thing_alone() -> None:
    series = series_of(GRIDS["targets"], "speed", 100)
    assert len(series) == 2 * 3 * 4
    for group in series:
        assert [cell.speed for cell in group] == sorted({cell.speed for cell in group})
        assert len({(cell.workload, cell.kv_blocks, cell.endpoints) for cell in group}) == 1


def test_numbers_of_an_axis_are_left_out_where_they_would_touch() -> None:
    assert apart([0.5, 1, 1.5, 2, 2.25, 2.5, 2.75, 3], 0.3) == [0.5, 1, 1.5, 2, 2.5, 3]
    assert apart([1.0, 1.5, 2.0, 2.5], 0.2) == [1.0, 1.5, 2.0, 2.5]


def test_labels_do_not_overlap_and_stay_within_the_panel() -> None:
    for heights in ([0.5] * 6, [0.0, 0.01, 0.5, 0.99, 1.0, 1.0], [0.9, 0.1], []):
        places = spread_out(heights, 0.1)
        ordered = sorted(places)
        assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
        assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
        by_height = sorted(range(len(heights)), key=lambda at: heights[at])
        assert [places[at] for at in by_height] == ordered
    assert spread_out([0.2, 0.8], 0.1) == pytest.approx([0.2, 0.8])


# -- progress ------------------------------------------------------------------------------


class Screen:
    """A stream that remembers, terminal or not."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def shown(terminal: bool) -> str:
    """What a bench of 100 s shows that calls ten times a second."""
    now_s = [0.0]
    screen = Screen(terminal)
    bar = ProgressBar(10, stream=screen, clock=lambda: now_s[0])
    for tick in range(1000):
        now_s[0] = tick / 10
        bar.show(tick / 100, "cell policy")
    bar.end(10)
    return screen.text


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    lines = shown(terminal=False).splitlines()
    assert 9 <= len(lines) <= 11
    assert "\r" not in "".join(lines)
    assert lines[-1] == "10 of 10 runs in 1:40"


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    text = shown(terminal=True)
    assert text.count("\n") == 1
    assert 300 < text.count("\r\x1b[K") <= 502


def test_progress_tells_the_time_that_is_left() -> None:
    line = progress_line(2.5, 10, 60.0, "cell policy")
    assert line == "[#######.......................]  25%  2/10 runs  1:00, 3:00 left  cell policy"
    assert "? left" in progress_line(0.0, 10, 5.0)
    assert (clock_text(59.6), clock_text(3725)) == ("1:00", "1:02:05")
