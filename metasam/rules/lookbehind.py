"""Lookbehind (Mordido et al. 2024, arXiv 2307.16704): climb k times, descend at each height, keep part of the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import shards, tree
from ..perturb import Perturb, Steepest, check_number, check_perturb
from ..tree import Factor
from ..types import Descent, Oracle, Params, State
from .base import Rule, check_count, check_radius


@dataclass(frozen=True)
class Lookbehind(Rule):
    """``phi = w, eps = 0``; k times ``eps += rho g/||g||``, ``phi = u(phi, g')``; ``w + keep (phi - w)``.

    ``g = grad L(w + eps)`` before the climb, ``g'`` after it; on one batch the descent gradient of a pass is the ascent
    gradient of the next, so a step costs k + 1 gradient evaluations. The base's momentum advances k times.

    Args:
        rho: length of one ascent step.
        steps: the paper's k.
        keep: the paper's alpha, how much of the way to keep. None: by tensor, ``(cos(phi_1 - w, phi_k - w) + 1)/2``.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)

    rho: Factor = 0.05
    steps: int = 2
    keep: float | None = 0.5
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_count("steps", self.steps)
        if self.keep is not None:
            check_number("keep", self.keep)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"expected 0 < keep <= 1, or None for the adaptive one, got keep={self.keep}")

    def init(self, params: Params) -> State:
        """No state."""
        self.perturb.check(params)
        return {}

    def __call__(self, at: Oracle, descend: Descent, params: Params, state: State) -> tuple[Params, State]:
        """One step."""
        eps: Params = {}
        visited = [at(local=True, graph=self.through).grads]
        for _ in range(self.steps):
            eps = tree.add(eps, self.perturb(params, visited[-1], self.rho))
            visited.append(at(eps if self.through else tree.detach(eps)).grads)
        phi = first = descend(params, visited[1])
        for grads in visited[2:]:
            phi = descend(phi, grads)
        way = tree.add(phi, params, -1)
        if self.keep is not None:
            return tree.add(params, way, self.keep), state
        start = tree.add(first, params, -1)
        return tree.add(params, {k: v * _agreement(start[k], v) for k, v in way.items()}), state


def _agreement(a: Tensor, b: Tensor) -> Tensor:
    """``(cos(a, b) + 1)/2``."""
    if shards.mesh_of(b) is not None:  # spread over processes, where only sums go
        x, y = {"": a}, {"": b}
        sizes = [tree.squared_norm(v).sqrt().clamp(min=1e-8) for v in (x, y)]
        return (tree.dot(x, y) / (sizes[0] * sizes[1]) + 1) / 2
    return (torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) + 1) / 2
