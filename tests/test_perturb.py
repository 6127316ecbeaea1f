"""The geometries: lengths, invariances, derivatives."""

from __future__ import annotations

import pytest
import torch

from metasam import tree
from metasam.perturb import Adaptive, Fisher, Steepest, Unnormalised
from metasam.rules import Sharp

from .test_rules import Quadratic

GEOMETRIES = [Steepest(), Adaptive(0.02), Adaptive(0.02, None), Unnormalised(), Fisher(2.0)]
each_geometry = pytest.mark.parametrize("perturb", GEOMETRIES, ids=str)


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (4,)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def test_steepest_has_the_radius_as_one_norm_over_all_parameters():
    eps, grads = Steepest()(draw(), draw(1), 0.3), draw(1)
    assert float(torch.cat([v.flatten() for v in eps.values()]).norm()) == pytest.approx(0.3, rel=1e-12)
    assert all(torch.allclose(eps[k] / grads[k], eps["a.bias"][0] / grads["a.bias"][0]) for k in eps)


@pytest.mark.parametrize("only", ["weight", None])
def test_adaptive_has_the_radius_in_its_own_norm(only):
    perturb, w = Adaptive(0.02, only), draw()
    eps = perturb(w, draw(1), 0.3)
    t = {k: v.abs() + 0.02 if only is None or k.endswith("weight") else torch.ones_like(v) for k, v in w.items()}
    length = torch.cat([(eps[k] / t[k]).flatten() for k in eps]).norm()
    assert float(length) == pytest.approx(0.3, rel=1e-12)
    assert float(perturb.square(w, eps)) == pytest.approx(0.3**2, rel=1e-12)


@each_geometry
def test_square_is_the_norm_whose_ball_is_climbed(perturb):
    w, eps = draw(), draw(1)
    square = perturb.square(w, eps)
    if square is None:
        assert isinstance(perturb, Unnormalised | Fisher)
        return
    # the ascent step maximises <g, eps> over the ball: no other point of it does better
    g = draw(2)
    best = tree.dot(g, perturb(w, g, 1.0))
    for seed in range(20):
        other = draw(10 + seed)
        other = tree.scale(other, 1 / perturb.square(w, other).sqrt())
        assert tree.dot(g, other) < best


def test_adaptive_without_stabiliser_ignores_rescaling_between_layers():
    first, second = torch.nn.Linear(4, 6, bias=False).double(), torch.nn.Linear(6, 1, bias=False).double()
    x = torch.randn(8, 4, dtype=torch.float64)

    def sharpened(factor):
        w = {"first.weight": first.weight * factor, "second.weight": second.weight / factor}

        def loss(w):
            return (x @ w["first.weight"].T).relu().matmul(w["second.weight"].T).square().mean()

        g = dict(zip(w, torch.autograd.grad(loss(w), list(w.values())), strict=True))
        return float(loss(tree.add(w, Adaptive(0.0)(w, g, 0.4))).detach())

    assert sharpened(10.0) == pytest.approx(sharpened(1.0), rel=1e-12)


@each_geometry
def test_missing_gradients_are_not_perturbed(perturb):
    grads = {k: v for k, v in draw(1).items() if k != "a.weight"}
    for fused in (True, False):
        with tree.fused(fused):
            assert perturb(draw(), grads, 0.3).keys() == grads.keys()
            assert perturb(draw(), {}, 0.3) == {}


@each_geometry
def test_eps_is_differentiable_in_weights_and_gradients(perturb):
    w, g = draw(), draw(1)

    def eps(*values):
        n = len(w)
        params, grads = (dict(zip(w, v, strict=True)) for v in (values[:n], values[n:]))
        return tuple(perturb(params, grads, 0.3).values())

    leaves = [v.requires_grad_() for v in (*w.values(), *g.values())]
    assert torch.autograd.gradcheck(eps, leaves)


@each_geometry
def test_a_zero_gradient_gives_a_zero_eps_with_a_finite_derivative(perturb):
    g = {k: torch.zeros_like(v).requires_grad_() for k, v in draw().items()}
    eps = perturb(draw(), g, 0.3)
    slopes = torch.autograd.grad(sum(v.sum() for v in eps.values()), list(g.values()))
    assert all(v.abs().max() == 0 for v in eps.values())
    assert all(s.abs().max() <= 1 for s in slopes)


@pytest.mark.parametrize(("steps", "step_size"), [(4, None), (3, 0.9), (5, 3.0)])
@pytest.mark.parametrize("perturb", [Steepest(), Adaptive(0.02)], ids=str)
def test_multistep_stays_in_its_ball(steps, step_size, perturb):
    at, seen = Quadratic(), []

    def watched(eps=None, *args, **kwargs):
        seen.append(eps)
        return at(eps, *args, **kwargs)

    Sharp(0.3, perturb, steps=steps, step_size=step_size)(watched, at.descend, at.params, {})
    lengths = [float(perturb.square(at.params, e).sqrt()) for e in seen if e]
    assert len(lengths) == steps
    assert all(length <= 0.3 * (1 + 1e-12) for length in lengths)
    if step_size and step_size > 1:
        assert lengths == pytest.approx([0.3] * steps, rel=1e-12)


def test_a_multistep_of_one_full_step_is_sam_to_the_last_bit():
    at = Quadratic()
    one, _ = Sharp(0.3)(at, at.descend, at.params, {})
    two, _ = Sharp(0.3, steps=1, step_size=1.0)(at, at.descend, at.params, {})
    assert tree.dot(tree.add(one, tree.scale(two, -1.0)), one).abs() < 1e-14


@pytest.mark.parametrize("kind", [Adaptive, Fisher])
@pytest.mark.parametrize("eta", [-0.1, float("nan"), float("inf")])
def test_geometries_refuse_their_eta(eta, kind):
    with pytest.raises(ValueError, match="eta >= 0"):
        kind(eta)


def test_fisher_has_the_radius_in_the_norm_of_its_gradient():
    g = draw(1)
    eps = Fisher(2.0)(draw(), g, 0.3)
    length = sum(float((e.square() * (1 + 2.0 * g[k].square())).sum()) for k, e in eps.items()) ** 0.5
    assert length == pytest.approx(0.3, rel=1e-12)


def test_adaptive_tells_own_names_only():
    adapts = Adaptive()._adapts
    assert adapts("weights.0.weight")
    assert adapts("weight")
    assert not adapts("weight_net.bias")
