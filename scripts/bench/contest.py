"""Contenders that take turns, and what their times say.

Each repeat starts from another contender, so that a machine that drifts drifts for all of them. What is compared is the
ratio within a repeat: its median over repeats, with a 95% interval by order statistics, which assumes nothing about how
times are distributed.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Step = Callable[[], Any]
"""What is timed."""

Contender = Callable[[], Step]
"""Makes what is timed; raises ImportError if its package is not installed."""

Row = dict[str, Any]
"""What was measured of a contender."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SLICE = 0.1
"""Seconds that a timing lasts at least: faster steps are timed several at a time."""


@dataclass(frozen=True)
class Settings:
    """How to measure: what is alike for all works."""

    quick: bool = False
    """The smallest sizes, to see that everything runs; its times mean nothing."""
    threads: int = 1
    clock: str = "wall"
    device: str = "cpu"


@dataclass(frozen=True)
class Contest:
    """Contenders whose times are compared.

    Args:
        title: of the table.
        contenders: by name, built when their turn comes.
        peers: those that come from elsewhere. All others are compared with the fastest of them, as speeds; empty: see
            ``bases``.
        bases: contender -> the one that its time is compared with.
        sizes: contender -> how large its problem is: times are compared with the first one's, and fitted by a power.
        tasks: how many tasks a step works through, for tasks a second; None: not to be shown.
        own_process: each contender gets a process of its own, whose memory is measured too.
        keep: contenders whose process keeps freed memory, as the commands of metasam do.
        note: what to know about the table.
    """

    title: str
    contenders: Mapping[str, Contender]
    peers: tuple[str, ...] = ()
    bases: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    tasks: int | None = None
    own_process: bool = False
    keep: frozenset[str] = frozenset()
    note: str = ""

    def turns(self, names: Sequence[str], repeats: int) -> int:
        """How many turns `measure` reports for these contenders."""
        return len(names) * (repeats + 1)


@dataclass(frozen=True)
class Drift:
    """Memory of a process after ``first`` steps and after ``last``."""

    title: str
    contenders: Mapping[str, Contender]
    first: int
    last: int
    note: str = ""

    def turns(self, names: Sequence[str], repeats: int) -> int:
        """As `Contest.turns`."""
        return len(names)


@dataclass
class Result:
    """What came of a contest."""

    title: str
    rows: list[Row]
    notes: list[str]


class LeftOut(Exception):  # noqa: N818 - no error: the others go on
    """A contender cannot be measured here."""


