"""Arithmetic on parameters, in both of its bodies."""

from __future__ import annotations

import itertools

import pytest
import torch

from metasam import tree

from .cases import assert_same, distance

A = {"u": torch.tensor([1.0, -2.0]), "v": torch.tensor([[3.0]]), "a": torch.tensor(4.0)}
B = {"v": torch.tensor([[5.0]]), "u": torch.tensor([0.5, 0.25]), "b": torch.tensor([7.0])}

each_body = pytest.mark.parametrize("fused", [False, True], ids=["each", "fused"])


@pytest.fixture
def body(fused):
    with tree.fused(fused):
        yield


@each_body
@pytest.mark.usefixtures("body")
def test_add_keeps_the_union_of_keys(fused):
    wanted = {"u": torch.tensor([1.5, -1.75]), "v": torch.tensor([[8.0]]), "a": A["a"], "b": B["b"]}
    assert_same(tree.add(A, B), wanted)
    assert list(tree.add(A, B)) == ["u", "v", "a", "b"]
    assert_same(tree.add(A, {}), A)
    assert_same(tree.add({}, A), A)
    assert tree.add({}, {}) == {}


@each_body
@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("minus", [-1, -1.0, torch.tensor(-1.0)], ids=repr)
def test_add_of_minus_one_is_a_difference(fused, minus):
    difference = {"u": torch.tensor([0.5, -2.25]), "v": torch.tensor([[-2.0]]), "a": A["a"], "b": -B["b"]}
    assert_same(tree.add(A, B, minus), difference)


@each_body
@pytest.mark.usefixtures("body")
def test_mul_and_dot_keep_the_intersection(fused):
    assert_same(tree.mul(A, B), {"u": torch.tensor([0.5, -0.5]), "v": torch.tensor([[15.0]])})
    assert tree.dot(A, B) == 0.5 - 0.5 + 15
    assert tree.dot({"u": A["u"]}, {"v": B["v"]}) == 0


@each_body
@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0), {"u": 2.0, "v": torch.tensor(2.0), "a": 2}], ids=str)
def test_scale_takes_a_number_a_tensor_or_one_by_key(fused, factor):
    assert_same(tree.scale(A, factor), {k: v * 2 for k, v in A.items()})
    assert tree.scale({}, 2.0) == {}


@each_body
@pytest.mark.usefixtures("body")
def test_nothing_is_changed_in_place(fused):
    tree.add(A, B), tree.mul(A, B), tree.scale(A, 3.0), tree.squared_norm(A), tree.is_finite(A)
    assert {t._version for t in (*A.values(), *B.values())} == {0}


@each_body
@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_float32_at_least(fused, dtype):
    big = {"u": torch.full((300,), 200.0, dtype=dtype), "v": torch.full((2, 50), 200.0, dtype=dtype)}
    square = tree.squared_norm(big)
    assert square.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(square) == pytest.approx(400 * 200.0**2, rel=1e-6)


@each_body
@pytest.mark.usefixtures("body")
def test_mixed_dtypes_keep_their_own(fused):
    mixed = {"u": torch.ones(2, dtype=torch.bfloat16), "v": torch.ones(2)}
    factor = 1 / tree.squared_norm(mixed).sqrt()
    assert {k: v.dtype for k, v in tree.scale(mixed, factor).items()} == {"u": torch.bfloat16, "v": torch.float32}
    assert float(tree.squared_norm(tree.scale(mixed, factor))) == pytest.approx(1.0)


def test_fused_ends_with_its_context():
    with tree.fused(), pytest.raises(KeyError), tree.fused(False):
        raise KeyError
    assert not tree._fused.get()


def test_both_bodies_agree():
    generator = torch.Generator().manual_seed(0)
    trees = [{k: torch.randn(n, generator=generator) for k, n in {"u": 5, "v": 7, "w": 1}.items()} for _ in range(2)]
    results = []
    for on in (True, False):
        with tree.fused(on):
            a, b = trees
            results.append((tree.add(a, b), tree.mul(a, b), tree.scale(a, 0.3), {"n": tree.squared_norm(a)}))
    for one, two in zip(*results, strict=True):
        assert distance(one, two) < 1e-6


