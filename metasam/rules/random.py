"""Random perturbations: R-SAM (Liu et al. 2022, CVPR, "Towards robust and efficient SAM with random perturbations") and
RWP (Li et al. 2022/2024, arXiv 2211.13905), sharpness on average instead of at worst.
"""  # noqa: D205

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import tree
from ..perturb import Perturb, Steepest, check_number, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_count, check_radius


def filter_noise(at: Oracle, params: Params, sigma: float, seed: int, counter: int, through: bool) -> Params:
    """``N(0, sigma^2 ||w_f||^2)`` for every output filter f (first index of a tensor; a vector is one filter)."""
    drawn = at.noise(params, seed, counter)
    scales = params if through else tree.detach(params)
    return {k: sigma * _filter_norm(scales[k]) * z for k, z in drawn.items()}


def _filter_norm(w: Tensor) -> Tensor:
    # vector_norm, since its derivative at a filter of zeros is 0 and that of sqrt is not
    return torch.linalg.vector_norm(w, dim=tuple(range(1, w.ndim)) or None, keepdim=True)


@dataclass(frozen=True)
class RandomSAM(DirectionRule):
    """``eps = rho d/||d||``, ``d = pull grad L(w + Delta) + Delta``; ``u(grad L(w + eps))``; 2 gradient evaluations.

    Not scale invariant: unscale gradients first.

    Args:
        rho: radius.
        sigma: size of Delta relative to each output filter.
        pull: the paper's lambda, weight of the gradient beside the noise.
        noise_seed: of the noise.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    clean: ClassVar[bool] = False

    rho: Factor = 0.05
    sigma: float = 5e-4
    pull: float = 2.0
    noise_seed: int = 0
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_radius(self.sigma, "sigma")
        check_radius(self.pull, "pull")
        check_count("noise_seed", self.noise_seed, None)

    def init(self, params: Params) -> State:
        """The counter of draws."""
        self.perturb.check(params)
        return {"draw": 0}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w + eps)``."""
        delta = filter_noise(at, params, self.sigma, self.noise_seed, state["draw"], self.through)
        g = at(delta, local=True, graph=self.through).grads
        d = tree.add(tree.scale(g, self.pull), {k: delta[k] for k in g})
        eps = self.perturb(params, d, self.rho)
        return at(eps if self.through else tree.detach(eps)).grads, {"draw": state["draw"] + 1}


@dataclass(frozen=True)
class RWP(DirectionRule):
    """``(1 - mix) grad L(w) + mix grad L'(w + eps)``, ``eps ~ N(0, rho^2 ||w_f||^2)``; 2 gradient evaluations.

    Args:
        rho: size of eps relative to each output filter, the paper's gamma.
        mix: the paper's alpha; 1 is plain descent on the average-case loss (LPF-SGD-like).
        second: whose loss ``L'`` is: "train", the same batch, or "val", another batch, as in the paper:
            ``step(closure, val=other_closure)``.
        noise_seed: of the noise.
        through: as in `metasam.rules.Sharp`; here eps depends on the weights by their size.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)

    rho: Factor = 0.01
    mix: float = 0.5
    second: str = "train"
    noise_seed: int = 0
    through: bool = True

    def __post_init__(self) -> None:
        check_radius(self.rho)
        check_number("mix", self.mix)
        check_count("noise_seed", self.noise_seed, None)
        if not 0 <= self.mix <= 1:
            raise ValueError(f"expected 0 <= mix <= 1, got mix={self.mix}")
        if self.second not in ("train", "val"):
            raise ValueError(f"expected second to be 'train' or 'val', got {self.second!r}")

    @property
    def validates(self) -> bool:
        return self.second == "val"

    def init(self, params: Params) -> State:
        """The counter of draws."""
        return {"draw": 0}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """The mixed gradient."""
        g = at().grads
        noise = filter_noise(at, params, 1.0, self.noise_seed, state["draw"], self.through)
        g_p = at(tree.scale(noise, self.rho), on=self.second).grads
        # exactly g where g_p = g
        return tree.add(g, tree.add(g_p, g, -1), self.mix), {"draw": state["draw"] + 1}
