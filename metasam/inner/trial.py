"""Whether another way to run the inner loop gives the same, tried on one inner step and few examples."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..errors import first_line
from ..types import Params, Task
from .agree import apart
from .batched import is_compiled
from .generators import forked
from .held import PLAIN
from .loop import Engine, InnerLoop


class Way(NamedTuple):
    """An engine, and whether it uses `metasam.inner.kernels`."""

    engine: Engine
    kernels: bool = False


class Verdict(NamedTuple):
    """How another way compares with the plain one."""

    kind: Literal["same", "differs", "raises", "unknown", "not again"]
    """"unknown": there is nothing to compare. "not again": the plain way does not give the same twice."""
    detail: str = ""
    """What differs, what was raised, or why nothing is known."""


class Tolerance(NamedTuple):
    """How far apart is the same: a part of its size, of a loss and of a meta-gradient, and what is nothing at all."""

    loss: float
    gradient: float
    floor: float


DOUBLE, SINGLE = Tolerance(1e-6, 1e-4, 1e-12), Tolerance(1e-3, 0.1, 1e-7)
"""In float32 the order of sums makes a thousandth of a meta-gradient, and some hundredths where it turns a ReLU or a
pool; in double precision nothing of the kind."""

Cast = Callable[[Tensor], Tensor]
Own = tuple[nn.Module, Callable[..., Tensor]]
"""A model and a loss to call."""
Found = dict[str, list[Tensor | None]]


def compare(loop: InnerLoop, params: Params, batch: Task, plain: Way, other: Way) -> Verdict:
    """Loss and meta-gradient of one inner step on all of ``batch``, in both ways; what fails plainly is raised.

    In double precision where model and loss take it, and with the graph of about as many query examples as there are
    in a support set: a whole one in double precision would need more memory than training does. Copies of the model and
    of a loss that is a module are called, where they can be copied: what forward keeps, it keeps there.
    """
    try:
        return _compare(loop, params, batch, plain, other)
    except Exception as error:
        if _is_of_memory(error):
            return Verdict("unknown", "memory that does not suffice")
        raise


def _compare(loop: InnerLoop, params: Params, batch: Task, plain: Way, other: Way) -> Verdict:
    every = max(1, batch.query[0].shape[1] // batch.support[0].shape[1])
    few = Task(batch.support, (batch.query[0][:, ::every], batch.query[1][:, ::every]))
    device = batch.support[0].device
    compiled = any(map(is_compiled, loop.model.modules()))  # for every precision and every copy anew
    # a loss may need all of a query set, a module its own precision
    rungs: list[tuple[Cast, Task]] = [(_double, few), (_double, batch), (Tensor.detach, batch)]

    def found(way: Way, cast: Cast, part: Task) -> tuple[Found, bool]:
        with forked(device) as moved, _precision_of(device, cast):
            own = (loop.model, loop.loss_fn) if compiled else _copies(loop, cast)
            return _found(way, loop, own, params, batch, part, cast), moved()

    for cast, part in rungs[-1:] if compiled else rungs:
        try:
            wanted, drawn = found(plain, cast, part)
        except Exception as error:
            if cast is Tensor.detach or _is_of_memory(error):
                raise  # the caller's error
            continue
        if all(math.isfinite(apart(v, v)[1]) for v in wanted.values()):
            break
    else:
        return Verdict("unknown", "a loss or meta-gradient that is not finite")
    if drawn:  # in the order of the memory, or of the tasks: other numbers for other places
        return Verdict("unknown", "what a model draws at random")
    if cast is Tensor.detach and _is_coarse(device, [*params.values(), *batch.support, *batch.query]):
        return Verdict("unknown", "half precision")
    try:
        got, _ = found(other, cast, part)
    except Exception as error:  # whatever a user's module raises
        if _is_of_memory(error):
            raise
        return Verdict("raises", first_line(error))
    off = _off(got, wanted)
    if off is None:
        return Verdict("same")
    again, _ = found(plain, cast, part)
    return Verdict("differs" if _off(again, wanted) is None else "not again", off)


def _found(way: Way, loop: InnerLoop, own: Own, params: Params, whole: Task, part: Task, cast: Cast) -> Found:
    """Query losses of ``whole`` after one inner step of ``own``; losses and meta-gradient of a part of it."""
    model, loss_fn = own
    per_step = copy.copy(loop.per_step)
    if per_step is not None:
        per_step.buffers = {k: cast(b) for k, b in per_step.buffers.items()}
    short = dataclasses.replace(
        loop, model=model, loss_fn=loss_fn, steps=1, kernels=way.kernels, per_step=per_step, keep_eps=False,
        recompute=None, repeats=True, counts=defaultdict(float),
    )  # fmt: skip
    with torch.enable_grad(), _all_kept(model):
        leaves = {k: cast(p.detach()).requires_grad_(p.requires_grad) for k, p in params.items()}
        with torch.no_grad():
            losses = way.engine(short, leaves, whole.map(cast)).loss
        few = way.engine(short, leaves, part.map(cast)).loss
        wanted = [p for p in leaves.values() if p.requires_grad] if few.requires_grad else []
        grads = torch.autograd.grad(few.sum(), wanted, allow_unused=True) if wanted else []
    return {"loss": [losses, few.detach()], "meta-gradient": [*grads]}


def _copies(loop: InnerLoop, cast: Cast) -> Own:
    """Of the modules of model and loss, and of containers in their attributes; with other buffers.

    Parameters are the same, as others are lent to the model anyway, and so is whatever else is held.
    """
    loss = loop.loss_fn if isinstance(loop.loss_fn, nn.Module) else nn.Module()
    memo: dict[int, object] = {id(p): p for p in (*loop.model.parameters(), *loss.parameters())}
    memo |= {id(b): cast(b.detach()).clone() for b in (*loop.model.buffers(), *loss.buffers())}
    _share([loop.model, loss], memo, set())
    try:
        model, loss = copy.deepcopy((loop.model, loss), memo)
    except Exception:  # whatever a user's module raises when it is copied
        return loop.model, loop.loss_fn
    return model, loss if isinstance(loop.loss_fn, nn.Module) else loop.loss_fn


SMALL = 2**16
"""Numbers in a tensor that is copied with a module's attributes; a larger one is data."""


