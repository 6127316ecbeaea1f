"""The live optimizer: a torch.optim.Optimizer in every respect. What holds for all rules is in test_rules.py."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from metasam import ASAM, SAM, SharpnessAware, tree
from metasam.perturb import Adaptive
from metasam.rules import DirectionRule, Plain, Sharp, VaSSO

from . import references
from .cases import CONV, MLP, PROBLEMS, assert_same, closure_of, distance, live, params_of

SGD = torch.optim.SGD
BASES = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def stepped(model, optimizer, problem=MLP, steps=3):
    """The parameters after some steps on the problem's batch."""
    batch = problem.batch(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.step(closure_of(problem, model, batch))
    return params_of(model)


# trajectories


@each_base
@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
@pytest.mark.parametrize("method", ["sam", "asam"])
def test_twenty_steps_equal_the_usual_two_pass_loop_to_the_last_bit(method, problem, base):
    # Bit-equality rests on the order of operations: the norm is the norm of the tensors' norms; `rho / norm` of a
    # Python float and a tensor is torch's `norm.reciprocal() * rho`; eps is `(t * (t * g)) * (rho / norm)`.
    ours, theirs = problem.model(torch.float32), problem.model(torch.float32)
    kind = SAM if method == "sam" else ASAM
    optimizer = kind(base(ours.parameters()), rho=0.3, model=ours)
    batch, other = problem.batch(torch.float32), base(theirs.parameters())
    weights = None if method == "sam" else [p for n, p in theirs.named_parameters() if "weight" in n.split(".")[-1]]

    def closure():
        loss = problem.loss_fn(theirs(batch[0]), batch[1])
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure_of(problem, ours, batch))
        references.two_pass(list(theirs.parameters()), other, closure, 0.3, weights)
        assert_same(params_of(ours), params_of(theirs))


@each_base
def test_plain_is_the_base_to_the_last_bit(base):
    model, other = MLP.model(), MLP.model()
    optimizer = base(other.parameters())
    for _ in range(5):
        optimizer.step(closure_of(MLP, other, MLP.batch()))
    assert_same(stepped(model, SharpnessAware(base(model.parameters()), Plain()), steps=5), params_of(other))


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_bases_of_every_implementation(settings):
    model, other = MLP.model(), MLP.model()
    found = stepped(model, SAM(model.parameters(), torch.optim.AdamW, lr=0.01, **settings))
    assert distance(found, stepped(other, SAM(other.parameters(), torch.optim.AdamW, lr=0.01))) < 1e-12


def test_step_returns_the_clean_loss_detached():
    model = MLP.model()
    wanted = MLP.loss_fn(model(MLP.batch()[0]), MLP.batch()[1])
    loss = SAM(model.parameters(), lr=0.1).step(closure_of(MLP, model, MLP.batch()))
    assert torch.equal(loss, wanted.detach())
    assert not loss.requires_grad


# constructing


def test_every_way_to_name_parameters_gives_the_same_steps():
    def run(make):
        model = MLP.model()
        return stepped(model, make(model))

    for kind in (SAM, partial(ASAM, only=None)):
        wanted = run(lambda m, kind=kind: kind(m.parameters(), SGD, rho=0.1, lr=0.1, momentum=0.9))
        ways = [
            lambda m, kind=kind: kind(m.named_parameters(), SGD, rho=0.1, lr=0.1, momentum=0.9),
            lambda m, kind=kind: kind(model=m, rho=0.1, lr=0.1, momentum=0.9),
            lambda m, kind=kind: kind(m.parameters(), model=m, rho=0.1, lr=0.1, momentum=0.9),
            lambda m, kind=kind: kind(SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.1),
            lambda m, kind=kind: kind([{"params": m.parameters(), "rho": 0.1}], lr=0.1, momentum=0.9),
        ]
        for way in ways:
            assert_same(run(way), wanted)


