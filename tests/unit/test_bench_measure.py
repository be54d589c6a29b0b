"""What the benches compute of what they measured."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml

from bench.measure import Spread, cpu_s, interleave, percentile, process_tree, table, verdict
from bench.serve import Cell, Report, Sample, cells_of, chunk_rows, report_text, rows_of
from bench.traffic.site import ARMS, BASELINE, Arm, without_ext_proc

GRPCIO = Arm("grpcio", "grpcio")


def sample(arm: Arm, number: int, **figures: float) -> Sample:
    events = int(figures.pop("events", 0))
    values = {
        "requests": 100,
        "requests_per_s": 100.0,
        "epp_cpu_us": 0.0,
        "envoy_cpu_us": 50.0,
        "driver_cpu_us": 1.0,
        "upstream_cpu_us": 1.0,
        "messages": 6.0,
        "p50_us": 0.0,
        "p99_us": 0.0,
    }
    return Sample(cell=Cell(arm, 1, 16, events), round=number, **{**values, **figures})


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert [percentile([3.0, 1.0, 2.0], r) for r in (0.0, 0.33, 0.34, 0.5, 0.99, 1.0)] == [
        *(1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    ]
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_spread_shows_its_median_between_its_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1500.0, 2500.0]).text(scale=1e-3, digits=1) == "2.0 (1.5..2.5)"


def test_each_round_has_every_case_once_and_no_case_always_follows_the_same() -> None:
    groups = [["a", "b", "c"], [], ["d"]]
    order = list(interleave(groups, 3))
    assert Counter(order) == {(n, case): 1 for n in range(3) for case in "abcd"}
    assert ["".join(c for n, c in order if n == number) for number in range(3)] == [
        *("abcd", "bcad", "cabd")
    ]


def test_a_budget_is_met_up_to_its_very_value() -> None:
    assert verdict(110.0, 110.0) == "met"
    assert verdict(220.0, 110.0) == "missed x2.0"


def test_a_table_is_aligned() -> None:
    assert table(("name", "us"), [("a", "1"), ("longer", "20")]) == (
        "name    us\na        1\nlonger  20"
    )


def test_cpu_time_of_a_process_is_seen_from_outside_with_its_children() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time\\n"
        "while time.process_time() < 0.2: pass\\nprint(1, flush=True)\\ninput()'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint('ready', flush=True)\ninput()\nchild.communicate(b'\\n')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert len(process_tree(parent.pid)) == 2
        assert cpu_s(parent.pid) >= 0.2
        parent.communicate(b"\n")
    assert cpu_s(parent.pid) == 0.0


def test_cpu_time_is_finer_than_the_clock_ticks_of_proc() -> None:
    before_s = cpu_s(os.getpid())
    start_s = time.process_time()
    while time.process_time() - start_s < 0.003:
        pass
    assert 0.003 <= cpu_s(os.getpid()) - before_s < 0.010


def test_added_latency_is_the_difference_within_a_round() -> None:
    samples = [
        *(sample(BASELINE, 0, p50_us=1000.0), sample(BASELINE, 1, p50_us=3000.0)),
        *(sample(GRPCIO, 0, p50_us=2000.0), sample(GRPCIO, 1, p50_us=4500.0)),
        sample(GRPCIO, 2, p50_us=9000.0),  # its other half failed
    ]
    without, row = rows_of(samples, cells_of([BASELINE, GRPCIO], [1], [16]))
    assert (without.arm, without.added_p50_us, without.epp_cpu_us) == ("none", None, None)
    assert row.added_p50_us == Spread(1250.0, 1000.0, 1500.0)
    assert (row.requests, row.p50_us.median) == (300, 4500.0)


def test_a_chunk_costs_what_is_more_per_message_that_envoy_sent_more() -> None:
    cells = [[Cell(GRPCIO, 1, 16, 1), Cell(GRPCIO, 1, 16, 32)]]
    samples = [
        sample(GRPCIO, 0, events=1, epp_cpu_us=1000.0, messages=6.0),
        sample(GRPCIO, 0, events=32, epp_cpu_us=2500.0, messages=36.0, envoy_cpu_us=350.0),
        sample(GRPCIO, 1, events=32, epp_cpu_us=9999.0, messages=36.0),
    ]
    (row,) = chunk_rows(samples, cells)
    assert row.epp_cpu_us == Spread(50.0, 50.0, 50.0)
    assert row.envoy_cpu_us.median == 10.0
    assert row.chunks == 30.0


def test_a_size_that_an_arm_does_not_measure_makes_no_cell() -> None:
    limited = Arm("limited", "grpcio", kib=(16,))
    groups = cells_of([BASELINE, limited], [1, 16], [16, 1])
    assert [[(c.arm.name, c.kib, c.connections) for c in group] for group in groups] == [
        [("none", 1, 16)],
        [("none", 1, 1)],
        [("none", 16, 16), ("limited", 16, 16)],
        [("none", 16, 1), ("limited", 16, 1)],
    ]


def test_an_arm_says_by_its_transport_whether_it_has_an_epp() -> None:
    assert [arm.transport for arm in ARMS].count(None) == 1
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_errors_stand_below_the_tables() -> None:
    report = Report({}, {}, [], [], {}, {"grpcio, 1 KiB: status 500": 3})
    assert report_text(report).endswith("ERROR grpcio, 1 KiB: status 500: 3 times")


def test_the_baseline_is_the_same_envoy_less_one_filter() -> None:
    names = ["envoy.filters.http.header_mutation", "envoy.filters.http.ext_proc", "router"]
    manager = {"http_filters": [{"name": name} for name in names], "stat_prefix": "inference"}
    chain = {"filters": [{"typed_config": manager}]}
    document = {"static_resources": {"listeners": [{"filter_chains": [chain]}], "clusters": [1]}}
    left = yaml.safe_load(without_ext_proc(yaml.safe_dump(document)))
    manager["http_filters"].pop(1)
    assert left == document
