"""SharpMAML: every variant against plain autograd and against learn2learn; what it costs, saves and refuses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metasam import SAM, SharpMAML, Task
from metasam.meta import VARIANTS
from metasam.rules import DirectionRule, LookSAM, Plain, Sharp

from . import references
from .cases import (
    CONV,
    ENGINES,
    MLP,
    RULES,
    assert_same,
    distance,
    each_engine,
    each_problem,
    gradients,
    params_of,
    slope,
)

each_variant = pytest.mark.parametrize("variant", VARIANTS)
SGD = torch.optim.SGD
RHO = {"low": 0.1, "up": 0.2}


def maml(problem=MLP, model=None, **settings):
    settings = {"inner_lr": 0.1, "inner_steps": 2, "variant": "both", **settings}
    slots = VARIANTS.get(settings["variant"], (False, False))
    if "inner_rule" not in settings and "outer_rule" not in settings and "rule" not in settings:
        settings = {**{f"rho_{k}": r for (k, r), on in zip(RHO.items(), slots, strict=True) if on}, **settings}
    return SharpMAML(problem.model() if model is None else model, problem.loss_fn, **settings)


def meta_step(learner, tasks):
    """The gradient that the outer optimizer was given."""
    home = params_of(learner.model)
    learner.step(tasks, SGD(learner.model.parameters(), lr=1.0))
    return {k: home[k] - p for k, p in params_of(learner.model).items() if learner.model.get_parameter(k).requires_grad}


def wanted_step(problem, tasks, variant, through=True, steps=2, **settings):
    """Loss and outer gradient of a variant of Sharp-MAML by plain autograd."""
    inner, outer = VARIANTS[variant]
    step = partial(references.sam, rho=RHO["low"], through=through) if inner else references.plain
    take = partial(references.sharp_meta_gradient, rho=RHO["up"]) if outer else references.meta_gradient
    return take(problem.model(), problem.loss_fn, tasks, step, 0.1, steps, **settings)


# the gradient


@each_engine
@each_problem
@each_variant
def test_every_variant_equals_plain_autograd(variant, problem, engine):
    tasks = problem.tasks()
    learner = maml(problem, variant=variant, engine=engine)
    _, wanted = wanted_step(problem, tasks, variant)
    assert distance(meta_step(learner, tasks), wanted) < 1e-12


@each_engine
@pytest.mark.parametrize("through", [True, False], ids=["through", "constant"])
@pytest.mark.parametrize("first_order", [True, False], ids=["first", "second"])
@each_variant
def test_first_order_and_constant_eps(variant, first_order, through, engine):
    tasks = CONV.tasks()
    given = {"through": through} if VARIANTS[variant][0] else {}
    learner = maml(CONV, variant=variant, engine=engine, first_order=first_order, **given)
    _, wanted = wanted_step(CONV, tasks, variant, through, first_order=first_order)
    assert distance(meta_step(learner, tasks), wanted) < 1e-12


def test_first_order_is_the_gradient_at_the_adapted_parameters():
    model, tasks = MLP.model(), MLP.tasks(1)
    found = meta_step(maml(model=model, variant="none", first_order=True), tasks)
    task, adapted = tasks.unbind()[0], MLP.model()
    for _ in range(2):
        for p, g in zip(
            adapted.parameters(),
            gradients(MLP.loss_fn(adapted(task.support[0]), task.support[1]), adapted).values(),
            strict=True,
        ):
            p.data -= 0.1 * g
    assert distance(found, gradients(MLP.loss_fn(adapted(task.query[0]), task.query[1]), adapted)) < 1e-12


@each_engine
@each_variant
def test_anil_adapts_the_head_alone(variant, engine):
    tasks = MLP.tasks()
    learner = maml(variant=variant, engine=engine, inner_params=["2.*"])
    _, wanted = wanted_step(MLP, tasks, variant, adapted={"2.weight", "2.bias"})
    assert distance(meta_step(learner, tasks), wanted) < 1e-12


@each_engine
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_reused_displacements_follow_equation_14(engine, chunk_size):
    tasks = MLP.tasks()
    learner = maml(engine=engine, reuse_inner_eps=True, chunk_size=chunk_size)
    first, second = references.reusing(RHO["low"])
    model, w = MLP.model(), {k: p.detach() for k, p in MLP.model().named_parameters()}
    _, h = references.meta_gradient(model, MLP.loss_fn, tasks, first, 0.1, 2)
    moved = references.plus(w, references.unit(h), RHO["up"])
    _, wanted = references.meta_gradient(model, MLP.loss_fn, tasks, second, 0.1, 2, at=moved)
    assert distance(meta_step(learner, tasks), wanted) < 1e-12
    _, recomputed = wanted_step(MLP, tasks, "both")
    assert distance(wanted, recomputed) > 1e-4


@each_variant
def test_meta_loss_is_the_plain_one_and_its_gradient_its_slope(variant):
    model, tasks = CONV.model(), CONV.tasks()
    learner = maml(CONV, model, variant=variant)
    loss, _ = wanted_step(CONV, tasks, variant)
    torch.testing.assert_close(learner.meta_loss(tasks).detach(), loss, rtol=1e-13, atol=0)
    found, wanted = slope(lambda: learner.meta_loss(tasks), model)
    assert found == pytest.approx(wanted, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("case", RULES, ids=lambda c: c.name)
def test_every_rule_works_in_both_slots(case):
    tasks = MLP.tasks()
    inner = {} if case.rule == Plain() or case.refused else {"inner_rule": case.rule}
    learner = maml(variant=None, **inner, outer_rule=case.rule)
    home, batches = params_of(learner.model), {"train": tasks, "val": MLP.tasks(seed=9)}
    learner.step(tasks, SGD(learner.model.parameters(), lr=0.1), val_tasks=batches["val"])

    def grad(w, on="train"):
        step, validates = (references.plain, False) if case.refused else (case.reference, case.rule.validates)
        return references.meta_gradient(MLP.model(), MLP.loss_fn, batches[on], step, 0.1, 2, at=w, validates=validates)[
            1
        ]

    assert distance(params_of(learner.model), case.reference(grad, home, 0.1, {})) < 1e-12


@each_variant
@each_engine
def test_a_trajectory_of_ten_adam_steps(variant, engine):
    model, other = MLP.model(), MLP.model()
    learner = maml(model=model, variant=variant, engine=engine)
    optimizer, adam = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, other))
    inner, outer = VARIANTS[variant]
    step = partial(references.sam, rho=RHO["low"]) if inner else references.plain
    take = partial(references.sharp_meta_gradient, rho=RHO["up"]) if outer else references.meta_gradient
    for i in range(10):
        tasks = MLP.tasks(2, seed=i)
        loss = learner.step(tasks, optimizer)
        wanted, g = take(other, MLP.loss_fn, tasks, step, 0.1, 2)
        for k, p in other.named_parameters():
            p.grad = g[k]
        adam.step()
        torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=0)
    assert distance(params_of(model), params_of(other)) < 1e-11


@pytest.fixture(scope="module")
def learn2learn_maml():
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        module = pytest.importorskip("learn2learn.algorithms.maml", exc_type=ImportError)
    return module.MAML


@pytest.mark.parametrize("first_order", [False, True], ids=["second", "first"])
@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
@each_engine
def test_none_equals_learn2learn(problem, first_order, engine, learn2learn_maml):
    model, tasks = problem.model(), problem.tasks()
    theirs = learn2learn_maml(model, lr=0.1, first_order=first_order)
    total = 0.0
    for task in tasks.unbind():
        clone = theirs.clone()
        for _ in range(2):
            clone.adapt(problem.loss_fn(clone(task.support[0]), task.support[1]))
        total += problem.loss_fn(clone(task.query[0]), task.query[1]) / 3
    wanted = gradients(total, model)
    learner = maml(problem, variant="none", engine=engine, first_order=first_order)
    assert distance(gradients(learner.meta_loss(tasks), learner.model), wanted) < 1e-12


# tasks of all shapes


@each_engine
@each_variant
def test_chunks_change_nothing(variant, engine):
    tasks = CONV.tasks(5)
    found = [meta_step(maml(CONV, variant=variant, engine=engine, chunk_size=c), tasks) for c in (None, 1, 2, 7)]
    for one in found[1:]:
        assert distance(one, found[0]) < 1e-13


@each_engine
def test_a_list_of_tasks_is_their_batch(engine):
    tasks = MLP.tasks(3)
    wanted = meta_step(maml(engine=engine), tasks)
    assert distance(meta_step(maml(engine=engine), tasks.unbind()), wanted) < 1e-13
    assert distance(meta_step(maml(engine=engine), iter(tasks.unbind())), wanted) < 1e-13


@each_engine
def test_tasks_of_different_sizes(engine):
    one, two = CONV.tasks(2).unbind()
    ragged = [one, Task(tuple(t[:3] for t in two.support), tuple(t[:4] for t in two.query))]
    learner = maml(CONV, engine=engine, variant="low")
    losses = [float(learner.meta_loss([t]).detach()) for t in ragged]
    assert float(learner.meta_loss(ragged).detach()) == pytest.approx(sum(losses) / 2, rel=1e-13)
    learner.step(ragged, SGD(learner.model.parameters(), 0.1))
    assert learner.evaluate(ragged).n == 2


def test_batches_of_different_sizes_weigh_by_their_tasks():
    learner = maml(CONV)
    classes = CONV.tasks(3)
    parts = [classes.map(lambda t: t[:1]), classes.map(lambda t: t[1:])]
    torch.testing.assert_close(learner.meta_loss(parts), learner.meta_loss(classes), rtol=1e-13, atol=0)
    assert distance(meta_step(maml(CONV), parts), meta_step(maml(CONV), classes)) < 1e-13


# what it costs


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("variant", "supports", "queries", "passes"),
    [("none", 1, 1, 1), ("low", 2, 1, None), ("up", 2, 2, 2), ("both", 4, 2, None)],
)
@each_engine
def test_cost_of_a_step(variant, supports, queries, passes, steps, engine):
    learner = maml(variant=variant, engine=engine, inner_steps=steps)
    learner.step(MLP.tasks(4), SGD(learner.model.parameters(), 0.1))
    assert learner.counts == {"support": 4 * steps * supports, "query": 4 * queries, "forward": 0}
    one = passes or queries * (2 * steps + 1) / (steps + 1)
    assert learner.gradient_evaluations == pytest.approx(one)
    learner.evaluate(MLP.tasks(4))
    learner.step(MLP.tasks(2), SGD(learner.model.parameters(), 0.1))
    assert learner.gradient_evaluations == pytest.approx(2 * one)


@pytest.fixture
def live_tensors():
    """Count the tensors that came after this call and are still there."""
    gc.collect()
    gc.freeze()

    def count():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    yield count
    gc.unfreeze()


@pytest.mark.parametrize(
    ("engine", "policy", "reuse"),
    [("higher", "per_step", False), ("higher", "batch", True), ("vmap", "batch", False), ("vmap", "frozen", True)],
)
def test_nothing_piles_up_over_steps_and_evaluations(engine, policy, reuse, live_tensors):
    learner, tasks = maml(CONV, engine=engine, batchnorm=policy, reuse_inner_eps=reuse), CONV.tasks(2)
    optimizer = torch.optim.Adam(learner.model.parameters(), 0.01)

    def work(times):
        for _ in range(times):
            learner.step(tasks, optimizer)
            learner.evaluate(tasks)
            learner.adapt(tasks.unbind()[0])
        return live_tensors()

    work(1)
    before = work(1)
    assert before > 0
    assert work(5) == before


# evaluation and adaptation


@each_engine
@each_variant
def test_evaluation_leaves_everything_as_it_was(variant, engine):
    learner, tasks = maml(CONV, variant=variant, engine=engine), CONV.tasks()
    learner.model[0].weight.grad = torch.ones_like(learner.model[0].weight)
    home, counts = copy.deepcopy(learner.model.state_dict()), learner.counts
    found = learner.evaluate(tasks)
    assert_same(dict(learner.model.state_dict()), dict(home))
    assert torch.equal(learner.model[0].weight.grad, torch.ones_like(learner.model[0].weight))
    assert learner.model[4].weight.grad is None
    assert learner.counts == counts
    assert learner.model.training
    assert not any(isinstance(v, torch.Tensor) for v in found)


@each_engine
def test_evaluation_judges_the_adapted_parameters(engine):
    tasks, learner = CONV.tasks(4), maml(CONV, variant="low", engine=engine)
    found = learner.evaluate(tasks)
    accuracies, losses = [], []
    for task in tasks.unbind():
        model = CONV.model()
        w, memory = {k: p.detach() for k, p in model.named_parameters()}, {}
        for _ in range(2):
            w = references.sam(references.gradient_of(model, CONV.loss_fn, *task.support), w, 0.1, memory, rho=0.1)
        out = references.call(model, w, task.query[0])
        accuracies.append(float((out.argmax(1) == task.query[1]).double().mean()))
        losses.append(float(CONV.loss_fn(out, task.query[1])))
    assert found.per_task == pytest.approx(accuracies)
    assert found.accuracy == pytest.approx(sum(accuracies) / 4)
    assert found.loss == pytest.approx(sum(losses) / 4, rel=1e-12)
    assert found.ci95 == pytest.approx(1.96 * float(torch.tensor(accuracies, dtype=torch.float64).std()) / 2)
    assert (found.n, found.transductive) == (4, True)


def test_evaluation_of_regression_and_of_one_task():
    found = maml().evaluate(MLP.tasks(3))
    assert found.accuracy is None
    assert found.ci95 == found.loss_ci95 > 0
    assert sum(found.per_task) / 3 == pytest.approx(found.loss)
    assert math.isnan(maml().evaluate(MLP.tasks(1)).ci95)


def test_evaluation_in_batches_equals_evaluation_at_once():
    tasks, learner = CONV.tasks(6), maml(CONV)
    batches = [tasks.map(lambda t, i=i: t[i : i + 2]) for i in (0, 2, 4)]
    once = learner.evaluate(tasks)
    for several in (iter(batches), tasks.unbind(), [tasks.unbind()[0], tasks.map(lambda t: t[1:])]):
        found = learner.evaluate(several)
        assert found.per_task == once.per_task
        assert found.loss == pytest.approx(once.loss, rel=1e-12)


def test_evaluation_with_or_without_sam_and_with_other_steps():
    tasks = MLP.tasks()
    low, none = maml(variant="low", rho_low=0.5), maml(variant="none")
    assert low.evaluate(tasks, plain=True) == none.evaluate(tasks)
    assert low.evaluate(tasks).loss != none.evaluate(tasks).loss
    longer = maml(variant="low", rho_low=0.5, inner_steps=5)
    assert low.evaluate(tasks, steps=5).loss == pytest.approx(longer.evaluate(tasks).loss, rel=1e-13)
    with pytest.raises(ValueError, match="steps"):
        low.evaluate(tasks, steps=0)


@pytest.mark.parametrize("policy", ["batch", "frozen", "per_step"])
@pytest.mark.parametrize("engine", ["higher", "auto"])
def test_an_adapted_model_predicts_as_the_engine_did_and_pickles(engine, policy):
    learner, tasks = maml(CONV, engine=engine, batchnorm=policy), CONV.tasks(1)
    learner.step(CONV.tasks(3, seed=5), SGD(learner.model.parameters(), 0.1))
    with torch.no_grad(), learner._ready(loop := learner._judging(None, False), tasks):
        wanted = learner._adapt(loop, tasks).output[0]
    adapted = learner.adapt(tasks.unbind()[0])
    assert type(adapted) is nn.Sequential
    for model in (adapted, pickle.loads(pickle.dumps(adapted)), copy.deepcopy(adapted)):
        torch.testing.assert_close(model(tasks.query[0][0]), wanted, rtol=1e-13, atol=1e-15)
        assert not model.training
        assert all(p.is_leaf and p.requires_grad and p.grad is None for p in model.parameters())
    shared = {p.data_ptr() for p in learner.model.parameters()} & {p.data_ptr() for p in adapted.parameters()}
    assert not shared


@each_engine
@each_problem
def test_every_problem_adapts(problem, engine):
    learner, task = maml(problem, engine=engine), problem.tasks(1).unbind()[0]
    home = params_of(learner.model)
    adapted = learner.adapt(task)
    assert_same(params_of(learner.model), home)
    x, y = task.support
    assert problem.loss_fn(adapted(x), y) < problem.loss_fn(learner.adapt(task, steps=1, plain=True)(x), y) * 1.1
    frozen = {k for k, p in learner.model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(adapted.get_parameter(k), home[k]) for k in frozen)


# training


@each_variant
def test_a_step_reports_the_clean_loss_and_accuracy(variant):
    learner, tasks = maml(CONV, variant=variant), CONV.tasks()
    wanted = learner.evaluate(tasks)
    loss = learner.step(tasks, SGD(learner.model.parameters(), 0.1))
    assert not loss.requires_grad
    assert float(loss) == learner.last.loss == pytest.approx(wanted.loss, rel=1e-12)
    assert learner.last.accuracy == pytest.approx(wanted.accuracy)
    assert not learner.last.skipped


@each_variant
@each_engine
def test_training_lowers_the_meta_loss(variant, engine):
    learner, tasks = maml(variant=variant, engine=engine, rho_low=None, rho_up=None), MLP.tasks(4)
    optimizer = torch.optim.Adam(learner.model.parameters(), 0.02)
    losses = [float(learner.step(tasks, optimizer)) for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]


@each_engine
@pytest.mark.parametrize("where", ["support", "query"])
def test_a_non_finite_meta_gradient_is_skipped_and_counted(where, engine):
    learner, tasks = maml(engine=engine, variant="both"), MLP.tasks()
    optimizer = torch.optim.Adam(learner.model.parameters(), 0.01)
    learner.step(tasks, optimizer)
    home = params_of(learner.model)
    spoiled = tasks.map(torch.clone)
    getattr(spoiled, where)[0][1, 0, 0] = float("nan")
    learner.step(spoiled, optimizer)
    assert learner.last.skipped
    assert learner.skipped == 1
    assert_same(params_of(learner.model), home)
    learner.step(tasks, optimizer)
    assert learner.skipped == 1
    assert not learner.last.skipped


def test_an_error_in_the_second_outer_pass_restores_the_model():
    model, tasks, calls = MLP.model(), MLP.tasks(2), []
    home = params_of(model)

    def loss_fn(output, y):
        calls.append(1)
        if len(calls) > 10:
            raise RuntimeError("stop")
        return MLP.loss_fn(output, y)

    learner = SharpMAML(model, loss_fn, inner_lr=0.1, inner_steps=2, variant="up", rho_up=0.5, engine="higher")
    with pytest.raises(RuntimeError, match="stop"):
        learner.step(tasks, SGD(model.parameters(), 0.1))
    assert_same(params_of(model), home)


def test_parameters_may_be_frozen_between_steps():
    learner, tasks = maml(), MLP.tasks()
    optimizer = SGD(learner.model.parameters(), 0.1)
    learner.step(tasks, optimizer)
    learner.model[0].requires_grad_(False)
    home = params_of(learner.model[0])
    learner.step(tasks, optimizer)
    assert_same(params_of(learner.model[0]), home)
    assert_same(params_of(learner.adapt(tasks.unbind()[0])[0]), home)


@each_engine
def test_dtypes(engine):
    for dtype in (torch.float32, torch.bfloat16):
        learner = maml(CONV, CONV.model(dtype), engine=engine)
        tasks = CONV.tasks(2, dtype)
        learner.step(tasks, SGD(learner.model.parameters(), 0.1))
        assert {p.dtype for p in learner.model.parameters()} == {dtype}
        assert all(p.isfinite().all() for p in learner.model.parameters())
        assert 0 <= learner.evaluate(tasks).accuracy <= 1


# state


def outer_state(learner):
    return {
        f"{k}.{n}": t for k, v in (learner._outer_now[0] or {}).items() if isinstance(v, dict) for n, t in v.items()
    }


@pytest.mark.parametrize(
    "settings", [{}, {"batchnorm": "per_step"}, {"rho_up": None, "outer_rule": LookSAM(0.1, 2)}], ids=str
)
def test_a_resumed_run_continues_bit_for_bit(settings):
    def build(seed):
        learner = maml(CONV, CONV.model(torch.float32, seed), **{"rho_low": 0.1, "rho_up": 0.2, **settings})
        return learner, torch.optim.Adam(learner.model.parameters(), 0.01)

    def go(learner, optimizer):
        for seed in range(3):
            learner.step(CONV.tasks(2, torch.float32, seed), optimizer)

    learner, optimizer = build(1)
    go(learner, optimizer)
    file = io.BytesIO()
    torch.save((learner.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other, other_optimizer = build(7)
    state, adam = torch.load(file, weights_only=True)
    other.load_state_dict(state)
    other_optimizer.load_state_dict(adam)
    for pair in ((learner, optimizer), (other, other_optimizer)):
        go(*pair)
    assert_same(dict(other.model.state_dict()), dict(learner.model.state_dict()))
    assert_same(outer_state(other), outer_state(learner))
    if learner.loop.per_step is not None:
        assert_same(other.loop.per_step.buffers, learner.loop.per_step.buffers)
    assert other.counts == learner.counts
    assert other.gradient_evaluations == learner.gradient_evaluations


def test_loading_copies():
    learner, other = maml(outer_rule=LookSAM(0.1, 2), rho_up=None), maml(outer_rule=LookSAM(0.1, 2), rho_up=None)
    learner.step(MLP.tasks(), SGD(learner.model.parameters(), 0.1))
    other.load_state_dict(learner.state_dict())
    known = {k: v.clone() for k, v in outer_state(other).items()}
    learner.step(MLP.tasks(seed=3), SGD(learner.model.parameters(), 0.1))
    assert_same(outer_state(other), known)


def test_loading_into_a_running_learner():
    learner = maml(outer_rule=LookSAM(0.1, 2), rho_up=None)
    optimizer = SGD(learner.model.parameters(), 0.1)
    learner.step(MLP.tasks(), optimizer)
    saved = copy.deepcopy(learner.state_dict())
    learner.step(MLP.tasks(), optimizer)
    wanted = params_of(learner.model)
    learner.load_state_dict(saved)
    learner.step(MLP.tasks(), optimizer)
    assert_same(params_of(learner.model), wanted)


def test_a_second_optimizer_keeps_the_rules_state():
    tasks, wanted = MLP.tasks(), maml(outer_rule=LookSAM(0.1, 2), rho_up=None)
    one = SGD(wanted.model.parameters(), 0.1)
    learner = maml(outer_rule=LookSAM(0.1, 2), rho_up=None)
    for _ in range(3):
        wanted.step(tasks, one)
        learner.step(tasks, SGD(learner.model.parameters(), 0.1))
    assert_same(params_of(learner.model), params_of(wanted.model))
    assert learner._outer_now[0]["step"] == 3


def test_the_optimizer_holds_its_radius_and_may_schedule_it():
    learner, tasks = maml(), MLP.tasks()
    optimizer = SGD(learner.model.parameters(), 1.0)
    learner.step(tasks, optimizer)
    assert optimizer.param_groups[0]["rho"] == RHO["up"]
    twin = maml(model=copy.deepcopy(learner.model), rho_up=0.9)
    optimizer.param_groups[0]["rho"] = 0.9
    learner.step(tasks, optimizer)
    twin.step(tasks, SGD(twin.model.parameters(), 1.0))
    assert_same(params_of(learner.model), params_of(twin.model))


# settings


def test_where_rules_are_given_they_make_the_variant():
    def variant(**settings):
        return maml(variant=None, **settings)

    assert variant().variant == "both"
    assert variant(inner_rule="sam").variant == "low"
    assert variant(outer_rule="sam").variant == "up"
    assert variant(inner_rule="asam", outer_rule=Sharp(0.2)).variant == "both"
    assert variant(inner_rule="plain").variant == "none"
    assert variant(inner_rule="plain").inner_rule == Plain()
    learner = maml(inner_rule="asam", rule="usam", rho_low=0.2, variant="both")
    assert (learner.inner_rule.rho, type(learner.outer_rule.perturb).__name__) == (0.2, "Unnormalised")
    assert maml(variant="low", through=False).inner_rule == Sharp(0.1, through=False)


def tasks_with(**changes):
    tasks = CONV.tasks()
    (sx, sy), (qx, qy) = tasks.support, tasks.query
    fields = {"sx": sx, "sy": sy, "qx": qx, "qy": qy}
    fields.update({k: f(fields[k]) for k, f in changes.items()})
    return Task((fields["sx"], fields["sy"]), (fields["qx"], fields["qy"]))


BAD_TASKS = {
    "a label too high": (tasks_with(sy=lambda y: y + 2), r"support labels in 0\.\.2"),
    "a label too high in the queries": (tasks_with(qy=lambda y: y + 2), r"query labels in 0\.\.2"),
    "a negative label": (tasks_with(sy=lambda y: y - 1), "labels in"),
    "a single task": (CONV.tasks().unbind()[0], r"pass \[task\]"),
    "numbers of tasks differ": (tasks_with(qx=lambda x: x[:2], qy=lambda y: y[:2]), "one T in all four"),
    "x and y differ": (tasks_with(sx=lambda x: x[:, :2]), "as many examples in x as in y"),
    "no tasks": ([], "none"),
    "an empty batch": (CONV.tasks().map(lambda t: t[:0]), "at least one task"),
    "no support": (tasks_with(sx=lambda x: x[:, :0], sy=lambda y: y[:, :0]), "at least one task"),
    "no queries": (tasks_with(qx=lambda x: x[:, :0], qy=lambda y: y[:, :0]), "one query example"),
    "something else": ([CONV.tasks(), "task"], "got str"),
}


@pytest.mark.parametrize(("tasks", "message"), BAD_TASKS.values(), ids=BAD_TASKS)
@each_engine
def test_bad_tasks(tasks, message, engine):
    learner = maml(CONV, engine=engine)
    home = params_of(learner.model)
    for use in (learner.meta_loss, learner.evaluate, lambda t: learner.step(t, SGD(learner.model.parameters(), 0.1))):
        with pytest.raises(
            ValueError,
            match="expected at least one task to evaluate" if tasks == [] and use == learner.evaluate else message,
        ):
            use(tasks)
    assert_same(params_of(learner.model), home)


def test_labels_are_checked_in_every_batch():
    learner = maml(CONV)
    learner.meta_loss(CONV.tasks())
    with pytest.raises(ValueError, match="labels"):
        learner.meta_loss(tasks_with(qy=lambda y: y + 2))


def test_a_single_regression_task_is_no_batch():
    line = nn.Linear(1, 1).double()
    x = torch.randn(6, 1, dtype=torch.float64)
    learner = SharpMAML(line, MLP.loss_fn, inner_lr=0.1, inner_steps=1)
    with pytest.raises(ValueError, match=r"pass \[task\]"):
        learner.meta_loss(Task((x, x), (x, x)))
    assert learner.evaluate([Task((x, x), (x, x))]).n == 1


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (partial(nn.functional.mse_loss, reduction="none"), "scalar tensor, got shape"),
        (lambda output, y: 1.0, "got float"),
        (lambda output, y: y.mean(), "depends on the parameters"),
    ],
    ids=["shape", "float", "constant"],
)
def test_bad_losses(loss_fn, message, engine):
    learner = SharpMAML(MLP.model(), loss_fn, inner_lr=0.1, inner_steps=1, engine=engine)
    with pytest.raises(ValueError, match=message):
        learner.meta_loss(MLP.tasks())


def frozen_model():
    return MLP.model().requires_grad_(False)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": nn.Tanh()}, ValueError, "Tanh has no parameters"),
        ({"model": frozen_model()}, ValueError, "only frozen parameters"),
        ({"model": nn.LazyLinear(1)}, ValueError, "call the model once"),
        ({"model": len}, TypeError, r"torch\.nn\.Module"),
        ({"model": nn.DataParallel(nn.Linear(1, 1))}, TypeError, r"model\.module"),
        ({"loss_fn": 3}, TypeError, "callable"),
        ({"inner_lr": float("nan")}, ValueError, "inner_lr > 0"),
        ({"inner_lr": 0.0}, ValueError, "inner_lr > 0"),
        ({"inner_lr": "0.1"}, ValueError, "inner_lr > 0"),
        ({"inner_steps": 0}, ValueError, "inner_steps to be an integer >= 1"),
        ({"inner_steps": 1.5}, ValueError, "inner_steps"),
        ({"inner_steps": True}, ValueError, "inner_steps"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        ({"variant": "lower"}, ValueError, "none, low, up, both"),
        ({"rule": "smm"}, ValueError, "did you mean 'sam'"),
        ({"rule": 3}, TypeError, "its name"),
        ({"engine": "jax"}, ValueError, "engine among auto, higher, vmap"),
        ({"batchnorm": "running"}, ValueError, "batchnorm among batch, per_step, frozen"),
        ({"rule": Sharp(0.1), "rho_low": 0.1}, ValueError, "instance"),
        ({"rule": Sharp(0.1), "rho_up": 0.1}, ValueError, "instance"),
        ({"rho_low": -0.1}, ValueError, "rho"),
        ({"rho_up": float("nan")}, ValueError, "rho"),
        ({"variant": "low", "rho_up": 0.1}, ValueError, "rho_up=0.1 has no rule"),
        ({"variant": "up", "rho_low": 0.1}, ValueError, "rho_low=0.1 has no rule"),
        ({"variant": "up", "inner_rule": "sam"}, ValueError, "contradict"),
        ({"variant": "low", "inner_rule": "plain"}, ValueError, "contradict"),
        ({"variant": "none", "outer_rule": Sharp()}, ValueError, "contradict"),
        ({"variant": "low", "reuse_inner_eps": True}, ValueError, "needs variant='both'"),
        ({"inner_params": ["head.*"]}, ValueError, "matches no trainable parameter"),
        ({"inner_params": []}, ValueError, "inner_params"),
        ({"inner_params": "2.*"}, ValueError, "list of patterns"),
        ({"rule": "asam", "inner_params": ["*bias"]}, ValueError, "ASAM"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else "",
)
def test_bad_settings(settings, error, message):
    settings = {"model": MLP.model(), "loss_fn": MLP.loss_fn, "inner_lr": 0.1, "inner_steps": 2, **settings}
    with pytest.raises(error, match=message):
        SharpMAML(settings.pop("model"), settings.pop("loss_fn"), **settings)


def test_complex_parameters_are_refused_where_an_inner_rule_would_meet_them():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"real parameters for Sharp in the inner loop.*\(1\.weight, 1\.bias\)"):
        SharpMAML(model, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="low")
    SharpMAML(model, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="up")
    SharpMAML(model, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="low", inner_params=["0.*"])


def test_sharpness_aware_optimizers_are_refused():
    learner = maml()
    with pytest.raises(TypeError, match="sharpness-aware already"):
        learner.step(MLP.tasks(), SAM(learner.model.parameters()))


def test_optimizers_of_another_model_are_refused():
    learner = maml()
    with pytest.raises(ValueError, match="among them"):
        learner.step(MLP.tasks(), SGD(MLP.model().parameters(), 0.1))


@pytest.mark.parametrize("where", [{}, {"inner_rule": "agnostic"}], ids=["outer", "both"])
def test_an_outer_rule_that_validates_asks_for_held_out_tasks(where):
    learner = maml(variant=None, outer_rule="agnostic", **where)
    optimizer, home = SGD(learner.model.parameters(), 0.1), params_of(learner.model)
    with pytest.raises(
        TypeError, match=r"Agnostic in the outer loop asks for held-out tasks: step\(\.\.\., val_tasks="
    ):
        learner.step(MLP.tasks(2), optimizer)
    assert_same(params_of(learner.model), home)
    learner.step(MLP.tasks(2), optimizer, val_tasks=MLP.tasks(1, seed=8))


def test_an_inner_rule_that_validates_needs_no_held_out_tasks():
    learner = maml(variant=None, inner_rule="agnostic", rho_low=0.1)
    assert (learner.inner_rule.rho_train, learner.inner_rule.rho_val) == (0.2, 0.1)
    learner.step(MLP.tasks(2), SGD(learner.model.parameters(), 0.1))
    # 2 steps, each 2 evaluations of 4 of 5 examples and 2 of 1
    assert learner.counts == pytest.approx({"support": 2 * 2 * 2, "query": 2, "forward": 0})


def test_held_out_tasks_reach_the_outer_rule():
    from .test_optim import OnVal

    learner = maml(variant=None, outer_rule=OnVal())
    train, val = MLP.tasks(2), MLP.tasks(2, seed=8)
    with pytest.raises(TypeError, match="val"):
        learner.step(train, SGD(learner.model.parameters(), 0.1))
    home = params_of(learner.model)
    learner.step(train, SGD(learner.model.parameters(), 1.0), val_tasks=val)
    found = {k: home[k] - p for k, p in params_of(learner.model).items()}
    _, wanted = references.meta_gradient(MLP.model(), MLP.loss_fn, val, references.plain, 0.1, 2)
    assert distance(found, wanted) < 1e-12


# what fresh eyes found


def _agree(model, task, **settings):
    """Gradients of the meta-loss on both engines, largest difference; and what auto takes."""
    found = []
    for engine in ("higher", "auto"):
        learner = SharpMAML(model, F.cross_entropy, inner_lr=0.5, inner_steps=2, engine=engine, **settings)
        model.zero_grad()
        learner.meta_loss(task).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), learner


class _Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


def test_a_padding_word_is_not_trained():
    torch.manual_seed(0)
    model = _Words().double()
    x, y = torch.randint(10, (3, 6, 5)), torch.arange(6).remainder(3).expand(3, 6)
    x[..., 0] = 0
    difference, learner = _agree(model, Task((x, y), (x.flip(1), y.flip(1))), variant="none")
    assert difference < 1e-15
    assert "Embedding 'words'" in learner.engine_reason
    assert torch.equal(model.words.weight.grad[0], torch.zeros(4, dtype=torch.float64))


def test_a_transformer_layer_trains_and_is_judged():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(2, 6, 3, 4, dtype=torch.float64), torch.arange(6).remainder(3).expand(2, 6)
    task = Task((x, y), (x + 0.1, y))
    difference, learner = _agree(model, task, variant="both")
    assert difference < 1e-12
    assert learner.engine_used == "vmap"
    before = torch.backends.mha.get_fastpath_enabled()
    loss = learner.evaluate(task).loss
    assert torch.backends.mha.get_fastpath_enabled() == before
    adapted = learner.adapt(task.unbind()[0])
    assert F.cross_entropy(adapted(task.query[0][0]), y[0]).item() == pytest.approx(
        learner.evaluate([task.unbind()[0]]).loss, rel=1e-9
    )
    assert loss > 0


@pytest.mark.parametrize("engine", ["higher", "vmap"])
def test_an_instance_norm_that_tracks_does_not_leak(engine):
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 3))
    before = copy.deepcopy(norm.state_dict())
    x, y = torch.randn(2, 6, 3, 4), torch.arange(6).remainder(3).expand(2, 6)
    learner = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="both", engine=engine)
    learner.step(Task((x, y), (x, y)), torch.optim.SGD(model.parameters(), lr=0.0))
    learner.evaluate(Task((x, y), (x, y)))
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


def test_batches_and_single_tasks_with_images_or_numbers_for_targets_are_told_apart():
    torch.manual_seed(0)
    image = torch.randn(4, 6, 1, 8, 8)
    learner = SharpMAML(nn.Conv2d(1, 1, 3, padding=1), F.mse_loss, inner_lr=0.1, inner_steps=1, variant="low")
    batch = Task((image, image), (image, image))
    whole = learner.evaluate(batch)
    assert learner.evaluate(batch.unbind()).per_task == pytest.approx(whole.per_task, rel=1e-5)
    assert learner.evaluate([batch, batch]).n == 8
    flat = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    x, y = torch.randn(4, 10, 2), torch.randn(4, 10)
    learner = SharpMAML(flat, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="low", engine="higher")
    one = learner.evaluate([Task((x, y), (x, y))])
    assert one.n == 4
    assert one.loss == pytest.approx(learner.evaluate(Task((x, y), (x, y))).loss)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_in_small_integers(dtype):
    torch.manual_seed(0)
    learner = SharpMAML(nn.Linear(2, 3), F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none")
    x, y = torch.randn(2, 6, 2), torch.arange(6).remainder(3).expand(2, 6)
    wanted = learner.meta_loss(Task((x, y), (x, y)))
    assert torch.equal(learner.meta_loss(Task((x, y.to(dtype)), (x, y.to(dtype)))), wanted)


def test_an_old_style_weight_norm_is_not_taken_by_vmap():
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(2, 3)))
    learner = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none")
    x, y = torch.randn(2, 6, 2), torch.arange(6).remainder(3).expand(2, 6)
    learner.meta_loss(Task((x, y), (x, y)))
    assert learner.engine_used == "higher"
    assert "parametrizations.weight_norm" in learner.engine_reason


def test_a_pruned_layer_is_not_taken_by_vmap():
    model = nn.Sequential(nn.Linear(2, 3))
    torch.nn.utils.prune.random_unstructured(model[0], "weight", amount=0.5)
    learner = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none")
    x, y = torch.randn(2, 6, 2), torch.arange(6).remainder(3).expand(2, 6)
    learner.step(Task((x, y), (x, y)), torch.optim.SGD(model.parameters(), lr=0.1))
    assert learner.engine_used == "higher"
    assert "prune" in learner.engine_reason
    assert learner.evaluate(Task((x, y), (x, y))).n == 2


@pytest.mark.parametrize("engine", ["auto", "higher", "vmap", "traced"])
def test_a_model_is_widened_as_the_error_says(engine):
    """Where a model has its tensors is not remembered from a call that failed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    learner = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none", engine=engine)
    x, y = torch.randn(2, 6, 2), torch.arange(6).remainder(4).expand(2, 6)
    with pytest.raises(ValueError, match="widen the model's head"):
        learner.meta_loss(Task((x, y), (x, y)))
    model[1] = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    fresh = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none", engine=engine)
    wanted = fresh.meta_loss(Task((x, y), (x, y)))
    assert torch.equal(learner.meta_loss(Task((x, y), (x, y))), wanted)


