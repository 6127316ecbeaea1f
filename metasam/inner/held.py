"""What Python holds of a model, beside its parameters: what a graph has as constants, and a copy keeps to itself."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Hashable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

Held = dict[str, Hashable]


class Same:
    """An object that is equal to itself alone. It is kept, so that no other gets its id."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)

    def __deepcopy__(self, memo: object) -> Same:
        return self  # a copy of it would be another


def held(model: nn.Module) -> Held:
    """Every attribute of every module, by name: numbers by value, also in containers, and objects by identity."""
    found: Held = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        found[prefix + "__class__"] = Same(type(module))
        for k, v in vars(module).items():
            if k not in _TORCHS and not (isinstance(v, dict) and not v):
                found[prefix + k] = _frozen(v)
    return found


_TORCHS = {
    *("_parameters", "_non_persistent_buffers_set", "_is_full_backward_hook"),
    *(k for k in vars(nn.Module()) if "state_dict" in k),
}
"""What modules hold that a call does not depend on, or that is no attribute: graphs ask at every pass."""


def of_loss(loss_fn: object, depth: int = 4) -> Hashable:
    """The same of a loss and all that it is made of: of modules with their parameters, which no graph is given; of
    objects; of closures, defaults and numbers among globals; of what methods and partial functions are bound to.
    """  # noqa: D205
    it = Same(loss_fn)
    if not depth or isinstance(loss_fn, Tensor | type):
        return it
    if isinstance(loss_fn, nn.Module):
        tensors = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
        return it, *held(loss_fn).items(), *((k, Same(v)) for k, v in tensors)
    if isinstance(loss_fn, functools.partial):
        given = _frozen([loss_fn.args, loss_fn.keywords])
        return it, of_loss(loss_fn.func, depth - 1), given
    if isinstance(loss_fn, MethodType):
        return it, of_loss(loss_fn.__func__, depth - 1), of_loss(loss_fn.__self__, depth - 1)
    if isinstance(loss_fn, FunctionType):
        around = {k: v for k in loss_fn.__code__.co_names if isinstance(v := loss_fn.__globals__.get(k), PLAIN)}
        defaults = _frozen([loss_fn.__defaults__, loss_fn.__kwdefaults__, around])
        cells = [_content(c) for c in loss_fn.__closure__ or ()]
        called = (of_loss(c, depth - 1) for c in cells if callable(c))
        return it, defaults, _frozen(cells), *called
    return it, Same(type(loss_fn)), _frozen(getattr(loss_fn, "__dict__", {}))


_HOOKS = [k for k, v in vars(nn.modules.module).items() if k.startswith("_global_") and isinstance(v, dict)]


def global_hooks() -> Hashable:
    """Hooks of all modules there are."""
    return tuple((k, _frozen(v)) for k in _HOOKS if (v := getattr(nn.modules.module, k)))


def numbers(found: Held) -> Held:
    """All but which objects they are."""
    return {k: _without_objects(v) for k, v in found.items()}


def without_tensors(found: Held) -> Held:
    """All but which tensors they are: many a forward keeps some of its own in an attribute."""
    return {k: _without_objects(v, Tensor) for k, v in found.items()}


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


def _without_objects(value: Hashable, kind: type = object) -> Hashable:
    if isinstance(value, tuple):
        return tuple(_without_objects(v, kind) for v in value)
    return None if isinstance(value, Same) and isinstance(value.it, kind) else value


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return Same(cell)
