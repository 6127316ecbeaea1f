"""What a trainer asks of a source of tasks. Anything with these members will do; inheriting is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from metasam.types import Task

SPLITS = ("train", "validation", "test")


@runtime_checkable
class TaskFamily(Protocol):
    """Numbered tasks in three splits.

    Task ``i`` of a split is a pure function of (seed, split, i): the same in any process, for any grouping into batches
    and any number of workers, so a run resumes from a task number alone.

    Attributes:
        output_size: width of the head: the number of ways, or the number of regression targets.
        input_shape: shape of one example, such as ``(1, 28, 28)``.
        classification: True: labels are int64 class indices; False: float32 targets.
    """

    output_size: int
    input_shape: tuple[int, ...]
    classification: bool

    def batch(self, split: str, tasks: Sequence[int]) -> Task:
        """Return the tasks of these numbers, stacked: inputs ``[T, n, *input_shape]`` in float32.

        Raises:
            ValueError: the split is unknown or absent, or a number lies outside ``range(size(split))``.
        """
        ...

    def size(self, split: str) -> int | None:
        """Return the number of tasks of a split; None: endless."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the facts that identify the tasks, as plain values that JSON can hold."""
        ...


def check_split(split: str) -> str:
    """Return ``split`` if it names one.

    Raises:
        ValueError: it does not.
    """
    if split not in SPLITS:
        raise ValueError(f"expected a split out of {', '.join(map(repr, SPLITS))}, got {split!r}")
    return split


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int if it is an integer of at least ``least``.

    Raises:
        ValueError: it is not; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"expected {name} to be an integer >= {least}, got {value!r}: set {name}={least} or more")
    if int(value) >= 2**63:
        raise ValueError(f"expected {name} to be below 2**63, got {value}: set a smaller {name}")
    return int(value)
