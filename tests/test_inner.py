"""The two engines: they agree, their derivatives are right on every kind of layer, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from metasam import SharpMAML, Task, inner, tree
from metasam.perturb import Steepest
from metasam.rules import Agnostic, DirectionRule, Plain, Sharp, stackable

from . import references
from .cases import (
    CONV,
    ENGINES,
    MLP,
    PROBLEMS,
    RULES,
    Problem,
    assert_same,
    distance,
    each_engine,
    gradients,
    inner_loop,
    live,
    run_engine,
    slope,
)

BUFFERS = next(p for p in PROBLEMS if p.name == "buffers")
UNTOUCHED = next(p for p in PROBLEMS if p.name == "untouched")


# layers: batching rules of second derivatives have been wrong without a word


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, norm_first):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


def _around(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 6), norm(), nn.Tanh(), nn.Linear(6, 3))


def _image(*layers: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), *[make() for make in layers], nn.Tanh(), nn.Flatten(), nn.Linear(features, 3)
    )


@dataclass(frozen=True)
class Tokens(Problem):
    """Integer inputs."""

    def tasks(self, count=3, dtype=torch.float64, seed=2):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randint(k, (2, count, self.examples, *s), generator=generator) for k, s in ((7, (3,)), (3, ())))
        return Task((x[0], y[0]), (x[1], y[1]))


IMAGE = (1, 6, 6)
LAYERS = [
    Problem("BatchNorm1d", _around(lambda: nn.BatchNorm1d(6)), classes=3),
    Problem("BatchNorm1d-no-stats", _around(lambda: nn.BatchNorm1d(6, track_running_stats=False)), classes=3),
    Problem("LayerNorm", _around(lambda: nn.LayerNorm(6)), classes=3),
    Problem("RMSNorm", _around(lambda: nn.RMSNorm(6)), classes=3),
    Problem("GroupNorm", _around(lambda: nn.GroupNorm(2, 6, eps=0.1)), classes=3),
    Problem("BatchNorm2d", _image(lambda: nn.BatchNorm2d(2), features=32), IMAGE, 3),
    Problem("BatchNorm2d-plain", _image(lambda: nn.BatchNorm2d(2, affine=False), features=32), IMAGE, 3),
    Problem("GroupNorm2d", _image(lambda: nn.GroupNorm(1, 2), features=32), IMAGE, 3),
    Problem("InstanceNorm2d", _image(lambda: nn.InstanceNorm2d(2, affine=True), features=32), IMAGE, 3),
    Problem("MaxPool", _image(lambda: nn.MaxPool2d(2), features=8), IMAGE, 3),
    Problem("AvgPool", _image(lambda: nn.AvgPool2d(2), features=8), IMAGE, 3),
    Problem("BatchNorm-MaxPool", _image(lambda: nn.BatchNorm2d(2), lambda: nn.MaxPool2d(2), features=8), IMAGE, 3),
    Problem("Conv1d", lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(9, 3)), (2, 4), 3),
    Problem("MultiheadAttention", Attention, (3, 4), 3),
    Problem("TransformerEncoderLayer", lambda: Transformer(False), (3, 4), 3),
    Problem("TransformerEncoderLayer-norm-first", lambda: Transformer(True), (3, 4), 3),
    Tokens("Embedding", lambda: nn.Sequential(nn.Embedding(7, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)), classes=3),
]


@pytest.mark.parametrize("problem", LAYERS, ids=lambda p: p.name)
def test_second_derivatives_are_right_on_every_layer(problem):
    model, tasks = problem.model(), problem.tasks(2, seed=4)  # no maximum of a pool changes places in the differences
    loop = inner_loop(model, problem, Sharp(0.05), steps=2)
    found, wanted = slope(lambda: run_engine("vmap", loop, tasks).loss.mean(), model)
    assert found == pytest.approx(wanted, rel=1e-7, abs=1e-9)
    vmap, higher = (gradients(run_engine(e, loop, tasks).loss.mean(), model) for e in ("vmap", "higher"))
    assert distance(vmap, higher) < 1e-12


@pytest.mark.parametrize("problem", LAYERS, ids=lambda p: p.name)
def test_vmap_takes_every_layer_on_its_own_choice(problem):
    learner = SharpMAML(problem.model(), problem.loss_fn, inner_lr=0.1, inner_steps=1, variant="low")
    learner.meta_loss(problem.tasks(2))
    assert learner.engine_used == "vmap", learner.engine_reason


@each_engine
def test_dropout_draws_a_mask_for_each_task(engine):
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    single = MLP.tasks(1)
    twins = single.map(lambda t: t.repeat(2, *[1] * (t.ndim - 1)))
    loop = inner_loop(model, MLP, Sharp(0.1))
    losses = run_engine(engine, loop, twins).loss
    assert losses[0] != losses[1]
    assert all(g.isfinite().all() for g in gradients(losses.mean(), model).values())
    learner = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=2, variant="low", engine=engine)
    assert len(set(learner.evaluate(twins).per_task)) == 1


# a rule on the tensors of all tasks, and under vmap

STACKABLE = [c for c in RULES if stackable(c.rule) and not c.refused]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
@pytest.mark.parametrize("case", STACKABLE, ids=lambda c: c.name)
def test_rules_that_stack_do_under_vmap_what_they_do_stacked(case, problem, monkeypatch):
    model, tasks = problem.model(), problem.tasks()
    found = []
    for stacks in (True, False):
        monkeypatch.setattr(inner.vmap, "stackable", lambda rule, stacks=stacks: stacks)
        loop = inner_loop(model, problem, case.rule, keep_eps=True)
        adapted = run_engine("vmap", loop, tasks)
        weights = torch.arange(1.0, len(adapted.loss) + 1, dtype=adapted.loss.dtype)
        found.append((loop, adapted, gradients((adapted.loss * weights).sum(), model)))
    (one, stacked, gradient), (other, vmapped, wanted) = found
    assert one.counts == other.counts
    assert distance(gradient, wanted) < 1e-12
    torch.testing.assert_close(stacked.loss, vmapped.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(stacked.output, vmapped.output, rtol=1e-12, atol=1e-12)
    assert distance(stacked.params, vmapped.params) < 1e-12
    assert len(stacked.eps) == len(vmapped.eps) == loop.steps
    for mine, its in zip(stacked.eps, vmapped.eps, strict=True):
        assert mine.keys() == its.keys()
        assert all(torch.allclose(mine[k], its[k], rtol=1e-10, atol=1e-12) for k in its)


def test_a_class_says_for_itself_that_it_stacks():
    @dataclass(frozen=True)
    class OwnRule(Sharp):
        pass

    @dataclass(frozen=True)
    class OwnGeometry(Steepest):
        pass

    assert stackable(Sharp())
    assert not stackable(OwnRule())
    assert not stackable(Sharp(perturb=OwnGeometry()))
    assert {c.name.partition("-")[0] for c in RULES if not stackable(c.rule)} == {
        *("lookbehind", "momentum", "random", "rwp", "esam", "sparse")
    }


class Norms(DirectionRule):
    """Reduces tensors itself, which only vmap makes a task's own."""

    def direction(self, at, params, state):
        return {k: g / (1 + g.norm()) for k, g in at().grads.items()}, state