def test_asam_tells_weights_by_their_names():
    ways = [
        lambda m: ASAM(m.named_parameters(), lr=0.1),
        lambda m: ASAM(m.parameters(), lr=0.1, model=m),
        lambda m: ASAM(SGD(m.named_parameters(), lr=0.1)),
        lambda m: ASAM(lr=0.1, model=m),
    ]
    models = [MLP.model() for _ in ways]
    found = [stepped(m, way(m)) for m, way in zip(models, ways, strict=True)]
    wanted = params_of(live(MLP, Sharp(0.5, Adaptive())))
    for one in found:
        assert_same(one, wanted)
    model = MLP.model()
    assert distance(stepped(model, ASAM(model.parameters(), lr=0.1, only=None)), wanted) > 1e-6


def test_asam_with_unnamed_parameters_says_what_to_pass():
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\) or model=model"):
        ASAM(MLP.model().parameters(), lr=0.1)


def test_a_model_names_the_groups_that_come_later():
    model = MLP.model()
    optimizer = ASAM(model[0].parameters(), lr=0.1, model=model)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert_same(stepped(model, optimizer), params_of(live(MLP, Sharp(0.5, Adaptive()))))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: SharpnessAware(SGD, Sharp()), TypeError, "torch.optim.Optimizer"),
        (lambda m: SharpnessAware(torch.optim.LBFGS(m.parameters()), Sharp()), TypeError, "LBFGS"),
        (lambda m: SAM(m.parameters(), torch.optim.LBFGS), TypeError, "LBFGS"),
        (lambda m: SAM(SAM(m.parameters())), TypeError, "sharpness-aware already"),
        (lambda m: SharpnessAware(SGD(m.parameters()), "sam"), TypeError, r"metasam\.rules\.Rule"),
        (lambda m: SAM(m), TypeError, r"model\.parameters\(\), or model=model"),
        (lambda m: SAM(), TypeError, "expected parameters"),
        (lambda m: SAM(SGD(m.parameters()), lr=0.1), TypeError, "lr"),
        (lambda m: SAM(m.parameters(), lambda p: None), TypeError, "NoneType"),
        (lambda m: SAM(m.parameters(), model=nn.Linear(1, 1)), ValueError, "among them"),
        (lambda m: SAM(m.parameters(), rho=-1.0), ValueError, "rho"),
        (lambda m: SAM(m.parameters(), rho=float("nan")), ValueError, "rho"),
        (lambda m: SAM(m.parameters(), steps=0), ValueError, "steps"),
        (lambda m: ASAM(m.named_parameters(), eta=-1.0), ValueError, "eta"),
        (lambda m: SAM(m.parameters(), learning_rate=0.1), TypeError, "learning_rate"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make(MLP.model())


def test_step_without_a_closure_explains():
    with pytest.raises(TypeError, match=r"def closure\(\)"):
        SAM(MLP.model().parameters()).step()


def test_it_is_an_optimizer_and_a_view_of_its_base():
    model = MLP.model()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = SAM(base, rho=0.2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    assert optimizer.param_groups[0]["rho"] == 0.2
    assert "Sharp(rho=0.2" in repr(optimizer)
    (model[0].weight.sum()).backward()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_step_hooks_fire_once_a_step():
    model, calls = MLP.model(), []
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    stepped(model, optimizer, steps=2)
    assert calls == ["pre", "post"] * 2


# groups and schedulers


def test_groups_have_their_own_lr_and_rho():
    model, w = MLP.model(), params_of(MLP.model())
    optimizer = SAM(
        [{"params": model[0].parameters(), "rho": 0.3, "lr": 0.2}, {"params": model[2].parameters()}], lr=0.1
    )
    grad = references.gradient_of(MLP.model(), MLP.loss_fn, *MLP.batch())
    rho = {k: 0.3 if k.startswith("0") else 0.05 for k in w}
    lr = {k: 0.2 if k.startswith("0") else 0.1 for k in w}
    for _ in range(3):
        eps = references.unit(grad(w))
        g = grad({k: w[k] + rho[k] * eps[k] for k in w})
        w = {k: w[k] - lr[k] * g[k] for k in w}
    assert distance(stepped(model, optimizer), w) < 1e-13


@pytest.mark.parametrize("names", [True, False])
def test_add_param_group_equals_having_it_from_the_start(names):
    def parts(model):
        return [m.named_parameters(f"{i}") if names else m.parameters() for i, m in ((0, model[0]), (2, model[2]))]

    model, other = MLP.model(), MLP.model()
    first, second = parts(model)
    optimizer = SAM(first, rho=0.3, lr=0.1)
    optimizer.add_param_group({"params": second, "rho": 0.1})
    assert optimizer.param_groups[1]["lr"] == 0.1
    first, second = parts(other)
    wanted = SAM([{"params": first}, {"params": second, "rho": 0.1}], rho=0.3, lr=0.1)
    assert_same(stepped(model, optimizer), stepped(other, wanted))


def test_a_later_group_has_the_rules_radius():
    model = MLP.model()
    optimizer = SAM(model[0].parameters(), rho=0.3, lr=0.1)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert [g["rho"] for g in optimizer.param_groups] == [0.3, 0.3]


@pytest.mark.parametrize("where", ["optimizer", "base"])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=10),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (n + 1)),
    ],
    ids=lambda m: m.func.__name__,
)
def test_schedulers_work_on_either_object(make, where):
    def run(schedule):
        model = MLP.model()
        base = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = SharpnessAware(base, Plain()) if schedule else base
        scheduler = make(base if where == "base" else optimizer)
        for _ in range(4):
            optimizer.step(closure_of(MLP, model, MLP.batch()))
            scheduler.step()
        return params_of(model), scheduler.get_last_lr()

    (found, lr), (wanted, wanted_lr) = run(True), run(False)
    assert lr == wanted_lr
    assert_same(found, wanted)


