"""`make bench-e2e`, run small, and how its figures come about."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bench.demo.client import Fate, Outcome
from bench.demo.figures import Arm
from bench.demo.workload import Kind
from bench.e2e import (
    MEASURED,
    REFERENCE,
    ROUTERS,
    TTFTS,
    Cores,
    Report,
    Sample,
    report_text,
    rows_of,
    sample_of,
    warnings_of,
)
from bench.measure import process_tree
from bench.stack import NotReadyError
from epp.config import load_config, resolve
from epp.core.latency.expected import ExpectedLatency

NAMES = [router.name for router in ROUTERS]
IDLE = Cores(engine=0.1, engines=0.2, epp=0.1, envoy=0.1, client=0.1, machine=0.6)


def test_a_small_run_gives_sane_figures_of_the_same_requests(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--rounds=1", "--engines=2", "--speed=8", "--seconds=1.5", "--warm-up=1"]
    run = subprocess.run(
        [sys.executable, "-m", "bench.e2e", *flags, f"--json={file}"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for title in ("TTFT in ms", "Ratio to the reference scorers", "Cores in use", "Machine: at "):
        assert title in run.stdout
    assert "round 1 of 1: round robin; load" in run.stderr

    report = json.loads(file.read_text())
    rows = {row["router"]: row for row in report["rows"]}
    assert list(rows) == NAMES
    assert {row["requests"] for row in rows.values()} == {rows[NAMES[0]]["requests"]}
    for name, row in rows.items():
        assert row["requests"] > 20
        assert row["errors"] == 0
        assert 0 < row["hit_ratio"]["median"] < 1
        p50_s, p90_s, p99_s = (row["ttft"][key]["median"] for key in TTFTS[1:])
        # A step takes at least 1.5 ms at this speed.
        assert 0.0015 < p50_s <= p90_s <= p99_s < 5.0, name
        cores = {key: spread["median"] for key, spread in row["cores"].items()}
        assert 0 < cores["engine"] < cores["engines"] < cores["ours"]
    # Round robin asks nobody; the EPP only scrapes meanwhile.
    assert rows[NAMES[0]]["cores"]["epp"]["median"] < rows[NAMES[1]]["cores"]["epp"]["median"]
    assert rows["reference scorers"]["ratio_to_reference"] == {}
    ratio = rows["round robin"]["ratio_to_reference"]["mean_s"]
    means_s = [
        rows[name]["ttft"]["mean_s"]["median"] for name in ("round robin", "reference scorers")
    ]
    assert ratio["mean"] == pytest.approx(means_s[0] / means_s[1], rel=0.05)
    assert ratio["low"] is None
    assert len(report["samples"]) == 3
    assert report["settings"]["engines"] == 2


def test_an_interrupt_in_the_middle_of_a_run_stops_everything(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        bench = subprocess.Popen(
            [sys.executable, "-m", "bench.e2e", "--engines=2"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + 60.0
        while "phase 1/2" not in output.read_text():
            assert bench.poll() is None, output.read_text()
            assert time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.05)
        pids = process_tree(bench.pid)
        assert len(pids) >= 5
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60.0) == 130
    finally:
        bench.kill()
        bench.wait()
    assert "everything is stopped" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_wrong_flag_is_told_in_one_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.e2e", "--rounds=0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "--rounds must be 1 to" in run.stderr.splitlines()[-1]


def test_the_reference_runs_its_charts_scorers_and_the_last_router_no_configuration() -> None:
    config, period = REFERENCE.epp_flags
    [profile] = resolve(load_config(Path(config.partition("=")[2]).read_text())).profiles
    assert [scorer.weight for scorer in profile.scorers] == [2.0, 2.0, 3.0]
    assert profile.cost is None
    assert period == "--refresh-metrics-interval=50ms"
    assert ROUTERS[-1].epp_flags == ()
    assert isinstance(resolve(None).profiles[0].cost, ExpectedLatency)


# -- figures -------------------------------------------------------------------------------


def answered(number: int, ttft_s: float, *, phase: int = MEASURED, cached: int = 0) -> Outcome:
    return Outcome(
        id=str(number),
        kind=Kind.CHAT,
        phase=phase,
        late_s=0.001 * number,
        sent_s=1.0,
        fate=Fate.OK,
        first_s=1.0 + ttft_s,
        prompt_tokens=100,
        cached_tokens=cached,
    )


def test_only_requests_after_the_warm_up_count_but_every_error_does() -> None:
    outcomes = [answered(0, 9.0, phase=0, cached=100)]
    outcomes += [answered(number, 0.01 * number, cached=50) for number in range(1, 101)]
    outcomes.append(Outcome(id="x", kind=Kind.CHAT, phase=0, late_s=0.0, sent_s=0.0))
    sample = sample_of(Arm(name="some", outcomes=outcomes, engine_late_s=0.2), IDLE, seed=7)
    assert (sample.requests, sample.errors, sample.seed) == (100, 1, 7)
    assert sample.hit_ratio == 0.5
    times_s = (sample.mean_s, sample.p50_s, sample.p90_s, sample.p99_s)
    assert times_s == pytest.approx((0.505, 0.5, 0.9, 0.99))
    assert (sample.engines_late_s, sample.requests_late_s) == (0.2, 0.1)


def test_a_run_without_a_single_answer_is_an_error_that_says_why() -> None:
    failed = Outcome(
        id="x", kind=Kind.CHAT, phase=1, late_s=0.0, sent_s=0.0, error="status 503: no"
    )
    with pytest.raises(NotReadyError, match=r"some: no request was answered.*503"):
        sample_of(Arm(name="some", outcomes=[failed]), IDLE, seed=1)


def sampled(router: str, seed: int, mean_s: float, *, cores: Cores = IDLE) -> Sample:
    return Sample(
        router=router,
        seed=seed,
        requests=10,
        errors=1,
        hit_ratio=0.5,
        mean_s=mean_s,
        p50_s=mean_s,
        p90_s=2 * mean_s,
        p99_s=3 * mean_s,
        cores=cores,
        engines_late_s=0.0,
        requests_late_s=0.0,
    )


def test_routers_are_compared_within_rounds_whatever_their_order() -> None:
    own, reference = "expected latency", "reference scorers"
    samples = [sampled(reference, seed, mean_s) for seed, mean_s in ((2, 4.0), (3, 1.0), (1, 1.0))]
    samples += [sampled(own, seed, mean_s) for seed, mean_s in ((1, 0.5), (3, 0.5), (2, 4.0))]
    samples += [sampled("round robin", seed, s) for seed, s in ((2, 8.0), (1, 2.0), (3, 2.0))]
    robin, scorers, ours = rows_of(samples)
    assert (robin.router, robin.requests, robin.errors) == ("round robin", 30, 3)
    assert scorers.ratio_to_reference == {}
    # 0.5, 1 and 0.5; a ratio of the means would be 5/6.
    ratio = ours.ratio_to_reference["mean_s"]
    middle = 0.25 ** (1 / 3)
    assert ratio.mean == pytest.approx(middle)
    factor = math.exp(4.303 * math.log(2) / 3)
    assert (ratio.low, ratio.high) == pytest.approx((middle / factor, middle * factor))
    assert robin.ratio_to_reference["p99_s"].mean == pytest.approx(2.0)
    assert robin.ratio_to_reference["p99_s"].low == pytest.approx(2.0)
    assert (ours.ttft["p90_s"].min, ours.ttft["p90_s"].max) == (1.0, 8.0)


def told(rounds: int) -> str:
    names = ("round robin", "reference scorers", "expected latency")
    samples = [
        sampled(name, seed, 1.0 + seed * at)
        for at, name in enumerate(names)
        for seed in range(rounds)
    ]
    return report_text(Report({}, {}, rows_of(samples), samples, []), [])


def test_below_three_rounds_there_is_no_interval_and_the_report_says_why() -> None:
    for rounds, there in ((1, "there is one"), (2, "there are 2")):
        text = told(rounds)
        assert f"mean, no interval: that needs 3 rounds or more, and {there}; below 1" in text
        assert ".." not in text.partition("Ratio to")[2].partition("Cores in use")[0]
    text = told(3)
    assert "mean (95 %); below 1 is faster" in text
    assert text.partition("Ratio to")[2].partition("Cores in use")[0].count("..") == 8


def test_a_machine_or_a_process_at_its_limit_is_told() -> None:
    quiet = sampled("reference scorers", 1, 1.0)
    assert warnings_of([quiet, quiet], 2) == []
    full = msgspec.structs.replace(IDLE, machine=1.9)
    [warning] = warnings_of([quiet, sampled("reference scorers", 2, 1.0, cores=full)], 2)
    assert warning == "1 of 2 runs: up to 1.90 of 2 cores in use, up to 0.50 by this bench"
    assert warnings_of([sampled("reference scorers", 2, 1.0, cores=full)], 4) == []
    single = msgspec.structs.replace(IDLE, envoy=0.95)
    [warning] = warnings_of([sampled("reference scorers", 1, 1.0, cores=single)], 2)
    assert warning == "envoy: up to 0.95 cores in use, and it has but one"
