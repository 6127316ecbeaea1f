"""Faster ways to the same meta-gradient: threads that share the tasks, and graphs traced before."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
import random
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from metasam import SharpMAML, Task, inner
from metasam.inner import traced
from metasam.inner.choose import WIDE
from metasam.inner.traced import MANY, _inputs
from metasam.meta import VARIANTS
from metasam.ranks import Ranks
from metasam.rules import Agnostic, RandomSAM

from .cases import CONV, MLP, PROBLEMS, Problem, assert_same, distance, each_inner_rule, each_problem

TASKS = 5
RANDOM = {"random", "rwp", "esam", "sparse-dynamic"}


def learner(problem: Problem, **settings):
    model = settings.pop("model", None) or problem.model()
    loss_fn = settings.pop("loss_fn", problem.loss_fn)
    return SharpMAML(model, loss_fn, **{"inner_lr": 0.1, "inner_steps": 2, "variant": "none", **settings})


def trained(maml: SharpMAML, problem: Problem, steps=2, tasks=TASKS, **others):
    """Weights after some steps on tasks that differ."""
    optimizer = torch.optim.SGD(maml.model.parameters(), lr=0.1)
    for step in range(steps):
        maml.step(problem.tasks(tasks, seed=10 + step), optimizer, **others)
    return {k: p.detach().clone() for k, p in maml.model.named_parameters()}


# threads


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@each_problem
def test_threads_change_no_bit(problem, variant, workers):
    one, many = (learner(problem, variant=variant, engine="higher", workers=n) for n in (1, workers))
    a, b = (trained(maml, problem) for maml in (one, many))
    assert many.workers_used == workers
    assert_same(b, a)
    assert (many.counts, many.gradient_evaluations, many.last) == (one.counts, one.gradient_evaluations, one.last)
    held = problem.tasks(7, seed=3)
    assert many.evaluate(held) == one.evaluate(held)


@each_inner_rule
def test_threads_change_no_bit_of_a_rule(case):
    settings = {"inner_rule": case.rule, "variant": None, "engine": "higher"}
    a, b = (trained(learner(MLP, workers=n, **settings), MLP) for n in (1, 2))
    assert_same(b, a)


def test_threads_share_chunks_and_reused_displacements():
    settings = {"variant": "both", "engine": "higher", "reuse_inner_eps": True, "chunk_size": 2}
    a, b = (trained(learner(CONV, workers=n, **settings), CONV) for n in (1, 2))
    assert_same(b, a)


def test_threads_with_an_outer_rule_that_asks_for_parts_and_held_out_tasks():
    settings = {"outer_rule": Agnostic(), "variant": "up", "engine": "higher"}
    held = CONV.tasks(2, seed=5)
    a, b = (trained(learner(CONV, workers=n, **settings), CONV, val_tasks=held) for n in (1, 2))
    assert_same(b, a)


class Noting(nn.Module):
    """Notes who calls it and in which state; ``broken`` raises."""

    seen: ClassVar[list] = []

    def __init__(self, broken=False):
        super().__init__()
        self.body, self.broken = nn.Linear(3, 1), broken
        self.seen.clear()

    def forward(self, x):
        if self.broken and threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("no such luck")
        time.sleep(0.005)  # or one thread may have done all before the other begins
        self.seen.append((threading.current_thread().name, torch.get_num_threads(), torch.is_autocast_enabled("cpu")))
        return self.body(x).double()


def test_threads_inherit_autocast_and_leave_torch_its_own():
    torch.set_num_threads(2)
    model = Noting().double()
    maml = learner(MLP, model=model, engine="higher")  # auto
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained(maml, MLP, steps=1)
    assert (maml.workers_used, torch.get_num_threads()) == (2, 2)
    inside = [s for s in model.seen if s[0].startswith("metasam")]
    assert {s[1:] for s in inside} == {(1, True)}
    assert len({s[0] for s in inside}) == 2
    assert len(inside) == TASKS * 3


def test_large_layers_are_left_to_torchs_own_threads(monkeypatch):
    torch.set_num_threads(2)
    chosen = sys.modules["metasam.inner.choose"]
    one = learner(CONV, engine="higher")
    a = trained(one, CONV)
    monkeypatch.setattr(chosen, "LARGE", 0)
    other, asked = learner(CONV, engine="higher"), learner(CONV, engine="higher", workers=2)
    hooks = [len(m._forward_hooks) for m in other.model.modules()]
    b, c = (trained(maml, CONV) for maml in (other, asked))
    assert [maml.workers_used for maml in (one, other, asked)] == [2, 1, 2]
    assert "MiB" in other.workers_reason
    assert [len(m._forward_hooks) for m in other.model.modules()] == hooks
    assert_same(b, a)
    assert_same(c, a)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("engine", ["auto", "higher"])
@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "all of it"])
def test_scripted_modules_take_no_hooks(engine, whole):
    torch.set_num_threads(2)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)).double()
    scripted = torch.jit.script(plain) if whole else nn.Sequential(plain[0], torch.jit.script(plain[1]), plain[2])
    found = []
    for model in (plain, scripted):
        maml = learner(MLP, model=model, engine=engine)
        loss = maml.meta_loss(MLP.tasks(2))
        found.append(torch.autograd.grad(loss, list(model.parameters())))
        again = copy.deepcopy(maml)
        assert torch.equal(again.meta_loss(MLP.tasks(2)), loss)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))


def test_an_error_in_a_thread_is_raised_and_nothing_is_changed():
    model = Noting(broken=True).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArithmeticError, match="no such luck"):
        trained(learner(MLP, model=model, engine="higher", workers=2), MLP, steps=1)
    assert_same(model.state_dict(), before)
    assert not [t for t in threading.enumerate() if t.name.startswith("metasam")]


def test_twins_share_every_tensor_and_no_module():
    model = CONV.model()
    twin = inner.threads.twin(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}


DROPOUT = Problem("dropout", lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
NORM = Problem("norm", lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))


@pytest.mark.parametrize(
    ("problem", "settings", "reason"),
    [(DROPOUT, {}, "random numbers"), (NORM, {"batchnorm": "per_step"}, "task after task")],
    ids=["dropout", "per_step"],
)
def test_what_threads_would_change_they_do_not_share(problem, settings, reason):
    torch.set_num_threads(2)
    auto = learner(problem, engine="higher", **settings)
    trained(auto, problem, steps=1)
    assert auto.workers_used == 1
    assert reason in auto.workers_reason
    with pytest.raises(ValueError, match=f"workers=2.*{reason}.*workers=1"):
        trained(learner(problem, engine="higher", workers=2, **settings), problem, steps=1)


class Keeping(nn.Module):
    """Keeps something of a forward in an attribute, and its loss reads it."""

    def __init__(self, what):
        super().__init__()
        self.body, self.head, self.what = nn.Linear(3, 4), nn.Linear(4, 1), what
        self.aux, self.calls, self.seen, self.generator = torch.zeros(()), 0, [0.0], torch.Generator().manual_seed(3)

    def forward(self, x):
        h = self.body(x).tanh()
        if self.what == "aux":
            self.aux = h.square().mean()
        elif self.what == "calls":
            self.calls += 1
        elif self.what == "seen":
            self.seen[0] += 1
        elif self.what == "generator":
            h = h + torch.rand(4, generator=self.generator, dtype=h.dtype)
        return self.head(h)

    def loss(self, output, y):
        return nn.functional.mse_loss(output, y) * (1 + self.calls + self.seen[0]) + self.aux


@pytest.mark.parametrize("what", ["aux", "calls", "seen", "generator"])
def test_a_forward_that_keeps_something_is_not_shared(what):
    torch.set_num_threads(2)

    def build(workers):
        torch.manual_seed(0)
        model = Keeping(what).double()
        return learner(MLP, model=model, loss_fn=model.loss, engine="higher", workers=workers)

    one, auto = build(1), build("auto")
    a, b = (trained(maml, MLP) for maml in (one, auto))
    if what == "aux":  # looking whether tasks can be shared calls the model, and counts
        assert_same(b, a)
    assert (auto.workers_used, f"attribute {what!r}" in auto.workers_reason) == (1, True)
    with pytest.raises(ValueError, match=f"workers=2 cannot share.*{what!r}.*use workers=1"):
        trained(build(2), MLP)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random], ids=["torch", "python"])
def test_a_loss_that_draws_is_not_shared(draw):
    torch.set_num_threads(2)
    maml = learner(MLP, loss_fn=lambda output, y: (output - y).square().mean() * draw(), engine="higher")
    trained(maml, MLP, steps=1)
    assert maml.workers_used == 1
    assert "random numbers" in maml.workers_reason


def test_whether_tasks_are_shared_follows_modes_and_numbers():
    torch.set_num_threads(2)
    maml, held = learner(DROPOUT, engine="higher"), DROPOUT.tasks(2)
    maml.evaluate(held)  # draws nothing
    for change, workers in (
        (lambda: None, 1),
        (lambda: maml.model.eval(), 2),
        (lambda: maml.model.train(), 1),
        (lambda: setattr(maml.model[1], "p", 0.0), 2),
    ):
        change()
        trained(maml, DROPOUT, steps=1)
        maml.evaluate(held)
        assert maml.workers_used == workers


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "all"])
def test_workers_are_counted(workers):
    with pytest.raises(ValueError, match="expected workers"):
        learner(MLP, workers=workers)


# the same on every way

WAYS = [("higher", 1), ("higher", 2), ("vmap", 1), ("traced", 1)]


@pytest.mark.parametrize("kind", ["hook", "after"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_hooks_of_parameters_see_the_meta_gradient_and_nothing_else(way, kind):
    """Once, the whole of it, in however many chunks it was found; the inner loop's gradients are none of theirs."""
    engine, workers = way
    settings = {"engine": engine, "workers": workers, "chunk_size": 2}
    plain, maml = learner(MLP, **settings), learner(MLP, **settings)
    calls = []

    def hook(grad):
        calls.append(1)
        return grad.clamp(-0.01, 0.01)  # of a sum, this is not the sum of it

    for p in maml.model.parameters():
        p.register_hook(hook) if kind == "hook" else p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    start = {k: p.detach().clone() for k, p in maml.model.named_parameters()}
    a, b = trained(plain, MLP, steps=1), trained(maml, MLP, steps=1)
    assert len(calls) == len(start)
    grads = {k: (start[k] - a[k]) / 0.1 for k in a}
    assert any((g.abs() > 0.01).any() for g in grads.values())
    wanted = {k: start[k] - 0.1 * (g.clamp(-0.01, 0.01) if kind == "hook" else g) for k, g in grads.items()}
    assert distance(b, wanted) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_autocast_around_several_steps_keeps_no_old_weights(way):
    def run(cached):
        model = MLP.model().float()
        maml = learner(MLP, model=model, variant="low", engine=way[0], workers=way[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for seed in (1, 2):
                maml.step(MLP.tasks(3, torch.float32, seed=seed), optimizer)
        return {k: p.detach().clone() for k, p in model.named_parameters()}

    assert_same(run(True), run(False))


# which engine


def test_the_engine_that_judges_can_train():
    maml = learner(NORM, batchnorm="per_step")
    maml.evaluate(NORM.tasks(2))
    trained(maml, NORM, steps=1)
    assert maml.engine_used == "higher"


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode\(\) forbids: use torch.no_grad"):
        learner(MLP).evaluate(MLP.tasks(2))


def test_wide_convolutions_go_task_by_task_on_a_cpu():
    wide = Problem(
        "wide", lambda: nn.Sequential(nn.Conv2d(8, 200, 3), nn.Flatten(1), nn.Linear(28800, 3)), (8, 14, 14), 3
    )
    assert 2 * 5 * 12 * 12 * 200 * 8 * 9 > WIDE > 2 * 5 * 2 * 2 * 2 * 9
    for problem, engine in ((wide, "higher"), (CONV, "vmap")):
        maml = learner(problem, inner_steps=1)
        trained(maml, problem, steps=1, tasks=2)
        assert maml.engine_used == engine, maml.engine_reason


# traced


@pytest.mark.parametrize("variant", ["none", "both"])
@each_problem
def test_a_graph_is_the_engine(problem, variant):
    plain, traced = (learner(problem, variant=variant, engine=e) for e in ("vmap", "traced"))
    a, b = (trained(maml, problem, steps=2) for maml in (plain, traced))
    assert distance(b, a) < 1e-12
    assert traced.last.loss == pytest.approx(plain.last.loss, rel=1e-12)
    assert (traced.counts, traced.last.accuracy) == (plain.counts, plain.last.accuracy)
    assert traced.graphs.seconds > 0


@each_inner_rule
def test_a_graph_is_the_rule(case):
    settings = {"inner_rule": case.rule, "variant": None, "inner_steps": 2 if case.stateful else 1}
    if case.name in RANDOM:
        with pytest.raises(ValueError, match=r"no random numbers.*engine='vmap'"):
            trained(learner(MLP, engine="traced", **settings), MLP)
        return
    a, b = (trained(learner(MLP, engine=e, **settings), MLP) for e in ("vmap", "traced"))
    assert distance(b, a) < 1e-12


@pytest.mark.parametrize(
    "settings",
    [{"first_order": True}, {"inner_params": ["4.*"]}, {"batchnorm": "frozen"}, {"chunk_size": 2}],
    ids=["first_order", "anil", "frozen", "chunks"],
)
def test_a_graph_follows_settings(settings):
    settings = {"inner_steps": 1, "variant": "low", **settings}
    a, b = (trained(learner(CONV, engine=e, **settings), CONV) for e in ("vmap", "traced"))
    assert distance(b, a) < 1e-12


def test_one_graph_serves_any_smaller_number_of_tasks():
    plain, traced = (learner(CONV, engine=e, inner_steps=1) for e in ("vmap", "traced"))
    for tasks in (6, 4, 1, 5):
        a, b = (trained(maml, CONV, steps=1, tasks=tasks) for maml in (plain, traced))
        assert distance(b, a) < 1e-12
        assert traced.counts == plain.counts
    assert sum(map(len, traced.graphs._graphs.values())) == 1


def test_a_graph_is_made_anew_where_its_constants_change():
    plain, traced = (learner(CONV, engine=e, inner_steps=1) for e in ("vmap", "traced"))

    def both():
        a, b = (trained(maml, CONV, steps=1) for maml in (plain, traced))
        assert distance(b, a) < 1e-12
        return len(traced.graphs._graphs)

    assert both() == 1
    for maml in (plain, traced):
        maml.model[0].requires_grad_(False)
    assert both() == 2
    for maml in (plain, traced):
        maml.model[0].requires_grad_(True)
    assert both() == 2


def test_statistics_that_change_reach_the_graph():
    plain, traced = (learner(CONV, engine=e, batchnorm="frozen", inner_steps=1) for e in ("vmap", "traced"))
    for shift in (0.0, 0.7):
        for maml in (plain, traced):
            maml.model[1].running_mean.add_(shift)
        a, b = (trained(maml, CONV, steps=1) for maml in (plain, traced))
        assert distance(b, a) < 1e-12


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.act, self.head, self.factor, self.shift = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), 1.0, None
        self.register_buffer("scale", torch.ones(4))
        self.shift, self.aux = torch.zeros(4), torch.zeros(())

    def forward(self, x):
        h = self.act(self.body(x) * self.factor) * self.scale + self.shift
        self.aux = h.square().mean()  # kept for others to look at
        return self.head(h)


CHANGES = {
    "number": lambda m: setattr(m, "factor", 3.0),
    "module": lambda m: setattr(m, "act", nn.ReLU()),
    "forward": lambda m: setattr(m, "forward", lambda x: m.head(m.body(x))),
    "hook": lambda m: m.act.register_forward_hook(lambda *args: args[-1] * 2),
    "buffer": lambda m: setattr(m, "scale", torch.full((4,), 3.0, dtype=torch.float64)),
    "tensor": lambda m: setattr(m, "shift", torch.full((4,), 3.0, dtype=torch.float64)),
    "state": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_graph_is_made_anew_where_the_model_changes(change):
    problem = Problem("tempered", Tempered)
    plain, traced = (learner(problem, engine=e, inner_steps=1) for e in ("vmap", "traced"))
    for count in (1, 2):
        for maml in (plain, traced):
            trained(maml, problem, steps=1)
            maml.evaluate(problem.tasks(2))
        a, b = (trained(maml, problem) for maml in (plain, traced))
        assert distance(b, a) < 1e-12
        assert len(traced.graphs._graphs) == count
        for maml in (plain, traced):
            change(maml.model)


class Factor:
    """A loss of an object's own numbers and tensors."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, output, y):
        return self.factor * nn.functional.mse_loss(output, y)

    loss = __call__


class FactorModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, output, y):
        return self.factor * nn.functional.mse_loss(output, y)


def scaled_mse(output, y, *, factor=1.0):
    return factor * GLOBAL_FACTOR * nn.functional.mse_loss(output, y)


GLOBAL_FACTOR = 1.0


def set_global(value):
    global GLOBAL_FACTOR
    GLOBAL_FACTOR = value


def losses_and_changes(kind):
    """A loss, and what changes it."""
    if kind == "module":
        module = nn.SmoothL1Loss()
        return module, lambda: setattr(module, "beta", 0.01)
    if kind == "parameter":
        module = FactorModule()
        return module, lambda: setattr(module, "factor", nn.Parameter(3 * module.factor, requires_grad=False))
    if kind in ("object", "method"):
        own = Factor()
        return own if kind == "object" else own.loss, lambda: setattr(own, "factor", 3.0)
    if kind == "partial":
        bound = functools.partial(scaled_mse, factor=1.0)
        return bound, lambda: bound.keywords.update(factor=3.0)
    if kind == "global":
        set_global(1.0)
        return scaled_mse, lambda: set_global(3.0)
    held = {"number": 1.0, "tensor": torch.ones((), dtype=torch.float64), "dict": {"factor": 1.0}, "inner": None}[kind]
    if kind == "inner":
        own = Factor()
        return lambda output, y: own(output, y), lambda: setattr(own, "factor", 3.0)

    def change():
        nonlocal held
        if kind == "dict":
            held["factor"] = 3.0
        else:
            held = held * 3

    def loss_fn(output, y):
        return (held["factor"] if kind == "dict" else held) * nn.functional.mse_loss(output, y)

    return loss_fn, change


@pytest.mark.parametrize(
    "kind", ["module", "parameter", "object", "method", "partial", "global", "number", "tensor", "dict", "inner"]
)
def test_a_graph_is_made_anew_where_the_loss_changes(kind):
    def run(engine):
        loss_fn, change = losses_and_changes(kind)
        maml = learner(MLP, loss_fn=loss_fn, engine=engine, inner_steps=1)
        before = trained(maml, MLP)
        change()
        return before, trained(maml, MLP)

    (before, after), wanted = run("traced"), run("vmap")
    assert distance(before, wanted[0]) < 1e-12
    assert distance(after, wanted[1]) < 1e-12


def retie(model):
    model.head.weight = model.other.weight


class Square(nn.Module):
    """Parameters of one shape, two of them tied."""

    def __init__(self):
        super().__init__()
        self.body, self.other, self.head = (nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(self.norm(self.other(self.body(x).tanh()))).sum(-1, keepdim=True)


def swap_norm(model):
    weight = model.norm.weight
    del model.norm.weight
    model.norm.weight = weight


class Doubled(nn.Tanh):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", [swap_norm, retie])
def test_a_graph_follows_names_and_ties_of_parameters(change):
    problem = Problem("square", Square)
    plain, traced = (learner(problem, engine=e, inner_steps=1) for e in ("vmap", "traced"))
    for again in (False, True):
        for maml in (plain, traced):
            if again:
                change(maml.model)
        a, b = (trained(maml, problem) for maml in (plain, traced))
        assert distance(b, a) < 1e-12


def test_a_graph_follows_the_class_of_a_module_and_hooks_of_all_modules():
    problem = Problem("tempered", Tempered)
    plain, traced = (learner(problem, engine=e, inner_steps=1) for e in ("vmap", "traced"))

    def both():
        a, b = (trained(maml, problem) for maml in (plain, traced))
        assert distance(b, a) < 1e-12

    both()
    for maml in (plain, traced):
        maml.model.act.__class__ = Doubled
    both()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 3 * output if isinstance(module, nn.Tanh) else None
    )
    try:
        both()
    finally:
        hook.remove()


def test_a_graph_of_a_number_taken_out_of_a_tensor_is_refused():
    kept = torch.ones((), dtype=torch.float64)
    maml = learner(MLP, loss_fn=lambda o, y: float(kept) * nn.functional.mse_loss(o, y), engine="traced", inner_steps=1)
    with pytest.raises(ValueError, match=r"takes the number out of one .*use engine='vmap'"):
        trained(maml, MLP)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda maml, i: setattr(maml.model, "temperature", 1.0 + i), "the model's attributes temperature change"),
        (lambda maml, i: setattr(maml, "loop", dataclasses.replace(maml.loop, lr=0.1 + 0.01 * i)), "settings change"),
    ],
    ids=["attribute", "setting"],
)
def test_graphs_made_over_and_over_are_warned_about_once(change, because):
    maml = learner(MLP, engine="traced", inner_steps=1)
    optimizer = torch.optim.SGD(maml.model.parameters(), lr=0.0)

    def steps(*numbers):
        for i in numbers:
            change(maml, i)
            maml.step(MLP.tasks(2), optimizer)

    steps(*range(MANY - 1))
    with pytest.warns(UserWarning, match=rf"{MANY} graphs were made so far, .* since .*{because}"):
        steps(MANY)
    steps(MANY + 1)  # warnings are errors


def test_graphs_refuse_a_forward_that_counts():
    problem = Problem("counting", lambda: Keeping("calls"))
    with pytest.raises(ValueError, match=r"changes the model's attribute 'calls'.*engine='vmap'"):
        trained(learner(problem, engine="traced"), problem)


def test_graphs_of_complex_parameters():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs()

    problem = Problem("spectral", Spectral)
    torch.manual_seed(0)
    model = Spectral()
    a, b = (trained(learner(problem, model=copy.deepcopy(model), engine=e), problem) for e in ("vmap", "traced"))
    torch.testing.assert_close(b["weight"], a["weight"], rtol=1e-12, atol=0)


def test_graphs_refuse_dropout_random_rules_and_reuse():
    with pytest.raises(ValueError, match="no random numbers"):
        trained(learner(DROPOUT, engine="traced"), DROPOUT)
    with pytest.raises(ValueError, match="no random numbers"):
        trained(learner(MLP, engine="traced", variant="low", inner_rule=RandomSAM()), MLP)
    with pytest.raises(ValueError, match="reuse_inner_eps needs engine"):
        learner(MLP, engine="traced", variant="both", reuse_inner_eps=True)
    recurrent = nn.Sequential(nn.LSTM(3, 4))
    with pytest.raises(ValueError, match="engine='traced' cannot take this model"):
        trained(learner(MLP, model=recurrent.double(), engine="traced"), MLP)


def test_tracing_leaves_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trained(learner(MLP, engine="traced"), MLP)
    assert torch.equal(before, torch.get_rng_state())


def test_a_graph_that_disagrees_with_the_engine_is_found_out():
    factors = itertools.repeat(1.0)  # out of sight of whoever looks at the model's attributes

    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 1)

        def forward(self, x):
            return self.body(x) * next(factors)

    maml = learner(MLP, model=Forgetful().double(), engine="traced")
    maml.meta_loss(MLP.tasks(2))  # the engine is chosen
    factors = itertools.count(1)
    with pytest.raises(RuntimeError, match=r"other losses and gradients.*engine='vmap'"):
        trained(maml, MLP)


def test_a_graph_is_tidied_unless_it_writes_to_tensors():
    def function(x, y):
        back = x.transpose(0, 1).transpose(1, 0).detach()
        return back + torch.sin(y), y.transpose(0, 1) @ x + y.transpose(0, 1) @ x, x.transpose(0, 1)

    def writes(x, y):
        held = x.detach()
        held.add_(1)
        return x + y, held.detach()

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    for one, many in ((function, 6), (writes, None)):
        plain = make_fx(one)(x.clone(), y)
        count = len(plain.graph.nodes)
        tidy = traced._tidied(plain)
        calls = [n for n in tidy.graph.nodes if n.op == "call_function"]
        assert len(calls) == many if many else len(tidy.graph.nodes) == count
        for a, b in zip(tidy(x.clone(), y), one(x.clone(), y), strict=True):
            assert torch.equal(a, b)


def test_learners_with_graphs_can_be_copied_and_pickled():
    maml = learner(MLP, engine="traced", inner_steps=1)
    trained(maml, MLP)
    for other in (copy.deepcopy(maml), pickle.loads(pickle.dumps(maml))):
        assert_same(trained(other, MLP), trained(copy.deepcopy(maml), MLP))


def test_judging_is_the_engines():
    plain, traced = (learner(CONV, engine=e, variant="both") for e in ("vmap", "traced"))
    held = CONV.tasks(4)
    assert traced.evaluate(held) == plain.evaluate(held)
    assert torch.equal(traced.meta_loss(held), plain.meta_loss(held))
    single = Task(*((x[0], y[0]) for x, y in (held.support, held.query)))
    assert_same(dict(traced.adapt(single).named_parameters()), dict(plain.adapt(single).named_parameters()))


def test_compiled_is_the_engine():
    problem = PROBLEMS[2]
    settings = {"variant": "low", "inner_steps": 1}
    plain, compiled = (learner(problem, engine=e, **settings) for e in ("vmap", "compiled"))
    a, b = (trained(maml, problem, steps=3) for maml in (plain, compiled))
    assert distance(b, a) < 1e-9
    assert compiled.counts == plain.counts
    strided = problem.tasks(TASKS, seed=3).map(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
    assert not strided.support[0].is_contiguous()
    for tasks in (strided, strided.map(lambda t: t[1:])):  # however they lie, and however many
        found = []
        for maml in (plain, compiled):
            maml.step(tasks, torch.optim.SGD(maml.model.parameters(), lr=0.1))
            found.append({k: p.detach().clone() for k, p in maml.model.named_parameters()})
        assert distance(*found) < 1e-9
    assert sum(map(len, compiled.graphs._graphs.values())) == 1


def test_signs_still_to_be_taken_reach_no_machine_code():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    x = torch.complex(a, b).conj().imag  # a view of b whose sign is a flag
    assert x.is_neg()
    _, support, *_ = found = _inputs({"w": a}, Task((x, b), (a, b)), torch.ones(2))
    assert not any(t.is_neg() or t.is_conj() for t in found)
    assert torch.equal(support, -b)


# models and losses that do more than they are asked to


class Rude(nn.Module):
    """Writes to what it is called with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return self.layer(x.sub_(0.5).mul_(2.0))


def rude_loss(output, y):
    return F.mse_loss(output, y.add_(1.0))


def polite_loss(output, y):
    return F.mse_loss(output, y + 1.0)


class Polite(Rude):
    def forward(self, x):
        return self.layer((x - 0.5) * 2.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", [*WAYS, ("auto", 1)], ids=str)
def test_tasks_stay_as_they_are_whatever_a_model_and_a_loss_write_to(way, variant):
    def tasks(seed):
        torch.manual_seed(seed)
        return Task(*((torch.randn(TASKS, n, 3).double(), torch.randn(TASKS, n, 4).double()) for n in (4, 6)))

    def run(kind, loss_fn):
        torch.manual_seed(0)
        maml = SharpMAML(
            kind().double(), loss_fn, inner_lr=0.1, inner_steps=2, variant=variant, engine=way[0], workers=way[1]
        )
        optimizer, seen = torch.optim.SGD(maml.model.parameters(), lr=0.1), []
        for seed in (1, 1, 2):
            given = tasks(seed)
            seen.append(maml.step(given, optimizer))
            seen.append(maml.evaluate(given).loss)
            maml.adapt(given.unbind()[0])
            fresh = tasks(seed)
            pairs = zip((*given.support, *given.query), (*fresh.support, *fresh.query), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        return seen, dict(maml.model.named_parameters())

    (seen, found), (wanted_seen, wanted) = run(Rude, rude_loss), run(Polite, polite_loss)
    assert [float(s) for s in seen] == pytest.approx([float(s) for s in wanted_seen], rel=1e-12)
    assert distance(found, wanted) < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_of_tasks_may_be_sparse_or_dense(workers, chunk_size):
    class Either(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2)

        def forward(self, x):
            rows = self.embedding.weight[x] if x.max() > 3 else self.embedding(x)
            return self.head(rows)

    def run(sparse):
        torch.manual_seed(0)
        model = Either(sparse).double()
        maml = SharpMAML(
            model,
            F.cross_entropy,
            inner_lr=0.1,
            inner_steps=1,
            inner_params=["head.*"],
            engine="higher",
            workers=workers,
            chunk_size=chunk_size,
        )
        x = torch.randint(4, (5, 4))
        x[2:] += 2  # the first tasks are those of sparse gradients
        y = torch.randint(2, (5, 4))
        maml.step(Task((x, y), (x, y)), torch.optim.SGD(model.parameters(), lr=0.1))
        return {k: p.detach() for k, p in model.named_parameters()}

    assert distance(run(True), run(False)) < 1e-12


@pytest.mark.parametrize("variant", ["none", "low"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_losses_may_reach_weights_by_themselves(way, variant):
    """Those of the model, whose gradient has two parts then, and some of their own: all that `meta_loss` gives."""

    def made():
        model, temperature = MLP.model(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

        def loss_fn(output, y):
            return temperature.exp() * MLP.loss_fn(output, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

        settings = {"model": model, "loss_fn": loss_fn, "engine": way[0], "workers": way[1], "variant": variant}
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([temperature], lr=0.1)
        return learner(MLP, **settings), [*model.parameters(), temperature], *optimizers

    (plain, wanted, one, other), (maml, found, own, beside) = made(), made()
    if way[0] in inner.TRACED:
        with pytest.raises(ValueError, match=r"reaches (.\.(weight|bias)|a tensor \[\]) by itself.*engine='vmap'"):
            maml.step(MLP.tasks(TASKS), own)
        return
    # how many tasks decides whether there are several chunks, whose gradients are summed
    for seed, count in enumerate((1, TASKS, 1)):
        tasks = MLP.tasks(count, seed=seed)
        for optimizer in (one, other, beside):
            optimizer.zero_grad()
        plain.meta_loss(tasks).backward()
        one.step()
        maml.step(tasks, own)
        other.step()
        beside.step()
        assert max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-12
    assert abs(float(wanted[-1].detach()) - 0.3) > 1e-3
    again = copy.deepcopy(maml)
    assert again._beside.found is None
    maml.ranks = Ranks(0, 2)  # which would leave their temperatures apart
    with pytest.raises(ValueError, match=r"a tensor \[\] that needs gradients: make it a part of the model"):
        maml._check_shared()


def in_two_threads(work, *arguments):
    """``work`` of each of two arguments, side by side."""
    both = [threading.Thread(target=work, args=(a,)) for a in arguments]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


def test_two_threads_leave_the_settings_of_the_process_as_they_were():
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).double()

    def settings():
        backends = torch.backends
        return backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()

    before, barrier, wrong = settings(), threading.Barrier(2), []

    def within(waits):
        for i in range(50):
            barrier.wait()
            with inner.differentiable(model):
                time.sleep(0.001 * ((i + waits) % 2))
                wrong.extend(s for s in [settings()] if s != (False, False, True))

    in_two_threads(within, 0, 1)
    assert not wrong
    assert settings() == before != (False, False, True)


def test_two_learners_trace_in_two_threads():
    maml = [learner(MLP, engine="traced") for _ in range(2)]
    failed, barrier = [], threading.Barrier(2)

    def train(one):
        barrier.wait()
        try:
            trained(one, MLP)
        except BaseException as error:
            failed.append(error)

    in_two_threads(train, *maml)
    assert not failed
    wanted = trained(learner(MLP, engine="traced"), MLP)
    assert all(distance(dict(m.model.named_parameters()), wanted) < 1e-12 for m in maml)


@pytest.mark.parametrize("workers", [1, 2])
def test_counters_do_not_know_of_a_step_that_broke_off(workers):
    calls = itertools.count()
    armed = [False]

    def loss_fn(output, y):
        if armed[0] and next(calls) == 6:
            raise KeyError("no luck")
        return MLP.loss_fn(output, y)

    maml = learner(MLP, loss_fn=loss_fn, engine="higher", workers=workers)
    trained(maml, MLP, steps=1)
    before = dict(maml.counts), maml.gradient_evaluations, maml.steps
    armed[0] = True
    with pytest.raises(KeyError, match="no luck"):
        trained(maml, MLP, steps=1)
    assert (dict(maml.counts), maml.gradient_evaluations, maml.steps) == before
