"""The inner loop, written once: what an engine adds is how to take a gradient and how to run many tasks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import batchnorm, functional, tree
from ..rules import Rule
from ..types import Descent, Eval, Params, Part, State, Task
from .kernels import Kernels

Constants = tuple[Params, Tensor, Tensor]
"""What a loss depends on beside the parameters that adapt: the other parameters, x and y."""

Loss = Callable[[Params, Constants], Tensor]

Gradient = Callable[[Loss, Params, Constants, bool], tuple[Params, Tensor]]
"""``(loss, params, constants, graph) -> (grads, value)``: how an engine differentiates a loss in ``params``."""

Lift = Callable[[Loss], Loss]
"""The loss of one task as that of what an engine has at a time: of one task, or of many, ``[T]``."""


Noise = Callable[[Params, tuple[int, ...]], Params]
"""``(like, key) -> standard normal tensors``: how an engine gives each task its own."""


class Here(NamedTuple):
    """Where an inner loop is: what one step hands to the next."""

    fast: Params
    """The parameters that adapt."""
    state: State
    """The rule's memory."""
    constants: Constants
    """The other parameters and the support set, which no step changes."""


Advance = Callable[["InnerLoop", Here, range], tuple[Here, list[Params]]]
"""``(loop, here, steps) -> (there, displacements)``: how an engine takes some steps, `InnerLoop.advance`."""

Judge = Callable[[Params, Constants], tuple[Tensor, Tensor | tuple[()]]]
"""``(fast, constants) -> (loss, output)``: how an engine judges on the query set, `InnerLoop.judge`."""


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
        kernels: whether the forward and the loss run within `metasam.inner.kernels.Kernels`; "higher" alone can.
        keep_eps: return the displacements, for a second pass to reuse.
        recompute: how many steps go between two that are kept for backward, see `metasam.inner.recompute`; None: the
            whole graph is kept.
        stream: number of the meta-step, a part of the key of all noise.
        repeats: whether these steps were taken before, so that no statistics are written.
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
    kernels: bool = False
    keep_eps: bool = False
    recompute: int | None = None
    stream: int = 0
    repeats: bool = False
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def differentiated(self) -> bool:
        """Whether somebody may differentiate through steps that are taken now."""
        return self.training and not self.first_order and torch.is_grad_enabled()

    @property
    def segment(self) -> int | None:
        """How many steps go between two that are kept; None: there is no graph, or all of it is kept."""
        return self.recompute if self.differentiated else None

    def forward(self, params: Params, x: Tensor, step: int, clean: bool) -> Any:
        """Call the model on a copy of x; ``step`` and ``clean`` only say which running statistics it uses."""
        return self._called(params, x.clone(), step, clean)

    def _called(self, params: Params, x: Tensor, step: int, clean: bool) -> Any:
        # a module may write to its buffers: what a task does to them must not reach the meta-model
        buffers = {k: b.clone() for k, b in self._loose_buffers.items()}
        if self.per_step is not None:
            buffers |= self.per_step.at(step, write=clean and self.training and not self.repeats)
        return functional.call(self.model, {**params, **buffers}, x, self._places)

    @cached_property
    def _loose_buffers(self) -> Params:
        """Buffers that no BatchNorm policy governs."""
        governed = tuple(f"{name}." if name else "" for name in batchnorm.norms(self.model))
        return {
            k: b
            for k, b in self.model.named_buffers()
            if self._places.get(k) and not (governed and k.startswith(governed))
        }

    @cached_property
    def _places(self) -> functional.Places:
        return functional.places(self.model)

    def loss(self, params: Params, x: Tensor, y: Tensor, step: int, clean: bool = True) -> tuple[Tensor, Any]:
        """Loss and output, to be handed copies of x and y; raises ValueError unless the loss is one number."""
        with Kernels() if self.kernels else nullcontext():
            output = self._called(params, x, step, clean)
            loss = self.loss_fn(output, y)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"expected loss_fn(output, y) to return a scalar tensor, got {got}: reduce it, e.g. loss.mean()"
            )
        return loss, output

    def run(
        self, params: Params, task: Task, advance: Advance, judge: Judge, copies: int | None = None
    ) -> tuple[Tensor, Tensor | tuple[()], Params, list[Params]]:
        """Adapt and judge: query loss, query output, adapted parameters, displacements.

        Args:
            params: where to start; all parameters of the model.
            task: one task, or whatever ``advance`` and ``judge`` take for one.
            advance: how to take steps.
            judge: how to judge.
            copies: number of tasks, where parameters that adapt are to have a task dimension.
        """
        # a view has no hooks, and autocast remembers nothing of it: a parameter's meta-gradient is all that reaches it
        params = {k: v[...] for k, v in params.items()}
        fixed = {k: v for k, v in params.items() if k not in self.adapted}
        fast = {k: v for k, v in params.items() if k in self.adapted}
        if copies is not None:
            fast = {k: v.expand(copies, *v.shape) for k, v in fast.items()}
        start = Here(fast, self.rule.init(fast), (fixed, *task.support))
        here, trace = advance(self, start, range(self.steps))
        fixed, *_ = here.constants
        return *judge(here.fast, (fixed, *task.query)), here.fast, trace

    def advance(
        self,
        here: Here,
        steps: range,
        gradient: Gradient,
        noise: Noise,
        descend: Descent,
        given: Sequence[Params] = (),
        weight: int = 1,
        lift: Lift | None = None,
    ) -> tuple[Here, list[Params]]:
        """Take some steps on one task: where they lead, and the displacements that they descended from.

        Args:
            here: where the first of them starts.
            steps: their numbers.
            gradient: how to differentiate.
            noise: how to draw.
            descend: the inner optimizer.
            given: displacements to use instead of the rule's own, one a step (Sharp-MAML, eq. 14); empty: the rule's.
            weight: how many tasks this call stands for, in the counts.
            lift: set where all tensors have a task dimension in front.
        """
        (fast, state, constants), trace = here, []
        fixed, *support = constants
        for i, step in enumerate(steps):
            at = SupportOracle(self, gradient, noise, fast, fixed, (support[0], support[1]), step, weight, lift)
            if given:
                fast = descend(fast, at(given[i]).grads)
            else:
                fast, state = self.rule(at, descend, fast, state)
            if self.keep_eps:
                trace.append(tree.detach(at.eps or {}))
        return Here(fast, state, constants), trace

    def judge(self, fast: Params, constants: Constants, weight: int = 1) -> tuple[Tensor, Tensor | tuple[()]]:
        """Query loss and query output of one task, whose query set is in ``constants``."""
        fixed, x, y = constants
        self.counts["query"] += weight
        loss, output = self.loss({**fixed, **fast}, x.clone(), y.clone(), step=self.steps)
        return loss, output if isinstance(output, Tensor) else ()


