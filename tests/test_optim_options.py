"""What the live optimizer takes beside a rule: noise replayed, clipping, accumulation, sparse gradients, compiling."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from metasam import ESAM, SAM, AgnosticSAM, SharpnessAware, rules
from metasam.optim import named
from metasam.rules import Agnostic, DirectionRule, Lookbehind, Sharp, VaSSO

from .cases import CONV, MLP, Problem, assert_same, closures_of, distance, each_rule, params_of

SGD = torch.optim.SGD
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
BASES = {"momentum": MOMENTUM, "adamw": ADAMW}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)

NOISY = Problem("noisy", lambda: nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1)))


# options of every method


@pytest.mark.parametrize("kind", named.Named.__subclasses__(), ids=lambda k: k.__name__)
def test_every_named_method_takes_every_option(kind):
    options = {"clip": 0.25, "same_noise": True}
    model = MLP.model()
    optimizer = kind(model.named_parameters(), lr=0.1, **options)
    other = pickle.loads(pickle.dumps(optimizer))
    for o in (optimizer, other, copy.deepcopy(optimizer)):
        assert {k: getattr(o, k) for k in options} == options
    assert len(named.Named.__subclasses__()) == 16


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(clip):
    with pytest.raises(ValueError, match="expected clip > 0"):
        SAM(MLP.model().parameters(), lr=0.1, clip=clip)


# the same dropout masks


def noting(closures, losses):
    """The closures, with their losses written down by the batch they are of."""

    def of(name, closure):
        def noted():
            loss = closure()
            losses.setdefault(name, []).append(loss.item())
            return loss

        return noted

    return {k: of(k, c) for k, c in closures.items()}


@each_rule
@pytest.mark.parametrize("same", [True, False])
def test_passes_of_a_step_differ_by_the_weights_alone(case, same):
    """At radius 0 they do not differ at all."""
    torch.manual_seed(0)
    if case.name in ("lookbehind", "lookbehind-adaptive", "random"):
        pytest.skip("moves at radius 0 as well")
    model, losses = NOISY.model(), {}
    optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.at_radius(0.0), model=model, same_noise=same)
    firsts = []
    for _ in range(3):
        losses.clear()
        optimizer.step(**noting(closures_of(NOISY, model), losses))
        for seen in losses.values():
            assert (len(set(seen)) == 1) == (same or len(seen) == 1)
        firsts.append(losses["closure"][0])
    assert len(set(firsts)) == 3


def test_same_noise_is_the_loop_that_resets_the_generator():
    ours, theirs = NOISY.model(), NOISY.model()
    optimizer = SAM(MOMENTUM(ours.parameters()), rho=0.3, same_noise=True)
    other, (x, y) = MOMENTUM(theirs.parameters()), NOISY.batch()
    params = list(theirs.parameters())
    torch.manual_seed(4)
    for _ in range(4):
        optimizer.step(closures_of(NOISY, ours)["closure"])
    left = torch.get_rng_state()
    torch.manual_seed(4)
    for _ in range(4):
        start = torch.get_rng_state()
        grads = torch.autograd.grad(NOISY.loss_fn(theirs(x), y), params)
        after, home = torch.get_rng_state(), [p.detach().clone() for p in params]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.add_(0.3 * g / norm)
        torch.set_rng_state(start)
        grads = torch.autograd.grad(NOISY.loss_fn(theirs(x), y), params)
        torch.set_rng_state(after)
        with torch.no_grad():
            for p, g, w in zip(params, grads, home, strict=True):
                p.copy_(w)
                p.grad = g
        other.step()
    assert torch.equal(left, torch.get_rng_state())
    assert distance(params_of(ours), params_of(theirs)) < 1e-13


def test_the_generator_ends_where_the_first_pass_of_each_batch_left_it():
    model = NOISY.model()
    optimizer, closures = AgnosticSAM(model.parameters(), lr=0.1, same_noise=True), closures_of(NOISY, model)
    torch.manual_seed(4)
    optimizer.step(**closures)
    found = torch.rand(3)
    torch.manual_seed(4)
    model(NOISY.batch()[0])
    model(NOISY.batch()[0])
    assert torch.equal(found, torch.rand(3))


def test_an_exception_leaves_the_generator_where_the_first_pass_left_it():
    model, calls = NOISY.model(), itertools.count()
    closure = closures_of(NOISY, model)["closure"]

    def failing():
        if next(calls) == 1:
            raise KeyboardInterrupt
        return closure()

    torch.manual_seed(4)
    with pytest.raises(KeyboardInterrupt):
        SAM(model.parameters(), lr=0.1, same_noise=True).step(failing)
    found = torch.rand(3)
    torch.manual_seed(4)
    model(NOISY.batch()[0])
    assert torch.equal(found, torch.rand(3))


def part_masks(make):
    """The dropout masks that each evaluation drew, by its part."""
    model, masks = NOISY.model(), []
    model[1].register_forward_hook(lambda m, args, out: masks.append(out.detach() != 0))
    x, y = NOISY.batch()

    def closure(part=None):
        index = slice(None) if part is None else part
        return (model(x[index]) - y[index]).square().mean(1)

    torch.manual_seed(4)
    make(model.parameters(), lr=0.1, same_noise=True).step(closure)
    return masks


def test_parts_have_masks_of_their_own_and_keep_them():
    whole, *shards = part_masks(partial(SAM, m=2))
    assert [len(whole), *map(len, shards)] == [5, 2, 2, 2, 2, 1, 1]
    for climb, descent in zip(shards[::2], shards[1::2], strict=True):
        assert torch.equal(climb, descent)
    assert not torch.equal(shards[0], shards[2])
    assert not torch.equal(shards[0], whole[:2])


def test_a_choice_of_examples_may_be_a_part():
    first, second, chosen = part_masks(partial(ESAM, select=0.5))
    assert torch.equal(first, second)
    assert len(chosen) == 3


def test_generators_of_other_devices_are_replayed_once_they_are_in_use(monkeypatch):
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in generators])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda s: [g.set_state(t) for g, t in zip(generators, s, strict=True)]
    )
    w, drawn = nn.Parameter(torch.ones(3)), []

    def closure():
        drawn.append([torch.rand(2, generator=g) for g in generators])
        loss = w.square().sum()
        loss.backward()
        return loss

    optimizer = SAM([w], lr=0.1, same_noise=True)
    optimizer.step(closure)
    optimizer.step(closure)
    for g in range(2):
        assert torch.equal(drawn[0][g], drawn[1][g])
        assert torch.equal(drawn[2][g], drawn[3][g])
        expected = torch.rand(4, generator=torch.Generator().manual_seed(g))
        assert torch.equal(torch.cat([drawn[0][g], drawn[2][g]]), expected)


@each_rule
def test_a_resumed_run_with_noise_continues_bit_for_bit(case):
    def make():
        model = NOISY.model()
        return model, SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model, same_noise=True, clip=0.5)

    def walk(model, optimizer):
        for _ in range(3):
            optimizer.step(**closures_of(NOISY, model))

    torch.manual_seed(4)
    model, optimizer = make()
    walk(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
    walk(model, optimizer)
    file.seek(0)
    weights, memory, generator = torch.load(file, weights_only=True)
    twin, other = make()
    twin.load_state_dict(weights)
    other.load_state_dict(memory)
    torch.set_rng_state(generator)
    walk(twin, other)
    assert_same(params_of(twin), params_of(model))


# clipping


def clipping(kind):
    """A base optimizer that clips just before it steps, as a loop written by hand does."""

    class Clipping(kind):
        limit, clips = 0.0, 0

        def step(self, closure=None):
            params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            for p in params:
                p.grad = p.grad.clone()  # a rule may remember what it handed out
            self.clips += bool(nn.utils.clip_grad_norm_(params, self.limit) > self.limit)
            super().step(closure)

    return Clipping


@each_rule
@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_clip_is_clip_grad_norm_just_before_the_base_steps_to_the_last_bit(case, kind, dtype, limit):
    ours, theirs = MLP.model(dtype), MLP.model(dtype)
    settings = {"lr": 0.1, "momentum": 0.9} if kind is SGD else {"lr": 0.02}
    base = clipping(kind)(theirs.parameters(), **settings)
    base.limit = limit
    optimizer = SharpnessAware(kind(ours.parameters(), **settings), case.rule, model=ours, clip=limit)
    other = SharpnessAware(base, case.rule, model=theirs)
    for _ in range(4):
        optimizer.step(**closures_of(MLP, ours))
        other.step(**closures_of(MLP, theirs))
        assert_same(params_of(ours), params_of(theirs))
    assert bool(base.clips) == (limit < 1)


@each_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ascent_is_not_clipped(base, dtype):
    ours, theirs = MLP.model(dtype), MLP.model(dtype)
    # the length of USAM's ascent is that of the gradient
    optimizer = SAM(base(ours.parameters()), rho=0.3, normalise=False, clip=0.05)
    other, (x, y) = base(theirs.parameters()), MLP.batch(dtype)
    params = list(theirs.parameters())
    for _ in range(4):
        optimizer.step(closures_of(MLP, ours)["closure"])
        grads = torch.autograd.grad(MLP.loss_fn(theirs(x), y), params)
        home = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.add_(0.3 * g)
        grads = torch.autograd.grad(MLP.loss_fn(theirs(x), y), params)
        with torch.no_grad():
            for p, g, w in zip(params, grads, home, strict=True):
                p.copy_(w)
                p.grad = g
        assert nn.utils.clip_grad_norm_(params, 0.05) > 0.05
        other.step()
        assert_same(params_of(ours), params_of(theirs))


def test_the_gradients_left_behind_are_clipped_and_what_the_rule_remembers_is_not():
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = SharpnessAware(SGD(model.parameters(), lr=0.1), VaSSO(0.1), model=model, clip=1e-3)
    grads = dict(zip(params_of(model), torch.autograd.grad(MLP.loss_fn(model(x), y), model.parameters()), strict=True))
    optimizer.step(closures_of(MLP, model)["closure"])
    assert distance(optimizer.rule_state["d"], grads) < 1e-14
    left = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert abs(float(left) - 1e-3) < 1e-5  # clip_grad_norm_ adds 1e-6 to the norm


@dataclass(frozen=True)
class Remembers(DirectionRule):
    """Hands out what it remembers."""

    def direction(self, at, params, state):
        grads = at().grads
        return grads, {"g": grads}


def test_what_a_rule_hands_out_is_not_clipped_in_place():
    model, (x, y) = MLP.model(), MLP.batch()
    wanted = torch.autograd.grad(MLP.loss_fn(model(x), y), model.parameters())
    optimizer = SharpnessAware(SGD(model.parameters(), lr=0.1), Remembers(), model=model, clip=1e-3)
    optimizer.step(closures_of(MLP, model)["closure"])
    assert_same(optimizer.rule_state["g"], dict(zip(params_of(model), wanted, strict=True)))


def test_clipping_nothing_is_fine():
    model = MLP.model()
    with pytest.warns(UserWarning, match=r"did it call loss\.backward\(\)"):
        SAM(model.parameters(), lr=0.1, clip=1.0).step(lambda: None)
    assert_same(params_of(model), params_of(MLP.model()))


def test_clip_sees_unscaled_gradients():
    def run(scaler):
        model = MLP.model()
        optimizer = SAM(MOMENTUM(model.parameters()), rho=0.2, clip=0.05)
        x, y = MLP.batch()

        def closure():
            loss = MLP.loss_fn(model(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        for _ in range(3):
            optimizer.step(closure, scaler=scaler)
            if scaler is not None:
                scaler.update()
        return params_of(model)

    assert_same(run(torch.amp.GradScaler("cpu", init_scale=2.0**12)), run(None))


# accumulation

MICRO = [slice(0, 2), slice(2, 3), slice(3, 5)]


def accumulating(problem, model):
    """Closures that go through micro-batches of unequal size, weighted by it."""
    dtype = next(model.parameters()).dtype

    def of(batch):
        def closure():
            model.zero_grad()
            total = 0.0
            for part in MICRO:
                x, y = batch[0][part], batch[1][part]
                loss = problem.loss_fn(model(x), y) * (len(x) / len(batch[0]))
                loss.backward()
                total += loss.item()
            return total

        return closure

    return {"closure": of(problem.batch(dtype)), "val": of(problem.batch(dtype, seed=7))}


@each_rule
@each_base
def test_micro_batches_in_a_closure_equal_the_whole_batch(case, base):
    ours, theirs = MLP.model(), MLP.model()
    optimizer = SharpnessAware(base(ours.parameters()), case.rule, model=ours)
    other = SharpnessAware(base(theirs.parameters()), case.rule, model=theirs)
    for _ in range(4):
        found = optimizer.step(**accumulating(MLP, ours))
        wanted = other.step(**closures_of(MLP, theirs))
        assert abs(found - float(wanted)) < 1e-12
    assert distance(params_of(ours), params_of(theirs)) < 1e-11


def test_batchnorm_counts_every_micro_batch_once():
    ours, theirs = CONV.model(), CONV.model()
    SAM(ours.parameters(), lr=0.1, rho=0.3, model=ours).step(accumulating(CONV, ours)["closure"])
    for part in MICRO:
        theirs(CONV.batch()[0][part])
    found, wanted = (dict(m.named_buffers()) for m in (ours, theirs))
    assert_same(found, wanted)
    assert int(found["1.num_batches_tracked"]) == 3


# sparse gradients


class Words(nn.Module):
    """Two embeddings under a loss that curves; row 7 is never looked up."""

    def __init__(self, sparse, head=True):
        super().__init__()
        self.words, self.bag = nn.Embedding(8, 3, sparse=sparse), nn.EmbeddingBag(8, 3, sparse=sparse, mode="sum")
        self.head = nn.Linear(3, 1) if head else None

    def forward(self, x):
        h = (self.words(x).tanh().sum(1) + self.bag(x)).tanh()
        return h.sum(1, keepdim=True) if self.head is None else self.head(h)


def of_words(sparse, head=True):
    torch.manual_seed(3)
    return Words(sparse, head).double()


def word_closures(model):
    generator = torch.Generator().manual_seed(5)

    def of(rows):
        y = torch.randn(3, 1, generator=generator, dtype=torch.float64)
        x = torch.tensor(rows)

        def closure():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return closure

    # in turns, so that a step meets rows that the one before it did not
    vals = {"val": of([[0, 3], [4, 4], [1, 6]])}
    return [{"closure": of([[0, 2], [2, 5], [2, 2]]), **vals}, {"closure": of([[1, 2], [6, 0], [3, 3]]), **vals}]


def walk_words(model, base, rule, steps=4, **options):
    optimizer = SharpnessAware(base(model.parameters()), rule, model=model, **options)
    for _, closures in zip(range(steps), itertools.cycle(word_closures(model)), strict=False):
        optimizer.step(**closures)
    return optimizer


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad's own
@each_rule
@pytest.mark.parametrize(
    "base",
    [partial(SGD, lr=0.1), MOMENTUM, partial(torch.optim.Adagrad, lr=0.05)],
    ids=["sgd", "momentum", "adagrad"],
)
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=str)
def test_sparse_gradients_equal_dense_ones(case, base, options):
    if case.name == "momentum" and base is not MOMENTUM:
        pytest.skip("MomentumSAM needs momentum")
    found, wanted = of_words(True), of_words(False)
    optimizer = walk_words(found, base, case.rule, **options)
    walk_words(wanted, base, case.rule, **options)
    # Adagrad divides in another order where it is sparse
    assert distance(params_of(found), params_of(wanted)) <= (1e-14 if "eps" in optimizer.param_groups[0] else 0)
    assert distance(params_of(found), params_of(of_words(True))) > 1e-3


class Rows(torch.optim.SparseAdam):
    """Told of dense gradients: steps on their rows that are not zero."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.to_sparse(1)
        super().step(closure)


