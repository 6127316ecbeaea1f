"""The live runtime's two callables: what a rule evaluates, and what it descends with, on the weights themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import batchnorm, noise, shards, tree
from ..rules import DirectionRule
from ..types import Eval, Params, Part, State
from .distributed import Workers
from .rng import Replay
from .scaling import Sparsity, Unscaling, clipped, put, warn_if_swallowed

if TYPE_CHECKING:
    from .sharpness_aware import SharpnessAware

Closure = Callable[..., Any]
"""``closure() -> loss``: clears gradients or not, computes the loss, calls backward. Or ``closure(part=None)``, which
returns the losses ``[B]`` of the examples of a slice or index tensor (None: all): the step takes their mean and calls
backward. Rules that evaluate parts of a batch need the second form."""


class LiveOracle:
    """`metasam.types.Oracle` on live weights: displace, call the user's closure, take the gradients, put back."""

    def __init__(
        self,
        optimizer: SharpnessAware,
        live: Params,
        closures: Mapping[str, Closure],
        scaler: GradScaler | None = None,
    ) -> None:
        self.optimizer, self.live, self.closures, self.scaler = optimizer, live, closures, scaler
        self.unscaling = None if scaler is None else Unscaling(scaler, optimizer)
        self.sparsity, self.replay = Sparsity(), Replay()
        self.first_loss: Any = None
        self.counted = False
        self.finite, self.settled = True, True
        self.doubts: list[Tensor] = []  # not finite where something was not
        self.empty = True
        self.record = batchnorm.Record()
        self.workers = Workers(optimizer.model, live, optimizer.ranks)
        self.separate: set[str] = set()
        self.sizes: dict[str, int] = {}  # examples of a batch, once seen whole

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
        closure = self.closures.get(on)
        if closure is None:
            raise TypeError(f"{self.optimizer.rule} asks for the loss on {on!r}: call step(closure, {on}=...)")
        counts = self.counts(eps, on)
        with self.around(eps, on, part, local=local, grad=grad):
            loss, losses = self._evaluate(closure, on, part, grad)
            if counts:
                self.first_loss = loss.detach() if isinstance(loss, Tensor) else loss
            value = torch.as_tensor(float("nan") if loss is None else loss).detach().reshape(())
            return self.answer(on, part, value, losses, grad)

    def counts(self, eps: Params | None, on: str) -> bool:
        """Whether BatchNorm counts the batch here: once, at undisplaced weights unless the rule never goes there."""
        return on == "train" and not self.counted and not (eps and self.optimizer.rule.clean)

    @contextmanager
    def around(
        self, eps: Params | None, on: str, part: Part | None = None, *, local: bool = False, grad: bool = True
    ) -> Iterator[None]:
        """Where an evaluation happens: at ``+ eps``, gradients cleared, BatchNorm frozen where it is not to count.

        Data-parallel workers do not synchronise a ``local`` gradient, unless they climb together.
        """
        with ExitStack() as stack:
            if eps:
                stack.enter_context(self._moved(eps))
            if self.counts(eps, on):
                self.counted = True
                stack.enter_context(self.record(self.optimizer.model))
            else:
                stack.enter_context(batchnorm.frozen(self.optimizer.model))
            if self.optimizer.same_noise:
                stack.enter_context(self.replay(on, part))
            stack.enter_context(self.workers.evaluate(local and self.optimizer.ascent == "local", grad))
            put(self.live, {})
            yield

    def answer(self, on: str, part: Part | None, loss: Tensor, losses: Tensor | None, grad: bool) -> Eval:
        """The evaluation that has just been made: takes its gradients, looks whether they are finite, counts it."""
        grads = self._take(on) if grad else {}
        self.empty = self.empty and not grads
        # a rule that descends on its own moves the base's state at once: it must know before
        if not isinstance(self.optimizer.rule, DirectionRule):
            self.finite, self.settled = self.finite and tree.is_finite(grads), False
        elif part is not None or not grad:
            # what chooses examples or weights leaves no trace in the direction
            self._doubt(list(grads.values()) if losses is None or grad else [losses])
        self._count(on, part, losses, grad)
        return Eval(loss, grads, losses)

    def _doubt(self, values: list[Tensor]) -> None:
        """Note whether they are finite, to be asked later with all the others: nothing waits for the device here."""
        self.doubts += tree.flags([shards.local(v) for v in values])
        self.settled = False

    def uncount(self) -> None:
        """Put running statistics back to before the pass that counted: its batch was of a step that is not taken."""
        self.record.restore()

    def is_finite(self) -> bool:
        """Whether every gradient so far was finite, on every worker."""
        if self.doubts:
            home = self.doubts[0].device
            spoiled = 1 - torch.stack([flag.to(home) for flag in self.doubts]).float().amin()
            spread = next((p for p in self.live.values() if shards.mesh_of(p) is not None), None)
            if spread is not None:  # workers have losses, and pieces, of their own
                spoiled = shards.total([(spread, spoiled)])
            self.doubts, self.finite = [], self.finite and not bool(spoiled)
        if not self.settled:
            self.finite, self.settled = self.workers.agree(self.finite), True
        return self.finite

    def agree(self, good: bool, state: State) -> bool:
        """Whether all workers find a step good: of one direction, they may yet remember gradients of their own."""
        return self.workers.agree(good) if slots(state) else good

    def _count(self, on: str, part: Part | None, losses: Tensor | None, grad: bool) -> None:
        counts, fraction = self.optimizer.counts, 1.0
        if losses is not None and part is None:
            self.sizes[on] = losses.numel()
        elif losses is not None and on in self.sizes:
            fraction = losses.numel() / self.sizes[on]
        kind = on if grad or on not in self.separate else "forward"
        counts[kind] = counts.get(kind, 0.0) + fraction

    def _evaluate(self, closure: Closure, on: str, part: Part | None, grad: bool) -> tuple[Any, Tensor | None]:
        """Call the closure: its loss, and the losses of the examples where it gave them."""
        if part is not None and not _takes_part(closure):
            raise TypeError(f"{self.optimizer.rule} evaluates parts of a batch: {_PART}")
        # whether the closure leaves backward to us is known once it has been called
        with torch.set_grad_enabled(grad or on not in self.separate), tree.fused(False):
            loss = closure() if part is None else closure(part=part)
            if not isinstance(loss, Tensor):
                if loss is not None and not isinstance(loss, Real):
                    raise TypeError(
                        f"expected the closure to return the loss, got {type(loss).__name__}: return the loss alone, "
                        "and keep other results in variables of your own"
                    )
                return loss, None
            if loss.ndim == 0:
                return loss, None
            if loss.requires_grad and any(p.grad is not None for p in self.live.values()):
                if loss.numel() == 1:
                    return loss, None
                raise TypeError(
                    "expected a closure that returns the losses of examples to leave backward to step, got shape "
                    f"{list(loss.shape)} after a backward: return loss.mean(), or call no backward"
                )
            if loss.ndim > 1:
                raise TypeError(f"expected a closure that returns a scalar or losses [B], got shape {list(loss.shape)}")
            mean = loss.mean()
            if mean.requires_grad:
                self.separate.add(on)
                if grad:
                    (mean if self.scaler is None else self.scaler.scale(mean)).backward()
        return mean.detach(), loss.detach()

    def noise(self, like: Params, *key: int) -> Params:
        return noise.normal(like, *key)

    @contextmanager
    def _moved(self, eps: Params) -> Iterator[None]:
        """The live weights at ``+ eps``, and afterwards where they were: copied back, since ``(w + e) - e != w``."""
        with torch.no_grad():
            weights = as_real({k: self.live[k] for k in eps})
            targets = [shards.local(w) for w in weights.values()]
            moves = [shards.local(shards.alike(e, weights[k])) for k, e in eps.items()]
            home = clones(targets)
        try:
            with torch.no_grad():
                torch._foreach_add_(targets, moves)
                if not self.optimizer.arrives:
                    self.optimizer.arrives = warn_if_swallowed(targets, home, moves)
            # autocast keeps low-precision copies of the weights, which would hide the displacement
            torch.clear_autocast_cache()
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(targets, home)
            torch.clear_autocast_cache()

    def _take(self, on: str) -> Params:
        taken = {k: shards.alike(p.grad, p) for k, p in self.live.items() if p.grad is not None}
        taken = self.workers.own(taken)
        put(self.live, {})
        if self.unscaling is not None:
            taken = self.unscaling(self.live, taken)
        # rows that only one worker has seen are not for all to update
        return as_real(self.sparsity.dense(taken, noted=on == "train" and not self.workers.quiet))

    def descend(self, grads: Params) -> None:
        """Let the base step along the gradients, clipped, and sparse where backward made sparse ones."""
        optimizer, rows = self.optimizer, self.sparsity.rows
        if optimizer.clip is not None:
            grads = clipped(grads, optimizer.clip)
        put(self.live, self.sparsity.restore(as_complex(grads, self.live)))
        try:
            optimizer.base.step()
        except RuntimeError as e:
            if not rows:
                raise
            raise RuntimeError(
                f"{type(optimizer.base).__name__} stepped on the sparse gradients of {', '.join(rows)}, and failed "
                f"({e}): use SparseAdam or SGD without weight_decay for them, or nn.Embedding(sparse=False)"
            ) from e

    def passed(self) -> bool:
        """Whether every pass so far was finite on every worker, as far as the scaler and `is_finite` looked."""
        free = self.unscaling is None or self.unscaling.passed(self.workers.agree)
        return self.is_finite() and free


