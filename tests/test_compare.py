"""Comparing rules: radii chosen by validation, equal compute, paired differences, studies that continue."""

import csv
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("sklearn")
from hydra.core.global_hydra import GlobalHydra

from metasam.checkpoint import CheckpointError
from metasam.scripts import compare, study
from metasam.training.folder import alone
from metasam.training.trainer import Interrupted

ENTRIES = ["plain", "sam", "agnostic rule.lookahead=false tasks.holdout=0.2"]
TINY = [
    "tasks.per_class=10", "model.hidden=[8]", "budget.passes=30", "evaluate_every=10", "seeds=2", "tune_seeds=2",
    "grid=[0.5,4]", "workers=2", f"rules={json.dumps(ENTRIES, separators=(',', ':'))}",
]  # fmt: skip


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["metasam-compare", *arguments])
        GlobalHydra.instance().clear()
        status = 0
        try:
            compare.main()
        except SystemExit as stop:
            status = stop.code
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_comparison_from_the_command_line(call, tmp_path):
    status, out, err = call(*TINY, "study=s")
    assert status == 0, err
    assert "30 gradient evaluations each" in out
    with open(tmp_path / "s/comparison.csv", newline="") as file:
        rows = {row["rule"]: row for row in csv.DictReader(file)}
    assert list(rows) == ENTRIES
    # the runs that a row is made of
    slugs = dict(zip(ENTRIES, ["plain", "sam", "agnostic_rule.lookahead=false_tasks.holdout=0.2"], strict=True))
    runs = {e: [results(tmp_path / "s" / slugs[e] / f"seed{s}") for s in (1, 2)] for e in ENTRIES}
    for entry, row in rows.items():
        accuracies = [r["accuracy"] for r in runs[entry]]
        assert float(row["mean"]) == pytest.approx(statistics.fmean(accuracies))
        assert float(row["ci95"]) == pytest.approx(12.7062047 * statistics.stdev(accuracies) / math.sqrt(2))
        differences = [a["accuracy"] - b["accuracy"] for a, b in zip(runs[entry], runs["sam"], strict=True)]
        assert float(row["difference"]) == pytest.approx(statistics.fmean(differences))
        assert [r["seed"] for r in runs[entry]] == [1, 2]
        assert all(r["gradient_evaluations"] <= 30 for r in runs[entry])
    assert [runs[e][0]["iterations"] for e in ENTRIES] == [30, 15, 13]  # 1, 2, 2.25 a step
    agnostic = runs[ENTRIES[2]][0]
    assert agnostic["tasks"]["sizes"]["holdout"] == 20
    assert runs["sam"][0]["tasks"]["sizes"]["holdout"] == 0
    # the radius is the one that validated best over the tuning seeds, which no run of the table has
    tuned = {
        rho: statistics.fmean(
            results(tmp_path / f"s/tuning/sam/rho{rho}-seed{s}")["validation_accuracy"] for s in (1001, 1002)
        )
        for rho in ("0.025", "0.2")
    }
    best = max(tuned, key=lambda rho: (tuned[rho], -float(rho)))
    assert float(rows["sam"]["rho"]) == float(best) == runs["sam"][0]["config"]["rho"]
    assert rows["plain"]["rho"] == ""
    assert results(tmp_path / "s/tuning/sam/rho0.2-seed1001")["over"] == "200 validation examples"
    record = json.loads((tmp_path / "s/comparison.json").read_text())
    assert [r["chosen"] for r in record["radii"]["sam"]].count(True) == 1
    assert record["command"].startswith("metasam-compare ")
    assert (tmp_path / "s/comparison.png").stat().st_size > 10_000

    # again: nothing is trained a second time
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("results.json")}
    status, again, _ = call(*TINY, "study=s")
    assert status == 0
    assert again == out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("results.json")} == before
    # another comparison in the same folder
    status, _, err = call(*TINY, "study=s", "model.hidden=[9]")
    assert status == 2
    assert "model.hidden=[8]" in err
    assert "study=DIR" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rules=sam"], "expected rules to be a list such as"),
        (["rules=[sam,sam]"], "every entry of rules once"),
        (["rules=[sam,samm]"], "cannot use 'samm'"),
        (['rules=[sam,"sam rule.rh=1"]'], "rule.rh"),
        (["to=asam", "rules=[plain,sam]"], "expected to= one of rules, got to=asam"),
        (["grid=[0]"], "factors above 0"),
        (["seeds=0"], "seeds to be a whole number"),
        (["workers=x"], "workers"),
        (["budget.passes=-1"], "budget.passes"),
        (["variant=low"], "one loop"),
        (["grid=[1,1.0]"], "every factor of grid once"),
        (['rules=[sam,"asam budget.passes=9"]'], "budget.passes=9 in 'asam budget.passes=9' would make it unlike"),
        (['rules=[sam,"asam tasks.test=100"]'], "tasks.test=100"),
        (['rules=["sam rule.m=2","sam  rule.m=2"]'], "every entry of rules once"),
    ],
)
def test_mistakes(call, words, message):
    status, _, err = call(*TINY[:-1], "rules=[sam]", *words, "study=s")
    assert status == 2, err
    assert message in err
    assert "Traceback" not in err


