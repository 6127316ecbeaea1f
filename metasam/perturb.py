"""How to climb: ``perturb(params, grads, rho) -> eps``, the displacement of one ascent step of radius ``rho``.

Each is a frozen dataclass, pure, and differentiable in ``params`` and ``grads``. ``eps`` has the keys of ``grads``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol

from torch import Tensor

from . import tree
from .tree import Factor
from .types import Params


class Perturb(Protocol):
    """What a rule needs to know about a geometry."""

    def __call__(self, params: Params, grads: Params, rho: Factor) -> Params:
        """The ascent step: the point of the ball of radius ``rho`` that the linearised loss likes least."""
        ...

    def square(self, params: Params, eps: Params) -> Tensor | None:
        """Squared norm of ``eps`` in the norm whose ball `__call__` climbs in; None: the step knows no ball."""
        ...

    def check(self, params: Params) -> None:
        """Raise ValueError when these parameters cannot be perturbed as asked."""
        ...


def check_number(name: str, value: Any) -> None:
    """Raise ValueError unless it is a number; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a number, got {name}={value!r}")


def check_perturb(perturb: Any) -> None:
    """Raise ValueError unless it is a geometry."""
    if isinstance(perturb, type) or not all(
        callable(getattr(perturb, n, None)) for n in ("__call__", "square", "check")
    ):
        raise ValueError(
            f"expected perturb to be a geometry, such as metasam.perturb.Steepest(), got perturb={perturb!r}"
        )


def _times(rho: Factor, factor: Tensor) -> Factor:
    return {k: r * factor for k, r in rho.items()} if isinstance(rho, Mapping) else rho * factor


@dataclass(frozen=True)
class Steepest:
    """``eps = rho g / ||g||``, one L2 norm over all parameters (Foret et al. 2021, eq. 2 with p = 2)."""

    stacks: ClassVar[bool] = True

    def __call__(self, params: Params, grads: Params, rho: Factor) -> Params:
        return tree.scale(grads, _times(rho, tree.normalizer(tree.squared_norm(grads))))

    def square(self, params: Params, eps: Params) -> Tensor | None:
        return tree.squared_norm(eps)

    def check(self, params: Params) -> None:
        pass


@dataclass(frozen=True)
class Adaptive:
    """``eps = rho T^2 g / ||T g||`` with ``T = |w| + eta`` (Kwon et al. 2021, ASAM, eqs. 4 and 5).

    Args:
        eta: stabiliser added to ``|w|``.
        only: adapt parameters whose own name contains this; the others get ``T = 1`` but count in the same norm.
            ``"weight"`` is the authors' code (BatchNorm gains are adapted, biases are not). None adapts every
            parameter, as the most used port does, which then wants a rho of about 2.
    """

    stacks: ClassVar[bool] = True

    eta: float = 0.01
    only: str | None = "weight"

    def __post_init__(self) -> None:
        check_number("eta", self.eta)
        if not 0 <= self.eta < float("inf"):
            raise ValueError(f"expected eta >= 0, got eta={self.eta}")

    def __call__(self, params: Params, grads: Params, rho: Factor) -> Params:
        t = self._operator(params, grads)
        tg = tree.mul(t, grads)
        climb = {**grads, **tree.mul(t, tg)}
        return tree.scale(climb, _times(rho, tree.normalizer(tree.squared_norm({**grads, **tg}))))

    def square(self, params: Params, eps: Params) -> Tensor | None:
        unit = {k: eps[k] / t for k, t in self._operator(params, eps).items()}
        return tree.squared_norm({**eps, **unit})

    def check(self, params: Params) -> None:
        if params and not any(map(self._adapts, params)):
            raise ValueError(
                f"ASAM adapts parameters whose name contains {self.only!r}, and got none among "
                f"{', '.join(list(params)[:4])}{', ...' if len(params) > 4 else ''}: pass model.named_parameters() or "
                "model=model so that it can tell them apart, or only=None to adapt every parameter"
            )

    def _adapts(self, key: str) -> bool:
        return self.only is None or self.only in key.rpartition(".")[2]

    def _operator(self, params: Params, like: Params) -> Params:
        return {k: params[k].abs() + self.eta for k in like if self._adapts(k)}


@dataclass(frozen=True)
class Unnormalised:
    """``eps = rho g``: USAM (Andriushchenko & Flammarion 2022). Its rho is not comparable with SAM's."""

    stacks: ClassVar[bool] = True

    def __call__(self, params: Params, grads: Params, rho: Factor) -> Params:
        return tree.scale(grads, rho)

    def square(self, params: Params, eps: Params) -> Tensor | None:
        return None

    def check(self, params: Params) -> None:
        pass


@dataclass(frozen=True)
class Fisher:
    """``eps = rho D g / sqrt(g . D g)``, ``D = 1/(1 + eta f)``, ``f = g^2`` (Kim et al. 2022, Fisher-SAM, eq. 9).

    The ellipsoid is that of the diagonal Fisher information of the batch, so it depends on the scale of the loss.

    Args:
        eta: how much information shrinks a direction; 0 is `Steepest`.
    """

    stacks: ClassVar[bool] = True

    eta: float = 1.0

    def __post_init__(self) -> None:
        check_number("eta", self.eta)
        if not 0 <= self.eta < float("inf"):
            raise ValueError(f"expected eta >= 0, got eta={self.eta}")

    def __call__(self, params: Params, grads: Params, rho: Factor) -> Params:
        climb = {k: g / (1 + self.eta * g.square()) for k, g in grads.items()}
        return tree.scale(climb, _times(rho, tree.normalizer(tree.dot(grads, climb))))

    def square(self, params: Params, eps: Params) -> Tensor | None:
        return None

    def check(self, params: Params) -> None:
        pass
