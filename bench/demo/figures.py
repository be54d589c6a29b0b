"""What outcomes add up to. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from bench.demo.client import Fate, Outcome


class Kill(msgspec.Struct):
    """An engine's SIGKILL and return; times in seconds from the start of the run."""

    engine: str
    killed_s: float
    ready_s: float | None = None
    """When it listened again; `None`: it did not."""


class Figures(msgspec.Struct, frozen=True):
    """Of some requests."""

    requests: int
    errors: int
    cut: int
    """Streams that broke off when the engine that had begun them was killed."""
    hit_ratio: float | None
    """Prompt tokens that engines found cached, of all in answers that say so; `None`: none did."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    """`None`: there was no answer."""


class Arm(msgspec.Struct, kw_only=True):
    """One run of the plan."""

    name: str
    outcomes: list[Outcome]
    kill: Kill | None = None
    engine_late_s: float | None = None
    """Engine time lost because an engine's process was too slow, over all engines; `None`: they are
    not simulated."""


def figures(arm: Arm, outcomes: Iterable[Outcome] | None = None) -> Figures:
    """Add up all outcomes of an arm, or some of them."""
    some = arm.outcomes if outcomes is None else list(outcomes)
    known = [o for o in some if o.prompt_tokens and o.cached_tokens is not None]
    prompt_tokens = sum(o.prompt_tokens or 0 for o in known)
    cached_tokens = sum(o.cached_tokens or 0 for o in known)
    ttfts_s = sorted(o.ttft_s for o in some if o.ttft_s is not None)
    cut = [o for o in some if was_cut(o, arm.kill)]
    return Figures(
        requests=len(some),
        errors=len([o for o in some if o.fate is not Fate.OK]) - len(cut),
        cut=len(cut),
        hit_ratio=cached_tokens / prompt_tokens if prompt_tokens else None,
        ttft_p50_s=percentile(ttfts_s, 0.50),
        ttft_p95_s=percentile(ttfts_s, 0.95),
    )


def was_cut(outcome: Outcome, kill: Kill | None) -> bool:
    """Whether this stream had begun on the killed engine when it died: no router can finish it.
    A request without an answer yet is not cut: it could have been sent elsewhere."""
    return (
        kill is not None
        and outcome.fate is Fate.CUT
        and outcome.engine == kill.engine
        and outcome.sent_s <= kill.killed_s <= outcome.end_s
    )


def errors_of(arm: Arm) -> list[Outcome]:
    """The requests that failed and need not have."""
    return [o for o in arm.outcomes if o.fate is not Fate.OK and not was_cut(o, arm.kill)]


def by_engine(outcomes: Iterable[Outcome], engines: Sequence[str]) -> dict[str, int]:
    """Requests per engine; an engine without any is there with 0, requests without an engine are
    not."""
    counts = Counter(o.engine for o in outcomes)
    return {engine: counts[engine] for engine in engines}


def return_s(arm: Arm) -> float | None:
    """From the moment the killed engine listened again to the first request sent after it that it
    answered; `None`: there was none."""
    kill = arm.kill
    if kill is None or kill.ready_s is None:
        return None
    back = [
        o.sent_s - kill.ready_s
        for o in arm.outcomes
        if o.engine == kill.engine and o.fate is Fate.OK and o.sent_s >= kill.ready_s
    ]
    return min(back, default=None)


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """The nearest rank of sorted values; `None` when there are none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
