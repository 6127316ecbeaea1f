"""Inner loops of which every n-th step is kept: the same numbers to the last bit, in less memory."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metasam import SharpMAML, Task, inner
from metasam.rules import Plain, Sharp

from .cases import (
    CONV,
    MLP,
    PROBLEMS,
    Problem,
    assert_same,
    each_engine,
    each_inner_rule,
    gradients,
    inner_loop,
    params_of,
    run_engine,
    slope,
)

STEPS = 5
LENGTHS = (1, 2, 7)  # every step, segments and a rest, one segment


def tasks_for(engine, problem):
    """As many as share a graph in a meta-step: sums over tasks are taken in one order then."""
    return problem.tasks(1 if engine == "higher" else 3)


def again(loop, length):
    """The same loop by segments, with counts of its own."""
    return dataclasses.replace(loop, recompute=length, counts=defaultdict(float))


def assert_same_run(engine, loop, tasks, lengths=LENGTHS):
    """Values, gradients of all parameters, which of them have one, displacements, counts, generator."""
    torch.manual_seed(3)
    plain = run_engine(engine, loop, tasks)
    wanted, drawn = found_gradients(plain.loss.mean(), loop.model), torch.rand(1)
    assert any(g.abs().max() > 0 for g in wanted.values())
    for length in lengths:
        torch.manual_seed(3)
        shorter = again(loop, length)
        found = run_engine(engine, shorter, tasks)
        assert torch.equal(found.loss, plain.loss)
        assert torch.equal(found.output, plain.output)
        assert_same(found.params, plain.params)
        assert_same(found_gradients(found.loss.mean(), loop.model), wanted)
        assert len(found.eps) == len(plain.eps)
        for a, b in zip(found.eps, plain.eps, strict=True):
            assert_same(a, b)
        assert torch.equal(torch.rand(1), drawn)
        assert shorter.counts == loop.counts


def found_gradients(value, model):
    """Gradients by name, of what has one."""
    free = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True)
    return {k: g for k, g in zip(free, found, strict=True) if g is not None}


# the same to the last bit


@each_engine
@each_inner_rule
@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
def test_every_rule(problem, case, engine):
    loop = inner_loop(problem.model(), problem, case.rule, steps=STEPS, keep_eps=True, stream=3)
    assert_same_run(engine, loop, tasks_for(engine, problem), (1, 2))


@each_engine
@each_inner_rule
def test_every_rule_in_the_head_alone(case, engine):
    """The body's gradient is a sum over the steps, whose order decides its last bits."""
    loop = inner_loop(MLP.model(), MLP, case.rule, steps=STEPS, adapted=frozenset({"2.weight", "2.bias"}))
    assert_same_run(engine, loop, tasks_for(engine, MLP), (1, 2))


