"""The report as pictures, each with one thing to see and titled with it.

quantiles.png    TTFT of every percentile per policy: the distribution function on its side, with
                 the tail stretched, so that each line can be named where it ends
load.png         mean TTFT as the arrival rate grows
regret.png       what a decision costs against the best endpoint, by cause
capacity.png     prefix hit ratio as caches grow, below what one pooled cache would reach
balance.png      requests in flight per endpoint over time: a narrow band is an even load
best-peer.png    our mean TTFT against the best peer of each cell, with 95 % intervals

A picture needs cells that differ in what it shows; where there are none it is left out. Needs
matplotlib, imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from bench.sim.drawing import (
    FLOOR,
    OTHERS_COLOUR,
    OURS_COLOUR,
    PANELS,
    End,
    Style,
    draw_line,
    name_ends,
    name_greys,
    our_look,
    panels_of,
    seconds_axis,
    series_of,
    shown_cells,
    styles_of,
    title_of,
)
from bench.sim.experiments import Cell
from bench.sim.figures import Interval
from bench.sim.markdown import percent
from bench.sim.regret import CAUSES, RegretFigures
from bench.sim.report import Entry, Report

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAP_RATIO = 4.0
BANDS = 6
"""Policies whose load over time is shown: the best, and the worst of the named."""
FOREST_ROWS = 40
TICK_GAP = 0.13
"""Least distance of two numbers of an axis, as a share of it."""
FIRST_PERCENT = 10
"""The scale of TTFT begins here: the fastest few requests would take half of it."""
NOT_SPLIT = "not split: a peer cannot decide again"
CAUSE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "cache": "#0072B2",
        "load": "#E69F00",
        "rates": "#009E73",
        "objective": "#CC79A7",
        NOT_SPLIT: OTHERS_COLOUR,
    }
)
TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99)


Series = Sequence[tuple[float, Sequence[Entry]]]
"""Places on the axis, and what was measured there."""


class Drawing(NamedTuple):
    """A report and how to draw it."""

    report: Report
    cells: Mapping[str, Cell]
    """By name."""
    styles: Mapping[str, Style]
    entries: Mapping[tuple[str, str], Entry]
    """By cell and policy."""

    def values(self, cells: Sequence[Cell], policy: str) -> list[tuple[Cell, Entry]]:
        """What there is of a policy in these cells."""
        pairs = ((cell, self.entries.get((cell.name, policy))) for cell in cells)
        return [(cell, entry) for cell, entry in pairs if entry is not None]

    def is_named(self, policy: str) -> bool:
        """One of the policies that matter."""
        return policy in self.styles and self.styles[policy].named

    @property
    def labels(self) -> list[str]:
        """The names at the ends of lines, with room for an arrow."""
        return [f"{name} ↑" for name, style in self.styles.items() if style.named]


def write_plots(report: Report, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw every picture that the report has the cells for; returns the files.

    Raises: PlotsMissingError without matplotlib.
    """
    drawing = Drawing(
        report,
        {cell.name: cell for cell in cells},
        styles_of(report),
        {(entry.cell, entry.policy): entry for entry in report.entries},
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with our_look():
        for name, draw in PICTURES.items():
            path = folder / f"{name}.png"
            path.unlink(missing_ok=True)
            figure = draw(drawing)
            if figure is not None:
                figure.savefig(path, dpi=120)
                written.append(path)
    return written


# -- pictures ------------------------------------------------------------------------------


def draw_quantiles(drawing: Drawing) -> Figure | None:
    """TTFT by percentile."""
    with_quantiles = {e.cell for e in drawing.report.entries if e.ttft_quantiles_s}
    cells = shown_cells(c for c in drawing.cells.values() if c.name in with_quantiles)
    if not cells:
        return None
    contests = {each.cell: each for each in drawing.report.contests}
    figure, panels = panels_of(
        len(cells),
        "Time to first token by percentile: lower is better, the tail is on the right",
        labels=drawing.labels,
    )
    name_greys(figure, drawing.styles)
    for panel, cell in zip(panels, cells, strict=True):
        ends, first = [], []
        for policy, style in drawing.styles.items():
            for _, entry in drawing.values([cell], policy):
                values = entry.ttft_quantiles_s[:100]
                first.append(values[FIRST_PERCENT])
                xs = [_stretched(at / 100) for at in range(len(values))]
                draw_line(panel, xs, values, style)
                ends.append((values[-1], policy, style))
        panel.set_yscale("log")
        panel.set_ylim(bottom=min(first))
        panel.set_xticks([_stretched(q) for q in TICKS], [f"{q:.0%}" for q in TICKS])
        panel.set_xlim(0, _stretched(0.99))
        seconds_axis(panel, "TTFT")
        panel.set_xlabel("share of requests that were faster")
        name_ends(panel, ends)
        contest = contests.get(cell.name)
        versus = f"\nmean {percent(contest.difference)} against {contest.peer}" if contest else ""
        panel.set_title(title_of(cell) + versus)
    return figure


def _stretched(quantile: float) -> float:
    return -log(1 - quantile)


def draw_load(drawing: Drawing) -> Figure | None:
    """Mean TTFT against the arrival rate."""
    title = "Mean time to first token as load grows: the longer a line stays low, the better"
    return _draw_series(drawing, "speed", title, lambda entry: entry.ttft_mean_s.mean, _finish_load)


def _finish_load(panel: Axes, series: Series, ends: Sequence[End]) -> None:
    panel.set_yscale("log")
    # Lines that rise far above the others leave the panel, so that those can be told apart.
    near_s = [y for y, name, style in ends if style.named and name != FLOOR]
    if near_s and max(y for y, _, _ in ends) > CAP_RATIO * max(near_s):
        panel.set_ylim(top=CAP_RATIO * max(near_s))
    seconds_axis(panel, "mean TTFT")
    panel.set_xlabel("arrival rate, times the trace's own")
    xs = [x for x, _ in series]
    told = apart(xs, TICK_GAP * (xs[-1] - xs[0]))
    panel.set_xticks(xs, [f"×{x:g}" if x in told else "" for x in xs])


def apart(xs: Sequence[float], gap: float) -> list[float]:
    """Of ascending places those that are at least `gap` apart, the last one in any case."""
    kept: list[float] = []
    for x in reversed(xs):
        if not kept or kept[-1] - x >= gap:
            kept.append(x)
    return kept[::-1]


def draw_capacity(drawing: Drawing) -> Figure | None:
    """Hit ratio against the size of the caches, with the ceiling."""
    title = "Prefix hit ratio as caches grow: how close to what one pooled cache would reach"
    return _draw_series(
        drawing, "kv_blocks", title, lambda entry: entry.figures.hit_ratio, _finish_capacity
    )


def _finish_capacity(panel: Axes, series: Series, _: Sequence[End]) -> None:
    ceiling = [
        (x, mean(known))
        for x, entries in series
        if (known := [e.ceiling_ratio for e in entries if e.ceiling_ratio is not None])
    ]
    if ceiling:
        xs, ys = zip(*ceiling, strict=True)
        panel.fill_between(xs, ys, max(ys) * 1.12, color="#F0F0F0", linewidth=0)
        panel.plot(xs, ys, color="#666666", linewidth=1.2, linestyle=(0, (6, 3)))
        panel.annotate(
            "pooled LRU ceiling",
            ((xs[0] * xs[-1]) ** 0.5, max(ys) * 1.1),
            ha="center",
            va="top",
            color="#666666",
            fontsize=9,
        )
        panel.set_ylim(0, max(ys) * 1.12)
    panel.set_xscale("log", base=2)
    panel.set_xticks([x for x, _ in series], [f"{x:g}" for x, _ in series])
    panel.minorticks_off()
    panel.set_xlabel("KV blocks of 512 tokens per endpoint")
    panel.set_ylabel("share of prompt tokens found in cache")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _draw_series(
    drawing: Drawing,
    field: str,
    title: str,
    value: Callable[[Entry], float],
    finish: Callable[[Axes, Series, Sequence[End]], None],
) -> Figure | None:
    groups = series_of(drawing.cells.values(), field)
    groups = [g for g in groups if any(drawing.values(g, each) for each in drawing.styles)]
    if not groups:
        return None
    figure, panels = panels_of(len(groups), title, labels=drawing.labels)
    name_greys(figure, drawing.styles)
    for panel, group in zip(panels, groups, strict=True):
        at: dict[float, list[Entry]] = {float(getattr(cell, field)): [] for cell in group}
        ends = []
        for policy, style in drawing.styles.items():
            found = drawing.values(group, policy)
            xs = [float(getattr(cell, field)) for cell, _ in found]
            ys = [value(entry) for _, entry in found]
            if not found:
                continue
            for x, (_, entry) in zip(xs, found, strict=True):
                at[x].append(entry)
            draw_line(panel, xs, ys, style, marker="o")
            ends.append((ys[-1], policy, style))
        panel.set_xlim(min(at), max(at))
        finish(panel, list(at.items()), ends)
        name_ends(panel, ends)
        panel.set_title(title_of(group[-1], field))
    return figure


def draw_regret(drawing: Drawing) -> Figure | None:
    """Regret per decision of the policies that matter, and its parts where they are known."""
    with_regret = {entry.cell for entry in drawing.report.entries if entry.regret}
    cells = shown_cells(c for c in drawing.cells.values() if c.name in with_regret)
    if not any(entry.regret and entry.regret.causes_s for entry in drawing.report.entries):
        return None
    figure, panels = panels_of(
        len(cells),
        "Regret per decision: time to first token lost against the best endpoint, and why",
        names=drawing.report.policies,
    )
    for panel, cell in zip(panels, cells, strict=True):
        rows = [
            (policy, entry.regret)
            for policy in drawing.report.policies
            for _, entry in drawing.values([cell], policy)
            if entry.regret and (entry.regret.causes_s or drawing.is_named(policy))
        ]
        _draw_regrets(panel, sorted(rows, key=lambda row: -row[1].mean_s))
        panel.set_title(title_of(cell))
    figure.legend(
        *_legend(panels[0]),
        loc="lower left",
        bbox_to_anchor=(0.01, 0.0),
        ncols=len(CAUSES) + 1,
        frameon=False,
    )
    return figure


def _draw_regrets(panel: Axes, rows: Sequence[tuple[str, RegretFigures]]) -> None:
    """Bars, the least regret at the top; those far beyond the others are cut."""
    totals_s = [regret.mean_s for _, regret in rows]
    top_s = min(max(totals_s), CAP_RATIO * median(totals_s)) or 1e-3
    low_s = 0.0
    for y, (_, regret) in enumerate(rows):
        known = list(zip(CAUSES, regret.causes_s, strict=True)) if regret.causes_s else []
        right_s = left_s = 0.0
        for cause, cause_s in known or [(NOT_SPLIT, regret.mean_s)]:
            start_s = right_s if cause_s >= 0 else left_s
            panel.barh(y, cause_s, 0.62, left=start_s, color=CAUSE_COLOURS[cause])
            if cause_s >= 0:
                right_s += cause_s
            else:
                left_s += cause_s
        low_s = min(low_s, left_s)
        _tell_regret(panel, y, regret.mean_s, right_s if right_s <= top_s * 1.001 else None)
    panel.axvline(0, color="#333333", linewidth=1)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows])
    panel.set_xlim(max(low_s, -top_s) * 1.05, top_s * 1.15)
    panel.locator_params(axis="x", nbins=6)
    scale, unit = (1.0, "s") if top_s >= 1 else (1e3, "ms")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g} {unit}" if value else "0")
    panel.grid(visible=False, axis="y")


