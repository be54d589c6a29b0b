"""An endpoint and its load: the nouns of `model` that each decision loops over, in a module that
may be compiled (see `structs`). Import them from `model`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from epp.core.kvuse import KvUse
from epp.core.latency.backlog import Backlog
from epp.core.structs import Frozen

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
NO_ATTRIBUTES: Final[Mapping[str, float]] = MappingProxyType({})


class Lora(Frozen, frozen=True):
    """LoRA adapters of one endpoint, as its newest `lora_requests_info` series says."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    max_adapters: int | None = None
    """Adapters that fit at once; `None` when not reported."""


class Load(Frozen, frozen=True):
    """What one scrape of an endpoint's `/metrics` said. A field that is `None` was not reported; it
    is never read as 0."""

    at_s: float | None = None
    """Monotonic time of the scrape; `None` only in `UNKNOWN`."""
    waiting: int | None = None
    """Requests queued in the engine, summed over its data-parallel ranks."""
    running: int | None = None
    """Requests in the engine's running batch, summed over its ranks."""
    kv_usage_ratio: float | None = None
    """Part of the KV cache held by running requests, 0..1, the fullest rank."""
    kv_block_tokens: int | None = None
    """Tokens per KV block, >= 1."""
    kv_blocks: int | None = None
    """KV blocks of the whole engine, >= 1, summed over its ranks."""
    lora: Lora | None = None
    """`None` when the engine reports no LoRA family."""
    attributes: Mapping[str, float] = NO_ATTRIBUTES
    """Custom metrics by attribute key (`engineConfigs[].customMetrics`)."""
    prefill_s_sum: float | None = None
    """Seconds from admission to first token of all requests that ended since the engine started,
    summed over its ranks. Falls when it starts again, as the next two do."""
    prefill_tokens_sum: float | None = None
    """Prompt tokens computed, not found in a cache, of the same requests."""
    prefills: int | None = None
    """Their number."""


UNKNOWN = Load()
"""The load of an endpoint that never reported or whose last report is stale."""


class EndpointSpec(Frozen, frozen=True):
    """An endpoint as discovery found it: enough to route to it and to scrape it.

    Two specs with equal `address` and different `uid` are different endpoints (a pod was replaced
    and got the old address): what was learned of the first is forgotten."""

    host: str
    """IPv4, bare IPv6 (no brackets) or host name."""
    port: int
    """1..65535."""
    name: str = ""
    """What people call it; the address when empty."""
    namespace: str = ""
    labels: Mapping[str, str] = NO_LABELS
    uid: str = ""

    @property
    def address(self) -> str:
        """`host:port` as gateways want it; IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Endpoint:
    """One ip:port that serves, with what we know of it now. Identity is the object; equality is
    identity.

    `slot` numbers the endpoint among those alive, from 0, so that a set of endpoints is an int
    bitmask; a slot is used again only after everything learned under it was forgotten."""

    __slots__ = (
        "address",
        "backlog",
        "cold_pick_number",
        "context_tokens",
        "ejected_until_s",
        "failures",
        "foreign_requests",
        "foreign_waiting",
        "inflight_requests",
        "inflight_tokens",
        "kv",
        "labels",
        "last_answer_s",
        "last_load",
        "last_pick_number",
        "load",
        "name",
        "namespace",
        "on_probation",
        "proven",
        "scrape_failures",
        "slot",
        "spec",
        "unreachable",
        "waiting_requests",
    )

    def __init__(self, spec: EndpointSpec, slot: int = 0) -> None:
        self.slot = slot
        self.take_over(spec)
        self.load: Load = UNKNOWN
        """The newest report, or `UNKNOWN` when there is none or it is stale. What scorers read."""
        self.last_load: Load = UNKNOWN
        """The newest report, however old. For people and for capacities, not for scoring."""
        self.inflight_requests = 0
        """Requests we sent here and have not seen end."""
        self.waiting_requests = 0
        """Of these, the ones without a first response byte."""
        self.inflight_tokens = 0
        """Uncached prompt tokens of the requests without a first response byte (plus estimated
        output, if configured)."""
        self.context_tokens = 0
        """Prompt tokens of all requests in flight here, cached or not: what a decode step reads."""
        self.backlog = Backlog()
        """The requests without a first response byte, and their work in seconds."""
        self.kv = KvUse()
        """What the requests in flight hold of its KV cache."""
        self.foreign_requests = 0
        """Requests in the engine, at its newest scrape, that are not ours."""
        self.foreign_waiting = 0
        """Of these, the ones that wait for a first token."""
        self.proven = False
        """A request got its first byte from this engine process; until then it is started
        slowly."""
        self.last_pick_number = 0
        """Number of the last pick that chose this endpoint, counting from 1 over the pool's life; 0
        = never."""
        self.cold_pick_number = 0
        """The same, counting only requests that matched no prefix anywhere. For
        `no-hit-lru-scorer`."""
        self.failures = 0
        """Requests that failed here in a row."""
        self.scrape_failures = 0
        """Scrapes that failed here in a row."""
        self.unreachable = False
        """The last scrape failed because no connection could be made."""
        self.last_answer_s = float("-inf")
        """Monotonic time of the last request that succeeded here."""
        self.ejected_until_s = 0.0
        """Not eligible before this monotonic time; 0 = eligible."""
        self.on_probation = False
        """Its ejection has run out and no request has succeeded since: one request at a time."""

    def take_over(self, spec: EndpointSpec) -> None:
        """Be called and labelled as `spec` says; its address is the one this endpoint has."""
        self.spec = spec
        self.address = spec.address
        self.name = spec.name or spec.address
        self.namespace = spec.namespace
        self.labels = spec.labels

    def __repr__(self) -> str:
        return f"<Endpoint {self.address} slot={self.slot} inflight={self.inflight_requests}>"
