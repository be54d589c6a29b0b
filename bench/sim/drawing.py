"""What pictures of a report share: which policies and cells they show, colours, panels, labels.

Ours is drawn thick, the policies that matter in colours that colour-blind people can tell apart,
all others in grey. Lines are named where they end; those in grey below the picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, log
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from bench.sim.experiments import PLAIN, Cell
from bench.sim.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS_COLOUR = "#D55E00"
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Okabe and Ito's, without yellow, which is too light for lines."""
ORACLE_COLOUR = "#000000"
OTHERS_COLOUR = "#BBBBBB"
FLOOR = "round-robin"
REFERENCE_EPP = "reference EPP 2/2/3"
ALWAYS_NAMED = (REFERENCE_EPP, FLOOR)
NAMED_PEERS = 6
PANELS = 4
LABEL_INCHES = 0.082
"""Width of a letter of a label, bold or not."""
ARROW_INCHES = 0.45
"""From a panel to its labels."""
AXIS_INCHES = 0.95
"""For the numbers and the name of a vertical axis."""
LABEL_GAP = 0.062
"""Least distance of two labels, as a share of the height of a panel of usual size."""
POINTS_MIN = 3
"""Of a curve: fewer show no shape."""
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


End = tuple[float, str, Style]
"""Where a line ends, the name of its policy, and how it is drawn."""

LOOK: Mapping[str, Any] = MappingProxyType(
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
    }
)


@contextmanager
def our_look() -> Iterator[None]:
    """What is drawn within looks alike. Raises: PlotsMissingError."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlotsMissingError(
            "plots need matplotlib: pip install 'envoy-endpoint-picker[plots]'"
        ) from error
    look: Any = dict(LOOK)  # its own type names every setting there is
    with mpl.rc_context(look):
        yield


# -- which, and how ------------------------------------------------------------------------


def styles_of(report: Report) -> dict[str, Style]:
    """How each policy is drawn, the best first: colours for the baseline, the oracle, the best
    peers overall (of several settings of one only the best), the reference EPP and round robin,
    grey for the others. Variants of ours are named, and drawn at all, only where there are no peers
    to compare with."""
    order = _best_first(report)
    kinds = report.policies
    others = [name for name in order if name != report.baseline]
    peers = [name for name in others if kinds[name] == "peer"]
    named = _named(peers or [name for name in others if kinds[name] == "ours"])
    colours = dict(zip(named, COLOURS, strict=False))
    styles = {}
    for name in order:
        if name == report.baseline:
            styles[name] = Style(OURS_COLOUR, 3.0, "-", True, 5)
        elif kinds[name] == "oracle":
            styles[name] = Style(ORACLE_COLOUR, 1.4, "--", True, 4)
        elif name in named:
            styles[name] = Style(colours[name], 1.8, "-", True, 3)
        elif kinds[name] != "ours":
            styles[name] = Style(OTHERS_COLOUR, 1.0, "-", False, 2)
    return styles


def _named(best_first: Sequence[str]) -> list[str]:
    """The names that get a colour."""
    always = [name for name in ALWAYS_NAMED if name in best_first]
    families: dict[str, str] = {}
    for name in best_first:
        if name not in always:
            families.setdefault(re.sub(r"-[\d.]+.*", "", name), name)
    return [*families.values()][: NAMED_PEERS - len(always)] + always


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
    """Groups of at least `POINTS_MIN` cells that differ in one field alone, in its order; those of
    usual size first."""
    blank = {"speed": 0.0, "kv_blocks": 0}[field]
    groups: dict[Cell, list[Cell]] = {}
    for cell in cells:
        if getattr(cell, field) is not None:
            groups.setdefault(msgspec.structs.replace(cell, **{field: blank}), []).append(cell)
    found = [sorted(g, key=lambda c: float(getattr(c, field))) for g in groups.values()]
    firsts = {group[-1].name: group for group in found if len(group) >= POINTS_MIN}
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


# -- parts of pictures ---------------------------------------------------------------------


def panels_of(
    count: int,
    title: str,
    *,
    labels: Iterable[str] = (),
    names: Iterable[str] = (),
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, and room for such labels to the right of each, or such names of
    rows to its left."""
    from matplotlib.figure import Figure

    columns = 1 if count == 1 else 2 if count <= 4 else 3
    rows = ceil(count / columns)
    width = {1: 9.5, 2: 14.0, 3: 17.0}[columns]
    figure = Figure(figsize=(width, 1.2 + 4.1 * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    height = figure.get_figheight()
    letters = max(map(len, labels), default=0)
    right = ARROW_INCHES + LABEL_INCHES * letters if letters else 0.3
    left = max(AXIS_INCHES, 0.3 + LABEL_INCHES * max(map(len, names), default=0))
    gap = 0.3 if share_y else right + left
    panel_width = (width - left - right - gap * (columns - 1)) / columns
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - 0.95 / height,
        bottom=0.9 / height,
        wspace=gap / panel_width,
        hspace=0.45,
    )
    figure.suptitle(
        title,
        x=0.25 / width,
        y=1 - 0.15 / height,
        ha="left",
        va="top",
        fontsize=14,
        fontweight="bold",
    )
    flat: list[Axes] = list(grid.flat)
    for panel in flat[count:]:
        panel.remove()
    return figure, flat[:count]


def name_greys(figure: Figure, styles: Mapping[str, Style]) -> None:
    """Which policies are drawn in grey, below the panels."""
    greys = [name for name, style in styles.items() if not style.named]
    if greys:
        width, height = figure.get_size_inches()
        figure.text(
            0.25 / width,
            0.12 / height,
            "grey, best first: " + ", ".join(greys),
            color="#777777",
            fontsize=9,
            va="bottom",
        )


def draw_line(
    panel: Axes, xs: Sequence[float], ys: Sequence[float], style: Style, marker: str = ""
) -> None:
    """A line in its style, with marks if it is one of the named."""
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


def seconds_axis(panel: Axes, what: str) -> None:
    """Label a logarithmic axis of seconds."""

    def text(value: float, _: float) -> str:
        return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"

    panel.set_ylabel(what)
    panel.yaxis.set_major_formatter(text)
    low, high = panel.get_ylim()
    if high / low < 30:  # label some of the steps between the powers of ten
        from matplotlib.ticker import LogLocator

        steps = (1, 1.5, 2, 3, 5, 7) if high / low < 6 else (1, 2, 5)
        panel.yaxis.set_major_locator(LogLocator(subs=steps))
    panel.yaxis.set_minor_formatter(lambda _value, _at: "")


def name_ends(panel: Axes, ends: Sequence[End]) -> None:
    """Names of the lines to the right of where they end, moved apart where they would overlap."""
    named = [end for end in ends if end[2].named]
    low, high = panel.get_ylim()
    scale = log if panel.get_yscale() == "log" else float
    heights = [min(1.0, (scale(y) - scale(low)) / (scale(high) - scale(low))) for y, _, _ in named]
    for (y, name, style), place, height in zip(named, spread_out(heights), heights, strict=True):
        panel.annotate(
            name if y <= high else f"{name} ↑",
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
    """Heights 0..1 moved apart to at least `gap`, in the same order and within 0..1 while there is
    room: those that would touch are centred on the mean of their members."""
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
    top, bottom = 1.0, 0.0
    for at in reversed(order):
        places[at] = min(places[at], top)
        top = places[at] - gap
    for at in order:
        places[at] = max(places[at], bottom)
        bottom = places[at] + gap
    return places


def _bottom(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return mean(heights[at] for at in run) - gap * len(run) / 2


def _top(run: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _bottom(run, heights, gap) + gap * len(run)
