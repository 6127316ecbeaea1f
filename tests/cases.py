"""The two tables: every rule meets every contract on every problem.

A new rule is one row in `RULES`; `test_rules.py`, `test_optim.py`, `test_inner.py` and `test_meta.py` do the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metasam import SharpnessAware, Task, batchnorm, inner
from metasam.perturb import Adaptive, Fisher, Unnormalised
from metasam.rules import (
    ESAM,
    GSAM,
    RWP,
    WSAM,
    Agnostic,
    FriendlySAM,
    Lookbehind,
    LookSAM,
    MomentumSAM,
    Plain,
    RandomSAM,
    Rule,
    Sharp,
    SparseSAM,
    VaSSO,
)

from . import references

ENGINES = tuple(inner.ENGINES)

SGD = partial(torch.optim.SGD, lr=0.1)

# a rule that only the tests know


@dataclass(frozen=True)
class Lookahead(Rule):
    """What `Lookbehind` is at radius 0 (Zhang et al. 2019, on one batch)."""

    steps: int = 2
    keep: float | None = 0.5

    def __call__(self, at, descend, params, state):
        grads, fast, ways = at().grads, params, []
        for _ in range(self.steps):
            fast = descend(fast, grads)
            ways.append({k: fast[k] - params[k] for k in fast})
        keep = dict.fromkeys(fast, self.keep)
        if self.keep is None:
            cosine = partial(nn.functional.cosine_similarity, dim=0)
            keep = {k: (cosine(ways[0][k].flatten(), way.flatten()) + 1) / 2 for k, way in ways[-1].items()}
        return {k: params[k] + way * keep[k] for k, way in ways[-1].items()}, state


@dataclass(frozen=True)
class RuleCase:
    """One rule and what it declares.

    Args:
        name: shown in test names.
        make: the rule, in a setting where its parts all matter.
        evaluations: gradient evaluations of one step; several numbers: of the steps of a cycle.
        validations: how many of them are of the validation loss.
        reference: one step of SGD from the equations, in plain torch (`references.py`).
        limit: what the rule is at radius 0.
        stateful: the rule remembers something between steps.
        names: the rule tells parameters apart by their names.
        scale_invariant: multiplying the loss does not change eps.
        base: the base optimizer that the equations are written with.
        refused: what an inner loop of several steps says when it cannot take the rule; empty: it takes it.
    """

    name: str
    make: Callable[[], Rule]
    evaluations: int | tuple[int, ...]
    reference: references.Step
    limit: Rule = field(default_factory=Plain)
    stateful: bool = False
    names: bool = False
    scale_invariant: bool = True
    base: Callable[..., torch.optim.Optimizer] = SGD
    validations: int = 0
    refused: str = ""

    @property
    def rule(self) -> Rule:
        return self.make()

    @property
    def cycle(self) -> tuple[int, ...]:
        """Gradient evaluations of successive steps, over and over."""
        return self.evaluations if isinstance(self.evaluations, tuple) else (self.evaluations,)

    @property
    def passes(self) -> list[tuple[int, int]]:
        """Every pass in which something may go wrong: how many steps came before, and the number of the pass."""
        return [
            (before, i) for before in range(1, len(self.cycle) + 1) for i in range(self.cycle[before % len(self.cycle)])
        ]

    @property
    def engines(self) -> tuple[str, ...]:
        """The inner engines that take it."""
        return () if self.refused else ENGINES

    @property
    def support(self) -> float:
        """Evaluations of a cycle in an inner loop, in units of one over the whole support set of 5 examples."""
        n = sum(self.cycle)
        return n * 1.0 if not self.rule.validates else 0.8 * (n - self.validations) + 0.2 * self.validations

    def at_radius(self, rho: Any) -> Rule:
        return dataclasses.replace(self.rule, **dict.fromkeys(self.rule.hyper, rho))


RULES = [
    RuleCase("plain", Plain, 1, references.plain),
    RuleCase("sam", partial(Sharp, 0.1), 2, partial(references.sam, rho=0.1)),
    RuleCase("asam", partial(Sharp, 0.5, Adaptive(0.02)), 2, partial(references.asam, rho=0.5, eta=0.02), names=True),
    RuleCase(
        "asam-const",
        partial(Sharp, 0.5, Adaptive(0.02), through=False),
        2,
        partial(references.asam, rho=0.5, eta=0.02, through=False),
        names=True,
    ),
    RuleCase(
        "asam-all", partial(Sharp, 0.5, Adaptive(0.0, None)), 2, partial(references.asam, rho=0.5, eta=0.0, only="")
    ),
    RuleCase("usam", partial(Sharp, 0.1, Unnormalised()), 2, partial(references.usam, rho=0.1), scale_invariant=False),
    RuleCase("multistep", partial(Sharp, 0.1, steps=3), 4, partial(references.multistep, rho=0.1, steps=3)),
    RuleCase(
        "multistep-projected",
        partial(Sharp, 0.1, steps=2, step_size=0.8),
        3,
        partial(references.multistep, rho=0.1, steps=2, step_size=0.8),
    ),
    RuleCase(
        "multistep-asam",
        partial(Sharp, 0.3, Adaptive(0.02), steps=2, step_size=0.8),
        3,
        partial(references.multistep_asam, rho=0.3, steps=2, step_size=0.8, eta=0.02),
        names=True,
    ),
    RuleCase(
        "fisher",
        partial(Sharp, 0.1, Fisher(20.0)),
        2,
        partial(references.fisher, rho=0.1, eta=20.0),
        scale_invariant=False,
    ),
    RuleCase(
        "lookbehind",
        partial(Lookbehind, 0.1),
        3,
        partial(references.lookbehind, rho=0.1, steps=2, alpha=0.5),
        limit=Lookahead(),
    ),
    RuleCase(
        "lookbehind-adaptive",
        partial(Lookbehind, 0.3, steps=2, keep=None),
        3,
        partial(references.lookbehind, rho=0.3, steps=2),
        limit=Lookahead(keep=None),
    ),
    RuleCase("gsam", partial(GSAM, 0.1, 0.6), 2, partial(references.gsam, rho=0.1, alpha=0.6)),
    # three steps of a test meet the SAM step, the step that reuses, and the return
    RuleCase(
        "looksam",
        partial(LookSAM, 0.3, 2, 0.7),
        (2, 1),
        partial(references.looksam, rho=0.3, k=2, alpha=0.7),
        stateful=True,
    ),
    RuleCase(
        "friendly",
        partial(FriendlySAM, 0.1, 0.7, 0.6),
        2,
        partial(references.friendly, rho=0.1, sigma=0.7, lam=0.6),
        stateful=True,
    ),
    RuleCase("vasso", partial(VaSSO, 0.1, 0.4), 2, partial(references.vasso, rho=0.1, theta=0.4), stateful=True),
    RuleCase("wsam", partial(WSAM, 0.1, 0.8), 2, partial(references.wsam, rho=0.1, gamma=0.8, decouple=True)),
    RuleCase(
        "wsam-coupled",
        partial(WSAM, 0.1, 0.8, decouple=False),
        2,
        partial(references.wsam, rho=0.1, gamma=0.8, decouple=False),
    ),
    # SGD of an inner loop keeps no momentum: the first step is a plain one, the second refuses
    RuleCase(
        "momentum",
        partial(MomentumSAM, 0.3),
        1,
        partial(references.momentum_sam, rho=0.3),
        stateful=True,
        base=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        refused="base optimizer with momentum",
    ),
    RuleCase(
        "agnostic",
        partial(Agnostic, 0.2, 0.1),
        4,
        partial(references.agnostic, rho_1=0.2, rho_2=0.1),
        validations=2,
    ),
    RuleCase(
        "agnostic-printed-momentum",
        partial(Agnostic, 0.2, 0.1, lookahead=False, val_momentum=0.6),
        3,
        partial(references.agnostic, rho_1=0.2, rho_2=0.1, lookahead=False, beta=0.6),
        stateful=True,
        validations=1,
    ),
    RuleCase(
        "random",
        partial(RandomSAM, 0.2, 0.3, 0.7, 5),
        2,
        partial(references.random_sam, rho=0.2, sigma=0.3, lam=0.7, seed=5),
        stateful=True,
        scale_invariant=False,
    ),
    RuleCase(
        "rwp", partial(RWP, 0.1, 0.6, "train", 5), 2, partial(references.rwp, rho=0.1, alpha=0.6, seed=5), stateful=True
    ),
    # what needs the losses of examples is in test_parts.py
    RuleCase(
        "esam",
        partial(ESAM, 0.2, 0.6, 1.0, 5),
        2,
        partial(references.esam, rho=0.2, beta=0.6, seed=5),
        stateful=True,
    ),
    RuleCase(
        "sparse",
        partial(SparseSAM, 0.2, 0.4, "fisher", 2, 0),
        2,
        partial(references.sparse, rho=0.2, sparsity=0.4, refresh=2),
        stateful=True,
    ),
    RuleCase(
        "sparse-dynamic",
        partial(SparseSAM, 0.2, 0.4, "dynamic", 1, drop=0.6, horizon=4, noise_seed=5),
        2,
        partial(references.sparse_dynamic, rho=0.2, sparsity=0.4, refresh=1, drop=0.6, horizon=4, seed=5),
        stateful=True,
    ),
]


# problems


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


class Untouched(nn.Module):
    """One parameter that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(3, 1), nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x).tanh()