def _tell_regret(panel: Axes, y: int, regret_s: float, end_s: float | None) -> None:
    """Write it at the end of its bar, `None`: at the edge, which cuts the bar."""
    told = f"{regret_s * 1e3:.3g} ms" if regret_s < 1 else f"{regret_s:.3g} s"
    panel.annotate(
        f"{told} →" if end_s is None else told,
        (0.99, y) if end_s is None else (end_s, y),
        xycoords=("axes fraction", "data") if end_s is None else "data",
        xytext=(0 if end_s is None else 4, 0),
        textcoords="offset points",
        ha="right" if end_s is None else "left",
        va="center",
        fontsize=9,
    )


def _legend(panel: Axes) -> tuple[list[Artist], list[str]]:
    parts: list[Artist] = [
        panel.barh([0], [0], color=colour)[0] for colour in CAUSE_COLOURS.values()
    ]
    return parts, list(CAUSE_COLOURS)


def draw_balance(drawing: Drawing) -> Figure | None:
    """Least, mean and most requests in flight on an endpoint, over time, a panel per policy."""
    with_load = {entry.cell for entry in drawing.report.entries if entry.load}
    cells = shown_cells((c for c in drawing.cells.values() if c.name in with_load), 100)
    if not cells:
        return None
    cell = max(cells[:PANELS], key=lambda each: (each.speed, -cells.index(each)))
    named = [policy for policy, style in drawing.styles.items() if style.named]
    named.sort(key=lambda policy: policy != drawing.report.baseline)
    pairs = [(p, e) for p in named for _, e in drawing.values([cell], p) if e.load]
    shown = pairs[: BANDS - 1] + pairs[-1:] if len(pairs) > BANDS else pairs
    figure, panels = panels_of(
        len(shown),
        f"Requests in flight per endpoint, {title_of(cell)}: a narrow band is an even load",
        share_y=True,
    )
    top = max(point[3] for _, entry in shown for point in entry.load)
    for panel, (policy, entry) in zip(panels, shown, strict=True):
        at_s, least, middle, most = zip(*entry.load, strict=True)
        colour = drawing.styles[policy].colour
        panel.fill_between(at_s, least, most, color=colour, alpha=0.28, linewidth=0)
        panel.plot(at_s, middle, color=colour, linewidth=2)
        panel.set_ylim(0, top * 1.05)
        panel.set_xlim(0, at_s[-1])
        ratio = entry.figures.inflight_balance_ratio
        told = "" if ratio is None else f": fullest endpoint {ratio:.2f} × the mean"
        panel.set_title(policy + told)
        panel.set_xlabel("time, s")
    panels[0].set_ylabel("least, mean, most in flight")
    return figure