@each_rule
def test_sparse_adam_steps_on_the_rows_that_were_touched(case):
    found, wanted = of_words(True, head=False), of_words(False, head=False)
    walk_words(found, partial(torch.optim.SparseAdam, lr=0.05), case.rule)
    walk_words(wanted, partial(Rows, lr=0.05), case.rule)
    assert_same(params_of(found), params_of(wanted))
    start = params_of(of_words(True, head=False))
    moved = (found.words.weight != start["words.weight"]).any(1)
    assert moved.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5, 6]  # row 4 is validation's


def test_sam_on_sparse_adam_is_the_two_pass_loop():
    ours, theirs = of_words(True, head=False), of_words(True, head=False)
    walk_words(ours, partial(torch.optim.SparseAdam, lr=0.05), Sharp(0.3), steps=6)
    other = torch.optim.SparseAdam(theirs.parameters(), lr=0.05)
    params = list(theirs.parameters())
    for _, closures in zip(range(6), itertools.cycle(word_closures(theirs)), strict=False):
        theirs.zero_grad()
        closures["closure"]()
        norm = torch.cat([p.grad.to_dense().flatten() for p in params]).norm()
        home = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p in params:
                p.add_(p.grad.to_dense() * (0.3 / norm))
        theirs.zero_grad()
        closures["closure"]()
        with torch.no_grad():
            for p, w in zip(params, home, strict=True):
                p.copy_(w)
        other.step()
    assert distance(params_of(ours), params_of(theirs)) < 1e-13


