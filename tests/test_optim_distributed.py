"""The live optimizer on two worker processes: DistributedDataParallel, fully_shard, distributed checkpoints.

The workers (workers.py) run once for all tests and only report; what they found is judged here, against loops over the
equations in one process.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from metasam import SAM, SharpnessAware
from metasam.rules import Sharp

from . import references
from .cases import RULES, assert_same, closures_of, distance, live, params_of
from .launch import found_by
from .workers import CASES, KEPT, KINDS, MLP8, PARTS, STEPS, TRACELESS, WORLD, by_parts, piece

distributed = torch.distributed
pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs torch.distributed with gloo"
)

BY_NAME = {c.name: c for c in RULES}
NAMES = [name for name, *_ in CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the two ranks found: ``found(run) -> [of rank 0, of rank 1]``."""
    return found_by("workers", WORLD, tmp_path_factory.mktemp("workers"))


def start_of(problem):
    return params_of(problem.model())


def reference_grad(problem, rank=None):
    """The gradient of one worker's part of the batch; of the whole for None."""
    batches = [b if rank is None else piece(b, rank) for b in (problem.batch(), problem.batch(seed=7))]
    return references.gradient_of(problem.model(), problem.loss_fn, *batches[0], val=batches[1])


def mean(trees):
    return {k: sum(t[k] for t in trees) / len(trees) for k in trees[0]}


# DistributedDataParallel


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [k for k in KINDS if not k.endswith("-views")])
def test_workers_have_the_same_weights_after_every_step(found, name, kind):
    of_ranks = found(f"local/{name}/{kind}")
    assert len(of_ranks[0]) == STEPS
    for one, other in zip(*of_ranks, strict=True):
        assert_same(one, other)
    assert distance(of_ranks[0][-1], start_of(KINDS[kind][0])) > 1e-4
    # gradients that are views of DDP's buckets are overwritten by the next backward
    for of_rank in found(f"local/{name}/{kind}-views"):
        for one, other in zip(of_rank, of_ranks[0], strict=True):
            assert_same(one, other)


def test_a_bucket_of_one_tensor_is_copied_as_well(found):
    for plain, views in found("one-bucket"):
        for one, other in zip(plain, views, strict=True):
            assert_same(one, other)


# directions that are the gradients at the points of the workers: the step is the mean of theirs
OWN_POINTS = [
    n
    for n in BY_NAME
    if n.startswith(("plain", "sam", "asam", "usam", "multistep", "fisher", "friendly", "vasso", "agnostic"))
    or n in ("random", "rwp", "esam", "sparse", "sparse-dynamic")
]
SYNCHRONISED = ["plain", "gsam", "looksam", "wsam", "wsam-coupled", "momentum", "rwp"]


@pytest.mark.parametrize("name", OWN_POINTS)
def test_each_worker_climbs_on_its_own_part_and_the_mean_descends(found, name):
    w, case, memories = start_of(MLP8), BY_NAME[name], [{} for _ in range(WORLD)]
    for n in range(STEPS):
        w = mean([case.reference(reference_grad(MLP8, r), w, 0.1, memories[r]) for r in range(WORLD)])
        assert distance(found(f"local/{name}/mlp")[0][n], w) < 1e-12


@pytest.mark.parametrize("keep", [0.5, None])
def test_lookbehind_climbs_on_its_own_part_first(found, keep):
    w, grads = start_of(MLP8), [reference_grad(MLP8, r) for r in range(WORLD)]
    rho, name = (0.1, "lookbehind") if keep else (0.3, "lookbehind-adaptive")
    for n in range(STEPS):
        climbs, fast, ways = [g(w) for g in grads], w, []
        points = [w] * WORLD
        for _ in range(2):
            points = [references.plus(p, references.unit(c), rho) for p, c in zip(points, climbs, strict=True)]
            g = mean([grad(p) for grad, p in zip(grads, points, strict=True)])
            climbs = [g] * WORLD
            fast = references.plus(fast, g, -0.1)
            ways.append({k: fast[k] - w[k] for k in w})
        cosine = {k: torch.dot(ways[0][k].flatten(), v.flatten()) for k, v in ways[1].items()}
        kept = {k: keep or (c / ways[0][k].norm() / ways[1][k].norm() + 1) / 2 for k, c in cosine.items()}
        w = {k: w[k] + kept[k] * ways[1][k] for k in w}
        assert distance(found(f"local/{name}/mlp")[0][n], w) < 1e-12


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_gradients_that_enter_the_descent_are_synchronised(found, name):
    for local, whole in zip(found(f"local/{name}/mlp")[0], found(f"global/{name}")[0], strict=True):
        assert_same(local, whole)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in SYNCHRONISED])
