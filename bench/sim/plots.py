"""The report as pictures, each with one thing to see and titled with it.

quantiles.png    TTFT of every percentile per policy: the distribution function on its side, with
                 the tail stretched, so that each line can be named where it ends
load.png         mean TTFT as the arrival rate grows
capacity.png     prefix hit ratio as caches grow, below what one pooled cache would reach
balance.png      requests in flight per endpoint over time: a narrow band is an even load
best-peer.png    our mean TTFT against the best peer of each cell, with 95 % intervals

A picture needs cells that differ in what it shows; where there are none it is left out. Ours is
drawn thick, the policies that matter in colours that colour-blind people can tell apart, all others
in grey. Needs matplotlib, imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from math import ceil, log
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from bench.sim.experiments import PLAIN, Cell
from bench.sim.report import Entry, Report, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS_COLOUR = "#D55E00"
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Okabe and Ito's, without yellow, which is too light for lines."""
ORACLE_COLOUR = "#000000"
OTHERS_COLOUR = "#BBBBBB"
FLOOR = "round-robin"
NAMED_PEERS = 5
PANELS = 6
FOREST_ROWS = 40
LABEL_GAP = 0.062
"""Least distance of two labels, as a share of the height of a panel of usual size."""
TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99)
USUAL = (2048, 8)
"""KV blocks and endpoints of the cells that are shown when not all can be."""


class PlotsMissingError(Exception):
    """matplotlib is not installed."""


class Style(NamedTuple):
    """How a policy is drawn."""

    colour: str
    width: float
    dashes: str
    named: bool
    above: int
    """What is drawn later hides what is drawn earlier."""


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


