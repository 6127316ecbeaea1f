"""The small networks: shapes, the head that ANIL adapts, weights fixed by the seed, refusals."""

import pytest
import torch

from metasam.models import conv4, mlp, strided_conv


@pytest.mark.parametrize(
    ("build", "shape", "features"),
    [
        (lambda: mlp(6, 5, hidden=(8, 7)), (2, 3), 7),
        (lambda: mlp(6, 5, hidden=()), (6,), 6),
        (lambda: conv4(1, 5, hidden=8), (1, 28, 28), 8),
        (lambda: conv4(3, 5, hidden=8, image_size=84), (3, 84, 84), 8 * 25),
        (lambda: conv4(3, 5, hidden=8, image_size=32), (3, 32, 32), 8 * 4),
        (lambda: strided_conv(1, 5, hidden=8), (1, 28, 28), 8),
        (lambda: strided_conv(3, 5, hidden=8), (3, 84, 84), 8),
    ],
)
def test_shapes_head_and_seed(build, shape, features):
    torch.manual_seed(3)
    net = build()
    x = torch.randn(4, *shape)
    assert net(x).shape == (4, 5)
    assert net.head.weight.shape == (5, features)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), build().parameters(), strict=True))


def test_standard_sizes():
    # the parameter counts of the papers' networks, by hand: 9 (c_in + 1/9) c_out a convolution, 2 c a norm
    def count(net):
        return sum(p.numel() for p in net.parameters())

    assert count(conv4(1, 5)) == (9 + 1) * 64 + 3 * (9 * 64 + 1) * 64 + 4 * 2 * 64 + 65 * 5 == 112_261
    assert count(mlp(1, 1)) == 40 + 40 + 41 * 40 + 41 == 1_761


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: conv4(1, 5, image_size=8), "at least 16 x 16.*image_size=8.*mlp or strided_conv"),
        (lambda: conv4(1, 0), "ways to be a whole number of at least 1, got ways=0"),
        (lambda: mlp(3, 2, hidden=(4, -1)), r"hidden\[1\].*got hidden\[1\]=-1"),
        (lambda: strided_conv(1.0, 5), "in_channels.*got in_channels=1.0"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()
