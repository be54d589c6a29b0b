"""The demo as a person runs it: `python -m bench.demo` as a process, with everything it starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from bench.demo import run
from bench.demo.__main__ import main
from bench.stack import Engine, Stack

REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.05
UNTIL_S_MAX = 60.0


class Running:
    """A demo in the background."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._output = folder / "demo.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.demo", *flags],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self._output.read_text()

    def until(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + UNTIL_S_MAX
        while (found := re.search(pattern, self.text())) is None:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline_s, self.text()
            time.sleep(POLL_S)
        return found

    def children(self) -> list[int]:
        """Pids of what it started (and of what that started, directly)."""
        pids = _children(self.process.pid)
        return pids + [grandchild for pid in pids for grandchild in _children(pid)]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(UNTIL_S_MAX)


def _children(pid: int) -> list[int]:
    text = "".join(
        task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()
    )
    return [int(child) for child in text.split()]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[partial[Running]]:
    """Starts demos; one that a failed test leaves behind is interrupted."""
    started: list[Running] = []

    def start(*flags: str) -> Running:
        started.append(Running(tmp_path, *flags))
        return started[-1]

    yield partial(start)
    for running in started:
        if running.process.poll() is None:
            running.end(signal.SIGINT)


def test_the_whole_demo_keeps_its_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "numbers.json"
    status = main(["--once", "--quick", "--json", str(file), "--logs", str(tmp_path / "logs")])
    text = capsys.readouterr().out
    assert status == 0, text
    assert "BROKEN" not in text
    assert text.count("  kept    ") == 7
    for title in ("Where requests went, and why", "EPP / round robin", "Decisions explained"):
        assert title in text
    assert "curl" not in text
    assert "\x1b" not in text

    numbers = json.loads(file.read_text())
    picked, robin = numbers["arms"]["EPP"], numbers["arms"]["round robin"]
    assert [o["id"] for o in sorted(picked["outcomes"], key=lambda o: o["id"])] == [
        o["id"] for o in sorted(robin["outcomes"], key=lambda o: o["id"])
    ]
    assert len(numbers["decisions"]) == picked["all"]["requests"] > 100
    healthy = robin["phases"][0]["requests_by_engine"].values()
    assert max(healthy) - min(healthy) <= 1, "this was not round robin"
    assert numbers["epp"]["inflight_requests"] == 0
    assert (tmp_path / "logs" / "epp" / "envoy.yaml").exists()


def test_an_engine_that_answers_500_breaks_a_promise_and_the_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [
        Engine("good", tmp_path, ["--model", "some-model"]),
        Engine("bad", tmp_path, ["--model", "some-model", "--fault", '{"error_500": true}']),
    ]
    try:
        for engine in engines:
            engine.start()
        endpoints = ",".join(engine.address for engine in engines)
        flags = ["--once", "--quick", "--no-round-robin", "--endpoints", endpoints]
        status = main(flags)
        text = capsys.readouterr().out
    finally:
        for engine in engines:
            engine.stop()
    assert status == 1, text
    assert "BROKEN  no request fails" in text
    assert "status 500" in text
    assert "some-model" in text
    assert "kept    nothing left in flight" in text


def test_the_curl_lines_work_and_ctrl_c_stops_everything(demo: partial[Running]) -> None:
    running = demo("--no-workload")
    running.until("Running until Ctrl-C")
    text = running.text()
    url = re.search(r"curl -i (http://\S+)", text)
    body = re.search(r"-d ('.*')", text)
    assert url is not None
    assert body is not None
    answer = fetch(url[1], shlex.split(body[1])[0].encode())
    assert json.loads(answer)["usage"]["completion_tokens"] == 8
    state = re.search(r"curl -s (http://\S+/debug/state)", text)
    assert state is not None
    assert len(json.loads(fetch(state[1]))["endpoints"]) == 3
    config = re.search(r"^  (\S*epp envoy-config .*)$", text, re.MULTILINE)
    assert config is not None
    made = subprocess.run(
        shlex.split(config[1]), cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "ext_proc" in made.stdout

    children = running.children()
    assert len(children) >= 5
    assert running.end(signal.SIGINT) == 0
    assert alive(children) == []


def test_sigterm_in_the_middle_of_the_workload_stops_everything(demo: partial[Running]) -> None:
    running = demo("--once")
    running.until(r"phase 1/3 .* [1-9]\d*/\d+ answered")
    children = running.children()
    assert len(children) >= 5
    assert running.end(signal.SIGTERM) == 130
    assert alive(children) == []
    assert "Traceback" not in running.text()
    assert "everything is stopped" in running.text()


def test_a_process_that_does_not_start_is_shown_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _children(os.getpid())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(run, "Stack", partial(Stack, envoy={"listen": listen}))
        assert main(["--no-workload"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("\ndemo: envoy: ")
    assert "Address already in use" in error
    assert set(_children(os.getpid())) <= set(before)


def test_endpoints_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["--endpoints", address]) == 1
    assert f"demo: http://{address}/v1/models gave no list of models" in capsys.readouterr().err


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20.0) as response:
        found: bytes = response.read()
        return found
