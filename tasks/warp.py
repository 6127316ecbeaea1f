"""Random affine maps of training images: further drawings of a class, and further classes.

A map drawn once for a class and applied to all of its images in an episode makes a new class, as turning by 90 degrees
does; a smaller one of each image makes a new drawing. Maps are pure functions of the task's key, like everything else
about an episode.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from metasam.tasks.counter import fold, uniform

_CLASS, _IMAGE = 0x77617270, 0x6A697474  # streams of a task's key that nothing else uses

ANGLE = math.pi / 6
"""Largest turn of a class at strength 1, in radians."""
STRETCH = 0.25
"""Largest log scale of either axis of a class at strength 1."""
SHEAR = 0.35
"""Largest shear of a class at strength 1."""
JITTER = 0.3
"""Size of an image's own map, as a fraction of its class's."""
SHIFT = 0.12
"""Largest shift of an image at strength 1, as a fraction of half the width."""


def warp(images: Tensor, keys: Tensor, strength: float) -> Tensor:
    """Warp the images of episodes, bilinearly; what comes from outside an image is 0.

    Args:
        images: float ``[T, n, ways, C, H, W]``; the same class along n.
        keys: of the tasks, ``[T]``, see `metasam.tasks.counter.task_keys`.
        strength: 0 leaves them alone; 1 reaches the bounds above.

    Returns:
        Images of the same shape and dtype.
    """
    tasks, n, ways = images.shape[:3]
    of_class = _matrices(uniform(fold(keys, _CLASS), 4 * ways).view(tasks, 1, ways, 4), strength)
    draws = uniform(fold(keys, _IMAGE), 6 * n * ways).view(tasks, n, ways, 6)
    of_image = _matrices(draws[..., :4], strength * JITTER)
    shift = (2 * draws[..., 4:, None] - 1) * SHIFT * strength
    maps = torch.cat([of_class @ of_image, shift], dim=-1).to(images.dtype)
    flat = images.flatten(0, 2)
    grid = F.affine_grid(maps.flatten(0, 2), list(flat.shape), align_corners=False)
    return F.grid_sample(flat, grid, padding_mode="zeros", align_corners=False).view_as(images)


def _matrices(draws: Tensor, strength: float) -> Tensor:
    """Turn, then stretch and shear: ``[..., 2, 2]`` from four draws of U[0, 1)."""
    angle, x, y, shear = ((2 * draws - 1) * strength).unbind(-1)
    angle, x, y, shear = angle * ANGLE, (x * STRETCH).exp(), (y * STRETCH).exp(), shear * SHEAR
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2))
    stretch = torch.stack([x, shear, torch.zeros_like(x), y], dim=-1).unflatten(-1, (2, 2))
    return turn @ stretch