def test_gradients_left_behind_are_as_sparse_as_they_came():
    model = of_words(True)
    walk_words(model, MOMENTUM, Sharp(0.1), steps=1)
    assert model.words.weight.grad.is_sparse
    assert model.words.weight.grad.coalesce().indices().tolist() == [[0, 2, 5]]
    assert not model.head.weight.grad.is_sparse


def test_sparse_gradients_are_unscaled():
    def run(scaler):
        model = of_words(True)
        optimizer, x = SAM(MOMENTUM(model.parameters()), rho=0.3), torch.tensor([[0, 2], [2, 5], [2, 2]])

        def closure():
            loss = model(x).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        for _ in range(3):
            optimizer.step(closure, scaler=scaler)
            if scaler is not None:
                scaler.update()
        return params_of(model)

    assert_same(run(torch.amp.GradScaler("cpu", init_scale=2.0**12)), run(None))


@pytest.mark.parametrize("rule", [Sharp(), Lookbehind()], ids=["direction", "own descent"])
@pytest.mark.parametrize(
    "base", [partial(torch.optim.Adam, lr=0.1), partial(SGD, lr=0.1, weight_decay=0.1)], ids=["adam", "decay"]
)
def test_a_base_that_takes_no_sparse_gradients_names_the_parameters_and_the_way_out(base, rule):
    model = of_words(True)
    with pytest.raises(RuntimeError, match=r"words\.weight, bag\.weight.*SparseAdam or SGD.*sparse=False"):
        walk_words(model, base, rule)
    assert_same(params_of(model), params_of(of_words(True)))


