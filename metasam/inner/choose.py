"""Which engine takes a model, and what to change when it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from ..errors import first_line
from ..types import Params, Task
from . import higher, threads, vmap
from .generators import forked
from .held import changed, held
from .kernels import concern
from .loop import SGD, InnerLoop
from .trial import Way, compare


def choose(wanted: str, loop: InnerLoop, params: Params, batch: Task) -> tuple[str, str]:
    """The engine to use and why, tried on the first task of ``batch``.

    Args:
        wanted: an engine, or "auto": vmap where the model allows and it is the faster one.
        loop: the inner loop.
        params: all parameters of the model.
        batch: tasks with a leading task dimension.

    Raises:
        ValueError: another engine than higher was asked for and cannot take the model; the message names the module.
    """
    if wanted == "higher":
        return "higher", "as asked"
    against = _known(loop)
    if wanted == "auto" and not against and batch.support[0].device.type == "cpu":
        work = _work(loop, params, batch)
        if work > WIDE:
            against = f"{work / 1e6:.0f} million operations a support set are too long to gain from vmap on a CPU"
    against = against or _trial(loop, params, batch.map(lambda t: t[:1])) or _other(loop, params, batch)
    if wanted == "auto":
        return ("higher", against) if against else ("vmap", "the model allows it")
    if against:
        raise ValueError(f"engine={wanted!r} cannot take this model: {against}")
    return wanted, "as asked"


WIDE = 20_000_000
"""Floating point operations of a support set's forward above which a CPU is not faster with all tasks at once.

