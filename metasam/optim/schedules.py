"""Radii over time, beside ``torch.optim.lr_scheduler``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..rules.base import check_radius
from .sharpness_aware import SharpnessAware

Factor = Callable[[int], float]


class _Schedule:
    """What schedules of radii share: the radii they start from lie in the param groups, as ``initial_rho``."""

    def __init__(self, optimizer: SharpnessAware) -> None:
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"expected a sharpness-aware optimizer, whose radii to schedule, got {type(optimizer).__name__}"
            )
        if not optimizer.rule.hyper:
            raise ValueError(f"expected an optimizer with a radius, got one of {optimizer.rule}")
        self.optimizer = optimizer

    def _radii(self) -> list[tuple[dict[str, Any], dict[str, float]]]:
        """Each group, and the radii that it started from; a later group's are those that it came with."""
        keys = self.optimizer.rule.hyper
        return [
            (group, {k: group.setdefault(f"initial_{k}", group[k]) for k in keys})
            for group in self.optimizer.param_groups
        ]

    def get_last_rho(self) -> list[dict[str, float]]:
        """The radii of each group, by name."""
        return [{k: group[k] for k in self.optimizer.rule.hyper} for group in self.optimizer.param_groups]


class RhoScheduler(_Schedule):
    """Radii times ``factor(epoch)``, as ``LambdaLR`` does it with learning rates: all radii of the rule, in each group.

    >>> import torch
    >>> from metasam import SAM
    >>> optimizer = SAM([torch.nn.Parameter(torch.ones(3))], lr=0.1, rho=0.2)
    >>> scheduler = RhoScheduler(optimizer, lambda epoch: min(1.0, epoch / 4))
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["rho"]
    0.05

    To resume, load the optimizer's state and the scheduler's, in either order.

    Args:
        optimizer: whose radii.
        factor: of the number of ``step()`` calls so far; or one for each group.

    Raises:
        TypeError: the optimizer is not sharpness-aware.
        ValueError: its rule has no radius; the number of factors is not that of the groups; a factor makes a radius
            negative or not finite.
    """

    def __init__(self, optimizer: SharpnessAware, factor: Factor | Sequence[Factor]) -> None:
        super().__init__(optimizer)
        self.factor = factor
        self.last_epoch = 0
        self._apply()

    def step(self) -> None:
        """The radii of the next epoch, or iteration: whatever the caller counts."""
        self.last_epoch += 1
        self._apply()

    def _apply(self) -> None:
        radii = self._radii()
        factors = [self.factor] * len(radii) if callable(self.factor) else list(self.factor)
        if len(factors) != len(radii):
            raise ValueError(f"expected one factor, or {len(radii)}, one for each group, got {len(factors)}")
        for (group, initial), factor in zip(radii, factors, strict=True):
            new = {k: rho * factor(self.last_epoch) for k, rho in initial.items()}
            for k, rho in new.items():
                check_radius(rho, f"{k} at epoch {self.last_epoch}")
            group.update(new)

    def state_dict(self) -> dict[str, Any]:
        """How far it is. Functions are not saved: construct it with the same."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.last_epoch = state_dict["last_epoch"]
        self._apply()


class ProportionalRho(_Schedule):
    """Radii that follow the learning rate, GSAM's schedule (Zhuang et al. 2022).

    ``rho = rho_min + (rho_max - rho_min) (lr - lr_min)/(lr_max - lr_min)`` with the present ``lr`` of each group, and
    never outside ``[rho_min, rho_max]``. Call ``step()`` after that of the scheduler of learning rates.

    Args:
        optimizer: whose radii.
        lr_max: learning rate at which rho is ``rho_max``.
        lr_min: learning rate at which rho is ``rho_min``.
        rho_max: None: the radius that each group has now.
        rho_min: the smallest.

    Raises:
        TypeError: the optimizer is not sharpness-aware.
        ValueError: its rule has no radius; ``lr_max <= lr_min``; ``rho_max < rho_min``, or one of them negative.
    """

    def __init__(
        self,
        optimizer: SharpnessAware,
        *,
        lr_max: float,
        lr_min: float = 0.0,
        rho_max: float | None = None,
        rho_min: float = 0.0,
    ) -> None:
        super().__init__(optimizer)
        if not 0 <= lr_min < lr_max:
            raise ValueError(f"expected 0 <= lr_min < lr_max, got lr_min={lr_min}, lr_max={lr_max}")
        check_radius(rho_min, "rho_min")
        tops = [rho_max] if rho_max is not None else [r for _, initial in self._radii() for r in initial.values()]
        for top in tops:
            check_radius(top, "rho_max")
            if top < rho_min:
                raise ValueError(f"expected rho_min <= rho_max, got rho_min={rho_min}, rho_max={top}")
        self.lr_max, self.lr_min, self.rho_max, self.rho_min = lr_max, lr_min, rho_max, rho_min
        self.step()

    def step(self) -> None:
        """Set the radii by the learning rates of now."""
        for group, initial in self._radii():
            lr = group["lr"]
            along = (float(lr) if isinstance(lr, Tensor) else lr) - self.lr_min
            share = min(max(along / (self.lr_max - self.lr_min), 0.0), 1.0)
            for k, rho in initial.items():
                top = rho if self.rho_max is None else self.rho_max
                group[k] = self.rho_min + (top - self.rho_min) * share

    def state_dict(self) -> dict[str, Any]:
        """The four ends."""
        return {k: getattr(self, k) for k in ("lr_max", "lr_min", "rho_max", "rho_min")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them over, and follow the learning rates of now."""
        for k in ("lr_max", "lr_min", "rho_max", "rho_min"):
            setattr(self, k, state_dict[k])
        self.step()
