"""What finished cells of an ablation say: `write` a report with tables and pictures, `show` it on the terminal.

A row is one run: where SAM acts (none, low: the inner loop, up: the outer loop, both), its rule, its budget (equal
"iterations" or equal "compute"), the setting (label noise, training classes), its seed, and what came out. Runs of one
setting, budget and seed have the same test tasks, so differences are paired by seed.

Every comparison with no SAM is one family for the adjustment of p values, over the whole study; those of places with
each other are a second family.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from metasam.checkpoint import write_text
from metasam.scripts.document import Block, Bullets, Code, Folded, Grid, Heading, Picture, Text, markdown, page
from metasam.scripts.tables import table, value
from metasam.training.figures import PLACES, Band, Mark, Panel, band, curves, dots, forest
from metasam.training.statistics import Conclusion, Paired, amount, conclusion, detectable, holm, interval, paired
from metasam.training.statistics import span as margin_in_words
from metasam.training.statistics import summary as summarize

Row = dict[str, Any]
Setting = tuple[Any, Any]
"""Noise and classes."""

BUDGETS = {"iterations": "equal iterations", "compute": "equal compute"}
SHARPNESS = {
    "meta_average": "meta-weights, average",
    "meta_worst": "meta-weights, worst case",
    "adapted_average": "adapted weights, average",
    "adapted_worst": "adapted weights, worst case",
}
BETWEEN = (("low", "up"), ("both", "low"), ("both", "up"))
NEEDED = ("where", "rule", "mode", "noise", "classes", "seed", "quantity")
COSTS = ("gradient_evaluations", "iterations", "seconds", "peak_memory_mb")
OTHERS = ("plain_adapt", "validation")
COLUMNS = (*NEEDED[:-1], "rho_low", "rho_up", "quantity", "result", *OTHERS, "n", *COSTS, *SHARPNESS)
"""Of results.csv."""


@dataclass(frozen=True)
class Comparison:
    """Two cells of one setting, budget and rule, by seed."""

    setting: Setting
    mode: str
    rule: str
    where: str
    base: str
    difference: Paired
    margin: float
    adjusted: float
    conclusion: Conclusion


@dataclass(frozen=True)
class Study:
    """Rows put in order, and every comparison among them."""

    rows: list[Row]
    quantity: str
    settings: list[Setting]
    modes: list[str]
    rules: list[str]
    cells: dict[tuple[Setting, str, str, str], list[Row]]
    """By setting, budget, rule ("" where there is no SAM) and place."""
    comparisons: list[Comparison]
    """With no SAM."""
    between: list[Comparison]
    """Of places with each other."""
    missing: list[str] = field(default_factory=list)
    """Cells that other cells would lead one to expect, and seeds that they lack."""


def analyse(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Study:
    """Group the runs and compare them.

    The margin of ``facts`` is absolute for accuracy (default 0.01); for loss it is a fraction of the loss without SAM.

    Raises:
        ValueError: a row lacks a key, two rows are the same run, or rows do not belong in one study.
    """
    if not rows:
        raise ValueError("expected finished runs, got none: run the study first")
    runs = [_checked(row) for row in rows]
    quantities = sorted({run["quantity"] for run in runs})
    if len(quantities) > 1:
        raise ValueError(f"expected runs of one quantity, got {' and '.join(quantities)}")
    cells: dict[tuple[Setting, str, str, str], list[Row]] = defaultdict(list)
    for run in runs:
        key = (run["noise"], run["classes"]), run["mode"], run["rule"] if run["where"] != "none" else "", run["where"]
        if any(other["seed"] == run["seed"] for other in cells[key]):
            raise ValueError(f"expected one run a seed, got two of seed {run['seed']} of {_cell_name(key)}")
        cells[key].append(run)
    settings = sorted({key[0] for key in cells}, key=lambda s: (s[0], s[1] != "all", str(s[1]).zfill(9)))
    modes = [m for m in BUDGETS if any(key[1] == m for key in cells)]
    rules = list(dict.fromkeys(run["rule"] for run in runs if run["where"] != "none"))
    places = [w for w in PLACES if w != "none" and any(run["where"] == w for run in runs)]
    expected = [
        (s, m, r, w)
        for s in settings
        for m in modes
        for r, w in [("", "none"), *((r, w) for r in rules for w in places)]
    ]
    cells = {key: sorted(cells[key], key=lambda run: run["seed"]) for key in expected if key in cells}
    seeds = {run["seed"] for run in runs}
    missing = [f"{_cell_name(key)}: no runs" for key in expected if key not in cells]
    missing += [
        f"{_cell_name(key)}: no seed {', '.join(map(str, sorted(lacks)))}"
        for key, group in cells.items()
        if (lacks := seeds - {run["seed"] for run in group})
    ]
    margin = float(facts.get("margin", 0.01))
    quantity = quantities[0]
    to_none = [(key, (*key[:2], "", "none")) for key in cells if key[3] != "none" and (*key[:2], "", "none") in cells]
    between = [
        ((s, m, r, a), (s, m, r, b))
        for s in settings
        for m in modes
        for r in rules
        for a, b in BETWEEN
        if (s, m, r, a) in cells and (s, m, r, b) in cells
    ]
    return Study(
        [run for group in cells.values() for run in group],
        quantity,
        settings,
        modes,
        rules,
        cells,
        _family(cells, to_none, margin, quantity),
        _family(cells, between, margin, quantity),
        missing,
    )


def _checked(row: Mapping[str, Any]) -> Row:
    lacks = [k for k in NEEDED if k not in row]
    if lacks:
        raise ValueError(f"expected a run with {', '.join(NEEDED)}, got one without {', '.join(lacks)}")
    for key, known in {"where": PLACES, "mode": BUDGETS, "quantity": ("accuracy", "loss")}.items():
        if row[key] not in known:
            raise ValueError(f"expected {key} to be one of {', '.join(known)}, got {row[key]!r}")
    result = row[row["quantity"]] if row["quantity"] in row else row.get("accuracy")
    run = {**row, "result": _number(result)}
    run.update({k: _number(row.get(k)) for k in (*COSTS, *OTHERS)})
    run["sharpness"] = {k: _number(v) for k, v in (row.get("sharpness") or {}).items()}
    return run


def _number(found: Any) -> float:
    return math.nan if found is None else float(found)


def _family(
    cells: Mapping[tuple[Setting, str, str, str], Sequence[Row]],
    pairs: Sequence[tuple[tuple[Setting, str, str, str], tuple[Setting, str, str, str]]],
    margin: float,
    quantity: str,
) -> list[Comparison]:
    differences = []
    for key, base in pairs:
        ns = {(run["seed"], run.get("n")) for k in (key, base) for run in cells[k]}
        if len(ns) > len({seed for seed, _ in ns}):
            raise ValueError(
                f"{_cell_name(key)} and {_cell_name(base)} cannot be paired: "
                "they were tested on different numbers of tasks; evaluate them on the same test_tasks"
            )
        differences.append(paired(*({run["seed"]: run["result"] for run in cells[k]} for k in (key, base))))
    # what a selection of the seeds would show is not tested
    adjusted = holm([math.nan if d.lost else d.p for d in differences])
    tests = sum(not math.isnan(p) for p in adjusted)
    found = []
    for (key, base), difference, p in zip(pairs, differences, adjusted, strict=True):
        setting, mode, rule, where = key
        width = margin
        finite = [run["result"] for run in cells[base] if math.isfinite(run["result"])]
        if quantity == "loss" and any(finite):
            width *= abs(fmean(finite))
        said = conclusion(
            f"{rule} in the {PLACES[where]}" if where != "both" else f"{rule} in both loops",
            difference,
            p,
            base=PLACES[base[3]],
            margin=width,
            quantity=quantity,
            tests=tests,
        )
        found.append(Comparison(setting, mode, rule, where, base[3], difference, width, p, said))
    return found


def _cell_name(key: tuple[Setting, str, str, str]) -> str:
    setting, mode, rule, where = key
    return f"{PLACES[where]}{f', {rule}' if rule else ''}, {BUDGETS[mode]}, {setting_name(setting)}"


def setting_name(setting: Setting) -> str:
    """A setting in words.

    >>> setting_name((0.4, 20)), setting_name((0.0, "all"))
    ('noise 0.4, 20 training classes', 'no noise')
    """
    noise, classes = setting
    return (f"noise {noise:g}" if noise else "no noise") + (f", {classes} training classes" if classes != "all" else "")


def _slug(setting: Setting) -> str:
    return f"noise-{setting[0]:g}-classes-{setting[1]}"


def headlines(study: Study) -> list[str]:
    """What the whole study shows, a sentence a budget."""
    sentences = []
    for m in study.modes:
        by_place = {
            PLACES[w]: [c.conclusion for c in study.comparisons if (c.where, c.mode) == (w, m)]
            for w in PLACES
            if w != "none"
        }
        said = summarize(by_place)
        sentences.append(f"{BUDGETS[m].capitalize()}: {said[0].lower()}{said[1:]}")
    return sentences


def write(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], folder: Path) -> None:
    """Write results.csv, comparisons.csv, report.md, report.html and the pictures.

    Args:
        rows: one a run: where, rule, mode, noise, classes, seed, quantity, accuracy (the result, whatever the quantity
            is) or the quantity by its name; and where known rho_low, rho_up, n, gradient_evaluations, iterations,
            seconds, peak_memory_mb, validation, plain_adapt (the result when adapted without SAM),
            curve ([[evaluations, iteration, validation result], ...]), congruence ([[iteration, cosine], ...]),
            sharpness (meta_average, meta_worst, adapted_average, adapted_worst).
        facts: where known command, tasks, margin, plan (detectable, written_before_test, grid), tuning (where, rule,
            rho, validation, chosen, and noise and classes), versions, device, transductive (a sentence to pass on)
            and notes (several).
        folder: to write to; made if it is not there.

    Raises:
        ValueError: see `analyse`.
    """
    study = analyse(rows, facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.csv", _csv(COLUMNS, [_flat(run) for run in study.rows]))
    write_text(folder / "comparisons.csv", _comparisons_csv(study))
    blocks = _report(study, facts, folder)
    title = f"SAM in the inner loop, the outer loop, or both: {facts.get('tasks', 'tasks')}"
    write_text(folder / "report.md", markdown(title, blocks))
    write_text(folder / "report.html", page(title, blocks, folder))


def show(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Print the tables and what they come to.

    Raises:
        ValueError: see `analyse`.
    """
    study = analyse(rows, facts)
    for setting in study.settings:
        for mode in study.modes:
            lines = [
                (PLACES[key[3]], key[2] or "-", *_results(study, key))
                for key in study.cells
                if key[:2] == (setting, mode)
            ]
            columns = ("SAM in", "rule", *(name for name in _result_columns(study)))
            table(f"{setting_name(setting)}, {BUDGETS[mode]}: {_seeds(study)}", columns, lines)
    for line in headlines(study):
        print(line)
    for line in study.missing:
        print(f"missing: {line}")


