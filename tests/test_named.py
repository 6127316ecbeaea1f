"""The named optimizers: trajectories against their equations, limits, cases worked by hand, what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from metasam import (
    ESAM,
    GSAM,
    RWP,
    SAM,
    WSAM,
    AgnosticSAM,
    FisherSAM,
    FriendlySAM,
    LookbehindSAM,
    LookSAM,
    MomentumSAM,
    MultiStepSAM,
    RandomSAM,
    SparseSAM,
    VaSSO,
    noise,
    rules,
    tree,
)

from . import references
from .cases import CONV, MLP, Problem, assert_same, closure_of, closures_of, distance, params_of

SGD, ADAM = torch.optim.SGD, torch.optim.Adam

# name: the optimizer, and the transcription of its equations
METHODS = {
    "multistep": (
        partial(MultiStepSAM, rho=0.2, steps=3),
        partial(references.multistep, rho=0.2, steps=3),
    ),
    "multistep-projected": (
        partial(MultiStepSAM, rho=0.2, steps=3, step_size=0.6),
        partial(references.multistep, rho=0.2, steps=3, step_size=0.6),
    ),
    "fisher": (partial(FisherSAM, rho=0.2, eta=5.0), partial(references.fisher, rho=0.2, eta=5.0)),
    "lookbehind": (
        partial(LookbehindSAM, rho=0.2, steps=3, keep=0.4),
        partial(references.lookbehind, rho=0.2, steps=3, alpha=0.4),
    ),
    "lookbehind-adaptive": (
        partial(LookbehindSAM, rho=0.2, steps=3, keep=None),
        partial(references.lookbehind, rho=0.2, steps=3),
    ),
    "looksam-1": (
        partial(LookSAM, rho=0.2, every=1, reuse=0.7),
        partial(references.looksam, rho=0.2, k=1, alpha=0.7),
    ),
    "looksam-3": (
        partial(LookSAM, rho=0.2, every=3, reuse=0.7),
        partial(references.looksam, rho=0.2, k=3, alpha=0.7),
    ),
    "gsam": (partial(GSAM, rho=0.2, gap=0.4), partial(references.gsam, rho=0.2, alpha=0.4)),
    "friendly": (
        partial(FriendlySAM, rho=0.2, sigma=0.8, decay=0.7),
        partial(references.friendly, rho=0.2, sigma=0.8, lam=0.7),
    ),
    "vasso": (partial(VaSSO, rho=0.2, theta=0.3), partial(references.vasso, rho=0.2, theta=0.3)),
    "momentum": (partial(MomentumSAM, rho=0.2), partial(references.momentum_sam, rho=0.2)),
    "wsam": (partial(WSAM, rho=0.2, gamma=0.8), partial(references.wsam, rho=0.2, gamma=0.8, decouple=True)),
    "wsam-coupled": (
        partial(WSAM, rho=0.2, gamma=0.8, decouple=False),
        partial(references.wsam, rho=0.2, gamma=0.8, decouple=False),
    ),
    "agnostic": (
        partial(AgnosticSAM, rho_train=0.2, rho_val=0.1),
        partial(references.agnostic, rho_1=0.2, rho_2=0.1),
    ),
    "agnostic-printed": (
        partial(AgnosticSAM, rho_train=0.2, rho_val=0.1, lookahead=False),
        partial(references.agnostic, rho_1=0.2, rho_2=0.1, lookahead=False),
    ),
    "agnostic-momentum": (
        partial(AgnosticSAM, rho_train=0.2, rho_val=0.1, val_momentum=0.6),
        partial(references.agnostic, rho_1=0.2, rho_2=0.1, beta=0.6),
    ),
    "random": (
        partial(RandomSAM, rho=0.2, sigma=0.2, pull=0.8, noise_seed=3),
        partial(references.random_sam, rho=0.2, sigma=0.2, lam=0.8, seed=3),
    ),
    "rwp": (
        partial(RWP, rho=0.1, mix=0.7, noise_seed=3),
        partial(references.rwp, rho=0.1, alpha=0.7, seed=3),
    ),
    "rwp-val": (
        partial(RWP, rho=0.1, mix=0.7, second="val", noise_seed=3),
        partial(references.rwp, rho=0.1, alpha=0.7, second="val", seed=3),
    ),
    "esam": (
        partial(ESAM, rho=0.2, keep=0.5, select=1.0, noise_seed=3),
        partial(references.esam, rho=0.2, beta=0.5, seed=3),
    ),
    "sparse": (
        partial(SparseSAM, rho=0.2, sparsity=0.6, refresh=3, samples=0),
        partial(references.sparse, rho=0.2, sparsity=0.6, refresh=3),
    ),
    "sparse-dynamic": (
        partial(SparseSAM, rho=0.2, sparsity=0.6, criterion="dynamic", refresh=2, drop=0.7, horizon=15, noise_seed=3),
        partial(references.sparse_dynamic, rho=0.2, sparsity=0.6, refresh=2, drop=0.7, horizon=15, seed=3),
    ),
}
BASES = {
    "sgd": (partial(SGD, lr=0.1), 0.1, lambda: {}),
    "momentum": (partial(SGD, lr=0.1, momentum=0.8), 0.1, lambda: {"u": references.heavy_ball(0.8)}),
    "adam": (partial(ADAM, lr=0.02), 0.02, lambda: {"u": references.adam()}),
}


def of_file(make, base, model, optimizer):
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, memory = torch.load(file, weights_only=True)
    twin = MLP.model(seed=9)
    twin.load_state_dict(weights)
    other = make(base(twin.parameters()), model=twin)
    other.load_state_dict(memory)
    return twin, other


def of_copy(make, base, model, optimizer):
    return copy.deepcopy((model, optimizer))


def of_pickle(make, base, model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


WAYS = {"sgd": of_file, "momentum": of_copy, "adam": of_pickle}


def batches_of(step):
    """Another training and validation batch at every step, so that what is remembered matters."""
    return MLP.batch(seed=step), MLP.batch(seed=100 + step)


@pytest.mark.parametrize(("method", "base"), [(m, b) for m in METHODS for b in BASES if (m, b) != ("momentum", "sgd")])
def test_twenty_steps_are_those_of_the_equations_also_when_resumed_half_way(method, base):
    (make, reference), (kind, lr, remember) = METHODS[method], BASES[base]
    model = MLP.model()
    optimizer = make(kind(model.parameters()), model=model)
    w, memory = params_of(model), remember()
    for t in range(20):
        batch, val = batches_of(t)
        w = reference(references.gradient_of(model, MLP.loss_fn, *batch, val=val), w, lr, memory)
        optimizer.step(**closures_of(MLP, model, batch, val=val))
        if t == 10:  # eleven steps: for LookSAM, two into a cycle of three
            model, optimizer = WAYS[base](make, kind, model, optimizer)
    assert distance(params_of(model), w) < 1e-12
    for slot, value in optimizer.rule_state.items():
        if isinstance(value, dict):
            assert distance(value, memory[slot]) < 1e-12
        else:
            assert value == 20
    if optimizer.rule_state and method != "momentum":
        assert optimizer.rule_state.keys() == memory.keys() - {"u", "v", "s", "t"}


def test_the_equations_tell_the_methods_apart():
    found = {}
    for name, (_, reference) in METHODS.items():
        w, memory = params_of(MLP.model()), {"u": references.heavy_ball(0.8)}
        for t in range(5):
            batch, val = batches_of(t)
            w = reference(references.gradient_of(MLP.model(), MLP.loss_fn, *batch, val=val), w, 0.1, memory)
        found[name] = w
    names = list(found)
    same = [(a, b) for i, a in enumerate(names) for b in names[:i] if distance(found[a], found[b]) < 1e-4]
    assert not same


# limits


def run(make, base, dtype=torch.float64, steps=7, problem=CONV):
    model = problem.model(dtype)
    optimizer = make(base(model.parameters()), model=model)
    for t in range(steps):
        val = problem.batch(dtype, seed=100 + t)
        optimizer.step(**closures_of(problem, model, problem.batch(dtype, seed=t), val=val))
    return params_of(model)


MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
each_base = pytest.mark.parametrize("base", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])


@each_base
@pytest.mark.parametrize(
    "make",
    [
        partial(LookSAM, every=1),
        partial(GSAM, gap=0.0),
        partial(WSAM, gamma=0.5, decouple=False),
        partial(FriendlySAM, sigma=0.0),
        partial(VaSSO, theta=1.0),
    ],
    ids=lambda m: m.func.__name__,
)
def test_in_the_limit_it_is_sam_to_the_last_bit(make, base):
    wanted = run(partial(SAM, rho=0.2), base, torch.float32)
    assert_same(run(partial(make, rho=0.2), base, torch.float32), wanted)
    assert_same(run(partial(make, rho=0.2), base), run(partial(SAM, rho=0.2), base))


@each_base
@pytest.mark.parametrize("lookahead", [True, False])
def test_agnostic_without_a_validation_radius_is_sam_to_the_last_bit(lookahead, base):
    found = run(partial(AgnosticSAM, rho_train=0.2, rho_val=0.0, lookahead=lookahead), base)
    assert_same(found, run(partial(SAM, rho=0.2), base))


@each_base
@pytest.mark.parametrize(
    "make",
    [
        partial(FisherSAM, eta=0.0),
        partial(MultiStepSAM, steps=1, step_size=1.0),
        partial(MultiStepSAM, steps=1, step_size=3.0),
        partial(MultiStepSAM, steps=1),
        partial(LookbehindSAM, steps=1, keep=1.0),
        partial(LookbehindSAM, steps=1, keep=None),
    ],
    ids=str,
)
def test_in_the_limit_it_is_sam_up_to_rounding(make, base):
    # a bias before BatchNorm has no gradient but rounding, which AdamW normalises: hence the MLP
    assert distance(run(partial(make, rho=0.2), base, problem=MLP), run(partial(SAM, rho=0.2), base, problem=MLP)) < (
        1e-14 if base is MOMENTUM else 1e-12
    )


@each_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        partial(MultiStepSAM, rho=0.0),
        partial(FisherSAM, rho=0.0),
        partial(LookSAM, rho=0.0, every=3),
        partial(GSAM, rho=0.0),
        partial(FriendlySAM, rho=0.0),
        partial(VaSSO, rho=0.0),
        partial(MomentumSAM, rho=0.0),
        partial(WSAM, rho=0.0),
        partial(WSAM, rho=0.0, decouple=False),
        partial(AgnosticSAM, rho_train=0.0, rho_val=0.0, val_momentum=0.5),
        partial(RandomSAM, rho=0.0),
        partial(RWP, rho=0.0),
        partial(ESAM, rho=0.0, select=1.0),
        partial(SparseSAM, rho=0.0, samples=0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:adding to bfloat16 weights")  # the noise of R-SAM is below their rounding
def test_without_a_radius_it_is_the_base_to_the_last_bit(make, dtype, base):
    # LookSAM: g_v is what rounding leaves of g_s - g, and normalising that would add 0.7 ||g|| in its direction
    model = MLP.model(dtype)
    optimizer = base(model.parameters())
    for t in range(7):
        optimizer.step(closure_of(MLP, model, MLP.batch(dtype, seed=t)))
    assert_same(run(make, base, dtype, problem=MLP), params_of(model))


def test_looksam_does_not_follow_what_rounding_leaves_of_its_direction():
    # wide enough in float32 that (g . g_s)/||g||^2 is 1 only up to rounding: normalised, that would be 0.7 ||g||
    wide = Problem("wide", lambda: nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 1)), (30,))
    found = run(partial(LookSAM, rho=0.0, every=3), MOMENTUM, torch.float32, problem=wide)
    assert_same(found, run(partial(SAM, rho=0.0), MOMENTUM, torch.float32, problem=wide))


# by hand: L = (a u^2 + b v^2)/2, gradient (a u, b v); unless said otherwise a = 1, b = 2, w = (3, 2), so that
# g = (3, 4), ||g|| = 5, and a radius of 5 gives eps = (3, 4), w + eps = (6, 6), g_p = (6, 12); one step of SAM with
# lr = 0.1 arrives at (3 - 0.6, 2 - 1.2) = (2.4, 0.8)


class Bowl(nn.Module):
    def __init__(self, start=(3.0, 2.0), curvature=(1.0, 2.0), joint=False):
        super().__init__()
        start = torch.tensor(start, dtype=torch.float64)
        if joint:
            self.w = nn.Parameter(start)
        else:
            self.u, self.v = nn.Parameter(start[0].clone()), nn.Parameter(start[1].clone())
        self.curvature = torch.tensor(curvature, dtype=torch.float64)

    def at(self):
        return self.w if hasattr(self, "w") else torch.stack([self.u, self.v])

    def loss(self):
        loss = 0.5 * (self.curvature * self.at().square()).sum()
        loss.backward()
        return loss

    def val(self):
        """Of Agnostic-SAM: ``(u^2 + 4 (v - 1)^2)/2``, gradient (u, 4 (v - 1)), at (3, 2) the same (3, 4)."""
        loss = 0.5 * (self.at()[0].square() + 4 * (self.at()[1] - 1).square())
        loss.backward()
        return loss


def walk(make, bowl, times=1, lr=0.1, base=SGD, **settings):
    optimizer = make(bowl.named_parameters(), base, lr=lr, **settings)
    for _ in range(times):
        optimizer.step(bowl.loss, val=bowl.val)
    return bowl.at().detach(), optimizer.rule_state


def near(found, *wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def slot(state, name):
    return torch.stack([state[name]["u"], state[name]["v"]])


def test_sam_by_hand():
    near(walk(SAM, Bowl(), rho=5)[0], 2.4, 0.8)


def test_gsam_by_hand():
    # g . g_p = 18 + 48 = 66, ||g_p||^2 = 36 + 144 = 180, g_perp = g - 11/30 g_p = (3 - 2.2, 4 - 4.4) = (0.8, -0.4)
    # g_p - 0.5 g_perp = (6 - 0.4, 12 + 0.2) = (5.6, 12.2); (3 - 0.56, 2 - 1.22)
    near(walk(GSAM, Bowl(), rho=5, gap=0.5)[0], 2.44, 0.78)


def test_looksam_by_hand():
    # first step, lr = 1/6: (3, 2) - (6, 12)/6 = (2, 0)
    # g . g_s = 66, ||g||^2 = 25, g_v = (6, 12) - 2.64 (3, 4) = (-1.92, 1.44), ||g_v|| = 2.4
    # second: g = (2, 0), d = g + 0.5 (2/2.4) g_v = (2 - 0.8, 0.6) = (1.2, 0.6); (2 - 0.2, 0 - 0.1)
    w, state = walk(LookSAM, Bowl(), lr=1 / 6, rho=5, every=2, reuse=0.5)
    near(w, 2.0, 0.0)
    near(slot(state, "g_v"), -1.92, 1.44)
    near(walk(LookSAM, Bowl(), times=2, lr=1 / 6, rho=5, every=2, reuse=0.5)[0], 1.8, -0.1)


def test_friendly_sam_by_hand():
    # first step, lr = 1/6: d = g, m = (3, 4), w = (2, 0)
    # second: g = (2, 0), d = g - 0.48 m = (0.56, -1.92), ||d|| = 2, eps = 5 (0.28, -0.96) = (1.4, -4.8)
    # at (3.4, -4.8) the gradient is (3.4, -9.6); (2 - 3.4/6, 0 + 1.6); m = 0.75 (3, 4) + 0.25 (2, 0) = (2.75, 3)
    settings = {"lr": 1 / 6, "rho": 5, "sigma": 0.48, "decay": 0.75}
    near(walk(FriendlySAM, Bowl(), **settings)[0], 2.0, 0.0)
    w, state = walk(FriendlySAM, Bowl(), times=2, **settings)
    near(w, 2 - 3.4 / 6, 1.6)
    near(slot(state, "m"), 2.75, 3.0)


def test_vasso_by_hand():
    # first step, lr = 1/3: d = g, w = (3, 2) - (6, 12)/3 = (1, -2)
    # second: g = (1, -4), d = (3, 4)/2 + (1, -4)/2 = (2, 0), eps = (5, 0)
    # at (6, -2) the gradient is (6, -4); (1 - 2, -2 + 4/3)
    w, state = walk(VaSSO, Bowl(), times=2, lr=1 / 3, rho=5, theta=0.5)
    near(w, -1.0, -2 / 3)
    near(slot(state, "d"), 2.0, 0.0)


def test_wsam_by_hand():
    # gamma = 0.75: a = 3; coupled: 3 (6, 12) - 2 (3, 4) = (12, 28); (3 - 1.2, 2 - 2.8)
    near(walk(WSAM, Bowl(), rho=5, gamma=0.75, decouple=False)[0], 1.8, -0.8)
    # the first step of Adam is lr sign(g): coupled (2.9, 1.9); decoupled that minus 0.1 * 3 * (3, 8) = (0.9, 2.4)
    adam = partial(ADAM, eps=0.0)
    near(walk(WSAM, Bowl(), base=adam, rho=5, gamma=0.75, decouple=False)[0], 2.9, 1.9)
    near(walk(WSAM, Bowl(), base=adam, rho=5, gamma=0.75)[0], 2.0, -0.5)


def test_momentum_sam_by_hand():
    # lr = 0.5, mu = 0.5; first step plain: v = (3, 4), w = (3, 2) - (1.5, 2) = (1.5, 0)
    # second: at w - 5 (0.6, 0.8) = (-1.5, -4) the gradient is (-1.5, -8)
    # v = (1.5, 2) + (-1.5, -8) = (0, -6); (1.5 - 0, 0 + 3)
    near(walk(MomentumSAM, Bowl(), lr=0.5, momentum=0.5, rho=5)[0], 1.5, 0.0)
    near(walk(MomentumSAM, Bowl(), times=2, lr=0.5, momentum=0.5, rho=5)[0], 1.5, 3.0)


# a = 1, b = 4, w = (3, 1): g = (3, 4); rho = 5.5: eps_1 = (3.3, 4.4), at (6.3, 5.4) g_1 = (6.3, 21.6), of length 22.5;
# eps_2 = eps_1 + 5.5 (0.28, 0.96) = (4.84, 9.68), at (7.84, 10.68) g_2 = (7.84, 42.72)
STEEP = partial(Bowl, (3.0, 1.0), (1.0, 4.0))


def test_multistep_by_hand():
    # two steps of 5.5 each in a ball of 11: (3 - 0.784, 1 - 4.272)
    near(walk(MultiStepSAM, STEEP(), rho=11, steps=2)[0], 2.216, -3.272)


def test_projected_multistep_by_hand():
    # two steps of 5.5 in a ball of 5.5, one of which fills it: eps_2 = (4.84, 9.68) = 4.84 (1, 2) goes back to
    # 5.5 (1, 2)/sqrt(5); with s = 5.5/sqrt(5) the gradient is (3 + s, 4 (1 + 2 s))
    s = 5.5 / 5**0.5
    near(walk(MultiStepSAM, STEEP(), rho=5.5, steps=2, step_size=1.0)[0], 3 - 0.1 * (3 + s), 1 - 0.4 * (1 + 2 * s))


def test_lookbehind_by_hand():
    # phi_1 = (3 - 0.63, 1 - 2.16) = (2.37, -1.16); phi_2 = phi_1 - (0.784, 4.272) = (1.586, -5.432)
    # keep 0.5: (3 - 0.707, 1 - 3.216)
    near(walk(LookbehindSAM, STEEP(), rho=5.5, keep=0.5)[0], 2.293, -2.216)
    # adaptive: each scalar went the same way twice, cosine 1, so all of the way
    near(walk(LookbehindSAM, STEEP(), rho=5.5, keep=None)[0], 1.586, -5.432)
    # as one tensor: ways (-0.63, -2.16), of length 2.25, and (-1.414, -6.432), inner product 14.78394
    alpha = (14.78394 / (2.25 * (1.414**2 + 6.432**2) ** 0.5) + 1) / 2
    near(walk(LookbehindSAM, STEEP(joint=True), rho=5.5, keep=None)[0], 3 - 1.414 * alpha, 1 - 6.432 * alpha)


def test_esam_by_hand():
    # both weights kept: rho/1 g/||g||; the seed that keeps u alone moves u twice as far, (3, 0)/0.5, to (9, 2),
    # gradient (9, 4); (3 - 0.9, 2 - 0.4)
    near(walk(ESAM, Bowl(), rho=5, keep=1.0, select=1.0)[0], 2.4, 0.8)
    like = {k: torch.zeros((), dtype=torch.float64) for k in "uv"}
    draws = ((seed, noise.normal(like, seed, 0)) for seed in range(100))
    seed = next(s for s, z in draws if z["u"] < 0 < z["v"])
    near(walk(ESAM, Bowl(), rho=5, keep=0.5, select=1.0, noise_seed=seed)[0], 2.1, 1.6)


def test_sparse_sam_by_hand():
    # of g = (3, 4) the larger square is v's: eps = (0, 4), the norm unmasked; at (3, 6) the gradient is (3, 12)
    w, state = walk(SparseSAM, Bowl(), rho=5, samples=0)
    near(w, 2.7, 0.8)
    near(slot(state, "mask"), 0.0, 1.0)


def test_random_sam_by_hand():
    # without noise SAM; with it and without the gradient, eps = 5 Delta/||Delta||, Delta = sigma (3 z_u, 2 z_v)
    near(walk(RandomSAM, Bowl(), rho=5, sigma=0.0)[0], 2.4, 0.8)
    z = noise.normal({k: torch.zeros((), dtype=torch.float64) for k in "uv"}, 4, 0)
    u, v = 3 * float(z["u"]), 2 * float(z["v"])
    size = (u * u + v * v) ** 0.5
    found = walk(RandomSAM, Bowl(), rho=5, sigma=0.5, pull=0.0, noise_seed=4)[0]
    near(found, 3 - 0.1 * (3 + 5 * u / size), 2 - 0.2 * (2 + 5 * v / size))


def test_rwp_by_hand():
    # at w + 0.5 (3 z_u, 2 z_v) the gradient is (3 + 1.5 z_u, 4 + 2 z_v); a quarter of it, and three of (3, 4)
    z = noise.normal({k: torch.zeros((), dtype=torch.float64) for k in "uv"}, 4, 0)
    found = walk(RWP, Bowl(), rho=0.5, mix=0.25, noise_seed=4)[0]
    near(found, 3 - 0.1 * (3 + 0.375 * float(z["u"])), 2 - 0.1 * (4 + 0.5 * float(z["v"])))


def test_fisher_sam_by_hand():
    # w = (2, 0.25): g = (2, 0.5), f = (4, 0.25), D = (0.2, 0.8), D g = (0.4, 0.4), g . D g = 0.8 + 0.2 = 1
    # rho = 5: eps = (2, 2), at (4, 2.25) the gradient is (4, 4.5); (2 - 0.4, 0.25 - 0.45)
    near(walk(FisherSAM, Bowl((2.0, 0.25)), rho=5, eta=1.0)[0], 1.6, -0.2)


def test_agnostic_sam_by_hand():
    # g_v = (3, 4), w_v = (6.3, 6.4), h_v = (6.3, 21.6), of length 22.5: 5.5 h_v/||h_v|| = (1.54, 5.28)
    # w_t = (3, 2) + (3, 4) - (1.54, 5.28) = (4.46, 0.72), gradient (4.46, 1.44); (3 - 0.446, 2 - 0.144)
    near(walk(AgnosticSAM, Bowl(), rho_train=5, rho_val=5.5)[0], 2.554, 1.856)
    # without look-ahead h_v = g_v, 5.5 (0.6, 0.8) = (3.3, 4.4), w_t = (2.7, 1.6), gradient (2.7, 3.2)
    near(walk(AgnosticSAM, Bowl(), rho_train=5, rho_val=5.5, lookahead=False)[0], 2.73, 1.68)


def test_agnostic_sams_validation_momentum_by_hand():
    # without look-ahead, as above: h_v = (3, 4), w = (2.73, 1.68)
    # then g_v = (2.73, 4 * 0.68) = (2.73, 2.72), h_v = 0.75 (3, 4) + 0.25 (2.73, 2.72) = (2.9325, 3.68)
    settings = {"rho_train": 5, "rho_val": 5.5, "lookahead": False, "val_momentum": 0.75}
    w, state = walk(AgnosticSAM, Bowl(), **settings)
    near(w, 2.73, 1.68)
    near(slot(state, "h_v"), 3.0, 4.0)
    near(slot(walk(AgnosticSAM, Bowl(), times=2, **settings)[1], "h_v"), 2.9325, 3.68)


# what they are called with


def test_agnostic_sam_takes_its_validation_closure_by_place_and_by_either_name():
    found = []
    for how in ("place", "val_closure", "val"):
        model = MLP.model()
        optimizer = AgnosticSAM(model.parameters(), lr=0.1)
        train, val = closures_of(MLP, model).values()
        wanted = MLP.loss_fn(model(MLP.batch()[0]), MLP.batch()[1]).detach()
        loss = optimizer.step(train, val) if how == "place" else optimizer.step(train, **{how: val})
        assert torch.equal(loss, wanted)
        assert not loss.requires_grad
        found.append(params_of(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_agnostic_sam_without_a_closure_names_it():
    model = MLP.model()
    optimizer, home = AgnosticSAM(model.parameters(), lr=0.1), params_of(model)
    with pytest.raises(TypeError, match=r"val_closure"):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
    with pytest.raises(TypeError, match=r"def closure\(\)"):
        optimizer.step(val_closure=closure_of(MLP, model, MLP.batch()))
    assert_same(params_of(model), home)


def test_agnostic_sam_keeps_both_radii_in_the_groups_and_by_group():
    model = MLP.model()
    optimizer = AgnosticSAM(
        [{"params": model[0].parameters(), "rho_train": 0.4}, {"params": model[2].parameters(), "rho_val": 0.3}],
        lr=0.1,
        rho_train=0.2,
        rho_val=0.1,
        model=model,
    )
    assert [(g["rho_train"], g["rho_val"]) for g in optimizer.param_groups] == [(0.4, 0.1), (0.2, 0.3)]
    optimizer.param_groups[0]["rho_val"] = 0.5
    w, (batch, val) = params_of(model), batches_of(0)
    grad = references.gradient_of(MLP.model(), MLP.loss_fn, *batch, val=val)
    rho_1, rho_2 = ({k: r[k[0] == "0"] for k in w} for r in ((0.2, 0.4), (0.3, 0.5)))
    g_v = references.unit(grad(w, "val"))
    h_v = references.unit(grad({k: w[k] + rho_2[k] * g_v[k] for k in w}, "val"))
    g_t = references.unit(grad(w))
    wanted = references.plus(w, grad({k: w[k] + rho_1[k] * g_t[k] - rho_2[k] * h_v[k] for k in w}), -0.1)
    optimizer.step(**closures_of(MLP, model, batch, val=val))
    assert distance(params_of(model), wanted) < 1e-13
    other = AgnosticSAM(MLP.model().parameters(), lr=0.1)
    other.param_groups[0]["rho_val"] = -0.1
    with pytest.raises(ValueError, match="rho_val >= 0"):
        other.step(**closures_of(MLP, MLP.model()))


def test_agnostic_sam_counts_the_training_batch_once_and_no_validation_batch():
    model, other = CONV.model(), CONV.model()
    optimizer = AgnosticSAM(model.parameters(), lr=0.1, model=model)
    other(CONV.batch()[0])
    optimizer.step(**closures_of(CONV, model))
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))


def test_momentum_sam_says_at_the_second_step_that_there_is_no_momentum():
    model = MLP.model()
    optimizer = MomentumSAM(model.parameters(), SGD, lr=0.1)
    optimizer.step(closure_of(MLP, model, MLP.batch()))
    home = params_of(model)
    with pytest.raises(ValueError, match=r"base optimizer with momentum, e\.g\. SGD\(momentum=0\.9\)"):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
    assert_same(params_of(model), home)


def test_momentum_sam_takes_the_momentum_that_a_base_brings_along():
    model = MLP.model()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    base.step(closure_of(MLP, model, MLP.batch()))
    w = params_of(model)
    grad = references.gradient_of(MLP.model(), MLP.loss_fn, *MLP.batch())
    v = {k: base.state[p]["momentum_buffer"].clone() for k, p in model.named_parameters()}
    wanted = references.momentum_sam(grad, w, 0.1, {"v": v, "u": references.heavy_ball(0.9)}, rho=0.3)
    MomentumSAM(base, rho=0.3).step(closure_of(MLP, model, MLP.batch()))
    assert distance(params_of(model), wanted) < 1e-13


@pytest.mark.parametrize("named", [True, False])
def test_momentum_sam_counts_batches_and_returns_a_loss_though_it_never_looks_from_the_weights(named):
    model = CONV.model()
    optimizer = MomentumSAM(model.parameters(), lr=0.1, momentum=0.9, model=model if named else None)
    losses = [optimizer.step(closure_of(CONV, model, CONV.batch(seed=t))) for t in range(4)]
    assert model[1].num_batches_tracked == 4
    assert not torch.equal(model[1].running_mean, CONV.model()[1].running_mean)
    assert all(isinstance(loss, torch.Tensor) and loss.isfinite() and not loss.requires_grad for loss in losses)


@pytest.mark.parametrize("decouple", [True, False])
def test_wsam_uses_the_learning_rate_of_each_group(decouple):
    model = MLP.model()
    optimizer = WSAM(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}],
        lr=0.1,
        momentum=0.9,
        rho=0.2,
        gamma=0.8,
        decouple=decouple,
        model=model,
    )
    w = params_of(model)
    grad, v = references.gradient_of(MLP.model(), MLP.loss_fn, *MLP.batch()), {k: 0 * x for k, x in w.items()}
    for _ in range(3):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
        g = grad(w)
        g_p = grad(references.plus(w, references.unit(g), 0.2))
        for k in w:
            lr = 0.05 if k[0] == "0" else 0.1
            v[k] = 0.9 * v[k] + (g[k] if decouple else 4 * g_p[k] - 3 * g[k])
            w[k] = w[k] - lr * v[k] - (lr * 4 * (g_p[k] - g[k]) if decouple else 0)
    assert distance(params_of(model), w) < 1e-13


# what they refuse


@pytest.mark.parametrize(
    ("make", "settings"),
    [(m, {"rho": r}) for m in (
        MultiStepSAM, FisherSAM, LookbehindSAM, LookSAM, GSAM, FriendlySAM, VaSSO, MomentumSAM, WSAM
    ) for r in (-0.1, float("nan"))]
    + [(AgnosticSAM, {k: r}) for k in ("rho_train", "rho_val") for r in (-0.1, float("inf"))]
    + [(AgnosticSAM, {"val_momentum": 1.0}), (AgnosticSAM, {"val_momentum": -0.1})]
    + [(MultiStepSAM, {"steps": 0}), (MultiStepSAM, {"step_size": 0.0}), (FisherSAM, {"eta": -1.0})]
    + [(LookbehindSAM, {"steps": 0})]
    + [(LookbehindSAM, {"keep": k}) for k in (0.0, 1.1, float("nan"))]
    + [(LookSAM, {"every": 0}), (LookSAM, {"reuse": -1.0}), (GSAM, {"gap": -0.1}), (GSAM, {"gap": float("nan")})]
    + [(FriendlySAM, {"sigma": -1.0}), (FriendlySAM, {"decay": 1.0}), (FriendlySAM, {"decay": float("nan")})]
    + [(VaSSO, {"theta": t}) for t in (0.0, 1.1, float("nan"))]
    + [(WSAM, {"gamma": g}) for g in (1.0, -0.1, float("nan"))],
    ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(f"{k}={v}" for k, v in x.items()),
)  # fmt: skip
def test_values_that_are_refused_are_named(make, settings):
    with pytest.raises(ValueError, match=f"expected .*{next(iter(settings))}"):
        make(MLP.model().parameters(), lr=0.1, **settings)


@pytest.mark.parametrize("make", [m for m, _ in METHODS.values()], ids=METHODS)
def test_non_finite_gradients_change_neither_weights_nor_memory(make):
    model = MLP.model()
    optimizer = make(SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    for _ in range(2):
        optimizer.step(**closures_of(MLP, model))
    home, memory = params_of(model), copy.deepcopy(optimizer.rule_state)
    for bad in range(4):
        optimizer.step(
            **closures_of(MLP, model, change=lambda n, loss, bad=bad: loss * float("inf") if n == bad else loss)
        )
        if optimizer.skipped <= bad:  # this pass does not exist
            break
        assert_same(params_of(model), home)
        for slot, value in memory.items():
            if isinstance(value, dict):
                assert_same(optimizer.rule_state[slot], value)
            else:
                assert optimizer.rule_state[slot] == value
    assert optimizer.skipped
    assert tree.is_finite(params_of(model))


@pytest.mark.parametrize("make", [m for m, _ in METHODS.values()], ids=METHODS)
def test_a_named_optimizer_is_its_rule(make):
    model = MLP.model()
    optimizer = make(model.parameters(), SGD, lr=0.1, momentum=0.9, model=model)
    for key in optimizer.rule.hyper:
        assert optimizer.param_groups[0][key] == getattr(optimizer.rule, key) == make.keywords[key]
    fields = {f.name for f in dataclasses.fields(optimizer.rule)}
    for key, value in make.keywords.items():
        found = getattr(optimizer.rule, key) if key in fields else getattr(optimizer.rule.perturb, key)
        assert found == value
    assert type(optimizer).__name__ in repr(optimizer)


def test_a_named_optimizer_without_settings_is_the_rule_of_its_short_name():
    short = {
        "multistep": MultiStepSAM, "fisher": FisherSAM, "lookbehind": LookbehindSAM, "looksam": LookSAM,
        "gsam": GSAM, "friendly": FriendlySAM, "vasso": VaSSO, "momentum": MomentumSAM, "wsam": WSAM,
        "agnostic": AgnosticSAM, "random": RandomSAM, "rwp": RWP, "esam": ESAM, "sparse": SparseSAM,
    }  # fmt: skip
    for name, kind in short.items():
        assert kind(MLP.model().parameters(), lr=0.1).rule == rules.make(name), name
