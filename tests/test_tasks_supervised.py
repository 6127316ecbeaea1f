"""Supervised data: streams against a plain loop, exact noise, disjoint parts, and what each source refuses."""

import json
import subprocess
import sys

import pytest
import torch

from metasam.tasks import Supervised
from metasam.tasks.counter import bits, task_keys
from metasam.tasks.supervised import digits

pytest.importorskip("sklearn")


def numbered(n=100, classes=5, **options):
    """A data set whose inputs are the numbers of its examples, in all three splits together."""
    x, y = torch.arange(n + 20.0).view(-1, 1, 1, 1), torch.arange(n + 20) % classes
    parts = [(x[part], y[part]) for part in (slice(n), slice(n, n + 10), slice(n + 10, None))]
    return Supervised(*parts, **{"batch_size": 16, "seed": 3, **options})


def drawn(data, steps, side="support"):
    return [getattr(data.batch(i), side)[0].flatten().long().tolist() for i in steps]


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_the_stream_is_what_a_plain_loop_makes(holdout):
    data = numbered(holdout=holdout)
    kept = [int(v) for x, _ in data.examples("train") for v in x.flatten()]
    query = sorted(set(range(100)) - set(kept)) if holdout else kept
    assert len(kept) == (80 if holdout else 100)
    loops = {"support": (kept, 16, 0x73747201), "query": (query, 4, 0x73747202)}
    for side, (pool, size, stream) in loops.items():
        expected = []
        for epoch in range(4):
            words = bits(task_keys(3, stream, [epoch])[0], len(pool)).tolist()
            order = [x for _, x in sorted(zip(words, pool, strict=True))]
            expected += [order[k * size : (k + 1) * size] for k in range(len(pool) // size)]
        count = min(len(expected), 15)
        assert drawn(data, range(count), side) == expected[:count]
    for i in (0, 7):
        for x, y in (data.batch(i).support, data.batch(i).query):
            assert torch.equal(x.flatten().long() % 5, y)


def test_steps_in_any_order_and_any_process():
    code = """
import torch
from metasam.tasks.supervised import digits
data = digits(per_class=20, noise=0.3, holdout=0.1, augment="crop_flip", batch_size=16, seed=5)
weigh = lambda t: float((t.double().flatten() * torch.arange(t.numel())).sum())
print([data.batch(i).map(weigh) for i in (9, 2)])
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""
    data, other = (digits(per_class=20, augment="crop_flip", batch_size=16, seed=5) for _ in range(2))
    forward = [data.batch(i) for i in range(30)]
    backward = [other.batch(i) for i in reversed(range(30))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert torch.equal(a.support[0], b.support[0])
        assert torch.equal(a.query[0], b.query[0])
    changed = digits(per_class=20, augment="crop_flip", batch_size=16, seed=6)
    assert not torch.equal(changed.batch(0).support[0], forward[0].support[0])


def test_facts_are_json():
    assert json.loads(json.dumps(digits(holdout=0.1).describe()))["sizes"] == {
        "train": 720, "validation": 200, "test": 797, "holdout": 80,
    }  # fmt: skip
