"""Endpoints from a flag and from a file, with real files."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.core.errors import ConfigError
from epp.core.model import EndpointSpec
from epp.core.pool import Members, Pool
from epp.edge import discovery
from epp.edge.discovery import (
    FILE_BYTES_MAX,
    FileDiscovery,
    StaticDiscovery,
    parse_endpoints,
    parse_file,
)

FILE = Path("endpoints.yaml")
LOOK_S = 0.01


class Seen:
    """The memberships a discovery told, in order."""

    def __init__(self) -> None:
        self.members: list[tuple[EndpointSpec, ...]] = []
        self.changed = asyncio.Event()

    def apply(self, event: Members) -> None:
        self.members.append(event.specs)
        self.changed.set()

    @property
    def addresses(self) -> list[list[str]]:
        return [[spec.address for spec in specs] for specs in self.members]

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not wanted():
                await self.changed.wait()
                self.changed.clear()


@asynccontextmanager
async def running(discovery: StaticDiscovery | FileDiscovery) -> AsyncIterator[None]:
    task = asyncio.ensure_future(discovery.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


class Heard(logging.Handler):
    """What discovery logged, for a test to wait for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.more.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(20):
            while not any(text in message for message in self.messages):
                self.more.clear()
                await self.more.wait()


@pytest.fixture
async def heard() -> AsyncIterator[Heard]:
    handler, logger = Heard(), logging.getLogger("epp.edge.discovery")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def page(*ports: int) -> str:
    entries = [{"name": f"e{p}", "address": "10.0.0.1", "port": p} for p in ports]
    return json.dumps({"endpoints": entries})


def swap(path: Path, text: str) -> None:
    """Replace the file in one step, as an editor or `kubectl cp` does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


# -- the flag ------------------------------------------------------------------------------


def test_the_flag_is_a_list_of_addresses() -> None:
    specs = parse_endpoints(" 10.0.0.1:8000, [FD00::0010]:8001 ,vllm-0.vllm:8000,")
    assert [s.address for s in specs] == ["10.0.0.1:8000", "[fd00::10]:8001", "vllm-0.vllm:8000"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no endpoint given"),
        (" , ", "is not an address"),
        ("10.0.0.1:8000,,10.0.0.2:8000", "is not an address"),
        ("10.0.0.1", "has no port"),
        ("10.0.0.1:99999", "no usable port"),
        ("10.0.0.1:8000,10.0.0.1:08000", "comes twice"),
        ("[::1]:80,[0:0::1]:80", "comes twice"),
    ],
)
def test_N02_a_bad_flag_is_refused_and_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^--endpoints: .*{complaint}"):
        parse_endpoints(text)


async def test_a_list_of_ips_is_told_once() -> None:
    seen = Seen()
    specs = parse_endpoints("10.0.0.2:8000,10.0.0.1:8000")
    pool = Pool(stale_after_s=1.0)
    async with running(StaticDiscovery(specs, seen.apply, resolve_interval_s=LOOK_S)):
        await seen.until(lambda: bool(seen.members))
        await asyncio.sleep(LOOK_S * 5)
    assert seen.members == [specs]
    pool.apply(Members(seen.members[0]), 0.0)
    assert [e.address for e in pool.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_a_host_name_stands_for_the_addresses_it_has() -> None:
    seen = Seen()
    async with running(StaticDiscovery(parse_endpoints("LOCALHOST:8000"), seen.apply)):
        await seen.until(lambda: bool(seen.members))
    [specs] = seen.members
    assert EndpointSpec("127.0.0.1", 8000, name="localhost:8000/127.0.0.1") in specs
    assert {s.host for s in specs} <= {"127.0.0.1", "::1"}


class Names:
    """Stands in for the loop's look-up, so that answers can change: no name server can be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[str] | None) -> None:
        self.answers = answers
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self.getaddrinfo)

    def getaddrinfo(self, host: str, port: object, **_: object) -> list[tuple[Any, ...]]:
        self.asked += 1
        answer = self.answers[host]
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (ip, 0)) for ip in answer]


async def test_a_name_is_followed_and_keeps_its_addresses_while_it_cannot_be_looked_up(
    monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    names = Names(monkeypatch, a=["10.0.0.2", "10.0.0.1", "10.0.0.1"], b=["fd00::1"])
    seen = Seen()
    specs = parse_endpoints("a:1,b:2")
    async with running(StaticDiscovery(specs, seen.apply, resolve_interval_s=LOOK_S)):
        await seen.until(lambda: len(seen.members) == 1)
        names.answers["a"] = None
        await heard.until("cannot be looked up")
        names.answers["b"] = ["fd00::2"]
        await seen.until(lambda: len(seen.members) == 2)
        names.answers["a"] = ["10.0.0.3"]
        await seen.until(lambda: len(seen.members) == 3)
    assert seen.addresses == [
        ["10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:2"],
        ["10.0.0.1:1", "10.0.0.2:1", "[fd00::2]:2"],
        ["10.0.0.3:1", "[fd00::2]:2"],
    ]
    assert [m.split(",")[0] for m in heard.messages] == [
        "Host a cannot be looked up",
        "Host a can be looked up again",
    ]


async def test_a_name_unknown_at_the_start_joins_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, a=None)
    seen = Seen()
    specs = parse_endpoints("a:1,10.0.0.9:1")
    async with running(StaticDiscovery(specs, seen.apply, resolve_interval_s=LOOK_S)):
        await seen.until(lambda: len(seen.members) == 1)
        names.answers["a"] = ["10.0.0.1"]
        await seen.until(lambda: len(seen.members) == 2)
    assert seen.addresses == [["10.0.0.9:1"], ["10.0.0.1:1", "10.0.0.9:1"]]


