"""The ablation: its grid, its phases, and that a study in parts is the same study."""

import json
import statistics
import subprocess
import sys

import pytest

pytest.importorskip("hydra")
from hydra.core.global_hydra import GlobalHydra

from metasam.scripts import ablate, report

TINY = [
    "tasks=sinusoid", "model.hidden=[4]", "iterations=6", "evaluate_every=3", "tasks_per_batch=2", "validation_tasks=4",
    "test_tasks=6", "seeds=2", "grid=[0.1,4]", "engine=vmap",
]  # fmt: skip


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["metasam-ablate", *arguments])
        GlobalHydra.instance().clear()
        status = 0
        try:
            ablate.main()
        except SystemExit as stop:
            status = stop.code
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def read(path):
    return json.loads(path.read_text())


def test_a_study_whole_and_in_parts(call, tmp_path, monkeypatch, capsys):
    measured = ("diagnostics.sharpness=true", "diagnostics.congruence=true", "diagnostics.tasks=2")
    status, out, err = call(*TINY, *measured, "rules=[sam]", "workers=2", "study=whole")
    assert status == 0, err
    assert "equal compute" in out
    whole = tmp_path / "whole"
    cells = {p.parent.relative_to(whole).as_posix() for p in whole.rglob("seed1/results.json")}
    place = "noise0-classesall"
    assert cells == {
        f"{place}/iterations/none/seed1",
        *(f"{place}/{mode}/{w}-sam/seed1" for mode in ("iterations", "compute") for w in ("low", "up", "both")),
    }
    # the radius of each loop is the one that validated best, and both takes the two
    radii = {}
    for loop in ("low", "up"):
        tried = {
            rho: read(whole / f"tuning/{place}/{loop}-sam-rho{rho}-seed1001/results.json") for rho in ("0.005", "0.2")
        }
        assert all(r["over"] == "6 validation tasks" for r in tried.values())
        radii[loop] = float(min(tried, key=lambda rho: tried[rho]["validation_loss"]))
    both = read(whole / f"{place}/compute/both-sam/seed2/results.json")
    assert (both["config"]["rho_low"], both["config"]["rho_up"]) == (radii["low"], radii["up"])
    assert both["over"] == "6 validation tasks"
    assert both["gradient_evaluations"] <= 6
    assert read(whole / f"{place}/iterations/both-sam/seed2/results.json")["iterations"] == 6
    # what could be detected was written down before test data were looked at
    plan = read(whole / "plan.json")
    assert plan["written_before_test"] is True
    assert (whole / "plan.json").stat().st_mtime_ns < min(p.stat().st_mtime_ns for p in whole.rglob("test.json"))
    rows = read(whole / "study.json")["rows"]
    assert len(rows) == 2 * 2 * 4  # modes x seeds x places; none is one run in both modes
    for row in rows:
        name = "none" if row["where"] == "none" else f"{row['where']}-{row['rule']}"
        mode = "iterations" if row["where"] == "none" else row["mode"]
        judged = read(whole / place / mode / name / f"seed{row['seed']}/test.json")
        assert row["loss"] == judged["loss"] == pytest.approx(statistics.fmean(row["per_task"]), abs=1e-6)
        assert row["n"] == 6
        trained = read(whole / place / mode / name / f"seed{row['seed']}/results.json")["sharpness"]
        adapted = trained["adapted"]["query"]
        assert row["sharpness"] == {
            "meta_average": trained["average"],
            "meta_worst": trained["worst"],
            "adapted_average": adapted["average"],
            "adapted_worst": adapted["worst"],
        }
        assert [at for at, _ in row["congruence"]]
        assert judged["over"] == "6 test tasks"
    pictures = ("forest.png", "sharpness-*.png", "congruence-*.png")
    for name in ("report.md", "report.html", "results.csv", *(next(whole.glob(p)).name for p in pictures)):
        assert (whole / name).stat().st_size > 100

    # and read back
    (whole / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(whole)])
    report.main()
    assert "equal compute" in capsys.readouterr().out
    assert (whole / "report.html").exists()

    # the same in phases and shards
    for phase in ("tune", "train", "test"):
        for shard in (0, 1):
            words = (f"phase={phase}", "shards=2", f"shard={shard}")
            status, _, err = call(*TINY, *measured, "rules=[sam]", "study=parts", *words)
            assert status == 0, err
    status, _, err = call(*TINY, *measured, "rules=[sam]", "study=parts", "phase=report")
    assert status == 0, err
    again = read(tmp_path / "parts/study.json")["rows"]
    times = ("seconds", "peak_memory_mb")
    assert [{k: v for k, v in r.items() if k not in times} for r in again] == [
        {k: v for k, v in r.items() if k not in times} for r in rows
    ]


def test_phases_that_come_too_early_say_so(call):
    for phase, before in {"train": "tune", "test": "tune"}.items():
        status, _, err = call(*TINY, "study=s", f"phase={phase}")
        assert status == 2
        assert f"phase={before}" in err
    status, _, err = call(*TINY, "study=t", "grid=null", "phase=test")
    assert status == 2
    assert "phase=train" in err
    status, _, err = call(*TINY, "study=t", "grid=null", "phase=report")
    assert status == 2
    assert "phase=test" in err


