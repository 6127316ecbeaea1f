"""The kernels that the inner loop uses on a CPU: torch's own are the oracle, and finite differences."""

from __future__ import annotations

import contextlib
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metasam import SharpMAML, Task
from metasam.inner import kernels
from metasam.inner.batch_norm import BatchNorm
from metasam.inner.convolution import Convolution
from metasam.inner.kernels import WIDE, Kernels, arranged, concern
from metasam.meta import KERNEL_TRIALS
from metasam.models import conv4

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Inputs as small as those below are for torch otherwise."""
    monkeypatch.setattr(kernels, "PLACES", 0)
    monkeypatch.setattr(kernels, "NUMBERS", 0)


SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 2)]


def both(call):
    """What torch gives and what we do."""
    found = []
    for context in (contextlib.nullcontext(), Kernels()):
        with context:
            found.append(call())
    return found


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# BatchNorm


def normalised(x, weight, bias, cotangents, eps=0.3):
    """Output, gradients and second derivatives; an eps of the size of the variance, so that it matters everywhere."""
    leaves = [v.clone().requires_grad_() for v in (x, weight, bias) if v is not None]
    gy = cotangents[0].clone().requires_grad_()
    y = F.batch_norm(leaves[0], None, None, *(leaves[1:] or (None, None)), True, 0.1, eps)
    first = torch.autograd.grad(y, leaves, gy, create_graph=True)
    wanted = [*leaves[:2], gy]  # nothing is curved in the bias
    pulled = [(g, c) for g, c in zip(first, cotangents[1:], strict=False) if c is not None]
    second = torch.autograd.grad(sum((g * c).sum() for g, c in pulled), wanted, allow_unused=True)
    return y, first, [torch.zeros_like(v) if s is None else s for v, s in zip(wanted, second, strict=True)]


@pytest.mark.parametrize(
    ("affine", "only"),
    [(True, None), (True, 0), (True, 1), (True, 2), (False, None)],
    ids=["all", "of x", "of weight", "of bias", "not affine"],
)
@pytest.mark.parametrize("shape", [*SHAPES, "channels last"], ids=str)
def test_batch_norm_is_torchs(shape, affine, only):
    shape, lie = ((4, 3, 5, 2), {"memory_format": LAST}) if shape == "channels last" else (shape, {})
    x, weight, bias = 2 * normal(*shape) + 1, *((normal(3, seed=1), normal(3, seed=2)) if affine else (None, None))
    pulls = [normal(*shape, seed=4).contiguous(**lie), normal(3, seed=5), normal(3, seed=6)]
    pulls = [p if only in (None, i) else None for i, p in enumerate(pulls)]
    gy = normal(*shape, seed=3).contiguous(**lie)
    theirs, ours = both(partial(normalised, x.contiguous(**lie), weight, bias, [gy, *pulls]))
    assert type(ours[0].grad_fn).__name__ == "BatchNormBackward"
    assert type(theirs[0].grad_fn).__name__ != "BatchNormBackward"
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    assert any(b.abs().max() > 1e-3 for b in theirs[2])


@pytest.mark.parametrize("lie", [{}, {"memory_format": LAST}], ids=["as usual", "channels last"])
def test_batch_norm_takes_scales_that_do_not_lie_side_by_side(lie):
    x, gy, pull = (normal(4, 16, 5, 2, seed=seed).contiguous(**lie) for seed in range(3))
    for weight in (normal(32, seed=4)[::2], normal(1, seed=5).expand(16), normal(16, 3, seed=6)[:, 1]):
        bias = weight.flip(0)[None].expand(2, -1).T[:, 0]
        found = []
        for ours in (False, True):
            leaf = x.clone().requires_grad_()
            w, b = weight.detach().requires_grad_(), bias.detach().requires_grad_()
            with Kernels() if ours else contextlib.nullcontext():
                # torch itself is wrong about others, where images and gradients have their channels last (2.14)
                given = (w, b) if ours else (w.contiguous(), b.contiguous())
                y = F.batch_norm(leaf, None, None, *given, True)
            first = torch.autograd.grad(y, (leaf, w, b), gy, create_graph=True)
            found.append([y, *first, *torch.autograd.grad((first[0] * pull).sum(), (leaf, w))])
        assert type(found[1][0].grad_fn).__name__ == "BatchNormBackward"
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            assert theirs.abs().max() > 1e-3


def test_second_derivatives_of_batch_norm_are_finite_differences():
    inputs = [v.requires_grad_() for v in (normal(4, 2, 3), normal(2, seed=1), normal(2, seed=2))]

    def call(x, weight, bias):
        return BatchNorm.apply(x, weight, bias, 0.1)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("pull", ["of the gradient", "constant"])
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_third_derivatives_of_batch_norm_are_refused(way, pull):
    x = normal(4, 2).requires_grad_()
    (g,) = torch.autograd.grad(BatchNorm.apply(x, None, None, 0.1).tanh().sum(), x, create_graph=True)
    value = g.square().sum() if pull == "of the gradient" else (g * normal(4, 2, seed=1)).sum()
    (h,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match="got a third"):
        h.sum().backward() if way == "backward" else torch.autograd.grad(h.sum(), x)


def test_second_derivatives_of_a_meta_loss_with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = normal(2, 6, 3), torch.arange(2).repeat(3).expand(2, -1)
    tasks, params = Task((x, y), (x.flip(1), y)), list(model.parameters())
    for first_order in (True, False):
        maml = SharpMAML(
            model,
            F.cross_entropy,
            inner_lr=0.4,
            inner_steps=1,
            engine="higher",
            first_order=first_order,
            variant="none",
        )
        grads = torch.autograd.grad(maml.meta_loss(tasks), params, create_graph=True)
        value = sum(g.square().sum() for g in grads)
        if first_order:  # of the query loss alone
            assert all(h.isfinite().all() for h in torch.autograd.grad(value, params))
        else:
            with pytest.raises(RuntimeError, match="got a third"):
                torch.autograd.grad(value, params)


@pytest.mark.parametrize(
    ("settings", "x"),
    [
        ({"training": False, "running_mean": torch.zeros(2), "running_var": torch.ones(2)}, normal(3, 2).float()),
        ({"training": True, "running_mean": torch.zeros(2), "running_var": torch.ones(2)}, normal(3, 2).float()),
        ({"training": True, "weight": torch.ones(2)}, normal(3, 2).float()),
        ({"training": True}, normal(3, 2).to(torch.bfloat16)),
        ({"training": True, "weight": torch.ones(2), "bias": torch.zeros(2)}, normal(3, 2).to(torch.bfloat16)),
    ],
    ids=["judging", "counting", "no bias", "bfloat16", "mixed"],
)
def test_what_is_not_for_our_batch_norm_is_torchs(settings, x):
    x = x.requires_grad_()
    given = {"running_mean": None, "running_var": None, **settings}
    theirs, ours = both(
        lambda: F.batch_norm(x, **{k: v.clone() if v is not None and k[0] == "r" else v for k, v in given.items()})
    )
    assert type(ours.grad_fn) is type(theirs.grad_fn)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.batch_norm(x, None, None, torch.ones(2, dtype=x.dtype), torch.ones(2, dtype=x.dtype), True),
        lambda x: F.batch_norm(x, None, None, training=True, eps=0.0),
        lambda x: F.batch_norm(x, None, None, training=True, momentum=None),
    ],
)
def test_odd_settings_are_for_torch(call):
    def outcome():
        x = normal(2, 4, 6, 6).requires_grad_()
        try:
            return call(x).grad_fn.name()
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error), str(error)

    theirs, ours = both(outcome)
    assert ours == theirs


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")  # torch's
@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm2d(2, track_running_stats=False), lambda: nn.MaxPool2d(2)])
def test_within_torch_func_it_is_torchs(layer):
    net, x = layer().double(), normal(3, 4, 2, 4, 4)
    weights = normal(*net(x[0]).shape)

    def loss(x):
        return (net(x) * weights).sum()

    theirs, ours = both(
        lambda: [torch.vmap(net)(x), torch.func.grad(loss)(x[0]), torch.func.jvp(net, (x[0],), (x[1],))[1]]
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_single_value_a_channel_is_the_error_that_torch_has():
    with Kernels(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(2)(torch.ones(1, 2))


@pytest.mark.parametrize("last", [False, True], ids=["gradients last", "images last"])
def test_gradients_that_lie_otherwise_than_images(last):
    x, gy, pull = (normal(4, 3, 5, 2, seed=i) for i in range(3))
    lie = [v.contiguous(memory_format=LAST) if last == (i == 0) else v for i, v in enumerate((x, gy, pull))]
    wanted, found = (normalised(v, normal(3), normal(3), [g, p, None, None]) for v, g, p in ((x, gy, pull), lie))
    with Kernels():
        ours = normalised(lie[0], normal(3), normal(3), [*lie[1:], None, None])
    for outcome in (found, ours):
        for a, b in zip((outcome[0], *outcome[1], *outcome[2]), (wanted[0], *wanted[1], *wanted[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


# convolution

CONVOLUTIONS = {
    "3x3": ((2, 16, 5, 6), (3, 16, 3, 3), {"padding": 1}),
    "of one channel": ((2, 1, 5, 6), (16, 1, 3, 3), {}),
    "strided": ((2, 4, 7, 6), (16, 4, 3, 2), {"stride": (2, 1), "padding": [1, 0]}),
    "dilated": ((2, 4, 7, 6), (16, 4, 3, 2), {"dilation": 2}),
    "in groups": ((2, 4, 5, 6), (16, 2, 3, 3), {"groups": 2, "padding": 1}),
    "of each channel": ((2, 16, 4, 4), (16, 1, 3, 3), {"groups": 16}),
    "1x1": ((2, 4, 3, 3), (16, 4, 1, 1), {}),
    "of one place": ((2, 4, 3, 3), (16, 4, 3, 3), {}),
}


def convolved(x, w, bias, settings, pull=(True, True, True), of_x=True):
    """Output, gradients, and second derivatives of the gradients that are pulled at."""
    leaves = [v.clone().requires_grad_(of_x or i > 0) for i, v in enumerate((x, w, bias)) if v is not None]
    y = F.conv2d(*leaves, **settings)
    gy = normal(*y.shape, seed=3).requires_grad_()
    inputs = [v for v in leaves if v.requires_grad]
    first = torch.autograd.grad(y, inputs, gy, create_graph=True)
    pulled = [(g * normal(*g.shape, seed=4 + i)).sum() for i, g in enumerate(first) if pull[i + 3 - len(first)]]
    wanted = [gy, *inputs]
    second = torch.autograd.grad(sum(pulled), wanted, allow_unused=True)
    return y, first, [torch.zeros_like(v) if s is None else s for v, s in zip(wanted, second, strict=True)]


@pytest.mark.parametrize(
    ("biased", "of_x", "pull"),
    [
        (True, True, (True, True, True)),
        (True, True, (True, False, False)),
        (True, True, (False, True, False)),
        (True, True, (False, False, True)),
        (False, True, (False, True, True)),
        (True, False, (True, True, True)),
    ],
    ids=["all", "of x", "of w", "of bias", "no bias", "images constant"],
)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_is_torchs(name, biased, of_x, pull):
    of, by, settings = CONVOLUTIONS[name]
    x, w, bias = normal(*of), normal(*by, seed=1), normal(by[0], seed=2) if biased else None
    if not biased:
        pull = (*pull[1:], False)  # there are two gradients
    theirs, ours = both(partial(convolved, x, w, bias, settings, pull, of_x))
    assert type(ours[0].grad_fn).__name__ == "ConvolutionBackward"
    assert type(theirs[0].grad_fn).__name__ == "ConvolutionBackward0"
    assert ours[0].is_contiguous(memory_format=LAST)
    for a, b in zip((ours[0], *ours[1], *ours[2]), (theirs[0], *theirs[1], *theirs[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert any(b.abs().max() > 1e-3 for b in theirs[2])


@pytest.mark.parametrize("name", ["strided", "in groups"])
def test_derivatives_of_convolution_are_finite_differences(name):
    of, by, settings = CONVOLUTIONS[name]
    inputs = [v.requires_grad_() for v in (normal(*of), normal(*by, seed=1), normal(by[0], seed=2))]

    def call(x, w, bias):
        with Kernels():
            return F.conv2d(x, w, bias, **settings).square()  # so that third derivatives have something to say

    def gradient(x, w, bias):
        return torch.autograd.grad(call(x, w, bias).sum(), (x, w, bias), create_graph=True)

    assert torch.autograd.gradcheck(call, inputs, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(call, inputs, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(gradient, inputs, check_undefined_grad=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x, w, padding="same"),
        lambda x, w: F.conv2d(x, w, groups=2),
        lambda x, w: F.conv2d(x, w, stride=0),
        lambda x, w: F.conv2d(x, w, stride=(1, 1, 1)),
        lambda x, w: F.conv2d(x, w, torch.zeros(3, dtype=x.dtype)),
        lambda x, w: F.conv2d(x, w, padding=-1),
        lambda x, w: F.conv2d(x[0], w),
        lambda x, w: F.conv2d(x[:0], w),
        lambda x, w: F.conv2d(x, w[0]),
        lambda x, w: F.conv2d(x[..., :1], w),
        lambda x, w: F.conv2d(x, w.float()),
        lambda x, w: F.conv2d(x.bfloat16(), w.bfloat16()),
        lambda x, w: F.conv2d(x[:, :1], w[:4, :1]),
    ],
)
def test_odd_convolutions_are_for_torch(call):
    def outcome():
        x, w = normal(2, WIDE, 6, 6).requires_grad_(), normal(WIDE, WIDE, 3, 3)
        try:
            return call(x, w).grad_fn.name()
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error), str(error)

    theirs, ours = both(outcome)
    assert ours in (theirs, theirs if isinstance(theirs, tuple) else "")


def test_under_autocast_convolution_is_torchs():
    x, w = normal(2, WIDE, 6, 6).float().requires_grad_(), normal(WIDE, WIDE, 3, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = both(lambda: F.conv2d(x, w))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


def test_small_convolutions_and_norms_are_for_torch(monkeypatch):
    monkeypatch.undo()
    with Kernels():
        y = F.conv2d(normal(5, WIDE, 3, 3), normal(WIDE, WIDE, 3, 3).requires_grad_(), padding=1)
        z = F.batch_norm(y, None, None, training=True)
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    assert type(z.grad_fn).__name__ == "NativeBatchNormBackward0"
    assert y.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("shape", [(2, -1), (2, 4, -1), (2, 2, 2, 3, 4), (-1,)], ids=str)
def test_images_can_be_viewed(shape):
    x = normal(2, 4, 3, 4)
    last = x.contiguous(memory_format=LAST)
    if shape in ((2, -1), (-1,)):
        with pytest.raises(RuntimeError, match="view"):
            last.view(shape)
    with Kernels():
        for found in (last.view(shape), last.view(*shape), last.view(size=shape), last.view_as(x.view(shape))):
            assert torch.equal(found, x.view(shape))
        assert last.view(2, 4, 12).data_ptr() == last.data_ptr()  # where there is one, it is a view
        for wrong in ((2, 5, -1), (3,)):
            with pytest.raises(RuntimeError, match="is invalid for input"):
                last.view(wrong)


def test_parameters_are_arranged_and_their_gradients_are_not():
    w = {
        "wide": normal(WIDE, 3, 2, 2),
        "narrow": normal(3, 2, 2, 2),
        "bias": normal(WIDE),
        "half": normal(WIDE, 1, 2, 2),
    }
    w["half"] = w["half"].bfloat16()
    leaves = {k: v.requires_grad_() for k, v in w.items()}
    found = arranged(leaves)
    assert list(found) == list(w)
    assert all(torch.equal(found[k], w[k]) for k in w)
    assert {k for k in w if found[k] is not w[k]} == {"wide"}
    assert found["wide"].stride() == (12, 1, 6, 3)
    (g,) = torch.autograd.grad((found["wide"] ** 3).sum(), leaves["wide"], create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), leaves["wide"])
    assert g.is_contiguous()
    torch.testing.assert_close(h, 6 * w["wide"].detach(), rtol=1e-14, atol=0)


# in the loop


def test_models_with_layers_that_they_are_for():
    assert concern(conv4(1, 2))
    assert concern(nn.Conv2d(1, WIDE, 3))
    assert concern(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not concern(nn.Conv2d(1, WIDE - 1, 3))
    assert not concern(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.AvgPool2d(2)))
    assert not concern(nn.Sequential(nn.Conv2d(1, WIDE, 3), nn.InstanceNorm2d(WIDE)))


class View(nn.Module):
    def forward(self, x):
        return x.view(x.size(0), -1)


class Skip(nn.Module):
    """A residual block, and what it was fed beside it."""

    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.Tanh())

    def forward(self, x):
        return torch.cat([x, x + self.inner(x)], dim=1)


MODELS = {
    "max": lambda: [nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.ReLU()],
    "padded max": lambda: [nn.MaxPool2d(3, 2, 1), nn.ELU()],
    "average": lambda: [nn.BatchNorm2d(16, affine=False), nn.Softplus(), nn.AvgPool2d(2)],
    "adaptive": lambda: [nn.Tanh(), nn.AdaptiveAvgPool2d((2, 3)), nn.AdaptiveMaxPool2d(2)],
    "groups": lambda: [nn.GroupNorm(4, 16), nn.SiLU(), nn.LPPool2d(2, 2)],
    "layer": lambda: [nn.LayerNorm([16, 8, 8]), nn.GELU(), nn.MaxPool2d(4)],
    "prelu": lambda: [nn.PReLU(16), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(8)],
    "shuffled": lambda: [nn.PixelShuffle(2), nn.Tanh(), nn.PixelUnshuffle(4), nn.Conv2d(64, 4, 1)],
    "unfolded": lambda: [nn.Unfold(4, stride=4), nn.Tanh()],
    "local": lambda: [nn.LocalResponseNorm(3), nn.ZeroPad2d(1), nn.ReflectionPad2d(2), nn.Conv2d(16, 3, 5, 3)],
    "transposed": lambda: [nn.Tanh(), nn.ConvTranspose2d(16, 4, 3, 2), nn.AvgPool2d(4)],
    "beside": lambda: [Skip(16), nn.Conv2d(32, 16, 3, groups=4), nn.BatchNorm2d(16), nn.AvgPool2d(2)],
    "of channels": lambda: [nn.Softmax2d(), nn.ChannelShuffle(4), nn.Conv2d(16, 16, 3, groups=16), nn.AvgPool2d(2)],
}


@pytest.mark.parametrize("flatten", [nn.Flatten, View])
@pytest.mark.parametrize("name", MODELS)
def test_meta_gradients_of_many_kinds_of_models(name, flatten):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), *MODELS[name](), flatten())
    model = nn.Sequential(body, nn.Linear(body(torch.zeros(2, 2, 8, 8)).shape[1], 3)).double()
    found = of_both_kernels(model, normal(2, 6, 2, 8, 8), steps=2)
    off, size = (math.sqrt(sum(float(v.square().sum()) for v in vs)) for vs in (map(torch.sub, *found), found[1]))
    assert off < 1e-11 * size
    assert size > 1e-3


def of_both_kernels(model, x, steps=3, **settings):
    """Loss and meta-gradient, with our kernels and with torch's."""
    y, found = torch.arange(3).repeat(x.shape[1] // 3).expand(len(x), -1), []
    tasks = Task((x, y), (x.flip(1), y.flip(1)))
    for ours in (True, False):
        settings = {"variant": "none", "workers": 1, **settings}
        maml = SharpMAML(model, F.cross_entropy, inner_lr=0.4, inner_steps=steps, engine="higher", **settings)
        maml.evaluate(tasks)
        assert maml._kernels
        maml._kernels = ours
        maml.step(tasks, torch.optim.SGD(model.parameters(), lr=0.0))
        model.zero_grad()
        loss = maml.meta_loss(tasks)
        loss.backward()
        assert all(p.grad.is_contiguous() for p in model.parameters())
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"variant": "both"},
        {"variant": "both", "reuse_inner_eps": True},
        {"variant": "low", "recompute": 2},
        {"inner_params": ["*.0.weight"]},
        {"batchnorm": "per_step"},
        {"inner_rule": "gsam", "variant": "low"},
        {"first_order": True},
    ],
    ids=str,
)
def test_meta_gradients_are_those_of_torchs_kernels(settings, monkeypatch):
    torch.manual_seed(0)
    model, used = conv4(2, 3, hidden=16, image_size=16).double(), []
    for kernel in (BatchNorm, Convolution):
        monkeypatch.setattr(kernel, "apply", lambda *a, apply=kernel.apply: (used.append(1), apply(*a))[1])
    found = of_both_kernels(model, normal(2, 6, 2, 16, 16), **settings)
    assert used
    off, size = (math.sqrt(sum(float(v.square().sum()) for v in vs)) for vs in (map(torch.sub, *found), found[1]))
    assert off < 1e-10 * size
    assert size > 0.1


