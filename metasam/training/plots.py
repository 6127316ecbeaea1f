"""Learning curves as pictures. matplotlib is imported when one is drawn, and never opens a window."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .budget import Budget
from .learner import Words

Curve = list[tuple[float, float]]

TRAIN, VALIDATION = "#9aa5b1", "#1f6f8b"
PALETTE = ("#6b7280", "#1f6f8b", "#c2571a", "#5b8c3a", "#7a4ea3", "#a3324f")


def learning_curve(
    entries: list[dict[str, Any]],
    path: Path,
    title: str = "",
    words: Words = Words("training", "validation", "{}"),  # noqa: B008 - a constant
    budget: Budget | None = None,
) -> bool:
    """Draw training and validation accuracy (loss, for regression) of one run, with 95% band.

    Args:
        entries: lines of ``metrics.jsonl``, see `metasam.training.metrics.read`.
        path: PNG to write.
        title: heading, usually what was trained on what.
        words: what the curves are called.
        budget: of the run; one of gradient evaluations makes them the horizontal axis, in place of iterations.

    Returns:
        Whether a picture was drawn: False if there is nothing to show or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # a bare Figure draws with Agg and leaves pyplot's backend alone
    except ImportError:
        return False
    quantity = "accuracy" if any(e.get("accuracy") is not None for e in entries) else "loss"
    along = "iteration" if budget is None or budget.passes is None else "gradient_evaluations"
    train = [(e[along], e[quantity]) for e in entries if e.get(quantity) is not None]
    validation = [
        (e[along], e[f"validation_{quantity}"], e.get("validation_ci95") or 0.0)
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
    label = words.train + (f", mean of {window} steps" if window > 1 else "")
    axes.plot(steps, [scale * m for m in means], color=TRAIN, linewidth=1.2, label=label)
    if validation:
        at, mean, half = ([v[i] for v in validation] for i in range(3))
        low = [max(0.0, scale * (m - h)) for m, h in zip(mean, half, strict=True)]
        high = [scale * (m + h) for m, h in zip(mean, half, strict=True)]
        axes.fill_between(at, low, high, color=VALIDATION, alpha=0.18, linewidth=0)
        axes.plot(
            at,
            [scale * m for m in mean],
            color=VALIDATION,
            marker="o",
            markersize=3.5,
            label=f"{words.validation}, 95% interval",
        )
    axes.set_xlabel(along.replace("_", " "))
    axes.set_ylabel(words.quantity.format(quantity) + (", %" if quantity == "accuracy" else ""))
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


def rivals(
    curves: dict[str, list[Curve]],
    finals: dict[str, tuple[float, float]],
    path: Path,
    quantity: str = "accuracy",
    title: str = "",
) -> bool:
    """Draw rules against each other: mean validation curves against compute, and final results, the best on top.

    Args:
        curves: for each rule the curve of each seed.
        finals: for each rule its result and the half-width of the interval.
        path: PNG to write.
        quantity: "accuracy" or "loss".
        title: heading.

    Returns:
        Whether a picture was drawn: False if matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        return False
    scale, unit = (100, ", %") if quantity == "accuracy" else (1, "")
    order = sorted(finals, key=lambda name: finals[name][0], reverse=quantity == "loss")  # the axis goes upwards
    colors = PALETTE if len(order) <= len(PALETTE) else [colormaps["tab20"](i) for i in range(20)]
    color = {name: colors[i % len(colors)] for i, name in enumerate(finals)}
    figure = Figure(figsize=(10, max(4.2, 1.2 + 0.27 * len(order))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, seeds in curves.items():
        points = _mean_curve(seeds)
        style = "-" if list(curves).index(name) < len(colors) else "--"
        x, y = [x for x, _ in points], [scale * y for _, y in points]
        left.plot(x, y, style, color=color[name], linewidth=1.4, label=name)
    for row, name in enumerate(order):
        mean, half = finals[name]
        error = None if math.isnan(half) else scale * half
        filled = color[name] if list(finals).index(name) < len(colors) else "white"  # as its line is dashed
        right.errorbar(scale * mean, row, xerr=error, color=color[name], marker="o", markerfacecolor=filled, capsize=3)
    left.set_xlabel("gradient evaluations")
    left.set_ylabel(f"validation {quantity}{unit}, mean of seeds")
    right.set_yticks(range(len(order)), order)
    right.set_xlabel(f"test {quantity}{unit}")
    if quantity == "accuracy":
        low, high = right.get_xlim()
        right.set_xlim(max(low, 0), min(high, 100))
    if len(order) <= len(PALETTE):
        left.legend(frameon=False, loc="lower right" if quantity == "accuracy" else "upper right")
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


def _running_mean(points: list[tuple[float, float]], window: int) -> tuple[list[float], list[float]]:
    """Means of consecutive groups, each placed at its last iteration."""
    groups = [points[i : i + window] for i in range(0, len(points), window)]
    return [g[-1][0] for g in groups], [math.fsum(v for _, v in g) / len(g) for g in groups]
