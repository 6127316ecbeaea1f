"""Run every case of a module in several processes at once, for all of its tests: `found_by` starts `report` there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# a plain `-m tests.<module>` may find another package of that name
LAUNCH = """
import sys, types, pathlib, importlib
package = types.ModuleType("tests")
package.__path__ = [sys.argv[1]]
sys.modules["tests"] = package
module = importlib.import_module("tests." + sys.argv[2])
module.main(sys.argv[3], int(sys.argv[4]), pathlib.Path(sys.argv[5]))
"""


def environment() -> dict[str, str]:
    """One thread an operation, and this folder's parent to import from."""
    paths = filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def found_by(module: str, world: int, folder: Path) -> Callable[..., list[Any]]:
    """What the processes that run ``main(init, rank, out)`` of a module found: ``found(run) -> [of rank 0, ...]``."""
    workers = []
    for rank in range(world):
        command = [sys.executable, "-W", "error", "-c", LAUNCH, HERE, module, (folder / "init").as_uri(), rank]
        with (folder / f"{rank}.txt").open("w") as log:
            workers.append(
                subprocess.Popen([*map(str, command), folder / f"{rank}.pt"], env=environment(), stdout=log, stderr=log)
            )
    try:
        codes = [w.wait(timeout=300) for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert codes == [0] * world, "".join((folder / f"{r}.txt").read_text() for r in range(world))
    ranks = [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(world)]

    def of(run: str, text: bool = False) -> list[Any]:
        of_ranks = [r[run] for r in ranks]
        for one in of_ranks:
            assert isinstance(one, str) == text, one
        return of_ranks

    return of


def report(runs: Mapping[str, Callable[[Any], Any]], given: Any, out: Path) -> None:
    """In a process: save what each run returns for ``given``, or how it failed."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        start = time.perf_counter()
        try:
            found[name] = run(given)
        except Exception:
            found[name] = traceback.format_exc()
        print(f"{name} {time.perf_counter() - start:.2f}")
    torch.save(found, out)
