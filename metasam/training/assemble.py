"""From the keys of a config to the objects of a run, without Hydra."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..configure import Config, did_you_mean, flatten, instantiate, locate, naming, offer, parameters, plain
from ..errors import first_line
from ..optim import SharpnessAware
from ..ranks import Ranks
from .budget import SCHEDULES, Budget
from .diagnose import Diagnostics, unnoticed
from .few_shot import FewShot
from .learner import Learner
from .rng import seed_everything
from .supervised import Supervised
from .trainer import Trainer

if TYPE_CHECKING:
    from metasam.meta import SharpMAML
    from metasam.tasks import Supervised as Data
    from metasam.tasks.family import TaskFamily


class Parts(NamedTuple):
    """What a run is made of."""

    learner: Learner
    config: Config
    """The given config, and under ``maml`` or ``network`` what `instantiate` builds the trained thing from."""


def build(config: Config, device: torch.device | str = "cpu", ranks: Ranks | None = None) -> Parts:
    """Build what a config of ``metasam-train`` describes: few-shot tasks and a meta-learner, or data and a network.

    Weights are drawn after `metasam.training.rng.seed_everything` with the config's seed. Several ``ranks`` share the
    meta-batches.

    Raises:
        ValueError: a value is out of its range, or a target is not found or refuses its arguments.
    """
    check(config)
    source = tasks_of(config)
    seed_everything(config["seed"])
    split = ranks is not None and ranks.size > 1
    if is_supervised(source):
        if split:
            raise ValueError(
                f"tasks={config.get('name', '...')} is one data set to train on as a whole: expected few-shot tasks "
                "under torchrun, which splits them; start it without torchrun, or write a loop with "
                "DistributedDataParallel and the optimizers of metasam (docs/optimizers.md)"
            )
        return _supervised(config, source, device)
    return _few_shot(config, source, device, split)


def is_supervised(source: Any) -> bool:
    """Whether ``tasks`` is a data set to train on as a whole, not a family of few-shot tasks."""
    return hasattr(source, "examples")


def _few_shot(config: Config, family: TaskFamily, device: torch.device | str, split: bool) -> Parts:
    _refuse(config, "few-shot tasks have two loops, each with a radius of its own: rho_low, rho_up", "rho")
    _refuse(config, "few-shot tasks have no epochs: say iterations=", "epochs")
    if "batch_size" not in _named("tasks", config):
        _refuse(config, "few-shot tasks have tasks_per_batch=", "batch_size")
    node = learner_node(config, family)
    maml = learner(node, device, **({"split": True, "ascent": config.get("ascent") or "global"} if split else {}))
    x, y = family.batch("train", range(1)).unbind()[0].support
    _refuse_misfit(config, maml.model, maml.loop.loss_fn, x.to(device), y.to(device), family)
    optimizer = _optimizer(config, maml.model)
    counts = {k: config[k] for k in ("tasks_per_batch", "validation_tasks", "test_tasks")}
    return Parts(FewShot(maml, family, optimizer, device=device, **counts), {**config, "maml": node})


def _supervised(config: Config, data: Data, device: torch.device | str) -> Parts:
    _refuse(
        config,
        "a train/validation split is a single task, with one loop: choose its rule with rule=, its radius with rho=, "
        "and set variant=null where the tasks do not",
        "variant", "rho_low", "rho_up", "inner.rule", "outer.rule", "ascent",
    )  # fmt: skip
    _refuse_few_shot_keys(config)
    node = plain(_offer("model", config["model"], _sizes(data)))
    model = network(node).to(device)
    rule = _built("rule", _with_radius(config["rule"], "rho", config["rho"]))
    if not rule.validates:
        data = data.without_holdout()
    loss = loss_of(config, device)
    some = 3 if data.output_size == 2 else 2  # as many as there are not classes: no loss broadcasts labels to outputs
    x, y = (part[:some].to(device) for part in next(iter(data.examples("train"))))
    _refuse_misfit(config, model, loss, x, y, data)
    optimizer = SharpnessAware(_optimizer(config, model), rule, model=model)
    return Parts(Supervised(model, loss, optimizer, data, device), {**config, "network": node})


def _refuse(config: Config, why: str, *keys: str) -> None:
    for key in keys:
        given: Any = config
        for name in key.split("."):
            given = (given or {}).get(name)
        if given is not None:
            raise ValueError(f"{key}={'...' if isinstance(given, Mapping) else given}: {why}")


FEW_SHOT: Config = {
    "ways": 5, "shots": 1, "queries": 5, "inner.lr": 0.4, "inner.steps": 1, "inner.params": None,
    "inner.recompute": None, "first_order": False, "reuse_inner_eps": False, "batchnorm": "batch", "engine": "auto",
    "workers": "auto", "chunk_size": None, "tasks_per_batch": 16, "validation_tasks": 200, "test_tasks": 600,
}  # fmt: skip
"""Keys of ``configs/train.yaml`` that play no part in a supervised run, with their values there."""


def _refuse_few_shot_keys(config: Config) -> None:
    given, named = flatten(config), _named("tasks", config)
    for key, default in FEW_SHOT.items():
        if given.get(key, default) != default and key not in named:
            raise ValueError(
                f"{key}={given[key]}: tasks={config.get('name', '...')} is one data set to train on as a whole, where "
                f"{key} plays no part: leave it out"
            )


def _named(key: str, config: Config) -> dict[str, bool]:
    return parameters(_target(key, config[key]))[0]


def _refuse_misfit(
    config: Config, model: torch.nn.Module, loss_fn: Any, x: torch.Tensor, y: torch.Tensor, source: Any
) -> None:
    """Raise ValueError unless the network takes these examples and the loss its outputs; nothing is changed by it."""
    shape, names = list(source.input_shape), {k: config[k].get("_target_") for k in ("model", "loss")}
    failures = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
    with torch.no_grad(), unnoticed(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training gives them
        try:
            output = model(x)
        except failures as error:
            raise ValueError(
                f"model: {names['model']} does not take examples of shape {shape}: {first_line(error)}; model=mlp "
                f"takes any shape{', such as these features' if len(shape) == 1 else ''}"
            ) from error
        there = list(output.shape[1:]) if isinstance(output, torch.Tensor) else None
        classes = source.output_size if source.classification else 0
        if there is not None and (len(there) == 0 or there[0] < classes):
            raise ValueError(
                f"model: expected {names['model']} to give at least one number a class, [N, {classes}]; got outputs "
                f"[N{''.join(f', {n}' for n in there)}]"
            )
        try:
            loss = loss_fn(output, y)
        except failures as error:
            hint = "; class labels need one such as torch.nn.functional.cross_entropy" if source.classification else ""
            raise ValueError(
                f"loss: {names['loss']} does not take outputs {_shape(output)} with labels {_shape(y)}: "
                f"{first_line(error)}{hint}"
            ) from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise ValueError(f"loss: expected {names['loss']} to give one number, a 0-dim tensor; got {_shape(loss)}")


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.requires_grad]
    partial = _built("optim", {**config["optim"], "_partial_": True})
    with naming("optim", config["optim"]["_target_"], partial.keywords):
        made: torch.optim.Optimizer = partial(weights)
    return made


def trainer(
    parts: Parts,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    command: str = "",
    quiet: bool = False,
    ranks: Ranks | None = None,
) -> Trainer:
    """The trainer of what `build` built."""
    config, iterations = parts.config, parts.config["iterations"]
    if config.get("epochs") is not None:
        assert isinstance(parts.learner, Supervised)  # few-shot tasks have no epochs, which was refused
        iterations = config["epochs"] * parts.learner.data.steps_per_epoch
    return Trainer(
        parts.learner,
        folder,
        Budget(iterations, config["budget"]["passes"]),
        split=config["split"],
        schedule=config["schedule"],
        evaluate_every=config["evaluate_every"],
        config=config,
        command=command,
        device=device,
        diagnostics=Diagnostics(**config.get("diagnostics", {})),
        quiet=quiet,
        ranks=ranks or Ranks(),
    )


def tasks_of(config: Config) -> Any:
    """The task family or data set of a config; it learns what it names of ways, shots, queries, batch_size, seed."""
    offered = {k: config[k] for k in ("ways", "shots", "queries", "batch_size", "seed") if config.get(k) is not None}
    family: Any = _built("tasks", _offer("tasks", config["tasks"], offered))
    if is_supervised(family):
        return family
    members = ("output_size", "input_shape", "classification", "batch", "size", "describe")
    missing = [m for m in members if not hasattr(family, m)]
    if missing:
        raise ValueError(
            f"tasks: expected a task family, got {type(family).__name__} without {', '.join(missing)}: "
            "see metasam.tasks.TaskFamily for what it needs"
        )
    return family


def learner(node: Config, device: torch.device | str = "cpu", **options: Any) -> SharpMAML:
    """The meta-learner of a node made by `learner_node`, its model on ``device``; with options of this process."""
    model = network(node["model"])
    maml: SharpMAML = instantiate({**node, **options, "model": model.to(device)})
    return maml


def learner_node(config: Config, family: TaskFamily) -> Config:
    """Everything that the meta-learner is built from, as one node: ``instantiate(node)`` builds it."""
    inside = config["inner"]
    node = {
        "_target_": "metasam.meta.SharpMAML",
        "model": _offer("model", config["model"], _sizes(family)),
        "loss_fn": _loss(config["loss"]),
        "inner_lr": inside["lr"],
        "inner_steps": inside["steps"],
        "inner_params": inside["params"],
        "recompute": inside["recompute"],
        "variant": config["variant"],
        **{k: config[k] for k in ("first_order", "reuse_inner_eps", "batchnorm", "engine", "chunk_size", "workers")},
    }
    if config["variant"] in ("low", "both"):
        node["inner_rule"] = _rule(config, "inner", "rho_low")
    if config["variant"] in ("up", "both"):
        node["outer_rule"] = _rule(config, "outer", "rho_up")
    result: Config = plain(node)
    return result


def network(node: Config) -> torch.nn.Module:
    """Build a network from its node.

    Raises:
        ValueError: it is none.
    """
    model = _built("model", node)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def loss_of(config: Config, device: torch.device | str = "cpu") -> Any:
    """The loss of a config, called as ``loss(output, y)``; class weights may be a list."""
    node = {
        k: torch.tensor(v, dtype=torch.get_default_dtype(), device=device) if k in _WEIGHTS and _numbers(v) else v
        for k, v in _loss(config["loss"]).items()
    }
    loss = _built("loss", node)
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


_WEIGHTS = ("weight", "pos_weight")


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, int | float) for v in value)


def _sizes(source: Any) -> dict[str, Any]:
    """What a network may ask for by name."""
    shape = [int(s) for s in source.input_shape]
    return {
        "ways": source.output_size,
        "output": source.output_size,
        "output_size": source.output_size,
        "in_channels": shape[0],
        "image_size": shape[-1],
        "input": math.prod(shape),
        "input_shape": shape,
    }


def _rule(config: Config, loop: str, radius: str) -> Config:
    """The rule of one loop, with the radius that the config gives for that loop."""
    node = config[loop]["rule"] or config["rule"]
    if _target("rule", node) and node["_target_"] == "metasam.rules.Plain":
        raise ValueError(
            f"variant={config['variant']} puts a rule in the {loop} loop, and plain is none: "
            "expected rule=sam or another, or variant=none"
        )
    return _with_radius(node, radius, config[radius])


def _with_radius(node: Config, key: str, rho: float | None) -> Config:
    if rho is None:
        return node
    names, any_name = parameters(_target("rule", node))
    if "rho_val" in names:  # one number for two radii, in the proportion that the rule has them
        train, val = node.get("rho_train"), node.get("rho_val")
        proportion = train / val if train is not None and val else 2.0
        return {**node, "rho_train": proportion * rho, "rho_val": rho}
    if "rho" not in names and not any_name:
        raise ValueError(f"{key}={rho}: the rule {node['_target_']} has no radius; leave {key} out")
    return {**node, "rho": rho}


def _loss(node: Config) -> Config:
    """A class is built, a function is the loss itself."""
    return {"_partial_": not inspect.isclass(_target("loss", node)), **node}


def _offer(key: str, node: Config, offered: Mapping[str, Any]) -> Config:
    _target(key, node)
    return offer(node, **offered)


def _target(key: str, node: Any) -> Any:
    if not isinstance(node, Mapping) or node.get("_target_") in (None, "???"):
        raise ValueError(f"{key}: expected something to build, got {node!r}: set {key}._target_=my_module.Name")
    try:
        return locate(node["_target_"])
    except ValueError as error:
        raise ValueError(f"{key}._target_: {error}") from error


def _built(key: str, node: Config) -> Any:
    return instantiate({key: node})[key]


# -- what the values may be ----------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raise ValueError naming the first key whose value is missing or out of its range."""
    for key in (*_SECTIONS, *_NODES):
        if key in config and not isinstance(config[key], Mapping):
            typed = f"{key}._target_=my_module.Name" if key in _NODES else f"its keys, as {key}.{_SECTIONS[key]}"
            got = "null" if config[key] is None else config[key]
            raise ValueError(f"expected {key} to have keys of its own, got {key}={got}: set {typed}")
    flat = flatten(config)
    for key, value in flat.items():
        if value == "???":
            raise ValueError(f"expected a value for {key}, got none: set {key}=...")
    for key, (fits, expected) in _RANGES.items():
        if key in flat and not fits(flat[key]):
            value = flat[key]
            words = expected.removeprefix("one of ").split(", ") if isinstance(value, str) else []
            raise ValueError(f"expected {key} to be {expected}, got {key}={value}{did_you_mean(str(value), words)}")
    epochs, passes = flat.get("epochs"), flat.get("budget.passes")
    if epochs is not None and passes is not None:
        raise ValueError(
            f"epochs={epochs} and budget.passes={passes} both say when a run ends: set one of them to null"
        )


