"""A meta-gradient as one graph of tensor operations, traced once and replayed without autograd, vmap and rules.

What one call of the vmap engine and the backward after it do is always the same sequence of operations: ``make_fx``
writes it down, second derivatives and all. Replaying it saves dispatching; ``torch.compile`` makes machine code of it.
The graph takes parameters, tasks and a weight for each task, so that a smaller batch is run with repeated tasks of
weight 0: one graph serves any number of tasks up to the one that it was traced with.

Numbers that Python holds are constants of a graph: a learner traces again when a setting, a shape, autocast, an
attribute of a module or what a loss is made of changes, and refuses a forward that draws random numbers, changes
numbers in attributes or takes the number out of a tensor. Objects in attributes are told apart, but not looked into;
attributes of classes and what NumPy arrays hold are not looked at. The first result of every graph is held against the
engine's own.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.utils._python_dispatch import TorchDispatchMode

from .. import functional
from ..errors import first_line
from ..types import Params, Task
from . import vmap
from .agree import apart
from .ends import strangers
from .held import Held, Same, changed, global_hooks, held, numbers, of_loss
from .loop import Adapted, InnerLoop

_ONE_AT_A_TIME = threading.Lock()
"""Tracing patches torch for the whole process."""

MANY = 10
"""Graphs after which a learner warns that it makes one after the other."""


@dataclasses.dataclass
class Graph:
    """A traced meta-gradient, for ``tasks`` tasks."""

    call: Callable[..., Any]
    tasks: int
    counts: dict[str, float]
    """Evaluations that a call stands for, a task."""
    last: tuple[tuple[int, float, torch.device], tuple[Tensor, Tensor]] | None = None

    def rows(self, count: int, share: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which tasks to run for ``count`` of them, and the weights of those: 0 for repeated ones."""
        asked = count, share, device
        if self.last is None or self.last[0] != asked:
            rows = torch.arange(self.tasks, device=device)
            self.last = asked, (rows % count, share * (rows < count).double())
        return self.last[1]


