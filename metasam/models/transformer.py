"""A small vision transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .parts import check_sizes, with_head


def vit(
    in_channels: int,
    output: int,
    image_size: int,
    patch: int = 4,
    width: int = 128,
    depth: int = 6,
    heads: int = 4,
    expansion: int = 4,
) -> nn.Sequential:
    """Vision transformer (Dosovitskiy et al., ICLR 2021): class token, learned positions, pre-norm blocks, no dropout.

    Its size is by default that of small images; ``patch=16, width=768, depth=12, heads=12`` is ViT-B/16.

    Args:
        in_channels: channels of an image ``[in_channels, image_size, image_size]``.
        output: classes.
        image_size: side of the images, a multiple of ``patch``.
        patch: side of the squares that an image is cut into.
        width: numbers of a token, a multiple of ``heads``.
        depth: blocks.
        heads: of attention.
        expansion: hidden width of a block's MLP, as a multiple of ``width``.

    >>> import torch
    >>> vit(1, 10, image_size=8, patch=2, width=8, depth=1, heads=2)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """
    check_sizes(in_channels=in_channels, output=output, image_size=image_size, patch=patch)
    check_sizes(width=width, depth=depth, heads=heads, expansion=expansion)
    if image_size % patch:
        raise ValueError(f"expected image_size to be a multiple of patch, got image_size={image_size}, patch={patch}")
    if width % heads:
        raise ValueError(f"expected width to be a multiple of heads, got width={width}, heads={heads}")
    blocks = [_Block(width, heads, expansion) for _ in range(depth)]
    layers = [_Tokens(in_channels, image_size, patch, width), *blocks, nn.LayerNorm(width, eps=1e-6), _First()]
    net = with_head(layers, width, output)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    return net


class _Tokens(nn.Module):
    """Images to ``[N, 1 + patches, width]``: the class token and a linear map of each patch, plus their positions."""

    def __init__(self, in_channels: int, image_size: int, patch: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch) ** 2, width))
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.patches.weight, std=math.sqrt(1 / (in_channels * patch**2)))
        nn.init.zeros_(self.patches.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions


class _Block(nn.Module):
    """Self-attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, expansion: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps=1e-6), _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Attention(nn.Module):
    """Written out, as the fused kernels of torch cannot be differentiated twice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [N, heads, tokens, -1]
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class _First(nn.Module):
    """The class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
