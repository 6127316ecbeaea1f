"""Schedules of radii and of learning rates, in groups, over several models and beside torch's own schedulers."""

from __future__ import annotations

import copy
import io
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from metasam import ASAM, GSAM, SAM, AgnosticSAM, ProportionalRho, RhoScheduler, SharpnessAware
from metasam.rules import Plain

from . import references
from .cases import MLP, assert_same, closure_of, closures_of, distance, params_of

SGD = torch.optim.SGD


def grouped(kind=SAM, **settings):
    model = MLP.model()
    groups = [
        {"params": model[0].parameters(), "lr": 0.2, "rho": 0.4},
        {"params": model[2].parameters()},
    ]
    return model, kind(groups, lr=0.1, rho=0.1, **settings)


def rhos(optimizer):
    return [g["rho"] for g in optimizer.param_groups]


# factors


def test_radii_are_their_first_values_times_the_factor():
    _, optimizer = grouped()
    scheduler = RhoScheduler(optimizer, lambda t: 0.5**t)
    for t in range(5):
        assert rhos(optimizer) == [0.4 * 0.5**t, 0.1 * 0.5**t]
        assert scheduler.get_last_rho() == [{"rho": 0.4 * 0.5**t}, {"rho": 0.1 * 0.5**t}]
        scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.1]


def test_each_group_may_have_its_factor():
    _, optimizer = grouped()
    scheduler = RhoScheduler(optimizer, [lambda t: 1 + t, lambda t: math.cos(t) ** 2])
    scheduler.step()
    scheduler.step()
    assert rhos(optimizer) == [0.4 * 3, 0.1 * math.cos(2) ** 2]


def test_all_radii_of_a_rule_are_scheduled():
    optimizer = AgnosticSAM(MLP.model().parameters(), lr=0.1, rho_train=0.2, rho_val=0.1)
    RhoScheduler(optimizer, lambda t: (t + 1) / 2).step()
    assert (optimizer.param_groups[0]["rho_train"], optimizer.param_groups[0]["rho_val"]) == (0.2, 0.1)
    RhoScheduler(optimizer, lambda t: 3.0)
    assert optimizer.param_groups[0]["rho_val"] == pytest.approx(0.3, rel=1e-15)


def test_a_scheduled_run_is_the_plain_loop_with_those_radii():
    model, optimizer = grouped()
    scheduler, decay = RhoScheduler(optimizer, lambda t: 1 / (1 + t)), lr_scheduler.ExponentialLR(optimizer, 0.5)
    w, grad = params_of(model), references.gradient_of(MLP.model(), MLP.loss_fn, *MLP.batch())
    for t in range(4):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
        scheduler.step()
        decay.step()
        eps = references.unit(grad(w))
        rho = {k: (0.4 if k[0] == "0" else 0.1) / (1 + t) for k in w}
        lr = {k: (0.2 if k[0] == "0" else 0.1) * 0.5**t for k in w}
        g = grad({k: w[k] + rho[k] * eps[k] for k in w})
        w = {k: w[k] - lr[k] * g[k] for k in w}
    assert distance(params_of(model), w) < 1e-13


@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
def test_a_resumed_schedule_goes_on_where_it_was(first):
    def build(seed):
        model = MLP.model(seed=seed)
        optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9, rho=0.3)
        return model, optimizer, RhoScheduler(optimizer, lambda t: 0.8**t)

    def go(model, optimizer, scheduler, times):
        for t in times:
            optimizer.step(closure_of(MLP, model, MLP.batch(seed=t)))
            scheduler.step()

    model, optimizer, scheduler = build(1)
    go(model, optimizer, scheduler, range(3))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), file)
    go(model, optimizer, scheduler, range(3, 6))
    file.seek(0)
    weights, memory, place = torch.load(file, weights_only=True)
    twin, other, resumed = build(9)
    twin.load_state_dict(weights)
    for load in sorted(
        ((other, memory), (resumed, place)), key=lambda pair: (pair[0] is other) != (first == "optimizer")
    ):
        load[0].load_state_dict(load[1])
    assert other.param_groups[0]["rho"] == 0.3 * 0.8**3
    go(twin, other, resumed, range(3, 6))
    assert_same(params_of(twin), params_of(model))
    assert rhos(other) == rhos(optimizer) == [0.3 * 0.8**6]