async def test_F09_names_without_an_answer_keep_no_other_name_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: asyncio.Queue[Members] = asyncio.Queue()
    forever = threading.Event()

    def getaddrinfo(host: str, port: object, **_: object) -> list[tuple[Any, ...]]:
        if host != "good":
            forever.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(discovery, "RESOLVE_TIMEOUT_S", 0.5)
    names = [f"dead-{n}:80" for n in range(40)]
    static = StaticDiscovery(parse_endpoints(",".join([*names, "good:80"])), told.put_nowait)
    running = asyncio.create_task(static.run())
    try:
        async with asyncio.timeout(10):
            assert [s.address for s in (await told.get()).specs] == ["10.0.0.1:80"]
    finally:
        forever.set()
        running.cancel()


async def test_two_names_of_one_host_are_one_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, a=["10.0.0.1"], b=["10.0.0.1", "10.0.0.2"])
    seen = Seen()
    async with running(StaticDiscovery(parse_endpoints("a:1,b:1"), seen.apply)):
        await seen.until(lambda: bool(seen.members))
    assert seen.addresses == [["10.0.0.1:1", "10.0.0.2:1"]]


# -- the file ------------------------------------------------------------------------------


def test_a_file_is_yaml_or_json_in_the_reference_s_format() -> None:
    text = b"""\
endpoints:
  - name: a
    address: 10.0.0.1
    port: "8000"
    labels: {llm-d.ai/role: decode}
  - {name: a, namespace: other, address: "fd00::0010", port: 8001}
  - {name: c, address: vllm-0.vllm, port: 65535}
"""
    assert parse_file(text, file=FILE) == (
        EndpointSpec("10.0.0.1", 8000, "a", "default", {"llm-d.ai/role": "decode"}),
        EndpointSpec("fd00::10", 8001, "a", "other", {}),
        EndpointSpec("vllm-0.vllm", 65535, "c", "default", {}),
    )
    assert parse_file(page(1).encode(), file=FILE)[0].address == "10.0.0.1:1"
    assert parse_file(b"endpoints: []", file=FILE) == ()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", "$"),
        ("[]", "$"),
        ("{}", "$"),
        ("endpoints: [", "$"),
        ("endpoints: {}", "$.endpoints"),
        ("endpoints: [1]", "$.endpoints[0]"),
        ("endpoints: [{}]", "$.endpoints[0]"),
        ("{endpoints: [], more: 1}", "$.more"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: 1, pod: x}]", "$.endpoints[0].pod"),
        ("endpoints: [{name: '', address: 10.0.0.1, port: 1}]", "$.endpoints[0].name"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: 0}]", "$.endpoints[0]"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: 65536}]", "$.endpoints[0]"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: ' 1'}]", "$.endpoints[0]"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: true}]", "$.endpoints[0].port"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: 1.0}]", "$.endpoints[0].port"),
        ("endpoints: [{name: a, address: 10.0.0.256, port: 1}]", "$.endpoints[0]"),
        ("endpoints: [{name: a, address: '10.0.0.1:2', port: 1}]", "$.endpoints[0]"),
        ("endpoints: [{name: a, address: h, port: 1, labels: {x: 1}}]", "$.endpoints[0].labels"),
        (page(1, 2).replace("e2", "e1"), "$.endpoints[1].name"),
        (page(1, 2).replace('"port": 2', '"port": 1'), "$.endpoints[1].address"),
        ("endpoints: &a [*a]", "$.endpoints[0]"),
        ("\x00", "$"),
    ],
)
def test_N02_a_bad_file_is_refused_with_its_name_and_the_key(text: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"^endpoints\.yaml.*at `[^`]+`$") as refused:
        parse_file(text.encode(), file=FILE)
    assert refused.value.path == path
    assert str(refused.value).count(" - at `") == 1


def test_a_file_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        parse_file(b"\xff", file=FILE)


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_text(page(1) + " " * FILE_BYTES_MAX)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    expected = {
        tmp_path / "none": "cannot be read: No such file",
        tmp_path: "not a regular file",
        pipe: "not a regular file",
        large: "larger than 1048576 bytes",
    }
    for path, complaint in expected.items():
        with pytest.raises(ConfigError, match=complaint):
            FileDiscovery(path, lambda _: None)


