"""A network on a train/validation split, as a trainer takes it: one task, whose one loop the rule steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import diagnostics
from ..configure import Config, flatten
from ..functional import judging
from ..meta import COST
from ..optim import SharpnessAware
from ..types import Part
from . import diagnose
from .learner import Measured, Step, Words

if TYPE_CHECKING:
    from metasam.tasks import Supervised as Data


@dataclass
class Supervised:
    """Supervised training: a step is a batch. The unit of cost is forward and backward over one training batch.

    Args:
        model: the network, trained in place.
        loss_fn: ``(output, y) -> loss``. If it takes ``reduction="none"``, as torch's do, rules that need the losses of
            single examples work, unless it was given (as a ``functools.partial``) another reduction than the mean over
            all examples: ``reduction="sum"``, ``weight`` or ``ignore_index``.
        optimizer: the rule around its base.
        data: the streams of training and validation batches, and the examples to judge on.
        device: where batches go; the model is there already.
    """

    unit: ClassVar[str] = "x a training batch"
    words: ClassVar[Words] = Words("training batches", "validation examples", "{}")
    judges_last: ClassVar[bool] = True

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: SharpnessAware
    data: Data
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self._by_example = _gives_each(self.loss_fn) and _is_mean(self.loss_fn)

    @property
    def counts(self) -> dict[str, float]:
        """Gradients of training and validation batches, and forwards alone, each in batches of its stream."""
        return dict(self.optimizer.counts)

    @property
    def gradient_evaluations(self) -> float:
        """In full training batches, forward and backward; a forward alone is a third, a smaller batch its share."""
        counts = self.optimizer.counts
        share = self.data.val_batch_size / self.data.batch_size
        return counts.get("train", 0.0) + share * counts.get("val", 0.0) + COST["forward"] * counts.get("forward", 0.0)

    @property
    def skipped(self) -> int:
        """Steps skipped for non-finite gradients."""
        return self.optimizer.skipped

    def step(self, number: int) -> Step:
        """One step of the rule."""
        task = self.data.batch(number).to(self.device)
        self.model.train()
        outputs: list[Tensor] = []
        before = self.optimizer.skipped
        others: dict[str, Any] = {"val": self._closure(*task.query, [])} if self.optimizer.rule.validates else {}
        try:
            loss = self.optimizer.step(self._closure(*task.support, outputs), **others)
        except TypeError as error:
            if self._by_example or "losses [B]" not in str(error):
                raise
            raise TypeError(
                f"{type(self.optimizer.rule).__name__} needs the losses of single examples, expected a loss that is "
                f"their mean and gives them as losses [B] for reduction='none', got {_called(self.loss_fn)}: "
                "use a function such as torch.nn.functional.cross_entropy without reduction, weight and ignore_index, "
                "or another rule"
            ) from error
        return Step(float(loss), _accuracy(outputs[0], task.support[1]), self.optimizer.skipped > before)

    def _closure(self, x: Tensor, y: Tensor, outputs: list[Tensor]) -> Callable[..., Tensor]:
        """The loss of a batch, as `SharpnessAware.step` takes it; the output of its first call is kept."""

        def losses(part: Part | None = None) -> Tensor:
            output = self.model(x if part is None else x[part])
            outputs[:] = outputs or [output.detach()]
            values = self.loss_fn(output, y if part is None else y[part], reduction="none")
            return values.flatten(1).mean(1) if values.ndim > 1 else values

        def loss() -> Tensor:
            output = self.model(x)
            outputs[:] = outputs or [output.detach()]
            value = self.loss_fn(output, y)
            value.backward()
            return value

        return losses if self._by_example else loss

    def validate(self) -> Measured | None:
        """On the validation examples."""
        if not self.has("validation"):
            return None
        return _judge(self.model, self.loss_fn, self.data, "validation", self.device)[0]

    def has(self, split: str) -> bool:
        """Whether there are examples in this split."""
        return self.data.size(split) > 0

    def judged(self, split: str) -> int:
        """Each example twice: by the best weights and by the last."""
        return 2 * self.data.size(split)

    def measure(self, split: str) -> dict[str, Any]:
        """On the examples of a split, see `measure`."""
        return measure(self.model, self.loss_fn, self.data, split, self.device)

    def congruence(self, tasks: int) -> dict[str, float]:
        """Of the gradients in eval mode on fixed training and validation examples, for so many batches of each."""
        if not self.has("validation"):
            return {}
        with diagnose.unnoticed(self.model):
            losses = [self._loss(split, tasks)[0] for split in ("train", "validation")]
            return diagnose.agreement(losses, diagnostics.weights(self.model))

    def sharpness(self, split: str, *, rho: float, samples: int, tasks: int) -> dict[str, Any]:
        """Of the training loss in eval mode, without augmentation, on fixed examples.

        Returns:
            ``rho``, ``average_rho``, ``samples``, ``over``, ``average``, ``average_error``, ``worst``.
        """
        with diagnose.unnoticed(self.model):
            params = diagnostics.weights(self.model)
            loss, count = self._loss("train", tasks)
            return {
                "rho": rho,
                "average_rho": diagnose.average_rho(params, rho),
                "samples": samples,
                "over": f"{count} training examples",
                **diagnose.around(loss, params, rho, samples),
            }

    def _loss(self, split: str, tasks: int) -> tuple[diagnostics.Loss, int]:
        """The mean loss on at most ``tasks`` batches of examples, drawn once and for all, and how many they are."""
        order = torch.randperm(self.data.size(split), generator=torch.Generator().manual_seed(0))
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[: tasks * self.data.batch_size]] = True
        xs, ys, first = [], [], 0
        for x, y in self.data.examples(split):
            rows = chosen[first : first + len(y)]
            xs.append(x[rows])
            ys.append(y[rows])
            first += len(y)
        parts = [torch.cat(part).to(self.device).split(self.data.batch_size) for part in (xs, ys)]
        return diagnostics.model_loss(self.model, self.loss_fn, list(zip(*parts, strict=True))), int(chosen.sum())

    def state_dict(self, *, slim: bool = False) -> dict[str, Any]:
        """Weights and buffers, the facts that a network must fit, and the optimizer with its rule."""
        data = self.data
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "gradient_evaluations": self.gradient_evaluations,
            "data": {
                "output_size": data.output_size,
                "input_shape": list(data.input_shape),
                "classification": data.classification,
                **{k: getattr(data, k) for k in ("mean", "std") if hasattr(data, "scaled_like")},
            },
        }
        return state if slim else {**state, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def load_weights(self, state: dict[str, Any]) -> None:
        """The network."""
        self.model.load_state_dict(state["model"])

    def facts(self) -> dict[str, Any]:
        """The rule, as it was built."""
        return {"rule": repr(self.optimizer.rule)}

    def title(self, config: Config) -> str:
        """Data, rule and seed."""
        flat = flatten(config)
        parts = [
            f"{flat['name']}" if "name" in flat else "",
            str(flat.get("method") or type(self.optimizer.rule).__name__),
            f"seed {flat['seed']}" if "seed" in flat else "",
        ]
        return ", ".join(p for p in parts if p)


def measure(
    model: nn.Module, loss_fn: Callable[..., Tensor], data: Data, split: str, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Accuracy (regression: loss) of a network in eval mode on a split, with a normal 95% interval over its examples.

    Returns:
        ``accuracy``, ``ci95``, ``n``, ``loss``, ``over`` (which examples), ``split``, ``transductive``, and ``tasks``,
        which describes the data.
    """
    judged, loss = _judge(model, loss_fn, data, split, device)
    found: dict[str, Any] = {judged.quantity: judged.value, "ci95": judged.half, "n": judged.n}
    return {
        **found,
        "loss": loss,
        "over": f"{judged.n} {split} examples",
        "split": split,
        "transductive": False,
        "tasks": data.describe(),
    }


