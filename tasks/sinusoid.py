"""Few-shot regression of sine curves (Finn, Abbeel & Levine, "Model-Agnostic Meta-Learning", ICML 2017, sec. 5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from metasam.tasks.counter import normal, task_keys, uniform
from metasam.tasks.family import SPLITS, check_count, check_split
from metasam.types import Task


class Sinusoid:
    """y = a sin(x - p) with amplitude a ~ U[0.1, 5], phase p ~ U[0, pi] and inputs x ~ U[-5, 5]; an endless family.

    Args:
        shots: support points a task.
        queries: query points a task.
        seed: of the whole family; the splits draw from unrelated streams.
        noise: standard deviation of Gaussian noise on the support targets; query targets are the curve itself.

    Raises:
        ValueError: shots or queries is below 1, seed is below 0, or noise is negative or not finite.

    >>> task = Sinusoid(shots=5).batch("train", range(3))
    >>> task.support[0].shape, task.query[1].shape
    (torch.Size([3, 5, 1]), torch.Size([3, 10, 1]))
    """

    output_size = 1
    input_shape: tuple[int, ...] = (1,)
    classification = False

    def __init__(self, shots: int = 10, queries: int = 10, seed: int = 0, noise: float = 0.0) -> None:
        self.shots, self.queries = check_count("shots", shots), check_count("queries", queries)
        if not 0 <= noise < math.inf:
            raise ValueError(f"expected noise to be a finite standard deviation >= 0, got {noise!r}")
        self.seed, self.noise = check_count("seed", seed, least=0), noise

    def batch(self, split: str, tasks: Sequence[int]) -> Task:
        """Return the tasks of these numbers: x and y are ``[T, shots, 1]`` and ``[T, queries, 1]`` in float32.

        Raises:
            ValueError: the split is unknown, or a number is negative.
        """
        keys = task_keys(self.seed, SPLITS.index(check_split(split)), tasks)
        n = self.shots + self.queries
        # in float64, so that float32 results do not depend on how a batch was grouped
        amplitude, phase, x = uniform(keys, 2 + n).split([1, 1, n], dim=-1)
        amplitude, phase, x = 0.1 + 4.9 * amplitude, math.pi * phase, 10 * x - 5
        y = amplitude * torch.sin(x - phase)
        if self.noise:
            y[:, : self.shots] += self.noise * normal(keys, self.shots, start=2 + n)
        x, y = (t.to(torch.float32).unsqueeze(-1) for t in (x, y))
        s = self.shots
        return Task(support=(x[:, :s], y[:, :s]), query=(x[:, s:], y[:, s:]))

    def size(self, split: str) -> int | None:
        """Return None: the family is endless.

        Raises:
            ValueError: the split is unknown.
        """
        check_split(split)
        return None

    def describe(self) -> dict[str, Any]:
        """Return name, shots, queries, seed and noise."""
        facts = {"shots": self.shots, "queries": self.queries, "seed": self.seed, "noise": self.noise}
        return {"name": "sinusoid", **facts}
