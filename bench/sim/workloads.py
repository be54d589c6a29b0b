"""Workloads made from a seed alone, and the table of all workloads, traces included.

Each is an endless stream of drafts in order of arrival, cut by the options. Sessions draw from a
source of chance of their own, so what one says does not depend on what else goes on. `speed` 1 is
about the load the traces were measured at, on eight endpoints of two H100 with a 32B model.

- chats: conversations that grow turn by turn; each begins with the system prompt of one of a few
  applications. It begins as if it had been running for a while: the first turns of some lie
  before the start, their later ones find a cold cache, as in a trace cut from a longer recording.
- siblings: groups of about eight requests, 0.3 s apart, on a long prefix nobody has seen
  before: the second arrives while the first is still being computed.
- hot-prefix: half of all requests share one prefix of 16,384 tokens, more than one endpoint can
  decode; the others share nothing.
- agentic: tool-using sessions whose prompts grow to 160,000 tokens and are then compacted.
- no-prefixes: nothing is ever shared; affinity cannot help here and must not harm.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from random import Random
from types import MappingProxyType

import msgspec

from bench.sim import lengths
from bench.sim.lengths import Quantiles
from bench.sim.model import Workload
from bench.sim.plan import REQUESTS_MAX, Draft, WorkloadOptions, arrange
from bench.sim.traces import TRACES

APPLICATIONS_MAX = 1024
_NAME_BITS = 24
"""Names of one session or application: 16 million blocks."""


class SessionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions whose every prompt is the one before it, the answer, and something new."""

    sessions_per_s: float
    """Starts per second, a Poisson process, at `speed` 1."""
    lead_s: float = 0.0
    """Sessions start this long before the run does."""
    applications: int
    """Different system prompts, of falling popularity (the k-th has a share of 1/k)."""
    system_tokens: Quantiles
    first_tokens: Quantiles
    """Of the first prompt, system prompt included."""
    added_tokens: Quantiles
    """What a later prompt adds besides the answer before it."""
    output_tokens: Quantiles
    gap_s: Quantiles
    """From one request to the next of its session."""
    turns: Quantiles
    context_tokens_max: int
    """No prompt is longer: the session ends there, or is compacted."""
    compacts: bool = False


CHATS = SessionShape(
    sessions_per_s=2.1,
    lead_s=900.0,
    applications=8,
    system_tokens=lengths.CHAT_SYSTEM_TOKENS,
    first_tokens=lengths.CHAT_FIRST_TOKENS,
    added_tokens=lengths.CHAT_USER_TOKENS,
    output_tokens=lengths.CHAT_OUTPUT_TOKENS,
    gap_s=lengths.CHAT_GAP_S,
    turns=lengths.CHAT_TURNS,
    context_tokens_max=126_000,
)

AGENTIC = SessionShape(
    sessions_per_s=0.04,
    applications=3,
    system_tokens=lengths.AGENT_SYSTEM_TOKENS,
    first_tokens=lengths.AGENT_FIRST_TOKENS,
    added_tokens=lengths.AGENT_ADDED_TOKENS,
    output_tokens=lengths.AGENT_OUTPUT_TOKENS,
    gap_s=lengths.AGENT_GAP_S,
    turns=lengths.AGENT_REQUESTS,
    context_tokens_max=160_000,
    compacts=True,
)

BURSTS_PER_S = 1.0
BURST_SIZE = (4, 12)
BURST_PREFIX_TOKENS = (2_000, 24_000)
BURST_OWN_TOKENS = (50, 500)
BURST_OUTPUT_TOKENS = (100, 300)
BURST_GAP_S = 0.3
"""Mean time between two siblings, exponentially distributed."""

HOT_PER_S = 12.0
HOT_RATIO = 0.5
HOT_PREFIX_TOKENS = 16_384
HOT_OWN_TOKENS = (100, 1_500)
UNSHARED_PER_S = 5.5
"""Requests per second of the Azure trace."""


def chats(options: WorkloadOptions) -> Workload:
    """See the module; lengths, turns and pauses as in Mooncake's conversation trace."""
    return _cut("chats", _sessions(CHATS, options), options, default_s=600.0)


