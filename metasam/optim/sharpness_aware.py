"""The live runtime of every rule: a true ``torch.optim.Optimizer``."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import shards, tree
from ..perturb import check_number
from ..ranks import Ranks
from ..rules import DirectionRule, Rule
from ..types import Params, State
from .distributed import check_ascent, check_params
from .foreign import mark, watched
from .oracle import Closure, LiveDescent, LiveOracle, as_real, copy, slots
from .passes import Passes, WithoutClosure
from .scaling import Gate, put
from .state import check_group, load, pack

OPTIONS: tuple[str, ...] = ("clip", "same_noise", "ascent")
"""Keywords of `SharpnessAware` that the named methods pass on."""

_KEPT = ("base", "rule", "rule_state", "model", "skipped", "counts")  # and the options, in copies and pickles


class SharpnessAware(WithoutClosure):
    """Take the steps of ``rule`` with the updates of ``base``.

    Each ``step(closure)`` lets the rule evaluate the closure at displaced weights, puts the weights back bit for bit,
    and steps ``base`` with the gradients that the rule chose. Learning rates, param groups and schedulers are the
    base's: ``param_groups``, ``state`` and ``defaults`` are views of its own, so a scheduler may be given either
    object. The rule's radii (``rho``) live in the param groups beside ``lr``, and can differ by group or be scheduled.

    A step in which a gradient, or a loss that a rule chooses examples by, is not finite changes nothing but `skipped`:
    weights, state and running statistics stay as they are (those of a batch that was counted before `first_step` do
    not).

    Args:
        base: the optimizer that updates. LBFGS calls closures of its own and is refused.
        rule: a `metasam.rules.Rule`.
        model: gives parameters their names (ASAM tells weights from biases by them) and speeds up finding BatchNorm.
            Without it names are those of ``base`` (``named_parameters()``), else numbers, and BatchNorm is found as it
            is called, by a global hook, for which ``torch.compile`` compiles over and over.
        clip: largest norm of the gradient that ``base`` descends along, as ``clip_grad_norm_`` just before its step;
            the ascent is not clipped. Rules that descend on their own clip at each ``base.step()`` (Lookbehind's
            inner steps, WSAM's plain step without its sharpness term). None: no limit.
        same_noise: every pass of a step draws the same dropout masks (torch's own generators; CPU and CUDA), so that
            passes differ by the weights alone. Generators end up where the first pass left them. Parts of a batch have
            masks of their own.
        ascent: what data-parallel workers climb along. "local": each along the gradient of its own part of the batch,
            which nothing is sent for (m-sharpness; what the papers do). "global": all along the same gradient of the
            whole batch. Either way the descent gradient is synchronised and weights stay equal. Found in ``model``, or
            as it is called, is ``DistributedDataParallel``; parameters sharded by ``fully_shard`` always climb
            globally. Where the ascent is local, Friendly-SAM, VaSSO, SparseSAM and Agnostic-SAM with ``val_momentum``
            remember gradients of their worker alone: to resume bit for bit, each worker saves its own state. m-SAM
            needs batches of one size on all workers, as each part is a synchronised backward.

    BatchNorm counts a batch once: running statistics are those of the first train evaluation at undisplaced weights.
    So does the power iteration of ``spectral_norm``.

    Weights are best kept in float32 (with the model under autocast, in the closure or around the step): bfloat16
    weights round most of a small displacement away, which is warned about once.

    Gradients may accumulate over micro-batches within one closure; sparse ones are dense while the rule works and
    reach the base as sparse as they came, so memory is that of dense ones.

    Raises:
        TypeError: ``base`` is no optimizer, is sharpness-aware already, or is LBFGS; ``rule`` is no rule.
        ValueError: the rule cannot work on these parameters, or the base has a setting of the name of a radius
            (Adadelta's rho) or maximises; a radius of a group is none; clip is not positive; ascent is neither.
    """

    base: Optimizer
    rule: Rule
    rule_state: State | None
    model: nn.Module | None
    clip: float | None = None
    same_noise: bool = False
    ascent: str = "local"
    ranks: Ranks | None = None  # that the closure sums gradients over
    gates: Sequence[Gate] = ()
    warned: bool = False  # of gradients from outside the closure
    warned_of_none: bool = False  # of a step without any gradient
    arrives: bool = False  # once it is known whether rounding swallows a displacement
    skipped: int
    """Steps skipped because a gradient was not finite."""
    counts: dict[str, float]
    """Evaluations so far, in batches of their stream: gradients by its name ("train", "val"), forwards as "forward";
    parts of a batch count their fraction, the closure's own accumulation counts as one."""
    hollow = False
    """Stepped once to have a state to load into, as ``torch.distributed.checkpoint`` does."""

    def __init__(
        self,
        base: Optimizer,
        rule: Rule,
        *,
        model: nn.Module | None = None,
        clip: float | None = None,
        same_noise: bool = False,
        ascent: str = "local",
    ) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(f"expected base to be a torch.optim.Optimizer, got {type(base).__name__}")
        if isinstance(base, SharpnessAware):
            raise TypeError(f"expected a plain base optimizer, got one that is sharpness-aware already: {base.rule}")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError("expected a base that steps on given gradients; LBFGS evaluates closures of its own")
        if not isinstance(rule, Rule):
            raise TypeError(f"expected a metasam.rules.Rule, got {rule!r}")
        if clip is not None:
            check_number("clip", clip)
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"expected clip > 0, the largest norm of a gradient, or None, got clip={clip}")
        taken = [k for k in rule.hyper if k in inspect.signature(type(base).__init__).parameters]
        if taken:
            raise ValueError(
                f"{type(base).__name__} has a setting {taken[0]!r} of its own, and so has {type(rule).__name__}: both "
                "would live in the param groups under one name; choose another base"
            )
        check_ascent(ascent)
        if model is not None:
            _name(base, model)
        for key in rule.hyper:
            base.defaults.setdefault(key, getattr(rule, key))
            for group in base.param_groups:
                group.setdefault(key, getattr(rule, key))
        for group in base.param_groups:
            check_group(group, rule)
        # Optimizer.__init__ would give us groups of our own; __setstate__ only prepares its hooks
        self.__setstate__({"base": base, "rule": rule, "rule_state": None, "model": model, "skipped": 0, "counts": {}})
        self.clip, self.same_noise, self.ascent = clip, same_noise, ascent
        check_params(self._live())
        rule.init(self._constants())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's param groups, which hold the rule's radii too."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state; the rule's own is `rule_state`."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults and the rule's radii."""
        return self.base.defaults

    def __getstate__(self) -> dict[str, Any]:
        self._expect_no_pass("a copy")
        return {k: self.__dict__[k] for k in (*_KEPT, *OPTIONS) if k in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rule}, {self.base})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; radii it does not name are the rule's, and a model names its parameters.

        Raises:
            ValueError: a radius that is none, maximize=True, or parameters that the rule cannot work on; nothing is
                added.
        """
        self._expect_no_pass("add_param_group()")
        check_group({**self.defaults, **param_group}, self.rule)
        if self.model is not None:
            given = param_group["params"]
            params = [given] if isinstance(given, Tensor) else list(given)
            if all(isinstance(p, Tensor) for p in params):
                param_group = {**param_group, "params": params, "param_names": _names(params, self.model)}
        self.base.add_param_group(param_group)
        try:
            check_params(self._live())
            self.rule.init(self._constants())
        except (TypeError, ValueError):
            del self.base.param_groups[-1]
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the base's parameters."""
        self.base.zero_grad(set_to_none)

    def _live(self) -> Params:
        """The parameters that want gradients, by name, or by number over all groups; each tensor once."""
        seen: set[int] = set()
        params = [p for group in self.param_groups for p in group["params"]]
        live = {}
        for key, p in zip(self._all_keys(), params, strict=True):
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                live[key] = p
        return live

    def _constants(self) -> Params:
        """What a rule sees of the live parameters."""
        return as_real(tree.detach(self._live()))

    def _current_rule(self) -> Rule:
        """The rule with the radii of the param groups: one value, or one by parameter where groups differ."""
        radii: dict[str, Any] = {}
        for key in self.rule.hyper:
            values = [group[key] for group in self.param_groups]
            if all(v is values[0] or v == values[0] for v in values):
                radii[key] = values[0]
            else:
                sizes = [len(group["params"]) for group in self.param_groups]
                each = [v for v, n in zip(values, sizes, strict=True) for _ in range(n)]
                radii[key] = dict(zip(self._all_keys(), each, strict=True))
        return dataclasses.replace(self.rule, **radii) if radii else self.rule  # type: ignore[type-var]

    def _all_keys(self) -> list[str]:
        """Names of all parameters; those that come again (two models in one optimizer) with a number behind them."""
        names: list[str] = []
        for group in self.param_groups:
            names += map(str, group.get("param_names") or range(len(names), len(names) + len(group["params"])))
        if len(set(names)) == len(names):
            return names
        keys: dict[str, None] = {}
        for name in names:
            # behind, since ASAM looks at the part after the last dot
            ways = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
            keys[next(k for k in ways if k not in keys)] = None
        return list(keys)

    def prepared(self, live: Params) -> tuple[Rule, Params, State]:
        """What a step starts from: the rule with its present radii, the weights as constants, the state."""
        rule, params = self._current_rule(), as_real(tree.detach(live))
        return rule, params, rule.init(params) if self.rule_state is None else _within(self.rule_state, live)

    def step(self, closure: Closure | None = None, *, scaler: GradScaler | None = None, **others: Closure) -> Any:
        """One step; returns the loss of the first train evaluation, as the closure gave it, detached.

        That is the loss at the undisplaced weights, except for rules that never go there, MomentumSAM and RandomSAM:
        theirs is at the first displaced ones.

        Args:
            closure: evaluates the training loss and calls backward; called once per gradient evaluation.
            scaler: of float16 autocast. Closures call ``scaler.scale(loss).backward()`` (those that return losses
                ``[B]`` do not: the step scales), and ``scaler.update()`` follows the step; neither
                ``scaler.step(optimizer)`` nor ``scaler.unscale_(optimizer)`` is called. A step with an inf in any pass
                is skipped once all its passes are done.
            others: closures of other batches that the rule asks for, by name (``val=...``; rules that do not validate
                leave it alone).

        Raises:
            TypeError: no closure, one of another name, or one that does not return a loss.
            RuntimeError: no ``scaler.update()`` since the last step, or the gradients were unscaled already; the base
                takes no sparse gradients.
        """
        return self._step(closure, scaler, others)

    @torch.no_grad()
    def _step(self, closure: Closure | None, scaler: GradScaler | None, others: Mapping[str, Closure]) -> Any:
        """`step` for methods that take other arguments: torch runs hooks around every ``step`` of the classes."""
        if closure is None and self._asks_for_a_state():
            self.hollow = True
            return self.base.step()
        if closure is None:
            raise TypeError(
                "expected step(closure): a sharpness-aware step evaluates the loss more than once. Write\n"
                "    def closure():\n        optimizer.zero_grad()\n        loss = ...\n"
                "        loss.backward()\n        return loss\n    optimizer.step(closure)\n"
                "and with a GradScaler, optimizer.step(closure, scaler=scaler) in place of scaler.step(optimizer)"
            )
        self._expect_no_pass("step(closure)")
        _check_closures(closure, others)
        if isinstance(closure, Passes):
            at: LiveOracle = closure
        else:
            live = self._live()
            at = LiveOracle(self, live, {"train": watched(closure, live, self), **others}, scaler)
        live = at.live
        self.base.zero_grad()  # what an earlier step left on a parameter that is frozen by now, too
        rule, params, state = self.prepared(live)
        with tree.fused():
            if isinstance(rule, DirectionRule):
                grads, state = rule.direction(at, params, state)
                commit = at.passed() and at.agree(_is_finite(grads, state), state)
                if commit:
                    at.descend(grads)
                else:
                    put(live, {})
            else:
                moved, state = rule(at, LiveDescent(self.base, live, at), params, state)
                commit = at.passed() and at.agree(_is_finite(moved, state), state)
                if commit:
                    copy(live, moved)
        mark(self)
        if live and at.empty and not self.warned_of_none:
            self.warned_of_none = True
            warnings.warn(_NO_GRADIENT, stacklevel=5)
        if commit:
            self.rule_state = state
        else:
            self.skipped += 1
            at.uncount()
        return at.first_loss

    def _asks_for_a_state(self) -> bool:
        """Whether a step without closure is that of ``torch.distributed.checkpoint``: no state, no lr, no gradient."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        still = all(g.get("lr", 1.0) == 0 for g in self.param_groups)
        return not self.base.state and still and not any(shards.local(g).any() for g in grads)

    def state_dict(self) -> dict[str, Any]:
        """The base's ``state_dict`` with the rule's state in it: tensors as ``rule.<slot>``, numbers in group 0."""
        self._expect_no_pass("state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = pack(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` gave; a plain optimizer's is taken too, with the rule's radii and a fresh state.

        Args:
            state_dict: of this rule, or of the base alone.
            strict: False takes from the state of another rule what is the base's, and starts this rule afresh.

        Raises:
            ValueError: not the state of an optimizer, or of other parameters, or of another rule, or without the
                tensors that the rule remembers; nothing is changed.
        """
        self._expect_no_pass("load_state_dict()")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        load(self, state_dict, strict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


_NO_GRADIENT = (
    "no evaluation of this step left a gradient on any parameter of the optimizer, so that nothing moves: did it call "
    "loss.backward(), with gradients enabled, on a loss of these parameters?"
)


def _check_closures(closure: Any, others: Mapping[str, Any]) -> None:
    """Raise TypeError unless all can be called, by names that rules ask for."""
    for name, given in {"closure": closure, **others}.items():
        if not callable(given):
            raise TypeError(
                f"expected {name} to be a function that evaluates a loss, got {type(given).__name__}: write "
                "optimizer.step(closure)"
            )
    unknown = [name for name in others if name != "val"]
    if unknown:
        raise TypeError(f"expected closures by the name val=, got {', '.join(f'{n}=' for n in unknown)}")


def _within(state: State, live: Params) -> State:
    """The state without what it remembers of parameters that are frozen by now."""
    return {n: {k: t for k, t in v.items() if k in live} if isinstance(v, dict) else v for n, v in state.items()}


def _is_finite(values: Params, state: State) -> bool:
    """Whether a step may be taken: an evaluation that leaves no trace in the direction can still spoil the state."""
    return all(tree.is_finite(t) for t in (values, *slots(state)))


def _name(base: Optimizer, model: nn.Module) -> None:
    """Give the groups of ``base`` the names of the model's parameters."""
    for group in base.param_groups:
        group["param_names"] = _names(group["params"], model)


def _names(params: Sequence[Tensor], model: nn.Module) -> list[str]:
    names = {id(p): n for n, p in model.named_parameters()}
    missing = sum(id(p) not in names for p in params)
    if missing:
        raise ValueError(
            f"expected the parameters of model={type(model).__name__}, got {missing} that are not among them"
        )
    return [names[id(p)] for p in params]
