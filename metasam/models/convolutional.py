"""A small convolutional network for small images."""

from __future__ import annotations

from torch import nn

from .parts import check_sizes, with_head


def conv(in_channels: int, output: int, hidden: int = 32, image_size: int = 32) -> nn.Sequential:
    """Three 3x3 convolutions with BatchNorm and ReLU, of 1, 2 and 4 times ``hidden`` filters, halved between them.

    Its features are means over the positions that are left, 2 x 2 of 8 x 8 and 8 x 8 of 32 x 32.

    Args:
        in_channels: channels of an image ``[in_channels, image_size, image_size]``.
        output: classes.
        hidden: filters of the first convolution.
        image_size: side of the images, at least 4.

    >>> import torch
    >>> net = conv(1, 10, hidden=16, image_size=8)
    >>> net(torch.zeros(2, 1, 8, 8)).shape, net.head.in_features
    (torch.Size([2, 10]), 64)
    """
    check_sizes(in_channels=in_channels, output=output, hidden=hidden, image_size=image_size)
    if image_size < 4:
        raise ValueError(
            f"expected images of at least 4 x 4, as they are halved twice; got image_size={image_size}: "
            "use metasam.models.mlp"
        )
    layers: list[nn.Module] = []
    for before, after, *pool in (
        (in_channels, hidden, nn.MaxPool2d(2)),
        (hidden, 2 * hidden, nn.MaxPool2d(2)),
        (2 * hidden, 4 * hidden),
    ):
        # no bias: BatchNorm subtracts it; a maximum before ReLU, as in `metasam.models.conv4`
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), *pool, nn.ReLU()]
    return with_head([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], 4 * hidden, output)
