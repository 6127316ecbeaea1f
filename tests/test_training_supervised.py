"""Supervised runs in the trainer: what they cost, when they end, and that they continue to the same bits."""

import functools
import json
import math

import pytest
import torch
from torch import nn

from metasam import checkpoint
from metasam.checkpoint import CheckpointError
from metasam.optim import SharpnessAware
from metasam.rules import NAMED, make
from metasam.tasks.streams import Supervised as Data
from metasam.training import assemble, metrics, plots
from metasam.training.budget import SCHEDULES, Budget
from metasam.training.supervised import Supervised
from metasam.training.trainer import Trainer

EVALUATIONS = {  # of one step in batches of 16, validation batches of 4; forwards alone count a third
    "plain": 1, "sam": 2, "usam": 2, "asam": 2, "fisher": 2, "multistep": 3, "lookbehind": 3, "gsam": 2, "friendly": 2,
    "vasso": 2, "wsam": 2, "momentum": 1, "random": 2, "rwp": 2, "agnostic": 2 + 2 / 4, "esam": 1 + 1 / 3 + 8 / 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    if "picture" not in request.node.name:
        monkeypatch.setattr(plots, "learning_curve", lambda *_: False)


def blobs(seed=0, **options):
    generator = torch.Generator().manual_seed(7)
    means = 2 * torch.randn(3, 5, generator=generator)

    def some(n):
        y = torch.arange(n) % 3
        return means[y] + torch.randn(n, 5, generator=generator), y

    return Data(some(60), some(30), some(33), batch_size=16, seed=seed, **options)


def learner(rule="sam", *, data=None, dropout=0.0, norm=True, loss=nn.functional.cross_entropy, **settings):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = make(rule) if isinstance(rule, str) else rule
    return Supervised(model, loss, SharpnessAware(base, rule, model=model, **settings), data or blobs())


@pytest.mark.parametrize("rule", sorted(EVALUATIONS))
def test_a_step_costs_what_the_table_says(rule):
    one = learner(rule)
    for number in range(3):
        one.step(number)
    assert one.gradient_evaluations == pytest.approx(3 * EVALUATIONS[rule])


def test_steps_that_cost_differently():
    looksam = learner("looksam")  # every 5th step is a full one
    costs = []
    for number in range(7):
        before = looksam.gradient_evaluations
        looksam.step(number)
        costs.append(looksam.gradient_evaluations - before)
    assert costs == [2, 1, 1, 1, 1, 2, 1]
    sparse = learner("sparse", norm=False)  # the first step looks at 16 single examples of its batch of 16
    sparse.step(0)
    assert sparse.gradient_evaluations == pytest.approx(2 + 16 / 16)
    sparse.step(1)
    assert sparse.gradient_evaluations == pytest.approx(5)
    shards = learner(make("sam").__class__(0.05, m=8))  # each half twice, and a forward to count the examples
    shards.step(0)
    assert shards.gradient_evaluations == pytest.approx(2 + 1 / 3)
    assert set(EVALUATIONS) | {"looksam", "sparse"} == set(NAMED)


def test_a_step_is_that_of_a_plain_loop():
    one = learner("sam")
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    model.load_state_dict(one.model.state_dict())
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(5):
        step = one.step(number)
        x, y = one.data.batch(number).support
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        home = [p.detach().clone() for p in model.parameters()]
        statistics = {k: v.clone() for k, v in model.named_buffers()}
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p += 0.05 * g / norm
        base.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, h in zip(model.parameters(), home, strict=True):
                p.copy_(h)
            for k, v in model.named_buffers():
                v.copy_(statistics[k])
        base.step()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.accuracy == pytest.approx(float((output.argmax(1) == y).float().mean()))
    for ours, theirs in zip(one.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_judging_is_in_eval_mode_over_all_examples_and_leaves_no_trace():
    one = learner("sam", dropout=0.5)
    one.step(0)
    before = {k: v.clone() for k, v in one.model.state_dict().items()}
    found = one.measure("test")
    assert one.model.training
    assert all(torch.equal(v, before[k]) for k, v in one.model.state_dict().items())
    one.model.eval()
    x, y = next(one.data.examples("test"))
    hits = (one.model(x).argmax(1) == y).double()
    assert found["accuracy"] == pytest.approx(float(hits.mean()))
    assert found["ci95"] == pytest.approx(1.96 * float(hits.std()) / math.sqrt(33))
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(one.model(x), y).item(), rel=1e-5)
    assert (found["n"], found["over"]) == (33, "33 test examples")


def test_losses_without_a_reduction_work_where_no_example_is_asked_for():
    a, b = learner("sam"), learner("sam", loss=nn.CrossEntropyLoss())
    for number in range(3):
        assert a.step(number).loss == pytest.approx(b.step(number).loss, rel=1e-5)
    assert a.measure("test")["accuracy"] == b.measure("test")["accuracy"]
    with pytest.raises(TypeError, match=r"losses \[B\]"):
        learner("esam", loss=nn.CrossEntropyLoss()).step(0)


LOSSES = {
    "weight": {"weight": torch.tensor([1.0, 5.0, 0.2])},
    "ignore_index": {"ignore_index": 1},
    "label_smoothing": {"label_smoothing": 0.3},
    "sum": {"reduction": "sum"},
}


@pytest.mark.parametrize("rule", ["plain", "sam"])
@pytest.mark.parametrize("option", sorted(LOSSES))
@pytest.mark.parametrize("kind", ["function", "class"])
def test_options_of_a_loss_are_torchs(rule, option, kind):
    options = LOSSES[option]
    loss = functools.partial(nn.functional.cross_entropy, **options)
    loss = loss if kind == "function" else nn.CrossEntropyLoss(**options)
    one, step = learner(make(rule), norm=False, loss=loss), {}
    model = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    model.load_state_dict(one.model.state_dict())
    x, y = one.data.batch(0).support

    def closure():
        model.zero_grad()
        step["loss"] = nn.functional.cross_entropy(model(x), y, **options)
        step["loss"].backward()
        return step["loss"]

    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = SharpnessAware(base, make(rule)).step(closure)
    assert one.step(0).loss == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(one.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    x, y = next(one.data.examples("test"))
    assert one.measure("test")["loss"] == pytest.approx(
        nn.functional.cross_entropy(model(x), y, **options).item(), 1e-4
    )


@pytest.mark.parametrize("option", ["weight", "ignore_index", "sum"])
def test_rules_that_need_single_examples_refuse_losses_that_are_no_mean_of_theirs(option):
    loss = functools.partial(nn.functional.cross_entropy, **LOSSES[option])
    for rule in (make("esam"), make("sam").__class__(0.05, m=8)):
        with pytest.raises(
            TypeError, match=r"losses \[B\] .* got cross_entropy with .*functional\.cross_entropy without"
        ):
            learner(rule, norm=False, loss=loss).step(0)
    smooth = functools.partial(nn.functional.cross_entropy, **LOSSES["label_smoothing"])
    assert math.isfinite(learner("esam", norm=False, loss=smooth).step(0).loss)
    with pytest.raises(TypeError, match=r"got CrossEntropyLoss: .*torch\.nn\.functional\.cross_entropy"):
        learner("esam", loss=nn.CrossEntropyLoss()).step(0)


def test_class_weights_of_a_config_may_be_a_list():
    for target in ("functional.cross_entropy", "CrossEntropyLoss"):
        loss = assemble.loss_of({"loss": {"_target_": f"torch.nn.{target}", "weight": [1, 5, 0.2]}})
        x, y = torch.randn(6, 3), torch.arange(6) % 3
        expected = nn.functional.cross_entropy(x, y, **LOSSES["weight"])
        assert float(loss(x, y)) == pytest.approx(float(expected))


def test_agnostic_validates_on_the_query_stream():
    one = learner("agnostic", data=blobs(holdout=0.25))
    assert one.data.size("train") == 45
    one.step(0)
    assert one.counts == {"train": 2.0, "val": 2.0}


def test_one_radius_for_two_keeps_their_proportion():
    node = {"_target_": "metasam.rules.Agnostic", "rho_train": 0.1, "rho_val": 0.05}
    assert assemble._with_radius(node, "rho", 0.3) == {**node, "rho_train": 0.6, "rho_val": 0.3}
    assert assemble._with_radius({**node, "rho_train": 0.025}, "rho", 0.3) == {
        **node,
        "rho_train": 0.15,
        "rho_val": 0.3,
    }


# -- the trainer ---------------------------------------------------------------------------------------------------


def train(folder, rule="sam", *, iterations=12, passes=None, resume=False, dropout=0.0, wrap=lambda x: x, **options):
    one = wrap(learner(rule, dropout=dropout))
    trainer = Trainer(one, folder, Budget(iterations, passes), **{"evaluate_every": 5, "quiet": True, **options})
    return trainer.fit(resume=resume)


@pytest.mark.parametrize("rule", ["plain", "sam", "looksam", "esam", "agnostic", "lookbehind"])
@pytest.mark.parametrize("passes", [20, 21, 7.5])
def test_no_rule_exceeds_its_budget_and_none_leaves_two_steps_of_it(rule, passes, tmp_path):
    results = train(tmp_path, rule, passes=passes)
    spent, dearest = results["gradient_evaluations"], 2 if rule == "looksam" else EVALUATIONS[rule]
    assert passes - dearest < spent <= passes + 1e-6
    lines = metrics.read(tmp_path)
    spent_before = [0.0, *(e["gradient_evaluations"] for e in lines)]
    for before, line in zip(spent_before, lines, strict=False):
        crosses = any(before < multiple <= line["gradient_evaluations"] for multiple in (5, 10, 15, 20))
        assert ("validation_accuracy" in line) == (crosses or line is lines[-1])


def test_a_budget_that_pays_for_no_step_says_what_one_costs(tmp_path):
    with pytest.raises(ValueError, match=r"costs 2 gradient evaluations, got budget\.passes=1: set budget\.passes=2"):
        train(tmp_path, "sam", passes=1)


@pytest.mark.parametrize("passes", [None, 25])
def test_the_learning_rate_falls_with_what_is_done(tmp_path, passes):
    rates = []

    def watched(one):
        step = one.step

        def noting(number):
            rates.append((one.gradient_evaluations, one.optimizer.param_groups[0]["lr"]))
            return step(number)

        one.step = noting
        return one

    train(tmp_path, "sam", passes=passes, schedule="cosine", wrap=watched)
    done = [spent / 25 if passes else i / 12 for i, (spent, _) in enumerate(rates)]
    expected = [0.1 * (1 + math.cos(math.pi * d)) / 2 for d in done]
    assert [lr for _, lr in rates] == pytest.approx(expected)
    assert SCHEDULES["constant"](0.7) == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("rule", ["sam", "looksam", "friendly", "agnostic", "esam"])
def test_a_killed_run_continues_to_the_same_bits(rule, tmp_path):
    options = {"passes": 25, "schedule": "cosine", "dropout": 0.3, "checkpoint_seconds": 0.0}

    def mortal(one):
        step, left = one.step, iter(range(7))

        def dying(number):
            found = step(number)
            if next(left, None) is None:
                raise Killed
            return found

        one.step = dying
        return one

    whole = train(tmp_path / "whole", rule, **options)
    with pytest.raises(Killed):
        train(tmp_path / "cut", rule, **options, wrap=mortal)
    cut = train(tmp_path / "cut", rule, **options, resume=True)
    for key in ("accuracy", "accuracy_last", "loss", "gradient_evaluations", "counts", "best_iteration", "iterations"):
        assert whole[key] == cut[key], key
    a, b = (checkpoint.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "cut"))
    assert all(torch.equal(v, b["model"][k]) for k, v in a["model"].items())
    a, b = ([{**e, "seconds": 0} for e in metrics.read(tmp_path / name)] for name in ("whole", "cut"))
    assert a == b


def test_results_name_both_the_best_and_the_last_weights(tmp_path):
    results = train(tmp_path, "sam", iterations=30)
    assert results == json.loads((tmp_path / "results.json").read_text()) | {"config": results["config"]}
    again = learner("sam")
    again.load_weights(checkpoint.load(tmp_path / "best.pt"))
    assert again.measure("test")["accuracy"] == results["accuracy"]
    again.load_weights(checkpoint.load(tmp_path / "checkpoint.pt"))
    assert again.measure("test")["accuracy"] == results["accuracy_last"]


def test_a_longer_run_is_another_run_where_the_learning_rate_falls(tmp_path):
    train(tmp_path, iterations=6, config={"iterations": 6})
    train(tmp_path, iterations=8, config={"iterations": 8}, resume=True)
    with pytest.raises(CheckpointError, match="iterations"):
        train(tmp_path, iterations=9, config={"iterations": 9}, resume=True, schedule="cosine")


def test_the_picture_is_along_the_budget(tmp_path):
    pytest.importorskip("matplotlib")
    train(tmp_path, passes=20)
    assert (tmp_path / "learning_curve.png").stat().st_size > 5000
