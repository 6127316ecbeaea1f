"""Agnostic-SAM (Nguyen et al. 2024, arXiv 2406.07107; printed as Align-SAM, ICLR 2026)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import tree
from ..perturb import Perturb, Steepest, check_perturb
from ..tree import Factor
from ..types import Oracle, Params, State
from .base import DirectionRule, check_fraction, check_radius


@dataclass(frozen=True)
class Agnostic(DirectionRule):
    """``u(grad L_t(w + rho_train g_t/||g_t|| - rho_val h_v/||h_v||))``: flat on training data, where validation is low.

    ``g_t = grad L_t(w)``; with ``lookahead``, ``h_v = grad L_v(w + rho_val g_v/||g_v||)``, ``g_v = grad L_v(w)``, else
    ``h_v = g_v``. Costs 2 gradient evaluations of the training batch and 2 (or 1) of the validation batch: 2.5 (2.25)
    with a validation batch of a quarter. ``rho_val = 0`` is SAM.

    Args:
        rho_train: radius of the ascent on the training loss; twice ``rho_val`` in the paper.
        rho_val: radius of the descent on the validation loss, and of its look-ahead; SAM's rho in the paper.
        lookahead: evaluate the validation gradient at its own perturbed point, as the first paper does; the later
            printed form does not.
        val_momentum: weight of the past in a running mean of the validation gradient, which begins at the first one,
            not at zero; 0 keeps none.
        perturb: the geometry of all three displacements.
        through: as in `metasam.rules.Sharp`.
    """

    hyper: ClassVar[tuple[str, ...]] = ("rho_train", "rho_val")
    stacks: ClassVar[bool] = True

    rho_train: Factor = 0.1
    rho_val: Factor = 0.05
    lookahead: bool = True
    val_momentum: float = 0.0
    perturb: Perturb = field(default_factory=Steepest)
    through: bool = True

    def __post_init__(self) -> None:
        check_perturb(self.perturb)
        check_radius(self.rho_train, "rho_train")
        check_radius(self.rho_val, "rho_val")
        check_fraction("val_momentum", self.val_momentum)

    @property
    def validates(self) -> bool:
        return True

    @property
    def slots(self) -> tuple[str, ...]:
        return ("h_v",) if self.val_momentum else ()

    def init(self, params: Params) -> State:
        """No running mean yet."""
        self.perturb.check(params)
        return {}

    def direction(self, at: Oracle, params: Params, state: State) -> tuple[Params, State]:
        """``grad L_t(w_t)``."""
        # what is not needed any more is let go, so that no more than three copies of the weights live at once
        h_v = at(on="val", local=True, graph=self.through).grads
        if self.lookahead:
            eps = self.perturb(params, h_v, self.rho_val)
            del h_v
            h_v = at(eps if self.through else tree.detach(eps), on="val", local=True, graph=self.through).grads
            del eps
        if self.val_momentum:
            h_v = tree.average(state.get("h_v", {}), h_v, 1 - self.val_momentum)
            state = {"h_v": h_v}
        down = self.perturb(params, h_v, self.rho_val)
        del h_v
        up = self.perturb(params, at(local=True, graph=self.through).grads, self.rho_train)
        eps = tree.add(up, down, -1)
        del up, down
        return at(eps if self.through else tree.detach(eps)).grads, state
