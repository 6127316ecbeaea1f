"""Faster ways to the same meta-gradient: threads that share the tasks, and graphs traced before."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from metasam import SharpMAML, Task, inner
from metasam.inner.choose import WIDE
from metasam.meta import VARIANTS
from metasam.rules import Agnostic, RandomSAM

from .cases import CONV, MLP, PROBLEMS, Problem, assert_same, distance, each_inner_rule, each_problem

TASKS = 5
RANDOM = {"random", "rwp", "esam", "sparse-dynamic"}


def learner(problem: Problem, **settings):
    model = settings.pop("model", None) or problem.model()
    return SharpMAML(model, problem.loss_fn, **{"inner_lr": 0.1, "inner_steps": 2, "variant": "none", **settings})


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

    def __init__(self, broken=False):
        super().__init__()
        self.body, self.broken, self.seen = nn.Linear(3, 1), broken, []

    def __deepcopy__(self, memo):
        twin = type(self)(self.broken)
        twin.body, twin.seen = copy.deepcopy(self.body, memo), self.seen
        return twin

    def forward(self, x):
        if self.broken and threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("no such luck")
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


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "all"])
def test_workers_are_counted(workers):
    with pytest.raises(ValueError, match="expected workers"):
        learner(MLP, workers=workers)


# which engine


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


class Forgetful(nn.Module):
    """Multiplies by a number that Python holds: one at the first call, another afterwards."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = nn.Linear(3, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) * self.calls


def test_a_graph_that_disagrees_with_the_engine_is_found_out():
    with pytest.raises(RuntimeError, match=r"other losses and gradients.*engine='vmap'"):
        trained(learner(MLP, model=Forgetful().double(), engine="traced"), MLP)


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
