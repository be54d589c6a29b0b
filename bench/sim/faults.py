"""What goes wrong, or merely changes, in a fleet during a run; when and where is fixed beforehand.

Endpoints keep their numbers: a restarted one comes back under its own, one that joins gets the
next. A change that makes no sense (an endpoint that is away or does not exist) is an error before
the run starts, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bench.sim.hardware import EngineKind


class Restart(msgspec.Struct, frozen=True):
    """The engine dies: what it worked on is lost and sent again, its cache is empty afterwards."""

    at_s: float
    endpoint: int
    down_s: float
    """Seconds until it takes requests again, > 0."""


class Slow(msgspec.Struct, frozen=True):
    """The engine works at another speed for a while, from its next step on."""

    at_s: float
    endpoint: int
    speed: float
    """Factor on its own speed, > 0; 0.5: everything takes twice as long."""
    until_s: float


class Join(msgspec.Struct, frozen=True):
    """A new, cold endpoint takes requests. Numbers are given in order of `at_s`."""

    at_s: float
    kind: EngineKind


class Leave(msgspec.Struct, frozen=True):
    """The endpoint gets no new requests; those it has run to their ends."""

    at_s: float
    endpoint: int


Fault = Restart | Slow | Join | Leave


def order_faults(faults: Sequence[Fault], endpoints: int) -> list[Fault]:
    """The faults in order of time, checked.

    Args:
        endpoints: how many there are at the start.
    Raises: ValueError, naming the fault that cannot happen.
    """
    ordered = sorted(faults, key=lambda fault: fault.at_s)
    away_until_s = [-1.0] * endpoints
    slow_until_s = [-1.0] * endpoints
    for fault in ordered:
        _check_values(fault)
        if isinstance(fault, Join):
            away_until_s.append(-1.0)
            slow_until_s.append(-1.0)
            continue
        if not 0 <= fault.endpoint < len(away_until_s):
            raise ValueError(f"{fault}: there is no such endpoint at that time")
        if fault.at_s <= away_until_s[fault.endpoint]:
            raise ValueError(f"{fault}: the endpoint is away at that time")
        if isinstance(fault, Restart):
            away_until_s[fault.endpoint] = fault.at_s + fault.down_s
        elif isinstance(fault, Leave):
            away_until_s[fault.endpoint] = math.inf
        elif fault.at_s <= slow_until_s[fault.endpoint]:
            raise ValueError(f"{fault}: the endpoint is slow already at that time")
        else:
            slow_until_s[fault.endpoint] = fault.until_s
    return ordered


def _check_values(fault: Fault) -> None:
    if not 0 <= fault.at_s < math.inf:
        raise ValueError(f"{fault}: at_s must be a time from 0 on")
    if isinstance(fault, Restart) and not 0 < fault.down_s < math.inf:
        raise ValueError(f"{fault}: down_s must be above 0")
    if isinstance(fault, Slow) and not (fault.speed > 0 and fault.until_s > fault.at_s):
        raise ValueError(f"{fault}: speed must be above 0 and until_s after at_s")
