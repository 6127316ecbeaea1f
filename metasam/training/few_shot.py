"""A meta-learner on a task family, as a trainer takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import diagnostics
from ..configure import Config, flatten
from . import diagnose, evaluation
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

    unit: ClassVar[str] = "x a plain MAML step"
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

    def judged(self, split: str) -> int:
        """Each task twice: adapted as trained, and by plain steps."""
        return 2 * self._number(split, self.test_tasks)

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

    def congruence(self, tasks: int) -> dict[str, float]:
        """Of the meta-gradient on the first training tasks with that on the first validation tasks."""
        if not self.has("validation"):
            return {}
        with self._unnoticed():
            losses = [self._meta_loss(split, tasks) for split in ("train", "validation")]
            return diagnose.agreement(losses, diagnostics.weights(self.maml.model))

    def sharpness(self, split: str, *, rho: float, samples: int, tasks: int) -> dict[str, Any]:
        """Of the meta-loss on the first training tasks; and, adapting to the first tasks of a split, of their losses.

        Returns:
            ``rho``, ``average_rho``, ``samples``, ``over``, ``average``, ``average_error``, ``worst``; and under
            ``adapted`` ``over``, and for the ``support`` and the ``query`` loss around the adapted weights the means
            over tasks of ``average`` and ``worst``, with ``_ci95``.
        """
        with self._unnoticed():
            params = diagnostics.weights(self.maml.model)
            found = diagnose.around(self._meta_loss("train", tasks), params, rho, samples)
            each: dict[str, list[dict[str, float]]] = {"support": [], "query": []}
            for batch in evaluation.batches(self.family, split, tasks, self.tasks_per_batch, self.device):
                for task in batch.unbind():
                    adapted = self.maml.adapt(task)
                    for side, values in each.items():
                        loss = diagnostics.model_loss(adapted, self.maml.loop.loss_fn, [getattr(task, side)])
                        values.append(diagnose.around(loss, diagnostics.weights(adapted), rho, samples))
        return {
            "rho": rho,
            "average_rho": diagnose.average_rho(params, rho),
            "samples": samples,
            "over": f"{self._number('train', tasks)} training tasks",
            **found,
            "adapted": {
                "over": f"{len(each['query'])} {split} tasks",
                **{side: diagnose.over_tasks(values) for side, values in each.items()},
            },
        }

    def _number(self, split: str, tasks: int) -> int:
        size = self.family.size(split)
        return tasks if size is None else min(tasks, size)

    def _meta_loss(self, split: str, tasks: int) -> diagnostics.Loss:
        """The meta-loss on the first tasks of a split as a function of the meta-parameters, a chunk at a time."""
        size = self.maml.chunk_size or (1 if self.maml.engine_used == "higher" else self.tasks_per_batch)
        chunks = list(evaluation.batches(self.family, split, tasks, size, self.device))
        live = {k: p for k, p in self.maml.model.named_parameters() if p.requires_grad}

        def on(chunk: Task) -> diagnostics.Loss:
            def closure() -> Tensor:
                with torch.enable_grad():  # the inner loop differentiates, whoever calls
                    return self.maml.meta_loss(chunk)

            return diagnostics.live_loss(live, closure)

        return diagnostics.mean_loss([on(c) for c in chunks], [len(c.support[1]) for c in chunks])

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Within: no dropout, norms as in training; afterwards counts, statistics and generators are what they were."""
        loop = self.maml.loop
        counts = dict(loop.counts)
        statistics = {} if loop.per_step is None else {k: b.clone() for k, b in loop.per_step.buffers.items()}
        try:
            with diagnose.unnoticed(self.maml.model):
                yield
        finally:
            loop.counts.clear()
            loop.counts.update(counts)
            for k, b in statistics.items():
                assert loop.per_step is not None  # there are statistics of it
                loop.per_step.buffers[k].copy_(b)

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
        """The engine, the threads that shared the tasks, and how long an engine took to make its graphs."""
        graphs = {} if self.maml.graphs is None else {"graph_seconds": round(self.maml.graphs.seconds, 1)}
        return {"engine": self.maml.engine_used, "workers": self.maml.workers_used, **graphs}

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
