"""Arithmetic on parameters: ``dict[str, Tensor]`` in, ``dict[str, Tensor]`` out; nothing is changed in place.

A missing key means "no gradient": `add` keeps the union of keys, `dot` and `mul` the intersection.
Every function has two bodies that agree: one tensor at a time, which autograd and ``vmap`` understand, and, inside
:func:`fused`, one ``torch._foreach`` call over all tensors, which has no vmap rule but dispatches far fewer operations.
Inside :func:`stacked` tensors have a task dimension in front, and inner products and norms are a number a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from . import shards
from .types import Params

Factor = float | Tensor | Mapping[str, float | Tensor]
"""A number, a 0-dim tensor, or either by key."""

FLOOR = 1e-8
"""Below about this norm a direction is rounding noise: `normalizer` lets it fade to zero, smoothly."""

_fused: ContextVar[bool] = ContextVar("metasam_fused", default=False)
_stacked: ContextVar[bool] = ContextVar("metasam_stacked", default=False)


@contextmanager
def fused(on: bool = True) -> Iterator[None]:
    """Within: one dispatched operation for all tensors (live optimizers; no autograd, no vmap)."""
    token = _fused.set(on)
    try:
        yield
    finally:
        _fused.reset(token)


@contextmanager
def stacked() -> Iterator[None]:
    """Within: tensors are those of T tasks, ``[T, ...]``; `dot` and `squared_norm` are ``[T]``, and so may factors be.

    >>> with stacked():
    ...     scale({"u": torch.ones(2, 3)}, dot({"u": torch.ones(2, 3)}, {"u": torch.tensor([[1.0], [2.0]])}))
    {'u': tensor([[3., 3., 3.],
            [6., 6., 6.]])}
    """
    token = _stacked.set(True)
    try:
        yield
    finally:
        _stacked.reset(token)


def _fuses(values: Sequence[Tensor]) -> bool:
    """Whether one operation takes them all: none is spread over processes, or all over the same ones."""
    return _fused.get() and len({shards.mesh_of(v) for v in values}) == 1


def _one_device(values: Sequence[Tensor]) -> bool:
    return len({v.device for v in values}) == 1


def add(a: Params, b: Params, alpha: float | Tensor = 1.0) -> Params:
    """``a + alpha b`` over the union of keys.

    >>> add({"u": torch.ones(1)}, {"u": torch.ones(1), "v": torch.ones(1)})
    {'u': tensor([2.]), 'v': tensor([1.])}
    """
    rest = {k: v for k, v in b.items() if k not in a}
    shared = {k: b[k] for k in a if k in b}
    if isinstance(alpha, Tensor):
        rest, shared, alpha = scale(rest, alpha), scale(shared, alpha), 1
    elif alpha != 1:
        rest = scale(rest, alpha)
    values = list(shared.values())
    if _fuses(values):  # a number needs no copy of b
        sums = torch._foreach_add([a[k] for k in shared], values, alpha=alpha)
    else:
        sums = tuple(_added(a[k], v, alpha) for k, v in shared.items())
    return {**a, **rest, **dict(zip(shared, sums, strict=True))}


def _added(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """``a + alpha b``; torch adds a sparse tensor to a dense one, and not the other way about."""
    return alpha * b + a if a.is_sparse and not b.is_sparse else torch.add(a, b, alpha=alpha)


def scale(tree: Params, factor: Factor) -> Params:
    """``factor * tree``, of the dtypes of ``tree``; a factor by key must cover every key."""
    values = list(tree.values())
    if not isinstance(factor, Mapping) and _fuses(values) and _one_device(values):
        return dict(zip(tree, torch._foreach_mul(values, _beside(factor, values[0])), strict=True))
    return {k: _scaled(v, factor[k] if isinstance(factor, Mapping) else factor) for k, v in tree.items()}


def _scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    if not isinstance(factor, Tensor):
        return tensor * factor
    if factor.ndim and _stacked.get():
        factor = factor.view(-1, *[1] * (tensor.ndim - 1))
    return (tensor * _beside(factor, tensor)).to(tensor.dtype)  # as a number, which changes no dtype


def _beside(factor: float | Tensor, tensor: Tensor) -> float | Tensor:
    """A 0-dim factor may live on another device (parameters spread over several)."""
    return factor.to(tensor.device) if isinstance(factor, Tensor) and factor.device != tensor.device else factor


def mul(a: Params, b: Params) -> Params:
    """``a * b`` entry by entry over the intersection of keys."""
    shared = [k for k in a if k in b]
    if _fuses([a[k] for k in shared]):
        return dict(zip(shared, torch._foreach_mul([a[k] for k in shared], [b[k] for k in shared]), strict=True))
    return {k: a[k] * b[k] for k in shared}


def detach(tree: Params) -> Params:
    """The same values as constants."""
    return {k: v.detach() for k, v in tree.items()}


def stack(trees: Sequence[Params]) -> Params:
    """Trees of the same keys and shapes as one, with a leading dimension."""
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}


def dot(a: Params, b: Params) -> Tensor:
    """Inner product over the intersection of keys, a 0-dim tensor (float32 at least); 0 where there are none."""
    shared = [k for k in a if k in b]
    if not shared:
        return torch.zeros(())
    if shards.any_spread(v for k in shared for v in (a[k], b[k])):
        return shards.total(_share(a[k], b[k]) for k in shared)
    home = a[shared[0]].device
    return torch.stack([_products(a[k], b[k]).to(home) for k in shared]).sum(0)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of two tensors; of complex ones that of their real and imaginary parts."""
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    products = _wide(a) * _wide(b)
    if not _stacked.get():
        return products.sum()
    return products.flatten(1).sum(1) if products.ndim > 1 else products