def test_local_and_global_ascent_are_not_the_same(found, name):
    assert distance(found(f"local/{name}/mlp")[0][-1], found(f"global/{name}")[0][-1]) > 1e-6


@pytest.mark.parametrize("name", [c.name for c in RULES])
def test_a_global_ascent_is_that_of_one_process_on_the_whole_batch(found, name):
    case = BY_NAME[name]
    wanted = live(MLP8, case.rule, MLP8.batch(), val=MLP8.batch(seed=7), base=case.base)
    for of_rank in found(f"global/{name}"):
        assert distance(of_rank[-1], params_of(wanted)) < 1e-12


def test_global_m_sam_shares_an_eps_among_m_examples_of_each_worker(found):
    x, y = MLP8.batch()
    w = start_of(MLP8)
    parts = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]
    grads = [references.gradient_of(MLP8.model(), MLP8.loss_fn, x[p], y[p]) for p in parts]
    for _ in range(STEPS):
        w = mean([references.sam(g, w, 0.1, {}, rho=0.2) for g in grads])
    for of_rank in found("global/m-sam"):
        assert distance(of_rank[-1], w) < 1e-12


def test_local_m_sam_is_a_loop_over_the_parts_of_all_workers(found):
    x, y = MLP8.batch()
    w = start_of(MLP8)
    grads = [references.gradient_of(MLP8.model(), MLP8.loss_fn, x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    for _ in range(STEPS):
        w = mean([references.sam(g, w, 0.1, {}, rho=0.2) for g in grads])
    for of_rank in found("local/m-sam/mlp"):
        assert distance(of_rank[-1], w) < 1e-12


@pytest.mark.parametrize("name", ["sam", "vasso"])
def test_parallel_modules_are_found_without_a_model(found, name):
    for of_rank in found(f"unnamed/{name}"):
        for one, other in zip(of_rank, found(f"local/{name}/mlp")[0], strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("name", ["sam", "vasso"])
def test_static_graphs_climb_globally_or_are_refused(found, name):
    for of_rank in found(f"static/{name}/local", text=True):
        assert "leave it out, or climb with ascent='global'" in of_rank
    for of_rank in found(f"static/{name}/global"):
        assert_same(of_rank[-1], found(f"global/{name}")[0][-1])


def test_steps_without_a_closure(found):
    for of_rank in found("without-closure"):
        for named in (True, False):
            assert_same(of_rank[f"passes/{named}"], found("local/sam/mlp")[0][-1])
            assert_same(of_rank[f"phases-local/{named}"], found("local/sam/mlp")[0][-1])
            assert_same(of_rank[f"phases/{named}"], found("global/sam")[0][-1])


def test_closures_may_accumulate_without_synchronising(found):
    for of_rank in found("accumulation"):
        for one, other in zip(of_rank, found("local/sam/mlp")[0], strict=True):
            assert distance(one, other) < 1e-14


def assert_skipped(of_ranks, times=1):
    """Nothing moved in the spoiled step, on any rank, and the next step goes on, alike."""
    for of_rank in of_ranks:
        assert_same(of_rank["after"], of_rank["before"])
        assert of_rank["skipped"] == of_rank["skipped at last"] == times
        assert_same(of_rank["next"], of_ranks[0]["next"])
    assert distance(of_ranks[0]["next"], of_ranks[0]["before"]) > 1e-5


SPOILED = [(c.name, before, i) for c in RULES for before, i in c.passes]


@pytest.mark.parametrize(("name", "before", "i"), SPOILED)
def test_an_infinite_pass_of_one_worker_skips_the_step_on_all(found, name, before, i):
    of_ranks = found(f"spoiled/{name}/{before}/{i}")
    assert_skipped(of_ranks)
    for of_rank in of_ranks:
        assert of_rank["momentum"].keys() == of_rank["momentum after"].keys() != set()
        assert_same(of_rank["momentum after"], of_rank["momentum"])


@pytest.mark.parametrize("name", TRACELESS)
def test_an_infinite_pass_that_leaves_no_trace_in_the_direction(found, name):
    """Of a loss whose gradient is the same everywhere, only what the worker remembers, or counted, is spoiled."""
    of_ranks = found(f"traceless/{name}")
    if name in ("sam", "sparse"):  # nothing that it spoiled is kept
        for of_rank in of_ranks:
            assert of_rank["skipped"] == 0
            assert_same(of_rank["next"], of_ranks[0]["next"])
            assert distance(of_rank["after"], of_rank["before"]) > 1e-5
    else:
        assert_skipped(of_ranks)


def test_a_scaler_halves_on_all_workers_alike(found):
    for of_rank in found("scaler"):
        assert of_rank["scales"] == [8.0, 4.0, 4.0]
        assert of_rank["skipped"] == 1
        assert_same(of_rank["weights"], found("scaler")[0]["weights"])


def test_sparse_rows_of_one_worker_do_not_move_its_weights_apart(found):
    for one, other in zip(*found("sparse-rows"), strict=True):
        assert_same(one, other)


def test_an_exception_restores_the_weights_and_propagates(found):
    for rank, of_rank in enumerate(found("exception")):
        assert of_rank["both"]["said"] == "'of the user'"
        assert_same(of_rank["both"]["after"], of_rank["both"]["home"])
        assert distance(of_rank["both"]["moved"][0], of_rank["both"]["home"]) > 1e-3
        if rank == 1:
            assert of_rank["one"]["said"] == "'of the user'"
            assert_same(of_rank["one"]["after"], of_rank["one"]["home"])


def test_a_zero_redundancy_base(found):
    wanted = live(MLP8, Sharp(0.1), MLP8.batch(), base=partial(torch.optim.Adam, lr=0.01))
    for of_rank in found("zero"):
        assert distance(of_rank[-1], params_of(wanted)) < 1e-12


def test_ascents_are_checked():
    with pytest.raises(ValueError, match="expected ascent to be 'local' or 'global', got 'worker'"):
        SAM(nn.Linear(2, 1).parameters(), lr=0.1, ascent="worker")
    assert SAM(nn.Linear(2, 1).parameters(), lr=0.1, ascent="global").ascent == "global"


# fully_shard


SHARDED = [c.name for c in RULES if not c.name.startswith("sparse")]


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters_step_as_in_one_process(found, name):
    case = BY_NAME[name]
    wanted = live(MLP8, case.rule, MLP8.batch(), val=MLP8.batch(seed=7), base=case.base)
    for of_rank in found(f"sharded/{name}"):
        assert distance(of_rank[-1], params_of(wanted)) < 1e-12


@pytest.mark.parametrize("name", ["m-sam", "esam-select"])
def test_sharded_parameters_and_parts_of_a_batch(found, name):
    for of_rank in found(f"sharded/{name}"):
        assert distance(of_rank[-1], found(f"global/{name}")[0][-1]) < 1e-12


@pytest.mark.parametrize("name", ["sparse", "sparse-dynamic", "sparse-samples"])
def test_rules_that_need_whole_tensors_say_so(found, name):
    for of_rank in found(f"sharded/{name}", text=True):
        assert "ValueError: SparseSAM chooses among the entries of all tensors" in of_rank


@pytest.mark.parametrize("name", ["sam", "wsam", "lookbehind-adaptive"])
def test_sharded_gradients_are_clipped_by_their_whole_norm(found, name):
    model = MLP8.model()
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), 0.1), BY_NAME[name].rule, model=model, clip=0.3)
    for _ in range(STEPS):
        optimizer.step(**closures_of(MLP8, model, MLP8.batch()))
    assert distance(params_of(model), found(f"sharded/{name}")[0][-1]) > 1e-4, "nothing was clipped"
    for of_rank in found(f"sharded-clip/{name}"):
        assert distance(of_rank[-1], params_of(model)) < 1e-12


