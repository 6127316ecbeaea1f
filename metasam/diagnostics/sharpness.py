"""Average-case and worst-case sharpness (Andriushchenko et al. 2023, arXiv 2302.07011).

With ``c = |w|`` (adaptive) or 1, entry by entry:

    average  E [L(w + d) - L(w)],  d ~ N(0, rho^2 diag(c^2))
    worst    max L(w + d) - L(w),  ||d / c||_p <= rho

The same rho means very different displacements: a draw of the average case has a length of about ``rho sqrt(P)`` for P
parameters, the worst case one of rho. Divide by ``sqrt(P)`` to compare them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import noise, tree
from ..types import Params
from .functional import Loss, gradient


class Average(NamedTuple):
    """An estimate of average-case sharpness."""

    value: float
    error: float
    """Standard error over the samples."""


class Worst(NamedTuple):
    """The worst displacement that was found; the true maximum may be larger."""

    value: float
    displacement: Params


def average_sharpness(
    loss: Loss, params: Params, rho: float, *, samples: int = 100, seed: int = 0, adaptive: bool = False
) -> Average:
    """The mean rise of the loss under Gaussian noise of standard deviation ``rho c`` in every entry.

    A sample is the mean over ``d`` and ``-d``: what the gradient does cancels, and with it all of its noise. On a
    quadratic a sample is ``d.Hd / 2`` to rounding. It costs two forwards, no gradient; all samples one more.

    Args:
        loss: see `metasam.diagnostics.functional`.
        params: the weights; not changed.
        rho: standard deviation.
        samples: pairs of displacements.
        seed: of the noise, which is a function of it and of the sample's number alone.
        adaptive: ``c = |w|``, which rescaling a homogeneous network does not change.

    Returns:
        NaN or infinity where the loss is at any of these points.

    Raises:
        ValueError: rho is not a finite number of at least 0, or there are fewer than 2 samples.
    """
    _check(rho)
    if samples < 2:
        raise ValueError(f"expected at least 2 samples, for a standard error, got samples={samples}")
    params = tree.detach(params)
    c = _scale(params, adaptive)
    rises = []
    with torch.no_grad():
        base = float(loss(params))
        for number in range(samples):
            d = tree.scale(tree.mul(c, noise.normal(params, seed, number)), rho)
            pair = [float(loss(tree.add(params, d, sign))) - base for sign in (1.0, -1.0)]
            rises.append(sum(pair) / 2)
    if not all(map(math.isfinite, rises)):
        return Average(sum(rises), math.nan)
    return Average(statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(samples))


def worst_sharpness(
    loss: Loss,
    params: Params,
    rho: float,
    *,
    norm: str = "l2",
    steps: int = 20,
    restarts: int = 1,
    seed: int = 0,
    adaptive: bool = False,
) -> Worst:
    """The largest rise of the loss in a ball, by projected gradient ascent in ``z = d / c``.

    The first step goes ``2 rho`` along the normalised gradient (for "linf" its sign), so it is SAM's. A step that does
    not climb is not taken, and halves the ones after it, as APGD does (Croce & Hein 2020, without its momentum).

    Args:
        loss: see `metasam.diagnostics.functional`; it is differentiated once.
        params: the weights; not changed.
        rho: radius of the ball.
        norm: "l2" (over all entries) or "linf".
        steps: of one ascent; each costs a gradient.
        restarts: further ascents, from random points of the boundary; the best one counts.
        seed: of those.
        adaptive: ``c = |w|``; a weight of zero stays.

    Returns:
        The rise, at least 0, and the displacement that it is at. A loss that is not finite counts as the worst.

    Raises:
        ValueError: rho is not a finite number of at least 0, no such norm, or counts out of range.
    """
    _check(rho)
    if norm not in _BALLS:
        raise ValueError(f"expected norm to be one of {', '.join(_BALLS)}, got {norm!r}")
    if steps < 1 or restarts < 0:
        raise ValueError(f"expected steps >= 1 and restarts >= 0, got steps={steps}, restarts={restarts}")
    params = tree.detach(params)
    c, ball = _scale(params, adaptive), _BALLS[norm]
    home = gradient(loss, params)
    base = float(home.loss)

    def at(z: Params) -> tuple[float, Params]:
        found = gradient(loss, tree.add(params, tree.mul(c, z)))
        return float(found.loss) - base, tree.mul(c, found.grads)

    def random(number: int) -> Params:
        draw = noise.normal(params, seed, number, 0)  # a longer key than the average case's
        return ball.along({k: torch.where(c[k] > 0, v, 0.0) for k, v in draw.items()}, rho)

    origin = {k: torch.zeros_like(v) for k, v in params.items()}
    best = Worst(0.0, origin)
    for number in range(1 + restarts):
        z = random(number) if number else origin
        rise, grads = at(z) if number else (base - base, tree.mul(c, home.grads))
        size = 2 * rho
        for _ in range(steps):
            if not math.isfinite(rise) or not tree.is_finite(grads):
                break
            if not float(tree.squared_norm(grads)):  # a critical point shows no way up
                grads = random(1 + restarts + number)
            there = ball.project(tree.add(z, ball.along(grads, size)), rho)
            higher, slope = at(there)
            if higher > rise or not math.isfinite(higher):
                z, rise, grads = there, higher, slope
            else:
                size /= 2
        if rise > best.value or not math.isfinite(rise):
            best = Worst(rise, tree.mul(c, z))
        if not math.isfinite(best.value):
            break
    return best


class _Ball(NamedTuple):
    along: Callable[[Params, float], Params]
    """The step of that size along a gradient."""
    project: Callable[[Params, float], Params]
    """The nearest point of the ball of that radius."""


def _along_l2(grads: Params, size: float) -> Params:
    return tree.scale(grads, size / (math.sqrt(float(tree.squared_norm(grads))) or 1.0))


def _project_l2(z: Params, rho: float) -> Params:
    length = math.sqrt(float(tree.squared_norm(z)))
    return tree.scale(z, rho / length) if length > rho else z


_BALLS = {
    "l2": _Ball(_along_l2, _project_l2),
    "linf": _Ball(
        lambda grads, size: {k: size * g.sign() for k, g in grads.items()},
        lambda z, rho: {k: v.clamp(-rho, rho) for k, v in z.items()},
    ),
}


def _scale(params: Params, adaptive: bool) -> Params:
    return {k: v.abs() if adaptive else torch.ones_like(v) for k, v in params.items()}


def _check(rho: float) -> None:
    if not 0 <= rho < math.inf:
        raise ValueError(f"expected a finite rho of at least 0, got rho={rho}")