class Buffers(nn.Module):
    """A buffer that the forward reads and one that it writes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 1)
        self.register_buffer("gain", torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.gain * self.body(x).tanh()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _frozen() -> nn.Module:
    model = _mlp()
    model[0].requires_grad_(False)
    return model


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Problem:
    """A small model in float64 and tasks for it; ``classes`` None is regression."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3,)
    classes: int | None = None
    examples: int = 5

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(dtype)

    def tasks(self, count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 2) -> Task:
        generator = torch.Generator().manual_seed(seed)

        def examples() -> tuple[Tensor, Tensor]:
            x = torch.randn(count, self.examples, *self.shape, generator=generator, dtype=torch.float64).to(dtype)
            if self.classes is None:
                y = torch.randn(count, self.examples, 1, generator=generator, dtype=torch.float64).to(dtype)
                return x, y
            return x, torch.randint(self.classes, (count, self.examples), generator=generator)

        return Task(examples(), examples())

    def batch(self, dtype: torch.dtype = torch.float64, seed: int = 2) -> tuple[Tensor, Tensor]:
        return self.tasks(1, dtype, seed).unbind()[0].support

    @property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.mse_loss if self.classes is None else nn.functional.cross_entropy


PROBLEMS = [
    Problem("mlp", _mlp),
    Problem("conv", _conv, (1, 4, 4), 3),
    Problem("quadratic", partial(nn.Linear, 3, 1, bias=False)),
    Problem("tied", Tied),
    Problem("frozen", _frozen),
    Problem("untouched", Untouched),
    Problem("buffers", Buffers),
]
MLP, CONV = PROBLEMS[:2]

