"""Random crops and flips of a batch of images at once, as pure functions of a key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from metasam.tasks.counter import bits


def crop_flip(images: Tensor, key: Tensor) -> Tensor:
    """Shift each image by up to an eighth of its side (4 pixels of 32), fill with 0, and mirror half of them.

    That is the standard augmentation of CIFAR: zero-padding, a random crop and a horizontal flip (He et al. 2016).

    Args:
        images: ``[N, C, H, W]`` of any dtype.
        key: of the batch, ``[]``.

    >>> crop_flip(torch.ones(2, 3, 8, 8), torch.tensor(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    count, channels, height, width = images.shape
    tall, wide = height // 8, width // 8
    words = bits(key, 3 * count).view(3, count).bitwise_and(2**31 - 1)
    down, right = words[0] % (2 * tall + 1), words[1] % (2 * wide + 1)
    mirror = (words[2] & 1).bool()
    padded = F.pad(images, (wide, wide, tall, tall))
    # whole rows are gathered, by their place in the flat batch; then the columns inside them
    rows = down[:, None, None] + torch.arange(height)
    rows = rows + (torch.arange(count)[:, None, None] * channels + torch.arange(channels)[:, None]) * (
        height + 2 * tall
    )
    columns = torch.arange(width)
    columns = torch.where(mirror[:, None], columns.flip(0), columns) + right[:, None]
    picked = padded.reshape(-1, width + 2 * wide)[rows.view(-1)].view(count, channels, height, -1)
    return picked.gather(3, columns[:, None, None].expand(count, channels, height, width))


AUGMENTATIONS = {"crop_flip": crop_flip}
