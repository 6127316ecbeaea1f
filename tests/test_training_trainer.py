"""The training loop: continuing to the same bits, choosing by validation, refusing what would lose something."""

import errno
import json
import math
import signal

import pytest
import torch

from metasam import checkpoint
from metasam.checkpoint import CheckpointError
from metasam.meta import SharpMAML
from metasam.tasks import Sinusoid
from metasam.training import assemble, metrics, plots, rng
from metasam.training.budget import Budget
from metasam.training.few_shot import RESAMPLED, FewShot
from metasam.training.folder import alone
from metasam.training.trainer import PATIENCE, Interrupted, Trainer, refuse_other_config
from metasam.types import Task


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """They take longer than the training here; one test wants them."""
    if request.node.name != "test_files_and_results":
        monkeypatch.setattr(plots, "learning_curve", lambda *_: False)


class Blobs:
    """Three-way classification of points around task-specific means."""

    output_size, input_shape, classification = 3, (2,), True

    def __init__(self, splits=("train", "validation", "test")):
        self.splits, self.asked = splits, []

    def batch(self, split, tasks):
        self.asked.append((split, *tasks))
        return Task.stack([self._task(split, i) for i in tasks])

    def _task(self, split, i):
        generator = torch.Generator().manual_seed(1000 * self.splits.index(split) + i)
        means = torch.randn(3, 2, generator=generator)
        y = torch.arange(3).repeat(4)
        x = means[y] + 0.3 * torch.randn(12, 2, generator=generator)
        return Task((x[:3], y[:3]), (x[3:], y[3:]))

    def size(self, split):
        if split not in self.splits:
            raise ValueError(f"no {split!r} split")
        return 10 if split == "test" else None

    def describe(self):
        return {"name": "blobs"}


def make(folder, family=None, *, dropout=0.0, seed=0, wrap=lambda maml: maml, **options):
    torch.manual_seed(seed)
    family = family or Blobs()
    layers = [torch.nn.Linear(family.input_shape[0], 8), torch.nn.ReLU(), torch.nn.Dropout(dropout)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, family.output_size))
    loss = torch.nn.functional.cross_entropy if family.classification else torch.nn.functional.mse_loss
    engine = "higher" if dropout else "auto"
    maml = SharpMAML(model, loss, inner_lr=0.1, inner_steps=1, variant="both", engine=engine)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sizes = {k: options.pop(k, v) for k, v in {"tasks_per_batch": 4, "validation_tasks": 8, "test_tasks": 40}.items()}
    learner = FewShot(wrap(maml), family, optimizer, **sizes)
    budget = Budget(options.pop("iterations", 12), options.pop("passes", None))
    return Trainer(learner, folder, budget, **{"evaluate_every": 5, "quiet": True, **options})


def outcome(folder):
    """What must not depend on interruptions: all bits of the state, and the record apart from times."""
    state = checkpoint.load(folder / "checkpoint.pt")
    best = checkpoint.load(folder / "best.pt")
    lines = [{k: v for k, v in e.items() if k != "seconds"} for e in metrics.read(folder)]
    results = json.loads((folder / "results.json").read_text())
    for key in ("seconds", "peak_memory_mb"):
        del results[key]
    return [state[k] for k in ("iteration", "maml", "optimizer", "rng", "best")], best["maml"], lines, results


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class Killed(BaseException):
    pass