class Stubborn(nn.Module):
    """Takes images to lie as usual, as an extension may."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "raises":
            return x.as_strided(x.shape, x.stride()).flatten(1) if x.is_contiguous() else x.no_such_thing
        if self.how == "aliases":
            x.view(len(x), -1).mul_(3.0)
            return x.flatten(1)
        return x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1))


@pytest.mark.parametrize("how", ["raises", "aliases", "reads memory"])
def test_models_that_images_must_lie_as_usual_for(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), Stubborn(how), nn.Linear(256, 3)).double()
    x, y = normal(2, 6, 2, 6, 6), torch.arange(3).repeat(2).expand(2, -1)
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none")
    loss = maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert not maml._kernels
    assert "channels lie last" in maml.engine_reason
    maml._kernels = False
    assert torch.equal(loss, maml.meta_loss(Task((x, y), (x.flip(1), y))))


class Quiet(nn.Module):
    """In place through a view: a small change of what it is called with."""

    def forward(self, x):
        x.view(len(x), -1).mul_(0.99)
        return x.flatten(1)


class Noisy(nn.Module):
    """Draws numbers, and does something else for channels last."""

    def forward(self, x):
        torch.rand(1)
        x.view(len(x), -1).mul_(0.1)
        return x.flatten(1)


class Trains(nn.Module):
    """Needs images to lie as usual, but in training alone."""

    def forward(self, x):
        return Stubborn("raises")(x) if self.training else x.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [Quiet, Noisy])
def test_a_model_is_not_trusted_with_what_changes_little_or_cannot_be_told(layer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), layer(), nn.Linear(256, 3)).to(dtype)
    x, y = normal(2, 6, 2, 6, 6).to(dtype), torch.arange(3).repeat(2).expand(2, -1)
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none")
    maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert not maml._kernels
    assert "channels lie last" in maml.engine_reason


@pytest.mark.parametrize("first", ["evaluate", "adapt", "small images"])
def test_kernels_are_tried_again_in_training_and_for_other_images(first):
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool1d(6)
    layer = Stubborn("raises") if first == "small images" else Trains()
    model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), layer, head, nn.Linear(6, 3)).double()
    x, y = normal(2, 6, 2, 6, 6), torch.arange(3).repeat(2).expand(2, -1)
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none")
    if first == "evaluate":
        maml.evaluate(Task((x, y), (x.flip(1), y)))
    elif first == "adapt":
        maml.adapt(Task((x[0], y[0]), (x[0].flip(0), y[0])))
    else:
        maml.meta_loss(Task((x[..., :1, :1], y), (x[..., :1, :1].flip(1), y)))
    assert maml._kernels
    loss = maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert not maml._kernels
    assert "channels lie last" in maml.engine_reason
    other = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none")
    other._kernels = False
    assert torch.equal(loss, other.meta_loss(Task((x, y), (x.flip(1), y))))


class Flagged(nn.Module):
    """Writes through a view, but only when told to, in eval mode, or to many images."""

    def __init__(self):
        super().__init__()
        self.flag, self.act = False, nn.Identity()

    def forward(self, x):
        if self.flag or not self.training or len(x) > 6 or isinstance(self.act, nn.ReLU):
            x.view(len(x), -1)[:, ::2].mul_(3)
        return x.tanh().flatten(1)


@pytest.mark.parametrize("change", ["flag", "eval", "module", "support", "query", "another batch"])
def test_kernels_are_tried_again_for_other_states_of_a_model_and_shapes_of_tasks(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), Flagged(), nn.Linear(16 * 36, 3)).double()

    def side(n):
        return normal(2, n, 2, 6, 6), (torch.arange(n) % 3).expand(2, -1)

    learners = [
        SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none", workers=1)
        for _ in range(2)
    ]
    ours, torchs = learners
    torchs._kernels = False
    usual = Task(side(6), side(6))
    assert torch.allclose(*(maml.meta_loss(usual) for maml in learners), rtol=1e-10)
    assert ours._kernels
    tasks = {
        "support": Task(side(9), side(6)),
        "query": Task(side(6), side(9)),
        "another batch": [usual, Task(side(6), side(9))],
    }.get(change, usual)
    if change == "flag":
        model[1].flag = True
    elif change == "eval":
        model.eval()
    elif change == "module":
        model[1].act = nn.ReLU()
    assert torch.equal(*(maml.meta_loss(tasks) for maml in learners))
    assert not ours._kernels


def test_a_model_whose_state_keeps_changing_is_left_to_torchs_kernels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.Flatten(), nn.Linear(256, 3)).double()
    x, y = normal(2, 6, 2, 6, 6), torch.arange(3).repeat(2).expand(2, -1)
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, engine="higher", variant="none", workers=1)
    for i in range(KERNEL_TRIALS + 2):
        model.count = i
        maml.meta_loss(Task((x, y), (x.flip(1), y)))
        assert maml._kernels == (i < KERNEL_TRIALS)
    assert "attributes keep changing" in maml.engine_reason


@pytest.mark.parametrize("hides", ["nan in a part", "nan in the first batch", "large loss", "numbers of one precision"])
def test_a_loss_does_not_hide_that_images_must_lie_as_usual(hides):
    def loss_fn(output, y):
        if hides == "large loss":
            return F.cross_entropy(output, y) + 1e9
        weight = torch.ones(3, dtype=torch.float32) if hides == "numbers of one precision" else None
        return F.cross_entropy(output, y, weight, ignore_index=0 if hides == "nan in a part" else -100)

    torch.manual_seed(0)
    dtype = torch.float32 if hides == "numbers of one precision" else torch.float64
    model = nn.Sequential(nn.Conv2d(2, 16, 3), Stubborn("reads memory"), nn.Linear(256, 3)).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(0.05)
    x, y = normal(2, 12, 2, 6, 6).to(dtype), torch.arange(3).repeat(4).expand(2, -1)
    learners = [
        SharpMAML(model, loss_fn, inner_lr=0.1, inner_steps=2, engine="higher", variant="none", workers=1)
        for _ in range(2)
    ]
    ours, torchs = learners
    torchs._kernels = False
    if hides == "nan in the first batch":
        bad = x.clone()
        bad[0, 0] = math.nan
        ours.meta_loss(Task((bad[:, :4], y[:, :4]), (x, y)))
    task = Task((x[:, :4], y[:, :4]), (x, y))  # every third query example, as few as in the support set: all of class 0
    assert torch.equal(*(maml.meta_loss(task) for maml in learners))
    assert not ours._kernels


class Notes(nn.Module):
    """Notes how many images it, or a copy of it, gets, and whether a graph of them is kept."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def forward(self, x):
        self.note((len(x), x.dtype, torch.is_grad_enabled()))
        return x.flatten(1)