def _report(study: Study, facts: Mapping[str, Any], folder: Path) -> list[Block]:
    q = study.quantity
    tests = sum(not math.isnan(c.adjusted) for c in study.comparisons)
    blocks: list[Block] = [
        *(Text(line, strong=True) for line in headlines(study)),
        Text(_how_to_read(study, facts, tests)),
    ]
    if caveats := _caveats(study, facts):
        blocks.append(Bullets(caveats))
    panels = {
        setting_name(s): {
            BUDGETS[m]: Panel(
                [
                    Mark(c.rule, c.where, c.difference.mean, c.difference.half, _is_claim(c))
                    for c in study.comparisons
                    if (c.setting, c.mode) == (s, m)
                ],
                next((c.margin for c in study.comparisons if (c.setting, c.mode) == (s, m)), 0.0),
            )
            for m in study.modes
        }
        for s in study.settings
    }
    if forest(panels, folder / "forest.png", q, "Difference to no SAM, paired by seed, with 95% intervals"):
        blocks.append(Picture("forest.png", "Every comparison with no SAM."))
    blocks.append(Heading("Results"))
    for setting in study.settings:
        blocks += _setting(study, setting)
    if study.between:
        blocks += _between(study)
    blocks += _power(study, facts, tests)
    blocks += _pictures(study, folder)
    blocks += _radii(study, facts)
    blocks += _what_was_run(study, facts)
    blocks.append(
        Folded(
            "Every run",
            [Grid([("", c) for c in COLUMNS], [list(_flat(run).values()) for run in study.rows])],
            "results.csv",
        )
    )
    return blocks


