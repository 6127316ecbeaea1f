"""The live optimizer at its borders: arguments of other types, unusual models, closures and bases."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from metasam import ASAM, SAM, AgnosticSAM, SharpnessAware, optim, tree
from metasam.perturb import Adaptive, Fisher
from metasam.rules import (
    ESAM,
    RWP,
    WSAM,
    Agnostic,
    FriendlySAM,
    Lookbehind,
    LookSAM,
    MomentumSAM,
    RandomSAM,
    Sharp,
    SparseSAM,
    VaSSO,
    make,
)

from .cases import MLP, RULES, assert_same, closure_of, closures_of, distance, each_rule, params_of

SGD = torch.optim.SGD
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)

# what rules are made with

COUNTS = [
    (Sharp, "steps"), (Sharp, "m"), (Lookbehind, "steps"), (LookSAM, "every"), (ESAM, "noise_seed"),
    (RandomSAM, "noise_seed"), (RWP, "noise_seed"),
    *[(SparseSAM, name) for name in ("refresh", "samples", "horizon", "noise_seed")],
]  # fmt: skip
NUMBERS = [
    (Sharp, "rho"), (Sharp, "step_size"), (Adaptive, "eta"), (Fisher, "eta"), (Lookbehind, "keep"), (WSAM, "gamma"),
    (LookSAM, "reuse"), (FriendlySAM, "decay"), (VaSSO, "theta"), (ESAM, "keep"), (ESAM, "select"), (RWP, "mix"),
    (SparseSAM, "sparsity"), (SparseSAM, "drop"), (Agnostic, "val_momentum"), (Agnostic, "rho_val"),
    (MomentumSAM, "rho"),
]  # fmt: skip


@pytest.mark.parametrize("value", [1.5, 2.0, True, "2"])
@pytest.mark.parametrize(("kind", "name"), COUNTS, ids=str)
def test_counts_are_whole_numbers(kind, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be a whole number, got {name}={value!r}"):
        kind(**{name: value})


@pytest.mark.parametrize("value", ["abc", True, [0.1]])
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=str)
def test_numbers_are_numbers(kind, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be a number, got {name}="):
        kind(**{name: value})


@pytest.mark.parametrize("value", [None, Adaptive, "asam"])
def test_a_geometry_is_one(value):
    tried = [c.rule for c in RULES if hasattr(c.rule, "perturb")]
    assert len({type(r) for r in tried}) == 12
    for rule in tried:
        with pytest.raises(ValueError, match=r"expected perturb to be a geometry, such as metasam\.perturb\.Steepest"):
            dataclasses.replace(rule, perturb=value)


def test_a_name_with_a_radius_of_text_is_refused_by_name():
    with pytest.raises(ValueError, match="expected rho to be a number, got rho='abc'"):
        make("sam", rho="abc")


@pytest.mark.parametrize(
    ("clip", "said"), [("a", "to be a number, got clip='a'"), (True, "got clip=True"), (-1, "> 0")]
)
def test_a_limit_is_a_number(clip, said):
    with pytest.raises(ValueError, match=f"expected clip.*{said}"):
        SAM(MLP.model().parameters(), lr=0.1, clip=clip)


@pytest.mark.parametrize("rho", [-1.0, "abc", float("nan")])
def test_radii_of_groups_are_checked_when_they_come(rho):
    model = MLP.model()
    with pytest.raises(ValueError, match="expected rho"):
        SAM([{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": rho}], lr=0.1)
    optimizer = SAM(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="expected rho"):
        optimizer.add_param_group({"params": model[2].parameters(), "rho": rho})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_the_rule_cannot_work_on_is_not_added():
    model = MLP.model()
    optimizer = ASAM([model[0].weight], lr=0.1, only=None)
    optimizer.rule = dataclasses.replace(optimizer.rule, perturb=Adaptive())
    with pytest.raises(ValueError, match="named_parameters"):
        optimizer.add_param_group({"params": model[2].parameters()})
    assert len(optimizer.param_groups) == 1


def test_a_base_that_maximises_is_refused():
    model = MLP.model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "maximize": True}]
    for make_it in (lambda: SAM(model.parameters(), lr=0.1, maximize=True), lambda: SAM(groups, lr=0.1)):
        with pytest.raises(ValueError, match=r"got maximize=True.*return -loss"):
            make_it()
    optimizer = SAM(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="maximize"):
        optimizer.add_param_group(groups[1])
    with pytest.raises(ValueError, match="maximize"):
        optimizer.load_state_dict(SGD(model[0].parameters(), lr=0.1, maximize=True).state_dict())
    assert len(optimizer.param_groups) == 1
    assert not optimizer.param_groups[0]["maximize"]


# parameters


class Two(nn.Module):
    """Two networks whose parameters have the same names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (MLP.model(seed=seed) for seed in (1, 4))

    def forward(self, x):
        return self.a(x) + self.b(x).square()


