"""Switches that make an engine misbehave, set by `--fault` and at run time by `POST /sim/fault`.

A body replaces all switches: `{}` ends every fault.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec

from bench.engine.bodies import ApiError


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is wrong at the moment."""

    hang: bool = False
    """The engine stops stepping: requests are taken and not answered, streams stall, gauges keep
    their values, `/health` stays 200."""
    error_500: bool = False
    """Every generating request is answered 500 at once."""
    drop: bool = False
    """The connection of every generating request is closed without an answer."""
    drop_after_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Streams are cut off, without an end, after so many tokens; `None`: never."""
    unhealthy: bool = False
    """`/health` is 503, as when the engine process has died."""
    metrics: Literal["ok", "refuse", "error", "html", "nan"] = "ok"
    """`/metrics`: closes the connection, answers 500, answers 200 with HTML, or with NaN values."""
    metrics_delay_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """`/metrics` answers this much later."""
    kv_events_pause: bool = False
    """KV events are neither published nor replayed; what happens meanwhile follows afterwards."""
    kv_events_drop_every: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Every n-th batch is not sent; a replay has it."""
    kv_events_repeat_every: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Every n-th batch is sent twice."""
    kv_events_copies: bool = False
    """Blocks are told as if a second copy of each were stored, too, and evicted before the next
    batch, as when vLLM computes what it has already."""
    kv_events_arrays: bool = False
    """Events in the dialect of vLLM up to 0.23: as arrays, without session ids, and a replay
    without topics."""
    kv_events_no_session: bool = False
    """Events without session ids, as up to vLLM 0.29."""


def parse_faults(body: bytes) -> Faults:
    """Raises: ApiError 400, naming the key."""
    try:
        return msgspec.json.decode(body, type=Faults)
    except msgspec.DecodeError as error:
        known = ", ".join(Faults.__struct_fields__)
        raise ApiError(400, f"{error}; the switches are {known}", "Bad Request", "body") from error


class FaultSwitch:
    """Holds the faults of a running engine."""

    def __init__(self, faults: Faults) -> None:
        self.now = faults
        self._changed = asyncio.Event()

    def set(self, faults: Faults) -> None:
        """Replace all switches."""
        self.now = faults
        self._changed.set()
        self._changed = asyncio.Event()

    async def while_hanging(self) -> bool:
        """Return when the engine does not hang (any more): whether it did."""
        hung = self.now.hang
        while self.now.hang:
            await self._changed.wait()
        return hung
