"""Meta-batches that are split over processes: as in one process to rounding, and the same on all ranks to the last bit.

The ranks run every case of `RUNS` once, for all tests, and only report; the same functions run here in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from metasam import SharpMAML, Task, checkpoint
from metasam.ranks import Ranks, joined
from metasam.rules import ESAM, RWP, Sharp, SparseSAM, VaSSO
from metasam.training import assemble, metrics

from . import references
from .cases import CONV, MLP, PROBLEMS, RULES, assert_same, distance, params_of
from .launch import environment, found_by, report

distributed = torch.distributed
pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs torch.distributed with gloo"
)

WORLD, STEPS, RATE = 2, 3, 0.1
HERE = Path(__file__).parent
PARTS = {
    "m-sam": partial(Sharp, 0.2, m=2),
    "esam-select": partial(ESAM, 0.2, 0.6, 0.5, 5),
    "sparse-samples": partial(SparseSAM, 0.2, 0.4, "fisher", 2, 3),
}
RUNS = {}
"""``run(split) -> what it found``, by name, in one order on all ranks."""


def learner(problem, split, *, model=None, **settings):
    settings = {"inner_lr": 0.1, "inner_steps": 2, **settings}
    return SharpMAML(problem.model() if model is None else model, problem.loss_fn, split=split, **settings)


def walk(problem, split, tasks, *, val=None, base=None, model=None, change=lambda n, tasks: tasks, **settings):
    """Weights after each step, and what the steps said."""
    maml = learner(problem, split, model=model, **settings)
    optimizer = (base or partial(torch.optim.SGD, lr=RATE))(maml.model.parameters())
    weights, said = [], []
    for n in range(STEPS):
        returned = maml.step(change(n, tasks), optimizer, val)
        weights.append(params_of(maml.model))
        costs = {"gradient_evaluations": maml.gradient_evaluations, **maml.counts}
        said.append({**maml.last._asdict(), "returned": float(returned), "skips": maml.skipped, **costs})
    return {"weights": weights, "said": said, "buffers": dict(maml.loop.per_step.buffers) if maml.loop.per_step else {}}


def unequal(problem):
    """Five tasks, of two shapes."""
    small = dataclasses.replace(problem, examples=3).tasks(2, seed=8)
    return [*problem.tasks(3).unbind(), *small.unbind()]


def enter(name, run):
    RUNS[name] = run


for case in RULES:
    # unequal shares, and fewer tasks than ranks
    for count in (5, 1) if case.name in ("sam", "vasso", "lookbehind", "agnostic", "sparse") else (5,):
        enter(
            f"outer/{case.name}/{count}",
            lambda split, c=case, count=count: walk(
                MLP, split, MLP.tasks(count), val=MLP.tasks(3, seed=7), base=c.base, outer_rule=c.rule
            ),
        )
for name, make in PARTS.items():
    enter(f"parts/{name}", lambda split, m=make: walk(MLP, split, MLP.tasks(5), variant="up", outer_rule=m()))
for name, settings in {
    "both": {},
    "both/higher": {"engine": "higher"},
    "both/threads": {"engine": "higher", "workers": 2},
    "both/traced": {"engine": "traced"},
    "chunks": {"chunk_size": 2},
    "first-order": {"first_order": True},
    "anil": {"inner_params": ["4.*"]},
    "reused": {"reuse_inner_eps": True},
    "reused/parts": {"reuse_inner_eps": True, "outer_rule": ESAM(0.2, 0.6, 0.5, 5), "inner_rule": "sam"},
    # each task has noise of its own number
    "noise": {"inner_rule": RWP(0.1, 0.6, "train", 5), "outer_rule": "sam"},
    "noise/higher": {"inner_rule": RWP(0.1, 0.6, "train", 5), "outer_rule": "sam", "engine": "higher"},
}.items():
    enter(name, lambda split, k=settings: walk(CONV, split, CONV.tasks(5), **{"variant": "both", **k}))
enter("shapes", lambda split: walk(MLP, split, unequal(MLP), variant="both"))
for problem in PROBLEMS:
    enter(
        f"problem/{problem.name}", lambda split, p=problem: walk(p, split, p.tasks(3), variant="both", engine="higher")
    )


def norms(split):
    return walk(CONV, split, CONV.tasks(4), variant="both", batchnorm="per_step", engine="higher")


enter("per-step", norms)


def spoiled(split, rule, **options):
    """The third task, rank 0's, is infinite in the second step."""

    def change(n, tasks):
        if n != 1:
            return tasks
        x = tasks.query[0].clone()
        x[2] = float("inf")
        return Task(tasks.support, (x, tasks.query[1]))

    return walk(MLP, split, MLP.tasks(5), variant="up", outer_rule=rule, change=change, **options)