def agentic(options: WorkloadOptions) -> Workload:
    """See the module; lengths and pauses as in the sessions published with kv-cache-tester."""
    return _cut("agentic", _sessions(AGENTIC, options), options, default_s=1800.0)


def siblings(options: WorkloadOptions) -> Workload:
    """See the module; `speed` multiplies the groups per second."""
    starts = _starts(Random(options.seed), BURSTS_PER_S * options.speed)
    bursts = ((at_s, _burst(n, at_s, options)) for n, at_s in enumerate(starts))
    return _cut("siblings", _merged(bursts), options, default_s=300.0)


def hot_prefix(options: WorkloadOptions) -> Workload:
    """See the module; `speed` multiplies the requests per second."""
    return _cut("hot-prefix", _hot(options), options, default_s=300.0)


def no_prefixes(options: WorkloadOptions) -> Workload:
    """See the module; lengths as in the Azure conversation trace."""
    return _cut("no-prefixes", _unshared(options), options, default_s=600.0)


GENERATED: Mapping[str, Callable[[WorkloadOptions], Workload]] = MappingProxyType(
    {
        "chats": chats,
        "siblings": siblings,
        "hot-prefix": hot_prefix,
        "agentic": agentic,
        "no-prefixes": no_prefixes,
    }
)
"""Workloads that need no file."""

WORKLOADS: Mapping[str, Callable[[WorkloadOptions], Workload]] = MappingProxyType(
    {**GENERATED, **TRACES}
)


def _cut(
    name: str, drafts: Iterator[Draft], options: WorkloadOptions, *, default_s: float
) -> Workload:
    """End an endless stream, which is in order of arrival."""
    until_s = options.duration_s
    if until_s is None and options.requests_max is None:
        until_s = default_s
    longest = options.prompt_tokens_max or float("inf")
    wanted = (draft for draft in drafts if draft.at_s >= 0 and draft.prompt_tokens <= longest)
    bounded = islice(wanted, options.requests_max or REQUESTS_MAX + 1)
    return arrange(name, _until(bounded, until_s), options)


def _until(drafts: Iterator[Draft], until_s: float | None) -> Iterator[Draft]:
    for draft in drafts:
        if until_s is not None and draft.at_s > until_s:
            return
        yield draft


def _starts(rng: Random, per_s: float, *, lead_s: float = 0.0) -> Iterator[float]:
    """A Poisson process."""
    at_s = -lead_s
    while True:
        at_s += rng.expovariate(per_s)
        yield at_s


def _merged(sessions: Iterator[tuple[float, Iterator[Draft]]]) -> Iterator[Draft]:
    """One stream in order of arrival.

    Args:
        sessions: start, and drafts in order that are never before it; starts ascend, endlessly.
    """
    live: list[tuple[float, int, Draft, Iterator[Draft]]] = []
    for order, (start_s, session) in enumerate(sessions):
        while live and live[0][0] <= start_s:
            _, first, draft, rest = live[0]
            yield draft
            if (after := next(rest, None)) is not None:
                heapq.heapreplace(live, (after.at_s, first, after, rest))
            else:
                heapq.heappop(live)
        if (draft_or_none := next(session, None)) is not None:
            heapq.heappush(live, (draft_or_none.at_s, order, draft_or_none, session))


class _Names:
    """The names of one growing prompt: a shared beginning, then names of its own."""

    def __init__(self, owner: int, shared: range) -> None:
        """`owner`: number of the session or application, from 0, each used once."""
        self._fresh = count(owner << _NAME_BITS)
        self._shared = shared
        self._names = list(shared)

    def leading(self, blocks: int) -> tuple[int, ...]:
        names = self._names
        names.extend(islice(self._fresh, max(0, blocks - len(names))))
        return tuple(names[:blocks])

    def restart(self) -> None:
        """Another prompt with the same beginning."""
        self._names = list(self._shared)


def _own(number: int) -> int:
    return APPLICATIONS_MAX + number


def _shared(application: int, blocks: int) -> range:
    first = application << _NAME_BITS
    return range(first, first + blocks)


