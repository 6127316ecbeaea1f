"""Pictures of an ablation. matplotlib is imported when one is drawn, and never opens a window.

Where SAM acts has one color and one marker throughout, told apart with any color vision and in print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import _save, _tidy
from .statistics import interval, span

PLACES = {"none": "no SAM", "low": "inner loop", "up": "outer loop", "both": "both loops"}
"""Where SAM acts, as people read it."""

COLORS = {"none": "#4d4d4d", "low": "#0072b2", "up": "#d55e00", "both": "#009e73"}  # of Okabe and Ito
MARKERS = {"none": "o", "low": "s", "up": "^", "both": "D"}
DASHES = {"none": "--", "low": "-", "up": "-", "both": "-"}

Band = list[tuple[float, float, float]]
"""Points of a curve over seeds: at, mean, half width of the 95% t-interval (NaN for one seed)."""


@dataclass(frozen=True)
class Mark:
    """One row of a plot of intervals: a rule, where it acts, what was found, and whether that is a claim."""

    rule: str
    where: str
    mean: float
    half: float
    claim: bool = True


@dataclass(frozen=True)
class Panel:
    """Intervals that share an axis, with the half width of the band that counts as no difference (0: none drawn)."""

    marks: Sequence[Mark]
    margin: float = 0.0


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> Band:
    """Mean and interval over seeds of curves, at the points that all of them have.

    >>> band([[(10, 0.5), (20, 0.6)], [(10, 0.5)]])
    [(10, 0.5, 0.0)]
    """
    by_point = [{x: y for x, y in curve if y is not None and math.isfinite(y)} for curve in curves]
    common = set.intersection(*map(set, by_point)) if by_point else set()
    return [(x, *interval([points[x] for points in by_point])) for x in sorted(common)]


def forest(rows: Mapping[str, Mapping[str, Panel]], path: Path, quantity: str, title: str = "") -> bool:
    """Draw differences to no SAM with their intervals, the margin of equivalence shaded.

    Args:
        rows: by setting (a row of panels), then by budget (a column), what to draw.
        path: PNG to write.
        quantity: "accuracy", drawn in points, or "loss".
        title: heading.

    Returns:
        Whether a picture was drawn: False if there is nothing to show or matplotlib is not installed.
    """
    columns = list(dict.fromkeys(c for panels in rows.values() for c in panels))
    panels = {(r, c): rows[r][c] for r in rows for c in rows[r]}
    if not any(_finite(panel) for panel in panels.values()):
        return False
    better = "right of 0: better than no SAM" if quantity == "accuracy" else "left of 0: better than no SAM"
    unit = "points of accuracy" if quantity == "accuracy" else "difference in loss"
    margins = {p.margin for p in panels.values() if p.margin}
    within = f"within {span(margins.pop(), quantity)}" if len(margins) == 1 else "within the margin"
    return _intervals(
        panels, list(rows), columns, path, title, unit, quantity, zero=True, notes=(better, f"shaded: {within}")
    )


def dots(panels: Mapping[str, Panel], path: Path, axis: str, title: str = "") -> bool:
    """Draw a mean with its interval for every rule and place, in one panel a quantity, each with its own axis.

    Returns:
        Whether a picture was drawn: False if there is nothing to show or matplotlib is not installed.
    """
    if not any(_finite(panel) for panel in panels.values()):
        return False
    return _intervals({("", name): panel for name, panel in panels.items()}, [""], list(panels), path, title, axis)


def _intervals(
    panels: Mapping[tuple[str, str], Panel],
    rows: Sequence[str],
    columns: Sequence[str],
    path: Path,
    title: str,
    axis: str,
    quantity: str = "loss",
    *,
    zero: bool = False,
    notes: Sequence[str] = (),
) -> bool:
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        return False
    places = [{c: _places(panels[r, c].marks) for c in columns if (r, c) in panels} for r in rows]
    layout = [_lines([line for found in row.values() for line in found]) for row in places]
    heights = [len(lines) + 1 for lines in layout]
    width = 1.6 + (2.3 if len(columns) > 2 else 3.8) * len(columns)
    figure = Figure(figsize=(width, 1.3 + 0.24 * sum(heights) + 0.45 * len(rows)), layout="constrained")
    grid = figure.subplots(
        len(rows), len(columns), squeeze=False, height_ratios=heights, sharex="all" if zero else "none", sharey="row"
    )
    scale = 100 if quantity == "accuracy" else 1
    for i, row in enumerate(rows):
        at = {line: len(layout[i]) - 1 - k for k, line in enumerate(layout[i])}
        for j, column in enumerate(columns):
            axes, panel = grid[i][j], panels.get((row, column), Panel(()))
            if zero:
                if panel.margin:
                    axes.axvspan(-scale * panel.margin, scale * panel.margin, color="#000000", alpha=0.09, linewidth=0)
                axes.axvline(0, color="#333333", linewidth=0.9)
            for mark in panel.marks:
                if not math.isfinite(mark.mean):
                    continue
                color = COLORS[mark.where]
                axes.errorbar(
                    scale * mark.mean,
                    at[mark.rule, mark.where],
                    xerr=None if math.isnan(mark.half) else scale * mark.half,
                    color=color,
                    marker=MARKERS[mark.where],
                    markersize=6,
                    markerfacecolor=color if mark.claim else "white",
                    markeredgewidth=1.4,
                    linewidth=1.5,
                    capsize=3,
                )
            axes.set_ylim(-0.7, len(layout[i]) - 0.3)
            if j == 0:  # the others share its axis
                axes.set_yticks(list(at.values()), [PLACES[where] if where else rule for rule, where in at])
                for tick, (_, where) in zip(axes.get_yticklabels(), at, strict=True):
                    tick.set_fontweight("normal" if where else "bold")
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", alpha=0.25)
            axes.spines[["top", "right", "left"]].set_visible(False)
            if zero:
                axes.set_title(f"{row}\n{column}" if len(rows) > 1 else column, fontsize=9.5, loc="left")
            else:
                axes.set_title(column, fontsize=9.5, loc="left")
                axes.locator_params(axis="x", nbins=4)
            axes.tick_params(labelsize=9)
    if zero:
        for axes in grid[-1]:
            axes.set_xlabel(axis, fontsize=9.5)
        shown: dict[str, Any] = {"color": "#333333", "marker": "o", "linewidth": 1.5}
        handles: list[Any] = [
            Line2D([], [], **shown, label="significant after adjustment"),
            Line2D([], [], **shown, markerfacecolor="white", label="not significant"),
            *(Line2D([], [], linestyle="none", label=note) for note in notes),
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=2 if len(columns) > 1 else 1, frameon=False, fontsize=9
        )
    if title:
        figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    if not zero:
        figure.supxlabel(axis, fontsize=9.5)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08, h_pad=0.06)
    _save(figure, path)
    return True


def _finite(panel: Panel) -> bool:
    return any(math.isfinite(mark.mean) for mark in panel.marks)


def _places(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    return [(mark.rule, mark.where) for mark in marks]


def _lines(places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lines of a plot, top to bottom: every rule as a heading over the places where it acts."""
    lines: list[tuple[str, str]] = []
    for rule in dict.fromkeys(rule for rule, _ in places):
        if rule:
            lines.append((rule, ""))
        lines += [(rule, where) for where in PLACES if (rule, where) in places]
    return lines


