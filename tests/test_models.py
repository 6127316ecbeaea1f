"""The networks: shapes, the head that ANIL adapts, weights fixed by the seed, published sizes, refusals."""

import copy
import itertools

import pytest
import torch

from metasam.models import conv, conv4, mlp, resnet18, strided_conv, vit, wide_resnet


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
        (lambda: conv(1, 5, hidden=3, image_size=8), (1, 8, 8), 12),
        (lambda: conv(3, 5, hidden=3), (3, 32, 32), 12),
        (lambda: conv(3, 5, hidden=3, image_size=4), (3, 4, 4), 12),
        (lambda: resnet18(1, 5, width=2), (1, 8, 8), 16),
        (lambda: resnet18(3, 5, width=2), (3, 32, 32), 16),
        (lambda: wide_resnet(1, 5, depth=10, width=1), (1, 8, 8), 64),
        (lambda: vit(3, 5, 8, patch=4, width=6, depth=2, heads=3), (3, 8, 8), 6),
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


@pytest.mark.parametrize(
    ("build", "size"), [(lambda: conv4(2, 3, hidden=4), 28), (lambda: conv(2, 3, hidden=4, image_size=8), 8)]
)
def test_pooling_before_relu_is_the_order_of_the_papers_to_the_last_bit(build, size):
    torch.manual_seed(0)
    net = build().double()
    usual = copy.deepcopy(net)
    for block in [usual.body, *usual.body]:
        layers = list(block) if isinstance(block, torch.nn.Sequential) else []
        for i, (one, two) in enumerate(itertools.pairwise(layers)):
            if isinstance(one, torch.nn.MaxPool2d) and isinstance(two, torch.nn.ReLU):
                block[i], block[i + 1] = two, one
    assert str(usual) != str(net)
    x, y = torch.randn(6, 2, size, size, dtype=torch.float64), torch.arange(6) % 3
    found = []
    for each in (net, usual):
        weights = list(each.parameters())
        out = each(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        curved = torch.autograd.grad(sum(g.square().sum() for g in grads), weights)
        found.append([out, *grads, *curved])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def count(build):
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def test_standard_sizes():
    # the parameter counts of the papers' networks, by hand: 9 (c_in + 1/9) c_out a convolution, 2 c a norm
    assert count(lambda: conv4(1, 5)) == (9 + 1) * 64 + 3 * (9 * 64 + 1) * 64 + 4 * 2 * 64 + 65 * 5 == 112_261
    assert count(lambda: mlp(1, 1)) == 40 + 40 + 41 * 40 + 41 == 1_761
    assert count(lambda: conv(1, 10)) == 9 * 32 * (1 + 64 + 64 * 4) + 2 * 32 * 7 + 129 * 10
    # and the published ones
    assert count(lambda: resnet18(3, 10)) == 11_173_962
    assert count(lambda: wide_resnet(3, 10)) == 36_479_194
    assert count(lambda: wide_resnet(3, 10, depth=16, width=4)) == 2_748_890
    assert count(lambda: vit(3, 1000, 224, patch=16, width=768, depth=12, heads=12)) == 86_567_656


def test_resnet18_is_torchvisions_with_another_stem():
    models = pytest.importorskip("torchvision.models")
    net, theirs = resnet18(3, 10), models.resnet18(num_classes=10)
    theirs.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = torch.nn.Identity()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), net.state_dict().values(), strict=True)))
    x = torch.randn(4, 3, 16, 16)
    assert torch.allclose(net(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert net.body[3].conv1.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_vit_is_torchvisions():
    models = pytest.importorskip("torchvision.models")
    net = vit(3, 7, 8, patch=4, width=12, depth=2, heads=3, expansion=2).double()
    theirs = models.VisionTransformer(8, 4, 2, 3, 12, 24, num_classes=7).double()
    token, positions, patches, bias, *rest = (torch.randn_like(v) for v in net.state_dict().values())
    net.load_state_dict(dict(zip(net.state_dict(), (token, positions, patches, bias, *rest), strict=True)))
    theirs.load_state_dict(dict(zip(theirs.state_dict(), (token, patches, bias, positions, *rest), strict=True)))
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    assert torch.allclose(net(x), theirs.eval()(x), rtol=1e-9, atol=1e-9)


def test_wide_resnet_is_what_the_paper_draws():
    """The forward pass written out from its table 1 and figure 1, in plain functions."""
    torch.manual_seed(0)
    net = wide_resnet(3, 4, depth=16, width=2).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    weights = iter(net.state_dict().values())

    def norm(x):
        scale, shift, *_ = (next(weights) for _ in range(5))
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        return ((x - mean) / (var + 1e-5).sqrt() * scale[:, None, None] + shift[:, None, None]).relu()

    z = torch.conv2d(x, next(weights), padding=1)
    for stage, filters in enumerate((32, 64, 128)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            active = norm(z)
            inner = torch.conv2d(active, next(weights), stride=stride, padding=1)
            inner = torch.conv2d(norm(inner), next(weights), padding=1)
            z = inner + (z if block else torch.conv2d(active, next(weights), stride=stride))
            assert z.shape[1] == filters
    expected = norm(z).mean((2, 3)) @ next(weights).T + next(weights)
    assert torch.allclose(net(x), expected, rtol=1e-9, atol=1e-9)
    assert next(weights, None) is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: conv(1, 3, hidden=2, image_size=8),
        lambda: resnet18(1, 3, width=2),
        lambda: wide_resnet(1, 3, depth=10, width=1),
        lambda: vit(1, 3, 8, patch=4, width=4, depth=1, heads=2),
    ],
    ids=["conv", "resnet18", "wide_resnet", "vit"],
)
def test_slope_and_curvature_are_finite_differences(build):
    torch.manual_seed(0)
    net = build().double()
    names = list(dict(net.named_parameters()))
    weights = tuple(p.detach() + 0.1 * torch.randn_like(p) for p in net.parameters())
    buffers = {k: b.clone() for k, b in net.named_buffers()}
    x, y = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3

    def loss(*weights):
        out = torch.func.functional_call(net, {**dict(zip(names, weights, strict=True)), **buffers}, x)
        return torch.nn.functional.cross_entropy(out, y)

    def gradient(weights):
        weights = [w.clone().requires_grad_() for w in weights]
        return weights, torch.autograd.grad(loss(*weights), weights, create_graph=True)

    direction = [torch.randn_like(w) for w in weights]
    along, h = [], 1e-6
    for sign in (1, -1):
        _, g = gradient([w + sign * h * d for w, d in zip(weights, direction, strict=True)])
        along.append(sum((a * d).sum() for a, d in zip(g, direction, strict=True)))
    at, g = gradient(weights)
    slope = sum((a * d).sum() for a, d in zip(g, direction, strict=True))
    hessian = torch.autograd.grad(slope, at)  # a Hessian-vector product
    curvature = sum((a * d).sum() for a, d in zip(hessian, direction, strict=True))
    assert curvature.item() == pytest.approx(((along[0] - along[1]) / (2 * h)).item(), rel=1e-4)
    assert abs(curvature.item()) > 1e-3
    up, down = (loss(*(w + s * h * d for w, d in zip(weights, direction, strict=True))) for s in (1, -1))
    assert slope.item() == pytest.approx(((up - down) / (2 * h)).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: conv4(1, 5, image_size=8), "at least 16 x 16.*image_size=8.*mlp or strided_conv"),
        (lambda: conv4(1, 0), "ways to be a whole number of at least 1, got ways=0"),
        (lambda: mlp(3, 2, hidden=(4, -1)), r"hidden\[1\].*got hidden\[1\]=-1"),
        (lambda: strided_conv(1.0, 5), "in_channels.*got in_channels=1.0"),
        (lambda: conv(1, 5, image_size=3), "at least 4 x 4.*image_size=3.*mlp"),
        (lambda: resnet18(3, 0), "output to be a whole number of at least 1, got output=0"),
        (lambda: wide_resnet(3, 5, depth=18), "4 more than a multiple of 6.*got depth=18"),
        (lambda: wide_resnet(3, 5, depth=4), "got depth=4"),
        (lambda: vit(3, 5, 32, patch=5), "multiple of patch, got image_size=32, patch=5"),
        (lambda: vit(3, 5, 32, heads=5), "multiple of heads, got width=128, heads=5"),
        (lambda: vit(3, 5, 32, depth=0), "got depth=0"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()
