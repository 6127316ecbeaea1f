"""Random tensors that are a pure function of a key, so that loops, vmap, resumed runs and workers draw the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from . import shards
from .types import Params


def normal(like: Params, *key: int) -> Params:
    """Independent standard normal tensors of the shapes, dtypes and devices of ``like``.

    >>> a, b = ({"u": torch.zeros(2), "v": torch.zeros(3)} for _ in range(2))
    >>> torch.equal(normal(a, 7, 1)["v"], normal(b, 7, 1)["v"]), torch.equal(normal(a, 7, 1)["v"], normal(a, 7, 2)["v"])
    (True, False)
    """
    generators: dict[torch.device, torch.Generator] = {}
    return {k: _draw(v, generators, key) for k, v in like.items()}


def seed(*key: int) -> int:
    """A seed for each key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _draw(like: Tensor, generators: dict[torch.device, torch.Generator], key: tuple[int, ...]) -> Tensor:
    if like.device not in generators:
        generators[like.device] = torch.Generator(like.device).manual_seed(seed(*key))
    whole = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generators[like.device])
    return shards.spread(whole, like)
