"""The gradient of a meta-loss, chunk of tasks by chunk: in turn, in threads, or from a graph traced before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import tree
from ..types import Params, Task
from . import threads
from .ends import Beside
from .loop import Adapted, Engine, InnerLoop
from .traced import Graphs


class Job(NamedTuple):
    """A chunk of tasks to run through the inner loop at once."""

    numbers: Sequence[int]
    """Theirs within the meta-batch."""
    tasks: Task
    given: Sequence[Params] = ()
    """Displacements to use again."""


def backward(
    engine: Engine,
    loop: InnerLoop,
    params: Params,
    jobs: list[Job],
    total: int,
    *,
    beside: Beside | None = None,
    workers: int = 1,
    graphs: Graphs | None = None,
) -> Iterator[Adapted]:
    """Run the jobs and add the gradient of the sum of all losses over ``total`` to the ``.grad`` of ``params``.

    Args:
        engine: runs a job.
        loop: the inner loop of all jobs.
        params: all parameters of the model.
        jobs: what to run.
        total: number of tasks that the loss is the mean of.
        beside: what else the losses turn out to have gradients in, which is kept there; they go to its ``.grad`` too.
        workers: threads that the jobs are shared among.
        graphs: where the gradient is to come from, instead of ``engine``.

    Yields:
        What came out of each job, in their order. Under ``torch.no_grad`` there are no gradients; else they are there
        once all jobs are done.
    """
    grad = torch.is_grad_enabled()
    beside = Beside() if beside is None else beside

    def only(job: Job) -> tuple[Adapted, Params]:
        """The only job: its graph may end in the parameters themselves, unless a loss reaches anything by itself."""
        found = engine(loop, params, job.tasks, job.given, job.numbers)
        (found.loss.sum() / total).backward()
        return _without_graph(found), {}

    def work(loop: InnerLoop, job: Job) -> tuple[Adapted, Params]:
        """One of many: hooks are the parameters' own, and run once, as the sum of all gradients arrives there."""
        leaves = {k: p.detach().requires_grad_(p.requires_grad) for k, p in params.items()}
        found = engine(loop, leaves, job.tasks, job.given, job.numbers)
        if not grad:
            return found, {}
        beside.look(found.loss, leaves.values())
        ends = [(k, p) for k, p in (*leaves.items(), *beside.among(params).items()) if p.requires_grad]
        grads = torch.autograd.grad(found.loss.sum() / total, [p for _, p in ends], allow_unused=True)
        reached: Params = {}
        for (k, _), g in zip(ends, grads, strict=True):
            reached = reached if g is None else tree.add(reached, {k: g})
        return _without_graph(found), reached

    results: Iterable[tuple[Adapted, Params]]
    if graphs is not None and grad:
        results = (graphs(loop, params, job.tasks, 1 / total) for job in jobs)
    elif grad and len(jobs) == 1 and beside.found == []:
        results = map(only, jobs)
    elif workers > 1 and len(jobs) > 1:
        results = threads.run(loop, work, jobs, workers)
    else:
        results = (work(loop, job) for job in jobs)
    summed: Params = {}
    for found, grads in results:
        summed = tree.add(summed, grads)
        yield found
    if summed:
        ends = {**beside.among(params), **params}
        torch.autograd.backward([ends[k] for k in summed], list(summed.values()))


def _without_graph(found: Adapted) -> Adapted:
    output = found.output if isinstance(found.output, tuple) else found.output.detach()
    return Adapted(found.loss.detach(), output, tree.detach(found.params), found.eps)
