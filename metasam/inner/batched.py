"""``torch.vmap`` of one level, in less time: no containers to look through, and linear layers in one operation each.

vmap takes a linear layer apart, into a product, reshapes and a sum, each with derivatives of its own. Where inputs,
weights and biases all are those of many tasks, it is one ``baddbmm``. On small networks both together save a
sixth to a quarter of a meta-step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

try:  # what is public takes longer than it saves: an autograd.Function with a vmap rule, and vmap itself
    from torch._C._functorch import (
        _add_batch_dim,
        _remove_batch_dim,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
        get_unwrapped,
        is_batchedtensor,
        maybe_current_level,
        maybe_get_bdim,
        maybe_get_level,
    )
    from torch._functorch.vmap import lazy_load_decompositions

    KNOWN = True
except ImportError:
    KNOWN = False

_FORWARD, _LINEAR = nn.Linear.forward, nn.functional.linear  # as torch has them, before anybody patches them


def vmap(function: Callable[..., Any], linears: Sequence[nn.Linear] = ()) -> Callable[..., Any]:
    """``torch.vmap(function, randomness="different")`` of tensors alone, each ``[T, ...]``.

    Args:
        function: of the tensors of one task; it returns tensors, in any containers.
        linears: linear layers that it calls, see `linears_of`.
    """
    if not KNOWN:
        return torch.vmap(function, randomness="different")

    def of_all(*tensors: Tensor) -> Any:
        lazy_load_decompositions()
        count = len(tensors[0])
        with _together(linears):
            level = _vmap_increment_nesting(count, "different")
            try:
                found = function(*[_add_batch_dim(t, 0, level) for t in tensors])
                if isinstance(found, Tensor):
                    return _remove_batch_dim(found, level, count, 0)
                return tree_map_only(Tensor, lambda t: _remove_batch_dim(t, level, count, 0), found)
            finally:
                _vmap_decrement_nesting()

    return of_all


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The modules that call ``torch.nn.functional.linear`` and do nothing else, but for compiled ones."""
    compiled = {id(part) for m in model.modules() if is_compiled(m) for part in m.modules()}
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear) and type(m).forward is _FORWARD and "forward" not in vars(m)
        if id(m) not in compiled
    ]


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has wrapped it, or compiled it in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def _together(linears: Sequence[nn.Linear]) -> Iterator[None]:
    for module in linears:
        vars(module)["forward"] = partial(_forward, module)
    try:
        yield
    finally:
        for module in linears:
            vars(module).pop("forward", None)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear``; within vmap as one operation, where it can be.

    Args:
        x: ``[n, ..., in]`` of one task; of fewer dimensions, or the same for all tasks, it is left to torch.
        weight: ``[out, in]`` of one task.
        bias: ``[out]`` of one task.
    """
    level = maybe_current_level()
    of_tasks = all(maybe_get_level(v) == level for v in ((x, weight) if bias is None else (x, weight, bias)))
    if level is None or not (of_tasks and is_batchedtensor(weight) and x.ndim > 1) or _otherwise(x.device):
        return nn.functional.linear(x, weight, bias)
    x, weight = _of_all(x), _of_all(weight)
    rows = x if x.ndim == 3 else x.flatten(1, -2)
    many = torch.bmm if bias is None else partial(torch.baddbmm, _of_all(bias).unsqueeze(1))
    product = many(rows, weight.mT)
    return _add_batch_dim(product if x.ndim == 3 else product.view(*x.shape[:-1], weight.shape[1]), 0, level)


def _otherwise(device: torch.device) -> bool:
    """Whether somebody expects torch's own: who patched it, a compiler, or autocast.

    Under autocast a product is of half precision, and vmap's sum with a bias is not.
    """
    patched = nn.functional.linear is not _LINEAR
    return patched or torch.is_autocast_enabled(device.type) or torch.compiler.is_compiling()


def _of_all(tensor: Tensor) -> Tensor:
    """The tensors of all tasks, from inside vmap."""
    where, found = maybe_get_bdim(tensor), get_unwrapped(tensor)
    return found.movedim(where, 0) if where else found  # a movedim to nowhere would have derivatives, too
