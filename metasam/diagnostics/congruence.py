"""Whether gradients agree: their inner products and cosines.

Agnostic-SAM means to raise the inner product of the training and the validation gradient, its *congruence*
(arXiv 2406.07107); across tasks it is what first-order meta-learning raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..types import Params
from .functional import Loss, gradient


class Congruence(NamedTuple):
    """Of two gradients."""

    dot: float
    """Inner product."""
    cosine: float
    """In [-1, 1]; NaN where a gradient vanishes or is not finite."""


class Pairwise(NamedTuple):
    """Of n gradients, ``[n, n]`` each."""

    dot: Tensor
    """Inner products; on the diagonal, squared norms."""
    cosine: Tensor
    """In [-1, 1]; NaN where a gradient vanishes or is not finite."""


def congruence(a: Params, b: Params) -> Congruence:
    """Inner product and cosine of two gradients; a missing key is a zero.

    >>> congruence({"u": torch.tensor([3.0, 4.0])}, {"u": torch.tensor([3.0, 0.0])})
    Congruence(dot=9.0, cosine=0.6)
    """
    dot, norms = float(tree.dot(a, b)), [math.sqrt(float(tree.squared_norm(g))) for g in (a, b)]
    return Congruence(dot, _cosine(dot, *norms))


def _cosine(dot: float, a: float, b: float) -> float:
    if not (a > 0 and b > 0 and math.isfinite(dot) and math.isfinite(a) and math.isfinite(b)):
        return math.nan
    return max(-1.0, min(1.0, dot / a / b))


def pairwise(losses: Sequence[Loss], params: Params) -> Pairwise:
    """Congruence of the gradients of several losses at one point; the n gradients are held at once.

    Raises:
        ValueError: there are no losses.
    """
    if not losses:
        raise ValueError("expected at least one loss, got none")
    grads = [gradient(loss, params).grads for loss in losses]
    dot = torch.tensor([[float(tree.dot(a, b)) for b in grads] for a in grads], dtype=torch.float64)
    norms = dot.diagonal().sqrt().tolist()
    cosine = [[_cosine(float(dot[i, j]), a, b) for j, b in enumerate(norms)] for i, a in enumerate(norms)]
    return Pairwise(dot, torch.tensor(cosine, dtype=torch.float64))