def test_a_rule_of_ones_own_is_right_without_saying_anything():
    model, tasks = MLP.model(), MLP.tasks()
    one, other = (run_engine(engine, inner_loop(model, MLP, Norms()), tasks) for engine in ENGINES)
    assert distance(one.params, other.params) < 1e-13


# tensors and modules of several names


class Repeated(nn.Module):
    """A layer twice, by two names; ``apart``: by one, which is the same function."""

    def __init__(self, apart):
        super().__init__()
        self.a, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        if not apart:
            self.b = self.a
            self.register_buffer("view", self.head.weight)
        self.apart = apart

    def forward(self, x):
        again, weight = (self.a, self.head.weight) if self.apart else (self.b, self.view)
        return again(torch.tanh(self.a(x))) @ weight.T + self.head(x)


@pytest.mark.parametrize("engine", [*ENGINES, "traced"])
def test_a_module_of_two_names_and_a_parameter_that_is_a_buffer_too(engine):
    torch.manual_seed(0)
    one = Repeated(apart=True).double()
    two = Repeated(apart=False).double()
    two.load_state_dict(one.state_dict(), strict=False)
    two.view = two.head.weight.detach()  # as a move to another dtype left it apart
    two._buffers["view"] = two.head.weight
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tasks = Task((x, x.sum(-1, keepdim=True)), (x.flip(1), x.flip(1).prod(-1, keepdim=True)))
    found = []
    for model in (one, two):
        maml = SharpMAML(model, nn.functional.mse_loss, inner_lr=0.1, inner_steps=2, variant="low", engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            maml.step(tasks, optimizer)
        judged = [maml.evaluate(tasks).loss for _ in range(2)]
        assert judged[0] == judged[1]
        assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())
        found.append({k: p.detach() for k, p in model.named_parameters()})
    assert distance(found[1], found[0]) < 1e-13