@each_engine
@pytest.mark.parametrize("rule", [Plain(), Sharp(0.1), Sharp(0.1, through=False)], ids=["plain", "sam", "const"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_every_problem(problem, rule, engine):
    loop = inner_loop(problem.model(), problem, rule, steps=STEPS)
    assert_same_run(engine, loop, tasks_for(engine, problem))


def _around(*layers):
    return lambda: nn.Sequential(nn.Linear(3, 6), *[make() for make in layers], nn.Linear(6, 1))


LAYERS = [
    Problem("dropout", _around(nn.Tanh, lambda: nn.Dropout(0.4))),
    # their backward is another one where it is differentiated
    Problem("silu", _around(nn.SiLU)),
    Problem("group-norm", _around(lambda: nn.GroupNorm(2, 6), nn.Tanh)),
    Problem("layer-norm", _around(lambda: nn.LayerNorm(6), nn.Tanh)),
]


@each_engine
@pytest.mark.parametrize("problem", LAYERS, ids=lambda p: p.name)
def test_layers_that_draw_or_have_two_backwards(problem, engine):
    loop = inner_loop(problem.model(), problem, Sharp(0.1), steps=STEPS)
    assert_same_run(engine, loop, tasks_for(engine, problem))


@each_engine
def test_several_tasks_in_one_graph(engine):
    """The task-by-task engine adds up tasks in another order."""
    model, tasks = MLP.model(), MLP.tasks(3)
    loop = inner_loop(model, MLP, Sharp(0.1), steps=STEPS)
    wanted, found = (gradients(run_engine(engine, x, tasks).loss.mean(), model) for x in (loop, again(loop, 2)))
    for k, w in wanted.items():
        torch.testing.assert_close(found[k], w, rtol=1e-13, atol=1e-16)


@each_engine
def test_the_slope_of_the_meta_loss(engine):
    model, tasks = CONV.model(), CONV.tasks(2)
    loop = inner_loop(model, CONV, Sharp(0.05), steps=4, recompute=3)
    found, wanted = slope(lambda: run_engine(engine, loop, tasks).loss.mean(), model)
    assert found == pytest.approx(wanted, rel=1e-7, abs=1e-9)


@each_engine
def test_tasks_that_need_gradients_get_them(engine):
    model = MLP.model()
    loop = inner_loop(model, MLP, Sharp(0.1), steps=STEPS)

    def of_inputs(loop):
        tasks = tasks_for(engine, MLP).map(lambda t: t.requires_grad_())
        ends = [*tasks.support, *tasks.query]
        return torch.autograd.grad(run_engine(engine, loop, tasks).loss.mean(), ends)

    wanted = of_inputs(loop)
    assert all(g.abs().max() > 0 for g in wanted)
    for a, b in zip(of_inputs(again(loop, 2)), wanted, strict=True):
        assert torch.equal(a, b)


# the learner


def learner(problem=MLP, steps=STEPS, **settings):
    settings = {"variant": "low", "rho_low": 0.1, "rule": "sam", **settings}
    return SharpMAML(problem.model(), problem.loss_fn, inner_lr=0.1, inner_steps=steps, **settings)


def after_two_steps(problem, **settings):
    maml = learner(problem, **settings)
    optimizer = torch.optim.Adam(maml.model.parameters(), 0.01)
    torch.manual_seed(4)
    losses = [float(maml.step(problem.tasks(2, seed=seed), optimizer)) for seed in (5, 6)]
    return maml, losses, torch.rand(1)


@each_engine
@pytest.mark.parametrize(
    ("problem", "settings"),
    [
        (MLP, {"variant": "both", "reuse_inner_eps": True}),
        (MLP, {"variant": "both", "through": False}),
        (MLP, {"variant": "up", "rule": "agnostic", "rho_low": None, "inner_params": ["2.*"]}),
        (LAYERS[0], {"variant": "both"}),
        (CONV, {"batchnorm": "batch"}),
        (CONV, {"batchnorm": "frozen"}),
        (CONV, {"batchnorm": "per_step", "variant": "both"}),
    ],
    ids=lambda v: v.name if isinstance(v, Problem) else "-".join(map(str, v.values())),
)
def test_meta_steps_are_the_same(problem, settings, engine):
    if settings.get("batchnorm") == "per_step" and engine == "vmap":
        pytest.skip("statistics are written during the forward, which vmap refuses")
    if settings.get("rule") == "agnostic":
        plain, short = (held_out_steps(engine, settings, recompute) for recompute in (None, 2))
    else:
        plain, short = (
            after_two_steps(problem, engine=engine, recompute=recompute, **settings) for recompute in (None, 2)
        )
    assert short[1:] == plain[1:]
    assert_same(params_of(short[0].model), params_of(plain[0].model))
    assert short[0].counts == plain[0].counts
    assert short[0].gradient_evaluations == plain[0].gradient_evaluations
    assert_same(dict(short[0].model.named_buffers()), dict(plain[0].model.named_buffers()))
    if plain[0].loop.per_step is not None:
        assert_same(short[0].loop.per_step.buffers, plain[0].loop.per_step.buffers)


def held_out_steps(engine, settings, recompute):
    maml = learner(engine=engine, recompute=recompute, **settings)
    optimizer = torch.optim.SGD(maml.model.parameters(), 0.01)
    return maml, float(maml.step(MLP.tasks(2), optimizer, val_tasks=MLP.tasks(2, seed=8)))


def test_threads_share_the_tasks_to_the_same_bits():
    plain, short = (
        after_two_steps(CONV, engine="higher", variant="both", workers=workers, recompute=recompute)
        for workers, recompute in ((1, None), (2, 2))
    )
    assert (plain[0].workers_used, short[0].workers_used) == (1, 2)
    assert_same(params_of(short[0].model), params_of(plain[0].model))
    assert short[0].counts == plain[0].counts


@pytest.mark.parametrize("policy", ["batch", "per_step", "frozen"])
def test_backward_after_the_meta_loss_finds_everything_as_it_was(policy):
    """Norms, modes of modules and random numbers, which are other ones by then."""

    def build():
        return nn.Sequential(*CONV.build()[:3], nn.Dropout(0.3), *CONV.build()[3:])

    problem = dataclasses.replace(CONV, build=build)
    found = []
    for recompute in (None, 2):
        maml = learner(problem, engine="higher", batchnorm=policy, recompute=recompute)
        statistics = {k: b.clone() for k, b in maml.model.named_buffers()}
        torch.manual_seed(3)
        loss = maml.meta_loss(problem.tasks(1))
        maml.model.eval()
        torch.manual_seed(9)
        loss.backward()
        assert not any(m.training for m in maml.model.modules())
        assert maml.model[1].track_running_stats
        assert_same(dict(maml.model.named_buffers()), statistics)
        found.append(({k: p.grad for k, p in maml.model.named_parameters()}, torch.rand(1)))
    assert_same(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])


def test_autocast_is_repeated_as_it_was():
    found = []
    for recompute in (None, 2):
        maml = learner(engine="higher", recompute=recompute)
        maml.model.float()
        tasks = MLP.tasks(1, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = maml.meta_loss(tasks)
        loss.backward()
        found.append({k: p.grad for k, p in maml.model.named_parameters()})
    assert_same(found[1], found[0])


@each_engine
def test_without_a_graph_nothing_is_recomputed(engine, monkeypatch):
    def refuse(*_):
        raise AssertionError("recomputed")

    monkeypatch.setattr(inner.recompute, "_segment", refuse)
    maml, tasks = learner(engine=engine, first_order=True, recompute=2), MLP.tasks(2)
    maml.meta_loss(tasks).backward()
    maml = learner(engine=engine, recompute=2)
    assert maml.evaluate(tasks).loss == learner(engine=engine).evaluate(tasks).loss
    maml.adapt(tasks.unbind()[0])
    with pytest.raises(AssertionError, match="recomputed"):
        maml.meta_loss(tasks)


@each_engine
def test_a_meta_loss_without_gradient(engine):
    tasks = MLP.tasks(2)
    wanted = learner(engine=engine).meta_loss(tasks)
    for recompute in (2, None):
        with torch.no_grad():
            found = learner(engine=engine, recompute=recompute).meta_loss(tasks)
        assert not found.requires_grad
        assert torch.equal(found, wanted)


def test_auto_is_about_half_the_root_of_the_steps():
    assert [learner(steps=k, recompute="auto").loop.recompute for k in (1, 3, 5, 50, 200)] == [1, 1, 1, 4, 7]
    assert learner().loop.recompute is None


@pytest.mark.parametrize("value", [0, -1, "x", 2.0, True])
def test_bad_values(value):
    with pytest.raises(ValueError, match="recompute to be an integer >= 1, 'auto' or None, got recompute="):
        learner(recompute=value)


# what it cannot do is refused


@pytest.mark.parametrize("engine", inner.TRACED)
def test_an_engine_that_holds_all_steps_is_refused(engine):
    with pytest.raises(ValueError, match=f"engine='{engine}' runs all steps.*recompute=2 needs engine='vmap'"):
        learner(engine=engine, recompute=2)


@each_engine
def test_a_radius_that_needs_gradients_is_refused(engine):
    rho = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    model = MLP.model()
    loop = inner_loop(model, MLP, Sharp(2 * rho), steps=STEPS)
    assert torch.autograd.grad(run_engine(engine, loop, MLP.tasks(2)).loss.mean(), rho)[0] != 0
    with pytest.raises(ValueError, match=r"recompute .* tensor of shape \[\] that needs gradients elsewhere"):
        run_engine(engine, again(loop, 2), MLP.tasks(2))


@each_engine
def test_a_second_derivative_of_the_meta_loss_is_refused(engine):
    model = MLP.model()
    loss = run_engine(engine, inner_loop(model, MLP, Plain(), steps=3, recompute=2), MLP.tasks(2)).loss.mean()
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    # beside another way to the parameters, which must not be taken for the only one
    value = sum((g + p).square().sum() for g, p in zip(grads, params, strict=True))
    with pytest.raises(RuntimeError, match="set recompute=None"):
        torch.autograd.grad(value, params)
    with pytest.raises(RuntimeError, match="set recompute=None"):
        sum(g.square().sum() for g in grads).backward()


# memory


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made within hold at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def free(self, size):
        self.now -= size


def peak(engine, steps, **settings):
    """Of a meta-gradient, where activations are much larger than parameters."""
    problem = Problem("wide", lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), examples=300)
    model, tasks = problem.model(), problem.tasks(1)
    loop = inner_loop(model, problem, Sharp(0.1), steps=steps, **settings)
    with Peak() as memory:
        gradients(run_engine(engine, loop, tasks).loss.mean(), model)
    return memory.most


@each_engine
def test_memory_grows_with_the_root_of_the_steps(engine):
    plain = [peak(engine, k) for k in (9, 36)]
    kept = [peak(engine, k, recompute=r) for k, r in ((9, 3), (36, 6))]
    assert 3.5 < plain[1] / plain[0] < 4.5
    assert kept[1] / kept[0] < 2.3
    assert kept[1] < plain[1] / 4
    assert peak(engine, 36, recompute=1) < kept[1] / 2


@each_engine
def test_nothing_piles_up(engine):
    maml, tasks = learner(engine=engine, recompute=2), MLP.tasks(2)
    optimizer = torch.optim.SGD(maml.model.parameters(), 0.01)
    maml.step(tasks, optimizer)
    with Peak() as memory:
        maml.step(tasks, optimizer)
        first = memory.now
        for _ in range(4):
            maml.step(tasks, optimizer)
    assert memory.now <= first


class Draws(nn.Module):
    """What torch's generators know nothing of."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls, self.linear = how, 0, nn.Linear(1, 1)
        self.random = random.Random(3)

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (self.calls if self.how == "counts" else 1 + self.random.random())


@pytest.mark.parametrize("constant", [1.0, 1e9])  # a large frozen parameter hides nothing
@pytest.mark.parametrize("how", ["counts", "draws"])
def test_steps_that_are_not_the_same_when_taken_again_are_refused(how, constant):
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 1).double(), torch.randn(2, 5, 1).double()
    frozen = nn.Parameter(torch.full((), constant).double(), requires_grad=False)
    model = Draws(how).double()
    model.register_parameter("frozen", frozen)
    maml = SharpMAML(
        *(model, nn.functional.mse_loss),
        inner_lr=0.01, inner_steps=4, engine="higher", variant="none", recompute=2, workers=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="the same when recompute takes them again"):
        maml.step(Task((x, y), (x, y)), torch.optim.SGD(maml.model.parameters(), 0.1))


class Rounds(nn.Module):
    """As a machine that sums in another order, or a model that gives something else."""

    def __init__(self):
        super().__init__()
        self.off, self.linear = 0.0, nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x) * (1 + self.off)


@pytest.mark.parametrize(
    ("dtype", "roundings", "refused"),
    [
        (torch.float32, 1, False),
        (torch.bfloat16, 1, False),
        (torch.float32, 1e5, True),
        (torch.bfloat16, 64, True),
    ],
)
def test_steps_may_round_otherwise_when_taken_again(dtype, roundings, refused):
    torch.manual_seed(0)
    x, y = torch.randn(1, 5, 1, dtype=dtype), torch.randn(1, 5, 1, dtype=dtype) + 100
    model = Rounds().to(dtype)
    maml = SharpMAML(
        *(model, nn.functional.mse_loss),
        inner_lr=0.1, inner_steps=4, engine="higher", variant="none", recompute=2, workers=1,
    )  # fmt: skip
    loss = maml.meta_loss(Task((x, y), (x, y)))
    model.off = roundings * torch.finfo(dtype).eps
    with pytest.raises(RuntimeError, match="the same when") if refused else contextlib.nullcontext():
        loss.backward()
