"""Results on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(results: dict[str, Any], folder: Path, baselines: dict[str, float] | None = None) -> None:
    """Print the results of one run or evaluation."""
    quantity = "accuracy" if "accuracy" in results else "loss"
    rows = [
        (f"{quantity}, adapted as trained", value(results[quantity], results["ci95"], quantity)),
        (
            f"{quantity}, adapted without SAM",
            value(results[f"{quantity}_plain_adapt"], results["ci95_plain_adapt"], quantity),
        ),
        *((name, value(number, None, quantity)) for name, number in (baselines or {}).items()),
        ("over", results["over"] + (", transductive BatchNorm" if results["transductive"] else "")),
        ("weights of iteration", f"{results['best_iteration']}"),
        ("gradient evaluations", f"{results['gradient_evaluations']:.0f} x a plain MAML step"),
        ("training time", f"{results['seconds']:.0f} s"),
    ]
    table("", ("", "result"), rows)
    print(f"in {folder}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is on the left and the others on the right."""
    grid = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    wide = None if Console().is_terminal else 160  # in a pipe rich would cut at 80 columns
    Console(width=wide).print(grid)


def value(mean: float, ci95: float | None, quantity: str = "accuracy") -> str:
    """A mean with its 95% interval.

    >>> value(0.7412, 0.0061), value(0.5, None), value(1.25, 0.031, "loss")
    ('74.1 ± 0.6 %', '50.0 %', '1.250 ± 0.031')
    """
    if quantity == "accuracy":
        return f"{100 * mean:.1f}" + ("" if ci95 is None else f" ± {100 * ci95:.1f}") + " %"
    return f"{mean:.3f}" + ("" if ci95 is None else f" ± {ci95:.3f}")
