"""What every source of a workload shares: its options, and the way from drafts to a `Workload`.

A source (a trace, a generator, a log) yields drafts; `arrange` sorts them by arrival, cuts what the
options do not want and numbers the rest. Blocks get names through `Names`: a name stands for a
piece of prompt *and* everything before it, so equal names mean equal prefixes whatever the source
called its pieces. `pieces` converts between block sizes: to larger blocks by taking ids together
(an incomplete group at the end has no name), to smaller ones by dividing each id.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from bench.sim.model import SimRequest, Workload

REQUESTS_MAX = 2_000_000
"""Requests of one workload; they take some 300 B each, besides their blocks."""
BLOCKS_MAX = 50_000_000
"""Blocks of all requests together: 400 MB of references."""


class WorkloadError(Exception):
    """A workload cannot be made; the text says of which file, line or option, and the remedy."""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a workload is made. The same options give the same workload.

    Raises:
        WorkloadError: a value is out of range.
    """

    seed: int = 1
    """Of all that is drawn: jitter, starts of sessions, a generated workload as a whole."""
    requests_max: int | None = None
    """At most so many, the first ones; `None`: as many as the trace or the duration gives."""
    duration_s: float | None = None
    """Nothing arrives later than this in the run; `None`: a trace's whole length, a generated
    workload's own default (no end where `requests_max` is given)."""
    speed: float = 1.0
    """A trace of single requests: times are divided by this. Sessions and generated workloads: that
    many times as many starts, while the pace within a session stays."""
    jitter_s: float | None = None
    """Traces of single requests: each is delayed by up to this, evenly drawn, in the trace's own
    time (before `speed`). It is what a seed changes in such a trace, and breaks up arrivals that
    the recording rounded to one instant. `None`: the trace's own default; 0: as recorded."""
    block_tokens: int = 512
    """Tokens per prefix block of the workload."""
    prompt_tokens_max: int | None = None
    """Requests with longer prompts are left out; `None`: none are."""
    traces: str | None = None
    """Folder of the trace files; `None`: the environment's `TRACES`."""
    sessions: int | None = None
    """Traces of sessions: that many, drawn by `seed`; `None`: all."""
    sessions_per_s: float = 0.02
    """Traces of sessions: starts per second at `speed` 1, as a Poisson process."""
    gap_s_max: float = 60.0
    """Traces of sessions: a longer pause between two requests of a session is cut to this. A coding
    session may rest for a day, which a run cannot wait for."""

    def __post_init__(self) -> None:
        positive = ("requests_max", "duration_s", "speed", "block_tokens", "prompt_tokens_max")
        for name in (*positive, "sessions", "sessions_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise WorkloadError(f"{name} is {value}; it must be above 0")
        for name in ("jitter_s", "gap_s_max"):
            value = getattr(self, name) or 0.0
            if not (math.isfinite(value) and value >= 0):
                raise WorkloadError(f"{name} is {value}; it must not be negative")


class Draft(NamedTuple):
    """A request before it has its place; fields as in `SimRequest`."""

    at_s: float
    """Seconds of the run; a negative one is before its start and left out."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: int | None = None
    model: str = "model"


def arrange(name: str, drafts: Iterable[Draft], options: WorkloadOptions) -> Workload:
    """Sort, cut and number.

    Raises:
        WorkloadError: nothing is left, or more than a run can hold.
    """
    until_s = math.inf if options.duration_s is None else options.duration_s
    longest = options.prompt_tokens_max or math.inf
    kept: list[Draft] = []
    blocks = 0
    for draft in drafts:
        if not 0 <= draft.at_s <= until_s or draft.prompt_tokens > longest:
            continue
        kept.append(draft)
        blocks += len(draft.blocks)
        check_size(name, requests=len(kept), blocks=blocks)
    kept.sort(key=attrgetter("at_s"))
    requests = tuple(numbered(islice(kept, options.requests_max)))
    if not requests:
        raise WorkloadError(
            f"{name}: no request is left; allow a longer duration or longer prompts"
        )
    return Workload(name=name, requests=requests, block_tokens=options.block_tokens)


def check_size(name: str, *, requests: int, blocks: int) -> None:
    """Refuse what would not fit into memory."""
    if requests > REQUESTS_MAX:
        raise WorkloadError(f"{name}: more than {REQUESTS_MAX} requests; set a limit of requests")
    if blocks > BLOCKS_MAX:
        raise WorkloadError(
            f"{name}: the prompts have more than {BLOCKS_MAX} blocks; take larger blocks, or set a "
            "limit of requests"
        )


def numbered(drafts: Iterable[Draft]) -> Iterator[SimRequest]:
    """Requests out of drafts in order of arrival."""
    for number, draft in enumerate(drafts):
        yield SimRequest(
            number=number,
            arrival_s=draft.at_s,
            prompt_tokens=draft.prompt_tokens,
            output_tokens=draft.output_tokens,
            blocks=draft.blocks,
            session=draft.session,
            model=draft.model,
        )


class Names:
    """Numbers prefixes: equal chains of pieces get equal names, different ones never."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Hashable], int] = {}
        self._roots: dict[Hashable, int] = {}
        self._next = 0

    def root(self, what: Hashable) -> int:
        """The parent of first blocks: chains share names only under an equal root."""
        return self._roots.setdefault(what, -1 - len(self._roots))

    def chain(self, root: int, parts: Iterable[Hashable]) -> tuple[int, ...]:
        """One name per piece, in order."""
        names = self._names
        name = root
        chain: list[int] = []
        for part in parts:
            known = names.get((name, part))
            if known is None:
                known = names[(name, part)] = self._next
                self._next += 1
            name = known
            chain.append(known)
        return tuple(chain)

    def forget(self) -> None:
        """Free the memory of the chains so far: the same ones would get new names."""
        self._names.clear()


def pieces(ids: Sequence[Hashable], *, unit_tokens: int, block_tokens: int) -> Iterator[Hashable]:
    """Blocks of another size out of ids that stand for `unit_tokens` tokens each.

    Raises:
        WorkloadError: neither size divides the other.
    """
    if block_tokens % unit_tokens == 0:
        group = block_tokens // unit_tokens
        whole = len(ids) - len(ids) % group
        return (tuple(ids[at : at + group]) for at in range(0, whole, group))
    if unit_tokens % block_tokens == 0:
        return ((each, part) for each in ids for part in range(unit_tokens // block_tokens))
    raise WorkloadError(
        f"blocks of {unit_tokens} tokens cannot be made into blocks of {block_tokens}; take a "
        f"multiple or a divisor of {unit_tokens}"
    )
