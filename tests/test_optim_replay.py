"""Steps without a closure: exactly those of step(closure), for every rule, and what may go wrong in between."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from metasam import ASAM, ESAM, GSAM, SAM, AgnosticSAM, LookSAM, MomentumSAM, RandomSAM, SharpnessAware, SparseSAM
from metasam.rules import Agnostic, Plain, Rule, Sharp

from .cases import CONV, MLP, RULES, assert_same, closure_of, closures_of, each_rule, params_of

SGD = torch.optim.SGD
BASES = {"momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-3), "adam": partial(torch.optim.Adam, lr=0.02)}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def looped(problem, model, optimizer, t, record=None):
    """One step by passes, on the batches of number t."""
    batches = {"train": problem.batch(torch.float32, seed=t), "val": problem.batch(torch.float32, seed=100 + t)}
    for on in optimizer.passes():
        x, y = batches[on]
        problem.loss_fn(model(x), y).backward()
        if record is not None:
            record.append((on, params_of(model)))


def by_closure(problem, model, optimizer, t):
    train, val = problem.batch(torch.float32, seed=t), problem.batch(torch.float32, seed=100 + t)
    return optimizer.step(**closures_of(problem, model, train, val=val))


def pair(problem, make):
    models = [problem.model(torch.float32) for _ in range(2)]
    return [(m, make(m)) for m in models]


def assert_alike(ours, theirs, optimizer, other):
    assert_same(params_of(ours), params_of(theirs))
    assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert optimizer.counts == other.counts
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    file, wanted = io.BytesIO(), io.BytesIO()
    for f, o in ((file, optimizer), (wanted, other)):
        pickle.dump([repr(v) for v in o.state_dict()["state"].values()], f)
    assert file.getvalue() == wanted.getvalue()


@each_base
@each_rule
def test_twenty_steps_of_passes_are_those_of_closures_to_the_last_bit(case, base):
    if case.name == "momentum" and base is BASES["adam"]:
        base = partial(torch.optim.AdamW, lr=0.02)
    (ours, optimizer), (theirs, other) = pair(CONV, lambda m: SharpnessAware(base(m.parameters()), case.rule, model=m))
    home = params_of(ours)
    for t in range(20):
        looped(CONV, ours, optimizer, t)
        by_closure(CONV, theirs, other, t)
        assert_alike(ours, theirs, optimizer, other)
    assert any(not torch.equal(home[k], p) for k, p in params_of(ours).items())


@each_rule
def test_a_loop_asks_for_the_declared_passes(case):
    model = MLP.model(torch.float32)
    base = case.base(model.parameters())
    optimizer, seen = SharpnessAware(base, case.rule, model=model), []
    for t in range(len(case.cycle)):
        seen.append([])
        looped(MLP, model, optimizer, t, seen[-1])
    assert tuple(map(len, seen)) == case.cycle
    assert sum(on == "val" for on, _ in seen[0]) == case.validations


@pytest.mark.parametrize("named", [True, False])
def test_batch_norm_is_frozen_in_the_body_of_displaced_passes_only(named):
    model = CONV.model(torch.float32)
    optimizer = SAM(model.parameters(), lr=0.1, model=model if named else None)
    x, y = CONV.batch(torch.float32)
    counted, norm = [], model[1]
    for _ in optimizer.passes():
        before = norm.num_batches_tracked.item()
        CONV.loss_fn(model(x), y).backward()
        counted.append(norm.num_batches_tracked.item() - before)
    assert counted == [1, 0]
    assert norm.track_running_stats


class StopHere(BaseException):
    pass


@pytest.mark.parametrize("how", ["break", "return", "exception", "interrupt", "base exception", "close", "restore"])
@each_rule
def test_leaving_early_puts_everything_back_bit_for_bit(case, how):
    model = CONV.model(torch.float32)
    optimizer = SharpnessAware(BASES["momentum"](model.parameters()), case.rule, model=model)
    for t in range(len(case.cycle)):  # so that momentum and rule state are there
        looped(CONV, model, optimizer, t)
    home, memory = params_of(model), copy.deepcopy(optimizer.state_dict()["state"])
    count = case.cycle[0]
    x, y = CONV.batch(torch.float32)
    error = {"exception": ValueError, "interrupt": KeyboardInterrupt, "base exception": StopHere}.get(how)

    def leave(bad):
        iterator = optimizer.passes()
        for i, _ in enumerate(iterator):
            CONV.loss_fn(model(x), y).backward()
            if i == bad:
                if error:
                    raise error
                if how == "return":
                    return
                if how == "break":
                    break
                getattr(iterator if how == "close" else optimizer, how)()

    def leave_and_drop(bad):
        for i, _ in enumerate(optimizer.passes()):
            CONV.loss_fn(model(x), y).backward()
            if i == bad and error:
                raise error
            if i == bad and how == "return":
                return
            if i == bad:
                break

    run = leave if how in ("close", "restore") else leave_and_drop
    gc.disable()  # at once, not when the collector comes by
    try:
        for bad in range(count):
            if error:
                with pytest.raises(error):
                    run(bad)
            else:
                run(bad)
            assert_same(params_of(model), home)
            assert model[1].track_running_stats
    finally:
        gc.enable()
    state = optimizer.state_dict()["state"]
    assert state.keys() == memory.keys()
    for i in memory:
        assert_same(state[i], memory[i])
    assert optimizer.skipped == 0
    looped(CONV, model, optimizer, 5)
    assert any(not torch.equal(home[k], p) for k, p in params_of(model).items())


def test_an_iterator_that_is_kept_blocks_until_it_is_closed():
    model = MLP.model()
    optimizer, home = SAM(model.parameters(), lr=0.1), params_of(model)
    iterator = optimizer.passes()
    next(iterator)
    MLP.loss_fn(model(MLP.batch()[0]), MLP.batch()[1]).backward()
    next(iterator)
    assert not torch.equal(params_of(model)["0.weight"], home["0.weight"])
    for blocked in (
        lambda: optimizer.step(closure_of(MLP, model, MLP.batch())),
        lambda: next(optimizer.passes()),
        optimizer.first_step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        with pytest.raises(
            RuntimeError, match=r"in the middle of a step, which passes\(\) began .*finish the loop.* restore\(\)"
        ):
            blocked()
    iterator.close()
    assert_same(params_of(model), home)
    optimizer.step(closure_of(MLP, model, MLP.batch()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_rule
def test_a_non_finite_gradient_in_any_pass_skips_the_step_as_with_a_closure(case, value):
    (ours, optimizer), (theirs, other) = pair(
        MLP, lambda m: SharpnessAware(BASES["momentum"](m.parameters()), case.rule, model=m)
    )
    for t in range(len(case.cycle)):
        looped(MLP, ours, optimizer, t)
        by_closure(MLP, theirs, other, t)
    home, (x, y) = params_of(ours), MLP.batch(torch.float32)

    def spoil(model, i):
        MLP.loss_fn(model(x), y).backward()
        if i == bad:
            model[0].weight.grad[0, 0] = value

    for bad in range(case.cycle[0]):
        for i, _ in enumerate(optimizer.passes()):
            spoil(ours, i)
        calls = itertools.count()
        closure = partial(lambda calls: spoil(theirs, next(calls)), calls)
        other.step(closure, val=closure)
        assert_alike(ours, theirs, optimizer, other)
        assert optimizer.skipped == other.skipped
        if value != value or bad == case.cycle[0] - 1:
            assert optimizer.skipped > 0
    if value != value:
        assert optimizer.skipped == case.cycle[0]
        assert_same(params_of(ours), home)


def tensors_alive():
    return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())


@pytest.mark.parametrize("leave", [False, True])
def test_no_copies_are_left_behind(leave):
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AgnosticSAM(model.parameters(), lr=0.1)

    def step():
        for i, _ in enumerate(optimizer.passes()):
            MLP.loss_fn(model(x), y).backward()
            if leave and i == 2:
                break
        optimizer.zero_grad()

    step()
    gc.collect()
    before = tensors_alive()
    gc.disable()
    try:
        for _ in range(5):
            step()
        after = tensors_alive()
    finally:
        gc.enable()
    assert after <= before


def test_autocast_around_the_loop_does_not_hide_the_displacement():
    model, losses = nn.Linear(16, 4), []
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    optimizer = SAM(model.parameters(), rho=1.0, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in optimizer.passes():
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            losses.append(loss.item())
    assert losses[1] > losses[0] * 1.1


def test_gradient_mode_in_the_body_is_the_callers():
    w = nn.Parameter(torch.ones(2))
    optimizer, modes = SAM([w], lr=0.1), []
    for _ in optimizer.passes():
        modes.append(torch.is_grad_enabled())
        w.square().sum().backward()
    assert modes == [True, True]
    with torch.no_grad():
        for _ in optimizer.passes():
            assert not torch.is_grad_enabled()
            with torch.enable_grad():
                w.square().sum().backward()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_micro_batches_may_be_accumulated_in_the_body():
    (ours, optimizer), (theirs, other) = pair(MLP, lambda m: SAM(m.parameters(), lr=0.1))
    x, y = MLP.batch(torch.float32)

    def accumulate(model):
        for i in range(len(x)):
            (MLP.loss_fn(model(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()

    for _ in range(3):
        for _ in optimizer.passes():
            accumulate(ours)
        other.step(lambda: accumulate(theirs))
    assert_same(params_of(ours), params_of(theirs))


@pytest.mark.parametrize("where", ["optimizer", "base"])
def test_hooks_and_schedulers_see_one_step_a_loop(where):
    model, calls = MLP.model(torch.float32), []
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if where == "optimizer" else optimizer.base, 1, 0.5)
    for t in range(3):
        looped(MLP, model, optimizer, t)
        scheduler.step()  # warns, which is an error here, where nobody has stepped
    assert calls == ["pre", "post"] * 3
    assert optimizer.param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize(
    "make",
    [
        partial(SAM, m=2),
        partial(ESAM, select=0.5),
        partial(SparseSAM, samples=4),
    ],
    ids=["m-sam", "esam", "sparse"],
)
def test_rules_of_single_examples_say_that_they_need_a_closure(make):
    model = MLP.model(torch.float32)
    optimizer, home = make(model.parameters(), lr=0.1), params_of(model)
    with pytest.raises(TypeError, match=r"closure\(part=None\)"):
        looped(MLP, model, optimizer, 0)
    assert_same(params_of(model), home)
    optimizer.restore()  # nothing to do
    assert_same(params_of(model), home)


@dataclass(frozen=True)
class Hasty(Rule):
    """Breaks the contract: evaluates after it has descended."""

    def __call__(self, at, descend, params, state):
        descend(params, at().grads)
        return descend(params, at().grads), state


def test_a_rule_that_descends_before_it_has_evaluated_is_told():
    model = MLP.model(torch.float32)
    optimizer, home = SharpnessAware(SGD(model.parameters(), lr=0.1), Hasty()), params_of(model)
    with pytest.raises(TypeError, match=r"after it has descended: call step\(closure\)"):
        looped(MLP, model, optimizer, 0)
    assert_same(params_of(model), home)


# two phases


def phased(problem, model, optimizer, t, zero_grad=True):
    x, y = problem.batch(torch.float32, seed=t)
    problem.loss_fn(model(x), y).backward()
    optimizer.first_step(zero_grad=zero_grad)
    problem.loss_fn(model(x), y).backward()
    optimizer.second_step(zero_grad=zero_grad)


TWO = [
    c
    for c in RULES
    if c.cycle == (2,) and not c.validations and c.rule.clean  # RandomSAM starts at displaced weights
]


@pytest.mark.parametrize("zero_grad", [True, False])
@each_base
@pytest.mark.parametrize("case", TWO, ids=lambda c: c.name)
def test_twenty_steps_of_two_phases_are_those_of_closures_to_the_last_bit(case, base, zero_grad):
    (ours, optimizer), (theirs, other) = pair(CONV, lambda m: SharpnessAware(base(m.parameters()), case.rule, model=m))
    for t in range(20):
        if not zero_grad:
            optimizer.zero_grad()
        phased(CONV, ours, optimizer, t, zero_grad)
        by_closure(CONV, theirs, other, t)
        if zero_grad:
            assert all(p.grad is None for p in ours.parameters())
            other.zero_grad()
        assert_alike(ours, theirs, optimizer, other)


def test_the_two_phases_meet_most_rules():
    names = {c.name for c in TWO}
    assert names >= {"sam", "asam", "usam", "fisher", "gsam", "friendly", "vasso", "wsam", "rwp", "esam", "sparse"}


def test_clipping_between_backward_and_the_phases_is_kept():
    (ours, optimizer), (theirs, other) = pair(MLP, lambda m: GSAM(m.parameters(), lr=0.1))
    x, y = MLP.batch(torch.float32)

    def clipped(model):
        MLP.loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    for _ in range(3):
        clipped(ours)
        optimizer.first_step(zero_grad=True)
        clipped(ours)
        optimizer.second_step(zero_grad=True)
        other.step(lambda: clipped(theirs))
    assert_same(params_of(ours), params_of(theirs))


def test_switching_batch_norm_by_hand_is_not_needed_and_does_no_harm():
    def switched(model, momentum):
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.momentum = momentum

    (ours, optimizer), (theirs, other) = pair(CONV, lambda m: SAM(m.parameters(), lr=0.1))
    x, y = CONV.batch(torch.float32)
    for _ in range(3):
        switched(ours, 0.1)
        CONV.loss_fn(ours(x), y).backward()
        optimizer.first_step(zero_grad=True)
        switched(ours, 0)
        CONV.loss_fn(ours(x), y).backward()
        optimizer.second_step(zero_grad=True)
        other.step(closure_of(CONV, theirs, (x, y)))
    switched(ours, 0.1)
    assert_same(params_of(ours), params_of(theirs))
    assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_second_step_needs_a_first_and_a_first_a_second():
    model = MLP.model()
    optimizer, home, batch = SAM(model.parameters(), lr=0.1), params_of(model), MLP.batch()
    with pytest.raises(RuntimeError, match=r"expected first_step\(\) before second_step\(\)"):
        optimizer.second_step()
    MLP.loss_fn(model(batch[0]), batch[1]).backward()
    optimizer.first_step()
    for blocked in (
        optimizer.first_step,
        lambda: optimizer.step(closure_of(MLP, model, batch)),
        lambda: next(optimizer.passes()),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: pickle.dumps(optimizer),
        lambda: copy.deepcopy(optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"first_step\(\) began .* second_step\(\), or .* restore\(\)"):
            blocked()
    assert not torch.equal(params_of(model)["0.weight"], home["0.weight"])
    optimizer.restore()
    assert_same(params_of(model), home)
    with pytest.raises(RuntimeError, match="expected first_step"):
        optimizer.second_step()
    assert_same(params_of(model), home)
    pickle.loads(pickle.dumps(optimizer)).state_dict()


def test_a_first_step_on_top_of_the_last_gradients_is_refused():
    model = MLP.model(torch.float32)
    optimizer = SAM(model.parameters(), lr=0.1)
    for clear in (lambda: None, lambda: model.zero_grad(set_to_none=False), optimizer.zero_grad):
        clear()
        phased(MLP, model, optimizer, 0, zero_grad=False)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before backward, or second_step\(zero_grad=True\)"):
        phased(MLP, model, optimizer, 0)


@pytest.mark.parametrize(
    ("rule", "before"),
    [
        (Plain(), 0),
        (Sharp(steps=2), 0),
        (Agnostic(), 0),
        (RandomSAM(MLP.model().parameters()).rule, 0),
        (MomentumSAM(MLP.model().parameters()).rule, 1),
        (LookSAM(MLP.model().parameters(), every=2).rule, 1),
    ],
    ids=lambda r: type(r).__name__ if isinstance(r, Rule) else "",
)
def test_rules_of_other_evaluations_say_what_to_write(rule, before):
    model = MLP.model(torch.float32)
    optimizer = SharpnessAware(BASES["momentum"](model.parameters()), rule)
    for t in range(before):
        looped(MLP, model, optimizer, t)
    optimizer.zero_grad()
    home = params_of(model)
    with pytest.raises(RuntimeError, match=r"twice.*for on in optimizer\.passes\(\).*step\(closure\)"):
        phased(MLP, model, optimizer, 0)
    assert_same(params_of(model), home)
    looped(MLP, model, optimizer, 3)  # nothing is left half done
    assert optimizer.skipped == 0


def test_two_phases_skip_what_is_not_finite():
    model = MLP.model(torch.float32)
    optimizer, home = ASAM(model.named_parameters(), lr=0.1), params_of(model)
    x, y = MLP.batch(torch.float32)
    for bad in range(2):
        for i, phase in enumerate((optimizer.first_step, optimizer.second_step)):
            MLP.loss_fn(model(x), y).backward()
            if i == bad:
                model[0].weight.grad[0, 0] = float("nan")
            phase(zero_grad=True)
        assert optimizer.skipped == bad + 1
        assert_same(params_of(model), home)


# options


def scaled_step(how, model, optimizer, scaler, spoil=None):
    """One step with a scaled loss; ``spoil`` is the number of the pass whose loss overflows."""
    x, y = MLP.batch(torch.float32)

    def backward(i):
        loss = MLP.loss_fn(model(x), y)
        scaler.scale(loss * 1e38 * 1e38 if i == spoil else loss).backward()

    if how == "passes":
        for i, _ in enumerate(optimizer.passes(scaler=scaler)):
            backward(i)
    else:
        backward(0)
        optimizer.first_step(scaler=scaler)
        backward(1)
        optimizer.second_step(zero_grad=True)
    scaler.update()


@pytest.mark.parametrize("how", ["passes", "phases"])
@pytest.mark.parametrize("make", [SAM, GSAM], ids=lambda m: m.__name__)
def test_a_scaler_changes_nothing_and_skips_what_overflows(make, how):
    (ours, optimizer), (theirs, other) = pair(MLP, lambda m: make(m.parameters(), lr=0.1, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        scaled_step(how, ours, optimizer, scaler)
        other.step(closure_of(MLP, theirs, MLP.batch(torch.float32)))
    assert_same(params_of(ours), params_of(theirs))
    for spoil in range(2):
        scaled_step(how, ours, optimizer, scaler, spoil)
        assert optimizer.skipped == spoil + 1
        assert scaler.get_scale() == 2.0 ** (9 - spoil)
        assert_same(params_of(ours), params_of(theirs))
    scaled_step(how, ours, optimizer, scaler)
    other.step(closure_of(MLP, theirs, MLP.batch(torch.float32)))
    assert_same(params_of(ours), params_of(theirs))


def test_passes_draw_the_same_dropout_masks_where_asked():
    def run(loop, same_noise):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer, x, outs = SAM(model.parameters(), lr=0.1, rho=0.0, same_noise=same_noise), torch.randn(4, 8), []

        def evaluate():
            optimizer.zero_grad()
            outs.append(model(x).square().sum())
            outs[-1].backward()

        for _ in range(2):
            if loop:
                for _ in optimizer.passes():
                    evaluate()
            else:
                optimizer.step(evaluate)
        return params_of(model), [o.item() for o in outs]

    found, (a, b, *_) = run(True, True)
    assert_same(found, run(False, True)[0])
    assert a == b
    _, (a, b, *_) = run(True, False)
    assert a != b


def test_two_phases_cannot_draw_the_same_masks_again():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1, same_noise=True)
    with pytest.raises(RuntimeError, match=r"same_noise=True .* passes\(\) or step\(closure\)"):
        optimizer.first_step()


def test_weights_that_swallow_the_displacement_are_warned_about_without_a_graph():
    model = MLP.model(torch.bfloat16)
    optimizer, (x, y) = SAM(model.parameters(), lr=0.1, rho=1e-4), MLP.batch(torch.bfloat16)
    passes = optimizer.passes()
    next(passes)
    MLP.loss_fn(model(x), y).backward()
    with pytest.warns(UserWarning, match="rounds away"):
        next(passes)
