"""What a run says while it runs: a bar on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Shows how far a run is; a context manager."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *error: Any) -> None: ...

    def update(self, iteration: int, status: str) -> None:
        """Iterations done so far, and the numbers to show."""
        ...

    def say(self, message: str) -> None:
        """Print a line that stays."""
        ...


def show(title: str, total: int, start: int = 0, *, quiet: bool = False) -> Progress:
    """The progress display that fits standard error: a bar if it is a terminal and rich is installed."""
    if not quiet and sys.stderr.isatty():
        try:
            return _Bar(title, total, start)
        except ImportError:
            pass
    return _Lines(title, total, start, quiet=quiet)


class _Bar:
    def __init__(self, title: str, total: int, start: int) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[status]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(title, total=total, completed=start, status="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def update(self, iteration: int, status: str) -> None:
        self._progress.update(self._task, completed=iteration, status=status)

    def say(self, message: str) -> None:
        self._progress.console.print(message, markup=False, highlight=False)


class _Lines:
    every = 10.0  # seconds

    def __init__(self, title: str, total: int, start: int, *, quiet: bool) -> None:
        self._title, self._total, self._start, self._quiet = title, total, start, quiet

    def __enter__(self) -> _Lines:
        self._began = self._last = time.monotonic()
        self._ended = False
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, iteration: int, status: str) -> None:
        now = time.monotonic()
        if self._ended or (now - self._last < self.every and iteration < self._total):
            return
        self._last, self._ended = now, iteration >= self._total
        done = iteration - self._start
        left = (now - self._began) / done * (self._total - iteration) if done else 0.0
        self.say(f"{self._title}  {iteration}/{self._total}  {status}  {duration(left)} left")

    def say(self, message: str) -> None:
        if not self._quiet:
            say(message)


def say(message: str) -> None:
    """Print a line for the reader, not for a pipe."""
    print(message, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time span to read.

    >>> duration(3.2), duration(200), duration(7500)
    ('3s', '3m20s', '2h05m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
