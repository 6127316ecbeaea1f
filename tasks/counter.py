"""Counter-based random numbers: draw ``j`` of a key is a hash of (key, j), so there is no generator state to carry.

The hash is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), vectorised.
64-bit words live in int64 tensors: sums and products wrap around alike, and right shifts are masked to be logical.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def _word(value: int) -> int:
    """Return ``value`` modulo 2**64, as the int64 of the same bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _word(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _word(0xBF58476D1CE4E5B9)), (27, _word(0x94D049BB133111EB)))


def _mix(z: Tensor) -> Tensor:
    """Scramble 64-bit words in place: a bijection whose every output bit depends on every input bit."""
    for shift, factor in _ROUNDS:
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Derive one new key for every entry of ``data`` (broadcast against ``key``)."""
    data = torch.as_tensor(data if isinstance(data, Tensor) else _word(data))
    return _mix(_mix(key.clone()) + data * _GOLDEN)


def task_keys(seed: int, stream: int, tasks: Sequence[int] | Tensor) -> Tensor:
    """Return one key ``[T]`` for every task number; different streams (splits) of a seed are unrelated.

    Raises:
        ValueError: a task number is negative, or not an integer.
    """
    numbers = torch.as_tensor(tasks if isinstance(tasks, Tensor) else list(tasks))
    if numbers.numel() == 0:
        numbers = numbers.long()
    if numbers.ndim != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool or (numbers < 0).any():
        raise ValueError(f"expected a flat sequence of task numbers >= 0, got {tasks!r}")
    return _mix(_stream(seed, stream) + numbers.long() * _GOLDEN)  # fold(key of the stream, numbers)


@lru_cache(maxsize=64)
def _stream(seed: int, stream: int) -> Tensor:
    """The part of `fold` that all tasks of a stream share."""
    return _mix(fold(torch.tensor(_word(seed)), stream))


def bits(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return random words ``[*keys.shape, count]`` in int64: draws ``start`` to ``start + count`` of each key.

    >>> key = torch.tensor([0])
    >>> torch.equal(bits(key, 2, start=3), bits(key, 5)[:, 3:])
    True
    """
    return _mix(keys.unsqueeze(-1) + torch.arange(start + 1, start + count + 1).mul_(_GOLDEN))


def uniform(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return numbers of U[0, 1) ``[*keys.shape, count]`` in float64, from the upper 53 bits of each draw."""
    return (bits(keys, count, start) >> 11).bitwise_and_(2**53 - 1).to(torch.float64).mul_(2.0**-53)


def normal(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return standard normal numbers ``[*keys.shape, count]`` in float64; takes ``2 * count`` draws (Box-Muller)."""
    radius, angle = uniform(keys, 2 * count, start).unflatten(-1, (2, count)).unbind(-2)
    return torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)