def _sessions(shape: SessionShape, options: WorkloadOptions) -> Iterator[Draft]:
    rng = Random(options.seed)
    systems = [shape.system_tokens.whole(rng) for _ in range(shape.applications)]
    starts = _starts(rng, shape.sessions_per_s * options.speed, lead_s=shape.lead_s)
    return _merged(
        (at_s, _session(shape, number, at_s, systems, options))
        for number, at_s in enumerate(starts)
    )


def _session(
    shape: SessionShape, number: int, at_s: float, systems: list[int], options: WorkloadOptions
) -> Iterator[Draft]:
    rng = Random(f"{options.seed}/{number}")
    popularity = [1.0 / rank for rank in range(1, len(systems) + 1)]
    (application,) = rng.choices(range(len(systems)), popularity)
    system_tokens = systems[application]
    block_tokens = options.block_tokens
    names = _Names(_own(number), _shared(application, system_tokens // block_tokens))
    prompt_tokens = max(shape.first_tokens.whole(rng), system_tokens + 1)
    for _ in range(shape.turns.whole(rng)):
        output_tokens = shape.output_tokens.whole(rng)
        # What comes before the run is dropped, so its blocks need no names.
        blocks = names.leading(prompt_tokens // block_tokens) if at_s >= 0 else ()
        yield Draft(at_s, prompt_tokens, output_tokens, blocks, number)
        at_s += shape.gap_s.draw(rng)
        prompt_tokens += output_tokens + shape.added_tokens.whole(rng)
        if prompt_tokens > shape.context_tokens_max:
            if not shape.compacts:
                return
            names.restart()
            prompt_tokens = system_tokens + shape.first_tokens.whole(rng) // 2


def _burst(number: int, at_s: float, options: WorkloadOptions) -> Iterator[Draft]:
    rng = Random(f"{options.seed}/{number}")
    prefix_tokens = rng.randint(*BURST_PREFIX_TOKENS)
    block_tokens = options.block_tokens
    fresh = count(_own(number) << _NAME_BITS)
    prefix = tuple(islice(fresh, prefix_tokens // block_tokens))
    for _ in range(rng.randint(*BURST_SIZE)):
        prompt_tokens = prefix_tokens + rng.randint(*BURST_OWN_TOKENS)
        own = tuple(islice(fresh, prompt_tokens // block_tokens - len(prefix)))
        output_tokens = rng.randint(*BURST_OUTPUT_TOKENS)
        yield Draft(at_s, prompt_tokens, output_tokens, prefix + own, number)
        at_s += rng.expovariate(1.0 / BURST_GAP_S)


def _hot(options: WorkloadOptions) -> Iterator[Draft]:
    rng = Random(options.seed)
    fresh = count(_own(0) << _NAME_BITS)
    hot = tuple(_shared(0, HOT_PREFIX_TOKENS // options.block_tokens))
    for at_s in _starts(rng, HOT_PER_S * options.speed):
        is_hot = rng.random() < HOT_RATIO
        prompt_tokens = (
            HOT_PREFIX_TOKENS + rng.randint(*HOT_OWN_TOKENS)
            if is_hot
            else lengths.AZURE_PROMPT_TOKENS.whole(rng)
        )
        shared = hot if is_hot else ()
        own = tuple(islice(fresh, prompt_tokens // options.block_tokens - len(shared)))
        output_tokens = lengths.AZURE_OUTPUT_TOKENS.whole(rng)
        yield Draft(at_s, prompt_tokens, output_tokens, shared + own)


def _unshared(options: WorkloadOptions) -> Iterator[Draft]:
    rng = Random(options.seed)
    fresh = count()
    for at_s in _starts(rng, UNSHARED_PER_S * options.speed):
        prompt_tokens = lengths.AZURE_PROMPT_TOKENS.whole(rng)
        output_tokens = lengths.AZURE_OUTPUT_TOKENS.whole(rng)
        blocks = tuple(islice(fresh, prompt_tokens // options.block_tokens))
        yield Draft(at_s, prompt_tokens, output_tokens, blocks)