def _how_to_read(study: Study, facts: Mapping[str, Any], tests: int) -> str:
    margin = float(facts.get("margin", 0.01))
    within = (
        margin_in_words(margin, "accuracy") if study.quantity == "accuracy" else f"{100 * margin:g}% of the base's loss"
    )
    if not tests:
        return "No comparison could be tested: intervals and tests need two seeds or more of both sides."
    return (
        f"Better and worse: p < 0.05 in a t-test paired by seed, Holm-adjusted over the {tests} comparisons with no "
        f"SAM. Equivalent: the whole 95% interval of the difference lies within {within}. Not shown: neither, which is "
        "no evidence that there is no difference. Intervals are 95% t-intervals over seeds, each for itself: they are "
        "not adjusted for their number."
    )


def _caveats(study: Study, facts: Mapping[str, Any]) -> list[str]:
    found = []
    most = max((c.difference.seeds for c in study.comparisons), default=0)
    if not study.comparisons:
        found.append("No setting has both runs without SAM and runs with it: nothing can be compared.")
    elif most < 2:
        found.append("With one seed there are no intervals and no tests: the numbers describe these runs alone.")
    elif most < 5:
        found.append(f"With {most} seeds, intervals are wide and rest on the differences being about normal.")
    if study.quantity == "loss":
        found.append("Results are losses: lower is better, and a negative difference is an improvement.")
    if len(study.modes) == 1:
        other = next(BUDGETS[m] for m in BUDGETS if m not in study.modes)
        found.append(f"Every run had {BUDGETS[study.modes[0]]}; nothing is said about {other}.")
    diverged = [run for run in study.rows if not math.isfinite(run["result"])]
    if diverged:
        found.append(
            f"{len(diverged)} of {len(study.rows)} runs have no finite result; means leave them out, and comparisons "
            "with them are not made."
        )
    for mode, cost in (("iterations", "iterations"), ("compute", "gradient_evaluations")):
        spent = [run[cost] for run in study.rows if run["mode"] == mode and math.isfinite(run[cost])]
        if spent and max(spent) > 1.02 * min(spent):
            found.append(
                f"Not quite {BUDGETS[mode]}: runs had from {min(spent):.0f} to {max(spent):.0f} "
                f"{cost.replace('_', ' ')}."
            )
    if study.missing:
        found.append(f"Missing: {'; '.join(study.missing)}.")
    if facts.get("transductive"):
        found.append(facts["transductive"])
    if _has_plain(study):
        found.append(
            "Runs with SAM in the inner loop adapt to test tasks with it; beside that stands the result of the same "
            "weights adapted without."
        )
    return found + list(facts.get("notes", ()))