# compiled models


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize(
    ("problem", "rule", "how"),
    [
        (MLP, Sharp(0.3), "module"),
        *[(CONV, Sharp(0.3), how) for how in ("module", "compiled", "nothing", "in place", "in place, nothing")],
        *[(CONV, rule, "module") for rule in (rules.GSAM(0.3), Lookbehind(0.3), Agnostic(0.3, 0.2))],
    ],
    ids=lambda v: getattr(v, "name", v if isinstance(v, str) else type(v).__name__),
)
def test_compiled_models_take_the_steps_of_eager_ones_to_the_last_bit(problem, rule, how):
    torch.compiler.reset()
    ours, theirs = problem.model(), problem.model()
    if "place" in how:
        ours.compile(backend="aot_eager")
        compiled = ours
    else:
        compiled = torch.compile(ours, backend="aot_eager")
    given = {"compiled": compiled, "module": ours, "in place": ours}.get(how)
    optimizer = SharpnessAware(MOMENTUM(ours.parameters()), rule, model=given)
    other = SharpnessAware(MOMENTUM(theirs.parameters()), rule, model=theirs)
    for _ in range(3):
        optimizer.step(**closures_of(problem, compiled))
        other.step(**closures_of(problem, theirs))
    assert_same(ours.state_dict(), theirs.state_dict())