def test_plateau_scheduler():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        stepped(model, optimizer, steps=1)
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_rho_is_scheduled_in_the_groups():
    model = MLP.model()
    optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)
    optimizer.param_groups[0]["rho"] = 0.1
    assert_same(stepped(model, optimizer), params_of(live(MLP, Sharp(0.1))))
    assert optimizer.rule.rho == 0.3


def test_a_radius_set_in_the_groups_is_checked():
    optimizer = SAM((model := MLP.model()).parameters(), lr=0.1)
    optimizer.param_groups[0]["rho"] = -0.1
    with pytest.raises(ValueError, match="rho >= 0"):
        stepped(model, optimizer)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": -0.1}]
    with pytest.raises(ValueError, match="rho >= 0"):
        stepped(model, SAM(groups, lr=0.1))


# closures


def test_closures_need_not_clear_gradients():
    model = MLP.model()
    optimizer, (x, y) = SAM(model.parameters(), lr=0.1), MLP.batch()

    def closure():
        loss = MLP.loss_fn(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_same(params_of(model), params_of(live(MLP, Sharp())))


def test_closures_may_accumulate_micro_batches():
    model = MLP.model()
    optimizer, (x, y) = SAM(model.parameters(), lr=0.1), MLP.batch()

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for i in range(len(x)):
            loss = MLP.loss_fn(model(x[i : i + 1]), y[i : i + 1]) / len(x)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(3):
        optimizer.step(closure)
    assert distance(params_of(model), params_of(live(MLP, Sharp()))) < 1e-13


def test_a_closure_without_gradients_moves_nothing():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"did it call loss\.backward\(\)"):
        assert optimizer.step(lambda: None) is None
    assert optimizer.step(lambda: 1.5) == 1.5  # once is enough
    assert_same(params_of(model), params_of(MLP.model()))