@pytest.mark.parametrize("name", ["weight", "bias"])  # either may come before the other
@pytest.mark.parametrize("engine", ["higher", "vmap"])
def test_a_step_that_breaks_off_on_its_way_back_leaves_no_gradient(engine, name):
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    learner = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, variant="none", engine=engine)
    x, y = torch.randn(1, 6, 2), torch.arange(6).remainder(3).expand(1, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner.step(Task((x, y), (x, y)), optimizer)
    before = copy.deepcopy(model.state_dict())

    def fail(grad):
        raise ArithmeticError("no such luck")

    hook = getattr(model, name).register_hook(fail)
    with pytest.raises(ArithmeticError, match="no such luck"):
        learner.step(Task((x, y), (x, y)), optimizer)
    hook.remove()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert learner.steps == 1


def test_a_rule_that_needs_momentum_is_refused_in_inner_loops_of_one_step_too():
    for variant in ("low", "both"):
        with pytest.raises(ValueError, match="MomentumSAM needs a base optimizer with momentum, inner loops have none"):
            SharpMAML(torch.nn.Linear(1, 1), F.mse_loss, inner_lr=0.1, inner_steps=1, variant=variant, rule="momentum")
    SharpMAML(torch.nn.Linear(1, 1), F.mse_loss, inner_lr=0.1, inner_steps=1, variant="up", rule="momentum")


def bootstrap(part):
    """An outer rule that evaluates these tasks."""

    @dataclasses.dataclass(frozen=True)
    class Bootstrap(DirectionRule):
        def direction(self, at, params, state):
            return at(part=part).grads, state

    return Bootstrap()


@each_engine
@pytest.mark.parametrize("part", [[0, 0, 1, 1], [3, 1, 2, 0], [2, 2], slice(None, None, -1), 2], ids=str)
def test_parts_with_tasks_again_and_in_any_order(part, engine):
    tasks = MLP.tasks(4)
    given = part if isinstance(part, slice) else torch.tensor(part)
    chosen = list(range(4))[part] if isinstance(part, slice) else torch.tensor(part).reshape(-1).tolist()
    model, expected = MLP.model(), MLP.model()
    maml = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=2, outer_rule=bootstrap(given), engine=engine)
    maml.step(tasks, torch.optim.SGD(model.parameters(), lr=1.0))
    plain = SharpMAML(expected, MLP.loss_fn, inner_lr=0.1, inner_steps=2, variant="none", engine="higher")
    losses = [plain.meta_loss(tasks.map(lambda t, i=i: t[i : i + 1])) for i in chosen]
    wanted = gradients(torch.stack(losses).mean(), expected)
    moved = {k: p.detach() for k, p in model.named_parameters()}
    assert distance({k: p.detach() - moved[k] for k, p in expected.named_parameters()}, wanted) < 1e-12