def test_axes_are_settings_of_the_tasks(call, tmp_path):
    words = ["where=[up]", "modes=[iterations]", "grid=null", "noise=[0,0.5]", "seeds=1", "study=s"]
    status, _, err = call(*TINY, *words)
    assert status == 0, err
    found = {p.relative_to(tmp_path / "s").as_posix(): read(p) for p in (tmp_path / "s").rglob("results.json")}
    assert {k: v["tasks"]["noise"] for k, v in found.items()} == {
        f"noise{n:g}-classesall/iterations/{w}/seed1/results.json": n for n in (0, 0.5) for w in ("none", "up-sam")
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["where=[inner]"], "expected where to be a list out of none, low, up, both"),
        (["modes=all"], "expected modes"),
        (["rules=[]"], "expected rules"),
        (["rules=[sma]"], "cannot use 'sma'"),
        (["noise=[-1]"], "expected noise"),
        (["classes=[few]"], "expected classes"),
        (["classes=[20]"], "classes"),  # sinusoid has none to take away
        (["phase=tran"], "phase=tran"),
        (["shards=2", "shard=2", "phase=train"], "expected shard below shards=2"),
        (["shards=2"], "one phase at a time"),
        (["tasks=digits"], "one loop"),
        (["tasks=omniglot_oneshot", "tasks.root=nowhere"], "nowhere"),
        (["iterations=0"], "iterations"),
        (["rules=[momentum]"], "needs a base optimizer with momentum"),
        (['rules=[sam,"sam optim.lr=0.5"]'], "optim.lr=0.5 in 'sam optim.lr=0.5' is no key of a rule"),
        (["noise=[0,0.0]"], "different numbers"),
        (["noise=[0,0.5]", "tasks.noise=0.3"], "contradict each other"),
        (["margin=-1"], "margin=-1"),
        (["margin=abc"], "margin=abc"),
        (["split=test"], "split=... is for the study to set"),
        (["variant=low"], "variant=... is for the study"),
    ],
)
def test_mistakes(call, words, message):
    status, _, err = call(*TINY, "study=s", *words)
    assert status == 2, err
    assert message in err
    assert "Traceback" not in err


def test_a_phase_spread_by_a_launcher(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["--multirun", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    code = "from metasam.scripts.ablate import main; main()"
    words = [*launcher, *TINY, "rules=[sam]", "study=s", "phase=tune", "shards=2", "shard=0,1"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("s/tuning/*/*/results.json"))) == 4


def test_the_baseline_is_that_of_no_rule_and_axes_are_what_runs_have(call, tmp_path):
    """An entry's keys are its own, and noise is what the runs have, however it was said."""
    words = ["where=[up]", "modes=[iterations]", "grid=null", "seeds=1", "tasks.noise=0.5", "study=s"]
    status, _, err = call(*TINY, 'rules=["asam rule.perturb.eta=0.3",momentum]', *words)
    assert status == 0, err
    rows = read(tmp_path / "s/study.json")["rows"]
    assert {(row["where"], row["rule"], row["noise"]) for row in rows} == {
        ("none", "-", 0.5), ("up", "asam rule.perturb.eta=0.3", 0.5), ("up", "momentum", 0.5),
    }  # fmt: skip
    plain = read(tmp_path / "s/noise0.5-classesall/iterations/none/seed1/results.json")["config"]
    assert plain["rule"]["_target_"] == "metasam.rules.Plain"
    # more seeds after the test: a new plan, which says that it came late; other test tasks: measured again
    assert read(tmp_path / "s/plan.json")["written_before_test"] is True
    grown = [w for w in words if not w.startswith("seeds")]
    arguments = [w for w in TINY if not w.startswith(("seeds", "test_tasks"))]
    status, _, err = call(*arguments, 'rules=["asam rule.perturb.eta=0.3",momentum]', *grown, "seeds=2", "test_tasks=9")
    assert status == 0, err
    plan = read(tmp_path / "s/plan.json")
    assert (plan["seeds"], plan["tasks"], plan["written_before_test"]) == (2, 9, False)
    assert {row["n"] for row in read(tmp_path / "s/study.json")["rows"]} == {9}
    # what is lost is named
    (tmp_path / "s/noise0.5-classesall/iterations/none/seed1/best.pt").unlink()
    (tmp_path / "s/noise0.5-classesall/iterations/none/seed1/test.json").unlink()
    status, _, err = call(*arguments, 'rules=["asam rule.perturb.eta=0.3",momentum]', *grown, "seeds=2", "test_tasks=9")
    assert status == 2
    assert "best.pt is lost: remove" in err
    (tmp_path / "s/plan.json").write_text("")
    status, _, err = call(*arguments, 'rules=["asam rule.perturb.eta=0.3",momentum]', *grown, "seeds=2", "test_tasks=9")
    assert "plan.json is damaged: remove it" in err


@pytest.mark.parametrize(
    ("words", "number"),
    [(["modes=[compute]"], 4 + 2 * 4), (["where=[both]"], 4 + 2 * 3), (["where=[none]"], 2)],
    ids=["compute", "both", "none"],
)
def test_a_dry_run_times_what_is_tuned_and_not_trained(call, words, number):
    status, out, err = call(*TINY, "rules=[sam]", *words, "dry_run=true")
    assert status == 0, err
    last = next(line for line in out.splitlines() if "in all" in line)
    assert int(last.strip("│").split("│")[4]) == number


def test_a_dry_run_counts_the_runs_and_writes_nothing(call, tmp_path):
    status, out, err = call(*TINY, "rules=[sam]", "noise=[0,0.5]", "dry_run=true")
    assert status == 0, err
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "│" in line]
    assert {tuple(row[:4]): int(row[4]) for row in rows} == {
        ("tuning", "sam", "low", "iterations"): 2 * 2,
        ("tuning", "sam", "up", "iterations"): 2 * 2,
        ("training", "-", "none", "iterations"): 2 * 2,
        **{("training", "sam", w, m): 2 * 2 for w in ("low", "up", "both") for m in ("iterations", "compute")},
        ("in all", "", "", ""): 2 * 2 * 9,
    }
    assert not list(tmp_path.iterdir())