vmap saves dispatching, but turns the convolutions of tasks into grouped ones, which are slower than many plain ones.
"""


def _work(loop: InnerLoop, params: Params, batch: Task) -> int:
    """Floating point operations of the convolutions and matrix products in one forward over one support set.

    0 where they cannot be counted, as in a forward that takes derivatives.
    """
    with torch.no_grad(), forked(batch.support[0].device), contextlib.suppress(Exception):
        with FlopCounterMode(display=False) as counter:
            loop.forward(params, batch.support[0][0], step=0, clean=False)
        return counter.get_total_flops()
    return 0


def workers(wanted: int | str, engine: str, loop: InnerLoop, params: Params, batch: Task) -> tuple[int, str]:
    """How many threads share the tasks, and why.

    Args:
        wanted: how many, or "auto": as many as torch has for an operation, where tasks can be shared.
        engine: the engine that `choose` took.
        loop: the inner loop.
        params: all parameters of the model.
        batch: tasks with a leading task dimension.

    Raises:
        ValueError: several were asked for and tasks cannot be shared.
    """
    if wanted == 1 or (wanted == "auto" and torch.get_num_threads() == 1):
        return 1, "as asked" if wanted == 1 else "torch has one thread"
    if engine != "higher":
        return 1, f"engine={engine!r} runs all tasks at once"
    against = _unshareable(loop, params, batch)
    if against and wanted != "auto":
        raise ValueError(f"workers={wanted} cannot share the tasks: {against}")
    if against:
        return 1, against
    if wanted != "auto":
        return int(wanted), "as asked"
    largest = _largest(loop, params, batch)
    if largest > LARGE:
        return 1, f"layers of up to {largest / 2**20:.0f} MiB keep torch's threads busy by themselves"
    return torch.get_num_threads(), "as many as torch has"


LARGE = 32 * 2**20
"""Bytes of a layer's output above which threads gain nothing by taking tasks each: an operation is long enough to be
shared, and glibc takes memory for tensors beyond this anew from the system each time a thread asks for it."""


def _largest(loop: InnerLoop, params: Params, batch: Task) -> int:
    """Bytes of the largest output of a module in a forward over one query set."""
    sizes = [0]

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [m.register_forward_hook(note) for m in loop.model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    try:
        with torch.no_grad(), forked(batch.support[0].device):
            loop.forward(params, batch.query[0][0], step=loop.steps, clean=False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


def use_kernels(engine: str, loop: InnerLoop, params: Params, batch: Task) -> tuple[bool, str | None]:
    """Whether to use those of `metasam.inner.kernels`, tried on the first task; why not, where they would be for it.

    A model can tell how its images lie in memory: a scripted module or an extension that takes them to lie as usual.
    """
    if engine != "higher" or batch.support[0].device.type != "cpu" or not concern(loop.model):
        return False, None
    one = batch.map(lambda t: t[:1])
    verdict = compare(loop, params, one, Way(higher.run), Way(higher.run, kernels=True))
    if verdict.kind == "same":
        return True, None
    because = {
        "unknown": f"{verdict.detail} hides whether the model takes images whose channels lie last",
        "raises": f"the model does not take images whose channels lie last ({verdict.detail})",
        "differs": f"the model gives something else for images whose channels lie last ({verdict.detail})",
        "not again": f"the model gives something else each time ({verdict.detail})",
    }[verdict.kind]
    return False, f"on torch's kernels, as {because}"


def _unshareable(loop: InnerLoop, params: Params, batch: Task) -> str | None:
    if batch.support[0].device.type != "cpu":
        return "threads are for the CPU; use workers=1"
    if loop.per_step is not None:
        return "batchnorm='per_step' collects statistics task after task; use workers=1, or batchnorm='batch'"
    short = dataclasses.replace(loop, steps=1, training=False, counts=defaultdict(float))
    one = batch.map(lambda t: t[:1])
    with torch.no_grad(), forked(batch.support[0].device):
        higher.run(short, params, one)  # what is made at the first call is made
        before, drawn = held(loop.model), _generators()
        higher.run(short, params, one)
        if drawn != _generators():
            return "the model or the loss draws random numbers, whose order threads would change; use workers=1"
        names = changed(before, held(loop.model))
    if names:
        return (
            f"forward changes the model's attribute {names[0]!r}, and a thread calls a copy of the model; use workers=1"
        )
    try:
        threads.twin(loop.model)
    except Exception as error:  # whatever a user's module raises when it is copied
        return f"the model cannot be copied ({type(error).__name__}: {error}); use workers=1"
    return None


def _generators() -> list[object]:
    """Where the generators are that a model may draw from."""
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state()) if numpy else None]


def _known(loop: InnerLoop) -> str | None:
    for name, module in loop.model.named_modules():
        if isinstance(module, nn.RNNBase):
            return (
                f"{type(module).__name__} {name!r} has no vmap rule; use engine='higher', "
                "or write the recurrence with nn.Linear"
            )
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return f"Embedding {name!r} would train its padding_idx under vmap; use engine='higher'"
        for hook in module._forward_pre_hooks.values():
            kept = f"{type(module).__name__} {name!r} keeps its weight as an attribute"
            if type(hook).__name__ == "WeightNorm":
                return (
                    f"{kept} (torch.nn.utils.weight_norm); use torch.nn.utils.parametrizations.weight_norm, or "
                    "engine='higher'"
                )
            if isinstance(hook, prune.BasePruningMethod):
                return f"{kept} (torch.nn.utils.prune); use engine='higher'"
    if loop.per_step is not None:
        return "batchnorm='per_step' writes statistics during the forward; use engine='higher', or batchnorm='batch'"
    return None


def _trial(loop: InnerLoop, params: Params, batch: Task) -> str | None:
    """One inner step under vmap; None: it works. What fails without vmap too is the caller's error, and raised."""
    short = dataclasses.replace(loop, steps=1, training=False, counts=defaultdict(float))
    entered: list[str] = []

    def leave(*_: object) -> None:
        if entered:  # a module may be another thread's as well
            entered.pop()

    modules = {n: m for n, m in loop.model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
    hooks = [m.register_forward_pre_hook(lambda *_, n=n: entered.append(n)) for n, m in modules.items()]
    hooks += [m.register_forward_hook(leave) for m in modules.values()]
    failure: Exception | None = None
    with torch.no_grad(), forked(batch.support[0].device):
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
    return f"{where} does not run under torch.vmap ({first_line(failure)}); use engine='higher', or change that module"


def _other(loop: InnerLoop, params: Params, batch: Task) -> str | None:
    """What two tasks at once give else than one after the other; None: nothing, or nothing that could be compared."""
    one_by_one = partial(higher.run, descent=SGD)  # vmap can do without the package
    verdict = compare(loop, params, batch.map(lambda t: t[[0, -1]]), Way(one_by_one), Way(vmap.run))
    if verdict.kind in ("same", "unknown"):
        return None
    what = {
        "raises": f"it cannot be differentiated under torch.vmap ({verdict.detail})",
        "differs": f"it gives something else under torch.vmap ({verdict.detail})",
        "not again": f"it gives something else each time ({verdict.detail}), as with numbers that numpy draws, or a "
        "count of its calls, and torch.vmap calls it once for all tasks",
    }[verdict.kind]
    return f"{what}; use engine='higher'"


def classes(loop: InnerLoop, params: Params, batch: Task) -> int | None:
    """The number of classes the model tells apart, seen on the first task; None: this is no classification."""
    x, y = batch.support[0][0], batch.support[1][0]
    if y.is_floating_point():
        return None
    with torch.no_grad(), forked(batch.support[0].device):
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
