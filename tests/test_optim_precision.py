"""The live optimizer at less than full precision: loss scaling, autocast, bfloat16 weights."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from metasam import ESAM, SAM, AgnosticSAM, SharpnessAware, SparseSAM

from .cases import CONV, MLP, assert_same, closures_of, distance, each_rule, params_of

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
BASES = {"momentum": MOMENTUM, "adamw": ADAMW}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def scaler_of(scale=2.0**12, **settings):
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def scaled_closures(problem, model, scaler, change=None):
    """Arguments of ``step`` as a user of a GradScaler writes them; ``change(n, loss)`` may spoil the n-th call."""
    dtype = next(model.parameters()).dtype
    calls = itertools.count()

    def of(batch):
        def closure():
            loss = problem.loss_fn(model(batch[0]), batch[1])
            n = next(calls)
            scaler.scale(loss if change is None else change(n, loss)).backward()
            return loss

        return closure

    return {"closure": of(problem.batch(dtype)), "val": of(problem.batch(dtype, seed=7))}


def parts_of(problem, model):
    x, y = problem.batch(next(model.parameters()).dtype)

    def closure(part=None):
        index = slice(None) if part is None else part
        return (model(x[index]) - y[index]).square().flatten(1).mean(1)

    return closure


# loss scaling


@each_rule
@each_base
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scaled_steps_equal_unscaled_ones_to_the_last_bit(case, base, dtype):
    ours, theirs = MLP.model(dtype), MLP.model(dtype)
    optimizer = SharpnessAware(base(ours.parameters()), case.rule, model=ours)
    other = SharpnessAware(base(theirs.parameters()), case.rule, model=theirs)
    scaler = scaler_of(growth_interval=2)
    closures, wanted = scaled_closures(MLP, ours, scaler), closures_of(MLP, theirs)
    for _ in range(5):
        assert optimizer.step(**closures, scaler=scaler) == other.step(**wanted)
        scaler.update()
        assert_same(params_of(ours), params_of(theirs))
    assert scaler.get_scale() == 2.0**14
    assert optimizer.skipped == 0


@each_base
@pytest.mark.parametrize(
    "make",
    [SAM, partial(SAM, m=2), partial(ESAM, select=0.5), partial(SparseSAM, samples=2)],
    ids=["sam", "m-sam", "esam", "sparse"],
)
def test_the_step_scales_the_losses_of_examples_itself(make, base):
    def run(scaler):
        model = MLP.model()
        optimizer = make(base(model.parameters()), rho=0.2, model=model)
        losses = []
        for _ in range(4):
            losses.append(optimizer.step(parts_of(MLP, model), scaler=scaler))
            if scaler is not None:
                scaler.update()
        return params_of(model), losses

    scaler = scaler_of()
    (found, losses), (wanted, wanted_losses) = run(scaler), run(None)
    assert_same(found, wanted)
    assert losses == wanted_losses
    assert scaler.state_dict()["_growth_tracker"] == 4


def test_the_scale_is_in_the_gradients_of_the_closure():
    """What the tests above would not notice: that nothing was scaled at all."""
    model, scaler, seen = MLP.model(), scaler_of(), []
    closure = scaled_closures(MLP, model, scaler)["closure"]

    def noting():
        loss = closure()
        seen.append(model[0].weight.grad.clone())
        return loss

    optimizer = SAM(model.parameters(), lr=0.0, rho=0.1)
    optimizer.step(noting, scaler=scaler)
    assert torch.equal(seen[1], 2.0**12 * model[0].weight.grad)


def memory_of(optimizer):
    """All that a skipped step must not change."""
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("rule.skipped", "rule.counts"):
        del saved["param_groups"][0][key]
    return saved


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@each_rule
@pytest.mark.parametrize("bad_value", [torch.inf, torch.nan])
def test_an_overflow_in_any_pass_skips_the_step_after_all_passes(case, bad_value):
    for before, bad in case.passes:
        model, twin = MLP.model(), MLP.model()
        scaler = scaler_of(growth_interval=100)
        optimizer = SharpnessAware(MOMENTUM(model.parameters()), case.rule, model=model)
        other = SharpnessAware(MOMENTUM(twin.parameters()), case.rule, model=twin)
        calls = []
        start = sum(case.cycle[i % len(case.cycle)] for i in range(before))

        def spoil(n, loss, calls=calls, spoilt=start + bad):
            calls.append(n)
            return loss * bad_value if n == spoilt else loss

        closures, wanted = scaled_closures(MLP, model, scaler, spoil), closures_of(MLP, twin)
        for _ in range(before):
            optimizer.step(**closures, scaler=scaler)
            scaler.update()
            other.step(**wanted)
        home, memory, done = params_of(model), memory_of(optimizer), len(calls)
        loss = optimizer.step(**closures, scaler=scaler)
        assert torch.isfinite(loss)
        assert_same(params_of(model), home)
        assert same(memory_of(optimizer), memory)
        assert optimizer.skipped == 1
        assert len(calls) - done == case.cycle[before % len(case.cycle)]
        assert scaler.get_scale() == 2.0**12
        scaler.update()
        assert scaler.get_scale() == 2.0**11
        optimizer.step(**closures, scaler=scaler)
        scaler.update()
        other.step(**wanted)
        assert_same(params_of(model), params_of(twin))
        assert (optimizer.skipped, scaler.get_scale()) == (1, 2.0**11)


def test_an_overflow_that_leaves_no_trace_in_the_direction_skips_the_step_too():
    """The gradient of a linear loss is the same everywhere."""
    w, scaler, calls = nn.Parameter(torch.ones(2)), scaler_of(), []
    optimizer = SAM([w], lr=0.1, rho=0.1)

    def closure():
        calls.append(None)
        scaler.scale(w.sum()).backward()
        if len(calls) == 1:
            w.grad[0] = torch.inf
        return w.sum()

    optimizer.step(closure, scaler=scaler)
    scaler.update()
    assert torch.equal(w, torch.ones(2))
    assert (optimizer.skipped, scaler.get_scale(), len(calls)) == (1, 2.0**11, 2)
    optimizer.step(closure, scaler=scaler)
    scaler.update()
    assert torch.equal(w, torch.full((2,), 0.9))


def test_a_scale_that_overflows_is_lowered_until_steps_are_taken():
    model, scaler = MLP.model(torch.float32), scaler_of(2.0**120)
    optimizer = SAM(model.parameters(), lr=0.1)
    closures, home = scaled_closures(MLP, model, scaler, lambda n, loss: loss * 1e4), params_of(model)
    del closures["val"]
    for n in range(40):
        optimizer.step(**closures, scaler=scaler)
        scaler.update()
        if optimizer.skipped == n:
            break
    assert 0 < optimizer.skipped < 40
    assert scaler.get_scale() == 2.0 ** (120 - optimizer.skipped)
    assert distance(params_of(model), home) > 1e-3


def test_a_disabled_scaler_changes_nothing():
    def run(scaler):
        model = MLP.model()
        optimizer = SAM(MOMENTUM(model.parameters()), rho=0.2)
        closures = closures_of(MLP, model) if scaler is None else scaled_closures(MLP, model, scaler)
        for _ in range(3):
            optimizer.step(closures["closure"], scaler=scaler)
            if scaler is not None:
                scaler.update()
        return params_of(model)

    assert_same(run(torch.amp.GradScaler("cpu", enabled=False)), run(None))


def test_agnostic_takes_a_scaler_beside_its_closures():
    def run(scaler):
        model = MLP.model()
        optimizer = AgnosticSAM(MOMENTUM(model.parameters()))
        closures = (closures_of(MLP, model) if scaler is None else scaled_closures(MLP, model, scaler)).values()
        for _ in range(3):
            optimizer.step(*closures, scaler=scaler)
            if scaler is not None:
                scaler.update()
        return params_of(model)

    assert_same(run(scaler_of()), run(None))


def test_two_optimizers_share_a_scaler():
    models, scaler = [MLP.model(), MLP.model(seed=3)], scaler_of()
    optimizers = [SAM(models[0].parameters(), lr=0.1), SAM(models[1].parameters(), lr=0.2)]
    changes = [None, lambda n, loss: loss * (torch.inf if n == 1 else 1.0)]
    closures = [scaled_closures(MLP, m, scaler, c)["closure"] for m, c in zip(models, changes, strict=True)]
    home = [params_of(m) for m in models]
    for optimizer, closure in zip(optimizers, closures, strict=True):
        optimizer.step(closure, scaler=scaler)
        gc.collect()
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert distance(params_of(models[0]), home[0]) > 1e-3
    assert_same(params_of(models[1]), home[1])


def test_a_forgotten_update_is_told():
    model, scaler = MLP.model(), scaler_of()
    optimizer, closure = SAM(model.parameters(), lr=0.1), scaled_closures(MLP, model, scaler)["closure"]
    optimizer.step(closure, scaler=scaler)
    home = params_of(model)
    with pytest.raises(RuntimeError, match=r"scaler\.update\(\) after each optimizer\.step\(closure, scaler=scaler\)"):
        optimizer.step(closure, scaler=scaler)
    assert_same(params_of(model), home)
    scaler.update()
    optimizer.step(closure, scaler=scaler)
    scaler.update()


@pytest.mark.parametrize("which", [lambda o: o, lambda o: o.base], ids=["optimizer", "base"])
def test_a_closure_that_unscales_is_told(which):
    model, scaler = MLP.model(), scaler_of()
    optimizer, closure = SAM(model.parameters(), lr=0.1), scaled_closures(MLP, model, scaler)["closure"]

    def unscaling():
        loss = closure()
        scaler.unscale_(which(optimizer))
        return loss

    with pytest.raises(RuntimeError, match="the step unscales the gradients of each of its passes itself"):
        optimizer.step(unscaling, scaler=scaler)


def test_the_scalers_own_step_is_told_what_to_write():
    model, scaler = MLP.model(), scaler_of()
    optimizer, closure = SAM(model.parameters(), lr=0.1), scaled_closures(MLP, model, scaler)["closure"]
    closure()
    with pytest.raises(TypeError, match=r"optimizer\.step\(closure, scaler=scaler\) in place of scaler\.step"):
        scaler.step(optimizer)


def test_training_goes_on_after_an_exception_between_passes():
    model, twin, scaler = MLP.model(), MLP.model(), scaler_of()
    optimizer, other = SAM(MOMENTUM(model.parameters())), SAM(MOMENTUM(twin.parameters()))

    def fail(n, loss):
        if n == 1:
            raise KeyboardInterrupt
        return loss

    closure = scaled_closures(MLP, model, scaler, fail)["closure"]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure, scaler=scaler)
    scaler.update()
    optimizer.step(closure, scaler=scaler)
    other.step(closures_of(MLP, twin)["closure"])
    assert_same(params_of(model), params_of(twin))


def test_a_fused_base_steps_on_unscaled_gradients():
    """It has scale handling of its own, which must not see a second scale."""

    def run(scaler):
        model = MLP.model()
        optimizer = SAM(torch.optim.AdamW(model.parameters(), lr=0.02, fused=True), rho=0.2)
        closures = closures_of(MLP, model) if scaler is None else scaled_closures(MLP, model, scaler)
        for _ in range(3):
            optimizer.step(closures["closure"], scaler=scaler)
            if scaler is not None:
                scaler.update()
        return params_of(model)

    assert_same(run(scaler_of()), run(None))


def test_float16_autocast_loses_small_gradients_without_a_scaler_and_none_with_it():
    small = 3e-8  # half of the least float16

    def run(half, scaler):
        model, (x, y) = MLP.model(torch.float32), MLP.batch(torch.float32)
        optimizer = SAM(model.parameters(), lr=0.1 / small, rho=0.3)

        def closure():
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = small * (model(x).float() - y).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        for _ in range(5):
            optimizer.step(closure, scaler=scaler)
            if scaler is not None:
                scaler.update()
        start = params_of(MLP.model(torch.float32))
        return {k: p - start[k] for k, p in params_of(model).items()}, optimizer.skipped

    (wanted, _), (lost, _), (found, skipped) = run(False, None), run(True, None), run(True, scaler_of(2.0**20))
    assert skipped == 0
    assert distance(found, wanted) < 0.02
    assert distance(lost, wanted) > 0.2


# autocast


def half_closures(problem, model, inside, losses):
    """Closures that autocast inside, or leave that to whoever calls step."""
    dtype = next(model.parameters()).dtype

    def of(batch):
        def closure():
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                loss = problem.loss_fn(model(batch[0]).float(), batch[1])
            losses.append(loss.item())
            loss.backward()
            return loss

        return closure

    return {"closure": of(problem.batch(dtype)), "val": of(problem.batch(dtype, seed=7))}


def half_walk(case, base, inside, problem):
    model, losses = problem.model(torch.float32), []
    optimizer = SharpnessAware(base(model.parameters()), case.rule, model=model)
    for _ in range(3):
        with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            optimizer.step(**half_closures(problem, model, inside, losses))
    return params_of(model), losses


@each_rule
@each_base
@pytest.mark.parametrize("problem", [MLP, CONV], ids=lambda p: p.name)
def test_autocast_around_the_step_is_autocast_in_the_closure_to_the_last_bit(case, base, problem):
    (found, losses), (wanted, wanted_losses) = (half_walk(case, base, inside, problem) for inside in (False, True))
    assert losses == wanted_losses
    assert_same(found, wanted)


@each_base
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_the_second_pass_under_autocast_sees_displaced_weights(base, inside):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), []
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    optimizer = SAM(base(model.parameters()), rho=0.5)

    def closure():
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(x).float(), y)
        losses.append(loss.item())
        loss.backward()
        return loss

    for _ in range(3):
        slope = sum(
            g.square().sum() for g in torch.autograd.grad(nn.functional.mse_loss(model(x), y), model.parameters())
        )
        with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            optimizer.step(closure)
        first, second = losses[-2:]
        # to first order the loss rises by rho times the norm of its gradient; more by curvature
        assert second - first > 0.5 * 0.5 * float(slope.sqrt())


def test_weights_and_their_updates_stay_in_full_precision_under_autocast():
    model, losses = MLP.model(torch.float32), []
    optimizer = SAM(ADAMW(model.parameters()), rho=0.1)
    optimizer.step(half_closures(MLP, model, True, losses)["closure"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {t.dtype for s in optimizer.state.values() for t in s.values()} == {torch.float32}
    exact = MLP.model(torch.float32)
    SAM(ADAMW(exact.parameters()), rho=0.1).step(closures_of(MLP, exact)["closure"])
    assert distance(params_of(model), params_of(exact)) < 0.05


# bfloat16 weights


def swallowing(dtype, rho, width=512):
    """A model whose eps is far below the rounding of its weights where they are bfloat16, and a closure."""
    torch.manual_seed(0)
    model = nn.Linear(width, width).to(dtype)
    nn.init.constant_(model.weight, 1.0)
    x = torch.randn(4, width, dtype=dtype)
    losses = []

    def closure():
        loss = model(x).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        return loss

    return SAM(model.parameters(), lr=0.1, rho=rho), closure, losses, model


def test_bfloat16_weights_that_swallow_eps_are_told_once():
    optimizer, closure, losses, _ = swallowing(torch.bfloat16, 0.05)
    with pytest.warns(UserWarning, match=r"bfloat16 weights rounds away \d+% of the displacement.*float32.*autocast"):
        optimizer.step(closure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
    assert len(losses) == 4


@pytest.mark.parametrize(
    ("dtype", "rho"), [(torch.bfloat16, 50.0), (torch.float32, 0.05), (torch.bfloat16, 0.0)], ids=str
)
def test_a_displacement_that_arrives_is_not_warned_about(dtype, rho):
    optimizer, closure, losses, _ = swallowing(dtype, rho)
    optimizer.step(closure)
    assert (losses[1] > losses[0]) == (rho > 0)


@each_base
def test_bfloat16_weights_take_the_steps_of_a_loop_written_by_hand(base):
    ours, theirs = MLP.model(torch.bfloat16), MLP.model(torch.bfloat16)
    optimizer, other = SAM(base(ours.parameters()), rho=0.5), base(theirs.parameters())
    x, y = MLP.batch(torch.bfloat16)
    for _ in range(4):
        optimizer.step(closures_of(MLP, ours)["closure"])
        params = list(theirs.parameters())
        grads = torch.autograd.grad(MLP.loss_fn(theirs(x), y), params)
        norm = torch.stack([g.float().norm() for g in grads]).norm()
        home = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.add_(g * (0.5 / norm))
        grads = torch.autograd.grad(MLP.loss_fn(theirs(x), y), params)
        with torch.no_grad():
            for p, g, w in zip(params, grads, home, strict=True):
                p.copy_(w)
                p.grad = g
        other.step()
        assert_same(params_of(ours), params_of(theirs))
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
