"""Calling a module and leaving it as it was: with other tensors in the place of its own, in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Where a module holds a tensor."""

    name: str
    held: dict[str, Any]
    """The module's parameters, or its buffers."""
    key: str
    """Under what in them."""


Places = dict[str, list[Place]]
"""All places of a tensor, by the name that ``named_parameters`` or else ``named_buffers`` has for it."""


def places(model: nn.Module) -> Places:
    """Where the modules of ``model`` hold their tensors; tied ones are in several places.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> {known: [place.name for place in at] for known, at in places(tied).items()}
    {'0.weight': ['0.weight', '1.weight'], '1.bias': ['1.bias']}
    """
    known: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        known.setdefault(id(tensor), name)
    found: Places = {}
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    own = f"{name}.{key}" if name else key
                    found.setdefault(known[id(tensor)], []).append(Place(own, held, key))
    return found


def call(model: nn.Module, tensors: Mapping[str, Tensor], x: Any, at: Places | None = None) -> Any:
    """``model(x)`` with these tensors, by name, for its own, wherever it holds them.

    ``torch.func.functional_call`` looks the places up in every call, which takes longer than a small layer; and a
    module that has two names it takes for two, of which one keeps the tensor that was only lent.

    Args:
        model: left as it is.
        tensors: by the names of ``named_parameters`` and ``named_buffers``; the others are the model's own.
        x: its one argument, which a first layer may write to.
        at: `places` of the model, for who calls it often.
    """
    at = places(model) if at is None else at
    own: list[tuple[Place, Any]] = []
    try:
        for name, tensor in tensors.items():
            for place in at[name]:
                own.append((place, place.held[place.key]))
                place.held[place.key] = tensor
        return model(x)
    finally:
        for place, tensor in own:
            place.held[place.key] = tensor


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
