"""MAML and Sharp-MAML: sharpness-aware steps in the inner loop, the outer loop, or both.

Finn et al. 2017 (arXiv 1703.03400); Abbas et al. 2022 (arXiv 2206.03996).
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from . import batchnorm as norms
from . import checkpoint, inner, tree
from .configure import instantiate
from .functional import judging
from .optim import SharpnessAware
from .optim.distributed import ASCENTS
from .ranks import Ranks
from .rules import Plain, Rule, make
from .types import Params, Part, State, Task

VARIANTS = {"none": (False, False), "low": (True, False), "up": (False, True), "both": (True, True)}
"""Where a variant is sharpness-aware: (inner loop, outer loop)."""

COST = {"support": 1.0, "query": 1.0, "forward": 1 / 3}
"""What an evaluation counts, in gradient evaluations: backward takes about twice a forward."""

KERNEL_TRIALS = 10
"""States of a model that kernels are tried in, before it is left to torch's."""

Tasks = Task | Iterable[Task]
"""A batch of tasks (leading task dimension), or an iterable of batches or single tasks."""


class Step(NamedTuple):
    """What one meta-step saw, at the undisplaced parameters."""

    loss: float
    accuracy: float | None
    """Query accuracy; None for regression."""
    skipped: bool
    """Whether nothing was updated because a gradient was not finite."""


class Seen(NamedTuple):
    """What a pass saw of the tasks that it covers, ``[T]``."""

    losses: Tensor
    hits: Tensor | None
    """Their accuracies; None for regression."""


class Evaluation(NamedTuple):
    """Means over tasks with 95% intervals, ``1.96 std / sqrt(n)``."""

    accuracy: float | None
    """Mean query accuracy after adaptation, in [0, 1]; None for regression."""
    ci95: float
    """Half width of the interval of the accuracy; for regression, of the loss."""
    n: int
    """Number of tasks."""
    loss: float
    """Mean query loss after adaptation."""
    loss_ci95: float
    """Half width of its interval."""
    per_task: list[float]
    """What ``ci95`` is over: accuracy (regression: loss) of each task, for paired comparisons."""
    transductive: bool
    """Whether BatchNorm let a query example's prediction depend on the other queries."""


