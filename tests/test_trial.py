"""An engine is taken only where one step of it gives what the plain one gives."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metasam import SharpMAML, Task, inner
from metasam.inner import trial

from .cases import MLP

np = pytest.importorskip("numpy")


class Blocks(nn.Module):
    """Max pooling by strides, which vmap takes wrong after a convolution of many tasks (torch 2.14)."""

    def forward(self, x):
        n, c, h, w = x.shape
        blocks = x.as_strided((n, c, h // 2, w // 2, 2, 2), (c * h * w, h * w, 2 * w, 2, w, 1))
        return blocks.amax((-1, -2)).flatten(1)


class Drifts(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Masks(nn.Module):
    """Draws a mask that torch knows nothing of."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * torch.tensor([self.draw.random() for _ in range(x.shape[-1])])


class Careless(torch.autograd.Function):
    """The identity, with a wrong gradient under vmap alone."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return Doubled.apply(x), in_dims[0]


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Wrong(nn.Module):
    def forward(self, x):
        return Careless.apply(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Blocks, "something else under torch.vmap"),
        (Wrong, "something else under torch.vmap"),
        (Drifts, "something else under torch.vmap"),
        (lambda: Masks(random.Random(0)), "something else each time"),
        (lambda: Masks(random), "something else each time"),
        (lambda: Masks(np.random), "something else each time"),
    ],
    ids=["strides", "gradient", "counts", "a generator of its own", "random", "numpy"],
)
def test_auto_takes_vmap_only_where_it_gives_the_same(layer, reason, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(3, 6, 3, 8, 8, dtype=dtype), torch.arange(3).repeat(2).expand(3, -1)
    batch = Task((x, y), (x.flip(1), y))

    def made(engine):
        torch.manual_seed(1)
        conv = nn.Conv2d(3, 4, 3, padding=1)
        layers = [conv, layer()] if layer is Blocks else [nn.Flatten(), nn.Linear(192, 64), layer()]
        model = nn.Sequential(*layers, nn.Linear(64, 3)).to(dtype)
        return SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine=engine, variant="none", workers=1)

    auto = made("auto")
    loss = auto.meta_loss(batch)
    assert auto.engine_used == "higher"
    assert reason in auto.engine_reason, auto.engine_reason
    if layer in (Blocks, Wrong):
        assert torch.equal(loss, made("higher").meta_loss(batch))
    with pytest.raises(ValueError, match=f"cannot take this model: .*{reason}.*engine='higher'"):
        made("vmap").meta_loss(batch)


class Of(nn.Module):
    """What one precision is enough for, or what keeps something."""

    def __init__(self, what):
        super().__init__()
        self.what, self.kept = what, {}
        self.register_buffer("matrix", torch.eye(64) * 1.5)
        self.register_buffer("late", None)

    def forward(self, x):
        if self.what == "a precision of its own":
            return F.linear(x.float(), self.matrix.float()).to(x.dtype)
        if self.what == "a tensor that is kept":
            x = x + self.kept.setdefault(len(x), torch.ones(64, dtype=x.dtype))
        if self.what == "a buffer that is made":
            self.late = torch.ones(64, dtype=x.dtype) if self.late is None else self.late
            x = x + self.late
        return F.linear(x, self.matrix)


def images(rows=6, queries=12):
    y, qy = (torch.arange(n).remainder(3).expand(3, -1) for n in (rows, queries))
    return Task((torch.randn(3, rows, 3, 8, 8), y), (torch.randn(3, queries, 3, 8, 8), qy))


def network(*norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), *norm, nn.ReLU(), nn.Linear(16, 3))


PARTICULAR = ["buffers", "a precision of its own", "a tensor that is kept", "a buffer that is made", "no finite loss"]


@pytest.mark.parametrize("engine", ["auto", "vmap", "higher"])
@pytest.mark.parametrize("what", PARTICULAR)
def test_a_trial_suits_models_of_one_precision_and_leaves_nothing_in_them(what, engine):
    torch.manual_seed(0)
    task = images()
    if what == "no finite loss":
        task.support[0][0] = math.nan
    of = Of(what)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.BatchNorm1d(64), nn.ReLU(), of, nn.Linear(64, 3))
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, engine=engine, variant="none")
    maml.meta_loss(task).backward()
    assert maml.engine_used == ("higher" if engine == "higher" else "vmap"), maml.engine_reason
    assert of.matrix.dtype == torch.float32
    assert all(v.dtype == torch.float32 for v in of.kept.values())


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_half_precision_is_not_mistaken_for_another_result(engine):
    class Pixels(nn.Module):
        def forward(self, x):
            return x.float().flatten(1) / 255  # fails in double, and is cast to bfloat16 by the next layer

    for seed in range(4):
        torch.manual_seed(seed)
        layers = [nn.Linear(192, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU()]
        model = nn.Sequential(Pixels(), *layers, nn.Linear(128, 3))
        maml = SharpMAML(model, F.cross_entropy, inner_lr=0.4, inner_steps=2, engine=engine, variant="none")
        task = images()
        x, qx = (torch.randint(0, 256, t.shape, dtype=torch.uint8) for t in (task.support[0], task.query[0]))
        with torch.autocast("cpu", torch.bfloat16):
            maml.meta_loss(Task((x, task.support[1]), (qx, task.query[1])))
        assert maml.engine_used == "vmap", maml.engine_reason


def test_losses_and_gradients_of_the_size_of_rounding_are_the_same():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(4, 10, 3).double()
    y = teacher(x).detach()
    maml = SharpMAML(teacher, F.mse_loss, inner_lr=0.1, inner_steps=2, engine="vmap", variant="none")
    assert maml.meta_loss(Task((x, y), (x, y))) < 1e-20


class Lost(torch.autograd.Function):
    """The square, whose second derivative is lost under vmap."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def vmap(info, in_dims, x):
        return Constant.apply(x), in_dims[0]


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0].detach() * g


