"""WSAM (Yue et al. 2023, arXiv 2305.15817): sharpness as a weighted regulariser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Descent, Oracle, Params, State
from .base import Rule, check_fraction, check_radius


@dataclass(frozen=True)
class WSAM(Rule):
    """Coupled: ``u(a g_p + (1 - a) g)``; decoupled: ``u(g)``, then ``w -= lr a (g_p - g)``; ``a = gamma/(1 - gamma)``.

    ``g_p = grad L(w + eps)``; 2 gradient evaluations a step.

    Args:
        rho: radius.
        gamma: weight of sharpness; 0.5 is SAM where coupled, 0.9 means a = 9.
        decouple: keep the sharpness term out of the base optimizer's momentum and preconditioner.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    gamma: float = 0.9
    decouple: bool = True
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_fraction("gamma", self.gamma)

    def init(self, params: Params) -> State:
        """No state."""
        self.perturb.check(params)
        return {}

    def __call__(self, at: Oracle, descend: Descent, params: Params, state: State) -> tuple[Params, State]:
        """One step."""
        g = at().grads  # enters the descent, so not local
        eps = self.perturb(params, g, self.rho)
        g_p = at(eps if self.through else tree.detach(eps)).grads
        a = self.gamma / (1 - self.gamma)
        sharpness = tree.add(g_p, g, -1)
        if not self.decouple:
            # a g_p + (1 - a) g, written so that it is exactly g_p at a = 1 and exactly g where g_p = g
            return descend(params, tree.add(g_p, sharpness, a - 1)), state
        pull = {k: a * descend.lr(k) for k in sharpness}
        return tree.add(descend(params, g), tree.scale(sharpness, pull), -1), state
