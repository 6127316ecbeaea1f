"""What was measured, on the terminal and in a folder: ``bench.json`` and ``bench.csv`` (every repeat), ``bench.md``."""

from __future__ import annotations

import csv
import io
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from metasam import checkpoint
from metasam.scripts import tables
from metasam.scripts.bench.contest import Result, Row, Settings
from metasam.scripts.bench.peers import PACKAGES
from metasam.training.folder import write_json

QUICK = "quick=true: the smallest sizes, not those that titles say, and times that mean nothing"


def surroundings(settings: Settings, repeats: int, typed: str) -> dict[str, Any]:
    """What else to know about the numbers."""
    return {
        "command": typed,
        "device": device_name(settings.device),
        "threads": settings.threads,
        "repeats": repeats,
        "clock": settings.clock,
        "quick": settings.quick,
        "versions": {
            "metasam": version("metasam"),
            "python": platform.python_version(),
            **{name: found for name, package in PACKAGES.items() if (found := version(package))},
        },
    }


def threads_of(about: dict[str, Any]) -> str:
    """In words."""
    return f"{about['threads']} thread{'s' * (about['threads'] != 1)}"


def version(package: str) -> str | None:
    """The installed one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The name of a GPU, or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


# -- tables ----------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """Four digits, or those before the point.

    >>> milliseconds(0.00123456), milliseconds(0.0123456), milliseconds(1.23456)
    ('1.235', '12.35', '1235')
    """
    ms = 1e3 * seconds
    return f"{ms:.{min(3, max(0, 3 - math.floor(math.log10(ms))))}f}"


def grid(result: Result) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table."""
    if not result.rows:
        return ["contender"], []
    first = result.rows[0]
    if "growth_mib" in first:
        return ["contender", "MiB first", "MiB last", "growth"], [
            [r["contender"], f"{r['first_mib']:.1f}", f"{r['last_mib']:.1f}", f"{r['growth_mib']:+.1f}"]
            for r in result.rows
        ]
    columns = [
        "contender",
        "median ms",
        "min",
        "max",
        "times as fast" if first["kind"] == "speed" else "times the time",
    ]
    columns += ["95%", "as" if first["kind"] == "speed" else "of"]
    extra = [c for c in ("tasks_per_second", "peak_mib", "peak_ratio") if any(c in r for r in result.rows)]
    names = {"tasks_per_second": "tasks/s", "peak_mib": "peak MiB", "peak_ratio": "times the peak"}
    return columns + [names[c] for c in extra], [_cells(row, extra) for row in result.rows]


def _cells(row: Row, extra: Sequence[str]) -> list[str]:
    cells = [row["contender"], *(milliseconds(row[k]) for k in ("median", "min", "max"))]
    if row["ratio"] is None:
        cells += ["", "", ""]
    else:
        digits = 2 if row["kind"] == "speed" else 3
        cells += [f"{row['ratio']:.{digits}f}", f"{row['low']:.{digits}f} to {row['high']:.{digits}f}", row["to"]]
    places = {"tasks_per_second": 0, "peak_mib": 1, "peak_ratio": 3}
    return cells + ["" if row.get(c) is None else f"{row[c]:,.{places[c]}f}" for c in extra]


def show(result: Result) -> None:
    """Print a table and its notes."""
    columns, rows = grid(result)
    if rows:
        tables.table(result.title, columns, rows)
    for note in result.notes:
        print(note if rows else f"{result.title}: {note}")
    print()


# -- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, about: dict[str, Any], works: dict[str, list[Result]]) -> None:
    """Write what there is so far."""
    results = [
        {"work": work, "title": r.title, "notes": r.notes, "rows": r.rows}
        for work, group in works.items()
        for r in group
    ]
    write_json(folder / "bench.json", {**about, "results": results})
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["work", "contest", "contender", "repeat", "seconds", "ratio", "kind", "to"])
    for work, group in works.items():
        for result in group:
            for row in result.rows:
                for i, seconds in enumerate(row["seconds"]):
                    ratio = row["ratios"][i] if row.get("ratios") else ""
                    to = row.get("to") or ""
                    kind = row["kind"] if to else ""
                    writer.writerow([work, result.title, row["contender"], i, f"{seconds:.9g}", ratio, kind, to])
    checkpoint.write_text(folder / "bench.csv", text.getvalue())
    checkpoint.write_text(folder / "bench.md", markdown(about, works))


def markdown(about: dict[str, Any], works: dict[str, list[Result]]) -> str:
    """All tables."""
    lines = ["# Benchmark", "", f"    {about['command']}", ""]
    lines += [
        f"{about['device']}, {threads_of(about)}, {about['clock']} clock, {about['repeats']} repeats in turns; "
        + ", ".join(f"{k} {v}" for k, v in about["versions"].items())
        + ". Ratios are medians of those within the repeats, with 95% intervals by order statistics.",
    ]
    if about["quick"]:
        lines += ["", f"**{QUICK}**"]
    for work, group in works.items():
        for result in group:
            columns, rows = grid(result)
            lines += ["", f"## {work}: {result.title}", ""]
            if rows:
                lines += [_row(columns), _row(["---", *["---:"] * (len(columns) - 1)]), *map(_row, rows), ""]
            lines += [f"{note}." if not note.endswith(".") else note for note in result.notes]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