def test_weights_gathered_for_an_evaluation_are_not_used_displaced(found):
    for fresh, *others in found("sharded-after-evaluation"):
        for other in others:
            assert_same(other, fresh)


@pytest.mark.parametrize("name", ["sam", "vasso", "lookbehind", "wsam", "gsam"])
@pytest.mark.parametrize("i", [0, 1])
def test_an_infinite_pass_skips_the_step_of_all_shards(found, name, i):
    assert_skipped(found(f"sharded-spoiled/{name}/{i}"))


def test_arithmetic_of_tensors_spread_over_processes(found):
    a, b = torch.arange(5.0), torch.arange(1.0, 6.0)
    for of_rank in found("is_finite"):
        entries = {k: v for k, v in of_rank.items() if isinstance(k, tuple)}
        assert len(entries) == 24
        assert all(finite == (bad == 1.0) for (_, _, bad, _), finite in entries.items())
        assert of_rank["dot"] == 3 * float(a @ b)
        assert of_rank["norm"] == pytest.approx(float(2 * (a @ a) + b @ b), rel=1e-6)
        assert of_rank["fused"] == pytest.approx(of_rank["norm"], rel=1e-6)
        assert torch.equal(of_rank["sum"][0], 3 * a)
        assert torch.equal(of_rank["sum"][1], a + 2 * b)


