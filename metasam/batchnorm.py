"""Running statistics: the one place that freezes, converts or collects them.

A perturbed pass must not count a batch twice, and a task must not leak into the meta-model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

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


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def frozen(model: nn.Module | None = None) -> Iterator[None]:
    """Within: forwards leave running statistics as they are, and outputs are what they would have been.

    With ``track_running_stats`` off a norm in train mode still uses its batch, and one in eval mode its buffers;
    nothing is counted, so ``momentum=None`` (cumulative averages) stays right as well. What has no such switch, the
    norms of scripted modules and the vectors of ``spectral_norm``, is put back afterwards.

    Args:
        model: whose norms to freeze. None: every norm that this thread calls within, found by a hook as it is called.
    """
    touched: list[tuple[_NormBase, list[Tensor | None]]] = []
    record = Record()

    def freeze(module: nn.Module) -> None:
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            module.track_running_stats = False
            touched.append((module, _hide(module)))
        elif not torch.compiler.is_compiling():
            record.keep(_written(module))

    try:
        with _visiting(model, freeze):
            yield
    finally:
        for module, hidden in touched:
            module.track_running_stats = True
            _show(module, hidden)
        record.restore()


@contextmanager
def _visiting(model: nn.Module | None, visit: Callable[[nn.Module], None]) -> Iterator[None]:
    """Visit the modules of ``model``; None: within, those that this thread calls, each before its forward."""
    if model is not None:
        for module in model.modules():
            visit(module)
        yield
        return
    home = threading.get_ident()

    def called(module: nn.Module, args: object = None) -> None:
        # where a model was compiled in place, this is traced with it: the flags of its norms then, and nothing else
        if not torch.compiler.is_compiling() and threading.get_ident() != home:
            return
        visit(module)
        # no hook is called for what torch.compile wraps, nor within scripts, nor here for what runs in other threads
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel) or hasattr(module, "_orig_mod"):
            for inner in module.modules():
                visit(inner)

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()


class Record:
    """What forwards write to the modules they call, as it was before."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def __call__(self, model: nn.Module | None = None) -> Iterator[None]:
        """Within: note statistics before they change, of ``model``, or of what this thread calls."""
        if model is not None:
            self.keep([b for module in model.modules() for b in _written(module)])
            yield
            return

        def note(module: nn.Module) -> None:
            if not torch.compiler.is_compiling():
                self.keep(_written(module))

        with _visiting(None, note):
            yield

    def keep(self, buffers: list[Tensor]) -> None:
        """Note these as they are, unless they were noted before."""
        new = [b for b in buffers if id(b) not in self.kept and not is_lazy(b)]
        if new:
            with torch.no_grad():
                copies = torch._foreach_clone(new) if hasattr(torch, "_foreach_clone") else [b.clone() for b in new]
            self.kept.update((id(b), (b, copy)) for b, copy in zip(new, copies, strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for buffer, copy in self.kept.values():
            buffer.copy_(copy)
        self.kept.clear()


def _written(module: nn.Module) -> list[Tensor]:
    """The statistics that its forward may write."""
    if isinstance(module, torch.jit.ScriptModule):  # a traced one writes in eval mode too
        return [b for name, b in module.named_buffers(recurse=False) if name in STATISTICS]
    if not module.training:
        return []
    if isinstance(module, _NormBase):
        found = [getattr(module, name) for name in STATISTICS] if module.track_running_stats else []
    elif isinstance(module, _SpectralNorm):
        found = [getattr(module, name, None) for name in ("_u", "_v")]
    else:
        hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
        found = [getattr(module, f"{h.name}_{end}") for h in hooks for end in "uv"]
    return [b for b in found if b is not None]


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