def pairs(two, how):
    if how == "one group":
        return [*two.a.named_parameters(), *two.b.named_parameters()]
    return [{"params": m.named_parameters()} for m in (two.a, two.b)]


@each_rule
@pytest.mark.parametrize("how", ["one group", "two groups", "added"])
def test_two_models_with_the_same_names_are_one_with_different_ones(case, how):
    found, wanted = Two().double(), Two().double()
    if how == "added":
        optimizer = SharpnessAware(MOMENTUM(found.a.named_parameters()), case.rule)
        optimizer.add_param_group({"params": found.b.named_parameters()})
    else:
        optimizer = SharpnessAware(MOMENTUM(pairs(found, how)), case.rule)
    other = SharpnessAware(MOMENTUM(wanted.named_parameters()), case.rule)
    for step in range(4):
        optimizer.step(**closures_of(MLP, found))
        other.step(**closures_of(MLP, wanted))
        if step == 1:  # noise is drawn by position, memory is saved by position
            fresh = SharpnessAware(MOMENTUM(pairs(found, "one group" if how == "one group" else "two")), case.rule)
            fresh.load_state_dict(optimizer.state_dict())
            optimizer = fresh
    assert_same(params_of(found), params_of(wanted))


def test_names_that_look_like_the_numbered_ones_stay_apart():
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(4)]
    names = ["weight", "weight", "weight#2", "weight"]
    optimizer = ASAM(list(zip(names, params, strict=True)), lr=0.1)
    assert [id(p) for p in optimizer._live().values()] == [id(p) for p in params]
    assert all("weight" in k for k in optimizer._live())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_moved_once():
    model, seen = MLP.model(), []
    optimizer = SAM([*model.parameters(), model[0].weight], lr=0.0, rho=0.3)
    home = params_of(model)

    def change(n, loss):
        seen.append(sum(float((p.detach() - home[k]).square().sum()) for k, p in model.named_parameters()) ** 0.5)
        return loss

    optimizer.step(closure_of(MLP, model, MLP.batch(), change))
    assert seen == pytest.approx([0.0, 0.3], rel=1e-6)


class Waves(nn.Module):
    """Complex parameters, a matrix and a vector, beside a real one; or their twins of real pairs."""

    def __init__(self, twins):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        u = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
        v = torch.randn(4, 2, generator=generator, dtype=torch.float64)
        wrap = (lambda t: t) if twins else torch.view_as_complex
        self.weight = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))
        self.u_weight, self.v_weight = nn.Parameter(wrap(u)), nn.Parameter(wrap(v))

    def forward(self, x):
        u, v = (t if t.is_complex() else torch.view_as_complex(t) for t in (self.u_weight, self.v_weight))
        z = (x.to(u.dtype) @ u).tanh() * v
        return ((z.real.square() + z.imag) @ self.weight)[:, None]


@each_rule
@pytest.mark.parametrize("base", [MOMENTUM, partial(torch.optim.Adam, lr=0.01)], ids=["momentum", "adam"])
def test_complex_parameters_are_their_real_twins(case, base):
    ours, twins = Waves(False), Waves(True)
    optimizer = SharpnessAware(base(ours.named_parameters()), case.rule, clip=0.5)
    other = SharpnessAware(base(twins.named_parameters()), case.rule, clip=0.5)
    for step in range(4):
        losses = [o.step(**closures_of(MLP, m)) for o, m in ((optimizer, ours), (other, twins))]
        assert losses[0] == pytest.approx(float(losses[1]), rel=1e-12)
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = SharpnessAware(base(ours.named_parameters()), case.rule, clip=0.5)
            optimizer.load_state_dict(saved)
    found = {k: torch.view_as_real(p) if p.is_complex() else p for k, p in params_of(ours).items()}
    assert distance(found, params_of(twins)) < 1e-13
    assert ours.u_weight.is_complex()
    assert ours.u_weight.grad.is_complex()


def test_inner_products_of_complex_tensors_are_those_of_their_parts():
    a, b = ({"w": torch.randn(3, 2, dtype=torch.complex128), "v": torch.randn(2)} for _ in range(2))
    wanted = sum((a[k].conj() * b[k]).real.sum() for k in a)
    assert torch.allclose(tree.dot(a, b).to(wanted), wanted, rtol=1e-12)
    assert abs(float(tree.dot(tree.reject(a, b), b))) < 1e-6
    assert torch.allclose(tree.squared_norm(a), tree.dot(a, a))


