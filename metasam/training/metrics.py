"""The record of a run: one JSON line an iteration, and TensorBoard events where tensorboard is installed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import progress


class Metrics:
    """Appends to ``metrics.jsonl``; use it as a context manager.

    Lines after ``iteration`` are dropped first: what a killed run did after its last checkpoint, the resumed run does
    again. Lines that are missing before it are said to be. Numbers that JSON does not know (nan, inf) are written as
    null.

    Args:
        folder: of the run.
        iteration: last iteration to keep; 0 starts afresh.
        tensorboard: also write events, if tensorboard is installed.
    """

    def __init__(self, folder: Path, iteration: int = 0, *, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self._truncate(iteration)
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in __exit__
        self._events = _event_writer(folder, iteration) if tensorboard else None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, iteration: int, **values: float | int | None) -> None:
        """Append one line."""
        line = {"iteration": iteration, **{k: _finite(v) for k, v in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name, value, iteration)

    def flush(self) -> None:
        """Hand what is written to the operating system: before a checkpoint, so that no line of it can be missing."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def _truncate(self, iteration: int) -> None:
        keep = lines = 0
        if self.path.exists():
            with open(self.path, "rb+") as file:
                for line in file:
                    entry = _parse(line)
                    if entry is None or entry["iteration"] > iteration:
                        break
                    keep, lines = keep + len(line), lines + 1
                file.truncate(keep)
        if lines < iteration:
            progress.say(
                f"warning: {self.path} has {lines} of the {iteration} lines up to iteration {iteration}: the run goes "
                "on, and its record and learning curve lack the others"
            )


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl``; a last line that is cut short is left out."""
    return list(_lines(Path(folder) / "metrics.jsonl"))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for line in file:
            entry = _parse(line)
            if entry is None:
                return
            yield entry


def _parse(line: bytes) -> dict[str, Any] | None:
    """One line's entry; None if a kill cut it short."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("iteration"), int) else None


def _finite(value: float | int | None) -> float | int | None:
    return None if value is None or not math.isfinite(value) else value


def _event_writer(folder: Path, iteration: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=iteration + 1 if iteration else None)
