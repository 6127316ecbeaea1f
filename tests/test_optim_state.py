"""What the optimizer keeps and what it is handed: states of other rules and models, gradients from elsewhere."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from metasam import (
    ASAM,
    ESAM,
    SAM,
    AgnosticSAM,
    FisherSAM,
    FriendlySAM,
    LookSAM,
    MultiStepSAM,
    SharpMAML,
    SharpnessAware,
    Task,
    VaSSO,
)
from metasam.perturb import Fisher
from metasam.rules import Sharp

from .cases import MLP, PROBLEMS, assert_same, closure_of, closures_of, params_of

SGD = torch.optim.SGD


def stepped(model, optimizer, steps=3):
    for t in range(steps):
        optimizer.step(**closures_of(MLP, model, MLP.batch(seed=t), val=MLP.batch(seed=100 + t)))
    return optimizer


def made(make, seed=1, **settings):
    model = MLP.model(seed=seed)
    return model, make(model.parameters(), lr=0.1, momentum=0.9, model=model, **settings)


# loading


def snapshot(optimizer):
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return groups, state, optimizer.skipped, dict(optimizer.counts)


def broken(optimizer):
    """States that cannot be loaded, and what is said about them."""
    own = optimizer.state_dict()
    other = nn.Linear(2, 2)
    one = [{"params": optimizer.param_groups[0]["params"][:2]}, {"params": optimizer.param_groups[0]["params"][2:]}]
    yield {}, "with the keys 'state' and 'param_groups', got an empty one"
    yield {"model": {}, "optimizer": own}, "got 'model', 'optimizer'"
    yield {"state": {}, "param_groups": []}, "expected what state_dict"
    yield {"state": {}, "param_groups": [{"lr": 0.1}]}, "expected what state_dict"
    yield SGD(other.parameters()).state_dict(), r"expected param groups of \[4\] parameters, got \[2\]"
    yield SGD(one).state_dict(), r"expected param groups of \[4\] parameters, got \[2, 2\]"
    yield (
        stepped(*made(FriendlySAM)).state_dict(),
        r"expected the state of VaSSO, got that of FriendlySAM.* m: .*strict",
    )
    yield stepped(*made(LookSAM)).state_dict(), r"LookSAM, which remembers step, g_v"


def test_a_load_that_fails_says_why_and_changes_nothing():
    model, optimizer = made(VaSSO)
    stepped(model, optimizer)
    before, home = snapshot(optimizer), params_of(model)
    for state, message in broken(optimizer):
        given = copy.deepcopy(state)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert str(given) == str(state)
        groups, memory, *numbers = snapshot(optimizer)
        assert [groups, *numbers] == [before[0], *before[2:]]
        assert memory.keys() == before[1].keys()
        for i in memory:
            assert_same(memory[i], before[1][i])
    assert_same(params_of(model), home)
    stepped(model, optimizer)


def test_a_base_that_cannot_load_leaves_everything_as_it_was():
    model = MLP.model()
    optimizer = VaSSO(model.parameters(), torch.optim.Adam, lr=0.1)
    stepped(model, optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="expected the state of Adam, got one that it cannot load: KeyError"):
        optimizer.load_state_dict(stepped(*made(VaSSO)).state_dict())
    groups, memory, *_ = snapshot(optimizer)
    assert groups == before[0]
    for i in memory:
        assert_same(memory[i], before[1][i])
    twin = MLP.model()
    other = VaSSO(twin.parameters(), torch.optim.Adam, lr=0.1)
    stepped(twin, other)
    assert_same(params_of(stepped(model, optimizer) and model), params_of(stepped(twin, other) and twin))


def test_another_rule_takes_the_bases_part_where_asked_and_starts_afresh():
    model, optimizer = made(FriendlySAM)
    stepped(model, optimizer)
    twin = MLP.model()
    twin.load_state_dict(model.state_dict())
    fresh = VaSSO(twin.parameters(), lr=0.5, momentum=0.1, model=twin)
    fresh.load_state_dict(optimizer.state_dict(), strict=False)
    assert fresh.rule_state is None
    assert fresh.param_groups[0]["lr"] == 0.1
    base = SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    wanted = VaSSO(base)
    assert_same(params_of(stepped(twin, fresh) and twin), params_of(stepped(model, wanted) and model))


def test_rules_without_a_memory_load_each_others_states():
    model, optimizer = made(SAM, rho=0.3)
    stepped(model, optimizer)
    _, other = made(FriendlySAM, rho=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["rho"] == 0.3


def test_names_survive_a_state_without_them():
    model = MLP.model()
    optimizer, base = ASAM(model.parameters(), lr=0.1, model=model), SGD(MLP.model().parameters(), lr=0.1)
    optimizer.load_state_dict(base.state_dict())
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    twin = MLP.model()
    stepped(twin, ASAM(twin.parameters(), lr=0.1, model=twin))
    stepped(model, optimizer)
    assert_same(params_of(model), params_of(twin))


# gradients from outside the closure


def losses(model):
    for t in range(4):
        x, y = MLP.batch(seed=t)
        yield MLP.loss_fn(model(x), y)


def lightning_like(model, optimizer):
    """Accumulation over two micro-batches as Lightning does it: the first one's backward is outside the closure."""
    for i in range(4):
        x, y = MLP.batch(seed=i)

        def closure(i=i, x=x, y=y):
            loss = MLP.loss_fn(model(x), y)
            if i % 2 == 0:  # the first micro-batch of two
                optimizer.zero_grad()
            (loss / 2).backward()
            return loss

        if i % 2 == 0:
            closure()
        else:
            optimizer.step(closure)