async def test_a_file_is_told_and_without_watching_left_alone(tmp_path: Path) -> None:
    path, seen = tmp_path / "endpoints.json", Seen()
    path.write_text(page(1, 2))
    discovery = FileDiscovery(path, seen.apply, watch_interval_s=LOOK_S, resolve_interval_s=LOOK_S)
    async with running(discovery):
        await seen.until(lambda: bool(seen.members))
        swap(path, page(3))
        await asyncio.sleep(LOOK_S * 10)
    assert seen.addresses == [["10.0.0.1:1", "10.0.0.1:2"]]


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Seen]:
    seen = Seen()
    async with running(FileDiscovery(path, seen.apply, watch=True, watch_interval_s=LOOK_S)):
        await seen.until(lambda: len(seen.members) == 1)
        yield seen


async def test_a_watched_file_is_followed_in_all_ways_it_can_change(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    path.write_text(page(1))
    async with watching(path) as seen:
        swap(path, page(2))
        await seen.until(lambda: len(seen.members) == 2)
        path.write_text(page(3))
        await seen.until(lambda: len(seen.members) == 3)
        path.unlink()
        path.write_text(page())
        await seen.until(lambda: len(seen.members) == 4)
    assert seen.addresses == [["10.0.0.1:1"], ["10.0.0.1:2"], ["10.0.0.1:3"], []]


async def test_the_link_swap_of_a_config_map_is_seen(tmp_path: Path) -> None:
    """As the kubelet does it: `..data` -> a dated folder, swapped by renaming a new link over it.
    The files have the same size and time, so that only the inode tells them apart."""

    def publish(folder: str, text: str) -> None:
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "endpoints.json"
        file.write_text(text)
        os.utime(file, (1e9, 1e9))
        (tmp_path / "..data_tmp").symlink_to(folder)
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")

    publish("..2026_01", page(1))
    path = tmp_path / "endpoints.json"
    path.symlink_to(Path("..data") / "endpoints.json")
    async with watching(path) as seen:
        publish("..2026_02", page(2))
        (tmp_path / "..2026_01" / "endpoints.json").unlink()
        await seen.until(lambda: len(seen.members) == 2)
    assert seen.addresses == [["10.0.0.1:1"], ["10.0.0.1:2"]]


async def test_a_bad_new_file_keeps_the_endpoints_and_is_complained_about_once(
    tmp_path: Path, heard: Heard
) -> None:
    path = tmp_path / "endpoints.json"
    path.write_text(page(1))
    async with watching(path) as seen:
        swap(path, page(1, 1))
        await heard.until("'default/e1' comes twice")
        swap(path, page(1, 1))  # the same content anew
        await asyncio.sleep(LOOK_S * 10)
        swap(path, "endpoints: 7")
        await heard.until("expected a list")
        path.unlink()
        await heard.until("cannot be read")
        assert len(seen.members) == 1
        path.write_text(page(2))
        await seen.until(lambda: len(seen.members) == 2)
    assert seen.addresses == [["10.0.0.1:1"], ["10.0.0.1:2"]]
    *complaints, recovery = heard.messages
    assert len(complaints) == 3
    assert all(m.startswith("Keeping the endpoints as they were: ") for m in complaints)
    assert recovery == f"Endpoints read from {path}: 1"


async def test_a_file_being_written_in_place_is_not_read_half_written(tmp_path: Path) -> None:
    path, seen = tmp_path / "endpoints.yaml", Seen()
    lines = [f"  - {{name: e{p}, address: 10.0.0.1, port: {p}}}\n" for p in range(1, 30)]
    path.write_text("endpoints:\n" + "".join(lines))
    async with running(FileDiscovery(path, seen.apply, watch=True, watch_interval_s=0.1)):
        await seen.until(lambda: len(seen.members) == 1)
        with path.open("w") as file:
            file.write("endpoints:\n")
            for line in lines[:-1]:
                file.write(line)
                file.flush()
                await asyncio.sleep(0.01)
        await seen.until(lambda: len(seen.members) == 2)
    assert [len(specs) for specs in seen.members] == [29, 28]


async def test_names_in_a_file_are_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch, a=["10.0.0.1"])
    path, seen = tmp_path / "endpoints.yaml", Seen()
    path.write_text("endpoints: [{name: n, address: a, port: 1, labels: {x: y}}]")
    async with running(FileDiscovery(path, seen.apply, resolve_interval_s=LOOK_S)):
        await seen.until(lambda: len(seen.members) == 1)
        names.answers["a"] = ["10.0.0.2"]
        await seen.until(lambda: len(seen.members) == 2)
    assert seen.members[1] == (EndpointSpec("10.0.0.2", 1, "n/10.0.0.2", "default", {"x": "y"}),)