# what an engine leaves alone, and what it returns


@each_engine
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_judging_builds_no_graph(engine, problem):
    model = problem.model()
    found = run_engine(engine, inner_loop(model, problem, Sharp(0.1), training=False), problem.tasks())
    assert not found.loss.requires_grad
    assert not found.output.requires_grad
    assert all(p.grad_fn is None for p in found.params.values())
    assert all(p.grad is None for p in model.parameters())


@each_engine
def test_buffers_of_the_model_stay_as_they_are(engine):
    model = BUFFERS.model()
    gradients(run_engine(engine, inner_loop(model, BUFFERS, Sharp(0.1)), BUFFERS.tasks()).loss.sum(), model)
    assert model.calls == 0


@each_engine
def test_outputs_are_those_of_the_adapted_parameters(engine):
    model, tasks = MLP.model(), MLP.tasks()
    found = run_engine(engine, inner_loop(model, MLP, Sharp(0.1)), tasks)
    for i, task in enumerate(tasks.unbind()):
        out = torch.func.functional_call(model, {k: v[i] for k, v in found.params.items()}, task.query[0])
        torch.testing.assert_close(found.output[i], out, rtol=1e-13, atol=0)
        torch.testing.assert_close(found.loss[i], MLP.loss_fn(out, task.query[1]), rtol=1e-13, atol=0)


@each_engine
def test_tasks_do_not_see_each_other(engine):
    loop, tasks = inner_loop(CONV.model(), CONV, Sharp(0.1)), CONV.tasks(3)
    together = run_engine(engine, loop, tasks)
    for i in range(3):
        alone = run_engine(engine, loop, tasks.map(lambda t, i=i: t[i : i + 1]))
        assert (
            distance({k: v[0] for k, v in alone.params.items()}, {k: v[i] for k, v in together.params.items()}) < 1e-13
        )
        assert torch.allclose(alone.loss[0], together.loss[i], rtol=1e-13)


@each_engine
def test_kept_displacements_give_the_same_adaptation_again(engine):
    model, tasks = MLP.model(), MLP.tasks()
    loop = inner_loop(model, MLP, Sharp(0.1), keep_eps=True)
    first = run_engine(engine, loop, tasks)
    assert len(first.eps) == 3
    assert not any(v.requires_grad for eps in first.eps for v in eps.values())
    norms = torch.stack([sum(v.square().flatten(1).sum(1) for v in eps.values()).sqrt() for eps in first.eps])
    torch.testing.assert_close(norms, torch.full((3, 3), 0.1, dtype=torch.float64))
    before = loop.counts["support"]
    second = inner.ENGINES[engine](loop, dict(model.named_parameters()), tasks, first.eps)
    assert_same(second.params, first.params)
    assert loop.counts["support"] - before == 9


@each_engine
def test_only_named_parameters_adapt(engine):
    model, tasks = MLP.model(), MLP.tasks()
    found = run_engine(engine, inner_loop(model, MLP, Sharp(0.1), adapted=frozenset({"2.weight", "2.bias"})), tasks)
    assert found.params.keys() == {"2.weight", "2.bias"}
    assert gradients(found.loss.mean(), model)["0.weight"].abs().max() > 0


@each_engine
def test_an_adapting_parameter_that_no_loss_touches_stays(engine):
    model = UNTOUCHED.model()
    found = run_engine(engine, inner_loop(model, UNTOUCHED, Sharp(0.1), training=False), UNTOUCHED.tasks(2))
    assert torch.equal(found.params["spare.weight"].detach(), model.spare.weight.detach().expand(2, 2, 2))


@dataclass(frozen=True)
class Noting(DirectionRule):
    """Plain, and notes which parameters have gradients."""

    seen: list

    def direction(self, at, params, state):
        grads = at().grads
        self.seen.append(set(grads))
        return grads, state


def test_no_gradient_is_a_missing_key_in_every_runtime():
    rule, body = Noting([]), {"body.weight", "body.bias"}
    for engine in ENGINES:
        run_engine(engine, inner_loop(UNTOUCHED.model(), UNTOUCHED, rule, steps=1), UNTOUCHED.tasks(1))
    live(UNTOUCHED, rule, steps=1)
    assert rule.seen == [body] * 3


@pytest.mark.parametrize("rule", [Plain(), Sharp(0.1)], ids=["plain", "sam"])
def test_a_model_with_several_outputs_is_fine(rule):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 1)

        def forward(self, x):
            return {"mean": self.body(x), "raw": x}

    model, tasks = Two().double(), MLP.tasks()
    results = [
        SharpMAML(
            model, lambda out, y: MLP.loss_fn(out["mean"], y), inner_lr=0.1, inner_steps=2, inner_rule=rule, engine=e
        ).meta_loss(tasks)
        for e in ENGINES
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_kernels_and_flags_are_put_back():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with inner.differentiable(nn.LSTM(2, 2)):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())