@pytest.mark.parametrize("make", [SAM, partial(FriendlySAM, sigma=0.5), LookSAM])
def test_gradients_that_a_framework_accumulates_outside_are_warned_about_once(make):
    model = MLP.model()
    optimizer = make(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"were there before step\(closure\).*accumulate_grad_batches.*micro-batch"):
        lightning_like(model, optimizer)
    lightning_like(model, optimizer)  # a second warning would be an error


def test_the_step_with_a_warning_is_the_step_without_to_the_last_bit():
    found, wanted = MLP.model(), MLP.model()
    with pytest.warns(UserWarning, match="accumulated outside"):
        lightning_like(found, SAM(found.parameters(), lr=0.1))
    optimizer = SAM(wanted.parameters(), lr=0.1)
    for t in (1, 3):
        x, y = MLP.batch(seed=t)
        optimizer.step(lambda x=x, y=y: (MLP.loss_fn(wanted(x), y) / 2).backward())
    assert_same(params_of(found), params_of(wanted))


def test_a_backward_before_the_step_is_warned_about():
    model = MLP.model()
    optimizer = SAM(model.parameters(), lr=0.1)
    x, y = MLP.batch()

    def closure():
        loss = MLP.loss_fn(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    MLP.loss_fn(model(x), y).backward()  # on top of what the step left
    with pytest.warns(UserWarning, match=r"optimizer\.zero_grad\(\) before the step"):
        optimizer.step(closure)


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "base": lambda model, optimizer: optimizer.base.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_a_shared_graph_is_no_accumulation(clear):
    """A generator and a discriminator: each one's backward leaves gradients on the other."""
    maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    twins = copy.deepcopy((maker, judge))

    def train(maker, judge, pollute):
        optimizers = [SAM(m.parameters(), lr=0.1, momentum=0.9) for m in (maker, judge)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            z, real = torch.randn(5, 2, generator=generator), torch.randn(5, 3, generator=generator)
            score = [lambda z=z: judge(maker(z)).mean(), lambda z=z, r=real: judge(r).mean() - judge(maker(z)).mean()]
            for one, optimizer, objective in zip((maker, judge), optimizers, score, strict=True):

                def closure(one=one, optimizer=optimizer, objective=objective):
                    clear(one, optimizer)
                    loss = objective()
                    loss.backward()
                    return loss

                if not pollute:
                    maker.zero_grad()
                    judge.zero_grad()
                optimizer.step(closure)

    train(maker, judge, True)
    train(*twins, False)
    for m, twin in zip((maker, judge), twins, strict=True):
        assert_same(params_of(m), params_of(twin))


def bare_closure(model, batch):
    def closure():
        loss = MLP.loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def plain_loop(model):
    optimizer = SAM(model.parameters(), lr=0.1)
    for t in range(3):
        optimizer.step(bare_closure(model, MLP.batch(seed=t)))


def two_optimizers_in_turn(model):
    optimizers = [SAM(model.parameters(), lr=0.1), VaSSO(model.parameters(), lr=0.1)]
    for t in range(6):
        optimizers[t % 2].step(bare_closure(model, MLP.batch(seed=t)))


def freezing_and_freeing(model):
    optimizer = SAM(model.parameters(), lr=0.1)
    for frozen in (False, True, True, False, False):
        model[0].requires_grad_(not frozen)
        optimizer.step(bare_closure(model, MLP.batch()))


def clearing_before(model):
    for to_none in (True, False):
        optimizer = SAM(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(to_none)
            optimizer.step(bare_closure(model, MLP.batch()))


def loading_and_copying(model):
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.step(bare_closure(model, MLP.batch()))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(bare_closure(model, MLP.batch()))
    twin, other = copy.deepcopy((model, optimizer))
    other.step(bare_closure(twin, MLP.batch()))


def accumulating_inside(model):
    optimizer = SAM(model.parameters(), lr=0.1)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            for loss in losses(model):
                loss.backward()

        optimizer.step(closure)


def passes_then_closure(model):
    optimizer = SAM(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in optimizer.passes():
            bare_closure(model, MLP.batch())()
        optimizer.step(bare_closure(model, MLP.batch()))


def losses_of_examples(model):
    optimizer = ESAM(model.parameters(), lr=0.1)
    x, y = MLP.batch()
    for _ in range(2):
        MLP.loss_fn(model(x), y).backward()  # somebody else's; there is nothing in such a closure to clear them with
        optimizer.step(lambda part=slice(None): (model(x[part]) - y[part]).square().mean(1))


def in_meta_learning(model):
    maml = SharpMAML(model, MLP.loss_fn, inner_lr=0.1, inner_steps=1, variant="both", engine="vmap")
    optimizer, tasks = SGD(model.parameters(), lr=0.1), MLP.tasks()
    assert isinstance(tasks, Task)
    for _ in range(3):
        maml.step(tasks, optimizer)


def other_optimizer_before(model):
    base = SGD(model.parameters(), lr=0.1)
    base.step(bare_closure(model, MLP.batch()))
    optimizer = SAM(base)
    optimizer.step(closure_of(MLP, model, MLP.batch()))
    optimizer.step(bare_closure(model, MLP.batch()))


@pytest.mark.parametrize(
    "flow",
    [
        plain_loop,
        two_optimizers_in_turn,
        freezing_and_freeing,
        clearing_before,
        loading_and_copying,
        accumulating_inside,
        passes_then_closure,
        losses_of_examples,
        in_meta_learning,
        other_optimizer_before,
    ],
    ids=lambda f: f.__name__,
)
def test_flows_that_are_right_do_not_warn(flow):
    model = MLP.model()
    home = params_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow(model)
    assert any(not torch.equal(home[k], p) for k, p in params_of(model).items())


def test_a_parameter_without_gradient_stays_without_beside_foreign_ones():
    untouched = next(p for p in PROBLEMS if p.name == "untouched").model()
    optimizer = SAM([*untouched.spare.parameters(), *untouched.body.parameters()], lr=0.1, weight_decay=0.5)
    home = params_of(untouched.spare)
    untouched.spare.weight.sum().backward()
    optimizer.step(lambda: untouched(torch.ones(2, 3, dtype=torch.float64)).mean().backward())
    assert untouched.spare.weight.grad is None
    assert_same(params_of(untouched.spare), home)


# what was in doubt


def test_the_mean_of_validation_gradients_begins_at_the_first_one():
    model = MLP.model()
    optimizer = AgnosticSAM(model.parameters(), lr=0.1, lookahead=False, val_momentum=0.9)
    x, y = MLP.batch(seed=7)
    wanted = torch.autograd.grad(MLP.loss_fn(model(x), y), list(model.parameters()))
    optimizer.step(closure_of(MLP, model, MLP.batch()), closure_of(MLP, model, (x, y)))
    for found, g in zip(optimizer.rule_state["h_v"].values(), wanted, strict=True):
        assert torch.equal(found, g)


@pytest.mark.parametrize(
    ("make", "slot", "weight"),
    [
        (partial(AgnosticSAM, lookahead=False, val_momentum=0.75), "h_v", 0.25),
        (partial(FriendlySAM, decay=0.75), "m", 0.25),
        (partial(VaSSO, theta=0.25), "d", 0.25),
    ],
    ids=["agnostic", "friendly", "vasso"],
)
def test_a_mean_of_a_parameter_that_is_freed_later_begins_at_its_first_gradient(make, slot, weight):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make([a, b], lr=0.0)

    def closure(scale=1.0):
        loss = (scale * torch.tensor([2.0, 4.0]) * (a + b)).sum()
        loss.backward()
        return loss

    for scale, free in ((1.0, False), (2.0, True), (3.0, True)):
        b.requires_grad_(free)
        optimizer.step(partial(closure, scale), **({"val": partial(closure, scale)} if slot == "h_v" else {}))
    g = torch.tensor([2.0, 4.0])
    first = (1 - weight) * ((1 - weight) * g + weight * 2 * g) + weight * 3 * g
    later = (1 - weight) * 2 * g + weight * 3 * g
    torch.testing.assert_close(optimizer.rule_state[slot]["0"], first, rtol=1e-6, atol=0)
    torch.testing.assert_close(optimizer.rule_state[slot]["1"], later, rtol=1e-6, atol=0)


def test_looksam_leaves_alone_what_has_no_gradient_in_a_step_that_reuses():
    a, b = nn.Parameter(torch.tensor([3.0, 1.0])), nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = LookSAM([a, b], lr=0.1, rho=1.0, every=2, reuse=0.5)
    optimizer.step(lambda: (a[0] * b[0] ** 2 + a[1] ** 2 * b[1]).backward())
    g_v = optimizer.rule_state["g_v"]
    assert g_v["0"].abs().min() > 0
    assert g_v["1"].abs().min() > 0
    home, kept, cached = a.detach().clone(), b.detach().clone(), g_v["0"].clone()
    optimizer.step(lambda: a.square().sum().backward())
    assert torch.equal(b, kept)
    assert b.grad is None
    g = 2 * home  # the length of what is added is that of g, whatever the cache holds of b
    wanted = home - 0.1 * (g + 0.5 * g.norm() * cached / cached.norm())
    torch.testing.assert_close(a.detach(), wanted, rtol=1e-6, atol=0)
    assert optimizer.rule_state["g_v"].keys() == {"0", "1"}


def test_fisher_refuses_a_climb_that_would_have_to_be_projected():
    with pytest.raises(ValueError, match=r"expected step_size <= 1/steps with Fisher.*step_size=0.8 and steps=2"):
        Sharp(0.1, Fisher(), steps=2, step_size=0.8)
    with pytest.raises(ValueError, match="expected step_size <= 1/steps"):
        SharpnessAware(SGD(MLP.model().parameters()), Sharp(0.1, Fisher(), step_size=1.5))
    for settings in ({"steps": 3}, {"steps": 3, "step_size": 1 / 3}, {"steps": 49, "step_size": 1 / 49}, {}):
        assert Sharp(0.1, Fisher(), **settings)
    # within the ball by its length, as without step_size
    found, wanted = MLP.model(), MLP.model()
    stepped(found, SharpnessAware(SGD(found.parameters(), 0.1), Sharp(0.1, Fisher(), steps=2, step_size=0.5)))
    stepped(wanted, SharpnessAware(SGD(wanted.parameters(), 0.1), Sharp(0.1, Fisher(), steps=2)))
    assert_same(params_of(found), params_of(wanted))
    assert MultiStepSAM(MLP.model().parameters(), steps=2, step_size=0.8)
    assert FisherSAM(MLP.model().parameters())
