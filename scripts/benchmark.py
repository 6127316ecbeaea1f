"""Time a meta-step of every variant and engine against what a user would pick instead, in one run.

    python scripts/benchmark.py --threads 1 --repeats 9
    python scripts/benchmark.py --work conv4 --only none --json benchmark.json

Contenders take turns within each repeat, so that a machine that drifts drifts for all of them; a speed is the ratio of
medians to the peer. Peers are skipped when they are not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from metasam import SharpMAML
from metasam.meta import VARIANTS
from metasam.models import conv4, mlp, strided_conv
from metasam.scripts.tables import table
from metasam.types import Task

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Work:
    """One meta-step to time: a model, a loss, and a meta-batch of random tasks."""

    def __init__(self, model: nn.Module, loss: Loss, task: Task, lr: float, steps: int) -> None:
        self.model, self.loss, self.task, self.lr, self.steps = model, loss, task, lr, steps

    def metasam(self, variant: str, engine: str) -> Callable[[], Any]:
        """A `SharpMAML.step` whose optimizer moves nothing."""
        maml = SharpMAML(
            self.model, self.loss, inner_lr=self.lr, inner_steps=self.steps, variant=variant, engine=engine
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        return lambda: maml.step(self.task, optimizer)

    def learn2learn(self) -> Callable[[], None]:
        """``learn2learn.algorithms.MAML``, as its examples use it."""
        with contextlib.redirect_stderr(io.StringIO()):  # gym's notice
            import learn2learn
        maml = learn2learn.algorithms.MAML(self.model, lr=self.lr)

        def step() -> None:
            maml.zero_grad()
            tasks = self.task.unbind()
            for task in tasks:
                learner = maml.clone()
                for _ in range(self.steps):
                    learner.adapt(self.loss(learner(task.support[0]), task.support[1]))
                (self.loss(learner(task.query[0]), task.query[1]) / len(tasks)).backward()

        return step

    def higher(self) -> Callable[[], None]:
        """``higher.innerloop_ctx``, as its examples use it."""
        import higher

        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)

        def step() -> None:
            self.model.zero_grad()
            tasks = self.task.unbind()
            for task in tasks:
                with higher.innerloop_ctx(self.model, optimizer, copy_initial_weights=False) as (net, inner):
                    for _ in range(self.steps):
                        inner.step(self.loss(net(task.support[0]), task.support[1]))
                    (self.loss(net(task.query[0]), task.query[1]) / len(tasks)).backward()

        return step


def _images(tasks: int, ways: int, queries: int) -> Task:
    def side(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(tasks, ways * n, 1, 28, 28), torch.arange(ways).repeat(n).expand(tasks, -1)

    return Task(side(1), side(queries))


def _sinusoid(tasks: int) -> Task:
    x, z = torch.rand(2, tasks, 10, 1) * 10 - 5
    return Task((x, x.sin()), (z, z.sin()))


WORK: dict[str, Callable[[], Work]] = {
    "sinusoid": lambda: Work(mlp(1, 1), F.mse_loss, _sinusoid(25), 0.01, 5),
    "conv4": lambda: Work(conv4(1, 5, hidden=64), F.cross_entropy, _images(16, 5, 15), 0.4, 5),
    "strided": lambda: Work(strided_conv(1, 5, hidden=32), F.cross_entropy, _images(16, 5, 15), 0.4, 1),
}
"""sinusoid: MLP 1-40-40-1, 25 tasks, 5 steps. conv4: 64 channels, 28x28, 16 tasks, 5-way 1-shot, 5 steps. strided: the
stride-2 net with 32 channels, 1 step."""


def measure(work: Work, only: str | None, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each contender, one warm-up repeat left out."""
    contenders: dict[str, Callable[[], Any]] = {}
    for peer in ("learn2learn", "higher"):
        try:
            contenders[peer] = getattr(work, peer)()
        except ImportError:
            print(f"{peer} is not installed: left out")
    for variant in [only] if only else VARIANTS:
        for engine in ("higher", "vmap"):
            contenders[f"metasam {engine}, {variant}"] = work.metasam(variant, engine)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=["sinusoid", "conv4"], help="what to time")
    parser.add_argument("--only", choices=VARIANTS, help="one variant instead of all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads an operation")
    parser.add_argument("--json", type=Path, help="write the seconds of every repeat to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    versions = {p: metadata.version(p) for p in ("torch", "higher", "learn2learn") if _installed(p)}
    report: dict[str, Any] = {"threads": options.threads, "python": platform.python_version(), "versions": versions}
    for name in options.work:
        seconds = report[name] = measure(WORK[name](), options.only, options.repeats)
        peer = statistics.median(next(iter(seconds.values())))
        columns = (f"{name}, {options.threads} threads", "median ms", "min", "max", f"x {next(iter(seconds))}")
        rows = [
            (who, *(f"{1e3 * f(s):.1f}" for f in (statistics.median, min, max)), f"{peer / statistics.median(s):.2f}")
            for who, s in seconds.items()
        ]
        table("", columns, rows)
    print(", ".join(f"{k} {v}" for k, v in versions.items()))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