class Graphs:
    """The graphs of one learner, made as they are needed.

    Args:
        compiled: make machine code of each (a minute or two, and a C++ compiler; torch caches it on disk), not only a
            list of operations (seconds).
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.seconds = 0.0
        self._graphs: defaultdict[Hashable, list[Graph]] = defaultdict(list)
        self._written: set[str] = set()  # attributes that forward puts tensors into
        self._last: Held = {}  # the model when the last graph was made

    def __reduce__(self) -> tuple[type[Graphs], tuple[bool]]:
        return Graphs, (self.compiled,)  # a copy makes its own

    def __call__(self, loop: InnerLoop, params: Params, tasks: Task, share: float) -> tuple[Adapted, Params]:
        """Losses and outputs of the tasks, and the gradient of ``share`` times the sum of their losses.

        Raises:
            ValueError: the model or the rule draws random numbers while it adapts, or forward counts in Python.
            RuntimeError: it could not be traced or compiled, or a graph does not compute what the engine does.
        """
        count, key = len(tasks.support[1]), self._key(loop, params, tasks)
        known = self._graphs.get(key, [])
        graph = next((g for g in known if g.tasks >= count), None)
        if graph is None:
            with _ONE_AT_A_TIME:
                start = time.perf_counter()
                graph = self._made(loop, params, tasks)
                self.seconds += time.perf_counter() - start
            self._graphs[self._key(loop, params, tasks)].append(graph)
            self._watch(loop)
        rows, weights = graph.rows(count, share, tasks.support[1].device)
        padded = tasks if count == graph.tasks else tasks.map(lambda t: t[rows])
        loss, output, *grads = graph.call(*_inputs(params, padded, weights))
        for k, v in graph.counts.items():
            loop.counts[k] += v * count
        found = Adapted(loss[:count], () if output is None else output[:count], {}, [])
        return found, {k: g for k, g in zip(_wanted(params), grads, strict=True) if g is not None}

    def _made(self, loop: InnerLoop, params: Params, tasks: Task) -> Graph:
        counts: defaultdict[str, float] = defaultdict(float)
        count = len(tasks.support[1])
        inputs = _inputs(params, tasks, torch.full((count,), 1 / count, dtype=torch.float64))
        function = _whole(dataclasses.replace(loop, counts=counts), params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch has to say of its own choices
            try:
                with torch.random.fork_rng(devices=[]):
                    before = held(loop.model)
                    with _NoNumbers():
                        wanted = function(*inputs)
                    after = held(loop.model)
                    counts.clear()
                    traced: Any = make_fx(function, _APART if self.compiled else None)(*inputs)
                kept = changed(numbers(before), numbers(after))
                if kept:
                    raise ValueError(
                        f"expected a forward that changes no number in Python, got one that changes the model's "
                        f"attribute {kept[0]!r}: use engine='vmap'"
                    )
                random = {str(n.target) for n in traced.graph.nodes if _is_random(n.target)}
                if random:
                    raise ValueError(
                        f"expected a model and a rule that draw no random numbers while they adapt, got "
                        f"{', '.join(sorted(random))}: use engine='vmap'"
                    )
                call = _without_autograd(_compiled(traced, inputs) if self.compiled else _tidied(traced))
                found = call(*inputs)
            except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
                what, instead = ("compiled", "traced") if self.compiled else ("traced", "vmap")
                raise RuntimeError(
                    f"the inner loop of this model could not be {what} ({first_line(error)}): use engine={instead!r}"
                ) from error
        _check(found, wanted)
        self._written.update(changed(before, after))
        return Graph(call, count, {k: v / count for k, v in counts.items()})

    def _watch(self, loop: InnerLoop) -> None:
        """Warn, once, when graphs are made over and over."""
        now, before, self._last = numbers(held(loop.model)), self._last, numbers(held(loop.model))
        if sum(map(len, self._graphs.values())) == MANY:
            names = [k for k in changed(before, now) if k not in self._written]
            because = f"the model's attributes {', '.join(names[:4])} change" if names else "shapes or settings change"
            warnings.warn(
                f"{MANY} graphs were made so far, in {self.seconds:.0f} s, since {because}: every other number that a "
                "graph holds needs one of its own; keep what changes in a tensor, a buffer say, or use engine='vmap'",
                stacklevel=2,
            )

    def _key(self, loop: InnerLoop, params: Params, tasks: Task) -> Hashable:
        """Everything that a graph holds as a constant and that can be told."""
        kind = tasks.support[0].device.type
        return (
            *(Same(loop.rule), loop.lr, loop.steps, loop.adapted, loop.first_order, loop.policy),
            *((t.shape[1:], t.dtype) for t in (*tasks.support, *tasks.query)),
            *((k, p.shape, p.dtype, p.device, p.requires_grad) for k, p in params.items()),
            *((k, *((Same(m), kind, key) for m, kind, key in at)) for k, at in functional.places(loop.model).items()),
            global_hooks(),
            *((k, v) for k, v in held(loop.model).items() if k not in self._written),
            torch.get_num_threads() if self.compiled else None,
            *(of_loss(loop.loss_fn), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )


def _whole(loop: InnerLoop, params: Params) -> Callable[..., list[Tensor | None]]:
    """What a graph is of: losses, outputs and gradients as a function of tensors alone."""

    def whole(*inputs: Tensor) -> list[Tensor | None]:
        *values, sx, sy, qx, qy, weights = inputs
        leaves = {
            k: v.detach().requires_grad_(p.requires_grad) for (k, p), v in zip(params.items(), values, strict=True)
        }
        with torch.enable_grad():
            found = vmap.run(loop, leaves, Task((sx, sy), (qx, qy)))
            value = (found.loss * weights).sum()
        names = {id(p): k for k, p in params.items()}
        for strange in strangers([value], leaves.values()):
            reached = names.get(id(strange), f"a tensor {list(strange.shape)}")
            raise ValueError(
                f"expected a loss of what it is called with alone, got one that reaches {reached} by itself, which a "
                "graph has no gradient in: use engine='vmap'"
            )
        grads = torch.autograd.grad(value, [leaves[k] for k in _wanted(params)], allow_unused=True)
        return [found.loss.detach(), found.output.detach() if isinstance(found.output, Tensor) else None, *grads]

    return whole


def _wanted(params: Params) -> list[str]:
    return [k for k, p in params.items() if p.requires_grad]


def _inputs(params: Params, tasks: Task, weights: Tensor) -> list[Tensor]:
    first = next(iter(params.values()))
    weights = weights.to(first.device, torch.promote_types(first.dtype.to_real(), torch.float32))
    # machine code is for tensors that lie as those it was made with, with no sign or conjugation still to be taken
    given = (*params.values(), *tasks.support, *tasks.query, weights)
    return [t.detach().resolve_conj().resolve_neg().contiguous() for t in given]


def _tidied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same without what autograd writes down again and again: aliases, and transposes, there and back."""
    if any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes):
        return graph  # then an alias is not the same as what it is of
    before = len(graph.graph.nodes) + 1
    while len(graph.graph.nodes) < before:
        before = len(graph.graph.nodes)
        for node in graph.graph.nodes:
            if same := _same_as(node):
                node.replace_all_uses_with(same)
        graph.graph.eliminate_dead_code()
        merged = CSEPass()(graph)
        graph = merged.graph_module if merged else graph
    graph.recompile()
    return graph