def _share(value: object, memo: dict[int, object], seen: set[int]) -> None:
    """Add to the memo of a copy what is not to be copied: all but modules, containers and small tensors."""
    if id(value) in seen or id(value) in memo or isinstance(value, PLAIN):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        _share(vars(value), memo, seen)
    elif isinstance(value, MethodType):
        _share(value.__self__, memo, seen)
    elif isinstance(value, partial):
        _share([value.func, value.args, value.keywords], memo, seen)
    elif isinstance(value, dict):
        for one in value.values():
            _share(one, memo, seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for one in value:
            _share(one, memo, seen)
    elif not (isinstance(value, Tensor) and value.numel() <= SMALL and value.is_leaf):
        memo[id(value)] = value


def _off(got: Found, wanted: Found) -> str | None:
    """What is off, each by itself: a large loss would hide the other."""
    double = all(v.dtype in (torch.float64, torch.complex128) for v in wanted["loss"] if v is not None)
    least = DOUBLE if double else SINGLE
    for what, part in (("loss", least.loss), ("meta-gradient", least.gradient)):
        off, size = apart(got[what], wanted[what])
        if not off <= part * size + least.floor:
            return f"the {what} is off by {off:.1e}, of a size of {size:.1e}"
    return None


def _double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _precision_of(device: torch.device, cast: Cast) -> contextlib.AbstractContextManager[object]:
    """Within: autocast does not make half precision of what a module casts to float32, where all is to be double."""
    return contextlib.nullcontext() if cast is Tensor.detach else torch.autocast(device.type, enabled=False)


def _is_coarse(device: torch.device, tensors: list[Tensor]) -> bool:
    """Whether results are of half precision, whose rounding may turn any ReLU."""
    return torch.is_autocast_enabled(device.type) or any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "OutOfMemory" in type(error).__name__


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
