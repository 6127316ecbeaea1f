"""Where torch's default generators are, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

States = dict[torch.device, Tensor]


def states(devices: Iterable[torch.device]) -> States:
    """The state of each device's generator."""
    return {d: module.get_rng_state(*which) for d in devices for module, which in [_generator(d)]}


def put_back(before: States) -> None:
    """Set them to what `states` gave."""
    for device, state in before.items():
        module, which = _generator(device)
        module.set_rng_state(state, *which)


@contextmanager
def forked(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Within: torch draws at random, on the CPU or a GPU, and afterwards its generators are where they were.

    Not numpy's nor Python's own, which other threads may draw from meanwhile.

    Yields:
        What tells whether they have moved.
    """
    before = states({torch.device("cpu"), *([device] if device.type == "cuda" else [])})
    try:
        yield lambda: any(not torch.equal(state, before[d]) for d, state in states(before).items())
    finally:
        put_back(before)


def _generator(device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """What has ``get_rng_state`` and ``set_rng_state``, and their last argument."""
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)
