"""The nouns: an endpoint and its load, a request, a pick.

`Endpoint` objects are owned by `core.pool` and change only on the event loop, through `Pool.apply`
and `Inflight`; a decision is one synchronous call, so what it reads cannot change under it.
Everything else here is a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, Flag, StrEnum, auto
from random import Random
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from epp.core.endpoint import (
    NO_ATTRIBUTES as NO_ATTRIBUTES,
    NO_LABELS as NO_LABELS,
    UNKNOWN as UNKNOWN,
    Endpoint as Endpoint,
    EndpointSpec as EndpointSpec,
    Load as Load,
    Lora as Lora,
)

DEFAULT_FAIRNESS_ID = "default-flow"
NO_MATCHES: Mapping[int, int] = MappingProxyType({})


class Api(StrEnum):
    """Which API a request speaks, decided by its path; the metric label and the parser's choice."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    CONVERSATIONS = "conversations"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    GENERATE = "generate"
    IMAGES = "images"
    OTHER = "other"
    """Nothing we read the body of: routed by load alone."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """How much of a request's prompt each endpoint is thought to hold, in prefix blocks.

    Only contiguous leading blocks count. Several prompts in one request add up.
    """

    blocks: int = 0
    """Full prefix blocks of the request; 0 when the prompt is shorter than one block or was not
    read."""
    block_tokens: int = 64
    by_slot: Mapping[int, int] = NO_MATCHES
    """Endpoint slot -> matched blocks, 1..blocks. An absent slot matched none."""


NO_MATCH = PrefixMatch()


class Prediction(msgspec.Struct, frozen=True):
    """What a request can expect from one endpoint, by the learned rates."""

    ttft_s: float
    """Seconds to the first token."""
    tpot_s: float
    """Seconds per output token after it."""


NO_PREDICTIONS: Mapping[int, Prediction] = MappingProxyType({})
CHANCE = Random(0)
"""Stands in for the decider's source of chance in a request that no decider has seen."""


class Request(msgspec.Struct, eq=False, kw_only=True):
    """What we read of one client request, and what we looked up for it. Made by `core.parse`,
    completed by `core.decide`."""

    id: str = ""
    """The client's `x-request-id`, for people; never a key (two live requests may share one)."""
    model: str = ""
    """Model name as the client wrote it; empty when the body was not read."""
    target_model: str = ""
    """The name the engine is asked for instead, where a rewrite applies; empty = `model`."""
    rewrite: str = ""
    """Name of the InferenceModelRewrite that said so; empty = a header, or none."""
    body_read: bool = False
    """The body is a JSON object of an API we know."""
    api: Api = Api.OTHER
    headers: Mapping[str, str] = NO_LABELS
    """Request headers, lower-case names, latin-1 values; of a repeated header the last."""
    prompts: tuple[bytes, ...] = ()
    """Prompt views for hashing, one per prompt; equal leading bytes mean an equal leading prompt
    for the engine."""
    prompt_tokens: int = 0
    """Estimated prompt tokens, all prompts together (exact where the client sent token ids)."""
    max_output_tokens: int | None = None
    """The client's own limit; `None` when it set none."""
    stream: bool = False
    cache_salt: str = ""
    body_bytes: int = 0
    priority: int = 0
    fairness_id: str = DEFAULT_FAIRNESS_ID
    slo_ttft_s: float | None = None
    """The client's promise for the first token (`x-llm-d-slo-ttft-ms`); `None` = none given."""
    slo_tpot_s: float | None = None
    """The same per output token (`x-llm-d-slo-tpot-ms`)."""
    chains: tuple[Sequence[int], ...] = ()
    """Names of the full prefix blocks, one chain per prompt, prompt order."""
    match: PrefixMatch = NO_MATCH
    predictions: Mapping[int, Prediction] = NO_PREDICTIONS
    """Endpoint slot -> prediction, where a plugin asks for them; a slot may be absent."""
    rng: Random = CHANCE
    """The decider's source of chance, for plugins that explore."""

    @property
    def engine_model(self) -> str:
        """The name the engine sees."""
        return self.target_model or self.model


