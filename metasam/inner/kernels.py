"""Where torch is slow on a CPU: what the inner loop does instead, with the user's model as it is.

Images lie with their channels last, which torch's kernels of convolutions, BatchNorm and pooling are faster for, up to
several times; what a convolution puts out that way stays so in the layers that follow. Second derivatives of
convolutions and of BatchNorm are our own, as torch's are slow, and those of channels-last convolutions slowest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from ..types import Params
from .batch_norm import BatchNorm
from .convolution import Convolution

WIDE = 16
"""Channels from which on it pays to have them last: with fewer they fill no vector."""


def concern(model: nn.Module) -> bool:
    """Whether a model has layers that there is a kernel for."""
    layers = list(model.modules())
    if any(isinstance(m, _InstanceNorm) for m in layers):  # torch has one for images as usual alone
        return False
    return any(
        isinstance(m, _BatchNorm) or (isinstance(m, nn.Conv2d) and _wide(m.in_channels, m.out_channels)) for m in layers
    )


PLACES = 500
"""Places in a batch of images above which torch's second derivative of a convolution, by filters as large as images, is
the slower one."""

NUMBERS = 10_000
"""Numbers above which BatchNorm gains more by fewer passes over them than it loses by operations called from Python."""


def _wide(*channels: int) -> bool:
    return max(channels) >= WIDE


def arranged(params: Params) -> Params:
    """The parameters with the filters of images channels last, as `Kernels` has the images."""
    filters = {k: v for k, v in params.items() if v.ndim == 4 and _wide(*v.shape[:2]) and _plain(v)}
    return {**params, **{k: _ChannelsLast.apply(v) for k, v in filters.items()}}


class _ChannelsLast(torch.autograd.Function):
    """What gradients arrive at from within: theirs lie as usual, as a caller may want to ``view`` them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.contiguous()


class Kernels(TorchFunctionMode):
    """Within: calls of ``conv2d`` and ``batch_norm`` that a kernel of ours can take go there.

    A ``view`` that channels-last images do not allow is one of a copy that does, as with ``reshape``. A
    ``TorchFunctionMode`` of the caller's own, entered outside, does not see these calls; one that forward enters does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = _OURS.get(func)
        # a compiler would take the second derivative of our functions for that of their outputs alone
        found = None if ours is None or torch.compiler.is_compiling() else ours(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors of one dtype on a CPU, outside of ``torch.func`` and forward derivatives."""
    given = [t for t in tensors if t is not None]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(
        type(t) in (Tensor, nn.Parameter)
        and t.device.type == "cpu"
        and t.dtype in (torch.float32, torch.float64)
        and t.dtype == given[0].dtype
        and forward_ad.unpack_dual(t).tangent is None
        for t in given
    )


# what is wrong with settings or shapes is for torch to say


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Any:
    pairs = [_pair(n) for n in (stride, padding, dilation)]
    if None in pairs or type(groups) is not int or not _plain(input, weight, bias):
        return None
    if torch.is_autocast_enabled("cpu") or input.ndim != 4 or weight.ndim != 4 or not input.numel():
        return None
    if not _wide(input.shape[1], weight.shape[0]):
        return None
    # `contiguous` would leave images of one channel as they are, and with them all that follows
    x = input.to(memory_format=torch.channels_last)
    settings: Any = (*pairs, False, [0, 0], groups)
    if x[:, 0].numel() < PLACES:
        return torch.convolution(x, weight, bias, *settings)
    return Convolution.apply(x, weight, bias, settings)


def _pair(size: Any) -> list[int] | None:
    """A size for height and width, where it is said in the usual way."""
    both = [size] * 2 if type(size) is int else list(size) if type(size) in (tuple, list) else []
    both = both * 2 if len(both) == 1 else both
    return both if len(both) == 2 and all(type(n) is int for n in both) else None


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    by_batch = training is True and running_mean is None and running_var is None
    affine = [weight, bias] if weight is not None else []
    if (
        by_batch
        and (weight is None) == (bias is None)
        and isinstance(eps, float)
        and eps > 0
        and isinstance(momentum, float)
        and _plain(input, weight, bias)
        and input.ndim > 1
        and input.numel() > max(NUMBERS, input.shape[1])
        and all(v is not None and v.shape == input.shape[1:2] for v in affine)
    ):
        # torch's own kernels, called bare, take scales for contiguous where images have their channels last
        return BatchNorm.apply(input, *(None if v is None else v.contiguous() for v in (weight, bias)), eps)
    return None


def _view(input: Tensor, *shape: Any, **settings: Any) -> Any:
    try:
        return input.view(*shape, **settings)
    except RuntimeError:
        return None if input.is_contiguous() else input.contiguous().view(*shape, **settings)


def _view_as(input: Tensor, other: Tensor) -> Any:
    return _view(input, other.shape)


_OURS: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    Tensor.view: _view,
    Tensor.view_as: _view_as,
}
