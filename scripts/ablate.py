"""Sharpness-awareness in the inner loop, the outer loop or both: the command ``metasam-ablate``.

Its keys are in ``configs/ablate.yaml``. A study has four phases. *tune*: each rule's radius in either loop, by
validation tasks. *train*: all cells, judged on validation tasks; from their differences the smallest detectable one is
computed and written down. *test*: the best weights of each run on the same test tasks, once. *report*.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig

from metasam.configure import Config
from metasam.scripts import ablation_report, command, study, tables
from metasam.training import assemble, estimate, evaluation, metrics, progress, statistics
from metasam.training.folder import alone, make, write_json
from metasam.training.trainer import Interrupted

OWN = (
    "where", "rules", "noise", "classes", "modes", "seeds", "grid", "tune_seeds", "margin", "workers", "study", "phase",
    "shards", "shard", "dry_run",
)  # fmt: skip
"""Keys of a study; the others are those of each of its runs."""

PHASES = ("tune", "train", "test", "report")
WHERE, MODES = ("none", "low", "up", "both"), ("iterations", "compute")

Results = dict[str, Any]


class Setting(NamedTuple):
    """The data that cells are compared on."""

    noise: float
    classes: int | str


class Cell(NamedTuple):
    """A place on the grid; all seeds of it make one number."""

    setting: Setting
    mode: str
    where: str
    rule: str


class Radii(NamedTuple):
    """What the tuning phase found for a rule on a setting."""

    low: float | None
    up: float | None


class Study:
    """A study as its config describes it.

    Args:
        config: composed, with the keys of `OWN`.
        words: the overrides of the command line that are not of `OWN`.
        tasks: name of the task family.
        typed: the command, for the record.
    """

    def __init__(self, config: Config, words: Sequence[str], tasks: str, typed: str) -> None:
        self.config, self.words, self.tasks, self.typed = config, words, tasks, typed
        self.folder = Path(config["study"] or f"studies/{tasks}-ablation")
        self.rules: list[str] = config["rules"]
        self.where = [w for w in WHERE if w in config["where"] or w == "none"]
        self.plain = self._compose("plain")
        self.composed = {entry: self._compose(entry) for entry in self.rules}
        self.settings = [Setting(n, c) for n in self._axis("noise", 0.0) for c in self._axis("classes", "all")]
        self._tuned: dict[tuple[Setting, str], Radii] = {}

    def _axis(self, name: str, default: Any) -> list[Any]:
        """The values of an axis: those it was given, or the one that the tasks have."""
        single = self.plain["tasks"].get(name)
        single = default if single is None else single
        if self.config[name] == [default]:
            return [single]
        if single != default:
            raise ValueError(f"tasks.{name}={single} and {name}={self.config[name]} contradict each other: say one")
        values: list[Any] = self.config[name]
        return values

    # the grid

    def cells(self) -> Iterator[Cell]:
        """All cells; those without a rule once for all rules, and once for both modes where they are the same run."""
        for setting in self.settings:
            for mode in self.config["modes"]:
                if mode == "iterations" or self.passes != self.config["iterations"] or len(self.config["modes"]) == 1:
                    yield Cell(setting, mode, "none", "-")
                for rule, where in itertools.product(self.rules, self.where):
                    if where != "none":
                        yield Cell(setting, mode, where, rule)

    @property
    def passes(self) -> float:
        """The budget of a run at equal compute: by default what plain MAML spends on the iterations."""
        given = self.config["budget"]["passes"]
        return float(given if given is not None else self.config["iterations"])

    def run_of(self, cell: Cell, seed: int, radii: Radii | None = None) -> study.Cell:
        """The run of a cell with one seed."""
        radii = radii or (Radii(None, None) if cell.where == "none" else self.radii(cell.setting, cell.rule))
        config = self._config(cell, radii, seed)
        name = cell.where if cell.where == "none" else f"{cell.where}-{study.slug(cell.rule)}"
        place = f"noise{cell.setting.noise:g}-classes{cell.setting.classes}"
        return study.Cell(self.folder / place / cell.mode / name / f"seed{seed}", config)

    def _config(self, cell: Cell, radii: Radii, seed: int) -> Config:
        base = self.plain if cell.where == "none" else self.composed[cell.rule]
        tasks = dict(base["tasks"])
        if "noise" in tasks or cell.setting.noise:
            tasks["noise"] = cell.setting.noise
        if "classes" in tasks or cell.setting.classes != "all":
            tasks["classes"] = None if cell.setting.classes == "all" else cell.setting.classes
        return {
            **base,
            "tasks": tasks,
            "seed": seed,
            "variant": cell.where,
            "rho_low": radii.low if cell.where in ("low", "both") else None,
            "rho_up": radii.up if cell.where in ("up", "both") else None,
            "budget": {"passes": self.passes if cell.mode == "compute" else None},
        }

    def _compose(self, entry: str) -> Config:
        name, *more = shlex.split(entry)
        for word in more:
            if not word.lstrip("+~").startswith(("rule.", "inner.rule.", "outer.rule.")):
                raise ValueError(f"rules: {word} in {entry!r} is no key of a rule: say it for all, outside rules")
        try:
            keys = command.plain_config(hydra.compose("ablate", [*self.words, f"rule={name}", *more]))
        except Exception as error:
            raise ValueError(f"rules: cannot use {entry!r}: {' '.join(str(error).split())[:300]}") from error
        own = {"name": self.tasks, "method": entry, "run": None, "resume": False, "dry_run": False, "workers": "auto"}
        config = {**{k: v for k, v in keys.items() if k not in OWN}, **own}
        assemble.check({**config, "variant": "none"})
        return config

    def refuse_what_cannot_run(self) -> None:
        """Build each rule once, and each setting once.

        Raises:
            ValueError: one cannot be built, or the tasks lack a split.
        """
        some = [Cell(self.settings[0], "iterations", w, r) for r in self.rules for w in self.where if w != "none"]
        for cell in [*(Cell(s, "iterations", "none", "-") for s in self.settings), *some]:
            config = self._config(cell, Radii(None, None), 0)
            learner, _ = assemble.build(config, assemble.choose_device(config["device"]))
            missing = [s for s in ("validation", "test") if not learner.has(s)]
            if missing:
                raise ValueError(f"expected tasks with a {missing[0]} split, tasks={self.tasks} has none")

    # what it takes

    def estimate(self) -> None:
        """Time a few steps of each kind of run, and print what the whole study would take."""
        seconds: dict[tuple[str, str, str], float] = {}
        device = assemble.choose_device(self.plain["device"])
        assemble.set_threads(1)  # as in its runs
        runs = Counter((c.mode, c.where, c.rule) for c in [*self.cells()] * self.config["seeds"])
        tries = Counter(("iterations", loop, rule) for _, rule, loop, _, _ in self.tries())
        kinds = sorted({*runs, *tries})
        with progress.show("timing", len(kinds)) as bar:
            for done, (mode, where, rule) in enumerate(kinds, 1):
                config = self._config(Cell(self.settings[0], mode, where, rule), Radii(None, None), 0)
                trainer = assemble.trainer(assemble.build(config, device), self.folder, device=device, quiet=True)
                found = estimate.estimate(trainer, quiet=True)
                seconds[mode, where, rule] = found.seconds + found.test  # on validation tasks, then on test tasks
                bar.update(done, f"{where} {rule}")
        rows = [
            (
                what,
                rule,
                where,
                mode,
                str(n),
                *map(progress.duration, (seconds[mode, where, rule], n * seconds[mode, where, rule])),
            )
            for what, counted in (("tuning", tries), ("training", runs))
            for (mode, where, rule), n in counted.items()
        ]
        total = sum(n * seconds[kind] for counted in (tries, runs) for kind, n in counted.items())
        number = sum(tries.values()) + sum(runs.values())
        rows.append(("in all", "", "", "", str(number), "", progress.duration(total)))
        columns = ("", "rule", "where", "equal", "runs", "each", "together")
        tables.table(f"{self.folder}, one run at a time, without diagnostics", columns, rows)

    # tuning

    def tries(self) -> list[tuple[Setting, str, str, float, int]]:
        """(setting, rule, loop, radius, seed) of each tuning run."""
        loops = [w for w in ("low", "up") if w in self.where or "both" in self.where]
        return [
            (setting, rule, loop, radius * factor, seed)
            for setting in self.settings
            for rule in self.rules
            if (radius := self._default_radius(rule)) is not None
            for loop in loops
            for factor in self.config["grid"] or ()
            for seed in range(study.FIRST_TUNING_SEED, study.FIRST_TUNING_SEED + self.config["tune_seeds"])
        ]

    def _default_radius(self, rule: str) -> float | None:
        node = self.composed[rule]["rule"]
        radius = node.get("rho", node.get("rho_val"))
        return None if radius is None else float(radius)

    def tuning_run(self, setting: Setting, rule: str, loop: str, radius: float, seed: int) -> study.Cell:
        """The run of one try."""
        cell = Cell(setting, "iterations", loop, rule)
        run = self.run_of(cell, seed, Radii(radius, radius))
        name = f"{loop}-{study.slug(rule)}-rho{radius:.4g}-seed{seed}"
        return study.Cell(self.folder / "tuning" / run.folder.parents[2].name / name, run.config)

    def tuning(self) -> list[Results]:
        """One row a try of a radius: validation results of its seeds, and whether it was chosen.

        Raises:
            ValueError: the tuning phase has not ended.
        """
        rows: dict[tuple[Setting, str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for setting, rule, loop, radius, seed in self.tries():
            run = self.tuning_run(setting, rule, loop, radius, seed)
            found = study.finished(run)
            if found is None and not (run.folder / study.DIVERGED).exists():
                raise ValueError(f"expected the tuning phase to have ended, {run.folder} has no results: phase=tune")
            rows[setting, rule, loop][radius].append(-math.inf if found is None else study.validation_of(found))
        table = []
        for (setting, rule, loop), tried in rows.items():
            best = study.best_radius(tried, f"{rule} in the {loop} loop", self.config["grid"])
            for radius, values in tried.items():
                table.append(
                    {
                        "noise": setting.noise,
                        "classes": setting.classes,
                        "where": loop,
                        "rule": rule,
                        "rho": radius,
                        "validation": values,
                        "chosen": radius == best,
                    }
                )
        return table

    def radii(self, setting: Setting, rule: str) -> Radii:
        """The radii that a rule runs with; None: its own."""
        if not self._tuned:
            found: dict[tuple[Setting, str], dict[str, float]] = defaultdict(dict)
            for row in self.tuning():
                if row["chosen"]:
                    found[Setting(row["noise"], row["classes"]), row["rule"]][row["where"]] = row["rho"]
            self._tuned = {key: Radii(value.get("low"), value.get("up")) for key, value in found.items()}
        return self._tuned.get((setting, rule), Radii(None, None))

    # phases

    def runs(self) -> list[tuple[Cell, int, study.Cell]]:
        """Every run that counts, seeds outermost, so that a study that is cut short has whole comparisons."""
        seeds = range(1, self.config["seeds"] + 1)
        return [(cell, seed, self.run_of(cell, seed)) for seed in seeds for cell in self.cells()]

    def phase(self, name: str) -> None:
        """Do this process's share of a phase."""
        if name == "tune":
            self._each([self.tuning_run(*t) for t in self.tries()], "tuning radii", may_diverge=True)
        elif name == "train":
            self._each([run for _, _, run in self.runs()], "training")
        elif name == "test":
            self.plan()
            self._each([run for _, _, run in self.runs()], "testing", job=study.judge, file="test.json")
        elif self.config["shard"] == 0:
            self.report()

    def _each(
        self,
        runs: Sequence[study.Cell],
        title: str,
        *,
        job: study.Job | None = None,
        file: str = "results.json",
        may_diverge: bool = False,
    ) -> None:
        mine = list(runs)[self.config["shard"] :: self.config["shards"]]
        workers = self.config["workers"]
        results = study.run(mine, workers=workers, title=title, command=self.typed, job=job, file=file)
        for run, found in zip(mine, results, strict=True):
            if isinstance(found, study.Failure) and not (found.diverged and may_diverge):
                raise ValueError(f"{run.folder}: {found.reason}; the runs that finished are kept")

    def plan(self) -> Results:
        """What could be detected, by the spread of the validation differences: written before any test run.

        Raises:
            ValueError: the training phase has not ended.
        """
        file = self.folder / "plan.json"
        old = self._planned(file)
        if old is not None:
            return old
        by_cell: dict[Cell, dict[int, float]] = defaultdict(dict)
        for cell, seed, run in self.runs():
            found = study.finished(run)
            if found is None:
                raise ValueError(f"expected the training phase to have ended, {run.folder} has no results: phase=train")
            by_cell[cell][seed] = found["accuracy"] if "accuracy" in found else found["loss"]
        differences = {
            cell: statistics.paired(results, by_cell[self._base(cell)])
            for cell, results in by_cell.items()
            if cell.where != "none"
        }
        alpha = 0.05 / max(1, len(differences))  # the strictest step of Holm's adjustment
        planned = {
            "detectable": {
                name_of(cell): statistics.detectable(d.sd, d.seeds, alpha=alpha) for cell, d in differences.items()
            },
            "comparisons": len(differences),
            "alpha": alpha,
            "seeds": self.config["seeds"],
            "tasks": self.config["test_tasks"],
            "power": 0.8,
            "written_before_test": not any(self.folder.rglob("test.json")),
            "from": "paired differences on validation tasks",
            "grid": self.config["grid"],
        }
        write_json(file, planned)
        return planned

    def _planned(self, file: Path) -> Results | None:
        """The plan in a file, if it is of this very study: one that has grown since needs another."""
        if not file.exists():
            return None
        try:
            planned: Results = json.loads(file.read_text(encoding="utf-8"))
            same = (planned["seeds"], planned["tasks"]) == (self.config["seeds"], self.config["test_tasks"])
            compared = {name_of(cell) for cell in self.cells() if cell.where != "none"}
            return planned if same and set(planned["detectable"]) == compared else None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged: remove it, and the same command writes it anew") from error

    def _base(self, cell: Cell) -> Cell:
        shared = Cell(cell.setting, "iterations", "none", "-")
        own = Cell(cell.setting, cell.mode, "none", "-")
        return own if own in set(self.cells()) else shared

    def rows(self) -> list[Results]:
        """One row a run, as `metasam.scripts.ablation_report` takes it.

        Raises:
            ValueError: the test phase has not ended.
        """
        rows = []
        for cell, seed, run in self.runs():
            found, judged = study.finished(run), study.finished(run, "test.json")
            if found is None or judged is None:
                raise ValueError(f"expected the test phase to have ended, {run.folder} has no test.json: phase=test")
            row = row_of(cell, seed, run.config, found, judged, run.folder)
            rows.append(row)
            other = Cell(cell.setting, "compute", "none", "-")
            if cell.where == "none" and "compute" in self.config["modes"] and other not in set(self.cells()):
                rows.append({**row, "mode": "compute"})  # the same run
        return rows

    def report(self) -> None:
        """Write and show the report."""
        rows, facts = self.rows(), self.facts()
        write_json(self.folder / "study.json", {**facts, "rows": rows})
        ablation_report.write(rows, facts, self.folder)
        ablation_report.show(rows, facts)
        print(f"report.md, report.html and results.csv in {self.folder}")

    def facts(self) -> Results:
        """What the report says about the study as a whole."""
        some = study.finished(self.runs()[0][2]) or {}
        return {
            "command": self.typed,
            "tasks": self.tasks,
            "plan": self.plan(),
            "tuning": [
                {**t, "validation": [None if math.isinf(v) else v for v in t["validation"]]} for t in self.tuning()
            ],
            "margin": self.config["margin"],
            "over": f"{self.config['test_tasks']} test tasks",
            "transductive": "Results are transductive: BatchNorm uses the query batch."
            * some.get("transductive", False),
            "versions": evaluation.environment()["versions"],
            "device": some.get("device"),
        }


