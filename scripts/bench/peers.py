"""Other packages, each used as its own examples use it. Nothing here is imported before it is asked for."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from metasam.scripts.bench.contest import Step

if TYPE_CHECKING:
    from metasam.scripts.bench.meta_steps import Problem

PACKAGES = {
    "torch": "torch",
    "higher": "higher",
    "learn2learn": "learn2learn",
    "TorchOpt": "torchopt",
    "pytorch_optimizer": "pytorch_optimizer",
    "easyfsl": "easyfsl",
    "torchvision": "torchvision",
}
"""What takes part -> the distribution whose version is written down."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within: notices and warnings of old packages are not shown."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


# -- MAML ------------------------------------------------------------------------------------------------------------


def learn2learn(problem: Problem) -> Step:
    """``learn2learn.algorithms.MAML``."""
    with quiet():
        import learn2learn
    maml = learn2learn.algorithms.MAML(problem.model, lr=problem.lr)

    def step() -> Tensor:
        maml.zero_grad()
        tasks, losses = problem.task.unbind(), []
        for task in tasks:
            learner = maml.clone()
            for _ in range(problem.steps):
                learner.adapt(problem.loss(learner(task.support[0]), task.support[1]))
            loss = problem.loss(learner(task.query[0]), task.query[1])
            (loss / len(tasks)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def higher(problem: Problem) -> Step:
    """``higher.innerloop_ctx``."""
    import higher

    optimizer = torch.optim.SGD(problem.model.parameters(), lr=problem.lr)

    def step() -> Tensor:
        problem.model.zero_grad()
        tasks, losses = problem.task.unbind(), []
        for task in tasks:
            with higher.innerloop_ctx(problem.model, optimizer, copy_initial_weights=False) as (net, inner):
                for _ in range(problem.steps):
                    inner.step(problem.loss(net(task.support[0]), task.support[1]))
                loss = problem.loss(net(task.query[0]), task.query[1])
                (loss / len(tasks)).backward()
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def torchopt(problem: Problem) -> Step:
    """``torchopt.MetaSGD``, which moves the weights of the module that it is given; they are put back task by task."""
    with quiet():
        import torchopt
    net, params = problem.model, list(problem.model.parameters())
    inner = torchopt.MetaSGD(net, lr=problem.lr)
    weights = torchopt.extract_state_dict(net, by="reference", detach_buffers=True)
    state = torchopt.extract_state_dict(inner, by="reference")

    def step() -> Tensor:
        for p in params:
            p.grad = None
        tasks, losses = problem.task.unbind(), []
        for task in tasks:
            for _ in range(problem.steps):
                inner.step(problem.loss(net(task.support[0]), task.support[1]))
            loss = problem.loss(net(task.query[0]), task.query[1])
            (loss / len(tasks)).backward()
            losses.append(loss.detach())
            torchopt.recover_state_dict(net, weights)
            torchopt.recover_state_dict(inner, state)
        return torch.stack(losses).mean()

    return step


MAML: dict[str, Callable[[Problem], Step]] = {"learn2learn": learn2learn, "higher": higher, "TorchOpt": torchopt}


# -- optimizers ------------------------------------------------------------------------------------------------------


def pytorch_optimizer(
    model: nn.Module, closure_of: Callable[[nn.Module], Callable[[], Tensor]], **settings: Any
) -> Step:
    """``pytorch_optimizer.SAM``, as its docstring uses it, on a copy of the model."""
    with quiet():
        from pytorch_optimizer import SAM
    model = copy.deepcopy(model)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9, **settings)
    closure = closure_of(model)

    def step() -> None:
        closure()
        optimizer.step(closure)

    return step


# -- episodes --------------------------------------------------------------------------------------------------------


class _Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images and their labels, cut up before: as fast as a data set can be asked one by one."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.pairs = list(zip(images.unbind(), labels.tolist(), strict=True))

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        return self.pairs[item]

    def __len__(self) -> int:
        return len(self.pairs)


def task_dataset(images: Tensor, labels: Tensor, ways: int, shots: int, queries: int, tasks: int) -> Step:
    """``learn2learn.data.TaskDataset``, support and query told apart by a mask as in its few-shot examples."""
    with quiet():
        from learn2learn import data
        from learn2learn.data import transforms
    dataset = data.MetaDataset(_Pairs(images, labels))
    each = [
        transforms.NWays(dataset, ways),
        transforms.KShots(dataset, shots + queries),
        transforms.LoadData(dataset),
        transforms.RemapLabels(dataset),
        transforms.ConsecutiveLabels(dataset),
    ]
    with quiet():  # it has another name in later versions
        taskset = data.TaskDataset(dataset, each, num_tasks=-1)
    support = (torch.arange(shots + queries) < shots).repeat(ways)

    def one() -> tuple[Tensor, ...]:
        x, y = taskset.sample()
        return x[support], y[support], x[~support], y[~support]

    return lambda: [one() for _ in range(tasks)]


def task_sampler(images: Tensor, labels: Tensor, ways: int, shots: int, queries: int, tasks: int) -> Step:
    """``easyfsl.samplers.TaskSampler`` in a ``DataLoader``.

    It calls ``Sampler.__init__(data_source=None)``, an argument that torch no longer takes: while it does, torch is
    given one that takes it.
    """
    with quiet():
        from easyfsl.datasets import FewShotDataset
        from easyfsl.samplers import TaskSampler

    class Labelled(_Pairs, FewShotDataset):
        def get_labels(self) -> list[int]:
            return [label for _, label in self.pairs]

    dataset, base = Labelled(images, labels), torch.utils.data.Sampler
    before = base.__init__
    try:
        base.__init__ = lambda self, data_source=None: None  # type: ignore[method-assign, misc]
        sampler = TaskSampler(dataset, n_way=ways, n_shot=shots, n_query=queries, n_tasks=tasks)
    finally:
        base.__init__ = before  # type: ignore[method-assign]
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, num_workers=0, collate_fn=sampler.episodic_collate_fn
    )
    return lambda: list(loader)


SAMPLERS = {"learn2learn TaskDataset": task_dataset, "easyfsl TaskSampler": task_sampler}
