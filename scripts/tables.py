"""Results on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from metasam.training.few_shot import FewShot
from metasam.training.supervised import Supervised


def show(results: dict[str, Any], folder: Path, baselines: dict[str, float] | None = None) -> None:
    """Print the results of one run or evaluation."""
    quantity = "accuracy" if "accuracy" in results else "loss"
    few_shot = f"{quantity}_plain_adapt" in results
    unit = (FewShot if few_shot else Supervised).unit
    names = {"": "adapted as trained", "_plain_adapt": "adapted without SAM"}
    if not few_shot:
        names = {
            "": "best by validation" if f"{quantity}_last" in results else results["split"],
            "_last": "last weights",
        }
    rows = [
        *(
            (f"{quantity}, {name}", value(results[f"{quantity}{kind}"], results[f"ci95{kind}"], quantity))
            for kind, name in names.items()
            if f"{quantity}{kind}" in results
        ),
        *((name, value(number, None, quantity)) for name, number in (baselines or {}).items()),
        ("over", results["over"] + (", transductive BatchNorm" if results["transductive"] else "")),
        ("weights of iteration", f"{results['best_iteration']}"),
        ("gradient evaluations", f"{results['gradient_evaluations']:.0f} {unit}"),
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


def value(mean: float, ci95: float | None, quantity: str = "accuracy", *, sign: bool = False) -> str:
    """A mean with its 95% interval; differences show their sign.

    >>> value(0.7412, 0.0061), value(0.5, None), value(1.25, 0.031, "loss"), value(0.01, 0.02, sign=True)
    ('74.1 ± 0.6 %', '50.0 %', '1.250 ± 0.031', '+1.0 ± 2.0 %')
    """
    scale, places, unit = (100, 1, " %") if quantity == "accuracy" else (1, 3, "")
    half = "" if ci95 is None else f" ± {scale * ci95:.{places}f}"
    return f"{scale * mean:{'+' if sign else ''}.{places}f}{half}{unit}"
