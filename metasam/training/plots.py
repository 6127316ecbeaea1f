"""Learning curves as pictures. matplotlib is imported when one is drawn, and never opens a window."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

Curve = list[tuple[float, float]]

TRAIN, VALIDATION = "#9aa5b1", "#1f6f8b"
PALETTE = ("#6b7280", "#1f6f8b", "#c2571a", "#5b8c3a", "#7a4ea3", "#a3324f")


def learning_curve(entries: list[dict[str, Any]], path: Path, title: str = "") -> bool:
    """Draw training and validation accuracy (loss, for regression) over the iterations of one run, with 95% band.

    Args:
        entries: lines of ``metrics.jsonl``, see `metasam.training.metrics.read`.
        path: PNG to write.
        title: heading, usually what was trained on what.

    Returns:
        Whether a picture was drawn: False if there is nothing to show or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # a bare Figure draws with Agg and leaves pyplot's backend alone
    except ImportError:
        return False
    quantity = "accuracy" if any(e.get("accuracy") is not None for e in entries) else "loss"
    train = [(e["iteration"], e[quantity]) for e in entries if e.get(quantity) is not None]
    validation = [
        (e["iteration"], e[f"validation_{quantity}"], e.get("validation_ci95") or 0.0)
        for e in entries
        if e.get(f"validation_{quantity}") is not None
    ]
    if not train:
        return False
    scale = 100 if quantity == "accuracy" else 1
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    window = max(1, len(train) // 50)
    steps, means = _running_mean(train, window)
    label = "training tasks" + (f", mean of {window} steps" if window > 1 else "")
    axes.plot(steps, [scale * m for m in means], color=TRAIN, linewidth=1.2, label=label)
    if validation:
        at, mean, half = ([v[i] for v in validation] for i in range(3))
        low = [scale * (m - h) for m, h in zip(mean, half, strict=True)]
        high = [scale * (m + h) for m, h in zip(mean, half, strict=True)]
        axes.fill_between(at, low, high, color=VALIDATION, alpha=0.18, linewidth=0)
        axes.plot(
            at,
            [scale * m for m in mean],
            color=VALIDATION,
            marker="o",
            markersize=3.5,
            label="validation tasks, 95% interval",
        )
    axes.set_xlabel("iteration (meta-update)")
    axes.set_ylabel("query accuracy after adaptation, %" if quantity == "accuracy" else "query loss after adaptation")
    axes.set_xlim(left=0)
    if title:
        axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    _tidy(axes)
    _save(figure, path)
    return True


def comparison(
    curves: dict[str, list[Curve]], finals: dict[str, tuple[float, float]], path: Path, title: str = ""
) -> bool:
    """Draw several variants: validation accuracy against what it cost, and the final accuracies with 95% intervals.

    Args:
        curves: for each variant the curve of each seed.
        finals: for each variant its test accuracy and the half-width of the interval.
        path: PNG to write.
        title: heading.

    Returns:
        Whether a picture was drawn: False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, (name, seeds) in enumerate(curves.items()):
        color = PALETTE[i % len(PALETTE)]
        for curve in seeds:
            left.plot(*_percent(curve), color=color, linewidth=0.8, alpha=0.35)
        left.plot(*_percent(_mean_curve(seeds)), color=color, marker="o", markersize=3.5, label=name)
        mean, half = finals[name]
        right.errorbar(i, 100 * mean, 100 * half, color=color, marker="o", capsize=4)
    left.set_xlabel("gradient evaluations (1 = a plain MAML step)")
    left.set_ylabel("validation accuracy, %")
    left.legend(frameon=False)
    right.set_xticks(range(len(finals)), list(finals))
    right.set_xlim(-0.5, len(finals) - 0.5)
    right.set_ylabel("test accuracy, %, with 95% interval over tasks")
    figure.suptitle(title, fontsize=10)
    for axes in (left, right):
        _tidy(axes)
    _save(figure, path)
    return True


def _mean_curve(seeds: list[Curve]) -> Curve:
    """Mean of curves that were measured at the same costs."""
    columns = list(zip(*seeds, strict=True))
    return [(column[0][0], math.fsum(v for _, v in column) / len(column)) for column in columns]


def _percent(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [100 * y for _, y in curve]


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _save(figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=150, format="png")
    partial.replace(path)


def _running_mean(points: list[tuple[int, float]], window: int) -> tuple[list[int], list[float]]:
    """Means of consecutive groups, each placed at its last iteration."""
    groups = [points[i : i + window] for i in range(0, len(points), window)]
    return [g[-1][0] for g in groups], [math.fsum(v for _, v in g) / len(g) for g in groups]
