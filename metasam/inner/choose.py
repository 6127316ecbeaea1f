"""Which engine takes a model, and what to change when it does not."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch
from torch import Tensor, nn

from ..types import Params, Task
from . import higher, vmap
from .loop import InnerLoop


def choose(wanted: str, loop: InnerLoop, params: Params, batch: Task) -> tuple[str, str]:
    """The engine to use and why, tried on the first task of ``batch``.

    Args:
        wanted: "higher", "vmap" or "auto" (vmap where the model allows).
        loop: the inner loop.
        params: all parameters of the model.
        batch: tasks with a leading task dimension.

    Raises:
        ValueError: vmap was asked for and cannot take the model; the message names the module.
    """
    if wanted == "higher":
        return "higher", "as asked"
    against = _known(loop) or _trial(loop, params, batch.map(lambda t: t[:1]))
    if against and wanted == "vmap":
        raise ValueError(f"engine='vmap' cannot take this model: {against}")
    if against:
        return "higher", against
    return "vmap", "as asked" if wanted == "vmap" else "the model allows it"


def _known(loop: InnerLoop) -> str | None:
    for name, module in loop.model.named_modules():
        if isinstance(module, nn.RNNBase):
            return (
                f"{type(module).__name__} {name!r} has no vmap rule; use engine='higher', "
                "or write the recurrence with nn.Linear"
            )
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return f"Embedding {name!r} would train its padding_idx under vmap; use engine='higher'"
        if any(type(hook).__name__ == "WeightNorm" for hook in module._forward_pre_hooks.values()):
            return (
                f"{type(module).__name__} {name!r} keeps its weight as an attribute (torch.nn.utils.weight_norm); use "
                "torch.nn.utils.parametrizations.weight_norm, or engine='higher'"
            )
    if loop.per_step is not None and loop.training:
        return "batchnorm='per_step' writes statistics during the forward; use engine='higher', or batchnorm='batch'"
    return None


def _trial(loop: InnerLoop, params: Params, batch: Task) -> str | None:
    """One inner step under vmap; None: it works. What fails without vmap too is the caller's error, and raised."""
    short = dataclasses.replace(loop, steps=1, training=False, counts=defaultdict(float))
    entered: list[str] = []

    def leave(*_: object) -> None:
        entered.pop()

    hooks = [m.register_forward_pre_hook(lambda *_, n=n: entered.append(n)) for n, m in loop.model.named_modules()]
    hooks += [m.register_forward_hook(leave) for m in loop.model.modules()]
    failure: Exception | None = None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            vmap.run(short, params, batch)
        except Exception as error:  # whatever a user's forward raises under vmap
            failure = error
        finally:
            for hook in hooks:
                hook.remove()
        if failure is None:
            return None
        higher.run(short, params, batch)
    module = dict(loop.model.named_modules())[entered[-1]] if entered else loop.model
    where = f"{type(module).__name__} {entered[-1]!r}" if entered and entered[-1] else type(module).__name__
    reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
    return f"{where} does not run under torch.vmap ({reason}); use engine='higher', or change that module"


def classes(loop: InnerLoop, params: Params, batch: Task) -> int | None:
    """The number of classes the model tells apart, seen on the first task; None: this is no classification."""
    x, y = batch.support[0][0], batch.support[1][0]
    if y.is_floating_point():
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = loop.forward(params, x, step=0, clean=False)
    return output.shape[1] if isinstance(output, Tensor) and output.ndim == y.ndim + 1 and output.shape[1] > 1 else None


def check_labels(batch: Task, count: int) -> None:
    """Raise ValueError unless every label is one of ``count`` classes."""
    for name, (_, y) in {"support": batch.support, "query": batch.query}.items():
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= count:
            raise ValueError(
                f"expected {name} labels in 0..{count - 1}, as many as the model has outputs, got {low}..{high}: "
                "number the classes of each task from 0, or widen the model's head"
            )