def test_a_schedule_survives_the_state_of_a_plain_optimizer():
    _, optimizer = grouped()
    scheduler = RhoScheduler(optimizer, lambda t: 0.5**t)
    scheduler.step()
    plain = SGD([{"params": [p]} for p in (nn.Parameter(torch.ones(1)),) * 1], lr=0.1)
    groups = [{**plain.state_dict()["param_groups"][0], "params": ids} for ids in ([0, 1], [2, 3])]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    scheduler.step()
    assert rhos(optimizer) == [0.1, 0.025]


def test_a_later_group_starts_from_the_radius_that_it_brings():
    model = MLP.model()
    optimizer = SAM(model[0].parameters(), lr=0.1, rho=0.4)
    scheduler = RhoScheduler(optimizer, lambda t: 0.5**t)
    scheduler.step()
    optimizer.add_param_group({"params": model[2].parameters(), "rho": 0.8})
    scheduler.step()
    assert rhos(optimizer) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RhoScheduler(SGD(MLP.model().parameters()), lambda t: 1.0), TypeError, "sharpness-aware.* got SGD"),
        (
            lambda: RhoScheduler(SharpnessAware(SGD(MLP.model().parameters()), Plain()), lambda t: 1.0),
            ValueError,
            "with a radius",
        ),
        (lambda: RhoScheduler(grouped()[1], [lambda t: 1.0]), ValueError, "or 2, one for each group, got 1"),
        (lambda: RhoScheduler(grouped()[1], lambda t: -1.0), ValueError, "rho at epoch 0 >= 0 and finite, got"),
        (lambda: RhoScheduler(grouped()[1], lambda t: math.nan), ValueError, "rho at epoch 0"),
        (lambda: ProportionalRho(grouped()[1], lr_max=0.1, lr_min=0.1), ValueError, "lr_min < lr_max"),
        (lambda: ProportionalRho(grouped()[1], lr_max=0.1, lr_min=-0.1), ValueError, "lr_min"),
        (lambda: ProportionalRho(grouped()[1], lr_max=0.2, rho_max=0.1, rho_min=0.2), ValueError, "rho_min <= rho_max"),
        (lambda: ProportionalRho(grouped()[1], lr_max=0.2, rho_min=0.2), ValueError, "rho_max=0.1"),
        (lambda: ProportionalRho(grouped()[1], lr_max=0.2, rho_min=-0.2), ValueError, "rho_min >= 0"),
        (lambda: ProportionalRho(SGD(MLP.model().parameters()), lr_max=0.1), TypeError, "got SGD"),
    ],
)
def test_what_schedules_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()


# in proportion to the learning rate


def test_a_radius_in_proportion_in_closed_form():
    model = MLP.model()
    optimizer = GSAM(model.parameters(), lr=0.8, rho=0.5)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
    scheduler = ProportionalRho(optimizer, lr_max=0.8, lr_min=0.1, rho_max=0.4, rho_min=0.05)
    for t in range(9):
        # the learning rate goes from 0.8 to 0.1 along half a cosine, and so the radius from 0.4 to 0.05
        assert rhos(optimizer)[0] == pytest.approx(0.05 + 0.35 * (1 + math.cos(math.pi * t / 8)) / 2, rel=1e-12)
        optimizer.step(closure_of(MLP, model, MLP.batch()))
        decay.step()
        scheduler.step()


