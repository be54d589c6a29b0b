"""From the records of many runs to what is said about them, and that as JSON.

Three questions, in this order: is our policy better than the best peer of each cell, chosen
afterwards (which favours the peer); how far are the others; what are all the figures. Peers are
what other systems do. An oracle that sees the engines' true state, and peers with our hold in
front, are shown but are not peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import exp, log
from statistics import mean
from typing import Any, Literal

import msgspec

from bench.sim.figures import (
    GOOD_ITL_S,
    GOOD_TTFT_S,
    Figures,
    Interval,
    paired_difference,
    t_interval,
)
from bench.sim.records import Record
from bench.sim.regret import RegretFigures, averaged_regret

Kind = Literal["ours", "peer", "oracle", "control"]

TOTALS = ("requests", "refused", "lost", "retries", "preemptions")
"""Figures that are summed over the seeds; of `ttft_max_s` the largest is kept, the others are
averaged."""
NOT_IN_RUNS = frozenset({"ttft_quantiles_s", "load", "basis", "error"})
RESULT_BYTES_MAX = 1_000_000
METHOD = f"""\
Means over the seeds; every policy meets the same arrivals with the same seed. Differences are of \
mean TTFT, relative, paired by seed, with Student's t interval at 95 %: below 0 is better. \
Goodput: share of all requests with TTFT <= {GOOD_TTFT_S:g} s and mean time between tokens <= \
{GOOD_ITL_S * 1e3:g} ms. Ceiling: one pooled LRU cache as large as the fleet's. Balance: most \
loaded endpoint / mean, by requests and by requests in flight over time. Regret: expected time to \
first token at the endpoint picked, less that at the best, by the engines' true state, mean of the \
decisions looked at. Its causes are what would be saved by deciding again with true prefix caches, \
then true load, then true rates, and at last (objective) by wanting nothing but this request's own \
first token; the sum is the regret. Only policies that run through the picker can decide again."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in a cell, over its seeds."""

    cell: str
    policy: str
    seeds: list[int]
    figures: Figures
    ttft_mean_s: Interval
    ttft_by_seed_s: list[float]
    p99_by_seed_s: list[float]
    ceiling_ratio: float | None
    ceiling_share: float | None
    """Hit ratio / that of the pooled LRU cache."""
    difference: Interval | None = None
    """Mean TTFT against the baseline, in the seeds that both have; `None` for the baseline."""
    ttft_quantiles_s: list[float] = []
    regret: RegretFigures | None = None
    """`None`: no decision was looked at."""
    load: list[list[float]] = []
    """Of the first seed: `LoadPoint`s."""


class Contest(msgspec.Struct, frozen=True, kw_only=True):
    """Our policy and the best peer of a cell."""

    cell: str
    ours_s: float
    peer: str
    peer_s: float
    difference: Interval
    """Our mean TTFT against the peer's."""
    p99: Interval
    """The same for p99 TTFT against the peer's that is best by mean TTFT."""
    oracle: Interval | None = None
    """Our mean TTFT against the greedy oracle's."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Over all cells."""

    cells: int
    better: int
    level: int
    worse: int
    geometric_mean: float
    """Of our mean TTFT against the best peer's, minus 1."""


class Report(msgspec.Struct, kw_only=True):
    """Everything that is written."""

    name: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    constants: dict[str, Any]
    seeds: list[int]
    policies: dict[str, Kind]
    baseline: str
    """The policy that the others are compared with."""
    method: str = METHOD
    summary: Summary | None = None
    """`None` when no cell has both our policy and a peer."""
    contests: list[Contest] = []
    entries: list[Entry] = []
    runs: list[Record] = []
    failed: list[str] = []
    missing: int = 0
    """Runs that were not made: interrupted."""
    notes: list[str] = []
    """What there is to say of the workloads: lines of a log that were left out."""
    left_out: list[str] = []
    """What the file would be too large with."""


# -- computing -----------------------------------------------------------------------------


def entries_of(
    records: Iterable[Record], cells: Sequence[str], policies: Sequence[str], baseline: str
) -> list[Entry]:
    """One entry per cell and policy that has a record with figures, in the order given."""
    groups: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        if record.figures is not None:
            groups.setdefault((record.cell, record.policy), {})[record.seed] = record
    return [
        _entry([group[seed] for seed in sorted(group)], groups.get((cell, baseline), {}))
        for cell in cells
        for policy in policies
        if (group := groups.get((cell, policy)))
    ]


def _entry(records: Sequence[Record], baseline: Mapping[int, Record]) -> Entry:
    first = records[0]
    figures = [record.figures for record in records if record.figures is not None]
    ttft_s = [each.ttft_mean_s for each in figures]
    pairs = [
        (record.figures.ttft_mean_s, other.figures.ttft_mean_s)
        for record in records
        if record.figures and (other := baseline.get(record.seed)) and other.figures
    ]
    is_baseline = bool(baseline) and next(iter(baseline.values())).policy == first.policy
    return Entry(
        cell=first.cell,
        policy=first.policy,
        seeds=[record.seed for record in records],
        figures=averaged(figures),
        ttft_mean_s=_rounded(t_interval(ttft_s)),
        ttft_by_seed_s=[_short(value, 7) for value in ttft_s],
        p99_by_seed_s=[_short(each.ttft_p99_s, 7) for each in figures],
        ceiling_ratio=_mean_known(record.ceiling_ratio for record in records),
        ceiling_share=_mean_known(record.ceiling_share for record in records),
        difference=_difference(*zip(*pairs, strict=True)) if pairs and not is_baseline else None,
        ttft_quantiles_s=[
            _short(mean(values))
            for values in zip(*(record.ttft_quantiles_s for record in records), strict=True)
        ],
        regret=averaged_regret(record.regret for record in records),
        load=[[p.at_s, p.least, p.mean, p.most] for p in first.load],
    )