def draw_best_peer(drawing: Drawing) -> Figure | None:
    """Our distance to the best peer of each cell."""
    contests = drawing.report.contests
    if not contests:
        return None
    chosen = {c.name for c in shown_cells(drawing.cells.values(), FOREST_ROWS)}
    rows = [each for each in contests if each.cell in chosen][::-1]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.9 + 0.34 * len(rows)))
    panel = figure.subplots()
    panel.axvline(0, color="#333333", linewidth=1)
    colours = {"better": "#009E73", "worse": OURS_COLOUR}
    for y, each in enumerate(rows):
        d = each.difference
        colour = colours.get(d.verdict, "#777777")
        if d.low is not None and d.high is not None:
            panel.plot([d.low, d.high], [y, y], color=colour, linewidth=2.4, alpha=0.6)
        panel.plot(d.mean, y, "o", color=colour, markersize=6)
        told = f"{each.peer} {each.peer_s:.3g} s → {each.ours_s:.3g} s"
        panel.annotate(
            told, (1.015, y), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
    panel.set_yticks(range(len(rows)), [title_of(drawing.cells[each.cell]) for each in rows])
    panel.set_ylim(-0.7, len(rows) - 0.3)
    _difference_axis(panel, [end for each in rows for end in _ends(each.difference)])
    panel.set_xlabel("mean TTFT against the best peer, 95 % interval (left of 0: ours is faster)")
    height = figure.get_figheight()
    figure.suptitle(
        _told(drawing.report),
        x=0.02,
        y=1 - 0.15 / height,
        ha="left",
        va="top",
        fontsize=13,
        fontweight="bold",
    )
    figure.subplots_adjust(left=0.31, right=0.78, top=1 - 0.6 / height, bottom=0.7 / height)
    return figure


def _ends(interval: Interval) -> list[float]:
    return [v for v in (interval.mean, interval.low, interval.high) if v is not None]


def _difference_axis(panel: Axes, values: Sequence[float]) -> None:
    """Percent; when one cell is far off, linear up to 20 % and logarithmic beyond."""
    if max(map(abs, values)) > 0.5:
        panel.set_xscale("symlog", linthresh=0.2, linscale=2)
        ticks = [-1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0]
        low, high = min(0.0, *values), max(0.0, *values)
        panel.set_xticks([t for t in ticks if low * 1.3 - 0.05 <= t <= high * 1.3 + 0.05])
        panel.minorticks_off()
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")


def _told(report: Report) -> str:
    s = report.summary
    if s is None:
        return f"{report.baseline} against the best peer"
    return (
        f"{report.baseline} against the best peer of each cell: {s.geometric_mean:+.1%} mean TTFT;"
        f" better in {s.better}, level in {s.level}, worse in {s.worse}"
    )


PICTURES: Mapping[str, Callable[[Drawing], Figure | None]] = {
    "quantiles": draw_quantiles,
    "load": draw_load,
    "regret": draw_regret,
    "capacity": draw_capacity,
    "balance": draw_balance,
    "best-peer": draw_best_peer,
}