def test_flat_parameters_are_refused(found):
    for of_rank in found("flat", text=True):
        assert of_rank.count("expected parameters of fully_shard (FSDP2), got those of FullyShardedDataParallel") == 2


# checkpoints


def kept():
    for name in KEPT:
        others = {"sam": ["momentum", "sgd"], "vasso": ["momentum", "sgd"], "momentum": ["momentum"]}
        for kind in ("adamw", *others.get(name, [])):
            yield from ((name, kind, "dcp", where) for where in ("ddp", "sharded"))
            yield name, kind, "own", "ddp"
            if kind == "adamw":
                yield from ((name, kind, "full", where) for where in ("ddp", "sharded"))


@pytest.mark.parametrize(
    ("name", "kind", "how", "where"), [k for k in kept() if not (k[0] == "sparse" and k[3] == "sharded")]
)
def test_a_checkpoint_goes_on_to_the_last_bit(found, name, kind, how, where):
    for of_rank in found(f"kept/{name}/{kind}/{how}/{where}"):
        assert_same(of_rank["found"], of_rank["wanted"])
        assert distance(of_rank["found"], start_of(MLP8)) > 1e-4
        assert of_rank["counts"][0] == of_rank["counts"][1] != {}
        assert of_rank["skipped"] == 0


def test_a_flattened_state_is_told_to_have_lost_the_rules_memory(found):
    for of_rank in found("flattened"):
        assert any("flatten_optimizer_state_dict=True drops it" in text for text in of_rank)


def test_tensors_missing_from_a_rules_memory_are_an_error():
    model = MLP8.model()
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), 0.1), BY_NAME["vasso"].rule)
    optimizer.step(**closures_of(MLP8, model, MLP8.batch()))
    state = optimizer.state_dict()
    state["state"] = {}
    with pytest.raises(ValueError, match=r"expected 4 tensors 'rule\.d' in the state of the parameters, got none"):
        optimizer.load_state_dict(state)


def test_a_step_without_closure_still_explains_once_there_is_something_to_lose():
    model = MLP8.model()
    optimizer = SAM(model.parameters(), lr=0.0, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=r"expected step\(closure\)"):
        optimizer.step()


def test_parts_are_those_of_the_problem():
    """The workers' closures by parts and the whole loss are one loss."""
    model, (x, y) = MLP8.model(), MLP8.batch()
    losses = by_parts(MLP8, model, (x, y))()
    assert losses.shape == (8,)
    assert len(PARTS) == 3
    torch.testing.assert_close(losses.mean(), MLP8.loss_fn(model(x), y), rtol=1e-14, atol=0)