def _is_claim(c: Comparison) -> bool:
    return c.conclusion.verdict in ("better", "worse")


def _seeds(study: Study) -> str:
    counts = sorted({len(group) for group in study.cells.values()})
    text = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{text} seed{'' if text == '1' else 's'}"


def _all_seeds(study: Study) -> list[Any]:
    return sorted({run["seed"] for run in study.rows})


def _result_columns(study: Study) -> tuple[str, ...]:
    plain = ("adapted without SAM",) if _has_plain(study) else ()
    return study.quantity, *plain, "minus no SAM", "adjusted p", "conclusion", "evaluations", "seconds", "MB"


def _has_plain(study: Study) -> bool:
    return any(math.isfinite(run["plain_adapt"]) for run in study.rows)


def _results(study: Study, key: tuple[Setting, str, str, str]) -> tuple[str, ...]:
    """Cells of a table under `_result_columns`."""
    group = study.cells.get(key)
    if group is None:
        return ("no runs", *[""] * (len(_result_columns(study)) - 1))
    finite = [run["result"] for run in group if math.isfinite(run["result"])]
    result = _value(*interval(finite), study.quantity) if finite else "not finite"
    if finite and len(finite) < len(group):
        result += f" ({len(finite)} of {len(group)} runs)"
    c = next((c for c in study.comparisons if (c.setting, c.mode, c.rule, c.where) == key), None)
    memory = [run["peak_memory_mb"] for run in group if math.isfinite(run["peak_memory_mb"])]
    plain = [run["plain_adapt"] for run in group if math.isfinite(run["plain_adapt"])]
    return (
        result,
        *([_value(*interval(plain), study.quantity) if plain else ""] if _has_plain(study) else []),
        *(_said(c, study.quantity) if c else ("", "", "baseline" if key[3] == "none" else "")),
        _mean(run["gradient_evaluations"] for run in group),
        _mean(run["seconds"] for run in group),
        f"{max(memory):.0f}" if memory else "",
    )


