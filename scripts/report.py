"""Read runs back and compare them: mean over seeds, paired differences, cost.

    metasam-report runs/multirun            every run folder below
    metasam-report runs/a runs/b --to low   differences to another variant (of supervised runs, to another rule)
    metasam-report studies/a studies/b      studies of metasam-ablate: their tables, and their reports written anew

The tuning runs of a study are left out: name their folder, tuning, to read them. Runs that differ only in their seed
are one row. With the same seed, runs have the same test tasks or examples, so a
difference is paired by seed; intervals are 95% t-intervals over seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from metasam.configure import did_you_mean
from metasam.scripts import ablation_report
from metasam.scripts.tables import table, value
from metasam.training.statistics import interval

Run = dict[str, Any]


def read(places: Sequence[Path]) -> list[Run]:
    """The results of every run folder among or below these places, but for those in a folder called tuning below one.

    Raises:
        ValueError: there are none.
    """
    files, tuning = find(places)
    if not files:
        where = ", ".join(map(str, places))
        hint = f" but {tuning} tuning runs: name the folder tuning itself" if tuning else ""
        raise ValueError(f"expected run folders with a results.json in or below {where}, found none{hint}")
    return [_read(f) for f in files]


def find(places: Sequence[Path]) -> tuple[list[Path], int]:
    """The results files of runs among or below these places, and how many of tuning runs were left out."""
    found = {f: "tuning" in f.relative_to(place).parts for place in places for f in place.rglob("results.json")}
    return sorted(f for f, tuning in found.items() if not tuning), sum(found.values())


def _read(file: Path) -> Run:
    try:
        run: Run = json.loads(file.read_text(encoding="utf-8"))
        _ = run["config"]["variant"], run["n"], run["seed"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of a run: {type(error).__name__} {error}") from error
    return run


def label(run: Run) -> str:
    """The variant of a few-shot run, the rule of a supervised one."""
    config = run["config"]
    return str(config["variant"] or config.get("method") or config["rule"]["_target_"].rpartition(".")[2])


def setting(run: Run) -> tuple[str, str]:
    """What a row stands for: its label, and everything else that is no seed."""
    config = {k: v for k, v in run["config"].items() if k not in ("seed", "run", "resume", "threads", "network")}
    for radius, variants in {"rho_low": ("low", "both"), "rho_up": ("up", "both")}.items():
        if run["config"]["variant"] not in variants:
            config.pop(radius, None)  # it plays no part
    return label(run), json.dumps(config, sort_keys=True)


METHOD = ("rule", "method", "variant", "rho", "rho_low", "rho_up", "reuse_inner_eps")
"""Keys that say what a run is compared for; two runs that are alike but for them are a fair comparison."""


def surroundings(run: Run) -> str:
    """Everything else about a run."""
    config = {k: v for k, v in json.loads(setting(run)[1]).items() if k not in METHOD}
    for loop in {"inner", "outer"} & config.keys():
        config[loop] = {k: v for k, v in config[loop].items() if k != "rule"}
    return json.dumps(config, sort_keys=True)


def paired(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """Difference in accuracy (regression: loss) of each seed that both sides have, on the same tasks or examples."""
    by_seed = {run["seed"]: run for run in base}
    differences = []
    for run in runs:
        other = by_seed.get(run["seed"])
        if other is None:
            continue
        if run["over"] != other["over"]:
            raise ValueError(
                f"runs of seed {run['seed']} cannot be paired: it has {run['over']} here and "
                f"{other['over']} there; evaluate them on the same test_tasks"
            )
        quantity = "accuracy" if "accuracy" in run else "loss"
        differences.append(run[quantity] - other[quantity])
    return differences


def compare(runs: Sequence[Run], to: str | None = None) -> list[Run]:
    """One row a setting: mean over seeds, paired difference to the variant or rule ``to``, and what it cost.

    ``to`` is "none" where there are few-shot runs, else "sam", unless given. Where it has several settings, a row is
    compared with the one that is alike but for rule, radius and variant (of several the one of its rule, which plays no
    part without SAM); where that is none, or leaves several, its difference is nan.

    Raises:
        ValueError: runs of two kinds, no runs of the ``to`` that was given, or runs that cannot be paired.
    """
    if len({run["config"]["variant"] is None for run in runs}) > 1:
        raise ValueError("expected few-shot runs or supervised ones, got both: name the folders of one kind")
    labels = sorted({label(run) for run in runs})
    if to is not None and to not in labels:
        raise ValueError(f"expected --to to be one of {', '.join(labels)}, got --to {to}{did_you_mean(to, labels)}")
    to = to or ("none" if any(run["config"]["variant"] for run in runs) else "sam")
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[setting(run)].append(run)
    order = {"none": 0, "low": 1, "up": 2, "both": 3}
    bases = [g for key, g in groups.items() if key[0] == to]
    rows = []
    for (name, _), group in sorted(groups.items(), key=lambda item: (order.get(item[0][0], 9), item[0][1])):
        quantity = "accuracy" if "accuracy" in group[0] else "loss"
        mean, half = interval([run[quantity] for run in group])
        second = next(s for s in ("plain_adapt", "last") if f"{quantity}_{s}" in group[0])
        other, other_half = interval([run[f"{quantity}_{second}"] for run in group])
        alike = [b for b in bases if surroundings(b[0]) == surroundings(group[0])]
        same_rule = [b for b in alike if b[0]["config"].get("rule") == group[0]["config"].get("rule")]
        fitting = [] if name == to and len(bases) > 1 else bases if len(bases) == 1 else same_rule or alike
        differences = paired(group, fitting[0]) if len(fitting) == 1 and fitting[0] is not group else []
        difference, difference_half = interval(differences) if differences else (math.nan, math.nan)
        config = group[0]["config"]
        rows.append(
            {
                "variant": name,
                "rho": config.get("rho"),
                "rho_low": config.get("rho_low") if name in ("low", "both") else None,
                "rho_up": config.get("rho_up") if name in ("up", "both") else None,
                "quantity": quantity,
                "mean": mean,
                "ci95": half,
                second: other,
                f"{second}_ci95": other_half,
                "difference_to": to,
                "difference": difference,
                "difference_ci95": difference_half,
                "bases": len(fitting),
                "seeds": len(group),
                "n_a_seed": group[0]["n"],
                "over": group[0]["over"],
                "gradient_evaluations": fmean(run["gradient_evaluations"] for run in group),
                "seconds": fmean(run["seconds"] for run in group),
                "peak_memory_mb": max(run["peak_memory_mb"] or math.nan for run in group),
            }
        )
    return rows


def show(rows: Sequence[Run]) -> None:
    """Print the comparison."""
    few_shot = "plain_adapt" in rows[0]
    second, name = ("plain_adapt", "adapted without SAM") if few_shot else ("last", "last weights")

    def half(mean: float, width: float, quantity: str) -> str:
        return value(mean, None if math.isnan(width) else width, quantity)

    first = ("SAM in", "rho low / up") if few_shot else ("rule", "rho")
    columns = (*first, "result", name, f"minus {rows[0]['difference_to']}", "evaluations", "seconds", "MB")
    table(
        f"{rows[0]['over']}, {min(r['seeds'] for r in rows)} seeds or more; 95% t-intervals over seeds",
        columns,
        [
            (
                r["variant"],
                " / ".join(
                    "-" if r[k] is None else f"{r[k]:g}" for k in (("rho_low", "rho_up") if few_shot else ("rho",))
                ),
                half(r["mean"], r["ci95"], r["quantity"]),
                half(r[second], r[f"{second}_ci95"], r["quantity"]),
                "" if math.isnan(r["difference"]) else half(r["difference"], r["difference_ci95"], r["quantity"]),
                f"{r['gradient_evaluations']:.0f}",
                f"{r['seconds']:.0f}",
                f"{r['peak_memory_mb']:.0f}",
            )
            for r in rows
        ],
    )
    to = rows[0]["difference_to"]
    left = [r["bases"] for r in rows if r["variant"] != to and r["bases"] != 1]
    if left and any(r["variant"] == to for r in rows):
        print(
            f"{len(left)} rows have no difference: expected one setting of {to} that is alike but for rule, radius and "
            f"variant, got {' or '.join(map(str, sorted(set(left))))}: name the folders of one setting"
        )


def _study(place: Path) -> None:
    try:
        facts = json.loads((place / "study.json").read_text(encoding="utf-8"))
        rows = facts.pop("rows")
        print(f"{facts['tasks']}: {place}")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}/study.json holds no study: {type(error).__name__} {error}") from error
    ablation_report.write(rows, facts, place)
    ablation_report.show(rows, facts)


def main() -> None:
    """Entry point of ``metasam-report``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", type=Path, help="run folders, or folders above them")
    parser.add_argument("--to", help="the variant or rule that differences are to; none, or of supervised runs sam")
    parser.add_argument("--csv", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    try:
        studies = [place for place in options.places if (place / "study.json").exists()]
        for place in studies:
            _study(place)
        if len(studies) == len(options.places):
            return
        options.places = [place for place in options.places if place not in studies]
        rows = compare(read(options.places), options.to)
        show(rows)
        if tuning := find(options.places)[1]:
            print(f"{tuning} tuning runs are left out: name their folder, tuning, to see them")
        if options.csv:
            _write_csv(rows, options.csv)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"metasam-report: {error}")


def _write_csv(rows: Sequence[Run], path: Path) -> None:
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"cannot write {path}: {reason}; choose another file with --csv FILE") from error


if __name__ == "__main__":
    main()
