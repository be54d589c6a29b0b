"""A report as Markdown: tables that can be read as text, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.sim.figures import Interval
from bench.sim.regret import CAUSES
from bench.sim.report import Entry, Report, by_cell


def markdown(report: Report) -> str:
    """The tables, to be pasted anywhere."""
    parts = [f"# {report.name}", f"`{report.command}`", _origin(report), report.method]
    if report.notes:
        head, *lines = report.notes
        parts.append("\n".join([f"**{head}**", "", *(f"- {line}" for line in lines)]))
    if report.summary:
        parts.append(_told_summary(report))
    if report.contests:
        parts += ["## Against the best peer of each cell", _contest_table(report)]
    cells = by_cell(report.entries)
    if len(cells) > 1:
        parts += ["## Mean TTFT, s", _matrix(cells, report)]
    for cell, group in cells.items():
        parts += [f"## {cell}", _cell_table(group, report)]
        if any(entry.regret and entry.regret.causes_s for entry in group.values()):
            parts += ["Regret per decision by cause, ms:", _regret_table(group)]
    if report.failed:
        parts += ["## Failed runs", "\n".join(f"- {each}" for each in report.failed)]
    return "\n\n".join(parts) + "\n"


def _origin(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    seeds = ", ".join(map(str, report.seeds))
    text = f"Seeds {seeds}; {versions}; {report.machine.get('at', '')}."
    if report.missing:
        text += f" **Interrupted: {report.missing} runs were not made.**"
    return text


def _told_summary(report: Report) -> str:
    assert report.summary is not None
    s = report.summary
    return (
        f"**{report.baseline} against the best peer of each cell: {s.geometric_mean:+.1%} mean"
        f" TTFT (geometric mean of {s.cells} cells); better in {s.better}, level in {s.level},"
        f" worse in {s.worse}.**"
    )


def _contest_table(report: Report) -> str:
    header = ("cell", report.baseline, "best peer", "its TTFT", "mean TTFT", "", "p99", "oracle")
    rows = [
        (
            each.cell,
            seconds(each.ours_s),
            each.peer,
            seconds(each.peer_s),
            percent(each.difference),
            each.difference.verdict,
            percent(each.p99),
            percent(each.oracle),
        )
        for each in report.contests
    ]
    return markdown_table(header, rows)


def _matrix(cells: Mapping[str, Mapping[str, Entry]], report: Report) -> str:
    rows = []
    for cell, group in cells.items():
        real = [e for name, e in group.items() if report.policies[name] != "oracle"]
        best = min((entry.ttft_mean_s.mean for entry in real), default=None)
        texts = []
        for policy in report.policies:
            value = group[policy].ttft_mean_s.mean if policy in group else None
            text = seconds(value)
            texts.append(f"**{text}**" if value == best else text)
        rows.append((cell, *texts))
    return markdown_table(("cell", *report.policies), rows)


CELL_HEADER = (
    *("policy", "TTFT mean", "p50", "p90", "p99", "max", "vs baseline", "TPOT p50 ms", "p99"),
    *("E2E", "goodput", "hit", "of ceiling", "held", "balance", "in flight", "refused", "retries"),
    "regret ms",
)


def _cell_table(group: Mapping[str, Entry], report: Report) -> str:
    ordered = sorted(group.values(), key=lambda entry: entry.ttft_mean_s.mean)
    rows = [_cell_row(entry, report) for entry in ordered]
    return markdown_table(CELL_HEADER, rows)


def _cell_row(entry: Entry, report: Report) -> tuple[str, ...]:
    f = entry.figures
    versus = "baseline" if entry.policy == report.baseline else percent(entry.difference)
    lost = f" + {f.lost} lost" if f.lost else ""
    return (
        entry.policy,
        *map(seconds, (f.ttft_mean_s, f.ttft_p50_s, f.ttft_p90_s, f.ttft_p99_s, f.ttft_max_s)),
        versus,
        *(_number(None if v is None else v * 1e3, ".1f") for v in (f.tpot_p50_s, f.tpot_p99_s)),
        seconds(f.e2e_mean_s),
        _number(f.goodput_ratio, ".1%"),
        _number(f.hit_ratio, ".3f"),
        _number(entry.ceiling_share, ".0%"),
        seconds(f.hold_mean_s),
        _number(f.requests_balance_ratio, ".2f"),
        _number(f.inflight_balance_ratio, ".2f"),
        f"{f.refused}{lost}",
        str(f.retries),
        _number(entry.regret.mean_s * 1e3 if entry.regret else None, ".1f"),
    )


def _regret_table(group: Mapping[str, Entry]) -> str:
    """Of the policies whose causes are known, the least first."""
    found = [(name, e.regret) for name, e in group.items() if e.regret and e.regret.causes_s]
    rows = [
        (
            name,
            str(regret.decisions),
            *(_number(each_s * 1e3, ".1f") for each_s in (regret.mean_s, *regret.causes_s)),
        )
        for name, regret in sorted(found, key=lambda each: each[1].mean_s)
    ]
    return markdown_table(("policy", "decisions", "regret", *CAUSES), rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that can be read as text too: the first column to the left."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    return "\n".join(
        "| "
        + " | ".join(
            text.rjust(width) if at else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def seconds(value: float | None) -> str:
    """Three significant digits, milliseconds at most; a dash for `None`."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(interval: Interval | None) -> str:
    """A relative difference with its interval; a dash for `None`."""
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.1%}"
    return f"{interval.mean:+.1%} [{interval.low:+.1%}, {interval.high:+.1%}]"


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)
