"""The inner loop, written once: what an engine adds is how to take a gradient and how to run many tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import batchnorm, tree
from ..rules import Rule
from ..types import Descent, Eval, Params, Part, Task

Constants = tuple[Params, Tensor, Tensor]
"""What a loss depends on beside the parameters that adapt: the other parameters, x and y."""

Loss = Callable[[Params, Constants], Tensor]

Gradient = Callable[[Loss, Params, Constants, bool], tuple[Params, Tensor]]
"""``(loss, params, constants, graph) -> (grads, value)``: how an engine differentiates a loss in ``params``."""


class Adapted(NamedTuple):
    """What comes out of a batch of T inner loops."""

    loss: Tensor
    """Query loss of each task, ``[T]``."""
    output: Tensor | tuple[()]
    """Query outputs, ``[T, n, ...]``; empty where the model does not return one tensor."""
    params: Params
    """Adapted parameters, ``[T, ...]``."""
    eps: list[Params]
    """The displacement that each inner step descended from, ``[T, ...]`` each; kept only when ``keep_eps``."""


@dataclass(frozen=True)
class InnerLoop:
    """Everything about the inner loop but the parameters it starts from and the tasks.

    Args:
        model: any module; its forward is called with one argument, x.
        loss_fn: ``(output, y) -> scalar``.
        rule: what one inner step is.
        lr: learning rate of the inner SGD.
        steps: number of inner steps.
        adapted: names of the parameters that adapt; the others are constants of the inner loop (ANIL).
        first_order: take inner gradients as constants (FOMAML).
        training: whether somebody differentiates the query loss; otherwise no graph outlives a step.
        policy: BatchNorm policy, see `metasam.batchnorm.POLICIES`.
        per_step: the statistics of the policy "per_step".
        keep_eps: return the displacements, for a second pass to reuse.
        counts: gradient evaluations and forwards, counted a task.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Tensor], Tensor]
    rule: Rule
    lr: float
    steps: int
    adapted: frozenset[str]
    first_order: bool = False
    training: bool = True
    policy: str = "batch"
    per_step: batchnorm.PerStep | None = None
    keep_eps: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def forward(self, params: Params, x: Tensor, step: int, clean: bool) -> Any:
        """Call the model; ``step`` and ``clean`` only say which running statistics to read or write."""
        # a module may write to its buffers: what a task does to them must not reach the meta-model
        buffers = {k: b.clone() for k, b in self._loose_buffers.items()}
        if self.per_step is not None:
            buffers |= self.per_step.at(step, write=clean and self.training)
        return functional_call(self.model, {**params, **buffers}, (x,))

    @cached_property
    def _loose_buffers(self) -> Params:
        """Buffers that no BatchNorm policy governs."""
        governed = tuple(f"{name}." if name else "" for name in batchnorm.norms(self.model))
        return {k: b for k, b in self.model.named_buffers() if not (governed and k.startswith(governed))}

    def loss(self, params: Params, x: Tensor, y: Tensor, step: int, clean: bool = True) -> tuple[Tensor, Any]:
        """Loss and output; raises ValueError unless the loss is one number."""
        output = self.forward(params, x, step, clean)
        loss = self.loss_fn(output, y)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"expected loss_fn(output, y) to return a scalar tensor, got {got}: reduce it, e.g. loss.mean()"
            )
        return loss, output

    def run(
        self, params: Params, task: Task, gradient: Gradient, descend: Descent, given: Sequence[Params], weight: int = 1
    ) -> tuple[Tensor, Tensor | tuple[()], Params, list[Params]]:
        """Adapt to one task and judge: query loss, query output, adapted parameters, displacements.

        Args:
            params: where to start; all parameters of the model.
            task: one task.
            gradient: how to differentiate.
            descend: the inner optimizer.
            given: displacements to use instead of the rule's own, one a step (Sharp-MAML, eq. 14); empty: the rule's.
            weight: how many tasks this call stands for, in the counts.
        """
        fixed = {k: v for k, v in params.items() if k not in self.adapted}
        fast = {k: v for k, v in params.items() if k in self.adapted}
        state = self.rule.init(fast)
        trace = []
        for step in range(self.steps):
            at = SupportOracle(self, gradient, fast, fixed, task.support, step, weight)
            if given:
                fast = descend(fast, at(given[step]).grads)
            else:
                fast, state = self.rule(at, descend, fast, state)
            if self.keep_eps:
                trace.append(tree.detach(at.eps or {}))
        self.counts["query"] += weight
        loss, output = self.loss({**fixed, **fast}, *task.query, step=self.steps)
        if not self.training:
            fast = tree.detach(fast)
        return loss, output if isinstance(output, Tensor) else (), fast, trace


class SupportOracle:
    """`metasam.types.Oracle` of one inner step: losses and gradients on the support set."""

    def __init__(
        self,
        loop: InnerLoop,
        gradient: Gradient,
        params: Params,
        fixed: Params,
        support: tuple[Tensor, Tensor],
        step: int,
        weight: int,
    ) -> None:
        self.loop, self.gradient, self.params, self.fixed = loop, gradient, params, fixed
        self.support, self.step, self.weight = support, step, weight
        self.eps: Params | None = None

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
        if on != "train":
            raise ValueError(f"the inner loop evaluates on the support set, on='train'; got on={on!r}")
        self.eps = eps
        loop = self.loop
        x, y = self.support if part is None else (self.support[0][part], self.support[1][part])
        point, fixed = (self.params if not eps else tree.add(self.params, eps)), self.fixed
        graph = graph and loop.training and not loop.first_order
        if not graph:
            point, fixed = tree.detach(point), tree.detach(fixed)

        def loss(fast: Params, constants: Constants) -> Tensor:
            fixed, x, y = constants
            return loop.loss({**fixed, **fast}, x, y, self.step, clean=eps is None)[0]

        loop.counts["support" if grad else "forward"] += self.weight
        if not grad:
            return Eval(loss(point, (fixed, x, y)), {})
        grads, value = self.gradient(loss, point, (fixed, x, y), graph)
        return Eval(value, grads)


def check_depends(loss: Tensor) -> None:
    """Raise ValueError unless there is something to differentiate."""
    if not loss.requires_grad:
        raise ValueError(
            "expected a loss that depends on the parameters that adapt, got one without a gradient in any of them "
            "(under torch.no_grad, use evaluate)"
        )


@dataclass(frozen=True)
class SGD:
    """``w - lr g``, as a pure `metasam.types.Descent`."""

    rate: float

    def __call__(self, params: Params, grads: Params) -> Params:
        return tree.add(params, tree.scale(grads, -self.rate))

    def lr(self, key: str) -> float:
        """Learning rate, the same for every key."""
        return self.rate

    def momentum(self, params: Params) -> Params | None:
        """None: there is no momentum."""
        return None


class Engine(Protocol):
    """Runs the inner loop on a batch of tasks."""

    def __call__(self, loop: InnerLoop, params: Params, tasks: Task, given: Sequence[Params] = ()) -> Adapted:
        """Adapt to T tasks from the same ``params`` and evaluate their query losses.

        Args:
            loop: the inner loop.
            params: all parameters of the model; the query losses are differentiable in them when ``loop.training``.
            tasks: with a leading task dimension.
            given: see `InnerLoop.run`; stacked ``[T, ...]``.
        """
        ...


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Within: kernels that have no second derivative are not chosen (fused attention; cuDNN's recurrent layers)."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), cudnn:
        yield