LOCAL = {"ascent": "local"}
for name, rule in (("sam", "sam"), ("vasso", VaSSO(0.1, 0.4)), ("lookbehind", "lookbehind")):
    enter(f"spoiled/{name}", lambda split, r=rule: spoiled(split, r))
    enter(f"spoiled/{name}/local", lambda split, r=rule: spoiled(split, r, **(LOCAL if split else {})))


def local(split, rule, count=5):
    return walk(MLP, split, MLP.tasks(count), variant="up", outer_rule=rule, **(LOCAL if split else {}))


CLIMBS = {
    case.name: case for case in RULES if case.name in ("sam", "asam", "usam", "multistep", "fisher", "gsam", "wsam")
}
for name, case in CLIMBS.items():
    enter(f"local/{name}", lambda split, c=case: local(split, c.rule))
enter("local/alone", lambda split: local(split, "sam", count=1))
for name, make in PARTS.items():
    enter(f"local/{name}", lambda split, m=make: local(split, m()))


def counting(split, **options):
    """All-reduces of a step, apart from those of the first."""
    sent, usual = [], distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return usual(tensor, *args, **kwargs)

    def change(n, tasks):
        if n == STEPS - 1:
            sent.clear()
        return tasks

    distributed.all_reduce = counted
    try:
        walk(MLP, split, MLP.tasks(5), variant="up", change=change, **options)
    finally:
        distributed.all_reduce = usual
    return sent


enter("sent/global", lambda split: counting(split))
enter("sent/local", lambda split: counting(split, **(LOCAL if split else {})))


def evaluated(split, problem):
    maml = learner(problem, split, variant="both")
    batches = [problem.tasks(n, seed=n) for n in (4, 1, 2)]
    return [maml.evaluate(batches), maml.evaluate(batches[0].unbind(), steps=1, plain=True), maml.evaluate(batches[1])]


enter("evaluate/conv", lambda split: evaluated(split, CONV))
enter("evaluate/mlp", lambda split: evaluated(split, MLP))


def started_apart(split):
    """The ranks' models differ at first."""
    seed = 1 + (distributed.get_rank() if split else 0)
    return walk(CONV, split, CONV.tasks(3), model=CONV.model(seed=seed), variant="up")


enter("started-apart", started_apart)


class Noisy(nn.Module):
    """Remembers the masks of each forward."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.masks = nn.Linear(3, 64), nn.Linear(64, 1), []

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones(64, dtype=x.dtype), training=self.training)
        self.masks.append(mask.detach())
        return self.head(self.body(x) * mask)


def dropout(split):
    torch.manual_seed(3)
    model = Noisy().double()
    before = torch.get_rng_state()
    found = walk(MLP, split, MLP.tasks(4), model=model, variant="up", engine="higher")
    return {**found, "masks": torch.stack(model.masks), "left": torch.equal(torch.get_rng_state(), before)}


enter("dropout", dropout)


def agreed(split):
    """What is done by rank 0 alone, in turn, and wished by one of them."""
    ranks = Ranks.initialised() if split else Ranks()
    order = []

    def fails():
        raise ValueError(f"said by rank {ranks.rank}")

    def fails_on_one():
        return fails() if ranks.rank == ranks.size - 1 else None

    said = []
    for work in (lambda: ranks.once(fails), lambda: ranks.in_turn(fails_on_one)):
        with contextlib.suppress(ValueError):
            try:
                work()
            except ValueError as error:
                said.append(str(error))
                raise
    ranks.in_turn(lambda: order.append(time.monotonic()))
    wished = ranks.any(ranks.rank == ranks.size - 1, False)
    return {"once": ranks.once(lambda: ranks.rank), "said": said, "order": order, "wished": wished}


enter("agreed", agreed)


def main(init, rank, out):
    """What a rank runs."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    report(RUNS, True, out)
    distributed.destroy_process_group()


