"""Comparing runs: rows, pairing, intervals."""

import json
import sys

import pytest
from scipy import stats

from metasam.scripts import report


def write(folder, variant, seed, per_task, **config):
    folder.mkdir(parents=True)
    mean = sum(per_task) / len(per_task)
    results = {
        "seed": seed, "seconds": 10.0, "gradient_evaluations": 100.0, "accuracy": mean, "ci95": 0.1, "n": len(per_task),
        "accuracy_plain_adapt": mean - 0.05, "over": f"{len(per_task)} test tasks", "peak_memory_mb": 300.0,
        "per_task": per_task, "config": {"variant": variant, "seed": seed, "rho_low": 0.1, "rho_up": None, **config},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))


NONE = {1: [0.2, 0.4, 0.6], 2: [0.3, 0.5, 0.9], 3: [0.1, 0.2, 0.9]}
LOW = {1: [0.3, 0.6, 0.5], 2: [0.5, 0.5, 1.0], 3: [0.2, 0.1, 0.9]}


@pytest.fixture
def study(tmp_path):
    for variant, seeds in {"none": NONE, "low": LOW}.items():
        for seed, per_task in seeds.items():
            write(tmp_path / f"{variant}-{seed}", variant, seed, per_task)
    return tmp_path


def test_rows_are_means_over_seeds_and_differences_are_paired_by_seed(study):
    none, low = report.compare(report.read([study]))
    means = [sum(v) / 3 for v in LOW.values()]
    differences = [sum(LOW[s]) / 3 - sum(NONE[s]) / 3 for s in (1, 2, 3)]
    assert none["variant"] == "none"
    assert low["mean"] == pytest.approx(sum(means) / 3)
    assert low["seeds"] == 3
    assert low["difference"] == pytest.approx(sum(differences) / 3)
    interval = stats.t.interval(0.95, 2, loc=stats.tmean(differences), scale=stats.sem(differences))
    assert low["difference_ci95"] == pytest.approx((interval[1] - interval[0]) / 2)
    assert low["plain_adapt"] == pytest.approx(low["mean"] - 0.05)


def test_only_seeds_of_both_sides_are_paired(study):
    write(study / "low-9", "low", 9, [1.0, 1.0, 1.0])
    low = report.compare(report.read([study]))[1]
    differences = [sum(LOW[s]) / 3 - sum(NONE[s]) / 3 for s in (1, 2, 3)]
    assert low["seeds"] == 4
    assert low["difference"] == pytest.approx(sum(differences) / 3)


def test_radii_that_play_no_part_do_not_split_rows_and_others_do(study):
    write(study / "none-other-rho", "none", 4, [0.1, 0.1, 0.1], rho_low=0.7)
    write(study / "low-other-rho", "low", 4, [0.1, 0.1, 0.1], rho_low=0.7)
    rows = report.compare(report.read([study]))
    assert [(r["variant"], r["rho_low"], r["seeds"]) for r in rows] == [
        ("none", None, 4),
        ("low", 0.1, 3),
        ("low", 0.7, 1),
    ]


def test_runs_on_other_tasks_are_refused(study):
    write(study / "up-1", "up", 1, [0.5, 0.5])
    with pytest.raises(ValueError, match="it has 2 test tasks here and 3 test tasks there"):
        report.compare(report.read([study]))


def supervised(folder, rule, seed, accuracy, rho=None):
    folder.mkdir(parents=True)
    config = {"variant": None, "seed": seed, "rho": rho, "rho_low": None, "rho_up": None, "method": rule}
    results = {
        "seed": seed, "seconds": 1.0, "gradient_evaluations": 9.0, "accuracy": accuracy,
        "accuracy_last": accuracy - 0.1,
        "n": 50, "over": "50 test examples", "peak_memory_mb": 1.0, "config": config,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))


