"""Steps of live optimizers on one batch, beside the bare gradient passes that they make (no update)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metasam import SAM, AgnosticSAM
from metasam.scripts.bench import peers
from metasam.scripts.bench.contest import Contender, Step


class Optimizers:
    """A model and a batch for all of them; each works on a copy of the model."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        self.model, self.batch = model, batch
        self.val = tuple(t[: len(t) // 4] for t in batch)

    def closures(self, model: nn.Module) -> list[Callable[[], Tensor]]:
        """Of the batch, and of a quarter of it."""

        def of(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
            def closure() -> Tensor:
                model.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return closure

        return [of(*self.batch), of(*self.val)]

    def bare(self, train: int, val: int) -> Step:
        """That many passes of each batch."""
        whole, quarter = self.closures(copy.deepcopy(self.model))

        def step() -> None:
            for closure in [whole] * train + [quarter] * val:
                closure()

        return step

    def metasam(self, kind: type, closures: int) -> Step:
        """A step of ours."""
        model = copy.deepcopy(self.model)
        optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9, model=model)
        given = self.closures(model)[:closures]
        return lambda: optimizer.step(*given)

    def contenders(self) -> dict[str, Contender]:
        """What to time, by name."""

        def first(model: nn.Module) -> Callable[[], Tensor]:
            return self.closures(model)[0]

        return {
            "bare, 2 passes": lambda: self.bare(2, 0),
            "metasam SAM": lambda: self.metasam(SAM, 1),
            "pytorch_optimizer SAM": lambda: peers.pytorch_optimizer(self.model, first),
            "pytorch_optimizer SAM, foreach": lambda: peers.pytorch_optimizer(self.model, first, foreach=True),
            "bare, 2 + 2 quarter passes": lambda: self.bare(2, 2),
            "metasam AgnosticSAM": lambda: self.metasam(AgnosticSAM, 2),
        }


BASES = {
    "metasam SAM": "bare, 2 passes",
    "pytorch_optimizer SAM": "bare, 2 passes",
    "pytorch_optimizer SAM, foreach": "bare, 2 passes",
    "metasam AgnosticSAM": "bare, 2 + 2 quarter passes",
}
"""Contender -> the passes that it makes."""