def averaged(figures: Sequence[Figures]) -> Figures:
    """Several seeds as one: see `TOTALS`; `None` where no seed has a value."""
    merged: dict[str, Any] = {}
    for field in msgspec.structs.fields(Figures):
        values = [getattr(each, field.name) for each in figures]
        if field.name in TOTALS:
            merged[field.name] = sum(values)
        elif field.name == "ttft_max_s":
            merged[field.name] = _short(max(values))
        else:
            merged[field.name] = _mean_known(values)
    return Figures(**merged)


def contests_of(entries: Sequence[Entry], policies: Mapping[str, Kind], ours: str) -> list[Contest]:
    """Each cell's best peer by mean TTFT, among those with all the seeds that `ours` has.

    Args:
        policies: names and kinds.
        ours: the policy compared.
    """
    found = []
    for cell, group in by_cell(entries).items():
        own = group.get(ours)
        if own is None:
            continue
        full = {name: entry for name, entry in group.items() if entry.seeds == own.seeds}
        peers = [entry for name, entry in full.items() if policies[name] == "peer"]
        if peers and policies[ours] != "peer":
            oracles = [entry for name, entry in full.items() if policies[name] == "oracle"]
            best = min(peers, key=lambda entry: entry.ttft_mean_s.mean)
            found.append(_contest(cell, own, best, oracles))
    return found


def _contest(cell: str, own: Entry, best: Entry, oracles: Sequence[Entry]) -> Contest:
    return Contest(
        cell=cell,
        ours_s=own.ttft_mean_s.mean,
        peer=best.policy,
        peer_s=best.ttft_mean_s.mean,
        difference=_difference(own.ttft_by_seed_s, best.ttft_by_seed_s),
        p99=_difference(own.p99_by_seed_s, best.p99_by_seed_s),
        oracle=_difference(own.ttft_by_seed_s, oracles[0].ttft_by_seed_s) if oracles else None,
    )


def summary_of(contests: Sequence[Contest]) -> Summary | None:
    """How often our policy is better, level or worse; `None` without contests."""
    if not contests:
        return None
    verdicts = [contest.difference.verdict for contest in contests]
    ratios = [log(contest.ours_s / contest.peer_s) for contest in contests]
    return Summary(
        cells=len(contests),
        better=verdicts.count("better"),
        level=verdicts.count("level"),
        worse=verdicts.count("worse"),
        geometric_mean=_short(exp(mean(ratios)) - 1),
    )


def by_cell(entries: Iterable[Entry]) -> dict[str, dict[str, Entry]]:
    """Entries by cell and policy."""
    cells: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        cells.setdefault(entry.cell, {})[entry.policy] = entry
    return cells


def _difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    return _rounded(paired_difference(values, base))


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _short(mean(known)) if known else None


def _short(value: float, digits: int = 4) -> float:
    """Significant digits: more would only make the file larger, fewer would blur differences."""
    return float(f"{value:.{digits}g}")


def _rounded(interval: Interval) -> Interval:
    low, high = (None if end is None else _short(end) for end in (interval.low, interval.high))
    return Interval(_short(interval.mean), low, high)


# -- JSON ----------------------------------------------------------------------------------


def encode(report: Report, bytes_max: int = RESULT_BYTES_MAX) -> bytes:
    """The report as JSON; what does not fit is left out, the least needed first, and named.

    `entries` and `runs` are tables: names of columns, then a line per row, so that files stay small
    and a difference between two can be read. An interval is [mean, low, high].
    """
    slim: tuple[tuple[str, Callable[[Report], Report]], ...] = (
        ("load over time", lambda report: _without(report, load=[])),
        ("runs", lambda report: msgspec.structs.replace(report, runs=[])),
        ("TTFT quantiles", lambda report: _without(report, ttft_quantiles_s=[])),
    )
    data = _encoded(report)
    for what, without in slim:
        if len(data) <= bytes_max:
            break
        report = without(report)
        report = msgspec.structs.replace(report, left_out=[*report.left_out, what])
        data = _encoded(report)
    return data


def _without(report: Report, **fields: Any) -> Report:
    entries = [msgspec.structs.replace(entry, **fields) for entry in report.entries]
    return msgspec.structs.replace(report, entries=entries)


def _encoded(report: Report) -> bytes:
    fields = msgspec.to_builtins(report)
    fields["entries"] = [_flat(entry) for entry in fields["entries"]]
    fields["runs"] = [_flat(run, NOT_IN_RUNS) for run in fields["runs"]]
    return b"{\n" + b",\n".join(map(_lines, fields, fields.values())) + b"\n}\n"


def _flat(row: dict[str, Any], left_out: Collection[str] = ()) -> dict[str, Any]:
    """A row without structs in it: figures beside the other columns, intervals as lists."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "figures":
            flat |= _shortened(value)
        elif name == "regret":
            blank = dict.fromkeys(RegretFigures.__struct_fields__)
            flat |= {f"regret_{each}": v for each, v in _shortened(value or blank).items()}
        elif name not in left_out:
            flat[name] = list(value.values()) if isinstance(value, dict) else value
    return flat


def _shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    return {each: _short(v) if isinstance(v, float) else v for each, v in values.items()}


def _lines(name: str, value: Any) -> bytes:
    encode_json = msgspec.json.encode
    if name in ("entries", "runs") and value:
        rows = b",\n".join(encode_json(list(row.values())) for row in value)
        return b'"%s":{"columns":%s,"rows":[\n%s\n]}' % (
            name.encode(),
            encode_json(list(value[0])),
            rows,
        )
    return b'"%s":%s' % (name.encode(), encode_json(value))
