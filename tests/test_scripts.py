"""The commands: from the command line to the run folder, and what they say to mistakes."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from metasam import SharpMAML, checkpoint
from metasam.training import assemble, estimate, metrics
from metasam.training.budget import Budget
from metasam.training.learner import Measured
from metasam.training.trainer import Trainer

pytest.importorskip("hydra")
from hydra.core.global_hydra import GlobalHydra

from metasam.scripts import command, demo, evaluate, tables, train

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = [
    "tasks=sinusoid", "model.hidden=[8]", "iterations=4", "evaluate_every=2", "tasks_per_batch=2", "validation_tasks=4",
    "test_tasks=4", "threads=1",
]  # fmt: skip
LETTERS = [
    "tasks._target_=my_tasks.Letters", "model.hidden=4", "iterations=2", "tasks_per_batch=2", "validation_tasks=4",
    "test_tasks=4", "threads=1",
]  # fmt: skip
MY_TASKS = '''
import torch
from metasam.types import Task

class Letters:
    """Noise with labels, of any number of ways."""

    classification, input_shape = True, (1, 16, 16)

    def __init__(self, ways, queries, splits=("train", "validation", "test")):
        self.output_size, self.queries, self.splits = ways, queries, list(splits)

    def batch(self, split, tasks):
        y = torch.arange(self.output_size)
        def one(i):
            generator = torch.Generator().manual_seed(i)
            def x(n): return torch.rand(n, 1, 16, 16, generator=generator)
            return Task((x(len(y)), y), (x(len(y) * self.queries), y.repeat(self.queries)))
        return Task.stack([one(i) for i in tasks])

    def size(self, split):
        if split not in self.splits:
            raise ValueError(f"no {split!r} split")
        return None

    def describe(self):
        return {"name": "letters", "ways": self.output_size}

def net(ways, width=3):
    layers = torch.nn.Flatten(), torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, ways)
    return torch.nn.Sequential(*layers)

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)
'''


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in this process, in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    threads = torch.get_num_threads()

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", [f"metasam-{main.__name__.rpartition('.')[2]}", *arguments])
        GlobalHydra.instance().clear()
        status = 0
        try:
            main.main()
        except SystemExit as stop:
            status = stop.code
        out = capsys.readouterr()
        return status, out.out, out.err

    yield run
    torch.set_num_threads(threads)
    sys.modules.pop("my_tasks", None)


def refused(result, *words):
    status, out, err = result
    assert status == 2
    assert not out
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in err
    return err


def test_train_and_evaluate(call, tmp_path):
    status, out, err = call(train, *TINY, "run=here", "seed=3")
    assert status == 0, err
    assert "loss, adapted as trained" in out
    results = json.loads((tmp_path / "here/results.json").read_text())
    assert results["seed"] == 3
    assert results["command"] == f"metasam-train {' '.join(TINY)} run=here seed=3".replace(
        "model.hidden=[8]", "'model.hidden=[8]'"
    )
    assert results["gradient_evaluations"] == 12
    assert {p.name for p in tmp_path.iterdir()} == {"here", "my_tasks.py"}  # no litter
    assert not logging.getLogger("metasam.tasks.omniglot").disabled  # Hydra may silence what warns of bad data
    status, out, err = call(evaluate, "run=here", "test_tasks=4")
    assert status == 0, err
    evaluation = json.loads((tmp_path / "here/evaluation-sinusoid.json").read_text())
    assert evaluation["loss"] == results["loss"]
    assert evaluation["per_task"] == results["per_task"]
    assert evaluation["best_iteration"] == results["best_iteration"]
    status, out, err = call(evaluate, "run=here", "test_tasks=3", "shots=5", "steps=2", "checkpoint=latest", "seed=9")
    assert status == 0, err
    evaluation = json.loads((tmp_path / "here/evaluation-sinusoid.json").read_text())
    assert evaluation["n"] == 3
    assert evaluation["tasks"]["shots"] == 5


def test_a_run_is_read_back_from_python(call, tmp_path):
    assert call(train, *TINY, "run=here", "seed=3")[0] == 0
    results = json.loads((tmp_path / "here/results.json").read_text())
    maml = SharpMAML.load(tmp_path / "here")
    family = assemble.tasks_of(results["config"])
    assert maml.evaluate([family.batch("test", range(4))]).loss == pytest.approx(results["loss"], rel=1e-6)
    assert maml.adapt(family.batch("test", [0]).unbind()[0])(torch.zeros(2, 1)).shape == (2, 1)
    latest = SharpMAML.load(tmp_path / "here", weights="latest")
    assert latest.gradient_evaluations == results["gradient_evaluations"]
    with pytest.raises(FileNotFoundError, match="is that the folder of a run"):
        SharpMAML.load(tmp_path / "nowhere")
    torch.save({"format": 1}, tmp_path / "here/best.pt")
    with pytest.raises(ValueError, match=r"expected config\.maml"):
        SharpMAML.load(tmp_path / "here")


def test_default_folder_and_resume(call, tmp_path):
    assert call(train, *TINY)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sinusoid-both-sam-seed0-")
    refused(call(train, *TINY), "resume=true continues it")
    before = checkpoint.load(folder / "checkpoint.pt")
    status, _, err = call(train, *TINY, "resume=true")
    assert status == 0
    assert "resuming" in err
    assert torch.equal(checkpoint.load(folder / "checkpoint.pt")["rng"]["torch"], before["rng"]["torch"])
    refused(
        call(train, *TINY, "resume=true", f"run={folder}", "inner.lr=0.5"), "differs in inner.lr (0.01 there, 0.5 here)"
    )


def test_your_own_parts(call, tmp_path):
    own = ["model._target_=my_tasks.net", "model.width=5", "loss._target_=my_tasks.loss", "ways=4", "run=own"]
    status, _, err = call(train, *[a for a in LETTERS if a != "model.hidden=4"], *own)
    assert status == 0, err
    saved = checkpoint.load(tmp_path / "own/best.pt")
    assert saved["config"]["maml"]["model"] == {"_target_": "my_tasks.net", "width": 5, "ways": 4}
    assert saved["maml"]["model"]["3.weight"].shape == (4, 5)
    results = json.loads((tmp_path / "own/results.json").read_text())
    assert results["over"] == "4 test tasks"
    refused(call(train, *LETTERS, "model._target_=my_tasks.nett"), "model._target_", "did you mean 'net'")
    refused(call(train, *LETTERS, "tasks.way=3", "run=x"), "takes no argument 'way'; did you mean 'ways'")


def test_evaluate_refuses_a_head_of_another_width(call):
    assert call(train, *LETTERS, "run=five")[0] == 0
    err = refused(call(evaluate, "run=five", "ways=20"))
    assert "the head of five has 5 outputs, and tasks=custom needs 20: train with ways=20" in err
    refused(call(evaluate, "run=five", "tasks=sinusoid"), "has 5 outputs, and tasks=sinusoid needs 1")
    refused(call(evaluate, "run=five", "split=tes"), "split to be one of", "did you mean 'test'")
    refused(call(evaluate, "run=nowhere"), "no best.pt in nowhere")
    refused(call(evaluate), "expected a value for run, got none: set run=")
    refused(call(evaluate, "runn=five"), "unknown key runn; did you mean 'run'")


def test_without_a_test_split(call, tmp_path):
    status, out, err = call(train, *LETTERS, "tasks.splits=[train,validation]", "run=two")
    assert status == 0, err
    assert "4 validation tasks" in out
    refused(call(evaluate, "run=two"), "no 'test' split")


def test_sweep(call, tmp_path):
    status, _, err = call(train, *TINY, "--multirun", "variant=none,low", "seed=1,2", "run=sweep")
    assert status == 0, err
    names = sorted(p.name.rpartition("-")[0] for p in (tmp_path / "sweep").iterdir())
    assert names == [f"sinusoid-{v}-sam-seed{s}" for v in ("low", "none") for s in (1, 2)]
    assert all((p / "results.json").exists() for p in (tmp_path / "sweep").iterdir())
    # a mistake in a later job is found before the first one runs
    refused(call(train, *TINY, "-m", "rule=asam,samm", "run=other"), "did you mean 'sam'")
    refused(call(train, *TINY, "-m", "inner.lr=0.1,nan", "run=other"), "inner.lr=nan")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("words", "steps", "spent"),
    [
        ([*TINY, "variant=up", "iterations=40"], "40,", "80 x a plain MAML step"),
        ([*TINY, "variant=up", "budget.passes=90"], "45,", "90 x a plain MAML step"),
        (
            ["tasks=digits", "tasks.per_class=10", "batch_size=50", "epochs=7", "rule=sam"],
            "14,",
            "28 x a training batch",
        ),
    ],
    ids=["iterations", "passes", "epochs"],
)
def test_a_dry_run_estimates_and_writes_nothing(call, tmp_path, words, steps, spent):
    before = set(tmp_path.rglob("*"))
    status, out, _ = call(train, *words, "dry_run=true")
    line = {k.strip(): v.strip() for k, v in (row.strip("│").split("│") for row in out.splitlines() if "│" in row)}
    assert status == 0
    assert line["steps"].startswith(steps)
    assert line["gradient evaluations"] == spent
    assert line["peak memory"].endswith(" MB")
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_refuses_a_budget_as_the_run_would(call):
    status, _, err = call(train, *TINY, "variant=up", "budget.passes=1.5", "dry_run=true")
    assert (status, "set budget.passes=2 or more" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["itertions=5"], ["unknown key itertions; did you mean 'iterations'?"]),
        (["inner.stepz=1"], ["unknown key inner.stepz; did you mean 'inner.steps'?"]),
        (["outer.rul=sam"], ["unknown key outer.rul; did you mean 'outer.rule'?"]),
        (["tasks.noice=1", "tasks=sinusoid"], ["unknown key tasks.noice; did you mean 'tasks.noise'?"]),
        (
            ["rule=samm"],
            ["expected rule to be one of agnostic, asam, esam, fisher, friendly, gsam,", "did you mean 'sam'?"],
        ),
        (["inner.rule=multstep"], ["did you mean 'multistep'?"]),
        (["task=glyphs"], ["unknown key task; did you mean 'tasks'?"]),
        (["experiment=dem"], ["did you mean 'demo'?"]),
        (["xyzzy=1"], ["unknown key xyzzy; --help"]),
        (["ways"], ["expected key=value, got 'ways'"]),
        (["ways=[1"], ["'ways=[1'"]),
        (["ways=1"], ["ways=1"]),
        (["run="], ["expected run to be a folder, or null"]),
        (["tasks=omniglot", "tasks.root=nowhere"], ["nowhere"]),
        (["tasks=sinusoid", "inner.params=[hd.*]"], ["matches no trainable parameter", "head"]),
        (["tasks=sinusoid", "run=my_tasks.py/x"], ["cannot write to the run folder", "run=DIR"]),
        (["tasks=sinusoid", "rule=plain"], ["variant=none"]),
        (["tasks=null"], ["expected tasks to be one of cifar10,", "got tasks=null"]),
        (["rule=null"], ["expected rule to be one of agnostic,", "got rule=null"]),
        (["tasks=sinusoid", "loss.reductio=sum"], ["takes no argument 'reductio'; did you mean 'reduction'"]),
    ],
)
def test_mistakes(call, arguments, words, tmp_path):
    refused(call(train, *arguments), *words)
    assert {p.name for p in tmp_path.iterdir()} == {"my_tasks.py"}


def test_full_error_on_request(call, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="ways=1"):
        call(train, "ways=1")


def test_own_slots():
    def rewritten(*arguments):
        return list(command._slots(list(arguments)))

    assert rewritten("model._target_=a.B", "model.x=1", "seed=1") == [
        "model=custom", "++model._target_=a.B", "++model.x=1", "seed=1",
    ]  # fmt: skip
    assert rewritten("model=mlp", "model._target_=a.B") == ["model=mlp", "model._target_=a.B"]
    assert rewritten("inner.rule=asam", "outer.rule=sam") == ["rule@inner.rule=asam", "rule@outer.rule=sam"]
    assert rewritten("-m", "loss._target_=a.b") == ["-m", "loss._target_=a.b"]
    assert rewritten("loss.weight=[1,2]", "tasks.path=x") == ["++loss.weight=[1,2]", "tasks.path=x"]
    own = ("loss", "tasks")
    assert list(command._slots(["tasks.path=x"], own)) == ["++tasks.path=x"]
    assert list(command._slots(["tasks.path=x", "tasks=npz"], own)) == ["tasks.path=x", "tasks=npz"]


def test_ctrl_c_before_training_is_quiet(call, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(assemble, "build", stop)
    assert call(train, *TINY) == (130, "", "metasam-train: interrupted\n")


def test_help_into_a_pipe_that_closes():
    code = f"{sys.executable} {SCRIPTS / 'train.py'} --help | head -1"
    result = subprocess.run(code, shell=True, capture_output=True, text=True, env=environment())
    assert result.stdout
    assert not result.stderr


def test_demo_comparison():
    runs = {
        "none": [{"per_task": [0.2, 0.4], "gradient_evaluations": 10.0, "seconds": 1.0}] * 2,
        "up": [{"per_task": [0.3, 0.5], "gradient_evaluations": 20.0, "seconds": 2.0}] * 2,
    }
    none, up = demo.compare(runs)
    assert (none["difference"], none["n"]) == (0.0, 4)
    assert up["difference"] == pytest.approx(0.1)
    assert up["difference_ci95"] == pytest.approx(0.0, abs=1e-12)  # the same in each task, though tasks differ
    assert up["ci95"] == pytest.approx(1.96 * 0.11547 / 2, rel=1e-4)
    assert up["gradient_evaluations"] == 20


def test_a_table_in_a_pipe_is_not_cut(capsys):
    tables.table("title", ("a", "b"), [("x" * 60, "y" * 60)])
    assert "x" * 60 in capsys.readouterr().out


# -- as processes ----------------------------------------------------------------------------------------------------


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def start(spawn):
    def run(folder, *arguments):
        command = [sys.executable, SCRIPTS / "train.py", *TINY, "evaluate_every=20", f"run={folder}", *arguments]
        return spawn(command, env=environment())

    return run


def finished(process):
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def wait_for_lines(process, path, lines):
    for _ in range(60000):
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.005)
    raise AssertionError("the run never got there")


def test_kill_and_resume_to_the_same_bits(tmp_path, start):
    def iteration():
        return checkpoint.load_latest(tmp_path / "parts/checkpoint.pt")[0]["iteration"]

    parts = start(tmp_path / "parts", "iterations=1000000")
    wait_for_lines(parts, tmp_path / "parts/metrics.jsonl", 27)
    parts.kill()
    finished(parts)
    killed = iteration()
    assert killed % 20 == 0
    assert killed > 0

    parts = start(tmp_path / "parts", "iterations=1000000", "resume=true")
    wait_for_lines(parts, tmp_path / "parts/metrics.jsonl", killed + 25)
    parts.send_signal(signal.SIGINT)
    status, err = finished(parts)
    assert status == 130
    stopped = iteration()
    assert stopped >= killed + 25
    advice = err.strip().splitlines()[-1].strip()
    assert advice.startswith("python ")
    assert advice.endswith("resume=true")

    until = f"iterations={stopped + 15}"
    processes = start(tmp_path / "parts", until, "resume=true"), start(tmp_path / "whole", until)
    for process in processes:
        status, err = finished(process)
        assert status == 0, err

    def lines(name):
        return [{k: v for k, v in e.items() if k != "seconds"} for e in metrics.read(tmp_path / name)]

    assert lines("whole") == lines("parts")
    for name in ("best.pt", "checkpoint.pt"):
        a, b = (checkpoint.load(tmp_path / folder / name)["maml"]["model"] for folder in ("whole", "parts"))
        assert all(torch.equal(a[k], b[k]) for k in a)
    a, b = (json.loads((tmp_path / folder / "results.json").read_text()) for folder in ("whole", "parts"))
    assert a["per_task"] == b["per_task"]


# -- supervised --------------------------------------------------------------------------------------------------------

DIGITS = ["tasks=digits", "tasks.per_class=10", "model.hidden=[16]", "threads=1", "evaluate_every=10"]


def test_supervised_run_and_evaluation(call, tmp_path):
    pytest.importorskip("sklearn")
    status, out, err = call(train, *DIGITS, "rule=agnostic", "rho=0.2", "budget.passes=50", "run=r")
    assert status == 0, err
    assert "best by validation" in out
    results = json.loads((tmp_path / "r/results.json").read_text())
    assert results["gradient_evaluations"] == 50  # 20 steps of 2 + 2/4
    assert results["iterations"] == 20
    assert "rho_train=0.4, rho_val=0.2" in results["rule"]
    status, out, err = call(evaluate, "run=r")
    assert status == 0, err
    assert "accuracy, test" in out
    again = json.loads((tmp_path / "r/evaluation-digits.json").read_text())
    assert (again["accuracy"], again["n"]) == (results["accuracy"], 797)
    refused(call(evaluate, "run=r", "tasks=sinusoid"), "r is a supervised run, and tasks=sinusoid is not")
    refused(call(evaluate, "run=r", "tasks=digits", "tasks.classes=3"), "10 outputs", "evaluate on data of 10 classes")


def test_a_supervised_run_is_evaluated_on_its_own_scale(call, tmp_path):
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(0)

    def save(name, shift):
        y = np.arange(120) % 3
        np.savez(tmp_path / name, x=(y[:, None] + rng.normal(size=(120, 4)) + shift).astype("float32"), y=y)

    save("a.npz", 5)
    save("b.npz", 6)
    np.savez(tmp_path / "wide.npz", x=np.zeros((60, 5), "float32"), y=np.arange(60) % 3)
    words = ["tasks=npz", "tasks.path=a.npz", "model=mlp", "iterations=4", "threads=1", "run=r"]
    refused(call(train, *words[:2], "run=x"), "does not take examples of shape [4]", "model=mlp")
    status, _, err = call(train, *words, "tasks.per_class=5")
    assert status == 0, err
    trained = json.loads((tmp_path / "r/results.json").read_text())
    data = assemble.tasks_of(trained["config"])
    facts = checkpoint.load(tmp_path / "r/best.pt")["data"]
    assert facts["classification"] is True
    assert torch.equal(facts["mean"], data.mean)
    model = assemble.network(trained["config"]["network"])
    model.load_state_dict(checkpoint.load(tmp_path / "r/best.pt")["model"])
    for words, path in ((["tasks=npz", "tasks.path=a.npz"], "a.npz"), (["tasks.path=b.npz"], "b.npz")):
        status, _, err = call(evaluate, "run=r", *words)
        assert status == 0, err
        found = json.loads((tmp_path / "r/evaluation-npz.json").read_text())
        other = assemble.tasks_of({**trained["config"], "tasks": {**trained["config"]["tasks"], "path": path}})
        x, y = next(other.examples("test"))
        raw = x.double() * other.std + other.mean
        logits = model(((raw - data.mean) / data.std).float())
        assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-4)
        assert found["tasks"]["source"] == path
    refused(call(evaluate, "run=r", "tasks.pth=b.npz"), "did you mean 'path'")
    refused(call(evaluate, "run=r", "tasks.path=wide.npz"), "examples of shape [4], and tasks=npz has [5]")


MY_CURVES = """
import torch

