"""The report of an ablation: what it concludes, that both renderings hold it, and what it does with gaps."""

import base64
import csv
import html.parser
import math
import re
import sys

import pytest
from scipy import stats

from metasam.scripts import ablation_report as report
from metasam.scripts.document import Code, Folded, Grid, Text, markdown, page
from metasam.training import figures

LUCK = {1: 0.000, 2: 0.021, 3: -0.013, 4: 0.008, 5: 0.015}
"""Of seeds, shared by all cells: pairing takes it out."""
EFFECT = {"none": 0.0, "low": 0.001, "up": -0.03, "both": 0.05}
WOBBLE = {1: 0.002, 2: -0.001, 3: 0.0, 4: 0.001, 5: -0.002}


def row(where, seed, rule="sam", mode="iterations", noise=0.0, classes="all", **other):
    result = 0.7 + LUCK[seed] + EFFECT[where] + (WOBBLE[seed] * (1 + 0.1 * len(rule)) if where != "none" else 0)
    passes = {"none": 1, "low": 2, "up": 2, "both": 4}[where]
    return {
        "where": where, "rule": rule, "mode": mode, "noise": noise, "classes": classes, "seed": seed,
        "rho_low": 0.05 if where in ("low", "both") else None, "rho_up": 0.125 if where in ("up", "both") else None,
        "accuracy": result, "quantity": "accuracy", "n": 600, "per_task": [], "iterations": 100,
        "gradient_evaluations": 100.0 * passes, "seconds": 12.5 * passes, "peak_memory_mb": 301.0 + passes,
        "curve": [[10.0 * passes * i, 10 * i, result - 0.3 / i] for i in range(1, 11)],
        "congruence": [[10 * i, 0.1 * i / passes] for i in range(1, 11)],
        "sharpness": dict.fromkeys(report.SHARPNESS, (0.3 + LUCK[seed]) / passes),
        **other,
    }  # fmt: skip


def study(rules=("sam", "asam"), modes=("iterations",), settings=((0.0, "all"),), seeds=LUCK, **other):
    return [
        row(where, seed, rule, mode, noise, classes, **other)
        for noise, classes in settings
        for mode in modes
        for where in EFFECT
        for rule in (rules if where != "none" else ("plain",))
        for seed in seeds
    ]


FACTS = {
    "command": "metasam-ablate tasks=glyphs 'noise=[0,0.4]' & more", "tasks": "glyphs", "margin": 0.01,
    "plan": {"detectable": {"iterations": 0.021}, "written_before_test": True, "grid": ["where: all", "rules: <two>"]},
    "tuning": [
        {"where": "low", "rule": "sam", "rho": 0.05, "validation": [0.71, 0.73], "chosen": True},
        {"where": "low", "rule": "sam", "rho": 0.5, "validation": [0.61], "chosen": False},
    ],
    "versions": {"metasam": "0.1.0"}, "transductive": "BatchNorm is transductive here.",
}  # fmt: skip


