"""The training loop: steps, validation, checkpoints, and the results of the best weights at the end.

A run can be killed at any moment and continued to the same bits: batch number ``i`` never depends on anything but the
seed, and everything else that a step depends on is in the checkpoint.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .. import checkpoint
from ..checkpoint import CheckpointError
from ..configure import Config, flatten, plain
from ..ranks import Ranks
from . import evaluation, folder, metrics, plots, progress, rng
from .budget import SCHEDULES, Budget
from .diagnose import Diagnostics
from .learner import Learner, Measured

MAY_CHANGE = (
    "method", "test_tasks", "device", "threads", "workers", "run", "resume", "dry_run",
    "tasks.root", "tasks.path", "tasks.download",
    "diagnostics.congruence", "diagnostics.sharpness", "diagnostics.rho", "diagnostics.samples", "diagnostics.tasks",
)  # fmt: skip
"""Keys of the config that may differ when a run is continued: they change where it runs and what is measured of it,
not what it is."""

LENGTH = ("iterations", "epochs", "budget.passes")
"""Keys that change how far it runs: they may differ too where the learning rate does not depend on that."""

SPLITS = ("test", "validation", "train")

PATIENCE = 25
"""Steps in a row that may be skipped for non-finite gradients before a run is stopped."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """Someone asked the run to stop, and it is saved."""


@dataclass
class Trainer:
    """Trains a learner in a run folder.

    Args:
        learner: what is trained, see `metasam.training.learner`.
        folder: the run folder; made if it is not there.
        budget: when the run ends.
        split: to measure the best weights on at the end; without data of it, the next one of test, validation, train.
        schedule: of the learning rate, one of `metasam.training.budget.SCHEDULES`.
        evaluate_every: steps (with ``budget.passes``: gradient evaluations) between two validations, each followed by
            a checkpoint.
        checkpoint_seconds: a checkpoint is also saved when the last one is older than this.
        config: what to record with the run and to compare when it is continued; plain nested values.
        command: how the run was started, for the record and for advice.
        device: where checkpoints are read to.
        diagnostics: what else to measure.
        quiet: say nothing.
        ranks: the processes that the learner is split over: all of them take all steps, and rank 0 alone reads, writes
            and speaks.
    """

    learner: Learner
    folder: Path
    budget: Budget = field(default_factory=Budget)
    split: str = "test"
    schedule: str = "constant"
    evaluate_every: float = 100
    checkpoint_seconds: float = 60.0
    config: Config = field(default_factory=dict)
    command: str = ""
    device: torch.device | str = "cpu"
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    quiet: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.latest, self.best = self.folder / "checkpoint.pt", self.folder / "best.pt"
        self.iteration, self.seconds = 0, 0.0
        self.record: dict[str, Any] = {}  # of the best validation so far
        self.saved: int | None = None
        """Iteration of the checkpoint that a run can be continued from."""
        self._stop = False
        self.quiet = self.quiet or self.ranks.rank > 0
        for group in self.learner.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the end, then measure the best weights; returns what is written to ``results.json``.

        Args:
            resume: continue from the checkpoint in the run folder if there is one.

        Raises:
            CheckpointError: the folder holds a run and ``resume`` is False; its checkpoint is of another config or
                cannot be read; a checkpoint cannot be saved.
            Interrupted: someone pressed Ctrl-C (or a process was asked to terminate); the run is saved.
            RankLost: another process of the run ended.
            FloatingPointError: too many steps in a row had non-finite gradients.
            ValueError: the budget does not pay for a single step.
        """
        with ExitStack() as held:

            def begin() -> dict[str, Any] | None:
                folder.make(self.folder)
                held.enter_context(folder.alone(self.folder))
                return self._read(resume)

            payload = self.ranks.once(begin)
            if payload is not None:
                self._restore(payload)
            self.ranks.once(lambda: checkpoint.write_text(self.folder / "config.yaml", folder.to_yaml(self.config)))
            self._train()
            return self._finish()

    def _read(self, resume: bool) -> dict[str, Any] | None:
        """The checkpoint to continue from; None where there is none."""
        if not checkpoint.exists(self.latest):
            if resume:
                self._say(f"nothing to resume in {self.folder}: starting afresh")
            return None
        if not resume:
            raise CheckpointError(
                f"{self.folder} holds a run already, and nothing of it is overwritten: resume=true continues it, "
                "run=DIR puts this one elsewhere"
            )
        payload, warning = checkpoint.load_latest(self.latest, map_location=self._home)
        if warning:
            self._say(warning)
        return payload

    @property
    def _home(self) -> torch.device | str:
        """Where checkpoints are read to: what is handed to other ranks is on the CPU."""
        return self.device if self.ranks.size == 1 else "cpu"

    def _save(self, path: Path, *, slim: bool = False, keep_previous: bool = False) -> None:
        self.ranks.once(lambda: checkpoint.save(self._payload(slim=slim), path, keep_previous=keep_previous))

    @property
    def judged_split(self) -> str:
        """What the end of the run is measured on: ``split``, or the next one that there are data of."""
        return next(s for s in SPLITS[SPLITS.index(self.split) :] if self.learner.has(s))

    def _position(self) -> float:
        return self.budget.position(self.iteration, self.learner.gradient_evaluations)

    def _train(self) -> None:
        saved = began = time.monotonic()
        before = self.seconds
        in_a_row = 0
        with (
            metrics.Metrics(self.folder, self.iteration) if self.ranks.rank == 0 else nullcontext() as log,
            progress.show(self.folder.name, round(self.budget.total), round(self._position()), quiet=self.quiet) as bar,
            self._stop_on_signal(bar),
        ):
            shown = ""
            while self.budget.allows(self.iteration, self.learner.gradient_evaluations):
                start, spent = self._position(), self.learner.gradient_evaluations
                self._set_learning_rate(start / self.budget.total)
                last = self.learner.step(self.iteration)
                self.iteration += 1
                self.budget.paid(self.learner.gradient_evaluations - spent)
                in_a_row = in_a_row + 1 if last.skipped else 0
                line: dict[str, Any] = {"loss": last.loss, "accuracy": last.accuracy}
                ends = not self.budget.allows(self.iteration, self.learner.gradient_evaluations)
                due = ends or self._position() // self.evaluate_every > start // self.evaluate_every
                self.seconds = before + time.monotonic() - began
                measured = self._validate() if due else None
                if measured is not None:
                    line |= {f"validation_{measured.quantity}": measured.value, "validation_ci95": measured.half}
                    shown = "  validation " + _number(measured)
                if due and self.diagnostics.congruence:
                    line |= self.learner.congruence(self.diagnostics.tasks)
                self.seconds = before + time.monotonic() - began
                if log is not None:
                    log.write(
                        self.iteration,
                        **line,
                        gradient_evaluations=self.learner.gradient_evaluations,
                        skipped=self.learner.skipped,
                        seconds=round(self.seconds, 3),
                    )
                bar.update(int(self._position()), _status(last.loss, last.accuracy) + shown)
                stop, old = self.ranks.any(self._stop, time.monotonic() - saved > self.checkpoint_seconds)
                if due or stop or old:
                    if log is not None:
                        log.flush()
                    self._save(self.latest, keep_previous=True)
                    self.saved, saved = self.iteration, time.monotonic()
                if in_a_row >= PATIENCE:
                    raise FloatingPointError(
                        f"{PATIENCE} steps in a row, up to iteration {self.iteration}, were skipped: expected "
                        "finite gradients, got nan or inf; lower inner.lr, optim.lr or the radius, "
                        "or look for NaN in the data"
                    )
                if stop:
                    raise Interrupted(f"stopped at iteration {self.iteration}{self._of()}, and saved")

    def _of(self) -> str:
        if self.budget.passes is None:
            return f" of {self.budget.iterations}"
        return f", after {self.learner.gradient_evaluations:.0f} of {self.budget.passes:g} gradient evaluations"

    def _set_learning_rate(self, done: float) -> None:
        factor = SCHEDULES[self.schedule](done)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _validate(self) -> Measured | None:
        """Measure on validation data, and keep the weights if they are the best so far."""
        measured = self.learner.validate()
        if measured is None:
            return None
        quantity, value, half, n = measured
        better = self.record.get(quantity)
        if value == value and (better is None or (value > better if quantity == "accuracy" else value < better)):
            self.record = {"iteration": self.iteration, quantity: value, "ci95": half, "n": n}
            self._save(self.best, slim=True)
        return measured

    def _finish(self) -> dict[str, Any]:
        """Write the learning curve and the results of the best weights."""
        best = self.ranks.once(self._load_best)
        if best is None:  # without validation data the last weights count
            self.record = {"iteration": self.iteration}
            self._save(self.best, slim=True)
            best = self.ranks.once(lambda: checkpoint.load(self.best, map_location=self._home))
        costs = {
            "seconds": round(self.seconds, 1),
            "gradient_evaluations": self.learner.gradient_evaluations,
            "counts": self.learner.counts,
            "skipped": self.learner.skipped,
        }
        title = self.learner.title(self.config)
        if self.ranks.rank == 0:
            plots.learning_curve(
                metrics.read(self.folder), self.folder / "learning_curve.png", title, self.learner.words, self.budget
            )
        split = self.judged_split
        self._say(f"measuring the weights of iteration {self.record['iteration']} on the {split} split")
        last = self.learner.measure(split) if self.learner.judges_last else {}
        self.learner.load_weights(best)
        measured = self.learner.measure(split)
        quantity = "accuracy" if "accuracy" in measured else "loss"
        results: dict[str, Any] = {
            "seed": self.config.get("seed"),
            **costs,
            **{k: v for k, v in measured.items() if k not in ("per_task", "tasks")},
            **({f"{quantity}_last": last[quantity], "ci95_last": last["ci95"]} if last else {}),
            "best_iteration": self.record["iteration"],
            f"validation_{quantity}": self.record.get(quantity),
            "validation_ci95": self.record.get("ci95"),
            "iterations": self.iteration,
            **self.learner.facts(),
            **({"processes": self.ranks.size} if self.ranks.size > 1 else {}),
            **evaluation.environment(self.device),
            **({"sharpness": self._sharpness(split)} if self.diagnostics.sharpness else {}),
            "command": self.command,
            "config": {k: v for k, v in self.config.items() if k != "maml"},
            **{k: measured[k] for k in ("tasks", "per_task") if k in measured},
        }
        self.ranks.once(lambda: folder.write_json(self.folder / "results.json", results))
        return results

    def _sharpness(self, split: str) -> dict[str, Any]:
        """Of the weights that are measured; numbers that JSON does not know (nan, inf) are null."""
        self._say("measuring sharpness")
        asked = self.diagnostics
        found = self.learner.sharpness(split, rho=asked.rho, samples=asked.samples, tasks=asked.tasks)
        return _known(found)

    def _load_best(self) -> dict[str, Any] | None:
        if not self.record:
            return None
        try:
            return checkpoint.load(self.best, map_location=self._home)
        except (CheckpointError, FileNotFoundError) as error:
            reason = "is not there" if isinstance(error, FileNotFoundError) else "cannot be read"
            self._say(f"{self.best} {reason}: the last weights are measured in place of the best")
            return None

    def _payload(self, *, slim: bool = False) -> dict[str, Any]:
        """What a checkpoint holds; a slim one is enough to use the weights, not to continue."""
        payload: dict[str, Any] = {
            "config": plain(self.config),
            "iteration": self.iteration,
            "best": dict(self.record),
            "seconds": self.seconds,
            "dearest": self.budget.dearest,
            **self.learner.state_dict(slim=slim),
        }
        return payload if slim else {**payload, "rng": rng.state()}

    def _restore(self, payload: dict[str, Any]) -> None:
        may_change = MAY_CHANGE + (LENGTH if self.schedule == "constant" else ())
        refuse_other_config(payload["config"], plain(self.config), self.latest, may_change)
        if self.budget.passes is None and payload["iteration"] > self.budget.iterations:
            raise CheckpointError(
                f"{self.latest} is at iteration {payload['iteration']}, beyond iterations={self.budget.iterations}: "
                f"nothing to do; ask for more, or use another run=DIR"
            )
        try:
            self.learner.load_state_dict(payload)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.latest} belongs to another model or optimizer: {error}; use another run=DIR"
            ) from error
        rng.restore(payload["rng"])
        self.iteration, self.seconds, self.record = payload["iteration"], payload["seconds"], payload["best"]
        self.budget.dearest, self.saved = payload["dearest"], self.iteration
        self._say(f"resuming {self.folder} at iteration {self.iteration}{self._of()}")

    @contextmanager
    def _stop_on_signal(self, bar: progress.Progress) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into a wish that is granted between two steps, where the state is whole."""
        heard: set[int] = set()

        def ask(number: int, frame: FrameType | None) -> None:
            alone = self.ranks.size == 1
            if alone and number in heard:  # another signal may be someone else's way to say the same
                signal.default_int_handler(number, frame)
            if alone or not heard:  # torchrun passes on what a terminal has sent already, and ends all after a while
                more = "; once more stops at once, and loses what came after the last checkpoint" if alone else ""
                bar.say(f"stopping after this step{more}")
            heard.add(number)
            self._stop = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # whoever started us may have decided that we ignore one
        wanted = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
        usual = {s: signal.signal(s, ask) for s in wanted}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _say(self, message: str) -> None:
        if not self.quiet:
            progress.say(message)


def refuse_other_config(
    saved: Config, wanted: Config, path: Path, may_change: tuple[str, ...] = MAY_CHANGE + LENGTH
) -> None:
    """Raise CheckpointError naming the keys in which a checkpoint's config differs from the wanted one."""
    old, new = ({k: v for k, v in flatten(c).items() if k not in may_change} for c in (saved, wanted))
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    # what the meta-learner is built from follows from the other keys: name it only if nothing else differs
    differing = [k for k in differing if not k.startswith("maml.")] or differing
    if differing:
        pairs = ", ".join(f"{k} ({old.get(k)!r} there, {new.get(k)!r} here)" for k in differing[:8])
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise CheckpointError(
            f"{path} is of another run; it differs in {pairs}{more}: set that alike, or use another run=DIR"
        )


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {
        k: _known(v) if isinstance(v, dict) else None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in values.items()
    }


def _status(loss: float, accuracy: float | None) -> str:
    return f"loss {loss:.3f}" + ("" if accuracy is None else f"  accuracy {100 * accuracy:.1f}%")


def _number(measured: Measured) -> str:
    return f"{100 * measured.value:.1f}%" if measured.quantity == "accuracy" else f"{measured.value:.4f}"
