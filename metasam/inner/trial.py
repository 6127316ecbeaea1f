"""Whether another way to run the inner loop gives the same, tried on one inner step and few examples."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .. import functional
from ..types import Params, Task
from .agree import apart
from .loop import Engine, InnerLoop


class Way(NamedTuple):
    """An engine, and whether it uses `metasam.inner.kernels`."""

    engine: Engine
    kernels: bool = False


class Verdict(NamedTuple):
    """How another way compares with the plain one."""

    kind: Literal["same", "differs", "raises", "draws", "not finite", "not again"]
    """"draws": there is nothing to compare, as both draw random numbers, which lie in other places or come in another
    order. "not finite": the plain way gives nothing to compare with. "not again": it does not give the same twice."""
    detail: str = ""
    """What differs, what was raised, or whose random numbers were drawn."""


DOUBLE, SINGLE = {"loss": 1e-6, "meta-gradient": 1e-4}, {"loss": 1e-3, "meta-gradient": 0.1}
"""Part of its size that each may be off by. In float32 the order of sums makes a thousandth of a meta-gradient, and
some hundredths where it turns a ReLU or a pool; in double precision nothing of the kind."""

Cast = Callable[[Tensor], Tensor]
Found = dict[str, list[Tensor | None]]


def compare(loop: InnerLoop, params: Params, batch: Task, plain: Way, other: Way) -> Verdict:
    """Loss and meta-gradient of one inner step on all of ``batch``, in both ways; what fails plainly is raised.

    In double precision where model and loss take it, and with the graph of about as many query examples as there are
    in a support set: a whole one in double precision would need more memory than training does.
    """
    every = max(1, batch.query[0].shape[1] // batch.support[0].shape[1])
    few = Task(batch.support, (batch.query[0][:, ::every], batch.query[1][:, ::every]))
    # a loss may need all of a query set, a module its own precision
    rungs: list[tuple[Cast, Task]] = [(_double, few), (_double, batch), (Tensor.detach, batch)]
    for cast, part in rungs:

        def found(way: Way, cast: Cast = cast, part: Task = part) -> tuple[Found, list[str]]:
            with rewound(batch.support[0].device) as moved:
                return _found(way, loop, params, batch, part, cast), moved()

        try:
            wanted, drawn = found(plain)
        except Exception:
            if cast is Tensor.detach:
                raise  # the caller's error
            continue
        if all(math.isfinite(apart(v, v)[1]) for v in wanted.values()):
            break
    else:
        return Verdict("not finite")
    if drawn:
        return Verdict("draws", ", ".join(drawn))
    try:
        got, _ = found(other)
    except Exception as error:  # whatever a user's module raises
        return Verdict("raises", (str(error).strip().splitlines() or [type(error).__name__])[0])
    off = _off(got, wanted)
    if off is None:
        return Verdict("same")
    return Verdict("differs", off) if _off(found(plain)[0], wanted) is None else Verdict("not again", off)


def _found(way: Way, loop: InnerLoop, params: Params, whole: Task, part: Task, cast: Cast) -> Found:
    """Query losses of ``whole`` after one inner step; losses and meta-gradient of a part of it."""
    per_step = copy.copy(loop.per_step)
    if per_step is not None:
        per_step.buffers = {k: cast(b) for k, b in per_step.buffers.items()}
    nothing = defaultdict[str, float](float)
    short = dataclasses.replace(
        loop,
        steps=1,
        kernels=way.kernels,
        per_step=per_step,
        keep_eps=False,
        recompute=None,
        repeats=True,
        counts=nothing,
    )
    with torch.enable_grad(), _all_kept(loop.model), _buffers(cast, loop.model, loop.loss_fn):
        leaves = {k: cast(p.detach()).requires_grad_(p.requires_grad) for k, p in params.items()}
        with torch.no_grad():
            losses = way.engine(short, leaves, whole.map(cast)).loss
        few = way.engine(short, leaves, part.map(cast)).loss
        wanted = [p for p in leaves.values() if p.requires_grad] if few.requires_grad else []
        grads = torch.autograd.grad(few.sum(), wanted, allow_unused=True) if wanted else []
    return {"loss": [losses, few.detach()], "meta-gradient": [*grads]}


def _off(got: Found, wanted: Found) -> str | None:
    """What is off, each by itself: a large loss would hide the other."""
    double = all(v.dtype in (torch.float64, torch.complex128) for v in wanted["loss"] if v is not None)
    for what, least in (DOUBLE if double else SINGLE).items():
        off, size = apart(got[what], wanted[what])
        if not off <= least * size:
            return f"the {what} is off by {off:.1e}, of a size of {size:.1e}"
    return None


def _double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _all_kept(model: nn.Module) -> Iterator[None]:
    """Within: dropout keeps everything."""
    dropping = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    for module in dropping:
        module.training = False
    try:
        yield
    finally:
        for module in dropping:
            module.training = True


@contextlib.contextmanager
def _buffers(cast: Cast, *owners: object) -> Iterator[None]:
    """Within: the modules among ``owners`` have their buffers in another precision."""
    modules = [m for m in owners if isinstance(m, nn.Module)]
    places = [p for m in modules for at in functional.places(m).values() for p in at if p.kind == "_buffers"]
    own = [(p, getattr(p.module, p.kind)[p.key]) for p in places]
    try:
        for place, buffer in own:
            getattr(place.module, place.kind)[place.key] = cast(buffer)
        yield
    finally:
        for place, buffer in own:
            getattr(place.module, place.kind)[place.key] = buffer


@contextlib.contextmanager
def rewound(device: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Within: whatever is drawn at random; afterwards the generators of all are where they were.

    Yields:
        What tells whose generators have moved: of "torch", "numpy" and "random".
    """
    numpy: Any = sys.modules.get("numpy")
    accelerated = [device] if device.type == "cuda" else []

    def states() -> dict[str, Any]:
        return {
            "torch": [torch.get_rng_state().tolist(), *(torch.cuda.get_rng_state(d).tolist() for d in accelerated)],
            "random": random.getstate(),
            "numpy": repr(numpy.random.get_state()) if numpy else None,
        }

    before, numpys = states(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(accelerated):
            yield lambda: [whose for whose, state in states().items() if state != before[whose]]
    finally:
        random.setstate(before["random"])
        if numpy:
            numpy.random.set_state(numpys)
