"""What Python holds of a model, beside its parameters: what a graph has as constants, and a copy keeps to itself."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import torch
from torch import nn

Held = dict[str, Hashable]


class Same:
    """An object that is equal to itself alone. It is kept, so that no other gets its id."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


def held(model: nn.Module) -> Held:
    """Every attribute of every module, by name: numbers by value, also in containers, and objects by identity."""
    found: Held = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for k, v in vars(module).items():
            if k not in _TORCHS and not (isinstance(v, dict) and not v):
                found[prefix + k] = _frozen(v)
    return found


_TORCHS = {
    *("_parameters", "_non_persistent_buffers_set", "_is_full_backward_hook"),
    *(k for k in vars(nn.Module()) if "state_dict" in k),
}
"""What modules hold that a call does not depend on, or that is no attribute: graphs ask at every pass."""


def of_loss(loss_fn: object) -> Hashable:
    """The same of a loss: of its modules, or of the numbers in a function's closure."""
    if isinstance(loss_fn, nn.Module):
        return Same(loss_fn), *held(loss_fn).items()
    cells = (loss_fn.__closure__ or ()) if isinstance(loss_fn, FunctionType) else ()
    return Same(loss_fn), *(c.cell_contents for c in cells if isinstance(_content(c), PLAIN))


def numbers(found: Held) -> Held:
    """All but which objects they are."""
    return {k: _without_objects(v) for k, v in found.items()}


def changed(before: Held, after: Held) -> list[str]:
    """Names of what differs."""
    return [k for k in {**before, **after} if k not in before or k not in after or before[k] != after[k]]


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _frozen(value: Any, depth: int = 4) -> Hashable:
    kind = type(value)
    if kind in PLAIN or isinstance(value, PLAIN):  # the first is faster, and graphs ask at every pass
        return kind, value
    if isinstance(value, torch.Generator):
        return Same(value), tuple(value.get_state().tolist())
    if isinstance(value, random.Random):
        return Same(value), value.getstate()
    if depth and isinstance(value, dict):
        return dict, *((_frozen(k, 0), _frozen(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, list | tuple | deque):
        return type(value), *(_frozen(v, depth - 1) for v in value)
    if depth and isinstance(value, set | frozenset):
        return type(value), frozenset(_frozen(v, 0) for v in value)
    return Same(value)


def _without_objects(value: Hashable) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_without_objects, value))
    return None if isinstance(value, Same) else value


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return Same(cell)