class SupportOracle:
    """`metasam.types.Oracle` of one inner step: losses and gradients on the support set."""

    def __init__(
        self,
        loop: InnerLoop,
        gradient: Gradient,
        noise: Noise,
        params: Params,
        fixed: Params,
        support: tuple[Tensor, Tensor],
        step: int,
        weight: int,
        lift: Lift | None = None,
    ) -> None:
        self.loop, self.gradient, self.draw, self.params, self.fixed = loop, gradient, noise, params, fixed
        self.support, self.step, self.weight, self.lift = support, step, weight, lift
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
        self.eps = eps
        loop = self.loop
        x, y = self._side(on)
        if part is not None:
            x, y = self._examples(part, x, y)
        x, y = x.clone(), y.clone()  # a model or a loss may write to them, and the task is the caller's and seen again
        point, fixed = (self.params if not eps else tree.add(self.params, eps)), self.fixed
        graph = graph and loop.differentiated
        if not graph:
            point, fixed = tree.detach(point), tree.detach(fixed)

        def loss(fast: Params, constants: Constants) -> Tensor:
            fixed, x, y = constants
            return loop.loss({**fixed, **fast}, x, y, self.step, clean=eps is None)[0]

        lifted = loss if self.lift is None else self.lift(loss)
        share = self._count(y) / self._count(self.support[1])
        loop.counts["support" if grad else "forward"] += self.weight * share
        if not grad:
            return Eval(lifted(point, (fixed, x, y)), {})
        grads, value = self.gradient(lifted, point, (fixed, x, y), graph)
        return Eval(value, grads)

    def _side(self, on: str) -> tuple[Tensor, Tensor]:
        """The support set; for a rule that validates, its first four fifths and, on="val", its last fifth.

        A validation part a quarter of the training part, as in Agnostic-SAM's paper. Support sets that go round by
        round through the classes, as the samplers' do, are split as evenly as can be.
        """
        x, y = self.support
        if on not in ("train", "val") or (on == "val" and not self.loop.rule.validates):
            raise ValueError(f"expected on='train', or 'val' of a rule that validates, got on={on!r}")
        if not self.loop.rule.validates:
            return x, y
        count = self._count(y)
        if count < 2:
            raise ValueError(
                f"{type(self.loop.rule).__name__} in the inner loop splits the support set: "
                f"expected at least 2 examples, got {count}"
            )
        held = max(1, count // 5)
        return self._examples(slice(-held, None) if on == "val" else slice(-held), x, y)

    def _count(self, y: Tensor) -> int:
        return y.shape[0 if self.lift is None else 1]

    def _examples(self, part: Part, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        which = part if self.lift is None else (slice(None), part)
        return x[which], y[which]

    def noise(self, like: Params, *key: int) -> Params:
        return self.draw(like, (*key, self.loop.stream, self.step))


def gradient(loss: Loss, params: Params, constants: Constants, graph: bool) -> tuple[Params, Tensor]:
    """`Gradient` by autograd: of a loss, or of each of many, which depend on their own parameters alone."""
    with torch.enable_grad():
        if not graph:
            params = {k: v.detach().requires_grad_() for k, v in params.items()}
        value = loss(params, constants)
        check_depends(value)
        total = value.sum() if value.ndim else value
        found = torch.autograd.grad(total, list(params.values()), create_graph=graph, allow_unused=True)
    return {k: g for k, g in zip(params, found, strict=True) if g is not None}, value


def check_depends(loss: Tensor) -> None:
    """Raise ValueError unless there is something to differentiate."""
    if not loss.requires_grad:
        raise ValueError(
            "expected a loss that depends on the parameters that adapt, got one without a gradient in any of them"
        )


@dataclass(frozen=True)
class SGD:
    """``w - lr g``, as a pure `metasam.types.Descent`."""

    rate: float

    def __call__(self, params: Params, grads: Params) -> Params:
        return tree.add(params, grads, -self.rate)

    def lr(self, key: str) -> float:
        """Learning rate, the same for every key."""
        return self.rate

    def momentum(self, params: Params) -> Params | None:
        """None: there is no momentum."""
        return None


class Engine(Protocol):
    """Runs the inner loop on a batch of tasks."""

    def __call__(
        self,
        loop: InnerLoop,
        params: Params,
        tasks: Task,
        given: Sequence[Params] = (),
        numbers: Sequence[int] | None = None,
    ) -> Adapted:
        """Adapt to T tasks from the same ``params`` and evaluate their query losses.

        Args:
            loop: the inner loop.
            params: all parameters of the model; the query losses are differentiable in them when ``loop.training``.
            tasks: with a leading task dimension.
            given: see `InnerLoop.advance`; stacked ``[T, ...]``.
            numbers: of the tasks within their meta-batch, a part of the key of their noise; None: 0, 1, ...
        """
        ...


def pack(nested: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of nested containers, and what puts others in their places.

    >>> tensors, unpack = pack({"mask": {"w": torch.zeros(1)}, "step": 3})
    >>> len(tensors), unpack([torch.ones(1)])
    (1, {'mask': {'w': tensor([1.])}, 'step': 3})
    """
    leaves, form = tree_flatten(nested)
    # the tensors themselves must not live on with the form, nor with them their graph
    others = [None if isinstance(v, Tensor) else (v,) for v in leaves]

    def unpack(tensors: Sequence[Tensor]) -> Any:
        next_one = iter(tensors)
        return tree_unflatten([next(next_one) if other is None else other[0] for other in others], form)

    return [v for v in leaves if isinstance(v, Tensor)], unpack


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Within: kernels that have no second derivative, or none in eval mode, are not chosen.

    These are fused attention, the fast path of transformer layers, and cuDNN's recurrent layers.
    """
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with _PLAIN_ATTENTION(), _NO_CUDNN() if recurrent else nullcontext():
        yield


@contextmanager
def _plain_attention() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Together:
    """A setting of the whole process for as long as any thread is within: each would put back what another has set."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self.setting, self.lock, self.within = setting, threading.Lock(), 0
        self.stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.within:
                self.stack.enter_context(self.setting())
            self.within += 1
        try:
            yield
        finally:
            with self.lock:
                self.within -= 1
                if not self.within:
                    self.stack.close()


_PLAIN_ATTENTION = _Together(_plain_attention)
_NO_CUDNN = _Together(lambda: torch.backends.cudnn.flags(enabled=False))
