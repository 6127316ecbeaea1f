"""The gradient of a meta-loss, chunk of tasks by chunk: in turn, in threads, or from a graph traced before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import tree
from ..types import Params, Task
from . import threads
from .loop import Adapted, Engine, InnerLoop
from .traced import Graphs


class Job(NamedTuple):
    """A chunk of tasks to run through the inner loop at once, and displacements to use again."""

    loop: InnerLoop
    tasks: Task
    given: Sequence[Params] = ()


def backward(
    engine: Engine, params: Params, jobs: list[Job], total: int, *, workers: int = 1, graphs: Graphs | None = None
) -> Iterator[Adapted]:
    """Run the jobs and add the gradient of the sum of all losses over ``total`` to the ``.grad`` of ``params``.

    Args:
        engine: runs a job.
        params: all parameters of the model.
        jobs: what to run; their loops share one ``counts``.
        total: number of tasks that the loss is the mean of.
        workers: threads that the jobs are shared among.
        graphs: where the gradient is to come from, instead of ``engine``.

    Yields:
        What came out of each job, in their order. Under ``torch.no_grad`` there are no gradients; else they are there
        once all jobs are done.
    """
    grad = torch.is_grad_enabled()

    def work(own: InnerLoop, job: Job) -> tuple[Adapted, Params]:
        loop = dataclasses.replace(job.loop, model=own.model, counts=own.counts)
        # hooks are the parameters' own, and run once, as the sum of all gradients arrives there
        leaves = {k: p.detach().requires_grad_(p.requires_grad) for k, p in params.items()}
        found = engine(loop, leaves, job.tasks, job.given)
        if not grad:
            return found, {}
        wanted = {k: p for k, p in leaves.items() if p.requires_grad}
        grads = torch.autograd.grad(found.loss.sum() / total, list(wanted.values()), allow_unused=True)
        return _without_graph(found), {k: g for k, g in zip(wanted, grads, strict=True) if g is not None}

    results: Iterable[tuple[Adapted, Params]]
    if graphs is not None and grad:
        results = (graphs(job.loop, params, job.tasks, 1 / total) for job in jobs)
    elif workers > 1 and len(jobs) > 1:
        results = threads.run(jobs[0].loop, work, jobs, workers)
    else:
        results = (work(job.loop, job) for job in jobs)
    summed: Params = {}
    for found, grads in results:
        summed = tree.add(summed, grads)
        yield found
    if summed:
        torch.autograd.backward([params[k] for k in summed], list(summed.values()))


def _without_graph(found: Adapted) -> Adapted:
    output = found.output if isinstance(found.output, tuple) else found.output.detach()
    return Adapted(found.loss.detach(), output, tree.detach(found.params), found.eps)