def cell(folder, **changes):
    config = compare_config()
    for key, value in changes.items():
        node = config
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        node[last] = value
    return study.Cell(folder, config)


def compare_config():
    import hydra

    from metasam.scripts import command

    with hydra.initialize_config_module("metasam.configs", version_base="1.3"):
        words = ["tasks=digits", "tasks.per_class=10", "model.hidden=[8]", "budget.passes=20", "evaluate_every=10"]
        return {"name": "digits", **command.plain_config(hydra.compose("train", words))}


@pytest.fixture
def quick(monkeypatch):
    """Cells run in this process, one after the other, each as the test says."""

    def run(cells, **_):
        return [outcome(cell) for cell in cells]

    def outcome(cell):
        rho = cell.config.get("rho")
        if rho in outcomes and "tuning" in cell.folder.parts:
            return outcomes[rho]
        study.train(cell, "test")
        return study.finished(cell)

    outcomes = {}
    monkeypatch.setattr(study, "run", run)
    return outcomes


ONE = ["tasks.per_class=10", "model.hidden=[4]", "budget.passes=8", "seeds=1", "tune_seeds=1", "rules=[sam]", "study=s"]


def test_a_radius_that_diverges_loses_and_other_failures_stop_the_study(call, quick, tmp_path):
    quick[0.05] = study.Failure("25 steps in a row", True)
    status, out, err = call(*ONE, "grid=[1,2]")
    assert status == 0, err
    record = json.loads((tmp_path / "s/comparison.json").read_text())
    assert {r["rho"]: r["chosen"] for r in record["radii"]["sam"]} == {0.05: False, 0.1: True}
    assert record["rows"][0]["ci95"] is None  # one seed has no interval, and NaN is no JSON
    assert "1 seed," in out
    quick[0.1] = study.Failure("its process died with exit code -9", False)
    status, _, err = call(*ONE[:-1], "study=t", "grid=[1,2]")
    assert status == 2
    assert "a tuning run failed: its process died with exit code -9" in err
    assert not (tmp_path / "t/sam").exists()
    quick[0.1] = quick[0.05]
    status, _, err = call(*ONE[:-1], "study=u", "grid=[1,2]")
    assert status == 2
    assert "sam diverges with every radius" in err


def test_only_one_comparison_works_in_a_folder(call, tmp_path):
    (tmp_path / "s").mkdir()
    with alone(tmp_path / "s"):
        status, _, err = call(*ONE, "grid=[1]")
    assert status == 2
    assert "study=DIR" in err


def test_cells_that_end_badly_do_not_take_the_others_along(tmp_path):
    GlobalHydra.instance().clear()
    good, broken = cell(tmp_path / "good", seed=1), cell(tmp_path / "broken", rho=-1.0)
    wild = cell(tmp_path / "wild", optim__lr=1e38, budget__passes=200)
    found = study.run([wild, broken, good])
    assert found[0].diverged
    assert "25 steps in a row" in found[0].reason
    assert not found[1].diverged
    assert "rho" in found[1].reason
    assert found[2]["seed"] == 1
    assert study.run([wild]) == [found[0]]  # it is not tried again
    with pytest.raises(CheckpointError, match="seed=1, not 2"):
        study.run([cell(tmp_path / "good", seed=2)])
    (tmp_path / "good/results.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"results\.json is damaged: remove it"):
        study.run([good])


def test_an_interruption_that_meets_a_run_just_ended(tmp_path, monkeypatch):
    def too_late(pipes, timeout):
        monkeypatch.undo()
        assert wait(pipes, 60)  # each says so when its process ends
        for process in multiprocessing.active_children():
            process.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "wait", too_late)
    with pytest.raises(Interrupted, match="stopped with 0 of 2 runs finished"):
        study.run([cell(tmp_path / "a"), cell(tmp_path / "b")], workers=2, job=study.judge)  # there is nothing to judge


def assert_gone(group):
    """No process is left over: what goes on in secret holds the folders that the same command needs."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its study by 10 s")


def test_a_killed_study_goes_on_where_it_was(tmp_path, spawn):
    code = "from metasam.scripts.compare import main; main()"
    words = [*TINY[:-1], "rules=[plain,sam]", "study=s", "budget.passes=400", "grid=null", "seeds=4"]
    arguments = [sys.executable, "-c", code, *words]

    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = spawn(arguments, cwd=tmp_path, start_new_session=True)
        before = len(list(tmp_path.rglob("results.json")))
        deadline = time.monotonic() + 120
        while len(list(tmp_path.rglob("results.json"))) < before + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)  # Ctrl-C goes to all of them
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        if how != signal.SIGKILL:
            assert "the same command goes on" in err
            assert process.returncode == 130
            assert "Traceback" not in err
        assert_gone(process.pid)
        leave = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("results.json")}
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(p.stat().st_mtime_ns == t for p, t in leave.items())  # what was finished was not repeated
    assert len(list(Path(tmp_path).rglob("results.json"))) == 2 * 4
