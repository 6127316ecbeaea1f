"""Momentum-SAM (Becker et al. 2024, arXiv 2401.12033): climb against the momentum buffer, at no extra cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Descent, Oracle, Params, State
from .base import Rule, check_radius


@dataclass(frozen=True)
class MomentumSAM(Rule):
    """``u(grad L(w - rho v/||v||))``, v the base's momentum buffer; 1 gradient evaluation a step.

    The minus is intended: ``v`` points where the weights have been going down, so ``-v`` is behind and, past a step's
    length, uphill. Weights are stored clean. Before the first update there is no v, and the step is a plain one.

    Args:
        rho: radius; 0.3 at a learning rate of 0.1, 3 in the authors' wide ResNets.
        perturb: the geometry.

    Raises:
        ValueError: the base keeps no momentum.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    clean: ClassVar[bool] = False
    needs_momentum: ClassVar[bool] = True

    rho: Factor = 0.3
    perturb: Perturb = field(default_factory=Steepest)

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)

    def init(self, params: Params) -> State:
        """The counter of steps that had gradients, after which there must be a momentum."""
        self.perturb.check(params)
        return {"step": 0}

    def __call__(self, at: Oracle, descend: Descent, params: Params, state: State) -> tuple[Params, State]:
        """One step."""
        v = descend.momentum(params)
        if v is None and state["step"]:
            raise ValueError("MomentumSAM needs a base optimizer with momentum, e.g. SGD(momentum=0.9) or Adam")
        eps = None if v is None else tree.scale(self.perturb(params, v, self.rho), -1.0)
        grads = at(eps).grads
        return descend(params, grads), {"step": state["step"] + bool(grads)}