def curves(
    panels: Mapping[str, Mapping[str, Band]],
    path: Path,
    x: str,
    y: str,
    title: str = "",
    *,
    percent: bool = False,
    settled: bool = False,
) -> bool:
    """Draw curves over seeds, one panel a rule, one line for every place where SAM acts, with 95% bands.

    Args:
        panels: by rule, then by place.
        path: PNG to write.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        title: heading.
        percent: draw fractions as percentages.
        settled: let the steep start run out of the picture, for the sake of the rest.

    Returns:
        Whether a picture was drawn: False if there is nothing to show or matplotlib is not installed.
    """
    panels = {rule: found for rule, lines in panels.items() if (found := {w: b for w, b in lines.items() if b})}
    if not panels:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    scale = 100 if percent else 1
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = {1: 6.2, 2: 8.2, 3: 10.4}[columns]
    figure = Figure(figsize=(width, 1.1 + 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    handles: dict[str, Any] = {}
    for axes, (rule, lines) in zip(grid, panels.items(), strict=False):
        for where in PLACES:
            points = lines.get(where, [])
            if not points:
                continue
            at = [p[0] for p in points]
            mean = [scale * p[1] for p in points]
            half = [scale * p[2] for p in points]
            color = COLORS[where]
            if not any(map(math.isnan, half)):
                low = [m - h for m, h in zip(mean, half, strict=True)]
                high = [m + h for m, h in zip(mean, half, strict=True)]
                axes.fill_between(at, low, high, color=color, alpha=0.14, linewidth=0)
            (handles[where],) = axes.plot(
                at,
                mean,
                color=color,
                linestyle=DASHES[where],
                linewidth=1.6,
                marker=MARKERS[where],
                markersize=4.5,
                markevery=max(1, len(at) // 8),
                label=PLACES[where],
            )
        axes.set_title(rule, fontsize=10, fontweight="bold", loc="left")
        axes.tick_params(labelsize=9)
        _tidy(axes)
    if settled:
        grid[0].set_ylim(*_settled(panels, scale))
    for i, axes in enumerate(grid):
        axes.set_visible(i < len(panels))
        if i % columns == 0:
            axes.set_ylabel(y, fontsize=9.5)
        if i + columns >= len(panels):  # nothing is drawn below it
            axes.set_xlabel(x, fontsize=9.5)
            axes.tick_params(labelbottom=True)
    shown = [handles[where] for where in PLACES if where in handles]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9.5)
    if title:
        figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    _save(figure, path)
    return True


def _settled(panels: Mapping[str, Mapping[str, Band]], scale: float) -> tuple[float, float]:
    """Limits that hold every band from a sixth of its way on."""
    bands = [points for lines in panels.values() for points in lines.values()]
    rest = [
        (m - (0 if math.isnan(h) else h), m + (0 if math.isnan(h) else h))
        for points in bands
        for x, m, h in points
        if x >= points[-1][0] / 6
    ]
    low, high = min(a for a, _ in rest), max(b for _, b in rest)
    pad = 0.05 * (high - low) or 0.01
    return scale * (low - pad), scale * (high + pad)
