"""An API server that says what its script says, byte for byte, and a reflector that runs against
it: for what no faithful server would send, and for what one sends once in a year."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from epp.edge.kubernetes.access import Access
from epp.edge.kubernetes.client import ApiClient
from epp.edge.kubernetes.objects import PODS, Resource
from epp.edge.kubernetes.reflector import Changes, Pace, Reflector

UNTIL_S = 30.0
QUICK = Pace(
    gone_s=0.0,
    watch_s=(300.0, 300.0),
    backoff_s=(0.01, 0.05),
    absent_s=0.05,
    short_s=0.0,
    idle_s=60.0,
)
"""Waits that a test can afford, and patience that a slow machine needs."""


async def until(wanted: Callable[[], object]) -> None:
    """Returns when it is so; fails when it is not in time."""
    async with asyncio.timeout(UNTIL_S):
        while not wanted():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.002)


class Request:
    """What was asked."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        self.method, target, _ = first.split(" ")
        self.path = urlsplit(target).path
        self.query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        self.body = body
        self.at_s = time.monotonic()

    @property
    def kind(self) -> str:
        """`watch`, `list`, or `other`: discovery and single objects."""
        if "watch" in self.query:
            return "watch"
        return "list" if self.path.count("/") >= 5 and "limit" in self.query else "other"


Step = Callable[[asyncio.StreamWriter, Request], Awaitable[None]]
"""Answers one request. Raises ConnectionError when the connection is over."""


def reply(body: Any = None, status: int = 200, **headers: str) -> Step:
    """One answer; `body` is JSON unless it is bytes already."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    head = f"HTTP/1.1 {status} Reason\r\nContent-Length: {len(data)}\r\n{named}\r\n"

    async def step(writer: asyncio.StreamWriter, _: Request) -> None:
        writer.write(head.encode() + data)

    return step


def listed(*objects: Any, version: str = "1", more: str = "") -> Step:
    metadata = {"resourceVersion": version} if version else {}
    if more:
        metadata["continue"] = more
    return reply({"kind": "List", "metadata": metadata, "items": list(objects)})


def streamed(*pieces: bytes, end: str = "stay") -> Step:
    """A watch that sends each piece as a chunk; then it stays open, is closed or reset."""

    async def step(writer: asyncio.StreamWriter, _: Request) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if end == "close":
            writer.write(b"0\r\n\r\n")
            return
        if end == "stay":
            await asyncio.get_running_loop().create_future()
        writer.transport.abort()
        raise ConnectionResetError

    return step


async def mute(_writer: asyncio.StreamWriter, _request: Request) -> None:
    """Never answers."""
    await asyncio.get_running_loop().create_future()


def event(type_: str, obj: Any) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": type_, "object": obj}).encode() + b"\n"


def status(code: int, reason: str = "", **more: Any) -> dict[str, Any]:
    """A `Status` as the API server makes it: its metadata is empty."""
    said = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**said, "code": code, "reason": reason, "message": f"says {code}", **more}


def bare_pod(name: str, version: str = "1", *, uid: str = "", ip: str = "10.0.0.1") -> Any:
    """As little of a pod as there can be."""
    about = {"name": name, "namespace": "ns", "uid": uid or f"uid-{name}"}
    about["resourceVersion"] = version
    return {"metadata": about, "status": {"podIP": ip}}


class ScriptedApi:
    """One HTTP server on a free port. Each kind of request takes its next step; the last one
    answers all that come after it."""

    def __init__(
        self,
        *,
        lists: list[Step] | None = None,
        watches: list[Step] | None = None,
        others: list[Step] | None = None,
    ) -> None:
        absent = reply(status(404, "NotFound"), 404)
        self.steps = {
            "list": lists or [listed()],
            "watch": watches or [streamed()],
            "other": others or [absent],
        }
        self.seen: list[Request] = []
        self.url = ""

    def asked(self, kind: str) -> list[Request]:
        return [request for request in self.seen if request.kind == kind]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = Request(head, b"")
                request.body = await reader.readexactly(
                    int(request.headers.get("content-length", 0))
                )
                self.seen.append(request)
                steps = self.steps[request.kind]
                await (steps.pop(0) if len(steps) > 1 else steps[0])(writer, request)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(api: ScriptedApi) -> AsyncIterator[ScriptedApi]:
    """Runs it."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(api.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**20)
    api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Heard:
    """What a reflector told: the changes one by one, and the set that follows from them."""

    def __init__(self) -> None:
        self.changes: list[Changes[Any]] = []
        self.names: dict[str, str] = {}
        """Of everything that is there by what was told -> its uid."""

    def __call__(self, changes: Changes[Any]) -> None:
        self.changes.append(changes)
        for each in changes.deleted:
            assert self.names.pop(each.metadata.name) == each.metadata.uid
        for each in changes.upserted:
            assert self.names.get(each.metadata.name, each.metadata.uid) == each.metadata.uid
            self.names[each.metadata.name] = each.metadata.uid

    @property
    def story(self) -> list[str]:
        """`+name` and `-name`, in order."""
        return [
            sign + each.metadata.name
            for changes in self.changes
            for sign, objects in (("-", changes.deleted), ("+", changes.upserted))
            for each in objects
        ]


@asynccontextmanager
async def reflecting(
    access: Access | str,
    resource: Resource[Any] = PODS,
    *,
    on_change: Callable[[Changes[Any]], None] = lambda _: None,
    pace: Pace = QUICK,
    namespace: str = "ns",
    selectors: Mapping[str, str] | None = None,
    seed: int = 7,
) -> AsyncIterator[Reflector[Any]]:
    """A reflector that runs while the body does, and must not end before."""
    if isinstance(access, str):
        access = Access(server=access, namespace=namespace)
    async with ApiClient(access, user_agent="test") as client:
        reflector = Reflector(
            client,
            resource,
            namespace=namespace,
            on_change=on_change,
            rng=Random(seed),
            pace=pace,
            **(selectors or {}),
        )
        running = asyncio.create_task(reflector.run())
        try:
            yield reflector
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.wait([running])
