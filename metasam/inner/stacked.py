"""All tasks of a meta-batch in one call, with the rule on the tensors of all of them.

What `metasam.inner.vmap` does for rules that say of themselves that they stack: the forward alone is under
``torch.vmap``. The rest is ordinary autograd, which saves a third of the time on small networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import noise, tree
from ..types import Params, Task
from .batched import linears_of, vmap
from .loop import SGD, Adapted, Constants, Here, InnerLoop, gradient
from .recompute import sparing


def _of_each(
    linears: Sequence[nn.Linear], loss: Callable[[Params, Constants], Any]
) -> Callable[[Params, Constants], Any]:
    """Losses of all tasks, ``[T]``; parameters that do not adapt are the same for all."""

    def losses(fast: Params, constants: Constants) -> Any:
        fixed, x, y = constants

        def one(x: Tensor, y: Tensor, *values: Tensor) -> Any:
            return loss(dict(zip(fast, values, strict=True)), (fixed, x, y))

        return vmap(one, linears)(x, y, *fast.values())  # each task draws its own dropout masks

    return losses


def run(
    loop: InnerLoop,
    params: Params,
    tasks: Task,
    given: Sequence[Params] = (),
    numbers: Sequence[int] | None = None,
) -> Adapted:
    """See `metasam.inner.loop.Engine`."""
    count = len(tasks.support[1])
    of_each = partial(_of_each, linears_of(loop.model))

    def draw(like: Params, key: tuple[int, ...]) -> Params:
        each = enumerate(numbers or range(count))
        return tree.stack([noise.normal({k: v.detach()[i] for k, v in like.items()}, *key, n) for i, n in each])

    def advance(loop: InnerLoop, here: Here, steps: range) -> tuple[Here, list[Params]]:
        own = given[steps.start : steps.stop]
        with tree.stacked():
            return loop.advance(here, steps, gradient, draw, SGD(loop.lr), own, weight=count, lift=of_each)

    return Adapted(*loop.run(params, tasks, sparing(advance), of_each(partial(loop.judge, weight=count)), copies=count))