@pytest.fixture
def pictures():
    """Asked for by tests that need them: drawing is what takes time."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if matplotlib were not installed


class Page(html.parser.HTMLParser):
    """Text, tables and pictures of a page; fails on tags that do not nest."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.images, self.text, self.tags = [], [], [], "", set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "img":
            self.images.append(dict(attrs)["src"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        self.text += data


def written(rows, facts, folder):
    report.write(rows, facts, folder)
    return Page((folder / "report.html").read_text()), (folder / "report.md").read_text()


def lines(folder, name="results.csv"):
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def test_comparisons_are_the_paired_tests_of_scipy_adjusted_by_hand():
    found = {(c.rule, c.where): c for c in report.analyse(study(), FACTS).comparisons}
    values = {
        (rule, where): [row(where, s, rule)["accuracy"] for s in LUCK]
        for rule in ("sam", "asam", "plain")
        for where in EFFECT
    }
    p = {key: stats.ttest_rel(values[key], values["plain", "none"]).pvalue for key in found}
    assert len(p) == 6
    running = 0.0
    for rank, key in enumerate(sorted(p, key=p.get)):
        running = max(running, min(1.0, (6 - rank) * p[key]))
        assert found[key].difference.p == pytest.approx(p[key])
        assert found[key].adjusted == pytest.approx(running)
    assert {key: c.conclusion.verdict for key, c in found.items()} == {
        ("sam", "low"): "equivalent", ("asam", "low"): "equivalent", ("sam", "up"): "worse", ("asam", "up"): "worse",
        ("sam", "both"): "better", ("asam", "both"): "better",
    }  # fmt: skip


def test_the_family_is_the_whole_study():
    one = report.analyse(study(), FACTS).comparisons
    two = report.analyse(study(modes=("iterations", "compute"), settings=((0.0, "all"), (0.4, 20))), FACTS).comparisons
    assert len(two) == 4 * len(one)
    least = min(c.adjusted for c in one)
    assert min(c.adjusted for c in two) == pytest.approx(4 * least)


def test_each_budget_and_setting_has_a_baseline_of_its_own():
    rows = study(modes=("iterations", "compute"), rules=("sam",))
    for r in rows:
        if r["mode"] == "compute" and r["where"] == "none":
            r["accuracy"] += 0.05
    found = {(c.mode, c.where): c.difference.mean for c in report.analyse(rows, FACTS).comparisons}
    assert found["iterations", "both"] == pytest.approx(0.05)
    assert found["compute", "both"] == pytest.approx(0.0)


def test_places_are_compared_with_each_other():
    found = {(c.where, c.base): c for c in report.analyse(study(rules=("sam",)), FACTS).between}
    assert found["both", "up"].difference.mean == pytest.approx(0.08)
    assert found["low", "up"].conclusion.verdict == "not shown"  # the same difference on every seed
    assert set(found) == {("low", "up"), ("both", "low"), ("both", "up")}


def test_the_page_holds_every_value_of_the_csv_and_needs_nothing_else(tmp_path, pictures):
    rows = study(rules=("sam",), modes=("iterations", "compute"), seeds=[1, 2])
    found, text = written(rows, FACTS, tmp_path)
    listed = [list(line.values()) for line in lines(tmp_path)]
    assert len(listed) == len(rows)
    assert found.tables[-1] == [list(report.COLUMNS), *listed]
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert not re.findall(r'(?:src|href)="(?!data:)', (tmp_path / "report.html").read_text())
    pictures = {base64.b64encode(f.read_bytes()).decode() for f in tmp_path.glob("*.png")}
    assert {image.removeprefix("data:image/png;base64,") for image in found.images} == pictures
    assert {f.name.partition("-")[0] for f in tmp_path.glob("*.png")} == {
        "forest.png", "curves", "compute", "sharpness", "congruence"
    }  # fmt: skip
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / name).is_file()


def test_results_csv_gives_back_what_came_in(tmp_path):
    rows = study(rules=("sam",))
    report.write(rows, FACTS, tmp_path)
    found = {(line["where"], line["seed"]): line for line in lines(tmp_path)}
    for r in rows:
        line = found[r["where"], str(r["seed"])]
        assert float(line["result"]) == pytest.approx(r["accuracy"], rel=1e-7)
        assert float(line["gradient_evaluations"]) == r["gradient_evaluations"]
        assert float(line["meta_worst"]) == pytest.approx(r["sharpness"]["meta_worst"], rel=1e-7)
        assert line["rho_low"] == ("" if r["rho_low"] is None else "0.05")


def test_tables_show_means_differences_and_costs_of_both_budgets_side_by_side(tmp_path):
    found, text = written(study(modes=("iterations", "compute"), rules=("sam",)), FACTS, tmp_path)
    table = next(t for t in found.tables if t[1][:2] == ["rule", "SAM in"])
    assert table[0] == ["", "equal iterations", "equal compute"]
    none, _, _, both = table[2:]
    values = [row("none", s)["accuracy"] for s in LUCK]
    half = stats.t.ppf(0.975, 4) * stats.sem(values)
    assert none[2] == f"{100 * sum(values) / 5:.1f} ± {100 * half:.1f} %"
    assert both[3].startswith("+5.0 ± ")
    assert both[5:9] == ["better", "400", "50", "305"]
    for cell in both:
        assert cell in text


def test_the_report_says_what_was_run_and_how(tmp_path):
    found, text = written(study(), FACTS, tmp_path)
    for said in (
        "metasam-ablate tasks=glyphs 'noise=[0,0.4]' & more", "rules: <two>", "metasam 0.1.0", "Seeds: 1, 2, 3, 4, 5.",
        "BatchNorm is transductive here.", "written before any test result was read", "iterations: 2.1 points",
        "over the 6 comparisons", "sam in both loops is better than no SAM: +5.0", "within one point", "72.0 ± 12.7 %",
    ):  # fmt: skip
        assert said in found.text
        assert said in text


def test_the_detectable_difference_as_realised(tmp_path):
    found, _ = written(study(rules=("sam",)), FACTS, tmp_path)
    table = next(t for t in found.tables if "sd of differences" in t[1])
    sd = 100 * 1.3 * stats.tstd(list(WOBBLE.values()))
    assert table[2][2] == f"{sd:.1f} points"
    # 1.682 sd by the power of a paired t-test with 5 pairs
    assert table[2][3] == f"{1.682 * sd:.1f} points"


def test_one_seed_has_no_tests_and_says_so(tmp_path, capsys):
    rows = study(rules=("sam",), seeds=[1])
    found, text = written(rows, {}, tmp_path)
    report.show(rows, {})
    assert "With one seed there are no intervals and no tests" in text
    assert "No record of a search" in text
    assert "not shown in 1 of 1" in capsys.readouterr().out
    assert "nan" not in found.text.replace(" ", "")
    assert {c.conclusion.verdict for c in report.analyse(rows, {}).comparisons} == {"not shown"}


def test_losses_are_better_when_lower_and_their_margin_is_relative(tmp_path):
    rows = study(rules=("sam",), quantity="loss")
    study_ = report.analyse(rows, {"margin": 0.02})
    found = {c.where: c for c in study_.comparisons}
    assert found["both"].conclusion.verdict == "worse"
    assert found["up"].conclusion.verdict == "better"
    base = sum(r["accuracy"] for r in rows if r["where"] == "none") / 5
    assert found["up"].margin == pytest.approx(0.02 * base)
    page_, _ = written(rows, {"margin": 0.02}, tmp_path)
    assert "lower is better" in page_.text
    assert "within 2% of the base's loss" in page_.text
    assert " points over " not in page_.text


def test_a_row_may_name_its_quantity():
    rows = [{k: v for k, v in {**r, "quantity": "loss", "loss": 2.0}.items() if k != "accuracy"} for r in study()]
    assert {r["result"] for r in report.analyse(rows, {}).rows} == {2.0}


@pytest.mark.parametrize("broken", [math.nan, None])
def test_a_diverged_run_is_reported_and_its_cell_not_judged(tmp_path, broken, pictures):
    rows = study(rules=("sam",))
    bad = next(r for r in rows if r["where"] == "both" and r["seed"] == 2)
    bad["accuracy"] = broken
    bad["curve"][5][2] = broken
    bad["peak_memory_mb"] = None
    both = next(c for c in report.analyse(rows, FACTS).comparisons if c.where == "both")
    assert both.conclusion.verdict == "not shown"
    assert math.isnan(both.adjusted)
    _, text = written(rows, FACTS, tmp_path)
    assert "1 of 20 runs have no finite result" in text
    assert "(4 of 5 runs)" in text
    assert [line["result"] for line in lines(tmp_path) if line["where"] == "both"][1] == "nan"


def test_cells_and_seeds_that_are_missing_are_named(tmp_path):
    rows = [r for r in study() if (r["where"], r["rule"]) != ("up", "asam")]
    rows = [r for r in rows if (r["where"], r["rule"], r["seed"]) != ("low", "sam", 3)]
    found = report.analyse(rows, FACTS)
    assert found.missing == [
        "outer loop, asam, equal iterations, no noise: no runs",
        "inner loop, sam, equal iterations, no noise: no seed 3",
    ]
    page_, _ = written(rows, FACTS, tmp_path)
    assert "no runs" in page_.text
    assert "4 to 5 seeds" in page_.text


def test_without_a_baseline_nothing_is_compared(tmp_path, capsys):
    rows = [r for r in study() if r["where"] != "none"]
    page_, _ = written(rows, FACTS, tmp_path)
    report.show(rows, FACTS)
    assert "nothing can be compared" in page_.text
    assert "nothing was compared" in capsys.readouterr().out


def test_baselines_alone(tmp_path, pictures):
    page_, _ = written([r for r in study() if r["where"] == "none"], {}, tmp_path)
    assert "nothing can be compared" in page_.text
    assert (tmp_path / f"curves-{report._slug((0.0, 'all'))}-iterations.png").exists()


def test_runs_that_agree_everywhere_are_equivalent():
    rows = [{**r, "accuracy": 0.7 + LUCK[r["seed"]]} for r in study()]
    assert {c.conclusion.verdict for c in report.analyse(rows, FACTS).comparisons} == {"equivalent"}


def test_budgets_that_are_not_equal_are_noticed(tmp_path):
    _, text = written(study(modes=("compute",)), FACTS, tmp_path)
    assert "Not quite equal compute: runs had from 100 to 400 gradient evaluations." in text


def test_results_adapted_without_sam_stand_beside_the_others(tmp_path):
    rows = [{**r, "plain_adapt": r["accuracy"] - 0.1, "validation": 0.75} for r in study(rules=("sam",))]
    found, text = written(rows, FACTS, tmp_path)
    table = next(t for t in found.tables if t[1][:2] == ["rule", "SAM in"])
    assert table[1][3] == "adapted without SAM"
    assert table[2][3].startswith("60.6 ± ")
    assert "adapted without" in text
    assert float(lines(tmp_path)[0]["plain_adapt"]) == pytest.approx(rows[0]["plain_adapt"])
    assert lines(tmp_path)[0]["validation"] == "0.75"


def test_radii_of_several_settings_and_tries_that_diverged(tmp_path):
    tuning = [
        {"noise": 0.4, "classes": 20, "where": "low", "rule": "sam", "rho": r, "validation": v, "chosen": r < 1}
        for r, v in {0.05: [0.5, 0.75], 5.0: [0.25, None]}.items()
    ]
    found, _ = written(study(rules=("sam",), settings=((0.0, "all"), (0.4, 20))), {"tuning": tuning}, tmp_path)
    table = next(t for t in found.tables if t[0][-2:] == ["seeds", ""])
    assert table[1][:4] == ["sam", "inner loop", "noise 0.4, 20 training classes", "0.05"]
    assert table[1][4].startswith("62.5 ±")
    assert table[1][-1] == "chosen"
    assert table[2][3:] == ["5", "not finite", "2", ""]


@pytest.mark.parametrize("number", [4, 5])
def test_a_long_plan_is_summed_up(tmp_path, number):
    plan = {"detectable": {f"cell {i}": 0.01 * i for i in range(1, number + 1)} | {"one seed": math.nan}}
    found, _ = written(study(rules=("sam",)), {"plan": plan}, tmp_path)
    assert ("as planned: 1.0 to 5.0 points" in found.text) == (number > 4)
    assert "cell 4: 4.0 points" in found.text
    assert "one seed" not in found.text
    assert "no record that the plan" in found.text


def test_pictures_that_lack_data_are_left_out(tmp_path, pictures):
    rows = [{**r, "curve": [], "congruence": [], "sharpness": {}} for r in study()]
    page_, text = written(rows, FACTS, tmp_path)
    assert [f.name for f in tmp_path.glob("*.png")] == ["forest.png"]
    assert len(page_.images) == 1
    assert "Sharpness" not in text
    assert "Congruence" not in text


def test_without_matplotlib_there_is_a_report_without_pictures(tmp_path):
    page_, _ = written(study(rules=("sam",)), FACTS, tmp_path)
    assert page_.images == []
    assert not list(tmp_path.glob("*.png"))


def test_the_table_on_the_terminal(capsys):
    report.show(study(modes=("iterations", "compute")), FACTS)
    out = capsys.readouterr().out
    assert "equal iterations: 5 seeds" in out
    assert "equal compute: 5 seeds" in out
    assert "better" in out
    assert "Equal iterations: against no SAM, in 6 comparisons: inner loop equivalent in 2 of 2" in out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"where": "middle"}, "expected where to be one of none, low, up, both, got 'middle'"),
        ({"mode": "time"}, "expected mode to be one of iterations, compute, got 'time'"),
        ({"quantity": "error"}, "expected quantity to be one of accuracy, loss"),
        ({"quantity": "loss"}, "expected runs of one quantity, got accuracy and loss"),
        ({"seed": 2}, "two of seed 2 of no SAM"),
        ({"n": 5}, "evaluate them on the same test_tasks"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, says):
    rows = study()
    rows[0] = {**rows[0], **change}
    with pytest.raises(ValueError, match=re.escape(says)):
        report.analyse(rows, FACTS)


