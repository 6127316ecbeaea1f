"""What a checkpoint holds of a sharpness-aware optimizer: the base's own state, with the rule's among it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import shards
from ..rules import Rule
from ..rules.base import check_radius
from ..types import State
from .oracle import as_real

if TYPE_CHECKING:
    from .sharpness_aware import SharpnessAware

_OF_THE_SHAPE = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind.__name__ not in ("Adafactor", "LBFGS")
)
"""Bases whose state has the shape of its parameter, or is a number."""


def pack(optimizer: SharpnessAware) -> dict[str, Any]:
    """The base's ``state_dict`` with the rule's state in it: tensors as ``rule.<slot>``, numbers in group 0."""
    packed = optimizer.base.state_dict()
    packed["state"] = {k: dict(v) for k, v in packed["state"].items()}
    # as text, since torch.distributed.checkpoint takes dicts apart and has no place for keys it did not expect
    numbers: dict[str, Any] = {"rule.skipped": optimizer.skipped, "rule.counts": json.dumps(optimizer.counts)}
    numbers["rule.name"] = type(optimizer.rule).__name__
    ids = dict(zip(optimizer._all_keys(), (i for g in packed["param_groups"] for i in g["params"]), strict=True))
    for slot, value in _memory(optimizer).items():
        if isinstance(value, dict):
            numbers[f"rule.{slot}"] = (len(value),)  # so that an empty slot is told from a lost one
            for key, tensor in value.items():
                packed["state"].setdefault(ids[key], {})[f"rule.{slot}"] = tensor
        else:
            numbers[f"rule.{slot}"] = value
    numbers["rule.fresh"] = optimizer.rule_state is None
    packed["param_groups"][0].update(numbers)
    return packed


def load(optimizer: SharpnessAware, state_dict: Mapping[str, Any], strict: bool = True) -> None:
    """Load what `pack` gave, or a plain optimizer's; all of it or, on an error, nothing.

    Raises:
        ValueError: see `SharpnessAware.load_state_dict`.
    """
    _check_saved(state_dict, optimizer.param_groups)
    groups = [dict(g) for g in state_dict["param_groups"]]
    # torch would cast per-parameter state to the parameter's dtype, and would alias it: ours is split off first
    per_param = {k: {n: t for n, t in v.items() if str(n).startswith("rule.")} for k, v in state_dict["state"].items()}
    plain = {k: {n: t for n, t in v.items() if not str(n).startswith("rule.")} for k, v in state_dict["state"].items()}
    numbers = {k: groups[0].pop(k) for k in list(groups[0]) if k.startswith("rule.")}
    if not numbers and optimizer.rule.slots and any(isinstance(i, str) for g in groups for i in g["params"]):
        warnings.warn(
            f"the checkpoint has nothing of what {type(optimizer.rule).__name__} remembers, which starts afresh: "
            "flatten_optimizer_state_dict=True drops it. Leave that out where a SharpnessAware saved it",
            stacklevel=3,
        )
    skipped, counts = numbers.pop("rule.skipped", 0), numbers.pop("rule.counts", {})
    counts = json.loads(counts) if isinstance(counts, str) else dict(counts)
    name, fresh = numbers.pop("rule.name", type(optimizer.rule).__name__), numbers.pop("rule.fresh", False)
    if name != type(optimizer.rule).__name__ and numbers:
        if strict:
            raise ValueError(
                f"expected the state of {type(optimizer.rule).__name__}, got that of {name}, which remembers "
                f"{', '.join(n[5:] for n in numbers)}: load_state_dict(state_dict, strict=False) takes the base "
                "optimizer's part of it and starts the rule afresh"
            )
        fresh = True
    for slot, value in numbers.items():
        lost = isinstance(value, tuple | list) and value[0] and not any(slot in v for v in per_param.values())
        if lost and not fresh:
            raise ValueError(f"expected {value[0]} tensors {slot!r} in the state of the parameters, got none")
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        for key in optimizer.rule.hyper:
            group.setdefault(key, own[key])
            if f"initial_{key}" in own:  # a schedule's
                group.setdefault(f"initial_{key}", own[f"initial_{key}"])
        check_group(group, optimizer.rule)
    _check_shapes(optimizer, groups, per_param, plain)
    state = {**state_dict, "state": {k: v for k, v in plain.items() if v}, "param_groups": groups}
    kept = optimizer.base.state, optimizer.base.param_groups
    try:
        optimizer.base.load_state_dict(state)
    except (KeyError, TypeError, IndexError) as e:
        optimizer.base.state, optimizer.base.param_groups = kept
        raise ValueError(
            f"expected the state of {type(optimizer.base).__name__}, got one that it cannot load: {e!r}"
        ) from e
    optimizer.skipped, optimizer.counts, optimizer.hollow = skipped, counts, False
    if not numbers or fresh:
        optimizer.rule_state = None
        return
    keys = dict(zip((i for g in groups for i in g["params"]), optimizer._all_keys(), strict=True))
    live = optimizer._constants()
    optimizer.rule_state = {}
    for slot, value in numbers.items():
        if value is None or isinstance(value, tuple | list):
            found = {keys[i]: v[slot] for i, v in per_param.items() if slot in v}
            optimizer.rule_state[slot[5:]] = {
                k: shards.alike(t.clone().to(live[k].device), live[k]) for k, t in found.items() if k in live
            }
        else:
            optimizer.rule_state[slot[5:]] = value


def _memory(optimizer: SharpnessAware) -> State:
    """The rule's state, or one of its form to load into."""
    if optimizer.rule_state is not None or not optimizer.hollow:
        return optimizer.rule_state or {}
    live = optimizer._constants()
    blank = {slot: {k: torch.zeros_like(p) for k, p in live.items()} for slot in optimizer.rule.slots}
    return {**optimizer.rule.init(live), **blank}