def _said(c: Comparison, quantity: str) -> tuple[str, str, str]:
    d = c.difference
    return (
        _value(d.mean, d.half, quantity, sign=True) if d.seeds else "",
        "" if math.isnan(c.adjusted) else "< 0.001" if c.adjusted < 0.001 else f"{c.adjusted:.3f}",
        c.conclusion.verdict,
    )


def _value(mean: float, half: float, quantity: str, *, sign: bool = False) -> str:
    return value(mean, None if math.isnan(half) else half, quantity, sign=sign)


def _mean(values: Any) -> str:
    finite = [v for v in values if math.isfinite(v)]
    return f"{fmean(finite):.0f}" if finite else ""


def _setting(study: Study, setting: Setting) -> list[Block]:
    labels = [("", w) for w in PLACES if w == "none"] + [
        (r, w) for r in study.rules for w in PLACES if w != "none" and any(key[2:] == (r, w) for key in study.cells)
    ]
    names = _result_columns(study)
    rows = []
    for rule, where in labels:
        row = [rule or "-", PLACES[where]]
        for mode in study.modes:
            row += _results(study, (setting, mode, rule, where))
        rows.append(row)
    columns = [("", "rule"), ("", "SAM in"), *((BUDGETS[m], name) for m in study.modes for name in names)]
    blocks: list[Block] = [
        Heading(setting_name(setting).capitalize(), 3),
        Text(f"{_seeds(study)} a cell{': mean and 95% interval over seeds' if len(_all_seeds(study)) > 1 else ''}."),
        Grid(columns, rows),
    ]
    said: dict[bool, list[str]] = {True: [], False: []}
    for c in study.comparisons:
        if c.setting == setting:
            said[c.conclusion.verdict != "not shown"].append(f"{BUDGETS[c.mode].capitalize()}: {c.conclusion.sentence}")
    if said[True]:
        blocks += [Text("What can be concluded:"), Bullets(said[True])]
    elif said[False]:
        blocks.append(Text("No difference and no equivalence is shown in this setting."))
    if said[False]:
        blocks.append(Folded(f"What cannot be concluded ({len(said[False])})", [Bullets(said[False])]))
    return blocks


