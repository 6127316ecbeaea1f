"""Many runs as one study: each a run folder, finished ones kept, half-finished ones continued, several at a time."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from metasam import checkpoint
from metasam.checkpoint import CheckpointError
from metasam.configure import Config, flatten, plain
from metasam.scripts.memory import keep_freed_memory
from metasam.training import assemble, progress
from metasam.training.folder import write_json
from metasam.training.trainer import MAY_CHANGE, Interrupted

Results = dict[str, Any]

DIVERGED = "diverged.txt"
"""In the folder of a run that ended in numbers that are not finite, with what it said: no results will follow."""


class Failure(NamedTuple):
    """Why a cell has no results."""

    reason: str
    diverged: bool


PRELOADED = [
    "metasam.scripts.study",
    "metasam.meta",
    "metasam.models",
    "metasam.tasks",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "sklearn.datasets",
    "torch.utils.tensorboard",
    "torch._dynamo",  # which torch.optim imports when the first optimizer is made
]
"""What most runs import, once for all of them."""


@dataclass(frozen=True)
class Cell:
    """One run: its folder and its config, complete as `metasam.training.assemble.build` takes it."""

    folder: Path
    config: Config


Job = Callable[[Cell, str], None]
"""Does the work of one cell, given the command to record."""


def run(
    cells: Sequence[Cell],
    *,
    workers: int = 1,
    title: str = "study",
    command: str = "",
    job: Job | None = None,
    file: str = "results.json",
) -> list[Results | Failure]:
    """Run what is not finished; returns the results of every cell, or why it has none, in order.

    Each runs in a process of its own on one thread, so its peak memory is its own and a crash takes nothing along. One
    that diverged is not tried again; any other failure is, by the next call.

    Args:
        cells: the runs; no two in one folder.
        workers: how many at a time.
        title: for the progress bar.
        command: what started the study, for the record.
        job: what to do with a cell, a function of a module; None: train it.
        file: what the job writes last, in the folder of the cell, with the config in it.

    Raises:
        Interrupted: someone asked to stop; every run is saved, and the same call goes on from there.
        CheckpointError: a folder holds a finished run of another config.
    """
    found: dict[int, Results | Failure] = {i: r for i, c in enumerate(cells) if (r := _ended(c, file)) is not None}
    todo = [i for i in range(len(cells)) if i not in found]
    context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    if hasattr(os, "fork"):
        context.set_forkserver_preload(PRELOADED)
    running: dict[Connection, tuple[int, Any]] = {}
    with _terminated_as_interrupted(), progress.show(title, len(cells), len(found)) as bar:
        try:
            while todo or running:
                while todo and len(running) < workers:
                    i = todo.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    # not a daemon: it must live to save its run when we are interrupted
                    process = context.Process(target=_work, args=(job or train, cells[i], command, theirs))
                    running[ours] = i, process  # before it starts: whatever interrupts us knows of it
                    process.start()
                    theirs.close()
                for pipe in wait(list(running), timeout=1.0):
                    assert isinstance(pipe, Connection)
                    i, process = running[pipe]
                    said = _heard(pipe)
                    process.join()
                    ended = _ended(cells[i], file)
                    reason = said or f"its process died with exit code {process.exitcode}"
                    found[i] = Failure(reason, False) if ended is None else ended
                    del running[pipe]
                    bar.update(len(found), cells[i].folder.as_posix())
        except KeyboardInterrupt:
            started = [process for _, process in running.values() if process.pid is not None]
            for process in started:
                process.terminate()  # unlike os.kill, no error for one that has just ended by itself
            for process in started:
                process.join()
            raise Interrupted(f"stopped with {len(found)} of {len(cells)} runs finished, the others saved") from None
    return [found[i] for i in range(len(cells))]


def finished(cell: Cell, file: str = "results.json") -> Results | None:
    """The results of a cell that has run to its end.

    Raises:
        CheckpointError: they are those of another config.
    """
    path = cell.folder / file
    if not path.exists():
        return None
    try:
        results: Results = json.loads(path.read_text(encoding="utf-8"))
        _ = results["config"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: remove it, and the same command makes it anew") from error
    free = set(MAY_CHANGE) - ({"test_tasks"} if file != "results.json" else set())
    old, new = (
        {k: v for k, v in flatten(c).items() if k not in free and not k.startswith(("maml.", "network."))}
        for c in (results["config"], plain(cell.config))
    )
    if file != "results.json" and old.pop("test_tasks", None) != new.pop("test_tasks", None):
        return None  # a measurement on other tasks, to be made again
    differing = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    if differing:
        k = differing[0]
        raise CheckpointError(
            f"{cell.folder} holds a run with {k}={old.get(k)!r}, not {new.get(k)!r}: use another study=DIR"
        )
    return results


def _ended(cell: Cell, file: str) -> Results | Failure | None:
    results = finished(cell, file)
    said = cell.folder / DIVERGED
    if results is None and said.exists():
        return Failure(said.read_text(encoding="utf-8").strip(), True)
    return results


def train(cell: Cell, command: str) -> None:
    """Train a cell to its end, from its checkpoint if there is one."""
    device = assemble.choose_device(cell.config["device"])
    parts = assemble.build(cell.config, device)
    assemble.trainer(parts, cell.folder, device=device, command=command, quiet=True).fit(resume=True)


def judge(cell: Cell, command: str) -> None:
    """Measure the best weights of a trained cell on test data, into ``test.json``."""
    device = assemble.choose_device(cell.config["device"])
    if not (cell.folder / "best.pt").exists():
        raise CheckpointError(f"best.pt is lost: remove {cell.folder}, and the same command trains it anew")
    learner, _ = assemble.build(cell.config, device)
    learner.load_weights(checkpoint.load(cell.folder / "best.pt", map_location=device))
    measured = learner.measure("test")
    write_json(cell.folder / "test.json", {**measured, "command": command, "config": plain(cell.config)})


def _work(job: Job, cell: Cell, command: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everyone; the parent tells us to stop
    _end_with(pipe)
    keep_freed_memory()
    assemble.set_threads(1)
    try:
        job(cell, command)
    except FloatingPointError as error:
        checkpoint.write_text(cell.folder / DIVERGED, f"{error}\n")
    except (Exception, Interrupted) as error:
        pipe.send(str(error) or type(error).__name__)
    finally:
        pipe.close()


def end_with_parent() -> None:
    """End when the process that started this one does, however that ends; there is a checkpoint to continue from."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_with(pipe: Connection) -> None:
    """End when nobody listens at the other end any more: the study was killed. There is a checkpoint to go on from.

    The parent of a worker is a fork server, which lives as long as its workers do.
    """
    if not hasattr(select, "poll"):
        end_with_parent()
        return

    def watch() -> None:
        poller = select.poll()
        poller.register(pipe.fileno(), 0)  # errors are told unasked
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Within: SIGTERM, which schedulers send, stops like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _heard(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        return ""


# -- choosing a radius ---------------------------------------------------------------------------------------------

FIRST_TUNING_SEED = 1001
"""Tuning runs have seeds of their own, from this one on."""


def validation_of(results: Results | Failure) -> float:
    """What a radius is chosen by, the larger the better; a run that diverged loses.

    Raises:
        ValueError: it failed in another way, which says nothing about its radius.
    """
    if isinstance(results, Failure):
        if not results.diverged:
            raise ValueError(f"a tuning run failed: {results.reason}; the same command goes on")
        return -math.inf
    accuracy = results.get("validation_accuracy")
    return accuracy if accuracy is not None else -results["validation_loss"]


def best_radius(tried: Mapping[float, Sequence[float]], who: str, grid: Sequence[float]) -> float:
    """The radius whose `validation_of` is best in the mean over seeds, the smallest of several.

    Raises:
        ValueError: runs diverge with each of them.
    """
    if all(-math.inf in values for values in tried.values()):
        raise ValueError(f"{who} diverges with every radius of grid={grid}: lower the grid, inner.lr or optim.lr")
    return max(tried, key=lambda radius: (fmean(tried[radius]), -radius))


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", label)
