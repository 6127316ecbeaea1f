"""Train a few-shot learner or a network: the command ``metasam-train``; its keys are in ``configs/train.yaml``."""

from __future__ import annotations

from pathlib import Path

from metasam.configure import Config
from metasam.ranks import RankLost, Ranks, joined
from metasam.scripts import command, tables
from metasam.training import assemble, estimate
from metasam.training.trainer import Interrupted


def run(config: Config) -> None:
    """Train one run and show its results; with the other processes, where torchrun started them."""
    with joined(config["device"]) as ranks:
        _run(config, ranks)


def _run(config: Config, ranks: Ranks) -> None:
    device = assemble.choose_device(config["device"])
    assemble.set_threads(config["threads"])
    tasks, rule = command.choice("tasks"), command.choice("rule")
    folder = assemble.run_folder(config, tasks, rule)
    if config["run"] is not None:
        folder = Path(config["run"]) / folder.name if command.sweeping() else Path(config["run"])
    again = command.command_line(resume="true")
    trainer = None
    try:
        parts = ranks.in_turn(lambda: assemble.build({"name": tasks, "method": rule, **config}, device, ranks))
        trainer = assemble.trainer(parts, folder, device=device, command=command.command_line(), ranks=ranks)
        if config["dry_run"]:
            found = estimate.estimate(trainer, quiet=trainer.quiet)
            if ranks.rank == 0:
                tables.table(str(folder), ("", "estimate"), estimate.rows(found, parts.learner.unit))
            return
        results = trainer.fit(resume=config["resume"])
    except Interrupted as stop:
        raise command.Stop(f"{stop}; to continue:\n  {again}", status=130) from None
    except RankLost as lost:
        saved = None if trainer is None else trainer.saved
        after = "no checkpoint was saved; to start again" if saved is None else f"to continue from iteration {saved}"
        raise command.Stop(f"{lost}; {after}:\n  {again}", status=1) from lost
    if ranks.rank == 0:
        tables.show(results, folder)


def main() -> None:
    """Entry point of ``metasam-train``."""
    command.main("metasam-train", "train", run, assemble.check, split=True)


if __name__ == "__main__":
    main()
