"""The meta-training loop: steps, validation, checkpoints, and the results of the best weights at the end.

A run can be killed at any moment and continued to the same bits: task number ``i`` of a split never depends on anything
but the seed, and everything else that a step depends on is in the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from ..checkpoint import CheckpointError
from ..configure import Config, flatten, plain
from . import evaluation, metrics, plots, progress

if TYPE_CHECKING:
    from metasam.meta import SharpMAML
    from metasam.tasks.family import TaskFamily
    from metasam.types import Task

MAY_CHANGE = ("iterations", "test_tasks", "device", "threads", "run", "resume", "tasks.root")
"""Keys of the config that may differ when a run is continued: they change how far or where it runs, not what it is."""

RESAMPLED = 2**40
"""Number of the first training task that is drawn for a validation loss; far from those that are trained on."""

PATIENCE = 25
"""Meta-steps in a row that may be skipped for non-finite gradients before a run is stopped."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """Someone asked the run to stop, and it is saved."""


@dataclass
class Trainer:
    """Meta-trains a learner on a task family, in a run folder.

    Args:
        maml: the meta-learner.
        family: where the tasks come from.
        optimizer: of the meta-parameters, made from ``maml.model.parameters()``.
        folder: the run folder; made if it is not there.
        iterations: meta-updates.
        tasks_per_batch: tasks of one meta-update.
        evaluate_every: iterations between two validations, each followed by a checkpoint.
        validation_tasks: tasks of a validation.
        test_tasks: tasks of the final evaluation.
        checkpoint_seconds: a checkpoint is also saved when the last one is older than this.
        config: what to record with the run and to compare when it is continued; plain nested values.
        command: how the run was started, for the record and for advice.
        device: where the tensors of the tasks go; the model is there already.
        quiet: say nothing.
    """

    maml: SharpMAML
    family: TaskFamily
    optimizer: torch.optim.Optimizer
    folder: Path
    iterations: int = 1000
    tasks_per_batch: int = 16
    evaluate_every: int = 100
    validation_tasks: int = 200
    test_tasks: int = 600
    checkpoint_seconds: float = 60.0
    config: Config = field(default_factory=dict)
    command: str = ""
    device: torch.device | str = "cpu"
    quiet: bool = False

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.latest, self.best = self.folder / "checkpoint.pt", self.folder / "best.pt"
        self.iteration, self.seconds = 0, 0.0
        self.record: dict[str, Any] = {}  # of the best validation so far
        self._validates = evaluation.has_split(self.family, "validation")
        self._stop = False

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the end, then measure the best weights; returns what is written to ``results.json``.

        Args:
            resume: continue from the checkpoint in the run folder if there is one.

        Raises:
            CheckpointError: the folder holds a run and ``resume`` is False; its checkpoint is of another config or
                cannot be read; a checkpoint cannot be saved.
            Interrupted: someone pressed Ctrl-C (or the process was asked to terminate); the run is saved.
            FloatingPointError: too many meta-steps in a row had non-finite gradients.
        """
        self._make_folder()
        with _alone(self.folder):
            self._prepare(resume)
            self._train()
            return self._finish()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else error
            raise CheckpointError(
                f"cannot write to the run folder {self.folder}: {reason}; choose another with run=DIR"
            ) from error

    def _prepare(self, resume: bool) -> None:
        if checkpoint.exists(self.latest):
            if not resume:
                raise CheckpointError(
                    f"{self.folder} holds a run already, and nothing of it is overwritten: resume=true continues it, "
                    "run=DIR puts this one elsewhere"
                )
            self._restore()
        elif resume:
            self._say(f"nothing to resume in {self.folder}: starting afresh")
        checkpoint.write_text(self.folder / "config.yaml", _yaml(self.config))

    def _train(self) -> None:
        saved = began = time.monotonic()
        before = self.seconds
        in_a_row = 0
        title = self.folder.name
        with (
            metrics.Metrics(self.folder, self.iteration) as log,
            progress.show(title, self.iterations, self.iteration, quiet=self.quiet) as bar,
            self._stop_on_signal(bar),
        ):
            shown = ""
            while self.iteration < self.iterations:
                first = self.iteration * self.tasks_per_batch
                tasks = self.family.batch("train", range(first, first + self.tasks_per_batch)).to(self.device)
                self.maml.step(tasks, self.optimizer, self._held_out())
                self.iteration += 1
                last = self.maml.last
                assert last is not None  # there was a step
                in_a_row = in_a_row + 1 if last.skipped else 0
                line = {"loss": last.loss, "accuracy": last.accuracy}
                due = self.iteration % self.evaluate_every == 0 or self.iteration == self.iterations
                self.seconds = before + time.monotonic() - began
                if due and self._validates:
                    line |= self._validate()
                    shown = "  validation " + _number(line)
                self.seconds = before + time.monotonic() - began
                log.write(
                    self.iteration,
                    **line,
                    gradient_evaluations=self.maml.gradient_evaluations,
                    skipped=self.maml.skipped,
                    seconds=round(self.seconds, 3),
                )
                bar.update(self.iteration, _status(last.loss, last.accuracy) + shown)
                if due or self._stop or time.monotonic() - saved > self.checkpoint_seconds:
                    log.flush()
                    checkpoint.save(self._payload(), self.latest, keep_previous=True)
                    saved = time.monotonic()
                if in_a_row >= PATIENCE:
                    raise FloatingPointError(
                        f"{PATIENCE} meta-steps in a row, up to iteration {self.iteration}, were skipped: expected "
                        "finite gradients, got nan or inf; lower inner.lr, optim.lr or the radius, "
                        "or look for NaN in the data"
                    )
                if self._stop:
                    raise Interrupted(f"stopped at iteration {self.iteration} of {self.iterations}, and saved")

    def _held_out(self) -> Task | None:
        """Tasks for an outer rule that asks for a validation loss: a quarter as many, resampled from training classes.

        Never validation classes: those choose the weights, and would no longer be held out.
        """
        if not self.maml.outer_rule.validates:
            return None
        count = max(1, self.tasks_per_batch // 4)
        first = RESAMPLED + self.iteration * count
        return self.family.batch("train", range(first, first + count)).to(self.device)

    def _validate(self) -> dict[str, float]:
        """Measure on validation tasks, and keep the weights if they are the best so far."""
        tasks = evaluation.batches(self.family, "validation", self.validation_tasks, self.tasks_per_batch, self.device)
        measured = self.maml.evaluate(tasks)
        quantity, value, half = evaluation.headline(measured)
        better = self.record.get(quantity)
        if value == value and (better is None or (value > better if quantity == "accuracy" else value < better)):
            self.record = {"iteration": self.iteration, quantity: value, "ci95": half, "n": measured.n}
            checkpoint.save(self._payload(slim=True), self.best)
        return {f"validation_{quantity}": value, "validation_ci95": half}

    def _finish(self) -> dict[str, Any]:
        """Write the learning curve and the results of the best weights."""
        if not self.record or not self.best.exists():  # without validation tasks the last weights count
            self.record = self.record or {"iteration": self.iteration}
            checkpoint.save(self._payload(slim=True), self.best)
        costs = {
            "seconds": round(self.seconds, 1),
            "gradient_evaluations": self.maml.gradient_evaluations,
            "counts": dict(self.maml.counts),
            "skipped": self.maml.skipped,
        }
        plots.learning_curve(metrics.read(self.folder), self.folder / "learning_curve.png", self._title())
        split = next((s for s in ("test", "validation") if evaluation.has_split(self.family, s)), "train")
        self._say(f"measuring the weights of iteration {self.record['iteration']} on {split} tasks")
        self.maml.load_state_dict(checkpoint.load(self.best, map_location=self.device)["maml"])
        measured = evaluation.measure(
            self.maml, self.family, split, self.test_tasks, per_batch=self.tasks_per_batch, device=self.device
        )
        quantity = "accuracy" if "accuracy" in measured else "loss"
        results = {
            "seed": self.config.get("seed"),
            **costs,
            **{k: v for k, v in measured.items() if k not in ("per_task", "tasks")},
            "best_iteration": self.record["iteration"],
            f"validation_{quantity}": self.record.get(quantity),
            "validation_ci95": self.record.get("ci95"),
            "iterations": self.iteration,
            "engine": self.maml.engine_used,
            **evaluation.environment(self.device),
            "command": self.command,
            "config": {k: v for k, v in self.config.items() if k != "maml"},
            "tasks": measured["tasks"],
            "per_task": measured["per_task"],
        }
        write_json(self.folder / "results.json", results)
        return results

    def _title(self) -> str:
        return describe(self.config if self.family.classification else {**self.config, "ways": None})

    def _payload(self, *, slim: bool = False) -> dict[str, Any]:
        """What a checkpoint holds; a slim one is enough to use the weights, not to continue."""
        family = self.family
        payload: dict[str, Any] = {
            "config": plain(self.config),
            "iteration": self.iteration,
            "maml": self.maml.state_dict(),
            "best": dict(self.record),
            "seconds": self.seconds,
            "family": {
                "output_size": family.output_size,
                "input_shape": list(family.input_shape),
                "classification": family.classification,
            },
        }
        if not slim:
            payload |= {"optimizer": self.optimizer.state_dict(), "rng": _rng_state()}
        return payload

    def _restore(self) -> None:
        payload, warning = checkpoint.load_latest(self.latest, map_location=self.device)
        if warning:
            self._say(warning)
        refuse_other_config(payload["config"], plain(self.config), self.latest)
        if payload["iteration"] > self.iterations:
            raise CheckpointError(
                f"{self.latest} is at iteration {payload['iteration']}, beyond iterations={self.iterations}: "
                f"nothing to do; ask for more, or use another run=DIR"
            )
        try:
            self.maml.load_state_dict(payload["maml"])
            self.optimizer.load_state_dict(payload["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.latest} belongs to another model or optimizer: {error}; use another run=DIR"
            ) from error
        _set_rng_state(payload["rng"])
        self.iteration, self.seconds, self.record = payload["iteration"], payload["seconds"], payload["best"]
        self._say(f"resuming {self.folder} at iteration {self.iteration} of {self.iterations}")

    @contextmanager
    def _stop_on_signal(self, bar: progress.Progress) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into a wish that is granted between two steps, where the state is whole."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._stop:
                signal.default_int_handler(number, frame)
            self._stop = True
            bar.say("stopping after this step; once more stops at once, and loses what came after the last checkpoint")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _say(self, message: str) -> None:
        if not self.quiet:
            progress.say(message)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within: no other process trains in this folder. The lock goes with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is training in {folder}: wait for it, or choose another folder with run=DIR"
            ) from None
        except OSError:  # a file system that knows no locks
            pass
        yield
    finally:
        os.close(handle)


def refuse_other_config(saved: Config, wanted: Config, path: Path) -> None:
    """Raise CheckpointError naming the keys in which a checkpoint's config differs from the wanted one."""
    old, new = ({k: v for k, v in flatten(c).items() if k not in MAY_CHANGE} for c in (saved, wanted))
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    # what the meta-learner is built from follows from the other keys: name it only if nothing else differs
    differing = [k for k in differing if not k.startswith("maml.")] or differing
    if differing:
        pairs = ", ".join(f"{k} ({old.get(k)!r} there, {new.get(k)!r} here)" for k in differing[:8])
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise CheckpointError(
            f"{path} is of another run; it differs in {pairs}{more}: set that alike, or use another run=DIR"
        )


def describe(config: Config) -> str:
    """A short description of a run for headings, from its config; empty if that says too little."""
    flat = flatten(config)
    parts = [
        f"{flat['name']}" if "name" in flat else "",
        f"{flat['ways']}-way {flat['shots']}-shot" if flat.get("ways") and "shots" in flat else "",
        f"SAM in the loop: {flat['variant']}" if "variant" in flat else "",
        f"seed {flat['seed']}" if "seed" in flat else "",
    ]
    return ", ".join(p for p in parts if p)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write results to read, whole or not at all; ``per_task`` stays on one line."""
    lines = [f"  {json.dumps(k)}: {_json(k, v)}" for k, v in values.items()]
    checkpoint.write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _json(key: str, value: Any) -> str:
    if key == "per_task":
        return json.dumps([round(v, 6) for v in value])
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def _yaml(config: Config) -> str:
    try:
        import yaml
    except ImportError:
        return json.dumps(plain(config), indent=2) + "\n"  # which is YAML as well
    return str(yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=False))


def _rng_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, list(words), gauss],
    }
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in sys.modules and "numpy" in state:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _status(loss: float, accuracy: float | None) -> str:
    return f"loss {loss:.3f}" + ("" if accuracy is None else f"  accuracy {100 * accuracy:.1f}%")


def _number(line: dict[str, Any]) -> str:
    if "validation_accuracy" in line:
        return f"{100 * line['validation_accuracy']:.1f}%"
    return f"{line['validation_loss']:.4f}"
