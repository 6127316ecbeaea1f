"""An engine is taken only where one step of it gives what the plain one gives."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metasam import SharpMAML, Task, inner

from .cases import MLP

np = pytest.importorskip("numpy")


class Blocks(nn.Module):
    """Max pooling by strides, which vmap takes wrong after a convolution of many tasks (torch 2.14)."""

    def forward(self, x):
        n, c, h, w = x.shape
        blocks = x.as_strided((n, c, h // 2, w // 2, 2, 2), (c * h * w, h * w, 2 * w, 2, w, 1))
        return blocks.amax((-1, -2)).flatten(1)


class Drifts(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Masks(nn.Module):
    """Draws a mask that torch knows nothing of."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * torch.tensor([self.draw() for _ in range(x.shape[-1])])


class Careless(torch.autograd.Function):
    """The identity, with a wrong gradient under vmap alone."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return Doubled.apply(x), in_dims[0]


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Wrong(nn.Module):
    def forward(self, x):
        return Careless.apply(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Blocks, "something else under torch.vmap"),
        (Wrong, "something else under torch.vmap"),
        (Drifts, "something else each time"),
        (lambda: Masks(random.Random(0).random), "something else each time"),
        (lambda: Masks(random.random), "draws from random"),
        (lambda: Masks(np.random.random), "draws from numpy"),
    ],
    ids=["strides", "gradient", "counts", "a generator of its own", "random", "numpy"],
)
def test_auto_takes_vmap_only_where_it_gives_the_same(layer, reason, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(3, 6, 3, 8, 8, dtype=dtype), torch.arange(3).repeat(2).expand(3, -1)
    batch = Task((x, y), (x.flip(1), y))

    def made(engine):
        torch.manual_seed(1)
        conv = nn.Conv2d(3, 4, 3, padding=1)
        layers = [conv, layer()] if layer is Blocks else [nn.Flatten(), nn.Linear(192, 64), layer()]
        model = nn.Sequential(*layers, nn.Linear(64, 3)).to(dtype)
        return SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine=engine, variant="none", workers=1)

    auto = made("auto")
    loss = auto.meta_loss(batch)
    assert auto.engine_used == "higher"
    assert reason in auto.engine_reason, auto.engine_reason
    if layer in (Blocks, Wrong):
        assert torch.equal(loss, made("higher").meta_loss(batch))
    with pytest.raises(ValueError, match=f"cannot take this model: .*{reason}.*engine='higher'"):
        made("vmap").meta_loss(batch)


@pytest.mark.parametrize("of", ["buffers of one precision", "a precision of its own", "a loss that is not finite"])
def test_auto_takes_vmap_for_what_double_precision_does_not_suit(of):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.eye(64) * 1.5)

        def forward(self, x):
            if of == "a precision of its own":
                return F.linear(x.float(), self.matrix.float()).to(x.dtype)
            return F.linear(x, self.matrix)

    torch.manual_seed(0)
    x, y = torch.randn(3, 6, 3, 8, 8), torch.arange(3).repeat(2).expand(3, -1)
    if of == "a loss that is not finite":
        x[0] = math.nan
    shift = Shift()
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), shift, nn.Linear(64, 3))
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, variant="none")
    maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert (maml.engine_used, maml.engine_reason) == ("vmap", "the model allows it")
    assert shift.matrix.dtype == torch.float32


def test_trying_engines_out_leaves_generators_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), Masks(random.random), Masks(np.random.random))
    model.append(nn.Linear(8, 1))
    model = model.double()
    loop = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=1, variant="none").loop
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert inner.choose("auto", loop, dict(model.named_parameters()), MLP.tasks())[0] == "higher"
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))


class Quiet(nn.Module):
    """In place through a view: a small change of what it is called with, lost where the view is a copy."""

    def forward(self, x):
        x.view(len(x), -1).mul_(0.9999)
        return x


@pytest.mark.parametrize("of", ["frozen statistics", "statistics of every step", "a buffer", "weights of a loss"])
def test_buffers_of_one_precision_do_not_keep_a_trial_from_double(of):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.eye(16).reshape(16, 16, 1, 1) * 1.5)

        def forward(self, x):
            return F.conv2d(x, self.matrix)

    torch.manual_seed(0)
    norm = Scaled() if of == "a buffer" else nn.BatchNorm2d(16)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, Quiet(), nn.Flatten(), nn.Linear(1024, 3))
    loss_fn = nn.CrossEntropyLoss(torch.ones(3)) if of == "weights of a loss" else F.cross_entropy
    policy = {"frozen statistics": "frozen", "statistics of every step": "per_step"}.get(of, "batch")
    maml = SharpMAML(
        model, loss_fn, inner_lr=0.1, inner_steps=2, engine="higher", variant="none", workers=1, batchnorm=policy
    )
    x, y = torch.randn(3, 6, 3, 8, 8), torch.arange(3).repeat(2).expand(3, -1)
    maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert not maml._kernels  # in float32 a hundredth of a percent would pass for rounding
    assert "something else for images whose channels lie last" in maml.engine_reason, maml.engine_reason
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
