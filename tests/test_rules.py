"""The contracts that every rule meets: rules x problems x runtimes."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from metasam import SharpnessAware, Task, inner, noise, tree
from metasam.perturb import Adaptive, Unnormalised
from metasam.rules import NAMED, Agnostic, DirectionRule, Plain, Rule, Sharp, make
from metasam.types import Eval

from . import references
from .cases import (
    CONV,
    ENGINES,
    INNER,
    MLP,
    PROBLEMS,
    RULES,
    assert_same,
    closures_of,
    distance,
    each_engine,
    each_inner_rule,
    each_problem,
    each_rule,
    gradients,
    inner_loop,
    live,
    params_of,
    run_engine,
    slope,
)

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.05)


class Quadratic:
    """An oracle of ``scale * 1/2 w'Aw`` and a descent, outside every runtime; remembers what it handed out.

    The validation loss is another quadratic, around another minimum.
    """

    def __init__(self, scale: float = 1.0):
        generator = torch.Generator().manual_seed(5)
        root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        self.matrix = scale * (root @ root.T / 6 + torch.eye(6, dtype=torch.float64))
        start = torch.randn(6, generator=generator, dtype=torch.float64)
        self.val_matrix = scale * torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
        self.params = {"weight": start[:4].clone(), "bias": start[4:].clone()}
        self.handed = [self.params]
        self.calls = 0
        self.descend = Descend(self.handed)

    def __call__(self, eps=None, on="train", *, part=None, local=False, grad=True, graph=True):
        self.calls += 1
        point = tree.add(self.params, eps or {})
        w = torch.cat([point["weight"], point["bias"]])
        g = self.matrix @ w if on == "train" else self.val_matrix @ (w - 0.3)
        grads = {"weight": g[:4].clone(), "bias": g[4:].clone()}
        self.handed.append(grads)
        return Eval(0.5 * w @ g, grads)

    def noise(self, like, *key):
        return noise.normal(like, *key)

    def versions(self):
        return [t._version for given in self.handed for t in given.values()]


class Descend:
    """SGD that shows its last gradients as its momentum."""

    def __init__(self, handed):
        self.handed, self.last = handed, None

    def __call__(self, params, grads):
        moved = tree.add(params, tree.scale(grads, -0.1))
        self.handed += [params, grads, moved]
        self.last = tree.scale(grads, 1.0)
        return moved

    def lr(self, key):
        return 0.1

    def momentum(self, params):
        return self.last


# what one step is


@each_problem
@each_rule
def test_three_runtimes_take_the_steps_of_the_equations(case, problem):
    tasks = problem.tasks()
    adapted = {
        e: run_engine(e, inner_loop(problem.model(), problem, case.rule, training=False), tasks).params
        for e in case.engines
    }
    for i, task in enumerate(tasks.unbind()):
        model = problem.model()
        train, val = references.held_out(task.support) if case.rule.validates else (task.support, task.query)
        grad = references.gradient_of(model, problem.loss_fn, *train, val=val)

        def walk(memory, model=model, grad=grad):
            w = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
            for _ in range(3):
                w = case.reference(grad, w, 0.1, memory)
            return w

        w = walk({})
        found = live(problem, case.rule, train, val=val, base=case.base)
        moved = {k: p for k, p in params_of(found).items() if k in w}
        assert distance(moved, w) < 1e-12
        w = walk({"place": (0, i)})
        for engine in case.engines:
            assert distance({k: v[i] for k, v in adapted[engine].items()}, w) < 1e-12, engine


@pytest.mark.parametrize("first_order", [False, True], ids=["second", "first"])
@each_problem
@each_inner_rule
def test_meta_gradient_equals_plain_autograd(case, problem, first_order):
    model, tasks = problem.model(), problem.tasks(2)
    settings = {"first_order": first_order, "validates": case.rule.validates}
    _, wanted = references.meta_gradient(model, problem.loss_fn, tasks, case.reference, 0.1, 2, **settings)
    for engine in ENGINES:
        loop = inner_loop(model, problem, case.rule, first_order=first_order, steps=2)
        found = gradients(run_engine(engine, loop, tasks).loss.mean(), model)
        assert distance(found, wanted) < 1e-12, engine


@each_problem
@pytest.mark.parametrize("case", [c for c in INNER if getattr(c.rule, "through", True)], ids=lambda c: c.name)
def test_meta_gradient_is_the_slope_of_the_meta_loss(case, problem):
    model, tasks = problem.model(), problem.tasks(2)
    with torch.no_grad():  # the size of a filter has a kink at zero, where BatchNorm's biases start
        for p in model.parameters():
            p.masked_fill_(p == 0, 0.1)
    loop = inner_loop(model, problem, case.rule, steps=2)
    found, wanted = slope(lambda: run_engine("vmap", loop, tasks).loss.mean(), model)
    assert found == pytest.approx(wanted, rel=1e-7, abs=1e-9)


@each_engine
def test_gradcheck_of_the_meta_loss(engine):
    model, tasks = MLP.model(), MLP.tasks(2)
    loop = inner_loop(model, MLP, Sharp(0.1), steps=1)
    names = list(loop.adapted)

    def meta_loss(*values):
        return inner.ENGINES[engine](loop, dict(zip(names, values, strict=True)), tasks).loss.mean()

    values = [p.detach().requires_grad_() for p in (dict(model.named_parameters())[n] for n in names)]
    assert torch.autograd.gradcheck(meta_loss, values, atol=1e-8)


@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
@each_rule
def test_radius_zero_is_the_declared_limit(case, problem):
    rule = case.at_radius(0.0)
    for base in (MOMENTUM, ADAMW):
        assert_same(params_of(live(problem, rule, base=base)), params_of(live(problem, case.limit, base=base)))
    model, tasks = problem.model(), problem.tasks(2)
    trained = tasks
    if rule.validates:  # on what the split leaves to train on
        trained = Task(tuple(t[:, :4] for t in tasks.support), tasks.query)
    for engine in case.engines:
        meta = [
            gradients(run_engine(engine, inner_loop(model, problem, r, steps=2), given).loss.mean(), model)
            for r, given in ((rule, tasks), (case.limit, trained))
        ]
        assert distance(*meta) < 1e-12, engine


@each_rule
def test_gradient_evaluations_are_as_declared_whatever_the_gradients_are(case):
    for factor in (1.0, 0.0, float("nan")):
        at = Quadratic(factor)
        case.rule(at, at.descend, at.params, case.rule.init(at.params))
        assert at.calls == case.cycle[0]
    steps = 2 * len(case.cycle)
    for engine in case.engines:
        loop = inner_loop(MLP.model(), MLP, case.rule, steps=steps)
        run_engine(engine, loop, MLP.tasks(4))
        assert loop.counts == pytest.approx({"support": 4 * 2 * case.support, "query": 4})


@pytest.mark.parametrize("case", [c for c in RULES if c.refused], ids=lambda c: c.name)
def test_an_inner_loop_says_why_it_refuses(case):
    for engine in ENGINES:
        with pytest.raises(ValueError, match=case.refused):
            run_engine(engine, inner_loop(MLP.model(), MLP, case.rule), MLP.tasks(2))


@pytest.mark.parametrize("case", [c for c in RULES if c.rule.hyper], ids=lambda c: c.name)
def test_radius_may_be_a_tensor_or_given_by_key(case):
    wanted = live(MLP, case.at_radius(0.2), base=case.base)
    for rho in (torch.tensor(0.2, dtype=torch.float64), dict.fromkeys(params_of(wanted), 0.2)):
        assert distance(params_of(live(MLP, case.at_radius(rho), base=case.base)), params_of(wanted)) < 1e-14
        at = [Quadratic(), Quadratic()]
        each = dict.fromkeys(at[0].params, 0.2) if isinstance(rho, dict) else rho
        one, two = (
            r(a, a.descend, a.params, r.init(a.params))[0]
            for r, a in zip((case.at_radius(0.2), case.at_radius(each)), at, strict=True)
        )
        assert distance(two, one) < 1e-14


@pytest.mark.parametrize("case", [c for c in RULES if isinstance(c.rule, DirectionRule)], ids=lambda c: c.name)
def test_eps_ignores_the_scale_of_the_loss_where_declared(case):
    plain, scaled = Quadratic(), Quadratic(1000.0)
    one, _ = case.rule.direction(plain, plain.params, case.rule.init(plain.params))
    many, _ = case.rule.direction(scaled, scaled.params, case.rule.init(scaled.params))
    assert (distance(tree.scale(many, 1e-3), one) < 1e-12) == case.scale_invariant


# closed forms


@pytest.mark.parametrize(
    ("rule", "climb"),
    [
        (Sharp(0.3), lambda w, g: 0.3 * g / np.linalg.norm(g)),
        (Sharp(0.3, Adaptive(0.1)), lambda w, g: _asam(w, g, 0.3, 0.1)),
        (Sharp(0.3, Unnormalised()), lambda w, g: 0.3 * g),
        (Plain(), lambda w, g: 0 * g),
    ],
    ids=["sam", "asam", "usam", "plain"],
)
def test_quadratic_in_closed_form(rule, climb):
    at = Quadratic()
    moved, _ = rule(at, at.descend, at.params, {})
    w, a = np.concatenate([at.params["weight"], at.params["bias"]]), at.matrix.numpy()
    wanted = w - 0.1 * a @ (w + climb(w, a @ w))
    np.testing.assert_allclose(np.concatenate([moved["weight"], moved["bias"]]), wanted, rtol=1e-13)


def _asam(w, g, rho, eta):
    t = np.concatenate([np.abs(w[:4]) + eta, np.ones(2)])  # the last two entries are the bias
    return rho * t**2 * g / np.linalg.norm(t * g)


def test_jacobian_of_a_sam_step_in_closed_form():
    at = Quadratic()
    at.params = {k: v.requires_grad_() for k, v in at.params.items()}
    moved, _ = Sharp(0.3)(at, at.descend, at.params, {})
    after = torch.cat([moved["weight"], moved["bias"]])
    found = torch.cat(torch.autograd.grad(0.5 * after @ after, list(at.params.values())))
    w, a, after = (
        torch.cat([at.params["weight"], at.params["bias"]]).detach().numpy(),
        at.matrix.numpy(),
        after.detach(),
    )
    size = np.linalg.norm(a @ w)
    u = a @ w / size
    jacobian = np.eye(6) - 0.1 * a @ (np.eye(6) + 0.3 * (np.eye(6) - np.outer(u, u)) @ a / size)
    np.testing.assert_allclose(found, jacobian.T @ after.numpy(), rtol=1e-12)


# what a rule leaves alone


@pytest.mark.parametrize("fused", [True, False])
@each_rule
def test_rules_never_change_what_they_are_given(case, fused):
    at, rule = Quadratic(), case.rule
    state = rule.init(at.params)
    with tree.fused(fused):
        for _ in range(3):
            known = copy.deepcopy(state)
            _, after = rule(at, at.descend, at.params, state)
            assert_same(*[dict(_tensors(s)) for s in (state, known)])
            returned = {id(t) for given in at.handed for t in given.values()}
            assert not any(id(t) in returned for _, t in _tensors(after)), "state aliases a gradient or a parameter"
            state = after
    assert set(at.versions()) == {0}
    assert_same(at.params, Quadratic().params)


def _tensors(state):
    return [(f"{slot}.{k}", t) for slot, value in state.items() if isinstance(value, dict) for k, t in value.items()]


def _numbers(state):
    return {k: v for k, v in state.items() if not isinstance(v, dict)}


@each_rule
def test_rules_are_frozen_values(case):
    rule = case.rule
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == case.make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.anything = 1
    assert isinstance(rule, Rule)
    assert set(rule.hyper) <= {f.name for f in dataclasses.fields(rule)}


@each_rule
def test_a_rule_that_needs_names_says_so(case):
    unnamed = {"0": torch.ones(2), "1": torch.ones(2)}
    if case.names:
        with pytest.raises(ValueError, match="named_parameters"):
            case.rule.init(unnamed)
    else:
        case.rule.init(unnamed)


# trouble


@each_problem
@each_rule
def test_an_exception_in_any_pass_restores_everything(case, problem):
    for before, bad in case.passes:
        model = problem.model()
        optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
        closures = closures_of(problem, model)
        for _ in range(before):
            optimizer.step(**closures)
        home, memory = params_of(model), copy.deepcopy(optimizer.rule_state)

        def change(n, loss, bad=bad):
            if n == bad:
                raise KeyboardInterrupt
            return loss

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(**closures_of(problem, model, change=change))
        assert_same(params_of(model), home)
        assert_same(dict(_tensors(optimizer.rule_state)), dict(_tensors(memory)))
        assert all(m.track_running_stats for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
        optimizer.step(**closures)
        assert tree.is_finite(params_of(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@each_rule
def test_a_non_finite_gradient_in_any_pass_skips_the_step(case, value):
    for before, bad in case.passes:
        model = MLP.model()
        optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
        closures = closures_of(MLP, model)
        for _ in range(before):
            optimizer.step(**closures)
        home, memory = params_of(model), copy.deepcopy(optimizer.rule_state)
        buffers = {k: optimizer.state[p]["momentum_buffer"].clone() for k, p in model.named_parameters()}
        optimizer.step(**closures_of(MLP, model, change=lambda n, loss, bad=bad: loss * value if n == bad else loss))
        assert optimizer.skipped == 1
        assert_same(params_of(model), home)
        assert_same(dict(_tensors(optimizer.rule_state)), dict(_tensors(memory)))
        assert _numbers(optimizer.rule_state) == _numbers(memory)
        for k, p in model.named_parameters():
            assert torch.equal(optimizer.state[p]["momentum_buffer"], buffers[k]), "the base's state moved"
        optimizer.step(**closures)
        assert optimizer.skipped == 1
        assert tree.is_finite(params_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@each_rule
def test_zero_gradients_move_nothing(case, dtype):
    model = MLP.model(dtype)
    optimizer = SharpnessAware(case.base(model.parameters()), case.rule, model=model)
    home = params_of(model)
    for _ in range(2):
        optimizer.step(**closures_of(MLP, model, change=lambda n, loss: loss * 0.0))
    assert_same(params_of(model), home)


@each_engine
@each_inner_rule
def test_filters_of_zeros_have_finite_meta_gradients(case, engine):
    model, tasks = CONV.model(), CONV.tasks(2)
    with torch.no_grad():
        model[0].bias.zero_()
        model[4].weight[1] = 0.0
    loop = inner_loop(model, CONV, case.rule, steps=2)
    assert tree.is_finite(gradients(run_engine(engine, loop, tasks).loss.mean(), model))


@each_engine
@each_inner_rule
def test_zero_gradients_give_moderate_meta_gradients(case, engine):
    model, tasks = MLP.model(), MLP.tasks(2)
    x = tasks.support[0]
    solved = dataclasses.replace(tasks, support=(x, model(x).detach()))
    loop = inner_loop(model, MLP, case.rule, steps=2)
    found = gradients(run_engine(engine, loop, solved).loss.mean(), model)
    unadapted = gradients(MLP.loss_fn(model(tasks.query[0]), tasks.query[1]), model)
    assert tree.is_finite(found)
    assert tree.squared_norm(found) < 100 * tree.squared_norm(unadapted)


@each_rule
def test_a_gradient_may_be_missing_in_one_pass(case):
    for bad in range(sum(case.cycle)):
        model = MLP.model()
        optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
        calls = iter(range(100))

        def closure(calls=calls, model=model, bad=bad):
            x, y = MLP.batch()
            loss = MLP.loss_fn(model(x), y)
            loss.backward()
            if next(calls) == bad:
                model[0].weight.grad = None
            return loss

        for _ in range(3):
            optimizer.step(closure, val=closure)
        assert tree.is_finite(params_of(model))


@each_rule
def test_steps_without_any_gradient_move_nothing(case):
    model = MLP.model()
    optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
    with pytest.warns(UserWarning, match=r"did it call loss\.backward\(\)"):
        optimizer.step(lambda: 1.5, val=lambda: 2.5)
    for _ in range(2):
        assert optimizer.step(lambda: 1.5, val=lambda: 2.5) == 1.5
    assert_same(params_of(model), params_of(MLP.model()))
    optimizer.step(**closures_of(MLP, model))
    assert tree.is_finite(params_of(model))
    assert optimizer.skipped == 0


@each_rule
def test_parameters_may_be_frozen_and_freed_between_steps(case):
    model = MLP.model()
    optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
    x, y = MLP.batch()

    def closure():
        loss = MLP.loss_fn(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure, val=closure)
    model[0].requires_grad_(False)
    home = params_of(model[0])
    loaded = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
    loaded.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        optimizer.step(closure, val=closure)
    assert_same(params_of(model[0]), home)
    model[0].requires_grad_(True)
    for _ in range(2):
        optimizer.step(closure, val=closure)
    assert not torch.equal(model[0].weight, home["weight"])
    assert tree.is_finite(params_of(model))


# dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
@each_rule
def test_dtype_is_kept(case, problem, dtype):
    model = problem.model(dtype)
    optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
    for _ in range(2):
        optimizer.step(**closures_of(problem, model))
    home = params_of(problem.model(dtype))
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())
    assert all(t.dtype == dtype for _, t in _tensors(optimizer.rule_state))
    assert any(not torch.equal(p, home[k]) for k, p in params_of(model).items())
    for engine in case.engines:
        adapted = run_engine(
            engine, inner_loop(problem.model(dtype), problem, case.rule), problem.tasks(2, dtype)
        ).params
        assert all(p.dtype == dtype and p.isfinite().all() for p in adapted.values()), engine


# state


@pytest.mark.parametrize("base", [MOMENTUM, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
@each_rule
def test_a_resumed_run_continues_bit_for_bit(case, way, base):
    model = CONV.model(torch.float32)
    optimizer = SharpnessAware(base(model.parameters()), case.rule, model=model)

    def go(model, optimizer):
        for seed in range(3):
            optimizer.step(**closures_of(CONV, model, CONV.batch(torch.float32, seed)))

    go(model, optimizer)
    if way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights, memory = torch.load(file, weights_only=True)
        twin = CONV.model(torch.float32, seed=9)
        twin.load_state_dict(weights)
        other = SharpnessAware(base(twin.parameters()), case.rule, model=twin)
        other.load_state_dict(memory)
    assert other.rule_state is not optimizer.rule_state or not case.stateful
    go(model, optimizer)
    go(twin, other)
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    assert_same(dict(_tensors(other.rule_state)), dict(_tensors(optimizer.rule_state)))
    assert _numbers(other.rule_state) == _numbers(optimizer.rule_state)
    assert bool(optimizer.rule_state) == case.stateful


@each_rule
def test_a_fresh_optimizer_loads_a_state_without_steps(case):
    model = MLP.model()
    first, second = (SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model) for _ in range(2))
    second.step(**closures_of(MLP, model))
    second.load_state_dict(first.state_dict())
    assert second.rule_state is None
    second.step(**closures_of(MLP, model))


# making one


def test_rules_by_name():
    assert make("sam", rho=0.2) == Sharp(0.2)
    assert make("sam", through=False) == Sharp(through=False)
    assert make("multistep").steps == 2
    assert make("usam").perturb == Unnormalised()
    assert make("asam") == Sharp(0.5, Adaptive(0.01))
    assert make(Sharp(0.3)) == Sharp(0.3)
    assert make("agnostic", rho=0.1) == Agnostic(rho_train=0.2, rho_val=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sma",), "did you mean 'sam'"),
        (("zzzz",), "expected a rule among plain, sam"),
        (("plain", 0.1), "no radius"),
        ((Sharp(), 0.1), "instance"),
        (("sam", -1.0), "rho >= 0"),
        (("sam", float("nan")), "rho >= 0 and finite"),
    ],
)
def test_rules_that_cannot_be_made(arguments, message):
    name, *rho = arguments
    with pytest.raises(ValueError, match=message):
        make(name, rho=rho[0] if rho else None)
    with pytest.raises(TypeError, match="a rule or its name"):
        make(3)


@pytest.mark.parametrize("settings", [{"rho": -0.1}, {"rho": float("inf")}, {"steps": 0}, {"step_size": 0.0}])
def test_sharp_refuses(settings):
    with pytest.raises(ValueError, match=f"expected {next(iter(settings))}"):
        Sharp(**settings)


def test_the_tables_cover_every_named_rule():
    tried = [dataclasses.replace(c.rule, **dict.fromkeys(c.rule.hyper, 1.0)) for c in RULES]
    for name, made in NAMED.items():
        rule = made()
        kind = (type(rule), getattr(rule, "perturb", None).__class__)
        assert any((type(t), getattr(t, "perturb", None).__class__) == kind for t in tried), name
    assert len({p.name for p in PROBLEMS}) == len(PROBLEMS)
