"""Task by task, with differentiable optimizers from ``higher`` (Grefenstette et al. 2019, arXiv 1910.01727).

Takes any module. The model is called with a task's tensors lent to it, which is faster than a patched copy and keeps
tied weights tied; ``higher`` supplies the differentiable update, given gradients that the rule has shaped.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import noise, tree, types
from ..types import Params, Task
from .kernels import arranged
from .loop import Adapted, Here, InnerLoop, Noise, gradient
from .recompute import sparing


class Descent:
    """`metasam.types.Descent` on a ``higher`` differentiable optimizer."""

    def __init__(self, lr: float) -> None:
        made = _made(lr)
        # making one takes as long as a step of a small network: this is a copy, but for what updates write to
        self.optimizer = copy.copy(made)
        self.optimizer.param_groups = [dict(group) for group in made.param_groups]
        self.rate = lr

    def __call__(self, params: Params, grads: Params) -> Params:
        group = self.optimizer.param_groups[0]
        group["params"] = list(params.values())
        # what its `step` does after differentiating a loss, which the rule has done
        self.optimizer._update([[grads.get(k) for k in params]])
        return dict(zip(params, group.pop("params"), strict=True))

    def lr(self, key: str) -> float:
        """Learning rate, the same for every key."""
        return self.rate

    def momentum(self, params: Params) -> Params | None:
        """None: the inner SGD has no momentum."""
        return None


@functools.lru_cache(maxsize=64)
def _made(lr: float) -> Any:
    """A differentiable SGD; it only lends its rule and settings, values are handed to it."""
    try:
        import higher
    except ImportError as error:
        raise ImportError('engine="higher" needs the package higher: pip install higher') from error
    reference = [torch.zeros((), requires_grad=True)]
    return higher.optim.get_diff_optim(torch.optim.SGD(reference, lr=lr), reference)


def run(
    loop: InnerLoop,
    params: Params,
    tasks: Task,
    given: Sequence[Params] = (),
    numbers: Sequence[int] | None = None,
    descent: Callable[[float], types.Descent] = Descent,
) -> Adapted:
    """See `metasam.inner.loop.Engine`; ``descent``: the inner optimizer, by its learning rate."""
    results, params = [], arranged(params) if loop.kernels else params
    count = len(tasks.support[1])
    for i, (number, task) in enumerate(zip(numbers or range(count), tasks.unbind(), strict=True)):
        own = [{k: v[i] for k, v in eps.items()} for eps in given]

        def draw(like: Params, key: tuple[int, ...], number: int = number) -> Params:
            return noise.normal(like, *key, number)

        def advance(
            loop: InnerLoop, here: Here, steps: range, draw: Noise = draw, own: Sequence[Params] = own
        ) -> tuple[Here, list[Params]]:
            descend = descent(loop.lr)
            return loop.advance(here, steps, gradient, draw, descend, own[steps.start : steps.stop])

        results.append(loop.run(params, task, sparing(advance), loop.judge))
    losses, outputs, adapted, traces = zip(*results, strict=True)
    return Adapted(
        torch.stack(losses),
        torch.stack(outputs) if isinstance(outputs[0], Tensor) else (),
        tree.stack(adapted),
        [tree.stack(steps) for steps in zip(*traces, strict=True)],
    )