class Curves:
    classification, output_size, input_shape, seed = False, 1, (4,), 0
    batch_size, val_batch_size, steps_per_epoch = 8, 2, 4

    def __init__(self, kind="regression"):
        self.classification = kind != "regression"

    def batch(self, step):
        from metasam.types import Task
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return Task((x, x.sum(1, keepdim=True)), (x, x.sum(1, keepdim=True)))

    def examples(self, split):
        yield self.batch(99).support

    def size(self, split): return 8
    def without_holdout(self): return self
    def describe(self): return {"name": "curves"}
"""


def test_supervised_regression_is_evaluated(call, tmp_path):
    (tmp_path / "my_curves.py").write_text(MY_CURVES)
    words = ["variant=null", "model=mlp", "iterations=4", "threads=1", "loss._target_=torch.nn.functional.mse_loss"]
    status, _, err = call(train, "tasks._target_=my_curves.Curves", *words, "run=r")
    assert status == 0, err
    status, _, err = call(evaluate, "run=r")
    assert status == 0, err
    results, again = (json.loads((tmp_path / f"r/{n}.json").read_text()) for n in ("results", "evaluation-custom"))
    assert again["loss"] == pytest.approx(results["loss"])
    refused(
        call(evaluate, "run=r", "tasks.kind=other"), "r was trained for regression, and tasks=custom is classification"
    )
    sys.modules.pop("my_curves", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss._target_=torch.nn.CrossEntropyLoss", "rule=esam"], "torch.nn.functional.cross_entropy"),
        (["loss._target_=torch.nn.functional.mse_loss"], "loss: torch.nn.functional.mse_loss does not take"),
        (["shots=3"], "shots=3: tasks=digits is one data set"),
        (["variant=low"], "one loop: choose its rule with rule="),
        (["rho_up=0.1"], "rho_up=0.1: a train/validation split"),
        (["inner.rule=asam"], "one loop"),
        (["rule=plain", "rho=0.1"], "rho=0.1: the rule metasam.rules.Plain has no radius"),
        (["budget.passes=0"], "budget.passes to be a finite number above 0"),
        (["schedule=cosin"], "did you mean 'cosine'"),
        (["tasks.noise=2"], "noise"),
        (["tasks.per_class=500"], "per_class"),
    ],
)
def test_supervised_mistakes(call, words, message):
    pytest.importorskip("sklearn")
    refused(call(train, *DIGITS, *words, "run=r"), message)


def test_few_shot_runs_have_no_epochs_and_two_radii(call):
    refused(call(train, *TINY, "epochs=2"), "say iterations=")
    refused(call(train, *TINY, "rho=0.1"), "rho_low, rho_up")


def test_an_estimate_is_about_what_a_run_takes(tmp_path):
    class Sleeper:
        """Takes known time: 20 ms a step, 40 ms more for the first, 3 ms for each of 10 validation tasks."""

        gradient_evaluations = 0.0

        def __init__(self):
            self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

        def step(self, number):
            time.sleep(0.02 if number else 0.06)
            self.gradient_evaluations += 2

        def validate(self):
            time.sleep(0.03)
            return Measured("loss", 1.0, 0.1, 10)

        def has(self, split):
            return split != "test"

        def judged(self, split):
            return {"validation": 0, "train": 30}[split]

    trainer = Trainer(Sleeper(), tmp_path / "run", Budget(100), split="train", evaluate_every=30)
    found = estimate.estimate(trainer, quiet=True)
    assert (found.steps, found.validations, found.gradient_evaluations) == (100, 4, 200)
    # sleeping is never shorter than asked
    assert found.step >= 0.02
    assert found.validation >= 0.03
    assert found.test == pytest.approx(3 * found.validation)
    assert found.seconds == pytest.approx(found.begin + 100 * found.step + 7 * found.validation)
    assert not (tmp_path / "run").exists()
