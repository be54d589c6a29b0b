"""Sends a plan, each request at its time, and says what became of each. On asyncio and aiohttp.

Open loop: a request is sent when its time has come, whatever became of the others. Only when
`IN_FLIGHT_MAX` are under way does it wait; how late requests were sent is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from itertools import count
from random import Random
from typing import Self

import aiohttp
import msgspec

from bench.demo.workload import Kind, Plan, Planned
from bench.engine.tokens import WORDS

IN_FLIGHT_MAX = 256
REQUEST_S_MAX = 60.0
ERROR_CHARACTERS_MAX = 200
BYPASS_PROMPT_WORDS = 3600
"""About 5000 tokens."""
BYPASS_OUTPUT_TOKENS = 4


class Fate(StrEnum):
    """How a request ended."""

    OK = "ok"
    CUT = "cut"
    """Its answer had begun and broke off."""
    ERROR = "error"
    """Anything else."""


class Outcome(msgspec.Struct):
    """What became of one request. Times in seconds from the start of the run."""

    id: str
    kind: Kind
    phase: int
    late_s: float
    """How much later than planned it was sent."""
    sent_s: float
    fate: Fate = Fate.ERROR
    error: str = ""
    engine: str = ""
    """Who answered, as `x-sim-engine` says; empty when nobody did or the header is not there."""
    first_s: float | None = None
    """First byte of the event stream."""
    end_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """`None`: the answer does not say."""

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first byte of the event stream."""
        return None if self.first_s is None else self.first_s - self.sent_s


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


class Client:
    """Sends to one URL. Use as an async context.

    Args:
        start_s: monotonic time that counts as 0.
    """

    def __init__(self, url: str, model: str, *, start_s: float) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._start_s = start_s
        self.in_flight = 0

    async def __aenter__(self) -> Self:
        self._session = new_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def now_s(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self._start_s

    async def send(self, planned: Planned) -> Outcome:
        """Send one request and read its answer. Never raises but when cancelled."""
        body = planned.body(self._model)
        now_s = self.now_s()
        outcome = Outcome(planned.id, planned.kind, planned.phase, now_s - planned.at_s, now_s)
        headers = {"content-type": "application/json", "x-request-id": planned.id}
        self.in_flight += 1
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                await self._read(response, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            begun = outcome.fate is Fate.CUT
            outcome.error = f"{'answer broke off' if begun else 'no answer'}: {describe(error)}"
        finally:
            self.in_flight -= 1
            outcome.end_s = self.now_s()
        return outcome

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        outcome.engine = response.headers.get("x-sim-engine", "")
        if response.status != 200:
            text = (await response.read()).decode(errors="replace")[:ERROR_CHARACTERS_MAX]
            outcome.error = f"status {response.status}: {text}"
            return
        outcome.fate = Fate.CUT
        parts = []
        async for part in response.content.iter_any():
            if outcome.first_s is None:
                outcome.first_s = self.now_s()
            parts.append(part)
        read_stream(b"".join(parts), outcome)


def read_stream(body: bytes, outcome: Outcome) -> None:
    """Judge a whole event stream and read the usage at its end."""
    lines = body.rstrip().splitlines()
    if not lines or lines[-1].strip() != b"data: [DONE]":
        outcome.error = "the stream ended without [DONE]"
        return
    outcome.fate = Fate.OK
    for line in reversed(lines):
        if b'"usage"' not in line or not line.startswith(b"data: "):
            continue
        try:
            usage = msgspec.json.decode(line[6:], type=_Chunk).usage
        except msgspec.DecodeError:
            continue
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens
            details = usage.prompt_tokens_details
            outcome.cached_tokens = None if details is None else details.cached_tokens
            return


def new_session() -> aiohttp.ClientSession:
    """A session without limits of its own and without the environment's proxies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX),
        trust_env=False,
    )


def describe(error: BaseException) -> str:
    """An exception on one short line."""
    return f"{type(error).__name__} {error}".strip()[:ERROR_CHARACTERS_MAX]


async def play(plan: Plan, client: Client, ended: Callable[[Outcome], None]) -> None:
    """Send the whole plan; returns when the last answer has ended."""
    slots = asyncio.Semaphore(IN_FLIGHT_MAX)

    async def one(planned: Planned) -> None:
        try:
            ended(await client.send(planned))
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for planned in plan.requests:
            await asyncio.sleep(max(0.0, planned.at_s - client.now_s()))
            await slots.acquire()
            group.create_task(one(planned))


async def bypass(address: str, model: str, *, workers: int, seed: int) -> None:
    """Keep an engine busy past Envoy: `workers` requests at any time, until cancelled.

    Each has a long prompt of its own and a short answer: prefill work and a queue, few bytes.
    """
    numbers = count(1)
    async with new_session() as session, asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_bypass_worker(session, address, model, numbers, seed))


async def _bypass_worker(
    session: aiohttp.ClientSession, address: str, model: str, numbers: Iterable[int], seed: int
) -> None:
    for number in numbers:
        rng = Random(f"{seed} {number}")
        body = {
            "model": model,
            "messages": [
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=BYPASS_PROMPT_WORDS))}
            ],
            "max_tokens": BYPASS_OUTPUT_TOKENS,
        }
        try:
            url = f"http://{address}/v1/chat/completions"
            async with session.post(url, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(0.1)