# the choice


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.body = nn.Identity(), nn.Linear(3, 1)

    def forward(self, x):
        x = self.gate(x)
        return self.body(x) if x.sum() > 0 else self.body(-x)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1)

    def forward(self, x):
        return self.body(x)


def learner(model, engine="auto", **settings):
    return SharpMAML(model.double(), MLP.loss_fn, inner_lr=0.1, inner_steps=1, engine=engine, **settings)


@pytest.mark.parametrize(
    ("model", "names"), [(Recurrent(), ["LSTM", "'lstm'"]), (Deciding(), ["Deciding", "vmap"])], ids=["lstm", "if"]
)
def test_auto_takes_higher_with_a_reason_and_vmap_refuses_with_the_same(model, names):
    auto = learner(model)
    loss = auto.meta_loss(MLP.tasks())
    assert auto.engine_used == "higher"
    assert all(n in auto.engine_reason for n in names), auto.engine_reason
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, model).values())
    with pytest.raises(ValueError, match=names[0]) as refusal:
        learner(model, "vmap").meta_loss(MLP.tasks())
    assert "engine='higher'" in str(refusal.value)


def test_auto_takes_vmap_where_it_can():
    auto = learner(MLP.model())
    auto.meta_loss(MLP.tasks())
    assert (auto.engine_used, auto.engine_reason) == ("vmap", "the model allows it")
    asked = learner(MLP.model(), "higher")
    asked.meta_loss(MLP.tasks())
    assert (asked.engine_used, asked.engine_reason) == ("higher", "as asked")


def test_per_step_statistics_need_higher():
    auto = SharpMAML(CONV.model(), CONV.loss_fn, inner_lr=0.1, inner_steps=1, batchnorm="per_step")
    auto.meta_loss(CONV.tasks())
    assert auto.engine_used == "higher"
    assert "per_step" in auto.engine_reason
    with pytest.raises(ValueError, match="per_step"):
        SharpMAML(
            CONV.model(), CONV.loss_fn, inner_lr=0.1, inner_steps=1, batchnorm="per_step", engine="vmap"
        ).meta_loss(CONV.tasks())


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_a_models_own_error_is_raised(engine):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learner(Broken(), engine).meta_loss(MLP.tasks())


def test_trying_an_engine_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    state = torch.get_rng_state()
    auto = learner(model)
    auto.meta_loss(MLP.tasks(2))
    after_auto = torch.get_rng_state()
    torch.set_rng_state(state)
    asked = learner(model, "vmap")
    asked.engine_used = "vmap"
    asked.meta_loss(MLP.tasks(2))
    assert torch.equal(torch.get_rng_state(), after_auto)
    assert auto.counts == asked.counts
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def no_noise(like, key):
    raise AssertionError(key)


def oracle_of(rule, examples=5):
    model, task = MLP.model(), MLP.tasks(1).unbind()[0]
    support = tuple(t[:examples] for t in task.support)
    return inner.loop.SupportOracle(
        inner_loop(model, MLP, rule),
        inner.loop.gradient,
        no_noise,
        dict(model.named_parameters()),
        {},
        support,
        0,
        1,
    )


def test_only_a_rule_that_validates_splits_the_support_set():
    with pytest.raises(ValueError, match="'val' of a rule that validates"):
        oracle_of(Plain())(on="val")
    at, (x, y) = oracle_of(Agnostic()), MLP.tasks(1).unbind()[0].support
    for on, part in (("train", slice(0, 4)), ("val", slice(4, 5))):
        wanted = references.gradient_of(MLP.model(), MLP.loss_fn, x[part], y[part])(at.params)
        assert distance(at(on=on).grads, wanted) < 1e-13
    with pytest.raises(ValueError, match="at least 2 examples"):
        oracle_of(Agnostic(), 1)()


@each_engine
def test_parts_of_the_support_set(engine):
    from .test_optim import Halves

    model, tasks = MLP.model(), MLP.tasks()
    four = Task(tuple(t[:, :4] for t in tasks.support), tasks.query)
    halves, whole = (
        run_engine(engine, inner_loop(model, MLP, r), t).params for r, t in ((Halves(), tasks), (Plain(), four))
    )
    assert distance(tree.detach(halves), tree.detach(whole)) < 1e-13
