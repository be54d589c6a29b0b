"""What can go wrong on the way, on demand: rules that bend the next requests, or open watches.

    api.faults.add(Answer(503, retry_after_s=1), verb="list", plural="pods", count=3)
    api.faults.add(Inject(garbage()), verb="watch", count=1)
    api.faults.strike(Cut(after_bytes=20))      # the watches that are open now

Of each class of fault, the first rule that fits a request bends it; faults of different classes
act together (Slow and Inject, say).
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web

from tests.kubernetes.answers import status
from tests.kubernetes.calls import Call
from tests.kubernetes.resources import Object


@dataclass(frozen=True, slots=True)
class Answer:
    """Refuse with this status code and do nothing."""

    code: int
    reason: str = "InternalError"
    message: str = "injected"
    retry_after_s: int | None = None
    body: bytes | None = None
    """Instead of a Status object: what a proxy in between would say."""
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Delay:
    """Answer late. The end of the rule (`remove`, `clear`) ends the wait too."""

    seconds: float = math.inf
    after: bool = False
    """Do what was asked at once and hold only the answer back."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Break the connection off after that many bytes of the body (0: before any answer).

    What was asked is done all the same: the client cannot know.
    """

    after_bytes: int = 0
    reset: bool = True
    """With a TCP reset; otherwise closed, but without the end that HTTP asks for."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Send the body in pieces: they may end anywhere, also within a UTF-8 character."""

    chunk_bytes: int = 1
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Silence:
    """A watch that says no more after that many events, and stays open (a half-open connection)."""

    after_events: int = 0


@dataclass(frozen=True, slots=True)
class Inject:
    """A line in a watch that the server would not have sent, after that many events."""

    line: bytes
    after_events: int = 0
    end: bool = False
    """End the stream (cleanly) after it."""


Fault = Answer | Delay | Cut | Slow | Silence | Inject


def error_event(code: int, reason: str = "", message: str = "injected") -> bytes:
    """The line of an ERROR event with a Status: 410 Expired, 429 TooManyRequests, 500 and so on."""
    names = {410: "Expired", 429: "TooManyRequests", 500: "InternalError", 504: "Timeout"}
    body = status(code, reason or names.get(code, "Unknown"), message)
    return json.dumps({"type": "ERROR", "object": body}).encode() + b"\n"


def event(type_: str, obj: Object) -> bytes:
    """The line of any event, of a type that exists or not."""
    return json.dumps({"type": type_, "object": obj}).encode() + b"\n"


def garbage() -> bytes:
    """A line that is neither JSON nor UTF-8."""
    return b'{"type":"MODIFIED","object":\xff\xfe<html>\n'


@dataclass(eq=False)
class Rule:
    """A fault and what it is for; `None` = any."""

    fault: Fault
    verb: str | None = None
    """get, list, watch, create, update, patch, delete, deletecollection; discover for the rest."""
    plural: str | None = None
    name: str | None = None
    group: str | None = None
    """The API group, where two of them have the plural."""
    count: int | None = None
    """Requests that it bends before it is over; None: until removed."""
    hits: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, call: Call) -> bool:
        wanted = (
            (self.verb, call.verb),
            (self.plural, call.plural),
            (self.name, call.name),
            (self.group, call.group),
        )
        return self.count != 0 and all(rule in (None, found) for rule, found in wanted)


class Faults:
    """The rules in force. `strike` is for what is open already."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.streams: set[Callable[[Fault, str | None], None]] = set()
        """How each open watch is told of a strike."""

    def add(
        self,
        fault: Fault,
        *,
        verb: str | None = None,
        plural: str | None = None,
        name: str | None = None,
        group: str | None = None,
        count: int | None = None,
    ) -> Rule:
        """Bend the next requests that fit; see `Rule`."""
        rule = Rule(fault, verb, plural, name, group, count)
        self.rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """Lift one rule; who is held up by it goes on."""
        rule.count = 0
        rule.over.set()
        if rule in self.rules:
            self.rules.remove(rule)

    def clear(self) -> None:
        """Lift all rules."""
        for rule in list(self.rules):
            self.remove(rule)

    def strike(self, fault: Fault, plural: str | None = None) -> None:
        """Do it to the open watches (of one plural). Counts of bytes and events begin here."""
        for tell in list(self.streams):
            tell(fault, plural)

    def take(self, call: Call) -> Bends:
        """The faults that bend this request; their counts go down."""
        found: dict[type[Fault], Rule] = {}
        for rule in self.rules:
            if type(rule.fault) not in found and rule.fits(call):
                found[type(rule.fault)] = rule
        for rule in found.values():
            rule.hits += 1
            if rule.count is not None:
                rule.count -= 1
        return Bends(list(found.values()))


class Bends:
    """The faults of one request."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules

    def all(self) -> Iterator[Fault]:
        return (rule.fault for rule in self.rules)

    def answer(self) -> Answer | None:
        return next((each for each in self.all() if isinstance(each, Answer)), None)

    async def wait(self, *, after: bool) -> None:
        """Hold the request up, before or after it was done."""
        for rule in self.rules:
            fault = rule.fault
            if isinstance(fault, Delay) and fault.after is after:
                limit = None if math.isinf(fault.seconds) else fault.seconds
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        await rule.over.wait()


class CutError(Exception):
    """A fault has broken the connection off."""


class Outlet:
    """The body of one response on its way out."""

    def __init__(self, request: web.Request, bends: Bends) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._left: int | None = None
        self._cut: Cut | None = None
        self._slow: Slow | None = None
        for fault in bends.all():
            self.bend(fault)
        self.plain = self._cut is None and self._slow is None

    def bend(self, fault: Fault) -> None:
        """From here on; a cut after 0 bytes happens at once when the answer has begun."""
        if isinstance(fault, Slow):
            self._slow = fault
        elif isinstance(fault, Cut):
            self._cut, self._left = fault, fault.after_bytes
            if self._left == 0 and self._response is not None:
                self._break_off(fault)

    async def begin(self, response: web.StreamResponse) -> None:
        """Send the headers. Raises: CutError when it is cut before them."""
        if self._cut is not None and self._left == 0:
            raise self._break_off(self._cut)
        await response.prepare(self._request)
        self._response = response

    async def send(self, data: bytes) -> None:
        """Send some of the body. Raises: CutError when it is cut here, or was before."""
        if self._cut is None or self._left is None:
            return await self._write(data)
        if self._left == 0:
            raise CutError
        head = data[: self._left]
        self._left -= len(head)
        await self._write(head)
        if self._left == 0:
            raise self._break_off(self._cut)
        return None

    async def end(self) -> None:
        if self._response is not None:
            await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        assert self._response is not None
        if self._slow is None:
            await self._response.write(data)
            return
        for at in range(0, len(data), self._slow.chunk_bytes):
            await self._response.write(data[at : at + self._slow.chunk_bytes])
            await asyncio.sleep(self._slow.pause_s)

    def _break_off(self, cut: Cut) -> CutError:
        transport = self._request.transport
        if transport is not None:
            break_off(transport, reset=cut.reset)
        return CutError()


def break_off(transport: asyncio.Transport, *, reset: bool) -> None:
    """Close a connection in the middle of whatever it was doing."""
    if transport.is_closing():
        return
    if not reset:
        transport.close()
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
