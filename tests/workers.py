"""The worker processes of test_optim_distributed.py: ``python -m tests.workers INIT RANK OUT``.

Nothing is judged here: each rank writes what its runs found, by name, and the tests compare. A run that raises is
written as the exception's text, so that the others still count.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from metasam import SAM, AgnosticSAM, SharpnessAware
from metasam.rules import ESAM, RandomSAM, Rule, Sharp, SparseSAM, VaSSO

from .cases import CONV, MLP, PROBLEMS, RULES, RuleCase, closure_of, closures_of, params_of
from .launch import report

WORLD = 2

STEPS = 3
# eight examples: four for each worker
MLP8, CONV8 = (dataclasses.replace(p, examples=8) for p in (MLP, CONV))
UNTOUCHED8 = dataclasses.replace(next(p for p in PROBLEMS if p.name == "untouched"), examples=8)
# rules whose closures take parts of a batch
PARTS = {
    "m-sam": partial(Sharp, 0.2, m=2),
    "esam-select": partial(ESAM, 0.2, 0.6, 0.5, 5),
    "sparse-samples": partial(SparseSAM, 0.2, 0.4, "fisher", 2, 3),
}
RUNS: dict[str, Callable[[int], Any]] = {}
"""By name, in one order on all ranks."""


def named(name: str) -> Callable:
    def enter(run: Callable[[int], Any]) -> Callable[[int], Any]:
        RUNS[name] = run
        return run

    return enter


def piece(batch: tuple, rank: int) -> tuple:
    """This rank's part of a batch."""
    return tuple(t.chunk(WORLD)[rank] for t in batch)


def batches(problem: Any, rank: int) -> tuple[tuple, tuple]:
    """This rank's parts of the training and of the validation batch."""
    return piece(problem.batch(), rank), piece(problem.batch(seed=7), rank)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, whole, by the names that they have in the model itself."""
    found = params_of(model.module if isinstance(model, DistributedDataParallel) else model)
    return {k: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for k, p in found.items()}


def by_parts(problem: Any, model: nn.Module, batch: tuple) -> Callable:
    def closure(part: Any = None) -> torch.Tensor:
        x, y = batch if part is None else (t[part] for t in batch)
        if problem.classes is None:
            return (model(x) - y).square().mean(1)
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    return closure


def walk(
    problem: Any,
    rule: Rule,
    wrap: Callable[[nn.Module], nn.Module],
    rank: int,
    *,
    base: Any,
    parts: bool = False,
    named: bool = True,
    steps: int = STEPS,
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step."""
    model = wrap(problem.model())
    optimizer = SharpnessAware(base(model.parameters()), rule, model=model if named else None, **options)
    train, val = batches(problem, rank)
    closures = closures_of(problem, model, train, val=val)
    if parts:
        closures["closure"] = by_parts(problem, model, train)
    found = []
    for _ in range(steps):
        optimizer.step(**closures)
        found.append(values(model))
    assert optimizer.skipped == 0
    return found


ddp = DistributedDataParallel
SGD = partial(torch.optim.SGD, lr=0.1)
CASES: list[tuple[str, Callable[[], Rule], Any, bool]] = [
    *((c.name, c.make, c.base, False) for c in RULES),
    *((name, make, SGD, True) for name, make in PARTS.items()),
]
KINDS = {
    "mlp": (MLP8, ddp),
    "mlp-views": (MLP8, partial(ddp, gradient_as_bucket_view=True)),
    "conv": (CONV8, ddp),
    "conv-views": (CONV8, partial(ddp, gradient_as_bucket_view=True)),
    "untouched": (UNTOUCHED8, partial(ddp, find_unused_parameters=True)),
    "untouched-views": (UNTOUCHED8, partial(ddp, find_unused_parameters=True, gradient_as_bucket_view=True)),
}
for (name, make, base, parts), (kind, (problem, wrap)) in itertools.product(CASES, KINDS.items()):
    RUNS[f"local/{name}/{kind}"] = lambda r, a=(problem, make, wrap), k={"base": base, "parts": parts}: walk(
        a[0], a[1](), a[2], r, **k
    )
for name, make, base, parts in CASES:
    RUNS[f"global/{name}"] = lambda r, m=make, k={"base": base, "parts": parts}: walk(
        MLP8, m(), ddp, r, ascent="global", **k
    )


for name, make in (("sam", partial(Sharp, 0.1)), ("vasso", partial(VaSSO, 0.1, 0.4))):
    RUNS[f"unnamed/{name}"] = lambda r, m=make: walk(
        MLP8, m(), partial(ddp, gradient_as_bucket_view=True), r, base=SGD, named=False
    )
    for ascent in ("local", "global"):
        RUNS[f"static/{name}/{ascent}"] = lambda r, m=make, a=ascent: walk(
            MLP8, m(), partial(ddp, static_graph=True), r, base=SGD, ascent=a
        )


