"""Friendly-SAM (Li et al. 2024, arXiv 2403.12350): climb along the noise of the batch, not along the full gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_fraction, check_radius


@dataclass(frozen=True)
class FriendlySAM(DirectionRule):
    """``eps = rho d/||d||``, ``d = g - sigma m_{t-1}``, ``m_t = decay m_{t-1} + (1 - decay) g``; 2 evaluations a step.

    The first step has ``d = g`` and ``m = g``.

    Args:
        rho: radius.
        sigma: how much of the running mean to take out; 0 is SAM.
        decay: the paper's lambda.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    sigma: float = 1.0
    decay: float = 0.9
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_radius(self.sigma, "sigma")
        check_fraction("decay", self.decay)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("m",)

    def init(self, params: Params) -> State:
        """No running mean yet."""
        self.perturb.check(params)
        return {}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w + eps)``."""
        g = at(local=True, graph=self.through).grads
        d = tree.add(g, state["m"], -self.sigma) if "m" in state else g
        m = tree.average(state.get("m", {}), g, 1 - self.decay)
        eps = self.perturb(params, d, self.rho)
        return at(eps if self.through else tree.detach(eps)).grads, {"m": m}