def write_plots(report: Report, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw every picture that the report has the cells for; returns the files.

    Raises: PlotsMissingError without matplotlib.
    """
    _use_matplotlib()
    drawing = Drawing(
        report,
        {cell.name: cell for cell in cells},
        styles_of(report),
        {(entry.cell, entry.policy): entry for entry in report.entries},
    )
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(drawing)
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        if figure is not None:
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _use_matplotlib() -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlotsMissingError(
            "plots need matplotlib: pip install 'envoy-endpoint-picker[plots]'"
        ) from error
    mpl.use("agg")
    mpl.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E6E6E6",
            "grid.linewidth": 0.8,
            "axes.axisbelow": True,
            "figure.constrained_layout.use": False,
        }
    )


# -- which, and how ------------------------------------------------------------------------


def styles_of(report: Report) -> dict[str, Style]:
    """Colours for ours, the oracle, the best peers overall and round robin; grey for the rest."""
    order = _best_first(report)
    peers = [name for name in order if report.policies[name] in ("peer", "control")]
    named = [name for name in peers if report.policies[name] == "peer"][:NAMED_PEERS]
    named += [FLOOR] * (FLOOR in peers and FLOOR not in named)
    colours = cycle(COLOURS)
    styles = {}
    for name in order:
        kind = report.policies[name]
        if name == report.reference:
            styles[name] = Style(OURS_COLOUR, 3.0, "-", True, 5)
        elif kind == "oracle":
            styles[name] = Style(ORACLE_COLOUR, 1.4, "--", True, 4)
        elif kind == "ours":
            styles[name] = Style(OURS_COLOUR, 1.6, ":", True, 4)
        elif name in named:
            styles[name] = Style(next(colours), 1.8, "-", True, 3)
        else:
            styles[name] = Style(OTHERS_COLOUR, 1.0, "-", False, 2)
    return styles


def _best_first(report: Report) -> list[str]:
    """Policies by the geometric mean of their TTFT over the cells that all of them have."""
    values: dict[str, dict[str, float]] = {}
    for entry in report.entries:
        values.setdefault(entry.policy, {})[entry.cell] = log(entry.ttft_mean_s.mean)
    common = set.intersection(*map(set, values.values())) if values else set()
    known = [name for name in report.policies if name in values]
    return sorted(known, key=lambda name: mean(values[name][c] for c in common) if common else 0.0)


def shown_cells(cells: Iterable[Cell], most: int = PANELS) -> list[Cell]:
    """At most so many, as different as they get: one per workload, situation and speed first,
    those of usual size before the others."""

    def unusual(cell: Cell) -> float:
        blocks, endpoints = USUAL
        return abs(log((cell.kv_blocks or blocks) / blocks)) + abs(log(cell.endpoints / endpoints))

    picked: dict[tuple[str, str, float], Cell] = {}
    ordered = sorted(cells, key=unusual)
    for cell in ordered:
        picked.setdefault((cell.workload, cell.situation, cell.speed), cell)
    rest = [cell for cell in ordered if cell not in picked.values()]
    return _spread([*picked.values()], most) + rest[: max(0, most - len(picked))]


def _spread(cells: Sequence[Cell], most: int) -> list[Cell]:
    """The first of every workload, then the second of each, ..."""
    turns: dict[str, int] = {}
    ranks = []
    for cell in cells:
        ranks.append(turns.setdefault(cell.workload, 0))
        turns[cell.workload] += 1
    ranked = sorted(zip(ranks, range(len(cells)), strict=True))
    return [cells[at] for _, at in sorted(ranked[:most], key=lambda pair: pair[1])]


def series_of(cells: Iterable[Cell], field: str, most: int = PANELS) -> list[list[Cell]]:
    """Groups of at least two cells that differ in one field alone, in its order; those of usual
    size first."""
    blank = {"speed": 0.0, "kv_blocks": 0}[field]
    groups: dict[Cell, list[Cell]] = {}
    for cell in cells:
        if getattr(cell, field) is not None:
            groups.setdefault(msgspec.structs.replace(cell, **{field: blank}), []).append(cell)
    found = [sorted(g, key=lambda c: float(getattr(c, field))) for g in groups.values()]
    firsts = {group[-1].name: group for group in found if len(group) > 1}
    wanted = shown_cells([group[-1] for group in firsts.values()], most)
    return [firsts[cell.name] for cell in wanted]


def title_of(cell: Cell, left_out: str = "") -> str:
    """A cell in words."""
    parts = [cell.workload if left_out == "speed" else f"{cell.workload} ×{cell.speed:g}"]
    if cell.kv_blocks is not None and left_out != "kv_blocks":
        parts.append(f"{cell.kv_blocks} blocks")
    parts.append(f"{cell.endpoints} endpoints")
    parts += [cell.situation.replace("-", " ")] * (cell.situation != PLAIN)
    parts += ["mixed speeds"] * bool(cell.speeds)
    return ", ".join(parts)


# -- pictures ------------------------------------------------------------------------------


def draw_quantiles(drawing: Drawing) -> Figure | None:
    """TTFT by percentile."""
    with_quantiles = {e.cell for e in drawing.report.entries if e.ttft_quantiles_s}
    cells = shown_cells(c for c in drawing.cells.values() if c.name in with_quantiles)
    if not cells:
        return None
    contests = {each.cell: each for each in drawing.report.contests}
    figure, panels = _panels(
        len(cells), "Time to first token by percentile: lower is better, the tail is on the right"
    )
    for panel, cell in zip(panels, cells, strict=True):
        ends = []
        for policy, style in drawing.styles.items():
            for _, entry in drawing.values([cell], policy):
                values = entry.ttft_quantiles_s[:100]
                xs = [_stretched(at / 100) for at in range(len(values))]
                _line(panel, xs, values, style)
                ends.append((values[-1], policy, style))
        panel.set_yscale("log")
        panel.set_xticks([_stretched(q) for q in TICKS], [f"{q:.0%}" for q in TICKS])
        panel.set_xlim(0, _stretched(0.99))
        _seconds_axis(panel, "TTFT")
        panel.set_xlabel("share of requests that were faster")
        _name_ends(panel, ends)
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


def _finish_load(panel: Axes, series: Sequence[tuple[float, list[Entry]]]) -> None:
    panel.set_yscale("log")
    _seconds_axis(panel, "mean TTFT")
    panel.set_xlabel("arrival rate, times the trace's own")
    panel.set_xticks([x for x, _ in series], [f"×{x:g}" for x, _ in series])


def draw_capacity(drawing: Drawing) -> Figure | None:
    """Hit ratio against the size of the caches, with the ceiling."""
    title = "Prefix hit ratio as caches grow: how close to what one pooled cache would reach"
    return _draw_series(
        drawing, "kv_blocks", title, lambda entry: entry.figures.hit_ratio, _finish_capacity
    )


def _finish_capacity(panel: Axes, series: Sequence[tuple[float, list[Entry]]]) -> None:
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
    finish: Callable[[Axes, Sequence[tuple[float, list[Entry]]]], None],
) -> Figure | None:
    groups = series_of(drawing.cells.values(), field)
    groups = [g for g in groups if any(drawing.values(g, each) for each in drawing.styles)]
    if not groups:
        return None
    figure, panels = _panels(len(groups), title)
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
            _line(panel, xs, ys, style, marker="o")
            ends.append((ys[-1], policy, style))
        panel.set_xlim(min(at), max(at))
        finish(panel, list(at.items()))
        _name_ends(panel, ends)
        panel.set_title(title_of(group[-1], field))
    return figure


def draw_balance(drawing: Drawing) -> Figure | None:
    """Least, mean and most requests in flight on an endpoint, over time, a panel per policy."""
    with_load = {entry.cell for entry in drawing.report.entries if entry.load}
    cells = shown_cells((c for c in drawing.cells.values() if c.name in with_load), 100)
    if not cells:
        return None
    cell = max(cells[:PANELS], key=lambda each: (each.speed, -cells.index(each)))
    named = [p for p, style in drawing.styles.items() if style.named and p in drawing.styles]
    shown = [(p, e) for p in named for _, e in drawing.values([cell], p) if e.load][:PANELS]
    figure, panels = _panels(
        len(shown),
        f"Requests in flight per endpoint, {title_of(cell)}: a narrow band is an even load",
        share_y=True,
        labels=False,
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
        panel.set_ylabel("least, mean, most in flight")
    return figure


def draw_best_peer(drawing: Drawing) -> Figure | None:
    """Our distance to the best peer of each cell."""
    contests = drawing.report.contests
    if not contests:
        return None
    chosen = {c.name for c in shown_cells(drawing.cells.values(), FOREST_ROWS)}
    rows = [each for each in contests if each.cell in chosen][::-1]
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(12, 1.9 + 0.34 * len(rows)))
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
    figure.suptitle(_told(drawing.report), x=0.02, ha="left", fontsize=13, fontweight="bold")
    figure.subplots_adjust(
        left=0.3,
        right=0.76,
        top=1 - 0.75 / figure.get_figheight(),
        bottom=0.7 / figure.get_figheight(),
    )
    return figure


def _ends(interval: Any) -> list[float]:
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
        return f"{report.reference} against the best peer"
    return (
        f"{report.reference} against the best peer of each cell: {s.geometric_mean:+.1%} mean TTFT;"
        f" better in {s.better}, level in {s.level}, worse in {s.worse}"
    )


PICTURES: Mapping[str, Callable[[Drawing], Figure | None]] = {
    "quantiles": draw_quantiles,
    "load": draw_load,
    "capacity": draw_capacity,
    "balance": draw_balance,
    "best-peer": draw_best_peer,
}


# -- parts of pictures ---------------------------------------------------------------------


def _panels(
    count: int, title: str, *, share_y: bool = False, labels: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, room for labels to the right of each."""
    import matplotlib.pyplot as plt

    columns = 1 if count == 1 else 2 if count in (2, 4) else 3
    rows = ceil(count / columns)
    width = {1: 9.5, 2: 14.0, 3: 17.0}[columns]
    figure, grid = plt.subplots(
        rows, columns, figsize=(width, 0.9 + 4.1 * rows), squeeze=False, sharey=share_y
    )
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - (1.55 if labels else 0.3) / width,
        top=1 - 1.05 / height,
        bottom=0.6 / height,
        wspace=0.62 if labels else 0.2,
        hspace=0.42,
    )
    figure.suptitle(title, x=0.25 / width, ha="left", fontsize=14, fontweight="bold")
    flat: list[Axes] = list(grid.flat)
    for panel in flat[count:]:
        panel.remove()
    return figure, flat[:count]


