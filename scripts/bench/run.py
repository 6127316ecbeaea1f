"""The command ``metasam-bench``; its keys are in ``configs/bench.yaml``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from metasam.configure import Config, did_you_mean
from metasam.scripts import command
from metasam.scripts.bench import report
from metasam.scripts.bench.contest import CLOCKS, Contest, Drift, Here, Racer, Result, Settings, measure, watch
from metasam.scripts.bench.process import Process
from metasam.scripts.bench.works import WORKS
from metasam.training import assemble, progress
from metasam.training.folder import make


def run(config: Config) -> None:
    """Measure the works one by one; files are written after each contest."""
    device = assemble.choose_device(config["device"])
    assemble.set_threads(config["threads"])
    torch.manual_seed(0)
    settings = Settings(config["quick"], torch.get_num_threads(), config["clock"], device.type)
    contests = {work: WORKS[work](settings) for work in config["works"]}
    chosen = {work: [_chosen(c, config["contenders"]) for c in group] for work, group in contests.items()}
    if not any(names for group in chosen.values() for names in group):
        there = dict.fromkeys(name for group in contests.values() for c in group for name in c.contenders)
        raise ValueError(
            f"contenders={config['contenders']} matches none of these works; there are: {'; '.join(there)}"
        )
    folder, repeats = Path(config["out"]), config["repeats"]
    make(folder, "out")
    about = report.surroundings(settings, repeats, command.command_line())
    found: dict[str, list[Result]] = {}
    total = sum(
        c.turns(names, repeats) for work in contests for c, names in zip(contests[work], chosen[work], strict=True)
    )
    position = 0
    with progress.show("bench", total) as bar:

        def done(work: str, name: str) -> None:
            nonlocal position
            position += 1
            bar.update(position, f"{work}: {name}")

        for work, group in contests.items():
            for contest, names in zip(group, chosen[work], strict=True):
                if names:
                    found.setdefault(work, []).append(
                        _measured(work, contest, names, settings, repeats, partial(done, work))
                    )
                    report.write(folder, about, found)
        bar.update(total, "done")
    for results in found.values():
        for result in results:
            report.show(result)
    print(", ".join(f"{k} {v}" for k, v in about["versions"].items()))
    print(f"{about['device']}, {report.threads_of(about)}")
    if settings.quick:
        print(report.QUICK)
    print(f"in {folder}")


def _chosen(contest: Contest | Drift, patterns: list[str] | None) -> list[str]:
    """Names of the contenders that take part, in order."""
    return [n for n in contest.contenders if patterns is None or any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def _measured(
    work: str,
    contest: Contest | Drift,
    names: list[str],
    settings: Settings,
    repeats: int,
    done: Callable[[str], None],
) -> Result:
    apart = isinstance(contest, Drift) or contest.own_process
    keep = contest.keep if isinstance(contest, Contest) else frozenset()

    def racer(name: str) -> Racer:
        if apart:
            return Process(work, contest.title, name, settings, name in keep)
        return Here(contest.contenders[name], settings)

    racers = {name: partial(racer, name) for name in names}
    if isinstance(contest, Drift):
        return watch(contest, racers, done)
    return measure(contest, racers, settings, repeats, done)


def check(config: Config) -> None:
    """Raise ValueError unless the values of a config can work."""
    works, patterns = config["works"], config["contenders"]
    if not isinstance(works, list) or not works:
        raise ValueError(f"expected works to be a list such as [sinusoid,conv4], got works={works}")
    for work in works:
        if work not in WORKS:
            raise ValueError(f"expected works among {', '.join(WORKS)}, got {work}{did_you_mean(str(work), WORKS)}")
    if patterns is not None and not (
        isinstance(patterns, list) and patterns and all(isinstance(p, str) for p in patterns)
    ):
        raise ValueError(
            f"expected contenders to be a list of names or patterns such as ['metasam*',learn2learn], or null for all, "
            f"got contenders={patterns}"
        )
    for key in ("repeats", "threads"):
        value = config[key]
        if value is None and key == "threads":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"expected {key} to be a whole number of at least 1, got {key}={value}")
    for key, choices in {"clock": [*CLOCKS], "device": ["cpu", "cuda", "mps", "auto"]}.items():
        if config[key] not in choices:
            raise ValueError(f"expected {key} among {', '.join(choices)}, got {key}={config[key]}")
    if not isinstance(config["quick"], bool):
        raise ValueError(f"expected quick to be true or false, got quick={config['quick']}")
    if not isinstance(config["out"], str) or not config["out"]:
        raise ValueError(f"expected out to be a folder, got out={config['out']}")


def main() -> None:
    """Entry point of ``metasam-bench``."""
    command.main("metasam-bench", "bench", run, check)
