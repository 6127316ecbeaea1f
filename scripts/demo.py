"""Compare MAML with SAM in the inner loop, the outer loop, and both, on letters of unseen scripts: ``make demo``.

Meta-trains each variant briefly with the same seeds, so on the same tasks from the same weights, one run a core. Prints
a table and leaves ``comparison.png``, ``comparison.csv`` and the run folders in ``runs/demo/<time>``.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import hydra

from metasam.configure import Config
from metasam.scripts import study, tables
from metasam.scripts.command import plain_config
from metasam.scripts.memory import keep_freed_memory
from metasam.training import assemble, metrics, plots, progress
from metasam.training.folder import write_json
from metasam.training.trainer import Interrupted

COST = {"none": 1.0, "low": 1.5, "up": 2.0, "both": 3.0}
"""Gradient evaluations of a meta-step with one inner step, MAML's being 1."""
SEEDS = (1, 2)


def compose(*overrides: str) -> Config:
    """The config of one run of the demo."""
    with hydra.initialize_config_module("metasam.configs", version_base="1.3"):
        return plain_config(hydra.compose("train", ["experiment=demo", *overrides]))


def prepare() -> None:
    """Set a worker up: it keeps its memory, and ends with the process that started it."""
    keep_freed_memory()
    study.end_with_parent()


def train(config: Config, folder: Path) -> dict[str, Any]:
    """Train one run, in a process of its own, on one core."""
    assemble.set_threads(1)
    parts = assemble.build({"name": "glyphs", **config})
    trainer = assemble.trainer(parts, folder, command="make demo", quiet=True)
    return trainer.fit()


def compare(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a variant: accuracy, and difference to ``none`` task by task; intervals over the tasks of all seeds."""
    rows = []
    base = _tasks(results["none"])
    for variant, runs in results.items():
        accuracies = _tasks(runs)
        differences = [a - b for a, b in zip(accuracies, base, strict=True)]
        rows.append(
            {
                "variant": variant,
                "accuracy": fmean(accuracies),
                "ci95": _half_width(accuracies),
                "difference": fmean(differences),
                "difference_ci95": _half_width(differences),
                "n": len(accuracies),
                "gradient_evaluations": fmean(r["gradient_evaluations"] for r in runs),
                "seconds": fmean(r["seconds"] for r in runs),
            }
        )
    return rows


def main() -> None:
    """Entry point of ``make demo``."""
    began = time.monotonic()
    folder = Path("runs/demo") / time.strftime("%Y%m%d-%H%M%S")
    jobs = {
        (variant, seed): compose(f"variant={variant}", f"seed={seed}")
        for variant in reversed(COST)  # the longest first, so that the cores finish together
        for seed in SEEDS
    }
    example = next(iter(jobs.values()))
    assemble.tasks_of(example)  # draws the letters once, on first use
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, len(jobs))
    print(
        f"{len(jobs)} runs of {example['iterations']} meta-steps, {workers} at a time: "
        f"{' / '.join(COST)} x seeds {', '.join(map(str, SEEDS))}",
        file=sys.stderr,
    )
    os.environ["OMP_NUM_THREADS"] = "1"  # before the workers start
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), prepare) as pool:
        running = {job: pool.submit(train, config, _folder(folder, job)) for job, config in jobs.items()}
        try:
            _watch(folder, running, example["iterations"])
        except (KeyboardInterrupt, Interrupted):
            pool.shutdown(wait=False, cancel_futures=True)  # the runs themselves stop after their step
            sys.exit(f"stopped; what was done is in {folder}")
        results = {v: [running[v, s].result() for s in SEEDS] for v in COST}
    rows = compare(results)
    _write(folder, rows, results, example)
    tables.table(
        f"{example['ways']}-way {example['shots']}-shot glyphs, {len(SEEDS)} seeds x {rows[0]['n'] // len(SEEDS)} "
        "test tasks; 95% intervals over tasks",
        ("SAM in", "accuracy", "difference to none", "gradient evaluations", "seconds a run"),
        [
            (
                r["variant"],
                tables.value(r["accuracy"], r["ci95"]),
                "" if r["variant"] == "none" else f"{100 * r['difference']:+.1f} ± {100 * r['difference_ci95']:.1f}",
                f"{r['gradient_evaluations']:.0f}",
                f"{r['seconds']:.0f}",
            )
            for r in rows
        ],
    )
    print(f"{progress.duration(time.monotonic() - began)} in all; picture, numbers and runs in {folder}")


def _folder(folder: Path, job: tuple[str, int]) -> Path:
    return folder / f"{job[0]}-seed{job[1]}"


def _watch(folder: Path, running: dict[tuple[str, int], Future[dict[str, Any]]], iterations: int) -> None:
    """Show how far all runs are, by what they have cost, until they are done."""
    total = round(iterations * sum(COST[variant] for variant, _ in running))
    with progress.show("demo", total) as bar:
        while not all(f.done() for f in running.values()):
            time.sleep(0.5)
            done = 0.0
            for job, future in running.items():
                if future.done():
                    future.result()  # raises what the run raised
                path = _folder(folder, job) / "metrics.jsonl"
                done += COST[job[0]] * (len(path.read_bytes().splitlines()) if path.exists() else 0)
            bar.update(round(done), f"{sum(f.done() for f in running.values())} of {len(running)} runs done")


def _write(folder: Path, rows: list[dict[str, Any]], results: dict[str, list[dict[str, Any]]], config: Config) -> None:
    with open(folder / "comparison.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    write_json(folder / "comparison.json", {"rows": rows, "seeds": list(SEEDS), "config": config})
    curves = {
        v: [
            [(e["gradient_evaluations"], e["validation_accuracy"]) for e in entries if "validation_accuracy" in e]
            for entries in (metrics.read(_folder(folder, (v, s))) for s in SEEDS)
        ]
        for v in results
    }
    title = (
        f"{config['ways']}-way {config['shots']}-shot glyphs, {len(SEEDS)} seeds; "
        "SAM in no loop, the inner (low), the outer (up), both"
    )
    plots.comparison(curves, {r["variant"]: (r["accuracy"], r["ci95"]) for r in rows}, folder / "comparison.png", title)


def _tasks(runs: list[dict[str, Any]]) -> list[float]:
    return [accuracy for run in runs for accuracy in run["per_task"]]


def _half_width(values: list[float]) -> float:
    return 1.96 * stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    main()
