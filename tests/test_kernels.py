"""The kernels that the inner loop uses on a CPU: torch's own are the oracle, and finite differences."""

from __future__ import annotations

import contextlib
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metasam import SharpMAML, Task, inner
from metasam.inner.batch_norm import BatchNorm
from metasam.inner.kernels import Kernels, concern
from metasam.inner.max_pool import AT_ONCE, MaxPool
from metasam.models import conv4

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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_is_torchs(shape, affine, only):
    x, weight, bias = 2 * normal(*shape) + 1, *((normal(3, seed=1), normal(3, seed=2)) if affine else (None, None))
    pulls = [normal(*shape, seed=4), normal(3, seed=5), normal(3, seed=6)]
    pulls = [p if only in (None, i) else None for i, p in enumerate(pulls)]
    theirs, ours = both(partial(normalised, x, weight, bias, [normal(*shape, seed=3), *pulls]))
    assert type(ours[0].grad_fn).__name__ == "BatchNormBackward"
    assert type(theirs[0].grad_fn).__name__ != "BatchNormBackward"
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    assert any(b.abs().max() > 1e-3 for b in theirs[2])


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
        lambda x: F.max_pool2d(x, 2, stride=0),
        lambda x: F.max_pool2d(x, 2.0),
        lambda x: F.max_pool2d(x, "2"),
        lambda x: F.max_pool2d(x, (2, 2, 2)),
        lambda x: F.max_pool2d(x, 2, padding=2),
        lambda x: F.max_pool2d(x, np.int64(2)),
        lambda x: F.max_pool2d(x, torch.tensor(2), stride=np.int64(1)),
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


# max-pooling

POOLS = {
    "2": {"kernel_size": 2},
    "3, stride 2, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "rounded up": {"kernel_size": 2, "ceil_mode": True},
    "oblong": {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 1)},
}


def pooled(x, settings, gy, a):
    x = x.clone().requires_grad_()
    y = F.max_pool2d(x, **settings)
    gy = gy(y).requires_grad_()
    (gx,) = torch.autograd.grad(y, x, gy, create_graph=True)
    return y, gx, torch.autograd.grad((gx * a).sum(), gy)[0]


@pytest.mark.parametrize("kind", ["as drawn", "ties", "nan", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_is_torchs_to_the_last_bit(name, dtype, kind):
    x = normal(3, 4, 9, 11, dtype=dtype)
    if kind == "ties":
        x = x.relu().round()
    elif kind != "as drawn":
        x.view(-1)[::7] = float(kind)
    theirs, ours = both(
        lambda: pooled(
            x, POOLS[name], lambda y: normal(*y.shape, seed=1, dtype=dtype), normal(*x.shape, seed=2, dtype=dtype)
        )
    )
    assert type(ours[0].grad_fn).__name__ == "MaxPoolBackward"
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_many_images_are_pooled_a_few_at_a_time():
    x = normal(5, 2, 300, 400, dtype=torch.float32)
    assert x.numel() > AT_ONCE > x[:4].numel()
    theirs, ours = both(
        lambda: pooled(x, {"kernel_size": 2}, lambda y: normal(*y.shape).float(), normal(*x.shape).float())
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_derivatives_of_max_pooling_of_any_order():
    x = normal(2, 2, 4, 6).requires_grad_()

    def call(x):
        return MaxPool.apply(x, [2, 2], [2, 2], [0, 0], [1, 1], False).square()

    assert torch.autograd.gradgradcheck(call, x)
    (g,) = torch.autograd.grad((call(x) * F.max_pool2d(x, 2)).sum(), x, create_graph=True)  # of x^3 at the maxima
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(third, 6.0 * (third != 0))
    assert int((third != 0).sum()) == 2 * 2 * 6


@pytest.mark.parametrize(
    ("x", "settings"),
    [
        (normal(2, 4, 4), {}),
        (normal(2, 3, 4, 4).to(memory_format=torch.channels_last), {}),
        (normal(2, 3, 4, 4).to(torch.bfloat16), {}),
        (normal(0, 3, 4, 4), {}),
        (normal(2, 3, 4, 4), {"return_indices": True}),
    ],
    ids=["no batch", "channels last", "bfloat16", "no image", "indices"],
)
def test_what_is_not_for_our_max_pooling_is_torchs(x, settings):
    x = x.requires_grad_()
    theirs, ours = (found[0] if settings else found for found in both(lambda: F.max_pool2d(x, 2, **settings)))
    assert type(ours.grad_fn) is type(theirs.grad_fn)
    assert torch.equal(ours, theirs)


# in the loop


def test_models_with_layers_that_they_are_for():
    assert concern(conv4(1, 2))
    assert concern(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not concern(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.AvgPool2d(2)))


@pytest.mark.parametrize(
    "settings", [{"variant": "none"}, {"variant": "both"}, {"variant": "low", "recompute": 2}], ids=str
)
def test_meta_gradients_are_those_of_torchs_kernels(settings, monkeypatch):
    torch.manual_seed(0)
    model = conv4(2, 3, hidden=4, image_size=16).double()
    x, y = normal(2, 6, 2, 16, 16), torch.arange(3).repeat(2).expand(2, -1)
    tasks, found, used = Task((x, y), (x.flip(1), y.flip(1))), [], []
    apply = BatchNorm.apply
    monkeypatch.setattr(BatchNorm, "apply", lambda *a: (used.append(len(found)), apply(*a))[1])
    for kernels in (True, False):
        monkeypatch.setattr(inner.higher, "concern", lambda model, kernels=kernels: kernels)
        maml = SharpMAML(model, F.cross_entropy, inner_lr=0.4, inner_steps=3, engine="higher", workers=1, **settings)
        maml.step(tasks, torch.optim.SGD(model.parameters(), lr=0.0))
        loss = maml.meta_loss(tasks)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert set(used) == {0}  # the second time it was torch's
    size = math.sqrt(sum(float(b.square().sum()) for b in found[1]))
    off = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*found, strict=True)))
    assert off < 1e-11 * size
    assert size > 0.1


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