# a plain `-m tests.test_ranks` may find another package of that name
@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found: ``found(run) -> [of rank 0, of rank 1]``."""
    return found_by("test_ranks", WORLD, tmp_path_factory.mktemp("ranks"))


def assert_alike(of_ranks):
    """All ranks have the same weights after every step, to the last bit, and say the same."""
    first, *others = of_ranks
    assert len(first["weights"]) == STEPS
    for other in others:
        for a, b in zip(first["weights"], other["weights"], strict=True):
            assert_same(a, b)
        assert_same(first["buffers"], other["buffers"])
        assert first["said"] == other["said"]


# one meta-step


AS_ALONE = [
    n for n in RUNS if n.split("/")[0] not in ("spoiled", "local", "sent", "evaluate", "per-step", "dropout", "agreed")
]


@pytest.mark.parametrize("name", AS_ALONE)
def test_as_in_one_process(found, name):
    of_ranks, alone = found(name), RUNS[name](False)
    assert_alike(of_ranks)
    moved = 0.0
    for one, wanted in zip(of_ranks[0]["weights"], alone["weights"], strict=True):
        assert distance(one, wanted) < 1e-12
        moved = distance(one, of_ranks[0]["weights"][0])
    assert moved > 1e-5
    for one, wanted in zip(of_ranks[0]["said"], alone["said"], strict=True):
        assert one.keys() == wanted.keys()
        for key, value in wanted.items():
            # accuracies are in float32
            assert one[key] == (
                value if value is None else pytest.approx(value, rel=1e-6 if key == "accuracy" else 1e-12)
            )


@pytest.mark.parametrize("name", ["sam", "vasso", "lookbehind"])
@pytest.mark.parametrize("ascent", ["", "/local"])
def test_a_task_that_is_not_finite_skips_the_step_on_all_ranks(found, name, ascent):
    of_ranks = found(f"spoiled/{name}{ascent}")
    for of_rank in of_ranks:
        for a, b in zip(of_rank["weights"], of_ranks[0]["weights"], strict=True):
            assert_same(a, b)
        first, second, third = of_rank["weights"]
        assert_same(first, second)
        assert distance(third, second) > 1e-5
        assert [said["skipped"] for said in of_rank["said"]] == [False, True, False]
    if not ascent:
        for a, b in zip(of_ranks[0]["weights"], RUNS[f"spoiled/{name}"](False)["weights"], strict=True):
            assert distance(a, b) < 1e-12


def test_statistics_of_each_inner_step_are_the_means_over_ranks(found):
    of_ranks, alone = found("per-step"), norms(False)
    assert_alike(of_ranks)
    for a, b in zip(of_ranks[0]["weights"], alone["weights"], strict=True):
        assert distance(a, b) < 1e-12  # training normalises by the batch
    for name, one in of_ranks[0]["buffers"].items():
        if name.endswith("num_batches_tracked"):
            assert torch.equal(one, alone["buffers"][name] // WORLD)


def test_dropout_masks_are_of_each_rank_and_leave_no_trace(found):
    of_ranks = found("dropout")
    assert_alike(of_ranks)
    masks = torch.cat([of_rank["masks"] for of_rank in of_ranks])
    assert len(masks.unique(dim=0)) == len(masks) == 2 * len(dropout(False)["masks"]) // 2
    assert all(of_rank["left"] for of_rank in of_ranks)


def test_one_all_reduce_a_pass_and_one_of_few_numbers_a_step(found):
    entries = sum(p.numel() for p in MLP.model().parameters())
    for together, apart in zip(found("sent/global"), found("sent/local"), strict=True):
        assert [n > entries for n in together] == [True, True, False]
        assert [n > entries for n in apart] == [True, False]
        assert together[-1] == apart[-1] < 10


# the ascent of each rank


@pytest.mark.parametrize("name", CLIMBS)
def test_local_ascent_is_a_loop_over_the_ranks(found, name):
    of_ranks = found(f"local/{name}")
    assert_alike(of_ranks)
    whole = MLP.tasks(5)
    shares = [whole.map(lambda t, r=r: t[r::WORLD]) for r in range(WORLD)]
    w, memories = params_of(MLP.model()), [{} for _ in shares]

    def gradient(tasks):
        def grad(point, on="train"):
            return references.meta_gradient(MLP.model(), MLP.loss_fn, tasks, references.plain, 0.1, 2, at=point)[1]

        return grad

    for n in range(STEPS):
        if name in ("gsam", "wsam"):  # these descend along the clean gradient too, which is the whole's
            assert distance(of_ranks[0]["weights"][n], w) > 1e-6
            continue
        loss = references.meta_gradient(MLP.model(), MLP.loss_fn, whole, references.plain, 0.1, 2, at=w)[0]
        ways = [CLIMBS[name].reference(gradient(s), w, RATE, m) for s, m in zip(shares, memories, strict=True)]
        w = {k: (3 * ways[0][k] + 2 * ways[1][k]) / 5 for k in w}
        assert distance(of_ranks[0]["weights"][n], w) < 1e-12
        assert of_ranks[0]["said"][n]["loss"] == pytest.approx(float(loss), rel=1e-12)  # of all tasks, whoever climbed


def test_a_rank_without_tasks_climbs_nowhere(found):
    assert_alike(found("local/alone"))
    for a, b in zip(found("local/alone")[0]["weights"], local(False, "sam", 1)["weights"], strict=True):
        assert distance(a, b) < 1e-12


@pytest.mark.parametrize("name", PARTS)
def test_rules_that_choose_tasks_climb_together(found, name):
    for of_rank in found(f"local/{name}", text=True):
        assert "expected ascent='global' for" in of_rank


def test_what_split_needs():
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be initialised for split=True"):
        learner(MLP, True)
    with pytest.raises(ValueError, match="ascent='local' needs split=True"):
        learner(MLP, False, ascent="local")
    with pytest.raises(ValueError, match="expected ascent among local, global, got ascent='own'"):
        learner(MLP, False, ascent="own")


# evaluation, and what a run needs beside


@pytest.mark.parametrize("name", ["evaluate/conv", "evaluate/mlp"])
def test_an_evaluation_is_that_of_one_process_on_all_ranks(found, name):
    of_ranks, alone = found(name), RUNS[name](False)
    for one, other, wanted in zip(*of_ranks, alone, strict=True):
        assert repr(one) == repr(other)  # nan is the width of a single value
        for key, value in wanted._asdict().items():
            assert getattr(one, key) == (value if value is None else pytest.approx(value, rel=1e-12, nan_ok=True))
    assert of_ranks[0][0].n == 7


def test_work_of_one_rank_and_its_errors_are_shared(found):
    first, second = found("agreed")
    assert first["once"] == second["once"] == 0
    assert first["said"] == second["said"] == ["said by rank 0", "said by rank 1"]
    assert first["order"] < second["order"]
    assert first["wished"] == second["wished"] == [True, False]
    assert agreed(False)["wished"] == [True, False]


def test_a_data_set_is_not_split():
    pytest.importorskip("hydra")
    from .test_configs import compose

    with pytest.raises(
        ValueError, match="is one data set to train on as a whole: expected few-shot tasks under torchrun"
    ):
        assemble.build(compose("tasks=digits", "variant=null"), ranks=Ranks(0, 2))


# the command

TINY = [
    "tasks=sinusoid", "model.hidden=[8]", "evaluate_every=4", "tasks_per_batch=5", "validation_tasks=5", "test_tasks=7",
    "threads=1", "outer.rule=random",
]  # fmt: skip


@pytest.fixture
def start(spawn):
    def run(folder, *arguments, ranks=WORLD):
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *program, "-m", "metasam.scripts.train", *TINY, f"run={folder}", *arguments]
        return spawn(command, env={**environment(), "PYTHONWARNINGS": "ignore"})

    return run


def finished(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def lines(folder):
    return [{k: v for k, v in e.items() if k != "seconds"} for e in metrics.read(folder)]


def test_a_run_of_two_ranks_is_that_of_one(tmp_path, start):
    pytest.importorskip("hydra")
    alone, split = start(tmp_path / "one", "iterations=8", ranks=1), start(tmp_path / "two", "iterations=8")
    (status, _, err), (status_2, out, err_2) = finished(alone), finished(split)
    assert status == status_2 == 0, err + err_2
    assert out.count("loss, adapted as trained") == 1  # rank 0 alone speaks
    assert err_2.count("measuring the weights") == 1
    one, two = (json.loads((tmp_path / f / "results.json").read_text()) for f in ("one", "two"))
    assert two.pop("processes") == WORLD
    assert "torchrun --standalone --nproc-per-node=2 -m metasam.scripts.train tasks=sinusoid" in two["command"]
    for results in (one, two):
        for key in ("seconds", "peak_memory_mb", "command"):
            del results[key]
        del results["config"]["run"]
    assert one.pop("per_task") == pytest.approx(two.pop("per_task"), rel=1e-4)
    numbers = [k for k, v in one.items() if isinstance(v, float)]
    assert {"loss", "ci95", "loss_plain_adapt", "validation_loss", "gradient_evaluations"} <= set(numbers)
    assert {k: one.pop(k) for k in numbers} == pytest.approx({k: two.pop(k) for k in numbers}, rel=1e-4)
    assert one == two
    for a, b in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert a.pop("accuracy") is b.pop("accuracy") is None
        assert a == pytest.approx(b, rel=1e-4)
    # what another run left is found by rank 0, and said once
    status, _, err = finished(start(tmp_path / "two", "iterations=8"))
    assert status != 0
    assert err.count("holds a run already") == 1


def test_resumed_on_other_numbers_of_ranks(tmp_path, start):
    pytest.importorskip("hydra")
    whole = start(tmp_path / "whole", "iterations=9", ranks=1)
    for ranks, iterations in ((2, 3), (1, 6), (2, 9)):
        status, _, err = finished(start(tmp_path / "parts", f"iterations={iterations}", "resume=true", ranks=ranks))
        assert status == 0, err
    assert finished(whole)[0] == 0
    a, b = (checkpoint.load(tmp_path / f / "checkpoint.pt") for f in ("whole", "parts"))
    assert a["iteration"] == b["iteration"] == 9
    assert distance(a["maml"]["model"], b["maml"]["model"]) < 1e-4
    assert a["maml"]["counts"] == b["maml"]["counts"]
    assert torch.equal(a["rng"]["torch"], b["rng"]["torch"])
    read = SharpMAML.load(tmp_path / "parts", weights="latest")
    assert not read.split
    assert read.steps == 9


LEAVES = """
import pathlib, torch
from metasam import ranks
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
import torch._dynamo  # as a traced engine does, late
ranks.Ranks.initialised().sum([torch.ones(3)])
names = lambda: {entry.read_text().strip() for entry in pathlib.Path("/proc/self/task").glob("*/comm")}
before = names()
torch.distributed.destroy_process_group()
print(*(name for name in before if "gloo" in name))
print(*(name for name in names() if "gloo" in name))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to list threads")
def test_no_thread_of_a_group_outlives_it(spawn):
    """One that meets the end of the interpreter may abort it, and so fail a run that is done."""
    status, out, err = finished(spawn([sys.executable, "-c", LEAVES], env=environment()))
    assert status == 0, err
    before, after = out.splitlines()
    assert before
    assert not after