class Reads(Flag):
    """What a plugin's result depends on besides the list of endpoints; what does not read the
    request is computed once per change of the pool and cached."""

    LABELS = 0
    """Only what never changes while an endpoint lives."""
    LOAD = auto()
    """`Endpoint.load`."""
    INFLIGHT = auto()
    """In-flight counters and pick numbers, which change with every pick."""
    REQUEST = auto()
    """The request."""


class Plugin(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A filter, scorer or picker: its fields are its YAML parameters (camelCase there). No
    behaviour lives here."""

    reads: ClassVar[Reads] = Reads.REQUEST


class Filter(Protocol):
    """Keeps the endpoints that may serve the request, in the given order. An empty result is a
    decision, not an error."""

    @property
    def reads(self) -> Reads: ...

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]: ...


class Scorer(Protocol):
    """Scores every endpoint: shape (len(endpoints),), same order, each 0 (worst) to 1 (best)."""

    @property
    def reads(self) -> Reads: ...

    def __call__(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]: ...


@runtime_checkable
class SparseScorer(Protocol):
    """A scorer that gives most endpoints 0, and can name the others without looking at each."""

    def by_slot(self, request: Request) -> Mapping[int, float]:
        """Endpoint slot -> score; an absent slot scores 0. A slot need not be a candidate's."""


class Picker(Protocol):
    """Chooses from weighted totals: indices into `endpoints`, best first, at least one, at most
    `max_num_of_endpoints`."""

    def __call__(
        self, endpoints: Sequence[Endpoint], totals: Sequence[float], rng: Random
    ) -> list[int]: ...


class ScoreTerm(msgspec.Struct, frozen=True):
    """One scorer's part in a pick; `scores` follows `Pick.candidates`."""

    name: str
    weight: float
    scores: Sequence[float]


class Costs(msgspec.Struct, frozen=True):
    """What a cost policy found, shape (len(endpoints),), same order."""

    seconds: Sequence[float]
    """The least wins."""
    terms: tuple[ScoreTerm, ...] = ()
    """What the seconds are made of; they add up where all weights are 1."""
    tie_s: float = 0.0
    """Costs so near to the least count as equal to it."""


class Pick(msgspec.Struct, frozen=True):
    """A decision and its reasons."""

    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...] = ()
    """Where the gateway may retry, best first; empty unless `maxNumOfEndpoints` asks for them."""
    candidates: Sequence[Endpoint] = ()
    totals: Sequence[float] = ()
    """One per candidate: weighted scores, the greatest wins; or, if `by_cost`, seconds, the least
    wins."""
    terms: tuple[ScoreTerm, ...] = ()
    profile: str = "default"
    by_cost: bool = False

    @property
    def scores(self) -> Sequence[float]:
        """The totals so that the greatest wins: costs are negated."""
        return [-total for total in self.totals] if self.by_cost else self.totals

    @property
    def destination(self) -> str:
        """Value of `x-gateway-destination-endpoint`: addresses joined by commas, no spaces."""
        if not self.fallbacks:
            return self.endpoint.address
        return ",".join([self.endpoint.address, *(e.address for e in self.fallbacks)])


class Usage(msgspec.Struct):
    """Token counts an engine reported in its answer; `None` = not reported. Fields are merged as
    they come, never summed."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Cause(Enum):
    """How an exchange ended."""

    NATURAL = "natural"
    """The response ended, or the gateway ended the stream after its last message."""
    CLIENT_DISCONNECT = "client-disconnect"
    """The stream ended before the response did."""
    DROPPED = "dropped"
    """We refused the request."""
    ERROR = "error"
    """A bug of ours or a message the protocol does not allow."""


Clock = Callable[[], float]
"""Monotonic seconds."""
