"""Processes that meta-train together: each adapts to its own tasks of every meta-batch, and what they found is summed.

Task ``i`` is for rank ``i % size``. Weights, generators and rule states stay the same on all ranks, because all take
the same steps along the same sums.
"""

from __future__ import annotations

import datetime
import functools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from .errors import first_line
from .noise import seed

if distributed.is_available():
    # Its functions have the group of the moment of their import for a default. If there is one already (TorchDynamo
    # imports them late), it outlives `destroy_process_group`, and its threads the interpreter, which then may abort.
    import torch.distributed.nn.functional

_T = TypeVar("_T")


class RankLost(RuntimeError):  # noqa: N818 - what happened
    """Another process of the group does not answer any more."""


@dataclass
class Ranks:
    """The processes of a group, as one of them sees it; alone by default.

    Args:
        rank: number of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1
    local: bool = False
    """Whether the gradient of the present pass stays on its rank; `metasam.optim.distributed.Workers` says so."""
    equal: bool = False
    """Whether all are known to have the weights of rank 0."""
    process_group = None  # the default one, under the name that DistributedDataParallel has for it

    @classmethod
    def initialised(cls) -> Ranks:
        """Those of ``torch.distributed``.

        Raises:
            RuntimeError: it was not initialised.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "expected torch.distributed to be initialised for split=True, got a process on its own: start it with "
                "torchrun and call torch.distributed.init_process_group(), or leave split out"
            )
        return cls(distributed.get_rank(), distributed.get_world_size())

    # of a meta-batch

    def rows(self, numbers: Sequence[int]) -> list[int]:
        """Which of these tasks are this rank's."""
        return [row for row, number in enumerate(numbers) if number % self.size == self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over ranks (any, of booleans), in one all-reduce."""
        dtype = _dtype(tensors)
        buffer = torch.cat([t.flatten().to(dtype) for t in tensors])
        with _listening():
            distributed.all_reduce(buffer)
        parts = buffer.split([t.numel() for t in tensors])
        return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def gather(
        self,
        rows: Sequence[int],
        count: int,
        losses: Tensor,
        hits: Tensor | None,
        params: Iterable[Tensor] = (),
        means: Iterable[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """What all ranks saw of ``count`` tasks, and the sums of the gradients that they left on ``params``.

        Args:
            rows: of those tasks, this rank's.
            count: number of tasks.
            losses: of this rank's tasks.
            hits: their accuracies; None where there are none.
            params: their gradients become the sums over ranks; None where no rank has one.
            means: they become the means over ranks.
        """
        if self.size == 1:
            return losses, hits
        params, means = [p for p in params if p.requires_grad], list(means)
        seen = losses.new_zeros(3, count, dtype=_dtype(params) if params else torch.float64)
        own = torch.tensor(rows, dtype=torch.long, device=seen.device)
        seen[0, own] = losses.to(seen)
        if hits is not None:
            seen[1, own], seen[2, own] = hits.to(seen), 1.0
        there = torch.tensor([p.grad is not None for p in params], device=seen.device)
        grads = [_as_real(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()) for p in params]
        shares = [m.to(_dtype([m])) / self.size for m in means]
        seen, there, *sums = self.sum([seen, there, *grads, *shares])
        for p, grad, some in zip(params, sums, there.tolist(), strict=False):
            p.grad = (torch.view_as_complex(grad) if p.is_complex() else grad) if some else None
        for m, mean in zip(means, sums[len(params) :], strict=True):
            m.copy_(mean if m.is_floating_point() else mean.round())
        return seen[0], seen[1] if bool(seen[2].any()) else None

    @torch.no_grad()
    def equalise(self, model: nn.Module) -> None:
        """Give all ranks the weights and buffers of rank 0, once."""
        if self.size > 1 and not self.equal:
            with _listening():
                for tensor in (*model.parameters(), *model.buffers()):
                    whole = tensor.detach().flatten()
                    distributed.broadcast(whole.view(torch.uint8), 0)  # of any dtype
                    tensor.copy_(whole.view(tensor.shape))
        self.equal = True

    @contextmanager
    def drawing(self, device: torch.device, *key: int) -> Iterator[None]:
        """Within: torch draws (dropout masks) what is this rank's own, by seed, key and rank; no trace is left."""
        if self.size == 1:
            yield
            return
        own = seed(torch.initial_seed(), *key, self.rank)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(own)
            if device.type == "cuda":
                torch.cuda.manual_seed(own)
            yield

    # of a run

    def any(self, *wishes: bool) -> list[bool]:
        """Whether some rank wishes it, for each of the wishes."""
        if self.size == 1:
            return list(wishes)
        return self.sum([torch.tensor(wishes)])[0].tolist()

    def once(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns, or raises, on rank 0, which alone does it."""
        if self.size == 1:
            return work()
        box: list[Any] = [_tried(work) if self.rank == 0 else None]
        with _listening():
            distributed.broadcast_object_list(box)
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def in_turn(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns: rank 0 does it first, then the first rank of each machine, then the others.

        So what it downloads or keeps in files is made once. An error of one rank is raised on all.
        """
        if self.size == 1:
            return work()
        turn = 0 if self.rank == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
        found: Any = None
        for now in range(3):
            found, error = _tried(work) if now == turn else (found, None)
            errors: list[Any] = [None] * self.size
            with _listening():
                distributed.all_gather_object(errors, error)
            for of_rank in [error, *errors]:
                if of_rank is not None:
                    raise of_rank
        return found


def launched() -> bool:
    """Whether ``torchrun`` started this process with others."""
    return all(k in os.environ for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) and int(os.environ["WORLD_SIZE"]) > 1


START = datetime.timedelta(minutes=5)
"""How long to wait for the other processes: torchrun starts all at once, so that imports are all there is to wait for.

An operation waits longer, for what takes time on another rank.
"""

_store: Any = None  # of a group that `joined` made


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """Within: the processes that ``torchrun`` started are a group, by NCCL where they use GPUs and by gloo elsewhere.

    Args:
        device: that they will use; each takes the GPU of its number on its machine.

    Raises:
        ValueError: there are fewer GPUs than processes, or the device is none that they could talk from.
        ConnectionError: another process is gone before it joined.
    """
    global _store
    if not launched():
        yield Ranks()
        return
    backend, there = "gloo", torch.cuda.device_count()
    if device == "mps":
        raise ValueError("expected device=cpu or cuda under torchrun, got device=mps: start it without torchrun")
    if device != "cpu" and there:
        number = int(os.environ["LOCAL_RANK"])
        if number >= there:
            raise ValueError(
                f"expected a GPU for each process, got {there} for {os.environ.get('LOCAL_WORLD_SIZE')} on this "
                f"machine: torchrun --nproc-per-node={there}, or device=cpu"
            )
        torch.cuda.set_device(number)
        backend = "cpu:gloo,cuda:nccl"
    try:
        _store, rank, size = next(iter(distributed.rendezvous("env://", timeout=START)))
        distributed.init_process_group(backend, store=_store, rank=rank, world_size=size)
        _store.set_timeout(distributed.constants.default_pg_timeout)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(
            f"expected {os.environ['WORLD_SIZE']} processes to meet at {where} within {START.seconds} s, and at least "
            f"one is gone or out of reach: see what it said, and start all again ({first_line(error)})"
        ) from error
    try:
        yield Ranks(rank, size)
    finally:
        distributed.destroy_process_group()


def speaks(message: str) -> bool:
    """Whether it is for this process to tell the user: of all that would say the same, the first one is."""
    if not launched():
        return True
    if _store is None:
        return os.environ["LOCAL_RANK"] == "0"
    try:
        return bool(_store.add(f"metasam/{seed(*message.encode())}", 1) == 1)
    except RuntimeError:  # it was on the machine that is gone
        return True


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


@contextmanager
def _listening() -> Iterator[None]:
    """Within: other processes are expected to answer."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            "a process of this run is gone, and the others cannot go on: expected all of them to take every step; what "
            "it said itself, or the signal that ended it, is above or in torchrun's summary"
        ) from error


def _dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """What sums of these are taken in."""
    return functools.reduce(torch.promote_types, (_as_real(t.detach()).dtype for t in tensors), torch.float32)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
