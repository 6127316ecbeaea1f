"""Residual networks for small images: ResNet-18 with a 3x3 stem, and wide ResNets."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .parts import check_sizes, init_convolutions, with_head


def resnet18(in_channels: int, output: int, width: int = 64) -> nn.Sequential:
    """ResNet-18 (He et al., CVPR 2016) as it is used on CIFAR: a 3x3 stem of stride 1 and no max-pooling.

    Features are means over the positions that are left (4 x 4 of 32 x 32), so images may have any size. 10 classes of
    color images make 11,173,962 parameters.

    Args:
        in_channels: channels of an image ``[in_channels, height, width]``.
        output: classes.
        width: filters of the stem and the first stage; each of the three next has twice as many.

    >>> import torch
    >>> resnet18(3, 10, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_sizes(in_channels=in_channels, output=output, width=width)
    layers: list[nn.Module] = [_conv3(in_channels, width), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        after = width * 2**stage
        layers += [_Basic(before, after, stride=1 if stage == 0 else 2), _Basic(after, after)]
        before = after
    net = with_head([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], before, output)
    init_convolutions(net)
    return net


def wide_resnet(in_channels: int, output: int, depth: int = 28, width: int = 10) -> nn.Sequential:
    """Wide residual network WRN-depth-width (Zagoruyko & Komodakis, BMVC 2016), without dropout.

    WRN-28-10 with 10 classes of color images has 36,479,194 parameters.

    Args:
        in_channels: channels of an image ``[in_channels, height, width]``.
        output: classes.
        depth: layers; 4 more than a multiple of 6.
        width: filters of the three stages, as a multiple of 16, 32 and 64.

    >>> import torch
    >>> wide_resnet(3, 10, depth=10, width=1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_sizes(in_channels=in_channels, output=output, depth=depth, width=width)
    if depth < 10 or depth % 6 != 4:
        raise ValueError(f"expected depth to be 4 more than a multiple of 6, as 10, 16, 28 or 40; got depth={depth}")
    layers: list[nn.Module] = [_conv3(in_channels, 16)]
    before = 16
    for stage in range(3):
        after = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            layers.append(_PreActivated(before, after, stride=2 if stage and not block else 1))
            before = after
    layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = with_head(layers, before, output)
    init_convolutions(net)
    return net


class _Basic(nn.Module):
    """Two convolutions, each with BatchNorm, added to the input or to its projection."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv3(before, after, stride), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = _conv3(after, after), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(_project(before, after, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class _PreActivated(nn.Module):
    """BatchNorm and ReLU before each of two convolutions; a projection of the input follows the first of them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), _conv3(before, after, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), _conv3(after, after)
        self.shortcut = None if before == after and stride == 1 else _project(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        inner = F.relu(self.norm2(self.conv1(active)))
        return self.conv2(inner) + (x if self.shortcut is None else self.shortcut(active))


def _conv3(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)


def _project(before: int, after: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 1, stride=stride, bias=False)
