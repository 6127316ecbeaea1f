"""How long a run trains, and how its learning rate falls meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * min(done, 1.0))) / 2,
}
"""Factor of the learning rate, as a function of the share of the run that is done."""


@dataclass
class Budget:
    """The end of a run: after ``iterations`` steps, or before the step that would exceed ``passes`` if that is given.

    What the next step will cost is taken to be what the dearest one so far has cost: rules whose steps differ (LookSAM)
    stay within the budget, and may leave less than one step of it.

    Args:
        iterations: steps.
        passes: gradient evaluations, counted as the learner counts them.
        dearest: what the dearest step so far has cost; part of a run's state.

    >>> budget = Budget(passes=5.0)
    >>> spent = 0.0
    >>> while budget.allows(0, spent):
    ...     budget.paid(2.0)
    ...     spent += 2.0
    >>> spent
    4.0
    """

    iterations: int = 1000
    passes: float | None = None
    dearest: float = 0.0

    @property
    def total(self) -> float:
        """The whole length, in the unit of `position`."""
        return self.iterations if self.passes is None else self.passes

    def position(self, iteration: int, spent: float) -> float:
        """How far a run is: its iteration, or what it has spent."""
        return iteration if self.passes is None else spent

    def allows(self, iteration: int, spent: float) -> bool:
        """Whether there is room for another step."""
        if self.passes is None:
            return iteration < self.iterations
        return spent + self.dearest <= self.passes * (1 + 1e-9) and (spent < self.passes or not self.dearest)

    def paid(self, cost: float) -> None:
        """Remember the price of a step.

        Raises:
            ValueError: a single step costs more than the whole budget.
        """
        self.dearest = max(self.dearest, cost)
        if self.passes is not None and self.dearest > self.passes * (1 + 1e-9):
            raise ValueError(
                f"expected budget.passes to pay for a step of this rule, which costs {self.dearest:.3g} gradient "
                f"evaluations, got budget.passes={self.passes:g}: set budget.passes={math.ceil(self.dearest)} or more"
            )