def _line(
    panel: Axes, xs: Sequence[float], ys: Sequence[float], style: Style, marker: str = ""
) -> None:
    panel.plot(
        xs,
        ys,
        color=style.colour,
        linewidth=style.width,
        linestyle=style.dashes,
        zorder=style.above,
        marker=marker if style.named else "",
        markersize=4,
    )


def _seconds_axis(panel: Axes, what: str) -> None:
    def text(value: float, _: int) -> str:
        return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"

    panel.set_ylabel(what)
    panel.yaxis.set_major_formatter(text)
    low, high = panel.get_ylim()
    if high / low < 20:  # a decade or so: label some of the steps between the powers of ten
        from matplotlib.ticker import LogLocator

        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_formatter(lambda _value, _at: "")


def _name_ends(panel: Axes, ends: Sequence[tuple[float, str, Style]]) -> None:
    """Names of the lines to the right of where they end, moved apart where they would overlap."""
    named = [end for end in ends if end[2].named]
    low, high = panel.get_ylim()
    scale = log if panel.get_yscale() == "log" else float
    heights = [(scale(y) - scale(low)) / (scale(high) - scale(low)) for y, _, _ in named]
    for (y, name, style), place, height in zip(named, spread_out(heights), heights, strict=True):
        panel.annotate(
            name,
            xy=(1.0, height),
            xycoords="axes fraction",
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=style.colour,
            fontsize=9,
            fontweight="bold" if style.above == 5 else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": style.colour,
                "linewidth": 0.7,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def spread_out(heights: Sequence[float], gap: float = LABEL_GAP) -> list[float]:
    """Heights 0..1 moved apart to at least `gap`, in the same order, each as little as is simple:
    runs that touch are centred on the mean of their members."""
    order = sorted(range(len(heights)), key=lambda at: heights[at])
    runs: list[list[int]] = []
    for at in order:
        runs.append([at])
        while len(runs) > 1 and _bottom(runs[-1], heights, gap) < _top(runs[-2], heights, gap):
            last = runs.pop()
            runs[-1] += last
    places = [0.0] * len(heights)
    for run in runs:
        for step, at in enumerate(run):
            places[at] = _bottom(run, heights, gap) + gap * (step + 0.5)
    return places


def _bottom(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return mean(heights[at] for at in run) - gap * len(run) / 2


def _top(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _bottom(run, heights, gap) + gap * len(run)
