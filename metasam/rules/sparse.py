"""Sparse SAM (Mi et al. 2022, arXiv 2210.05177): perturb only the weights that matter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .. import shards, tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Eval, Oracle, Params, State
from .base import DirectionRule, check_count, check_fraction, check_radius, losses_of


@dataclass(frozen=True)
class SparseSAM(DirectionRule):
    """``eps = rho m*g/||g||``, the norm unmasked; m has ``1 - sparsity`` ones; 2 gradient evaluations a step.

    ``criterion="fisher"`` (SSAM-F): ones where the Fisher information, summed squared gradients of ``samples`` single
    examples, is largest. ``"dynamic"`` (SSAM-D): starts at random; then drops the ones with the smallest ``|g|`` and
    grows as many at random, a share ``drop`` that a cosine takes to 0 over ``horizon`` steps.

    Args:
        rho: radius.
        sparsity: share of zeros; 0 is SAM.
        criterion: "fisher" or "dynamic".
        refresh: steps between two masks.
        samples: examples for the Fisher information, each a gradient evaluation of its own, so that step needs
            ``closure(part=None)``. 0 squares the gradient of the batch instead, at no cost.
        drop: largest share of the ones to replace.
        horizon: steps until nothing is replaced any more.
        noise_seed: of the random choices.
        perturb: the geometry.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho",)

    rho: Factor = 0.05
    sparsity: float = 0.5
    criterion: str = "fisher"
    refresh: int = 100
    samples: int = 16
    drop: float = 0.5
    horizon: int = 10_000
    noise_seed: int = 0
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho)
        check_fraction("sparsity", self.sparsity)
        check_fraction("drop", self.drop)
        if self.criterion not in ("fisher", "dynamic"):
            raise ValueError(f"expected criterion 'fisher' or 'dynamic', got {self.criterion!r}")
        for name, least in {"refresh": 1, "samples": 0, "horizon": 1, "noise_seed": None}.items():
            check_count(name, getattr(self, name), least)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mask",)

    def init(self, params: Params) -> State:
        """The step counter; the first step makes the first mask."""
        self.perturb.check(params)
        if shards.any_spread(params.values()):
            raise ValueError(
                "SparseSAM chooses among the entries of all tensors, and got some spread over processes (fully_shard): "
                "train with DistributedDataParallel, or with ESAM, which masks at random"
            )
        return {"step": 0}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L(w + eps)``."""
        step = state["step"]
        clean = at(local=True, graph=self.through)
        g = clean.grads
        mask = state.get("mask")
        if not mask or step % self.refresh == 0:
            mask = self._fisher(at, clean) if self.criterion == "fisher" else self._dynamic(at, g, mask, step)
        eps = tree.mul(mask, self.perturb(params, g, self.rho))
        return at(eps if self.through else tree.detach(eps)).grads, {"step": step + 1, "mask": mask}

    def _fisher(self, at: Oracle, clean: Eval) -> Params:
        if not self.samples:
            information = tree.mul(clean.grads, clean.grads)
        else:
            information = {k: torch.zeros_like(v) for k, v in clean.grads.items()}
            for i in range(min(self.samples, len(losses_of(clean, self)))):
                one = at(part=slice(i, i + 1), local=True, graph=False).grads
                information = tree.add(information, tree.mul(one, one))
        information = tree.detach(information)
        return _largest(information, self._ones(information))

    def _dynamic(self, at: Oracle, g: Params, mask: Params | None, step: int) -> Params:
        drawn = at.noise(g, self.noise_seed, step)
        ones = self._ones(g)
        if not mask:
            return _largest(drawn, ones)
        share = self.drop * (1 + math.cos(math.pi * min(step / self.horizon, 1.0))) / 2
        replaced = min(int(share * ones), sum(v.numel() for v in g.values()) - ones)
        # a parameter without a gradient at the last mask has none there
        mask = {k: mask[k] if k in mask else torch.zeros_like(v) for k, v in g.items()}
        kept = _largest({k: v.detach().abs().masked_fill(mask[k] == 0, -1.0) for k, v in g.items()}, ones - replaced)
        # those just dropped come last
        fresh = {k: v.masked_fill(mask[k] == 1, -1e4).masked_fill(kept[k] == 1, -math.inf) for k, v in drawn.items()}
        grown = _largest(fresh, replaced)
        return tree.add(kept, grown)

    def _ones(self, like: Params) -> int:
        return round((1 - self.sparsity) * sum(v.numel() for v in like.values()))


def _largest(score: Params, count: int) -> Params:
    """Ones at the ``count`` largest entries over all tensors, zeros elsewhere."""
    if not score:
        return {}
    flat = torch.cat([v.flatten() for v in score.values()])
    chosen = torch.zeros_like(flat).scatter(0, flat.topk(count).indices, 1.0)
    parts = chosen.split([v.numel() for v in score.values()])
    return {k: part.view_as(v) for (k, v), part in zip(score.items(), parts, strict=True)}
