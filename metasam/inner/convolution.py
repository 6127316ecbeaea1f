"""Convolution that is differentiated twice, by the kernels of its first derivative.

torch computes the gradients of a convolution's gradient as convolutions by whole images, and for the first layer some
that nobody asked for: 1.2 to 4 times as long. A convolution C(x, w) is linear in x and in w, and its gradients are
``gx = X(gy, w)`` and ``gw = W(gy, x)``, adjoint to it: ``<gy, C(x, w)> = <X(gy, w), x> = <W(gy, x), w>``. So
``<a, gx> + <b, gw> + <c, gbias> = <gy, C(a, w) + C(x, b) + c>`` has the gradients

    in gy:  C(a, w) + C(x, b) + c
    in x:   X(gy, b)
    in w:   W(gy, a)

and the kernel that gives X and W for (gy, x, w) gives these two for (gy, a, b).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_backward = torch.ops.aten.convolution_backward.default

Settings = tuple[list[int], list[int], list[int], bool, list[int], int]
"""Stride, padding, dilation, transposed, output padding, groups."""


class Convolution(torch.autograd.Function):
    """``Convolution.apply(x, w, bias, settings)``, x a batch; bias may be None.

    Outputs and gradients are torch's own to the last bit, second derivatives to rounding, and there are all others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.settings = settings
        return torch.convolution(x, w, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        return *_Gradient.apply(gy, *ctx.saved_tensors, ctx.settings, ctx.needs_input_grad[:3]), None


class _Gradient(torch.autograd.Function):
    """The gradients of Convolution that are ``wanted``, as torch computes them."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, w: Tensor, settings: Settings, wanted: tuple[bool, ...]) -> Any:
        ctx.save_for_backward(gy, x, w)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return tuple(_backward(gy, x, w, [w.shape[0]], *settings, wanted))

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> Any:
        (gy, x, w), settings = ctx.saved_tensors, ctx.settings
        if a is None and b is None and c is None:
            return (None,) * 5
        # ordinary operations, which have derivatives of their own
        parts = [] if a is None else [torch.convolution(a, w, None, *settings)]
        parts += [] if b is None else [torch.convolution(x, b, c, *settings)]
        parts += [] if b is not None or c is None else [c.view(-1, *[1] * (gy.ndim - 2)).expand_as(gy)]
        of_gy = parts[0] if len(parts) == 1 else sum(parts)
        # an image or a filter that there is no cotangent of gives its shape alone
        wanted = [b is not None and ctx.needs_input_grad[1], a is not None and ctx.needs_input_grad[2], False]
        of_x, of_w, _ = _backward(gy, x if a is None else a, w if b is None else b, None, *settings, wanted)
        return of_gy, of_x, of_w, None, None
