"""VaSSO (Li & Giannakis 2023, arXiv 2309.15639): climb along a running mean of the gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_number, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_radius


@dataclass(frozen=True)
class VaSSO(DirectionRule):
    """``eps = rho d_t/||d_t||``, ``d_t = (1 - theta) d_{t-1} + theta g``, ``d_0 = g_0``; 2 evaluations a step.

    Args:
        rho: radius.
        theta: weight of the newest gradient; 1 is SAM.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    theta: float = 0.9
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_number("theta", self.theta)
        if not 0 < self.theta <= 1:
            raise ValueError(f"expected 0 < theta <= 1, got theta={self.theta}")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("d",)

    def init(self, params: Params) -> State:
        """No running mean yet."""
        self.perturb.check(params)
        return {}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w + eps)``."""
        g = at(local=True, graph=self.through).grads
        d = tree.average(state.get("d", {}), g, self.theta)
        eps = self.perturb(params, d, self.rho)
        return at(eps if self.through else tree.detach(eps)).grads, {"d": d}
