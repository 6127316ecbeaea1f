"""Gradients that somebody accumulates outside the closure: a step makes its own, and must not drop those in silence."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import shards
from ..types import Params

if TYPE_CHECKING:
    from .sharpness_aware import SharpnessAware

_MARK = "_left_by_a_step"


def mark(optimizer: SharpnessAware) -> None:
    """Tell the gradients that a step leaves behind from others, by the first of them."""
    grad = _first(p.grad for group in optimizer.param_groups for p in group["params"])
    if grad is not None:
        setattr(grad, _MARK, grad._version)


def _is_foreign(optimizer: SharpnessAware) -> bool:
    # over frozen parameters too: which one is the first must not depend on what is frozen by now
    grad = _first(p.grad for group in optimizer.param_groups for p in group["params"])
    return grad is not None and getattr(grad, _MARK, None) != grad._version


def is_piled_up(optimizer: Optimizer) -> bool:
    """Whether one backward, and nothing else, has come on top of the gradients that a step left behind."""
    grad = _first(p.grad for group in optimizer.param_groups for p in group["params"])
    return grad is not None and getattr(grad, _MARK, None) == grad._version - 1


def _first(grads: Iterable[Tensor | None]) -> Tensor | None:
    return next((g for g in grads if g is not None), None)


def watched(closure: Callable[..., Any], live: Params, optimizer: SharpnessAware) -> Callable[..., Any]:
    """The closure; where gradients wait that no step left, one that warns, once, unless it clears them itself.

    A closure that clears does not want them (a discriminator's, after the generator's backward). Whether it does shows
    in a stand-in for one of them: zeros, so that the gradient is what it would have been without.
    """
    if optimizer.warned or not _is_foreign(optimizer):
        return closure
    parameter = next((p for p in live.values() if p.grad is not None and not p.grad.is_sparse), None)
    if parameter is None:
        return closure
    waiting: list[Any] = [parameter.grad]

    @functools.wraps(closure)
    def watching(*args: Any, **kwargs: Any) -> Any:
        if not waiting:
            return closure(*args, **kwargs)
        found = waiting.pop()
        stand_in = parameter.grad = torch.zeros_like(parameter)
        before = stand_in._version
        loss = closure(*args, **kwargs)
        if parameter.grad is stand_in:
            # one backward and nothing else; clearing in place would have been one more change
            if stand_in._version == before + 1 and bool(shards.local(found).any()):
                optimizer.warned = True
                warnings.warn(_MESSAGE, stacklevel=2)
            if stand_in._version == before:
                parameter.grad = None
        return loss

    return watching


_MESSAGE = (
    "gradients were there before step(closure), and the closure does not clear them: they are dropped, since a "
    "sharpness-aware step evaluates the loss itself, more than once. If they were accumulated outside (Lightning's "
    "accumulate_grad_batches does that), accumulate inside: a closure that calls optimizer.zero_grad(), then backward "
    "for every micro-batch. If they are left over from something else, call optimizer.zero_grad() before the step"
)
