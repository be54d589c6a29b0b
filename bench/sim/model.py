"""The nouns of the simulator: a request of a workload, a policy, what became of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from bench.sim.oracle import TrueState


class SimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a workload plans it."""

    number: int
    """Place in the workload, from 0, in order of arrival."""
    arrival_s: float
    """Seconds since the start, >= 0."""
    prompt_tokens: int
    """>= 1."""
    output_tokens: int
    """>= 1; the policy does not know it."""
    blocks: tuple[int, ...] = ()
    """Names of the prompt's full prefix blocks; equal names mean equal prefixes. At most
    `prompt_tokens // block_tokens` of the workload."""
    session: int | None = None
    """Which conversation it belongs to, where the workload knows."""
    model: str = "model"


class Workload(msgspec.Struct, frozen=True):
    """Requests in order of arrival, and the size of their blocks."""

    name: str
    requests: tuple[SimRequest, ...]
    block_tokens: int = 512


class Scrape(msgspec.Struct, frozen=True):
    """What a scrape of one engine said, seen by policies that work on scrapes."""

    at_s: float
    waiting: int
    running: int
    kv_usage_ratio: float
    prefill_s_sum: float = 0.0
    """Seconds from admission to first token of all requests that ended since the engine started."""
    prefill_tokens_sum: int = 0
    """Prompt tokens computed, not found in the cache, of the same requests."""
    prefills: int = 0
    """Their number."""


class View(Protocol):
    """What a policy may look at when it chooses. Endpoints are numbered from 0; the number of an
    endpoint never changes during a run."""

    @property
    def endpoints(self) -> Sequence[int]:
        """The endpoints alive now, ascending."""

    def matched_tokens(self, request: SimRequest, endpoint: int) -> int:
        """Leading prompt tokens the endpoint holds, as far as the policy's source of prefix
        information knows: exact (the engine's cache now, or as its events told it), or
        approximate (from what was dispatched there)."""

    def scrape(self, endpoint: int) -> Scrape | None:
        """The newest scrape; `None` before the first."""

    def kv_tokens(self, endpoint: int) -> int:
        """KV capacity in tokens, as the engine reports it."""


class TrueView(View, Protocol):
    """What only the greedy oracle may look at, and who explains a regret: the true state of the
    engines."""

    def expected_ttft_s(self, request: SimRequest, endpoint: int, now_s: float) -> float:
        """Seconds to the first token if the request went there now and nothing else came."""

    def true_state(self, request: SimRequest, endpoint: int, now_s: float) -> TrueState:
        """What the request would meet there."""


class Policy(Protocol):
    """A routing policy with its own accounting. Calls come in order of time; all calls about one
    request come in the order `choose`, `first_byte`, `ended`."""

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:
        """The endpoint to send the request to now, charged to it in the policy's own account;
        `None` = keep it, and ask again at the next event (see `Held`)."""

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        """The router saw the first byte of the answer. Not called where the run hides it."""

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """The answer ended (`ok`), or the request failed with its endpoint."""

    def left(self, endpoint: int) -> None:
        """The endpoint is gone or was restarted: forget what it held."""


class Outcome(msgspec.Struct):
    """What became of one request; times in seconds since the start of the run."""

    request: SimRequest
    endpoint: int = -1
    """-1 until it is dispatched."""
    dispatched_s: float = -1.0
    """When the router let it go, after any hold."""
    first_s: float = -1.0
    """When its first token existed."""
    ended_s: float = -1.0
    cached_tokens: int = 0
    """Prompt tokens its engine found in its cache at admission."""
    preemptions: int = 0
    retries: int = 0
    """Times it was sent again after its endpoint failed."""
    refused: bool = False
    """No endpoint took it; it has no times."""

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_s - self.request.arrival_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the last token."""
        return self.ended_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; `None` with one token only."""
        tokens = self.request.output_tokens - 1
        return (self.ended_s - self.first_s) / tokens if tokens > 0 else None