def test_supervised_runs_are_rows_by_rule_and_compared_with_sam(tmp_path):
    for seed, (plain, sam) in {1: (0.5, 0.6), 2: (0.55, 0.75)}.items():
        supervised(tmp_path / f"plain{seed}", "plain", seed, plain)
        supervised(tmp_path / f"sam{seed}", "sam", seed, sam, rho=0.05)
    rows = {row["variant"]: row for row in report.compare(report.read([tmp_path]))}
    assert rows["plain"]["difference"] == pytest.approx((0.5 - 0.6 + 0.55 - 0.75) / 2)
    assert rows["sam"]["last"] == pytest.approx(0.575)
    assert rows["sam"]["rho"] == 0.05
    assert rows["sam"]["difference_to"] == "sam"


def test_a_base_that_is_not_there_is_named(study, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(study), "--to", "lo"])
    with pytest.raises(SystemExit, match="expected --to to be one of low, none, got --to lo; did you mean 'low'"):
        report.main()


def test_tuning_runs_are_left_out_unless_they_are_named(study, monkeypatch, capsys):
    write(study / "tuning/none/rho1-seed1001", "none", 1001, [0.9, 0.9, 0.9])
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(study)])
    report.main()
    assert "1 tuning runs are left out" in capsys.readouterr().out
    assert [r["seeds"] for r in report.compare(report.read([study]))] == [3, 3]
    assert len(report.read([study / "tuning"])) == 1
    with pytest.raises(ValueError, match="found none but 1 tuning runs: name the folder tuning"):
        report.read([write(study / "other/tuning/a", "none", 1, [0.5]) or study / "other"])


def test_a_row_is_compared_with_the_base_that_is_alike(tmp_path, capsys):
    for lr, none, low in ((0.1, 0.2, 0.3), (0.2, 0.6, 0.9)):
        for variant, accuracy in {"none": none, "low": low}.items():
            write(tmp_path / f"{variant}-{lr}", variant, 1, [accuracy], optim={"lr": lr}, rule={"_target_": "x.Sharp"})
    rows = report.compare(report.read([tmp_path]))
    assert [r["difference"] for r in rows[2:]] == [pytest.approx(0.1), pytest.approx(0.3)]
    # without SAM the rule plays no part: the one of the same rule is taken
    write(tmp_path / "none-asam", "none", 1, [0.5], optim={"lr": 0.1}, rule={"_target_": "x.ASAM"})
    rows = report.compare(report.read([tmp_path]))
    assert [r["difference"] for r in rows[3:]] == [pytest.approx(0.1), pytest.approx(0.3)]
    rows = report.compare(report.read([tmp_path]), "low")
    assert [r["difference"] for r in rows[:3]] == [pytest.approx(d) for d in (0.2, -0.1, -0.3)]
    for seed in (1, 2):
        for rho in (0.1, 0.2):
            supervised(tmp_path / f"s/sam{rho}-{seed}", "sam", seed, 0.5 + rho, rho=rho)
        supervised(tmp_path / f"s/plain{seed}", "plain", seed, 0.5)
    rows = report.compare(report.read([tmp_path / "s"]))
    assert all(r["difference"] != r["difference"] for r in rows)
    report.show(rows)
    assert "1 rows have no difference: expected one setting of sam" in capsys.readouterr().out


def test_a_table_that_cannot_be_written_is_said_in_one_line(study, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(study), "--csv", str(study / "no/x.csv")])
    with pytest.raises(SystemExit, match=r"cannot write .*x\.csv: no such file or directory; .*--csv FILE"):
        report.main()


def test_runs_of_two_kinds_are_not_one_table(study, monkeypatch):
    supervised(study / "sam1", "sam", 1, 0.5)
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(study)])
    with pytest.raises(SystemExit, match="got both"):
        report.main()


def test_the_command_prints_a_table_and_writes_csv(study, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(study), "--csv", str(study / "table.csv")])
    report.main()
    assert "low" in capsys.readouterr().out
    assert (study / "table.csv").read_text().startswith("variant,rho,rho_low,")


def test_nothing_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["metasam-report", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"expected run folders with a results\.json"):
        report.main()


def test_a_damaged_result_is_named(study, monkeypatch):
    (study / "none-1/results.json").write_text("{")
    with pytest.raises(ValueError, match=r"none-1.*no results of a run"):
        report.read([study])
