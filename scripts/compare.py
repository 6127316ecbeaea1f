"""Rules against each other at equal compute: the command ``metasam-compare``; its keys are in ``configs/compare.yaml``.

Each rule gets its own radius, chosen by validation accuracy from a grid of multiples of its default, with seeds that
are not used again; then all run with the same seeds, and the test set is looked at once.
"""

from __future__ import annotations

import csv
import hashlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig

from metasam.configure import Config, did_you_mean
from metasam.scripts import command, study, tables
from metasam.training import assemble, metrics, plots
from metasam.training.folder import alone, make, write_json
from metasam.training.statistics import interval
from metasam.training.trainer import Interrupted

OWN = ("rules", "seeds", "to", "grid", "tune_seeds", "workers", "study")
"""Keys of a comparison; the others are those of each of its runs."""

SHARED = (
    *OWN, "seed", "iterations", "epochs", "batch_size", "test_tasks", "split", "run", "resume", "dry_run", "tasks",
    "tasks.root", "tasks.path", "tasks.test", "tasks.validation", "tasks.split_seed", "ways", "shots", "queries",
    "tasks_per_batch",
)  # fmt: skip
"""Keys that all entries of ``rules`` have alike: the cost of a step, how many there are, what they are judged on."""

Results = dict[str, Any]


class Rival(NamedTuple):
    """A rule that is compared, with the config of its runs."""

    label: str
    config: Config
    default: float | None
    """The radius it has if it is not tuned; None: it has none."""
    radius: float | None
    """What the grid multiplies; None: nothing to tune."""


def run(config: Config) -> None:
    """Tune, train, tabulate and draw."""
    if config["dry_run"]:
        raise ValueError(
            "dry_run=true is of metasam-train and metasam-ablate: leave it out, or try one rule with those"
        )
    own = {k: config[k] for k in OWN}
    task = command.choice("tasks")
    folder = Path(own["study"] or Path("studies") / _name(task, own["rules"]))
    words = [o for o in HydraConfig.get().overrides.task if o.partition("=")[0].lstrip("+") not in OWN]
    rivals = [_rival(entry, words, task) for entry in own["rules"]]
    if own["to"] not in [r.label for r in rivals]:
        raise ValueError(f"expected to= one of rules, got to={own['to']}{did_you_mean(own['to'], own['rules'])}")
    for rival in rivals:  # what cannot be built is said before any of them runs
        assemble.build(rival.config)
    typed = command.command_line()
    make(folder)
    try:
        with alone(folder, "study"):
            radii = _tune(rivals, own, folder, typed)
            runs = _final(rivals, radii, own, folder, typed)
    except Interrupted as stop:
        raise command.Stop(f"{stop}; the same command goes on:\n  {typed}", status=130) from None
    rows = rows_of(rivals, radii, runs, own["to"])
    write(rows, radii, runs, own, typed, folder)
    show(rows, own["to"], config["budget"]["passes"])
    print(f"in {folder}")


def check(config: Config) -> None:
    """Raise ValueError unless the values of a config can work."""
    assemble.check({k: v for k, v in config.items() if k not in OWN})
    rules, grid = config["rules"], config["grid"]
    if not isinstance(rules, list) or not rules or not all(isinstance(r, str) and r for r in rules):
        raise ValueError(f"expected rules to be a list such as [plain,sam,asam], got rules={rules}")
    if len(set(map(study.slug, rules))) < len(rules):
        raise ValueError(f"expected every entry of rules once, with a folder name of its own, got rules={rules}")
    fits = isinstance(grid, list) and grid and all(isinstance(g, int | float) and 0 < g < math.inf for g in grid)
    if fits and len({f"{g:.4g}" for g in grid}) < len(grid):
        raise ValueError(f"expected every factor of grid once, to four digits, got grid={grid}")
    if grid is not None and not fits:
        raise ValueError(f"expected grid to be a list of factors above 0 such as [0.5,1,2], or null, got grid={grid}")
    for key in ("seeds", "tune_seeds", "workers"):
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < 1:
            raise ValueError(f"expected {key} to be a whole number of at least 1, got {key}={config[key]}")