class SharpMAML:
    """Learn parameters from which a few gradient steps solve a task, with sharpness-awareness on either level.

    ``none`` is MAML. ``low``: every inner step descends from ``w + eps``, eps climbing the support loss. ``up``: the
    meta-gradient is taken at ``w + eps``, eps climbing the meta-loss, and the inner loops run again from there on the
    same tasks. ``both``: both, inner eps recomputed at ``w + eps``. With K inner steps a meta-step costs, in
    meta-gradients x inner gradients: none 1 x K, low 1 x 2K, up 2 x K, both 2 x 2K.

    Args:
        model: the network, called with one argument. It is trained in place, and holds a task's tensors while it is
            called: learners in several threads need a model each.
        loss_fn: ``(output, y) -> scalar``, e.g. ``torch.nn.functional.cross_entropy``.
        inner_lr: learning rate of the inner SGD.
        inner_steps: number of inner steps, K.
        variant: "none", "low", "up" or "both". None: where ``inner_rule`` and ``outer_rule`` are given, else "both".
        rule: the rule of every sharp slot: a name in `metasam.rules.NAMED`, or a Rule.
        inner_rule: the inner slot's own, instead of ``rule``.
        outer_rule: the outer slot's own, instead of ``rule``.
        rho_low: radius of the inner rule; None: the rule's own. The paper's mini-ImageNet runs use 5e-4 on both levels.
            For "agnostic", whose inner validation part is a fifth of the support set, it is rho_val, and twice it
            rho_train.
        rho_up: radius of the outer rule.
        first_order: take inner gradients as constants (FOMAML).
        engine: "higher" (task by task; any model), "vmap" (all tasks at once; much faster on small networks), or
            "auto": vmap if the model allows, gives the same and is small enough to gain. `engine_used` and
            `engine_reason` tell which it took. "traced" and "compiled" are vmap whose meta-gradient is written down
            once, in seconds, and compiled to machine code, in minutes; then steps are faster (`metasam.inner.traced`).
        through: differentiate through the inner eps. None: as the rule says (yes, as the released code does).
        reuse_inner_eps: "both" only: the pass at ``w + eps`` reuses the inner displacements found at w (eq. 14 of the
            paper) instead of recomputing them as the released code does. Cheaper, and another algorithm.
        inner_params: glob patterns of the parameters that adapt, e.g. ``["head.*"]`` (ANIL). None: all.
        batchnorm: "batch", "per_step" or "frozen", see `metasam.batchnorm.POLICIES`.
        chunk_size: tasks whose graph is alive at once in `step`, in each worker; None: all for vmap, one for higher.
        workers: threads that share the tasks on a CPU, each with its part of torch's: `metasam.inner.threads`.
            "auto": as many as torch has for an operation, if the engine is higher, the model draws no random numbers,
            and its layers are not so large that an operation keeps all threads busy.
        recompute: for long inner loops: keep the parameters of every n-th inner step only, instead of the whole graph,
            and take the n steps in between again as the meta-gradient goes back through them. "auto": about
            half of ``sqrt(inner_steps)``, so that memory grows with the root of the steps. Costs one more inner loop,
            which `counts` and `gradient_evaluations` leave out. Meta-gradients stay the same to the last bit (to
            rounding where "higher" has several tasks in one graph: `meta_loss`, ``chunk_size``), dropout masks and
            running statistics too, but have no derivative themselves. Leave the model as it is until backward is done;
            one that draws from elsewhere than torch, or counts its calls, raises RuntimeError there. Without a graph to
            keep (``first_order``, `evaluate`, `adapt`) nothing changes. None: keep the graph.
        split: each rank of ``torch.distributed`` adapts to its share of every meta-batch, with one all-reduce a pass,
            and one of a few numbers a step. Meta-gradient, loss, accuracy and counts are those of one process to
            rounding, and weights stay equal to the last bit. All ranks call `step` and `evaluate`, with the same tasks,
            and begin with the weights of rank 0; `adapt` and `meta_loss` stay on their rank. Dropout masks are a rank's
            own; statistics of ``batchnorm="per_step"`` are the means over ranks.
        ascent: with ``split``, what the outer rule climbs along. "global": the gradient of the whole meta-batch, as in
            one process. "local": each rank along that of its share, which nothing is sent for; then VaSSO, Friendly-SAM
            and SparseSAM remember gradients of a rank's own, and rules that evaluate parts of a batch are refused.

    Raises:
        ValueError: a setting out of range, a model without trainable parameters, patterns that match nothing.
        RuntimeError: ``split`` without an initialised ``torch.distributed``.
        TypeError: ``model`` is no module, or is DataParallel; ``loss_fn`` cannot be called; a rule is neither a name
            nor a Rule.

    >>> model = nn.Linear(2, 1)
    >>> maml = SharpMAML(model, nn.functional.mse_loss, inner_lr=0.1, inner_steps=1, variant="both", rho_low=0.01)
    >>> x, y = torch.randn(4, 10, 2), torch.randn(4, 10, 1)  # 4 tasks
    >>> loss = maml.step(Task(support=(x, y), query=(x, y)), torch.optim.Adam(model.parameters()))
    >>> maml.engine_used
    'vmap'
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor],
        *,
        inner_lr: float,
        inner_steps: int,
        variant: str | None = None,
        rule: str | Rule = "sam",
        inner_rule: str | Rule | None = None,
        outer_rule: str | Rule | None = None,
        rho_low: float | None = None,
        rho_up: float | None = None,
        first_order: bool = False,
        engine: str = "auto",
        through: bool | None = None,
        reuse_inner_eps: bool = False,
        inner_params: Sequence[str] | None = None,
        batchnorm: str = "batch",
        chunk_size: int | None = None,
        workers: int | str = "auto",
        recompute: int | str | None = None,
        split: bool = False,
        ascent: str = "global",
    ) -> None:
        _check_model(model)
        if not callable(loss_fn):
            raise TypeError(f"expected loss_fn(output, y) to be callable, got {loss_fn!r}")
        if not (isinstance(inner_lr, int | float) and math.isfinite(inner_lr) and inner_lr > 0):
            raise ValueError(f"expected inner_lr > 0 and finite, got inner_lr={inner_lr!r}")
        _check_count("inner_steps", inner_steps)
        if chunk_size is not None:
            _check_count("chunk_size", chunk_size)
        if workers != "auto":
            _check_count("workers", workers)
        if inner_params is not None and (isinstance(inner_params, str) or not inner_params):
            raise ValueError(f"expected inner_params to be a list of patterns, got {inner_params!r}: e.g. ['head.*']")
        _check_choice("engine", engine, ("auto", *inner.ENGINES, *inner.TRACED))
        _check_choice("batchnorm", batchnorm, norms.POLICIES)
        if recompute is not None and engine in inner.TRACED:
            raise ValueError(
                f"engine={engine!r} runs all steps as one graph: recompute={recompute!r} needs engine='vmap'"
            )
        _check_choice("ascent", ascent, ASCENTS)
        if ascent == "local" and not split:
            raise ValueError("ascent='local' needs split=True: a process on its own has the whole meta-batch")
        sharp_low, sharp_up = _sharp_slots(variant, inner_rule, outer_rule)
        self.variant = next(name for name, where in VARIANTS.items() if where == (sharp_low, sharp_up))
        self.inner_rule = _slot(sharp_low, inner_rule or rule, "rho_low", rho_low, through)
        if self.inner_rule.needs_momentum:
            name = type(self.inner_rule).__name__
            raise ValueError(f"{name} needs a base optimizer with momentum, inner loops have none: variant='up'")
        self.outer_rule = _slot(sharp_up, outer_rule or rule, "rho_up", rho_up, None)
        if reuse_inner_eps and self.variant != "both":
            raise ValueError(f"reuse_inner_eps needs variant='both', got variant={self.variant!r}")
        if reuse_inner_eps and engine in inner.TRACED:
            raise ValueError(f"reuse_inner_eps needs engine 'higher', 'vmap' or 'auto', got engine={engine!r}")
        self.model, self.engine, self.chunk_size, self.workers = model, engine, chunk_size, workers
        self.split, self.ascent = split, ascent
        self.ranks = Ranks.initialised() if split else Ranks()
        self.inner_params = None if inner_params is None else list(inner_params)
        self.loop = inner.InnerLoop(
            model,
            loss_fn,
            self.inner_rule,
            inner_lr,
            inner_steps,
            self._adapted(),
            first_order,
            policy=batchnorm,
            per_step=norms.PerStep(model, inner_steps) if batchnorm == "per_step" else None,
            keep_eps=reuse_inner_eps,
            recompute=_segment_length(recompute, inner_steps),
        )
        odd = [k for k, p in model.named_parameters() if k in self.loop.adapted and p.is_complex()]
        if odd and not isinstance(self.inner_rule, Plain):
            raise ValueError(
                f"expected real parameters for {type(self.inner_rule).__name__} in the inner loop, got complex ones "
                f"({', '.join(odd[:4])}): hold them as pairs of real numbers (torch.view_as_complex in forward)"
            )
        self.inner_rule.init({k: p for k, p in model.named_parameters() if k in self.loop.adapted})
        self.engine_used: str | None = None
        self.engine_reason: str | None = None
        self._settled_in_training = False
        self._kernels = True  # until a model is found not to take them
        self._tried: set[tuple[object, ...]] = set()
        self.workers_used = 1
        self.workers_reason: str | None = None
        self.graphs = inner.Graphs(engine == "compiled") if engine in inner.TRACED else None
        self.gradient_evaluations = 0.0
        self.steps = 0
        self.last: Step | None = None
        self._shared: dict[bool, tuple[Any, int, str]] = {}  # by training: for what, among how many, and why
        self._classes: int | None = None
        self._beside = inner.Beside()
        self._example_ndim: int | None = None
        self._outer: SharpnessAware | None = None
        self._outer_state: tuple[State | None, int] = None, 0

    @property
    def counts(self) -> dict[str, float]:
        """Evaluations so far, counted a task: gradients on support and query sets, forwards alone."""
        return {k: self.loop.counts[k] for k in ("support", "query", "forward")}

    @property
    def skipped(self) -> int:
        """Meta-steps that updated nothing because a gradient was not finite."""
        return self._outer_now[1]

    @property
    def _outer_now(self) -> tuple[State | None, int]:
        return self._outer_state if self._outer is None else (self._outer.rule_state, self._outer.skipped)

    # training

    def meta_loss(self, tasks: Tasks) -> Tensor:
        """Mean query loss after adaptation, differentiable in the model's parameters.

        Args:
            tasks: a batch of tasks, or an iterable of batches or single tasks, whose shapes may differ.

        Raises:
            ValueError: malformed tasks, labels out of range, a loss that is no scalar, a model the engine cannot take.
        """
        batches = self._batches(tasks)
        with self._ready(self.loop, *batches):
            losses = []
            for numbers, batch in _chunks(batches, None, _wanted(batches)):
                losses.append(self._adapt(dataclasses.replace(self.loop, stream=self.steps), batch, numbers).loss)
            return torch.cat(losses).mean()

    def step(self, tasks: Tasks, optimizer: Optimizer, val_tasks: Tasks | None = None) -> Tensor:
        """One meta-step: the outer rule evaluates the meta-loss as often as it needs, then ``optimizer`` updates.

        Args:
            tasks: as for `meta_loss`.
            optimizer: a plain optimizer of the model's parameters; the outer rule shapes the gradients it steps on.
            val_tasks: held-out tasks, for outer rules that ask for them.

        Returns:
            The meta-loss at the undisplaced parameters, a 0-dim tensor; `last` has the accuracy too.

        Raises:
            TypeError: ``optimizer`` is sharpness-aware already; say so with ``variant`` and ``outer_rule`` instead. Or
                the outer rule asks for held-out tasks, and there are none.
            ValueError: as `meta_loss`.
        """
        outer = self._wrap(optimizer)
        batches = self._batches(tasks)
        device = batches[0].support[1].device
        with self._ready(self.loop, *batches) as workers, self.ranks.drawing(device, self.steps):
            self.ranks.equalise(self.model)
            closure, seen = self._closure(batches, workers)
            if val_tasks is None and self.outer_rule.validates:
                name = type(self.outer_rule).__name__
                raise TypeError(f"{name} in the outer loop asks for held-out tasks: step(..., val_tasks=...)")
            held_out = [] if val_tasks is None else self._batches(val_tasks)
            others: dict[str, Any] = {}
            if held_out:
                others["val"] = self._closure(held_out, workers, first=sum(map(_size, batches)))[0]
            before, skipped = self.loop.counts.copy(), outer.skipped
            try:
                loss = outer.step(closure, **others)
            except BaseException:  # nor do the other counters know of a step that broke off
                self.loop.counts.clear()
                self.loop.counts.update(before)
                optimizer.zero_grad()
                raise
        accuracy = None if seen[0].hits is None else float(seen[0].hits.mean())
        if self.split:
            loss, accuracy = self._sum_up(loss, seen[0], before)
        self.steps += 1
        unit = sum(map(_size, batches)) * (self.loop.steps + 1)
        spent = sum(COST[k] * (v - before[k]) for k, v in self.loop.counts.items())
        self.gradient_evaluations += spent / unit
        self.last = Step(float(loss), accuracy, outer.skipped > skipped)
        return loss

    def _closure(self, batches: list[Task], workers: int, first: int = 0) -> tuple[Callable[..., Tensor], list[Seen]]:
        """The meta-loss as a closure, which parts select tasks of, and what its calls will have seen.

        The tasks' noise is that of the numbers from ``first``, so that no two tasks of a step share it.
        Backward runs chunk by chunk, so that the graph of one chunk is alive at a time.
        """
        size = self.chunk_size or (1 if self.engine_used == "higher" else None)
        displacements: dict[int, list[Params]] = {}  # of each task, one a step
        seen: list[Seen] = []

        def closure(part: Part | None = None) -> Tensor:
            wanted = _wanted(batches, part)
            rows = self._rows(wanted, part)
            total = len(rows if self.ranks.local else wanted)
            chunks = list(_chunks(batches, size, [wanted[row] for row in rows]))
            jobs, loop = [], dataclasses.replace(self._settled(self.loop), stream=self.steps)
            for numbers, chunk in chunks:
                known = [displacements[n] for n in numbers if n in displacements]
                given = [tree.stack(step) for step in zip(*known, strict=True)] if len(known) == len(numbers) else []
                jobs.append(self._job([first + n for n in numbers], chunk, given))
            losses, hits = [], []
            results = inner.backward(
                *(self._engine, loop, self._params(), jobs, total),
                beside=self._beside,
                workers=workers,
                graphs=self.graphs,
            )
            for (numbers, chunk), job, found in zip(chunks, jobs, results, strict=True):
                if self.loop.keep_eps and not job.given:
                    for row, n in enumerate(numbers):
                        displacements[n] = [{k: v[row] for k, v in eps.items()} for eps in found.eps]
                losses.append(found.loss.detach())
                hits += [h for h in [_accuracy(found, chunk)] if h is not None]
            own = Seen(self._joined(losses), torch.cat(hits) if hits else None)
            if self.ranks.local:
                seen.append(own)
                return own.losses.mean().expand(len(wanted))
            statistics = () if self.loop.per_step is None else self.loop.per_step.buffers.values()
            self._check_shared()
            seen.append(Seen(*self.ranks.gather(rows, len(wanted), *own, self.model.parameters(), statistics)))
            return seen[-1].losses

        return closure, seen

    # of several ranks

    def _rows(self, wanted: Sequence[int], part: Part | None) -> list[int]:
        """Which of the wanted tasks are this rank's."""
        if self.ascent == "local" and part is not None:
            raise ValueError(
                f"expected ascent='global' for {self.outer_rule}, which evaluates parts of a meta-batch: with "
                "ascent='local' no rank has the losses of all tasks to choose them by"
            )
        return self.ranks.rows(wanted)

    def _check_shared(self) -> None:
        """Raise ValueError where a loss has gradients that ranks would not sum up."""
        if self.ranks.size == 1:
            return
        known = self._params()
        strange = [t for k, t in self._beside.among(known).items() if k not in known]
        if strange:
            raise ValueError(
                "expected a loss without weights of its own, as ranks share gradients of the model alone, got a tensor "
                f"{list(strange[0].shape)} that needs gradients: make it a part of the model, or use one process"
            )

    def _joined(self, losses: list[Tensor]) -> Tensor:
        """Losses of chunks; a rank may have none."""
        return torch.cat(losses) if losses else next(self.model.parameters()).detach().new_zeros(0)

    def _sum_up(self, loss: Tensor, seen: Seen, before: Mapping[str, float]) -> tuple[Tensor, float | None]:
        """Loss and accuracy of a pass that ranks may have seen a share of; their counts since ``before`` are summed."""
        counts, hits = self.loop.counts, seen.losses[:0] if seen.hits is None else seen.hits
        parts = [float(v) for v in (seen.losses.sum(), len(seen.losses), hits.sum(), len(hits))]
        spent = [counts[k] - before.get(k, 0.0) for k in COST]
        summed = self.ranks.sum([torch.tensor(parts + spent, dtype=torch.float64, device=loss.device)])[0].tolist()
        counts.update((k, before.get(k, 0.0) + v) for k, v in zip(COST, summed[4:], strict=True))
        return loss.new_tensor(summed[0] / summed[1]), summed[2] / summed[3] if summed[3] else None

    def _wrap(self, optimizer: Optimizer) -> SharpnessAware:
        if isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"expected a plain optimizer, got {type(optimizer).__name__}, which is sharpness-aware already: pass "
                "its base, and say what the outer loop does with variant= and outer_rule="
            )
        if self._outer is None or self._outer.base is not optimizer:
            state = self._outer_now
            self._outer = SharpnessAware(optimizer, self.outer_rule, model=self.model, ascent=self.ascent)
            self._outer.ranks = self.ranks if self.split else None
            self._outer.rule_state, self._outer.skipped = state
        return self._outer

    # using what was learnt

    def adapt(self, task: Task, *, steps: int | None = None, plain: bool = False) -> nn.Module:
        """The model adapted to one task: an independent copy in eval mode, without any graph, fit for pickling.

        Args:
            task: one task (no task dimension); only its support set is used.
            steps: inner steps; None: as in training.
            plain: adapt without SAM.

        Raises:
            ValueError: a malformed task.
        """
        x, y = task.support
        batch = self._batches(Task((x[None], y[None]), (x[None], y[None])))[0]
        loop = self._judging(steps, plain)
        with torch.no_grad(), self._ready(loop, batch):
            fast = self._adapt(loop, batch).params
            adapted = copy.deepcopy(self.model)
            for name, p in adapted.named_parameters():
                p.grad = None
                if name in fast:
                    p.copy_(fast[name][0])
            statistics = {} if loop.per_step is None else loop.per_step.at(loop.steps, write=False)
            norms.settle(adapted, loop.policy, statistics)
        return adapted

    def evaluate(self, tasks: Tasks, *, steps: int | None = None, plain: bool = False) -> Evaluation:
        """Adapt to each task and judge on its query set; no graph is built and nothing is updated.

        Args:
            tasks: a batch of tasks, or an iterable of batches or single tasks.
            steps: inner steps; None: as in training.
            plain: adapt without SAM, whatever training did.

        Raises:
            ValueError: no tasks, or malformed ones.
        """
        loop = self._judging(steps, plain)
        self.ranks.equalise(self.model)
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        count = 0
        with torch.no_grad():
            for given in [tasks] if isinstance(tasks, Task) else ([task] for task in tasks):
                for batch in self._batches(given):
                    own = self.ranks.rows(range(count, count + _size(batch)))
                    with self._ready(loop, batch) as workers:
                        chunks = list(_chunks([batch], -(-_size(batch) // workers), own))
                        jobs = [self._job([count + n for n in numbers], chunk) for numbers, chunk in chunks]
                        settled, params = self._settled(loop), self._params()
                        results = inner.backward(self._engine, settled, params, jobs, 1, workers=workers)
                        for (_, chunk), found in zip(chunks, results, strict=True):
                            losses.append(found.loss.double())
                            hits += [h.double() for h in [_accuracy(found, chunk)] if h is not None]
                    count += _size(batch)
        if not count:
            raise ValueError("expected at least one task to evaluate, got none")
        rows = self.ranks.rows(range(count))
        seen = Seen(*self.ranks.gather(rows, count, self._joined(losses), torch.cat(hits) if hits else None))
        judged = (seen.losses if seen.hits is None else seen.hits).cpu()
        loss, loss_ci95 = _mean_ci95(seen.losses.cpu())
        mean, ci95 = _mean_ci95(judged)
        accuracy = None if seen.hits is None else mean
        transductive = norms.is_transductive(self.model, loop.policy)
        return Evaluation(accuracy, ci95, len(judged), loss, loss_ci95, judged.tolist(), transductive)

    def _judging(self, steps: int | None, plain: bool) -> inner.InnerLoop:
        loop = self.loop
        if steps is not None and steps != loop.steps:
            _check_count("steps", steps)
            if loop.per_step is not None:
                raise ValueError(f"batchnorm='per_step' has statistics for {loop.steps} inner steps, got steps={steps}")
        rule = Plain() if plain else loop.rule
        return dataclasses.replace(
            loop, rule=rule, steps=steps or loop.steps, training=False, keep_eps=False, counts=defaultdict(float)
        )

    # state

    def state_dict(self) -> dict[str, Any]:
        """Model, outer rule's state, per-step statistics, counters; the optimizer has a ``state_dict`` of its own."""
        rule_state, skipped = self._outer_now
        return {
            "model": self.model.state_dict(),
            "outer": rule_state,
            "skipped": skipped,
            "per_step": None if self.loop.per_step is None else dict(self.loop.per_step.buffers),
            "steps": self.steps,
            "counts": self.counts,
            "gradient_evaluations": self.gradient_evaluations,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; tensors are copied.

        Raises:
            RuntimeError: another model's state.
        """
        self.model.load_state_dict(state_dict["model"])
        device = next(self.model.parameters()).device
        rule_state = state_dict["outer"]
        if rule_state is not None:
            rule_state = {
                slot: {k: t.to(device, copy=True) for k, t in value.items()} if isinstance(value, dict) else value
                for slot, value in rule_state.items()
            }
        self._outer_state = rule_state, state_dict["skipped"]
        if self._outer is not None:
            self._outer.rule_state, self._outer.skipped = self._outer_state
        for k, b in {} if self.loop.per_step is None else self.loop.per_step.buffers.items():
            b.copy_(state_dict["per_step"][k])
        self.loop.counts.clear()
        self.loop.counts.update(state_dict["counts"])
        self.gradient_evaluations, self.steps = state_dict["gradient_evaluations"], state_dict["steps"]

    @classmethod
    def load(cls, run_folder: str | Path, *, weights: str = "best", device: torch.device | str = "cpu") -> SharpMAML:
        """The meta-learner of a run folder, as ``metasam-train`` left it.

        Rebuilding it calls what the run's config names (a network of your own must be importable), so load only
        folders whose makers you trust.

        Args:
            run_folder: the folder.
            weights: "best" (by validation, ``best.pt``) or "latest" (``checkpoint.pt``).
            device: where to put it.

        Raises:
            FileNotFoundError: no such checkpoint.
            CheckpointError: it is damaged, or not from a run folder.
            ValueError: something that the config names cannot be built.
        """
        _check_choice("weights", weights, ("best", "latest"))
        path = Path(run_folder) / {"best": "best.pt", "latest": "checkpoint.pt"}[weights]
        if not path.exists():
            raise FileNotFoundError(f"expected the checkpoint {path}, there is none: is that the folder of a run?")
        saved = checkpoint.load(path, map_location=device)
        node = saved.get("config", {}).get("maml")
        if node is None:
            raise checkpoint.CheckpointError(
                f"{path} does not say what it is a checkpoint of: expected config.maml in it"
            )
        maml: SharpMAML = instantiate({**node, "model": instantiate(node["model"]).to(device)})
        maml.load_state_dict(saved["maml"])
        return maml

    # inside

    def _adapted(self) -> frozenset[str]:
        """Names of the parameters that adapt; which are frozen may change between steps."""
        free = [n for n, p in self.model.named_parameters() if p.requires_grad]
        if self.inner_params is None:
            return frozenset(free)
        for pattern in self.inner_params:
            if not fnmatch.filter(free, pattern):
                raise ValueError(
                    f"inner_params={pattern!r} matches no trainable parameter; there are: {', '.join(free[:8])}"
                    f"{', ...' if len(free) > 8 else ''}"
                )
        return frozenset(n for p in self.inner_params for n in fnmatch.filter(free, p))

    def _batches(self, tasks: Tasks) -> list[Task]:
        """Batches of equal shapes on the model's device, with everything checked that can be without the model."""
        if isinstance(tasks, Task):
            x, y = tasks.support
            # columns of numbers, [n, 1], are not n tasks of one example without features
            if y.ndim < 2 or (y.is_floating_point() and x.ndim < 3):
                raise ValueError(
                    "expected a batch of tasks with a leading task dimension, support x [T, n, ...] and y [T, n] or "
                    f"[T, n, ...], got x {list(x.shape)}, y {list(y.shape)}: pass [task] for a single task"
                )
            _check_batch(tasks)
            self._example_ndim = x.ndim - 2
            batches = [tasks]
        else:
            given = list(tasks) if isinstance(tasks, Iterable) else [tasks]
            strangers = [type(t).__name__ for t in given if not isinstance(t, Task)]
            if strangers or not given:
                raise ValueError(f"expected a Task or several, got {strangers[0] if strangers else 'none'}")
            single = [t for t in given if not self._is_batch(t)]
            if len(single) == len(given) and len({_shapes(t) for t in given}) == 1:
                batches = [Task.stack(given)]
            else:
                batches = [t if self._is_batch(t) else Task.stack([t]) for t in given]
        for batch in batches:
            _check_batch(batch)
        device = next(self.model.parameters()).device
        return [_long_labels(batch).to(device) for batch in batches]

    def _is_batch(self, task: Task) -> bool:
        """Whether a task among several has a task dimension.

        Class labels tell, ``[n]`` or ``[T, n]``, and so does any batch seen alone before. Failing both, as with images
        for targets, a batch is what could be one: as many tasks, and as many examples, in x as in y.
        """
        (x, y), (_, query_y) = task.support, task.query
        if not y.is_floating_point() and y.ndim == 1:
            self._example_ndim = x.ndim - 1
        if self._example_ndim is not None:
            return x.ndim == self._example_ndim + 2
        if y.ndim < 2 or (y.is_floating_point() and x.ndim < 3):
            return False
        return len(y) == len(query_y) and x.shape[:2] == y.shape[:2]

    @contextmanager
    def _ready(self, loop: inner.InnerLoop, batch: Task, *others: Task) -> Iterator[int]:
        """Within: norms follow the policy, judging is in eval mode, and the engine is settled: on the first batch.

        And on the first that is trained on: without second derivatives, and in eval mode, less is seen.

        Yields:
            How many threads may share the tasks.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("inner loops need gradients, which torch.inference_mode() forbids: use torch.no_grad()")
        if loop.per_step is not None:
            loop.per_step.follow(self.model)
        with (
            nullcontext() if loop.training else judging(self.model),
            norms.mode(self.model, loop.policy, training=loop.training),
            inner.differentiable(self.model),
        ):
            loop = dataclasses.replace(loop)  # it remembers where the model has its tensors, which may yet change
            if self.engine_used is None or (loop.training and not self._settled_in_training):
                self._classes = inner.classes(loop, self._params(), batch)
                self._check_labels(batch)
                self.engine_used, self.engine_reason = inner.choose(self.engine, loop, self._params(), batch)
                self._settled_in_training, self._kernels = loop.training, True
                self._tried.clear()
            for one in (batch, *others):
                self._try_kernels(loop, one)
            yield self._share(loop, batch)

    def _try_kernels(self, loop: inner.InnerLoop, batch: Task) -> None:
        """Once for every state of the model and shape of tasks: on either, it may do what only torch's kernels do."""
        if not self._kernels:
            return
        state = tuple(inner.without_tensors(inner.held(self.model)).items())
        case = state, loop.training, tuple(s[1:] for s in _shapes(batch))
        if case in self._tried:
            return
        self._tried.add(case)
        against: str | None = "torch's kernels, as the model's attributes keep changing"
        if len({state for state, *_ in self._tried}) > KERNEL_TRIALS:
            self._kernels = False
        else:
            self._kernels, against = inner.use_kernels(str(self.engine_used), loop, self._params(), batch)
        self.engine_reason = "; ".join(filter(None, (self.engine_reason, against)))

    def _share(self, loop: inner.InnerLoop, batch: Task) -> int:
        """How many threads may share the tasks; found out anew when modes or numbers in the model change."""
        watched = self.engine_used == "higher" and self.workers != 1
        now = self.engine_used, inner.numbers(inner.held(self.model)) if watched else None
        known = self._shared.get(loop.training)
        if known is None or known[0] != now:
            known = (
                now,
                *inner.workers(
                    self.workers,
                    str(self.engine_used),
                    dataclasses.replace(loop, kernels=self._kernels),
                    self._params(),
                    batch,
                ),
            )
            self._shared[loop.training] = known
        _, count, reason = known
        if loop.training or self.workers_reason is None:
            self.workers_used, self.workers_reason = count, reason
        return count

    def _adapt(self, loop: inner.InnerLoop, batch: Task, numbers: Sequence[int] | None = None) -> inner.Adapted:
        self._check_labels(batch)
        return self._engine(self._settled(loop), self._params(), batch, numbers=numbers)

    def _settled(self, loop: inner.InnerLoop) -> inner.InnerLoop:
        """The loop as it is now that the engine is chosen; which parameters are frozen may have changed."""
        return dataclasses.replace(loop, adapted=self._adapted(), kernels=self._kernels)

    def _job(self, numbers: Sequence[int], batch: Task, given: Sequence[Params] = ()) -> inner.Job:
        self._check_labels(batch)
        return inner.Job(numbers, batch, given)

    @property
    def _engine(self) -> inner.Engine:
        return inner.ENGINES["vmap" if self.engine_used in inner.TRACED else self.engine_used or "higher"]

    def _params(self) -> Params:
        return dict(self.model.named_parameters())

    def _check_labels(self, batch: Task) -> None:
        if self._classes is not None:
            inner.check_labels(batch, self._classes)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise TypeError("expected the network itself, got DataParallel: pass model.module; split=True shares tasks")
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"parameter {lazy[0]!r} has no shape yet: call the model once before handing it over")
    if not any(p.requires_grad for p in model.parameters()):
        have = "only frozen parameters" if any(True for _ in model.parameters()) else "no parameters"
        raise ValueError(f"expected a model with trainable parameters, {type(model).__name__} has {have}")


def _check_count(name: str, value: int | str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected {name} to be an integer >= 1, got {name}={value!r}")


def _segment_length(recompute: int | str | None, steps: int) -> int | None:
    if recompute is None:
        return None
    if recompute == "auto":
        # least of n graphs and steps / n states, where the graph of a step weighs four states; it seldom weighs less
        return max(1, round(math.sqrt(steps / 4)))
    if isinstance(recompute, bool) or not isinstance(recompute, int) or recompute < 1:
        raise ValueError(f"expected recompute to be an integer >= 1, 'auto' or None, got recompute={recompute!r}")
    return recompute


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} among {', '.join(choices)}, got {name}={value!r}")


def _sharp_slots(
    variant: str | None, inner_rule: str | Rule | None, outer_rule: str | Rule | None
) -> tuple[bool, bool]:
    """Which slots (inner, outer) hold a rule other than Plain."""
    if variant is None:
        if inner_rule is None and outer_rule is None:
            return VARIANTS["both"]
        return not _is_plain(inner_rule), not _is_plain(outer_rule)
    _check_choice("variant", variant, VARIANTS)
    sharp = VARIANTS[variant]
    for slot, rule, takes in zip(("inner_rule", "outer_rule"), (inner_rule, outer_rule), sharp, strict=True):
        if rule is not None and takes == _is_plain(rule):
            raise ValueError(
                f"variant={variant!r} and {slot}={rule!r} contradict each other: leave variant out, or {slot}"
            )
    return sharp


def _is_plain(rule: str | Rule | None) -> bool:
    return rule is None or rule == "plain" or isinstance(rule, Plain)


def _slot(sharp: bool, rule: str | Rule, radius: str, rho: float | None, through: bool | None) -> Rule:
    if sharp:
        return make(rule, rho=rho, through=through)
    if rho is not None:
        raise ValueError(f"{radius}={rho} has no rule to be the radius of: choose another variant, or leave it out")
    return Plain()


def _long_labels(task: Task) -> Task:
    """Class labels as int64: losses refuse the smaller integers that labels are often stored in."""
    (a, b), (c, d) = task.support, task.query
    small = (torch.uint8, torch.int8, torch.int16)
    return Task((a, b.long() if b.dtype in small else b), (c, d.long() if d.dtype in small else d))


def _shapes(task: Task) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in (*task.support, *task.query))


def _check_batch(batch: Task) -> None:
    shapes = _shapes(batch)
    names = ("support x", "support y", "query x", "query y")
    shown = ", ".join(f"{n} {list(s)}" for n, s in zip(names, shapes, strict=True))
    if any(len(s) < 2 for s in shapes) or len({s[0] for s in shapes}) > 1:
        raise ValueError(
            f"expected a batch of tasks, [T, n, ...] with one T in all four tensors, got {shown}: "
            "pass [task] for a single task, or Task.stack([...]) for several"
        )
    if shapes[0][1] != shapes[1][1] or shapes[2][1] != shapes[3][1]:
        raise ValueError(f"expected as many examples in x as in y, got {shown}")
    if not all(s[0] and s[1] for s in shapes):
        raise ValueError(f"expected at least one task, one support and one query example, got {shown}")


def _size(batch: Task) -> int:
    return len(batch.support[1])


def _wanted(batches: list[Task], part: Part | None = None) -> list[int]:
    """Numbers of the tasks that ``part`` selects, in order; all of them for None."""
    numbers = range(sum(map(_size, batches)))
    if isinstance(part, Tensor):
        return sorted(torch.tensor(numbers)[part.to("cpu")].flatten().tolist())
    return list(numbers) if part is None else sorted(numbers[part])


def _chunks(batches: list[Task], size: int | None, wanted: Sequence[int]) -> Iterator[tuple[Sequence[int], Task]]:
    """The tasks of these numbers in chunks of at most ``size``, with their numbers."""
    first = 0
    for batch in batches:
        last = first + _size(batch)
        inside = [n - first for n in wanted if first <= n < last]
        length = size or max(len(inside), 1)
        for start in range(0, len(inside), length):
            rows = inside[start : start + length]
            where: Part | list[int] = rows
            if rows == list(range(rows[0], rows[-1] + 1)):
                where = slice(rows[0], rows[-1] + 1)  # a view
            yield [first + n for n in rows], batch.map(lambda t, r=where: t[r])
        first = last


def _accuracy(found: inner.Adapted, batch: Task) -> Tensor | None:
    """Share of query examples whose largest output is their label, a task, ``[T]``; None: not classification."""
    y = batch.query[1]
    if y.is_floating_point() or not isinstance(found.output, Tensor) or found.output.ndim != y.ndim + 1:
        return None
    return (found.output.detach().argmax(2) == y).float().flatten(1).mean(1)


def _mean_ci95(values: Tensor) -> tuple[float, float]:
    """Mean and half width of the 95% interval; the width of a single value is NaN."""
    spread = float(values.std(correction=1)) if len(values) > 1 else math.nan
    return float(values.mean()), 1.96 * spread / math.sqrt(len(values))
