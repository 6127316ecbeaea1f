"""SAM (Foret et al. 2021, arXiv 2010.01412) and what differs from it by geometry or by the number of ascent steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import tree
from ..perturb import Fisher, Perturb, Steepest, check_number, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, Part, State
from .base import DirectionRule, check_count, check_radius, losses_of


@dataclass(frozen=True)
class Sharp(DirectionRule):
    r"""``u(grad L(w + eps))`` with ``eps`` climbed to in ``steps`` ascent steps; ``steps + 1`` gradient evaluations.

    One step is SAM (eq. 3); more are the multi-step SAM of its appendix C.6 (also Kim et al. 2023):
    ``eps_{j+1} = Proj_rho(eps_j + perturb(grad L(w + eps_j)))``.

    Args:
        rho: radius of the ball; a float, a 0-dim tensor, or either by parameter name.
        perturb: the geometry: `metasam.perturb.Steepest` (SAM), ``Adaptive`` (ASAM), ``Unnormalised`` (USAM).
        steps: number of ascent steps.
        step_size: length of one ascent step as a fraction of rho. None: ``1/steps``, which never leaves the ball;
            a longer one is projected back onto it, which `metasam.perturb.Fisher` refuses.
        m: examples that share an eps (m-sharpness): the batch is taken in shards of m, each with its own ascent, and
            the gradients at the shards' points are averaged; 1 is 1-SAM. Costs a forward more. None: the whole batch.
        through: differentiate through eps where somebody differentiates through the step (inner loops), as the
            released Sharp-MAML code does. False takes eps as a constant, and saves the graph of the ascent gradients.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    stacks: ClassVar[bool] = True

    rho: Factor = 0.05
    perturb: Perturb = field(default_factory=Steepest)
    steps: int = 1
    step_size: float | None = None
    m: int | None = None
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_count("steps", self.steps, of="ascent steps (Plain() takes none)")
        if self.step_size is not None:
            check_number("step_size", self.step_size)
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise ValueError(f"expected step_size > 0 (a fraction of rho), got step_size={self.step_size}")
        if isinstance(self.perturb, Fisher) and self.steps * (self.step_size or 0) > 1 + 1e-9:
            raise ValueError(
                f"expected step_size <= 1/steps with {self.perturb}, got step_size={self.step_size} and steps="
                f"{self.steps}: its ellipsoid changes with the gradient: there is none to project a longer climb onto"
            )
        if self.m is not None:
            check_count("m", self.m, of="examples a shard, or None")

    def init(self, params: Params) -> State:
        """No state; the geometry looks whether it can tell these parameters apart."""
        self.perturb.check(params)
        return {}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w + eps)``, or its mean over shards."""
        if self.m is None:
            return at(self._climb(at, params, None)).grads, state
        count = len(losses_of(at(grad=False), self))
        mean: Params = {}
        for start in range(0, count, self.m):
            shard = slice(start, min(start + self.m, count))
            eps = self._climb(at, params, shard)
            mean = tree.add(mean, at(eps, part=shard).grads, (shard.stop - shard.start) / count)
        return mean, state

    def _climb(self, at: Oracle, params: Params, part: Part | None) -> Params:
        length = _scaled(self.rho, 1 / self.steps if self.step_size is None else self.step_size)
        eps: Params = {}
        for _ in range(self.steps):
            grads = at(eps or None, part=part, local=True, graph=self.through).grads
            eps = tree.add(eps, self.perturb(params, grads, length))
            if self.step_size is not None:
                eps = self._project(params, eps)
        return eps if self.through else tree.detach(eps)

    def _project(self, params: Params, eps: Params) -> Params:
        """Back onto the ball ``||eps / rho|| <= 1``; inside it nothing changes, to the last bit."""
        if not eps:
            return eps
        square = self.perturb.square(params, tree.scale(eps, _inverse(self.rho)))
        return eps if square is None else tree.scale(eps, 1 / torch.clamp(square, min=1.0).sqrt())


def _scaled(rho: Factor, factor: float) -> Factor:
    if factor == 1:
        return rho
    return {k: r * factor for k, r in rho.items()} if isinstance(rho, Mapping) else rho * factor


def _inverse(rho: Factor) -> Factor:
    """``1/rho``, and 0 where rho is 0: an eps that is 0 anyway."""
    if isinstance(rho, Mapping):
        return {k: _inverse_of(r) for k, r in rho.items()}
    return _inverse_of(rho)


def _inverse_of(rho: float | Tensor) -> float | Tensor:
    if isinstance(rho, Tensor):
        return torch.where(rho > 0, 1 / torch.where(rho > 0, rho, 1.0), 0.0)
    return 1 / rho if rho else 0.0