class Racer(Protocol):
    """A contender ready to be timed."""

    def time(self, calls: int) -> float:
        """Seconds that so many steps take; raises LeftOut if they fail."""
        ...

    def memory(self) -> dict[str, float] | None:
        """MiB that its process has ``now``, had at the ``peak``, and had ``before`` the first step; None: unknown."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Here:
    """A contender in this process."""

    def __init__(self, contender: Contender, settings: Settings) -> None:
        try:
            self.step = contender()
        except ImportError as error:
            raise LeftOut(f"not installed ({error})") from error
        except Exception as error:  # whatever another package raises on a torch that it does not know
            raise LeftOut(reason(error)) from error
        self.clock, self.device = CLOCKS[settings.clock], settings.device
        gc.collect()
        gc.freeze()  # what is there now is not looked through again, in all the collections of `time`

    def time(self, calls: int) -> float:
        gc.collect()  # what the one before left behind is not this one's work
        try:
            start = self.clock()
            for _ in range(calls):
                self.step()
            if self.device == "cuda":
                torch.cuda.synchronize()
            return self.clock() - start
        except Exception as error:
            raise LeftOut(reason(error)) from error

    def memory(self) -> dict[str, float] | None:
        return None

    def close(self) -> None:
        gc.unfreeze()


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def measure(
    contest: Contest,
    racers: Mapping[str, Callable[[], Racer]],
    settings: Settings,
    repeats: int,
    done: Callable[[str], None] = lambda name: None,
) -> Result:
    """Time the contenders in turns.

    Args:
        contest: what is compared.
        racers: of the contenders that take part.
        settings: how to measure.
        repeats: how often each is timed, after a warm-up.
        done: told whose turn has ended.
    """
    with ExitStack() as stack:
        notes = [contest.note] if contest.note else []
        ready, first, calls = start(racers, notes, stack), {}, {}
        for name in list(ready):
            try:
                first[name] = ready[name].time(1)
                again = ready[name].time(1)
            except LeftOut as why:
                notes.append(f"{name} left out: {why}")
                del ready[name]
                continue
            finally:
                done(name)
            calls[name] = 1 if settings.quick else max(1, min(100, math.ceil(SLICE / max(again, 1e-6))))
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        turns = list(ready.items())
        for repeat in range(repeats):
            for name, racer in turns[repeat % len(turns) :] + turns[: repeat % len(turns)] if turns else []:
                try:
                    seconds[name].append(racer.time(calls[name]) / calls[name])
                except LeftOut as why:
                    raise ValueError(f"{contest.title}: {name} failed after its warm-up: {why}") from why
                done(name)
        rows = compared(contest, seconds)
        for row in rows:
            name = row["contender"]
            row |= {"first": first[name], "calls": calls[name]}
            if memory := ready[name].memory():
                row["peak_mib"] = memory["peak"] - memory["before"]
    if any("peak_mib" in row for row in rows):
        peaks = {row["contender"]: row.get("peak_mib") for row in rows}
        for row in rows:
            mine, base = row.get("peak_mib"), peaks.get(row["to"])
            row["peak_ratio"] = mine / base if mine and base else None
    for row in rows:
        if row["first"] > max(1.0, 5 * row["median"]):
            notes.append(f"{row['contender']}: {row['first']:.0f} s before its first step was done")
    notes += [f"exponent {spread(fitted)}" for fitted in [exponents(contest.sizes, seconds)] if fitted]
    return Result(contest.title, rows, notes)


def watch(drift: Drift, racers: Mapping[str, Callable[[], Racer]], done: Callable[[str], None]) -> Result:
    """Take steps and look at the memory, one contender after the other."""
    rows, notes = [], [drift.note] if drift.note else []
    for name, make in racers.items():
        with ExitStack() as stack:
            for racer in start({name: make}, notes, stack).values():
                try:
                    racer.time(drift.first)
                    before = racer.memory()
                    seconds = racer.time(drift.last - drift.first)
                    after = racer.memory()
                except LeftOut as why:
                    notes.append(f"{name} left out: {why}")
                    continue
                if before is None or after is None:
                    notes.append(f"{name} left out: this system does not tell the memory of a process")
                    continue
                rows.append({"contender": name, "seconds": [seconds], "first_mib": before["now"],
                             "last_mib": after["now"], "growth_mib": after["now"] - before["now"]})  # fmt: skip
        done(name)
    return Result(drift.title, rows, notes)


def start(racers: Mapping[str, Callable[[], Racer]], notes: list[str], stack: ExitStack) -> dict[str, Racer]:
    """Build the racers; of those that cannot be, a note says why."""
    ready = {}
    for name, make in racers.items():
        try:
            ready[name] = make()
        except LeftOut as why:
            notes.append(f"{name} left out: {why}")
        else:
            stack.callback(ready[name].close)
    return ready


def compared(contest: Contest, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row a contender: its times, and the median ratio with its interval to what it is compared with.

    ``speed`` is how many times as fast it is as the fastest peer, ``cost`` its time over that of its base.
    """
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    peers = [p for p in contest.peers if p in medians]
    rows = []
    for name, mine in seconds.items():
        row: Row = {"contender": name, "median": medians[name], "min": min(mine), "max": max(mine)}
        if contest.peers:
            kind, base = "speed", min(peers or medians, key=lambda p: medians[p] if peers else 0)
        else:
            kind, base = "cost", contest.bases.get(name, next(iter(seconds)) if contest.sizes else "")
        ratios = []
        if base in seconds and base != name:
            ratios = [a / b for a, b in zip(mine, seconds[base], strict=True)]
            ratios = [1 / r for r in ratios] if kind == "speed" else ratios
        low, high = interval(ratios) if ratios else (None, None)
        row |= {
            "kind": kind, "to": base if ratios else None, "ratio": statistics.median(ratios) if ratios else None,
            "low": low, "high": high, "seconds": list(mine), "ratios": ratios,
        }  # fmt: skip
        if contest.tasks is not None:
            row["tasks_per_second"] = contest.tasks / row["median"]
        if contest.sizes:
            row["size"] = contest.sizes[name]
        rows.append(row)
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the median by order statistics; the whole range of fewer than 6 values.

    >>> interval([float(n) for n in range(1, 16)])
    (4.0, 12.0)
    """
    n, ordered = len(values), sorted(values)
    # P(fewer than k of n values lie below the median) <= 2.5%
    k = sum(sum(math.comb(n, j) for j in range(i + 1)) / 2**n <= 0.025 for i in range(n // 2))
    return ordered[max(k, 1) - 1], ordered[n - max(k, 1)]


def exponents(sizes: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Of each repeat, the power of the size that its times follow: a least-squares line through their logarithms.

    >>> exponents({"a": 1, "b": 2, "c": 4}, {"a": [3.0, 1.0], "b": [6.0, 4.0], "c": [12.0, 16.0]})
    [1.0, 2.0]
    """
    if len({sizes[name] for name in seconds if name in sizes}) < 2:
        return []
    x = [math.log(sizes[name]) for name in seconds]
    fits = zip(*seconds.values(), strict=True)
    return [statistics.linear_regression(x, [math.log(s) for s in column]).slope for column in fits]


def spread(values: Sequence[float]) -> str:
    """A median with its interval.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 (1.00 to 3.00)'
    """
    low, high = interval(values)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"
