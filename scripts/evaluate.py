"""Measure the weights of a run: the command ``metasam-evaluate``; its keys are in ``configs/evaluate.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from metasam import checkpoint
from metasam.configure import Config
from metasam.scripts import command, tables
from metasam.training import assemble, evaluation, supervised
from metasam.training.folder import write_json

if TYPE_CHECKING:
    from metasam.tasks import Supervised as Data
    from metasam.tasks.family import TaskFamily


def run(config: Config) -> None:
    """Evaluate one run, write the numbers beside it and show them."""
    folder = Path(config["run"])
    device = assemble.choose_device(config["device"])
    assemble.set_threads(config["threads"])
    path = folder / {"best": "best.pt", "latest": "checkpoint.pt"}[config["checkpoint"]]
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {folder}: expected run= to be the folder of a run that was trained")
    saved = checkpoint.load(path, map_location=device)
    trained = saved["config"]
    keys = ("ways", "shots", "queries", "batch_size", "seed", "tasks")
    asked = {k: trained.get(k) if config.get(k) is None else config[k] for k in keys}
    if "_target_" not in asked["tasks"]:  # keys alone are changes of what it was trained on
        asked["tasks"] = {**trained["tasks"], **asked["tasks"]}
    name = command.choice("tasks")
    name = trained["name"] if name == "none" else name
    family = assemble.tasks_of(asked)
    if assemble.is_supervised(family) != ("data" in saved):
        kind = "supervised" if "data" in saved else "few-shot"
        raise ValueError(f"{folder} is a {kind} run, and tasks={name} is not: expected tasks of the kind it trained on")
    if "data" in saved:
        _supervised(config, folder, saved, family, name, device)
        return
    _refuse_misfit(saved["family"], family, name, folder)
    if not evaluation.has_split(family, config["split"]):
        family.size(config["split"])  # raises, and says which splits there are

    maml = assemble.learner(trained["maml"], device)
    maml.load_state_dict(saved["maml"])
    measured = evaluation.measure(
        maml,
        family,
        config["split"],
        config["test_tasks"],
        per_batch=config["tasks_per_batch"],
        steps=config["steps"],
        device=device,
    )
    baselines = _baselines(family, config) if name == "omniglot_oneshot" else {}
    spent = saved["maml"]["gradient_evaluations"]
    results = _write(config, folder, name, saved, {**measured, "gradient_evaluations": spent}, baselines, device)
    tables.show(results, folder, {k.replace("_", " "): v for k, v in baselines.items()})


def _supervised(
    config: Config, folder: Path, saved: dict[str, Any], data: Data, name: str, device: torch.device
) -> None:
    trained = saved["config"]
    facts = saved["data"]
    _refuse_misfit(facts, data, name, folder)
    if "mean" in facts and hasattr(data, "scaled_like"):
        data = data.scaled_like(facts["mean"], facts["std"])
    model = assemble.network(trained["network"]).to(device)
    model.load_state_dict(saved["model"])
    measured = supervised.measure(model, assemble.loss_of(trained, device), data, config["split"], device)
    measured["gradient_evaluations"] = saved["gradient_evaluations"]
    tables.show(_write(config, folder, name, saved, measured, {}, device), folder)


def _write(
    config: Config,
    folder: Path,
    name: str,
    saved: dict[str, Any],
    measured: dict[str, Any],
    baselines: dict[str, float],
    device: torch.device,
) -> dict[str, Any]:
    results: dict[str, Any] = {
        "seed": saved["config"]["seed"],
        "seconds": saved["seconds"],
        "best_iteration": saved["iteration"],
        **{k: v for k, v in measured.items() if k not in ("per_task", "tasks")},
        **baselines,
        **evaluation.environment(device),
        "command": command.command_line(),
        "config": {k: v for k, v in config.items() if k not in ("model", "loss", "inner")},
        **{k: measured[k] for k in ("tasks", "per_task") if k in measured},
    }
    write_json(folder / f"evaluation-{name}.json", results)
    return results


def check(config: Config) -> None:
    """Raise ValueError unless the values of a config can work."""
    given = {k: v for k, v in config.items() if v is not None}
    assemble.check(given)


def _refuse_misfit(trained: dict[str, Any], family: TaskFamily | Data, name: str, folder: Path) -> None:
    have, need = trained["output_size"], family.output_size
    if have != need:
        way_out = f"train with ways={need}, or evaluate on tasks of ways={have}"
        if assemble.is_supervised(family):
            way_out = (
                f"evaluate on data of {have} classes (tasks.classes={have} takes the first so many), or train on these"
            )
        raise ValueError(f"the head of {folder} has {have} outputs, and tasks={name} needs {need}: {way_out}")
    kinds = {True: "classification", False: "regression"}
    old, new = trained.get("classification", True), bool(family.classification)
    if old != new:
        raise ValueError(f"{folder} was trained for {kinds[old]}, and tasks={name} is {kinds[new]}: expected the same")
    if list(trained["input_shape"]) != list(family.input_shape):
        raise ValueError(
            f"{folder} was trained on examples of shape {list(trained['input_shape'])}, and tasks={name} has "
            f"{list(family.input_shape)}: expected the same (tasks.image_size=... where the family has it)"
        )


def _baselines(family: TaskFamily, config: Config) -> dict[str, float]:
    """What classifiers that learn nothing reach on the same tasks."""
    from metasam.tasks import pixel_nearest_neighbour

    tasks = evaluation.batches(family, config["split"], config["test_tasks"], config["tasks_per_batch"])
    return {"pixel_nearest_neighbour": float(torch.cat([pixel_nearest_neighbour(t) for t in tasks]).mean())}


def main() -> None:
    """Entry point of ``metasam-evaluate``."""
    command.main("metasam-evaluate", "evaluate", run, check, free=(*command.FREE, "tasks"))


if __name__ == "__main__":
    main()
