"""Time a meta-step of every variant and engine against what a user would pick instead, in one run.

    python scripts/benchmark.py --threads 1 --repeats 9
    python scripts/benchmark.py --work conv4 --only none --json benchmark.json
    python scripts/benchmark.py --work optimizer --threads 1 --repeats 21

Contenders take turns within each repeat, each repeat from another one on, so that a machine that drifts drifts for all
of them; a speed is the ratio of medians to the peer, a cost the median of the ratios within the repeats, with its 95%
interval (order statistics). Peers are skipped when they are not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
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

from metasam import SAM, AgnosticSAM, SharpMAML
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

    def contenders(self, only: str | None) -> dict[str, Callable[[], Any]]:
        """What to time, by name; the first is the peer of all others."""
        found: dict[str, Callable[[], Any]] = {}
        for peer in ("learn2learn", "higher"):
            try:
                found[peer] = getattr(self, peer)()
            except ImportError:
                print(f"{peer} is not installed: left out")
        for variant in [only] if only else VARIANTS:
            for engine in ("higher", "vmap"):
                found[f"metasam {engine}, {variant}"] = self.metasam(variant, engine)
        return found


class Optimizers:
    """Steps of live optimizers on one batch, beside the bare gradient passes that they make (no update)."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model, self.batch = model, batch
        self.val = tuple(t[: len(t) // 4] for t in batch)

    def closures(self, model: nn.Module) -> list[Callable[[], torch.Tensor]]:
        """Of the batch, and of a quarter of it."""

        def of(x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
            def closure() -> torch.Tensor:
                model.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return closure

        return [of(*self.batch), of(*self.val)]

    def bare(self, train: int, val: int) -> Callable[[], None]:
        """That many passes of each batch."""
        whole, quarter = self.closures(copy.deepcopy(self.model))

        def step() -> None:
            for closure in [whole] * train + [quarter] * val:
                closure()

        return step

    def metasam(self, kind: type, closures: int) -> Callable[[], Any]:
        """A step of ours."""
        model = copy.deepcopy(self.model)
        optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9, model=model)
        given = self.closures(model)[:closures]
        return lambda: optimizer.step(*given)

    def pytorch_optimizer(self, **settings: Any) -> Callable[[], None]:
        """``pytorch_optimizer.SAM``, as its docstring uses it."""
        import pytorch_optimizer

        model = copy.deepcopy(self.model)
        optimizer = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9, **settings)
        closure = self.closures(model)[0]

        def step() -> None:
            closure()
            optimizer.step(closure)

        return step

    def contenders(self, only: str | None) -> dict[str, Callable[[], Any]]:
        """What to time, by name: each after the bare passes that it is compared with."""
        found = {"bare, 2 passes": self.bare(2, 0), "metasam SAM": self.metasam(SAM, 1)}
        try:
            found["pytorch_optimizer SAM"] = self.pytorch_optimizer()
            found["pytorch_optimizer SAM, foreach"] = self.pytorch_optimizer(foreach=True)
        except ImportError:
            print("pytorch_optimizer is not installed: left out")
        found["bare, 2 + 2 quarter passes"] = self.bare(2, 2)
        found["metasam AgnosticSAM"] = self.metasam(AgnosticSAM, 2)
        return found


def _resnet() -> Optimizers:
    from torchvision.models import resnet18

    return Optimizers(resnet18(num_classes=10), (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))))


def _images(tasks: int, ways: int, queries: int) -> Task:
    def side(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(tasks, ways * n, 1, 28, 28), torch.arange(ways).repeat(n).expand(tasks, -1)

    return Task(side(1), side(queries))


def _sinusoid(tasks: int) -> Task:
    x, z = torch.rand(2, tasks, 10, 1) * 10 - 5
    return Task((x, x.sin()), (z, z.sin()))


WORK: dict[str, Callable[[], Work | Optimizers]] = {
    "sinusoid": lambda: Work(mlp(1, 1), F.mse_loss, _sinusoid(25), 0.01, 5),
    "conv4": lambda: Work(conv4(1, 5, hidden=64), F.cross_entropy, _images(16, 5, 15), 0.4, 5),
    "strided": lambda: Work(strided_conv(1, 5, hidden=32), F.cross_entropy, _images(16, 5, 15), 0.4, 1),
    "optimizer": _resnet,
}
"""sinusoid: MLP 1-40-40-1, 25 tasks, 5 steps. conv4: 64 channels, 28x28, 16 tasks, 5-way 1-shot, 5 steps. strided: the
stride-2 net with 32 channels, 1 step. optimizer: torchvision's ResNet-18 (11.2 million weights), 64 images of
32x32, SGD with momentum."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(
    contenders: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each repeat of each contender, one warm-up repeat left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    turns = list(contenders.items())
    for repeat in range(repeats + 1):
        for name, step in turns[repeat % len(turns) :] + turns[: repeat % len(turns)]:
            start = clock()
            step()
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the median by order statistics; the whole range of fewer than 6 values.

    >>> interval([float(n) for n in range(1, 16)])
    (4.0, 12.0)
    """
    n, ordered = len(values), sorted(values)
    # P(fewer than k of n values lie below the median) <= 2.5%
    k = sum(sum(math.comb(n, j) for j in range(i + 1)) / 2**n <= 0.025 for i in range(n // 2))
    return ordered[max(k, 1) - 1], ordered[n - max(k, 1)]


def costs(seconds: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Rows of a table: each contender against the bare passes before it."""
    rows: list[tuple[str, ...]] = []
    bare: list[float] = []
    for who, s in seconds.items():
        bare = s if who.startswith("bare") else bare
        ratios = [a / b for a, b in zip(s, bare, strict=True)]
        low, high = interval(ratios)
        cost = f"{100 * (statistics.median(ratios) - 1):+.1f}%"
        rows.append(
            (who, f"{1e3 * statistics.median(s):.1f}", cost, f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}")
        )
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=["sinusoid", "conv4"], help="what to time")
    parser.add_argument("--only", choices=VARIANTS, help="one variant instead of all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads an operation")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, for a busy machine")
    parser.add_argument("--json", type=Path, help="write the seconds of every repeat to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    versions = {
        p: metadata.version(p)
        for p in ("torch", "higher", "learn2learn", "torchvision", "pytorch_optimizer")
        if _installed(p)
    }
    report: dict[str, Any] = {"threads": options.threads, "python": platform.python_version(), "versions": versions}
    for name in options.work:
        work = WORK[name]()
        seconds = report[name] = measure(work.contenders(options.only), options.repeats, CLOCKS[options.clock])
        title = f"{name}, {options.threads} threads"
        if isinstance(work, Optimizers):
            table("", (title, "median ms", "over bare", "95%"), costs(seconds))
            continue
        peer = statistics.median(next(iter(seconds.values())))
        columns = (title, "median ms", "min", "max", f"x {next(iter(seconds))}")
        rows: list[tuple[str, ...]] = [
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