def name_of(cell: Cell) -> str:
    """A cell in words."""
    mode = ablation_report.BUDGETS[cell.mode]
    return f"{cell.where}, {cell.rule}, {mode}, {ablation_report.setting_name(cell.setting)}"


def row_of(cell: Cell, seed: int, config: Config, found: Results, judged: Results, folder: Path) -> Results:
    """One run as a row of the report."""
    quantity = "accuracy" if "accuracy" in judged else "loss"
    lines = metrics.read(folder)
    return {
        "where": cell.where,
        "rule": cell.rule,
        "mode": cell.mode,
        "noise": cell.setting.noise,
        "classes": cell.setting.classes,
        "seed": seed,
        "rho_low": config["rho_low"],
        "rho_up": config["rho_up"],
        "quantity": quantity,
        quantity: judged[quantity],
        "n": judged["n"],
        "per_task": judged.get("per_task", []),
        "plain_adapt": judged.get(f"{quantity}_plain_adapt"),
        "validation": found.get(f"validation_{quantity}"),
        "gradient_evaluations": found["gradient_evaluations"],
        "iterations": found["iterations"],
        "seconds": found["seconds"],
        "peak_memory_mb": found["peak_memory_mb"],
        "curve": [
            [line["gradient_evaluations"], line["iteration"], line[f"validation_{quantity}"]]
            for line in lines
            if line.get(f"validation_{quantity}") is not None
        ],
        "congruence": [[line["iteration"], line["congruence"]] for line in lines if line.get("congruence") is not None],
        "sharpness": _sharpness(found.get("sharpness")),
    }


