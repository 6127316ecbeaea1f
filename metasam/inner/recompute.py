"""Long inner loops in little memory: keep every n-th step only, and take the steps between again on the way back.

With K steps, what backward needs is then K/n times parameters and n times the graph of a step, instead of K times that
graph; each step is taken twice (Griewank 1992; Chen et al. 2016, arXiv 1604.06174). ``torch.utils.checkpoint`` is no
help here: the gradient within a step makes it run every step again in the forward already.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import batchnorm
from ..types import Params
from . import generators
from .agree import apart
from .ends import strangers
from .loop import Advance, Here, InnerLoop, differentiable, pack
from .once import constant

_DERIVATIVE = (
    "the meta-gradient of an inner loop with recompute has no derivative itself: set recompute=None to take one of it"
)

SAME, ROUNDINGS = 1e-4, 4
"""Part of their size that parameters may be off by when steps are taken again, and in how many units of their rounding
if that is more: nothing where a machine does the same twice (a GPU may sum in another order), and far from it where a
model does not."""

_OTHERWISE = (
    "expected inner steps to give the same when recompute takes them again, got other parameters: the model's forward "
    "or the loss draws numbers that torch does not know of (numpy, random), or depends on what it changes; leave "
    "recompute out"
)

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def sparing(advance: Advance) -> Advance:
    """``advance``, by segments of ``loop.recompute`` steps where the loop says so and has a graph to keep."""

    def walk(loop: InnerLoop, here: Here, steps: range) -> tuple[Here, list[Params]]:
        length = loop.segment
        if length is None:
            return advance(loop, here, steps)
        trace = []
        for start in steps[::length]:
            here, displacements = _segment(advance, loop, here, range(start, min(start + length, steps.stop)))
            trace += displacements
        return here, trace

    return walk


def _segment(advance: Advance, loop: InnerLoop, here: Here, steps: range) -> tuple[Here, list[Params]]:
    tensors, unpack = pack(here)
    beside: list[Any] = []  # what the first run finds beside tensors
    repeated = dataclasses.replace(loop, counts=defaultdict(float), keep_eps=False, repeats=True)

    def first(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        there, trace = advance(loop, unpack(leaves), steps)
        found, unpack_found = pack(there)
        beside.extend((unpack_found, trace))
        if steps.start == 0:
            _check_closed(found, leaves)
        return found

    def again(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        return pack(advance(repeated, unpack(leaves), steps)[0])[0]

    found = _Segment.apply(first, again, _Surroundings(loop, tensors), *tensors)
    unpack_found, trace = beside
    return unpack_found(found), trace


class _Segment(torch.autograd.Function):
    """``first(values)`` without its graph; backward differentiates ``again(values)``, which must be the same.

    The values hold everything that needs gradients. Steps hand the constants on, too: what is added to their gradient
    is added in the order in which one long graph would, so that the result is the same to the last bit.
    """

    @staticmethod
    def forward(ctx: Any, first: Run, again: Run, surroundings: _Surroundings, *values: Tensor) -> Any:
        ctx.again, ctx.surroundings = again, surroundings
        ctx.inputs = len(values)
        ctx.set_materialize_grads(False)
        with torch.enable_grad():  # gradients with a graph may differ in the last bit from those without
            found = first(_leaves(values))
        bare = [v.detach() for v in found]
        ctx.save_for_backward(*values, *bare)  # the next segment starts from these, and keeps them as well
        ctx.mark_non_differentiable(*[b for v, b in zip(found, bare, strict=True) if not v.requires_grad])
        return tuple(bare)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        values, wanted = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        leaves = _leaves(values)
        with torch.enable_grad(), ctx.surroundings.again():
            found = ctx.again(leaves)
        _check_same(found, wanted, leaves)
        reached = [(v, c) for v, c in zip(found, cotangents, strict=True) if c is not None and v.requires_grad]
        ends, weights = [v for v, _ in reached], [c.detach() for _, c in reached]
        grads = iter(torch.autograd.grad(ends, [v for v in leaves if v.requires_grad], weights, allow_unused=True))
        pulled = [next(grads) if v.requires_grad else None for v in leaves]
        return None, None, None, *constant(pulled, (*values, *cotangents), _DERIVATIVE)


def _check_same(found: Sequence[Tensor], wanted: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless steps led where they did at first; large constants, handed on, would hide if not."""
    handed_on = {id(v) for v in leaves}
    moved = [(v.detach(), w.detach()) for v, w in zip(found, wanted, strict=True) if id(v) not in handed_on]
    off, size = apart([v for v, _ in moved], [w for _, w in moved])
    rounding = max((torch.finfo(w.dtype).eps for _, w in moved if w.is_floating_point()), default=0.0)
    if math.isfinite(size) and not off <= max(SAME, ROUNDINGS * rounding) * size:
        raise RuntimeError(_OTHERWISE)


def _leaves(values: Iterable[Tensor]) -> list[Tensor]:
    return [v.detach().requires_grad_(v.requires_grad) for v in values]


class _Surroundings:
    """What steps depend on beside tensors: modes of modules, random numbers, autocast, kernels."""

    def __init__(self, loop: InnerLoop, values: Sequence[Tensor]) -> None:
        self.loop = loop
        self.devices = {torch.device("cpu"), *(v.device for v in values)}
        self.random, self.modes = generators.states(self.devices), _modes(loop.model)
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {d.type for d in self.devices}
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within: all is as it was; afterwards as before."""
        loop = self.loop
        with ExitStack() as stack:
            stack.callback(_put_back, generators.states(self.devices), _modes(loop.model))
            _put_back(self.random, self.modes)
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(batchnorm.mode(loop.model, loop.policy, training=loop.training))
            stack.enter_context(differentiable(loop.model))
            yield


Modes = list[tuple[nn.Module, bool]]


def _modes(model: nn.Module) -> Modes:
    return [(m, m.training) for m in model.modules()]


def _put_back(random: generators.States, modes: Modes) -> None:
    generators.put_back(random)
    for m, training in modes:
        m.training = training


def _check_closed(found: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Raise ValueError if steps depend on something that needs gradients and is none of ``leaves``."""
    for strange in strangers(found, leaves):
        raise ValueError(
            "recompute differentiates with respect to parameters, rule state and tasks alone: found a tensor of "
            f"shape {list(strange.shape)} that needs gradients elsewhere (a radius, the loss, a buffer); detach "
            "it, or leave recompute out"
        )
