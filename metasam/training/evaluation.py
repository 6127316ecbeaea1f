"""Measure a meta-learner on one split of a task family, as the numbers that go into ``results.json``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from metasam.meta import Evaluation, SharpMAML
    from metasam.tasks.family import TaskFamily
    from metasam.types import Task


def has_split(family: TaskFamily, split: str) -> bool:
    """Whether the family has tasks in this split."""
    try:
        return family.size(split) != 0
    except ValueError:
        return False


def batches(
    family: TaskFamily, split: str, tasks: int, per_batch: int, device: torch.device | str = "cpu"
) -> Iterator[Task]:
    """The first ``tasks`` tasks of a split (all of them if it has fewer), in batches."""
    size = family.size(split)
    total = tasks if size is None else min(tasks, size)
    for start in range(0, total, per_batch):
        yield family.batch(split, range(start, min(start + per_batch, total))).to(device)


def measure(
    maml: SharpMAML,
    family: TaskFamily,
    split: str,
    tasks: int,
    *,
    per_batch: int = 16,
    steps: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Evaluate adapting as trained and adapting by plain gradient steps, on the same tasks.

    Returns:
        ``accuracy`` (or ``loss`` for regression) with ``ci95`` and ``n``, the same with the suffix ``_plain_adapt``,
        ``over`` (which tasks), ``transductive``, and ``per_task`` values, in task order, for paired comparisons.
    """
    as_trained = maml.evaluate(batches(family, split, tasks, per_batch, device), steps=steps)
    plain = maml.evaluate(batches(family, split, tasks, per_batch, device), steps=steps, plain=True)
    quantity, value, half = headline(as_trained)
    _, plain_value, plain_half = headline(plain)
    return {
        quantity: value,
        "ci95": half,
        "n": as_trained.n,
        f"{quantity}_plain_adapt": plain_value,
        "ci95_plain_adapt": plain_half,
        "over": f"{as_trained.n} {split} tasks",
        "split": split,
        "transductive": as_trained.transductive,
        "per_task": as_trained.per_task,
        "tasks": family.describe(),
    }


def headline(evaluation: Evaluation) -> tuple[str, float, float]:
    """The number that a task family is judged by: its name, mean and half-width of the 95% interval."""
    if evaluation.accuracy is not None:
        return "accuracy", evaluation.accuracy, evaluation.ci95
    return "loss", evaluation.loss, evaluation.loss_ci95


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """``peak_memory_mb`` of this process (of the GPU where one is used), ``device`` and ``versions``."""
    device = torch.device(device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "peak_memory_mb": _peak_memory_mb(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "metasam": _version("metasam"),
            "higher": _version("higher"),
        },
    }


def _peak_memory_mb(device: torch.device) -> float | None:
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)  # bytes there, KiB elsewhere


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
