"""What the live optimizer costs beside its gradient passes: dispatched operations, and memory at the peak."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metasam import SAM, AgnosticSAM, FisherSAM, LookSAM, MultiStepSAM
from metasam.scripts.bench.optimizers import Optimizers

SGD = torch.optim.SGD


class Operations(TorchDispatchMode):
    """Counts what is dispatched within."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not str(function).startswith("profiler")
        return function(*args, **(kwargs or {}))


class Memory(TorchDispatchMode):
    """Tallies the bytes of tensors made within, as long as they live."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known and key not in self.alive:
            self.alive[key] = weakref.finalize(storage, self._free, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _free(self, key, size):
        del self.alive[key]
        self.now -= size


def closure_of(model, batch):
    @torch.enable_grad()
    def closure():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def operations(step):
    step()
    with Operations() as counted:
        step()
    return counted.count


@pytest.mark.parametrize(("named", "limit"), [(True, 275), (False, 275)])
def test_dispatched_operations_of_sam_beside_its_two_passes(named, limit):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.resnet18(num_classes=10)
    closure = closure_of(model, (torch.randn(2, 3, 32, 32), torch.tensor([3, 7])))
    optimizer = SAM(model.parameters(), SGD, lr=0.1, momentum=0.9, model=model if named else None)
    bare = operations(lambda: (closure(), closure()))
    count = operations(lambda: optimizer.step(closure)) - bare
    if not hasattr(torch, "_foreach_clone"):
        limit += len(list(model.parameters()))
    update = operations(optimizer.base.step)
    assert update > 3 * 60  # three operations of momentum SGD for each of 62 parameters are among them
    assert update < count <= limit


def by_hand(params, base, **settings):
    """The usual two-pass loop of SAM."""
    params = list(params)
    optimizer = base(params, **{k: v for k, v in settings.items() if k != "model"})

    class Loop:
        @torch.no_grad()
        def step(self, closure):
            closure()
            factor = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
            home = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad * factor)
            closure()
            for p, saved in zip(params, home, strict=True):
                p.copy_(saved)
            optimizer.step()

    return Loop()


def peak(make, val=False):
    """Copies of the weights that live at once within a step, beside the weights themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(*itertools.chain(*[(nn.Linear(96, 96, bias=False), nn.Tanh()) for _ in range(8)]))
    closure = closure_of(model, (torch.randn(2, 96), torch.tensor([3, 7])))
    if make is None:
        step = closure
    else:
        optimizer = make(model.parameters(), SGD, lr=0.1, foreach=False, model=model)

        def step():
            optimizer.step(closure, **({"val": closure} if val else {}))

    step()
    model.zero_grad()
    params = list(model.parameters())
    with Memory(params) as memory:
        step()
    return memory.peak / sum(p.nbytes for p in params)


def test_the_tally_counts_what_it_should():
    assert peak(None) == pytest.approx(1, abs=0.05)  # the gradients
    a = torch.zeros(100)
    with Memory([a]) as memory:
        b = a + 1
        a[:50].add_(1)
        c = b[:3].view(3)
        assert (memory.now, memory.peak) == (400, 400)
        del b
        assert memory.now == 400  # c looks into it
        del c
        assert (memory.now, memory.peak) == (0, 400)


@pytest.mark.parametrize(
    ("make", "val", "copies"),
    [
        # home, eps and the gradient
        (SAM, False, 3),
        (FisherSAM, False, 3),
        (LookSAM, False, 3),
        (AgnosticSAM, True, 3),
        (MultiStepSAM, False, 4),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_memory_at_the_peak(make, val, copies):
    assert peak(make, val) == pytest.approx(copies, abs=0.05)


def test_sam_needs_at_most_a_copy_more_than_the_usual_loop():
    usual = peak(by_hand)
    assert 2 < usual < 2.3  # the old weights, the gradient, and eps of one tensor
    assert peak(SAM) < usual + 1


# the benchmark


def test_bare_passes_are_as_many_as_they_say():
    work = Optimizers(nn.Linear(6, 4), (torch.randn(8, 6), torch.randint(4, (8,))))
    one, two, both = (operations(work.bare(*n)) for n in ((1, 0), (2, 0), (2, 2)))
    assert (two, both) == (2 * one, 4 * one)