def _rival(entry: str, words: Sequence[str], task: str) -> Rival:
    """A rule, or one with further keys: ``"agnostic rule.lookahead=false"``."""
    name, *more = shlex.split(entry)
    refuse_shared(entry, more)
    try:
        composed = hydra.compose("compare", [*words, f"rule={name}", *more])
    except Exception as error:
        raise ValueError(f"rules: cannot use {entry!r}: {' '.join(str(error).split())[:300]}") from error
    keys = command.plain_config(composed)
    config = {
        "name": task,
        "method": entry,
        **{k: v for k, v in keys.items() if k not in OWN},
        "run": None,
        "resume": False,
        "workers": "auto",
    }
    assemble.check(config)
    rule = config["rule"]
    given = [r for r in (config.get("rho"), config.get("rho_low"), config.get("rho_up")) if r is not None]
    default = rule.get("rho", rule.get("rho_val"))
    return Rival(entry, config, given[0] if given else default, None if given else default)


def refuse_shared(entry: str, words: Sequence[str]) -> None:
    """Raise ValueError if an entry of ``rules`` sets what has to be alike for all."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key in SHARED or key.startswith("budget"):
            raise ValueError(
                f"rules: {word} in {entry!r} would make it unlike the others: say it for all, outside rules"
            )


def _with_radius(config: Config, radius: float) -> Config:
    if config["variant"] is None:
        return {**config, "rho": radius}
    slots = {"low": ["rho_low"], "up": ["rho_up"], "both": ["rho_low", "rho_up"]}.get(config["variant"], [])
    return {**config, **dict.fromkeys(slots, radius)}


def _tune(rivals: Sequence[Rival], own: Config, folder: Path, typed: str) -> dict[str, list[Results]]:
    """What each radius of the grid gave, by rule; rules without a radius, or one that is given, are left out.

    Raises:
        ValueError: a run failed, other than by diverging; or a rule diverges with every radius.
    """
    tuned = [r for r in rivals if r.radius is not None and own["grid"]]
    tries = [
        (rival.label, rival.radius * factor, seed, rival.config)
        for rival in tuned
        for factor in own["grid"]
        for seed in range(study.FIRST_TUNING_SEED, study.FIRST_TUNING_SEED + own["tune_seeds"])
        if rival.radius is not None
    ]
    cells = [
        study.Cell(folder / "tuning" / study.slug(label) / f"rho{radius:.4g}-seed{seed}",
                   {**_with_radius(config, radius), "seed": seed, "split": "validation"})
        for label, radius, seed, config in tries
    ]  # fmt: skip
    results = study.run(cells, workers=own["workers"], title="tuning radii", command=typed)
    radii: dict[str, list[Results]] = {r.label: [] for r in tuned}
    for (label, radius, _, _), found in zip(tries, results, strict=True):
        rows = radii[label]
        if not rows or rows[-1]["rho"] != radius:
            rows.append({"rho": radius, "validation": []})
        rows[-1]["validation"].append(study.validation_of(found))
    for label, rows in radii.items():
        best = study.best_radius({row["rho"]: row["validation"] for row in rows}, label, own["grid"])
        for row in rows:
            row["chosen"] = row["rho"] == best
    return radii


def chosen(radii: dict[str, list[Results]], label: str) -> float | None:
    """The radius that a rule was tuned to, None if it was not tuned."""
    return next((row["rho"] for row in radii.get(label, []) if row["chosen"]), None)


def _final(
    rivals: Sequence[Rival], radii: dict[str, list[Results]], own: Config, folder: Path, typed: str
) -> dict[str, list[Results]]:
    """The runs that count, by rule, in order of their seeds."""
    cells = []
    for seed in range(1, own["seeds"] + 1):
        for rival in rivals:
            radius = chosen(radii, rival.label)
            config = rival.config if radius is None else _with_radius(rival.config, radius)
            cells.append(study.Cell(folder / study.slug(rival.label) / f"seed{seed}", {**config, "seed": seed}))
    results = study.run(cells, workers=own["workers"], title="runs", command=typed)
    for cell, found in zip(cells, results, strict=True):
        if isinstance(found, study.Failure):
            raise ValueError(f"{cell.folder}: {found.reason}; the runs that finished are kept")
    runs: dict[str, list[Results]] = {r.label: [] for r in rivals}
    for i, found in enumerate(results):
        assert not isinstance(found, study.Failure)
        runs[rivals[i % len(rivals)].label].append({**found, "folder": str(cells[i].folder)})
    return runs


def rows_of(
    rivals: Sequence[Rival], radii: dict[str, list[Results]], runs: dict[str, list[Results]], to: str
) -> list[Results]:
    """One row a rule: means over seeds with 95% t-intervals, differences to ``to`` paired by seed, and the cost."""
    quantity = "accuracy" if "accuracy" in runs[to][0] else "loss"
    rows = []
    for rival in rivals:
        group = runs[rival.label]
        tuned = chosen(radii, rival.label)
        row: Results = {"rule": rival.label, "rho": rival.default if tuned is None else tuned}
        row["edge"] = _at_edge(radii.get(rival.label, []))
        for name, key in (("", quantity), ("last_", f"{quantity}_last")):
            if key not in group[0]:
                continue
            row[f"{name}mean"], row[f"{name}ci95"] = interval([r[key] for r in group])
            pairs = zip(group, runs[to], strict=True)
            row[f"{name}difference"], row[f"{name}difference_ci95"] = interval([a[key] - b[key] for a, b in pairs])
        row |= {
            "seeds": len(group),
            "passes": fmean(r["gradient_evaluations"] for r in group),
            "steps": fmean(r["iterations"] for r in group),
            "seconds": fmean(r["seconds"] for r in group),
            "peak_memory_mb": max(r["peak_memory_mb"] or math.nan for r in group),
            "quantity": quantity,
            "over": group[0]["over"],
        }
        rows.append(row)
    return rows


def _at_edge(rows: Sequence[Results]) -> bool:
    """Whether the best radius is the smallest or largest of several: the grid may end too early."""
    ordered = sorted(rows, key=lambda row: row["rho"])
    return len(ordered) > 1 and (ordered[0]["chosen"] or ordered[-1]["chosen"])


def show(rows: Sequence[Results], to: str, budget: float | None) -> None:
    """Print the table."""
    quantity = rows[0]["quantity"]
    last = [n for n in ("last_",) if f"{n}mean" in rows[0]]

    def cell(row: Results, name: str) -> str:
        return tables.value(row[f"{name}mean"], _known(row[f"{name}ci95"]), quantity)

    def difference(row: Results, name: str) -> str:
        if row["rule"] == to:
            return ""
        return tables.value(row[f"{name}difference"], _known(row[f"{name}difference_ci95"]), quantity, sign=True)

    names = {"": f"{quantity}, best weights", "last_": "last weights"}
    columns = ["rule", "rho", *(c for n in ("", *last) for c in (names[n], f"minus {to}"))]
    tables.table(
        f"{rows[0]['over']}, {rows[0]['seeds']} seed{'s' * (rows[0]['seeds'] > 1)}, "
        f"{'equal iterations' if budget is None else f'{budget:g} gradient evaluations each'}; "
        "95% t-intervals over seeds, differences paired by seed; * best radius at the edge of the grid",
        [*columns, "evaluations", "steps", "seconds", "MB"],
        [
            [
                row["rule"],
                "-" if row["rho"] is None else f"{row['rho']:.3g}{'*' if row['edge'] else ''}",
                *(c for n in ("", *last) for c in (cell(row, n), difference(row, n))),
                f"{row['passes']:.0f}",
                f"{row['steps']:.0f}",
                f"{row['seconds']:.1f}",
                f"{row['peak_memory_mb']:.0f}",
            ]
            for row in rows
        ],
    )


def _known(half: float) -> float | None:
    return None if math.isnan(half) else half


def write(
    rows: Sequence[Results],
    radii: dict[str, list[Results]],
    runs: dict[str, list[Results]],
    own: Config,
    typed: str,
    folder: Path,
) -> None:
    """``comparison.csv``, ``comparison.json`` with what the radii were chosen by, and ``comparison.png``."""
    with open(folder / "comparison.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({k: "" if v != v else v for k, v in row.items()} for row in rows)
    write_json(folder / "comparison.json", {"command": typed, "to": own["to"], "rows": rows, "radii": radii})
    quantity = rows[0]["quantity"]
    curves = {
        label: [
            [
                (e["gradient_evaluations"], e[f"validation_{quantity}"])
                for e in metrics.read(Path(r["folder"]))
                if e.get(f"validation_{quantity}") is not None
            ]
            for r in group
        ]
        for label, group in runs.items()
    }
    finals = {row["rule"]: (row["mean"], row["ci95"]) for row in rows}
    title = f"{rows[0]['over']}, {rows[0]['seeds']} seeds, 95% t-intervals over seeds"
    plots.rivals(curves, finals, folder / "comparison.png", quantity, title)


def _name(task: str, rules: Sequence[str]) -> str:
    name = "-".join([task, *map(study.slug, rules)])
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= 80 else f"{name[:70]}-{digest}"


def main() -> None:
    """Entry point of ``metasam-compare``."""
    command.main("metasam-compare", "compare", run, check)


if __name__ == "__main__":
    main()
