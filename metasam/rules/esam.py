"""ESAM (Du et al. 2022, arXiv 2110.03141): perturb some of the weights, descend on the examples that mind the most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .. import tree
from ..perturb import Perturb, Steepest, check_number, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_count, check_radius, losses_of


@dataclass(frozen=True)
class ESAM(DirectionRule):
    """``eps = rho/keep m*g/||g||``, m ~ Bernoulli(keep); ``u(grad L_S(w + eps))``, S the losses that eps raised most.

    Costs ``1 + select`` gradient evaluations and a forward. ``keep = select = 1`` is SAM.

    Args:
        rho: radius.
        keep: the paper's beta, the share of weights that eps moves.
        select: the paper's gamma, the share of the batch to descend on, at least one example.
        noise_seed: of the masks.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)

    rho: Factor = 0.05
    keep: float = 0.6
    select: float = 0.5
    noise_seed: int = 0
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_count("noise_seed", self.noise_seed, None)
        for name in ("keep", "select"):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"expected 0 < {name} <= 1, got {name}={getattr(self, name)}")

    def init(self, params: Params) -> State:
        """The counter of masks."""
        self.perturb.check(params)
        return {"draw": 0}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """The gradient at ``w + eps`` on the selected examples."""
        clean = at(local=True, graph=self.through)
        eps = self.perturb(params, clean.grads, self.rho)
        if self.keep < 1:
            drawn = at.noise(eps, self.noise_seed, state["draw"])
            mask = {k: (torch.special.ndtr(z) < self.keep).to(z) for k, z in drawn.items()}
            eps = tree.scale(tree.mul(mask, eps), 1 / self.keep)
        if not self.through:
            eps = tree.detach(eps)
        state = {"draw": state["draw"] + 1}
        if self.select == 1:
            return at(eps).grads, state
        rise = losses_of(at(eps, grad=False), self) - losses_of(clean, self)
        worst = rise.topk(math.ceil(self.select * len(rise))).indices
        return at(eps, part=worst).grads, state
