"""The small networks of the few-shot literature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .parts import check_sizes, with_head


def mlp(input: int, output: int, hidden: Sequence[int] = (40, 40)) -> nn.Sequential:
    """Fully connected ReLU network; by default the sinusoid net of MAML (Finn et al. 2017, section 5.1).

    Args:
        input: numbers in one example; an example of any shape is flattened.
        output: classes, or regression targets.
        hidden: widths of the hidden layers.

    >>> import torch
    >>> mlp(1, 1)(torch.zeros(10, 1)).shape
    torch.Size([10, 1])
    """
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise ValueError(f"expected hidden to be a list of widths such as [40, 40], got hidden={hidden!r}")
    widths = [input, *hidden]
    check_sizes(input=input, output=output, **{f"hidden[{i}]": h for i, h in enumerate(hidden)})
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip(widths, hidden, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return with_head(layers, widths[-1], output)


def conv4(in_channels: int, ways: int, hidden: int = 64, image_size: int = 28) -> nn.Sequential:
    """Four blocks of 3x3 convolution, BatchNorm, ReLU and 2x2 max-pooling (Vinyals et al. 2016; MAML with hidden=32).

    Pooling comes before ReLU, which then sees a quarter of the numbers: the same outputs and gradients to the last bit.

    Args:
        in_channels: channels of an image ``[in_channels, image_size, image_size]``.
        ways: classes.
        hidden: filters of every convolution.
        image_size: side of the images; 28 leaves one position for the head to see, 84 leaves 5 x 5.

    >>> import torch
    >>> net = conv4(3, 5, hidden=32, image_size=84)
    >>> net(torch.zeros(2, 3, 84, 84)).shape, net.head.in_features
    (torch.Size([2, 5]), 800)
    """
    check_sizes(in_channels=in_channels, ways=ways, hidden=hidden, image_size=image_size)
    if image_size < 16:
        raise ValueError(
            f"expected images of at least 16 x 16, as they are halved four times; got image_size={image_size}: "
            "use metasam.models.mlp or strided_conv"
        )
    blocks = [_block(i, o, nn.MaxPool2d(2)) for i, o in _channels(in_channels, hidden)]
    return with_head([*blocks, nn.Flatten()], hidden * (image_size // 16) ** 2, ways)


def strided_conv(in_channels: int, ways: int, hidden: int = 64) -> nn.Sequential:
    """Four 3x3 convolutions of stride 2, each with BatchNorm and ReLU: MAML's Omniglot net (Finn et al. 2017).

    Its features are means over the positions that are left (2 x 2 of 28 x 28), so images may have any size.

    Args:
        in_channels: channels of an image ``[in_channels, height, width]``.
        ways: classes.
        hidden: filters of every convolution.

    >>> import torch
    >>> strided_conv(1, 20, hidden=32)(torch.zeros(4, 1, 28, 28)).shape
    torch.Size([4, 20])
    """
    check_sizes(in_channels=in_channels, ways=ways, hidden=hidden)
    blocks = [_block(i, o, stride=2) for i, o in _channels(in_channels, hidden)]
    return with_head([*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()], hidden, ways)


def _channels(in_channels: int, hidden: int) -> list[tuple[int, int]]:
    return [(in_channels, hidden)] + 3 * [(hidden, hidden)]


def _block(before: int, after: int, *pool: nn.Module, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.BatchNorm2d(after), *pool, nn.ReLU()
    return nn.Sequential(*layers)