def dying(at):
    """A meta-learner whose step ``at`` dies half-way, after the weights have moved."""

    def wrap(maml):
        step, count = maml.step, iter(range(1, 1000))

        def mortal(*args):
            loss = step(*args)
            if next(count) == at:
                raise Killed
            return loss

        maml.step = mortal
        return maml

    return wrap


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("deaths", [[3], [8], [11, 1], [6, 4, 2]])
def test_continues_to_the_same_bits(tmp_path, deaths, dropout):
    make(tmp_path / "whole", dropout=dropout).fit()
    for seed, at in enumerate(deaths):
        with pytest.raises(Killed):
            make(tmp_path / "parts", dropout=dropout, seed=9 * (seed > 0), wrap=dying(at)).fit(resume=True)
    make(tmp_path / "parts", dropout=dropout, seed=9 if checkpoint.exists(tmp_path / "parts/checkpoint.pt") else 0).fit(
        resume=True
    )
    assert equal(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def test_falls_back_to_the_checkpoint_before(tmp_path):
    make(tmp_path / "whole").fit()
    with pytest.raises(Killed):
        make(tmp_path / "parts", wrap=dying(11)).fit()
    latest = tmp_path / "parts/checkpoint.pt"
    latest.write_bytes(latest.read_bytes()[:500])
    make(tmp_path / "parts", seed=9).fit(resume=True)
    assert equal(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def test_files_and_results(tmp_path):
    family = Blobs()
    trainer = make(tmp_path, family, config={"seed": 4, "ways": 3}, command="the command")
    returned = trainer.fit()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == returned | {"per_task": [round(v, 6) for v in returned["per_task"]]}
    assert results["seed"] == 4
    assert results["command"] == "the command"
    assert results["config"] == {"seed": 4, "ways": 3}
    assert results["gradient_evaluations"] == 12 * 3  # both costs three plain steps; evaluations are not counted
    assert 0 < results["accuracy"] <= 1
    assert results["accuracy"] == pytest.approx(sum(results["per_task"]) / 10)
    assert results["n"] == 10  # all there are
    assert results["over"] == "10 test tasks"
    assert results["transductive"] is False
    assert {"ci95", "accuracy_plain_adapt", "ci95_plain_adapt", "seconds", "counts", "best_iteration"} <= results.keys()
    assert results["versions"]["torch"] == torch.__version__
    names = {p.name.split(".tfevents")[0] for p in tmp_path.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "results.json", "checkpoint.pt", "checkpoint.prev.pt", "best.pt"}
    assert files <= names <= files | {"learning_curve.png", "events.out"}
    lines = metrics.read(tmp_path)
    assert [e["iteration"] for e in lines] == list(range(1, 13))
    assert [e["iteration"] for e in lines if "validation_accuracy" in e] == [5, 10, 12]
    assert lines[-1]["gradient_evaluations"] == 36


def test_chooses_on_validation_alone(tmp_path):
    family = Blobs()
    trainer = make(tmp_path, family, iterations=15)
    results = trainer.fit()
    training = [split for split, *_ in family.asked]
    assert "test" not in training[: len(training) - training[::-1].index("validation")]
    validated = {e["iteration"]: e["validation_accuracy"] for e in metrics.read(tmp_path) if "validation_accuracy" in e}
    assert results["validation_accuracy"] == max(validated.values())
    assert results["best_iteration"] == max(validated, key=validated.get)
    best = checkpoint.load(tmp_path / "best.pt")
    assert best["iteration"] == results["best_iteration"]
    assert equal(best["maml"]["model"], dict(trainer.learner.maml.model.state_dict()))  # what was measured
    assert best["family"] == {"output_size": 3, "input_shape": [2], "classification": True}


def test_regression_chooses_the_lowest_loss(tmp_path):
    results = make(tmp_path, Sinusoid(shots=3, queries=3)).fit()
    assert "accuracy" not in results
    losses = [e["validation_loss"] for e in metrics.read(tmp_path) if "validation_loss" in e]
    assert results["validation_loss"] == min(losses)
    assert math.isfinite(results["loss"])
    assert results["ci95"] > 0
    assert results["n"] == 40


@pytest.mark.parametrize(
    ("splits", "over"), [(("train", "validation"), "40 validation tasks"), (("train",), "40 train tasks")]
)
def test_without_test_or_validation_tasks(tmp_path, splits, over):
    results = make(tmp_path, Blobs(splits)).fit()
    assert results["over"] == over
    if "validation" not in splits:
        assert results["best_iteration"] == 12
        assert results["validation_accuracy"] is None


def test_nothing_is_overwritten(tmp_path):
    make(tmp_path).fit()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="nothing of it is overwritten: resume=true continues it, run=DIR"):
        make(tmp_path).fit()
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_nothing_to_resume(tmp_path, capsys):
    trainer = make(tmp_path)
    trainer.quiet = False
    trainer.fit(resume=True)
    assert "nothing to resume" in capsys.readouterr().err


def test_a_longer_run_continues_and_a_shorter_one_is_refused(tmp_path):
    make(tmp_path / "short", iterations=5).fit()
    make(tmp_path / "short", iterations=10).fit(resume=True)
    make(tmp_path / "long", iterations=10).fit()
    assert equal(outcome(tmp_path / "short")[:2], outcome(tmp_path / "long")[:2])
    with pytest.raises(CheckpointError, match="iteration 10, beyond iterations=7"):
        make(tmp_path / "short", iterations=7).fit(resume=True)


def test_another_config_is_refused(tmp_path):
    make(tmp_path, config={"seed": 1, "inner": {"lr": 0.1}, "maml": {"inner_lr": 0.1}}).fit()
    other = {"seed": 2, "inner": {"lr": 0.2}, "maml": {"inner_lr": 0.2}, "iterations": 99}
    with pytest.raises(CheckpointError) as caught:
        make(tmp_path, config=other).fit(resume=True)
    assert "differs in inner.lr (0.1 there, 0.2 here), seed (1 there, 2 here)" in str(caught.value)
    assert "maml" not in str(caught.value)
    refuse_other_config({"iterations": 1, "tasks": {"root": "a"}}, {"iterations": 2, "tasks": {"root": "b"}}, tmp_path)


def test_another_model_is_refused(tmp_path):
    make(tmp_path).fit()
    with pytest.raises(CheckpointError, match="belongs to another model or optimizer"):
        make(tmp_path, Sinusoid()).fit(resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(tmp_path, number):
    make(tmp_path / "whole").fit()

    def wrap(maml):
        step, count = maml.step, iter(range(1, 1000))

        def interrupted(*args):
            if next(count) == 7:
                signal.raise_signal(number)
            return step(*args)

        maml.step = interrupted
        return maml

    usual = signal.getsignal(number)
    with pytest.raises(Interrupted, match="stopped at iteration 7 of 12, and saved"):
        make(tmp_path / "parts", wrap=wrap).fit()
    assert signal.getsignal(number) is usual
    assert checkpoint.load(tmp_path / "parts/checkpoint.pt")["iteration"] == 7
    make(tmp_path / "parts", seed=9).fit(resume=True)
    assert equal(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def test_full_disk_while_training(tmp_path, monkeypatch):
    save, count = torch.save, iter(range(1000))

    def fills_up(*args):
        if next(count) >= 3:
            raise OSError(errno.ENOSPC, "full")
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fills_up)
        with pytest.raises(CheckpointError, match="no space is left"):
            make(tmp_path / "parts").fit()
    make(tmp_path / "parts", seed=9).fit(resume=True)
    make(tmp_path / "whole").fit()
    assert equal(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to the run folder .*choose another with run=DIR"):
        make(tmp_path / "file" / "run").fit()


def test_only_nan(tmp_path):
    class Broken(Blobs):
        def batch(self, split, tasks):
            return super().batch(split, tasks).map(lambda t: t * math.nan if t.is_floating_point() else t)

    with pytest.raises(FloatingPointError, match=f"{PATIENCE} steps in a row.*lower inner.lr"):
        make(tmp_path, Broken(), iterations=100).fit()
    assert metrics.read(tmp_path)[-1]["skipped"] == PATIENCE


def test_an_outer_rule_that_validates_gets_a_quarter_of_the_tasks_from_training_classes(tmp_path):
    family = Blobs()
    trainer = make(tmp_path, family, iterations=2, evaluate_every=10, wrap=agnostic)
    trainer.fit()
    held = [tasks for split, *tasks in family.asked if split == "train" and tasks[0] >= RESAMPLED]
    assert held == [[RESAMPLED], [RESAMPLED + 1]]
    assert trainer.learner.maml.outer_rule.validates


def agnostic(maml):
    return SharpMAML(maml.model, maml.loop.loss_fn, inner_lr=0.1, inner_steps=1, variant="up", rule="agnostic")


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    with alone(tmp_path), pytest.raises(CheckpointError, match="another process is training"):
        make(tmp_path, iterations=1).fit()
    assert not (tmp_path / "metrics.jsonl").exists()
    make(tmp_path, iterations=1).fit()
    assert (tmp_path / "results.json").exists()


def test_numpy_and_random_are_seeded_and_continue():
    import random

    import numpy as np

    assemble.seed_everything(3)
    state = rng.state()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    rng.restore(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
    assemble.seed_everything(3)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_lost_or_damaged_best_weights_are_said_to_be_lost(tmp_path, capsys):
    make(tmp_path).fit()
    before = json.loads((tmp_path / "results.json").read_text())
    assert before["validation_accuracy"] is not None
    for harm in (lambda p: p.unlink(), lambda p: p.write_bytes(b"PK")):
        harm(tmp_path / "best.pt")
        after = make(tmp_path, quiet=False).fit(resume=True)
        assert "the last weights are measured in place of the best" in capsys.readouterr().err
        assert after["best_iteration"] == 12
        assert after["validation_accuracy"] is None


def test_signals_that_are_ignored_stay_ignored(tmp_path):
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = make(tmp_path)
        step = trainer.learner.step

        def interrupted(number):
            signal.raise_signal(signal.SIGINT)
            return step(number)

        trainer.learner.step = interrupted
        assert trainer.fit()["iterations"] == 12
    finally:
        signal.signal(signal.SIGINT, usual)