def _share(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """This process's share of an inner product, after a tensor that tells over what to add the shares up."""
    a = shards.settled(a if shards.mesh_of(b) is None else shards.alike(a, shards.settled(b)))
    return a, _products(shards.local(a), shards.local(shards.alike(b, a)))


def reject(a: Params, b: Params) -> Params:
    """The part of ``a`` orthogonal to ``b``: ``a - (a.b / b.b) b``; all of ``a`` where b vanishes.

    Exactly zero where a is parallel to b up to rounding: whoever normalises it must not follow rounding noise.

    >>> reject({"u": torch.tensor([1.0, 1.0])}, {"u": torch.tensor([2.0, 0.0])})
    {'u': tensor([0., 1.])}
    """
    square = squared_norm(b)
    along = torch.where(square > 0, dot(a, b) / torch.where(square > 0, square, 1.0), 0.0)
    rest = add(a, b, -along)
    noise = 8 * max((torch.finfo(v.dtype).eps for v in a.values()), default=0.0)
    return scale(rest, torch.where(squared_norm(rest) <= noise**2 * squared_norm(a), 0.0, 1.0))


def average(past: Params, new: Params, weight: float) -> Params:
    """``(1 - weight) past + weight new``: a running mean, which begins at ``new`` itself where there is no past.

    >>> average({"u": torch.zeros(1)}, {"u": torch.ones(1), "v": torch.ones(1)}, 0.1)
    {'v': tensor([1.]), 'u': tensor([0.1000])}
    """
    later = {k: v for k, v in new.items() if k in past}
    first = {k: v.clone() for k, v in new.items() if k not in past}
    return {**first, **add(scale(past, 1 - weight), later, weight)}


def squared_norm(tree: Params) -> Tensor:
    """``||tree||^2`` over all entries of all tensors, a 0-dim tensor (float32 at least); 0 where there are none.

    >>> squared_norm({"u": torch.tensor([3.0]), "v": torch.tensor([4.0])})
    tensor(25.)
    """
    if _fused.get() and tree and _one_device(list(tree.values())) and not shards.any_spread(tree.values()):
        values = [_wide(v) for v in tree.values()]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values))).square()
    return dot(tree, tree)


def _wide(tensor: Tensor) -> Tensor:
    """Sums of squares overflow float16 and lose everything in bfloat16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def normalizer(square: Tensor) -> Tensor:
    """``1/n`` for ``n = sqrt(square)``, fading smoothly to 0 below `FLOOR`.

    ``n^2 / (n^2 + d^2)^(3/2)`` with d = `FLOOR`. The common ``1/(n + 1e-12)`` is as good in value, but whoever
    differentiates ``g/n`` through it at a vanishing gradient gets 1e12; here the derivative is 0 there.
    """
    padded = square + FLOOR**2
    return square / padded / padded.sqrt()


@torch.no_grad()
def is_finite(tree: Params) -> bool:
    """Whether every entry is finite, on every process that tensors are spread over (one synchronisation per device)."""
    by_device = _by_device([shards.local(shards.settled(v)) for v in tree.values()])
    # L2 norms are fast, but a sum of squares can overflow; a maximum cannot, and NaN propagates through it
    finite = any(_finite_norms(by_device.values(), order) for order in (2.0, float("inf")))
    if not shards.any_spread(tree.values()):
        return finite
    # a count, since a maximum over processes may lose NaN; given once a tensor, it reaches all of them
    flags = ((shards.settled(v), torch.tensor(float(not finite), device=v.device)) for v in tree.values())
    return not bool(shards.total(flags))


@torch.no_grad()
def flags(values: Iterable[Tensor]) -> list[Tensor]:
    """Whether all entries are finite, as a tensor a device, for which nobody has waited yet."""
    norms = [torch.stack(torch._foreach_norm(vs, ord=float("inf"))) for vs in _by_device(values).values()]
    return [torch.isfinite(n).all() for n in norms]


def _by_device(values: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for v in values:
        if v.numel():
            groups.setdefault(v.device, []).append(v)
    return groups


def _finite_norms(groups: Iterable[list[Tensor]], order: float) -> bool:
    return all(math.isfinite(torch.stack(torch._foreach_norm(vs, ord=order)).amax()) for vs in groups)
