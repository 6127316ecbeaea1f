"""Max-pooling of images on a CPU, several times as fast as torch's kernel for contiguous images.

torch has a vectorised kernel for images with their channels last, and a scalar one for others. A few images at a time
are turned around, which stays in the cache; outputs and indices are those of the scalar kernel to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten.max_pool2d_with_indices.default
_backward = torch.ops.aten.max_pool2d_with_indices_backward.default

AT_ONCE = 1 << 20
"""Numbers to turn around at once."""


class MaxPool(torch.autograd.Function):
    """``MaxPool.apply(x, kernel_size, stride, padding, dilation, ceil_mode)``, x ``[n, channels, height, width]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        parts = []
        for some in x.split(max(1, AT_ONCE // max(1, x[:1].numel()))):
            found = _forward(some.contiguous(memory_format=torch.channels_last), *settings)
            parts.append([f.contiguous() for f in found])
        y, indices = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(x, indices)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        return _Gradient.apply(gy, *ctx.saved_tensors, *ctx.settings), *[None] * len(ctx.settings)


class _Gradient(torch.autograd.Function):
    """Linear in ``gy``: x gives its shape alone."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, indices: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(indices)
        return _backward(gy, x, *settings, indices)

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return a.flatten(2).gather(2, indices.flatten(2)).view_as(indices), *[None] * 7