def ranks_of(torchrun):
    """Process ids by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun.pid:
                variables = dict(v.partition("=")[::2] for v in (entry / "environ").read_text().split("\0"))
                found[int(variables["RANK"])] = int(entry.name)
    return found


def at_iteration(process, folder, number):
    for _ in range(12000):
        with contextlib.suppress(OSError):
            if len(metrics.read(folder)) >= number:
                return
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.005)
    raise AssertionError("the run never got there")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the ranks")
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGKILL, 0), (signal.SIGKILL, 1)])
def test_a_rank_is_asked_to_stop_or_killed(tmp_path, start, number, rank):
    pytest.importorskip("hydra")
    process = start(tmp_path / "run", "iterations=100000")
    at_iteration(process, tmp_path / "run", 6)
    os.kill(ranks_of(process)[rank], number)
    began = time.monotonic()
    status, _, err = finished(process)
    assert status != 0
    assert time.monotonic() - began < 60
    there = checkpoint.load(tmp_path / "run/checkpoint.pt")["iteration"]
    if number == signal.SIGTERM:
        assert f"metasam-train: stopped at iteration {there} of 100000, and saved; to continue:" in err
        assert there == len(metrics.read(tmp_path / "run"))
    else:
        assert there % 4 == 0
        assert "metasam-train: a process of this run is gone" in err
        assert f"; to continue from iteration {there}:\n  torchrun --standalone --nproc-per-node=2 -m" in err
    (advice,) = [line for line in err.splitlines() if line.startswith("  torchrun")]
    assert advice.endswith("resume=true")
    if rank == 0:
        return
    status, _, err = finished(start(tmp_path / "run", f"iterations={there + 2}", "resume=true", ranks=1))
    assert status == 0, err
    assert f"resuming {tmp_path / 'run'} at iteration {there} of {there + 2}" in err


def test_commands_of_one_process_say_so(monkeypatch, capsys):
    pytest.importorskip("hydra")
    from metasam.scripts import evaluate, train

    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    for main, arguments, words in (
        (train, ["--multirun", "seed=1,2"], "metasam-train --multirun runs in one process"),
        (evaluate, ["run=x"], "metasam-evaluate runs in one process, got several of torchrun: start it without"),
    ):
        monkeypatch.setattr(sys, "argv", ["metasam", *arguments])
        with pytest.raises(SystemExit) as stop:
            main.main()
        assert stop.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_others_never_came_says_so(rank, monkeypatch):
    monkeypatch.setattr("metasam.ranks.START", datetime.timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    set_to = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in set_to.items():
        monkeypatch.setenv(name, str(value))
    said = f"expected 2 processes to meet at 127.0.0.1:{port} within 1 s"
    with pytest.raises(ConnectionError, match=said), joined("cpu"):
        pass
