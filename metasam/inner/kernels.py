"""Where torch is slow on a CPU: the kernels that the inner loop uses instead, with the user's model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from .batch_norm import BatchNorm
from .max_pool import MaxPool


def concern(model: nn.Module) -> bool:
    """Whether a model has layers that there is a kernel for."""
    return any(isinstance(m, _BatchNorm | nn.MaxPool2d) for m in model.modules())


class Kernels(TorchFunctionMode):
    """Within: calls of ``batch_norm`` and ``max_pool2d`` that a kernel of ours can take go there.

    A ``TorchFunctionMode`` of the caller's own, entered outside, does not see these; one that forward enters does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a compiler would take the second derivative of our functions for that of their outputs alone
        ours = None if torch.compiler.is_compiling() else _OURS.get(func)
        found = None if ours is None else ours(*args, **(kwargs or {}))
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
    # what is wrong with settings, and with a single value a channel, is for torch to say
    if (
        by_batch
        and (weight is None) == (bias is None)
        and isinstance(eps, float)
        and eps > 0
        and isinstance(momentum, float)
        and _plain(input, weight, bias)
        and input.ndim > 1
        and input.numel() > input.shape[1] > 0
        and all(v is not None and v.shape == input.shape[1:2] for v in affine)
    ):
        return BatchNorm.apply(input, weight, bias, eps)
    return None


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    stride = kernel_size if stride is None or (type(stride) in (tuple, list) and not stride) else stride
    pairs = [_pair(n) for n in (kernel_size, stride, padding, dilation)]
    if None in pairs or return_indices or not _plain(input):  # what is wrong with settings is for torch to say
        return None
    if input.ndim != 4 or not input.numel() or not input.is_contiguous():
        return None
    return MaxPool.apply(input, *pairs, ceil_mode)


def _pair(size: Any) -> list[int] | None:
    """A size for height and width, where it is said in the usual way."""
    both = [size] * 2 if type(size) is int else list(size) if type(size) in (tuple, list) else []
    both = both * 2 if len(both) == 1 else both
    return both if len(both) == 2 and all(type(n) is int for n in both) else None


_OURS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
}