def _between(study: Study) -> list[Block]:
    many = len(study.settings) > 1
    rows = [
        [
            c.rule,
            f"{PLACES[c.where]} minus {PLACES[c.base]}",
            *([setting_name(c.setting)] if many else []),
            BUDGETS[c.mode],
            *_said(c, study.quantity),
        ]
        for c in study.between
    ]
    columns = ["rule", "places", *(["setting"] if many else []), "budget", "difference", "adjusted p", "conclusion"]
    return [
        Heading("One place against another"),
        Text(
            "That one place is better than no SAM and another is not shown to be does not make it the better place: "
            f"these {len(rows)} comparisons ask directly, with p values adjusted among themselves. The "
            "conclusion is about the first of the two."
        ),
        Grid([("", c) for c in columns], rows, left=4 if many else 3),
    ]


def _power(study: Study, facts: Mapping[str, Any], tests: int) -> list[Block]:
    plan = facts.get("plan") or {}
    blocks: list[Block] = [Heading("What could have been seen")]
    if plan:
        blocks.append(
            Text(
                "The plan was written before any test result was read."
                if plan.get("written_before_test")
                else "There is no record that the plan was written before test results were read."
            )
        )
    planned = [(k, v) for k, v in _flatten(plan.get("detectable")) if not isinstance(v, float) or math.isfinite(v)]
    numbers = [v for _, v in planned if isinstance(v, float)]
    if planned:
        listed = Bullets(
            [
                (f"{k}: " if k else "") + (amount(v, study.quantity, sign=False) if isinstance(v, float) else str(v))
                for k, v in planned
            ]
        )
        said = "Smallest detectable difference, as planned"
        if len(numbers) == len(planned) > 4:
            blocks.append(Text(f"{said}: {_range(numbers, study.quantity)}."))
            blocks.append(Folded(f"Planned, by comparison ({len(planned)})", [listed]))
        else:
            blocks += [Text(f"{said}:"), listed]
    rows = []
    for s in study.settings:
        for m in study.modes:
            sds = [
                (c.difference.sd, c.difference.seeds)
                for c in study.comparisons
                if (c.setting, c.mode) == (s, m) and c.difference.seeds > 1
            ]
            if sds:
                rows.append(
                    [
                        setting_name(s),
                        BUDGETS[m],
                        _range([sd for sd, _ in sds], study.quantity),
                        _range([detectable(sd, n) for sd, n in sds], study.quantity),
                        _range([detectable(sd, n, alpha=0.05 / max(1, tests)) for sd, n in sds], study.quantity),
                    ]
                )
    if rows:
        blocks += [
            Text(
                "As realised, from the differences between seeds: the smallest true difference that a test finds with "
                f"80% power, least to most over comparisons; alone, and as the strictest of {tests} under adjustment."
            ),
            Grid(
                [
                    ("", "setting"),
                    ("", "budget"),
                    ("", "sd of differences"),
                    ("detectable", "one test"),
                    ("detectable", f"of {tests} tests"),
                ],
                rows,
            ),
        ]
    else:
        blocks.append(Text("No cell has two seeds: what could have been seen is not known."))
    return blocks


def _range(values: Sequence[float], quantity: str) -> str:
    low, high = (amount(v, quantity, sign=False) for v in (min(values), max(values)))
    return low if low == high else f"{low.removesuffix(' points')} to {high}"