def _sharpness(found: Results | None) -> Results:
    """What a report shows of `metasam.training.few_shot.FewShot.sharpness`; of adapted weights, the query loss's."""
    if not found:
        return {}
    places = {"meta": found, "adapted": found["adapted"]["query"]}
    return {f"{place}_{kind}": values[kind] for place, values in places.items() for kind in ("average", "worst")}


def run(config: Config) -> None:
    """Do the phases that were asked for."""
    words = [o for o in HydraConfig.get().overrides.task if o.partition("=")[0].lstrip("+") not in OWN]
    given = [w.lstrip("+~").partition("=")[0] for w in words]
    for key in ("split", "variant", "run", "resume", "seed", "rule", "rho_low", "rho_up"):
        if key in given:
            raise ValueError(f"{key}=... is for the study to set: say where=, rules=, seeds=, grid= or study= instead")
    typed = command.command_line()
    whole = Study(config, words, command.choice("tasks"), typed)
    phases = PHASES if config["phase"] == "all" else (config["phase"],)
    whole.refuse_what_cannot_run()
    if config["dry_run"]:
        whole.estimate()
        return
    make(whole.folder)
    try:
        with alone(whole.folder, "study") if config["shards"] == 1 else nullcontext():
            for phase in phases:
                whole.phase(phase)
    except Interrupted as stop:
        raise command.Stop(f"{stop}; the same command goes on:\n  {typed}", status=130) from None


