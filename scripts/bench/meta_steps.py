"""Meta-steps of MAML and Sharp-MAML: ours, and the same loops written by hand.

Each takes a `Problem` and returns a step that leaves the meta-gradient in its model and returns the mean query loss.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metasam import SharpMAML, inner
from metasam.scripts.bench import peers
from metasam.scripts.bench.contest import Contender, Settings, Step
from metasam.types import Params, Task

RHO = 0.05
"""Radius of SAM in the loops written by hand, that of the rule."""


@dataclass(frozen=True)
class Problem:
    """A meta-step to time: a model, a loss, a meta-batch of tasks, and an inner loop."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    task: Task
    lr: float
    steps: int

    def own(self) -> Problem:
        """The same with a model of its own."""
        return replace(self, model=copy.deepcopy(self.model))

    def to(self, *args: Any) -> Problem:
        """Moved, as ``Tensor.to``."""
        return replace(self, model=copy.deepcopy(self.model).to(*args), task=self.task.to(*args))


Meta = Callable[[Problem], Step]


def contender(make: Meta, problem: Problem) -> Contender:
    """A step on a problem, with a model of its own."""
    return lambda: make(problem.own())


def metasam(problem: Problem, variant: str = "none", **options: Any) -> Step:
    """``SharpMAML.step`` with an optimizer that moves nothing."""
    maml = SharpMAML(
        problem.model,
        problem.loss,
        inner_lr=problem.lr,
        inner_steps=problem.steps,
        variant=variant,
        **options,
    )
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)
    return lambda: maml.step(problem.task, optimizer)


def ours(settings: Settings, *, small: bool = False) -> dict[str, Meta]:
    """MAML on every engine that suits, and with tasks on all threads and on one.

    Args:
        settings: how to measure; quick ones do not wait for a compiler.
        small: whether the network is small, as traced engines are for.
    """
    suit = [*inner.ENGINES, *(e for e in inner.TRACED if small and not (settings.quick and e == "compiled"))]
    found: dict[str, Meta] = {f"metasam {engine}": partial(metasam, engine=engine) for engine in suit}
    if settings.threads > 1:
        found["metasam higher, workers=1"] = partial(metasam, engine="higher", workers=1)
    return found


def maml(settings: Settings, *, small: bool = False) -> dict[str, Meta]:
    """MAML by everybody."""
    return {**peers.MAML, **ours(settings, small=small)}


# -- by hand ---------------------------------------------------------------------------------------------------------


def _without_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False


def loop(problem: Problem, *, low: bool) -> Step:
    """Task by task with ``torch.autograd.grad`` and ``functional_call``; ``low``: SAM's two gradients a step."""
    _without_statistics(problem.model)
    model, loss_fn, lr = problem.model, problem.loss, problem.lr
    params: Params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, w, (x,)), y)

    def gradient(w: Params, x: Tensor, y: Tensor) -> Params:
        return dict(zip(w, torch.autograd.grad(loss(w, x, y), list(w.values()), create_graph=True), strict=True))

    def step() -> Tensor:
        optimizer.zero_grad()
        tasks, losses = problem.task.unbind(), []
        for task in tasks:
            w = params
            for _ in range(problem.steps):
                g = gradient(w, *task.support)
                if low:
                    norm = torch.stack([v.square().sum() for v in g.values()]).sum().sqrt()
                    g = gradient({k: w[k] + RHO / norm * g[k] for k in w}, *task.support)
                w = {k: w[k] - lr * g[k] for k in w}
            found = loss(w, *task.query)
            (found / len(tasks)).backward()
            losses.append(found.detach())
        optimizer.step()
        return torch.stack(losses).mean()

    return step


def stacked(problem: Problem, *, low: bool) -> Step:
    """All tasks at once: the forward under vmap, gradients by autograd of the sum of the losses."""
    _without_statistics(problem.model)
    model, loss_fn, lr = problem.model, problem.loss, problem.lr
    params: Params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = torch.vmap(lambda w, x, y: loss_fn(functional_call(model, w, (x,)), y))

    def gradient(w: Params, x: Tensor, y: Tensor) -> Params:
        return dict(
            zip(w, torch.autograd.grad(losses(w, x, y).sum(), list(w.values()), create_graph=True), strict=True)
        )

    def step() -> Tensor:
        optimizer.zero_grad()
        (x, y), count = problem.task.support, len(problem.task.support[0])
        w = {k: v.expand(count, *v.shape) for k, v in params.items()}
        for _ in range(problem.steps):
            g = gradient(w, x, y)
            if low:
                scale = RHO / torch.stack([v.flatten(1).square().sum(1) for v in g.values()]).sum(0).sqrt()
                g = gradient({k: w[k] + scale.view(-1, *[1] * (v.ndim - 1)) * v for k, v in g.items()}, x, y)
            w = {k: w[k] - lr * g[k] for k in w}
        found = losses(w, *problem.task.query).mean()
        found.backward()
        optimizer.step()
        return found.detach()

    return step


BY_HAND: dict[str, Callable[..., Step]] = {"higher": loop, "vmap": stacked}
"""Engine -> what one would write instead of it."""


def by_hand() -> Iterator[tuple[str, Meta, str, Meta]]:
    """A rule in an engine and the same loop by hand: name, ours, name, theirs."""
    for engine, make in BY_HAND.items():
        for name, low in (("MAML", False), ("SAM low", True)):
            rule: dict[str, Any] = {"variant": "low", "rho_low": RHO} if low else {}
            ours = partial(metasam, engine=engine, **rule, workers=1)
            yield f"metasam {engine}, {name}", ours, f"by hand {make.__name__}, {name}", partial(make, low=low)


def kernels() -> dict[str, Meta]:
    """MAML task by task: with the inner loop's kernels, with torch's, and with those and ReLU before pooling."""

    def torchs(problem: Problem) -> Step:
        step = metasam(problem, engine="higher", workers=1)
        with mock.patch.object(import_module("metasam.inner.choose"), "concern", return_value=False):
            step()  # the first step chooses
        return step

    def usual(problem: Problem) -> Step:
        for block in (m for m in problem.model.modules() if isinstance(m, nn.Sequential)):
            for i, (one, two) in enumerate(itertools.pairwise(list(block))):
                if isinstance(one, nn.MaxPool2d) and isinstance(two, nn.ReLU):
                    block[i], block[i + 1] = two, one
        return torchs(problem)

    return {
        "torch's kernels": torchs,
        "torch's kernels, ReLU before pooling": usual,
        "metasam": partial(metasam, engine="higher", workers=1),
    }


def variants(engine: str) -> dict[str, Meta]:
    """Sharp-MAML, its eps differentiated through or not."""
    found: dict[str, Meta] = {
        "none": partial(metasam, engine=engine),
        "up": partial(metasam, engine=engine, variant="up"),
    }
    for variant in ("low", "both"):
        for through, name in ((False, "detached"), (True, "through")):
            found[f"{variant}, eps {name}"] = partial(metasam, engine=engine, variant=variant, through=through)
    return found