def test_rows_that_lack_a_key_or_no_rows_are_refused():
    with pytest.raises(ValueError, match="got one without seed"):
        report.analyse([{k: v for k, v in study()[0].items() if k != "seed"}], FACTS)
    with pytest.raises(ValueError, match="got none"):
        report.analyse([], FACTS)


def test_bands_are_over_the_points_that_all_seeds_have():
    found = figures.band([[(1, 0.1), (2, 0.2), (3, 0.5)], [(1, 0.3), (2, math.nan), (3, 0.7)]])
    assert [x for x, _, _ in found] == [1, 3]
    assert found[1][1] == pytest.approx(0.6)
    assert found[1][2] == pytest.approx(stats.t.ppf(0.975, 1) * 0.1)
    assert figures.band([]) == []


def test_nothing_to_draw(tmp_path, pictures):
    assert not figures.forest({"a": {"b": figures.Panel([])}}, tmp_path / "a.png", "accuracy")
    assert not figures.dots({}, tmp_path / "a.png", "x")
    assert not figures.curves({"sam": {"low": []}}, tmp_path / "a.png", "x", "y")
    assert not list(tmp_path.iterdir())


def test_renderings_escape_what_they_are_given(tmp_path):
    blocks = [
        Text("a < b & <script>"),
        Grid([("", "x|y"), ("", "z")], [["<td>", "1|2"]]),
        Folded("more <b>", [Code("<i>")]),
    ]
    found = Page(page("<title>", blocks, tmp_path))
    assert "script" not in found.tags
    assert found.tables == [[["x|y", "z"], ["<td>", "1|2"]]]
    assert "a < b & <script>" in found.text
    assert r"| <td> | 1\|2 |" in markdown("t", blocks)
