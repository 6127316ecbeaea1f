"""Running statistics: the one place that freezes, converts or collects them.

A perturbed pass must not count a batch twice, and a task must not leak into the meta-model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook

POLICIES = ("batch", "per_step", "frozen")
"""Policies of the inner loop.

batch: every forward normalises by its own batch, in evaluation too (MAML's; transductive: a query example's
prediction depends on the other queries). Running statistics are neither read nor written.

frozen: running statistics as the model brings them, in training and evaluation.

per_step: training normalises by the batch and collects running statistics for each inner step apart, evaluation reads
them (not transductive); the statistics half of the per-step BatchNorm of MAML++ (Antoniou et al. 2019).
"""


def norms(model: nn.Module) -> dict[str, _NormBase]:
    """The modules that may hold running statistics, by name (each once)."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _NormBase)}


def is_transductive(model: nn.Module, policy: str) -> bool:
    """Whether predictions of a batch depend on each other under ``policy``."""
    found = [m for m in norms(model).values() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return any(policy == "batch" or m.running_mean is None for m in found)


@contextmanager
def frozen(model: nn.Module | None = None) -> Iterator[None]:
    """Within: forwards leave running statistics as they are, and outputs are what they would have been.

    With ``track_running_stats`` off a norm in train mode still uses its batch, and one in eval mode its buffers;
    nothing is counted, so ``momentum=None`` (cumulative averages) stays right as well.

    Args:
        model: whose norms to freeze. None: every norm that is called within, found by a hook as it is called.
    """
    touched: list[tuple[_NormBase, list[Tensor | None]]] = []

    def freeze(module: nn.Module, args: object = None) -> None:
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            module.track_running_stats = False
            touched.append((module, _hide(module)))
        compiled = getattr(module, "_orig_mod", None)  # no hook is called for what torch.compile wraps
        if isinstance(compiled, nn.Module):
            for inner in compiled.modules():
                freeze(inner)

    hook = None
    if model is None:
        hook = register_module_forward_pre_hook(freeze)
    else:
        for module in model.modules():
            freeze(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for module, hidden in touched:
            module.track_running_stats = True
            _show(module, hidden)


def _hide(module: _NormBase) -> list[Tensor | None]:
    """Take the buffers away from an InstanceNorm, which writes to them whatever ``track_running_stats`` says."""
    if not isinstance(module, _InstanceNorm):
        return []
    hidden = [module.running_mean, module.running_var]
    module.running_mean = module.running_var = None
    return hidden


def _show(module: _NormBase, hidden: list[Tensor | None]) -> None:
    if hidden:
        module.running_mean, module.running_var = hidden


@contextmanager
def mode(model: nn.Module, policy: str, *, training: bool) -> Iterator[None]:
    """Within: the norms of ``model`` behave as ``policy`` says; their flags are put back afterwards."""
    before = [(m, m.training, m.track_running_stats) for m in norms(model).values()]
    for m, _, tracks in before:
        m.training = policy == "batch" or (policy == "per_step" and training)
        m.track_running_stats = tracks and policy != "batch"
    hidden = [(m, _hide(m)) for m, _, tracks in before if tracks and policy == "batch"]
    try:
        yield
    finally:
        for m, buffers in hidden:
            _show(m, buffers)
        for m, was_training, tracks in before:
            m.training, m.track_running_stats = was_training, tracks


def settle(model: nn.Module, policy: str, statistics: dict[str, Tensor]) -> None:
    """Change a copy of the model for good, so that it predicts on its own as it does inside the engine.

    Args:
        model: a copy that nobody else uses; left in eval mode.
        policy: one of `POLICIES`.
        statistics: buffers to write, by name (per_step).
    """
    model.eval()
    for m in norms(model).values():
        if policy == "batch":
            m.track_running_stats = False
            # without buffers a norm uses its batch, in eval mode too
            m.running_mean = m.running_var = m.num_batches_tracked = None
    buffers = dict(model.named_buffers())
    for name, value in statistics.items():
        buffers[name].copy_(value)


class PerStep:
    """Running statistics for each inner step apart: every buffer of every norm, stacked ``[steps + 1, ...]``.

    Index k < steps is the k-th support pass; index ``steps`` is the query pass.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.buffers: dict[str, Tensor] = {
            f"{name}.{key}" if name else key: torch.stack([b.detach().clone()] * (steps + 1))
            for name, m in norms(model).items()
            for key, b in m.named_buffers(recurse=False)
        }

    def follow(self, model: nn.Module) -> None:
        """Move to where the model's own buffers are."""
        for k, own in model.named_buffers():
            if k in self.buffers:
                self.buffers[k] = self.buffers[k].to(own)

    def at(self, step: int, *, write: bool) -> dict[str, Tensor]:
        """Buffers for ``functional_call``: rows of the store itself, or copies of them that may be thrown away."""
        return {k: b[step] if write else b[step].clone() for k, b in self.buffers.items()}