_PART = (
    "write closure(part=None) that returns the losses [B] of x[part], all of them for None, and leaves backward to step"
)


def _takes_part(closure: Closure) -> bool:
    parameters = inspect.signature(closure).parameters.values()
    return any(p.name == "part" or p.kind is p.VAR_KEYWORD for p in parameters)


class LiveDescent:
    """`metasam.types.Descent` by the base optimizer: the live weights are put back, the base's state moves on."""

    def __init__(self, base: Optimizer, live: Params, at: LiveOracle) -> None:
        self.base, self.live, self.at = base, live, at

    def __call__(self, params: Params, grads: Params) -> Params:
        home = self._weights()
        try:
            copy(self.live, params)
            # not once something was not finite: the step will be skipped, and the base's state is to stay
            if self.at.is_finite():
                self.at.descend(grads)
            return self._weights()
        finally:
            copy(self.live, home)

    def _weights(self) -> Params:
        return {k: w.clone() for k, w in as_real(tree.detach(self.live)).items()}

    def lr(self, key: str) -> float:
        """Learning rate of the group that holds parameter ``key``."""
        return next(g["lr"] for g in self.base.param_groups if any(p is self.live[key] for p in g["params"]))

    def momentum(self, params: Params) -> Params | None:
        """Momentum buffers (SGD) or first moments (Adam), copied; None before the first update."""
        slots = ("momentum_buffer", "exp_avg")
        states = {k: self.base.state.get(p, {}) for k, p in self.live.items() if k in params}
        found = {k: s[n].clone() for k, s in states.items() for n in slots if s.get(n) is not None}
        return as_real(found) or None


