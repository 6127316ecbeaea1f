"""The same dropout masks in every pass of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..types import Part

Generators = tuple[Tensor, list[Tensor]]
"""States of torch's default generators: CPU, and every CUDA device once CUDA is in use."""


def get_state() -> Generators:
    """Where the default generators are."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_state(state: Generators) -> None:
    """Put them there."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class Replay:
    """Within: an evaluation draws what the first one of this step drew on the same stream and part.

    It leaves no trace in the generators, so that afterwards they are where that first one left them.
    """

    def __init__(self) -> None:
        self.starts: dict[Any, Generators] = {}

    @contextmanager
    def __call__(self, on: str, part: Part | None) -> Iterator[None]:
        key = (on, _key(part))
        before = get_state()
        if key not in self.starts:
            self.starts[key] = before
            yield
            return
        set_state(self.starts[key])
        try:
            yield
        finally:
            set_state(before)


def _key(part: Part | None) -> Any:
    """An index tensor by its values, a slice by its ends (it is hashable from Python 3.12 on)."""
    if isinstance(part, Tensor):
        return tuple(part.flatten().tolist())
    return None if part is None else (part.start, part.stop, part.step)