def _same_as(node: torch.fx.Node) -> torch.fx.Node | None:
    """An earlier node that is the same tensor."""
    aten, of = torch.ops.aten, node.args[0] if node.args else None
    if not isinstance(of, torch.fx.Node):
        return None
    if node.target in (aten.alias.default, aten.detach.default):
        return of
    back = node.target is aten.transpose.int and of.target is aten.transpose.int
    return of.args[0] if back and set(node.args[1:]) == set(of.args[1:]) else None  # type: ignore[return-value]


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * torch.bmm(a, b)


_APART = {torch.ops.aten.baddbmm.default: _baddbmm}
"""A compiler joins the sum with what comes after it; products alone it leaves to a library."""


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Machine code of a graph, without the checks around it, which take a tenth of its time: a key has looked already.

    It is compiled by way of ``torch.compile``, for the sake of its cache.
    """
    made: list[Callable[..., Any]] = []

    def backend(inner: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        code = torch._inductor.compile(inner, list(examples))
        if [e.data_ptr() for e in examples] == [i.data_ptr() for i in inputs]:
            made.append(code)
        return code

    checked = torch.compile(graph, backend=backend, dynamic=False)
    with torch.no_grad():
        checked(*inputs)
    return made[0] if len(made) == 1 else checked


class _NoNumbers(TorchDispatchMode):
    """Within: nobody reads the number in a tensor, which a graph would hold for ever, unlike the tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ValueError(
                "expected a forward, a loss and a rule that compute with tensors, got one that takes the number out of "
                "one (float(t), t.item()), which a graph would not see change: keep it a tensor, or use engine='vmap'"
            )
        return func(*args, **(kwargs or {}))


def _is_random(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _without_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    def within(*inputs: Tensor) -> Any:
        with torch.no_grad():
            return call(*inputs)

    return within


def _check(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if a graph disagrees with the engine by more than rounding can."""
    off, size = apart(found, wanted)
    double = all(w.dtype.to_real() == torch.float64 for w in wanted if w is not None)
    if math.isfinite(size) and not off <= (1e-8 if double else 1e-2) * size:
        raise RuntimeError(
            f"the traced inner loop gives other losses and gradients than the engine (off by {off:.1e}, of a "
            f"size of {size:.1e}): does the model's forward keep something in Python? use engine='vmap'"
        )