def slots(state: State) -> list[Params]:
    """The tensors that a rule remembers."""
    return [v for v in state.values() if isinstance(v, dict)]


def copy(live: Params, values: Params) -> None:
    """Set the weights."""
    if not live:  # all are frozen
        return
    weights = as_real(tree.detach(live))
    pieces = [shards.local(shards.alike(values[k], w)) for k, w in weights.items()]
    torch._foreach_copy_([shards.local(w) for w in weights.values()], pieces)


def as_real(params: Params) -> Params:
    """Complex tensors as pairs of real numbers, sharing memory, which is what torch's optimizers take them for.

    >>> as_real({"w": torch.zeros(3, dtype=torch.complex64)})["w"].shape
    torch.Size([3, 2])
    """
    if not any(p.is_complex() for p in params.values()):
        return params
    return {k: torch.view_as_real(p.resolve_conj()) if p.is_complex() else p for k, p in params.items()}


def as_complex(grads: Params, like: Params) -> Params:
    """Those whose parameter is complex made complex again."""
    if not any(p.is_complex() for p in like.values()):
        return grads
    return {k: torch.view_as_complex(g.contiguous()) if like[k].is_complex() else g for k, g in grads.items()}


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies, in one operation where torch has it."""
    return list(torch._foreach_clone(tensors)) if hasattr(torch, "_foreach_clone") else [t.clone() for t in tensors]
