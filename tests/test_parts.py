"""Parts of a batch on live weights, rules that need them, and the draws of rules that need chance."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch

from metasam import ESAM, RWP, SAM, RandomSAM, SharpMAML, SharpnessAware, SparseSAM, inner, noise, rules
from metasam.rules import Plain, Sharp

from . import references
from .cases import (
    CONV,
    ENGINES,
    MLP,
    RULES,
    assert_same,
    closure_of,
    distance,
    each_engine,
    gradients,
    inner_loop,
    params_of,
    run_engine,
)

SGD = torch.optim.SGD
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
each_base = pytest.mark.parametrize("base", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
INDEX = 7


def batch_of(problem, size, dtype=torch.float64):
    return tuple(t.flatten(0, 1)[:size] for t in problem.tasks(math.ceil(size / 5), dtype).support)


def each_loss(problem, model, x, y):
    if problem.classes is None:
        return (model(x) - y).square().flatten(1).mean(1)
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def parts_of(problem, model, batch, asked=None):
    """A closure of the second form, which notes what it was asked for."""

    def closure(part=None):
        if asked is not None:
            asked.append(part)
        x, y = batch if part is None else (batch[0][part], batch[1][part])
        return each_loss(problem, model, x, y)

    return closure


def walk(make, base, size=INDEX, steps=4, problem=MLP, dtype=torch.float64):
    """Some steps on closures that take parts: where they lead, the losses that they return, and the optimizer."""
    model = problem.model(dtype)
    optimizer = make(base(model.parameters()), model=model)
    closure = parts_of(problem, model, batch_of(problem, size, dtype))
    losses = [optimizer.step(closure) for _ in range(steps)]
    return params_of(model), losses, optimizer


def transcribed(step, base, size=INDEX, steps=4):
    """The same by a plain loop: ``step(grad, losses, w, n)`` is the gradient to descend along."""
    model, (x, y) = MLP.model(), batch_of(MLP, size)
    other, optimizer = MLP.model(), base(model.parameters())

    def grad(w, part=slice(None)):
        return references.gradient_of(other, MLP.loss_fn, x[part], y[part])(w)

    def losses(w):
        return (references.call(other, w, x) - y).square().mean(1)

    for n in range(steps):
        found = step(grad, losses, params_of(model), n)
        for k, p in model.named_parameters():
            p.grad = found[k]
        optimizer.step()
    return params_of(model)


# closures that return the losses of examples


@each_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", [Plain(), Sharp(0.2), rules.WSAM(0.2), rules.Lookbehind(0.2)], ids=repr)
def test_losses_of_examples_equal_their_mean_to_the_last_bit(rule, dtype, base):
    wanted = MLP.model(dtype)
    optimizer, batch = SharpnessAware(base(wanted.parameters()), rule, model=wanted), batch_of(MLP, INDEX, dtype)

    def closure():
        optimizer.zero_grad()
        loss = each_loss(MLP, wanted, *batch).mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(4)]
    found, given, _ = walk(lambda b, model: SharpnessAware(b, rule, model=model), base, dtype=dtype)
    assert_same(found, params_of(wanted))
    assert given == losses
    assert not any(loss.requires_grad for loss in given)


@pytest.mark.parametrize(
    "make",
    [partial(SAM, m=2), partial(ESAM, select=0.5), partial(SparseSAM, samples=2)],
    ids=["m-sam", "esam", "sparse"],
)
def test_a_closure_without_parts_is_told_what_to_write(make):
    model = MLP.model()
    optimizer, home = make(model.parameters(), lr=0.1, model=model), params_of(model)
    (x, y), said = MLP.batch(), r"closure\(part=None\) that returns the losses \[B\]"
    for closure in (closure_of(MLP, model, MLP.batch()), lambda: each_loss(MLP, model, x, y)):
        with pytest.raises(TypeError, match=said):
            optimizer.step(closure)
        assert_same(params_of(model), home)
        assert optimizer.skipped == 0


@pytest.mark.parametrize("rule", [Sharp(0.2), Sharp(0.2, m=2)], ids=["sam", "m-sam"])
def test_losses_of_more_than_one_dimension_are_refused(rule):
    model = MLP.model()
    optimizer, (x, y) = SharpnessAware(SGD(model.parameters(), 0.1), rule), MLP.batch()
    with pytest.raises(TypeError, match=r"losses \[B\], got shape \[5, 2\]"):
        optimizer.step(lambda part=None: (model(x) - y).square().expand(-1, 2))


def test_inner_loops_have_no_losses_of_examples_to_give():
    for rule in (Sharp(0.1, m=2), rules.ESAM(), rules.SparseSAM()):
        for engine in ENGINES:
            with pytest.raises(TypeError, match="inner loops have none to give"):
                run_engine(engine, inner_loop(MLP.model(), MLP, rule), MLP.tasks(2))


# m-SAM


def in_shards(m, rho, grad, losses, w, n):
    """m-SAM by a plain loop over shards."""
    size = len(losses(w))
    total = {k: torch.zeros_like(v) for k, v in w.items()}
    for start in range(0, size, m):
        shard = range(size)[start : start + m]
        part = list(shard)
        g = grad(references.plus(w, references.unit(grad(w, part)), rho), part)
        total = references.plus(total, g, len(shard) / size)
    return total


@each_base
@pytest.mark.parametrize(("m", "size"), [(4, 8), (4, 7), (3, 7), (1, 5), (2, 3)])
def test_m_sam_is_a_plain_loop_over_shards(m, size, base):
    found, losses, _ = walk(partial(SAM, rho=0.2, m=m), base, size)
    assert distance(found, transcribed(partial(in_shards, m, 0.2), base, size)) < 1e-12
    model, (x, y) = MLP.model(), batch_of(MLP, size)
    torch.testing.assert_close(losses[0], MLP.loss_fn(model(x), y).detach(), rtol=1e-14, atol=0)


@each_base
@pytest.mark.parametrize("m", [INDEX, INDEX + 1, 100])
def test_one_shard_is_sam(m, base):
    assert distance(walk(partial(SAM, rho=0.2, m=m), base)[0], walk(partial(SAM, rho=0.2), base)[0]) < 1e-14


def test_m_sam_differs_from_sam_and_takes_several_ascent_steps_too():
    found = walk(partial(SAM, rho=0.2, m=3, steps=2), MOMENTUM)[0]

    def step(grad, losses, w, n):
        total = {k: torch.zeros_like(v) for k, v in w.items()}
        for part in ([0, 1, 2], [3, 4, 5], [6]):
            eps = references.unit(grad(w, part))
            eps = {k: 0.1 * v for k, v in eps.items()}
            eps = references.plus(eps, references.unit(grad(references.plus(w, eps), part)), 0.1)
            total = references.plus(total, grad(references.plus(w, eps), part), len(part) / 7)
        return total

    assert distance(found, transcribed(step, MOMENTUM)) < 1e-12
    assert distance(found, walk(partial(SAM, rho=0.2, steps=2), MOMENTUM)[0]) > 1e-4


@pytest.mark.parametrize(
    "make",
    [partial(SAM, m=2), partial(SAM, m=1), partial(ESAM, select=0.5), partial(SparseSAM, samples=3)],
    ids=["m-sam", "1-sam", "esam", "sparse"],
)
@pytest.mark.parametrize("named", [True, False])
def test_batch_norm_counts_the_whole_batch_once(make, named):
    model, wanted, batch = CONV.model(), CONV.model(), CONV.batch()
    # one example is no batch to normalise over: CONV's maps have 4 places each
    optimizer = make(model.parameters(), lr=0.0, model=model if named else None)
    for _ in range(2):
        optimizer.step(parts_of(CONV, model, batch))
        wanted(batch[0])
    assert model[1].num_batches_tracked == 2
    assert distance(dict(model[1].named_buffers()), dict(wanted[1].named_buffers())) < 1e-14


def test_a_spoiled_shard_skips_the_step():
    model = MLP.model()
    optimizer, batch = SAM(model.parameters(), lr=0.1, m=2, model=model), batch_of(MLP, INDEX)
    home, asked = params_of(model), []

    def closure(part=None):
        asked.append(part)
        losses = parts_of(MLP, model, batch)(part)
        return losses * float("nan") if len(asked) == 5 else losses

    optimizer.step(closure)
    assert optimizer.skipped == 1
    assert len(asked) == 1 + 2 * 4
    assert_same(params_of(model), home)


# ESAM


def selected(rho, beta, gamma, seed, grad, losses, w, n):
    """ESAM by its equations; the mask is the n-th draw."""
    g = references.unit(grad(w))
    z = noise.normal(g, seed, n)
    eps = {k: rho / beta * (torch.special.ndtr(z[k]) < beta).to(v) * v for k, v in g.items()}
    point = references.plus(w, eps)
    rise = losses(point) - losses(w)
    number = math.ceil(gamma * len(rise))
    chosen = sorted(range(len(rise)), key=lambda i: -float(rise[i]))[:number]
    return grad(point, chosen)


@each_base
@pytest.mark.parametrize(("beta", "gamma"), [(0.6, 0.5), (1.0, 0.3), (0.3, 1.0), (0.5, 0.01)])
def test_esam_is_its_equations(beta, gamma, base):
    found = walk(partial(ESAM, rho=0.2, keep=beta, select=gamma, noise_seed=3), base)[0]
    assert distance(found, transcribed(partial(selected, 0.2, beta, gamma, 3), base)) < 1e-12


def test_esam_asks_for_the_examples_whose_loss_rose_most():
    model, batch, asked = MLP.model(), batch_of(MLP, INDEX), []
    ESAM(model.parameters(), lr=0.1, rho=0.5, keep=1.0, select=0.5).step(parts_of(MLP, model, batch, asked))
    other, w = MLP.model(), params_of(MLP.model())
    g = references.gradient_of(other, MLP.loss_fn, *batch)(w)
    before, after = (
        (references.call(other, at, batch[0]) - batch[1]).square().mean(1)
        for at in (w, references.plus(w, references.unit(g), 0.5))
    )
    assert asked[:2] == [None, None]
    assert len(asked) == 3
    wanted = (after - before).argsort(descending=True)[:4]
    assert set(asked[2].tolist()) == set(wanted.tolist())


@each_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_esam_of_everything_is_sam_to_the_last_bit(dtype, base):
    make = partial(ESAM, rho=0.2, keep=1.0, select=1.0)
    assert_same(walk(make, base, dtype=dtype)[0], walk(partial(SAM, rho=0.2), base, dtype=dtype)[0])


def test_esam_without_a_radius_descends_on_the_selected_examples():
    # nothing rises: which are selected is up to topk, the number is not
    model, asked = MLP.model(), []
    optimizer, batch = ESAM(model.parameters(), lr=0.1, rho=0.0, select=0.4), batch_of(MLP, INDEX)
    optimizer.step(parts_of(MLP, model, batch, asked))
    part, w = asked[-1], params_of(MLP.model())
    assert len(part) == 3
    g = references.gradient_of(MLP.model(), MLP.loss_fn, batch[0][part], batch[1][part])(w)
    assert distance(params_of(model), references.plus(w, g, -0.1)) < 1e-14


def test_the_share_of_weights_that_esam_moves_is_keep():
    eps = {"w": torch.zeros(100_000)}
    mask = torch.special.ndtr(noise.normal(eps, 0, 0)["w"]) < 0.6
    assert float(mask.float().mean()) == pytest.approx(0.6, abs=0.01)


# sparse SAM


def total(tree):
    return sum(float(v.sum()) for v in tree.values())


@each_base
@pytest.mark.parametrize("samples", [3, 100])
def test_sparse_sam_sums_the_squared_gradients_of_single_examples(samples, base):
    kept = {}

    def step(grad, losses, w, n):
        g = grad(w)
        if n % 2 == 0:
            information = {k: torch.zeros_like(v) for k, v in w.items()}
            for i in range(min(samples, INDEX)):
                information = references.plus(information, {k: v**2 for k, v in grad(w, [i]).items()})
            kept["mask"] = references.ones_at(information, round(0.3 * 21))
        return grad(references.plus(w, {k: kept["mask"][k] * v for k, v in references.unit(g).items()}, 0.2))

    make = partial(SparseSAM, rho=0.2, sparsity=0.7, refresh=2, samples=samples)
    found, _, optimizer = walk(make, base)
    assert distance(found, transcribed(step, base)) < 1e-12
    assert_same(optimizer.rule_state["mask"], kept["mask"])


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.35, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("settings", [{"samples": 2}, {"samples": 0}, {"criterion": "dynamic"}], ids=str)
def test_a_mask_has_as_many_ones_as_asked(settings, sparsity):
    make = partial(SparseSAM, rho=0.2, sparsity=sparsity, refresh=1, drop=0.9, horizon=10, **settings)
    for steps in (1, 2, 5):
        mask = walk(make, MOMENTUM, steps=steps)[2].rule_state["mask"]
        assert total(mask) == round((1 - sparsity) * 21)
        assert {float(x) for v in mask.values() for x in v.flatten()} <= {0.0, 1.0}


@each_base
@pytest.mark.parametrize("settings", [{"samples": 2}, {"samples": 0}, {"criterion": "dynamic"}], ids=str)
def test_sparse_sam_that_is_not_sparse_is_sam_to_the_last_bit(settings, base):
    make = partial(SparseSAM, rho=0.2, sparsity=0.0, refresh=2, **settings)
    assert_same(walk(make, base)[0], walk(partial(SAM, rho=0.2), base)[0])


def test_dynamic_masks_change_by_a_share_that_a_cosine_takes_to_nothing():
    model, batch = MLP.model(), batch_of(MLP, INDEX)
    optimizer = SparseSAM(
        model.parameters(), lr=0.01, sparsity=0.5, criterion="dynamic", refresh=1, drop=0.8, horizon=8
    )
    masks = []
    for _ in range(12):
        optimizer.step(parts_of(MLP, model, batch))
        masks.append(torch.cat([v.flatten() for v in optimizer.rule_state["mask"].values()]))
    moved = [int((a - b).clamp(min=0).sum()) for a, b in itertools.pairwise(masks)]
    ones = round(0.5 * 21)
    wanted = [min(int(0.4 * (1 + math.cos(math.pi * min(t / 8, 1.0))) * ones), 21 - ones) for t in range(1, 12)]
    assert moved == wanted
    assert wanted[0] > wanted[3] > 0
    assert wanted[7:] == [0] * 4


def test_a_dynamic_mask_outlives_parameters_that_freeze_and_thaw():
    model, batch = MLP.model(), batch_of(MLP, INDEX)
    optimizer = SparseSAM(
        model.parameters(), lr=0.1, sparsity=0.5, criterion="dynamic", refresh=1, drop=0.9, model=model
    )
    for frozen in (False, True, True, False, True, False, False):
        model[0].requires_grad_(not frozen)
        optimizer.step(parts_of(MLP, model, batch))
        mask = optimizer.rule_state["mask"]
        assert total(mask) == round(0.5 * (5 if frozen else 21))
        assert {float(x) for v in mask.values() for x in v.flatten()} <= {0.0, 1.0}


# chance

RANDOM = [c for c in RULES if hasattr(c.rule, "noise_seed") and c.name != "sparse"]
each_random_rule = pytest.mark.parametrize("case", RANDOM, ids=lambda c: c.name)


def live_walk(rule, steps=3, seed=None, problem=MLP):
    model = problem.model()
    if seed is not None:
        rule = dataclasses.replace(rule, noise_seed=seed)
    optimizer = SharpnessAware(SGD(model.parameters(), 0.1), rule, model=model)
    torch.manual_seed(torch.randint(1000, ()).item())  # whose state is no part of the draws
    for _ in range(steps):
        optimizer.step(closure_of(problem, model, problem.batch()))
    return params_of(model)


@each_random_rule
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(case):
    state = torch.get_rng_state()
    assert_same(live_walk(case.rule), live_walk(case.rule))
    assert distance(live_walk(case.rule, seed=6), live_walk(case.rule)) > 1e-6
    torch.set_rng_state(state)
    model = MLP.model()
    optimizer = SharpnessAware(SGD(model.parameters(), 0.1), case.rule, model=model)
    optimizer.step(closure_of(MLP, model, MLP.batch()))
    assert torch.equal(torch.get_rng_state(), state), "a draw moved the global generator"


class Noting(rules.DirectionRule):
    """Plain, and notes its draws."""

    def __init__(self, seen):
        self.seen = seen

    def init(self, params):
        return {"draw": 0}

    def direction(self, at, params, state):
        self.seen.append(at.noise({"w": torch.zeros(3, dtype=torch.float64)}, 4, state["draw"])["w"])
        return at().grads, {"draw": state["draw"] + 1}


def test_tasks_steps_and_meta_steps_draw_differently_and_by_their_number_alone():
    seen = []
    loop = inner_loop(MLP.model(), MLP, Noting(seen), steps=3)
    for stream in (0, 1):
        for numbers in (None, (3, 4, 5)):
            run_engine("higher", dataclasses.replace(loop, stream=stream), MLP.tasks(3), numbers)
    distinct = {tuple(t.tolist()) for t in seen}
    assert len(distinct) == len(seen) == 2 * 2 * 3 * 3
    alone = []
    again = dataclasses.replace(loop, rule=Noting(alone), stream=1)
    run_engine("higher", again, MLP.tasks(1, seed=9), (4,))
    assert {tuple(t.tolist()) for t in alone} <= distinct
    for step, found in enumerate(alone):
        assert torch.equal(found, noise.normal({"w": found}, 4, step, 1, step, 4)["w"])


@pytest.mark.parametrize("first_order", [True, False], ids=["first", "second"])
@each_random_rule
def test_engines_and_chunks_draw_the_same(case, first_order):
    model, tasks = CONV.model(), CONV.tasks(5)
    loop = inner_loop(model, CONV, case.rule, steps=2, stream=3, first_order=first_order)
    found = [gradients(run_engine(e, loop, tasks).loss.mean(), model) for e in ENGINES]
    assert distance(*found) < 1e-12
    for engine in ENGINES:
        for size in (1, 2, 7):
            parts = [range(5)[i : i + size] for i in range(0, 5, size)]
            losses = [run_engine(engine, loop, tasks.map(lambda t, p=p: t[p.start : p.stop]), p).loss for p in parts]
            assert distance(gradients(torch.cat(losses).mean(), model), found[0]) < 1e-12
    twins = tasks.map(lambda t: t[:1].expand(2, *t.shape[1:]))
    for engine in ENGINES:
        one, two = run_engine(engine, loop, twins).loss
        assert one != two, "two tasks of the same data drew the same"


def learner_of(rule, **settings):
    return SharpMAML(
        MLP.model(), MLP.loss_fn, inner_lr=0.1, inner_steps=2, inner_rule=rule, outer_rule=rule, **settings
    )


@each_random_rule
def test_a_meta_learner_draws_the_same_on_every_engine_in_chunks_and_in_lists(case):
    found = []
    tasks = MLP.tasks(5)
    ragged = [tasks.map(lambda t: t[:2]), tasks.map(lambda t: t[2:])]
    for engine in ENGINES:
        for chunk, given in ((None, tasks), (2, tasks), (1, ragged), (None, tasks.unbind())):
            learner = learner_of(case.rule, engine=engine, chunk_size=chunk)
            optimizer = SGD(learner.model.parameters(), 0.1)
            for _ in range(3):
                learner.step(given, optimizer)
            found.append(params_of(learner.model))
    for one in found[1:]:
        assert distance(one, found[0]) < 1e-12


@each_random_rule
def test_meta_loss_draws_as_the_step_does(case):
    learner = SharpMAML(MLP.model(), MLP.loss_fn, inner_lr=0.1, inner_steps=2, inner_rule=case.rule)
    tasks = MLP.tasks(4)
    optimizer = SGD(learner.model.parameters(), 0.1)
    for given in (tasks, [tasks.map(lambda t: t[:1]), tasks.map(lambda t: t[1:])]):
        wanted = learner.meta_loss(given).detach()
        torch.testing.assert_close(learner.step(given, optimizer), wanted, rtol=1e-13, atol=0)


@each_random_rule
def test_a_resumed_meta_run_draws_on(case):
    def go(learner, optimizer, steps):
        for seed in steps:
            learner.step(MLP.tasks(3, seed=seed), optimizer)

    learner = learner_of(case.rule)
    optimizer = torch.optim.Adam(learner.model.parameters(), 0.01)
    go(learner, optimizer, range(3))
    other = learner_of(case.rule)
    other_optimizer = torch.optim.Adam(other.model.parameters(), 0.01)
    other.load_state_dict(learner.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch aliases
    for pair in ((learner, optimizer), (other, other_optimizer)):
        go(*pair, range(3, 6))
    assert_same(params_of(other.model), params_of(learner.model))


def test_judging_draws_the_same_whatever_the_batches():
    learner = learner_of(rules.RandomSAM(0.2, 0.3))
    tasks = MLP.tasks(6)
    once = learner.evaluate(tasks)
    learner.step(tasks, SGD(learner.model.parameters(), 0.0))
    for several in (tasks, tasks.unbind(), [tasks.map(lambda t: t[:2]), tasks.map(lambda t: t[2:])]):
        assert learner.evaluate(several).per_task == pytest.approx(once.per_task, rel=1e-12)


def test_rwp_takes_its_second_gradient_of_the_validation_batch():
    model, w, val = MLP.model(), params_of(MLP.model()), MLP.batch(seed=7)
    optimizer = RWP(model.parameters(), lr=0.1, rho=0.2, mix=0.3, second="val", noise_seed=5)
    with pytest.raises(TypeError, match=r"step\(closure, val="):
        optimizer.step(closure_of(MLP, model, MLP.batch()))
    grad, memory = references.gradient_of(MLP.model(), MLP.loss_fn, *MLP.batch(), val=val), {}
    for _ in range(3):
        w = references.rwp(grad, w, 0.1, memory, rho=0.2, alpha=0.3, second="val", seed=5)
        optimizer.step(closure_of(MLP, model, MLP.batch()), val=closure_of(MLP, model, val))
    assert distance(params_of(model), w) < 1e-13


@pytest.mark.parametrize("base", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_limits_of_the_random_rules(base):
    sam, plain = walk(partial(SAM, rho=0.2), base)[0], walk(partial(SAM, rho=0.0), base)[0]
    assert distance(walk(partial(RandomSAM, rho=0.2, sigma=0.0), base)[0], sam) < 1e-12
    assert_same(walk(partial(RandomSAM, rho=0.0), base)[0], plain)
    assert_same(walk(partial(RWP, mix=0.0), base)[0], plain)
    assert distance(walk(partial(RWP, rho=0.0), base)[0], plain) < 1e-14


@pytest.mark.parametrize(
    ("make", "settings"),
    [(RandomSAM, {k: -1.0}) for k in ("rho", "sigma", "pull")]
    + [(RWP, {"rho": -1.0}), (RWP, {"mix": 1.5}), (RWP, {"second": "test"})]
    + [(ESAM, {k: v}) for k in ("keep", "select") for v in (0.0, 1.1, float("nan"))]
    + [(SparseSAM, {"sparsity": 1.0}), (SparseSAM, {"criterion": "magnitude"}), (SparseSAM, {"refresh": 0})]
    + [(SparseSAM, {"samples": -1}), (SparseSAM, {"horizon": 0}), (SparseSAM, {"drop": 1.0}), (SAM, {"m": 0})],
    ids=str,
)
def test_values_that_are_refused_are_named(make, settings):
    with pytest.raises(ValueError, match=f"expected .*{next(iter(settings))}"):
        make(MLP.model().parameters(), lr=0.1, **settings)


# parts in the outer loop: tasks


def outer_step(rule, tasks, engine, **settings):
    learner = SharpMAML(
        MLP.model(), MLP.loss_fn, inner_lr=0.1, inner_steps=2, outer_rule=rule, engine=engine, **settings
    )
    home = params_of(learner.model)
    learner.step(tasks, SGD(learner.model.parameters(), 1.0))
    return {k: home[k] - p for k, p in params_of(learner.model).items()}


def meta(tasks, numbers, w):
    some = tasks.map(lambda t: t[list(numbers)])
    return references.meta_gradient(MLP.model(), MLP.loss_fn, some, references.plain, 0.1, 2, at=w)[1]


@each_engine
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("count", [4, 5])
def test_shards_of_tasks_in_the_outer_loop(count, chunk_size, engine):
    tasks, w = MLP.tasks(count), params_of(MLP.model())
    wanted = {k: torch.zeros_like(v) for k, v in w.items()}
    for start in range(0, count, 2):
        shard = range(count)[start : start + 2]
        g = meta(tasks, shard, references.plus(w, references.unit(meta(tasks, shard, w)), 0.2))
        wanted = references.plus(wanted, g, len(shard) / count)
    given = tasks if count == 4 else [tasks.map(lambda t: t[:3]), tasks.map(lambda t: t[3:])]
    assert distance(outer_step(Sharp(0.2, m=2), given, engine, chunk_size=chunk_size), wanted) < 1e-12
    assert distance(outer_step(Sharp(0.2), tasks, engine), wanted) > 1e-4


@each_engine
def test_esam_in_the_outer_loop_descends_on_the_tasks_whose_loss_rose_most(engine):
    tasks, w = MLP.tasks(5), params_of(MLP.model())
    moved = references.plus(w, references.unit(meta(tasks, range(5), w)), 0.3)

    def loss(i, at):
        some = tasks.map(lambda t: t[i : i + 1])
        return float(references.meta_gradient(MLP.model(), MLP.loss_fn, some, references.plain, 0.1, 2, at=at)[0])

    worst = sorted(range(5), key=lambda i: loss(i, w) - loss(i, moved))[:3]
    found = outer_step(rules.ESAM(0.3, 1.0, 0.5), tasks, engine, chunk_size=2)
    assert distance(found, meta(tasks, worst, moved)) < 1e-12


@each_engine
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_shards_of_tasks_reuse_the_displacements_of_their_own_tasks(chunk_size, engine):
    tasks, w = MLP.tasks(5), params_of(MLP.model())
    wanted = {k: torch.zeros_like(v) for k, v in w.items()}
    for start in range(0, 5, 2):
        some = tasks.map(lambda t, s=start: t[s : s + 2])
        first, second = references.reusing(0.1)
        references.meta_gradient(MLP.model(), MLP.loss_fn, some, first, 0.1, 2)
        # the pass over all tasks at w has found them; from then on they are constants, in the ascent too
        _, h = references.meta_gradient(MLP.model(), MLP.loss_fn, some, second, 0.1, 2)
        moved = references.plus(w, references.unit(h), 0.2)
        _, g = references.meta_gradient(MLP.model(), MLP.loss_fn, some, second, 0.1, 2, at=moved)
        wanted = references.plus(wanted, g, len(some.support[1]) / 5)
    found = outer_step(
        Sharp(0.2, m=2),
        tasks,
        engine,
        inner_rule=Sharp(0.1),
        reuse_inner_eps=True,
        variant="both",
        chunk_size=chunk_size,
    )
    assert distance(found, wanted) < 1e-12


@each_engine
def test_held_out_tasks_have_noise_of_their_own(engine):
    tasks, step = MLP.tasks(2), partial(references.random_sam, rho=0.2, sigma=0.3, lam=2.0)
    four = tasks.map(lambda t: t.repeat(2, *[1] * (t.ndim - 1)))

    def grad(numbers):
        w = {k: p.detach().clone().requires_grad_() for k, p in MLP.model().named_parameters()}
        singles = [(n, four.unbind()[n]) for n in numbers]
        losses = [
            references.query_loss(MLP.model(), MLP.loss_fn, w, t, step, 0.1, 2, set(w), place=(0, n))
            for n, t in singles
        ]
        found = torch.autograd.grad(sum(losses) / len(losses), list(w.values()))
        return dict(zip(w, found, strict=True))

    learner = SharpMAML(
        MLP.model(),
        MLP.loss_fn,
        inner_lr=0.1,
        inner_steps=2,
        inner_rule=rules.RandomSAM(0.2, 0.3),
        outer_rule=rules.RWP(0.0, 1.0, "val"),
        engine=engine,
    )
    home = params_of(learner.model)
    with pytest.raises(TypeError, match=r"RWP in the outer loop asks for held-out tasks: step.*val_tasks="):
        learner.step(tasks, SGD(learner.model.parameters(), 1.0))
    learner.step(tasks, SGD(learner.model.parameters(), 1.0), val_tasks=tasks)
    found = {k: home[k] - p for k, p in params_of(learner.model).items()}
    assert distance(found, grad((2, 3))) < 1e-12
    assert distance(found, grad((0, 1))) > 1e-4


@each_engine
def test_a_part_of_the_tasks_keeps_their_noise(engine):
    """Of shards, each task draws by its number in the meta-batch: plain descent on shards is plain descent."""
    tasks, inner_rule = MLP.tasks(5), rules.RandomSAM(0.2, 0.3)
    found, wanted = (outer_step(r, tasks, engine, inner_rule=inner_rule) for r in (Sharp(0.0, m=2), Plain()))
    assert distance(found, wanted) < 1e-12


def test_engines_of_parts_agree_on_the_costs_of_shards():
    costs = []
    for engine in inner.ENGINES:
        learner = SharpMAML(MLP.model(), MLP.loss_fn, inner_lr=0.1, inner_steps=2, outer_rule=Sharp(m=2), engine=engine)
        learner.step(MLP.tasks(4), SGD(learner.model.parameters(), 0.1))
        costs.append(learner.counts)
    assert costs[0] == costs[1]
