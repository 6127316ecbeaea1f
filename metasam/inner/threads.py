"""Tasks side by side in threads of one process.

Tasks meet only in the sum of their gradients, so each of N threads adapts its own, and an operation gets the N-th part
of torch's threads: with two of them that is one each, and faster than two an operation, as small convolutions are too
short to share. Every thread calls a copy of the module, since a task's parameters are put into the module for the time
of a call; the copies share every tensor with it. Results come back in the order of the tasks and are summed in it, so
that their bits depend on the threads of an operation only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import nn

from .loop import InnerLoop

Given = TypeVar("Given")
Result = TypeVar("Result")


def twin(model: nn.Module) -> nn.Module:
    """A copy of the modules, and of what else they hold, around the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})


def run(
    loop: InnerLoop, work: Callable[[InnerLoop, Given], Result], items: Sequence[Given], workers: int
) -> Iterator[Result]:
    """``work(loop, item)`` of each item, in their order, ``workers`` at a time.

    ``work`` is given a loop around a copy of the model, which no other thread calls meanwhile. At most ``2 workers``
    results wait at a time. Counts arrive in ``loop.counts`` with the results.
    """
    workers, operations = min(workers, len(items)), torch.get_num_threads()
    free: SimpleQueue[InnerLoop] = SimpleQueue()
    for _ in range(workers):
        free.put(dataclasses.replace(loop, model=twin(loop.model), counts=defaultdict(float)))
    inherit = _inherit()

    def one(item: Given) -> tuple[Result, dict[str, float]]:
        own = free.get()
        own.counts.clear()
        try:
            with inherit():
                return work(own, item), dict(own.counts)
        finally:
            free.put(own)

    share = max(1, operations // workers)
    pool = ThreadPoolExecutor(workers, "metasam", initializer=torch.set_num_threads, initargs=(share,))
    waiting: list[Future[tuple[Result, dict[str, float]]]] = []
    ahead = iter(items)

    def submit(number: int) -> None:
        waiting.extend(pool.submit(one, item) for item in itertools.islice(ahead, number))

    try:
        submit(2 * workers)
        while waiting:
            result, counts = waiting.pop(0).result()
            for k, v in counts.items():
                loop.counts[k] += v
            yield result
            submit(1)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(operations)  # the threads' setting became that of threads to come, and of MKL


def _inherit() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """What torch keeps a thread: whether gradients are recorded, and autocast."""
    grad = torch.is_grad_enabled()
    cast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=cast):
            yield

    return within
