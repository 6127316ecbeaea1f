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
        What came out of each job, in their order. Under ``torch.no_grad`` there are no gradients.
    """
    grad = torch.is_grad_enabled()
    if graphs is not None and grad:
        yield from _accumulated(params, (graphs(job.loop, params, job.tasks, 1 / total) for job in jobs))
    elif workers > 1 and len(jobs) > 1:

        def work(own: InnerLoop, job: Job) -> tuple[Adapted, Params]:
            loop = dataclasses.replace(job.loop, model=own.model, counts=own.counts)
            found = engine(loop, params, job.tasks, job.given)
            if not grad:
                return found, {}
            wanted = {k: p for k, p in params.items() if p.requires_grad}
            grads = torch.autograd.grad(found.loss.sum() / total, list(wanted.values()), allow_unused=True)
            return _without_graph(found), {k: g for k, g in zip(wanted, grads, strict=True) if g is not None}

        yield from _accumulated(params, threads.run(jobs[0].loop, work, jobs, workers))
    else:
        for job in jobs:
            found = engine(job.loop, params, job.tasks, job.given)
            if grad:
                (found.loss.sum() / total).backward()
            yield found


def _accumulated(params: Params, results: Iterable[tuple[Adapted, Params]]) -> Iterator[Adapted]:
    for found, grads in results:
        for k, g in grads.items():
            before = params[k].grad
            params[k].grad = g if before is None else before + g
        yield found


def _without_graph(found: Adapted) -> Adapted:
    output = found.output if isinstance(found.output, tuple) else found.output.detach()
    return Adapted(found.loss.detach(), output, tree.detach(found.params), found.eps)
