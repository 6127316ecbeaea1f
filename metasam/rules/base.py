"""What a rule is: given a gradient oracle and a descent, take one step.

A rule never changes what it is given, never sees a model, cannot tell whether a live optimizer, a differentiable inner
loop or a batch of tasks calls it, and never lets gradient values decide how many evaluations it makes (the workers of
a parallel run would disagree). Its state goes in and comes out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar

from torch import Tensor

from ..perturb import check_number
from ..tree import Factor
from ..types import Descent, Eval, Oracle, Params, State


def check_radius(rho: Factor, name: str = "rho") -> None:
    """Raise ValueError unless a radius, or each by key, is finite and not negative (tensors are taken as they are)."""
    for r in rho.values() if isinstance(rho, Mapping) else (rho,):
        if not isinstance(r, Tensor):
            check_number(name, r)
        if isinstance(r, Real) and not (math.isfinite(r) and r >= 0):
            raise ValueError(f"expected {name} >= 0 and finite, got {name}={r}")


def check_fraction(name: str, value: float) -> None:
    """Raise ValueError unless ``0 <= value < 1``."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"expected 0 <= {name} < 1, got {name}={value}")


def check_count(name: str, value: Any, least: int | None = 1, of: str = "") -> None:
    """Raise ValueError unless it is a whole number, and not below ``least``; ``of`` says what is counted."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a whole number, got {name}={value!r}")
    if least is not None and value < least:
        raise ValueError(f"expected {name} >= {least}{of and ' ' + of}, got {name}={value}")


def losses_of(evaluation: Eval, rule: object) -> Tensor:
    """The losses of the examples, ``[B]``; raises TypeError naming what to write where nobody gives them."""
    if evaluation.losses is None:
        raise TypeError(
            f"{type(rule).__name__} needs the loss of each example: give step a closure(part=None) that returns the "
            "losses [B] of x[part] (all of them for None) and leaves backward to step; inner loops have none to give"
        )
    return evaluation.losses


def stackable(rule: Rule) -> bool:
    """Whether a rule and its geometry say that they stack, see `Rule.stacks`."""
    return all(vars(type(part)).get("stacks", False) for part in (rule, getattr(rule, "perturb", rule)))


class Rule(ABC):
    """One step of one method. Implementations are frozen dataclasses; ``hyper`` names the fields that a live
    optimizer keeps in its param groups, where they can differ by group and be scheduled.
    """  # noqa: D205

    hyper: ClassVar[tuple[str, ...]] = ()
    clean: ClassVar[bool] = True
    """Whether every step evaluates the training loss at the undisplaced point, where BatchNorm counts its batch."""
    stacks: ClassVar[bool] = False
    """Whether it can step for many tasks at once, on tensors with a task dimension in front (`metasam.tree.stacked`):
    what it does to tensors beside calling `metasam.tree` is entry by entry. A class says so for itself, not for its
    subclasses, and so does a geometry; the others run under ``torch.vmap``, which is slower and takes anything."""
    needs_momentum: ClassVar[bool] = False
    """Whether it asks the descent for a momentum, which the SGD of inner loops has none of."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors, one a parameter, that the state has once there were steps."""
        return ()

    @property
    def validates(self) -> bool:
        """Whether the rule asks for the validation loss, ``on="val"``."""
        return False

    def init(self, params: Params) -> State:
        """State before the first step; raises ValueError when the rule cannot work on these parameters."""
        return {}

    @abstractmethod
    def __call__(self, at: Oracle, descend: Descent, params: Params, state: State) -> tuple[Params, State]:
        """Return the parameters after one step, and the new state.

        Evaluate first and descend afterwards: a live optimizer takes no descent once an evaluation was not finite.
        """


class DirectionRule(Rule):
    """A rule that only shapes the gradient: it is asked for a direction, and one descent follows it."""

    @abstractmethod
    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """Return the gradients to descend along, and the new state."""

    def __call__(self, at: Oracle, descend: Descent, params: Params, state: State) -> tuple[Params, State]:
        """Descend once along `direction`."""
        grads, state = self.direction(at, params, state)
        return descend(params, grads), state
