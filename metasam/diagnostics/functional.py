"""A loss as a function of its parameters: of a network on batches, of a closure on live weights, of several losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import batchnorm as norms
from .. import tree
from ..functional import call, judging, places
from ..types import Eval, Params

Loss = Callable[[Params], Tensor]
"""A 0-dim tensor, differentiable in the parameters that it is given."""


def weights(model: nn.Module) -> Params:
    """Copies of the trainable parameters, by name."""
    return {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}


def gradient(loss: Loss, params: Params) -> Eval:
    """The loss and its gradient at ``params``, as constants; a parameter that it does not depend on has no key."""
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    with torch.enable_grad():
        return _evaluated(loss(leaves), leaves)


def _evaluated(value: Tensor, leaves: Params) -> Eval:
    if not isinstance(value, Tensor) or value.ndim != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected a loss that is a 0-dim tensor, got {got}: reduce it, e.g. loss.mean()")
    if not value.requires_grad:
        return Eval(value, {})
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    dense = {k: g.to_dense() if g.is_sparse else g for k, g in zip(leaves, found, strict=True) if g is not None}
    return Eval(value.detach(), dense)


def model_loss(
    model: nn.Module,
    loss_fn: Callable[[Any, Tensor], Tensor],
    batches: Sequence[tuple[Any, Tensor]],
    *,
    batchnorm: str = "frozen",
) -> Loss:
    """The mean loss of a network on batches, in eval mode; calling it changes nothing of the network.

    Args:
        model: called with one argument. Parameters that the loss is not given are those of the model.
        loss_fn: ``(output, y) -> scalar``, a mean over examples.
        batches: of (x, y); each counts as its number of examples, ``len(y)``.
        batchnorm: "frozen": by running statistics, as the model predicts (one without them by the batch). "batch":
            each batch by its own. Neither writes to any.

    Returns:
        A loss that holds the graph of one batch at a time; see `mean_loss` on what that means for second derivatives.

    Raises:
        ValueError: there are no batches, or no such policy.
    """
    if batchnorm not in ("frozen", "batch"):
        raise ValueError(f"expected batchnorm to be 'frozen' or 'batch', got {batchnorm!r}")
    policy = batchnorm

    def on(x: Any, y: Tensor) -> Loss:
        def loss(params: Params) -> Tensor:
            with judging(model), norms.mode(model, policy, training=False):
                at = places(model)
                # a buffer may be a parameter's tensor, and go with it
                buffers = {k: b.clone() for k, b in model.named_buffers() if at.get(k)}
                # batches are seen again, whatever a model or a loss writes to
                own = x.clone() if isinstance(x, Tensor) else x
                value: Tensor = loss_fn(call(model, {**buffers, **params}, own, at), y.clone())
            return value

        return loss

    return mean_loss([on(x, y) for x, y in batches], [len(y) for _, y in batches])


def mean_loss(losses: Sequence[Loss], sizes: Sequence[float] | None = None) -> Loss:
    """The mean of several losses, holding the graph of one at a time.

    Args:
        losses: what to average. A single one is returned as it is.
        sizes: how much each counts; None: all alike.

    Returns:
        A loss that can be differentiated once: of several, each is differentiated while the loss is evaluated, and
        backward only scales the sum.

    Raises:
        ValueError: there are none, or not as many sizes.
    """
    sizes = [1.0] * len(losses) if sizes is None else sizes
    if not losses or len(sizes) != len(losses):
        raise ValueError(f"expected at least one loss, and as many sizes, got {len(losses)} and {len(sizes)}")
    if len(losses) == 1:
        return losses[0]
    shares = [size / sum(sizes) for size in sizes]

    def evaluate(params: Params, grad: bool) -> Eval:
        total, grads = torch.zeros(()), Params()
        for one, share in zip(losses, shares, strict=True):
            found = gradient(one, params) if grad else Eval(one(params), {})
            total, grads = total.to(found.loss) + share * found.loss, tree.add(grads, found.grads, share)
        return Eval(total, grads)

    return _once(evaluate)


@contextmanager
def moved(live: Mapping[str, Tensor], values: Params) -> Iterator[None]:
    """Within: the live parameters hold ``values``; afterwards, also after an exception, what they held, bit for bit.

    Args:
        live: the tensors that a model computes with, such as ``dict(model.named_parameters())``.
        values: by name; a missing key is not moved.
    """
    home = {k: live[k].detach().clone() for k in values}
    try:
        _write(live, values)
        yield
    finally:
        _write(live, home)


@torch.no_grad()
def _write(live: Mapping[str, Tensor], values: Params) -> None:
    for k, v in values.items():
        live[k].copy_(v)


def live_loss(live: Mapping[str, Tensor], closure: Callable[[], Tensor]) -> Loss:
    """What ``closure()`` computes with the live parameters, as a function of them: they are moved for each call.

    For losses that cannot be handed their parameters, such as a meta-loss:
    ``live_loss(dict(maml.model.named_parameters()), lambda: maml.meta_loss(tasks))``.

    Args:
        live: the tensors that the closure computes with, each requiring a gradient where one is wanted.
        closure: returns a 0-dim tensor with a graph; it does not call backward, and no ``.grad`` is written.

    Returns:
        A loss that can be differentiated once: the graph is used up before the parameters are back.
    """

    def evaluate(params: Params, grad: bool) -> Eval:
        with moved(live, params), torch.set_grad_enabled(grad):
            value = closure()
            return _evaluated(value, {k: live[k] for k in params}) if grad else Eval(value.detach(), {})

    return _once(evaluate)


def _once(evaluate: Callable[[Params, bool], Eval]) -> Loss:
    def loss(params: Params) -> Tensor:
        constants = tree.detach(params)
        if not torch.is_grad_enabled() or not any(v.requires_grad for v in params.values()):
            return evaluate(constants, False).loss
        value: Tensor = _Once.apply(evaluate(constants, True), list(params), *params.values())
        return value

    return loss


class _Once(torch.autograd.Function):
    """A value whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, found: Eval, keys: list[str], *values: Tensor) -> Tensor:
        ctx.grads = [found.grads.get(k) for k in keys]
        return found.loss.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss can be differentiated once, got create_graph=True: its graph is used up; for second "
                "derivatives, use model_loss with a single batch"
            )
        return None, None, *(None if g is None else outer * g for g in ctx.grads)
