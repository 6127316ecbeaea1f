"""Running statistics: counted once by the optimizer, kept apart by the inner loop."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from metasam import SAM, SharpMAML, SharpnessAware, Task, batchnorm
from metasam.rules import Sharp

from .cases import CONV, assert_same, closure_of

POLICIES = batchnorm.POLICIES
each_policy = pytest.mark.parametrize("policy", POLICIES)


def buffers_of(model):
    return {k: b.clone() for k, b in model.named_buffers()}


def network(momentum=0.1):
    model = CONV.model()
    model[1].momentum = momentum
    return model


# the live optimizer


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_counts_its_batch_once(momentum, given, steps):
    model, plain = network(momentum), network(momentum)
    optimizer = SAM(model.parameters(), lr=0.0, rho=0.5, steps=steps, model=model if given else None)
    for seed in range(3):
        optimizer.step(closure_of(CONV, model, CONV.batch(seed=seed)))
        plain(CONV.batch(seed=seed)[0])
    assert_same(buffers_of(model), buffers_of(plain))
    assert model[1].num_batches_tracked == 3


@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
def test_an_exception_in_the_second_pass_leaves_norms_as_they_were(given):
    model = network()
    optimizer = SAM(model.parameters(), lr=0.1, model=model if given else None)

    def change(n, loss):
        if n == 1:
            raise RuntimeError("stop")
        return loss

    with pytest.raises(RuntimeError, match="stop"):
        optimizer.step(closure_of(CONV, model, CONV.batch(), change))
    assert model[1].track_running_stats
    before = model[1].num_batches_tracked.clone()
    model(CONV.batch()[0])
    assert model[1].num_batches_tracked == before + 1


@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
def test_frozen_changes_no_output_and_no_buffer(given):
    model, (x, _) = network(), CONV.batch()
    model(x)
    for training in (True, False):
        model.train(training)
        wanted, home = model(x).detach(), buffers_of(model)
        with batchnorm.frozen(model if given else None), batchnorm.frozen(model):
            assert torch.equal(model(x), wanted)
            assert_same(buffers_of(model), home)
        assert model[1].track_running_stats


def test_frozen_hooks_reach_models_that_nobody_named():
    inside, outside = network(), network()
    with batchnorm.frozen():
        inside(CONV.batch()[0])
    outside(CONV.batch()[0])
    assert inside[1].num_batches_tracked == 0
    assert outside[1].num_batches_tracked == 1


def test_a_norm_without_statistics_stays_without():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))
    with batchnorm.frozen(model):
        model(torch.randn(4, 3))
    assert not model[0].track_running_stats


def spectral(old):
    wrap = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(wrap(nn.Linear(3, 5)), nn.Tanh(), wrap(nn.Linear(5, 1))).double()


@pytest.mark.filterwarnings("ignore:.*nn.utils.spectral_norm.*is deprecated")
@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
@pytest.mark.parametrize("old", [True, False])
def test_the_power_iteration_of_spectral_norm_advances_once_a_step(old, given):
    model, plain = spectral(old), spectral(old)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    optimizer = SAM(model.parameters(), lr=0.0, rho=0.5, steps=2, model=model if given else None)

    def closure():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        plain(x)
    assert len(buffers_of(model)) == 4
    assert_same(buffers_of(model), buffers_of(plain))


SCRIPTED = {
    "script": lambda model: torch.jit.script(model),
    "trace": lambda model: torch.jit.trace(model, CONV.batch()[0], check_trace=False),
    "script in a module": lambda model: nn.Sequential(torch.jit.script(model)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
@pytest.mark.parametrize("how", SCRIPTED.values(), ids=SCRIPTED)
def test_scripted_norms_count_a_batch_once(how, given):
    model, plain = how(network()), how(network())
    before = next(b for n, b in model.named_buffers() if n.endswith("tracked")).clone()
    optimizer = SAM(model.parameters(), lr=0.0, rho=0.5, model=model if given else None)
    for seed in range(3):
        optimizer.step(closure_of(CONV, model, CONV.batch(seed=seed)))
        plain(CONV.batch(seed=seed)[0])
    assert_same(
        buffers_of(model),
        {k: b + (3 + before - b if k.endswith("tracked") else 0) for k, b in buffers_of(plain).items()},
    )


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
def test_a_compiled_function_that_calls_the_model_counts_a_batch_once(given):
    torch.compiler.reset()
    model, plain, (x, y) = network(), network(), CONV.batch()
    compiled = torch.compile(lambda x, y: CONV.loss_fn(model(x), y), backend="aot_eager")
    optimizer = SAM(model.parameters(), lr=0.0, rho=0.5, model=model if given else None)

    def closure():
        loss = compiled(x, y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        plain(x)
    assert_same(buffers_of(model), buffers_of(plain))


def test_models_that_run_in_other_threads_count_as_ever():
    inside, outside, entered, left = network(), network(), threading.Event(), threading.Event()

    def run():
        entered.wait(10)
        outside(CONV.batch()[0])
        left.set()

    thread = threading.Thread(target=run)
    thread.start()
    with batchnorm.frozen():
        inside(CONV.batch()[0])
        entered.set()
        assert left.wait(10)
    thread.join()
    assert inside[1].num_batches_tracked == 0
    assert outside[1].num_batches_tracked == 1


@pytest.mark.parametrize("given", [True, False], ids=["model", "hooks"])
@pytest.mark.parametrize("how", ["closure", "passes", "examples"])
def test_a_skipped_step_leaves_running_statistics(how, given):
    model, (x, y) = network(), CONV.batch()
    model(x)
    home = buffers_of(model)
    optimizer = SAM(model.parameters(), lr=0.1, model=model if given else None, m=2 if how == "examples" else None)

    def step(x):
        if how == "passes":
            for _ in optimizer.passes():
                CONV.loss_fn(model(x), y).backward()
        elif how == "closure":
            optimizer.step(closure_of(CONV, model, (x, y)))
        else:
            optimizer.step(
                lambda part=slice(None): nn.functional.cross_entropy(model(x[part]), y[part], reduction="none")
            )

    step(x * float("nan"))
    assert optimizer.skipped == 1
    assert_same(buffers_of(model), home)
    step(x)
    assert model[1].num_batches_tracked == 2


# the inner loop


def maml(policy, engine="higher", model=None, **settings):
    model = network() if model is None else model
    model[1].running_mean.copy_(torch.tensor([0.3, -0.2]))
    model[1].running_var.copy_(torch.tensor([1.5, 0.5]))
    settings = {"inner_lr": 0.1, "inner_steps": 2, "variant": "both", **settings}
    return SharpMAML(model, CONV.loss_fn, engine=engine, batchnorm=policy, **settings)


@each_policy
@pytest.mark.parametrize("engine", ["higher", "auto"])
def test_tasks_never_reach_the_models_own_statistics(policy, engine):
    learner = maml(policy, engine)
    home, modes = buffers_of(learner.model), [m.training for m in learner.model.modules()]
    optimizer = torch.optim.SGD(learner.model.parameters(), 0.1)
    learner.step(CONV.tasks(), optimizer)
    learner.evaluate(CONV.tasks())
    learner.adapt(CONV.tasks().unbind()[0])
    assert_same(buffers_of(learner.model), home)
    assert [m.training for m in learner.model.modules()] == modes
    assert learner.model[1].track_running_stats


def test_frozen_reads_the_models_statistics():
    tasks = CONV.tasks()
    losses = []
    for policy, spoil in (("frozen", False), ("frozen", True), ("batch", False), ("batch", True)):
        learner = maml(policy)
        if spoil:
            learner.model[1].running_mean += 1.0
        losses.append(float(learner.meta_loss(tasks).detach()))
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
    eval_mode = maml("frozen", variant="none")
    twin = maml("frozen", variant="none", model=network().eval())
    assert torch.equal(eval_mode.meta_loss(tasks), twin.meta_loss(tasks))


def test_per_step_collects_what_each_clean_pass_saw():
    learner, tasks = maml("per_step", variant="low", inner_steps=2), CONV.tasks(1)
    start = {k: b.clone() for k, b in learner.loop.per_step.buffers.items()}
    learner.meta_loss(tasks)
    stored = learner.loop.per_step.buffers
    # row 0 is the first support pass, at the weights of the meta-model: what plain BatchNorm would have counted
    reference = network()
    reference[1].load_state_dict(
        {**reference[1].state_dict(), **{k[2:]: b[0] for k, b in start.items() if k.startswith("1.")}}
    )
    reference(tasks.support[0][0])
    assert torch.equal(stored["1.running_mean"][0], reference[1].running_mean)
    assert torch.equal(stored["1.running_var"][0], reference[1].running_var)
    assert stored["1.num_batches_tracked"].tolist() == [1, 1, 1]
    assert not torch.equal(stored["1.running_mean"][2], start["1.running_mean"][2])


def test_per_step_norms_may_share_a_buffer():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model[2].running_mean = model[1].running_mean
    learner = SharpMAML(
        model, nn.functional.mse_loss, inner_lr=0.1, inner_steps=1, variant="none", batchnorm="per_step"
    )
    x, y = torch.randn(2, 6, 3).double(), torch.randn(2, 6, 2).double()
    found = learner.meta_loss(Task((x, y), (x, y)))
    apart = copy.deepcopy(model)
    apart[2].running_mean = apart[2].running_mean.clone()
    other = SharpMAML(apart, nn.functional.mse_loss, inner_lr=0.1, inner_steps=1, variant="none", batchnorm="per_step")
    assert torch.equal(found, other.meta_loss(Task((x, y), (x, y))))


def test_per_step_counts_each_task_once_in_spite_of_the_second_outer_pass():
    learner = maml("per_step", variant="up")
    learner.step(CONV.tasks(3), torch.optim.SGD(learner.model.parameters(), 0.1))
    assert learner.loop.per_step.buffers["1.num_batches_tracked"].tolist() == [3, 3, 3]


def test_evaluation_writes_no_statistics():
    learner = maml("per_step")
    learner.meta_loss(CONV.tasks())
    home = {k: b.clone() for k, b in learner.loop.per_step.buffers.items()}
    learner.evaluate(CONV.tasks())
    learner.adapt(CONV.tasks().unbind()[0])
    assert_same(learner.loop.per_step.buffers, home)


@pytest.mark.parametrize(("policy", "transductive"), [("batch", True), ("frozen", False), ("per_step", False)])
def test_whether_a_prediction_depends_on_the_other_queries(policy, transductive):
    learner, task = maml(policy), CONV.tasks(1)
    learner.meta_loss(CONV.tasks(3, seed=9))
    (x, y), changed = task.query, task.query[0].clone()
    changed[0, 1:] += 1.0
    outputs = []
    for query in (x, changed):
        batch = Task(task.support, (query, y))
        with torch.no_grad(), learner._ready(loop := learner._judging(None, False), batch):
            outputs.append(learner._adapt(loop, batch).output[0, 0])
    assert torch.equal(*outputs) != transductive
    assert learner.evaluate(task).transductive == transductive
    model = learner.adapt(task.unbind()[0])
    assert torch.equal(model(x[0])[0], model(changed[0])[0]) != transductive


def test_a_model_without_batch_statistics_is_not_transductive():
    assert not batchnorm.is_transductive(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3)), "batch")
    assert batchnorm.is_transductive(nn.BatchNorm1d(3), "batch")
    assert not batchnorm.is_transductive(nn.BatchNorm1d(3), "frozen")
    assert batchnorm.is_transductive(nn.BatchNorm1d(3, track_running_stats=False), "frozen")


def test_the_outer_optimizer_alone_counts_nothing_under_batch():
    model = network()
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), 0.1), Sharp(), model=model)
    with batchnorm.mode(model, "batch", training=True):
        optimizer.step(closure_of(CONV, model, CONV.batch()))
    assert model[1].num_batches_tracked == 0
