"""A meta-learner on a task family, as a trainer takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..configure import Config, flatten
from . import evaluation
from .learner import Measured, Step, Words

if TYPE_CHECKING:
    from metasam.meta import SharpMAML
    from metasam.tasks.family import TaskFamily
    from metasam.types import Task

RESAMPLED = 2**40
"""Number of the first training task that is drawn for a validation loss; far from those that are trained on."""


@dataclass
class FewShot:
    """Meta-training: a step is a meta-batch. The unit of cost is a plain MAML meta-step of the same config.

    Args:
        maml: the meta-learner.
        family: where the tasks come from.
        optimizer: of the meta-parameters, made from ``maml.model.parameters()``.
        tasks_per_batch: tasks of one meta-update.
        validation_tasks: tasks of a validation.
        test_tasks: tasks of the final evaluation.
        device: where the tensors of the tasks go; the model is there already.
    """

    words: ClassVar[Words] = Words("training tasks", "validation tasks", "query {} after adaptation")
    judges_last: ClassVar[bool] = False

    maml: SharpMAML
    family: TaskFamily
    optimizer: torch.optim.Optimizer
    tasks_per_batch: int = 16
    validation_tasks: int = 200
    test_tasks: int = 600
    device: torch.device | str = "cpu"

    @property
    def gradient_evaluations(self) -> float:
        """In plain MAML meta-steps."""
        return self.maml.gradient_evaluations

    @property
    def counts(self) -> dict[str, float]:
        """Gradients on support and query sets, forwards alone, counted a task."""
        return dict(self.maml.counts)

    @property
    def skipped(self) -> int:
        """Meta-steps skipped for non-finite gradients."""
        return self.maml.skipped

    def step(self, number: int) -> Step:
        """One meta-step."""
        first = number * self.tasks_per_batch
        tasks = self.family.batch("train", range(first, first + self.tasks_per_batch)).to(self.device)
        self.maml.step(tasks, self.optimizer, self._held_out(number))
        last = self.maml.last
        assert last is not None  # there was a step
        return Step(last.loss, last.accuracy, last.skipped)

    def _held_out(self, number: int) -> Task | None:
        """Tasks for an outer rule that asks for a validation loss: a quarter as many, resampled from training classes.

        Never validation classes: those choose the weights, and would no longer be held out.
        """
        if not self.maml.outer_rule.validates:
            return None
        count = max(1, self.tasks_per_batch // 4)
        first = RESAMPLED + number * count
        return self.family.batch("train", range(first, first + count)).to(self.device)

    def validate(self) -> Measured | None:
        """On validation tasks."""
        if not self.has("validation"):
            return None
        tasks = evaluation.batches(self.family, "validation", self.validation_tasks, self.tasks_per_batch, self.device)
        measured = self.maml.evaluate(tasks)
        return Measured(*evaluation.headline(measured), measured.n)

    def has(self, split: str) -> bool:
        """Whether the family has tasks in this split."""
        return evaluation.has_split(self.family, split)

    def measure(self, split: str) -> dict[str, Any]:
        """Adapting as trained and by plain gradient steps, see `metasam.training.evaluation.measure`."""
        return evaluation.measure(
            self.maml,
            self.family,
            split,
            self.test_tasks,
            per_batch=self.tasks_per_batch,
            device=self.device,
        )

    def state_dict(self, *, slim: bool = False) -> dict[str, Any]:
        """The meta-learner, the facts that a network must fit, and the optimizer."""
        family = self.family
        state: dict[str, Any] = {
            "maml": self.maml.state_dict(),
            "family": {
                "output_size": family.output_size,
                "input_shape": list(family.input_shape),
                "classification": family.classification,
            },
        }
        return state if slim else {**state, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything."""
        self.maml.load_state_dict(state["maml"])
        self.optimizer.load_state_dict(state["optimizer"])

    def load_weights(self, state: dict[str, Any]) -> None:
        """The meta-learner."""
        self.maml.load_state_dict(state["maml"])

    def facts(self) -> dict[str, Any]:
        """The engine."""
        return {"engine": self.maml.engine_used}

    def title(self, config: Config) -> str:
        """Tasks, variant and seed."""
        flat = flatten(config)
        ways = flat.get("ways") if self.family.classification else None
        parts = [
            f"{flat['name']}" if "name" in flat else "",
            f"{ways}-way {flat['shots']}-shot" if ways and "shots" in flat else "",
            f"SAM in the loop: {flat['variant']}" if "variant" in flat else "",
            f"seed {flat['seed']}" if "seed" in flat else "",
        ]
        return ", ".join(p for p in parts if p)