_SECTIONS = {"inner": "lr=0.4", "outer": "rule=sam", "budget": "passes=1000", "diagnostics": "sharpness=true"}
_NODES = ("model", "rule", "optim", "tasks", "loss")


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _number(v: Any, *, zero: bool = False) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and (v > 0 or (zero and v == 0))


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or fits(v)


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return lambda v: v in words, "one of " + ", ".join(words)


def _patterns(v: Any) -> bool:
    return isinstance(v, list) and bool(v) and all(isinstance(p, str) for p in v)


_AT_LEAST_1 = (_whole(1), "a whole number of at least 1")
_AT_LEAST_2 = (_whole(2), "a whole number of at least 2")
_RADIUS = (_or_null(lambda v: _number(v, zero=True)), "a finite number of at least 0, or null")
_SWITCH = (lambda v: isinstance(v, bool), "true or false")

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ways": _AT_LEAST_2,
    "shots": _AT_LEAST_1,
    "queries": _AT_LEAST_1,
    "iterations": _AT_LEAST_1,
    "tasks_per_batch": _AT_LEAST_1,
    "evaluate_every": _AT_LEAST_1,
    "epochs": (_or_null(_whole(1)), "a whole number of at least 1, or null"),
    "batch_size": (_or_null(_whole(1)), "a whole number of at least 1, or null"),
    "budget.passes": (_or_null(_number), "a finite number above 0, or null"),
    "schedule": _one_of(*SCHEDULES),
    "validation_tasks": _AT_LEAST_2,
    "test_tasks": _AT_LEAST_2,
    "seed": (lambda v: _whole(0)(v) and v < 2**63, "a whole number of at least 0 and below 2**63"),
    "ascent": (lambda v: v in (None, "global", "local"), "one of global, local, or null"),
    "variant": (lambda v: v in (None, "none", "low", "up", "both"), "one of none, low, up, both"),
    "inner.lr": (_number, "a finite number above 0"),
    "inner.steps": _AT_LEAST_1,
    "inner.params": (_or_null(_patterns), "a list of patterns such as [head.*], or null"),
    "inner.recompute": (_or_null(lambda v: v == "auto" or _whole(1)(v)), "a whole number of at least 1, auto, or null"),
    "optim.lr": (_number, "a finite number above 0"),
    "rho": _RADIUS,
    "rho_low": _RADIUS,
    "rho_up": _RADIUS,
    "first_order": _SWITCH,
    "reuse_inner_eps": _SWITCH,
    "resume": _SWITCH,
    "dry_run": _SWITCH,
    "batchnorm": _one_of("batch", "per_step", "frozen"),
    "engine": _one_of("auto", "higher", "vmap", "traced", "compiled"),
    "workers": (lambda v: v == "auto" or _whole(1)(v), "a whole number of at least 1, or auto"),
    "chunk_size": (_or_null(_whole(1)), "a whole number of at least 1, or null"),
    "threads": (_or_null(_whole(1)), "a whole number of at least 1, or null"),
    "run": (lambda v: v != "", "a folder, or null"),
    "checkpoint": _one_of("best", "latest"),
    "split": _one_of("train", "validation", "test"),
    "steps": _AT_LEAST_1,
    "diagnostics.congruence": _SWITCH,
    "diagnostics.sharpness": _SWITCH,
    "diagnostics.rho": (_number, "a finite number above 0"),
    "diagnostics.samples": _AT_LEAST_2,
    "diagnostics.tasks": _AT_LEAST_2,
    "device": _one_of("auto", "cpu", "cuda", "mps"),
}


# -- where it runs -------------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """The device of a name, ``auto`` being CUDA if there is one and otherwise the CPU.

    Raises:
        ValueError: torch does not see that device here.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there[name]:
        seen = ", ".join(k for k, v in there.items() if v)
        raise ValueError(f"expected a device that torch sees here ({seen}), got device={name}")
    return torch.device(name)


def set_threads(threads: int | None) -> None:
    """Threads that torch uses for one operation; None leaves its choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def run_folder(config: Config, name: str, rule: str, parent: str | Path = "runs") -> Path:
    """Where a run goes by default: its most telling keys, and a hash of all of them.

    >>> run_folder({"variant": "both", "seed": 1, "ways": 5}, "glyphs", "sam").as_posix()
    'runs/glyphs-both-sam-seed1-77747eaf'
    """
    keys = json.dumps({k: v for k, v in plain(config).items() if k not in ("run", "resume", "dry_run")}, sort_keys=True)
    digest = hashlib.sha256(keys.encode()).hexdigest()[:8]
    where = [config["variant"]] if config.get("variant") else []
    return Path(parent) / "-".join([name, *where, rule, f"seed{config['seed']}", digest])
