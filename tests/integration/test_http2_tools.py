"""The fast transport and nghttp2's tools: `nghttp`, which prints every frame, and `h2load`."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from epp.edge.health import CHECK_PATH
from epp.edge.tls import SelfSigned
from tests.integration.transports import (
    FAST,
    HOST,
    NOT_SERVING,
    PROCESS_PATH,
    Faults,
    Recorders,
    message,
    no_log_noise,
    on_uvloop,
    serving,
)

__all__ = ["no_log_noise"]

GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")
MESSAGES = [b"first", b"x" * 70_000, b"", b"last"]
MESSAGES_BYTES = b"".join(map(message, MESSAGES))
BY_TLS = pytest.mark.parametrize("tls", [None, SelfSigned()], ids=["plain", "tls"])


async def run(tool: str, *arguments: str) -> str:
    """What a tool of nghttp2 prints; it must succeed."""
    found = shutil.which(tool)
    assert found, f"{tool} is missing: install the package nghttp2-client (Debian, Ubuntu)"
    command = [found, *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    text = (done.stdout + done.stderr).decode("latin-1")
    assert done.returncode == 0, text
    return text


@pytest.fixture
def body(tmp_path: Path) -> str:
    """A file of gRPC messages."""
    (tmp_path / "body").write_bytes(MESSAGES_BYTES)
    return str(tmp_path / "body")


@pytest.fixture
def check_body(tmp_path: Path) -> str:
    """A file with the one empty message of a health check."""
    (tmp_path / "check").write_bytes(message(b""))
    return str(tmp_path / "check")


def url(port: int, path: str, tls: object = None) -> str:
    return f"{'https' if tls else 'http'}://{HOST}:{port}{path}"


# -- nghttp --------------------------------------------------------------------------------


def received(text: str) -> list[str]:
    """Frames and header fields that `nghttp -v` got, in order, without times and lengths."""
    frames = re.findall(r"\] recv (.+?)\n((?: {10}.*\n)*)", text)
    return [_shown(first, more) for first, more in frames]


def _shown(first: str, more: str) -> str:
    first = re.sub(r"frame <length=\d+, flags=(0x..), stream_id=(\d+)>", r"\1 \2", first)
    return " ".join([first, *re.findall(r"error_code=\w+|\[SETTINGS_\w+|\w+_ERROR", more)])


def statuses(text: str) -> list[str]:
    """`grpc-status` of every answer."""
    return re.findall(r"recv \(stream_id=\d+\) grpc-status: (\d+)", text)


def complaints(text: str) -> set[str]:
    """Error codes of all frames, either way; a rejected answer shows as one that nghttp sends."""
    return set(re.findall(r"error_code=(\w+)", text)) - {"NO_ERROR"}


@BY_TLS
@on_uvloop
async def test_nghttp_sees_settings_headers_data_and_trailers(tls, check_body: str) -> None:
    async with serving(FAST, Recorders(), tls=tls) as (_, port):
        ask = ("-v", "-n", "--no-dep", "-d", check_body, *GRPC)
        text = await run("nghttp", *ask, url(port, CHECK_PATH, tls))
    frames = received(text)
    assert frames[0].startswith("SETTINGS 0x00 0 [SETTINGS_MAX_CONCURRENT_STREAMS"), frames
    assert "SETTINGS 0x01 0" in frames  # the ACK
    assert frames[-6:] == [
        "(stream_id=1) :status: 200",
        "(stream_id=1) content-type: application/grpc",
        "HEADERS 0x04 1",
        "DATA 0x00 1",
        "(stream_id=1) grpc-status: 0",
        "HEADERS 0x05 1",  # END_STREAM, END_HEADERS
    ], frames
    assert f"DATA frame <length={len(message(NOT_SERVING))}," in text
    assert not complaints(text)


UNUSUAL = {
    "padding": ("-b", "200"),
    "tiny windows": ("-w", "6", "-W", "8"),
    "wide windows": ("-w", "30", "-W", "30"),
    "priorities and many streams": ("-m", "50"),
    "trailers": ("--trailer", "x-checksum: 1"),
    "no header table": ("-c", "0"),
    "a header table that shrinks and grows": ("-c", "0", "-c", "4096"),
    "a large header table": ("-c", "65536", "--encoder-header-table-size", "0"),
}


@pytest.mark.parametrize("how", UNUSUAL)
@BY_TLS
@on_uvloop
async def test_nghttp_has_its_messages_echoed_whatever_it_negotiates(
    tls, how: str, body: str
) -> None:
    streams = Recorders()
    count = 50 if "many" in how else 1
    async with serving(FAST, streams, tls=tls) as (_, port):
        ask = ("-v", "-n", "-d", body, *GRPC, *UNUSUAL[how])
        text = await run("nghttp", *ask, url(port, PROCESS_PATH, tls))
    assert statuses(text) == ["0"] * count
    assert not complaints(text)
    lengths = re.findall(r"recv DATA frame <length=(\d+)", text)
    assert sum(map(int, lengths)) == count * len(MESSAGES_BYTES)
    assert [(s.received, s.closes) for s in streams.made] == [(MESSAGES, 1)] * count


REFUSED = {
    "too many headers": (("--continuation",), PROCESS_PATH, "200", ["8"]),
    "no such method": ((), "/envoy.service.ext_proc.v3.ExternalProcessor/No", "200", ["12"]),
    "no gRPC": (("-H", "content-type: text/plain"), PROCESS_PATH, "415", []),
    "no POST": (("-H", ":method: PUT"), PROCESS_PATH, "405", []),
}


@pytest.mark.parametrize("what", REFUSED)
@on_uvloop
async def test_nghttp_is_told_why_it_is_refused(what: str, check_body: str) -> None:
    more, path, http_status, grpc_status = REFUSED[what]
    streams = Recorders()
    headers = GRPC if "-H" not in more or "method" in more[1] else ("-H", "te: trailers")
    async with serving(FAST, streams) as (_, port):
        text = await run("nghttp", "-v", "-n", "-d", check_body, *headers, *more, url(port, path))
    assert re.findall(r"recv \(stream_id=\d+\) :status: (\d+)", text) == [http_status]
    assert statuses(text) == grpc_status
    assert not complaints(text)
    assert streams.made == []


@on_uvloop
async def test_an_upgrade_from_http_1_is_dropped_and_counted(check_body: str) -> None:
    faults = Faults()
    async with serving(FAST, Recorders(), report_fault=faults) as (_, port):
        text = await run("nghttp", "-v", "-u", "-d", check_body, *GRPC, url(port, CHECK_PATH))
        assert statuses(text) == []
        ask = ("-v", "-n", "-d", check_body, *GRPC, url(port, CHECK_PATH))
        assert statuses(await run("nghttp", *ask)) == ["0"]
    assert faults == {"bad-preface": 1}


# -- h2load --------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What `h2load` counted."""

    requests: list[int]
    """Total, started, done, succeeded, failed, errored, timed out."""
    codes: list[int]
    """Answers of status 2xx, 3xx, 4xx, 5xx."""
    data_bytes: int
    """Content of all answers."""