@each_rule
def test_where_all_parameters_are_frozen_nothing_happens(case):
    model, free = MLP.model().requires_grad_(False), nn.Parameter(torch.zeros((), dtype=torch.float64))
    names = model.named_parameters()
    optimizer = SharpnessAware(MOMENTUM([*names, ("spare_weight", free)]), case.rule)
    free.requires_grad_(False)
    home = params_of(model)
    for _ in range(3):
        assert optimizer.step(lambda: 1.5, val=lambda: 2.5) == 1.5
    assert_same(params_of(model), home)


# closures


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ((torch.tensor(1.0), 3), "tuple"),
        ({"loss": 1.0}, "dict"),
        ([1.0], "list"),
        ("1", "str"),
        (np.ones(2), "ndarray"),
    ],
)
def test_closures_return_the_loss_alone(result, kind):
    with pytest.raises(TypeError, match=f"expected the closure to return the loss, got {kind}: return the loss alone"):
        SAM(MLP.model().parameters(), lr=0.1).step(lambda: result)


@pytest.mark.parametrize("result", [None, 1.5, 2, np.float32(1.5), np.float64(1.5)])
def test_numbers_and_nothing_are_losses_too(result):
    model = MLP.model()
    closure = closure_of(MLP, model, MLP.batch())
    assert SAM(model.parameters(), lr=0.1).step(lambda: (closure(), result)[1]) is result
    assert distance(params_of(model), params_of(MLP.model())) > 1e-3


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_after_its_own_backward_is_a_loss(shape, retain):
    found, wanted, (x, y) = MLP.model(), MLP.model(), MLP.batch()

    def closure():
        loss = MLP.loss_fn(found(x), y).reshape(shape)
        loss.sum().backward(retain_graph=retain)
        return loss

    loss = SAM(found.parameters(), lr=0.1).step(closure)
    scalar = SAM(wanted.parameters(), lr=0.1).step(closure_of(MLP, wanted, MLP.batch()))
    assert_same(params_of(found), params_of(wanted))
    assert torch.equal(loss, scalar.reshape(shape))
    assert not loss.requires_grad


def test_losses_of_examples_after_a_backward_are_refused():
    model, (x, y) = MLP.model(), MLP.batch()

    def closure():
        losses = nn.functional.mse_loss(model(x), y, reduction="none")[:, 0]
        losses.mean().backward(retain_graph=True)
        return losses

    with pytest.raises(TypeError, match=r"leave backward to step, got shape \[5\] after a backward: return loss\.mean"):
        SAM(model.parameters(), lr=0.1).step(closure)


def test_only_closures_that_some_rule_asks_for_are_taken():
    model = MLP.model()
    closure, optimizer = closure_of(MLP, model, MLP.batch()), SAM(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="by the name val=, got foo="):
        optimizer.step(closure, foo=closure)
    with pytest.raises(TypeError, match="expected closure to be a function that evaluates a loss, got Tensor"):
        optimizer.step(torch.tensor(1.0))
    with pytest.raises(TypeError, match="expected val to be a function that evaluates a loss, got float"):
        optimizer.step(closure, val=1.0)
    optimizer.step(closure, val=closure)  # a loop may give every method the same
    with pytest.raises(TypeError, match="got both val_closure and val="):
        AgnosticSAM(model.parameters(), lr=0.1).step(closure, closure, val=closure)


def forgetting(model, x, y):
    def with_closure(optimizer):
        optimizer.step(lambda: MLP.loss_fn(model(x), y))

    def with_passes(optimizer):
        for _ in optimizer.passes():
            MLP.loss_fn(model(x), y)

    def with_two_steps(optimizer):
        optimizer.first_step()
        MLP.loss_fn(model(x), y)
        optimizer.second_step()

    return with_closure, with_passes, with_two_steps


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_forgotten_backward_is_warned_about_once(which, recwarn):
    model = MLP.model()
    take, optimizer = forgetting(model, *MLP.batch())[which], SAM(model.parameters(), lr=0.1)
    for _ in range(3):
        take(optimizer)
    assert [str(w.message) for w in recwarn if "loss.backward()" in str(w.message)] == [str(recwarn[0].message)]
    assert len(recwarn) == 1


def test_a_pass_without_gradients_among_others_is_no_mistake(recwarn):
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    closure, calls = closure_of(MLP, model, MLP.batch()), iter(range(2))
    optimizer.step(lambda: closure() if next(calls) else 0.0)
    assert not recwarn.list


# hooks


SCRIPT = """
import torch
from metasam import SAM, AgnosticSAM
w = torch.nn.Parameter(torch.ones(2))
def closure():
    loss = w.square().sum()
    loss.backward()
    return loss
{before}
optimizer, count = AgnosticSAM([w], lr=0.1), []
optimizer.register_step_pre_hook(lambda *a: count.append("pre"))
optimizer.register_step_post_hook(lambda *a: count.append("post"))
optimizer.step(closure, closure)
print(count)
for on in optimizer.passes():
    closure()
print(count)
"""