@named("one-bucket")
def one_bucket(rank: int) -> Any:
    """A bucket that is exactly one tensor is a view that does not look like one."""
    return [
        walk(
            dataclasses.replace(MLP8, build=partial(nn.Linear, 3, 1, bias=False)),
            next(c for c in RULES if c.name == "gsam").rule,
            partial(ddp, gradient_as_bucket_view=views),
            rank,
            base=SGD,
        )
        for views in (False, True)
    ]


# something not finite on one worker alone


def spoiled(case: RuleCase, before: int, pass_: int, rank: int, problem: Any = MLP8) -> dict[str, Any]:
    """Fine steps, one in which a pass of the last rank is infinite, and a fine one."""
    model = ddp(problem.model())
    # momentum, so that the base's state shows whether it moved
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), 0.1, 0.9), case.rule, model=model)
    train, val = batches(problem, rank)
    bad = sum(case.cycle[i % len(case.cycle)] for i in range(before)) + pass_

    def change(n: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.inf if rank == WORLD - 1 and n == bad else loss

    closures = closures_of(problem, model, train, change, val=val)
    for _ in range(before):
        optimizer.step(**closures)
    found: dict[str, Any] = {"before": values(model), "momentum": momentum(optimizer)}
    optimizer.step(**closures)
    found |= {"after": values(model), "momentum after": momentum(optimizer), "skipped": optimizer.skipped}
    optimizer.step(**closures)
    return found | {"next": values(model), "skipped at last": optimizer.skipped}


def momentum(optimizer: SharpnessAware) -> dict[str, torch.Tensor]:
    params = (p for g in optimizer.param_groups for p in g["params"])
    return {str(i): optimizer.state[p]["momentum_buffer"].clone() for i, p in enumerate(params) if optimizer.state[p]}


for case in RULES:
    for before, i in case.passes:
        RUNS[f"spoiled/{case.name}/{before}/{i}"] = partial(spoiled, case, before, i)

TRACELESS = ("vasso", "friendly", "lookbehind", "agnostic-printed-momentum", "sparse", "sam", "looksam")


def flat(prediction: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the same wherever the weights are."""
    return prediction.mean()


class Flat(type(MLP8)):
    loss_fn = staticmethod(flat)


for case in (c for c in RULES if c.name in TRACELESS):
    problem = Flat("flat", partial(nn.Linear, 3, 1), examples=8)
    RUNS[f"traceless/{case.name}"] = partial(spoiled, case, 1, 0, problem=problem)


@named("scaler")
def scaler(rank: int) -> Any:
    """Scales after steps in which one worker's own pass was infinite."""
    model = ddp(nn.Linear(3, 1))
    optimizer = SAM(model.parameters(), lr=0.1, model=model)
    scale, calls, scales = torch.amp.GradScaler("cpu", init_scale=8.0), itertools.count(), []
    x = piece(MLP8.batch(torch.float32), rank)[0]

    def closure() -> torch.Tensor:
        loss = model(x).mean()
        bad = next(calls) == 2 and rank == 1
        scale.scale(loss * torch.inf if bad else loss).backward()
        return loss

    for _ in range(3):
        optimizer.step(closure, scaler=scale)
        scale.update()
        scales.append(scale.get_scale())
    return {"scales": scales, "skipped": optimizer.skipped, "weights": values(model)}


@named("sparse-rows")
def sparse_rows(rank: int) -> Any:
    """An embedding of which workers validate on different rows, under an optimizer that updates touched rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 3, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x).tanh().sum(-1).square().mean()

    torch.manual_seed(0)
    model = ddp(Model().double())
    optimizer = AgnosticSAM(model.parameters(), torch.optim.SparseAdam, lr=0.1, model=model)

    def closure(rows: list[int]) -> Callable:
        def run() -> None:
            model(torch.tensor(rows)).backward()

        return run

    found = []
    # the first step moves the moments of all rows
    for train, val in (([0, 1, 2, 3, 4, 5, 6, 7], [0]), ([rank], [4 + rank]), ([rank], [6 + rank])):
        optimizer.step(closure(train), closure(val))
        found.append(values(model))
    return found


@named("exception")
def exception(rank: int) -> Any:
    """The closure raises in a pass on displaced weights: on all ranks, then on the last alone."""
    model = ddp(MLP8.model())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, rho=0.1, model=model)
    found: dict[str, Any] = {}
    for name, who in (("both", {0, 1}), ("one", {1})):
        home, moved = values(model), []

        def change(n: int, loss: torch.Tensor, who: set = who, moved: list = moved) -> torch.Tensor:
            if n == 1 and rank in who:
                moved.append(values(model))
                raise KeyError("of the user")
            return loss

        try:
            optimizer.step(closure_of(MLP8, model, piece(MLP8.batch(), rank), change))
            said = ""
        except KeyError as e:
            said = str(e)
        found[name] = {"home": home, "after": values(model), "moved": moved, "said": said}
        if name == "one" and rank in who:
            # what the other worker is waiting for
            closure_of(MLP8, model, piece(MLP8.batch(), rank))()
    return found


@named("without-closure")
def without_closure(rank: int) -> Any:
    """Loops over passes and two phases, the first of them local or not, on buckets that are views."""
    found: dict[str, Any] = {}
    (x, y) = piece(MLP8.batch(), rank)
    for how, named in itertools.product(("passes", "phases", "phases-local"), (True, False)):
        model = ddp(MLP8.model(), gradient_as_bucket_view=True)
        optimizer = SharpnessAware(SGD(model.parameters()), Sharp(0.1), model=model if named else None)
        for _ in range(STEPS):
            if how == "passes":
                for _ in optimizer.passes():
                    MLP8.loss_fn(model(x), y).backward()
                continue
            optimizer.zero_grad()
            with model.no_sync() if how == "phases-local" else contextlib.nullcontext():
                MLP8.loss_fn(model(x), y).backward()
            optimizer.first_step()
            MLP8.loss_fn(model(x), y).backward()
            optimizer.second_step()
        found[f"{how}/{named}"] = values(model)
    return found


@named("accumulation")
def accumulation(rank: int) -> Any:
    """Micro-batches in the closure, all but the last without synchronising."""
    model = ddp(MLP8.model())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, rho=0.1, model=model)
    (x, y), found = piece(MLP8.batch(), rank), []

    def closure() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            (MLP8.loss_fn(model(x[:2]), y[:2]) / 2).backward()
        (MLP8.loss_fn(model(x[2:]), y[2:]) / 2).backward()

    for _ in range(STEPS):
        optimizer.step(closure)
        found.append(values(model))
    return found


@named("zero")
def zero(rank: int) -> Any:
    """A base whose state is spread over workers."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    base = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, lr=0.01)
    return walk(MLP8, Sharp(0.1), ddp, rank, base=base, ascent="global")


# fully_shard


def sharded(model: nn.Module, layers: bool = True) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.children():
        if layers and any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
for name, make, base, parts in CASES:
    RUNS[f"sharded/{name}"] = lambda r, m=make, k={"base": base, "parts": parts}: walk(MLP8, m(), sharded, r, **k)
for name in ("sam", "wsam", "lookbehind-adaptive"):
    RUNS[f"sharded-clip/{name}"] = lambda r, n=name: walk(
        MLP8, next(c for c in RULES if c.name == n).rule, sharded, r, base=SGD, clip=0.3, named=False
    )


@named("sharded-after-evaluation")
def after_evaluation(rank: int) -> Any:
    """A forward without backward leaves the weights of the root gathered: a displaced first pass must not use them."""
    found = []
    for looks, named in ((False, True), (True, True), (True, False)):
        model = sharded(MLP8.model(), layers=False)
        # one whose first pass is displaced, far enough to tell
        rule = RandomSAM(0.2, 2.0, 0.7, 5)
        optimizer = SharpnessAware(SGD(model.parameters()), rule, model=model if named else None)
        closures = closures_of(MLP8, model, batches(MLP8, rank)[0])
        for _ in range(2):
            if looks:
                with torch.no_grad():
                    model(MLP8.batch()[0])
            optimizer.step(**closures)
        found.append(values(model))
    return found


def spoiled_shards(case: RuleCase, pass_: int, rank: int) -> dict[str, Any]:
    model = sharded(MLP8.model())
    optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
    train, val = batches(MLP8, rank)

    def change(n: int, loss: torch.Tensor) -> torch.Tensor:
        # of one weight that the other rank holds
        return loss + torch.inf * loss if rank == 1 and n == pass_ else loss

    closures = closures_of(MLP8, model, train, change, val=val)
    home = values(model)
    optimizer.step(**closures)
    found = {"before": home, "after": values(model), "skipped": optimizer.skipped}
    optimizer.step(**closures)
    return found | {"next": values(model), "skipped at last": optimizer.skipped}


for name in ("sam", "vasso", "lookbehind", "wsam", "gsam"):
    for i in (0, 1):
        RUNS[f"sharded-spoiled/{name}/{i}"] = partial(spoiled_shards, next(c for c in RULES if c.name == name), i)


@named("is_finite")
def is_finite(rank: int) -> Any:
    """Of a tensor in one entry, wherever it lies; the pieces of a tensor of one entry are one and none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from metasam import tree

    mesh, found = init_device_mesh("cpu", (WORLD,)), {}
    for size, at, bad in itertools.product((1, 5), (0, -1), (1.0, torch.nan, torch.inf)):
        value = torch.arange(1.0, size + 1)
        value[at] *= bad
        for layout in (Shard(0), Replicate()):
            found[size, at, bad, str(layout)] = tree.is_finite(
                {"a": distribute_tensor(value, mesh, [layout]), "b": torch.ones(2)}
            )
    a, b = torch.arange(5.0), torch.arange(1.0, 6.0)
    a_, b_ = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    found["dot"] = float(tree.dot({"u": a_, "v": b_, "w": a}, {"u": b_, "v": a_, "w": b}))
    found["norm"] = float(tree.squared_norm({"u": a_, "v": b_, "w": a}))
    with tree.fused():
        found["fused"] = float(tree.squared_norm({"u": a_, "v": b_, "w": a}))
        sums = tree.add({"u": a_, "w": a}, {"u": a_, "w": b}, 2.0)
        found["sum"] = (sums["u"].full_tensor(), sums["w"])
    return found


@named("flat")
def flat_parameters(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    texts = []
    for original in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(MLP8.model(), use_orig_params=original, device_id=torch.device("cpu"))
        try:
            SAM(model.parameters(), lr=0.1)
        except TypeError as e:
            texts.append(str(e))
    return " | ".join(texts)


# checkpoints


def checkpointed(wrap: Callable, make: Callable, base: Any, ascent: str, how: str, rank: int, folder: Path) -> Any:
    """Parameters after four steps, and after two, a round trip into a fresh pair, and two more."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    train, val = batches(MLP8, rank)

    def fresh(seed: int) -> tuple:
        model = wrap(MLP8.model(seed=seed))
        optimizer = SharpnessAware(base(model.parameters()), make(), model=model, ascent=ascent)
        return model, optimizer, closures_of(MLP8, model, train, val=val)

    model, optimizer, closures = fresh(1)
    for _ in range(2):
        optimizer.step(**closures)
    path = folder / f"{how}-{len(list(folder.iterdir())) if rank == 0 else 0}"
    paths = [str(path)]
    distributed.broadcast_object_list(paths)
    twin, other, again = fresh(9)
    # copies, since torch's load aliases what it is given
    if how == "dcp":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=paths[0])
        weights, state = get_state_dict(twin, other)
        kept = {"model": weights, "optimizer": state}
        dcp.load(kept, checkpoint_id=paths[0])
        set_state_dict(twin, other, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    elif how == "full":
        options = StateDictOptions(full_state_dict=True)
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        set_state_dict(twin, other, model_state_dict=weights, optim_state_dict=state, options=options)
    elif how == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, state = get_state_dict(model, optimizer, options=options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            set_state_dict(twin, other, model_state_dict=weights, optim_state_dict=state, options=options)
        return [str(w.message) for w in said]
    else:
        # each worker its own, as torch.save would write it
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    counts = (other.counts, optimizer.counts)
    for _ in range(2):
        optimizer.step(**closures)
        other.step(**again)
    return {"wanted": values(model), "found": values(twin), "counts": counts, "skipped": other.skipped}


KEPT = ("sam", "friendly", "vasso", "looksam", "agnostic-printed-momentum", "random", "sparse", "momentum")
ADAMW = partial(torch.optim.AdamW, lr=0.02)


def enter_checkpoints(folder: Path) -> None:
    for name, base in itertools.product(KEPT, (MOMENTUM, ADAMW, SGD)):
        make = next(c for c in RULES if c.name == name).make
        kind = {MOMENTUM: "momentum", ADAMW: "adamw", SGD: "sgd"}[base]
        if base is not ADAMW and name not in ("sam", "vasso", "momentum"):
            continue
        if base is SGD and name == "momentum":
            continue
        for how, wrap, wrapped in itertools.product(("dcp", "full"), (ddp, sharded), ("ddp", "sharded")):
            if (wrap is ddp) != (wrapped == "ddp") or (name == "sparse" and wrap is sharded):
                continue
            if how == "full" and base is not ADAMW:
                continue
            RUNS[f"kept/{name}/{kind}/{how}/{wrapped}"] = partial(
                checkpointed, wrap, make, base, "global", how, folder=folder
            )
        RUNS[f"kept/{name}/{kind}/own/ddp"] = partial(checkpointed, ddp, make, base, "local", "own", folder=folder)
    vasso = next(c for c in RULES if c.name == "vasso").make
    RUNS["flattened"] = partial(checkpointed, ddp, vasso, MOMENTUM, "global", "flat", folder=folder)


def main(init: str, rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    folder = out.parent / "checkpoints"
    folder.mkdir(exist_ok=True)
    enter_checkpoints(folder)
    distributed.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=30)
    )
    report(RUNS, rank, out)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
