"""Task by task, with differentiable optimizers from ``higher`` (Grefenstette et al. 2019, arXiv 1910.01727).

Takes any module. The model is called through ``torch.func.functional_call``, which is faster than a patched copy and
keeps tied weights tied; ``higher`` supplies the differentiable update, given gradients that the rule has shaped.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import noise, tree
from ..types import Params, Task
from .kernels import arranged
from .loop import Adapted, Here, InnerLoop, Noise, gradient
from .recompute import sparing


class Descent:
    """`metasam.types.Descent` on a ``higher`` differentiable optimizer."""

    def __init__(self, params: Params, lr: float, training: bool) -> None:
        made = _made(len(params), lr, training)
        # making one takes as long as a step of a small network: this is a copy, but for what steps write to
        self.optimizer = copy.copy(made)
        self.optimizer.param_groups = [{**group, "params": list(group["params"])} for group in made.param_groups]
        self.rate = lr
        # `step` insists on differentiating some loss before it lets us replace the gradients
        self.nothing = torch.zeros((), requires_grad=True)

    def __call__(self, params: Params, grads: Params) -> Params:
        given = [grads.get(k) for k in params]
        with torch.enable_grad():
            moved = self.optimizer.step(self.nothing, params=list(params.values()), grad_callback=lambda _: given)
        return dict(zip(params, moved, strict=True))

    def lr(self, key: str) -> float:
        """Learning rate, the same for every key."""
        return self.rate

    def momentum(self, params: Params) -> Params | None:
        """None: the inner SGD has no momentum."""
        return None


@functools.lru_cache(maxsize=64)
def _made(count: int, lr: float, training: bool) -> Any:
    """A differentiable SGD of so many parameters; it only lends its settings, values are handed to ``step``."""
    try:
        import higher
    except ImportError as error:
        raise ImportError('engine="higher" needs the package higher: pip install higher') from error
    reference = [torch.zeros((), requires_grad=True) for _ in range(count)]
    return higher.optim.get_diff_optim(torch.optim.SGD(reference, lr=lr), reference, track_higher_grads=training)


def run(loop: InnerLoop, params: Params, tasks: Task, given: Sequence[Params] = ()) -> Adapted:
    """See `metasam.inner.loop.Engine`."""
    results, params = [], arranged(params) if loop.kernels else params
    for i, task in enumerate(tasks.unbind()):
        own = [{k: v[i] for k, v in eps.items()} for eps in given]

        def draw(like: Params, key: tuple[int, ...], task: int = loop.number(i)) -> Params:
            return noise.normal(like, *key, task)

        def advance(
            loop: InnerLoop, here: Here, steps: range, draw: Noise = draw, own: Sequence[Params] = own
        ) -> tuple[Here, list[Params]]:
            descend = Descent(here.fast, loop.lr, loop.training)
            return loop.advance(here, steps, gradient, draw, descend, own[steps.start : steps.stop])

        results.append(loop.run(params, task, sparing(advance), loop.judge))
    losses, outputs, adapted, traces = zip(*results, strict=True)
    return Adapted(
        torch.stack(losses),
        torch.stack(outputs) if isinstance(outputs[0], Tensor) else (),
        tree.stack(adapted),
        [tree.stack(steps) for steps in zip(*traces, strict=True)],
    )
