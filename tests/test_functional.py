"""Tensors lent to a module for a call: the output of ``torch.func.functional_call``, and a module left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from metasam.functional import call, places


class Net(nn.Module):
    """Two layers, and a buffer that has to do with the output."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) + self.shift)


class Exchanging(Net):
    """Exchanges during a call what modules hold their tensors in, and the buffer."""

    def forward(self, x):
        self.head._parameters = dict(self.head._parameters)
        self.body._buffers = dict(self.body._buffers)
        found = super().forward(x)
        self.shift = self.shift + 1
        return found


class Failing(Net):
    def forward(self, x):
        super().forward(x)
        raise ArithmeticError("no such luck")


class Few(Net):
    """Names some of its parameters only, as a wrapper that trains few of them may."""

    def named_parameters(self, *args, **kwargs):
        return ((k, p) for k, p in super().named_parameters(*args, **kwargs) if k.startswith("head"))


class Renaming(Net):
    def named_parameters(self, *args, **kwargs):
        return ((f"net.{k}", p) for k, p in super().named_parameters(*args, **kwargs))


def held(model):
    """Every tensor that a module holds, and where."""
    return [
        (id(m), kind, k, t)
        for m in model.modules()
        for kind in ("_parameters", "_buffers")
        for k, t in getattr(m, kind).items()
    ]


def unchanged(model, before, values):
    now = held(model)
    assert [p[:3] for p in now] == [p[:3] for p in before]
    assert all(a[3] is b[3] for a, b in zip(now, before, strict=True))
    assert all(t is None or torch.equal(t, v) for (*_, t), v in zip(now, values, strict=True))


def lent(model):
    torch.manual_seed(1)
    return {k: torch.randn_like(t) for k, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("kind", [Net, Exchanging, Few, Renaming])
def test_a_call_is_that_of_functional_call_and_leaves_the_module_alone(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 3)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    tensors, before = lent(model), held(model)
    values = [None if t is None else t.clone() for *_, t in before]
    own = {k.removeprefix("net."): t for k, t in tensors.items()}
    wanted = functional_call(plain, own, (x,))
    assert not torch.allclose(wanted, plain(x))
    for at in (None, places(model)):
        for _ in range(2):
            assert torch.equal(call(model, tensors, x, at), wanted)
            unchanged(model, before, values)


def test_after_an_error_the_module_is_as_it_was():
    model = Failing()
    tensors, before = lent(model), held(model)
    values = [None if t is None else t.clone() for *_, t in before]
    with pytest.raises(ArithmeticError, match="no such luck"):
        call(model, tensors, torch.randn(4, 3))
    unchanged(model, before, values)


def test_two_modules_that_share_what_they_hold_their_tensors_in():
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, copy.copy(first))
    assert model[0]._parameters is model[1]._parameters
    tensors, before, x = lent(model), held(model), torch.randn(4, 3)
    values = [t.clone() for *_, t in before]
    one = nn.functional.linear(x, tensors["0.weight"], tensors["0.bias"])
    assert torch.equal(call(model, tensors, x), nn.functional.linear(one, tensors["0.weight"], tensors["0.bias"]))
    unchanged(model, before, values)


def test_further_names_of_a_tensor_have_no_place_of_their_own():
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    tied.register_buffer("also", tied[0].weight)
    assert {k: len(at) for k, at in places(tied).items()} == {"also": 0, "0.weight": 3, "1.weight": 0}
    w, x = torch.randn(3, 3), torch.randn(2, 3)
    wanted = x @ w.T @ w.T
    assert torch.allclose(call(tied, {"0.weight": w}, x), wanted)
    assert torch.allclose(call(tied, {"0.weight": w, "1.weight": torch.zeros(3, 3)}, x), wanted)


def test_a_name_that_there_is_not():
    model = Net()
    before = held(model)
    with pytest.raises(KeyError, match=r"names of the model's tensors \(.*head.*got 'tail.weight'"):
        call(model, {"head.weight": torch.zeros(2, 3), "tail.weight": torch.zeros(2, 3)}, torch.randn(4, 3))
    unchanged(model, before, [None if t is None else t.clone() for *_, t in before])
