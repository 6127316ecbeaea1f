"""Sharpness and congruence against closed forms, an exact oracle, and plain recomputations."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from metasam import checkpoint, noise, tree
from metasam.diagnostics import (
    average_sharpness,
    congruence,
    gradient,
    live_loss,
    mean_loss,
    model_loss,
    moved,
    pairwise,
    weights,
    worst_sharpness,
)
from metasam.meta import SharpMAML
from metasam.optim import SharpnessAware
from metasam.rules import make
from metasam.tasks.streams import Supervised as Data
from metasam.training import assemble, metrics, plots
from metasam.training.budget import Budget
from metasam.training.diagnose import Diagnostics
from metasam.training.few_shot import FewShot
from metasam.training.supervised import Supervised
from metasam.training.trainer import MAY_CHANGE, Trainer
from metasam.types import Task


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic(n=6, *, slope=1.0, seed=0, definite=False):
    """``g.d + d.Hd/2`` around a point that is not the origin, split over two tensors."""
    a = draw(n, n, seed=seed)
    h = a @ a.T if definite else a + a.T
    g, point = slope * draw(n, seed=seed + 1), draw(n, seed=seed + 2)

    def loss(params):
        d = torch.cat([params["u"].flatten(), params["v"]]) - point
        return 0.3 + g @ d + d @ h @ d / 2

    return loss, {"u": point[:2].reshape(1, 2).clone(), "v": point[2:].clone()}, g, h


def flat(params):
    return torch.cat([v.flatten() for v in params.values()])


# -- average case --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_average_case_of_a_quadratic_is_half_the_trace(adaptive):
    loss, params, _, h = quadratic()
    c = flat(params).abs() if adaptive else torch.ones(6, dtype=torch.float64)
    exact = 0.1**2 * float((h.diagonal() * c**2).sum()) / 2
    found = average_sharpness(loss, params, 0.1, samples=2000, seed=3, adaptive=adaptive)
    assert abs(found.value - exact) < 3 * found.error
    # what the error should be: the variance of d.Hd/2 is ||diag(c) H diag(c)||_F^2 rho^4 / 2
    spread = 0.1**2 * float((c[:, None] * h * c).norm()) / math.sqrt(2)
    assert found.error == pytest.approx(spread / math.sqrt(2000), rel=0.1)
    assert found.error < 0.1 * abs(exact)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_sample_is_exact_on_a_quadratic(adaptive):
    """Pairs cancel the gradient: what is left is d.Hd/2 of the draws that the key names."""
    loss, params, _, h = quadratic(slope=1e3)
    each = []
    for number in range(5):
        d = 0.01 * flat(noise.normal(params, 7, number)) * (flat(params).abs() if adaptive else 1)
        each.append(float(d @ h @ d / 2))
    found = average_sharpness(loss, params, 0.01, samples=5, seed=7, adaptive=adaptive)
    mean = sum(each) / 5
    assert found.value == pytest.approx(mean, rel=1e-8)
    error = math.sqrt(sum((e - mean) ** 2 for e in each) / 4 / 5)
    assert found.error == pytest.approx(error, rel=1e-8)


def test_pairs_are_worth_their_second_evaluation():
    """At as many evaluations, single draws are far noisier where there is a gradient (here 14 times)."""
    loss, params, *_ = quadratic()
    rho, samples = 0.01, 200
    paired = average_sharpness(loss, params, rho, samples=samples).error
    draws = [tree.scale(noise.normal(params, 1, i), rho) for i in range(2 * samples)]
    single = torch.stack([loss(tree.add(params, d)) - loss(params) for d in draws])
    assert paired < float(single.std()) / math.sqrt(2 * samples) / 10


def test_the_seed_decides():
    loss, params, *_ = quadratic()
    first, again, other = (average_sharpness(loss, params, 0.1, samples=4, seed=s) for s in (1, 1, 2))
    assert first == again != other
    a, b = (worst_sharpness(loss, params, 0.1, seed=1) for _ in range(2))
    assert a.value == b.value
    assert all(torch.equal(v, b.displacement[k]) for k, v in a.displacement.items())


# -- worst case ----------------------------------------------------------------------------------------------------


def trust_region(g, h, rho):
    """The maximum of ``g.d + d.Hd/2`` in a ball: (mu - H) d = g with mu >= max(0, lambda_max), found by bisection."""
    values, vectors = torch.linalg.eigh(h)
    b = vectors.T @ g

    def at(mu):
        return b / (mu - values)

    low = max(0.0, float(values[-1])) + 1e-13
    high = max(0.0, float(values[-1])) + float(g.norm()) / rho + 1.0
    if float(at(low).norm()) > rho:  # on the boundary, and not the hard case
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float(at(middle).norm()) > rho else (low, middle)
        d = at(high)
    elif float(values[-1]) <= 0:
        d = at(0.0)  # concave: the maximum is inside
    else:  # a critical point, or the gradient avoids the top eigenvector: that one fills up the ball
        d = torch.where(values < values[-1] - 1e-9, b / (values[-1] - values + 1e-300), 0.0)
        d[-1] = math.sqrt(rho**2 - float(d.square().sum()))
    return float(b @ d + d @ (values * d) / 2)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("definite", [False, True])
@pytest.mark.parametrize("rho", [0.05, 1.0])
def test_the_worst_case_of_a_quadratic_is_that_of_the_trust_region(slope, definite, rho):
    loss, params, g, h = quadratic(slope=slope, definite=definite)
    exact = trust_region(g, h, rho)
    found = worst_sharpness(loss, params, rho, steps=300, restarts=2)
    assert found.value == pytest.approx(exact, rel=1e-5)
    assert float(flat(found.displacement).norm()) <= rho * (1 + 1e-12)
    assert float(loss(tree.add(params, found.displacement)) - loss(params)) == pytest.approx(found.value, abs=1e-12)
    # the default number of steps
    assert 0.97 * exact <= worst_sharpness(loss, params, rho).value <= exact * (1 + 1e-9)


def test_a_concave_loss_has_its_maximum_inside():
    loss, params, g, h = quadratic(definite=True)
    inside = torch.linalg.solve(h, g)
    found = worst_sharpness(
        lambda p: 2 * (g @ (flat(p) - flat(params))) - loss(p), params, 5 + float(inside.norm()), steps=2000
    )
    assert found.value == pytest.approx(float(g @ inside / 2), rel=1e-4)


def test_the_worst_case_in_the_largest_norm():
    _, params, g, h = quadratic(slope=0.5)
    corners = torch.cartesian_prod(*[torch.tensor([-0.2, 0.2], dtype=torch.float64)] * 6)
    convex = h @ h  # the maximum of a convex function is at a corner
    exact = float((corners @ g + (corners @ convex * corners).sum(1) / 2).max())
    found = worst_sharpness(
        lambda p: (d := flat(p) - flat(params)) @ g + d @ convex @ d / 2, params, 0.2, norm="linf", restarts=8
    )
    assert found.value == pytest.approx(exact, rel=1e-9)
    assert float(flat(found.displacement).abs().max()) <= 0.2


def test_adaptive_is_the_ball_of_relative_displacements():
    loss, params, g, h = quadratic()
    c = flat(params).abs()
    found = worst_sharpness(loss, params, 0.3, steps=300, adaptive=True)
    assert found.value == pytest.approx(trust_region(c * g, c[:, None] * h * c, 0.3), rel=1e-5)
    assert float((flat(found.displacement) / c).norm()) <= 0.3 * (1 + 1e-12)


# -- networks ------------------------------------------------------------------------------------------------------


def network(seed=1, bias=True):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5, bias=bias), nn.Tanh() if bias else nn.ReLU(), nn.Linear(5, 3, bias=bias)
    ).double()


DATA = [(draw(20, 4, seed=5), torch.arange(20) % 3), (draw(7, 4, seed=6), torch.arange(7) % 3)]


def test_small_radii_see_the_gradient_and_the_hessian():
    model = network()
    loss, params = model_loss(model, nn.functional.cross_entropy, DATA[:1]), weights(model)
    keys, sizes = list(params), [v.numel() for v in params.values()]

    def of_vector(w):
        parts = w.split(sizes)
        return loss({k: part.view_as(params[k]) for k, part in zip(keys, parts, strict=True)})

    w = flat(params)
    h, g = torch.autograd.functional.hessian(of_vector, w), flat(gradient(loss, params).grads)
    average = average_sharpness(loss, params, 1e-3, samples=400)
    assert abs(average.value - 1e-6 * float(h.trace()) / 2) < 3 * average.error
    assert average.error < 0.1 * average.value
    u, rho = g / g.norm(), 1e-3
    second = rho * float(g.norm()) + rho**2 * float(u @ h @ u) / 2
    found = worst_sharpness(loss, params, rho, steps=60).value
    # the direction turns towards H u, which is worth ||(H u) off u||^2 rho^3 / (2 ||g||)
    assert second - 1e-12 < found < second + 3 * rho**3 * float((h @ u).norm()) ** 2 / float(g.norm())
    # a critical point: the gradient is taken away, and only the largest eigenvalue is left
    flat_loss = worst_sharpness(lambda p: loss(p) - g @ (flat(p) - w), params, rho, steps=300, restarts=3).value
    assert flat_loss == pytest.approx(rho**2 * float(torch.linalg.eigvalsh(h)[-1]) / 2, rel=0.02)


def test_adaptive_sharpness_is_the_same_after_rescaling():
    one, other = network(bias=False), network(bias=False)
    with torch.no_grad():
        other[0].weight *= 8
        other[2].weight /= 8
    measures = {
        adaptive: [
            (average_sharpness(loss, weights(m), 0.05, samples=5, adaptive=adaptive).value,
             worst_sharpness(loss, weights(m), 0.5, adaptive=adaptive).value)
            for m in (one, other)
            for loss in [model_loss(m, nn.functional.cross_entropy, DATA)]
        ]
        for adaptive in (True, False)
    }  # fmt: skip
    assert measures[True][1] == pytest.approx(measures[True][0], rel=1e-10)
    assert measures[False][1] != pytest.approx(measures[False][0], rel=0.2)


def test_nothing_of_the_model_changes():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3), nn.BatchNorm1d(3)
    ).double()
    model[1].eval()
    model(DATA[0][0])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    generator = torch.get_rng_state()
    found = {}
    for policy in ("frozen", "batch"):
        loss = model_loss(model, nn.functional.cross_entropy, DATA, batchnorm=policy)
        average_sharpness(loss, weights(model), 0.1, samples=2)
        worst_sharpness(loss, weights(model), 0.1, steps=2)
        found[policy] = float(loss(weights(model)))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    # and the losses are what the policies say
    total = {"frozen": 0.0, "batch": 0.0}
    for policy in total:
        model.eval()
        for m in (model[1], model[5]):
            m.train(policy == "batch")
        for x, y in DATA:
            total[policy] += float(nn.functional.cross_entropy(model(x), y, reduction="sum").detach()) / 27
    assert found == pytest.approx(total)
    assert abs(total["frozen"] - total["batch"]) > 1e-3


def test_a_mean_of_batches_has_the_gradient_of_the_mean():
    model = network()
    params = weights(model)
    many = model_loss(model, nn.functional.cross_entropy, DATA)
    whole = model_loss(model, nn.functional.cross_entropy, [tuple(map(torch.cat, zip(*DATA, strict=True)))])
    a, b = gradient(many, params), gradient(whole, params)
    assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
    for k, g in b.grads.items():
        torch.testing.assert_close(a.grads[k], g, rtol=1e-10, atol=1e-14)
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    (3 * many(leaves)).backward()  # an outer factor reaches the gradients
    torch.testing.assert_close(leaves["0.weight"].grad, 3 * b.grads["0.weight"], rtol=1e-10, atol=1e-14)
    with pytest.raises(RuntimeError, match="differentiated once, got create_graph=True"):
        torch.autograd.grad(many(leaves), leaves["0.weight"], create_graph=True)


def test_graphs_are_held_one_at_a_time():
    alive, most = set(), []

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive.add(id(ctx))
            most.append(len(alive))
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            alive.discard(id(ctx))
            return g

    loss = mean_loss([lambda p: Held.apply(p["w"]).square().sum()] * 5)
    gradient(loss, {"w": torch.ones(2)})
    assert (len(most), max(most)) == (5, 1)


def test_frozen_parameters_stay_those_of_the_model():
    model = network()
    model[0].requires_grad_(False)
    params = weights(model)
    assert set(params) == {"2.weight", "2.bias"}
    loss = model_loss(model, nn.functional.cross_entropy, DATA[:1])
    moved_there = tree.add(params, {k: torch.ones_like(v) for k, v in params.items()}, 0.1)
    x, y = DATA[0]
    expected = nn.functional.cross_entropy(functional_call(model, moved_there, (x,)), y)
    assert float(loss(moved_there)) == float(expected.detach())


def test_a_loss_is_that_of_the_modules_which_the_model_has_when_it_is_called():
    model = network()
    loss = model_loss(model, nn.functional.cross_entropy, DATA[:1])
    before = float(loss(weights(model)))
    model[0] = copy.deepcopy(model[0])
    params = {k: 2 * v for k, v in weights(model).items()}
    wanted = float(model_loss(model, nn.functional.cross_entropy, DATA[:1])(params))
    assert float(loss(params)) == wanted != before


# -- live weights --------------------------------------------------------------------------------------------------


def test_a_closure_on_live_weights_is_the_function():
    model = network()
    x, y = DATA[0]
    live = dict(model.named_parameters())
    loss = live_loss(live, lambda: nn.functional.cross_entropy(model(x), y))
    plain = model_loss(model, nn.functional.cross_entropy, DATA[:1])
    params = {k: v + 0.1 for k, v in weights(model).items()}
    before = {k: v.detach().clone() for k, v in live.items()}
    a, b = gradient(loss, params), gradient(plain, params)
    assert float(a.loss) == float(b.loss)
    assert all(torch.equal(a.grads[k], g) for k, g in b.grads.items())
    assert average_sharpness(loss, params, 0.1, samples=3) == average_sharpness(plain, params, 0.1, samples=3)
    assert worst_sharpness(loss, params, 0.1).value == worst_sharpness(plain, params, 0.1).value
    assert all(torch.equal(v, before[k]) and v.grad is None for k, v in live.items())


def test_live_weights_come_back_after_an_exception():
    model = network()
    live = dict(model.named_parameters())
    with torch.no_grad():
        model[0].weight[0, 0] = -0.0
        model[0].weight[0, 1] = math.nan
    before = {k: v.detach().clone() for k, v in live.items()}

    def fails():
        assert torch.equal(model[2].bias, torch.ones_like(model[2].bias))
        raise KeyError("inside")

    there = {k: torch.ones_like(v) for k, v in live.items()}
    with pytest.raises(KeyError, match="inside"):
        live_loss(live, fails)(there)
    with pytest.raises(KeyError, match="inside"), moved(live, there):
        fails()
    for k, v in live.items():
        assert torch.equal(v.detach().view(torch.int64), before[k].view(torch.int64))


# -- congruence ----------------------------------------------------------------------------------------------------


def test_congruence_is_the_inner_product_of_vectors():
    a, b = ({"u": draw(2, 3, seed=s), "v": draw(4, seed=s + 1)} for s in (1, 3))
    found = congruence(a, b)
    assert found.dot == pytest.approx(float(flat(a) @ flat(b)), rel=1e-12)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(flat(a), flat(b), dim=0)), rel=1e-12)
    del b["v"]  # a zero: it shortens b, and not a
    part = congruence(a, b)
    assert part.dot == pytest.approx(float((a["u"] * b["u"]).sum()))
    assert part.cosine == pytest.approx(part.dot / float(flat(a).norm()) / float(b["u"].norm()))


def test_pairwise_congruence():
    model = network()
    losses = [model_loss(model, nn.functional.cross_entropy, [batch]) for batch in DATA]
    losses.append(lambda p: -3 * losses[0](p))
    found = pairwise(losses, weights(model))
    grads = [gradient(loss, weights(model)).grads for loss in losses]
    for i, a in enumerate(grads):
        for j, b in enumerate(grads):
            expected = congruence(a, b)
            assert (float(found.dot[i, j]), float(found.cosine[i, j])) == pytest.approx(expected)
    assert float(found.cosine[0, 2]) == pytest.approx(-1)
    assert float(found.dot[0, 2]) == pytest.approx(-3 * float(found.dot[0, 0]))


# -- what is not a number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_hidden(bad):
    params = {"w": torch.ones(3, dtype=torch.float64)}

    def loss(p):  # fine within 0.5
        return p["w"].sum() if float((p["w"].detach() - 1).norm()) < 0.5 else p["w"].sum() * bad

    assert worst_sharpness(loss, params, 0.4).value == pytest.approx(0.4 * math.sqrt(3))
    worst = worst_sharpness(loss, params, 0.6)
    assert not math.isfinite(worst.value)
    assert float(flat(worst.displacement).norm()) >= 0.5
    average = average_sharpness(loss, params, 1.0, samples=20)
    assert not math.isfinite(average.value)
    assert math.isnan(average.error)
    everywhere = worst_sharpness(lambda p: p["w"].sum() * math.nan, params, 0.1)
    assert math.isnan(everywhere.value)
    assert math.isnan(congruence({"w": torch.tensor([math.nan])}, {"w": torch.ones(1)}).cosine)
    assert math.isnan(congruence({"w": torch.zeros(1)}, {"w": torch.ones(1)}).cosine)


def test_a_loss_that_ignores_its_parameters_is_flat():
    params = {"w": torch.ones(3)}
    assert worst_sharpness(lambda p: torch.tensor(2.0), params, 0.1).value == 0
    assert average_sharpness(lambda p: p["w"].sum() * 0, params, 0.1, samples=2) == (0, 0)
    assert worst_sharpness(lambda p: p["w"].sum(), {"w": torch.zeros(3)}, 0.1, adaptive=True).value == 0


def test_errors_say_what_was_expected():
    params = {"w": torch.ones(3)}

    def loss(p):
        return p["w"].sum()

    for call, words in [
        (lambda: average_sharpness(loss, params, math.inf), "finite rho"),
        (lambda: worst_sharpness(loss, params, -0.1), "finite rho of at least 0, got rho=-0.1"),
        (lambda: average_sharpness(loss, params, 0.1, samples=1), "at least 2 samples"),
        (lambda: worst_sharpness(loss, params, 0.1, norm="l1"), "l2, linf, got 'l1'"),
        (lambda: worst_sharpness(loss, params, 0.1, steps=0), "steps >= 1"),
        (lambda: gradient(lambda p: p["w"], params), r"0-dim tensor, got shape \(3,\)"),
        (lambda: mean_loss([]), "at least one loss"),
        (lambda: pairwise([], params), "at least one loss"),
        (lambda: model_loss(network(), loss, DATA, batchnorm="per_step"), "'frozen' or 'batch'"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# -- in training ---------------------------------------------------------------------------------------------------

ON = Diagnostics(congruence=True, sharpness=True, rho=0.1, samples=2, tasks=3)


class Blobs:
    """Three-way few-shot classification of points around task-specific means."""

    output_size, input_shape, classification = 3, (2,), True

    def batch(self, split, tasks):
        return Task.stack([self._task(split, i) for i in tasks])

    def _task(self, split, i):
        generator = torch.Generator().manual_seed(1000 * len(split) + i)
        means, y = torch.randn(3, 2, generator=generator), torch.arange(3).repeat(4)
        x = means[y] + 0.3 * torch.randn(12, 2, generator=generator)
        return Task((x[:3], y[:3]), (x[3:], y[3:]))

    def size(self, split):
        return 5 if split == "test" else None

    def describe(self):
        return {"name": "blobs"}


def few_shot(*, batchnorm="batch", engine="auto", dropout=0.0, rule="sam", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    maml = SharpMAML(
        model, nn.functional.cross_entropy, inner_lr=0.1, inner_steps=2, variant="both", rule=rule,
        engine=engine, batchnorm=batchnorm, **options,
    )  # fmt: skip
    return FewShot(maml, Blobs(), torch.optim.Adam(model.parameters(), 0.01), 4, 8, 40)


def supervised(*, rule="agnostic", dropout=0.3, **_):
    generator = torch.Generator().manual_seed(7)
    means = torch.randn(3, 5, generator=generator)

    def some(n):
        y = torch.arange(n) % 3
        return means[y] + torch.randn(n, 5, generator=generator), y

    data = Data(some(60), some(130), some(33), batch_size=8)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Supervised(model, nn.functional.cross_entropy, SharpnessAware(base, make(rule), model=model), data)


def train(learner, folder, asked, *, resume=False):
    options = {"evaluate_every": 5, "quiet": True, "checkpoint_seconds": 0.0, "diagnostics": asked}
    return Trainer(learner, folder, Budget(12), **options).fit(resume=resume)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def without(entry, *keys):
    return {k: v for k, v in entry.items() if k not in ("seconds", "peak_memory_mb", *keys)}


LEARNERS = {
    "vmap": few_shot,
    "higher": lambda: few_shot(engine="higher", dropout=0.3),
    "per_step": lambda: few_shot(batchnorm="per_step"),
    "frozen": lambda: few_shot(batchnorm="frozen", inner_params=["4.*"], first_order=True),
    "noisy": lambda: few_shot(rule="vasso", reuse_inner_eps=True),
    "agnostic": supervised,
    "looksam": lambda: supervised(rule="looksam"),
}


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "learning_curve", lambda *_: False)


@pytest.mark.parametrize("name", LEARNERS)
def test_training_is_the_same_to_the_bit_with_diagnostics(name, tmp_path, no_pictures):
    found = {}
    for asked in (Diagnostics(), ON):
        folder = tmp_path / str(asked.sharpness)
        found[asked.sharpness] = train(LEARNERS[name](), folder, asked)
    for file in ("checkpoint.pt", "best.pt"):
        off, on = (checkpoint.load(tmp_path / str(asked) / file) for asked in (False, True))
        assert equal(without(on), without(off))
    assert without(found[True], "sharpness") == without(found[False])
    off, on = (metrics.read(tmp_path / str(asked)) for asked in (False, True))
    assert [without(e, "congruence", "congruence_dot") for e in on] == [without(e) for e in off]
    assert [e["iteration"] for e in on if "congruence" in e] == [5, 10, 12]
    for line in on:
        assert -1 <= line.get("congruence", 0) <= 1
        assert ("congruence_dot" in line) == ("congruence" in line)
    values = found[True]["sharpness"]
    assert values["worst"] > abs(values["average"]) > 0
    assert values["average_error"] > 0
    json.loads((tmp_path / "True" / "results.json").read_text())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["per_step", "agnostic"])
def test_a_continued_run_measures_the_same(name, tmp_path, no_pictures):
    whole = train(LEARNERS[name](), tmp_path / "whole", ON)
    mortal = LEARNERS[name]()
    step = mortal.step

    def dying(number):
        if number == 7:
            raise Killed
        return step(number)

    mortal.step = dying
    with pytest.raises(Killed):
        train(mortal, tmp_path / "cut", ON)
    cut = train(LEARNERS[name](), tmp_path / "cut", ON, resume=True)
    assert without(whole) == without(cut)
    a, b = ([without(e) for e in metrics.read(tmp_path / n)] for n in ("whole", "cut"))
    assert a == b
    assert sum("congruence" in e for e in a) == 3


def test_no_diagnostics_call_nothing(tmp_path, no_pictures, monkeypatch):
    for name in ("congruence", "sharpness"):
        monkeypatch.setattr(FewShot, name, None)
    assert "sharpness" not in train(few_shot(), tmp_path, Diagnostics())


@pytest.mark.parametrize("engine", ["vmap", "higher"])
def test_congruence_is_that_of_two_meta_gradients(engine):
    one = few_shot(engine=engine, dropout=0.3)
    one.step(0)
    before = one.gradient_evaluations, one.counts
    found = one.congruence(6)
    assert (one.gradient_evaluations, one.counts) == before
    assert one.maml.model.training
    one.maml.model.eval()  # no dropout; norms take their batch in either mode
    grads = []
    for split in ("train", "validation"):
        loss = one.maml.meta_loss(one.family.batch(split, range(6)))
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(one.maml.model.parameters()))]))
    assert found["congruence_dot"] == pytest.approx(float(grads[0] @ grads[1]), rel=1e-4)
    assert found["congruence"] == pytest.approx(float(torch.cosine_similarity(*grads, dim=0)), rel=1e-4)
    assert 0.01 < abs(found["congruence"]) < 0.999


def test_sharpness_is_that_of_the_meta_loss_and_of_adapted_tasks():
    one = few_shot()
    one.step(0)
    found = one.sharpness("test", rho=0.1, samples=3, tasks=6)
    maml, batch = one.maml, one.family.batch("train", range(6))
    params = weights(maml.model)
    entries = sum(v.numel() for v in params.values())
    assert (found["rho"], found["average_rho"], found["over"]) == (0.1, 0.1 / math.sqrt(entries), "6 training tasks")

    def at(d):
        copy_ = copy.deepcopy(maml)
        with torch.no_grad():
            for k, p in copy_.model.named_parameters():
                p += d[k]
        return float(copy_.meta_loss(batch).detach())

    rises = []
    for number in range(3):
        d = tree.scale(noise.normal(params, 0, number), 0.1 / math.sqrt(entries))
        rises.append((at(d) + at(tree.scale(d, -1.0))) / 2 - at(tree.scale(d, 0.0)))
    assert found["average"] == pytest.approx(sum(rises) / 3, abs=1e-6)
    assert found["average_error"] == pytest.approx(float(torch.tensor(rises).std()) / math.sqrt(3), abs=1e-6)
    grads = torch.autograd.grad(maml.meta_loss(batch), list(maml.model.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
    climb = {k: 0.1 * g / norm for k, g in zip(params, grads, strict=True)}
    sam = at(climb) - at(tree.scale(climb, 0.0))  # the first step
    assert sam - 1e-5 < found["worst"] < 2 * sam
    # adapted tasks: the test split has 5
    assert found["adapted"]["over"] == "5 test tasks"
    for side in ("support", "query"):
        each = []
        for task in one.family.batch("test", range(5)).unbind():
            adapted = maml.adapt(task)
            loss = model_loss(adapted, nn.functional.cross_entropy, [getattr(task, side)])
            each.append(worst_sharpness(loss, weights(adapted), 0.1).value)
        each = torch.tensor(each)
        assert found["adapted"][side]["worst"] == pytest.approx(float(each.mean()), rel=1e-5)
        assert found["adapted"][side]["worst_ci95"] == pytest.approx(1.96 * float(each.std()) / math.sqrt(5), rel=1e-4)
        assert found["adapted"][side]["average"] > 0


def test_supervised_diagnostics_are_of_fixed_examples():
    one = supervised()
    one.step(0)
    grads = []
    one.model.eval()
    for split in ("train", "validation"):
        order = torch.randperm(one.data.size(split), generator=torch.Generator().manual_seed(0))
        rows = order[:48].sort().values
        x, y = next(one.data.examples(split))
        loss = nn.functional.cross_entropy(one.model(x[rows]), y[rows])
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(one.model.parameters()))]))
        assert len(set(y[rows].tolist())) == 3
    one.model.train()
    found = one.congruence(6)
    assert one.model.training
    assert found["congruence_dot"] == pytest.approx(float(grads[0] @ grads[1]), rel=1e-4)
    assert found["congruence"] == pytest.approx(float(torch.cosine_similarity(*grads, dim=0)), rel=1e-4)
    assert 0.1 < found["congruence"] < 0.999
    sharp = one.sharpness("test", rho=0.2, samples=4, tasks=100)
    assert sharp["over"] == "60 training examples"
    loss = model_loss(one.model, nn.functional.cross_entropy, [next(one.data.examples("train"))])
    params = weights(one.model)
    expected = average_sharpness(loss, params, sharp["average_rho"], samples=4)
    assert (sharp["average"], sharp["average_error"]) == pytest.approx(expected, abs=1e-6)
    assert sharp["worst"] == pytest.approx(worst_sharpness(loss, params, 0.2).value, rel=1e-3)


def test_without_validation_data_there_is_no_congruence(monkeypatch):
    one = few_shot()
    monkeypatch.setattr(one.family, "size", lambda split: 0 if split == "validation" else None, raising=False)
    assert one.congruence(2) == {}


def test_a_restore_after_an_exception_inside_a_diagnostic(monkeypatch):
    one = few_shot(batchnorm="per_step")
    one.step(0)
    before = {k: v.clone() for k, v in one.maml.model.state_dict().items()}
    statistics = {k: v.clone() for k, v in one.maml.loop.per_step.buffers.items()}
    counts, calls, meta_loss = one.counts, iter(range(5)), one.maml.meta_loss

    def failing(tasks):
        loss = meta_loss(tasks)
        if next(calls, None) is None:
            raise KeyError("inside")
        return loss

    monkeypatch.setattr(one.maml, "meta_loss", failing)
    with pytest.raises(KeyError, match="inside"):
        one.sharpness("test", rho=0.1, samples=5, tasks=4)
    assert all(torch.equal(v, before[k]) for k, v in one.maml.model.state_dict().items())
    assert all(torch.equal(v, statistics[k]) for k, v in one.maml.loop.per_step.buffers.items())
    assert one.counts == counts
    assert one.maml.model.training


@pytest.mark.parametrize(
    ("key", "value"), [("congruence", 1), ("sharpness", "yes"), ("rho", 0), ("samples", 1), ("tasks", 1.5)]
)
def test_keys_are_checked(key, value):
    with pytest.raises(ValueError, match=rf"expected diagnostics\.{key} to be"):
        assemble.check({"diagnostics": {key: value}})


def test_the_config_lists_every_key():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((Path(assemble.__file__).parents[2] / "configs" / "train.yaml").read_text())
    assert Diagnostics(**config["diagnostics"]) == Diagnostics()
    assert {f"diagnostics.{f.name}" for f in dataclasses.fields(Diagnostics)} <= set(MAY_CHANGE)
    assert {f"diagnostics.{k}" for k in config["diagnostics"]} <= set(assemble._RANGES)


def test_batches_stay_as_they_are_whatever_a_model_and_a_loss_write_to():
    class Rude(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(0.5))

    model = Rude(3, 2).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    wanted = torch.nn.functional.mse_loss(torch.nn.functional.linear(x - 0.5, model.weight, model.bias), y + 1.0)
    found = model_loss(model, lambda o, t: torch.nn.functional.mse_loss(o, t.add_(1.0)), [(x, y)])
    for _ in range(2):
        assert float(found(weights(model))) == pytest.approx(float(wanted.detach()), rel=1e-12)
