"""What all networks share: a body with a linear head, and the check of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def with_head(layers: Sequence[nn.Module], features: int, output: int) -> nn.Sequential:
    """Return the layers as ``body``, followed by a linear ``head``."""
    return nn.Sequential(OrderedDict(body=nn.Sequential(*layers), head=nn.Linear(features, output)))


def check_sizes(**sizes: int) -> None:
    """Raise ValueError naming the first size that is not a whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"expected {name} to be a whole number of at least 1, got {name}={size!r}")


def init_convolutions(net: nn.Module) -> None:
    """Draw convolutions as He et al. (ICCV 2015), by their outputs: normal, of variance 2 / (filters * area)."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