class Squares(nn.Module):
    def forward(self, x):
        return Lost.apply(x)


class NoisyInTraining(nn.Module):
    def forward(self, x):
        return x * random.random() if self.training else x


@pytest.mark.parametrize("layer", [Squares, NoisyInTraining])
@pytest.mark.parametrize("first", ["evaluate", "adapt", "training"])
def test_what_is_seen_in_training_alone_is_seen_whatever_comes_first(first, layer):
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 10).double(), torch.arange(6).remainder(3).expand(4, -1)
    task = Task((x, y), (x.flip(1), y.flip(1)))
    model = nn.Sequential(nn.Linear(10, 16), layer(), nn.Linear(16, 3)).double()
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=2, variant="none", workers=1)
    if first == "evaluate":
        maml.evaluate(task)
    elif first == "adapt":
        maml.adapt(Task((x[0], y[0]), (x[0], y[0])))
    if first != "training":
        assert maml.engine_used == "vmap"
    maml.meta_loss(task)
    assert maml.engine_used == "higher"
    reason = maml.engine_reason
    maml.evaluate(task)
    assert (maml.engine_used, maml.engine_reason) == ("higher", reason)


@pytest.mark.parametrize("engine", ["vmap", "higher"])
def test_trials_do_not_write_to_a_loss(engine):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("projection", torch.eye(3))

        def forward(self, output, y):
            self.calls += 1
            return F.cross_entropy(output @ self.projection, y)

    torch.manual_seed(0)
    loss = Counts()
    model = network(nn.BatchNorm1d(16, track_running_stats=False))
    maml = SharpMAML(model, loss, inner_lr=0.1, inner_steps=1, engine=engine, variant="none", workers=1)
    found = inner.choose(engine, maml.loop, dict(model.named_parameters()), images())
    assert found[0] == engine
    assert loss.calls <= 2  # the trial that names the module that vmap fails in
    inner.use_kernels(engine, maml.loop, dict(model.named_parameters()), images())
    assert loss.calls <= 2
    assert loss.projection.dtype == torch.float32


def test_learners_in_threads_may_share_a_loss():
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))
    failures = []

    def train():
        try:
            model = network(nn.BatchNorm1d(16))
            for engine in ("auto", "higher"):
                maml = SharpMAML(model, loss, inner_lr=0.1, inner_steps=1, engine=engine, variant="none", workers=1)
                maml.meta_loss(images()).backward()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert loss.weight.dtype == torch.float32


def test_other_threads_may_draw_from_numpy_meanwhile():
    torch.manual_seed(0)
    drawn, stop = [], threading.Event()

    def draw():
        while not stop.is_set():
            drawn.append(np.random.random())
            time.sleep(1e-4)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            model = network()
            maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, engine="vmap", variant="none")
            maml.meta_loss(images())
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) == len(drawn)  # none is drawn again