def test_parameters_may_be_frozen_and_freed_between_steps():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9)
    x, y = MLP.batch()

    def closure():
        loss = MLP.loss_fn(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    model[0].requires_grad_(False)
    home = params_of(model[0])
    optimizer.step(closure)
    assert_same(params_of(model[0]), home)
    model[0].requires_grad_(True)
    stepped(model, optimizer, steps=1)
    assert not torch.equal(model[0].weight, home["weight"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_gradients_left_behind_are_those_of_the_descent(problem):
    model = problem.model()
    SAM(model.parameters(), lr=0.0, rho=0.1).step(closure_of(problem, model, problem.batch()))
    w = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    grad = references.gradient_of(model, problem.loss_fn, *problem.batch())
    wanted = grad(references.plus(w, references.unit(grad(w)), 0.1))
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert distance(found, wanted) < 1e-12


@dataclass(frozen=True)
class Halves(DirectionRule):
    """Mean of the gradients of two halves of a batch."""

    def direction(self, at, params, state):
        parts = [at(part=slice(0, 2)).grads, at(part=torch.tensor([2, 3])).grads]
        return tree.scale(tree.add(*parts), 0.5), state


@dataclass(frozen=True)
class OnVal(DirectionRule):
    """The gradient on held-out data; looks at the training loss only."""

    def direction(self, at, params, state):
        at()
        return at(on="val").grads, state


def test_closures_may_take_parts():
    model, (x, y) = MLP.model(), MLP.batch()

    def closure(part=slice(0, 4)):
        loss = MLP.loss_fn(model(x[part]), y[part])
        loss.backward()
        return loss

    w = params_of(model)
    grad = references.gradient_of(MLP.model(), MLP.loss_fn, x[:4], y[:4])
    SharpnessAware(SGD(model.parameters(), 0.1), Halves()).step(closure)
    assert distance(params_of(model), references.plain(grad, w, 0.1, {})) < 1e-13


def test_other_batches_come_by_name():
    model, val = MLP.model(), MLP.batch(seed=7)
    optimizer = SharpnessAware(SGD(model.parameters(), 0.1), OnVal())
    with pytest.raises(TypeError, match=r"step\(closure, val="):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
    w, grad = params_of(model), references.gradient_of(MLP.model(), MLP.loss_fn, *val)
    optimizer.step(closure_of(MLP, model, MLP.batch()), val=closure_of(MLP, model, val))
    assert distance(params_of(model), references.plain(grad, w, 0.1, {})) < 1e-13


# precision and layout


def losses_of_both_passes(context):
    model, losses = nn.Linear(16, 4), []
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    optimizer = SAM(model.parameters(), rho=1.0, lr=0.1)

    def closure():
        loss = nn.functional.mse_loss(model(x).float(), y)
        losses.append(loss.item())
        loss.backward()
        return loss

    with context:
        optimizer.step(closure)
    return losses


def test_autocast_around_the_step_does_not_hide_the_displacement():
    first, second = losses_of_both_passes(torch.autocast("cpu", torch.bfloat16))
    assert second > first * 1.1


def test_autocast_leaves_no_displaced_casts_behind():
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    optimizer = SAM(model.parameters(), rho=5.0, lr=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        optimizer.step(lambda: model(x).float().square().mean().backward())
        assert torch.equal(model(x), before)


def test_sparse_gradients_equal_dense_ones():
    def run(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 1)).double()
        optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)
        x, y = torch.tensor([[0, 2], [2, 5], [2, 2]]), torch.ones(3, 1, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(lambda: nn.functional.mse_loss(model(x), y).backward())
        return params_of(model)

    assert distance(run(True), run(False)) < 1e-14


def test_a_pass_that_overflows_is_skipped_and_training_goes_on():
    model = MLP.model(torch.float32)
    optimizer = SAM(model.parameters(), lr=0.1)
    home = params_of(model)
    optimizer.step(closure_of(MLP, model, MLP.batch(torch.float32), lambda n, loss: loss * 1e38 * 1e38))
    assert_same(params_of(model), home)
    assert optimizer.skipped == 1
    stepped(model, optimizer)
    assert optimizer.skipped == 1


# state


def test_a_plain_optimizers_checkpoint_loads():
    model = MLP.model()
    base = SGD(model.parameters(), lr=0.2, momentum=0.9)
    stepped(model, base)
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9, rho=0.3)
    saved = copy.deepcopy(base.state_dict())  # torch's load aliases what it is given
    optimizer.load_state_dict(base.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["rho"] == 0.3
    twin = MLP.model()
    twin.load_state_dict(model.state_dict())
    unsharp = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    unsharp.load_state_dict(saved)
    other = SAM(unsharp, rho=0.3)
    assert_same(stepped(model, optimizer), stepped(twin, other))


def test_radii_are_saved_and_loaded():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1, rho=0.3)
    other = SAM(MLP.model().parameters(), lr=0.5, rho=0.7)
    other.load_state_dict(optimizer.state_dict())
    assert (other.param_groups[0]["rho"], other.param_groups[0]["lr"]) == (0.3, 0.1)


def test_state_dict_holds_no_reference_into_the_optimizer_and_stays_as_it_was():
    model = MLP.model()
    optimizer = SharpnessAware(SGD(model.parameters(), 0.1), VaSSO(), model=model)
    stepped(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    given = optimizer.state_dict()
    other = SharpnessAware(SGD(MLP.model().parameters(), 0.1), VaSSO(), model=None)
    other.load_state_dict(given)
    stepped(model, optimizer)
    for i, state in saved["state"].items():
        assert_same(given["state"][i], state)
    assert given["param_groups"] == saved["param_groups"]


def test_state_of_a_rule_is_not_cast_to_the_parameters_dtype():
    model = MLP.model(torch.bfloat16)
    optimizer = SharpnessAware(SGD(model.parameters(), 0.1), VaSSO(), model=model)
    optimizer.rule_state = {
        "d": {k: torch.ones_like(p, dtype=torch.bool) for k, p in params_of(model).items()},
        "steps": 2,
    }
    other = SharpnessAware(SGD(model.parameters(), 0.1), VaSSO(), model=model)
    other.load_state_dict(optimizer.state_dict())
    assert_same(other.rule_state["d"], optimizer.rule_state["d"])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_is_independent_and_still_a_view_of_its_own_base(copier):
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9, model=model)
    stepped(model, optimizer)
    twin, other = copier((model, optimizer))
    assert type(other) is SAM
    assert other.param_groups is other.base.param_groups
    assert other.model is twin
    other.param_groups[0]["lr"] = 5.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    home = params_of(model)
    stepped(twin, other)
    assert_same(params_of(model), home)


def test_skipped_steps_are_saved():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.step(closure_of(MLP, model, MLP.batch(), lambda n, loss: loss * float("nan")))
    other = SAM(model.parameters(), lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped == 1


def test_a_gradient_that_spoils_only_the_state_skips_the_step():
    """The gradient of a linear loss is the same everywhere: an inf in pass one leaves no trace in the direction."""
    w = nn.Parameter(torch.ones(2))
    optimizer = SharpnessAware(torch.optim.SGD([w], lr=0.1), VaSSO())
    calls = []

    def closure():
        calls.append(None)
        loss = w.sum()
        loss.backward()
        if len(calls) == 3:  # the first pass of the second step
            w.grad[0] = torch.inf
        return loss

    optimizer.step(closure)
    before, kept = w.detach().clone(), optimizer.rule_state["d"]["0"].clone()
    optimizer.step(closure)
    assert len(calls) == 4
    assert optimizer.skipped == 1
    assert torch.equal(w, before)
    assert torch.equal(optimizer.rule_state["d"]["0"], kept)


# what fresh eyes found


def test_a_base_with_a_setting_of_the_radius_name_is_refused():
    with pytest.raises(ValueError, match="Adadelta has a setting 'rho' of its own"):
        SAM(nn.Linear(2, 1).parameters(), torch.optim.Adadelta, rho=0.05)


def test_a_radius_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="expected rho to be a number, got rho='a'"):
        SAM(nn.Linear(2, 1).parameters(), lr=0.1, rho="a")


@pytest.mark.parametrize("named", [False, True])
def test_an_instance_norm_that_tracks_counts_a_batch_once(named):
    torch.manual_seed(0)
    model = nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(12, 1))
    twin = copy.deepcopy(model)
    x = torch.randn(5, 3, 4)
    optimizer = SAM(model.parameters(), lr=0.1, model=model if named else None)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    twin(x)
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(model[0], name), getattr(twin[0], name))
