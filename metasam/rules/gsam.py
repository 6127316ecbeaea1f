"""GSAM: surrogate gap guided SAM (Zhuang et al. 2022, arXiv 2203.08065)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_radius


@dataclass(frozen=True)
class GSAM(DirectionRule):
    """``u(g_p - gap g_perp)``, ``g_p = grad L(w + eps)``, ``g_perp`` the part of ``g = grad L(w)`` orthogonal to g_p.

    Args:
        rho: radius. The paper lets it follow the learning rate between two values; see `metasam.ProportionalRho`.
        gap: the paper's alpha, how hard to lower the surrogate gap ``L(w + eps) - L(w)``; 0 is SAM.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    gap: float = 0.4
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_radius(self.gap, "gap")

    def init(self, params: Params) -> State:
        """No state."""
        self.perturb.check(params)
        return {}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``g_p - gap g_perp``."""
        g = at().grads  # enters the descent, so not local
        eps = self.perturb(params, g, self.rho)
        g_p = at(eps if self.through else tree.detach(eps)).grads
        return tree.add(g_p, tree.reject(g, g_p), -self.gap), state
