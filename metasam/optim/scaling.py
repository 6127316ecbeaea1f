"""Gradients between backward and the rule, and between the rule and the base: scaled, sparse, clipped, swallowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .. import shards, tree
from ..types import Params

if TYPE_CHECKING:
    from .sharpness_aware import SharpnessAware


class Gate:
    """What a GradScaler takes for an optimizer, one a pass: it unscales the gradients, and steps unless one is inf."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]

    def step(self) -> bool:
        """Say that the way is free."""
        return True


class Unscaling:
    """The gradients of every pass of one step divided by the scale, by the public means of ``scaler`` alone.

    Raises:
        RuntimeError: no ``scaler.update()`` since the step before, or somebody unscales the gradients too.
    """

    def __init__(self, scaler: GradScaler, optimizer: SharpnessAware) -> None:
        self.scaler: Any = scaler
        self.optimizer = optimizer
        self.gates: list[Gate] = []

    def __call__(self, live: Params, grads: Params) -> Params:
        """The gradients of one pass, unscaled; whether they are finite shows in `passed`."""
        if not grads:
            return grads
        if not self.gates:
            self._claim()
        put(live, grads)
        self.gates.append(Gate([live[k] for k in grads]))
        self.scaler.unscale_(self.gates[-1])
        unscaled = {k: live[k].grad for k in grads}
        put(live, {})
        return unscaled  # type: ignore[return-value]

    def passed(self, agree: Callable[[bool], bool]) -> bool:
        """Whether no pass met an inf: asked once all are done, for a worker that stops early leaves the others waiting.

        The scaler takes note, and halves its scale at ``update()`` if there was one. Workers that ``agree`` keep one
        scale: those whose own passes were fine note an inf as well.
        """
        free = [self.scaler.step(gate) is True for gate in self.gates]
        agreed = agree(all(free))
        if self.gates and all(free) and not agreed:
            param = self.gates[0].param_groups[0]["params"][0]
            spoiled = torch.zeros((), device=param.device)
            spoiled.grad = torch.full((), torch.inf, device=param.device)
            self.gates.append(Gate([spoiled]))
            self.scaler.unscale_(self.gates[-1])
        return agreed

    def _claim(self) -> None:
        """Mark the optimizer as unscaled while it has no gradients: whoever does it as well until update() is told."""
        try:
            self.scaler.unscale_(self.optimizer)
            self.scaler.unscale_(self.optimizer.base)
        except RuntimeError as e:
            raise RuntimeError(
                "expected scaler.update() after each optimizer.step(closure, scaler=scaler), and neither "
                "scaler.unscale_(optimizer) nor scaler.step(optimizer) anywhere: the step unscales the gradients of "
                "each of its passes itself, and clips those it descends along with clip="
            ) from e
        # the scaler knows gates by their id until update(): they must live until then
        self.optimizer.gates = self.gates


class Sparsity:
    """Sparse gradients: dense while a rule works on them, for the base as backward made them.

    Rows are those that a train pass of this step touched, and those where the rule descends for another reason (other
    data, a memory of earlier steps).
    """

    def __init__(self) -> None:
        self.rows: Params = {}

    def dense(self, grads: Params, noted: bool) -> Params:
        """All gradients dense; which came sparse is remembered, and where ``noted`` their rows."""
        return {k: self._dense(k, g, noted) if g.is_sparse else g for k, g in grads.items()}

    def _dense(self, key: str, grad: Tensor, noted: bool) -> Tensor:
        grad = grad.coalesce()
        touched = torch.zeros(grad.shape[0], dtype=torch.bool, device=grad.device)
        touched[grad.indices()[0]] = noted
        self.rows[key] = self.rows[key] | touched if key in self.rows else touched
        return grad.to_dense()

    def restore(self, grads: Params) -> Params:
        """Those that came sparse made sparse again."""
        return {k: self._sparse(g, self.rows[k]) if k in self.rows else g for k, g in grads.items()}

    @staticmethod
    def _sparse(grad: Tensor, touched: Tensor) -> Tensor:
        rows = (touched | (grad.flatten(1) != 0).any(1)).nonzero()[:, 0]
        return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False)


def clipped(grads: Params, limit: float) -> Params:
    """The gradients as ``clip_grad_norm_`` would leave them, out of place: a rule may remember those it returned."""
    if not grads:
        return grads
    values = list(grads.values())
    if shards.any_spread(values):
        norm = tree.squared_norm(grads).sqrt()
        return tree.scale(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    home = values[0].device
    norm = torch.linalg.vector_norm(torch.stack([n.to(home) for n in torch._foreach_norm(values)]))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    if all(v.device == home for v in values):
        return dict(zip(grads, torch._foreach_mul(values, factor), strict=True))
    return {k: v * factor.to(v.device) for k, v in grads.items()}


def put(live: Params, grads: Params) -> None:
    """Set the gradients; None where there is none."""
    for k, p in live.items():
        p.grad = grads.get(k)


def warn_if_swallowed(moved: Sequence[Tensor], home: Sequence[Tensor], eps: Sequence[Tensor]) -> bool:
    """Warn where rounding of half-precision weights undoes most of a displacement; whether there was one to look at."""
    short = [t for t in zip(moved, home, eps, strict=True) if t[0].dtype.itemsize < 4]
    wanted = float(sum(e.float().square().sum().cpu() for _, _, e in short))
    if short and wanted == 0:
        return False
    # along eps: rounding moves weights the wrong way too
    arrived = float(sum(((p.float() - w.float()) * e.float()).sum().cpu() for p, w, e in short))
    if short and arrived < 0.5 * wanted:
        dtype = str(short[0][0].dtype).removeprefix("torch.")
        warnings.warn(
            f"adding to {dtype} weights rounds away {100 * (1 - arrived / wanted):.0f}% of the displacement, so that "
            "the step is hardly sharpness-aware: keep the weights in float32 and run the model under torch.autocast, "
            "or raise rho",
            stacklevel=2,
        )
    return True