@pytest.mark.parametrize("engine", ["vmap", "higher"])
def test_a_trial_that_memory_does_not_suffice_for_tells_nothing(engine, monkeypatch):
    torch.manual_seed(0)

    def short(*args, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("metasam.inner.trial._found", short)
    model = network(nn.BatchNorm1d(16))
    maml = SharpMAML(model, F.cross_entropy, inner_lr=0.1, inner_steps=1, engine=engine, variant="none", workers=1)
    maml.meta_loss(images()).backward()
    assert maml.engine_used == engine
    assert ("memory that does not suffice" in maml.engine_reason) == (engine == "higher")


def test_trying_engines_out_leaves_the_generator_alone():
    class Draws(nn.Module):
        def forward(self, x):
            return x * torch.rand_like(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), Draws(), nn.Linear(8, 1)).double()
    loop = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=1, variant="none").loop
    before = torch.get_rng_state()
    assert inner.choose("auto", loop, dict(model.named_parameters()), MLP.tasks())[0] == "vmap"
    assert torch.equal(before, torch.get_rng_state())
    assert model[1].training


def test_trials_copy_modules_and_containers_and_share_what_else_a_model_holds():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.data, self.small = torch.zeros(2**20), torch.zeros(3)
            self.seen, self.layers, self.lock = {"kept": []}, [self.body], threading.Lock()
            self.body.register_forward_hook(self.keep)

        def keep(self, module, args, output):
            self.seen["kept"].append(output)

        def forward(self, x):
            return self.layers[0](x)

    model = Holds().double()
    maml = SharpMAML(model, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="none")
    copied, loss = trial._copies(maml.loop, Tensor.double)
    copied(torch.ones(1, 2).double())
    assert loss is F.mse_loss
    assert copied.layers[0] is copied.body is not model.body
    assert (len(copied.seen["kept"]), len(model.seen["kept"])) == (1, 0)
    assert copied.data is model.data
    assert copied.lock is model.lock
    assert copied.small is not model.small
    assert copied.body.weight is model.body.weight


def test_a_forward_that_takes_derivatives_goes_where_it_can():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.requires_grad_()
                return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 3).double(), torch.randn(4, 6, 3).double()
    losses = []
    for engine in ("auto", "higher"):
        torch.manual_seed(1)
        maml = SharpMAML(Force().double(), F.mse_loss, inner_lr=0.1, inner_steps=2, engine=engine, variant="none")
        losses.append(maml.meta_loss(Task((x, y), (x, y))))
    assert torch.allclose(*losses, rtol=1e-12)


def test_a_compiled_model_is_tried_as_it_is():
    torch.manual_seed(0)
    calls = []

    class Notes(nn.Module):
        def forward(self, x):
            calls.append((self, x.dtype))
            return x

    class Compiled(nn.Module):
        """What torch.compile makes of a model, but for compiling it."""

        def __init__(self, model):
            super().__init__()
            self._orig_mod = model

        def forward(self, x):
            return self._orig_mod(x)

    notes = Notes()
    model = Compiled(nn.Sequential(nn.Linear(3, 8), notes, nn.Linear(8, 1)))
    maml = SharpMAML(model, F.mse_loss, inner_lr=0.1, inner_steps=1, variant="none")
    maml.meta_loss(Task((torch.randn(2, 4, 3), torch.randn(2, 4, 1)), (torch.randn(2, 4, 3), torch.randn(2, 4, 1))))
    assert maml.engine_used == "vmap"
    assert {(id(m), dtype) for m, dtype in calls} == {(id(notes), torch.float32)}


class Quiet(nn.Module):
    """In place through a view: a small change of what it is called with, lost where the view is a copy."""

    def forward(self, x):
        x.view(len(x), -1).mul_(0.9999)
        return x


@pytest.mark.parametrize("of", ["frozen statistics", "statistics of every step", "a buffer", "weights of a loss"])
def test_buffers_of_one_precision_do_not_keep_a_trial_from_double(of):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.eye(16).reshape(16, 16, 1, 1) * 1.5)

        def forward(self, x):
            return F.conv2d(x, self.matrix)

    torch.manual_seed(0)
    norm = Scaled() if of == "a buffer" else nn.BatchNorm2d(16)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, Quiet(), nn.Flatten(), nn.Linear(1024, 3))
    loss_fn = nn.CrossEntropyLoss(torch.ones(3)) if of == "weights of a loss" else F.cross_entropy
    policy = {"frozen statistics": "frozen", "statistics of every step": "per_step"}.get(of, "batch")
    maml = SharpMAML(
        model, loss_fn, inner_lr=0.1, inner_steps=2, engine="higher", variant="none", workers=1, batchnorm=policy
    )
    x, y = torch.randn(3, 6, 3, 8, 8), torch.arange(3).repeat(2).expand(3, -1)
    maml.meta_loss(Task((x, y), (x.flip(1), y)))
    assert not maml._kernels  # in float32 a hundredth of a percent would pass for rounding
    assert "something else for images whose channels lie last" in maml.engine_reason, maml.engine_reason
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