@pytest.mark.parametrize("whole", [False, True])
def test_trying_kernels_out_keeps_the_graph_of_a_large_query_set_only_where_the_loss_needs_it(whole):
    def loss_fn(output, y):
        if whole and len(y) not in (5, 12):
            raise ValueError(f"expected 5 or 12 labels, got {len(y)}")
        return F.cross_entropy(output, y)

    torch.manual_seed(0)
    seen = []
    model = nn.Sequential(nn.Conv2d(2, 16, 3), Notes(lambda what: seen.append(what)), nn.Linear(256, 3))
    x, y = normal(2, 12, 2, 6, 6).float(), torch.arange(3).repeat(4).expand(2, -1)
    maml = SharpMAML(model, loss_fn, inner_lr=0.1, inner_steps=2, engine="higher", variant="none", workers=1)
    maml.meta_loss(Task((x[:, :5], y[:, :5]), (x, y)))
    assert maml._kernels
    tried = {(n, kept) for n, dtype, kept in seen if dtype == torch.float64}
    assert {(5, True), (6, True), (12, False)} <= tried
    assert ((12, True) in tried) == whole


def test_trying_kernels_out_leaves_no_trace():
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), dropout, nn.Flatten(), nn.Linear(256, 3))
    x, y = normal(2, 6, 2, 6, 6).float(), torch.arange(3).repeat(2).expand(2, -1)
    before, state = [v.clone() for v in model.state_dict().values()], torch.get_rng_state()
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine="higher", variant="none")
    found = [maml.meta_loss(Task((x, y), (x.flip(1), y))).detach()]
    assert maml._kernels
    assert dropout.training
    assert maml.engine_reason == "as asked"
    assert maml.counts == {"support": 4.0, "query": 2.0, "forward": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))
    torch.set_rng_state(state)
    found.append(maml.meta_loss(Task((x, y), (x.flip(1), y))).detach())
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore")  # what torch has to say of compiling
def test_a_compiled_model_is_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    compiled = torch.compile(model, backend="eager")  # others have no second derivatives

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return compiled(x)

    x, y = normal(2, 6, 2, 6, 6), torch.arange(3).repeat(2).expand(2, -1)
    found = []
    for each in (model, Compiled()):
        maml = SharpMAML(each, F.cross_entropy, inner_lr=0.4, inner_steps=2, engine="higher", variant="none", workers=1)
        found.append(torch.autograd.grad(maml.meta_loss(Task((x, y), (x.flip(1), y))), list(model.parameters())))
    assert sum(float(g.square().sum()) for g in found[0]) > 0.01
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
