"""What ``metasam-bench`` measures: each work is a function of the settings, and its contests are built in moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from metasam.models import conv4, mlp
from metasam.scripts.bench import meta_steps, peers
from metasam.scripts.bench.contest import Contender, Contest, Drift, Settings
from metasam.scripts.bench.meta_steps import Meta, Problem
from metasam.scripts.bench.optimizers import BASES, Optimizers
from metasam.scripts.bench.samplers import Images
from metasam.types import Task

Work = Callable[[Settings], Sequence[Contest | Drift]]


# -- problems --------------------------------------------------------------------------------------------------------


def sinusoid_problem(settings: Settings, tasks: int = 25, steps: int = 5) -> Problem:
    """MAML's regression: an MLP 1-40-40-1, 10 examples."""
    tasks, steps, hidden = (min(tasks, 3), min(steps, 2), [8]) if settings.quick else (tasks, steps, [40, 40])
    x, z = torch.rand(2, tasks, 10, 1) * 10 - 5
    return Problem(mlp(1, 1, hidden), F.mse_loss, Task((x, x.sin()), (z, z.sin())), 0.01, steps).to(settings.device)


def images_problem(
    settings: Settings, channels: int, size: int, hidden: int, tasks: int, steps: int = 5, lr: float = 0.4
) -> Problem:
    """A conv4 on 5-way 1-shot tasks with 15 queries a class."""
    ways, queries = 5, 15
    if settings.quick:
        ways, queries, size, hidden, tasks, steps = 2, 2, 16, 4, min(tasks, 2), min(steps, 4)

    def side(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(tasks, ways * n, channels, size, size), torch.arange(ways).repeat(n).expand(tasks, -1)

    model = conv4(channels, ways, hidden=hidden, image_size=size)
    return Problem(model, F.cross_entropy, Task(side(1), side(queries)), lr, steps).to(settings.device)


def omniglot_problem(settings: Settings, tasks: int = 16) -> Problem:
    """The shape of Omniglot."""
    return images_problem(settings, 1, 28, 64, tasks)


def mini_problem(settings: Settings) -> Problem:
    """The shape of mini-ImageNet."""
    return images_problem(settings, 3, 84, 32, tasks=4)


def on(problem: Problem, makers: Mapping[str, Meta]) -> dict[str, Contender]:
    """Meta-steps on a problem."""
    return {name: meta_steps.contender(make, problem) for name, make in makers.items()}


# -- works -----------------------------------------------------------------------------------------------------------


def sinusoid(settings: Settings) -> list[Contest]:
    """MAML meta-step, MLP 1-40-40-1, 25 tasks, 5 steps, second order."""
    makers = meta_steps.maml(settings, small=True)
    return [
        Contest(
            "MAML, MLP 1-40-40-1, 25 tasks, 5 steps", on(sinusoid_problem(settings), makers), peers=tuple(peers.MAML)
        )
    ]


def conv(settings: Settings) -> list[Contest]:
    """MAML meta-step, conv4-64, 28x28, 16 tasks, 5-way 1-shot, 15 queries a class, 5 steps, as users run them."""
    return [_as_run("MAML, conv4-64, 28x28, 16 tasks, 5 steps", omniglot_problem(settings), settings)]


def mini(settings: Settings) -> list[Contest]:
    """MAML meta-step, conv4-32, 84x84, 4 tasks, 5-way 1-shot, 75 queries, 5 steps, second order, as users run them."""
    return [_as_run("MAML, conv4-32, 84x84, 4 tasks, 5 steps", mini_problem(settings), settings)]


def _as_run(name: str, problem: Problem, settings: Settings) -> Contest:
    contenders = on(problem, meta_steps.maml(settings))
    kept = frozenset(contenders) - set(peers.MAML)
    same = "learn2learn, freed memory kept"
    return Contest(
        f"{name}, a process each",
        {**contenders, **on(problem, {same: peers.learn2learn})},
        peers=tuple(peers.MAML),
        own_process=True,
        keep=kept | {same},
        note="metasam keeps freed memory, as its commands do; its peers have the allocator as it comes",
    )


def kernels(settings: Settings) -> list[Contest]:
    """MAML meta-steps with the inner loop's kernels, with torch's, and with ReLU before pooling, as papers draw it."""
    makers = meta_steps.kernels()
    bases = {name: "torch's kernels" for name in makers if name != "torch's kernels"}
    problems = {"conv4-64, 28x28, 4 tasks": omniglot_problem(settings, tasks=4)}
    problems["conv4-32, 84x84, 4 tasks"] = mini_problem(settings)
    return [Contest(f"Kernels, {name}", on(problem, makers), bases=bases) for name, problem in problems.items()]


def variants(settings: Settings) -> list[Contest]:
    """Sharp-MAML over MAML on the same engine, eps detached or differentiated through."""
    return [
        _variants("sinusoid", sinusoid_problem(settings), "vmap"),
        _variants("conv4-64, 4 tasks", omniglot_problem(settings, tasks=4), "higher"),
    ]


def compiled(settings: Settings) -> list[Contest]:
    """The same on compiled graphs, which take minutes to make."""
    return [_variants("sinusoid", sinusoid_problem(settings), "vmap" if settings.quick else "compiled")]


def _variants(name: str, problem: Problem, engine: str) -> Contest:
    contenders = on(problem, meta_steps.variants(engine))
    bases = {c: "none" for c in contenders if c != "none"}
    return Contest(f"Sharp-MAML over MAML, {name}, {engine}", contenders, bases=bases)


def rules(settings: Settings) -> list[Contest]:
    """A rule in an engine over the same loop written by hand."""
    contests = []
    problems = {"sinusoid": sinusoid_problem(settings), "conv4-64, 4 tasks": omniglot_problem(settings, tasks=4)}
    for name, problem in problems.items():
        makers: dict[str, Meta] = {}
        bases = {}
        for mine, make, hand, by_hand in meta_steps.by_hand():
            makers |= {hand: by_hand, mine: make}
            bases[mine] = hand
        contests.append(Contest(f"Rules over loops by hand, {name}", on(problem, makers), bases=bases))
    return contests


def optimizer(settings: Settings) -> list[Contest]:
    """A step of a live optimizer over its bare gradient passes, ResNet-18, 64 images of 32x32, SGD with momentum."""
    if settings.quick:
        optimizers = Optimizers(nn.Linear(6, 4), (torch.randn(8, 6), torch.randint(4, (8,))))
    else:
        try:
            from torchvision.models import resnet18
        except ImportError as error:
            raise ImportError("works=[optimizer] needs torchvision: pip install 'metasam[vision]'") from error
        device = settings.device
        batch = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
        optimizers = Optimizers(resnet18(num_classes=10).to(device), batch)
    return [Contest("Optimizer steps, ResNet-18, 64 images of 32x32", optimizers.contenders(), bases=BASES)]


OMNIGLOT = {"of Omniglot's 1,623 classes": 1623, "of 136 classes, as Omniglot's minimal sets have": 136}


def sampler(settings: Settings) -> list[Contest]:
    """Batches of 32 tasks, 20-way 5-shot 15-query, from bytes in memory."""
    contests = []
    for name, classes in OMNIGLOT.items():
        images = Images(10, 4, 2, 1, 2, tasks=4) if settings.quick else Images(classes, 20, 20, 5, 15, tasks=32)
        contests.append(
            Contest(
                f"Tasks 20-way 5-shot 15-query, {name}",
                images.contenders(),
                peers=tuple(peers.SAMPLERS),
                tasks=images.tasks,
                note="all but `as float32` return bytes",
            )
        )
    return contests


def long(settings: Settings) -> list[Contest]:
    """Inner loops of 50 and 200 steps, conv4-64, one task, second order: time and peak memory."""
    contests = []
    for steps in (3, 4) if settings.quick else (50, 200):
        makers: dict[str, Meta] = {
            "learn2learn": peers.learn2learn,
            "metasam": partial(meta_steps.metasam, engine="higher"),
            **{
                f"metasam, recompute={how}": partial(meta_steps.metasam, engine="higher", recompute=how)
                for how in ("auto", 1)
            },
        }
        problem = images_problem(settings, 1, 28, 64, tasks=1, steps=steps, lr=0.01)
        contests.append(
            Contest(
                f"{steps} inner steps, conv4-64, 1 task, a process each",
                on(problem, makers),
                bases={name: "learn2learn" for name in makers if name != "learn2learn"},
                own_process=True,
                note="peak: over what the process had before its first step",
            )
        )
    return contests


def growth(settings: Settings) -> list[Contest | Drift]:
    """How time grows with tasks, inner steps and data, and whether memory grows with steps."""
    contests: list[Contest | Drift] = []

    def series(title: str, problems: Mapping[int, Problem], unit: str) -> None:
        for engine in ("higher", "vmap"):
            make = partial(meta_steps.metasam, engine=engine)
            contenders = {f"{n} {unit}": meta_steps.contender(make, p) for n, p in problems.items()}
            sizes = {f"{n} {unit}": float(n) for n in problems}
            contests.append(Contest(f"Growth with {title}, {engine}", contenders, sizes=sizes))

    quick = settings.quick
    series(
        "tasks", {n: sinusoid_problem(settings, tasks=n) for n in ((2, 3) if quick else (4, 8, 16, 32, 64))}, "tasks"
    )
    steps = (1, 2) if quick else (1, 2, 4, 8, 16)
    series("inner steps", {n: sinusoid_problem(settings, steps=n) for n in steps}, "steps")
    data = {
        f"{n} classes": Images(n, 4, 2, 1, 2, tasks=4) if quick else Images(n, 20, 20, 5, 15, tasks=32)
        for n in ((8, 32) if quick else (64, 256, 1024, 4096))
    }
    contests.append(
        Contest(
            "Growth with data, sampler, 20 images a class",
            {name: images.metasam for name, images in data.items()},
            sizes={name: float(images.classes) for name, images in data.items()},
        )
    )
    few = sinusoid_problem(settings, tasks=4, steps=1)
    first, last = (10, 50) if quick else (1000, 10_000)
    contests.append(
        Drift(
            f"Memory after {first:,} and {last:,} meta-steps",
            on(
                few, {f"metasam {e}": partial(meta_steps.metasam, engine=e, variant="both") for e in ("higher", "vmap")}
            ),
            first,
            last,
            note="of a process, MLP 1-40-40-1, 4 tasks, 1 step, both",
        )
    )
    return contests


WORKS: dict[str, Work] = {
    "sinusoid": sinusoid,
    "conv4": conv,
    "mini": mini,
    "kernels": kernels,
    "variants": variants,
    "compiled": compiled,
    "rules": rules,
    "optimizer": optimizer,
    "sampler": sampler,
    "long": long,
    "growth": growth,
}
