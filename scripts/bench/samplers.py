"""Batches of few-shot tasks from images in memory."""

from __future__ import annotations

import itertools

import torch

from metasam.scripts.bench import peers
from metasam.scripts.bench.contest import Contender, Step
from metasam.tasks import ImageEpisodes


class Images:
    """Random images in memory, and the tasks to be drawn from them.

    Args:
        classes: how many.
        each: images of a class.
        ways: classes of a task.
        shots: support images of a class.
        queries: query images of a class.
        tasks: in a batch.
    """

    def __init__(self, classes: int, each: int, ways: int, shots: int, queries: int, tasks: int) -> None:
        self.classes, self.each, self.tasks = classes, each, tasks
        self.of = ways, shots, queries

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images as bytes, and their labels."""
        images = torch.randint(256, (self.classes * self.each, 1, 28, 28), dtype=torch.uint8)
        return images, torch.arange(self.classes).repeat_interleave(self.each)

    def metasam(self, *, floats: bool = False) -> Step:
        """``ImageEpisodes``: the bytes, as its peers return them, or what a model is given."""
        ways, shots, queries = self.of
        family = ImageEpisodes({"train": self.data()}, ways=ways, shots=shots, queries=queries)
        draw, start = family.batch if floats else family.raw, itertools.count(0, self.tasks)

        def step() -> object:
            first = next(start)
            return draw("train", range(first, first + self.tasks))

        return step

    def contenders(self) -> dict[str, Contender]:
        """Ours and the others."""
        found: dict[str, Contender] = {
            name: lambda make=make: make(*self.data(), *self.of, self.tasks)  # type: ignore[misc]
            for name, make in peers.SAMPLERS.items()
        }
        found["metasam"] = self.metasam
        found["metasam, as float32"] = lambda: self.metasam(floats=True)
        return found
