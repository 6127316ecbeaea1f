"""Classifiers that learn nothing, to measure few-shot results against. They return each task's accuracy, ``[T]``."""

from __future__ import annotations

import torch
from torch import Tensor

from metasam.types import Task


def pixel_nearest_neighbour(task: Task) -> Tensor:
    """Label each query like the support image at the smallest Euclidean distance of pixels.

    Args:
        task: a batch, inputs ``[T, n, ...]``.
    """
    (x, y), (query, truth) = task.support, task.query
    nearest = torch.cdist(query.flatten(2).double(), x.flatten(2).double()).argmin(-1)
    return (y.gather(1, nearest) == truth).double().mean(1)


def modified_hausdorff(a: Tensor, b: Tensor) -> Tensor:
    """Return the modified Hausdorff distance of two point sets ``[n, d]`` and ``[m, d]``.

    Mean distance to the nearest point of the other set, the larger of both directions (Dubuisson & Jain, "A modified
    Hausdorff distance for object matching", ICPR 1994).

    >>> modified_hausdorff(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [4.0]]))
    tensor(1.5000)
    """
    # |a - b|^2 = |a|^2 - 2 a.b + |b|^2 as one product; the roots can wait until only the nearest are left
    left = torch.cat([a, a.square().sum(1, keepdim=True), torch.ones_like(a[:, :1])], 1)
    right = torch.cat([-2 * b, torch.ones_like(b[:, :1]), b.square().sum(1, keepdim=True)], 1)
    square = left @ right.T
    to_b, to_a = (square.amin(axis).clamp(min=0).sqrt().mean() for axis in (1, 0))
    return torch.maximum(to_b, to_a)


def modified_hausdorff_nearest_neighbour(task: Task) -> Tensor:
    """Label each query like the support image at the smallest modified Hausdorff distance of the ink.

    The points of an image are its pixels above 1/2, relative to their mean, as in the demo of Lake et al. (2015); use
    ``image_size=105`` for the published 38.8 % error on `OmniglotOneShot`.

    Args:
        task: a batch of single-channel images ``[T, n, 1, H, W]``, ink 1.

    Raises:
        ValueError: an image has no ink.
    """

    def points(image: Tensor) -> Tensor:
        ink = (image[0] > 0.5).nonzero().float()
        if not len(ink):
            raise ValueError("expected ink (pixels above 0.5) in every image, found a blank one: pass ink 1 on paper 0")
        return ink - ink.mean(0)

    accuracies = []
    for single in task.unbind():
        known, asked = [points(i) for i in single.support[0]], [points(i) for i in single.query[0]]
        distance = torch.stack([torch.stack([modified_hausdorff(q, k) for k in known]) for q in asked])
        answers = single.support[1][distance.argmin(1)]
        accuracies.append((answers == single.query[1]).double().mean())
    return torch.stack(accuracies)
