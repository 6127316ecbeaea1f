"""How far two ways to compute the same are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def apart(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> tuple[float, float]:
    """Distance of tensors from those that were wanted, and the length of these; where both have one.

    >>> apart([torch.tensor([3.0, 5.0]), None], [torch.tensor([3.0, 4.0]), None])
    (1.0, 5.0)
    """
    pairs = [(_wide(f), _wide(w)) for f, w in zip(found, wanted, strict=True) if f is not None and w is not None]
    return math.sqrt(sum(_squared(f - w) for f, w in pairs)), math.sqrt(sum(_squared(w) for _, w in pairs))


def _wide(tensor: Tensor) -> Tensor:
    if tensor.device.type == "mps":  # has no double precision
        tensor = tensor.cpu()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def _squared(tensor: Tensor) -> float:
    return float(tensor.abs().square().sum())