def test_each_groups_radius_follows_its_own_learning_rate_and_stays_between_the_ends():
    _, optimizer = grouped(GSAM)
    scheduler = ProportionalRho(optimizer, lr_max=0.2, lr_min=0.0)
    assert rhos(optimizer) == [0.4, 0.05]
    for lr, share in ((0.05, 0.25), (0.4, 1.0), (0.0, 0.0)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        scheduler.step()
        assert rhos(optimizer) == pytest.approx([0.4 * share, 0.1 * share], rel=1e-15)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    scheduler.step()
    assert rhos(optimizer)[0] == pytest.approx(0.2, rel=1e-6)
    scheduler = ProportionalRho(optimizer, lr_max=0.2, lr_min=0.1, rho_min=0.03)
    assert rhos(optimizer) == pytest.approx([0.03, 0.03], rel=1e-6)


def test_a_resumed_proportion_goes_on():
    _, optimizer = grouped(GSAM)
    scheduler = ProportionalRho(optimizer, lr_max=0.4, rho_max=0.8, rho_min=0.2)
    _, other = grouped(GSAM)
    resumed = ProportionalRho(other, lr_max=9.0)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert rhos(other) == rhos(optimizer) == pytest.approx([0.5, 0.35], rel=1e-15)


# beside torch's schedulers: warnings are errors here

SCHEDULERS = {
    "step": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "onecycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=8),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.3, step_size_up=2),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
}
STEPS = {
    "closure": lambda o, closure: o.step(closure),
    "passes": lambda o, closure: [closure() for _ in o.passes()],
    "phases": lambda o, closure: (closure(), o.first_step(), closure(), o.second_step(zero_grad=True)),
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("where", ["optimizer", "base"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_are_those_of_a_plain_optimizer(name, where, how):
    def run(sharp):
        model = MLP.model()
        base = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = SAM(base, rho=0.3) if sharp else base
        scheduler = SCHEDULERS[name](base if where == "base" or not sharp else optimizer)
        radius = RhoScheduler(optimizer, lambda t: 0.9**t) if sharp else None
        trace = []
        for t in range(6):
            (STEPS[how] if sharp else STEPS["closure"])(optimizer, closure_of(MLP, model, MLP.batch(seed=t)))
            scheduler.step(*([1.0] if name == "plateau" else []))
            trace.append((base.param_groups[0]["lr"], base.param_groups[0]["momentum"]))
            if radius:
                radius.step()
                assert base.param_groups[0]["rho"] == 0.3 * 0.9 ** (t + 1)
        return trace, params_of(model)

    (found, weights), (wanted, plain) = run(True), run(False)
    assert found == wanted
    assert len(set(found)) > 1
    assert distance(weights, plain) > 1e-4
    if name in ("onecycle", "cyclic"):
        assert len({m for _, m in found}) > 1  # the momentum cycles too


@pytest.mark.parametrize("where", ["optimizer", "base"])
def test_a_scheduler_before_the_first_step_is_warned_about_as_ever(where):
    optimizer = SAM(MLP.model().parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer if where == "optimizer" else optimizer.base, 1)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_passes_that_are_given_up_are_no_step():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    for _ in optimizer.passes():
        closure_of(MLP, model, MLP.batch())()
        break
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


def test_averaged_weights_follow_the_undisplaced_ones():
    model = MLP.model()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = SAM(model.parameters(), lr=0.1)
    schedule, seen = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2), []
    for t in range(3):
        optimizer.step(closure_of(MLP, model, MLP.batch(seed=t)))
        average.update_parameters(model)
        schedule.step()
        seen.append(params_of(model))
    wanted = {k: sum(s[k] for s in seen) / 3 for k in seen[0]}
    assert distance(params_of(average.module), wanted) < 1e-14


# several models, parts of models


def chain():
    torch.manual_seed(3)
    return nn.Linear(3, 4).double(), nn.Linear(4, 1).double()


def plain_steps(w, rho, lr, held=frozenset(), times=3):
    """SAM on the chain of two linear layers by hand: one norm over what moves."""
    x, y = MLP.batch()

    def grad(at):
        leaf = {k: v.clone().requires_grad_() for k, v in at.items()}
        out = torch.tanh(x @ leaf["0.weight"].T + leaf["0.bias"]) @ leaf["1.weight"].T + leaf["1.bias"]
        nn.functional.mse_loss(out, y).backward()
        return {k: v.grad for k, v in leaf.items() if k not in held}

    for _ in range(times):
        eps = references.unit(grad(w))
        g = grad({k: w[k] + rho[k] * eps[k] if k in eps else w[k] for k in w})
        w = {k: w[k] - lr[k] * g[k] if k in g else w[k] for k in w}
    return w


def chained(first, second):
    x, y = MLP.batch()
    loss = nn.functional.mse_loss(second(torch.tanh(first(x))), y)
    loss.backward()
    return loss


def weights_of(first, second):
    return {f"{i}.{k}": v for i, m in enumerate((first, second)) for k, v in params_of(m).items()}


@pytest.mark.parametrize("how", STEPS)
def test_groups_over_two_models_share_one_norm(how):
    first, second = chain()
    w = weights_of(first, second)
    optimizer = SAM(
        [{"params": first.parameters(), "rho": 0.4, "lr": 0.05}, {"params": second.parameters()}], lr=0.1, rho=0.2
    )
    for _ in range(3):
        STEPS[how](optimizer, partial(chained, first, second))
    rho, lr = ({k: r[k[0] == "0"] for k in w} for r in ((0.2, 0.4), (0.1, 0.05)))
    assert distance(weights_of(first, second), plain_steps(w, rho, lr)) < 1e-13


@pytest.mark.parametrize("how", STEPS)
def test_an_optimizer_of_some_parameters_moves_those_alone(how):
    first, second = chain()
    w = weights_of(first, second)
    optimizer = SAM([first.weight, *second.parameters()], lr=0.1, rho=0.2)
    for _ in range(3):
        first.bias.grad = None
        STEPS[how](optimizer, partial(chained, first, second))
    wanted = plain_steps(w, dict.fromkeys(w, 0.2), dict.fromkeys(w, 0.1), held={"0.bias"})
    assert distance(weights_of(first, second), wanted) < 1e-13
    assert torch.equal(first.bias, w["0.bias"])
    # nobody clears what is not the optimizer's: here two evaluations
    assert first.bias.grad is not None


@pytest.mark.parametrize("how", STEPS)
def test_two_optimizers_of_two_models_in_one_graph(how):
    """Each displaces its own model alone; the other one's gradients are its own affair."""
    first, second = chain()
    w = weights_of(first, second)
    optimizers = [SAM(m.parameters(), lr=0.1, rho=0.2) for m in (first, second)]
    for _ in range(3):
        for optimizer in optimizers:
            for other in optimizers:
                other.zero_grad()
            STEPS[how](optimizer, partial(chained, first, second))
    rho, lr = dict.fromkeys(w, 0.2), dict.fromkeys(w, 0.1)
    for _ in range(3):
        for mine in "01":
            w = plain_steps(w, rho, lr, held={k for k in w if k[0] != mine}, times=1)
    assert distance(weights_of(first, second), w) < 1e-13


def test_names_of_two_models_tell_their_weights():
    first, second = chain()
    twins = copy.deepcopy((first, second))
    both = nn.ModuleList([first, second])
    optimizer = ASAM(both.named_parameters(), lr=0.1)
    named = ASAM(
        [{"params": list(m.named_parameters(str(i)))} for i, m in enumerate(twins)],
        lr=0.1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step(partial(chained, first, second))
            named.step(partial(chained, *twins))
    assert_same(weights_of(first, second), weights_of(*twins))


def test_validation_of_another_model_part():
    """Agnostic-SAM whose validation loss uses one of the two models only."""
    first, second = chain()
    w = weights_of(first, second)
    optimizer = AgnosticSAM([*first.parameters(), *second.parameters()], lr=0.1, rho_train=0.2, rho_val=0.1)
    x, _ = MLP.batch(seed=7)

    def val():
        first(x).square().mean().backward()

    optimizer.step(partial(chained, first, second), val)
    model = nn.ModuleList(chain())
    assert any(not torch.equal(w[k], v) for k, v in weights_of(first, second).items())

    def grad(at, on):
        for k, p in model.named_parameters():
            p.data.copy_(at[k])
        model.zero_grad()
        chained(*model) if on == "train" else model[0](x).square().mean().backward()
        return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}

    h_v = references.unit(grad(references.plus(w, references.unit(grad(w, "val")), 0.1), "val"))
    w_t = references.plus(references.plus(w, references.unit(grad(w, "train")), 0.2), h_v, -0.1)
    assert distance(weights_of(first, second), references.plus(w, grad(w_t, "train"), -0.1)) < 1e-13


def test_closures_of_several_validation_batches_are_unchanged():
    model, twin = MLP.model(), MLP.model()
    a, b = (AgnosticSAM(m.parameters(), lr=0.1) for m in (model, twin))
    a.step(**closures_of(MLP, model))
    for on in b.passes():
        x, y = MLP.batch(seed=7) if on == "val" else MLP.batch()
        MLP.loss_fn(twin(x), y).backward()
    assert_same(params_of(model), params_of(twin))
