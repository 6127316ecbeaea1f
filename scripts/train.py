"""Train a few-shot learner or a network: the command ``metasam-train``; its keys are in ``configs/train.yaml``."""

from __future__ import annotations

from pathlib import Path

from metasam.configure import Config
from metasam.scripts import command, tables
from metasam.training import assemble, estimate
from metasam.training.trainer import Interrupted


def run(config: Config) -> None:
    """Train one run and show its results."""
    device = assemble.choose_device(config["device"])
    assemble.set_threads(config["threads"])
    tasks, rule = command.choice("tasks"), command.choice("rule")
    folder = assemble.run_folder(config, tasks, rule)
    if config["run"] is not None:
        folder = Path(config["run"]) / folder.name if command.sweeping() else Path(config["run"])
    parts = assemble.build({"name": tasks, "method": rule, **config}, device)
    trainer = assemble.trainer(parts, folder, device=device, command=command.command_line())
    if config["dry_run"]:
        tables.table(str(folder), ("", "estimate"), estimate.rows(estimate.estimate(trainer), parts.learner.unit))
        return
    try:
        results = trainer.fit(resume=config["resume"])
    except Interrupted as stop:
        again = command.command_line(resume="true")
        raise command.Stop(f"{stop}; to continue:\n  {again}", status=130) from None
    tables.show(results, folder)


def main() -> None:
    """Entry point of ``metasam-train``."""
    command.main("metasam-train", "train", run, assemble.check)


if __name__ == "__main__":
    main()
