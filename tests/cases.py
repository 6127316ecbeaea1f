"""The two tables: every rule meets every contract on every problem.

A new rule is one row in `RULES`; `test_rules.py`, `test_optim.py`, `test_inner.py` and `test_meta.py` do the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from metasam import SharpnessAware, Task, batchnorm, inner, tree
from metasam.perturb import Adaptive, Steepest, Unnormalised
from metasam.rules import DirectionRule, Plain, Rule, Sharp
from metasam.tree import Factor

from . import references

# rules that only the tests know: one with state, one that descends on its own


@dataclass(frozen=True)
class Averaged(DirectionRule):
    """eps climbs along a running average of gradients: a slot of parameters and a counter (VaSSO-like)."""

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    rho: Factor = 0.1
    keep: float = 0.6

    def init(self, params):
        return {"average": {}, "steps": 0}

    def direction(self, at, params, state):
        fresh = tree.scale(at(local=True).grads, 1 - self.keep)
        average = tree.add(tree.scale(state["average"], self.keep), fresh)
        eps = Steepest()(params, average, self.rho)
        return at(eps).grads, {"average": average, "steps": state["steps"] + 1}


@dataclass(frozen=True)
class Lookbehind(Rule):
    """Climb and descend ``steps`` times, then go a part ``alpha`` of the way (Mordido et al. 2024)."""

    hyper: ClassVar[tuple[str, ...]] = ("rho",)
    rho: Factor = 0.1
    steps: int = 2
    alpha: float = 0.5

    def __call__(self, at, descend, params, state):
        grads, eps, fast = at(local=True).grads, {}, params
        for _ in range(self.steps):
            eps = tree.add(eps, Steepest()(params, grads, self.rho))
            grads = at(eps).grads
            fast = descend(fast, grads)
        return tree.add(params, tree.scale(tree.add(fast, tree.scale(params, -1.0)), self.alpha)), state


@dataclass(frozen=True)
class Lookahead(Rule):
    """What `Lookbehind` is at radius 0."""

    steps: int = 2
    alpha: float = 0.5

    def __call__(self, at, descend, params, state):
        grads, fast = at().grads, params
        for _ in range(self.steps):
            fast = descend(fast, grads)
        return tree.add(params, tree.scale(tree.add(fast, tree.scale(params, -1.0)), self.alpha)), state


@dataclass(frozen=True)
class RuleCase:
    """One rule and what it declares.

    Args:
        name: shown in test names.
        make: the rule, in a setting where its parts all matter.
        evaluations: gradient evaluations of one step.
        reference: one step of SGD from the equations, in plain torch (`references.py`).
        limit: what the rule is at radius 0.
        stateful: the rule remembers something between steps.
        names: the rule tells parameters apart by their names.
        scale_invariant: multiplying the loss does not change eps.
    """

    name: str
    make: Callable[[], Rule]
    evaluations: int
    reference: references.Step
    limit: Rule = field(default_factory=Plain)
    stateful: bool = False
    names: bool = False
    scale_invariant: bool = True

    @property
    def rule(self) -> Rule:
        return self.make()

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
    RuleCase("averaged", Averaged, 2, partial(references.averaged, rho=0.1, keep=0.6), stateful=True),
    RuleCase(
        "lookbehind", Lookbehind, 3, partial(references.lookbehind, rho=0.1, steps=2, alpha=0.5), limit=Lookahead()
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

ENGINES = tuple(inner.ENGINES)

each_rule = pytest.mark.parametrize("case", RULES, ids=lambda c: c.name)
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

SGD = partial(torch.optim.SGD, lr=0.1)


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


def live(
    problem: Problem,
    rule: Rule,
    batch: tuple[Tensor, Tensor] | None = None,
    *,
    steps: int = 3,
    base: Any = SGD,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """The model after some steps of the live optimizer on one batch."""
    model = problem.model(dtype)
    optimizer = SharpnessAware(base(model.parameters()), rule, model=model)
    closure = closure_of(problem, model, problem.batch(dtype) if batch is None else batch)
    for _ in range(steps):
        optimizer.step(closure)
    return model


def inner_loop(model: nn.Module, problem: Problem, rule: Rule, **settings: Any) -> inner.InnerLoop:
    free = frozenset(k for k, p in model.named_parameters() if p.requires_grad)
    return inner.InnerLoop(model, problem.loss_fn, rule, 0.1, **{"steps": 3, "adapted": free, **settings})


def run_engine(engine: str, loop: inner.InnerLoop, tasks: Task) -> inner.Adapted:
    """The engine as `SharpMAML` calls it."""
    with (
        torch.set_grad_enabled(loop.training),
        batchnorm.mode(loop.model, loop.policy, training=loop.training),
        inner.differentiable(loop.model),
    ):
        return inner.ENGINES[engine](loop, dict(loop.model.named_parameters()), tasks)