def _flatten(found: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(found, Mapping):
        return [pair for k, v in found.items() for pair in _flatten(v, f"{name}, {k}" if name else str(k))]
    return [] if found is None else [(name, found)]


def _pictures(study: Study, folder: Path) -> list[Block]:
    q, percent = study.quantity, study.quantity == "accuracy"
    label = f"validation {q}{', %' if percent else ''}"
    sections: list[tuple[str, list[Block]]] = []

    def every(draw: Callable[[Setting, str, str], tuple[str, bool]], stem: str, modes: Sequence[str]) -> list[Block]:
        found: list[Block] = []
        for s in study.settings:
            for m in modes:
                file = f"{stem}-{_slug(s)}-{m}.png"
                caption, drawn = draw(s, m, file)
                if drawn:
                    found.append(Picture(file, caption))
        return found

    def learning(s: Setting, m: str, file: str) -> tuple[str, bool]:
        caption = f"{setting_name(s).capitalize()}, {BUDGETS[m]}."
        lines = _lines(study, s, m, lambda run: [(p[1], p[2]) for p in run.get("curve") or ()])
        return caption, curves(lines, folder / file, "iteration", label, caption[:-1], percent=percent, settled=True)

    def compute(s: Setting, m: str, file: str) -> tuple[str, bool]:
        caption = f"{setting_name(s).capitalize()}, {BUDGETS[m]}."
        lines = _lines(study, s, m, lambda run: [(p[1], p[2]) for p in run.get("curve") or ()], spent=True)
        return caption, curves(
            lines, folder / file, "gradient evaluations", label, caption[:-1], percent=percent, settled=True
        )

    def congruence(s: Setting, m: str, file: str) -> tuple[str, bool]:
        caption = f"{setting_name(s).capitalize()}, {BUDGETS[m]}."
        lines = _lines(study, s, m, lambda run: [tuple(p) for p in run.get("congruence") or ()])
        return caption, curves(lines, folder / file, "iteration", "cosine", caption[:-1])

    def sharpness(s: Setting, m: str, file: str) -> tuple[str, bool]:
        caption = f"{setting_name(s).capitalize()}, {BUDGETS[m]}."
        panels = {
            name: Panel(
                [
                    Mark(key[2], key[3], *interval(values))
                    for key, group in study.cells.items()
                    if key[:2] == (s, m)
                    and (values := [v for r in group if math.isfinite(v := r["sharpness"].get(kind, math.nan))])
                ]
            )
            for kind, name in SHARPNESS.items()
        }
        return caption, dots({k: p for k, p in panels.items() if p.marks}, folder / file, "sharpness", caption[:-1])

    bands = "One seed."
    if len(_all_seeds(study)) > 1:
        bands = "Mean over seeds with 95% interval, at the points that every seed has."
    start = "The steep start runs out of the picture."
    sections = [
        (f"Learning curves. {bands} {start}", every(learning, "curves", study.modes[:1])),
        (f"{q.capitalize()} against compute. {bands} {start}", every(compute, "compute", study.modes[-1:])),
        (
            "Sharpness of the solutions. Of the meta-loss on training tasks around the meta-weights, and of the query "
            "loss around weights adapted to held-out tasks. Lower is flatter; with 95% intervals over several seeds.",
            every(sharpness, "sharpness", study.modes),
        ),
        (f"Congruence of training and validation gradients. {bands}", every(congruence, "congruence", study.modes[:1])),
    ]
    blocks: list[Block] = []
    for text, pictures in sections:
        if pictures:
            name, _, about = text.partition(". ")
            blocks += [Heading(name), Text(about), *pictures]
    return blocks


def _lines(
    study: Study, setting: Setting, mode: str, points: Callable[[Row], list[Any]], *, spent: bool = False
) -> dict[str, dict[str, Band]]:
    """By rule and place the curves over seeds, against iterations, or if ``spent`` against their mean evaluations.

    What has no SAM is in every panel.
    """
    found: dict[str, dict[str, Band]] = {}
    for rule in study.rules or [""]:
        lines = {}
        for where in PLACES:
            group = study.cells.get((setting, mode, rule if where != "none" else "", where), [])
            curve = band([p for run in group if (p := points(run))])
            if spent:
                at = defaultdict(list)
                for run in group:
                    for evaluations, iteration, _ in run.get("curve") or ():
                        at[iteration].append(evaluations)
                curve = [(fmean(at[x]), mean, half) for x, mean, half in curve]
            if curve:
                lines[where] = curve
        if any(where != "none" for where in lines) or not study.rules:
            found[rule] = lines
    return found


def _radii(study: Study, facts: Mapping[str, Any]) -> list[Block]:
    many = len(study.settings) > 1
    used = dict.fromkeys(
        (
            run["rule"],
            PLACES[run["where"]],
            *([setting_name((run["noise"], run["classes"]))] if many else []),
            _text(run.get("rho_low")),
            _text(run.get("rho_up")),
        )
        for run in study.rows
        if run["where"] != "none"
    )
    setting = ["setting"] if many else []
    blocks: list[Block] = []
    if used:
        names = ["rule", "SAM in", *setting, "rho, inner loop", "rho, outer loop"]
        blocks = [Heading("Radii"), Grid([("", n) for n in names], [list(u) for u in used], left=len(names) - 2)]
    tuning = facts.get("tuning") or []
    if tuning:
        rows = []
        for t in tuning:
            values = [_number(v) for v in t["validation"]]
            fine = all(map(math.isfinite, values))
            rows.append(
                [
                    t["rule"],
                    PLACES.get(t["where"], t["where"]),
                    *([setting_name((t["noise"], t["classes"])) if "noise" in t else ""] if many else []),
                    _text(t["rho"]),
                    _value(*interval(values), study.quantity) if fine else "not finite",
                    str(len(values)),
                    "chosen" if t["chosen"] else "",
                ]
            )
        names = ["rule", "SAM in", *setting, "rho", f"validation {study.quantity}", "seeds", ""]
        blocks += [
            Text("Chosen by validation:"),
            Folded(f"Every radius that was tried ({len(rows)})", [Grid([("", n) for n in names], rows, left=2 + many)]),
        ]
    elif used:
        blocks.append(Text("No record of a search: these radii were given."))
    return blocks


def _what_was_run(study: Study, facts: Mapping[str, Any]) -> list[Block]:
    seeds = _all_seeds(study)
    ns = sorted({run["n"] for run in study.rows if run.get("n")})
    facts_of = [
        f"Tasks: {facts.get('tasks', 'not recorded')}.",
        f"Seeds: {', '.join(map(str, seeds))}.",
        f"Runs: {len(study.rows)}; results are means over {', '.join(map(str, ns)) or 'an unrecorded number of'} "
        "test tasks each.",
    ]
    grid = (facts.get("plan") or {}).get("grid")
    if grid:
        facts_of.append(f"Planned grid: {'; '.join(map(str, grid))}.")
    if facts.get("device"):
        facts_of.append(f"Device: {facts['device']}.")
    if facts.get("versions"):
        facts_of.append("Versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()) + ".")
    blocks: list[Block] = [Heading("What was run"), Bullets(facts_of)]
    if facts.get("command"):
        blocks.append(Code(str(facts["command"])))
    return blocks


def _text(found: Any) -> str:
    """A value of results.csv: numbers with eight digits, nothing where there is none."""
    if found is None or (isinstance(found, float) and math.isnan(found)):
        return ""
    if isinstance(found, float):
        return f"{found:.8g}"
    return str(found)


def _flat(run: Row) -> dict[str, str]:
    """A run as a line of results.csv; a result that is not a number says so."""
    run = {**run, "result": "nan" if math.isnan(run["result"]) else run["result"]}
    return {c: _text(run["sharpness"].get(c) if c in SHARPNESS else run.get(c)) for c in COLUMNS}


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _comparisons_csv(study: Study) -> str:
    rows = []
    for c in [*study.comparisons, *study.between]:
        d = c.difference
        rows.append(
            {
                "noise": _text(c.setting[0]),
                "classes": _text(c.setting[1]),
                "mode": c.mode,
                "rule": c.rule,
                "where": c.where,
                "minus": c.base,
                "difference": _text(d.mean),
                "ci95": _text(d.half),
                "sd": _text(d.sd),
                "seeds": _text(d.seeds),
                "not_finite": _text(d.lost),
                "p": _text(d.p),
                "adjusted_p": _text(c.adjusted),
                "margin": _text(c.margin),
                "conclusion": c.conclusion.verdict,
            }
        )
    names = (
        "noise", "classes", "mode", "rule", "where", "minus", "difference", "ci95", "sd", "seeds", "not_finite", "p",
        "adjusted_p", "margin", "conclusion",
    )  # fmt: skip
    return _csv(names, rows)
