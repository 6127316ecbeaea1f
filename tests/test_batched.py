"""Our vmap of one level is torch's, to rounding in float64, with derivatives of its derivatives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metasam import SharpMAML
from metasam.inner import batched

from .cases import MLP, distance, gradients


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def of_tasks():
    """Input, weight and bias of three tasks."""
    return [normal(3, *shape).detach() for shape in ((5, 4), (2, 4), (2,))]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


SHAPES = {
    "examples": (5, 4),
    "sequences": (5, 3, 4),
    "maps": (5, 2, 3, 4),
    "one example": (1, 4),
    "a vector": (4,),
    "none": (0, 2, 4),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_linear_layer_and_its_derivatives_are_torchs(shape, bias):
    x, weight, b = normal(3, *shape), normal(3, 2, 4), normal(3, 2)
    values = (x, weight, b) if bias else (x, weight)

    def ours(x, weight, bias=None):
        return batched.linear(x, weight, bias).sin().sum()

    def torchs(x, weight, bias=None):
        return F.linear(x, weight, bias).sin().sum()

    found = []
    for one in (ours, torchs):
        losses = torch.vmap(one)(*values)
        grads = torch.autograd.grad(losses.sum(), values, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), values)
        found.append([losses, *grads, *again])
    for a, b in zip(*found, strict=True):
        assert not x.numel() or b.abs().max() > 1e-3
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_all", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("last", [True, False])
def test_whatever_is_the_same_for_all_tasks_and_wherever_their_dimension_is(of_all, last):
    shapes = ((5, 4), (2, 4), (2,))
    where = [-1 if last else 0] * 3
    values = [normal(*s, 3) if last else normal(3, *s) for s in shapes]
    values = [v if many else v.select(d, 1) for v, many, d in zip(values, of_all, where, strict=True)]
    dims = tuple(d if many else None for d, many in zip(where, of_all, strict=True))
    if not any(of_all):
        assert torch.equal(batched.linear(*values), F.linear(*values))
        return
    found, wanted = (torch.vmap(f, in_dims=dims)(*values) for f in (batched.linear, F.linear))
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_linear_layer_within_transforms_of_the_users_own():
    x, weight, b = of_tasks()

    def jacobian(linear):
        def one(x, weight, b):
            return torch.func.vmap(torch.func.jacrev(lambda row: linear(row[None], weight, b).sin()))(x)

        return torch.vmap(one)(x, weight, b)

    assert torch.allclose(jacobian(batched.linear), jacobian(F.linear), rtol=1e-12)


@pytest.mark.parametrize("how", ["grad", "vjp", "vmap"])
def test_a_linear_layer_that_a_transform_of_the_users_own_does_not_reach(how):
    x, weight, b = of_tasks()
    t = torch.linspace(0, 1, 5, dtype=torch.float64)

    def derivative(linear):
        def one(x, weight, b):
            def trunk(t):
                return (linear(x, weight, b) * t.sin()[:, None]).sum()

            if how == "vmap":
                return torch.func.vmap(lambda t: trunk(t[None]))(t)
            return torch.func.grad(trunk)(t) if how == "grad" else torch.func.vjp(trunk, t)[1](trunk(t))[0]

        return torch.vmap(one)(x, weight, b)

    assert torch.allclose(derivative(batched.linear), derivative(F.linear), rtol=1e-12)


def test_autocast_is_left_to_torch():
    x, weight, b = (t.float() for t in of_tasks())
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (torch.vmap(f)(x, weight, b) for f in (batched.linear, F.linear))
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_who_patches_linear_layers_is_heard(monkeypatch):
    x, weight, b = of_tasks()
    model = nn.Sequential(nn.Linear(4, 2))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert batched.linears_of(model) == []
    assert batched.linears_of(model) == [model[0]]
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda x, weight, bias: 2 * x)
        assert torch.equal(torch.vmap(batched.linear)(x, weight, b), 2 * x)


def test_vmap_is_torchs_containers_random_numbers_and_outputs_that_are_the_same_for_all():
    x = normal(3, 5, 4)

    def one(x):
        return {"mask": F.dropout(x, 0.5), "both": (x.sum(), [torch.ones(2)])}

    found = []
    for of_all in (batched.vmap(one), torch.vmap(one, randomness="different")):
        torch.manual_seed(1)
        found.append(of_all(x))
    ours, torchs = found
    assert torch.equal(ours["mask"], torchs["mask"])
    assert len({tuple(m.eq(0).flatten().tolist()) for m in ours["mask"]}) == 3
    assert torch.equal(ours["both"][0], torchs["both"][0])
    assert ours["both"][1][0].shape == (3, 2)


class Doubles(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_only_layers_that_are_linear_and_nothing_else_are_taken():
    plain, tied = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x
    whole, part = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    part.compile()
    model = nn.Sequential(plain, nn.ReLU(), tied, Doubles(4, 4), patched, plain, torch.compile(whole), part)
    assert batched.linears_of(model) == [plain, tied]


@pytest.mark.parametrize("fails", [True, False])
def test_layers_are_left_as_they_were(fails):
    layer = nn.Linear(4, 2).double()
    names = set(vars(layer))

    def one(x):
        assert "forward" in vars(layer)
        if fails:
            raise ArithmeticError
        return layer(x)

    try:
        batched.vmap(one, [layer])(normal(3, 5, 4))
    except ArithmeticError:
        assert fails
    assert set(vars(layer)) == names
    assert torch.vmap(lambda x: x.sum())(torch.ones(2, 3)).tolist() == [3.0, 3.0]  # no level is left open


def test_a_torch_without_these_functions_gives_the_same(monkeypatch):
    def found():
        model = MLP.model()
        maml = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=2, engine="vmap", variant="both")
        return gradients(maml.meta_loss(MLP.tasks()), model)

    ours = found()
    monkeypatch.setattr(batched, "KNOWN", False)
    assert distance(ours, found()) < 1e-10