def check(config: Config) -> None:
    """Raise ValueError unless the values of a config can work."""
    assemble.check({**{k: v for k, v in config.items() if k not in OWN}, "variant": "both"})
    if config["phase"] not in ("all", *PHASES):
        raise ValueError(f"expected phase to be one of all, {', '.join(PHASES)}, got phase={config['phase']}")
    for key, options in {"where": WHERE, "modes": MODES}.items():
        given = config[key]
        if not isinstance(given, list) or not given or not set(given) <= set(options) or len(set(given)) < len(given):
            raise ValueError(f"expected {key} to be a list out of {', '.join(options)}, got {key}={given}")
    for key in ("rules", "noise", "classes"):
        if not isinstance(config[key], list) or not config[key] or len(set(map(str, config[key]))) < len(config[key]):
            raise ValueError(f"expected {key} to be a list of different values, got {key}={config[key]}")
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and n >= 0 for n in config["noise"])
    if not numbers or len({f"{n:g}" for n in config["noise"]}) < len(config["noise"]):
        raise ValueError(f"expected noise to be a list of different numbers of at least 0, got noise={config['noise']}")
    if not all(c == "all" or (isinstance(c, int) and c > 0) for c in config["classes"]):
        raise ValueError(f"expected classes to be a list of numbers, or all, got classes={config['classes']}")
    grid = config["grid"]
    fits = isinstance(grid, list) and grid and all(isinstance(g, int | float) and 0 < g < math.inf for g in grid)
    if grid is not None and (not fits or len({f"{g:.4g}" for g in grid}) < len(grid)):
        wanted = "a list of different factors above 0 such as [0.01,0.1,1], or null"
        raise ValueError(f"expected grid to be {wanted}, got grid={grid}")
    margin = config["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < math.inf:
        raise ValueError(f"expected margin to be a finite number above 0, got margin={margin}")
    for key, least in {"seeds": 1, "tune_seeds": 1, "workers": 1, "shards": 1, "shard": 0}.items():
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < least:
            raise ValueError(f"expected {key} to be a whole number of at least {least}, got {key}={config[key]}")
    if config["shard"] >= config["shards"]:
        raise ValueError(f"expected shard below shards={config['shards']}, got shard={config['shard']}")
    if config["shards"] > 1 and config["phase"] == "all":
        raise ValueError("expected one phase at a time for shards: phase=tune, then train, test and report")


def main() -> None:
    """Entry point of ``metasam-ablate``."""
    command.main("metasam-ablate", "ablate", run, check)


if __name__ == "__main__":
    main()
