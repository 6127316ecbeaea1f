"""Values that have no derivative, and say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def constant(values: Sequence[Tensor | None], of: Iterable[Tensor | None], why: str) -> list[Tensor | None]:
    """The same values; whoever differentiates them in something that the tensors ``of`` come from gets a RuntimeError.

    For a ``backward`` that has no derivative. ``torch.autograd.function.once_differentiable`` cuts its results off from
    where they come from, so that ``torch.autograd.grad`` goes around them and leaves their share out without a word.
    """
    if not torch.is_grad_enabled():
        return list(values)
    there = [v for v in values if v is not None]
    ends = iter(_Constant.apply(why, len(there), *there, *[v for v in of if v is not None and v.requires_grad]))
    return [v if v is None else next(ends) for v in values]


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, count: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.why = why
        return tuple(v.view_as(v) for v in values[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.why)
