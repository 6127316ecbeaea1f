"""Data-parallel training: gradients that stay on their worker, and decisions that all workers take alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .. import shards
from ..ranks import Ranks
from ..types import Params

ASCENTS = ("local", "global")


def check_ascent(ascent: str) -> None:
    """Raise ValueError unless it is one of `ASCENTS`."""
    if ascent not in ASCENTS:
        raise ValueError(f"expected ascent to be 'local' or 'global', got {ascent!r}")


def check_params(live: Params) -> None:
    """Raise TypeError on parameters whose pieces look like whole ones."""
    flat = [k for k, p in live.items() if getattr(p, "_fsdp_flattened", False)]
    if flat:
        raise TypeError(
            f"expected parameters of fully_shard (FSDP2), got those of FullyShardedDataParallel ({flat[0]}, ...): "
            "their norm would be that of one worker's piece. Write torch.distributed.fsdp.fully_shard(model)"
        )


class Workers:
    """The data-parallel modules that one step meets, found in the model or as they are called.

    Closures that sum gradients over ``ranks`` themselves, as `metasam.SharpMAML` does, are told when not to.
    """

    def __init__(self, model: nn.Module | None, live: Params, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.parallel = distributed.is_available() and distributed.is_initialized()
        self.replicas: list[DistributedDataParallel] = []
        self.apart: list[DistributedDataParallel | Ranks] = []
        """Those with gradients that their other workers have not seen."""
        self.quiet: list[DistributedDataParallel] = []
        """Those that do not synchronise in this evaluation."""
        self.blind = False
        """Whether there was an evaluation outside `evaluate`, of which nothing is known."""
        self.sharding: Any = None
        self.known: list[nn.Module] = []
        if not self.parallel:
            return
        if shards.any_spread(live.values()):
            # whoever shards has imported it
            self.sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        self.device = next((p.device for p in live.values()), torch.device("cpu"))
        self.known = [m for m in model.modules() if self._concerns(m)] if model is not None else []
        self.replicas = [m for m in self.known if isinstance(m, DistributedDataParallel)]

    def _concerns(self, module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel) or (
            self.sharding is not None and isinstance(module, self.sharding)
        )

    @contextmanager
    def evaluate(self, local: bool, grad: bool) -> Iterator[None]:
        """Within: one evaluation; where ``local``, gradients stay on their worker if it has whole parameters.

        Raises:
            ValueError: a gradient is to stay local, and the module's graph is static, which cannot be.
        """
        if not self.parallel:
            yield
            return
        if self.ranks is not None:
            self.ranks.local = local and grad
            if self.ranks.local and self.ranks not in self.apart:
                self.apart.append(self.ranks)
            yield
            return

        def prepare(module: nn.Module, args: object = None) -> None:
            if isinstance(module, DistributedDataParallel):
                if module not in self.replicas:
                    self.replicas.append(module)
                if local and grad and module.static_graph:
                    raise ValueError(
                        "expected DistributedDataParallel without static_graph=True, which has to synchronise every "
                        "backward: leave it out, or climb with ascent='global'"
                    )
                # a loss alone needs no synchronising either
                if (local or not grad) and not module.static_graph and module.require_backward_grad_sync:
                    # what no_sync does, which has to be around forward and backward alike
                    module.require_backward_grad_sync = False
                    self.quiet.append(module)
                if (module in self.quiet or self.blind) and module not in self.apart:
                    self.apart.append(module)
            elif self._concerns(module):
                # a forward without a backward leaves the weights gathered, as they were before we moved them
                module.reshard()  # type: ignore[operator]

        hook = None if self.known else register_module_forward_pre_hook(prepare)
        try:
            for module in self.known:
                prepare(module)
            yield
        finally:
            if hook is not None:
                hook.remove()
            while self.quiet:
                self.quiet.pop().require_backward_grad_sync = True

    def own(self, grads: Params) -> Params:
        """The gradients, in memory that the next backward does not write to."""
        unknown = self.parallel and self.blind and not self.replicas
        if unknown or any(m.gradient_as_bucket_view for m in self.replicas):
            return {k: g.clone() for k, g in grads.items()}
        return grads

    def agree(self, good: bool) -> bool:
        """Whether all workers say so; asks them only where they have seen different gradients."""
        groups = {id(m.process_group): m.process_group for m in self.apart}
        for group in groups.values():
            flag = torch.tensor(float(good), device=self.device)
            distributed.all_reduce(flag, distributed.ReduceOp.MIN, group)
            good = bool(flag)
        return good
