"""The base optimizer itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..types import Oracle, Params, State
from .base import DirectionRule


@dataclass(frozen=True)
class Plain(DirectionRule):
    """``u(grad L(w))``: one gradient evaluation a step."""

    stacks: ClassVar[bool] = True

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w)``."""
        return at().grads, state
