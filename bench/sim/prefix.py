"""What routers know of the engines' prefix caches, from best to worst."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from bench.sim.agenda import Agenda
from bench.sim.endpoints import Endpoint
from bench.sim.model import SimRequest


class Prefixes(Protocol):
    """A source of prefix information."""

    def matched_blocks(self, request: SimRequest, endpoint: int, blocks_max: int) -> int:
        """Leading blocks of the request at the endpoint, at most `blocks_max`."""

    def sent(self, request: SimRequest, endpoint: int) -> None:
        """The router dispatched it there."""

    def forget(self, endpoint: int) -> None:
        """The endpoint lost its cache."""


class CachePrefixes:
    """The engines' caches themselves."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints

    def matched_blocks(self, request: SimRequest, endpoint: int, blocks_max: int) -> int:
        """See Prefixes."""
        return self._endpoints[endpoint].engine.kv.match(request.blocks, blocks_max)

    def sent(self, request: SimRequest, endpoint: int) -> None:
        """Changes nothing: the engine's cache says it all."""

    def forget(self, endpoint: int) -> None:
        """Changes nothing, likewise."""


class ToldPrefixes:
    """The caches as their events, late or lost, told of them."""

    def __init__(self, endpoints: Sequence[Endpoint], agenda: Agenda) -> None:
        self._endpoints = endpoints
        self._agenda = agenda

    def matched_blocks(self, request: SimRequest, endpoint: int, blocks_max: int) -> int:
        """See Prefixes."""
        told = self._endpoints[endpoint].told
        assert told is not None, "events are recorded when they are late or lossy"
        told.catch_up(self._agenda.now_s)
        return _matched(request, told.names, blocks_max)

    def sent(self, request: SimRequest, endpoint: int) -> None:
        """Changes nothing: the engine will tell."""

    def forget(self, endpoint: int) -> None:
        """Changes nothing: the events were cleared with their engine."""


class SentPrefixes:
    """What one router sent to each endpoint, least recently sent forgotten first, as many blocks
    as the engine's cache has. As in an engine, the end of a prefix goes before its beginning."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._sent: dict[int, OrderedDict[int, None]] = {}

    def matched_blocks(self, request: SimRequest, endpoint: int, blocks_max: int) -> int:
        """See Prefixes."""
        names = self._sent.get(endpoint)
        return _matched(request, names, blocks_max) if names else 0

    def sent(self, request: SimRequest, endpoint: int) -> None:
        """See Prefixes."""
        names = self._sent.setdefault(endpoint, OrderedDict())
        for name in reversed(request.blocks):
            names[name] = None
            names.move_to_end(name)
        blocks_max = self._endpoints[endpoint].limits.kv_blocks
        while len(names) > blocks_max:
            names.popitem(last=False)

    def forget(self, endpoint: int) -> None:
        """See Prefixes."""
        self._sent.pop(endpoint, None)


def _matched(request: SimRequest, names: set[int] | OrderedDict[int, None], most: int) -> int:
    matched = 0
    for name in islice(request.blocks, most):
        if name not in names:
            break
        matched += 1
    return matched
