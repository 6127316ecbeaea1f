"""LookSAM (Liu et al. 2022, arXiv 2203.02714): SAM every k-th step, its direction reused in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_count, check_radius


@dataclass(frozen=True)
class LookSAM(DirectionRule):
    """Every ``every`` steps ``u(g_s)``, ``g_s = grad L(w + eps)``; else ``u(g + reuse ||g||/||g_v|| g_v)``.

    ``g_v`` is the part of the last ``g_s`` orthogonal to its ``g``. Costs ``1 + 1/every`` gradient evaluations a step.

    Args:
        rho: radius.
        every: the paper's k; 1 is SAM.
        reuse: the paper's alpha, how much of ``g_v`` to add in between. The authors use 0.7 for vision transformers;
            0.1 served better on CIFAR CNNs.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    every: int = 5
    reuse: float = 0.7
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_radius(self.reuse, "reuse")
        check_count("every", self.every)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("g_v",)

    def init(self, params: Params) -> State:
        """The step counter; the first step is a SAM step."""
        self.perturb.check(params)
        return {"step": 0}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``g_s``, or ``g`` with the cached ``g_v`` added at its own length."""
        step = state["step"]
        g = at().grads
        if step % self.every:
            # what has no gradient now is not moved, and does not count in the length
            g_v = {k: v for k, v in state["g_v"].items() if k in g}
            square = tree.squared_norm(g)
            # normalizer(square) * square is ||g||, with a derivative at 0
            length = self.reuse * tree.normalizer(square) * square * tree.normalizer(tree.squared_norm(g_v))
            return tree.add(g, g_v, length), {**state, "step": step + 1}
        eps = self.perturb(params, g, self.rho)
        g_s = at(eps if self.through else tree.detach(eps)).grads
        return g_s, {"step": step + 1, "g_v": tree.reject(g_s, g)}
