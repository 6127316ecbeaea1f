"""Calling a module and leaving it as it was: with other tensors in the place of its own, in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def aliases(model: nn.Module) -> dict[str, str]:
    """Further places in which the modules of ``model`` hold a tensor, and the name under which it is known.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> aliases(tied)
    {'1.weight': '0.weight'}
    """
    known: dict[int, str] = {id(p): k for k, p in model.named_parameters()}
    found = {}
    for name, module in model.named_modules():
        for k, tensor in (*module._parameters.items(), *module._buffers.items()):
            own = f"{name}.{k}" if name else k
            if tensor is not None and known.setdefault(id(tensor), own) != own:
                found[own] = known[id(tensor)]
    return found


def call(model: nn.Module, tensors: Mapping[str, Tensor], x: Any, tied: Mapping[str, str] | None = None) -> Any:
    """``model(x)`` with these tensors, by name, for its own, wherever it holds them.

    ``torch.func.functional_call`` looks for tied tensors itself, which takes longer than a small layer; and a module
    that has two names it takes for two, of which one keeps the tensor that was only lent.

    Args:
        model: left as it is.
        tensors: by the names of ``named_parameters`` and ``named_buffers``; the others are the model's own.
        x: its one argument, also left as it is if a tensor: a first layer may write to it.
        tied: `aliases` of the model, for who calls it often.
    """
    tied = aliases(model) if tied is None else tied
    also = {k: tensors[known] for k, known in tied.items() if known in tensors}
    own = x.clone() if isinstance(x, Tensor) else x
    return functional_call(model, {**tensors, **also}, (own,), tie_weights=False)


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Within: eval mode; afterwards every module is in the mode it was in."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:  # a module's attributes are slow to set
                module.training = training
