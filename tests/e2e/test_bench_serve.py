"""`make bench-serve`, run small."""

import json
import subprocess
import sys


def test_the_command_prints_a_table_and_the_figures_as_json() -> None:
    flags = ["--rounds=1", "--seconds=0.2", "--sizes=1", "--arms=grpcio", "--endpoints=8"]
    run = subprocess.run(
        [sys.executable, "-m", "bench.serve", *flags, "--events=4", "--connections=4"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "EPP us/request" in run.stdout
    report = json.loads(run.stdout.splitlines()[-1])
    assert report.keys() == {"machine", "settings", "rows", "chunks", "idle_cores", "errors"}
    assert report["errors"] == {}
    assert {"cores", "load_average", "python", "envoy"} <= report["machine"].keys()
    rows = {(row["arm"], row["connections"]): row for row in report["rows"]}
    assert rows.keys() == {("none", 4), ("none", 1), ("grpcio", 4), ("grpcio", 1)}
    row = rows["grpcio", 4]
    assert row["requests"] > 0
    assert row["budget_us"] == 110
    # Headers, body, end; and the same of the answer.
    assert row["messages"] == 6
    for name in ("epp_cpu_us", "envoy_cpu_us", "requests_per_s", "p50_us", "p99_us"):
        assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
    assert row["added_p50_us"]["median"] > 0
    assert rows["none", 4]["epp_cpu_us"] is None
    (chunk,) = report["chunks"]
    assert chunk["arm"] == "grpcio"
    assert 2 <= chunk["chunks"] <= 3
    assert report["idle_cores"]["grpcio"]["median"] > 0


def test_a_wrong_flag_is_told_in_one_line() -> None:
    for flag, what in (("--arms=nine", "nine"), ("--sizes=0", "1 to 1024"), ("--rounds=0", "1 to")):
        run = subprocess.run(
            [sys.executable, "-m", "bench.serve", flag], capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 2
        assert what in run.stderr.splitlines()[-1]
        assert "Traceback" not in run.stderr