OF_TASKS = {
    "dot": lambda a, b: {"": tree.dot(a, b)},
    "squared_norm": lambda a, b: {"": tree.squared_norm(a)},
    "scale": lambda a, b: tree.scale(a, tree.dot(a, b)),
    "scale by key": lambda a, b: tree.scale(a, {k: i * tree.dot(a, b) for i, k in enumerate(a, 1)}),
    "add": lambda a, b: tree.add(a, b, tree.squared_norm(b)),
    "add of a number": lambda a, b: tree.add(a, b, -0.3),
    "mul": tree.mul,
    "reject": tree.reject,
    "average": lambda a, b: tree.average(a, b, 0.3),
    "normalised": lambda a, b: tree.scale(b, 0.1 * tree.normalizer(tree.squared_norm(b))),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OF_TASKS)
def test_stacked_is_a_loop_over_tasks(name, dtype):
    if dtype.is_complex and name == "reject":
        pytest.skip("no rule takes complex parameters apart")
    generator = torch.Generator().manual_seed(0)
    shapes = [{"scalar": (), "same": (4,), "v": (2, 3, 2)}, {"v": (2, 3, 2), "scalar": (), "other": (3,), "same": (4,)}]
    # as many tasks as "same" has entries, which would broadcast without a word
    a, b = ({k: torch.randn(4, *n, generator=generator, dtype=dtype) for k, n in some.items()} for some in shapes)
    with tree.stacked():
        found = OF_TASKS[name](a, b)
    rows = [[{k: v[i] for k, v in t.items()} for t in (a, b)] for i in range(4)]
    wanted = tree.stack([OF_TASKS[name](*row) for row in rows])
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in wanted.items()}
    precision = torch.finfo(dtype).eps if dtype != torch.bfloat16 or name not in ("dot", "squared_norm") else 1e-6
    for k in wanted:
        torch.testing.assert_close(found[k], wanted[k], rtol=8 * precision, atol=8 * precision)


def test_stacked_ends_with_its_context():
    with pytest.raises(KeyError), tree.stacked():
        raise KeyError
    assert not tree._stacked.get()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_normalizer_is_one_over_the_norm(size):
    square = torch.tensor(size**2, dtype=torch.float64)
    assert float(tree.normalizer(square)) * size == pytest.approx(1.0, rel=2e-10)


def test_normalizer_fades_to_zero_with_a_derivative_that_stays_finite():
    g = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    unit = g * tree.normalizer(g.square().sum())
    slopes = torch.autograd.grad(unit.sum(), g)[0]
    assert unit.abs().max() == 0
    assert slopes.abs().max() == 0
    tiny = torch.full((3,), 1e-12, dtype=torch.float64)
    assert (tiny * tree.normalizer(tiny.square().sum())).abs().max() < 1e-3


@each_body
@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_is_finite_finds_one_entry(fused, value):
    spoiled = {**A, "w": torch.tensor([1.0, value, 0.0])}
    assert tree.is_finite(A)
    assert not tree.is_finite(spoiled)


def test_is_finite_of_little_and_of_large():
    assert tree.is_finite({})
    assert tree.is_finite({"empty": torch.zeros(0), "u": torch.ones(1)})
    assert tree.is_finite({"u": torch.full((4,), 3e38), "v": torch.full((4,), 6e4, dtype=torch.float16)})


@each_body
@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_parallel_up_to_rounding_leaves_nothing_orthogonal(fused, dtype):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        b = {k: torch.randn(n, generator=generator).to(dtype) for k, n in (("u", 500), ("v", 7))}
        for factor in (1.0, 1 / 3, -7.0):
            rest = tree.reject(tree.scale(b, factor), b)
            assert_same(rest, {k: torch.zeros_like(v) for k, v in b.items()})
        a = {k: torch.randn(n, generator=generator).to(dtype) for k, n in (("u", 500), ("v", 7))}
        rest = tree.reject(a, b)
        assert tree.dot(rest, b).abs() < 50 * torch.finfo(dtype).eps * tree.squared_norm(b)
        assert tree.squared_norm(rest) > 0.9 * tree.squared_norm(a)


def test_rejecting_what_has_no_key_or_no_length_leaves_everything():
    assert_same(tree.reject(A, {}), A)
    assert tree.reject({}, {}) == {}
    assert_same(tree.reject(A, tree.scale(A, 0.0)), A)
    assert_same(tree.reject({"u": A["u"]}, {"v": A["v"]}), {"u": A["u"], "v": torch.zeros(1, 1)})


@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("sparse", list(itertools.product((False, True), repeat=2)))
def test_sparse_and_dense_tensors_are_added_in_either_order(sparse, alpha):
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    one, two = (v.to_sparse(1) if s else v for v, s in zip((a, b), sparse, strict=True))
    found = tree.add({"w": one}, {"w": two}, alpha)["w"]
    assert torch.allclose(found.to_dense(), a + alpha * b, rtol=1e-14)
