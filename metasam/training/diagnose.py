"""What a run may measure beside what it is judged by; training is the same to the last bit with and without it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .. import diagnostics
from ..diagnostics import Loss
from ..functional import judging
from ..types import Params
from . import rng


@dataclass(frozen=True)
class Diagnostics:
    """What to measure.

    Args:
        congruence: of the training gradient with the validation gradient, at every validation.
        sharpness: around the best weights, at the end.
        rho: radius of the ball of worst-case sharpness. Average-case sharpness is that of Gaussian displacements with
            the mean square length ``rho^2``: standard deviation ``rho / sqrt(P)`` for P parameters.
        samples: pairs of such displacements.
        tasks: fixed tasks of a split to measure on, or, of a supervised run, fixed examples enough for so many batches.
    """

    congruence: bool = False
    sharpness: bool = False
    rho: float = 0.05
    samples: int = 10
    tasks: int = 16


@contextmanager
def unnoticed(model: torch.nn.Module) -> Iterator[None]:
    """Within: eval mode; afterwards every module is in the mode it was in, and every generator where it was."""
    generators = rng.state()
    try:
        with judging(model):
            yield
    finally:
        rng.restore(generators)


def agreement(losses: Sequence[Loss], params: Params) -> dict[str, float]:
    """Congruence of two losses' gradients: the cosine as ``congruence``, the inner product as ``congruence_dot``."""
    found = diagnostics.congruence(*(diagnostics.gradient(loss, params).grads for loss in losses))
    return {"congruence": found.cosine, "congruence_dot": found.dot}


def average_rho(params: Params, rho: float) -> float:
    """Standard deviation of an entry, for displacements of the mean square length ``rho^2``."""
    return rho / math.sqrt(sum(v.numel() for v in params.values()))


def around(loss: Loss, params: Params, rho: float, samples: int) -> dict[str, float]:
    """Sharpness in a ball: ``average`` with its standard error ``average_error``, and ``worst`` (l2, not adaptive)."""
    average = diagnostics.average_sharpness(loss, params, average_rho(params, rho), samples=samples)
    worst = diagnostics.worst_sharpness(loss, params, rho)
    return {"average": average.value, "average_error": average.error, "worst": worst.value}


def over_tasks(each: list[dict[str, float]]) -> dict[str, float]:
    """Means over tasks of what `around` found, with half widths of their 95% intervals, ``1.96 std / sqrt(n)``."""
    found: dict[str, float] = {}
    for key in ("average", "worst"):
        values = torch.tensor([one[key] for one in each], dtype=torch.float64)
        half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        found |= {key: float(values.mean()), f"{key}_ci95": half}
    return found
