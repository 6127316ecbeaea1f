"""A supervised data set as one task whose batches are numbered: what an ordinary training run learns from.

Batch ``i`` is a pure function of (seed, i), so a run resumes from a step number alone, in any process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from metasam.tasks.augment import AUGMENTATIONS
from metasam.tasks.counter import task_keys
from metasam.tasks.family import SPLITS, check_count, check_split
from metasam.tasks.labels import count_of, permutation, share
from metasam.types import Task

# streams of a seed that nothing else uses
_HOLDOUT, _TRAIN, _QUERY, _TRAIN_CHANGES, _QUERY_CHANGES = range(0x73747200, 0x73747205)

Examples = tuple[Tensor, Tensor]


class Supervised:
    """Numbered batches of a training set, and fixed validation and test sets.

    The training batch is the support of a task and a batch for validation losses its query, so rules that ask for one
    (AgnosticSAM) find it as they do in a few-shot task. Each epoch has its own permutation; its incomplete last batch
    is dropped.

    Args:
        train: inputs ``[N, ...]`` and labels ``[N]``. Images are ``[N, C, H, W]``: uint8, kept as they are and divided
            by 255 a batch at a time, or float.
        validation: to choose weights, radii and the like by; never trained on.
        test: to report on; never trained on, never chosen by.
        batch_size: examples of a training batch. A smaller training set makes batches of the whole set.
        seed: of the order, the held-out part and the augmentation.
        holdout: share of the training set that is not trained on and makes the query batches, each class in
            proportion; a class of few may have none. 0: query batches are drawn from the training set, in an order of
            their own.
        val_fraction: size of a query batch, as a share of ``batch_size``, at least one example.
        augment: "crop_flip" (see `metasam.tasks.augment`) for training and query batches; None: none.
        mean: subtracted from inputs, after division by 255 where that applies; broadcasts against an input.
        std: inputs are divided by it after that.
        classes: number of classes; None: one more than the largest label.
        name: of the data.
        description: further facts for `describe`, plain values.

    Attributes:
        output_size: number of classes.
        input_shape: shape of one example.
        mean: what inputs are scaled by, None for nothing; see `scaled_like`.
        std: likewise.
        batch_size: examples in a training batch.
        val_batch_size: examples in a query batch.
        steps_per_epoch: training batches in an epoch.

    Raises:
        ValueError: inputs or labels do not fit this description, or a part has no examples.

    >>> x, y = torch.randn(100, 5), torch.arange(100) % 4
    >>> data = Supervised((x[:60], y[:60]), (x[60:80], y[60:80]), (x[80:], y[80:]), batch_size=16)
    >>> task = data.batch(step=7)
    >>> task.support[0].shape, task.query[0].shape, data.steps_per_epoch
    (torch.Size([16, 5]), torch.Size([4, 5]), 3)
    """

    classification = True

    def __init__(
        self,
        train: tuple[Any, Any],
        validation: tuple[Any, Any],
        test: tuple[Any, Any],
        *,
        batch_size: int = 128,
        seed: int = 0,
        holdout: float = 0.0,
        val_fraction: float = 0.25,
        augment: str | None = None,
        mean: Any = None,
        std: Any = None,
        classes: int | None = None,
        name: str = "supervised",
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self._asked = check_count("batch_size", batch_size)
        self.seed = check_count("seed", seed, least=0)
        if not _number(holdout) or not 0 <= holdout < 1:
            raise ValueError(f"expected holdout to be 0 (none) or a share below 1, got holdout={holdout!r}")
        if not _number(val_fraction) or not 0 < val_fraction <= 1:
            raise ValueError(f"expected val_fraction above 0 and at most 1, got val_fraction={val_fraction!r}")
        if augment is not None and augment not in AUGMENTATIONS:
            raise ValueError(f"expected augment to be one of {', '.join(AUGMENTATIONS)} or null, got {augment!r}")
        self.name, self.holdout, self.val_fraction, self.augment = name, float(holdout), float(val_fraction), augment
        self._description = dict(description or {})
        self._data = {
            split: checked(split, *pair) for split, pair in zip(SPLITS, (train, validation, test), strict=True)
        }
        shapes = {split: tuple(x.shape[1:]) for split, (x, _) in self._data.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"expected inputs of one shape in all splits, got {shapes}")
        self.input_shape: tuple[int, ...] = shapes["train"]
        if augment is not None and len(self.input_shape) != 3:
            raise ValueError(
                f"augment={augment} is for images [C, H, W], got inputs of {shapes['train']}: leave it out"
            )
        top = 1 + max(int(y.max()) for _, y in self._data.values())
        self.output_size = top if classes is None else check_count("classes", classes)
        if top > self.output_size:
            raise ValueError(f"expected labels below classes={classes}, got the label {top - 1}")
        self._scale_by(mean, std)
        self._divide()

    def _scale_by(self, mean: Any, std: Any) -> None:
        self.mean, self.std = (None if v is None else torch.as_tensor(v, dtype=torch.float64) for v in (mean, std))
        self._scale = {
            dtype: _affine(self.mean, self.std, 255.0 if dtype == torch.uint8 else 1.0, self.input_shape)
            for dtype in {x.dtype for x, _ in self._data.values()}
        }

    def scaled_like(self, mean: Any, std: Any) -> Supervised:
        """Return the same data scaled by ``mean`` and ``std``, such as those of the data that a network was trained on.

        Raises:
            ValueError: they do not broadcast against an input.
        """
        other = copy.copy(self)
        other._scale_by(mean, std)
        return other

    def without_holdout(self) -> Supervised:
        """Return the same data with all of the training set trained on, for rules that need no validation loss."""
        other = copy.copy(self)
        other.holdout = 0.0
        other._divide()
        return other

    def _divide(self) -> None:
        """Decide which examples each stream is made of."""
        labels = self._data["train"][1]
        everything = torch.arange(len(labels))
        self._pools = {_TRAIN: everything, _QUERY: everything}
        if self.holdout:
            count = count_of("holdout", self.holdout, len(labels), "training examples")
            held = share(labels, count, task_keys(self.seed, _HOLDOUT, [0])[0])
            self._pools = {_TRAIN: everything[~held], _QUERY: everything[held]}
            gone = sorted(set(labels.tolist()) - set(labels[~held].tolist()))
            if gone:
                raise ValueError(
                    f"holdout={self.holdout} takes all {int((labels == gone[0]).sum())} training examples of class "
                    f"{gone[0]}, which needs 1 to be trained on: set a smaller holdout, or more examples a class"
                )
        self.batch_size = min(self._asked, len(self._pools[_TRAIN]))
        self.val_batch_size = min(max(1, round(self.batch_size * self.val_fraction)), len(self._pools[_QUERY]))
        self.steps_per_epoch = len(self._pools[_TRAIN]) // self.batch_size
        self._orders: dict[int, tuple[int, Tensor]] = {}

    def batch(self, step: int) -> Task:
        """Return the task of training step ``step``, 0 or above.

        Its support is the training batch, float32 ``[batch_size, *input_shape]`` and int64 ``[batch_size]``; its query
        has ``val_batch_size`` examples.

        Raises:
            ValueError: the step is negative or not an integer.
        """
        step = check_count("step", step, least=0)
        return Task(
            support=self._draw(_TRAIN, self.batch_size, step, _TRAIN_CHANGES),
            query=self._draw(_QUERY, self.val_batch_size, step, _QUERY_CHANGES),
        )

    def _draw(self, stream: int, size: int, step: int, changes: int) -> Examples:
        pool = self._pools[stream]
        epoch, number = divmod(step, len(pool) // size)
        if self._orders.get(stream, (None,))[0] != epoch:
            self._orders[stream] = epoch, pool[permutation(task_keys(self.seed, stream, [epoch])[0], len(pool))]
        index = self._orders[stream][1][number * size : (number + 1) * size]
        x, y = self._data["train"]
        x = x[index]
        if self.augment is not None:
            x = AUGMENTATIONS[self.augment](x, task_keys(self.seed, changes, [step])[0])
        return self._scaled(x), y[index]

    def _scaled(self, x: Tensor) -> Tensor:
        factor, shift = self._scale[x.dtype]
        return x.float() if factor is None else x.to(torch.float32, copy=True).mul_(factor).add_(shift)

    def examples(self, split: str, batch_size: int = 1000) -> Iterator[Examples]:
        """Yield a split in fixed order, as inputs and labels; "train" is what is trained on, without augmentation.

        Raises:
            ValueError: the split is unknown.
        """
        x, y = self._data[check_split(split)]
        pool = self._pools[_TRAIN] if split == "train" else torch.arange(len(y))
        return ((self._scaled(x[i]), y[i]) for i in pool.split(check_count("batch_size", batch_size)))

    def size(self, split: str) -> int:
        """Return the number of examples of a split; of "train", of those that are trained on.

        Raises:
            ValueError: the split is unknown.
        """
        return len(self._pools[_TRAIN] if check_split(split) == "train" else self._data[split][1])

    def describe(self) -> dict[str, Any]:
        """Return what identifies the data and the batches, as plain values that JSON can hold."""
        held = len(self._data["train"][1]) - self.size("train")
        return {
            "name": self.name,
            **self._description,
            "classes": self.output_size,
            "input_shape": list(self.input_shape),
            "sizes": {**{split: self.size(split) for split in SPLITS}, "holdout": held},
            "holdout": self.holdout,
            "query_from": "held-out examples" if held else "training examples",
            "query_classes": len(self._data["train"][1][self._pools[_QUERY]].unique()),
            "batch_size": self.batch_size,
            "batch_is_whole_set": self.batch_size == self.size("train"),
            "val_batch_size": self.val_batch_size,
            "val_fraction": self.val_fraction,
            "steps_per_epoch": self.steps_per_epoch,
            "augment": self.augment,
            "seed": self.seed,
        }


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked(split: str, x: Any, y: Any) -> Examples:
    """Return inputs as uint8 or float32 and labels as int64.

    Raises:
        ValueError: they are not, not as many, not finite, or none.
    """
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.ndim < 2 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise ValueError(
            f"expected {split} inputs as uint8 or float [N, ...], got {x.dtype} {list(x.shape)}: "
            "images are [N, C, H, W], and uint8 is divided by 255 a batch at a time"
        )
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or (y.numel() and y.min() < 0):
        raise ValueError(f"expected {split} labels as integers [N] from 0 on, got {y.dtype} {list(y.shape)}")
    if len(x) != len(y):
        raise ValueError(f"expected one label for each of {len(x)} {split} inputs, got {len(y)} labels")
    if not len(x):
        raise ValueError(f"expected at least one {split} example, got none: make the {split} split larger")
    if x.is_floating_point():
        finite = torch.cat([part.isfinite().flatten(1).all(1) for part in x.split(1024)])
        if not finite.all():
            raise ValueError(
                f"expected finite {split} inputs, number {int(finite.long().argmin())} holds NaN or infinity: "
                "repair or drop it"
            )
        x = x.float()
    return x, y.long()


def _affine(mean: Any, std: Any, unit: float, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
    """Return what to multiply inputs by and then add; no factor: inputs stay as they are."""
    m = torch.as_tensor(0.0 if mean is None else mean, dtype=torch.float64)
    s = torch.as_tensor(1.0 if std is None else std, dtype=torch.float64)
    try:
        fits = torch.broadcast_shapes(m.shape, s.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits or not (s > 0).all() or not (m.isfinite() & s.isfinite()).all():
        raise ValueError(
            f"expected finite mean and std > 0 that broadcast against an input {list(shape)}, got {mean} and {std}"
        )
    shift = (-m / s).float()
    return (None, shift) if mean is None and std is None and unit == 1 else ((1 / (s * unit)).float(), shift)
