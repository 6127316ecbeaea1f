"""Tensors spread over processes (``DTensor``, as ``fully_shard`` makes of parameters): what is needed to work on them.

A sum over such a tensor's entries is, until it is reduced, one process's share of the sum. Everything here is free
where no tensor is spread, and imports ``torch.distributed.tensor`` only where one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def mesh_of(tensor: Tensor) -> Any:
    """The processes that a tensor is spread over, a hashable mesh; None for an ordinary one."""
    # by attribute: importing DTensor's module takes long, and whoever has a DTensor has imported it already
    return None if type(tensor) in (Tensor, Parameter) else getattr(tensor, "device_mesh", None)


def any_spread(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is spread over processes."""
    return any(mesh_of(t) is not None for t in tensors)


def settled(tensor: Any) -> Any:
    """The same tensor with pending sums carried out, so that its pieces are entries of it."""
    if mesh_of(tensor) is None or not any(p.is_partial() for p in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(tensor.device_mesh, [Replicate() if p.is_partial() else p for p in tensor.placements])


def alike(tensor: Any, like: Any) -> Any:
    """The same tensor, laid out over processes as ``like`` is."""
    if mesh_of(like) is None or mesh_of(tensor) is None:
        return spread(tensor, like)
    return tensor if tensor.placements == like.placements else tensor.redistribute(like.device_mesh, like.placements)


def local(tensor: Any) -> Tensor:
    """This process's piece, sharing memory; an ordinary tensor is its own."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()


def spread(whole: Tensor, like: Any) -> Tensor:
    """A tensor that every process has whole, cut up as ``like`` is; nothing is sent."""
    if mesh_of(like) is None:
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        mesh, like.placements
    )


def total(sums: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Sum of 0-dim tensors, each given with the tensor over whose local piece it was taken; one reduction a layout."""
    groups: dict[Any, list[Tensor]] = {}
    for of, value in sums:
        mesh = mesh_of(of)
        split = () if mesh is None else tuple(not p.is_replicate() for p in of.placements)
        groups.setdefault((mesh, split) if any(split) else None, []).append(value)
    done: list[Tensor] = []
    for key, values in groups.items():
        home = values[0].device
        share = torch.stack([v.to(home) for v in values]).sum()
        done.append(share if key is None else _reduced(share, *key))
    return torch.stack([v.to(done[0].device) for v in done]).sum()


def _reduced(share: Tensor, mesh: Any, split: tuple[bool, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if s else Replicate() for s in split]
    return DTensor.from_local(share, mesh, placements, run_check=False).full_tensor()