def _judge(
    model: nn.Module, loss_fn: Callable[..., Tensor], data: Data, split: str, device: torch.device | str
) -> tuple[Measured, float]:
    losses, hits, outputs, labels = [], [], [], []
    with torch.no_grad(), judging(model):
        for x, y in data.examples(split):
            x, y = x.to(device), y.to(device)
            output = model(x)
            each = loss_fn(output, y, reduction="none") if _gives_each(loss_fn) else loss_fn(output, y)
            losses.append(each.flatten(1).mean(1) if each.ndim > 1 else each.expand(len(y)))
            if data.classification:
                hits.append((output.argmax(1) == y).double())
                if not _is_mean(loss_fn):
                    outputs.append(output)
                    labels.append(y)
        # what is no mean over examples has to see them all
        whole = [loss_fn(torch.cat(outputs), torch.cat(labels))] if outputs else losses
    loss = float(torch.cat([v.double().flatten() for v in whole]).mean())
    values = torch.cat(hits or losses).double()
    half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Measured("accuracy" if hits else "loss", float(values.mean()), half, len(values)), loss


def _gives_each(loss_fn: Callable[..., Tensor]) -> bool:
    """Whether a loss can be had for each example."""
    return not isinstance(loss_fn, nn.Module) and "reduction" in inspect.signature(loss_fn).parameters


def _is_mean(loss_fn: Callable[..., Tensor]) -> bool:
    """Whether a loss of a batch is the mean of those of its examples, as far as what it was made with tells."""
    given = loss_fn.__dict__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "keywords", {})
    given = {**given, **getattr(loss_fn, "_buffers", {})}
    others = ("weight", "size_average", "reduce")  # the last two as torch once spelt a reduction
    index = given.get("ignore_index")
    ignores = index is not None and index >= 0  # no label is below 0
    return given.get("reduction", "mean") == "mean" and not ignores and all(given.get(k) is None for k in others)


def _called(loss_fn: Callable[..., Tensor]) -> str:
    function = getattr(loss_fn, "func", loss_fn)
    given = ", ".join(f"{k}=..." for k in getattr(loss_fn, "keywords", {}))
    return getattr(function, "__name__", type(function).__name__) + (f" with {given}" if given else "")


def _accuracy(output: Tensor, y: Tensor) -> float | None:
    if y.is_floating_point() or output.ndim != y.ndim + 1:
        return None
    return float((output.argmax(1) == y).float().mean())
