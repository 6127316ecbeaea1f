"""Read runs back and compare them: mean over seeds, paired differences, cost.

    metasam-report runs/multirun            every run folder below
    metasam-report runs/a runs/b --to low   differences to another variant (of supervised runs, to another rule)
    metasam-report studies/a studies/b      studies of metasam-ablate: their tables, and their reports written anew

Runs that differ only in their seed are one row. With the same seed, runs have the same test tasks or examples, so a
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

from metasam.scripts import ablation_report
from metasam.scripts.tables import table, value
from metasam.training.statistics import interval

Run = dict[str, Any]


def read(places: Sequence[Path]) -> list[Run]:
    """The results of every run folder among or below these places.

    Raises:
        ValueError: there are none.
    """
    files = sorted({f for place in places for f in place.rglob("results.json")})
    if not files:
        where = ", ".join(map(str, places))
        raise ValueError(f"expected run folders with a results.json in or below {where}, found none")
    return [_read(f) for f in files]


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

    ``to`` is "none" where there are few-shot runs, else "sam", unless given.
    """
    if len({run["config"]["variant"] is None for run in runs}) > 1:
        raise ValueError("expected few-shot runs or supervised ones, got both: name the folders of one kind")
    to = to or ("none" if any(run["config"]["variant"] for run in runs) else "sam")
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[setting(run)].append(run)
    order = {"none": 0, "low": 1, "up": 2, "both": 3}
    base = next((g for key, g in groups.items() if key[0] == to), [])
    rows = []
    for (name, _), group in sorted(groups.items(), key=lambda item: (order.get(item[0][0], 9), item[0][1])):
        quantity = "accuracy" if "accuracy" in group[0] else "loss"
        mean, half = interval([run[quantity] for run in group])
        second = next(s for s in ("plain_adapt", "last") if f"{quantity}_{s}" in group[0])
        other, other_half = interval([run[f"{quantity}_{second}"] for run in group])
        differences = paired(group, base) if base and group is not base else []
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
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"metasam-report: {error}")
    show(rows)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
