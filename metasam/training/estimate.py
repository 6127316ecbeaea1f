"""What a run will cost, from a few of its steps: ``metasam-train dry_run=true``."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from . import evaluation, progress
from .trainer import Trainer

LEAST, MOST, ENOUGH = 5, 50, 5.0
"""Timed steps at least and at most, and seconds of them that are enough."""


class Estimate(NamedTuple):
    """Seconds, memory and gradient evaluations that a run will take."""

    steps: int
    """Steps of the run."""
    timed: int
    """Steps that were timed."""
    step: float
    """Mean seconds of one."""
    begin: float
    """Seconds of the first step beyond that: choosing an engine, making its graphs, warming up."""
    validations: int
    validation: float
    """Seconds of one."""
    test: float
    """Seconds of the measurement at the end."""
    gradient_evaluations: float
    """Of the whole run, in the learner's unit."""
    peak_memory_mb: float | None
    """Of this process so far, or of its GPU."""

    @property
    def seconds(self) -> float:
        """Of the whole run, without diagnostics."""
        return self.begin + self.steps * self.step + self.validations * self.validation + self.test


def estimate(trainer: Trainer, *, quiet: bool = False) -> Estimate:
    """Train a few steps and validate once, and reckon from there; no file is written, test data are not looked at.

    The trainer's learner has moved afterwards. Steps are timed until five seconds of them have gone by, at least 5.

    Raises:
        ValueError: the budget does not pay for a single step.
    """
    learner, budget = trainer.learner, trainer.budget

    def seconds_of(step: int) -> float:
        start, spent = time.perf_counter(), learner.gradient_evaluations
        learner.step(step)
        budget.paid(learner.gradient_evaluations - spent)
        return time.perf_counter() - start

    if not quiet:
        progress.say("timing a few steps")
    first = seconds_of(0)
    spent = learner.gradient_evaluations
    times: list[float] = []
    while trainer.ranks.any(len(times) < LEAST or (len(times) < MOST and sum(times) < ENOUGH))[0]:
        times.append(seconds_of(1 + len(times)))
    step = sum(times) / len(times)
    price = (learner.gradient_evaluations - spent) / len(times)
    # the last step is the one after which the dearest no longer fits
    steps = budget.iterations if budget.passes is None else 1 + int((budget.passes - budget.dearest) / price + 1e-9)
    if not quiet:
        progress.say("timing a validation")
    start = time.perf_counter()
    measured = learner.validate()
    validation = time.perf_counter() - start
    each = 0.0 if measured is None else validation / measured.n
    return Estimate(
        steps=steps,
        timed=len(times),
        step=step,
        begin=max(0.0, first - step),
        validations=0 if measured is None else math.ceil(budget.total / trainer.evaluate_every),
        validation=validation,
        test=each * learner.judged(trainer.judged_split),
        gradient_evaluations=steps * price,
        peak_memory_mb=evaluation.environment(trainer.device)["peak_memory_mb"],
    )


def rows(found: Estimate, unit: str) -> list[tuple[str, str]]:
    """The lines of a table."""
    longest = progress.duration
    memory = "" if found.peak_memory_mb is None else f"{found.peak_memory_mb:.0f} MB"
    lines: dict[str, Any] = {
        "steps": f"{found.steps}, {found.step:.3g} s each (mean of {found.timed})",
        "first step": f"{longest(found.begin)} more",
        "validations": f"{found.validations}, {found.validation:.3g} s each",
        "test": longest(found.test),
        "in all": longest(found.seconds),
        "gradient evaluations": f"{found.gradient_evaluations:.0f} {unit}",
        "peak memory": memory,
    }
    return [(k, v) for k, v in lines.items() if v]