INNER = [c for c in RULES if not c.refused]

each_rule = pytest.mark.parametrize("case", RULES, ids=lambda c: c.name)
each_inner_rule = pytest.mark.parametrize("case", INNER, ids=lambda c: c.name)
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
each_engine = pytest.mark.parametrize("engine", ENGINES)


# comparing


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, each once."""
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal to the last bit, in keys, dtypes and values."""
    assert found.keys() == wanted.keys()
    for k in wanted:
        assert found[k].dtype == wanted[k].dtype
        assert torch.equal(found[k], wanted[k]), f"{k}: {found[k]} is not {wanted[k]}"


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative error of the whole: parts that are zero up to rounding (a bias before BatchNorm) weigh nothing."""
    assert found.keys() == wanted.keys()
    error = sum(float((found[k] - wanted[k]).detach().square().sum()) for k in wanted) ** 0.5
    size = sum(float(wanted[k].detach().square().sum()) for k in wanted) ** 0.5
    assert size > 0, "nothing to compare"
    return error / size


def gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name; zero where there is none."""
    free = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True)
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(free.items(), found, strict=True)}


def slope(function: Callable[[], Tensor], model: nn.Module, seed: int = 3) -> tuple[float, float]:
    """Derivative of ``function`` along a random unit direction of the parameters: by autograd, by differences.

    Five-point differences: with h = 5e-5 their error is near 1e-11 on functions as smooth as these.
    """
    generator = torch.Generator().manual_seed(seed)
    free = {k: p for k, p in model.named_parameters() if p.requires_grad}
    along = {k: torch.randn(p.shape, generator=generator, dtype=p.dtype) for k, p in free.items()}
    size = sum(float(v.square().sum()) for v in along.values()) ** 0.5
    along = {k: v / size for k, v in along.items()}
    found = gradients(function(), model)
    home = params_of(model)

    def at(h: float) -> float:
        with torch.no_grad():
            for k, p in free.items():
                p.copy_(home[k] + h * along[k])
        value = float(function().detach())
        with torch.no_grad():
            for k, p in free.items():
                p.copy_(home[k])
        return value

    h = 5e-5
    differences = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    return float(sum((found[k] * along[k]).sum() for k in along)), differences