OTHERS = ["", "SAM([w], lr=0.1)", "import metasam; metasam.SharpnessAware(torch.optim.SGD([w]), metasam.rules.Sharp())"]


@pytest.mark.parametrize("before", OTHERS)
def test_step_hooks_fire_once_whatever_was_built_before(before):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True)
    assert done.stdout == "['pre', 'post']\n['pre', 'post', 'pre', 'post']\n", done.stderr


def test_state_dict_hooks_fire():
    model = MLP.model()
    optimizer, seen = optim.VaSSO(model.parameters(), lr=0.1), []
    optimizer.step(closure_of(MLP, model, MLP.batch()))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("before saving", o)))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "more": 1})
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda o, s: s["wrapped"])
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("after loading", o)))
    optimizer.load_state_dict({"wrapped": saved})
    assert seen == [("before saving", optimizer), ("after loading", optimizer)]


# states of other models


@pytest.mark.parametrize("base", [MOMENTUM, partial(torch.optim.Adam, lr=0.1), partial(torch.optim.RMSprop, lr=0.1)])
@pytest.mark.parametrize("make_it", [SAM, optim.FriendlySAM])
def test_a_state_of_other_shapes_is_refused_and_nothing_changes(make_it, base):
    def run(wide):
        model = nn.Sequential(nn.Linear(3, 4 + wide), nn.Tanh(), nn.Linear(4 + wide, 1)).double()
        optimizer = make_it(base(model.parameters()))
        optimizer.step(closure_of(MLP, model, MLP.batch()))
        return model, optimizer

    (_, other), (model, own) = run(1), run(0)
    fresh = make_it(base(model.parameters()))
    for optimizer in (own, fresh):
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"of shape \[4, 3\] for parameter '0', got \[5, 3\]: the state"):
            optimizer.load_state_dict(other.state_dict())
        assert str(optimizer.state_dict()) == str(before)
    fresh.load_state_dict(own.state_dict())
    fresh.step(closure_of(MLP, model, MLP.batch()))


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="came with torch 2.5")
def test_a_base_whose_state_has_shapes_of_its_own_loads():
    model = MLP.model()
    optimizer, fresh = (SAM(model.parameters(), torch.optim.Adafactor, lr=0.1) for _ in range(2))
    optimizer.step(closure_of(MLP, model, MLP.batch()))
    fresh.load_state_dict(optimizer.state_dict())
    assert str(fresh.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    assert fresh.base.state


# what is not finite


def spoiled(make_it, when):
    """A step whose evaluations of examples ``when`` chooses are NaN: whether it was skipped, and the weights moved."""
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = make_it(model.parameters(), lr=0.1, momentum=0.9)
    calls = iter(range(100))

    def closure(part=None):
        losses = nn.functional.mse_loss(
            model(x if part is None else x[part]), y if part is None else y[part], reduction="none"
        )
        return losses[:, 0] * (float("nan") if when(next(calls), part) else 1.0)

    optimizer.step(closure)
    return optimizer, model


SPOILED = {
    "one sampled example": (partial(optim.SparseSAM, samples=3), lambda n, part: n == 2),
    "losses at the displaced weights": (optim.ESAM, lambda n, part: n == 1),
    "the forward that counts": (partial(SAM, m=2), lambda n, part: n == 0),
    "one shard": (partial(SAM, m=2), lambda n, part: n == 3),
}


@pytest.mark.parametrize(("make_it", "when"), SPOILED.values(), ids=SPOILED)
def test_whatever_is_not_finite_skips_the_step(make_it, when):
    optimizer, model = spoiled(make_it, when)
    assert optimizer.skipped == 1
    assert not optimizer.base.state
    assert_same(params_of(model), params_of(MLP.model()))
    optimizer, model = spoiled(make_it, lambda n, part: False)
    assert optimizer.skipped == 0
    assert distance(params_of(model), params_of(MLP.model())) > 1e-3


@pytest.mark.parametrize("make_it", [SAM, optim.LookbehindSAM, optim.WSAM, optim.MomentumSAM, optim.RandomSAM])
def test_the_returned_loss_is_that_of_the_first_evaluation(make_it):
    model, losses = MLP.model(), []
    optimizer = make_it(
        model.parameters(), rho=0.3, lr=0.1, **({"momentum": 0.9} if make_it is optim.MomentumSAM else {})
    )
    for _ in range(2):
        losses.clear()
        clean = float(MLP.loss_fn(model(MLP.batch()[0]), MLP.batch()[1]).detach())
        loss = optimizer.step(closure_of(MLP, model, MLP.batch(), lambda n, loss: losses.append(loss.detach()) or loss))
        assert torch.equal(loss, losses[0])
    assert (abs(float(loss) - clean) < 1e-12) == optimizer.rule.clean
