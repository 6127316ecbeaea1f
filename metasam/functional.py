"""Calling a module and leaving it as it was: with other tensors in the place of its own, in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Where a module holds a tensor."""

    module: nn.Module
    kind: str
    """``"_parameters"`` or ``"_buffers"``, which a module may exchange as a whole."""
    key: str


Places = dict[str, list[Place]]
"""All places of each tensor, by the name that it is known by; further names of it have none."""


def places(model: nn.Module) -> Places:
    """Where the modules of ``model`` hold their tensors.

    A tensor is known by its name among ``named_parameters``, or else ``named_buffers``, or else the first of its own;
    tied ones are in several places.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> {name: len(at) for name, at in places(tied).items()}
    {'0.weight': 2, '1.weight': 0, '1.bias': 1}
    """
    known = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
    found: Places = {}
    for prefix, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault(name, [])
                    found.setdefault(known.setdefault(id(tensor), name), []).append(Place(module, kind, key))
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

    Raises:
        KeyError: a name of none of its tensors.
    """
    at = places(model) if at is None else at
    if unknown := tensors.keys() - at.keys():
        raise KeyError(f"expected names of the model's tensors ({', '.join(list(at)[:4])}, ...), got {min(unknown)!r}")
    own: list[tuple[Place, Any]] = []
    try:
        for name, tensor in tensors.items():
            for place in at[name]:
                held = getattr(place.module, place.kind)
                own.append((place, held[place.key]))
                held[place.key] = tensor
        return model(x)
    finally:
        for place, tensor in reversed(own):  # modules may share what they hold them in
            getattr(place.module, place.kind)[place.key] = tensor


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