def loaded(text: str) -> Loaded:
    lines = re.search(r"requests: (.*)\nstatus codes: (.*)\n.*\((\d+)\) data", text)
    assert lines, text
    requests, codes = (re.findall(r"(\d+) \w+", line) for line in lines.groups()[:2])
    return Loaded(list(map(int, requests)), list(map(int, codes)), int(lines[3]))


async def load(requests: int, arguments: Sequence[str], answer_bytes: int) -> None:
    """Run h2load; every request must succeed and its answer have this length."""
    text = await run("h2load", "-n", str(requests), *GRPC, *arguments)
    wanted = Loaded([requests] * 4 + [0] * 3, [requests, 0, 0, 0], requests * answer_bytes)
    assert loaded(text) == wanted, text


@BY_TLS
@on_uvloop
async def test_h2load_with_many_connections_and_streams_gets_every_answer(
    tls, check_body: str
) -> None:
    async with serving(FAST, Recorders(), tls=tls) as (_, port):
        how = ("-c", "50", "-m", "100", "-d", check_body, url(port, CHECK_PATH, tls))
        await load(10_000, how, len(message(NOT_SERVING)))


@pytest.mark.parametrize("windows", ["10", "30"])
@BY_TLS
@on_uvloop
async def test_h2load_streams_come_back_whole_through_any_windows(
    tls, windows: str, body: str
) -> None:
    streams = Recorders()
    async with serving(FAST, streams, tls=tls) as (server, port):
        how = ("-c", "5", "-m", "20", "-w", windows, "-W", windows, "-d", body)
        await load(200, (*how, url(port, PROCESS_PATH, tls)), len(MESSAGES_BYTES))
        assert server.streams_inflight == 0
    assert [(s.received, s.closes) for s in streams.made] == [(MESSAGES, 1)] * 200


@BY_TLS
@on_uvloop
async def test_h2load_connections_come_and_go(tls, check_body: str) -> None:
    """Each connection carries one request; 100 a second or as fast as they can."""
    async with serving(FAST, Recorders(), tls=tls) as (_, port):
        for how in (("-c", "300"), ("-c", "40", "-r", "20", "--rate-period", "100ms")):
            requests = int(how[1])
            ask = (*how, "-d", check_body, url(port, CHECK_PATH, tls))
            await load(requests, ask, len(message(NOT_SERVING)))
