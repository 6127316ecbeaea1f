"""The vocabulary: parameters, one gradient evaluation, the two callables that a rule receives, and a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Tensors by name. As gradients, a missing key means "no gradient in this pass": add = union, dot = intersection."""

Part = slice | Tensor
"""Which examples of a batch (or tasks of a meta-batch) an evaluation covers: a slice or an index tensor."""

State = dict[str, Any]
"""A rule's memory: named slots, each parameters or a number."""


class Eval(NamedTuple):
    """One evaluation: ``loss`` is a scalar; ``losses`` are per example, ``[B]``, where the closure gives them."""

    loss: Tensor
    grads: Params
    losses: Tensor | None = None


class Oracle(Protocol):
    """The ability to evaluate a loss and its gradient anywhere near the step's base point."""

    def __call__(
        self,
        eps: Params | None = None,
        on: str = "train",
        *,
        part: Part | None = None,
        local: bool = False,
        grad: bool = True,
        graph: bool = True,
    ) -> Eval:
        """Evaluate at ``base point + eps``.

        Args:
            eps: displacement from the base point, by parameter name; a missing key is not moved. None: no displacement.
            on: "train" (support set, training batch, meta-batch) or "val" (query side: held-out batch).
            part: the examples to use; None: all of them.
            local: this gradient only shapes a displacement, so in data-parallel training it may stay on its worker.
            grad: False evaluates the loss only; ``grads`` is then empty.
            graph: False promises that nobody differentiates through these gradients, which saves building their graph.
        """
        ...

    def noise(self, like: Params, *key: int) -> Params:
        """Standard normal tensors of the shapes of ``like``: the same for the same key, here and on every runtime.

        In an inner loop they also depend on the meta-step, the inner step and the task.
        """
        ...


class Descent(Protocol):
    """One update of the base optimizer, whatever it is."""

    def __call__(self, params: Params, grads: Params) -> Params:
        """Return the parameters after one update from ``params`` along ``grads``; neither argument is changed."""
        ...

    def lr(self, key: str) -> float:
        """Learning rate of parameter ``key``."""
        ...

    def momentum(self, params: Params) -> Params | None:
        """Momentum buffers (SGD) or first moments (Adam) by name; None before the first update."""
        ...


@dataclass(frozen=True)
class Task:
    """A few-shot task, or a batch of them.

    Args:
        support: (x, y) to adapt on; x is ``[n, ...]`` and y ``[n]`` (class indices) or ``[n, ...]`` (targets).
        query: (x, y) to be judged on, same layout, usually more examples.

    With a leading task dimension on all four tensors, ``[T, n, ...]``, it is a batch of T tasks.

    >>> x, y = torch.zeros(4, 5, 1, 28, 28), torch.arange(5).expand(4, 5)
    >>> batch = Task(support=(x, y), query=(x, y))
    >>> len(batch.unbind())
    4
    """

    support: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]

    def map(self, function: Any) -> Task:
        """Apply ``function`` to each of the four tensors."""
        return Task(
            (function(self.support[0]), function(self.support[1])),
            (function(self.query[0]), function(self.query[1])),
        )

    def to(self, *args: Any, **kwargs: Any) -> Task:
        """Move the tensors, as ``Tensor.to``; integer labels keep their dtype."""

        def move(t: Tensor) -> Tensor:
            moved = t.to(*args, **kwargs)
            return moved if t.is_floating_point() else moved.to(t.dtype)

        return self.map(move)

    def unbind(self) -> list[Task]:
        """Split a batch of tasks into its single tasks."""
        parts = [t.unbind() for t in (*self.support, *self.query)]
        return [Task((a, b), (c, d)) for a, b, c, d in zip(*parts, strict=True)]

    @staticmethod
    def stack(tasks: Sequence[Task]) -> Task:
        """Stack single tasks of equal shapes into a batch with a leading task dimension.

        Raises:
            ValueError: there are no tasks, or their shapes differ.
        """
        if not tasks:
            raise ValueError("expected at least one task, got none")
        columns = list(zip(*[(*t.support, *t.query) for t in tasks], strict=True))
        for name, column in zip(("support x", "support y", "query x", "query y"), columns, strict=True):
            if len({t.shape for t in column}) > 1:
                shapes = sorted({tuple(t.shape) for t in column})
                raise ValueError(f"expected tasks of one shape to stack, got {name} of shapes {shapes}")
        a, b, c, d = (torch.stack(column) for column in columns)
        return Task((a, b), (c, d))