def check_group(group: Mapping[str, Any], rule: Rule) -> None:
    """Raise ValueError unless its radii are some and its base minimises."""
    if group.get("maximize"):
        raise ValueError(
            "expected a base that minimises, got maximize=True: the rule would displace the weights the wrong way; "
            "leave it out, and let the closure return -loss, having called (-loss).backward()"
        )
    for key in rule.hyper:
        if key in group:
            check_radius(group[key], key)


def _check_saved(state_dict: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless it is an optimizer's state, of groups of the same sizes."""
    groups = state_dict.get("param_groups", ())
    if not groups or "state" not in state_dict or any("params" not in g for g in groups):
        raise ValueError(
            "expected what state_dict() gave, with the keys 'state' and 'param_groups', got "
            f"{', '.join(map(repr, state_dict)) or 'an empty one'}"
        )
    sizes, wanted = [len(g["params"]) for g in groups], [len(g["params"]) for g in own]
    if sizes != wanted:
        raise ValueError(
            f"expected param groups of {wanted} parameters, got {sizes}: those of another model or grouping"
        )


def _check_shapes(optimizer: SharpnessAware, groups: Sequence[Mapping[str, Any]], memory: Any, plain: Any) -> None:
    """Raise ValueError on tensors of other parameters: torch would take them, and fail in the next step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, key, p in zip((i for g in groups for i in g["params"]), optimizer._all_keys(), params, strict=True):
        fitting = {n: t.shape for n, t in optimizer.base.state.get(p, {}).items() if isinstance(t, Tensor)}
        twin = as_real({"": p.detach()})[""].shape
        for name, tensor in {**memory.get(i, {}), **plain.get(i, {})}.items():
            if not isinstance(tensor, Tensor):
                continue
            own = name in memory.get(i, {})
            wanted = twin if own else fitting.get(name, p.shape if tensor.ndim else tensor.shape)
            # of a base that keeps state of other shapes nothing is known before its first step
            known = own or name in fitting or type(optimizer.base) in _OF_THE_SHAPE
            if known and tensor.shape != wanted:
                raise ValueError(
                    f"expected {name!r} of shape {list(wanted)} for parameter {key!r}, got {list(tensor.shape)}: "
                    "the state of another model"
                )
