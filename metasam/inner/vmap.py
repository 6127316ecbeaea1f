"""All tasks of a meta-batch in one call.

The inner loop runs under ``torch.vmap``, so that a rule sees one task's tensors and its norms are per task without
being told. Gradients step out of vmap for a moment: only the forward is vmapped there, and plain
``torch.autograd.grad`` differentiates the sum of the losses in the task-stacked parameters; the losses of tasks are
independent, so that is each task's gradient. Many times faster than a loop on small networks, where the cost is
dispatching operations.

Nesting ``torch.func.grad`` in vmap would be shorter, and wrong: the batching rules of the backward of BatchNorm and
LayerNorm take the saved mean and variance as constants, so their second derivatives, and with them the meta-gradient,
lose terms without a word (seen with torch 2.14; ``tests/test_inner.py`` keeps watch).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import noise
from ..rules import stackable
from ..types import Params, Task
from . import stacked
from .loop import SGD, Adapted, Constants, Here, InnerLoop, Loss, check_depends, pack
from .recompute import sparing


class _LevelDown(torch.autograd.Function):
    """Something to do for all tasks at once from inside vmap: it hands `vmap` the stacked tensors one level down."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("only called under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise RuntimeError("only called under vmap")


class _Outside(_LevelDown):
    """Losses and gradients of all tasks, from inside vmap, by autograd outside of it.

    ``apply(call, *parameters, x, y, *constants)``: one level down ordinary autograd records what happens.
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *values: Tensor) -> Any:
        """Tensors with the task dimension in front; without one, they are the same for all tasks."""
        first = len(in_dims) - len(values)
        stacked = [
            v.expand(info.batch_size, *v.shape) if d is None else v.movedim(d, 0)
            for v, d in zip(values, in_dims[first:], strict=True)
        ]
        count = len(call.keys)
        leaves, constants = stacked[:count], call.constants(stacked[count:])
        with torch.enable_grad():
            if not call.graph:
                leaves = [v.detach() for v in leaves]
            leaves = [v if v.requires_grad else v.requires_grad_() for v in leaves]
            many = torch.vmap(call.loss, randomness=info.randomness)
            losses = many(dict(zip(call.keys, leaves, strict=True)), constants)
            check_depends(losses)
            found = torch.autograd.grad(losses.sum(), leaves, create_graph=call.graph, allow_unused=True)
        call.unused.update(k for k, g in zip(call.keys, found, strict=True) if g is None)
        grads = [torch.zeros_like(v) if g is None else g for v, g in zip(leaves, found, strict=True)]
        return (losses, *grads), (0,) * (1 + count)


class _Call:
    """What `_Outside` is told beside tensors, and the one thing that it tells back."""

    def __init__(self, loss: Loss, keys: list[str], fixed: list[str], graph: bool) -> None:
        self.loss, self.keys, self.fixed, self.graph = loss, keys, fixed, graph
        self.unused: set[str] = set()

    def constants(self, values: list[Tensor]) -> Constants:
        x, y, *rest = values
        return dict(zip(self.fixed, rest, strict=True)), x, y


def _gradient(loss: Loss, params: Params, constants: Constants, graph: bool) -> tuple[Params, Tensor]:
    fixed, x, y = constants
    call = _Call(loss, list(params), list(fixed), graph)
    value, *grads = _Outside.apply(call, *params.values(), x, y, *fixed.values())
    return {k: g for k, g in zip(params, grads, strict=True) if k not in call.unused}, value


class _Drawn(_LevelDown):
    """Noise of every task, drawn outside of vmap: ``apply(key, numbers, index, *like)``."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, key: tuple[int, ...], numbers: Sequence[int], index: Tensor, *like: Tensor
    ) -> Any:
        """One draw a task, stacked; ``index`` is only there so that something is batched."""
        one = {
            str(i): v.detach() if d is None else v.detach().select(d, 0)
            for i, (v, d) in enumerate(zip(like, in_dims[3:], strict=True))
        }
        rows = [noise.normal(one, *key, number) for number in numbers]
        return tuple(torch.stack([row[k] for row in rows]) for k in one), (0,) * len(one)


def run(
    loop: InnerLoop,
    params: Params,
    tasks: Task,
    given: Sequence[Params] = (),
    numbers: Sequence[int] | None = None,
) -> Adapted:
    """See `metasam.inner.loop.Engine`."""
    if stackable(loop.rule):
        return stacked.run(loop, params, tasks, given, numbers)
    count = len(tasks.support[1])
    numbers = numbers or range(count)
    index = torch.arange(count)
    # each task draws its own dropout masks
    vmap = partial(torch.vmap, randomness="different")
    judge = partial(loop.judge, weight=count)

    def advance(
        loop: InnerLoop, here: Here, steps: range, given: Sequence[Params], index: Tensor
    ) -> tuple[Here, list[Params]]:
        """Steps of one task."""

        def draw(like: Params, key: tuple[int, ...]) -> Params:
            return dict(zip(like, _Drawn.apply(key, numbers, index, *like.values()), strict=True))

        return loop.advance(here, steps, _gradient, draw, SGD(loop.lr), given, weight=count)

    def whole(sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, given: Sequence[Params], index: Tensor) -> Any:
        return loop.run(params, Task((sx, sy), (qx, qy)), partial(advance, given=given, index=index), judge)

    def segment(loop: InnerLoop, here: Here, steps: range) -> tuple[Here, list[Params]]:
        """Steps of all tasks."""
        tensors, unpack = pack((here.fast, here.state))
        unpacks = []  # a state's numbers cannot leave vmap as its tensors do

        def one(
            tensors: Sequence[Tensor], constants: Constants, given: Sequence[Params], index: Tensor
        ) -> tuple[list[Tensor], list[Params]]:
            fast, state = unpack(tensors)
            there, trace = advance(loop, Here(fast, state, constants), steps, given, index)
            moved, unpack_moved = pack((there.fast, there.state))
            unpacks.append(unpack_moved)
            return moved, trace

        begun = 0 if steps.start else None  # all tasks start from the same
        moved, trace = vmap(one, in_dims=(begun, (None, 0, 0), 0, 0))(
            tensors, here.constants, list(given[steps.start : steps.stop]), index
        )
        fast, state = unpacks[0](moved)
        return Here(fast, state, here.constants), trace

    if loop.segment is None:
        return Adapted(*vmap(whole)(*tasks.support, *tasks.query, list(given), index))
    # backward recomputes segments outside of vmap
    return Adapted(*loop.run(params, tasks, sparing(segment), vmap(judge, in_dims=(0, (None, 0, 0)))))