# running


def closure_of(problem: Problem, model: nn.Module, batch: tuple[Tensor, Tensor], change: Any = None) -> Callable:
    """A closure of the usual form; ``change(n, loss) -> loss`` may spoil its n-th call (from 0)."""
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        for p in model.parameters():
            p.grad = None
        loss = problem.loss_fn(model(batch[0]), batch[1])
        calls, n = calls + 1, calls
        (loss if change is None else change(n, loss)).backward()
        return loss

    return closure


def closures_of(
    problem: Problem, model: nn.Module, batch: tuple[Tensor, Tensor] | None = None, change: Any = None, val: Any = None
) -> dict[str, Callable]:
    """Arguments of ``step``, for rules that want a validation batch as well; ``change`` counts all calls."""
    dtype = next(model.parameters()).dtype
    batches = {"closure": batch or problem.batch(dtype), "val": val or problem.batch(dtype, seed=7)}
    calls = itertools.count()

    def counted(_: int, loss: Tensor) -> Tensor:
        return change(next(calls), loss)

    return {k: closure_of(problem, model, b, None if change is None else counted) for k, b in batches.items()}


def live(
    problem: Problem,
    rule: Rule,
    batch: tuple[Tensor, Tensor] | None = None,
    *,
    val: tuple[Tensor, Tensor] | None = None,
    steps: int = 3,
    base: Any = SGD,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """The model after some steps of the live optimizer on one batch."""
    model = problem.model(dtype)
    optimizer = SharpnessAware(base(model.parameters()), rule, model=model)
    closures = closures_of(problem, model, batch, val=val)
    for _ in range(steps):
        optimizer.step(**closures)
    return model


def inner_loop(model: nn.Module, problem: Problem, rule: Rule, **settings: Any) -> inner.InnerLoop:
    free = frozenset(k for k, p in model.named_parameters() if p.requires_grad)
    return inner.InnerLoop(model, problem.loss_fn, rule, 0.1, **{"steps": 3, "adapted": free, **settings})


def run_engine(engine: str, loop: inner.InnerLoop, tasks: Task, numbers: Sequence[int] | None = None) -> inner.Adapted:
    """The engine as `SharpMAML` calls it."""
    with (
        torch.set_grad_enabled(loop.training),
        batchnorm.mode(loop.model, loop.policy, training=loop.training),
        inner.differentiable(loop.model),
    ):
        return inner.ENGINES[engine](loop, dict(loop.model.named_parameters()), tasks, numbers=numbers)
